"""Eidetic attention in torch: a few dense products for many chunks at once, bounded in memory.

Queries are taken some thousands at a time, in blocks of a chunk each, and read their keys in
streams: the window, the late keys, the memory. A stream is one batch of plain attention, on views
where the sequences lie regularly and on gathered rows where they do not. It leaves its outputs and
the logarithms of its sums, by which the streams are merged. The backward runs each stream's own
backward on what was merged: that is the gradient of the joint softmax (README).

On a CPU a stream is torch's fused attention, elsewhere products and a softmax.

Dimensions: N blocks at once, M queries of each, K keys of each.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.eidetic_attention.plan import Plan, Stream
from ssmzoo_kernels.eidetic_attention.rows import Gathered

Part = tuple[Tensor, Tensor]  # outputs [N, M, H, d] and log sums [N, M, H]

SCORES = 1 << 24  # at a time, where they are written out

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(tensors: Tensors, call: Call) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, H, d]`` and the logarithms of sums ``[T, H]``."""
    tensors = _dense(tensors)
    out = tensors.q.new_empty(tensors.q.shape)
    lse = tensors.q.new_empty(tensors.q.shape[:2], dtype=accumulator(tensors.q))
    plan = Plan(tensors, call)
    for work in plan.works():
        q = work.queries.take(tensors.q)
        parts = []
        for stream in work.streams:
            parts.append(attend(q, *plan.read(stream), stream, call.scale))
        found, total = functools.reduce(merge, parts)
        work.queries.put(found, out)
        work.queries.put(total, lse)
    return out, lse


def backward(
    grad_out: Tensor,  # [T, H, d]
    out: Tensor,
    lse: Tensor,  # [T, H]
    tensors: Tensors,
    call: Call,
) -> Tensors:
    """Return the gradients of ``forward``'s tensors, None where one was absent."""
    tensors = _dense(tensors)
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    plan = Plan(tensors, call)
    exact = lse.dtype
    grad_q = tensors.q.new_empty(tensors.q.shape)
    grads = {
        name: [x.new_zeros(x.shape, dtype=exact) for x in pair]
        for name, pair in plan.tables.items()
    }
    for work in plan.works():
        queries = work.queries
        q, o, g, total = (queries.take(x) for x in (tensors.q, out, grad_out, lse))
        if isinstance(queries, Gathered):  # what is no query of its own: no weight, no gradient
            g, total = queries.fill_outside(g, 0.0), queries.fill_outside(total, torch.inf)
        own = torch.zeros_like(q, dtype=exact)
        for stream in work.streams:
            read = plan.read(stream)
            change, *found = attend_backward(g, o, total, q, *read, stream, call.scale)
            own += change
            begin = 0
            for table, rows in stream.parts:
                for part, grad in zip(found, grads[table], strict=True):
                    rows.add(part[:, begin : begin + rows.width], grad)
                begin += rows.width
        queries.put(own, grad_q)
    return plan.gradients(grad_q, grads)


def merge(one: Part, other: Part) -> Part:
    """Return what one softmax over the keys of two streams gives; no query of ``one`` is blind."""
    (found, total), (part, log_sum) = one, other
    share = torch.sigmoid(log_sum - total).unsqueeze(-1)
    merged = torch.lerp(found.to(share.dtype), part.to(share.dtype), share)
    return merged, torch.logaddexp(total, log_sum)


# --- one stream -------------------------------------------------------------------------------


def attend(
    q: Tensor,  # [N, M, H, d]
    k: Tensor,  # [N, K, G, d]
    v: Tensor,
    stream: Stream,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[N, M, H, d]`` and log sums ``[N, M, H]``; minus infinity for blind ones."""
    mask = stream.mask
    if _has_fused(q):
        bias = None if mask is None else mask.bias
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _fused(*turned, 0.0, stream.causal, attn_mask=bias, scale=scale)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        if mask is not None and mask.blind is not None:
            lse = lse.masked_fill(mask.blind, -torch.inf)
        return out, lse
    exact = accumulator(q)
    out, lse = torch.empty_like(q, dtype=exact), q.new_empty(q.shape[:3], dtype=exact)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _slices(q, k):
            scores = _scores(q, k, stream, rows, scale)  # [N, G, R, M, K]
            total = scores.logsumexp(dim=-1, keepdim=True)
            weights = torch.exp(scores - total.masked_fill(total.isneginf(), 0.0))
            out[:, rows] = torch.einsum("ngrmk,nkgd->nmgrd", weights, v.to(exact)).flatten(2, 3)
            lse[:, rows] = total.squeeze(-1).flatten(1, 2).transpose(1, 2)
    return out, lse


def attend_backward(
    grad: Tensor,  # [N, M, H, d]
    out: Tensor,
    lse: Tensor,  # [N, M, H]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stream: Stream,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a stream adds to the gradients of q, k and v; ``out``, ``lse`` are the merged."""
    if _has_fused(q):
        bias = None if stream.mask is None else stream.mask.bias
        turned = (x.transpose(1, 2) for x in (grad, q, k, v, out, lse))
        found = _fused_backward(*turned, 0.0, stream.causal, attn_mask=bias, scale=scale)
        return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)
    exact, groups = accumulator(q), k.shape[2]
    grad_q = torch.empty_like(q, dtype=exact)
    grad_k, grad_v = (torch.zeros_like(x, dtype=exact) for x in (k, v))
    k, v = k.to(exact), v.to(exact)
    with torch.autocast(q.device.type, enabled=False):
        for rows in _slices(q, k):
            one, g, o = (x[:, rows].to(exact).unflatten(2, (groups, -1)) for x in (q, grad, out))
            total = lse[:, rows].unflatten(2, (groups, -1)).permute(0, 2, 3, 1).unsqueeze(-1)
            weights = torch.exp(_scores(q, k, stream, rows, scale) - total)  # [N, G, R, M, K]
            grad_v += torch.einsum("ngrmk,nmgrd->nkgd", weights, g)
            change = torch.einsum("nmgrd,nkgd->ngrmk", g, v)
            change -= (g * o).sum(dim=-1).permute(0, 2, 3, 1).unsqueeze(-1)
            change *= weights * scale
            grad_q[:, rows] = torch.einsum("ngrmk,nkgd->nmgrd", change, k).flatten(2, 3)
            grad_k += torch.einsum("ngrmk,nmgrd->nkgd", change, one)
    return grad_q, grad_k, grad_v


def _dense(tensors: Tensors) -> Tensors:
    """Return the tensors with their last dimensions each in one piece."""
    apart = {
        name: x.contiguous()
        for name, x in zip(Tensors._fields, tensors, strict=True)
        if x is not None and x.stride(-1) != 1
    }
    return tensors._replace(**apart)


def _has_fused(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Cut the queries so that few scores exist at once."""
    step = max(1, SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
    return (slice(i, i + step) for i in range(0, q.shape[1], step))


def _scores(q: Tensor, k: Tensor, stream: Stream, rows: slice, scale: float) -> Tensor:
    """Return the scores ``[N, G, R, M, K]`` of some queries, minus infinity for hidden keys."""
    exact = accumulator(q)
    q = q[:, rows].to(exact).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("nmgrd,nkgd->ngrmk", q, k.to(exact)) * scale
    if stream.causal:
        place = torch.arange(k.shape[1], device=k.device)
        scores = scores.masked_fill(place > place[rows, None], -torch.inf)
    if stream.mask is not None:
        bias = stream.mask.bias
        cut = bias[..., rows, :] if bias.shape[-2] > 1 else bias
        scores = scores + (cut if cut.dim() == 2 else cut.unsqueeze(2))
    return scores
