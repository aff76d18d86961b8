"""Families of other packages and other kinds pass the whole kit; plugins/README points to them."""

import inspect
import tomllib
from pathlib import Path

import pytest
from tests.environments import import_package

from ssmzoo.cli.main import main
from ssmzoo.testing import FamilyConformance
from ssmzoo.testing.subject import Subject

FOLDER = Path(__file__).with_name("foreign_families")
FAMILIES = {
    name: import_package(FOLDER / name / f"ssmzoo_{name}").FAMILY
    for name in ("gru", "spiral", "window")
}


class TestGRU(FamilyConformance):
    family = FAMILIES["gru"]


class TestSpiral(FamilyConformance):
    family = FAMILIES["spiral"]


class TestWindow(FamilyConformance):
    family = FAMILIES["window"]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_is_a_package_that_names_its_family_in_an_entry_point(name):
    with (FOLDER / name / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["name"] == f"ssmzoo-{name}"
    assert project["entry-points"]["ssmzoo.families"] == {name: f"ssmzoo_{name}:FAMILY"}


def test_the_page_on_adding_a_family_shows_their_mixers_as_they_are():
    page = Path(__file__).parents[1].joinpath("plugins", "README.md").read_text(encoding="utf-8")
    shown = {"gru": ("forward",), "spiral": ("forward",), "window": ("attend",)}
    for name, methods in shown.items():
        for method in methods:
            mixer = FAMILIES[name].model_class.mixer_class
            assert inspect.getsource(getattr(mixer, method)) in page


def test_the_doctor_shows_layers_without_an_op_of_ours(tmp_path, capsys):
    Subject(FAMILIES["window"]).fresh().save_pretrained(tmp_path / "window")
    Subject(FAMILIES["gru"]).fresh().save_pretrained(tmp_path / "gru")
    assert main(["doctor", str(tmp_path / "gru"), "--length", "8"]) == 0
    assert "0-1     GRUMixer  none of ours  plain torch  plain torch" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "window"), "--length", "8"]) == 0
    out = capsys.readouterr().out
    assert "0       WindowMixer  none of ours  plain torch  plain torch" in out
    assert "1       WindowMixer  linear_scan   cpu" in out
