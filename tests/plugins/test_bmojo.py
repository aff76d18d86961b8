"""B'MOJO: the golden checks of its specification, on the language model and its memories.

The judge is ``tests/oracles/bmojo.py``, float64 numpy from the paper alone. That the backends of
the ops equal their references is the business of ``tests/kernels``.
"""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import bmojo as oracle
from tests.training.test_segmented import relative, run, some_rows
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MambaConfig, MambaForCausalLM

from ssmzoo.analysis.sweep import sweep
from ssmzoo.analysis.sweep_plan import load_sweep
from ssmzoo.modeling import LayerState, StateCache
from ssmzoo.recipe import SegmentsSection
from ssmzoo.testing import FamilyConformance
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.segments import SegmentedLM
from ssmzoo_bmojo import FAMILY, attention
from ssmzoo_bmojo.convert_bmojo import from_mamba
from ssmzoo_bmojo.memory import Call, choose_eidetic, newest, open_scores, score_table
from ssmzoo_kernels import use_backend

NORMED = {"qk_norm": True, "attention_bias": True, "attention_out_bias": True}
DELTA = {"family": "linear_attention", "num_heads": 2, "head_k_dim": 6, "head_v_dim": 5}
VARIANTS = {
    "serial": {},
    "parallel": {"wiring": "parallel", "use_rope": True},
    "offset": {"fading_mode": "offset"},
    "two windows": {
        **{"fading_mode": "offset", "num_fading_tokens": 4, "wiring": "parallel"},
        **{"use_rope": True, "num_eidetic_tokens": 0},
    },
    "masked": {"eidetic_overlap": "mask"},
    "long memories": {
        **{"num_eidetic_tokens": 7, "num_fading_tokens": 6, "eidetic_overlap": "mask"},
    },
    "window of one": {"sliding_window": 1},
    "eidetic only": {"num_fading_tokens": 0},
    "baselines": {"mixer_types": ["mamba", "attention", "swa"], "use_rope": True},
    "relative": {
        **{"innovation_error": "relative", "innovation_weights": "exp", "tie_memory_proj": True},
        **{"intermediate_size": 40},
    },
    "wide window": {"sliding_window": 64},
    "norms and biases": {**NORMED, "use_rope": True, "num_fading_tokens": 6},
    "gated DeltaNet": {
        **{**NORMED, "ssm": DELTA, "fading_mode": "offset", "num_fading_tokens": 4},
        **{"wiring": "parallel", "use_rope": True, "mixer_types": ["bmojo_f", "bmojo", "mamba"]},
    },
}


class TestBMojo(FamilyConformance):
    family = "bmojo"
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestParallel(FamilyConformance):
    family = replace(
        FAMILY,
        tiny={
            **FAMILY.tiny,
            **{"wiring": "parallel", "use_rope": True, "fading_mode": "offset"},
            **{"eidetic_overlap": "mask", "num_eidetic_tokens": 5, "intermediate_size": 24},
            **{"mixer_types": "bmojo", "num_hidden_layers": 1},
        },
    )
    oracle = staticmethod(oracle.logits)


