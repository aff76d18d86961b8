"""Recipes from YAML files and overrides, with errors of one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ssmzoo.environment.messages import shortened, suggestion
from ssmzoo.files import is_utf8, package_data, parse_yaml
from ssmzoo.recipe.recipe import Recipe
from ssmzoo.recipe.sections import Section

Checked = TypeVar("Checked", bound=Section)


def load_recipe(source: str | Path | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        source: A YAML file, the name of a shipped recipe such as ``longhorn-demo``, or a recipe.
        overrides: ``section.field=value``, the value in YAML; they win over the file.

    Raises:
        LookupError: No such recipe or field; the message suggests.
        ValueError: A wrong value, or a file that is not UTF-8 or not YAML.
    """
    if isinstance(source, Recipe):
        name, fields = "recipe", source.model_dump(exclude_none=True)
    else:
        path = _find(source)
        name, fields = path.name, fields_of(path)
        if not isinstance(fields, dict):
            raise ValueError(
                f"{name}: must hold the sections model, data, train; got {shortened(repr(fields))}"
            )
    for override in overrides:
        set_field(fields, override)
    return read_sections(Recipe, fields, name)


def read_sections(kind: type[Checked], fields: object, name: str) -> Checked:
    """Check the content of a YAML file against a closed description.

    Args:
        kind: The description.
        fields: The content, as :func:`fields_of` returns it.
        name: Opens the messages.

    Raises:
        LookupError: No such field; the message suggests.
        ValueError: A wrong value, or no fields.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: must hold fields and values, got {shortened(repr(fields))}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _one_line(kind, name, error) from None


def fields_of(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        LookupError: No such file.
        ValueError: It is not UTF-8, or not YAML.
    """
    if not path.is_file():
        raise LookupError(f"no file {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a recipe must be UTF-8 text: {error}") from None
    return parse_yaml(text, path.name)


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    try:
        shipped = {p.stem: p for p in sorted(package_data("eval/recipes").glob("*.yaml"))}
    except LookupError:
        shipped = {}
    if str(source) in shipped:
        return shipped[str(source)]
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(str(source), beside, n=1)
    near = near or difflib.get_close_matches(path.stem, shipped, n=1)
    raise LookupError(
        f"no recipe {str(source)!r}, neither a file nor a shipped one"
        f"{f'; did you mean {near[0]!r}?' if near else ''}; shipped: "
        f"{', '.join(shipped) or 'none'}"
    )


def set_field(fields: dict[str, Any], override: str) -> None:
    """Change one field, ``section.field=value``, the value in YAML.

    Raises:
        ValueError: An override of another form, or one inside a field that is no section.
    """
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"an override must look like train.lr=3e-4, got {override!r}")
    here = fields
    for part in parts[:-1]:
        if here.get(part) is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict):
            raise ValueError(f"the override {override!r} goes into {part!r}, which is no section")
    # text that is not UTF-8 is no YAML, only a path
    here[parts[-1]] = parse_yaml(value, override) if is_utf8(value) else value


def _one_line(kind: type[Section], name: str, error: ValidationError) -> LookupError | ValueError:
    errors = error.errors(include_url=False)
    # An unknown field comes first: the missing one beside it is usually the same, misspelt.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path = [str(part) for part in first["loc"]]
    where = shortened(".".join(path))
    if first["type"] == "extra_forbidden":
        section: Any = kind
        for part in path[:-1]:
            section = _inside(section, part)
        owner = ".".join(path[:-1]) or f"the {kind.__name__.lower()}"
        known = section.model_fields
        hint = suggestion(path[-1], known) or f"; it has {', '.join(known)}"
        return LookupError(f"{name}: {owner} has no field {shortened(repr(path[-1]))}{hint}")
    if first["type"] == "missing":
        return ValueError(f"{name}: {where} is missing")
    if first["type"] == "value_error":
        return ValueError(f"{name}: {shortened(str(first.get('ctx', {}).get('error')))}")
    rule = first["msg"].replace("Input should be", "must be").replace("Input should", "must")
    rule = rule.replace("String should", "must")
    came = shortened(repr(first["input"]))
    return ValueError(f"{name}: {where} {shortened(rule[0].lower() + rule[1:])}, got {came}")


def _inside(section: Any, part: str) -> Any:
    """Return the kind of a section's field, or of an entry of a mapping."""
    if get_origin(section) is dict:
        return get_args(section)[1]
    kind = section.model_fields[part].annotation
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind  # a section or None
