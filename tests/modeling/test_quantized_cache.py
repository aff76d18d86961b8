"""A state in 12 bits: what packing keeps, and that a model reads what was packed, no more."""

import copy
import weakref

import pytest
import torch
from tests.stock_models import tiny
from tests.zoo import OURS
from tests.zoo import language_model as build
from transformers import ContinuousBatchingConfig, GenerationConfig

import ssmzoo
from ssmzoo import load_family
from ssmzoo.modeling import QuantizedStateCache, StateCache
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.quantized_cache import GROUP, QuantizedLayer, pack, unpack

RINGS = {"rtf", "spacetime"}  # whose states do not decay, if RTF's filter is not "modal"
GENERATES = [name for name in OURS if load_family(name).causal_lm_class and name not in RINGS]
GREEDY = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return build("longhorn")


@pytest.fixture
def ids():
    return torch.randint(1, 96, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (64,), (5, 16), (2, 8, 16)])
def test_a_number_is_off_by_half_a_step_at_most(shape, dtype):
    state = torch.randn(3, *shape, dtype=dtype) * torch.logspace(-30, 6, 3, dtype=dtype).view(
        3, *[1] * len(shape)
    )
    packed = pack(state)
    kept = unpack(packed, state.shape[1:], dtype)
    assert (kept.shape, kept.dtype) == (state.shape, dtype)
    groups = torch.nn.functional.pad(
        (state - kept).flatten(1).abs(), (0, -state[0].numel() % GROUP)
    ).unflatten(1, (-1, GROUP))
    for row, off in zip(state.flatten(1), groups, strict=True):
        for largest, error in zip(row.abs().split(GROUP), off, strict=False):
            step = largest.amax() / 2047
            assert error.amax() <= step * (0.5 + 2047 * 3 * torch.finfo(torch.float32).eps)
    assert pack(kept).equal(packed)
    assert not unpack(torch.zeros_like(packed), state.shape[1:], dtype).any()


def test_what_is_no_number_stays_none():
    state = torch.zeros(3, 2 * GROUP)
    state[0, 3], state[1, 3], state[2, 3] = float("nan"), float("inf"), -float("inf")
    kept = unpack(pack(state), state.shape[1:], state.dtype)
    assert kept[:, :GROUP].isnan().all()
    assert not kept[:, GROUP:].any()


DECAYS = {"ssm", "delta_rule", "modes"}  # other states hold inputs, counts and angles


def rounded_by_hand(cache):
    """Round what the cache may round, in a usual cache."""
    cache.set_states(
        [
            {
                n: unpack(pack(x), x.shape[1:], x.dtype) if n in DECAYS else x
                for n, x in held.items()
            }
            for held in cache.get_states()
        ]
    )


@pytest.mark.parametrize("name", [*GENERATES, "modal"])
@torch.no_grad()
def test_every_call_reads_the_packed_state_and_packs_its_own(name, ids):
    model = build("rtf", filter="modal") if name == "modal" else build(name)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ours, usual = QuantizedStateCache(model.config), StateCache(model.config)
    pieces = [(0, 23), (23, 24), (24, 25), (25, 32), (32, 33), (33, 34)]
    for begin, end in pieces:
        # asking for them keeps layers from being read together, with other roundings
        told = {"attention_mask": mask[:, :end], "output_hidden_states": True}
        got = model(ids[:, begin:end], **told, **{CACHE: ours}).logits
        expected = model(ids[:, begin:end], **told, **{CACHE: usual}).logits
        assert got.equal(expected), (begin, end)
        rounded_by_hand(usual)
        if end == 24:
            for cache in (ours, usual):
                cache.batch_select_indices(torch.tensor([2, 0]))
            ids, mask = ids[[2, 0]], mask[[2, 0]]
    assert ours.get_seq_length() == 34


@torch.no_grad()
def test_large_states_take_two_fifths_of_the_memory(ids):
    model = build("longhorn", hidden_size=128)
    sizes = [
        model(ids, **{CACHE: kind(model.config)}).get(CACHE).nbytes
        for kind in (StateCache, QuantizedStateCache)
    ]
    convolutions = 4 * 3 * 3 * 256 * model.config.num_hidden_layers
    assert sizes[1] - convolutions < 0.4 * (sizes[0] - convolutions)


@torch.no_grad()
def test_generate_takes_it_as_transformers_names_it(model, ids):
    quantized = {"cache_implementation": "quantized", **GREEDY}
    cache, tokens, fed = QuantizedStateCache(model.config), ids, ids
    for _ in range(GREEDY["max_new_tokens"]):
        logits = model(fed, use_cache=True, **{CACHE: cache}).logits
        fed = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, fed], dim=1)
    told = model.generate(ids, return_dict_in_generate=True, **quantized)
    assert told.sequences.equal(tokens)
    assert type(told[CACHE]) is QuantizedStateCache
    assert model.generate(ids[:1], prompt_lookup_num_tokens=2, **quantized).shape == (1, 49)
    assert model.generate(ids, num_beams=2, **quantized).shape == (3, 49)
    with pytest.raises(ValueError, match="needs a QuantizedStateCache as cache, or none"):
        model.generate(ids, **{CACHE: StateCache(model.config)}, **quantized)


