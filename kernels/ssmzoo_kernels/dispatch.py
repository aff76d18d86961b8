"""Which implementation of an op runs, and which one did run.

=========== ====================================================================================
backend     what it is
=========== ====================================================================================
reference   the formula as a loop over time on the autograd tape; any device and dtype; the judge
eager       torch ops with the op's own backward; any device, needs no compiler
cpu         C, built once with the machine's compiler, threaded
triton      GPU kernels
=========== ====================================================================================

``"auto"`` goes by the tensors' device. A backend asked for by name runs or raises; it is never
replaced by another one. A kernel that this machine cannot build or load is replaced by ``eager``
under ``"auto"``, op by op, before the call begins, with one warning for each cause.
"""

import contextlib
import contextvars
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch.autograd import forward_ad

from ssmzoo_kernels.validation import batched_gradient, innermost_transform

Backend = Literal["auto", "reference", "eager", "cpu", "triton"]

_NAMES = get_args(Backend)
ALL = ("reference", "eager", "cpu", "triton")

_log = logging.getLogger("ssmzoo")
WITH_C = (None, "auto", "cpu")  # requests that C kernels may serve
forced_backend: contextvars.ContextVar[Backend | None] = contextvars.ContextVar(
    "forced", default=None
)
# by op, of any package: returns its C kernels, an object with a function `load`
c_kernels: dict[str, Callable[[], Any]] = {}
_ran: dict[str, str] = {}
_offered: dict[str, tuple[str, ...]] = {}  # by op, the backends that it has
_failures: dict[tuple[str, str], None] = {}  # ops whose C kernel cannot be had, and why
_watched: list[tuple[str, str]] | None = None  # no context variable: torch.compile traces `record`
_OWN = {"cpu": "cpu", "cuda": "triton"}  # by device, the backend written for it


def last_backend(op: str) -> str | None:
    """Return the backend that ran last for an op (``"longhorn_scan"``), or None."""
    return _ran.get(op)


def record(op: str, backend: str) -> None:
    """Record that a backend ran; every implementation calls it when it starts."""
    _ran[op] = backend
    if _watched is not None:
        _watched.append((op, backend))


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects the op and backend of every run inside the block, in order."""
    global _watched
    before, _watched = _watched, []
    try:
        yield _watched
    finally:
        _watched = before


def why_not_faster(op: str, backend: str, device: str) -> str | None:
    """Return why a backend is not the device's fastest and what to do, or None if it is."""
    if backend == _OWN.get(device) or backend not in ALL:
        return None
    if backend == "reference":
        return "only the reference knows what was asked of it"
    if device not in _OWN:
        return f"no kernels for {device}"
    if _OWN[device] not in _offered.get(op, ALL):
        return None
    if device == "cuda" and not has_triton():
        return 'triton is not installed; pip install "ssmzoo[triton]"'
    if device == "cpu" and compiler_missing():
        return compiler_missing()
    failures = [why for name, why in _failures if name == op] if device == "cpu" else []
    return failures[-1] if failures else f"{_OWN[device]} does not take this call's dtype or size"


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Make every call with ``backend="auto"`` inside the block take this backend.

    An op that has no such backend (``vandermonde`` has no C kernel) keeps its own choice. A
    compiled function keeps the backend that it was compiled with.
    """
    _check_name("use_backend", backend)
    token = forced_backend.set(backend)
    try:
        yield
    finally:
        forced_backend.reset(token)


def is_traced() -> bool:
    """Tell whether calls are traced, by a compiler or by ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def is_plain(x: torch.Tensor) -> bool:
    """Tell whether a tensor is just numbers: no tracer, transform or mode is active."""
    return (
        type(x) is torch.Tensor
        and not is_traced()
        and not torch._C._len_torch_dispatch_stack()
        and innermost_transform() is None
        and not batched_gradient(x)
        and forward_ad._current_level < 0
    )


