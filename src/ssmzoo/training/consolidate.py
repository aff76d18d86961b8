"""The model of a checkpoint, in a folder that the Auto classes load."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.checkpoints.weights import ADAPTER_CONFIG, ADAPTER_FILE, PRIMING, SHARDS
from ssmzoo.environment.messages import without_bars
from ssmzoo.files import require_new, write_folder, write_json
from ssmzoo.training.checkpoint import CONTENTS, damage_of
from ssmzoo.training.priming import history

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ADAPTER = (ADAPTER_FILE, ADAPTER_CONFIG)
_NOT_OF_THE_MODEL = {CONTENTS, SHARDS, "state.json", *_ADAPTER}


def consolidate(checkpoint: Path, output: Path) -> Path:
    """Write the model of a run's checkpoint into a new folder, and return it.

    Its weights are joined in the CPU's memory, without the optimizer. A state adapter goes along.

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
        raise RuntimeError(
            f"the checkpoint {checkpoint} cannot be used: {damage}; take an earlier one"
        )

    def write(folder: Path) -> None:
        write_model(checkpoint, folder)
        write_adapter(checkpoint, folder)

    write_folder(output, write)
    return output


def load_checkpoint(checkpoint: Path) -> PreTrainedModel:
    """Return the model of a checkpoint, on the CPU and in the precision that it was saved in."""
    import ssmzoo.auto  # noqa: F401

    known = import_module("transformers")  # not before: our import makes the module anew
    config = known.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    assert config.architectures is not None  # the run wrote them
    return load_shards(checkpoint, getattr(known, config.architectures[0]), config)


def load_shards(
    checkpoint: Path, kind: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Return a model of this class with a checkpoint's weights.

    Raises:
        ValueError: A tensor is not there, or has another shape.
    """
    from ssmzoo.training.shards import read_into, weights_of

    model: Any = kind._from_config(config, dtype=config.dtype)
    read_into(checkpoint / SHARDS, weights_of(model))
    return model.eval()


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """Write the state adapter that a checkpoint holds, if it holds one."""
    for path in (checkpoint / name for name in _ADAPTER):
        if path.is_file():
            shutil.copy2(path, folder)


def write_model(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint: weights, configuration, tokenizer, how it was primed."""
    for path in checkpoint.iterdir():
        if path.name not in _NOT_OF_THE_MODEL:
            if path.is_dir():  # a tokenizer's further chat templates
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy2(path, folder)
    with without_bars():
        load_checkpoint(checkpoint).save_pretrained(folder)
    if (told := history(checkpoint)) is not None:
        write_json(folder / PRIMING, told, indent=2)
