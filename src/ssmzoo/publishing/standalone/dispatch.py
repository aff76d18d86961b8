"""Which implementation of an op runs where ssmzoo is not installed: torch's own ops, on any device.

It stands in for ``ssmzoo_kernels.dispatch`` beside a checkpoint, which brings neither C nor Triton.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

Backend = Literal["auto", "reference", "eager", "cpu", "triton"]

ALL = ("reference", "eager")

_log = logging.getLogger("ssmzoo")
c_kernels: dict[str, Callable[[], Any]] = {}  # ops tell what theirs are; none is built here
_ran: dict[str, str] = {}


def last_backend(op: str) -> str | None:
    """Return the backend that ran last for an op (``"longhorn_scan"``), or None."""
    return _ran.get(op)


def record(op: str, backend: str) -> None:
    """Note that a backend ran; every implementation calls it as it starts."""
    _ran[op] = backend


def is_traced() -> bool:
    """Tell whether a graph is made of what is done, by a compiler or by ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def decodes_on_cpu(x: torch.Tensor) -> bool:
    """Tell whether a kernel for CPUs may take a tensor: none is here."""
    return False


def takes_kernels() -> bool:
    """Tell whether there is room for C kernels."""
    return False


# torch.compile cannot trace the log; the answer is fixed when a graph is traced
@torch.compiler.assume_constant_result
def choose(
    op: str, backend: Backend, device: str, offers: tuple[str, ...], kernel: tuple[object, ...]
) -> str:
    """Return the backend that a call shall take: ``"eager"`` unless the reference is asked for.

    Raises:
        ValueError: No backend of that name.
        RuntimeError: One that only ssmzoo has.
    """
    if backend not in get_args(Backend):
        raise ValueError(
            f"{op}: backend must be one of {', '.join(get_args(Backend))}, got {backend!r}"
        )
    if backend in ("cpu", "triton"):
        raise RuntimeError(
            f'{op}(backend="{backend}") needs ssmzoo, and this checkpoint runs on its own code; '
            'install ssmzoo, or use backend="auto" or "eager"'
        )
    if backend != "auto" and backend not in offers:
        raise ValueError(f"{op}: this op has no implementation {backend!r}; use backend='auto'")
    _tell_once()
    return "eager" if backend == "auto" else backend


@functools.cache
def _tell_once() -> None:
    _log.warning(
        "this checkpoint runs on the code that came with it, in torch; "
        "install ssmzoo for its faster kernels"
    )
