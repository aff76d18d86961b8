"""The zoo's first promise: five equal forms, in logits and in gradients.

The judge is each sequence run alone, in one piece, without a cache.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from ssmzoo.modeling import LayerState, SSMForCausalLM, add_state_adapter, load_state_adapter
from ssmzoo.modeling.decoding import DECODING, GAVE_OTHER_NUMBERS
from ssmzoo.testing.subject import (
    BUDGETS,
    EXACT,
    FLOAT32_LOSS,
    SEED,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    probe,
    relative,
    require,
)
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

LENGTHS = (13, 8, 1, 5)  # of documents
# a row each of three turns; packed, the first turn's boundaries lie at 63, 64, 128 and 133
PACKED = ((63, 1, 64, 5, 67), (2, 66, 1, 3, 17), (3, 3, 3, 3, 3))
# nothing comes for the third row in its second turn
PADDED = ((66, 8, 1, 5), (2, 19, 0, 5), (3, 3, 3, 3))
STEP = 1e-6  # of differences, relative to the entries; so small that it crosses hardly a choice
# what rounding leaves of a difference over such a step: of float64 1e-9, of float32 1e-3
STEPPED = 1e-6


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


def check_precision(subject: Subject) -> Measured:
    """Nothing on the way is rounded to less than the model's precision.

    Rounding makes steps of what should be smooth: over small and twice as small changes of weights
    and embeddings the logits of a float64 model differ in proportion, unless something is coarser.
    """
    measured = Measured()
    nearer, farther = differences(subject)
    measured.compare("differences of float64 logits", nearer, farther, STEPPED)
    ids = subject.ids(2, 40)
    with torch.no_grad():
        low, exact = (subject.model(dtype)(ids).logits for dtype in (torch.float32, torch.float64))
    measured.compare("float32 logits", low, exact, BUDGETS[torch.float32])
    return measured


def check_chunks(subject: Subject) -> Measured:
    """Chunks with a carried cache equal one pass, gradients through the cache included."""
    # some longer than what kernels and mixers cut a sequence into
    return _in_pieces(subject, [5, 1, 2, 50, 2, 68])


def check_tokens(subject: Subject) -> Measured:
    """Token by token equals one pass, gradients through the cache included."""
    return _in_pieces(subject, [1] * 13)


def check_packing(subject: Subject) -> Measured:
    """Sequences packed into one row do not see each other, also when packed ones go on."""
    measured = Measured()
    rows = _rows(subject, PACKED)
    for dtype in BUDGETS:
        model = subject.model(dtype)
        cache, turns = None, []
        for lengths, pieces in zip(PACKED, _turns(rows, PACKED), strict=True):
            if len(set(lengths)) == 1:
                given: dict[str, Tensor] = {"input_ids": torch.stack(pieces)}
            else:
                ends = torch.tensor([0, *lengths]).cumsum(0).int()
                given = {"input_ids": torch.cat(pieces)[None], "cu_seqlens": ends}
            with _lost_states_noted(measured):
                output = model(**given, cache=cache, use_cache=True)
            cache = output.cache
            turns.append(output.logits.flatten(0, 1).split(lengths))
        got = [torch.cat(parts) for parts in zip(*turns, strict=True)]
        compare(measured, model, f"{dtype} packed turns:", got, alone(model, rows))
    return measured


def check_padding(subject: Subject) -> Measured:
    """Padding anywhere changes nothing, in a ragged batch or when its cache goes on, ragged too."""
    measured = Measured()
    rows = _rows(subject, PADDED)
    for dtype in BUDGETS:
        model = subject.model(dtype)
        expected, true = alone(model, rows), None
        for side in ("left", "right", "inner"):
            cache, turns, masks = None, [], []
            for lengths, pieces in zip(PADDED, _turns(rows, PADDED), strict=True):
                ids, mask = _padded(subject, pieces, side)
                masks.append(mask)
                # a mask of all tokens, or of the new ones
                given = torch.cat(masks, dim=1) if side == "left" else mask
                with _lost_states_noted(measured):
                    output = model(ids, attention_mask=given, cache=cache, use_cache=True)
                cache = output.cache
                turns.append(output.logits[mask.bool()].split(lengths))
            got = [torch.cat(parts) for parts in zip(*turns, strict=True)]
            true = compare(measured, model, f"{dtype} {side} padding:", got, expected, true)
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
    loss, true = torch.stack(losses).sum() / sum(length - 1 for length in LENGTHS), None
    for name, options in kinds.items():
        batch = DataCollatorWithFlattening(**options)([{"input_ids": row} for row in rows])
        for plain in (False, True):
            if plain:  # labels that do not mark where documents begin
                batch["labels"] = batch["input_ids"]
            output = model(**batch)
            # transformers takes the loss of float32 logits, whatever the model's dtype
            measured.compare(f"{name}: loss", output.loss, loss, FLOAT32_LOSS)
        got = output.logits[0].split(LENGTHS)
        true = compare(measured, model, f"{name}:", got, expected, true)
    return measured


def check_causality(subject: Subject) -> Measured:
    """Tokens change nothing before them, and something after."""
    measured = Measured()
    model, ids, cut = subject.model(), subject.ids(2, 14), 6
    changed = ids.clone()
    changed[:, cut:] = (ids[:, cut:] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    measured.compare("logits before a changed token", after[:, :cut], before[:, :cut], EXACT)

    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits[:, cut]
    (slope,) = torch.autograd.grad((logits * probe(logits)).sum(), embeds)
    size = slope.abs().amax(dim=(0, 2))  # [L]
    leak = size[cut + 1 :] / size.max()
    measured.compare("gradient from later tokens", 1 + leak, torch.ones_like(leak), EXACT)
    require(bool((size[: cut + 1] > 0).all()), "the output does not depend on every token before")
    return measured


def check_state_adapter(subject: Subject) -> Measured:
    """Trained initial states are learned, the same in all forms, and come back from a file."""
    measured = Measured()
    rows = _rows(subject, ((13, 8, 1, 5),))
    whole, ends = torch.cat(rows)[None], torch.tensor([0, 13, 21, 22, 27])
    for dtype, budget in BUDGETS.items():
        model = subject.fresh(dtype)
        with torch.no_grad():
            before = model(rows[0][None], use_cache=False).logits
        try:
            adapter = add_state_adapter(model).to(dtype)  # with its float64 gradients
        except ValueError as error:
            raise NotApplicable(str(error)) from None
        measured.compare(
            f"{dtype} logits with states of zeros",
            model(rows[0][None], use_cache=False).logits,
            before,
            budget,
        )
        generator = torch.Generator().manual_seed(SEED)
        for parameter in adapter.parameters():
            # float32 whatever the parameter, as a file holds it
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        expected = alone(model, rows)
        require(expected[0].requires_grad, "no gradient of the initial states comes through")
        changed = relative("logits", expected[0], before[0])
        require(changed > EXACT, "the model does not start from its initial states")
        true = None
        for side in ("left", "right"):
            ids, mask = _padded(subject, rows, side)
            output = model(ids, attention_mask=mask, use_cache=True)
            got = output.logits[mask.bool()].split([len(row) for row in rows])
            true = compare(measured, model, f"{dtype} {side} padding:", got, expected, true)
        got = model(whole, cu_seqlens=ends, use_cache=False).logits[0]
        compare(measured, model, f"{dtype} packed:", got, expected, true)
        for what, sizes in (("chunks", [5, 1, 2, 5]), ("tokens", [1] * 13)):
            got = _carried(measured, model, rows[0][None], sizes)[0]
            compare(measured, model, f"{dtype} {what}:", got, expected[0])
        for name, slope in gradients(model, (expected[0] * probe(expected[0])).sum()).items():
            require(bool(slope.isfinite().all() and slope.any()), f"{name} learns nothing")
        with tempfile.TemporaryDirectory() as folder:
            adapter.save_pretrained(folder)
            again = subject.fresh(dtype)
            load_state_adapter(folder, again)
            with torch.no_grad():
                got = alone(again, rows[:1])[0]
            measured.compare(f"{dtype} logits after loading", got, expected[0], budget)
    return measured


def check_fused_steps(subject: Subject) -> Measured:
    """A token in one call of C equals its layers one by one, and notices hooks put on later.

    It also notices a ``forward`` that is replaced in a layer's class, and its return.
    """
    measured, model, ids = Measured(), subject.fresh(), subject.ids(3, 12)
    for dtype, budget in BUDGETS.items():
        model = subject.fresh(dtype)
        for rows in (1, 3):
            ids = subject.ids(rows, 12)
            with watch() as ran:
                fused = _in_tokens(model, ids)
            known = [m.__dict__[DECODING].why for m in model.modules() if DECODING in m.__dict__]
            reasons = {why for why in known if why is not None}  # of some layers, or of all
            require(GAVE_OTHER_NUMBERS not in reasons, f"write_token: {GAVE_OTHER_NUMBERS}")
            if ("token_step", "cpu") not in ran:
                why = "; ".join(sorted(reasons)) or "no write_token, or no C compiler is here"
                raise NotApplicable(f"its tokens go layer by layer: {why}")
            with use_backend("eager"):
                layered = _in_tokens(model, ids)
            measured.compare(f"{dtype} logits of {rows} rows", fused, layered, budget)
    inside = [m for m in model.modules() if DECODING in m.__dict__ and m.__dict__[DECODING].step]
    for kind in {type(layer): None for module in inside for layer in module.modules()}:
        _require_followed(model, ids, kind)
    with watch() as ran:
        _in_tokens(model, ids)
    require(("token_step", "cpu") in ran, "a class's own forward, set back, has no program")
    calls: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: calls.append(module))
    _in_tokens(model, ids)
    seen = len(calls)
    with use_backend("eager"):
        _in_tokens(model, ids)
    require(len(calls) == 2 * seen, "a hook that was put on later is not called at every token")
    return measured


def _require_followed(model: SSMForCausalLM, ids: Tensor, kind: type[nn.Module]) -> None:
    """Fail unless a class's forward, replaced after a first token, is called at every token."""
    own, calls = kind.forward, []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    with mock.patch.object(kind, "forward", forward):
        _in_tokens(model, ids)
        seen = len(calls)
        with use_backend("eager"):
            _in_tokens(model, ids)
    wrong = f"the forward that was put into {kind.__name__} later is not called at every token"
    require(len(calls) == 2 * seen, wrong)


