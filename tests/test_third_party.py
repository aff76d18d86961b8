"""A family from somebody else's wheel, beside ours in a fresh environment, used as ours are."""

import json
from pathlib import Path

import pytest
from tests.environments import build_wheel, make_environment

# one worker builds one wheel of ours
pytestmark = pytest.mark.xdist_group("packaging")

TOY = Path(__file__).with_name("toy_family")
RECIPE = """
model:
  family: toy
  config: {hidden_size: 16, num_hidden_layers: 1}
data:
  text: text.txt
  validation: 0.2
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
    page = TOY.parents[1].joinpath("plugins", "README.md").read_text(encoding="utf-8")
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
    found = json.loads(environment.run("python", "-c", USE, model))
    assert found["file"].startswith(str(environment.folder))
    assert found["classes"] == ["ToyForCausalLM", "ToyForSequenceClassification"]
    assert found["model_type"] == "ssmzoo_toy"
    assert found["generated"]
    assert found["doctor"]["model"]["layers"][0]["read"] == {"causal_conv1d": "cpu"}
