"""gated_linear_attention: every backend against the loop over time, and the papers' models."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts
from tests.kernels.memory import peak_bytes, saved_numbers
from tests.oracles import linear_attention

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import gated_linear_attention


class TestGatedLinearAttention(contracts.GatedLinearAttention):
    """Every check of the contract, a decay a head."""


class TestRowwiseGatedLinearAttention(contracts.RowwiseGatedLinearAttention):
    """Every check of the contract, a decay a row of the state."""


def draw(B=2, L=70, G=2, H=4, K=5, V=6, E=1, dtype=torch.float64):
    """Random inputs; the delta rule's keys have length 1."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = random(B, L, G, K), F.normalize(random(B, L, G, K), dim=-1), random(B, L, H, V)
    log_decay, beta = -random(B, L, H, E).exp() / 8, random(B, L, H).sigmoid()
    return [x.to(dtype) for x in (q, k, v, log_decay, beta, random(B, H, K, V))]


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"error {error:.2e}"


def results(inputs, **options):
    """Outputs, final state and all gradients under a loss on both."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    found = gated_linear_attention(*leaves, **options)
    generator = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in found)
    return [*found, *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


# --- the models that it covers ----------------------------------------------------------------


def of_a_head(x, b, h):
    """One head's rows as numpy, of tensors of heads or of groups of two heads."""
    x = x[b, :, h if x.shape[2] == 4 else h // 2]
    return x.numpy()


def ssd(inputs, b, h, state):
    q, k, v, log_decay, beta = inputs
    rate = float(log_decay[0, 0, h, 0])
    inputs = (v, beta, k, q)
    x, dt, B, C = (of_a_head(x, b, h) for x in inputs)
    return linear_attention.ssd(x, dt, rate, B, C, state)


def retention(inputs, b, h, state):
    q, k, v, log_decay, _ = inputs
    gamma = float(log_decay[0, 0, h, 0].exp())
    return linear_attention.retention(*(of_a_head(x, b, h) for x in (q, k, v)), gamma, state)


def gla(inputs, b, h, state):
    q, k, v, log_decay, _ = (of_a_head(x, b, h) for x in inputs)
    return linear_attention.gla(q, k, v, np.exp(log_decay), state)


def delta_net(inputs, b, h, state):
    q, k, v, _, beta = (of_a_head(x, b, h) for x in inputs)
    o, S = linear_attention.delta_net(q, k, v, beta, state.T)
    return o, S.T


def gated_delta_net(inputs, b, h, state):
    q, k, v, log_decay, beta = (of_a_head(x, b, h) for x in inputs)
    o, S = linear_attention.gated_delta_net(q, k, v, np.exp(log_decay[:, 0]), beta, state.T)
    return o, S.T


def kda(inputs, b, h, state):
    q, k, v, log_decay, beta = (of_a_head(x, b, h) for x in inputs)
    return linear_attention.kda(q, k, v, np.exp(log_decay), beta, state)


# how each is spelt: what stands for log_decay and beta, and the rule
MODELS = {
    ssd: (lambda g, beta: (beta[..., None] * g[:1, :1], beta), "additive"),
    retention: (lambda g, beta: (g[:1, :1].expand(*beta.shape, 1), None), "additive"),
    gla: (lambda g, beta: (g, None), "additive"),
    delta_net: (lambda g, beta: (None, beta), "delta"),
    gated_delta_net: (lambda g, beta: (g, beta), "delta"),
    kda: (lambda g, beta: (g, beta), "delta"),
}


@pytest.mark.parametrize("model", MODELS, ids=lambda x: x.__name__)
def test_each_model_is_its_papers_recurrence(backend, model):
    *given, state = draw(L=40, E=5 if model in (gla, kda) else 1)
    spelling, rule = MODELS[model]
    log_decay, beta = spelling(*given[3:])
    call = functools.partial(gated_linear_attention, rule=rule, scale=1.0, backend=backend)
    out, final = call(*given[:3], log_decay, beta, state)
    for b, h in np.ndindex(2, 4):
        o, S = model(given, b, h, state[b, h].numpy())
        close(out[b, :, h], torch.from_numpy(o), 1e-12)
        close(final[b, h], torch.from_numpy(S), 1e-12)


# --- one form for several spellings -----------------------------------------------------------


@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_a_decay_of_a_head_is_one_of_all_its_rows(backend, rule):
    inputs = draw()
    expected = results(inputs, rule=rule, backend=backend)
    for change in (lambda g: g[..., 0], lambda g: g.expand(-1, -1, -1, 5)):
        found = results([*inputs[:3], change(inputs[3]), *inputs[4:]], rule=rule, backend=backend)
        found[5] = found[5].unsqueeze(-1) if found[5].dim() == 3 else found[5].sum(-1, True)
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-12)


def test_heads_of_a_group_share_its_keys_and_queries(backend):
    inputs = draw()
    wide = [x.repeat_interleave(2, dim=2) for x in inputs[:2]]
    found = results(inputs, rule="delta", backend=backend)
    expected = results([*wide, *inputs[2:]], rule="delta", backend=backend)
    expected[2:4] = [x.unflatten(2, (2, 2)).sum(dim=3) for x in expected[2:4]]
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_chunk_changes_only_roundings(backend, rule, rows):
    inputs = draw(L=150, E=rows)
    expected = results(inputs, rule=rule, backend=backend)
    for chunk in (16, 32):
        found = results(inputs, rule=rule, chunk=chunk, backend=backend)
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-12)