@torch.no_grad()
def test_a_rolled_back_call_leaves_no_trace(model, ids):
    cache = model(ids, **{CACHE: QuantizedStateCache(model.config)}).get(CACHE)
    cache.activate_past_recording()
    other = copy.deepcopy(cache)
    model(ids[:, :5], **{CACHE: cache})
    cache.crop(-5)
    token = ids[:, :1]
    assert model(token, **{CACHE: cache}).logits.equal(model(token, **{CACHE: other}).logits)


@torch.no_grad()
def test_rows_start_anew(model, ids):
    cache = model(ids, **{CACHE: QuantizedStateCache(model.config)}).get(CACHE)
    cache.reset_rows([1])
    got = model(ids[:, :1], **{CACHE: cache}).logits[1]
    fresh = model(ids[1:2, :1], **{CACHE: QuantizedStateCache(model.config)}).logits[0]
    torch.testing.assert_close(got, fresh)


@torch.no_grad()
def test_one_layers_state_is_in_full_at_a_time(ids, monkeypatch):
    alive, most = weakref.WeakSet(), []
    own = QuantizedLayer.unpacked

    def unpacked(self, states):
        found = own(self, states)
        alive.update(x for name, x in found.items() if name in DECAYS)
        most.append(len(alive))
        return found

    model = build("longhorn", num_hidden_layers=5)
    cache = model(ids, **{CACHE: QuantizedStateCache(model.config)}).get(CACHE)
    monkeypatch.setattr(QuantizedLayer, "unpacked", unpacked)
    for token in ids[:, :3].split(1, dim=1):
        model(token, **{CACHE: cache})
    assert len(most) == 15
    assert max(most) == 1


@torch.no_grad()
def test_a_copy_has_its_own_kinds(model, ids):
    cache = model(ids, **{CACHE: QuantizedStateCache(model.config)}).get(CACHE)
    wide = copy.deepcopy(model).double()
    other = copy.deepcopy(cache)
    other.set_states([{n: x.double() for n, x in held.items()} for held in cache.full_states()])
    wide(ids[:, :1], **{CACHE: other})
    for kind, held in ((torch.float32, cache), (torch.float64, other)):
        assert {held.full_states()[0]["ssm"].dtype} == {kind}


@torch.no_grad()
def test_files_hold_full_states(model, ids, tmp_path):
    cache = QuantizedStateCache(model.config)
    model(ids, **{CACHE: cache})
    path = tmp_path / "state.safetensors"
    cache.save(path)
    usual = StateCache.load(path, model.config)
    again = QuantizedStateCache.load(path, model.config)
    token = ids[:, :1]
    expected = model(token, **{CACHE: cache}).logits
    assert model(token, **{CACHE: usual}).logits.equal(expected)
    assert model(token, **{CACHE: again}).logits.equal(expected)


def test_answers_of_many_requests_are_those_of_generate_alone(model, ids):
    config = GenerationConfig(cache_implementation="quantized", **GREEDY)
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[2, :17].tolist()]
    rows = ContinuousBatchingConfig(max_requests_per_batch=2, allow_block_sharing=False)
    answers = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=rows
    )
    kept = model.generate(torch.tensor(prompts[:1]), generation_config=config).shape
    assert kept == (1, 49)
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), generation_config=config)
        assert answer.generated_tokens == alone[0, len(prompt) :].tolist()


def test_where_it_is_not_for(model, ids):
    with pytest.raises(ValueError, match=r"cache_config must be left out .*12 bits, got \{'nbits"):
        model.generate(ids, cache_implementation="quantized", cache_config={"nbits": 2}, **GREEDY)
    ring = build("spacetime")
    with pytest.raises(ValueError, match="needs states that decay, and this SpaceTime keeps none"):
        ring.generate(ids, cache_implementation="quantized", **GREEDY)
    with pytest.raises(ValueError, match=r"must be used under torch\.no_grad\(\), got state"):
        model(ids, **{CACHE: QuantizedStateCache(model.config)})
    stock = tiny("mamba")
    ssmzoo.accelerate(stock)
    config = GenerationConfig(cache_implementation="quantized", **GREEDY)
    with pytest.raises(ValueError, match="cache_implementation must be left out, got 'quantized'"):
        stock.generate_batch([ids[0].tolist()], generation_config=config)
