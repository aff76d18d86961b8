"""One interface for all tasks: names and arguments are closed, batches are pure functions."""

import numpy as np
import pytest

from ssmzoo.tasks import SUPERVISED_TASKS, Ragged, induction_heads_zero, load_task, mqar

SMALL = {
    "listops": {"num_train": 20, "min_length": 4, "max_length": 60},
    "pathfinder": {"num_train": 20},
    "copying": {"length": 10},
    "delay": {"length": 40, "delay": 5},
    "mqar": {"num_train": 50},
    "induction_heads": {"num_train": 50, "seq_len": 16, "vocab_size": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_holds_exactly_the_examples_at_its_indices(name):
    task = load_task(name, "train", 2, **SMALL[name])
    batch = task.batch([5, 0, 5])
    assert (batch.inputs[0] == batch.inputs[2]).all()
    for i, index in enumerate((5, 0)):
        one = task.batch(np.array([index]))
        length = int(one.lengths[0])
        assert batch.lengths[i] == length == one.inputs.shape[1]
        assert (batch.inputs[i, :length] == one.inputs[0]).all()
        assert (batch.inputs[i, length:] == 0).all()
        assert (batch.labels[i] == one.labels[0]).all()
    if task.kind == "tokens":
        assert batch.inputs.dtype == np.int64
        assert task.vocab_size is not None
        assert batch.inputs.max() < task.vocab_size
    else:
        assert batch.inputs.dtype == np.float32
        assert batch.inputs.shape[2] == task.input_channels


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


def test_an_unknown_task_split_or_argument_is_named_with_a_suggestion():
    with pytest.raises(LookupError, match="no task 'listop'; did you mean 'listops'"):
        load_task("listop", "train", 0)
    with pytest.raises(LookupError, match="listops has no argument 'max_len'; did you mean"):
        load_task("listops", "train", 0, max_len=3)
    with pytest.raises(LookupError, match=r"task aan has no argument 'zzz'.* max_leng"):
        load_task("aan", "train", 0, zzz=3)


@pytest.mark.parametrize("name", sorted(SUPERVISED_TASKS))
def test_every_task_refuses_another_split(name):
    needed = {"data": "x"} if name in ("aan", "forecast", "pictures", "speech_commands") else {}
    needed |= {"columns": ["OT"]} if name == "forecast" else {}
    with pytest.raises(LookupError, match=r"split must be one of .* got 'valid'; did you mean"):
        load_task(name, "valid", 0, **SMALL.get(name, {}), **needed)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("copying", {"length": "10"}, "length of task copying must be int, got '10'"),
        ("copying", {"length": True}, "length of task copying must be int, got True"),
        ("copying", {"fresh": 1}, "fresh of task copying must be bool, got 1"),
        ("delay", {"cutoff": "x"}, "cutoff of task delay must be float, got 'x'"),
        ("pathfinder", {"cache": 3}, "cache of task pathfinder must be"),
        (
            "induction_heads",
            {"trigger": 7},
            r"trigger of task induction_heads must be Sequence or None, got 7; give \[7\]$",
        ),
    ],
)
def test_an_argument_of_the_wrong_type_is_a_type_error(name, arguments, message):
    with pytest.raises(TypeError, match=message):
        load_task(name, "train", 0, **arguments)


def test_a_missing_argument_is_named_and_a_whole_number_is_a_float():
    with pytest.raises(ValueError, match="task aan needs the argument 'data'"):
        load_task("aan", "train", 0)
    assert len(load_task("delay", "train", 0, rms=1)) == 16_384


def test_ragged_rows_come_back_padded_on_the_right():
    rows = [np.arange(1, n + 1, dtype=np.uint8) for n in (3, 0, 5, 1)]
    padded, lengths = Ragged.of(rows).padded(np.array([3, 0, 1]))
    assert padded.tolist() == [[1, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert lengths.tolist() == [1, 3, 0]
    assert padded.dtype == np.int64
    assert Ragged.of(rows).padded(np.array([1]))[0].tolist() == [[0]]
