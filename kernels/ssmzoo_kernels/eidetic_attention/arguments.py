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


def check_presence(
    tensors: Tensors,
    mem_count: Tensor | None,
    mem_positions: Tensor | None,
    window: int | None,
    late_span: int,
) -> None:
    """Check heads, the window, and that what belongs together was given together."""
    op = "eidetic_attention"
    heads, groups = tensors.q.shape[2], tensors.k.shape[2]
    if groups < 1 or heads < 1 or heads % groups:
        raise ValueError(f"{op}: q's heads must be a multiple of k's, got {heads} and {groups}")
    for name, number in (("window", window), ("late_span", late_span)):
        if isinstance(number, bool | float | str):
            raise TypeError(f"{op}: {name} must be an integer, got {number!r}")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be None or at least 1, got {window}")
    for name in ("past", "late", "mem", "late_past"):
        keys, values = (getattr(tensors, f"{name}_{x}") for x in "kv")
        if (keys is None) != (values is None):
            raise ValueError(f"{op}: {name}_k and {name}_v must be given together")
    late, memory = tensors.late_k is not None, tensors.mem_k is not None
    if late_span < 0 or (late_span > 0) != late:
        raise ValueError(
            f"{op}: late_span must be at least 1 with late_k and 0 without, got {late_span}"
        )
    if tensors.late_past_k is not None and not late:
        raise ValueError(f"{op}: late_past_k needs late_k")
    if window is None and (memory or late):
        raise ValueError(f"{op}: mem_k and late_k need a window")
    if memory != (mem_count is not None):
        raise ValueError(f"{op}: mem_k and mem_count must be given together")
    if mem_positions is not None and not memory:
        raise ValueError(f"{op}: mem_positions needs mem_k")


def check_values(tensors: Tensors, call: Call) -> None:
    """Check what is in the index tensors; a GPU would have to be waited for."""
    if tensors.q.device.type != "cpu":
        return
    op, window, before = "eidetic_attention", call.window, call.seen.tolist()
    if min(before, default=0) < 0:
        raise ValueError(f"{op}: seen must not be negative, got {min(before)}")
    tokens = max(before, default=0)
    needed = {"past_k": (tensors.past_k, tokens if window is None else min(tokens, window - 1))}
    if call.late_span and window is not None:
        needed["late_past_k"] = tensors.late_past_k, min(tokens, window + call.late_span - 1)
    for name, (past, count) in needed.items():
        rows = 0 if past is None else past.shape[1]
        if rows < count:
            raise ValueError(
                f"{op}: {name} must hold the {count} tokens before this call that its queries "
                f"see, got {rows}"
            )
    if tensors.mem_k is None or call.mem_count is None or window is None:
        return
    memories, size = tensors.mem_k.shape[:2]
    chunks = sum(
        (old + new - 1) // window - old // window + 1
        for old, new in zip(before, call.offsets.diff().tolist(), strict=True)
        if new
    )
    if memories < chunks:
        raise ValueError(
            f"{op}: mem_k must hold a memory for each of the {chunks} chunks, got {memories}"
        )
    held = call.mem_count.tolist()
    if held and not 0 <= min(held) <= max(held) <= size:
        raise ValueError(
            f"{op}: mem_count must be from 0 to m = {size}, got {min(held)} to {max(held)}"
        )


class Kernels:
    """A backend's functions of ``Tensors`` and ``Call``, for the declaration."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def load(self, *kernel: Any) -> Any:
        """Build and load the C kernels, where the module has such."""
        return self.module.load(*kernel)

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return outputs ``[T, H, d]`` and the logarithms of every query's sum ``[T, H]``."""
        count = len(Tensors._fields)
        mem_count, mem_positions, seen, offsets, _save, *how = arguments[count:]
        call = Call(mem_count, mem_positions, offsets, seen, *how)
        check_values(Tensors(*arguments[:count]), call)  # here, where a graph has values, too
        return self.module.forward(Tensors(*arguments[:count]), call)

    def backward(self, grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> Tensors:
        """Return the gradients of ``forward``'s tensors, None where one was absent."""
        count = len(Tensors._fields)
        mem_count, mem_positions, seen, offsets, *how = arguments[count:]
        call = Call(mem_count, mem_positions, offsets, seen, *how)
        return self.module.backward(grad_out, out, lse, Tensors(*arguments[:count]), call)
