"""Causal attention to all tokens, or to a window of them: a mixer for hybrids.

What surprises: positions are turned as transformers' models turn them, by angles in float32, so
that their weights give the same logits here. Kinds of positions that depend on a sequence's length
("dynamic", "longrope") take for each token the length up to it, as decoding token by token does;
transformers takes the length of the whole call.

Dimensions: B batch, L length, H heads, G heads of keys and values, d of a head, S sequences,
P tokens that are kept.
"""

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ssmzoo.environment.messages import suggestion
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import Linear, rotated, split_heads
from ssmzoo.modeling.mixer import SSMMixer
from ssmzoo.modeling.norms import RMSNorm
from ssmzoo.modeling.packing import AlignedRows, Sequences, right_aligned, token_positions
from ssmzoo_kernels import double, eidetic_attention


@strict
class AttentionConfig(SSMConfig):
    """Attention as in Llama, Mistral, Qwen and SmolLM3.

    Attributes:
        num_attention_heads: H; None: one for every 64 features.
        num_key_value_heads: G; None: as many.
        head_dim: d; None: ``hidden_size / H``.
        rope_parameters: Rotary positions by transformers' names: ``rope_type``, ``rope_theta``, and
            what the type needs; ``partial_rotary_factor`` is the share of features that turn. None:
            no positions, which other layers of a hybrid tell.
        max_position_embeddings: Tokens that the model was trained for; some types need it.
        sliding_window: Tokens that a token sees, itself among them; None: all.
        qk_norm: RMSNorm of each head's query and key, as in Qwen3.
        attention_bias: Biases of queries, keys and values.
        attention_out_bias: Bias of the output.
    """

    model_type = "ssmzoo_attention"
    ignore_keys_at_rope_validation: ClassVar[set[str]] = {"partial_rotary_factor"}

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False

    def complete(self) -> None:
        """Fill in fields that follow from others."""
        if self.num_attention_heads is None:
            self.num_attention_heads = max(1, self.hidden_size // 64)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads >= 1:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is not None:
            self.rope_parameters = dict(self.rope_parameters)  # transformers adds to it

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Complete ``rope_parameters`` as transformers does, but leave None."""
        return (
            kwargs
            if self.rope_parameters is None
            else super().convert_rope_params_to_dict(**kwargs)
        )

    def check(self) -> None:
        """Fail unless the fields fit each other.

        Raises:
            LookupError: A type of positions, or a field of theirs, that does not exist.
            ValueError: A field out of its range.
        """
        super().check()
        self.check_counts("num_attention_heads", "num_key_value_heads", "head_dim")
        self.check_counts("max_position_embeddings", "sliding_window")
        if self.heads % self.groups:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads = {self.groups}, "
                f"got {self.heads}"
            )
        if self.rope_parameters is not None:
            self._check_rope(self.rope_parameters)

    def _check_rope(self, rope: dict[str, Any]) -> None:
        known = RopeParameters.__annotations__.keys() - {"mrope_section"}  # of pictures
        for name in rope.keys() - known:
            raise LookupError(f"rope_parameters has no field {name!r}{suggestion(name, known)}")
        kinds, kind = ("default", *ROPE_INIT_FUNCTIONS), str(rope["rope_type"])
        if kind not in kinds:
            raise LookupError(
                f"rope_parameters: no rope_type {kind!r}{suggestion(kind, kinds)}; there are "
                f"{', '.join(kinds)}"
            )
        theta, turned = rope["rope_theta"], self.rotary_width
        if not (isinstance(theta, float | int) and 0 < theta < math.inf):
            raise ValueError(f"rope_theta must be positive and finite, got {theta!r}")
        if turned % 2 or not 2 <= turned <= self.head_width:
            raise ValueError(
                f"partial_rotary_factor of head_dim = {self.head_width} features must be even and "
                f"from 2 to {self.head_width}, got {turned}"
            )

    @property
    def state_grows(self) -> bool:
        """Whether attention is to all tokens."""
        return self.sliding_window is None

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
    def rotary_width(self) -> int:
        """Features of a head that turn with the position, where some do."""
        rope = cast(dict[str, Any], self.rope_parameters)
        return int(self.head_width * rope.get("partial_rotary_factor", 1.0))


class Attention(SSMMixer):
    """``o_proj(softmax(q k^T / sqrt(d)) v)`` of this token and those before it."""

    startable_states = frozenset()  # they hold tokens

    def __init__(self, config: AttentionConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.heads, self.groups, self.window = config.heads, config.groups, config.sliding_window
        width, size, bias = config.hidden_size, config.head_width, config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (
            Linear(width, count * size, bias, role="attention")
            for count in (self.heads, self.groups, self.groups)
        )
        bias = config.attention_out_bias
        self.o_proj = Linear(self.heads * size, width, bias, role="attention_end")
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        rope = config.rope_parameters
        # by which layers share the angles of a call
        self.rope = None if rope is None else repr((size, *sorted(rope.items())))

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; the state is :func:`attend`'s."""
        q = split_heads(self.q_proj(hidden_states), self.heads)
        k = split_heads(self.k_proj(hidden_states), self.groups)
        v = split_heads(self.v_proj(hidden_states), self.groups)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            turns = self._turns(v, state, packing)
            q, k = rotated(q, turns), rotated(k, turns)
        out = attend(q.to(v.dtype), k.to(v.dtype), v, state, packing, self.window)
        return self.o_proj(out.flatten(2))

    def _turns(
        self, x: Tensor, state: LayerState, packing: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles of ``[B, L, G, d]``, ``[..., L, 1, n]``."""
        name = "turns", self.rope, x.dtype
        if name not in state.shared:
            position = token_positions(x, state.get("seen"), packing)
            speed, scale = rotary_speeds(cast(AttentionConfig, self.config), position)
            angle = (position[..., None].float() * speed)[..., None, :]
            state.shared[name] = tuple((y * scale).to(x.dtype) for y in (angle.cos(), angle.sin()))
        return state.shared[name]


def rotary_speeds(config: AttentionConfig, position: Tensor) -> tuple[Tensor, float]:
    """Return the angles that pairs of features turn by at every token, and a factor.

    The float32 angles are ``[n]``, or ``[..., n]`` where they depend on a sequence's length, which
    then is ``position + 1``. Cosines and sines are multiplied by the factor.

    Args:
        config: Its ``rope_parameters`` are read.
        position: Of the tokens, ``[...]``.
    """
    rope, device = cast(dict[str, Any], config.rope_parameters), position.device
    kind, size = rope["rope_type"], config.rotary_width
    if kind == "default":
        share = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        return 1.0 / rope["rope_theta"] ** share, 1.0
    find = ROPE_INIT_FUNCTIONS[kind]
    speeds, scale = find(config, device)
    if kind == "longrope":
        trained: int = rope["original_max_position_embeddings"]
        longer, _ = find(config, device, seq_len=trained + 1)
    elif kind == "dynamic":
        trained = config.max_position_embeddings
        # float32 powers of a tensor's first and last numbers may differ in their last digit
        length = double(position[..., None] + 1)
        longer = find(config, length.device, seq_len=cast(int, length))[0].to(speeds)
    else:
        return speeds, scale
    return torch.where(position[..., None] < trained, speeds, longer), scale


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LayerState,
    packing: Sequences | None,
    window: int | None = None,
) -> Tensor:
    """Attend to this token and those before it: ``softmax(q k^T / sqrt(d)) v``, ``[B, L, H, d]``.

    The state is ``keys`` and ``values [S, P, G d]``, the newest last and zeros in front where there
    were fewer tokens, and ``seen [S]``, how many there were. P is the window, or ``state.room``, or
    else grows. Gradients flow to all of them.

    Args:
        q: Queries ``[B, L, H, d]``.
        k: Keys ``[B, L, G, d]``, turned already.
        v: Values ``[B, L, G, d]``.
        state: Of the layer.
        packing: Boundaries of packed sequences.
        window: Tokens that a token sees, itself among them; None: all.
    """
    seen, past = state.get("seen"), (state.get("keys"), state.get("values"))
    if state.keep:
        rows = None if packing is None else packing.aligned()
        before = state.get_row("seen")
        if before is None:
            sequences = q.shape[0] if rows is None else rows.lengths.shape[0]
            before = q.new_zeros(sequences, dtype=torch.int64)
        read = before + (q.shape[1] if rows is None else rows.lengths)
        for name, new in (("keys", k), ("values", v)):
            room = state.room if window is None else window
            state.put_row(name, _newest(state.get_row(name), new.flatten(2), rows, room))
        state.put_row("seen", read)
    past_k, past_v = (x if x is None else split_heads(x, k.shape[2]) for x in past)
    return eidetic_attention(
        q, k, v, window=window, past_k=past_k, past_v=past_v, seen=seen, cu_seqlens=packing
    )


def _newest(old: Tensor | None, new: Tensor, rows: AlignedRows | None, room: int | None) -> Tensor:
    """Return the last rows of old and new ones, ``[S, room, G d]``, or all of them."""
    if rows is not None:
        new = rows.gather(new)
    if old is None:
        table = new
    elif rows is None and new.shape[1] == 1 and old.shape[1] == room:  # copied once
        return torch.cat([old[:, 1:].to(new.dtype), new], dim=1)
    else:
        table = torch.cat([old.to(new.dtype), new], dim=1)
    if rows is not None:
        table = right_aligned(table, rows.lengths + (table.shape[1] - new.shape[1]))
    if room is not None:  # zeros in front, or fewer rows
        table = F.pad(table, (0, 0, room - table.shape[1], 0))
    return table
