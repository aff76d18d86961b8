"""`make release`, in the git repository of a small project that is called ssmzoo, too."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import ssmzoo

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "src/ssmzoo/__init__.py": '__version__ = "1.2.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n### Fixed\n- It works.\n\n## [1.1.0]\n- x\n",
    ".gitignore": "/dist/\n/twine*\n__pycache__/\n",
    "tests/repository/test_packaging.py": "import os, zipfile\n\ndef test_the_wheel_is_there():\n"
    "    assert zipfile.is_zipfile(os.environ['SSMZOO_TEST_WHEEL'])\n",
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "ssmzoo"
dynamic = ["version"]
license = "MIT"
requires-python = ">=3"
dependencies = ["hatchling"]
[project.optional-dependencies]
more = ["pytest"]
dev = ["not-a-package-at-all"]
[tool.hatch.version]
path = "src/ssmzoo/__init__.py"
[tool.hatch.build.targets.wheel.hooks.custom]
path = "kernels.py"
""",
    "kernels.py": """
import os
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        if machine := os.environ.get("SSMZOO_KERNELS"):
            build_data["tag"] = f"py3-none-linux_{machine}"
""",
}
KERNELS = "x86_64 aarch64"
MORE = [f"ssmzoo-1.2.0-py3-none-linux_{machine}.whl" for machine in sorted(KERNELS.split())]
UNSTABLE = """
import time
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        with open("src/ssmzoo/built.py", "w") as file:
            file.write(f"at = {time.time_ns()}")
"""


