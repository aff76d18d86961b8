"""Documents in, as text: local files, or data sets through ``datasets``.

A text file is a document; so is a line of a jsonl file and a row of a parquet file or a data set.
"""

from __future__ import annotations

import glob
import gzip
import json
import logging
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.environment.messages import first_line
from ssmzoo.files import STDLIB, file_digest, is_utf8

if TYPE_CHECKING:
    from datasets import IterableDataset

    from ssmzoo.recipe import DataSection


logger = logging.getLogger("ssmzoo")


def expand(paths: Sequence[str], field: str) -> list[Path]:
    """Return the files that paths, folders and globs stand for, in a stable order, none twice.

    Raises:
        ValueError: A path that does not exist, or a glob that matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in paths:
        path = Path(pattern).expanduser()
        if pattern == STDLIB:
            matches = _standard_library()
        elif path.is_file():
            matches = [path]
        elif path.is_dir():
            matches = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path)]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
            matches = [p for p in matches if p.is_file()]
        if not matches:
            why = "holds no file" if path.is_dir() else "does not exist and matches no file"
            raise ValueError(f"{field}: {pattern!r} {why}")
        found.update(dict.fromkeys(matches))
    return list(found)


def read_files(
    kind: str, files: Sequence[Path], text_field: str, *, skip_binary: bool
) -> Iterator[tuple[str, str]]:
    """Yield ``(name, text)`` of every document that is not empty.

    Args:
        kind: ``text``, ``jsonl`` or ``parquet``.
        files: What :func:`expand` found.
        text_field: Where the text is in a record of a jsonl or parquet file.
        skip_binary: Leave out files that are not UTF-8 text, with one warning, instead of failing.

    Raises:
        ValueError: A file that cannot be read as its kind; the message names file and place.
    """
    skipped: list[Path] = []
    for file in files:
        if kind == "text":
            try:
                text = file.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                if not skip_binary:
                    raise ValueError(
                        f"{file} must be UTF-8 text, got byte "
                        f"0x{error.object[error.start]:02x} at {error.start}"
                    ) from None
                skipped.append(file)
                continue
            if text:
                yield str(file), text
        else:
            reader = _read_jsonl if kind == "jsonl" else _read_parquet
            for place, text in reader(file, text_field):
                yield f"{file}:{place}", text
    if skipped:
        logger.warning(
            "left out %d files that are not UTF-8 text, the first is %s", len(skipped), skipped[0]
        )


def open_dataset(
    data: DataSection,
    split: str,
    revision: str | None,
    *,
    streaming: bool,
    files: Sequence[str] = (),
) -> Iterable[dict[str, Any]]:
    """Open the recipe's Hub data set, or local jsonl or parquet ``files``, through ``datasets``.

    Raises:
        LookupError: No such data set, configuration or split.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as error:
        raise RuntimeError("data sets need datasets: pip install 'ssmzoo[train]'") from error
    odd = next((file for file in files if not is_utf8(file)), None)
    if odd is not None:  # which datasets cannot open
        raise ValueError(
            f"data.{data.source} must have file names in UTF-8, got {odd!a}; rename it"
        )
    try:
        if data.dataset is not None:
            opened = datasets.load_dataset(
                data.dataset, data.config, split=split, revision=revision, streaming=streaming
            )
            return cast("Iterable[dict[str, Any]]", opened)
        kind = "json" if data.jsonl is not None else "parquet"
        opened = datasets.load_dataset(
            kind, data_files=list(files), split="train", streaming=streaming
        )
        return cast("Iterable[dict[str, Any]]", opened)
    except (DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise LookupError(f"data.{data.source}: {first_line(error)}") from error


def texts_of(records: Iterable[dict[str, Any]], text_field: str, field: str) -> Iterator[str]:
    """Yield the text of every record that has some.

    Raises:
        LookupError: The records have no such field.
        ValueError: The field holds something else than text.
    """
    for record in records:
        yield from _checked(record, text_field, field)


def file_manifest(files: Sequence[Path], *, content: bool) -> list[dict[str, Any]]:
    """Return path, size, time and, if the content is to be read, sha256 of every file."""
    manifest = []
    for file in files:
        status = file.stat()
        manifest.append(
            {
                "path": str(file.absolute()),
                "bytes": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "ctime_ns": status.st_ctime_ns,  # unlike mtime, nobody sets it
                "sha256": file_digest(file) if content else None,
            }
        )
    return manifest


def same_files(
    manifest: Sequence[dict[str, Any]], files: Sequence[Path], root: Path | None = None
) -> list[dict[str, Any]]:
    """Return the manifest of the same files where they lie now, in the same order.

    A file at its place with its times is trusted. Others are the same when name and digest are; of
    a stream, whose content is not read, when name, size and time are.

    Args:
        manifest: What :func:`file_manifest` found before.
        files: What there is now.
        root: A folder in which a file's name is its path, None where it is the path's last part.

    Raises:
        ValueError: A file was changed, removed or added; the message names it.
    """
    now = {str(file.absolute()): file for file in files}
    found: list[dict[str, Any] | None] = [
        _entry_if_same(entry, now.pop(entry["path"])) if entry["path"] in now else None
        for entry in manifest
    ]
    hint = "since the run began; put it back as it was, or start a new run"
    by_name: dict[str, list[int]] = {}
    for i, entry in enumerate(manifest):
        if found[i] is None:
            by_name.setdefault(Path(entry["path"]).name, []).append(i)
    for path, file in now.items():
        name = str(file.relative_to(root)) if root is not None else file.name
        gone = by_name.get(file.name, [])
        gone = [i for i in gone if manifest[i]["path"].endswith(f"/{name}")]
        if not gone:
            raise ValueError(f"the data file {path} was added {hint}")
        (moved,) = file_manifest([file], content=manifest[gone[0]]["sha256"] is not None)
        same = "mtime_ns" if moved["sha256"] is None else "sha256"
        keys = ("bytes", same)
        match = next((i for i in gone if all(manifest[i][k] == moved[k] for k in keys)), None)
        if match is None:
            raise ValueError(f"the data file {path} was changed {hint}")
        found[match] = moved
        by_name[file.name].remove(match)
    for entry, there in zip(manifest, found, strict=True):
        if there is None:
            raise ValueError(f"the data file {entry['path']} was removed {hint}")
    return [there for there in found if there is not None]


def _entry_if_same(before: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the entry of a file that is still at its place."""
    status = file.stat()
    same = (status.st_size, status.st_mtime_ns) == (before["bytes"], before["mtime_ns"])
    if same and before["sha256"] is None:  # of a stream there is no more to compare
        return before
    if same and status.st_ctime_ns == before.get("ctime_ns"):
        return before
    if before["sha256"] is None or file_digest(file) != before["sha256"]:
        raise ValueError(
            f"the data file {file.absolute()} was changed since the run began; put it back as it "
            "was, or start a new run"
        )
    return before


def split_over_ranks(
    records: Iterable[dict[str, Any]], rank: int, world: int
) -> Iterable[dict[str, Any]]:
    """Return the share of a streamed data set that one of several processes reads."""
    if world == 1:
        return records
    from datasets.distributed import split_dataset_by_node

    share = split_dataset_by_node(cast("IterableDataset", records), rank=rank, world_size=world)
    return cast("Iterable[dict[str, Any]]", share)


def _read_jsonl(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}:{number} must be JSON: {error.msg}") from None
                for text in _checked(record, text_field, f"{file}:{number}"):
                    yield number, text
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: cannot be read after line {number}: {error}") from None


def _read_parquet(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RuntimeError("parquet files need pyarrow: pip install 'ssmzoo[train]'") from error
    with file.open("rb") as stream:  # pyarrow takes names in UTF-8 only
        try:
            table = pyarrow.parquet.ParquetFile(stream)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file} must be a parquet file: {error}") from None
        names = table.schema_arrow.names
        if text_field not in names:
            raise LookupError(
                f"{file} has no column {text_field!r}, it has {', '.join(names)}; "
                "set data.text_field in the recipe"
            )
        row = 0
        for batch in table.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                for checked in _checked({text_field: text}, text_field, f"{file}:{row}"):
                    yield row, checked


def _checked(record: Any, text_field: str, place: str) -> Iterator[str]:
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be an object with {text_field!r}, got {record!r:.60}")
    if text_field not in record:
        raise LookupError(
            f"{place} has no field {text_field!r}, it has {', '.join(record) or 'none'}; "
            "set data.text_field in the recipe"
        )
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{place}: {text_field!r} must be text, got {type(text).__name__}")
    if text:
        yield text


def _hidden(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "__pycache__"}
    return [f for f in sorted(root.rglob("*.py")) if not skipped & {*f.relative_to(root).parts}]
