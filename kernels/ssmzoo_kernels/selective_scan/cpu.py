"""Mamba's scan in C: the transition in selective_scan.c, the skeleton in ``scan``."""

import ctypes
from pathlib import Path

import torch

from ssmzoo_kernels.scan import cpu as scan

_SOURCE = Path(__file__).with_name("selective_scan.c")
TRANSITIONS = {"euler": scan.Transition(_SOURCE), "zoh": scan.Transition(_SOURCE, ZOH=1)}


def load(dtype: torch.dtype, discretization: str) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    return TRANSITIONS[discretization].load(dtype)
