"""The zoo's first promise: five equal forms, in logits and in gradients.

The judge is each sequence run alone, in one piece, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from ssmzoo.modeling import SSMForCausalLM
from ssmzoo.testing.subject import (
    BUDGETS,
    FLOAT32_LOSS,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    probe,
    require,
)

LENGTHS = (13, 8, 1, 5)  # of the rows of a ragged batch
MORE = 3  # tokens after the prompt


def alone(model: SSMForCausalLM, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits ``[L, V]`` of every row, run alone and whole."""
    return [model(row[None], use_cache=False).logits[0] for row in rows]


def check_oracle(subject: Subject) -> Measured:
    """The model computes what its paper says: the oracle's logits."""
    if subject.oracle is None:
        raise NotApplicable("no oracle was given")
    model, ids = subject.model(), subject.ids(2, 17)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = torch.as_tensor(subject.oracle(weights, model.config.to_dict(), ids.numpy()))
    measured = Measured()
    for dtype, budget in BUDGETS.items():
        with torch.no_grad():
            logits = subject.model(dtype)(ids).logits
        measured.compare(f"{dtype} logits", logits, expected, budget)
    return measured


def check_chunks(subject: Subject) -> Measured:
    """Chunks with a carried cache equal one pass, gradients through the cache included."""
    measured = _in_pieces(subject, [5, 1, 4, 3])
    # longer than what kernels and mixers cut a sequence into
    model, ids = subject.model(), subject.ids(1, 128)
    with torch.no_grad():
        got, whole = _carried(model, ids, [57, 1, 70]), model(ids, use_cache=False).logits
    measured.compare("long: logits", got, whole, BUDGETS[torch.float64])
    return measured


def check_tokens(subject: Subject) -> Measured:
    """Token by token equals one pass, gradients through the cache included."""
    return _in_pieces(subject, [1] * 13)


def check_padding(subject: Subject) -> Measured:
    """Padding changes nothing, neither in a ragged batch nor when its cache goes on."""
    measured = Measured()
    rows = [subject.ids(1, length + MORE, seed=length)[0] for length in LENGTHS]
    for dtype in BUDGETS:
        model = subject.model(dtype)
        expected = alone(model, rows)
        for side in ("left", "right"):
            ids, mask = _padded(subject, rows, side)
            first = model(ids[:, :-MORE], attention_mask=mask[:, :-MORE], use_cache=True)
            parts = first.logits[mask[:, :-MORE].bool()].split(LENGTHS)
            later = model(
                ids[:, -MORE:],
                attention_mask=mask if side == "left" else None,
                past_key_values=first.past_key_values,
            ).logits
            got = [torch.cat(pair) for pair in zip(parts, later, strict=True)]
            _compare(measured, model, f"{dtype} {side} padding:", got, expected)
    return measured


def check_packing(subject: Subject) -> Measured:
    """Sequences packed into one row do not see each other, however the row says where they end."""
    measured = Measured()
    rows = [subject.ids(1, length, seed=length)[0] for length in LENGTHS]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = torch.cat(rows)[None]
    for dtype in BUDGETS:
        model = subject.model(dtype)
        expected = alone(model, rows)
        got = model(packed, cu_seqlens=ends.int()).logits[0].split(LENGTHS)
        _compare(measured, model, f"{dtype} cu_seqlens:", got, expected)

        longer = [subject.ids(1, length + MORE, seed=length)[0] for length in LENGTHS]
        heads = torch.cat([row[:-MORE] for row in longer])[None]
        first = model(heads, cu_seqlens=ends, use_cache=True)
        tails = torch.stack([row[-MORE:] for row in longer])
        later = model(tails, past_key_values=first.past_key_values).logits
        parts = first.logits[0].split(LENGTHS)
        got = [torch.cat(pair) for pair in zip(parts, later, strict=True)]
        _compare(measured, model, f"{dtype} packed prompts, then", got, alone(model, longer))
    return measured


