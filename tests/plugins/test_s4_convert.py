"""Classifiers by the names of S4's code: in, out, and refused.

The judge computes scores from their names by the paper's equations, tap by tap in float64.
"""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.oracles.s4 import discretize, unrolled, whole

from ssmzoo_s4 import FAMILY
from ssmzoo_s4.convert_s4 import from_official, to_official

WIDTH, PAIRS, LENGTH = 6, 3, 7
FOUR = {"release": 4, "dt_transform": "exp", "encoder": 9, "norm": "batch", "rows": 2 * WIDTH}
FOUR |= {"channels": 1, "sets": 1, "prenorm": True, "truncated": 0, "pooling": "mean"}
CASES = {
    "release 4": FOUR,
    "learned for 5 taps": {**FOUR, "truncated": 5, "pooling": "last"},
    "both ways, softplus": {**FOUR, "channels": 2, "dt_transform": "softplus", "truncated": 4},
    "linear, of values": {**FOUR, "rows": WIDTH, "encoder": None, "sets": 3, "norm": "layer"},
    "post-norm, sets": {**FOUR, "prenorm": False, "sets": WIDTH},
    "release 3": {**FOUR, "release": 3, "channels": 2, "truncated": 5, "sets": 2},
    "no norm": {**FOUR, "norm": None},
}


def official(case):
    """Random float64 weights under the names of release 4; ``C`` is C itself."""
    sets, channels = case["sets"], case["channels"]
    layer = {"layer.layer.D": (1, WIDTH), "layer.output_linear.0.bias": (case["rows"],)}
    layer["layer.output_linear.0.weight"] = (case["rows"], WIDTH)
    kernel = {"inv_dt": (WIDTH, 1), "C": (channels, WIDTH, PAIRS, 2), "A_imag": (sets, PAIRS)}
    kernel |= {"A_real": (sets, PAIRS), **dict.fromkeys("PB", (1, sets, PAIRS, 2))}
    layer |= {f"layer.layer.kernel.{name}": shape for name, shape in kernel.items()}
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    if case["norm"] == "batch":
        norm |= {"running_mean": (WIDTH,), "running_var": (WIDTH,), "num_batches_tracked": ()}
    norm = {f"norm.norm.{name}": shape for name, shape in norm.items()} if case["norm"] else {}
    shapes = {"encoder.0.weight": (case["encoder"], WIDTH)}
    if case["encoder"] is None:
        shapes = {"encoder.0.weight": (WIDTH, 2), "encoder.0.bias": (WIDTH,)}
    shapes |= {"decoder.0.output_transform.weight": (3, WIDTH)}
    shapes |= {"decoder.0.output_transform.bias": (3,)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in {**layer, **norm}.items()}
    shapes |= {f"model.{name}": shape for name, shape in norm.items() if case["prenorm"]}
    rng = np.random.default_rng(0)
    weights = {n: torch.from_numpy(np.asarray(rng.standard_normal(shapes[n]))) for n in shapes}
    for name in weights:
        if name.endswith("running_var"):
            weights[name] = weights[name].square() + 0.5
        elif name.endswith("inv_dt"):
            weights[name] = 0.3 * weights[name] - 1.5
        elif name.endswith("num_batches_tracked"):
            weights[name] = torch.tensor(3)
    return weights


def systems(weights, prefix, case):
    """Abar and Bbar of every row of C, and the row of the full order."""
    kernel = {n: weights[f"{prefix}layer.layer.kernel.{n}"].numpy() for n in ("A_real", "A_imag")}
    A = -np.exp(kernel["A_real"]) - 1j * kernel["A_imag"]
    parts = (weights[f"{prefix}layer.layer.kernel.{n}"].numpy() @ [1, 1j] for n in "PBC")
    P, B, C = (part.reshape(-1, PAIRS) for part in parts)
    steps = weights[prefix + "layer.layer.kernel.inv_dt"].flatten()
    steps = steps.exp() if case["dt_transform"] == "exp" else F.softplus(steps)
    found = []
    for row, c in enumerate(C):
        a, p, b = (whole(x[row % len(x)]) for x in (A, P, B))
        dense = np.diag(a) - np.outer(p, p.conj())
        found.append((*discretize(dense, b, float(steps[row % WIDTH])), whole(c)))
    return found


