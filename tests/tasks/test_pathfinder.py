"""Pathfinder by tracing: the ink between the discs decides the label."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

from ssmzoo.tasks import load_task, pathfinder, pathfinder_images

SIZES = {
    32: {"gap": (1.0,), "length": 2.0, "thick": 0.5, "disc": 1.5, "near": 7.0, "others": (5, 4)},
    128: {"gap": (2.0, 3.0), "length": 5.0, "thick": 1.5, "disc": 3.0, "near": 20.0,
          "others": (8, 4)},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder, "_CANDIDATES", 64)
        yield


@pytest.fixture(scope="module", params=[32, 128])
def drawn(request):
    count = 50 if request.param == 32 else 12
    return request.param, pathfinder_images(count, resolution=request.param, seed=4)


def points(segments, steps=21):
    """Return points along segments [..., 4], as [..., steps, 2]."""
    at = np.linspace(0, 1, steps)[:, None]
    return segments[..., None, :2] * (1 - at) + segments[..., None, 2:] * at


def joined(curve):
    """Return a curve's dashes with the gaps between them closed."""
    gaps = np.concatenate([curve[:-1, 2:], curve[1:, :2]], axis=1)
    return np.concatenate([curve, gaps])


def reached(curves, start, fine=4):
    """Return the places that ink reaches from a place, on a grid ``fine`` times as fine."""
    ink = {tuple(p) for p in np.floor(points(joined_all(curves)) * fine).astype(int).reshape(-1, 2)}
    here = tuple(np.floor(start * fine).astype(int))
    assert here in ink
    found, edge = {here}, [here]
    while edge:
        x, y = edge.pop()
        for near in ((x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)):
            if near in ink and near not in found:
                found.add(near)
                edge.append(near)
    return found


def joined_all(curves):
    return np.concatenate([joined(curve) for curve in curves])


def test_the_discs_are_connected_by_ink_exactly_where_the_label_says_so(drawn):
    _, made = drawn
    for i, label in enumerate(made.labels):
        curves = [*made.curves[i], *made.distractors[i]]
        first, second = made.discs[i].astype(np.float64)
        found = reached(curves, first)
        assert (tuple(np.floor(second * 4).astype(int)) in found) == bool(label), i


def test_discs_stand_at_the_beginning_of_one_curve_and_at_an_end(drawn):
    _, made = drawn
    for curves, discs, label in zip(made.curves, made.discs, made.labels, strict=True):
        begins = [np.allclose(discs[0], curve[0, :2]) for curve in curves]
        ends = [np.allclose(discs[1], curve[-1, 2:]) for curve in curves]
        assert sum(begins) == sum(ends) == 1
        assert (begins == ends) == bool(label)


def test_dashes_have_their_length_and_gap_and_keep_their_distance(drawn):
    size, made = drawn
    rule = SIZES[size]
    least = min(rule["gap"]) + rule["thick"]
    assert made.curves.shape[1:] == (2, 14, 4)
    assert made.distractors.shape[1:] == (*rule["others"], 4)
    for curves, others in zip(made.curves, made.distractors, strict=True):
        every = [*curves.astype(np.float64), *others.astype(np.float64)]
        dashes = np.concatenate(every)
        owner = np.repeat(np.arange(len(every)), [len(curve) for curve in every])
        number = np.concatenate([np.arange(len(curve)) for curve in every])
        length = np.hypot(dashes[:, 2] - dashes[:, 0], dashes[:, 3] - dashes[:, 1])
        assert np.allclose(length, rule["length"], atol=1e-4)
        places = points(dashes, 11)
        assert (places >= 1 - 1e-4).all()
        assert (places <= size - 1 + 1e-4).all()
        flat, count = places.reshape(-1, 2), len(dashes)
        squares = (flat**2).sum(axis=1)
        between = squares[:, None] + squares - 2 * flat @ flat.T
        nearest = between.reshape(count, 11, count, 11).min(axis=(1, 3)).clip(0) ** 0.5
        follows = (owner[:, None] == owner) & (np.abs(number[:, None] - number) <= 1)
        # the free places are looked up on a grid of half pixels
        assert nearest[~follows].min() > least - 0.75
        for curve in every:
            gap = np.hypot(*(curve[1:, :2] - curve[:-1, 2:]).T)
            assert (gap <= max(rule["gap"]) + 1e-4).all()
            assert (gap >= min(rule["gap"]) * np.cos(np.pi / 4) - 1e-4).all()
    seeds = made.curves[:, :, 0]
    middles = (seeds[..., :2] + seeds[..., 2:]) / 2
    assert np.allclose(np.hypot(*(middles[:, 0] - middles[:, 1]).T), rule["near"], atol=1e-3)


