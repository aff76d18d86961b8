"""Write files and folders that appear complete or not at all; read JSON and YAML within bounds.

A full disk, a read-only folder or another refusal of the machine is one error that names the file,
the reason and the way out, whichever library was writing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ssmzoo.environment.messages import first_line, shortened

# the name, in commands and recipes, of the sources of Python's standard library
STDLIB = "python-stdlib"
# shipped files lie in the package of an installed wheel, and at the root of a checkout
_PACKAGE = Path(__file__).resolve().parent
_READ_ONLY = "choose a place that may be written to"
_FULL = "free some space, or choose another place"
_MORE_FILES = "raise the limit on open files (ulimit -n)"
_TOO_MANY = os.strerror(errno.EMFILE)
_WAYS_OUT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another place",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}
# numbers of YAML 1.2 that are text in YAML 1.1: the tag, its form, and how one begins
_EXPONENTS = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_MOST_REPEATED = 100_000  # characters that the aliases of a YAML file may repeat
# how libraries written in Rust, safetensors and tokenizers, quote the system in errors of their own
_NATIVE = re.compile(r"\(os error (\d+)\)")


class CannotWriteError(RuntimeError):
    """The machine refused to write a file or folder; the earlier one is unchanged."""

    def __init__(self, target: str, reason: str, number: int | None) -> None:
        super().__init__(target, reason, number)  # so that it can be sent to other processes
        self.target, self.reason, self.number = target, reason, number

    def __str__(self) -> str:
        way_out = "choose another place"
        if self.number is not None:
            way_out = _WAYS_OUT.get(self.number, way_out)
        kept = "what was there is unchanged"
        return f"{self.target} cannot be written: {self.reason}; {kept}; {way_out}"


def reason_of(error: Exception) -> str:
    """Return the first line of an error, without the file's name, and the way out if it is known.

    A library may report too many open files in an error of its own.
    """
    reason = getattr(error, "strerror", None) or first_line(error)
    return f"{reason}; {_MORE_FILES}" if _TOO_MANY in reason else reason


@contextmanager
def few_files() -> Iterator[None]:
    """Turn an error inside about too many open files into one that names ``ulimit -n``.

    Raises:
        RuntimeError: That error; any other passes as it is.
    """
    try:
        yield
    except Exception as error:
        if _TOO_MANY in str(error) and _MORE_FILES not in str(error):
            raise RuntimeError(reason_of(error)) from error
        raise


@contextmanager
def writing(target: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Turn a refusal of the machine inside into a :class:`CannotWriteError` about ``target``.

    One about ``unfinished``, or a file in it, names the target too.

    Raises:
        CannotWriteError: The machine refused.
    """
    try:
        yield
    except CannotWriteError as error:
        if not error.target.startswith(str(unfinished or target)):  # of a file beside it
            raise
        raise CannotWriteError(str(target), error.reason, error.number) from error
    except Exception as error:
        refusal = _refusal(error, target)
        if refusal is None:
            raise
        raise CannotWriteError(str(target), *refusal) from error


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """Give a path to write to, whose file becomes ``target`` if the block succeeds.

    It is flushed to the disk before; if the block fails, the earlier file stays as it was. A link
    is replaced, as its target may be shared: files of the Hub's cache are.

    Raises:
        CannotWriteError: The machine refused.
    """
    require_name(target)
    # a name of its own: two that write the same file, on two machines even, do not meet
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with writing(target, unfinished):
            unfinished.touch(exist_ok=False)
            mode = unfinished.stat().st_mode
            yield unfinished
            unfinished.chmod(mode)  # some libraries make files that nobody else may read
            flush(unfinished)
            os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def require_name(target: Path, argument: str = "the output") -> None:
    """Check that a path ends in a name, and not in ``..``, nor is ``.`` or empty.

    Raises:
        ValueError: It does not.
    """
    if target.name in ("", ".."):
        raise ValueError(f"{argument} must end in a name of its own, got {str(target)!r}")


