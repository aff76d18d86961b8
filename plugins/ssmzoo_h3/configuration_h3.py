"""Configuration of H3 (arXiv 2212.14052)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class H3Config(SSMConfig):
    """H3: a shift and a diagonal state space between products of queries, keys and values.

    Attributes:
        d_state: N, the order of both state spaces with real matrices: taps of the shift's filter,
            and twice the modes that are stored of the diagonal one, first halves of pairs.
        head_dim: d of an H3 head, whose ``d * d`` products of keys and values share a state space.
        dt_min: Smallest initial time step.
        dt_max: Largest initial time step.
        disc: How the diagonal state space is made discrete: by the bilinear rule, or with inputs
            held for a time step (zero-order hold).
        attn_layer_idx: Layers, from 0 on, that attend to all tokens instead; their cache grows.
        num_attention_heads: Their heads.
        rotary_dim: Features of each of these that turn with the position; None: no positions.
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
    disc: Literal["bilinear", "zoh"] = "bilinear"
    attn_layer_idx: list[int] | None = None
    num_attention_heads: int = 1
    rotary_dim: int | None = None

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        if self.d_state < 2 or self.d_state % 2:
            raise ValueError(f"d_state must be even and at least 2, got {self.d_state}")
        width = self.hidden_size
        for name in ("head_dim", "num_attention_heads"):
            value = getattr(self, name)
            if value < 1 or width % value:
                raise ValueError(f"{name} must divide hidden_size = {width}, got {value}")
        self.check_time_steps(self.dt_min, self.dt_max)
        last = self.num_hidden_layers - 1
        if wrong := [i for i in self.attn_layer_idx or [] if not 0 <= i <= last]:
            raise ValueError(f"attn_layer_idx must name layers from 0 to {last}, got {wrong}")
        turned, most = self.rotary_dim, width // self.num_attention_heads
        if turned is not None and (turned % 2 or not 2 <= turned <= most):
            raise ValueError(
                f"rotary_dim must be None, or even and from 2 to {most}, the features of an "
                f"attention head, got {turned}"
            )

    @property
    def state_grows(self) -> bool:
        """Whether some layer attends to all tokens."""
        return bool(self.attn_layer_idx)
