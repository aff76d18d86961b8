"""From a recipe's data section to rows of tokens: tokenised once, split, packed, checked.

- Local files and downloaded data sets are tokenised once into the run's ``cache`` folder, which all
  processes map into memory; streams are tokenised while training.
- What is held out is chosen by the content of a document, so that it does not depend on order or
  seed, and no copy of a held-out document is trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ssmzoo.data.documents import (
    expand,
    file_manifest,
    open_dataset,
    read_files,
    same_files,
    split_over_ranks,
    texts_of,
)
from ssmzoo.data.rows import (
    ConsecutiveRows,
    PackedRows,
    Parts,
    Rows,
    RowSource,
    StreamedRows,
    TaskRows,
)
from ssmzoo.data.tokenizer import (
    Encoder,
    byte_tokenizer,
    encoder,
    load_tokenizer,
    token_dtype,
    tokenizer_digest,
)
from ssmzoo.environment.messages import first_line
from ssmzoo.files import write_folder
from ssmzoo.recipe import ROW_TASKS, DataSection, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Data", "byte_tokenizer", "open_data", "prepare_data", "recipe_tokenizer"]

logger = logging.getLogger("ssmzoo")

_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: The rows, or labelled examples, to train on.
        validation: This process's held-out micro-batches, every time the same; as many on every
            process, and none if the recipe holds nothing out.
        epoch_rows: Rows an epoch over all processes; None for endless data.
        test: As ``validation``, of a task's test split; None if there is none.
    """

    train: RowSource[Any]
    validation: Parts[Any]
    epoch_rows: int | None
    test: Parts[Any] | None = None


@dataclass(frozen=True)
class TokenStore:
    """Documents as tokens, end to end.

    Attributes:
        tokens: [N].
        ends: Where each document ends [n].
        hashes: A hash of each document's text [n].
        names: Each document's file, where a document is a file.
    """

    tokens: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    names: list[str]

    @property
    def pieces(self) -> np.ndarray:
        """Beginning and end of each document [n, 2]."""
        return np.stack([np.concatenate([[0], self.ends[:-1]]), self.ends], axis=1)


def recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a recipe means.

    Raises:
        LookupError: No such tokenizer, task, or argument of the task.
    """
    if recipe.data.task is not None:
        from ssmzoo.tasks import symbol_tokenizer

        return symbol_tokenizer(_task_arguments(recipe)["vocab_size"])
    if recipe.data.tokenizer is None and recipe.model.init_from is not None:
        return load_tokenizer(recipe.model.init_from, "model.init_from")
    return load_tokenizer(recipe.data.tokenizer or "bytes")


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Find, check and tokenise the data; one process does it for all.

    Args:
        recipe: The run's recipe.
        tokenizer: What :func:`recipe_tokenizer` gave.
        cache: The folder for the tokens; used as it is if it holds these tokens already.
        before: What this function returned when the run began, to resume on the same data.

    Returns:
        The manifest, as JSON: where the data came from, and its ``digest``.

    Raises:
        ValueError: Data that is missing, empty, unreadable, or changed since the run began.
    """
    data = recipe.data
    manifest: dict[str, Any] = {"source": data.source}
    if data.source == "task":
        manifest["task"] = {"name": data.task, **_task_arguments(recipe), "seed": recipe.train.seed}
    elif data.dataset is not None and not Path(data.dataset).is_dir():
        revision = before["revision"] if before else _commit(data)
        manifest |= {"dataset": data.dataset, "config": data.config, "split": data.split}
        manifest["revision"] = revision
    else:
        manifest["files"] = _same_files(
            [data.dataset] if data.dataset is not None else getattr(data, data.source),
            f"data.{data.source}",
            before["files"] if before else None,
            content=not data.streaming,
            root=None if data.dataset is None else Path(data.dataset),
        )
    if isinstance(data.validation, list) and data.dataset is None:
        manifest["validation_files"] = _same_files(
            data.validation,
            "data.validation",
            before["validation_files"] if before else None,
            content=not data.streaming,
        )
    manifest["digest"] = json_digest(_without_places(manifest), data.text_field)
    if data.source != "task":
        digest = tokenizer_digest(tokenizer)
        manifest["tokenizer"] = {"name": data.tokenizer, "digest": digest}
        was = manifest["tokenizer"] if before is None else before.get("tokenizer")
        if was and was["name"] != data.tokenizer and was["digest"] != digest:
            raise ValueError(
                f"data.tokenizer must be {was['name']!r}, with which the run began, or a copy of "
                f"it, got {data.tokenizer!r}, which encodes otherwise; start a new run to change it"
            )
    if not data.streaming and data.source != "task":
        # a text's tokens are kept with the names of its files
        names = [file["path"] for file in manifest["files"]] if data.source == "text" else []
        key = json_digest([manifest["digest"], manifest["tokenizer"]["digest"], *names])
        if not _is_store(cache, key):
            documents = _training_documents(recipe, manifest)
            _write_store(documents, tokenizer, cache, key, f"data.{data.source}")
        store = _read_store(cache)
        _, held_out, _ = _split(store, data.validation)
        manifest |= {"documents": len(store.ends), "tokens": len(store.tokens)}
        manifest["held_out"] = [store.names[i] for i in held_out] if store.names else []
    return manifest


