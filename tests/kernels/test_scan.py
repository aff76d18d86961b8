"""The chunked scans: sizes that reach every branch of their skeleton, and what training holds."""

import functools

import pytest
import torch
from tests.kernels.contracts import LonghornScan, SelectiveScan
from tests.kernels.memory import growth, saved_numbers

from ssmzoo.testing.ops import Case
from ssmzoo_kernels import scan
from ssmzoo_kernels.scan import cpu, eager, interval

CALLS = [(LonghornScan, "", "cpu"), (LonghornScan, "", "eager")]
CALLS += [(SelectiveScan, x, y) for x, y in (("euler", "cpu"), ("zoh", "cpu"), ("euler", "eager"))]
# keys, queries, their gradients and four partial sums of both: in [T, N], not in [T, D, N]
ALLOWED = 12 * (128 - 16)


def step(contract, case, states, length):
    """Return a forward and backward to run."""
    tensors = contract().draw(B=1, L=length, D=512, N=states, dtype=torch.float32)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    return lambda: contract().run(leaves, case)[0].sum().backward()


def test_sizes_of_the_contracts_reach_every_branch():
    for chunk in (cpu.CHUNK, eager.CHUNK):
        assert interval(40, chunk) > chunk
    assert len(list(eager.groups(torch.tensor([0, *[17] * 40]).cumsum(0), 5))) > 1
    assert len(list(eager.groups(torch.tensor([0, *[5] * 40]).cumsum(0), 5))) > 1


@pytest.mark.parametrize(
    ("contract", "width"),
    [
        *((LonghornScan, width) for width in (320, 330, 600)),
        *((SelectiveScan, width) for width in (320, 600)),
    ],
)
def test_blocks_that_take_turns_at_a_partial_sum_are_as_exact_as_the_reference(contract, width):
    tensors = contract().draw(B=1, L=20, D=width, N=width // 4)
    contract().judge(tensors, Case("cpu", next(iter(contract.forms))), torch.float32)


@pytest.mark.parametrize("states", [1, 16, 17, 128, 300])
@pytest.mark.parametrize("contract", [LonghornScan, SelectiveScan])
def test_training_keeps_at_most_one_activation_and_a_state_a_sequence(backend, contract, states):
    case = Case(backend, next(iter(contract.forms)))
    tensors = contract().draw(B=3, L=200, D=40, N=states)
    names, leaves = [*tensors], [x.requires_grad_() for x in tensors.values()]
    kept = saved_numbers(lambda *x: contract().run(dict(zip(names, x, strict=True)), case), leaves)
    assert 0 < kept <= 3 * 200 * 40 + 3 * 40 * states


@pytest.mark.parametrize(("contract", "form", "name"), CALLS)
def test_peak_memory_has_no_term_in_tokens_times_channels_times_states(contract, form, name):
    assert growth(functools.partial(step, contract, Case(name, form))) <= ALLOWED


@pytest.mark.parametrize("contract", [LonghornScan, SelectiveScan])
@pytest.mark.parametrize("scheme", ["a state per chunk", "a partial sum per block"])
def test_the_memory_check_notices_such_a_term(monkeypatch, scheme, contract):
    if scheme == "a state per chunk":
        for module in (scan, cpu):
            monkeypatch.setattr(module, "interval", lambda states, chunk: chunk)
    else:
        monkeypatch.setattr(cpu, "parts_of", lambda blocks, width, states: blocks)
    case = Case("cpu", next(iter(contract.forms)))
    assert growth(functools.partial(step, contract, case)) > 1.4 * ALLOWED