def check_batch(subject: Subject) -> Measured:
    """A row's logits depend neither on the other rows, however many, nor on its place."""
    measured = Measured()
    ids, order = subject.ids(9, 11), torch.tensor([2, 7, 0, 3, 8, 1, 6, 5, 4])
    for dtype, budget in BUDGETS.items():
        model = subject.model(dtype)
        with torch.no_grad():
            single = torch.cat([model(row[None]).logits for row in ids])
            for count in (4, 8, 9):
                chosen = order[order < count]
                whole = model(ids[chosen]).logits
                steps = _carried(measured, model, ids[chosen], [8, 1, 1, 1])
                measured.compare(f"{dtype} {count} rows", whole, single[chosen], budget)
                measured.compare(f"{dtype} {count} rows in steps", steps, single[chosen], budget)
    return measured


@contextlib.contextmanager
def _lost_states_noted(measured: Measured) -> Iterator[None]:
    """Note, as the cause of an error, a mixer that reads a state and leaves none.

    A right mixer may do so too, if it keeps the state in another form, under another name.
    """
    read: dict[tuple[int, str], LayerState] = {}

    def watching(get: Callable[[LayerState, str], Tensor | None]) -> Any:
        def watched(state: LayerState, name: str) -> Tensor | None:
            if state.keep:
                read[id(state), name] = state
            return get(state, name)

        return watched

    with (
        mock.patch.object(LayerState, "get", watching(LayerState.get)),
        mock.patch.object(LayerState, "get_row", watching(LayerState.get_row)),
    ):
        yield
    lost = sorted({name for (_, name), state in read.items() if name not in state.final})
    if lost:
        measured.cause = f"a mixer reads the state {', '.join(map(repr, lost))} and leaves none"


