"""Configuration of RTF (arXiv 2405.06147) and of the Hyena operator, its baseline."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class RTFConfig(SSMConfig):
    """RTF: every feature is filtered by a rational transfer function of its own.

    Attributes:
        d_state: n, the order of the filters.
        num_denominators: D_a, denominators (or sets of poles) a layer, each shared by as many
            neighbouring features; None is one per feature.
        block: "hyena" filters between two gates; "s4" filters, then GELU and a gated linear map;
            "filter" is the filter alone.
        mixer_rank: "hyena" only: rank of its output, behind a norm; None is Hyena's own square
            projection without a norm.
        d_conv: "hyena" only: taps of the short convolution in front.
        filter: "rational": coefficients; "modal": d_state / 2 damped oscillations, for poles that
            lie too close for coefficients, stable as they are written; or "implicit": Hyena's
            filters, a small network of the position.
        kernel_mode: "exact" takes the power series of b/a, for inputs of any length; "truncated"
            its values on a grid, as the paper's code does, where no state is ever needed.
        trunc_len: M, the grid of the truncated mode, made even; the number of taps of implicit
            filters. Inputs may be longer; taps end there, also in chunks and single tokens.
        denominator_constraint: "l1_montel" keeps all poles inside the unit disc.
        constraint_margin: Least distance from the boundary; 0 is the paper's.
        coefficient_init: How a and b, or the residues of modes, start: "zeros", "xavier", "montel"
            or "copying".
        h0_init: Direct gains of 1, as the paper says, or N(0, 1) as its code has it.
        legacy_double_h0: "hyena" only: count the direct gain twice, as the paper's code does.
        decode_mode: How "truncated" filters continue after M taps, and how they decode. "fir": zero
            after M taps; decodes from the last M - 1 inputs. "auto": zero after M taps; decodes by
            recurrence if the infinite response has decayed to rounding by then, else from the last
            inputs. "recurrent": the infinite response that begins with these taps, for whole
            inputs too; decodes by recurrence.
        mixer_dropout: Probability to drop inputs of the filter ("hyena") or of the gated map
            ("s4").
        bidirectional: A second set of filters reads later inputs. No cache, no generation.
        implicit_features: Inputs of the network of implicit filters: time, sines and cosines; odd.
        implicit_width: Its hidden width.
        implicit_layers: Its hidden layers between the first and the last.
        implicit_frequency: Initial factor inside its sines.
        implicit_fast_decay: Share of the filter's length after which the window on its taps has
            fallen to 1/100, in the channel where it falls fastest.
        implicit_slow_decay: The same in the channel where it falls slowest.
    """

    model_type = "ssmzoo_rtf"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "state_size": "d_state",
        "num_a": "num_denominators",
        "constraint": "denominator_constraint",
        "short_conv": "d_conv",
    }

    d_state: int = 64
    num_denominators: int | None = None
    block: Literal["hyena", "s4", "filter"] = "hyena"
    mixer_rank: int | None = None
    d_conv: int = 3
    filter: Literal["rational", "modal", "implicit"] = "rational"
    kernel_mode: Literal["exact", "truncated"] = "exact"
    trunc_len: int | None = None
    denominator_constraint: Literal["none", "l1_montel"] = "l1_montel"
    constraint_margin: float | int = 1e-3
    coefficient_init: Literal["zeros", "xavier", "montel", "copying"] = "xavier"
    h0_init: Literal["ones", "normal"] = "ones"
    legacy_double_h0: bool = False
    decode_mode: Literal["auto", "recurrent", "fir"] = "auto"
    mixer_dropout: float | int = 0.0
    bidirectional: bool = False
    implicit_features: int = 33
    implicit_width: int = 64
    implicit_layers: int = 2
    implicit_frequency: float | int = 14.0
    implicit_fast_decay: float | int = 0.3
    implicit_slow_decay: float | int = 1.5

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        self.check_counts("d_state", "num_denominators", "mixer_rank", "trunc_len")
        self.check_counts("d_conv", "implicit_width")
        self.check_probabilities("mixer_dropout")
        self.check_finite("constraint_margin")
        if self.hidden_size % self.denominators:
            raise ValueError(
                "num_denominators must divide hidden_size, so that each serves equally many "
                f"features, got {self.denominators} and {self.hidden_size}"
            )
        if self.legacy_double_h0 and self.block != "hyena":
            raise ValueError(f"legacy_double_h0 belongs to block='hyena', got block={self.block!r}")
        if self.mixer_rank is not None and self.block != "hyena":
            raise ValueError(f"mixer_rank belongs to block='hyena', got block={self.block!r}")
        self._check_kernel()

    def _check_kernel(self) -> None:
        if self.filter == "implicit":
            self._check_implicit()
            return
        if self.filter == "modal":
            self._check_modal()
        truncated = self.kernel_mode == "truncated"
        if truncated and self.trunc_len is None:
            raise ValueError(
                "kernel_mode='truncated' needs trunc_len, the length to train with, got None"
            )
        if self.grid is not None and self.grid <= self.d_state:
            raise ValueError(
                "trunc_len must exceed d_state, the filters' order, "
                f"got {self.trunc_len} and {self.d_state}"
            )
        if not truncated and self.decode_mode == "fir":
            raise ValueError(
                "decode_mode='fir' needs kernel_mode='truncated': an exact filter has no last tap, "
                f"got kernel_mode={self.kernel_mode!r}"
            )

    def _check_modal(self) -> None:
        if self.d_state % 2:
            raise ValueError(
                "d_state must be even for filter='modal', a mode and its conjugate, "
                f"got {self.d_state}"
            )
        if self.kernel_mode != "exact":
            raise ValueError(
                "filter='modal' needs kernel_mode='exact': powers of poles never wrap, "
                f"got {self.kernel_mode!r}"
            )

    def _check_implicit(self) -> None:
        if self.trunc_len is None:
            raise ValueError("filter='implicit' needs trunc_len, the number of its taps, got None")
        if self.bidirectional:
            raise ValueError(
                "filter='implicit' looks back only; take filter='rational', or bidirectional=False"
            )
        if self.implicit_features < 3 or not self.implicit_features % 2:
            raise ValueError(
                f"implicit_features must be odd and at least 3, got {self.implicit_features}"
            )
        if self.implicit_layers < 0:
            raise ValueError(f"implicit_layers must be at least 0, got {self.implicit_layers}")
        if not 0 < self.implicit_fast_decay <= self.implicit_slow_decay:
            raise ValueError(
                "implicit_fast_decay and implicit_slow_decay must be positive and in this order, "
                f"got {self.implicit_fast_decay} and {self.implicit_slow_decay}"
            )

    def distilled(self, order: int, kind: Literal["rational", "modal"]) -> "RTFConfig":
        """Return the configuration of this model with filters of small order instead.

        Exact ones without a constraint: whoever fits them answers for their poles.
        """
        fields = self.to_dict() | {
            "filter": kind,
            "kernel_mode": "exact",
            "decode_mode": "auto",
            "trunc_len": None,
            "d_state": order,
            "num_denominators": None,
            "denominator_constraint": "none",
        }
        return RTFConfig.from_dict(fields)

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input."""
        return super().causal and not self.bidirectional

    @property
    def denominators(self) -> int:
        """D_a, ``num_denominators`` with None worked out."""
        return self.hidden_size if self.num_denominators is None else self.num_denominators

    @property
    def taps(self) -> int | None:
        """How many taps a filter has; None for those that never end."""
        if self.filter == "implicit":
            return self.trunc_len
        return None if self.decode_mode == "recurrent" else self.grid

    @property
    def grid(self) -> int | None:
        """M, on how many points the truncated mode evaluates filters; None in the exact mode."""
        if self.filter == "implicit" or self.kernel_mode == "exact" or self.trunc_len is None:
            return None
        return self.trunc_len + self.trunc_len % 2
