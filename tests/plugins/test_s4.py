"""S4: the golden checks of its paper on the filters and on the whole model.

The judge is ``tests/oracles/s4.py``, float64 numpy from the paper alone.
"""

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import s4 as oracle
from tests.plugins.logits import relative

from ssmzoo.analysis.describe import describe_family
from ssmzoo.modeling import LayerState, StateCache
from ssmzoo.testing import FamilyConformance
from ssmzoo_s4 import FAMILY, modeling_s4

TINY = {"vocab_size": 61, "hidden_size": 6, "num_hidden_layers": 2, "d_state": 8}
MIXER = "model.layers.1.mixer."


class TestS4(FamilyConformance):
    family = "s4"
    oracle = staticmethod(oracle.logits)


def build(dtype=torch.float64, stirred=True, kind="causal_lm", **fields):
    """A model; stirred, every feature's Lambda, P and B have left their initial values."""
    torch.manual_seed(0)
    config = FAMILY.config_class(**{**TINY, **fields})
    model = getattr(FAMILY, f"{kind}_class")(config).to(dtype).eval()
    if stirred:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def filtered(mixer, u, *cuts):
    """Outputs of a mixer whose input is cut, and the state that it leaves."""
    outputs, kept = [], {}
    for piece in torch.tensor_split(u, cuts, dim=1):
        state = LayerState(initial=kept, keep=True)
        outputs.append(mixer(piece, state))
        kept = state.final
    return torch.cat(outputs, dim=1), kept["ssm"]


# --- golden check 1: HiPPO ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 8, 64])
def test_a_new_model_is_hippo_legs(order):
    """Its Lambda is the paper's, and b* A^k b, which no change of basis moves, are HiPPO's."""
    model = build(stirred=False, d_state=order)
    A, b = oracle.hippo(order)
    expected, _, _ = oracle.nplr(order)
    for lam, p, own_b, _, _ in oracle.systems(arrays(model), MIXER):
        # parameters are drawn in float32
        np.testing.assert_allclose(np.sort(lam.imag), expected.imag, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lam.real, -0.5, rtol=1e-7)
        own = np.diag(lam) - np.outer(p, p.conj())
        x, y = own_b, b
        for _ in range(4):
            np.testing.assert_allclose(own_b.conj() @ x, b @ y, rtol=1e-5)
            x, y = own @ x, A @ y


def test_the_eigenvalues_of_a_new_model_are_the_whole_numbers():
    """Of ``Lambda - P P*``, as far as float32 parameters tell: they are ill conditioned."""
    for lam, p, *_ in oracle.systems(arrays(build(stirred=False)), MIXER):
        found = np.linalg.eigvals(np.diag(lam) - np.outer(p, p.conj()))
        np.testing.assert_allclose(np.sort(found.real), np.arange(-8, 0), atol=0.01)
        np.testing.assert_allclose(found.imag, 0, atol=0.01)


def test_a_new_model_has_the_papers_ranges():
    model = build(stirred=False, hidden_size=256, d_state=64, n_ssm=1, dt_min=1e-4, dt_max=1e-2)
    weights = arrays(model)
    log_dt = weights[MIXER + "log_dt"]
    assert np.log(1e-4) <= log_dt.min() < np.log(1.2e-4)
    assert np.log(0.8e-2) < log_dt.max() <= np.log(1e-2) + 1e-6
    assert weights[MIXER + "C"].shape == (256, 32, 2)
    np.testing.assert_allclose(weights[MIXER + "C"].std(axis=(0, 1)), 0.5**0.5, atol=0.05)
    assert weights[MIXER + "D"].std() == pytest.approx(1, abs=0.2)
    assert weights[MIXER + "P"].shape == weights[MIXER + "B"].shape == (1, 32, 2)


