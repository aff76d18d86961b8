"""A row in pieces on several processes gives what it gives on one, for less memory of each.

Processes of ``sequence_parallel_processes.py`` leave what most of these tests judge.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.kernels.memory import peak_bytes
from torch.nn.functional import cross_entropy

from ssmzoo import families, load_family
from ssmzoo.modeling import StateCache, sequence_parallel, sequence_piece

pytestmark = [pytest.mark.xdist_group("sequence_parallel"), pytest.mark.long]

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
        [sys.executable, "-m", "tests.modeling.sequence_parallel_processes", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
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
        *[("other model", "cache"), ("labels LonghornForCausalLM", "shift_labels")],
        *[("labels MambaForCausalLM", "shift_labels")],
        *[("again LonghornForCausalLM", "new one"), ("again MambaForCausalLM", "new one")],
    ],
)
def test_what_cannot_be_passed_on_is_refused(found, case, name):
    for said in found("refused"):
        assert name in said[case]
        assert "\n" not in said[case]


@pytest.fixture
def piece_of(monkeypatch):
    """Return the piece that one of two processes would read of a batch."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(sequence_parallel, "sequence_cache", lambda model, group, rows: rows)

    def piece(rank, *given, **named):
        monkeypatch.setattr(dist, "get_rank", lambda group: rank)
        return sequence_piece(None, *given, **named)

    return piece


@pytest.mark.parametrize("ends", [[0, 2, 5], [0, 2, 2, 5], [0, 2, 5, 5], [0, 0, 2, 5, 5, 5]])
def test_packed_sequences_without_tokens_are_in_no_piece(piece_of, ends):
    ids, cu_seqlens = torch.arange(5)[None], torch.tensor(ends)
    cut = [piece_of(rank, ids, cu_seqlens=cu_seqlens)["cu_seqlens"] for rank in (0, 1)]
    assert [piece.tolist() for piece in cut] == [[0, 2], [0, 3]]


@pytest.mark.parametrize("shape", [(1, 9), (1, 3), (2, 5), (5,)])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_refuses_a_mask_of_another_shape(piece_of, shape, rank):
    with pytest.raises(ValueError, match=r"attention_mask must .*\[1, 5\], got"):
        piece_of(rank, torch.arange(5)[None], torch.ones(shape))


@pytest.mark.parametrize("family", sorted(families()))
def test_a_quarter_of_a_row_needs_less_than_two_sevenths_of_its_memory(family):
    found = load_family(family)
    # the softmax of DSS's kernel is over a length that is fixed
    settings = {"kernel_variant": "exp"} if family == "dss" else {}
    model = found.causal_lm_class(found.config(**{**found.tiny, **settings}))
    ids = torch.randint(model.config.vocab_size, (1, 1 << (13 if family == "bmojo" else 15)))
    with torch.no_grad():
        begun = model(ids[:, :8], cache=StateCache(model.config)).cache

    def whole(length):
        logits = model(ids[:, :length], use_cache=False).logits[0]
        cross_entropy(logits, ids[0, :length]).backward()

    def piece(length):
        """Be a process that others stand before and behind: states have gradients, too."""
        cache = StateCache(model.config)
        cache.set_states(
            [
                {n: s.clone().requires_grad_(s.is_floating_point()) for n, s in held.items()}
                for held in begun.get_states()
            ]
        )
        logits = model(ids[:, :length], cache=cache, use_cache=True).logits[0]
        ends = [s for held in cache.get_states() for s in held.values() if s.requires_grad]
        assert ends
        loss = cross_entropy(logits, ids[0, :length])
        torch.autograd.backward([loss, *ends], [None, *map(torch.ones_like, ends)])

    peaks = []
    for call, length in ((whole, ids.shape[1]), (piece, ids.shape[1] // 4)):
        call(256)  # what is made once
        peaks.append(peak_bytes(lambda c=call, n=length: c(n)))
    assert peaks[0] >= 3.5 * peaks[1], peaks