def as_saved(weights, case):
    """The same weights as the release saves them, C for the kernel's length."""
    saved = {}
    for name, tensor in weights.items():
        if name.endswith("kernel.C"):
            prefix = name.removesuffix("layer.layer.kernel.C")
            lost = [
                (c @ (np.eye(len(c)) - np.linalg.matrix_power(Abar, case["truncated"])))[:PAIRS]
                for Abar, _, c in systems(weights, prefix, case)
            ]
            if case["truncated"]:
                tensor = torch.view_as_real(torch.from_numpy(np.array(lost))).view(tensor.shape)
            saved[prefix + "layer.layer.kernel.l_kernel"] = torch.tensor(case["truncated"])
        saved[name] = tensor
    if case["release"] == 4:
        return saved
    older = {}
    for name, tensor in saved.items():
        name = name.replace("layer.layer.kernel.", "layer.kernel.kernel.").replace("l_kernel", "L")
        name = name.replace("layer.layer.D", "layer.D").replace("A_real", "inv_w_real")
        tensor = {"A_imag": -tensor, "inv_dt": tensor.flatten()}.get(name.split(".")[-1], tensor)
        name = name.replace("A_imag", "w_imag").replace("inv_dt", "log_dt")
        older["module." + name] = tensor[:, None] if "output_linear.0.bias" in name else tensor
    return older


def normed(weights, name, x, case):
    if case["norm"] is None:
        return x
    name += "norm.norm."
    if case["norm"] == "layer":
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    else:
        mean, variance = weights[name + "running_mean"], weights[name + "running_var"]
    x = (x - mean) / (variance + 1e-5).sqrt()
    return x * weights[name + "weight"] + weights[name + "bias"]


def scores(weights, case, x):
    x = x @ weights["encoder.0.weight"].T + weights["encoder.0.bias"] if x.dim() == 3 else x
    x = x if x.dim() == 3 else weights["encoder.0.weight"][x]
    for i in range(2):
        layer = f"model.layers.{i}."
        u = normed(weights, layer, x, case) if case["prenorm"] else x
        y = u * weights[layer + "layer.layer.D"]
        taps = [unrolled(*system, LENGTH).real for system in systems(weights, layer, case)]
        for t in range(LENGTH):
            for s in range(LENGTH):
                for h in range(WIDTH):
                    if s <= t:
                        y[:, t, h] += taps[h][t - s] * u[:, s, h]
                    elif case["channels"] == 2:
                        y[:, t, h] += taps[WIDTH + h][s - t - 1] * u[:, s, h]
        name = layer + "layer.output_linear.0."
        y = F.gelu(y) @ weights[name + "weight"].T + weights[name + "bias"]
        x = x + (F.glu(y) if case["rows"] == 2 * WIDTH else y)
        x = x if case["prenorm"] else normed(weights, layer, x, case)
    x = normed(weights, "model.", x, case) if case["prenorm"] else x
    x = x.mean(1) if case["pooling"] == "mean" else x[:, -1]
    name = "decoder.0.output_transform."
    return x @ weights[name + "weight"].T + weights[name + "bias"]


def run(weights, config, x):
    model = FAMILY.sequence_classification_class(config).eval().double()
    model.load_state_dict(weights)
    return (model(x) if x.dim() == 2 else model(input_values=x)).logits.detach()


