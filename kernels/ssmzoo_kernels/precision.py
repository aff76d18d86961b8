"""Double precision, also beside devices that lack it."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

LACKING = ("mps",)  # types of devices without float64

_log = logging.getLogger("ssmzoo")


def double(x: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128; on the CPU if its device lacks them (Apple's GPUs).

    What is computed from the result lies there too, until ``.to(x)``, or ``.to(x.device, dtype)``
    of other dtypes, rounds it and brings it back.
    """
    kind = torch.complex128 if x.is_complex() else torch.float64
    if x.device.type not in LACKING:
        return x.to(kind)
    _tell(x.device.type)
    return x.cpu().to(kind)


@functools.cache
def _tell(device: str) -> None:
    _log.warning("%s has no float64: what needs it is computed on the CPU", device)


def beside(x: Any, wide: Tensor) -> Any:
    """Return a tensor where a result of :func:`double` lies that it meets; others as they are."""
    if isinstance(x, Tensor) and x.device.type in LACKING:
        return x.to(wide.device)
    return x


def powers(exponent: Tensor, steps: Tensor | int, like: Tensor) -> Tensor:
    """Return ``e^{exponent steps}``, found in float64, in the dtype and on the device of ``like``.

    Args:
        exponent: complex128, where :func:`double` put it.
        steps: How many, on the device of ``like`` where a tensor.
        like: What the powers meet.
    """
    return torch.exp(exponent * beside(steps, exponent)).to(like)
