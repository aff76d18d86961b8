"""How an op is registered with torch.library: its results lie in memory as its fake promises."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def custom_op(
    name: str, *, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as ``torch.library.custom_op`` does, with contiguous results.

    ``torch.compile`` reads results by the strides that the fake function promises, and does not
    look at what came. Fakes promise contiguous tensors; a backend may return any layout, which is
    copied here unless it is contiguous already.

    Args:
        name: ``"namespace::op"``.
        mutates_args: Names of the arguments that the function writes to.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def laid_out(*args: object, **kwargs: object) -> Any:
            found = function(*args, **kwargs)
            if isinstance(found, Tensor):
                return contiguous(found)
            parts = [contiguous(x) for x in found]
            return parts if isinstance(found, list) else (*parts,)

        return torch.library.custom_op(name, laid_out, mutates_args=tuple(mutates_args))

    return register


def contiguous(x: Tensor) -> Tensor:
    """Return a tensor as plain numbers in rows: neither strided, conjugated nor negated lazily."""
    return x.resolve_conj().resolve_neg().contiguous()
