"""What a backend gets: the tensors that gradients flow to, and how they hang together."""

from typing import NamedTuple

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
