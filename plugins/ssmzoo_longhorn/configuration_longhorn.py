"""Configuration of Longhorn (arXiv 2407.14207)."""

import math
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class LonghornConfig(SSMConfig):
    """Longhorn: a Mamba block whose scan solves an online regression at every token.

    Attributes:
        d_state: N, keys and queries per token and state columns per channel.
        expand: The mixer's inner width is ``expand * hidden_size``.
        d_conv: K, taps of the causal convolution.
        dt_rank: Rank of the write-strength projection; "auto" is ``ceil(hidden_size / 16)``.
        conv_bias: Whether the convolution has a bias.
        use_bias: Whether ``in_proj`` and ``out_proj`` have biases.
        dt_bias_init: Initial ``dt_bias``; 0 starts every write strength at one half.
        key_init_scale: The rows of ``x_proj`` that make keys start this many times the usual size.
            With ``N = 16`` a state entry has a half-life of about 85 tokens at 1 (``|k|^2`` is
            about 0.3) and of 12 at 8: ``N ln 2 (2 + |k|^2) / |k|^2``.
        query_init_scale: The same for queries. Below 1 the scan starts smaller than the skip.
        rescale_prenorm_residual: Divide ``out_proj`` by ``sqrt(num_hidden_layers)`` at the start.
        transition: "diagonal" is the paper's model; "exact" keeps the whole rank-one transition and
            runs on the slow reference only.
        out_norm: RMSNorm on the scan's output before the gate.
    """

    model_type = "ssmzoo_longhorn"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "state_size": "d_state",
        "conv_kernel": "d_conv",
        "use_conv_bias": "conv_bias",
        "time_step_rank": "dt_rank",
        "beta_rank": "dt_rank",
        "beta_bias_init": "dt_bias_init",
    }

    d_state: int = 16
    expand: int = 2
    d_conv: int = 4
    dt_rank: int | str = "auto"
    conv_bias: bool = True
    use_bias: bool = False
    dt_bias_init: float | int = 0.0
    key_init_scale: float | int = 1.0
    query_init_scale: float | int = 1.0
    rescale_prenorm_residual: bool = True
    transition: Literal["diagonal", "exact"] = "diagonal"
    out_norm: bool = False

    def check(self) -> None:
        """Check that sizes are at least 1 and initial scales positive."""
        super().check()
        self.check_counts("d_state", "expand", "d_conv")
        for name in ("key_init_scale", "query_init_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        self.rank_of(self.dt_rank)

    @property
    def d_inner(self) -> int:
        """E, the mixer's inner width."""
        return self.expand * self.hidden_size

    @property
    def step_rank(self) -> int:
        """R, ``dt_rank`` with "auto" worked out."""
        return self.rank_of(self.dt_rank)
