"""RTF: the golden checks of its paper on the whole model.

The judge is ``tests/oracles/rtf.py``, float64 numpy from the paper alone.
"""

import copy
import functools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import rtf as oracle
from tests.plugins.logits import assert_left_padding_changes_nothing, relative, run, tokens

from ssmzoo.modeling import LayerState
from ssmzoo.recipe import load_recipe
from ssmzoo.testing import FamilyConformance
from ssmzoo_kernels import rational_kernel
from ssmzoo_rtf import FAMILY
from ssmzoo_rtf.stability import poles

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "d_state": 6}
S4 = {"block": "s4", "mixer_rank": None, "kernel_mode": "exact", "num_denominators": 3}
HYENA = {"block": "hyena", "kernel_mode": "exact", "mixer_rank": 5, "num_denominators": 12}
S4_TRUNCATED = {**S4, "kernel_mode": "truncated", "trunc_len": 40}
HYENA_TRUNCATED = {**HYENA, "kernel_mode": "truncated", "trunc_len": 40}
S4_RINGING = {**S4_TRUNCATED, "decode_mode": "recurrent"}
ALL = [S4, HYENA, S4_TRUNCATED, HYENA_TRUNCATED, S4_RINGING]
NAMES = ["s4", "hyena", "s4-truncated", "hyena-truncated", "s4-ringing"]
MODAL = {**HYENA, "filter": "modal", "num_denominators": 6}
IMPLICIT = {"block": "hyena", "filter": "implicit", "trunc_len": 20}
SSM = ("a", "b", "D", "montel_slack")


class TestRTF(FamilyConformance):
    family = "rtf"
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestRTFS4(FamilyConformance):
    # with one denominator the slack's gradient is one number, a sum that may cancel to anything
    family = replace(
        FAMILY, tiny={**FAMILY.tiny, **S4, "num_denominators": 2}, lora_targets=("out_proj",)
    )
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestRTFTruncated(FamilyConformance):
    """Inputs are mostly longer than the window; most channels decode from their last inputs."""

    family = replace(FAMILY, tiny={**FAMILY.tiny, "kernel_mode": "truncated", "trunc_len": 8})
    oracle = staticmethod(oracle.logits)


def implicit_taps(weights, config, prefix):
    """Hyena's filter, equation by equation: [D, M] with the direct gain."""
    taps, bands = config["trunc_len"], (config["implicit_features"] - 1) // 2
    t = np.arange(taps)
    time = t / (taps - 1)
    waves = np.exp(-2j * np.pi / taps * t[:, None] * np.linspace(1e-4, bands - 1, bands))
    x = np.concatenate([time[:, None], waves.real, waves.imag], axis=1)
    omega = weights[prefix + "implicit_frequency"]
    layers = [(weights[prefix + "implicit_in"], weights[prefix + "implicit_in_bias"])]
    hidden = (weights[prefix + "implicit_hidden"], weights[prefix + "implicit_hidden_bias"])
    for weight, bias in [*layers, *zip(*hidden, strict=True)]:
        x = np.sin(omega * (x @ weight.T + bias))
    out = weights[prefix + "implicit_out"]
    slow, fast = config["implicit_slow_decay"], config["implicit_fast_decay"]
    rates = np.linspace(np.log(100) / slow, np.log(100) / fast, len(out))
    kernel = out @ x.T * np.exp(-rates[:, None] * time)
    kernel[:, 0] += weights[prefix + "D"]
    return kernel


