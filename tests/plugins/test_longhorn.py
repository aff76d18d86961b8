"""Longhorn: the golden checks of its paper, on the op and on the language model.

The judge is ``tests/oracles/longhorn.py``, float64 numpy from the paper alone. The op is taken on
its reference backend here; that the other backends equal it is the business of ``tests/kernels``.
"""

import argparse
import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tests.oracles import longhorn as oracle
from tests.plugins.logits import relative, run, tokens
from transformers import MambaConfig, MambaForCausalLM

from ssmzoo.tasks import mqar
from ssmzoo.testing import check
from ssmzoo_kernels import longhorn_scan
from ssmzoo_longhorn import FAMILY

# --- the op -----------------------------------------------------------------------------------


def draw(seed=0, B=2, L=9, D=5, N=4):
    rng = np.random.default_rng(seed)
    shapes = {"u": (B, L, D), "q": (B, L, N), "k": (B, L, N), "a": (B, L, D), "state": (B, D, N)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def scan(u, q, k, a, state=None, *, dtype=torch.float64, transition="diagonal", **extra):
    """The public op on numpy arrays: outputs and final state as float64 arrays."""
    tensors = [torch.tensor(x, dtype=dtype) for x in (u, q, k, a)]
    extra = {name: torch.tensor(x, dtype=dtype) for name, x in extra.items()}
    if state is not None:
        extra["initial_state"] = torch.tensor(state, dtype=dtype)
    results = longhorn_scan(*tensors, **extra, transition=transition, backend="reference")
    return tuple(x.double().numpy() for x in results)


def learn(state, u, k, a, transition="diagonal"):
    """One write into a memory [D, N] by the public op; u, a [D], k [N]."""
    row = [x[None, None] for x in (u, k, k, a)]
    return scan(*row, state=state[None], transition=transition)[1][0]


@pytest.mark.parametrize("transition", ["diagonal", "exact"])
def test_the_scan_matches_the_oracle_with_skip_gate_and_carried_state(transition):
    x = draw()
    rng = np.random.default_rng(1)
    D, z, dt_bias = rng.standard_normal(5), rng.standard_normal((2, 9, 5)), rng.standard_normal(5)
    expected = oracle.scan(
        x["u"], x["q"], x["k"], x["a"] + dt_bias, D, z, x["state"], transition=transition
    )
    got = scan(**x, D=D, z=z, dt_bias=dt_bias, transition=transition)
    assert relative(got[0], expected[0]) <= 1e-12
    assert relative(got[1], expected[1]) <= 1e-12


def test_the_hand_example_of_two_tokens():
    u, q, k = [[[1.0], [2.0]]], [[[1.0, 1.0], [1.0, -1.0]]], [[[1.0, 0.0], [1.0, 1.0]]]
    a = [[[0.0], [0.0]]]
    out, state = scan(u, q, k, a)
    np.testing.assert_allclose(out.ravel(), [1 / 3, 1 / 4], rtol=1e-15)
    np.testing.assert_allclose(state.ravel(), [3 / 4, 1 / 2], rtol=1e-15)
    out, state = scan(u, q, k, a, transition="exact")
    np.testing.assert_allclose(out.ravel(), [1 / 3, 1 / 3], rtol=1e-15)
    np.testing.assert_allclose(state.ravel(), [3 / 4, 5 / 12], rtol=1e-15)


def test_the_write_strength_is_beta_over_one_plus_beta_times_the_key_energy():
    x = draw(L=1)
    out = scan(x["u"], x["k"], x["k"], x["a"])[0]  # from an empty memory o = eps u k.k
    energy = np.sum(x["k"] ** 2, axis=-1, keepdims=True)
    beta = 1 / (1 + np.exp(-x["a"]))
    assert relative(out, beta / (1 + beta * energy) * x["u"] * energy) <= 1e-14
    assert relative(out, x["u"] * energy / (1 + np.exp(-x["a"]) + energy)) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_write_logits_have_finite_gradients(dtype):
    x = draw(L=1)
    x = {name: np.float32(value) for name, value in x.items()}
    never = scan(**{**x, "a": np.full_like(x["a"], -800)}, dtype=dtype)[1]
    np.testing.assert_array_equal(never, x["state"])
    always = scan(**{**x, "a": np.full_like(x["a"], 800)}, dtype=dtype)[1]
    u, k = np.float64(x["u"][:, 0]), np.float64(x["k"][:, 0])
    eps = np.repeat(1 / (1 + np.sum(k**2, axis=-1, keepdims=True)), 5, axis=1)
    assert relative(always, oracle.learn(x["state"], u, k, eps, "diagonal")) <= 1e-6

    for logit in (-800.0, 800.0):
        leaves = [torch.tensor(x[n], dtype=dtype, requires_grad=True) for n in ("u", "q", "k")]
        dt = torch.full((2, 1, 5), logit, dtype=dtype, requires_grad=True)
        out, final = longhorn_scan(*leaves, dt, backend="reference")
        grads = torch.autograd.grad(out.sum() + final.sum(), [*leaves, dt])
        assert all(grad.isfinite().all() for grad in grads), logit


def objective(new, old, u, k, beta):
    """Eq. (5): stay near the old memory, recall the value from its key."""
    return np.sum((new - old) ** 2) + np.sum(beta * (new @ k - u) ** 2)


def one_write(seed=3, D=5, N=4):
    x = draw(seed, B=1, L=1, D=D, N=N)
    return x["state"][0], x["u"][0, 0], x["k"][0, 0], x["a"][0, 0]


def test_the_exact_rule_solves_the_online_regression():
    old, u, k, a = one_write()
    beta = 1 / (1 + np.exp(-a))
    new = learn(old, u, k, a, "exact")
    for i in range(len(u)):
        solved = np.linalg.solve(np.eye(4) + beta[i] * np.outer(k, k), old[i] + beta[i] * u[i] * k)
        assert relative(new[i], solved) <= 1e-13
    gradient = 2 * (new - old) + 2 * (beta * (new @ k - u))[:, None] * k
    assert np.abs(gradient).max() <= 1e-13 * np.abs(old).max()
    assert objective(new, old, u, k, beta) < objective(old, old, u, k, beta)


def test_the_diagonal_rule_solves_the_separable_regression():
    old, u, k, a = one_write()
    beta = (1 / (1 + np.exp(-a)))[:, None]
    new = learn(old, u, k, a)
    weight = beta / (1 + beta * (k @ k - k**2))
    gradient = 2 * (new - old) + 2 * weight * (new * k - u[:, None]) * k
    assert np.abs(gradient).max() <= 1e-13 * np.abs(old).max()


def test_both_rules_agree_exactly_where_the_paper_says_so():
    for old, u, k, a in (
        one_write(N=1),
        (lambda old, u, k, a: (old, u, k * np.eye(4)[2], a))(*one_write()),
        (lambda old, u, k, a: (0 * old, u, k, a))(*one_write()),
    ):
        assert relative(learn(old, u, k, a), learn(old, u, k, a, "exact")) <= 1e-14
    old, u, k, a = one_write()
    assert relative(learn(old, u, k, a), learn(old, u, k, a, "exact")) > 1e-2


def test_repeating_one_pair_converges_to_each_rules_limit():
    old, u, k, a = one_write()
    k = np.array([1.0, -0.5, 2.0, 0.7])
    again = [np.broadcast_to(x, (1, 2000, len(x))) for x in (u, k, k, a)]
    exact = scan(*again, state=old[None], transition="exact")[1][0]
    diagonal = scan(*again, state=old[None])[1][0]
    assert relative(exact @ k, u) <= 1e-10
    assert relative(diagonal @ k, 4 * u) <= 1e-10
    assert relative(diagonal, u[:, None] / k) <= 1e-10


def test_decay_lies_between_its_bounds_and_one_token_cannot_wipe_the_memory():
    for scale in (0.01, 1.0, 100.0):
        _, u, k, a = one_write()
        k = k * scale
        decay = learn(np.ones((5, 4)), 0 * u, k, a)
        beta_s = (k @ k) / (1 + np.exp(-a))
        assert (decay >= 1 / (1 + beta_s[:, None]) - 1e-15).all()
        assert (decay <= 1).all()
        forgotten = np.sum(1 - decay, axis=-1)
        np.testing.assert_allclose(forgotten, 1 - 1 / (1 + beta_s), rtol=1e-12, atol=1e-15)
        assert (decay.mean(axis=-1) >= 1 - 1 / 4).all()
    exact = learn(np.ones((5, 4)) * k, 0 * u, k, a, "exact")  # along k: one eigenvalue
    assert relative(exact, k / (1 + beta_s[:, None])) <= 1e-10


@pytest.mark.parametrize("size", [1, 7, 16, 64, 65])
def test_the_scan_in_chunks_with_the_state_carried_equals_the_whole(size):
    x = draw(L=65)
    whole, last = oracle.scan(x["u"], x["q"], x["k"], x["a"], state=x["state"])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        state, parts = x["state"], []
        for start in range(0, 65, size):
            piece = {name: x[name][:, start : start + size] for name in ("u", "q", "k", "a")}
            part, state = scan(**piece, state=state, dtype=dtype)
            parts.append(part)
        assert relative(np.concatenate(parts, axis=1), whole) <= tolerance
        assert relative(state, last) <= tolerance


def test_the_scan_equals_its_tree_of_affine_pairs():
    x = draw(L=13)
    eps = oracle.write_strength(x["a"], x["k"])
    k = x["k"][:, :, None, :]
    pairs = list(zip(
        np.moveaxis(1 - eps[..., None] * k**2, 1, 0),
        np.moveaxis((eps * x["u"])[..., None] * k, 1, 0),
        strict=True,
    ))  # fmt: skip
    while len(pairs) > 1:  # (A1, b1) then (A2, b2) is (A1 A2, A2 b1 + b2), in any grouping
        pairs = [
            (p[0] * n[0], n[0] * p[1] + n[1]) if n is not None else p
            for p, n in zip(pairs[::2], [*pairs[1::2], None][: len(pairs[::2])], strict=True)
        ]
    decay, drive = pairs[0]
    assert relative(scan(**x)[1], decay * x["state"] + drive) <= 1e-12


def test_gradients_of_the_scan_equal_finite_differences_of_the_oracle():
    rng = np.random.default_rng(5)
    for transition in ("diagonal", "exact"):
        x = draw(L=6)
        x |= {"D": rng.standard_normal(5), "z": rng.standard_normal((2, 6, 5))}
        names = ("u", "q", "k", "a", "D", "z", "state")
        along = {name: rng.standard_normal(x[name].shape) for name in names}
        seeds = rng.standard_normal((2, 6, 5)), rng.standard_normal((2, 5, 4))

        def loss(h, name, x=x, along=along, seeds=seeds, transition=transition):
            v = {**x, name: x[name] + h * along[name]}
            out = oracle.scan(*(v[n] for n in ("u", "q", "k", "a", "D", "z", "state")), transition)
            return sum(np.sum(o * s) for o, s in zip(out, seeds, strict=True))

        t = {name: torch.tensor(x[name], requires_grad=True) for name in names}
        out = longhorn_scan(
            t["u"], t["q"], t["k"], t["a"], D=t["D"], z=t["z"], initial_state=t["state"],
            transition=transition, backend="reference",
        )  # fmt: skip
        sum((o * torch.tensor(s)).sum() for o, s in zip(out, seeds, strict=True)).backward()
        for name in names:
            h = 1e-5  # error of the quotient: h^2 from the curve, 1e-16 / h from rounding
            expected = (loss(h, name) - loss(-h, name)) / (2 * h)
            got = (t[name].grad.numpy() * along[name]).sum()
            assert abs(got - expected) <= 1e-8 * (1 + abs(expected)), name


def test_huge_keys_zero_keys_and_wide_logits_stay_accurate_in_float32():
    x = draw(B=1, L=3000, D=8, N=16)
    rng = np.random.default_rng(6)
    x["k"] *= 0.2
    x["k"][:, ::97, 3] = 10.0 ** rng.uniform(1, 3, size=x["k"][:, ::97, 3].shape)
    x["k"][:, 5::31] = 0
    x["a"] = rng.uniform(-30, 30, size=x["a"].shape)
    x = {name: np.float32(value) for name, value in x.items()}
    wide = {name: np.float64(value) for name, value in x.items()}
    expected = oracle.scan(wide["u"], wide["q"], wide["k"], wide["a"], state=wide["state"])
    got = scan(**x, dtype=torch.float32)
    assert relative(got[0], expected[0]) <= 1e-5
    assert relative(got[1], expected[1]) <= 1e-5


def test_the_scan_is_linear_in_its_values():
    x, other = draw(), draw(seed=8)["u"]
    x["state"] = None
    first, second = scan(**x)[0], scan(**{**x, "u": other})[0]
    assert relative(scan(**{**x, "u": 2 * x["u"] - other})[0], 2 * first - second) <= 1e-13


def test_rescaling_keys_and_queries_changes_nothing_and_rotation_does():
    x = draw()
    x["state"] = None
    out = scan(**x)[0]
    sign = np.array([1.0, -1.0, -1.0, 1.0])
    assert relative(scan(**{**x, "q": x["q"] * sign, "k": x["k"] * sign})[0], out) <= 1e-13

    c = 1.7  # (q, k, 1/eps) -> (c q, c k, c^2 / eps)
    a = -np.log(c**2 * (1 + np.exp(-x["a"])) - 1)
    scaled = scan(**{**x, "q": c * x["q"], "k": c * x["k"], "a": a})[0]
    assert relative(scaled, out) <= 1e-12

    order = [2, 0, 3, 1]
    shuffled = {"q": x["q"][..., order], "k": x["k"][..., order]}
    assert relative(scan(**{**x, **shuffled})[0], out) <= 1e-13

    rotation = np.linalg.qr(np.random.default_rng(9).standard_normal((4, 4)))[0]
    turned = {**x, "q": x["q"] @ rotation, "k": x["k"] @ rotation}
    assert relative(scan(**turned)[0], out) > 1e-2
    exact = scan(**x, transition="exact")[0]
    assert relative(scan(**turned, transition="exact")[0], exact) <= 1e-12


def test_a_shared_write_strength_gives_linear_attention_and_delta_rule():
    x = draw()
    shared = np.repeat(x["a"][..., :1], 5, axis=-1)
    eps = oracle.write_strength(shared, x["k"])[..., :1]  # [B, L, 1]
    memory, delta, gated, ruled = np.zeros((2, 5, 4)), np.zeros((2, 5, 4)), [], []
    for t in range(9):
        u, q, k, e = x["u"][:, t, :, None], x["q"][:, t], x["k"][:, t, None, :], eps[:, t, :, None]
        memory = np.exp(np.log1p(-e * k**2)) * memory + u * (e * k)
        gated.append(np.einsum("bdn,bn->bd", memory, q))
        error = u - np.sum(delta * k, axis=-1, keepdims=True)
        delta = delta + e * error * k
        ruled.append(np.einsum("bdn,bn->bd", delta, q))
    arguments = (x["u"], x["q"], x["k"], shared)
    assert relative(scan(*arguments)[0], np.stack(gated, axis=1)) <= 1e-12
    assert relative(scan(*arguments, transition="exact")[0], np.stack(ruled, axis=1)) <= 1e-12


def test_a_zero_key_writes_nothing_and_a_zero_query_reads_only_the_skip():
    x = draw()
    D = np.arange(1.0, 6.0)
    silent = {**x, "k": 0 * x["k"]}
    np.testing.assert_array_equal(scan(**silent)[1], x["state"])
    empty = {**silent, "state": None}
    np.testing.assert_array_equal(scan(**empty, D=D)[0], D * x["u"])
    np.testing.assert_array_equal(scan(**{**x, "q": 0 * x["q"]}, D=D)[0], D * x["u"])


# --- the language model -----------------------------------------------------------------------

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "d_state": 4}


