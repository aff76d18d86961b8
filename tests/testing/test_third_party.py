"""A family from somebody else's wheel, beside ours in a fresh environment, used as ours are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.environments import build_wheel, make_environment

# one worker builds one wheel of ours
pytestmark = pytest.mark.xdist_group("packaging")

HERE = Path(__file__).parent
TOY, GOOSE = HERE.parent / "toy_family", HERE.parent / "foreign_families" / "goose"
RECIPE = """
model: {family: toy, config: {hidden_size: 16, num_hidden_layers: 1}}
data: {text: text.txt, validation: 0.2}
train: {steps: 4, batch_size: 2, seq_len: 32, lr: 1.0e-2, seed: 0}
eval: {every: 4, batches: 1}
checkpoint: {every: 4, keep: 1}
log: {every: 1}
"""

# the Auto classes before any command, in a process that knows no more than `import ssmzoo.auto`
USE = """
import contextlib, io, json, sys
import ssmzoo.auto
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

model = sys.argv[1]
autos = (AutoModelForCausalLM, AutoModelForSequenceClassification)
found = {"classes": [type(auto.from_pretrained(model)).__name__ for auto in autos]}
found["model_type"] = AutoConfig.from_pretrained(model).model_type

from ssmzoo.cli.main import main

def told(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command]) == 0
    return out.getvalue()

found["generated"] = told("generate", model, "line", "--max-new-tokens", "4")
found["doctor"] = json.loads(told("doctor", model, "--length", "8", "--json"))
import ssmzoo_toy

print(json.dumps(found | {"file": ssmzoo_toy.__file__}))
"""


def test_the_page_on_adding_a_family_shows_this_recipe():
    page = TOY.parents[1].joinpath("docs", "add-a-family.md").read_text(encoding="utf-8")
    assert f"```yaml{RECIPE}```\n" in page


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    theirs = build_wheel(TOY, tmp_path_factory.mktemp("toy"))
    return make_environment(tmp_path_factory.mktemp("venv"), wheel, theirs)


@pytest.fixture(scope="module")
def model(environment):
    """A toy that ``ssmzoo train`` made."""
    (environment.folder / "toy.yaml").write_text(RECIPE)
    lines = [f"line {i} of a text that repeats itself\n" for i in range(400)]
    (environment.folder / "text.txt").write_text("".join(lines))
    environment.run("ssmzoo", "train", "toy.yaml", "--output", "run")
    return environment.folder / "run" / "model"


@pytest.mark.long
def test_it_passes_the_conformance_suite_from_the_command_line(environment):
    report = json.loads(environment.run("ssmzoo", "check", "toy", "--json"))
    outcomes = {row["name"]: row["status"] for row in report["checks"]}
    assert outcomes["padding"] == outcomes["trainer"] == outcomes["lora"] == "passed"
    assert set(outcomes.values()) <= {"passed", "skipped"}


@pytest.mark.long
def test_it_trains_generates_inspects_and_loads_by_auto_classes(environment, model):
    losses = [
        row["loss"]
        for row in map(json.loads, (model.parent / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ]
    assert losses[-1] < losses[0]
    assert json.loads((model.parent / "run.json").read_text())["versions"]["ssmzoo-toy"] == "0.1.0"
    found = json.loads(environment.run("python", "-c", USE, model))
    assert found["file"].startswith(str(environment.folder))
    assert found["classes"] == ["ToyForCausalLM", "ToyForSequenceClassification"]
    assert found["model_type"] == "ssmzoo_toy"
    assert found["generated"]
    assert found["doctor"]["model"]["layers"][0]["read"] == {"causal_conv1d": "cpu"}


# --- a package whose op is in C ------------------------------------------------------------------

SMALL = "{hidden_size: 32, num_hidden_layers: 2, head_dim: 16}"
SWEEP = """
models:
  Goose: {family: goose, config: {num_hidden_layers: 1, head_dim: 8}}
problems:
  pairs:
    data:
      task: mqar
      task_args: {num_pairs: 2, vocab_size: 16, seq_len: 12,
                  num_train: 16, num_validation: 8, num_test: 8}
    train: {steps: 2, batch_size: 4}
widths: [16]
learning_rates: [0.01]
seeds: [0]
"""
WORK = """
import contextlib, io, json
import torch
from pathlib import Path
from safetensors.torch import save_file
from ssmzoo.cli.main import main

def told(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command]) == 0, command
    return out.getvalue()

told("train", "goose.yaml", "--output", "run")
found = {"doctor": json.loads(told("doctor", "run/model", "--length", "8", "--json"))}
told("inspect", "run/model", "--output", "pictures", "--length", "16", "--sequences", "1")
told("sweep", "sweep.yaml", "--output", "sweep")
told("card", "run/model")
told("publish", "run/model", "./published")
found["files"] = sorted(path.name for path in Path("published").iterdir())

import ssmzoo.auto
from transformers import AutoModelForCausalLM

ids = torch.arange(40).view(2, 20)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained("run/model").eval()(ids).logits
save_file({"logits": logits}, "ours.safetensors")
print(json.dumps(found))
"""
ALONE = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from standalone_probe import hide_ours
hide_ours()
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("published", trust_remote_code=True).eval()
with torch.no_grad():
    save_file({"logits": model(torch.arange(40).view(2, 20)).logits}, "alone.safetensors")
"""


@pytest.fixture(scope="module")
def flock(wheel, tmp_path_factory):
    """An environment with the wheel of a family whose op is in C, and what ``WORK`` found there."""
    theirs = build_wheel(GOOSE, tmp_path_factory.mktemp("goose"))
    environment = make_environment(tmp_path_factory.mktemp("venv"), wheel, theirs)
    recipe = RECIPE.replace("toy", "goose").replace(
        "{hidden_size: 16, num_hidden_layers: 1}", SMALL
    )
    (environment.folder / "goose.yaml").write_text(recipe)
    (environment.folder / "sweep.yaml").write_text(SWEEP)
    lines = [f"line {i} of a text that repeats itself\n" for i in range(400)]
    (environment.folder / "text.txt").write_text("".join(lines))
    found = environment.run("python", "-c", WORK, HF_HUB_OFFLINE="1")
    return environment, json.loads(found.splitlines()[-1])


@pytest.mark.long
def test_an_op_in_c_of_another_wheel_runs_wherever_ours_do(flock):
    environment, found = flock
    for layer in found["doctor"]["model"]["layers"]:
        assert layer["read"]["goose_delta_rule"] == layer["step"]["goose_delta_rule"] == "cpu"
    folder = environment.folder
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    assert "Goose" in (folder / "sweep" / "ledger.csv").read_text()
    assert any(path.suffix == ".png" for path in (folder / "pictures").rglob("*"))


@pytest.mark.long
def test_it_is_published_with_its_formula_and_loads_where_nothing_of_ours_is(flock):
    environment, found = flock
    op = {name for name in found["files"] if name.startswith("ssmzoo_goose_delta_rule")}
    assert op == {"ssmzoo_goose_delta_rule.py", "ssmzoo_goose_delta_rule_reference.py"}
    environment.run("python", "-c", ALONE, HERE.parent / "publishing", HF_HUB_OFFLINE="1")
    ours, alone = (
        load_file(environment.folder / f"{name}.safetensors")["logits"]
        for name in ("ours", "alone")
    )
    torch.testing.assert_close(alone, ours, rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
