"""B'MOJO's attention: one softmax over a sliding window and a memory gathered for each chunk."""

import functools

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.eidetic_attention import library, reference
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.eidetic_attention.chunks import Chunks, chunk_table
from ssmzoo_kernels.validation import check_leading, check_tensor, segment_offsets

OP = "eidetic_attention"
_OFFERS = ("reference", "eager", "flex", "triton")
# columns of a head that a GPU kernel's registers hold
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128, torch.float64: 128}


def eidetic_attention(
    q: Tensor,  # [B, L, H, d]
    k: Tensor,  # [B, L, G, d]
    v: Tensor,  # [B, L, G, d]
    mem_k: Tensor | None = None,  # [n, m, G, d]
    mem_v: Tensor | None = None,  # [n, m, G, d]
    mem_count: Tensor | None = None,  # [n]
    *,
    window: int | None,
    past_k: Tensor | None = None,  # [S, P, G, d]
    past_v: Tensor | None = None,  # [S, P, G, d]
    seen: Tensor | None = None,  # [S], zeros if absent
    cu_seqlens: Tensor | None = None,  # [S + 1]
    mem_positions: Tensor | None = None,  # [n, m]
    late_k: Tensor | None = None,  # [B, L, G, d]
    late_v: Tensor | None = None,  # [B, L, G, d]
    late_past_k: Tensor | None = None,  # [S, Q, G, d]
    late_past_v: Tensor | None = None,  # [S, Q, G, d]
    late_span: int = 0,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Read a window of raw tokens, a memory, and late keys behind the window with one softmax.

    A sequence is cut into chunks of ``window`` tokens, counted from its very first token. The query
    at position p reads the keys at positions ``p - window + 1`` to p, the memory of its chunk, and
    the late keys at positions ``p - window - late_span + 1`` to ``p - window``. Scores and sums are
    float32 (float64 for float64 inputs); the output has q's dtype.

    Args:
        q: Queries; H is a multiple of G.
        k: Keys of the same tokens.
        v: Their values.
        mem_k: Keys of the memory of each chunk that has tokens in this call, in the order of
            :func:`chunk_table`; what comes behind them is not read.
        mem_v: Their values.
        mem_count: How many of a chunk's m rows hold something: the first ones. int64.
        window: Tokens a query sees, itself among them; None: all there were, without a memory.
        past_k: Keys of the P tokens before this call, the newest last. Of sequence s only the last
            ``min(P, seen[s])`` count; there must be ``window - 1`` of them, or all.
        past_v: Their values.
        seen: Tokens of each sequence before this call, int64.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        mem_positions: Positions of the memory's tokens, int64: a row is hidden from queries whose
            window still holds it. Absent: a token in both counts twice.
        late_k: Keys of a second stream of the same tokens, seen only behind the window.
        late_v: Their values.
        late_past_k: Late keys of the Q tokens before this call, as ``past_k``; there must be
            ``window + late_span - 1`` of them, or all.
        late_past_v: Their values.
        late_span: How many late keys a query sees.
        scale: Of the scores; ``d ** -0.5`` if absent.
        backend: "auto" goes by device, and never takes "flex", torch's ``flex_attention``, which
            compiles when first called and has no backward on a CPU. Naming a backend that cannot
            run is an error.

    Returns:
        The outputs ``[B, L, H, d]``. Gradients flow to all keys and values; those of the memory's
        rows are for the caller's gather to add to the tokens they come from.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or of the wrong dtype.
        RuntimeError: The machine lacks what the named backend needs.
    """
    check_leading(OP, "q", q, "[B, L, H, d]")
    check_leading(OP, "k", k, "[B, L, G, d]")
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    if groups < 1 or heads < 1 or heads % groups:
        raise ValueError(f"{OP}: q's heads must be a multiple of k's, got {heads} and {groups}")
    if width < 1:
        raise ValueError(f"{OP}: heads must have at least one column, got {list(q.shape)}")
    shape = (batch, length, groups, width)
    check_tensor(OP, "k", k, shape, q, "[B, L, G, d]")
    check_tensor(OP, "v", v, shape, q, "[B, L, G, d]")
    for name, number in (("window", window), ("late_span", late_span)):
        if isinstance(number, bool | float | str):
            raise TypeError(f"{OP}: {name} must be an integer, got {number!r}")
    if window is not None and window < 1:
        raise ValueError(f"{OP}: window must be None or at least 1, got {window}")
    offsets = segment_offsets(OP, q, cu_seqlens)
    sequences = offsets.numel() - 1
    if seen is None:
        seen = offsets.new_zeros(sequences)
    _check_index("seen", seen, (sequences,), q, "[S]")
    _check_pair("past", past_k, past_v, "[S, P, G, d]", (sequences, None, groups, width), q)
    _check_pair("late", late_k, late_v, "[B, L, G, d]", shape, q)
    _check_pair(
        "late_past", late_past_k, late_past_v, "[S, Q, G, d]", (sequences, None, groups, width), q
    )
    if late_span < 0 or (late_span > 0) != (late_k is not None):
        raise ValueError(
            f"{OP}: late_span must be at least 1 with late_k and 0 without, got {late_span}"
        )
    if late_past_k is not None and late_k is None:
        raise ValueError(f"{OP}: late_past_k needs late_k")
    if window is None and (mem_k is not None or late_k is not None):
        raise ValueError(f"{OP}: mem_k and late_k need a window")
    _check_pair("mem", mem_k, mem_v, "[n, m, G, d]", (None, None, groups, width), q)
    if (mem_k is None) != (mem_count is None):
        raise ValueError(f"{OP}: mem_k and mem_count must be given together")
    if mem_k is not None and mem_count is not None:
        _check_index("mem_count", mem_count, (mem_k.shape[0],), q, "[n]")
        if mem_positions is not None:
            _check_index("mem_positions", mem_positions, tuple(mem_k.shape[:2]), q, "[n, m]")
    elif mem_positions is not None:
        raise ValueError(f"{OP}: mem_positions needs mem_k")

    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(offsets, seen, window, late_span, mem_k, mem_count, past_k, late_past_k)

    factor = float(width) ** -0.5 if scale is None else scale
    given = (q, k, v, mem_k, mem_v, past_k, past_v, late_k, late_v, late_past_k, late_past_v)
    kinds = {x.dtype for x in given if x is not None}
    if kinds - {*_WIDEST}:
        raise TypeError(
            f"{OP}: tensors must be float16, bfloat16, float32 or float64, got "
            f"{', '.join(sorted(map(str, kinds)))}"
        )
    dtype, offers = functools.reduce(torch.promote_types, kinds), _OFFERS
    if width > _WIDEST[dtype]:
        if backend == "triton":
            raise ValueError(
                f'{OP}(backend="triton") takes heads of at most {_WIDEST[dtype]} columns in '
                f'{dtype}, got {width}; use backend="auto" or "eager"'
            )
        offers = ("reference", "eager", "flex")
    chosen = choose(OP, backend, q, offers)
    if chosen == "reference":
        record(OP, "reference")
        late = None
        if late_k is not None and late_v is not None:
            late = late_k, late_v, late_past_k, late_past_v
        arguments = (q, k, v, mem_k, mem_v, mem_count, past_k, past_v, late, mem_positions)
        options = {"window": window, "late_span": late_span, "scale": factor}
        return reference.eidetic_attention(*arguments, offsets, seen, **options)

    tensors = Tensors(*(None if x is None else x.to(dtype) for x in given))  # pyright: ignore[reportArgumentType]
    rows = {name: getattr(tensors, name) for name in ("q", "k", "v", "late_k", "late_v")}
    flat = {name: x.flatten(0, 1) for name, x in rows.items() if x is not None}
    call = Call(mem_count, mem_positions, offsets, seen, window, late_span, factor)
    out = library.eidetic_attention(tensors._replace(**flat), call, backend=chosen)
    return out.view(q.shape).to(q.dtype)


def _check_values(
    offsets: Tensor,
    seen: Tensor,
    window: int | None,
    late_span: int,
    mem_k: Tensor | None,
    mem_count: Tensor | None,
    past_k: Tensor | None,
    late_past_k: Tensor | None,
) -> None:
    """Check what is in the index tensors; a GPU would have to be waited for."""
    before = seen.tolist()
    if min(before, default=0) < 0:
        raise ValueError(f"{OP}: seen must not be negative, got {min(before)}")
    tokens = max(before, default=0)
    needed = {"past_k": (past_k, tokens if window is None else min(tokens, window - 1))}
    if late_span and window is not None:
        needed["late_past_k"] = late_past_k, min(tokens, window + late_span - 1)
    for name, (past, count) in needed.items():
        rows = 0 if past is None else past.shape[1]
        if rows < count:
            raise ValueError(
                f"{OP}: {name} must hold the {count} tokens before this call that its queries "
                f"see, got {rows}"
            )
    if mem_k is None or mem_count is None or window is None:
        return
    memories, size = mem_k.shape[:2]
    chunks = sum(
        (old + new - 1) // window - old // window + 1
        for old, new in zip(before, offsets.diff().tolist(), strict=True)
        if new
    )
    if memories < chunks:
        raise ValueError(
            f"{OP}: mem_k must hold a memory for each of the {chunks} chunks, got {memories}"
        )
    held = mem_count.tolist()
    if held and not 0 <= min(held) <= max(held) <= size:
        raise ValueError(
            f"{OP}: mem_count must be from 0 to m = {size}, got {min(held)} to {max(held)}"
        )


def _check_pair(
    name: str,
    keys: Tensor | None,
    values: Tensor | None,
    rule: str,
    shape: tuple[int | None, ...],
    like: Tensor,
) -> None:
    if (keys is None) != (values is None):
        raise ValueError(f"{OP}: {name}_k and {name}_v must be given together")
    if keys is None or values is None:
        return
    check_leading(OP, f"{name}_k", keys, rule)
    full = tuple(keys.shape[i] if size is None else size for i, size in enumerate(shape))
    check_tensor(OP, f"{name}_k", keys, full, like, rule)
    check_tensor(OP, f"{name}_v", values, full, like, rule)


def _check_index(
    name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, rule: str
) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{OP}: {name} must be an int64 tensor {rule}, got {kind}")
    if tensor.shape != shape:
        raise ValueError(
            f"{OP}: {name} must have shape {rule} = {list(shape)}, got {list(tensor.shape)}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{OP}: {name} must be on {like.device}, got {tensor.device}")


__all__ = ["Chunks", "chunk_table", "eidetic_attention"]
