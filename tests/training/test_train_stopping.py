"""Runs that are told to stop, that save by the clock, and that go on with changes."""

import functools
import json
import os
import shlex
import shutil
import signal
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tests.forks import COMMAND, ended
from tests.training.runs import (
    KilledError,
    assert_same_run,
    killed,
    killed_before,
    lines,
    quick_runs,  # noqa: F401
    signalled_at,
)
from tests.training.test_killed import RECIPE

from ssmzoo.cli.main import main
from ssmzoo.data.sources import LabelledExamples
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation.results import read_results
from ssmzoo.files import write_folder
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.tasks import load_task
from ssmzoo.training.checkpoint import checkpoints, locked, step_of
from ssmzoo.training.distributed import is_out_of_memory
from ssmzoo.training.folder import require_same_recipe
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.run import train
from ssmzoo.training.stopping import SIGNALS, Stopped, StopRequest, signal_of
from ssmzoo.training.trainer import Run

WORDS = ["ant bee cat dodo ", "elk fox gnu hen ", "ibis jay kiwi lark "]


def write_texts(folder):
    folder.mkdir(parents=True)
    for i, words in enumerate(WORDS * 3):
        (folder / f"{i}.txt").write_text(f"{i} " + words * 40, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def recipe(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    data = {"text": str(texts), "validation": 0.3}
    path.write_text(yaml.safe_dump({**RECIPE, "data": data}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A run of twelve steps, not to be changed."""
    return train(recipe, output_dir=tmp_path_factory.mktemp("runs") / "finished")


def changes_of(run):
    return json.loads((run / "run.json").read_text()).get("changes", [])


# -- a run that is told to stop --------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The seconds that signals are timed by."""
    clock = SimpleNamespace(now=0.0)
    watch = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("ssmzoo.training.stopping.time", watch)
    return clock


@pytest.fixture
def interruptible():
    """Python's own answer to SIGINT, which it does not give where a job runs without one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stopped_run_prints_the_command_that_resumes_it_exactly(
    finished, recipe, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "a run"
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signalled_at(patch, CausalLM, "loss_of", 5, signal.SIGTERM)
        assert main(["train", str(recipe), "--output", str(run), "--set", "train.steps=12"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    out, err = capsys.readouterr()
    assert out == ""
    *logged, last = err.splitlines()
    assert [line.partition(":")[0] for line in logged] == [
        *("step 2 of 12", "step 4 of 12", "step 4 of 12")  # the last is a validation's
    ]
    line, _, command = last.partition("; to go on: ")
    assert line == "stopped by SIGTERM after step 5, which is saved"
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [3, 5]
    program, *arguments = shlex.split(command)
    assert program == "ssmzoo"
    assert main(arguments) == 0
    assert_same_run(finished, run)


def test_a_second_signal_stops_at_once(clock, interruptible, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    request = StopRequest()

    def told_twice():
        with request.handled():
            signal.raise_signal(signal.SIGTERM)
            assert request.signal == signal.SIGTERM
            clock.now = 0.5
            signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
            clock.now = 1.5
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second request must not be heard")

    with pytest.raises(KeyboardInterrupt) as caught:
        told_twice()
    assert not isinstance(caught.value, Stopped)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_under_a_launcher_a_second_signal_repeats_the_first(clock, interruptible, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    request = StopRequest()

    def told_twice():
        with request.handled():
            signal.raise_signal(signal.SIGINT)
            clock.now = 10.0
            signal.raise_signal(signal.SIGINT)
            clock.now = 20.0

    # that it was not obeyed is found at the end
    with pytest.raises(KeyboardInterrupt):
        told_twice()
    assert clock.now == 20.0


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_is_a_request_unless_it_was_ignored_at_the_start(number, clock):
    before = signal.signal(number, lambda *_: None)
    try:
        request = StopRequest()
        with request.handled():
            signal.raise_signal(number)
            assert request.flags() == [int(other == number) for other in SIGNALS]
            assert signal_of(request.flags()) == number
        signal.signal(number, signal.SIG_IGN)  # as `nohup` does of SIGHUP
        request = StopRequest()
        with request.handled():
            signal.raise_signal(number)
        assert request.signal is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_repeated_sigxcpu_is_one_request(clock, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.signal(signal.SIGXCPU, lambda *_: None)
    try:
        request = StopRequest()
        with request.handled():
            for clock.now in (0.0, 10.0, 20.0):
                signal.raise_signal(signal.SIGXCPU)
            assert signal.getsignal(signal.SIGXCPU) == request._handle
    finally:
        signal.signal(signal.SIGXCPU, before)


def test_only_the_main_thread_handles_signals():
    seen = []

    def elsewhere():
        with StopRequest().handled():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


# a session of its own, on the terminal that is its first argument
ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for number in range(3):
    os.dup2(terminal, number)
os.close(terminal)
"""


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_a_run_whose_terminal_is_closed_is_saved(recipe, forks, tmp_path):
    """The system sends SIGHUP, and the bar of progress can no longer be drawn."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    words = [os.ttyname(theirs), "train", recipe, "--output", tmp_path / "run"]
    changes = ["train.steps=100000", "eval.every=100000", "checkpoint.every=100000"]
    words += [word for change in changes for word in ("--set", change)]
    os.set_blocking(ours, False)
    shown, metrics = bytearray(), tmp_path / "run" / "metrics.jsonl"

    def close(pid):
        while not ended(pid) and not (b"train:" in shown and metrics.stat().st_size):
            with suppress(BlockingIOError):
                shown.extend(os.read(ours, 1 << 16))
            time.sleep(0.05)
        os.close(theirs)
        os.close(ours)

    done = forks.run(ON_A_TERMINAL + COMMAND, *map(str, words), started=close)
    assert done.status == 128 + signal.SIGHUP, (shown, done.log)
    assert b"step 2 of" not in shown  # beside the bar
    (saved,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert step_of(saved) >= read_metrics(metrics)[-1]["step"]


def test_a_run_interrupted_from_python_raises_a_keyboard_interrupt_and_resumes(
    finished, recipe, tmp_path, interruptible, monkeypatch
):
    """In the second batch of a validation, which is done again."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signalled_at(patch, CausalLM, "measure", 4, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT after step 8, which is sav"):
            train(recipe, output_dir=run)
    assert [line["step"] for line in lines(run) if "validation_loss" in line] == [4]
    # killed after the validation's line is written, before anything is saved
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", lambda *_: fail(KilledError()))
        with pytest.raises(KilledError):
            train(recipe, output_dir=run, resume=True)
    assert [line["step"] for line in lines(run) if "validation_loss" in line] == [4, 8]
    assert_same_run(finished, train(recipe, output_dir=run, resume=True))


# -- checkpoints by the clock ----------------------------------------------------------------


def test_checkpoints_by_the_clock_change_no_weight(finished, recipe, tmp_path, monkeypatch):
    clock, take_step = SimpleNamespace(now=0.0), Run.take_step

    def in_25_seconds(run, read):
        clock.now += 25
        return take_step(run, read)

    monkeypatch.setattr(Run, "take_step", in_25_seconds)
    monkeypatch.setattr(
        "ssmzoo.training.trainer.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    overrides = ["checkpoint.every=null", "checkpoint.minutes=1.5", "checkpoint.keep=9"]
    run = train(recipe, output_dir=tmp_path / "run", overrides=overrides)
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [4, 8, 12]
    assert_same_run(finished, run)


@pytest.mark.parametrize(
    ("fields", "every", "minutes"),
    [
        ({}, 500, None),
        ({"minutes": 10.0}, None, 10.0),
        ({"every": 7, "minutes": 10.0}, 7, 10.0),
        ({"every": "epoch"}, "epoch", None),
    ],
)
def test_a_checkpoint_is_due_by_steps_by_the_clock_or_by_both(fields, every, minutes):
    described = {**RECIPE, "data": {"text": "x"}, "checkpoint": fields}
    if every == "epoch":
        described["data"] = {"task": "listops"}
        described["train"] = {"epochs": 1, "batch_size": 4, "lr": 0.1}
    recipe = Recipe.model_validate(described)
    again = Recipe.model_validate(yaml.safe_load(recipe.to_yaml()))
    for found in (recipe.checkpoint, again.checkpoint):
        assert (found.every, found.minutes) == (every, minutes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.minutes=0", r"checkpoint\.minutes must be greater than 0, got 0"),
        ("checkpoint.minutes=ten", r"checkpoint\.minutes must be a valid number, got 'ten'"),
        ("checkpoint.every=null", "checkpoint must have every, minutes or both, got none"),
    ],
)
def test_a_checkpoint_that_is_never_due_is_refused(override, message, recipe):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, [override])


# -- going on with changes -------------------------------------------------------------------

EXACT = "model.config.dropout=0.0"  # each micro-batch draws its own


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_run_resumes_with_other_micro_batches_and_gradient_checkpointing(recipe, tmp_path, kind):
    whole = train(recipe, output_dir=tmp_path / "whole", overrides=[EXACT])
    run = killed(recipe, tmp_path / "run", 8, overrides=[EXACT])
    changes = ["train.accumulate=2", f"train.gradient_checkpointing={str(kind).lower()}"]
    train(recipe, output_dir=run, resume=True, overrides=[EXACT, *changes])
    one, two = lines(whole), lines(run)
    assert len(one) == len(two)
    for before, after in zip(one, two, strict=True):
        if after["step"] <= 6:
            assert after == before
        # the same sums in another order, in float32: six steps of at most lr = 0.01
        assert after == pytest.approx(before, rel=1e-4)
    assert changes_of(run) == [
        {"step": 6, "field": "train.accumulate", "from": 1, "to": 2},
        {"step": 6, "field": "train.gradient_checkpointing", "from": False, "to": kind},
    ]
    with pytest.raises(ValueError, match=r"train\.batch_size must stay as the run began .* got 8"):
        train(recipe, output_dir=run, resume=True, overrides=[EXACT, "train.batch_size=8"])
    with pytest.raises(ValueError, match=r"train\.batch_size must be a multiple of .*, got 4"):
        train(recipe, output_dir=run, resume=True, overrides=[EXACT, "train.accumulate=3"])


def test_changes_are_listed_once_even_if_the_run_is_killed_meanwhile(recipe, tmp_path, monkeypatch):
    run = killed(recipe, tmp_path / "run", 8)
    with monkeypatch.context() as patch:
        # of the recipe
        patch.setattr("ssmzoo.training.folder.write_text", lambda *_: fail(KilledError()))
        with pytest.raises(KilledError):
            train(recipe, output_dir=run, resume=True, overrides=["train.accumulate=2"])
    assert len(changes_of(run)) == 1
    with monkeypatch.context() as patch:
        killed_before(patch, 7)
        with pytest.raises(KilledError):
            train(recipe, output_dir=run, resume=True, overrides=["train.accumulate=2"])
    assert len(changes_of(run)) == 1
    train(recipe, output_dir=run, resume=True, overrides=["log.every=3", "checkpoint.minutes=60"])
    assert [(change["field"], change["to"]) for change in changes_of(run)] == [
        ("train.accumulate", 2),
        ("train.accumulate", 1),
        ("checkpoint.minutes", 60),
        ("log.every", 3),
    ]


def test_a_run_resumes_after_its_text_was_moved(finished, recipe, tmp_path):
    old, new = write_texts(tmp_path / "old"), tmp_path / "new" / "deeper"
    run = killed(recipe, tmp_path / "run", 8, overrides=[f"data.text={old}"])
    shutil.copytree(old, new)
    shutil.rmtree(old)
    shutil.rmtree(run / ".cache")
    train(recipe, output_dir=run, resume=True, overrides=[f"data.text={new}"])
    assert_same_run(finished, run)
    assert changes_of(run) == [{"step": 6, "field": "data.text", "from": ["old"], "to": ["deeper"]}]
    described = json.loads((run / "data.json").read_text())
    assert {Path(file["path"]).parent for file in described["files"]} == {new}
    assert all(str(new) in name for name in described["held_out"])


def test_moved_text_that_is_not_the_same_is_refused(recipe, tmp_path):
    old = write_texts(tmp_path / "old")
    run = killed(recipe, tmp_path / "run", 1, overrides=[f"data.text={old}"])
    told = (run / "run.json").read_bytes()
    for name, change, message in (
        ("a", lambda new: (new / "3.txt").write_text("other"), r"a/3\.txt was changed since"),
        ("b", lambda new: (new / "x.txt").write_text("more"), r"b/x\.txt was added since the run"),
        ("c", lambda new: (new / "3.txt").unlink(), r"old/3\.txt was removed since the run"),
    ):
        change(new := write_texts(tmp_path / name))
        with pytest.raises(ValueError, match=message):
            train(recipe, output_dir=run, resume=True, overrides=[f"data.text={new}"])
    assert (run / "run.json").read_bytes() == told


def test_a_run_resumes_after_its_stream_and_its_tokenizer_were_moved(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    lines = "".join(json.dumps({"text": f"{i} {WORDS[i % 3] * 9}"}) + "\n" for i in range(40))
    old, new, touched = (tmp_path / name for name in ("old", "new", "touched"))
    for folder in (old, new, touched):
        folder.mkdir()
    (old / "a.jsonl").write_text(lines)
    shutil.copy2(old / "a.jsonl", new / "a.jsonl")
    (touched / "a.jsonl").write_text(lines)
    os.utime(touched / "a.jsonl", (1, 1))
    byte_tokenizer().save_pretrained(old / "tokenizer")
    shutil.copytree(old / "tokenizer", new / "tokenizer")
    shutil.copytree(old / "tokenizer", touched / "tokenizer")
    other = touched / "tokenizer" / "tokenizer.json"
    other.write_text(other.read_text().replace("<|bos|>", "<|boz|>"))

    def place(folder, tokenizer=None):
        return [
            *("data.text=null", f"data.jsonl={folder / 'a.jsonl'}", "data.streaming=true"),
            *("data.validation=3", "data.shuffle_buffer=4"),
            f"data.tokenizer={(tokenizer or folder) / 'tokenizer'}",
        ]

    whole = train(recipe, output_dir=tmp_path / "whole", overrides=place(old))
    run = killed(recipe, tmp_path / "run", 8, overrides=place(old))
    shutil.rmtree(old)
    with pytest.raises(ValueError, match=r"touched/a\.jsonl was changed since the run began"):
        train(recipe, output_dir=run, resume=True, overrides=place(touched))
    with pytest.raises(ValueError, match=r"data\.tokenizer must be '.*old/tok.* encodes otherwise"):
        train(recipe, output_dir=run, resume=True, overrides=place(new, touched))
    train(recipe, output_dir=run, resume=True, overrides=place(new))
    assert_same_run(whole, run)


def test_a_tasks_data_may_move_but_its_other_arguments_may_not_change():
    def described(folder, num_pairs=2):
        task_args = {"data": folder, "num_pairs": num_pairs}
        data = {"task": "mqar", "task_args": task_args}
        train = {"epochs": 1, "batch_size": 4, "lr": 0.1}
        return Recipe.model_validate(
            {"model": {"family": "longhorn"}, "data": data, "train": train}
        )

    sizes = {"seq_len": 16, "vocab_size": 16, "num_train": 9, "num_validation": 3, "num_test": 3}

    def prepared(recipe, drawn, before=None):
        """Describe examples that the folder holds, here drawn with a seed."""
        with pytest.MonkeyPatch.context() as patch:
            fake = functools.partial(load_task, num_pairs=2, **sizes)
            load = lambda name, split, seed, **_: fake(name, split, drawn)  # noqa: E731
            patch.setattr("ssmzoo.tasks.load_task", load)
            return LabelledExamples(recipe).prepare(Path("unused"), before)

    old, new = described("/old/place"), described("/new/home")
    require_same_recipe(old, new)
    before = json.loads(json.dumps(prepared(old, 0)))
    assert prepared(new, 0, before)["digest"] == before["digest"]
    with pytest.raises(ValueError, match="must give the examples"):
        prepared(new, 1, before)
    for other in (described("/new/home", num_pairs=1), described("user/hub")):
        with pytest.raises(ValueError, match=r"data\.task_args must stay as the run began"):
            require_same_recipe(old, other)


# -- runs that end between two lines of the metrics ------------------------------------------


@pytest.fixture(scope="module")
def early(recipe, tmp_path_factory):
    """A run that ends with its first validation, after step 4, and how it was asked for."""
    ends = {"metric": "loss", "value": 100.0}
    asked = ["train.schedule=constant", f"train.stop_at={json.dumps(ends)}", "log.every=100"]
    run = train(recipe, output_dir=tmp_path_factory.mktemp("early") / "run", overrides=asked)
    return run, asked


def finish_of(run):
    return json.loads((run / "run.json").read_text())["finished"]


def test_a_run_that_ends_early_logs_its_last_steps_once(early, recipe, tmp_path):
    run, asked = early
    trained, validated = lines(run)
    assert (trained["step"], validated["step"]) == (4, 4)
    assert trained["tokens"] == validated["tokens"] == 4 * 4 * 32
    assert finish_of(run)["loss"] == trained["loss"]
    again = shutil.copytree(run, tmp_path / "again")
    train(recipe, output_dir=again, resume=True, overrides=asked)
    assert_same_run(run, again)
    assert finish_of(again)["seconds"] == finish_of(run)["seconds"]


def test_a_run_stopped_before_its_early_end_has_the_same_lines(
    early, recipe, tmp_path, interruptible, monkeypatch
):
    run, asked = early
    told = tmp_path / "told"
    with monkeypatch.context() as patch:
        signalled_at(patch, CausalLM, "measure", 1, signal.SIGINT)
        with pytest.raises(Stopped, match="after step 4"):
            train(recipe, output_dir=told, overrides=asked)
    # killed after it wrote the lines, and before it saved
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", lambda *_: fail(KilledError()))
        with pytest.raises(KilledError):
            train(recipe, output_dir=told, resume=True, overrides=asked)
    train(recipe, output_dir=told, resume=True, overrides=asked)
    assert_same_run(run, told)


@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_shortened_to_its_done_steps_is_validated_and_logged(
    held_out, recipe, tmp_path, monkeypatch
):
    asked = ["log.every=100", "train.schedule=constant"]
    asked += ["checkpoint.best=true"] if held_out else ["data.validation=null"]
    run = killed(recipe, tmp_path / "run", 7, overrides=asked)
    assert [step_of(path) for path in checkpoints(run / "checkpoints")][-1] == 6
    asked.append("train.steps=6")
    before = lines(run)
    with monkeypatch.context() as patch:  # killed at its end
        patch.setattr(Run, "save" if held_out else "_finish", lambda *_: fail(KilledError()))
        with pytest.raises(KilledError):
            train(recipe, output_dir=run, resume=True, overrides=asked)
    train(recipe, output_dir=run, resume=True, overrides=asked)
    trained, *validated = lines(run)[len(before) :]
    assert (trained["step"], trained["tokens"], trained["lr"]) == (6, 6 * 4 * 32, 0.01)
    assert [line["step"] for line in validated] == [6] * held_out
    assert finish_of(run)["loss"] == trained["loss"]
    if held_out:
        assert finish_of(run)["validation_loss"] == validated[0]["validation_loss"]
        best = min(
            (line for line in lines(run) if "validation_loss" in line),
            key=lambda line: line["validation_loss"],
        )
        assert finish_of(run)["best"]["step"] == best["step"]


def test_a_run_whose_results_cannot_be_written_is_not_finished(recipe, tmp_path, monkeypatch):
    sizes = {"seq_len": 16, "vocab_size": 16, "num_train": 9, "num_validation": 3, "num_test": 3}
    task = {"num_pairs": 2, **sizes}
    asked = ["data.text=null", "data.validation=null", "train.seq_len=null", "data.task=mqar"]
    asked += [f"data.task_args={json.dumps(task)}", "train.steps=3"]
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        full = lambda *_: fail(OSError("the disk is full"))  # noqa: E731
        patch.setattr("ssmzoo.training.folder.write_results", full)
        with pytest.raises(OSError, match="the disk is full"):
            train(recipe, output_dir=run, overrides=asked)
    assert (run / "model").exists()
    assert "finished" not in json.loads((run / "run.json").read_text())
    for _ in range(2):
        train(recipe, output_dir=run, resume=True, overrides=asked)
        assert "finished" in json.loads((run / "run.json").read_text())
        assert read_results(run / "results.json")["results"]
        (run / "results.json").unlink()


# -- memory ----------------------------------------------------------------------------------


def fail(error):
    raise error


@pytest.mark.parametrize(
    "ask",
    [lambda: bytearray(10**18), lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried"))],
)
def test_out_of_memory_errors_are_recognised(ask):
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        ask()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("another"))


def test_out_of_memory_names_a_smaller_setting_that_resumes_the_run(
    recipe, tmp_path, capsys, monkeypatch
):
    loss_of, run = CausalLM.loss_of, tmp_path / "run"

    def too_large(goal, forward, piece, *given):
        if run_.progress.step == 4 and piece["input_ids"].numel() > 64:
            torch.ones(1).expand(10**15).clone()
        return loss_of(goal, forward, piece, *given)

    take_step = Run.take_step

    def watched(run, read):
        nonlocal run_
        run_ = run
        return take_step(run, read)

    run_ = None
    monkeypatch.setattr(Run, "take_step", watched)
    monkeypatch.setattr(CausalLM, "loss_of", too_large)
    assert main(["train", str(recipe), "--output", str(run)]) == 2
    err = capsys.readouterr().err
    *logged, err = err.splitlines()
    assert all(line.startswith("step ") for line in logged)
    assert err.startswith("ssmzoo: error: out of memory after 4 steps: [enforce fail at")
    for words in (
        "raise train.accumulate = 1, so that fewer of the train.batch_size = 4 rows",
        "set train.gradient_checkpointing = false to true",
        "shorter rows (train.seq_len = 32)",
        "the checkpoint of step 3 is intact",
    ):
        assert words in err
    command = err.rstrip("\n").partition("; to go on: ")[2]
    assert command.endswith(" --resume --set train.accumulate=2")
    assert main(shlex.split(command)[1:]) == 0
    assert changes_of(run) == [{"step": 3, "field": "train.accumulate", "from": 1, "to": 2}]


# -- what file systems do --------------------------------------------------------------------

ODD = os.fsdecode(b"caf\xe9")


def test_text_whose_file_names_are_not_utf8_is_trained_on_and_resumed(recipe, tmp_path):
    folder = write_texts(tmp_path / ODD)
    (folder / "0.txt").rename(folder / f"{ODD}.txt")
    overrides = [f"data.text={folder}", "data.validation=8"]
    run = killed(recipe, tmp_path / "run", 8, overrides=overrides)
    train(recipe, output_dir=run, resume=True, overrides=overrides)
    described = json.loads((run / "data.json").read_text(encoding="utf-8"))
    assert f"{folder}/{ODD}.txt" in [file["path"] for file in described["files"]]
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 12


def test_records_whose_file_names_are_not_utf8_are_read_or_named(recipe, tmp_path, capsys):
    place = tmp_path / f"{ODD}.jsonl"
    place.write_text("".join(json.dumps({"text": words * 40}) + "\n" for words in WORDS))
    sets = ["data.text=null", f"data.jsonl={place}", "data.validation=null", "train.steps=3"]
    train(recipe, output_dir=tmp_path / "run", overrides=sets)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["documents"] == 3
    run = train(recipe, output_dir=tmp_path / "new", overrides=[*sets, "data.streaming=true"])
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 3
    (tmp_path / "set").mkdir()
    place.rename(tmp_path / "set" / place.name)
    sets[1] = f"data.dataset={tmp_path / 'set'}"
    arguments = [word for change in sets for word in ("--set", change)]
    assert main(["train", str(recipe), "--output", str(tmp_path / "refused"), *arguments]) == 2
    line = capsys.readouterr().err
    assert "data.dataset must have file names in UTF-8, got " in line
    assert "caf\\udce9" in line
    assert line.count("\n") == 1


def test_a_folder_whose_name_is_not_utf8_is_refused_by_name(recipe, tmp_path, capsys):
    place = tmp_path / ODD
    assert main(["train", str(recipe), "--output", str(place)]) == 2
    line = capsys.readouterr().err
    assert line == f"ssmzoo: error: output_dir must be a path in UTF-8, got {str(place)!a}\n"
    assert not place.exists()
    with pytest.raises(RuntimeError, match=r"caf.* cannot be written: its path is not UTF-8"):
        write_folder(place, lambda folder: byte_tokenizer().save_pretrained(folder))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_warned_of_once(recipe, tmp_path, caplog, monkeypatch):
    import errno
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run"):
        pass
    (record,) = caplog.records
    assert "has no locks (No locks available): see to it that no second run" in record.getMessage()
    assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="cannot be locked"), locked(tmp_path / "run"):
        pass


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("100000000", "99999999", "00000003", "old"):
        (tmp_path / f"step-{name}").mkdir()
    assert [step_of(path) for path in checkpoints(tmp_path)] == [3, 99_999_999, 100_000_000]


def test_files_of_a_run_have_the_permissions_of_the_umask(recipe, tmp_path):
    umask = 0o027
    before = os.umask(umask)
    try:
        sets = ["--set", "train.steps=3", "--output", str(tmp_path / "run")]
        assert main(["train", str(recipe), *sets]) == 0
        model = str(tmp_path / "run" / "model")
        assert main(["card", model]) == 0
        assert main(["generate", model, "ant", "--save-state", str(tmp_path / "prompt")]) == 0
        assert main(["publish", model, f"folder:{tmp_path / 'published'}"]) == 0
    finally:
        os.umask(before)
    written = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len([path for path in written if path.suffix == ".safetensors"]) == 4
    for path, mode in written.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, (path, oct(mode))
