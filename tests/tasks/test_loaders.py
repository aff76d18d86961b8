"""The loaders on small stand-ins: folders that the tests write, and no network."""

import wave
from collections import Counter

import datasets
import numpy as np
import pytest
import torch

from ssmzoo.tasks import load_task
from ssmzoo.tasks.speech_commands import WORDS


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()


def written(folder, **splits):
    """Write splits as parquet files in a folder that datasets can load."""
    folder.mkdir()
    for split, columns in splits.items():
        features = columns.pop("features", None)
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(folder / f"{split}-0.parquet")
    return str(folder)


def decoded(row, vocabulary):
    """Return what ids stand for; -1 is unknown, the end of the text is a newline."""
    return ["?\n"[i - 1] if i < 3 else vocabulary[i - 3] for i in row]


REVIEWS = ["ab" * 20 + "é", "ba a" * 9, "c", "", "a" * 70, "b漢b"] * 5


@pytest.fixture
def imdb(tmp_path):
    labels = [i % 2 for i in range(len(REVIEWS))]
    return written(
        tmp_path / "imdb",
        train={"text": REVIEWS, "label": labels},
        test={"text": ["ab🙂", "bad"], "label": [1, 0]},
        unsupervised={"text": ["zzz"], "label": [-1]},
    )


def test_imdb_is_characters_by_frequency_with_an_end_and_a_cap(imdb):
    counts = Counter("".join(REVIEWS))
    vocabulary = [c for c, n in sorted(counts.items(), key=lambda p: (-p[1], p[0])) if n >= 6]
    assert "c" not in vocabulary  # five times
    task = load_task("imdb", "train", 0, data=imdb, max_length=50, min_frequency=6, hold_out=0.0)
    assert (task.kind, task.objective, task.num_labels) == ("tokens", "classification", 2)
    assert task.vocab_size == 3 + len(vocabulary)
    assert len(task) == 30
    batch = task.batch(range(30))
    for i, (row, length) in enumerate(zip(batch.inputs, batch.lengths, strict=True)):
        expected = [c if c in vocabulary else "?" for c in REVIEWS[i][:49]]
        assert decoded(row[:length], vocabulary) == [*expected, "\n"]
        assert (row[length:] == 0).all()
        assert batch.labels[i] == i % 2
    assert batch.lengths.max() == 50
    short = task.batch([2, 3])
    assert short.inputs.shape == (2, 2)
    assert short.inputs.tolist() == [[1, 2], [2, 0]]


def test_imdb_holds_out_a_tenth_or_validates_on_the_test_reviews(imdb):
    arguments = {"data": imdb, "min_frequency": 1}

    def rows(split, **more):
        batch = (task := load_task("imdb", split, 0, **arguments, **more)).batch(range(len(task)))
        return Counter(
            (row[:length].tobytes(), label)
            for row, length, label in zip(batch.inputs, batch.lengths, batch.labels, strict=True)
        )

    train, validation, test = (rows(split) for split in ("train", "validation", "test"))
    assert [c.total() for c in (train, validation, test)] == [27, 3, 2]
    assert train + validation == rows("train", hold_out=0.0)
    assert rows("validation", hold_out=0.0) == test
    assert rows("validation") == validation


def test_imdb_refuses_a_share_that_holds_out_nothing_and_reviews_without_label(imdb, tmp_path):
    columns = {"text": ["a"], "label": [-1]}
    unlabelled = written(tmp_path / "unlabelled", train=dict(columns), test=dict(columns))
    with pytest.raises(ValueError, match="hold_out must hold out some of the 30 training"):
        load_task("imdb", "train", 0, data=imdb, hold_out=0.01)
    with pytest.raises(ValueError, match=r"hold_out must be at least 0 and below 1, got 1\.0"):
        load_task("imdb", "train", 0, data=imdb, hold_out=1.0)
    with pytest.raises(ValueError, match=r"column 'label' of .* must hold classes 0 to 1, got -1"):
        load_task("imdb", "test", 0, data=unlabelled)


PAIRS = [(1.0, 'a "quoted', "bb" * 30), (0.0, "NA", 'b"'), (1.0, "", "ac")]


