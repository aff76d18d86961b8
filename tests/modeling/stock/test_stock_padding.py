"""Accelerated models of transformers: padding anywhere changes nothing, behind caches too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modeling.stock import common
from tests.modeling.stock.common import OUT, PURE, assert_close
from tests.modeling.stock.common import accelerated as ours
from tests.stock_models import HYBRID, TYPES, tiny
from torch import Tensor
from transformers import DynamicCache, StaticCache

import ssmzoo
from ssmzoo.modeling import prefill
from ssmzoo.modeling.compat import CACHE, CACHES, MIXER_CACHE, cache_name
from ssmzoo.modeling.stock.cache import StockCache

SETTINGS = {"max_new_tokens": 5, **common.SETTINGS}
every_type = pytest.mark.parametrize("model_type", TYPES)
# what generate says of models with fresh weights
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
# rows padded on the left, on the right, on both sides, between tokens, not at all, and empty turns
MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1],
        [1] * 18,
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1],
    ]
)
TURNS = [0, 8, 14, 15, 16, 18]  # where they begin and end: some are a token


def ids(rows: int = len(MASK), length: int = MASK.shape[1], seed: int = 1) -> Tensor:
    return common.ids(rows, length, seed)


def assert_rows_as_alone(model: Any, x: Tensor, mask: Tensor, logits: Tensor) -> None:
    for row, real, got in zip(x, mask.bool(), logits, strict=True):
        assert_close(got[real], model(row[real][None], use_cache=False).logits[0])


def alone(model: Any, x: Tensor, mask: Tensor, new: Tensor) -> Tensor:
    """Return the logits of each new token but the first, of a row without its padding."""
    rows = [torch.cat([row[m], n])[None] for row, m, n in zip(x, mask.bool(), new, strict=True)]
    kept = [model(row, use_cache=False).logits[0, -new.shape[1] : -1] for row in rows]
    return torch.stack(kept, dim=1)


@every_type
@torch.no_grad()
@pytest.mark.long
def test_a_padded_row_gives_what_it_gives_alone(model_type: str) -> None:
    model, x = ours(model_type), ids()
    places = (MASK.cumsum(1) - 1).clamp_min(0)
    caches: list[Callable[[], Any]] = [
        lambda: None,
        lambda: DynamicCache(config=model.config),
        lambda: StockCache(model.config),
        lambda: StaticCache(config=model.config, max_cache_len=MASK.shape[1]),
    ]
    whole = model(x, attention_mask=MASK, use_cache=False).logits
    assert_rows_as_alone(model, x, MASK, whole)
    for made in caches:
        for told in (False, True)[: 1 + (model_type in HYBRID)]:
            cache, turns = made(), []
            for begin, end in itertools.pairwise(TURNS):
                given = {"position_ids": places[:, begin:end]} if told else {}
                given |= {} if cache is None else {CACHE: cache}
                output = model(
                    x[:, begin:end], attention_mask=MASK[:, :end], use_cache=True, **given
                )
                turns.append(output.logits)
                cache = output[cache_name(output.keys())]
            assert_rows_as_alone(model, x, MASK, torch.cat(turns, dim=1))


@every_type
@torch.no_grad()
@pytest.mark.long
def test_generate_goes_on_from_rows_padded_anywhere(model_type: str) -> None:
    model, x, mask = ours(model_type), ids(), MASK[:, :15]
    x = x[:, :15]

    def run(**how: Any) -> Any:
        return model.generate(x, attention_mask=mask, **SETTINGS, **OUT, **how)

    first = run()
    new = first.sequences[:, 15:]
    judge = alone(model, x, mask, new)
    ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    ways += [{"prefill_chunk_size": 4}]
    for how in ways:
        got = run(**how)
        assert torch.equal(got.sequences, first.sequences), how
        assert_close(torch.stack(got.logits)[1:], judge)
    beams = {"num_beams": 3, "output_scores": True}
    scores = [run(use_cache=use_cache, **beams).sequences_scores for use_cache in (True, False)]
    assert_close(*scores)
    # a second turn, of rows padded anywhere
    turn, more = torch.cat([first.sequences, ids(seed=2)[:, :6]], dim=1), MASK[:, 3:9]
    covering = torch.cat([mask, torch.ones_like(new), more], dim=1)
    second = model.generate(
        turn, attention_mask=covering, **{CACHE: first[cache_name(first.keys())]}, **SETTINGS, **OUT
    )
    judge = alone(model, turn, covering, second.sequences[:, turn.shape[1] :])
    assert_close(torch.stack(second.logits)[1:], judge)


@every_type
@pytest.mark.parametrize("row", [0, 1])
@torch.no_grad()
@pytest.mark.long
def test_assisted_decoding_goes_on_from_a_row_padded_anywhere(model_type: str, row: int) -> None:
    model, assistant = ours(model_type), ours(model_type)
    draw = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=draw))
    x, mask = ids(rows=1, length=9).repeat(1, 2), MASK[row : row + 1]
    greedy = model.generate(x, attention_mask=mask, **SETTINGS, **OUT)
    judge = alone(model, x, mask, greedy.sequences[:, 18:])
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        got = model.generate(x, attention_mask=mask, **SETTINGS, **OUT, **how)
        assert_close(torch.stack(got.logits)[1:], judge)
        begun = prefill(model, x[:, :14], mask[:, :14]).inputs(x[:, 14:])
        got = model.generate(**begun | {"attention_mask": mask}, **SETTINGS, **OUT, **how)
        assert_close(torch.stack(got.logits)[1:], judge)


@torch.no_grad()
@pytest.mark.long
def test_a_graph_reads_padding_anywhere_as_python_does() -> None:
    model, x = ours("mamba2", num_hidden_layers=1), ids()
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager")
    cache = DynamicCache(config=model.config)
    turns = [
        compiled(x[:, begin:end], attention_mask=MASK[:, :end], **{CACHE: cache}).logits
        for begin, end in ((0, 8), (8, 18))
    ]
    torch.compiler.reset()
    assert_rows_as_alone(model, x, MASK, torch.cat(turns, dim=1))


def test_a_mask_without_what_attention_finds_in_the_cache_is_refused() -> None:
    model, x = ours("bamba"), ids()
    cache = model(x[:, :8], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="attention_mask must cover the 8 tokens that the cache"):
        model(x[:, 8:], attention_mask=MASK[:, 8:], **{CACHE: cache})
    ours("mamba")(x[:, 8:], attention_mask=MASK[:, 8:])  # whose state needs no earlier columns


# --- a second turn --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", PURE)
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_a_second_turn_reads_what_is_new(model_type: str, name: str) -> None:
    model, x = ours(model_type), ids(rows=1)
    first = model.generate(x, **SETTINGS, **OUT)
    talk = torch.cat([first.sequences, ids(rows=1, length=6, seed=2)], dim=1)
    judge = torch.stack(model.generate(talk, **SETTINGS, **OUT).logits)
    read = model(first.sequences[:, :-1])
    ways: list[dict[str, Any]] = [
        {"cache": first[cache_name(first.keys())]},
        {"cache": read[cache_name(read.keys())]},
        {"cache": model(x)[cache_name(read.keys())], "prompt_lookup_num_tokens": 3},
        {"cache": model(x)[cache_name(read.keys())], "prefill_chunk_size": 4},
    ]
    for how in ways:
        how[name] = how.pop("cache")
        if "prefill_chunk_size" in how and CACHE != "cache":  # whose chunks begin anew
            with pytest.raises(ValueError, match="prefill_chunk_size must be left out"):
                model.generate(talk, **how, **SETTINGS)
            continue
        assert_close(torch.stack(model.generate(talk, **how, **SETTINGS, **OUT).logits), judge)
    # the new tokens alone, with the mask of all
    given = {name: model(first.sequences)[cache_name(read.keys())]}
    given["attention_mask"] = torch.ones_like(talk)
    new = model.generate(talk[:, -6:], **given, **SETTINGS, **OUT)
    assert_close(torch.stack(new.logits), judge)


@pytest.mark.parametrize("model_type", PURE)
def test_a_cache_that_counts_no_tokens_is_refused(model_type: str) -> None:
    model: Any = tiny(model_type)
    x = ids(rows=2)
    stock = model(x)
    cache = stock[cache_name(stock.keys())]
    ssmzoo.accelerate(model)
    static = model.generate(x, cache_implementation="static", **SETTINGS, **OUT)
    for given in (cache, static[cache_name(static.keys())]):
        for name in CACHES:
            with pytest.raises(ValueError, match=f"^(cache|{name}) must count its tokens, .* a"):
                model.generate(x, **{name: given}, **SETTINGS)
    model.generate(x, **{MIXER_CACHE: DynamicCache(config=model.config)}, **SETTINGS)


@every_type
def test_padding_has_no_gradient(model_type: str) -> None:
    model, x = ours(model_type).train(), ids()

    def slopes(logits: Tensor) -> list[Tensor]:
        model.zero_grad()
        logits.double().log_softmax(-1).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    rows = [row[real][None] for row, real in zip(x, MASK.bool(), strict=True)]
    judge = slopes(torch.cat([model(row, use_cache=False).logits[0] for row in rows]))
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(x, attention_mask=MASK, use_cache=False).logits[MASK.bool()]
        for got, wanted in zip(slopes(logits), judge, strict=True):
            assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
