"""Tensors of a check: their names and layouts, and how they are compared."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Argument


def letters(spec: Argument) -> tuple[str, ...]:
    """Return the letters of a declared shape."""
    return tuple(letter for letter, _ in spec.dims)


def is_integer(x: Tensor) -> bool:
    """Tell whether a tensor holds whole numbers or bools."""
    return not (x.is_floating_point() or x.is_complex())


def cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor in a dtype, complex ones in the one that goes with it."""
    if x is None or is_integer(x):
        return x
    if x.is_complex():
        wide = torch.promote_types(dtype, torch.float32)
        return x.to(torch.promote_types(wide, torch.complex64))
    return x.to(dtype)


def ends(lengths: Sequence[int]) -> Tensor:
    """Return the boundaries of packed sequences of some lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def sloped(x: Tensor) -> Tensor:
    """Return a leaf that has a gradient, if its numbers can."""
    return x.detach().requires_grad_(not is_integer(x))


def close(name: str, got: Tensor, expected: Tensor, tolerance: float, least: float = 0.0) -> None:
    """Fail unless two results are equal but for a share of the largest entry."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {list(got.shape)} {got.dtype}, not {list(expected.shape)} {expected.dtype}"
        )
    if tolerance == 0:
        if not torch.equal(got, expected):
            raise AssertionError(f"{name}: other bits")
    elif expected.numel():
        wide = torch.promote_types(torch.float64, expected.dtype)
        got, expected = got.detach().to(wide), expected.detach().to(wide)
        error, allowed = (got - expected).abs().max(), tolerance * expected.abs().max() + least
        if not error <= allowed:
            raise AssertionError(f"{name}: error {error:.2e} exceeds {allowed:.2e}")


def fails(kind: type[Exception], names: str | Sequence[str], call: Callable[[], Any]) -> None:
    """Fail unless a call raises an error of a type, in one line that has one of some words."""
    words = (names,) if isinstance(names, str) else names
    try:
        call()
    except kind as error:
        text = str(error)
        if "\n" in text or not any(word in text for word in words):
            raise AssertionError(
                f"an error in one line that names {words[0]}, got: {text}"
            ) from None
    except Exception as error:
        raise AssertionError(
            f"{words[0]}: {type(error).__name__}, not {kind.__name__}: {error}"
        ) from error
    else:
        raise AssertionError(f"{words[0]}: no {kind.__name__}")


# --- layouts: the same values, elsewhere in memory ------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    """Return the tensor as it is."""
    return x


def roomy(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie apart, with NaN between."""
    if x.dim() < 1 or is_integer(x):
        return x
    room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    return room[..., 1 : x.shape[-1] + 1].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is not the densest."""
    if x.dim() < 2:
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def conjugate(x: Tensor) -> Tensor:
    """Return a complex tensor whose conjugate is not yet taken."""
    return x.conj_physical().conj() if x.is_complex() else x


def expanded(x: Tensor) -> Tensor:
    """Return a tensor whose first entry stands for all, by a stride of zero."""
    return x[:1].expand_as(x)


def far_apart(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie 2^30 numbers apart, in memory that only they take."""
    if x.dim() < 3:
        return x
    apart = 2**30
    span = (x.shape[1] - 1) * apart + x[0, 0].numel()
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )  # MAP_NORESERVE: untouched pages are free
    memory = mmap.mmap(-1, span * x.dtype.itemsize, flags=flags)
    inner = x[0, 0].contiguous().stride()
    flat = torch.frombuffer(memory, dtype=x.dtype)
    return flat.as_strided(x.shape, (span, apart, *inner)).copy_(x)