@pytest.mark.parametrize("name", CASES)
def test_a_classifier_goes_in_and_back_with_its_scores(name):
    case = CASES[name]
    source, rng = official(case), np.random.default_rng(1)
    told = {"pooling": case["pooling"]}
    told |= {"dt_transform": case["dt_transform"]} if case["release"] == 4 else {}
    x = torch.from_numpy(rng.standard_normal((2, LENGTH, 2)))
    x = x if case["encoder"] is None else torch.from_numpy(rng.integers(9, size=(2, LENGTH)))
    expected = scores(source, case, x)
    weights, config = from_official(as_saved(source, case), told)
    assert (run(weights, config, x) - expected).abs().max() <= 1e-10 * expected.abs().max()
    back = to_official(weights, config)
    assert back.keys() == as_saved(source, {**case, "release": 4}).keys()
    assert (scores(back, {**case, "dt_transform": "exp"}, x) - expected).abs().max() <= 1e-10
    again, _ = from_official(back, {**told, "dt_transform": "exp"})
    assert all(torch.equal(again[key], weights[key]) for key in weights)
    if not case["truncated"]:
        assert all(torch.equal(back[key], source[key]) for key in source)


def test_c_of_a_long_kernel_is_solved_for_in_float64():
    case = {**FOUR, "truncated": 1000}
    source = official(case)
    for name in source:  # so slow that half of a state is left after 1,000 taps
        if name.endswith("A_real"):
            source[name] = torch.full_like(source[name], -6.0)
        source[name] = source[name] * 0.01 if name.endswith("kernel.P") else source[name]
    saved = {
        n: x.float() if x.is_floating_point() else x for n, x in as_saved(source, case).items()
    }
    weights, _ = from_official(saved, {"pooling": "mean", "dt_transform": "exp"})
    name = "model.layers.1.layer.layer.kernel.C"
    got, expected = weights["model.layers.1.mixer.C"], source[name][0]
    assert got.dtype == torch.float32
    assert (saved[name][0] - expected).abs().max() > 0.1 * expected.abs().max()
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


SAVED = as_saved(official(FOUR), FOUR)
KERNEL = "model.layers.1.layer.layer.kernel."


@pytest.mark.parametrize(
    ("changes", "told", "words"),
    [
        ({}, {"pooling": "mean"}, "must have dt_transform, 'exp' or 'softplus'"),
        ({}, {"dt_transform": "exp"}, "must have pooling, 'mean' or 'last'"),
        (
            {KERNEL + "P": torch.ones(2, 1, 3, 2)},
            {},
            "mixer.P must have rank and channels 1, got 2",
        ),
        ({KERNEL + "C": None}, {}, r"missing \['model.layers.1.mixer.C'\]"),
        ({"model.layers.0.layer.output_linear.0.weight": None}, {}, "becomes .*out_proj.weight"),
        (
            {"model.layers.1.layer.ff.0.0.weight": torch.ones(1)},
            {},
            r"unknown \['model.layers.1.lay",
        ),
        ({KERNEL + "A_real": torch.ones(1, 2)}, {}, r"mixer.A_log must have shape \[1, 3\]"),
    ],
)
def test_what_is_missing_unknown_or_of_another_layer_is_refused(changes, told, words):
    state = {name: x for name, x in {**SAVED, **changes}.items() if x is not None}
    with pytest.raises((LookupError, ValueError), match=re.compile(words)):
        from_official(state, told or {"pooling": "mean", "dt_transform": "exp"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_type": "rms"}, "no RMSNorm, got block='linear', norm_type='rms'"),
        ({"block": "filter"}, "got block='filter'"),
        ({"intermediate_size": 8}, "intermediate_size=None only, got 8"),
        ({"classifier_bias": False}, "classifier_bias=True only, got False"),
    ],
)
def test_a_model_that_the_code_has_not_is_refused_on_the_way_out(fields, words):
    with pytest.raises(ValueError, match=words):
        to_official({}, FAMILY.config(**{"classifier_bias": True, "norm_type": "batch", **fields}))
