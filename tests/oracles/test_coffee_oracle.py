"""The COFFEE oracle, judged by the paper's numbers, closed forms and finite differences."""

import itertools
import math

import numpy as np
import pytest
from tests.oracles import coffee
from tests.oracles.judging import numbers, relative


def draw(B=2, L=9, D=3, N=4):
    """Inputs of the op by name, well-conditioned, nothing zero."""
    return {
        "u": numbers(B, L, D),
        "lam": -np.random.default_rng(1).uniform(0.1, 0.9, (D, N)),
        "w": numbers(D, N, seed=2),
        "C": numbers(D, N, seed=3),
        "w_gamma": numbers(D, N, seed=4),
        "skip": numbers(D, seed=5),
        "state": numbers(B, D, N, seed=6),
    }


# --- G1: the paper's own example (Section 6, Figure 2) ------------------------------------------

LEARNED = {1: (5.394, 5.343), 2: (-10.264, -1.575), 3: (-1.539, -10.340)}
STARTED = {1: (6, 6), 2: (-10, -1), 3: (-1, -10)}


def ih0(embedding, sequence):
    """Outputs [4, 2] of the simplified model, and the symbol it answers at the end."""
    u = np.array([[embedding[symbol] for symbol in sequence]], dtype=float)
    one = np.ones((2, 1))
    y = coffee.scan(u, 0 * one, one, one)[0][0]
    table = np.array(list(embedding.values()), dtype=float)
    logits = coffee.nearest_logits(coffee.distances(y[-1], table))
    return y, list(embedding)[logits.argmax()]


def test_the_papers_trajectories():
    path = [(2.697, 2.672), (-6.919, 1.198), (-6.920, -6.745), (-6.915, -6.739)]
    np.testing.assert_allclose(ih0(LEARNED, (1, 2, 3, 1))[0], path, atol=6e-4)
    np.testing.assert_allclose(ih0(LEARNED, (3, 1, 2, 1))[0][-1], (-6.430, -5.118), atol=6e-4)
    # the figure was drawn with the embedding before its rounding to three digits
    np.testing.assert_allclose(ih0(LEARNED, (1, 2, 3, 1))[0][-1], (-6.92, -6.73), atol=0.025)
    np.testing.assert_allclose(ih0(LEARNED, (3, 1, 2, 1))[0][-1], (-6.41, -5.11), atol=0.025)


@pytest.mark.parametrize(("embedding", "right"), [(LEARNED, 8), (STARTED, 6)])
def test_the_learned_embedding_answers_all_eight_sequences_and_its_start_six(embedding, right):
    targets = {}
    for sequence in itertools.product((1, 2, 3), repeat=4):
        try:
            (targets[sequence],) = coffee.induction_target(sequence, (1,), symbols=(1, 2, 3))
        except ValueError:
            continue
    assert len(targets) == 8
    assert sum(ih0(embedding, s)[1] == target for s, target in targets.items()) == right


# --- G2, G3, G4: vectors ----------------------------------------------------------------------

VECTOR = {
    "u": np.array([1.0, -2.0, 0.5, 3.0]).reshape(1, 4, 1),
    "lam": np.array([[-0.5, -1.5]]),
    "w": np.array([[1.5, -0.8]]),
    "C": np.array([[1.0, -2.0]]),
}


