"""The long convolution as a sum over its taps; the judge of the other implementations."""

import torch
from torch import Tensor

from ssmzoo_kernels.scan import zeros_on_tape


def fft_conv(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, K - 1, D]
    future_kernel: Tensor | None = None,  # [D, F]
) -> Tensor:
    """Convolve along the sequence (equations and shapes: the public op of the same name)."""
    length, taps = u.shape[1], kernel.shape[1]
    exact = torch.promote_types(torch.float32, u.dtype)
    inputs = u.to(exact)
    if initial_state is None:
        initial_state = u.new_zeros(u.shape[0], taps - 1, u.shape[2])
    history = torch.cat([initial_state.to(u.dtype).to(exact), inputs], dim=1)
    y = zeros_on_tape(inputs, future_kernel)
    for j in range(taps):
        begin = taps - 1 - j
        y = y + kernel[:, j].to(exact) * history[:, begin : begin + length]
    if future_kernel is not None:
        for j in range(min(future_kernel.shape[1], length)):
            ahead = torch.nn.functional.pad(inputs[:, j + 1 :], (0, 0, 0, j + 1))
            y = y + future_kernel[:, j].to(exact) * ahead
    if D is not None:
        y = y + D.to(exact) * inputs
    return y.to(u.dtype)
