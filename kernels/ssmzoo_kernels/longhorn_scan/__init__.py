"""Longhorn's scan: an online learner's closed-form step at every token."""

from torch import Tensor

from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.longhorn_scan import library, reference
from ssmzoo_kernels.longhorn_scan.reference import Transition
from ssmzoo_kernels.validation import check_leading, check_tensor, segment_offsets

OP = "longhorn_scan"


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
    cu_seqlens: Tensor | None = None,  # [S + 1]
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
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        transition: ``"exact"`` uses ``I - eps k k^T`` instead of its diagonal; only the reference
            knows it, and ``backend="auto"`` goes there.
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
    check_leading(OP, "k", k, "[B, L, N]")
    batch, length, width = u.shape
    states = k.shape[2]
    if states < 1:
        raise ValueError(f"{OP}: k must have at least one state column, got {list(k.shape)}")
    check_tensor(OP, "k", k, (batch, length, states), u, "[B, L, N]")
    check_tensor(OP, "q", q, (batch, length, states), u, "[B, L, N]")
    check_tensor(OP, "dt", dt, (batch, length, width), u, "[B, L, D]")
    if dt_bias is not None:
        check_tensor(OP, "dt_bias", dt_bias, (width,), u, "[D]")
    if D is not None:
        check_tensor(OP, "D", D, (width,), u, "[D]")
    if z is not None:
        check_tensor(OP, "z", z, (batch, length, width), u, "[B, L, D]")
    offsets = segment_offsets(OP, u, cu_seqlens)
    if initial_state is not None:
        shape = (offsets.numel() - 1, width, states)
        rule = "[B, D, N]" if cu_seqlens is None else "[S, D, N]"
        check_tensor(OP, "initial_state", initial_state, shape, u, rule)
    if transition not in ("diagonal", "exact"):
        raise ValueError(f"{OP}: transition must be 'diagonal' or 'exact', got {transition!r}")

    if transition == "exact":
        if backend not in ("auto", "reference"):
            raise ValueError(
                f'{OP}: transition="exact" exists only as a reference, got backend={backend!r}; '
                'use backend="auto"'
            )
        chosen = "reference"
    else:
        chosen = choose(OP, backend, u)
    if chosen == "reference":
        record(OP, "reference")
        return reference.longhorn_scan(
            u, q, k, dt, dt_bias, D, z, initial_state, cu_seqlens=cu_seqlens, transition=transition
        )

    tokens = batch * length
    out, final_state = library.longhorn_scan(
        u.reshape(tokens, width),
        q.reshape(tokens, states),
        k.reshape(tokens, states),
        dt.reshape(tokens, width),
        dt_bias,
        D,
        None if z is None else z.reshape(tokens, width),
        initial_state,
        offsets,
        backend=chosen,
    )
    return out.view(batch, length, width), final_state


__all__ = ["longhorn_scan"]
