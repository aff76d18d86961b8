"""Scoring: what a model that must be right gets, what guessing gets, and what cannot move a score.

The models are rules in place of weights ("recall" looks back for the longest repeat of what it has
just read; "even" gives every byte the same chance), so that the right score is known beforehand.
"""

import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from ssmzoo import accelerate, load_family
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation import evaluate as evaluation
from ssmzoo.evaluation.evaluate import evaluate
from ssmzoo.evaluation.results import merge, place_digest, read_results, write_results
from ssmzoo.evaluation.scoring import _settings
from ssmzoo.evaluation.suites import Suite, average_score, load_suite, suites
from ssmzoo.evaluation.text import text_documents
from ssmzoo.publishing.card import render_card
from ssmzoo.tasks import symbol_tokenizer

pytestmark = [
    # lm-eval and its many imports warn of their own affairs
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]


class RuleConfig(PreTrainedConfig):
    model_type = "ssmzoo_test_rule"
    rule: str = "recall"
    vocab_size: int = 259
    tie_word_embeddings: bool = False


class RuleForCausalLM(PreTrainedModel):
    """A causal language model that follows ``config.rule``; its one weight is for show."""

    config_class = RuleConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, 1)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids, **_):
        batch, length = input_ids.shape
        logits = torch.zeros(batch, length, self.config.vocab_size)
        rule = self.config.rule
        if rule == "even":
            logits[..., 256:] = -math.inf  # the specials
        elif rule == "padding":  # not causal: sees how long the whole row is
            logits[..., :128] = length / 50
        else:
            ahead = {"recall": 1, "off_by_one": 2}[rule]
            for row in range(batch):
                said = look_back(input_ids[row], ahead)
                logits[row, torch.arange(length), said] = 30.0
        return CausalLMOutput(logits=logits)


def look_back(ids, ahead):
    """Return what came ``ahead`` places after the longest, latest repeat of what ends at t."""
    length = len(ids)
    repeat = torch.zeros(length, length, dtype=torch.long)  # [t, s]: how far back t and s agree
    for t in range(1, length):
        longer = torch.cat([torch.zeros(1, dtype=torch.long), repeat[t - 1, : t - 1]])
        repeat[t, :t] = torch.where(ids[:t] == ids[t], longer + 1, 0)
    said = torch.zeros(length, dtype=torch.long)
    for t in range(1, length):
        found = t - 1 - int(torch.argmax(repeat[t, :t].flip(0)))
        if repeat[t, found]:
            said[t] = ids[min(found + ahead, t)]
    return said


AutoConfig.register("ssmzoo_test_rule", RuleConfig, exist_ok=True)
AutoModelForCausalLM.register(RuleConfig, RuleForCausalLM, exist_ok=True)

TINY = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2}
MAMBA2 = Mamba2Config(
    **TINY, state_size=16, num_heads=4, head_dim=16, expand=2, n_groups=1, chunk_size=32
)
LLAMA = LlamaConfig(**TINY, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)


def softmax():
    family = load_family("dss")
    family.register()
    return family.config(**TINY, kernel_variant="softmax")


def save(folder, config, tokenizer=None):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():  # far from even logits
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    network.save_pretrained(folder)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a name to a saved model's folder; each is made once."""
    root, made = tmp_path_factory.mktemp("models"), {}
    symbols = symbol_tokenizer(40)
    recipes = {
        "mamba2": lambda: (MAMBA2,),
        "llama": lambda: (LLAMA,),
        # a kernel that the length of a row changes
        "softmax": lambda: (softmax(),),
        **{r: lambda r=r: (RuleConfig(rule=r),) for r in ("recall", "off_by_one", "even")},
        **{
            f"{r}_symbols": lambda r=r: (RuleConfig(rule=r, vocab_size=40), symbols)
            for r in ("recall", "off_by_one")
        },
        "recall_many": lambda: (RuleConfig(vocab_size=256), symbol_tokenizer(256)),
    }

    def folder(name):
        if name not in made:
            made[name] = save(root / name, *recipes[name]())
        return made[name]

    return folder


def scores(path):
    return {(row["task"], row["metric"]): row for row in read_results(path)["results"]}


def value(path, task, metric="acc"):
    return scores(path)[task, metric]["value"]


SYMBOL_TASKS = [
    "ssmzoo_mqar",
    "ssmzoo_induction",
    "ssmzoo_induction_64",
    "ssmzoo_induction_trigger2",
]
VARIED = ("seq_len", "noise_length", "target_length", "trigger")  # of induction heads
TEXT_TASKS = ["ssmzoo_recall_text", "ssmzoo_recall_text_24", "ssmzoo_induction_text"]


def test_a_model_that_recalls_scores_one_on_every_symbol_task(models, tmp_path):
    path = evaluate(models("recall_symbols"), tasks=SYMBOL_TASKS, output_dir=tmp_path, limit=40)
    assert [value(path, task) for task in SYMBOL_TASKS] == [1.0] * len(SYMBOL_TASKS)
    for task in SYMBOL_TASKS[1:]:
        assert value(path, task, "exact_match") == 1.0
    assert scores(path)["ssmzoo_induction_trigger2", "acc"]["settings"]["trigger"] == [6, 7]


def test_each_symbol_of_a_target_is_asked_after_filler(models, tmp_path):
    # the rule answers the first symbol, and has never seen what follows filler
    tasks = ["ssmzoo_induction_target2", "ssmzoo_induction_noise1"]
    path = evaluate(models("recall_symbols"), tasks=tasks, output_dir=tmp_path, limit=40)
    assert value(path, tasks[0]) == 0.5
    assert value(path, tasks[0], "exact_match") == 0.0
    assert value(path, tasks[1]) < 0.5  # it answers the noise behind the trigger
    row = scores(path)[tasks[0], "exact_match"]
    assert (row["n"], row["settings"]["target_length"]) == (40, 2)


