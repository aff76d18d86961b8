"""A third party's family in three files: it conforms, installs, and its page shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.environments import import_package

from ssmzoo.testing import FamilyConformance

TOY = Path(__file__).parents[1] / "toy_family"
FILES = ("pyproject.toml", "ssmzoo_toy/__init__.py", "ssmzoo_toy/modeling_toy.py")


class TestToy(FamilyConformance):
    family = import_package(TOY / "ssmzoo_toy").FAMILY


@pytest.mark.long
def test_three_files_make_a_package_that_pip_installs_and_the_zoo_lists(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", tmp_path, TOY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ssmzoo", "list", "--load", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [row] = [row for row in json.loads(done.stdout) if row["name"] == "toy"]
    assert (row["status"], row["distribution"]) == ("ok", "ssmzoo-toy")


@pytest.mark.parametrize("name", FILES)
def test_the_page_on_adding_a_family_shows_the_files_as_they_are(name):
    page = TOY.parents[1].joinpath("docs", "add-a-family.md").read_text(encoding="utf-8")
    language = "toml" if name.endswith(".toml") else "python"
    text = TOY.joinpath(name).read_text(encoding="utf-8")
    assert f"`{name}`\n\n```{language}\n{text}```\n" in page


def test_the_package_has_no_other_file():
    found = {p.relative_to(TOY).as_posix() for p in TOY.rglob("*") if p.suffix in {".py", ".toml"}}
    assert found == set(FILES)
