"""The shared modeling layer: bad input, one clear error each, and how rows are cut."""

import copy
import logging
import os

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.zoo import OURS, replica
from torch.nn.utils import parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.family import families, load_family
from ssmzoo.modeling import LayerState, SSMMixer, StateCache, add_state_adapter
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.packing import Sequences, find_packing
from ssmzoo.testing.subject import Subject
from ssmzoo_kernels import use_backend
from ssmzoo_longhorn import FAMILY

FAMILY.register()


def build(**fields):
    torch.manual_seed(0)
    config = FAMILY.config(**{**FAMILY.tiny, **fields})
    return FAMILY.causal_lm_class(config).eval()


def tiny_model(name):
    torch.manual_seed(0)
    family = load_family(name)
    return family.causal_lm_class(family.config(**family.tiny)).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return FAMILY.sequence_classification_class(FAMILY.config(**FAMILY.tiny)).eval()


@pytest.fixture
def ids():
    return IDS.clone()


@pytest.fixture
def cache(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=True).cache


# --- inputs ------------------------------------------------------------------------------------

IDS = torch.randint(96, (2, 7), generator=torch.Generator().manual_seed(0))
ROW, ONES = IDS[:1], torch.ones_like(IDS)
LABELS = r"labels must have shape \[B, L\] = \[2, 7\], got \["
# arguments beside the ids, whose backbone refuses them, too, and arguments of the head alone
REFUSED = [
    (
        ValueError,
        "exactly one of input_ids and inputs_embeds",
        {"inputs_embeds": torch.ones(2, 7, 32)},
    ),
    (ValueError, "exactly one of input_ids and inputs_embeds", {"input_ids": None}),
    (ValueError, r"input_ids must have shape \[B, L\], got \[7\]", {"input_ids": IDS[0]}),
    (ValueError, r"input_ids must have shape .* got \[1, 2, 7\]", {"input_ids": IDS[None]}),
    (TypeError, "input_ids must be int64.*, got torch.float32", {"input_ids": IDS.float()}),
    (TypeError, "input_ids must be int64.*, got torch.bool", {"input_ids": IDS.bool()}),
    (
        ValueError,
        r"input_ids must be in \[0, 95\], got -1",
        {"input_ids": IDS.masked_fill(IDS[1, 3] == IDS, -1)},
    ),
    (
        ValueError,
        r"input_ids must be in \[0, 95\], got 96",
        {"input_ids": IDS.masked_fill(IDS[1, 3] == IDS, 96)},
    ),
    (
        ValueError,
        r"inputs_embeds must have shape \[B, L, 32\], got",
        {"input_ids": None, "inputs_embeds": torch.ones(2, 7)},
    ),
    (
        ValueError,
        r"inputs_embeds must have shape \[B, L, 32\], got",
        {"input_ids": None, "inputs_embeds": torch.ones(2, 7, 31)},
    ),
    (
        ValueError,
        "attention_mask must cover the 7 new.*6 columns",
        {"attention_mask": torch.ones(2, 6)},
    ),
    (
        ValueError,
        "attention_mask must cover the 7 new.*8 columns",
        {"attention_mask": torch.ones(2, 8)},
    ),
    (
        ValueError,
        r"attention_mask must have shape \[B, L\] = \[2, 7\]",
        {"attention_mask": torch.ones(3, 7)},
    ),
    (TypeError, "attention_mask must be a tensor", {"attention_mask": [[1] * 7] * 2}),
    (ValueError, "cu_seqlens needs .*, got a batch of 2", {"cu_seqlens": torch.tensor([0, 3, 7])}),
    *[
        (
            ValueError,
            "cu_seqlens must rise from 0 to L = 7",
            {"input_ids": ROW, "cu_seqlens": torch.tensor(ends)},
        )
        for ends in ([0, 3], [1, 7], [0, 5, 3, 7], [0, 8])
    ],
    (
        ValueError,
        r"cu_seqlens must have shape \[S \+ 1\]",
        {"input_ids": ROW, "cu_seqlens": torch.tensor([[0, 7]])},
    ),
    (
        TypeError,
        "cu_seqlens must be .*int64 tensor.*float32",
        {"input_ids": ROW, "cu_seqlens": torch.tensor([0.0, 7.0])},
    ),
    (
        ValueError,
        r"position_ids must have shape \[B, L\] = \[2, 7\]",
        {"position_ids": torch.arange(6)[None]},
    ),
    (TypeError, "cache must be a StateCache, got tuple", {CACHE: ((1,),)}),
    (TypeError, "'atention_mask'; did you mean 'attention_mask'", {"atention_mask": ONES}),
    (ValueError, "no attention weights are kept", {"output_attentions": True}),
]
REFUSED_BY_HEAD = [
    (ValueError, "labels need all logits", {"labels": IDS, "logits_to_keep": 1}),
    (ValueError, "shift_labels need.* logits_to_keep", {"shift_labels": IDS, "logits_to_keep": 1}),
    (ValueError, LABELS, {"labels": IDS[:, 1:]}),
    (ValueError, r"labels must have shape \[B, L\], got \[7\]", {"labels": IDS[0]}),
    (ValueError, r"shift_labels must have shape \[B, L\], got \[7\]", {"shift_labels": IDS[0]}),
    (TypeError, "^labels must be int64, got torch.int32", {"labels": IDS.int()}),
    (TypeError, "^shift_labels must be int64, got torch.int32", {"shift_labels": IDS.int()}),
]


