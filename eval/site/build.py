"""Build the site from the repository's pages: python eval/site/build.py.

The pages keep their places, so that the links between them hold in both; README is the first, and
those in ``eval/site`` stand beside it. Two are made here, the recipe's reference and the tables of
``eval/results``, and the pictures of the zoo's table. Whatever Sphinx warns of ends the build in
one line, and an earlier site stays.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import math
import posixpath
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ssmzoo.analysis.ledger import draw_problem
from ssmzoo.analysis.sweep import searched_lines
from ssmzoo.analysis.sweep_plan import load_sweep
from ssmzoo.files import parse_yaml, write_folder
from ssmzoo.publishing.card_facts import read_facts
from ssmzoo.recipe import Recipe, Section

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "plugins/README.md",
    "plugins/*/README.md",
    "kernels/README.md",
    "kernels/benchmarks/README.md",
    "kernels/ssmzoo_kernels/*/README.md",
    "eval/*.md",
)
RECIPE = "eval/recipes/reference.md"
TABLES = "tables.md"
ZOO, LEDGER = "eval/zoo.md", "eval/results/sweep.csv"
CARDS, INDEX = "cards.md", "index.md"
# of a file or folder, the page that shows it
INSTEAD = {
    "src/ssmzoo/recipe/sections.py": RECIPE,
    "src/ssmzoo/recipe/train.py": RECIPE,
    "README.md": INDEX,
    "eval/results": TABLES,
    "model_cards/small": CARDS,
}
_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}.*\n|\n(?= {4}))+")
_INLINE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_WORDS = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "several",
}
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def build(root: Path, output: Path) -> int:
    """Build the site of a repository, replace an earlier one, and return how many pages it has.

    Raises:
        ValueError: ``output`` holds something else; a card, link or picture is broken, or Sphinx
            warned; the first of it.
        RuntimeError: Sphinx or what it needs is not installed, or the site cannot be written.
    """
    try:
        import furo  # noqa: F401
        import matplotlib  # noqa: F401
        import myst_parser  # noqa: F401
        import sphinx  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"the site needs {error.name}; install it with: pip install '.[site]'"
        ) from None
    if output.exists() and not is_replaceable(output):
        raise ValueError(f"output must be absent, empty or an earlier site, got {output}")
    pages = gather(root)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        for name, text in pages.items():
            place = source / name
            place.parent.mkdir(parents=True, exist_ok=True)
            text = with_links(root, source, name, text, pages)
            if name == ZOO:
                text += pictures(root / LEDGER, place.parent)
            place.write_text(text, encoding="utf-8")
        write_folder(output, lambda unfinished: _run_sphinx(source, unfinished, Path(folder)))
    return len(pages)


def is_replaceable(output: Path) -> bool:
    """Tell whether a folder is empty or a site, which has Sphinx's list of its headings."""
    return output.is_dir() and ((output / "objects.inv").exists() or not any(output.iterdir()))


def gather(root: Path) -> dict[str, str]:
    """Return the text of every page by its place in the site.

    Raises:
        ValueError: A card is broken.
    """
    pages = {
        path.relative_to(root).as_posix(): _text(path)
        for pattern in PATTERNS
        for path in sorted(root.glob(pattern))
    }
    own = root / "eval/site"
    for path in sorted(own.rglob("*.md")):
        pages[path.relative_to(own).as_posix()] = _text(path)
    pages[INDEX] = f"{_text(root / 'README.md')}\n{pages[INDEX]}"
    pages.pop("README.md")
    for path in sorted((root / "model_cards").glob("*.json")):
        read_facts(path)
        pages[f"model_cards/{path.stem}.md"] = card(path.with_suffix(".md"))
    for path in sorted((root / "model_cards/small").glob("*/README.md")):
        pages[path.relative_to(root).as_posix()] = card(path)
    pages[RECIPE] = recipe_reference()
    pages[TABLES] = tables(root)
    return pages


