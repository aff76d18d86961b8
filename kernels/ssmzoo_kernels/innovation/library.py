"""``innovation`` as a ``torch.library`` op, so that ``torch.compile`` knows it; it has no gradient.

Here a batch is already flat: ``T = B * L`` tokens in a row, cut into ``S`` segments by ``offsets``.
A backend is a module with ``scores`` of the signature used below.
"""

import functools
import importlib
from types import ModuleType

from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import accumulator, needs_library
from ssmzoo_kernels.validation import check_offsets

OP = "innovation"


def scores(
    y: Tensor,  # [T, D]
    weights: list[float],
    history: Tensor,  # [S, k, D]
    offsets: Tensor,  # [S + 1] int64
    relative: bool,
    backend: str,
) -> Tensor:
    """Return the scores ``[T]``."""
    if needs_library(y):
        return _scores(y, weights, history, offsets, relative, backend)
    record(OP, backend)
    return _backend(backend).scores(y, weights, history, offsets, relative)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}")
def _scores(
    y: Tensor, weights: list[float], history: Tensor, offsets: Tensor, relative: bool, backend: str
) -> Tensor:
    check_offsets(OP, offsets, y.shape[0])
    record(OP, backend)
    return _backend(backend).scores(y, weights, history, offsets, relative)


@_scores.register_fake
def _(y, weights, history, offsets, relative, backend):
    return y.new_empty(y.shape[0], dtype=accumulator(y))