@pytest.mark.parametrize(("error", "message", "given"), REFUSED + REFUSED_BY_HEAD)
def test_arguments_that_do_not_fit_are_named(model, error, message, given):
    by_head = any(given is row[2] for row in REFUSED_BY_HEAD)
    for called in (model,) if by_head else (model, model.model):
        with pytest.raises(error, match=message):
            called(**{"input_ids": IDS, **given})


@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_are_refused_and_the_cache_survives(model, cache, packed):
    empty = torch.zeros(2, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="at least one token, got L = 0"):
        model(empty, cache=cache)
    with pytest.raises(ValueError, match="at least one token, got L = 0"):
        model(inputs_embeds=torch.zeros(1 if packed else 2, 0, 32))
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("grad", [False, True])
def test_an_empty_batch_gives_no_rows(name, grad):
    family, none = load_family(name), torch.zeros(0, 5, dtype=torch.long)
    model = family.causal_lm_class(family.config(**family.tiny))
    with torch.set_grad_enabled(grad):
        output = model.eval()(none, use_cache=True)
        assert output.logits.shape == (0, 5, 96)
        for length in (1, 3):
            assert model(none[:, :length], cache=output.cache).logits.shape == (0, length, 96)


@pytest.mark.parametrize("name", OURS)
def test_other_names_of_fields_come_before_what_follows_from_them(name):
    family = load_family(name)
    named = family.config(d_model=192, n_layer=3, vocab_size=9)
    plain = family.config(hidden_size=192, num_hidden_layers=3, vocab_size=9)
    assert named.to_dict() == plain.to_dict()
    assert family.config(next(iter(family.presets)), d_model=384).hidden_size == 384
    with pytest.raises(ValueError, match=r"d_model is another name of hidden_size; .* 32 and 16"):
        family.config(hidden_size=16, d_model=32)
    if name == "dss":
        assert not family.config(version="softmax").use_cache
    if name == "longhorn":
        assert type(family.config(beta_bias_init=1).dt_bias_init) is float


