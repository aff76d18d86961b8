"""Plans of reads: every request is read and scored, in order, within the limits, and cheaply."""

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmzoo.evaluation import planner
from ssmzoo.evaluation.planner import WIDER, WORTH, Limits, Request, plan, shares, tokens_alone

MANY = 10**9


def unlimited(rows=8):
    return Limits(rows, None, MANY, lambda tokens: 1)


def follow(requests, limits):
    """Read as a plan says, and fail where it cannot be done; return the plan."""
    planned = plan(requests, limits)
    kept, columns, ended, scored = [], [], [], [[] for _ in requests]
    for batch in planned.batches:
        del kept[batch.depth :]
        rows = []
        for read in batch.reads:
            seen = kept[-1][read.parent] if batch.depth else ()
            tokens = requests[read.request].tokens[: read.end]
            assert tokens[: read.begin] == seen  # the state is of these tokens
            rows.append(tokens)
            for answer in read.answers:
                assert read.begin <= answer.begin < answer.end <= read.end
                assert requests[answer.request].tokens[: answer.end] == tokens[: answer.end]
                scored[answer.request] += range(answer.begin, answer.end)
            for index in read.last:
                assert tokens == requests[index].tokens[:-1]
                ended.append(index)
                # what ends a request comes after all that scores it
                assert scored[index] == [*range(requests[index].predictor, read.end)]
        assert len(batch.reads) <= limits.rows * (WIDER if batch.depth else 1)
        width = max(read.end - read.begin for read in batch.reads)
        assert len(rows) == 1 or limits.tokens is None or len(rows) * width <= limits.tokens
        if batch.keeps:
            kept.append(rows)
            # a row is as wide as the longest of its batch, at each depth
            columns[batch.depth :] = [sum(columns[batch.depth - 1 : batch.depth]) + width]
            held = sum(
                len(rows) * limits.state_bytes(seen)
                for rows, seen in zip(kept, columns, strict=True)
            )
            assert held <= limits.memory
    assert sorted(ended) == [*range(len(requests))]
    return planned


def least_tokens(requests):
    """Count each beginning of any request once."""
    return len({r.tokens[:n] for r in requests for n in range(1, len(r.tokens))})


pieces = st.lists(st.integers(0, 1), max_size=60).map(tuple)


@st.composite
def trees(draw):
    """Requests that share beginnings of a few pieces, and end where they like."""
    pool = draw(st.lists(pieces, min_size=1, max_size=4))
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        picked = draw(st.lists(st.sampled_from(pool), max_size=4))
        tokens = (7, *sum(picked, ()), draw(st.integers(0, 1)))
        tokens = tokens[: draw(st.integers(2, len(tokens)))]
        requests.append(Request(tokens, draw(st.integers(0, min(5, len(tokens) - 1)))))
    return requests


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    trees(),
    st.integers(1, 5),
    st.sampled_from([None, 80]),
    st.sampled_from([0, 3, 10, MANY]),
    st.sampled_from([0, 0.1]),
)
def test_a_plan_reads_and_scores_every_request_within_its_limits(
    requests, rows, tokens, memory, growth
):
    planned = follow(requests, Limits(rows, tokens, memory, lambda seen: 1 + growth * seen))
    assert least_tokens(requests) <= planned.read <= tokens_alone(requests)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees())
def test_with_room_for_states_little_is_read_again(requests):
    # each place where requests part may be read again, if it is worth no state
    assert follow(requests, unlimited()).read <= least_tokens(requests) + WORTH * len(requests)


def text(rng, length):
    return tuple(rng.choices(range(256), k=length))


def common(a, b):
    """Count the first tokens that two sequences share."""
    parting = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(parting, min(len(a), len(b)))


def least_recently_used(requests, states):
    """Count the tokens that are read one request at a time, with so many states at hand.

    They are of all places where requests part. The least recently used one makes room, but not that
    which a new one is read from.
    """
    sequences = sorted(r.tokens[:-1] for r in requests)
    held, count = [], 0  # the beginnings whose states are there, the latest last
    for tokens in sequences:
        parting = {common(tokens, other) for other in sequences}
        at = max((h for h in held if tokens[: len(h)] == h), key=len, default=())
        count += len(tokens) - len(at)
        if at:
            held.append(held.pop(held.index(at)))
        for place in sorted(n for n in parting if n > len(at)):
            if len(held) == states:
                others = [h for h in held if h != at]
                if not others:
                    continue
                held.remove(others[0])
            at = tokens[:place]
            held.append(at)
    return count


def branches(rng, depth, before):
    """Requests that part again and again, none of which begins with another."""
    found = []
    for number in range(rng.choice((2, 2, 3, 5))):
        begun = (*before, number, *rng.choices(range(9), k=rng.choice((5, 20, 60, 200))))
        deeper = depth > 1 and rng.random() < 0.8
        found += branches(rng, depth - 1, begun) if deeper else [Request((*begun, 0), 1)]
    return found


