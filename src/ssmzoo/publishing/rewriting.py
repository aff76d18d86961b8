"""Read and rewrite the imports of Python modules that travel without their packages.

Texts are parsed, never matched; what is replaced lies exactly where the parser says, so comments
and layout survive.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

_UNSAFE_CALLS = frozenset({"eval", "exec", "compile", "__import__"})
_UNSAFE_MODULES = frozenset(
    {"builtins", "cloudpickle", "ctypes", "dill", "importlib", "joblib", "marshal", "pickle"}
    | {"runpy", "shelve", "subprocess"}
)


@dataclass(frozen=True)
class Source:
    """A module's text.

    Attributes:
        name: Its dotted name.
        text: What it says.
        is_package: Whether it is a package's ``__init__``.
    """

    name: str
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree's nodes."""
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module that a ``from`` line names."""
        if not node.level:
            return node.module or ""
        parents = self.package.split(".")
        base = parents[: len(parents) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def imports(self) -> Iterator[ast.ImportFrom | ast.Import]:
        """Walk over all imports, those inside functions too."""
        return (node for node in self.nodes if isinstance(node, ast.ImportFrom | ast.Import))

    def constants(self) -> dict[str, str]:
        """Return the strings that top-level names stand for."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        found[target.id] = node.value.value
        return found

    def imports_by_name(self) -> Iterator[ast.Call]:
        """Walk over all calls of ``importlib.import_module``."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        return (call for call in calls if _is_import_module(call.func))

    def dynamic_imports(self) -> Iterator[tuple[ast.Call, str, str]]:
        """Walk over calls ``importlib.import_module(f"package.{name}")``.

        Yields:
            The call, the package, and the expression for the module's name in it.

        Raises:
            ValueError: A call of another form: what it imports is not known beforehand.
        """
        constants = self.constants()
        for node in self.imports_by_name():
            name = node.args[0] if node.args else None
            parts = name.values if isinstance(name, ast.JoinedStr) else []
            texts = [_text_of(part, constants) for part in parts]
            if len(node.args) != 1 or not texts or texts[-1] is not None or None in texts[:-1]:
                raise ValueError(
                    f"{self.name}, line {node.lineno}: an import by name must have the form "
                    'importlib.import_module(f"package.{name}") to travel'
                )
            package = "".join(text for text in texts if text is not None)
            last = parts[-1]
            assert isinstance(last, ast.FormattedValue)
            yield node, package.rstrip("."), ast.unparse(last.value)


def _is_import_module(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == "import_module"
    return isinstance(function, ast.Name) and function.id == "import_module"


def _text_of(part: ast.expr, constants: dict[str, str]) -> str | None:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return constants.get(part.value.id)
    return None


def find_source(name: str) -> Source | None:
    """Return an installed module's text; None if there is no such module.

    Raises:
        ValueError: It is no Python file.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is no package
        return None
    if spec is None:
        return None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"module {name} must be a Python file to travel, got {spec.origin}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return Source(name, text, spec.submodule_search_locations is not None)


@dataclass(frozen=True)
class Edit:
    """A replacement of bytes ``start`` to ``end``; with ``end == start`` an insertion."""

    start: int
    end: int
    text: str


class Editor:
    """Collects replacements in a source's text and makes them all at once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._bytes = source.text.encode()  # the parser counts columns in bytes
        self._lines = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._edits: list[Edit] = []

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put a text in the place of a node."""
        self._edits.append(Edit(*self._span(node), text))

    def remove(self, node: ast.stmt) -> None:
        """Take out a statement with its lines."""
        assert node.end_lineno is not None
        self._edits.append(Edit(self._lines[node.lineno - 1], self._lines[node.end_lineno], ""))

    def after(self, node: ast.stmt | None, text: str) -> None:
        """Put lines behind a statement, or at the beginning."""
        line = 0 if node is None else node.end_lineno
        assert line is not None
        place = self._lines[line]
        self._edits.append(Edit(place, place, text))

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's own text."""
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def result(self) -> str:
        """Return the edited text."""
        out = self._bytes
        for edit in sorted(self._edits, key=lambda edit: edit.start, reverse=True):
            out = out[: edit.start] + edit.text.encode() + out[edit.end :]
        return out.decode()


def last_import(source: Source) -> ast.stmt | None:
    """Return the last top-level import, or the docstring; None if there is neither."""
    imports = [n for n in source.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    return imports[-1] if imports else _docstring(source)


def first_place(source: Source) -> ast.stmt | None:
    """Return the statement behind which code may begin: the ``__future__`` import or docstring."""
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return node
    return _docstring(source)


def _docstring(source: Source) -> ast.stmt | None:
    return source.tree.body[0] if ast.get_docstring(source.tree) is not None else None


class Resolver:
    """Finds where a name that one of our modules imports is really defined.

    Args:
        find: Returns a module's source, None if there is none.
        ours: Tells of a dotted module name whether it is one of those that may travel.
    """

    def __init__(self, find: Callable[[str], Source | None], ours: Callable[[str], bool]) -> None:
        self.ours = ours
        self._find = find
        self._sources: dict[str, Source | None] = {}

    def source(self, module: str) -> Source | None:
        """Return a module's source, found once."""
        if module not in self._sources:
            self._sources[module] = self._find(module)
        return self._sources[module]

    def origin(self, module: str, name: str, by: str) -> tuple[str, str | None]:
        """Return the module that defines a name and the name there; None: it is the module itself.

        Raises:
            ValueError: There is no such name.
        """
        source = self.source(module)
        if source is None:
            raise ValueError(f"{by} imports {module}, which is not there")
        for node in _top_level(source.tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        above = source.absolute(node)
                        if self.ours(above) and (above, alias.name) != (module, name):
                            return self.origin(above, alias.name, by)
                        if not self.ours(above):
                            return module, name
            elif name in _bound(node):
                return module, name
        if source.is_package and self.source(f"{module}.{name}") is not None:
            return f"{module}.{name}", None
        raise ValueError(f"{by} imports {name!r} from {module}, which does not define it")


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Walk over a module's statements, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([*node.body, *node.orelse])


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


@lru_cache(maxsize=256)
def check_harmless(name: str, text: str) -> None:
    """Fail if a text would run code that it does not show: ``eval``, ``pickle`` and their kind.

    A guard against oversights, not against an author who means to hide something.

    Raises:
        ValueError: It would, or is no Python; the message names the line.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{name} cannot travel as it is written: {error}") from None
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = node.func.id if node.func.id in _UNSAFE_CALLS else None
        elif isinstance(node, ast.Attribute) and node.attr == "load":
            found = "torch.load" if ast.unparse(node) == "torch.load" else None
        elif isinstance(node, ast.keyword):
            found = node.arg if node.arg == "allow_pickle" else None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [] if node.level else [node.module or ""]
            roots = {module.split(".")[0] for module in modules if module != _HARMLESS}
            found = next(iter(roots & _UNSAFE_MODULES), None)
            if roots == {"torch"} and any(alias.name == "load" for alias in node.names):
                found = "torch.load"
        if found is not None:
            assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
            raise ValueError(
                f"{name}, line {node.lineno}: {found} may not travel with a checkpoint, "
                "whose readers must see what runs; take it out of this module"
            )


_HARMLESS = "importlib.metadata"
