"""The model to score: a checkpoint folder or a Hub id, found, named, loaded and checked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssmzoo.trust import refuse_paths, trusted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# one of them is in most folders that a tokenizer was saved to
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def model_name(model: str) -> str:
    """Make a model's name in results from its folder or Hub id.

    ``user/name`` becomes ``user__name``; of a run's folders, the run gives the name.
    """
    if model_folder(model) is None:
        return model.replace("/", "__")
    path = Path(model).expanduser().resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.parent.name if path.name == "model" else path.name


def model_folder(model: str) -> Path | None:
    """Return the folder that ``model`` names, or None if it must be a Hub id.

    Raises:
        ValueError: It is a file, a folder without a model, a path that does not exist, or
            nothing that could be a Hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir() and model:
        if any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            return path
        inside = path / "model"
        hint = f"; did you mean {str(inside)!r}?" if (inside / "config.json").is_file() else ""
        raise ValueError(f"model folder {model!r} must hold a config.json, and holds none{hint}")
    if path.exists() and model:
        raise ValueError(f"model must be a checkpoint folder or a Hub id, got the file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise ValueError(f"model must be a checkpoint folder or a Hub id; no folder {model!r}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise ValueError(f"model must be a checkpoint folder or a Hub id, got {model!r}")
    return None


def check_vocabulary(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that holds more tokens than the model embeds.

    Raises:
        ValueError: It does.
    """
    embedding = network.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer holds {len(tokenizer)} tokens and the model embeds only {rows}; "
            f"they do not belong together"
        )


def load_tokenizer(model: str, folder: Path | None, trust: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, ``folder`` being what :func:`model_folder` found.

    Raises:
        LookupError: The Hub has none.
        ValueError: The folder holds none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        with _loading("a tokenizer", model, folder):
            refuse_paths(folder)
            return AutoTokenizer.from_pretrained(
                folder or model, trust_remote_code=trust, local_files_only=folder is not None
            )
    except ValueError:
        if folder is not None:
            check_holds_tokenizer(model, folder)
        raise


def check_holds_tokenizer(name: str, folder: str | Path, otherwise: str = "") -> None:
    """Say of a folder, from which no tokenizer loads, that none was saved to it if that is so.

    Raises:
        ValueError: It is. The message ends in ``otherwise``, another way out.
    """
    if not any(Path(folder, file).is_file() for file in _TOKENIZER_FILES):
        raise ValueError(
            f"{name!r} must hold the model's tokenizer, and holds none; save it there with "
            f"tokenizer.save_pretrained({name!r}){otherwise}"
        )


def load_model(model: str, folder: Path | None, dtype: Dtype, trust: bool) -> PreTrainedModel:
    """Return a model for scoring, ``folder`` being what :func:`model_folder` found.

    Raises:
        LookupError: The Hub has none.
        ValueError: It cannot be loaded, or not all of its tensors are there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with _loading("a causal language model", model, folder), trusted(folder or model):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder or model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust,
            use_safetensors=True,
            local_files_only=folder is not None,
            output_loading_info=True,
        )
        network, info = loaded
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ValueError(
            f"the checkpoint {model!r} lacks {len(missing)} of the model's tensors, e.g. "
            f"{missing[0]!r}; scores of random weights would mean nothing"
        )
    return network.eval()


@contextlib.contextmanager
def _loading(what: str, model: str, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        if folder is None and isinstance(error, OSError):
            raise LookupError(
                f"no folder {model!r} here, and no {what.split(' ', 1)[1]} from the Hub: {reason}"
            ) from error
        raise ValueError(f"cannot load {what} from {model!r}: {reason}") from error


def place_of(device: str | None) -> torch.device:
    """Return the device of a name, or the GPU if there is one.

    Raises:
        ValueError: It names no device.
        RuntimeError: The device is not there.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device must be a torch device, e.g. 'cpu' or 'cuda:0', got {device!r}"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return place


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
