"""Training a hybrid's new mixers to give what its teacher's attention gives.

All weights of the hybrid but those of the new mixers are the teacher's. So the teacher is the
hybrid itself with its attention put back, and one pass of it teaches all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ssmzoo.data.rows import Rows
from ssmzoo.recipe import AlignSection
from ssmzoo.training.objectives import CausalLM

if TYPE_CHECKING:
    from torch import Tensor, nn


class Align(CausalLM):
    """Learn the outputs of a teacher's mixers, its last hidden states, or its logits.

    The loss is a mean over tokens: of the squared errors of a layer's outputs, summed over layers
    and averaged over features; of those of the last hidden states; or of the divergence
    ``T^2 KL(teacher || student)`` of the words at temperature T.

    Args:
        model: The hybrid.
        section: What is learned.
        teachers: The teacher's mixer of each layer that has a new one.
        packs: As :class:`CausalLM`.
    """

    metric_names = ("loss",)
    sums = 2

    def __init__(
        self,
        model: nn.Module,
        section: AlignSection,
        teachers: Mapping[int, nn.Module],
        *,
        packs: bool,
    ) -> None:
        super().__init__(model, packs=packs)
        self.options.pop("skip_logits", None)
        layers: Any = model.get_submodule("model.layers")
        self._taught = [(layers[index], teacher) for index, teacher in teachers.items()]
        self._match, self._temperature = section.match, section.temperature
        if section.match == "mixers":
            self.loss_name = "squared error of the mixers' outputs"
        elif section.match == "hidden":
            self.loss_name = "squared error of the last hidden states"
        else:
            self.loss_name = "divergence in nats per token"

    def batch(self, part: Rows) -> dict[str, Tensor]:
        """Return a model's arguments; nothing is predicted."""
        batch = super().batch(part)
        del batch["labels"]
        return batch

    def targets(self, part: Rows) -> int:
        """Return how many tokens the models read."""
        return part.input_ids.size

    def loss_of(
        self, forward: Callable[..., Any], piece: dict[str, Tensor], part: int, targets: int
    ) -> Tensor:
        """Return the mean of the errors over a part's tokens."""
        import torch
        from torch.nn import functional as F

        if self._match == "mixers":
            with self._beside() as errors:
                output = forward(piece, logits_to_keep=1)
            loss = torch.stack(errors).sum()
            # sharded layers need a gradient at their outputs, here of zeros
            reached = output.logits.requires_grad
            return loss + 0.0 * output.logits.float().sum() if reached else loss
        read = {"output_hidden_states": True, "logits_to_keep": 1}
        read = read if self._match == "hidden" else {}
        with torch.no_grad(), self._in_place():
            wanted = forward(piece, **read)
        got = forward(piece, **read)
        if self._match == "hidden":
            return F.mse_loss(_exact(got.hidden_states[-1]), _exact(wanted.hidden_states[-1]))
        student, teacher = (
            F.log_softmax(_exact(x.logits) / self._temperature, dim=-1) for x in (got, wanted)
        )
        loss = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()
        return self._temperature**2 * loss

    def evaluate(self, forward: Callable[..., Any], part: Rows) -> Tensor:
        """Return the sums of the losses over a part, and the number of its tokens."""
        import torch

        # a process that has no part left reads rows without labels, which do not count
        count = self.targets(part) if part.targets else 0
        loss = self.loss_of(forward, self.batch(part), 0, count)
        return torch.stack([loss.double() * count, loss.new_tensor(count, dtype=torch.float64)])

    def metrics(self, sums: Tensor) -> dict[str, float | int]:
        """Return a validation's metrics from its sums."""
        loss, tokens = sums.tolist()
        return {"loss": loss / tokens, "targets": int(tokens)}

    @contextmanager
    def _beside(self) -> Iterator[list[Tensor]]:
        """Let a pass go on with the teacher's outputs; yield each new mixer's mean error."""
        from torch.distributed.fsdp import FSDPModule

        errors: list[Tensor] = []
        hooks = [
            layer.mixer.register_forward_hook(
                partial(_compare, teacher, errors, isinstance(layer, FSDPModule))
            )
            for layer, teacher in self._taught
        ]
        try:
            yield errors
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Give the layers the teacher's mixers for a while."""
        new = [(layer.mixer, layer.reads_residual) for layer, _ in self._taught]
        try:
            for layer, teacher in self._taught:
                layer.mixer = teacher.to(layer.norm.weight.device)
                layer.reads_residual = teacher.reads_residual
            yield
        finally:
            for (layer, _), (mixer, reads) in zip(self._taught, new, strict=True):
                layer.mixer, layer.reads_residual = mixer, reads


