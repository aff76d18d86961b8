"""DSS: the golden checks of its paper on the whole model.

The judge is ``tests/oracles/dss.py``, float64 numpy from the paper alone.
"""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import dss as oracle
from tests.plugins.logits import assert_left_padding_changes_nothing, relative, run, tokens

from ssmzoo.analysis.describe import describe_family
from ssmzoo.modeling import LayerState
from ssmzoo.recipe import load_recipe
from ssmzoo.testing import FamilyConformance, check
from ssmzoo.testing.subject import Subject
from ssmzoo_dss import FAMILY, DSSForPairClassification
from ssmzoo_dss.convert_dss import from_official, to_official
from ssmzoo_dss.kernel import Modes, initial_eigenvalues, modes_of

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "d_state": 4}
EXP = [{"kernel_variant": v} for v in ("exp", "exp_no_scale", "exp_re_im", "clip")]
FIXED = {"kernel_variant": "softmax", "kernel_norm_length": 24}
FREE = {"kernel_variant": "softmax", "kernel_norm_length": None}
CAPPED = [{**one, "max_kernel_length": 7} for one in (EXP[0], FIXED, FREE)]
OWN = [f"dss-lra-{task}" for task in ("listops", "text", "retrieval", "image")]
OWN += ["dss-lra-pathfinder", "dss-lra-pathx", "dss-speech-commands"]


class TestDSS(FamilyConformance):
    family = "dss"
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestExponential(FamilyConformance):
    family = replace(
        FAMILY,
        tiny={
            **FAMILY.tiny,
            "kernel_variant": "exp",
            "lambda_init": "skew_hippo",
            "kernel_norm_length": None,
            "separate_dt_re_im": False,
            "channels": 1,
        },
    )
    oracle = staticmethod(oracle.logits)


def test_a_gated_output_keeps_the_promises():
    family = replace(TestExponential.family, tiny={**TestExponential.family.tiny, "block": "glu"})
    only = ["oracle", "precision", "tokens", "packing", "gradients", "fused_steps"]
    report = check(family, oracle=oracle.logits, only=only)
    assert [result.status for result in report.results] == ["passed"] * len(only), report.table()


def label(fields):
    return "-".join(str(value) for value in fields.values()) if isinstance(fields, dict) else None


