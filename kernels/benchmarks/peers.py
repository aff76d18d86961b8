"""The ops' peers: the same work as one would write it in torch, or its core."""

import ctypes
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels import feedback_scan, linear_scan, native
from ssmzoo_kernels.feedback_scan import cpu as feedback_cpu
from ssmzoo_kernels.fft_conv.circle import good_size

Passes = dict[str, Callable[[], object]]
HEADS = 32  # at a time, where all would not fit


def bare_transforms(shape: tuple[int, ...], u: Tensor, kernel: Tensor) -> Passes:
    """Transform padded and transposed tensors as often as a convolution must.

    Nothing is moved, padded or multiplied. The backward transforms inputs and kernels again, as an
    op does that keeps no spectra.
    """
    batch, length, width, taps = shape
    size = good_size(length + taps - 1)
    places = torch.randn(batch, width, size, device=u.device)
    filters = torch.randn(width, size, device=u.device)
    spectrum, one = torch.fft.rfft(places), torch.fft.rfft(filters)

    def forward() -> None:
        torch.fft.rfft(filters)
        torch.fft.rfft(places)
        torch.fft.irfft(spectrum, n=size)

    def both() -> None:
        forward()
        forward()
        torch.fft.rfft(places)
        torch.fft.irfft(one, n=size)

    return {"fwd": forward, "fwd+bwd": both}


def bare_ratio_transforms(shape: tuple[int, ...], a: Tensor, b: Tensor) -> Passes:
    """Transform as often as a rational kernel on a grid must."""
    _, length, width, _ = shape
    kernel = torch.randn(width, length, device=a.device)
    spectrum = torch.fft.rfft(kernel)

    def forward() -> None:
        torch.fft.rfft(a.detach(), n=length)
        torch.fft.rfft(b.detach(), n=length)
        torch.fft.irfft(spectrum, n=length)

    def both() -> None:
        forward()
        forward()
        torch.fft.rfft(kernel)
        torch.fft.irfft(spectrum, n=length)

    return {"fwd": forward, "fwd+bwd": both}


def direct_exponentials(shape: tuple[int, ...], weight: Tensor, exponent: Tensor) -> Passes:
    """Sum one complex64 exponential per head, mode and position."""
    _, length, heads, _ = shape
    lags = torch.arange(length, device=weight.device)

    def both() -> None:
        for start in range(0, heads, HEADS):
            h = slice(start, start + HEADS)
            leaves = [weight[0, h].detach().requires_grad_(), exponent[h].detach().requires_grad_()]
            terms = torch.exp(leaves[1].to(torch.complex64)[..., None] * lags)
            kernel = torch.einsum("hn,hnl->hl", leaves[0], terms).real
            torch.autograd.grad(kernel, leaves, torch.ones_like(kernel))

    return {"fwd+bwd": both}


def linear_loop(shape: tuple[int, ...], a: Tensor, b: Tensor) -> Passes:
    """Run ``h = a h + b`` as one writes it in torch: a loop, and autograd."""
    grad = torch.randn(shape[:3], device=a.device)

    def both() -> None:
        h = linear_scan(a, b, backend="reference")[0]
        torch.autograd.grad(h, (a, b), grad)

    return {"fwd+bwd": both}


def doubling_scan(shape: tuple[int, ...], a: Tensor, b: Tensor) -> Passes:
    """Run ``h = a h + b`` with all tokens at once, in as many rounds as L has binary digits.

    The backward is the same from the other end, and not left to autograd.
    """
    grad = torch.randn(shape[:3], device=a.device)

    def scan(a: Tensor, b: Tensor) -> Tensor:
        reach = 1
        while reach < a.shape[1]:
            b = torch.cat([b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], dim=1)
            a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], dim=1)
            reach *= 2
        return b

    @torch.no_grad()
    def forward() -> Tensor:
        return scan(a, b)

    @torch.no_grad()
    def both() -> None:
        h = forward()
        later = torch.cat([a[:, 1:], torch.ones_like(a[:, :1])], dim=1)
        grad_b = scan(later.flip(1), grad.flip(1)).flip(1)
        F.pad(h[:, :-1], (0, 0, 1, 0)) * grad_b

    return {"fwd": forward, "fwd+bwd": both}