def open_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    manifest: dict[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
) -> Data:
    """Open one process's share of what :func:`prepare_data` made ready.

    Raises:
        ValueError: Too little text for one row.
    """
    data, train, seq_len = recipe.data, recipe.train, _seq_len(recipe)
    micro = train.batch_size // (world * train.accumulate)
    batches = recipe.eval.batches
    wanted = batches * train.batch_size if isinstance(batches, int) else sys.maxsize
    if data.source == "task":
        generate = _task_generator(recipe)
        examples = TaskRows(generate, train.seed, rank=rank, world=world)
        validation: list[Rows] = []
        if data.validation is not None:
            held_out = TaskRows(generate, _other(train.seed))
            numbers = range(min(wanted, data.validation))
            validation = _shares(held_out.rows, numbers, micro, rank, world)
        return Data(examples, validation, None)

    encode = encoder(tokenizer)
    held_out_rows: PackedRows | None = None
    if isinstance(data.validation, list):
        need = wanted * seq_len if data.streaming or data.dataset is not None else None
        store = _in_memory(_validation_documents(recipe, manifest), encode, need)
        held_out_rows = PackedRows(store.tokens, store.pieces, seq_len, 0, what="held-out")
    source: RowSource[Rows]
    if data.streaming:
        hashes: frozenset[int] = frozenset()
        if isinstance(data.validation, int):
            store = _in_memory(
                islice(_stream_documents(recipe, manifest), data.validation), encode, None
            )
            hashes = frozenset(store.hashes.tolist())
            held_out_rows = PackedRows(store.tokens, store.pieces, seq_len, 0, what="held-out")
        source = _stream(recipe, manifest, encode, hashes, rank, world)
        epoch_rows = None
    else:
        store = _read_store(cache)
        pieces, _, rest = _split(store, data.validation)
        if train.segments is not None and train.segments.carry:
            source = ConsecutiveRows(
                store.tokens, pieces, seq_len, train.batch_size, train.seed, rank=rank, world=world
            )
        else:
            source = PackedRows(store.tokens, pieces, seq_len, train.seed, rank=rank, world=world)
        epoch_rows = len(source)
        if rest is not None:
            held_out_rows = PackedRows(store.tokens, rest, seq_len, 0, what="held-out")
    validation = []
    if held_out_rows is not None:
        numbers = range(min(wanted, len(held_out_rows)))
        validation = _shares(held_out_rows.rows, numbers, micro, rank, world)
    return Data(source, validation, epoch_rows)