def make_folder_of(target: Path) -> None:
    """Make the folder that a file goes into, where there is none.

    Raises:
        CannotWriteError: The machine refused.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)


def require_new(target: Path, argument: str) -> None:
    """Check that a folder can be written that is not there yet, or empty.

    Raises:
        ValueError: It is a file, or holds something, or has no name.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{argument} must be a new or an empty folder, got {str(target)!r}")
    require_name(target, argument)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: The file is missing, corrupt, or holds something else; the message names it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist") from error
    except OSError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file's content; see :func:`read_json`."""
    try:
        value = json_of(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def json_of(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is not JSON, or lies too deep inside itself to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values lie too deep inside each other") from error


def parse_yaml(text: str, name: str) -> Any:
    """Read YAML without fields that appear twice, in which 1e-3 is a number, as in YAML 1.2.

    Raises:
        ValueError: It is not YAML, lies too deep inside itself, or repeats too much by aliases; the
            message begins with ``name``.
    """
    import yaml

    try:
        return yaml.load(text, _yaml_loader())
    except yaml.YAMLError as error:
        reason = shortened(" ".join(str(error).split()))
    except RecursionError:
        reason = "its values lie too deep inside each other"
    raise ValueError(f"{name}: not valid YAML: {reason}")


def refuse_blank(path: str, rule: str) -> None:
    """Refuse a blank path, which would mean the current folder.

    ``rule`` begins the error: the argument's name and the rule for it.
    """
    if not path.strip():
        raise ValueError(f"{rule}, got {path!r}")


def dump_yaml(value: Any) -> str:
    """Return YAML that :func:`parse_yaml` reads back: text that it takes for a number is quoted."""
    import yaml

    return yaml.dump(value, Dumper=_yaml_dumper(), sort_keys=False, allow_unicode=True)


@cache
def _yaml_loader() -> Any:
    import yaml
    from yaml.constructor import ConstructorError

    class Loader(yaml.SafeLoader):
        def construct_document(self, node: yaml.Node) -> Any:
            # text of 1 kB could stand for more than any memory holds, by aliases of aliases
            if _written_out(node, {}) > 4 * node.end_mark.index + _MOST_REPEATED:
                wrong = f"aliases must repeat at most {_MOST_REPEATED:,} characters"
                raise ConstructorError(None, None, wrong, node.start_mark)
            return super().construct_document(node)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for part, _ in node.value:
                if part.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(part, deep=True)
                if isinstance(key, Hashable):  # others fail below
                    if key in seen:
                        wrong = f"the field {key!r} appears twice"
                        raise ConstructorError(None, None, wrong, node.start_mark)
                    seen.add(key)
            return super().construct_mapping(node, deep=deep)

    Loader.add_implicit_resolver(*_EXPONENTS)
    return Loader


def _written_out(node: Any, sizes: dict[int, float]) -> float:
    """Return how many nodes and characters a YAML node has if its aliases are written out."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # of an alias inside its own anchor
        value = node.value
        if isinstance(value, str):
            size: float = len(value)
        else:
            parts = (x for part in value for x in (part if isinstance(part, tuple) else (part,)))
            size = sum(_written_out(part, sizes) for part in parts)
        sizes[id(node)] = 1 + size
    return sizes[id(node)]


@cache
def _yaml_dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_implicit_resolver(*_EXPONENTS)
    return Dumper


def write_text(target: Path, text: str) -> None:
    """Write a text file that appears complete or not at all.

    A byte of a file's name that is not UTF-8 is written as JSON and YAML escape it.
    """
    with appears_whole(target) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files of a folder, of which none appears before all are on the disk."""
    with ExitStack() as files:
        for name, text in texts.items():
            unfinished = files.enter_context(appears_whole(folder / name))
            unfinished.write_text(text, encoding="utf-8")
            flush(unfinished)


def write_json(target: Path, value: object, *, indent: int = 1) -> None:
    """Write a JSON file that appears complete or not at all.

    Raises:
        ValueError: A number is not finite; nothing is written.
    """
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    write_text(target, text + "\n")


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder that appears complete or not at all; an older one is replaced.

    Where the system can exchange two folders, the older one is there until then; elsewhere there is
    none for an instant, and the next writer brings back one that a killed process moved away.
    Several processes may write the same target: each fills a folder of its own, and the last one
    stays. A link stays, and the folder that it names is written.

    Raises:
        CannotWriteError: The machine refused.
    """
    require_name(target)
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.unfinished")
    with writing(target, unfinished):
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target)
        unfinished.mkdir()
        try:
            with ExitStack() as held:
                with suppress(OSError):  # some file systems have no locks
                    held.enter_context(_locked(unfinished))
                unfinished.mkdir(exist_ok=True)  # before the lock it looked like remains
                write(unfinished)
                open_up(unfinished)
                for path in [*unfinished.rglob("*"), unfinished]:
                    flush(path)
                _put(unfinished, target)
            flush(target.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _recover(target: Path) -> None:
    """Remove remains of killed processes beside a folder; one that they moved away comes back."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(unfinished|replaced)")
    for remains in [path for path in target.parent.iterdir() if name.fullmatch(path.name)]:
        with suppress(OSError), _locked(remains):  # a living process holds the lock of its own
            if remains.suffix == ".replaced" and not target.exists():
                os.replace(remains, target)
            shutil.rmtree(remains, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which is free as soon as this process is gone.

    Raises:
        OSError: Another one holds it, or the file system has no locks.
    """
    import fcntl  # which Windows does not have

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _put(unfinished: Path, target: Path) -> None:
    """Give a folder its name; ``unfinished`` may then hold the one that had it before."""
    if target.exists() and _exchange(unfinished, target):
        return None
    replaced = unfinished.with_suffix(".replaced")
    there = target.exists()
    if there:
        os.replace(target, replaced)
    try:
        os.replace(unfinished, target)
    except BaseException as error:
        if there:
            os.replace(replaced, target)
        elif isinstance(error, OSError) and target.exists():  # another process was here first
            return _put(unfinished, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return None


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def remove_folder(target: Path) -> None:
    """Remove a folder; it loses its name first, so half of it is never seen under that name."""
    replaced = target.with_name(f".{target.name}.replaced")
    os.replace(target, replaced)
    shutil.rmtree(replaced)


def open_up(folder: Path) -> None:
    """Let files in a new folder be read and written by all whom the umask lets use the folder.

    Some libraries, safetensors among them, make files that nobody else may read.
    """
    allowed = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode | allowed)


def file_digest(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def kind_of_records(path: str) -> str | None:
    """Return "jsonl" or "parquet" for a file of records by its name; None for all others.

    Read as text it would be one document, braces and all.
    """
    kind = path.removesuffix(".gz").rpartition(".")[2]
    return kind if kind in ("jsonl", "parquet") else None


def is_utf8(path: str) -> bool:
    """Return whether a path is text, and not bytes of another encoding."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def flush(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(error: Exception, target: Path) -> tuple[str, int | None] | None:
    """Return why the machine refused, in words and as its number; None for any other error."""
    native = _NATIVE.search(str(error))
    if native is not None:
        return os.strerror(int(native[1])), int(native[1])
    if isinstance(error, OSError):
        return error.strerror or str(error), error.errno
    # Python keeps bytes of a path that are not UTF-8, libraries in Rust cannot
    if isinstance(error, UnicodeEncodeError) and not is_utf8(str(target)):
        return "its path is not UTF-8", None
    return None


def package_data(relative: str) -> Path:
    """Return the path of a shipped file or folder, e.g. ``package_data("eval/tasks")``.

    An installed wheel carries them in the package, a checkout at its root.

    Raises:
        LookupError: Neither has it.
    """
    for root in (_PACKAGE / "_share", _PACKAGE.parent.parent):
        if (root / relative).exists():
            return root / relative
    raise LookupError(f"ssmzoo ships no file {relative!r}")
