"""Induction heads in all their variants, against sequences that are listed one by one."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from ssmzoo.data.labelled import ExampleSource, HeldOutExamples
from ssmzoo.tasks import IGNORED, induction, induction_documents, induction_heads, load_task
from ssmzoo.tasks.induction import induction_heads_zero

PAPER = {"vocab_size": 9, "num_symbols": 7}
# Tables 1 and 3 to 5
VARIANTS = [
    {"seq_len": 16},
    {"seq_len": 256},
    {"seq_len": 16, "noise_length": 1},
    {"seq_len": 16, "noise_length": 2},
    {"seq_len": 16, "target_length": 2},
    {"seq_len": 16, "trigger": [6, 7]},
    {"seq_len": 16, "trigger": [7, 7]},
    {"seq_len": 11, "trigger": [1, 2, 1], "target_length": 3, "noise_length": 2},
]


def occurrences(row, trigger):
    count = len(trigger)
    return [i for i in range(len(row) - count + 1) if row[i : i + count] == trigger]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_row_holds_the_trigger_twice_and_asks_for_what_followed_it_first(variant):
    input_ids, labels = induction_heads(200, **PAPER, **variant, seed=1)
    length, tar = variant["seq_len"], variant.get("target_length", 1)
    trigger = variant.get("trigger", [7])
    assert input_ids.shape == labels.shape == (200, length + tar)
    assert input_ids.dtype == labels.dtype == np.int64
    assert (labels[:, :length] == IGNORED).all()
    for row, answer in zip(input_ids.tolist(), labels[:, length:].tolist(), strict=True):
        sequence, rest = row[:length], row[length:]
        first, last = occurrences(sequence, trigger)
        assert last == length - len(trigger)
        begin = first + len(trigger) + variant.get("noise_length", 0)
        assert answer == sequence[begin : begin + tar]
        assert begin + tar <= last
        assert set(sequence) <= set(range(1, 8))
        # filler, and at the end, where nothing is predicted, the last answer
        assert rest == [0] * (tar - 1) + answer[-1:]


def exactly(seq_len, num_symbols, trigger, target_length=1, noise_length=0):
    """Return the probability of every sequence: places alike, and at a place all that fit."""
    count = len(trigger)
    places = range(seq_len - 2 * count - target_length - noise_length + 1)
    found = Counter()
    for place in places:
        fits = []
        for fill in product(range(1, num_symbols + 1), repeat=seq_len - 2 * count):
            row = [*fill[:place], *trigger, *fill[place:], *trigger]
            if len(occurrences(row, trigger)) == 2:
                fits.append(tuple(row))
        for row in fits:
            found[row] += 1 / len(fits) / len(places)
    return found


@pytest.mark.parametrize(
    "variant",
    [
        {"seq_len": 7, "num_symbols": 3, "trigger": [2], "target_length": 2, "noise_length": 1},
        {"seq_len": 8, "num_symbols": 3, "trigger": [1, 2]},  # only what is wrong is drawn again
        {"seq_len": 8, "num_symbols": 3, "trigger": [2, 2]},  # the whole row is
        {"seq_len": 9, "num_symbols": 2, "trigger": [1, 2, 1]},
    ],
    ids=str,
)
def test_every_sequence_that_fits_is_as_likely_as_the_definition_has_it(variant):
    rows = 20_000
    input_ids, _ = induction_heads(rows, **variant, vocab_size=5, seed=3)
    found = Counter(map(tuple, input_ids[:, : variant["seq_len"]].tolist()))
    exact = exactly(**variant)
    assert found.keys() <= exact.keys()
    chi_squared = sum((found[row] - rows * p) ** 2 / (rows * p) for row, p in exact.items())
    freedom = len(exact) - 1
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("trigger", [[7], [6, 7], [3, 3]], ids=str)
def test_the_first_trigger_is_everywhere_alike_and_guessing_is_a_sixth_or_less(trigger):
    """G18 of the paper's specification."""
    rows = 40_000
    input_ids, labels = induction_heads(rows, seq_len=16, **PAPER, trigger=trigger, seed=0)
    windows = np.lib.stride_tricks.sliding_window_view(input_ids[:, :16], len(trigger), axis=1)
    first = np.bincount((windows == trigger).all(axis=2).argmax(axis=1)) / rows
    places = 16 - 2 * len(trigger)
    assert len(first) == places
    assert np.abs(first * places - 1).max() < 5 * np.sqrt(places / rows)
    best = np.bincount(labels[:, -1]).max() / rows
    assert best < 1 / 6 + 5 * np.sqrt(1 / 6 / rows)


