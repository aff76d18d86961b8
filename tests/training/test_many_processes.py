"""Several processes train as one does, go on from one another, share streams, and fail clearly.

Two processes of ``many_processes.py`` leave what most of these tests judge.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from tests.training.many_processes import MATCHES, SCORING, in_float64, recorded
from tests.training.runs import killed, quick_runs, saved  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from ssmzoo import families, load_family
from ssmzoo.cli.main import main
from ssmzoo.data.sources import data_source
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.distillation.prime import prime
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.training.checkpoint import damage_of
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.run import train

pytestmark = pytest.mark.xdist_group("many_processes")

PAGE = Path(__file__).parents[2] / "docs/many-machines.md"
# a crash says which thread of Python it came from, if any
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def ran(*command, **environment):
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=PAGE.parents[1],
        env={**ENVIRONMENT, **environment},
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def page_configurations():
    """Return the page's file, and what it becomes by the sentence below it."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    fields = {**yaml.safe_load(text), "distributed_type": "MULTI_GPU"}
    del fields["fsdp_config"]
    return {"FSDP": text, "MULTI_GPU": yaml.safe_dump(fields)}


def environment_of(file):
    """Return what `accelerate launch` makes of a file: the launcher's arguments, the variables."""
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    variables = prepare_multi_gpu_env(arguments)
    ours = {
        name: value
        for name, value in variables.items()
        if name.removeprefix("ACCELERATE_USE_").startswith(("FSDP", "PARALLELISM_CONFIG"))
    }
    return arguments, ours


# -- what is trained -------------------------------------------------------------------------

RECIPE = {
    "model": {"family": "longhorn", "config": {"hidden_size": 32, "num_hidden_layers": 2}},
    "train": {
        "steps": 8,
        "batch_size": 4,
        "seq_len": 32,
        "accumulate": 2,
        "lr": 0.01,
        "warmup": 1,
        "clip": 0.5,
    },
    "eval": {"every": 4, "batches": "all"},
    "checkpoint": {"every": 4},
    "log": {"every": 1},
}
COFFEE = ["model.family=coffee", "model.config.d_state=4", "model.config.ssm_init=paper"]
TASK = ["data.text=null", "data.validation=null", "train.seq_len=null", "train.steps=null"]
CHANGES = {
    "recipe": [],
    # dropout, so that a resume must restore the random states too
    "dropout": [
        "model.family=null",
        "model.config_of=llama",
        "model.config.intermediate_size=48",
        "model.config.num_attention_heads=2",
        "model.config.num_key_value_heads=2",
        "model.config.attention_dropout=0.1",
    ],
    "mamba": [
        *("model.family=null", "model.config_of=mamba", "model.config.state_size=4"),
        "train.steps=3",
    ],
    "bfloat16": ["train.dtype=bfloat16", "train.steps=2"],
    "projecting": [*COFFEE, "model.config.lambda_param=clamp", "train.steps=3"],
    **{
        f"align-{match}": [
            *("model.family=null", "model.config={}", "model.init_from=PRIMED"),
            *("align.teacher=TEACHER", f"align.match={match}", "train.steps=3"),
        ]
        for match in MATCHES
    },
    "labels": [
        *TASK,
        "data.task=listops",
        "data.task_args={min_length: 3, max_length: 12}",
        *("data.task_args.num_train=21", "data.task_args.num_validation=5"),
        "data.task_args.num_test=3",
        "train.epochs=2",
        "train.accumulate=1",
        "eval.every=epoch",
    ],
    "segments": [
        "model.family=bmojo",
        "model.config.num_attention_heads=2",
        "train.segments.count=2",
        "train.segments.gradients=keep",
        "train.steps=3",
    ],
    # an epoch of two steps: the second has one example for two processes
    "examples": [
        *TASK,
        "data.task=mqar",
        "data.task_args={seq_len: 16, num_pairs: 2, vocab_size: 16, num_train: 5}",
        *("data.task_args.num_validation=5", "data.task_args.num_test=3"),
        "train.epochs=1",
        "train.accumulate=1",
    ],
    "stream": [
        "data.text=null",
        "data.jsonl=STREAM",
        "data.streaming=true",
        "data.shuffle_buffer=5",
        "data.validation=null",
        "train.accumulate=1",
        "train.steps=12",
        "checkpoint.every=3",
    ],
}


