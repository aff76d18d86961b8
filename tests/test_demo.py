"""The demo, its steps few and its text small: the whole plan, down to the table."""

import json

import pytest

from ssmzoo import demo


@pytest.fixture
def text(tmp_path):
    lines = (f"the {i}th line of a text that says {i * i} and no more\n" for i in range(2000))
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path / "text.txt"


@pytest.fixture
def small_models(monkeypatch, tmp_path):
    """Shipped recipes, their models made small enough for a test."""
    from ssmzoo import train as training

    sizes = {
        "longhorn-demo": ["hidden_size=16", "num_hidden_layers=1"],
        "mamba2-demo": ["hidden_size=16", "num_hidden_layers=1", "num_heads=2", "head_dim=16"],
    }
    train = training.train

    def small(recipe, *, output_dir, overrides):
        fewer = ["train.batch_size=2", "train.seq_len=64", "eval.batches=1", "train.dtype=float32"]
        model = [f"model.config.{size}" for size in sizes[recipe]]
        return train(recipe, output_dir=output_dir, overrides=[*overrides, *model, *fewer])

    monkeypatch.setattr(training, "train", small)


def test_the_demo_ends_in_the_table_and_says_where_everything_lies(
    text, tmp_path, small_models, capsys
):
    output = tmp_path / "demo"
    assert demo.main(["--text", str(text), "--output", str(output), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    header, longhorn, mamba2 = (
        line.split() for line in out[: out.index("\ndone in")].strip().splitlines()[-3:]
    )
    assert header == ["parameters", "tokens/s", "bits/byte", "recall"]
    for name, row in (("longhorn", longhorn), ("mamba2", mamba2)):
        scores = json.loads((output / "results" / f"{name}.json").read_text())
        assert row[0] == name
        assert int(row[1].replace(",", "")) == scores["model"]["parameters"]
        bits = next(r for r in scores["results"] if r["task"] == demo.TASKS[0])
        assert row[3] == f"{bits['value']:.3f}"
    assert "\ndef " in out  # the sample of the fresh process, which begins with its prompt
    assert (output / "published" / "README.md").is_file()
    assert (output / "longhorn" / "loss.png").is_file()


def test_the_demo_replaces_an_earlier_demo_and_nothing_else(text, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert demo.main(["--text", str(text), "--output", str(tmp_path / "mine")]) == 2
    assert "is no earlier demo; choose another --output" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "short.txt").write_text("too short")
    arguments = ["--text", str(tmp_path / "short.txt"), "--output", str(tmp_path / "demo")]
    assert demo.main(arguments) == 2
    assert "TEXT must hold some thousand characters" in capsys.readouterr().err