def test_the_eight_sequences_of_length_four_are_all_there_are():
    input_ids, labels = induction_heads_zero()
    # its ids are the symbols less one, because it has no filler
    assert set(map(tuple, (input_ids[:, :4] + 1).tolist())) == set(exactly(4, 3, [1]))
    assert len(input_ids) == 8
    assert (labels[:, :4] == IGNORED).all()
    for row, answer in zip(input_ids.tolist(), labels[:, 4].tolist(), strict=True):
        assert row[row.index(0) + 1] == row[4] == answer


@pytest.mark.parametrize(
    "trigger", [7, "7", [1.5], [True], [[1]], [[1], [1, 2]], np.array(3)], ids=repr
)
def test_a_trigger_that_is_no_list_of_whole_numbers_is_a_type_error(trigger):
    with pytest.raises(TypeError, match=r"trigger must be a list of symbols, as \[7\], got"):
        induction_heads(2, seq_len=16, **PAPER, seed=0, trigger=trigger)


@pytest.mark.parametrize("value", [7.0, "7", True, float("nan")], ids=repr)
def test_a_number_that_is_not_whole_is_a_type_error(value):
    for name in ("num_examples", "seq_len", "vocab_size", "num_symbols", "noise_length"):
        arguments = {"num_examples": 2, "seq_len": 16, **PAPER, "seed": 0, name: value}
        with pytest.raises(TypeError, match=rf"^{name} must be a whole number, got {value!r}$"):
            induction_heads(**arguments)


def test_a_trigger_that_noise_cannot_avoid_is_an_error(monkeypatch):
    monkeypatch.setattr(induction, "_DRAWS", 2000)
    with pytest.raises(ValueError, match=r"trigger must be easy to avoid in 80 symbols.*\[1, 1\]"):
        induction_heads(400, seq_len=80, vocab_size=3, trigger=[1, 1], seed=0)


def test_documents_hold_all_symbols_of_an_answer():
    made = {"seq_len": 16, **PAPER, "trigger": [6, 7], "target_length": 2, "seed": 5}
    rows = induction_documents(num_examples=50, **made, version=1.0)["test"].to_list()
    _, labels = induction_heads(50, **made)
    for row, answer in zip(rows, labels[:, 16:].tolist(), strict=True):
        assert len(row["context"].split()) == 16
        assert row["answer"].split() == [f"t{symbol}" for symbol in answer]


FRESH = {"seq_len": 16, **PAPER, "num_train": 3000, "num_validation": 700, "fresh": True}


def test_fresh_rows_come_in_order_and_each_validation_has_others():
    task = load_task("induction_heads", "train", 0, **FRESH)
    source = ExampleSource(task, 0, 512)
    first = source.next_batch(512).batch
    assert (first.inputs == task.batch(np.arange(512)).inputs).all()
    held_out = HeldOutExamples(load_task("induction_heads", "validation", 0, **FRESH), 700, 512)
    rows = {
        step: np.concatenate([part.batch.inputs for part in held_out.after(step)])
        for step in (0, 10, 20)
    }
    again = np.concatenate([part.batch.inputs for part in held_out.after(10)])
    assert (rows[10] == again).all()
    assert (rows[10] != rows[20]).any()
    assert rows[10].shape == (700, 17)
    fixed = load_task("induction_heads", "test", 0, **FRESH)
    share = HeldOutExamples(fixed, 700, 512)
    assert share.after(5) is share
