import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import torch
import yaml
from tests.training.runs import (
    assert_model_of_step,
    assert_same_run,
    assert_same_tensors,
    killed,
    lines,
    quick_runs,  # noqa: F401
    shard_of,
    weights,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)

from ssmzoo.data.labelled import Examples, ExampleSource, HeldOutExamples
from ssmzoo.data.rows import Rows
from ssmzoo.environment.portable import portable
from ssmzoo.family import load_family
from ssmzoo.files import package_data
from ssmzoo.recipe import Recipe, load_recipe, read_sections
from ssmzoo.tasks import IGNORED, SUPERVISED_TASKS, Batch, Supervised, load_task
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.model import build_config, model_class
from ssmzoo.training.objectives import CausalLM, Classification, labelled
from ssmzoo.training.optimizer import make_optimizer
from ssmzoo.training.run import train
from ssmzoo.training.schedule import Plan, Schedule
from ssmzoo.training.validation import is_best

SPLITS = ("train", "validation", "test")
SIZES = {"train": 41, "validation": 13, "test": 11}
LONGHORN = {
    "family": "longhorn",
    "config": {"hidden_size": 16, "num_hidden_layers": 1, "d_state": 4, "dt_rank": 2},
}
BERT = {
    "config_of": "bert",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.1,  # so that a resume must restore the random state too
    },
}
LLAMA = {
    "config_of": "llama",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
    },
}


def drawn(split, seed, size):
    """Rows of 3 to 9 tokens of 1 .. 7, padded with zeros, and their lengths."""
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    lengths = rng.integers(3, 10, size=size)
    tokens = rng.integers(1, 8, size=(size, 9)) * (np.arange(9) < lengths[:, None])
    return tokens, lengths


def padded(x, lengths):
    return x[:, : lengths.max()]


def odd(split: str, seed: int, *, size: int = 0) -> Supervised:
    """Is the last token odd?"""
    tokens, lengths = drawn(split, seed, size or SIZES[split])

    def make(indices, _epoch):
        own = lengths[indices]
        last = tokens[indices, own - 1]
        return Batch(padded(tokens[indices], own), last % 2, own)

    return Supervised("tokens", "classification", len(tokens), make, vocab_size=8, num_labels=2)


def same(split: str, seed: int) -> Supervised:
    """Do two documents end in tokens of the same parity?"""
    tokens, lengths = drawn(split, seed, 2 * SIZES[split])
    tokens, lengths = tokens.reshape(-1, 2, 9), lengths.reshape(-1, 2)

    def make(indices, _epoch):
        own = lengths[indices]
        last = np.take_along_axis(tokens[indices], own[..., None] - 1, axis=2)[..., 0]
        inputs = tokens[indices][:, :, : own.max()]
        return Batch(inputs, (last[:, 0] + last[:, 1]) % 2, own)

    return Supervised(
        "token_pairs", "classification", len(tokens), make, vocab_size=8, num_labels=2
    )


def mean(split: str, seed: int) -> Supervised:
    """What is the mean of some values?"""
    tokens, lengths = drawn(split, seed, SIZES[split])
    values = (tokens / 8).astype(np.float32)

    def make(indices, _epoch):
        own = lengths[indices]
        inputs = padded(values[indices], own)[..., None]
        return Batch(inputs, (values[indices].sum(1) / own).astype(np.float32), own)

    return Supervised("values", "regression", len(tokens), make, num_labels=1, input_channels=1)


@pytest.fixture(scope="module", autouse=True)
def toys():
    with pytest.MonkeyPatch.context() as patch:
        for task in (odd, same, mean):
            patch.setitem(SUPERVISED_TASKS, task.__name__, task)
        yield


def fields(**changes):
    made = {
        "model": LONGHORN,
        "data": {"task": "odd"},
        "train": {"epochs": 3, "batch_size": 8, "lr": 0.02, "dtype": "float32", "seed": 1},
        "eval": {"every": "epoch", "batches": "all"},
        "checkpoint": {"every": "epoch", "keep": 1, "best": True},
        "log": {"every": 2},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        made[section] = {**made[section], field: value} if field else value
        if field and value is None:
            del made[section][field]
    return made


ROWS = {"steps": 1, "batch_size": 2, "seq_len": 8, "lr": 0.1}


def recipe(**changes):
    return Recipe.model_validate(fields(**changes))


def finished(run):
    return json.loads((run / "run.json").read_text())["finished"]


def test_an_easy_task_is_learnt_and_the_model_loads_and_scores_alike(tmp_path):
    run = train(recipe(train__epochs=20), output_dir=tmp_path / "run")
    facts = finished(run)
    assert facts["step"] == 20 * 6  # 41 examples, 8 a step
    validations = [line for line in lines(run) if "validation_loss" in line]
    assert [line["step"] for line in validations] == [6 * epoch for epoch in range(1, 21)]
    assert {line["validation_targets"] for line in validations} == {13}
    assert max(line["validation_accuracy"] for line in validations) >= 12 / 13
    assert lines(run)[-2]["epoch"] == 20
    assert facts["tokens"] == 20 * drawn("train", 1, 41)[1].sum()

    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    assert model.config.num_labels == 2
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(run / "model")) == 8
    test = load_task("odd", "test", 1)
    right = 0
    for i in range(len(test)):  # one by one, so without padding
        batch = test.batch([i])
        logits = model(torch.from_numpy(batch.inputs)).logits
        right += int(logits.argmax() == batch.labels[0])
    assert facts["test"]["accuracy"] == pytest.approx(right / 11)
    assert facts["test"]["step"] == facts["best"]["step"]
    results = json.loads((run / "results.json").read_text())
    assert results["environment"] == json.loads((run / "run.json").read_text())["environment"]
    assert results["recipe"] == portable(yaml.safe_load((run / "recipe.yaml").read_text()))
    (score,) = results["results"]
    assert (score["task"], score["metric"], score["n"]) == ("odd", "accuracy", 11)
    assert score["value"] == facts["test"]["accuracy"]


PLATEAU = {"train__schedule": "plateau", "train__patience": 1, "train__factor": 0.5}
DROP = {"train__schedule": "drop", "train__below": 0.69, "train__factor": 0.5}


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (4, {"checkpoint__every": 1, "train__epochs": 1}),  # in the midst of an epoch
        # between two validations
        (23, {**PLATEAU, "train__epochs": 5, "checkpoint__every": 4}),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights_and_lines(step, changes, tmp_path):
    asked = recipe(model=BERT, **changes)
    whole = train(asked, output_dir=tmp_path / "whole")
    killed(asked, tmp_path / "killed", step)
    resumed = train(asked, output_dir=tmp_path / "killed", resume=True)
    assert_same_run(whole, resumed)
    assert finished(whole)["test"] == finished(resumed)["test"]
    if "train__factor" in changes:
        rates = {line["lr"] for line in lines(whole) if "lr" in line}
        assert len(rates) > 1, "the rate never fell in this run, which therefore shows nothing"


