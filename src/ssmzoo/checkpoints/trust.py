"""Refuse checkpoints that ask for pickles, for files elsewhere, or for more than they hold.

It imports nothing of ssmzoo: it travels with a checkpoint's own code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

# without it transformers has a service convert a repository's pickles, which offers them in public
_NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"
_INDICES = "model.safetensors.index*.json"  # a variant has one of its own
# by their names, and the files that are read instead where they exist
_PICKLES = {
    "pytorch_model*.bin": "model*.safetensors",
    "adapter_model*.bin": "adapter_model*.safetensors",
}
_FEW = 1000  # layers or labels that cost nothing
# old tokenizers keep where these once lay on their author's machine; nobody reads them from there
_UNREAD = ("added_tokens_file", "chat_template_file", "special_tokens_map_file")


@contextmanager
def trusted(source: object, subfolder: str = "") -> Iterator[None]:
    """Refuse an unsafe checkpoint before the block loads it, with ``use_safetensors=True``.

    Args:
        source: A folder, which is looked at, or a Hub id, whose names the Hub's client checks.
        subfolder: The part of it that is loaded.

    Raises:
        ValueError: It asks for a pickle, for a file outside its folder, or for more layers or
            labels than its weights can have; names which.
    """
    refuse_requests(source, subfolder)
    _refuse_pickles(source, subfolder)
    before = os.environ.get(_NO_CONVERSION)
    os.environ[_NO_CONVERSION] = "1"
    try:
        yield
    except OSError as error:
        if "use_safetensors" not in str(error):  # the way out that transformers knows
            raise
        raise ValueError(_no_pickles(f"{source} has no safetensors; its weights")) from error
    finally:
        if before is None:
            os.environ.pop(_NO_CONVERSION, None)
        else:
            os.environ[_NO_CONVERSION] = before


def _refuse_pickles(source: object, subfolder: str) -> None:
    folder = _folder(source, subfolder)
    for pattern, instead in _PICKLES.items():
        pickles = [] if folder is None else sorted(folder.glob(pattern))
        if pickles and not any(pickles[0].parent.glob(instead)):
            raise ValueError(_no_pickles(str(pickles[0])))


def _refuse_counts(folder: Path) -> None:
    """Fail if a configuration asks for more parts than its weights' headers list.

    transformers builds the layers, and names the labels, before it looks at any weight.
    """
    sizes = stored_numbers(folder.glob("model*.safetensors"))
    if not sizes:
        return
    config = _read(folder / "config.json")
    for field, most in (("num_hidden_layers", len(sizes)), ("num_labels", sum(sizes))):
        # where only a few are missing, the loader names them
        if isinstance(count := config.get(field), int) and count > most + _FEW:
            raise ValueError(
                f"{folder / 'config.json'} must describe the weights beside it, which hold "
                f"{len(sizes):,} tensors of {sum(sizes):,} numbers, got {field} = {count:,}"
            )


def stored_numbers(files: Iterable[str | Path]) -> list[int]:
    """Return how many numbers each stored tensor has; none if a file is damaged."""
    from safetensors import SafetensorError, safe_open

    found = []
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                found += [math.prod(file.get_slice(x).get_shape()) for x in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError):
            return []
    return found


def _no_pickles(file: str) -> str:
    return (
        f"{file} must be safetensors, got pickles, which can run code; ask for the model in that "
        "format, or convert it where that does no harm"
    )


def refuse_requests(source: object, subfolder: str = "") -> None:
    """Fail if files of a checkpoint's folder ask for others outside of it, or for endless parts.

    For all that a folder may hold, a tokenizer, too: transformers reads the configuration for it.
    See :func:`trusted`.
    """
    folder = _folder(source, subfolder)
    if folder is None:
        return
    _refuse_counts(folder)
    named: dict[str, Any] = {}
    for file in sorted(folder.glob(_INDICES)):
        index = _read(file).get("weight_map")
        if isinstance(index, dict):
            named[file.name] = list(index.values())
    tokenizer = "tokenizer_config.json"
    for field, value in _read(folder / tokenizer).items():
        if field.endswith(("_file", "_files")) and field not in _UNREAD:
            named[f"{tokenizer}, {field}"] = value
    for place, value in named.items():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and _leads_out(name):
                raise ValueError(
                    f"{folder / place} must name files of this folder, got {name!r}; take "
                    "that out, or do not use the files that came with it"
                )


def _folder(source: object, subfolder: str) -> Path | None:
    if not isinstance(source, str | os.PathLike):
        return None
    folder = Path(source, subfolder)
    return folder if folder.is_dir() else None


def _leads_out(name: str) -> bool:
    kinds = PurePosixPath(name), PureWindowsPath(name)
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in kinds)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if there is none: the loader then reports the error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