def _compare(
    teacher: nn.Module,
    errors: list[Tensor],
    sharded: bool,
    mixer: nn.Module,
    given: tuple[Any, ...],
    out: Tensor,
) -> Tensor:
    """Add the error of a mixer's output to a list; return the teacher's output in its place."""
    import torch
    from torch.nn import functional as F

    x, _, packing = given
    with torch.no_grad():
        wanted = teacher.to(x.device)(x, packing=packing)
    errors.append(F.mse_loss(_exact(out), _exact(wanted)))
    # FSDP2 gathers a layer's weights for the backward when a gradient comes to the layer's output
    return wanted + 0.0 * out if sharded else wanted


def _exact(x: Tensor) -> Tensor:
    import torch

    return x.to(torch.promote_types(torch.float32, x.dtype))


def load_teachers(model: Any, teacher: str, *, check: bool) -> dict[int, nn.Module]:
    """Return the mixers of a teacher where a hybrid has others.

    Args:
        model: The hybrid.
        teacher: A folder or a Hub id.
        check: Check that all other weights are equal.

    Raises:
        LookupError: There is no such teacher.
        ValueError: It is no Transformer that a hybrid can hold, it has all of the model's mixers,
            or other weights than the model outside of them.
    """
    from ssmzoo.checkpoints.convert import load_hybrid

    if model.config.model_type != "ssmzoo_hybrid":
        raise ValueError(
            "model.init_from must be a hybrid that 'ssmzoo prime' wrote to align it, got a model "
            f"of type {model.config.model_type!r}"
        )
    network: Any = load_hybrid(teacher, "float32")
    theirs = [layer.mixer for layer in network.model.layers]
    ours = [layer.mixer for layer in model.model.layers]
    if len(theirs) != len(ours):
        raise ValueError(
            f"align.teacher must have the model's {len(ours)} layers, got {len(theirs)} in "
            f"{teacher!r}"
        )
    pairs = enumerate(zip(theirs, ours, strict=True))
    taught = {i: old for i, (old, new) in pairs if not _alike(old, new)}
    if not taught:
        raise ValueError(
            f"align.teacher must have other mixers than the model, got {teacher!r}, which has the "
            "same in every layer; model.init_from is a model that 'ssmzoo prime' wrote"
        )
    if check:
        _require_equal(model, network, teacher, taught)
    return taught


def _require_equal(
    model: nn.Module, network: nn.Module, teacher: str, taught: Iterable[int]
) -> None:
    """Check that a hybrid has its teacher's weights outside of its new mixers."""
    mixers = tuple(f"model.layers.{index}.mixer." for index in taught)
    known = dict(model.named_parameters())
    for name, weight in network.named_parameters():
        if name.startswith(mixers):
            continue
        if name not in known or not known[name].equal(weight.to(known[name])):
            raise ValueError(
                f"align.teacher must have the model's weights outside of its new mixers, got "
                f"another {name} in {teacher!r}: the stage 'align' comes right after 'ssmzoo prime'"
            )


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Tell whether two mixers do the same, given the same weights."""
    return type(old) is type(new) and old.config.to_dict() == new.config.to_dict()  # pyright: ignore
