"""Classifiers by the names of S5's code and of minimal-LRU: in, out, and refused.

The judge computes scores from their names by the papers' equations, mode by mode in float64.
"""

import numpy as np
import pytest
import torch
from tests.oracles.s5 import gelu, run, sigmoid

from ssmzoo_s5 import FAMILY
from ssmzoo_s5.convert_s5 import from_official, to_official

WIDTH, MODES, LENGTH, WORDS = 5, 3, 6, 7
S5 = {"inputs": WORDS, "readout": ["C"], "gates": ["out1", "out2"], "norm": "batch", "lru": False}
S5 |= {"prenorm": True, "told": {}, "both": False}
LRU = {**S5, "lru": True}
CASES = {
    "S5": S5,
    "half_glu1, both ways": {
        **{**S5, "gates": ["out2"], "readout": ["C1", "C2"], "both": True, "norm": "layer"},
        "told": {"activation": "half_glu1", "clip_eigs": True, "pooling": "last"},
    },
    "half_glu2, both ways": {
        **{**S5, "gates": ["out2"], "both": True, "prenorm": False, "inputs": 2},
        "told": {"activation": "half_glu2", "input_channels": 2},
    },
    "gelu, all modes": {**S5, "gates": [], "inputs": 1, "told": {"conj_sym": False}},
    "LRU": LRU,
    "LRU, post-norm": {**LRU, "norm": "layer", "prenorm": False},
}