def write_texts(folder):
    """Write documents of very different lengths, so that rows differ in how much they predict."""
    folder.mkdir()
    lengths = torch.randint(1, 13, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for i, length in enumerate(lengths):
        words = [["ant", "bee", "cat", "dodo"][(i * j * j) % 4] for j in range(length)]
        text = "gnu" if i % 2 else " ".join(words)
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


def write_primed(teacher, primed):
    """Write a Llama, and a hybrid with a new mixer in its second layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=48, vocab_size=259)
    config.update({"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1})
    config.update({"head_dim": 16, "initializer_range": 0.2})
    AutoModelForCausalLM.from_config(config).save_pretrained(teacher)
    byte_tokenizer().save_pretrained(teacher)
    prime(str(teacher), "longhorn", "half", primed, fields={"d_state": 4})


DRAWN = """
task: drawn
custom_dataset: !function ssmzoo.tasks.recall_text_documents
test_split: test
output_type: generate_until
doc_to_text: context
doc_to_target: context
generation_kwargs: {do_sample: true, temperature: 1.0, max_gen_toks: 2, until: ["."]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0, alphabet: text, num_examples: 3, num_pairs: 2, seed: 1}
"""


def write_recipes(folder):
    """Write the recipes, what they train on, and what launchers and lm-eval are told."""
    fields = {**RECIPE, "data": {"text": str(write_texts(folder / "texts")), "validation": 0.2}}
    places = {"STREAM": write_stream(folder, 1)[0]}
    places |= {"TEACHER": folder / "teacher", "PRIMED": folder / "primed"}
    write_primed(places["TEACHER"], places["PRIMED"])
    for name, changes in CHANGES.items():
        overrides = list(changes)
        for word, place in places.items():
            overrides = [change.replace(word, str(place)) for change in overrides]
        recipe = load_recipe(Recipe.model_validate(fields), overrides)
        (folder / f"{name}.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    (folder / "drawn.yaml").write_text(DRAWN)
    (folder / "page.yaml").write_text(page_configurations()["FSDP"], encoding="utf-8")
    (folder / "fsdp2.json").write_text(json.dumps(environment_of(folder / "page.yaml")[1]))
    return folder


def play(folder, *scenes):
    """Let two processes act in the named scenes of ``many_processes.py``, or in all."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    done = ran(sys.executable, "-m", "tests.training.many_processes", folder, *scenes, **place)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recipes, and what this process trains alone."""
    folder = write_recipes(tmp_path_factory.mktemp("many"))
    recipe = folder / "recipe.yaml"
    train(recipe, output_dir=folder / "one-single")
    with in_float64():
        train(recipe, output_dir=folder / "one")
        killed(recipe, folder / "one-then-two", step=7)
        train(folder / "projecting.yaml", output_dir=folder / "one-projecting")
        for match in MATCHES:
            train(folder / f"align-{match}.yaml", output_dir=folder / f"one-align-{match}")
        train(folder / "segments.yaml", output_dir=folder / "one-segments")
        train(folder / "labels.yaml", output_dir=folder / "one-labels")
    train(folder / "examples.yaml", output_dir=folder / "one-examples")
    with recorded(folder / "stream-of-one.json"):
        killed(folder / "stream.yaml", folder / "stream-of-one", step=5)
    return folder


@pytest.fixture(scope="module")
def together(folder):
    """The folder with all that two processes did in it, on from what one process left there."""
    play(folder)
    return folder


# -- the same curve --------------------------------------------------------------------------

# In float64 the entries of a step's gradient, whose norm is below 5, differ by rounding: 1e-15.
# Adam divides them by at least its epsilon, 1e-8, so that each of eight steps moves a weight by
# 1e-7 rates of 0.01 more or less.
WEIGHTS = 8 * 0.01 * 1e-15 / 1e-8
# What moves most has the least gradient: together, 2e4 weights move a loss by 2e4 rates of 0.01
# times 1e-15 in each of eight steps. That is 2e-12; here is what all of the zoo must meet.
LINES = 1e-10


def lines(run):
    drop = ("tokens_per_second", "seconds", "gauges")
    return [
        {key: value for key, value in line.items() if key not in drop}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def assert_alike(one, two):
    """Fail unless two runs in float64 have the same lines and weights but for their rounding."""
    assert len(lines(one)) == len(lines(two))
    for before, after in zip(lines(one), lines(two), strict=True):
        assert after == pytest.approx(before, rel=LINES, abs=0)
    assert_close(weights(one), weights(two))


def assert_close(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert (tensor - two[name]).abs().max() <= WEIGHTS, name


def assert_same(one, two):
    assert lines(one) == lines(two)
    tensors = [saved(run, 8) for run in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    assert any(name.endswith("/exp_avg") for name in tensors[0])
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def said_by_us(stderr):
    return [line for line in stderr.splitlines() if line.startswith("ssmzoo")]


def curve(run):
    return torch.tensor(
        [
            line[key]
            for line in lines(run)
            for key in ("loss", "grad_norm", "validation_loss")
            if key in line
        ],
        dtype=torch.float64,
    )


@pytest.mark.long
def test_two_processes_train_as_one_does(together):
    assert json.loads((together / "two/run.json").read_text())["processes"] == 2
    assert_alike(together / "one", together / "two")
    validations = [line for line in lines(together / "two") if "validation_loss" in line]
    assert len(validations) == 2


@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("many", ["two", "sharded"])
def test_mixers_align_as_on_one_process(many, match, together):
    assert_alike(together / f"one-align-{match}", together / f"{many}-align-{match}")


@pytest.mark.parametrize("run", ["pieces", "two-then-pieces"])
@pytest.mark.long
def test_two_processes_that_read_rows_together_train_as_one_does(run, together):
    assert_alike(together / "one", together / run)


def test_a_model_of_transformers_reads_rows_in_pieces_as_in_copies(together):
    assert_alike(together / "two-mamba", together / "pieces-mamba")


def test_in_float32_two_processes_are_as_near_to_float64_as_one_is(together):
    exact, one, two = (curve(together / run) for run in ("one", "one-single", "two-single"))
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (two - exact).abs().max() <= 2 * ((one - exact).abs().max() + rounding)


def test_the_mean_is_over_all_tokens_and_not_over_the_processes_means(
    together, tmp_path, monkeypatch
):
    first, second = (json.loads((together / f"two-{rank}.json").read_text()) for rank in (0, 1))
    logged = [line["loss"] for line in lines(together / "two") if "loss" in line]
    differences = []
    for step, loss in enumerate(logged, 1):
        targets = first[str(step)]["targets"] + second[str(step)]["targets"]
        losses = first[str(step)]["losses"] + second[str(step)]["losses"]
        mean = sum(t * l for t, l in zip(targets, losses, strict=True)) / sum(targets)
        assert loss == pytest.approx(mean, rel=1e-12)
        differences.append(abs(sum(losses) / 4 - mean))
    assert max(differences) > 1e6 * LINES
    # the mean of means makes another run, which the comparison above tells from this one
    monkeypatch.setattr(CausalLM, "targets", lambda *_: 1)
    with in_float64():
        wrong = train(together / "recipe.yaml", output_dir=tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_alike(together / "one", wrong)


@pytest.mark.parametrize("what", ["segments", "examples"])
def test_segments_in_one_graph_and_steps_with_too_few_examples_train_alike(what, together):
    one, two = curve(together / f"one-{what}"), curve(together / f"two-{what}")
    # their losses are computed in float32: a few roundings
    torch.testing.assert_close(one, two, rtol=1e-6, atol=0)


def test_labels_train_alike_and_every_example_is_tested_once(together):
    assert_alike(together / "one-labels", together / "two-labels")
    for run in ("one-labels", "two-labels"):
        facts = json.loads((together / run / "run.json").read_text())
        assert facts["finished"]["test"]["targets"] == 3


# -- resuming --------------------------------------------------------------------------------


def test_as_many_processes_resume_bit_for_bit(together):
    assert_same(together / "two", together / "two-then-two")


def test_only_the_first_process_tracks(together):
    assert [(together / f"trackers-{rank}.txt").read_text() for rank in (0, 1)] == ["1", "0"]


def test_ddp_knows_its_later_buckets_before_the_first_step(together):
    """In which more than two processes round; those that resume would round otherwise."""
    for rank in (0, 1):
        assert json.loads((together / f"patience-{rank}.json").read_text())["settled"]


def test_a_run_resumes_on_another_number_of_processes(together):
    with in_float64():
        train(together / "recipe.yaml", output_dir=together / "two-then-one", resume=True)
    for run, processes in (("two-then-one", 1), ("one-then-two", 2)):
        assert json.loads((together / run / "run.json").read_text())["processes"] == processes
        assert_alike(together / "one", together / run)


def random_states(run):
    state = json.loads((run / "checkpoints/step-00000008/state.json").read_text())
    return [process["random"]["torch"] for process in state["processes"]]


def test_each_process_has_its_own_dropout(together):
    first, second = random_states(together / "two")
    assert first != second
    assert random_states(together / "one") == [first]
    # where their number changes, a process that was there before goes on
    assert random_states(together / "one-then-two") == [first, second]


# -- a run that is told to stop --------------------------------------------------------------


def test_a_signal_to_one_or_both_processes_stops_and_saves_the_run(together):
    first, second = (json.loads((together / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [status for status, _ in first] == [130, 143, 138, 129]
    starts = [
        "stopped by SIGINT before anything was trained; give the same command again",
        "stopped by SIGTERM after step 3, ",
        "stopped by SIGUSR1 after step 4, ",
        "stopped by SIGHUP after step 8, ",
    ]
    for (_, line), start in zip(first, starts, strict=True):
        assert line.startswith(start)
    assert_same(together / "left-alone", together / "told")


def test_a_full_disk_of_one_process_ends_all_within_the_timeout(together):
    first, second = (json.loads((together / f"lost-{rank}.json").read_text()) for rank in (0, 1))
    assert "lost/metrics.jsonl cannot be written: it is full" in first["said"]
    assert second["said"].startswith("another process of this run has ended, or hangs: see the")
    assert second["seconds"] < 60  # three of them are the timeout


def test_distributed_timeouts_are_half_an_hour_and_six_hours(together):
    for rank in (0, 1):
        waits = json.loads((together / f"patience-{rank}.json").read_text())
        del waits["settled"]
        assert waits == {"step": 30 * 60, "saving": 30 * 60, "alone": 6 * 60 * 60}


# -- streams ---------------------------------------------------------------------------------

CELL = 8  # tokens: a piece of a document, which names it
CELLS = [2, 7, 3, 4]  # of a document; six documents in a row are of one length


def write_stream(folder, files):
    """Write 24 documents as jsonl, of which every share of 2 or 3 processes has as many tokens.

    The beginning and the end of a document count as characters of its first and last cell, so that
    no cell lies across two rows of a multiple of eight tokens.
    """
    texts = [[] for _ in range(files)]
    for document in range(24):
        cells = "".join(f".{document:03d}{cell:02d}.." for cell in range(CELLS[document // 6]))
        texts[document % files].append(cells[1:-1])
    paths = [folder / f"{i}-of-{files}.jsonl" for i in range(files)]
    for path, documents in zip(paths, texts, strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return paths


NAMES = [
    f"{document:03d}{cell:02d}" for document in range(24) for cell in range(CELLS[document // 6])
]


def cells_of(rows):
    """Return the names of the cells in some tokens."""
    tokens = torch.as_tensor(rows).reshape(-1, CELL)[:, 1:6]
    return ["".join(map(chr, cell)) for cell in tokens.tolist()]


def test_two_processes_train_on_every_document_of_a_stream_once_an_epoch(together):
    """As one does, and after one; resumed in the middle of the first epoch, of six steps."""

    def tokens(*names):
        """Return the tokens of each step, those of the first process first."""
        parts = [json.loads((together / f"{name}.json").read_text()) for name in names]
        read = {
            step: [tokens for part in parts for tokens in part[step]["tokens"]] for step in parts[0]
        }
        return {
            int(step): [t for part in step_parts for t in part] for step, step_parts in read.items()
        }

    begun, resumed, after_one = (
        tokens(*(f"stream-{part}-{rank}" for rank in (0, 1)))
        for part in ("begun", "resumed", "of-one")
    )
    assert [*begun] == [1, 2, 3, 4]
    assert [*resumed] == [*range(4, 13)]
    assert begun[4] == resumed[4]
    steps = {**begun, **resumed}
    for epoch in (range(1, 7), range(7, 13)):
        assert Counter(c for step in epoch for c in cells_of(steps[step])) == Counter(NAMES)
    assert tokens("stream-of-one") == begun
    assert after_one == resumed


@pytest.mark.parametrize(("world", "files"), [(2, 2), (3, 1), (3, 2), (3, 3)])
def test_processes_read_each_row_of_a_stream_once(world, files, tmp_path, monkeypatch):
    """Each share is resumed, from JSON, before every step."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    paths = [str(path) for path in write_stream(tmp_path, files)]
    data = {"jsonl": paths, "streaming": True, "shuffle_buffer": 5}
    size = {"batch_size": 2 * world, "accumulate": 1}
    recipe = Recipe.model_validate(
        {**RECIPE, "data": data, "train": {**RECIPE["train"], **size}, "eval": {}}
    )
    source = data_source(recipe)
    manifest = source.prepare(tmp_path)
    epochs = [[], []]
    for rank in range(world):
        where = {"rank": rank, "world": world}
        position = None
        for step in range(2 * 12 // world):
            share = source.open(tmp_path, manifest, **where).train
            if position is not None:
                share.seek(json.loads(position))
            epochs[step * world // 12] += cells_of(share.next_batch(2).input_ids)
            position = json.dumps(share.position())
    assert [Counter(epoch) for epoch in epochs] == [Counter(NAMES)] * 2


# -- shards ----------------------------------------------------------------------------------


def test_every_family_sharded_by_torch_has_the_gradients_of_one_process(together):
    for rank in (0, 1):
        found = json.loads((together / f"sharded-{rank}.json").read_text())
        assert found.keys() == families().keys()
        for name, facts in found.items():
            # sums of a few hundred terms in another order
            assert max(facts["error"].values()) < 1e-12, (name, facts["error"])
            assert not facts["missing"], name
            assert facts["tied"], name
            assert facts["share"] < 0.6, name


def test_every_family_split_by_transformers_equals_one_process(together):
    for rank in (0, 1):
        found = json.loads((together / f"split-{rank}.json").read_text())
        assert found.keys() == families().keys()
        for name, facts in found.items():
            # sums of at most a few hundred terms in another order
            assert max(facts["error"].values()) < 1e-12, (name, facts["error"])
            assert facts["tokens"], name
            assert {"embed_tokens", "up_proj", "down_proj"} <= set(facts["split"]), name
            assert "pp_size must be 1 for" in facts["refused"], name
    assert "lm_head" in found["coffee"]["split"]  # where it is not the embedding


def test_a_head_that_needs_the_whole_vocabulary_is_not_split():
    coffee = load_family("coffee")
    model = coffee.causal_lm_class(coffee.config(**coffee.tiny, head="nearest_embedding"))
    with pytest.raises(ValueError, match="tp_size must be 1 for this CoffeeForCausalLM"):
        type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), object())


def test_two_processes_score_bit_for_bit_as_one_does(together, capsys):
    words = ["eval", together / "one-single/model", "--output", together / "scores-of-one"]
    assert main([*map(str, words), *SCORING]) == 0
    one, two = (
        json.loads((together / folder / "one-single.json").read_text())["results"]
        for folder in ("scores-of-one", "scores-of-two")
    )
    alone = []
    for row in (*one, *two):
        reading = row.pop("reading")  # each process reads what both need
        alone.append(reading["alone"])
    assert one == two
    assert alone[: len(one)] == alone[len(one) :]  # of both processes
    assert {row["task"] for row in one} >= {"ssmzoo_recall_text", "ssmzoo_bits_per_byte"}
    assert all(row["n"] == 9 for row in one if row["task"] == "ssmzoo_recall_text")
    said = [(together / f"scored-{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0].replace("scores-of-two", "scores-of-one") == capsys.readouterr().out
    assert said[1] == ""


def test_two_processes_refuse_a_task_that_samples(together):
    for rank in (0, 1):
        assert "task 'drawn' samples" in (together / f"drawn-{rank}.txt").read_text()


def test_one_process_scores_a_task_that_samples(together, tmp_path):
    words = ["--tasks", together / "drawn.yaml", "--output", tmp_path]
    assert main(["eval", *map(str, [together / "one-single/model", *words])]) == 0


def test_a_command_for_one_process_refuses_several(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["list"]) == 2
    assert "ssmzoo list runs in one process, and WORLD_SIZE asks for 2" in capsys.readouterr().err


def test_a_run_sharded_by_fsdp2_equals_a_run_of_one_process(together):
    assert_alike(together / "one", together / "sharded")
    assert_close(saved(together / "one", 8), saved(together / "sharded", 8))
    assert all(line["grad_norm"] > 0.5 for line in lines(together / "sharded") if "loss" in line)


def test_a_run_resumes_sharded_or_unsharded(together):
    """From copies to shards, and from shards to one process."""
    with in_float64():
        train(together / "recipe.yaml", output_dir=together / "sharded-then-one", resume=True)
    for run in ("copied-then-sharded", "sharded-then-one"):
        assert_alike(together / "one", together / run)
        assert_close(saved(together / "one", 8), saved(together / run, 8))


def test_each_process_writes_half(together):
    for run in ("two", "sharded"):
        folder = together / run / "checkpoints/step-00000008/shards"
        first, second = (sum(x.nbytes for x in load_file(p).values()) for p in folder.iterdir())
        whole = sum(x.nbytes for x in saved(together / run, 8).values())
        assert first + second == whole
        assert max(first, second) < 0.55 * whole


def test_each_process_of_a_sharded_run_reads_half(together):
    whole = sum(x.nbytes for x in saved(together / "two", 8).values())
    for rank in (0, 1):
        assert (
            0.45 * whole < json.loads((together / f"read-{rank}.json").read_text()) < 0.55 * whole
        )


def test_training_goes_on_while_a_checkpoint_is_written(together):
    for rank in (0, 1):
        events, _ = json.loads((together / f"behind-{rank}.json").read_text())
        assert events.index("step 6") < events.index("written") < events.index("step 8")


def test_a_full_disk_of_one_process_is_one_line_in_all_and_older_checkpoints_stay(together):
    lines = [json.loads((together / f"behind-{rank}.json").read_text())[1] for rank in (0, 1)]
    assert lines[0] == lines[1]
    assert "step-00000008 cannot be written: No space left on device" in lines[0]
    folder = together / "full/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert damage_of(folder / "step-00000004") is None


@pytest.mark.long
def test_shards_are_joined_by_the_command(together, tmp_path, capsys):
    checkpoint = together / "two-single/checkpoints/step-00000008"
    # in a process of its own, which knows no family yet, and by a path from where it is typed
    here = {"cwd": together, "env": ENVIRONMENT, "capture_output": True, "text": True}
    words = ["consolidate", checkpoint.relative_to(together), "--output", tmp_path / "model"]
    done = subprocess.run([sys.executable, "-m", "ssmzoo", *map(str, words)], **here, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    joined, model = (
        load_file(tmp_path / "model/model.safetensors"),
        weights(together / "two-single"),
    )
    assert joined.keys() == model.keys()
    assert all(torch.equal(joined[name], model[name]) for name in model)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for words, message in (
        ([checkpoint, "--output", tmp_path / "model"], "output must be a new or an empty folder"),
        ([tmp_path, "--output", tmp_path / "no"], "checkpoint must be one of a run's"),
    ):
        assert main(["consolidate", *map(str, words)]) == 2
        assert message in capsys.readouterr().err
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    shard = sorted((damaged / "shards").iterdir())[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["consolidate", str(damaged), "--output", str(tmp_path / "no")]) == 2
    assert f"shards/{shard.name} has" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["eval", str(checkpoint), "--tasks", "x", "--output", str(tmp_path / "r")]) == 2
    assert "ssmzoo consolidate" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["two-projecting", "sharded-projecting"])
def test_runs_project_parameters_as_one_process_does(together, run):
    assert_alike(together / "one-projecting", together / run)
    lam = [t for n, t in weights(together / run).items() if n.endswith(".lam")]
    assert lam
    for tensor in lam:
        assert (tensor <= 0).all()
        assert 0 < (tensor == 0).sum() < tensor.numel()


def test_a_sharded_bfloat16_run_keeps_the_same_parameters_in_float32(together):
    for rank in (0, 1):
        seen = json.loads((together / f"dtypes-{rank}.json").read_text())
        assert seen == ["dt_bias torch.float32", "output torch.bfloat16"]
    copied, sharded = curve(together / "bfloat16-copied"), curve(together / "bfloat16-sharded")
    torch.testing.assert_close(sharded, copied, rtol=1e-5, atol=0)
    assert {t.dtype for t in weights(together / "bfloat16-sharded").values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2])
def test_four_processes_share_weights_and_rows_in_a_mesh(copies, pieces, folder, tmp_path):
    """With FSDP2's shards in one copy or in two; they resume bit for bit."""
    recipe = load_recipe(
        folder / "recipe.yaml", ["train.accumulate=1", f"train.sequence_parallel={pieces}"]
    )
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    text = page_configurations()["FSDP"]
    if copies > 1:
        (words,) = re.findall(r"`(parallelism_config: .*?)`", PAGE.read_text(encoding="utf-8"))
        text += words.replace("8", "2")
    (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "fsdp2.json").write_text(json.dumps(environment_of(tmp_path / "page.yaml")[1]))
    done = ran(sys.executable, "-m", "tests.training.meshes", tmp_path, 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_alike(folder / "one", tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "resumed")
    shards = json.loads((tmp_path / "shards.json").read_text())
    assert shards == pytest.approx(copies / 4, rel=0.05)


# -- what cannot be ---------------------------------------------------------------------------

MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
PLACE = {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another disk", "output_dir must be on a file system that all processes share; 1 of 2"),
        ("no accelerator", "asks to shard the model, which Accelerate does on accelerators only"),
        ("other recipe", "train.lr is 0.01 in process 0 and 0.5 in process 1"),
        ("other pieces", "train.sequence_parallel is 1 in process 0 and 2 in process 1"),
        ("no pieces", "norm_type = 'batch' norms by all of them; take another norm_type"),
        ("stock", "train.sequence_parallel must be 1 with --stock (model.stock), got 2"),
        ("many pieces", "train.sequence_parallel must divide the number of processes, 2, got 4"),
        ("other version", "the version of torch is "),
        ("full disk", "No space left on device"),
    ],
)
def test_every_process_raises_the_same_error(name, message, together):
    for rank in (0, 1):
        assert message in json.loads((together / f"refused-{rank}.json").read_text())[name]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version must be 2"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "efficient_loading must be false"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use train.gradient_checkpointing"),
        ({"FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules must be false or absent"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "sharded by FSDP2, got DEEPSPEED"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "sharded by FSDP2, got MEGATRON_LM"),
        ({**MESH, "PARALLELISM_CONFIG_CP_SIZE": "2"}, "cp_size must be 1 .* train.sequence_parall"),
        ({**MESH, "PARALLELISM_CONFIG_SP_SIZE": "2"}, "sp_size must be 1 .* train.sequence_parall"),
        ({**MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size must be 1 "),
        ({**MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}, "number of processes, 2, got 1 x 3"),
    ],
)
def test_unsupported_configurations_of_accelerate_are_refused(
    variables, message, folder, tmp_path, monkeypatch
):
    told = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **PLACE, **variables}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        train(folder / "recipe.yaml", output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_way_to_share_a_model_is_refused(folder, tmp_path, monkeypatch):
    kind = property(lambda _: DistributedType.DEEPSPEED)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(RuntimeError, match=r"\(DDP\) or sharded by FSDP2, got DEEPSPEED"):
        train(folder / "recipe.yaml", output_dir=tmp_path / "run")


def test_accelerate_launch_on_cpus_starts_one_process_and_ssmzoo_says_so(folder, tmp_path, capfd):
    words = ["--cpu", "--num_processes", "2", "-m", "ssmzoo", "train", str(folder / "recipe.yaml")]
    arguments = launch_command_parser().parse_args([*words, "--output", str(tmp_path / "run")])
    with pytest.raises(subprocess.CalledProcessError):
        launch_command(arguments)
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ssmzoo")]
    assert "was asked for several processes and started one; use `torchrun" in said
    assert not (tmp_path / "run").exists()


# -- the page ---------------------------------------------------------------------------------


def test_the_pages_configurations_are_what_accelerate_makes_of_them(tmp_path):
    for kind, text in page_configurations().items():
        (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
        arguments, variables = environment_of(tmp_path / "page.yaml")
        assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "8")
        assert (arguments.rdzv_endpoint, arguments.node_rank) == ("10.0.0.1:29500", 0)
        assert variables.get("FSDP_VERSION") == {"MULTI_GPU": None, "FSDP": "2"}[kind]
