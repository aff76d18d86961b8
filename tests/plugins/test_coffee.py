"""COFFEE: the golden checks of its paper on the models.

The judge is ``tests/oracles/coffee.py``, float64 numpy from the paper alone. The recurrences
themselves are the business of ``tests/kernels``.
"""

import contextlib
import copy
import csv
import importlib.util
import io
import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tests.oracles import coffee as oracle
from tests.plugins.logits import relative
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from ssmzoo.analysis.describe import describe_family
from ssmzoo.analysis.inspect import inspect_model
from ssmzoo.analysis.measure import measure_layers
from ssmzoo.evaluation.evaluate import evaluate
from ssmzoo.evaluation.results import read_results
from ssmzoo.modeling import LayerState
from ssmzoo.tasks import induction_heads_zero, symbol_tokenizer
from ssmzoo.tasks.mnist import turned
from ssmzoo.testing import FamilyConformance, check
from ssmzoo.testing.conformance import CHECKS, name_of
from ssmzoo.training.callbacks import ProjectParameters
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train
from ssmzoo_coffee import FAMILY, CoffeeConfig, CoffeeForCausalLM, CoffeeForImageClassification
from ssmzoo_coffee import modeling_coffee as modeling
from ssmzoo_coffee.readout import euclidean, softmin_logits
from ssmzoo_kernels import last_backend


def loaded_from(path, monkeypatch):
    """Return a module that is not installed; it finds its neighbours."""
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = Path(__file__).parents[2] / "eval" / "speed" / "newton.py"

FAMILY.register()  # so that every test can run alone

TINY = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 2, "d_state": 4}
CORE = dict(FAMILY.presets["coffee-induction"])
ROAMING = {"lambda_param": "sigmoid", "ssm_init": "spread"}  # so that any number is a lambda
VARIANTS = (
    "coffee",
    "input_matrix",
    "no_feedback",
    "token_gate",
    "linear_feedback",
    "s6",
)
FORMS = ["oracle", "chunks", "tokens", "padding", "packing", "causality", "batch"]


class TestCoffee(FamilyConformance):
    family = "coffee"
    oracle = staticmethod(oracle.logits)


def conforms(fields, only):
    report = check(replace(FAMILY, tiny=fields), oracle=oracle.logits, only=only)
    assert report.ok, report.table()


@pytest.mark.long
def test_the_papers_module_keeps_all_promises_that_its_head_allows():
    # its logits depend on all tokens there are, and are larger than the loss, which transformers
    # takes of them in float32; it has no linear layer, and is always tied; ONNX has no cdist
    linear = {"lora", "lora_all_linear", "lora_parameters", "quantized"}
    impossible = {"resized_embeddings", "outputs", "save_and_load", "onnx", *linear}
    # which see nothing here that they do not in the block above, and in its head below
    slow = {"compile", "fullgraph", "jit_trace", "trainer"}
    names = [name_of(function) for function in CHECKS]
    conforms({**CORE, **ROAMING}, [name for name in names if name not in impossible | slow])


def test_the_papers_head_compiles_without_a_graph_break():
    model = core()
    y = numbers(2, 3, 16)
    compiled = torch.compile(model.lm_head, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(y), model.lm_head(y)) <= 1e-12
        embedding = torch.compile(model.model.embed_tokens, backend="aot_eager", fullgraph=True)
        assert torch.equal(embedding(torch.arange(9)), model.model.embed_tokens(torch.arange(9)))
    torch._dynamo.reset()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("coffee", "linear_feedback")])
@pytest.mark.parametrize("block", ["gated", "bare"])
def test_every_ablation_has_five_equal_forms(variant, block):
    tiny = {**FAMILY.tiny, "output_filter": variant == "no_feedback", "num_hidden_layers": 1}
    conforms({**tiny, "variant": variant, "block": block}, [*FORMS, "gradients"])


# --- helpers ----------------------------------------------------------------------------------


