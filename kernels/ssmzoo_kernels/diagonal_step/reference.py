"""One step of a diagonal recurrence in torch, with gradients; the judge and the fallback."""

from torch import Tensor


def diagonal_step(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N] complex
    decay: Tensor,  # [H, N] complex
    drive: Tensor | None,  # [H, N] complex
    readout: Tensor,  # [H, N] complex
    D: Tensor | None,  # [H]
) -> tuple[Tensor, Tensor]:
    """Step (equations and shapes: the public op of the same name)."""
    exact = state.real.dtype  # torch.compile does not know dtype.to_real
    inputs = u.to(exact)
    new = inputs.unsqueeze(-1) if drive is None else drive.to(state.dtype) * inputs.unsqueeze(-1)
    state = decay.to(state.dtype) * state + new
    y = (readout.to(state.dtype) * state).real.sum(-1)
    if D is not None:
        y = y + D.to(exact) * inputs
    return y.to(u.dtype), state
