"""Ignored labels, and the losses of the heads.

An ignored label is -100, or nan where labels are values; the losses know no other mask. Heads of
tokens and of forecasts set it at padding (:func:`without_padding`). The language model sets it at
first tokens alone: its caller sets it at padding. A regression of whole sequences ignores none.
Training and metrics count labels by :func:`ssmzoo.tasks.common.counted`, which must agree.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ssmzoo.modeling.inputs import named_indices
from ssmzoo.modeling.packing import Sequences

IGNORED = -100


def ignore(labels: Tensor, where: Tensor) -> Tensor:
    """Return labels that are ignored where ``where`` is true, which broadcasts to their shape."""
    return labels.masked_fill(where, math.nan if labels.is_floating_point() else IGNORED)


def without_padding(labels: Tensor, packing: Sequences | None) -> Tensor:
    """Return labels ``[B, L, ...]``, those of padding ignored."""
    real = None if packing is None else packing.mask(labels.shape[0])
    if real is None:
        return labels
    return ignore(labels, ~(real if labels.dim() == 2 else real.unsqueeze(2)))


def without_first_tokens(labels: Tensor, packing: Sequences) -> Tensor:
    """Return labels ``[B, L]``, those of sequences' first tokens ignored: nothing predicts them."""
    chosen = slice(-1) if packing.rows is None else packing.rows
    starts = packing.offsets[chosen]
    # one place more, because an empty last sequence starts behind the row's end
    longer = nn.functional.pad(labels.flatten(), (0, 1))
    return longer.index_fill(0, starts, IGNORED)[:-1].view_as(labels)


def squared_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error where ``wanted`` is not nan, 0 where all is."""
    exact = torch.promote_types(torch.float32, found.dtype)  # float16 overflows at such sums
    counts = ~wanted.isnan()
    error = torch.where(counts, found.to(exact) - wanted.nan_to_num().to(exact), 0)
    return error.square().sum() / counts.sum().clamp(min=1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of ``[..., V]`` and ``[...]``, in float32.

    Raises:
        ValueError: A label that is no class.
        TypeError: Labels of another type than int64.
    """
    with named_indices("labels", labels, logits.shape[-1], ignored=IGNORED):
        return nn.functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED
        )


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of the targets that count, in float32 or float64."""
    return nn.functional.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        targets.flatten().to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )


def loss_of_classes(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Return transformers' loss of a classifier of sequences, by ``config.problem_type``.

    Raises:
        ValueError: A label that is no class.
        TypeError: Labels of another type.
    """
    with named_indices("labels", labels, logits.shape[-1], ignored=IGNORED):
        return model.loss_function(
            logits=logits, labels=labels, pooled_logits=logits, config=model.config
        )


def next_token_loss(
    model: Any,
    values: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    packing: Sequences | None,
    items: Any,
    *,
    head: nn.Module | None = None,
) -> Tensor:
    """Return transformers' loss of a language model.

    Args:
        model: The model, whose ``loss_function`` shifts the labels.
        values: The logits ``[B, L, V]``; with ``head`` the hidden states ``[B, L, D]``.
        labels: The tokens ``[B, L]``.
        shift_labels: The token after each position, taken as it is in place of ``labels``.
        packing: Where the sequences lie.
        items: What the sum is divided by: the tokens of an optimizer's step, as Trainer counts
            them, or 1 for the sum; None: the mean.
        head: Makes the logits of a few tokens at a time (:func:`loss_without_logits`); None: they
            are given.

    Raises:
        ValueError: A label that is no token.
        TypeError: Labels of another type than int64.
    """
    if shift_labels is None:
        assert labels is not None
        given = labels
        if packing is not None:
            if packing.order is not None:  # nothing stands between a row's tokens
                values, labels = (packing.flat(x).view_as(x) for x in (values, labels))
            labels = without_first_tokens(labels, packing)
            if items is not None:  # Trainer counted first tokens, too
                counted, left = ((x[:, 1:] != IGNORED).sum().clamp(min=1) for x in (given, labels))
                items = items * left / counted
        read = "labels", labels[:, 1:]
    else:
        read = "shift_labels", shift_labels
    size = model.config.vocab_size if head is not None else values.shape[-1]
    with named_indices(*read, size, ignored=IGNORED):
        if head is not None:
            after = read[1]
            if shift_labels is None:
                after = nn.functional.pad(after, (0, 1), value=IGNORED)
            return loss_without_logits(head, values, after, size, items)
        more = {} if items is None else {"num_items_in_batch": items}
        return model.loss_function(
            logits=values,
            labels=labels,
            vocab_size=model.config.vocab_size,
            shift_labels=shift_labels,
            **more,
        )


