"""Configuration of H3 (arXiv 2212.14052)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class H3Config(SSMConfig):
    """H3: a shift and a diagonal state space between products of queries, keys and values.

    Attributes:
        d_state: N, the order of both state spaces with real matrices: taps of the shift's filter,
            and twice the complex modes of the diagonal one. Even, because modes come in conjugate
            pairs, of which one is stored.
        head_dim: d of an H3 head. Keys and values of a head have an outer product of ``d * d``
            entries, which share the head's diagonal state space.
        dt_min: Smallest initial time step.
        dt_max: Largest initial time step.
        attn_layer_idx: Layers, counted from 0, that attend to all tokens instead, with a cache that
            grows; None: no layer does.
        num_attention_heads: Their heads.
        rotary_dim: Features of each of these heads that are turned with the position; None: no
            positions, as most of the paper's models.
    """

    model_type = "ssmzoo_h3"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "state_size": "d_state",
        "rotary_emb_dim": "rotary_dim",
    }

    d_state: int = 64
    head_dim: int = 1
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    attn_layer_idx: list[int] | None = None
    num_attention_heads: int = 1
    rotary_dim: int | None = None

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        if self.d_state < 2 or self.d_state % 2:
            raise ValueError(f"d_state must be even and at least 2, got {self.d_state}")
        for name in ("head_dim", "num_attention_heads"):
            value = getattr(self, name)
            if value < 1 or self.hidden_size % value:
                raise ValueError(
                    f"{name} must divide hidden_size = {self.hidden_size}, got {value}"
                )
        low, high = self.dt_min, self.dt_max
        if not 0 < low <= high < float("inf"):
            raise ValueError(f"dt_min and dt_max must be positive and rise, got {low} and {high}")
        for layer in self.attn_layer_idx or []:
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(
                    "attn_layer_idx must name layers from 0 to num_hidden_layers - 1 = "
                    f"{self.num_hidden_layers - 1}, got {layer}"
                )
        if self.rotary_dim is not None:
            width = self.hidden_size // self.num_attention_heads
            if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= width:
                raise ValueError(
                    f"rotary_dim must be None, or even and from 2 to {width}, the features of an "
                    f"attention head, got {self.rotary_dim}"
                )

    @property
    def state_grows(self) -> bool:
        """Whether some layer attends to all tokens."""
        return bool(self.attn_layer_idx)
