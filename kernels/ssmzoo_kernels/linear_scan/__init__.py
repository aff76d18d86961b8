"""The linear first-order recurrence ``h[t] = a[t] h[t-1] + b[t]``, real or complex."""

import torch
from torch import Tensor

from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.linear_scan import library, reference
from ssmzoo_kernels.validation import check_complex, check_leading, check_tensor, segment_offsets

OP = "linear_scan"


def linear_scan(
    a: Tensor,  # [B, L, D]
    b: Tensor,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D], zeros if absent
    *,
    cu_seqlens: Tensor | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the recurrence ``h[t] = a[t] * h[t-1] + b[t]`` along the sequence.

    States are float32 (float64, complex64, complex128 where an input is); only the returned
    sequence takes b's dtype. Where the loop over time stays finite every backend does, however far
    products of ``a`` overflow or underflow on the way.

    Args:
        a: What survives of each state component.
        b: What is added to it; real like ``a`` or complex like ``a``.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, D]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        All states ``[B, L, D]`` in b's dtype, and the last ones ``[B, D]`` (``[S, D]``). Gradients
        flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, neither real nor complex floating point, or a mixture.
        RuntimeError: The machine lacks what the named backend needs.
    """
    paired = isinstance(a, Tensor) and a.is_complex()
    check_leading(OP, "a", a.real if paired else a, "[B, L, D]")
    check = check_complex if paired else check_tensor
    batch, length, width = shape = a.shape
    check(OP, "a", a, shape, a, "[B, L, D]")
    check(OP, "b", b, shape, a, "[B, L, D]")
    offsets = segment_offsets(OP, a, cu_seqlens)
    if initial_state is not None:
        rule = "[B, D]" if cu_seqlens is None else "[S, D]"
        check(OP, "initial_state", initial_state, (offsets.numel() - 1, width), a, rule)

    dtype = b.dtype
    common = torch.promote_types(a.dtype, dtype)
    chosen = choose(OP, backend, a, dtype=common)
    if chosen == "reference":
        record(OP, "reference")
        return reference.linear_scan(a, b, initial_state, cu_seqlens=cu_seqlens)
    h, final_state = library.linear_scan(
        a.to(common).reshape(batch * length, width),
        b.to(common).reshape(batch * length, width),
        initial_state,
        offsets,
        backend=chosen,
    )
    return h.to(dtype).view(shape), final_state


__all__ = ["linear_scan"]
