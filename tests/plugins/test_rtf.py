"""RTF: the golden checks of its paper on the whole model.

The judge is ``tests/oracles/rtf.py``, float64 numpy from the paper alone.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ssmzoo.modeling.cache import LayerState
from ssmzoo.testing import FamilyConformance
from ssmzoo_kernels import rational_kernel
from ssmzoo_rtf import FAMILY

ORACLE = Path(__file__).parents[1] / "oracles" / "rtf.py"
_spec = importlib.util.spec_from_file_location("rtf_oracle", ORACLE)
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "d_state": 6}
S4 = {"block": "s4", "kernel_mode": "exact", "num_denominators": 3}
HYENA = {"block": "hyena", "kernel_mode": "exact", "mixer_rank": 5, "num_denominators": 12}
S4_TRUNCATED = {**S4, "kernel_mode": "truncated", "trunc_len": 40}
HYENA_TRUNCATED = {**HYENA, "kernel_mode": "truncated", "trunc_len": 40}
ALL = [S4, HYENA, S4_TRUNCATED, HYENA_TRUNCATED]
NAMES = ["s4", "hyena", "s4-truncated", "hyena-truncated"]
SSM = ("a", "b", "D", "montel_slack")


class TestRTF(FamilyConformance):
    family = "rtf"
    oracle = staticmethod(oracle.logits)


class TestRTFS4(FamilyConformance):
    family = replace(
        FAMILY, tiny={**FAMILY.tiny, **S4, "num_denominators": 1}, lora_targets=("out_proj",)
    )
    oracle = staticmethod(oracle.logits)


class TestRTFTruncated(FamilyConformance):
    family = replace(FAMILY, tiny={**FAMILY.tiny, "kernel_mode": "truncated", "trunc_len": 64})
    oracle = staticmethod(oracle.logits)


def relative(got, expected):
    """Largest error relative to the largest entry; nan stays nan and fails every comparison."""
    got, expected = (np.asarray(x, dtype=np.float64) for x in (got, expected))
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


def stir(model, loud):
    """Move what starts at zero or one; the filters become long, stable and unlike each other.

    Loud matrices let every part of a mixer show in the logits, and rounding to bfloat16, too.
    """
    generator = torch.Generator().manual_seed(1)
    constrained = model.config.denominator_constraint == "l1_montel"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[1]
            noise = torch.randn(parameter.shape, generator=generator)
            if leaf == "a":
                share = noise / noise.abs().sum(dim=-1, keepdim=True)
                parameter.copy_(noise if constrained else 0.95 * share)
            elif leaf == "b":
                parameter.copy_(noise)
            elif leaf == "montel_slack":
                parameter.fill_(0.1)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            elif loud and "_proj." in name and ".mixer." in name:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def build(dtype=torch.float64, cls=FAMILY.causal_lm_class, loud=True, **fields):
    torch.manual_seed(0)
    return stir(cls(FAMILY.config_class(**{**TINY, **fields})), loud).eval().to(dtype)


def tokens(batch, length, seed=0, vocab_size=61):
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab_size, size=(batch, length)))


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def judged(model, input_ids, form="convolution"):
    return oracle.logits(arrays(model), model.config.to_dict(), input_ids.numpy(), form)


@torch.no_grad()
def run(model, input_ids, cache=None, **kwargs):
    """Logits as float64, and the cache."""
    out = model(input_ids, past_key_values=cache, use_cache=True, **kwargs)
    return out.logits.double(), out.past_key_values


@torch.no_grad()
def whole(model, input_ids):
    return model(input_ids, use_cache=False).logits.double()


def cut(model, input_ids, *cuts):
    """Logits of one sequence fed in pieces."""
    cache, out = None, []
    for piece in torch.tensor_split(input_ids, cuts, dim=1):
        got, cache = run(model, piece, cache)
        out.append(got)
    return torch.cat(out, dim=1)


# --- the oracle --------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
@pytest.mark.parametrize("fields", ALL, ids=NAMES)
@pytest.mark.parametrize(
    "backbone",
    [
        {},
        {"norm_type": "layer", "intermediate_size": 20},
        {"norm_type": "batch", "prenorm": False},
        {"prenorm": False, "intermediate_size": 20, "tie_word_embeddings": False},
    ],
    ids=lambda fields: "-".join(fields) or "default",
)
def test_the_model_matches_the_oracle_in_float64(fields, constraint, backbone):
    model = build(**fields, denominator_constraint=constraint, **backbone)
    input_ids = tokens(2, 24)
    assert relative(whole(model, input_ids), judged(model, input_ids)) <= 1e-10


@pytest.mark.parametrize("denominators", [1, 2, 12])
def test_a_channel_reads_the_denominator_of_its_group(denominators):
    own = {"num_denominators": denominators, "denominator_constraint": "none"}
    model = build(**{**S4, **own})
    got, config, weights = whole(model, tokens(2, 24)), model.config.to_dict(), arrays(model)
    assert weights["model.layers.0.mixer.a"].shape == (denominators, 6)
    assert relative(got, judged(model, tokens(2, 24))) <= 1e-10
    for i in range(2):
        name = f"model.layers.{i}.mixer.a"
        weights[name] = np.roll(np.repeat(weights[name], 12 // denominators, axis=0), 1, axis=0)
    moved = oracle.logits(weights, {**config, "num_denominators": 12}, tokens(2, 24).numpy())
    assert (relative(got, moved) <= 1e-10) == (denominators == 1)


# --- golden check 12: parallel equals step -------------------------------------------------------


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 40])
def test_decoding_token_by_token_equals_one_pass(fields, length):
    input_ids = tokens(2, length)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(dtype, **fields)
        expected = judged(model, input_ids)
        assert relative(whole(model, input_ids), expected) <= tolerance
        assert relative(cut(model, input_ids, *range(1, length)), expected) <= tolerance
    model = build(torch.bfloat16, loud=False, **fields)
    got = cut(model, input_ids, *range(1, length))
    assert relative(got, whole(model, input_ids)) <= 2e-2


@pytest.mark.parametrize("fields", [S4, HYENA], ids=NAMES[:2])
@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_decoding_a_long_sequence_equals_one_pass_in_float32(fields, length):
    model, input_ids = build(torch.float32, **fields), tokens(1, length)
    expected = judged(model, input_ids, "recurrence")
    assert relative(whole(model, input_ids), expected) <= 1e-5
    tail = range(max(1, length - 70), length)
    assert relative(cut(model, input_ids, *tail), expected) <= 1e-5


# --- golden check 13: prefill and continuation ---------------------------------------------------


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
@pytest.mark.parametrize("prompt", [1, 5, 6, 23])  # 1, n - 1, n, 3 n + 5
def test_steps_after_a_prefill_equal_one_pass(fields, prompt):
    model, input_ids = build(**fields), tokens(2, 33)
    got = cut(model, input_ids, *range(prompt, 33))
    assert relative(got, judged(model, input_ids)) <= 1e-10


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_random_chunks_equal_one_prefill(fields):
    model, input_ids = build(**fields), tokens(2, 37)
    expected = judged(model, input_ids)
    rng = np.random.default_rng(3)
    for _ in range(5):
        cuts = sorted(rng.choice(np.arange(1, 37), size=rng.integers(1, 8), replace=False))
        assert relative(cut(model, input_ids, *(int(c) for c in cuts)), expected) <= 1e-10, cuts


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_greedy_generation_of_64_tokens_with_and_without_cache_is_identical(fields):
    if "trunc_len" in fields:
        fields = {**fields, "trunc_len": 80}
    model, prompt = build(**fields), tokens(2, 6)
    settings = {
        "max_new_tokens": 64,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    cached = model.generate(prompt, use_cache=True, **settings)
    recomputed = model.generate(prompt, use_cache=False, **settings)
    assert torch.equal(cached.sequences, recomputed.sequences)
    got = torch.stack(cached.logits, dim=1)
    assert relative(got, judged(model, cached.sequences[:, :-1])[:, 5:]) <= 1e-6  # float32 logits


# --- golden check 14: padding and beams ----------------------------------------------------------


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
@pytest.mark.parametrize("batch", [1, 3])
def test_left_padding_changes_nothing_then_or_later(fields, batch):
    model, width = build(**fields), 14
    lengths = (9, 14, 1)[:batch]
    rows = [tokens(1, n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(r, (width - r.shape[1], 0), value=7) for r in rows])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    got, cache = run(model, padded, attention_mask=mask)
    more = tokens(batch, 4, seed=20)
    longer = torch.cat([mask, torch.ones(batch, 4, dtype=mask.dtype)], dim=1)
    later = run(model, more, cache, attention_mask=longer)[0]
    for i, row in enumerate(rows):
        alone, state = run(model, row)
        assert relative(got[i : i + 1, width - lengths[i] :], alone) <= 1e-10
        assert relative(later[i : i + 1], run(model, more[i : i + 1], state)[0]) <= 1e-10


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_beams_reorder_the_state(fields):
    model, prompt, more = build(**fields), tokens(3, 8), tokens(3, 5, seed=1)
    expected = run(model, more, run(model, prompt)[1])[0]
    cache, order = run(model, prompt)[1], torch.tensor([2, 0, 2])
    cache.reorder_cache(order)
    assert relative(run(model, more[order], cache)[0], expected[order]) <= 1e-10
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    with_cache = model.generate(prompt, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(prompt, use_cache=False, **settings))


# --- golden check 18: unstable channels ----------------------------------------------------------


def unstable(dtype, block, outside=2):
    """A truncated model of whose denominators the first has poles outside the unit circle.

    The others forget within the grid, so that their recurrence goes on where their kernel ends.
    """
    fields = {**block, "trunc_len": 32, "denominator_constraint": "none"}
    model = build(dtype, **fields)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.a.mul_(0.4 ** torch.arange(1, 7))  # 0.4 times the poles
            radius = torch.tensor([-2 * 1.3 * np.cos(0.7), 1.3**2])
            layer.mixer.a[0] = 0
            layer.mixer.a[0, :2] = radius
            assert oracle.poles_outside(layer.mixer.a[0].double().numpy()) == outside
    return model


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:])
def test_an_unstable_channel_decodes_as_the_window_it_was_trained_as(fields):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, input_ids = unstable(dtype, fields), tokens(1, 64)  # twice the grid
        expected = judged(model, input_ids)
        assert relative(cut(model, input_ids, *range(20, 64)), expected) <= tolerance
        assert relative(cut(model, input_ids, 3, 31, 32, 33, 50), expected) <= tolerance


def test_the_recurrence_would_fail_there():
    model, input_ids = unstable(torch.float64, S4_TRUNCATED), tokens(1, 64)
    with np.errstate(all="ignore"):
        stepped = judged(model, input_ids, "recurrence")
    assert not relative(stepped, judged(model, input_ids)) <= 1e-2


# --- golden check 19: causality ------------------------------------------------------------------


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_no_output_depends_on_a_later_input(fields):
    mixer = build(torch.float32, **fields).model.layers[0].mixer
    u = torch.randn(1, 30, 12, requires_grad=True)
    y = mixer(u, LayerState())
    for t in (0, 7, 28):
        (grad,) = torch.autograd.grad(y[0, t].sum(), u, retain_graph=True)
        assert grad[0, t + 1 :].abs().max() < 1e-6
        assert grad[0, : t + 1].abs().max() > 1e-3
    model, input_ids = build(torch.float32, **fields), tokens(1, 30)
    changed = input_ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 61
    a, b = whole(model, input_ids), whole(model, changed)
    assert relative(b[:, :-1], a[:, :-1]) < 1e-5
    assert relative(b[:, -1], a[:, -1]) > 1e-3


# --- golden check 20: both directions ------------------------------------------------------------


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
@pytest.mark.parametrize("length", [1, 2, 17, 20])
def test_a_bidirectional_encoder_is_the_explicit_two_sided_sum(fields, constraint, length):
    own = {"bidirectional": True, "denominator_constraint": constraint}
    model = build(cls=FAMILY.model_class, **fields, **own)
    input_ids = tokens(2, length)
    with torch.no_grad():
        got = model(input_ids, use_cache=False).last_hidden_state
    weights = {f"model.{name}": value for name, value in arrays(model).items()}
    x = weights["model.embed_tokens.weight"][input_ids.numpy()]
    assert relative(got, oracle.backbone(weights, model.config.to_dict(), x)) <= 1e-10


def test_the_futures_filter_never_meets_the_past_or_the_present():
    mixer = build(cls=FAMILY.model_class, **S4, bidirectional=True).layers[0].mixer
    u = torch.zeros(1, 11, 12, dtype=torch.float64)
    u[:, 5] = torch.randn(12)
    with torch.no_grad():
        before = mixer(u, LayerState())
        mixer.b[12:] *= 3
        mixer.D[12:] *= 3
        after = mixer(u, LayerState())
    assert relative(after[:, 5:], before[:, 5:]) <= 1e-12
    assert relative(after[:, 4], before[:, 4]) > 1e-2


def test_a_bidirectional_model_has_no_cache_and_does_not_generate():
    model = build(cls=FAMILY.model_class, **S4, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional"):
        model(tokens(1, 4), use_cache=True)
    with pytest.raises(ValueError, match="bidirectional"):
        build(**S4, bidirectional=True).generate(tokens(1, 4), max_new_tokens=2)


# --- golden check 21: the published kernel --------------------------------------------------------


@pytest.mark.parametrize("init", ["zeros", "xavier", "montel"])
@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
@pytest.mark.parametrize("denominators", [1, 2, 12])
def test_the_truncated_kernel_is_the_published_one(init, constraint, denominators):
    fields = {**S4_TRUNCATED, "num_denominators": denominators, "coefficient_init": init}
    fields |= {"denominator_constraint": constraint, "constraint_margin": 0.0}
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields}))
    weights, config = arrays(model), model.config.to_dict()
    ((a, b, gain),) = oracle.coefficients(weights, config, "model.layers.0.mixer.")
    above = np.fft.rfft(np.pad(b, ((0, 0), (1, 0))), 40)
    below = np.fft.rfft(np.pad(a, ((0, 0), (1, 0)), constant_values=1), 40)
    published = np.fft.irfft(above / below + gain[:, None], 40)
    (taps,) = oracle.kernels(weights, config, "model.layers.0.mixer.", 40)
    assert relative(taps, published) <= 1e-12
    rows = torch.from_numpy(a[:: 12 // denominators]).float()
    got = rational_kernel(rows, torch.from_numpy(b).float(), 40, mode="truncated", trunc_len=40)
    got[:, 0] += torch.from_numpy(gain)
    assert relative(got, published) <= 1e-6 / min(1, np.abs(below).min())


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:])
def test_a_shorter_input_meets_a_prefix_of_one_fixed_kernel(fields):
    model, input_ids = build(**fields), tokens(2, 40)
    long = whole(model, input_ids)
    for length in (1, 13, 39):
        assert relative(whole(model, input_ids[:, :length]), long[:, :length]) <= 1e-10


# --- golden check 22: precision -------------------------------------------------------------------


def filter_state_dtypes(cache):
    states = (item for layer in cache.layers for item in layer.states.items())
    return {x.dtype for name, x in states if "conv" not in name and x.is_floating_point()}


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_casting_to_bfloat16_leaves_filters_and_states_in_float32(fields):
    own = {"denominator_constraint": "l1_montel"}
    model = build(torch.float32, loud=False, **fields, **own)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    model = model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if ".mixer." in name and name.rsplit("mixer.", 1)[1] in SSM:
            assert torch.equal(parameter, expected[name]), name
        else:
            assert parameter.dtype == torch.bfloat16, name
    got, cache = run(model, tokens(2, 20))
    assert relative(got, judged(model, tokens(2, 20))) <= 2e-2
    assert filter_state_dtypes(cache) == {torch.float32}


@pytest.mark.parametrize("fields", ALL, ids=NAMES)
def test_autocast_does_not_touch_the_filter(fields):
    model, input_ids = build(torch.float32, loud=False, **fields), tokens(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        got, cache = run(model, input_ids)
    assert relative(got, judged(model, input_ids)) <= 2e-2
    assert filter_state_dtypes(cache) == {torch.float32}


# --- golden check 24: sizes -----------------------------------------------------------------------


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_wikitext_preset_has_125_million_parameters():
    config = FAMILY.config("rtf-hyena-125m")
    with torch.device("meta"):
        model = FAMILY.causal_lm_class(config)
    assert count(model) == 124_981_248
    assert count(model) == oracle.hyena_lm_parameters(50264, 768, 12, 64, 768, 384, 3072)


@pytest.mark.parametrize("denominators", [1, 3, 12])
@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
def test_a_filter_bank_has_its_number_of_coefficients(denominators, constraint):
    fields = {**S4, "num_denominators": denominators, "denominator_constraint": constraint}
    mixer = build(**fields).model.layers[0].mixer
    own = sum(p.numel() for name, p in mixer.named_parameters() if name in SSM)
    montel = constraint == "l1_montel"
    assert own == oracle.filter_parameters(12, 6, denominators, montel)
    assert own == 6 * (12 + denominators) + 12 + montel * denominators


def test_a_new_filter_with_zero_coefficients_passes_its_input_on():
    fields = {**S4, "coefficient_init": "zeros", "denominator_constraint": "none"}
    weights = arrays(FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields})))
    for name, value in weights.items():
        if name.endswith((".a", ".b")):
            assert not value.any()
        elif name.endswith("mixer.D"):
            assert (value == 1).all()
