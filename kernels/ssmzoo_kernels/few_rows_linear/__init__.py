"""Linear maps for inference on a CPU: few rows, as in decoding, and many, as in prefill.

Matrix libraries are made for many rows; with a handful they reach a fraction of the memory's
bandwidth. Of many rows torch's choice takes twice the time of oneDNN on some CPUs, and eight times
for 16 bits that the CPU has no units for. No gradients. The one weight that a kernel of ours reads:
the caller is the layer that owns it, so adapters around that layer keep working.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad

from ssmzoo_kernels import dispatch, native
from ssmzoo_kernels.few_rows_linear import cpu

OP = "few_rows_linear"
MOST_ROWS = 8
TILE = 256  # outputs whose weights are widened at once, so that they are read from the cache
_WIDE = {  # by dtype, what sums are in
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def few_rows_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # [O, I]
    bias: Tensor | None = None,  # [O]
) -> Tensor:
    """Compute ``x @ weight.T + bias`` without gradients; the same as ``F.linear`` otherwise.

    Takes the C kernel where it is the faster one: on a CPU, at most ``MOST_ROWS`` rows, a kernel
    that can be built, neither tracing nor autocast; else ``F.linear``. With bfloat16 and float16,
    sums are float32. A weight may be torchao's int8 with a scale a row: see :func:`rows_of_int8`.

    Returns:
        ``[..., O]`` in x's dtype.
    """
    rows = None
    inputs = weight.shape[1]
    count = x.numel() // inputs if inputs else 0
    # dispatch.decodes_on_cpu, written out: a step of decoding asks for every linear map
    if not (
        not torch.is_grad_enabled()
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and peek_interpreter_stack() is None  # no torch.func transforms
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and 0 < count <= MOST_ROWS
        and x.dtype in _WIDE
        and x.dtype is weight.dtype
        and x.device.type == weight.device.type == "cpu"
        and x.shape[-1] == inputs
        and (
            (type(weight) in (Tensor, torch.nn.Parameter) and weight.is_contiguous())
            or (rows := rows_of_int8(weight)) is not None
        )
        and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous()))
        and not dispatch.kernel_missing(OP, _WIDE[x.dtype])
    ):
        return F.linear(x, weight, bias)
    dispatch.record(OP, "cpu")
    kind, scale = x.dtype, None
    number = cpu.HALVES.get(kind, 0)
    if rows is not None:
        weight, scale = rows
        number = cpu.INT8
    if kind in cpu.HALVES:
        x, bias = x.float(), None if bias is None else bias.float()
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="cpu")
    cpu.load(x.dtype)(
        x.data_ptr(),
        weight.data_ptr(),
        number,
        None if scale is None else scale.data_ptr(),
        0 if scale is None else cpu.HALVES.get(scale.dtype, 0),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        count,
        inputs,
        weight.shape[0],
        torch.get_num_threads() if weight.numel() > native.ONE_THREADS_WORK else 1,
    )
    return y if y.dtype is kind else y.to(kind)


def many_rows_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # [O, I]
    bias: Tensor | None = None,  # [O]
) -> Tensor:
    """Compute ``x @ weight.T + bias`` without gradients, the same as ``F.linear``.

    On a CPU float32 is multiplied by oneDNN. 16-bit numbers for which the CPU has no units are
    widened to float32, the weight tile by tile, and rounded once at the end; so is torchao's int8
    with a scale a row (:func:`rows_of_int8`) beside such numbers or float32. All else is
    ``F.linear``.

    Returns:
        ``[..., O]`` in x's dtype.
    """
    scale = None
    if (
        _WIDE.get(x.dtype) is not torch.float32
        or (x.dtype in cpu.HALVES and _multiplies(x.dtype))
        or not dispatch.decodes_on_cpu(x)
        or weight.device.type != "cpu"
        or x.dtype is not weight.dtype
        or (bias is not None and bias.dtype is not x.dtype)
        or x.shape[-1] != weight.shape[1]
        or x.numel() == 0
    ):
        return F.linear(x, weight, bias)
    if type(weight) not in (Tensor, torch.nn.Parameter):
        rows = rows_of_int8(weight)
        if rows is None:
            return F.linear(x, weight, bias)
        weight, scale = rows[0], rows[1].flatten()
    elif x.dtype is torch.float32:
        return _product(x, weight, bias)
    wide, y = x.float(), x.new_empty((*x.shape[:-1], weight.shape[0]))
    for first in range(0, weight.shape[0], TILE):
        part = slice(first, first + TILE)
        some = _product(wide, weight[part].float())
        if scale is not None:
            some *= scale[part]
        if bias is not None:
            some += bias[part]
        y[..., part] = some
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in float32, by oneDNN where torch would take MKL.

    On an AMD EPYC with vectors of 64 bytes MKL takes twice the time.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return F.linear(x, weight, bias)
    if not torch.backends.mkldnn.enabled or not weight.numel():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _multiplies(kind: torch.dtype) -> bool:
    """Tell whether torch multiplies matrices of a 16-bit dtype by this CPU's own units."""
    if not torch.backends.mkldnn.is_available():
        return False
    if kind is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def rows_of_int8(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Return what torchao's weight ``[O, I]`` is made of, None if it is of another kind.

    ``weight ~ scale q`` with q int8 and a scale a row, symmetric: of every row the greatest number
    becomes 127, so an entry is off by at most a 254th of that.

    Returns:
        q ``[O, I]`` and the scales, O of them; both contiguous.
    """
    if type(weight).__name__ != "Int8Tensor":
        return None
    q, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    zero = getattr(weight, "zero_point", None)
    others = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    if (
        type(q) is not Tensor
        or type(scale) is not Tensor
        or q.dtype is not torch.int8
        or q.dim() != 2
        or scale.numel() != q.shape[0]
        or scale.dtype not in (_WIDE[weight.dtype], *cpu.HALVES)
        or not (q.is_contiguous() and scale.is_contiguous())
        or any(getattr(weight, name, None) is not None for name in others)
        or (zero is not None and bool(zero.any()))
    ):
        return None
    return q, scale


__all__ = ["MOST_ROWS", "few_rows_linear", "many_rows_linear", "rows_of_int8"]
