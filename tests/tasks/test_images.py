"""MNIST and pictures on stand-ins that the tests write, and the digits of scikit-learn."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoImageProcessor

from ssmzoo.family import load_family
from ssmzoo.tasks import load_task
from ssmzoo.tasks.mnist import turned

SIZES = {"train": 24, "test": 6}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()


def stand_in(folder, *, side=28, labels=range(10)):
    """Write images and labels as MNIST has them, and return the folder and the pixels."""
    rng = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    folder.mkdir()
    pixels = {}
    for split, count in SIZES.items():
        pixels[split] = rng.integers(0, 256, size=(count, side, side), dtype=np.uint8)
        columns = {"image": list(pixels[split]), "label": [labels[i % 10] for i in range(count)]}
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(folder / f"{split}-0.parquet")
    return str(folder), pixels


@pytest.fixture
def mnist(tmp_path):
    return stand_in(tmp_path / "mnist")


def test_mnist_is_the_middle_of_each_image_from_0_to_1(mnist):
    folder, pixels = mnist
    task = load_task("mnist", "test", 0, data=folder)
    assert (task.kind, task.objective, task.num_labels) == ("images", "classification", 10)
    assert (task.vocab_size, task.input_channels) == (None, None)
    assert not task.fresh
    batch = task.batch(range(6))
    assert batch.inputs.dtype == np.float32
    # torchvision's centre of 25 in 28 begins at 2
    assert np.allclose(batch.inputs * 255, pixels["test"][:, None, 2:27, 2:27], atol=1e-4)
    assert batch.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert (batch.lengths == 625).all()


def test_mnist_holds_out_the_same_training_images_whatever_the_seed(mnist):
    folder, pixels = mnist
    parts = {}
    for split, count in (("train", 20), ("validation", 4)):
        for seed in (0, 1):
            task = load_task("mnist", split, seed, data=folder, rotation=0, num_validation=4)
            assert len(task) == count
            inputs = task.batch(range(count)).inputs
            images = {image.round(3).tobytes() for image in inputs}
            assert parts.setdefault(split, images) == images
    whole = (pixels["train"][:, 2:27, 2:27] / 255).astype(np.float32).round(3)
    assert parts["train"] | parts["validation"] == {image.tobytes() for image in whole}
    assert not parts["train"] & parts["validation"]


def test_training_images_are_turned_anew_every_epoch_and_no_others_are(mnist):
    folder, _ = mnist
    arguments = {"data": folder, "num_validation": 4}
    train = load_task("mnist", "train", 3, **arguments)
    assert train.fresh
    one, two = train.batch(range(20), 1), train.batch(range(20), 2)
    assert (one.labels == two.labels).all()
    changed = (one.inputs != two.inputs).reshape(20, -1).any(axis=1)
    assert changed.mean() > 0.5  # below two degrees no pixel moves
    some = np.array([7, 0, 7])
    assert (load_task("mnist", "train", 3, **arguments).batch(some, 1).inputs
            == one.inputs[some]).all()  # fmt: skip
    other = load_task("mnist", "train", 4, **arguments).batch(range(20), 1)
    assert (other.inputs != one.inputs).any()
    plain = load_task("mnist", "train", 3, rotation=0, **arguments)
    assert not plain.fresh
    assert (plain.batch([5], 1).inputs == plain.batch([5], 2).inputs).all()
    for split in ("validation", "test"):
        task = load_task("mnist", split, 3, **arguments)
        assert not task.fresh
        assert (task.batch([1], 1).inputs == task.batch([1], 2).inputs).all()


def made_by_the_processor(task, images, folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(task.processor))
    processor = AutoImageProcessor.from_pretrained(folder)
    return processor([Image.fromarray(x) for x in images], return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("crop", [28, 27, 26, 24, 23, 2])
def test_mnist_is_what_the_image_processor_makes_of_it(crop, mnist, tmp_path):
    folder, pixels = mnist
    task = load_task("mnist", "test", 0, data=folder, crop=crop)
    found = made_by_the_processor(task, pixels["test"], tmp_path).numpy()
    assert found.shape == (6, 1, crop, crop)
    assert np.abs(found - task.batch(range(6)).inputs).max() <= 1e-6


@pytest.mark.parametrize("crop", [25, 21, 1])
def test_coffee_cuts_what_the_image_processor_cannot_cut_as_the_task(crop, mnist, tmp_path):
    folder, pixels = mnist
    task = load_task("mnist", "test", 0, data=folder, crop=crop)
    family = load_family("coffee")
    config = family.config_class(**{**family.presets["coffee-mnist"], "hidden_size": crop})
    model = family.image_classification_class(config).eval()
    found = made_by_the_processor(task, pixels["test"], tmp_path)
    wanted = torch.from_numpy(task.batch(range(6)).inputs)
    with torch.no_grad():
        assert torch.allclose(model(found).logits, model(wanted).logits, atol=1e-6)
    start = round((28 - crop) / 2)
    window = slice(start, start + crop)
    assert (found[:, :, window, window] - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("crop", [28, 25, 1])
def test_turning_takes_the_nearest_pixel_as_torch_does(crop):
    rng = np.random.default_rng(1)
    pixels = rng.integers(1, 256, size=(40, 28, 28), dtype=np.uint8)
    degrees = np.concatenate([rng.uniform(-5, 5, size=30), rng.uniform(-180, 180, size=10)])
    angle = torch.from_numpy(np.deg2rad(degrees))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    matrix = torch.stack([cos, sin, zero, -sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, [40, 1, 28, 28], align_corners=False)
    images = torch.from_numpy(pixels).double()[:, None]
    exact = F.grid_sample(images, grid, mode="nearest", align_corners=False)[:, 0].numpy()
    start = round((28 - crop) / 2)
    window = slice(start, start + crop)
    found = turned(pixels, degrees, crop)
    assert found.dtype == np.uint8
    assert (found == exact[:, window, window]).all()
    assert (turned(pixels, np.zeros(40), crop) == pixels[:, window, window]).all()
    if crop == 28:
        assert (found[30:] == 0).any()  # from outside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop": 29}, "crop must be between 1 and 28, got 29"),
        ({"rotation": -1.0}, r"rotation must be between 0 and 180 degrees, got -1\.0"),
        ({"num_validation": 24}, "num_validation must hold out some of the 24 .*, got 24"),
        (
            {"num_validation": 0},
            "num_validation must hold out some of the 24 training examples, not all, got 0",
        ),
    ],
)
def test_mnist_refuses_what_is_out_of_range(mnist, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_task("mnist", "train", 0, data=mnist[0], **arguments)


def test_mnist_refuses_other_images_and_labels(tmp_path):
    large, _ = stand_in(tmp_path / "large", side=30)
    with pytest.raises(ValueError, match=r"images of .*large' must be 28 by 28, got \(30, 30\)"):
        load_task("mnist", "test", 0, data=large)
    letters, _ = stand_in(tmp_path / "letters", labels=range(5, 15))
    with pytest.raises(ValueError, match=r"column 'label' of .*letters' must hold classes 0 to 9"):
        load_task("mnist", "test", 0, data=letters)


def test_digits_are_scikit_learns_in_three_fixed_parts():
    from sklearn.datasets import load_digits

    whole, labels = load_digits(return_X_y=True)
    found = Counter()
    for split, count in (("train", 1197), ("validation", 300), ("test", 300)):
        task = load_task("digits", split, 0)
        assert (task.kind, task.num_labels) == ("images", 10)
        assert len(task) == count
        batch = task.batch(range(count))
        assert batch.inputs.shape == (count, 1, 8, 8)
        assert (batch.inputs.min(), batch.inputs.max()) == (0, 1)
        assert np.bincount(batch.labels, minlength=10).min() >= 0.06 * count
        pairs = zip(batch.inputs.reshape(count, -1) * 16, batch.labels, strict=True)
        found.update((image.astype(int).tobytes(), int(label)) for image, label in pairs)
    expected = Counter(
        (image.astype(int).tobytes(), int(label))
        for image, label in zip(whole, labels, strict=True)
    )
    assert found == expected


def test_digits_are_read_pixel_by_pixel():
    images, rows = (
        load_task("digits", "test", 0, pixels=x).batch(range(300)) for x in (False, True)
    )
    assert (rows.inputs - 1 == images.inputs.reshape(300, 64) * 16).all()
    assert (rows.labels == images.labels).all()
    task = load_task("digits", "train", 0, pixels=True)
    assert (task.kind, task.objective, task.vocab_size) == ("tokens", "classification", 18)
    assert (len(task), task.num_labels) == (1197, 10)
    with pytest.raises(ValueError, match="rgb and pixels"):
        load_task("digits", "train", 0, pixels=True, rgb=True)


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(RuntimeError, match=r"pip install 'ssmzoo\[digits\]'"):
        load_task("digits", "train", 0)


# --- any pictures -------------------------------------------------------------------------------


def gallery(folder, *, count=8, labels=None, classes=3):
    """Write pictures of several sizes and modes with a column of classes."""
    rng = np.random.default_rng(0)
    label = datasets.ClassLabel(num_classes=classes) if classes else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    shapes = [(12, 20, 3), (16, 16), (30, 13, 3), (9, 9, 3)]
    folder.mkdir()
    pictures = {}
    for split in ("train", "test"):
        pixels = [rng.integers(0, 256, shapes[i % 4], np.uint8) for i in range(count)]
        pictures[split] = [Image.fromarray(x) for x in pixels]
        columns = {"image": pictures[split], "label": labels or [i % 3 for i in range(count)]}
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(folder / f"{split}-0.parquet")
    return str(folder), pictures


FEW = {"size": 8, "num_validation": 3}


@pytest.mark.parametrize("resize", [8, 11])
def test_pictures_are_what_the_image_processor_makes_of_them(tmp_path, resize):
    folder, pictures = gallery(tmp_path / "gallery")
    task = load_task("pictures", "test", 0, data=folder, resize=resize, **FEW)
    assert (task.kind, task.num_labels, task.image_shape) == ("images", 3, (3, 8, 8))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(task.processor))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    expected = processor(pictures["test"], return_tensors="pt")["pixel_values"].numpy()
    batch = task.batch(range(8))
    assert batch.inputs.shape == (8, 3, 8, 8)
    assert np.abs(batch.inputs - expected).max() <= 1e-5
    assert batch.labels.tolist() == [i % 3 for i in range(8)]


def test_training_pictures_are_cut_and_mirrored_anew_every_epoch(tmp_path):
    folder, _ = gallery(tmp_path / "gallery")
    train = load_task("pictures", "train", 0, data=folder, **FEW)
    assert (len(train), train.fresh) == (5, True)
    one, again, two = (train.batch(range(5), epoch).inputs for epoch in (1, 1, 2))
    assert (one == again).all()
    assert (one != two).reshape(5, -1).any(axis=1).all()
    assert (train.batch([3], 1).inputs[0] == one[3]).all()
    plain = load_task("pictures", "train", 0, data=folder, crop=False, mirror=False, **FEW)
    assert not plain.fresh
    straight = plain.batch(range(5), 1).inputs
    only = load_task("pictures", "train", 0, data=folder, crop=False, **FEW)
    turned_ones = [only.batch(range(5), epoch).inputs for epoch in range(20)]
    for place, image in enumerate(straight):
        seen = {x[place].tobytes() for x in turned_ones}
        assert seen == {image.tobytes(), image[:, :, ::-1].tobytes()}
    held_out = load_task("pictures", "validation", 0, data=folder, **FEW)
    assert (len(held_out), held_out.fresh) == (3, False)
    assert (held_out.batch([1], 1).inputs == held_out.batch([1], 2).inputs).all()


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        ({}, {"size": 0}, "size must be at least 1, got 0"),
        ({}, {"resize": 7}, "resize must be at least 8, got 7"),
        ({}, {"num_validation": 8}, "num_validation must hold out some of the 8"),
        ({}, {"mean": [0.5]}, "mean and std > 0 must be three numbers"),
        ({}, {"std": [1.0, 0.0, 1.0]}, "mean and std > 0 must be three numbers"),
        ({"classes": 0, "labels": [0, 1, 2, -1] * 2}, {}, "must hold classes 0 to 2, got -1"),
    ],
)
def test_pictures_refuse_what_is_out_of_range(tmp_path, made, arguments, message):
    folder, _ = gallery(tmp_path / "gallery", **made)
    with pytest.raises(ValueError, match=message):
        load_task("pictures", "train", 0, data=folder, **{**FEW, **arguments})


def test_a_test_label_that_training_lacks_and_a_damaged_picture_are_named(tmp_path):
    folder, _ = gallery(tmp_path / "gallery", classes=0)
    other, _ = gallery(tmp_path / "other", classes=0, labels=[0, 1, 2, 5] * 2)
    shutil.copy(Path(other, "test-0.parquet"), folder)
    with pytest.raises(ValueError, match="must hold classes 0 to 2, got 5"):
        load_task("pictures", "test", 0, data=folder, **FEW)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    broken = {"image": [{"bytes": b"no picture", "path": None}] * 4, "label": [0, 1, 0, 1]}
    (tmp_path / "broken").mkdir()
    for split in ("train", "test"):
        rows = datasets.Dataset.from_dict(broken, features=features)
        rows.to_parquet(tmp_path / "broken" / f"{split}-0.parquet")
    task = load_task("pictures", "test", 0, data=str(tmp_path / "broken"), **FEW)
    with pytest.raises(ValueError, match=r"picture 2 of the test split of .* is damaged"):
        task.batch([2])
