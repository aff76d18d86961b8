"""The zoo's lists, the small models of the repository, and `make zoo` on models of a few steps."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import shared
import torch
import yaml
import zoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ssmzoo import families
from ssmzoo.checkpoints.loader import LOADER
from ssmzoo.checkpoints.weights import PRIMING
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation.evaluate import evaluate
from ssmzoo.evaluation.results import read_results
from ssmzoo.tasks import load_task
from ssmzoo.testing.golden import check_golden, write_golden
from ssmzoo.training.model import build_config, build_model

# one worker makes the small zoo once
pytestmark = pytest.mark.xdist_group("zoo")

ROOT = Path(__file__).resolve().parents[2]
SHELF = ROOT / "model_cards" / "small"
SHIPPED = sorted(path.name for path in SHELF.iterdir())
PAIR = ("bmojo-f-text", "llama-text")  # of docs/prime.md
LISTED = [name for name in SHIPPED if name not in PAIR]
ALWAYS = {"README.md", "config.json", "generation_config.json", "golden.safetensors"}
ALWAYS |= {LOADER, "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


# the lists


def test_the_zoo_has_every_family_and_the_chief_baselines_at_about_one_size():
    recipes = zoo.load_zoo(ROOT / "eval" / "zoo.yaml")
    kinds = {recipe.model.family or recipe.model.config_of for recipe in recipes.values()}
    assert kinds == {*families(), "mamba", "mamba2", "llama"} - {"hybrid"}  # of others' layers
    assert len(recipes) >= 12
    first = recipes["longhorn"]
    for name, recipe in recipes.items():
        config = build_config(recipe.model, byte_tokenizer())
        with torch.device("meta"):
            model = build_model(recipe.model, config)
        assert 1_400_000 <= model.num_parameters() <= 1_600_000, name
        assert recipe.data == first.data
        assert recipe.train.total_steps == 1500
        assert (recipe.train.batch_size, recipe.train.seq_len) == (8, 512)


def test_the_small_list_names_the_models_of_the_repository():
    recipes = zoo.load_zoo(ROOT / "eval" / "small.yaml")
    assert sorted(recipes) == LISTED
    assert sorted([*LISTED, *PAIR]) == SHIPPED
    assert {recipe.model.family for recipe in recipes.values()} == {*families()} - {"hybrid"}
    for name, recipe in recipes.items():
        config = json.loads((SHELF / name / "config.json").read_text())
        assert config["model_type"] == f"ssmzoo_{recipe.model.family}"
        for field, value in recipe.model.config.items():
            assert config[field] == value, (name, field)


def test_the_small_models_are_small():
    sizes = {}
    for name in SHIPPED:
        files = {path.name: path.stat().st_size for path in (SHELF / name).iterdir()}
        sizes[name] = sum(files.values())
        own = {"llama-text": ALWAYS - {LOADER}, "bmojo-f-text": {*ALWAYS, PRIMING}}
        assert files.keys() == own.get(name, ALWAYS)
    assert max(sizes[name] for name in LISTED) < 1_000_000, sizes
    assert sum(sizes.values()) < 8_000_000


# what was saved


@pytest.mark.parametrize("name", SHIPPED)
def test_a_small_model_gives_its_golden_logits(name):
    check_golden(SHELF / name)


def test_other_weights_a_lost_one_and_nan_do_not_pass_for_the_golden_model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHELF / "longhorn-induction", folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("dt_bias"))

    def saved(**changed):
        save_file({**weights, **changed}, folder / "model.safetensors", {"format": "pt"})

    saved(**{name: weights[name] * 1.001})
    with pytest.raises(AssertionError, match=r"float64 logits of .* are off by"):
        check_golden(folder)
    saved(**{name: weights[name] * float("nan")})
    with pytest.raises(AssertionError, match="off by nan"):
        check_golden(folder)
    saved(stranger=torch.zeros(1))
    with pytest.raises(AssertionError, match="stranger"):
        check_golden(folder)


def test_golden_logits_of_transformers_models_are_checked_in_float32(tmp_path):
    from tests.stock_models import tiny

    tiny("mamba").save_pretrained(tmp_path)
    write_golden(tmp_path)
    check_golden(tmp_path)
    golden = load_file(tmp_path / "golden.safetensors")
    golden["logits"] += 4 * (golden["float32_error"].item() + 1e-6)
    save_file(golden, tmp_path / "golden.safetensors")
    with pytest.raises(AssertionError, match=r"logits of .* are off by"):
        check_golden(tmp_path)


def claimed(name):
    """Return the accuracy that a small model's card states."""
    text = (SHELF / name / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---")[1])
    [metric] = [
        metric
        for result in metadata["model-index"][0]["results"]
        for metric in result["metrics"]
        if metric["type"] == "accuracy"
    ]
    return metric["value"], metadata


@pytest.mark.parametrize("name", [name for name in LISTED if not name.endswith("-text")])
def test_a_small_model_scores_what_its_card_says(name):
    recipe = zoo.load_zoo(ROOT / "eval" / "small.yaml")[name]
    task = load_task(str(recipe.data.task), "test", recipe.train.seed, **recipe.data.task_args)
    batch = task.batch(range(200))
    model = AutoModelForCausalLM.from_pretrained(SHELF / name)
    labels = torch.as_tensor(batch.labels)
    with torch.no_grad():
        logits = model(torch.as_tensor(batch.inputs)).logits
    asked = labels[:, 1:] != -100
    right = logits[:, :-1].argmax(-1)[asked] == labels[:, 1:][asked]
    accuracy, _ = claimed(name)
    assert accuracy > 0.9
    error = 3 * (accuracy * (1 - accuracy) / len(right)) ** 0.5
    assert abs(right.double().mean().item() - accuracy) <= error
    if name == "deltanet-parity":  # exactly
        assert accuracy == 1
        assert recipe.data.task_args["seq_len"] == 40
        assert right.all()


@pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning")  # of lm-eval
@pytest.mark.parametrize("name", [name for name in SHIPPED if name.endswith("-induction")])
def test_a_small_model_of_induction_answers_the_task_of_that_name(name, tmp_path):
    path = evaluate(SHELF / name, tasks=["ssmzoo_induction"], limit=50, output_dir=tmp_path)
    assert {row["value"] for row in read_results(path)["results"]} == {1.0}


@pytest.mark.parametrize("name", LISTED)
def test_the_card_of_a_small_model_has_the_command_that_makes_it(name, monkeypatch):
    made = []
    monkeypatch.setattr(
        zoo, "run_zoo", lambda listed, *_, **options: made.append((listed, options))
    )
    text = (SHELF / name / "README.md").read_text()
    monkeypatch.chdir(ROOT)
    commands = {match[1] for match in re.finditer(r"(python eval/programs/zoo\.py [^`\n]*)", text)}
    assert commands
    for command in commands:
        assert zoo.zoo(shlex.split(command)[2:]) == 0
        listed, options = made.pop()
        assert name in (options["only"] or zoo.load_zoo(listed))


# making one


LIST = """
shared:
  train: {steps: 4, batch_size: 2, lr: 1.0e-3, dtype: float32}
  eval: {batches: 1}
  checkpoint: {every: 1, keep: 1}
  log: {every: 1, curves: false}
models:
  of-text:
    model: {family: longhorn, config: {hidden_size: 16, num_hidden_layers: 1}}
    data: {text: python-stdlib, validation: 0.05}
    train: {seq_len: 64}
  of-a-task:
    model: {family: coffee, config: {hidden_size: 16, num_hidden_layers: 1}}
    data: {task: mqar, task_args: {num_pairs: 2, seq_len: 8, vocab_size: 16, num_train: 32, num_validation: 8, num_test: 8}}
"""  # noqa: E501
COMMAND = ["--list", "list.yaml", "--text", "text.txt", "--steps", "3"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a list and a text, which is the working directory."""
    lines = (f"the {i}th line of a text that says {i * i} and no more\n" for i in range(600))
    (tmp_path / "text.txt").write_text("".join(lines))
    (tmp_path / "list.yaml").write_text(LIST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return tmp_path


def trained(folder):
    """Return the steps that a run's metrics have."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def contents(folder):
    """Return the bytes of all files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_killed_zoo_resumes_and_a_finished_one_is_not_made_again(place, capsys):
    if not (killed := os.fork()):
        try:
            zoo.zoo(COMMAND)
        finally:
            os._exit(1)
    begun = Path("zoo/runs/of-text/checkpoints")
    deadline = time.monotonic() + 600
    while not list(begun.glob("step-*")):
        assert os.waitpid(killed, os.WNOHANG) == (0, 0)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert not Path("zoo/of-text").exists()
    assert zoo.zoo(COMMAND) == 0
    out = capsys.readouterr().out
    header, *rows = out.split("\n\n")[1].splitlines()
    assert header.split() == ["parameters", "tokens/s", "bits/byte", "recall", "mqar"]
    assert [row.split()[0] for row in rows] == ["of-text", "of-a-task"]
    for row in rows:
        name, parameters, *_ = row.split()
        folder = Path("zoo") / name
        check_golden(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert int(parameters.replace(",", "")) == model.num_parameters()
        assert trained(Path("zoo/runs") / name) == [1, 2, 3]
        assert f"# {name}\n" in (folder / "README.md").read_text()
        assert list(folder.glob("modeling_*.py"))
    files = [path for path in Path("zoo").rglob("*") if path.is_file()]
    lasting = [path for path in files if path.name not in ("zoo.json", ".lock")]
    before = {path: path.stat().st_mtime_ns for path in lasting}
    assert zoo.zoo(COMMAND) == 0
    again = capsys.readouterr().out
    assert again.split("\n\n")[1] == out.split("\n\n")[1]
    assert "of-text is trained\nof-text is scored\nof-text is published\n" in again
    assert before == {path: path.stat().st_mtime_ns for path in lasting}
    # what was trained otherwise is named, and what was asked before stays
    changed = LIST.replace("lr: 1.0e-3", "lr: 2.0e-3")
    Path("list.yaml").write_text(changed)
    assert zoo.zoo(COMMAND) == 2
    err = capsys.readouterr().err
    assert "train.lr must stay as zoo/runs/of-text was trained, 0.001, got 0.002" in err
    assert zoo.zoo([*COMMAND[:-1], "2"]) == 2
    assert "STEPS must stay as the zoo in zoo began, 3, got 2" in capsys.readouterr().err


@pytest.mark.long
def test_a_dry_run_to_the_hub_shows_private_repositories_and_sends_nothing(
    place, capsys, monkeypatch
):
    from ssmzoo.publishing import hub

    asked, publish = [], hub.publish

    def watched(*arguments, **options):
        asked.append(options)
        return publish(*arguments, **options)

    monkeypatch.setattr(hub, "publish", watched)
    command = [*COMMAND, "--only", "of-a-task", "--hub", "lab"]
    monkeypatch.setattr(zoo, "text_of", lambda recipes, text: [])
    assert zoo.zoo(command) == 2
    assert "needs a Hugging Face token; run `hf auth login`" in capsys.readouterr().err
    assert not Path("zoo").exists()
    assert zoo.zoo([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"of-a-task: \d+ files, .* bytes would go to lab/ssmzoo-of-a-task\n", out)
    assert "nothing published in lab on the Hub" in out
    assert [(options["private"], options["dry_run"]) for options in asked] == [(True, True)]
    assert not Path("zoo/published").exists()
    assert zoo.zoo([*command, "--dry-run", "--public"]) == 0
    assert not asked[-1]["private"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "of-txet"], r"ONLY must name models of list.yaml, got 'of-txet'; did you mean"),
        (["--only", ""], "ONLY must name models of list.yaml, got ''"),
        (["--steps", "0"], "STEPS must be a whole number from 1 on, got '0'"),
        (["--steps", "many"], "STEPS must be a whole number from 1 on, got 'many'"),
        (["--text", "absent"], "TEXT: 'absent' does not exist"),
        (["--text", "text.txt", "--only", "of-a-task"], "TEXT must be left out where no model"),
        (["--hub", "a/b"], "HUB must be an organisation or user, got 'a/b'"),
        (["--public"], "PUBLIC needs HUB"),
        (["--list", "absent.yaml"], "no file 'absent.yaml'"),
    ],
)
def test_a_wrong_wish_is_one_line_and_nothing_is_touched(place, arguments, message, capsys):
    assert zoo.zoo(["--list", "list.yaml", *arguments]) == 2
    refused(message, capsys)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("models:", "modles:", "list.yaml: the zoo has no field 'modles'; did you mean 'models'"),
        ("lr: 1.0e-3", "rl: 1.0e-3", "list.yaml, of-text: train has no field 'rl'"),
        ("seq_len: 64", "seq_len: 1", "list.yaml, of-text: train.seq_len must be greater than"),
        ("family: longhorn", "family: lonhgorn", "list.yaml, of-text: no family named 'lonhgorn'"),
        ("hidden_size", "hiden_size", "list.yaml, of-text: .*'hiden_size'.* did you mean"),
        ("num_pairs", "num_pears", "task mqar has no argument 'num_pears'"),
        ("of-text:", "runs:", "list.yaml: a model's name must be of letters, digits and hyphens"),
        ("of-text:", "../x:", "list.yaml: a model's name must be"),
    ],
)
def test_a_wrong_list_is_one_line_and_nothing_is_touched(place, right, wrong, message, capsys):
    Path("list.yaml").write_text(LIST.replace(right, wrong, 1))
    assert zoo.zoo(["--list", "list.yaml"]) == 2
    refused(message, capsys)


def refused(message, capsys):
    out, err = capsys.readouterr()
    assert re.search(message, err), err
    assert err.startswith("zoo: error: ")
    assert (out, err.count("\n")) == ("", 1)
    assert sorted(os.listdir()) == ["list.yaml", "text.txt"]


def test_models_of_several_texts_are_refused(place, capsys):
    other = LIST + "  more:\n    model: {family: s5}\n    data: {text: text.txt, validation: 0.1}\n"
    Path("list.yaml").write_text(other + "    train: {seq_len: 64}\n")
    assert zoo.zoo(["--list", "list.yaml"]) == 2
    refused("data.text must be the same for all models", capsys)


def test_a_text_that_was_too_short_may_be_another_one(place, capsys):
    Path("short.txt").write_text("too short\n")
    command = ["--list", "list.yaml", "--only", "of-text", "--text"]
    assert zoo.zoo([*command, "short.txt"]) == 2
    assert "TEXT must hold some thousand characters" in capsys.readouterr().err
    shared.require_same("zoo", Path("zoo"), {"text": "text.txt", "steps": None})


def test_a_list_with_another_text_is_not_trained_on_the_earlier_one(place, capsys, monkeypatch):
    monkeypatch.setattr(zoo, "make", lambda *_: None)
    monkeypatch.setattr(zoo, "table", lambda _: "")
    Path("other.txt").write_text(Path("text.txt").read_text().replace("no more", "more"))
    listed = LIST.replace("python-stdlib", "text.txt")
    Path("list.yaml").write_text(listed)
    assert zoo.zoo(["--list", "list.yaml", "--only", "of-a-task"]) == 0  # which reads none
    assert zoo.zoo(["--list", "list.yaml"]) == 0
    before = contents(Path("zoo"))
    Path("list.yaml").write_text(listed.replace("text.txt", "other.txt"))
    capsys.readouterr()
    assert zoo.zoo(["--list", "list.yaml"]) == 2
    err = capsys.readouterr().err
    assert re.search(
        r"TEXT must stay as the zoo in zoo began, \S+/text.txt, got \S+/other.txt", err
    )
    assert contents(Path("zoo")) == before


def test_a_model_that_was_published_with_its_code_is_published_without(place, capsys):
    record, target = Path("record.json"), Path("out").absolute()
    model = SHELF / "longhorn-induction"
    zoo.publish_once("tiny", model, record, zoo.Place(target))
    assert list((target / "tiny").glob("modeling_*.py"))
    zoo.publish_once("tiny", model, record, zoo.Place(target, code=False))
    assert [path.name for path in (target / "tiny").glob("*.py")] == ["load_with_ssmzoo.py"]
    zoo.publish_once("tiny", model, record, zoo.Place(target, code=False))
    assert capsys.readouterr().out.endswith("tiny is published\n")


def test_a_folder_of_something_else_is_left_alone(place, capsys):
    Path("zoo").mkdir()
    Path("zoo/thesis.tex").touch()
    assert zoo.zoo(COMMAND) == 2
    assert "zoo exists and holds no earlier zoo; choose another --output" in capsys.readouterr().err
    assert os.listdir("zoo") == ["thesis.tex"]


def test_a_table_leaves_missing_scores_and_speeds_empty(tmp_path):
    rows = []
    for name, task in (("a", "mqar"), ("b", "ssmzoo_recall_text"), ("c", "mqar")):
        (tmp_path / name).mkdir()
        speed = '{"tokens_per_second": 5.0}\n' if name != "c" else ""
        (tmp_path / name / "metrics.jsonl").write_text(speed + '{"step": 1}\n')
        score = {"task": task, "value": 0.25}
        found = {"model": {"parameters": 1234}, "results": [score]}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
        rows.append((name, tmp_path / name, tmp_path / f"{name}.json"))
    assert [line.split() for line in shared.table(rows).splitlines()] == [
        ["parameters", "tokens/s", "mqar", "recall"],
        ["a", "1,234", "5", "0.250"],
        ["b", "1,234", "5", "0.250"],
        ["c", "1,234", "0.250"],
    ]
