import json
import os
import shutil
import sys

import pytest
import torch
import yaml
from tests.data.test_tokenizer import word_tokenizer
from tests.training.runs import (
    assert_model_of_step,
    assert_same_run,
    assert_same_tensors,
    killed,
    lines,
    quick_runs,  # noqa: F401
    saved,
    shard_of,
    weights,
    write_texts,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.training.checkpoint import locked, save_checkpoint
from ssmzoo.training.consolidate import write_model
from ssmzoo.training.curves import draw_curves
from ssmzoo.training.distributed import _stays_on_the_cpu, _uses_bfloat16
from ssmzoo.training.metrics import Meter, read_metrics
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.optimizer import make_optimizer, param_groups
from ssmzoo.training.run import train
from ssmzoo.training.shards import share_of, weights_of

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,  # so that a resume must restore the random state too
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def recipe(texts, tmp_path_factory):
    def write(**changes):
        fields = {
            "model": {"config_of": "llama", "config": TINY},
            "data": {"text": str(texts), "validation": 0.2},
            "train": {"steps": 12, "batch_size": 4, "seq_len": 32, "lr": 0.01, "warmup": 3},
            "eval": {"every": 4, "batches": 2},
            "checkpoint": {"every": 3, "keep": 2},
            "log": {"every": 2},
        }
        for name, value in changes.items():
            section, _, field = name.partition("__")
            if field:
                fields[section][field] = value
            else:
                fields[section] = value
        path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A run of twelve steps with its picture, not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmzoo.training.folder.draw_curves", draw_curves)
        return train(recipe(), output_dir=tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def whole(finished, tmp_path):
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "whole")


def test_a_run_writes_its_files_and_a_model_that_loads(whole):
    assert {p.name for p in whole.iterdir()} == {
        ".lock",
        "checkpoints",
        "data.json",
        "loss.png",
        "metrics.jsonl",
        "model",
        "recipe.yaml",
        "run.json",
    }
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == [
        "step-00000009",
        "step-00000012",
    ]
    suffixes = {p.suffix for p in whole.rglob("*") if p.is_file()}
    assert suffixes <= {"", ".json", ".jsonl", ".yaml", ".png", ".safetensors"}  # no pickle
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")

    facts = json.loads((whole / "run.json").read_text())
    assert facts["finished"]["step"] == 12
    assert facts["finished"]["tokens"] == 12 * 4 * 32
    assert len(facts["data"]["digest"]) == 64
    assert {"python", "torch", "transformers", "ssmzoo"} <= facts["versions"].keys()
    assert facts["hardware"]
    assert facts["environment"]["threads"] == torch.get_num_threads()

    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert model.config.vocab_size == len(tokenizer) == 259
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 258
    for folder in ("model", "checkpoints/step-00000009"):
        generation = json.loads((whole / folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == 258
    ids = model.generate(**tokenizer("ant bee", return_tensors="pt"), max_new_tokens=3)
    assert ids.shape[1] >= 8
    assert_model_of_step(whole, 12)


def test_metrics_hold_every_line_and_the_loss_falls(whole):
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8, 12]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    last = lines[-1]
    assert last["validation_loss"] < losses[0]
    assert 0 < last["validation_accuracy"] < 1


@pytest.mark.parametrize("step", [5, 7])
def test_a_killed_run_resumes_to_the_same_weights_and_lines(step, whole, recipe, tmp_path):
    killed(recipe(), tmp_path / "killed", step)
    assert not (tmp_path / "killed" / "model").exists()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # cut off in the middle of a line
    resumed = train(recipe(), output_dir=tmp_path / "killed", resume=True)
    assert_same_run(whole, resumed)
    assert_same_tensors(saved(whole, 12), saved(resumed, 12))


def test_resuming_a_finished_run_changes_nothing(whole, recipe):
    before = weights(whole), lines(whole)
    train(recipe(), output_dir=whole, resume=True)
    assert_same_tensors(before[0], weights(whole))
    assert before[1] == lines(whole)


def test_files_of_others_in_a_finished_runs_model_stay(whole, recipe):
    model = whole / "model"
    (model / "README.md").write_text("a card")
    (model / "extra").mkdir()
    (model / "extra/notes.txt").write_text("notes")
    (model / "model-00001-of-00002.safetensors").write_text("of an earlier model")
    (model / "config.json").write_text("")  # as a disk that was full leaves it
    (model / "nowhere").symlink_to("nowhere at all")
    train(recipe(), output_dir=whole, resume=True, overrides=["train.steps=14"])
    assert read_metrics(whole / "metrics.jsonl")[-1]["step"] == 14
    assert (model / "config.json").read_text()
    assert_model_of_step(whole, 14)
    assert (model / "README.md").read_text() == "a card"
    assert (model / "extra/notes.txt").read_text() == "notes"
    assert not (model / "model-00001-of-00002.safetensors").exists()


def test_a_missing_matplotlib_is_reported_before_training(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"log\.curves needs matplotlib .*ssmzoo\[train\]"):
        train(recipe(), output_dir=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_tokenizers_further_chat_templates_are_part_of_the_model(whole, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ messages }} t"}
    tokenizer.save_pretrained(whole / "checkpoints/step-00000012")
    (tmp_path / "model").mkdir()
    write_model(whole / "checkpoints/step-00000012", tmp_path / "model")
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert saved.chat_template == tokenizer.chat_template


def test_the_first_process_writes_all_buffers():
    norm = torch.nn.BatchNorm1d(4)
    model, count = torch.nn.Sequential(norm, torch.nn.Linear(4, 4)), 3
    buffers = {name for name, _ in model.named_buffers()}
    shares = [share_of(weights_of(model), rank, count, buffers) for rank in range(count)]
    assert buffers <= shares[0].keys()
    names = [name for share in shares for name in share]
    assert sorted(names) == sorted(model.state_dict())
    assert all(shares)


def test_an_old_checkpoint_that_cannot_be_removed_is_warned_of(tmp_path, monkeypatch, caplog):
    def write(folder):
        (folder / "a").touch()

    def busy(path, *_, **__):
        raise OSError(39, "Directory not empty")

    save_checkpoint(tmp_path, 1, write, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("ssmzoo.training.checkpoint.remove_folder", busy)
        assert save_checkpoint(tmp_path, 2, write, keep=1).is_dir()
    assert "step-00000001 cannot be removed: Directory not empty" in caplog.text
    save_checkpoint(tmp_path, 3, write, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(("found", "stays"), [("mps", True), ("cuda", False), (None, True)])
def test_an_accelerator_without_float64_is_left_alone(found, stays, monkeypatch):
    place = None if found is None else torch.device(found)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: place)
    assert _stays_on_the_cpu() == stays


def test_auto_is_bfloat16_only_on_gpus_that_do_not_emulate_it(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    # what torch says of a T4
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert not _uses_bfloat16("auto")
    assert _uses_bfloat16("bfloat16")


def test_a_tilde_in_output_dir_is_the_home(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=f"output_dir must be .*{tmp_path}/file"):
        train(recipe(), output_dir="~/file")


def test_a_clipped_gradient_moves_no_weight_far(recipe, tmp_path):
    """A norm far below Adam's epsilon leaves the weights alone, whatever the rate."""
    asked = {"train__steps": 1, "train__warmup": 0, "train__clip": 1e-12}
    asked |= {"train__weight_decay": 0.0, "eval__every": 1, "checkpoint__every": 1}
    runs = [
        train(recipe(**asked, train__lr=lr), output_dir=tmp_path / str(lr)) for lr in (0.01, 0.02)
    ]
    models = [AutoModelForCausalLM.from_pretrained(run / "model") for run in runs]
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert (one - two).abs().max() < 1e-4


def test_a_second_run_into_the_same_folder_is_refused(recipe, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(RuntimeError) as caught:
        train(recipe(), output_dir=tmp_path / "run")
    assert f"another run (process {os.getpid()}) is writing into" in str(caught.value)


def test_a_folder_with_anything_in_it_is_refused(whole, recipe, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.name != ".lock"}
    with pytest.raises(ValueError, match="output_dir must be empty or new"):
        train(recipe(), output_dir=whole)
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.name != ".lock"}
    theirs = tmp_path / "mine" / "cache" / "drawn.npy"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(ValueError, match="output_dir must be empty or new"):
        train(recipe(), output_dir=tmp_path / "mine")
    assert theirs.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"must hold a run.*, got .* without recipe\.yaml"):
        train(recipe(), output_dir=tmp_path / "other", resume=True)


def test_a_folder_that_cannot_be_written_is_named(recipe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"output_dir must be a writable folder: .*file"):
        train(recipe(), output_dir=tmp_path / "file" / "run")


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones(recipe, tmp_path, monkeypatch):
    write = FileSystem.create_stream

    def fill_up(system, path, *given):
        if "00000006" in str(path):
            raise OSError(28, "No space left on device")
        return write(system, path, *given)

    monkeypatch.setattr(FileSystem, "create_stream", fill_up)
    with pytest.raises(RuntimeError, match=r"step-00000006 cannot be written: .*No space left"):
        train(recipe(), output_dir=tmp_path / "run")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    recipe, tmp_path, monkeypatch
):
    forward = LlamaForCausalLM.forward

    def poisoned(self, *arguments, **named):
        output = forward(self, *arguments, **named)
        poisoned.calls += self.training
        if poisoned.calls >= 5 and self.training:
            output.loss = output.loss * float("nan")
        return output

    poisoned.calls = 0
    monkeypatch.setattr(LlamaForCausalLM, "forward", poisoned)
    with pytest.raises(RuntimeError) as caught:
        train(recipe(), output_dir=tmp_path / "run")
    text = str(caught.value)
    assert "got loss nan and gradient norm nan at step 5" in text
    assert "last good checkpoint is" in text
    assert "step-00000003" in text
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert lines[-1]["step"] == 4
    monkeypatch.undo()
    resumed = train(recipe(), output_dir=tmp_path / "run", resume=True)
    assert all(torch.isfinite(tensor).all() for tensor in weights(resumed).values())


def test_a_model_without_so_many_positions_is_refused_before_the_first_step(recipe, tmp_path):
    small = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    gpt2 = {"config_of": "gpt2", "config": small}
    for changes in ({"train__seq_len": 64}, {"eval__lengths": [64]}):
        with pytest.raises(ValueError, match=r"eval\.lengths, got 32 and 64"):
            train(recipe(model=gpt2, **changes), output_dir=tmp_path / "run")


def test_losses_in_a_checkpoint_do_not_grow_while_it_is_written():
    meter = Meter()
    meter.add([(1.0, 2.0)])
    saved = meter.state()
    meter.add([(3.0, 4.0)])
    assert saved["window"] == [(1.0, 2.0)]


def test_pauses_count_neither_in_lines_nor_in_checkpoints(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ssmzoo.training.metrics.time.perf_counter", lambda: now[0])
    meter = Meter()
    meter.start(0)
    meter.add([(1.0, 2.0)])
    now[0] = 3.0
    with meter.paused():
        now[0] = 10.0
        assert meter.state()["seconds"] == 3.0
        line = meter.line(12)
        now[0] = 13.0
    assert (line["tokens_per_second"], line["seconds"]) == (4.0, 3.0)
    meter.add([(1.0, 2.0)])
    now[0] = 15.0
    assert meter.line(12) == {"loss": 1.0, "grad_norm": 2.0, "seconds": 5.0}  # no new tokens


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("shards", "cut a byte", r"00001.safetensors has"),
        ("state.json", "remove", "state.json is missing"),
        ("contents.json", "cut", "contents.json cannot be read"),
        ("contents.json", "older", "was written by ssmzoo 0.1, which alone resumes it"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_last_whole_one(
    file, damage, message, whole, recipe
):
    path = whole / "checkpoints/step-00000012" / file
    path = shard_of(whole, 12) if file == "shards" else path
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "cut a byte":
        path.write_bytes(content[:-1])
    elif damage == "older":
        path.write_text('{"config.json": [12, "d36a"]}')
    else:
        path.unlink()
    with pytest.raises(RuntimeError) as caught:
        train(recipe(), output_dir=whole, resume=True)
    text = str(caught.value)
    assert message in text
    assert "step-00000012 cannot be used" in text
    assert "the newest whole checkpoint is" in text
    assert "step-00000009; remove the newer ones" in text


def test_resuming_with_fewer_steps_than_done_is_refused(whole, recipe):
    def contents():
        return {p: p.read_bytes() for p in whole.rglob("*") if p.is_file() and p.name != ".lock"}

    before = contents()
    with pytest.raises(ValueError, match=r"train\.steps must give at least the 12 .* got 11; "):
        train(recipe(), output_dir=whole, resume=True, overrides=["train.steps=11"])
    assert contents() == before


def test_text_that_is_missing_or_too_short_leaves_the_folder_free(recipe, tmp_path):
    with pytest.raises(ValueError, match="does not exist and matches no file"):
        train(recipe(), output_dir=tmp_path / "run", overrides=["data.text=nowhere"])
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    with pytest.raises(ValueError, match=r"train\.seq_len = 99999 tokens"):
        train(recipe(train__seq_len=99999), output_dir=tmp_path / "run")
    train(recipe(), output_dir=tmp_path / "run", overrides=["train.steps=3"])


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"model__config": TINY | {"vocab_size": 100}},
            ValueError,
            "of the tokenizer 'bytes', got 100",
        ),
        (
            {"model__config": {"hiden_size": 8}},
            LookupError,
            "model.config: LlamaConfig has no field 'hiden_size'; did you mean 'hidden_size'?",
        ),
        ({"model": {"config_of": "lama"}}, LookupError, "did you mean 'llama'?"),
        ({"model": {"config_of": "vit"}}, LookupError, "no causal language model of type 'vit'"),
        ({"model": {"family": "longhron"}}, LookupError, "did you mean 'longhorn'?"),
        ({"model": {"init_from": "./nowhere"}}, LookupError, "nowhere"),
        ({"model__config": TINY | {"hidden_size": "x"}}, ValueError, "model.config: "),
    ],
)
def test_a_wrong_model_is_refused_before_any_work(changes, kind, message, recipe, tmp_path):
    with pytest.raises(kind) as caught:
        train(recipe(**changes), output_dir=tmp_path / "run")
    assert message in str(caught.value)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.long
