"""The judge of kernels: it passes another order of a sum, and sees a small mistake."""

import functools

import pytest
import torch

from ssmzoo.testing import assert_as_accurate


def weighted(x, weight, order=1, work=None, late=0, detach=False):
    """Sum ``x[t] weight`` over t, forwards or backwards, in some precision, without some terms."""
    first = x.detach() if detach else x
    rows = torch.cat([first[:1], x[1:]])[late:].to(work or x.dtype).unbind(0)[::order]
    return (functools.reduce(torch.add, rows) * weight.to(rows[0].dtype)).to(x.dtype)


def inputs():
    return [torch.randn(150, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_another_order_of_the_sum_is_as_exact(dtype, seed):
    torch.manual_seed(seed)
    assert_as_accurate(functools.partial(weighted, order=-1), weighted, inputs(), dtype)
    assert_as_accurate(lambda x, weight: x.sum(0) * weight, weighted, inputs(), dtype)


MISTAKES = {
    "a term is missing": {"late": 1},
    "float32 inside float64": {"work": torch.float32},
    "a gradient is missing": {"detach": True},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen_in_float64(mistake):
    wrong = functools.partial(weighted, **MISTAKES[mistake])
    with pytest.raises(AssertionError, match="exceeds"):
        assert_as_accurate(wrong, weighted, inputs(), torch.float64)


def test_a_relative_error_of_a_few_roundings_is_seen_in_float64():
    def off(x, weight):
        return weighted(x, weight) * (1 + 2e-14)

    with pytest.raises(AssertionError, match=r"output 0: error .* exceeds"):
        assert_as_accurate(off, weighted, inputs(), torch.float64)


def test_a_reference_that_is_not_finite_in_float32_gives_no_budget():
    big = [1e200 * x for x in inputs()]
    with pytest.raises(AssertionError, match="exceeds"):
        assert_as_accurate(weighted, weighted, big, torch.float64)