def build(dtype=torch.float64, **fields):
    """A tiny model in which nothing is at its initial value of zero or one, and keys matter."""
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "x_proj" in name:
                parameter.mul_(4)
    return model.to(dtype)


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def judged(model, input_ids):
    return oracle.logits(arrays(model), model.config.to_dict(), input_ids.numpy())


def states(cache):
    """Every layer's tensors, by layer and name, as float64."""
    return [{name: x.double() for name, x in layer.states.items()} for layer in cache.layers]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"transition": "exact"},
        {"out_norm": True},
        {"use_bias": True},
        {"conv_bias": False},
        {"tie_word_embeddings": False},
        {"dt_rank": 3, "expand": 3, "d_conv": 2, "d_state": 5, "rms_norm_eps": 1e-3},
    ],
    ids=lambda fields: ",".join(fields) or "default",
)
def test_the_model_matches_the_oracle_in_float64(fields):
    model, input_ids = build(**fields), tokens(2, 21)
    assert relative(run(model, input_ids)[0], judged(model, input_ids)) <= 1e-10


def test_exchanging_keys_and_queries_or_the_order_of_the_taps_is_noticed():
    model, input_ids = build(), tokens(2, 21)
    got, config = run(model, input_ids)[0], model.config.to_dict()
    swapped, flipped = arrays(model), arrays(model)
    for i in range(2):
        name = f"model.layers.{i}.mixer.x_proj.weight"
        dt, k, q = np.split(swapped[name], [-8, -4])
        swapped[name] = np.concatenate([dt, q, k])
        name = f"model.layers.{i}.mixer.conv1d.weight"
        flipped[name] = flipped[name][..., ::-1]
    for wrong in (swapped, flipped):
        assert relative(got, oracle.logits(wrong, config, input_ids.numpy())) > 1e-3


