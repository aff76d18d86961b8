"""``companion_step`` as a ``torch.library`` op that writes one row of the ring."""

import functools
import importlib
from types import ModuleType

from torch import Tensor

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.library import custom_op
from ssmzoo_kernels.scan import needs_library

OP = "companion_step"


def step_(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D], written
    position: Tensor,  # [B]
    a: Tensor,  # [n, D]
    b: Tensor,  # [n, D]
    d: Tensor,  # [D]
    backend: str,
) -> Tensor:
    """Return the outputs ``[B, D]`` in the ring's dtype; put ``w`` in the free place."""
    if needs_library(ring):
        return _step(u, ring, position, a, b, d, backend)
    record(OP, backend)
    return _backend(backend).step_(u, ring, position, a, b, d)


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.{OP}.{name}")


@custom_op(f"ssmzoo::{OP}", mutates_args=("ring",))
def _step(
    u: Tensor, ring: Tensor, position: Tensor, a: Tensor, b: Tensor, d: Tensor, backend: str
) -> Tensor:
    record(OP, backend)
    return _backend(backend).step_(u, ring, position, a, b, d)


@_step.register_fake
def _(u, ring, position, a, b, d, backend):
    return ring.new_empty(ring.shape[0], ring.shape[2])
