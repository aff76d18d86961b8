"""Configuration of SpaceTime (arXiv 2303.09489)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMForecastingConfig


@strict
class SpaceTimeConfig(SSMForecastingConfig):
    """SpaceTime: every feature is filtered by a state space with a companion matrix.

    Attributes:
        d_state: d, the order of a state space.
        n_kernels: State spaces of a layer, each of neighbouring features. None: every feature has
            its own, as it always has in the forecaster's decoder.
        block: The layers after the filter: "mlp" is the paper's, GELU, a linear layer and a skip;
            "glu" a GLU of twice that layer, as in RTF's comparison.
        kernel_init: Initial a, B, C and K: N(0, 1), or "xavier", U(+-1/sqrt(d)).
        raw_start: The state that a forecast starts from has B itself, as in the authors' code, and
            not B divided by its 1-norm as everywhere else in the decoder.
        preprocess: The first layer sees differences and residuals of moving averages.
    """

    model_type = "ssmzoo_spacetime"
    own_model: ClassVar[frozenset[str]] = SSMForecastingConfig.own_model | {"raw_start"}
    d_state: int = 64
    n_kernels: int | None = None
    block: Literal["mlp", "glu"] = "mlp"
    kernel_init: Literal["normal", "xavier"] = "normal"
    raw_start: bool = False
    preprocess: bool = False

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        width, kernels = self.hidden_size, self.n_kernels
        self.check_counts("d_state")
        if kernels is not None and (kernels < 1 or width % kernels):
            raise ValueError(f"n_kernels must be None or divide hidden_size {width}, got {kernels}")
        if self.preprocess and (self.norm_type != "none" or not self.residual or width % 8):
            rule = "preprocess needs norm_type 'none', residual True and hidden_size divisible by 8"
            raise ValueError(f"{rule}, got {self.norm_type!r}, {self.residual} and {width}")
        for name in ("dropout", "drop_path_rate"):  # which would drop the residual path's part
            if self.preprocess and (got := getattr(self, name)):
                raise ValueError(f"preprocess needs {name} 0, got {got}; mixer_dropout may be more")
