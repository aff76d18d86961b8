"""Sums of complex exponentials, the kernels of diagonal state spaces, and their transpose."""

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op, accumulator
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.precision import beside, double
from ssmzoo_kernels.segments import by_length
from ssmzoo_kernels.validation import (
    Packing,
    check_complex,
    check_count,
    check_leading,
    segment_offsets,
)
from ssmzoo_kernels.vandermonde import reference
from ssmzoo_kernels.vandermonde.tables import Lags

OP = "vandermonde"
STATE = "vandermonde_state"
TORCH = ("reference", "eager")


class _Sums:
    """``vandermonde`` on one backend."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def forward(
        self,
        weight: Tensor,
        exponent: Tensor,
        reversed: Tensor | None,
        length: int,
        first: int,
        last: int,
    ) -> Tensor:
        lags = Lags(length, first, last, False if reversed is None else reversed)
        with torch.autocast(weight.device.type, enabled=False):
            return self.module.synthesize(weight, exponent, lags)

    def backward(
        self,
        grad: Tensor,
        weight: Tensor,
        exponent: Tensor,
        reversed: Tensor | None,
        length: int,
        first: int,
        last: int,
    ) -> tuple[Tensor, Tensor]:
        lags = Lags(length, first, last, False if reversed is None else reversed)
        with torch.autocast(grad.device.type, enabled=False):
            sums, moments = self.module.analyze(grad, exponent, lags, True)
            return sums.conj_physical(), (weight * moments).conj_physical().sum(0)


class _States:
    """``vandermonde_state`` on one backend: the transpose."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def forward(self, u: Tensor, exponent: Tensor, reversed: Tensor | None, offset: int) -> Tensor:
        wide, lags = self._prepare(u, reversed, offset)
        with torch.autocast(u.device.type, enabled=False):
            return self.module.analyze(wide, exponent, lags, False)[0]

    def backward(
        self, grad: Tensor, u: Tensor, exponent: Tensor, reversed: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        wide, lags = self._prepare(u, reversed, offset)
        with torch.autocast(grad.device.type, enabled=False):
            moments = self.module.analyze(wide, exponent, lags, True)[1]
            grad_u = self.module.synthesize(grad.conj_physical(), exponent, lags)
            return grad_u.transpose(1, 2), (grad * moments.conj_physical()).sum(0)

    @staticmethod
    def _prepare(u: Tensor, reversed: Tensor | None, offset: int) -> tuple[Tensor, Lags]:
        # what is read backwards was counted from the start, everything else from the end
        lags = Lags(u.shape[1], offset, 0, True if reversed is None else ~reversed)
        return u.to(accumulator(u)).transpose(1, 2), lags


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"ssmzoo_kernels.vandermonde.{name}")


SUMS = Op(
    OP,
    inputs={"weight": "B H N complex", "exponent": "H N complex", "reversed": "H N bool?"},
    outputs={"kernel": "B H length as real"},
    options={"length": "int", "first": "int", "last": "int"},
    offers=(*TORCH, "triton"),
    reference=reference.vandermonde,
    kernels=lambda name: _Sums(_module(name)),
)
STATES = Op(
    STATE,
    inputs={"u": "B L H", "exponent": "H N complex", "reversed": "H N bool?"},
    outputs={"state": "B H N as complex"},
    options={"offset": "int"},
    offers=(*TORCH, "triton"),
    reference=reference.vandermonde_state,
    kernels=lambda name: _States(_module(name)),
)


