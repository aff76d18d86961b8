"""The B'MOJO oracle, judged by closed forms, by brute force and by its own other forms."""

import numpy as np
import pytest
from tests.oracles import bmojo
from tests.oracles.judging import numbers, relative

from ssmzoo.tasks import mqar


def scores_of(length, seed=0, ties=False):
    """Random scores; with ties, of few values."""
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, 4, length).astype(float) if ties else rng.uniform(size=length)


# --- models -----------------------------------------------------------------------------------

E, D, N, R, Q, H, G, P, V = 6, 8, 3, 2, 3, 4, 2, 4, 11
BASE = {
    "num_hidden_layers": 2,
    "prenorm": True,
    "residual": True,
    "rms_norm_eps": 1e-5,
    "norm_type": "rms",
    "intermediate_size": None,
    "mlp_type": "swiglu",
    "mixer_types": ["bmojo", "bmojo"],
    "wiring": "serial",
    "sliding_window": 4,
    "num_fading_tokens": 2,
    "num_eidetic_tokens": 3,
    "fading_mode": "chunk",
    "eidetic_overlap": "allow",
    "innovation_span": 3,
    "innovation_weights": "uniform",
    "innovation_error": "absolute",
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": P,
    "use_rope": False,
    "rope_theta": 10000.0,
}


def model(*, untied=False, fading_norm=False, tied_head=True, **fields):
    """Random weights of every layer's every part, and the configuration."""
    assert fields.keys() <= BASE.keys()
    config = {**BASE, **fields}
    config["num_hidden_layers"] = len(config["mixer_types"])
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not tied_head:
        shapes["lm_head.weight"] = (V, E)
    for i, kind in enumerate(config["mixer_types"]):
        layer, remembers = f"model.layers.{i}.", kind in ("bmojo", "bmojo_f")
        own = {"norm.weight": (E,)}
        if remembers and config["wiring"] == "serial":
            own["mixer.attn_norm.weight"] = (E,)
        if remembers and fading_norm:
            own["mixer.attention.fading_norm.weight"] = (E,)
        if config["intermediate_size"]:
            M = config["intermediate_size"]
            own |= {"mlp_norm.weight": (E,), "mlp.down_proj.weight": (E, M)}
            own |= {"mlp.up_proj.weight": (M, E)}
            if config["mlp_type"] == "swiglu":
                own |= {"mlp.gate_proj.weight": (M, E)}
            else:
                own |= {"mlp.up_proj.bias": (M,), "mlp.down_proj.bias": (E,)}
        if kind not in ("swa", "attention"):
            own |= {
                "mixer.ssm.in_proj.weight": (2 * D, E),
                "mixer.ssm.conv1d.weight": (D, 1, Q),
                "mixer.ssm.conv1d.bias": (D,),
                "mixer.ssm.x_proj.weight": (R + 2 * N, D),
                "mixer.ssm.dt_proj.weight": (D, R),
                "mixer.ssm.dt_bias": (D,),
                "mixer.ssm.A_log": (D, N),
                "mixer.ssm.D": (D,),
                "mixer.ssm.out_proj.weight": (E, D),
            }
        if kind != "mamba":
            own |= {
                "mixer.attention.q_proj.weight": (H * P, E),
                "mixer.attention.k_proj.weight": (G * P, E),
                "mixer.attention.v_proj.weight": (G * P, E),
                "mixer.attention.o_proj.weight": (E, H * P),
            }
            if remembers and untied:
                own |= {f"mixer.attention.memory_{x}_proj.weight": (G * P, E) for x in "kv"}
        shapes |= {layer + name: shape for name, shape in own.items()}
    if config["norm_type"] == "layer":
        kept = [name for name in shapes if name.split(".")[-2] in ("norm", "mlp_norm")]
        shapes |= {name.replace("weight", "bias"): (E,) for name in kept}
    rng = np.random.default_rng(7)
    weights = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for name, value in weights.items():
        if "norm.weight" in name:
            value += 1
        elif "proj.weight" in name:
            value *= 3 / np.sqrt(value.shape[1])
    return weights, config


