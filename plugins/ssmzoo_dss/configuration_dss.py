"""Configuration of DSS (arXiv 2203.14343)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class DSSConfig(SSMConfig):
    """DSS: every feature is filtered by a long mixture of N complex exponentials.

    Attributes:
        d_state: N, complex modes per feature. A state space of order 64 with real matrices has 32
            pairs of these.
        kernel_variant: Constraints on the modes. "exp" keeps all real parts negative;
            "exp_no_scale" also leaves out the factor of the time step; "exp_re_im" keeps
            frequencies positive, too; "clip" bounds real parts by 1e-4; "softmax" lets modes grow
            and divides each by its sum over ``kernel_norm_length`` positions.
        lambda_init: Initial eigenvalues: those of HiPPO's normal part, ``-1/2 + i pi n``,
            ``-1/2 + i (2N / pi) (2N / (2n + 1) - 1)``, or random ones. With ``conjugate_pairs`` the
            first three are S4D-LegS, S4D-Lin and S4D-Inv.
        dt_min: Smallest initial time step.
        dt_max: Largest initial time step.
        separate_dt_re_im: One time step for real and one for imaginary parts, equal at first.
        softmax_eps: Regularises the softmax's reciprocal, on the squared size.
        kernel_norm_length: Positions that "softmax" sums over, whatever the input's length. None is
            the published code's behaviour, the length of the input (of the longest in a batch); a
            cache is then impossible. Growing modes cannot go further.
        max_kernel_length: Taps a kernel is cut to; "softmax" then sums over these.
        channels: C, filters per feature; ``out_proj`` mixes them all.
        conjugate_pairs: Every mode stands for its conjugate too, as in S4D: a factor 2.
        block: The layers after the filters: "linear", GELU and a linear layer, or "glu", a GLU of
            twice that layer, as in S4's later code.
        bidirectional: A second set of filters reads later inputs. No cache, no generation.
        legacy_detached_shift: The published code's gradient of growing modes, to reproduce its
            training: too large by ``kernel_norm_length - 1`` times the kernel.
        tie_dropout: Drop whole features of a sequence, also after the filter.
    """

    model_type = "ssmzoo_dss"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "state_size": "d_state",
        "version": "kernel_variant",
        "Lambda_init": "lambda_init",
        "epsilon": "softmax_eps",
        "sep_dt_re_im": "separate_dt_re_im",
    }

    d_state: int = 64
    kernel_variant: Literal["softmax", "exp", "exp_no_scale", "clip", "exp_re_im"] = "exp"
    lambda_init: Literal["skew_hippo", "lin", "inv", "randn"] = "skew_hippo"
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    separate_dt_re_im: bool = False
    softmax_eps: float | int = 1e-7
    kernel_norm_length: int | None = None
    max_kernel_length: int | None = None
    channels: int = 1
    conjugate_pairs: bool = False
    block: Literal["linear", "glu"] = "linear"
    bidirectional: bool = False
    legacy_detached_shift: bool = False
    tie_dropout: bool = True

    def complete(self) -> None:
        """Turn ``use_cache`` off where a cache is impossible."""
        if self.causal and not self.decodable:
            self.use_cache = False

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        self.check_counts("d_state", "channels", "kernel_norm_length", "max_kernel_length")
        self.check_time_steps(self.dt_min, self.dt_max)
        self.check_finite("softmax_eps")
        norm, cap = self.kernel_norm_length, self.max_kernel_length
        if self.kernel_variant == "softmax" and (cap or 0) > (norm or cap or 0):
            raise ValueError(
                "max_kernel_length must not exceed kernel_norm_length, where growing modes end, "
                f"got {cap} and {norm}; leave kernel_norm_length out to sum over all taps"
            )
        if self.kernel_variant == "exp_re_im" and self.lambda_init != "skew_hippo":
            raise ValueError(
                "lambda_init must be 'skew_hippo' with kernel_variant='exp_re_im', whose "
                f"parameters are logarithms of frequencies, got {self.lambda_init!r}"
            )

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input."""
        return super().causal and not self.bidirectional

    @property
    def decodable(self) -> bool:
        """Whether the kernel is the same however long the input is."""
        free = self.kernel_norm_length is None and self.max_kernel_length is None
        return self.kernel_variant != "softmax" or not free
