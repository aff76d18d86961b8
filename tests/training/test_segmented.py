"""Rows in segments with a carried state give the loss and the gradients of the unsplit row."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import yaml
from tests.training.many_processes import loss_in_its_own_dtype
from tests.training.runs import (
    KilledError,
    assert_same_run,
    killed,
    killed_before,
    lines,
    quick_runs,  # noqa: F401
    saved,
    write_texts,
)

from ssmzoo.data.rows import ConsecutiveRows, Rows
from ssmzoo.family import families, load_family
from ssmzoo.recipe import SegmentsSection, load_recipe
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.run import train
from ssmzoo.training.segments import SegmentedLM, share_of_carried


def some_rows(vocabulary):
    rng = np.random.default_rng(0)
    input_ids = rng.integers(1, vocabulary, size=(3, 24))
    starts = np.zeros(input_ids.shape, bool)
    starts[:, 0] = True
    starts[0, 5] = starts[1, 8] = starts[1, 16] = True  # inside a segment, and at two borders
    return Rows(input_ids, np.where(starts, -100, input_ids), starts)


def run(model, objective, part):
    """Return the loss and the gradients of one micro-batch."""
    model.zero_grad()
    model.loss_function = loss_in_its_own_dtype
    total = 0.0

    def forward(batch, **options):
        return model(**batch, **{**objective.options, **options})

    for piece in objective.pieces(part):
        loss = objective.loss_of(forward, piece, 0, objective.targets(part))
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def tiny(name):
    torch.manual_seed(0)
    family = load_family(name)
    model = family.causal_lm_class(family.config(**family.tiny)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def relative(one, two):
    return float((one - two).norm() / two.norm().clamp(min=1e-30))


def test_the_last_segment_reads_the_remaining_columns():
    """Rows of induction heads have their answers after ``train.seq_len`` tokens."""
    model, part = tiny("longhorn"), some_rows(50)
    whole_loss, _ = run(model, CausalLM(model, packs=True), part)
    objective = SegmentedLM(model, SegmentsSection(count=5, gradients="keep"), packs=True)
    (segments,) = objective.pieces(part)
    assert [segment["input_ids"].shape[1] // 3 for segment in segments] == [4, 4, 4, 4, 8]
    assert run(model, objective, part)[0] == pytest.approx(whole_loss, rel=1e-5)


@pytest.mark.parametrize("name", sorted(families()))
def test_gradients_through_segments_are_those_of_the_unsplit_row_unless_cut(name):
    model = tiny(name)
    part = some_rows(model.config.vocab_size)
    whole_loss, whole = run(model, CausalLM(model, packs=True), part)
    losses, grads = zip(
        *(
            run(
                model, SegmentedLM(model, SegmentsSection(count=3, gradients=how), packs=True), part
            )
            for how in ("keep", "cut")
        ),
        strict=True,
    )
    # the model's own loss is taken in float32
    assert losses == pytest.approx([whole_loss] * 2, rel=1e-5)
    assert grads[0].keys() == whole.keys()
    differences = [[relative(found[name], whole[name]) for name in whole] for found in grads]
    assert max(differences[0]) < 1e-5
    assert max(differences[1]) > 1e-4


def test_segments_of_many_words_keep_no_logits_and_give_the_same():
    model = tiny("longhorn")
    part, section = some_rows(model.config.vocab_size), SegmentsSection(count=3, gradients="keep")
    found = []
    for skips in (False, True):
        objective = SegmentedLM(model, section, packs=True)
        objective.options["skip_logits"] = skips
        found.append(run(model, objective, part))
    (loss, slopes), (loss_without, slopes_without) = found
    assert loss_without == pytest.approx(loss, rel=1e-5)
    assert max(relative(slopes_without[name], slopes[name]) for name in slopes) < 1e-5


@pytest.mark.parametrize("name", ["bmojo", "coffee", "longhorn"])
def test_a_carried_state_is_where_the_last_step_ended(name):
    model = tiny(name)
    part = some_rows(model.config.vocab_size)
    first = Rows(*(array[:, :12] for array in part))
    second = Rows(*(array[:, 12:] for array in part))
    options = SegmentsSection(count=2, carry=True)
    objective = SegmentedLM(model, options, packs=True)
    run(model, objective, first)
    saved = objective.carried()
    carried, _ = run(model, objective, second)
    resumed = SegmentedLM(model, options, packs=True)
    resumed.carry_on(saved, torch.device("cpu"))
    assert run(model, resumed, second)[0] == carried
    fresh, _ = run(model, SegmentedLM(model, options, packs=True), second)
    assert abs(fresh - carried) > 1e-5 * carried  # more than is allowed below

    with torch.no_grad():  # the same predictions in the unsplit row
        ends = [*np.flatnonzero(part.starts), part.starts.size]
        logits = model(
            torch.from_numpy(part.input_ids.reshape(1, -1)),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        ).logits.view(3, 24, -1)
    wanted = torch.from_numpy(second.labels[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(logits[:, 12:-1].flatten(0, 1), wanted)
    assert carried == pytest.approx(loss.item(), rel=1e-5)


def test_consecutive_rows_continue_where_the_last_step_ended_and_lose_nothing():
    tokens = np.arange(1000)
    pieces = np.array([[0, 400], [400, 430], [430, 1000]])
    source = ConsecutiveRows(tokens, pieces, 10, 4, seed=3)
    steps = [source.next_batch(4) for _ in range(len(source) // 4)]
    assert len(steps) == 25
    lanes = [np.concatenate([step.input_ids[lane] for step in steps]) for lane in range(4)]
    begins = [np.concatenate([step.starts[lane] for step in steps]) for lane in range(4)]
    assert sorted(np.concatenate(lanes)) == list(range(1000))
    for lane, begin in zip(lanes, begins, strict=True):
        breaks = np.flatnonzero(np.diff(lane) != 1) + 1
        assert set(breaks) <= set(np.flatnonzero(begin))
        # an epoch's first row, and where documents begin
        assert set(np.flatnonzero(begin)) <= {0, *np.flatnonzero(np.isin(lane, pieces[:, 0]))}
    again = source.next_batch(4)  # the next epoch begins anew
    assert again.starts[:, 0].all()


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_lanes_of_one(world):
    tokens, pieces = np.arange(400), np.array([[0, 150], [150, 400]])
    alone = ConsecutiveRows(tokens, pieces, 10, 4, seed=0)
    together = [
        ConsecutiveRows(tokens, pieces, 10, 4, seed=0, rank=rank, world=world)
        for rank in range(world)
    ]
    for _ in range(12):
        parts = [source.next_batch(4 // world).input_ids for source in together]
        assert np.array_equal(alone.next_batch(4).input_ids, np.concatenate(parts))


@pytest.fixture
def recipe(tmp_path):
    fields = {
        "model": {"family": "longhorn", "config": {"hidden_size": 32, "num_hidden_layers": 2}},
        "data": {"text": str(write_texts(tmp_path / "texts")), "validation": 0.2},
        "train": {"steps": 9, "batch_size": 4, "seq_len": 32, "lr": 0.01, "accumulate": 2},
        "eval": {"every": 4, "batches": 2},
        "checkpoint": {"every": 3, "keep": 2},
        "log": {"every": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_a_killed_run_resumes_with_its_carried_states(recipe, tmp_path):
    overrides = ["train.segments.count=2", "train.segments.carry=true"]
    whole = train(recipe, output_dir=tmp_path / "whole", overrides=overrides)
    killed(recipe, tmp_path / "killed", 8, overrides=overrides)
    assert any(name.startswith("carried/0/") for name in saved(tmp_path / "killed", 6))
    resumed = train(recipe, output_dir=tmp_path / "killed", overrides=overrides, resume=True)
    assert_same_run(whole, resumed)


def test_carried_states_are_split_again_for_other_micro_batches(recipe, tmp_path, monkeypatch):
    overrides = ["train.segments.count=2", "train.segments.carry=true"]
    whole = train(recipe, output_dir=tmp_path / "whole", overrides=overrides)
    run = tmp_path / "run"
    for accumulate, step in ((2, 4), (4, None)):
        changed = [*overrides, f"train.accumulate={accumulate}"]
        with monkeypatch.context() as patch, pytest.raises(KilledError) if step else nullcontext():
            if step:
                killed_before(patch, step)
            train(recipe, output_dir=run, overrides=changed, resume=True)
    for one, two in zip(lines(whole), lines(run), strict=True):
        # the same sums in another order, in float32; other states would change every digit
        assert two.get("loss") == pytest.approx(one.get("loss"), rel=1e-4)
    parts = {"0.0.state": torch.arange(2.0), "1.0.state": torch.arange(4.0, 6.0)}
    others = {"0.0.state": torch.arange(2.0, 4.0), "1.0.state": torch.arange(6.0, 8.0)}
    mine = share_of_carried([parts, others], 1, 4)
    assert {name: state.tolist() for name, state in mine.items()} == {
        "0.0.state": [1.0],
        "1.0.state": [3.0],
        "2.0.state": [5.0],
        "3.0.state": [7.0],
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.segments.count=5"], "must divide train.seq_len = 32, got 5"),
        (["train.segments.count=1"], "needs a count of at least 2, or carry: true"),
        (["train.segments.gradients=half"], "'cut' or 'keep'"),
        (
            ["train.segments.carry=true", "data.task=mqar", "data.text=null", "data.validation=8"],
            "no data.streaming, no data.task",
        ),
    ],
)
def test_wrong_segments_are_refused(overrides, message, recipe):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, overrides)


def test_a_model_without_a_state_to_carry_is_refused(recipe, tmp_path):
    llama = ["model.family=null", "model.config_of=llama", "train.segments.count=2"]
    with pytest.raises(ValueError, match="needs a model of the zoo"):
        train(
            recipe,
            output_dir=tmp_path / "run",
            overrides=[*llama, "model.config.num_attention_heads=2"],
        )


def test_sequence_parallel_is_refused_on_one_process(recipe, tmp_path):
    with pytest.raises(ValueError, match="must divide the number of processes, 1, got 2"):
        train(recipe, output_dir=tmp_path / "run", overrides=["train.sequence_parallel=2"])
    assert not (tmp_path / "run/recipe.yaml").exists()