def hyena_logits(weights, config, input_ids):
    """Plain Hyena: implicit filters, no norm, a square projection."""
    weights = {name: np.asarray(x, dtype=np.float64) for name, x in weights.items()}
    x = weights["model.embed_tokens.weight"][input_ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        prefix = layer + "mixer."
        h = oracle.norm(weights, config, layer + "norm", x)
        h = oracle.linear(weights, prefix + "in_proj", h)
        x0, x1, v = np.split(oracle.short_conv(h, weights, prefix + "short_conv"), 3, axis=-1)
        y = oracle.convolution(v * x1, implicit_taps(weights, config, prefix)) * x0
        x = x + oracle.linear(weights, prefix + "out_proj", y)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return oracle.norm(weights, config, "model.norm", x) @ head.T


@pytest.mark.variant
class TestHyena(FamilyConformance):
    tiny = {"mixer_rank": None, "trunc_len": 12, "implicit_features": 5, "implicit_width": 6}
    family = replace(
        FAMILY,
        tiny={**FAMILY.tiny, **IMPLICIT, **tiny},
        lora_targets=("in_proj", "out_proj"),
    )
    oracle = staticmethod(hyena_logits)


def modal_logits(weights, config, input_ids, form="convolution", held=np.complex128):
    """The oracle with the coefficients of the modes and their conjugates.

    A model's poles are what the precision of its parameters holds of them.
    """
    weights = {name: np.asarray(x, dtype=np.float64) for name, x in weights.items()}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.mixer."
        decay = np.exp(weights[prefix + "modal_log_decay"])
        poles = np.exp(-decay + 1j * weights[prefix + "modal_angle"]).astype(held).astype(complex)
        residues = weights[prefix + "modal_residues"] @ np.array([1, 1j])
        a = np.array([np.poly([*row, *row.conj()]).real for row in poles])  # with the leading 1
        sharing = len(residues) // len(poles)
        own, order = np.repeat(poles, sharing, axis=0), a.shape[1] - 1
        taps = (residues[..., None] * own[..., None] ** np.arange(order)).sum(1).real
        b = np.zeros_like(taps)
        for m in range(order):
            for j in range(m + 1):
                b[:, m] += np.repeat(a[:, j], sharing) * taps[:, m - j]
        weights[prefix + "a"], weights[prefix + "b"] = a[:, 1:], b
    config = {**config, "denominator_constraint": "none"}
    return oracle.logits(weights, config, input_ids, form)


@pytest.mark.variant
class TestRTFModal(FamilyConformance):
    family = replace(FAMILY, tiny={**FAMILY.tiny, "filter": "modal"})
    oracle = staticmethod(modal_logits)


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


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def judged(model, input_ids, form="convolution"):
    logits = oracle.logits
    if model.config.filter == "modal":
        held = np.complex128 if model.model.layers[0].mixer.D.dtype.itemsize == 8 else np.complex64
        logits = functools.partial(modal_logits, held=held)
    return logits(arrays(model), model.config.to_dict(), input_ids.numpy(), form)


@torch.no_grad()
def whole(model, input_ids, **kwargs):
    return model(input_ids, use_cache=False, **kwargs).logits.double()


def cut(model, input_ids, *cuts):
    """Logits of one sequence fed in pieces."""
    cache, out = None, []
    for piece in torch.tensor_split(input_ids, cuts, dim=1):
        got, cache = run(model, piece, cache)
        out.append(got)
    return torch.cat(out, dim=1)


# --- the oracle ----------------------------------------------------------------------------------


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
@pytest.mark.parametrize("length", [1, 6, 7, 40])
def test_decoding_token_by_token_equals_one_pass(fields, length):
    input_ids = tokens(2, length)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(dtype, loud=dtype == torch.float64, **fields)
        expected = judged(model, input_ids)
        assert relative(whole(model, input_ids), expected) <= tolerance
        assert relative(cut(model, input_ids, *range(1, length)), expected) <= tolerance
    model = build(torch.bfloat16, loud=False, **fields)
    got, exact = cut(model, input_ids, *range(1, length)), judged(model.double(), input_ids)
    model = model.to(torch.bfloat16)
    # a whole sequence is rounded between layers, a token in one call is not
    assert relative(got, exact) <= max(1e-2, relative(whole(model, input_ids), exact))


@pytest.mark.parametrize("fields", [S4, HYENA], ids=NAMES[:2])
@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_decoding_a_long_sequence_equals_one_pass_in_float32(fields, length):
    model, input_ids = build(torch.float32, **fields), tokens(1, length)
    expected = judged(model, input_ids, "recurrence")
    assert relative(whole(model, input_ids), expected) <= 1e-5
    tail = range(max(1, length - 70), length)
    assert relative(cut(model, input_ids, *tail), expected) <= 1e-5


# --- golden check 18: unstable channels ----------------------------------------------------------


def unstable(dtype, block, outside=2):
    """A truncated model of whose denominators the first has poles outside the unit circle.

    The others forget within the grid: they may decode by recurrence.
    """
    fields = {**block, "trunc_len": 32, "denominator_constraint": "none"}
    model = build(dtype, **fields)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.a.mul_(0.2 ** torch.arange(1, 7))  # 0.2 times the poles
            radius = torch.tensor([-2 * 1.3 * np.cos(0.7), 1.3**2])
            layer.mixer.a[0] = 0
            layer.mixer.a[0, :2] = radius
            assert oracle.poles_outside(layer.mixer.a[0].double().numpy()) == outside
    return model


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:4])
def test_an_unstable_channel_decodes_as_the_window_it_was_trained_as(fields):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, input_ids = unstable(dtype, fields), tokens(1, 64)  # twice the grid
        expected = judged(model, input_ids)
        assert relative(cut(model, input_ids, *range(20, 64)), expected) <= tolerance
        assert relative(cut(model, input_ids, 3, 31, 32, 33, 50), expected) <= tolerance


@pytest.mark.parametrize("beyond", [1, 2])
def test_an_unstable_filter_alone_decodes_to_six_digits(beyond):
    """Up to twice the grid, with no layer around it to hide an error."""
    model = unstable(torch.float32, {**S4_TRUNCATED, "block": "filter"})
    weights, mixer = arrays(model), model.model.layers[0].mixer
    u = torch.randn(2, 32 * beyond, 12, generator=torch.Generator().manual_seed(2))
    (taps,) = oracle.kernels(weights, model.config.to_dict(), "model.layers.0.mixer.", 64)
    outputs, states = [], {}
    with torch.no_grad():
        for token in u.split(1, dim=1):
            state = LayerState(states, keep=True)
            outputs.append(mixer(token, state))
            states = state.final
    assert states.keys() == {"ring", "position", "inputs"}
    expected = oracle.convolution(u.double().numpy(), taps)
    assert relative(torch.cat(outputs, 1), expected) <= 1e-6


def test_the_recurrence_of_an_unstable_filter_fails():
    model, input_ids = unstable(torch.float64, S4_TRUNCATED), tokens(1, 64)
    with np.errstate(all="ignore"):
        stepped = judged(model, input_ids, "recurrence")
    assert not relative(stepped, judged(model, input_ids)) <= 1e-2


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


# --- golden check 21: the published kernel -------------------------------------------------------


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


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:4])
def test_a_shorter_input_meets_a_prefix_of_one_fixed_kernel(fields):
    model, input_ids = build(**fields), tokens(2, 40)
    long = whole(model, input_ids)
    for length in (1, 13, 39):
        assert relative(whole(model, input_ids[:, :length]), long[:, :length]) <= 1e-10


# --- golden check 22: precision ------------------------------------------------------------------


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


# --- golden check 24: sizes ----------------------------------------------------------------------


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


# --- what decoding keeps between calls -----------------------------------------------------------


def decoded(model, input_ids=None):
    """Logits of decoding, with whatever the model has kept."""
    return cut(model, tokens(1, 12) if input_ids is None else input_ids, *range(3, 12))


def changed_by_optimizer(model, other):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def changed_in_place(model, other):
    with torch.no_grad():
        for parameter in model.model.layers[0].mixer.parameters(recurse=False):
            parameter.mul_(-1.5)
    return model


def changed_by_loading(model, other):
    model.load_state_dict(other.state_dict())
    return model