def vandermonde(
    weight: Tensor,  # [..., H, N]
    exponent: Tensor,  # [H, N]
    length: int,
    *,
    offset: int = 0,
    reversed: Tensor | None = None,  # [H, N]
    norm_length: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Sum N complex exponentials per head at ``length`` consecutive positions.

    ``K[h,l] = Re sum_n weight[h,n] e^{exponent[h,n] lag}`` with ``lag = offset + l``, or, where
    ``reversed``, ``lag = norm_length - 1 - (offset + l)``: a mode that grows with l, written as one
    that decays away from position ``norm_length - 1`` (its exponent already has the sign of decay).
    No factor 2 and no conjugate partner. Phases are reduced in float64; products are float32, or
    float64 for complex128 weights. Takes ``H N sqrt(L)`` memory and never ``H N L``.

    Args:
        weight: Coefficients; any batch in front, e.g. a state times its read-out.
        exponent: One exponent per head and mode, with ``Re <= 0``; complex64 is widened. It may
            lie on the CPU where the other tensors' device has no float64.
        length: How many positions.
        offset: The first position.
        reversed: Which modes count their lag down, or none.
        norm_length: From where reversed modes count; ``offset + length`` if absent.
        backend: "auto" goes by device; "triton" is for complex64. Naming a backend that cannot run
            is an error.

    Returns:
        ``[..., H, length]``, real. Gradients flow to weight and exponent.

    Raises:
        ValueError: Shapes, devices or choices that do not fit, or lags below zero.
        TypeError: Not a tensor, not complex, or not a whole number.
    """
    exponent, reversed = _checked_exponent(OP, exponent, reversed)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{OP}: weight must be a tensor [..., H, N], got {type(weight).__name__}")
    home, weight = weight.device, beside(weight, exponent)
    shape = (*weight.shape[:-2], *exponent.shape)
    check_complex(OP, "weight", weight, shape, exponent, "[..., H, N]")
    length, offset = check_count(OP, "length", length), check_count(OP, "offset", offset)
    end = offset + length
    norm_length = end if norm_length is None else check_count(OP, "norm_length", norm_length)
    if reversed is not None and norm_length < end:
        raise ValueError(
            f"{OP}: norm_length must be at least offset + length = {end} where modes are reversed, "
            f"got {norm_length}: position norm_length is past a reversed mode's last lag"
        )

    chosen = _choose(SUMS, backend, weight)
    if chosen == "reference":
        options = {"length": length, "offset": offset, "norm_length": norm_length}
        return SUMS.judge((weight, exponent, reversed), options).to(home)
    flat = weight.reshape(math.prod(weight.shape[:-2]), *exponent.shape)
    options = {"length": length, "first": offset, "last": norm_length - end}
    out = SUMS.run(chosen, (flat, exponent, reversed), options)
    return out.view(*weight.shape[:-1], length).to(home)


def vandermonde_state(
    u: Tensor,  # [B, L, H]
    exponent: Tensor,  # [H, N]
    *,
    offset: int = 0,
    reversed: Tensor | None = None,  # [H, N]
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> Tensor:
    """Return a diagonal state after L inputs: the transpose of ``vandermonde``.

    ``s[h,n] = sum_j u[j,h] e^{exponent[h,n] (L-1-j)}``, the state of ``s = e^{exponent} s + u``
    from zero. Where ``reversed``, ``s[h,n] = sum_j u[j,h] e^{exponent[h,n] (offset+j)}``: such a
    mode keeps its sum from the first token on and moves the phase to the read-out.

    Args:
        u: The inputs.
        exponent: One exponent per head and mode, with ``Re <= 0``; complex64 is widened.
        offset: How many tokens came before these; only reversed modes ask.
        reversed: Which modes are reversed, or none.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them; ``offset`` then holds for each.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        ``[B, H, N]`` (``[S, H, N]``), complex64, or complex128 for float64 inputs. Gradients flow
        to u and exponent.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or of the wrong kind.
    """
    check_leading(STATE, "u", u, "[B, L, H]")
    home = u.device
    exponent, reversed = _checked_exponent(STATE, exponent, reversed)
    u = beside(u, exponent)
    if u.shape[2] != exponent.shape[0] or u.device != exponent.device:
        raise ValueError(
            f"{STATE}: u must have shape [B, L, H] with H = {exponent.shape[0]} on "
            f"{exponent.device}, got {list(u.shape)} on {u.device}"
        )
    offset = check_count(STATE, "offset", offset)
    chosen = _choose(STATES, backend, u)

    def state(tokens: Tensor) -> Tensor:
        if chosen == "reference":
            return STATES.judge((tokens, exponent, reversed), {"offset": offset})
        return STATES.run(chosen, (tokens, exponent, reversed), {"offset": offset})

    if cu_seqlens is None:
        return state(u).to(home)
    groups = by_length(segment_offsets(STATE, u, cu_seqlens))
    order = torch.cat([members for members, _ in groups])
    return torch.cat([state(u[0, places]) for _, places in groups])[order.argsort()].to(home)


def _choose(op: Op, backend: Backend, x: Tensor) -> str:
    # Triton does not compile these products in float64 for every GPU; torch's are as good there
    wide = x.dtype in (torch.float64, torch.complex128)
    return op.choose(backend, x, offers=TORCH if wide else None)


def _checked_exponent(
    op: str, exponent: Tensor, reversed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(exponent, Tensor) or not exponent.is_complex():
        kind = exponent.dtype if isinstance(exponent, Tensor) else type(exponent).__name__
        raise TypeError(f"{op}: exponent must be a complex tensor [H, N], got {kind}")
    if exponent.dim() != 2:
        raise ValueError(f"{op}: exponent must have shape [H, N], got {list(exponent.shape)}")
    exponent = double(exponent)
    if reversed is None:
        return exponent, None
    reversed = beside(reversed, exponent)
    if not isinstance(reversed, Tensor) or reversed.dtype is not torch.bool:
        kind = reversed.dtype if isinstance(reversed, Tensor) else type(reversed).__name__
        raise TypeError(f"{op}: reversed must be a bool tensor [H, N], got {kind}")
    if reversed.shape != exponent.shape or reversed.device != exponent.device:
        raise ValueError(
            f"{op}: reversed must have shape [H, N] = {list(exponent.shape)} on "
            f"{exponent.device}, got {list(reversed.shape)} on {reversed.device}"
        )
    return exponent, reversed


__all__ = ["vandermonde", "vandermonde_state"]