def tiny(seed=0, **fields):
    """A small model in float64, its weights moved off their initial values."""
    torch.manual_seed(seed)
    model = FAMILY.causal_lm_class(FAMILY.config(**{**FAMILY.tiny, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def tokens(*shape, seed=1):
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(seed))


def error(one, two):
    return float((one - two).abs().max() / two.abs().max())


# --- the oracle -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_matches_the_oracle_in_float64(name):
    model, ids = tiny(**VARIANTS[name]), tokens(2, 19)
    weights = {n: p.detach().numpy() for n, p in model.state_dict().items()}
    expected = oracle.logits(weights, model.config.to_dict(), ids.numpy())
    with torch.no_grad():
        assert error(model(ids).logits, torch.from_numpy(expected)) < 1e-12


# --- five forms, and the cache ----------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("total", [6, 23])
@torch.no_grad()
def test_any_split_into_calls_gives_the_same_logits_and_the_same_cache(name, total):
    model, ids = tiny(**VARIANTS[name]), tokens(2, total)
    window = model.config.sliding_window
    whole = model(ids, use_cache=True)
    splits = [[1] * total, [window - 1, window, window + 1], [1, 3, 5, 1, 8]]
    for lengths in splits:
        cache, logits, at = None, [], 0
        for length in [*lengths, total]:
            if length == 0 or at >= total:
                continue
            part = ids[:, at : at + length]
            output = model(part, cache=cache, use_cache=True)
            cache, at = output.cache, at + length
            logits.append(output.logits)
        assert error(torch.cat(logits, dim=1), whole.logits) < 1e-10
        for one, two in zip(cache.layers, whole.cache.layers, strict=True):
            assert one.states.keys() == two.states.keys()
            for state, value in two.states.items():
                assert torch.allclose(one.states[state], value, rtol=1e-9, atol=1e-11), state


@torch.no_grad()
@torch.no_grad()
def test_a_step_whose_score_is_not_finite_names_the_innovations_and_changes_nothing():
    model, ids = tiny().float(), tokens(2, 9)
    cache = model(ids[:, :5], use_cache=True).cache
    model(ids[:, 5:6], cache=cache)  # from here on in one call
    before = copy.deepcopy(cache)
    embedding = model.get_input_embeddings().weight
    kept = embedding.clone()
    embedding.fill_(math.inf)
    with pytest.raises(ValueError, match="innovations must be finite"):
        model(ids[:, 6:7], cache=cache)
    embedding.copy_(kept)
    found = [model(ids[:, 6:9], cache=x).logits for x in (cache, before)]
    assert torch.equal(*found)


@torch.no_grad()
def test_rows_of_mixed_lengths_cross_their_chunks_at_different_steps():
    model = tiny()
    ids, lengths = tokens(3, 11), (11, 6, 9)
    mask = torch.stack([torch.arange(11) >= 11 - n for n in lengths]).long()
    cache = model(ids, attention_mask=mask, use_cache=True).cache
    new, got = tokens(3, 13, seed=2), []
    for t in range(13):
        output = model(new[:, t : t + 1], cache=cache)
        got.append(output.logits)
    for row, n in enumerate(lengths):
        alone = model(torch.cat([ids[row : row + 1, 11 - n :], new[row : row + 1]], dim=1)).logits
        assert error(torch.cat(got, dim=1)[row], alone[0, n:]) < 1e-10


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_rows_state_does_not_depend_on_other_rows(name):
    model, ids, lengths = tiny(**VARIANTS[name]), tokens(3, 11), (11, 3, 6)
    mask = torch.stack([torch.arange(11) >= 11 - n for n in lengths]).long()
    together = model(ids, attention_mask=mask, use_cache=True).cache
    for row, n in enumerate(lengths):
        alone = model(ids[row : row + 1, 11 - n :], use_cache=True).cache
        for one, two in zip(together.layers, alone.layers, strict=True):
            for state, value in two.states.items():
                beside = one.states[state][row : row + 1]
                if state in ("keys", "values"):  # full attention keeps what the longest row needs
                    beside = beside[:, beside.shape[1] - value.shape[1] :]
                assert torch.allclose(beside, value, rtol=1e-9, atol=1e-11), state
                assert one.states[state].isfinite().all(), state


@torch.no_grad()
def test_the_cache_has_one_size_from_the_first_token_on():
    model = tiny()
    window, sizes = model.config.sliding_window, []
    cache = StateCache(model.config)
    for _ in range(10 * window):
        model(tokens(2, 1), cache=cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1


class Watched(TorchDispatchMode):
    """Notes the dtypes, and the bytes of each call, of all that torch makes."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.sizes = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.dtypes.add(tensor.dtype)
                self.sizes.append(tensor.numel() * tensor.element_size())
        return made


@torch.no_grad()
def test_a_decoding_step_needs_no_more_memory_after_64k_tokens():
    model = tiny(sliding_window=64, num_fading_tokens=16, num_eidetic_tokens=16).float()
    ids, sizes, bytes_ = tokens(1, 1 << 16), [], []
    end = model(ids[:, :192], use_cache=True).cache
    far = None
    for part in ids.split(1 << 13, dim=1):
        far = model(part, cache=far, use_cache=True, logits_to_keep=1).cache
    for cache in (end, far):
        for _ in range(3):
            with Watched() as watched:
                model(ids[:, :1], cache=cache)
        sizes.append(watched.sizes)
        bytes_.append(cache.nbytes)
    assert far.get_seq_length() == (1 << 16) + 3
    assert bytes_[0] == bytes_[1]
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_layers_share_what_does_not_depend_on_them(monkeypatch):
    made = []
    monkeypatch.setattr(
        attention,
        "Call",
        lambda *args, **options: made.append(Call(*args, **options)) or made[-1],
    )
    model = tiny(mixer_types=["bmojo", "swa", "bmojo", "attention"], num_hidden_layers=4)
    cache = model(tokens(2, 9), use_cache=True).cache
    assert [call.window for call in made] == [4, 1]  # no window: chunks of one token
    seen = [layer.states["seen"] for layer in cache.layers]
    assert len({x.data_ptr() for x in seen}) == 4  # a file of a cache holds no tensor twice


class Bounded(Call):
    """A call as on a GPU, where nobody waits for a number and shapes are bounds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.looks = False


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_shapes_that_are_bounds_change_neither_logits_nor_cache(name, monkeypatch):
    model, ids = tiny(**VARIANTS[name]), tokens(3, 11)
    mask = torch.stack([torch.arange(11) >= 11 - n for n in (11, 0, 6)]).long()
    # a prompt with padding, a step, several tokens of packed sequences, one of which is empty
    calls = [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids[:, :1]},
        {"input_ids": ids[:2].view(1, -1), "cu_seqlens": torch.tensor([0, 9, 9, 22])},
    ]

    def run():
        cache, logits = None, []
        for call in calls:
            output = model(**call, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
        logits[0] = logits[0] * mask[..., None]
        return logits, [layer.states for layer in cache.layers]

    expected, states = run()
    monkeypatch.setattr(attention, "Call", Bounded)
    got, others = run()
    for one, two in zip(got, expected, strict=True):
        assert error(one, two) < 1e-12
    for one, two in zip(others, states, strict=True):
        for state, value in two.items():
            assert torch.allclose(one[state], value, rtol=1e-11, atol=1e-12), state


@pytest.mark.parametrize("lengths", [(5, 5), (1, 1), (9, 9)])
def test_rows_of_one_length_keep_what_gathered_rows_keep(lengths):
    seen = torch.tensor([3, 8])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    old, new = torch.randn(2, 6, 3), torch.randn(sum(lengths), 3)
    old[0, :3] = 0  # before the first token
    kept = [
        newest(Call(offsets, seen, 4, len(new), equal=equal, following=True), old, new, 6)
        for equal in (True, False)
    ]
    assert torch.equal(*kept)
    fresh = [
        newest(Call(offsets, seen * 0, 4, len(new), equal=equal, following=True), None, new, 6)
        for equal in (True, False)
    ]
    assert torch.equal(*fresh)


@torch.no_grad()
def test_generate_equals_full_recomputation_over_many_chunks():
    model, ids = tiny(), tokens(2, 3)
    got = model.generate(ids, max_new_tokens=18, do_sample=False, pad_token_id=0)
    for _ in range(18):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, ids)


# --- causality, memories ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["serial", "offset", "long memories"])
@pytest.mark.parametrize("implementation", ["reference", "eager", "cpu"])
@torch.no_grad()
def test_a_changed_token_moves_no_earlier_logit_by_a_bit(name, implementation):
    model, ids = tiny(**VARIANTS[name]), tokens(1, 17)
    with use_backend(implementation):
        expected = model(ids).logits
        for place in (5, 6, 7, 8, 16):
            changed = ids.clone()
            changed[0, place:] = (changed[0, place:] + 1) % 96
            got = model(changed).logits
            assert torch.equal(got[:, :place], expected[:, :place])
            assert not torch.equal(got[:, place], expected[:, place])


@pytest.mark.parametrize("name", ["serial", "long memories", "masked"])
@torch.no_grad()
def test_the_memory_of_a_chunk_depends_on_earlier_chunks_only(name):
    model, ids = tiny(**VARIANTS[name]), tokens(2, 12)
    for count in (1, 3, 4):  # the last one opens the next chunk
        one, other = (
            model(torch.cat([ids, tokens(2, count, seed=seed)], dim=1), use_cache=True)
            for seed in (8, 9)
        )
        states = [x.cache.layers[0].states for x in (one, other)]
        for state in (x for x in states[0] if x.startswith(("eidetic", "fading"))):
            assert torch.equal(*(x[state] for x in states)) == (count < 4), (state, count)


def selected(scores, window, count, cuts=()):
    """The positions that each chunk remembers, by calls of the lengths between ``cuts``."""
    found, held, pending, seen = {}, None, None, 0
    for end in [*cuts, len(scores)]:
        part = scores[seen:end]
        offsets, before = torch.tensor([0, len(part)]), torch.tensor([seen])
        call = Call(offsets, before, window, len(part), equal=True, following=True)
        grid = score_table(pending, part, call)[call.score_places()]
        chosen = choose_eidetic(call, grid, count, held, past=window)
        opened = seen // window
        for ahead in range(int(call.made) + 1):
            where, score = chosen.positions[0, ahead], chosen.scores[0, ahead]
            found[opened + ahead] = where[~score.isneginf()].tolist()
        left = call.leaves()
        held = chosen.scores[left].nan_to_num(neginf=0.0), chosen.positions[left]
        pending, seen = open_scores(call, grid), end
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("window", "count"), [(4, 3), (3, 7), (1, 2)])
def test_streaming_merging_and_choosing_from_the_prefix_agree_ties_included(ties, window, count):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(29, generator=generator, dtype=torch.float64)
    if ties:
        scores = (scores * 3).round()
    expected = {
        c: sorted(oracle.prefix_top(scores.numpy(), count, c * window))
        for c in range(29 // window + 1)
    }
    assert selected(scores, window, count) == expected
    assert selected(scores, window, count, cuts=range(1, 29)) == expected
    assert selected(scores, window, count, cuts=(2, 9, 10, 20)) == expected


def test_a_spike_stays_until_enough_larger_ones_have_come():
    scores = torch.full((40,), 0.1, dtype=torch.float64)
    scores[5], scores[17], scores[22] = 5.0, 6.0, 7.0
    found = selected(scores, 4, 2)
    assert all(5 not in found[c] for c in (0, 1))
    assert all(5 in found[c] for c in (2, 3, 4, 5))
    assert found[5] == [5, 17]
    assert all(found[c] == [17, 22] for c in range(6, 11))


def test_the_choice_of_tokens_has_no_gradient_but_their_keys_have():
    model, ids = tiny(num_fading_tokens=0, mixer_types="bmojo", wiring="parallel"), tokens(1, 16)
    loss = model(ids, labels=ids).loss
    loss.backward()
    ssm = model.model.layers[-1].mixer.ssm
    # without fading tokens the parallel state-space model only chooses what to keep
    assert all(p.grad is None or not p.grad.any() for p in ssm.parameters())
    assert model.model.layers[-1].mixer.attention.k_proj.weight.grad.any()


def test_gradients_are_those_of_finite_differences():
    model = tiny(mixer_types="bmojo", num_hidden_layers=1, eidetic_overlap="mask")
    ids = tokens(1, 13)
    model(ids, labels=ids).loss.backward()

    # the loss itself is float32 in transformers; here in float64
    def loss():
        logits = model(ids).logits[0, :-1]
        return F.cross_entropy(logits, ids[0, 1:])

    value = loss()
    model.zero_grad()
    value.backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * 1e-6)
                ends.append(loss())
                parameter.sub_(direction, alpha=sign * 1e-6)
        slope = float((ends[0] - ends[1]) / 2e-6)
        assert slope == pytest.approx(
            float((parameter.grad * direction).sum()), rel=1e-5, abs=1e-8
        ), name


@pytest.mark.parametrize("name", VARIANTS)
def test_segments_across_chunks_have_the_unsplit_rows_gradients(name):
    model, part = tiny(**VARIANTS[name]).train(), some_rows(96)
    _, whole = run(model, CausalLM(model, packs=True), part)
    options = SegmentsSection(count=8, gradients="keep")  # of three tokens
    _, grads = run(model, SegmentedLM(model, options, packs=True), part)
    assert grads.keys() == whole.keys()
    for parameter, grad in whole.items():
        assert relative(grads[parameter], grad) < 1e-10 or grad.norm() < 1e-12, parameter


@torch.no_grad()
def test_in_float32_nothing_is_rounded_to_less():
    model, ids = tiny(use_rope=True).float(), tokens(2, 11)
    with Watched() as watched:
        cache = model(ids, use_cache=True).cache
        model(ids[:, :1], cache=cache)
    assert torch.float32 in watched.dtypes
    assert not watched.dtypes & {torch.bfloat16, torch.float16}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_other_arithmetic_remembers_other_tokens_only_where_scores_nearly_tie(device, dtype, near):
    fields = {"mixer_types": "bmojo", "num_hidden_layers": 1, "sliding_window": 8}
    model, ids = tiny(**fields).float(), tokens(4, 121)
    other = tiny(**fields).to(device, dtype)
    model.load_state_dict({name: x.float() for name, x in other.state_dict().items()})
    expected = model(ids, use_cache=True).cache.layers[0].states
    got = other(ids.to(device), use_cache=True).cache.layers[0].states
    for row in range(4):
        one, two = (
            dict(
                zip(
                    x["eidetic_positions"][row].tolist(),
                    x["eidetic_scores"][row].tolist(),
                    strict=True,
                )
            )
            for x in (expected, got)
        )
        least = min(one.values())
        for position in one.keys() ^ two.keys():
            score = one.get(position, two.get(position))
            assert score == pytest.approx(least, rel=near)
        for position in one.keys() & two.keys():
            assert one[position] == pytest.approx(two[position], rel=near)


# --- special cases ----------------------------------------------------------------------------


@torch.no_grad()
def test_a_sequence_no_longer_than_the_window_never_reads_its_memories():
    model, ids = tiny(mixer_types="bmojo", sliding_window=16), tokens(2, 16)
    bare = tiny(mixer_types="bmojo", sliding_window=16, num_fading_tokens=0, num_eidetic_tokens=0)
    bare.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(ids).logits, bare(ids).logits)