@pytest.fixture(params=["tsv", "parquet"])
def aan(request, tmp_path):
    folder = tmp_path / "aan"
    if request.param == "parquet":
        columns = dict(zip(("label", "text1", "text2"), zip(*PAIRS, strict=True), strict=True))
        return written(folder, train=dict(columns), validation=dict(columns), test=dict(columns))
    folder.mkdir()
    lines = "".join(
        f"{label}\tid{i}\tid{i + 1}\t{a}\t{b}\n" for i, (label, a, b) in enumerate(PAIRS)
    )
    for part in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_text(lines)
    return str(folder)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_aan_is_pairs_of_documents_each_with_its_end(aan, split):
    task = load_task("aan", split, 0, data=aan, max_length=20)
    text = "".join(a + b for _, a, b in PAIRS)
    vocabulary = [c for c, _ in sorted(Counter(text).items(), key=lambda p: (-p[1], p[0]))]
    assert (task.kind, task.objective, task.num_labels) == ("token_pairs", "classification", 2)
    assert task.vocab_size == 3 + len(vocabulary)
    batch = task.batch([2, 0, 1])
    assert batch.inputs.shape == (3, 2, 20)
    assert batch.labels.tolist() == [1, 1, 0]
    for row, lengths, pair in zip(batch.inputs, batch.lengths, [2, 0, 1], strict=True):
        for document, length, content in zip(row, lengths, PAIRS[pair][1:], strict=True):
            assert decoded(document[:length], vocabulary) == [*content[:19], "\n"]
            assert (document[length:] == 0).all()


def test_aan_names_the_file_that_is_missing(tmp_path):
    (tmp_path / "new_aan_pairs.train.tsv").write_text("1.0\ta\tb\tx\ty\n")
    with pytest.raises(LookupError, match=r"new_aan_pairs\.eval\.tsv is missing"):
        load_task("aan", "validation", 0, data=str(tmp_path))


@pytest.fixture
def cifar10(tmp_path):
    rng = np.random.default_rng(0)
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=[str(i) for i in range(10)])}
    )
    splits, pixels = {}, {}
    for split, count in (("train", 30), ("test", 4)):
        pixels[split] = rng.integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8)
        labels = [i % 10 for i in range(count)]
        splits[split] = {"img": list(pixels[split]), "label": labels, "features": features}
    return written(tmp_path / "cifar10", **splits), pixels


def test_cifar10_is_grey_pixels_row_by_row_standardised(cifar10):
    folder, pixels = cifar10
    task = load_task("cifar10", "test", 0, data=folder)
    assert (task.kind, task.objective) == ("values", "classification")
    assert (task.num_labels, task.input_channels) == (10, 1)
    assert task.label_names is not None
    assert (task.label_names[0], task.label_names[9]) == ("airplane", "truck")
    batch = task.batch(range(4))
    grey = pixels["test"].astype(float) @ [0.299, 0.587, 0.114]
    exact = (grey.reshape(4, 1024) - 122.6) / 61
    assert batch.inputs.shape == (4, 1024, 1)
    # grey values are rounded to whole numbers
    assert np.abs(batch.inputs[..., 0] - exact).max() < 0.51 / 61
    assert batch.labels.tolist() == [0, 1, 2, 3]
    assert (batch.lengths == 1024).all()


def test_cifar10_validates_on_the_tenth_that_the_papers_code_holds_out(cifar10):
    folder, pixels = cifar10
    halves = torch.utils.data.random_split(
        range(30), [27, 3], generator=torch.Generator().manual_seed(42)
    )
    for split, half in zip(("train", "validation"), halves, strict=True):
        task = load_task("cifar10", split, 0, data=folder)
        batch = task.batch(range(len(task)))
        expected = [i % 10 for i in half]
        assert batch.labels.tolist() == expected
        grey = pixels["train"][list(half)].astype(float) @ [0.299, 0.587, 0.114]
        assert np.abs(batch.inputs[..., 0] * 61 + 122.6 - grey.reshape(-1, 1024)).max() < 0.51


