"""A sweep of small models: its ledger, its picture, and how it goes on after a kill."""

import json

import pytest
import torch
import yaml
from tests.training import KilledError, killed_before
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from ssmzoo.analysis.cost import flops_per_token, state_bytes
from ssmzoo.analysis.recall import best_rates, ledger_table, load_sweep, recall
from ssmzoo.checkpoints.load import load_model
from ssmzoo.cli.main import main
from ssmzoo.data.sources import data_source
from ssmzoo.family import load_family
from ssmzoo.files import share
from ssmzoo.training.model import build_config

SWEEP = {
    "models": {
        "Longhorn": {"family": "longhorn", "config": {"num_hidden_layers": 1, "d_state": 4}},
        "Llama": {
            "config_of": "llama",
            "config": {
                **{"num_hidden_layers": 1, "intermediate_size": 16},
                **{"num_attention_heads": 2, "num_key_value_heads": 2},
            },
        },
    },
    "widths": [16],
    "learning_rates": [0.01, 0.03],
    "seeds": [0],
    "data": {
        **{"task": "mqar", "task_args": {"num_pairs": 2, "vocab_size": 16}, "validation": 32},
    },
    "train": {"steps": 4, "batch_size": 8, "seq_len": 12},
}


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False), encoding="utf-8")
    return path


def test_a_ledger_has_a_line_a_run_and_a_killed_sweep_goes_on(sweep, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        killed_before(patch, 3)
        with pytest.raises(KilledError):
            recall(sweep, tmp_path / "out")
    assert main(["recall", str(sweep), "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "out/ledger.json").read_text())
    ledger = written["ledger"]
    assert [(line["model"], line["lr"]) for line in ledger] == [
        ("Longhorn", 0.01),
        ("Longhorn", 0.03),
        ("Llama", 0.01),
        ("Llama", 0.03),
    ]
    for line in ledger:
        assert 0 <= line["accuracy"] <= 1
        assert line["targets"] == 32 * 2
        assert line["length"] == 12
        assert line["flops_per_token"] > line["parameters"] / 2
    # keys and values of 12 tokens; one layer's state and three inputs of its convolution
    assert ledger[2]["state_bytes"] == 2 * 12 * 16 * 4
    assert ledger[0]["state_bytes"] == (32 * 4 + 3 * 32) * 4
    assert (tmp_path / "out/ledger.png").read_bytes().startswith(b"\x89PNG")
    assert shown.splitlines()[0].startswith("model")
    assert ledger_table(ledger) in shown
    stamp = (tmp_path / "out/runs/Llama-16-0.01-0/model/model.safetensors").stat().st_mtime_ns
    described = tmp_path / "out/runs/Llama-16-0.03-0/run.json"
    facts = json.loads(described.read_text())
    assert written["hardware"] == facts["hardware"]
    described.write_text(json.dumps({**facts, "hardware": "another machine"}))
    recall(sweep, tmp_path / "out")  # nothing is trained again
    assert json.loads((tmp_path / "out/ledger.json").read_text())["hardware"] == "another machine"
    after = (tmp_path / "out/runs/Llama-16-0.01-0/model/model.safetensors").stat().st_mtime_ns
    assert after == stamp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"steps": 5, "batch_size": 8, "seq_len": 12}}, "train.steps was 4, is 5 now"),
        ({"data": {**SWEEP["data"], "validation": 64}}, "data.validation was 32, is 64 now"),
        ({"eval": {"every": 2, "batches": 1}}, "eval.every was 1000000000, is 2 now"),
    ],
)
def test_runs_of_another_sweep_are_not_taken_for_its_own(changes, message, sweep, tmp_path):
    one = {**SWEEP, "models": {"Longhorn": SWEEP["models"]["Longhorn"]}, "learning_rates": [0.01]}
    sweep.write_text(yaml.safe_dump(one, sort_keys=False), encoding="utf-8")
    recall(sweep, tmp_path / "out")
    before = (tmp_path / "out/ledger.json").read_bytes()
    sweep.write_text(yaml.safe_dump({**SWEEP, **changes}, sort_keys=False), encoding="utf-8")
    with pytest.raises(ValueError, match=f"Longhorn-16-0.01-0 was trained for another .*{message}"):
        recall(sweep, tmp_path / "out")
    assert (tmp_path / "out/ledger.json").read_bytes() == before
    assert len(list((tmp_path / "out/runs").iterdir())) == 1


