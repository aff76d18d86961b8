"""The arguments of feedback_scan's backends."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors that gradients flow to; a batch's sequences lie end to end."""

    u: Tensor  # [T, D]
    lam: Tensor  # [D, N]
    w: Tensor  # [D, N]
    C: Tensor  # [D, N]
    w_gamma: Tensor | None  # [D, N]
    D: Tensor | None  # [D]
    drive: Tensor | None  # [T, D]
    initial_state: Tensor | None  # [S, D, N]


Gradients = tuple[Tensor | None, ...]  # of the inputs, None where one was absent


class Stop(NamedTuple):
    """When Newton's method stops, and how its Jacobians are damped."""

    tolerance: float
    max_iterations: int | None
    damping: float
