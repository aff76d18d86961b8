"""A checkpoint's own code: it loads where nothing of ours is, and says the same.

One process has torch, transformers and lm-eval, refuses every import of ours and of Triton, and
finds no compiler; another has ssmzoo, whose kernels must take over.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import hub_server
from tests.publishing import standalone_probe as probe
from tests.zoo import OURS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

import ssmzoo
from ssmzoo import load_family
from ssmzoo.checkpoints.loader import AUTO_MAP, LOADER
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.publishing.export_code import code_of, export_code
from ssmzoo.publishing.hub import publish
from ssmzoo.publishing.rewriting import check_harmless
from ssmzoo.testing import check
from ssmzoo.testing.subject import Subject

# one worker makes the models and runs the processes
pytestmark = [
    pytest.mark.xdist_group("export_code"),
    pytest.mark.long,
    # lm-eval and its many imports warn of their own affairs
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]

HERE = Path(__file__).parent
TOY = HERE.parent / "toy_family" / "ssmzoo_toy"
# ops of all kinds; the kit's check `standalone` compares the code of every family
NAMES = ("bmojo", "dss", "longhorn", "toy")
LM, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
EXACT = 1e-10  # relative, in float64
OURS_IMPORTED = re.compile(r"^ *(from|import) ssmzoo(?!\.auto)", re.MULTILINE)  # but by the loader


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder on the path with somebody else's family, as pip would install it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(TOY, site / "ssmzoo_toy", ignore=shutil.ignore_patterns("__pycache__"))
    facts = site / "ssmzoo_toy-0.4.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: ssmzoo-toy\nVersion: 0.4.2\nLicense-Expression: MIT\n"
    )
    (facts / "entry_points.txt").write_text("[ssmzoo.families]\ntoy = ssmzoo_toy:FAMILY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        for name in [n for n in sys.modules if n.split(".")[0] == "ssmzoo_toy"]:
            patch.delitem(sys.modules, name)
        yield site


@pytest.fixture(scope="module")
def models(foreign, tmp_path_factory):
    """Folders NAME/HEAD with float64 checkpoints, saved and exported."""
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        subject = Subject(load_family(name))
        model, classifier = subject.fresh(torch.float64), subject.classifier(torch.float64)
        model.save_pretrained(root / name / LM)
        export_code(model, root / name / LM)
        # the same code serves all heads
        shutil.copytree(root / name / LM, root / name / CLASSIFIER)
        classifier.save_pretrained(root / name / CLASSIFIER)
        shutil.copy(root / name / LM / "config.json", root / name / CLASSIFIER)
    return root


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task for lm-eval and a model that takes bytes."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["state", "space", "model", "kernel", "scan", "filter"]
    rows = [
        {"question": f"{word}: {word}, {word[: 1 + i]}", "choices": words, "answer": index}
        for i in range(3)
        for index, word in enumerate(words)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spelling.yaml").write_text(
        "task: spelling\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files:\n    test: {folder / 'rows.jsonl'}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc}]\n"
    )
    model = Subject(load_family("longhorn")).fresh(vocab_size=259)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    export_code(model, folder / "model")
    return folder


def environment(home, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    kept |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    return kept | {"HF_DATASETS_OFFLINE": "1", **more}


@pytest.fixture(scope="module")
def isolated(models, tasks, tmp_path_factory):
    """What came out of the process that has nothing of ours."""
    out = tmp_path_factory.mktemp("answers")
    with hub_server.HubServer() as server:
        files = (models / "longhorn" / LM).iterdir()
        blobs = {p.name: hub_server.Blob(p.read_bytes(), p.suffix != ".json") for p in files}
        server.repos["tester/longhorn"] = hub_server.Repo(private=False)
        server.repos["tester/longhorn"].commit("main", blobs)
        done = subprocess.run(
            [sys.executable, HERE / "standalone_probe.py", models, out, tasks],
            env=environment(out / "home", HF_ENDPOINT=server.url, PATH=""),
            cwd=out,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    return out, json.loads((out / "facts.json").read_text()), done.stderr


@pytest.fixture
def installed(models):
    """Return a function from name and head to the model of the installed class."""

    def load(name, head):
        family = load_family(name)
        kind = family.auto_classes[head]
        return kind.from_pretrained(models / name / head, dtype="auto").eval()

    return load


def relative(got, expected):
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


# --- where nothing of ours is ----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_model_and_classifier_say_the_same_without_ssmzoo(name, isolated, installed):
    out, facts, _ = isolated
    got, expected = load_file(out / f"{name}.safetensors"), probe.answers(installed(name, LM))
    assert facts[name]["module"].startswith("transformers_modules.")
    assert got.keys() == expected.keys()
    assert torch.equal(got.pop("generation"), expected.pop("generation"))
    errors = {what: relative(got[what], answer) for what, answer in expected.items()}
    got = load_file(out / f"{name}-classifier.safetensors")
    errors["judged"] = relative(got["logits"], probe.judged(installed(name, CLASSIFIER))["logits"])
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.parametrize("name", NAMES)
def test_every_auto_class_finds_the_familys_class_and_saves_its_code(name, isolated, models):
    facts = isolated[1][name]
    classes = {auto: kind.__name__ for auto, kind in load_family(name).auto_classes.items()}
    assert facts["heads"] == classes
    assert {"AutoConfig", "AutoModel", LM, CLASSIFIER} <= classes.keys()
    assert facts["again"]
    assert set(facts["copied"]) == {path.name for path in (models / name / LM).iterdir()}


def test_exported_code_runs_without_ssmzoo_and_says_that_it_is_slow(isolated):
    _, facts, told = isolated
    assert facts["forbidden"] == []
    assert "this checkpoint runs on the code that came with it, in torch" in told
    assert "cannot be imported" not in told


def test_a_repository_on_the_hub_loads_by_its_id(isolated, installed):
    got = load_file(isolated[0] / "from-hub.safetensors")["logits"]
    expected = probe.answers(installed("longhorn", LM))["logits"]
    assert relative(got, expected) <= EXACT


def test_stock_lm_eval_scores_it_as_the_installed_model_would_be(isolated, tasks):
    [path] = (isolated[0] / "lm-eval").rglob("samples_spelling_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    kind = load_family("longhorn").causal_lm_class
    model = kind.from_pretrained(tasks / "model").eval()
    hits, errors = [], []
    for sample in samples:
        scores = []
        for asked, answered in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = (list(asked[f"arg_{i}"].encode()) for i in range(2))
            tokens = torch.tensor([context + continuation])
            with torch.no_grad():
                logits = model(tokens[:, :-1]).logits[0].log_softmax(-1)
            chances = logits.gather(-1, tokens[0, 1:, None])[-len(continuation) :]
            scores.append(float(chances.sum()))
            errors.append(abs(float(answered[0][0]) / scores[-1] - 1))
        hits.append(max(range(len(scores)), key=scores.__getitem__) == sample["doc"]["answer"])
    assert len(hits) == 18
    assert max(errors) < 1e-5
    [path] = (isolated[0] / "lm-eval").rglob("results_*.json")
    accuracy = json.loads(path.read_text())["results"]["spelling"]["acc,none"]
    assert accuracy == pytest.approx(sum(hits) / len(hits))
    assert 0 < accuracy < 1  # neither all right nor all wrong


# --- where ssmzoo is -------------------------------------------------------------------------

HAND_OVER = """
import json, sys
import torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
models, out = map(Path, sys.argv[1:])
ids = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(1))
facts = {}
for folder in sorted(models.iterdir()):
    source = folder / "AutoModelForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, out / f"{folder.name}.safetensors")
    facts[folder.name] = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]

