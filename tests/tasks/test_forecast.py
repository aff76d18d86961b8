"""Forecasts: windows against their definition, and a run from a CSV file to its results."""

import json

import numpy as np
import pytest
import torch

from ssmzoo.family import load_family
from ssmzoo.recipe import load_recipe
from ssmzoo.tasks import load_task
from ssmzoo.training.model import build_config
from ssmzoo.training.run import train

LAG, HORIZON, TOTAL = 7, 3, 60
NUMBERS = np.random.default_rng(0).normal(5, 3, size=(TOTAL, 2)).round(3)


@pytest.fixture
def table(tmp_path):
    """Write a file with a date, two columns of numbers and a remark."""
    rows = [f"2016-07-{i},{a},fine,{b}" for i, (a, b) in enumerate(NUMBERS)]
    path = tmp_path / "table.csv"
    path.write_text("date,OT,remark,load\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def load(table, split="train", **args):
    given = {"data": str(table), "columns": ["OT", "load"], "lag": LAG, "horizon": HORIZON}
    return load_task("forecast", split, 0, **{**given, **args})


@pytest.mark.parametrize(
    ("rows", "ends"), [(None, [36, 48, 60]), ([30, 10, 12], [30, 40, 52])], ids=str
)
def test_windows_are_all_pieces_whose_future_lies_in_the_split(table, rows, ends):
    trained = NUMBERS[: ends[0]]
    expected = (NUMBERS - trained.mean(axis=0)) / trained.std(axis=0)
    starts = [LAG, *ends[:2]]  # of the first future
    for split, first, end in zip(("train", "validation", "test"), starts, ends, strict=True):
        task = load(table, split, rows=rows)
        assert (len(task), task.input_channels, task.horizon) == (end - first - HORIZON + 1, 2, 3)
        batch = task.batch(range(len(task)))
        assert (batch.inputs.dtype, batch.labels.dtype) == (np.float32, np.float32)
        for i, (past, future) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
            now = first + i
            np.testing.assert_allclose(past, expected[now - LAG : now], atol=1e-6)
            np.testing.assert_allclose(future, expected[now : now + HORIZON], atol=1e-6)
        assert batch.lengths.tolist() == [LAG] * len(task)


def test_centered_windows_have_the_mean_zero_and_the_same_future_beyond_it(table):
    bare, centered = (load(table, center=c).batch([0, 5]) for c in (False, True))
    mean = bare.inputs.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(centered.inputs, bare.inputs - mean, atol=1e-6)
    np.testing.assert_allclose(centered.labels, bare.labels - mean, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"columns": ["laod"]}, LookupError, "no column 'laod'; did you mean 'load'"),
        ({"columns": ["x"]}, LookupError, "no column 'x'; it has date, OT, remark, load"),
        ({"columns": []}, ValueError, "columns must name at least one"),
        ({"columns": ["OT", "remark"]}, ValueError, "line 2, column 'remark' .* got 'fine'"),
        ({"horizon": 0}, ValueError, "horizon must be at least 1, got 0"),
        ({"lag": 0}, ValueError, "lag must be at least 1, got 0"),
        ({"horizon": 13}, ValueError, "at least 13 rows to validation on, got 12 of 60; shorten"),
        ({"lag": 34}, ValueError, "at least 37 rows to train on, got 36 of 60"),
        ({"rows": [30, 20]}, ValueError, r"rows must be three .* got \[30, 20\]"),
        ({"rows": [30, 20, 11]}, ValueError, "rows must be three .* of the 60 rows"),
        ({"rows": [30, 20, -5]}, ValueError, "at least 3 rows to test on, got -5"),
        ({"data": "nowhere.csv"}, LookupError, "no CSV file 'nowhere.csv'"),
        ({"columns": "OT"}, TypeError, r"columns of task forecast must be .* give \[OT\]"),
    ],
)
def test_bad_arguments_are_one_line(table, args, error, message):
    with pytest.raises(error, match=message) as caught:
        load(table, **args)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2016,,fine,1", "line 62, column 'OT' .* must be a finite number, got ''"),
        ("2016,1,fine", "line 62, column 'load' .* must be a finite number, got ''"),
        ("2016,nan,fine,1", "line 62, column 'OT' .* must be a finite number, got 'nan'"),
        ('2016,"1,5",fine,1', "line 62, column 'OT' .* must be a finite number, got '1,5'"),
    ],
)
def test_a_cell_that_is_no_number_is_named(table, line, message):
    table.write_text(table.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        load(table)


def test_a_column_that_never_changes_is_named(table):
    text = table.read_text()
    for constant in ("1", "0.1"):  # of many 0.1 the mean is another number
        table.write_text(text.replace("fine", constant))
        with pytest.raises(ValueError, match=r"column 'remark' of .* must vary over the training"):
            load(table, columns=["OT", "remark"])


@pytest.fixture
def recipe(tmp_path):
    """Write a series of two waves; return the recipe of a forecaster of it."""
    config = {"hidden_size": 16, "num_hidden_layers": 1, "d_state": 8, "kernel_init": "xavier"}
    time = np.arange(200)
    waves = np.stack([np.sin(time / 2), 10 + np.cos(time / 3)], axis=1)
    text = "\n".join(f"{a:.6f},{b:.6f}" for a, b in waves)
    (tmp_path / "waves.csv").write_text("a,b\n" + text)
    return {
        "model": {"family": "spacetime", "config": config},
        "data": {
            "task": "forecast",
            "task_args": {
                "data": str(tmp_path / "waves.csv"),
                "columns": ["a", "b"],
                "lag": 12,
                "horizon": 4,
            },
        },
        "train": {"epochs": 3, "batch_size": 8, "lr": 1e-2, "warmup": 0, "dtype": "float32"},
        "eval": {"every": "epoch", "batches": "all"},
        "checkpoint": {"every": "epoch", "best": True},
    }


def written(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return load_recipe(path)


@pytest.mark.long
def test_a_forecaster_trains_and_its_results_are_its_errors_on_the_test_split(recipe, tmp_path):
    given = recipe["data"]["task_args"]
    run = train(written(recipe, tmp_path), output_dir=tmp_path / "run")
    model = load_family("spacetime").forecasting_class.from_pretrained(run / "model")
    assert (model.config.horizon, model.config.input_channels) == (4, 2)
    batch = load_task("forecast", "test", 0, **given).batch(range(37))
    with torch.no_grad():
        said = model.eval()(torch.from_numpy(batch.inputs)).logits.numpy()
    error = said - batch.labels
    scores = {
        row["metric"]: row for row in json.loads((run / "results.json").read_text())["results"]
    }
    assert scores.keys() == {"mse", "mae"}
    assert scores["mse"]["value"] == pytest.approx(np.square(error).mean(), rel=1e-5)
    assert scores["mae"]["value"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert (scores["mse"]["n"], scores["mse"]["higher_is_better"]) == (37 * 4 * 2, False)
    assert scores["mse"]["value"] < 0.1  # saying the mean has about 1
    best = json.loads((run / "run.json").read_text())["finished"]["best"]
    validated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert best["mse"] == min(x["validation_mse"] for x in validated if "validation_mse" in x)


def test_the_task_says_the_horizon_and_only_forecasters_have_one(recipe, tmp_path):
    task = load_task("forecast", "train", 0, **recipe["data"]["task_args"])
    recipe["model"]["preset"] = "spacetime-ett"
    assert build_config(written(recipe, tmp_path).model, None, task).horizon == 4
    recipe["model"]["config"]["horizon"] = 5
    with pytest.raises(ValueError, match=r"model.config.horizon must be absent or the task's, 4"):
        build_config(written(recipe, tmp_path).model, None, task)
    recipe["model"] = {"family": "s4"}
    with pytest.raises(LookupError, match="no head for forecast of values"):
        build_config(written(recipe, tmp_path).model, None, task)
    recipe["model"] = {"config_of": "llama"}
    with pytest.raises(LookupError, match="transformers has no model for forecast of values"):
        build_config(written(recipe, tmp_path).model, None, task)


def test_a_kept_recipe_has_the_files_whole_path(table, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe["data"]["task_args"]["data"] = "table.csv"
    kept = written(recipe, tmp_path).with_absolute_paths()
    assert kept.data.task_args["data"] == str(table)
