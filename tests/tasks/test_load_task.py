"""One interface for all tasks: names and arguments are closed, batches are pure functions."""

import numpy as np
import pytest

from ssmzoo.tasks import Ragged, induction_heads_zero, load_task, mqar, pathfinder

ROWS = {"seq_len": 16, "vocab_size": 9, "num_symbols": 7, "num_train": 3000}


@pytest.mark.parametrize(
    ("name", "arguments", "fresh"),
    [
        ("listops", {"num_train": 20, "min_length": 4, "max_length": 60}, False),
        ("pathfinder", {"num_train": 20}, False),
        ("mqar", {"num_train": 50}, False),
        ("copying", {"length": 10}, False),
        ("copying", {"length": 10, "fresh": True}, True),
        ("delay", {"length": 40, "delay": 5, "rms": 1}, True),
        ("delay", {"length": 40, "delay": 5, "fresh": False}, False),
        ("induction_heads", ROWS, False),
        ("induction_heads", {**ROWS, "fresh": True}, True),
        ("state_tracking", {"group": "S3", "num_train": 50, "fresh": True}, True),
    ],
)
def test_an_example_depends_on_seed_split_epoch_and_index_alone(
    name, arguments, fresh, monkeypatch
):
    monkeypatch.setattr(pathfinder, "_CANDIDATES", 64)
    task, again = (load_task(name, "train", 3, **arguments) for _ in range(2))
    assert task.fresh == fresh
    last = len(task) - 1  # in another block of those drawn together
    indices = [5, 0, last, 5]
    batch = task.batch(indices, 2)
    for i, index in enumerate(indices):
        one = again.batch(np.array([index]), 2)
        length = int(one.lengths[0])
        assert batch.lengths[i] == length == one.inputs.shape[1]
        assert (batch.inputs[i, :length] == one.inputs[0]).all()
        assert (batch.inputs[i, length:] == 0).all()
        assert (batch.labels[i] == one.labels[0]).all()
    if task.kind == "tokens":
        assert batch.inputs.dtype == np.int64
        assert batch.inputs.max() < task.vocab_size
    else:
        assert batch.inputs.dtype == np.float32
        assert batch.inputs.shape[2] == task.input_channels
    whole = task.batch(range(12), 2).inputs
    assert len(np.unique(whole.reshape(12, -1), axis=0)) == 12
    assert np.array_equal(task.batch(range(12), 0).inputs, whole) != fresh
    for other in (("train", 4), ("validation", 3), ("test", 3)):
        sizes = {f"num_{s}": 12 for s in ("validation", "test") if name != "copying"}
        drawn = load_task(name, *other, **{**arguments, **sizes}).batch(range(12), 2)
        assert not np.array_equal(drawn.inputs, whole)


def test_recall_problems_come_in_the_same_form():
    task = load_task("mqar", "validation", 0, num_pairs=2, vocab_size=16, num_validation=30)
    assert (task.objective, task.vocab_size, task.num_labels) == ("causal_lm", 16, None)
    batch = task.batch(range(30))
    seed = int(np.random.SeedSequence([0, 1]).generate_state(1)[0])
    inputs, labels = mqar(30, num_pairs=2, vocab_size=16, seed=seed)
    assert (batch.inputs == inputs).all()
    assert (batch.labels == labels).all()
    train = load_task("mqar", "train", 0, num_pairs=2, vocab_size=16, num_train=30)
    assert (train.batch(range(30)).inputs != inputs).any()


def test_every_split_of_ih0_is_all_of_it():
    for split in ("train", "validation", "test"):
        task = load_task("induction_heads_zero", split, 3)
        assert (task.objective, task.vocab_size, len(task)) == ("causal_lm", 3, 8)
        batch = task.batch([7, 0])
        inputs, labels = induction_heads_zero()
        assert (batch.inputs == inputs[[7, 0]]).all()
        assert (batch.labels == labels[[7, 0]]).all()
        assert batch.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("indices", [[-1], [50], [], [[1, 2]]])
def test_indices_outside_of_the_split_are_an_error(indices):
    task = load_task("mqar", "train", 0, num_train=50)
    with pytest.raises(IndexError, match="indices must be"):
        task.batch(indices)


@pytest.mark.parametrize(
    ("name", "split", "seed", "arguments", "error", "message"),
    [
        ("listop", "train", 0, {}, LookupError, "no task 'listop'; did you mean 'listops'"),
        ("mqar", "valid", 0, {}, LookupError, "split must be one of .* got 'valid'; did you mean"),
        ("mqar", "train", -1, {}, ValueError, "seed must be at least 0, got -1"),
        ("listops", "train", 0, {"max_len": 3}, LookupError, "has no argument 'max_len'; did you"),
        ("aan", "train", 0, {"zzz": 3}, LookupError, "task aan has no argument 'zzz'.* max_leng"),
        ("aan", "train", 0, {}, ValueError, "task aan needs the argument 'data'"),
    ],
)
def test_names_that_do_not_exist_and_what_is_missing_are_named(
    name, split, seed, arguments, error, message
):
    with pytest.raises(error, match=message):
        load_task(name, split, seed, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("copying", {"length": "10"}, "length of task copying must be int, got '10'"),
        ("copying", {"length": True}, "length of task copying must be int, got True"),
        ("copying", {"fresh": 1}, "fresh of task copying must be bool, got 1"),
        ("delay", {"cutoff": "x"}, "cutoff of task delay must be float, got 'x'"),
        ("pathfinder", {"cache": 3}, "cache of task pathfinder must be"),
        ("mqar", {"random_filler": "no"}, "random_filler of task mqar must be bool, got 'no'"),
        ("induction_heads", {"trigger": 7}, r"trigger .* must be Sequence or None.* give \[7\]$"),
        ("induction_heads", {"trigger": "67"}, "trigger .* must be Sequence or None, got '67'"),
    ],
)
def test_an_argument_of_the_wrong_type_is_a_type_error(name, arguments, message):
    with pytest.raises(TypeError, match=message):
        load_task(name, "train", 0, **arguments)