def git(folder, *arguments):
    command = ["git", "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(folder, files):
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Work")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository that is ready for version 1.2.0."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    tool = {".ci/release.py": (ROOT / ".ci" / "release.py").read_text()}
    commit(tmp_path, FILES | tool)
    write(tmp_path, {"twine": '#!/bin/sh\necho "$@" >> twine.log\n'})
    (tmp_path / "twine").chmod(0o755)
    return tmp_path


def release(folder, *, version="1.2.0"):
    command = [sys.executable, ".ci/release.py", version, "./twine"]
    environment = os.environ | {"KERNELS": KERNELS}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def state(folder):
    """Return all that a release may change."""
    return (
        *(git(folder, *command.split()) for command in ("show-ref", "status", "worktree list")),
        (folder / "CHANGELOG.md").read_text(),
        (folder / "dist").exists(),
    )


@pytest.mark.long
def test_a_release_is_a_commit_a_tag_and_checked_files(project):
    before = git(project, "rev-parse", "HEAD")
    done = release(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert git(project, "rev-parse", "HEAD^") == before
    assert git(project, "rev-parse", "v1.2.0^{commit}") == git(project, "rev-parse", "main")
    assert git(project, "status", "--porcelain") == ""
    assert len(git(project, "worktree", "list").splitlines()) == 1
    changelog = (project / "CHANGELOG.md").read_text()
    assert re.search(
        r"\n## \[Unreleased\]\n\n## \[1.2.0\] - \d{4}-\d\d-\d\d\n\n### Fixed\n- It works.\n",
        changelog,
    )
    files = {path.name: path.read_bytes() for path in (project / "dist").iterdir()}
    assert sorted(files) == [
        "ssmzoo-1.2.0-py3-none-any.whl", *MORE, "ssmzoo-1.2.0.cdx.json", "ssmzoo-1.2.0.tar.gz"
    ]  # fmt: skip
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    body = git(project, "tag", "--list", "--format", "%(contents:body)", "v1.2.0").split()
    assert dict(zip(body[1::2], body[::2], strict=True)) == digests
    [checked] = (project / "twine.log").read_text().splitlines()
    assert re.fullmatch(r"check --strict \S+-any\.whl \S+\.tar\.gz( \S+\.whl){2}", checked)
    check_sbom(json.loads(files["ssmzoo-1.2.0.cdx.json"]), digests["ssmzoo-1.2.0-py3-none-any.whl"])

    refused = release(project)
    assert "release: v1.2.0 is tagged already" in refused.stderr
    check_upload(project)


def check_upload(project):
    """Check that `make upload` sends what the tag names, and nothing without a token."""

    def upload(version="1.2.0", **token):
        known = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "TWINE"))}
        command = ["make", "upload", f"VERSION={version}"]
        done = subprocess.run(
            command, cwd=project, env=known | token, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    installed = {"Makefile": (ROOT / "Makefile").read_text(), "constraints.txt": ""}
    write(project, installed | dict.fromkeys((".venv/bin/python", ".venv/.installed"), ""))
    (project / ".venv/twine/bin").mkdir(parents=True)
    (project / "twine").rename(project / ".venv/twine/bin/twine")
    os.utime(project / ".venv/twine/bin/twine")
    (project / "twine.log").unlink()
    code, said = upload()
    assert (code, "upload: TWINE_PASSWORD must hold a token" in said) == (2, True)
    code, said = upload("1.1.0", TWINE_PASSWORD="secret")
    assert (code, "files that the tag v1.1.0 names" in said) == (2, True)
    assert not (project / "twine.log").exists()
    assert upload(TWINE_PASSWORD="secret")[0] == 0
    wheel, sdist = "dist/ssmzoo-1.2.0-py3-none-any.whl", "dist/ssmzoo-1.2.0.tar.gz"
    kernels = " ".join(f"dist/{name}" for name in MORE)
    sent = f"upload --non-interactive {wheel} {sdist} {kernels}\n"
    assert (project / "twine.log").read_text() == sent
    (project / "dist/ssmzoo-1.2.0.cdx.json").unlink()  # dist was built again
    assert upload(TWINE_PASSWORD="secret")[0] == 0
    assert (project / "twine.log").read_text() == sent * 2
    (project / wheel).write_bytes(b"another build")
    code, said = upload(TWINE_PASSWORD="secret")
    assert (code, "files that the tag v1.2.0 names" in said) == (2, True)
    assert (project / "twine.log").read_text() == sent * 2


def check_sbom(bom, digest):
    """Check what the schema of CycloneDX 1.6 requires, and what the project needs."""
    assert (bom["bomFormat"], bom["specVersion"], bom["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bom["serialNumber"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bom["metadata"]["timestamp"])
    root = bom["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert (root["name"], root["licenses"]) == ("ssmzoo", [{"expression": "MIT"}])
    for part in (root, *bom["components"]):
        assert part["type"] == "library"
        assert part["purl"] == part["bom-ref"]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.%-]+", part["purl"])
        assert part["name"]
        assert part["version"]
        kinds = [*map(list, part["licenses"])]
        assert kinds == [["expression"]] or (kinds and all(kind == ["license"] for kind in kinds))
    parts = {part["name"]: part for part in bom["components"]}
    assert {"hatchling", "pathspec", "pytest", "pluggy", "iniconfig"} <= set(parts)
    assert "not-a-package-at-all" not in parts
    # pluggy is pytest's, which is optional, and hatchling's, which is not
    wanted = {"hatchling": "required", "pluggy": "required", "pytest": "optional"}
    assert {name: parts[name]["scope"] for name in wanted} == wanted
    needs = {entry["ref"]: entry["dependsOn"] for entry in bom["dependencies"]}
    assert set(needs) == {root["bom-ref"], *(part["bom-ref"] for part in parts.values())}
    assert needs[root["bom-ref"]] == [parts["hatchling"]["bom-ref"], parts["pytest"]["bom-ref"]]
    assert set().union(*needs.values()) <= set(needs)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("dirty", "the work tree is not clean, commit or remove: ?? new.txt"),
        ("branch", "main must be checked out, got work"),
        ("version", "asked for 1.3.0, but src/ssmzoo/__init__.py says 1.2.0"),
        ("tag", "v1.2.0 is tagged already; raise __version__ in src/ssmzoo/__init__.py"),
        ("empty", "CHANGELOG.md lists nothing under [Unreleased]"),
        ("section", "CHANGELOG.md has a section [1.2.0], but there is no tag v1.2.0"),
    ],
)
def test_a_release_is_refused_in_one_line(problem, message, project):
    changelog = FILES["CHANGELOG.md"]
    if problem == "dirty":
        write(project, {"new.txt": ""})
    elif problem == "branch":
        git(project, "checkout", "--quiet", "-b", "work")
    elif problem == "tag":
        git(project, "tag", "v1.2.0")
    elif problem == "empty":
        commit(project, {"CHANGELOG.md": changelog.replace("- It works.\n", "")})
    elif problem == "section":
        commit(project, {"CHANGELOG.md": changelog.replace("1.1.0", "1.2.0")})
    before = state(project)
    done = release(project, version="1.3.0" if problem == "version" else "1.2.0")
    assert (done.returncode, done.stderr) == (1, f"release: {message}\n")
    assert state(project) == before


@pytest.mark.long
@pytest.mark.parametrize("step", ["two builds of one tree differ", "twine check", "pytest"])
def test_a_step_that_fails_changes_nothing(step, project):
    if step == "twine check":
        write(project, {"twine": "#!/bin/sh\nexit 1\n"})
    elif step == "pytest":
        commit(
            project, {"tests/repository/test_packaging.py": "def test_it():\n    assert False\n"}
        )
    else:
        hook = FILES["pyproject.toml"] + "[tool.hatch.build.hooks.custom]\n"
        commit(project, {"hatch_build.py": UNSTABLE, "pyproject.toml": hook})
    before = state(project)
    done = release(project)
    assert done.returncode == 1
    assert step in done.stderr.splitlines()[-1]
    assert state(project) == before


@pytest.mark.long
def test_a_tag_that_git_cannot_set_changes_nothing(project):
    git(project, "config", "tag.gpgSign", "true")
    git(project, "config", "gpg.program", "/bin/false")
    before = state(project)
    done = release(project)
    assert done.stderr.endswith("release: nothing was changed; git tag failed, as said above\n")
    assert state(project) == before


@pytest.mark.long
def test_main_may_move_meanwhile(project):
    write(project, {"twine": "#!/bin/sh\ngit commit --quiet --allow-empty --message Meanwhile\n"})
    done = release(project)
    assert done.stderr.endswith("release: nothing was changed; git merge failed, as said above\n")
    assert git(project, "log", "-1", "--format=%s") == "Meanwhile\n"
    assert git(project, "tag", "--list") == ""
    assert not (project / "dist").exists()


@pytest.mark.long
def test_what_is_not_installed_is_named(project):
    commit(
        project,
        {
            "pyproject.toml": FILES["pyproject.toml"].replace(
                '["hatchling"]\n[pro', '["absent"]\n[pro'
            )
        },
    )
    before = state(project)
    done = release(project)
    assert done.stderr.endswith("release: ssmzoo needs absent, which is not installed\n")
    assert state(project) == before


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("fields", "stated"),
    [
        ("License-Expression: MIT OR Apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("License: bsd-3-clause", {"expression": "BSD-3-Clause"}),
        (
            "License: The whole text\nClassifier: License :: OSI Approved :: MIT License",
            {"license": {"name": "MIT License"}},
        ),
        ("License: Apache 2.0\nLicense-File: LICENSE", {"license": {"name": "Apache 2.0"}}),
        ("License-File: LICENSE", {"license": {"name": "see its file LICENSE"}}),
        ("Name: some", {"license": {"name": "not stated"}}),
    ],
)
def test_a_licence_is_what_a_distribution_states(fields, stated, tool, tmp_path):
    write(tmp_path, {"METADATA": f"Metadata-Version: 2.4\n{fields}\n"})
    assert tool.licences(PathDistribution(tmp_path)) == [stated]


def changed_since_release(folder, version):
    """Return whether a version's tag is at another commit than the one that is checked out."""
    tagged, here = (
        subprocess.run(
            ["git", "-C", folder, "rev-parse", "--quiet", "--verify", name],
            capture_output=True,
        ).stdout
        for name in (f"v{version}^{{commit}}", "HEAD")
    )
    return bool(tagged) and tagged != here


def test_a_released_version_is_not_worked_on(project):
    git(project, "tag", "v1.2.0")
    assert not changed_since_release(project, "1.2.0")
    commit(project, {"more.py": ""})
    assert changed_since_release(project, "1.2.0")
    assert not changed_since_release(project, "1.3.0")
    assert not changed_since_release(ROOT, ssmzoo.__version__), "raise __version__: it is released"