@pytest.mark.parametrize("states", [1, 2, 3])
def test_a_bound_costs_no_more_than_dropping_the_least_recently_used_state(states, monkeypatch):
    monkeypatch.setattr(planner, "WORTH", 1)
    least = []
    for seed in range(25):
        rng = random.Random(seed)
        requests = branches(rng, rng.choice((3, 4, 5)), (0,) * 50)
        read = follow(requests, Limits(4, None, states, lambda seen: 1)).read
        other = least_recently_used(requests, states)
        assert read <= other
        least.append(read / other)
    assert min(least) < 0.7


def test_examples_contexts_and_answers_are_each_read_once():
    rng = random.Random(0)
    examples = text(rng, 1100)
    contexts = [examples + text(rng, 130) for _ in range(60)]
    requests = [Request(c + text(rng, 60), 60) for c in contexts for _ in range(4)]
    planned = follow(requests, unlimited())
    # an answer's last token is not read
    assert planned.read == 1100 + 60 * (130 + 4 * 59)
    assert tokens_alone(requests) == 240 * (1100 + 130 + 59)
    assert len(planned.batches) == 1 + 2 + 8


def test_answers_of_one_token_are_one_read():
    rng = random.Random(0)
    context = text(rng, 40)
    planned = follow([Request((*context, k), 1) for k in range(5)], unlimited())
    (batch,) = planned.batches
    assert len(batch.reads) == 1
    assert planned.read == 40


@pytest.mark.parametrize(
    ("requests", "read"),
    [
        ([Request((1,) * 50, 3)] * 9, 49),  # all equal
        ([Request((k, *[1] * 49), 3) for k in range(9)], 9 * 49),  # all different
        ([Request((1,) * n, 1) for n in (40, 80, 120)], 119),  # one the beginning of another
        ([Request((1, k), 1) for k in range(9)], 1),  # empty contexts
        ([Request((1,), 0)], 0),  # a prompt of one token, which is read by others
        ([Request((1,), 0), Request((1, 2), 0), Request((1, 3), 0)], 1),
        ([], 0),
    ],
)
def test_extreme_requests(requests, read):
    assert follow(requests, unlimited()).read == read


def test_equal_tokens_that_are_worth_no_state_are_read_again():
    below = [Request((*[1] * (WORTH - 1), k, 5), 1) for k in (2, 3)]
    assert len(follow(below, unlimited()).batches) == 1
    above = [Request((*[1] * WORTH, k, 5), 1) for k in (2, 3)]
    assert len(follow(above, unlimited()).batches) == 2


def test_a_chain_of_beginnings_is_no_problem_of_depth():
    requests = [Request((1,) * length, 1) for length in range(2, 3000)]
    assert follow(requests, unlimited()).read < tokens_alone(requests) / 50


def test_little_memory_costs_tokens_and_nothing_else():
    rng = random.Random(0)
    contexts = [text(rng, 100) + text(rng, 40) for _ in range(8)]
    requests = [Request(c + text(rng, 9), 9) for c in contexts for _ in range(3)]
    read = [
        follow(requests, Limits(8, None, memory, lambda tokens: 1)).read
        for memory in (MANY, 4, 1, 0)
    ]
    assert read == [8 * (140 + 3 * 8)] * 3 + [24 * 148]


@pytest.mark.parametrize("seed", range(40))
def test_padding_counts_where_states_grow(seed):
    rng, requests = random.Random(seed), []
    for _ in range(5):
        context = text(rng, rng.choice((40, 100, 1500)))
        for _ in range(rng.randint(1, 3)):
            question = context + text(rng, rng.choice((40, 600, 1500)))
            for _ in range(rng.randint(1, 3)):
                answer = question + text(rng, rng.choice((40, 600)))
                requests += [Request(answer + text(rng, 9), 9) for _ in range(rng.randint(1, 3))]
    follow(requests, Limits(8, None, rng.choice((4_000, 8_000, 16_000)), lambda seen: seen))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(trees(), st.integers(1, 5))
def test_processes_get_every_request_once(requests, parts):
    divided = shares(requests, parts)
    assert len(divided) == parts
    assert sorted(chain(*divided)) == [*range(len(requests))]


def test_processes_get_whole_contexts_and_about_equal_work():
    rng = random.Random(0)
    examples = text(rng, 300)
    contexts = [examples + text(rng, 100) for _ in range(40)]
    requests = [Request(c + text(rng, 20), 20) for c in contexts for _ in range(4)]
    for parts in (2, 3):
        divided = shares(requests, parts)
        owners = [
            {p for p, part in enumerate(divided) for i in part if i // 4 == c} for c in range(40)
        ]
        assert all(len(owner) == 1 for owner in owners)
        assert max(map(len, divided)) <= 1.3 * len(requests) / parts
