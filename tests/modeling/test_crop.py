"""Tokens taken back from a cache: by snapshots of calls, and by reading again what stays."""

import copy

import pytest
import torch
from tests.zoo import language_model

from ssmzoo.family import families
from ssmzoo.modeling.compat import CACHE


def build(name):
    return language_model(name).double()


@pytest.fixture(scope="module")
def model():
    return build("longhorn")


@pytest.fixture
def ids():
    return torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(0))


def read(model, cache, ids):
    with torch.no_grad():
        return model(ids, cache=cache, use_cache=True).cache


def goes_on(model, cache, ids, kept):
    """Compare going on after ``kept`` tokens with reading all at once."""
    assert cache.get_seq_length() == kept
    with torch.no_grad():
        got = model(ids[:, kept:], cache=cache).logits
        whole = model(ids, use_cache=False).logits[:, kept:]
    torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.long
def test_a_cropped_state_continues_as_if_the_rest_was_never_read(name, ids):
    model = build(name)
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    for begin, end in ((4, 5), (5, 10), (10, 11), (11, 14)):
        read(model, cache, ids[:, begin:end])
    for kept in range(4, 15):
        cropped = copy.deepcopy(cache)
        # a number to take back, of some versions of transformers a tensor, or one to keep
        cropped.crop((kept - 14, torch.tensor(kept - 14), kept)[kept % 3])
        goes_on(model, cropped, ids, kept)


@pytest.mark.parametrize("returned", [True, False])
def test_after_assisted_decoding_a_cache_is_as_after_any_other(model, ids, returned, tmp_path):
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, cache = ids[:1].repeat(1, 2), model.prefill(ids[:1]).cache
    got = model.generate(
        ids,
        cache=cache,
        prompt_lookup_num_tokens=3,
        return_dict_in_generate=returned,
        **settings,
    )
    ids = got.sequences if returned else got
    assert not cache.recording, "a snapshot of every later call would be kept"
    assert cache.pending is None
    cache.save(tmp_path / "state.safetensors")
    assert torch.equal(
        model.generate(ids, cache=cache, num_beams=2, **settings),
        model.generate(ids, num_beams=2, **settings),
    )
    assert cache.batch_size == 1  # beams go on from a copy


def test_a_prompt_read_from_a_cropped_cache_can_be_saved(model, ids, tmp_path):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:12]).crop(7)
    prompt = model.prefill(ids[:, :8], cache=cache)
    prompt.save_pretrained(tmp_path)
    goes_on(model, prompt.inputs()[CACHE], ids, 7)
    goes_on(model, cache, ids, 7)


def test_tokens_before_the_last_crop_cannot_be_rolled_back(model, ids):
    cache = read(model, None, ids[:, :4])
    with pytest.raises(RuntimeError, match=r"crop needs recorded calls.* activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:9])
    cache.crop(0)
    read(model, cache, ids[:, 9:11])
    with pytest.raises(RuntimeError, match="call activate_past_recording before the tokens"):
        cache.crop(-3)
    cache.crop(-2)
    goes_on(model, cache, ids, 9)


def test_after_a_crop_inside_a_call_rows_and_files_are_refused(model, ids, tmp_path):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:9])
    cache.crop(-2)
    for call in (
        lambda: cache.save(tmp_path / "state.safetensors"),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(RuntimeError, match="run the model on the next tokens first"):
            call()
    assert not list(tmp_path.iterdir())
    goes_on(model, cache, ids, 7)
    cache.reset()
    assert cache.pending is None


@pytest.mark.parametrize("kept", [5, 7, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_part_of_a_padded_call_can_be_rolled_back(model, ids, side, kept):
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, slice(4, 6) if side == "left" else slice(7, 9)] = 0
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, 4:9], attention_mask=mask[:, :9], cache=cache)
        cache.crop(kept - 9)
        got = model(ids[:, kept:], cache=cache).logits
        for row, real in enumerate(mask[:, :kept].bool()):
            whole = torch.cat([ids[row, :kept][real], ids[row, kept:]])[None]
            expected = model(whole, use_cache=False).logits[0, -got.shape[1] :]
            torch.testing.assert_close(got[row], expected, rtol=1e-10, atol=1e-10)


