"""The checkpoints of a run: folders that are complete or not there, listed, chosen and checked.

- A folder is written beside its place under a hidden name, flushed to the disk, and then renamed.
- ``contents.json`` lists the sizes of its files; a resume refuses a folder that differs.
- When one is due: ``Run._loop`` and ``_requests`` in ``trainer.py``.
- No pickle: tensors are safetensors in ``shards/``, the rest is JSON (``run_state.py``).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ssmzoo.files import CannotWriteError, remove_folder, write_folder, writing

CONTENTS = "contents.json"
_NAME = re.compile(r"step-\d+")
# answers of file systems without such locks: NFS without lockd, Lustre, FUSE
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

logger = logging.getLogger("ssmzoo")


class InUseError(RuntimeError):
    """Another process writes into the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, making it first, against a second run into it.

    A file system without locks is warned of, and the folder is not held.

    Raises:
        InUseError: Another process holds it.
        RuntimeError: It cannot be written.
    """
    import fcntl  # which Windows does not have

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
            raise InUseError(
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
            # past the buffer, which would keep it
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write the checkpoint of a step and remove all but the newest ``keep`` and that of ``spare``.

    One that cannot be removed is warned of.

    Args:
        root: The run's checkpoints.
        step: The step.
        write: Fills the folder.
        keep: How many stay.
        spare: One more that stays.

    Raises:
        RuntimeError: It cannot be written; earlier checkpoints are as they were.
    """

    def write_listed(folder: Path) -> None:
        write(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        (folder / CONTENTS).write_text(json.dumps(sizes, indent=1), encoding="utf-8")

    target = checkpoint_of(root, step)
    for remains in root.glob(".step-*.replaced"):  # of a run that was killed while it removed them
        shutil.rmtree(remains, ignore_errors=True)
    try:
        write_folder(target, write_listed)
    except CannotWriteError as error:
        raise RuntimeError(f"the checkpoint {error}, then resume the run") from error
    for old in checkpoints(root)[:-keep]:
        if step_of(old) != spare:
            try:
                remove_folder(old)
            except OSError as error:  # a reader on another machine holds a file, say
                logger.warning(
                    "the old checkpoint %s cannot be removed: %s; the next save tries again",
                    old,
                    error.strerror or error,
                )
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
        f"the newest whole checkpoint is {good}; remove the newer ones to resume from it"
        if good is not None
        else "there is no whole checkpoint; start the run again"
    )
    raise RuntimeError(f"the checkpoint {newest_first[0]} cannot be used: {damage}; {way_out}")


def checkpoint_of(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, if it is kept."""
    return root / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def damage_of(checkpoint: Path) -> str | None:
    """Return a checkpoint's damage in words, None if there is none."""
    try:
        sizes = json.loads((checkpoint / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{CONTENTS} cannot be read"
    for name, size in sizes.items():
        path = checkpoint / name
        if not isinstance(size, int):
            return "it was written by ssmzoo 0.1, which alone resumes it"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes and must have {size}"
    return None
