"""A model's card: nothing in it but what was measured, and nothing measured left out."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from tests.hub_server import metadata_errors
from tests.stock_models import tiny
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ssmzoo import family, load_family
from ssmzoo.checkpoints.weights import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_FORMAT,
    weights_revision,
)
from ssmzoo.cli.main import main
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.environment import hub_metadata
from ssmzoo.files import package_data
from ssmzoo.publishing import card_facts, card_results
from ssmzoo.publishing.card import render_card
from ssmzoo.publishing.hub import publish
from ssmzoo.recipe import load_recipe
from ssmzoo.tasks.symbols import symbol_tokenizer
from ssmzoo.training.shards import Snapshot

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = package_data("model_cards/template.md").read_text(encoding="utf-8")
RECIPE = "model:\n  family: longhorn\ntrain:\n  steps: 37\n"
FACTS = {
    "command": "ssmzoo train recipe.yaml",
    "date": "2026-02-03T04:05:06+00:00",
    "data": {"source": "text", "documents": 321, "digest": "0f1e2d3c"},
    "model_type": "ssmzoo_longhorn",
    "hardware": "Some CPU 7551, 2 threads",
    "dtype": "float32",
    "versions": {"ssmzoo": "0.1.0", "torch": "2.13.0"},
}
MODEL = '"model": {"name": "x", "source": "y", "revision": null}'
METRICS = [
    {"step": 10, "tokens": 5120, "loss": 5.43219, "seconds": 1.25},
    {"step": 37, "tokens": 18944, "loss": 3.98766, "seconds": 4.625},
    {"step": 37, "tokens": 18944, "validation_loss": 4.01239, "validation_accuracy": 0.21875},
]
BPB = {
    "task": "ssmzoo_bits_per_byte",
    "metric": "bits_per_byte",
    "value": 3.14159265,
    "stderr": 0.00456,
    "n": 60,
    "seed": 1234,
    "num_fewshot": 0,
    "higher_is_better": False,
    "settings": {"window": 2048, "text_sha256": "12ab34cd"},
}
RECALL = {
    **BPB,
    "task": "ssmzoo_recall_text",
    "metric": "acc",
    "value": 0.61803,
    "stderr": None,
    "n": 500,
    "higher_is_better": True,
    "settings": {},
}


@pytest.fixture(scope="module")
def longhorn(tmp_path_factory):
    """A run directory with a tiny Longhorn."""
    run = tmp_path_factory.mktemp("runs") / "first-try"
    family = load_family("longhorn")
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(**{**family.tiny, "vocab_size": 259}))
    model.save_pretrained(run / "model")
    byte_tokenizer().save_pretrained(run / "model")
    (run / "run.json").write_text(json.dumps(FACTS))
    (run / "recipe.yaml").write_text(RECIPE)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    (run / "loss.png").write_bytes(b"\x89PNG the curve")
    return run, model.num_parameters()


@pytest.fixture
def run(longhorn, tmp_path):
    return Path(shutil.copytree(longhorn[0], tmp_path / "first-try"))


def write_results(run, name="first-try", *rows, revision=None, source=None, **other):
    content = {
        "model": {
            "name": name,
            "source": source or str(run / "model"),
            "revision": revision or weights_revision(run / "model"),
            "model_type": "ssmzoo_longhorn",
            "parameters": 1,
        },
        "results": list(rows),
        "versions": {"ssmzoo": "0.1.0", "lm-eval": "0.4.13"},
        "hardware": "Another CPU 9654, 2 threads",
        "date": "2026-03-04T05:06:07+00:00",
        "command": f"ssmzoo eval {name} --text held-out",
        **other,
    }
    path = run / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def change_config(run, **fields):
    path = run / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def scored(run):
    return write_results(run, "first-try", BPB, RECALL)


# numbers


def prose(text: str) -> str:
    """Return what a card says as text: no metadata, no Python snippet, no citation."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    return re.sub(r"```(python|bibtex)\n.*?```", "", text, flags=re.DOTALL)


def unsourced(text: str, sources: list[object]) -> set[str]:
    """Return the numbers in a card that no source has, not even before rounding."""
    known = " ".join(
        source if isinstance(source, str) else json.dumps(source) for source in sources
    )
    pattern = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
    literal = set(re.findall(pattern, known))
    values = {float(number.replace(",", "")) for number in literal if number.strip(",")}
    missing = set()
    for shown in re.findall(pattern, prose(text)):
        number = shown.rstrip(",")
        value = float(number.replace(",", ""))
        mantissa, _, exponent = number.partition("e")
        places = len(mantissa.partition(".")[2])
        step = 10.0 ** (int(exponent or 0) - places)
        exact = places == 0 and not exponent
        if number not in literal and not any(
            value == v if exact else abs(value - v) <= 0.5001 * step for v in values
        ):
            missing.add(shown)
    return missing


@pytest.fixture
def sources(run, longhorn):
    config = json.loads((run / "model" / "config.json").read_text())
    paper = card_facts.family_words("longhorn")["paper"]
    found = [FACTS, RECIPE, METRICS, config, {"parameters": longhorn[1]}, paper]
    return found + [json.loads(path.read_text()) for path in run.glob("*.json")]