@torch.no_grad()
def stir(model):
    """Move what starts at zero or one, and lambda into its range."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".lam"):
            parameter.uniform_(-0.9, -0.1, generator=generator)
        elif parameter.ndim == 1 or name.endswith(".B"):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def build(dtype=torch.float64, cls=CoffeeForCausalLM, **fields):
    torch.manual_seed(0)
    return stir(cls(CoffeeConfig(**{**TINY, **fields}))).eval().to(dtype)


def core(dtype=torch.float64, **fields):
    return build(dtype, **{**CORE, **fields})


def tokens(batch, length, seed=0, vocab_size=61):
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab_size, size=(batch, length)))


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def judged(model, input_ids):
    return oracle.logits(arrays(model), model.config.to_dict(), input_ids.numpy())


def mixer_of(**fields):
    """A bare mixer of five channels in float64."""
    fields = {"hidden_size": 5, "d_state": 3, "lambda_param": "clamp", **fields}
    model = build(block="bare", use_skip=False, num_hidden_layers=1, **fields)
    return model.model.layers[0].mixer


def numbers(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


@torch.no_grad()
def out(mixer, u):
    return mixer(u, LayerState())


def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- the oracle -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        *({"variant": variant} for variant in VARIANTS),
        {"lambda_param": "clamp"},
        {"lambda_param": "clamp", "ssm_init": "paper", "lambda_max": 2.0},
        {"lambda_max": 1.7},
        {"output_filter": True, "variant": "input_matrix"},
        {"output_filter": True, "variant": "token_gate"},
        {"use_skip": False, "conv_bias": False, "tie_word_embeddings": False},
        {"norm_type": "layer", "intermediate_size": 12, "expand": 3, "d_conv": 2},
        {"prenorm": False, "residual": False},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_the_model_matches_the_oracle_in_float64(fields):
    model, input_ids = build(**fields), tokens(2, 21)
    with torch.no_grad():
        assert relative(model(input_ids).logits, judged(model, input_ids)) <= 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("frozen", [None, 0, 3, 8])
def test_the_papers_module_matches_the_oracle_in_float64(variant, frozen):
    model = core(variant=variant, frozen_embedding_index=frozen)
    input_ids = tokens(2, 21, vocab_size=9)
    with torch.no_grad():
        assert relative(model(input_ids).logits, judged(model, input_ids)) <= 1e-10


# --- G1: the paper's own example --------------------------------------------------------------

LEARNED = [[5.394, 5.343], [-10.264, -1.575], [-1.539, -10.340]]
STARTED = [[6.0, 6.0], [-10.0, -1.0], [-1.0, -10.0]]
# trigger 0; the target follows it, in one of two places
SEQUENCES = {
    tuple(s): t
    for t, z in itertools.product((1, 2), repeat=2)
    for s in ([0, t, z, 0], [z, 0, t, 0])
}


def ih0(embedding=None):
    """Return the preset, with another embedding than the one that it starts with."""
    model = FAMILY.causal_lm_class(FAMILY.config("coffee-ih0"))
    if embedding is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.tensor(embedding))
    return model.eval()


def right_of_eight(model):
    ids, targets = torch.tensor(list(SEQUENCES)), torch.tensor(list(SEQUENCES.values()))
    with torch.no_grad():
        return int((model(ids).logits[:, -1].argmax(dim=-1) == targets).sum())


def test_the_papers_example_takes_its_path_and_answers_all_eight_sequences():
    model = ih0(LEARNED)
    with torch.no_grad():
        path = model.model(torch.tensor([[0, 1, 2, 0], [2, 0, 1, 0]])).last_hidden_state
    expected = [(2.697, 2.672), (-6.919, 1.198), (-6.920, -6.745), (-6.915, -6.739)]
    np.testing.assert_allclose(path[0], expected, atol=6e-4)
    np.testing.assert_allclose(path[1, -1], (-6.430, -5.118), atol=6e-4)
    assert [right_of_eight(ih0(x)) for x in (LEARNED, STARTED, None)] == [8, 6, 6]


def test_the_task_asks_for_the_eight_sequences_of_the_papers_example():
    input_ids, labels = induction_heads_zero()
    assert dict(zip(map(tuple, input_ids[:, :4].tolist()), labels[:, 4], strict=True)) == SEQUENCES


def test_files_of_weights_may_have_a_variant_beside_the_configurations(tmp_path):
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**FAMILY.tiny, "variant": "token_gate"}))
    model.save_pretrained(tmp_path, variant="fp16")
    for kind in (AutoModelForCausalLM, CoffeeForCausalLM):
        loaded = kind.from_pretrained(tmp_path, variant="fp16")
        assert loaded.config.variant == "token_gate"
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert CoffeeConfig.from_pretrained(tmp_path, variant="no_feedback").variant == "no_feedback"
    with pytest.raises(StrictDataclassError, match="variant"):
        CoffeeConfig.from_pretrained(tmp_path, variant="s7")


@pytest.mark.parametrize(("embedding", "right"), [(None, 6), (LEARNED, 8)])
def test_lm_eval_asks_for_the_eight_sequences_of_the_papers_example(embedding, right, tmp_path):
    ih0(embedding).save_pretrained(tmp_path / "model")
    symbol_tokenizer(3).save_pretrained(tmp_path / "model")
    path = evaluate(tmp_path / "model", tasks=["ssmzoo_induction_zero"], output_dir=tmp_path)
    found = {row["metric"]: row for row in read_results(path)["results"]}
    assert {metric: row["value"] for metric, row in found.items()} == {
        "acc": right / 8,
        "exact_match": right / 8,
    }
    assert found["acc"]["n"] == 8


def test_the_papers_example_learns_from_its_start_and_nothing_but_its_embedding(tmp_path):
    """Section 6: a few steps of six numbers until all eight are right."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer before
    run = train("coffee-ih0", output_dir=tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())["finished"]
    assert facts["test"]["exact_match"] == 1
    assert facts["test"]["examples"] == 8
    assert facts["step"] < 100
    stored = load_file(run / "model" / "model.safetensors")
    for name, value in (("lam", 0.0), ("w", 1.0), ("C", 1.0)):
        assert (stored.pop(f"model.layers.0.mixer.{name}") == value).all(), name
    (embedding,) = stored.values()
    # the paper's run went the same way from there, by batches that it does not tell
    moved, paper = embedding.numpy() - STARTED, np.array(LEARNED) - STARTED
    assert (np.sign(moved) == np.sign(paper)).all()
    assert np.abs(moved - paper).max() < 0.3
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    assert right_of_eight(model) == 8


def test_inspect_draws_the_paths_of_the_papers_example(tmp_path):
    from matplotlib.image import imread

    ih0(LEARNED).save_pretrained(tmp_path / "model")
    sequences = [[0, 1, 2, 0], [2, 0, 1, 0]]  # of the eight: a panel takes a second
    report = inspect_model(tmp_path / "model", tmp_path / "out", ids=sequences)
    assert "trajectories.png" in report["pictures"]
    found = report["trajectories"]
    assert found["tokens"] == sequences
    np.testing.assert_allclose(found["landmarks"], LEARNED, rtol=1e-6)
    paths = np.array(found["paths"])
    assert paths.shape == (2, 5, 2)
    np.testing.assert_array_equal(paths[:, 0], 0)
    np.testing.assert_allclose(paths[0, -1], (-6.915, -6.739), atol=6e-4)
    inner = imread(tmp_path / "out" / "trajectories.png")[60:-60, 60:-60, :3].reshape(-1, 3)
    assert len(np.unique(inner, axis=0)) > 10
    # one pale ground for what lies nearest to each embedding
    _, counts = np.unique(inner, axis=0, return_counts=True)
    assert (counts > 0.1 * len(inner)).sum() >= 3


def test_trajectories_of_wider_models_are_projected_to_a_plane():
    model = core(torch.float64)
    found = model.model.trajectories(tokens(2, 5, vocab_size=9))
    assert found.paths.shape == (2, 6, 2)
    assert found.landmarks.shape == (9, 2)
    with torch.no_grad():
        table = model.model.embed_tokens(torch.arange(9))
    # no plane keeps more of the embeddings
    kept = torch.linalg.svdvals(table)[:2].square().sum()
    torch.testing.assert_close(found.landmarks.square().sum(), kept)
    assert build().model.trajectories(tokens(1, 3)) is None
    assert core(hidden_size=1).model.trajectories(tokens(1, 3, vocab_size=9)) is None


