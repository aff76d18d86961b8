"""What a run takes from its environment: nothing that changes numbers without a word."""

import json

import pytest
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.forks import COMMAND
from tests.training.runs import (
    assert_same_run,
    quick_runs,  # noqa: F401
    write_texts,
)
from tests.training.test_killed import RECIPE

from ssmzoo.cli.main import main
from ssmzoo.environment.device import numeric_variables
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train

# what Accelerate would follow, of what the recipe says or has no word for
IGNORED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_DYNAMO_MODE": "max-autotune",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe")
    data = {"text": str(write_texts(place / "texts")), "validation": 0.3}
    (place / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}), encoding="utf-8")
    return place / "recipe.yaml"


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    return train(recipe, output_dir=tmp_path_factory.mktemp("runs") / "finished")


def described(run):
    return json.loads((run / "run.json").read_text())


def test_accelerates_variables_and_an_earlier_accelerator_change_no_number(
    finished, recipe, tmp_path, request, monkeypatch
):
    for name, value in IGNORED.items():
        monkeypatch.setenv(name, value)
    made = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "cpu": True}
    request.addfinalizer(lambda: AcceleratorState._reset_state(reset_partial_state=True))
    before = Accelerator(**made)
    state = dict(AcceleratorState._shared_state)
    assert_same_run(finished, train(recipe, output_dir=tmp_path / "run"))
    assert state == AcceleratorState._shared_state
    assert (before.gradient_accumulation_steps, before.state.mixed_precision) == (4, "bf16")


def test_variables_that_change_numbers_are_recorded_and_so_is_their_change(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    run = train(recipe, output_dir=tmp_path / "run", overrides=["train.steps=3"])
    assert described(run)["variables"]["NVIDIA_TF32_OVERRIDE"] == "1"
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    train(recipe, output_dir=run, resume=True, overrides=["train.steps=6"])
    changes = {change["field"]: change for change in described(run)["changes"]}
    assert changes["variables"]["from"]["NVIDIA_TF32_OVERRIDE"] == "1"
    assert "NVIDIA_TF32_OVERRIDE" not in changes["variables"]["to"]


def test_recorded_variables_hold_no_place_and_no_credential(monkeypatch):
    for name, value in {
        "TRITON_CACHE_DIR": "/home/me",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_COMPILE_REPLAY_RECORD": "/home/me/record",
        "HF_TOKEN": "hf_" + "a" * 30,
        "TORCHINDUCTOR_REDIS_URL": "redis://me:secret@here/",
    }.items():
        monkeypatch.setenv(name, value)
    found = numeric_variables()
    assert not {"TRITON_CACHE_DIR", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "HF_TOKEN"} & found.keys()
    assert found["TORCH_COMPILE_REPLAY_RECORD"] == "record"
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "no launcher has started this one (RANK is not set); unset WORLD"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number of processes, got 'many'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_several_processes_without_a_launcher_are_refused(
    command, variables, message, recipe, finished, tmp_path, monkeypatch, capsys
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = {"train": [str(recipe)], "eval": [str(finished / "model"), "--suite", "zoo-recall"]}
    assert main([command, *words[command], "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_away_from_a_terminal_every_line_of_metrics_is_printed(recipe, tmp_path, capsys):
    assert main(["train", str(recipe), "--output", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err.splitlines()
    measured = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(told) == len(measured)
    for words, line in zip(told, measured, strict=True):
        assert words.startswith(f"step {line['step']} of 12: ")
        name = "loss" if "loss" in line else "validation_loss"
        assert f"{name} {line[name]:.4g}" in words
        assert ("tokens_per_second " in words) == ("loss" in line)


FEW_FILES = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, most))
"""


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_too_many_open_files_name_the_limit(recipe, forks, tmp_path):
    """A stream keeps a file open for each of its lanes."""
    (tmp_path / "data").mkdir()
    for number in range(256):
        line = json.dumps({"text": f"ant bee cat {number}"})
        (tmp_path / "data" / f"{number}.jsonl").write_text(f"{line}\n" * 9)
    changes = [
        *("data.text=null", f"data.jsonl={tmp_path}/data", "data.streaming=true"),
        *("data.validation=null", "train.batch_size=64", "data.shuffle_buffer=1"),
    ]
    words = ["train", recipe, "--output", tmp_path / "run"]
    words += [word for change in changes for word in ("--set", change)]
    done = forks.run(FEW_FILES + COMMAND, *map(str, words))
    assert done.status == 2, done.log
    said = done.log.splitlines()[-1]
    assert "Too many open files" in said
    assert "raise the limit on open files (ulimit -n)" in said


def test_a_cache_that_cannot_be_written_names_its_variable(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # in which no folder can be made, whoever asks
    cache = tmp_path / "file" / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "ant bee"}\n' * 40)
    overrides = ["data.text=null", f"data.dataset={tmp_path / 'data'}"]
    with pytest.raises(RuntimeError, match=rf"the cache {cache} cannot .*; set HF_DATASETS_CACHE"):
        train(recipe, output_dir=tmp_path / "run", overrides=overrides)
