"""Checks of what a model is given: one kind of input, and indices inside their table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def check_indices(name: str, indices: Tensor, size: int, ignored: int | None = None) -> None:
    """Check on a CPU that indices lie inside a table.

    On a GPU the check would synchronize, so it is left out; torch itself then aborts.

    Args:
        name: The argument's name, for the message.
        indices: Integers of any shape.
        size: Rows of the table.
        ignored: An index that is allowed though it is outside the table.

    Raises:
        ValueError: One is negative, or not below ``size``.
    """
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not indices.numel():
        return
    low, high = (int(x) for x in indices.aminmax())
    if low >= 0 and high < size:
        return
    wrong = (indices < 0) | (indices >= size)
    if ignored is not None:
        wrong &= indices != ignored
    if wrong.any():
        also = "" if ignored is None else f", or {ignored}"
        raise ValueError(
            f"{name} must be in [0, {size - 1}]{also}, got {int(indices[wrong].flatten()[0])}"
        )


@contextlib.contextmanager
def named_indices(name: str, indices: Tensor, size: int, ignored: int) -> Iterator[None]:
    """Replace what torch says of indices inside the block by an error that names them.

    Args as of :func:`check_indices`.

    Raises:
        ValueError: One is outside the table.
        TypeError: They are integers of another type than int64.
    """
    try:
        yield
    except RuntimeError as error:
        if indices.is_floating_point() or indices.dtype == torch.int64:
            raise
        raise TypeError(f"{name} must be int64, got {indices.dtype}") from error
    except IndexError:
        check_indices(name, indices, size, ignored)
        raise


def given_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None = None,
    input_values: Tensor | None = None,
) -> Tensor:
    """Return the one that was given, ``[B, L, ...]``.

    Raises:
        ValueError: None or several were given, or it has fewer than two dimensions.
    """
    names = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
    given = {name: tensor for name, tensor in names.items() if tensor is not None}
    if len(given) != 1:
        raise ValueError(
            "give exactly one of input_ids and inputs_embeds, or input_values alone, "
            f"got {', '.join(given) or 'none'}"
        )
    ((name, tensor),) = given.items()
    if tensor.dim() < 2:
        raise ValueError(f"{name} must have shape [B, L], got {list(tensor.shape)}")
    return tensor
