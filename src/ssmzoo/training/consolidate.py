"""The model of a checkpoint, in a folder that the Auto classes load."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from ssmzoo.checkpoints.weights import ADAPTER_CONFIG, ADAPTER_FILE, OPTIMIZER, SHARDS, is_sharded
from ssmzoo.environment.messages import without_bars
from ssmzoo.files import require_new, write_folder
from ssmzoo.training.checkpoint import CONTENTS, damage_of

_ADAPTER = (ADAPTER_FILE, ADAPTER_CONFIG)
_NOT_OF_THE_MODEL = {CONTENTS, SHARDS, OPTIMIZER, "state.json", *_ADAPTER}


def consolidate(checkpoint: Path, output: Path) -> Path:
    """Write the model of a run's checkpoint into a new folder, and return it.

    Whole weights are copied; shards are joined in the CPU's memory, weights alone. A state adapter
    goes along.

    Args:
        checkpoint: One of a run's ``checkpoints/``.
        output: A folder that is not there, or empty.

    Raises:
        ValueError: It is no checkpoint, or the output is not empty.
        RuntimeError: A file of the checkpoint is damaged, or the output cannot be written.
    """
    if not (checkpoint / CONTENTS).is_file():
        raise ValueError(
            f"checkpoint must be one of a run's checkpoints/, which hold {CONTENTS}, got "
            f"{str(checkpoint)!r}"
        )
    require_new(output, "output")
    if damage := damage_of(checkpoint):
        raise RuntimeError(f"the checkpoint {checkpoint} is damaged: {damage}; take an earlier one")

    def write(folder: Path) -> None:
        write_model(checkpoint, folder)
        write_adapter(checkpoint, folder)

    write_folder(output, write)
    return output


def adapter_files(checkpoint: Path) -> list[Path]:
    """Return the files of the state adapter that a checkpoint holds, if it holds one."""
    return [checkpoint / name for name in _ADAPTER if (checkpoint / name).is_file()]


def model_files(checkpoint: Path) -> list[Path]:
    """Return what a checkpoint holds of the model as it is saved: all but the weights in shards."""
    return [
        path
        for path in checkpoint.iterdir()
        if path.name not in _NOT_OF_THE_MODEL and not path.name.startswith("carried-")
    ]


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """Write the state adapter that a checkpoint holds, if it holds one."""
    for path in adapter_files(checkpoint):
        shutil.copy2(path, folder)


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write what a checkpoint holds of the model: weights, configuration, tokenizer."""
    for path in model_files(checkpoint):
        if path.is_dir():  # a tokenizer's further chat templates
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy2(path, folder)
    if is_sharded(checkpoint):
        import ssmzoo.auto  # noqa: F401
        from ssmzoo.training.model import load_shards

        known = import_module("transformers")  # not before: our import makes the module anew
        config = known.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        assert config.architectures is not None  # the run wrote them
        kind = getattr(known, config.architectures[0])
        with without_bars():
            load_shards(checkpoint, kind, config).save_pretrained(folder)