def spoken(path, samples, *, rate=16_000, width=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(samples.astype(f"<i{width}").tobytes())


@pytest.fixture
def archive(tmp_path):
    """Ten words with 14 to 23 clips of 40 samples, one too short each, and what does not count."""
    rng = np.random.default_rng(0)
    root, clips = tmp_path / "speech", {}
    for number, word in enumerate(WORDS):
        for i in range(14 + number):
            samples = rng.integers(-3000, 3100, size=40)
            clips[samples.astype(np.int16).tobytes()] = number
            spoken(root / word / f"{i:03d}_nohash_0.wav", samples)
        spoken(root / word / "short_nohash_0.wav", rng.integers(-9, 9, size=39))
    spoken(root / "bed" / "a.wav", rng.integers(-9, 9, size=40))
    spoken(root / "_background_noise_" / "hum.wav", rng.integers(-9, 9, size=900))
    (root / "validation_list.txt").write_text("yes/000_nohash_0.wav\n")
    return root, clips


def test_speech_commands_is_ten_words_of_one_length_split_alike(archive):
    root, clips = archive
    total = len(clips)
    tasks = {
        split: load_task("speech_commands", split, 0, data=str(root), length=40)
        for split in ("train", "validation", "test")
    }
    sizes = [len(task) for task in tasks.values()]
    kept = int(0.7 * total)
    assert sizes == [kept, (total - kept) // 2, total - kept - (total - kept) // 2]
    every = np.stack([np.frombuffer(samples, np.int16) for samples in clips])
    batches = {split: task.batch(range(len(task))) for split, task in tasks.items()}
    train = batches["train"].inputs.astype(np.float64)
    assert abs(train.mean()) < 1e-6
    assert abs(train.std() - 1) < 1e-6
    found = set()
    for split, share in (("train", 0.7), ("validation", 0.15), ("test", 0.15)):
        batch = batches[split]
        assert batch.inputs.shape[1:] == (40, 1)
        counts = np.bincount(batch.labels, minlength=10)
        assert np.abs(counts - share * (14 + np.arange(10))).max() < 1.5
        for row, label in zip(batch.inputs[..., 0], batch.labels, strict=True):
            order = np.corrcoef(row, every)[0, 1:]
            best = int(order.argmax())
            assert order[best] > 1 - 1e-6
            assert list(clips.values())[best] == label
            found.add(best)
    assert len(found) == total


def test_speech_commands_reads_columns_of_sound_and_words_too(archive, tmp_path):
    root, _ = archive
    paths = sorted(p for word in WORDS for p in (root / word).glob("*.wav"))
    made = datasets.Dataset.from_dict(
        {
            "audio": [{"bytes": p.read_bytes(), "path": p.name} for p in paths],
            "label": [WORDS.index(p.parent.name) for p in paths],
        },
        features=datasets.Features(
            {
                "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
                "label": datasets.ClassLabel(names=list(WORDS)),
            }
        ),
    )
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "saved"))
    one = load_task("speech_commands", "validation", 0, data=str(root), length=40)
    other = load_task("speech_commands", "validation", 0, data=str(tmp_path / "saved"), length=40)
    assert (one.batch(range(len(one))).inputs == other.batch(range(len(one))).inputs).all()


def test_speech_commands_refuses_other_sound_and_absent_words(archive):
    root, _ = archive
    with pytest.raises(LookupError, match=r"at least 3 clips of 41 samples .* fewer of yes, no"):
        load_task("speech_commands", "test", 0, data=str(root), length=41)
    spoken(root / "yes" / "000_nohash_0.wav", np.zeros(40), rate=8000)
    with pytest.raises(ValueError, match=r"000_nohash_0.wav must be 16-bit .* at 8000 Hz"):
        load_task("speech_commands", "test", 0, data=str(root), length=40)
    (root / "yes" / "000_nohash_0.wav").write_bytes(b"RIFF no sound")
    with pytest.raises(ValueError, match=r"000_nohash_0.wav must be a wav file"):
        load_task("speech_commands", "test", 0, data=str(root), length=40)


@pytest.mark.parametrize("name", ["imdb", "aan", "cifar10", "mnist", "speech_commands"])
def test_absent_data_is_one_error_that_says_what_to_give(name, tmp_path):
    with pytest.raises(LookupError, match=rf"task {name}: .*give the argument data"):
        load_task(name, "train", 0, data=str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LookupError, match=rf"task {name}: .*give the argument data"):
        load_task(name, "train", 0, data=str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["imdb", "cifar10", "mnist"])
def test_data_without_the_columns_names_those_it_has(name, tmp_path):
    folder = written(tmp_path / "other", train={"body": ["x"]}, test={"body": ["y"]})
    with pytest.raises(LookupError, match=r"has no column .*, it has body"):
        load_task(name, "train", 0, data=folder)