def test_the_best_rate_is_best_on_average_over_the_seeds():
    lines = [
        {"model": "a", "width": 8, "lr": lr, "seed": seed, "accuracy": accuracy}
        for lr, found in ((0.1, (0.9, 0.1)), (0.2, (0.6, 0.6)))
        for seed, accuracy in enumerate(found)
    ]
    assert {line["lr"] for line in best_rates(lines)["a", 8]} == {0.2}


def test_the_cache_size_is_counted_for_any_model():
    theirs = MambaForCausalLM(
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, state_size=4)
    ).eval()
    counted = state_bytes(theirs, 10)
    # per layer 16 channels of 4 states and 4 columns of the convolution
    assert counted == 2 * 16 * (4 + 4) * 4
    family = load_family("dss")
    ours = family.causal_lm_class(family.config(**family.tiny)).eval()
    with torch.no_grad():
        cache = ours(torch.zeros(1, 10, dtype=torch.long), use_cache=True).past_key_values
    assert state_bytes(ours, 10) == cache.nbytes
    assert flops_per_token(ours, 10) > 0


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_counts_among_the_operations(heads):
    config = LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24},
        **{"num_attention_heads": 2, "num_key_value_heads": heads},
    )
    projections = 3 * (2 * 16 * 16 + 2 * 16 * 8 * heads + 3 * 16 * 24) + 16 * 16
    for length in (8, 64):  # a token's scores over the row, and as many products with values
        expected = 2 * projections + 3 * 2 * length * 2 * 16
        assert flops_per_token(LlamaForCausalLM(config).eval(), length) == expected
    family = load_family("bmojo")
    fields = {**family.tiny, "sliding_window": 16, "num_fading_tokens": 0}
    full, bare = (family.config(**{**fields, "num_eidetic_tokens": m}) for m in (8, 0))
    more, less = (
        flops_per_token(family.causal_lm_class(config).eval(), 64) for config in (full, bare)
    )
    # in one layer, 4 heads of 8: eight rows of memory for the 48 tokens behind the first window
    assert more - less == 4 * 8 * 4 * 8 * 48 // 64