# --- golden check 2: the kernel -----------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 8, 64])
def test_the_kernel_is_the_unrolled_recurrence_at_every_length(order):
    model = build(d_state=order, n_ssm=3)
    expected = []
    for lam, p, b, c, dt in oracle.systems(arrays(model), MIXER):
        Abar, Bbar = oracle.discretize(np.diag(lam) - np.outer(p, p.conj()), b, dt)
        expected.append(oracle.unrolled(Abar, Bbar, c, 300).real)
    mixer = model.model.layers[1].mixer
    for length in (1, 2, 17, 300):
        kernel = mixer.system().filters(length)[0].detach().numpy()
        assert relative(kernel, np.array(expected)[:, :length]) <= 1e-12


@pytest.mark.parametrize("length", [1, 6, 25])
def test_the_kernel_is_algorithm_1_with_the_c_of_that_length(length):
    """The paper's C~ = C (I - Abar^L) differs from length to length, C does not."""
    model = build(n_ssm=2)
    expected = [
        oracle.algorithm_1(*system, length).real for system in oracle.systems(arrays(model), MIXER)
    ]
    kernel = model.model.layers[1].mixer.system().filters(length)[0].detach().numpy()
    assert relative(kernel, expected) <= 1e-12


def test_the_transition_is_the_dense_one():
    model = build()
    found = model.model.layers[1].mixer.system().transition().detach().numpy()
    for own, (lam, p, b, _, dt) in zip(found, oracle.systems(arrays(model), MIXER), strict=True):
        Abar, _ = oracle.discretize(np.diag(lam) - np.outer(p, p.conj()), b, dt)
        np.testing.assert_allclose(own, Abar, atol=1e-13)


def test_kernels_in_float32_are_rounded_float64_ones():
    """Orders of 256 and steps of 0.1 cancel most of what the diagonal system alone would do."""
    model = build(torch.float32, stirred=False, d_state=256, dt_min=0.1, dt_max=0.1)
    mixer, u = model.model.layers[0].mixer, torch.randn(1, 500, 6)
    with torch.no_grad():
        got = mixer(u, LayerState())
        cut, _ = filtered(mixer, u, 200, 400, *range(401, 420))
        expected = mixer.double()(u.double(), LayerState())
    assert relative(got, expected) <= 1e-5
    assert relative(cut, expected) <= 1e-5


# --- the layer ----------------------------------------------------------------------------------

BLOCKS = [{"block": "linear"}, {"block": "glu", "n_ssm": 2}, {"block": "filter", "n_ssm": 1}]


@pytest.mark.parametrize("fields", BLOCKS, ids=str)
@pytest.mark.parametrize("form", ["recurrence", "convolution"])
def test_every_block_matches_the_oracle(fields, form):
    model = build(**fields)
    ids = torch.arange(22).view(2, 11) % 61
    expected = oracle.logits(arrays(model), model.config.to_dict(), ids.numpy(), form)
    with torch.no_grad():
        assert relative(model(ids, use_cache=False).logits, expected) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("fields", BLOCKS, ids=str)
def test_a_bidirectional_layer_is_the_explicit_two_sided_sum(fields):
    model = build(kind="model", bidirectional=True, **fields)
    weights, config = arrays(model), model.config.to_dict()
    for length in (1, 2, 11):
        u = torch.randn(2, length, 6, dtype=torch.float64)
        expected = oracle.mixer(weights, config, "layers.1.mixer.", u.numpy(), "convolution")
        assert relative(model.layers[1].mixer(u, LayerState()), expected) <= 1e-12


@torch.no_grad()
def test_a_bidirectional_encoder_reads_padded_and_packed_sequences_as_alone():
    model = build(kind="model", bidirectional=True)
    rows = [torch.arange(n) + n for n in (9, 1, 6)]
    alone = [model(row[None]).last_hidden_state[0] for row in rows]
    ids, mask = torch.ones(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 2 : 2 + len(row)], mask[i, 2 : 2 + len(row)] = row, 1
    padded = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    ends = torch.tensor([0, 9, 10, 16])
    packed = model(torch.cat(rows)[None], cu_seqlens=ends).last_hidden_state[0]
    for got in (padded, packed):
        assert relative(got, torch.cat(alone)) <= 1e-12


