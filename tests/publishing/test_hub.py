"""Publication: what goes, what is refused, and folders; the Hub is in test_hub_http.py."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ssmzoo import load_family
from ssmzoo.checkpoints.weights import WEIGHTS_INDEX
from ssmzoo.modeling import load_state
from ssmzoo.publishing import hub

CARD = "---\nlibrary_name: transformers\n---\n\n# tiny\n\n![Loss](loss.png)\n"
PICTURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A tiny real model, saved once; tests copy it."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    family = load_family("longhorn")
    torch.manual_seed(0)
    family.causal_lm_class(family.config(**family.tiny)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    (folder / "loss.png").write_bytes(PICTURE)
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints").mkdir()
    return folder


@pytest.fixture
def model(saved_model, tmp_path):
    return Path(shutil.copytree(saved_model, tmp_path / "tiny"))


def publish(*arguments, code=False, **options):
    """Publish without the model's code, which test_export_code.py is about."""
    return hub.publish(*arguments, code=code, **options)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


EXPECTED = {
    "README.md",
    "config.json",
    "generation_config.json",
    "load_with_ssmzoo.py",
    "loss.png",
    "model.safetensors",
    "tokenizer.json",
}
ENTRY = "- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 0.5\n"


def test_leaderboard_scores_are_published_and_recognised_as_ours(model, tmp_path):
    (model / ".eval_results").mkdir()
    (model / ".eval_results" / "ssmzoo.yaml").write_text(ENTRY)
    (model / ".eval_results" / "notes.txt").write_text("mine")
    for _ in range(2):  # the second one replaces the first
        report = publish(model, str(tmp_path / "out"))
        assert {file.path for file in report.files} == EXPECTED | {".eval_results/ssmzoo.yaml"}
    assert (tmp_path / "out/.eval_results/ssmzoo.yaml").read_text() == ENTRY
    assert ".eval_results/notes.txt" in report.left_out