def test_an_exact_transition_agrees_in_one_pass_in_two_and_step_by_step():
    model, input_ids, tolerance = build(transition="exact"), tokens(2, 19), 1e-10
    whole, _ = run(model, input_ids)
    head, cache = run(model, input_ids[:, :8])
    tail, _ = run(model, input_ids[:, 8:], cache)
    assert relative(torch.cat([head, tail], dim=1), whole) <= tolerance

    steps, cache = [], None
    for t in range(19):
        step, cache = run(model, input_ids[:, t : t + 1], cache)
        steps.append(step)
    assert relative(torch.cat(steps, dim=1), whole) <= tolerance
    assert cache.get_seq_length() == 19


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
def test_the_cache_holds_the_oracles_states(length):
    model, input_ids = build(), tokens(2, length)
    weights, config = arrays(model), model.config.to_dict()
    state = oracle.empty_state(config, 2)
    for t in range(length):
        expected, state = oracle.step(weights, config, input_ids[:, t].numpy(), state)
    got, cache = run(model, input_ids)
    assert relative(got[:, -1], expected) <= 1e-10
    for layer, (window, memory) in zip(states(cache), state, strict=True):
        shapes = {tuple(x.shape): x for x in layer.values()}
        assert relative(shapes[memory.shape], memory) <= 1e-10
        kept = window[:, 1:]  # K - 1 of the K inputs suffice
        assert relative(shapes[kept.shape], kept) <= 1e-10


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("longhorn-125m", 128_563_968),
        ("longhorn-350m", 369_968_128),
        ("longhorn-1.3b", 1_331_595_264),
        ("longhorn-125m-quiet", 128_563_968),
        ("longhorn-350m-quiet", 369_968_128),
        ("longhorn-1.3b-quiet", 1_331_595_264),
    ],
)
def test_a_preset_has_its_parameter_count_and_mamba_one_matrix_per_layer_more(preset, parameters):
    config = FAMILY.config(preset)
    twin = MambaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        state_size=config.d_state,
    )
    with torch.device("meta"):
        model, mamba = FAMILY.causal_lm_class(config), MambaForCausalLM(twin)
    assert count(model) == parameters
    a_matrix = config.expand * config.hidden_size * config.d_state
    assert count(mamba) == parameters + config.num_hidden_layers * a_matrix