def test_the_vector_of_the_recurrence():
    y, last = coffee.scan(**VECTOR)
    np.testing.assert_allclose(last[0, 0], [-0.101017, 1.428732], atol=6e-7)
    np.testing.assert_allclose(y.ravel(), [-0.5, 0.179066, -1.380540, -2.958480], atol=6e-7)
    assert y[0, 0, 0] == -0.5  # the first token always enters with gate 1/2
    x = coffee.states(VECTOR["u"], VECTOR["lam"], VECTOR["w"])
    J = coffee.derivatives(x[:, 2], VECTOR["u"][:, 3], VECTOR["lam"], VECTOR["w"])["x"]
    np.testing.assert_allclose(J[0, 0], [1.768046, -0.185148], atol=6e-7)
    by = coffee.gradients(np.ones((1, 4, 1)), **VECTOR)
    expected = {
        "u": [-1.435959, 2.132227, -0.520095, -0.675641],
        "lam": [0.717192, 0.032697],
        "w": [-1.929481, 0.541510],
        "C": [-1.478629, 1.590663],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(by[name].ravel(), value, atol=1.1e-6)


def test_the_vector_of_output_filtering():
    w_gamma = np.array([[0.3, -0.7]])
    y = coffee.scan(**VECTOR, w_gamma=w_gamma)[0].ravel()
    np.testing.assert_allclose(y, [-0.225083, 0.094634, -0.540579, -0.778090], atol=6e-7)
    by = coffee.gradients(np.ones((1, 4, 1)), **VECTOR, w_gamma=w_gamma)
    np.testing.assert_allclose(by["w_gamma"][0], [0.229563, -0.995456], atol=6e-7)


def test_the_vector_of_s6():
    u, mu = np.array([[[1.0, -1.0], [0.5, 2.0]]]), np.log([[1.0], [2.0]])
    W_D = np.array([[0.2, -0.3], [0.4, 0.1]])
    y, x = coffee.s6(u, mu, np.array([[1.0, 0.5]]), np.array([[-0.5, 1.0]]), W_D)
    np.testing.assert_allclose(x.ravel(), [0.476883, 1.225451], atol=6e-7)
    np.testing.assert_allclose(y[0, 1], [0.834546, 2.144540], atol=6e-7)


def test_the_vector_of_the_logits_and_its_limits():
    got = coffee.nearest_logits(np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(got, [0.873072, -1.048587, -3.313262], atol=6e-7)
    far = coffee.nearest_logits(np.array([0.0, 100.0, 100.0]))
    np.testing.assert_allclose(far, [100 - math.log(2), -100, -100], rtol=1e-15)
    assert np.isfinite(coffee.nearest_logits(np.array([0.0, 1e5, 2e5]))).all()


def test_the_closed_logits_are_the_logit_of_the_softmin_of_the_distances():
    y, table = numbers(2, 5, 3), numbers(7, 3, seed=1)
    d = np.linalg.norm(y[..., None, :] - table, axis=-1)
    np.testing.assert_allclose(coffee.distances(y, table), d, rtol=1e-14)
    p = np.exp(-d) / np.exp(-d).sum(axis=-1, keepdims=True)
    assert relative(coffee.nearest_logits(d), np.log(p / (1 - p))) <= 1e-13
    assert (coffee.nearest_logits(d).argmax(-1) == d.argmin(-1)).all()  # Remark 7


# --- finite differences -----------------------------------------------------------------------


def differences(function, value, step=1e-6):
    """Central differences of a scalar function of an array."""
    out = np.empty_like(value)
    for index in np.ndindex(*value.shape):
        up, down = value.copy(), value.copy()
        up[index] += step
        down[index] -= step
        out[index] = (function(up) - function(down)) / (2 * step)
    return out


@pytest.mark.parametrize("kind", ["sigmoid", "linear"])
@pytest.mark.parametrize("driven", [False, True], ids=["feedback", "driven"])
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_the_adjoint_gives_every_gradient(kind, driven, filtered):
    inputs = draw(L=6)
    if kind == "linear":
        inputs["w"] *= 0.1  # of second degree in x: large gates run away
    if not filtered:
        del inputs["w_gamma"]
    if driven:
        inputs["drive"] = numbers(2, 6, 3, seed=7)
    y_bar, final_bar = numbers(2, 6, 3, seed=8), numbers(2, 3, 4, seed=9)

    def loss(changed):
        y, final = coffee.scan(**{**inputs, **changed}, kind=kind)
        return np.sum(y_bar * y) + np.sum(final_bar * final)

    by = coffee.gradients(y_bar, **inputs, kind=kind, final_bar=final_bar)
    assert by.keys() == inputs.keys()
    for name, value in inputs.items():
        expected = differences(lambda v, name=name: loss({name: v}), value)
        assert relative(by[name], expected) <= 1e-8, name


def test_the_jacobian_is_diagonal_and_is_the_derivative():
    inputs = draw(B=1)
    lam, w, u, x = inputs["lam"], inputs["w"], inputs["u"][:, 0], inputs["state"]
    by = coffee.derivatives(x, u, lam, w)
    one, many = np.zeros_like(x), x.size
    full = np.empty((many, many))
    for lane, index in enumerate(np.ndindex(*x.shape)):
        one[...] = 0
        one[index] = 1e-6
        up = coffee.update(x + one, coffee.gate(x + one, w), u, lam)
        down = coffee.update(x - one, coffee.gate(x - one, w), u, lam)
        full[:, lane] = ((up - down) / 2e-6).ravel()
    np.testing.assert_allclose(full, np.diag(by["x"].ravel()), atol=1e-8)
    assert (full[~np.eye(many, dtype=bool)] == 0).all()


def test_a_split_sequence_passes_on_state_and_gradient():
    inputs = draw()
    y_bar = numbers(2, 9, 3, seed=8)
    whole, last = coffee.scan(**inputs)
    by = coffee.gradients(y_bar, **inputs)
    for cut in (1, 4, 8):
        first, x = coffee.scan(**{**inputs, "u": inputs["u"][:, :cut]})
        second, end = coffee.scan(**{**inputs, "u": inputs["u"][:, cut:], "state": x})
        np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
        np.testing.assert_array_equal(end, last)
        later = {**inputs, "u": inputs["u"][:, cut:], "state": x}
        sooner = {**inputs, "u": inputs["u"][:, :cut]}
        right = coffee.gradients(y_bar[:, cut:], **later)
        left = coffee.gradients(y_bar[:, :cut], **sooner, final_bar=right["state"])
        np.testing.assert_array_equal(left["state"], by["state"])
        got = np.concatenate([left["u"], right["u"]], axis=1)
        np.testing.assert_allclose(got, by["u"], rtol=1e-13)
        for name in ("lam", "w", "C", "w_gamma", "skip"):
            assert relative(left[name] + right[name], by[name]) <= 1e-13


# --- G8: Newton's method ----------------------------------------------------------------------


@pytest.mark.parametrize("guess", ["zeros", "random", "half gate"])
def test_newton_ends_at_the_marched_states_and_is_exact_from_the_front(guess):
    x = draw(L=24)
    u, lam, w, state = x["u"], x["lam"], x["w"], x["state"]
    exact = coffee.states(u, lam, w, state=state)
    start = {
        "zeros": None,
        "random": 3 * numbers(2, 24, 3, 4, seed=9),
        "half gate": coffee.states(u, lam, 0 * w, state=state),
    }[guess]
    got, count, _ = coffee.newton(u, lam, w, state, guess=start, tolerance=1e-14)
    assert relative(got, exact) <= 1e-12
    assert count.min() >= 1
    assert count.max() <= 24
    for t in (1, 2, 5):
        options = {"guess": start, "tolerance": 0.0, "max_iterations": t}
        got, count, history = coffee.newton(u, lam, w, state, **options)
        assert len(history) == t + 1
        assert relative(got[:, :t], exact[:, :t]) <= 1e-14
        assert (count == -1).any()


@pytest.mark.parametrize("length", [16, 256, 1024])
def test_the_contractive_regime_takes_three_iterations_at_any_length(length):
    rng = np.random.default_rng(length)
    u = rng.uniform(-1, 1, (1, length, 8))
    lam = -rng.uniform(0.1, 1, (8, 8))
    w = rng.uniform(-1, 1, (8, 8)) * np.abs(lam) / 2  # 2 |w| U <= |lambda|
    got, count, history = coffee.newton(u, lam, w)
    assert count.max() == np.median(count) == 3
    # |x| <= 1 / |lambda|, so s >= sigmoid(-1/2), and |J| <= 1 - |lambda| s^2
    room = np.abs(lam) * coffee.sigmoid(-0.5) ** 2
    x = coffee.states(u, lam, w)
    J = coffee.derivatives(x[0, :-1], u[0, 1:], lam, w)["x"]
    assert (np.abs(J) <= 1 - room).all()
    assert (np.abs(got - x) <= 1e-6 * np.maximum(1, 1 / np.abs(lam)) / room).all()
    assert history[-1].max() <= 1e-6 < history[-2].max()


def test_newton_may_need_every_step_where_the_jacobian_is_large():
    u, lam = 3 * numbers(1, 16, 128), np.full((128, 2), -1.9)
    w = np.array([3.0, -3.0]) * np.ones((128, 1))
    got, count, _ = coffee.newton(u, lam, w)
    assert count.max() == 16
    assert count.min() >= 0
    last = np.broadcast_to(count[:, None] == 16, got.shape)
    assert relative(got[last], coffee.states(u, lam, w)[last]) <= 1e-12


def test_the_jacobian_printed_for_the_scan_is_off_by_one():
    # Appendix D's pair e_k holds df/dx at x(k), its recurrence df_k/dx at x(k - 1)
    x = draw(L=40)
    u, lam, w, state = x["u"], x["lam"], x["w"], x["state"]
    exact, _, history = coffee.newton(u, lam, w, state, tolerance=1e-13)
    start, residual = np.zeros_like(exact), []
    for _ in history:
        delta, after, worst = np.zeros_like(state), [], 0.0
        for k in range(40):
            before = state if k == 0 else start[:, k - 1]
            r = start[:, k] - coffee.update(before, coffee.gate(before, w), u[:, k], lam)
            delta = coffee.derivatives(start[:, k], u[:, k], lam, w)["x"] * delta - r
            after.append(start[:, k] + delta)
            worst = max(worst, np.abs(r).max())
        start = np.stack(after, axis=1)
        residual.append(worst)
    assert history[-1].max() <= 1e-13
    assert residual[-1] > 1e-4


# --- G9: limits -------------------------------------------------------------------------------


def test_without_gate_weights_the_scan_is_linear_and_newton_needs_one_step():
    x = draw()
    u, lam, state = x["u"], x["lam"], x["state"]
    got = coffee.states(u, lam, 0 * lam, state=state)
    expected = state
    for k in range(9):
        expected = (1 + lam / 2) * expected + u[:, k, :, None] / 2
        assert relative(got[:, k], expected) <= 1e-14
    _, count, _ = coffee.newton(u, lam, 0 * lam, state, tolerance=1e-13)
    assert (count == 1).all()
    sums = coffee.states(u, 0 * lam, 0 * lam)
    assert relative(sums, np.cumsum(u, axis=1)[..., None] / 2 + 0 * sums) <= 1e-14


def test_zero_input_keeps_zero_states_and_a_constant_reaches_its_fixed_point():
    x = draw(L=400)
    assert (coffee.states(0 * x["u"], x["lam"], x["w"]) == 0).all()
    constant = np.ones((1, 400, 3)) * [0.3, -0.2, 0.5]
    end = coffee.states(constant, x["lam"], x["w"])[:, -1]
    np.testing.assert_allclose(end, -constant[:, 0, :, None] / x["lam"], rtol=1e-6)
    there = coffee.update(end, coffee.gate(end, x["w"]), constant[:, 0], x["lam"])
    np.testing.assert_allclose(there, end, rtol=1e-6)


def test_a_closed_gate_freezes_the_state_and_an_open_one_takes_the_whole_step():
    x = draw(L=1)
    u, lam, state = x["u"], x["lam"], x["state"]
    closed = coffee.states(u, lam, -1e6 / state[0], state=state)[0, 0]
    np.testing.assert_array_equal(closed, state[0])
    opened = coffee.states(u, lam, 1e6 / state[0], state=state)[0, 0]
    np.testing.assert_allclose(opened, (1 + lam) * state[0] + u[0, 0, :, None], rtol=1e-12)


# --- G10, G11: symmetries and invariants --------------------------------------------------------


def test_b_is_absorbed_by_a_change_of_basis_that_scales_the_gates_weights_too():
    x = draw()
    B, v = numbers(3, 4, seed=7), numbers(3, seed=8)
    scale = B * v[:, None]
    six = coffee.scan(x["u"], x["lam"], x["w"], x["C"], x["w_gamma"], B=B)[0]
    seven = coffee.scan(x["u"] / v, x["lam"], x["w"] * scale, x["C"] * scale, x["w_gamma"] * scale)[
        0
    ]
    assert relative(seven, six) <= 1e-12
    # Appendix C.3's proof scales the state and C, and leaves the gate as it was
    proof = coffee.scan(x["u"] / v, x["lam"], x["w"], x["C"] * scale, x["w_gamma"] * scale)[0]
    assert relative(proof, six) > 1e-2


def test_the_change_of_basis_of_inputs_does_not_survive_the_nearest_embedding():
    x, table = draw(), numbers(5, 3, seed=7)
    v = np.array([0.5, 3.0, -2.0])
    y = coffee.scan(x["u"], x["lam"], x["w"], x["C"])[0]
    plain = coffee.distances(y, table).argmin(-1)
    scaled = coffee.distances(y / v, table / v).argmin(-1)
    assert (plain != scaled).any()


def test_negating_permuting_and_separating_lanes():
    x = draw()
    u, lam, w, C = (x[name] for name in ("u", "lam", "w", "C"))
    y = coffee.scan(u, lam, w, C)[0]
    np.testing.assert_array_equal(coffee.scan(-u, lam, -w, C)[0], -y)
    order = [2, 0, 3, 1]
    shuffled = coffee.scan(u, lam[:, order], w[:, order], C[:, order])[0]
    assert relative(shuffled, y) <= 1e-14
    other = u.copy()
    other[:, 0, 1] += 1
    moved = coffee.scan(other, lam, w, C)[0]
    np.testing.assert_array_equal(moved[..., [0, 2]], y[..., [0, 2]])
    assert (moved[..., 1] != y[..., 1]).all()


def test_a_bounded_input_keeps_the_state_bounded_and_no_output_sees_the_future():
    rng = np.random.default_rng(3)
    lam, w = -rng.uniform(0.05, 1.95, (3, 4)), 3 * numbers(3, 4)
    u = rng.choice([-1.0, 1.0], size=(4, 300, 3))
    bound = 1 / (1 - np.abs(1 + lam))
    assert (np.abs(coffee.states(u, lam, w)) <= bound * (1 + 1e-12)).all()
    later = u.copy()
    later[:, 20:] *= -1
    x, moved = coffee.states(u, lam, w), coffee.states(later, lam, w)
    np.testing.assert_array_equal(moved[:, :20], x[:, :20])
    assert (moved[:, 20] != x[:, 20]).all()


# --- G12, G14: the ablations of Table 6 --------------------------------------------------------


def test_linear_feedback_never_leaves_zero_and_its_gradients_vanish():
    x = draw()
    u, lam, w, C = (x[name] for name in ("u", "lam", "w", "C"))
    y, last = coffee.scan(u, lam, w, C, kind="linear")
    assert (y == 0).all()
    assert (last == 0).all()
    by = coffee.gradients(numbers(2, 9, 3, seed=8), u, lam, w, C, kind="linear")
    assert all((by[name] == 0).all() for name in ("u", "lam", "w", "C"))


def test_without_feedback_the_states_are_affine_in_the_first_one():
    x = draw()
    u, lam, w = x["u"], x["lam"], x["w"]
    zero, one, two = (
        coffee.states(u, lam, w, drive=u, state=k * x["state"]) for k in (0.0, 1.0, 2.0)
    )
    assert relative(two - zero, 2 * (one - zero)) <= 1e-13
    fed = [coffee.states(u, lam, w, state=k * x["state"]) for k in (0.0, 1.0, 2.0)]
    assert relative(fed[2] - fed[0], 2 * (fed[1] - fed[0])) > 1e-2


def test_the_linearised_step_of_eq_4_is_zero_order_hold_to_second_order():
    x = draw()
    lam, u, B, state = x["lam"], x["u"][:, 0], numbers(3, 4, seed=7), x["state"]
    errors = []
    for dt in (1e-2, 1e-3, 1e-4):
        s = np.full((2, 3, 1), dt)
        held = coffee.hold(state, s, u, lam, B)
        errors.append(np.abs(held - coffee.update(state, s, u, lam, B)).max() / dt**2)
    assert errors[2] == pytest.approx(errors[1], rel=1e-2)
    assert errors[1] == pytest.approx(errors[0], rel=1e-1)
    assert errors[2] > 0.1


# --- models -----------------------------------------------------------------------------------

ROWS = {
    "final": {"lam": "DN", "w": "DN", "C": "DN"},
    "raw lambda": {"lam_raw": "DN", "w": "DN", "C": "DN"},
    "final, filtered": {"lam": "DN", "w": "DN", "C": "DN", "w_gamma": "DN"},
    "no fb.": {"lam": "DN", "w": "DN", "C": "DN"},
    "lin. fb.": {"lam": "DN", "w": "DN", "C": "DN"},
    "(6)": {"lam": "DN", "w": "DN", "C": "DN", "B": "DN"},
    "(4)": {"lam": "DN", "C": "DN", "B": "DN", "dt_proj.weight": "DD"},
    "S6": {"A_log": "DN", "x_proj.weight": "2D", "dt_proj.weight": "DD"},
}
VARIANTS = {
    "no fb.": "no_feedback",
    "lin. fb.": "linear_feedback",
    "(6)": "input_matrix",
    "(4)": "token_gate",
    "S6": "s6",
}


def weights_of(row, prefix, D, N, seed=0):
    sizes = {"D": D, "N": N, "2": 2 * N}
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in ROWS[row].items():
        out[prefix + name] = 0.5 * rng.standard_normal([sizes[letter] for letter in shape])
        if name == "lam":
            out[prefix + name] = -np.abs(out[prefix + name])
    return out


def fields(row, **own):
    common = {
        "num_hidden_layers": 1,
        "norm_type": "none",
        "rms_norm_eps": 1e-5,
        "prenorm": True,
        "residual": False,
        "intermediate_size": None,
        "mlp_type": "gelu",
        "lambda_max": 1.0,
        "variant": VARIANTS.get(row, "coffee"),
        "head": "linear",
        "frozen_embedding_index": None,
    }
    assert own.keys() <= common.keys()
    return {**common, **own}


def core(row, D=6, N=4, V=9, frozen=None):
    weights = weights_of(row, "model.layers.0.mixer.", D, N)
    weights["model.embed_tokens.weight"] = numbers(V - (frozen is not None), D, seed=1)
    return weights, fields(row, head="nearest_embedding", frozen_embedding_index=frozen)


def language_model(row, E=5, D=10, N=3, K=4, V=11):
    weights = {"model.embed_tokens.weight": numbers(V, E), "model.norm.weight": numbers(E, seed=1)}
    for i in range(2):
        mixer = f"model.layers.{i}.mixer."
        weights |= weights_of(row, mixer, D, N, seed=i)
        shapes = {
            "in_proj.weight": (2 * D, E),
            "conv1d.weight": (D, 1, K),
            "conv1d.bias": (D,),
            "D": (D,),
            "out_proj.weight": (E, D),
        }
        weights |= {mixer + name: 0.5 * numbers(*s, seed=i + 9) for name, s in shapes.items()}
        weights[f"model.layers.{i}.norm.weight"] = 1 + 0.1 * numbers(E, seed=i + 3)
    return weights, fields(row, num_hidden_layers=2, norm_type="rms", residual=True)


def other_backbone(row, E=5):
    """Norms after the residual sums, and MLPs."""
    weights, config = language_model(row, E=E)
    del weights["model.norm.weight"]
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes = {
            "norm.bias": (E,),
            "mlp_norm.weight": (E,),
            "mlp_norm.bias": (E,),
            "mlp.up_proj.weight": (7, E),
            "mlp.up_proj.bias": (7,),
            "mlp.down_proj.weight": (E, 7),
            "mlp.down_proj.bias": (E,),
        }
        weights |= {layer + name: numbers(*s, seed=i + 20) for name, s in shapes.items()}
    return weights, config | {"norm_type": "layer", "prenorm": False, "intermediate_size": 7}


def gated_mlp(row):
    weights, config = other_backbone(row)
    for i in range(2):
        mlp = f"model.layers.{i}.mlp."
        weights[mlp + "gate_proj.weight"] = numbers(7, 5, seed=i + 30)
        del weights[mlp + "up_proj.bias"], weights[mlp + "down_proj.bias"]
    return weights, config | {"mlp_type": "swiglu"}


def frozen_core(row):
    return core(row, frozen=8)


MODELS = [
    *((core, row) for row in ROWS),
    *((language_model, row) for row in ROWS if row != "lin. fb."),
    (other_backbone, "final"),
    (gated_mlp, "final"),
    (frozen_core, "final"),
]
IDS = np.random.default_rng(1).integers(9, size=(2, 11))


@pytest.mark.parametrize(("build", "row"), MODELS, ids=lambda x: getattr(x, "__name__", x))
def test_a_model_run_token_by_token_is_the_model_run_at_once(build, row):
    weights, config = build(row)
    whole = coffee.logits(weights, config, IDS)
    assert whole.shape == (2, 11, 11 if "in_proj" in " ".join(weights) else 9)
    state, stepped = coffee.empty_state(weights, config, 2), []
    for token in IDS.T:
        out, state = coffee.step(weights, config, token, state)
        stepped.append(out)
    assert relative(np.stack(stepped, axis=1), whole) <= 1e-13
    first, state = coffee.run(weights, config, IDS[:, :5])
    second, _ = coffee.run(weights, config, IDS[:, 5:], state)
    assert relative(np.concatenate([first, second], axis=1), whole) <= 1e-13
    changed = IDS.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % 9
    np.testing.assert_array_equal(coffee.logits(weights, config, changed)[:, :7], whole[:, :7])


@pytest.mark.parametrize(("build", "row"), MODELS, ids=lambda x: getattr(x, "__name__", x))
def test_every_parameter_moves_the_logits_but_those_that_linear_feedback_kills(build, row):
    weights, config = build(row)
    whole = coffee.logits(weights, config, IDS)
    for name, value in weights.items():
        moved = coffee.logits({**weights, name: value * 1.1}, config, IDS)
        if row == "lin. fb." and "mixer" in name:
            np.testing.assert_array_equal(moved, whole)
        else:
            assert relative(moved, whole) > 1e-6, name


def test_the_rows_of_table_6_differ_and_are_what_they_say():
    D, N = 6, 4
    weights, config = core("final", D, N)
    whole = coffee.logits(weights, config, IDS)
    open_loop = coffee.logits(weights, config | {"variant": "no_feedback"}, IDS)
    assert relative(open_loop, whole) > 1e-2
    with_B = {**weights, "model.layers.0.mixer.B": np.ones((D, N))}
    six = coffee.logits(with_B, config | {"variant": "input_matrix"}, IDS)
    np.testing.assert_array_equal(six, whole)
    raw = {name.replace("lam", "lam_raw"): value for name, value in weights.items()}
    raw["model.layers.0.mixer.lam_raw"] = numbers(D, N, seed=4)
    lam = -0.7 / (1 + np.exp(-numbers(D, N, seed=4)))
    expected = coffee.logits({**weights, "model.layers.0.mixer.lam": lam}, config, IDS)
    assert relative(coffee.logits(raw, config | {"lambda_max": 0.7}, IDS), expected) <= 1e-13
    u = weights["model.embed_tokens.weight"][IDS]
    mixer = {name.split("mixer.")[-1]: value for name, value in core("(4)", D, N)[0].items()}
    got = coffee.recurrence(mixer, {"variant": "token_gate"}, "", u)[0]
    x = np.zeros((2, D, N))
    for k in range(IDS.shape[1]):
        s = 1 / (1 + np.exp(-u[:, k] @ mixer["dt_proj.weight"].T))
        x = (1 + mixer["lam"] * s[..., None]) * x + (s * u[:, k])[..., None] * mixer["B"]
        assert relative(got[:, k], (mixer["C"] * x).sum(-1)) <= 1e-13


def test_the_parts_of_s6_have_their_places():
    weights, config = core("S6", D=6, N=4)
    prefix = "model.layers.0.mixer."
    u = weights["model.embed_tokens.weight"][IDS]
    mu, rows = weights[prefix + "A_log"], weights[prefix + "x_proj.weight"]
    y, last = coffee.s6(u, mu, rows[:4], rows[4:], weights[prefix + "dt_proj.weight"])
    got = coffee.recurrence(weights, config, prefix, u)
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], last)
    skip = numbers(6, seed=3)
    got = coffee.recurrence({**weights, prefix + "D": skip}, config, prefix, u)[0]
    np.testing.assert_array_equal(got, y + skip * u)