def test_a_bidirectional_model_has_no_cache_and_shows_both_kernels():
    model = build(kind="model", bidirectional=True)
    with pytest.raises(ValueError, match="use_cache"):
        model(torch.ones(1, 4, dtype=torch.long), use_cache=True)
    seen = model.layers[0].mixer.dynamics(torch.zeros(1, 5, 6))
    assert seen.kernel.shape == seen.future_kernel.shape == (6, 5)
    assert seen.poles.shape == (6, 8)


@torch.no_grad()
def test_any_cuts_leave_the_same_outputs_and_the_state_of_the_recurrence():
    model = build(d_state=64, n_ssm=2)
    mixer, u = model.model.layers[1].mixer, torch.randn(2, 50, 6, dtype=torch.float64)
    expected, state = filtered(mixer, u)
    stepped = np.zeros((6, 2, 64), dtype=complex)
    for h, (lam, p, b, _, dt) in enumerate(oracle.systems(arrays(model), MIXER)):
        Abar, Bbar = oracle.discretize(np.diag(lam) - np.outer(p, p.conj()), b, dt)
        for t in range(50):
            stepped[h] = stepped[h] @ Abar.T + np.outer(u[:, t, h].numpy(), Bbar)
    half = stepped[:, :, :32].transpose(1, 0, 2)
    assert relative(state, np.stack([half.real, half.imag], axis=-1)) <= 1e-11
    for cuts in ((1,), (20, 21, 49), tuple(range(1, 50))):
        got, end = filtered(mixer, u, *cuts)
        assert relative(got, expected) <= 1e-11
        assert relative(end, state) <= 1e-11


