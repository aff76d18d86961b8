"""The wheel, as a user gets it: what is in it, and that it works away from the checkout."""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from tests.environments import build_wheel, make_environment

from ssmzoo_kernels import prebuilt

# one worker builds one wheel
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    "src/ssmzoo": "ssmzoo",
    "kernels/ssmzoo_kernels": "ssmzoo_kernels",
    **{f"plugins/{path.name}": path.name for path in ROOT.glob("plugins/ssmzoo_*")},
    "eval/tasks": "ssmzoo/_share/eval/tasks",
    "eval/suites": "ssmzoo/_share/eval/suites",
    "eval/recipes": "ssmzoo/_share/eval/recipes",
    "model_cards/families": "ssmzoo/_share/model_cards/families",
}
OPTIONAL = (
    "accelerate", "datasets", "evaluate", "jinja2", "lm_eval", "matplotlib", "peft", "pydantic",
    "triton",
)  # fmt: skip


def python(installed, code):
    return installed.run("python", "-c", code)


def files_of(folder):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT / folder).as_posix()


def metadata(wheel, name):
    with zipfile.ZipFile(wheel) as archive:
        [path] = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def test_nothing_importable_but_ssmzoo_packages_lies_in_kernels_and_plugins():
    for folder in ("kernels", "plugins"):
        assert not (ROOT / folder / "__init__.py").exists()
        importable = [
            path.name
            for path in (ROOT / folder).iterdir()
            if path.suffix in {".py", ".so"} or (path / "__init__.py").exists()
        ]
        assert importable
        assert [name for name in importable if not name.startswith("ssmzoo_")] == []


def test_the_wheels_top_level_is_ssmzoo_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {"ssmzoo", "ssmzoo_kernels", "ssmzoo_longhorn"} < top
    assert [name for name in top if not name.startswith("ssmzoo")] == []
    assert [n for n in names if n.endswith(".safetensors")] == []
    assert [n for n in names if "benchmarks" in n or n.endswith((".pyc", ".so", ".o"))] == []


@pytest.mark.parametrize("folder", SHIPPED)
def test_the_wheel_holds_every_file_of(folder, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"{SHIPPED[folder]}/{path}" for path in files_of(folder)}
    assert expected
    assert expected - names == set()


def test_the_wheels_metadata_names_version_licence_and_what_it_needs(wheel):
    import ssmzoo

    text = metadata(wheel, "METADATA")
    Metadata.from_email(text, validate=True)
    fields = HeaderParser().parsestr(text)
    assert (fields["Name"], fields["Version"]) == ("ssmzoo", ssmzoo.__version__)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert "ssmzoo" in fields.get_payload()  # the README
    needs = {
        text.partition(">")[0].strip()
        for text in fields.get_all("Requires-Dist")
        if "extra ==" not in text
    }
    assert {"torch", "transformers"} < needs
    assert needs.isdisjoint({"accelerate", "datasets", "lm-eval", "matplotlib", "peft", "triton"})


def test_the_citation_names_this_version_and_the_paper_of_every_family():
    import ssmzoo
    from ssmzoo.family import families, load_family

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["version"] == ssmzoo.__version__
    papers = [load_family(name).paper for name in families()]
    assert sorted(
        (ref["title"], ref["url"].rpartition("/")[2], len(ref["authors"]))
        for ref in cited["references"]
    ) == sorted((p.title, p.arxiv, len(p.authors.split(", "))) for p in papers)


