"""What a backend gets: the tensors that gradients flow to, and how they hang together."""

from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Queries, keys and values in one dtype, a batch's sequences end to end."""

    q: Tensor  # [T, H, d]
    k: Tensor  # [T, G, d]
    v: Tensor  # [T, G, d]
    mem_k: Tensor | None  # [n, m, G, d]
    mem_v: Tensor | None
    past_k: Tensor | None  # [S, P, G, d]
    past_v: Tensor | None
    late_k: Tensor | None  # [T, G, d]
    late_v: Tensor | None
    late_past_k: Tensor | None  # [S, Q, G, d]
    late_past_v: Tensor | None


class Call(NamedTuple):
    """Where sequences lie, what they read, and by what scores are multiplied."""

    mem_count: Tensor | None  # [n]
    mem_positions: Tensor | None  # [n, m]
    offsets: Tensor  # [S + 1]
    seen: Tensor  # [S]
    window: int | None
    late_span: int
    scale: float


class Kernels:
    """A backend's functions of ``Tensors`` and ``Call``, for the declaration."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return outputs ``[T, H, d]`` and the logarithms of every query's sum ``[T, H]``."""
        count = len(Tensors._fields)
        mem_count, mem_positions, seen, offsets, _save, *how = arguments[count:]
        call = Call(mem_count, mem_positions, offsets, seen, *how)
        return self.module.forward(Tensors(*arguments[:count]), call)

    def backward(self, grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Tensors:
        """Return the gradients of ``forward``'s tensors, None where one was absent."""
        count = len(Tensors._fields)
        mem_count, mem_positions, seen, offsets, *how = arguments[count:]
        call = Call(mem_count, mem_positions, offsets, seen, *how)
        return self.module.backward(grad_out, out, lse, Tensors(*arguments[:count]), call)
