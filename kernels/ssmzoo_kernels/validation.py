"""Checks that public ops make, and where the sequences of a batch or of a packed row lie."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ssmzoo_kernels.precision import beside

# of our ops in torch.library; a copy of this module, as travels with a checkpoint, has its own
NAMESPACE = (
    "ssmzoo" if __name__.startswith("ssmzoo_kernels.") else re.sub("[^0-9A-Za-z]", "_", __name__)
)


def check_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, rule: str
) -> None:
    """Check that a tensor has a shape, a floating dtype and another tensor's device.

    Args:
        op: The op's name, which opens the message.
        name: The argument's name.
        tensor: The argument.
        shape: The shape it must have.
        like: The tensor whose device it must share.
        rule: The shape in letters, e.g. ``"[B, L, N]"``.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {rule}, got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise ValueError(
            f"{op}: {name} must have shape {rule} = {list(shape)}, got {list(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise TypeError(f"{op}: {name} must be floating point, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {tensor.device}")


def check_complex(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, rule: str
) -> None:
    """Check that a tensor has a shape, a complex dtype and another tensor's device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {rule}, got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise ValueError(
            f"{op}: {name} must have shape {rule} = {list(shape)}, got {list(tensor.shape)}"
        )
    if tensor.dtype not in (torch.complex64, torch.complex128):
        raise TypeError(f"{op}: {name} must be complex64 or complex128, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {tensor.device}")


def check_leading(op: str, name: str, tensor: Tensor, rule: str) -> None:
    """Check that the op's first argument is a floating tensor with the rule's dimensions."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor {rule}, got {type(tensor).__name__}")
    if tensor.dim() != rule.count(",") + 1:
        raise ValueError(f"{op}: {name} must have shape {rule}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{op}: {name} must be floating point, got {tensor.dtype}")


def check_count(op: str, name: str, value: int, least: int = 0) -> int:
    """Return an argument that must be an int, not a bool, and at least ``least``."""
    if isinstance(value, Tensor) and torch._C._is_tracing():  # where a size is one
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value


def check_forward_mode(op: str, backend: str) -> None:
    """Fail where a forward-mode derivative is asked of another backend than the reference."""
    dual = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    if dual and backend != "reference":
        raise NotImplementedError(
            f"{op}: backend {backend!r} has no forward-mode derivative; inside a dual level, or "
            'torch.func.jvp, take backend="reference", or ssmzoo_kernels.use_backend("reference")'
        )


@dataclass(frozen=True)
class Packing:
    """Where the sequences packed into one row begin and end, checked once for all ops.

    Every op takes it for ``cu_seqlens`` and does not look at the boundaries again.

    Attributes:
        offsets: The boundaries ``[S + 1]``, int64, in one piece of memory.
        length: Tokens in the row.
    """

    offsets: Tensor
    length: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int, op: str = "packing") -> Self:
        """Check boundaries, or raise.

        Args:
            cu_seqlens: Boundaries ``[S + 1]``, int32 or int64. On a CPU they must rise from 0 to
                the row's length; on a GPU a look at them would stall the queue.
            length: Tokens in the row.
            op: The beginning of the messages.

        Raises:
            TypeError: Not an int32 or int64 tensor.
            ValueError: A wrong shape, or boundaries that do not rise from 0 to the length.
        """
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(
                f"{op}: cu_seqlens must be an int32 or int64 tensor [S + 1], got {kind}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(
                f"{op}: cu_seqlens must have shape [S + 1] with S >= 1, "
                f"got {list(cu_seqlens.shape)}"
            )
        on_cpu = cu_seqlens.device.type == "cpu"
        if torch.compiler.is_compiling():  # values are there when the graph runs
            if on_cpu:
                return cls(_checked_offsets(cu_seqlens, length, op), length)
            return cls(cu_seqlens.to(torch.int64).contiguous(), length)
        # a copy, which alone is checked: whoever holds the caller's may write into it at any time
        copy = on_cpu or cu_seqlens.is_inference()
        with torch.inference_mode(False):  # tensors made inside it cannot be saved for a backward
            offsets = cu_seqlens.to(torch.int64, copy=copy).contiguous()
        if on_cpu:
            check_boundaries(op, offsets, length)
        return cls(offsets, length)