def test_a_finished_run_can_go_on_for_more_epochs(tmp_path):
    run = train(recipe(train__schedule="constant"), output_dir=tmp_path / "run")
    longer = ["train.epochs=4"]
    with pytest.raises(ValueError, match=r"train\.epochs must give at least"):
        train(
            recipe(train__schedule="constant"),
            output_dir=run,
            resume=True,
            overrides=["train.epochs=2"],
        )
    train(recipe(train__schedule="constant"), output_dir=run, resume=True, overrides=longer)
    whole = train(
        recipe(train__schedule="constant", train__epochs=4), output_dir=tmp_path / "whole"
    )
    assert_same_tensors(weights(whole), weights(run))


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    # 41 = 3 x 12 + 5: the last step has fewer examples, and an uneven split
    runs = [
        train(
            recipe(train__batch_size=12, train__accumulate=parts, log__every=1),
            output_dir=tmp_path / str(parts),
        )
        for parts in (1, 4)
    ]
    one, two = map(lines, runs)
    assert one[-1]["step"] == 12
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        for key in a.keys() & {"loss", "grad_norm", "validation_loss"}:
            assert a[key] == pytest.approx(b[key], rel=1e-4)


def tiny(task):
    family = load_family("longhorn")
    fields = {"vocab_size": task.vocab_size} if task.vocab_size else {}
    fields |= {"input_channels": task.input_channels, "num_labels": task.num_labels}
    if task.objective == "regression":
        fields["problem_type"] = "regression"
    config = family.config(**LONGHORN["config"], **fields)
    kinds = {
        "token_pairs": family.pair_classification_class,
        "tokens": family.sequence_classification_class,
        "values": family.sequence_classification_class,
    }
    return kinds[task.kind](config)


def bert(task):
    config = BertConfig(**BERT["config"], vocab_size=task.vocab_size, num_labels=task.num_labels)
    config.hidden_dropout_prob = 0.0
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(("name", "build"), [(t, tiny) for t in ("odd", "same", "mean")] + [
    ("odd", bert),
])  # fmt: skip
def test_a_ragged_batch_has_the_gradients_of_its_examples_alone(name, build):
    torch.manual_seed(0)
    task = load_task(name, "train", 0)
    model = build(task).double().eval()
    goal = labelled(model, task)

    def gradients(groups):
        model.zero_grad()
        parts = [Examples(task.batch(group)) for group in groups]
        total = sum(map(goal.targets, parts))
        for part in parts:
            batch = goal.batch(part)
            for key in batch.keys() & {"input_values"} | ({"labels"} if name == "mean" else set()):
                batch[key] = batch[key].double()
            (model(**batch, **goal.options).loss * (goal.targets(part) / total)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    together, alone = gradients([range(7)]), gradients([[i] for i in range(7)])
    assert together.keys() == alone.keys()
    for key, gradient in together.items():
        # seven sums of float64 in another order
        torch.testing.assert_close(gradient, alone[key], rtol=1e-9, atol=1e-12, msg=key)


def test_equal_validations_are_ranked_by_loss():
    before = {"accuracy": 0.9, "loss": 0.4}
    for accuracy, loss, best in ((0.9, 0.4, False), (0.9, 0.3, True), (0.8, 0.1, False)):
        assert is_best({"accuracy": accuracy, "loss": loss}, before, "accuracy") is best
    assert is_best({"loss": 0.3}, before, "loss")
    assert not is_best({"loss": float("nan")}, None, "loss")


def test_the_best_checkpoint_is_kept_published_and_tested(tmp_path, monkeypatch):
    """Of a metric that is not the task's own; and a damaged one does not become the model."""
    step, stop_at = 18, {"metric": "loss", "value": 0.1}
    found = iter(zip([0.5, 0.9, 0.7, 0.9, 0.3], [0.9, 0.4, 0.2, 0.3, 0.8], strict=True))
    metrics = Classification.metrics

    def told(goal, sums):
        return metrics(goal, sums) | dict(zip(("accuracy", "loss"), next(found), strict=True))

    monkeypatch.setattr(Classification, "metrics", told)
    stop = {"train__stop_at": stop_at, "train__schedule": "constant"}
    run = train(recipe(train__epochs=4, **stop), output_dir=tmp_path / "run")
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert kept == sorted({f"step-{step:08d}", "step-00000024"})
    assert_model_of_step(run, step)
    facts = finished(run)
    assert facts["best"]["step"] == step
    assert (facts["test"]["step"], facts["test"]["accuracy"]) == (step, 0.3)
    path = shard_of(run, step)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=r"the run's best, is damaged: shards/shard"):
        RunFolder(run).final_checkpoint(step)


def test_without_best_the_last_checkpoint_is_tested(tmp_path):
    run = train(recipe(checkpoint__best=False, train__epochs=1), output_dir=tmp_path / "run")
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000006"]
    assert finished(run)["test"]["step"] == 6


def scheduled(higher, **changes):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [w], "lr": lr} for w, lr in zip(weights, (1.0, 0.1), strict=True)]
    )
    options = recipe(**changes).train
    return optimizer, Schedule(optimizer, options, Plan(12, options.warmup_of(12), 1, 1, None),
                               higher=higher)  # fmt: skip


def rates_of(optimizer, schedule, values):
    found = []
    for value in values:
        optimizer.step()
        schedule.step()
        schedule.observe_validation(value)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("higher", [True, False])
def test_a_plateau_lowers_the_rates_of_all_groups(higher):
    values = [v if higher else 9 - v for v in (1.0, 2.0, 2.0, 1.5, 3.0, 3.0, 3.0, 3.0)]
    optimizer, schedule = scheduled(higher, **PLATEAU)
    found = rates_of(optimizer, schedule, values)
    first = [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]  # after more than one in a row
    assert found == [[pytest.approx(r), pytest.approx(0.1 * r)] for r in first]

    again, other = scheduled(higher, **PLATEAU)
    rates_of(optimizer, schedule, [])
    half, rest = scheduled(higher, **PLATEAU), values[3:]
    rates_of(*half, values[:3])
    other.restore(3, json.loads(json.dumps(half[1].state())))
    assert rates_of(again, other, rest) == found[3:]


