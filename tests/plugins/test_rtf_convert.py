"""Checkpoints under the official RTF code's names: in, out, and refused."""

import numpy as np
import pytest
import torch

from ssmzoo_rtf import FAMILY
from ssmzoo_rtf.convert_rtf import from_official, split_ab, to_official

D, N, A, RANK, LAYERS, VOCAB, M = 8, 5, 4, 3, 2, 23, 32


def official(montel=True):
    """Random weights under the official names and shapes."""
    rng = np.random.default_rng(0)
    shapes = {
        "backbone.embeddings.word_embeddings.weight": (VOCAB, D),
        "backbone.ln_f.weight": (D,),
        "backbone.ln_f.bias": (D,),
    }
    for i in range(LAYERS):
        layer = f"backbone.layers.{i}."
        for name, rows, columns in (
            ("mixer.in_proj", 3 * D, D),
            ("mixer.mimo_proj", RANK, D),
            ("mixer.out_proj", D, RANK),
            ("mlp.fc1", 4 * D, D),
            ("mlp.fc2", D, 4 * D),
        ):
            shapes |= {layer + name + ".weight": (rows, columns), layer + name + ".bias": (rows,)}
        shapes |= {
            layer + "norm1.weight": (D,),
            layer + "norm1.bias": (D,),
            layer + "norm2.weight": (D,),
            layer + "norm2.bias": (D,),
            layer + "mixer.norm.weight": (D,),
            layer + "mixer.short_filter.weight": (3 * D, 1, 3),
            layer + "mixer.short_filter.bias": (3 * D,),
            layer + "mixer.filter_fn.ab": (A + D, N),
            layer + "mixer.filter_fn.h_0": (D,),
        }
        if montel:
            shapes[layer + "mixer.filter_fn.scalar"] = (A,)
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights = {name: torch.from_numpy(0.3 * value) for name, value in draws.items()}
    return weights | {"lm_head.weight": weights["backbone.embeddings.word_embeddings.weight"]}


def mixed(x, w, prefix):
    """The official mixer on x [L, D] in float64 numpy: everything in the time domain."""
    wide = x @ w[prefix + "in_proj.weight"].T + w[prefix + "in_proj.bias"]
    taps, past = w[prefix + "short_filter.weight"][:, 0], np.pad(wide, ((2, 0), (0, 0)))
    wide = sum(past[j : j + len(x)] * taps[:, j] for j in range(3))
    x0, x1, v = np.split(wide + w[prefix + "short_filter.bias"], 3, axis=1)
    ab, gain = w[prefix + "filter_fn.ab"], w[prefix + "filter_fn.h_0"]
    a, b = ab[:A], ab[A:]
    slack = w.get(prefix + "filter_fn.scalar")
    if slack is not None:
        a = a / (np.abs(a).sum(1) + np.abs(slack) + 1e-6)[:, None]
    a = np.repeat(a, D // A, axis=0)
    z = np.exp(-2j * np.pi * np.arange(M) / M)
    powers = z[:, None] ** np.arange(1, N + 1)  # [M, n]
    spectrum = (powers @ b.T) / (1 + powers @ a.T) + gain  # [M, D]
    kernel = np.fft.ifft(spectrum, axis=0).real
    u = v * x1
    y = np.zeros_like(u)
    for t in range(len(u)):
        y[t] = sum(kernel[j] * u[t - j] for j in range(t + 1)) + gain * u[t]
    y = y * x0
    y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-6) * w[prefix + "norm.weight"]
    low = torch.from_numpy(y @ w[prefix + "mimo_proj.weight"].T + w[prefix + "mimo_proj.bias"])
    low = torch.nn.functional.gelu(low).numpy()
    return low @ w[prefix + "out_proj.weight"].T + w[prefix + "out_proj.bias"]


def layer_norm(x, w, name):
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return x * w[name + ".weight"] + w[name + ".bias"]


def official_logits(weights, ids):
    w = {name: value.double().numpy() for name, value in weights.items()}
    x = w["backbone.embeddings.word_embeddings.weight"][ids]
    for i in range(LAYERS):
        layer = f"backbone.layers.{i}."
        x = x + mixed(layer_norm(x, w, layer + "norm1"), w, layer + "mixer.")
        h = layer_norm(x, w, layer + "norm2")
        h = torch.from_numpy(h @ w[layer + "mlp.fc1.weight"].T + w[layer + "mlp.fc1.bias"])
        h = torch.nn.functional.gelu(h, approximate="tanh").numpy()
        x = x + h @ w[layer + "mlp.fc2.weight"].T + w[layer + "mlp.fc2.bias"]
    return layer_norm(x, w, "backbone.ln_f") @ w["lm_head.weight"].T