def test_the_parallel_state_space_model_then_has_no_gradient():
    model, ids = tiny(mixer_types="bmojo", sliding_window=16, wiring="parallel"), tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert not any(p.grad is not None and p.grad.any() for p in layer.mixer.ssm.parameters())


@torch.no_grad()
def test_a_wide_layer_without_memories_is_causal_attention():
    fields = {"num_fading_tokens": 0, "num_eidetic_tokens": 0, "num_key_value_heads": 4}
    model = tiny(mixer_types="swa", sliding_window=32, **fields)
    full = tiny(mixer_types="attention", **fields)
    full.load_state_dict(model.state_dict())
    ids = tokens(2, 20)
    assert error(model(ids).logits, full(ids).logits) < 1e-13


@torch.no_grad()
def test_alternating_mamba_and_window_layers_are_serial_layers_without_memories():
    bare = {"num_fading_tokens": 0, "num_eidetic_tokens": 0, "tie_memory_proj": True}
    serial = tiny(mixer_types="bmojo", num_hidden_layers=2, **bare)
    pairs = tiny(mixer_types=["mamba", "swa"], num_hidden_layers=4, **bare)
    weights = {}
    for name, tensor in serial.state_dict().items():
        if not name.startswith("model.layers."):
            weights[name] = tensor
            continue
        layer, rest = int(name.split(".")[2]), name.split(".", 3)[3]
        first = rest.startswith(("norm.", "mixer.ssm."))
        rest = rest.replace("mixer.attn_norm.", "norm.")
        weights[f"model.layers.{2 * layer + (not first)}.{rest}"] = tensor
    pairs.load_state_dict(weights)
    ids = tokens(2, 15)
    assert error(serial(ids).logits, pairs(ids).logits) < 1e-13