def changed_by_assigning(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    return model


def changed_parameter(model, other):
    for layer in model.model.layers:
        layer.mixer.D = torch.nn.Parameter(layer.mixer.D.detach() + 1)
    return model


@pytest.mark.parametrize("fields", [*ALL, MODAL, IMPLICIT], ids=[*NAMES, "modal", "implicit"])
@pytest.mark.parametrize(
    "change",
    [
        changed_by_optimizer,
        changed_in_place,
        changed_by_loading,
        changed_by_assigning,
        changed_parameter,
    ],
)
def test_decoding_follows_every_change_of_the_parameters(fields, change):
    model = build(**fields)
    other = build(**fields)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    before = decoded(model)
    model = change(model, other)
    after = decoded(model)
    assert relative(after, before) > 1e-4
    fresh = FAMILY.causal_lm_class(model.config).double().eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(decoded(fresh), after)


@pytest.mark.parametrize(
    "fields", [S4_TRUNCATED, MODAL, IMPLICIT], ids=["rational", "modal", "implicit"]
)
def test_decoding_follows_casts_copies_and_pickles(fields):
    model = build(torch.float32, **fields)
    before = decoded(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(decoded(other), before)
        changed_in_place(other, None)
        assert not torch.equal(decoded(other), before)
        assert torch.equal(decoded(model), before)
    exact = decoded(model.double())
    assert relative(exact, judged_any(model, tokens(1, 12))) <= 1e-10


def judged_any(model, input_ids):
    if model.config.filter == "implicit":
        return hyena_logits(arrays(model), model.config.to_dict(), input_ids.numpy())
    return judged(model, input_ids)


@pytest.mark.parametrize("fields", [*ALL, MODAL, IMPLICIT], ids=[*NAMES, "modal", "implicit"])
def test_filters_deployed_once_serve_all_tokens(fields, monkeypatch):
    model, made = build(**fields), []
    mixer = type(model.model.layers[0].mixer)
    deploy = mixer._deploy
    monkeypatch.setattr(mixer, "_deploy", lambda self: made.append(1) or deploy(self))
    decoded(model)
    decoded(model)
    assert len(made) == 2  # layers
    with torch.no_grad():
        model.model.layers[1].mixer.D.add_(1)
    decoded(model)
    assert len(made) == 3


def test_a_forward_pass_that_fails_half_way_leaves_the_state_as_it_was(monkeypatch):
    model, input_ids = build(**HYENA), tokens(2, 12)
    expected = whole(model, input_ids)
    cache = run(model, input_ids[:, :8])[1]
    for t in range(8, 12):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mixer, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(model, (input_ids[:, t : t + 1] + 1) % 61, cache)
        got, cache = run(model, input_ids[:, t : t + 1], cache)
        assert relative(got, expected[:, t : t + 1]) <= 1e-10


def test_decoding_under_inference_mode_leaves_a_model_that_trains():
    for fields in (S4, HYENA_TRUNCATED, MODAL, IMPLICIT):
        model, input_ids = build(**fields), tokens(1, 12)
        with torch.inference_mode():
            first = model(input_ids[:, :8], use_cache=True)
            model(input_ids[:, 8:9], cache=first.cache)
        first = model(input_ids[:, :8], use_cache=True)
        rest = model(input_ids[:, 8:], cache=first.cache)
        rest.logits.square().sum().backward()
        expected = judged_any(model, input_ids)[:, 8:]
        assert relative(rest.logits.detach(), expected) <= 1e-10
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "fields",
    [MODAL, IMPLICIT, HYENA_TRUNCATED, {**HYENA_TRUNCATED, "decode_mode": "fir"}],
    ids=["modal", "implicit", "truncated", "fir"],
)
def test_frozen_filters_that_decoded_under_inference_mode_pass_a_gradient_on(fields):
    model, input_ids = build(**fields), tokens(1, 12)
    model.requires_grad_(False).model.embed_tokens.requires_grad_(True)
    with torch.inference_mode():
        first = model(input_ids[:, :8], use_cache=True)
        model(input_ids[:, 8:9], cache=first.cache)
    first = model(input_ids[:, :8], use_cache=True)
    model(input_ids[:, 8:9], cache=first.cache).logits.square().sum().backward()
    assert model.model.embed_tokens.weight.grad.any()


# --- which way a filter decodes ------------------------------------------------------------------


def states(model, input_ids):
    return {name: x.shape for name, x in run(model, input_ids)[1].layers[0].states.items()}


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:4])
def test_fir_decoding_is_the_trained_window_at_any_length(fields):
    model = build(**{**fields, "trunc_len": 16}, decode_mode="fir")
    input_ids = tokens(1, 50)
    expected = judged(model, input_ids)
    assert relative(whole(model, input_ids), expected) <= 1e-10
    assert relative(cut(model, input_ids, *range(5, 50)), expected) <= 1e-10
    assert relative(cut(model, input_ids, 2, 17, 18, 40), expected) <= 1e-10
    assert states(model, input_ids)["inputs"] == (1, 15, 12)


def packed(model, rows):
    """Logits of rows packed into one."""
    bounds = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0)
    return whole(model, torch.cat(rows, dim=1), cu_seqlens=bounds)


@pytest.mark.parametrize("fields", [S4_TRUNCATED, HYENA_TRUNCATED], ids=NAMES[2:4])
@pytest.mark.parametrize("decode_mode", ["auto", "fir", "recurrent"])
def test_five_forms_agree_beyond_the_window(fields, decode_mode):
    form = "recurrence" if decode_mode == "recurrent" else "convolution"
    fields = {**fields, "trunc_len": 16, "decode_mode": decode_mode}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(dtype, **fields)
        hold_five_forms(model, functools.partial(judged, model, form=form), tolerance)
        forms = [judged(model, tokens(1, 50), name) for name in ("recurrence", "convolution")]
        assert relative(forms[0][:, :16], forms[1][:, :16]) <= 1e-10
        assert relative(*forms) > 1e-3  # these filters are far from silent at the end


def hold_five_forms(model, judge, tolerance):
    """Compare logits whole, in chunks, token by token, packed and padded with those of a judge."""
    input_ids = tokens(1, 50)
    expected = judge(input_ids)
    assert relative(whole(model, input_ids), expected) <= tolerance
    assert relative(cut(model, input_ids, *range(1, 50)), expected) <= tolerance
    assert relative(cut(model, input_ids, 3, 15, 16, 17, 40), expected) <= tolerance
    short = tokens(1, 21, seed=5)
    both = packed(model, [input_ids, short])
    assert relative(both[:, :50], expected) <= tolerance
    assert relative(both[:, 50:], judge(short)) <= tolerance
    mask = torch.ones(2, 50, dtype=torch.int64)
    mask[1, :29] = 0
    batch = torch.cat([input_ids, torch.cat([torch.full((1, 29), 7), short], dim=1)])
    got, cache = run(model, batch, attention_mask=mask)
    assert relative(got[:1], expected) <= tolerance
    assert relative(got[1:, 29:], judge(short)) <= tolerance
    longer = torch.cat([short, tokens(1, 1, seed=6)], dim=1)
    last = run(model, longer[:, -1:].expand(2, 1), cache)[0][1:]
    assert relative(last, judge(longer)[:, -1:]) <= tolerance