@pytest.mark.parametrize("montel", [True, False])
def test_a_converted_model_computes_what_the_official_formulas_say(montel):
    given = official(montel)
    given = {  # stable without the constraint, too
        n: x * 0.2 if n.endswith(".ab") and not montel else x for n, x in given.items()
    }
    weights, config = from_official(given, {"trunc_len": M})
    assert config.denominator_constraint == ("l1_montel" if montel else "none")
    assert (config.num_denominators, config.d_state, config.mixer_rank) == (A, N, RANK)
    model = FAMILY.causal_lm_class(config).eval()
    model.load_state_dict(weights)
    model = model.double()
    ids = torch.from_numpy(np.random.default_rng(1).integers(VOCAB, size=20))
    expected = torch.from_numpy(official_logits(given, ids.numpy()))
    with torch.no_grad():
        got = model(ids[None], use_cache=False).logits[0]
        assert (got - expected).abs().max() <= 1e-10 * expected.abs().max()
        cache, steps = None, []
        for token in ids:
            out = model(token.view(1, 1), cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits[0])
        # b is deployed in float64 and the rest of the way is exact
        assert (torch.cat(steps) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("montel", [True, False])
def test_official_weights_round_trip_bit_for_bit(montel):
    given = official(montel)
    weights, config = from_official(given, {"trunc_len": M})
    back = to_official(weights, config)
    assert back.keys() == given.keys()
    for name, value in given.items():
        assert torch.equal(back[name], value), name


def test_prefixes_of_wrappers_are_stripped():
    given = {f"model.{name}": value for name, value in official().items()}
    assert (
        from_official(given, {"trunc_len": M})[0].keys()
        == from_official(official(), {"trunc_len": M})[0].keys()
    )


def test_a_loose_head_is_kept():
    given = official() | {"lm_head.weight": torch.ones(VOCAB, D)}
    weights, config = from_official(given, {"trunc_len": M})
    assert not config.tie_word_embeddings
    assert torch.equal(weights["lm_head.weight"], given["lm_head.weight"])


def test_an_incomplete_checkpoint_is_refused():
    with pytest.raises(LookupError, match="config must have 'trunc_len'"):
        from_official(official(), {})
    given = official()
    del given["backbone.layers.1.norm2.bias"]
    with pytest.raises(LookupError, match=r"missing \['model.layers.1.mlp_norm.bias'\]"):
        from_official(given, {"trunc_len": M})
    with pytest.raises(LookupError, match="has no 'h_0' beside it"):
        from_official(
            {n: x for n, x in official().items() if not n.endswith("1.mixer.filter_fn.h_0")},
            {"trunc_len": M},
        )
    with pytest.raises(LookupError, match=r"unknown \['lstm.weight'\]"):
        from_official(official() | {"lstm.weight": torch.ones(1)}, {"trunc_len": M})
    with pytest.raises(ValueError, match=r"ab must have shape \[A \+ D, n\] with D = 8"):
        split_ab(torch.zeros(11, N), D)


OFFICIAL = {
    **{"kernel_mode": "truncated", "trunc_len": M, "legacy_double_h0": True},
    **{"norm_type": "layer", "intermediate_size": 8},
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "kernel_mode='truncated' only, got 'exact'"),
        ({"block": "s4", "mixer_rank": None}, "block='hyena' only, got 's4'"),
        ({"kernel_mode": "truncated", "trunc_len": M}, "legacy_double_h0=True only, got False"),
        ({**OFFICIAL, "residual": False}, "residual=True only, got False"),
        ({**OFFICIAL, "mlp_type": "swiglu"}, "mlp_type='gelu' only, got 'swiglu'"),
    ],
)
def test_a_model_unknown_to_the_official_code_is_refused(fields, message):
    config = FAMILY.config_class(**{**FAMILY.tiny, **fields})
    with pytest.raises(ValueError, match=message):
        to_official({}, config)