# --- G4: the read-out -------------------------------------------------------------------------


def test_the_logits_are_those_of_the_softmin_of_distances():
    got = softmin_logits(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    np.testing.assert_allclose(got, (0.873072, -1.048587, -3.313262), atol=5e-7)
    random = numbers(50, 9).abs() * 3
    np.testing.assert_allclose(
        softmin_logits(random), oracle.nearest_logits(random.numpy()), rtol=1e-12
    )


@pytest.mark.parametrize("d", [(0, 100, 100), (3, 3, 3), (0, 0, 1e4), (1e4, 0, 1e-3), (0, 1e-6, 2)])
def test_the_logits_and_their_slopes_stay_finite_where_the_softmin_does_not(d):
    d32 = torch.tensor(d, dtype=torch.float32, requires_grad=True)
    got = softmin_logits(d32)
    expected = oracle.nearest_logits(np.array(d, float))
    np.testing.assert_allclose(got.detach(), expected, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(got.sum(), d32)
    assert slope.isfinite().all()


@pytest.mark.parametrize("d", [(1, 2, 4), (1, 1, 4), (4, 1, 1), (3, 3, 3)])
def test_logit_gradients_match_the_formula_even_at_equal_distances(d):
    got = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    known, weights = got.detach().clone().requires_grad_(), numbers(3)
    others = torch.stack([known[[n for n in range(3) if n != m]] for m in range(3)])
    expected = -known - (-others).logsumexp(dim=1)
    (slope,) = torch.autograd.grad((expected * weights).sum(), known)
    (found,) = torch.autograd.grad((softmin_logits(got) * weights).sum(), got)
    torch.testing.assert_close(found, slope, rtol=0, atol=1e-12)


def test_an_output_on_an_embedding_has_a_finite_slope():
    model = core(torch.float32)
    y = model.lm_head.weight[2:3].detach().clone().requires_grad_()
    logits = model.lm_head(y)
    assert int(logits.argmax()) == 2
    assert torch.autograd.grad(logits.sum(), y)[0].isfinite().all()


def test_on_an_embedding_a_distance_is_smooth():
    """The root of squares alone has a slope of length 1 on either side, and none between them."""
    table, direction = numbers(3, 4), torch.tensor([0.6, 0.0, -0.8, 0.0], dtype=torch.float64)
    assert float(euclidean(table[:1], table)[0, 0]) == pytest.approx(1e-6, rel=1e-12)
    for away in (-1e-3, -1e-6, 0.0, 1e-8, 1e-6, 3e-6):
        y = (table[0] + away * direction).requires_grad_()
        distance = euclidean(y[None], table)[0, 0]
        (slope,) = torch.autograd.grad(distance, y)
        expected = np.hypot(away, 1e-6)
        # to what is left of the digits of y - table
        assert float(distance.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        np.testing.assert_allclose(slope, direction * (away / expected), atol=1e-8)


def test_small_distances_among_large_numbers_keep_their_digits():
    table = 100 + numbers(9, 16).float()
    y = table[:3] + 1e-2 * numbers(3, 16, seed=1).float()
    exact = (y.double()[:, None] - table.double()).square().sum(dim=-1).sqrt()
    assert relative(euclidean(y, table)[exact < 0.1], exact[exact < 0.1]) <= 1e-5


# --- G10: symmetries --------------------------------------------------------------------------


def test_b_is_absorbed_by_gates_readout_and_input():
    with_b, without = mixer_of(variant="input_matrix"), mixer_of()
    v, u = numbers(5, seed=3).exp(), numbers(2, 9, 5)
    with torch.no_grad():
        scale = with_b.B * v[:, None]
        without.lam.copy_(with_b.lam)
        without.w.copy_(with_b.w * scale)
        without.C.copy_(with_b.C * scale)
    assert relative(out(without, u / v), out(with_b, u)) <= 1e-13


def test_negating_permuting_and_separating_channels():
    mixer, u = mixer_of(output_filter=True), numbers(2, 9, 5)
    y = out(mixer, u)
    permuted, negated = copy.deepcopy(mixer), mixer_of()
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for parameter in permuted.parameters():
            parameter.copy_(parameter[:, order])
    assert relative(out(permuted, u), y) <= 1e-13
    y = out(negated, u)
    with torch.no_grad():
        negated.w.neg_()
    assert relative(out(negated, -u), -y) <= 1e-13
    changed = u.clone()
    changed[:, 4:, 3] += 1
    moved = (out(negated, changed) != out(negated, u)).any(dim=0)  # [L, D]
    assert moved[4:, 3].all()
    assert moved.sum() == 5


# --- G12: the ablations say what they are -----------------------------------------------------


def test_linear_feedback_outputs_zero_and_trains_embeddings_only():
    model = core(variant="linear_feedback")
    input_ids = tokens(4, 16, vocab_size=8)
    assert not model.model(input_ids).last_hidden_state.any()
    model(input_ids, labels=input_ids).loss.backward()
    mixer = model.model.layers[0].mixer
    assert all(not p.grad.any() for p in (mixer.lam, mixer.w, mixer.C))
    assert model.model.embed_tokens.weight.grad.any()


@pytest.mark.parametrize("variant", ["no_feedback", "token_gate"])
def test_without_feedback_the_output_is_affine_in_the_state(variant):
    mixer, u = mixer_of(variant=variant), numbers(1, 7, 5)
    one, two = numbers(1, 5, 3), numbers(1, 5, 3, seed=1)

    @torch.no_grad()
    def after(state):
        return mixer(u, LayerState({"ssm": state}))

    both = after(one) + after(two) - after(0 * one)
    assert relative(after(one + two), both) <= 1e-12
    feedback = mixer_of()
    before = [feedback(u, LayerState({"ssm": s})).detach() for s in (one, two, one + two, 0 * one)]
    assert relative(before[2], before[0] + before[1] - before[3]) > 1e-2


# --- G13: parameter counts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("coffee-induction", 512),
        ("coffee-induction-s6", 784),
        ("coffee-induction-token-gate", 784),
        ("coffee-induction-no-feedback", 512),
        ("coffee-induction-linear-feedback", 512),
        ("coffee-induction-input-matrix", 640),
        ("coffee-induction-8", 96),
        ("coffee-induction-4", 48),
        ("coffee-induction-2", 24),
        ("coffee-induction-1", 12),
        ("coffee-ih0", 12),
        ("coffee-mnist", 3385),
        ("coffee-mnist-filtered", 3585),
        ("coffee-mnist-s6", 5885),
        ("coffee-mnist-s6-16", 10085),
    ],
)
def test_a_preset_has_the_papers_parameter_count(preset, count):
    config = FAMILY.config(preset)
    images = "mnist" in preset
    model = (CoffeeForImageClassification if images else CoffeeForCausalLM)(config)
    assert trainable(model) == count
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    assert sum(p.numel() for group in groups for p in group["params"]) == count
    assert describe_family("coffee")["presets"][preset]["parameters"] == count


@pytest.mark.parametrize(
    ("preset", "layers", "width", "count"),
    [("coffee-125m", 24, 768, 125_577_984), ("coffee-350m", 48, 1024, 358_859_776)],
)
def test_a_language_model_has_the_block_of_its_formula(preset, layers, width, count):
    with torch.device("meta"):
        model = FAMILY.causal_lm_class(FAMILY.config(preset))
    inner, states, taps = 2 * width, 16, 4
    mixer = 2 * width * inner + inner * (taps + 1) + 3 * states * inner + inner + inner * width
    assert count == 50304 * width + layers * (mixer + width) + width
    assert trainable(model) == count


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"output_filter": True, "variant": "input_matrix"}, 6),
        ({"output_filter": True, "lambda_param": "clamp"}, 5),
        ({"variant": "s6"}, 2),
    ],
    ids=str,
)
def test_recurrence_parameters_form_one_group_without_weight_decay(fields, count):
    model = build(intermediate_size=8, **fields)
    groups = model.param_groups(lr=1e-3, weight_decay=0.1, groups={"ssm": {"lr": 1e-4}})
    (ssm,) = (group for group in groups if group.get("name") == "ssm")
    assert (ssm["lr"], ssm["weight_decay"]) == (1e-4, 0.0)
    own = {id(p) for layer in model.model.layers for p in layer.mixer.parameters(recurse=False)}
    assert {id(p) for p in ssm["params"]} == own
    assert len(own) == 2 * count


