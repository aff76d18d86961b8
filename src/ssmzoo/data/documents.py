"""Documents in, as text: local files, or data sets through ``datasets``.

- A text file is a document; so is a line of a jsonl file and a row of a parquet file or a data set.
  A byte order mark before its text is no part of it, and where no text is left, there is none.
- What is streamed is read by pieces: some megabytes of a jsonl file, a compressed file, a row group
  of a parquet file, a shard of a data set.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.data.paths import expand, file_manifest, same_files, whole_folder
from ssmzoo.environment.messages import first_line, missing
from ssmzoo.files import is_utf8, kind_of_records, reason_of

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow.parquet import ParquetFile

    from ssmzoo.recipe import DataSection


logger = logging.getLogger("ssmzoo")

PIECE = 4 << 20  # bytes of a jsonl file that are read in one go
_MARK = "\ufeff"  # of the byte order, before a text


class Piece(Iterator[str]):
    """The documents of a piece of a stream, from a place on.

    Args:
        texts: The documents.
        place: Returns, as JSON, where the reading stands.
    """

    def __init__(self, texts: Iterator[str], place: Callable[[], Any]) -> None:
        self._texts, self.place = texts, place

    def __next__(self) -> str:
        """Return the next document."""
        return next(self._texts)


OpenPiece = Callable[[Any], Piece]  # from a place, None for the beginning


class _Documents:
    """What all documents share.

    Attributes:
        field: The recipe's field that names them.
        reads_all_held_out: Whether all held-out documents are read, and not only as many as needed.
    """

    def __init__(self, data: DataSection) -> None:
        self._data, self.field = data, f"data.{data.source}"
        self.reads_all_held_out = data.dataset is None and not data.streaming

    def texts(self, records: Iterable[dict[str, Any]]) -> Iterator[str]:
        """Yield the text of every record that has some.

        Raises:
            LookupError: The records have no such field.
            ValueError: The field holds something else than text.
        """
        for record in records:
            yield from _checked(record, self._data.text_field, self.field)

    def _find_files(
        self,
        key: str,
        field: str,
        paths: list[str],
        before: dict[str, Any] | None,
        root: Path | None = None,
    ) -> dict[str, Any]:
        files = expand(paths, field)
        if self._data.text is not None:
            _refuse_records(files, field)
        if before is not None:
            return {key: same_files(before[key], files, root)}
        return {key: file_manifest(files, content=not self._data.streaming)}


class FileDocuments(_Documents):
    """Local files: text, jsonl or parquet."""

    def find(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return, as JSON, ``files`` and, if paths are held out, ``validation_files``.

        Args:
            before: What this method returned when the run began.

        Raises:
            ValueError: Files that are missing, or changed since the run began; a folder of text
                with files of other kinds in it.
        """
        data = self._data
        found = self._find_files("files", self.field, getattr(data, data.source), before)
        if isinstance(data.validation, list):
            where = "validation_files", "data.validation"
            found |= self._find_files(*where, data.validation, before)
        return found

    def training(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield name and text of each document to train on; only text files have names."""
        kind = self._data.source
        for name, text in self._read(getattr(self._data, kind), found["files"]):
            yield name if kind == "text" else "", text

    def held_out(self, found: dict[str, Any]) -> Iterator[str]:
        """Yield the documents of the paths that the recipe holds out."""
        read = self._read(self._data.validation, found["validation_files"])
        return (text for _, text in read)

    def pieces(self, found: dict[str, Any]) -> list[OpenPiece]:
        """Return what opens each piece of jsonl or parquet files, in order."""
        field = self._data.text_field
        pieces: list[OpenPiece] = []
        for entry in found["files"]:
            file = Path(entry["path"])
            if self._data.parquet is not None:
                groups = range(_row_groups(file))
                reads = [partial(_read_parquet, file, field, [group]) for group in groups]
                pieces += [partial(_numbered, read) for read in reads]
            elif file.suffix == ".gz":
                pieces.append(partial(_numbered, partial(_read_jsonl, file, field)))
            else:
                size = entry["bytes"]
                cuts = [*range(0, size, PIECE), size]
                pieces += [
                    partial(_lines, file, field, begin, end) for begin, end in pairwise(cuts)
                ]
        return pieces

    def _read(self, paths: list[str], files: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        folders = any(whole_folder(path) is not None for path in paths)
        names = [Path(file["path"]) for file in files]
        data = self._data
        return read_files(data.source, names, data.text_field, skip_binary=folders)


class DatasetDocuments(_Documents):
    """A data set on the Hub, or a local folder that ``datasets`` can load."""

    def find(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return, as JSON, a folder's ``files``, or the Hub's data set and the commit found first.

        Configuration and split belong to both: they say which documents are read.

        Args:
            before: What this method returned when the run began.

        Raises:
            LookupError: No such data set.
            ValueError: Files that were changed since the run began; a revision of a folder; a name
                that is neither a folder nor a Hub id.
        """
        data, name = self._data, str(self._data.dataset)
        chosen = {"config": data.config, "split": data.split}
        if Path(name).is_dir():
            if data.revision is not None and before is None:  # runs begun before ignored it
                raise ValueError(
                    f"data.revision needs a data set on the Hub, got {data.revision!r} with the "
                    f"folder {name!r}; leave it out"
                )
            return {**self._find_files("files", self.field, [name], before, Path(name)), **chosen}
        revision = before["revision"] if before else _commit(name, data.revision)
        return {"dataset": name, **chosen, "revision": revision}

    def training(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each document to train on, without a name."""
        records = self._open(self._data.split, found, streaming=False)
        return (("", text) for text in self.texts(records))

    def held_out(self, found: dict[str, Any]) -> Iterator[str]:
        """Yield the documents of the splits that the recipe holds out."""
        for split in self._data.validation:
            yield from self.texts(self._open(split, found, streaming=self._data.streaming))

    def pieces(self, found: dict[str, Any]) -> list[OpenPiece]:
        """Return what opens each shard of the split to train on, in order."""
        records = cast("IterableDataset", self._open(self._data.split, found, streaming=True))
        return [partial(self._shard, records, i) for i in range(records.num_shards)]

    def _shard(self, records: IterableDataset, index: int, place: Any = None) -> Piece:
        shard, begun = records.shard(records.num_shards, index), False
        if place is not None:
            shard.load_state_dict(place)

        def read() -> Iterator[dict[str, Any]]:
            nonlocal begun
            for record in shard:
                begun = True
                yield cast("dict[str, Any]", record)

        # a shard knows its state only once it has been read
        return Piece(self.texts(read()), lambda: shard.state_dict() if begun else place)

    def _open(
        self, split: str, found: dict[str, Any], *, streaming: bool
    ) -> Iterable[dict[str, Any]]:
        files = [file["path"] for file in found.get("files", [])]
        given = {"split": split, "revision": found.get("revision"), "streaming": streaming}
        return _open(self.field, files, self._data.dataset, self._data.config, **given)


def documents_of(data: DataSection) -> FileDocuments | DatasetDocuments:
    """Return where a recipe's documents come from."""
    return FileDocuments(data) if data.dataset is None else DatasetDocuments(data)


def _open(field: str, files: Sequence[str], *given: Any, **named: Any) -> Iterable[dict[str, Any]]:
    """Open what lies in ``files`` through ``datasets``.

    Raises:
        LookupError: No such data set, configuration or split.
        ValueError: A file name that ``datasets`` cannot open.
    """
    from ssmzoo.tasks.data_sets import caching, require_datasets

    datasets = require_datasets()
    from datasets.exceptions import DatasetNotFoundError

    odd = next((file for file in files if not is_utf8(file)), None)
    if odd is not None:
        raise ValueError(f"{field} must have file names in UTF-8, got {odd!a}; rename it")
    try:
        with caching():
            return cast("Iterable[dict[str, Any]]", datasets.load_dataset(*given, **named))
    except (DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise LookupError(f"{field}: {first_line(error)}") from error


def _commit(name: str, revision: str | None) -> str:
    """Return the commit that the Hub data set has now, so that a resume reads the same."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except HFValidationError as error:
        raise ValueError(
            f"data.dataset must be a folder or a Hub id, owner/name, got {name!r}, which is neither"
        ) from error
    except RevisionNotFoundError as error:
        raise LookupError(
            f"data.revision: the data set {name!r} has no branch, tag or commit {revision!r}"
        ) from error
    except HfHubHTTPError as error:
        raise LookupError(
            f"data.dataset: no data set {name!r} on the Hub: {first_line(error)}"
        ) from error
    except OSError as error:
        raise RuntimeError(f"data.dataset: the Hub cannot be reached: {error}") from error
    return commit or "main"


def _refuse_records(files: Sequence[Path], field: str) -> None:
    """Fail for files of records among files of text."""
    for file in files:
        if (kind := kind_of_records(file.name)) is not None:
            raise ValueError(
                f"{field} reads plain text, and {file} is {kind}; give such files as data.{kind}, "
                "or name the others by a pattern, as in 'folder/**/*.txt'"
            )


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
                text = file.read_bytes().decode("utf-8").removeprefix(_MARK)
            except OSError as error:
                raise ValueError(f"{file}: cannot be read: {reason_of(error)}") from None
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


def _lines(file: Path, text_field: str, begin: int, end: int, place: int | None = None) -> Piece:
    """Open the lines that begin in some bytes of a jsonl file; a place is the next line's byte."""
    offset = place

    def read() -> Iterator[str]:
        nonlocal offset
        with file.open("rb") as content:
            start = max(0, begin - 1) if offset is None else offset
            content.seek(start)
            # a character for each byte, to count them, and lines that end as in any text
            lines = io.TextIOWrapper(content, encoding="latin-1", newline="")
            if offset is None:  # to the end of the line before
                offset = start + len(lines.readline()) if begin else 0
            while offset < end:
                line, where = lines.readline(), f"{file}, byte {offset}"
                if not line:
                    raise ValueError(
                        f"the data file {file} must have {end} bytes at least, as when it was "
                        f"opened, got {file.stat().st_size}; put it back as it was"
                    )
                offset += len(line)
                yield from _text_of_line(line.encode("latin-1"), text_field, where)

    return Piece(read(), lambda: offset)


def _numbered(read: Callable[[], Iterator[tuple[int, str]]], place: int | None = None) -> Piece:
    """Open what can be read from its beginning only; a place is the last document's number."""
    done = place or 0

    def texts() -> Iterator[str]:
        nonlocal done
        for number, text in read():
            if number > done:
                done = number
                yield text

    return Piece(texts(), lambda: done)


def _read_jsonl(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                for text in _text_of_line(line, text_field, f"{file}:{number}"):
                    yield number, text
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        why = reason_of(error)
        raise ValueError(f"{file}: cannot be read after line {number}: {why}") from None


def _text_of_line(line: str | bytes, text_field: str, place: str) -> Iterator[str]:
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")
        text = text.removeprefix(_MARK)
        if not text.strip():
            return
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} must be UTF-8 text: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} must be JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets in brackets
        raise ValueError(f"{place} must be JSON that Python can read: {error}") from None
    yield from _checked(record, text_field, place)


@contextmanager
def _parquet(file: Path) -> Iterator[ParquetFile]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing("parquet files need pyarrow", "train", error) from error
    with file.open("rb") as stream:  # pyarrow takes names in UTF-8 only
        try:
            # with a buffer it does not read a row group's column whole
            table = pyarrow.parquet.ParquetFile(stream, buffer_size=1 << 20)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file} must be a parquet file: {reason_of(error)}") from None
        yield table


def _row_groups(file: Path) -> int:
    with _parquet(file) as table:
        return table.num_row_groups


def _read_parquet(
    file: Path, text_field: str, groups: list[int] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield row and text of all row groups, or of neighbouring ones."""
    with _parquet(file) as table:
        from pyarrow import ArrowException

        names = table.schema_arrow.names
        if (count := names.count(text_field)) != 1:
            raise LookupError(
                f"{file} must have one column {text_field!r}, got {count} among "
                f"{', '.join(names)}; set data.text_field in the recipe"
            )
        before = range(groups[0]) if groups else ()
        row = sum(table.metadata.row_group(group).num_rows for group in before)
        try:
            for batch in table.iter_batches(256, columns=[text_field], row_groups=groups):
                # beside it are fields of a struct whose names, joined by dots, are the same
                for text in batch.column(text_field).to_pylist():
                    row += 1
                    for checked in _checked({text_field: text}, text_field, f"{file}:{row}"):
                        yield row, checked
        except (ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file}: cannot be read after row {row}: {reason_of(error)}"
            ) from None


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
    if text and not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place}: {text_field!r} must be whole characters, got the half "
                f"\\u{ord(text[error.start]):04x} of one"
            ) from None
    if text and (text := text.removeprefix(_MARK)):
        yield text
