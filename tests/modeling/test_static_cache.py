"""A state whose buffers are written in place: equal to the usual one, and nothing moves.

The kit's check `fullgraph` compiles a prompt and its steps for every family; here is the rest. Both
caches run the same code, so without compilation results must have the same bits.
"""

import copy
import logging

import pytest
import torch
from tests.zoo import language_model
from transformers import CompileConfig

from ssmzoo.family import families
from ssmzoo.modeling import StateCache, StaticStateCache
from ssmzoo.modeling.compat import CACHE
from ssmzoo_kernels.dispatch import watch

ATTENTION = {"num_hidden_layers": 2, "mixer_types": ["mamba", "attention"], "use_rope": True}
NAMES = [*sorted(families()), "attention"]
ROOM = 128


def build(name, **fields):
    if name == "attention":  # whose state grows
        name, fields = "bmojo", {**ATTENTION, **fields}
    return language_model(name, **fields)


@pytest.fixture(scope="module", params=NAMES)
def every_model(request):
    return build(request.param)


# states that are replaced, rings that are written in place, and one that grows
@pytest.fixture(scope="module", params=["longhorn", "rtf", "bmojo", "attention"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def longhorn():
    return build("longhorn")


@pytest.fixture(scope="module")
def attention():
    return build("attention")


@pytest.fixture
def ids():
    return torch.randint(1, 96, (3, ROOM), generator=torch.Generator().manual_seed(0))


def static(model, room=ROOM):
    return StaticStateCache(model.config, room if model.config.state_grows else None)


@torch.no_grad()
def read(model, cache, ids, *lengths):
    """Return the logits of pieces read one after the other."""
    pieces = ids[:, : sum(lengths)].split(lengths, dim=1)
    return torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)


def places(cache):
    states = [state for layer in cache.layers for state in layer.buffers.values()]
    return [state.data_ptr() for state in states]


def ragged(ids):
    ids, mask = ids[:, :11], torch.ones_like(ids[:, :11])
    mask[0, :4] = mask[2, :1] = 0
    return ids, mask


# --- steps -------------------------------------------------------------------------------------


def test_a_hundred_steps_write_where_the_prompt_wrote(every_model, ids):
    model = every_model
    cache, usual = static(model), StateCache(model.config)
    with watch() as kernels:
        got = read(model, cache, ids, 20)
        where, size = places(cache), cache.nbytes
        got = torch.cat([got, read(model, cache, ids[:, 20:], *[1] * 100)], dim=1)
    with watch() as usually:
        expected = read(model, usual, ids, 20, *[1] * 100)
    assert torch.equal(got, expected)
    in_c = ("token_step", "cpu")
    assert (in_c in kernels) is (in_c in usually)
    assert (places(cache), cache.nbytes) == (where, size)
    assert (cache.get_seq_length(), cache.batch_size) == (120, 3)


def test_a_cache_that_was_reset_has_its_memory_and_no_past(model, ids):
    cache = static(model)
    read(model, cache, ids, 9, 1)
    where = places(cache)
    cache.reset()
    assert cache.seen_tokens == 0
    again = ids[:, 50:]
    expected = read(model, StateCache(model.config), again, 7, 1, 3)
    assert torch.equal(read(model, cache, again, 7, 1, 3), expected)
    assert places(cache) == where


def test_modes_of_autograd_may_change_between_calls(model, ids):
    cache = static(model)
    with torch.inference_mode():
        first = read(model, cache, ids, 5, 1)
    second = read(model, cache, ids[:, 6:], 1, 4)
    with torch.inference_mode():
        third = read(model, cache, ids[:, 11:], 1)
    expected = read(model, StateCache(model.config), ids, 5, 1, 1, 4, 1)
    assert torch.equal(torch.cat([first, second, third], dim=1), expected)


def test_rows_change_in_place_unless_there_are_others(model, ids):
    cache, usual = static(model), StateCache(model.config)
    for each in (cache, usual):
        read(model, each, ids, 9)
    where = places(cache)
    changes = [
        ("reorder_cache", torch.tensor([2, 0, 1]), True),
        ("reset_rows", torch.tensor([1]), True),
        ("batch_repeat_interleave", 2, False),
        ("batch_select_indices", torch.tensor([5, 0, 2]), False),
    ]
    for method, argument, stays in changes:
        for each in (cache, usual):
            getattr(each, method)(argument)
        rows = ids.repeat(2, 1)[: usual.batch_size, 9:]
        assert torch.equal(read(model, cache, rows, 1, 2), read(model, usual, rows, 1, 2))
        assert (places(cache) == where) is stays
        where = places(cache)


def test_a_copy_has_memory_of_its_own(model, ids):
    cache = static(model)
    read(model, cache, ids, 9, 1)
    copied = copy.deepcopy(cache)
    assert not set(places(copied)) & set(places(cache))
    read(model, cache, ids[:, 10:], 4)
    expected = read(model, StateCache(model.config), ids, 9, 1, 2)[:, -2:]
    assert torch.equal(read(model, copied, ids[:, 10:], 2), expected)
    assert (cache.seen_tokens, copied.seen_tokens) == (14, 12)


def test_a_copy_made_under_inference_mode_is_written_into_outside(model, ids):
    cache = static(model)
    with torch.inference_mode():
        read(model, cache, ids, 9)
        copied = copy.deepcopy(cache)
    expected = read(model, cache, ids[:, 9:], 2, 1)
    assert torch.equal(read(model, copied, ids[:, 9:], 2, 1), expected)
    assert copied.seen_tokens == 12


def test_tokens_are_taken_back_in_place(model, ids):
    cache = static(model)
    read(model, cache, ids, 9)
    where = places(cache)
    cache.activate_past_recording()
    assert not cache.is_compileable, "a list of snapshots grows"
    read(model, cache, ids[:, 9:], 1, 4)
    cache.crop(11)
    assert (cache.seen_tokens, places(cache)) == (11, where)
    got = read(model, cache, ids[:, 11:], 3)
    with torch.no_grad():
        expected = model(ids[:, :14], use_cache=False).logits[:, -3:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert places(cache) == where


@pytest.mark.parametrize("kind", [StateCache, StaticStateCache])
@pytest.mark.parametrize("room", [30, ROOM, ROOM + 30])
def test_a_file_is_continued_in_a_cache_of_either_kind(model, ids, kind, room, tmp_path):
    if not model.config.state_grows and room != ROOM:
        return  # it has no room
    usual, saved = StateCache(model.config), static(model)
    made = kind(model.config) if kind is StateCache else saved
    for each in {usual, made}:
        read(model, each, ids, 12)
    made.save(tmp_path / "state.safetensors")
    options = {"max_cache_len": room} if model.config.state_grows else {}
    cache = StaticStateCache.load(tmp_path / "state.safetensors", model.config, **options)
    back = StateCache.load(tmp_path / "state.safetensors", model.config)
    expected = read(model, usual, ids[:, 12:], 1, 3)
    for each in (cache, back):
        assert each.seen_tokens == 12
        got = read(model, each, ids[:, 12:], 1, 3)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_is_read_into_a_given_cache(longhorn, ids):
    state = longhorn.prefill(ids[:, :9], cache=static(longhorn), chunk_size=4)
    assert type(state.inputs()[CACHE]) is StaticStateCache
    got = longhorn.generate(**state.inputs(), do_sample=False, max_new_tokens=4, pad_token_id=0)
    usual = longhorn.prefill(ids[:, :9], chunk_size=4).inputs()
    expected = longhorn.generate(**usual, do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert torch.equal(got, expected)


# --- generate ----------------------------------------------------------------------------------


def generate(model, ids, mask=None, **options):
    torch.manual_seed(3)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        **{"max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0},
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 0},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 4},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
    ],
    ids=["greedy", "sampling", "beams", "chunks", "lookup"],
)
def test_generate_gives_the_same_by_either_cache(model, ids, options):
    ids, mask = ragged(ids)
    if "prompt_lookup_num_tokens" in options:
        ids, mask = ids[:1].repeat(1, 2), None
    usual = generate(model, ids, mask, **options)
    got = generate(model, ids, mask, cache_implementation="static", **options)
    assert type(got[CACHE]) is StaticStateCache
    assert torch.equal(got.sequences, usual.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, usual.logits, strict=True))


