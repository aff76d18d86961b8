"""A sweep of small models: its ledger, its pictures, and how it goes on after a kill."""

import gc
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from tests.forks import COMMAND, ended
from tests.training.runs import KilledError, killed_before, write_texts
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from ssmzoo.analysis.cost import flops_per_token, state_bytes
from ssmzoo.analysis.ledger import (
    best_rates,
    draw_problem,
    ledger_table,
    read_ledger,
    write_ledger,
)
from ssmzoo.analysis.sweep import find_unsupported, searched_lines, sweep
from ssmzoo.analysis.sweep_plan import Sweep, load_sweep, selected, selection
from ssmzoo.checkpoints.load import load_model
from ssmzoo.cli.main import main, parsers
from ssmzoo.cli.training import SWEEP as SWEEP_VERB
from ssmzoo.family import load_family
from ssmzoo.files import package_data
from ssmzoo.training import validation
from ssmzoo.training.checkpoint import locked
from ssmzoo.training.trainer import NotFiniteError, Run

TASK = {"num_pairs": 2, "vocab_size": 16, "seq_len": 12}
TASK |= {"num_train": 64, "num_validation": 16, "num_test": 32}
SWEEP = {
    "models": {
        "Longhorn": {"family": "longhorn", "config": {"num_hidden_layers": 1, "d_state": 4}},
        "Llama": {
            "config_of": "llama",
            "config": {
                **{"num_hidden_layers": 1, "intermediate_size": 16},
                **{"num_attention_heads": 2, "num_key_value_heads": 2},
            },
        },
    },
    "problems": {
        "pairs": {
            "data": {"task": "mqar", "task_args": TASK},
            "train": {"steps": 4, "batch_size": 8},
        },
    },
    "widths": [16],
    "learning_rates": [0.01, 0.03],
    "seeds": [0],
}
ROWS = {"batch_size": 2, "seq_len": 32}
TRACKING = {
    "data": {
        "task": "state_tracking",
        "task_args": {
            **{"group": "Z2", "seq_len": 8},
            **{"num_train": 16, "num_validation": 8, "num_test": 16},
        },
    },
    "train": {"steps": 1, "batch_size": 4},
    "eval": {"lengths": [20]},
}


def changed(**changes):
    return Sweep.model_validate({**SWEEP, **changes})


def one_run(**changes):
    """Return a sweep of one run."""
    models = {"Longhorn": SWEEP["models"]["Longhorn"]}
    return changed(**{"models": models, "learning_rates": [0.01], **changes})


def with_pairs(**changes):
    return {"pairs": {**SWEEP["problems"]["pairs"], **changes}}


