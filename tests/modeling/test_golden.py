"""Every installed family's losses, and the models that earlier versions saved, are tests/golden's.

The golden curve is float64. The mathematics may not move it by more than float32's epsilon: float64
rounding, amplified as much as float32's was measured to be, stays a million times below that. The
float32 curve, of the kernels that users run, may be twice as far from it as it was when it was
written, plus one rounding.

A model of each family lies in tests/golden/VERSION as that version saved it, and is never written
again once that version is released; its logits in float64 may not move by more than their float32
rounding.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import ssmzoo
from ssmzoo import families, load_family
from ssmzoo.files import write_text
from ssmzoo.testing.golden import EPS, check_golden, write_golden
from ssmzoo.training.optimizer import make_optimizer

FOLDER = Path(__file__).parents[1] / "golden"
STEPS, ROWS, LENGTH = 20, 4, 48
EXPECTED = "expected.safetensors"  # beside the models of tests/golden/VERSION
# as small as a file that is kept for ever should be
SMALLEST = {"vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 1}
SMALLEST_OF = {
    "bmojo": {"mixer_types": ["bmojo_f"], "num_attention_heads": 2, "num_key_value_heads": 1},
    "hybrid": {"num_hidden_layers": 4, "intermediate_size": 3},
    "linear_attention": {"num_heads": 2, "num_key_heads": 1},
    "mamba3": {"head_dim": 4, "d_state": 4},
    "rtf": {"num_denominators": 2},
    "rwkv7": {"head_dim": 2},
    "spacetime": {"n_kernels": 2},
}


def curve(family, dtype, *, lr=1e-2):
    """Return the losses of a run of the family's tiny model on sequences that can be foretold."""
    fields = {**family.tiny, **({"dropout": 0.0} if "dropout" in family.tiny else {})}
    config = family.config(**fields)
    torch.manual_seed(0)
    model = family.causal_lm_class(config).to(dtype).train()
    row, time = torch.arange(ROWS)[:, None], torch.arange(LENGTH)[None]
    ids = (3 * row + time * (row + 1)) % config.vocab_size
    optimizer = make_optimizer(model, lr=lr)
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        # not the model's own loss: transformers computes that in float32
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def difference(one, two):
    return (one - two).abs().max().item()


def write(path, exact, rounded):
    lines = ",\n  ".join(repr(loss) for loss in exact.tolist())
    error = f"{difference(exact, rounded):.2e}"
    write_text(path, f'{{"float32_error": {error}, "float64_losses": [\n  {lines}\n]}}\n')


def check(path, exact, rounded):
    command = f"pytest tests/modeling/test_golden.py --update-golden -k {path.stem}"
    if not path.exists():
        pytest.fail(f"tests/golden has no {path.name}; make it with: {command}")
    golden = json.loads(path.read_text())
    losses = torch.tensor(golden["float64_losses"], dtype=torch.float64)
    unit = EPS * losses.abs().max().item()
    for name, got, allowed in (
        ("float64", exact, unit),
        ("float32", rounded, 2 * (golden["float32_error"] + unit)),
    ):
        error = difference(got, losses)
        assert error <= allowed, (
            f"{name} losses are {error:.2e} from tests/golden/{path.name}, allowed {allowed:.2e}; "
            f"if they were meant to change: {command}"
        )


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.long
def test_twenty_steps_meet_the_golden_losses(name, request):
    family, path = load_family(name), FOLDER / f"{name}.json"
    exact, rounded = curve(family, torch.float64), curve(family, torch.float32)
    assert exact[-1] < exact[0] - 1
    if request.config.getoption("--update-golden"):
        write(path, exact, rounded)
    check(path, exact, rounded)


def test_a_changed_run_and_a_missing_curve_fail_with_the_command(tmp_path):
    family = load_family("longhorn")
    with pytest.raises(pytest.fail.Exception, match=r"--update-golden -k longhorn"):
        check(tmp_path / "longhorn.json", torch.ones(1), torch.ones(1))
    exact, rounded = curve(family, torch.float64), curve(family, torch.float32)
    write(tmp_path / "longhorn.json", exact, rounded)
    check(tmp_path / "longhorn.json", exact, rounded)
    changed = curve(family, torch.float64, lr=1.001e-2)
    with pytest.raises(AssertionError, match="float64 losses are"):
        check(tmp_path / "longhorn.json", changed, rounded)
    with pytest.raises(AssertionError, match="float32 losses are"):
        check(tmp_path / "longhorn.json", exact, changed)


def save_model(name, folder):
    """Save a family's smallest model, none of whose parameters is as it began, and its logits."""
    family = load_family(name)
    fields = family.tiny | SMALLEST | SMALLEST_OF.get(name, {})
    model = family.causal_lm_class(family.config(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_golden(folder, EXPECTED, length=8)


@pytest.mark.parametrize("name", sorted(families()))
def test_models_that_earlier_versions_saved_load_with_the_same_logits(name, request):
    if request.config.getoption("--update-golden") and not list(FOLDER.glob(f"*/{name}")):
        save_model(name, FOLDER / ssmzoo.__version__ / name)
    saved = list(FOLDER.glob(f"*/{name}"))
    assert saved, f"make the first: pytest tests/modeling/test_golden.py --update-golden -k {name}"
    for folder in saved:
        check_golden(folder, EXPECTED)


def test_a_renamed_and_a_changed_parameter_are_seen(tmp_path):
    save_model("longhorn", tmp_path)
    check_golden(tmp_path, EXPECTED)
    weights = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in weights if name.endswith("dt_bias")]
    renamed = {key.replace("dt_bias", "bias_dt"): value for key, value in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="dt_bias"):
        check_golden(tmp_path, EXPECTED)
    weights[name] += 0.01
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="off by"):
        check_golden(tmp_path, EXPECTED)