PAPER = {"seq_len": 16, "vocab_size": 9, "num_symbols": 7}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("copying", {"length": 0}, "length must be at least 1, got 0"),
        ("copying", {"vocab_size": 1}, "vocab_size must be at least 2, got 1"),
        ("copying", {"num_test": 0}, "num_test must be at least 1, got 0"),
        ("delay", {"delay": 4000}, "delay must be between 0 and length - 1 = 3999, got 4000"),
        ("delay", {"cutoff": 0.6}, "cutoff must be between 1 / length and 0.5, got 0.6"),
        ("delay", {"rms": 0.0}, "rms must be positive, got 0.0"),
        ("delay", {"length": 1}, "length must be at least 2, got 1"),
        ("noisy_recall", {"noise": 1.0}, "noise must be at least 0 and below 1, got 1.0"),
        ("noisy_recall", {"vocab_size": 17}, "vocab_size must leave a key and a value"),
        ("fuzzy_recall", {"num_pairs": 8}, "vocab_size must be at least 17 for 8 keys"),
        ("selective_copying", {"seq_len": 32}, "seq_len must be at least 33"),
        ("compression", {"vocab_size": 34}, "vocab_size must be at least 35 for 31 places"),
        ("memorization", {"seq_len": 1}, "seq_len must be at least 2, got 1"),
        ("memorization", {"num_train": 0}, "num_train must be at least 1, got 0"),
        ("pathfinder", {"resolution": 64}, "resolution must be 32 or 128, got 64"),
        ("pathfinder", {"contour_length": 10}, "contour_length must be 6, 9 or 14, got 10"),
        ("pathfinder", {"num_train": 0}, "num_train must be at least 1, got 0"),
        ("listops", {"min_length": 0}, "min_length must be at least 1, got 0"),
        ("listops", {"max_length": 500}, "max_length must be at least 501, got 500"),
        ("listops", {"max_depth": 0}, "max_depth must be at least 1, got 0"),
        ("listops", {"max_args": 1}, "max_args must be at least 2, got 1"),
        ("mqar", {"seq_len": 15}, r"seq_len must be at least 4 \* num_pairs = 16 .* got 15"),
        ("mqar", {"vocab_size": 9}, "vocab_size must be at least 10 for 4 distinct keys, got 9"),
        ("mqar", {"num_pairs": 0}, "num_pairs must be at least 1, got 0"),
        ("mqar", {"power": 0.0}, "power must be positive, got 0.0"),
        ("induction_heads", {"seq_len": 2}, "seq_len must be at least 3 to hold two triggers of 1"),
        ("induction_heads", {"target_length": 15}, "at least 17 .* a target of 15, got 16"),
        ("induction_heads", {"noise_length": 14}, "at least 17 .* 14 symbols between .* got 16"),
        ("induction_heads", {"trigger": [1, 2] * 4}, "at least 17 to hold two triggers of 8"),
        ("induction_heads", {"trigger": [8]}, r"symbols of 1 \.\. 7, got \[8\]; choose among"),
        ("induction_heads", {"trigger": [2**70]}, r"symbols of 1 \.\. 7, got \[1180"),
        ("induction_heads", {"trigger": []}, r"symbols of 1 \.\. 7, got \[\]"),
        ("induction_heads", {"num_symbols": 9}, "num_symbols must be at most .* = 8, got 9"),
        ("induction_heads", {"num_symbols": 1}, "num_symbols must be at least 2, got 1"),
        ("induction_heads", {"target_length": 0}, "target_length must be at least 1, got 0"),
        ("induction_heads", {"noise_length": -1}, "noise_length must be at least 0, got -1"),
        ("induction_heads", {"target_length": 20, "fresh": True}, "a target of 20, got 16"),
    ],
)
def test_an_argument_out_of_range_is_named(name, arguments, message):
    given = {**PAPER, **arguments} if name == "induction_heads" else arguments
    with pytest.raises(ValueError, match=message):
        load_task(name, "train", 0, **given)


def test_ragged_rows_come_back_padded_on_the_right():
    rows = [np.arange(1, n + 1, dtype=np.uint8) for n in (3, 0, 5, 1)]
    padded, lengths = Ragged.of(rows).padded(np.array([3, 0, 1]))
    assert padded.tolist() == [[1, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert lengths.tolist() == [1, 3, 0]
    assert padded.dtype == np.int64
    assert Ragged.of(rows).padded(np.array([1]))[0].tolist() == [[0]]