def test_a_packed_call_is_rolled_back_only_as_a_whole(model, ids):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:1, :9], cu_seqlens=torch.tensor([0, 4, 9]), cache=cache)
    with pytest.raises(RuntimeError, match=r"as a whole, got 2 of its 5 tokens"):
        cache.crop(-2)
    assert cache.get_seq_length() == 9
    cache.crop(-5)
    goes_on(model, cache, ids, 4)


def fails_once(model, monkeypatch):
    """Let the last layer's next call raise, after the others' have run."""
    layer = model.model.layers[-1]
    forward = layer.forward

    def raises(*_):
        monkeypatch.setattr(layer, "forward", forward)
        raise MemoryError

    monkeypatch.setattr(layer, "forward", raises)


def test_a_failed_call_is_not_recorded(model, ids, monkeypatch):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:7])
    fails_once(model, monkeypatch)
    with pytest.raises(MemoryError):
        read(model, cache, ids[:, 7:9])
    read(model, cache, ids[:, 7:8])
    cache.crop(-2)
    goes_on(model, cache, ids, 6)


def test_a_pending_reread_survives_a_failed_call(model, ids, monkeypatch):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:9])
    cache.crop(-2)
    fails_once(model, monkeypatch)
    with pytest.raises(MemoryError):
        read(model, cache, ids[:, 7:])
    goes_on(model, cache, ids, 7)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reset_rows(torch.tensor([0])),
    ],
    ids=["reordered", "selected", "repeated", "reset"],
)
def test_changing_rows_drops_the_recording(model, ids, change):
    cache = read(model, None, ids[:, :4])
    cache.activate_past_recording()
    read(model, cache, ids[:, 4:9])
    before = copy.deepcopy(cache)
    change(cache)
    with pytest.raises(RuntimeError, match="crop needs recorded calls"):
        cache.crop(4)
    before.crop(6)  # into the middle of a call, whose tokens are read with the next
    with pytest.raises(RuntimeError, match="cropped into the middle of a call"):
        change(before)


@pytest.mark.parametrize("name", ["longhorn", "bmojo"])
def test_early_exit_proposals_do_not_change_tokens(name, ids):
    model, options = build(name), {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    layers, expected = model.config.num_hidden_layers, model.generate(ids[:1], **options)
    read = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: read.append(i)) for i, layer in
             enumerate(model.model.layers)]  # fmt: skip
    got = model.generate(ids[:1], assistant_early_exit=1, **options)
    for hook in hooks:
        hook.remove()
    assert torch.equal(got, expected)
    state = model.prefill(ids[:1]).inputs()
    assert torch.equal(model.generate(**state, assistant_early_exit=1, **options), expected)
    assert read.count(0) > read.count(layers - 1)
    model.generation_config.assistant_early_exit = 1
    assert torch.equal(model.generate(ids[:1], **options), expected)
    assert model.config.num_hidden_layers == layers


def test_early_exit_equals_a_model_of_the_first_layers(model, ids):
    shallow = language_model("longhorn", num_hidden_layers=1).double()
    shallow.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        expected = shallow(ids).logits
    deep = copy.deepcopy(model)
    deep.config.num_hidden_layers = 1
    with torch.no_grad():
        assert torch.equal(deep(ids, use_cache=True).logits, expected)


@pytest.mark.parametrize("early", [0, 3, True, "one"])
def test_an_early_exit_beyond_the_layers_is_refused(model, ids, early):
    with pytest.raises(ValueError, match=rf"number of layers from 1 to 2, got {early!r}"):
        model.generate(ids[:1], max_new_tokens=2, pad_token_id=0, assistant_early_exit=early)


def test_after_an_error_in_generate_the_model_is_as_before(model, ids):
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    state = model.prefill(ids[:1]).inputs()
    before = model.generate(ids[:1], **options)
    with torch.no_grad():
        logits = model(ids).logits

    def stop(*_):
        raise InterruptedError("now")

    given = state[CACHE]
    for inputs in ({"input_ids": ids[:1]}, state):
        hook = model.model.norm.register_forward_hook(stop)
        with pytest.raises(InterruptedError):
            model.generate(**inputs, assistant_early_exit=1, **options)
        hook.remove()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids[:1], **options), before)
    assert not given.input_holds_seen
    assert torch.equal(model.generate(**state, **options), before)
