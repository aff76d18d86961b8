"""Every command and every Python block of the pages, as typed, in the order in which they stand.

A page's commands share a fresh folder, so that later ones find what earlier ones made; paths are
relative. A command that is neither run here nor listed below with a reason fails. Of what is listed
or only mentioned, programs, options and files must exist.
"""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.stock_models import tiny

from ssmzoo import load_family
from ssmzoo.cli.main import main, parsers
from ssmzoo.data.tokenizer import byte_tokenizer

# lm-eval and its many imports warn of their own affairs
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "plugins/**/*.md",
        "kernels/**/*.md",
        "eval/papers.md",
        "eval/zoo.md",
    )
    for path in ROOT.glob(pattern)
    # records of what was done
    if path.name not in ("CHANGELOG.md", "DECISIONS.md")
)
# what is not run, by its beginning, and why; the first that fits counts
SLOW = {
    r"ssmzoo check \w+$": "tests/plugins checks every family",
    r"ssmzoo sweep zoo": "trains many models; tests/analysis/test_sweep.py sweeps smaller",
}
LISTED = {
    r"make ": "test_makefile.py asks make what it would do",
    r"pip install|pip download": "needs a package registry",
    r"git ": "needs a network, or changes the repository",
    r"source \.venv/bin/activate": "changes the shell that it is typed in",
    r"torchrun|accelerate launch": "many processes; test_many_processes.py starts two",
    r"ssmzoo consolidate": "a checkpoint of many; test_many_processes.py joins one",
    r"lm_eval|trl |transformers ": "the reader's own task, or needs a repository",
    r"ssmzoo exec (transformers serve|trl|accelerate)": "test_exec.py starts such programs",
    r"(\.venv/bin/)?pytest": "the tests themselves",
    r"python kernels/benchmarks|python tests/kernels": "minutes; measures, or compiles for GPUs",
    r"ssmzoo bench --runs": "minutes; measures; test_bench.py times smaller models",
    r"ssmzoo (list --load|(info|check|train) toy|generate run/model)": (
        "needs the reader's own package installed; test_third_party.py does that"
    ),
    r"ssmzoo distill path/to/": "the reader's own model; test_distill.py",
    r"ssmzoo (prime |train (align|tune)\.yaml)": "needs a trained Transformer; test_prime.py",
    r"ssmzoo convert ": "the reader's own weights; test_convert.py",
    r"ssmzoo export ": "needs onnx; test_onnx.py",
    r"ssmzoo train coffee-induction": "minutes of training",
    r"ssmzoo train .*log\.trackers": "needs a tracker's package; test_trackers.py",
}
# Python blocks, by a line in them
LISTED_BLOCKS = {
    'family = "toy"': "test_toy_family.py has it",
    "FAMILY = Family(": "test_toy_family.py compares it with the files",
    "SCAN = Op(": "the reader's own op; test_contract.py declares one",
    "class TestLeakySum(OpContract):": "test_contract.py has it",
    "class ToyConfig(SSMConfig):": "test_toy_family.py compares it with the files",
    '"you/longhorn-demo", trust_remote_code': "a repository; test_export_code.py loads one",
    '"bmojo-130m"': "test_bmojo.py runs it",
    "import json, numpy, onnxruntime": "needs onnx; test_onnx.py runs it",
    "from torchao.quantization": "needs torchao; test_quantized.py runs it",
}
PROGRAM = (
    r"(?:\.venv/bin/)?"
    r"(?:ssmzoo|make|python|pip|pytest|git|lm_eval|torchrun|accelerate|trl|source)\s"
)
PLACEHOLDER = re.compile(
    r"<\w+>|(?<= )(COMMAND|MODEL|FAMILY|PROGRAM|RECIPE|TARGET|TEXT|DIR|N)\b|\.\.\."
)


class Piece(NamedTuple):
    """A command, a block of Python or a file to save, and its line in the page."""

    line: int
    text: str
    python: bool = False
    inline: bool = False
    saved_as: str | None = None


