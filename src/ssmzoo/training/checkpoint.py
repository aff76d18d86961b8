"""A run's folder: its lock, its metrics, and checkpoints that are complete or not there at all.

- A folder is written beside its place under a hidden name, flushed to the disk, and then renamed.
- A checkpoint lists size and sha256 of its files; a resume believes nothing that differs.
- No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssmzoo.files import (
    CannotWriteError,
    file_digest,
    remove_folder,
    write_folder,
    write_text,
    writing,
)

CONTENTS = "contents.json"
_NAME = re.compile(r"step-\d+")
# what file systems answer that know no such locks: NFS without lockd, Lustre, FUSE
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

logger = logging.getLogger("ssmzoo")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, making it first, against a second run into it.

    A file system without locks is warned of, and the folder is not held.

    Raises:
        RuntimeError: Another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise RuntimeError(f"output_dir must be a writable folder: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RuntimeError(
                f"another run (process {lock.read().strip() or 'unknown'}) is writing into "
                f"{folder}; wait for it, or choose another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RuntimeError(f"output_dir {folder} cannot be locked: {error}") from None
            logger.warning(
                "the file system of %s has no locks (%s): see to it that no second run writes "
                "into it",
                folder,
                error.strerror,
            )
        with writing(folder / ".lock"):
            lock.truncate(0)
            os.write(
                lock.fileno(), str(os.getpid()).encode()
            )  # past the buffer, which would keep it
        yield


def save_checkpoint(
    root: Path, step: int, write: Callable[[Path], None], *, keep: int, spare: int | None = None
) -> Path:
    """Write the checkpoint of a step and remove all but the newest ``keep`` and that of ``spare``.

    Raises:
        RuntimeError: It cannot be written; earlier checkpoints are as they were.
    """

    def write_listed(folder: Path) -> None:
        write(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listed = {
            str(path.relative_to(folder)): [path.stat().st_size, file_digest(path)]
            for path in files
        }
        (folder / CONTENTS).write_text(json.dumps(listed, indent=1), encoding="utf-8")

    target = checkpoint_of(root, step)
    for remains in root.glob(".step-*.replaced"):  # of a run that was killed while it removed them
        shutil.rmtree(remains, ignore_errors=True)
    try:
        write_folder(target, write_listed)
    except CannotWriteError as error:
        raise RuntimeError(f"the checkpoint {error}, then resume the run") from error
    for old in checkpoints(root)[:-keep]:
        if step_of(old) != spare:
            with writing(old):
                remove_folder(old)
    return target


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest checkpoint, None if there is none.

    Raises:
        RuntimeError: It is damaged; the message names the file and the newest one that is whole.
    """
    newest_first = checkpoints(root)[::-1]
    if not newest_first:
        return None
    damage = damage_of(newest_first[0])
    if damage is None:
        return newest_first[0]
    good = next((path for path in newest_first[1:] if damage_of(path) is None), None)
    way_out = (
        f"the newest whole checkpoint is {good}; remove what is newer to resume from it"
        if good is not None
        else "there is no whole checkpoint; start the run again"
    )
    raise RuntimeError(f"the checkpoint {newest_first[0]} is damaged: {damage}; {way_out}")


def checkpoint_of(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, if it is kept."""
    return root / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


class Metrics:
    """``metrics.jsonl``: one JSON object a line, each on the disk's way as soon as it is known."""

    def __init__(self, path: Path, *, after_step: int, judged: bool = True) -> None:
        """Open the file, first dropping what was measured after a step that is resumed from.

        Args:
            path: The file.
            after_step: The step; 0 to begin.
            judged: Whether a validation that was due after that step was finished before it was
                saved; otherwise its line is dropped too.

        Raises:
            RuntimeError: A line before that is damaged, or the file cannot be written.
        """
        self._path = path
        if path.exists():
            write_text(path, "".join(_lines_until(path, after_step, judged)))
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, **values: float | int | dict[str, list[float]]) -> None:
        """Append one line, whole or not at all.

        Raises:
            RuntimeError: It cannot be written.
        """
        rest = memoryview(json.dumps(values).encode() + b"\n")
        with writing(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while rest:  # a disk that fills up takes a part first
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _lines_until(path: Path, step: int, judged: bool) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            measured = json.loads(line)
            later = measured["step"] > step
            again = measured["step"] == step and not judged and "validation_loss" in measured
        except (ValueError, LookupError, TypeError):
            if not line.endswith("\n"):  # it was cut off when the run was killed
                return
            raise RuntimeError(
                f"line {number} of {path} is damaged: {line.strip()[:60]!r}; take it out to resume"
            ) from None
        if later or again:
            return
        yield line if line.endswith("\n") else f"{line}\n"


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is."""
    try:
        listed = json.loads((checkpoint / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{CONTENTS} cannot be read"
    for name, (size, digest) in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes and must have {size}"
        if file_digest(path) != digest:
            return f"{name} has changed since it was written"
    return None