def card(path: Path) -> str:
    """Return a card without its metadata, which are for the Hub.

    Raises:
        ValueError: The card or its metadata are missing or broken.
    """
    text = _text(path)
    metadata = re.match(r"---\n(.*?\n)---\n", text, re.DOTALL)
    if metadata is None or not isinstance(parse_yaml(metadata[1], str(path)), dict):
        raise ValueError(f"{path}: a card must begin with metadata between lines of ---")
    return text[metadata.end() :]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from None


def with_links(root: Path, source: Path, name: str, text: str, pages: dict[str, str]) -> str:
    """Return a page whose links work in the site, and copy its pictures there.

    Links to pages stay, with their anchors, which Sphinx checks. Links to other files of the
    repository lead to its address, or become their text if ``pyproject.toml`` names none.

    Raises:
        ValueError: A link or picture leads to nothing.
    """
    address = _address(root)
    code = [match.span() for match in _code(text)]

    def replaced(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if any(begin <= match.start() < end for begin, end in code):
            return match[0]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target.split("#")[0]))
        if path in pages:
            return match[0]
        if path.startswith("../") or not (root / path).exists():
            raise ValueError(f"{name}: the link [{words}]({target}) leads to nothing")
        if path in INSTEAD:
            place = posixpath.relpath(INSTEAD[path], posixpath.dirname(name) or ".")
            return f"[{words}]({place}{''.join(target.partition('#')[1:])})"
        if picture:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, source / path)
            return match[0]
        return f"[{words}]({address}/blob/main/{path})" if address else words

    return _LINK.sub(replaced, text)


def _code(text: str) -> Iterator[re.Match[str]]:
    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0])

    for pattern in (_FENCE, _INDENTED, _INLINE):
        yield from pattern.finditer(text)
        text = pattern.sub(blank, text)


def _address(root: Path) -> str | None:
    with (root / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {})
    return next((url.rstrip("/") for key, url in urls.items() if key.lower() == "repository"), None)


def recipe_reference() -> str:
    """Return the page of a recipe's sections and fields, from their classes and docstrings."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a YAML file, read by `ssmzoo train RECIPE`; `--set section.field=value` sets "
        "a field. A field that is not named here is an error.",
        "",
    ]
    for place, section in sections(Recipe):
        summary, meanings = _docstring(section)
        lines += [f"## {place}", "", summary, "", "| field | value | if absent | meaning |"]
        lines += ["|---|---|---|---|"]
        for name, field in section.model_fields.items():
            if _section_in(field.annotation) is not None and name not in meanings:
                heading = _place(place, name, field.annotation)
                anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                meanings[name] = f"[its fields](#{anchor})"
            default = "needed" if field.is_required() else _default(field)
            kind = _kind(field.annotation)
            lines.append(f"| `{name}` | {kind} | {default} | {meanings.get(name, '')} |")
        lines.append("")
    return "\n".join(lines)


def sections(kind: type[Section], place: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a recipe, each with its place, ``train.segments``."""
    if place:
        yield place, kind
    for name, field in kind.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is not None:
            yield from sections(inner, _place(place, name, field.annotation))


def _place(place: str, name: str, annotation: Any) -> str:
    whole = f"{place}.{name}" if place else name
    return f"{whole}.NAME" if "dict" in str(annotation) else whole


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = map(_section_in, getattr(annotation, "__args__", ()))
    return next((kind for kind in inner if kind is not None), None)