def test_the_suite_of_induction_heads_asks_every_variant_of_the_papers(models, tmp_path):
    path = evaluate(models("recall_symbols"), suite="zoo-induction", output_dir=tmp_path, limit=6)
    found = {
        row["task"]: row
        for row in read_results(path)["results"]
        if row["metric"] == load_suite("zoo-induction").metrics[row["task"]]
    }
    assert {row["metric"] for row in found.values()} == {"exact_match"}
    assert {row["suite"] for row in found.values()} == {"zoo-induction"}
    asked = {
        name: {key: row["settings"][key] for key in VARIED if row["settings"].get(key)}
        for name, row in found.items()
    }
    lengths = {
        f"ssmzoo_induction{n and f'_{n}'}": {"seq_len": n or 16} for n in ("", 32, 64, 128, 256)
    }
    assert asked == {
        **lengths,
        "ssmzoo_induction_noise1": {"seq_len": 16, "noise_length": 1},
        "ssmzoo_induction_noise2": {"seq_len": 16, "noise_length": 2},
        "ssmzoo_induction_target2": {"seq_len": 16, "target_length": 2},
        "ssmzoo_induction_trigger2": {"seq_len": 16, "trigger": [6, 7]},
    }
    # the rule knows neither noise behind the trigger nor what follows filler
    right = {name for name, row in found.items() if row["value"] == 1}
    assert right == {*lengths, "ssmzoo_induction_trigger2"}


def test_a_lookup_model_solves_only_the_recall_problems_of_mad(models, tmp_path):
    path = evaluate(models("recall_many"), suite="zoo-mad", output_dir=tmp_path, limit=20)
    found = {task: value(path, task) for task in load_suite("zoo-mad").metrics}
    assert found.pop("ssmzoo_noisy_recall") == 1.0
    assert found.pop("ssmzoo_fuzzy_recall") >= 0.8  # one motif may end like another
    assert len(found) == 3
    assert max(found.values()) <= 0.4


def test_a_model_that_recalls_scores_one_on_every_text_task(models, tmp_path):
    path = evaluate(models("recall"), suite="zoo-recall", output_dir=tmp_path, limit=25)
    assert [value(path, task) for task in TEXT_TASKS] == [1.0] * len(TEXT_TASKS)


def test_a_model_that_answers_one_byte_late_fails_every_text_task(models, tmp_path):
    path = evaluate(models("off_by_one"), tasks=TEXT_TASKS, output_dir=tmp_path, limit=25)
    assert max(value(path, task) for task in TEXT_TASKS) < 0.5


