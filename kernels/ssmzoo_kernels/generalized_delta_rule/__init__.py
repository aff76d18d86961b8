"""The generalised delta rule: a matrix state is corrected under other keys than it is written."""

import importlib

from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.generalized_delta_rule import reference
from ssmzoo_kernels.validation import Packing

OP = "generalized_delta_rule"

DELTA_RULE = Op(
    OP,
    inputs={
        "r": "B L H K",
        "w": "B L H K",
        "k": "B L H K",
        "v": "B L H V",
        "a": "B L H K",
        "b": "B L H K",
        "initial_state": "S H K V?",
    },
    outputs={"y": "B L H V as v", "final_state": "S H K V as exact"},
    packing="flat",
    offers=("reference", "cpu"),
    reference=reference.generalized_delta_rule,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.{OP}.{name}"),
)


def generalized_delta_rule(
    r: Tensor,  # [B, L, H, K]
    w: Tensor,  # [B, L, H, K]
    k: Tensor,  # [B, L, H, K]
    v: Tensor,  # [B, L, H, V]
    a: Tensor,  # [B, L, H, K]
    b: Tensor,  # [B, L, H, K]
    initial_state: Tensor | None = None,  # [B, H, K, V], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Decay a matrix of states, replace what one key holds, write under another, and read.

    Per head, with the state ``S`` ``[K, V]``, every token does::

        e    = S^T a[t]
        S    = diag(w[t]) S + b[t] e^T + k[t] v[t]^T
        y[t] = S^T r[t]

    RWKV-7 (arXiv 2503.14456) has ``a = -c`` and ``b = rate * c`` of a removal key c of length 1.
    ``a`` reads before the decay: the delta rule of :func:`gated_linear_attention` is ``a = -w * k``
    and ``beta k`` for both ``b`` and ``k``. Everything inside is float32 (float64 for float64
    ``r``); only the output takes v's dtype.

    Args:
        r: What reads.
        w: What a token leaves of each row of the state, a factor.
        k: Under what a token writes.
        v: What it writes.
        a: What asks the state before the token.
        b: Under what the answer is added.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, H, K, V]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, H, V]`` in v's dtype, and the final state ``[B, H, K, V]``
        (``[S, H, K, V]``) in float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices, boundaries or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The machine lacks what the named backend needs.
    """
    tensors = (r, w, k, v, a, b, initial_state)
    return DELTA_RULE(*tensors, cu_seqlens=cu_seqlens, backend=backend)


__all__ = ["generalized_delta_rule"]