IDS = np.random.default_rng(1).integers(V, size=(2, 19))
MODELS = {
    "serial": {"fading_norm": True},
    "serial, mask, mlp": {"eidetic_overlap": "mask", "intermediate_size": 7},
    "serial, offset": {"fading_mode": "offset", "fading_norm": True, "tied_head": False},
    "parallel, rope": {"wiring": "parallel", "use_rope": True},
    "parallel, offset, untied, rope": {
        "wiring": "parallel",
        "use_rope": True,
        "fading_mode": "offset",
        "num_fading_tokens": 4,
        "untied": True,
    },
    "relative error, exponential average": {
        "innovation_error": "relative",
        "innovation_weights": "exp",
        "innovation_span": 5,
    },
    "memories longer than the window": {"num_fading_tokens": 7, "num_eidetic_tokens": 9},
    "no eidetic memory": {"num_eidetic_tokens": 0, "untied": True},
    "no fading memory": {"num_fading_tokens": 0, "fading_mode": "offset"},
    "a window of one": {"sliding_window": 1},
    "layer norm, gelu": {"norm_type": "layer", "intermediate_size": 7, "mlp_type": "gelu"},
    "all kinds": {
        "mixer_types": ["bmojo", "mamba", "swa", "attention", "bmojo_f"],
        "intermediate_size": 7,
        "use_rope": True,
    },
    "all kinds, parallel": {
        "mixer_types": ["bmojo_f", "swa", "mamba", "bmojo"],
        "wiring": "parallel",
    },
}


def stepped(weights, config, tokens):
    caches = bmojo.empty_cache(weights, config)
    return np.stack([bmojo.step(weights, config, token, caches) for token in tokens])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stepped_in_bounded_memory_is_the_model_of_the_whole_sequence(name):
    weights, config = model(**MODELS[name])
    whole = bmojo.logits(weights, config, IDS)
    assert whole.shape == (2, 19, V)
    for tokens, expected in zip(IDS, whole, strict=True):
        assert relative(stepped(weights, config, tokens), expected) <= 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_no_logit_sees_a_later_token_bit_for_bit(name):
    weights, config = model(**MODELS[name])
    whole = bmojo.logits(weights, config, IDS)
    for p in (5, 8, 18):
        changed = IDS.copy()
        changed[:, p:] = (changed[:, p:] + 1) % V
        got = bmojo.logits(weights, config, changed)
        np.testing.assert_array_equal(got[:, :p], whole[:, :p])
        assert (got[:, p] != whole[:, p]).any()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_moves_the_logits(name):
    weights, config = model(**MODELS[name])
    ids = IDS[:1, :11]
    whole = bmojo.logits(weights, config, ids)
    for key, value in weights.items():
        moved = bmojo.logits({**weights, key: value * 1.1}, config, ids)
        assert relative(moved, whole) > 1e-7, key


def test_among_equal_surprises_the_oldest_tokens_stay_when_decoding_too():
    weights, config = model(num_fading_tokens=0)
    for i in range(2):  # y = 0: no token surprises
        weights[f"model.layers.{i}.mixer.ssm.out_proj.weight"][:] = 0
    whole = bmojo.logits(weights, config, IDS)[0]
    caches = bmojo.empty_cache(weights, config)
    for t, token in enumerate(IDS[0]):
        got = bmojo.step(weights, config, token, caches)
        assert relative(got, whole[t]) <= 1e-12
        kept = caches[0]["positions"][: caches[0]["eidetic"]]
        assert list(kept) == ([0, 1, 2] if t >= 4 else [])


@pytest.mark.parametrize("mode", ["chunk", "offset"])
def test_the_cache_does_not_grow(mode):
    weights, config = model(fading_mode=mode)
    caches, sizes = bmojo.empty_cache(weights, config), []
    for t in range(40):
        bmojo.step(weights, config, t % V, caches)
        arrays = [a for cache in caches for a in cache.values() if isinstance(a, np.ndarray)]
        sizes.append(sum(a.nbytes for a in arrays))
    assert len(set(sizes)) == 1
    kept = [len(caches[0][f"{part}_k"]) for part in ("ring", "eidetic", "fading")]
    assert kept == [4, 3, 2 if mode == "chunk" else 2 + 4]


# --- 1: the interleaving identity of Appendix B.2 ------------------------------------------------


def activations(length, seed=0):
    """Queries, keys, values, fading keys and fading values of one sequence."""
    k, v, fading_k, fading_v = (numbers(length, G, P, seed=seed + i) for i in (1, 2, 3, 4))
    return numbers(length, H, P, seed=seed), k, v, fading_k, fading_v


