"""The short causal convolution in C: causal_conv1d.c."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmzoo_kernels import native
from ssmzoo_kernels.declaration import accumulator

_SOURCE = Path(__file__).with_name("causal_conv1d.c")


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "initial", "offsets")),
        *((name, ctypes.c_int64) for name in ("segments", "width", "taps", "silu", "stride")),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("final", ctypes.c_void_p),
        ("stride_out", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "initial")),
    ]


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Build and load the library of a dtype; errors are those of native.library."""
    library = native.library(_SOURCE, dtype)
    inputs, pointer = ctypes.POINTER(_Inputs), ctypes.c_void_p
    library.conv_forward.argtypes = (inputs, pointer, pointer, ctypes.c_int)
    library.conv_backward.argtypes = (inputs, ctypes.POINTER(_Gradients), ctypes.c_int)
    return library


def forward(
    x: Tensor,  # [T, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    initial_state: Tensor | None,  # [S, K - 1, D]
    offsets: Tensor,  # [S + 1] int64
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, D]`` and the last K - 1 inputs of every segment, in x's dtype."""
    exact = accumulator(x)
    kept, given = _prepare(x, weight, bias, initial_state, offsets, activation, exact)
    (tokens, width), taps = x.shape, weight.shape[1]
    out = torch.empty((tokens, width), dtype=exact, device="cpu")
    final_state = torch.empty((offsets.shape[0] - 1, taps - 1, width), dtype=exact, device="cpu")
    failed = load(exact).conv_forward(
        given,
        out.data_ptr(),
        final_state.data_ptr(),
        torch.get_num_threads() if tokens * width > native.ONE_THREADS_WORK else 1,
    )
    del kept  # until the kernel had read them
    if failed:
        raise MemoryError("causal_conv1d: no memory for a list of spans")
    return out.to(x.dtype), final_state.to(x.dtype)


def backward(
    grad_out: Tensor | None,  # [T, D]
    grad_final: Tensor | None,  # [S, K - 1, D]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor,
    activation: str | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and initial state, None where one was absent."""
    exact = accumulator(x)
    kept, given = _prepare(x, weight, bias, initial_state, offsets, activation, exact)
    (tokens, width), taps = x.shape, weight.shape[1]
    grad_x = torch.empty((tokens, width), dtype=exact, device="cpu")
    grad_weight = torch.empty((width, taps), dtype=exact, device="cpu")
    grad_bias = None if bias is None else torch.empty(width, dtype=exact, device="cpu")
    grad_initial = None
    if initial_state is not None:
        grad_initial = torch.empty(initial_state.shape, dtype=exact, device="cpu")
    if grad_out is not None:
        grad_out = native.rows(grad_out, exact)
    if grad_final is not None:
        grad_final = grad_final.to(exact).contiguous()
    gradients = _Gradients(
        native.address(grad_out),
        native.address(grad_final),
        0 if grad_out is None else grad_out.stride(0),
        *native.addresses((grad_x, grad_weight, grad_bias, grad_initial)),
    )
    failed = load(exact).conv_backward(given, gradients, native.threads(tokens * width))
    del kept
    if failed:
        raise MemoryError("causal_conv1d: no memory for the spans' partial sums")
    return grad_x, grad_weight, grad_bias, grad_initial


def _prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor | None,
    offsets: Tensor,
    activation: str | None,
    exact: torch.dtype,
) -> tuple[tuple[Tensor | None, ...], _Inputs]:
    """Return the inputs as the kernel reads them, copied only where necessary, and their places."""
    # a state in another dtype is history in x's dtype first, as the reference keeps it
    if history is not None:
        history = history.to(x.dtype).to(exact).contiguous()
    # without calls of ours, which take most of a token's time
    if x.dtype is not exact:
        x = x.to(exact)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.to(exact).contiguous()
    if bias is not None:
        bias = bias.to(exact).contiguous()
    return (x, weight, bias, history), _Inputs(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if history is None else history.data_ptr(),
        offsets.data_ptr(),
        offsets.shape[0] - 1,
        x.shape[1],
        weight.shape[1],
        activation is not None,
        x.stride(0),
    )
