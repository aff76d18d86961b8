"""A layer's filters in the forms that decoding uses, computed once until a parameter changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling import LayerState, Sequences, right_aligned
from ssmzoo_kernels import (
    companion_scan,
    companion_step,
    diagonal_step,
    fft_conv,
    inverse_series,
    powers,
    rational_kernel,
    vandermonde,
    vandermonde_state,
)
from ssmzoo_kernels.companion_step import newest_first
from ssmzoo_kernels.dispatch import is_traced
from ssmzoo_kernels.validation import Packing

from .modal import modal_kernel

# taps of kernels that are kept between calls; longer ones would outweigh the model
KEPT_TAPS = 2048


@dataclass
class Recurrence:
    """Filters as recurrences: coefficients of the infinite response.

    Attributes:
        a: Denominators, ``[D_a, n]``.
        b: Numerators, ``[D, n]``.
        gain: Direct gains, ``[D]``.
    """

    a: Tensor
    b: Tensor
    gain: Tensor
    kept: tuple[Tensor, Tensor] | None = None
    columns: tuple[Tensor, Tensor] | None = None

    def step_coefficients(self) -> tuple[Tensor, Tensor]:
        """Return a and b as one step reads them: every channel's own, neighbours side by side."""
        if self._learn():
            return self.a, self.b
        if self.columns is None:
            with torch.inference_mode(False), torch.no_grad():
                own = self.a.repeat_interleave(self.b.shape[0] // self.a.shape[0], dim=0)
                self.columns = own.T.contiguous().T, self.b.T.contiguous().T
        return self.columns

    def series(self, length: int) -> tuple[Tensor, Tensor]:
        """Return ``1 / a`` and ``b / a`` to at least ``length`` terms, ``[D_a, K]``, ``[D, K]``."""
        keeps, learning = not is_traced(), self._learn()
        if keeps and self.kept is not None and self.kept[0].shape[1] >= length:
            return self.kept
        keeps = keeps and not learning and length <= KEPT_TAPS
        count = 1 << max(length - 1, 0).bit_length() if keeps else length
        with torch.inference_mode(False), torch.set_grad_enabled(learning):
            found = inverse_series(self.a, count), rational_kernel(self.a, self.b, count)
        if keeps:
            self.kept = found
        return found

    def _learn(self) -> bool:
        return torch.is_grad_enabled() and (self.a.requires_grad or self.b.requires_grad)


@dataclass
class Oscillations:
    """Filters as modes, each channel with its own.

    Attributes:
        exponent: ``log lambda``, ``[D, N]`` complex128.
        residues: ``[D, N]`` complex.
        gain: Direct gains, ``[D]``.
    """

    exponent: Tensor
    residues: Tensor
    gain: Tensor
    multipliers: Tensor | None = None

    def decay(self) -> Tensor:
        """Return lambda, in the residues' dtype."""
        if self.exponent.requires_grad:
            return self.exponent.exp().to(self.residues)
        if self.multipliers is None:
            with torch.inference_mode(False):
                self.multipliers = self.exponent.exp().to(self.residues)
        return self.multipliers

    def read(self, modes: Tensor) -> Tensor:
        """Return ``Re sum_i r_i z_i`` of a state ``[B, D, N]``: its part of the next output."""
        return (self.residues * modes).real.sum(-1)

    def response(self, modes: Tensor, length: int) -> Tensor:
        """Return the parts of the next outputs from a state, ``[B, length, D]``."""
        return vandermonde(self.residues * modes, self.exponent, length).transpose(1, 2)

    def after(
        self,
        u: Tensor,
        modes: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None,
    ) -> Tensor:
        """Return the state ``[B, D, N]`` after inputs ``[B, L, D]``.

        Args:
            u: Inputs.
            modes: The state before them, zeros if absent.
            lengths: How many of a row's inputs count, ``[B]``, zeros behind them; None: all.
            packing: Boundaries of packed sequences instead; these start from zero.
        """
        steps = u.shape[1]
        if lengths is not None:
            # aligned at their ends, rows of all lengths have the same lags
            u = right_aligned(u, lengths)
        new = vandermonde_state(u, self.exponent, cu_seqlens=packing)
        if modes is None:
            return new
        passed = steps if lengths is None else lengths[:, None, None]
        return powers(self.exponent, passed, modes) * modes + new


@dataclass
class Deployment:
    """A layer's filters, each in the form in which it decodes.

    Attributes:
        recurrence: Those with a state; None if there are none.
        taps: Those without one by their kernel, direct gain excluded, ``[D_w, M]``.
        gain: Their direct gains, ``[D_w]``.
        recurrent: Channels of the former, None for all.
        windowed: Channels of the latter, None for none or all.
        oscillations: Modal filters; then there are no others.
    """

    recurrence: Recurrence | None = None
    taps: Tensor | None = None
    gain: Tensor | None = None
    recurrent: Tensor | None = None
    windowed: Tensor | None = None
    oscillations: Oscillations | None = None
    flipped: Tensor | None = field(default=None, repr=False)

    def last_tap_first(self) -> Tensor:
        """Return the taps as one step needs them, ``[M, D_w]``."""
        assert self.taps is not None
        if self.taps.requires_grad:
            return self.taps.flip(1).T.contiguous()
        if self.flipped is None:
            with torch.inference_mode(False):
                self.flipped = self.taps.flip(1).T.contiguous()
        return self.flipped

    def merge(self, recurrent: Tensor, windowed: Tensor) -> Tensor:
        """Put the outputs of both kinds, ``[B, L, .]``, back into the channels' order."""
        assert self.recurrent is not None
        assert self.windowed is not None
        place = torch.cat([self.recurrent, self.windowed]).argsort()
        return torch.cat([recurrent, windowed], dim=-1)[..., place]


def by_recurrence(
    u: Tensor, filters: Recurrence, state: LayerState, packing: Sequences | None
) -> Tensor:
    """Go on with filters that have a state: a step for one token, else by convolution."""
    ring, position = state.get("ring"), state.get("position")
    if u.shape[1] == 1 and packing is None and ring is not None and position is not None:
        a, b = filters.step_coefficients()
        # the old state stays whole in the ring, so that a forward pass may fail or run again
        inplace = not (ring.requires_grad or torch.compiler.is_compiling())
        y, ring, position = companion_step(
            u.squeeze(1), ring, position, a, b, filters.gain, inplace=inplace
        )
        y = y.unsqueeze(1)
    else:
        a, b = filters.a, filters.b
        taps = max(1, u.shape[1]) if packing is None else packing.kernel_length()
        inverse, kernel = filters.series(taps)
        past = None
        if ring is not None and position is not None:
            past = newest_first(ring, position)
        known = {"kernel": kernel, "inverse": inverse, "cu_seqlens": packing}
        y, last = companion_scan(u, a, b, filters.gain, past, **known)
        ring = F.pad(last, (0, 0, 0, 1))
        position = torch.zeros(ring.shape[0], dtype=torch.int64, device=u.device)
    state.put("ring", ring)
    state.put("position", position)
    return y


def by_modes(
    u: Tensor, filters: Oscillations, state: LayerState, packing: Sequences | None
) -> Tensor:
    """Go on with modal filters: a step for one token, else by convolution."""
    pairs, owed = state.get_row("modes"), state.get_row("owed")
    modes = None if pairs is None else torch.view_as_complex(pairs)
    if u.shape[1] == 1 and packing is None and modes is not None:
        assert owed is not None
        y = (owed + filters.gain * u.squeeze(1)).unsqueeze(1)
        # its read-out of the new state belongs to the next token
        owed, modes = diagonal_step(u.squeeze(1), modes, filters.decay(), None, filters.residues)
    else:
        rows, lengths, tokens = None, None, u.shape[1]
        if packing is not None and (packing.rows is not None or modes is not None):
            rows = packing.aligned()
            u, lengths, packing = rows.gather(u), rows.lengths, None
        taps = max(1, u.shape[1]) if packing is None else packing.kernel_length()
        kernel = modal_kernel(filters.exponent, filters.residues, taps)
        y, _ = fft_conv(u, kernel, filters.gain, cu_seqlens=packing)
        if modes is not None:
            y = y + filters.response(modes, u.shape[1])
        modes = filters.after(u, modes, lengths, packing)
        owed = filters.read(modes)
        if rows is not None:
            y = rows.scatter(y, tokens)
    state.put_row("modes", torch.view_as_real(modes))
    state.put_row("owed", owed)
    return y


def by_window(
    u: Tensor, filters: Deployment, state: LayerState, packing: Sequences | None
) -> Tensor:
    """Go on with filters that have no state but their last M - 1 inputs."""
    taps, past = filters.taps, state.get("inputs")
    assert taps is not None
    assert filters.gain is not None
    if u.shape[1] == 1 and packing is None and past is not None:
        seen = torch.cat([past, u], dim=1)  # [B, M, D]
        state.put("inputs", seen[:, 1:].contiguous())
        y = (seen * filters.last_tap_first()).sum(dim=1, keepdim=True)
        return y + filters.gain * u
    y, final = fft_conv(u, taps, filters.gain, past, cu_seqlens=packing, output_final_state=True)
    assert final is not None
    state.put("inputs", final.contiguous())  # as a step leaves it: one graph
    return y
