"""A machine that refuses, and checkpoints that are damaged or hostile, at the command line.

Each ends with exit status 2 and one line, leaves nothing half-written, and leaves what was there.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.training.runs import KilledError, killed_before
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ssmzoo.auto  # noqa: F401
from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.cli.main import main
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.family import load_family
from ssmzoo.files import CannotWriteError
from ssmzoo.publishing.export_code import export_code
from ssmzoo.publishing.export_kernels import export_kernels
from ssmzoo.training.checkpoint import checkpoints, damage_of
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train

SMALL = {"hidden_size": 16, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a recipe, its finished run, the card, a prompt, and an RTF model."""
    root = tmp_path_factory.mktemp("place")
    (root / "text.txt").write_text("ant bee cat dodo " * 300, encoding="utf-8")
    recipe = {
        "model": {"family": "longhorn", "config": {**SMALL, "dropout": 0.1}},
        "data": {"text": str(root / "text.txt"), "validation": 0.2},
        "train": {"steps": 20, "batch_size": 4, "seq_len": 32, "lr": 0.01, "warmup": 1},
        "eval": {"every": 10, "batches": 1},
        "checkpoint": {"every": 10, "keep": 2},
        "log": {"every": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    model = str(root / "run" / "model")
    assert main(["train", str(root / "recipe.yaml"), "--output", str(root / "run")]) == 0
    assert main(["card", model]) == 0
    assert main(["generate", model, "ant", "--save-state", str(root / "prompt")]) == 0
    family = load_family("rtf")
    fields = {"filter": "implicit", "trunc_len": 24, "hidden_size": 6, "num_hidden_layers": 1}
    torch.manual_seed(0)
    network = family.causal_lm_class(family.config(**fields, vocab_size=31))
    network.save_pretrained(root / "long")
    return root


@pytest.fixture
def model(place, tmp_path):
    """A copy of the model, to be damaged."""
    return shutil.copytree(place / "run" / "model", tmp_path / "damaged")


def commands(place, out):
    """Return, by name, a command line for every way to write, each into ``out``."""
    model = place / "run" / "model"
    return {
        "train": ["train", place / "recipe.yaml", "--output", out],
        "generate": ["generate", model, "ant bee", "--max-new-tokens", 1, "--save-state", out],
        "eval": ["eval", model, "--text", place / "text.txt", "--limit", 1, "--output", out],
        "card": ["card", model, "--output", out / "card.md"],
        "inspect": ["inspect", model, "--length", 16, "--output", out],
        "publish": ["publish", model, f"folder:{out}"],
        "publish without code": ["publish", model, f"folder:{out}", "--no-code"],
        "distill": ["distill", place / "long", "--output", out, "--order", 2, "--steps", 1],
    }


WRITING = sorted(commands(Path(), Path()))


@pytest.fixture
def fails(capsys):
    """Run a command that must fail as the user's or the machine's; return its one line."""

    def run(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return the_line(status, *capsys.readouterr())

    return run


def the_line(status, out, err):
    assert status == 2, (status, err)
    assert out == ""
    *logged, last = err.splitlines()
    assert all(line.startswith("step ") for line in logged), err  # of a run, before it failed
    assert last.startswith("ssmzoo: error: "), err
    return last.removeprefix("ssmzoo: error: ")


def tree(folder):
    """Return what lies in a folder, without the lock of a run."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


@contextmanager
def no_file_longer_than(size):
    """Let every file of this process end there, in the kernel and for whatever library writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it would be cut, and stay
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = before


def same_run(one, two):
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, two)]
    lines = [read_metrics(run / "metrics.jsonl") for run in (one, two)]
    for line in lines[0] + lines[1]:
        for key in ("seconds", "tokens_per_second"):
            line.pop(key, None)
    assert lines[0] == lines[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# --- a disk that takes no more ------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(place, tmp_path_factory):
    """A run that was killed before its first step: the tokens are there, nothing is learnt."""
    target = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        killed_before(patch, 1)
        with pytest.raises(KilledError):
            train(place / "recipe.yaml", output_dir=target)
    return target


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out what takes longer than a tiny run."""
    monkeypatch.setattr("ssmzoo.training.folder.draw_curves", lambda *_, **__: None)


@pytest.mark.long
@pytest.mark.usefixtures("no_pictures")
def test_a_run_names_the_file_that_cannot_be_finished_and_resumes(place, begun, tmp_path, fails):
    run = place / "run"
    sizes = sorted({path.stat().st_size for path in run.rglob("*") if path.is_file()})
    named = set()
    # below the size of one file or another; and where the metrics are the first that is too long
    above = (run / "run.json").stat().st_size + 300  # it holds times, and varies by some bytes
    for limit in (*(size - 1 for size in sizes[::6]), sizes[-1] - 1, above):
        target = shutil.copytree(begun, tmp_path / str(limit))
        arguments = ("train", place / "recipe.yaml", "--output", target, "--resume")
        with no_file_longer_than(limit):
            line = fails(*arguments)
        assert line.startswith((f"{target}/", f"the checkpoint {target}/checkpoints/")), line
        assert "cannot be written: File too large; what was there is unchanged; raise the" in line
        named.add(line.split(" cannot")[0].split("/")[-1])
        assert not [name for name in tree(target) if "unfinished" in name or "partial" in name]
        assert all(damage_of(path) is None for path in checkpoints(target / "checkpoints"))
        if (target / "metrics.jsonl").exists():
            read_metrics(target / "metrics.jsonl")
        assert main([*map(str, arguments)]) == 0
        same_run(run, target)
        shutil.rmtree(target)
    # the others are shorter than one that is written before them
    assert named == {"recipe.yaml", "metrics.jsonl", "step-00000010"}


@pytest.mark.parametrize(
    ("method", "name"), [("describe", "recipe.yaml"), ("draw", "loss.png"), ("finish", "model")]
)
@pytest.mark.long
def test_the_file_written_when_the_disk_is_full_is_named(
    method, name, place, begun, tmp_path, fails, monkeypatch
):
    target = shutil.copytree(begun, tmp_path / "run")
    arguments = ("train", place / "recipe.yaml", "--output", target, "--resume")
    write = getattr(RunFolder, method)

    def under_a_limit(folder, *given, **named):
        with no_file_longer_than(300):
            write(folder, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, method, under_a_limit)
        patch.setattr("ssmzoo.training.folder._DRAW_SECONDS", -1)
        assert fails(*arguments).startswith(f"{target}/{name} cannot be written: File too large;")
    assert main([*map(str, arguments)]) == 0
    same_run(place / "run", target)


def test_a_new_run_names_the_tokens_that_cannot_be_finished(place, tmp_path, fails):
    with no_file_longer_than(1200):
        line = fails("train", place / "recipe.yaml", "--output", tmp_path / "new")
    assert f"{tmp_path}/new/.cache cannot be written: File too large" in line
    assert tree(tmp_path / "new") == {}


def without_answers(folder):
    """Return the files of a folder but the answers with which an interrupted eval goes on."""
    return {name: content for name, content in tree(folder).items() if ".answers" not in name}


@pytest.mark.parametrize("name", [name for name in WRITING if name != "train"])
@pytest.mark.long
def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial_file(
    name, place, tmp_path, fails, capsys
):
    out = tmp_path / "out"
    arguments = [str(word) for word in commands(place, out)[name]]
    if name == "card":
        out.mkdir()
    with no_file_longer_than(200):
        line = fails(*arguments)
    where = tempfile.gettempdir() if name == "publish" else out  # the code is made there first
    assert line.startswith(f"{where}")
    assert "cannot be written: File too large; what was there is unchanged; raise the" in line
    assert without_answers(tmp_path) in ({}, {"out": None})
    assert main(arguments) == 0
    before = tree(tmp_path)
    with no_file_longer_than(200):
        assert fails(*arguments).startswith(f"{where}")
    assert without_answers(tmp_path) == before


@pytest.mark.long
def test_a_failed_export_keeps_existing_files(place, model, tmp_path):
    export_code(model, model)
    export_kernels(tmp_path / "kernels")
    before = tree(tmp_path)
    for export, target in (
        (lambda: export_code(model, model), model),
        (lambda: export_kernels(tmp_path / "kernels"), tmp_path / "kernels" / "build"),
    ):
        with no_file_longer_than(5000), pytest.raises(CannotWriteError, match="File too large"):
            export()
        assert tree(tmp_path) == before, target


def test_a_full_output_device_prints_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ssmzoo", "list"]
        buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True)
    line = the_line(done.returncode, "", done.stderr)
    assert line == "standard output cannot be written: No space left on device; send it elsewhere"


# --- a folder that cannot be written to ---------------------------------------------------------

# argument: JSON, [the read-only folder, command lines]; it prints JSON, [status, out, err] of each
READ_ONLY = """
import contextlib, errno, io, json, os, sys

folder, commands = json.loads(sys.argv[1])
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink")

def refuse(event, arguments):  # as the kernel does on such a file system, also to root
    if event not in ("open", *CHANGES) or (event == "open" and not arguments[2] & WRITING):
        return
    for path in arguments:
        if isinstance(path, (str, bytes, os.PathLike)):
            if os.path.abspath(os.fsdecode(path)).startswith(folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

from ssmzoo.cli.main import main

sys.addaudithook(refuse)
found = []
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(command)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_a_read_only_folder_is_one_line_and_stays_as_it_was(place, forks, tmp_path):
    shut = tmp_path / "shut"
    shut.mkdir()
    lines = {}
    for name, words in commands(place, shut / "new").items():
        lines[f"{name} new"] = words
    for name, words in commands(place, shut / "there").items():
        if name != "generate":  # safetensors does not ask Python before it opens a file
            lines[f"{name} there"] = words
    (shut / "there").mkdir()
    shutil.copytree(place / "run", shut / "run")
    lines["resume"] = ["train", place / "recipe.yaml", "--output", shut / "run", "--resume"]
    lines["card in place"] = ["card", shut / "run" / "model"]
    before = tree(tmp_path)
    words = [[str(word) for word in line] for line in lines.values()]
    done = forks.run(READ_ONLY, json.dumps([str(shut), words]))
    assert done.status == 0, done.log
    for name, found in zip(lines, json.loads(done.out), strict=True):
        line = the_line(*found)
        assert str(shut) in line, (name, line)
        assert "Read-only file system" in line, (name, line)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", WRITING)
def test_a_place_below_a_file_is_one_line(name, place, tmp_path, fails):
    (tmp_path / "file").write_text("mine")
    line = fails(*commands(place, tmp_path / "file" / "out")[name])
    assert str(tmp_path / "file") in line
    assert tree(tmp_path) == {"file": b"mine"}


# --- what is damaged, changed, or earlier than it was -------------------------------------------


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
@pytest.mark.usefixtures("no_pictures")
def test_a_run_with_a_truncated_file_names_it_or_resumes_exactly(place, tmp_path, fails):
    shutil.rmtree((run := shutil.copytree(place / "run", tmp_path / "run")) / "model")
    named = set()
    older = "step-00000010"
    for path in files_of(run):
        if older in path.parts and path.parent.name != "shards":
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[: -2 if path.name == "data.json" else -1])  # its last is a newline
        before = tree(run)
        arguments = ("train", place / "recipe.yaml", "--output", run, "--resume")
        newest = "step-00000020" in path.parts
        if newest or path.name == "data.json":
            line = fails(*arguments)
            assert f"{run}" in line
            assert path.name in line
            assert "the newest whole checkpoint is" in line or not newest
            assert tree(run) == before
            named.add(path.name)
            path.write_bytes(whole)
        else:
            assert main([*map(str, arguments)]) == 0
            same_run(place / "run", run)
            path.write_bytes(whole)
            shutil.rmtree(run / "model")
    assert {"data.json", "state.json", "contents.json"} <= named
    assert any(name.startswith("shard-") for name in named)


def tuned(place, model, tmp_path):
    """Return a recipe that goes on from a model."""
    recipe = yaml.safe_load((place / "recipe.yaml").read_text()) | {
        "model": {"init_from": str(model)}
    }
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_truncated_model_prints_one_line_in_every_command(place, model, tmp_path, fails):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    out = tmp_path / "out"
    for command in (
        ("generate", model, "ant"),
        ("eval", model, "--text", place / "text.txt", "--output", out),
        ("doctor", model),
        ("inspect", model, "--output", out / "new"),
        ("card", model, "--output", tmp_path / "card.md"),
        ("publish", model, f"folder:{out / 'new'}"),
        ("info", model),
        ("distill", model, "--output", out / "new", "--order", 2),
        ("train", tuned(place, model, tmp_path), "--output", out / "new"),
    ):
        line = fails(*command)
        assert "model.safetensors" in line, (command, line)
        assert not (out / "new" / "model").exists()


def test_a_truncated_prompt_prints_one_line(place, tmp_path, fails):
    kept = shutil.copytree(place / "prompt", tmp_path / "kept") / "state.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1])
    line = fails("generate", place / "run" / "model", "", "--state", kept.parent)
    assert line.startswith(f"{kept} is not a whole safetensors file")


@pytest.mark.parametrize("same_times", [False, True], ids=["later", "at the same time"])
@pytest.mark.long
def test_a_text_that_changed_between_runs_is_found_by_its_digest(
    same_times, place, tmp_path, fails, monkeypatch
):
    text = Path(shutil.copy2(place / "text.txt", tmp_path / "text.txt"))
    run = tmp_path / "run"
    arguments = ["train", place / "recipe.yaml", "--output", run, "--set", f"data.text={text}"]
    with monkeypatch.context() as patch:
        killed_before(patch, 15)
        with pytest.raises(KilledError):
            train(place / "recipe.yaml", output_dir=run, overrides=[f"data.text={text}"])
    status = text.stat()
    with text.open("r+") as file:
        file.write("ANT")  # as long as before
    if same_times:
        os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    line = fails(*arguments, "--resume")
    assert line == (
        f"the data file {text} was changed since the run began; put it back as it was, or start a "
        "new run"
    )
    with text.open("r+") as file:
        file.write("ant")
    assert main([*map(str, arguments), "--resume"]) == 0
    assert load_file(run / "model" / "model.safetensors").keys()


# --- what a checkpoint may not ask for ----------------------------------------------------------


class Harm:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def change_json(path, **fields):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def pickled(model, harm):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(harm)))
    return "pytorch_model.bin must be safetensors, got pickles, which can run code"


