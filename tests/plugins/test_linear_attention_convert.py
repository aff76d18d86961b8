"""Checkpoints under the names of flash-linear-attention and Kimi Linear: in, out, and refused.

The judge computes logits from their names: the models' equations, token by token in float64.
"""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.stock_models import tiny

from ssmzoo.checkpoints.convert import to_family
from ssmzoo_linear_attention import FAMILY
from ssmzoo_linear_attention.convert_linear_attention import from_official, to_official

BACKBONE = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 24, "intermediate_size": 20}
BACKBONE |= {"norm_eps": 1e-3, "tie_word_embeddings": False, "attn": None, "fuse_norm": True}
RETNET = {**BACKBONE, "model_type": "retnet", "num_heads": 2, "expand_k": 1.0, "expand_v": 2.0}
RETNET |= {"use_output_gate": True, "use_short_conv": False, "num_kv_heads": 2}
GLA = {**BACKBONE, "model_type": "gla", "num_heads": 2, "expand_k": 0.5, "expand_v": 1}
GLA |= {"use_output_gate": True, "use_short_conv": False, "clamp_min": None, "feature_map": None}
DELTA = {**BACKBONE, "model_type": "delta_net", "num_heads": 2, "expand_k": 1.0, "expand_v": 1.5}
DELTA |= {"use_gate": False, "use_short_conv": True, "qk_norm": "l2", "qk_activation": "silu"}
GATED = {**BACKBONE, "model_type": "gated_deltanet", "num_heads": 2, "head_dim": 4, "expand_v": 1.5}
GATED |= {"use_gate": True, "use_short_conv": True, "conv_size": 3, "hidden_act": "swish"}
PRODUCT = {**BACKBONE, "model_type": "gated_deltaproduct", "num_heads": 2, "head_dim": 4}
PRODUCT |= {"expand_v": 1.5, "use_output_gate": True, "use_short_conv": True, "conv_size": 3}
PRODUCT |= {"use_forget_gate": True, "allow_neg_eigval": True, "num_householder": 3}
HGRN2 = {**BACKBONE, "model_type": "hgrn2", "num_heads": 2, "expand_ratio": 8}
HGRN2 |= {"use_short_conv": False, "use_lower_bound": True, "hidden_act": "swish"}
KDA = {**BACKBONE, "model_type": "kda", "num_heads": 2, "head_dim": 4, "expand_v": 1.5}
KDA |= {"use_short_conv": True, "safe_gate": False, "lower_bound": None, "hidden_act": "swish"}
LINEAR = {**BACKBONE, "model_type": "linear_attn", "num_heads": 2, "expand_k": 1, "expand_v": 1.5}
LINEAR |= {"feature_map": "identity", "norm_feature_map": False, "norm_q": False, "norm_k": False}
ELU = {**LINEAR, "feature_map": "elu", "norm_feature_map": True, "tie_feature_map_qk": True}
KIMI = {key: BACKBONE[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
KIMI |= {"intermediate_size": 20, "rms_norm_eps": 1e-3, "kv_lora_rank": 512, "num_experts": 256}
KIMI |= {"model_type": "kimi_linear", "linear_num_heads": 2, "linear_head_dim": 4}
KIMI |= {"layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2}
PUBLISHED = {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 2]}
CASES = {
    "retnet": RETNET,
    "retnet, no gate": {**RETNET, "use_output_gate": False},
    "gla": GLA,
    "gla, convolutions": {**GLA, "use_short_conv": True},
    "delta_net": DELTA,
    "delta_net, gate": {**DELTA, "use_gate": True, "use_short_conv": False},
    "delta_net, signs": {**DELTA, "allow_neg_eigval": True},
    "gated_deltanet": GATED,
    "gated_deltaproduct": PRODUCT,
    "gated_deltaproduct, neither gate": {
        **{**PRODUCT, "use_output_gate": False, "use_forget_gate": False},
        **{"num_householder": 2, "allow_neg_eigval": False},
    },
    "hgrn2": HGRN2,
    "gated_deltanet, groups": {**GATED, "num_v_heads": 4, "use_gate": False},
    "kda": KDA,
    "kda, groups": {**KDA, "num_v_heads": 4, "use_short_conv": False, "allow_neg_eigval": True},
    "linear_attn": LINEAR,
    "linear_attn, elu": ELU,
    "kimi_linear": KIMI,
}
LATER = [CASES[case] for case in list(CASES)[-5:]]


def sizes(config):
    """Return the heads of keys and of values, and their sizes."""
    if config["model_type"] == "kimi_linear":
        return (config["linear_num_heads"],) * 2 + (config["linear_head_dim"],) * 2
    heads, width = config["num_heads"], config["hidden_size"]
    if "expand_ratio" in config:
        return heads, heads, config["expand_ratio"], width // heads
    if "head_dim" in config:
        key = config["head_dim"]
        return heads, config.get("num_v_heads", heads), key, int(key * config["expand_v"])
    key, value = (int(config[f"expand_{x}"] * width) // heads for x in "kv")
    return heads, heads, key, value


def official(config):
    """Random weights under fla's names and shapes."""
    (groups, heads, key, value), width = sizes(config), config["hidden_size"]
    inner, kind = config["intermediate_size"], config["model_type"]
    keys, values, writes = groups * key, heads * value, config.get("num_householder", 1)
    gate = config.get("use_gate", config.get("use_output_gate"))
    layer = {"attn_norm.weight": (width,), "mlp_norm.weight": (width,)}
    layer |= {f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (width, inner), "attn.o_proj.weight": (width, values)}
    rows = {"q": keys, "k": keys * writes, "v": values * writes}
    if gate:
        layer["attn.g_proj.weight"] = (values, width)
    if kind in ("kda", "kimi_linear"):
        layer |= {"attn.f_proj.0.weight": (value, width), "attn.A_log": (heads,)}
        layer |= {"attn.f_proj.1.weight": (heads * key, value), "attn.dt_bias": (heads * key,)}
        layer |= {"attn.g_proj.0.weight": (value, width), "attn.g_proj.1.weight": (values, value)}
        layer |= {"attn.g_proj.1.bias": (values,)} if kind == "kda" else {}
    if config.get("use_short_conv", kind == "kimi_linear"):
        taps = config.get("conv_size", 4)
        layer |= {f"attn.{x}_conv1d.weight": (count, 1, taps) for x, count in rows.items()}
    if kind == "gla":
        layer |= {"attn.gk_proj.0.weight": (16, width), "attn.gk_proj.1.weight": (keys, 16)}
        layer["attn.gk_proj.1.bias"] = (keys,)
    if kind == "hgrn2":
        rows = {"q": keys, "f": keys, "i": values}
    if kind == "gated_deltanet" or config.get("use_forget_gate"):
        rows["a"] = heads
        layer |= {"attn.A_log": (heads,), "attn.dt_bias": (heads,)}
    if kind in RULED:
        rows["b"] = heads * writes
        layer["attn.o_norm.weight"] = (value,)
    elif kind == "hgrn2":
        layer["attn.g_norm.weight"] = (width,)
    elif kind == "linear_attn":
        layer["attn.norm.weight"] = (value,)
    else:
        layer[f"attn.g_norm{'_swish_gate' if gate else ''}.weight"] = (value,)
    layer |= {f"attn.{x}_proj.weight": (count, width) for x, count in rows.items()}
    shapes = {"model.embeddings.weight": (24, width), "model.norm.weight": (width,)}
    shapes["lm_head.weight"] = (24, width)
    if kind == "hgrn2":
        shapes["model.lower_bounds"] = (config["num_hidden_layers"], keys)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if kind == "kimi_linear":
        shapes = {kimi(name): shape for name, shape in shapes.items()}
        shapes |= {name: (1, 1, heads, 1) for name in shapes if name.endswith("A_log")}
    rng = np.random.default_rng(0)
    draws = {name: 0.4 * rng.standard_normal(shape) for name, shape in sorted(shapes.items())}
    return {name: torch.from_numpy(draw.astype(np.float32)) for name, draw in draws.items()}


RENAMED = {
    **{"embeddings": "embed_tokens", "attn.": "self_attn.", "attn_norm": "input_layernorm"},
    **{f"{x}_proj.{i}": f"{x}_{n}_proj" for x in "fg" for i, n in enumerate("ab")},
    "mlp_norm": "post_attention_layernorm",
}
RULED = ("delta_net", "gated_deltanet", "gated_deltaproduct", "kda", "kimi_linear")


def kimi(name):
    """Return the name that Kimi Linear's code has for a weight of fla's KDA."""
    for theirs, own in RENAMED.items():
        name = re.sub(rf"(?<=\.){re.escape(theirs)}", own, name, count=1)
    return name


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def mixed(x, weights, config, bound):
    """Map ``[B, L, D]`` through one layer's mixer, whose decays have this lower bound."""
    groups, heads, key, value = sizes(config)
    kind, length = config["model_type"], x.shape[1]
    delta = kind in RULED

    def line(name, x=x):
        return x @ weights[f"{name}.weight"].T

    if kind == "hgrn2":
        kept = bound + (1 - bound) * torch.sigmoid(line("f_proj"))
        pairs = ((F.silu(line("q_proj")), key), (kept, key), (line("i_proj"), value))
        q, kept, v = (part.unflatten(-1, (heads, size)) for part, size in pairs)
        y = read(q, 1 - kept, v, kept[..., None], torch.ones(1, length, heads), delta=False)
        return line("o_proj", rms(y.flatten(2), weights["g_norm.weight"], config["norm_eps"]))
    parts, writes = [], config.get("num_householder", 1)
    for name in "qkv":
        part = line(f"{name}_proj")
        convolved = f"{name}_conv1d.weight" in weights
        if convolved:
            taps = weights[f"{name}_conv1d.weight"]
            padded = F.pad(part.transpose(1, 2), (taps.shape[2] - 1, 0))
            part = F.conv1d(padded, taps, groups=taps.shape[0]).transpose(1, 2)
        parts.append(F.silu(part) if delta or convolved else part)
    q, k, v = parts[0].unflatten(-1, (groups, key)), *parts[1:]
    k, v = (part.unflatten(-1, (writes, -1)).flatten(1, 2) for part in (k, v))
    k, v = k.unflatten(-1, (groups, key)), v.unflatten(-1, (heads, value))
    if kind == "retnet":
        angle = torch.outer(
            torch.arange(length), 10_000.0 ** (-torch.arange(0, key, 2).double() / key)
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = [turn * torch.complex(*x.chunk(2, -1)) for x in (q, k)]
        q, k = (torch.cat([x.real, x.imag], dim=-1) for x in turned)
    if config.get("feature_map") == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if delta:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // groups, dim=2) for x in (q, k))
    beta, kept = torch.ones(1, length, heads), torch.ones(1, length, heads, 1, 1)
    if delta:
        beta = torch.sigmoid(line("b_proj")) * (2 if config.get("allow_neg_eigval") else 1)
        beta = beta.unflatten(-1, (writes, heads)).flatten(1, 2)
    if kind == "retnet":
        kept = (1 - 2.0 ** (-5 - torch.arange(heads))).expand(1, length, -1)[..., None, None]
    elif kind == "gla":
        raw = line("gk_proj.1", line("gk_proj.0")) + weights["gk_proj.1.bias"]
        kept = torch.sigmoid(raw).pow(1 / 16).unflatten(-1, (heads, key))[..., None]
    elif "a_proj.weight" in weights:
        step = F.softplus(line("a_proj") + weights["dt_bias"])
        kept = (-weights["A_log"].exp() * step).exp()[..., None, None]
    elif kind in ("kda", "kimi_linear"):
        step = F.softplus(line("f_proj.1", line("f_proj.0")) + weights["dt_bias"])
        rate = weights["A_log"].flatten().exp()[:, None]
        kept = (-rate * step.unflatten(-1, (heads, key))).exp()[..., None]
    y = read(q, k, v, kept, beta, delta=delta)
    names = ("o_norm.weight", "g_norm.weight", "g_norm_swish_gate.weight", "norm.weight")
    norm = next(weights[name] for name in names if name in weights)
    if config.get("norm_feature_map"):
        y = y / ((q * k.cumsum(1)).sum(-1, keepdim=True) / key**0.5 + 1e-10)
    y = rms(y, norm, config.get("norm_eps", 1e-3)).flatten(2)
    if "g_proj.1.weight" in weights:
        gate = line("g_proj.1", line("g_proj.0")) + weights.get("g_proj.1.bias", 0)
        return line("o_proj", y * torch.sigmoid(gate))
    return line("o_proj", y * F.silu(line("g_proj")) if "g_proj.weight" in weights else y)


def read(q, k, v, kept, beta, delta):
    """The outputs of a recurrence with so many writes a token as there are keys a query."""
    writes, state, outputs = k.shape[1] // q.shape[1], 0, []
    for t in range(k.shape[1]):
        if t % writes == 0:
            state = kept[:, t // writes] * state
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state) if delta and t else 0
        written = beta[:, t, :, None] * (v[:, t] - held)
        state = state + k[:, t, :, :, None] * written[:, :, None]
        if t % writes == writes - 1:
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t // writes], state))
    return torch.stack(outputs, dim=1) / q.shape[-1] ** 0.5


def logits(weights, config, ids):
    weights, eps = {name: x.double() for name, x in weights.items()}, 1e-3
    if config["model_type"] == "kimi_linear":
        names = {kimi(name): name for name in official({**KDA, "expand_v": 1})}
        weights = {names[name]: x for name, x in weights.items()}
    x, shares = weights["model.embeddings.weight"][ids], torch.zeros(config["num_hidden_layers"], 1)
    if "model.lower_bounds" in weights:
        shares = weights["model.lower_bounds"].softmax(dim=0)
    for i in range(config["num_hidden_layers"]):
        begin = f"model.layers.{i}."
        layer = {name.removeprefix(begin): w for name, w in weights.items() if begin in name}
        attn = {name.removeprefix("attn."): w for name, w in layer.items()}
        x = x + mixed(
            rms(x, layer["attn_norm.weight"], eps), attn, config, shares[1 : i + 1].sum(0)
        )
        h = rms(x, layer["mlp_norm.weight"], eps)
        gate, up = (h @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + F.silu(gate) * up @ layer["mlp.down_proj.weight"].T
    return rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_weights_survive_the_round_trip_bit_for_bit_and_give_their_models_logits(case):
    config, source = CASES[case], official(CASES[case])
    weights, ours = from_official(source, config)
    assert_same(to_official(weights, ours), source)
    model = FAMILY.causal_lm_class(ours).eval().double()
    model.load_state_dict(weights)
    ids = torch.from_numpy(np.random.default_rng(1).integers(24, size=(2, 12)))
    expected = logits(source, config, ids)
    got = model(ids).logits.detach()
    # ours adds 1e-6 to the sums that elu's outputs are divided by
    bound = 1e-6 if case == "linear_attn, elu" else 1e-10
    assert (got - expected).abs().max() <= bound * expected.abs().max()


def test_what_fla_wrote_in_other_versions_is_read():
    source = official(GLA)
    unfused = {name.replace("_swish_gate", ""): x for name, x in source.items()}
    other = {"fuse_norm": False, "_name_or_path": "x", "share_conv_kernel": True, "use_gk": True}
    assert_same(to_official(*from_official(unfused, {**GLA, **other})), source)
    with pytest.raises(LookupError, match=r"unknown \['model.layers.0.attn.g_norm.weight'"):
        from_official({**unfused, **source}, GLA)
    source = official(GATED)
    early = {**source, "model.layers.1.attn.D": torch.ones(2)}
    assert_same(to_official(*from_official(early, GATED)), source)
    with pytest.raises(LookupError, match=r"unknown \['model.layers.1.attn.D'\]"):
        from_official({**official(GLA), "model.layers.1.attn.D": torch.ones(2)}, GLA)


def early(source):
    """The same weights as fla wrote them before February 2025: gate and up projection are one."""
    joined = {}
    for name, tensor in source.items():
        if ".mlp.up_proj." in name:
            continue
        up = source.get(name.replace(".mlp.gate_proj.", ".mlp.up_proj."))
        joined[name] = torch.cat([tensor, up]) if ".mlp.gate_proj." in name else tensor
    return joined


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case] not in LATER])
def test_what_fla_wrote_before_february_2025_is_read(case):
    config, source = CASES[case], official(CASES[case])
    expected, _ = from_official(source, config)
    assert_same(from_official(early(source), config)[0], expected)
    earlier = {n.replace("attn.o_norm.", "attn.norm."): x for n, x in early(source).items()}
    assert_same(from_official(earlier, config)[0], expected)
    if "delta" not in config["model_type"]:
        source["model.layers.0.attn.norm.weight"] = torch.ones(1)
        with pytest.raises(LookupError, match=r"unknown \['model.layers.0.attn.norm.weight'\]"):
            from_official(source, config)


def test_one_half_of_gate_and_up_projection_is_no_early_checkpoint():
    source = official(GLA)
    del source["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LookupError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        from_official(source, GLA)


def test_a_tied_head_is_filled_in_and_another_head_refused():
    source = official(GLA)
    head = source.pop("lm_head.weight")
    weights, ours = from_official(source, {**GLA, "tie_word_embeddings": True})
    assert torch.equal(weights["lm_head.weight"], source["model.embeddings.weight"])
    del weights["lm_head.weight"]  # as it is saved
    assert "lm_head.weight" in to_official(weights, ours)
    with pytest.raises(ValueError, match="tie_word_embeddings must be false"):
        from_official({**source, "lm_head.weight": head}, {**GLA, "tie_word_embeddings": True})


def test_an_mlp_whose_width_is_not_told_has_flas():
    source, told = official({**GLA, "intermediate_size": 256}), {**GLA, "intermediate_size": None}
    assert from_official(source, told)[1].intermediate_size == 256  # 16 x 4 x 2 / 3, rounded up
    with pytest.raises(ValueError, match=r"down_proj.weight must have shape \[16, 512\]"):
        from_official(source, {**told, "hidden_ratio": 25})


MODELS = ("retnet", "gla", "delta_net", "gated_deltanet", "gated_deltaproduct", "hgrn2")
MODELS = (*MODELS, "kda", "linear_attn")


@pytest.mark.parametrize("case", MODELS)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(case):
    key = "f_proj" if case == "hgrn2" else "k_proj"
    source, name = official(CASES[case]), f"model.layers.1.attn.{key}.weight"
    lacking = {key: x for key, x in source.items() if key != name}
    with pytest.raises(LookupError, match=rf"missing \['{name}'\]"):
        from_official(lacking, CASES[case])
    with pytest.raises(LookupError, match=r"unknown \['model.layers.0.attn.z'\]"):
        from_official({**source, "model.layers.0.attn.z": torch.ones(1)}, CASES[case])
    # as many rows in all
    swapped = {**source, name: source[name][1:]}
    query = name.replace(key, "q_proj")
    swapped[query] = torch.cat([source[query], source[query][:1]])
    with pytest.raises(ValueError, match=r"attn.[qkf]_proj.weight must have shape \["):
        from_official(swapped, CASES[case])


ATTENTION = {"layers": [1], "num_heads": 2}


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (GLA, {"model_type": None}, "type of retnet, gla, .*, xlstm, mamba2, or .*, got None"),
        (GLA, {"model_type": "gsa"}, "got gsa"),
        (GLA, {"num_heads": None}, "config of a gla must have 'num_heads'"),
        (GLA, {"expand_k": None}, "config of a gla must have 'expand_k'"),
        (DELTA, {"use_gate": None}, "config of a delta_net must have 'use_gate'"),
        (GATED, {"head_dim": None}, "config of a gated_deltanet must have 'head_dim'"),
        (GLA, {"attn": ATTENTION}, "attn of a gla must be null to convert"),
        (GATED, {"attnres_block_size": 4}, "attnres_block_size of a gated_deltanet must be null"),
        (GLA, {"hidden_act": "powlu"}, 'hidden_act of a gla must be "swish" or "silu"'),
        (RETNET, {"elementwise_affine": False}, "elementwise_affine of a retnet must be true"),
        (RETNET, {"num_kv_heads": 1}, "num_kv_heads of a retnet must be 2"),
        (RETNET, {"use_short_conv": True}, "use_short_conv of a retnet must be false"),
        (RETNET, {"feature_map": "relu"}, "feature_map of a retnet must be null"),
        (GLA, {"clamp_min": -1.0}, "clamp_min of a gla must be null"),
        (GLA, {"allow_neg_eigval": True}, "allow_neg_eigval of a gla must be null"),
        (GLA, {"head_dim": 4}, "head_dim of a gla must be null"),
        (GLA, {"gate_logit_normalizer": 8}, "gate_logit_normalizer of a gla must be null"),
        (DELTA, {"qk_norm": "sum"}, 'qk_norm of a delta_net must be "l2"'),
        (DELTA, {"qk_activation": "elu"}, 'qk_activation of a delta_net must be "silu"'),
        (DELTA, {"use_beta": False}, "use_beta of a delta_net must be true"),
        (DELTA, {"norm_first": True}, "norm_first of a delta_net must be false"),
        (GATED, {"lower_bound": -5}, "lower_bound of a gated_deltanet must be null"),
        (GATED, {"num_v_heads": 3}, "num_key_heads needs to divide num_heads"),
        (GLA, {"num_heads": 0}, "num_heads must be at least 1"),
        (HGRN2, {"expand_ratio": 4}, "expand_ratio of a hgrn2 must be 8"),
        (HGRN2, {"use_lower_bound": False}, "use_lower_bound of a hgrn2 must be true"),
        (HGRN2, {"use_short_conv": True}, "use_short_conv of a hgrn2 must be false"),
        (PRODUCT, {"num_householder": None}, "gated_deltaproduct must have 'num_householder'"),
        (PRODUCT, {"num_v_heads": 4}, "num_v_heads of a gated_deltaproduct must be null"),
        (KDA, {"safe_gate": True}, "safe_gate of a kda must be false"),
        (KDA, {"lower_bound": -5}, "lower_bound of a kda must be null"),
        (LINEAR, {"feature_map": "elementwise_product"}, "got 'elementwise_product' and False"),
        (ELU, {"norm_feature_map": None}, "must be 'elu' with norm_feature_map, .* and False"),
        (LINEAR, {"norm_q": True}, "norm_q of a linear_attn must be false"),
        (
            KIMI,
            {"layer_types": ["full_attention"] * 2},
            "layer_types of a kimi_linear must be linear_attention in",
        ),
        (KIMI, {"mlp_layer_types": None}, r"mlp_layer_types .* must be dense .* got \['sparse'\]"),
    ],
)
def test_what_our_layer_cannot_express_is_refused_by_the_configuration_alone(config, fields, words):
    with pytest.raises((LookupError, ValueError), match=words) as error:
        from_official({}, {**config, **fields})
    assert "\n" not in str(error.value)


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="hidden_size must be a number, got 'wide'"):
        from_official({}, {**GLA, "hidden_size": "wide"})


