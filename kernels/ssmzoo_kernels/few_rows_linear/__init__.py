"""Linear maps on a CPU: few rows, as in decoding, and many, where torch leaves the CPU idle.

Matrix libraries are made for many rows; with a handful they reach a fraction of the memory's
bandwidth. Where a CPU has no units for 16 bits, they multiply many rows of them at a quarter of
float32's speed; and MKL leaves half of the vectors of an AMD CPU with AVX-512 unused. Gradients
have many rows of float32 and float64 alone. The one weight that a kernel of ours reads: the caller
is the layer that owns it, so adapters around that layer keep working.
"""

import functools
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ssmzoo_kernels import dispatch, native
from ssmzoo_kernels.few_rows_linear import cpu
from ssmzoo_kernels.validation import innermost_transform

OP = "few_rows_linear"
dispatch.c_kernels[OP] = lambda: cpu
MOST_ROWS = 64  # which few_rows_linear takes; more are a matter of arithmetic
TOO_FEW = 8  # rows for which many_rows_linear does not pack a weight
MUCH_WORK = 2**21  # products of numbers; with fewer the call of a kernel for many rows costs more
TILE = 256  # outputs whose weights are widened at once, so that they are read from the cache
_REALS = (torch.float32, torch.float64)
_WIDE = {  # by dtype, the dtype of sums
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
    that can be built and that ``use_backend`` allows, neither tracing nor autocast; else
    ``F.linear``. With bfloat16 and float16, sums are float32. A weight may be torchao's of 8 or 4
    bits: see :func:`few_bits`.

    Returns:
        ``[..., O]`` in x's dtype.
    """
    bits = None
    inputs = weight.shape[-1]
    count = x.numel() // inputs if inputs else 0
    # dispatch.decodes_on_cpu and takes_kernels, written out: a step asks for every linear map
    if not (
        not torch.is_grad_enabled()
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and innermost_transform() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and dispatch.forced_backend.get() in dispatch.WITH_C
        and 0 < count <= MOST_ROWS
        and x.dtype in _WIDE
        and x.dtype is weight.dtype
        and x.layout is weight.layout is torch.strided
        and not x.is_neg()  # weights are not either
        and x.device.type == weight.device.type == "cpu"
        and x.shape[-1] == inputs
        and weight.dim() == 2
        and (
            (type(weight) in (Tensor, torch.nn.Parameter) and weight.is_contiguous())
            or (bits := few_bits(weight)) is not None
        )
        and (
            bias is None
            or (
                type(bias) in (Tensor, torch.nn.Parameter)
                and bias.dtype is x.dtype
                and bias.is_cpu
                and bias.shape == weight.shape[:1]
                and bias.is_contiguous()
            )
        )
        and not dispatch.kernel_missing(OP, _WIDE[x.dtype])
    ):
        return F.linear(x, weight, bias)
    dispatch.record(OP, "cpu")
    kind, scale = x.dtype, None
    number = cpu.HALVES.get(kind, 0)
    outputs = weight.shape[0]
    if bits is not None:
        weight, scale = bits
        number = cpu.FEW_BITS[weight.dtype]
    if kind in cpu.HALVES:
        x, bias = x.float(), None if bias is None else bias.float()
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device="cpu")
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
        outputs,
        torch.get_num_threads() if weight.numel() > native.ONE_THREADS_WORK else 1,
    )
    return y if y.dtype is kind else y.to(kind)


def many_rows_linear(
    x: Tensor,  # [..., I]
    weight: Tensor,  # [O, I]
    bias: Tensor | None = None,  # [O]
) -> Tensor:
    """Compute ``x @ weight.T + bias``, the same as ``F.linear``.

    float32 and float64, with gradients of any order, by a C kernel where torch's own is half as
    fast (MKL on AMD's CPUs with AVX-512). Without gradients, 16-bit numbers for which the CPU has
    no units are widened to float32, the weight tile by tile, and rounded once at the end; so are
    torchao's 8 or 4 bits (:func:`few_bits`) beside such numbers or float32. All else, and anywhere
    but on a CPU, by ``F.linear``.

    Returns:
        ``[..., O]`` in x's dtype.
    """
    if (
        x.device.type == "cpu"
        and x.dtype in _REALS
        and cpu.outruns_torch()
        and _takes_product(x, weight, bias)
    ):
        dispatch.record("many_rows_linear", "cpu")
        y = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
        y = y.view(*x.shape[:-1], weight.shape[0])  # pyright: ignore[reportOptionalMemberAccess]
        return y if bias is None else y + bias
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    if (
        _WIDE.get(x.dtype) is not torch.float32
        or (plain and x.dtype is torch.float32)
        or (x.dtype in cpu.HALVES and _multiplies(x.dtype))
        or not dispatch.decodes_on_cpu(x)
        or not dispatch.takes_kernels()
        or weight.device.type != "cpu"
        or x.dtype is not weight.dtype
        or (bias is not None and bias.dtype is not x.dtype)
        or x.shape[-1] != weight.shape[1]
        or x.numel() == 0
    ):
        return F.linear(x, weight, bias)
    scale = None
    if not plain:
        if few_bits(weight) is None:
            return F.linear(x, weight, bias)
        bits: Any = weight
        weight, scale = bits.qdata, bits.scale.view(weight.shape[0], -1)
    wide, y = x.float(), x.new_empty((*x.shape[:-1], weight.shape[0]))
    multiply = F.linear
    if cpu.outruns_torch() and not dispatch.kernel_missing(OP, torch.float32, "many"):
        wide, multiply = wide.reshape(-1, wide.shape[-1]), cpu.multiply
    for first in range(0, weight.shape[0], TILE):
        part = slice(first, first + TILE)
        tile = weight[part].float()
        if scale is not None and scale.shape[1] > 1:
            tile.view(*scale[part].shape, -1).mul_(scale[part].unsqueeze(2))
        some = multiply(wide, tile).view(*x.shape[:-1], -1)
        if scale is not None and scale.shape[1] == 1:
            some *= scale[part, 0]
        if bias is not None:
            some += bias[part]
        y[..., part] = some
    return y


def _takes_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.numel() > TOO_FEW * x.shape[-1]
        and x.dtype is weight.dtype
        and weight.device.type == "cpu"
        and type(weight) in (Tensor, torch.nn.Parameter)
        and x.layout is weight.layout is torch.strided
        and weight.dim() == 2
        and weight.shape[0] > 0
        and weight.shape[1] == x.shape[-1]
        and (bias is None or bias.dtype is x.dtype)
        and dispatch.is_plain(x)
        and not torch.is_autocast_enabled("cpu")
        and dispatch.takes_kernels()
        and not dispatch.kernel_missing(OP, x.dtype, "many")
    )


class _Product(torch.autograd.Function):
    """``x @ weight.T`` of ``[M, K]`` and ``[N, K]``, whose gradients are such products, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return cpu.multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, Any]:
        x, weight = ctx.saved_tensors
        # torch.func may map over gradients
        multiply = _Product.apply if dispatch.is_plain(grad) else F.linear
        of_x, of_weight = ctx.needs_input_grad
        return (
            multiply(grad, weight.T) if of_x else None,
            multiply(grad.T, x.T) if of_weight else None,
        )


@functools.cache
def _multiplies(kind: torch.dtype) -> bool:
    """Tell whether torch multiplies matrices of a 16-bit dtype by this CPU's own units."""
    if not torch.backends.mkldnn.is_available():
        return False
    if kind is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


_OF_ACTIVATIONS = (
    "act_quant_kwargs",
    "act_quant_scale",
    "act_pre_scale",
    "activation_quantization",
)
PARTS_OF_FEW_BITS = ("qdata", "scale", "zero_point", *_OF_ACTIVATIONS)  # that few_bits looks at


def few_bits(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Return torchao's weight ``[O, I]`` as the kernels read it, None if it is of another kind.

    ``weight ~ scale q``, symmetric, of its ``Int8Tensor`` with a scale a row or of its
    ``IntxUnpackedToInt8Tensor`` of four bits with a scale a row or for groups of 32 inputs or more.
    An entry is off by half its scale: of 8 bits a 254th of its row's greatest number, of 4 bits a
    15th of its group's. The kernel for few rows rounds each input to 16 bits, by at most a 65,278th
    of the largest of its 256 (8 bits) or 32 (4 bits); llama.cpp rounds inputs to 8 bits. float64
    is left to torchao.

    Returns:
        q as int8 ``[O, I]`` and O scales; or, as few_bits.h says, four packed to an int16 and
        float32 scales for 32 inputs each, of which the same object is returned until they change as
        autograd sees it (not by ``.data``). All contiguous; behind the O rows of what is packed lie
        others up to a multiple of 64, which C reads.
    """
    kind = type(weight).__name__
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return None
    q, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    zero: Any = getattr(weight, "zero_point", None)
    if (
        type(q) is not Tensor
        or type(scale) is not Tensor
        or q.dtype is not torch.int8
        or q.dim() != 2
        or q.device.type != "cpu"
        or weight.dtype is torch.float64
        or not (q.is_contiguous() and scale.is_contiguous())
        or any(getattr(weight, name, None) is not None for name in _OF_ACTIVATIONS)
    ):
        return None
    if kind == "IntxUnpackedToInt8Tensor":
        return _packed(q, weight, scale, zero)
    if (
        scale.numel() != q.shape[0]
        or scale.dtype not in (_WIDE[weight.dtype], *cpu.HALVES)
        or (zero is not None and bool(zero.any()))
    ):
        return None
    return q, scale


class _Packed(NamedTuple):
    versions: list[int]  # of q and what belongs to it
    parts: list[Tensor]  # scale and zero point
    found: tuple[Tensor, Tensor] | None


_packed_weights: Any = WeakTensorKeyDictionary()  # by q


def _packed(q: Tensor, weight: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack q as few_bits.h reads four bits; None if it has others, or scales for other groups."""
    known = _packed_weights.get(q)
    try:  # torchao writes into q and scale below autograd, which counts for the weight alone
        versions = [x._version for x in (weight, q, *parts)]
    except RuntimeError:  # of inference tensors nobody counts
        return None
    if (
        known is None
        or known.versions != versions
        or not all(map(operator.is_, known.parts, parts))
    ):
        known = _packed_weights[q] = _Packed(versions, [*parts], _pack(q, *parts))
    return known.found


def _pack(q: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor] | None:
    outputs, inputs = q.shape
    groups = scale.shape[-1]
    each = inputs // groups if groups else 0
    if (
        dispatch.kernel_missing(OP, torch.float32)
        or not q.numel()
        or scale.shape != (outputs, groups)
        or (each % cpu.GROUP and groups > 1)
        or not -8 <= int(q.min()) <= int(q.max()) <= 7
        or bool(zero.any())
    ):
        return None
    added = -outputs % 64, -inputs % cpu.GROUP  # to whole blocks
    q = F.pad(q.to(torch.int32), (0, added[1], 0, added[0])) + 8
    nibbles = q.view(-1, 4, 16, q.shape[1] // 2, 2).permute(1, 0, 3, 2, 4)
    places = torch.arange(0, 16, 4, dtype=torch.int32).view(4, 1, 1, 1, 1)
    packed = (nibbles << places).sum(0, dtype=torch.int32).to(torch.int16)
    scales = scale.float().repeat_interleave(-(-each // cpu.GROUP), dim=1)
    scales = F.pad(scales, (0, 0, 0, added[0])).view(-1, 4, 16, scales.shape[1]).permute(0, 3, 1, 2)
    scales = scales.contiguous()
    scales[:, :, 1] /= 16
    return packed.reshape(len(q), -1)[:outputs], scales.view(len(q), -1)[:outputs]


__all__ = [
    "MOST_ROWS",
    "MUCH_WORK",
    "PARTS_OF_FEW_BITS",
    "few_bits",
    "few_rows_linear",
    "many_rows_linear",
]
