"""Filters as damped oscillations: ``h[t] = Re sum_i r_i lambda_i^(t-1)`` for t >= 1.

Any poles inside the unit disc, clustered ones too, which coefficients cannot hold. A mode and its
conjugate are one real filter of order 2, so n / 2 modes are a filter of order n.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import double, vandermonde

# the largest decay: e^-decay is still a normal number of float32
FASTEST = 80.0


def exponents(log_decay: Tensor, angle: Tensor) -> Tensor:
    """Return ``log lambda`` with ``lambda = e^(-e^log_decay + i angle)``, complex128.

    Of lambda as a step multiplies with it, rounded to the parameters' precision: so kernels, which
    take powers, and steps are of the same filter. Every lambda lies inside the disc.
    """
    decay = double(log_decay).exp().clamp(_slowest(log_decay.dtype), FASTEST)
    given = torch.complex(-decay, double(angle))
    rounded = given.detach().exp().to(torch.promote_types(log_decay.dtype, torch.complex64))
    return given + (rounded.to(given.dtype).log() - given.detach())


def parameters_of(poles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the ``log_decay`` and ``angle`` of given poles, of which all must lie in the disc."""
    poles = double(poles)
    decay = (-poles.abs().log()).clamp(_slowest(dtype), FASTEST)
    return decay.log().to(dtype), poles.angle().to(dtype)


def _slowest(dtype: torch.dtype) -> float:
    # a slower lambda might round to the circle
    return 2 * torch.finfo(dtype).eps


def modal_kernel(
    exponent: Tensor,  # [A, N]
    residues: Tensor,  # [D, N] complex
    length: int,
) -> Tensor:
    """Return the taps ``[D, length]``; tap 0 is zero, and A sets of poles serve D channels."""
    own = exponent.repeat_interleave(residues.shape[0] // exponent.shape[0], dim=0)
    # a tap too many, because length - 1 would be a size of its own in exported graphs
    return F.pad(vandermonde(residues, own, length), (1, 0))[:, :length]