def test_a_plateau_waits_for_the_warm_up():
    optimizer, schedule = scheduled(False, **PLATEAU, train__warmup=4)
    found = rates_of(optimizer, schedule, [1.0] * 7)
    assert [rate for rate, _ in found] == [0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_drop_ignores_losses_of_the_warm_up():
    optimizer, schedule = scheduled(False, **{**DROP, "train__below": 1.0}, train__warmup=4)
    found = shown(optimizer, schedule, [(9.0, 9.0), (0.5, 0.5), (0.5, 0.5)])
    assert [rate for rate, _ in found] == [0.75, 0.5, 0.5]


def shown(optimizer, schedule, losses):
    """Return the rates after each validation, two steps with these losses before each."""
    found = []
    for pair in losses:
        for loss in pair:
            optimizer.step()
            schedule.step()
            schedule.observe_losses([loss])
        schedule.observe_validation(0.5)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def test_a_drop_lowers_the_rates_once_when_the_mean_loss_is_small():
    losses = [(2.0, 0.1), (0.2, 0.9), (0.6, 0.7), (0.1, 0.1), (2.0, 2.0)]
    optimizer, schedule = scheduled(False, **{**DROP, "train__below": 0.6})
    found = shown(optimizer, schedule, losses)
    first = [1, 0.5, 0.5, 0.5, 0.5]  # 0.55 is the first mean below
    assert found == [[pytest.approx(r), pytest.approx(0.1 * r)] for r in first]
    never, same = scheduled(False, **{**DROP, "train__below": 0.05})
    assert shown(never, same, losses)[-1] == pytest.approx([1, 0.1])

    for seen in (1, 3, 5):  # steps before the state is taken
        again, other = scheduled(False, **{**DROP, "train__below": 0.6})
        half = scheduled(False, **{**DROP, "train__below": 0.6})
        flat = [loss for pair in losses for loss in pair]
        for number, loss in enumerate(flat):
            if number == seen:
                other.restore(seen, json.loads(json.dumps(half[1].state())))
            for one, two in [half] if number < seen else [half, (again, other)]:
                one.step()
                two.step()
                two.observe_losses([loss])
                if number % 2:
                    two.observe_validation(0.5)
        rates = [[group["lr"] for group in one.param_groups] for one in (half[0], again)]
        assert rates[0] == rates[1] == found[-1]


def test_without_weight_decay_the_optimizer_is_adam():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    twin = torch.nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    ours = make_optimizer(model, lr=0.01, weight_decay=0.0, betas=(0.8, 0.99))
    adam = torch.optim.Adam(twin.parameters(), lr=0.01, betas=(0.8, 0.99), fused=True)
    for _ in range(20):
        x = torch.randn(7, 5)
        for module, optimizer in ((model, ours), (twin, adam)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


STOP = {"metric": "accuracy", "value": 10 / 13}


def test_a_run_ends_with_the_first_validation_that_is_good_enough(tmp_path):
    asked = recipe(
        train__epochs=30, train__lr=0.001, train__stop_at=STOP, train__schedule="constant"
    )
    whole = train(asked, output_dir=tmp_path / "whole")
    accuracies = [ln["validation_accuracy"] for ln in lines(whole) if "validation_loss" in ln]
    assert accuracies[-1] >= 10 / 13 > max([0.0, *accuracies[:-1]])
    assert 1 < len(accuracies) < 30
    facts = finished(whole)
    assert facts["step"] == facts["best"]["step"] == facts["test"]["step"] == 6 * len(accuracies)

    # it has ended, and goes on only if more is asked of it
    train(asked, output_dir=whole, resume=True)
    assert finished(whole)["step"] == facts["step"]
    longer = ["train.stop_at=null", f"train.epochs={len(accuracies) + 1}"]
    train(asked, output_dir=whole, resume=True, overrides=longer)
    assert finished(whole)["step"] == facts["step"] + 6


def test_the_finished_model_is_measured_at_other_lengths(tmp_path):
    task = {"task": "copying", "task_args": {"vocab_size": 4, "length": 3}}
    task["task_args"] |= {"num_train": 8, "num_validation": 4, "num_test": 6}
    asked = recipe(
        data=task, train__epochs=1, eval__lengths=[5, 9], log={"every": 1, "curves": False}
    )
    run = train(asked, output_dir=tmp_path / "run")
    facts = finished(run)
    assert facts["test"]["targets"] == 6 * 3
    assert {n: found["targets"] for n, found in facts["lengths"].items()} == {"5": 30, "9": 54}
    assert not (run / "loss.png").exists()


def test_a_length_beyond_the_table_of_positions_is_refused_before_the_training(tmp_path):
    config = {**BERT["config"], "max_position_embeddings": 16}
    asked = {
        "model": {**BERT, "config": config},
        "data": {"task": "copying", "task_args": {"vocab_size": 4, "length": 3}},
        "train__epochs": 1,
    }
    with pytest.raises(ValueError, match="max_position_embeddings must be at least the length"):
        train(recipe(**asked, eval__lengths=[5, 90]), output_dir=tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval__lengths": [4]}, "eval.lengths must be absent with data.task 'odd'"),
        ({"eval__lengths": [0]}, "eval.lengths.0"),
        (
            {"data": {"text": "x"}, "train": ROWS, "eval": {"lengths": [4]}, "checkpoint": {}},
            "eval.lengths needs data.validation",
        ),
        (
            {
                **{"data": {"text": "x", "validation": 0.5}, "eval": {"lengths": [4]}},
                **{"train": {**ROWS, "segments": {"count": 2}}, "checkpoint": {}},
            },
            "eval.lengths must be absent with train.segments",
        ),
    ],
)
def test_lengths_without_held_out_data_or_an_argument_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_sections(Recipe, fields(**changes), "recipe")


@pytest.mark.parametrize(
    ("metric", "value", "ends"),
    [("loss", 0.5, [0.6, 0.5]), ("rmse", 0.5, [0.6, 0.4]), ("exact_match", 0.9, [0.8, 0.9])],
)
def test_stop_at_wants_less_loss_or_more_accuracy(metric, value, ends):
    stop = recipe(train__stop_at={"metric": metric, "value": value}).train.stop_at
    assert [stop.reached({metric: end, "other": value}) for end in ends] == [False, True]


INDUCTION = {"task": "induction_heads", "task_args": {
    "seq_len": 6, "vocab_size": 5, "num_symbols": 3, "target_length": 2, "fresh": True,
    "num_train": 40, "num_validation": 30, "num_test": 25}}  # fmt: skip


@pytest.mark.parametrize("chooses", [True, False])
def test_accuracy_counts_symbols_and_exact_match_whole_answers(chooses, monkeypatch):
    task = load_task("induction_heads", "test", 1, **INDUCTION["task_args"])
    part = Examples(task.batch(range(25)))
    family = load_family("longhorn")
    model = family.causal_lm_class(family.config(**LONGHORN["config"], vocab_size=5))
    if not chooses:
        monkeypatch.setattr(model, "forward", lambda input_ids: None)
    goal = labelled(model, task)
    batch = goal.batch(part)
    # nothing is padding, and the last column predicts nothing that is asked
    assert batch["input_ids"].tolist() == part.batch.inputs[:, :7].tolist()
    assert set(batch) == {"input_ids", "logits_to_keep"} if chooses else {"input_ids"}
    assert goal.targets(part) == 50
    said = torch.from_numpy(part.batch.labels[:, -2:]).clone()
    said[:5, 0] = 4  # five rows with the first symbol wrong, three of them with both
    said[:3, 1] = 4
    logits = torch.zeros(25, 7, 5)
    logits[:, -2:] = 9 * torch.nn.functional.one_hot(said, 5).float()
    if chooses:
        assert batch["logits_to_keep"].tolist() == [5, 6]
        logits = logits[:, batch["logits_to_keep"]]
    output = type("Output", (), {"logits": logits})
    found = goal.metrics(goal.measure(output, batch, part))
    right, wrong = (-torch.tensor([9.0, 0, 0, 0, 0]).log_softmax(0)[i].item() for i in (0, 1))
    assert found == {
        "loss": pytest.approx((42 * right + 8 * wrong) / 50),
        "accuracy": 42 / 50,
        "targets": 50,
        "exact_match": 20 / 25,
        "last_accuracy": 22 / 25,
        "examples": 25,
    }


def test_the_last_target_of_each_row_counts_once_wherever_it_stands():
    task = load_task("mqar", "test", 0, seq_len=24, num_pairs=3, vocab_size=16, num_test=40)
    part = Examples(task.batch(range(40)))
    family = load_family("longhorn")
    model = family.causal_lm_class(family.config(**LONGHORN["config"], vocab_size=16))
    goal = labelled(model, task)
    wanted, _ = goal._shifted(part)
    rows, columns = np.nonzero(wanted != IGNORED)
    last = [columns[rows == row].max() for row in range(40)]
    assert len(set(last)) > 1
    logits = torch.nn.functional.one_hot(torch.from_numpy(wanted).clamp(min=0), 16).float()
    logits[range(10), last[:10]] = 0  # id 0 is said, which is never a value
    output = type("Output", (), {"logits": logits})
    found = goal.metrics(goal.measure(output, {}, part))
    assert (found["last_accuracy"], found["exact_match"]) == (30 / 40, 30 / 40)
    assert found["accuracy"] == (3 * 40 - 10) / (3 * 40)


@pytest.mark.parametrize("name", ["mqar", "induction_heads"])
def test_logits_are_computed_only_where_asked_and_the_loss_is_the_models_own(name):
    torch.manual_seed(0)
    arguments = {"mqar": MQAR, "induction_heads": INDUCTION}[name]["task_args"]
    task = load_task(name, "train", 1, **arguments)
    part = Examples(task.batch(range(9)))
    family = load_family("longhorn")
    config = family.config(**LONGHORN["config"], vocab_size=task.vocab_size)
    model = family.causal_lm_class(config).double()
    goal = labelled(model, task)
    whole = model(
        input_ids=torch.from_numpy(part.batch.inputs), labels=torch.from_numpy(part.batch.labels)
    ).loss
    (piece,) = goal.pieces(part)
    loss = goal.loss_of(lambda batch: model(**batch, **goal.options), piece, 0, goal.targets(part))
    gradients = [
        torch.autograd.grad(x, model.parameters(), allow_unused=True) for x in (whole, loss)
    ]
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)  # both losses are float32
    stand_in = Examples(part.batch, counts=False)
    (piece,) = goal.pieces(stand_in)
    assert goal.targets(stand_in) == 0
    assert goal.loss_of(lambda b: model(**b, **goal.options), piece, 0, 0).isfinite()
    part.batch.labels[:] = -100
    (piece,) = goal.pieces(part)
    assert goal.targets(part) == 0
    assert goal.loss_of(lambda b: model(**b, **goal.options), piece, 0, 0) == 0
    for one, two in zip(*gradients, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


SPARSE = {
    "task": "fuzzy_recall",
    "task_args": {"seq_len": 16, "num_train": 64, "num_validation": 65, "num_test": 65},
}


def asking(split):
    """Return which rows ask anything."""
    task = load_task("fuzzy_recall", split, recipe().train.seed, **SPARSE["task_args"])
    return (task.batch(range(len(task))).labels[:, 1:] != IGNORED).any(axis=1)


def test_parts_where_nothing_is_asked_change_no_mean(tmp_path):
    """With batches of eight rows, and of one."""
    assert not any(asking(split).all() for split in ("train", "validation", "test"))
    changes = {"data": SPARSE, "train__epochs": None, "train__steps": 6, "train__batch_size": 8}
    runs = [
        train(
            recipe(**changes, eval__batches="all", train__accumulate=accumulate),
            output_dir=tmp_path / str(accumulate),
        )
        for accumulate in (1, 8)
    ]
    one, eight = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert [line.keys() for line in one] == [line.keys() for line in eight]
    for before, after in zip(one, eight, strict=True):
        for name in before.keys() & {"loss", "validation_loss", "validation_accuracy"}:
            assert after[name] == pytest.approx(before[name], rel=1e-4), name
    found = json.loads((runs[1] / "results.json").read_text())["results"]
    assert {row["n"] for row in found if row["metric"] == "exact_match"} == {asking("test").sum()}


def test_a_part_without_labels_passes_no_gradient_on():
    task = dataclasses.replace(load_task("odd", "test", 1), objective="regression", num_labels=1)
    family = load_family("longhorn")
    config = family.config(**LONGHORN["config"], vocab_size=8, num_labels=1)
    model = family.sequence_classification_class(config)
    goal, batch = labelled(model, task), task.batch([0, 1])
    part = Examples(dataclasses.replace(batch, labels=np.full(2, np.nan, np.float32)))
    (piece,) = goal.pieces(part)
    assert goal.targets(part) == 0
    goal.loss_of(lambda batch: model(**batch), piece, 0, 0).backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_step_without_targets_is_refused(tmp_path):
    silent = {"seq_len": 2, "num_train": 8, "num_validation": 8, "num_test": 8}
    changes = {"train__epochs": None, "train__steps": 2, "train__batch_size": 2}
    with pytest.raises(ValueError, match="a step must have something to predict, got none"):
        train(
            recipe(data={"task": "fuzzy_recall", "task_args": silent}, **changes),
            output_dir=tmp_path / "run",
        )


def test_a_problem_drawn_while_training_resumes_and_is_scored_on_whole_answers(tmp_path):
    asked = recipe(data=INDUCTION, train__epochs=2, checkpoint__every=3)
    whole = train(asked, output_dir=tmp_path / "whole")
    killed(asked, tmp_path / "killed", 8)
    resumed = train(asked, output_dir=tmp_path / "killed", resume=True)
    assert_same_run(whole, resumed)
    found = json.loads((whole / "results.json").read_text())["results"]
    assert [(row["metric"], row["n"]) for row in found] == [
        ("exact_match", 25), ("accuracy", 50), ("loss", 50)
    ]  # fmt: skip
    assert [row["higher_is_better"] for row in found] == [True, True, False]
    assert found[0]["value"] == finished(whole)["test"]["exact_match"] <= found[1]["value"]
    # examples are independent, the symbols of one are not
    assert found[0]["stderr"] is not None
    assert found[1]["stderr"] is None


def test_a_cosine_warms_up_and_falls_to_its_last_share():
    optimizer, schedule = scheduled(False, train__warmup=3)
    first = optimizer.param_groups[0]["lr"]
    found = [first, *(rate for rate, _ in rates_of(optimizer, schedule, [1.0] * 11))]
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[-1] == pytest.approx(0.1)


def test_a_constant_rate_stays_after_its_warm_up():
    optimizer, schedule = scheduled(False, train__schedule="constant", train__warmup=3)
    found = rates_of(optimizer, schedule, [1.0] * 6)
    assert [rate for rate, _ in found] == pytest.approx([2 / 3, 1, 1, 1, 1, 1])


def numbered(size):
    def make(indices, epoch):
        return Batch(indices[:, None], np.full(len(indices), epoch), np.ones(len(indices), int))

    return Supervised("tokens", "classification", size, make, vocab_size=size, num_labels=9)


def taken(sources, n, times):
    parts = [source.next_batch(n) for _ in range(times) for source in sources]
    return [part.batch.inputs[:, 0].tolist() for part in parts if part.counts]


def test_an_epoch_holds_every_example_once_in_an_order_of_its_own():
    source = ExampleSource(numbered(11), 3, 4)
    epochs = [[i for part in taken([source], 4, 3) for i in part] for _ in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] == [
        i for part in taken([ExampleSource(numbered(11), 3, 4)], 4, 3) for i in part
    ]
    assert epochs[0] != [
        i for part in taken([ExampleSource(numbered(11), 4, 4)], 4, 3) for i in part
    ]


@pytest.mark.parametrize(("world", "n"), [(1, 1), (2, 2), (2, 1), (4, 1)])
def test_steps_hold_the_same_examples_on_any_processes(world, n):
    alone = ExampleSource(numbered(13), 0, 4)
    several = [ExampleSource(numbered(13), 0, 4, rank=r, world=world) for r in range(world)]
    for _ in range(8):
        (step,) = taken([alone], 4, 1)
        parts = taken(several, n, 4 // (world * n))
        assert [i for part in parts for i in part] == step
    assert {json.dumps(source.position()) for source in several} == {json.dumps(alone.position())}


def test_a_source_resumes_from_a_position():
    one = ExampleSource(numbered(13), 0, 4)
    taken([one], 4, 6)
    position = json.loads(json.dumps(one.position()))
    other = ExampleSource(numbered(13), 0, 4)
    other.seek(position)
    assert taken([one], 4, 5) == taken([other], 4, 5)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_shares_are_the_whole_split_in_as_many_batches_each(world, count):
    """Or what is wanted of it, which is the same on any number of processes."""
    shares = [HeldOutExamples(numbered(12), count, 2, rank=r, world=world) for r in range(world)]
    assert {len(list(s)) for s in shares} == {len(shares[0])}
    found = [i for s in shares for e in s if e.counts for i in e.batch.inputs[:, 0]]
    alone = [i for e in HeldOutExamples(numbered(12), count, 2) for i in e.batch.inputs[:, 0]]
    assert sorted(found) == sorted(alone)
    assert len(set(found)) == count
    assert count < 12 or sorted(found) == list(range(12))


LISTOPS = {"task": "listops", "task_args": {"min_length": 3, "max_length": 9, "num_train": 20,
           "num_validation": 5, "num_test": 5}}  # fmt: skip
COPYING = {"task": "copying", "task_args": {"length": 4, "vocab_size": 4, "num_train": 20,
           "num_validation": 5, "num_test": 5}}  # fmt: skip
DELAY = {"task": "delay", "task_args": {"length": 16, "delay": 3, "num_train": 20,
         "num_validation": 5, "num_test": 5}}  # fmt: skip
MQAR = {"task": "mqar", "task_args": {"seq_len": 16, "num_pairs": 2, "vocab_size": 16,
        "num_train": 20, "num_validation": 5, "num_test": 5}}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "auto", "targets", "metric"),
    [
        (LONGHORN, DELAY, AutoModelForTokenClassification, 5 * 16, "rmse"),
        (LONGHORN, COPYING, AutoModelForTokenClassification, 5 * 4, "accuracy"),
        (LONGHORN, {"task": "mean"}, AutoModelForSequenceClassification, 13, "rmse"),
        (LONGHORN, MQAR, AutoModelForCausalLM, 5 * 2, "loss"),
        (BERT, LISTOPS, AutoModelForSequenceClassification, 5, "accuracy"),
        (LLAMA, LISTOPS, AutoModelForSequenceClassification, 5, "accuracy"),
    ],
    ids=lambda v: v.get("task") or v.get("family") or v["config_of"] if type(v) is dict else "",
)
def test_every_kind_of_task_trains_and_loads_by_its_auto_class(
    model, data, auto, targets, metric, tmp_path
):
    run = train(recipe(model=model, data=data, train__epochs=1), output_dir=tmp_path / "run")
    last = lines(run)[-1]
    assert last["validation_targets"] == targets
    assert np.isfinite(last[f"validation_{metric}"])
    if metric == "rmse":
        assert last["validation_rmse"] == pytest.approx(last["validation_loss"] ** 0.5, rel=1e-6)
    loaded, report = auto.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert type(loaded).__name__ in loaded.config.architectures