def test_every_number_in_a_card_is_in_its_sources(run, scored, sources):
    rival = {**BPB, "value": 2.71828, "stderr": 0.000123}
    other = write_results(run, "rival", rival, revision="abc", source="user/rival")
    sources.append(json.loads(other.read_text()))
    text = render_card(run / "model", results=[scored, other]).read_text()
    assert unsourced(text, sources) == set()
    assert unsourced(f"{text}Its accuracy is 0.9137, of 77 runs.", sources) == {"0.9137", "77"}
    assert "| **first-try** | rival |" in text
    assert {r.metric_value for r in ModelCard(text).data.eval_results} == {3.14159265, 0.61803}
    for shown in ("3.1416 ± 0.0046", "0.6180", "2.7183 ± 1.23e-04", "3.9877", "4.0124", "18,944"):
        assert shown in text


def test_a_removed_score_reads_not_measured(run):
    rival = write_results(run, "rival", BPB, RECALL, revision="abc", source="user/rival")
    own = write_results(run, "first-try", BPB)
    text = render_card(run / "model", results=[own, rival]).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| ssmzoo_recall_text")]
    assert line.startswith("| ssmzoo_recall_text | acc ↑ | not measured | 0.6180 |")
    own = write_results(run, "first-try", BPB, {**RECALL, "value": None})
    text = render_card(run / "model", results=[own]).read_text()
    assert "| ssmzoo_recall_text | acc ↑ | not measured |" in text
    assert [r.dataset_type for r in ModelCard(text).data.eval_results] == ["ssmzoo_bits_per_byte"]


def test_the_card_of_an_unmeasured_model_says_not_measured(run, tmp_path):
    folder = Path(shutil.copytree(run / "model", tmp_path / "bare"))
    text = render_card(folder).read_text()
    assert "## Results\n\nNot measured." in text
    assert "loss.png" not in text
    table = text.partition("## Training")[2].partition("##")[0]
    facts = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(facts) == 12
    assert [name for name, value in facts if value == "not recorded |"] == [
        "| Code, vectors and threads"
    ]
    assert {value for _, value in facts} == {"not measured |", "not recorded |"}
    assert ModelCard(text).data.eval_results is None


def test_a_fact_that_the_run_lacks_reads_not_measured(run):
    lacks = {"data", "hardware", "versions", "command"}
    (run / "run.json").write_text(json.dumps({k: FACTS[k] for k in FACTS.keys() - lacks}))
    text = render_card(run / "model").read_text()
    assert all(f"| {name.capitalize()} | not measured |" in text for name in lacks)


@pytest.mark.parametrize(
    ("model", "problem", "rows"),
    [
        ("ForCausalLM", None, ["loss | 4.0124 nats per token", "accuracy, next token | 0.2188"]),
        ("ForSequenceClassification", None, ["loss | 4.0124 nats", "accuracy | 0.2188"]),
        (
            "ForTokenClassification",
            "regression",
            ["loss, mean squared error | 4.0124", "root mean squared error | 0.7500"],
        ),
    ],
)
def test_loss_and_metric_are_called_what_they_are(run, model, problem, rows):
    change_config(run, architectures=[f"Longhorn{model}"], problem_type=problem)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 37, "validation_rmse": 0.75}) + "\n")
    text = render_card(run / "model").read_text()
    for row in rows:
        assert f"| Last validation {row} |" in text


def test_a_classifier_of_images_is_called_one_and_an_unknown_head_is_refused(run):
    change_config(run, architectures=["CoffeeForImageClassification"])
    text = render_card(run / "model").read_text()
    assert "pipeline_tag: image-classification" in text
    assert "model = AutoModelForImageClassification.from_pretrained(source)" in text
    change_config(run, architectures=["LonghornModel"])
    with pytest.raises(ValueError, match=r"class ends in one of .*, got LonghornModel"):
        render_card(run / "model")


def test_the_card_of_a_foreign_family_names_its_package(run, monkeypatch):
    own = load_family("longhorn")
    foreign = replace(own, name="lru", paper=replace(own.paper, arxiv="1111.22222"))
    point = EntryPoint("lru", "x:FAMILY", "ssmzoo.families")
    point = point._for(SimpleNamespace(name="ssmzoo-lru"))  # type: ignore[attr-defined]
    claims = {"broken": (), "lru": (point,)}

    def load(name):
        if name != "lru":
            raise RuntimeError("two packages claim it")
        return foreign

    monkeypatch.setattr(family, "claims", lambda: claims)
    monkeypatch.setattr(family, "load_family", load)
    text = render_card(run / "model").read_text()
    assert "# ssmzoo-lru: from its authors only, since anybody may" in text
    assert "# no package index has ssmzoo: " in text
    assert re.findall(r"pip install (.*)", text) == ["./ssmzoo ./ssmzoo-lru", "peft`):"]
    assert "- arxiv:1111.22222" in text


