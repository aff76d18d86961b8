"""The registry, with distributions made up on disk and read by fresh interpreters."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ssmzoo

PLUGIN = """
from types import SimpleNamespace
from ssmzoo import Family, Paper

def family(name):
    config = SimpleNamespace(model_type="toy")
    paper = Paper("A title", "An author", "0000.00000", 2024)
    return Family(name, config, None, None, None, paper, presets={"toy-small": {}}, tiny={})
"""


THIEF = """
from transformers import PreTrainedConfig
from ssmzoo import Family, Paper

class OddConfig(PreTrainedConfig):
    model_type = "llama"

paper = Paper("A title", "An author", "0000.00000", 2024)
FAMILY = Family("thieving", OddConfig, None, None, None, paper, presets={}, tiny={})
"""


def distribution(folder, name, families, module="", needs=()):
    """Write a distribution's metadata, and its module if there is text for one."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    fields = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.2"]
    fields += [f"Requires-Dist: {need}" for need in needs]
    (info / "METADATA").write_text("\n".join([*fields, ""]))
    lines = "".join(f"{family} = {value}\n" for family, value in families.items())
    (info / "entry_points.txt").write_text(f"[ssmzoo.families]\n{lines}")
    if module:
        (folder / f"{name.replace('-', '_')}.py").write_text(module)


def run(folder, *command):
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
    )