@torch.no_grad()
def test_a_serial_layer_with_zero_attention_is_mamba():
    serial = tiny(mixer_types="bmojo", num_hidden_layers=2)
    mamba = tiny(mixer_types="mamba", num_hidden_layers=2)
    mamba.load_state_dict(serial.state_dict(), strict=False)
    for layer in serial.model.layers:
        layer.mixer.attention.o_proj.weight.zero_()
    ids = tokens(2, 15)
    assert error(serial(ids).logits, mamba(ids).logits) < 1e-13


@torch.no_grad()
def test_chunk_and_offset_fading_agree_on_the_last_token_of_a_chunk():
    fields = {"mixer_types": "bmojo_f", "num_hidden_layers": 1}
    chunk, offset = tiny(**fields), tiny(**fields, fading_mode="offset")
    offset.load_state_dict(chunk.state_dict())
    ids = tokens(1, 20)
    one, two = chunk(ids).logits, offset(ids).logits
    last = torch.arange(3, 20, 4)
    assert error(one[:, last], two[:, last]) < 1e-12
    assert error(one[:, last[1:] - 1], two[:, last[1:] - 1]) > 1e-4


# --- Mamba ------------------------------------------------------------------------------------


def test_a_mamba_of_transformers_has_the_same_logits_here_and_decodes_on():
    torch.manual_seed(0)
    theirs = MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        ours, ids = from_mamba(theirs), tokens(2, 21) % 64
        expected = theirs(ids).logits
        assert error(ours(ids).logits, expected) < 1e-5
        cache = ours(ids[:, :13], use_cache=True).cache
        assert error(ours(ids[:, 13:], cache=cache).logits, expected[:, 13:]) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_mamba_keeps_its_own_head_and_sizes(tied):
    config = MambaConfig(
        **{"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5},
        **{"conv_kernel": 3, "expand": 3, "time_step_rank": 7, "layer_norm_epsilon": 1e-3},
        tie_word_embeddings=tied,
    )
    theirs = MambaForCausalLM(config).eval()
    ours, ids = from_mamba(theirs), tokens(2, 9) % 64
    assert error(ours(ids).logits, theirs(ids).logits) < 1e-5
    assert ours.num_parameters() == theirs.num_parameters()
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    low = from_mamba(theirs.bfloat16())
    assert low.lm_head.weight.dtype == torch.bfloat16
    assert low.model.layers[0].mixer.ssm.A_log.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bias": True}, "use_bias = False, got True"),
        ({"use_conv_bias": False}, "use_conv_bias = True, got False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'silu', got 'gelu'"),
    ],
)
def test_a_mamba_of_another_kind_is_refused(fields, message):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, **fields)
    with pytest.raises(ValueError, match=message):
        from_mamba(MambaForCausalLM(config))


