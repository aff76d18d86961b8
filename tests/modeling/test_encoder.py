"""Encoders and classifiers of images: the shared layer around any mixer, and what is around that.

That a model of both directions keeps padding, packing and batches apart is a check of the kit.
"""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from ssmzoo import load_family
from ssmzoo.analysis.doctor import examine_model
from ssmzoo.analysis.inspect import inspect_model
from ssmzoo.modeling import backbone, flip, flip_steps, mixer
from ssmzoo.modeling.compat import enable_gradient_checkpointing
from ssmzoo.modeling.layers import DropPath
from ssmzoo.modeling.packing import find_packing
from ssmzoo.publishing.hub import publish
from ssmzoo.tasks import load_task
from ssmzoo.testing import check
from ssmzoo.training.run import train

DSS, LONGHORN, S5 = (load_family(name) for name in ("dss", "longhorn", "s5"))
IMAGES = {"image_size": 8, "patch_size": 4, "num_labels": 10, "directions": "both-shared"}


def build(family=DSS, kind="image_classification", **fields):
    torch.manual_seed(0)
    fields = {**family.tiny, **(IMAGES if kind == "image_classification" else {}), **fields}
    return getattr(family, f"{kind}_class")(family.config(**fields)).eval()


# --- both directions ----------------------------------------------------------------------------


def test_each_packed_sequence_is_reversed_within_itself():
    x = torch.arange(6.0).view(1, 6, 1)
    packing = find_packing(1, 6, 0, None, None, None, torch.tensor([0, 3, 3, 4, 6]))
    assert flip(x, packing).flatten().tolist() == [2, 1, 0, 3, 5, 4]
    assert flip(x, None).flatten().tolist() == [5, 4, 3, 2, 1, 0]
    # each step is then that after its token, and the first 1
    assert flip_steps(x[..., 0], packing).flatten().tolist() == [1, 2, 1, 1, 1, 5]
    assert flip_steps(x[..., 0], None).flatten().tolist() == [1, 5, 4, 3, 2, 1]


@torch.no_grad()
def test_a_block_adds_the_mixers_reading_of_the_reversed_sequence():
    shared = build(kind="model", directions="both-shared", num_hidden_layers=1)
    separate = build(kind="model", directions="both-separate", num_hidden_layers=1)
    assert separate.num_parameters() > shared.num_parameters()
    ids = torch.arange(10).view(2, 5)
    for model in (shared, separate):
        (block,) = model.layers
        x = model.embed_tokens(ids)
        y = block.norm(x)
        other = block.mixer if block.reverse is None else block.reverse["mixer"]
        mixed = block.mixer(y) + other(y.flip(1)).flip(1)
        expected = model.norm(x + mixed)
        got = model(ids).last_hidden_state
        assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, packing: x.flip(1), "padding"),
        (lambda x, packing: x, "no token after"),
        (lambda x, packing: flip(x, packing) * (1 + 1e-6), "reversed outputs"),
    ],
    ids=["across sequences", "not at all", "and scaled"],
)
def test_the_kit_finds_a_block_that_reverses_wrongly(wrong, says):
    with mock.patch.object(mixer, "flip", wrong):
        (result,) = check(DSS, only=["bidirectional"]).results
    assert result.status == "failed"
    assert says in result.detail


def test_the_kit_finds_steps_that_are_reversed_as_tokens_are():
    irregular = replace(S5, tiny={**S5.tiny, "irregular_steps": True})
    for wrong, status in ((flip_steps, "passed"), (flip, "failed")):
        with mock.patch.object(backbone, "flip_steps", wrong):
            (result,) = check(irregular, only=["bidirectional"]).results
        assert result.status == status, result.detail
    assert "reversed outputs" in result.detail


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("sequence_classification", AutoModelForSequenceClassification),
        ("token_classification", AutoModelForTokenClassification),
        ("image_classification", AutoModelForImageClassification),
    ],
)
@torch.no_grad()
def test_auto_classes_load_encoders(kind, auto, tmp_path):
    model = build(kind=kind, directions="both-separate", num_labels=4)
    model.save_pretrained(tmp_path)
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    given = torch.rand(2, 3, 8, 8) if kind[0] == "i" else torch.arange(12).view(2, 6)
    assert torch.equal(loaded(given).logits, model(given).logits)


@pytest.mark.parametrize("family", [DSS, LONGHORN], ids=["by the block", "by the mixer"])
def test_an_encoder_trains_under_gradient_checkpointing_as_without(family):
    slopes = []
    for checkpointing in (False, True):
        model = build(family, directions="both-separate").train()
        if checkpointing:
            enable_gradient_checkpointing(model)
        model(torch.full((2, 3, 8, 8), 0.3), labels=torch.tensor([1, 2])).loss.backward()
        slopes.append([p.grad for p in model.parameters()])
    for plain, again in zip(*slopes, strict=True):
        assert torch.equal(plain, again)
        assert plain.isfinite().all()