def test_images_train_and_load_by_their_auto_class(tmp_path):
    overrides = ["train.epochs=2", "model.preset=coffee-mnist-filtered"]
    run = train("coffee-digits", output_dir=tmp_path / "run", overrides=overrides)
    facts = finished(run)
    assert (facts["step"], facts["tokens"]) == (2 * 19, 2 * 1197 * 64)  # a token is a pixel
    assert facts["test"]["targets"] == 300
    loaded, report = AutoModelForImageClassification.from_pretrained(
        run / "model", output_loading_info=True
    )
    assert not report["missing_keys"]
    batch = load_task("digits", "test", 0).batch(range(300))
    with torch.no_grad():
        said = loaded(torch.from_numpy(batch.inputs)).logits.argmax(-1).numpy()
    assert (said == batch.labels).mean() == pytest.approx(facts["test"]["accuracy"])
    (score,) = json.loads((run / "results.json").read_text())["results"]
    assert (score["task"], score["metric"], score["n"]) == ("digits", "accuracy", 300)
    assert score["stderr"] is not None


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"),
    [
        ("coffee-induction", [], 512),
        ("coffee-induction", ["model.preset=coffee-induction-8"], 96),
        ("coffee-induction", ["data.task_args.trigger=[6,7]", "train.lr=0.003"], 512),
        ("coffee-induction", ["model.preset=coffee-induction-no-feedback"], 512),
        ("coffee-induction-s6", [], 784),
        ("coffee-digits", [], 4 * 3 * 2 * 8 + (4 * 8 * 8 + 8) + (8 * 10 + 10)),
    ],
)
def test_the_coffee_recipes_train_models_of_the_papers_sizes(name, overrides, parameters):
    asked = load_recipe(name, overrides)
    task = load_task(str(asked.data.task), "train", 0, **asked.data.task_args)
    config = build_config(asked.model, None, task)
    assert model_class(config, task)(config).num_parameters() == parameters
    if name.startswith("coffee-induction"):
        assert len(task) == 10_000 * asked.train.batch_size
        seen = task.batch(range(512)).inputs
        assert seen.max() == 7


