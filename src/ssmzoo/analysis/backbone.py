"""The model to examine, loaded or untrained, and the reference sequences that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ssmzoo.checkpoints.load import (
    Dtype,
    load_model,
    load_tokenizer,
    model_folder,
    model_name,
    model_source,
)
from ssmzoo.data.paths import expand
from ssmzoo.data.readers import read_files
from ssmzoo.environment.device import usable_device
from ssmzoo.family import load_family
from ssmzoo.modeling import SSMModel
from ssmzoo.modeling.inputs import check_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedBackbone:
    """A backbone and where it came from.

    Attributes:
        model: The backbone.
        whole: The saved model with its head; of an untrained one the backbone alone.
        name: The model's name in reports.
        untrained: Whether its weights are random.
    """

    model: PreTrainedModel
    whole: PreTrainedModel
    name: str
    untrained: bool

    @property
    def channels(self) -> int | None:
        """How many values an input has; None for a model of tokens."""
        return getattr(self.model.config, "input_channels", None)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.model.config.get_text_config().vocab_size


def load_backbone(
    name: str, *, seed: int, device: str | None, stock: bool, dtype: Dtype = "float32"
) -> LoadedBackbone:
    """Return the backbone of a folder, a Hub id, ``family`` (tiny) or ``family:preset``.

    It reads tokens or values. Saved weights get the given dtype, untrained ones the
    configuration's. transformers' recurrent models run on our kernels unless ``stock``.

    Raises:
        LookupError: There is no such model, family or preset.
        ValueError: The folder holds no complete model with recurrent layers, or one of images, or
            the device is not there.
        RuntimeError: The family's plugin cannot be loaded.
    """
    from ssmzoo.modeling.stock import choose_kernels, mixers_of

    place = usable_device(device)
    source = model_source(name)
    untrained, shown = source.family is not None, name
    if source.family is not None:
        whole = _untrained(source.family, source.preset, seed)
    else:
        shown = name if source.folder is None else model_name(name) or name
        whole = load_model(name, source.folder, dtype, False, kind=_AsSaved)
    model = cast("PreTrainedModel", whole.base_model)
    if isinstance(model, SSMModel) and model.config.image_size is not None:
        raise ValueError(
            f"model must be one of tokens or of values, {name!r} takes images; name another one"
        )
    nn.Module.to(whole, place)
    if not isinstance(model, SSMModel):
        if not mixers_of(model):
            raise ValueError(
                f"{name!r} must be a model of the zoo, or one of transformers with recurrent "
                f"layers, got {type(model).__name__}"
            )
        choose_kernels(model, stock)
    return LoadedBackbone(model.eval(), whole.eval(), shown, untrained)


class _AsSaved:
    """An Auto class that loads a model as the class it was saved as, with its head."""

    @staticmethod
    def from_pretrained(model: str | Path, **options: Any) -> Any:
        import transformers

        kind: Any = transformers.AutoModel
        with suppress(OSError, ValueError):  # an adapter has no configuration, say
            asked = {name: options[name] for name in ("local_files_only", "trust_remote_code")}
            config = transformers.AutoConfig.from_pretrained(model, **asked)
            saved: Any = getattr(transformers, (config.architectures or [""])[0], None)
            models = isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)
            if models and saved.config_class is type(config):
                kind = saved
        return kind.from_pretrained(model, **options)


def reference_inputs(
    loaded: LoadedBackbone,
    length: int,
    sequences: int,
    *,
    tokens: Tensor | None,
    seed: int,
) -> Tensor:
    """Return ``[B, L]`` token ids, or ``[B, L, C]`` values for a model that takes these.

    Pieces of the given tokens from their beginning, as many as there are up to ``sequences``; or
    uniform tokens, or values from N(0, 1).

    Raises:
        ValueError: Fewer tokens than one sequence needs.
    """
    device = loaded.model.device
    if tokens is not None:
        count = min(sequences, len(tokens) // length)
        if count == 0:
            raise ValueError(
                f"text must have at least length = {length} tokens, got {len(tokens)}; give a "
                "longer text, or a smaller length"
            )
        return tokens[: count * length].view(count, length).to(device)
    draw = torch.Generator().manual_seed(seed)
    channels = loaded.channels
    if channels is not None:
        return torch.randn(sequences, length, channels, generator=draw).to(device)
    return torch.randint(loaded.vocab_size, (sequences, length), generator=draw).to(device)


def given_ids(loaded: LoadedBackbone, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return given token ids ``[B, L]``.

    Raises:
        ValueError: No ids, rows of different lengths, an id the model does not know, or a model of
            values.
    """
    _require_tokens(loaded, "ids")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(f"ids must be rows of one length of at least 1, got lengths {lengths}")
    ids = torch.tensor(rows, dtype=torch.int64)
    check_indices("ids", ids, loaded.vocab_size)
    return ids.to(loaded.model.device)


def text_tokens(loaded: LoadedBackbone, source: str, text: str | Path) -> Tensor:
    """Return the token ids of a text file ``[T]``, by the model's own tokenizer.

    An untrained model has none and reads bytes.

    Raises:
        ValueError: No such text, a model of values, or a tokenizer that does not fit the model.
    """
    _require_tokens(loaded, "text")
    files = expand([str(text)], "text")
    words = "".join(content for _, content in read_files("text", files, "text", skip_binary=False))
    tokenizer = _tokenizer(loaded, source)
    ids = cast("list[int]", tokenizer.encode(words, add_special_tokens=False, verbose=False))
    if ids and max(ids) >= loaded.vocab_size:
        raise ValueError(
            f"the tokenizer gives token id {max(ids)}, the model knows ids below "
            f"{loaded.vocab_size}: they do not belong together; leave text out for random tokens"
        )
    return torch.tensor(ids, dtype=torch.int64)


def _require_tokens(loaded: LoadedBackbone, argument: str) -> None:
    if loaded.channels is not None:
        raise ValueError(f"{argument} must be left out: this model takes values, not tokens")


def _tokenizer(loaded: LoadedBackbone, source: str) -> PreTrainedTokenizerBase:
    if loaded.untrained:
        from ssmzoo.data.tokenizer import byte_tokenizer

        return byte_tokenizer()
    try:
        return load_tokenizer(source, model_folder(source), trust=False)
    except (LookupError, ValueError) as error:
        raise ValueError(f"{error}; leave text out for random tokens") from error


def _untrained(name: str, preset: str | None, seed: int) -> PreTrainedModel:
    family = load_family(name)
    config = family.config(**family.tiny) if preset is None else family.config(preset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family.model_class(cast(Any, config))