def test_a_run_is_not_credited_with_weights_that_it_did_not_make(run, tmp_path):
    copy = Path(shutil.copytree(run / "model", tmp_path / "copy"))
    assert "| Last training loss |" in render_card(copy, run_dir=run).read_text()
    weights = load_file(copy / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"run_dir .* made other weights than those of .*copy"):
        render_card(copy, run_dir=run)
    # unless an earlier checkpoint has them
    earlier = {name: 2 * weight for name, weight in weights.items()}
    Snapshot(earlier).write(run / "checkpoints" / "step-00000010" / "shards", None)
    assert "| Last training loss |" in render_card(copy, run_dir=run).read_text()
    shutil.rmtree(run / "checkpoints")
    Snapshot({"another": torch.zeros(2)}).write(run / "checkpoints/step-00000010/shards", None)
    with pytest.raises(ValueError, match="made other weights"):
        render_card(copy, run_dir=run)


def test_a_checkpoint_is_not_credited_with_later_steps(run):
    checkpoint = run / "checkpoints" / "step-00000010"
    shutil.copytree(run / "model", checkpoint)
    save_file({"m": torch.zeros(3)}, checkpoint / "optimizer.safetensors")
    text = render_card(checkpoint, run_dir=run).read_text()
    assert "| Tokens | 5,120 |" in text
    assert "| Last training loss | 5.4322 nats per token |" in text
    assert "| Time | 1.2 s |" in text
    assert "| Last validation loss | not measured |" in text
    publish(checkpoint, run.parent / "published", code=False)
    assert not (run.parent / "published" / "optimizer.safetensors").exists()