def rows_of_the_papers_tables():
    """Return table, name and overrides of every row that the recipe of induction heads names."""
    text = (package_data("eval/recipes") / "coffee-induction.yaml").read_text(encoding="utf-8")
    found = re.findall(r"^#   Table (\d)  (\S+) +(--set .*)$", text, re.MULTILINE)
    return [(int(table), name, options.split()[1::2]) for table, name, options in found]


ROWS = rows_of_the_papers_tables()
# what the paper reports beside the accuracy
LOSSES = {
    "8": "0.004", "4": "0.002", "2": "0.035", "1": "1.793", "noise1": "0.000", "noise2": "0.002",
    "target2": "0.004", "trigger2": "0.660", "32": "0.000", "64": "0.001", "128": "0.000",
    "256": "0.001", "token-gate": "0.906", "no-feedback": "0.788", "linear-feedback": "1.845",
}  # fmt: skip


def test_the_rows_of_the_papers_tables_have_its_sizes_rates_and_sequences():
    assert [table for table, _, _ in ROWS] == [2] * 4 + [3] * 2 + [4] * 2 + [5] * 4 + [6] * 3
    assert len({name for _, name, _ in ROWS}) == len(ROWS)
    sizes = {(2, "8"): 96, (2, "4"): 48, (2, "2"): 24, (2, "1"): 12, (6, "gate"): 784}
    for table, name, overrides in ROWS:
        asked, kind = load_recipe("coffee-induction", overrides), name.rpartition("-")[2]
        task = load_task("induction_heads", "train", 0, **asked.data.task_args)
        config = build_config(asked.model, None, task)
        count = model_class(config, task)(config).num_parameters()
        assert count == sizes.get((table, kind), 512), name
        slow = table == 3 or kind == "trigger2"
        assert asked.train.lr == (0.003 if slow else 0.01), name
        assert asked.train.stop_at.metric == "loss"
        # as soon as it rounds to the paper's
        lowest = LOSSES[name.removeprefix("coffee-induction-")]
        assert f"{asked.train.stop_at.value - 0.0005:.3f}" == lowest, name
        inputs, labels = (x[0] for x in (task.batch([0]).inputs, task.batch([0]).labels))
        asks = 2 if kind == "target2" else 1
        assert (labels >= 0).sum() == asks, name
        assert len(inputs) == asks + (int(kind) if table == 5 else 16), name
        trigger = [6, 7] if kind == "trigger2" else [7]
        length = len(inputs) - asks
        assert inputs[length - len(trigger) : length].tolist() == trigger, name
        gap = int(kind[-1]) if table == 3 else 0
        first = next(i for i in range(length) if inputs[i : i + len(trigger)].tolist() == trigger)
        assert inputs[first + len(trigger) + gap] == labels[length], name