def python(folder, code, *arguments):
    done = run(folder, "-c", code, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def listing(folder, *options):
    done = run(folder, "-m", "ssmzoo", "list", "--json", *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    rows = json.loads(done.stdout)
    return {name: [r for r in rows if r["name"] == name] for name in {r["name"] for r in rows}}


def failure(folder, name, kind):
    """Return the message of the error that loading a family raises."""
    code = f"""
from ssmzoo import load_family
try:
    load_family({name!r})
except {kind} as error:
    print(error, end="")
"""
    return python(folder, code)


SPELT_OUT = """
raise SystemExit("loaded")
SIZES = {"toy-small": {"hidden_size": 8}, "toy-large": dict(hidden_size=2**9)}
FAMILY = Family(
    name="toy",
    config_class=ToyConfig,
    causal_lm_class=ToyForCausalLM,
    token_classification_class=ToyForTokenClassification,
    paper=Paper(title="A toy, "
        "twice", authors="You", arxiv="0000.00000", year=2026),
    presets={**SIZES, "toy-odd": {}},
)
"""


@pytest.mark.parametrize("value", ["toy_family:FAMILY", "toy_package.inside:FAMILY"])
def test_listing_imports_neither_plugins_nor_torch(tmp_path, value):
    distribution(tmp_path, "toy-family", {"toy": value}, SPELT_OUT)
    (tmp_path / "toy_package").mkdir()
    (tmp_path / "toy_package" / "__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "toy_package" / "inside.py").write_text(SPELT_OUT)
    assert listing(tmp_path)["toy"] == [
        {
            "name": "toy",
            "status": "installed",
            "title": "A toy, twice",
            "arxiv": "0000.00000",
            "heads": ["causal-lm", "token-classification"],
            "presets": ["toy-small", "toy-large", "toy-odd"],
            "distribution": "toy-family",
            "version": "1.2",
            "entry_point": value,
        }
    ]
    code = "import sys, ssmzoo.cli.main as cli; cli.main(['list']); print(*sys.modules, sep='\\n')"
    modules = python(tmp_path, code).split()
    assert "ssmzoo.analysis.describe" in modules
    assert not {"torch", "transformers", "numpy", "toy_family", "ssmzoo_longhorn"} & set(modules)


@pytest.mark.parametrize(
    "module",
    [
        "FAMILY = made()",
        "from elsewhere import FAMILY",
        "FAMILY = Family(paper=PAPER, presets=presets())",
        "FAMILY = Family(paper=Paper(title=TITLE), presets={name: {} for name in 'ab'})",
        "FAMILY = Family(",
        None,
    ],
)
def test_listing_leaves_out_fields_that_a_plugin_computes(tmp_path, module):
    distribution(tmp_path, "toy-family", {"toy": "toy_package.inside:FAMILY"})
    (tmp_path / "toy_package").mkdir()
    (tmp_path / "toy_package" / "__init__.py").write_text("")
    if module is not None:
        (tmp_path / "toy_package" / "inside.py").write_text(module)
    [row] = listing(tmp_path)["toy"]
    assert (row["status"], row["title"], row["presets"]) == ("installed", None, None)
    done = run(tmp_path, "-m", "ssmzoo", "list")
    assert "paper:    not spelt out, --load imports it" in done.stdout


BROKEN = {  # by distribution: the entry point, the module, the status
    "raising-family": (
        "raising_family:FAMILY",
        "import no_such_thing",
        "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'",
    ),
    "exiting-family": (
        "exiting_family:FAMILY",
        "import sys; sys.exit()",
        "cannot be imported: SystemExit: ",
    ),
    "nameless-family": (
        "nameless family FAMILY",
        "1",
        "the entry point of nameless-family must look like package.module:FAMILY, "
        "got 'nameless family FAMILY'",
    ),
    "thieving-family": (
        "thieving_family:FAMILY",
        THIEF,
        "OddConfig.model_type must be its own, got 'llama', which is that of "
        "transformers.models.llama.configuration_llama.LlamaConfig",
    ),
}


@pytest.mark.long
def test_broken_plugins_break_no_other_plugin(tmp_path):
    for name, (value, module, _) in BROKEN.items():
        distribution(tmp_path, name, {name.removesuffix("-family"): value}, module)
    rows = listing(tmp_path, "--load")
    for name, (_, _, status) in BROKEN.items():
        [row] = rows[name.removesuffix("-family")]
        assert row["status"].startswith("broken: ")
        assert status in row["status"]
    assert rows["longhorn"][0]["status"] == "ok"
    code = "import ssmzoo.auto, transformers; print(transformers.CONFIG_MAPPING['llama'].__name__)"
    done = run(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, "LlamaConfig\n")
    assert "No module named 'no_such_thing'" in done.stderr


@pytest.mark.long
def test_a_family_without_a_model_type_is_refused(tmp_path):
    nameless = PLUGIN.replace('model_type="toy"', 'model_type="", __name__="ToyConfig"')
    module = nameless + "FAMILY = family('toy')"
    distribution(tmp_path, "toy-family", {"toy": "toy_family:FAMILY"}, module)
    assert failure(tmp_path, "toy", "RuntimeError").endswith(
        "ToyConfig.model_type must be a name such as 'ssmzoo_toy', got ''"
    )


def test_a_plugin_whose_package_is_gone_is_shown_as_broken_without_importing(tmp_path):
    distribution(tmp_path, "gone-family", {"gone": "gone_family.sub:FAMILY"})
    assert listing(tmp_path)["gone"][0]["status"] == (
        "broken: package 'gone_family' is not there; reinstall gone-family"
    )


def test_a_plugin_made_for_another_version_is_shown_as_broken_and_not_imported(tmp_path):
    fit = PLUGIN + "FAMILY = family('fit')"
    other = {"needs": ["torch", "ssmzoo-extras>=3", "ssmzoo[train]>=7,<8"]}
    distribution(tmp_path, "new-family", {"new": "new_family:FAMILY"}, "1 / 0", **other)
    fitting = {"needs": ["ssmzoo>=0.1", "ssmzoo>=7; extra == 'later'"]}
    distribution(tmp_path, "fit-family", {"fit": "fit_family:FAMILY"}, fit, **fitting)
    rows = listing(tmp_path)
    assert rows["new"][0]["status"] == (
        f"broken: the plugin (new-family) needs ssmzoo<8,>=7, this is {ssmzoo.__version__}; "
        "install a version of either that fits the other"
    )
    assert rows["fit"][0]["status"] == rows["longhorn"][0]["status"] == "installed"
    assert "family 'new' (new-family) needs ssmzoo<8,>=7" in failure(
        tmp_path, "new", "RuntimeError"
    )


def test_a_name_claimed_by_two_plugins_is_refused_and_both_are_named(tmp_path):
    toy = PLUGIN + "FAMILY = family('toy')"
    distribution(tmp_path, "toy-one", {"toy": "toy_one:FAMILY"}, toy)
    distribution(tmp_path, "toy-two", {"toy": "toy_two:FAMILY"}, toy)
    expected = "the family name 'toy' is claimed by toy-one and by toy-two; uninstall all but one"
    rows = listing(tmp_path)
    assert [row["status"] for row in rows["toy"]] == [f"broken: {expected}"] * 2
    assert sorted(row["distribution"] for row in rows["toy"]) == ["toy-one", "toy-two"]
    assert rows["longhorn"][0]["status"] == "installed"
    assert failure(tmp_path, "toy", "RuntimeError") == expected
    code = "import ssmzoo\ntry: ssmzoo.families()\nexcept RuntimeError as error: print(error)"
    assert python(tmp_path, code).strip() == expected


def test_an_unknown_family_gets_a_suggestion_and_the_list(tmp_path):
    distribution(tmp_path, "toy-family", {"toy": "toy_family:FAMILY"})
    message = failure(tmp_path, "longhon", "LookupError")
    assert message.startswith("no family named 'longhon'; did you mean 'longhorn'?; installed: ")
    assert "toy" in message.partition("installed: ")[2].split(", ")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("FAMILY = 3", "toy_family:FAMILY (toy-family) must be an ssmzoo.Family, got int"),
        (
            PLUGIN + "FAMILY = family('other')",
            "toy_family:FAMILY (toy-family) calls itself 'other', its entry point 'toy'",
        ),
        (
            "NOT_IT = 1",
            "the plugin of family 'toy' (toy-family: toy_family:FAMILY) cannot be imported: "
            "AttributeError: module 'toy_family' has no attribute 'FAMILY'",
        ),
        (
            PLUGIN + "FAMILY = family('toy')",
            "family 'toy' (toy-family) cannot be registered with transformers: ",
        ),
    ],
    ids=["not a Family", "another name", "no such attribute", "no model classes"],
)
@pytest.mark.long
def test_a_plugin_without_a_usable_family_names_the_error(tmp_path, module, message):
    distribution(tmp_path, "toy-family", {"toy": "toy_family:FAMILY"}, module)
    assert failure(tmp_path, "toy", "RuntimeError").startswith(message)


@pytest.mark.long
def test_loading_one_model_imports_one_family(tmp_path):
    thief = THIEF.replace('"llama"', '"ssmzoo_dss"')  # another package's family is imported at once
    distribution(tmp_path, "thieving-family", {"thieving": "thieving_family:FAMILY"}, thief)
    code = f"""
import sys

def plugins():
    return sorted({{m for m in sys.modules if m.startswith("ssmzoo_") and "." not in m}})

import ssmzoo.auto
import transformers
print(*plugins())
config = transformers.AutoConfig.for_model("ssmzoo_dss", hidden_size=8, num_hidden_layers=1)
config.architectures = ["DSSForCausalLM"]
config.save_pretrained({str(tmp_path)!r})
print(*plugins())
same = transformers.AutoConfig.from_pretrained({str(tmp_path)!r}).__class__
print(same is config.__class__ is transformers.CONFIG_MAPPING["ssmzoo_dss"])
model = transformers.AutoModelForCausalLM.from_config(config)
print(model.__class__ is transformers.DSSForCausalLM)
from ssmzoo_rtf import FAMILY
print(transformers.AutoModel.from_config(FAMILY.config(**FAMILY.tiny)).__class__)
from ssmzoo.family import family_of
found = [family_of({{"model_type": kind}}) for kind in ("llama", "ssmzoo_dss")]
print(found[0], found[1].name, *plugins())
"""
    done = run(tmp_path, "-c", code)
    assert "got 'ssmzoo_dss', which is that of family 'dss'" in done.stderr
    assert done.stdout.splitlines() == [
        "",
        "ssmzoo_dss ssmzoo_kernels",
        "True",
        "True",
        "<class 'ssmzoo_rtf.modeling_rtf.RTFModel'>",
        "None dss ssmzoo_dss ssmzoo_kernels ssmzoo_rtf",
    ]


def test_every_family_of_ours_has_the_model_type_of_its_stand_in():
    from ssmzoo import families, load_family

    for name in families():
        assert load_family(name).model_type == f"ssmzoo_{name}"


def test_an_unknown_preset_gets_a_suggestion_and_the_list():
    from ssmzoo import load_family

    with pytest.raises(
        LookupError, match=r"no preset 'longhorn-125'; did you mean 'longhorn-125m'"
    ):
        load_family("longhorn").config("longhorn-125")


def test_fields_given_beside_a_preset_win_over_it():
    from ssmzoo import load_family

    config = load_family("longhorn").config("longhorn-125m", num_hidden_layers=3)
    assert (config.num_hidden_layers, config.hidden_size) == (3, 768)


def test_every_family_accepts_integers_for_float_fields():
    from dataclasses import fields

    from transformers import PreTrainedConfig

    from ssmzoo import families, load_family

    foreign = {field.name for field in fields(PreTrainedConfig)}
    for name in families():
        config = load_family(name).config_class
        for field in fields(config):
            if type(field.default) is float and field.name not in foreign:
                assert field.type == float | int, f"{name}: {field.name}"
        given = config(dropout=0, initializer_range=1, **load_family(name).tiny)
        for found, expected in ((given.dropout, 0.0), (given.initializer_range, 1.0)):
            assert type(found) is float
            assert found == expected


VERSIONS = """
import json, subprocess, sys
from transformers import AutoConfig, GPT2Config
from ssmzoo import load_family
from ssmzoo.family import foreign_versions
from ssmzoo_kernels import machine

configs = [load_family(name).config(**load_family(name).tiny) for name in ("toy", "longhorn")]
configs.append(GPT2Config())

def tell():
    machine.checkout.cache_clear()
    print(json.dumps([foreign_versions(config) for config in configs]))

def git(*words):
    git = ["git", "-C", sys.argv[1], "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()

tell()
git("init", "-q"), git("add", "ssmzoo_toy"), git("commit", "-qm", "x")
tell()
with open(sys.argv[1] + "/ssmzoo_toy/__init__.py", "a") as file:
    file.write("# changed\\n")
tell()
print(json.dumps(git("rev-parse", "--short=12", "HEAD")))
"""


@pytest.mark.long
def test_results_name_version_and_commit_of_a_foreign_familys_package(tmp_path):
    """That of its distribution, whose code makes the numbers, beside ssmzoo's own."""
    toy = Path(__file__).with_name("toy_family")
    shutil.copytree(toy / "ssmzoo_toy", tmp_path / "ssmzoo_toy")
    distribution(tmp_path, "ssmzoo-toy", {"toy": "ssmzoo_toy:FAMILY"})
    lines = python(tmp_path, VERSIONS, tmp_path).splitlines()
    installed, committed, changed, head = map(json.loads, lines)
    assert installed == [{"ssmzoo-toy": "1.2"}, {}, {}]
    assert committed == [{"ssmzoo-toy": f"1.2 (commit {head})"}, {}, {}]
    assert changed == [{"ssmzoo-toy": f"1.2 (commit {head}, changed since)"}, {}, {}]


@pytest.mark.parametrize("value", [True, "0", None])
def test_non_numbers_are_refused_for_float_fields(value):
    from ssmzoo import load_family

    with pytest.raises(Exception, match="dropout"):
        load_family("longhorn").config("longhorn-125m", dropout=value)


@pytest.mark.parametrize("field", ["rms_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", [-1e-5, float("nan"), float("inf")])
def test_init_ranges_and_eps_must_be_finite_and_at_least_0(field, value):
    from ssmzoo import load_family

    with pytest.raises(ValueError, match=f"{field} must be at least 0 and finite, got"):
        load_family("longhorn").config("longhorn-125m", **{field: value})


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_not_floating_point_is_named(name):
    import torch

    from ssmzoo import load_family

    family = load_family("longhorn")
    for given in ("", "float33", "nn", "torch.float32", "int8", 3, torch.bool):
        with pytest.raises(ValueError, match=r"floating-point dtype of torch.*got"):
            family.config("longhorn-125m", **{name: given})
    for given in ("bfloat16", torch.bfloat16):
        assert family.config("longhorn-125m", **{name: given}).dtype == torch.bfloat16
