"""Documents that a recipe names: local files, or data sets opened by ``datasets``.

A stream comes in shards: some megabytes of a jsonl file, a compressed file, a row group of a
parquet file, a shard of a data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.data.paths import expand, file_manifest, same_files, whole_folder
from ssmzoo.data.readers import (
    OpenShard,
    Shard,
    count_row_groups,
    open_jsonl,
    open_parquet,
    read_files,
    record_text,
)
from ssmzoo.environment.messages import first_line
from ssmzoo.files import is_utf8, kind_of_records

if TYPE_CHECKING:
    from datasets import IterableDataset

    from ssmzoo.recipe import DataSection

SHARD_BYTES = 4 << 20  # of a jsonl file


class _Documents:
    """The base of both kinds of documents.

    Attributes:
        field: The recipe's field that names the documents.
        reads_all_held_out: Whether all held-out documents are read, not only as many as needed.
    """

    def __init__(self, data: DataSection) -> None:
        self._data, self.field = data, f"data.{data.source}"
        self.reads_all_held_out = data.dataset is None and not data.streaming

    def _find_files(
        self,
        field: str,
        paths: list[str],
        before: list[dict[str, Any]] | None,
        root: Path | None = None,
    ) -> list[dict[str, Any]]:
        files = expand(paths, field)
        for file in files if self._data.text is not None else ():
            if (kind := kind_of_records(file.name)) is not None:
                raise ValueError(
                    f"{field} reads plain text, and {file} is {kind}; give such files as "
                    f"data.{kind}, or name the others by a pattern, as in 'folder/**/*.txt'"
                )
        if before is not None:
            return same_files(before, files, root)
        return file_manifest(files, content=not self._data.streaming)


class FileDocuments(_Documents):
    """Local files: text, jsonl or parquet."""

    def find(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return, as JSON, ``files`` and, if paths are held out, ``validation_files``.

        Args:
            before: The result of this method when the run began.

        Raises:
            ValueError: Files that are missing, or changed since the run began; a folder of text
                with files of other kinds in it.
        """
        data = self._data
        wanted = {"files": (self.field, getattr(data, data.source))}
        if isinstance(data.validation, list):
            wanted["validation_files"] = "data.validation", data.validation
        return {
            key: self._find_files(field, paths, None if before is None else before[key])
            for key, (field, paths) in wanted.items()
        }

    def training(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield name and text of each document to train on; only text files have names."""
        kind = self._data.source
        for name, text in self._read(getattr(self._data, kind), found["files"]):
            yield name if kind == "text" else "", text

    def held_out(self, found: dict[str, Any]) -> Iterator[str]:
        """Yield the documents of the paths that the recipe holds out."""
        read = self._read(self._data.validation, found["validation_files"])
        return (text for _, text in read)

    def shards(self, found: dict[str, Any]) -> list[OpenShard]:
        """Return a function for each shard of jsonl or parquet files that opens it, in order."""
        field = self._data.text_field
        shards: list[OpenShard] = []
        for entry in found["files"]:
            file = Path(entry["path"])
            if self._data.parquet is not None:
                groups = range(count_row_groups(file))
                shards += [partial(open_parquet, file, field, group) for group in groups]
            elif file.suffix == ".gz":
                shards.append(partial(open_jsonl, file, field, 0, None))
            else:
                size = entry["bytes"]
                cuts = pairwise([*range(0, size, SHARD_BYTES), size])
                shards += [partial(open_jsonl, file, field, *cut) for cut in cuts]
        return shards

    def _read(self, paths: list[str], files: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        folders = any(whole_folder(path) is not None for path in paths)
        names = [Path(file["path"]) for file in files]
        data = self._data
        return read_files(data.source, names, data.text_field, skip_binary=folders)


class DatasetDocuments(_Documents):
    """A data set on the Hub, or a local folder that ``datasets`` can load."""

    def find(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return, as JSON, a folder's ``files``, or the Hub's data set and the commit found first.

        Configuration and split belong to both: they choose the documents.

        Args:
            before: The result of this method when the run began.

        Raises:
            LookupError: No such data set.
            ValueError: Files that were changed since the run began; a revision of a folder; a name
                that is neither a folder nor a Hub id.
        """
        data, name = self._data, str(self._data.dataset)
        chosen = {"config": data.config, "split": data.split}
        if Path(name).is_dir():
            if data.revision is not None:
                raise ValueError(
                    f"data.revision needs a data set on the Hub, got {data.revision!r} with the "
                    f"folder {name!r}; leave it out"
                )
            were = None if before is None else before["files"]
            return {"files": self._find_files(self.field, [name], were, Path(name)), **chosen}
        revision = before["revision"] if before else _commit(name, data.revision)
        return {"dataset": name, **chosen, "revision": revision}

    def training(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each document to train on, without a name."""
        records = self._open(self._data.split, found, streaming=False)
        return (("", text) for text in self._texts(records))

    def held_out(self, found: dict[str, Any]) -> Iterator[str]:
        """Yield the documents of the splits that the recipe holds out."""
        for split in self._data.validation:
            yield from self._texts(self._open(split, found, streaming=self._data.streaming))

    def shards(self, found: dict[str, Any]) -> list[OpenShard]:
        """Return a function for each shard of the split to train on that opens it, in order."""
        records = cast("IterableDataset", self._open(self._data.split, found, streaming=True))
        return [partial(self._shard, records, i) for i in range(records.num_shards)]

    def _shard(self, records: IterableDataset, index: int, position: Any = None) -> Shard:
        shard, begun = records.shard(records.num_shards, index), False
        if position is not None:
            shard.load_state_dict(position)

        def read() -> Iterator[dict[str, Any]]:
            nonlocal begun
            for record in shard:
                begun = True
                yield cast("dict[str, Any]", record)

        # a shard knows its state only once it has been read
        return Shard(self._texts(read()), lambda: shard.state_dict() if begun else position)

    def _texts(self, records: Iterable[dict[str, Any]]) -> Iterator[str]:
        for record in records:
            if text := record_text(record, self._data.text_field, self.field):
                yield text

    def _open(
        self, split: str, found: dict[str, Any], *, streaming: bool
    ) -> Iterable[dict[str, Any]]:
        """Open a split through ``datasets``.

        Raises:
            LookupError: No such data set, configuration or split.
            ValueError: A file name that ``datasets`` cannot open.
        """
        from ssmzoo.tasks.data_sets import caching, require_datasets

        datasets = require_datasets()
        from datasets.exceptions import DatasetNotFoundError

        for file in found.get("files", []):
            if not is_utf8(file["path"]):
                raise ValueError(
                    f"{self.field} must have file names in UTF-8, got {file['path']!a}; rename it"
                )
        data = self._data
        try:
            with caching():
                opened = datasets.load_dataset(
                    str(data.dataset),
                    data.config,
                    split=split,
                    revision=found.get("revision"),
                    streaming=streaming,
                )
        except (DatasetNotFoundError, FileNotFoundError, ValueError) as error:
            raise LookupError(f"{self.field}: {first_line(error)}") from error
        return cast("Iterable[dict[str, Any]]", opened)


def documents_of(data: DataSection) -> FileDocuments | DatasetDocuments:
    """Return where a recipe's documents come from."""
    return FileDocuments(data) if data.dataset is None else DatasetDocuments(data)


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