def dense(q, k, v, fading_k, fading_v, scores, w, m_f, m_e, **options):
    mask = bmojo.visibility(scores, w, m_f, m_e, **options)
    keys, values = np.concatenate([k, fading_k, k]), np.concatenate([v, fading_v, v])
    return bmojo.joint_attention(q, keys, values, mask)


@pytest.mark.parametrize("length", [1, 3, 5, 6, 14, 20, 22])
@pytest.mark.parametrize("m_f", [0, 1, 5])
@pytest.mark.parametrize("m_e", [0, 1, 3, 5])
def test_a_sliding_window_over_chunks_behind_their_memories_needs_no_mask(length, m_f, m_e):
    inputs = (*activations(length), scores_of(length, ties=True), 5, m_f, m_e)
    assert relative(bmojo.interleaved_attention(*inputs), dense(*inputs)) <= 1e-14


@pytest.mark.parametrize(("m_f", "m_e"), [(6, 2), (2, 6)])
def test_memories_longer_than_the_window_do_need_one(m_f, m_e):
    inputs = (*activations(14), scores_of(14), 5, m_f, m_e)
    got, expected = bmojo.interleaved_attention(*inputs), dense(*inputs)
    assert relative(got[:5], expected[:5]) <= 1e-14
    assert relative(got[5:10], expected[5:10]) > 1e-3  # memories of the first chunk are not full


# --- 3, 4, 5, 6: special cases -------------------------------------------------------------------


def banded(q, k, v, window):
    """Plain sliding-window attention, one matrix a head."""
    length = len(q)
    behind = np.arange(length)[:, None] - np.arange(length)
    out = np.empty_like(q)
    for head in range(H):
        group = head // (H // G)
        scores = q[:, head] @ k[:, group].T / np.sqrt(P)
        scores[(behind < 0) | (behind >= window)] = -np.inf
        p = np.exp(scores)
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, group]
    return out


@pytest.mark.parametrize("window", [1, 2, 5, 13, 14, 100])
def test_without_memories_it_is_a_sliding_window_and_a_wide_one_full_attention(window):
    q, k, v, fading_k, fading_v = activations(14)
    got = dense(q, k, v, fading_k, fading_v, scores_of(14), window, 0, 0)
    assert relative(got, banded(q, k, v, window)) <= 1e-14
    if window >= 14:
        assert relative(got, banded(q, k, v, 14)) <= 1e-14


def test_a_sequence_no_longer_than_the_window_never_reads_its_memories():
    for wiring in ("serial", "parallel"):
        weights, config = model(wiring=wiring, sliding_window=19)
        whole = bmojo.logits(weights, config, IDS)
        for m_f, m_e in ((0, 0), (7, 1), (1, 30)):
            other = config | {"num_fading_tokens": m_f, "num_eidetic_tokens": m_e}
            np.testing.assert_array_equal(bmojo.logits(weights, other, IDS), whole)
        longer = np.concatenate([IDS, IDS[:, :1]], axis=1)
        plain = config | {"num_fading_tokens": 0, "num_eidetic_tokens": 0}
        moved = bmojo.logits(weights, config, longer) - bmojo.logits(weights, plain, longer)
        assert (moved[:, :19] == 0).all()
        assert (moved[:, 19] != 0).any()
        ssm = {n: w * (1.1 if ".ssm." in n else 1) for n, w in weights.items()}
        same = (bmojo.logits(ssm, config, IDS) == whole).all()
        assert same == (
            wiring == "parallel"
        )  # there the SSM reaches the output through memory only


def test_serial_wiring_without_an_output_projection_is_mamba():
    weights, config = model(mixer_types=["bmojo", "bmojo_f"])
    for name in weights:
        if "o_proj" in name:
            weights[name] = np.zeros_like(weights[name])
    mamba = config | {"mixer_types": ["mamba", "mamba"]}
    got = bmojo.logits(weights, config, IDS)
    np.testing.assert_array_equal(got, bmojo.logits(weights, mamba, IDS))
    # y = 0 still takes its e^0 of every softmax
    weights, config = model(wiring="parallel", num_eidetic_tokens=0)
    for name in weights:
        if "out_proj" in name:
            weights[name] = np.zeros_like(weights[name])
    window = bmojo.logits(weights, config | {"mixer_types": ["swa", "swa"]}, IDS)
    got = bmojo.logits(weights, config, IDS)
    assert relative(got[:, :4], window[:, :4]) <= 1e-14
    assert relative(got[:, 4:], window[:, 4:]) > 1e-3
    none = bmojo.logits(weights, config | {"num_fading_tokens": 0}, IDS)
    assert relative(none, window) <= 1e-14