@pytest.mark.parametrize("decode_mode", ["auto", "recurrent"])
def test_chunks_beyond_the_window_have_the_gradients_of_the_whole(decode_mode):
    fields = {**S4_TRUNCATED, "trunc_len": 16, "decode_mode": decode_mode}
    model, input_ids = build(**fields), tokens(2, 40)
    found = slopes(model, input_ids, (3, 20, 21))
    for name, expected in slopes(model, input_ids).items():
        assert relative(found[name], expected) <= 1e-10, name


def slopes(model, input_ids, cuts=()):
    """Gradients of a fixed sum of the logits, by name, of one sequence fed in pieces."""
    cache, outputs = None, []
    for piece in torch.tensor_split(input_ids, cuts, dim=1):
        out = model(piece, cache=cache, use_cache=bool(cuts))
        cache = out.cache
        outputs.append(out.logits)
    logits = torch.cat(outputs, dim=1)
    names, parameters = zip(*model.named_parameters(), strict=True)
    probe = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    grads = torch.autograd.grad((logits * probe.to(logits.dtype)).sum(), parameters)
    return dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("gap", [1e-1, 2e-3])
def test_gradients_at_the_boundary_err_by_what_rounding_them_once_costs(gap):
    """The constraint takes from a gradient what points across the boundary, there most of it.

    So what one rounding of the constrained denominators and of their gradient costs, all else being
    float64, is the unit: a transform on the way rounds as well.
    """
    fields = {**S4_RINGING, "d_state": 4, "trunc_len": 64, "constraint_margin": 0.0}
    input_ids, name = tokens(2, 13), "model.layers.0.mixer.a"

    def built(dtype):
        model = build(torch.float32, **fields, denominator_constraint="l1_montel")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mixer.a.copy_(-layer.mixer.a.abs())  # a slow real pole
                layer.mixer.montel_slack.copy_(gap * layer.mixer.a.abs().sum(1))
        return model.to(dtype)

    def freed(rounded):
        """The float64 gradient by the constrained denominators of all layers."""
        free = build(**fields, denominator_constraint="none")
        free.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad():
            for layer, own in zip(free.model.layers, model.model.layers, strict=True):
                a = own.mixer.denominators()
                layer.mixer.a.copy_(a.float() if rounded else a)
        return slopes(free, input_ids)[name]

    def pulled(gradient):
        return torch.autograd.grad(mixer.denominators(), mixer.a, gradient)[0]

    model = built(torch.float64)
    mixer = model.model.layers[0].mixer
    exact = slopes(model, input_ids)[name]
    gradient = freed(rounded=False)
    assert relative(pulled(gradient), exact) <= 1e-10
    budget = relative(pulled(freed(rounded=True)), exact)
    budget += relative(pulled(gradient.float().double()), exact)
    if gap < 1e-2:
        assert gradient.abs().max() > 1000 * exact.abs().max()
        assert budget > 1e-5
    model = built(torch.float32)
    for cuts in ((), (5, 6, 10), tuple(range(1, 13))):
        found = relative(slopes(model, input_ids, cuts)[name], exact)
        assert found <= 3 * budget + 1e-6, cuts


def test_each_channel_decodes_in_the_way_that_its_denominator_allows():
    model = unstable(torch.float64, S4_TRUNCATED)
    found = states(model, tokens(2, 9))
    assert found["ring"] == (2, 7, 8)  # two of three groups of four channels
    assert found["inputs"] == (2, 31, 4)
    silent = unstable(torch.float64, S4_TRUNCATED)
    with torch.no_grad():
        for layer in silent.model.layers:
            layer.mixer.a[0] = layer.mixer.a[1]
    assert states(silent, tokens(2, 9)) == {"ring": (2, 7, 12), "position": (2,)}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.a[1:] = layer.mixer.a[0]
    assert states(model, tokens(2, 9)) == {"inputs": (2, 31, 12)}
    assert states(build(**S4_TRUNCATED), tokens(2, 9)) == {"inputs": (2, 39, 12)}  # slow poles
    assert states(build(**S4_RINGING), tokens(2, 9)) == {"ring": (2, 7, 12), "position": (2,)}


