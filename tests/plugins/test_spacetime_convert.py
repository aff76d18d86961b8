"""Forecasters by the names of SpaceTime's code: in, out, and refused.

The judge computes forecasts from their names by the paper's equations in float64; the state that a
forecast starts from has B as it is, as in their code.
"""

import numpy as np
import pytest
import torch
from tests.oracles.spacetime import companion, filtered, gelu, unit, unrolled

from ssmzoo_spacetime import FAMILY
from ssmzoo_spacetime.convert_spacetime import from_official, to_official

WIDTH, ORDER, LENGTH, HORIZON = 16, 3, 9, 5
LINEAR = {"channels": 2, "kernels": [4, 4], "repeat": False, "fixed": False}
CASES = {
    "linear embedding": LINEAR,
    "fixed filters": {**LINEAR, "fixed": True, "kernels": [8]},
    "repeated, other numbers of state spaces": {
        **{"channels": 1, "repeat": True, "fixed": True, "kernels": [2, WIDTH]},
    },
}


def official(case):
    """Random float64 weights by their names."""
    shapes = {"output.layers.2.weight": (case["channels"], WIDTH)}
    shapes["output.layers.2.bias"] = (case["channels"],)
    if not case["repeat"]:
        shapes |= {"embedding.layers.weight": (WIDTH, case["channels"])}
        shapes |= {"embedding.layers.bias": (WIDTH,)}
    for i, kernels in enumerate(case["kernels"]):
        block = {f"ssm.{name}": (kernels, ORDER) for name in "abc"} | {"ssm.skip": (WIDTH,)}
        block |= {"mlp.layers.2.weight": (WIDTH, WIDTH), "mlp.layers.2.bias": (WIDTH,)}
        shapes |= {f"encoder.blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {f"decoder.blocks.ssm.{name}": (WIDTH, ORDER) for name in "abck"}
    shapes["decoder.blocks.ssm.skip"] = (WIDTH,)
    rng = np.random.default_rng(0)
    weights = {n: torch.from_numpy(0.5 * rng.standard_normal(s)) for n, s in shapes.items()}
    weights["decoder.blocks.ssm.skip"] = torch.zeros(WIDTH, dtype=torch.float64)
    if case["fixed"]:
        rows = np.array([[1, 0, 0, 0], [1, -1, 0, 0], [1, -2, 1, 0], [1, -3, 3, -1.0]])
        weights["encoder.blocks.0.pre.diff_kernel"] = torch.from_numpy(np.tile(rows, (2, 1)))
        windows = torch.from_numpy(rng.integers(4, 64, size=(8, 1)))
        averages = -1.0 / windows * (torch.arange(64) < windows)
        averages[:, 0] += 1
        weights["encoder.blocks.0.pre.ma_r_kernel"] = averages.double()
    return weights


def forecasts(weights, case, x):
    weights = {name: w.numpy() for name, w in weights.items()}
    if "embedding.layers.weight" in weights:
        x = x @ weights["embedding.layers.weight"].T + weights["embedding.layers.bias"]
    else:
        x = np.tile(x, WIDTH // case["channels"])
    for i in range(len(case["kernels"])):
        layer = f"encoder.blocks.{i}."
        if f"{layer}pre.diff_kernel" in weights:
            taps = np.zeros((2, 8, 64))
            taps[:, :4, :4] = weights[layer + "pre.diff_kernel"].reshape(2, 4, -1)
            taps[:, 4:] = weights[layer + "pre.ma_r_kernel"].reshape(2, 4, -1)
            x = filtered(x, taps.reshape(WIDTH, 64))
        a, b, c = (weights[f"{layer}ssm.{name}"] for name in "abc")
        taps = [unrolled(companion(unit(a[k])), b[k], c[k], LENGTH) for k in range(len(a))]
        taps = np.repeat(taps, WIDTH // len(a), axis=0)
        y = filtered(x, taps) + weights[layer + "ssm.skip"] * x
        name = layer + "mlp.layers.2."
        x = x + y + gelu(y) @ weights[name + "weight"].T + weights[name + "bias"]
    y = np.zeros((len(x), HORIZON, WIDTH))
    for h in range(WIDTH):
        a, b, c, k = (weights[f"decoder.blocks.ssm.{name}"][h] for name in "abck")
        A, state = companion(unit(a)), np.zeros((len(x), ORDER))
        for t in range(LENGTH):
            state = state @ A.T + np.outer(x[:, t, h], b)
        loop = A + np.outer(unit(b), unit(k))
        for row, start in enumerate(state):
            y[row, :, h] = unrolled(loop, start, unit(c), HORIZON)
    y = gelu(y) @ weights["output.layers.2.weight"].T + weights["output.layers.2.bias"]
    return torch.from_numpy(y)


def run(weights, config, x):
    model = FAMILY.forecasting_class(config).eval().double()
    model.load_state_dict(weights)
    return model(input_values=torch.from_numpy(x)).logits.detach()


@pytest.mark.parametrize("name", CASES)
def test_a_forecaster_goes_in_and_back_with_its_forecasts(name):
    case, x = CASES[name], np.random.default_rng(1).standard_normal((2, LENGTH, 2))
    x, source = x[..., : CASES[name]["channels"]], official(CASES[name])
    expected = forecasts(source, case, x)
    weights, config = from_official(source, {"horizon": HORIZON, "mixer_dropout": 0.25})
    assert (config.mixer_dropout, config.n_kernels) == (
        (0.25, None if case["repeat"] else case["kernels"][0])
    )
    assert (run(weights, config, x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    back = to_official(weights, config)
    assert (forecasts(back, case, x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    kept = [n for n in source if not case["repeat"] or ".blocks.0.ssm." not in n]
    assert all(torch.equal(back[n], source[n]) for n in kept)
    added = {"embedding.layers.weight", "embedding.layers.bias"} if case["repeat"] else set()
    assert back.keys() == source.keys() | added


SOURCE = official(CASES["fixed filters"])
LAYER = "encoder.blocks.0."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({LAYER + "ssm.b": None}, r"missing \['model.layers.0.mixer.B'\]"),
        ({LAYER + "ssm.a": None}, "lacks the weight that becomes model.layers.0.mixer.a"),
        ({LAYER + "mlp.layers.0.weight": torch.ones(1)}, r"unknown .*mlp.layers.0.weight"),
        ({LAYER + "ssm.b": torch.ones(8, 2)}, r"mixer.B must have shape \[8, 3\]"),
        ({LAYER + "pre.ma_r_kernel": torch.ones(8, 720)}, "must have at most 63 taps to convert"),
    ],
)
def test_what_is_missing_unknown_or_too_long_is_refused(changes, words):
    state = {name: x for name, x in {**SOURCE, **changes}.items() if x is not None}
    with pytest.raises((LookupError, ValueError), match=words):
        from_official(state, {})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"raw_start": False}, "raw_start=True only, got False"),
        ({"norm_type": "layer"}, "norm_type='none' only, got 'layer'"),
        ({"block": "glu"}, "block='mlp' only, got 'glu'"),
    ],
)
def test_a_model_that_the_code_has_not_is_refused_on_the_way_out(fields, words):
    given = {"norm_type": "none", "raw_start": True, "input_channels": 1, **fields}
    with pytest.raises(ValueError, match=words):
        to_official({}, FAMILY.config(**given))