_PIECE = 2**24  # logits that exist at a time, in float32 64 MiB; their gradients as many


def loss_without_logits(
    head: nn.Module, hidden: Tensor, targets: Tensor, classes: int, items: Any = None
) -> Tensor:
    """Return the cross-entropy of a head's logits in nats, of which few exist at a time.

    The gradients of a piece are taken as soon as its logits are there, and kept for backward: those
    of ``hidden`` and of the head's parameters. So nothing is computed twice.

    Args:
        head: Maps ``[M, D]`` to logits ``[M, V]``, a token at a time.
        hidden: ``[B, L, D]``.
        targets: ``[B, L]`` int64; -100 does not count.
        classes: V.
        items: What the sum is divided by; None: the number of targets that count.

    Raises:
        ValueError: The head computes with other parameters than its own.
    """
    rows, flat = hidden.flatten(0, -2), targets.flatten().to(hidden.device)
    length = max(1, _PIECE // classes)
    parameters = [p for p in head.parameters() if p.requires_grad]
    total = cast(Tensor, _PieceByPiece.apply(head, flat, length, rows, *parameters))
    return total / ((flat != IGNORED).sum() if items is None else items)


class _PieceByPiece(torch.autograd.Function):
    """The sum of cross-entropies, and its gradients, of so many tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, targets: Tensor, length: int, rows: Tensor, *weights: Tensor
    ) -> Tensor:
        exact = torch.promote_types(torch.float32, rows.dtype)
        total = rows.new_zeros((), dtype=exact)
        asked = any(ctx.needs_input_grad)
        ctx.of_rows = torch.zeros_like(rows)
        # the sums over pieces of low precision would lose small terms
        kinds = [torch.promote_types(torch.float32, weight.dtype) for weight in weights]
        ctx.of_weights = [
            torch.zeros_like(weight, dtype=kind)
            for weight, kind in zip(weights, kinds, strict=True)
        ]
        for begin in range(0, len(rows), length):
            place = slice(begin, begin + length)
            piece = rows[place].detach().requires_grad_(asked)
            with torch.set_grad_enabled(asked):
                logits = head(piece)
            scores = logits.detach().log_softmax(-1, dtype=exact)
            wanted = targets[place]
            total += nn.functional.nll_loss(scores, wanted, ignore_index=IGNORED, reduction="sum")
            if asked:
                # by the logits: softmax, less 1 at the target
                slope, counts = scores.exp_(), (wanted != IGNORED).to(exact).unsqueeze(1)
                slope.scatter_add_(1, wanted.clamp(min=0).unsqueeze(1), -counts).mul_(counts)
                slopes = torch.autograd.grad(
                    logits, [piece, *weights], slope.to(logits.dtype), allow_unused=True
                )
                if weights and all(slope is None for slope in slopes[1:]):
                    raise ValueError(
                        "skip_logits needs a head that computes with its own parameters, and "
                        "something replaces them in each call (FSDP, where it wraps the head "
                        "alone); wrap it with the model, or call with skip_logits=False"
                    )
                ctx.of_rows[place] = slopes[0]
                for kept, slope in zip(ctx.of_weights, slopes[1:], strict=True):
                    if slope is not None:
                        kept += slope
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        of_weights = [each * slope for each in ctx.of_weights]
        return None, None, None, (ctx.of_rows * slope).to(ctx.of_rows.dtype), *of_weights