def test_the_scale_is_that_of_attention_where_none_is_given(backend):
    inputs = draw(L=9)
    found = gated_linear_attention(*inputs, backend=backend)[0]
    close(found, gated_linear_attention(*inputs, scale=5**-0.5, backend=backend)[0], 1e-14)


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("width", [1, 35])
def test_states_of_one_row_equal_the_loop(backend, rule, width):
    """In float64: keys of one number are parallel, where chunks are less exact than the loop."""
    inputs = draw(L=33, G=1, H=3, K=1, V=width)
    found, expected = (results(inputs, rule=rule, backend=x) for x in (backend, "reference"))
    for got, known in zip(found, expected, strict=True):
        close(got, known, 1e-12)


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("width", [1, 85])
def test_one_token_without_gradients_equals_the_loop(backend, rule, width):
    """Of states wider than a few vectors, too; with all that is optional and without."""
    inputs = draw(B=3, L=1, V=width)
    for given in (inputs, [*inputs[:3], None, None, None]):
        found, known = (
            gated_linear_attention(*given, rule=rule, backend=x) for x in (backend, "reference")
        )
        for got, expected in zip(found, known, strict=True):
            close(got, expected, 1e-14)


# --- decays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("strong", ["all", "some", "one row"])
def test_strong_decays_are_as_exact_as_the_loop(backend, rule, rows, strong):
    """Of -50 a token, alone and among weak ones, forward and backward in float32."""
    inputs = draw(L=70, E=rows)
    decay = inputs[3]
    if strong == "all":
        decay.fill_(-50.0)
    elif strong == "some":
        decay[:, ::7] = -50.0
    else:
        decay[..., 0] = -50.0
    run = functools.partial(gated_linear_attention, rule=rule)
    candidate = functools.partial(run, backend=backend)
    known = functools.partial(run, backend="reference")
    assert_as_accurate(candidate, known, inputs, torch.float32)


def test_gradients_of_strong_decays_keep_their_size(backend):
    """Where all but a token in ten forget, the gradients of those are 1e-22, not a rounding."""
    inputs = draw(B=1, L=40, G=1, H=1)
    inputs[3].fill_(-0.01)
    inputs[3][:, ::10] = -50.0
    for rows in (1, 5):
        given = [*inputs[:3], inputs[3].expand(-1, -1, -1, rows), *inputs[4:]]
        expected = results(given, rule="delta", backend="reference")[5]
        given = [x.float() for x in given]
        found = results(given, rule="delta", backend=backend)[5]
        strong, weak = (x[:, ::10].double() for x in (found, expected))
        assert weak.abs().max() < 1e-20
        close(strong, weak, 1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_decay_of_minus_infinity_begins_anew(backend, rows):
    inputs = draw(L=40, E=rows)
    inputs[3][:, 21] = -torch.inf
    out, final = gated_linear_attention(*inputs, rule="delta", backend=backend)
    rest = [x[:, 21:] for x in inputs[:5]]
    rest[3] = rest[3].clamp(min=-99)  # finite, and there is no state to forget
    expected, state = gated_linear_attention(*rest, rule="delta", backend=backend)
    close(out[:, 21:], expected, 1e-12)
    close(final, state, 1e-12)


def test_long_sequences_stay_as_exact_as_the_loop(backend):
    inputs = draw(B=1, L=700, G=1, H=1, K=16, V=8)
    inputs[3] /= 20
    run = functools.partial(gated_linear_attention, rule="delta")
    candidate = functools.partial(run, backend=backend)
    assert_as_accurate(
        candidate, functools.partial(run, backend="reference"), inputs, torch.float32
    )


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 32])
def test_training_saves_no_more_than_an_activation(backend, rows):
    inputs = [x.requires_grad_() for x in draw(B=1, L=2048, G=1, H=2, K=32, V=16, E=rows)]
    call = functools.partial(gated_linear_attention, rule="delta", backend=backend)
    assert saved_numbers(call, inputs) <= inputs[2].numel() + 32 * inputs[5].numel() + 100


@pytest.mark.parametrize("rows", [1, 32])
def test_memory_grows_with_activations_not_with_states(backend, rows):
    """A token's activations and gradients take some hundred numbers here, its states 1,024."""

    def step(length):
        inputs = draw(B=1, L=length, G=1, H=1, K=32, V=32, E=rows, dtype=torch.float32)
        inputs = [x.requires_grad_() for x in inputs]

        def run():
            out, _ = gated_linear_attention(*inputs, rule="delta", backend=backend)
            torch.autograd.grad(out.sum(), inputs)

        return run

    short, long = (peak_bytes(step(length)) for length in (512, 1024))
    assert (long - short) / (4 * 512) <= 12 * 32


# --- mistakes ---------------------------------------------------------------------------------


def test_bad_heads_rows_scales_and_chunks_are_one_clear_error():
    q, k, v, log_decay, beta, state = draw(L=3)
    call = functools.partial(gated_linear_attention, beta=beta, initial_state=state)
    with pytest.raises(ValueError, match="heads"):
        gated_linear_attention(q, k, v[:, :, :3])
    for rows in (0, 4, 6):
        with pytest.raises(ValueError, match="log_decay"):
            call(q, k, v, log_decay.expand(-1, -1, -1, 6)[..., :rows])
    for wrong in ("1", True, torch.ones(())):
        with pytest.raises(TypeError, match="scale"):
            call(q, k, v, log_decay, scale=wrong)
    for wrong in (0, 7, 65, 64.0, "64", None):
        with pytest.raises(ValueError, match="chunk"):
            call(q, k, v, log_decay, chunk=wrong)
