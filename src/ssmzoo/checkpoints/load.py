"""A saved model to run: a checkpoint folder or a Hub id, found, named, loaded and checked."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ssmzoo.checkpoints.trust import refuse_requests, trusted
from ssmzoo.checkpoints.weights import is_sharded
from ssmzoo.environment.messages import first_line, suggestion, without_bars, without_reports
from ssmzoo.family import claims, load_family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("ssmzoo")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# one of them is in most folders that a tokenizer was saved to
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
# these, and what may lie beside them
TOKENIZER_FILES = (
    *_TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
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


class ModelSource(NamedTuple):
    """The meaning of a model's name: a folder, a Hub id (no field is set), or an untrained family.

    Attributes:
        folder: Where it was saved.
        family: The family's name.
        preset: Its preset; None is the smallest configuration.
    """

    folder: Path | None = None
    family: str | None = None
    preset: str | None = None


def model_source(model: str) -> ModelSource:
    """Resolve a model's name: a folder, a Hub id, ``family`` or ``family:preset``.

    A folder that holds a model wins over a family of the same name. Whether the Hub has the model,
    or the family the preset, is not looked up.

    Raises:
        ValueError: It is a file, a folder without a model, a path that does not exist, or
            nothing that could be a Hub id.
        LookupError: It is a single name, and there is no such folder or family.
    """
    if not _holds_model(Path(model).expanduser()):
        family, colon, preset = model.partition(":")
        if model in claims() or (colon and re.fullmatch(r"[\w.-]+", family)):
            return ModelSource(family=family, preset=preset if colon else None)
    return ModelSource(folder=_folder(model))


def model_folder(model: str) -> Path | None:
    """Return the folder that ``model`` names, or None if it is a Hub id.

    Raises:
        ValueError: As :func:`model_source`.
        LookupError: As :func:`model_source`, or it names a family, which has no weights.
    """
    source = model_source(model)
    if source.family is not None:
        if source.family not in claims():
            load_family(source.family)  # which says so
        raise LookupError(
            f"model {model!r} must have weights, and a family has none: 'ssmzoo train' makes some"
        )
    return source.folder


def _holds_model(path: Path) -> bool:
    return any((path / file).is_file() for file in ("config.json", "adapter_config.json"))


def _folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir() and model:
        if is_sharded(path):
            raise ValueError(
                f"model folder {model!r} must hold a model, and holds a run's checkpoint; make a "
                f"model of it: ssmzoo consolidate {model} --output FOLDER"
            )
        if _holds_model(path):
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
    if "/" not in model:
        family = model.split("-")[0].split(":")[0]
        hint = suggestion(model, claims())
        if family in claims():
            hint = f"; family {family!r} has no weights of its own, 'ssmzoo train' makes some"
        raise LookupError(f"no model {model!r}: no folder here, and a Hub id is owner/name{hint}")
    return None


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the size of the least vocabulary that has every id of a tokenizer.

    It is more than the tokenizer's length where its ids leave gaps, as added tokens' may.
    """
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def check_vocabulary(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids that the model does not embed.

    Raises:
        ValueError: It has such ids.
    """
    embedding = network.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and (size := vocabulary_size(tokenizer)) > rows:
        raise ValueError(
            f"the tokenizer has ids up to {size - 1} and the model embeds only {rows} tokens; "
            "they do not belong together"
        )


def check_dtype(dtype: str) -> None:
    """Check that :func:`load_model` takes a type of weights.

    Raises:
        ValueError: It does not; the message names the closest.
    """
    known = get_args(Dtype)
    if dtype not in known:
        raise ValueError(
            f"dtype must be one of {', '.join(known)}, got {dtype!r}{suggestion(dtype, known)}"
        )


def load_tokenizer(model: str, folder: Path | None, trust: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, ``folder`` being the result of :func:`model_folder`.

    Raises:
        LookupError: The Hub has none.
        ValueError: The folder holds none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    import ssmzoo.auto  # noqa: F401

    local = folder is not None or not on_hub(model)
    try:
        with _loading("a tokenizer", model, folder):
            refuse_requests(folder)
            return AutoTokenizer.from_pretrained(
                folder or model,
                trust_remote_code=trust,
                local_files_only=local,
            )
    except ValueError:
        if folder is not None:
            check_holds_tokenizer(model, folder)
        raise


def holds_tokenizer(folder: str | Path) -> bool:
    """Tell whether a tokenizer was saved to the folder, by the files that most of them leave."""
    return any(Path(folder, file).is_file() for file in _TOKENIZER_FILES)


def check_holds_tokenizer(name: str, folder: str | Path, otherwise: str = "") -> None:
    """Check that a folder from which no tokenizer loads holds files of one.

    Raises:
        ValueError: It holds none. The message ends in ``otherwise``, another way out.
    """
    if not holds_tokenizer(folder):
        raise ValueError(
            f"{name!r} must hold the model's tokenizer, and holds none; save it there with "
            f"tokenizer.save_pretrained({name!r}){otherwise}"
        )


def load_model(
    model: str,
    folder: Path | None,
    dtype: Dtype,
    trust: bool,
    *,
    kind: Any = None,
    config: PreTrainedConfig | None = None,
    new_head: bool = False,
) -> PreTrainedModel:
    """Return a model ready to run, ``folder`` being the result of :func:`model_folder`.

    Args:
        model: The folder or Hub id, as it was given.
        folder: The folder, or None for the Hub.
        dtype: Of the weights; "auto" is as saved.
        trust: Let the checkpoint bring its own Python code.
        kind: The class that loads it, or an Auto class; None is ``AutoModelForCausalLM``.
        config: Its configuration, if not the saved one.
        new_head: Let tensors be missing: they start anew, and the log says how many.

    Raises:
        LookupError: The Hub has none.
        ValueError: It cannot be loaded, or not all of its tensors are there, in the shapes that
            its configuration says.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import ssmzoo.auto  # noqa: F401

    noun = "a causal language model" if kind is None else "a model"
    local = folder is not None or not on_hub(model)
    given = {} if config is None else {"config": config}
    with _loading(noun, model, folder), without_bars(), without_reports(), trusted(folder or model):
        # with output_loading_info a pair, which its annotation does not say
        loaded: Any = (kind or AutoModelForCausalLM).from_pretrained(
            folder or model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust,
            use_safetensors=True,
            local_files_only=local,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the error about them refers to a report; see below
            **given,
        )
    network, loading = loaded
    if loading["mismatched_keys"]:
        tensor, stored, needed = sorted(loading["mismatched_keys"])[0]
        raise ValueError(
            f"the weights of {model!r} do not fit its configuration: {tensor!r} is {list(stored)} "
            f"in the file, the model needs {list(needed)}"
        )
    if left := sorted(loading["unexpected_keys"]):
        logger.warning(
            "%r has %d tensors that a %s has no place for, and goes without them; the first is %r",
            model,
            len(left),
            type(network).__name__,
            left[0],
        )
    missing = sorted(loading["missing_keys"])
    lacks = f"the weights of {model!r} lack {len(missing)} tensors that the model needs"
    if missing and not new_head:
        raise ValueError(f"{lacks}, the first is {missing[0]!r}")
    if missing:
        logger.warning("%s; they start anew, the first is %r", lacks, missing[0])
    return network.eval()


def on_hub(model: str) -> bool:
    """Ask the Hub whether it has a model, once rather than for each of its files.

    The answer holds for this process, or until something fails to load; see :func:`ask_again`.

    Returns:
        False where the Hub is not to be asked, or does not answer and the model was fetched before.

    Raises:
        LookupError: The Hub has no such model, or does not answer.
    """
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answer(model)


@functools.cache
def _answer(model: str) -> bool:
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        model_info(model, timeout=10)
    except HFValidationError as error:
        raise LookupError(f"no folder {model!r} here, and it cannot be a Hub id") from error
    except RepositoryNotFoundError as error:
        raise LookupError(
            f"no folder {model!r} here, and no such model on the Hub, or a private one: "
            "look at its name, or log in with 'hf auth login'"
        ) from error
    except HfHubHTTPError:  # it is there and busy: its client asks again
        return True
    except Exception as error:
        fetched = (
            try_to_load_from_cache(model, file) for file in ("config.json", *_TOKENIZER_FILES)
        )
        if any(isinstance(file, str) for file in fetched):
            return False
        raise LookupError(
            f"no folder {model!r} here, and the Hub does not answer: {first_line(error)}"
        ) from error
    return True


def is_local(name: str, argument: str) -> bool:
    """Tell whether a name is loaded without the Hub: a folder, or fetched before.

    Raises:
        LookupError: It is no folder, and the Hub has no such model or does not answer.
    """
    try:
        return Path(name).is_dir() or not on_hub(name)
    except LookupError as error:
        raise LookupError(f"{argument}: {error}") from error


def ask_again() -> None:
    """Forget the Hub's answers: a model that failed to load may be there next time."""
    _answer.cache_clear()


@contextlib.contextmanager
def _loading(noun: str, model: str, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ask_again()
        reason = f"{type(error).__name__}: {first_line(error)}"
        if folder is None and isinstance(error, OSError):
            raise LookupError(
                f"no folder {model!r} here, and no {noun.split(' ', 1)[1]} from the Hub: {reason}"
            ) from error
        raise ValueError(f"cannot load {noun} from {model!r}: {reason}") from error