def test_even_chances_cost_eight_bits_a_byte_and_nothing_for_special_tokens(models, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("naïve 漢字 [1, 2] {{braces}}\n" * 150)
    path = evaluate(models("even"), text=text, output_dir=tmp_path)
    row = scores(path)["ssmzoo_bits_per_byte", "bits_per_byte"]
    assert row["value"] == pytest.approx(8.0, abs=1e-5)
    assert row["stderr"] == pytest.approx(0.0, abs=1e-5)
    assert row["n"] == math.ceil(text.stat().st_size / 2048)
    assert row["higher_is_better"] is False
    assert row["settings"]["text"] == "text.txt"
    assert row["settings"]["window"] == 2048


@pytest.mark.parametrize("window", range(4, 10))
def test_windows_cut_no_character_in_two(window, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("aä€🙂" * 9, encoding="utf-8")
    pieces = text_documents(text=str(text), window=window)["test"]["text"]
    assert sorted("".join(pieces)) == sorted("aä€🙂" * 9)
    _, *others = sorted(len(piece.encode()) for piece in pieces)  # the last is the shortest
    assert all(window - 4 < length <= window for length in others)


def test_bits_per_byte_is_the_models_own_loss_over_the_windows(models, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    (text / "b.txt").write_text("[short]")
    path = evaluate(models("mamba2"), text=text, output_dir=tmp_path)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(models("mamba2")), byte_tokenizer()
    bits, lengths = [], []
    for piece in text_documents(text=str(text), seed=1234)["test"]["text"]:
        ids = torch.tensor([[tokenizer.bos_token_id, *piece.encode()]])
        with torch.no_grad():
            loss = network(ids, labels=ids).loss.item()
        lengths.append(len(piece.encode()))
        bits.append(loss * lengths[-1] / math.log(2))
    row = scores(path)["ssmzoo_bits_per_byte", "bits_per_byte"]
    assert row["n"] == len(bits) == 3
    assert row["value"] == pytest.approx(sum(bits) / sum(lengths), abs=1e-5)
    ratio = sum(bits) / sum(lengths)
    spread = sum((b - ratio * n) ** 2 for b, n in zip(bits, lengths, strict=True))
    assert row["stderr"] == pytest.approx(math.sqrt(spread * 3 / 2) / sum(lengths), rel=1e-3)


def test_the_bos_token_is_not_counted_in_bits_per_byte(models, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    folder = save(tmp_path / "with_bos", MAMBA2, tokenizer)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).encode("a") == [tokenizer.bos_token_id, 97]
    text = tmp_path / "text.txt"
    text.write_text("some words, " * 40)
    both = [evaluate(m, text=text, output_dir=tmp_path) for m in (folder, models("mamba2"))]
    bits = [value(path, "ssmzoo_bits_per_byte", "bits_per_byte") for path in both]
    assert bits[0] == pytest.approx(bits[1], abs=1e-6)


def ragged_requests():
    from lm_eval.api.instance import Instance

    rng = np.random.default_rng(0)

    def letters(length):
        return "".join(map(chr, rng.integers(97, 123, length)))

    lengths = [1, 90, 7, 33, 64, 65, 5, 128, 2, 31, 40]
    pairs = [(letters(n), letters(1 + n % 9)) for n in lengths]
    rolling = [("".join(pair),) for pair in pairs]
    return (
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)],
        [Instance("loglikelihood_rolling", {}, text, i) for i, text in enumerate(rolling)],
    )


def loglikelihoods(config, batch_size):
    from ssmzoo.evaluation import SharedPrefixLM
    from ssmzoo.evaluation.lm_eval_log import tamed

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    requests, rolling = ragged_requests()
    with tamed():
        lm = SharedPrefixLM(network, byte_tokenizer(), batch_size=batch_size)
        one = [score for score, _ in lm.loglikelihood(requests)]
        return np.array(one + lm.loglikelihood_rolling(rolling))


@pytest.mark.parametrize("config", [MAMBA2, LLAMA], ids=["mamba2", "llama"])
def test_loglikelihoods_do_not_depend_on_the_batch_size(config):
    alone, by_three, by_eight = (loglikelihoods(config, size) for size in (1, 3, 8))
    assert len(alone) == 22
    assert np.abs(by_three - alone).max() < 1e-4
    assert np.abs(by_eight - alone).max() < 1e-4


def test_logits_of_16_bits_are_scored_in_float32():
    from ssmzoo.evaluation import SharedPrefixLM
    from ssmzoo.evaluation.lm_eval_log import tamed

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(LLAMA).to(torch.bfloat16).eval()
    request = ragged_requests()[0][1]
    with tamed():
        ((score, _),) = SharedPrefixLM(network, byte_tokenizer()).loglikelihood([request])
    context, continuation = (torch.tensor(list(text.encode())) for text in request.args)
    read = torch.cat([context, continuation])[None, :-1]
    with torch.no_grad():
        logits = network(read).logits[0, -len(continuation) :].float()
    exact = logits.log_softmax(-1).gather(1, continuation[:, None]).sum()
    assert score == pytest.approx(float(exact), abs=1e-4)


def test_whole_texts_are_read_from_a_state_and_score_as_in_one_piece():
    from ssmzoo.evaluation import SharedPrefixLM
    from ssmzoo.evaluation.lm_eval_log import tamed

    torch.manual_seed(0)
    _, rolling = ragged_requests()
    zoo = load_family("longhorn")
    zoo = zoo.causal_lm_class(zoo.config(**{**zoo.tiny, "vocab_size": 259}))
    stock = accelerate(AutoModelForCausalLM.from_config(MAMBA2)).model
    for network in (zoo.eval(), stock.eval()):
        with tamed():
            lm = SharedPrefixLM(network, byte_tokenizer(), batch_size=3)
            assert lm.reads_any_length()
            once = lm.loglikelihood_rolling(rolling)
            lm._DEFAULT_MAX_LENGTH, lm.whole = 16, True
            assert lm.loglikelihood_rolling(rolling) == pytest.approx(once, rel=1e-5)
    llama = AutoModelForCausalLM.from_config(LLAMA)
    with tamed():
        assert not SharedPrefixLM(llama, byte_tokenizer(), batch_size=1).reads_any_length()


def test_a_model_that_sees_padding_depends_on_the_batch_size():
    config = RuleConfig(rule="padding")
    assert np.abs(loglikelihoods(config, 8) - loglikelihoods(config, 1)).max() > 1e-2


@pytest.mark.parametrize("model", ["mamba2", "softmax"])
def test_scores_do_not_depend_on_the_batch(models, tmp_path, model):
    text = tmp_path / "text"
    text.mkdir()
    for size in (7, 30, 100, 7800):
        (text / f"{size}.txt").write_text(("words of several lengths; " * 300)[:size])
    found = []
    for size in (1, 8):
        path = evaluate(
            models(model), tasks=TEXT_TASKS[:1], text=text, output_dir=tmp_path / str(size),
            batch_size=size, limit=24,
        )  # fmt: skip
        found.append({key: (row["value"], row["n"]) for key, row in scores(path).items()})
    for other in found[1:]:
        assert other["ssmzoo_recall_text", "acc"] == found[0]["ssmzoo_recall_text", "acc"]
        bits, same = other["ssmzoo_bits_per_byte", "bits_per_byte"][0], found[0]
        assert bits == pytest.approx(same["ssmzoo_bits_per_byte", "bits_per_byte"][0], abs=1e-6)
    path = evaluate(models(model), tasks=TEXT_TASKS[:1], output_dir=tmp_path / "alone", limit=24)
    assert value(path, TEXT_TASKS[0]) == found[0]["ssmzoo_recall_text", "acc"][0]


def test_the_seed_makes_the_data(models, tmp_path):
    kwargs = {"tasks": ["ssmzoo_recall_text"], "limit": 40, "output_dir": tmp_path}
    path = evaluate(models("mamba2"), **kwargs)
    first = read_results(path)
    assert read_results(evaluate(models("mamba2"), **kwargs))["results"] == first["results"]
    again = scores(evaluate(models("mamba2"), **kwargs, seed=7))["ssmzoo_recall_text", "acc"]
    assert again["seed"] == 7
    assert first["results"][0]["seed"] == 1234


def test_the_results_file_says_what_was_measured_and_how(models, tmp_path):
    path = evaluate(
        models("recall_symbols"), tasks=["ssmzoo_induction"], output_dir=tmp_path, name="mine",
        limit=10, batch_size=3,
    )  # fmt: skip
    assert path == tmp_path / "mine.json"
    content = json.loads(path.read_text())
    assert list(content) == [
        "model", "results", "versions", "hardware", "environment", "date", "command",
    ]  # fmt: skip
    assert content["environment"]["threads"] == torch.get_num_threads()
    assert content["model"]["name"] == "mine"
    assert content["model"]["source"] == Path(models("recall_symbols")).name
    assert str(tmp_path) not in path.read_text()
    assert content["model"]["model_type"] == "ssmzoo_test_rule"
    assert content["model"]["parameters"] == 40
    assert content["model"]["revision"].startswith("sha256:")
    row, whole = content["results"]
    assert whole["metric"] == "exact_match"
    assert (row["task"], row["metric"], row["value"], row["n"]) == (
        "ssmzoo_induction",
        "acc",
        1,
        10,
    )
    assert (row["stderr"], row["num_fewshot"], row["higher_is_better"]) == (0.0, 0, True)
    assert row["settings"] == {
        "version": 1.0,
        "num_examples": 1000,
        "seq_len": 16,
        "vocab_size": 40,
        "num_symbols": 7,
    }
    assert {"ssmzoo", "torch", "transformers", "lm-eval", "python"} <= set(content["versions"])
    assert content["date"].endswith("+00:00")
    assert content["hardware"]
    assert content["command"] == (
        # folders by their last names: the file is committed
        f"ssmzoo eval recall_symbols --tasks ssmzoo_induction --output {tmp_path.name} "
        "--name mine --batch-size 3 --limit 10 --seed 1234 --dtype auto"
    )
    assert list(tmp_path.iterdir()) == [path]


def test_the_recorded_command_line_is_one_the_program_takes(models, tmp_path, monkeypatch):
    import shlex

    from ssmzoo.cli import main as cli

    asked = {
        "model": models("mamba2"),
        "tasks": ["a", "b"],
        "suite": "zoo-recall",
        "text": "some text.txt",
        "output_dir": "out put",
        "name": "n",
        "batch_size": 2,
        "state_memory": 64.0,
        "limit": 3,
        "seed": 4,
        "device": "cpu",
        "dtype": "float32",
        "trust_remote_code": True,
        "stock": True,
        "adapter": "my states",
    }
    words = shlex.split(evaluation._Call(**asked).command())
    got = {}
    stub = tmp_path / "r.json"
    stub.write_text('{"results": []}')

    def record(model, **kwargs):
        got.update(model=model, **kwargs)
        return stub

    monkeypatch.setattr(evaluation, "evaluate", record)
    assert words[0] == "ssmzoo"
    assert cli.main(words[1:]) == 0
    asked |= {"model": Path(asked["model"]).name, "output_dir": Path("out put")}
    asked["adapter"] = Path("my states")
    assert got == asked  # no folder of this machine


class Asked(NamedTuple):
    """What of a task's configuration says which data it reads."""

    dataset_path: str | None
    dataset_name: str | None = None
    test_split: str | None = "test"
    validation_split: str | None = None
    custom_dataset: object = None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked("openai/gsm8k", "main"), {"dataset": "openai/gsm8k", "task_id": "gsm8k"}),
        (Asked("openai/gsm8k", "main", None, "train"), None),
        (Asked("openai/gsm8k", "socratic"), None),
        (Asked("openai/gsm8k"), {"dataset": "openai/gsm8k", "task_id": "whole"}),
        (Asked("a/plain-data-set"), None),
        (Asked("json"), None),
        (Asked(None, custom_dataset=print), None),
    ],
)
def test_only_declared_data_sets_are_benchmarks(asked, expected, tmp_path, monkeypatch):
    from ssmzoo.evaluation.scoring import _benchmark

    (tmp_path / "eval.yaml").write_text(
        "tasks: [{id: gsm8k, config: main, split: test}, {id: whole}]", encoding="utf-8"
    )

    def download(name, file, *, repo_type):
        assert (file, repo_type) == ("eval.yaml", "dataset")
        if name != "openai/gsm8k":
            raise RuntimeError(f"404: {name}")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert _benchmark(asked) == expected