def torch_loop(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run COFFEE's recurrence in torch as a careful author writes it: a loop, and autograd."""
    grad = torch.randn(shape[:3], device=inputs[0].device)

    def both() -> None:
        y = feedback_scan(*inputs, backend="reference")[0]
        torch.autograd.grad(y, inputs, grad)

    return {"fwd+bwd": both}


def torch_norm(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Normalise by torch's own function: a tensor, or the sum of two."""
    *parts, weight = inputs
    grad = torch.randn_like(parts[0])

    def normed() -> Tensor:
        x = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    def forward() -> None:
        with torch.no_grad():
            normed()

    def both() -> None:
        torch.autograd.grad(normed(), inputs, grad)

    return {"fwd": forward, "fwd+bwd": both}


def indexing_loop(
    shape: tuple[int, ...], u: Tensor, lam: Tensor, w: Tensor, readout: Tensor
) -> Passes:
    """Run COFFEE's recurrence in torch as one writes it first, by ``u[:, t]``.

    Autograd answers every index with zeros of the size of ``u``, so that it is quadratic in L.
    """
    grad = torch.randn(shape[:3], device=u.device)

    def both() -> None:
        state = u.new_zeros(shape[0], *lam.shape)
        outputs = []
        for t in range(shape[1]):
            state = state + torch.sigmoid(w * state) * (lam * state + u[:, t, :, None])
            outputs.append((readout * state).sum(dim=-1))
        torch.autograd.grad(torch.stack(outputs, dim=1), (u, lam, w, readout), grad)

    return {"fwd+bwd": both}


def gates_alone(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Evaluate as many of COFFEE's gates as a pass must, and do nothing else, on a CPU.

    One exponential and one division a token and state, vectorised, in registers; a backward that
    stores no states evaluates them once more.
    """
    if inputs[0].device.type != "cpu":
        return {}
    count = math.prod(shape)
    out = torch.empty(8)

    def evaluate(times: int) -> None:
        _gates()(times * count, out.data_ptr(), torch.get_num_threads())

    return {"fwd": lambda: evaluate(1), "fwd+bwd": lambda: evaluate(2)}


@functools.cache
def _gates() -> Callable[..., None]:
    kernel = Path(feedback_cpu.__file__).with_name("feedback_scan.c").read_text("utf-8")
    alone = Path(__file__).with_name("gates.c").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "gates.c")
        source.write_text(kernel + alone, "utf-8")
        found = native.library(source, torch.float32, CHUNK=feedback_cpu.CHUNK).gates_alone
    found.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    found.restype = None
    return found


def masked_window(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Attend to a window of K tokens, no memory, in one call of torch's attention with a mask."""
    place = torch.arange(shape[1], device=inputs[0].device)
    behind = place[:, None] - place
    mask = (behind >= 0) & (behind < shape[3])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*turned, attn_mask=mask).transpose(1, 2)

    return _attention(attend, *inputs[:3])


def blocked_window(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Attend to a window of K tokens, no memory: blocks of K queries see their own and the last K.

    The fastest that torch's attention alone does on a CPU; L is a multiple of K.
    """
    batch, _, _, keys = shape
    query = torch.arange(keys, device=inputs[0].device)[:, None]
    key = torch.arange(-keys, keys, device=query.device)
    band = (key <= query) & (key > query - keys)
    first = band & (key >= 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = q.shape[1] // keys
        masks = torch.stack([first] + [band] * (blocks - 1)).repeat(batch, 1, 1)[:, None]
        q, k, v = (x.unflatten(1, (blocks, keys)) for x in (q, k, v))
        last = (torch.cat([x.new_zeros(x[:, :1].shape), x[:, :-1]], dim=1) for x in (k, v))
        both = [torch.cat(x, dim=2) for x in zip(last, (k, v), strict=True)]
        turned = (x.flatten(0, 1).transpose(1, 2) for x in (q, *both))
        out = F.scaled_dot_product_attention(*turned, attn_mask=masks)
        return out.transpose(1, 2).reshape(inputs[0].shape)

    return _attention(attend, *inputs[:3])


def _attention(attend: Callable[..., Tensor], *inputs: Tensor) -> Passes:
    grad = torch.randn_like(inputs[0])

    def alone() -> None:
        with torch.no_grad():
            attend(*inputs)

    def both() -> None:
        torch.autograd.grad(attend(*inputs), inputs, grad)

    return {"fwd": alone, "fwd+bwd": both}


class _ParallelScan(torch.autograd.Function):
    """``h[t] = a[t] h[t-1] + b[t]`` over coefficients in memory, in 2 log L sweeps.

    The work-efficient scan of mamba.py's ``pscan``, with its backward: the same scan from the end.
    """

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        h = b.clone()
        _sweep(a.clone(), h)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        decays = torch.zeros_like(a)
        decays[:, 1:] = a[:, 1:].flip(1)
        grad = grads[0].flip(1)
        _sweep(decays, grad)
        grad = grad.flip(1)
        grad_a = torch.zeros_like(a)
        grad_a[:, 1:] = grad[:, 1:] * h[:, :-1]
        return grad_a, grad


def _sweep(a: Tensor, b: Tensor) -> None:
    """Turn ``b`` into the states, and ``a`` into products, in place; lengths are powers of two."""
    length = a.shape[1]

    def join(earlier: slice, later: slice) -> None:
        b[:, later] += a[:, later] * b[:, earlier]
        a[:, later] *= a[:, earlier]

    reach = 1
    while reach < length:
        join(slice(reach - 1, None, 2 * reach), slice(2 * reach - 1, None, 2 * reach))
        reach *= 2
    reach = length // 4
    while reach >= 1:
        later = slice(3 * reach - 1, None, 2 * reach)
        join(slice(2 * reach - 1, length - reach, 2 * reach), later)
        reach //= 2


def materialised_scan(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run Mamba's recurrence as mamba.py does: coefficients ``[B, L, D, N]``, a parallel scan."""
    grad = torch.randn(shape[:3], device=inputs[0].device)

    def forward() -> Tensor:
        u, dt, A, B, C, D, z, bias = inputs
        delta = F.softplus(dt + bias).unsqueeze(-1)
        written = delta * B.unsqueeze(2) * u.unsqueeze(-1)
        h = _ParallelScan.apply(torch.exp(delta * A), written)
        return ((h @ C.unsqueeze(-1)).squeeze(-1) + D * u) * F.silu(z)  # type: ignore[operator]

    def alone() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        torch.autograd.grad(forward(), inputs, grad)

    return {"fwd": alone, "fwd+bwd": both}


def transformers_loop(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run Mamba's recurrence as transformers' ``MambaMixer`` does without other packages."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    grad = torch.randn(shape[:3], device=inputs[0].device).transpose(1, 2)

    def both() -> None:
        u, dt, A, B, C, D, z, bias = (x.mT if x.dim() == 3 else x for x in inputs)
        y = mamba_selective_scan(u, dt, A, B, C, D, z, bias, delta_softplus=True)
        torch.autograd.grad(y, inputs, grad)

    return {"fwd+bwd": both}


def transformers_gated_delta(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run the gated delta rule as transformers' Qwen3-Next does without other packages."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return _passes(lambda: torch_chunk_gated_delta_rule(*inputs)[0], inputs)


def transformers_step(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run one token of the gated delta rule as transformers' Qwen3-Next does, from a state."""
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_recurrent_gated_delta_rule,
    )

    call = torch.no_grad()(torch_recurrent_gated_delta_rule)
    return {"fwd": lambda: call(*inputs, output_final_state=True)}


def transformers_kda(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run KDA as transformers' Kimi Linear does without other packages."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return _passes(lambda: chunk_kimi_delta_attention(*inputs)[0], inputs)


def transformers_ssd(shape: tuple[int, ...], *inputs: Tensor) -> Passes:
    """Run SSD as transformers' Mamba2 does without other packages."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    q, k, v, rates, dt = inputs
    return _passes(lambda: mamba2_chunk_scan(v, dt, rates, k, q, 256), inputs)


def _passes(call: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Passes:
    """Return a forward alone, and one with its backward by autograd."""
    with torch.no_grad():
        grad = torch.randn_like(call())

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    return {"fwd": torch.no_grad()(call), "fwd+bwd": both}
