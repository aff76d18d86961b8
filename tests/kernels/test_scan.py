"""The chunked scans: sizes that reach every branch of their skeleton, and what training holds."""

import pytest
import torch
from tests.kernels.contracts import (
    FeedbackScan,
    LonghornScan,
    NewtonFeedbackScan,
    SelectiveScan,
)
from tests.kernels.memory import growth, saved_numbers

from ssmzoo.testing.ops import Case
from ssmzoo_kernels import scan
from ssmzoo_kernels.feedback_scan import cpu as feedback_cpu
from ssmzoo_kernels.scan import cpu, eager, interval

CASES = {  # form and backend, and how much longer is measured
    LonghornScan: [("", "cpu"), ("", "eager")],
    SelectiveScan: [("euler", "cpu"), ("zoh", "cpu"), ("euler", "eager")],
    FeedbackScan: [("march", "cpu"), ("march", "eager")],
    NewtonFeedbackScan: [("newton", "eager")],
}
# keys, queries, their gradients and four partial sums of both: in [T, N], not in [T, D, N]
WIDE = {"width": 512, "states": (16, 128), "lengths": (128, 256), "allowed": 12 * (128 - 16)}
# a token's features: one activation, where [T, D, N] would be 56 of them
NARROW = {"width": 64, "states": (8, 64), "lengths": (128, 192), "allowed": 64}
SIZES = {
    LonghornScan: WIDE,
    SelectiveScan: WIDE,
    FeedbackScan: NARROW,
    NewtonFeedbackScan: NARROW | {"lengths": (320, 448)},
}


def measured(contract, form, name):
    """Return the numbers that a token costs more with many states, over what is allowed."""
    sizes = SIZES[contract]

    def step(states, length):
        op = contract()
        tensors = op.draw(B=1, L=length, D=sizes["width"], N=states, dtype=torch.float32)
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        leaves |= dict.fromkeys({"drive"} & {*leaves})

        def run():
            out, _ = op.run(
                leaves | {"drive": None} if form in ("march", "newton") else leaves,
                Case(name, form),
            )
            if form != "newton":  # which shares the backward with the march
                out.sum().backward()

        return run

    return growth(step, sizes["states"], sizes["lengths"]) / sizes["allowed"]


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
@pytest.mark.parametrize("contract", [LonghornScan, SelectiveScan, FeedbackScan])
def test_training_keeps_at_most_one_activation_and_a_state_a_sequence(backend, contract, states):
    op, case = contract(), Case(backend, next(iter(contract.forms)))
    tensors = op.draw(B=3, L=200, D=40, N=states)
    leaves = [x.requires_grad_() for x in tensors.values()]
    kept = saved_numbers(lambda *x: op.run(dict(zip(tensors, x, strict=True)), case), leaves)
    assert 0 < kept <= 3 * 200 * 40 + 3 * 40 * states


@pytest.mark.parametrize(
    ("contract", "form", "name"), [(x, *case) for x, cases in CASES.items() for case in cases]
)
def test_peak_memory_has_no_term_in_tokens_times_channels_times_states(contract, form, name):
    assert measured(contract, form, name) <= 1


@pytest.mark.parametrize("contract", [LonghornScan, SelectiveScan, FeedbackScan])
def test_the_memory_check_notices_a_state_for_each_chunk(monkeypatch, contract):
    for module in {scan, cpu, feedback_cpu}:
        monkeypatch.setattr(module, "interval", lambda states, chunk: chunk)
    assert measured(contract, next(iter(contract.forms)), "cpu") > 1.4


def test_the_memory_check_notices_a_partial_sum_for_each_block(monkeypatch):
    monkeypatch.setattr(cpu, "parts_of", lambda blocks, width, states: blocks)
    assert measured(LonghornScan, "", "cpu") > 1.4


@pytest.mark.parametrize("contract", [LonghornScan, SelectiveScan, FeedbackScan])
def test_saved_states_have_the_strides_that_fakes_promise(backend, contract):
    """Between saved states lie as many tokens as there are states, or a little more."""
    op = contract()
    tensors = op.draw(L=40, D=2, N=70, dtype=torch.float32)
    for form in contract.forms:
        assert len(op.watched(tensors, Case(backend, form), lambda x: x).seen) == 2
