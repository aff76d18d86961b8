"""Read documents from files of text, jsonl and parquet.

- A text file is one document; so is a line of a jsonl file, and a row of a parquet file. A byte
  order mark before its text is removed, and empty documents are left out.
- ``datasets`` does not read jsonl here: it starts only at a file's first byte, fails where records
  have other fields than those before them, and its errors name no line.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from ssmzoo.environment.messages import missing
from ssmzoo.files import reason_of

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

logger = logging.getLogger("ssmzoo")

_BYTE_ORDER_MARK = "\ufeff"


class Shard(Iterator[str]):
    """The documents of a shard of a stream, from a position on.

    Args:
        texts: The documents.
        position: Returns the reading position as JSON.
    """

    def __init__(self, texts: Iterator[str], position: Callable[[], Any]) -> None:
        self._texts, self.position = texts, position

    def __next__(self) -> str:
        """Return the next document."""
        return next(self._texts)


OpenShard = Callable[[Any], Shard]  # from a position, None for the beginning


def read_files(
    kind: str, files: Sequence[Path], text_field: str, *, skip_binary: bool
) -> Iterator[tuple[str, str]]:
    """Yield a file's name and the text, for every document that is not empty.

    Args:
        kind: ``text``, ``jsonl`` or ``parquet``.
        files: The files.
        text_field: Where the text is in a record of a jsonl or parquet file.
        skip_binary: Leave out files that are not UTF-8 text, with one warning, instead of failing.

    Raises:
        LookupError: A record without the text field; the message names file and line.
        ValueError: A file that cannot be read as its kind; the message names file and line.
    """
    skipped: list[Path] = []
    for file in files:
        if kind == "text":
            try:
                texts = iter([_read_text(file)])
            except UnicodeDecodeError as error:
                if not skip_binary:
                    raise ValueError(
                        f"{file} must be UTF-8 text, got byte "
                        f"0x{error.object[error.start]:02x} at {error.start}"
                    ) from None
                skipped.append(file)
                continue
        elif kind == "jsonl":
            texts = open_jsonl(file, text_field, 0, None)
        else:
            texts = open_parquet(file, text_field, None)
        for text in texts:
            if text:
                yield str(file), text
    if skipped:
        logger.warning(
            "left out %d files that are not UTF-8 text, the first is %s", len(skipped), skipped[0]
        )


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {reason_of(error)}") from None


class _Line(NamedTuple):
    """The line that begins at a byte; as text, for errors, it has its number."""

    file: Path
    offset: int

    def __str__(self) -> str:
        number = 1
        with _opened(self.file) as content:
            while content.tell() < self.offset:
                content.readline()
                number += 1
        return f"{self.file}:{number}"


def _opened(file: Path) -> BinaryIO:
    """Open a file, and unpack it if it is compressed."""
    return cast("BinaryIO", (gzip.open if file.suffix == ".gz" else open)(file, "rb"))


def open_jsonl(
    file: Path, text_field: str, begin: int, end: int | None, position: int | None = None
) -> Shard:
    """Open the lines of a file that begin in some bytes; a position is the next line's byte."""
    offset = position

    def read() -> Iterator[str]:
        nonlocal offset
        try:
            with _opened(file) as content:
                if offset is not None:
                    content.seek(offset)
                elif begin:  # a line that begins before belongs to the shard before
                    content.seek(begin - 1)
                    content.readline()
                offset = content.tell()
                while end is None or offset < end:
                    line, place = content.readline(), _Line(file, offset)
                    if not line and end is None:
                        return
                    if not line:
                        raise ValueError(
                            f"the data file {file} must have {end} bytes at least, as when it was "
                            f"opened, got {file.stat().st_size}; put it back as it was"
                        )
                    offset += len(line)
                    if text := _text_of_line(line, text_field, place):
                        yield text
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"{file}: cannot be read after byte {offset or begin}: {reason_of(error)}"
            ) from None

    return Shard(read(), lambda: offset)


def _text_of_line(line: bytes, text_field: str, place: _Line) -> str:
    try:
        text = line.decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
        if not text.strip():
            return ""
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} must be UTF-8 text: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} must be JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets in brackets
        raise ValueError(f"{place} must be JSON that Python can read: {error}") from None
    return record_text(record, text_field, place)


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


def count_row_groups(file: Path) -> int:
    """Return how many row groups a parquet file has."""
    with _parquet(file) as table:
        return table.num_row_groups


def open_parquet(
    file: Path, text_field: str, group: int | None, position: int | None = None
) -> Shard:
    """Open the rows of one row group, or of all; a position is how many rows of it were read."""
    before = done = position or 0

    def read() -> Iterator[str]:
        nonlocal done
        for done, text in enumerate(_texts_of_rows(file, text_field, group), 1):
            if done > before and text:
                yield text

    return Shard(read(), lambda: done)


def _texts_of_rows(file: Path, text_field: str, group: int | None) -> Iterator[str]:
    with _parquet(file) as table:
        from pyarrow import ArrowException

        names = table.schema_arrow.names
        if (count := names.count(text_field)) != 1:
            raise LookupError(
                f"{file} must have one column {text_field!r}, got {count} among "
                f"{', '.join(names)}; set data.text_field in the recipe"
            )
        row = sum(table.metadata.row_group(before).num_rows for before in range(group or 0))
        groups = None if group is None else [group]
        try:
            for batch in table.iter_batches(256, columns=[text_field], row_groups=groups):
                # beside it are fields of a struct whose names, joined by dots, are the same
                for text in batch.column(text_field).to_pylist():
                    row += 1
                    yield record_text({text_field: text}, text_field, f"{file}:{row}")
        except (ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file}: cannot be read after row {row}: {reason_of(error)}"
            ) from None


def record_text(record: Any, text_field: str, place: object) -> str:
    """Return the text of a record, "" if it has none.

    Raises:
        LookupError: The record has no such field.
        ValueError: It is no object, or its field holds something else than text.
    """
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
    return (text or "").removeprefix(_BYTE_ORDER_MARK)