# --- the frozen row ---------------------------------------------------------------------------


def test_no_optimizer_sees_the_frozen_row_and_decay_does_not_move_it():
    model = core(torch.float32).train()
    assert model.get_input_embeddings().weight.shape == (8, 16)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    input_ids = tokens(4, 16, vocab_size=9)
    input_ids[:, 3] = 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.get_input_embeddings().weight.detach().clone()
    for _ in range(3):
        model(input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    embedding = model.get_input_embeddings()
    assert (embedding(torch.tensor([[8]])) == 1).all()
    assert not torch.equal(embedding.weight, before)
    assert "frozen=8" in repr(embedding)
    assert embedding.num_embeddings == 9


@pytest.mark.parametrize("frozen", [0, 4, 8])
def test_a_frozen_row_stands_in_its_place_among_the_others(frozen):
    embedding = core(frozen_embedding_index=frozen).get_input_embeddings()
    table = embedding(torch.arange(9))
    assert (table[frozen] == 1).all()
    others = [token for token in range(9) if token != frozen]
    assert torch.equal(table[others], embedding.weight)


def test_a_frozen_row_survives_its_file_and_a_change_of_the_vocabulary(tmp_path):
    model, input_ids = core(torch.float32), tokens(2, 9, vocab_size=9)
    with torch.no_grad():
        y = model.model(input_ids).last_hidden_state
    model.resize_token_embeddings(12, mean_resizing=False)
    assert model.config.vocab_size == model.vocab_size == 12
    assert model.get_input_embeddings().num_embeddings == 12
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(model.model(input_ids).last_hidden_state, y)
        logits = model(input_ids + 3).logits
    assert logits.shape[-1] == 12
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].shape == (11, 16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids + 3).logits, logits)
    assert (loaded.get_input_embeddings()(torch.tensor(8)) == 1).all()
    loaded.resize_token_embeddings(9)
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids).last_hidden_state, y)
    loaded.resize_token_embeddings(pad_to_multiple_of=8, mean_resizing=False)
    assert loaded.config.vocab_size == loaded(input_ids).logits.shape[-1] == 16
    with pytest.raises(ValueError, match=r"new_num_tokens must be above .* 8, got 8"):
        loaded.resize_token_embeddings(8)
    with pytest.raises(ValueError, match=r"1\.3"):
        loaded.resize_token_embeddings(9, pad_to_multiple_of=1.3)
    assert loaded.config.vocab_size == 16
    assert loaded.resize_token_embeddings() is loaded.get_input_embeddings()


# --- one table for reading in and out ----------------------------------------------------------

ADAPTERS = {
    "lora": {"target_modules": ["embed_tokens"]},
    "lora_on_the_weight": {"target_parameters": ["embed_tokens.weight"]},
    "retrained": {"target_modules": ["dt_proj"], "modules_to_save": ["embed_tokens"]},
    "retrained_read_out": {"target_modules": ["dt_proj"], "modules_to_save": ["lm_head"]},
    "some_tokens": {"target_modules": ["dt_proj"], "trainable_token_indices": [1, 2]},
}


@pytest.mark.filterwarnings("ignore:Model .* `tie_word_embeddings=True`")
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("frozen", [None, 8])
def test_adapters_of_the_papers_embedding_are_refused(adapter, frozen):
    """They would change what is read in and not what it is read by, or fail when merged."""
    from peft import LoraConfig, get_peft_model

    model = core(variant="token_gate", frozen_embedding_index=frozen)
    embedding, head = model.model.embed_tokens, model.lm_head
    config = LoraConfig(r=2, **ADAPTERS[adapter])
    name = "lm_head" if adapter == "retrained_read_out" else "embed_tokens"
    answer = f"^{name} must not be replaced with head='nearest_embedding'.* got [A-Z]"
    with pytest.raises(ValueError, match=answer):
        get_peft_model(model, config)
    assert (model.model.embed_tokens, model.lm_head) == (embedding, head)
    assert head.weight is embedding.weight