@torch.no_grad()
def _in_tokens(model: SSMForCausalLM, ids: Tensor) -> Tensor:
    """Return the logits of a prompt's continuation, token by token."""
    cache = model(ids[:, :4], use_cache=True).cache
    steps = [model(token, cache=cache).logits for token in ids[:, 4:].split(1, dim=1)]
    return torch.cat(steps, dim=1)


def differences(subject: Subject) -> tuple[Tensor, Tensor]:
    """Return the derivative of float64 logits ``[B, L, V]`` by finite differences of two steps.

    It is along :func:`direction`; differences of the fourth order leave an error of rounding alone.
    """
    model, embeds = subject.model(), _embeddings(subject)
    along = direction(subject)

    def logits(step: float) -> Tensor:
        moved = {
            name: parameter + step * along[name] for name, parameter in model.named_parameters()
        }
        given = {"inputs_embeds": embeds + step * along[""], "use_cache": False}
        return torch.func.functional_call(model, moved, (), given).logits

    def derivative(step: float) -> Tensor:
        near, far = (logits(n * step) - logits(-n * step) for n in (1, 2))
        return (8 * near - far) / (12 * step)

    with torch.no_grad():
        return derivative(STEP), derivative(2 * STEP)


def slopes(subject: Subject, weights: Sequence[Tensor]) -> Tensor:
    """Return the derivative of weighted sums of the logits along :func:`direction` by autograd."""
    model, embeds = subject.model(), _embeddings(subject).requires_grad_()
    along = direction(subject)
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    found = []
    for weight in weights:
        loss = (logits * weight).sum()
        (slope,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        grads = {"": slope, **gradients(model, loss)}
        found.append(torch.stack([(grads[name] * along[name]).sum() for name in grads]).sum())
    return torch.stack(found)


def direction(subject: Subject) -> dict[str, Tensor]:
    """Return a random change by parameter, scaled by its entries; the embeddings' is under ""."""
    generator = torch.Generator().manual_seed(SEED)
    entries = {"": _embeddings(subject), **dict(subject.model().named_parameters())}
    return {
        name: torch.randn(entry.shape, generator=generator, dtype=entry.dtype)
        * entry.detach().abs()
        for name, entry in entries.items()
    }


def _embeddings(subject: Subject) -> Tensor:
    return subject.model().get_input_embeddings()(subject.ids(2, 40)).detach()


def _in_pieces(subject: Subject, sizes: list[int]) -> Measured:
    measured = Measured()
    ids = subject.ids(2, sum(sizes))
    for dtype in BUDGETS:
        model = subject.model(dtype)
        got, expected = _carried(measured, model, ids, sizes), model(ids, use_cache=False).logits
        compare(measured, model, f"{dtype}", got, expected)
    return measured


def _carried(measured: Measured, model: SSMForCausalLM, ids: Tensor, sizes: list[int]) -> Tensor:
    """Return the logits ``[B, L, V]`` of pieces read one after the other with a cache."""
    cache, parts, seen = None, [], 0
    for piece in ids.split(sizes, dim=1):
        with _lost_states_noted(measured):
            output = model(piece, cache=cache, use_cache=True)
        cache = output.cache
        parts.append(output.logits)
        seen += piece.shape[1]
        require(
            cache.get_seq_length() == seen,
            f"the cache counts {cache.get_seq_length()} tokens instead of {seen}",
        )
    return torch.cat(parts, dim=1)


def _rows(subject: Subject, turns: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return random rows ``[L]``, as long as their lengths in all turns together."""
    lengths = [sum(row) for row in zip(*turns, strict=True)]
    return [subject.ids(1, length, seed=i)[0] for i, length in enumerate(lengths)]


def _turns(rows: Sequence[Tensor], turns: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Return the rows' pieces turn by turn."""
    pieces = [row.split(parts) for row, parts in zip(rows, zip(*turns, strict=True), strict=True)]
    return [list(turn) for turn in zip(*pieces, strict=True)]


def _padded(subject: Subject, pieces: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Pad pieces to one length with random tokens; return ids and mask."""
    widest = max(map(len, pieces)) + 2 * (side == "inner")
    ids = subject.ids(len(pieces), widest, seed=99)
    mask = torch.zeros_like(ids)
    for i, piece in enumerate(pieces):
        place: Any = slice(widest - len(piece), None) if side == "left" else slice(len(piece))
        if side == "inner":  # spread over the row
            draw = torch.Generator().manual_seed(i)
            place = torch.randperm(widest, generator=draw)[: len(piece)].sort().values
        ids[i, place], mask[i, place] = piece, 1
    return ids, mask


def compare(
    measured: Measured,
    model: nn.Module,
    what: str,
    got: Tensor | Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
    true: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compare outputs and the gradient that a loss of all of them gives every parameter.

    Return the expected gradients, which are given as ``true`` where they are known.
    """
    got, expected = (x if isinstance(x, Tensor) else torch.cat(list(x)) for x in (got, expected))
    budget = BUDGETS[expected.dtype]
    measured.compare(f"{what} outputs", got, expected, budget)
    weights = probe(expected)
    slopes = gradients(model, (got * weights).sum())
    true = true or gradients(model, (expected * weights).sum())
    measured.compare_all(f"{what} gradient of", slopes, true, budget)
    return true
