"""A sum that forgets: an op of this package, declared as the zoo declares its own.

It brings the formula (``reference.py``) and C (``cpu.py``, ``leaky_sum.c``); ``eager`` is derived
from the formula.
"""

import importlib

from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.validation import Packing

from . import reference

LEAKY_SUM = Op(
    "leaky_sum",
    inputs={"x": "B L D", "decay": "D", "initial_state": "S D?"},
    outputs={"h": "B L D", "final_state": "S D as exact"},
    packing="flat",
    offers=("reference", "cpu"),
    reference=reference.leaky_sum,
    kernels=lambda name: importlib.import_module(f"ssmzoo_leaky.leaky_sum.{name}"),
)


def leaky_sum(
    x: Tensor,  # [B, L, D]
    decay: Tensor,  # [D]
    initial_state: Tensor | None = None,  # [B, D], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute ``h[t] = decay h[t-1] + x[t]`` in float32, or float64 for float64 ``x``.

    Returns:
        The sums ``[B, L, D]`` in x's dtype and the last one ``[B, D]``.

    Raises:
        ValueError: Shapes, devices, boundaries or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The machine lacks what the named backend needs.
    """
    return LEAKY_SUM(x, decay, initial_state, cu_seqlens=cu_seqlens, backend=backend)
