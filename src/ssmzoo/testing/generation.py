"""Generation by transformers' own ``generate``, and the cache between two calls.

What surprises: logits are compared, never only tokens (a toy's tokens survive a wrong cache), and
``generate`` hands logits out in float32, so their budget is its rounding even for float64 models.
"""

from __future__ import annotations

import copy
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from ssmzoo.modeling import SSMForCausalLM, StateCache, StaticStateCache, load_state
from ssmzoo.modeling.compat import CACHE
from ssmzoo.testing.subject import BUDGETS, Measured, Subject, require
from ssmzoo_kernels import use_backend

EXACT = BUDGETS[torch.float64]
ROUNDED = torch.finfo(torch.float32).eps
NEW = 5
STEPS = 100
PADDING = (0, 4, 2)


def check_greedy(subject: Subject) -> Measured:
    """Greedy generation of a ragged batch equals recomputing every token."""
    measured = Measured()
    model, (ids, mask) = subject.model(), _prompts(subject)
    output = _generate(model, ids, mask)
    expected = _recomputed(model, output.sequences)
    measured.compare("logits", _logits(output), expected, ROUNDED)
    chosen = expected.argmax(dim=-1)
    require(torch.equal(output.sequences[:, -NEW:], chosen), "a token is not the likeliest one")
    return measured


def check_sampling(subject: Subject) -> Measured:
    """Sampling follows the seed, and the model's logits along the sampled tokens."""
    measured = Measured()
    model, (ids, mask) = subject.model(), _prompts(subject)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(_generate(model, ids, mask, do_sample=True, top_k=0))
    once, again, other = (output.sequences for output in drawn)
    require(torch.equal(once, again), "the same seed gave other tokens")
    require(not torch.equal(once, other), "another seed gave the same tokens")
    measured.compare("logits", _logits(drawn[0]), _recomputed(model, once), ROUNDED)
    return measured


def check_beams(subject: Subject) -> Measured:
    """Beam search with the cache equals beam search without it."""
    measured = Measured()
    model, (ids, mask) = subject.model(), _prompts(subject)
    beams = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    cached, plain = (
        _generate(model, ids, mask, use_cache=use_cache, **beams) for use_cache in (True, False)
    )
    require(torch.equal(cached.sequences, plain.sequences), "the beams hold other tokens")
    for step, (got, expected) in enumerate(zip(cached.logits, plain.logits, strict=True)):
        measured.compare(f"logits of step {step}", got, expected, ROUNDED)
    scores = cached.sequences_scores, plain.sequences_scores
    measured.compare("scores", *scores, BUDGETS[torch.float32])
    return measured


def check_assisted(subject: Subject) -> Measured:
    """Assisted and prompt-lookup decoding, from a kept prompt too, take back and change nothing.

    Also where the prompt is padded around and between its tokens, and where the model emits its own
    pad token.
    """
    measured = Measured()
    model, helper = subject.model(), subject.fresh(torch.float64)
    with torch.no_grad():  # so that it is right at times, and at times is not
        for parameter in helper.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    ids = subject.ids(1, 9)
    ids = torch.cat([ids, ids[:, :5]], dim=1)
    whole, back = torch.ones_like(ids), [0, 0]
    padded = whole.clone()
    padded[:, :2] = padded[:, 6] = 0
    ended = padded.clone()
    ended[:, -2:] = 0

    class Counts(StateCache):
        def crop(self, max_length: int) -> None:
            super().crop(max_length)
            back[0] += max_length < 0
            back[1] += self.pending is not None

    for mask in (whole, padded, ended):
        plain = _generate(model, ids, mask, new=12)
        pad = int(plain.sequences[0, ids.shape[1]])
        ways: dict[str, Any] = {
            "prompt lookup": {"prompt_lookup_num_tokens": 3},
            "assisted": {"assistant_model": helper},
        }
        for name, more in ways.items():
            caches = {"": Counts(model.config), " from a state": model.prefill(ids, mask).cache}
            if mask is ended:  # the first token follows padding: any will do
                del caches[" from a state"]
            for start, past in caches.items():
                got = _generate(model, ids, mask, new=12, cache=past, pad_token_id=pad, **more)
                what = f"{name}{start}"
                require(torch.equal(got.sequences, plain.sequences), f"{what}: other tokens")
                measured.compare(f"{what} logits", _logits(got), _logits(plain), ROUNDED)
    require(min(back) > 0, "no proposed token was wrong, so that nothing was checked")
    return measured


def check_continuing(subject: Subject) -> Measured:
    """A returned cache goes on with several new tokens as if all had been read at once."""
    measured = Measured()
    model, (ids, mask) = subject.model(), _prompts(subject)
    first = _generate(model, ids, mask)
    longer = torch.cat([first.sequences, subject.ids(len(ids), 4, seed=7)], dim=1)
    covering = torch.cat([mask, mask.new_ones(len(ids), NEW + 4)], dim=1)
    second = _generate(model, longer, covering, cache=first[CACHE])
    measured.compare("logits", _logits(second), _recomputed(model, second.sequences), ROUNDED)
    return measured