@pytest.mark.parametrize("table", [2, 6])
def test_a_row_of_the_papers_tables_trains(table, tmp_path):
    """Two steps of the command in the recipe's head."""
    small = {"num_train": 64, "num_validation": 8, "num_test": 8}
    few = [f"data.task_args.{split}={count}" for split, count in small.items()]
    few += ["train.batch_size=32", "train.epochs=1"]
    overrides = [row for number, _, row in ROWS if number == table][-1]
    run = train("coffee-induction", output_dir=tmp_path / "run", overrides=[*overrides, *few])
    assert finished(run)["step"] == 2
    assert np.isfinite(finished(run)["test"]["loss"])


def test_pairs_train_with_the_familys_own_head(tmp_path):
    run = train(recipe(data={"task": "same"}, train__epochs=1), output_dir=tmp_path / "run")
    kind = load_family("longhorn").pair_classification_class
    loaded, report = kind.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert loaded.config.num_labels == 2


def test_given_weights_get_a_new_head(tmp_path):
    begun = train(recipe(data=MQAR, train__epochs=1), output_dir=tmp_path / "begun")
    tuned = train(
        recipe(model={"init_from": str(begun / "model")}, train__epochs=1, train__lr=1e-9),
        output_dir=tmp_path / "tuned",
    )
    before, after = weights(begun), weights(tuned)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-6)
    assert "score.weight" in after


def test_parameter_groups_have_their_own_rates():
    model = tiny(odd("train", 0))
    model.model.layers[0].mixer.param_group_names = {"D": "ssm"}
    groups = {"ssm": {"lr": 0.5}}
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.2, groups=groups)
    own = next(group for group in optimizer.param_groups if group.get("name") == "ssm")
    assert (own["lr"], own["weight_decay"]) == (0.5, 0.0)
    assert own["params"] == [model.model.layers[0].mixer.D]