# --- drop path ----------------------------------------------------------------------------------


def test_drop_path_drops_whole_branches_of_sequences_and_keeps_the_mean():
    layer, x = DropPath(0.25), torch.ones(4000, 3, 2)
    dropped = layer(x)
    firsts = dropped[:, 0, 0]
    assert torch.equal(dropped, firsts[:, None, None].expand_as(x))
    assert set(firsts.tolist()) == {0.0, float(np.float32(1) / np.float32(0.75))}
    # a share of 4,000 draws is off by 0.007 at one standard deviation
    assert float((firsts == 0).float().mean()) == pytest.approx(0.25, abs=5 * 0.007)
    assert torch.equal(layer.eval()(x), x)


def test_drop_path_draws_for_every_packed_sequence():
    packing = find_packing(1, 6, 0, None, None, None, torch.tensor([0, 2, 3, 6]))
    seen = {tuple((DropPath(0.5)(torch.ones(1, 6, 1), packing)[0, :, 0] > 0).tolist())
            for _ in range(200)}  # fmt: skip
    assert len(seen) == 8
    assert all(a == b and d == e == f for a, b, _, d, e, f in seen)


def test_the_rate_rises_from_the_first_layer_to_the_last():
    model = build(num_hidden_layers=5, drop_path_rate=0.4)
    rates = [layer.drop_path.p for layer in model.model.layers]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert build(num_hidden_layers=1, drop_path_rate=0.4).model.layers[0].drop_path.p == 0


# --- images -------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_classifier_reads_the_class_token_or_the_mean():
    pixels = torch.rand(2, 3, 8, 8)
    for pooling, pooled in (("last", lambda h: h[:, 2]), ("mean", lambda h: h.mean(dim=1))):
        model = build(pooling=pooling)
        hidden = model.model(pixel_values=pixels).last_hidden_state
        assert hidden.shape[:2] == (2, 5)
        assert torch.equal(model(pixels).logits, model.score(pooled(hidden)))


