"""Every check of the conformance kit bites: it fails what breaks its promise, and nothing else.

`make test` runs each sabotage over checks that it must fail, the long ones only for their own; the
slow test runs each over every check. Faults that few lengths, batches or layouts show must be named
by the right check.
"""

import pytest
from tests.plugins.causes import CAUSES
from tests.plugins.sabotage import MISTAKES, NARROW, PLANTED

from ssmzoo.testing.conformance import CHECKS, name_of

NAMES = [name_of(function) for function in CHECKS]
SLOW = {"assisted", "trainer", "compile", "fullgraph", "export", "onnx"}
BY_NAME = {name: first for first, rows in PLANTED.items() for name in rows}
HIDDEN = {name: row for rows in PLANTED.values() for name, row in rows.items()}
ROWS = {**NARROW, **MISTAKES, **HIDDEN}


def assert_fails(name, only):
    """Fail unless a sabotage fails what it should, and its own check for the right reason.

    Without torchao the check `quantized` ends early, and without onnx the check `onnx`;
    tests/modeling/test_quantized.py and tests/publishing/test_onnx.py have them.
    """
    row = ROWS[name]
    report = row.report([check for check in NAMES if check in only])
    skipped = {result.name for result in report.results if result.status == "skipped"}
    assert set(report.failed) == (row.fails or {name}) & {*only} - skipped, report.table()
    for result in report.results:
        if result.status == "failed" and (name not in NAMES or result.name == name):
            assert row.says in result.detail, report.table()


def test_every_check_has_a_sabotage_of_its_own():
    assert list(NARROW) == NAMES


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.long
def test_the_message_names_the_cause(name):
    (result,) = CAUSES[name].report([name]).results
    assert result.status == "failed"
    assert CAUSES[name].says in result.detail


@pytest.mark.long
@pytest.mark.parametrize("name", HIDDEN)
def test_the_first_check_that_a_hidden_fault_fails_names_it(name):
    assert min(HIDDEN[name].fails, key=NAMES.index) == BY_NAME[name]
    assert_fails(name, {BY_NAME[name]})  # and no earlier one: the slow test below


@pytest.mark.long
@pytest.mark.parametrize("name", [*NARROW, *MISTAKES])
def test_a_family_that_is_sabotaged_fails_what_it_breaks(name):
    fails = ROWS[name].fails or {name}  # and no other: the slow test below
    assert_fails(name, fails - SLOW | {name} & fails or fails)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_no_other_check_fails(name):
    assert_fails(name, NAMES)