@pytest.fixture(scope="module", autouse=True)
def quick_runs():
    """Leave out what takes longer than a tiny run: pictures, and looking for garbage everywhere."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmzoo.analysis.sweep.draw_problem", lambda *_: None)
        yield


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="ssmzoo")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ssmzoo"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a sweep of one run; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    sweep(one_run(), folder)
    return folder


@pytest.mark.long
def test_a_killed_sweep_resumes_and_its_ledger_has_a_line_per_run(tmp_path, monkeypatch, capsys):
    path, output = tmp_path / "sweep.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False), encoding="utf-8")
    with monkeypatch.context() as patch:
        killed_before(patch, 3)
        with pytest.raises(KilledError):
            sweep(path, output)
    assert main(["sweep", str(path), "--output", str(output)]) == 0
    shown, told = capsys.readouterr()
    assert [line.split()[0] for line in told.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]
    written = json.loads((output / "ledger.json").read_text())
    ledger = written["ledger"]
    assert [(line["model"], line["lr"]) for line in ledger] == [
        ("Longhorn", 0.01),
        ("Longhorn", 0.03),
        ("Llama", 0.01),
        ("Llama", 0.03),
    ]
    for line in ledger:
        assert 0 <= line["value"] <= 1
        assert (line["metric"], line["targets"], line["length"]) == ("accuracy", 32 * 2, 12)
        assert line["flops_per_token"] > line["parameters"] / 2
    # keys and values of 12 tokens; one layer's state and three inputs of its convolution
    assert ledger[2]["state_bytes"] == 2 * 12 * 16 * 4
    assert ledger[0]["state_bytes"] == (32 * 4 + 3 * 32) * 4
    assert ledger_table(ledger) in shown
    assert read_ledger(output / "ledger.csv") == ledger
    # a run's folder holds its result alone
    assert {x.name for x in (output / "runs/pairs/Llama-16-0.01-0").iterdir()} == {
        *(".lock", "result.json")
    }
    before = {path: path.stat().st_mtime_ns for path in output.rglob("result.json")}
    assert sweep(path, output) == ledger  # nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in output.rglob("result.json")} == before


def test_a_problem_is_drawn_with_all_that_its_ledger_has(tmp_path):
    lines = [
        line_of(seed, value, model=model, width=width, state_bytes=size, length=length)
        for model, size in (("a", 4), ("b", None), ("c", 4096))
        for width in (8, 16)
        for length in (4, 16)
        for seed, value in enumerate((0.9, 0.4))
    ]
    hole = {**line_of(None, None), "lr": None, "metric": None, "note": "no head"}
    diverged = {**line_of(0, None, model="d"), "metric": None, "validation": None}
    draw_problem([*lines, hole, diverged], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_seed_of_all_comes_first():
    runs = [run.place for run in changed(seeds=[0, 1], widths=[8, 16]).runs()]
    assert [run["seed"] for run in runs] == [0] * 8 + [1] * 8
    assert [(run["model"], run["width"]) for run in runs[:5:2]] == [
        ("Longhorn", 8),
        ("Longhorn", 16),
        ("Llama", 8),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"task": "mqar", "task_args": {**TASK, "power": 0.1}}}, "data.task_args was"),
        ({"eval": {"every": 2}}, "eval.every was 1000000000, is 2 now"),
    ],
)
def test_runs_of_another_sweep_are_not_taken_for_its_own(changes, message, finished, tmp_path):
    output = shutil.copytree(finished, tmp_path / "out")
    before = (output / "ledger.json").read_bytes()
    with pytest.raises(ValueError, match=f"Longhorn-16-0.01-0 was trained for another .*{message}"):
        sweep(changed(problems=with_pairs(**changes)), output)
    assert (output / "ledger.json").read_bytes() == before
    assert len(list(output.rglob("result.json"))) == 1


def test_a_sweep_goes_on_from_its_ledger_alone(finished, tmp_path):
    shutil.copy(finished / "ledger.csv", tmp_path)
    rates = one_run(learning_rates=[0.01, 0.03])
    ledger = sweep(rates, tmp_path)
    assert [line["lr"] for line in ledger] == [0.01, 0.03]
    assert ledger[:1] == read_ledger(finished / "ledger.csv")
    assert len(list(tmp_path.rglob("result.json"))) == 1
    shutil.rmtree(tmp_path / "runs")
    assert sweep(rates, tmp_path) == ledger
    assert not (tmp_path / "runs").exists()


def test_a_ledger_with_a_run_twice_is_not_counted_twice(finished, tmp_path):
    head, line = (finished / "ledger.csv").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.csv").write_text(head + line + line)
    with pytest.raises(ValueError, match=r"each run once, got problem pairs, .* twice"):
        sweep(one_run(), tmp_path)
    assert (tmp_path / "ledger.csv").read_text() == head + line + line


def test_a_pair_unsupported_before_is_trained_once_its_model_can(finished, tmp_path):
    (line,) = read_ledger(finished / "ledger.csv")
    hole = {**dict.fromkeys(line), "problem": "pairs", "model": "Longhorn", "width": line["width"]}
    write_ledger([{**hole, "note": "no head"}], tmp_path / "ledger.csv")
    (done,) = sweep(one_run(), tmp_path)
    assert done["value"] == line["value"]


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rates": [0.03]},
        {"models": {"Longhorn": {"family": "longhorn", "config": {"num_hidden_layers": 2}}}},
    ],
)
def test_a_ledger_of_another_sweep_is_neither_used_nor_lost(changes, finished, tmp_path):
    shutil.copy(finished / "ledger.csv", tmp_path)
    with pytest.raises(
        ValueError, match="another sweep's: problem pairs, model Longhorn, width 16"
    ):
        sweep(one_run(**changes), tmp_path)
    assert (tmp_path / "ledger.csv").read_bytes() == (finished / "ledger.csv").read_bytes()
    assert not (tmp_path / "runs").exists()


def test_a_cut_result_is_named_and_trained_again_once_it_is_gone(finished, tmp_path):
    output = shutil.copytree(finished, tmp_path / "out")
    (output / "ledger.csv").unlink()
    (result,) = output.rglob("result.json")
    whole = json.loads(result.read_text())
    result.write_text(result.read_text()[:-40])
    with pytest.raises(ValueError, match=r"result\.json"):
        sweep(one_run(), output)
    result.unlink()
    (line,) = sweep(one_run(), output)
    assert line["value"] == whole["lines"][0]["value"]
    assert json.loads(result.read_text())["lines"] == [line]


def test_a_sweep_beside_a_cut_ledger_trains_nothing(finished, tmp_path):
    cut = tmp_path / "ledger.csv"
    cut.write_text((finished / "ledger.csv").read_text()[:-40])
    before = cut.read_bytes()
    with pytest.raises(ValueError, match=r"ledger\.csv, line 2, is cut"):
        sweep(one_run(learning_rates=[0.01, 0.03]), tmp_path)
    assert cut.read_bytes() == before
    assert not (tmp_path / "runs").exists()
    cut.write_text("a,b\n")
    with pytest.raises(ValueError, match="must begin with the columns problem,model"):
        read_ledger(cut)


def test_a_recipe_has_the_same_digits_wherever_its_text_lies(tmp_path, monkeypatch):
    def digest(steps):
        rows = {"data": {"text": "x.txt", "validation": 0.5}, "train": {**ROWS, "steps": steps}}
        (run,) = one_run(problems={"rows": rows}).runs()
        return run.digest

    here = digest(1)
    monkeypatch.chdir(tmp_path)
    assert digest(1) == here
    assert digest(2) != here


def test_later_seeds_run_at_the_best_rate_alone(tmp_path):
    searched = one_run(learning_rates=[1e-9, 0.03], seeds=[0, 1, 2], search_seeds=1)
    half = sweep(searched, tmp_path, only={"seed": [1]})
    assert half == []  # nothing was searched yet
    ledger = sweep(searched, tmp_path)
    first = {line["lr"]: line["validation"] for line in ledger if line["seed"] == 0}
    best = max(first, key=first.__getitem__)
    assert [(x["lr"], x["seed"]) for x in ledger] == [
        *((1e-9, 0), (0.03, 0)),
        *((best, 1), (best, 2)),
    ]
    assert searched_lines(searched, tmp_path / "ledger.csv") == ledger
    write_ledger(ledger[1:], tmp_path / "part.csv")
    assert searched_lines(searched, tmp_path / "part.csv") == []
    write_ledger([{**ledger[0], "recipe": "0" * 12}], tmp_path / "other.csv")
    with pytest.raises(ValueError, match=r"other\.csv is another sweep's: .*seed 0"):
        searched_lines(searched, tmp_path / "other.csv")
    asked = sweep(searched, tmp_path, only={"lr": [1e-9, 0.03], "seed": [2]})
    assert {(x["lr"], x["seed"]) for x in asked} == {
        *((1e-9, 0), (0.03, 0), (best, 1)),
        *((1e-9, 2), (0.03, 2)),
    }


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_two_processes_share_a_folder_and_lose_no_line(tmp_path, forks, said):
    path, output = tmp_path / "sweep.yaml", tmp_path / "out"
    rates = [0.01, 0.02, 0.03]
    path.write_text(yaml.safe_dump({**SWEEP, "learning_rates": rates}), encoding="utf-8")

    def join_in(pid):
        while not ended(pid) and not list(output.rglob("run.json")):
            time.sleep(0.02)
        sweep(path, output)

    words = ("sweep", str(path), "--output", str(output))
    other = forks.run(COMMAND, *words, started=join_in)
    assert other.status == 0, other.log
    trained = [line for line in [*said(), *other.log.splitlines()] if ": accuracy" in line]
    assert len(trained) == 6  # none was trained twice
    assert 0 < len([line for line in said() if ": accuracy" in line]) < 6
    ledger = sweep(path, output, train=False)
    assert len({(line["model"], line["lr"]) for line in ledger}) == len(ledger) == 6


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path):
    with locked(tmp_path / "runs/pairs/Longhorn-16-0.01-0"):
        ledger = sweep(one_run(learning_rates=[0.01, 0.03]), tmp_path)
    assert [line["lr"] for line in ledger] == [0.03]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("model=Longhrn", "has no model 'Longhrn'; did you mean 'Longhorn'"),
        ("problem=pair", "has no problem 'pair'; did you mean 'pairs'"),
        ("lr=0.02", "has no lr 0.02; learning_rates: 0.01, 0.03"),
        ("seed=3", "has no seed 3; seeds: 0"),
        ("width=3", "has no width 3; widths: 16"),
        ("widht=3", "no field 'widht'; did you mean 'width'"),
        ("pairs", "only must look like .*got 'pairs'"),
        ("lr=x", "a number for lr, got 'lr=x'"),
    ],
)
def test_a_wrong_selection_is_refused_before_any_run(only, message, tmp_path):
    with pytest.raises((LookupError, ValueError), match=message):
        sweep(changed(), tmp_path / "out", only=selection([only]))
    assert not (tmp_path / "out").exists()


def test_one_command_runs_one_cell_and_a_table_runs_none(tmp_path, capsys):
    path, output = tmp_path / "sweep.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False), encoding="utf-8")
    command = ["sweep", str(path), "--output", str(output), "--json"]
    chosen = "problem=pairs,model=Llama,width=16,lr=3e-2,seed=0"
    assert main([*command, "--only", chosen, "--keep"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["model"], line["lr"]) == ("Llama", 0.03)
    model = output / "runs/pairs/Llama-16-0.03-0/model"
    assert isinstance(AutoModelForCausalLM.from_pretrained(model), LlamaForCausalLM)
    assert main([*command, "--table"]) == 0
    assert json.loads(capsys.readouterr().out) == [line]
    command[3] = str(tmp_path / "other")
    assert main([*command, "--table"]) == 2
    assert "other holds neither runs nor a ledger" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_set_adds_a_model_to_a_sweep(tmp_path, capsys):
    path, output = tmp_path / "sweep.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False), encoding="utf-8")
    mine = "models.mine={family: s4, config: {num_hidden_layers: 1, d_state: 4}}"
    command = ["sweep", str(path), "--output", str(output), "--json", "--set", mine]
    assert main([*command, "--only", "model=mine,lr=0.01"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["model"], line["lr"], line["note"]) == ("mine", 0.01, None)
    assert main([*command[:-1], "models.mine={familly: s4}", "--table"]) == 2
    assert "familly" in capsys.readouterr().err


@cache
def loaded(name, *overrides):
    """Return a shipped sweep and its runs, of which ``zoo`` has thousands."""
    chosen = load_sweep(name, overrides)
    return chosen, chosen.runs()


def commands_of_sweeps():
    """Return the commands that pages give, and the verb's own example, as their arguments."""
    root = Path(__file__).parents[2]
    pages = [root / name for name in ("README.md", "docs/evaluate.md", "eval/zoo.md")]
    text = "\n".join([*(page.read_text(encoding="utf-8") for page in pages), SWEEP_VERB.example])
    found = re.findall(r"ssmzoo (sweep zoo [^`\n#]*)", text)
    return [shlex.split(command) for command in found]


