"""Configuration of S4 (arXiv 2111.00396)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class S4Config(SSMConfig):
    """S4: every feature is filtered by a state space with a diagonal-plus-low-rank matrix.

    Attributes:
        d_state: N, the order of a feature's state space with real matrices; even, because modes
            come in conjugate pairs, of which one is stored.
        n_ssm: How many sets of Lambda, P and B there are; feature h has the set ``h % n_ssm``.
            None: each feature has its own, as in the paper. C, D and dt always are its own.
        dt_min: Smallest initial time step.
        dt_max: Largest initial time step.
        block: The layers after the filter: "linear" is the paper's, GELU and a linear layer across
            features; "glu" a GLU of twice that layer, as in later code; "filter" nothing.
        bidirectional: The same state space with a second C reads later inputs. No cache.
        tie_dropout: Drop whole features of a sequence, also after the filter.
    """

    model_type = "ssmzoo_s4"
    d_state: int = 64
    n_ssm: int | None = None
    dt_min: float | int = 1e-3
    dt_max: float | int = 1e-1
    block: Literal["linear", "glu", "filter"] = "linear"
    bidirectional: bool = False
    tie_dropout: bool = True

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        if self.d_state < 2 or self.d_state % 2:
            raise ValueError(f"d_state must be even and at least 2, got {self.d_state}")
        if self.n_ssm is not None and (self.n_ssm < 1 or self.hidden_size % self.n_ssm):
            raise ValueError(
                f"n_ssm must be None or divide hidden_size = {self.hidden_size}, got {self.n_ssm}"
            )
        self.check_time_steps(self.dt_min, self.dt_max)

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input."""
        return super().causal and not self.bidirectional