def test_a_model_made_of_the_best_step_is_not_credited_with_later_ones(run):
    best = {"step": 10, "tokens": 5120, "validation_loss": 3.5, "validation_accuracy": 0.5}
    lines = [METRICS[0], best, *METRICS[1:]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished = {**FACTS, "finished": {"step": 37, "best": {"step": 10, "loss": 3.5}}}
    (run / "run.json").write_text(json.dumps(finished))
    assert "| Steps | 37 |" in render_card(run / "model").read_text()  # made of the last step
    with (run / "recipe.yaml").open("a") as recipe:
        recipe.write("checkpoint:\n  best: true\n")
    text = render_card(run / "model").read_text()
    assert "| Steps | 10 |" in text
    assert "| Tokens | 5,120 |" in text
    assert "| Last validation loss | 3.5000" in text


@pytest.mark.parametrize("name", ["x.json", "x.png"])
def test_a_card_beside_no_model_replaces_nothing_but_a_cards_own(name, run, scored, tmp_path):
    mine = tmp_path / name
    mine.write_bytes(scored.read_bytes())
    with pytest.raises(ValueError, match=re.escape(f"{mine} would be replaced, and is of no card")):
        render_card(run / "model", output=tmp_path / "x.md")
    assert [path.name for path in tmp_path.glob("x.*")] == [name]
    assert mine.read_bytes() == scored.read_bytes()
    mine.unlink()
    for _ in range(2):
        render_card(run / "model", output=tmp_path / "x.md")
    with pytest.raises(ValueError, match=r"output must end in a name of its own, got '\.'"):
        render_card(run / "model", output="")


def test_scores_of_other_examples_stand_in_another_row(run, scored):
    for change in ({"n": 61}, {"seed": 1}, {"num_fewshot": 5}, {"settings": {"window": 64}}):
        other = write_results(run, "rival", {**BPB, **change}, revision="abc", source="user/rival")
        text = render_card(run / "model", results=[scored, other]).read_text()
        rows = [line for line in text.splitlines() if line.startswith("| ssmzoo_bits_per_byte")]
        assert len(rows) == 2, change
        assert "| 3.1416 ± 0.0046 | not measured |" in rows[0]
        assert "| not measured | 3.1416 ± 0.0046 |" in rows[1]


def test_only_scores_on_the_same_examples_are_compared(run, scored):
    rivals = [
        write_results(
            run,
            f"rival{i}",
            {**BPB, "seed": BPB["seed"] + i % 2},
            revision=f"r{i}",
            source=f"user/rival{i}",
        )
        for i in range(6)
    ]
    text = render_card(run / "model", results=[scored, *rivals]).read_text()
    [row] = [line for line in text.splitlines() if line.startswith("| ssmzoo_bits_per_byte")]
    assert "not measured" not in row
    [head] = [line for line in text.splitlines() if line.startswith("| Task | Metric |")]
    assert [name for name in ("rival0", "rival2", "rival4") if name in head] == [
        "rival0", "rival2", "rival4",
    ]  # fmt: skip
    assert "rival1" not in head


ENVIRONMENT = {
    "commit": "0123456789ab",
    "dirty": True,
    "cpu_vectors": "avx2",
    "torch_vectors": "AVX2",
    "kernel_vectors": None,
    "threads": 2,
    "omp_num_threads": "2",
}


def test_a_card_says_what_the_bits_depend_on_and_where_that_was_not_recorded(run):
    shown = "commit 0123456789ab, dirty True, cpu vectors avx2, torch vectors AVX2, threads 2, "
    old = {**RECALL, "environment": None, "date": "2026-01-02", "command": "ssmzoo eval x"}
    own = write_results(run, "first-try", BPB, old, environment=ENVIRONMENT)
    (run / "run.json").write_text(json.dumps({**FACTS, "environment": ENVIRONMENT}))
    text = render_card(run / "model", results=[own]).read_text()
    assert f"Another CPU 9654, 2 threads | {shown}omp num threads 2 | ssmzoo 0.1.0" in text
    assert "2026-01-02 | Another CPU 9654, 2 threads | not recorded |" in text
    assert "ssmzoo eval first-try --text held-out\nssmzoo eval x\n" in text
    assert f"| Code, vectors and threads | {shown}omp num threads 2 |" in text
    before = write_results(run, "first-try", BPB)
    text = render_card(run / "model", results=[before]).read_text()
    assert "Another CPU 9654, 2 threads | not recorded |" in text


def of_seed(run, seed, value, name=None, **recipe):
    train = {"steps": 37, "seed": seed, **recipe}
    whole = {"model": {"family": "longhorn"}, "data": {"text": "x"}, "train": train}
    if seed == 0:
        return write_results(run, "first-try", {**BPB, "value": value}, recipe=whole)
    name = name or f"seed{seed}"
    row = {**BPB, "value": value, "seed": seed}
    return write_results(run, name, row, recipe=whole, revision=name, source=f"runs/{name}")


def test_several_seeds_of_a_recipe_are_shown_by_their_number_median_and_range(run):
    seeds = [of_seed(run, seed, value) for seed, value in ((0, 2.5), (1, 9.25), (2, 2.25))]
    text = render_card(run / "model", results=seeds).read_text()
    assert "The same recipe was trained with the seeds 0, 1, 2; here is 0." in text
    assert (
        "| ssmzoo_bits_per_byte | bits_per_byte | 3 | 2.5000 ± 0.0046 | 2.5000 | 2.2500 | 9.2500 |"
    ) in text
    assert "seed1" not in text.partition("## Results")[2].partition("### Seeds")[0]
    assert {r.metric_value for r in ModelCard(text).data.eval_results} == {2.5}


def test_another_recipe_or_one_that_is_not_known_makes_no_seed(run):
    own = of_seed(run, 0, 2.5)
    longer = of_seed(run, 1, 9.25, steps=38)
    unknown = write_results(run, "old", {**BPB, "seed": 2}, revision="old", source="runs/old")
    text = render_card(run / "model", results=[own, longer, unknown]).read_text()
    assert "### Seeds" not in text
    broken = write_results(run, "first-try", BPB, recipe={"train": 3})
    with pytest.raises(ValueError, match="recipe must be an object with train, got"):
        render_card(run / "model", results=[broken])


# metadata


def test_the_metadata_is_what_the_hub_reads(run, scored):
    text = render_card(run / "model", results=[scored]).read_text()
    assert metadata_errors(text) == []
    assert metadata_errors(text.replace("metrics:", "metrix:")) != []
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["ssmzoo", "state-space-model", "longhorn", "arxiv:2407.14207"]
    assert data.model_name == "first-try"
    found = {(r.dataset_type, r.metric_type): r for r in data.eval_results}
    assert {key: result.metric_value for key, result in found.items()} == {
        ("ssmzoo_bits_per_byte", "bits_per_byte"): BPB["value"],
        ("ssmzoo_recall_text", "acc"): RECALL["value"],
    }
    assert found["ssmzoo_bits_per_byte", "bits_per_byte"].metric_args == {
        "n": 60,
        "num_fewshot": 0,
        "seed": 1234,
        "stderr": 0.00456,
    }


def test_scores_of_benchmarks_are_written_where_the_hubs_leaderboards_look(run, tmp_path):
    benchmark = {"dataset": "openai/gsm8k", "task_id": "gsm8k"}
    row = {**RECALL, "task": "gsm8k", "metric": "exact_match", "benchmark": benchmark}
    own = write_results(run, "first-try", BPB, row)
    render_card(run / "model", results=[own])
    file = run / "model" / ".eval_results" / "ssmzoo.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 0.61803)
    assert entry.date == "2026-03-04T05:06:07+00:00"
    assert entry.notes == "gsm8k, exact_match, 0 shots, lm-eval by ssmzoo"
    report = publish(run / "model", str(tmp_path / "out"), code=False)
    assert ".eval_results/ssmzoo.yaml" in {file.path for file in report.files}
    apart = tmp_path / "apart"
    apart.mkdir()
    render_card(run / "model", results=[own], output=apart / "card.md")
    assert not (apart / ".eval_results").exists()
    render_card(run / "model", results=[write_results(run, "first-try", BPB)])
    assert not file.exists()
    wrong = write_results(run, "first-try", {**row, "benchmark": {"dataset": "x/y"}})
    with pytest.raises(ValueError, match=r"results\[0\].benchmark must be"):
        render_card(run / "model", results=[wrong])


# texts of others

HOSTILE = "x` <script>alert(1)</script> ![p](http://evil/p) [l](http://evil) </code>|\n\n# A\n\n---"


def shown(text):
    """Return headings, and what else a card shows but text, code and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(ModelCard(text).text)
    inner = [part for token in tokens for part in token.children or ()]
    found = [token for token in (*tokens, *inner) if token.type in ("html_block", "html_inline")]
    links = [dict(part.attrs) for part in inner if part.type in ("link_open", "image")]
    heads = [
        after.content
        for token, after in pairwise(tokens)
        if token.type == "heading_open" and token.tag in ("h1", "h2")
    ]
    return heads, [token.content for token in found if "!--" not in token.content], links


def test_texts_of_others_are_shown_and_do_nothing(run, tmp_path):
    facts = {**FACTS, "hardware": HOSTILE, "command": HOSTILE, "dtype": HOSTILE}
    facts |= {"data": {"source": HOSTILE}, "versions": {HOSTILE: HOSTILE}, "model_type": HOSTILE}
    (run / "run.json").write_text(json.dumps(facts))
    recipe = {"model": {"init_from": f"/{HOSTILE.replace('/', '|')}"}, "data": {"text": [HOSTILE]}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    change_config(run, model_type=HOSTILE, vocab_size=HOSTILE)
    row = {**BPB, "settings": {"text": HOSTILE}, "metric": HOSTILE}
    results = write_results(run, "first-try", row, hardware=HOSTILE, versions={"a": HOSTILE})
    content = json.loads(results.read_text())
    content["model"]["name"] = HOSTILE
    content["command"] = content["date"] = HOSTILE
    results.write_text(json.dumps(content))
    render_card(run / "model", results=[results], output=tmp_path / "a card).md")
    heads, html, links = shown((tmp_path / "a card).md").read_text())
    assert heads[1:] == ["Results", "Use", "Fine-tune", "Model", "Training"]
    assert "alert(1)" in heads[0]
    assert [text for text in html if "details" not in text and "summary" not in text] == []
    assert [link.get("src") for link in links] == ["a%20card%29.png"]


def test_a_state_adapters_texts_are_shown_and_do_nothing(tmp_path):
    save_file({HOSTILE: torch.zeros(2)}, tmp_path / ADAPTER_FILE)
    told = {"format": ADAPTER_FORMAT, "model_type": HOSTILE, "digest": HOSTILE}
    told |= {"base": {HOSTILE: HOSTILE}, "states": {HOSTILE: [2]}}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(told))
    heads, html, links = shown(render_card(tmp_path).read_text())
    assert heads == [tmp_path.name, "Use", "States"]
    assert html == []
    assert links == []


def test_a_state_adapter_of_a_run_names_its_base_and_its_data(run):
    folder = run / "adapter"
    folder.mkdir()
    save_file({"s": torch.zeros(2)}, folder / ADAPTER_FILE)
    told = {"format": ADAPTER_FORMAT, "model_type": "x", "digest": "y", "base": {}}
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**told, "states": {"s": [2]}}))
    recipe = {"model": {"init_from": "user/base"}, "data": {"dataset": "user/texts"}}
    (run / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "card": {"license": "mit"}}))
    data = ModelCard(render_card(folder, metadata={"language": "en"}).read_text()).data.to_dict()
    assert (
        data.items()
        >= {
            "license": "mit",
            "language": ["en"],
            "datasets": ["user/texts"],
            "base_model": ["user/base"],
            "base_model_relation": "adapter",
        }.items()
    )


# what the Hub is told besides


def test_a_cards_metadata_is_the_recipes_and_the_options_win(run, scored):
    recipe = {
        "card": {"license": "other", "license_name": "mine", "language": ["en"]},
        "model": {"init_from": "user/base"},
        "data": {"dataset": "user/texts"},
        "train": {"lr": 0.003},
    }
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    text = render_card(
        run / "model", results=[scored], metadata={"license": "apache-2.0"}
    ).read_text()
    data = ModelCard(text).data
    assert (data.license, data.license_name, data.language) == ("apache-2.0", None, ["en"])
    assert (data.datasets, data.base_model) == (["user/texts"], ["user/base"])
    assert "| Base | user/base |" in text
    # edits of a card are lost, as it says
    path = run / "model" / "README.md"
    path.write_text(text.replace("license: apache-2.0", "license: wtfpl\na: ["))
    again = ModelCard(render_card(run / "model", results=[scored]).read_text()).data
    assert (again.license, again.license_name) == ("other", "mine")


@pytest.mark.parametrize(
    ("data", "datasets"),
    [
        ({"dataset": "/home/me/texts"}, None),
        ({"dataset": "https://me:secret@host/texts"}, None),
        ({"task": "mnist"}, ["ylecun/mnist"]),
        ({"task": "mnist", "task_args": {"data": "user/digits"}}, ["user/digits"]),
        ({"task": "mnist", "task_args": {"data": "/home/me/digits"}}, None),
        ({"task": "listops"}, None),
        ({"text": ["texts"]}, None),
    ],
)
def test_a_card_names_data_on_the_hub_and_no_folder(data, datasets, run, scored):
    recipe = {"data": data, "model": {"init_from": "/home/me/runs/first/model"}, "train": {"lr": 1}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    text = render_card(run / "model", results=[scored]).read_text()
    card = ModelCard(text)
    assert (card.data.datasets, card.data.base_model) == (datasets, None)
    assert "| Base | first |" in text
    assert "secret" not in text


def test_a_card_says_that_its_texts_are_the_machines_own(run, scored):
    there = "| From | files of the machine that trained it: no published data set |"
    assert there in render_card(run / "model", results=[scored]).read_text()
    named = render_card(run / "model", results=[scored], metadata={"datasets": "user/texts"})
    assert there not in named.read_text()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("license", "Apache 2.0", r"card\.license must be .* got 'Apache 2\.0'; did you mean 'apa"),
        ("license_name", "mine", r"card\.license_name needs card\.license 'other', got 'none'; g"),
        ("license_link", "terms.pdf", r"card\.license_link must be an address .* got 'terms\.pdf'"),
        ("language", "English", r"card\.language must be codes .* got 'English'"),
        ("datasets", ["user/texts", "../texts"], r"card\.datasets must be ids .* got '\.\./texts'"),
        (
            "datasets",
            "https://me:secret@host/x",
            r"card\.datasets must hold no credential, got",
        ),
        (
            "base_model",
            f"user/hf_{'a1' * 12}",
            r"card\.base_model must hold no credential",
        ),
        ("pipeline_tag", "text-gen", r"card\.pipeline_tag must be .*; did you mean 'text-gen"),
        ("licence", "mit", r"card has no field 'licence'; did you mean 'license'"),
        ("language", [3], r"card\.language must be a text, got 3"),
    ],
)
def test_metadata_that_the_hub_refuses_is_one_line_and_loses_nothing(field, value, says, run):
    before = render_card(run / "model").read_text()
    with pytest.raises((LookupError, TypeError, ValueError), match=says) as error:
        render_card(run / "model", metadata={field: value})
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    assert (run / "model" / "README.md").read_text() == before
    if value != [3]:  # which pydantic says in its words
        with pytest.raises((LookupError, ValueError), match=says):
            load_recipe("longhorn-demo", [f"card.{field}={json.dumps(value)}"])


def test_the_command_takes_the_metadata(run, capsys):
    options = "--license other --license-name mine --language en --language code --dataset a/b"
    given = [*options.split(), "--base-model", "c/d", "--pipeline-tag", "fill-mask"]
    assert main(["card", str(run / "model"), *given]) == 0
    data = ModelCard((run / "model" / "README.md").read_text()).data.to_dict()
    for field, value in {
        "license": "other",
        "license_name": "mine",
        "language": ["en", "code"],
        "datasets": ["a/b"],
        "base_model": ["c/d"],
        "pipeline_tag": "fill-mask",
    }.items():
        assert data[field] == value
    assert main(["card", str(run / "model"), "--license", "mine"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("given", [{}, {"license": "mit"}])
def test_a_card_without_a_licence_is_published_with_a_warning(given, run, tmp_path, caplog):
    render_card(run / "model", metadata=given)
    publish(run / "model", tmp_path / "out", code=False)
    assert (tmp_path / "out" / "README.md").exists()
    said = [record.getMessage() for record in caplog.records if "licence" in record.getMessage()]
    assert len(said) == (0 if given else 1)
    assert all("--license" in line and "card.license" in line for line in said)


# words


def test_the_card_uses_every_word_and_the_template_every_value(run, scored, monkeypatch):
    import jinja2

    passed = {}
    real = ModelCard.from_template.__func__

    def recorded(cls, data, **values):
        passed.update(values)
        return real(cls, data, **values)

    monkeypatch.setattr(ModelCard, "from_template", classmethod(recorded))
    text = render_card(run / "model", results=[scored]).read_text()
    used = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(TEMPLATE))
    assert used == {*passed, "card_data"} - {"template_str"}
    words = card_facts.family_words("longhorn")
    for field in ("architecture", "equal_forms", "intended_use", "bibtex"):
        assert words[field] in text
    assert all(f"\n- {limit}\n" in text for limit in words["limits"])
    assert "\n\n\n" not in text


def test_a_model_of_another_library_gets_a_card_without_family(tmp_path):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "small-llama")
    text = render_card(tmp_path / "small-llama").read_text()
    assert "# small-llama\n" in text
    assert f"A `llama` language model of {model.num_parameters():,} parameters." in text
    assert "ssmzoo.auto" not in text
    assert "## Citation" not in text
    assert metadata_errors(text) == []


# peft reads properties that transformers has renamed
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("model_type", ["falcon_h1", "falcon_mamba", "mamba", "mamba2"])
def test_a_card_of_mamba_adapts_what_peft_takes(model_type, tmp_path):
    model = tiny(model_type)
    model.save_pretrained(tmp_path / "m")
    (snippet,) = re.findall(
        r"```python\n(from peft.*?)```", render_card(tmp_path / "m").read_text(), flags=re.DOTALL
    )
    names = {"model": model}
    exec(snippet, names)
    assert any("in_proj.lora" in name for name, _ in names["model"].named_parameters())


def test_publish_asks_for_a_card(run, tmp_path):
    with pytest.raises(ValueError, match="ssmzoo card"):
        publish(run / "model", str(tmp_path / "out"))
    path = render_card(run / "model")
    assert path == run / "model" / "README.md"
    assert "![Loss while training](loss.png)" in path.read_text()
    publish(run / "model", str(tmp_path / "out"), code=False)
    assert (tmp_path / "out" / "loss.png").read_bytes() == (run / "loss.png").read_bytes()


# peft reads a property that transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_snippets_of_a_card_run(run, monkeypatch, capsys):
    text = render_card(run / "model").read_text()
    monkeypatch.chdir(run.parent)
    shutil.copytree(run / "model", run.parent / "published")
    names = {}
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet.replace('source = "first-try"', 'source = "published"'), names)
    assert "def mean(values):" in capsys.readouterr().out
    assert any("lora" in name for name, _ in names["model"].named_parameters())


def test_the_card_of_a_model_of_symbols_without_projections_runs_too(tmp_path, monkeypatch, capsys):
    family = load_family("coffee")
    model = family.causal_lm_class(family.config("coffee-induction"))
    model.save_pretrained(tmp_path / "symbols")
    symbol_tokenizer(9).save_pretrained(tmp_path / "symbols")
    text = render_card(tmp_path / "symbols").read_text()
    assert "LoraConfig" not in text
    assert "Train it whole" in text
    assert "Convolution" not in text
    assert "Expansion" not in text
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(snippet, {})
    assert "t1 t2 t3 t4" in capsys.readouterr().out


# bad input


def test_a_prompt_state_does_not_change_the_digest_of_the_model(run, scored):
    before = weights_revision(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    model.prefill(torch.arange(5)[None]).save_pretrained(run / "model")
    assert weights_revision(run / "model") == before
    render_card(run / "model", results=[scored])


def test_results_of_other_weights_are_refused(run, scored):
    stranger = write_results(run, "rival", BPB, revision="abc", source="user/rival")
    with pytest.raises(ValueError, match=r"none of the results is of the weights") as caught:
        render_card(run / "model", results=[stranger])
    assert str(stranger) in str(caught.value)
    stale = write_results(run, "stale", BPB, revision="sha256:0000")
    with pytest.raises(ValueError, match=r"stale.json was measured on other weights"):
        render_card(run / "model", results=[scored, stale])
    differs = write_results(run, "differs", {**BPB, "value": 3.0})
    with pytest.raises(ValueError, match="different values of ssmzoo_bits_per_byte"):
        render_card(run / "model", results=[scored, differs])
    assert not (run / "model" / "README.md").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("results.json", '{"model": {"na', "is corrupt"),
        ("results.json", "[]", "must hold a JSON object"),
        ("results.json", "{}", "model.name must be"),
        ("results.json", '{"model": {"name": "x"}}', "model.source must be"),
        ("results.json", '{"model": {"name": "x", "source": "y"}}', "model.revision must be"),
        ("results.json", f"{{{MODEL}}}", "results must be a list"),
        ("results.json", f'{{{MODEL}, "results": [3]}}', "results[0] must be an object"),
        ("metrics.jsonl", '{"step": 1}\n{"st', "line 2 is corrupt"),
        ("metrics.jsonl", "3\n", "line 1 must be an object"),
        ("metrics.jsonl", b"\xff", "is corrupt"),
        ("run.json", "{", "is corrupt"),
        ("run.json", '{"model_type": "llama"}', "trained a 'llama'"),
        ("recipe.yaml", None, "does not exist"),
        ("model/config.json", "{", "is corrupt"),
        ("model/config.json", '{"model_type": "ssmzoo_none"}', "not installed; installed: "),
        ("model/model.safetensors", b"12345678", "corrupt or truncated"),
        ("model/README.md", "# Mine\n", "was not written by `ssmzoo card`"),
    ],
)
def test_a_damaged_source_is_named_and_no_card_is_written(run, file, content, message):
    path = run / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    results = [path] if file == "results.json" else []
    target = run / "model" / "README.md"
    before = target.read_bytes() if target.exists() else None
    with pytest.raises(ValueError) as caught:
        render_card(run / "model", results=results)
    assert message in str(caught.value)
    assert (run if "trained" in message else path).name in str(caught.value)
    assert (target.read_bytes() if target.exists() else None) == before
    assert not list((run / "model").glob(".*"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("value", float("nan")),
        ("value", "0.5"),
        ("value", True),
        ("stderr", "N/A"),
        ("task", None),
        ("metric", 3),
        ("n", 1.5),
        ("seed", True),
        ("higher_is_better", 1),
        ("settings", []),
    ],
)
def test_a_score_of_the_wrong_kind_is_named(run, field, value):
    path = write_results(run, "first-try", BPB, {**RECALL, field: value})
    with pytest.raises(ValueError) as caught:
        render_card(run / "model", results=[path])
    assert str(path) in str(caught.value)
    assert f"results[1].{field} must be" in str(caught.value)


def test_missing_folders_and_files_are_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"must be a saved model with config.json"):
        render_card(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"absent.json does not exist"):
        render_card(run / "model", results=[tmp_path / "absent.json"])
    with pytest.raises(ValueError, match="must be the folder of a run"):
        render_card(run / "model", run_dir=tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"file/card.* cannot be written"):
        render_card(run / "model", output=tmp_path / "file" / "card.md")
    for name in ("card.json", "card.png", "card"):  # where facts and picture go
        with pytest.raises(ValueError, match=rf"output must end in \.md, got '.*/{name}'"):
            render_card(run / "model", output=tmp_path / name)
        assert not (tmp_path / name).exists()


def test_without_jinja2_the_error_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RuntimeError, match=r"pip install 'ssmzoo\[publish\]'"):
        render_card(run / "model")


# cards that are kept apart from their weights


def test_a_card_apart_from_its_model_is_rendered_again_without_the_weights(run, scored, tmp_path):
    shelf = tmp_path / "new" / "shelf"
    told = {"license": "mit"}
    first = render_card(
        run / "model", results=[scored], output=shelf / "first-try.md", metadata=told
    )
    files = {path.name for path in shelf.iterdir()}
    assert files == {"first-try.md", "first-try.json", "first-try.png"}
    assert "![Loss while training](first-try.png)" in first.read_text()
    before = first.read_text()
    shutil.rmtree(run / "model")
    assert render_card(shelf / "first-try.json", results=[scored]) == first
    assert first.read_text() == before
    render_card(shelf / "first-try.json", results=[scored], metadata={"language": "en"})
    data = ModelCard(first.read_text()).data
    assert (data.license, data.language) == ("mit", ["en"])
    other = write_results(run, "other", BPB, revision="abc", source="user/other")
    with pytest.raises(ValueError, match=r"none of the results is of the weights in .*try\.json"):
        render_card(shelf / "first-try.json", results=[other])
    (shelf / "first-try.png").unlink()
    with pytest.raises(ValueError, match=r"first-try\.png does not exist; it belongs to"):
        render_card(shelf / "first-try.json", results=[scored])
    (shelf / "first-try.json").write_text("{}")
    with pytest.raises(ValueError, match=r"first-try\.json must have exactly the fields card,"):
        render_card(shelf / "first-try.json", results=[scored])


def test_no_folder_of_this_machine_gets_into_a_card(run, scored, tmp_path):
    data = {"text": ["python-stdlib", "/home/me/my texts"], "validation": "/home/me/held-out"}
    (run / "recipe.yaml").write_text(yaml.safe_dump({"data": data, "train": {"lr": 0.003}}))
    text = render_card(
        run / "model", results=[scored], output=tmp_path / "first-try.md"
    ).read_text()
    summary = (tmp_path / "first-try.json").read_text()
    for written in (text, summary):
        assert "/home" not in written
        assert str(tmp_path) not in written
    assert "- python-stdlib\n  - my texts\n  validation: held-out" in text


@pytest.mark.parametrize(
    "path", sorted((ROOT / "model_cards").glob("*.json")), ids=lambda path: path.stem
)
def test_a_committed_card_is_what_its_sources_give(path, tmp_path):
    for file in path.parent.glob(f"{path.stem}.*"):
        shutil.copyfile(file, tmp_path / file.name)
    results = sorted((ROOT / "eval" / "results").glob("*.json"))
    again = render_card(tmp_path / path.name, results=results).read_text()
    committed = path.with_suffix(".md").read_text()
    assert again == committed, "the card is not what its sources give; run: make cards"


def test_the_committed_card_is_of_the_median_seed():
    results = [
        card_results.scored_model(path) for path in (ROOT / "eval" / "results").glob("*.json")
    ]
    revisions = {
        json.loads(path.read_text())["revision"] for path in (ROOT / "model_cards").glob("*.json")
    }
    judged = 0
    for own in results:
        seeds = [own, *(entry for entry in results if entry.is_of_another_seed(own))]
        if own.revision in revisions and len(seeds) > 1:
            values = [next(iter(entry.scores.values())).value for entry in seeds]
            assert values[0] == median_low(values), own.name
            judged += 1
    assert judged


COMMITTED = [
    path.relative_to(ROOT)
    for path in (ROOT / "model_cards").rglob("*.md")
    if path.with_suffix(".json").exists() or path.name == "README.md"
]


@pytest.mark.parametrize(
    "path", sorted(COMMITTED), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_hub_takes_every_committed_card(path):
    """Its check needs the Hub; what it looks at in a model's metadata is looked at here."""
    data = ModelCard.load(ROOT / path).data.to_dict()
    assert data["license"] == "apache-2.0"
    own = {name: data[name] for name in hub_metadata.FIELDS if name in data}
    assert hub_metadata.checked(own) == own
    assert data.keys() - own.keys() == {"library_name", "model-index"} | (data.keys() & {"tags"})
    assert metadata_errors((ROOT / path).read_text()) == []
