"""The state of a prompt that was read once, to continue from often, later, or in another process.

What surprises: the last token is not read yet. Asking for what follows is reading that token, so
``generate`` goes on from a saved prompt as it does from a prompt of its own.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssmzoo.modeling.cache import RecurrentCache, backbone_of, check_kind
from ssmzoo.modeling.cache_files import tensors_digest
from ssmzoo.modeling.cache_identity import STATE_ADAPTER
from ssmzoo.modeling.compat import CACHE, one_cache
from ssmzoo.modeling.sequence_parallel import sequence_piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_NAME = "state.safetensors"
CHANGED = (
    "the model's weights changed since it read this prompt, so its state is out of date; call "
    "prefill again"
)


@dataclass(frozen=True)
class PromptState:
    """A prompt and the state after it, as :func:`prefill` returns them.

    It never changes: :meth:`inputs` hands out copies, so one prompt can be continued many times.

    Attributes:
        cache: The state after all tokens but the last.
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]`` of 0 (padding) and 1.
        model: The model that read it.
    """

    cache: RecurrentCache
    input_ids: Tensor
    attention_mask: Tensor
    model: PreTrainedModel
    versions: tuple[object, ...]  # of the model's tensors, to see whether it was trained since

    @property
    def num_tokens(self) -> int:
        """Return how many tokens a row has, padding included."""
        return self.input_ids.shape[1]

    def inputs(self, input_ids: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments with which ``model.generate(**...)`` continues the prompt.

        Args:
            input_ids: ``[B, M]``, tokens to append to the prompt; None: none.

        Returns:
            ``input_ids`` and ``attention_mask`` of all tokens, and a copy of the state.

        Raises:
            ValueError: ``input_ids`` has another shape.
        """
        ids, mask = self.input_ids, self.attention_mask
        if input_ids is not None:
            if input_ids.dim() != 2 or len(input_ids) != len(ids):
                raise ValueError(
                    f"input_ids must have shape [{len(ids)}, M], as many rows as the prompt, "
                    f"got {list(input_ids.shape)}"
                )
            ids = torch.cat([ids, input_ids.to(ids)], dim=1)
            mask = torch.cat([mask, mask.new_ones(input_ids.shape)], dim=1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            CACHE: copy.deepcopy(self.cache),
        }

    def is_current(self) -> bool:
        """Return whether the model's weights are those that read the prompt."""
        return _versions(self.model) == self.versions

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``state.safetensors`` into a folder: states, tokens and the digest of the weights.

        Complete or not at all; other files of the folder stay as they are.

        Raises:
            RuntimeError: The weights changed since they read the prompt.
            ValueError: Weights are offloaded.
            OSError: The folder cannot be written to.
        """
        if not self.is_current():
            raise RuntimeError(CHANGED)
        digest, folder = weights_digest(backbone_of(self.model)), Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.cache.write(
            folder / FILE_NAME,
            {"input_ids": self.input_ids, "attention_mask": self.attention_mask},
            {
                "weights": digest,
                "dtype": str(self.model.dtype).removeprefix("torch."),
            },
        )


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    cache: RecurrentCache | None = None,
    *,
    past_key_values: RecurrentCache | None = None,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> PromptState:
    """Read a prompt once and return its state, from which any number of calls can continue.

    ``model.generate(**state.inputs())`` continues it; ``state.save_pretrained(folder)`` keeps it
    and :func:`load_state` brings it back, in another process too.

    Args:
        model: A language model of the zoo, or one of transformers that :func:`ssmzoo.accelerate`
            put on our kernels.
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]``, 0 where a row is padded.
        cache: The state after a prefix of ``input_ids``; only the tokens after the prefix
            are read, and the given state is not changed.
        past_key_values: The name of ``cache`` before transformers 5.24.
        chunk_size: Read this many tokens at a time, to bound memory; None: all at once.
        group: The processes that read the prompt together, each a piece of it; all call this alike
            and get the same state (:func:`ssmzoo.modeling.sequence_piece`). None: this one alone.

    Raises:
        ValueError: ``input_ids`` has no token, another argument does not fit its shape, or the
            model keeps no state that we can save. With ``group``: the prompt has no more tokens
            than processes, or comes with ``cache`` or ``chunk_size``, or the model's
            state cannot be passed on.
        TypeError: ``cache`` is of another kind.
    """
    backbone, given = backbone_of(model), one_cache(cache, past_key_values)
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids must have shape [B, L] and hold a token, got {list(input_ids.shape)}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    if group is not None:
        for name, value in (("cache", given), ("chunk_size", chunk_size)):
            if value is not None:
                raise ValueError(
                    f"{name} must be left out where a group reads a prompt, which reads all of it "
                    f"in one call, got {name} and group"
                )
        together = _read_together(model, input_ids, attention_mask, group)
        return PromptState(together, input_ids, attention_mask, model, _versions(model))
    check_kind(given, backbone.cache_class)
    start, end = 0, input_ids.shape[1] - 1
    state = backbone.cache_class(backbone.config)
    if given is not None:
        start = given.seen_tokens
        given.check(backbone.config, len(input_ids), end - start)
        state = copy.deepcopy(given)
    if start > end:
        raise ValueError(
            f"cache has seen {start} tokens, so input_ids must be those and at least "
            f"one more, got {end + 1}"
        )
    state.read_again(backbone)  # a cropped cache may have tokens to read again
    step = chunk_size or max(end, 1)
    places = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        for begin in range(start, end, step):
            stop = min(begin + step, end)
            named = {"position_ids": places[:, begin:stop]} if backbone.counts_positions else {}
            backbone(
                input_ids[:, begin:stop],
                attention_mask=attention_mask[:, :stop],
                **{CACHE: state},
                **named,
            )
    return PromptState(state, input_ids, attention_mask, model, _versions(model))


@torch.no_grad()
def _read_together(
    model: Any, input_ids: Tensor, attention_mask: Tensor, group: dist.ProcessGroup
) -> RecurrentCache:
    """Return the state after all tokens but the last, of which each process reads a piece."""
    count = dist.get_world_size(group)
    if input_ids.shape[1] <= count:
        raise ValueError(
            f"input_ids must have more tokens a row than the {count} processes that read them, "
            f"got {input_ids.shape[1]}"
        )
    piece = sequence_piece(model, input_ids[:, :-1], attention_mask[:, :-1], group=group)
    backbone_of(model)(**piece)
    return piece[CACHE].whole()


def load_state(directory: str | os.PathLike[str], model: PreTrainedModel) -> PromptState:
    """Return the prompt that :meth:`PromptState.save_pretrained` wrote.

    Args:
        directory: The folder.
        model: The model that read it, loaded from the same checkpoint in the same dtype; it may be
            on another device.

    Raises:
        FileNotFoundError: The folder holds no saved prompt.
        ValueError: The file is damaged, another model read the prompt, one with another state
            adapter or none, or the model keeps no state that can be saved.
    """
    backbone = backbone_of(model)
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {FILE_NAME}; save one with "
            "prefill(model, input_ids).save_pretrained(directory)"
        )
    cache, file = backbone.cache_class.read(
        path, backbone.config, model.device, adapter=backbone._modules.get(STATE_ADAPTER)
    )
    others, notes = file.others, file.notes
    ids, mask = others.get("input_ids"), others.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape or "weights" not in notes:
        raise ValueError(
            f"{path} holds a cache without its prompt; read it with StateCache.load, or save one "
            "with prefill(model, input_ids).save_pretrained(directory)"
        )
    rows, seen = cache.batch_size, cache.seen_tokens
    if ids.dim() != 2 or rows not in (-1, len(ids)) or ids.shape[1] <= seen:
        raise ValueError(
            f"{path} is damaged: input_ids must have shape [B, L] with the {rows} rows of the "
            f"states and more than the {seen} tokens that they have seen, got {list(ids.shape)}"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    if notes.get("dtype") != dtype:
        raise ValueError(
            f"{path} was made by a model in {notes.get('dtype')}, got one in {dtype}; load it with "
            f"dtype={notes.get('dtype')!r}"
        )
    digest = weights_digest(backbone)
    if notes["weights"] != digest:
        raise ValueError(
            f"{path} was made by other weights: their digest must be {notes['weights'][:12]}, got "
            f"{digest[:12]}; load the checkpoint that read the prompt, with the adapter that did"
        )
    return PromptState(cache, ids, mask, model, _versions(model))


@torch.no_grad()
def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all tensors that a checkpoint of this module holds.

    Those of a state adapter, which has a digest of its own, are left out. Which of PEFT's adapters
    are active counts.

    Raises:
        ValueError: Weights are not in memory.
    """
    tensors = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if not name.startswith(f"{STATE_ADAPTER}.")
    }
    if absent := sorted(name for name, tensor in tensors.items() if tensor.is_meta):
        raise ValueError(
            f"the model's weights must be in memory, and {absent[0]} is offloaded; load the model "
            "without offloading, and read the prompt with that"
        )
    return tensors_digest(tensors, preface=_adapters(module))


def _adapters(model: nn.Module) -> list[str]:
    """Return which adapters each layer of PEFT's applies."""
    fields = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return [
        f"{name} {[getattr(layer, field, None) for field in fields]}"
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "disable_adapters", None), bool)  # a method of transformers'
    ]


def _versions(model: nn.Module) -> tuple[object, ...]:
    """Return how often each tensor was written to; those made under inference_mode do not count."""
    counts = (0 if t.is_inference() else t._version for t in model.state_dict().values())
    return (*counts, *_adapters(model))