# peft calls transformers by a name that the next release drops
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("frozen", [None, 8])
def test_adapters_of_the_papers_other_layers_merge_to_equal_logits(frozen):
    from peft import LoraConfig, get_peft_model

    model = core(variant="token_gate", frozen_embedding_index=frozen)
    input_ids = tokens(2, 9, vocab_size=9)
    with torch.no_grad():
        plain = model(input_ids).logits
        config = LoraConfig(r=2, target_modules=["dt_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config)
        logits = adapted(input_ids).logits
        assert relative(logits, plain) > 1e-3
        assert relative(adapted.merge_and_unload()(input_ids).logits, logits) <= 1e-12


@pytest.mark.parametrize("frozen", [None, 8])
def test_the_papers_embedding_cannot_be_replaced_and_stays_tied(frozen, tmp_path):
    model, input_ids = core(frozen_embedding_index=frozen), tokens(2, 9, vocab_size=9)
    another = copy.deepcopy(model.get_input_embeddings())
    logits = model(input_ids).logits
    for holder in (model, model.model):
        with pytest.raises(
            ValueError, match=r"embed_tokens must not be replaced .* into embed_tokens\.weight"
        ):
            holder.set_input_embeddings(another)
    with pytest.raises(ValueError, match=r"lm_head must not be replaced .* got Linear"):
        model.set_output_embeddings(torch.nn.Linear(16, 9))
    assert torch.equal(model(input_ids).logits, logits)
    # the ways out
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(2 * another.weight)
    model.set_input_embeddings(model.get_input_embeddings())
    assert relative(model(input_ids).logits.detach(), judged(model, input_ids)) <= 1e-10
    model.resize_token_embeddings(11, mean_resizing=False)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert one.lm_head.weight is one.get_input_embeddings().weight
        assert relative(one(input_ids).logits.detach(), judged(one, input_ids)) <= 1e-10
    # a linear read-out is as free as everywhere
    free = build()
    free.set_input_embeddings(torch.nn.Embedding(61, 8))
    assert free.get_input_embeddings().num_embeddings == 61


# --- initial values ---------------------------------------------------------------------------


def parameters(**fields):
    torch.manual_seed(0)
    model = CoffeeForCausalLM(CoffeeConfig(**{**TINY, "hidden_size": 64, **fields}))
    return {name.rsplit("mixer.", 1)[-1]: p.detach() for name, p in model.named_parameters()}


def assert_normal(x, std):
    """Fail unless each column is N(0, std^2), by five standard errors."""
    std = torch.as_tensor(std).expand(x.shape[-1])
    assert (x.mean(dim=0).abs() <= 5 * std / len(x) ** 0.5).all()
    assert (x.std(dim=0) / std - 1).abs().max() <= 5 / (2 * len(x)) ** 0.5
    assert (x.abs() > 2 * std).any()


def test_a_language_model_has_time_scales_from_a_token_to_a_thousand():
    found = parameters(output_filter=True, lambda_max=1.5)
    lam = -1.5 * found["lam_raw"].sigmoid()
    rates = np.geomspace(1e-3, 0.9, 4)
    np.testing.assert_allclose(lam, np.broadcast_to(-1.5 * rates, (128, 4)), rtol=1e-5)
    rates = torch.tensor(rates, dtype=torch.float32)
    assert_normal(found["w"], rates.sqrt())
    assert_normal(found["C"], (rates / 4).sqrt())
    assert_normal(found["w_gamma"], (rates / 4).sqrt())
    assert (found["D"] == 1).all()
    bound = (128 * 2 * 2) ** -0.5
    assert 0.9 * bound < found["out_proj.weight"].abs().max() <= bound
    assert (parameters(variant="input_matrix")["B"] == 1).all()
    clamped = parameters(lambda_param="clamp")["lam"]
    np.testing.assert_allclose(clamped, np.broadcast_to(-rates, (128, 4)), rtol=1e-6)


def test_the_papers_module_starts_as_the_paper_says():
    paper = {"lambda_param": "clamp", "ssm_init": "paper", "output_filter": True}
    found = parameters(**paper, variant="input_matrix")
    assert not found["lam"].any()
    for name in ("w", "C", "B", "w_gamma"):
        assert_normal(found[name], 1.0)
    found = parameters(ssm_init="paper", variant="s6")
    np.testing.assert_allclose(-found["A_log"][5].exp(), (-1, -2, -3, -4), rtol=1e-6)
    assert_normal(found["x_proj.weight"], 1.0)
    assert_normal(found["dt_proj.weight"], 1.0)
    bound = 128**-0.5
    assert 0.9 * bound < parameters(variant="s6")["dt_proj.weight"].abs().max() <= bound


def test_integrator_init_is_ones_and_embedding_init_is_the_given_rows(tmp_path):
    fields = {"lambda_param": "clamp", "ssm_init": "integrator", "variant": "input_matrix"}
    found = parameters(**fields, output_filter=True)
    assert not found["lam"].any()
    assert all((found[name] == 1).all() for name in ("w", "C", "B", "w_gamma"))
    rows = numbers(9, 16).tolist()
    for frozen in (None, 4):
        kept = [row for token, row in enumerate(rows) if token != frozen]
        given = {**CORE, "frozen_embedding_index": frozen, "embedding_init": kept}
        model = CoffeeForCausalLM(CoffeeConfig(**given))
        np.testing.assert_allclose(model.model.embed_tokens.weight.detach(), kept, rtol=1e-6)
        # of another vocabulary they are no start, and a file has its own rows
        for size, start in ((None, kept), (12, "normal")):
            model.resize_token_embeddings(size, mean_resizing=False)
            model.save_pretrained(tmp_path)
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
            assert loaded.config.embedding_init == start
            assert loaded.config.vocab_size == (size or 9)
        for wrong, came in ((rows[:3], "3 of 16"), ([[1.0], *kept[1:]], "of 1 and 16"), ([], "0 ")):
            answer = rf"must hold {len(kept)} rows of 16 numbers, .* got .*{came}"
            with pytest.raises(ValueError, match=answer):
                CoffeeForCausalLM(CoffeeConfig(**{**given, "embedding_init": wrong}))
        endless = [kept[0], [float("nan")] * 16, *kept[2:]]
        with pytest.raises(ValueError, match=r"embedding_init must be finite, got \[nan, .* row 1"):
            CoffeeForCausalLM(CoffeeConfig(**{**given, "embedding_init": endless}))


def test_embeddings_start_orthonormal_as_far_as_they_can():
    for frozen in (None, 5):
        weight = CoffeeForCausalLM(
            CoffeeConfig(**{**CORE, "frozen_embedding_index": frozen})
        ).model.embed_tokens.weight
        np.testing.assert_allclose((weight @ weight.T).detach(), np.eye(len(weight)), atol=1e-6)
    wide = {**CORE, "vocab_size": 40, "frozen_embedding_index": None}
    weight = CoffeeForCausalLM(CoffeeConfig(**wide)).model.embed_tokens.weight.detach()
    for block in weight.split(16):
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-6)
    assert_normal(parameters(initializer_range=1.0)["model.embed_tokens.weight"], 1.0)


def test_a_missing_tensor_alone_is_initialised_on_loading(tmp_path):
    model = build(torch.float32, variant="input_matrix", output_filter=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(3 + torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for missing in [None, *(name for name in stored if "layers.0" not in name)]:
        partial = {name: value for name, value in stored.items() if name != missing}
        save_file(partial, file, metadata={"format": "pt"})
        loaded = dict(CoffeeForCausalLM.from_pretrained(tmp_path).named_parameters())
        for name, value in loaded.items():
            assert value.isfinite().all()
            assert torch.equal(value, stored[name]) == (name != missing), (name, missing)


# --- lambda's range ---------------------------------------------------------------------------


def test_projecting_brings_lambda_back_and_nothing_else():
    model = core(torch.float32, lambda_max=0.5)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.lam[0, :3] = torch.tensor([0.3, -0.7, -0.2])
        mixer.w.fill_(9)
    model.project_parameters()
    assert mixer.lam[0, :3].tolist() == pytest.approx([0.0, -0.5, -0.2])
    assert (mixer.w == 9).all()
    before = arrays(sigmoid := build())
    sigmoid.project_parameters()
    assert all(np.array_equal(x, before[name]) for name, x in arrays(sigmoid).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_projected_lambda_loads_in_every_dtype(dtype, tmp_path):
    model = core(torch.float32, lambda_max=0.1)  # no number of float32, nor of bfloat16
    with torch.no_grad():
        model.model.layers[0].mixer.lam.fill_(-5)
    model.project_parameters()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.model.layers[0].mixer.lam.max() == torch.tensor(-0.1)


@pytest.mark.parametrize("value", [0.25, -1.5, float("nan")])
def test_a_checkpoint_whose_lambda_left_its_range_is_refused(value, tmp_path):
    model = core(torch.float32)
    with torch.no_grad():
        model.model.layers[0].mixer.lam[2, 1] = value
    model.save_pretrained(tmp_path)
    for options in ({}, {"output_loading_info": True}):
        with pytest.raises(ValueError, match=r"lam of layer 0 must be in \[-1.0, 0\], got"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    if value == -1.5:  # of a model with another range
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "lambda_max": 2.0}))
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --- G17: it learns ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_papers_first_table_is_reached_within_its_one_epoch(tmp_path):
    """G17: 99 % within ten thousand steps of 512 sequences, 80 % after four."""
    AcceleratorState._reset_state(reset_partial_state=True)
    run = train(
        "coffee-induction",
        output_dir=tmp_path / "run",
        overrides=["train.epochs=1", "eval.every=4000"],
    )
    judged = {
        line["step"]: line["validation_exact_match"]
        for line in read_metrics(run / "metrics.jsonl")
        if "validation_exact_match" in line
    }
    assert judged[4000] >= 0.8
    test = json.loads((run / "run.json").read_text())["finished"]["test"]
    assert test["examples"] == 10_000
    assert test["exact_match"] >= 0.99


# --- G15, G16, G19 ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["coffee", "input_matrix", "no_feedback", "s6"])
def test_gates_of_huge_arguments_are_finite_forwards_and_backwards(variant):
    model = core(torch.float32, variant=variant)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        for name in ("w", "dt_proj"):
            part = getattr(mixer, name, None)
            if part is not None:
                getattr(part, "weight", part).mul_(3e4)
    input_ids = tokens(2, 40, vocab_size=9)
    output = model(input_ids, labels=input_ids)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_bfloat16_model_keeps_a_float32_recurrence():
    model = build(torch.bfloat16, output_filter=True)
    mixer = model.model.layers[0].mixer
    for name, parameter in mixer.named_parameters():
        kept = name in modeling.SSM_PARAMETERS
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    cache = model(tokens(1, 5), use_cache=True).cache
    assert cache.layers[0].states["ssm"].dtype == torch.float32
    assert cache.layers[0].states["ssm"].shape == (1, 16, 4)


# --- solvers ----------------------------------------------------------------------------------


def test_newton_gives_what_marching_gives_and_gives_up_where_it_is_told_to(caplog):
    input_ids = tokens(2, 33)
    model = build()
    with torch.no_grad():
        expected = model(input_ids).logits
        for solver, tolerance in (("march", 1e-6), ("newton", 1e-13)):
            model.config.solver, model.config.newton_tol = solver, tolerance
            got = model(input_ids).logits
            assert last_backend("feedback_scan solver") == solver
            assert relative(got, expected) <= 1e-10
        model.config.newton_tol = 1e-2
        coarse = model(input_ids).logits
        assert 1e-12 < relative(coarse, expected) < 0.1
        model.config.newton_tol, model.config.newton_iters = 1e-13, 1
        with caplog.at_level(logging.WARNING, logger="ssmzoo"):
            assert torch.equal(model(input_ids).logits, expected)
    assert "marches instead" in caplog.text
    assert last_backend("feedback_scan solver") == "march"


def test_the_benchmark_of_newtons_method_takes_the_lanes_of_a_trained_model(tmp_path, monkeypatch):
    benchmark = loaded_from(BENCHMARK, monkeypatch)
    core(torch.float32).save_pretrained(tmp_path / "core")
    model = build(torch.float32, hidden_size=64)
    model.save_pretrained(tmp_path / "lm")
    (bare,) = benchmark.trained(tmp_path / "core", 300)
    mixer = AutoModelForCausalLM.from_pretrained(tmp_path / "core").model.layers[0].mixer
    assert torch.equal(bare.lam, mixer.lam)
    assert torch.equal(bare.w, mixer.w)
    assert bare.u.shape == (1, 300, 16)
    assert len(bare.u[0].unique(dim=0)) == 7  # neither filler nor the frozen row
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "MOST_LANES", 64)
        layers = benchmark.trained(tmp_path / "lm", 5)
    assert [x.u.shape for x in layers] == [(1, 5, 16), (1, 5, 16)]  # of 128 channels of 4 lanes
    torch.testing.assert_close(layers[1].w, model.model.layers[1].mixer.w[::8])
    for name, value in (("GRID_LANES", [4]), ("GRID_LENGTHS", [8]), ("SECONDS", 0.0)):
        monkeypatch.setattr(benchmark, name, value)
    options = ["--lengths", "6", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["newton", *options, "--model", str(tmp_path / "core")])
    benchmark.main()
    (table,) = tmp_path.glob("newton*.csv")
    rows = [
        row for row in csv.DictReader(table.read_text().splitlines()) if row["regime"] == "trained"
    ]
    assert [(row["what"], row["length"], row["lanes"]) for row in rows] == [
        ("steps", "6", "128"),
        ("time", "6", "128"),
    ]
    assert float(rows[0]["median"]) <= float(rows[0]["max"]) <= 12
    assert float(rows[1]["newton_ms"]) > 0
    assert table.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("fields", [{"variant": "s6"}, None], ids=["s6", "nothing"])
def test_the_benchmark_of_newtons_method_refuses_what_has_no_lanes(fields, tmp_path, monkeypatch):
    benchmark = loaded_from(BENCHMARK, monkeypatch)
    if fields is not None:
        build(torch.float32, **fields).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["newton", "--model", str(tmp_path / "model")])
    answer = "no folder" if fields is None else "--model must be a COFFEE model with feedback"
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        benchmark.main()
    assert answer in said.getvalue()