def test_a_saved_configuration_comes_back_with_every_field(tmp_path):
    family = load_family("longhorn")
    changed = {"rms_norm_eps": 1e-3, "norm_type": "layer", "prenorm": False, "mlp_type": "swiglu"}
    changed |= {"intermediate_size": 24, "dropout": 0.1, "embedding_dropout": 0.2}
    changed |= {"tie_dropout": True, "drop_path_rate": 0.3, "pooling": "mean", "use_cache": False}
    changed |= {"classifier_bias": True, "residual_in_fp32": False, "initializer_range": 0.1}
    changed |= {"tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 2}
    config = family.config(**{**family.tiny, **changed, "eos_token_id": [3, 4]})
    config.save_pretrained(tmp_path)
    saved = family.config_class.from_pretrained(tmp_path)
    assert {name: getattr(saved, name) for name in changed} == changed


@pytest.mark.parametrize("name", OURS)
def test_offloaded_parameters_are_fetched(name):
    from accelerate import cpu_offload

    family = load_family(name)
    ids, fields = torch.randint(96, (2, 7)), {**family.tiny, "directions": "both-separate"}
    cases = [
        (family.causal_lm_class, family.tiny, {"input_ids": ids}),
        (family.sequence_classification_class, fields, {"input_ids": ids}),
    ]
    if family.forecasting_class is not None:
        series = {**family.tiny, "input_channels": 2}
        values = {"input_values": torch.randn(2, 9, 2), "labels": torch.randn(2, 1, 2)}
        cases.append((family.forecasting_class, series, values))
    for kind, chosen, inputs in cases:
        model = kind(family.config(**chosen)).eval()
        with torch.no_grad():
            own = model(**inputs).logits
            cpu_offload(model, execution_device=torch.device("cpu"))
            assert torch.equal(model(**inputs).logits, own)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("wrong", [-1, 96])
def test_a_label_outside_the_vocabulary_is_named_and_minus_100_is_none(model, ids, name, wrong):
    targets = ids.clone()
    targets[0, :3] = -100
    assert model(ids, **{name: targets}).loss.isfinite()
    targets[1, 3] = wrong
    with pytest.raises(ValueError, match=rf"^{name} must be in \[0, 95\], or -100, got {wrong}$"):
        model(ids, **{name: targets})


def test_unused_labels_may_have_any_value(model, ids):
    first = ids.clone()
    first[:, 0] = -1
    assert torch.equal(model(ids, labels=first).loss, model(ids, labels=ids).loss)
    taken = model(ids, labels=first, shift_labels=ids).loss
    assert torch.equal(taken, model(ids, shift_labels=ids).loss)
    own = copy.deepcopy(model)
    own.loss_function = lambda logits, labels, **_: (labels == -1).sum()
    assert own(ids, labels=torch.full_like(ids, -1)).loss > 0


# --- padding and packing -----------------------------------------------------------------------


@torch.no_grad()
def test_padding_between_tokens_changes_neither_logits_nor_loss(model, ids):
    mask = torch.ones_like(ids)
    mask[1, 3] = mask[1, 5:] = 0
    real, labels = mask.bool(), ids.masked_fill(mask == 0, -100)
    padded = model(ids[1:], attention_mask=mask[1:], labels=labels[1:], output_hidden_states=True)
    alone = model(ids[1:, real[1]], labels=ids[1:, real[1]], output_hidden_states=True)
    torch.testing.assert_close(padded.logits[:, real[1]], alone.logits)
    torch.testing.assert_close(padded.loss, alone.loss)
    for shown, wanted in zip(padded.hidden_states, alone.hidden_states, strict=True):
        torch.testing.assert_close(shown[:, real[1]], wanted)
    both = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(both[real], torch.cat([model(ids[:1]).logits[0], alone.logits[0]]))


def test_packed_labels_never_cross_a_boundary(model, ids):
    packed, ends = ids.reshape(1, -1), torch.tensor([0, 7, 14])
    with torch.no_grad():
        loss = model(packed, labels=packed, cu_seqlens=ends).loss
        rows = model(ids, labels=ids).loss
        whole = model(packed, labels=packed).loss
        changed = packed.clone()
        changed[0, 7] = (packed[0, 7] + 1) % 96  # as a label only; the first token of the second
        relabelled = model(packed, labels=changed, cu_seqlens=ends).loss
        unpacked = model(packed, labels=changed).loss
    torch.testing.assert_close(loss, rows)
    assert torch.equal(relabelled, loss)
    assert not torch.equal(unpacked, whole)


def test_an_empty_sequence_takes_no_label_from_its_neighbours(model, ids):
    with torch.no_grad():
        expected = model(ids[:1], labels=ids[:1]).loss
        for ends in ([0, 0, 7], [0, 7, 7]):
            got = model(ids[:1], labels=ids[:1], cu_seqlens=torch.tensor(ends)).loss
            torch.testing.assert_close(got, expected)


def test_left_padding_changes_no_loss(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, labels=labels).loss
        long, short = (model(row, labels=row).loss for row in (ids[:1], ids[1:, 3:]))
    torch.testing.assert_close(got, (6 * long + 3 * short) / 9)


def test_shifted_labels_are_taken_as_they_are_in_place_of_labels(model, ids):
    packed, ends = ids.reshape(1, -1), torch.tensor([0, 7, 14])
    shifted = torch.nn.functional.pad(packed[:, 1:], (0, 1), value=-100)
    others = shifted.clone()
    others[0, 6] = (shifted[0, 6] + 1) % 96  # behind the last token of the first
    with torch.no_grad():
        expected = model(packed, labels=packed).loss
        assert torch.equal(model(packed, shift_labels=shifted).loss, expected)
        assert torch.equal(model(packed, labels=packed % 5, shift_labels=shifted).loss, expected)
        across = model(packed, shift_labels=shifted, cu_seqlens=ends).loss
        changed = model(packed, shift_labels=others, cu_seqlens=ends).loss
    assert not torch.equal(across, changed)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_gradient_can_be_retained_at_every_hidden_state(padding, ids):
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    outputs = build().model(ids, attention_mask=mask, output_hidden_states=True)
    for hidden_states in outputs.hidden_states:
        hidden_states.retain_grad()
    outputs.last_hidden_state[1, -1, 0].backward()
    for hidden_states in outputs.hidden_states:
        assert hidden_states.grad[1, padding:].any()
        assert not hidden_states.grad[1, :padding].any()
        assert not hidden_states.grad[0].any()


@torch.no_grad()
def test_a_pad_token_between_others_is_content_where_no_mask_is_given(model):
    ids = torch.tensor([[0, 0, 6, 0, 8, 9, 0], [5, 6, 0, 0, 9, 10, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(model.generate(ids, **options), wanted)
    others = model.generate(ids, attention_mask=(ids != 0).long(), **options)
    assert not torch.equal(others, wanted)  # a mask that is given is as it is


NUMBERS = [[0, 0, 0, 1, 2, 2]]
# by case: mask, position_ids, seq_idx; the offsets that are found and the rows that are no padding
PACKINGS = {
    "no mask": ((None, None, None), None, None),
    "whole rows": (([[1] * 5] * 2, [[*range(5)]] * 2, [[0] * 5] * 2), None, None),
    "columns of earlier tokens": (([[0, 0, 1, 1], [1] * 4], [[2, 3]] * 2, None), None, None),
    "padding is a sequence": (
        ([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], None, None),
        [0, 2, 4, 4, 4, 7, 8, 8, 8, 12],
        [1, 4, 7],
    ),
    "positions that begin anew": ((None, [[0, 1, 2, 0, 0, 1]], None), [0, 3, 4, 6], None),
    "numbers": ((None, None, NUMBERS), [0, 3, 4, 6], None),
    "numbers go before positions": ((None, [[0] * 6], NUMBERS), [0, 3, 4, 6], None),
    "rows are cut, too": ((None, None, [[0, 0, 1], [0, 0, 0]]), [0, 2, 3, 6], None),
    "positions of padding": (([[0, 0, 1, 1]], [[1, 1, 0, 1]], None), [0, 2, 4, 4], [1]),
    "one goes on behind padding": (
        ([[1, 1, 0, 0, 1, 1]], [[0, 1, 0, 0, 2, 3]], None),
        [0, 0, 4, 6],
        [1],
    ),
    "positions count padding": (
        ([[1, 1, 0, 0, 1, 1]], [[0, 1, 2, 3, 4, 5]], None),
        [0, 0, 4, 6],
        [1],
    ),
    "another one behind padding": (
        ([[1, 1, 0, 0, 1, 1]], [[0, 1, 1, 1, 0, 1]], None),
        [0, 2, 4, 6],
        [0, 1],
    ),
}


@pytest.mark.parametrize("case", PACKINGS)
def test_sequences_are_found_where_mask_positions_and_numbers_say(case):
    given, offsets, rows = PACKINGS[case]
    mask, positions, numbers = (None if x is None else torch.tensor(x) for x in given)
    batch, length = next((x for x in (positions, numbers, mask) if x is not None), IDS).shape
    past = 0 if mask is None else mask.shape[1] - length
    packing = find_packing(batch, length, past, mask, positions, numbers, None)
    if offsets is None:
        assert packing is None
        return
    assert packing.offsets.tolist() == offsets
    assert (None if packing.rows is None else packing.rows.tolist()) == rows


def test_padding_between_tokens_goes_behind_them():
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])
    packing = find_packing(2, 4, 0, mask, None, None, None)
    assert packing.order.tolist() == [1, 3, 0, 2, 4, 5, 6, 7]
    assert packing.offsets.tolist() == [0, 0, 2, 4, 4, 8, 8]
    assert packing.mask(2).tolist() == mask.bool().tolist()
    x = torch.arange(8.0).view(2, 4, 1)
    assert torch.equal(packing.batch(packing.flat(x), 2), x)


# --- caches ------------------------------------------------------------------------------------


def test_files_that_hold_no_state_of_the_model_are_refused(model, cache, tmp_path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(ValueError, match="empty StateCache cannot be saved"):
        StateCache(model.config).save(path)
    with pytest.raises(FileNotFoundError):
        StateCache.load(path, model.config)
    cache.save(path)
    with pytest.raises(ValueError, match=r"made for d_state = \d+, got d_state = 5$"):
        StateCache.load(path, build(d_state=5).config)
    family = load_family("bmojo")
    with pytest.raises(ValueError, match=r"made for model_type = '\w+', got model_type = '\w+'$"):
        StateCache.load(path, family.config(**family.tiny))
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"state\.safetensors is not a whole safetensors file"):
            StateCache.load(path, model.config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a saved StateCache"):
        StateCache.load(tmp_path / "model.safetensors", model.config)


def test_the_cache_of_another_kind_is_refused(model, ids):
    with pytest.raises(TypeError, match="cache must be a StateCache, got DynamicCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(TypeError, match="cache must be a StateCache, got DynamicCache"):
        model.generate(ids, max_new_tokens=2, pad_token_id=0, cache=DynamicCache())
    with pytest.raises(TypeError, match="cache must be a StateCache, got tuple"):
        model.prefill(ids, cache=((ids, ids),))


def test_a_reset_cache_starts_a_new_sequence_of_any_batch_size(model, ids, cache):
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.nbytes) == (0, -1, 0)
    one = ids[:1]
    with torch.no_grad():
        fresh = model(one, use_cache=True)
        again = model(one, cache=cache)
        assert torch.equal(again.logits, fresh.logits)
        assert again.cache is cache
        assert (cache.get_seq_length(), cache.batch_size) == (7, 1)
        token = ids[1:, :1]
        following = [model(token, cache=x.cache) for x in (fresh, again)]
    assert torch.equal(following[0].logits, following[1].logits)


@pytest.mark.parametrize("kind", sorted({*ALL_CACHE_IMPLEMENTATIONS} - {"quantized"}))
def test_cache_implementations_do_not_change_tokens(model, ids, kind, caplog):
    ids = ids.clamp(min=1)  # 0 is the pad token
    options = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, **options)
    config = GenerationConfig(cache_implementation=kind, **options)
    logging.Logger.warning_once.cache_clear()
    for given in ({"cache_implementation": kind, **options}, {"generation_config": config}):
        assert torch.equal(model.generate(ids, **given), expected)
    if kind == "static":
        assert not caplog.messages
    else:
        assert len(caplog.messages) == 1
        assert f"cache_implementation='{kind}' changes nothing" in caplog.text
    assert config.cache_implementation == kind
    once = model.generate(ids[:1], prompt_lookup_num_tokens=2, cache_implementation=kind, **options)
    assert torch.equal(once, model.generate(ids[:1], **options))


def test_pages_are_refused(model, ids):
    with pytest.raises(ValueError, match="cache_implementation must be left out, got 'paged'"):
        model.generate(ids, max_new_tokens=2, pad_token_id=0, cache_implementation="paged")


def test_a_state_file_from_before_a_field_existed_is_loaded(cache, tmp_path, monkeypatch):
    owner = cache.signature(cache.config)
    before = {name: value for name, value in owner.items() if name != "mlp_type"} | {"gone": 1}
    monkeypatch.setattr(type(cache), "owner", before)
    cache.save(tmp_path / "state")
    monkeypatch.undo()
    assert StateCache.load(tmp_path / "state", cache.config).seen_tokens == cache.seen_tokens
    other = copy.deepcopy(cache.config)
    other.mlp_type = "swiglu"
    with pytest.raises(ValueError, match="made for mlp_type = 'gelu', got mlp_type = 'swiglu'"):
        StateCache.load(tmp_path / "state", other)


@pytest.mark.parametrize("name", ["rtf", "spacetime", "longhorn"])
def test_dropout_and_heads_change_no_states_owner(name):
    family = load_family(name)
    changes = {"dropout": 0.5, "tie_dropout": False, "classifier_bias": True, "pooling": "mean"}
    plain, other = family.config(**family.tiny), family.config(**family.tiny, **changes)
    assert StateCache.signature(plain) == StateCache.signature(other)


@pytest.mark.parametrize("blocked", ["absent", "a file"])
def test_a_state_that_cannot_be_written_is_an_os_error_that_leaves_nothing(
    cache, tmp_path, blocked
):
    folder = tmp_path / "folder"
    if blocked == "a file":
        folder.write_text("")
    with pytest.raises(OSError, match=r"state\.safetensors"):
        cache.save(folder / "state.safetensors")
    assert [p.name for p in tmp_path.rglob("*")] == (["folder"] if folder.exists() else [])


def test_a_failed_save_keeps_the_state_file_there_was(model, cache, tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    cache.save(path)
    whole = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        cache.save(path)
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_saved_state_is_synced_before_it_is_renamed(cache, tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("replace") or replace(*names))
    cache.save(tmp_path / "state.safetensors")
    assert done == ["fsync", "replace"]


def forms(model, ids):
    """Return the logits of a whole row of 9 tokens and of its pieces, two of them and steps."""
    cache, pieces = model(ids[:, :3], use_cache=True).cache, []
    for piece in ids[:, 3:].split((3, 1, 1, 1), dim=1):
        pieces.append(model(piece, cache=cache).logits)
    return torch.cat([model(ids, use_cache=False).logits, *pieces], dim=1)


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_every_form_follows_weights_that_are_written_through_data(name):
    """As helpers of averaged weights write them; no version counter goes up."""
    subject = Subject(load_family(name))
    model, ids = subject.fresh(torch.float64), subject.ids(2, 9)

    before = forms(model, ids)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    after = forms(model, ids)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(after, forms(copy.deepcopy(model), ids))  # a copy keeps nothing


@pytest.mark.parametrize("name", OURS)
def test_every_form_follows_parameters_that_are_plain_attributes(name):
    subject = Subject(load_family(name))
    model, ids = subject.fresh(torch.float64), subject.ids(2, 9)
    if name != "coffee":  # whose state begins at zero, as its fixed point wants it
        add_state_adapter(model, freeze=False)
    plain = replica(model)

    with torch.no_grad():
        forms(plain, ids)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        torch.testing.assert_close(forms(plain, ids), forms(copy.deepcopy(model), ids))
    gradients = []
    for one in (plain, copy.deepcopy(model)):
        forms(one, ids).square().sum().backward()
        held = model if one is plain else one
        gradients.append({n: p.grad for n, p in held.named_parameters()})
    torch.testing.assert_close(*gradients)


# --- checkpoints -------------------------------------------------------------------------------


def ssm_parameters(model):
    mixers = (module for module in model.modules() if isinstance(module, SSMMixer))
    return {id(p): p for mixer in mixers for p in mixer.parameters(recurse=False)}.values()


@pytest.mark.parametrize("name", OURS)
def test_what_a_checkpoint_lacks_is_float32_in_a_model_loaded_in_bfloat16(name, tmp_path):
    made = tiny_model(name)
    made.save_pretrained(tmp_path)
    layers = 2 * made.config.num_hidden_layers
    longer = type(made).from_pretrained(tmp_path, dtype="bfloat16", num_hidden_layers=layers)
    assert len(longer.model.layers) == layers
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = type(made)(made.config)
    finally:
        torch.set_default_dtype(torch.float32)
    for model in (longer, built):
        assert {p.dtype for p in ssm_parameters(model)} == {torch.float32}
        assert model.lm_head.weight.dtype == torch.bfloat16


class Scaled(torch.nn.Module):
    """Makes of a parameter what a number of its own says."""

    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.by


@pytest.mark.parametrize("name", OURS)
def test_every_form_follows_a_parametrization(name, ids):
    model, plain = tiny_model(name), tiny_model(name)
    mixers = (m for m in model.modules() if isinstance(m, SSMMixer))
    mixer = next(m for m in mixers if any(True for _ in m.parameters(recurse=False)))
    field, parameter = max(mixer.named_parameters(recurse=False), key=lambda item: item[1].numel())
    other = next(m for m in plain.modules() if type(m) is type(mixer))
    with torch.no_grad():
        model.generate(ids, max_new_tokens=2)  # after which values are kept
    parametrize.register_parametrization(mixer, field, Scaled())
    for by in (1.0, 0.9):
        with torch.no_grad():
            mixer.parametrizations[field][0].by.fill_(by)
            getattr(other, field).copy_(parameter * by)
            for x, kept in ((ids, False), (ids, True), (ids[:, :1], True)):
                outputs = []
                for each in (model, plain):
                    cache = each(ids, use_cache=True).cache if x.shape[1] == 1 else None
                    outputs.append(each(x, cache=cache, use_cache=kept).logits)
                torch.testing.assert_close(*outputs)


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *given, **more):
        return self.module(*given, **more)


@torch.no_grad()
@pytest.mark.parametrize("name", OURS)
def test_a_mixer_may_be_wrapped(name, ids):
    model = tiny_model(name)
    known = model.generate(ids, max_new_tokens=3, do_sample=False), model(ids).logits
    for layer in model.model.layers:
        layer.mixer = Wrapper(layer.mixer)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), known[0])
    torch.testing.assert_close(model(ids).logits, known[1])


