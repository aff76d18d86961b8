"""The set-up: what `make` would run, asked with -n in a copy where nothing can be installed."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("install", "demo", "test", "test-transformers", "lint", "release")
NEEDED = ("pyproject.toml", "constraints.txt", "src/ssmzoo/__init__.py")


@pytest.fixture
def checkout(tmp_path):
    """A checkout after `make test`: the environment's stamps are there, newest of all."""
    (tmp_path / "src" / "ssmzoo").mkdir(parents=True)
    for name in ("Makefile", *NEEDED):
        shutil.copy2(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1_000, 1_000))
    (tmp_path / "tests" / "plugins").mkdir(parents=True)
    stamps = (
        ".venv/bin/python",
        ".venv/.installed",
        ".venv/transformers-5.17.0/.installed",
        ".venv/transformers-tests/.installed",
        ".venv/torchao/.installed",
        ".venv/onnx/.installed",
        ".venv/twine/bin/twine",
    )
    for age, name in enumerate(stamps, 2_000):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    return tmp_path


def would_run(checkout, target):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", target], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_a_second_call_installs_nothing(target, checkout):
    commands = would_run(checkout, target)
    assert commands
    assert "pip" not in commands
    assert "-m venv" not in commands


@pytest.mark.parametrize("target", TARGETS)
def test_a_first_call_makes_the_environment_once_and_then_does_its_work(target, checkout):
    shutil.rmtree(checkout / ".venv")
    commands = would_run(checkout, target)
    assert commands.count("-m venv .venv\n") == 1
    assert commands.count("twine==") == (target in ("release", "upload"))
    assert commands.count("-e '.[dev]' -c constraints.txt") == 1
    assert commands.count("--target .venv/transformers-5.17.0") == (target == "test")
    assert commands.count("pip download") == (target == "test-transformers")


@pytest.mark.parametrize("changed", NEEDED)
def test_a_changed_requirement_updates_the_environment(changed, checkout):
    os.utime(checkout / changed)
    commands = would_run(checkout, "install")
    assert commands.count("pip install") == 1
    assert "-m venv" not in commands


def test_the_demo_takes_a_text_and_fewer_steps(checkout, monkeypatch):
    assert would_run(checkout, "demo").split() == [".venv/bin/python", "eval/programs/demo.py"]
    monkeypatch.setenv("TEXT", "my text, [1] & more.txt")
    monkeypatch.setenv("STEPS", "20")
    assert would_run(checkout, "demo").strip() == (
        '.venv/bin/python eval/programs/demo.py --text "my text, [1] & more.txt" --steps "20"'
    )


def test_the_zoo_takes_names_a_text_steps_and_a_place_on_the_hub(checkout, monkeypatch):
    def words():
        return shlex.split(would_run(checkout, "zoo").replace("\\\n", ""))

    settings = {"ONLY": "s4,s5", "TEXT": "my text", "STEPS": "3", "HUB": "lab"}
    for name, value in {**settings, "PUBLIC": "1", "DRY_RUN": "1"}.items():
        monkeypatch.setenv(name, value)
    assert words()[2:] == [
        *("--only", "s4,s5", "--text", "my text", "--steps", "3"),
        *("--hub", "lab", "--public", "--dry-run"),
    ]
    monkeypatch.setenv("PUBLIC", "0")
    monkeypatch.setenv("DRY_RUN", "0")
    assert words()[-2:] == ["--hub", "lab"]


def test_ci_runs_the_two_commands_of_the_readme():
    commands = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    page = (ROOT / "README.md").read_text()
    section = page.split("## Development", 1)[1]
    typed = [line.split("#")[0].strip() for line in section.splitlines() if line[:4] == "    "]
    assert typed == ["make demo", "make test"]
    made = [line.removesuffix(" STEPS=20") for line in commands if line[:5] == "make "]
    assert list(dict.fromkeys(made)) == typed