@pytest.mark.parametrize("command", commands_of_sweeps(), ids=" ".join)
@pytest.mark.long
def test_the_sweeps_that_pages_show_choose_runs(command):
    options = parsers()[0].parse_args(command)
    chosen, runs = loaded(options.sweep, *options.set)
    assert selected(chosen, runs, selection(options.only))


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_of_a_sweep_is_named_before_any_run(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RuntimeError, match=r"output_dir '.*' cannot be written: Not a directory"):
        sweep(one_run(), tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


FEW = {"num_train": 16, "num_validation": 8, "num_test": 8}


def labelled(task, evaluated=None, **task_args):
    """Return a problem of labelled examples, trained for one step."""
    problem = {"data": {"task": task, "task_args": task_args}}
    problem["train"] = {"steps": 1, "batch_size": 4}
    return problem | {"eval": evaluated or {"batches": 2}}


@pytest.fixture(scope="module")
def of_all_kinds(tmp_path_factory):
    """Return the lines of a sweep over every kind of problem, by problem and model."""
    folder = tmp_path_factory.mktemp("kinds")
    series = "date,a,b\n" + "".join(f"{i},{i % 7},{i % 5}\n" for i in range(200))
    (folder / "series.csv").write_text(series)
    columns = {"data": str(folder / "series.csv"), "columns": ["a", "b"], "lag": 12, "horizon": 4}
    endless = {"task": "mqar", "task_args": {"num_pairs": 2, "vocab_size": 16}, "validation": 12}
    text = {"text": str(write_texts(folder / "texts")), "validation": 0.2}
    problems = {
        "parity": TRACKING,
        "digits": labelled("digits", pixels=True),
        "listops": labelled("listops", min_length=3, max_length=12, max_depth=3, **FEW),
        "copying": labelled("copying", length=3, vocab_size=4, **FEW),
        "delay": labelled("delay", length=16, delay=2, num_train=16, num_test=8),
        "rows": {
            "data": endless,
            "train": {"steps": 1, "batch_size": 4, "seq_len": 12},
            "eval": {"lengths": [24, 8]},
        },
        "text": {"data": text, "train": {**ROWS, "steps": 1}, "eval": {"lengths": [128]}},
    }
    chosen = changed(problems=problems, learning_rates=[0.01])
    ledger = sweep(chosen, folder / "out")
    assert read_ledger(folder / "out/ledger.csv") == ledger
    forecast = {"forecast": labelled("forecast", {"batches": "all"}, **columns)}
    fields = {"num_hidden_layers": 1, "n_kernels": 2}
    spacetime = {"SpaceTime": {"family": "spacetime", "config": fields}}
    ledger += sweep(one_run(models=spacetime, problems=forecast), folder / "forecast")
    found = {}
    for line in ledger:
        found.setdefault((line["problem"], line["model"]), []).append(line)
    return found


@pytest.mark.parametrize("problem", ["digits", "listops", "copying"])
@pytest.mark.long
def test_classes_of_sequences_and_of_tokens_are_problems_too(problem, of_all_kinds):
    for model in ("Longhorn", "Llama"):
        (line,) = of_all_kinds[problem, model]
        assert line["metric"] == "accuracy"
        assert line["flops_per_token"] > 0
        assert line["state_bytes"] > 0
    assert of_all_kinds[problem, "Longhorn"][0]["state_bytes"] == (32 * 4 + 3 * 32) * 4


@pytest.mark.long
def test_regressions_and_forecasts_are_ranked_by_their_errors(of_all_kinds):
    (line,) = of_all_kinds["delay", "Longhorn"]
    assert (line["metric"], line["length"]) == ("rmse", 16)
    assert line["state_bytes"] == (32 * 4 + 3 * 32) * 4
    (line,) = of_all_kinds["forecast", "SpaceTime"]
    assert line["metric"] == "mse"
    assert line["value"] > 0


def test_an_unsupported_pair_is_listed_with_its_reason(of_all_kinds):
    (line,) = of_all_kinds["delay", "Llama"]
    assert line["value"] is None
    assert "token_regression" in line["note"]
    assert "Llama: none, for transformers has no model" in ledger_table([line])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            {"Llama": {"config_of": "llama", "config": {"num_hiden_layers": 1}}},
            r"models\.Llama on problems\.pairs: .*num_hiden_layers",
        ),
        ({"x": {"config_of": "lama"}}, r"models\.x on problems\.pairs: .*'lama'"),
    ],
)
def test_a_typo_in_a_model_is_an_error_and_no_unsupported_pair(models, message, tmp_path):
    with pytest.raises(LookupError, match=message):
        sweep(changed(models=models), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_longer_examples_are_evaluated_after_the_training(of_all_kinds):
    lines = of_all_kinds["parity", "Longhorn"]
    assert [line["length"] for line in lines] == [8, 20]
    assert [line["targets"] for line in lines] == [16 * 8, 16 * 20]
    assert all(0 <= line[name] <= 1 for line in lines for name in ("value", "last"))
    assert "at 8" in ledger_table(lines)
    assert "at 20" in ledger_table(lines)


def test_generated_rows_are_evaluated_at_other_lengths_too(of_all_kinds):
    lines = of_all_kinds["rows", "Longhorn"]
    # as many tokens in longer rows and shorter ones
    assert [(line["length"], line["targets"]) for line in lines] == [
        (12, 12 * 2),
        (24, 6 * 2),
        (8, 18 * 2),
    ]
    assert all(line["last"] is None for line in lines)


def test_text_is_scored_in_bits_per_byte_at_two_lengths(of_all_kinds):
    short, long = of_all_kinds["text", "Longhorn"]
    assert (short["length"], long["length"]) == (32, 128)
    for line in (short, long):
        assert line["metric"] == "bits_per_byte"
        assert 6 < line["value"] < 9  # next to nothing is learned of 256 bytes
    assert long["targets"] > 0.8 * short["targets"]


def test_examples_of_many_lengths_count_as_equally_long_at_every_seed(tmp_path):
    problem = labelled("listops", min_length=3, max_length=40, **FEW)
    chosen = one_run(problems={"p": problem}, seeds=[0, 1])
    for seed in (1, 0):  # as two processes would
        ledger = sweep(chosen, tmp_path, only={"seed": [seed]})
    assert [line["seed"] for line in ledger] == [0, 1]
    for name in ("length", "state_bytes", "flops_per_token"):
        assert len({line[name] for line in ledger}) == 1, name


def test_a_length_without_a_finite_loss_has_a_line_without_a_value(tmp_path, monkeypatch):
    measure = validation.evaluate_parts

    def lost_at_20(learner, parts, *given):
        found = measure(learner, parts, *given)
        return found | {"loss": math.nan} if found["targets"] == 16 * 20 else found

    monkeypatch.setattr(validation, "evaluate_parts", lost_at_20)
    short, long = sweep(one_run(problems={"parity": TRACKING}), tmp_path)
    assert (short["length"], long["length"]) == (8, 20)
    assert short["value"] is not None
    assert (long["value"], long["metric"], long["note"]) == (None, "accuracy", None)
    assert ledger_table([short, long]).splitlines()[2].split()[4] == f"{short['value']:.3f}"


def test_a_run_on_text_that_was_changed_since_is_not_used_again(tmp_path):
    texts = write_texts(tmp_path / "texts")
    data = {"text": str(texts), "validation": 0.2}
    rows = one_run(problems={"text": {"data": data, "train": {**ROWS, "steps": 1}}})
    (line,) = sweep(rows, tmp_path / "out")
    file = next(file for file in texts.rglob("*") if file.is_file())
    before = file.read_text()
    file.write_text(before[:-2] + "?\n")
    with pytest.raises(ValueError, match=r"on other text: problems\.text\.data names files"):
        sweep(rows, tmp_path / "out")
    file.write_text(before)
    assert sweep(rows, tmp_path / "out") == [line]


def test_a_run_that_diverges_is_a_line_and_the_worst_rate(tmp_path, monkeypatch):
    def diverge(run):
        raise NotFiniteError("the loss must be finite, got loss nan; no checkpoint yet")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_collect", diverge)
        sweep(one_run(), tmp_path)
    ledger = sweep(one_run(learning_rates=[0.01, 0.03]), tmp_path)
    assert ledger[0]["value"] is None
    assert ledger[0]["note"] == "diverged: the loss must be finite, got loss nan"
    assert best_rates(ledger)["pairs", "Longhorn", 16] == [ledger[1]]


def test_a_run_whose_validation_is_no_number_is_finished_and_diverged(tmp_path):
    """The step itself had a finite loss: only what is measured after it has none."""
    runs = one_run(
        learning_rates=[0.01, 1e30],
        problems=with_pairs(train={"steps": 1, "batch_size": 8, "clip": 0}),
        seeds=[0, 1],
        search_seeds=1,
    )
    ledger = sweep(runs, tmp_path)
    diverged = [line for line in ledger if line["value"] is None]
    assert [(line["lr"], line["seed"]) for line in diverged] == [(1e30, 0)]
    assert diverged[0]["note"] == "diverged: its loss on held-out examples is no finite number"
    others = [(line["lr"], line["seed"]) for line in ledger if line not in diverged]
    assert others == [(0.01, 0), (0.01, 1)]


@pytest.mark.parametrize("stock", [False, True])
def test_a_sweep_trains_stock_where_that_is_asked_for(stock, tmp_path, monkeypatch):
    def train(recipe, *, stock, **options):
        asked.append(stock)
        raise ValueError("enough")

    asked = []
    monkeypatch.setattr("ssmzoo.training.run.train", train)
    with pytest.raises(RuntimeError, match="enough"):
        sweep(one_run(), tmp_path, stock=stock)
    assert asked == [stock]


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    take_step = Run.take_step

    def fail(run, read):
        if run.recipe.train.lr == 0.01:
            raise RuntimeError("no such luck")
        return take_step(run, read)

    monkeypatch.setattr(Run, "take_step", fail)
    runs = one_run(learning_rates=[0.01, 0.03])
    with pytest.raises(RuntimeError, match=r"1 runs failed, the first: .*lr 0.01.*no such luck"):
        sweep(runs, tmp_path)
    (line,) = read_ledger(tmp_path / "ledger.csv")
    assert line["lr"] == 0.03


def test_the_best_rate_is_best_on_average_over_the_seeds():
    def lines(metric, values):
        return [
            {
                **{"problem": "p", "model": "a", "width": 8, "lr": lr, "seed": seed},
                **{"metric": metric, "validation": found},
            }
            for lr, seeds in values.items()
            for seed, found in enumerate(seeds)
        ]

    found = best_rates(lines("accuracy", {0.1: (0.9, 0.1), 0.2: (0.6, 0.6), 0.3: (1.0, None)}))
    assert {line["lr"] for line in found["p", "a", 8]} == {0.2}
    found = best_rates(lines("bits_per_byte", {0.1: (0.9, 0.1), 0.2: (0.6, 0.6)}))
    assert {line["lr"] for line in found["p", "a", 8]} == {0.1}
    # of a searched sweep, by the seeds that all rates have
    found = best_rates(lines("accuracy", {0.1: (0.7, 0.1, 0.1), 0.2: (0.6,)}))
    assert [line["validation"] for line in found["p", "a", 8]] == [0.7, 0.1, 0.1]


def test_a_saved_model_and_a_foreign_family_enter_a_sweep(tmp_path, monkeypatch):
    family = load_family("longhorn")
    fields = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "d_state": 4}
    family.causal_lm_class(family.config(**fields)).save_pretrained(tmp_path / "saved")
    site = tmp_path / "site"
    theirs = Path(__file__).parents[1] / "foreign_families" / "gru/ssmzoo_gru"
    shutil.copytree(theirs, site / "ssmzoo_gru")
    facts = site / "ssmzoo_gru-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ssmzoo-gru\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[ssmzoo.families]\ngru = ssmzoo_gru:FAMILY\n")
    monkeypatch.syspath_prepend(str(site))
    models = {
        "saved": {"init_from": str(tmp_path / "saved")},
        "gru": {"family": "gru", "config": {"num_hidden_layers": 1}},
    }
    ledger = sweep(one_run(models=models), tmp_path / "out")
    assert [(line["model"], line["width"]) for line in ledger] == [("saved", None), ("gru", 16)]
    assert all(0 <= line["value"] <= 1 for line in ledger)
    assert "own" in ledger_table(ledger)


