"""A third party's family in three files: it conforms, and its page shows it.

``test_third_party.py`` installs it.
"""

from pathlib import Path

import pytest
from tests.environments import import_package

from ssmzoo.testing import FamilyConformance

TOY = Path(__file__).parents[1] / "toy_family"
FILES = ("pyproject.toml", "ssmzoo_toy/__init__.py", "ssmzoo_toy/modeling_toy.py")


@pytest.mark.variant  # the families of plugins/ have all checks
class TestToy(FamilyConformance):
    family = import_package(TOY / "ssmzoo_toy").FAMILY


@pytest.mark.parametrize("name", FILES)
def test_the_page_on_adding_a_family_shows_the_files_as_they_are(name):
    page = TOY.parents[1].joinpath("docs", "add-a-family.md").read_text(encoding="utf-8")
    language = "toml" if name.endswith(".toml") else "python"
    text = TOY.joinpath(name).read_text(encoding="utf-8")
    assert f"`{name}`\n\n```{language}\n{text}```\n" in page


def test_the_package_has_no_other_file():
    found = {p.relative_to(TOY).as_posix() for p in TOY.rglob("*") if p.suffix in {".py", ".toml"}}
    assert found == set(FILES)