def check_chunked_prefill(subject: Subject) -> Measured:
    """A prompt read in chunks generates what it generates read at once."""
    measured = Measured()
    model, ids = subject.model(), subject.ids(2, 11)
    for mask in (torch.ones_like(ids), _prompts(subject)[1][1:]):
        widths: list[int] = []
        embedding = model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _m, a, _o, w=widths: w.append(a[0].shape[1]))
        chunked = _generate(model, ids, mask, prefill_chunk_size=4)
        hook.remove()
        require(max(widths) <= 4, f"a chunk of 4 was asked for, {max(widths)} tokens were read")
        whole = _generate(model, ids, mask)
        require(torch.equal(chunked.sequences, whole.sequences), "other tokens")
        measured.compare("logits", _logits(chunked), _logits(whole), ROUNDED)
    return measured


def check_cache_rows(subject: Subject) -> Measured:
    """Rows of a cache can be reordered, selected, repeated and begun anew."""
    measured = Measured()
    model, ids, more = subject.model(), subject.ids(3, 9), subject.ids(6, 3, seed=5)
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1, 2]), [1, 2]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    with torch.no_grad():
        for method, (argument, rows) in changes.items():
            cache = model(ids, use_cache=True).cache
            getattr(cache, method)(argument)
            got = model(more[: len(rows)], cache=cache).logits
            whole = model(torch.cat([ids[rows], more[: len(rows)]], dim=1)).logits
            measured.compare(method, got, whole[:, -3:], EXACT)
        cache = model(ids, use_cache=True).cache
        cache.reset_rows(torch.tensor([1]))
        got = model(more[:3], cache=cache).logits[1:2]
        measured.compare("reset_rows", got, model(more[1:2]).logits, EXACT)
    return measured


def check_shared_prefix(subject: Subject) -> Measured:
    """A state serves several sequences that begin alike, padded, and stays as it was."""
    measured = Measured()
    model, starts, lengths = subject.model(), subject.ids(2, 70), (9, 1, 4)
    rows = torch.tensor([1, 0, 1])
    ends = [subject.ids(1, length, seed=length)[0] for length in lengths]
    ids, mask = subject.ids(3, 9, seed=99), torch.zeros(3, 9, dtype=torch.long)
    for row, end in enumerate(ends):
        ids[row, -len(end) :], mask[row, -len(end) :] = end, 1
    with torch.no_grad():
        state = model(starts, use_cache=True).cache
        whole = [torch.cat([starts[row], end])[None] for row, end in zip(rows, ends, strict=True)]
        expected = [model(each).logits[0, -n:] for each, n in zip(whole, lengths, strict=True)]
        for turn in ("first", "second"):
            shared = state.selected(rows)
            logits = model(ids, attention_mask=mask, cache=shared).logits
            again = model(ids[:, -3:], cache=shared).logits[:, -1]
            got = [logits[row, -n:] for row, n in enumerate(lengths)]
            measured.compare(f"{turn} use", torch.cat(got), torch.cat(expected), EXACT)
            longer = [torch.cat([*pair], 1) for pair in zip(whole, ids[:, None, -3:], strict=True)]
            after = torch.cat([model(each).logits[:, -1] for each in longer])
            measured.compare(f"tokens after the {turn} use", again, after, EXACT)
    return measured


def check_cache_file(subject: Subject) -> Measured:
    """A cache saved to a file and loaded goes on bit for bit."""
    measured = Measured()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = subject.model(dtype)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            cache = model(subject.ids(2, 9), use_cache=True).cache
            path = Path(folder) / "state.safetensors"
            cache.save(path)
            loaded = StateCache.load(path, model.config)
            require(loaded.get_seq_length() == 9, "the loaded cache forgot its length")
            more = subject.ids(2, 3, seed=5)
            expected = model(more, cache=cache).logits
            got = model(more, cache=loaded).logits
        measured.same(f"{dtype} logits", got, expected)
    return measured