# --- gauges and dynamics ----------------------------------------------------------------------


def slopes(mixer, u):
    """Gates and d x[t] / d x[t-1] by the oracle, [B, L, D, N] each."""
    lam, w, _, _ = (None if x is None else x.detach().numpy() for x in mixer.coefficients())
    drive = mixer._drive(u)
    drive = None if drive is None else drive.detach().numpy()
    kind = "linear" if mixer.config.variant == "linear_feedback" else "sigmoid"
    u = u.numpy()
    x = oracle.states(u, lam, w, drive=drive, kind=kind)
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
    gates, found = [], []
    for t in range(u.shape[1]):
        driven = None if drive is None else drive[:, t]
        gates.append(oracle.gate(before[:, t], w, driven, kind))
        found.append(oracle.derivatives(before[:, t], u[:, t], lam, w, driven, kind)["x"])
    return np.stack(gates, axis=1), np.stack(found, axis=1)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "s6"])
@pytest.mark.parametrize("at_once", [1, 100, 2**21])
def test_gauges_and_decay_are_those_of_the_recurrences_jacobian(variant, at_once, monkeypatch):
    monkeypatch.setattr(modeling, "_AT_ONCE", at_once)
    mixer, u = mixer_of(variant=variant), 6 * numbers(2, 17, 5)
    with torch.no_grad():
        if "w" in mixer._parameters:
            mixer.w.mul_(3)
        gauges = mixer.gauges(u)
        decay = mixer.dynamics(u).decay
    gate, slope = slopes(mixer, u)
    size = np.log(np.maximum(np.abs(slope), torch.finfo(torch.float32).tiny))
    assert float(gauges["largest_jacobian"]) == pytest.approx(np.abs(slope).max(), rel=1e-10)
    assert float(gauges["shut_gates"]) == pytest.approx((gate < 1e-3).mean(), abs=1e-7)
    growing = (size.mean(axis=1) > 0).mean()
    assert float(gauges["growing_lanes"]) == pytest.approx(growing)
    assert relative(decay, np.exp(size.mean(axis=(0, 1)))) <= 1e-10
    if variant == "coffee":
        assert 0 < float(gauges["shut_gates"]) < 1
        assert float(gauges["largest_jacobian"]) > 2


