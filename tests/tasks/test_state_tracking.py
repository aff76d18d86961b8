"""State tracking, beside products of permutations written as tuples."""

from itertools import permutations, product

import numpy as np
import pytest

from ssmzoo.tasks import IGNORED, length_argument, load_task, state_tracking


def is_even(p):
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 0


def elements_of(group):
    """Return a group's elements and how two of them are multiplied."""
    kind, degree = group[0], int(group[1:])
    if kind == "Z":
        return list(range(degree)), lambda f, g: (f + g) % degree
    found = [p for p in permutations(range(degree)) if kind == "S" or is_even(p)]
    return found, lambda f, g: tuple(f[i] for i in g)


@pytest.mark.parametrize(("group", "order"), [("Z2", 2), ("Z3", 3), ("S3", 6), ("A5", 60)])
def test_a_label_is_the_product_of_all_symbols_up_to_it(group, order):
    elements, times = elements_of(group)
    assert len(elements) == order
    input_ids, labels = state_tracking(20, group=group, seq_len=30, seed=3)
    assert input_ids.shape == labels.shape == (20, 31)
    assert (input_ids[:, -1] == 0).all()
    assert (labels[:, 0] == IGNORED).all()
    for symbols, states in zip(input_ids[:, :-1] - 1, labels[:, 1:] - 1, strict=True):
        state = elements[0]
        for symbol, expected in zip(symbols, states, strict=True):
            state = times(state, elements[symbol])
            assert elements[expected] == state


def test_parity_is_the_number_of_ones_and_every_symbol_comes():
    input_ids, labels = state_tracking(500, group="Z2", seq_len=8, seed=0)
    assert ((labels[:, 1:] - 1) == (input_ids[:, :-1] - 1).cumsum(axis=1) % 2).all()
    seen = {tuple(row) for row in state_tracking(4000, group="S3", seq_len=2, seed=1)[0][:, :2]}
    assert seen == set(product(range(1, 7), repeat=2))


@pytest.mark.parametrize("group", ["", "S", "Z1", "A2", "S6", "A7", "Z1001", "D4", "S03", "s3"])
def test_a_group_that_is_not_there_is_refused(group):
    with pytest.raises(LookupError, match=f"group must be one of Z2 .. Z1000, .*got '{group}'"):
        state_tracking(1, group=group, seed=0)


def test_it_is_a_task_with_splits_of_its_own_and_any_length():
    args = {"group": "A5", "num_train": 50, "num_validation": 20, "num_test": 30}
    train, test = (load_task("state_tracking", split, 0, **args) for split in ("train", "test"))
    assert (train.objective, train.vocab_size) == ("causal_lm", 61)
    assert (len(train), len(test)) == (50, 30)
    rows = [task.batch(range(20)).inputs for task in (train, test)]
    assert rows[0].shape == (20, 41)
    assert not np.array_equal(*rows)
    assert length_argument("state_tracking") == "seq_len"
    longer = load_task("state_tracking", "test", 0, **args, seq_len=100)
    assert longer.batch([0]).inputs.shape == (1, 101)
    assert load_task("state_tracking", "test", 0).vocab_size == 7
