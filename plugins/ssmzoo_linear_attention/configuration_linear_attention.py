"""Configuration of gated linear attention: one class for the models of ten papers."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig

_OWN_KEYS = (
    "decay 'channel', gate_logit_normalizer 1, beta 'none', no num_key_heads, d_conv and qk_norm"
)
_BARE = "gate_logit_normalizer, feature_map 'identity' and no delta_rule"


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
            queries are divided by their length. "complement": keys are one minus the decay, as in
            HGRN2, and queries get a SiLU; the decays of layers behind the first have lower bounds,
            which the model holds.
        qk_norm: RMSNorm of each head's key and query, before the convolution.
        d_conv: Taps of a short convolution of keys, queries and values; None has none.
        conv_bias: Whether it has a bias.
        rotary: Rotary positions of keys and queries.
        decay: The factor by which a token shrinks the state: 1; in head h ``1 - 2^(-5 - h)``; a
            number a head, or a number a key channel, that depends on the token.
        gate_logit_normalizer: Decays are ``sigmoid(x)^(1 / this)``, as in GLA, HGRN2 and mLSTM;
            None: ``exp(-exp(A_log) softplus(x))``, as in Mamba2, gated DeltaNet and KDA.
        decay_rank: Rank of the decay's projection; None: full.
        delta_rule: Write the error of the state's prediction of a value, instead of the value.
        num_writes: How many values a token writes by the delta rule, one after the other, each
            under a key of its own; the state decays before the first (DeltaProduct).
        beta: How strongly a token writes: fully, by a sigmoid, by Mamba2's ``dt``, the softplus
            that its decay is made of, or by mLSTM's exponential. With that the gates' inputs are
            soft-capped at 15, and outputs are divided by the sum of their weights, or by 1 if its
            size is less.
        beta_scale: Times the sigmoid. Up to 2 the delta rule is stable; above 1 it turns signs.
        skip: Add ``D`` times the value to a head's output.
        out_norm: RMSNorm of each head before the gate, or after it of all heads ("gated") or of
            those that share keys ("gated_group"). "head_layer": LayerNorm of each head, with a
            weight for every column of all heads and no bias.
        out_norm_eps: What that norm adds to the mean square; None: ``rms_norm_eps``.
        out_gate: The activation of the output's gate.
        gate_rank: Rank of the gate's projection; None: full.
        gate_bias: Whether a gate of low rank has a bias.
        logit_soft_cap: Logits of a language model are ``c tanh(x / c)`` with this c; None: x.
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
    feature_map: Literal["identity", "elu", "silu", "silu_l2", "complement"] = "silu_l2"
    qk_norm: bool = False
    d_conv: int | None = 4
    conv_bias: bool = False
    rotary: bool = False
    decay: Literal["none", "fixed", "scalar", "channel"] = "scalar"
    gate_logit_normalizer: float | int | None = None
    decay_rank: int | None = None
    delta_rule: bool = True
    num_writes: int = 1
    beta: Literal["none", "sigmoid", "dt", "exp"] = "sigmoid"
    beta_scale: float | int = 1.0
    skip: bool = False
    out_norm: Literal["none", "head", "head_layer", "gated", "gated_group"] = "head"
    out_norm_eps: float | int | None = None
    out_gate: Literal["none", "silu", "sigmoid"] = "silu"
    gate_rank: int | None = None
    gate_bias: bool = False
    logit_soft_cap: float | int | None = None

    def check(self) -> None:
        """Check that sizes are at least 1, and that the fields fit each other."""
        super().check()
        self.check_counts("num_heads", "num_key_heads", "head_k_dim", "head_v_dim")
        self.check_counts("d_conv", "decay_rank", "gate_rank", "num_writes")
        eps = self.out_norm_eps
        tau, depends = self.gate_logit_normalizer, self.decay in ("scalar", "channel")
        softplus, unit = self.decay == "scalar" and tau is None, self.feature_map == "silu_l2"
        own_keys = self.num_key_heads is None and self.d_conv is None and self.beta == "none"
        own_keys = own_keys and self.decay == "channel" and tau == 1 and not self.qk_norm
        bare = self.feature_map == "identity" and not self.delta_rule and tau is not None
        one, cap, sigmoid = self.num_writes == 1, self.logit_soft_cap, self.out_gate == "sigmoid"
        # by field: its needs of other fields, and whether they are met
        for name, needs, met in (
            ("num_key_heads", "to divide num_heads", self.num_heads % self.key_heads == 0),
            ("head_k_dim", "to be even with rotary", not (self.rotary and self.head_k_dim % 2)),
            ("gate_logit_normalizer", "to be positive", tau is None or 0 < tau < float("inf")),
            ("gate_logit_normalizer", "decay 'scalar' or 'channel'", tau is None or depends),
            ("decay_rank", "decay 'scalar' or 'channel'", self.decay_rank is None or depends),
            ("gate_rank", "an out_gate", self.gate_rank is None or self.out_gate != "none"),
            ("gate_bias", "gate_rank", not self.gate_bias or self.gate_rank is not None),
            ("out_norm", "out_gate 'silu' or 'none'", not sigmoid or not self.norms_gated),
            ("out_norm_eps", "to be at least 0 and finite", 0 <= (eps or 0) < float("inf")),
            ("out_norm_eps", "an out_norm", eps is None or self.out_norm != "none"),
            ("conv_bias", "d_conv", not self.conv_bias or self.d_conv is not None),
            ("delta_rule", "feature_map 'silu_l2'", not self.delta_rule or unit),
            ("delta_rule", "beta 'none' or 'sigmoid'", not self.delta_rule or self.beta != "dt"),
            ("feature_map", _OWN_KEYS, self.feature_map != "complement" or own_keys),
            ("num_writes", "delta_rule and no skip", one or (self.delta_rule and not self.skip)),
            ("beta", "decay 'scalar' of a softplus", self.beta != "dt" or softplus),
            ("beta", _BARE, self.beta != "exp" or bare),
            ("beta_scale", "beta 'sigmoid'", self.beta_scale == 1 or self.beta == "sigmoid"),
            ("beta_scale", "to be above 0 and at most 2", 0 < self.beta_scale <= 2),
            ("logit_soft_cap", "to be positive", cap is None or 0 < cap < float("inf")),
        ):
            if not met:
                raise ValueError(f"{name} needs {needs}, got {name}={getattr(self, name)!r}")

    @property
    def norms_gated(self) -> bool:
        """Whether the gate comes before the norm."""
        return self.out_norm.startswith("gated")

    @property
    def sums_weights(self) -> bool:
        """Whether outputs are divided by the sum of their weights."""
        return self.feature_map == "elu" or self.beta == "exp"

    @property
    def reads_own_model(self) -> bool:
        """Whether decays have lower bounds, which HGRN2's backbone has."""
        return self.feature_map == "complement"

    @property
    def key_heads(self) -> int:
        """G, ``num_key_heads`` worked out."""
        return self.num_heads if self.num_key_heads is None else self.num_key_heads
