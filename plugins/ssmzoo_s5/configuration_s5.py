"""Configuration of S5 (arXiv 2208.04933) and the LRU (arXiv 2303.06349)."""

import math
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class S5Config(SSMConfig):
    """S5: one diagonal complex state of a layer reads all features and is read by all.

    Attributes:
        variant: "s5" learns eigenvalues in continuous time and a time step for each; "lru" a decay,
            an angle and gamma, the gain of the inputs, as logarithms.
        d_state: The order of the state. "s5" stores one mode of each conjugate pair, "lru" all.
        bidirectional: A second readout of later inputs is added, S5's own way. No cache.
        activation: The layer after the state space: "gelu"; "full_glu", a GLU of GELU's output;
            "half_glu1", GELU's output times a gate made of it; "half_glu2", the same of the bare
            output, its gate made of GELU's.
        final_norm: A norm at the end of a model with ``prenorm``, which the papers' code lacks.
        irregular_steps: The forward pass needs ``time_steps [B, L]``, by which each token's time
            step is multiplied. For "s5".
        blocks: J, how many equal HiPPO matrices the initial state matrix consists of ("s5").
        dt_min: Smallest initial time step ("s5").
        dt_max: Largest initial time step ("s5").
        clip_eigs: Keep the real parts of eigenvalues at or below -1e-4 ("s5").
        c_init: How the readout is drawn ("s5"): "rows" with variance 1 / d_state before it is
            multiplied by eigenvectors, "lecun_normal" with 1 / (d_state hidden_size), or
            "complex_normal" with 1 and without eigenvectors.
        r_min: Smallest initial distance of a pole from zero ("lru").
        r_max: Largest one ("lru").
        max_phase: Largest initial angle of a pole, in radians ("lru").
    """

    model_type = "ssmzoo_s5"
    own_model: ClassVar[frozenset[str]] = frozenset({"final_norm"})
    variant: Literal["s5", "lru"] = "s5"
    d_state: int = 64
    bidirectional: bool = False
    activation: Literal["gelu", "full_glu", "half_glu1", "half_glu2"] = "half_glu1"
    final_norm: bool = True
    irregular_steps: bool = False
    blocks: int = 1
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    clip_eigs: bool = False
    c_init: Literal["rows", "lecun_normal", "complex_normal"] = "rows"
    r_min: float | int = 0.0
    r_max: float | int = 1.0
    max_phase: float | int = 2 * math.pi
    tie_dropout: bool = True

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        order, blocks = self.d_state, self.blocks
        self.check_counts("d_state", "blocks")
        if self.variant == "s5" and order % (2 * blocks):
            raise ValueError(
                "d_state must be a multiple of 2 * blocks, because modes come in pairs, "
                f"got {order} and blocks = {blocks}"
            )
        if self.variant == "lru" and self.irregular_steps:
            raise ValueError("irregular_steps needs variant='s5', got 'lru', which has no steps")
        self.check_time_steps(self.dt_min, self.dt_max)
        low, high = self.r_min, self.r_max
        if not 0 <= low < high <= 1:
            raise ValueError(f"r_min and r_max must rise from 0 to 1 at most, got {low} and {high}")
        if not 0 < self.max_phase <= 2 * math.pi:
            raise ValueError(f"max_phase must be above 0 and at most 2 pi, got {self.max_phase}")

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input."""
        return super().causal and not self.bidirectional

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """``time_steps`` with irregular steps."""
        return ("time_steps",) if self.irregular_steps else ()
