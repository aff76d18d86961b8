"""The file of a cache's states: one safetensors file, complete or not there at all.

Version 0.1.0 wrote this form; docs/releasing.md says what may change in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = "ssmzoo-state-1"
_OTHER = "other."  # before the names of tensors in the file that are no states


class StateFile(NamedTuple):
    """The content of a file.

    Attributes:
        owner: Fields that a model must share with the one that the states belong to.
        states: By the number of a layer, the states by name.
        seen_tokens: How many tokens they have seen.
        adapter: The digest of the state adapter that they began from; None: they began from zeros.
        others: Other tensors by name.
        notes: All metadata of the file.
    """

    owner: Any
    states: Mapping[int, dict[str, Tensor]]
    seen_tokens: int
    adapter: str | None
    others: Mapping[str, Tensor]
    notes: Mapping[str, str]


def write_states(path: str | os.PathLike[str], content: StateFile) -> None:
    """Write a file, complete or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    tensors = {
        f"{index}.{name}": state.detach().contiguous()
        for index, held in content.states.items()
        for name, state in held.items()
    }
    metadata = {
        "format": _FORMAT,
        "owner": json.dumps(content.owner),
        "states": json.dumps(sorted(tensors)),
        "seen_tokens": str(content.seen_tokens),
        **({} if content.adapter is None else {"adapter": content.adapter}),
        **content.notes,
    }
    tensors |= {f"{_OTHER}{name}": tensor.contiguous() for name, tensor in content.others.items()}
    # not ssmzoo.files, which stays behind when this code travels with a checkpoint
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(mode)  # safetensors makes files that nobody else may read
        with partial.open("rb") as written:  # on the disk before it has the name
            os.fsync(written.fileno())
        os.replace(partial, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_states(path: str | os.PathLike[str], device: str | torch.device) -> StateFile:
    """Read a file that :func:`write_states` wrote.

    Raises:
        ValueError: The file is not a saved state, or is damaged.
        OSError: The file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            notes = file.metadata() or {}
            # copies are aligned: matrix libraries round by alignment
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if notes.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not a saved StateCache: its format must be {_FORMAT!r}, "
            f"got {notes.get('format')!r}"
        )
    try:
        owner, names = json.loads(notes["owner"]), json.loads(notes["states"])
        seen = int(notes["seen_tokens"])
    except (KeyError, ValueError, RecursionError) as error:
        raise damaged(path, f"bad metadata {error}") from error
    others = {n.removeprefix(_OTHER): t for n, t in tensors.items() if n.startswith(_OTHER)}
    states = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OTHER)}
    if sorted(states) != names:
        raise damaged(path, f"it holds {sorted(states)} of {names}")
    rows = {tuple(state.shape[:1]) for state in states.values()}
    if len(rows) > 1 or () in rows or seen < 0:
        raise damaged(
            path,
            f"each state must have a row a sequence, got {sorted(rows)} rows after {seen} tokens",
        )
    held: dict[int, dict[str, Tensor]] = {}
    for name, state in states.items():
        index, _, state_name = name.partition(".")
        if not (index.isdecimal() and state_name):
            raise damaged(path, f"it holds a state {name!r}")
        held.setdefault(int(index), {})[state_name] = state
    return StateFile(owner, held, seen, notes.get("adapter"), others, notes)


def damaged(path: str | os.PathLike[str], reason: object) -> ValueError:
    """Return the error for a damaged file."""
    return ValueError(f"{path} is a damaged StateCache: {reason}")


def tensors_digest(tensors: Mapping[str, Tensor], *, preface: Iterable[str] = ()) -> str:
    """Return the SHA-256 of tensors by name, and of lines before them."""
    digest = hashlib.sha256()
    for line in preface:
        digest.update(line.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()