def test_s6_has_no_gauges_and_decays_by_its_steps():
    mixer, u = mixer_of(variant="s6"), numbers(2, 17, 5)
    assert mixer.gauges(u) == {}
    with torch.no_grad():
        decay = mixer.dynamics(u).decay
        steps = np.log1p(np.exp(mixer.dt_proj(u).numpy())).mean(axis=(0, 1))
    rates = np.exp(mixer.A_log.detach().numpy())
    np.testing.assert_allclose(rates, np.broadcast_to((1, 2, 3), (5, 3)), rtol=1e-6)
    assert relative(decay, np.exp(-steps[:, None] * rates)) <= 1e-10


@pytest.mark.parametrize("variant", ["coffee", "s6"])
def test_inspect_measures_kernels_of_gates_that_look_at_the_state(variant):
    model = build(variant=variant).model
    found = measure_layers(model, tokens(2, 24))
    for layer in found.layers:
        assert layer.source == "measured"
        assert layer.decay.shape == (16, 4)
        assert (layer.decay > 0).all()
    assert found.state_bytes == 2 * 16 * (4 + 3) * 8


# --- the other heads --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sequence", "token", "pair"])
def test_every_head_trains_and_survives_its_file(kind, tmp_path):
    cls = getattr(FAMILY, f"{kind}_classification_class")
    model = build(torch.float32, cls, num_labels=3).train()
    inputs = {"input_ids": tokens(2, 9)}
    if kind == "pair":
        inputs["pair_input_ids"] = tokens(2, 7, seed=1)
    labels = tokens(2, 9, vocab_size=3) if kind == "token" else torch.tensor([0, 2])
    model(**inputs, labels=labels).loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(cls.from_pretrained(tmp_path)(**inputs).logits, expected)


# --- images -----------------------------------------------------------------------------------

IMAGES = dict(FAMILY.presets["coffee-mnist"])


def classifier(dtype=torch.float64, **fields):
    return build(dtype, CoffeeForImageClassification, **{**IMAGES, **fields})