def test_another_model_than_mamba_is_refused():
    with pytest.raises(TypeError, match="must be a MambaForCausalLM, got BMojoForCausalLM"):
        from_mamba(tiny())


# --- configuration, parameters ----------------------------------------------------------------

COUNTS = {
    "bmojo-130m": 132_173_568,
    "bmojo-370m": 368_467_968,
    "bmojo-790m": 800_428_032,
    "bmojo-1.4b": 1_397_538_816,
    "bmojo-parallel-130m": 132_155_136,
    "bmojo-parallel-370m": 368_424_960,
    "bmojo-parallel-790m": 800_363_520,
    "bmojo-parallel-1.4b": 1_397_452_800,
    "mamba-130m": 130_182_912,
    "mamba-370m": 372_799_488,
    "mamba-790m": 794_958_336,
    "mamba-1.4b": 1_387_624_448,
    "hybrid-130m": 128_815_872,
    "hybrid-370m": 369_509_376,
    "hybrid-790m": 779_798_016,
    "hybrid-1.4b": 1_405_388_800,
    "swa-130m": 130_768_128,
    "swa-370m": 374_332_416,
    "swa-790m": 785_333_760,
    "swa-1.4b": 1_421_064_192,
}


@pytest.mark.parametrize("preset", FAMILY.presets)
def test_presets_have_the_papers_sizes(preset):
    with torch.device("meta"):
        count = FAMILY.causal_lm_class(FAMILY.config(preset)).num_parameters()
    assert count == COUNTS[preset.replace("bmojo-f-", "bmojo-")]
    size = preset.rpartition("-")[2]
    named = float(size[:-1]) * (1e9 if size.endswith("b") else 1e6)
    assert abs(count / named - 1) < 0.03