def test_a_vocabulary_has_every_id_of_a_tokenizer_whose_ids_leave_gaps(streaming, recipe, tmp_path):
    gap = word_tokenizer({"rare": 70_000}, bos_token="<s>", eos_token="</s>")
    gap.save_pretrained(tmp_path / "gap")
    lines = ['{"text": "one two one two one"}\n'] * 80 + ['{"text": "rare rare"}\n'] * 80
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = {"jsonl": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "gap")}
    path = recipe(data={**data, "streaming": streaming, "validation": 8}, train__steps=9)
    run = train(path, output_dir=tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.vocab_size == 70_001
    with pytest.raises(ValueError, match=r"at least 70001, .* tokenizer '.*/gap', got 6"):
        train(path, output_dir=tmp_path / "no", overrides=["model.config.vocab_size=6"])


@pytest.mark.parametrize("place", ["model", "checkpoints/step-00000012"])
def test_training_starts_from_given_weights(place, whole, recipe, tmp_path):
    tuned = train(
        recipe(model={"init_from": str(whole / place)}, train__lr=1e-6, train__steps=3),
        output_dir=tmp_path / "tuned",
    )
    first = read_metrics(tuned / "metrics.jsonl")[0]
    assert first["loss"] < read_metrics(whole / "metrics.jsonl")[0]["loss"] - 0.5
    assert len(AutoTokenizer.from_pretrained(tuned / "model")) == 259


def test_a_synthetic_task_is_trained_and_scored(recipe, tmp_path):
    data = {"task": "mqar", "task_args": {"num_pairs": 2, "vocab_size": 32}, "validation": 16}
    run = train(recipe(data=data), output_dir=tmp_path / "run")
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["validation_targets"] == 2 * 8
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.vocab_size == 32
    assert len(AutoTokenizer.from_pretrained(run / "model")) == 32


def test_bfloat16_computes_in_it_and_keeps_float32_weights(recipe, tmp_path, monkeypatch):
    seen = []
    forward = torch.nn.Linear.forward

    def watched(self, x):
        y = forward(self, x)
        seen.append(y.dtype)
        return y

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    run = train(recipe(train__dtype="bfloat16", train__steps=3), output_dir=tmp_path / "run")
    assert set(seen) == {torch.bfloat16}
    assert {t.dtype for t in weights(run).values()} == {torch.float32}
    assert json.loads((run / "run.json").read_text())["dtype"] == "bfloat16"


def test_a_launcher_that_starts_one_process_of_several_is_reported(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(RuntimeError, match=r"several processes.*; use `torch"):
        train(recipe(), output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_packing_is_warned_of(caplog):
    CausalLM(LlamaForCausalLM(LlamaConfig(vocab_size=16, **TINY)), packs=True)
    assert "takes no cu_seqlens: documents that share a row see each other" in caplog.text


def test_groups_are_the_models_own_or_the_usual_ones():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **TINY))
    model.lm_head.weight.requires_grad_(False)
    decayed, others = param_groups(model, lr=0.1, weight_decay=0.5)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters())) - 1

    model.param_groups = lambda *, lr, weight_decay: [
        {"params": list(model.parameters()), "lr": lr / 2, "weight_decay": weight_decay}
    ]
    (group,) = make_optimizer(model, lr=0.1, weight_decay=0.5).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.5)


def test_the_trainer_takes_the_same_optimizer(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **TINY))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.1)
    rows = [{"input_ids": [i % 16] * 8, "labels": [i % 16] * 8} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all((before[n] != t).any() for n, t in model.state_dict().items() if "proj" in n)


def test_longhorn_trains_on_packed_rows(recipe, tmp_path, monkeypatch):
    model = {"family": "longhorn", "config": {"hidden_size": 32, "num_hidden_layers": 2}}
    seen = []
    batch = CausalLM.batch
    monkeypatch.setattr(
        CausalLM, "batch", lambda goal, rows: seen.append(batch(goal, rows)) or seen[-1]
    )
    run = train(recipe(model=model), output_dir=tmp_path / "run")
    assert all(b["input_ids"].shape == (1, 4 * 32) for b in seen if b["labels"].shape[1] == 128)
    assert all(len(b["cu_seqlens"]) > 4 for b in seen[:12])
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]
