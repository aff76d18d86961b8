"""Accelerated models of transformers: prompts read once, tokens taken back, states looked at."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.modeling.stock import common
from tests.modeling.stock.common import OUT, PURE, assert_close
from tests.modeling.stock.common import accelerated as ours
from tests.stock_models import SCAN, TYPES, tiny
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ssmzoo
from ssmzoo.analysis.measure import measure_layers
from ssmzoo.modeling import load_state, prefill
from ssmzoo.modeling.cache import RecurrentCache
from ssmzoo.modeling.compat import CACHE, CACHES, MIXER_CACHE
from ssmzoo.modeling.stock.cache import StockCache
from ssmzoo_kernels.layers import linear_attention, selective_scan

LENGTH, NEW = 21, 8
# what generate says of models with fresh weights, and PEFT calls of transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SETTINGS = {"max_new_tokens": NEW, **common.SETTINGS}
every_type = pytest.mark.parametrize("model_type", TYPES)


def ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return common.ids(rows, length)


def padded() -> tuple[Tensor, Tensor]:
    x = ids()
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    return x, mask


def logits(model: Any, **inputs: Any) -> Tensor:
    """Return the logits of each new token, greedily chosen."""
    return torch.stack(model.generate(**SETTINGS, **OUT, **inputs).logits)


# --- prompts that are read once -------------------------------------------------------------------


@every_type
@pytest.mark.long
def test_a_prompt_read_once_goes_on_as_one_read_anew(model_type: str, tmp_path: Path) -> None:
    model, (x, mask) = ours(model_type), padded()
    whole = logits(model, input_ids=x, attention_mask=mask)
    state = prefill(model, x, mask, chunk_size=7)
    first = logits(model, **state.inputs())
    assert_close(first, whole)
    assert torch.equal(
        logits(model, **state.inputs()), first
    )  # from a copy: the state is as it was
    state.save_pretrained(tmp_path)
    kept = load_state(tmp_path, ours(model_type))
    assert torch.equal(logits(kept.model, **kept.inputs()), first)
    # more tokens behind it, and beams, each on a copy of its rows
    begun = prefill(model, x[:, :12], mask[:, :12])
    assert_close(logits(model, **begun.inputs(x[:, 12:])), whole)
    longer = prefill(model, x, mask, begun.cache)
    assert_close(logits(model, **longer.inputs()), whole)
    beams = {**SETTINGS, "num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
    anew = model.generate(x, attention_mask=mask, **beams).sequences_scores
    assert_close(model.generate(**state.inputs(), **beams).sequences_scores, anew)


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_5_text"])
def test_another_model_refuses_a_saved_prompt(model_type: str, tmp_path: Path) -> None:
    prefill(ours(model_type), ids()).save_pretrained(tmp_path)
    other = "mamba" if model_type == "mamba2" else "qwen3_next"
    wider = {"state_size": 4} if model_type == "mamba2" else {"linear_value_head_dim": 4}
    cases: list[tuple[Any, str]] = [
        (ours(model_type, seed=1), "made by other weights"),
        (ours(model_type).to(torch.bfloat16), "made by a model in float32, got one in bfloat16"),
        (ours(other), "belongs to another model: made for model_type"),
        (ours(model_type, **wider), next(iter(wider))),
        (tiny(model_type), "recurrent models after ssmzoo.accelerate"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            load_state(tmp_path, model)


def test_a_state_has_every_name_that_versions_of_transformers_have_for_it() -> None:
    model, x = ours("mamba"), ids()
    state, whole = prefill(model, x), logits(ours("mamba"), input_ids=x)
    inputs = state.inputs()
    cache = inputs.pop(CACHE)
    assert_close(logits(model, **inputs, cache_params=cache), whole)
    with torch.no_grad():
        by_name = [model(x[:, -1:], **{name: state.inputs()[CACHE]}) for name in CACHES]
        for name, output in zip(CACHES, by_name, strict=True):
            assert torch.equal(output.logits, by_name[0].logits)
            assert getattr(output, name) is output[MIXER_CACHE]
        with pytest.raises(ValueError, match="cache_params must be left out beside cache"):
            model(x, cache=cache, cache_params=cache)
        with pytest.raises(ValueError, match="holds 2 sequences, the input has 1"):
            model(x[:1], cache=cache)
    model.train()(x[:, -1:], cache=state.inputs()[CACHE])


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = ours("qwen3_5_text")
    cache = prefill(model, ids()).cache
    held = cache.get_states()
    cases = [
        ([held[0], {"keys": held[1]["keys"]}], "layer 1 has no state 'keys'"),
        ([held[1], held[0]], "layer 0 has no state 'keys'"),
        ([held[0] | {"conv_states.9": torch.ones(2, 1)}, held[1]], "conv_states.9"),
    ]
    for states, message in cases:
        broken = copy.deepcopy(cache)
        broken.get_states = lambda states=states: states  # type: ignore[method-assign]
        broken.write(tmp_path / "state.safetensors", {}, {})
        with pytest.raises(ValueError, match=f"damaged StateCache: .*{message}"):
            StockCache.read(tmp_path / "state.safetensors", model.config, "cpu")


def test_what_keeps_no_state_is_refused() -> None:
    fields = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **fields))
    for model in (llama, tiny("jamba")):
        with pytest.raises(ValueError, match=r"after ssmzoo\.accelerate\(model\), got"):
            prefill(model, torch.ones(1, 4, dtype=torch.long))
    hybrid, x = ours("jamba"), ids()
    with pytest.raises(TypeError, match="cache must be a StockCache, got DynamicCache"):
        prefill(hybrid, x, cache=DynamicCache(config=hybrid.config))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belongs to another model"):
        prefill(hybrid, x, cache=prefill(ours("bamba"), x).cache)
    with pytest.raises(ValueError, match=r"has seen 20 tokens, and input_ids .* must have more"):
        hybrid.generate(x[:, :20], cache=prefill(hybrid, x).cache, **SETTINGS)
    windows = LlamaConfig(num_hidden_layers=1, sliding_window=4, **fields)
    with pytest.raises(ValueError, match="to be saved or rolled back, got DynamicSlidingWindow"):
        StockCache(windows)


def test_gradient_checkpointing_which_writes_into_no_cache_is_refused() -> None:
    model = ours("jamba").train()
    model.gradient_checkpointing_enable()
    cache = StockCache(model.recurrent_backbone.config)
    with pytest.raises(ValueError, match="cache must be left out where JambaModel"):
        model(ids(), cache=cache)
    assert cache.seen_tokens == 0
    with torch.no_grad():
        model.eval()(ids(), cache=cache)
    assert cache.seen_tokens == LENGTH


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_a_call_without_input_gets_the_stock_error(model_type: str) -> None:
    model = ours(model_type)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(cache=StockCache(model.recurrent_backbone.config))


# --- tokens that are taken back -------------------------------------------------------------------


@every_type
@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_the_rest_was_never_read(model_type: str) -> None:
    model, (x, mask) = ours(model_type), padded()
    places = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if model_type not in PURE else {}

    def read(begin: int, end: int, **cache: Any) -> Tensor:
        given = {name: p[:, begin:end] for name, p in places.items()}
        return model(
            x[:, begin:end], attention_mask=mask[:, :end], use_cache=True, **given, **cache
        ).logits

    whole = read(0, LENGTH)
    cache = prefill(model, x[:, :5], mask[:, :5]).cache
    read(4, 6, cache=cache)
    with pytest.raises(RuntimeError, match="crop needs recorded calls"):
        copy.deepcopy(cache).crop(-1)
    cache.activate_past_recording()
    for begin, end in ((6, 9), (9, 10), (10, 14), (14, 17)):  # one token runs as a program
        read(begin, end, cache=cache)
    for kept in (15, 12, 8):
        cropped = copy.deepcopy(cache)
        cropped.crop(kept - 17)
        assert cropped.get_seq_length() == kept
        assert_close(read(kept, LENGTH, cache=cropped)[1], whole[1, kept:])
        with pytest.raises(RuntimeError, match="crop needs recorded calls"):
            copy.deepcopy(cropped).crop(-LENGTH)


@every_type
@pytest.mark.long
def test_assisted_decoding_chooses_what_greedy_decoding_chooses(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = ours(model_type), ids(rows=1).repeat(1, 2)
    back: list[int] = []

    def crop(self: RecurrentCache, max_length: int) -> None:
        back.append(int(max_length))
        whole(self, max_length)

    whole = RecurrentCache.crop
    monkeypatch.setattr(RecurrentCache, "crop", crop)
    greedy = logits(model, input_ids=x)
    assistant = ours(model_type)  # near enough that some of its tokens stay
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=draw))
    begun = prefill(model, x[:, :30])
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        back.clear()
        assert_close(logits(model, input_ids=x, **how), greedy)
        assert min(back) < 0 or "assistant_model" in how
        assert_close(logits(model, **begun.inputs(x[:, 30:]), **how), greedy)
        # the cache that comes back has read all but the last token
        out = model.generate(x, **SETTINGS, return_dict_in_generate=True, **how)
        cache, tokens = out[CACHE], out.sequences
        assert cache.get_seq_length() == tokens.shape[1] - 1
        with torch.no_grad():
            step = model(tokens[:, -1:], cache=cache).logits[:, -1]
            assert_close(step, model(tokens, use_cache=False).logits[:, -1])


@pytest.mark.parametrize("model_type", ["mamba", "zamba", "qwen3_next"])
def test_restored_models_refuse_what_only_our_cache_can(model_type: str) -> None:
    model, x = tiny(model_type), ids(rows=1)
    before = {name: getattr(type(model), name) for name in dir(type(model))}
    lookup = {"prompt_lookup_num_tokens": 3, **SETTINGS}
    ssmzoo.accelerate(model)
    state = prefill(model, x)
    model.generate(x, **lookup)
    ssmzoo.restore(model)
    after = {name: getattr(type(model), name) for name in dir(type(model))}
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if not name.startswith("__"))
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(x, **lookup)
    if model_type != "mamba":  # transformers' own code goes on from it, where it has this name
        assert_close(logits(model, **state.inputs()), logits(model, input_ids=x))


def test_assisted_decoding_refuses_what_it_cannot_roll_back() -> None:
    pure, hybrid, x = ours("mamba"), ours("jamba"), ids(rows=1)
    lookup = {"prompt_lookup_num_tokens": 3, **SETTINGS}
    with torch.no_grad():
        other = hybrid(x[:, :5], use_cache=True)[CACHE]
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (hybrid, {CACHE: other, **lookup}, ValueError, "prefill read, or none, got a"),
        (pure, {"assistant_early_exit": 1, **SETTINGS}, ValueError, "assistant_early_exit must be"),
    ]
    if not torch.backends.cuda.is_built():  # which has no stream to offload in without a GPU
        offloaded = {"cache_implementation": "offloaded", **lookup}
        cases.append((hybrid, offloaded, ValueError, "cache_implementation"))
    with pytest.raises((ValueError, RuntimeError), match=r"use_cache=True|requires a cache"):
        pure.generate(x, use_cache=False, **lookup)  # transformers' own words, by its version
    if MIXER_CACHE != CACHE:
        cases.append((pure, {CACHE: other, **SETTINGS}, TypeError, "must be the state of a prompt"))
    for model, inputs, kind, message in cases:
        with pytest.raises(kind, match=message):
            model.generate(x, **inputs)


def test_a_call_with_a_mask_of_another_shape_is_rolled_back_as_a_whole_only() -> None:
    model, x = ours("qwen3_next"), ids(rows=1)
    cache = prefill(model, x[:, :11]).cache
    cache.activate_past_recording()
    mask = torch.zeros(1, 1, 5, 15)
    with torch.no_grad():
        model(
            x[:, 10:15],
            attention_mask={"full_attention": mask, "linear_attention": None},
            cache=cache,
        )
    with pytest.raises(RuntimeError, match="as a whole, got 2 of its 5 tokens"):
        cache.crop(-2)
    cache.crop(-5)
    assert cache.get_seq_length() == 10


# --- what inspect sees ----------------------------------------------------------------------------


def backbone(model: Any) -> Any:
    return model.base_model


@every_type
def test_inspect_measures_what_the_stock_code_does(model_type: str) -> None:
    model, x = backbone(tiny(model_type)), ids()
    stock = measure_layers(model, x)
    ssmzoo.accelerate(model)
    found = measure_layers(model, x)
    assert (found.others, found.state_bytes) == (stock.others, stock.state_bytes)
    assert [a.layer for a in found.layers] == [b.layer for b in stock.layers]
    for layer, judge in zip(found.layers, stock.layers, strict=True):
        assert (layer.source, judge.decay) == ("measured", None)
        assert_close(layer.kernel, judge.kernel)
        assert layer.decay is not None
        assert bool((layer.decay > 0).all() & (layer.decay <= 1).all())
    attention = set(range(model.config.num_hidden_layers)) - {a.layer for a in found.layers}
    assert attention <= found.others.keys()
    assert (found.state_bytes is None) == (model_type not in PURE)


@every_type
def test_the_decay_is_that_of_what_the_scan_runs_with(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = backbone(ours(model_type)), ids()
    kept: list[Tensor] = []
    scan, attend = selective_scan.selective_scan, linear_attention.gated_linear_attention

    def watched_scan(u: Tensor, dt: Tensor, A: Tensor, *rest: Any, **named: Any) -> Any:
        bias = rest[4]  # behind B, C, D and the gate
        step = torch.log1p(torch.exp(dt.double() + (0 if bias is None else bias.double())))
        kept.append((step.mean((0, 1))[:, None] * A.double()).exp())
        return scan(u, dt, A, *rest, **named)

    def watched_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **named: Any):
        kept.append(g.double().mean((0, 1)).exp().view(v.shape[2], -1))
        return attend(q, k, v, g, *rest, **named)

    monkeypatch.setattr(selective_scan, "selective_scan", watched_scan)
    monkeypatch.setattr(linear_attention, "gated_linear_attention", watched_attention)
    with torch.no_grad():
        model(x, use_cache=False)
    judge = torch.cat(kept)
    kept.clear()
    found = torch.cat([layer.decay for layer in measure_layers(model, x).layers])  # type: ignore[misc]
    assert found.shape[1] == {**dict.fromkeys(SCAN, 8), "kimi_linear": 8}.get(model_type, 1)
    assert_close(found, judge)


def test_constant_step_sizes_decay_by_their_closed_form() -> None:
    model = backbone(ours("mamba"))
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer.dt_proj.weight.zero_()
    for layer, found in zip(model.layers, measure_layers(model, ids()).layers, strict=True):
        step = nn.functional.softplus(layer.mixer.dt_proj.bias.detach().double())
        exact = torch.exp(-step[:, None] * layer.mixer.A_log.detach().double().exp())
        assert_close(found.decay, exact)  # type: ignore[arg-type]


def test_a_layer_without_a_recurrent_mixer_cannot_be_chosen() -> None:
    model = backbone(ours("qwen3_5_text"))
    with pytest.raises(ValueError, match="must be recurrent ones, got 1: full_attention"):
        measure_layers(model, ids(), layers=[0, 1])
    with pytest.raises(ValueError, match=r"layers must be in \[0, 1\], got 7"):
        measure_layers(model, ids(), layers=[7])
