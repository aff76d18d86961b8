"""The files of a saved model: their tensors by header, whether they are whole, their digest."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from ssmzoo.files import file_digest, read_json

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
STATE = "state.safetensors"  # of PromptState.save_pretrained; no weights
GOLDEN = "golden.safetensors"  # of ssmzoo.testing.golden; no weights
PRIMING = "priming.json"  # of a hybrid that was made from a Transformer: from which, and how
# of a state adapter, a folder of its own or beside the weights that it starts
ADAPTER_FILE, ADAPTER_CONFIG = "state_adapter.safetensors", "state_adapter.json"
ADAPTER_FORMAT = "ssmzoo-state-adapter-1"
_ADAPTER_FIELDS = {"format": str, "model_type": str, "digest": str, "base": dict, "states": dict}
OPTIMIZER = "optimizer.safetensors"  # of a checkpoint that ssmzoo 0.1 wrote
NO_WEIGHTS = {STATE, GOLDEN, ADAPTER_FILE, OPTIMIZER}  # files that may lie beside weights
SHARDS = "shards"  # the folder, in a run's checkpoint, of its tensors

# a checkpoint's moments and a prompt's state are safetensors too
_OF_THE_MODEL = re.compile(r"(adapter_)?(config\.json|model.*\.safetensors)")
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")

Tensors: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def read_tensors(path: Path) -> Tensors:
    """Return dtype and shape of each tensor in a safetensors file, from its header alone.

    Raises:
        ValueError: The file is truncated, too long, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is corrupt or truncated ({error}); save the model again"
        ) from error


def read_header(path: Path) -> bytes:
    """Return the header of a safetensors file that :func:`read_tensors` reads: JSON."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def holds_state_adapter(folder: str | Path) -> bool:
    """Tell whether a folder holds a saved state adapter."""
    return Path(folder, ADAPTER_CONFIG).is_file()


def is_state_adapter(folder: str | Path) -> bool:
    """Tell whether a folder holds a saved state adapter and no model."""
    return holds_state_adapter(folder) and not Path(folder, "config.json").is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return a state adapter's configuration, and check that its files are of one adapter.

    Raises:
        FileNotFoundError: One of them is missing.
        ValueError: One of them is damaged, or they hold different states.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).is_file():
            way = "save a state adapter there with adapter.save_pretrained(directory)"
            if (inside := folder / "adapter" / name).is_file():  # a run's
                way = f"did you mean {str(inside.parent)!r}?"
            raise FileNotFoundError(f"{folder} holds no {name}; {way}")
    where, path = folder / ADAPTER_CONFIG, folder / ADAPTER_FILE
    config = read_json(where)
    again = "save the adapter again"
    if config.get("format") != ADAPTER_FORMAT or config.keys() != _ADAPTER_FIELDS.keys():
        raise ValueError(
            f"{where} must have the format {ADAPTER_FORMAT!r} and the fields "
            f"{listed(_ADAPTER_FIELDS)}, got {config.get('format')!r} and {listed(config)}; {again}"
        )
    for name, kind in _ADAPTER_FIELDS.items():
        if not isinstance(config[name], kind):
            needed = "a text" if kind is str else "a mapping"
            raise ValueError(f"{where}: {name} must be {needed}, got {config[name]!r}; {again}")
    told = {name: f"{shape} in F32" for name, shape in config["states"].items()}
    found = {name: f"{list(x[1])} in {x[0]}" for name, x in read_tensors(path).items()}
    for name in sorted(told.keys() | found.keys()):
        needed, got = told.get(name, "none"), found.get(name, "none")
        if needed != got:
            raise ValueError(
                f"{path}: {name} must have the shape that {ADAPTER_CONFIG} lists, {needed}, got "
                f"{got}; {again}"
            )
    return config


def is_sharded(folder: Path) -> bool:
    """Tell whether a folder is a run's checkpoint, whose processes each wrote a file of tensors."""
    return (folder / SHARDS).is_dir()


def read_weights(folder: Path) -> Tensors:
    """Return dtype and shape of every tensor of a saved model, and check that none is missing.

    A prompt's state, a state adapter and golden logits beside the weights are not looked at.

    Raises:
        ValueError: There are no weights, a shard is missing or corrupt, or index and shards differ.
    """
    index_path = folder / WEIGHTS_INDEX
    present = {path.name for path in folder.glob("*.safetensors")} - NO_WEIGHTS
    if not index_path.exists():
        if WEIGHTS not in present:
            raise ValueError(
                f"{folder} has no weights: {WEIGHTS} or {WEIGHTS_INDEX} is needed; "
                "save the model with save_pretrained"
            )
        if len(present) > 1:
            raise ValueError(
                f"{folder} holds {listed(present - {WEIGHTS})} beside {WEIGHTS} and no index; "
                "remove the files that are not of this model"
            )
        return read_tensors(folder / WEIGHTS)

    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{index_path} must hold a weight_map from tensors to files")
    shards = set(index.values())
    if strange := {name for name in shards if Path(name).name != name or "\\" in name}:
        raise ValueError(f"{index_path} names files outside the folder: {listed(strange)}")
    if missing := shards - present:
        raise ValueError(f"{folder} lacks {listed(missing)}, which {WEIGHTS_INDEX} names")
    if extra := present - shards:
        raise ValueError(
            f"{folder} holds {listed(extra)}, which {WEIGHTS_INDEX} does not name; "
            "remove the files that are not of this model"
        )
    tensors: Tensors = {}
    for shard in sorted(shards):
        held = read_tensors(folder / shard)
        promised = {name for name, home in index.items() if home == shard}
        if wrong := promised ^ set(held):
            raise ValueError(
                f"{folder / shard} and {WEIGHTS_INDEX} disagree about {listed(wrong)}; "
                "save the model again"
            )
        tensors.update(held)
    return tensors


def parameter_count(tensors: Tensors) -> int:
    """Return how many parameters are stored; a batch norm's running statistics are none."""
    return sum(math.prod(x[1]) for name, x in tensors.items() if not name.endswith(_STATISTICS))


def weights_revision(folder: Path, above: frozenset[Path] = frozenset()) -> str:
    """Return a digest of a saved model's configuration and weights, ``sha256:`` and 16 digits.

    That of an adapter of PEFT counts its base, if that is another folder: an adapter may lie beside
    its base. ``above`` are the folders whose base this one is.
    """
    above |= {folder.resolve()}
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if _OF_THE_MODEL.fullmatch(path.name):
            digest.update(bytes.fromhex(file_digest(path)))
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        home = Path(base) if isinstance(base, str) else folder
        if (home / "config.json").is_file() and home.resolve() not in above:
            digest.update(weights_revision(home, above).encode())
    return f"sha256:{digest.hexdigest()[:16]}"


def listed(names: Iterable[str]) -> str:
    """Return names in order, with commas."""
    return ", ".join(sorted(names))
