"""The generalised delta rule: a matrix state that decays, is corrected by rank one, and written to.

An op of this package: declared here, as the zoo declares its own. It brings the formula
(``reference.py``) and C (``cpu.py``, ``delta_rule.c``); ``eager`` is derived from the formula.
"""

import importlib

from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.validation import Packing

from . import reference

DELTA_RULE = Op(
    "goose_delta_rule",
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
    reference=reference.delta_rule,
    kernels=lambda name: importlib.import_module(f"ssmzoo_goose.delta_rule.{name}"),
)


def delta_rule(
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
    """Compute ``S <- S diag(w) + S a b^T + v k^T`` and ``y = S r``, per head, token by token.

    In float32, or float64 for float64 ``r``; the state is ``S^T`` ``[K, V]`` in memory. Packed
    sequences as in the zoo's ops.

    Returns:
        The outputs ``[B, L, H, V]`` in v's dtype and the final state ``[B, H, K, V]``.

    Raises:
        ValueError: Shapes, devices, boundaries or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The machine lacks what the named backend needs.
    """
    tensors = (r, w, k, v, a, b, initial_state)
    return DELTA_RULE(*tensors, cu_seqlens=cu_seqlens, backend=backend)
