"""Longhorn's scan: an online learner's closed-form step at every token."""

import importlib

from torch import Tensor

from ssmzoo_kernels.declaration import Choice, Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.longhorn_scan import reference
from ssmzoo_kernels.longhorn_scan.reference import Transition
from ssmzoo_kernels.scan import Kernels, saved_states
from ssmzoo_kernels.validation import Packing

ROLES = ("u", "q", "k", "dt", "dt_bias", "skip", "z", "initial_state")  # to ``scan``
SCAN = Op(
    "longhorn_scan",
    inputs={
        "u": "B L D",
        "q": "B L N",
        "k": "B L N",
        "dt": "B L D",
        "dt_bias": "D?",
        "D": "D?",
        "z": "B L D?",
        "initial_state": "S D N?",
    },
    outputs={"out": "B L D", "final_state": "S D N as exact"},
    options={"transition": Choice("diagonal", reference=("exact",))},
    packing="flat",
    least={"k": "state column"},
    saved=saved_states,
    reference=reference.longhorn_scan,
    kernels=lambda name: Kernels(
        importlib.import_module(f"ssmzoo_kernels.longhorn_scan.{name}"), ROLES
    ),
)


def longhorn_scan(
    u: Tensor,  # [B, L, D]
    q: Tensor,  # [B, L, N]
    k: Tensor,  # [B, L, N]
    dt: Tensor,  # [B, L, D]
    dt_bias: Tensor | None = None,  # [D]
    D: Tensor | None = None,  # [D]
    z: Tensor | None = None,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D, N], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    transition: Transition = "diagonal",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Regress each value on its key, online, and read the regressor with the query.

    With ``eps = 1 / (1 + exp(-(dt + dt_bias)) + |k|^2)``, per channel ``i`` and state ``n``::

        S[t,i,n] = (1 - eps[t,i] k[t,n]^2) S[t-1,i,n] + eps[t,i] u[t,i] k[t,n]
        o[t,i]   = (sum_n S[t,i,n] q[t,n] + D[i] u[t,i]) * silu(z[t,i])

    Everything inside is float32 (float64 for float64 inputs); only the output takes u's dtype.

    Args:
        u: Values to store.
        q: Queries, shared by all channels.
        k: Keys, shared by all channels.
        dt: Write strength before the sigmoid, without its bias.
        dt_bias: Added to ``dt`` in float32.
        D: Skip connection from value to output.
        z: Output gate before its SiLU.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, D, N]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        transition: ``"exact"`` uses ``I - eps k k^T`` instead of its diagonal; only the reference
            knows it, and ``backend="auto"`` goes there.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` in u's dtype, and the final state ``[B, D, N]`` (``[S, D, N]``) in
        float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The named backend cannot run on this machine.
    """
    inputs = (u, q, k, dt, dt_bias, D, z, initial_state)
    return SCAN(*inputs, cu_seqlens=cu_seqlens, backend=backend, transition=transition)


__all__ = ["longhorn_scan"]