@torch.no_grad()
def test_the_initial_parameters_are_those_of_the_table():
    torch.manual_seed(0)
    config = FAMILY.config(
        **{**FAMILY.tiny, "hidden_size": 256, "mixer_types": "bmojo", "intermediate_size": 64}
    )
    model = FAMILY.causal_lm_class(config)
    mixer = model.model.layers[0].mixer
    assert torch.allclose(mixer.ssm.A_log.exp(), torch.arange(1.0, 5.0).expand(512, -1))
    assert torch.equal(mixer.ssm.D, torch.ones(512))
    steps = F.softplus(mixer.ssm.dt_bias)
    assert steps.min() >= 1e-3 * 0.999
    assert steps.max() <= 1e-1 * 1.001
    assert steps.log().std() == pytest.approx(math.log(100) / 12**0.5, rel=0.1)
    attention = mixer.attention
    branches = 3 * config.num_hidden_layers
    assert attention.q_proj.weight.std() == pytest.approx(0.02, rel=0.05)
    assert attention.o_proj.weight.std() == pytest.approx(0.02 / branches**0.5, rel=0.05)
    assert torch.equal(attention.memory_k_proj.weight, attention.k_proj.weight)
    bound = (512 * branches) ** -0.5
    assert mixer.ssm.out_proj.weight.abs().max() == pytest.approx(bound, rel=0.01)
    assert not any("alpha" in name or "innovation" in name for name in model.state_dict())


