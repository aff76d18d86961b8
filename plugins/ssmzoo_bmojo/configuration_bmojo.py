"""Configuration of B'MOJO (arXiv 2407.06324)."""

import dataclasses
import math
from typing import Any, ClassVar, Literal, cast

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import Kind, SSMConfig, kind_of, suggestion

MIXER_TYPES = ("bmojo", "bmojo_f", "mamba", "swa", "attention")
MOST_REMEMBERED = 65_536


@strict
class BMojoConfig(SSMConfig):
    """B'MOJO: attention over a window, a state-space model's outputs, and surprising tokens.

    Attributes:
        mixer_types: The mixer of each layer: "bmojo" has all three memories, "bmojo_f" lacks the
            eidetic one, "mamba" is the state-space model alone, "swa" is attention in the window,
            "attention" attends to all tokens (its cache grows). A shorter list is repeated; one
            name stands for all layers. ``layer_types`` is accepted as another name, but
            transformers renames values in a field of that name.
        sliding_window: w, tokens a query sees directly, and tokens a chunk.
        num_fading_tokens: m_f, outputs of the state-space model that a query reads.
        num_eidetic_tokens: m_e, surprising tokens whose keys and values are kept exactly.
        fading_mode: "chunk" reads the last outputs before the query's chunk; "offset" those just
            behind its window.
        eidetic_overlap: "allow" counts a token in window and memory twice; "mask" once.
        wiring: "serial" adds the state-space model's output to the residual stream before
            attention reads it; "parallel" gives it to attention alone, as in the paper's Algorithm
            1, and needs positions (``use_rope``).
        use_rope: Rotary positions of queries and keys.
        rope_theta: Their base.
        tie_memory_proj: Project fading tokens by the same matrices as raw ones.
        fading_norm: RMSNorm before that projection; None: with the serial wiring only.
        innovation_span: k, outputs that predict the next one.
        innovation_weights: "uniform", or "exp" for weights that halve with every step back.
        innovation_error: "absolute" mean square, or "relative" to the output's size.
        ssm: The state-space model: empty for Mamba's block, which the next fields are of, or the
            fields of another family's mixer, with ``family`` and optionally ``preset``. It must be
            causal, with a state of fixed size. A built configuration has all fields of it but those
            that all layers share.
        expand: The state-space model's inner width is ``expand * hidden_size``.
        d_state: N, state columns per channel.
        d_conv: Taps of its causal convolution.
        dt_rank: Rank of its time steps; "auto" is ``ceil(hidden_size / 16)``.
        dt_min: Smallest initial time step.
        dt_max: Largest initial time step.
        num_attention_heads: H, query heads; None: one for every 64 features.
        num_key_value_heads: G, key and value heads; None: as many.
        head_dim: d of a head; None: ``hidden_size / H``.
        qk_norm: RMSNorm of each head's query and key, of memories too, before positions.
        attention_bias: Biases of queries, keys and values.
        attention_out_bias: Bias of attention's output.
    """

    model_type = "ssmzoo_bmojo"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "window_size": "sliding_window",
        "state_size": "d_state",
        "ssm_state_size": "d_state",
        "ssm_expand": "expand",
        "conv_kernel": "d_conv",
        "time_step_rank": "dt_rank",
        "time_step_min": "dt_min",
        "time_step_max": "dt_max",
    }

    mixer_types: list[str] | str = "bmojo"
    sliding_window: int = 512
    num_fading_tokens: int = 32
    num_eidetic_tokens: int = 32
    fading_mode: Literal["chunk", "offset"] = "chunk"
    eidetic_overlap: Literal["allow", "mask"] = "allow"
    wiring: Literal["serial", "parallel"] = "serial"
    use_rope: bool = False
    rope_theta: float | int = 10_000.0
    tie_memory_proj: bool = True
    fading_norm: bool | None = None
    innovation_span: int = 4
    innovation_weights: Literal["uniform", "exp"] = "uniform"
    innovation_error: Literal["absolute", "relative"] = "absolute"
    ssm: dict[str, Any] = dataclasses.field(default_factory=dict)
    expand: int = 2
    d_state: int = 16
    d_conv: int = 4
    dt_rank: int | str = "auto"
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_type: Literal["gelu", "swiglu"] = "swiglu"

    def __post_init__(self, **kwargs: object) -> None:
        """Take ``layer_types`` for ``mixer_types``; see :class:`SSMConfig`."""
        named = kwargs.pop("layer_types", None)
        if named is not None:
            self.take("layer_types", "mixer_types", named)
        super().__post_init__(**kwargs)

    def complete(self) -> None:
        """Fill in fields that follow from others."""
        pattern = [self.mixer_types] if isinstance(self.mixer_types, str) else self.mixer_types
        if pattern and len(pattern) < self.num_hidden_layers:
            pattern = [pattern[i % len(pattern)] for i in range(self.num_hidden_layers)]
        self.mixer_types = pattern
        if self.num_attention_heads is None:
            self.num_attention_heads = max(1, self.hidden_size // 64)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads >= 1:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.fading_norm is None:
            self.fading_norm = self.wiring == "serial"
        if self.ssm:
            SSMConfig.check(self)  # no section is to blame for these fields
            self.ssm = self.ssm_kind.section

    def check(self) -> None:
        """Fail unless the fields fit each other.

        Raises:
            LookupError: A mixer that does not exist.
            ValueError: A field out of its range.
        """
        super().check()
        for name in self.mixer_types:
            if name not in MIXER_TYPES:
                raise LookupError(
                    f"mixer_types: no mixer {name!r}{suggestion(name, MIXER_TYPES)}; there are "
                    f"{', '.join(MIXER_TYPES)}"
                )
        if len(self.mixer_types) != self.num_hidden_layers:
            raise ValueError(
                f"mixer_types must name at least one mixer and at most {self.num_hidden_layers}, "
                f"one for each layer, got {len(self.mixer_types)}"
            )
        if self.head_dim == 0 and self.heads > self.hidden_size:
            raise ValueError(
                f"num_attention_heads must be at most hidden_size = {self.hidden_size} unless "
                f"head_dim is given, got {self.heads}"
            )
        self.check_counts("sliding_window", "innovation_span", "expand", "d_state", "d_conv")
        self.check_counts("num_attention_heads", "num_key_value_heads", "head_dim")
        for name in ("num_fading_tokens", "num_eidetic_tokens"):
            if not 0 <= getattr(self, name) <= MOST_REMEMBERED:
                raise ValueError(
                    f"{name} must be at least 0 and at most {MOST_REMEMBERED:,} (rows kept per "
                    f"sequence and layer), got {getattr(self, name):,}"
                )
        if self.heads % self.groups:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads = {self.groups}, "
                f"got {self.heads}"
            )
        if self.use_rope and self.head_width % 2:
            raise ValueError(f"head_dim must be even with use_rope, got {self.head_width}")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be positive and finite, got {self.rope_theta}")
        self.check_time_steps(self.dt_min, self.dt_max)
        self.rank_of(self.dt_rank)

    @property
    def ssm_kind(self) -> Kind:
        """Whose mixers the state-space model is, where ``ssm`` names a family.

        Raises:
            LookupError: There is no such family, preset or field.
            ValueError: A field does not fit, or no mixer of the family can stand there.
        """
        # B'MOJO itself is what reads in both directions
        kind = kind_of("ssm", self.ssm, self, directions="forward")
        config, mixer = kind.config, kind.model_class.mixer_class
        for met, rule in (
            (kind.family not in ("attention", "bmojo"), "be of another family"),
            (config.causal, "be causal"),
            (config.decodable, "have outputs that do not depend on the sequence's length"),
            (not config.state_grows, "have a state of fixed size"),
            (not (mixer.reads_residual or config.token_inputs), "read its input alone"),
        ):
            if not met:
                raise ValueError(
                    f"ssm must {rule}, got a mixer of {kind.family}; take one that does, such as "
                    "linear_attention's"
                )
        return kind

    @property
    def finds_families(self) -> bool:
        """Whether ``ssm`` names a family."""
        return bool(self.ssm)

    @property
    def state_grows(self) -> bool:
        """Whether some layer attends to all tokens."""
        return "attention" in self.mixer_types

    @property
    def heads(self) -> int:
        """H."""
        return cast(int, self.num_attention_heads)

    @property
    def groups(self) -> int:
        """G."""
        return cast(int, self.num_key_value_heads)

    @property
    def head_width(self) -> int:
        """D of a head."""
        return cast(int, self.head_dim)

    @property
    def d_inner(self) -> int:
        """Inner width of the state-space model."""
        return self.expand * self.hidden_size

    @property
    def step_rank(self) -> int:
        """``dt_rank`` with "auto" worked out."""
        return self.rank_of(self.dt_rank)
