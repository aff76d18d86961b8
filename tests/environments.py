"""Fresh environments with our wheel in them, away from the checkout (fixtures; see conftest)."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, with the packages of the one that runs the tests behind its own."""

    folder: Path

    def run(self, *command, expect=0, **variables):
        """Run one of its programs in its folder; return what it prints."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [self.folder / "bin" / command[0], *map(str, command[1:])],
            cwd=self.folder,
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout


def import_package(folder):
    """Return the package in a folder, imported without being installed."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(folder.name, init)
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def build_wheel(project, folder, **variables):
    """Return the wheel of a project, built into a folder."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    environment = os.environ | variables
    done = subprocess.run([*command, project], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.iterdir()
    return path


def make_environment(folder, *wheels):
    """Return a fresh environment with wheels, and this one's packages behind it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    done = subprocess.run([*command, "--no-index", *wheels], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [site] = folder.glob("lib/python*/site-packages")
    # lines of a .pth are plain folders: the editable install's own .pth in them is not followed
    (site / "behind.pth").write_text(
        "\n".join({sysconfig.get_path(p) for p in ("purelib", "platlib")})
    )
    return Environment(folder)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Our wheel; the one that is being released, if `make release` names it."""
    if path := os.environ.get("SSMZOO_TEST_WHEEL"):
        return Path(path)
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """An environment with our wheel."""
    return make_environment(tmp_path_factory.mktemp("venv"), wheel)