def decodes_on_cpu(x: torch.Tensor) -> bool:
    """Tell whether a kernel without gradients, for CPUs, may take a tensor as things are now."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and is_plain(x)
        and not torch.is_autocast_enabled("cpu")
    )


def takes_kernels() -> bool:
    """Tell whether :func:`use_backend` leaves room for C kernels here."""
    return forced_backend.get() in WITH_C


# torch.compile cannot trace what is asked here (a context variable, a compiler); the
# answer is fixed when a graph is traced
@torch.compiler.assume_constant_result
def choose(
    op: str, backend: Backend, device: str, offers: tuple[str, ...], kernel: tuple[object, ...]
) -> str:
    """Choose the backend of a call, forward and backward.

    Args:
        op: The op's name, which opens the messages.
        backend: The caller's request.
        device: The type of device on which the tensors lie.
        offers: The backends that the op has; ``"eager"`` among them. It stands in for the device's
            own backend where the op has none, or where its C kernel cannot be built or loaded.
        kernel: What tells the op's C kernels apart, as its ``load`` takes it: what the call
            computes in (at least float32) and, where there are several, the variant.

    Raises:
        ValueError: No backend of that name, the tensors lie on the wrong device for it, or a
            setting of the C kernels is wrong.
        RuntimeError: A backend that was asked for by name cannot run on this machine.
    """
    if backend not in _NAMES:
        _check_name(op, backend)
    _offered[op] = offers
    if backend == "auto":
        forced = forced_backend.get()
        backend = forced if forced in offers else "auto"
    elif backend not in offers:
        raise ValueError(
            f"{op}: backend must be one of auto, {', '.join(offers)}, got {backend!r}: "
            "this op has no such implementation"
        )
    if backend == "auto":
        if offers is not ALL and not {"cpu", "triton"} & {*offers}:
            return "eager"
        best = _best(device)
        fit = best in offers and (best != "cpu" or not kernel_missing(op, *kernel))
        return best if fit else "eager"
    if backend == "cpu":
        if device not in ("cpu", "meta"):
            raise ValueError(_wrong_device(op, backend, "CPU", device))
        missing = compiler_missing() if device == "meta" else _why_no_kernel(op, *kernel)
        if missing:
            raise RuntimeError(
                f'{op}(backend="cpu") has no C kernel here: {missing}, or use backend="eager"'
            )
    if backend == "triton":
        if device not in ("cuda", "meta") and not interpreting():
            raise ValueError(_wrong_device(op, backend, "CUDA", device))
        if not has_triton():
            raise RuntimeError(
                f'{op}(backend="triton") needs triton; pip install "ssmzoo[triton]", '
                'or use backend="eager"'
            )
    return backend


@functools.cache
def has_triton() -> bool:
    """Tell whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compiler_missing() -> str:
    """Return why no C kernel can be built here, and the way out, or an empty string."""
    from ssmzoo_kernels import native

    return native.missing()


@functools.cache
def kernel_missing(op: str, *kernel: object) -> str:
    """Return why an op's C kernel cannot be built or loaded, or an empty string; warn of it once.

    Args:
        op: An op of ``c_kernels``.
        kernel: Arguments of its ``load``: what the call computes in and, where it matters, a
            variant.
    """
    missing = _why_no_kernel(op, *kernel)
    if missing:
        _failures[op, missing] = None
        _warn_of_slowness(missing)
    return missing


@functools.cache
def _why_no_kernel(op: str, dtype: torch.dtype, *variant: str) -> str:
    missing = compiler_missing()
    if missing:
        return missing
    try:
        c_kernels[op]().load(torch.promote_types(torch.float32, dtype), *variant)
    except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: half a library
        return str(error)
    return ""


@functools.cache
def _warn_of_slowness(missing: str) -> None:
    _log.warning("CPU ops take the slow eager path: %s", missing)


def interpreting() -> bool:
    """Tell whether Triton kernels run in its interpreter (``TRITON_INTERPRET=1``)."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _best(device: str) -> str:
    if device == "cuda":
        if has_triton():
            return "triton"
        _log.warning(
            "GPU scans take the slow eager path: triton is not installed; "
            'pip install "ssmzoo[triton]"'
        )
        return "eager"
    return "cpu" if device == "cpu" else "eager"


def _check_name(op: str, backend: str) -> None:
    if backend not in _NAMES:
        raise ValueError(f"{op}: backend must be one of {', '.join(_NAMES)}, got {backend!r}")


def _wrong_device(op: str, backend: str, needed: str, device: str) -> str:
    return (
        f'{op}(backend="{backend}") needs {needed} tensors, got {device}; '
        'use backend="auto" or "eager"'
    )