def test_a_lookup_that_proposes_past_the_end_has_room(attention, ids):
    model = copy.deepcopy(attention)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(attention.lm_head.weight))
    prompt = torch.zeros_like(ids[:1, :9])  # all scores are equal: every proposal of 0 is right
    options = {"do_sample": False, "prompt_lookup_num_tokens": 4, "pad_token_id": 1}
    options |= {"cache_implementation": "static", "return_dict_in_generate": True}
    for new in range(3, 12):
        got = model.generate(prompt, max_new_tokens=new, **options)
        assert got[CACHE].max_cache_len == 9 + new + 2
        assert got.sequences.tolist() == [[0] * (9 + new)]
        small = static(model, 9 + new + 1)
        with pytest.raises(ValueError, match=f"room .* generate may read {9 + new + 2}"):
            model.generate(prompt, cache=small, max_new_tokens=new, **options)


def test_generate_writes_into_a_given_cache_again_and_again(model, ids):
    prompt, cache = ids[:, :9], static(model)
    first = generate(model, prompt, do_sample=False, cache=cache)
    where = places(cache)
    for begin in (0, 40):
        cache.reset()
        prompt = ids[:, begin : begin + 9]
        got = generate(model, prompt, do_sample=False, cache=cache)
        assert torch.equal(got.sequences, generate(model, prompt, do_sample=False).sequences)
        assert got[CACHE] is cache
        assert places(cache) == where
    assert first[CACHE] is cache


def compiling(backend):
    compiles = CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiles._compile_all_devices = True  # which generate does on GPUs alone
    return {"cache_implementation": "static", "compile_config": compiles}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("name", ["longhorn", "attention"])