def pickled_shards(model, harm):
    (model / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin"
    (model / name).write_bytes(pickle.dumps(Harm(harm)))
    change_json(model / "pytorch_model.bin.index.json", weight_map={"x": name}, metadata={})
    return f"{name} must be safetensors, got pickles"


def pickled_adapter(model, harm):
    change_json(model / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(model))
    (model / "adapter_model.bin").write_bytes(pickle.dumps(Harm(harm)))
    return "adapter_model.bin must be safetensors, got pickles"


def shards_from(name, index="model.safetensors.index.json"):
    def change(model, harm):
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").rename(model.parent / "others.safetensors")
        shard = name.format(model.parent)
        weights = dict.fromkeys(tensors, shard)
        change_json(model / index, weight_map=weights, metadata={})
        return f"{shard!r}" if "\\" not in shard else "others.safetensors"

    return change


def tokenizer_from(field, value):
    def change(model, harm):
        named = json.loads(json.dumps(value).replace("HERE", str(model.parent)))
        change_json(model / "tokenizer_config.json", **{field: named})
        place = model / "tokenizer_config.json"
        return f"{place}, {field} must name files of this folder, got "

    return change


def weights_from_the_configuration(model, harm):
    (model / "model.safetensors").rename(model.parent / "others.safetensors")
    change_json(model / "config.json", transformers_weights="../others.safetensors")
    return "transformers_weights"


def code(model, harm):
    (model / "harm.py").write_text(f"import os\nos.mkdir({str(harm)!r})\n")


def unknown_model_with_code(model, harm):
    code(model, harm)
    auto_map = {"AutoConfig": "harm.Config", "AutoModelForCausalLM": "harm.Model"}
    auto_map["AutoModel"] = "harm.Base"
    change_json(model / "config.json", model_type="harmful", auto_map=auto_map)
    return "custom code"


def with_more(message, **fields):
    def change(model, harm):
        change_json(model / "config.json", **fields)
        return message

    return change


HOSTILE = {
    "pickle": pickled,
    "pickled shards": pickled_shards,
    "pickled adapter": pickled_adapter,
    "a shard above": shards_from("../others.safetensors"),
    "a shard anywhere": shards_from("{}/others.safetensors"),
    "a variant's shard": shards_from("../others.safetensors", "model.safetensors.index.fp16.json"),
    "a tokenizer above": tokenizer_from("tokenizer_file", "../tokenizer.json"),
    "a vocabulary anywhere": tokenizer_from("vocab_file", "HERE/vocab.json"),
    "tokenizers by version": tokenizer_from("fast_tokenizer_files", ["../tokenizer.4.0.0.json"]),
    "weights by the configuration": weights_from_the_configuration,
    "unknown model with code": unknown_model_with_code,
    "more layers than tensors": with_more("num_hidden_layers = 9,000", num_hidden_layers=9000),
    "more labels than numbers": with_more("num_labels", num_labels=10**9),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.long
def test_a_hostile_checkpoint_is_refused_by_every_command(case, place, model, tmp_path, fails):
    message = HOSTILE[case](model, harm := tmp_path / "harm")
    out, recipe = tmp_path / "out", tuned(place, model, tmp_path)
    before = tree(tmp_path)
    for command in (
        ("generate", model, "ant", "--max-new-tokens", 1),
        ("eval", model, "--text", place / "text.txt", "--limit", 1, "--output", tmp_path / "r"),
        ("doctor", model, "--length", 8),
        ("inspect", model, "--length", 16, "--output", out),
        ("distill", model, "--output", out, "--order", 2),
        ("train", recipe, "--output", tmp_path / "r"),
    ):
        line = fails(*command)
        assert message in line, (command, line)
    for kind in (AutoModel, AutoModelForCausalLM):
        for options in ({}, {"use_safetensors": None}):
            with pytest.raises((ValueError, LookupError)) as caught:
                kind.from_pretrained(model, trust_remote_code=False, **options)
            assert message in str(caught.value)
    line = fails("publish", model, f"folder:{out}")
    assert str(model) in line, line
    assert fails("check", model).startswith(f"no family named '{model}'")
    assert not harm.exists()
    shutil.rmtree(tmp_path / "r")  # results or a run, without anything in it
    assert tree(tmp_path) == before


def test_a_model_far_larger_than_its_file_is_refused_before_it_takes_memory(model, fails):
    change_json(model / "config.json", vocab_size=10**9)
    assert "do not belong together" in fails("generate", model, "ant")
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"the weights hold [\d,]+ numbers, and the model of"):
            AutoModelForCausalLM.from_pretrained(model, **options)


def test_labels_that_no_name_can_be_made_for_are_refused():
    with pytest.raises(ValueError, match="num_labels must be at most 1,000,000, got 1,000,000,000"):
        load_family("longhorn").config(num_labels=10**9)


@pytest.mark.parametrize("names", [("a", "a"), ("b", "a")])
def test_adapters_that_are_each_others_base_have_a_digest(names, model, tmp_path):
    for name, base in zip("ab", names, strict=True):
        shutil.copytree(model, tmp_path / name)
        where = tmp_path / name / "adapter_config.json"
        change_json(where, peft_type="LORA", base_model_name_or_path=str(tmp_path / base))
    assert weights_revision(tmp_path / "a").startswith("sha256:")


def test_a_tokenizer_that_gives_up_on_a_text_is_one_line(model, fails):
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    change_json(model / "tokenizer.json", pre_tokenizer={**split, "invert": False})
    assert "pattern in tokenizer.json" in fails("generate", model, "x" * 40)


def tokenizer_with_code(model, harm):
    code(model, harm)
    auto_map = {"AutoTokenizer": [None, "harm.Tokenizer"]}
    change_json(model / "tokenizer_config.json", tokenizer_class="Harmful", auto_map=auto_map)
    return "custom code"


def kernels_of_somebody(model, harm):
    change_json(model / "config.json", attn_implementation="somebody/harm")
    return "somebody/harm"


@pytest.mark.parametrize("change", [tokenizer_with_code, kernels_of_somebody])
def test_code_that_was_not_asked_for_is_refused(change, place, model, tmp_path, fails):
    message = change(model, harm := tmp_path / "harm")
    out = tmp_path / "out"
    for command in (
        ("generate", model, "ant", "--max-new-tokens", 1),
        ("eval", model, "--text", place / "text.txt", "--limit", 1, "--output", out),
    ):
        assert message in fails(*command)
    assert not harm.exists()


def test_code_beside_a_model_that_is_known_does_not_run(model, tmp_path, fails):
    code(model, harm := tmp_path / "harm")
    change_json(model / "config.json", auto_map={"AutoModelForCausalLM": "harm.Model"})
    assert main(["generate", str(model), "ant", "--max-new-tokens", "1"]) == 0
    assert type(AutoModelForCausalLM.from_pretrained(model)).__name__ == "LonghornForCausalLM"
    assert "harm.py is code, which is not published" in fails("publish", model, f"folder:{harm}")
    assert not harm.exists()


def test_pickles_are_refused_of_models_that_are_not_of_the_zoo(place, tmp_path, fails):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=259, num_attention_heads=1, **sizes)
    model = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    assert main(["generate", str(model), "ant", "--max-new-tokens", "1"]) == 0
    message = pickled(model, harm := tmp_path / "harm")
    for command in (
        ("generate", model, "ant"),
        ("eval", model, "--text", place / "text.txt", "--output", tmp_path / "out"),
        ("train", tuned(place, model, tmp_path), "--output", tmp_path / "run"),
    ):
        assert message in fails(*command)
    assert not harm.exists()