def test_a_state_is_marched_span_by_span_as_in_one_with_its_gradients(monkeypatch):
    model = build()
    ids = torch.randint(model.config.vocab_size, (3, 30))
    mask = torch.arange(30) >= torch.tensor([[0], [9], [27]])
    found = []
    for span in (30, 7):
        monkeypatch.setattr(modeling_s4, "SPAN", span)
        cache, outputs = StateCache(model.config), []
        for columns in (slice(0, 16), slice(16, 30)):
            given = {"attention_mask": mask[:, columns], "cache": cache}
            outputs.append(model(ids[:, columns], **given, use_cache=True).logits)
        outputs = [torch.cat(outputs, 1)[mask], *(layer.states["ssm"] for layer in cache.layers)]
        loss = sum(y.mul(torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs)
        outputs += torch.autograd.grad(loss, list(model.parameters()))
        found.append([y.detach() for y in outputs])
    for got, known in zip(found[1], found[0], strict=True):
        assert relative(got, known) <= 1e-11
    whole = model(ids, attention_mask=mask, use_cache=False).logits.detach()
    assert relative(found[1][0], whole[mask]) <= 1e-11


def test_no_learned_parameters_make_a_system_unstable():
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[1] in ("A_log", "A_imag", "P", "B", "log_dt"):
                parameter.normal_(std=3)
    for layer in model.model.layers:
        poles = layer.mixer.dynamics(torch.zeros(1, 4, 6)).poles
        assert poles.shape == (6, 8)
        # where dt |Re Lambda| is small, a pole may round onto the circle
        assert float(poles.detach().abs().max()) <= 1 + 1e-12


def test_ssm_parameters_have_a_group_of_their_own_but_not_c():
    model = build()
    names = type(model.model.layers[0].mixer).param_group_names
    assert names == dict.fromkeys(("log_dt", "A_log", "A_imag", "P", "B"), "ssm")


def test_dt_can_have_the_global_rate_as_in_the_later_configurations_of_three_tasks():
    model = build()
    groups = {"ssm": {"lr": 1e-3}, "log_dt": {"lr": 1e-2}}
    names = {parameter: name.split(".")[-1] for name, parameter in model.named_parameters()}
    found = {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in model.param_groups(lr=1e-2, weight_decay=0.05, groups=groups)
        for parameter in group["params"]
    }
    slow = dict.fromkeys(("A_log", "A_imag", "P", "B"), (1e-3, 0.0))
    assert found | slow == found
    assert (found["log_dt"], found["C"]) == ((1e-2, 0.0), (1e-2, 0.05))


# --- presets ------------------------------------------------------------------------------------

# DSS's Table 4, which S4's runs share: depth, features, norm, pre-norm, dropout
ROWS = {
    "s4-lra-listops": (6, 128, False, 0.0),
    "s4-lra-text": (4, 128, True, 0.0),
    "s4-lra-retrieval": (6, 256, True, 0.0),
    "s4-lra-image": (6, 512, False, 0.2),
    "s4-lra-pathfinder": (6, 256, True, 0.1),
    "s4-lra-pathx": (6, 256, True, 0.0),
    "s4-speech-commands": (6, 128, True, 0.1),
}


# RTF's Tables 8 and 9: width, order, pre-norm, dropout
BOTH = {
    "s4-both-lra-listops": (256, 4, False, 0.0),
    "s4-both-lra-text": (256, 4, True, 0.0),
    "s4-both-lra-retrieval": (256, 4, True, 0.0),
    "s4-both-lra-image": (512, 64, False, 0.1),
    "s4-both-lra-pathfinder": (256, 64, True, 0.0),
    "s4-both-lra-pathx": (256, 64, True, 0.0),
}


@pytest.mark.parametrize("preset", [*ROWS, *BOTH])
def test_a_preset_has_the_sizes_of_its_row(preset):
    config, sets, order, both = FAMILY.config(preset), 1, 64, preset in BOTH
    if both:
        width, order, prenorm, dropout = BOTH[preset]
        depth, sets = 6, None if "path" in preset else 1
    else:
        depth, width, prenorm, dropout = ROWS[preset]
    assert (config.num_hidden_layers, config.hidden_size, config.d_state) == (depth, width, order)
    assert (config.prenorm, config.dropout, config.norm_type) == (prenorm, dropout, "batch")
    assert (config.bidirectional, config.causal, config.block == "glu") == (both, not both, both)
    encoder = 2 * width if config.input_channels else config.vocab_size * width
    layer = oracle.layer_parameters(width, order, sets, glu=both) + width * order * both
    layers = depth * (layer + 2 * width) + 2 * width * prenorm
    pair = 4 * width * width + width if preset.endswith("retrieval") else 0
    expected = encoder + layers + pair + (width + 1) * config.num_labels
    assert describe_family("s4")["presets"][preset]["parameters"] == expected


def test_the_synthetic_presets_are_linear_and_deep_as_in_rtfs_table_2():
    presets = describe_family("s4")["presets"]
    assert presets["s4-delay"]["parameters"] == 2 * 4 + oracle.layer_parameters(4, 1024, 1) - 20 + 5
    layer = oracle.layer_parameters(64, 1024, 1, glu=True) + 2 * 64
    assert presets["s4-copying"]["parameters"] == 64 * 64 + 4 * layer + 2 * 64 + 65 * 64
    assert presets["s4-125m"]["parameters"] == 124_506_624
    model = FAMILY.token_classification_class(FAMILY.config("s4-delay", d_state=64)).eval()
    x, y = torch.randn(2, 1, 40, 1)
    with torch.no_grad():
        zero = model(input_values=0 * x).logits
        both = model(input_values=x + y).logits + zero
        assert relative(both, model(input_values=x).logits + model(input_values=y).logits) <= 1e-5


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state must be even and at least 2, got 0"),
        ({"d_state": 7}, "d_state must be even and at least 2, got 7"),
        ({"n_ssm": 0}, "n_ssm must be None or divide hidden_size = 6, got 0"),
        ({"n_ssm": 4}, "n_ssm must be None or divide hidden_size = 6, got 4"),
        ({"dt_min": 0.2}, "dt_min and dt_max must be .* got 0.2 and 0.1"),
        ({"dt_min": 0.0}, "dt_min and dt_max must be positive"),
        ({"dt_max": float("inf")}, "dt_min and dt_max must be .* got 0.001 and inf"),
        ({"block": "gated"}, "gated"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        FAMILY.config_class(**{**TINY, **fields})