def test_the_source_distribution_takes_every_page_and_the_citation():
    with (ROOT / "pyproject.toml").open("rb") as file:
        included = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/docs", "/*.md", "/CITATION.cff", "/LICENSE"} <= set(included)
    assert (ROOT / "SECURITY.md").is_file()


def test_the_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheels_entry_points_are_the_command_and_one_family_a_plugin(wheel):
    import configparser

    points = configparser.ConfigParser()
    points.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(points["console_scripts"]) == {"ssmzoo": "ssmzoo.cli.main:main"}
    plugins = {name.removeprefix("plugins/") for name in SHIPPED if name.startswith("plugins/")}
    assert dict(points["ssmzoo.families"]) == {
        name.removeprefix("ssmzoo_"): f"{name}:FAMILY" for name in plugins
    }


@pytest.mark.long
def test_the_installed_wheel_is_what_runs_and_it_lists_its_families(installed):
    out = python(
        installed, "import ssmzoo, ssmzoo_kernels; print(ssmzoo.__file__, ssmzoo_kernels.__file__)"
    )
    assert all(path.startswith(str(installed.folder)) for path in out.split())
    out = installed.run("ssmzoo", "list")
    assert f"longhorn  installed  ssmzoo {ssmzoo_version()}\n" in out


def ssmzoo_version():
    import ssmzoo

    return ssmzoo.__version__


def test_importing_ssmzoo_loads_neither_torch_nor_transformers_nor_a_plugin(installed):
    modules = python(installed, "import sys, ssmzoo; print(*sys.modules)").split()
    assert "ssmzoo.family" in modules
    assert not {"torch", "transformers", "numpy", "yaml", "ssmzoo_kernels"} & set(modules)
    assert [name for name in modules if name.startswith("ssmzoo_")] == []


def test_help_and_list_answer_without_what_is_slow_to_import(installed):
    code = """
import sys
from ssmzoo.cli.main import main
main(["list"])
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    assert "longhorn" in python(installed, code)


@pytest.mark.long
def test_models_and_kernels_need_torch_and_transformers_only(installed):
    code = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it now fails

import torch, transformers
import ssmzoo.auto, ssmzoo.modeling, ssmzoo_kernels
from ssmzoo import families, load_family

for name in families():
    family = load_family(name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family.config(**family.tiny))
    ids = torch.arange(6)[None]
    loss = model(ids, labels=ids).loss
    loss.backward()
    out = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
    print(name, loss.isfinite().item(), out.shape[1])
"""
    lines = python(installed, code).splitlines()
    plugins = [name for name in SHIPPED if name.startswith("plugins/")]
    assert len(lines) == len(plugins)
    assert all(line.endswith(" True 8") for line in lines)


def test_shipped_files_are_found_from_an_installed_wheel(installed):
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("src/ssmzoo/**/*.py")]
    names = {name for text in texts for name in re.findall(r'package_data\("([^"]+)"\)', text)}
    assert {"eval/tasks", "model_cards/adapter.md"} <= names
    code = f"""
from ssmzoo.files import package_data
for name in {sorted(names)}:
    print(package_data(name))
"""
    assert all(path.startswith(str(installed.folder)) for path in python(installed, code).split())


def test_every_pin_lies_in_the_supported_range():
    """What `make` installs is what pyproject.toml admits, and every direct need has a pin."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    needs = [need for need in map(Requirement, texts) if need.name != "ssmzoo"]
    assert len(needs) > 10
    for need in needs:
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need


KERNELS = """
import torch
import ssmzoo
from ssmzoo_kernels import last_backend, native
from ssmzoo.family import load_family
family = load_family("longhorn")
model = family.causal_lm_class(family.config(**family.tiny)).eval()
model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)
print(last_backend("longhorn_scan"), last_backend("token_step"), native.lacks() or "ok")
"""


@pytest.mark.slow
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path):
    machine = platform.machine()
    if shutil.which(f"{machine}-linux-gnu-gcc") is None:
        pytest.skip("no gcc that is named after its machine")
    wheel = build_wheel(ROOT, tmp_path / "dist", SSMZOO_KERNELS=machine)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert len(libraries) == len(prebuilt.KINDS[machine]) * len([*prebuilt.sources()])
    for library in libraries:  # of the C library nothing newer, of OpenMP nobody's
        assert all(int(x) <= 17 for x in re.findall(rb"GLIBC_2\.(\d+)", library))
        assert b"libgomp" not in library
    installed = make_environment(tmp_path / "venv", wheel)
    places = {"PATH": "", "CC": "", "SSMZOO_ARCH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert installed.run("python", "-c", KERNELS, **places) == "cpu cpu ok\n"
    assert not (tmp_path / "cache").exists()