# --- initial values ---------------------------------------------------------------------------


def initial_rules(config):
    """What each kind of parameter starts as: a constant, or the bound of a uniform draw."""
    inner, rank = config.expand * config.hidden_size, math.ceil(config.hidden_size / 16)
    return {
        "norm.weight": 1.0,
        "mixer.out_norm.weight": 1.0,
        "mixer.in_proj.bias": 0.0,
        "mixer.out_proj.bias": 0.0,
        "mixer.in_proj.weight": ("uniform", config.hidden_size**-0.5),
        "mixer.conv1d.weight": ("uniform", config.d_conv**-0.5),
        "mixer.conv1d.bias": ("uniform", config.d_conv**-0.5),
        "mixer.x_proj.weight": ("uniform", inner**-0.5),
        "mixer.dt_proj.weight": ("uniform", rank**-0.5),
        "mixer.dt_bias": 0.0,
        "mixer.D": 1.0,
        "mixer.out_proj.weight": ("uniform", (inner * config.num_hidden_layers) ** -0.5),
    }


def assert_starts_by_rule(name, value, config):
    if "embed_tokens" in name or "lm_head" in name:
        assert value.std().item() == pytest.approx(config.initializer_range, rel=0.05)
        assert value.abs().max() > 3 * config.initializer_range  # normal, not uniform
        return
    (rule,) = (r for kind, r in initial_rules(config).items() if name.endswith("." + kind))
    if isinstance(rule, float):
        assert (value == rule).all(), name
        return
    bound = rule[1]
    assert value.abs().max() <= bound, name
    assert value.abs().max() >= 0.9 * bound, name
    spread = bound / math.sqrt(3)  # of a uniform draw; 5 standard errors of its estimate
    assert value.std().item() == pytest.approx(spread, rel=5 * 0.45 / value.numel() ** 0.5), name


