"""One token of a diagonal state space with complex modes: how such models decode."""

import torch
from torch import Tensor

from ssmzoo_kernels.diagonal_step import library, reference
from ssmzoo_kernels.dispatch import ALL, Backend, choose, record
from ssmzoo_kernels.validation import check_complex, check_leading, check_tensor

OP = "diagonal_step"


def diagonal_step(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N]
    decay: Tensor,  # [H, N]
    drive: Tensor | None,  # [H, N], ones if absent
    readout: Tensor,  # [H, N]
    D: Tensor | None = None,  # [H]
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Advance every mode by one token and read the heads.

    ``z' = decay z + drive u`` and ``y = Re sum_n readout z' + D u``: no factor 2, no conjugate
    partner. Computed in the state's precision; only y takes u's dtype.

    Args:
        u: The inputs.
        state: The modes ``z``, complex64 or complex128.
        decay: What a mode is multiplied with, ``e^{c}``.
        drive: How the input enters a mode; without it, as it is, which saves a third of the
            reading (``readout`` can hold the factor).
        readout: The modes' weights in the output.
        D: Direct term.
        backend: "auto" goes by device, and to torch where gradients are wanted: the kernels have no
            backward. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, H]`` in u's dtype, and the new state ``[B, H, N]``.

    Raises:
        ValueError: Shapes, devices or choices that do not fit, or gradients from a kernel.
        TypeError: Not a tensor, or of the wrong kind.
        RuntimeError: The machine lacks what the named backend needs.
    """
    check_leading(OP, "u", u, "[B, H]")
    if not isinstance(state, Tensor) or state.dim() != 3:
        got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"{OP}: state must be a tensor [B, H, N], got {got}")
    batch, heads = u.shape
    modes = state.shape[2]
    check_complex(OP, "state", state, (batch, heads, modes), u, "[B, H, N]")
    check_complex(OP, "decay", decay, (heads, modes), u, "[H, N]")
    check_complex(OP, "readout", readout, (heads, modes), u, "[H, N]")
    if drive is not None:
        check_complex(OP, "drive", drive, (heads, modes), u, "[H, N]")
    if D is not None:
        check_tensor(OP, "D", D, (heads,), u, "[H]")
    inputs = (u, state, decay, drive, readout, D)
    taped = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    offers = ("reference", "eager") if taped else ALL
    if taped and backend in ("cpu", "triton"):
        raise ValueError(
            f'{OP}(backend="{backend}") has no gradients, and an argument wants them; '
            'call it under torch.no_grad(), or use backend="auto" or "reference"'
        )
    chosen = choose(OP, backend, u, offers, dtype=state.dtype)
    if chosen in ("reference", "eager"):  # one line of torch is both
        record(OP, chosen)
        return reference.diagonal_step(*inputs)
    return library.diagonal_step(*inputs, chosen)


__all__ = ["diagonal_step"]