def test_the_state_space_models_parameters_are_a_group_with_their_own_rate():
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny))
    groups = model.param_groups(lr=1e-3, weight_decay=0.1, groups={"ssm": {"lr": 5e-3}})
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            inside = ".ssm." in names[parameter]
            assert group["lr"] == (5e-3 if inside else 1e-3)
            spared = parameter.dim() < 2 or names[parameter].endswith("A_log")
            assert group["weight_decay"] == (0.0 if spared else 0.1), names[parameter]
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_names_that_other_code_uses_are_taken():
    others = {
        **{"window_size": 7, "ssm_state_size": 5, "ssm_expand": 3, "conv_kernel": 2},
        **{"time_step_rank": 9, "time_step_min": 0.01, "time_step_max": 0.02},
    }
    config = FAMILY.config(**others)
    assert (config.sliding_window, config.d_state, config.expand, config.d_conv) == (7, 5, 3, 2)
    assert (config.dt_rank, config.dt_min, config.dt_max) == (9, 0.01, 0.02)
    assert all(getattr(config, name) == value for name, value in others.items())
    assert not others.keys() & config.to_dict().keys()


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"mixer_types": ["mamb"]}, LookupError, "no mixer 'mamb'; did you mean 'mamba'"),
        ({"mixer_types": []}, ValueError, "at least one mixer"),
        ({"mixer_types": ["swa"] * 30}, ValueError, "at most 24"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
        ({"num_eidetic_tokens": -1}, ValueError, "num_eidetic_tokens must be at least 0"),
        ({"num_key_value_heads": 5}, ValueError, "multiple of num_key_value_heads = 5, got 12"),
        ({"use_rope": True, "head_dim": 7}, ValueError, "head_dim must be even with use_rope"),
        ({"num_attention_heads": 800}, ValueError, "at most hidden_size = 768 unless head_dim"),
        (
            {"num_attention_heads": 0},
            ValueError,
            "num_attention_heads must be .* at least 1, got 0",
        ),
        (
            {"num_key_value_heads": 0},
            ValueError,
            "num_key_value_heads must be .* at least 1, got 0",
        ),
        ({"head_dim": 0}, ValueError, "head_dim must be .* at least 1, got 0"),
        ({"num_fading_tokens": -1}, ValueError, "num_fading_tokens must be at least 0 .* got -1"),
        ({"num_eidetic_tokens": 10**9}, ValueError, "at most 65,536 .* got 1,000,000,000"),
        ({"innovation_span": 0}, ValueError, "innovation_span must be at least 1, got 0"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta must be positive and finite, got 0.0"),
        ({"dt_max": math.inf}, ValueError, "dt_min and dt_max must be positive and rise"),
        (
            {"mixer_types": "mamba", "layer_types": ["swa"]},
            ValueError,
            r"give one of them, got \['swa'\] and 'mamba'",
        ),
        ({"dt_min": 0.0}, ValueError, "dt_min and dt_max must be positive"),
        ({"dt_min": 0.2}, ValueError, "must be positive and rise, got 0.2 and 0.1"),
        ({"dt_rank": "half"}, ValueError, "dt_rank must be 'auto' or at least 1"),
        ({"wiring": "cereal"}, StrictDataclassError, "'serial', 'parallel'.*, got cereal"),
        ({"fading_mode": "chunks"}, StrictDataclassError, "'chunk', 'offset'.*, got chunks"),
        ({"eidetic_overlap": "hide"}, StrictDataclassError, "'allow', 'mask'.*, got hide"),
        ({"innovation_weights": "mean"}, StrictDataclassError, "'uniform', 'exp'.*, got mean"),
        ({"innovation_error": "rel"}, StrictDataclassError, "'absolute', 'relative'.*, got rel"),
        ({"sliding_window": "8"}, StrictDataclassError, "expected int, got str"),
        ({"use_rope": "yes"}, StrictDataclassError, "expected bool, got str"),
        ({"slidingwindow": 8}, LookupError, "did you mean 'sliding_window'"),
    ],
)
def test_wrong_fields_are_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        FAMILY.config(**fields)


@torch.no_grad()
def test_innovations_that_are_not_finite_are_named_by_token():
    model, ids = tiny(mixer_types="bmojo").float(), tokens(1, 9)
    values = model.get_input_embeddings()(ids)
    values[0, 6, 3] = math.nan
    with pytest.raises(ValueError, match=r"innovations must be finite .* got nan at token 6"):
        model(inputs_embeds=values)
    cache = model(ids, use_cache=True).cache
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"got nan at token 0 of the call"):
        model(inputs_embeds=values[:, 6:7], cache=cache)
    again, expected = (model(ids[:, :1], cache=x).logits for x in (cache, before))
    assert torch.equal(again, expected)  # what was refused has left nothing
    model.model.layers[0].mixer.ssm.out_proj.weight *= 1e25
    with pytest.raises(ValueError, match=r"innovations must be finite.*, got inf at token 0"):
        model(ids)


@pytest.mark.parametrize("kind", ["bmojo_f", "swa", "mamba", "attention"])
@torch.no_grad()
def test_a_row_with_nonfinite_values_does_not_affect_other_rows(kind):
    model, ids = tiny(mixer_types=kind), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = mask[1, :4] = 0
    values = model.get_input_embeddings()(ids)
    values[0] = math.nan
    output = model(inputs_embeds=values, attention_mask=mask, use_cache=True)
    new = tokens(2, 6, seed=5)
    got = model(new, cache=output.cache).logits[1]
    assert error(got, model(torch.cat([ids[1:, 4:], new[1:]], dim=1)).logits[0, 5:]) < 1e-10
    assert error(output.logits[1, 4:], model(ids[1:, 4:]).logits[0]) < 1e-10