def test_images_are_read_by_rows_and_columns_forwards_and_backwards():
    weights = {}
    for i in range(4):
        weights |= weights_of("final, filtered", f"scans.{i}.", 25, 2, seed=i)
    weights |= {"hidden.weight": numbers(25, 100), "hidden.bias": numbers(25)}
    weights |= {"score.weight": numbers(10, 25), "score.bias": numbers(10)}
    assert sum(value.size for value in weights.values()) == 3585
    images = np.random.default_rng(0).uniform(size=(3, 25, 25))
    config = {"variant": "coffee"}
    whole = coffee.image_logits(weights, config, images)
    assert whole.shape == (3, 10)

    def turned(order, block):
        """The weights with their directions renamed, and so the columns of the first linear map."""
        out = dict(weights)
        for new, old in enumerate(order):
            for name in ROWS["final, filtered"]:
                out[f"scans.{new}.{name}"] = weights[f"scans.{old}.{name}"]
        columns = np.split(weights["hidden.weight"], 4, axis=1)
        out["hidden.weight"] = np.concatenate(
            [columns[old][:, ::-1] if block else columns[old] for old in order], axis=1
        )
        return out

    transposed = images.transpose(0, 2, 1)
    got = coffee.image_logits(turned([1, 0, 3, 2], False), config, transposed)
    assert relative(got, whole) <= 1e-13
    # upside down, rows come in the other order and every column is reversed in itself
    one = {**weights, "hidden.weight": weights["hidden.weight"].copy()}
    one["hidden.weight"].reshape(25, 4, 25)[:, [1, 3]] = 0
    flipped = {**one, "hidden.weight": one["hidden.weight"].reshape(25, 4, 25)[:, [2, 1, 0, 3]]}
    flipped["hidden.weight"] = flipped["hidden.weight"].reshape(25, 100)
    for name in ROWS["final, filtered"]:
        flipped[f"scans.0.{name}"] = weights[f"scans.2.{name}"]
        flipped[f"scans.2.{name}"] = weights[f"scans.0.{name}"]
    got = coffee.image_logits(flipped, config, images[:, ::-1])
    assert relative(got, coffee.image_logits(one, config, images)) <= 1e-13


