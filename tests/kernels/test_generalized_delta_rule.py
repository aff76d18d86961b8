"""generalized_delta_rule: every backend against the loop, the paper's equation, the delta rule."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import contracts
from tests.oracles import rwkv7 as oracle
from tests.oracles.judging import numbers, relative

from ssmzoo_kernels import gated_linear_attention, generalized_delta_rule


class TestGeneralizedDeltaRule(contracts.GeneralizedDeltaRule):
    """Every check of the contract."""


@pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
def test_the_op_computes_the_papers_equation(backend):
    length, heads, keys, values = 21, 2, 5, 3
    r, w, k, a, b = (numbers(length, heads, keys, seed=i) / 2 for i in range(5))
    w, v, start = 1 / (1 + np.exp(w)), numbers(length, heads, values), numbers(heads, values, keys)
    given = [torch.from_numpy(x)[None] for x in (r, w, k, v, a, b)]
    given.append(torch.from_numpy(start).mT[None])
    y, final = generalized_delta_rule(*given, backend=backend)
    for h in range(heads):
        own = (x[:, h] for x in (r, w, k, v, a, b))
        known, last = oracle.delta_rule(*own, start[h])
        assert relative(y[0, :, h], known) < 1e-14
        assert relative(final[0, h].mT, last) < 1e-14


def test_with_one_key_it_is_the_gated_delta_rule():
    draw = torch.Generator().manual_seed(0)
    q, k, v, d = (torch.randn(2, 33, 3, 8, generator=draw).double() for _ in range(4))
    k, log_decay, beta = F.normalize(k, dim=-1), F.logsigmoid(d), torch.sigmoid(d[..., 0])
    expected = gated_linear_attention(q, k, v, log_decay, beta, rule="delta", scale=1.0)
    w, strong = log_decay.exp(), beta[..., None] * k
    found = generalized_delta_rule(q, w, strong, v, -k * w, strong)
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y.numpy()) < 1e-13
