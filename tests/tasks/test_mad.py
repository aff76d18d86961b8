"""MAD's problems against their definitions."""

import numpy as np
import pytest

from ssmzoo.tasks import (
    IGNORED,
    MAD_PROBLEMS,
    compression,
    fuzzy_recall,
    load_task,
    mad_documents,
    memorization,
    noisy_recall,
    selective_copying,
)


def answered(labels):
    return np.argwhere(labels != IGNORED)


@pytest.mark.parametrize("name", MAD_PROBLEMS)
def test_the_seed_decides_and_labels_are_ids(name):
    make = MAD_PROBLEMS[name]
    one, two, other = make(40, seed=3), make(40, seed=3), make(40, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0], other[0])
    input_ids, labels = one
    assert input_ids.shape == labels.shape
    assert input_ids.dtype == labels.dtype == np.int64
    assert answered(labels).size
    asked = labels[labels != IGNORED]
    assert asked.min() >= 1
    assert input_ids.min() >= 0


def test_noisy_recall_asks_for_the_value_that_the_key_had_before():
    input_ids, labels = noisy_recall(50, seq_len=96, vocab_size=32, num_noise=15, seed=0)
    keys = 8
    noise = input_ids > 2 * keys
    assert 0.05 < noise.mean() < 0.2  # one in five places where a pair may begin
    for row, label in zip(input_ids, labels, strict=True):
        known, t = {}, 0
        while t < 95:
            if row[t] > 2 * keys:
                assert label[t] == IGNORED
                t += 1
                continue
            assert 1 <= row[t] <= keys < row[t + 1] <= 2 * keys
            assert label[t] == IGNORED
            assert label[t + 1] == known.get(row[t], IGNORED)
            assert known.setdefault(row[t], row[t + 1]) == row[t + 1]
            t += 2


def test_noisy_recall_without_noise_has_no_noise_tokens():
    input_ids, _ = noisy_recall(20, seq_len=32, vocab_size=17, num_noise=0, noise=0.0, seed=0)
    assert (input_ids[:, ::2] <= 8).all()
    assert (input_ids[:, 1::2] > 8).all()


def test_fuzzy_recall_asks_for_all_of_a_value_whose_key_was_seen():
    input_ids, labels = fuzzy_recall(60, seq_len=64, vocab_size=16, num_pairs=5, seed=1)
    lengths = set()
    for row, label in zip(input_ids, labels, strict=True):
        known, t = {}, 0
        while t < 64 and row[t]:
            start = t
            while row[t] <= 7:
                t += 1
            middle = t
            while t < 64 and row[t] > 7:
                t += 1
            key, value = tuple(row[start:middle]), tuple(row[middle:t])
            lengths |= {len(key), len(value)}
            asked = label[middle:t]
            assert (asked == value).all() if key in known else (asked == IGNORED).all()
            assert (label[start:middle] == IGNORED).all()
            assert known.setdefault(key, value) == value
        keys = list(known)
        assert len({key[0] for key in keys}) == len(keys)
        assert not row[t:].any()
    assert lengths == {1, 2, 3}


def test_selective_copying_asks_for_the_symbols_in_their_order():
    input_ids, labels = selective_copying(30, seq_len=64, vocab_size=16, num_tokens=6, seed=2)
    for row, label in zip(input_ids, labels, strict=True):
        tokens = row[:57][row[:57] > 0]
        assert len(tokens) == 6
        assert tokens.max() < 15
        assert (row[57:63] == 15).all()
        assert np.array_equal(label[58:], tokens)
        assert (label[:58] == IGNORED).all()


def test_compression_asks_for_every_place_once():
    input_ids, labels = compression(30, num_tokens=7, vocab_size=20, seed=3)
    for row, label in zip(input_ids, labels, strict=True):
        places = row[8::2] - 13
        assert row[7] == 12
        assert sorted(places) == list(range(7))
        assert np.array_equal(label[9::2], row[:7][places])
        assert np.array_equal(row[9::2], label[9::2])


def test_memorization_has_one_dictionary_for_all_rows_and_seeds():
    known = {}
    for seed in (0, 1):
        input_ids, labels = memorization(50, seq_len=16, vocab_size=33, seed=seed)
        assert not input_ids[:, 1::2].any()
        for key, value in zip(input_ids[:, ::2].flat, labels[:, 1::2].flat, strict=True):
            assert known.setdefault(key, value) == value
    other = memorization(50, seq_len=16, vocab_size=33, dictionary=1, seed=0)[1]
    assert not np.array_equal(other, memorization(50, seq_len=16, vocab_size=33, seed=0)[1])


@pytest.mark.parametrize("name", MAD_PROBLEMS)
def test_recipes_and_lm_eval_get_the_same_problem(name):
    task = load_task(name, "validation", 5, num_validation=20)
    assert len(task) == 20
    assert task.objective == "causal_lm"
    assert task.batch(range(20)).inputs.max() < task.vocab_size
    with pytest.raises(LookupError, match="has no argument 'vocab'; did you mean 'vocab_size'"):
        load_task(name, "train", 0, vocab=3)
    split = mad_documents(problem=name, num_examples=20, vocab_size=task.vocab_size, seed=0)
    rows, labels = MAD_PROBLEMS[name](20, vocab_size=task.vocab_size, seed=0)
    for document, row, label in zip(split["test"], rows, labels, strict=False):
        context = document["context"].split()
        assert context == [f"t{i}" for i in row[: len(context)]]
        assert document["answer"] == f" t{label[len(context)]}"


def test_an_unknown_problem_is_named():
    with pytest.raises(LookupError, match="did you mean 'compression'"):
        mad_documents(problem="compresion", num_examples=1, vocab_size=48, seed=0)


def test_random_filler_leaves_pairs_and_answers_alone():
    plain, filled = (
        load_task("mqar", "test", 0, num_test=20, vocab_size=64, random_filler=filler)
        for filler in (False, True)
    )
    one, two = (task.batch(range(20)) for task in (plain, filled))
    asked = one.labels != IGNORED
    assert (one.inputs == 0).mean() > 0.5
    assert (two.inputs == 0).mean() < 0.1
    assert asked.sum() == (two.labels != IGNORED).sum()
