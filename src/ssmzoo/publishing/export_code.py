"""The code of a checkpoint: all that it needs to load where torch and transformers are.

transformers copies from a repository only single files of its root that import each other by
``from .name import ...``, and loads each under several paths. So every module that a family's
classes need becomes one flat file, its imports rewritten; ops come as their torch implementations,
without C and Triton; and one entry file, ``modeling_<family>.py``, decides whether the installed
zoo or the files beside it define the classes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from ssmzoo.checkpoints.loader import is_loader
from ssmzoo.family import Family, claims, family_of
from ssmzoo.files import read_json, write_texts, writing
from ssmzoo.publishing.rewriting import (
    Editor,
    Resolver,
    Source,
    check_harmless,
    find_source,
    first_place,
    last_import,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK = "# Exported by ssmzoo "  # the beginning of every file that an export wrote
ITSELF = "this_module"  # the name in a flat file of the module itself, for those who import it

_STAND_INS = {
    name: Path(__file__).with_name("standalone") / f"{name.rpartition('.')[2]}.py"
    for name in (
        "ssmzoo_kernels.dispatch",
        "ssmzoo_kernels.few_rows_linear",
        "ssmzoo_kernels.token_step",
        "ssmzoo.modeling.batching.manager",
        "ssmzoo.modeling.kinds",
    )
}
_SECTION = "## Without ssmzoo"
_NEEDED = ("torch", "transformers")
_WIDTH = 100

_ENTRY = Template('''\
"""The family $family for transformers' Auto classes, with ``trust_remote_code=True``.

Where the releases below are installed, or later ones of the same series, their classes and kernels
are used; elsewhere those of the files beside this one, which need torch and transformers only.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version
from transformers import GenerationMixin

NEEDS = $needs
MADE_WITH = $made_with

_log = logging.getLogger("ssmzoo")

for _name, _oldest in NEEDS.items():
    if Version(version(_name)) < Version(_oldest):
        raise ImportError(
            f"this checkpoint's code needs {_name}>={_oldest}, got {version(_name)}; "
            f"pip install --upgrade {_name}"
        )


def _installed() -> bool:
    """Tell whether the installed releases can run this checkpoint."""
    for name, made_with in MADE_WITH.items():
        try:
            have, made = Version(version(name)), Version(made_with)
        except PackageNotFoundError:
            return False
        series = 1 if made.major else 2
        if have < made or have.release[:series] != made.release[:series]:
            _log.warning(
                "%s %s is installed, but this checkpoint's code is of %s: the latter runs",
                name,
                have,
                made,
            )
            return False
    return True


_hand_over = _installed()
try:
    if not _hand_over:
        raise ImportError("not installed")
    $installed
except ImportError as _error:
    if _hand_over:
        _log.warning("ssmzoo cannot be imported (%s): this checkpoint's own code runs", _error)
    $own


# classes of this module, so that a checkpoint which transformers saves takes these files along


