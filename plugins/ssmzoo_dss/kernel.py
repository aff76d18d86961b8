"""The mathematics of diagonal state spaces: spectra, kernels, and the state they are stepped by.

A feature's filter is a sum of N complex exponentials, ``K[l] = Re sum_n rho_n e^{c_n l}`` with
``c = dt lambda``. The variants differ in the range of lambda and in rho. Only "softmax" lets modes
grow; it divides each by its sum over ``norm_length`` positions. A growing mode is written as one
that decays away from the last of these, ``e^{c' (norm_length - 1 - l)}`` with ``c' = -c``, so that
nothing ever overflows.

What surprises: there is no factor 2 and no conjugate partner (except on request); everything of
size [H, N] is complex128, because phases ``c l`` of long sequences have no digits left in float32.

Dimensions: B batch, L length, H hidden, N modes, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmzoo.modeling import hippo_legs, right_aligned
from ssmzoo_kernels import double, powers, vandermonde, vandermonde_state
from ssmzoo_kernels.validation import Packing

CLIP = 1e-4  # the largest real part of the variant "clip"
EXP_FLOOR = 1e-7  # of |lambda|^2 in the reciprocal of the variants without a softmax


def initial_eigenvalues(modes: int, kind: str, constrained: bool) -> tuple[Tensor, Tensor]:
    """Return real and imaginary parts ``[N]`` that a model starts with; float64, on the CPU.

    Args:
        modes: N.
        kind: All but "randn" have the real part -1/2; "skew_hippo" has the frequencies of HiPPO's
            normal part, falling, "lin" ``pi n`` and "inv" ``(2N / pi) (2N / (2n + 1) - 1)``;
            "randn" draws every part from N(0, 1).
        constrained: The real part must be negative; "randn" then takes -1/2 too.
    """
    real = torch.full((modes,), -0.5, dtype=torch.float64, device="cpu")
    if kind == "skew_hippo":
        return real, hippo_legs(2 * modes)[0].flip(0)
    place = torch.arange(modes, dtype=torch.float64, device="cpu")
    if kind == "lin":
        return real, math.pi * place
    if kind == "inv":
        return real, 2 * modes / math.pi * (2 * modes / (2 * place + 1) - 1)
    if not constrained:
        real = torch.randn(modes, dtype=torch.float64, device="cpu")
    return real, torch.randn(modes, dtype=torch.float64, device="cpu")


def exponents(eigenvalues: Tensor, log_dt: Tensor) -> Tensor:
    """Return ``c = dt lambda``, ``[H, N]``; two columns of ``log_dt`` step the parts separately."""
    dt = double(log_dt).exp()
    if dt.dim() == 1:
        return dt[:, None] * eigenvalues
    return torch.complex(dt[:, :1] * eigenvalues.real, dt[:, 1:] * eigenvalues.imag)


def modes_of(
    eigenvalues: Tensor,  # [N] complex128
    log_dt: Tensor,  # [H] or [H, 2]
    weight: Tensor,  # [C, H, N, 2]
    *,
    variant: str,
    norm_length: int,
    eps: float,
    conjugate_pairs: bool,
    legacy_detached_shift: bool,
) -> Modes:
    """Return the modes of a layer.

    ``rho = W (e^c - 1) / lambda`` for the variants "exp", "exp_re_im" and "clip" (zero-order hold),
    ``rho = W`` for "exp_no_scale", and for "softmax" ``W / lambda`` over the row's sum
    ``(e^{c' norm_length} - 1) / (e^{c'} - 1)``, the reciprocal regularised by ``eps``.

    Args:
        eigenvalues: lambda.
        log_dt: Logarithms of the time steps.
        weight: W in pairs of real numbers.
        variant: ``kernel_variant`` of the configuration.
        norm_length: Positions that a softmax sums over; the other variants ignore it.
        eps: Added to the squared size of the divisor of "softmax".
        conjugate_pairs: Every mode stands for its conjugate too: a factor 2.
        legacy_detached_shift: The published code's gradient of growing modes, too large by
            ``(norm_length - 1)`` times the kernel; values are the same.
    """
    c = exponents(eigenvalues, log_dt)
    w = torch.view_as_complex(double(weight))
    grows = None
    if variant == "softmax":
        grows = eigenvalues.real > 0
        falling = torch.where(grows, -c, c)
        divisor = torch.expm1(falling * norm_length) * eigenvalues
        size = divisor.real.square() + divisor.imag.square() + eps
        # zero only for lambda = 0 and eps = 0, where the mode drops out
        inverse = divisor.conj() / torch.where(size > 0, size, 1.0)
        rho = w * (torch.expm1(falling) * inverse)
        if legacy_detached_shift:
            shift = (c - c.detach()) * (norm_length - 1)
            rho = rho * torch.where(grows, 1 + shift, 1.0)
        c = falling
    elif variant == "exp_no_scale":
        rho = w
    else:
        size = eigenvalues.real.square() + eigenvalues.imag.square()
        rho = w * (torch.expm1(c) * (eigenvalues.conj() / size.clamp(min=EXP_FLOOR)))
    if conjugate_pairs:
        rho = 2 * rho
    exact = torch.complex128 if weight.dtype == torch.float64 else torch.complex64
    if grows is None:
        return Modes(c, rho.to(weight.device, exact), None, None)
    return Modes(c, rho.to(weight.device, exact), grows.to(weight.device), norm_length)


@dataclass(frozen=True)
class Modes:
    """The exponentials of a layer's kernels, which also step its state.

    The state ``z [B, H, N]`` does not depend on W, so all channels share it, nor on
    ``norm_length``. A mode that falls keeps ``z = e^c z + u``. One that grows keeps
    ``z = sum_k e^{c' k} u_k`` over absolute positions k, and is read out by
    ``rho e^{c' (norm_length - 1 - k)}``: every exponential decays.

    Attributes:
        exponent: ``c'``, ``[H, N]`` complex128, with ``Re <= 0`` (``<= dt CLIP`` for "clip").
        readout: rho, ``[C, H, N]``.
        grows: Which modes grow with the lag, ``[N]``; None if none can.
        norm_length: From where growing modes count; None if none can grow.
    """

    exponent: Tensor
    readout: Tensor
    grows: Tensor | None
    norm_length: int | None

    @property
    def reversed(self) -> Tensor | None:
        """Return ``grows`` for every feature, ``[H, N]``."""
        return None if self.grows is None else self.grows.expand_as(self.exponent)

    def kernel(self, taps: int) -> Tensor:
        """Return the filters ``[C, H, taps]``; growing modes have ``norm_length`` taps at most."""
        spare = 0 if self.norm_length is None else max(self.norm_length - taps, 0)
        return vandermonde(
            self.readout, self.exponent, taps, reversed=self.reversed, norm_length=taps + spare
        )

    def response(
        self, z: Tensor, position: Tensor | None, length: int, lengths: Tensor | None
    ) -> Tensor:
        """Return the parts of the next outputs from a state, ``[B, length, C * H]``.

        Args:
            z: ``[B, H, N]`` complex.
            position: Tokens each row has seen, ``[B]``; only growing modes ask.
            length: How many outputs.
            lengths: How many of them each row has, ``[B]``, from the first on; None: all.
        """
        weight = self.readout[:, None] * z  # [C, B, H, N]
        if self.grows is None:
            return _features(vandermonde(weight, self.exponent, length, offset=1))
        assert position is not None
        assert self.norm_length is not None
        end = position + (length if lengths is None else lengths)
        late = (self.norm_length - end).clamp(min=0)[:, None, None]
        weight = torch.where(self.grows, weight * powers(self.exponent, late, z), weight)
        if lengths is None:
            # falling modes have the lags 1 ... length, growing ones length - 1 ... 0
            y = vandermonde(
                weight,
                self.exponent,
                length,
                offset=1,
                reversed=self.reversed,
                norm_length=length + 1,
            )
            return _features(y)
        falling = weight.masked_fill(self.grows, 0)
        growing = weight.masked_fill(~self.grows, 0)
        y = vandermonde(falling, self.exponent, length, offset=1)
        everything = torch.ones_like(self.exponent, dtype=torch.bool)
        ending = vandermonde(growing, self.exponent, length, reversed=everything)
        return _features(y) + _rolled(_features(ending), lengths - length)

    def state(
        self,
        u: Tensor,  # [B, L, H]
        z: Tensor | None,
        position: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None,
    ) -> Tensor:
        """Return the state ``[B, H, N]`` after some inputs; ``[S, H, N]`` for packed sequences.

        Args:
            u: Inputs.
            z: The state before them, zeros if absent.
            position: Tokens each row had seen, ``[B]``; only growing modes ask.
            lengths: How many of a row's inputs count, ``[B]``, zeros behind them; None: all.
            packing: Boundaries of packed sequences instead; these start from zero.
        """
        c = self.exponent
        if lengths is None:
            new = vandermonde_state(u, c, reversed=self.reversed, cu_seqlens=packing)
        else:
            # aligned at their ends, sequences of all lengths have the same lags
            new = vandermonde_state(right_aligned(u, lengths), c)
            if self.grows is not None:
                everything = torch.ones_like(c, dtype=torch.bool)
                new = torch.where(self.grows, vandermonde_state(u, c, reversed=everything), new)
        if z is None:
            return new
        steps = u.shape[1] if lengths is None else lengths[:, None, None]
        fallen = powers(c, steps, z) * z + new
        if self.grows is None:
            return fallen
        assert position is not None
        phase = powers(c, position[:, None, None], z)
        return torch.where(self.grows, z + phase * new, fallen)


def _rolled(x: Tensor, shift: Tensor) -> Tensor:
    """Move row b of ``[B, L, H]`` by ``shift[b]`` columns to the right, around the end."""
    length = x.shape[1]
    columns = torch.arange(length, device=x.device) - shift[:, None]  # [B, L]
    return x[torch.arange(x.shape[0], device=x.device)[:, None], columns % max(length, 1)]


def _features(y: Tensor) -> Tensor:
    """Map ``[C, B, H, L]`` to ``[B, L, C * H]``."""
    return y.permute(1, 3, 0, 2).flatten(2)