def _kind(annotation: Any) -> str:
    """Return in words what a field may hold; that it may be absent is said elsewhere."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(_kind(kind) for kind in inner if kind is not type(None))
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in inner)
    if origin is list:
        return f"list of {_kind(inner[0])}s"
    if origin is dict:
        return "fields" if _section_in(annotation) is None else "sections"
    return _WORDS.get(annotation) or "a section"


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, Section):
        return "its defaults"
    words = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return f"`{words or value}`"


def _docstring(section: type[Section]) -> tuple[str, dict[str, str]]:
    """Return what a class says of itself, and of each attribute."""
    from inspect import getdoc

    summary, _, rest = (getdoc(section) or "").partition("\nAttributes:\n")
    entries = re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", rest, re.MULTILINE)
    plain = {match[1]: _markdown(match[2]) for match in entries}
    return _markdown(summary.strip()), plain


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def tables(root: Path) -> str:
    """Return the page of all ledgers and pictures of results."""
    results = root / "eval/results"
    lines = [
        "# Tables",
        "",
        "Every ledger and picture of `eval/results`. A click on a column's name sorts by it, a "
        "second one the other way round. A row is shown if it has every word typed above its "
        "table. The [log](eval/LOG.md) says what was found.",
        "",
    ]
    for path in sorted(results.rglob("*.csv")):
        head, *rows = _rows(path)
        name = path.relative_to(results).with_suffix("").as_posix()
        lines += [f"## {name}", "", _table(name, head, rows), ""]
    for path in sorted(results.rglob("*.png")):
        name = path.relative_to(results).with_suffix("").as_posix()
        lines += [f"## Picture: {name}", "", f"![{name}]({path.relative_to(root).as_posix()})", ""]
    return "\n".join(lines)


def pictures(ledger: Path, folder: Path) -> str:
    """Draw a picture of every searched problem of the sweep ``zoo``; return what shows them.

    Raises:
        ValueError: The ledger is cut, or another sweep's.
    """
    lines = searched_lines(load_sweep("zoo"), ledger)
    sections = []
    for problem in dict.fromkeys(x["problem"] for x in lines if x["value"] is not None):
        name = f"{problem.replace(' ', '-')}.png"
        draw_problem([line for line in lines if line["problem"] == problem], folder / name)
        sections.append(f"![{problem}: every model, and what its state buys]({name})\n")
    return "\n".join(["\n## Pictures\n", *sections]) if sections else ""


def _rows(path: Path) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(_text(path))))
    except csv.Error as error:
        raise ValueError(f"{path} must be CSV: {error}") from None
    if not rows:
        raise ValueError(f"{path} must begin with the names of its columns, got an empty file")
    cells = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != cells:
            raise ValueError(
                f"{path}: row {number} must have the {cells} cells of the first, got {len(row)}"
            )
    return rows


def _table(name: str, head: list[str], rows: list[list[str]]) -> str:
    heads = "".join(f"<th>{html.escape(word)}</th>" for word in head)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"""<div class="ledger" id="table-{html.escape(name)}">
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>"""


def _cell(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):  # a word; digits of a commit such as 12e4567 are one
        shown = html.escape(text)
        return f"<td>{f'<code>{shown}</code>' if text.startswith('ssmzoo ') else shown}</td>"
    shown = f"{number:,.0f}" if number.is_integer() and "." not in text else f"{number:.4g}"
    return f'<td class="number" data-value="{text}" title="{text}">{shown}</td>'


def _run_sphinx(source: Path, output: Path, folder: Path) -> None:
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    warned = io.StringIO()
    try:
        with patch_docutils(HERE), docutils_namespace():
            doctrees = folder / "doctrees"
            app = Sphinx(source, HERE, output, doctrees, "html", status=None, warning=warned)
            app.build(force_all=True)
    except SphinxError as error:
        raise ValueError(f"Sphinx: {' '.join(str(error).split())}") from None
    lines = [_STYLE.sub("", line) for line in warned.getvalue().splitlines() if line.strip()]
    if lines:
        more = f" (and {len(lines) - 1} lines more)" if len(lines) > 1 else ""
        raise ValueError(lines[0].replace(f"{source}/", "") + more)


def main(arguments: list[str] | None = None) -> int:
    """Build the site and say where it is, or in one line why not."""
    parser = argparse.ArgumentParser(description="Build the site of the repository's pages.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--output", type=Path, help="the site's folder; ROOT/build/site if absent")
    given = parser.parse_args(arguments)
    output = given.output or given.root / "build/site"
    try:
        count = build(given.root, output)
    except (ValueError, RuntimeError, LookupError, OSError) as error:
        print(f"site: {error}; {output} is as it was", file=sys.stderr)
        return 1
    print(f"{count} pages: {output / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
