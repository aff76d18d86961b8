"""Families from somebody else's wheels, beside ours in a fresh environment, used as ours are.

All that makes models runs in one process; what reads them runs in a second, which knows no more
than ``import ssmzoo.auto``, and in a third where nothing of ours can be imported.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.environments import build_wheel, make_environment

# one worker builds one wheel of ours
pytestmark = pytest.mark.xdist_group("packaging")

HERE = Path(__file__).parent
TOY, LEAKY = HERE.parent / "toy_family", HERE.parent / "foreign_families" / "leaky"
RECIPE = """
model: {family: toy, config: {hidden_size: 16, num_hidden_layers: 1}}
data: {text: text.txt, validation: 0.2}
train: {steps: 4, batch_size: 2, seq_len: 32, lr: 1.0e-2, seed: 0}
eval: {every: 4, batches: 1}
checkpoint: {every: 4, keep: 1}
log: {every: 1}
"""

SMALL = "{hidden_size: 32, num_hidden_layers: 2}"
SWEEP = """
models:
  Leaky: {family: leaky, config: {num_hidden_layers: 1}}
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
TELL = """
import contextlib, io, json
from ssmzoo.cli.main import main

def told(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command]) == 0, command
    return out.getvalue()

"""
WORK = (
    TELL
    + """
from pathlib import Path

for name in ("toy", "leaky"):
    told("train", f"{name}.yaml", "--output", name)
found = {"doctor": json.loads(told("doctor", "leaky/model", "--length", "8", "--json"))}
told("inspect", "leaky/model", "--output", "pictures", "--length", "16", "--sequences", "1")
told("sweep", "sweep.yaml", "--output", "sweep")
told("card", "leaky/model")
told("publish", "leaky/model", "./published")
found["files"] = sorted(path.name for path in Path("published").iterdir())
found["check"] = json.loads(told("check", "toy", "--only", "padding,trainer,lora", "--json"))
print(json.dumps(found))
"""
)
# the Auto classes before any command
USE = (
    """
import ssmzoo.auto
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

autos = (AutoModelForCausalLM, AutoModelForSequenceClassification)
found = {"classes": [type(auto.from_pretrained("toy/model")).__name__ for auto in autos]}
found["model_type"] = AutoConfig.from_pretrained("toy/model").model_type
ids = torch.arange(40).view(2, 20)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained("leaky/model").eval()(ids).logits
save_file({"logits": logits}, "ours.safetensors")
"""
    + TELL
    + """
found["generated"] = told("generate", "toy/model", "line", "--max-new-tokens", "4")
found["doctor"] = json.loads(told("doctor", "toy/model", "--length", "8", "--json"))
found["list"] = json.loads(told("list", "--load", "--json"))
import ssmzoo_toy

print(json.dumps(found | {"file": ssmzoo_toy.__file__}))
"""
)
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


def test_the_page_on_adding_a_family_shows_this_recipe():
    page = TOY.parents[1].joinpath("docs", "add-a-family.md").read_text(encoding="utf-8")
    assert f"```yaml{RECIPE}```\n" in page


@pytest.fixture(scope="module")
def worked(wheel, tmp_path_factory):
    """An environment with the wheels of two families, one with an op in C, and what WORK found."""
    theirs = [build_wheel(path, tmp_path_factory.mktemp(path.name)) for path in (TOY, LEAKY)]
    environment = make_environment(tmp_path_factory.mktemp("venv"), wheel, *theirs)
    small = RECIPE.replace("{hidden_size: 16, num_hidden_layers: 1}", SMALL)
    lines = [f"line {i} of a text that repeats itself\n" for i in range(400)]
    for name, text in {
        "toy.yaml": RECIPE,
        "leaky.yaml": small.replace("toy", "leaky"),
        "sweep.yaml": SWEEP,
        "text.txt": "".join(lines),
    }.items():
        (environment.folder / name).write_text(text)
    found = environment.run("python", "-c", WORK, HF_HUB_OFFLINE="1")
    return environment, json.loads(found.splitlines()[-1])


@pytest.fixture(scope="module")
def used(worked):
    environment, _ = worked
    return json.loads(environment.run("python", "-c", USE))


def losses(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.long
def test_it_passes_the_kits_checks_from_the_command_line(worked):
    _, found = worked
    outcomes = {row["name"]: row["status"] for row in found["check"]["checks"]}
    assert outcomes == dict.fromkeys(("padding", "trainer", "lora"), "passed")


@pytest.mark.long
def test_it_trains_generates_inspects_and_loads_by_auto_classes(worked, used):
    environment, _ = worked
    run = environment.folder / "toy"
    found = losses(run)
    assert found[-1] < found[0]
    assert json.loads((run / "run.json").read_text())["versions"]["ssmzoo-toy"] == "0.1.0"
    assert used["file"].startswith(str(environment.folder))
    assert used["classes"] == ["ToyForCausalLM", "ToyForSequenceClassification"]
    assert used["model_type"] == "ssmzoo_toy"
    assert used["generated"]
    [row] = [row for row in used["list"] if row["name"] == "toy"]
    assert (row["status"], row["distribution"]) == ("ok", "ssmzoo-toy")
    assert used["doctor"]["model"]["layers"][0]["read"] == {"causal_conv1d": "cpu"}


@pytest.mark.long
def test_an_op_in_c_of_another_wheel_runs_wherever_ours_do(worked):
    environment, told = worked
    for layer in told["doctor"]["model"]["layers"]:
        assert layer["read"]["leaky_sum"] == layer["step"]["leaky_sum"] == "cpu"
    found = losses(environment.folder / "leaky")
    assert found[-1] < found[0]
    assert "Leaky" in (environment.folder / "sweep" / "ledger.csv").read_text()
    assert any(path.suffix == ".png" for path in (environment.folder / "pictures").rglob("*"))


@pytest.mark.long
def test_it_is_published_with_its_formula_and_loads_where_nothing_of_ours_is(worked, used):
    environment, told = worked
    op = {name for name in told["files"] if name.startswith("ssmzoo_leaky_leaky_sum")}
    assert op == {"ssmzoo_leaky_leaky_sum.py", "ssmzoo_leaky_leaky_sum_reference.py"}
    environment.run("python", "-c", ALONE, HERE.parent / "publishing", HF_HUB_OFFLINE="1")
    ours, alone = (
        load_file(environment.folder / f"{name}.safetensors")["logits"]
        for name in ("ours", "alone")
    )
    torch.testing.assert_close(alone, ours, rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
