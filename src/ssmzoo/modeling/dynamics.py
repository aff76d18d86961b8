"""The dynamics of mixers and models that ``ssmzoo inspect`` shows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dynamics:
    """A mixer's filters as it computes them itself; ``inspect`` measures fields that are None.

    Channels C are the mixer's inner ones; rows P of poles may be fewer, if channels share them.

    Attributes:
        kernel: Impulse responses over the lags 0, 1, ..., without a direct (skip) term, ``[C, K]``.
        future_kernel: Responses to later inputs, over the lags -1, -2, ..., ``[C, K']``.
        poles: Eigenvalues of the step from one position to the next, ``[P, N]`` complex.
        radius: The largest pole's distance from zero, ``[P]``, where poles are too many to compute.
        outside: How many poles do not lie inside the unit circle, ``[P]``, found without them.
        time_steps: Step sizes of the discretisation, ``[C]`` or ``[C, parts]``.
        decay: The factor by which a step shrinks a state entry, as the geometric mean over the
            input's tokens, ``[C, N]``; for mixers whose decay depends on the input.
        depends_on_input: Whether the kernels hold for this input only.
    """

    kernel: Tensor | None = None
    future_kernel: Tensor | None = None
    poles: Tensor | None = None
    radius: Tensor | None = None
    outside: Tensor | None = None
    time_steps: Tensor | None = None
    decay: Tensor | None = None
    depends_on_input: bool = False


@dataclass(frozen=True)
class Trajectories:
    """The path of a model's output through a plane while it reads.

    Attributes:
        tokens: Its input, ``[B, L]``.
        paths: The output's places before the first token and after each, ``[B, 1 + L, 2]``.
        landmarks: Other points of the plane, by token, ``[V, 2]``: the embeddings, for example.
    """

    tokens: Tensor
    paths: Tensor
    landmarks: Tensor