def check_prompt_state(subject: Subject) -> Measured:
    """A prompt read once is continued often, in every way, from a file too, by no other weights."""
    measured = Measured()
    model, (ids, mask) = subject.model(), _prompts(subject)
    more = subject.ids(len(ids), 4, seed=7)
    state = model.prefill(ids, mask, chunk_size=3)
    with tempfile.TemporaryDirectory() as folder:
        state.save_pretrained(folder)
        loaded = load_state(folder, model)
        other = subject.fresh(torch.float64)
        with torch.no_grad():
            next(other.model.parameters()).view(-1)[0] += 1
        _refused(ValueError, load_state, folder, other)
        _refused(ValueError, load_state, folder, subject.model(torch.float32))
    for name, source in (("kept", state), ("loaded", loaded)):
        for new in (None, more, None):  # a continuation leaves the state as it was
            inputs = source.inputs(new)
            output = _generate(
                model, inputs.pop("input_ids"), inputs.pop("attention_mask"), **inputs
            )
            expected = _recomputed(model, output.sequences)
            measured.compare(f"{name} logits", _logits(output), expected, ROUNDED)
    ids = ids[:1].repeat(1, 2)[:, :16]
    mask, state = torch.ones_like(ids), model.prefill(ids)
    for way in ("num_beams", "num_return_sequences"):
        options = {way: 3, "do_sample": way == "num_return_sequences"}
        outputs = []
        for past in ({}, {"cache": state.inputs()[CACHE]}):
            torch.manual_seed(0)
            outputs.append(_generate(model, ids, mask, **past, **options))
        plain, kept = outputs
        require(torch.equal(kept.sequences, plain.sequences), f"{way}: other tokens")
        measured.compare(f"{way} logits", _logits(kept), _logits(plain), ROUNDED)
    # with a mask of the whole prompt, generate also takes the new tokens alone, few or many
    plain = _generate(model, ids, mask)
    for seen in (3, 12):
        past = model.prefill(ids[:, : seen + 1]).cache
        kept = _generate(model, ids[:, seen:], mask, cache=past)
        measured.compare("logits of new tokens alone", _logits(kept), _logits(plain), ROUNDED)
    read = model.prefill(torch.cat([ids, ids[:, :1]], dim=1)).cache  # all of the prompt
    _refused(ValueError, _generate, model, ids, mask, cache=read)
    return measured


def check_cache_precision(subject: Subject) -> Measured:
    """States are float32 under bfloat16 weights and autocast, and of a size that never grows."""
    ids = subject.ids(2, 9)
    for name, model in (("bfloat16", subject.model(torch.bfloat16)), ("autocast", None)):
        lowered = torch.autocast("cpu", torch.bfloat16, enabled=model is None)
        model = model or subject.model(torch.float32)
        with torch.no_grad(), lowered:
            cache = model(ids, use_cache=True).cache
            size, earlier = cache.nbytes, copy.deepcopy(cache)
            model(ids[:, :1], cache=cache)
            before, after = _states(earlier), _states(cache)
            require(cache.nbytes == size, f"{name}: the cache grew from {size} to {cache.nbytes}")
            for state, now in after.items():
                rounded = now.dtype.itemsize < 4 or (
                    now.is_floating_point()
                    and torch.equal(now.to(torch.bfloat16).to(now.dtype), now)
                    and not torch.equal(now.round(), now)  # a count is exact in bfloat16
                )
                # a lower precision loses nothing where past activations are kept as they were
                if not rounded or _only_kept(before[state], now):
                    continue
                begun = copy.deepcopy(earlier)
                _states(begun)[state].zero_()
                model(ids[:, :1], cache=begun)
                what = (
                    "and it accumulates"
                    if now.dtype.itemsize < 4
                    else "and was rounded to bfloat16"
                )
                require(
                    torch.equal(_states(begun)[state], now),  # so it is of the last token alone
                    f"{name}: state {state} is {now.dtype}, {what}, though what it was before "
                    "goes into it",
                )
    return Measured()


def _only_kept(before: Tensor, now: Tensor) -> bool:
    """Tell whether one more token left a state, shifted it by a row, or wrote a row of a ring."""
    if torch.equal(now, before):
        return True
    if now.dim() == 1 or now.shape[1] == 1:
        return False
    if torch.equal(now[:, :-1], before[:, 1:]):
        return True
    return now.dim() > 2 and bool(((now != before).flatten(2).any(2).sum(1) <= 1).all())


def check_wrong_cache(subject: Subject) -> Measured:
    """A cache of another model, batch or kind is refused, and so is cropping."""
    model, ids = subject.model(), subject.ids(2, 6)
    other = _another(subject)
    with torch.no_grad():
        theirs = other(ids, use_cache=True).cache
        ours = model(ids, use_cache=True).cache
        _refused(ValueError, model, ids, cache=theirs)
        _refused(ValueError, model, subject.ids(3, 2), cache=ours)
        _refused(TypeError, model, ids, cache=DynamicCache())
        _refused(RuntimeError, ours.crop, 3)
        kept = model(ids[:, :2], cache=ours).logits
        whole = model(torch.cat([ids, ids[:, :2]], dim=1)).logits[:, -2:]
    measured = Measured()
    measured.compare("logits after all refusals", kept, whole, EXACT)
    return measured