@pytest.mark.parametrize("name", ["s5", "spacetime", "dss"])
@torch.no_grad()
def test_steps_follow_a_pruned_parameter(name, ids):
    model = tiny_model(name)
    model.generate(ids, max_new_tokens=2)
    mixer = model.model.layers[0].mixer
    field = next(iter(dict(mixer.named_parameters(recurse=False))))
    prune.identity(mixer, field)
    mixer.get_buffer(f"{field}_mask").zero_()
    cache = model(ids[:, :4], use_cache=True).cache
    steps = [model(i, cache=cache).logits for i in ids[:, 4:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits[:, 4:])


def test_a_model_that_was_cut_proposes_by_its_first_layers(ids):
    model = build(num_hidden_layers=3)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    options = {"max_new_tokens": 4, "do_sample": False}
    early = model.generate(ids[:1], assistant_early_exit=1, **options)
    assert torch.equal(early, model.generate(ids[:1], **options))


def test_layers_that_the_configuration_does_not_count_are_refused(ids):
    model = tiny_model("longhorn")
    count = model.config.num_hidden_layers
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    with pytest.raises(ValueError, match=f"num_hidden_layers must be .*, {count + 1}, got {count}"):
        model(ids)
    model.config.num_hidden_layers = count + 1
    assert model(ids, use_cache=False).logits.shape[:2] == ids.shape
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=f"num_hidden_layers must be .*, 1, got {count + 1}"):
        model.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_a_truncated_checkpoint_is_refused_and_named(model, tmp_path, size):
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_without_its_weights_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_misspelt_field_in_a_checkpoint_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"d_state"', '"d_sttae"'))
    with pytest.raises(LookupError, match="no field 'd_sttae'; did you mean 'd_state'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_fields_given_while_loading_are_checked_and_complete_others(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_hidden_layers must be .* got -1"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=-1)
    with pytest.raises(ValueError, match=r"hidden_size must be .* got 0"):
        AutoConfig.from_pretrained(tmp_path, d_model=0)
    assert AutoConfig.from_pretrained(tmp_path, d_model=64).hidden_size == 64
    with pytest.raises(ValueError, match="hidden_size must be given once, got 64 and 32"):
        AutoConfig.from_pretrained(tmp_path, d_model=64, hidden_size=32)
    assert (
        AutoConfig.from_pretrained(tmp_path, dtype="auto").hidden_size == FAMILY.tiny["hidden_size"]
    )
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"hidden_size"', '"d_model"'))
    assert AutoConfig.from_pretrained(tmp_path, hidden_size=64).hidden_size == 64
    bmojo = load_family("bmojo")
    bmojo.config(**bmojo.tiny).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=5)
    assert len(config.mixer_types) == 5