@pytest.mark.parametrize("mode", ["exact", "recurrent"])
def test_a_growing_recurrence_is_said_with_layer_row_and_radius(mode):
    model = unstable(torch.float64, S4_TRUNCATED)
    model.config.decode_mode = "recurrent"
    if mode == "exact":
        fields = {**S4, "denominator_constraint": "none"}
        weights = model.state_dict()
        model = build(**fields)
        model.load_state_dict(weights)
    message = r"layer [01]: 1 of 3 .* \(denominator 0: 2, the farthest at radius 1\.3\)"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        run(model, tokens(1, 5))
    assert len(caught) == 2  # a layer


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_a_graph_looks_at_the_filters_once_as_it_is_traced():
    """What is unstable decodes from its last inputs, the rest by recurrence; others are said."""
    model, input_ids = unstable(torch.float64, S4_TRUNCATED), tokens(1, 60)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    try:
        got, cache = run(compiled, input_ids[:, :40])
        for token in input_ids[:, 40:].split(1, dim=1):
            got = torch.cat([got, run(compiled, token, cache)[0]], dim=1)
        assert {"ring", "inputs"} < cache.layers[0].states.keys()
        assert relative(got, judged(model, input_ids)) <= 1e-10
        torch._dynamo.reset()
        model.config.decode_mode = "recurrent"
        with pytest.warns(RuntimeWarning, match="denominator 0: 2, the farthest at radius"):
            run(compiled, input_ids[:, :5])
        torch._dynamo.reset()
        model.config.decode_mode = "auto"
        with torch.no_grad():
            model.model.layers[1].mixer.b[2] = torch.nan
        # which dynamo raises as an error of its own
        with pytest.raises(RuntimeError, match="numerator 2 of layer 1 must be finite, got nan"):
            run(compiled, input_ids[:, :5])
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("fields", "name", "what"),
    [
        ({**S4, "denominator_constraint": "none"}, "a", "denominator"),
        (S4, "b", "numerator"),
        (S4, "D", "direct gain"),
        (S4, "montel_slack", "montel_slack"),
        (S4_TRUNCATED, "D", "direct gain"),
        (MODAL, "D", "direct gain"),
        (IMPLICIT, "implicit_out", "implicit_out"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_parameter_that_is_not_finite_is_named_with_its_layer(fields, name, what, value):
    model = build(**{"denominator_constraint": "l1_montel", **fields})
    with torch.no_grad():
        getattr(model.model.layers[1].mixer, name)[2, ...] = value
    with pytest.raises(ValueError, match=f"{what} 2 of layer 1 must be finite, got {value}"):
        run(model, tokens(1, 5))


# --- filters set by hand, and how they start -----------------------------------------------------


def remade_by_saving(model, path):
    model.save_pretrained(path)
    return type(model).from_pretrained(path)


def remade_by_assigning(model, path):
    with torch.device("meta"):
        other = type(model)(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other


@pytest.mark.parametrize("margin", [0.0, 1e-3])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
@pytest.mark.parametrize(
    "remade",
    [lambda model, path: copy.deepcopy(model), remade_by_saving, remade_by_assigning],
    ids=["copied", "saved", "assigned"],
)
def test_constrained_denominators_stay_inside_however_the_model_is_remade(
    remade, scale, margin, tmp_path
):
    fields = {**HYENA, "denominator_constraint": "l1_montel", "constraint_margin": margin}
    model = build(torch.float32, **fields)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.a.mul_(scale)
            layer.mixer.montel_slack.zero_()
    other = remade(model, tmp_path).eval()
    for layer, own in zip(other.model.layers, model.model.layers, strict=True):
        a = layer.mixer.denominators().detach()
        assert torch.equal(a, own.mixer.denominators())
        assert (a.abs().sum(1) < 1).all()
        assert (a.double().abs().sum(1) < 1).all()
        assert (poles(a).abs() < 1).all()
    assert torch.equal(whole(other, tokens(1, 9)), whole(model, tokens(1, 9)))


@pytest.mark.parametrize("constraint", ["none", "l1_montel"])
def test_a_filter_of_given_taps_is_exactly_these(constraint):
    fields = {**S4, "block": "filter", "denominator_constraint": constraint, "norm_type": "none"}
    mixer = build(**fields).model.layers[0].mixer
    taps = torch.randn(12, 7, dtype=torch.float64)
    mixer.set_filters(torch.zeros(3, 6), taps[:, 1:], taps[:, 0])
    u = torch.zeros(1, 20, 12, dtype=torch.float64)
    u[:, 4] = 1
    with torch.no_grad():
        y = mixer(u, LayerState())[0]
    assert not y[:4].abs().max() > 1e-14
    assert relative(y[4:11].T, taps) <= 1e-12
    assert y[11:].abs().max() <= 1e-14


def test_a_delay_is_a_single_coefficient():
    fields = {**S4, "block": "filter", "denominator_constraint": "none", "norm_type": "none"}
    mixer = build(**fields).model.layers[0].mixer
    for j in (1, 4, 6):
        b = torch.zeros(12, 6)
        b[:, j - 1] = 1
        mixer.set_filters(torch.zeros(3, 6), b, torch.zeros(12))
        u = torch.randn(1, 30, 12, dtype=torch.float64)
        with torch.no_grad():
            y = mixer(u, LayerState())
        assert relative(y[:, j:], u[:, :-j]) <= 1e-12


@pytest.mark.parametrize("fields", [S4, HYENA, {**HYENA, "legacy_double_h0": True}])
def test_set_filters_undoes_the_constraint_and_the_double_gain(fields):
    mixer = build(**fields).model.layers[0].mixer
    noise = torch.randn(mixer.a.shape, dtype=torch.float64)
    a = 0.9 * noise / noise.abs().sum(1, keepdim=True)
    b, h0 = torch.randn_like(mixer.b), torch.randn_like(mixer.D)
    mixer.set_filters(a, b, h0)
    assert relative(mixer.denominators().detach(), a) <= 1e-12
    assert relative(mixer.gain().detach(), h0) <= 1e-15
    a[1] /= 0.8
    with pytest.raises(ValueError, match=r"denominator 1 must have sum \|a_i\| below 1"):
        mixer.set_filters(a, b, h0)
    with pytest.raises(ValueError, match=r"b must have shape \[12, 6\], got \[12, 5\]"):
        mixer.set_filters(a, b[:, 1:], h0)


def test_the_published_code_counts_the_direct_gain_twice():
    model = build(**HYENA_TRUNCATED, legacy_double_h0=True)
    weights, config = arrays(model), model.config.to_dict()
    for name in weights:
        if name.endswith("mixer.D"):
            weights[name] = 2 * weights[name]
    expected = oracle.logits(weights, config, tokens(2, 24).numpy())
    assert relative(whole(model, tokens(2, 24)), expected) <= 1e-10
    assert relative(cut(model, tokens(2, 24), *range(3, 24)), expected) <= 1e-10


def new_mixer(**fields):
    torch.manual_seed(0)
    return FAMILY.model_class(FAMILY.config_class(**{**TINY, **fields})).layers[0].mixer


def test_coefficients_start_as_their_initialisation_says():
    wide = {"hidden_size": 64, "d_state": 50, "block": "s4"}
    for init, bound in (("xavier", 50**-0.5), ("montel", 1 / 50)):
        mixer = new_mixer(**wide, coefficient_init=init)
        for x in (mixer.a, mixer.b):
            assert 0.98 * bound < x.max() <= bound
            assert -bound <= x.min() < -0.98 * bound
    mixer = new_mixer(**wide, coefficient_init="copying")
    assert (mixer.a > 0).all()
    assert torch.allclose(mixer.a.sum(1), torch.tensor(0.999))
    assert (mixer.D == 1).all()
    assert 0 <= mixer.montel_slack.min() < 0.1 < 0.9 < mixer.montel_slack.max() <= 1
    assert 0.7 < new_mixer(**wide, h0_init="normal").D.std() < 1.3


def test_hyena_starts_as_gpt2_with_the_ends_of_branches_scaled_by_depth():
    fields = {"hidden_size": 64, "intermediate_size": 96, "mixer_rank": 40}
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields}))
    for name, x in model.named_parameters():
        if name.endswith("_proj.weight"):
            last = "out_proj" in name or "mlp.down_proj" in name
            assert abs(x.std() / (0.02 / 2 if last else 0.02) - 1) < 0.1, name
        elif name.endswith("_proj.bias"):
            assert not x.any(), name


