"""Configuration of gated linear attention: one class for the models of seven papers."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class LinearAttentionConfig(SSMConfig):
    """Linear attention with a matrix state a head; the defaults are gated DeltaNet.

    Attributes:
        num_heads: H, heads of values and states.
        num_key_heads: Heads of keys and queries, each shared by a group of heads; None: H.
        head_k_dim: K, size of a key. Queries are divided by its root, but those of "elu" and "dt".
        head_v_dim: V, size of a value.
        feature_map: "elu": keys and queries are ``elu(x) + 1``, and outputs are divided by the sum
            of their weights. "silu": SiLU on keys, queries and values. "silu_l2": then keys and
            queries are divided by their length.
        qk_norm: RMSNorm of each head's key and query, before the convolution.
        d_conv: Taps of a short convolution of keys, queries and values; None has none.
        conv_bias: Whether it has a bias.
        rotary: Rotary positions of keys and queries.
        decay: The factor by which a token shrinks the state: 1; in head h ``1 - 2^(-5 - h)``; a
            number a head, or a number a key channel, that depends on the token.
        gate_logit_normalizer: Decays are ``sigmoid(x)^(1 / this)``, as in GLA; None:
            ``exp(-exp(A_log) softplus(x))``, as in Mamba2, gated DeltaNet and KDA.
        decay_rank: Rank of the decay's projection; None: full.
        delta_rule: Write the error of the state's prediction of a value, instead of the value.
        beta: How strongly a token writes: fully, by a sigmoid, or by Mamba2's ``dt``, the softplus
            that its decay is made of.
        beta_scale: Times the sigmoid. Up to 2 the delta rule is stable; above 1 it turns signs.
        skip: Add ``D`` times the value to a head's output.
        out_norm: RMSNorm of each head before the gate, or after it of all heads ("gated") or of
            those that share keys ("gated_group").
        out_norm_eps: What that norm adds to the mean square; None: ``rms_norm_eps``.
        out_gate: The activation of the output's gate.
        gate_rank: Rank of the gate's projection; None: full.
        gate_bias: Whether a gate of low rank has a bias.
    """

    model_type = "ssmzoo_linear_attention"
    attribute_map: ClassVar[dict[str, str]] = {
        **{**SSMConfig.attribute_map, "num_attention_heads": "num_heads"},
        **{"d_state": "head_k_dim", "state_size": "head_k_dim", "conv_kernel": "d_conv"},
    }

    num_heads: int = 4
    num_key_heads: int | None = None
    head_k_dim: int = 128
    head_v_dim: int = 128
    feature_map: Literal["identity", "elu", "silu", "silu_l2"] = "silu_l2"
    qk_norm: bool = False
    d_conv: int | None = 4
    conv_bias: bool = False
    rotary: bool = False
    decay: Literal["none", "fixed", "scalar", "channel"] = "scalar"
    gate_logit_normalizer: float | int | None = None
    decay_rank: int | None = None
    delta_rule: bool = True
    beta: Literal["none", "sigmoid", "dt"] = "sigmoid"
    beta_scale: float | int = 1.0
    skip: bool = False
    out_norm: Literal["none", "head", "gated", "gated_group"] = "head"
    out_norm_eps: float | int | None = None
    out_gate: Literal["none", "silu", "sigmoid"] = "silu"
    gate_rank: int | None = None
    gate_bias: bool = False

    def check(self) -> None:
        """Check that sizes are at least 1, and that the fields fit each other."""
        super().check()
        self.check_counts("num_heads", "num_key_heads", "head_k_dim", "head_v_dim")
        self.check_counts("d_conv", "decay_rank", "gate_rank")
        eps = self.out_norm_eps
        tau, depends = self.gate_logit_normalizer, self.decay in ("scalar", "channel")
        softplus, unit = self.decay == "scalar" and tau is None, self.feature_map == "silu_l2"
        # by field: its needs of other fields, and whether they are met
        for name, needs, met in (
            ("num_key_heads", "to divide num_heads", self.num_heads % self.key_heads == 0),
            ("head_k_dim", "to be even with rotary", not (self.rotary and self.head_k_dim % 2)),
            ("gate_logit_normalizer", "to be positive", tau is None or 0 < tau < float("inf")),
            ("gate_logit_normalizer", "decay 'scalar' or 'channel'", tau is None or depends),
            ("decay_rank", "decay 'scalar' or 'channel'", self.decay_rank is None or depends),
            ("gate_rank", "an out_gate", self.gate_rank is None or self.out_gate != "none"),
            ("out_norm_eps", "to be at least 0 and finite", 0 <= (eps or 0) < float("inf")),
            ("out_norm_eps", "an out_norm", eps is None or self.out_norm != "none"),
            ("gate_bias", "gate_rank", not self.gate_bias or self.gate_rank is not None),
            ("out_norm", "out_gate 'silu'", not self.norms_gated or self.out_gate == "silu"),
            ("conv_bias", "d_conv", not self.conv_bias or self.d_conv is not None),
            ("delta_rule", "feature_map 'silu_l2'", not self.delta_rule or unit),
            ("delta_rule", "beta 'none' or 'sigmoid'", not self.delta_rule or self.beta != "dt"),
            ("beta", "decay 'scalar' of a softplus", self.beta != "dt" or softplus),
            ("beta_scale", "beta 'sigmoid'", self.beta_scale == 1 or self.beta == "sigmoid"),
            ("beta_scale", "to be above 0 and at most 2", 0 < self.beta_scale <= 2),
        ):
            if not met:
                raise ValueError(f"{name} needs {needs}, got {name}={getattr(self, name)!r}")

    @property
    def norms_gated(self) -> bool:
        """Whether the gate comes before the norm."""
        return self.out_norm.startswith("gated")

    @property
    def key_heads(self) -> int:
        """G, ``num_key_heads`` worked out."""
        return self.num_heads if self.num_key_heads is None else self.num_key_heads