def _another(subject: Subject) -> SSMForCausalLM:
    """Return a deeper model, or a wider one where the family refuses to add a layer."""
    config: Any = subject.model().config
    try:
        return subject.fresh(torch.float64, num_hidden_layers=config.num_hidden_layers + 1)
    except ValueError:  # a field has an entry for every layer
        return subject.fresh(torch.float64, hidden_size=2 * config.hidden_size)


def check_fullgraph(subject: Subject) -> Measured:
    """torch.compile takes a prompt and 100 steps in two graphs, whose state stays where it is."""
    measured = Measured()
    model, ids = copy.deepcopy(subject.shallow()), subject.ids(2, 8 + STEPS)
    parts = ids.split([8, *[1] * STEPS], dim=1)
    plain, layouts, logits = StateCache(model.config), [], []
    with torch.no_grad(), use_backend("eager"):  # layer by layer, as the graph
        for tokens in parts:
            logits.append(model(tokens, cache=plain).logits)
            layouts.append(_layout(plain))
    expected = torch.cat(logits, dim=1)
    grows = model.config.state_grows
    static = StaticStateCache(model.config, ids.shape[1] if grows else None)
    caches: list[Any] = [static] if grows else [static, StateCache(model.config)]  # sizes change
    for cache in caches:
        graphs, got, places = [], [], set()

        def count(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        try:
            compiled = torch.compile(model, backend=count, fullgraph=True)
            with torch.no_grad():
                for tokens in parts:
                    got.append(compiled(tokens, cache=cache).logits)
                    held = [state for layer in cache.layers for state in layer.states.values()]
                    places.add(tuple(state.data_ptr() for state in held))
        finally:
            torch._dynamo.reset()
        kind = type(cache).__name__
        if len(graphs) != 2:
            why = "" if cache is static else _first_change(layouts)
            took = f"a prompt and {STEPS} steps took {len(graphs)} graphs: {kind}{why}"
            raise AssertionError(took)
        if cache is static:
            require(len(places) == 1, f"the state had {len(places)} places in memory")
        measured.compare(f"logits, {kind}", torch.cat(got, dim=1), expected, EXACT)
    return measured


def _layout(cache: StateCache) -> dict[str, str]:
    """Return what a graph looks at in every state, in the states' order."""
    return {
        name: f"{state.dtype}, shape {list(state.shape)}, strides {list(state.stride())}"
        for name, state in _states(cache).items()
    }


def _first_change(layouts: list[dict[str, str]]) -> str:
    """Tell which state one call leaves otherwise than the call before, "" if none."""
    for before, now in pairwise(layouts):
        if list(before) != list(now):
            orders = (", ".join(names) for names in (before, now))
            return "; one call leaves {}, the next {}: leave the same states in one order".format(
                *orders
            )
        for name in before:
            if before[name] != now[name]:
                return (
                    f"; state {name} is left as {before[name]} by one call, as {now[name]} by the "
                    "next: put it in one layout, such as .contiguous()"
                )
    return ""


def _refused(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> None:
    """Fail unless a call raises an error that names the arguments given by name."""
    try:
        call(*args, **kwargs)
    except kind as error:
        unnamed = [name for name in kwargs if name not in str(error)]
        require(not unnamed, f"the error does not name {unnamed}: {error}")
        return
    given = sorted(kwargs) or [type(argument).__name__ for argument in args]
    raise AssertionError(f"{kind.__name__} was not raised for {given}")


def _prompts(subject: Subject) -> tuple[Tensor, Tensor]:
    """Return a left-padded batch and its mask."""
    ids = subject.ids(len(PADDING), 11)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(PADDING):
        mask[row, :padding] = 0
    return ids, mask


def _generate(
    model: SSMForCausalLM, ids: Tensor, mask: Tensor, new: int = NEW, **options: Any
) -> Any:
    past = {k: options.pop(k) for k in ("cache", "assistant_model") if k in options}
    config = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **{"pad_token_id": 0, **options},
    )
    untyped: Any = model  # transformers types generate for its own models only
    return untyped.generate(ids, attention_mask=mask, generation_config=config, **past)


def _logits(output: Any) -> Tensor:
    return torch.stack(output.logits, dim=1)


def _recomputed(model: SSMForCausalLM, sequences: Tensor) -> Tensor:
    """Return the logits ``[B, NEW, V]`` that chose the last tokens, every row run alone."""
    rows = []
    with torch.no_grad():
        for row, padding in zip(sequences, PADDING, strict=True):
            rows.append(model(row[None, padding:-1], use_cache=False).logits[0, -NEW:])
    return torch.stack(rows)


def _states(cache: StateCache) -> dict[str, Tensor]:
    return {
        f"{name!r} of layer {index}": state
        for index, layer in enumerate(cache.layers)
        for name, state in layer.states.items()
    }