def segment_offsets(op: str, like: Tensor, cu_seqlens: Tensor | Packing | None) -> Tensor:
    """Return where each sequence of a ``[B, L, ...]`` batch starts and ends once flattened.

    Rows of a batch and packed sequences are the same thing to a kernel: segments of one long row.

    Args:
        op: The op's name, which opens the message.
        like: The op's first argument, ``[B, L, ...]``.
        cu_seqlens: Boundaries of the sequences packed into one row, ``[S + 1]``, or None. On a CPU
            their values are checked, unless they come as a ``Packing``.

    Returns:
        ``[S + 1]`` int64 on the device of ``like``; ``S = B`` without ``cu_seqlens``.
    """
    batch, length = like.shape[:2]
    if cu_seqlens is None:
        device = like.device
        if (
            device.type in ("cpu", "cuda")
            and type(like) is Tensor
            and not torch.compiler.is_compiling()
            and innermost_transform() is None
            and not torch._C._len_torch_dispatch_stack()  # a mode may make other tensors
        ):
            if device.type == "cpu":
                return _batch_offsets(batch, length)
            # a graph that is captured would read offsets that this cache had let go of
            if not torch.cuda.is_current_stream_capturing():
                stream = torch.cuda.current_stream(device).cuda_stream
                return _batch_offsets(batch, length, device, stream)
        return torch.arange(batch + 1, device=device) * length
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs one packed row, B = 1, got B = {batch}")
    checked = isinstance(cu_seqlens, Packing)
    offsets = beside(cu_seqlens.offsets if checked else cu_seqlens, like)
    if isinstance(offsets, Tensor) and offsets.device != like.device:
        raise ValueError(f"{op}: cu_seqlens must be on {like.device}, got {offsets.device}")
    if not checked:
        return Packing.of(offsets, length, op).offsets
    if cu_seqlens.length != length:
        raise ValueError(
            f"{op}: cu_seqlens must rise from 0 to L = {length}, got a packing of "
            f"{cu_seqlens.length} tokens"
        )
    return offsets


def check_boundaries(op: str, offsets: Tensor, length: int) -> None:
    """Check that boundaries rise from 0 to the row's length."""
    values = offsets.tolist()
    if values[0] != 0 or values[-1] != length or any(a > b for a, b in pairwise(values)):
        shown = values if len(values) <= 8 else [*values[:4], "...", *values[-3:]]
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to L = {length}, got {shown}")


@torch.library.custom_op(f"{NAMESPACE}::checked_offsets", mutates_args=())
def _checked_offsets(cu_seqlens: Tensor, length: int, op: str) -> Tensor:
    """Check values in a compiled graph, which tracing could not."""
    offsets = cu_seqlens.to(torch.int64, copy=True).contiguous()
    check_boundaries(op, offsets, length)
    return offsets


@_checked_offsets.register_fake
def _(cu_seqlens, length, op):
    return cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64)


def transformed() -> bool:
    """Tell whether ``torch.func`` transforms: its tensors have no address and die with it."""
    return innermost_transform() is not None


# whether torch.autograd.grad(is_grads_batched=True) maps over a tensor
batched_gradient = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
# the innermost transform or None, by a call of C, because it is asked at every token
innermost_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=64)
def _batch_offsets(
    batch: int, length: int, device: torch.device | None = None, stream: int = 0
) -> Tensor:
    """Return the offsets of a batch; every op of every layer asks for the same. Never written.

    On a GPU they are of the stream that made them: another one might read them too early.
    """
    with torch.inference_mode(False):  # tensors made inside it cannot be saved for a backward
        return torch.arange(batch + 1, device=device or "cpu") * length
