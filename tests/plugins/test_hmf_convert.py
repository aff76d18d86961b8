"""Checkpoints of hybrid-model-factory become hybrids; the judge computes logits from their names.

Its formulas are those of the layers' papers, token by token in float64, with heads of keys and
values repeated for the queries that share them.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ssmzoo_hybrid import FAMILY
from ssmzoo_hybrid.convert_hybrid import from_official, official_config

HEADS, GROUPS, SIZE, WIDTH, WINDOW = 4, 2, 6, 16, 3
QWEN = {"vocab_size": 24, "hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 4}
QWEN |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE}
QWEN |= {"rms_norm_eps": 1e-6, "rope_theta": 100.0, "tie_word_embeddings": False}
QWEN |= {"model_type": "hybrid_qwen3", "hybrid_override_pattern": "*-GDN-M2-SWA"}
QWEN |= {"layer_types": ["*", "GDN", "M2", "SWA"], "swa_config": {"window_size": WINDOW}}
QWEN |= {"attention_bias": False}
QWEN |= {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 28}
# a config.json may have all fields of a gated DeltaNet
DELTA = {"hidden_size": WIDTH, "head_dim": SIZE, "num_q_heads": HEADS, "norm_eps": 1e-3}
LLAMA = {**QWEN, "model_type": "hybrid_llama", "num_hidden_layers": 3, "tie_word_embeddings": True}
LLAMA |= {"hybrid_override_pattern": "GDN-M2-GDN", "swa_config": None}
BMOJO = {"window_size": WINDOW, "tie_attn_weights": True}
DEFAULT = {"hybrid_override_pattern": "BMF-*-BMF-GDN", "bmojo_config": BMOJO}
DEFAULT |= {"layer_types": ["BMF", "*", "BMF", "GDN"]}
DELTAS = {**DEFAULT, "bmojo_config": {**BMOJO, "ssm_mixer": "gdn"}}
# their softmax without norms is scaled by hidden_size / num_attention_heads
PLAIN = {"hidden_size": HEADS * SIZE, "rms_norm_eps": 1e-5}
QWEN2 = {**QWEN, **PLAIN, **DEFAULT, "model_type": "hybrid_qwen2", "head_dim": None}
QWEN2 |= {"attention_bias": None}  # it has no such field
CASES = {
    "qwen3": QWEN,
    "qwen3, other settings": {
        **{**QWEN, "gdn_config": {**DELTA, "use_gate": False, "allow_neg_eigval": True}},
        "mamba2_config": {"use_qk_norm": False, "use_pos_emb": False},
    },
    "llama": {**LLAMA, "gdn_config": {**DELTA, "conv_bias": True, "conv_size": 3}},
    "llama, no convolution": {**LLAMA, "gdn_config": {"use_short_conv": False}},
    "qwen3, B'MOJO-F of Mamba2": {**QWEN, **DEFAULT, "attention_bias": True},
    "qwen3, B'MOJO-F of gated DeltaNet": {**QWEN, **DELTAS},
    "qwen2, B'MOJO-F of Mamba2": QWEN2,
    "llama, B'MOJO-F of gated DeltaNet": {
        **{**QWEN, **PLAIN, **DELTAS, "model_type": "hybrid_llama", "attention_bias": True},
        "hybrid_override_pattern": "BMF-GDN-BMF-GDN",
        "gdn_config": {"use_short_conv": False},
    },
}


# whether queries, keys and values have biases, and outputs; but for Qwen2 by "attention_bias"
BIASED = {"hybrid_llama": (True, True), "hybrid_qwen2": (True, False), "hybrid_qwen3": (True, True)}


def ssm_of(config):
    given = (config.get("bmojo_config") or {}).get("ssm_mixer", "mamba2")
    return {"mamba2": "M2", "gdn": "GDN"}[given]


def checkpoint(config):
    """Random weights under their names and shapes."""
    wide, narrow, inner = HEADS * SIZE, GROUPS * SIZE, config["intermediate_size"]
    width = config["hidden_size"]
    delta = config.get("gdn_config") or {}
    qwen = config["model_type"] == "hybrid_qwen3"
    rows = {"q": wide, "k": narrow, "v": narrow}
    attention = {f"{x}_proj.weight": (count, width) for x, count in rows.items()}
    attention["o_proj.weight"] = (width, wide)
    gdn = {**attention, "A_log": (HEADS,), "dt_bias": (HEADS,), "o_norm.weight": (SIZE,)}
    gdn |= {"gk_proj.weight": (HEADS, width), "b_proj.weight": (HEADS, width)}
    gdn |= {"g_proj.weight": (wide, width)} if delta.get("use_gate", True) else {}
    if delta.get("use_short_conv", True):
        taps = delta.get("conv_size", 4)
        gdn |= {f"{x}_conv1d.weight": (count, 1, taps) for x, count in rows.items()}
        biased = rows if delta.get("conv_bias") else {}
        gdn |= {f"{x}_conv1d.bias": (count,) for x, count in biased.items()}
    mamba = {"in_proj.weight": (2 * wide + 2 * narrow + HEADS, width), "norm.weight": (wide,)}
    mamba |= {"conv1d.weight": (wide + 2 * narrow, 1, 4), "conv1d.bias": (wide + 2 * narrow,)}
    mamba |= {
        "out_proj.weight": (width, wide),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (HEADS,)),
    }
    norms = {"q_norm.weight": (SIZE,), "k_norm.weight": (SIZE,)} if qwen else {}
    if qwen and (config.get("mamba2_config") or {}).get("use_qk_norm", True):
        mamba |= {"C_norm.weight": (SIZE,), "B_norm.weight": (SIZE,)}
    qkv, out = (
        BIASED[config["model_type"]] if config["attention_bias"] is not False else (False, False)
    )
    biases = {f"{x}_proj.bias": (count,) for x, count in rows.items() if qkv}
    attention = attention | norms | biases | ({"o_proj.bias": (width,)} if out else {})
    kinds = {"*": ("self_attn", attention), "SWA": ("swa", attention)}
    kinds |= {"GDN": ("gdn", gdn), "M2": ("mamba", mamba)}
    name, ssm = kinds[ssm_of(config)]
    bmojo = {f"bmojo_attn.{name}": shape for name, shape in attention.items()}
    kinds["BMF"] = "bmojo_f", bmojo | {f"{name}.{part}": shape for part, shape in ssm.items()}
    shapes = {"model.embed_tokens.weight": (24, width), "model.norm.weight": (width,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (24, width)}
    for i, kind in enumerate(config["hybrid_override_pattern"].split("-")):
        layer = {f"mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,)}
        layer["post_attention_layernorm.weight"] = (width,)
        layer |= {f"{kinds[kind][0]}.{name}": shape for name, shape in kinds[kind][1].items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    draws = {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: torch.from_numpy(draw) for name, draw in draws.items()}


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def convolved(x, weight, bias):
    padded = F.pad(x.transpose(1, 2), (weight.shape[2] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=len(weight)).transpose(1, 2))


def split(x, count):
    """Heads of ``[B, L, count d]``, each as often as queries share it."""
    return x.unflatten(-1, (count, -1)).repeat_interleave(HEADS // count, dim=2)


def recurrence(q, k, v, kept, beta, delta):
    """Outputs ``[B, L, H, d]`` of a matrix of states that shrinks by ``kept [B, L, H]``."""
    state, outputs = q.new_zeros(len(q), HEADS, SIZE, SIZE), []
    for t in range(q.shape[1]):
        state = kept[:, t, :, None, None] * state
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state) if delta else 0
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - held))[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1)


def gdn(x, w, config):
    given, parts = config.get("gdn_config") or {}, {}
    for name, count in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        y = x @ w[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" in w:
            y = convolved(y, w[f"{name}_conv1d.weight"], w.get(f"{name}_conv1d.bias"))
        else:
            y = F.silu(y)
        y = split(y, count)
        parts[name] = y if name == "v" else y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = torch.sigmoid(x @ w["b_proj.weight"].T) * (2 if given.get("allow_neg_eigval") else 1)
    kept = (-w["A_log"].exp() * F.softplus(x @ w["gk_proj.weight"].T + w["dt_bias"])).exp()
    y = recurrence(parts["q"] / SIZE**0.5, parts["k"], parts["v"], kept, beta, delta=True)
    y = rms(y, w["o_norm.weight"], given.get("norm_eps", 1e-5)).flatten(2)
    return (y * F.silu(x @ w["g_proj.weight"].T) if "g_proj.weight" in w else y) @ w[
        "o_proj.weight"
    ].T


def mamba(x, w, config):
    wide, narrow = HEADS * SIZE, GROUPS * SIZE
    z, mixed, dt = (x @ w["in_proj.weight"].T).split([wide, wide + 2 * narrow, HEADS], dim=-1)
    if "C_norm.weight" in w:
        u, B, C = mixed.split([narrow, narrow, wide], dim=-1)
        B = rms(B.unflatten(-1, (GROUPS, SIZE)), w["B_norm.weight"], 1e-6).flatten(2)
        C = rms(C.unflatten(-1, (HEADS, SIZE)), w["C_norm.weight"], 1e-6).flatten(2)
        mixed = torch.cat([u, B, C], dim=-1)
    mixed = convolved(mixed, w["conv1d.weight"], w["conv1d.bias"])
    u, B, C = mixed.split([narrow, narrow, wide], dim=-1)
    u, B, C = split(u, GROUPS), split(B, GROUPS), split(C, HEADS)
    dt = F.softplus(dt + w["dt_bias"])
    y = recurrence(C, B, u, (-w["A_log"].exp() * dt).exp(), dt, delta=False)
    y = (y + w["D"][:, None] * u) * F.silu(z).unflatten(-1, (HEADS, SIZE))
    y = rms(y, w["norm.weight"].view(HEADS, SIZE), 1e-5)
    return y.flatten(2) @ w["out_proj.weight"].T


def turned(x, w, name, count):
    """Queries or keys ``[B, L, H, d]`` of every token, normed where there are norms, and turned."""
    y = linear(x, w, f"{name}_proj").unflatten(-1, (count, SIZE))
    if f"{name}_norm.weight" in w:
        y = rms(y, w[f"{name}_norm.weight"], 1e-6)
    place = torch.arange(x.shape[1]).double()
    angle = torch.outer(place, 100.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    y = turn * torch.complex(*y.chunk(2, -1))
    return torch.cat([y.real, y.imag], dim=-1)


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def attention(x, w, window, late=None):
    """Attend to the last ``window`` tokens; to as many of ``late``, other inputs, before those."""
    back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    sides = [(x, (back >= 0) & (back < window))]
    sides += [] if late is None else [(late, (back >= window) & (back < 2 * window))]
    q, scores, values = turned(x, w, "q", HEADS), [], []
    for y, seen in sides:
        k = turned(y, w, "k", GROUPS).repeat_interleave(HEADS // GROUPS, dim=2)
        values.append(split(linear(y, w, "v_proj"), GROUPS))
        scores.append(torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5)
        scores[-1] = scores[-1].masked_fill(~seen, -torch.inf)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, torch.cat(values, dim=1))
    return linear(out.flatten(2), w, "o_proj")


def bmojo(x, w, config):
    ssm, reader = (
        {n.removeprefix(begin): y for n, y in w.items() if n.startswith(begin)}
        for begin in ("mamba." if ssm_of(config) == "M2" else "gdn.", "bmojo_attn.")
    )
    late = (mamba if ssm_of(config) == "M2" else gdn)(x, ssm, config)
    return attention(x, reader, WINDOW, late)


def logits(weights, config, ids):
    x = weights["model.embed_tokens.weight"][ids]
    names = {"*": "self_attn.", "SWA": "swa.", "GDN": "gdn.", "M2": "mamba.", "BMF": "bmojo_f."}
    own_mixers = {"GDN": gdn, "M2": mamba, "BMF": bmojo}
    eps = config["rms_norm_eps"]
    for i, kind in enumerate(config["hybrid_override_pattern"].split("-")):
        begin = f"model.layers.{i}."
        w = {n.removeprefix(begin): t for n, t in weights.items() if n.startswith(begin)}
        own = {n.removeprefix(names[kind]): t for n, t in w.items() if n.startswith(names[kind])}
        h = rms(x, w["input_layernorm.weight"], eps)
        if kind in own_mixers:
            x = x + own_mixers[kind](h, own, config)
        else:
            x = x + attention(h, own, WINDOW if kind == "SWA" else torch.inf)
        h = rms(x, w["post_attention_layernorm.weight"], eps)
        gate, up = (h @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return rms(x, weights["model.norm.weight"], eps) @ head.T


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_becomes_a_hybrid_with_its_logits(case):
    config, source = CASES[case], checkpoint(CASES[case])
    ids = torch.from_numpy(np.random.default_rng(1).integers(24, size=(2, 10)))
    weights, ours = from_official(source, config)
    model = FAMILY.causal_lm_class(ours).eval().double()
    model.load_state_dict(weights)
    expected = logits(source, config, ids)
    got = model(ids).logits.detach()
    # angles of positions are float32's
    bound = 1e-6 if "*" in config["hybrid_override_pattern"] else 1e-10
    assert (got - expected).abs().max() <= bound * expected.abs().max()
    with pytest.raises(ValueError, match="of attention in every layer to convert, got"):
        official_config(ours)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"hybrid_override_pattern": "*-BMF-GKA-M2*"},
            r"of \*, SWA, GDN, M2, BMF to convert, got GKA, M2",
        ),
        ({"hybrid_override_pattern": None}, "to convert, got None"),
        (
            {"hybrid_override_pattern": "*-GDN-M2-SWA-GDN"},
            "pattern whose length divides that, got 5",
        ),
        ({"swa_config": None}, "must have swa_config with window_size for layers 'SWA'"),
        ({"gdn_config": {"kv_proj_rank": 4}}, "kv_proj_rank of gdn_config must be null to convert"),
        ({"mamba2_config": {"use_pos_emb": True}}, "use_pos_emb of mamba2_config must be false"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-6 for norms of Mamba2's keys"),
        (
            {**DEFAULT, "bmojo_config": {"tie_attn_weights": False}},
            "tie_attn_weights of bmojo_config must be true",
        ),
        (
            {**DEFAULT, "bmojo_config": {"ssm_mixer": "gka"}},
            "ssm_mixer of bmojo_config must be of mamba2, gdn, gated_deltanet .*, got 'gka'",
        ),
        ({**DEFAULT, "mamba2_config": {"use_pos_emb": True}}, "use_pos_emb of mamba2_config must"),
        (
            {**DEFAULT, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9}},
            "rope_type must be default for layers 'BMF'",
        ),
        (
            {**DEFAULT, "model_type": "hybrid_llama"},
            "head_dim must be hidden_size / num_attention_heads to convert",
        ),
        ({"hidden_act": "gelu"}, "hidden_act of a qwen3 must be 'silu' to convert"),
        ({"model_type": "hybrid_qwen3_moe"}, "qwen3, smollm3, hybrid_llama, .* to convert"),
    ],
)
def test_what_our_layers_cannot_express_is_refused_by_the_configuration_alone(fields, words):
    with pytest.raises((LookupError, ValueError), match=words) as error:
        from_official({}, {**QWEN, **fields})
    assert "\n" not in str(error.value)


SOURCE, LAYER = checkpoint(QWEN), "model.layers."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({LAYER + "1.gdn.q_proj.weight": None}, "mixer.in_proj.weight must have shape"),
        ({LAYER + "1.gdn.o_norm.weight": None}, "missing .*layers.1.mixer.out_norm.weight"),
        ({LAYER + "1.gdn.k_rep": torch.ones(1)}, "unknown .*layers.1.mixer.k_rep"),
        (
            {LAYER + "2.mamba.in_proj.weight": torch.ones(5, WIDTH)},
            "mixer.in_proj.weight must have",
        ),
        ({LAYER + "1.gdn.k_proj.weight": torch.ones(5, WIDTH)}, "mixer.in_proj.weight must have"),
        ({LAYER + "4.mamba.D": torch.ones(4)}, "unknown .*layers.4.mamba.D"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(changes, words):
    assert_named(SOURCE, QWEN, changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bmojo_attn.k_norm.weight": None}, "missing .*0.mixer.attention.k_norm.weight"),
        ({"gdn.A_log": None}, "missing .*layers.0.mixer.ssm.A_log"),
        ({"bmojo_attn.k_proj_.weight": torch.ones(1)}, "unknown .*mixer.attention.k_proj_.weight"),
        ({"mamba.D": torch.ones(4)}, "unknown .*layers.0.mixer.mamba.D"),
    ],
)
def test_a_tensor_of_a_bmojo_f_is_named_by_its_part(changes, words):
    changes = {f"{LAYER}0.bmojo_f.{name}": x for name, x in changes.items()}
    config = {**QWEN, **DELTAS}
    assert_named(checkpoint(config), config, changes, words)


def assert_named(source, config, changes, words):
    state = {name: x for name, x in {**source, **changes}.items() if x is not None}
    with pytest.raises((LookupError, ValueError), match=words):
        from_official(state, config)


def test_a_bmojo_f_has_a_window_of_2048_and_mamba2_unless_the_configuration_says_otherwise():
    _, ours = from_official(checkpoint({**QWEN, **DEFAULT}), {**QWEN, **DEFAULT})
    config = {**QWEN, **DEFAULT, "bmojo_config": None}
    _, given = from_official(checkpoint(config), config)
    assert given.kinds["bmojo_f"] == {
        **ours.kinds["bmojo_f"],
        **{"sliding_window": 2048, "num_fading_tokens": 2048},
    }
    assert given.kinds["bmojo_f"]["ssm"]["beta"] == "dt"
