"""Eidetic attention by torch's ``flex_attention``: all keys in one row, hidden ones by arithmetic.

Memories, window and late keys are laid end to end. What a query sees of each is one interval of
that row, so that the mask is a few comparisons, which ``torch.compile`` writes into the loop over
the keys; nothing of size queries times keys is stored. A NaN among the keys or values of one
sequence can reach the others: torch multiplies what is hidden by a weight of zero.

Dimensions: K keys in the row, J streams.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from ssmzoo_kernels.dispatch import record
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.eidetic_attention.chunks import chunk_table

OP = "eidetic_attention"
_ON_CPU = (torch.float32, torch.float16, torch.bfloat16)


def eidetic_attention(tensors: Tensors, call: Call) -> Tensor:
    """Return the outputs ``[T, H, d]``.

    Raises:
        TypeError: On a CPU, tensors that torch does not take there.
        RuntimeError: Gradients on a CPU, or torch cannot compile.
    """
    _check(tensors)
    record(OP, "flex")
    q = tensors.q
    if not q.shape[0]:
        return q.clone()
    if not torch.is_grad_enabled():  # torch refuses what could need gradients, even here
        tensors = Tensors(*(None if x is None else x.detach() for x in tensors))  # pyright: ignore[reportArgumentType]
    keys, values, sees = _row(tensors, call)
    block_mask, attend = _compiled(q.device.type)
    turned = (x.transpose(0, 1).unsqueeze(0) for x in (tensors.q, keys, values))  # [1, H, T, d]
    try:
        mask = block_mask(sees, None, None, q.shape[0], keys.shape[0], device=q.device)
        out = attend(*turned, block_mask=mask, scale=call.scale, enable_gqa=True)
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f'{OP}(backend="flex") compiles for every dtype, head and kind of call, on a CPU for '
            f"every size too, and torch does so {config.recompile_limit} times in a process; raise "
            'torch._dynamo.config.recompile_limit, or use backend="eager"'
        ) from error
    except TorchDynamoException as error:
        raise RuntimeError(
            f'{OP}(backend="flex"): torch cannot compile flex_attention here; use '
            f'backend="eager" ({" ".join(str(error).split())[:300]})'
        ) from error
    return out.squeeze(0).transpose(0, 1)


def _check(tensors: Tensors) -> None:
    """Raise if torch's ``flex_attention`` does not take such tensors."""
    if tensors.q.device.type != "cpu":
        return
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(
            f'{OP}(backend="flex") has no backward on a CPU, and these tensors need gradients; '
            'call it under torch.no_grad(), or use backend="eager"'
        )
    if tensors.q.dtype not in _ON_CPU:
        raise TypeError(
            f'{OP}(backend="flex") on a CPU must have float32, float16 or bfloat16 tensors, got '
            f'{tensors.q.dtype}; use backend="eager"'
        )


@functools.cache
def _compiled(device: str) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # on a CPU what torch 2.13 writes for sizes that change is not valid C++; and without
    # fullgraph it would run uncompiled, all scores stored, once it has compiled too often
    options = {"fullgraph": True, "dynamic": False if device == "cpu" else None}
    return torch.compile(create_block_mask), torch.compile(flex_attention, **options)


def _row(tensors: Tensors, call: Call) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return keys and values ``[K, G, d]``, and which of them a query sees."""
    device = tensors.q.device
    token = torch.arange(tensors.q.shape[0], device=device)
    sequence = torch.searchsorted(call.offsets, token, right=True) - 1
    position = call.seen[sequence] + token - call.offsets[sequence]
    keys, values, bounds = [], [], []
    begin = memory = 0
    if tensors.mem_k is not None and tensors.mem_v is not None and call.mem_count is not None:
        counts = chunk_table(call.offsets.diff(), call.seen, call.window or 1).count
        chunks, rows = len(counts), tensors.mem_k.shape[1]
        memory = begin = chunks * rows
        held = call.mem_count[:chunks]
        # a value that is hidden meets a weight of zero, and zero times NaN is NaN
        empty = (torch.arange(rows, device=device) >= held[:, None])[..., None, None]
        for found, x in ((keys, tensors.mem_k), (values, tensors.mem_v)):
            found.append(x[:chunks].masked_fill(empty, 0.0).flatten(0, 1))
        chunk = torch.arange(chunks, device=device).repeat_interleave(counts)
        bounds.append((chunk * rows, chunk * rows + held[chunk]))
    t, window = tensors, call.window
    for reach, shift, k, v, past_k, past_v in (
        (window, 0, t.k, t.v, t.past_k, t.past_v),
        (call.late_span, window or 0, t.late_k, t.late_v, t.late_past_k, t.late_past_v),
    ):
        if k is None or v is None:
            continue
        kept = call.seen.clamp(max=0 if past_k is None else past_k.shape[1])
        keys += _joined(k, past_k, call, kept)
        values += _joined(v, past_v, call, kept)
        # where a sequence's position 0 would lie in the row
        zero = begin + call.offsets[:-1] + kept.cumsum(0) - call.seen
        newest = position - shift
        oldest = (call.seen - kept)[sequence]
        if reach is not None:
            oldest = oldest.maximum(newest - reach + 1)
        bounds.append((zero[sequence] + oldest, zero[sequence] + newest + 1))
        begin += k.shape[0] + int(kept.sum())
    first, last = (torch.stack(x) for x in zip(*bounds, strict=True))  # [J, T]

    def sees(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = (first[0, i] <= j) & (j < last[0, i])
        for stream in range(1, first.shape[0]):
            found = found | ((first[stream, i] <= j) & (j < last[stream, i]))
        return found

    if call.mem_positions is None or not memory:
        return torch.cat(keys), torch.cat(values), sees
    raw = position - (window or 0)  # the newest token that the window no longer holds
    at = raw.new_full((begin,), torch.iinfo(torch.int32).min)
    at[:memory] = call.mem_positions.flatten()[:memory]

    def sees_once(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sees(batch, head, i, j) & (at[j] <= raw[i])

    return torch.cat(keys), torch.cat(values), sees_once


def _joined(new: Tensor, past: Tensor | None, call: Call, kept: Tensor) -> Iterator[Tensor]:
    """Yield the rows of each sequence, those kept from before the call and those of it."""
    if past is None:
        yield new
        return
    offsets = call.offsets.tolist()
    for s, count in enumerate(kept.tolist()):
        yield past[s, past.shape[1] - count :]
        yield new[offsets[s] : offsets[s + 1]]
