"""What a model's layers tell of themselves while they train: gauges beside a line's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

TOKENS = 256  # of one sequence: enough to see a layer at work, and cheap beside a step
_INPUTS = ("input_ids", "input_values", "pixel_values")


def read_gauges(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return each gauge's numbers, one for every layer that has it, in the layers' order.

    The model reads the beginning of the batch's longest sequence, or its first image, in evaluation
    mode and without gradients; no random number is drawn.

    Args:
        model: Any model; one without gauges costs nothing.
        batch: Its arguments, on the CPU or already on the model's device.
    """
    import torch

    from ssmzoo.modeling import SSMMixer

    mixers = [m for m in model.modules() if isinstance(m, SSMMixer)]
    mixers = [m for m in mixers if type(m).gauges is not SSMMixer.gauges]
    if not mixers:
        return {}
    found: list[dict[str, torch.Tensor]] = []

    def look(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(mixer, SSMMixer)
        found.append(mixer.gauges(arguments[0]))

    device = next(model.parameters()).device
    some = {name: tensor.to(device) for name, tensor in few_tokens(batch).items()}
    with torch.no_grad(), _evaluating(model), _hooked(mixers, look):
        model(**some)
    return {
        name: torch.stack([gauges[name].double() for gauges in found if name in gauges]).tolist()
        for name in dict.fromkeys(name for gauges in found for name in gauges)
    }


def few_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the first tokens of a batch's longest sequence as a batch, or its first image.

    Of pairs it is the longest first document, beside itself.
    """
    import torch

    name = next(name for name in _INPUTS if name in batch)
    inputs, mask, ends = batch[name], batch.get("attention_mask"), batch.get("cu_seqlens")
    if name == "pixel_values":
        return {name: inputs[:1]}
    row, start, length = 0, 0, inputs.shape[1]
    if ends is not None:
        longest = int(ends.diff().argmax())
        start, length = int(ends[longest]), int(ends.diff()[longest])
    elif mask is not None:
        row = int(mask.sum(dim=1).argmax())
        start, length = int(mask[row].int().argmax()), int(mask[row].sum())
    some = inputs[row : row + 1, start : start + min(length, TOKENS)]
    if f"pair_{name}" not in batch:
        return {name: some}
    mask = some.new_ones(some.shape[:2], dtype=torch.long)
    return {p + n: x for p in ("", "pair_") for n, x in ((name, some), ("attention_mask", mask))}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _hooked(
    mixers: list[Any], look: Callable[[nn.Module, tuple[Any, ...]], None]
) -> Iterator[None]:
    hooks = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