def blank(preset, **fields):
    config = FAMILY.config(preset, **fields)
    with torch.device("meta"):
        return FAMILY.causal_lm_class(config).state_dict(), config


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("retnet-125m", "model.layers.11.attn.o_proj.weight"),
        ("gla-125m", "model.layers.11.attn.gk_proj.0.weight"),
        ("deltanet-340m", "model.layers.11.attn.o_norm.weight"),
        ("kda-1.3b", "model.layers.11.self_attn.g_a_proj.weight"),
        ("mamba2-130m", "backbone.layers.11.mixer.norm.weight"),
    ],
)
def test_presets_of_their_models_go_out(preset, name):
    assert name in to_official(*blank(preset))


# as transformers writes it, and as it was published
@pytest.mark.parametrize("published", [False, True])
@torch.no_grad()
def test_kimi_linear_is_that_of_transformers(published, tmp_path):
    theirs = tiny("kimi_linear", **{key: KIMI[key] for key in KIMI if key != "model_type"})
    theirs.save_pretrained(tmp_path / "theirs")
    told = json.loads((tmp_path / "theirs" / "config.json").read_text())
    if published:
        for name in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"):
            del told[name]
        told |= {
            "first_k_dense_replace": 2,
            "linear_attn_config": {**PUBLISHED, "full_attn_layers": []},
        }
    (tmp_path / "config.json").write_text(json.dumps(told))
    ours = to_family(
        tmp_path / "theirs", "linear_attention", tmp_path / "ours", config=tmp_path / "config.json"
    )
    model = FAMILY.causal_lm_class.from_pretrained(ours).eval()
    ids = torch.from_numpy(np.random.default_rng(1).integers(24, size=(2, 12)))
    expected = theirs(ids, use_cache=False).logits
    assert (model(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("preset", "fields", "words"),
    [
        ("kda-1.3b", {"head_v_dim": 64}, "whose kda has no decay_rank=128, gate_rank=128"),
        ("kda-1.3b", {"beta_scale": 2.0}, "whose kda has no gate_bias=False"),
        ("mamba2-130m", {"rotary": True}, "Mamba2's, which has no rotary=True"),
        ("mamba2-130m", {"qk_norm": True}, "which has no qk_norm=True"),
        ("mamba2-130m", {"logit_soft_cap": 30.0}, "which has no logit_soft_cap=30.0"),
        ("deltanet-340m", {"out_norm_eps": 1e-6}, "whose delta_net has no out_norm_eps=1e-06"),
        ("mamba2-130m", {"out_norm": "gated"}, "which has no out_norm='gated'"),
        ("mamba2-130m", {"d_conv": None, "conv_bias": False}, "which has no d_conv=None"),
        ("linear-transformer-mnist", {}, "whose linear_attn has no"),
        ("gla-125m", {"decay_rank": 8}, "whose gla has no decay_rank=8"),
        ("gla-125m", {"intermediate_size": None}, "whose gla has no intermediate_size=None"),
        ("retnet-125m", {"d_conv": 4}, "whose retnet has no d_conv=4"),
        ("deltanet-340m", {"beta_scale": 1.5}, "whose delta_net has no beta_scale=1.5"),
        ("deltanet-340m", {"num_key_heads": 2}, "whose delta_net has no key_heads=2"),
        ("deltanet-340m", {"out_gate": "sigmoid"}, "whose delta_net has no out_gate='sigmoid'"),
        ("gated-deltanet-1.3b", {"skip": True}, "whose gated_deltanet has no skip=True"),
        ("hgrn2-340m", {"head_v_dim": 64}, "whose hgrn2 has no head_v_dim=64"),
        (
            "gated-deltaproduct-392m",
            {"decay": "channel"},
            "gated_deltaproduct has no decay='channel",
        ),
        ("xlstm-7b", {"out_norm": "head"}, "the official model has out_norm='head_layer' only"),
        ("xlstm-7b", {"qk_norm": True}, "the official model has qk_norm=False only"),
        ("gated-deltanet-1.3b", {"prenorm": False}, "whose gated_deltanet has no prenorm=False"),
    ],
)
def test_a_model_that_fla_has_not_is_refused_on_the_way_out(preset, fields, words):
    with pytest.raises(ValueError, match=words):
        to_official(*blank(preset, **{"num_hidden_layers": 1, **fields}))
