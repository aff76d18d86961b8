"""A row in pieces on several processes gives what it gives on one.

Processes of ``sequence_parallel_processes.py`` leave what these tests judge.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("sequence_parallel")

BUDGET = 1e-12  # of float64: some thousand sums of 1e-16, relative


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What every process left, by scene."""
    folder, count = tmp_path_factory.mktemp("pieces"), request.param
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.sequence_parallel_processes", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", **place},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return lambda scene: [
        json.loads((folder / f"{scene}-{rank}.json").read_text()) for rank in range(count)
    ]


@pytest.mark.parametrize("scene", ["zoo", "stock"])
def test_logits_and_gradients_are_those_of_one_process(found, scene):
    for errors in found(scene):
        for case, error in errors.items():
            assert all(size <= BUDGET for size in error.values()), (case, error)


def test_what_is_sent_does_not_grow_with_the_row(found):
    for sizes in found("sent"):
        for short, long in sizes.values():
            assert short == long > 0


def test_a_prompt_read_by_many_continues_as_one_read_by_one(found):
    assert all(e <= BUDGET for errors in found("prompts") for e in errors.values())


def test_a_group_waits_for_what_was_sent_in_it_and_no_other(found):
    assert all(in_flight == [0, 0] for in_flight in found("groups"))


def test_ddp_and_fully_shard_have_the_gradients_of_one_process(found):
    assert all(e <= BUDGET for errors in found("wrapped") for e in errors.values())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *[("both ways", "directions"), ("batch norm", "norm_type"), ("grows", "attend")],
        *[("stock", "accelerate"), ("short", "input_ids"), ("short prompt", "input_ids")],
        *[("other model", "past_key_values"), ("labels LonghornForCausalLM", "shift_labels")],
        *[("labels MambaForCausalLM", "shift_labels")],
        *[("again LonghornForCausalLM", "new one"), ("again MambaForCausalLM", "new one")],
    ],
)
def test_what_cannot_be_passed_on_is_refused(found, case, name):
    for said in found("refused"):
        assert name in said[case]
        assert "\n" not in said[case]
