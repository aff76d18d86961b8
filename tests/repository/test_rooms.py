"""The rooms of ``src/ssmzoo``: which folder may import which, drawn from the code."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import ssmzoo

SRC = Path(ssmzoo.__file__).parent
# from the ground up: a room imports from rooms before it and from itself, never from one after it
ROOMS = (
    *("environment", "files", "family", "auto", "tasks", "recipe", "checkpoints", "modeling"),
    *("data", "evaluation", "training", "analysis", "distillation", "publishing", "testing", "cli"),
)
# what a family may use besides torch, transformers and its own package
FOR_PLUGINS = ("ssmzoo.modeling", "ssmzoo_kernels")


def modules(folder, package):
    """Return the files below a folder by module name."""
    files = (p for p in folder.rglob("*.py") if "_share" not in p.parts)
    names = {p: [package, *p.relative_to(folder).with_suffix("").parts] for p in files}
    return {".".join(n[:-1] if n[-1] == "__init__" else n): p for p, n in names.items()}


def imported(path):
    """Return the names that a file imports in full, at its top, in functions or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def arrows(known):
    """Return which modules each module imports; a package is no import of its own modules."""
    return {
        name: {x for x in imported(path) & known.keys() if not f"{name}.".startswith(f"{x}.")}
        for name, path in known.items()
    }


def circle(graph):
    """Return a circle of the graph, or None; what is imported by nobody left is taken away."""
    left = {name: set(targets) for name, targets in graph.items()}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        for name in free:
            del left[name]
    return sorted(left) or None


def room(module):
    """Return the entry under ``src/ssmzoo`` that a module lies in, None for the package itself."""
    return module.split(".")[1] if "." in module else None


@pytest.fixture(scope="module")
def graph():
    return arrows(modules(SRC, "ssmzoo"))


def test_every_package_is_in_the_plan():
    entries = {p.stem for p in SRC.iterdir() if not p.name.startswith(("_", "."))} - {"py"}
    assert entries == set(ROOMS)
    assert len(ROOMS) <= 16


def test_no_module_is_in_an_import_circle(graph):
    assert len(graph) > 90
    assert circle(graph) is None


def test_no_package_imports_a_package_above_it(graph):
    upward = [
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if room(name) in ROOMS and room(target) in ROOMS
        if ROOMS.index(room(target)) > ROOMS.index(room(name))
    ]
    assert upward == []


def test_a_circle_and_an_upward_arrow_would_be_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from package import b\n")
    (tmp_path / "b.py").write_text("from package.a import f\n")
    (tmp_path / "c.py").write_text("import package.a\n")
    graph = arrows(modules(tmp_path, "package"))
    assert graph["package.b"] == {"package.a"}
    assert circle(graph) == ["package.a", "package.b", "package.c"]


@pytest.mark.parametrize("name", sorted(n for n in ROOMS if (SRC / n).is_dir()))
def test_every_package_has_a_docstring_of_three_lines(name):
    text = ast.get_docstring(ast.parse((SRC / name / "__init__.py").read_text(encoding="utf-8")))
    first = (text or "").split("\n\n")[0]
    assert 1 <= len(first.splitlines()) <= 3
    assert "from outside" in (text or "").lower()


def test_a_family_imports_what_is_public_for_families_alone(families):
    public = {"ssmzoo", *(f"ssmzoo.{name}" for name in ssmzoo.__all__)}
    for name, path in families:
        own = name.split(".")[0]
        for target in {x for x in imported(path) if x.startswith("ssmzoo")} - public:
            roots = (own, *FOR_PLUGINS)
            assert any(f"{target}.".startswith(f"{root}.") for root in roots), (
                f"{path} imports {target}"
            )


@pytest.fixture(scope="module")
def families():
    root = next((p for p in SRC.parents if (p / "plugins").is_dir()), None)
    assert root is not None, "run the tests from a checkout"
    folders = sorted(p for p in (root / "plugins").glob("ssmzoo_*") if p.is_dir())
    assert len(folders) >= 5
    return [item for folder in folders for item in modules(folder, folder.name).items()]


@pytest.mark.parametrize(
    ("name", "most"),
    [("h3", 400), ("linear_attention", 580), ("s4", 400), ("s5", 400), ("spacetime", 400)],
)
def test_a_family_of_the_tables_is_short(name, most, families):
    own = {module: path for module, path in families if module.split(".")[0] == f"ssmzoo_{name}"}
    texts = [path.read_text(encoding="utf-8") for x, path in own.items() if ".convert_" not in x]
    assert len(texts) >= 3
    assert sum(len(code(text)) for text in texts) <= most  # linear attention's are ten papers


def code(text):
    """Return the lines of code: without blank ones, comments and docstrings."""
    strings = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Expr)]
    strings = [x for x in strings if isinstance(x.value, ast.Constant)]
    said = {line for x in strings for line in range(x.lineno, x.end_lineno + 1)}
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), start=1)]
    return [line for n, line in lines if line and line[0] != "#" and n not in said]


def test_lines_of_code_are_no_docstrings_comments_or_blank_ones():
    assert code('"""Say.\n\nMore.\n"""\n\n# why\nx = 1\n\n\ndef f():\n    "Do."\n    pass\n') == [
        "x = 1",
        "def f():",
        "pass",
    ]


def test_no_two_public_things_have_one_name():
    homes = defaultdict(list)
    for name, path in modules(SRC, "ssmzoo").items():
        if "standalone" in name.split("."):  # stand-ins of ops, under the ops' own names
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
