"""Configuration of COFFEE (arXiv 2510.14027), of its S6 baseline, and of the ablations.

What surprises: the defaults are a language model's, which the paper leaves open; the paper's own
module is a preset.
"""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class CoffeeConfig(SSMConfig):
    """COFFEE: every entry of the state opens and closes its own input by a sigmoid of itself.

    Attributes:
        d_state: N, state entries per channel.
        block: "gated" is a language model's block, with projections, short convolution and output
            gate; "bare" the recurrence alone.
        expand: "gated" only: the recurrence's width is ``expand * hidden_size``.
        d_conv: "gated" only: K, taps of the causal convolution.
        conv_bias: "gated" only: whether the convolution has a bias.
        variant: The input of the gates. "coffee" is the paper's model; the others are its
            ablations: "input_matrix" (Eq. 6) still has B, "no_feedback" looks at the input,
            "token_gate" (Eq. 4) at the whole token with one gate a channel, "linear_feedback"
            leaves the sigmoid out, and "s6" is Mamba's recurrence with the exact zero-order hold.
        lambda_param: "clamp" has lambda itself as the parameter, which optimizer steps must be
            followed by ``project_parameters``; "sigmoid" a number that is mapped into its range.
            "s6" has a map of its own.
        lambda_max: lambda is in ``[-lambda_max, 0]``; above 1 a state may change its sign.
        output_filter: Scale every channel's output by a sigmoid of its state.
        use_skip: Add ``D[i] u[i]`` to a channel's output.
        ssm_init: "spread" has time scales from one token to a thousand; "paper" starts at lambda 0
            and N(0, 1), where nothing is forgotten; "integrator" at lambda 0 and ones.
        embedding_init: N(0, initializer_range^2), orthonormal rows, or the rows themselves: a list
            for each token but a frozen one.
        head: "linear", or "nearest_embedding": how near an output lies to each token's embedding.
        frozen_embedding_index: "nearest_embedding" only: the token whose embedding is all ones,
            not trained and not counted.
        solver: "march" along the sequence, or solve for all of it by "newton"; "auto" chooses.
        newton_tol: Largest relative residual of a solution by "newton"; None is 1e-6 in float32 and
            1e-14 in float64.
        newton_iters: Most iterations, after which a call marches; None is as many as suffice.
    """

    model_type = "ssmzoo_coffee"
    attribute_map: ClassVar[dict[str, str]] = {
        **SSMConfig.attribute_map,
        "state_size": "d_state",
        "conv_kernel": "d_conv",
        "use_conv_bias": "conv_bias",
        "newton_max_iter": "newton_iters",
    }

    own_model: ClassVar[frozenset[str]] = frozenset(
        {"embedding_init", "head", "frozen_embedding_index"}
    )

    d_state: int = 16
    block: Literal["gated", "bare"] = "gated"
    expand: int = 2
    d_conv: int = 4
    conv_bias: bool = True
    variant: Literal[
        "coffee", "input_matrix", "no_feedback", "token_gate", "linear_feedback", "s6"
    ] = "coffee"
    lambda_param: Literal["sigmoid", "clamp"] = "sigmoid"
    lambda_max: float | int = 1.0
    output_filter: bool = False
    use_skip: bool = True
    ssm_init: Literal["spread", "paper", "integrator"] = "spread"
    embedding_init: Literal["normal", "orthonormal"] | list[list[float]] = "normal"
    head: Literal["linear", "nearest_embedding"] = "linear"
    frozen_embedding_index: int | None = None
    solver: Literal["auto", "march", "newton"] = "auto"
    newton_tol: float | int | None = None
    newton_iters: int | None = None

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        self.check_counts("d_state", "expand", "d_conv", "newton_iters")
        if self.newton_tol is not None and not 0 < self.newton_tol < 1:
            raise ValueError(
                f"newton_tol must be None, or above 0 and below 1, got {self.newton_tol}"
            )
        if not 0 < self.lambda_max <= 2:
            raise ValueError(
                "lambda_max must be above 0 and at most 2, where the recurrence stays stable, "
                f"got {self.lambda_max}"
            )
        self._check_variant()
        self._check_head()

    def _check_variant(self) -> None:
        if self.variant == "s6" and self.output_filter:
            raise ValueError(
                "output_filter belongs to COFFEE's recurrence, got variant='s6'; take another "
                "variant, or output_filter=False"
            )
        if self.solver == "newton" and self.variant not in ("coffee", "input_matrix"):
            raise ValueError(
                "solver='newton' solves for gates of the state and needs variant='coffee' or "
                f"'input_matrix', got {self.variant!r}; take solver='auto'"
            )
        if self.variant == "s6" and self.ssm_init == "integrator":
            raise ValueError(
                "ssm_init='integrator' starts COFFEE's recurrence, got variant='s6'; take "
                "ssm_init='paper'"
            )
        at_zero = self.ssm_init != "spread" and self.variant != "s6"
        if at_zero and self.lambda_param == "sigmoid":
            raise ValueError(
                f"ssm_init={self.ssm_init!r} starts lambda at 0, which lambda_param='sigmoid' "
                "cannot be; take lambda_param='clamp'"
            )

    def _check_head(self) -> None:
        nearest = self.head == "nearest_embedding"
        if nearest and not self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings must be True with head='nearest_embedding', got False; take "
                "head='linear'"
            )
        if nearest and self.vocab_size < 2:
            raise ValueError(
                "vocab_size must be at least 2 with head='nearest_embedding', got "
                f"{self.vocab_size}"
            )
        frozen = self.frozen_embedding_index
        if frozen is None:
            return
        if not nearest:
            raise ValueError(
                f"frozen_embedding_index needs head='nearest_embedding', got head={self.head!r}"
            )
        if not 0 <= frozen < self.vocab_size:
            raise ValueError(
                f"frozen_embedding_index must be None or in [0, {self.vocab_size - 1}], "
                f"got {frozen}"
            )

    @property
    def d_inner(self) -> int:
        """E, the recurrence's width."""
        return self.hidden_size if self.block == "bare" else self.expand * self.hidden_size
