"""The mathematics of SpaceTime: companion matrices as transfer functions, and fixed filters.

``A = S + a e^T``: S moves a state down by one place, a is the last column. K state spaces, order d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import double

LONGEST_AVERAGE = 63  # inputs that a moving average of ``preprocess`` may cover


def unit(x: Tensor) -> Tensor:
    """Divide rows by their 1-norms, or 1e-4; of a, so that A's eigenvalues are at most 1."""
    return F.normalize(double(x), p=1.0, dim=-1, eps=1e-4)


def transfer_function(a: Tensor, B: Tensor, *readouts: Tensor) -> list[Tensor]:
    """Return alpha and, of each read-out C, beta: ``C (z - A)^-1 B = beta(z) / alpha(z)``.

    All are ``[K, d]``: ``alpha(z) = det(1 - A / z) = 1 + sum_i alpha_i z^-i`` with a in reverse,
    ``beta(z) = sum_i beta_i z^-i``, i = 1 .. d. Numerators cost O(d log d): by Woodbury's identity,
    as in the paper's Algorithm 1, they are ``<C, B> alpha + <C, a> <e, B>`` with
    ``<x, y> = x (z - S)^-1 y``, where terms behind ``z^-d`` cancel.
    """
    order = a.shape[-1]
    size, alpha = 2 * order, -a.flip(-1)
    late = torch.stack([F.pad(alpha, (1, 0), value=1.0), F.pad(B.flip(-1), (1, 0))])
    column, late = torch.fft.rfft(torch.stack([B, a]), n=size), torch.fft.rfft(late, n=size)
    found = [alpha]
    for C in readouts:
        lags = torch.fft.irfft(torch.fft.rfft(C, n=size) * column.conj(), n=size)[..., :order]
        beta = torch.fft.irfft((torch.fft.rfft(lags, n=size) * late).sum(0), n=size)
        found.append(beta[..., :order])
    return found


def fixed_filters(width: int) -> Tensor:
    """Return the filters of ``preprocess``, ``[H, 63]``, the last tap for the current input.

    Of eight features, four take differences, ``(1 - 1/z)^j`` for j = 0 to 3, and four the residual
    of a moving average over m inputs, which is drawn for each, ``4 <= m < 64``.
    """
    windows = torch.randint(4, LONGEST_AVERAGE + 1, (width // 8, 4, 1), device="cpu")
    filters = torch.zeros(width // 8, 8, LONGEST_AVERAGE, device="cpu")
    filters[:, 4:] = -(torch.arange(LONGEST_AVERAGE, device="cpu") < windows).float() / windows
    filters[..., 0] += 1
    for order in (1, 2, 3):
        filters[:, order] = filters[:, order - 1] - filters[:, order - 1].roll(1, dims=-1)
    return filters.flatten(0, 1).flip(1)