def pieces(page):
    """Return what a page tells its reader to type, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []

    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    def line_of(position):
        return text.count("\n", 0, position) + 1

    for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        body, line = textwrap.dedent(match[2]), line_of(match.start(2))
        if match[1] == "python":
            found.append(Piece(line, body, python=True))
        elif match[1] == "yaml" and (name := re.match(r"# ([\w-]+\.yaml)\n", body)):
            found.append(Piece(line, body, saved_as=name[1]))
        elif match[1] in ("sh", "bash", "shell", "console"):
            found += [Piece(line, command) for command in commands(body)]
    text = re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.DOTALL | re.MULTILINE)
    for match in re.finditer(r"(?:^ {4,}.*\n)+", text, re.MULTILINE):
        body = textwrap.dedent(match[0])
        if re.match(PROGRAM, body):
            found += [Piece(line_of(match.start()), command) for command in commands(body)]
            text = text[: match.start()] + blank(match) + text[match.end() :]
    for match in re.finditer(rf"`({PROGRAM}[^`]+)`", text):
        command = " ".join(match[1].split())
        for part in command.split(" && "):
            found.append(Piece(line_of(match.start()), part, inline=True))
    return sorted(found, key=lambda piece: piece.line)


def commands(block):
    """Return the commands of a shell block, comments left out, continued lines joined."""
    lines = block.replace("\\\n", " ").splitlines()
    words = (shlex.split(line, comments=True) for line in lines)
    return [shlex.join(split) for split in words if split]


def reason_to_leave(piece):
    """Return why a piece is not run; None if it is."""
    if piece.saved_as is not None:
        return None
    if piece.python:
        return next((why for part, why in LISTED_BLOCKS.items() if part in piece.text), None)
    command = piece.text.removeprefix(".venv/bin/").replace("'", '"')
    listed = {**SLOW, **LISTED}.items()
    why = next((why for start, why in listed if re.match(start, command)), None)
    if why is None and PLACEHOLDER.search(piece.text):
        return "a word in it stands for the reader's own"
    words = command.split()
    # in running text, with options at most: `ssmzoo train`, `ssmzoo train, eval`, `python -c`
    named = words[0] == "python" or all(re.match(r"--|[a-z]+,?$", word) for word in words[2:])
    if why is None and piece.inline and named:
        return "a command's name"
    return why


def check_mentioned(command):
    """Fail if a command that is not run names a program, a verb, an option or a file wrongly."""
    words = re.split(r"\s+", command.removeprefix(".venv/bin/"))
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = [word for word in shlex.split(command)[1:] if re.fullmatch(r"[a-z-]+", word)]
        assert set(named) <= set(targets), f"make has no target {named}"
    if words[0] == "python" and words[1].endswith(".py") and not PLACEHOLDER.search(words[1]):
        assert (ROOT / words[1]).is_file(), f"no file {words[1]}"
    if words[0] == "ssmzoo" and words[1] != "COMMAND":
        _, verbs = parsers()
        assert words[1].rstrip(",") in verbs, f"no command ssmzoo {words[1]}"
        known = verbs[words[1].rstrip(",")].format_usage()
        if words[1] == "exec":  # what follows is the program's
            return
        for option in (word.split("=")[0] for word in words if word.startswith("--")):
            assert re.search(rf"{re.escape(option)}\b", known), f"{words[1]} has no {option}"


def trained(family, folder):
    """Make the model that a page finds in a folder, as small as can be."""
    family = load_family(family)
    model = family.causal_lm_class(family.config(**{**family.tiny, "vocab_size": 259}))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Make a fresh folder with what a reader of a page has; return the names of its Python."""

    def begin(page):
        shutil.copy(ROOT / "README.md", tmp_path)
        (tmp_path / "eval").mkdir()
        shutil.copytree(ROOT / "eval" / "tasks", tmp_path / "eval" / "tasks")
        small = Path("model_cards", "small", "bmojo-f-text")
        shutil.copytree(ROOT / small, tmp_path / small)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        names = {"__name__": "__main__"}
        if page in ("docs/evaluate.md", "docs/generate.md", "docs/publish.md"):
            trained("longhorn", "runs/longhorn-demo/model")
        if page == "docs/transformers-models.md":
            tiny("mamba2", vocab_size=259).save_pretrained("runs/mamba2-demo/model")
            byte_tokenizer().save_pretrained("runs/mamba2-demo/model")
        if page.endswith("linear_scan/README.md"):
            names |= {"a": torch.rand(2, 5, 3), "b": torch.rand(2, 5, 3)}
        return names

    return begin


