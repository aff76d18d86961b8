"""Arguments and heads that behave as in transformers' own models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import nn

from ssmzoo.modeling import SSMConfig
from ssmzoo.testing.subject import EXACT, FLOAT32_LOSS, Measured, Subject, gradients, require


def check_inputs_embeds(subject: Subject) -> Measured:
    """Embeddings instead of token ids give the same logits and the same generation."""
    measured = Measured()
    model, ids = subject.model(), subject.ids(2, 9)
    untyped: Any = model  # transformers types generate for its own models only
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        measured.same("logits", model(inputs_embeds=embeds).logits, model(ids).logits)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        got = untyped.generate(inputs_embeds=embeds, attention_mask=mask, **options)
        expected = untyped.generate(ids, attention_mask=mask, **options)[:, 9:]
    require(torch.equal(got, expected), "generate gives other tokens for embeddings")
    return measured


def check_logits_to_keep(subject: Subject) -> Measured:
    """``logits_to_keep`` gives these logits of one full pass, and computes no others."""
    measured = Measured()
    model, ids = subject.model(), subject.ids(2, 9)
    kept = {"the last 1": 1, "the last 4": 4, "three": torch.tensor([0, 3, 8])}
    expected = {"the last 1": [8], "the last 4": [5, 6, 7, 8], "three": [0, 3, 8]}
    with torch.no_grad():
        whole = model(ids).logits
        for name, places in expected.items():
            with _widths(model.lm_head) as widths:
                got = model(ids, logits_to_keep=kept[name]).logits
            require(
                widths == [len(places)],
                f"{len(places)} logits were asked for, {sum(widths)} were computed",
            )
            measured.compare(name, got, whole[:, places], EXACT)
    return measured


def check_outputs(subject: Subject) -> Measured:
    """Hidden states, tuples and the loss come in the forms that transformers' models have."""
    measured = Measured()
    model, ids = subject.model(), subject.ids(2, 9)
    with torch.no_grad():
        output = model(ids, labels=ids, output_hidden_states=True)
        layers = model.config.num_hidden_layers
        require(
            len(output.hidden_states) == layers + 1,
            f"{len(output.hidden_states)} hidden states for {layers} layers",
        )
        head = model.lm_head(output.hidden_states[-1])
        measured.compare("head of the last hidden state", output.logits, head, EXACT)
        flat = model(ids, labels=ids, return_dict=False)
        measured.same("a tuple's loss", flat[0], output.loss)
        measured.same("a tuple's logits", flat[1], output.logits)
        loss = torch.nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
    # transformers takes the loss of float32 logits, whatever the model's dtype
    measured.compare("loss", output.loss, loss, FLOAT32_LOSS)
    return measured


def check_sequence_classification(subject: Subject) -> Measured:
    """A classified sequence has the same logits alone, padded, packed, or both, by each pooling."""
    measured = Measured()
    pad, lengths = 1, (9, 4, 6)
    rows = [subject.ids(1, length, seed=length)[0] for length in lengths]
    for row in rows:
        row[row == pad] = pad + 1
    classes = torch.tensor([2, 0, 1])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    batches = {"packed": {"input_ids": torch.cat(rows)[None], "cu_seqlens": ends}}
    for side in ("left", "right"):
        ids = torch.full((3, max(lengths)), pad)
        for i, row in enumerate(rows):
            ids[i, slice(len(row)) if side == "right" else slice(-len(row), None)] = row
        batches[f"{side} padding, found"] = {"input_ids": ids}
        batches[f"{side} padding, masked"] = {"input_ids": ids, "attention_mask": ids != pad}
    for name, packs in (("one row", [rows]), ("two rows", [rows[:1], rows[1:]])):
        width = 2 + max(sum(map(len, pack)) for pack in packs)
        ids, positions = torch.full((len(packs), width), pad), torch.zeros(len(packs), width)
        for i, pack in enumerate(packs):
            ids[i, : sum(map(len, pack))] = torch.cat(pack)
            positions[i, : sum(map(len, pack))] = torch.cat([torch.arange(len(r)) for r in pack])
        given = {"input_ids": ids, "position_ids": positions.long()}
        batches[f"packed in {name} with padding, found"] = given
        batches[f"packed in {name} with padding, masked"] = {**given, "attention_mask": ids != pad}
    for pooling in get_args(SSMConfig.__annotations__["pooling"]):
        model = subject.classifier(torch.float64, num_labels=3, pad_token_id=pad, pooling=pooling)
        expected = torch.cat([model(row[None]).logits for row in rows])
        loss = torch.nn.functional.cross_entropy(expected, classes)
        slopes = gradients(model, loss)
        for name, batch in batches.items():
            what = f"pooling={pooling!r}, {name}"
            output = model(**batch, labels=classes)
            measured.compare(f"{what}: logits", output.logits, expected, EXACT)
            measured.compare(f"{what}: loss", output.loss, loss, EXACT)
            found = gradients(model, output.loss)
            measured.compare_all(f"{what}: gradient of", found, slopes, EXACT)
    return measured


@contextlib.contextmanager
def _widths(module: nn.Module) -> Iterator[list[int]]:
    """Record the length L of the ``[B, L, D]`` that each call of a module gets."""
    found: list[int] = []
    hook = module.register_forward_pre_hook(lambda _m, given: found.append(given[0].shape[1]))
    try:
        yield found
    finally:
        hook.remove()