def test_the_recipe_of_the_run_stands_in_the_results_of_its_model(models, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(models("recall"), run / "model")
    (run / "recipe.yaml").write_text("data: {text: /home/me/text}\ntrain: {seed: 3}\n")
    path = evaluate(run / "model", tasks=TEXT_TASKS[:1], output_dir=tmp_path, limit=2)
    assert json.loads(path.read_text())["recipe"] == {
        "data": {"text": "text"}, "train": {"seed": 3},
    }  # fmt: skip
    (run / "recipe.yaml").write_text("[")
    with pytest.raises(ValueError, match=r"recipe\.yaml is corrupt"):
        evaluate(run / "model", tasks=TEXT_TASKS[:1], output_dir=tmp_path, limit=2)


def test_a_second_call_merges_by_task_and_metric(models, tmp_path):
    kwargs = {"output_dir": tmp_path, "limit": 10}
    evaluate(models("recall"), tasks=TEXT_TASKS[:2], **kwargs)
    path = evaluate(models("recall"), tasks=TEXT_TASKS[1:], output_dir=tmp_path, limit=12)
    assert [row["task"] for row in read_results(path)["results"]] == TEXT_TASKS
    kept, *new = read_results(path)["results"]
    assert [kept["n"], *(row["n"] for row in new)] == [10, *([12] * (len(TEXT_TASKS) - 1))]
    assert "--limit 10" in kept["command"]
    assert all("command" not in row for row in new)


def test_scores_that_another_call_writes_meanwhile_are_kept(models, tmp_path, monkeypatch):
    model, score_task = models("recall"), evaluation.score_task

    def beside(*given, **options):
        monkeypatch.setattr(evaluation, "score_task", score_task)
        evaluate(model, tasks=TEXT_TASKS[:1], output_dir=tmp_path, limit=2)
        return score_task(*given, **options)

    monkeypatch.setattr(evaluation, "score_task", beside)
    path = evaluate(model, tasks=TEXT_TASKS[1:2], output_dir=tmp_path, limit=3)
    found = {row["task"]: row["n"] for row in read_results(path)["results"]}
    assert found == dict(zip(TEXT_TASKS[:2], (2, 3), strict=True))


RESULTS = {
    "model": {"name": "m", "source": "a/m", "revision": "1", "model_type": "x", "parameters": 1},
    "results": [{"task": "t", "metric": "acc", "value": 0.5}],
    "versions": {"torch": "2"},
    "hardware": "h",
    "date": "d",
    "command": "c",
}


def test_scores_of_other_weights_are_dropped_with_a_warning(caplog):
    new = {**RESULTS, "model": {**RESULTS["model"], "revision": "2"}, "results": []}
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        assert merge(RESULTS, new)["results"] == []
    assert "dropped 1 results of a/m" in caplog.text


def test_a_score_of_another_text_is_replaced_with_a_warning(caplog):
    row = {"task": "b", "metric": "bits", "value": 0.1, "settings": {"text": "a.txt"}}
    earlier = {**RESULTS, "results": [row, *RESULTS["results"]]}
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        merge(earlier, earlier)
        assert not caplog.text
        other = {**row, "value": 0.2, "settings": {"text": "c.txt"}}
        assert merge(earlier, {**RESULTS, "results": [other]})["results"][0] == other
        fewer = {**row, "n": 1}
        merge(earlier, {**RESULTS, "results": [fewer]})
    line, other = caplog.messages
    assert line.startswith("replaced bits of b with {'text': 'a.txt'} by one with {'text': 'c")
    assert other.startswith("replaced bits of b with {'n': None} by one with {'n': 1}; another")


def test_settings_tell_texts_and_problems_apart():
    text = {"version": 1.0, "window": 512, "text": "some/a.txt", "text_sha256": "12ab"}
    problem = {"version": 1.0, "problem": "memorization", "arguments": {"dictionary": 3}}
    for name, metadata, shown in (
        ("ssmzoo_bits_per_byte_512", text, {**text, "text": "a.txt"}),
        ("mine", {**problem, "text": "some/a.txt"}, problem),
    ):
        assert _settings(name, metadata) == shown


def test_scores_of_another_model_under_the_same_name_are_refused():
    new = {**RESULTS, "model": {**RESULTS["model"], "revision": "2", "source": "b/m"}}
    with pytest.raises(ValueError, match="of another model, 'a/m'"):
        merge(RESULTS, new)
    unknown = {**RESULTS, "model": {**RESULTS["model"], "revision": None}}
    other = {**RESULTS, "model": {**RESULTS["model"], "revision": None, "source": "b/m"}}
    with pytest.raises(ValueError, match="of another model, 'a/m'"):
        merge(unknown, other)
    assert merge(unknown, unknown) == unknown


def placed(target, *parts, revision="1", source="run/model"):
    """Return results of a model at some place, of one score whose task is the revision."""
    model = {**RESULTS["model"], "source": source, "revision": revision}
    if any(isinstance(part, Path) for part in parts):
        model["place"] = place_digest(target, *parts)
    return {**RESULTS, "model": model, "results": [{"task": revision, "metric": "acc", "value": 1}]}


def test_models_of_two_places_are_kept_apart_however_they_are_named(tmp_path, monkeypatch):
    """Of any two names, equal places may replace each other's scores, and others are refused."""
    for name in ("a", "b"):
        (tmp_path / name / "run" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    names = {
        Path("run/model"): "a", Path("run/model/"): "a", Path("../a/run/../run/model"): "a",
        tmp_path / "a/run/model": "a", tmp_path / "link/run/model": "a",
        tmp_path / "b/run/model": "b", Path("../b/run/model"): "b", "run/model": "the Hub's",
    }  # fmt: skip
    target = tmp_path / "results" / "run.json"
    for first, second in itertools.product(names, repeat=2):
        for adapters in ((), (tmp_path / "a/adapter",)):
            earlier = placed(target, first, *adapters)
            new = placed(Path("../results/run.json"), second, *adapters, revision="2")
            if names[first] == names[second]:
                assert merge(earlier, new) == new
            else:
                with pytest.raises(ValueError, match="are of another model"):
                    merge(earlier, new)
            same = placed(target, second, *adapters)
            assert merge(earlier, same)["results"] == same["results"]
    base = placed(target, tmp_path / "a/run/model")
    for other in (
        placed(target, tmp_path / "a/run/model", tmp_path / "x/adapter", revision="2"),
        {**base, "model": {**RESULTS["model"], "source": "run/model", "revision": "2"}},
    ):
        with pytest.raises(ValueError, match="of another model"):
            merge(base, other)


def test_two_runs_of_one_name_do_not_drop_each_others_scores(models, tmp_path, monkeypatch):
    """Nor does a card, which names the version of the package that made the numbers."""
    told = {"ssmzoo-leaky": "0.3.0 (commit 0a1b2c3d4e5f)"}
    monkeypatch.setattr(evaluation, "foreign_versions", lambda config: told)
    source = Path(models("llama"))
    name = "L\u00e4ufe 3: U\u0308ber"  # a blank, a colon, an umlaut and one in two parts
    paths = [tmp_path / place / name / "model" for place in ("a", "b")]
    for path in paths:
        shutil.copytree(source, path)
    config = json.loads((paths[1] / "config.json").read_text())
    (paths[1] / "config.json").write_text(json.dumps(config, indent=7))  # another revision
    options = {"tasks": TEXT_TASKS[:1], "output_dir": tmp_path, "limit": 2}
    written = evaluate(paths[0], **options)
    assert written.name == f"{name}.json"
    before = written.read_bytes()
    assert str(tmp_path).encode() not in before
    with pytest.raises(ValueError, match="of another folder; give those of"):
        evaluate(paths[1], **options)
    assert written.read_bytes() == before
    evaluate(paths[1], **options, name=f"{name} b")
    card = render_card(paths[0], results=[written, tmp_path / f"{name} b.json"])
    assert f"| **{name}** | {name} b |" in card.read_text()
    assert "ssmzoo-leaky 0.3.0 (commit 0a1b2c3d4e5f)" in card.read_text()


def test_kept_scores_keep_their_own_versions_through_several_calls():
    row = {"task": "u", "metric": "acc", "value": 0.1}
    second = {**RESULTS, "versions": {"torch": "3"}, "results": [row]}
    third = {**RESULTS, "versions": {"torch": "4"}, "results": [{**row, "task": "v"}]}
    merged = merge(merge(RESULTS, second), third)
    assert [r.get("versions") for r in merged["results"]] == [{"torch": "2"}, {"torch": "3"}, None]


def test_a_suites_average_is_dropped_when_one_of_its_scores_is_replaced():
    rows = [
        {"task": "t", "metric": "acc", "value": 0.5, "suite": "s"},
        {"task": "s", "metric": "average", "value": 0.5, "suite": "s"},
        {"task": "other", "metric": "average", "value": 0.1, "suite": "other"},
    ]
    earlier = {**RESULTS, "results": rows}
    again = merge(earlier, {**RESULTS, "results": [{"task": "t", "metric": "acc", "value": 0.9}]})
    assert [row["value"] for row in again["results"]] == [0.9, 0.1]
    beside = merge(earlier, {**RESULTS, "results": [{"task": "u", "metric": "acc", "value": 0.9}]})
    assert [row["value"] for row in beside["results"]] == [0.5, 0.5, 0.1, 0.9]


@pytest.mark.parametrize("content", ["", '{"model": {}', "[]", '{"model": {"source": "m"}}'])
def test_a_corrupt_results_file_is_refused_before_scoring_and_left_alone(models, tmp_path, content):
    path = tmp_path / "recall.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"recall\.json"):
        evaluate(models("recall"), tasks=TEXT_TASKS[:1], output_dir=tmp_path)
    assert path.read_text() == content


@pytest.mark.long
def test_the_output_folder_appears_with_the_first_scores(models, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "results"
    with pytest.raises(LookupError, match="ssmzoo_recal_text"):
        evaluate(models("recall"), tasks=["ssmzoo_recal_text"], output_dir=folder)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval.evaluator", None)
        with pytest.raises(RuntimeError, match="scoring needs lm-eval"):
            evaluate(models("recall"), tasks=TEXT_TASKS[:1], output_dir=folder)
    assert list(tmp_path.iterdir()) == []
    assert evaluate(models("recall"), tasks=TEXT_TASKS[:1], output_dir=folder, limit=2).is_file()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tasks": ()}, ValueError, "nothing to score"),
        ({"tasks": "ssmzoo_mqar"}, TypeError, "tasks must be a sequence of names"),
        ({"limit": 0}, ValueError, "limit must be at least 1, got 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"dtype": "float31"}, ValueError, "did you mean 'float32'"),
        ({"device": "gpu"}, ValueError, "device must be one that torch can use here"),
        ({"name": "a/b"}, ValueError, "name must be a file's"),
        ({"name": ".a"}, ValueError, "name must be a file's"),
        ({"name": "a\nb"}, ValueError, "name must be a file's"),
        ({"seed": 2**33}, ValueError, "seed must be between 0 and 4294967295, got 8589934592"),
        ({"seed": -1}, ValueError, "seed must be between 0 and 4294967295, got -1"),
        ({"tasks": ["ssmzoo_bits_per_byte"]}, ValueError, "needs text"),
        ({"tasks": ["ssmzoo_bits_per_byte_512"]}, ValueError, r"_512' needs text, .* \(--text\)"),
        ({"suite": "zoo-context"}, ValueError, r"needs text, .* \(--text\)"),
        ({"text": "no such file"}, ValueError, "there is none at 'no such file'"),
        ({"suite": "zoo-recal"}, LookupError, "no suite named 'zoo-recal'; did you mean 'zoo-rec"),
        ({"tasks": ["ssmzoo_mqar"]}, ValueError, "written in symbols"),
    ],
)
def test_bad_arguments_are_one_clear_error(models, tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        evaluate(models("recall"), **{"tasks": TEXT_TASKS, "output_dir": tmp_path, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_results_and_nothing_else(tmp_path):
    path = tmp_path / "m.json"
    write_results(path, RESULTS)
    before = path.read_text()
    broken = {**RESULTS, "results": [{"task": "t", "metric": "acc", "value": math.nan}]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_results(path, broken)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_text_cannot_be_asked_of_a_model_of_symbols(models, tmp_path):
    with pytest.raises(ValueError, match=r"holds only the symbols t0 \.\. t39"):
        evaluate(models("recall_symbols"), tasks=TEXT_TASKS, output_dir=tmp_path)


@pytest.mark.parametrize("name", suites())
def test_every_shipped_suite_states_one_metric_a_task(name):
    suite = load_suite(name)
    assert suite.name == name
    assert all(len(entry["metric_list"]) == 1 for entry in suite.entries)


def test_a_task_that_a_models_symbols_do_not_fit_is_named(tmp_path):
    folder = save(tmp_path / "few", RuleConfig(vocab_size=4), symbol_tokenizer(4))
    with pytest.raises(ValueError, match="task 'ssmzoo_induction' cannot be asked: num_symbols"):
        evaluate(folder, tasks=["ssmzoo_induction"], output_dir=tmp_path)


def test_unusable_models_are_one_clear_error(models, tmp_path):
    def score(model):
        evaluate(str(model), tasks=TEXT_TASKS, output_dir=tmp_path / "results")

    with pytest.raises(ValueError, match="no folder"):
        score(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"must hold a config\.json, and holds none"):
        score(tmp_path)
    save(tmp_path / "run" / "model", RuleConfig())
    with pytest.raises(ValueError, match=r"did you mean '.*run/model'"):
        score(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="got the file"):
        score(tmp_path / "file")
    with pytest.raises(ValueError, match="Hub id, got 'a b'"):
        score("a b")

    cut = save(tmp_path / "cut", MAMBA2)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot load a causal language model from"):
        score(cut)
    few = save(tmp_path / "few", RuleConfig(vocab_size=256))
    with pytest.raises(ValueError, match="ids up to 258 and the model embeds only 256 tokens"):
        score(few)


@pytest.mark.parametrize(
    ("damage", "answer"),
    [
        ("lacking", r"lack 1 tensors that the model needs, .* '.*A_log'"),
        ("short", r"do not fit its configuration: '.*A_log' is \[1\] in the file, .* needs \[4\]"),
    ],
)
def test_a_checkpoint_whose_tensors_are_not_the_models_is_not_scored(damage, answer, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / damage, MAMBA2)
    weights = tmp_path / damage / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in sorted(tensors) if name.endswith("A_log"))
    tensor = tensors.pop(name)
    if damage == "short":
        tensors[name] = tensor[:1].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=answer):
        evaluate(folder, tasks=TEXT_TASKS, output_dir=tmp_path)


def test_a_prompt_beyond_the_models_limit_is_cut_with_a_warning(tmp_path, caplog):
    short = LlamaConfig(**{**LLAMA.to_dict(), "max_position_embeddings": 48})
    folder = save(tmp_path / "short", short)
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        evaluate(folder, tasks=["ssmzoo_recall_text"], output_dir=tmp_path, limit=6)
    warnings = [r.message for r in caplog.records if "window of 48 tokens" in r.message]
    assert len(warnings) == 1


def test_a_model_without_a_limit_reads_the_whole_prompt(models, caplog, monkeypatch, tmp_path):
    from ssmzoo.evaluation import scorer

    monkeypatch.setattr(scorer.SharedPrefixLM, "_DEFAULT_MAX_LENGTH", 16)
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        path = evaluate(
            models("recall"), tasks=["ssmzoo_induction_text"], output_dir=tmp_path, limit=6
        )
    assert value(path, "ssmzoo_induction_text") == 1.0
    assert "window of" not in caplog.text


FAKE_ROWS = {
    "baber/piqa": {"goal": "g", "sol1": "a", "sol2": "bb", "label": 0},
    "Rowan/hellaswag": {
        "ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": ["w", "xx", "y", "z"],
        "label": "0",
    },
    "allenai/winogrande": {"sentence": "so _ ran", "option1": "it", "option2": "x", "answer": "1"},
    "allenai/ai2_arc": {
        "question": "q", "choices": {"label": ["A", "B"], "text": ["s", "tt"]}, "answerKey": "A",
    },
    "allenai/openbookqa": {
        "question_stem": "q", "choices": {"label": ["A", "B"], "text": ["s", "tt"]},
        "answerKey": "A",
    },
    "lighteval/siqa": {
        "context": "c", "question": "q", "answerA": "a", "answerB": "bb", "answerC": "c",
        "label": "1",
    },
    "aps/super_glue": {"passage": "p", "question": "q", "label": 1},
    "EleutherAI/lambada_openai": {"text": "a b c d"},
    "hazyresearch/based-swde-v2": {"text": "year: ", "value": "1"},
    "Xnhyacinth/LongBench": {"context": "c", "question": "q", "answers": ["a"]},
    "emozilla/pg19-test": {"text": "a book of some words"},
}  # fmt: skip
TABLE2 = {
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc",
    "social_iqa": "acc_norm",
    "boolq": "acc",
}


BMOJO = {
    "bmojo-table1": dict.fromkeys(
        ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande"), "acc"
    ),
    "bmojo-table2": {
        "ssmzoo_pg19": "bits_per_byte",
        "swde": "contains",
        "longbench_qasper": "qa_f1_score",
        "longbench_narrativeqa": "qa_f1_score",
    },
}


def stand_in(monkeypatch):
    """Let three rows of each data set stand for it."""

    def fake(path, name=None, **_):
        rows = datasets.Dataset.from_list([FAKE_ROWS[path]] * 3)
        return datasets.DatasetDict({"train": rows, "validation": rows, "test": rows})

    monkeypatch.setattr(datasets, "load_dataset", fake)


@pytest.mark.long
def test_the_tables_of_bmojo_name_tasks_that_run(models, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    path = evaluate(models("mamba2"), suite="bmojo-table1", output_dir=tmp_path)
    *rows, average = read_results(path)["results"]
    assert {row["task"]: row["metric"] for row in rows} == BMOJO["bmojo-table1"]
    assert average["value"] == pytest.approx(np.mean([row["value"] for row in rows]))
    # LongBench's two need packages that only they need
    tasks = ["ssmzoo_pg19", "swde"]
    path = evaluate(models("mamba2"), tasks=tasks, output_dir=tmp_path, name="table2")
    found = {row["task"]: row["metric"] for row in read_results(path)["results"]}
    assert found.items() <= BMOJO["bmojo-table2"].items()
    assert set(found) == set(tasks)
    for name, own in (("mamba2", {"whole": True}), ("llama", {"window_tokens": 2048})):
        path = evaluate(models(name), tasks=tasks[:1], output_dir=tmp_path, name=name)
        assert scores(path)["ssmzoo_pg19", "bits_per_byte"]["settings"] == {"version": 1.0, **own}


@pytest.mark.long
def test_table2_names_lm_evals_tasks_and_scores_each_by_the_papers_metric(
    models, tmp_path, monkeypatch
):
    stand_in(monkeypatch)
    path = evaluate(models("mamba2"), suite="longhorn-table2", output_dir=tmp_path)
    *rows, average = read_results(path)["results"]
    assert {row["task"]: row["metric"] for row in rows} == TABLE2
    assert all(row["n"] == 3 and row["num_fewshot"] == 0 for row in rows)
    assert all(row["suite"] == "longhorn-table2" for row in rows)
    assert (average["task"], average["metric"]) == ("longhorn-table2", "average")
    assert average["value"] == pytest.approx(np.mean([row["value"] for row in rows]))
    assert average["stderr"] == pytest.approx(np.hypot.reduce([r["stderr"] for r in rows]) / 8)

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(RuntimeError, match="task 'piqa' cannot be loaded: no network"):
        evaluate(models("mamba2"), tasks=["piqa"], output_dir=tmp_path, name="other")
    with pytest.raises(LookupError, match="no task named 'ssmzoo_mqr'; did you mean 'ssmzoo_mqar'"):
        evaluate(models("mamba2"), tasks=["ssmzoo_mqr"], output_dir=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be an lm-eval group"),
        ("task: {task: a}", "must be an lm-eval group"),
        ("task: [a]", "must hold 'task'"),
        ("task: [{task: a}]", "must hold 'task'"),
        ("task: [", "cannot be read"),
        ("task: [{task: 7, metric_list: [{metric: acc}]}]", "task must be a name, got 7"),
        ("task: [{task: a, metric_list: acc}]", "metric_list of 'a' must be a list .* got 'acc'"),
        ("task: [{task: a, metric_list: [acc]}]", r"metric_list of 'a' must be .* got \['acc'\]"),
        ("task: [{task: a, metric_list: [{aggregation: mean}]}]", "each with 'metric', got"),
        (
            "task: [{task: a, metric_list: [{metric: b}]}, {task: a, metric_list: [{metric: c}]}]",
            "names task 'a' twice",
        ),
        ("task: [{task: a, metric_list: [{metric: b}]}]\nmetadata: [1]", r"a mapping, got \[1\]"),
    ],
)
def test_a_wrong_entry_of_a_suite_is_named_with_its_file(tmp_path, content, message):
    path = tmp_path / "s.yaml"
    path.write_text(f"group: x\n{content}")
    with pytest.raises(ValueError, match=message) as caught:
        load_suite(str(path))
    assert "s.yaml" in str(caught.value)


def test_a_suites_entry_names_no_tag_of_several_tasks(models, tmp_path):
    path = tmp_path / "s.yaml"
    metric = "{metric: acc, aggregation: mean, higher_is_better: true}"
    path.write_text(f"group: x\ntask: [{{task: ssmzoo_text, metric_list: [{metric}]}}]")
    with pytest.raises(ValueError, match="suite 'x': 'ssmzoo_text' is a tag of several tasks"):
        evaluate(models("recall"), suite=str(path), output_dir=tmp_path / "out")


@pytest.mark.parametrize(
    ("directions", "expected"),
    [((True, True), True), ((False, False), False), ((True, False), None)],
)
def test_the_average_of_a_suite_has_the_direction_of_its_metrics(directions, expected):
    def row(task, metric, value, direction):
        return {
            "task": task, "metric": metric, "value": value, "stderr": 0.1, "n": 5, "seed": 0,
            "num_fewshot": 0, "higher_is_better": direction, "settings": {},
        }  # fmt: skip

    entries = tuple({"task": task, "metric_list": [{"metric": "m"}]} for task in ("a", "b"))
    rows = [
        row("a", "m", 1.0, directions[0]),
        row("b", "m", 2.0, directions[1]),
        row("b", "other", 9.0, True),
        row("b_part", "m", 9.0, True),  # of a group, which the suite does not name
    ]
    found = average_score(Suite("s", entries, True), rows)
    assert (found["value"], found["n"], found["higher_is_better"]) == (1.5, 10, expected)


def test_an_average_takes_each_tasks_first_filter_and_is_none_where_one_is_missing():
    entries = tuple({"task": task, "metric_list": [{"metric": "acc"}]} for task in ("a", "b"))
    rows = [
        {
            "task": task, "metric": metric, "value": value, "stderr": None, "n": 5, "seed": 7,
            "num_fewshot": 0, "higher_is_better": True, "settings": {},
        }
        for task, metric, value in (
            ("a", "acc,strict", 0.2), ("a", "acc,flexible", 0.8), ("b", "acc,strict", 0.4),
        )
    ]  # fmt: skip
    assert average_score(Suite("s", entries, True), rows)["value"] == pytest.approx(0.3)
    missing = average_score(Suite("s", entries, True), rows[:1])
    assert (missing["value"], missing["seed"]) == (None, 7)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("a/longhorn-s", "longhorn-s"),
        ("a/run7/model", "run7"),
        ("r/checkpoints/step-9", "r-step-9"),
    ],
)
def test_a_models_default_name_is_that_of_its_run(tmp_path, folder, name):
    path = tmp_path / folder
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    assert evaluation.model_name(str(path)) == name
    assert evaluation.model_name("user/model") == "user__model"


@pytest.mark.long
def test_scoring_is_quiet_and_needs_no_network_and_import_is_cheap(models, tmp_path):
    code = f"""
import sys
from ssmzoo.evaluation.evaluate import evaluate
assert not {{"torch", "transformers", "datasets", "lm_eval"}} & set(sys.modules)
import socket
reached = []
def refuse(*args, **kwargs):
    reached.append(args)
    raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refuse
evaluate({models("llama")!r}, tasks=["ssmzoo_recall_text"], text={__file__!r},
         output_dir={str(tmp_path)!r}, limit=4)
assert not reached, reached
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True
try:
    evaluate("nobody/nothing", tasks=["ssmzoo_recall_text"], output_dir={str(tmp_path)!r})
except LookupError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("no folder 'nobody/nothing' here, and no tokenizer from the Hub")
    assert done.stdout.count("\n") == 1
