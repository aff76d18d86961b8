"""Mamba's selective scan: a diagonal state space whose step size is a token's own."""

from typing import get_args

from torch import Tensor

from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.selective_scan import library, reference
from ssmzoo_kernels.selective_scan.reference import Discretization
from ssmzoo_kernels.validation import check_leading, check_tensor, segment_offsets

OP = "selective_scan"


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
    cu_seqlens: Tensor | None = None,  # [S + 1]
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
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        discretization: "euler" as in Mamba's code, "zoh" for the exact zero-order hold.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` in u's dtype, and the final state ``[B, D, N]`` (``[S, D, N]``) in
        float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The machine lacks what the named backend needs.
    """
    check_leading(OP, "u", u, "[B, L, D]")
    check_leading(OP, "A", A, "[D, N]")
    batch, length, width = u.shape
    states = A.shape[1]
    if states < 1:
        raise ValueError(f"{OP}: A must have at least one state column, got {list(A.shape)}")
    check_tensor(OP, "dt", dt, (batch, length, width), u, "[B, L, D]")
    check_tensor(OP, "A", A, (width, states), u, "[D, N]")
    check_tensor(OP, "B", B, (batch, length, states), u, "[B, L, N]")
    check_tensor(OP, "C", C, (batch, length, states), u, "[B, L, N]")
    if D is not None:
        check_tensor(OP, "D", D, (width,), u, "[D]")
    if z is not None:
        check_tensor(OP, "z", z, (batch, length, width), u, "[B, L, D]")
    if dt_bias is not None:
        check_tensor(OP, "dt_bias", dt_bias, (width,), u, "[D]")
    offsets = segment_offsets(OP, u, cu_seqlens)
    if initial_state is not None:
        shape = (offsets.numel() - 1, width, states)
        rule = "[B, D, N]" if cu_seqlens is None else "[S, D, N]"
        check_tensor(OP, "initial_state", initial_state, shape, u, rule)
    if discretization not in get_args(Discretization):
        raise ValueError(f"{OP}: discretization must be 'euler' or 'zoh', got {discretization!r}")

    chosen = choose(OP, backend, u, variant=discretization)
    if chosen == "reference":
        record(OP, "reference")
        inputs = (u, dt, A, B, C, D, z, dt_bias, initial_state)
        return reference.selective_scan(
            *inputs, cu_seqlens=cu_seqlens, discretization=discretization
        )

    tokens = batch * length
    y, final_state = library.selective_scan(
        u.reshape(tokens, width),
        dt.reshape(tokens, width),
        A,
        B.reshape(tokens, states),
        C.reshape(tokens, states),
        D,
        None if z is None else z.reshape(tokens, width),
        dt_bias,
        initial_state,
        offsets,
        discretization=discretization,
        backend=chosen,
    )
    return y.view(batch, length, width), final_state


__all__ = ["selective_scan"]