@pytest.fixture(scope="module")
def fresh():
    """Two layers of the smallest preset's width, as initialised."""
    torch.manual_seed(0)
    config = FAMILY.config("longhorn-125m", vocab_size=512, num_hidden_layers=2)
    return FAMILY.causal_lm_class(config)


def test_every_parameter_starts_as_the_papers_code_starts_it(fresh):
    for name, value in fresh.named_parameters():
        assert_starts_by_rule(name, value.detach(), fresh.config)


def measured_at_the_start(model):
    """Of each layer of width 768: values, keys, queries, logits, strengths, the scan's outputs."""
    weights, config = arrays(model), model.config.to_dict()
    h = oracle.rms_norm(np.random.default_rng(0).standard_normal((2, 67, 768)), np.ones(768), 0)
    for i in range(2):
        mixer = f"model.layers.{i}.mixer."
        x = np.split(h @ weights[mixer + "in_proj.weight"].T, 2, axis=-1)[0]
        u = oracle.short_conv(x, weights[mixer + "conv1d.weight"], weights[mixer + "conv1d.bias"])
        q, k, a = oracle.projections(weights, config, mixer, u)
        yield u, k, a, oracle.write_strength(a, k), oracle.scan(u, q, k, a)[0]


def forgotten_a_token(eps, k):
    """The mean over tokens, channels and columns of ``eps k^2``."""
    return np.einsum("blc,bln->", eps, k**2) / (eps.size * k.shape[-1])


