"""Gauges, the numbers that layers report during training: what is read, its cost, its log."""

import json

import pytest
import torch
import yaml
from tests.training.runs import assert_same_tensors, lines, quick_runs, weights  # noqa: F401

from ssmzoo.family import load_family
from ssmzoo.training.metrics import GAUGED_TOKENS, few_tokens, read_gauges
from ssmzoo.training.run import train

NAMES = {"largest_jacobian", "shut_gates", "growing_lanes"}


def build(name="coffee", **fields):
    family = load_family(name)
    torch.manual_seed(0)
    return family.causal_lm_class(family.config(**{**family.tiny, **fields}))


def ids(*shape):
    return torch.arange(int(torch.tensor(shape).prod())).view(shape) % 96


def test_gauges_read_the_first_tokens_of_a_batchs_longest_sequence():
    batch = ids(3, 2 * GAUGED_TOKENS)
    assert torch.equal(few_tokens({"input_ids": batch})["input_ids"], batch[:1, :GAUGED_TOKENS])
    mask = torch.zeros(3, 10, dtype=torch.int64)
    mask[0, :2], mask[1, 3:9], mask[2, 5:] = 1, 1, 1
    padded = {"input_ids": ids(3, 10), "attention_mask": mask, "labels": ids(3, 10)}
    assert torch.equal(few_tokens(padded)["input_ids"], ids(3, 10)[1:2, 3:9])
    packed = {"input_ids": ids(1, 30), "cu_seqlens": torch.tensor([0, 4, 25, 30])}
    assert torch.equal(few_tokens(packed)["input_ids"], ids(1, 30)[:, 4:25])
    images = {"pixel_values": torch.rand(4, 8, 8), "labels": ids(4)}
    assert torch.equal(few_tokens(images)["pixel_values"], images["pixel_values"][:1])
    values = {"input_values": torch.rand(2, 7, 3)}
    assert torch.equal(few_tokens(values)["input_values"], values["input_values"][:1])


def test_every_layer_that_has_gauges_is_read_and_nothing_is_changed():
    model = build(dropout=0.5).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    found = read_gauges(model, {"input_ids": ids(2, 40)})
    assert torch.equal(torch.get_rng_state(), random)
    assert set(found) == NAMES
    assert all(len(numbers) == 2 for numbers in found.values())
    assert found == read_gauges(model, {"input_ids": ids(2, 40)})
    json.dumps(found)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    mixer = model.model.layers[1].mixer
    seen = []
    hook = mixer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model.eval()(ids(1, 40))
        hook.remove()
        own = mixer.gauges(seen[0])
    assert {name: float(value) for name, value in own.items()} == {
        name: numbers[1] for name, numbers in found.items()
    }


@pytest.mark.parametrize("head", ["causal_lm", "sequence", "token", "pair"])
def test_gauges_are_the_same_under_every_head(head):
    family = load_family("coffee")
    name = head if head == "causal_lm" else f"{head}_classification"
    config = family.config(**family.tiny, num_labels=3)
    model = getattr(family, f"{name}_class")(config).train()
    batch = {"input_ids": ids(2, 20), "labels": torch.tensor([0, 2])}
    if head == "pair":
        batch |= {"pair_input_ids": ids(2, 7), "pair_attention_mask": torch.ones(2, 7).long()}
        batch["attention_mask"] = torch.ones(2, 20).long()
    other = family.causal_lm_class(config)
    other.model.load_state_dict(model.model.state_dict())
    expected = read_gauges(other, {"input_ids": ids(2, 20)})
    found = read_gauges(model, batch)
    assert found.keys() == NAMES
    for gauge, numbers in found.items():
        assert numbers == pytest.approx(expected[gauge], rel=1e-5), gauge


def test_modes_and_hooks_are_put_back_when_a_model_fails():
    model = build().train()
    model.model.layers[0].eval()
    with pytest.raises(ValueError, match="input_ids must be in"):
        read_gauges(model, {"input_ids": torch.full((1, 3), 96)})
    assert model.training
    assert not model.model.layers[0].training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_without_gauges_is_not_run_for_them(monkeypatch):
    model = build("longhorn")
    monkeypatch.setattr(type(model), "forward", None)
    assert read_gauges(model, {"input_ids": ids(1, 5)}) == {}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("recipe")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400, encoding="utf-8")
    tiny = {
        name: value for name, value in load_family("coffee").tiny.items() if name != "vocab_size"
    }
    fields = {
        # dropout, so that a random number drawn for gauges would show
        "model": {"family": "coffee", "config": {**tiny, "dropout": 0.2}},
        "data": {"text": str(tmp_path / "text.txt")},
        "train": {"steps": 6, "batch_size": 2, "seq_len": 16, "lr": 0.01},
        "log": {"every": 2},
        "checkpoint": {"every": 6},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
    return tmp_path / "recipe.yaml"


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    return train(recipe, output_dir=tmp_path_factory.mktemp("runs") / "run")


def lines_of(run):
    return [line for line in lines(run) if "loss" in line]


def test_gauges_are_logged_with_the_losses(run):
    found = lines_of(run)
    assert [line["step"] for line in found] == [2, 4, 6]
    for line in found:
        assert set(line["gauges"]) == NAMES
        assert all(len(numbers) == 2 for numbers in line["gauges"].values())
        assert all(0 <= share <= 1 for share in line["gauges"]["shut_gates"])
    assert found[0]["gauges"] != found[2]["gauges"]


def numbers(run):
    """Return all losses and gradient norms of the lines."""
    return [(line["loss"], line["grad_norm"]) for line in lines_of(run)]


def test_gauges_change_no_weight_and_no_loss(run, recipe, tmp_path, monkeypatch):
    looked = []

    def disturb(model, batch):
        looked.append(torch.rand(1))
        return read_gauges(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr("ssmzoo.training.step.read_gauges", lambda model, batch: {})
        plain = train(recipe, output_dir=tmp_path / "plain")
    assert not any("gauges" in line for line in lines_of(plain))
    assert numbers(run) == numbers(plain)
    assert_same_tensors(weights(run), weights(plain))
    # gauges that drew from the run's random numbers would be noticed
    monkeypatch.setattr("ssmzoo.training.step.read_gauges", disturb)
    assert numbers(train(recipe, output_dir=tmp_path / "disturbed")) != numbers(plain)
    assert len(looked) == 3