@pytest.mark.parametrize("name", ["s5", "coffee", "longhorn"])
def test_a_variant_may_name_weight_files(name, tmp_path):
    model = tiny_model(name)
    model.save_pretrained(tmp_path, variant="fp16")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16")
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert (tmp_path / "model.fp16.safetensors").is_file()
    config = AutoConfig.from_pretrained(tmp_path, variant=None)
    assert config.to_diff_dict() == again.config.to_diff_dict()
    if name == "coffee":
        with pytest.raises(StrictDataclassError, match="got no_fedback"):
            AutoConfig.from_pretrained(tmp_path, variant="no_fedback")
        with pytest.raises(OSError, match="no_fedback"):
            AutoModelForCausalLM.from_pretrained(tmp_path, variant="no_fedback")
        assert AutoConfig.from_pretrained(tmp_path, variant="token_gate").variant == "token_gate"


def test_dtypes_may_be_given_by_part_and_a_classifier_has_a_label(model, tmp_path):
    model.save_pretrained(tmp_path)
    for given in ("bfloat16", {"": "bfloat16"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=given)
        assert loaded.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        FAMILY.config(dtype={"": "int8"})
    with pytest.raises(ValueError, match="num_labels must be at least 1, got 0"):
        FAMILY.config(num_labels=0)


# --- classification ----------------------------------------------------------------------------


def test_an_empty_sequence_cannot_be_classified(ids):
    classifier = FAMILY.sequence_classification_class(FAMILY.config(**FAMILY.tiny)).eval()
    with pytest.raises(ValueError, match=r"at least one token, got none in sequence 1"):
        classifier(ids[:1], cu_seqlens=torch.tensor([0, 3, 3, 7]))
    with pytest.raises(ValueError, match=r"at least one token, got none in sequence 0"):
        classifier(ids, attention_mask=torch.tensor([[0] * 7, [1] * 7]))


@torch.no_grad()
def test_a_call_under_another_default_device_changes_nothing(model, ids):
    expected = model(ids).logits
    with torch.device("meta"):
        inside = model(ids).logits
    assert torch.equal(inside, expected)
    assert torch.equal(model(ids).logits, expected)


def test_vmap_does_not_use_the_few_rows_kernel(model):
    layer, x = model.lm_head, torch.randn(3, 2, model.config.hidden_size)
    with torch.no_grad():
        mapped = torch.vmap(layer)(x)
    torch.testing.assert_close(mapped, layer(x))


@torch.no_grad()
def test_what_goes_on_from_a_cache_is_no_padding(classifier):
    classifier.config.pad_token_id = 0
    ids, mask = torch.tensor([[5, 3, 0, 0, 7, 0]]), torch.ones(1, 6, dtype=torch.long)
    expected = classifier(ids, attention_mask=mask).logits
    for parts in ([3, 2, 1], [2, 2, 2]):
        first, *others = ids.split(parts, dim=1)
        output = classifier(first, attention_mask=mask[:, : parts[0]], use_cache=True)
        for part in others:
            output = classifier(part, cache=output.cache)
        torch.testing.assert_close(output.logits, expected)


@torch.no_grad()
def test_position_ids_do_not_make_padding_count(classifier):
    ids = torch.tensor([[5, 7, 9, 0, 0]])
    classifier.config.pad_token_id = 0
    expected = classifier(ids).logits
    got = classifier(ids, position_ids=torch.arange(5)[None]).logits
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(expected, classifier(ids[:, :3]).logits)


@torch.no_grad()
def test_padding_between_packed_sequences_is_no_sequence(classifier):
    ids = torch.tensor([[5, 7, 9, 4, 3, 3]])
    positions = torch.tensor([[0, 1, 0, 1, 0, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    logits = classifier(ids, position_ids=positions, attention_mask=mask).logits
    singly = [classifier(ids[:, :2]).logits, classifier(ids[:, 2:4]).logits]
    torch.testing.assert_close(logits, torch.cat(singly))


def test_a_classifier_under_accumulation_has_the_gradient_of_the_whole_batch(classifier, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.tensor([i + 1, 3, 5]), "labels": i % 2} for i in range(8)]
    norms = []
    for batch, accumulate in ((8, 1), (2, 4)):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(batch)),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(copy.deepcopy(classifier), arguments, train_dataset=rows)
        trainer.train()
        norms += [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert len(norms) == 2
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def evaluated(model, rows, folder, collator=None, **options):
    """Return the loss that transformers' Trainer evaluates."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=len(rows),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model, arguments, eval_dataset=rows, data_collator=collator)
    return trainer.evaluate()["eval_loss"]


def test_trainer_shifts_smoothed_labels(model, ids, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in ids]
    plain = evaluated(model, rows, tmp_path)
    assert plain == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-6)
    # so little smoothing that nothing but the shift could change the loss
    assert evaluated(model, rows, tmp_path, label_smoothing_factor=1e-9) == pytest.approx(plain)


def test_trainer_finds_the_same_loss_on_either_side_of_padding(tmp_path):
    from transformers import DataCollatorForLanguageModeling

    tokenizer, model = byte_tokenizer(), build(vocab_size=259)
    rows = [tokenizer(text) for text in ("hi", "hello there", "a", "some words here")]
    losses = {}
    for side in ("left", "right"):
        tokenizer.padding_side = side
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        loss = model(**collator([dict(row) for row in rows])).loss.item()
        losses[side] = evaluated(model, rows, tmp_path, collator), loss
        assert losses[side][0] == pytest.approx(loss, rel=1e-6)
    assert losses["left"] == pytest.approx(losses["right"], rel=1e-5)


def test_a_count_of_targets_loses_the_first_token_of_a_padded_row(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    mean = model(ids, attention_mask=mask, labels=labels).loss
    # behind the first column are twelve places, two of them padding; one is row 1's first token
    counted = {"num_items_in_batch": torch.tensor(10)}
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=labels, **counted).loss, mean)
    whole = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=24).loss, whole / 2)
    nothing = model(ids, attention_mask=mask, labels=torch.full_like(ids, -100), **counted)
    assert nothing.loss == 0


def test_generate_reads_stop_strings_with_a_tokenizer():
    tokenizer, model = byte_tokenizer(), build(vocab_size=259)
    prompt = tokenizer("hi", return_tensors="pt")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 256}
    with torch.no_grad():  # say one token, whatever comes
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
    said = model.generate(**prompt, **options)[0, 2:]
    stopped = model.generate(
        **prompt,
        **{**options, "min_new_tokens": 0},
        stop_strings=[tokenizer.decode(said[:2])],
        tokenizer=tokenizer,
    )
    assert stopped[0, 2:].tolist() == said[:2].tolist()


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own
@pytest.mark.parametrize("name", sorted(families()))
def test_the_reference_has_all_derivatives_of_a_model(name, ids):
    family = load_family(name)
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(**family.tiny)).double().eval()
    model.requires_grad_(False)
    values = model.get_input_embeddings()(ids)
    towards = torch.randn_like(values)

    def read(values):
        return model(inputs_embeds=values, use_cache=False).logits.square().sum()

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(read, (values,), (towards,))
    leaf = values.clone().requires_grad_()
    (expected,) = torch.autograd.grad(read(leaf), leaf)
    with use_backend("reference"):
        slope = torch.func.grad(read)
        found = slope(values)
        _, forwards = torch.func.jvp(read, (values,), (towards,))
        _, curved = torch.func.jvp(slope, (values,), (towards,))
        twice = torch.func.grad(lambda values: (slope(values) * towards).sum())(values)
    for got, want in (
        (found, expected),
        (forwards, (expected * towards).sum()),
        (curved, twice),  # forwards over backwards, and backwards over backwards
    ):
        assert (got - want).norm() < 1e-9 * want.norm()
    assert curved.norm() > 0


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_reentrant_checkpointing_with_a_given_state_is_refused(ids):
    model = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    state = model(ids[:, :3], use_cache=True).cache
    with pytest.raises(ValueError, match=r"cache in training needs .*'use_reentrant'"):
        model.train()(ids[:, 3:], cache=state)
    model.eval()(ids[:, 3:], cache=state)


def test_attributes_that_are_not_fields_are_not_saved(tmp_path, caplog):
    model = build()
    model.config.max_position_embeddings = 2048
    with caplog.at_level("WARNING", logger="ssmzoo"):
        model.save_pretrained(tmp_path)
    assert "LonghornConfig has no field max_position_embeddings: not written" in caplog.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "max_position_embeddings")
    assert model.config.max_position_embeddings == 2048


@torch.no_grad()
def test_token_type_ids_of_a_tokenizer_are_ignored(model, ids):
    got = model(ids, token_type_ids=torch.zeros_like(ids)).logits
    assert torch.equal(got, model(ids).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_batches_compile_to_one_graph_by_boundaries_even_with_a_mask(model, ids):
    row, ends = ids[:1], torch.tensor([0, 3, 7])
    with torch.no_grad():
        expected = model(row, cu_seqlens=ends).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(row, cu_seqlens=ends, attention_mask=torch.ones_like(row)).logits
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.long
def test_prefill_and_steps_with_a_cache_that_grows_are_three_graphs():
    """The kit counts those with caches of a fixed size."""
    family, graphs = load_family("bmojo"), []
    fields = {**family.tiny, "num_hidden_layers": 1, "mixer_types": ["attention"]}
    model = family.causal_lm_class(family.config(**fields)).eval()
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, fullgraph=True, backend=count)
        with torch.no_grad():
            found = [compiled(ids[:, :10], use_cache=True)]
            for token in ids[:, 10:14].split(1, dim=1):
                found.append(compiled(token, cache=found[0].cache))
            expected = model(ids[:, :14]).logits
    finally:
        torch._dynamo.reset()
    logits = torch.cat([output.logits for output in found], dim=1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert found[0].cache.seen_tokens == 14
    assert len(graphs) <= 3, "prefill, a step, and one that knows that the count of tokens changes"


@pytest.mark.parametrize(
    ("state", "sequences", "kind", "message"),
    [
        (3.0, None, TypeError, "state 'ssm' must be a tensor of real numbers .* got a float"),
        (torch.tensor(1.0), None, TypeError, "a row a sequence, got a torch.float32"),
        (torch.ones(2, dtype=torch.complex64), None, TypeError, "take torch.view_as_real"),
        (torch.ones(2, 4), 3, ValueError, r"state 'ssm' must have a row .* \[2, 4\]"),
    ],
    ids=["number", "rowless", "complex", "rows"],
)
def test_a_state_without_a_row_a_sequence_is_refused(state, sequences, kind, message):
    ends = None if sequences is None else torch.arange(sequences + 1)
    packing = None if ends is None else Sequences.of(ends, sequences)
    with pytest.raises(kind, match=message):
        LayerState(keep=True, packing=packing).put("ssm", state)


@pytest.mark.parametrize(
    ("wrong", "got"), [(lambda x: x[..., :1], r"\[2, 5, 1\]"), (lambda x: (x,), "a tuple")]
)
def test_a_mixer_that_returns_another_shape_is_named(wrong, got, monkeypatch):
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny))
    mixer = model.model.layers[0].mixer
    forward = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda *given: wrong(forward(*given)))
    with pytest.raises(ValueError, match=f"LonghornMixer must return a tensor .*, got {got}"):
        model(torch.ones(2, 5, dtype=torch.int64))