def _shares(
    rows: Callable[[range], Rows], numbers: range, micro: int, rank: int, world: int
) -> list[Rows]:
    """Return one process's micro-batches of some rows, as many on each process.

    Where there are no rows left for one, the first stands in, with nothing to predict.
    """
    each = -(-len(numbers) // world)
    mine = numbers[rank * each : (rank + 1) * each]
    parts = [mine[i : i + micro] for i in range(0, each, micro)]
    return [rows(part) if part else rows(numbers[:1]).unlabelled() for part in parts]


def _split(
    store: TokenStore, validation: float | int | list[str] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the pieces to train on, the held-out documents, and their pieces if there are any.

    Too few documents for the wanted share: the end of each document is held out instead.
    """
    pieces, none = store.pieces, np.empty(0, np.int64)
    if validation is None or isinstance(validation, list):
        return pieces, none, None
    documents = len(pieces)
    share = isinstance(validation, float)
    if share and validation * documents < 1:
        lengths = pieces[:, 1] - pieces[:, 0]
        cuts = pieces[:, 1] - np.maximum(1, (lengths * validation).astype(np.int64))
        kept = np.stack([pieces[:, 0], cuts], axis=1)
        held_out = np.stack([cuts, pieces[:, 1]], axis=1)
        return kept[kept[:, 0] < kept[:, 1]], none, held_out
    count = round(validation * documents) if share else int(validation)
    if count < documents:
        chosen = store.hashes <= np.partition(store.hashes, count - 1)[count - 1]
        if not chosen.all():
            return pieces[~chosen], np.flatnonzero(chosen), pieces[chosen]
    raise ValueError(
        f"data.validation must leave documents to train on: {validation} holds out all of the "
        f"{documents} there are"
    )


def _training_documents(recipe: Recipe, manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    data = recipe.data
    if data.dataset is not None:
        records = _open_records(data, data.split, manifest, streaming=False)
        return (("", text) for text in texts_of(records, data.text_field, "data.dataset"))
    return _file_documents(data, getattr(data, data.source), manifest["files"])


def _validation_documents(recipe: Recipe, manifest: dict[str, Any]) -> Iterator[str]:
    data = recipe.data
    if data.dataset is not None:
        for split in data.validation:
            records = _open_records(data, split, manifest, streaming=data.streaming)
            yield from texts_of(records, data.text_field, "data.dataset")
    else:
        files = manifest["validation_files"]
        yield from (text for _, text in _file_documents(data, data.validation, files))


def _file_documents(
    data: DataSection, paths: list[str], files: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    whole_folders = any(Path(path).expanduser().is_dir() for path in paths)
    names = [Path(file["path"]) for file in files]
    return read_files(data.source, names, data.text_field, skip_binary=whole_folders)


def _stream_documents(recipe: Recipe, manifest: dict[str, Any]) -> Iterator[str]:
    data = recipe.data
    records = _open_records(data, data.split, manifest, streaming=True)
    return texts_of(records, data.text_field, f"data.{data.source}")


def _open_records(
    data: DataSection, split: str, manifest: dict[str, Any], *, streaming: bool
) -> Iterable[dict[str, Any]]:
    files = [file["path"] for file in manifest.get("files", [])]
    return open_dataset(data, split, manifest.get("revision"), streaming=streaming, files=files)


def _stream(
    recipe: Recipe,
    manifest: dict[str, Any],
    encode: Encoder,
    held_out: frozenset[int],
    rank: int,
    world: int,
) -> StreamedRows:
    data, train = recipe.data, recipe.train

    def open_records() -> Iterable[dict[str, Any]]:
        records = _open_records(data, data.split, manifest, streaming=True)
        return split_over_ranks(records, rank, world)

    def texts(records: Iterable[dict[str, Any]]) -> Iterator[str]:
        for text in texts_of(records, data.text_field, f"data.{data.source}"):
            if not held_out or _hash(text) not in held_out:
                yield text

    return StreamedRows(
        open_records, texts, encode, _seq_len(recipe), train.seed, block=data.shuffle_buffer
    )


def _same_files(
    paths: list[str],
    field: str,
    before: list[dict[str, Any]] | None,
    *,
    content: bool,
    root: Path | None = None,
) -> list[dict[str, Any]]:
    files = expand(paths, field)
    if before is None:
        return file_manifest(files, content=content)
    return same_files(before, files, root)


def _commit(data: DataSection) -> str:
    """Return the commit that the Hub data set has now, so that a resume reads the same."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    assert data.dataset is not None
    try:
        commit = HfApi().dataset_info(data.dataset, revision=data.revision).sha
    except RevisionNotFoundError as error:
        raise LookupError(
            f"data.revision: the data set {data.dataset!r} has no branch, tag or commit "
            f"{data.revision!r}"
        ) from error
    except HfHubHTTPError as error:
        raise LookupError(
            f"data.dataset: no data set {data.dataset!r} on the Hub: {first_line(error)}"
        ) from error
    except OSError as error:
        raise RuntimeError(f"data.dataset: the Hub cannot be reached: {error}") from error
    return commit or "main"


def _task_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return all arguments of the recipe's task but the number of examples and the seed."""
    from ssmzoo import tasks

    name = recipe.data.task
    assert name in ROW_TASKS
    said = ("num_examples", "seed", "seq_len")
    chosen = tasks.task_arguments(name, getattr(tasks, name), recipe.data.task_args, said)
    return {**chosen, "seq_len": recipe.train.seq_len}


def _task_generator(recipe: Recipe) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    from ssmzoo import tasks

    function, arguments = getattr(tasks, str(recipe.data.task)), _task_arguments(recipe)
    return lambda examples, seed: function(examples, seed=seed, **arguments)


def _seq_len(recipe: Recipe) -> int:
    assert recipe.train.seq_len is not None, "labelled examples are read by ssmzoo.data.labelled"
    return recipe.train.seq_len


def _other(seed: int) -> int:
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def json_digest(*parts: Any) -> str:
    """Return the sha256 of what can be written as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _without_places(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what of a manifest is content: not where files lie, nor when they came there."""
    return {
        key: [[Path(f["path"]).name, f["bytes"], f["sha256"]] for f in value]
        if key.endswith("files")
        else value
        for key, value in manifest.items()
    }


def _batches(
    documents: Iterable[tuple[str, str]],
) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    texts: list[str] = []
    characters = 0
    for name, text in documents:
        names.append(name)
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield names, texts
            names, texts, characters = [], [], 0
    if texts:
        yield names, texts


def _in_memory(texts: Iterator[str], encode: Encoder, need: int | None) -> TokenStore:
    """Tokenise documents until there are ``need`` tokens, or all of them."""
    parts: list[np.ndarray] = []
    hashes: list[int] = []
    total = 0
    for _, batch in _batches(("", text) for text in texts):
        parts += (documents := encode(batch))
        hashes += [_hash(text) for text in batch]
        total += sum(map(len, documents))
        if need is not None and total >= need:
            break
    if not parts:
        raise ValueError("data.validation must hold text, got none")
    ends = np.cumsum([len(part) for part in parts])
    return TokenStore(np.concatenate(parts), ends, np.array(hashes, np.uint64), [])


def _write_store(
    documents: Iterator[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    key: str,
    field: str,
) -> None:
    """Tokenise documents into a folder, which appears only when it is complete."""
    encode = encoder(tokenizer)

    def write(folder: Path) -> None:
        names: list[str] = []
        hashes: list[int] = []
        lengths: list[int] = []
        with (
            (folder / "tokens").open("wb") as file,
            tqdm(desc="tokenise", unit=" tokens", unit_scale=True, disable=None) as bar,
        ):
            for batch_names, texts in _batches(documents):
                tokens = encode(texts)
                file.write(np.concatenate(tokens).tobytes())
                lengths.extend(map(len, tokens))
                bar.update(sum(map(len, tokens)))
                hashes.extend(_hash(text) for text in texts)
                names.extend(name for name in batch_names if field == "data.text")
        if not sum(lengths):
            raise ValueError(f"{field} must hold text, got none")
        np.save(folder / "ends.npy", np.cumsum(lengths, dtype=np.int64))
        np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
        dtype = np.dtype(token_dtype(len(tokenizer))).name
        facts = {"key": key, "dtype": dtype, "tokens": sum(lengths), "names": names}
        (folder / "store.json").write_text(json.dumps(facts), encoding="utf-8")

    write_folder(folder, write)


def _is_store(folder: Path, key: str) -> bool:
    try:
        facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        size = (folder / "tokens").stat().st_size
    except (OSError, ValueError):
        return False
    return facts["key"] == key and size == facts["tokens"] * np.dtype(facts["dtype"]).itemsize


def _read_store(folder: Path) -> TokenStore:
    facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
    return TokenStore(
        np.memmap(folder / "tokens", facts["dtype"], mode="r").view(np.ndarray),
        np.load(folder / "ends.npy"),
        np.load(folder / "hashes.npy"),
        facts["names"],
    )