def size_of(x):
    return np.sqrt(np.mean(x**2))


def test_a_new_model_writes_half_and_forgets_a_hundredth(fresh):
    seen = []
    for _u, k, a, eps, _o in measured_at_the_start(fresh):
        beta = oracle.sigmoid(a)
        seen.append([beta.mean(), beta.std(), size_of(k), eps.mean(), forgotten_a_token(eps, k)])
    beta, spread, key, eps, forgotten = np.mean(seen, axis=0)
    # sixteen random keys a layer: single draws of their size scatter by about a tenth
    assert beta == pytest.approx(0.5, abs=0.005)
    assert 0.01 < spread < 0.03
    assert key == pytest.approx(0.15, abs=0.03)
    assert eps == pytest.approx(0.42, abs=0.03)
    assert forgotten == pytest.approx(0.0095, abs=0.004)


@pytest.fixture(scope="module")
def quiet():
    """The model of ``fresh`` with the quiet start."""
    torch.manual_seed(0)
    config = FAMILY.config("longhorn-125m-quiet", vocab_size=512, num_hidden_layers=2)
    return FAMILY.causal_lm_class(config)


def test_the_quiet_start_scales_keys_by_8_and_queries_by_a_tenth(fresh, quiet):
    authors = dict(fresh.named_parameters())
    for name, value in quiet.named_parameters():
        expected = authors[name]
        if name.endswith("x_proj.weight"):
            dt, k, q = expected.split([48, 16, 16])
            expected = torch.cat([dt, 8 * k, q * torch.tensor(0.1)])
        assert torch.equal(value, expected), name