def test_attention_to_one_output_alone_is_a_linear_map_of_it():
    weights, config = model()
    reader = "model.layers.0.mixer.attention."
    a, y = numbers(9, E), numbers(9, E, seed=1)
    mask = np.zeros((9, 27), dtype=bool)
    mask[range(9), range(9, 18)] = True
    W_V = weights[reader + "v_proj.weight"].reshape(G, P, E).repeat(H // G, axis=0).reshape(-1, E)
    expected = y @ W_V.T @ weights[reader + "o_proj.weight"].T
    assert relative(bmojo.attention(weights, config, reader, a, y, mask), expected) <= 1e-14


def test_alternating_mamba_and_window_layers_are_serial_layers_without_memories():
    serial, config = model(num_fading_tokens=0, num_eidetic_tokens=0)
    pairs = {}
    for name, value in serial.items():
        if not name.startswith("model.layers."):
            pairs[name] = value
            continue
        _, _, index, rest = name.split(".", 3)
        reads = rest.startswith(("mixer.attn_norm", "mixer.attention"))
        rest = rest.replace("mixer.attn_norm", "norm")
        pairs[f"model.layers.{2 * int(index) + reads}.{rest}"] = value
    other = config | {"mixer_types": ["mamba", "swa"] * 2, "num_hidden_layers": 4}
    got = bmojo.logits(pairs, other, IDS)
    np.testing.assert_array_equal(got, bmojo.logits(serial, config, IDS))


def test_a_wide_parallel_layer_without_memories_is_a_transformer():
    fields = {"wiring": "parallel", "num_fading_tokens": 0, "num_eidetic_tokens": 0}
    for use_rope in (False, True):
        weights, config = model(**fields, sliding_window=50, use_rope=use_rope)
        full = bmojo.logits(weights, config | {"mixer_types": ["attention"] * 2}, IDS)
        np.testing.assert_array_equal(bmojo.logits(weights, config, IDS), full)


def test_the_ssm_is_a_linear_recurrence_with_the_tokens_coefficients():
    weights, _ = model()
    ssm = "model.layers.0.mixer.ssm."
    u = numbers(9, E)
    w = {name.removeprefix(ssm): x for name, x in weights.items() if name.startswith(ssm)}
    x, z = np.split(u @ w["in_proj.weight"].T, 2, axis=1)
    x = np.stack(
        [np.convolve(x[:, i], w["conv1d.weight"][i, 0, ::-1])[:9] for i in range(D)], axis=1
    )
    x = (x + w["conv1d.bias"]) / (1 + np.exp(-x - w["conv1d.bias"]))
    low, B, C = np.split(x @ w["x_proj.weight"].T, [R, R + N], axis=1)
    dt = np.log1p(np.exp(low @ w["dt_proj.weight"].T + w["dt_bias"]))
    total = np.cumsum(dt, axis=0)
    A = -np.exp(w["A_log"])
    y = w["D"] * x
    for t in range(9):
        for s in range(t + 1):  # the recurrence unrolled
            decay = np.exp((total[t] - total[s])[:, None] * A)
            y[t] += (decay * (dt[s] * x[s])[:, None] * B[s] * C[t]).sum(axis=1)
    expected = (y * z / (1 + np.exp(-z))) @ w["out_proj.weight"].T
    got, state = bmojo.mamba(weights, ssm, u)
    assert relative(got, expected) <= 1e-12
    first, half = bmojo.mamba(weights, ssm, u[:4])
    second, end = bmojo.mamba(weights, ssm, u[4:], half)
    np.testing.assert_array_equal(np.concatenate([first, second]), got)
    for one, other in zip(state, end, strict=True):
        np.testing.assert_array_equal(one, other)


# --- 7: the two kinds of fading memory -----------------------------------------------------------


@pytest.mark.parametrize("w", [1, 3, 4])
@pytest.mark.parametrize("m_f", [0, 1, 2, 4, 9])
def test_chunk_and_offset_agree_on_a_chunks_last_token(w, m_f):
    for t in range(40):
        chunk, offset = (bmojo.fading_set(t, w, m_f, mode) for mode in ("chunk", "offset"))
        if t % w == w - 1:
            assert chunk == offset
        elif t >= w and m_f:
            assert chunk[-1] > offset[-1] if offset else chunk  # newer elsewhere
        assert all(j < t // w * w for j in chunk)  # frozen before the chunk begins
        assert all(j <= t - w for j in offset)  # outside the window
        if m_f == 1 and t >= w:
            assert offset == [t - w]  # Algorithm 1's y_{t-w}
        if m_f == w:
            assert offset == list(range(max(0, t - 2 * w + 1), t - w + 1))


def test_offset_fading_memory_is_a_second_window_in_the_same_softmax():
    q, k, v, fading_k, fading_v = activations(17)
    got = dense(q, k, v, fading_k, fading_v, scores_of(17), 4, 4, 0, mode="offset")
    behind = np.arange(17)[:, None] - np.arange(17)
    near, far = (behind >= 0) & (behind < 4), (behind >= 4) & (behind < 8)
    for head in range(H):
        group = head // (H // G)
        merged, _ = bmojo.merge(
            [
                bmojo.stream(q[:, head], k[:, group], v[:, group], near),
                bmojo.stream(q[:, head], fading_k[:, group], fading_v[:, group], far),
            ]
        )
        assert relative(merged, got[:, head]) <= 1e-14


# --- 8: innovation and selection -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "exp"])
@pytest.mark.parametrize("span", [1, 4, 7])
def test_the_predictor_is_a_short_causal_convolution_with_fixed_weights(kind, span):
    y = numbers(30, 5)
    alpha = bmojo.predictor({"innovation_span": span, "innovation_weights": kind})
    assert alpha.sum() == pytest.approx(1, abs=1e-15)
    assert (alpha > 0).all()
    if kind == "exp":
        np.testing.assert_allclose(alpha[1:], alpha[:-1] / 2, rtol=1e-15)
    padded = np.concatenate([np.zeros((span, 5)), y])
    kernel = alpha[::-1]
    guess = np.stack([kernel @ padded[t : t + span] for t in range(30)])
    assert relative(bmojo.innovation(y, alpha), ((y - guess) ** 2).mean(axis=1)) <= 1e-14
    ratio = ((y - guess) ** 2).sum(axis=1) / ((y**2).sum(axis=1) + 1e-6)
    assert relative(bmojo.innovation(y, alpha, "relative"), ratio) <= 1e-14


def test_innovation_of_a_constant_is_zero_after_k_tokens():
    scores = bmojo.innovation(np.full((12, 5), 3.0), np.full(4, 0.25))
    assert scores[0] == 9
    assert (np.diff(scores[:5]) < 0).all()
    assert (scores[4:] == 0).all()
    assert bmojo.prefix_top(scores, 3, 12) == [0, 1, 2]


def test_a_spike_stays_until_enough_larger_ones_have_come():
    y = 0.01 * numbers(64, 5)
    y[0] = 0
    alpha, w, m_e = np.full(1, 1.0), 4, 2
    for at, size in ((9, 5.0), (33, 7.0), (49, 9.0)):
        y[at:] += size  # a step: one surprise, not two
    scores = bmojo.innovation(y, alpha)
    for t in range(64):
        kept = bmojo.eidetic_set(t, w, m_e, scores, "allow")
        assert (9 in kept) == (12 <= t < 52)
        assert (33 in kept) == (t >= 36)
        assert (49 in kept) == (t >= 52)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("m", [0, 1, 3, 8])
@pytest.mark.parametrize("w", [1, 4, 5])
def test_prefix_top_merge_recursion_and_streaming_insertion_choose_the_same(ties, m, w):
    for seed in range(5):
        scores = scores_of(23, seed, ties)
        kept = []
        for t in range(24):
            expected = bmojo.prefix_top(scores, m, t)
            assert sorted(s for _, s in kept) == expected
            assert len(expected) == min(m, t)
            if t % w == 0:
                assert bmojo.merge_top(scores, m, w, t) == expected
            if t < 23:
                kept = bmojo.insert(kept, scores[t], t, m)
        chosen = bmojo.prefix_top(scores, m, 23)
        outside = set(range(23)) - set(chosen)
        for inside in chosen:  # brute force: nothing outside is larger, nor equal and older
            assert all((scores[inside], -inside) > (scores[s], -s) for s in outside)


def test_evicting_the_oldest_of_tied_minima_would_be_wrong():
    wrong = 0
    for seed in range(5):
        scores, kept = scores_of(23, seed, ties=True), []
        for t in range(23):
            kept = bmojo.insert(kept, scores[t], t, 3, evict="oldest")
            wrong += sorted(s for _, s in kept) != bmojo.prefix_top(scores, 3, t + 1)
    assert wrong > 0
    one = bmojo.insert([(1.0, 0), (1.0, 1)], 2.0, 2, 2)
    assert one == [(1.0, 0), (2.0, 2)]
    assert bmojo.insert(one, 1.0, 3, 2) == one  # strictly larger, or not at all


# --- 10, 12: causality and visibility ------------------------------------------------------------


def test_the_oracle_memory_depends_on_earlier_chunks_only():
    w, m_f, m_e = 4, 3, 3
    scores = scores_of(24)
    before = bmojo.visibility(scores, w, m_f, m_e)
    for t in range(24):
        later = scores.copy()
        later[t // w * w :] = 10 + numbers(24 - t // w * w)
        np.testing.assert_array_equal(bmojo.visibility(later, w, m_f, m_e)[t], before[t])
        L, F, M = np.split(before[t], 3)
        assert L.sum() == min(t + 1, w)
        assert not L[t + 1 :].any()
        assert not F[t // w * w :].any()
        assert not M[t // w * w :].any()
        assert F.sum() == min(m_f, t // w * w)
        assert M.sum() == min(m_e, t // w * w)


@pytest.mark.parametrize("m_e", [1, 3, 6])
def test_evicted_tokens_never_return_to_memory(m_e):
    w, length = 4, 48
    for seed in range(10):
        scores = scores_of(length, seed, ties=True)
        for s in range(length):
            window = [s in bmojo.local_set(t, w) for t in range(length)]
            kept = [s in bmojo.eidetic_set(t, w, m_e, scores, "allow") for t in range(length)]
            begins = (s // w + 1) * w
            assert not any(kept[:begins])  # never in its own chunk
            seen = [a or b for a, b in zip(window, kept, strict=True)]
            last = max(t for t in range(length) if seen[t])
            assert all(seen[s : last + 1])
            if begins < length and not kept[begins]:
                assert not any(kept)
            elif begins < length:
                assert kept.index(True) == begins <= s + w
        for t in range(length):
            shown = bmojo.eidetic_set(t, w, m_e, scores, "mask")
            both = shown + bmojo.local_set(t, w)
            assert len(both) == len(set(both))
            allowed = bmojo.eidetic_set(t, w, m_e, scores, "allow")
            assert set(allowed) | set(bmojo.local_set(t, w)) == set(both)


def test_a_token_in_window_and_memory_counts_twice_unless_masked():
    q, k, v, fading_k, fading_v = activations(8)
    scores = np.array([0, 0, 5.0, 0, 0, 0, 0, 0])
    for t, twice in ((4, True), (5, True), (6, False)):
        allow, mask = (
            dense(q, k, v, fading_k, fading_v, scores, 4, 0, 1, overlap=overlap)[t]
            for overlap in ("allow", "mask")
        )
        assert (allow != mask).any() == twice
        p = np.exp(q[t, 0] @ k[t - 3 : t + 1, 0].T / 2)
        memory = np.exp(q[t, 0] @ k[2, 0] / 2)
        expected = (p @ v[t - 3 : t + 1, 0] + memory * v[2, 0]) / (p.sum() + memory)
        np.testing.assert_allclose(allow[0], expected, rtol=1e-13)
        if twice:
            np.testing.assert_allclose(mask[0], p @ v[t - 3 : t + 1, 0] / p.sum(), rtol=1e-13)


# --- positions and heads -------------------------------------------------------------------------


def test_rotation_makes_scores_depend_on_distance_alone():
    q, k = numbers(1, 3, 8), numbers(1, 3, 8, seed=1)
    here = [bmojo.rope(x, [at], 10000.0)[0] for x, at in ((q, 12), (k, 5))]
    there = [bmojo.rope(x, [at], 10000.0)[0] for x, at in ((q, 907), (k, 900))]
    np.testing.assert_allclose((here[0] * here[1]).sum(-1), (there[0] * there[1]).sum(-1))
    angles = 5 * 10000.0 ** (-np.arange(4) / 4)
    turned = (k[0, :, :4] + 1j * k[0, :, 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(here[1], np.concatenate([turned.real, turned.imag], axis=-1))


def test_a_rotated_memory_keeps_the_position_it_had():
    weights, config = model(use_rope=True)
    reader = "model.layers.0.mixer.attention."
    a, y = numbers(9, E), numbers(9, E, seed=1)
    q, k, v = (
        (a @ weights[f"{reader}{x}_proj.weight"].T).reshape(9, -1, P) for x in ("q", "k", "v")
    )
    fk, fv = ((y @ weights[f"{reader}{x}_proj.weight"].T).reshape(9, G, P) for x in ("k", "v"))
    q, k, fk = (bmojo.rope(x, range(9), 10000.0) for x in (q, k, fk))
    mask = bmojo.visibility(scores_of(9), 3, 2, 2)
    got = bmojo.attention(weights, config, reader, a, y, mask)
    L, F, M = np.split(mask[8], 3)
    rows = np.concatenate([k[L], fk[F], k[M]]), np.concatenate([v[L], fv[F], v[M]])
    expected = weights[reader + "o_proj.weight"] @ bmojo.attend(q[8], *rows).ravel()
    assert relative(got[8], expected) <= 1e-14
    plain = config | {"use_rope": False}
    assert relative(bmojo.attention(weights, plain, reader, a, y, mask)[8], expected) > 1e-2


def test_grouped_heads_are_heads_with_repeated_keys():
    weights, config = model()
    many, fields = dict(weights), config | {"num_key_value_heads": H}
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            parts = weights[name].reshape(G, P, E).repeat(H // G, axis=0)
            many[name] = parts.reshape(H * P, E)
    got, expected = bmojo.logits(many, fields, IDS), bmojo.logits(weights, config, IDS)
    assert relative(got, expected) <= 1e-12


def test_untied_projections_act_on_fading_tokens_only():
    weights, config = model()
    copies = dict(weights)
    for i in range(2):
        reader = f"model.layers.{i}.mixer.attention."
        for x in "kv":
            copies[f"{reader}memory_{x}_proj.weight"] = weights[f"{reader}{x}_proj.weight"]
    whole = bmojo.logits(weights, config, IDS)
    np.testing.assert_array_equal(bmojo.logits(copies, config, IDS), whole)
    other = {name: x * (2 if "memory" in name else 1) for name, x in copies.items()}
    assert relative(bmojo.logits(other, config, IDS), whole) > 1e-3
    none = config | {"num_fading_tokens": 0}
    np.testing.assert_array_equal(bmojo.logits(other, none, IDS), bmojo.logits(weights, none, IDS))


# --- 16: two streams -----------------------------------------------------------------------------


def test_merged_streams_have_the_joint_softmax_and_its_gradients():
    length, width = 7, 5
    q = numbers(length, width)
    sides = [
        [numbers(rows, width, seed=i + 1), numbers(rows, width, seed=i + 3)]
        for i, rows in enumerate((7, 4))
    ]
    rng = np.random.default_rng(0)
    masks = [rng.uniform(size=(length, rows)) < 0.6 for rows in (7, 4)]
    masks[0][1] = masks[1][2] = masks[0][3] = masks[1][3] = False
    assert masks[1][1].any()
    assert masks[0][2].any()
    bar = numbers(length, width, seed=9)

    def merged(q, sides):
        return bmojo.merge(
            [bmojo.stream(q, *kv, mask) for kv, mask in zip(sides, masks, strict=True)]
        )

    out, lse = merged(q, sides)
    assert (out[3] == 0).all()  # nothing to read in either
    assert lse[3] == -np.inf
    for t in (0, 1, 2, 4, 5, 6):
        seen = np.concatenate([masks[0][t], masks[1][t]])
        keys, values = (np.concatenate([a, b])[seen] for a, b in zip(*sides, strict=True))
        expected = bmojo.attend(q[t][None], keys[:, None], values[:, None])[0]
        np.testing.assert_allclose(out[t], expected, rtol=1e-12)

    by_q = np.zeros_like(q)
    for side, (kv, mask) in enumerate(zip(sides, masks, strict=True)):
        one = bmojo.stream_backward(q, *kv, mask, out, lse, bar)
        by_q += one[0]
        for which in (0, 1):
            shifted = [[x.copy() for x in pair] for pair in sides]
            value, expected = shifted[side][which], np.zeros_like(kv[which])
            for index in np.ndindex(*value.shape):
                loss = []
                for move in (1e-6, -2e-6):
                    value[index] += move
                    loss.append(np.sum(bar * merged(q, shifted)[0]))
                value[index] += 1e-6
                expected[index] = (loss[0] - loss[1]) / 2e-6
            assert relative(one[1 + which], expected) <= 1e-8
    expected = np.zeros_like(q)
    for index in np.ndindex(*q.shape):
        up, down = q.copy(), q.copy()
        up[index] += 1e-6
        down[index] -= 1e-6
        difference = merged(up, sides)[0] - merged(down, sides)[0]
        expected[index] = np.sum(bar * difference) / 2e-6
    assert relative(by_q, expected) <= 1e-8
    own = [bmojo.stream(q, *kv, mask) for kv, mask in zip(sides, masks, strict=True)]
    alone = bmojo.stream_backward(q, *sides[0], masks[0], *own[0], bar)
    full = bmojo.stream_backward(q, *sides[0], masks[0], out, lse, bar)
    assert relative(alone[1], full[1]) > 1e-2  # a stream's own normaliser is the wrong one


# --- associative recall --------------------------------------------------------------------------


def test_the_zoos_task_is_multi_query_recall_with_labels_one_place_later():
    input_ids, labels = mqar(200, seq_len=64, num_pairs=4, vocab_size=64, seed=3)
    places = []
    for row, answers in zip(input_ids, labels, strict=True):
        found = bmojo.mqar_queries(row, answers, 4, 64, shift=1)
        assert [place for place, _, _ in found] == sorted({place for place, _, _ in found})
        places += [(place - 8) // 2 for place, _, _ in found]
        with pytest.raises(ValueError, match=r"stand at|is not the value"):
            bmojo.mqar_queries(row, answers, 4, 64)
    # 4 draws out of 28 without replacement: more even than their weights, but early ones more often
    weights = bmojo.mqar_gap_weights(28)
    assert weights[0] / weights[1] == pytest.approx(2**0.99)
    assert weights.sum() == pytest.approx(1)
    counts = np.bincount(places, minlength=28)
    assert counts[0] > 0.5 * 200
    assert counts[0] > counts[1] > counts[14:].max()


@pytest.mark.parametrize(
    ("sequence", "labels", "rule"),
    [
        ([1, 8, 1, 9, 1, 0, 0, 0], {4: 8}, "keys must be distinct"),
        ([0, 8, 1, 9, 1, 0, 0, 0], {4: 9}, "keys must be distinct"),
        ([2, 8, 1, 8, 1, 0, 2, 0], {4: 8}, "values must be distinct"),
        ([2, 8, 1, 7, 1, 0, 2, 0], {4: 7}, "values must be distinct"),
        ([2, 8, 1, 9, 0, 1, 2, 0], {5: 9, 6: 8}, "no query may stand at 5"),
        ([2, 8, 1, 9, 1, 0, 2, 0], {2: 9, 6: 8}, "no query may stand at 2"),
        ([2, 8, 1, 9, 1, 0, 2, 0], {4: 8, 6: 8}, "label at 4 is not the value"),
        ([2, 8, 1, 9, 1, 0, 2, 0], {4: 9}, "asked once"),
        ([2, 8, 1, 9, 1, 0, 1, 2], {4: 9, 6: 9}, "asked once"),
    ],
)
def test_invalid_sequences_of_the_task_are_refused(sequence, labels, rule):
    marked = [labels.get(at, -100) for at in range(8)]
    with pytest.raises(ValueError, match=rule):
        bmojo.mqar_queries(sequence, marked, 2, 16)
    good = [-100] * 4 + [9, -100, 8, -100]
    found = bmojo.mqar_queries([2, 8, 1, 9, 1, 0, 2, 0], good, 2, 16)
    assert found == [(4, 1, 9), (6, 2, 8)]