def test_positions_and_class_token_do_not_decay():
    model = build()
    groups = model.param_groups(lr=1.0, weight_decay=0.1)
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    layer = model.model.embed_images
    assert decays[layer.positions] == decays[layer.class_token] == 0
    assert decays[layer.projection.weight] == 0.1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"patch_size": 3}, "patch_size must divide image_size, got 3 and 8"),
        ({"patch_size": 0}, "patch_size"),
        ({"num_channels": 0}, "num_channels"),
        ({"image_size": 0}, "image_size"),
        ({"input_channels": 2}, "image_size and input_channels"),
        ({"drop_path_rate": 1.0}, "drop_path_rate"),
        ({"drop_path_rate": 0.1, "residual": False}, "drop_path_rate must be 0 where residual"),
        ({"directions": "forward"}, "set directions to read in both, or pooling='mean'"),
        ({"problem_type": "regression"}, "problem_type must be None or 'single_label_classi"),
        ({"directions": "backward"}, "directions"),
        ({"image_size": None}, "needs image_size"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(fields, named):
    with pytest.raises((ValueError, StrictDataclassError), match=named):
        build(**fields)


def test_what_does_not_fit_a_model_is_refused_in_one_line():
    images, texts = build(), build(kind="sequence_classification")
    pixels, ids = torch.rand(1, 3, 8, 8), torch.ones(1, 4, dtype=torch.long)
    for error, named, call in (
        (ValueError, r"pixel_values .* \[B, 3, 8, 8\], got \[1, 3, 9, 8\]",
         lambda: images(torch.rand(1, 3, 9, 8))),
        (ValueError, r"pixel_values .* got \[1, 1, 8, 8\]", lambda: images(pixels[:, :1])),
        (ValueError, r"pixel_values .* got \[3, 8, 8\]", lambda: images(pixels[0])),
        (TypeError, "pixel_values .* got torch.uint8", lambda: images(pixels.byte())),
        (TypeError, "pixel_values .* got a ndarray", lambda: images(pixels.numpy())),
        (ValueError, r"labels must be in \[0, 9\], or -100, got 10",
         lambda: images(pixels, labels=torch.tensor([10]))),
        (ValueError, "takes pixel_values, got input_ids", lambda: images.model(ids)),
        (ValueError, "takes input_ids, got pixel_values", lambda: texts.model(pixel_values=pixels)),
        (ValueError, "pixel_values and inputs_embeds",
         lambda: images.model(pixel_values=pixels, inputs_embeds=torch.rand(1, 5, 32))),
        (ValueError, "pixel_values and inputs_embeds, got input_ids and pixel_values",
         lambda: images.model(ids, pixel_values=pixels)),
        (TypeError, "no argument 'attention_mask'",
         lambda: images(pixels, attention_mask=torch.ones(1, 5))),
        (TypeError, "no argument 'use_cache'", lambda: images(pixels, use_cache=True)),
        (ValueError, "takes images", lambda: build(kind="causal_lm", image_size=8, patch_size=4)),
        (ValueError, "bidirectional", lambda: build(kind="causal_lm", directions="both-shared")),
        (ValueError, "bidirectional",
         lambda: images.model(pixel_values=pixels, use_cache=True)),
    ):  # fmt: skip
        with pytest.raises(error, match=named) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_inspect_measures_an_encoder_and_like_the_doctor_refuses_a_model_of_images(tmp_path):
    build(kind="model", directions="both-separate").save_pretrained(tmp_path / "encoder")
    build().save_pretrained(tmp_path / "images")
    report = inspect_model(tmp_path / "encoder", tmp_path / "seen", length=16, sequences=1)
    assert report["layers"]
    for call in (
        lambda: inspect_model(tmp_path / "images", tmp_path / "unseen"),
        lambda: examine_model(tmp_path / "images"),
    ):
        with pytest.raises(ValueError, match=r"^model must be .*takes images; name another"):
            call()


def test_trainer_trains_on_images(tmp_path):
    batch = load_task("digits", "train", 0, rgb=True).batch(range(16))
    rows = [{"pixel_values": torch.from_numpy(x), "labels": int(y)}
            for x, y in zip(batch.inputs, batch.labels, strict=True)]  # fmt: skip
    model = build(LONGHORN)
    before = float(model(**_stacked(rows)).loss.detach())
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=16, max_steps=8, learning_rate=1e-2, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    assert trainer.predict(rows).predictions.shape == (16, 10)


def _stacked(rows):
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


# --- from a recipe to a stranger's machine ------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the recipe of digits, cut short."""
    small = ["model.config.hidden_size=16", "model.config.num_hidden_layers=2", "train.epochs=3"]
    return train("vil-digits", output_dir=tmp_path_factory.mktemp("vil") / "run", overrides=small)


@pytest.fixture(scope="module")
def digits():
    """The first test digits: what the task makes of them, and as a user has them."""
    batch = load_task("digits", "test", 0, rgb=True).batch(range(40))
    grey = (batch.inputs[:, 0] * 255).round().astype(np.uint8)
    return batch, [Image.fromarray(image) for image in grey]


@pytest.mark.xdist_group("forks")  # as all that use the run
def test_a_pipeline_says_what_the_run_measured(run, digits):
    batch, images = digits
    said = pipeline("image-classification", model=str(run / "model"))(images, top_k=1)
    model = AutoModelForImageClassification.from_pretrained(run / "model")
    processor = AutoImageProcessor.from_pretrained(run / "model")
    with torch.no_grad():
        expected = model(torch.from_numpy(batch.inputs)).logits
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        # a pixel of 16 levels was rounded to one of 256
        assert (pixels - torch.from_numpy(batch.inputs)).abs().max() <= 0.5 / 255 + 1e-6
        logits = model(pixels).logits
    best = [int(answer[0]["label"]) for answer in said]  # a class has the name of its digit
    assert best == logits.argmax(-1).tolist()
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95
    facts = json.loads((run / "run.json").read_text())["finished"]
    assert facts["test"]["accuracy"] > 0.3


@pytest.mark.xdist_group("forks")
def test_the_processor_makes_of_any_picture_what_the_model_takes(run):
    say = pipeline("image-classification", model=str(run / "model"))
    rng = np.random.default_rng(0)
    for shape in ((40, 30, 3), (5, 9), (8, 8, 4)):
        picture = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
        assert len(say(picture, top_k=3)) == 3


def test_a_recipe_of_another_image_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"image_size must be the task's, \(3, 8\), got \(3, 16\)"):
        train("vil-digits", output_dir=tmp_path / "run", overrides=["model.config.image_size=16"])
    with pytest.raises(ValueError, match=r"task's, \(1, 8\), got \(3, 8\)"):
        train("vit-digits", output_dir=tmp_path / "run", overrides=["data.task_args.rgb=false"])


ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ssmzoo", "ssmzoo_kernels", "ssmzoo_longhorn", "triton"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert AutoImageProcessor.from_pretrained(sys.argv[1])
pixels = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
with torch.no_grad():
    torch.save(model(pixels).logits, sys.argv[2])
"""


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_a_published_classifier_of_images_loads_where_nothing_of_ours_is(run, forks, tmp_path):
    (run / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# ViL\n")
    publish(run / "model", str(tmp_path / "public"))
    done = forks.run(ALONE, str(tmp_path / "public"), str(tmp_path / "logits.pt"))
    assert done.status == 0, done.log[-2000:]
    model = AutoModelForImageClassification.from_pretrained(run / "model")
    pixels = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(pixels).logits
    got = torch.load(tmp_path / "logits.pt")
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert isinstance(model.score, nn.Linear)