def official(case):
    """Random float64 variables by the flattened names of flax."""
    mixer = {"D": (WIDTH,)}
    if case["lru"]:
        mixer |= {f"{name}_log": (MODES,) for name in ("nu", "theta", "gamma")}
        mixer |= {f"B_{part}": (MODES, WIDTH) for part in ("re", "im")}
        mixer |= {f"C_{part}": (WIDTH, MODES) for part in ("re", "im")}
    else:
        mixer |= {"Lambda_re": (MODES,), "Lambda_im": (MODES,), "log_step": (MODES, 1)}
        mixer |= {"B": (MODES, WIDTH, 2)}
        columns = MODES * (1 + case["both"]) // len(case["readout"])
        mixer |= dict.fromkeys(case["readout"], (WIDTH, columns, 2))
    layer = {f"seq.{name}": shape for name, shape in mixer.items()}
    layer |= {f"{gate}.kernel": (WIDTH, WIDTH) for gate in case["gates"]}
    layer |= {f"{gate}.bias": (WIDTH,) for gate in case["gates"]}
    norm = "normalization" if case["lru"] else "norm"
    layer |= {f"{norm}.{name}": (WIDTH,) for name in ("scale", "bias")}
    if case["norm"] == "batch":
        layer |= {f"{norm}.{name}": (WIDTH,) for name in ("mean", "var")}
    shapes = {"encoder.encoder.kernel": (case["inputs"], WIDTH), "encoder.encoder.bias": (WIDTH,)}
    shapes |= {"decoder.kernel": (WIDTH, 4), "decoder.bias": (4,)}
    for i in range(2):
        shapes |= {f"encoder.layers_{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    drawn = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for name, x in drawn.items():
        if name.endswith("Lambda_re"):  # two eigenvalues grow where they are clipped
            drawn[name] = -np.abs(x) + 0.6 * ("clip_eigs" in case["told"])
        elif name.endswith(".var"):
            drawn[name] = x**2 + 0.5
    kind = {True: "batch_stats.", False: "params."}
    return {
        kind[name.endswith((".mean", ".var"))] + name: torch.from_numpy(x)
        for name, x in drawn.items()
    }


def filtered(weights, case, u):
    """What a layer's state space makes of one sequence ``[L, H]``."""
    if case["lru"]:
        nu, theta, gamma = (np.exp(weights[f"seq.{name}_log"]) for name in ("nu", "theta", "gamma"))
        pole = np.exp(-nu + 1j * theta)
        B = gamma[:, None] * (weights["seq.B_re"] + 1j * weights["seq.B_im"])
        C = weights["seq.C_re"] + 1j * weights["seq.C_im"]
    else:
        real = weights["seq.Lambda_re"]
        real = np.minimum(real, -1e-4) if "clip_eigs" in case["told"] else real
        eigenvalues = real + 1j * weights["seq.Lambda_im"]
        pole = np.exp(eigenvalues * np.exp(weights["seq.log_step"][:, 0]))
        B = ((pole - 1) / eigenvalues)[:, None] * (weights["seq.B"] @ [1, 1j])
        C = np.concatenate([weights[f"seq.{name}"] for name in case["readout"]], 1) @ [1, 1j]
        C = C if case["told"].get("conj_sym") is False else 2 * C
    every = np.tile(pole, (LENGTH, 1))
    x = run(every, u @ B.T)
    if case["both"]:
        x = np.concatenate([x, run(every, u[::-1] @ B.T)[::-1]], axis=1)
    return (x @ C.T).real + weights["seq.D"] * u


def scores(weights, case, x):
    weights = {name.split(".", 1)[1]: x.numpy() for name, x in weights.items()}
    x = x @ weights["encoder.encoder.kernel"] + weights["encoder.encoder.bias"]
    for i in range(2):
        begin = f"encoder.layers_{i}."
        layer = {n.removeprefix(begin): w for n, w in weights.items() if n.startswith(begin)}
        layer = {name.replace("normalization.", "norm."): w for name, w in layer.items()}

        def normed(x, layer=layer):
            if case["norm"] == "batch":
                x = (x - layer["norm.mean"]) / np.sqrt(layer["norm.var"] + 1e-5)
            else:
                x = x - x.mean(-1, keepdims=True)
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            return x * layer["norm.scale"] + layer["norm.bias"]

        u = normed(x) if case["prenorm"] else x
        y = np.array([filtered(layer, case, row) for row in u])
        gates = [gelu(y) @ layer[f"{g}.kernel"] + layer[f"{g}.bias"] for g in case["gates"]]
        bare = y if case["told"].get("activation") == "half_glu2" else gelu(y)
        value = gates[0] if len(gates) == 2 else bare
        x = x + (value * sigmoid(gates[-1]) if gates else value)
        x = x if case["prenorm"] else normed(x)
    x = x[:, -1] if case["told"].get("pooling") == "last" else x.mean(1)
    return torch.from_numpy(x @ weights["decoder.kernel"] + weights["decoder.bias"])


def model_of(weights, config):
    model = FAMILY.sequence_classification_class(config).eval().double()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_classifier_goes_in_and_back_with_its_scores(name):
    case, rng = CASES[name], np.random.default_rng(1)
    source, told = official(case), {"prenorm": case["prenorm"], **case["told"]}
    if case["inputs"] == WORDS:
        ids = rng.integers(WORDS, size=(2, LENGTH))
        given, expected = {"input_ids": torch.from_numpy(ids)}, np.eye(WORDS)[ids]
    else:
        expected = rng.standard_normal((2, LENGTH, case["inputs"]))
        given = {"input_values": torch.from_numpy(expected)}
    expected = scores(source, case, expected)
    slashes = {name.replace(".", "/"): x for name, x in source.items()}
    weights, config = from_official(slashes, told)
    got = model_of(weights, config)(**given).logits.detach()
    assert (got - expected).abs().max() <= 1e-10 * expected.abs().max()
    back = to_official(weights, config)
    assert back.keys() == source.keys()
    changed = {"seq.C"} if "conj_sym" in told else set()  # a conjugate each for half of C
    changed |= {"encoder.encoder.kernel", "encoder.encoder.bias"} if "input_ids" in given else set()
    for key in back:
        if not any(key.endswith(name) for name in changed):
            assert torch.equal(back[key], source[key]), key
    again = model_of(*from_official(back, {**told, "conj_sym": True}))(**given).logits.detach()
    assert (again - expected).abs().max() <= 1e-10 * expected.abs().max()


SOURCE, LAYER = official(S5), "params.encoder.layers_1."
HALF = official(CASES["half_glu1, both ways"])


@pytest.mark.parametrize(
    ("source", "changes", "told", "words"),
    [
        (SOURCE, {}, {"prenorm": None}, "config must have prenorm, true or false as"),
        (HALF, {}, {"clip_eigs": True}, "config must have activation, half_glu1 or half_glu2"),
        (HALF, {}, {"activation": "half_glu1"}, "config must have clip_eigs, true or false"),
        (SOURCE, {}, {"discretization": "bilinear"}, "discretization must be 'zoh' to convert"),
        (SOURCE, {LAYER + "seq.B": None}, {}, r"missing \['encoder.layers_1.seq.B'\]"),
        (SOURCE, {LAYER + "seq.P": torch.ones(1)}, {}, r"unknown \['encoder.layers_1.seq.P'\]"),
        (
            SOURCE,
            {LAYER + "seq.B": torch.ones(2, 5, 2)},
            {},
            r"mixer.B must have shape \[3, 5, 2\]",
        ),
        (SOURCE, {"params.decoder.bias": None}, {}, "not an official classifier of S5 or the LRU"),
    ],
)
def test_what_is_missing_unknown_or_not_told_is_refused(source, changes, told, words):
    state = {name: x for name, x in {**source, **changes}.items() if x is not None}
    given = {name: x for name, x in {"prenorm": True, **told}.items() if x is not None}
    with pytest.raises((LookupError, ValueError), match=words):
        from_official(state, given)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_type": "batch"}, "none of them behind the layers, got .* final_norm=True"),
        ({"final_norm": False}, "norm_type='rms'"),
        ({"norm_type": "layer", "final_norm": False}, "rms_norm_eps=1e-06 only, got 1e-05"),
        ({"norm_type": "batch", "prenorm": False, "variant": "lru"}, "has a full GLU and reads"),
        ({"norm_type": "batch", "irregular_steps": True}, "irregular_steps=False only, got True"),
    ],
)
def test_a_model_that_the_code_has_not_is_refused_on_the_way_out(fields, words):
    with pytest.raises(ValueError, match=words):
        to_official({}, FAMILY.config(classifier_bias=True, **fields))
