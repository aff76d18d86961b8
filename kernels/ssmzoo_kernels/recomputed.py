"""Activations that a backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssmzoo_kernels.dispatch import is_plain

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore


class Recomputed:
    """While it is entered, autograd keeps how to make the tensors that were added, and not them.

    All that is computed from them stays as it is, other than under gradient checkpointing, which
    computes everything again. Where something else sees to what is saved, as checkpointing does, or
    looks on (a compiler, a transform), everything is kept.

    Args:
        x: A tensor of the computation, which tells where it runs.
    """

    def __init__(self, x: Tensor) -> None:
        self._made: list[tuple[Tensor, _Made]] = []
        self._hooks = None
        if torch.is_grad_enabled() and is_plain(x) and _top_hooks(True) is None:
            self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def add(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Name a tensor and what makes the same again, from tensors that are kept anyway."""
        if self._hooks is not None and type(tensor) is Tensor and tensor.is_contiguous():
            self._made.append((tensor, _Made(make, tensor.device.type)))

    def __enter__(self) -> Recomputed:
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._made.clear()

    def _pack(self, tensor: Tensor) -> Any:
        for same, made in self._made:
            if (
                tensor.data_ptr() == same.data_ptr()
                and tensor.numel() == same.numel()
                and tensor.dtype is same.dtype
                and tensor.is_contiguous()
            ):
                made.asked += 1
                return made, tensor.shape
        return tensor


class _Made:
    """Makes a tensor for those that ask for it in one backward pass, once for all of them."""

    def __init__(self, make: Callable[[], Tensor], device: str) -> None:
        self.asked = 0  # how often it is asked for in a pass
        self._left, self._tensor = 0, None
        self._make, self._device = make, device
        self._cast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def take(self) -> Tensor:
        if self._tensor is None:
            enabled, dtype = self._cast
            with torch.no_grad(), torch.autocast(self._device, dtype=dtype, enabled=enabled):
                self._tensor = self._make()
            self._left = self.asked
        self._left -= 1
        tensor = self._tensor
        if not self._left:
            self._tensor = None
        return tensor


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    made, shape = kept
    return made.take().view(shape)