import ssmzoo.auto
from ssmzoo_kernels import last_backend

facts["backends"] = [last_backend(op) for op in ("longhorn_scan", "selective_scan", "fft_conv")]
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
facts["registered"] = type(model).__module__
model.save_pretrained(out / "again")
config = json.loads((out / "again" / "config.json").read_text())
facts["again"] = [config["auto_map"], [path.name for path in (out / "again").glob("*.py")]]
(out / "facts.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def beside_ssmzoo(models, foreign, tmp_path_factory):
    out = tmp_path_factory.mktemp("hand-over")
    path = os.pathsep.join(filter(None, [str(foreign), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", HAND_OVER, models, out],
        env=environment(out / "home", HF_HUB_OFFLINE="1", PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return out, json.loads((out / "facts.json").read_text()), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_ssmzoo_provides_the_classes(name, beside_ssmzoo, installed):
    out, facts, told = beside_ssmzoo
    ours = installed(name, LM)
    assert f"{type(ours).__module__}.{type(ours).__name__}" in facts[name]
    assert not [kind for kind in facts[name] if kind.startswith("transformers_modules.")][1:]
    with torch.no_grad():
        expected = ours(probe.ids(2, 13, seed=1)).logits
    got = load_file(out / f"{name}.safetensors")["logits"]
    assert relative(got, expected) <= EXACT
    assert "this checkpoint" not in told


def test_an_installed_ssmzoo_provides_the_kernels(beside_ssmzoo):
    assert beside_ssmzoo[1]["backends"] == ["cpu", "cpu", "cpu"]


def test_a_saved_configuration_names_no_missing_code(beside_ssmzoo):
    assert beside_ssmzoo[1]["registered"] == "ssmzoo_toy.modeling_toy"
    assert beside_ssmzoo[1]["again"] == [AUTO_MAP, [LOADER]]


def entry(folder, name):
    """Import a folder's entry file as transformers does."""
    package = f"imported_{name}"
    spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.modeling_{name}")


@pytest.mark.parametrize(
    ("made_with", "have", "fits"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.1.7", True),
        ("0.1.3", "0.1.2", False),
        ("0.1.0", "0.2.0", False),
        ("1.2.0", "1.4.1", True),
        ("1.2.0", "2.0.0", False),
        ("0.1.0", None, False),
        ("0", "0.1.0", False),
    ],
)
def test_releases_of_the_same_series_take_over(made_with, have, fits, models, monkeypatch, caplog):
    module = entry(models / "longhorn" / LM, "longhorn")

    def version(name):
        if have is None:
            raise module.PackageNotFoundError(name)
        return have

    monkeypatch.setattr(module, "version", version)
    monkeypatch.setattr(module, "MADE_WITH", {"ssmzoo": made_with})
    with caplog.at_level(logging.WARNING, "ssmzoo"):
        assert module._installed() is fits
    assert bool(caplog.records) is (have is not None and not fits)


def test_both_releases_of_a_foreign_family_are_asked_for(models):
    text = (models / "toy" / LM / "modeling_toy.py").read_text()
    assert f'MADE_WITH = {{"ssmzoo": "{ssmzoo.__version__}", "ssmzoo-toy": "0.4.2"}}' in text


def test_too_old_a_torch_is_one_clear_error(models, tmp_path):
    folder = shutil.copytree(models / "dss" / LM, tmp_path / "old")
    text = (folder / "modeling_dss.py").read_text()
    assert '"torch": "2.11"' in text
    (folder / "modeling_dss.py").write_text(text.replace('"torch": "2.11"', '"torch": "99"'))
    with pytest.raises(ImportError, match=r"code needs torch>=99, got .*; pip install --upgrade"):
        entry(folder, "dss")


# --- the files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*sorted({*OURS} - {"hybrid"}), "toy"])  # it does not travel
def test_every_file_is_found_from_the_entry_and_says_where_it_is_from(name, foreign, tmp_path):
    texts, entry = code_of(load_family(name)), f"modeling_{name}.py"
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    found = {Path(file).name for file in get_relative_import_files(tmp_path / entry)}
    assert found == texts.keys() - {entry}
    assert not [file for file in texts if file.endswith(("_cpu.py", "_triton.py", "_native.py"))]
    ours = f"ssmzoo {ssmzoo.__version__}"
    for file, text in texts.items():
        first, second = text.splitlines()[:2]
        toy = "toy" in file
        assert first.startswith(f"# Exported by {ours}: ssmzoo")
        assert first.endswith(f" of {'ssmzoo-toy 0.4.2' if toy else ours}")
        assert second == f"# SPDX-License-Identifier: {'MIT' if toy else 'Apache-2.0'}"
        assert file == entry or not OURS_IMPORTED.search(text)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("eval('1')", "eval"),
        ("exec('x = 1')", "exec"),
        ("import pickle", "pickle"),
        ("from subprocess import run", "subprocess"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import builtins", "builtins"),
        ("numpy.load('x', allow_pickle=True)", "allow_pickle"),
    ],
)
def test_obfuscated_code_is_not_exported(line, named):
    with pytest.raises(ValueError, match=rf"m\.py, line \d: {named} may not travel"):
        check_harmless("m.py", line)
    check_harmless("m.py", "model.eval()\nimport importlib.metadata\nre.compile('x')")


REFUSED = {
    "from ssmzoo.publishing.hub import publish": r"imports ssmzoo\.publishing\.hub, which does not",
    "from ssmzoo_kernels.longhorn_scan import triton": r"imports .*\.triton, which does not travel",
    "import ssmzoo.modeling": "must say `from package import module` to travel",
    "from ssmzoo.modeling import nothing": "from ssmzoo.modeling, which does not define it",
    "from ssmzoo.modeling import *": "must name what it imports from ssmzoo.modeling",
    "import importlib\nimportlib.import_module('math')": "an import by name must have the form",
    "import importlib\nimportlib.import_module(name='math')": "an import by name must",
    "x = eval('1')": r"modeling_toy\.py, line \d+: eval may not travel",
}


@pytest.mark.parametrize("line", REFUSED)
def test_code_that_cannot_be_exported_is_named_with_its_line(line, foreign, monkeypatch):
    family = load_family("toy")
    file = Path(sys.modules[family.config_class.__module__].__file__)
    text = file.read_text(encoding="utf-8")
    try:
        docstring, _, rest = text.partition("\n")
        file.write_text(f"{docstring}\n{line}\n{rest}", encoding="utf-8")
        with pytest.raises(ValueError, match=REFUSED[line]):
            code_of(family)
    finally:
        file.write_text(text, encoding="utf-8")


def test_the_kits_check_fails_where_the_exported_code_differs(monkeypatch):
    def altered(family):
        texts = code_of(family)
        name = "ssmzoo_modeling_norms.py"
        assert "* scale * weight" in texts[name]
        return {**texts, name: texts[name].replace("* scale * weight", "* scale * weight * 1.001")}

    assert check("longhorn", only=["standalone"]).ok
    monkeypatch.setattr("ssmzoo.testing.standalone.code_of", altered)
    assert check("longhorn", only=["standalone"]).failed == ("standalone",)


# --- export_code -----------------------------------------------------------------------------


def test_an_export_is_replaced_as_a_whole(models, tmp_path):
    folder = shutil.copytree(models / "bmojo" / LM, tmp_path / "model")
    before = {path.name for path in folder.iterdir()}
    stale = folder / "ssmzoo_kernels_older.py"
    stale.write_text("# Exported by ssmzoo 0.0.9: ssmzoo_kernels.older of ssmzoo 0.0.9\n")
    (folder / "mine.py").write_text("x = 1\n")
    written = export_code(folder, folder)
    assert {path.name for path in folder.iterdir()} == before | {"mine.py"}
    assert {path.name for path in written} == {n for n in before if n.endswith(".py")} | {
        "config.json"
    }


def test_code_alone_goes_into_an_empty_folder_with_its_configuration(models, tmp_path, installed):
    export_code(installed("dss", LM), tmp_path / "new")
    model = AutoModelForCausalLM.from_config(
        load_family("dss").config_class.from_pretrained(tmp_path / "new")
    )
    assert type(model) is load_family("dss").causal_lm_class
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_dss.DSSModel"


def test_wrong_arguments_of_export_code_are_one_clear_error(models, tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with a config\.json"):
        export_code(tmp_path, tmp_path)
    with pytest.raises(TypeError, match=r"must be a model or .*, got int"):
        export_code(3, tmp_path)
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    with pytest.raises(ValueError, match=r"only models of the zoo's families .* got .*'llama'"):
        export_code(LlamaForCausalLM(config), tmp_path)
    with pytest.raises(ValueError, match="model of type 'ssmzoo_dss', the code"):
        export_code(models / "bmojo" / LM, models / "dss" / LM)
    (tmp_path / "modeling_bmojo.py").write_text("mine")
    with pytest.raises(ValueError, match=r"modeling_bmojo\.py is of no export; move it away"):
        export_code(models / "bmojo" / LM, tmp_path)
    assert (tmp_path / "modeling_bmojo.py").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


# --- publication -----------------------------------------------------------------------------

CARD = "---\nlibrary_name: transformers\n---\n\n# tiny\n"


@pytest.fixture
def saved(models, tmp_path):
    """A model without code, with a card."""
    family = load_family("longhorn")
    model = family.causal_lm_class.from_pretrained(models / "longhorn" / LM, dtype="auto")
    model.save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "README.md").write_text(CARD)
    return tmp_path / "tiny"


def test_a_publication_holds_the_code_and_a_dry_run_shows_it(saved, models, tmp_path):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    dry = publish(saved, f"{tmp_path}/out", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = publish(saved, f"{tmp_path}/out")
    assert dry.files == done.files
    held = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert held == {file.path: file.size for file in done.files}
    code = {p.name for p in (models / "longhorn" / LM).glob("*.py")}
    assert held.keys() == before.keys() - {LOADER} | code
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(CARD)
    assert "AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)" in card


def test_republishing_works_and_publishing_without_code_is_refused(saved, tmp_path):
    publish(saved, f"{tmp_path}/out")
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    publish(saved, f"{tmp_path}/out")
    publish(tmp_path / "out", f"{tmp_path}/copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == first
    with pytest.raises(ValueError, match="; publish without --no-code"):
        publish(tmp_path / "out", f"{tmp_path}/plain", code=False)
    for path in (tmp_path / "copy").glob("*.py"):
        path.unlink()
    with pytest.raises(ValueError, match="has an auto_map"):
        publish(tmp_path / "copy", f"{tmp_path}/plain", code=False)
    (tmp_path / "out" / "mine.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"mine\.py is code, which is not published"):
        publish(tmp_path / "out", f"{tmp_path}/plain")
    # the publication without code replaces the one with it
    (tmp_path / "out" / "mine.py").unlink()
    report = publish(saved, f"{tmp_path}/out", code=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f.path for f in report.files}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (tmp_path / "out" / LOADER).read_bytes() == (saved / LOADER).read_bytes()


@pytest.mark.parametrize("text", ["", "x = 1\n"])
def test_a_loader_that_is_lost_or_edited_is_not_published(text, saved, tmp_path):
    (saved / LOADER).unlink()
    if text:
        (saved / LOADER).write_text(text)
    with pytest.raises(ValueError, match=r"has an auto_map|is code, which is not published"):
        publish(saved, f"{tmp_path}/out", code=False)
    assert not (tmp_path / "out").exists()


def test_a_model_of_no_family_has_no_code_to_publish(tmp_path):
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "README.md").write_text(CARD)
    report = publish(tmp_path / "llama", f"{tmp_path}/out")
    assert not [file.path for file in report.files if file.path.endswith(".py")]
    assert report.load.endswith("with the code that transformers has")


def test_code_that_cannot_be_exported_is_an_error_with_a_way_out(saved, tmp_path, monkeypatch):
    def refuse(family):
        raise ValueError("ssmzoo_longhorn.modeling_longhorn, line 3, imports x")

    monkeypatch.setattr("ssmzoo.publishing.export_code.code_of", refuse)
    with pytest.raises(
        ValueError, match="line 3, imports x; --no-code publishes the model without"
    ):
        publish(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    publish(saved, tmp_path / "out", code=False)


def test_the_command_line_sends_the_code_and_says_how_to_load_it(saved, tmp_path, capsys):
    from ssmzoo.cli.main import main

    assert main(["publish", str(saved), f"{tmp_path}/out", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "modeling_longhorn.py" in shown
    assert "ssmzoo_kernels_longhorn_scan_eager.py" in shown
    assert shown.endswith(f"from_pretrained('{tmp_path}/out', trust_remote_code=True)\n")
    assert not (tmp_path / "out").exists()
    assert main(["publish", str(saved), f"{tmp_path}/out", "--no-code", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"\w+\.py", shown) == ["load_with_ssmzoo.py"]
    assert "install ssmzoo from a clone of its repository" in shown
    assert shown.endswith(f"import ssmzoo.auto, then from_pretrained('{tmp_path}/out')\n")


def test_the_card_of_a_publication_first_says_what_works_without_ssmzoo(saved):
    from ssmzoo.publishing.export_code import standalone_files

    config = json.loads((saved / "config.json").read_text())
    card = standalone_files(config, f"{CARD}\n## Use\n\nInstall it.\n")["README.md"]
    assert card.index("trust_remote_code=True") < card.index("\n## Use\n\nInstall it.")
    assert standalone_files(config, card)["README.md"] == card
    card = standalone_files(config, CARD, tokenizer=True)["README.md"]
    assert "AutoTokenizer.from_pretrained(source, trust_remote_code=True)\n```" in card
