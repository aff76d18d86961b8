"""Families of other packages and other kinds, which docs/add-a-family.md lists, pass the kit."""

import importlib
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tests.environments import import_package
from tests.oracles import goose as oracle
from tests.oracles.judging import numbers, relative
from tests.plugins.causes import ONE_DICTIONARY

from ssmzoo.analysis.measure import measure_layers
from ssmzoo.cli.main import main
from ssmzoo.testing import FamilyConformance, OpContract, check
from ssmzoo.testing.subject import Subject
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

FOLDER = Path(__file__).parents[1] / "foreign_families"
FAMILIES = {
    name: import_package(FOLDER / name / f"ssmzoo_{name}").FAMILY
    for name in ("gru", "spiral", "window", "goose")
}
DELTA_RULE, GOOSE = (
    importlib.import_module(f"ssmzoo_goose.{name}") for name in ("delta_rule", "modeling_goose")
)


@pytest.mark.variant  # goose, below, has all of them
class TestGRU(FamilyConformance):
    family = FAMILIES["gru"]


@pytest.mark.variant
class TestSpiral(FamilyConformance):
    family = FAMILIES["spiral"]


@pytest.mark.variant
class TestWindow(FamilyConformance):
    family = FAMILIES["window"]


class TestGoose(FamilyConformance):
    family = FAMILIES["goose"]
    oracle = staticmethod(oracle.logits)


def test_one_dictionary_for_both_directions_fails():
    with mock.patch.object(*ONE_DICTIONARY):
        (result,) = check(FAMILIES["goose"], only=["bidirectional"]).results
    assert result.status == "failed"
    assert "reversed outputs" in result.detail


class TestDeltaRule(OpContract):
    op, declaration = staticmethod(DELTA_RULE.delta_rule), DELTA_RULE.DELTA_RULE
    sizes = {"B": 2, "L": 40, "H": 2, "K": 4, "V": 3}
    many = {"L": 300, "H": 4, "K": 16, "V": 17}
    ragged = {"B": 4, "L": 37, "H": 2, "K": 5, "V": 19}
    # states of random ones would grow beyond all bounds
    values = {"w": torch.sigmoid, "a": lambda a: a / 4, "b": lambda b: b / 4}


@pytest.mark.parametrize("backend", ["reference", "eager", "cpu"])
def test_the_op_computes_the_papers_equation(backend):
    length, heads, keys, values = 21, 2, 5, 3
    r, w, k, a, b = (numbers(length, heads, keys, seed=i) / 2 for i in range(5))
    w, v, start = 1 / (1 + np.exp(w)), numbers(length, heads, values), numbers(heads, values, keys)
    given = [torch.from_numpy(x)[None] for x in (r, w, k, v, a, b)]
    given.append(torch.from_numpy(start).mT[None])
    y, final = DELTA_RULE.delta_rule(*given, backend=backend)
    for h in range(heads):
        own = (x[:, h] for x in (r, w, k, v, a, b))
        known, last = oracle.delta_rule(*own, start[h])
        assert relative(y[0, :, h], known) < 1e-14
        assert relative(final[0, h].mT, last) < 1e-14


def test_a_model_runs_its_packages_kernel_and_is_the_same_in_torch():
    model, ids = Subject(FAMILIES["goose"]).fresh().double(), torch.arange(20)[None]
    with watch() as ran:
        logits = model(ids).logits
    assert {backend for op, backend in ran if op == "goose_delta_rule"} == {"cpu"}
    with use_backend("eager"):
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-12, atol=1e-14)


def slopes_in_the_model(model, ids, layer):
    """Return the derivatives of a mixer's last output, feature by feature, ``[D, L]``, as sizes."""
    mixer, seen = model.layers[layer].mixer, {}

    def enter(_, given, named):
        seen["x"] = given[0].detach().requires_grad_()
        return (seen["x"], *given[1:]), named

    with (
        mixer.register_forward_pre_hook(enter, with_kwargs=True),
        mixer.register_forward_hook(lambda _, given, y: seen.update(y=y)),
    ):
        model(ids, use_cache=False)
    last = seen["y"][0, -1]
    found = [torch.autograd.grad(y, seen["x"], retain_graph=True)[0][0] for y in last]
    return torch.stack(found).norm(dim=2)


def test_inspect_measures_a_mixer_as_it_is_in_its_model():
    model, ids = Subject(FAMILIES["goose"]).fresh().double().model, torch.arange(1, 25).view(2, 12)
    for layer in measure_layers(model, ids).layers:
        each = torch.stack([slopes_in_the_model(model, row[None], layer.layer) for row in ids])
        expected = each.square().mean(dim=0).sqrt().flip(1)
        torch.testing.assert_close(layer.kernel, expected, rtol=1e-10, atol=1e-14)


def test_inspect_names_the_layer_of_a_mixer_that_fails(tmp_path, capsys, monkeypatch):
    def fail(mixer, x, state, packing):
        if torch.is_grad_enabled():
            raise KeyError("first_values")
        return torch.zeros_like(x)

    monkeypatch.setattr(GOOSE.GooseMixer, "mix_time", fail)
    Subject(FAMILIES["goose"]).fresh().save_pretrained(tmp_path / "goose")
    given = ["--length", "8", "--layers", "1", "--output", str(tmp_path / "found")]
    assert main(["inspect", str(tmp_path / "goose"), *given]) != 0
    told = capsys.readouterr().err
    assert "layer 1 (GooseMixer) cannot be inspected: KeyError: 'first_values'" in told


@pytest.mark.parametrize("name", FAMILIES)
def test_each_is_a_package_that_names_its_family_in_an_entry_point(name):
    with (FOLDER / name / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["name"] == f"ssmzoo-{name}"
    assert project["entry-points"]["ssmzoo.families"] == {name: f"ssmzoo_{name}:FAMILY"}


def test_the_doctor_shows_layers_without_an_op_of_ours(tmp_path, capsys):
    Subject(FAMILIES["window"]).fresh().save_pretrained(tmp_path / "window")
    Subject(FAMILIES["gru"]).fresh().save_pretrained(tmp_path / "gru")
    assert main(["doctor", str(tmp_path / "gru"), "--length", "8"]) == 0
    assert "0-1     GRUMixer  none of ours  plain torch  plain torch" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "window"), "--length", "8"]) == 0
    out = capsys.readouterr().out
    assert "0       WindowMixer  none of ours  plain torch  plain torch" in out
    assert "1       WindowMixer  linear_scan   cpu" in out