@pytest.mark.parametrize("fields", [{}, {"output_filter": True}, {"variant": "s6"}], ids=str)
@pytest.mark.parametrize("side", [25, 8])
def test_the_classifier_of_images_matches_the_oracle(fields, side):
    model, images = classifier(hidden_size=side, **fields), numbers(3, side, side)
    expected = oracle.image_logits(arrays(model), model.config.to_dict(), images.numpy())
    with torch.no_grad():
        assert relative(model(images).logits, expected) <= 1e-10
        assert torch.equal(model(images[:, None]).logits, model(images).logits)


def test_larger_images_are_cropped_and_the_loss_is_cross_entropy():
    model, images = classifier(), numbers(3, 28, 28)
    labels = torch.tensor([1, 0, 9])
    output = model(images, labels=labels)
    assert torch.equal(output.logits, model(images[:, 2:27, 2:27]).logits)
    loss = torch.nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss.double(), loss)
    flat = model(images, labels=labels, return_dict=False)
    assert torch.equal(flat[0], output.loss)
    assert torch.equal(flat[1], output.logits)


@pytest.mark.parametrize("side", [1, 4, 7, 12, 25])
def test_the_middle_is_the_one_that_the_task_cuts_out(side):
    model, images = classifier(hidden_size=side), numbers(3, 28, 28)
    cut = torch.from_numpy(turned(images.numpy(), np.zeros(3), side))
    assert torch.equal(model(images).logits, model(cut).logits)
    assert not torch.equal(model(images).logits, model(images.roll(1, 1)).logits)


def test_the_classifier_of_images_saves_loads_and_trains(tmp_path):
    digits = numbers(64, 8, 8, seed=5).float()
    labels = (digits.mean(dim=(1, 2)) > 0).long()
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(digits, labels, strict=True)]
    model = FAMILY.image_classification_class(
        FAMILY.config("coffee-mnist", hidden_size=8, num_labels=2, lambda_max=0.1)
    )
    with torch.no_grad():
        before = model(digits, labels=labels).loss
    options = TrainingArguments(
        tmp_path / "run",
        per_device_train_batch_size=16,
        max_steps=40,
        learning_rate=0.02,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, options, train_dataset=rows, callbacks=[ProjectParameters()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.eval().save_pretrained(tmp_path / "model")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert type(loaded) is CoffeeForImageClassification
    with torch.no_grad():
        output = loaded(digits, labels=labels)
        assert torch.equal(output.logits, model(digits).logits)
    assert output.loss < before - 0.1
    lam = torch.cat([scan.lam.detach() for scan in loaded.scans])
    assert lam.max() <= 0
    assert lam.min() >= torch.tensor(-0.1)
    low = AutoModelForImageClassification.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert {name.rsplit(".")[-1]: p.dtype for name, p in low.named_parameters()} == {
        "lam": torch.float32,
        "w": torch.float32,
        "C": torch.float32,
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("images", "kind", "answer"),
    [
        (torch.zeros(2, 24, 28), ValueError, r"at least hidden_size = 25, got \[2, 24, 28\]"),
        (torch.zeros(2, 3, 28, 28), ValueError, r"must have shape \[B, H, W\] or \[B, 1, H, W\]"),
        (torch.zeros(28, 28), ValueError, r"got \[28, 28\]"),
        (torch.zeros(2, 28, 28, dtype=torch.uint8), TypeError, "must be floating point, got"),
        ([[0.0]], TypeError, r"must be a tensor \[B, H, W\] or \[B, 1, H, W\], got list"),
    ],
    ids=["small", "colours", "single", "bytes", "list"],
)
def test_images_of_a_wrong_shape_or_kind_are_refused(images, kind, answer):
    with pytest.raises(kind, match=answer):
        classifier(torch.float32)(images)


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 2}, {"block": "gated"}, {"norm_type": "rms"}], ids=str
)
def test_a_classifier_of_images_has_nothing_but_recurrences(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"needs {name}=.* see the preset coffee-mnist"):
        classifier(**fields)


# --- what is no model -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"variant": "cofee"}, "variant"),
        ({"block": "bear"}, "block"),
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
        ({"state_size": -1}, "d_state must be at least 1, got -1"),
        ({"expand": 0}, "expand must be at least 1"),
        ({"d_conv": 0}, "d_conv must be at least 1"),
        ({"lambda_max": 0.0}, "lambda_max must be above 0 and at most 2"),
        ({"lambda_max": 2.1}, "lambda_max must be above 0 and at most 2"),
        ({"newton_iters": 0}, "newton_iters must be None or at least 1"),
        ({"newton_tol": 0.0}, "newton_tol must be None, or above 0 and below 1"),
        ({"variant": "s6", "output_filter": True}, "output_filter belongs to COFFEE's recurrence"),
        ({"variant": "s6", "solver": "newton"}, "needs variant='coffee' or 'input_matrix'"),
        ({"variant": "no_feedback", "solver": "newton"}, "got 'no_feedback'"),
        ({"ssm_init": "paper"}, "starts lambda at 0, which lambda_param='sigmoid' cannot be"),
        ({"ssm_init": "integrator"}, "starts lambda at 0, which lambda_param='sigmoid' cannot be"),
        (
            {"ssm_init": "integrator", "variant": "s6"},
            "starts COFFEE's recurrence, got variant='s6'",
        ),
        ({"embedding_init": "orthogonal"}, "embedding_init"),
        ({"embedding_init": [1.0, 2.0]}, "embedding_init"),
        ({**CORE, "tie_word_embeddings": False}, "tie_word_embeddings must be True.*got False"),
        ({**CORE, "vocab_size": 1}, "vocab_size must be at least 2"),
        ({**CORE, "frozen_embedding_index": 9}, r"must be None or in \[0, 8\], got 9"),
        ({**CORE, "frozen_embedding_index": -1}, r"must be None or in \[0, 8\], got -1"),
        ({"frozen_embedding_index": 3}, "needs head='nearest_embedding', got head='linear'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_invalid_fields_are_named(fields, answer):
    with pytest.raises((ValueError, StrictDataclassError), match=answer):
        CoffeeConfig(**fields)
