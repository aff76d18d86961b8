"""What the tests of the oracles share."""

import numpy as np


def relative(got, expected):
    """Largest error relative to the largest entry; nan stays nan and fails every comparison."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def judge_convolution(convolution):
    """Hold a causal or two-sided convolution of 9 tokens and 2 channels to numpy's."""
    u, past, future = numbers(1, 9, 2), numbers(2, 5, seed=1), numbers(2, 12, seed=2)
    got = convolution(u, past, future)
    for h in range(2):
        forward = np.convolve(u[0, :, h], past[h])[:9]
        backward = np.convolve(u[0, ::-1, h], np.pad(future[h], (1, 0)))[:9][::-1]
        assert relative(got[0, :, h], forward + backward) <= 1e-14


SHARED = {"rms_norm_eps": 1e-5, "num_hidden_layers": 2, "hidden_size": 6, "bidirectional": False}
BACKBONES = [
    {},
    {"norm_type": "layer", "intermediate_size": 9},
    {"norm_type": "batch", "prenorm": False},
    {"prenorm": False, "intermediate_size": 9},
]
IDS = np.random.default_rng(1).integers(11, size=(2, 14))


def network(mixer, norm_type="rms", prenorm=True, intermediate_size=None):
    """Random weights of a language model of two layers and width 6, and the shared fields."""
    rng = np.random.default_rng(7)
    names = {"model.embed_tokens.weight": (11, 6)}
    norms = ["model.norm"] if prenorm else []
    for i in range(2):
        layer = f"model.layers.{i}."
        names |= {f"{layer}mixer.{name}": shape for name, shape in mixer.items()}
        norms.append(layer + "norm")
        if intermediate_size:
            norms.append(layer + "mlp_norm")
            for name, shape in (
                ("up_proj", (intermediate_size, 6)),
                ("down_proj", (6, intermediate_size)),
            ):
                names[f"{layer}mlp.{name}.weight"] = shape
                names[f"{layer}mlp.{name}.bias"] = shape[:1]
    kinds = {
        "rms": ["weight"],
        "layer": ["weight", "bias"],
        "batch": ["weight", "bias", "running_mean", "running_var"],
    }
    names |= {f"{norm}.{kind}": (6,) for norm in norms for kind in kinds[norm_type]}
    weights = {name: 0.5 * rng.standard_normal(shape) for name, shape in names.items()}
    for name, value in weights.items():
        if name.endswith("running_var"):
            value[:] = np.exp(value)
    fields = {"norm_type": norm_type, "prenorm": prenorm, "intermediate_size": intermediate_size}
    return weights, SHARED | fields