def test_the_quiet_start_reads_far_less_than_the_skip_gives(fresh, quiet):
    for model, low, high in ((fresh, 0.1, 1), (quiet, 0, 0.03)):  # D = 1 gives u as it is
        for u, _k, _a, _eps, o in measured_at_the_start(model):
            assert low < size_of(o) / size_of(u) < high


def test_the_quiet_start_forgets_most_of_what_a_token_can_forget(quiet):
    for _u, k, _a, eps, _o in measured_at_the_start(quiet):
        assert 0.8 / 16 < forgotten_a_token(eps, k) < 1 / 16  # all columns together forget one


def test_the_configuration_steers_the_initial_values():
    fields = {
        "dt_bias_init": 1.5,
        "initializer_range": 0.3,
        "rescale_prenorm_residual": False,
        "use_bias": True,
    }
    model = FAMILY.causal_lm_class(FAMILY.config_class(**TINY, **fields))
    mixer, parameters = "model.layers.1.mixer.", dict(model.named_parameters())
    assert (parameters[mixer + "dt_bias"] == 1.5).all()
    assert parameters["model.embed_tokens.weight"].std().item() == pytest.approx(0.3, rel=0.1)
    assert 0.9 * 64**-0.5 < parameters[mixer + "out_proj.weight"].abs().max() <= 64**-0.5
    assert (parameters[mixer + "in_proj.bias"] == 0).all()
    assert (parameters[mixer + "out_proj.bias"] == 0).all()


