"""The model to look at, loaded or untrained, and the reference sequences that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ssmzoo.checkpoints.load import (
    load_model,
    load_tokenizer,
    model_folder,
    model_name,
    model_source,
)
from ssmzoo.data.documents import expand, read_files
from ssmzoo.environment.hardware import usable_device
from ssmzoo.family import load_family
from ssmzoo.modeling import SSMModel
from ssmzoo.modeling.inputs import check_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedBackbone:
    """A backbone in float32 and where it came from."""

    model: PreTrainedModel
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


def load_subject(
    name: str, *, seed: int, device: str | None, stock: bool = False
) -> LoadedBackbone:
    """Return the backbone of a folder, a Hub id, ``family`` (tiny) or ``family:preset``.

    transformers' recurrent models run on our kernels, unless they are to stay ``stock``.

    Raises:
        LookupError: There is no such model, family or preset.
        ValueError: The folder holds no complete model with recurrent layers, or the device is not
            there.
        RuntimeError: The family's plugin cannot be loaded.
    """
    from ssmzoo.modeling.stock import choose_kernels, mixers_of

    subject = load_backbone(name, seed=seed, device=device)
    if not isinstance(subject.model, SSMModel):
        if not mixers_of(subject.model):
            raise ValueError(
                "inspect needs a model of the zoo, or one of transformers with recurrent layers: "
                f"{name!r} must have such layers, got {type(subject.model).__name__}"
            )
        choose_kernels(subject.model, stock)
    return subject


def load_backbone(name: str, *, seed: int, device: str | None) -> LoadedBackbone:
    """Return the same of any model of tokens or of values that transformers loads.

    Raises:
        LookupError: There is no such model, family or preset.
        ValueError: The folder holds no complete model, or one of images, or the device is not
            there.
        RuntimeError: The family's plugin cannot be loaded.
    """
    place = usable_device(device)
    source = model_source(name)
    untrained, shown = source.family is not None, name
    if source.family is not None:
        model = _untrained(source.family, source.preset, seed)
    else:
        from transformers import AutoModel

        shown = name if source.folder is None else model_name(name) or name
        model = load_model(name, source.folder, "float32", False, kind=AutoModel)
    if isinstance(model, SSMModel) and model.config.image_size is not None:
        raise ValueError(
            f"model must be one of tokens or of values, {name!r} takes images; name another one"
        )
    return LoadedBackbone(_placed(model, place), shown, untrained)


def reference_inputs(
    subject: LoadedBackbone,
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
    device = subject.model.device
    if tokens is not None:
        count = min(sequences, len(tokens) // length)
        if count == 0:
            raise ValueError(
                f"text must have at least length = {length} tokens, got {len(tokens)}; give a "
                "longer text, or a smaller length"
            )
        return tokens[: count * length].view(count, length).to(device)
    draw = torch.Generator().manual_seed(seed)
    channels = subject.channels
    if channels is not None:
        return torch.randn(sequences, length, channels, generator=draw).to(device)
    return torch.randint(subject.vocab_size, (sequences, length), generator=draw).to(device)


def given_ids(subject: LoadedBackbone, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return given token ids ``[B, L]``.

    Raises:
        ValueError: No ids, rows of different lengths, an id the model does not know, or a model of
            values.
    """
    if subject.channels is not None:
        raise ValueError("ids must be left out: this model takes values, not tokens")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(f"ids must be rows of one length of at least 1, got lengths {lengths}")
    ids = torch.tensor(rows, dtype=torch.int64)
    check_indices("ids", ids, subject.vocab_size)
    return ids.to(subject.model.device)


def text_tokens(subject: LoadedBackbone, source: str, text: str | Path) -> Tensor:
    """Return the token ids of a text file ``[T]``, by the model's own tokenizer.

    An untrained model has none and reads bytes.

    Raises:
        ValueError: No such text, a model of values, or a tokenizer that does not fit the model.
    """
    if subject.channels is not None:
        raise ValueError("text must be left out: this model takes values, not tokens")
    files = expand([str(text)], "text")
    words = "".join(content for _, content in read_files("text", files, "text", skip_binary=False))
    tokenizer = _tokenizer(subject, source)
    ids = cast("list[int]", tokenizer.encode(words, add_special_tokens=False, verbose=False))
    if ids and max(ids) >= subject.vocab_size:
        raise ValueError(
            f"the tokenizer gives token id {max(ids)}, the model knows ids below "
            f"{subject.vocab_size}: they do not belong together; leave text out for random tokens"
        )
    return torch.tensor(ids, dtype=torch.int64)


def _tokenizer(subject: LoadedBackbone, source: str) -> PreTrainedTokenizerBase:
    if subject.untrained:
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


def _placed(model: PreTrainedModel, place: torch.device) -> PreTrainedModel:
    nn.Module.to(model, place)
    return model.eval()
