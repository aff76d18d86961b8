"""One step of a diagonal recurrence on GPUs: every mode is read once and written once."""

# a kernel launch is no ordinary call: Triton's types do not describe it
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmzoo_kernels.launches import cdiv, launch, next_power_of_2
from ssmzoo_kernels.scan.triton import unfold


@triton.jit
def load_pair(x, at, mask):
    """Load complex numbers as their real and imaginary parts."""
    return tl.split(tl.load(x + at, mask=mask, other=0.0))


@triton.jit
def diagonal_step_kernel(
    u,
    state,
    decay,
    drive,
    readout,
    direct,
    y,
    new_state,
    H: tl.constexpr,
    N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Advance ``BLOCK_H`` heads of one row of the batch and read them out."""
    batch, block = unfold(tl.cdiv(H, BLOCK_H))
    h = block.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = batch * H + h
    inputs = tl.load(u + row, mask=h < H, other=0.0).to(y.dtype.element_ty)
    total = inputs * 0.0
    if direct is not None:
        total += tl.load(direct + h, mask=h < H, other=0.0) * inputs
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N))[None, :, None]
        pair = tl.arange(0, 2)[None, None, :]
        mask = (h < H)[:, None, None] & (n < N) & (pair < 2)
        shared = 2 * (h[:, None, None] * N + n) + pair
        own = 2 * (row[:, None, None] * N + n) + pair
        zr, zi = load_pair(state, own, mask)
        ar, ai = load_pair(decay, shared, mask)
        nr = ar * zr - ai * zi
        ni = ar * zi + ai * zr
        if drive is not None:
            br, bi = load_pair(drive, shared, mask)
            nr += br * inputs[:, None]
            ni += bi * inputs[:, None]
        else:
            nr += inputs[:, None]
        tl.store(new_state + own, tl.join(nr, ni), mask=mask)
        cr, ci = load_pair(readout, shared, mask)
        total += tl.sum(cr * nr - ci * ni, axis=1)
    tl.store(y + row, total, mask=h < H)


def forward(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N] complex
    decay: Tensor,  # [H, N] complex
    drive: Tensor | None,  # [H, N] complex
    readout: Tensor,  # [H, N] complex
    D: Tensor | None,  # [H]
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[B, H]`` in u's dtype and the new state ``[B, H, N]``."""
    batch, heads, modes = state.shape
    exact = state.dtype.to_real()
    y = torch.empty(u.shape, dtype=exact, device=u.device)
    new_state = torch.empty(state.shape, dtype=state.dtype, device=u.device)
    block = min(64, max(16, int(next_power_of_2(modes))))
    rows = 256 // block
    launch(
        diagonal_step_kernel,
        (batch * cdiv(heads, rows),),
        u.contiguous(),
        _pairs(state, state.dtype),
        _pairs(decay, state.dtype),
        _pairs(drive, state.dtype),
        _pairs(readout, state.dtype),
        None if D is None else D.to(exact).contiguous(),
        y,
        torch.view_as_real(new_state),
        H=heads,
        N=modes,
        BLOCK_H=rows,
        BLOCK_N=block,
        num_warps=2,
    )
    return y.to(u.dtype), new_state


def _pairs(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.view_as_real(x.to(dtype).resolve_conj().contiguous())
