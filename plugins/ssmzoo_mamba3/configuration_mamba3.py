"""Configuration of Mamba-3."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class Mamba3Config(SSMConfig):
    """Mamba-3 with one input and one output a head (SISO).

    Attributes:
        expand: Heads' values together are so many times as wide as the model.
        head_dim: P, size of a value; it divides ``expand * hidden_size``.
        d_state: N, size of a key, B, and a query, C.
        n_groups: G, heads of keys and queries before their biases, each of a group of heads.
        rope_fraction: Share of B and C that turns: a half or all.
        rate: What makes a decay's rate of its input: a softplus, as in the paper, or the authors'
            later ``1 + x``, and ``1 / (1 - x)`` below zero.
        rate_floor: The least rate.
        out_norm: RMSNorm of each head before the gate.
    """

    model_type = "ssmzoo_mamba3"
    attribute_map: ClassVar[dict[str, str]] = {
        **{**SSMConfig.attribute_map, "norm_eps": "rms_norm_eps", "state_size": "d_state"},
        **{"is_outproj_norm": "out_norm", "A_floor": "rate_floor"},
    }

    mlp_type: Literal["gelu", "swiglu"] = "swiglu"
    expand: int = 2
    head_dim: int = 64
    d_state: int = 128
    n_groups: int = 1
    rope_fraction: float | int = 0.5
    rate: Literal["softplus", "heavy_tail"] = "softplus"
    rate_floor: float | int = 1e-4
    out_norm: bool = False

    @property
    def num_heads(self) -> int:
        """H, which follows from the other sizes."""
        return self.expand * self.hidden_size // self.head_dim

    @property
    def num_angles(self) -> int:
        """How many pairs of B and C turn."""
        return int(self.d_state * self.rope_fraction) // 2

    def check(self) -> None:
        """Check that sizes are at least 1, and that the fields fit each other."""
        super().check()
        self.check_counts("expand", "head_dim", "d_state", "n_groups")
        if self.expand * self.hidden_size % self.head_dim:
            raise ValueError(
                f"head_dim must divide expand * hidden_size, got {self.head_dim} and "
                f"{self.expand * self.hidden_size}"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(
                f"n_groups must divide the heads, got {self.n_groups} and {self.num_heads}"
            )
        if self.rope_fraction not in (0.5, 1.0) or not self.num_angles:
            raise ValueError(
                "rope_fraction must be 0.5 or 1, and d_state so large that a pair turns, got "
                f"{self.rope_fraction} and {self.d_state}"
            )
        if not 0 < self.rate_floor < float("inf"):
            raise ValueError(f"rate_floor must be positive, got {self.rate_floor}")