def test_a_classifier_of_tokens_starts_with_a_wide_embedding_and_a_narrow_head():
    torch.manual_seed(0)
    config = FAMILY.config("rtf-lra-listops", num_hidden_layers=1, trunc_len=16)
    model = FAMILY.sequence_classification_class(config)
    assert 0.9 < model.model.embed_tokens.weight.std() < 1.1
    assert 0.9 / 16 < model.score.weight.max() <= 1 / 16
    assert not model.score.bias.any()
    assert (model.model.layers[0].mixer.D == 1).all()


def test_filter_parameters_have_a_group_of_their_own_and_do_not_decay():
    for fields in (HYENA, MODAL, IMPLICIT):
        model = build(**fields)
        groups = model.param_groups(lr=1e-3, weight_decay=0.1, groups={"ssm": {"lr": 1e-4}})
        own = next(g for g in groups if g.get("name") == "ssm")
        assert (own["lr"], own["weight_decay"]) == (1e-4, 0.0)
        expected = {id(p) for m in model.modules() if hasattr(m, "filtered")
                    for p in m.parameters(recurse=False)}  # fmt: skip
        assert {id(p) for p in own["params"]} == expected


# --- modal filters -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [MODAL, {**MODAL, **S4}], ids=["hyena", "s4"])
def test_modal_filters_have_five_equal_forms(fields):
    fields = {**fields, "num_denominators": 6}
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(dtype, **fields)
        hold_five_forms(model, functools.partial(judged, model), tolerance)
        found = states(model, tokens(2, 9))
        assert found["modes"] == (2, 12, 3, 2)
        assert found["owed"] == (2, 12)
        assert filter_state_dtypes(run(model, tokens(2, 9))[1]) == {dtype}


def test_modal_filters_have_equal_gradients_in_pieces():
    model, input_ids = build(**MODAL), tokens(2, 40)
    expected = slopes(model, input_ids)
    for cuts in ((3, 20, 21), tuple(range(1, 40))):
        for name, got in slopes(model, input_ids, cuts).items():
            assert relative(got, expected[name]) <= 1e-10, name


def modes_of(gap, pairs, rows):
    """Poles side by side at some gap from the circle, with residues of changing signs."""
    angles = 0.3 + gap * torch.arange(pairs).double()
    poles = torch.polar(torch.full((rows, pairs), 1 - gap).double(), angles.expand(rows, pairs))
    signs = (-1.0) ** torch.arange(pairs)
    return poles, torch.complex(signs.double(), 0.1 * signs.double()).expand(12, pairs)


@pytest.mark.parametrize("gap", [0.1, 1e-2, 1e-4])
def test_clustered_and_slow_modes_decode_as_they_convolve(gap):
    """Coefficients would round to other poles; 1,500 float32 steps, no layer around the filter."""
    fields = {**MODAL, "block": "filter", "d_state": 24, "mixer_rank": None}
    mixer = build(torch.float32, **fields).model.layers[0].mixer
    poles, residues = modes_of(gap, 12, 6)
    mixer.set_modes(poles, residues, torch.ones(12))
    u = torch.randn(1, 1500, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = copy.deepcopy(mixer).double()(u.double(), LayerState())
        # the float64 model's poles are not rounded: a part of the budget
        rounded = mixer.kernel(1500).double(), copy.deepcopy(mixer).double().kernel(1500)
        outputs, states = [], {}
        for token in u.split(1, dim=1):
            state = LayerState(states, keep=True)
            outputs.append(mixer(token, state))
            states = state.final
        got = mixer(u, LayerState())
    assert relative(torch.cat(outputs, 1), got) <= 1e-5
    assert relative(got, expected) <= 1e-5 + 2 * relative(*rounded)


def test_set_modes_gives_these_modes_and_their_kernel():
    mixer = build(**MODAL).model.layers[0].mixer
    poles, residues = modes_of(0.05, 3, 6)
    poles = torch.cat([poles[:, :1], -poles[:, 1:2].abs(), poles[:, 2:] * 1e-9], dim=1)
    mixer.set_modes(poles, residues, torch.arange(12.0))
    assert relative(mixer.exponents().exp().detach().abs(), poles.abs()) <= 1e-12
    own, expected = mixer.kernel(30).detach(), torch.zeros(12, 30, dtype=torch.float64)
    for t in range(1, 30):
        powers = poles.repeat_interleave(2, 0) ** (t - 1)
        expected[:, t] = (residues * powers).sum(1).real
    assert relative(own, expected) <= 1e-12
    assert torch.equal(mixer.gain().detach(), torch.arange(12.0).double())
    with torch.no_grad():
        known = mixer.dynamics(torch.zeros(1, 9, 12)).poles
    assert relative(known[:, :3].abs(), poles.abs()) <= 1e-12
    assert torch.equal(known[:, 3:], known[:, :3].conj())


def test_modes_stay_inside_the_disc_whatever_their_parameters_are():
    for dtype in (torch.float32, torch.float64):
        mixer = build(dtype, **MODAL).model.layers[0].mixer
        with torch.no_grad():
            mixer.modal_log_decay[:2] = -1e4
            mixer.modal_log_decay[2:4] = 1e4
            mixer.modal_angle.copy_(torch.linspace(-10, 10, 18).view(6, 3))
            multipliers = mixer.deployment().oscillations.decay()
            assert (multipliers.abs().double() < 1).all()
            assert (multipliers.abs() > 0).all()
            assert mixer.kernel(1000).isfinite().all()


def test_wrong_modes_are_named():
    mixer = build(**MODAL).model.layers[0].mixer
    poles, residues = modes_of(0.05, 3, 6)
    with pytest.raises(ValueError, match=r"poles must have shape \[6, 3\], got \[6, 2\]"):
        mixer.set_modes(poles[:, 1:], residues, torch.ones(12))
    with pytest.raises(ValueError, match=r"poles must .*unit disc, got .* in row 0"):
        mixer.set_modes(poles / 0.9, residues, torch.ones(12))
    with pytest.raises(ValueError, match="set_filters needs filter='rational', got 'modal'"):
        mixer.set_filters(torch.zeros(6, 6), torch.zeros(12, 6), torch.ones(12))
    with pytest.raises(ValueError, match="set_modes needs filter='modal', got 'rational'"):
        build(**HYENA).model.layers[0].mixer.set_modes(poles, residues, torch.ones(12))
    model = build(**MODAL)
    with torch.no_grad():
        model.model.layers[1].mixer.modal_angle[4, 1] = torch.nan
    with pytest.raises(ValueError, match="modal_angle 4 of layer 1 must be finite, got nan"):
        run(model, tokens(1, 5))


def test_modal_filters_start_with_long_and_short_modes():
    mixer = new_mixer(filter="modal", hidden_size=64, d_state=32)
    lasting = (-mixer.modal_log_decay).exp()
    assert 1 <= lasting.min() < 1.1
    assert 900 < lasting.max() <= 1000
    assert 0 <= mixer.modal_angle.min() < 0.1 < 3 < mixer.modal_angle.max() <= np.pi
    assert 0.98 * 32**-0.5 < mixer.modal_residues.abs().max() <= 32**-0.5


def test_a_model_of_modes_learns():
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **MODAL})).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".modal_" in n}
    optimizer, input_ids = torch.optim.Adam(model.parameters(), lr=1e-2), tokens(2, 30)
    losses = []
    for _ in range(20):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for name, parameter in model.named_parameters():
        assert name not in before or not torch.equal(parameter, before[name]), name