def stir(model):
    """Move what starts at zero or one, shorten memories, let every second softmax mode grow."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[1]
            if leaf in ("weight", "bias") and parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif leaf == "log_dt":
                parameter.add_(1.5 + 0.2 * torch.randn_like(parameter))
            elif leaf == "Lambda" and model.config.kernel_variant == "softmax":
                parameter[::2, 0] = 0.2
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return model


def build(dtype=torch.float64, cls=FAMILY.causal_lm_class, **fields):
    torch.manual_seed(0)
    return stir(cls(FAMILY.config_class(**{**TINY, **fields}))).eval().to(dtype)


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def judged(model, input_ids, form="convolution"):
    return oracle.logits(arrays(model), model.config.to_dict(), input_ids.numpy(), form)


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


# --- golden check 1: initial values and sizes -------------------------------------------------


def test_a_new_model_starts_on_the_skew_hippo_spectrum():
    for variant in ("exp", "softmax", "exp_no_scale"):
        config = FAMILY.config_class(**{**TINY, "d_state": 64, "kernel_variant": variant})
        weights = arrays(FAMILY.causal_lm_class(config))
        lam = oracle.eigenvalues(weights, config.to_dict(), "model.layers.1.mixer.")
        np.testing.assert_allclose(lam.real, -0.5, rtol=1e-6)
        np.testing.assert_allclose(lam.imag, oracle.skew_hippo(64).imag, rtol=1e-6)


def test_a_new_model_has_the_papers_shapes_and_ranges():
    fields = {"d_state": 64, "dt_min": 1e-4, "dt_max": 1e-2, "separate_dt_re_im": True}
    config = FAMILY.config_class(**{**TINY, "hidden_size": 256, **fields})
    weights = arrays(FAMILY.causal_lm_class(config))
    log_dt = weights["model.layers.0.mixer.log_dt"]
    assert log_dt.shape == (256, 2)
    np.testing.assert_array_equal(log_dt[:, 0], log_dt[:, 1])
    assert np.log(1e-4) <= log_dt.min() < np.log(1.2e-4)
    assert np.log(0.8e-2) < log_dt.max() <= np.log(1e-2) + 1e-6
    w = weights["model.layers.0.mixer.W"]
    assert w.shape == (1, 256, 64, 2)
    assert np.abs(w.mean(axis=(0, 1, 2))).max() < 0.05
    np.testing.assert_allclose(w.std(axis=(0, 1, 2)), 1, atol=0.05)
    assert weights["model.layers.0.mixer.D"].shape == (1, 256)
    assert weights["model.layers.0.mixer.D"].std() == pytest.approx(1, abs=0.2)
    tied = FAMILY.config_class(**TINY, separate_dt_re_im=False)
    assert arrays(FAMILY.causal_lm_class(tied))["model.layers.0.mixer.log_dt"].shape == (12,)


@pytest.mark.parametrize(
    ("preset", "labels", "total"),
    [
        ("dss-lra-listops", 10, 205_578),
        ("dss-lra-text", 2, 152_450),
        ("dss-lra-image", 10, 1_991_434),
        ("dss-lra-pathfinder", 2, 601_346),
        ("dss-lra-pathx", 2, 601_346),
        ("dss-speech-commands", 10, 203_786),
    ],
)
def test_a_classifier_preset_has_the_papers_parameter_total(preset, labels, total):
    with torch.device("meta"):
        model = FAMILY.sequence_classification_class(FAMILY.config(preset, num_labels=labels))
    assert sum(p.numel() for p in model.parameters()) == total


def test_the_retrieval_preset_has_the_papers_parameter_total():
    with torch.device("meta"):
        model = DSSForPairClassification(FAMILY.config("dss-lra-retrieval", num_labels=2))
    assert sum(p.numel() for p in model.parameters()) == 888_322


# --- the oracle -------------------------------------------------------------------------------

VARIANTS = [
    *EXP,
    FIXED,
    FREE,
    *CAPPED,
    {"channels": 3, "separate_dt_re_im": True},
    {"channels": 2, **FIXED, "softmax_eps": 1e-2, "separate_dt_re_im": True},
    {"norm_type": "layer", "intermediate_size": 20},
    {"norm_type": "batch", "prenorm": False},
    {"prenorm": False, "intermediate_size": 20, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=label)
def test_the_model_matches_the_oracle_in_float64(fields):
    model, input_ids = build(**fields), tokens(2, 24)
    assert relative(whole(model, input_ids), judged(model, input_ids)) <= 1e-10


def test_a_conjugated_spectrum_or_swapped_parts_of_w_are_noticed():
    for fields, name in (({}, "Lambda_im"), (FIXED, "Lambda")):
        model, input_ids = build(**fields), tokens(2, 21)
        got, config = whole(model, input_ids), model.config.to_dict()
        conjugated, swapped = arrays(model), arrays(model)
        for i in range(2):
            lam = conjugated[f"model.layers.{i}.mixer.{name}"]
            conjugated[f"model.layers.{i}.mixer.{name}"] = lam * (
                -1 if lam.ndim == 1 else np.array([1, -1])
            )
            swapped[f"model.layers.{i}.mixer.W"] = swapped[f"model.layers.{i}.mixer.W"][..., ::-1]
        for wrong in (conjugated, swapped):
            assert relative(got, oracle.logits(wrong, config, input_ids.numpy())) > 1e-3


# --- golden check 4: stepping equals convolving -----------------------------------------------


@pytest.mark.parametrize("fields", [*EXP, FIXED, *CAPPED], ids=label)
@pytest.mark.parametrize("length", [1, 2, 9, 24])  # 24 is the norm length
def test_decoding_token_by_token_equals_the_convolution(fields, length):
    input_ids = tokens(2, length)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        model = build(dtype, **fields)
        got = cut(model, input_ids, *range(1, length))
        assert relative(got, whole(model, input_ids)) <= tolerance
        assert relative(got, judged(model, input_ids)) <= tolerance


@pytest.mark.parametrize("fields", [*EXP, FIXED, *CAPPED], ids=label)
def test_prefill_chunks_and_steps_at_any_cut_equal_one_pass(fields):
    model, input_ids = build(**fields), tokens(2, 24)
    expected = judged(model, input_ids)
    rng = np.random.default_rng(3)
    for _ in range(4):
        cuts = sorted(rng.choice(np.arange(1, 24), size=rng.integers(1, 6), replace=False))
        assert relative(cut(model, input_ids, *(int(c) for c in cuts)), expected) <= 1e-10, cuts


# --- golden check 5: growing modes ------------------------------------------------------------


def growing(dtype, product=200.0, length=160):
    """A softmax model whose first mode has ``Re(c) * L* = product`` in every feature."""
    fields = {"kernel_norm_length": length, "separate_dt_re_im": False}
    model = build(dtype, kernel_variant="softmax", **fields)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.log_dt.fill_(-1.0)
            block.mixer.Lambda[0, 0] = product / length * np.e
    return model


def test_a_mode_that_grows_by_e_to_the_200_decodes_in_float32():
    model, input_ids = growing(torch.float32), tokens(1, 160)
    expected = judged(model, input_ids)
    assert relative(whole(model, input_ids), expected) <= 1e-4
    assert relative(cut(model, input_ids, *range(40, 160)), expected) <= 1e-4
    assert relative(cut(model, input_ids, 3, 77, 150), expected) <= 1e-4


def test_the_direct_recurrence_of_growing_modes_fails():
    length, c = 160, np.complex64(200 / 160 + 0.3j)
    u = np.random.default_rng(0).standard_normal(length)
    taps = np.exp(np.complex128(c) * (np.arange(length) - length + 1)).real
    expected = np.convolve(u, taps)[:length]
    state, got = np.complex64(0), []
    with np.errstate(all="ignore"):
        for x in u:
            state = np.exp(c) * state + np.exp(-c * np.float32(length - 1)) * np.float32(x)
            got.append(state.real)
    assert not relative(got, expected) <= 1e-2


def test_decoding_past_the_norm_length_is_refused_for_growing_modes_only():
    model, input_ids = build(**FIXED), tokens(1, 24)
    _, cache = run(model, input_ids)
    with pytest.raises(ValueError, match="kernel_norm_length"):
        run(model, tokens(1, 1), cache)
    with pytest.raises(ValueError, match="kernel_norm_length"):
        whole(model, tokens(1, 25))
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.Lambda[:, 0] = -0.3
    longer = tokens(1, 40)
    expected = judged(model, longer)
    assert relative(whole(model, longer), expected) <= 1e-10
    assert relative(cut(model, longer, 20, 24, 25, 31), expected) <= 1e-10


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_a_graph_refuses_what_growing_modes_do_not_reach():
    model, input_ids = build(**{**FIXED, "num_hidden_layers": 1}), tokens(2, 24)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    try:
        expected, _ = run(model, input_ids)
        got, cache = run(compiled, input_ids[:, :20])
        more = [run(compiled, piece, cache)[0] for piece in input_ids[:, 20:].split([2, 1, 1], 1)]
        assert relative(torch.cat([got, *more], dim=1), expected) <= 1e-10
        for length in (1, 2):
            with pytest.raises(RuntimeError, match="kernel_norm_length must cover all tokens"):
                run(compiled, input_ids[:, :length], cache)
        with torch.no_grad():
            for block in model.model.layers:
                block.mixer.Lambda[:, 0] = -0.3
        longer = tokens(2, 40)
        got, cache = run(compiled, longer[:, :20])
        more = [run(compiled, piece, cache)[0] for piece in longer[:, 20:].split([5, 14, 1], 1)]
        assert relative(torch.cat([got, *more], dim=1), judged(model, longer)) <= 1e-10
    finally:
        torch._dynamo.reset()


# --- golden check 6: prefixes -----------------------------------------------------------------


def test_a_prefix_has_the_same_logits_only_under_a_fixed_norm_length():
    input_ids = tokens(2, 24)
    for fields in (FIXED, *EXP):
        model = build(**fields)
        assert relative(whole(model, input_ids[:, :11]), whole(model, input_ids)[:, :11]) <= 1e-10
    model = build(**FREE)
    a, b = whole(model, input_ids[:, :11]), whole(model, input_ids)[:, :11]
    assert relative(a, b) > 1e-3
    assert relative(a, judged(model, input_ids[:, :11])) <= 1e-10


def test_cached_generation_without_a_norm_length_is_refused_with_the_way_out():
    model, prompt = build(**FREE), tokens(1, 5)
    with pytest.raises(ValueError, match="kernel_norm_length"):
        model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=True)
    assert model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False).shape == (
        1,
        8,
    )


# --- golden check 7: shifts, padding, order ---------------------------------------------------


@pytest.mark.parametrize("fields", [EXP[0], FIXED, *CAPPED], ids=label)
def test_zeros_before_a_sequence_shift_the_mixers_output(fields):
    mixer = build(**fields).model.layers[0].mixer
    u = torch.randn(2, 15, 12, dtype=torch.float64)
    late = torch.nn.functional.pad(u, (0, 0, 6, 0))
    with torch.no_grad():
        a, b = mixer(u, LayerState()), mixer(late, LayerState())
    assert relative(b[:, 6:], a) <= 1e-10


# --- golden check 8: limits -------------------------------------------------------------------


def test_a_huge_time_step_has_finite_values_and_gradients():
    for fields in (EXP[0], FIXED):
        model = build(torch.float32, **fields)
        with torch.no_grad():
            model.model.layers[0].mixer.log_dt.fill_(22.0)
        loss = model(tokens(1, 20), labels=tokens(1, 20)).loss
        loss.backward()
        assert loss.isfinite()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name


# --- golden check 9: equivalences -------------------------------------------------------------


def test_a_softmax_model_of_falling_modes_is_an_exp_model_with_rescaled_weights():
    soft = build(**FIXED, softmax_eps=0.0, separate_dt_re_im=True)
    rigid = build(kernel_variant="exp", separate_dt_re_im=True)
    with torch.no_grad():
        for block in soft.model.layers:
            block.mixer.Lambda[:, 0] = -0.4 - 0.1 * torch.arange(4)
    weights, config = arrays(soft), soft.config.to_dict()
    state = {name: torch.tensor(x) for name, x in weights.items()}
    for i in range(2):
        prefix = f"model.layers.{i}.mixer."
        lam = oracle.eigenvalues(weights, config, prefix)
        c = oracle.exponents(lam, weights[prefix + "log_dt"])
        w = oracle.as_complex(weights[prefix + "W"]) / (np.exp(24 * c) - 1)
        state.pop(prefix + "Lambda")
        state[prefix + "Lambda_log_neg_re"] = torch.tensor(np.log(-lam.real))
        state[prefix + "Lambda_im"] = torch.tensor(lam.imag)
        state[prefix + "W"] = torch.tensor(np.stack([w.real, w.imag], axis=-1))
    rigid.load_state_dict(state)
    input_ids = tokens(2, 24)
    assert relative(whole(rigid, input_ids), whole(soft, input_ids)) <= 1e-10
    longer = tokens(2, 50)
    assert relative(whole(rigid, longer), whole(soft, longer)) <= 1e-10  # and past its norm length


@pytest.mark.parametrize("growing", ["none", "all", "mixed"])
def test_the_softmax_kernel_is_exp_with_rescaled_weights(growing):
    lam, log_dt, w = draw(growing)
    c = oracle.exponents(oracle.as_complex(lam.numpy()), log_dt.numpy())
    rescaled = oracle.as_complex(w.numpy()) / (np.exp(11 * c) - 1)
    rescaled = torch.from_numpy(np.stack([rescaled.real, rescaled.imag], axis=-1))
    assert relative(filters(lam, log_dt, w), filters(lam, log_dt, rescaled, variant="exp")) <= 1e-12


def test_equal_columns_of_two_time_steps_are_one_time_step():
    for fields in (EXP[0], FIXED):
        tied = build(**fields, separate_dt_re_im=False)
        split = build(**fields, separate_dt_re_im=True)
        state = tied.state_dict()
        for name in state:
            if name.endswith("log_dt"):
                state[name] = state[name][:, None].repeat(1, 2)
        split.load_state_dict(state)
        assert relative(whole(split, tokens(2, 20)), whole(tied, tokens(2, 20))) <= 1e-12


def test_exp_with_a_linear_spectrum_and_doubled_weights_is_s4d_lin():
    model = FAMILY.causal_lm_class(
        FAMILY.config_class(
            **TINY, kernel_variant="exp", lambda_init="lin", separate_dt_re_im=False
        )
    ).double()
    weights, config = arrays(model), model.config.to_dict()
    prefix = "model.layers.0.mixer."
    lam = oracle.eigenvalues(weights, config, prefix)
    np.testing.assert_allclose(lam, oracle.s4d_lin(4), rtol=1e-6, atol=1e-6)
    taps = oracle.s4d_kernel(
        lam, oracle.as_complex(weights[prefix + "W"][0]) / 2, np.exp(weights[prefix + "log_dt"]), 20
    )
    u = torch.randn(2, 20, 12, dtype=torch.float64)
    y = oracle.convolution(u.numpy(), taps) + weights[prefix + "D"][0] * u.numpy()
    expected = oracle.linear(weights, prefix + "out_proj", oracle.gelu(y))
    with torch.no_grad():
        got = model.model.layers[0].mixer(u, LayerState())
    assert relative(got, expected) <= 1e-10


# --- golden check 13: both directions ---------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 9, 16])
@pytest.mark.parametrize(
    "fields",
    [{}, {"max_kernel_length": 5}, FREE, {**FREE, "channels": 2}, {"block": "glu", "channels": 2}],
    ids=label,
)
def test_a_bidirectional_encoder_is_the_explicit_two_sided_sum(length, fields):
    model = build(cls=FAMILY.model_class, bidirectional=True, **fields)
    input_ids = tokens(2, length)
    with torch.no_grad():
        got = model(input_ids, use_cache=False).last_hidden_state
    weights = {f"model.{name}": value for name, value in arrays(model).items()}
    x = weights["model.embed_tokens.weight"][input_ids.numpy()]
    assert relative(got, oracle.backbone(weights, model.config.to_dict(), x)) <= 1e-10


def test_the_futures_kernel_never_meets_the_past_or_the_present():
    mixer = build(cls=FAMILY.model_class, bidirectional=True).layers[0].mixer
    u = torch.zeros(1, 11, 12, dtype=torch.float64)
    u[:, 5] = torch.randn(12)
    with torch.no_grad():
        before = mixer(u, LayerState())
        mixer.W[1:] *= 3
        after = mixer(u, LayerState())
    assert relative(after[:, 5:], before[:, 5:]) <= 1e-12
    assert relative(after[:, :5], before[:, :5]) > 1e-2


def test_a_bidirectional_model_has_no_cache_and_does_not_generate():
    model = build(cls=FAMILY.model_class, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional"):
        model(tokens(1, 4), use_cache=True)
    with pytest.raises(ValueError, match="bidirectional"):
        build(bidirectional=True).generate(tokens(1, 4), max_new_tokens=2)


# --- the kernel itself ------------------------------------------------------------------------


def draw(growing, features=3, modes=4, channels=2, dtype=torch.float64):
    """Random ``lambda, log_dt, W``; growing is "none", "all" or "mixed"."""
    generator = torch.Generator().manual_seed(4)
    real = 0.2 + torch.rand(modes, generator=generator, dtype=dtype)
    sign = {"none": -torch.ones(modes), "all": torch.ones(modes), "mixed": torch.ones(modes)}
    signs = sign[growing].to(dtype)
    if growing == "mixed":
        signs[::2] = -1
    lam = torch.stack([signs * real, torch.randn(modes, generator=generator, dtype=dtype)], -1)
    log_dt = torch.randn(features, 2, generator=generator, dtype=dtype) * 0.5 - 1.5
    w = torch.randn(channels, features, modes, 2, generator=generator, dtype=dtype)
    return lam, log_dt, w


def filters(lam, log_dt, w, taps=11, **options):
    usual = {"variant": "softmax", "norm_length": taps, "eps": 0.0, "conjugate_pairs": False}
    options = {**usual, "legacy_detached_shift": False, **options}
    return modes_of(torch.view_as_complex(lam), log_dt, w, **options).kernel(taps)


def skew_hippo(modes):
    return initial_eigenvalues(modes, "skew_hippo", True)[1]


def test_the_spectrum_of_four_and_of_sixty_four_modes():
    np.testing.assert_allclose(skew_hippo(4), [19.8574, 5.3542, 1.9578, 0.4275], atol=5e-5)
    large = skew_hippo(64)
    np.testing.assert_allclose(
        large[[0, 1, 2, 3, 4]], [5214.67, 1736.83, 1040.42, 741.37, 574.77], atol=5e-3
    )
    np.testing.assert_allclose(large[-5:], [2.9709, 2.1693, 1.4360, 0.7827, 0.2352], atol=5e-5)


@pytest.mark.parametrize("growing", ["none", "all", "mixed"])
def test_the_reflected_softmax_is_the_printed_one(growing):
    lam, log_dt, w = draw(growing)
    values, weights = oracle.as_complex(lam.numpy()), oracle.as_complex(w.numpy())
    c = oracle.exponents(values, log_dt.numpy())
    expected = oracle.softmax_kernel(weights, values, c, 11)
    assert relative(filters(lam, log_dt, w), expected) <= 1e-12


@pytest.mark.parametrize("growing", ["none", "all", "mixed"])
def test_the_reflected_softmax_matches_the_paper_at_16384_positions(growing):
    length = 16384
    exact = [x.requires_grad_() for x in draw(growing, features=2, channels=1)]
    lam, w = (torch.view_as_complex(x) for x in exact[::2])
    dt = exact[1].exp()[:, None]
    c = torch.complex(dt[..., 0] * lam.real, dt[..., 1] * lam.imag)
    steps = c[..., None] * torch.arange(length)
    # the shift cancels in the softmax, so it takes no part in the gradient
    rows = torch.exp(steps - steps.real.detach().amax(-1, keepdim=True))
    rows = rows / rows.sum(-1, keepdim=True)
    assert relative(rows.sum(-1).real.detach(), np.ones((2, 4))) <= 1e-10
    assert rows.abs().isfinite().all()
    expected = torch.einsum("chn,hnl->chl", w / lam, rows).real
    g = torch.randn(1, 2, length, dtype=torch.float64)
    slopes = torch.autograd.grad((expected * g).sum(), exact)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        leaves = [exact[0], exact[1], exact[2].to(dtype)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        found = filters(*leaves, taps=length)
        assert found.dtype == dtype
        assert relative(found.detach(), expected.detach()) <= tolerance
        got = torch.autograd.grad((found.double() * g).sum(), leaves)
        for slope, known in zip(got, slopes, strict=True):
            assert relative(slope, known) <= tolerance


def test_the_softmax_is_the_inverse_transform_of_claim_one():
    lam, log_dt, w = draw("mixed", channels=1)
    values, length = oracle.as_complex(lam.numpy()), 11
    c = oracle.exponents(values, log_dt.numpy())
    r = -np.exp(-c)
    roots = np.exp(-2j * np.pi * np.arange(length) / length)
    rows = np.fft.ifft((r[..., None] + 1) / (r[..., None] + roots))  # [H, N, L]
    expected = np.einsum("chn,hnl->chl", oracle.as_complex(w.numpy()) / values, rows).real
    assert relative(filters(lam, log_dt, w), expected) <= 1e-12


@pytest.mark.parametrize("growing", ["none", "all", "mixed"])
def test_the_gradient_of_the_kernel_is_that_of_its_values(growing):
    inputs = [x.requires_grad_() for x in draw(growing, features=2, modes=2, channels=1)]
    assert torch.autograd.gradcheck(lambda *x: filters(*x, taps=5, eps=1e-3), inputs)
    if growing == "none":
        for variant in ("exp", "exp_no_scale"):
            assert torch.autograd.gradcheck(lambda *x, v=variant: filters(*x, variant=v), inputs)


def test_the_legacy_gradient_differs_on_growing_modes_by_the_shift_alone():
    lam, _, w = draw("mixed", channels=1)
    steps = torch.zeros(3, dtype=torch.float64)  # dt = 1: the gradient of lambda is that of c
    length, g = 11, torch.randn(1, 3, 11, dtype=torch.float64)
    slopes, values = [], []
    for legacy in (False, True):
        leaf = lam.clone().requires_grad_()
        kernel = filters(leaf, steps, w, legacy_detached_shift=legacy)
        values.append(kernel.detach())
        slopes.append(torch.autograd.grad((kernel * g).sum(), leaf)[0])
    assert torch.equal(*values)
    lambdas, weights = oracle.as_complex(lam.numpy()), oracle.as_complex(w.numpy())[0]
    rows = oracle.softmax(np.outer(lambdas, np.arange(length)))  # [N, L]
    shift = (length - 1) * np.einsum("hl,nl->hn", g[0].numpy(), rows.conj())
    expected = np.where(lambdas.real > 0, ((weights / lambdas).conj() * shift).sum(0), 0)
    assert relative(slopes[1] - slopes[0], np.stack([expected.real, expected.imag], -1)) <= 1e-10


def test_the_limits_of_the_kernel():
    w = torch.tensor([[[[0.7, -0.4]]]], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    for real, place in ((-60.0, 0), (60.0, 10)):
        lam = torch.tensor([[real, 0.3]], dtype=torch.float64)
        expected = np.zeros((1, 1, 11))
        expected[..., place] = ((0.7 - 0.4j) / complex(real, 0.3)).real
        assert relative(filters(lam, zero, w), expected) <= 1e-12
    slow = torch.tensor([[1e-7, 1e-7]], dtype=torch.float64)
    flat = ((0.7 - 0.4j) / complex(1e-7, 1e-7)).real / 11
    assert relative(filters(slow, zero, w), np.full((1, 1, 11), flat)) <= 1e-5
    lam = torch.tensor([[-0.5, 2.0]], dtype=torch.float64)
    short = filters(lam, zero - 18, w, variant="exp")
    assert relative(short, np.full((1, 1, 11), 0.7 * np.exp(-18))) <= 1e-6


def test_a_capped_kernel_is_the_one_built_for_the_cap():
    capped, whole = build(**CAPPED[1]), build(kernel_variant="softmax", kernel_norm_length=7)
    with torch.no_grad():
        got, expected = (m.model.layers[0].mixer.kernel(7) for m in (capped, whole))
        assert torch.equal(got, expected)
        assert torch.equal(capped.model.layers[0].mixer.kernel(40), expected)


# --- presets and groups -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lin", oracle.s4d_lin), ("inv", oracle.s4d_inv), ("legs", oracle.skew_hippo)],
)
def test_s4d_is_a_preset_of_this_family(name, expected):
    config = FAMILY.config(f"dss-s4d-{name}-125m", **{**TINY, "intermediate_size": None})
    model = FAMILY.causal_lm_class(config).double()
    weights = arrays(model)
    prefix = "model.layers.1.mixer."
    lam = oracle.eigenvalues(weights, config.to_dict(), prefix)
    np.testing.assert_allclose(lam, expected(4), rtol=1e-6, atol=1e-6)
    taps = oracle.s4d_kernel(
        lam, oracle.as_complex(weights[prefix + "W"][0]), np.exp(weights[prefix + "log_dt"]), 30
    )
    with torch.no_grad():
        assert relative(model.model.layers[1].mixer.kernel(30)[0], taps) <= 1e-10


@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("dss-125m", 125_292_032),
        *((f"dss-s4d-{name}-125m", 124_504_576) for name in ("lin", "inv", "legs")),
    ],
)
def test_a_language_preset_has_its_size(preset, total):
    with torch.device("meta"):
        model = FAMILY.causal_lm_class(FAMILY.config(preset))
    assert sum(p.numel() for p in model.parameters()) == total


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ("exp", {"kernel_variant": "exp"}),
        ("no-scale", {"kernel_variant": "exp_no_scale"}),
        ("random", {"lambda_init": "randn"}),
        ("short", {"max_kernel_length": 128}),
    ],
)
def test_the_rows_of_tables_1_to_3_differ_in_what_they_name(row, fields):
    found = {name for name in FAMILY.presets if name.startswith(f"dss-{row}-")}
    named = {name.replace("dss-", f"dss-{row}-") for name in OWN}
    ablation = row in ("random", "short")  # Table 3, which has no Retrieval
    assert found == named - ({f"dss-{row}-lra-retrieval"} if ablation else set())
    for name in found:
        base = FAMILY.presets[name.replace(f"dss-{row}-", "dss-")]
        assert FAMILY.presets[name] == {**base, **fields}
        FAMILY.config(name)


@pytest.mark.parametrize("task", ["listops", "text", "retrieval", "image", "pathfinder", "pathx"])
def test_the_s4d_of_rtfs_table_1_has_its_sizes(task):
    config = FAMILY.config(f"dss-s4d-lra-{task}")
    width, modes = (512 if task == "image" else 256), (32 if task[:2] in ("im", "pa") else 2)
    assert (config.hidden_size, config.d_state, config.num_hidden_layers) == (width, modes, 6)
    assert (config.prenorm, config.dropout) == (
        task not in ("listops", "image"),
        0.1 if task == "image" else 0.0,
    )
    layer = oracle.layer_parameters(width, modes, separate_dt=False)
    layer += 2 * width * modes + width * width + width  # the other direction, the GLU's gate
    encoder = 2 * width if config.input_channels else config.vocab_size * width
    pair = 4 * width * width + width if task == "retrieval" else 0
    last = 2 * width if config.prenorm else 0
    total = encoder + 6 * (layer + 2 * width) + last + pair + (width + 1) * config.num_labels
    listed = describe_family("dss")["presets"][f"dss-s4d-lra-{task}"]
    assert listed["parameters"] == total


def test_presets_are_described_with_the_head_they_are_for():
    presets = describe_family("dss")["presets"]
    assert presets["dss-lra-retrieval"]["parameters"] == 888_322
    assert presets["dss-lra-pathx"]["parameters"] == 601_346
    assert presets["dss-125m"]["parameters"] == 125_292_032


@pytest.mark.parametrize(
    ("recipe", "batch", "epochs", "lr", "decay", "patience", "dt_lr"),
    [
        ("dss-lra-listops", 50, 50, 0.01, 0.01, 5, 0.02),
        ("dss-lra-text", 50, 40, 0.01, 0.0, 10, 0.02),
        ("dss-lra-retrieval", 64, 25, 0.002, 0.0, 20, 1e-3),
        ("dss-lra-image", 50, 200, 0.004, 0.01, 10, 1e-3),
        ("dss-lra-pathfinder", 100, 200, 0.004, 0.0, 13, 1e-3),
        ("dss-lra-pathx", 16, 35, 5e-4, 0.0, 40, 1e-4),
        ("dss-speech-commands", 20, 200, 0.01, 0.0, 20, 1e-3),
    ],
)
def test_a_recipe_is_its_row_of_table_4(recipe, batch, epochs, lr, decay, patience, dt_lr):
    found = load_recipe(recipe)
    train = found.train
    assert (found.model.family, found.model.preset, found.model.config) == ("dss", recipe, {})
    assert (train.batch_size, train.epochs, train.lr) == (batch, epochs, lr)
    assert (train.weight_decay, train.patience) == (decay, patience)
    assert (train.schedule, train.factor, train.warmup, train.clip) == ("plateau", 0.2, 0, 0)
    groups = {name: (group.lr, group.weight_decay) for name, group in train.groups.items()}
    assert groups == {"ssm": (1e-3, 0), "dt": (dt_lr, 0)}


def test_ssm_parameters_have_groups_of_their_own_and_the_skip_decays():
    model = build(torch.float32)
    groups = {"ssm": {"lr": 1e-3}, "dt": {"lr": 2e-2}}
    found = model.param_groups(lr=0.1, weight_decay=0.3, groups=groups)
    mixer = model.model.layers[0].mixer
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in found for p in g["params"]}
    assert rates[id(mixer.log_dt)] == (2e-2, 0.0)
    for parameter in (mixer.W, mixer.Lambda_im, mixer.Lambda_log_neg_re):
        assert rates[id(parameter)] == (1e-3, 0.0)
    assert rates[id(mixer.D)] == rates[id(mixer.out_proj.weight)] == (0.1, 0.3)


def test_the_tiny_model_of_the_kit_has_growing_and_falling_modes_in_every_layer():
    for block in Subject(FAMILY).model().model.layers:
        assert set((block.mixer.Lambda[:, 0] > 0).tolist()) == {True, False}


def test_a_model_can_be_made_on_the_meta_device():
    for fields in (EXP[0], FIXED, {**FIXED, "lambda_init": "randn"}, {"lambda_init": "lin"}):
        with torch.device("meta"):
            model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields}))
        assert {p.device.type for p in model.parameters()} == {"meta"}


# --- decoding: tables, positions --------------------------------------------------------------


def stepped(model, input_ids):
    return cut(model, input_ids, *range(1, input_ids.shape[1]))


@pytest.mark.parametrize("fields", [EXP[0], FIXED, CAPPED[0], {"channels": 3}], ids=label)
def test_decoding_follows_every_change_of_the_parameters(fields):
    model, input_ids = build(torch.float32, **fields), tokens(2, 12)
    stepped(model, input_ids)  # the tables are made
    model(input_ids, labels=input_ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert relative(stepped(model, input_ids), judged(model, input_ids)) <= 1e-4
    other = build(torch.float32, **fields)
    with torch.no_grad():
        for block in other.model.layers:
            block.mixer.W.mul_(0.5)
    model.load_state_dict(other.state_dict())
    assert relative(stepped(model, input_ids), judged(other, input_ids)) <= 1e-4
    model = model.double()
    assert relative(stepped(model, input_ids), judged(other, input_ids)) <= 1e-10


def test_a_longer_norm_length_takes_effect_while_decoding():
    model, input_ids = build(**FIXED), tokens(1, 30)
    stepped(model, input_ids[:, :24])
    model.config.kernel_norm_length = 40
    assert relative(stepped(model, input_ids), judged(model, input_ids)) <= 1e-10


def test_the_tables_hold_no_graph_and_travel_in_no_copy():
    model, input_ids = build(**FIXED), tokens(1, 5)
    stepped(model, input_ids)
    mixer = model.model.layers[0].mixer
    tables = mixer._decode_tables()
    assert tables is mixer._decode_tables()
    assert not any(x.requires_grad for x in (tables.decay, tables.low, tables.high))
    for copied in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert copied._tables._value is None
    with torch.inference_mode():
        assert relative(stepped(model, input_ids), judged(model, input_ids)) <= 1e-10


def test_rows_at_different_positions_end_where_each_alone_would():
    model = build(**FIXED)
    lengths, width = (20, 3), 20
    rows = [tokens(1, n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(r, (width - r.shape[1], 0)) for r in rows])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    cache, got = run(model, padded, attention_mask=mask)[1], []
    more = tokens(2, 4, seed=9)
    for column in more.split(1, dim=1):
        out, cache = run(model, column, cache)
        got.append(out)
    for i, row in enumerate(rows):
        expected = judged(model, torch.cat([row, more[i : i + 1]], dim=1))[:, -4:]
        assert relative(torch.cat(got, dim=1)[i : i + 1], expected) <= 1e-10
    with pytest.raises(ValueError, match=r"must cover all tokens, 25.*layer 0 grow, mode 0"):
        run(model, tokens(2, 1), cache)  # the first row has no room for a 25th


def test_the_row_that_starts_anew_starts_at_position_zero():
    model, old, new = build(**FIXED), tokens(2, 20), tokens(2, 9, seed=1)
    cache = run(model, old)[1]
    cache.reset_rows(torch.tensor([0, 1]))
    assert relative(run(model, new, cache)[0], judged(model, new)) <= 1e-10


# --- encoders: the published behaviour, padding, values ---------------------------------------


def test_without_a_norm_length_packing_pads_to_the_longest():
    model = build(cls=FAMILY.sequence_classification_class, num_labels=3, pooling="mean", **FREE)
    rows = [tokens(1, n, seed=n) for n in (17, 6)]
    padded = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (0, 11))])
    mask = torch.tensor([[1] * 17, [1] * 6 + [0] * 11])
    with torch.no_grad():
        expected = model(padded, attention_mask=mask).logits
        got = model(torch.cat(rows, dim=1), cu_seqlens=torch.tensor([0, 17, 23])).logits
        alone = model(rows[1]).logits
    assert relative(got, expected) <= 1e-10
    assert relative(alone, expected[1:]) > 1e-3  # what the published code makes of batch mates


def test_a_classifier_of_values_matches_the_oracle():
    fields = {"input_channels": 1, "norm_type": "batch", "num_labels": 4, **FIXED}
    model = build(cls=FAMILY.sequence_classification_class, pooling="mean", **fields)
    values = torch.randn(2, 24, dtype=torch.float64)
    weights = arrays(model)
    x = oracle.linear(weights, "model.embed_values", values.numpy()[..., None])
    hidden = oracle.backbone(weights, model.config.to_dict(), x)
    with torch.no_grad():
        got = model(input_values=values).logits
    assert relative(got, hidden.mean(1) @ weights["score.weight"].T) <= 1e-10


def test_dropout_takes_whole_features_of_a_sequence():
    model = build(cls=FAMILY.model_class, dropout=0.5, num_hidden_layers=1).train()
    kept = []
    model.layers[0].mixer.dropout.register_forward_hook(lambda _m, _a, out: kept.append(out))
    model(tokens(4, 9), use_cache=False)
    dropped = kept[0] == 0
    assert torch.equal(dropped.all(1), dropped.any(1))
    assert 0 < dropped.double().mean() < 1


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"kernel_norm_length": 0}, "kernel_norm_length must be None or at least 1, got 0"),
        ({"max_kernel_length": -3}, "max_kernel_length must be None or at least 1, got -3"),
        ({"dt_min": 0.2}, "dt_min and dt_max must .* got 0.2 and 0.1"),
        ({"dt_min": 0.0}, "must be positive"),
        ({"softmax_eps": -1.0}, "softmax_eps must be at least 0 and finite, got -1.0"),
        ({**FIXED, "max_kernel_length": 25}, "must not exceed kernel_norm_length.*got 25 and 24"),
        (
            {"kernel_variant": "exp_re_im", "lambda_init": "lin"},
            "lambda_init must be 'skew_hippo'.*got 'lin'",
        ),
        ({"kernel_variant": "cosine"}, "cosine"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        FAMILY.config_class(**{**TINY, **fields})


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        (
            "log_dt",
            (3,),
            float("nan"),
            "log_dt . Lambda.*finite.*layer 1, feature 3, mode 0",
        ),
        ("log_dt", (3,), 800.0, "log_dt . Lambda.*finite.*layer 1, feature 3, mode 0"),
        ("Lambda", (2, 1), float("inf"), "must be finite.*layer 1, feature 0, mode 2"),
        ("W", (0, 5, 1, 0), float("nan"), "W must be finite.*layer 1, feature 5, mode 1"),
    ],
    ids=["nan step", "endless step", "endless frequency", "nan weight"],
)
def test_a_parameter_that_is_not_finite_is_named(name, place, value, message):
    model = build(**FIXED)
    cache = run(model, tokens(1, 3))[1]
    with torch.no_grad():
        getattr(model.model.layers[1].mixer, name)[place] = value
    with pytest.raises(ValueError, match=message):
        whole(model, tokens(1, 4))
    with pytest.raises(ValueError, match=message):
        run(model, tokens(1, 1), cache)


def test_an_input_beyond_the_norm_length_names_layer_and_mode():
    model = build(**FIXED)
    with pytest.raises(
        ValueError,
        match=r"kernel_norm_length must .* 25.*: got 24, and 2 modes of layer 0 grow, mode 0",
    ):
        whole(model, tokens(1, 25))
    documents = torch.tensor([0, 24, 24, 40])  # more tokens than that, but no document has more
    with torch.no_grad():
        got = model(tokens(1, 40), cu_seqlens=documents, use_cache=False).logits
    assert relative(got[:, :24], judged(model, tokens(1, 40)[:, :24])) <= 1e-10


def test_an_empty_document_changes_nothing():
    for fields in (EXP[0], FIXED, CAPPED[0]):
        model, row = build(**fields), tokens(1, 13)
        got, cache = run(model, row, cu_seqlens=torch.tensor([0, 5, 5, 13]))
        assert relative(got[:, :5], judged(model, row[:, :5])) <= 1e-10
        assert relative(got[:, 5:], judged(model, row[:, 5:])) <= 1e-10
        later = run(model, row[:, :3].repeat(3, 1), cache)[0]
        assert relative(later[1:2], judged(model, row[:, :3])) <= 1e-10


@pytest.mark.parametrize("fields", [EXP[0], FIXED, FREE], ids=label)
def test_a_packed_row_has_the_kernel_of_its_longest_document(fields, monkeypatch):
    model, taps = build(**fields), []
    kernel = Modes.kernel
    monkeypatch.setattr(Modes, "kernel", lambda self, n: (taps.append(n), kernel(self, n))[1])
    whole_row = tokens(1, 20)
    with torch.no_grad():
        got = model(whole_row, cu_seqlens=torch.tensor([0, 9, 9, 12, 20]), use_cache=False).logits
    assert taps == [9, 9]  # a layer
    assert relative(got[:, :9], judged(model, whole_row[:, :9])) <= 1e-10


@torch.no_grad()
@pytest.mark.parametrize("fields", [EXP[0], FIXED, FREE], ids=label)
@pytest.mark.parametrize("left", [0, 3])
def test_padding_of_all_rows_is_no_length(fields, left):
    model, real = build(**fields), [12, 9]
    rows = tokens(2, 12)
    padded, mask = torch.zeros(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    for i, length in enumerate(real):
        padded[i, left : left + length] = rows[i, :length]
        mask[i, left : left + length] = 1
    packed = torch.cat([row[:length] for row, length in zip(rows, real, strict=True)])[None]
    expected = model(packed, cu_seqlens=torch.tensor([0, 12, 21]), use_cache=False).logits
    got = model(padded, attention_mask=mask, use_cache=False).logits
    assert relative(got[mask.bool()], expected[0]) <= 1e-10


@torch.no_grad()
def test_a_padded_row_is_one_graph_where_the_kernel_depends_on_the_longest():
    model, rows, mask = build(**FREE), tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    expected = model(rows, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    got = compiled(rows, attention_mask=mask, use_cache=False).logits
    assert relative(got[mask.bool()], expected[mask.bool()]) <= 1e-10


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_float16_weights_take_any_length(length):
    model, exact = build(torch.float16, **FIXED), build(torch.float32, **FIXED)
    got = whole(model, tokens(2, length))
    assert relative(got, whole(exact, tokens(2, length))) <= 1e-2


# --- official names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel_variant": "softmax", "separate_dt_re_im": True},
        {"kernel_variant": "exp", "prenorm": False, "channels": 2},
        {"kernel_variant": "exp_re_im", "input_channels": 1},
        {"kernel_variant": "clip", "bidirectional": True},
    ],
    ids=label,
)
def test_a_classifier_goes_to_official_names_and_back(fields):
    kind = FAMILY.sequence_classification_class
    fields = {"norm_type": "batch", "classifier_bias": True, "num_labels": 3, **fields}
    model = build(torch.float32, kind, **fields)
    official = to_official(model.state_dict(), model.config)
    assert official["model.layers.1.layer.output_linear.bias"].shape == (12, 1)
    assert ("model.layers.0.layer.kernel.Lambda_log_im" in official) == (
        fields["kernel_variant"] == "exp_re_im"
    )
    assert "model.layers.0.norm.norm.running_mean" in official
    told = {name: fields[name] for name in ("kernel_variant", "bidirectional") if name in fields}
    weights, config = from_official({f"module.{n}": x for n, x in official.items()}, told)
    loaded = kind(config).eval()
    loaded.load_state_dict(weights)
    inputs = tokens(2, 9)
    inputs = {"input_values": inputs.float()} if config.input_channels else {"input_ids": inputs}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": "glu"}, "block='linear' only, got 'glu'"),
        ({"directions": "both-shared"}, "directions='forward' only, got 'both-shared'"),
        ({"residual": False}, "residual=True only, got False"),
        ({"rms_norm_eps": 0.01}, r"rms_norm_eps=1e-05 only, got 0\.01"),
    ],
    ids=str,
)
def test_a_model_that_the_official_code_cannot_run_is_not_exported(fields, message):
    model = build(torch.float32, FAMILY.sequence_classification_class, norm_type="batch", **fields)
    with pytest.raises(ValueError, match=message):
        to_official(model.state_dict(), model.config)


def test_a_checkpoint_that_is_none_of_ours_is_refused():
    model = build(torch.float32, FAMILY.sequence_classification_class, norm_type="batch")
    official = to_official(model.state_dict(), model.config)
    with pytest.raises(LookupError, match=r"unknown \['gate'\]"):
        from_official({**official, "gate": torch.zeros(1)}, {})
    with pytest.raises(LookupError, match="lacks the weight that becomes"):
        from_official({}, {})
    official["model.layers.1.layer.D"] = torch.zeros(1, 5)
    with pytest.raises(ValueError, match=r"mixer.D must have shape \[1, 12\], got \[1, 5\]"):
        from_official(official, {})
    with pytest.raises(ValueError, match="batch norms only"):
        to_official({}, FAMILY.config_class(**TINY))


def test_training_forgets_the_tables_even_where_no_version_counts():
    model = build(torch.float64)
    ids = torch.randint(0, 61, (1, 6))

    @torch.no_grad()
    def decoded():
        model.eval()
        output = model(ids[:, :3], use_cache=True)
        steps = [model(ids[:, t : t + 1], cache=output.cache).logits for t in range(3, 6)]
        return torch.cat(steps, dim=1)

    decoded()
    model.train()
    model(ids, use_cache=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.1)  # as sharding does, behind the version's back
    expected = model.eval()(ids, use_cache=False).logits[:, 3:]
    assert (decoded() - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_frequencies_survive_a_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        skew_hippo(7)
    assert type(skew_hippo(7)) is torch.Tensor
    skew_hippo(7).zero_()
    assert skew_hippo(7).abs().min() > 0


# --- rows that know nothing of each other ---------------------------------------------------------


@torch.no_grad()
def test_nan_in_one_row_of_a_padded_batch_reaches_no_other():
    model, ids = build(), tokens(2, 16)
    values, mask = model.get_input_embeddings()(ids), torch.ones_like(ids)
    mask[0, :4] = 0
    expected = model(inputs_embeds=values, attention_mask=mask).logits[0, 4:]
    values[1, 0] = torch.nan
    got = model(inputs_embeds=values, attention_mask=mask).logits
    assert got[1].isnan().all()
    torch.testing.assert_close(got[0, 4:], expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_batch_without_rows_goes_on_from_its_cache():
    model, ids = build(**FIXED), tokens(2, 7)[:0]
    cache = model(ids[:, :5], use_cache=True).cache
    assert model(ids[:, 5:], cache=cache).logits.shape == (0, 2, 61)


@pytest.mark.parametrize("fields", [FIXED, CAPPED[1]], ids=label)
def test_left_padding_changes_nothing_then_or_later(fields):
    assert_left_padding_changes_nothing(build(**fields), (9, 14, 1))