def test_the_frozen_row_is_ones_wherever_it_stands():
    weights, config = core("final")
    for index in (0, 3, 8):
        small = {**weights}
        small["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:8]
        large = {**weights}
        rows = list(small["model.embed_tokens.weight"])
        large["model.embed_tokens.weight"] = np.stack([*rows[:index], np.ones(6), *rows[index:]])
        got = coffee.logits(small, config | {"frozen_embedding_index": index}, IDS)
        np.testing.assert_array_equal(got, coffee.logits(large, config, IDS))


# --- the induction heads of Appendix E --------------------------------------------------------


@pytest.mark.parametrize(
    ("symbols", "length", "count"), [(3, 4, 8), (3, 5, 24), (4, 5, 81), (3, 7, 160)]
)
def test_there_are_as_many_sequences_as_places_times_fillings(symbols, length, count):
    assert count == (length - 2) * (symbols - 1) ** (length - 2)
    vocabulary = tuple(range(1, symbols + 1))
    found = 0
    for sequence in itertools.product(vocabulary, repeat=length):
        try:
            (target,) = coffee.induction_target(sequence, (2,), symbols=vocabulary)
        except ValueError:
            continue
        assert target == sequence[sequence.index(2) + 1] != 2
        found += 1
    assert found == count


def test_the_papers_example_of_long_triggers_and_targets():
    sequence = (3, 2, 6, 5, 6, 7, 2, 4, 3, 1, 2, 2, 6, 5, 6, 7, 0, 0)
    assert coffee.induction_target(sequence, (5, 6, 7), 3) == (2, 4, 3)
    assert coffee.induction_target((4, 1, 5, 5, 3, 2, 1), (1,), gap=2) == (3,)


@pytest.mark.parametrize(
    ("sequence", "trigger", "options", "rule"),
    [
        ((1, 2, 3, 4), (1,), {}, "exactly twice, it does 1"),
        ((1, 2, 1, 4, 1), (1,), {}, "exactly twice, it does 3"),
        ((3, 1, 2, 1, 4), (1,), {}, "must end with the trigger"),
        ((3, 2, 1, 1), (1,), {}, "no room"),
        ((1, 2, 1), (1,), {}, "too short"),
        ((1, 2, 8, 1), (1,), {}, "outside"),
        ((1, 2, 3, 1), (1,), {"target_length": 2}, "1 zeros"),
        ((1, 2, 3, 1, 0), (1,), {"target_length": 2, "gap": 1}, "too short"),
        ((4, 2, 1, 2, 3, 1, 0), (1,), {"target_length": 2, "gap": 1}, "no room"),
        ((1, 1, 1, 2, 1, 1), (1, 1), {}, "exactly twice, it does 3"),
    ],
)
def test_invalid_sequences_of_the_task_are_refused(sequence, trigger, options, rule):
    with pytest.raises(ValueError, match=rule):
        coffee.induction_target(sequence, trigger, **options)
