"""The mathematics of S4: its discretised state space, and its filters.

A feature's state space is ``x' = A x + B u``, ``y = C x`` with ``A = Lambda - P P*``. Modes come in
conjugate pairs; arrays hold the first of each, ``[H, N]`` for H features. The bilinear step keeps
the form: with ``lambda = (1 + dt Lambda / 2) / (1 - dt Lambda / 2)`` a token is

    w = Re(probe . x),   x <- lambda x + drive u - feedback w,   y = Re(readout . x)

so P P* is a loop around a diagonal system, and Woodbury's identity gives the transfer functions
with the loop. Here they are power series in z, whose first L coefficients need no later ones: a
kernel is the same for every length, without the paper's ``C (I - Abar^L)``. The quotient is well
conditioned whatever is learned: the loop is passive, ``|1 + z E_pf|`` in the unit disc is at least
the reciprocal of ``gain`` below.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels import fft_conv, rational_kernel, vandermonde


class System(NamedTuple):
    """A layer's discretised state space, each ``[H, N]`` complex128."""

    exponent: Tensor  # log lambda, its real part below zero
    drive: Tensor  # how the input enters the state, Bbar
    feedback: Tensor  # how w enters it
    probe: Tensor  # how w is read off the last state
    readout: Tensor  # how the output is read off the new one, 2 C

    @classmethod
    def of(cls, dt: Tensor, A: Tensor, P: Tensor, B: Tensor, C: Tensor) -> "System":
        """Discretise ``Lambda - P P*`` by the bilinear rule; A is Lambda, and dt ``[H, 1]``."""
        half = dt * A / 2
        implicit = dt / (1 - half)
        gain = 1 + (P.abs().square() * implicit.real).sum(-1, keepdim=True)
        felt = (P.conj() * implicit * B).real.sum(-1, keepdim=True)
        drive = implicit * (B - P * (felt / gain))
        probe = P.conj() * (2 / (1 - half)) / gain
        return cls(torch.log((1 + half) / (1 - half)), drive, implicit * P, probe, 2 * C)

    def filters(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return filters kernel, heard, echo and loop, ``[H, length]`` float64, from tap 0 on.

        With ``E_xy(z) = sum_l Re(x . lambda^l y) z^l`` of the diagonal system they are
        ``C Abar^l Bbar``, that is ``E_rd - E_rf heard``; from the input to w,
        ``z E_pd / (1 + z E_pf)``; from w to the part that it subtracts from the output, ``E_rf``;
        and from w to the part that it subtracts from the next w, ``E_pf``. Longer ones begin with
        shorter ones.
        """
        pairs = [(r, x) for r in (self.readout, self.probe) for x in (self.drive, self.feedback)]
        weights = torch.stack([r * x for r, x in pairs])
        direct, echo, open_, loop = vandermonde(weights, self.exponent, length)
        heard = rational_kernel(loop, open_, length)
        echoed, _ = fft_conv(heard.T[None].contiguous(), echo)
        return direct - echoed[0].T, heard, echo, loop

    def response(self, x: Tensor, echo: Tensor, again: Tensor, length: int) -> list[Tensor]:
        """Return the parts of outputs and of w from a state ``[B, H, N]``, ``[B, length, H]`` each.

        ``again`` is ``z E_pf / (1 + z E_pf)``: the part that w subtracts from later w, in all
        rounds.
        """
        weights = ((v.to(x) * x, n) for v, n in ((self.readout, 1), (self.probe, 0)))
        y, w = (vandermonde(v, self.exponent, length, offset=n).mT for v, n in weights)
        w = w - fft_conv(w, again)[0]
        return [y - fft_conv(w, echo)[0], w]

    def transition(self) -> Tensor:
        """Return ``Abar``, ``[H, 2 N, 2 N]``, conjugates last."""
        x = (self.exponent.exp(), self.feedback, self.probe / 2)
        decay, column, row = (torch.cat([half, half.conj()], dim=-1) for half in x)
        return torch.diag_embed(decay) - column[..., :, None] * row[..., None, :]
