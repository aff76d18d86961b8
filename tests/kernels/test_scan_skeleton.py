"""The C skeleton serves a family that it was not written for: Mamba's, in ``selective.c``."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ssmzoo_kernels.scan import cpu

SOURCE = Path(__file__).with_name("selective.c")


def selective_scan(u, q, k, dt, dt_bias, skip, z, A, state, bounds):
    """Mamba's recurrence as a loop over time, segment by segment."""
    outputs, finals = [], []
    step = F.softplus(dt + dt_bias)
    for s, (begin, end) in enumerate(pairwise(bounds)):
        S = state[s]
        for t in range(begin, end):
            S = torch.exp(step[t, :, None] * A) * S + (step[t] * u[t])[:, None] * k[t]
            outputs.append((S @ q[t] + skip * u[t]) * F.silu(z[t]))
        finals.append(S)
    return torch.stack(outputs), torch.stack(finals)


@pytest.mark.parametrize("bounds", [[0, 40], [0, 17, 17, 18, 40]])
def test_a_second_family_with_a_learned_decay_runs_forward_and_backward(bounds):
    T, D, N, S = 40, 37, 19, len(bounds) - 1
    shapes = ((T, D), (T, N), (T, N), (T, D), (D,), (D,), (T, D), (D, N), (S, D, N))
    inputs = [torch.randn(x, dtype=torch.float64) for x in shapes]
    inputs[7] = -inputs[7].exp()
    offsets = torch.tensor(bounds)
    leaves = [x.requires_grad_() for x in inputs]
    expected = selective_scan(*leaves, bounds)
    incoming = [torch.randn_like(x) for x in expected]
    grads = torch.autograd.grad(expected, leaves, incoming)

    plain = [x.detach() for x in inputs]
    out, final, saved = cpu.forward(SOURCE, *plain, offsets, True)
    got = (out, final, *cpu.backward(SOURCE, *incoming, *plain, offsets, saved))
    for a, b in zip(got, (*expected, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_lone_token_takes_the_same_step():
    D, N, S = 37, 19, 2
    shapes = ((S, D), (S, N), (S, N), (S, D), (D,), (D,), (S, D), (D, N), (S, D, N))
    inputs = [torch.randn(x, dtype=torch.float64) for x in shapes]
    inputs[7] = -inputs[7].exp()
    out, final, _ = cpu.forward(SOURCE, *inputs, torch.arange(S + 1), False)
    expected = selective_scan(*inputs, list(range(S + 1)))
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(final, expected[1], rtol=1e-12, atol=1e-13)
