"""The linear first-order recurrence ``h[t] = a[t] h[t-1] + b[t]``, real or complex."""

import importlib

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.linear_scan import reference
from ssmzoo_kernels.validation import Packing

SCAN = Op(
    "linear_scan",
    inputs={"a": "B L D number", "b": "B L D number", "initial_state": "S D number?"},
    outputs={"h": "B L D as exact", "final_state": "S D as exact"},
    packing="flat",
    keeps=("a", "h", "initial_state", "offsets"),
    reference=reference.linear_scan,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.linear_scan.{name}"),
)


def linear_scan(
    a: Tensor,  # [B, L, D]
    b: Tensor,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the recurrence ``h[t] = a[t] * h[t-1] + b[t]`` along the sequence.

    States are float32 (float64, complex64, complex128 where ``a`` or ``b`` is); only the returned
    sequence takes b's dtype. Where the loop over time stays finite every backend does, however far
    products of ``a`` overflow or underflow on the way.

    Args:
        a: The share of each state component that is kept.
        b: The input added to it; real or complex, as ``a``.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, D]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        All states ``[B, L, D]`` in b's dtype, and the last ones ``[B, D]`` (``[S, D]``). Gradients
        flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, neither real nor complex floating point, or a mixture.
        RuntimeError: The named backend cannot run on this machine.
    """
    dtype = getattr(b, "dtype", None)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != dtype:
        common = torch.promote_types(a.dtype, b.dtype)
        if a.is_complex() == b.is_complex() and a.is_floating_point() == b.is_floating_point():
            a, b = a.to(common), b.to(common)
    h, final_state = SCAN(a, b, initial_state, cu_seqlens=cu_seqlens, backend=backend)
    return h.to(dtype), final_state


__all__ = ["linear_scan"]