def test_a_presets_other_vocabulary_is_replaced_and_reported(caplog):
    section = recipe(model={"family": "longhorn", "preset": "longhorn-125m"}).model
    config = build_config(section, None, odd("train", 0))
    assert config.vocab_size == 8
    assert "longhorn-125m has vocab_size = 50304; the task needs and gets 8" in caplog.text


def test_the_names_of_classes_are_the_tasks_unless_the_recipe_has_its_own():
    task = dataclasses.replace(odd("train", 0), label_names=("even", "odd"))
    section = recipe(model={"family": "longhorn", "preset": "longhorn-125m"}).model
    config = build_config(section, None, task)
    assert config.id2label == {0: "even", 1: "odd"}
    assert config.label2id == {"even": 0, "odd": 1}
    own = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    section.config.update(own)
    config = build_config(section, None, task)
    assert {"id2label": config.id2label, "label2id": config.label2id} == own


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"train__groups": {"smm": {"lr": 1e-3}}}, LookupError, "no parameter group 'smm'"),
        (
            {"model": BERT, "train__groups": {"ssm": {"lr": 1e-3}}},
            LookupError,
            "BertForSequenceClassification has no parameter group 'ssm'",
        ),
        ({"data": {"task": "listops", "task_args": {"max_lenth": 4}}}, LookupError,
         "did you mean 'max_length'?"),
        ({"data": {"task": "odd", "task_args": {"size": "x"}}}, TypeError, "must be int"),
        ({"model": LLAMA, "data": {"task": "same"}}, LookupError,
         "transformers has no model for classification of token_pairs of type 'llama'"),
        ({"model": BERT, "data": DELAY}, LookupError, "no model for token_regression of values"),
        ({"model": {"config_of": "brt"}}, LookupError, "did you mean 'bert'?"),
        ({"model": {"family": "longhorn", "config": {"num_labels": 3}}}, ValueError,
         "model.config.num_labels must be absent or the task's, 2, got 3"),
        ({"model": {"family": "longhorn", "config": {"vocab_size": 99}}}, ValueError,
         "model.config.vocab_size must be absent or the task's, 8, got 99"),
        ({"train__warmup": 99}, ValueError, "at most the run's 18 steps, got 99"),
        ({"train__stop_at": {"metric": "exact_match", "value": 0.9}}, ValueError,
         "train.stop_at.metric must be one of loss, accuracy, which this run measures, got 'exact"),
        ({"data": {"task": "digits"}}, ValueError,
         "num_channels and image_size must be the task's, (1, 8), got None"),
        ({"model": {"family": "longhorn", "preset": "vil-tiny"}}, ValueError,
         "num_channels and image_size must be the task's, None, got (3, 224)"),
        ({"model": BERT, "data": {"task": "digits"}}, LookupError,
         "transformers has no model for classification of images of type 'bert'"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_before_any_work(changes, kind, message, tmp_path):
    with pytest.raises(kind) as caught:
        train(recipe(**changes), output_dir=tmp_path / "run")
    assert message in str(caught.value)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_type_of_model_without_a_head_for_the_task_is_named():
    said = "models of type 'llama' have no head for classification of images"
    with pytest.raises(LookupError, match=said):
        model_class(LlamaConfig(), load_task("digits", "train", 0))


def test_an_example_longer_than_the_table_of_positions_is_named(tmp_path):
    short = {**BERT, "config": {**BERT["config"], "max_position_embeddings": 8}}
    with pytest.raises(ValueError, match=r"max_position_embeddings must be at least .* got 8"):
        train(recipe(model=short), output_dir=tmp_path / "run")


def test_positions_are_checked_by_the_tokens_that_are_read():
    """Rows of induction heads are longer than ``seq_len``; a row's last answer is not read."""
    family, positions = GPT2Config(n_positions=17, n_embd=8, n_layer=1, n_head=2), 17
    model = GPT2LMHeadModel(family)
    tokens = np.ones((2, positions + 1), int)
    rows = Rows(tokens, tokens, np.zeros(tokens.shape, bool))
    with pytest.raises(ValueError, match="got 17 and 18 tokens"):
        CausalLM(model, packs=False).batch(rows)
    task = load_task("state_tracking", "train", 0, seq_len=positions)
    batch = labelled(model, task).batch(Examples(task.batch(range(2))))
    assert batch["input_ids"].shape == (2, positions)
    longer = load_task("state_tracking", "train", 0, seq_len=positions + 1)
    with pytest.raises(ValueError, match="got 17 and 18 tokens"):
        labelled(model, longer).batch(Examples(longer.batch(range(2))))


def test_a_nan_prediction_is_no_small_error():
    task = mean("train", 0)
    part = Examples(task.batch(np.arange(4)))
    goal = labelled(torch.nn.Linear(1, 1), task)
    logits = torch.tensor([[0.0], [float("nan")], [0.0], [0.0]])
    output = type("Output", (), {"logits": logits, "loss": torch.tensor(float("nan"))})
    batch = {"labels": torch.from_numpy(part.batch.labels)}
    assert np.isnan(goal.metrics(goal.measure(output, batch, part))["rmse"])


def test_rows_that_ask_nothing_are_no_examples():
    task = load_task("noisy_recall", "train", 0, seq_len=16, num_train=400)
    part = Examples(task.batch(range(400)))
    asking = int((part.batch.labels[:, 1:] != IGNORED).any(1).sum())
    assert 0 < asking < 400
    family = load_family("longhorn")
    model = family.causal_lm_class(family.config(**LONGHORN["config"], vocab_size=32))
    goal = labelled(model, task)
    wanted, _ = goal._shifted(part)
    logits = torch.zeros(*wanted.shape, 32)
    logits[..., 0] = 1.0  # filler, which is never an answer
    output = type("Output", (), {"logits": logits})
    found = goal.metrics(goal.measure(output, {}, part))
    assert (found["exact_match"], found["examples"]) == (0.0, asking)


@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_a_split_in_the_order_of_its_classes_has_all_classes(world):
    def make(indices, _epoch):
        return Batch(indices[:, None], (indices >= 500).astype(int), np.ones(len(indices), int))

    task = Supervised("tokens", "classification", 1000, make, vocab_size=1000, num_labels=2)
    shares = [HeldOutExamples(task, 320, 16, rank=rank, world=world) for rank in range(world)]
    seen = np.concatenate([part.batch.labels for share in shares for part in share])
    assert len(seen) == 320
    assert 100 < seen.sum() < 220
    whole = [part.batch.inputs[:, 0] for part in HeldOutExamples(task, 1000, 16)]
    assert np.concatenate(whole).tolist() == list(range(1000))


def test_a_data_set_that_changed_does_not_resume(tmp_path, monkeypatch):
    killed(recipe(), tmp_path / "run", 8)
    monkeypatch.setitem(SIZES, "validation", 14)
    with pytest.raises(ValueError, match="must give the examples"):
        train(recipe(), output_dir=tmp_path / "run", resume=True)


TEXT = {"data": {"text": "a.txt"}, "train__seq_len": 8}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data__task": "od"}, LookupError, "data.task: no task 'od'; did you mean 'odd'?"),
        ({"train__epoch": 2}, LookupError, "train has no field 'epoch'; did you mean 'epochs'?"),
        ({"train__patiense": 2}, LookupError, "did you mean 'patience'?"),
        ({"train__groups": {"ssm": {"lrr": 1.0}}}, LookupError,
         "train.groups.ssm has no field 'lrr'; did you mean 'lr'?"),
        ({"train__groups": {"ssm": {"lr": -1.0}}}, ValueError, "train.groups.ssm.lr must be"),
        ({"train__steps": 3}, ValueError, "exactly one of steps, tokens, epochs"),
        ({"train__epochs": 0}, ValueError, "train.epochs must be"),
        ({"train__epochs": None, "train__tokens": 99}, ValueError, "train.tokens must be absent"),
        ({"train__seq_len": 8}, ValueError, "train.seq_len must be absent with data.task 'odd'"),
        ({"data__validation": 9}, ValueError, "data.validation must be absent with data.task"),
        ({"train__schedule": "plateu"}, ValueError, "got 'plateu'"),
        ({"train__schedule": "plateau"}, ValueError,
         "train.schedule 'plateau' needs train.patience"),
        ({"train__patience": 2}, ValueError,
         "train.patience needs train.schedule 'plateau', got 'cosine'"),
        ({"train__factor": 0.5}, ValueError,
         "train.factor needs train.schedule 'plateau' or 'drop', got 'cosine'"),
        ({"train__below": 0.5}, ValueError, "train.below needs train.schedule 'drop', got 'cosin"),
        ({"train__schedule": "drop"}, ValueError, "train.schedule 'drop' needs train.below"),
        ({**DROP, "train__below": 0}, ValueError, "train.below must be greater than 0, got 0"),
        ({"train__stop_at": {"metric": "acc", "value": 1.0}}, ValueError,
         "'mse' or 'mae', got 'acc'"),
        ({"train__stop_at": {"metric": "loss"}}, ValueError, "train.stop_at.value is missing"),
        ({"train__stop_at": {"metrik": "loss", "value": 1.0}}, LookupError,
         "train.stop_at has no field 'metrik'; did you mean 'metric'?"),
        ({**PLATEAU, "train__factor": 1.5}, ValueError, "train.factor must be less than 1"),
        ({**PLATEAU, "train__min_lr_ratio": 0.1}, ValueError,
         "train.min_lr_ratio needs train.schedule 'cosine', got 'plateau'"),
        ({"eval__every": "epochs"}, ValueError,
         "eval.every must be a whole number from 1 on or 'epoch', got 'epochs'"),
        ({"eval__batches": 0}, ValueError, "eval.batches must be a whole number from 1 on or"),
        ({"checkpoint__every": True}, ValueError, "checkpoint.every must be a whole number"),
        ({"checkpoint__bets": True}, LookupError, "did you mean 'best'?"),
        (TEXT, ValueError, "train.epochs needs a data.task without train.seq_len"),
        ({"data": {"text": "a.txt"}}, ValueError, "train.seq_len is missing"),
        ({**TEXT, "train__epochs": None, "train__steps": 9}, ValueError,
         "eval.every 'epoch' needs a data.task"),
        ({**TEXT, "train__epochs": None, "train__steps": 9, "eval": {"every": 3},
          "checkpoint": {"best": True}}, ValueError, "checkpoint.best needs data.validation"),
        ({**TEXT, **PLATEAU, "train__epochs": None, "train__steps": 9, "eval": {"every": 3},
          "checkpoint": {}}, ValueError, "train.schedule 'plateau' needs data.validation"),
        ({**TEXT, **DROP, "train__epochs": None, "train__steps": 9, "eval": {"every": 3},
          "checkpoint": {}}, ValueError, "train.schedule 'drop' needs data.validation"),
        ({**TEXT, "train__stop_at": STOP, "train__epochs": None, "train__steps": 9,
          "eval": {"every": 3}, "checkpoint": {}}, ValueError,
         "train.stop_at needs data.validation"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_when_it_is_read(changes, kind, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields(**changes)), encoding="utf-8")
    with pytest.raises(kind) as caught:
        load_recipe(path)
    assert message in str(caught.value.args[0])


def test_a_runs_recipe_reads_back_equal_with_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "tsv").mkdir()
    monkeypatch.chdir(tmp_path)
    data = {"task": "aan", "task_args": {"data": "tsv"}}
    asked = recipe(data=data, **PLATEAU, train__groups={"ssm": {"lr": 1e-3}})
    kept = asked.with_absolute_paths()
    assert kept.data.task_args == {"data": str(tmp_path / "tsv")}
    (tmp_path / "kept.yaml").write_text(kept.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "kept.yaml") == kept


SHIPPED = [
    p for p in sorted(package_data("eval/recipes").glob("*.yaml")) if load_recipe(p).supervised
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_recipe_of_a_task_is_valid_down_to_the_groups(path, monkeypatch):
    asked = load_recipe(path)
    name = str(asked.data.task)
    # the arguments are checked, the data is not made
    real = SUPERVISED_TASKS[name]
    monkeypatch.setitem(SUPERVISED_TASKS, name, functools.wraps(real)(lambda *_, **__: None))
    load_task(name, "train", asked.train.seed, **asked.data.task_args)
    if asked.model.family is None:
        return
    try:
        family = load_family(asked.model.family)
    except (LookupError, RuntimeError):
        pytest.skip(f"family {asked.model.family} is not installed")
    family.config(asked.model.preset, **asked.model.config)
    model = family.sequence_classification_class(family.config(**family.tiny))
    groups = {k: v.model_dump(exclude_none=True) for k, v in asked.train.groups.items()}
    make_optimizer(model, lr=asked.train.lr, groups=groups)
