"""SpaceTime: the golden checks of its paper on filters, forecasts and the whole model.

The judge is ``tests/oracles/spacetime.py``, dense matrices in float64 numpy.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import spacetime as oracle
from tests.plugins.logits import relative

from ssmzoo.analysis.describe import describe_family
from ssmzoo.cli.main import main
from ssmzoo.modeling import LayerState
from ssmzoo.testing import FamilyConformance
from ssmzoo_kernels import rational_kernel
from ssmzoo_spacetime import FAMILY
from ssmzoo_spacetime.companion import transfer_function, unit

TINY = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 2, "d_state": 5}
SERIES = {**TINY, "input_channels": 3, "norm_type": "none", "preprocess": True, "horizon": 11}


class TestSpaceTime(FamilyConformance):
    family = "spacetime"
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestSpaceTimePreprocessed(FamilyConformance):
    family = replace(
        FAMILY,
        tiny={**FAMILY.tiny, "block": "glu", "preprocess": True, "norm_type": "none"},
    )
    oracle = staticmethod(oracle.logits)


def build(kind="causal_lm", dtype=torch.float64, **fields):
    torch.manual_seed(0)
    fields = {**(SERIES if kind == "forecasting" else TINY), **fields}
    return getattr(FAMILY, f"{kind}_class")(FAMILY.config_class(**fields)).to(dtype).eval()


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


# --- golden check 1: a companion state space is a transfer function -----------------------------


@pytest.mark.parametrize("order", [1, 2, 5, 64])
def test_the_transfer_function_is_that_of_the_companion_matrix(order):
    """``numerator / denominator`` has the taps ``C A^l B``, which its ``1 / z`` puts from 1 on."""
    generator = torch.Generator().manual_seed(order)
    a, B, C = torch.randn(3, 4, order, generator=generator, dtype=torch.float64)
    a = unit(a)
    kernel = rational_kernel(*transfer_function(a, B, C), 301)
    assert float(kernel[:, 0].abs().max()) == 0
    each = zip(a.numpy(), B.numpy(), C.numpy(), strict=True)
    expected = [oracle.unrolled(oracle.companion(x), y, z, 300) for x, y, z in each]
    assert relative(kernel[:, 1:], expected) <= 1e-12


def test_the_numerator_of_a_first_unit_vector_is_c_times_the_denominator():
    a, C = unit(torch.randn(2, 6)), torch.randn(2, 6, dtype=torch.float64)
    B = torch.zeros(2, 6, dtype=torch.float64)
    B[:, 0] = 1
    for alpha, beta, c in zip(*transfer_function(a, B, C), C.numpy(), strict=True):
        assert relative(beta, np.convolve(np.append(1, alpha), c)[:6]) <= 1e-13


@pytest.mark.parametrize("length", [2, 7, 40])
def test_the_kernel_is_the_papers_algorithm_1_at_every_length(length):
    mixer = build().model.layers[1].mixer
    with torch.no_grad():
        mixer.a.copy_(
            mixer.a.abs() * torch.tensor([1.0, -1, 1, 1, -1])
        )  # no pole on a root of unity
        a, b, gain = mixer.filters()
        kernel = rational_kernel(a, b, length)
        kernel[:, 0] += gain - mixer.D
    weights = (x.detach().numpy() for x in (mixer.a, mixer.B, mixer.C))
    expected = [
        oracle.algorithm_1(oracle.unit(x), y, z, length) for x, y, z in zip(*weights, strict=True)
    ]
    assert relative(kernel, expected) <= 1e-12


# --- the layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["recurrence", "convolution"])
@pytest.mark.parametrize("fields", [{}, {"block": "glu", "n_kernels": 2}], ids=str)
def test_every_block_matches_the_oracle(fields, form):
    model = build(**fields)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.a[:, :2] = torch.tensor([0.4, -0.7])  # no pole on a root of unity
            layer.mixer.a[:, 4] = 0.5
    ids = torch.arange(22).view(2, 11) % 61
    expected = oracle.logits(arrays(model), model.config.to_dict(), ids.numpy(), form)
    with torch.no_grad():
        assert relative(model(ids, use_cache=False).logits, expected) <= 1e-12


@torch.no_grad()
def test_any_cuts_of_a_long_input_leave_the_same_outputs():
    mixer = build(d_state=64, n_kernels=4).model.layers[1].mixer
    u = torch.randn(2, 90, 8, dtype=torch.float64)
    expected = mixer(u, LayerState())
    for cuts in ((1,), (50, 51, 89), tuple(range(1, 90))):
        outputs, kept = [], {}
        for piece in torch.tensor_split(u, cuts, dim=1):
            state = LayerState(initial=kept, keep=True)
            outputs.append(mixer(piece, state))
            kept = state.final
        assert relative(torch.cat(outputs, dim=1), expected) <= 1e-11


def test_no_learned_column_puts_a_pole_outside_of_the_disc():
    mixer = build().model.layers[0].mixer
    for scale in (1e-6, 1.0, 1e6):
        with torch.no_grad():
            mixer.a.normal_(std=scale)
            poles = mixer.dynamics(torch.zeros(1, 4, 8)).poles
        assert poles.shape == (8, 5)
        assert float(poles.abs().max()) <= 1 + 1e-12


def test_the_first_layer_sees_differences_and_residuals_of_means():
    fixed = build("forecasting", hidden_size=16).model.layers[0].mixer.fixed
    for feature, taps in enumerate(fixed.flip(1).double().numpy()):
        window = np.flatnonzero(taps)[-1] + 1
        assert 4 <= window < 64 or feature % 8 < 4
        expected = oracle.fixed_filter(feature, window)
        np.testing.assert_allclose(taps[: len(expected)], expected, atol=1e-7)
        assert not taps[len(expected) :].any()


# --- golden check 2: forecasts ------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 30])
@torch.no_grad()
def test_a_forecast_is_the_closed_loop_of_the_state_after_the_series(length):
    """``C (A + B K)^h x``, at horizons that the configuration does not name too."""
    model, series = build("forecasting"), torch.randn(2, length, 3, dtype=torch.float64)
    for horizon in (None, 1, 100):
        got = model(series, horizon=horizon).logits
        expected = oracle.forecast(
            arrays(model), model.config.to_dict(), series.numpy(), horizon or 11
        )
        assert relative(got, expected) <= 1e-10


@torch.no_grad()
def test_a_loop_that_is_a_process_goes_on_with_it():
    """AR(3), on a decoder whose state is the last inputs: a = 0, B = e_1 and C = K = phi."""
    decoder = build("forecasting", d_state=3).decoder
    phi, series = np.array([0.5, -0.3, 0.2]), [1.0, -2.0, 0.5]
    for _ in range(40):
        series.append(phi @ series[:-4:-1])
    decoder.a.zero_()
    decoder.B.copy_(torch.tensor([1.0, 0, 0]))
    decoder.C.copy_(torch.tensor(phi))
    decoder.K.copy_(decoder.C)
    seen = torch.tensor(series[:20], dtype=torch.float64)[None, :, None].expand(1, 20, 8)
    got = decoder.forecast(seen, None, 23)
    assert relative(got[0, :, 0], series[20:]) <= 1e-10
    for y in decoder.open_loop(seen, None):  # from its warm-up on, what comes next
        assert relative(y[0, 3:, 5], series[4:21]) <= 1e-12


@torch.no_grad()
def test_padding_and_packing_change_no_forecast_and_no_loss():
    model = build("forecasting")
    one, two = (torch.randn(length, 3, dtype=torch.float64) for length in (30, 17))
    labels = torch.randn(2, 11, 3, dtype=torch.float64)
    singly = [model(x[None], labels=y[None]) for x, y in zip((one, two), labels, strict=True)]
    logits = torch.cat([x.logits for x in singly])
    assert (
        relative(
            model(torch.cat([one, two])[None], cu_seqlens=torch.tensor([0, 30, 47])).logits, logits
        )
        <= 1e-12
    )
    # as transformers' flattening collator says it
    packed, places = torch.cat([one, two])[None], torch.cat([torch.arange(30), torch.arange(17)])
    ends = torch.tensor([0, 30, 47], dtype=torch.int32)
    assert relative(model(packed, position_ids=places[None]).logits, logits) <= 1e-12
    assert relative(model(packed, cu_seq_lens_q=ends).logits, logits) <= 1e-12
    padded = torch.stack([one, torch.cat([torch.full((13, 3), 7.0), two]).double()])
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :13] = 0
    assert relative(model(padded, mask).logits, logits) <= 1e-12
    alone = model(padded[1:], mask[1:], labels=labels[1:])
    assert relative(alone.loss, singly[1].loss) <= 1e-12
    # each term of a batch's loss is the mean over all values that count
    parts = []
    for x, y, alone in zip((one, two), labels, singly, strict=True):
        hidden = model.model(input_values=x[None], use_cache=False).last_hidden_state
        read, z = model.decoder.open_loop(hidden, None)
        read = model.score(torch.nn.functional.gelu(read))[0, 4:]
        after = torch.cat([x, y[:1]])
        parts += [(alone.logits[0] - y, read - after[5:], (z[:, 4:-1] - hidden[:, 5:])[0])]
    expected = sum(torch.cat(term).square().mean() for term in zip(*parts, strict=True))
    for batch in (
        {"input_values": padded, "attention_mask": mask},
        {"input_values": packed, "cu_seqlens": ends},
    ):
        assert relative(model(**batch, labels=labels).loss, expected) <= 1e-12


def test_the_loss_has_the_authors_three_terms():
    """``train/step/informer.py``: outputs from d - 1 on foretell up to the first label."""
    model, d = build("forecasting"), 5
    series, labels = torch.randn(2, 20, 3).double(), torch.randn(2, 11, 3).double()
    labels[0, 3] = torch.nan  # was not observed
    output = model(series, labels=labels)
    hidden = model.model(input_values=series, use_cache=False).last_hidden_state
    y, z = model.decoder.open_loop(hidden, None)
    read = model.score(torch.nn.functional.gelu(y))
    after = torch.cat([series, labels[:, :1]], dim=1)
    terms = [
        ((output.logits - labels) ** 2)[~labels.isnan()].mean(),
        ((read[:, d - 1 :] - after[:, d:]) ** 2).mean(),
        ((z[:, d - 1 : -1] - hidden[:, d:]) ** 2).mean(),
    ]
    assert relative(output.loss.detach(), sum(terms).detach()) <= 1e-12
    model.config.open_loop_weight = 0.0
    assert relative(model(series, labels=labels).loss.detach(), terms[0].detach()) <= 1e-12
    output.loss.backward()
    model.config.open_loop_weight, labels[1, 0, 2] = 1.0, torch.nan  # the first one, too
    counts = torch.ones_like(after[:, d:]).bool()
    counts[1, -1, 2] = False
    terms[:2] = [
        ((output.logits - labels) ** 2)[~labels.isnan()].mean(),
        ((read[:, d - 1 :] - after[:, d:]) ** 2)[counts].mean(),
    ]
    loss = model(series, labels=labels).loss
    assert relative(loss.detach(), sum(terms).detach()) <= 1e-12
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@torch.no_grad()
def test_a_forecaster_survives_saving_and_a_cast(tmp_path):
    model = build("forecasting", torch.float32)
    series = torch.randn(2, 30, 3)
    model.save_pretrained(tmp_path)
    loaded = FAMILY.forecasting_class.from_pretrained(tmp_path)
    assert torch.equal(loaded(series).logits, model(series).logits)
    assert loaded.to(torch.bfloat16).decoder.K.dtype is torch.float32
    assert relative(loaded(series).logits.float(), model(series).logits) <= 0.05


def test_the_card_of_a_forecaster_loads_it(tmp_path):
    build("forecasting", torch.float32).save_pretrained(tmp_path)
    assert main(["card", str(tmp_path)]) == 0
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: time-series-forecasting" in card
    assert "from ssmzoo_spacetime import SpaceTimeForForecasting" in card


# --- presets ------------------------------------------------------------------------------------

# RTF's comparison, by its code: features, order, state spaces, pre-norm, dropout
ROWS = {
    "spacetime-lra-listops": (256, 4, 1, False, 0.0),
    "spacetime-lra-text": (256, 4, 1, True, 0.0),
    "spacetime-lra-retrieval": (256, 4, 1, True, 0.0),
    "spacetime-lra-image": (512, 64, 512, False, 0.1),
    "spacetime-lra-pathfinder": (256, 64, 256, True, 0.1),
    "spacetime-lra-pathx": (256, 1024, 256, True, 0.1),
}


@pytest.mark.parametrize("preset", ROWS)
def test_a_preset_has_the_sizes_of_its_row(preset):
    width, order, kernels, prenorm, dropout = ROWS[preset]
    config = FAMILY.config(preset)
    assert (config.hidden_size, config.d_state, config.n_kernels or width) == (
        width,
        order,
        kernels,
    )
    assert (config.prenorm, config.dropout, config.mixer_dropout) == (prenorm, dropout, dropout)
    encoder = 2 * width if config.input_channels else config.vocab_size * width
    layers = 6 * (oracle.layer_parameters(width, order, kernels, glu=True) + 2 * width)
    pair = 4 * width * width + width if preset == "spacetime-lra-retrieval" else 0
    expected = encoder + layers + 2 * width * prenorm + pair + (width + 1) * config.num_labels
    assert describe_family("spacetime")["presets"][preset]["parameters"] == expected


def test_the_forecasting_preset_is_that_of_the_official_script():
    layer = oracle.layer_parameters(128, 64, 16, glu=False)
    expected = 2 * 128 + layer + 4 * 128 * 64 + 129
    presets = describe_family("spacetime")["presets"]
    assert presets["spacetime-ett"]["parameters"] == expected == 52_865
    assert presets["spacetime-125m"]["parameters"] == 123_381_504


# --- bad input ----------------------------------------------------------------------------------

PREPROCESSED = {"preprocess": True, "norm_type": "none"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
        ({"horizon": 0}, "horizon must be at least 1, got 0"),
        ({"n_kernels": 0}, "n_kernels must be None or divide hidden_size 8, got 0"),
        ({"n_kernels": 3}, "n_kernels must be None or divide hidden_size 8, got 3"),
        ({"mixer_dropout": 1.0}, "mixer_dropout must be .* got 1.0"),
        ({"open_loop_weight": -1}, "open_loop_weight must be .* got -1"),
        ({"preprocess": True}, "preprocess needs norm_type .* got 'rms', True and 8"),
        (
            {"preprocess": True, "norm_type": "none", "hidden_size": 12},
            "preprocess needs .* got 'none', True and 12",
        ),
        ({**PREPROCESSED, "dropout": 0.1}, "preprocess needs dropout 0, got 0.1"),
        ({**PREPROCESSED, "drop_path_rate": 0.1}, "preprocess needs drop_path_rate 0, got 0.1"),
        ({"block": "gated"}, "gated"),
        ({"kernel_init": "zeros"}, "zeros"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        FAMILY.config_class(**{**TINY, **fields})


def test_a_forecaster_refuses_what_it_cannot_foretell():
    with pytest.raises(ValueError, match="input_channels is None"):
        build("forecasting", input_channels=None)
    model, series = build("forecasting"), torch.randn(2, 9, 3).double()
    with pytest.raises(ValueError, match="horizon must be at least 1, got 0"):
        model(series, horizon=0)
    with pytest.raises(ValueError, match=r"labels must have shape \[2, 11, 3\], got \[2, 9, 3\]"):
        model(series, labels=series)
    with pytest.raises(ValueError, match=r"input_values must have shape \[B, L, 3\]"):
        model(series[..., :2])
    with pytest.raises(ValueError, match="exactly one of input_values"):
        model()
    with pytest.raises(TypeError, match="labls"):
        model(series, labls=series)
    with pytest.raises(ValueError, match="use_cache must be None or False, got True"):
        model(series, use_cache=True)


@torch.no_grad()
def test_a_forecaster_returns_what_enters_its_blocks_if_asked():
    model, series = build("forecasting"), torch.randn(2, 9, 3).double()
    hidden = model(series, output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    assert model(series).hidden_states is None