def run(piece, page, names, capsys):
    """Do what a piece says, and fail if it does."""
    place = f"{page}, line {piece.line}"
    if piece.saved_as is not None:
        Path(piece.saved_as).write_text(piece.text)
        return
    if piece.python:
        exec(compile(piece.text, place, "exec"), names)
        return
    words = shlex.split(piece.text.removeprefix(".venv/bin/"))
    if words[:2] == ["python", "-c"]:
        exec(compile(words[2], place, "exec"), {"__name__": "__main__"})
        return
    assert words[0] == "ssmzoo", f"{place}: {piece.text!r} is neither run nor listed"
    if words[1] == "exec":  # which becomes the program
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{place}: {piece.text}: {done.stderr}"
        return
    capsys.readouterr()
    status = main(words[1:])
    assert status == 0, f"{place}: {piece.text}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", [page for page in PAGES if pieces(page)])
@pytest.mark.long
def test_commands_of_a_page_run_as_written(page, reader, capsys):
    names = reader(page)
    for piece in pieces(page):
        if reason_to_leave(piece) is None:
            run(piece, page, names, capsys)
        elif not piece.python:
            check_mentioned(piece.text)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_slow_commands_of_a_page_run_as_written(reader, capsys):
    names = reader("README.md")
    for piece in pieces("README.md"):
        if any(re.match(start, piece.text) for start in SLOW) and "FAMILY" not in piece.text:
            run(piece, "README.md", names, capsys)


def test_the_readme_is_read_in_a_minute():
    assert len((ROOT / "README.md").read_bytes()) <= 6000


def test_lines_outside_tables_have_at_most_120_characters():
    long = [
        f"{page}, line {number}"
        for page in PAGES
        if page.startswith("docs/") or (page.count("/") < 2 and not page.startswith("eval/"))
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and line[:1] != "|"
    ]
    assert long == []


def without_code(page):
    """Return a page's text without its blocks of code and the commands in its lines."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return what links may name in a page, made of its headings as GitHub does."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-") for words in shown}


def test_links_lead_to_a_file_and_a_heading():
    broken = []
    for page in PAGES:
        text = re.sub(r"`[^`\n]+`", "", without_code(ROOT / page))
        for target, anchor in re.findall(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            if re.match(r"[a-z]+:", target):
                continue
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page}: {target}#{anchor}")
    assert broken == []


def test_commands_are_found_anywhere_in_a_page(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "# A page\n\n    ssmzoo list  # all\n    ssmzoo info \\\n      rtf\n\nThen `ssmzoo\n"
        "inspect dss --output x`, `ssmzoo train`.\n\n```sh\nmake test\n```\n\n- so:\n\n"
        "  ```python\n  x = 1\n  ```\n\n    y = 2\n"
    )
    assert [(piece.text, piece.python) for piece in pieces("page.md")] == [
        ("ssmzoo list", False),
        ("ssmzoo info rtf", False),
        ("ssmzoo inspect dss --output x", False),
        ("ssmzoo train", False),
        ("make test", False),
        ("x = 1\n", True),
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ssmzoo trian MODEL", "no command ssmzoo trian"),
        ("ssmzoo publish MODEL TARGET --standalone", "publish has no --standalone"),
        ("make tset TESTS='a -k b'", "make has no target \\['tset'\\]"),
        ("python tests/kernels/absent.py --table", "no file tests/kernels/absent.py"),
    ],
)
def test_a_mention_of_what_is_not_there_fails(command, message):
    with pytest.raises(AssertionError, match=message):
        check_mentioned(command)


def test_a_command_that_is_neither_run_nor_listed_fails(capsys):
    with pytest.raises(AssertionError, match="line 3: 'hf jobs run' is neither run nor listed"):
        run(Piece(3, "hf jobs run"), "page.md", {}, capsys)
