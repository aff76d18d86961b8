"""The commands on transformers' own recurrent models: on our kernels, and with ``--stock``."""

import json
import logging
import shutil

import pytest
import torch
import yaml
from tests.stock_models import tiny
from tests.training.runs import (
    assert_same_run,
    killed,
    quick_runs,  # noqa: F401
    weights,
    write_texts,
)
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel

import ssmzoo
from ssmzoo.analysis import bench
from ssmzoo.analysis.doctor import examine_model
from ssmzoo.cli.main import main
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation import generate as generation
from ssmzoo.evaluation import loading
from ssmzoo.evaluation.evaluate import evaluate
from ssmzoo.evaluation.results import read_results
from ssmzoo.modeling.stock import classes
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train
from ssmzoo_kernels.dispatch import watch

pytestmark = [
    # lm-eval and its many imports warn of their own affairs
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]
SAID = " on ssmzoo's kernels (causal_conv1d, {}); --stock leaves them alone"
SCANS = {
    "mamba": "selective_scan",
    "mamba2": "gated_linear_attention",
    "qwen3_5_text": "gated_linear_attention",
}
MAMBA2 = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 2},
    **{"head_dim": 16, "n_groups": 1, "chunk_size": 16},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a tiny model of each type and a tokenizer, by type."""
    root = tmp_path_factory.mktemp("models")
    for name in SCANS:
        tiny(name, vocab_size=259).save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return {name: root / name for name in SCANS}


@pytest.fixture
def said(caplog):
    """What the commands log of kernels: each call returns the new lines."""
    caplog.set_level(logging.INFO, logger="ssmzoo")

    def new():
        lines = [r.getMessage() for r in caplog.records if r.name == "ssmzoo"]
        lines = [line for line in lines if "recurrent layer" in line]
        caplog.clear()
        return lines

    return new


def close(x, y):
    assert (x - y).detach().abs().max() <= 1e-5 * y.detach().abs().max()


# --- generate, eval -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCANS)
def test_generate_runs_on_our_kernels_unless_stock_is_asked_for(models, name, said, monkeypatch):
    loaded, load = [], loading.load_model
    monkeypatch.setattr(
        loading, "load_model", lambda *given: loaded.append(load(*given)) or loaded[-1]
    )
    texts, logits = [], []
    options = {"max_new_tokens": 6, "temperature": 0, "device": "cpu"}
    for stock in (False, True):
        with watch() as ran:
            texts.append(generation.generate(models[name], "a b c", stock=stock, **options))
            logits.append(loaded[-1](torch.arange(20)[None], use_cache=False).logits)
        assert bool(ran) is not stock
        lines = said()
        assert len(lines) == (0 if stock else 1)
        assert stock or lines[0].endswith(SAID.format(SCANS[name]))
    assert texts[0] == texts[1]
    close(*logits)


def test_the_command_names_the_kernels_in_one_line_and_nothing_with_stock(models, capsys):
    outputs = []
    for options in ([], ["--stock"]):
        command = ["generate", str(models["mamba2"]), "a b", "--max-new-tokens", "3", *options]
        assert main([*command, "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        outputs.append(out)
        kernels = [line for line in err.splitlines() if "ssmzoo's kernels" in line]
        assert len(kernels) == (not options)
    assert outputs[0] == outputs[1]
    command = ["generate", str(models["mamba2"]), "a", "--save-state", "kept", "--stock"]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "after ssmzoo.accelerate(model), got Mamba2ForCausalLM" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
def test_generate_continues_from_a_saved_state(models, name, tmp_path):
    options = {"max_new_tokens": 6, "temperature": 0, "device": "cpu"}
    whole = generation.generate(models[name], "a b c d", **options)
    kept = tmp_path / "kept"
    generation.generate(models[name], "a b ", save_state=kept, **options)
    assert generation.generate(models[name], "c d", state=kept, **options) == whole
    assert generation.generate(models[name], "c d", state=kept, beams=2, **options)


def test_eval_scores_both_ways_alike_and_writes_down_which(models, said, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words of a text, " * 40)
    values = []
    for stock in (False, True):
        with watch() as ran:
            path = evaluate(
                models["mamba2"], text=text, output_dir=tmp_path, stock=stock, device="cpu"
            )
        assert bool(ran) is not stock
        assert len(said()) == (0 if stock else 1)
        results = read_results(path)
        values.append(results["results"][0]["value"])
        assert results["command"].endswith(" --stock") is stock
    assert values[0] == pytest.approx(values[1], rel=1e-5)


# --- train ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipe")
    texts = write_texts(root / "texts")

    def write(model, options=None, **changes):
        fields = {
            "model": model,
            "data": {"text": str(texts), "validation": 0.2},
            "eval": {"every": 3, "batches": 1},
            "checkpoint": {"every": 2, "keep": 2},
            "log": {"every": 1},
            **changes,
        }
        fields["train"] = {"steps": 6, "batch_size": 2, "lr": 0.01, "warmup": 2, **(options or {})}
        if "data" not in changes:
            fields["train"].setdefault("seq_len", 32)
        path = root / "recipe.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def mamba2(recipe):
    return recipe({"config_of": "mamba2", "config": MAMBA2})


@pytest.fixture(scope="module")
def runs(mamba2, tmp_path_factory):
    """One recipe trained on our kernels, and stock; not to be changed."""
    root = tmp_path_factory.mktemp("runs")
    return {
        stock: train(mamba2, output_dir=root / str(stock), stock=stock) for stock in (False, True)
    }


def losses(run):
    return [
        line[name]
        for line in read_metrics(run / "metrics.jsonl")
        for name in ("loss", "validation_loss")
        if name in line
    ]


def test_train_learns_the_same_both_ways(runs):
    ours, stock = runs[False], runs[True]
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    facts = [json.loads((run / "run.json").read_text()) for run in (ours, stock)]
    assert [run["recurrent_layers"] for run in facts] == [
        ["causal_conv1d, gated_linear_attention"],
        ["stock: not accelerated"],
    ]


def test_a_trained_model_is_saved_as_a_stock_one(runs):
    ours, stock = (run / "model" for run in (runs[False], runs[True]))
    assert {p.name for p in ours.iterdir()} == {p.name for p in stock.iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert (ours / name).read_text() == (stock / name).read_text()
    assert AutoConfig.from_pretrained(ours).architectures == ["Mamba2ForCausalLM"]
    assert weights(runs[False]).keys() == weights(runs[True]).keys()
    model = AutoModelForCausalLM.from_pretrained(ours)
    assert type(model).__module__.startswith("transformers.")
    assert not any(isinstance(module, classes.Accelerated) for module in model.modules())
    other = AutoModelForCausalLM.from_pretrained(stock)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        one, two = (m(ids).logits for m in (model, ssmzoo.accelerate(other).model))
    assert (one - two).abs().max() <= 1e-3 * two.abs().max()  # of two trainings


@pytest.mark.parametrize("stock", [False, True])
def test_a_killed_run_resumes_to_the_same_weights_and_goes_on_the_other_way_too(
    runs, mamba2, stock, tmp_path, said
):
    folder = killed(mamba2, tmp_path / "run", 4, stock=stock)
    copy = shutil.copytree(folder, tmp_path / "copy")
    train(mamba2, output_dir=folder, resume=True, stock=stock)
    assert_same_run(folder, runs[stock])
    assert "changes" not in json.loads((folder / "run.json").read_text())
    folder = copy
    said()
    train(mamba2, output_dir=folder, resume=True, stock=not stock)
    assert len(said()) == stock
    assert losses(folder) == pytest.approx(losses(runs[stock]), rel=1e-4)
    asked, change = json.loads((folder / "run.json").read_text())["changes"]
    assert (asked["step"], asked["field"]) == (2, "model.stock")
    assert (change["step"], change["field"]) == (2, "recurrent_layers")
    assert change["to"] == [
        "causal_conv1d, gated_linear_attention" if stock else "stock: not accelerated"
    ]


def test_given_weights_are_trained_with_checkpointing_on_our_kernels(
    models, recipe, said, tmp_path
):
    options = {"steps": 2, "gradient_checkpointing": True}
    path = recipe({"init_from": str(models["qwen3_5_text"])}, options)
    found = []
    for stock in (False, True):
        with watch() as ran:
            run = train(path, output_dir=tmp_path / str(stock), stock=stock)
        assert bool(ran) is not stock
        assert len(said()) == (not stock)
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_test_split_is_scored_on_our_kernels_without_another_line(recipe, said, tmp_path):
    sizes = {"num_train": 8, "num_validation": 4, "num_test": 4}
    task = {"seq_len": 16, "num_pairs": 2, "vocab_size": 16, **sizes}
    data = {"task": "mqar", "task_args": task}
    path = recipe({"config_of": "mamba2", "config": MAMBA2}, {"steps": 2}, data=data)
    scores = []
    for stock in (False, True):
        with watch() as ran:
            run = train(path, output_dir=tmp_path / str(stock), stock=stock)
        assert len(said()) == (not stock)
        assert bool(ran) is not stock
        scores.append([row["value"] for row in read_results(run / "results.json")["results"]])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


@pytest.mark.long
def test_a_sweep_trains_on_our_kernels_or_stock(said, tmp_path):
    from ssmzoo.analysis.sweep import sweep
    from ssmzoo.analysis.sweep_plan import Sweep

    fields = {name: value for name, value in MAMBA2.items() if name != "hidden_size"}
    task = {"num_pairs": 2, "vocab_size": 16, "seq_len": 12}
    task |= {"num_train": 4, "num_validation": 2, "num_test": 2}
    chosen = Sweep.model_validate(
        {
            "models": {"Mamba2": {"config_of": "mamba2", "config": fields}},
            "problems": {
                "mqar": {
                    "data": {"task": "mqar", "task_args": task},
                    "train": {"steps": 1, "batch_size": 2},
                }
            },
            "widths": [16],
            "learning_rates": [0.01],
            "seeds": [0],
        }
    )
    for stock in (False, True):
        with watch() as ran:
            sweep(chosen, tmp_path / str(stock), stock=stock)
        assert bool(ran) is not stock


# --- doctor, inspect ------------------------------------------------------------------------------


def test_the_doctor_shows_what_each_recurrent_layer_runs(models):
    facts = examine_model(models["mamba2"], batch_size=2, length=40, device="cpu")
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    layer = facts["layers"][1]
    assert layer["mixer"] == "Mamba2Mixer"
    assert layer["read"] == {"causal_conv1d": "cpu", "gated_linear_attention": "cpu"}
    assert layer["step"]
    assert (layer["hints"], layer["stock"]) == ({}, None)
    # a sequence and layer: 4 heads of 16 x 8, 4 inputs of the convolution's 64 + 2 * 2 * 8 channels
    assert facts["state_bytes"] == 2 * 2 * (4 * 16 * 8 + 4 * 96) * 4
    assert facts["tokens_per_second"]["step"]


def test_the_doctor_of_a_stock_model_shows_none_of_our_ops(models, capsys):
    facts = examine_model(models["mamba"], length=16, device="cpu", stock=True)
    for layer in facts["layers"]:
        assert (layer["read"], layer["step"], layer["stock"]) == ({}, {}, "not accelerated")
    folder = str(models["mamba"])
    assert main(["doctor", folder, "--length", "8", "--stock", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "0-1     MambaMixer  none of ours  transformers' own  transformers' own" in out
    assert "ssmzoo's kernels" not in err


def test_the_doctor_lists_the_recurrent_layers_of_a_hybrid_and_that_its_cache_grows(models):
    facts = examine_model(models["qwen3_5_text"], length=16, device="cpu")
    assert [(layer["layer"], layer["mixer"]) for layer in facts["layers"]] == [
        (0, "Qwen3_5GatedDeltaNet")
    ]
    assert facts["state_bytes"] is None
    assert facts["state_reason"] == "grows by every token in 1 of 2 layers"


def test_the_doctor_says_why_a_layer_stays_stock(models, monkeypatch, said, capsys):
    from transformers.models.mamba import modeling_mamba

    def later(*given, more=None, **named):  # as a later transformers might have it
        return scan(*given, **named)

    scan = modeling_mamba.mamba_selective_scan
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", later)
    facts = examine_model(models["mamba"], length=8, device="cpu")
    (reason,) = {layer["stock"] for layer in facts["layers"]}
    assert "has a mamba_selective_scan of (given, more), ssmzoo" in reason
    assert said() == [f"MambaModel: recurrent layers stay stock: {reason}"]


def test_models_without_recurrent_layers_are_one_error(models, tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    LlamaModel(config).save_pretrained(tmp_path / "llama")
    capsys.readouterr()  # a bar of transformers'
    assert main(["doctor", str(tmp_path / "llama"), "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "must be a model of the zoo, or one of transformers with recurrent layers" in err
    assert "got LlamaModel" in err
    assert err.count("\n") == 1
    assert main(["inspect", str(tmp_path / "llama"), "--output", str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err
    assert "a model of the zoo, or one of transformers with recurrent layers" in err
    assert err.count("\n") == 1


def test_inspect_draws_the_known_facts_and_names_missing_pictures(models, tmp_path, capsys):
    options = ["--length", "24", "--sequences", "2", "--device", "cpu"]
    for stock in ([], ["--stock"]):
        folder = tmp_path / f"pictures{len(stock)}"
        command = ["inspect", str(models["qwen3_5_text"]), "--output", str(folder)]
        assert main([*command, *options, *stock]) == 0
        out, err = capsys.readouterr()
        assert ("ssmzoo's kernels" in err) is not bool(stock)
        drawn = ["kernels.png", "memory.png", *([] if stock else ["decay.png"])]
        report = json.loads((folder / "inspection.json").read_text())
        assert report["pictures"] == drawn
        assert {path.name for path in folder.iterdir()} == {"inspection.json", *drawn}
        assert report["other_layers"] == {"full_attention": [1]}
        assert "state of a sequence: grows by every token in 1 of 2 layers" in out
        assert f"not drawn, since no layer tells it: {', '.join(report['not_drawn'])}\n" in out
        assert "not drawn: full_attention layers 1\n" in out


# --- bench ----------------------------------------------------------------------------------------


def test_bench_times_transformers_models_both_ways(monkeypatch):
    for name, value in {"HIDDEN": 256, "LAYERS": 1, "STATE": 2, "BATCH": 1, "DECODED": 4}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "time_call", lambda call, device, repeats: call() or 1.0)
    rows = {}
    for stock in (False, True):
        with watch() as ran:
            rows[stock] = bench.bench([], lengths=(16,), stock=stock, report=lambda _: None)
        assert bool(ran) is not stock
    passes = {}
    for row in rows[False]:
        passes.setdefault(row["variant"], []).append(row["pass"])
    both = ["decode after 100", "train L=16"]
    assert passes == {
        "transformers Mamba2": both,
        "transformers Mamba2 (ssmzoo's kernels)": both,
        "transformers Mamba (mamba.py)": both[1:],
        "transformers Mamba": both[:1],
        "transformers Mamba (ssmzoo's kernels)": both,
    }
    ours = {name for name in passes if "kernels" in name}
    assert {row["variant"] for row in rows[True]} == passes.keys() - ours
    assert bench.bench([], lengths=(16,), peers=False, report=lambda _: None) == []


def test_the_memory_of_a_variant_is_measured_by_its_name(capsys, monkeypatch):
    for name, value in {"HIDDEN": 256, "LAYERS": 1, "STATE": 2, "BATCH": 1}.items():
        monkeypatch.setattr(bench, name, value)
    with watch() as ran:
        bench.print_peak("transformers Mamba2 (ssmzoo's kernels)", 16)
    assert ran
    assert float(capsys.readouterr().out) >= 0
