"""Families of other packages and other kinds, which docs/add-a-family.md lists, pass the kit."""

import importlib
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.environments import import_package
from tests.plugins.causes import ONE_DICTIONARY

from ssmzoo import load_family
from ssmzoo.cli.main import main
from ssmzoo.testing import FamilyConformance, OpContract, check
from ssmzoo.testing.subject import Subject
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

FOLDER = Path(__file__).parents[1] / "foreign_families"
FAMILIES = {
    name: import_package(FOLDER / name / f"ssmzoo_{name}").FAMILY
    for name in ("gru", "spiral", "window", "leaky")
}
OWN = importlib.import_module("ssmzoo_leaky.leaky_sum")


@pytest.mark.variant  # leaky, below, has all of them
class TestGRU(FamilyConformance):
    family = FAMILIES["gru"]


@pytest.mark.variant
class TestSpiral(FamilyConformance):
    family = FAMILIES["spiral"]


@pytest.mark.variant
class TestWindow(FamilyConformance):
    family = FAMILIES["window"]


class TestLeaky(FamilyConformance):
    family = FAMILIES["leaky"]


def test_one_dictionary_for_both_directions_fails():
    with mock.patch.object(*ONE_DICTIONARY):
        (result,) = check(load_family("rwkv7"), only=["bidirectional"]).results
    assert result.status == "failed"
    assert "reversed outputs" in result.detail


class TestLeakySum(OpContract):
    op, declaration = staticmethod(OWN.leaky_sum), OWN.LEAKY_SUM
    sizes = {"B": 2, "L": 40, "D": 3}
    many = {"L": 300, "D": 200}
    values = {"decay": torch.sigmoid}


def test_a_model_runs_its_packages_kernel_and_is_the_same_in_torch():
    model, ids = Subject(FAMILIES["leaky"]).fresh().double(), torch.arange(20)[None]
    with watch() as ran:
        logits = model(ids).logits
    assert {backend for op, backend in ran if op == "leaky_sum"} == {"cpu"}
    with use_backend("eager"):
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-12, atol=1e-14)


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