def check_flattening_collator(subject: Subject) -> Measured:
    """Batches of transformers' flattening collator give the documents' logits and loss."""
    measured = Measured()
    rows = [subject.ids(1, length, seed=length)[0] for length in LENGTHS]
    kinds = {
        "position_ids": {},
        "cu_seq_lens_q": {"return_position_ids": False, "return_flash_attn_kwargs": True},
        "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
        "all three": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    }
    model = subject.model()
    expected = alone(model, rows)
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum")
        for logits, row in zip(expected, rows, strict=True)
        if len(row) > 1
    ]
    loss = torch.stack(losses).sum() / sum(length - 1 for length in LENGTHS)
    for name, options in kinds.items():
        batch = DataCollatorWithFlattening(**options)([{"input_ids": row} for row in rows])
        for plain in (False, True):
            if plain:  # labels that do not mark where documents begin
                batch["labels"] = batch["input_ids"]
            output = model(**batch)
            # transformers takes the loss of float32 logits, whatever the model's dtype
            measured.compare(f"{name}: loss", output.loss, loss, FLOAT32_LOSS)
        _compare(measured, model, f"{name}:", output.logits[0].split(LENGTHS), expected)
    return measured


def check_causality(subject: Subject) -> Measured:
    """Tokens change nothing before them, and something after."""
    measured = Measured()
    model, ids, cut = subject.model(), subject.ids(2, 14), 6
    changed = ids.clone()
    changed[:, cut:] = (ids[:, cut:] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    budget = BUDGETS[torch.float64]
    measured.compare("logits before a changed token", after[:, :cut], before[:, :cut], budget)

    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits[:, cut]
    (slope,) = torch.autograd.grad((logits * probe(logits)).sum(), embeds)
    size = slope.abs().amax(dim=(0, 2))  # [L]
    leak = size[cut + 1 :] / size.max()
    measured.compare("gradient from later tokens", 1 + leak, torch.ones_like(leak), budget)
    require(bool((size[: cut + 1] > 0).all()), "the output does not depend on every token before")
    return measured


def check_batch(subject: Subject) -> Measured:
    """A row's logits depend neither on the other rows nor on its place among them."""
    measured = Measured()
    ids, order = subject.ids(4, 11), torch.tensor([2, 0, 3, 1])
    for dtype, budget in BUDGETS.items():
        model = subject.model(dtype)
        with torch.no_grad():
            together, mixed = model(ids).logits, model(ids[order]).logits
            single = torch.cat([model(row[None]).logits for row in ids])
        measured.compare(f"{dtype} rows in another order", mixed, together[order], budget)
        measured.compare(f"{dtype} rows one by one", single, together, budget)
    return measured


def _in_pieces(subject: Subject, sizes: list[int]) -> Measured:
    measured = Measured()
    ids = subject.ids(2, sum(sizes))
    for dtype in BUDGETS:
        model = subject.model(dtype)
        got, expected = _carried(model, ids, sizes), model(ids, use_cache=False).logits
        _compare(measured, model, f"{dtype}", got, expected)
    return measured


def _carried(model: SSMForCausalLM, ids: Tensor, sizes: list[int]) -> Tensor:
    """Return the logits ``[B, L, V]`` of pieces read one after the other with a cache."""
    cache, parts, seen = None, [], 0
    for piece in ids.split(sizes, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
        seen += piece.shape[1]
        require(
            cache.get_seq_length() == seen,
            f"the cache counts {cache.get_seq_length()} tokens instead of {seen}",
        )
    return torch.cat(parts, dim=1)


def _padded(subject: Subject, rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Pad the prompts (all but the last ``MORE`` tokens) with tokens that are not all alike."""
    widest = max(len(row) for row in rows)
    ids, mask = subject.ids(len(rows), widest, seed=99), torch.zeros(len(rows), widest).long()
    for i, row in enumerate(rows):
        prompt = len(row) - MORE
        start = widest - len(row) if side == "left" else 0
        ids[i, start : start + prompt], mask[i, start : start + prompt] = row[:-MORE], 1
        ids[i, -MORE:], mask[i, -MORE:] = row[-MORE:], 1
    return ids, mask


def _compare(
    measured: Measured,
    model: SSMForCausalLM,
    what: str,
    got: Tensor | Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
) -> None:
    """Compare logits and the gradient that a loss of all of them gives every parameter."""
    got, expected = (x if isinstance(x, Tensor) else torch.cat(list(x)) for x in (got, expected))
    budget = BUDGETS[expected.dtype]
    measured.compare(f"{what} logits", got, expected, budget)
    weights = probe(expected)
    slopes, true = (gradients(model, (logits * weights).sum()) for logits in (got, expected))
    measured.compare_all(f"{what} gradient of", slopes, true, budget)