def test_the_cache_size_is_counted_for_any_model():
    theirs = MambaForCausalLM(
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, state_size=4)
    ).eval()
    counted = state_bytes(theirs, 10)
    # per layer 16 channels of 4 states and 4 columns of the convolution
    assert counted == 2 * 16 * (4 + 4) * 4
    family = load_family("dss")
    ours = family.causal_lm_class(family.config(**family.tiny)).eval()
    with torch.no_grad():
        cache = ours(torch.zeros(1, 10, dtype=torch.long), use_cache=True).cache
    assert state_bytes(ours, 10) == cache.nbytes
    assert flops_per_token(ours, 10) > 0


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_counts_among_the_operations(heads):
    config = LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24},
        **{"num_attention_heads": 2, "num_key_value_heads": heads},
    )
    projections = 3 * (2 * 16 * 16 + 2 * 16 * 8 * heads + 3 * 16 * 24) + 16 * 16
    for length in (8, 64):  # a token's scores over the row, and as many products with values
        expected = 2 * projections + 3 * 2 * length * 2 * 16
        assert flops_per_token(LlamaForCausalLM(config).eval(), length) == expected
    family = load_family("bmojo")
    fields = {**family.tiny, "sliding_window": 16, "num_fading_tokens": 0}
    full, bare = (family.config(**{**fields, "num_eidetic_tokens": m}) for m in (8, 0))
    more, less = (
        flops_per_token(family.causal_lm_class(config).eval(), 64) for config in (full, bare)
    )
    # in one layer, 4 heads of 8: eight rows of memory for the 48 tokens behind the first window
    assert more - less == 4 * 8 * 4 * 8 * 48 // 64