@pytest.mark.parametrize("content", ["- dataset: {id: a/b}\n  value: 1\n", "a: [", "3", "- 3"])
def test_scores_that_the_hub_could_not_read_are_refused(content, model, tmp_path):
    (model / ".eval_results").mkdir()
    (model / ".eval_results" / "x.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"x\.yaml must be a list"):
        publish(model, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# folders


def test_a_folder_gets_exactly_the_publishable_files(model, tmp_path):
    report = publish(model, str(tmp_path / "out" / "tiny"))
    published = tree(tmp_path / "out" / "tiny")
    assert set(published) == EXPECTED == {file.path for file in report.files}
    assert all(published[name] == (model / name).read_bytes() for name in EXPECTED)
    assert [file.size for file in report.files] == [len(published[f.path]) for f in report.files]
    assert report.left_out == ("checkpoints/", "notes.txt")
    assert report.url == str(tmp_path / "out" / "tiny")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny"]


def test_a_dry_run_reports_the_same_and_writes_nothing(model, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    dry = publish(model, str(tmp_path / "out" / "tiny"), dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    real = publish(model, str(tmp_path / "out" / "tiny"))
    assert dry.dry_run
    assert not real.dry_run
    assert (dry.files, dry.left_out, dry.target) == (real.files, real.left_out, real.target)


def test_an_earlier_publication_is_replaced_as_a_whole(model, tmp_path):
    target = tmp_path / "out"
    publish(model, str(target))
    (model / "README.md").write_text(CARD.replace("![Loss](loss.png)", "second"))
    (model / "tokenizer.json").unlink()
    publish(model, str(target))
    assert set(tree(target)) == EXPECTED - {"loss.png", "tokenizer.json"}
    assert "second" in (target / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: (out / "diary.txt").write_text("mine"), "it holds diary.txt"),
        (lambda out: (out / "sub").mkdir() or (out / "sub" / "x").write_text(""), "it holds sub/x"),
        (lambda out: (out / "config.json").write_text('{"model_type": "llama"}'), "'llama'"),
        (
            lambda out: save_file({"x": np.zeros(3)}, out / "model.safetensors"),
            "its tensors have other",
        ),
        (lambda out: (out / "model.safetensors").write_bytes(b"short"), "corrupt or truncated"),
        (lambda out: (out.parent / "run.json").write_text("{}"), "it is what a run has trained"),
    ],
    ids=["foreign file", "foreign folder", "other family", "other shapes", "corrupt", "a run's"],
)
def test_a_filled_foreign_folder_is_refused_and_untouched(model, tmp_path, change, reason):
    target = tmp_path / "out"
    publish(model, str(target))
    change(target)
    before = tree(target)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="no earlier publication of this model") as caught:
            publish(model, str(target), dry_run=dry_run)
        assert reason in str(caught.value)
    assert tree(target) == before


def test_an_unfit_target_is_one_clear_error(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "user" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for target, message in [
        (str(tmp_path / "file"), "is a file; name a folder"),
        (str(model), "must lie outside the model folder"),
        (str(model / "inner"), "must lie outside the model folder"),
        ("word", "must be a folder"),
        ("a/b/c", "must be a folder"),
        ("user/na me", "no Hub repository id"),
        ("user/-name", "no Hub repository id"),
        ("user/name", "write ./user/name or hub:user/name"),
        ("user/absent", "write ./user/absent or hub:user/absent"),
        ("", "must be a folder"),
    ]:
        with pytest.raises(ValueError, match="target") as caught:
            publish(model, target)
        assert message in str(caught.value), target
    with pytest.raises(ValueError, match=r"^private must be left out for a folder, got"):
        publish(model, "./out", private=True)


def test_a_path_is_a_folder_and_a_prefix_says_what_a_text_is(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user").mkdir()
    for target, kind in (
        (Path("user/name"), "folder"),
        (Path("word"), "folder"),
        ("folder:user/name", "folder"),
        ("./user/name", "folder"),
        ("hub:user/name", "hub"),
        ("other/name", "hub"),
    ):
        report = publish(model, target, dry_run=True)
        assert (report.kind, Path(report.target).is_absolute()) == (kind, kind == "folder"), target


def test_an_unwritable_target_is_one_clear_error(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="/below cannot be written"):
        publish(model, str(tmp_path / "file" / "below"))
    if sys.platform == "linux":
        with pytest.raises(RuntimeError, match="/proc/ssmzoo-out cannot be written"):
            publish(model, "/proc/ssmzoo-out")


# prompts


def test_a_saved_prompt_is_published_only_on_request(model, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(model)
    network.prefill(torch.arange(5)[None]).save_pretrained(model)
    quiet = publish(model, str(tmp_path / "out"))
    assert {file.path for file in quiet.files} == EXPECTED
    assert quiet.left_out == ("checkpoints/", "notes.txt", "state.safetensors")
    asked = publish(model, str(tmp_path / "out"), include_state=True, dry_run=True)
    assert {file.path for file in asked.files} == EXPECTED | {"state.safetensors"}
    publish(model, str(tmp_path / "out"), include_state=True)
    assert load_state(tmp_path / "out", network).num_tokens == 5
    publish(model, str(tmp_path / "out"))
    assert set(tree(tmp_path / "out")) == EXPECTED


def test_a_prompt_goes_only_with_the_model_that_read_it(model, tmp_path):
    with pytest.raises(ValueError, match=r"holds no state.safetensors; save a prompt with"):
        publish(model, str(tmp_path / "out"), include_state=True)
    network = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        network.model.norm.weight.add_(1)
    network.prefill(torch.arange(5)[None]).save_pretrained(model)
    with pytest.raises(ValueError, match="was made by other weights"):
        publish(model, str(tmp_path / "out"), include_state=True, dry_run=True)
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    foreign = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    foreign.save_pretrained(model)
    with pytest.raises(ValueError, match="a model of ssmzoo's families, got LlamaForCausalLM"):
        publish(model, str(tmp_path / "out"), include_state=True)
    assert not (tmp_path / "out").exists()


# model folders


def _shard(model: Path, *, index: dict[str, str]) -> None:
    (model / "model.safetensors").unlink()
    for number in (1, 2):
        save_file({f"t{number}": np.zeros(4)}, model / f"model-0000{number}-of-00002.safetensors")
    (model / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


GOOD_INDEX = {"t1": "model-00001-of-00002.safetensors", "t2": "model-00002-of-00002.safetensors"}


def test_shards_go_with_their_index(model, tmp_path):
    _shard(model, index=GOOD_INDEX)
    report = publish(model, str(tmp_path / "out"))
    weights = {*GOOD_INDEX.values(), WEIGHTS_INDEX}
    assert {f.path for f in report.files} == EXPECTED - {"model.safetensors"} | weights


def _write(name: str, text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return lambda model: (model / name).write_bytes(data)


def _link_out(name: str):
    def change(model: Path) -> None:
        outside = model.parent / "outside"
        outside.mkdir()
        (model / name).replace(outside / name)
        (model / name).symlink_to(outside / name)

    return change


def _cut(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


BAD_FOLDERS = {
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json"),
    "broken config": (_write("config.json", "{"), "config.json is corrupt"),
    "config is a list": (_write("config.json", "[]"), "must hold a JSON object"),
    "broken tokenizer": (_write("tokenizer.json", "{"), "tokenizer.json is corrupt"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "has no weights"),
    "truncated weights": (_cut, "corrupt or truncated"),
    "empty weights": (_write("model.safetensors", b""), "corrupt or truncated"),
    "longer weights": (
        lambda m: _append(m / "model.safetensors"),
        "corrupt or truncated",
    ),
    "foreign weights": (lambda m: save_file({"x": np.zeros(1)}, m / "x.safetensors"), "no index"),
    "missing shard": (
        lambda m: _shard(m, index={**GOOD_INDEX, "t3": "model-3.safetensors"}),
        "lacks model-3.safetensors",
    ),
    "unnamed shard": (
        lambda m: _shard(m, index={"t1": GOOD_INDEX["t1"]}),
        "holds model-00002-of-00002.safetensors",
    ),
    "shard lacks a tensor": (
        lambda m: _shard(m, index={**GOOD_INDEX, "t3": GOOD_INDEX["t1"]}),
        "disagree about t3",
    ),
    "index climbs out": (
        lambda m: _shard(m, index={"t1": "../model.safetensors"}),
        "names files outside the folder",
    ),
    "index is empty": (_write(WEIGHTS_INDEX, "{}"), "must hold a weight_map"),
    "a pickle as golden logits": (_write("golden.safetensors", pickle.dumps({})), "corrupt or"),
    "pickle": (_write("training_args.bin", b"\x80"), "is a pickle"),
    "code": (_write("modeling_tiny.py", "print()"), "is code"),
    "no card": (lambda m: (m / "README.md").unlink(), "write one with: ssmzoo card"),
    "broken card": (_write("README.md", "---\na: [\n---\n"), "no readable metadata"),
    "card shows a missing picture": (
        _write("README.md", "![x](curve.png)"),
        "'curve.png', which is missing",
    ),
    "card names a missing licence": (
        _write("README.md", "---\nlicense: other\nlicense_link: LICENSE\n---\n"),
        "names the file 'LICENSE', which is missing",
    ),
    "card climbs out": (_write("README.md", "![x](../x.png)"), "outside the model folder"),
    "card climbs out, encoded": (_write("README.md", "![x](%2e%2e/x.png)"), "outside the model"),
    "card shows an absolute path": (
        _write("README.md", '<img src="/etc/x.png">'),
        "outside the model folder",
    ),
    "card shows no picture": (_write("README.md", "![x](notes.txt)"), "is no picture"),
    "weights link out": (_link_out("model.safetensors"), "link out of the model folder"),
    "picture links out": (_link_out("loss.png"), "link out of the model folder"),
    "config is a pipe": (
        lambda m: (m / "config.json").unlink() or os.mkfifo(m / "config.json"),
        "must be a regular file",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_an_unfit_model_folder_is_refused_before_anything_is_written(model, tmp_path, case):
    change, message = BAD_FOLDERS[case]
    change(model)
    for dry_run in (True, False):
        with pytest.raises(ValueError) as caught:
            publish(model, str(tmp_path / "out"), dry_run=dry_run)
        assert message in str(caught.value)
        assert str(model) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_model_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with a saved model"):
        publish(tmp_path / "absent", "./out")


def test_a_run_directory_is_told_from_its_model(model, tmp_path):
    (tmp_path / "run").mkdir()
    model.rename(tmp_path / "run" / "model")
    with pytest.raises(ValueError, match=r"has no config.json.*, here .*/run/model$"):
        publish(tmp_path / "run", str(tmp_path / "out"))


def test_the_licence_that_a_card_links_is_published(model, tmp_path):
    (model / "LICENSE").write_text("terms")
    assert "LICENSE" in publish(model, tmp_path / "out").left_out
    card = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n"
    (model / "README.md").write_text(card)
    for _ in range(2):  # and is known as ours when it is replaced
        publish(model, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "terms"


def test_pictures_on_the_web_are_not_copied(model, tmp_path):
    (model / "README.md").write_text("![x](https://example.org/x.png) <img src='data:,x'>")
    report = publish(model, str(tmp_path / "out"))
    assert {file.path for file in report.files} == EXPECTED - {"loss.png"}


def test_files_go_as_they_were_checked(model, tmp_path, monkeypatch):
    """A text that changes after the check goes as it was, and weights that change do not go."""
    checked = (model / "tokenizer.json").read_bytes()
    publication_of = hub.publication_of
    changes = [lambda: (model / "tokenizer.json").write_bytes(b"[]")]

    def then_change(folder, **asked):
        made = publication_of(folder, **asked)
        changes[-1]()
        return made

    monkeypatch.setattr(hub, "publication_of", then_change)
    publish(model, str(tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == checked
    weights = (model / "model.safetensors").read_bytes()
    changes.append(lambda: (model / "model.safetensors").write_bytes(weights[:-1] + b"!"))
    (model / "tokenizer.json").write_bytes(checked)
    with pytest.raises(RuntimeError, match=r"model.safetensors changed while it was published"):
        publish(model, str(tmp_path / "second"))
    assert not (tmp_path / "second").exists()


def test_without_its_code_a_family_of_another_package_names_that_package(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "lru"}')
    monkeypatch.setattr(hub, "family_of", lambda _: SimpleNamespace(name="my-lru"))
    monkeypatch.setattr(hub, "packages_of", lambda name: ["ssmzoo", f"ssmzoo-{name}"])
    told = hub._how_to_load(tmp_path, "x", code=False)
    assert "index has it) and ssmzoo-my-lru from its authors, not by its name alone" in told