def test_a_missing_tensor_alone_is_initialised_on_loading(tmp_path):
    sizes = {**TINY, "hidden_size": 64, "vocab_size": 256}
    branches = {"use_bias": True, "out_norm": True, "tie_word_embeddings": False}
    config = FAMILY.config_class(**sizes, **branches)
    model = FAMILY.causal_lm_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(3 + torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for missing in [None, *(name for name in stored if "layers.0" not in name)]:
        partial = {name: value for name, value in stored.items() if name != missing}
        save_file(partial, file, metadata={"format": "pt"})
        loaded = dict(FAMILY.causal_lm_class.from_pretrained(tmp_path).named_parameters())
        assert loaded.keys() == dict(model.named_parameters()).keys()
        for name, value in loaded.items():
            if name == missing:
                assert_starts_by_rule(name, value.detach(), config)
            else:
                assert torch.equal(value, stored[name]), f"{name} while {missing} is missing"


QUIET = {**FAMILY.tiny, "key_init_scale": 8.0, "query_init_scale": 0.1, "num_hidden_layers": 1}


def test_the_quiet_start_has_five_equal_forms_gradients_and_standalone_code():
    names = ["oracle", "chunks", "tokens", "padding", "packing", "causality", "batch"]
    others = ["gradients", "save_and_load", "standalone"]
    report = check(replace(FAMILY, tiny=QUIET), oracle=oracle.logits, only=names + others)
    assert report.ok, report.table()


def test_a_configuration_without_the_fields_of_the_start_keeps_the_authors():
    fields = FAMILY.config_class(**TINY).to_dict()
    assert fields.pop("key_init_scale") == fields.pop("query_init_scale") == 1
    assert FAMILY.config_class.from_dict(fields).to_dict() == FAMILY.config_class(**TINY).to_dict()


# --- precision, generation, configuration -----------------------------------------------------


@pytest.mark.parametrize(
    "cast", ["bfloat16()", "half()", "to(bfloat16)", "from_pretrained", "saved"]
)
def test_casting_the_model_leaves_ssm_parameters_and_states_in_float32(cast, tmp_path):
    model = build(torch.float32)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    if cast == "from_pretrained":
        model.save_pretrained(tmp_path)
        model = FAMILY.causal_lm_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    elif cast == "saved":  # in bfloat16, and loaded as it was
        model.bfloat16().save_pretrained(tmp_path)
        model = FAMILY.causal_lm_class.from_pretrained(tmp_path, dtype="auto")
    else:
        model = {
            "bfloat16()": model.bfloat16,
            "half()": model.half,
            "to(bfloat16)": lambda: model.to(torch.bfloat16),
        }[cast]()
    for name, parameter in model.named_parameters():
        if name.endswith((".D", ".dt_bias")):
            assert torch.equal(parameter, expected[name]), name
        elif name.endswith("proj.weight"):
            assert parameter.dtype == (torch.float16 if cast == "half()" else torch.bfloat16), name
    _, cache = run(model, tokens(2, 9))
    for layer in cache.layers:
        memory = [x for x in layer.states.values() if x.shape == (2, 64, 4)]
        assert [x.dtype for x in memory] == [torch.float32]


def test_under_autocast_the_state_stays_float32_and_close_to_the_oracle():
    model, input_ids = build(torch.float32), tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        got, cache = run(model, input_ids)
    assert relative(got, judged(model, input_ids)) <= 2e-2
    for layer in cache.layers:
        assert [x.dtype for x in layer.states.values() if x.shape == (2, 64, 4)] == [torch.float32]


def test_bfloat16_weights_err_by_the_rounding_of_activations_not_of_decays():
    model, input_ids = build(torch.bfloat16), tokens(2, 200)
    assert relative(run(model, input_ids)[0], judged(model, input_ids)) <= 2e-2


def test_weight_decay_spares_norms_biases_and_the_skip():
    model = build()
    groups = model.param_groups(weight_decay=0.1, lr=1e-3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    assert sum(len(group["params"]) for group in groups) == len(names)
    for name, value in decay.items():
        spared = name.endswith((".D", "bias")) or "norm" in name
        assert value == (0.0 if spared else 0.1), name


def test_the_names_other_code_uses_reach_the_same_fields():
    config = FAMILY.config_class(d_model=48, n_layer=3, state_size=8, conv_kernel=3)
    assert (config.hidden_size, config.num_hidden_layers) == (48, 3)
    assert (config.d_state, config.d_conv) == (8, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transition", "diagnoal"),
        ("d_state", 0),
        ("expand", 0),
        ("d_conv", 0),
        ("dt_rank", 0),
        ("dt_rank", "full"),
        ("key_init_scale", 0.0),
        ("key_init_scale", math.inf),
        ("query_init_scale", -0.1),
        ("query_init_scale", math.nan),
    ],
)
def test_an_invalid_value_names_its_field(field, value):
    with pytest.raises((ValueError, StrictDataclassError), match=field):
        FAMILY.config_class(**{field: value})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_layers_of_width_64_learn_to_recall_four_pairs_in_64_tokens():
    torch.manual_seed(0)
    config = FAMILY.config_class(vocab_size=8192, hidden_size=64, num_hidden_layers=2)
    model = FAMILY.causal_lm_class(config)
    optimizer = torch.optim.AdamW(model.param_groups(lr=1e-2, weight_decay=0.1))
    steps = 1600

    def rate(step):
        return min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def answers(examples, seed):
        input_ids, labels = (torch.from_numpy(x) for x in mqar(examples, seed=seed))
        asked = labels[:, 1:] != -100  # logits only where an answer is due: the vocabulary is wide
        hidden = model.model(input_ids[:, :-1], use_cache=False).last_hidden_state
        return model.lm_head(hidden[asked]), labels[:, 1:][asked]

    for step in range(steps):
        loss = torch.nn.functional.cross_entropy(*answers(256, seed=step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, target = answers(1000, seed=10**6)
    accuracy = (logits.argmax(dim=-1) == target).double().mean().item()
    assert accuracy >= 0.99


def spell(text, *, layers, width, batch, length, steps, device):
    """Train on a text's characters; return the losses in nats."""
    torch.manual_seed(0)
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    config = FAMILY.config_class(
        vocab_size=len(characters), hidden_size=width, num_hidden_layers=layers
    )
    model = FAMILY.causal_lm_class(config).to(device)
    optimizer = torch.optim.AdamW(model.param_groups(lr=1e-3, weight_decay=0.1))
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - length, (batch, 1), generator=generator)
        rows = ids[starts + torch.arange(length)].to(device)
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def prose():
    return inspect.getsource(argparse) + inspect.getsource(inspect)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("layers", [6, 12])
def test_width_384_learns_to_spell_without_diverging(layers):
    size = {"layers": layers, "width": 384, "batch": 64, "length": 256}
    losses = spell(prose(), **size, steps=5000, device="cuda")
    assert losses.isfinite().all()
    assert losses[-100:].mean() < 1
    assert losses[1000:].max() < 1.5 * losses[900:1000].max()
