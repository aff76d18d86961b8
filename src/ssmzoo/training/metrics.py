"""The numbers of a run's log: the file ``metrics.jsonl``, means and speeds, layers' gauges."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.files import write_text, writing

if TYPE_CHECKING:
    import torch
    from torch import nn

GAUGED_TOKENS = 256  # of one sequence: enough to see a layer at work, and cheap beside a step
_INPUTS = ("input_ids", "input_values", "pixel_values")


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, each written at once."""

    def __init__(self, path: Path, *, after_step: int, logged: bool, validated: bool) -> None:
        """Open the file, without the lines after the step that the run resumes from.

        Args:
            path: The file.
            after_step: The step; 0 to begin.
            logged: Whether the line of losses at that step was written before the checkpoint;
                otherwise it is dropped too.
            validated: Whether the validation after that step was finished before the checkpoint;
                otherwise its line is dropped too.

        Raises:
            RuntimeError: A line before that is damaged, or the file cannot be written.
        """
        self._path = path
        if path.exists():
            write_text(path, "".join(_lines_until(path, after_step, logged, validated)))
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, **values: float | int | dict[str, list[float]] | None) -> None:
        """Append one line, whole or not at all.

        Raises:
            RuntimeError: It cannot be written.
        """
        rest = memoryview(json.dumps(values).encode() + b"\n")
        with writing(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while rest:  # a disk that fills up takes a part first
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(metrics: Mapping[str, float | int]) -> dict[str, float | int | None]:
    """Return metrics with None for nan and infinities, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Meter:
    """Losses and gradient norms since the last line, and the time spent on training alone."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of training, until the last line
        self._window: list[tuple[float, float]] = []
        self._tokens = 0
        self._clock = time.perf_counter()
        self._paused: float | None = None  # since when

    def start(self, tokens: int) -> None:
        """Start the clock, after so many tokens."""
        self._clock, self._tokens = time.perf_counter(), tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block out."""
        self._paused = time.perf_counter()
        yield
        self._clock += time.perf_counter() - self._paused
        self._paused = None

    def add(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Add the losses and gradient norms of some steps."""
        self._window += pairs

    @property
    def waiting(self) -> bool:
        """Whether there were steps since the last line."""
        return bool(self._window)

    def line(self, tokens: int) -> dict[str, float]:
        """Return the means since the last line, the speed, and the seconds; and start over.

        There is no speed where all tokens were trained on before the clock started.
        """
        now = self._now()
        spent, trained = now - self._clock, tokens - self._tokens
        self.seconds += spent
        self._clock, self._tokens = now, tokens
        losses, norms = zip(*self._window, strict=True)
        self._window = []
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            **({"tokens_per_second": round(trained / spent, 1)} if trained else {}),
            "seconds": round(self.seconds, 3),
        }

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state from which a resumed run writes the same lines."""
        # a copy: it may be written while the training goes on
        return {"seconds": self.seconds + self._now() - self._clock, "window": [*self._window]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state`."""
        self.seconds = state["seconds"]
        self._window = [(loss, norm) for loss, norm in state["window"]]

    def _now(self) -> float:
        return time.perf_counter() if self._paused is None else self._paused


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
    from ssmzoo.modeling.pretrained import evaluating

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
    with torch.no_grad(), evaluating(model), _hooked(mixers, look):
        model(**some)
    return {
        name: torch.stack([gauges[name].double() for gauges in found if name in gauges]).tolist()
        for name in dict.fromkeys(name for gauges in found for name in gauges)
    }


def few_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the first tokens of a batch's longest sequence as a batch, or its first image.

    A pair becomes its first document, the longest one, twice.
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
    some = inputs[row : row + 1, start : start + min(length, GAUGED_TOKENS)]
    if f"pair_{name}" not in batch:
        return {name: some}
    mask = some.new_ones(some.shape[:2], dtype=torch.long)
    return {p + n: x for p in ("", "pair_") for n, x in ((name, some), ("attention_mask", mask))}


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


def _lines_until(path: Path, step: int, logged: bool, validated: bool) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            values = json.loads(line)
            later = values["step"] > step
            final = validated if "validation_loss" in values else logged
            again = values["step"] == step and not final
        except (ValueError, LookupError, TypeError):
            if not line.endswith("\n"):  # it was cut off when the run was killed
                return
            raise RuntimeError(
                f"line {number} of {path} is damaged: {line.strip()[:60]!r}; take it out to resume"
            ) from None
        if later or again:
            return
        yield line if line.endswith("\n") else f"{line}\n"
