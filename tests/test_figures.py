"""The figures in README and the plugins' pages: they follow from what was measured."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ssmzoo.publishing import papers
from ssmzoo.publishing.card_facts import Origin, Row, ScoredModel, ShownScore, scored_model
from ssmzoo.publishing.papers import PaperRow, paper_table, rows_of, word

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("coffee", "dss", "rtf")


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "eval" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed():
    return {path.stem: scored_model(path) for path in (ROOT / "eval/results").glob("*.json")}


def test_the_tables_of_the_pages_are_what_was_measured(pages):
    for page in pages.pages():
        assert pages.rendered(page) == page.read_text(encoding="utf-8"), f"{page}: run make pages"
    marked = [re.findall(r"<!-- table: (\S+) -->", p.read_text()) for p in pages.pages()]
    assert sorted(name for names in marked for name in names) == [*FAMILIES, "speed"]


def test_a_number_typed_by_hand_into_a_table_is_replaced(pages, tmp_path):
    page = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    page.write_text(re.sub(r"\| Longhorn \| [\d,]+", "| Longhorn | 99,999", text))
    assert pages.rendered(page) == text


def speed_row(variant, kind, *, runs="1", memory="", **more):
    return {
        "what": "model", "variant": variant, "pass": kind, "tokens_per_second": "2000",
        "runs": runs, "slowest": "1500", "fastest": "2500", "peak_mib": memory, "commit": "abc",
        "dirty": "False", "date": "2026-01-02", "device": "a CPU", **more,
    }  # fmt: skip


def test_the_speed_table_shows_median_and_range_and_both_mamba_paths(pages):
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


def test_the_words_on_the_families_page_are_those_of_the_rows(committed):
    text = (ROOT / "plugins/README.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        (line,) = [
            x for x in text.splitlines() if x.startswith("| [") and f"(ssmzoo_{family}/" in x
        ]
        said = set(re.findall(r"\*(figure|ranking|not reached)\*", line))
        meant = {re.match(r"\*(.+?)\*", word(row, committed))[1] for row in rows_of(family)}
        assert said == meant, family


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
    ],
)
def test_the_verdict_depends_on_setting_noise_and_direction(row, value, expected):
    named = {"a": results(value, loss=0.0024), "b": results(0.5, name="b")}
    assert word(row, named) == expected


def test_several_seeds_are_shown_by_median_and_range_and_judged_by_the_median():
    named = [results(v, name=n) for n, v in (("a", 0.1), ("b", 0.81), ("c", 0.9))]
    row = replace(ROW, results=("a", "b", "c"), paper_epochs="3")
    assert paper_table([row], named).splitlines()[2] == (
        "| x | accuracy, median of 3 seeds: 0.8100, from 0.1000 to 0.9000 | accuracy 0.80 | 3 "
        "| 3 (3) | *figure* |"
    )
    assert paper_table([row], named[:2]) == "Not measured."
    unknown = replace(row, paper={"accuracy": "0.80", "loss": "0.1"})
    assert paper_table([unknown], named) == "Not measured."


def test_an_unknown_field_of_a_papers_row_is_named(tmp_path, monkeypatch):
    (tmp_path / "papers.yaml").write_text("dss: [{row: x, epoch: 3}]")
    monkeypatch.setattr(papers, "share", lambda name: tmp_path / Path(name).name)
    with pytest.raises(ValueError, match="must have only better_than, differs, epochs"):
        rows_of("dss")
