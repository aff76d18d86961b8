"""B'MOJO's attention: one softmax over a sliding window and a memory gathered for each chunk."""

import functools
import importlib

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend, record
from ssmzoo_kernels.eidetic_attention import reference
from ssmzoo_kernels.eidetic_attention.arguments import (
    Call,
    Kernels,
    Tensors,
    check_presence,
    check_values,
)
from ssmzoo_kernels.eidetic_attention.chunks import Chunks, chunk_table
from ssmzoo_kernels.validation import Packing

OP = "eidetic_attention"

_INDICES = {"mem_count": "n int64?", "mem_positions": "n m int64?", "seen": "S int64?"}
ATTENTION = Op(
    OP,
    inputs={
        "q": "B L H d",
        "k": "B L G d",
        "v": "B L G d",
        "mem_k": "n m G d?",
        "mem_v": "n m G d?",
        "past_k": "S P G d?",
        "past_v": "S P G d?",
        "late_k": "B L G d?",
        "late_v": "B L G d?",
        "late_past_k": "S Q G d?",
        "late_past_v": "S Q G d?",
        **_INDICES,
    },
    outputs={"out": "B L H d"},
    options={"window": "int?", "late_span": "int", "scale": "float"},
    packing="flat",
    least={"q": "column"},
    saved="T H",
    keeps=("out", "saved", *Tensors._fields, *_INDICES, "offsets"),
    reference=reference.eidetic_attention,
    kernels=lambda name: Kernels(
        importlib.import_module(f"ssmzoo_kernels.eidetic_attention.{name}")
    ),
)
_LONGEST = 2**60  # longer than any sequence, and sums of a few such numbers are int64
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
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
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
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        mem_positions: Positions of the memory's tokens, int64: a row is hidden from queries whose
            window still holds it. Absent: a token in both counts twice.
        late_k: Keys of a second stream of the same tokens, seen only behind the window.
        late_v: Their values.
        late_past_k: Late keys of the Q tokens before this call, as ``past_k``; there must be
            ``window + late_span - 1`` of them, or all.
        late_past_v: Their values.
        late_span: How many late keys a query sees.
        scale: Of the scores; ``d ** -0.5`` if absent.
        backend: "auto" goes by device; with late keys only "eager" and "reference" can run.
            Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, H, d]``. Gradients flow to all keys and values; those of the memory's
        rows are for the caller's gather to add to the tokens they come from.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or of the wrong dtype.
        RuntimeError: The named backend cannot run on this machine.
    """
    given = (q, k, v, mem_k, mem_v, past_k, past_v, late_k, late_v, late_past_k, late_past_v)
    # copies, which alone are checked: whoever holds the caller's may write into them at any time
    mem_count, mem_positions, seen = (
        x.clone() if isinstance(x, Tensor) and x.is_cpu else x
        for x in (mem_count, mem_positions, seen)
    )
    offsets: Tensor = ATTENTION.check((*given, mem_count, mem_positions, seen), cu_seqlens)
    if seen is None:
        seen = offsets.new_zeros(offsets.shape[0] - 1)
    tensors = Tensors(*given)
    check_presence(tensors, mem_count, mem_positions, window, late_span)
    width = q.shape[3]
    window = None if window is None else min(window, _LONGEST)
    late_span = min(late_span, _LONGEST)
    factor = float(width) ** -0.5 if scale is None else scale
    options = {"window": window, "late_span": late_span, "scale": factor}
    kinds = {x.dtype for x in given if x is not None}
    if kinds - {*_WIDEST}:
        raise TypeError(
            f"{OP}: tensors must be float16, bfloat16, float32 or float64, got "
            f"{', '.join(sorted(map(str, kinds)))}"
        )
    dtype, offers = functools.reduce(torch.promote_types, kinds), ATTENTION.offers
    if width > _WIDEST[dtype]:
        if backend == "triton":
            raise ValueError(
                f'{OP}(backend="triton") takes heads of at most {_WIDEST[dtype]} columns in '
                f'{dtype}, got {width}; use backend="auto" or "eager"'
            )
        offers = ("reference", "eager", "cpu")
    if late_k is not None:
        if backend in ("cpu", "triton"):
            raise ValueError(
                f'{OP}(backend="{backend}") takes no late_k; use backend="auto" or "eager"'
            )
        offers = ("reference", "eager")
    chosen = ATTENTION.choose(backend, q, dtype=dtype, offers=offers)
    if chosen == "reference":
        if not torch.compiler.is_compiling():
            call = Call(mem_count, mem_positions, offsets, seen, window, late_span, factor)
            check_values(tensors, call)
        record(OP, "reference")
        late = None
        if late_k is not None and late_v is not None:
            late = late_k, late_v, late_past_k, late_past_v
        arguments = (q, k, v, mem_k, mem_v, mem_count, past_k, past_v, late, mem_positions)
        return reference.eidetic_attention(*arguments, offsets, seen, **options)

    tensors = Tensors(*(None if x is None else x.to(dtype) for x in given))  # pyright: ignore[reportArgumentType]
    rows = {name: getattr(tensors, name) for name in ("q", "k", "v", "late_k", "late_v")}
    flat = {name: x.flatten(0, 1) for name, x in rows.items() if x is not None}
    tensors = tensors._replace(**flat)
    indices = (mem_count, mem_positions, seen)
    out = ATTENTION.run(chosen, (*tensors, *indices), options, offsets)
    return out.view(q.shape).to(q.dtype)


__all__ = ["Chunks", "chunk_table", "eidetic_attention"]
