"""Ignored labels, and the losses of the heads.

An ignored label is -100, or nan where labels are values. Padding gets that label, and so does a
token that nothing predicts; the losses know no other mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

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
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


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
    logits: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    packing: Sequences | None,
    items: Any,
) -> Tensor:
    """Return transformers' loss of a language model.

    Args:
        model: The model, whose ``loss_function`` shifts the labels.
        logits: ``[B, L, V]``.
        labels: The tokens ``[B, L]``.
        shift_labels: The token after each position, taken as it is in place of ``labels``.
        packing: Where the sequences lie.
        items: Tokens of all calls of an optimizer's step, as Trainer counts them, or None.

    Raises:
        ValueError: A label that is no token.
        TypeError: Labels of another type than int64.
    """
    if shift_labels is None:
        assert labels is not None
        given = labels
        if packing is not None:
            if packing.order is not None:  # move padding from between a row's tokens behind them
                logits, labels = (packing.flat(x).view_as(x) for x in (logits, labels))
            labels = without_first_tokens(labels, packing)
            if items is not None:  # Trainer has counted first tokens
                counted, left = ((x[:, 1:] != IGNORED).sum().clamp(min=1) for x in (given, labels))
                items = items * left / counted
        read = "labels", labels[:, 1:]
    else:
        read = "shift_labels", shift_labels
    more = {} if items is None else {"num_items_in_batch": items}
    with named_indices(*read, logits.shape[-1], ignored=IGNORED):
        return model.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=model.config.vocab_size,
            shift_labels=shift_labels,
            **more,
        )
