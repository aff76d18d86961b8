"""Tests that take turns run on one day of several, whatever else is selected."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.conftest import LONG_PROMISES, TURNS, take_turns


def item(name, *marks, suite=None):
    """Return what pytest collects, as far as turns ask for it; ``suite``: a family's check."""
    marks = [*marks]
    return SimpleNamespace(
        name=name,
        path=Path("tests/test_x.py"),
        originalname="test_promise" if suite else name,
        cls=type(suite, (), {}) if suite else None,
        callspec=SimpleNamespace(id=name),
        added=[],
        get_closest_marker=lambda kind: next((x.mark for x in marks if x.name == kind), None),
    )


def marked(items, turn):
    for each in items:
        each.added = []
        each.add_marker = lambda mark, each=each: each.added.append(mark.name)
    take_turns(items, turn)
    return [tuple(each.added) for each in items]


def test_each_has_one_day_in_any_selection():
    names = [f"test_{i}" for i in range(60)]
    items = [item(name, pytest.mark.turns) for name in names]
    items += [item(LONG_PROMISES[0], suite=f"TestFamily{i}") for i in range(20)]
    days = [marked(items, str(turn)) for turn in range(TURNS)]
    for each in zip(*days, strict=True):
        assert sorted(each) == [(), *[("slow",)] * (TURNS - 1)]
    assert all(1 < day.count(()) < len(items) - 1 for day in days)
    assert marked(items[7:11], "1") == days[1][7:11]
    assert set(marked(items, "all")) == {()}


def test_a_group_has_the_same_day_and_others_have_all():
    group = pytest.mark.xdist_group("a group")
    items = [item(f"test_{i}", pytest.mark.turns, group) for i in range(20)]
    assert all(len({*marked(items, str(turn))}) == 1 for turn in range(TURNS))
    assert marked([item("test_other"), item("test_grouped", group)], "0") == [(), ()]


def test_quick_checks_of_a_family_wait_with_the_oldest_transformers_alone():
    items = [item("padding", suite="TestFamily"), item(LONG_PROMISES[0], suite="TestFamily")]
    quick, long = zip(*(marked(items, str(turn)) for turn in range(TURNS)), strict=True)
    assert sorted(quick) == [(), *[("waits",)] * (TURNS - 1)]
    assert sorted(long) == [(), *[("slow",)] * (TURNS - 1)]


def test_the_names_of_a_familys_long_checks_decide_their_days():
    items = [item(f"test_promise[{name}]", suite="TestFamily") for name in LONG_PROMISES]
    for each, name in zip(items, LONG_PROMISES, strict=True):
        each.callspec.id = name
    days = [marked(items, str(turn)) for turn in range(TURNS)]
    assert sum(() in day for day in days) >= 3