$classes
''')


class FindsFamiliesError(ValueError):
    """Code cannot travel, because the families that it finds by their names would not."""


def export_code(model_or_folder: PreTrainedModel | str | Path, directory: str | Path) -> list[Path]:
    """Write a model's code into a folder, and name it in the folder's ``config.json``.

    A checkpoint with this code loads with ``trust_remote_code=True`` where nothing of the zoo is
    installed; where it is, its kernels take over. Weights are not written: save them first.

    Args:
        model_or_folder: A model of an installed family, or a folder with its ``config.json``.
        directory: Where to write. An earlier export in it is replaced. Without a ``config.json``
            it gets the model's.

    Returns:
        The files written.

    Raises:
        ValueError: No such model, a file in the way, or code that cannot travel.
        TypeError: Neither a model nor a path.
    """
    config = _config_of(model_or_folder)
    directory = Path(directory)
    if (directory / "config.json").is_file():
        own = read_json(directory / "config.json")
        if own.get("model_type") != config.get("model_type"):
            raise ValueError(
                f"{directory} holds a model of type {own.get('model_type')!r}, the code is of "
                f"{config.get('model_type')!r}; choose another directory"
            )
        config = own
    family = family_to_export(config)
    require_own_mixers(family, config)
    texts = code_of(family)
    for name in texts:
        if (directory / name).exists() and not is_exported(directory / name):
            raise ValueError(f"{directory / name} is of no export; move it away")
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_texts(directory, {**texts, "config.json": _config_text(config, family)})
    for path in directory.glob("*.py"):
        if path.name not in texts and (is_exported(path) or is_loader(path)):
            path.unlink()
    return [directory / name for name in (*texts, "config.json")]


def is_exported(path: Path) -> bool:
    """Tell whether an export wrote this file."""
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def family_to_export(config: Mapping[str, Any]) -> Family:
    """Return the installed family of a ``config.json``.

    Raises:
        ValueError: It is not of the zoo, or of a family that is not installed.
    """
    family = family_of(config)
    if family is None:
        raise ValueError(
            f"only models of the zoo's families have code to export, got model_type "
            f"{config.get('model_type')!r}; `ssmzoo list` shows the installed families"
        )
    return family


def require_own_mixers(family: Family, config: Mapping[str, Any]) -> None:
    """Raise unless a model's mixers are all of its own family.

    Args:
        family: The model's.
        config: The content of its ``config.json``.

    Raises:
        FindsFamiliesError: Some are of families that the configuration names.
    """
    if getattr(family.config_class.from_dict(dict(config)), "finds_families", False):
        raise FindsFamiliesError(
            f"the configuration of this {family.name} finds families by their names, and what it "
            "finds does not travel with a checkpoint"
        )


def standalone_files(
    config: Mapping[str, Any], card: str, tokenizer: bool = False
) -> dict[str, str]:
    """Return the files of a standalone publication beside weights and tokenizer, by name.

    Args:
        config: The content of its ``config.json``.
        card: Its card, which gets a section on loading it without ssmzoo.
        tokenizer: Whether it has a tokenizer.

    Raises:
        ValueError: It is of no installed family, or its code cannot travel.
    """
    family = family_to_export(config)
    require_own_mixers(family, config)
    return {
        **code_of(family),
        "config.json": _config_text(config, family),
        "README.md": _with_section(card, config, family, tokenizer),
    }


def _with_section(card: str, config: Mapping[str, Any], family: Family, tokenizer: bool) -> str:
    """Return a card that also says how to load the model where ssmzoo is not installed."""
    kinds = {kind.__name__: auto for auto, kind in family.auto_classes.items()}
    auto = kinds.get(next(iter(config.get("architectures") or ()), ""))
    if _SECTION in card or auto is None:
        return card
    section = (
        f"{_SECTION}\n\nThis repository brings its own code, "
        f"`{_entry_name(family)}.py` and what that imports. It needs torch and transformers only, "
        "gives the same\nnumbers, and is slower. Where ssmzoo is installed, its kernels run.\n"
        f"\n```python\nfrom transformers import {auto}{', AutoTokenizer' if tokenizer else ''}\n\n"
        'source = "path/to/this/folder"  # or the repository\'s id on the Hub\n'
        f"model = {auto}.from_pretrained(source, trust_remote_code=True)\n"
    )
    if tokenizer:  # transformers reads the configuration for it, too
        section += "tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)\n"
    section += "```\n"
    before, use, after = card.partition("\n## Use\n")  # first the way that works for every reader
    return f"{before.rstrip()}\n\n{section}{use}{after}"


def _config_text(config: Mapping[str, Any], family: Family) -> str:
    """Return a ``config.json`` that names the entry file's class for each Auto class."""
    classes = {
        auto: f"{_entry_name(family)}.{kind.__name__}" for auto, kind in family.auto_classes.items()
    }
    fields = dict(sorted({**config, "auto_map": classes}.items()))
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def code_of(family: Family) -> dict[str, str]:
    """Return the files of a family's code by name.

    Raises:
        ValueError: Something that it imports cannot travel; the message names module and line.
    """
    plugin = family.config_class.__module__.split(".")[0]
    flat = _Flat(plugin)
    modules = sorted({kind.__module__ for kind in family.classes})
    for module in modules:
        flat.add(module, by=f"family {family.name!r}", itself=True)
    flat.follow()
    texts = {f"{flat_name(name)}.py": flat.text(name) for name in flat.sources}
    texts[f"{_entry_name(family)}.py"] = _entry(family, plugin, modules, flat.header(plugin))
    if len(texts) <= len(flat.sources):
        raise ValueError(
            f"two modules of family {family.name!r} would get one file name, of "
            f"{', '.join(sorted(flat.sources))}; rename one"
        )
    for name, text in texts.items():
        check_harmless(name, text)
    return dict(sorted(texts.items()))


def _config_of(model_or_folder: PreTrainedModel | str | Path) -> dict[str, Any]:
    if isinstance(model_or_folder, str | Path):
        path = Path(model_or_folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{model_or_folder} must be a folder with a config.json")
        return read_json(path)
    config = getattr(model_or_folder, "config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        raise TypeError(
            "model_or_folder must be a model or the folder of one, "
            f"got {type(model_or_folder).__name__}"
        )
    return json.loads(config.to_json_string())


def flat_name(module: str) -> str:
    """Return the name of the file, without its ending, that a module becomes."""
    return module.replace(".", "_")


def _entry_name(family: Family) -> str:
    return f"modeling_{family.name}"


class _Flat:
    """The modules that travel together, and their texts as flat files."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.sources: dict[str, Source] = {}
        self.wanted_whole: set[str] = set()
        self._waiting: list[str] = []
        self._origins: dict[str, list[str]] = {}
        self._mark = f"{MARK}{version('ssmzoo')}"
        self._resolver = Resolver(_source, self._is_ours)

    def add(self, module: str, by: str, itself: bool = False) -> None:
        """Let a module travel; ``itself`` if somebody imports the module, not a name in it."""
        if itself:
            self.wanted_whole.add(module)
        if module in self.sources:
            return
        if module == "ssmzoo.family":
            raise FindsFamiliesError(
                f"{by} finds families by their names, and what it finds does not travel with a "
                "checkpoint"
            )
        if not _travels(module, self.plugin):
            raise ValueError(
                f"{by} imports {module}, which does not travel with a checkpoint; its code may use "
                f"{self.plugin}, ssmzoo.modeling and the ops of ssmzoo_kernels"
            )
        source = self._resolver.source(module)
        if source is None:
            raise ValueError(f"{by} imports {module}, which is not there")
        self.sources[module] = source
        self._waiting.append(module)

    def follow(self) -> None:
        """Add the modules that these import, and so on."""
        while self._waiting:
            source = self.sources[self._waiting.pop()]
            for node in source.imports():
                for module, name, _ in self._ours(source, node):
                    self.add(module, by=_place(source, node), itself=name is None)
            for node, package, _ in source.dynamic_imports():
                for module in self._backends(package).values():
                    self.add(module, by=_place(source, node), itself=True)

    def text(self, module: str) -> str:
        """Return the flat file of a module."""
        source = self.sources[module]
        editor = Editor(source)
        behind = ""
        calls = list(source.dynamic_imports())
        for node, package, expression in calls:
            backends = self._backends(package)
            names = ", ".join(f'"{name}": _{name}' for name in backends)
            editor.replace(node, f"{{{names}}}[{expression}]")
            for name, path in backends.items():
                line = f"from .{flat_name(path)} import {ITSELF} as _{name}\n"
                behind += "" if line in behind else line
        if behind:
            editor.after(last_import(source), behind)
        for node in source.imports():
            found = self._ours(source, node)
            if found:
                editor.replace(node, _import_lines(found, node.col_offset))
            elif calls and ast.unparse(node) == "import importlib":
                editor.remove(node)
        if module in self.wanted_whole:
            editor.after(first_place(source), f"\nimport sys\n\n{ITSELF} = sys.modules[__name__]\n")
        return self.header(module) + editor.result()

    def header(self, module: str) -> str:
        """Return the first lines of a module's file: where it is from, under which licence."""
        package = module.split(".")[0]
        if package not in self._origins:
            ours = package in ("ssmzoo", "ssmzoo_kernels")
            self._origins[package] = _origin("ssmzoo" if ours else _distribution(package))
        by, *licence = self._origins[package]
        return "\n".join([f"{self._mark}: {module}{by}", *licence]) + "\n"

    def _ours(
        self, source: Source, node: ast.ImportFrom | ast.Import
    ) -> list[tuple[str, str | None, str]]:
        """Return module, name in it (None: the module itself) and name here, of all ours."""
        if isinstance(node, ast.Import):
            mine = [alias for alias in node.names if self._is_ours(alias.name)]
            if mine and (len(node.names) > 1 or mine[0].asname is None):
                raise ValueError(
                    f"{_place(source, node)} must say `from package import module` to travel"
                )
            return [(alias.name, None, alias.asname or "") for alias in mine]
        above = source.absolute(node)
        if not self._is_ours(above):
            return []
        by = _place(source, node)
        if any(alias.name == "*" for alias in node.names):
            raise ValueError(f"{by} must name what it imports from {above} to travel")
        return [
            (*self._resolver.origin(above, alias.name, by), alias.asname or alias.name)
            for alias in node.names
        ]

    def _is_ours(self, module: str) -> bool:
        return module.split(".")[0] in ("ssmzoo", "ssmzoo_kernels", self.plugin)

    def _backends(self, package: str) -> dict[str, str]:
        paths = {name: f"{package}.{name}" for name in ("eager", "reference")}
        return {name: path for name, path in paths.items() if self._resolver.source(path)}


def _source(module: str) -> Source | None:
    if module in _STAND_INS:
        return Source(module, _STAND_INS[module].read_text(encoding="utf-8"), is_package=False)
    return find_source(module)


def _travels(module: str, plugin: str) -> bool:
    parts = module.split(".")
    if parts[0] == "ssmzoo_kernels":
        return parts[-1] not in ("cpu", "triton", "native")
    modules = ("modeling", "checkpoints.loader", "checkpoints.trust", "environment.messages")
    return parts[0] == plugin or any(f"{module}.".startswith(f"ssmzoo.{m}.") for m in modules)


def _place(source: Source, node: ast.AST) -> str:
    return f"{source.name}, line {getattr(node, 'lineno', 0)},"


def _import_lines(found: list[tuple[str, str | None, str]], indent: int) -> str:
    lines = []
    groups: dict[str, list[str]] = {}
    for module, name, here in found:
        if name is None:
            lines.append(f"from .{flat_name(module)} import {ITSELF} as {here}")
        else:
            called = name if name == here else f"{name} as {here}"
            groups.setdefault(module, []).append(called)
    margin = " " * indent
    for module, names in groups.items():
        line = f"from .{flat_name(module)} import {', '.join(names)}"
        if indent + len(line) > _WIDTH:
            inner = "".join(f"{margin}    {name},\n" for name in names)
            line = f"from .{flat_name(module)} import (\n{inner}{margin})"
        lines.append(line)
    return f"\n{margin}".join(sorted(lines))


def _origin(distribution: str | None) -> list[str]:
    if distribution is None:
        return [""]
    told = metadata(distribution).json
    licence = told.get("license_expression") or told.get("license")
    spdx = [f"# SPDX-License-Identifier: {str(licence).splitlines()[0]}"] if licence else []
    return [f" of {distribution} {version(distribution)}", *spdx]


def _distribution(plugin: str) -> str | None:
    """Return the distribution whose entry point names a plugin's package; None if there is none."""
    for points in claims().values():
        for point in points:
            if point.module.split(".")[0] == plugin and point.dist is not None:
                return point.dist.name
    return None


def _entry(family: Family, plugin: str, modules: list[str], header: str) -> str:
    from transformers import GenerationMixin

    oldest = {}
    for line in requires("ssmzoo") or ():
        needed = Requirement(line)
        if needed.name in _NEEDED and needed.marker is None:
            oldest[needed.name] = next(s.version for s in needed.specifier if s.operator == ">=")
    made_with = {"ssmzoo": version("ssmzoo")}
    distribution = _distribution(plugin) or plugin
    try:
        made_with[distribution] = version(distribution)
    except PackageNotFoundError:  # a plugin of no release is none to wait for
        made_with[distribution] = "0"
    short = {module: f"_{flat_name(module.partition('.')[2] or module)}" for module in modules}
    installed = [
        f"from {module.rpartition('.')[0]} import {module.rpartition('.')[2]} as {name}"
        if "." in module
        else f"import {module} as {name}"
        for module, name in short.items()
    ]
    own = [f"from .{flat_name(m)} import {ITSELF} as {name}" for m, name in short.items()]
    config = family.config_class.__name__
    classes = [f"class {config}({short[family.config_class.__module__]}.{config}):\n    pass"]
    for kind in family.classes[1:]:
        bases = f"{short[kind.__module__]}.{kind.__name__}"
        if issubclass(kind, GenerationMixin):  # transformers looks for it among the bases only
            bases += ", GenerationMixin"
        classes.append(f"class {kind.__name__}({bases}):\n    config_class = {config}")
    return header + _ENTRY.substitute(
        family=family.name,
        needs=json.dumps(oldest),
        made_with=json.dumps(made_with),
        installed="\n    ".join(installed),
        own="\n    ".join(own),
        classes="\n\n\n".join(classes),
    )