# --- implicit filters ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 5])
def test_implicit_filters_equal_their_formula_and_decode_beyond_their_end(rank):
    model, input_ids = build(**IMPLICIT, mixer_rank=rank), tokens(2, 45)
    got = whole(model, input_ids)
    if rank is None:
        assert relative(got, judged_any(model, input_ids)) <= 1e-10
    assert relative(cut(model, input_ids, *range(4, 45)), got) <= 1e-10
    assert relative(cut(model, input_ids, 1, 19, 20, 21, 44), got) <= 1e-10
    mixer = model.model.layers[0].mixer
    assert relative(mixer.kernel(7).detach(), mixer.kernel(20)[:, :7].detach()) <= 1e-12
    assert mixer.kernel(100).shape == (12, 20)


def test_implicit_filters_stay_float32_under_a_cast():
    model = build(torch.bfloat16, loud=False, **IMPLICIT)
    mixer = model.model.layers[0].mixer
    assert {p.dtype for p in mixer.parameters(recurse=False)} == {torch.float32}
    got, cache = run(model, tokens(2, 30))
    assert relative(got, judged_any(model, tokens(2, 30))) <= 2e-2
    assert filter_state_dtypes(cache) == {torch.float32}


# --- presets and configurations ------------------------------------------------------------------


def s4_parameters(config):
    """A stack of RTF layers with batch norms, both directions if asked for."""
    width, order, sides = config.hidden_size, config.d_state, 1 + config.bidirectional
    montel = config.denominator_constraint == "l1_montel"
    bank = sides * oracle.filter_parameters(width, order, config.denominators, montel)
    mixing = 0 if config.block == "filter" else 2 * width * width + 2 * width
    norms = 0 if config.norm_type == "none" else 2 * width
    last = norms if config.prenorm else 0
    embedding = config.vocab_size * width if config.input_channels is None else 2 * width
    head = config.num_labels * width + config.num_labels
    if config.architectures == ["RTFForPairClassification"]:
        head += 4 * width * width + width
    return embedding + config.num_hidden_layers * (bank + mixing + norms) + last + head


CLASSIFIERS = sorted(name for name in FAMILY.presets if "125m" not in name)


@pytest.mark.parametrize("preset", CLASSIFIERS)
def test_a_classifiers_preset_has_the_number_of_parameters_of_its_formula(preset):
    config = FAMILY.config(preset)
    classes = {
        "RTFForSequenceClassification": FAMILY.sequence_classification_class,
        "RTFForTokenClassification": FAMILY.token_classification_class,
        "RTFForPairClassification": FAMILY.pair_classification_class,
    }
    with torch.device("meta"):
        model = classes[config.architectures[0]](config)
    assert count(model) == s4_parameters(config)


@pytest.mark.parametrize(
    ("recipe", "batch", "epochs", "lr", "decay", "ssm"),
    [  # ssm: rate and decay of the filters, None is the model's rate
        ("rtf-lra-listops", 32, 50, 0.002, 0.07, (None, 0.07)),
        ("rtf-lra-text", 16, 32, 0.005, 0.05, (1e-4, 0.025)),
        ("rtf-lra-retrieval", 64, 20, 0.002, 0.0, (1e-6, 0.0)),
        ("rtf-lra-image", 50, 200, 0.006, 0.05, (0.005, 0.05)),
        ("rtf-lra-pathfinder", 64, 200, 0.002, 0.05, (None, 0.05)),
        ("rtf-lra-pathx", 16, 50, 0.001, 0.025, (0.001, 0.0)),
        ("rtf-speech-commands", 16, 40, 0.01, 0.05, (None, 0.05)),
    ],
)
def test_a_recipe_is_its_row_of_tables_8_and_9(recipe, batch, epochs, lr, decay, ssm):
    found = load_recipe(recipe)
    train = found.train
    assert (found.model.family, found.model.preset, found.model.config) == ("rtf", recipe, {})
    assert (train.batch_size, train.epochs, train.lr) == (batch, epochs, lr)
    assert (train.weight_decay, train.schedule, train.warmup) == (decay, "cosine", 0.1)
    assert (train.groups["ssm"].lr, train.groups["ssm"].weight_decay) == ssm


def test_the_lra_presets_are_the_tables_of_the_paper_and_its_code():
    table = {  # D, n, D_a, trunc_len, dropout, prenorm
        "listops": (256, 4, 1, 2048, 0.0, False),
        "text": (256, 4, 1, 4096, 0.1, True),
        "retrieval": (256, 4, 1, 4000, 0.0, True),
        "image": (512, 64, 1, 1024, 0.1, False),
        "pathfinder": (256, 64, 256, 1024, 0.1, True),
        "pathx": (256, 2048, 256, 16384, 0.0, True),
    }
    for task, expected in table.items():
        c = FAMILY.config(f"rtf-lra-{task}")
        own = (c.hidden_size, c.d_state, c.denominators, c.trunc_len, c.dropout, c.prenorm)
        assert own == expected, task
        assert (c.num_hidden_layers, c.norm_type, c.bidirectional) == (6, "batch", True)
        assert (c.coefficient_init, c.denominator_constraint) == ("zeros", "none")