OTHERS = {
    "mamba2": (
        {"num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1},
        # by layer the states of 4 heads, and 4 columns of a convolution over x, B and C
        lambda tokens: 2 * (4 * 8 * 8 + (32 + 2 * 8) * 4) * 4,
    ),
    "llama": (
        {"num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2},
        lambda tokens: 2 * 2 * 16 * tokens * 4,
    ),
    "recurrent_gemma": (
        {
            **{"num_hidden_layers": 3, "intermediate_size": 32, "num_attention_heads": 2},
            **{"lru_width": 16, "attention_window_size": 8},
        },
        # two recurrent blocks with 3 columns of a convolution, and a window's keys and values
        lambda tokens: (2 * 16 * (1 + 3) + 2 * 16 * min(tokens, 7)) * 4,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_transformers_enter_a_sweep(name, tmp_path):
    config, kept = OTHERS[name]
    if name == "mamba2":
        config = {**config, "expand": 2, "chunk_size": 4}
    section = {"config_of": name, "config": config}
    sweep = {**SWEEP, "models": {name: section}, "learning_rates": [0.01]}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False), encoding="utf-8")
    (line,) = recall(path, tmp_path / "out")
    assert line["flops_per_token"] > 0
    folder = tmp_path / f"out/runs/{name}-16-0.01-0/model"
    model = load_model(str(folder), folder, "float32", False)
    for tokens in (4, 12, 20):
        # besides, caches with a window count their tokens
        assert kept(tokens) <= state_bytes(model, tokens) <= kept(tokens) + 16
    assert kept(12) <= line["state_bytes"] <= kept(12) + 16


def test_a_model_that_keeps_nothing_has_no_size():
    config = BertConfig(
        **{"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "is_decoder": False},
        **{"num_attention_heads": 1, "intermediate_size": 8},
    )
    assert state_bytes(BertForMaskedLM(config).eval(), 5) is None
    line = {"model": "b", "width": 8, "lr": 0.1, "seed": 0, "accuracy": 0.5, "state_bytes": None}
    assert "none" in ledger_table([{**line, "flops_per_token": 3}])


def test_the_table_shows_number_median_and_range_of_seeds():
    line = {"model": "b", "width": 8, "lr": 0.1, "state_bytes": 4, "flops_per_token": 3}
    ledger = [{**line, "seed": i, "accuracy": a} for i, a in enumerate((0.9, 0.1, 0.2))]
    assert "median of 3 seeds 0.200, 0.100 to 0.900" in ledger_table(ledger)
    assert "median" not in ledger_table(ledger[:1])


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"width": [3]}, LookupError, "the sweep has no field 'width'; did you mean 'widths'"),
        ({"widths": []}, ValueError, "widths"),
        ({"models": {"../x": {"family": "dss"}}}, ValueError, r"folders are called by .*'\.\./x'"),
        (
            {"models": {"a b": {"family": "dss"}, "a-b": {"family": "dss"}}},
            ValueError,
            "models, .* must not repeat, got a-b-16-0.01-0 twice",
        ),
        ({"widths": [16, 16]}, ValueError, "must not repeat, got Longhorn-16-0.01-0 twice"),
        ({"train": {"step": 4, "batch_size": 8}}, LookupError, "did you mean 'steps'"),
        ({"models": {"x": {"famly": "dss"}}}, LookupError, "did you mean 'family'"),
        ({"data": {"task": "mqra"}}, LookupError, "did you mean 'mqar'"),
        ({"train": {"steps": 4, "batch_size": 8, "lr": 1}}, ValueError, "train.lr must be left"),
        ({"train": {"steps": 4, "batch_size": 8, "seed": 0}}, ValueError, "seeds say it, got 0"),
        (
            {"models": {"x": {"family": "dss", "config": {"hidden_size": 8}}}},
            ValueError,
            "left out of models.x.config, since widths say it, got 8",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_before_any_run(changes, kind, message, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, **changes}, sort_keys=False), encoding="utf-8")
    with pytest.raises(kind, match=message):
        load_sweep(path)


@pytest.mark.parametrize("path", sorted(share("eval/sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_sweeps_are_valid_down_to_the_configurations(path):
    runs = {  # rates and seeds change no configuration
        (columns["model"], columns["width"]): recipe
        for _, columns, recipe in load_sweep(path.stem).recipes()
    }
    tokenizer = data_source(next(iter(runs.values()))).tokenizer
    for (_, width), recipe in runs.items():
        assert build_config(recipe.model, tokenizer).hidden_size == width


def test_merged_mappings_are_read_and_what_stands_twice_is_refused(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3, y: 4}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'y' appears twice"):
        load_sweep(path)
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", encoding="utf-8")
    with pytest.raises(LookupError, match="has no field 'a'"):
        load_sweep(path)


def test_a_missing_sweep_is_one_line(tmp_path, capsys):
    assert main(["recall", str(tmp_path / "none.yaml"), "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no sweep" in line
    assert main(["recall", "bmojo-mqar-toyy", "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no sweep 'bmojo-mqar-toyy'; did you mean 'bmojo-mqar-toy'?; shipped: " in line
