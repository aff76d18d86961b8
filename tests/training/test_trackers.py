import random

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image
from tests.training.runs import assert_same_run, killed, lines, quick_runs, write_texts  # noqa: F401

from ssmzoo.recipe import Recipe
from ssmzoo.training.run import train

TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,  # so that random numbers count
}


class Recording(GeneralTracker):
    """A tracker that draws random numbers at each call, and fails from a step on if told to."""

    name, requires_logging_directory, main_process_only = "recording", True, True
    fails_at, made = None, []

    def __init__(self, project, folder, **arguments):
        super().__init__()
        self.project, self.folder, self.arguments = project, folder, arguments
        self.logged, self.pictures, self.config, self.finished = [], [], None, 0
        self.samples = []

    @property
    def tracker(self):
        return self.logged

    def start(self):
        self.made.append(self)
        self._draw()

    def _draw(self):
        random.random()
        np.random.random()
        torch.rand(1)

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None):
        self._draw()
        if self.fails_at is not None and step >= self.fails_at:
            raise OSError("no network")
        if "sample" in values:
            self.samples.append(values["sample"])
        else:
            self.logged.append((step, values))

    def log_images(self, values, step=None):
        self.pictures.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def recording(monkeypatch):
    """The class of a tracker that Accelerate knows as ``recording``; ``made`` lists its objects."""
    monkeypatch.setattr(Recording, "made", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recording", Recording)
    return Recording


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def recipe(texts):
    return Recipe.model_validate(
        {
            "model": {"config_of": "llama", "config": TINY},
            "data": {"text": [str(texts)], "validation": 0.2},
            "train": {"steps": 6, "batch_size": 2, "seq_len": 16, "lr": 0.01},
            "eval": {"every": 3, "batches": 1},
            "checkpoint": {"every": 2},
            "log": {"every": 1},
        }
    )


@pytest.fixture(scope="module")
def untracked(recipe, tmp_path_factory):
    return train(recipe, output_dir=tmp_path_factory.mktemp("runs") / "untracked")


def tracking(*names):
    return [f"log.trackers=[{', '.join(names)}]"]


def without_times(logged):
    drop = ("tokens_per_second", "seconds")
    return [
        {"step": step} | {k: v for k, v in values.items() if k not in drop}
        for step, values in logged
    ]


def test_a_tracker_gets_the_recipe_and_every_line_and_changes_no_weight(
    recipe, untracked, recording, tmp_path
):
    overrides = [*tracking("recording"), "log.project=ants and bees"]
    run = train(recipe, output_dir=tmp_path / "run", overrides=overrides)
    assert_same_run(run, untracked)
    (made,) = recording.made
    assert (made.project, made.folder, made.finished) == ("ants and bees", run / "trackers", 1)
    assert without_times(made.logged) == lines(run)
    (sample,) = made.samples
    assert isinstance(sample, str)
    assert made.config["train.lr"] == 0.01
    assert made.config["model.config.hidden_size"] == 16
    assert made.config["data.text"] == '["texts"]'  # without this machine's folders
    assert str(tmp_path) not in str(made.config)


def test_gauges_are_sent_by_layer_and_the_picture_at_the_end(recipe, recording, tmp_path):
    def draw(metrics, target, **_):
        Image.new("RGB", (4, 3)).save(target)

    fields = {"hidden_size": 16, "num_hidden_layers": 2}
    overrides = [
        *tracking("recording"),
        f"model={{family: coffee, config: {fields}}}",
        "train.steps=1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssmzoo.training.folder.draw_curves", draw)
        run = train(recipe, output_dir=tmp_path / "run", overrides=overrides)
    (made,) = recording.made
    sent, line = made.logged[0][1], lines(run)[0]
    assert line["gauges"]
    for name, values in line["gauges"].items():
        assert [sent[f"gauges/{name}/{layer}"] for layer in (0, 1)] == values
    ((step, pictures),) = made.pictures
    assert (step, pictures["curves"].shape) == (1, (1, 3, 4, 3))


def test_a_killed_run_resumes_bit_for_bit_with_its_trackers(recipe, untracked, recording, tmp_path):
    folder = killed(recipe, tmp_path / "run", step=4, overrides=tracking("recording"))
    train(folder / "recipe.yaml", output_dir=folder, resume=True)
    assert_same_run(folder, untracked)
    first, second = recording.made
    assert first.finished == second.finished == 1
    assert [step for step, _ in second.logged] == [3, 3, 4, 5, 6, 6]


def test_tensorboard_shows_a_resumed_run_as_one(recipe, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = killed(recipe, tmp_path / "run", step=4, overrides=tracking("tensorboard"))
    train(folder / "recipe.yaml", output_dir=folder, resume=True)
    found = events.EventAccumulator(str(folder / "trackers" / "ssmzoo")).Reload()
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    logged = [(line["step"], line["loss"]) for line in lines(folder) if "loss" in line]
    assert points == pytest.approx(logged)


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    recipe, untracked, recording, tmp_path, monkeypatch, caplog
):
    class Other(Recording):
        name, made, fails_at = "other", [], None

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "other", Other)
    monkeypatch.setattr(recording, "fails_at", 3)
    overrides = tracking("recording", "other")
    run = train(recipe, output_dir=tmp_path / "run", overrides=overrides)
    assert_same_run(run, untracked)
    (warning,) = [r.getMessage() for r in caplog.records if "no network" in r.getMessage()]
    assert "recording" in warning
    assert [step for step, _ in recording.made[0].logged] == [1, 2]
    assert without_times(Other.made[0].logged) == lines(run)


def test_a_tracker_that_does_not_start_is_one_line_before_training(
    recipe, recording, tmp_path, monkeypatch
):
    def start(tracker):
        raise OSError("no account")

    with monkeypatch.context() as patch:
        patch.setattr(recording, "start", start)
        with pytest.raises(RuntimeError, match=r"^log\.trackers.*recording.*no account") as caught:
            train(recipe, output_dir=tmp_path / "run", overrides=tracking("recording"))
    assert "\n" not in str(caught.value)
    # the same command works once that is mended
    train(recipe, output_dir=tmp_path / "run", overrides=[*tracking("recording"), "train.steps=1"])


@pytest.mark.parametrize(
    ("trackers", "error", "message"),
    [
        ("tensorbord", LookupError, "did you mean 'tensorboard'"),
        ("tensorboard", RuntimeError, "pip install tensorboard"),
    ],
)
def test_unknown_trackers_and_missing_packages_are_refused(
    trackers, error, message, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(error, match=r"^log\.trackers") as caught:
        train(recipe, output_dir=tmp_path / "run", overrides=tracking(trackers))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
