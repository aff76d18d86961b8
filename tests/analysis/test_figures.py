"""The figures in README and the plugins' pages: they follow from what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pages
import papers
import pytest
from papers import PaperRow, PaperTable, counted, rows_of, whole_table, word

from ssmzoo.analysis.sweep_plan import load_sweep
from ssmzoo.publishing.card_results import Origin, Row, ScoredModel, ShownScore

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("coffee", "dss", "rtf")  # of the papers' tables


@pytest.fixture(scope="module")
def zoo():
    return load_sweep("zoo")


@pytest.fixture(scope="module")
def committed():
    return {entry.path.stem: entry for entry in pages.results()}


@pytest.mark.long
def test_the_tables_of_the_pages_are_what_was_measured():
    for page in pages.pages():
        assert pages.rendered(page) == page.read_text(encoding="utf-8"), f"{page}: run make pages"
    marked = [re.findall(r"<!-- table: (\S+) -->", p.read_text()) for p in pages.pages()]
    shown = sorted(name for names in marked for name in names)
    assert shown == ["papers", "speed", "speed-avx2", "zoo"]


def test_every_problem_of_the_zoo_stands_in_one_of_its_tables(zoo):
    shown = [problem for problems in pages.ZOO.values() for problem in problems]
    assert sorted(shown) == sorted(zoo.problems)


def test_the_zoos_tables_have_what_was_searched_and_what_could_not_be_run(zoo):
    cells = len(zoo.models) * len(zoo.problems)
    none = dict.fromkeys(("lr", "seed", "metric", "value", "validation", "note"))
    place = {**none, "problem": "parity", "model": "s4", "width": 64, "length": 40}
    sizes = {"parameters": 5000, "state_bytes": None, "flops_per_token": 3}
    line = {**place, **sizes, "lr": 0.01, "seed": 0, "metric": "accuracy", "validation": 0.9}
    lines = [
        {**line, "value": 0.0},
        {**line, "problem": "mqar 8", "value": 1.0},
        *({**place, "problem": p, "model": "mamba", "note": "why"} for p in ("delay", "digits")),
    ]
    text = pages.zoo_tables(zoo, lines)
    assert text.startswith(f"2 of {cells - 2} cells are searched")
    tables = dict(re.findall(r"^## (.*?)\n\n(.*?)(?=\n\n##|\Z)", text, re.DOTALL | re.MULTILINE))
    assert "| s4 | 0.000 |" in tables["State tracking"]
    assert tables["Text"] == tables["Lists, delays, digits"] == "Not run yet."
    assert "| s4 | 5,000 | not bounded | 3 |" in tables["What they cost"]
    assert tables["What could not be run"] == "- mamba on delay, mamba on digits: why."
    assert "cost" not in pages.zoo_tables(zoo, lines[:1])


def test_a_number_typed_by_hand_into_a_table_is_replaced(tmp_path):
    page = tmp_path / "speed.md"
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    page.write_text(re.sub(r"\| Longhorn \| [\d,]+", "| Longhorn | 99,999", text))
    assert pages.rendered(page) == text


def speed_row(variant, kind, *, runs="1", memory="", **more):
    return {
        "what": "model", "variant": variant, "pass": kind, "tokens_per_second": "2000",
        "runs": runs, "slowest": "1500", "fastest": "2500", "peak_mib": memory, "commit": "abc",
        "dirty": "False", "date": "2026-01-02", "device": "a CPU", **more,
    }  # fmt: skip


def test_the_speed_table_shows_median_and_range_and_both_mamba_paths():
    table = pages.speed(
        [
            speed_row("dss", "train L=2048", runs="3", memory="12.3"),
            speed_row("transformers Mamba (mamba.py)", "train L=2048", runs="3"),
            speed_row("transformers Mamba", "decode after 100", runs="3"),
            speed_row("unknown", "decode after 100"),
            {"what": "fft_conv"},
        ]
    )
    assert "| DSS | not measured | 2,000 (1,500 to 2,500) | 12 |" in table
    training, decoding = table.split("| `generate` |")
    assert "mamba.py | not measured | 2,000 (1,500 to 2,500) | not measured |" in training
    assert "Mamba, plain | 2,000 (1,500 to 2,500) | not measured |" in decoding
    assert "mamba.py" not in decoding
    assert "unknown" not in table
    assert table.endswith(
        "Tokens per second; median of 3 runs, and from the slowest to the fastest, commit abc, "
        "2026-01-02, a CPU."
    )
    assert "commit abc with changes" in pages.speed([speed_row("dss", "train L=512", dirty="True")])


def test_every_row_names_results_that_are_there_and_the_task_that_was_asked(committed):
    for family in FAMILIES:
        for row in rows_of(family):
            for name in (*row.results, *row.better_than, *row.worse_than):
                assert name in committed, row
            for name in row.results:
                metrics = {r.metric for r in committed[name].scores}
                assert set(row.paper) <= metrics, row
                if committed[name].recipe is not None and row.epochs.isdigit():
                    assert committed[name].recipe["train"]["epochs"] == int(row.epochs), row


def results(value, stderr=0.01, name="a", loss=None):
    origin = Origin("", "", "", "", "")
    scores = {
        Row("t", "accuracy", "", 10, 0, 0): ShownScore(value, stderr, True, origin),
        Row("t", "loss", "", 10, 0, 0): ShownScore(loss, None, False, origin),
    }
    return ScoredModel(Path(f"{name}.json"), name, "", "r", scores)


ROW = PaperRow("x", ("a",), {"accuracy": "0.80"}, "3")


@pytest.mark.parametrize(
    ("row", "value", "expected"),
    [
        (ROW, 0.8, "*figure*"),
        (ROW, 0.824, "*figure*"),
        (ROW, 0.826, "*not reached*"),
        (ROW, 0.774, "*not reached*"),
        (replace(ROW, paper_epochs="3"), 0.8, "*figure*"),
        (replace(ROW, paper_epochs="4"), 0.8, "*not reached*"),
        (replace(ROW, paper_epochs="4", better_than=("b",)), 0.8, "*ranking*: better than `b`"),
        (replace(ROW, differs="smaller", worse_than=("b",)), 0.4, "*ranking*: worse than `b`"),
        (replace(ROW, differs="smaller", better_than=("b",)), 0.52, "*not reached*"),
        (replace(ROW, differs="smaller", better_than=("b",)), 0.4, "*not reached*"),
        (replace(ROW, differs="smaller"), 0.8, "*not reached*"),
        (replace(ROW, paper={"accuracy": "0.99+"}), 0.99, "*figure*"),
        (replace(ROW, paper={"accuracy": "0.99+"}), 0.9899, "*not reached*"),
        (replace(ROW, paper={"accuracy": "0.80", "loss": "0.002"}), 0.8, "*figure*"),
        (
            replace(ROW, paper={"accuracy": "0.80", "loss": "0.001"}),
            0.8,
            "*figure*, loss not reached",
        ),
        (
            replace(ROW, paper={"loss": "0.002", "accuracy": "0.70"}),
            0.8,
            "*figure*",
        ),
        (
            replace(ROW, paper={"loss": "0.002", "accuracy": "0.90"}),
            0.8,
            "*figure*, accuracy not reached",
        ),
    ],
)
def test_the_verdict_depends_on_setting_noise_and_direction(row, value, expected):
    named = {"a": results(value, loss=0.0024), "b": results(0.5, name="b")}
    assert word(row, named) == expected


@pytest.mark.parametrize(("value", "ranks"), [(0.74, False), (0.76, True)])
def test_a_metric_without_standard_errors_ranks_by_more_than_a_third(value, ranks):
    row = replace(ROW, differs="smaller", better_than=("b",))
    named = {"a": results(value, stderr=None), "b": results(0.5, stderr=None, name="b")}
    assert word(row, named).startswith("*ranking*" if ranks else "*not reached*")


def test_several_seeds_are_shown_by_median_and_range_and_judged_by_the_median():
    named = [results(v, name=n) for n, v in (("a", 0.1), ("b", 0.81), ("c", 0.9))]
    row = replace(ROW, results=("a", "b", "c"), paper_epochs="3")
    named = {entry.name: entry for entry in named}
    assert whole_table(PaperTable("Table 1", "x", (row,)), named).splitlines()[2] == (
        "| x | accuracy, median of 3 seeds: 0.8100, from 0.1000 to 0.9000 | accuracy 0.80 | 3 "
        "| 3 (3) | *figure* |"
    )


def test_a_figure_in_percent_is_compared_with_a_share_and_ours_is_shown_so():
    row = replace(ROW, paper={"accuracy": "60.6 %"})
    for value, expected in (
        (0.606, "*figure*"),
        (0.6266, "*not reached*"),
        (60.6, "*not reached*"),
    ):
        assert word(row, {"a": results(value)}) == expected
    assert "| accuracy 61.00 % | accuracy 60.6 % |" in whole_table(
        PaperTable("Table 1", "x", (row,)), {"a": results(0.61)}
    )


def test_a_whole_table_has_the_rows_that_were_not_run_and_empty_cells_are_left_out():
    table = PaperTable("Table 1", "x", (ROW,), {"S4, big": "57.6 - ✗"}, ("A", "B", "C"), "a GPU")
    lines = whole_table(table, {"a": results(0.8)}).splitlines()
    assert lines[2].startswith("| x | accuracy 0.8000 | accuracy 0.80 |")
    assert lines[3:] == ["| S4, big | | A 57.6; C ✗ | | | *not run* |"]
    assert counted([table], {"a": results(0.8)}) == {
        "figure": 1, "ranking": 0, "not reached": 0, "not run": 1,
    }  # fmt: skip


def test_a_result_that_does_not_exist_is_named_with_its_row():
    table = PaperTable("Table 1", "x", (replace(ROW, worse_than=("b",)),))
    with pytest.raises(ValueError, match=r"Table 1, x: no result b \(accuracy\)$"):
        whole_table(table, {"a": results(0.8)})


def test_a_cell_of_the_families_table_has_the_standard_error_of_results_files(committed):
    cell, file = committed["listops-s4-seed0"], committed["rtf-listops-small"]
    for entry in (cell, file):
        (score,) = entry.scores.values()
        assert score.stderr == pytest.approx((score.value * (1 - score.value) / 1999) ** 0.5)
    (score,) = committed["delay-s4-64-seed1112"].scores.values()
    assert (score.stderr, score.higher_is_better) == (None, False)


def test_the_page_of_all_tables_has_the_tables_of_the_papers_whose_systems_the_zoo_has():
    section = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    told = {
        (paper.lower().replace("'", ""), table)
        for paper, cell in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)[1:]
        for table in re.findall(r"\d+", re.match(r"\d+(?:(?:, | and )\d+\b(?! l))*", cell)[0])
        if paper != "LRU"
    }
    # without figures of systems: Longhorn's Table 4, hyperparameters and what is not built
    told -= {("longhorn", "4"), ("rtf", "8"), ("rtf", "9"), ("rtf", "13"), ("dss", "4")}
    shown = {
        (family, re.match(r"Table (\d+)", table.table)[1])
        for family, tables in papers.papers().items()
        for table in tables
    }
    assert told == shown


TABLE = "{table: Table 1, about: y, columns: [A, B], why: a GPU, "
RUN = "{table: Table 1, about: y, rows: [{row: x, epochs: '1', "
OTHER = "{table: Table 1, about: y, rows: [{row: x, epochs: 1, results: [a], paper: {acc: '1'}}]}"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (TABLE + "epoch: 3}", "dss, Table 1: must have table, about and none but .*, got .*epoch$"),
        ("{about: y}", "dss, None: must have table, about"),
        ("x", "dss, x: must have table"),
        (TABLE + "not_run: {S4: 57.6 x}}", "dss, Table 1, S4: a figure must be .*, got 'x'$"),
        (TABLE + "not_run: {S4: 57.6}}", "dss, Table 1, S4: must have 2 figures, .* got 57.6$"),
        (TABLE + "not_run: {S4: 1 2 3}}", "dss, Table 1, S4: must have 2 figures"),
        ("{table: Table 1, about: y, columns: [A], not_run: {S4: '1'}}", "Table 1: .* needs why"),
        (RUN + "results: [a], paper: {acc: '1'}, epoch: 3}]}", "dss, Table 1, x: must have row"),
        (RUN + "results: [a], paper: {acc: 0.6}}]}", "Table 1, x: a figure must .*, got 0.6$"),
        (RUN + "results: [a], paper: {acc: '-'}}]}", "Table 1, x: a figure must .*, got '-'$"),
        (RUN + "results: [a], paper: {}}]}", "Table 1, x: paper must be a mapping"),
        (RUN + "results: a, paper: {acc: '1'}}]}", "Table 1, x: results must be a list"),
        (OTHER, "Table 1, x: epochs must be a text in quotes, got 1$"),
        (TABLE + "not_run: [S4]}", "dss, Table 1: not_run must be a mapping"),
        (RUN + "results: [], paper: {acc: '1'}}]}", "Table 1, x: results must be a list"),
    ],
)
def test_an_entry_that_is_none_is_named_in_one_line(entry, message, tmp_path, monkeypatch):
    (tmp_path / "papers.yaml").write_text(f"dss: [{entry}]")
    monkeypatch.setattr(papers, "PLACE", tmp_path / "papers.yaml")
    with pytest.raises(ValueError, match=message) as error:
        rows_of("dss")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "- dss", "dss: Table 1"])
def test_a_file_that_is_no_list_of_tables_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / "papers.yaml").write_text(text)
    monkeypatch.setattr(papers, "PLACE", tmp_path / "papers.yaml")
    with pytest.raises(ValueError, match="must hold a list of tables by family"):
        papers.papers()


def test_a_comparison_has_models_by_problems_and_lengths():
    ledger = [line_of(seed, value) for seed, value in enumerate((0.9, 0.1, 0.2))]
    ledger += [line_of(0, 0.25, validation=0.9, length=16), line_of(0, 0.75, lr=0.2)]
    ledger += [
        line_of(0, 1.5, problem="q", metric="bits_per_byte"),
        line_of(0, None, problem="q", model="c", metric=None),
        line_of(None, None, model="c", lr=None, metric=None, note="why"),
        line_of(0, 0.0, model="d"),
        line_of(1, None, model="d", metric=None),
        line_of(None, None, problem="r", model="e", lr=None, metric=None, note="why"),
    ]
    assert pages.markdown_table(ledger, ("q", "absent", "r", "p"), "edcb").splitlines() == [
        "| model | q, bits per byte | p | p at 16 |",
        "| --- | ---: | ---: | ---: |",
        "| d |  | 0.000, 1 diverged | diverged |",
        "| c | diverged | - | - |",
        "| b | 1.500 | 0.400 (0.100 to 0.900) | 0.250 |",
    ]
    wide = [line_of(0, 0.5), line_of(0, 0.75, width=16), line_of(0, 1.0, model="own", width=None)]
    assert pages.markdown_table(wide, "p", ("own", "b")).splitlines()[2:] == [
        "| own | 1.000 |",
        "| b 8 | 0.500 |",
        "| b 16 | 0.750 |",
    ]


def line_of(seed, value, **columns):
    """Return a line of a ledger."""
    place = {"problem": "p", "model": "b", "width": 8, "lr": 0.1, "seed": seed, "length": 4}
    return {**place, "metric": "accuracy", "validation": value, "value": value, **columns}
