"""Every installed family's losses over twenty steps are those of tests/golden.

The golden curve is float64. The mathematics may not move it by more than float32's epsilon: float64
rounding, amplified as much as float32's was measured to be, stays a million times below that. The
float32 curve, of the kernels that users run, may be twice as far from it as it was when it was
written, plus one rounding.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ssmzoo import families, load_family
from ssmzoo.files import write_text
from ssmzoo.training.run import make_optimizer

FOLDER = Path(__file__).with_name("golden")
STEPS, ROWS, LENGTH = 20, 4, 48
EPS = torch.finfo(torch.float32).eps


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
    command = f"pytest tests/test_golden.py --update-golden -k {path.stem}"
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
