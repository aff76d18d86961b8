"""The demo, its steps few and its text small: the whole plan, down to the table, and again."""

import json
import os
import re
import shlex
from itertools import chain
from pathlib import Path

import demo
import pytest
import shared

from ssmzoo.cli import main as cli
from ssmzoo_kernels.dispatch import watch

# one worker runs the whole demo once
pytestmark = pytest.mark.xdist_group("demo")

# ssmzoo's metadata is there, as where an installation broke, and nothing of it can be imported
STRANGER = """
import sys
for name in ("ssmzoo", "ssmzoo_kernels", "ssmzoo_longhorn"):
    sys.modules[name] = None
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, which is the working directory; its path has what YAML might read."""
    folder = tmp_path_factory.mktemp("a, [b] = 'c: #d")
    lines = (f"the {i}th line of a text that says {i * i} and no more\n" for i in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    before = Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
        patch.delenv("HF_TOKEN", raising=False)
        yield folder
    os.chdir(before)


class Interrupted:
    """Stops the demo by Ctrl-C, at each of its parts in turn, and counts what the parts do."""

    def __init__(self, patch):
        from ssmzoo.evaluation import evaluate
        from ssmzoo.publishing import card, hub
        from ssmzoo.training import run, trainer

        self.done = []
        self.stops = []
        sizes = {
            "longhorn-demo": ["hidden_size=16", "num_hidden_layers=1"],
            "mamba2-demo": ["hidden_size=16", "num_hidden_layers=1", "num_heads=2", "head_dim=16"],
        }
        fewer = ["train.batch_size=2", "train.seq_len=64", "eval.batches=1", "train.dtype=float32"]
        begin, score, step = run.train, evaluate.evaluate, trainer.Run.take_step
        render, send = card.render_card, hub.publish

        def small(recipe, *, overrides, **rest):
            self.done.append(f"train {recipe}")
            model = [f"model.config.{size}" for size in sizes[recipe]]
            few = [*overrides, *model, *fewer, "checkpoint.every=2", "log.every=1"]
            return begin(recipe, overrides=few, **rest)

        def take_step(self_run, read):
            self.here(f"{self_run.config.model_type} step {self_run.progress.step + 1}")
            return step(self_run, read)

        def scored(*arguments, name, **rest):
            self.here(f"score {name}")
            return score(*arguments, name=name, limit=8, **rest)

        def rendered(*arguments, **rest):
            self.here("card")
            return render(*arguments, **rest)

        def sent(*arguments, **rest):
            self.here("publish")
            return send(*arguments, **rest)

        patch.setattr(run, "train", small)
        patch.setattr(trainer.Run, "take_step", take_step)
        patch.setattr(evaluate, "evaluate", scored)
        patch.setattr(card, "render_card", rendered)
        patch.setattr(hub, "publish", sent)

    def here(self, what):
        self.done.append(what)
        if self.stops and self.stops[0] == what:
            self.stops.pop(0)
            raise KeyboardInterrupt


COMMAND = ["--text", "text.txt", "--steps", "3"]


@pytest.fixture(scope="module")
def whole(place):
    """What a demo did, printed and left that was never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        parts = Interrupted(patch)
        printed = []
        for module in (demo, shared):
            patch.setattr(module, "say", lambda line, end="\n": printed.append(line + end))
        patch.setattr(demo, "LOAD", STRANGER + demo.LOAD)  # so that the publication must do alone
        assert demo.demo(COMMAND) == 0
        return parts.done, "".join(printed)


def scores(output):
    """Return all that a demo came to, without times, speeds and commands."""
    found = {}
    for name in demo.MODELS:
        content = json.loads((output / "results" / f"{name}.json").read_text())
        found[name] = [content["model"]["revision"], content["results"]]
    return found


@pytest.mark.long
def test_the_demo_ends_in_the_table_and_says_where_everything_lies(place, whole):
    _, out = whole
    output = Path("demo")
    *rows, both_ways = out[: out.index("\ndone in")].strip().splitlines()[-4:]
    header, longhorn, mamba2 = (line.split() for line in rows)
    speeds = json.loads((output / demo.SPEEDS).read_text())
    assert both_ways == (
        f"mamba2 trains at {speeds['stock']:,.0f} tokens/s on transformers' own code and at "
        f"{speeds['kernels']:,.0f} on ssmzoo's kernels, in turns"
    )
    assert header == ["parameters", "tokens/s", "bits/byte", "recall"]
    for name, row in (("longhorn", longhorn), ("mamba2", mamba2)):
        results = json.loads((output / "results" / f"{name}.json").read_text())
        assert row[0] == name
        assert int(row[1].replace(",", "")) == results["model"]["parameters"]
        bits = next(r for r in results["results"] if r["task"] == "ssmzoo_bits_per_byte")
        assert row[3] == f"{bits['value']:.3f}"
    assert (
        f"\n{demo.PROMPT}" in out
    )  # the sample of the fresh process without ssmzoo, which begins with its prompt
    assert (output / "published" / "README.md").is_file()
    assert (output / "published" / "modeling_longhorn.py").is_file()
    assert (output / "longhorn" / "loss.png").is_file()


@pytest.mark.long
def test_mamba2_is_timed_stock_and_on_our_kernels_and_trained_stock(place, whole):
    run = Path("demo/mamba2")
    assert json.loads((run / "run.json").read_text())["recurrent_layers"] == [
        "stock: not accelerated"
    ]
    with watch() as ran:
        speeds = demo.speeds_of(run)
    assert {op for op, _ in ran} >= {"causal_conv1d", "gated_linear_attention"}
    assert speeds.keys() == {"stock", "kernels"}
    assert min(speeds.values()) > 0


def test_the_commands_that_it_suggests_run(place, whole, capsys):
    lines = [line.strip() for line in demo.closing(Path("demo")).splitlines()]
    suggested = [shlex.split(line) for line in lines if line.startswith("ssmzoo ")]
    assert [words[1] for words in suggested] == ["generate", "publish", "info"]
    for words in suggested:
        assert cli.main(words[1:]) == 0, capsys.readouterr().err


@pytest.mark.long
def test_an_interrupted_demo_resumes_to_the_same_result(place, whole, monkeypatch, capsys):
    parts = Interrupted(monkeypatch)
    monkeypatch.setattr(demo, "LOAD", "")  # what it says was looked at above
    parts.stops = [
        "ssmzoo_longhorn step 2",
        "ssmzoo_longhorn step 3",
        "score longhorn",
        "mamba2 step 3",
        "score mamba2",
        "card",
        "publish",
    ]
    cut = shared.split_text

    def stop_in_the_text(sources, target):
        cut(sources, target)
        monkeypatch.setattr(shared, "split_text", cut)
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "split_text", stop_in_the_text)
    command = [*COMMAND, "--output", "again"]
    for _ in range(8):
        assert demo.demo(command) == 130
        err = capsys.readouterr().err
        assert err.endswith("\ndemo: interrupted; the same command goes on from here\n")
    assert parts.stops == []
    assert demo.demo(command) == 0
    assert scores(Path("again")) == scores(Path("demo"))
    # two steps were lost, those of a checkpoint every second one, and no score
    steps = [what for what in parts.done if " step " in what]
    assert steps == [
        *(f"ssmzoo_longhorn step {i}" for i in (1, 2, 1, 2, 3, 3)),
        *(f"mamba2 step {i}" for i in (1, 2, 3, 3)),
    ]
    assert [what for what in parts.done if what.startswith("score")] == [
        *["score longhorn"] * 2,
        *["score mamba2"] * 2,
    ]


def test_a_finished_demo_is_shown_again_and_left_as_it_is(place, whole, capsys, monkeypatch):
    parts = Interrupted(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in Path("demo").rglob("*")}
    del before[Path("demo/.lock")]
    assert demo.demo(COMMAND) == 0
    out = capsys.readouterr().out
    assert parts.done == []
    assert re.search(r"^longhorn .*\d", out, re.MULTILINE)
    assert (
        "demo holds a finished demo, and nothing was done again; to start over: rm -r demo" in out
    )
    assert before.items() <= {p: p.stat().st_mtime_ns for p in Path("demo").rglob("*")}.items()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--text", "text.txt"], "STEPS must stay as the demo in demo began, 3, got the default"),
        (["--text", "x", "--steps", "3"], r"TEXT must stay as .*/text\.txt, got /.*/x; start over"),
        (["--steps", "3"], "got the default; start over with: rm -r demo"),
    ],
)
def test_another_task_than_the_folders_is_one_error(place, whole, command, message, capsys):
    assert demo.demo(command) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert err.count("\n") == 1


def test_the_demo_says_nothing_of_kernels_that_transformers_misses(place, whole, monkeypatch):
    import logging

    from transformers.utils import logging as theirs

    heard = []

    class Listener(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    def train(*arguments, **options):
        theirs.get_logger("transformers.models.mamba2").warning("is falling back")
        raise ValueError("enough")

    monkeypatch.setattr("ssmzoo.training.run.train", train)
    listener = Listener()
    theirs.add_handler(listener)
    try:
        assert demo.demo(["--text", "text.txt", "--output", "quiet"]) == 2
    finally:
        theirs.remove_handler(listener)
    assert heard == []


@pytest.mark.parametrize("steps", ["0", "-3", "x", "1.5"])
def test_a_number_of_steps_that_is_none_is_one_line(tmp_path, steps, capsys):
    assert demo.demo(["--steps", steps, "--output", str(tmp_path / "demo")]) == 2
    err = capsys.readouterr().err
    assert err == f"demo: error: STEPS must be a whole number from 1 on, got {steps!r}\n"
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_is_no_demo_is_left_alone_and_a_text_too_short_is_named(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert demo.demo(["--output", str(tmp_path / "mine")]) == 2
    assert "holds no earlier demo; choose another --output" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "short.txt").write_text("too short")
    arguments = ["--text", str(tmp_path / "short.txt"), "--output", str(tmp_path / "demo")]
    assert demo.demo(arguments) == 2
    assert "TEXT must hold some thousand characters" in capsys.readouterr().err


def test_a_text_of_one_long_line_is_cut_too(tmp_path):
    text = tmp_path / "text8"
    text.write_text("word " * 40_000)
    shared.split_text([str(text)], tmp_path / "parts")
    parts = {
        name: [path.read_text() for path in sorted((tmp_path / "parts" / name).iterdir())]
        for name in ("train", "held-out")
    }
    assert sum(map(len, chain(*parts.values()))) == 200_000
    assert 0 < sum(map(len, parts["held-out"])) < 100_000