def test_generate_compiles_one_graph_for_prompts_of_all_lengths(name, ids):
    fields = {"num_hidden_layers": 1}
    if name == "attention":
        fields["mixer_types"] = ["attention"]
    model, graphs = build(name, **fields), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    options = compiling(count) | ({"max_cache_len": ROOM} if name == "attention" else {})
    torch._dynamo.reset()
    for length in (7, 11, 23):
        prompt, mask = ids[:, :length], torch.ones_like(ids[:, :length])
        mask[0, :3] = 0
        usual = generate(model, prompt, mask, do_sample=False)
        got = generate(model, prompt, mask, do_sample=False, **options)
        for logits, expected in zip(got.logits, usual.logits, strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.long
def test_generate_compiles_a_padded_prompt_in_chunks(ids):
    model, (ids, mask) = build("longhorn", num_hidden_layers=1), ragged(ids)
    torch._dynamo.reset()
    usual = generate(model, ids, mask, do_sample=False)
    got = generate(model, ids, mask, do_sample=False, prefill_chunk_size=6, **compiling("eager"))
    torch.testing.assert_close(got.logits, usual.logits, rtol=1e-5, atol=1e-5)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "room", "kind", "message"),
    [
        ("attention", None, ValueError, "max_cache_len must be given"),
        ("attention", 0, ValueError, "max_cache_len must be at least 1, got 0"),
        ("attention", 8.0, TypeError, "max_cache_len must be an integer, got a float"),
        ("longhorn", 64, ValueError, "max_cache_len must be left out, got 64"),
    ],
)
def test_a_room_that_means_nothing_is_refused(name, room, kind, message):
    with pytest.raises(kind, match=message):
        StaticStateCache(build(name).config, room)


def test_a_cache_that_is_too_small_is_named(attention, ids):
    cache = static(attention, 12)
    with pytest.raises(ValueError, match="max_cache_len = 12 tokens, got 0 and 13 more"):
        read(attention, cache, ids, 13)
    read(attention, cache, ids, 10, 1, 1)
    with pytest.raises(ValueError, match="max_cache_len = 12 tokens, got 12 and 1 more"):
        read(attention, cache, ids, 1)
    cache.reset()
    with pytest.raises(ValueError, match="max_cache_len = 12 tokens, and generate may read 18"):
        generate(attention, ids[:, :9], cache=cache)
    assert read(attention, cache, ids, 12).shape[1] == 12


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_refuses_a_cache_that_is_too_small(ids):
    model = build("attention", num_hidden_layers=1, mixer_types=["attention"])
    cache = static(model, 12)
    read(model, cache, ids, 10)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        read(compiled, cache, ids, 1, 1)
        with pytest.raises(RuntimeError, match="cache got more tokens than its max_cach"):
            read(compiled, cache, ids, 1)
    finally:
        torch._dynamo.reset()
    assert cache.seen_tokens == 12


def test_other_models_and_batches_are_refused(longhorn, ids):
    cache = static(longhorn)
    read(longhorn, cache, ids, 5)
    cache.reset()
    with pytest.raises(ValueError, match="cache holds 3 sequences, the input has 2"):
        read(longhorn, cache, ids[:2], 5)
    with pytest.raises(ValueError, match=r"cache belongs to another model: .*num_hidden"):
        read(build("longhorn", num_hidden_layers=3), cache, ids, 5)
    with pytest.raises(ValueError, match="an empty StateCache cannot be saved"):
        cache.save("nowhere.safetensors")
    with pytest.raises(ValueError, match=r"state 'conv' of layer 0 must stay .*float32.*float64"):
        read(copy.deepcopy(longhorn).double(), cache, ids, 5)
    assert torch.equal(
        read(longhorn, cache, ids, 5, 1), read(longhorn, StateCache(longhorn.config), ids, 5, 1)
    )


def test_a_gradient_through_memory_that_is_written_over_is_refused(longhorn, ids):
    cache = static(longhorn)
    with pytest.raises(ValueError, match=r"must be used under torch.no_grad\(\), got state 'conv'"):
        longhorn(ids, cache=cache)
    assert cache.seen_tokens == 0
    assert cache.batch_size == -1


def test_generate_refuses_a_usual_cache_where_a_static_one_is_asked_for(longhorn, ids):
    past = longhorn.prefill(ids[:, :4]).cache
    with pytest.raises(ValueError, match="cache_implementation='static' needs a StaticStateCache"):
        generate(longhorn, ids[:, :9], cache=past, cache_implementation="static")


def test_generate_says_that_a_room_is_of_no_use(longhorn, ids, caplog):
    logging.Logger.warning_once.cache_clear()
    options = {"cache_implementation": "static", "max_cache_len": 64, "do_sample": False}
    got = generate(longhorn, ids[:, :9], **options)
    assert torch.equal(got.sequences, generate(longhorn, ids[:, :9], do_sample=False).sequences)
    assert "max_cache_len=64 changes nothing" in caplog.text
