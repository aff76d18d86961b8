"""Mamba's selective scan: a diagonal state space whose step size is a token's own."""

import importlib

from torch import Tensor

from ssmzoo_kernels.declaration import Choice, Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.scan import Kernels, saved_states
from ssmzoo_kernels.selective_scan import reference
from ssmzoo_kernels.selective_scan.reference import Discretization
from ssmzoo_kernels.validation import Packing

# to ``scan``
ROLES = ("u", "dt", "param", "k", "q", "skip", "z", "dt_bias", "initial_state")
SCAN = Op(
    "selective_scan",
    inputs={
        "u": "B L D",
        "dt": "B L D",
        "A": "D N",
        "B": "B L N",
        "C": "B L N",
        "D": "D?",
        "z": "B L D?",
        "dt_bias": "D?",
        "initial_state": "S D N?",
    },
    outputs={"y": "B L D", "final_state": "S D N as exact"},
    options={"discretization": Choice("euler", "zoh")},
    variant="discretization",
    packing="flat",
    least={"A": "state column"},
    saved=saved_states,
    reference=reference.selective_scan,
    kernels=lambda name: Kernels(
        importlib.import_module(f"ssmzoo_kernels.selective_scan.{name}"), ROLES
    ),
)


def selective_scan(
    u: Tensor,  # [B, L, D]
    dt: Tensor,  # [B, L, D]
    A: Tensor,  # [D, N]
    B: Tensor,  # [B, L, N]
    C: Tensor,  # [B, L, N]
    D: Tensor | None = None,  # [D]
    z: Tensor | None = None,  # [B, L, D]
    dt_bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, D, N], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    discretization: Discretization = "euler",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run Mamba's recurrence (S6), whose step sizes, input and readout vectors are the token's.

    With ``delta = softplus(dt + dt_bias)``, per channel ``i`` and state ``n``::

        h[t,i,n] = exp(delta[t,i] A[i,n]) h[t-1,i,n] + w[t,i,n] B[t,n] u[t,i]
        y[t,i]   = (sum_n h[t,i,n] C[t,n] + D[i] u[t,i]) * silu(z[t,i])

    where ``w`` is ``delta`` ("euler") or ``expm1(delta A) / A`` ("zoh"). Everything inside is
    float32 (float64 for float64 inputs); only the output takes u's dtype.

    Args:
        u: Inputs.
        dt: Step sizes before the softplus, without their bias.
        A: Rates, negative in a stable model; 0 is allowed, and "zoh" takes its limit there.
        B: Input vectors, shared by all channels.
        C: Readout vectors, shared by all channels.
        D: Skip connection from input to output.
        z: Output gate before its SiLU.
        dt_bias: Added to ``dt`` in float32. The softplus is torch's: above 20, the number itself.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, D, N]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        discretization: "euler" as in Mamba's code, "zoh" for the exact zero-order hold.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` in u's dtype, and the final state ``[B, D, N]`` (``[S, D, N]``) in
        float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The named backend cannot run on this machine.
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
    return SCAN(*inputs, cu_seqlens=cu_seqlens, backend=backend, discretization=discretization)


__all__ = ["selective_scan"]