@pytest.mark.parametrize("name", ["serial", "offset", "long memories"])
@torch.no_grad()
def test_packed_sequences_may_be_empty(name):
    model, ids = tiny(**VARIANTS[name]), tokens(1, 16)
    boundaries = torch.tensor([0, 0, 7, 7, 16, 16])
    output = model(ids, cu_seqlens=boundaries, use_cache=True)
    for begin, end in ((0, 7), (7, 16)):
        alone = model(ids[:, begin:end]).logits
        assert error(output.logits[:, begin:end], alone) < 1e-10
    new = tokens(1, 15, seed=4)
    cache, more = output.cache, torch.tensor([0, 5, 8, 8, 10, 15])
    got = model(new, cu_seqlens=more, cache=cache).logits
    pasts = (ids[:, :0], ids[:, :7], ids[:, :0], ids[:, 7:], ids[:, :0])
    for past, (begin, end) in zip(pasts, itertools.pairwise(more.tolist()), strict=True):
        if begin < end:
            whole = model(torch.cat([past, new[:, begin:end]], dim=1)).logits
            assert error(got[:, begin:end], whole[:, past.shape[1] :]) < 1e-10


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_may_have_no_rows(name):
    model, ids = tiny(**VARIANTS[name]), tokens(2, 9)
    output = model(ids[:0], use_cache=True)
    assert output.logits.shape == (0, 9, 96)
    output.logits.sum().backward()
    with torch.no_grad():
        cache = output.cache
        cache.detach()
        assert model(ids[:0, :1], cache=cache).logits.shape == (0, 1, 96)
        whole = model(ids, use_cache=True).cache
        for one, two in zip(cache.layers, whole.layers, strict=True):
            shapes = {state: value.shape[2:] for state, value in two.states.items()}
            assert {state: value.shape[2:] for state, value in one.states.items()} == shapes


@torch.no_grad()
def test_rows_of_padding_alone_change_nothing():
    model, ids = tiny(), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1] = 0
    output = model(ids, attention_mask=mask, use_cache=True)
    assert error(output.logits[0], model(ids[:1]).logits[0]) < 1e-10
    new = tokens(2, 6, seed=5)
    got = model(new, cache=output.cache).logits
    assert error(got[1], model(new[1:]).logits[0]) < 1e-10


@torch.no_grad()
def test_a_copied_cache_replays_what_the_first_one_did():
    model, ids = tiny(), tokens(1, 10)
    cache = model(ids, use_cache=True).cache
    snapshot = copy.deepcopy(cache)
    first = model(tokens(1, 9, seed=7), cache=cache).logits
    again = model(tokens(1, 9, seed=7), cache=snapshot).logits
    assert torch.equal(first, again)


@torch.no_grad()
def test_the_mixer_alone_takes_its_input_for_the_residual_stream():
    model = tiny(mixer_types="bmojo")
    mixer = model.model.layers[0].mixer
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    assert torch.equal(mixer(x, LayerState()), mixer(x, LayerState(), residual=x))
    assert not torch.equal(mixer(x, LayerState()), mixer(x, LayerState(), residual=2 * x))


def test_positions_go_on_where_each_sequence_had_ended():
    call = Call(
        torch.tensor([0, 5, 5, 14]), torch.tensor([3, 2, 0]), 4, 14, equal=False, following=True
    )
    assert call.positions().tolist() == [*range(3, 8), *range(9)]
    assert call.now.tolist() == [8, 2, 9]
    assert call.made.tolist() == [2, 0, 2]


# --- what it is for ---------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "wiring", "ordered"),
    [(1, "parallel", False), (2, "parallel", True), (1, "serial", True)],
)
def test_without_positions_a_layer_reads_a_set_and_two_layers_an_order(layers, wiring, ordered):
    fields = {"wiring": wiring, "use_rope": False, "num_fading_tokens": 0, "num_eidetic_tokens": 3}
    model = tiny(mixer_types="bmojo", num_hidden_layers=layers, **fields).model
    ids = torch.arange(1, 4).repeat(2, 1)  # within the first window
    ids[1, :2] = ids[1, :2].flip(0)
    last = model(ids).last_hidden_state[:, -1]
    assert ((last[0] - last[1]).abs().max() > 1e-6) == ordered


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_recall_from_behind_the_window_takes_eidetic_memory(tmp_path):
    """Parallel wiring without positions is not among the negatives: see eval/LOG.md."""
    chosen = load_sweep("bmojo-mqar-toy")
    names = ("window rope", "parallel rope fading", "serial nope fading", "serial nope eidetic")
    ledger = sweep(chosen, tmp_path, only={"model": names, "seed": [0]})
    accuracy = {line["model"]: line["value"] for line in ledger}
    assert accuracy["serial nope eidetic"] > 0.95
    # four values stand in a row: who finds them but cannot tell them apart is right in one of four
    for name in names[:-1]:
        assert accuracy[name] < 0.5, name
