"""The filters of an RTF layer: their parameters, kernels, poles, and how they are set.

Dimensions: D hidden, n order, N modes, A denominators, K taps.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssmzoo.modeling import Dynamics, SSMMixer
from ssmzoo_kernels import double, rational_kernel

from .configuration_rtf import RTFConfig
from .filters import SMALLEST_SUM, deployed_numerator, montel
from .implicit import implicit_kernel
from .modal import exponents, modal_kernel, parameters_of
from .stability import SMALL_ORDER, first_not_finite, poles, poles_outside, spectral_radius

_RATIONAL = ("a", "b", "montel_slack")
_MODAL = ("modal_log_decay", "modal_angle", "modal_residues")
_IMPLICIT = (
    "implicit_in",
    "implicit_in_bias",
    "implicit_hidden",
    "implicit_hidden_bias",
    "implicit_out",
    "implicit_frequency",
)
_SSM_PARAMETERS = ("D", *_RATIONAL, *_MODAL, *_IMPLICIT)
# their names in messages
_CALLED = {"a": "denominator", "b": "numerator", "D": "direct gain"}


class FilterBank(SSMMixer):
    """A filter for each feature: rational, modal or implicit, as ``config.filter`` says."""

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(_SSM_PARAMETERS, "ssm")
    config: RTFConfig

    def __init__(self, config: RTFConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, order = config.hidden_size, config.d_state
        sides = 2 if config.bidirectional else 1
        self.D = nn.Parameter(torch.empty(sides * width))
        if config.filter == "rational":
            rows = sides * config.denominators
            self.a = nn.Parameter(torch.empty(rows, order))
            self.b = nn.Parameter(torch.empty(sides * width, order))
            if config.denominator_constraint == "l1_montel":
                self.montel_slack = nn.Parameter(torch.empty(rows))
        elif config.filter == "modal":
            rows, modes = sides * config.denominators, order // 2
            self.modal_log_decay = nn.Parameter(torch.empty(rows, modes))
            self.modal_angle = nn.Parameter(torch.empty(rows, modes))
            self.modal_residues = nn.Parameter(torch.empty(sides * width, modes, 2))
        else:
            hidden, layers = config.implicit_width, config.implicit_layers
            self.implicit_in = nn.Parameter(torch.empty(hidden, config.implicit_features))
            self.implicit_in_bias = nn.Parameter(torch.empty(hidden))
            self.implicit_hidden = nn.Parameter(torch.empty(layers, hidden, hidden))
            self.implicit_hidden_bias = nn.Parameter(torch.empty(layers, hidden))
            self.implicit_out = nn.Parameter(torch.empty(width, hidden))
            self.implicit_frequency = nn.Parameter(torch.empty(hidden))

    def denominators(self) -> Tensor:
        """Return a after the constraint, ``[A, n]``; bidirectional ``[2 A, n]``."""
        if self.config.denominator_constraint == "none":
            return self.a
        return montel(self.a, self.montel_slack, self.config.constraint_margin)

    def exponents(self) -> Tensor:
        """Return the logarithms of modal filters' poles, ``[A, N]``; bidirectional ``[2 A, N]``."""
        return exponents(self.modal_log_decay, self.modal_angle)

    def _residues(self) -> Tensor:
        return torch.view_as_complex(self.modal_residues)

    def gain(self) -> Tensor:
        """Return the direct gain h0, ``[D]``; bidirectional ``[2 D]``."""
        return 2 * self.D if self.config.legacy_double_h0 else self.D

    def kernel(self, length: int) -> Tensor:
        """Return the kernel without direct gain, ``[D, K]``; bidirectional ``[2 D, K]``.

        K is the length, or the number of taps there are if that is less.
        """
        config = self.config
        taps = length if config.taps is None else min(length, config.taps)
        if config.filter == "implicit":
            assert config.trunc_len is not None
            return implicit_kernel(
                self.implicit_in,
                self.implicit_in_bias,
                self.implicit_hidden,
                self.implicit_hidden_bias,
                self.implicit_out,
                self.implicit_frequency,
                config.trunc_len,
                (config.implicit_fast_decay, config.implicit_slow_decay),
                taps,
            )
        if config.filter == "modal":
            return modal_kernel(self.exponents(), self._residues(), taps)
        a, grid = self.denominators(), config.grid
        if grid is None:
            return rational_kernel(a, self.b, taps)
        if taps <= grid:
            return rational_kernel(a, self.b, taps, mode="truncated", trunc_len=grid)
        b, wrapped = deployed_numerator(a, self.b, grid)
        return rational_kernel(a, b, taps) + F.pad(wrapped[:, None], (0, taps - 1))

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return kernels and, of every denominator, poles, radius and number of unstable poles.

        Poles are computed up to order 128 only; the count comes from the winding number.
        """
        kernel, future = self.kernel(hidden_states.shape[1]), None
        if self.config.bidirectional:
            kernel, future = kernel.chunk(2)
            ahead = self.gain().chunk(2)[1]
            future = future + F.pad(ahead[:, None], (0, future.shape[1] - 1))
        if self.config.filter == "implicit":
            return Dynamics(kernel=kernel)
        if self.config.filter == "modal":
            found = self.exponents().exp()
            found = torch.cat([found, found.conj()], dim=1)
            return Dynamics(kernel=kernel, future_kernel=future, poles=found)
        a = self.denominators()
        return Dynamics(
            kernel=kernel,
            future_kernel=future,
            poles=poles(a) if a.shape[1] <= SMALL_ORDER else None,
            radius=spectral_radius(a),
            outside=poles_outside(a),
        )

    def set_filters(self, a: Tensor, b: Tensor, h0: Tensor) -> None:
        """Set the filters to given coefficients, by inverting the constraint.

        Args:
            a: Denominators ``[A, n]`` as used, after the constraint.
            b: Numerators ``[D, n]`` as ``kernel_mode`` defines them.
            h0: Direct gains ``[D]``.

        Raises:
            ValueError: The model has another kind of filter or other shapes, or a denominator
                violates the constraint.
        """
        self._check_given("rational", a=a, b=b, h0=h0)
        with torch.no_grad():
            if self.config.denominator_constraint == "l1_montel":
                total = double(a).abs().sum(1)
                slack = 1 - SMALLEST_SUM - (1 + self.config.constraint_margin) * total
                if bool((slack < 0).any()):
                    row = int(slack.argmin())
                    raise ValueError(
                        f"denominator {row} must have sum |a_i| below 1 under the l1_montel "
                        f"constraint, got {float(total[row]):.4g}; take "
                        "denominator_constraint='none'"
                    )
                self.montel_slack.copy_(slack)
            self.a.copy_(a)
            self.b.copy_(b)
            self.D.copy_(h0 / 2 if self.config.legacy_double_h0 else h0)

    def set_modes(self, poles: Tensor, residues: Tensor, h0: Tensor) -> None:
        """Set the filters to given modes, ``h[t] = Re sum_i r_i lambda_i^(t-1)``.

        Args:
            poles: ``[A, N]`` complex, all inside the unit disc.
            residues: ``[D, N]`` complex.
            h0: Direct gains ``[D]``.

        Raises:
            ValueError: The model has another kind of filter or other shapes, or a pole is not
                inside the unit disc.
        """
        self._check_given("modal", poles=poles, residues=residues, h0=h0)
        outside = ~(poles.abs() < 1)
        if bool(outside.any()):
            row, mode = outside.nonzero()[0].tolist()
            raise ValueError(
                f"poles must lie inside the unit disc, got {complex(poles[row, mode]):.4g} in row "
                f"{row}"
            )
        log_decay, angle = parameters_of(poles, self.modal_angle.dtype)
        with torch.no_grad():
            self.modal_log_decay.copy_(log_decay)
            self.modal_angle.copy_(angle)
            self.modal_residues.copy_(torch.view_as_real(residues.resolve_conj()))
            self.D.copy_(h0 / 2 if self.config.legacy_double_h0 else h0)

    def _check_given(self, kind: str, **given: Tensor) -> None:
        """Fail unless filters are of the model's kind and of its size."""
        config = self.config
        if config.filter != kind:
            setter = "set_filters" if kind == "rational" else "set_modes"
            raise ValueError(f"{setter} needs filter={kind!r}, got {config.filter!r}")
        sides = 2 if config.bidirectional else 1
        rows, width, order = config.denominators, config.hidden_size, config.d_state
        shapes = {
            "a": (rows, order),
            "b": (width, order),
            "poles": (rows, order // 2),
            "residues": (width, order // 2),
            "h0": (width,),
        }
        for name, tensor in given.items():
            expected = [sides * shapes[name][0], *shapes[name][1:]]
            if list(tensor.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")

    def _check_parameters(self) -> None:
        """Fail with layer, row and value unless all parameters of the filters are finite."""
        for name in _SSM_PARAMETERS:
            parameter = getattr(self, name, None)
            wrong = None if parameter is None else first_not_finite(parameter.detach())
            if wrong is not None:
                raise ValueError(
                    f"{_CALLED.get(name, name)} {wrong[0]} of layer {self.layer_idx} must be "
                    f"finite, got {wrong[1]}"
                )

    def _warn_of_growth(self, a: Tensor, outside: Tensor) -> None:
        unstable = int((outside > 0).sum())
        if not unstable:
            return
        row = int(outside.argmax())
        radius = float(spectral_radius(a[row : row + 1]))
        warnings.warn(
            f"layer {self.layer_idx}: {unstable} of {len(a)} denominators have poles outside the "
            f"unit disc (denominator {row}: {int(outside[row])}, the farthest at radius "
            f"{radius:.4g}): outputs grow without bound; use denominator_constraint='l1_montel', "
            "or kernel_mode='truncated' with decode_mode='auto'",
            RuntimeWarning,
            stacklevel=3,
        )

    def _check_finite(self, kernel: Tensor, gain: Tensor) -> None:
        """Fail with the channel, and the radius if that is why, unless all taps are finite."""
        wrong = ~(kernel.isfinite().all(dim=1) & gain.isfinite())
        if not bool(wrong.any()):
            return
        channel = int(wrong.int().argmax())
        reason = "a parameter is not finite"
        if self.config.filter == "rational" and bool(self.a.isfinite().all()):
            a = self.denominators()
            row = channel // (len(wrong) // len(a))
            radius = float(spectral_radius(a[row : row + 1]))
            if radius > 1:
                reason = (
                    f"denominator {row} has poles out to radius {radius:.4g}, so its response "
                    f"overflows within {kernel.shape[1]} taps; use "
                    "denominator_constraint='l1_montel' or kernel_mode='truncated'"
                )
        raise ValueError(
            f"filters must be finite, got layer {self.layer_idx}, channel {channel}: {reason}"
        )
