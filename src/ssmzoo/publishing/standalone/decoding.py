"""A token by a module's own code; it stands in for ``ssmzoo.modeling.decoding``, which has C."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ModuleParts = State = Any


class UnservedError(Exception):
    """The module has something that no program is written for."""


def recurrent(program: Any, state: Any) -> int:
    """Return the number of a recurrent state."""
    raise UnservedError


def is_token(module: nn.Module, x: Tensor, packing: Any) -> bool:
    """Tell whether a layer reads one token that may go by a program: it never does here."""
    return False


def token_of_layer(
    module: nn.Module,
    writer: Callable[..., Any],
    x: Tensor,
    state: Any,
    own: Callable[[], Tensor],
    matrices: torch.dtype,
    **options: Any,
) -> Tensor:
    """Return a module's output."""
    return own()