def test_pixels_show_the_discs_the_dashes_and_nothing_else(drawn):
    size, made = drawn
    rule = SIZES[size]
    assert made.images.shape[1:] == (size, size)
    assert made.images.dtype == np.uint8
    centres = np.stack(np.meshgrid(*[np.arange(size) + 0.5] * 2), axis=-1)  # [y, x] -> (x, y)
    for i in range(12 if size == 32 else 3):
        dashes = np.concatenate([made.curves[i].reshape(-1, 4), made.distractors[i].reshape(-1, 4)])
        places = points(dashes.astype(np.float64), 11).reshape(-1, 2)
        away, _ = cKDTree(places).query(centres)
        discs = made.discs[i].astype(np.float64)
        from_disc = np.sqrt(((centres[:, :, None] - discs) ** 2).sum(axis=3).min(axis=2))
        image = made.images[i].astype(int)
        assert (image[from_disc < rule["disc"] - 0.75] > 230).all()
        # Lanczos rings faintly up to three pixels away
        assert image[(away > 4) & (from_disc > rule["disc"] + 3.5)].max(initial=0) == 0
        ink = image[(away < 0.25) & (from_disc > rule["disc"] + 2)]
        assert ink.mean() > 80


def test_labels_are_balanced_and_a_prefix_stays_the_same():
    many = pathfinder_images(100, seed=7)
    few = pathfinder_images(10, seed=7)
    other = pathfinder_images(10, seed=8)
    assert abs(many.labels.mean() - 0.5) < 0.06
    assert (many.images[:10] == few.images).all()
    assert (many.labels[:10] == few.labels).all()
    assert (other.images != few.images).any()


def test_easier_curves_are_shorter_and_have_more_distractors():
    made = pathfinder_images(5, contour_length=6, seed=0)
    assert made.curves.shape == (5, 2, 6, 4)
    assert made.distractors.shape == (5, 10, 2, 4)


def test_the_task_gives_rows_of_pixels_and_keeps_them_in_the_cache(tmp_path):
    arguments = {"num_train": 12, "num_validation": 6, "num_test": 6}
    task = load_task("pathfinder", "train", 0, **arguments)
    kept = load_task("pathfinder", "train", 0, **arguments, cache=str(tmp_path / "a"))
    assert (task.kind, task.objective, task.input_channels) == ("values", "classification", 1)
    batch = task.batch([3, 0])
    assert batch.inputs.shape == (2, 1024, 1)
    assert batch.inputs.dtype == np.float32
    assert batch.inputs.min() == -1
    assert 0.9 < batch.inputs.max() <= 1
    assert (batch.lengths == 1024).all()
    files = list((tmp_path / "a").iterdir())
    assert len(files) == 1
    before = files[0].stat().st_mtime_ns
    again = load_task("pathfinder", "train", 0, **arguments, cache=str(tmp_path / "a"))
    assert files[0].stat().st_mtime_ns == before
    for other in (kept, again):
        assert (other.batch([3, 0]).inputs == batch.inputs).all()
        assert (other.batch([3, 0]).labels == batch.labels).all()
    test = load_task("pathfinder", "test", 0, **arguments)
    assert (test.batch(range(6)).inputs != task.batch(range(6)).inputs).any()