OTHERS = {
    "mamba2": (
        {"num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1},
        # by layer the states of 4 heads, and 4 columns of a convolution over x, B and C
        lambda tokens: 2 * (4 * 8 * 8 + (32 + 2 * 8) * 4) * 4,
    ),
    "llama": (
        {"num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2},
        lambda tokens: 2 * 2 * 16 * tokens * 4,
    ),
    "recurrent_gemma": (
        {
            **{"num_hidden_layers": 3, "intermediate_size": 32, "num_attention_heads": 2},
            **{"lru_width": 16, "attention_window_size": 8},
        },
        # two recurrent blocks with 3 columns of a convolution, and a window's keys and values
        lambda tokens: (2 * 16 * (1 + 3) + 2 * 16 * min(tokens, 7)) * 4,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_transformers_enter_a_sweep(name, tmp_path):
    config, kept = OTHERS[name]
    if name == "mamba2":
        config = {**config, "expand": 2, "chunk_size": 4}
    section = {"config_of": name, "config": config}
    (line,) = sweep(one_run(models={name: section}), tmp_path / "out", keep=True)
    assert line["flops_per_token"] > 0
    folder = tmp_path / f"out/runs/pairs/{name}-16-0.01-0/model"
    model = load_model(str(folder), folder, "float32", False)
    for tokens in (4, 12, 20):
        # besides, caches with a window count their tokens
        assert kept(tokens) <= state_bytes(model, tokens) <= kept(tokens) + 16
    assert kept(12) <= line["state_bytes"] <= kept(12) + 16


def test_a_model_that_keeps_nothing_has_no_size():
    config = BertConfig(
        **{"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "is_decoder": False},
        **{"num_attention_heads": 1, "intermediate_size": 8},
    )
    assert state_bytes(BertForMaskedLM(config).eval(), 5) is None
    assert "none" in ledger_table([line_of(0, 0.5, state_bytes=None)])


def line_of(seed, value, **columns):
    """Return a line of a ledger."""
    place = {"problem": "p", "model": "b", "width": 8, "lr": 0.1, "seed": seed, "length": 4}
    sizes = {"state_bytes": 4, "flops_per_token": 3, "parameters": 2}
    return {**place, **sizes, "metric": "accuracy", "validation": value, "value": value, **columns}


def test_the_table_shows_number_mean_and_range_of_seeds():
    ledger = [line_of(seed, value) for seed, value in enumerate((0.9, 0.1, 0.2))]
    row = ledger_table(ledger).splitlines()[2].split()
    assert row == ["b", "8", "0.1", "3", "0.400", "(0.100", "to", "0.900)", "4", "3", "2"]
    assert "to" not in ledger_table(ledger[:1]).splitlines()[2].split()


def test_a_table_says_that_all_diverged_and_at_which_length():
    lost = line_of(0, None, metric=None, validation=None)
    title, heads, row = ledger_table([lost]).splitlines()
    assert (title, heads.split()[3:5]) == ("p", ["seeds", "at"])
    assert row.split()[3:5] == ["1", "diverged"]
    longer = [line_of(0, 0.5), line_of(0, None, length=16), line_of(1, 0.7, length=16)]
    assert ledger_table(longer).splitlines()[2].split()[4:8] == ["0.500", "0.700,", "1", "diverged"]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"search_seeds": 0}, ValueError, "search_seeds"),
        ({"search_seeds": 2}, ValueError, "search_seeds must be at most the 1 seeds, got 2"),
        ({"width": [3]}, LookupError, "the sweep has no field 'width'; did you mean 'widths'"),
        ({"widths": []}, ValueError, "widths"),
        ({"problems": {}}, ValueError, "problems"),
        ({"models": {"../x": {"family": "dss"}}}, ValueError, r"folders are called by .*'\.\./x'"),
        ({"problems": {"a/b": TRACKING}}, ValueError, "folders are called by .*'a/b'"),
        (
            {"models": {"a b": {"family": "dss"}, "a-b": {"family": "dss"}}},
            ValueError,
            "must not repeat, got pairs/a-b-16-0.01-0 twice",
        ),
        (
            {"widths": [16, 16]},
            ValueError,
            "must not repeat, got pairs/Longhorn-16-0.01-0 twice",
        ),
        (
            {"problems": with_pairs(train={"step": 4, "batch_size": 8})},
            LookupError,
            "did you mean 'steps'",
        ),
        ({"models": {"x": {"famly": "dss"}}}, LookupError, "did you mean 'family'"),
        ({"problems": with_pairs(data={"task": "mqra"})}, LookupError, "did you mean 'mqar'"),
        ({"problems": with_pairs(trian={})}, LookupError, "did you mean 'train'"),
        (
            {"problems": with_pairs(train={"steps": 4, "batch_size": 8, "lr": 1})},
            ValueError,
            "lr must be left out of problems.pairs.train",
        ),
        (
            {"problems": with_pairs(train={"steps": 4, "batch_size": 8, "seed": 0})},
            ValueError,
            "seeds say it, got 0",
        ),
        (
            {"models": {"x": {"family": "dss", "config": {"hidden_size": 8}}}},
            ValueError,
            "left out of models.x.config, since widths say it, got 8",
        ),
        (
            {"problems": {"rows": {"data": {"text": "x"}, "train": {**ROWS, "steps": 1}}}},
            ValueError,
            "problems.rows.data needs validation",
        ),
        (
            {"problems": {"d": {**TRACKING, "data": {"task": "digits"}}}},
            ValueError,
            "eval.lengths must be absent with data.task 'digits'",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_before_any_run(changes, kind, message, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, **changes}, sort_keys=False), encoding="utf-8")
    with pytest.raises(kind, match=message):
        load_sweep(path)


@pytest.mark.parametrize(
    "path", sorted(package_data("eval/sweeps").glob("*.yaml")), ids=lambda p: p.stem
)
@pytest.mark.long
def test_shipped_sweeps_are_valid_down_to_the_configurations(path):
    _, runs = loaded(path.stem)
    if path.stem != "zoo":
        assert find_unsupported(runs) == {}
        return
    known = ("longhorn", "mamba", "llama")  # of all on one problem, and these on all
    first = runs[0].place["problem"]
    unsupported = find_unsupported(
        run for run in runs if run.place["problem"] == first or run.place["model"] in known
    )
    # missing heads, and nothing else
    assert {cell[:2] for cell in unsupported} == {
        *(("listops", "mamba"), ("digits", "mamba")),
        *(("delay", "mamba"), ("delay", "llama")),
    }


def test_a_missing_sweep_is_one_line(tmp_path, capsys):
    assert main(["sweep", str(tmp_path / "none.yaml"), "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no sweep" in line
    assert main(["sweep", "bmojo-mqar-toyy", "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no sweep 'bmojo-mqar-toyy'; did you mean 'bmojo-mqar-toy'?; shipped: " in line


def test_reading_recipes_and_sweeps_does_not_import_torch():
    line = "import sys, ssmzoo.analysis.sweep, ssmzoo.training.run; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
