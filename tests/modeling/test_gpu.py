"""Models on a real GPU: equal forms, gradients, steps in a graph, stock models, training.

The references in float64 are the judge. The kernels alone have tests of their own in ``kernels``.
"""

import copy
import json

import pytest
import torch
from tests.stock_models import TYPES, tiny

import ssmzoo
from ssmzoo import load_family
from ssmzoo.family import families
from ssmzoo.modeling import StaticStateCache
from ssmzoo.testing.subject import BUDGETS, Subject
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LENGTHS = (63, 1, 64, 5, 67)
# one type of each kind of recurrent layer
STOCK = ("mamba", "mamba2", "qwen3_next", "kimi_linear")
# families whose own ops have Triton kernels
SCANS = {f"ssmzoo_{name}" for name in ("bmojo", "coffee", "dss", "linear_attention", "longhorn")}
BUDGET = BUDGETS[torch.float32]
PROSE = "The cat sat on the mat. The dog sat on the cat, and the cat ran off. " * 200


@pytest.fixture(scope="module", params=sorted(families()))
def subject(request):
    return Subject(load_family(request.param))


@pytest.fixture(scope="module")
def model(subject):
    return subject.fresh(torch.float32).to(DEVICE)


@pytest.fixture(scope="module")
def rows(subject):
    return [subject.ids(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def exact(subject, rows):
    with torch.no_grad(), use_backend("reference"):
        return [subject.model()(row[None], use_cache=False).logits[0] for row in rows]


def distance(got, judge):
    """Return the greatest difference, in units of the judge's greatest number."""
    assert got.shape == judge.shape
    return float((got.cpu().double() - judge).abs().max() / judge.abs().max().clamp_min(1e-30))


def assert_near(got, judge):
    for row, truth in zip(got, judge, strict=True):
        assert distance(row, truth) <= BUDGET


@torch.no_grad()
def test_whole_rows(model, rows, exact):
    with watch() as kernels:
        assert_near([model(row[None].to(DEVICE)).logits[0] for row in rows], exact)
    backends = {backend for _, backend in kernels}
    assert backends <= {"triton", "eager", "march"}
    assert "triton" in backends or model.config.model_type not in SCANS


@torch.no_grad()
def test_packed_rows(model, rows, exact):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(DEVICE)
    logits = model(torch.cat(rows)[None].to(DEVICE), cu_seqlens=ends).logits[0]
    assert_near(logits.split(LENGTHS), exact)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows(model, subject, rows, exact, side):
    widest = max(LENGTHS)
    ids = subject.ids(len(rows), widest, seed=99)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(widest - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    logits = model(ids.to(DEVICE), attention_mask=mask.to(DEVICE)).logits
    assert_near(logits[mask.bool().to(DEVICE)].split(LENGTHS), exact)


@pytest.mark.parametrize("pieces", [(5, 1, 2, 50, 9), (50, *[1] * 17)], ids=["chunks", "tokens"])
@torch.no_grad()
def test_pieces_with_a_cache(model, rows, exact, pieces):
    cache, found = None, []
    for piece in rows[-1][None].to(DEVICE).split(pieces, dim=1):
        output = model(piece, cache=cache, use_cache=True)
        cache = output.cache
        found.append(output.logits[0])
    assert_near([torch.cat(found)], exact[-1:])


def slopes(model, ids):
    """Return the gradients of a loss that needs all logits."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.double().log_softmax(-1).square().mean().backward()
    return {n: p.grad.cpu().double() for n, p in model.named_parameters() if p.grad is not None}


def assert_slopes_near(found, usual, truth):
    """Fail unless gradients are about as close to float64 as a CPU's in float32 are."""
    assert found.keys() == truth.keys()
    lost = max(distance(usual[name], x) for name, x in truth.items())
    assert lost <= 1e-3  # or the judge of float32 is wrong itself
    for name, x in truth.items():
        assert distance(found[name], x) <= max(BUDGET, 2 * lost), name


def test_gradients(model, subject):
    ids = subject.ids(2, 120)
    usual = slopes(subject.fresh(torch.float32), ids)
    with use_backend("reference"):
        truth = slopes(subject.fresh(torch.float64), ids)
    assert_slopes_near(slopes(model, ids.to(DEVICE)), usual, truth)


@torch.no_grad()
def test_recorded_steps(model, subject):
    """Steps that are recorded once and replayed give the logits of steps that are not."""
    skips = torch._dynamo.utils.counters["inductor"]
    skips.clear()
    ids = subject.ids(2, 40).to(DEVICE)

    def prompt():
        room = 64 if model.config.state_grows else None
        cache = StaticStateCache(model.config, room)
        model(ids[:, :20], cache=cache)
        return cache

    def step(token, cache):
        return model(token, cache=cache).logits

    found = []
    for function in (torch.compile(step, fullgraph=True, mode="reduce-overhead"), step):
        cache = prompt()
        found.append([function(t, cache).clone() for t in ids[:, 20:].split(1, dim=1)])
    assert_near(found[0], [x.cpu().double() for x in found[1]])
    assert not skips["cudagraph_skips"]


def test_generating_with_a_static_cache(model, subject):
    """``generate`` compiles the steps by itself; what it says is what it says without."""
    ids = subject.ids(2, 9).to(DEVICE)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    usual = model.generate(ids, **options)
    found = model.generate(ids, cache_implementation="static", **options)
    assert_near(found.logits, [x.cpu().double() for x in usual.logits])


def test_training_in_bfloat16(subject, tmp_path):
    text = tmp_path / "prose.txt"
    text.write_text(PROSE, encoding="utf-8")
    config = {name: x for name, x in subject.family.tiny.items() if name != "vocab_size"}
    recipe = {
        "model": {"family": subject.family.name, "config": config},
        "data": {"text": str(text), "validation": 0.1},
        "train": {"steps": 30, "batch_size": 8, "seq_len": 64, "lr": 5e-3, "dtype": "bfloat16"},
        "log": {"every": 1, "curves": False},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    train(tmp_path / "recipe.yaml", output_dir=tmp_path / "run")
    losses = [x["loss"] for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in x]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("model_type", STOCK)
def test_stock_models_give_the_same_on_our_ops(model_type):
    assert model_type in TYPES
    usual = tiny(model_type).eval()
    ids = torch.randint(3, 61, (2, 37), generator=torch.Generator().manual_seed(1))
    truth_model = copy.deepcopy(usual).double()
    ours = copy.deepcopy(usual).to(DEVICE)
    ssmzoo.accelerate(ours)
    with watch() as kernels:
        found = slopes(ours, ids.to(DEVICE))
    assert "triton" in {backend for _, backend in kernels}
    truth = slopes(truth_model, ids)
    assert_slopes_near(found, slopes(usual, ids), truth)
    with torch.no_grad():
        judge = truth_model(ids, use_cache=False).logits
        assert distance(ours(ids.to(DEVICE)).logits, judge) <= BUDGET
