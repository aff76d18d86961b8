"""The long depthwise convolution of state-space models, by FFT."""

import importlib

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.fft_conv import reference
from ssmzoo_kernels.fft_conv.pieces import default_workspace
from ssmzoo_kernels.validation import Packing, check_count

OP = "fft_conv"
CONV = Op(
    OP,
    inputs={
        "u": "B L D",
        "kernel": "D K",
        "D": "D?",
        "initial_state": "S K-1 D?",
        "future_kernel": "D F?",
    },
    outputs={"y": "B L D"},
    options={"workspace": "int"},
    packing="rows",
    least={"kernel": "tap"},
    offers=("reference", "eager", "cpu"),
    reference=reference.fft_conv,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.fft_conv.{name}"),
)


def fft_conv(
    u: Tensor,  # [B, L, D]
    kernel: Tensor,  # [D, K]
    D: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, K - 1, D], zeros if absent
    *,
    future_kernel: Tensor | None = None,  # [D, F]
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    output_final_state: bool = False,
    workspace: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel with its own long filter.

    ``y[t,i] = sum_j kernel[i,j] u[t-j,i] + D[i] u[t,i] + sum_j future_kernel[i,j] u[t+1+j,i]``,
    where ``u[t]`` for ``t < 0`` is the initial state and for ``t >= L`` zero. K and L are free of
    each other. FFTs and sums are float32 (float64 for float64 inputs); only the output takes u's
    dtype. An FFT spreads rounding over the sequence: outputs before a huge input carry about 1e-7
    of its size.

    Args:
        u: The inputs.
        kernel: One filter per channel; its first tap meets the current token.
        D: Direct term, added in the time domain.
        initial_state: The K - 1 inputs before the first one, oldest first; with ``cu_seqlens`` one
            row per packed sequence, ``[S, K - 1, D]``.
        future_kernel: A second filter that sees only later tokens; its first tap meets the next.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        output_final_state: Return the last K - 1 inputs, to continue from.
        workspace: Bytes that the transforms may take beside inputs and outputs; a sequence too long
            for it is convolved in pieces, which costs time. None: 256 MiB, on a GPU 2 GiB.
        backend: "auto" goes by device; the FFTs are torch's in any case. Naming a backend that
            cannot run is an error.

    Returns:
        The outputs ``[B, L, D]``, and the last K - 1 inputs ``[B, K - 1, D]`` (``[S, K - 1, D]``)
        or None, both in u's dtype. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The named backend cannot run on this machine.
    """
    inputs = (u, kernel, D, initial_state, future_kernel)
    offsets = CONV.check(inputs, cu_seqlens)
    offsets = None if cu_seqlens is None else offsets
    if workspace is None:
        workspace = default_workspace(u)
    else:
        workspace = check_count(OP, "workspace", workspace, 1)
    chosen = CONV.choose(backend, u)
    if chosen == "reference":
        y = CONV.judge(inputs, {}, offsets)
    else:
        y = CONV.run(chosen, inputs, {"workspace": workspace}, offsets)
    if not output_final_state:
        return y, None
    return y, _last_inputs(u, kernel.shape[1] - 1, initial_state, offsets)


def _last_inputs(
    u: Tensor, count: int, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Return the last inputs of every sequence, reaching back into its initial state."""
    batch, length, width = u.shape
    if cu_seqlens is None:
        if not torch.compiler.is_exporting() and length >= count:
            # never the caller's memory: what is done to it later is not done to the state
            return u[:, length - count :].clone(memory_format=torch.contiguous_format)
        before = u.new_zeros(batch, count, width) if initial_state is None else initial_state
        return torch.cat([before.to(u.dtype), u], dim=1)[:, length:]
    begin, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    place = end - count + torch.arange(count, device=u.device)  # [S, K - 1]
    row = u[0] if length else u.new_zeros(1, width)
    found = row[place.clamp(0, row.shape[0] - 1)]
    inside = (place >= begin).unsqueeze(-1)
    if initial_state is None:
        return found.where(inside, 0.0)
    back = (place - begin + count).clamp(0, max(count - 1, 0)).unsqueeze(-1)
    earlier = initial_state.to(u.dtype).gather(1, back.expand(-1, -1, width))
    return torch.where(inside, found, earlier)


__all__ = ["fft_conv"]