def test_the_hyena_preset_is_the_same_network_with_other_filters():
    config = FAMILY.config("hyena-125m")
    with torch.device("meta"):
        model = FAMILY.causal_lm_class(config)
    filters = 768 + 64 * 33 + 64 + 2 * (64 * 64 + 64) + 768 * 64 + 64
    mixing = 3 * 768 * 769 + 4 * 3 * 768 + 768 * 769 + filters
    mlp = 2 * 768 * 3072 + 768 + 3072
    assert count(model) == 50264 * 768 + 12 * (mixing + mlp + 4 * 768) + 2 * 768


@pytest.mark.parametrize("preset", CLASSIFIERS)
def test_a_shrunken_classifier_learns_from_a_batch_of_its_kind(preset):
    config = FAMILY.config(preset, num_hidden_layers=1, hidden_size=8, d_state=3,
                           num_denominators=1, trunc_len=16)  # fmt: skip
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(1, 18, (4, 11))}
    if config.input_channels:
        inputs = {"input_values": torch.randn(4, 11, 1)}
    labels = torch.randint(2, (4,))
    if config.architectures[0] == "RTFForSequenceClassification":
        cls = FAMILY.sequence_classification_class
    elif config.architectures[0] == "RTFForTokenClassification":
        cls = FAMILY.token_classification_class
        labels = torch.randn(4, 11) if config.problem_type else torch.randint(18, (4, 11))
    else:
        cls = FAMILY.pair_classification_class
        inputs["pair_input_ids"] = torch.randint(1, 18, (4, 7))
    model = cls(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-4:]) < losses[0]
    assert model.model.layers[0].mixer.a.any()  # it left its zeros


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state must be at least 1"),
        ({"num_denominators": 5}, "num_denominators must divide hidden_size"),
        ({"num_denominators": 0}, "num_denominators must be None or at least 1"),
        ({"mixer_rank": 0}, "mixer_rank must be None or at least 1"),
        ({"kernel_mode": "truncated"}, "kernel_mode='truncated' needs trunc_len"),
        ({"kernel_mode": "truncated", "trunc_len": 6}, "trunc_len must exceed d_state"),
        ({"kernel_mode": "truncated", "trunc_len": 5}, "trunc_len must exceed d_state"),
        ({"decode_mode": "fir"}, "decode_mode='fir' needs kernel_mode='truncated'"),
        ({"constraint_margin": -0.1}, "constraint_margin must be at least 0"),
        ({"mixer_dropout": 1.0}, "mixer_dropout must be at least 0 and below 1"),
        ({"block": "s4", "legacy_double_h0": True}, "legacy_double_h0 belongs to block='hyena'"),
        ({"block": "s4", "mixer_rank": 5}, "mixer_rank belongs to block='hyena', got block='s4'"),
        ({"filter": "implicit"}, "filter='implicit' needs trunc_len"),
        ({**IMPLICIT, "bidirectional": True}, "filter='implicit' looks back only"),
        ({**IMPLICIT, "implicit_features": 4}, "implicit_features must be odd"),
        ({**IMPLICIT, "implicit_layers": -1}, "implicit_layers must be at least 0"),
        ({**IMPLICIT, "implicit_width": 0}, "implicit_width must be at least 1"),
        ({**IMPLICIT, "implicit_fast_decay": 2.0}, "must be positive and in this order"),
        ({"kernel_mode": "truncate"}, "kernel_mode"),
        ({**MODAL, "d_state": 5}, "d_state must be even for filter='modal'"),
        ({**MODAL, "kernel_mode": "truncated", "trunc_len": 40}, "needs kernel_mode='exact'"),
        ({"block": "mamba"}, "block"),
    ],
)
def test_an_invalid_configuration_names_its_field(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        FAMILY.config_class(**{**TINY, **fields})


def test_an_odd_grid_is_made_even_and_its_step_fits_its_kernel():
    model = build(**{**S4_TRUNCATED, "trunc_len": 21})
    assert model.config.taps == 22
    expected = judged(model, tokens(1, 22))
    assert relative(whole(model, tokens(1, 22)), expected) <= 1e-10
    assert relative(cut(model, tokens(1, 22), *range(2, 22)), expected) <= 1e-10


def test_dropout_in_front_of_the_filter_acts_while_training_only():
    for fields in (S4, HYENA):
        model = build(**fields, mixer_dropout=0.5)
        assert torch.equal(whole(model, tokens(1, 9)), whole(build(**fields), tokens(1, 9)))
        model.train()
        assert relative(whole(model, tokens(1, 9)), whole(build(**fields), tokens(1, 9))) > 1e-3


@pytest.mark.parametrize("fields", [S4, HYENA, HYENA_TRUNCATED, MODAL, IMPLICIT])
def test_a_batch_without_rows_has_empty_logits_and_goes_on(fields):
    model = build(**fields)
    none = torch.zeros(0, 5, dtype=torch.long)
    cache = model(none, use_cache=True).cache
    for more in (3, 1):
        assert model(none[:, :more], cache=cache).logits.shape == (0, more, 61)
    model.train()(none).logits.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in model.parameters())


@pytest.mark.parametrize("fields", ALL[2:], ids=NAMES[2:])
def test_left_padding_changes_nothing_then_or_later(fields):
    assert_left_padding_changes_nothing(build(**fields), (9, 14, 1))


@pytest.mark.parametrize("fields", ALL[2:], ids=NAMES[2:])
def test_beams_reorder_the_state(fields):
    model, prompt, more = build(**fields), tokens(3, 8), tokens(3, 5, seed=1)
    expected = run(model, more, run(model, prompt)[1])[0]
    cache, order = run(model, prompt)[1], torch.tensor([2, 0, 2])
    cache.reorder_cache(order)
    assert relative(run(model, more[order], cache)[0], expected[order]) <= 1e-10
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    with_cache = model.generate(prompt, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(prompt, use_cache=False, **settings))
