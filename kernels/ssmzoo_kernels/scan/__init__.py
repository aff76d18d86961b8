"""What the chunked first-order recurrences share: the chunk scheme and its bookkeeping.

A recurrence ``S[t] = A[t] * S[t-1] + b[t]`` (elementwise on a ``[D, N]`` state) differs from family
to family only in its transition, the map from a token's activations to ``A`` and ``b``. The
skeletons, ``scan.h`` for CPUs and ``triton.py`` for GPUs, own everything else.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# a skeleton's inputs, in order, all with gradients: u, q, k, dt are required
ROLES = ("u", "q", "k", "dt", "dt_bias", "skip", "z", "param", "initial_state")
Inputs = tuple[
    Tensor,  # u [T, D]
    Tensor,  # q [T, N]
    Tensor,  # k [T, N]
    Tensor,  # dt [T, D]
    Tensor | None,  # dt_bias [D]
    Tensor | None,  # skip [D]
    Tensor | None,  # z [T, D]
    Tensor | None,  # param [D, N], the family's own
    Tensor | None,  # initial_state [S, D, N]
]
Gradients = tuple[Tensor | None, ...]  # of the inputs, None where one was absent


class Kernels:
    """An op's scan on one backend: its transition on the skeleton, for a declaration.

    Such an op passes its kernels at most one option: the ``Choice`` that names the transition.

    Args:
        module: The op's, which imports its skeleton as ``scan`` and has a ``TRANSITION``, or
            ``TRANSITIONS`` by the values of that choice.
        roles: The skeleton's names of the op's inputs, in their order.
    """

    def __init__(self, module: ModuleType, roles: Sequence[str]) -> None:
        self.module = module
        self.count = len(roles)
        # the place behind the inputs holds None
        self._given = itemgetter(*(roles.index(x) if x in roles else self.count for x in ROLES))
        self._own = itemgetter(*map(ROLES.index, roles))

    def load(self, *kernel: Any) -> Any:
        """Build and load the C kernels, where the module has such."""
        return self.module.load(*kernel)

    @property
    def CHUNK(self) -> int:
        """Return how many tokens' states are recomputed at once."""
        return self.module.scan.CHUNK

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, final states and, if they are to be saved, states between tokens."""
        offsets, save, *choice = arguments[self.count :]
        inputs = self._given((*arguments[: self.count], None))
        module = self.module
        transition = module.TRANSITIONS[choice[0]] if choice else module.TRANSITION
        return module.scan.forward(transition, inputs, offsets, save)

    def backward(
        self, grad_out: Tensor | None, grad_final: Tensor | None, *arguments: Any
    ) -> Gradients:
        """Return the gradients of the op's inputs, from the states that the forward saved."""
        offsets, saved, *choice = arguments[self.count :]
        inputs = self._given((*arguments[: self.count], None))
        module, grads = self.module, (grad_out, grad_final)
        transition = module.TRANSITIONS[choice[0]] if choice else module.TRANSITION
        return self._own(module.scan.backward(transition, *grads, inputs, offsets, saved))


def saved_states(kernels: Any, sizes: Mapping[str, int]) -> Sequence[int]:
    """Return the shape of the states that a forward saves, for a declaration."""
    between = interval(sizes["N"], kernels.CHUNK)
    return chunk_slots(sizes["T"], sizes["S"], between), sizes["N"], sizes["D"]


def chunk_slots(tokens: int, segments: int, chunk: int) -> int:
    """Return how many states at the starts of chunks to make room for.

    Segment ``s`` with first token ``a`` keeps chunk ``j`` in slot ``a // chunk + s + j``: no two
    chunks share one, whatever the lengths are, and the count depends on shapes alone.
    """
    return tokens // chunk + segments


def interval(states: int, chunk: int) -> int:
    """Return how many tokens lie between saved states: whole chunks, and at least ``states``.

    A token's state is ``states`` numbers a channel, so what is saved never outweighs one activation
    ``[T, D]`` (and one state a segment), whatever the state's size.
    """
    return chunk * -(-states // chunk)


def parts_of(blocks: int, width: int, states: int) -> int:
    """Return how many partial sums ``[T, N]`` of the gradients of ``q`` and ``k`` to keep.

    One a block of channels would be ``T * D * N`` numbers over the block's width. Where that is
    more than an activation ``[T, D]`` (and more than four sums), blocks take turns at fewer.
    """
    turns = -(-blocks // max(4, width // states))
    return -(-blocks // max(1, turns))


def zeros_on_tape(like: Tensor, *others: Tensor | None) -> Tensor:
    """Return zeros like a tensor that autograd traces back to it and to others.

    What a loop over no tokens returns: every input then has a gradient, zeros.
    """
    nothing = (x[:0].abs().sum() for x in (like, *others) if x is not None)
    return torch.zeros_like(like) + sum(nothing)
