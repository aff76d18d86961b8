"""The fields that every family's configuration has, and the rule that there are no others."""

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from ssmzoo.checkpoints.loader import AUTO_MAP, write_loader
from ssmzoo.environment.messages import suggestion

_LOGGER = logging.getLogger("ssmzoo")
_STATELESS = "stateless"  # in a field's metadata
_STOCK_STATELESS = frozenset(
    {"vocab_size", "initializer_range", "tie_word_embeddings", "use_cache", "residual_in_fp32"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "hidden_dropout"}
)

# keys that transformers writes into config.json or takes from the keywords, besides its fields
_TRANSFORMERS_KEYS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)


def stateless(default: Any) -> Any:
    """Return a field that changes neither a state's meaning nor its shape.

    A cache or state adapter fits a model only if all unmarked fields agree; a file that is older
    than a field has its default. Mark what only training, the head or rounding depends on.
    """
    return dataclasses.field(default=default, metadata={_STATELESS: True})


def state_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return a configuration's fields that a state may depend on, with their defaults.

    Of transformers' own configurations those of dropout, for example, are known by their names.
    """
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)} | _STOCK_STATELESS
    for base in filter(dataclasses.is_dataclass, kind.__mro__):  # a family may give another default
        general |= {f.name for f in dataclasses.fields(base) if _STATELESS in f.metadata}
    return {f.name: _default(f) for f in dataclasses.fields(kind) if f.name not in general}


def _default(field: dataclasses.Field[Any]) -> Any:
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


@strict
class SSMConfig(PreTrainedConfig):
    """Base of all configurations. An unknown field is an error with a suggestion.

    Where a field may be ``float | int`` whole numbers become floats.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of blocks, one mixer each.
        rms_norm_eps: Added to the mean square, or the variance, in every norm.
        norm_type: RMSNorm, LayerNorm, BatchNorm or none. BatchNorm's training statistics see every
            token, so a language model trained with it looks ahead.
        prenorm: ``x + mixer(norm(x))`` and a norm at the end; otherwise ``norm(x + mixer(x))``.
        residual: Add the input of a mixer or MLP to its output.
        intermediate_size: Width of an MLP after every mixer; None has none.
        mlp_type: Its kind: "gelu" as in GPT-2, or "swiglu" as in Llama.
        dropout: Probability to drop an entry of a mixer's or MLP's output, while training.
        embedding_dropout: The same for the embedding.
        tie_dropout: Drop whole features of a sequence instead of single entries.
        input_channels: Take continuous ``input_values`` with so many channels through a linear
            layer instead of token ids through an embedding.
        image_size: Take square ``pixel_values`` of this side, cut into patches with a class token
            in their middle, instead of token ids.
        patch_size: Side of a patch; it divides ``image_size``.
        num_channels: Channels of an image.
        directions: Run every mixer forwards, or also on the reversed sequence and add the outputs:
            the same mixer ("both-shared") or another one ("both-separate").
        drop_path_rate: Probability to drop all that a mixer or MLP adds to a sequence, while
            training; it rises evenly from 0 in the first layer to this in the last.
        pooling: A classifier's input: the output at the last token (of an image, at its class
            token), or the mean.
        classifier_bias: Whether a classifier's linear map has a bias.
        residual_in_fp32: Keep the residual stream in float32 when the weights are not.
        initializer_range: Standard deviation of the embedding's initial entries.
        tie_word_embeddings: Let the language-model head use the embedding's weight.
        use_cache: Return the state by default (never while training).
        skip_logits: In training, return a language model's loss without its logits, of which few
            exist at a time: for large vocabularies.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    # a family's fields that its mixers do not read, but its own embedding, head or decoder do
    own_model: ClassVar[frozenset[str]] = frozenset()

    @property
    def reads_own_model(self) -> bool:
        """Whether mixers read parameters of the family's own backbone, which a hybrid has not."""
        return False

    @property
    def finds_families(self) -> bool:
        """Whether mixers are of families that are found by name; code does not travel then."""
        return False

    # A file without a new field has its default; files saved from now on name it. One that changes
    # no state is `stateless`: a cache then fits models that differ in it.
    vocab_size: int = stateless(50304)
    hidden_size: int = 768
    num_hidden_layers: int = 24
    rms_norm_eps: float | int = 1e-5
    norm_type: Literal["rms", "layer", "batch", "none"] = "rms"
    prenorm: bool = True
    residual: bool = True
    intermediate_size: int | None = None
    mlp_type: Literal["gelu", "swiglu"] = "gelu"
    dropout: float | int = stateless(0.0)
    embedding_dropout: float | int = stateless(0.0)
    tie_dropout: bool = stateless(False)
    input_channels: int | None = None
    image_size: int | None = None
    patch_size: int = 16
    num_channels: int = 3
    directions: Literal["forward", "both-shared", "both-separate"] = "forward"
    drop_path_rate: float | int = stateless(0.0)
    pooling: Literal["last", "mean"] = stateless("last")
    classifier_bias: bool = stateless(False)
    residual_in_fp32: bool = stateless(True)
    initializer_range: float | int = stateless(0.02)
    tie_word_embeddings: bool = stateless(True)
    use_cache: bool = stateless(True)
    skip_logits: bool = stateless(False)
    pad_token_id: int | None = stateless(None)
    bos_token_id: int | None = stateless(None)
    eos_token_id: int | list[int] | None = stateless(None)

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse unknown fields, let transformers take its own, complete and check the rest.

        Raises:
            LookupError: A field that this configuration does not have.
            ValueError: A field out of its range or given twice, or kernels from the Hub.
        """
        for name in self._unknown(kwargs):
            raise LookupError(
                f"{type(self).__name__} has no field {name!r}{suggestion(name, self._names())}"
            )
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(kwargs.get(name)):  # transformers would fetch and run it
                raise ValueError(
                    f"{name} must not be set, got {kwargs[name]!r}; remove it: these models run "
                    "their own kernels, none from the Hub"
                )
        for name in [name for name in kwargs if name in self.attribute_map]:
            self.take(name, self.attribute_map[name], kwargs.pop(name))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            if type(value) is int and float in get_args(field.type):
                setattr(self, field.name, float(value))
        self.check_largest()
        self.complete()
        _check_dtype(kwargs.get("torch_dtype") if self.dtype is None else self.dtype)
        for name in ("id2label", "label2id"):
            labels = kwargs.get(name, getattr(self, name, None))
            if not isinstance(labels, dict | None):
                kind = type(labels).__name__
                raise TypeError(f"{name} must be a dictionary or None, got {kind}")
        if (labels := kwargs.get("num_labels")) is not None and not 1 <= labels <= _MOST_LABELS:
            # transformers gives each a name
            rule = "at least 1" if labels < 1 else f"at most {_MOST_LABELS:,}"
            raise ValueError(f"num_labels must be {rule}, got {labels:,}")
        super().__post_init__(**kwargs)
        # code of the checkpoint's own, by Auto class: TRL reads it, transformers writes into it
        code: dict[str, str] = vars(self).get("auto_map") or {}
        self.auto_map = {} if code == AUTO_MAP else code
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration of a dictionary and of fields that replace some of it.

        As in the constructor, derived fields are completed and all is checked; transformers would
        set the replaced fields on a finished configuration. Where a model is loaded, a ``variant``
        that is no value of the field names weight files, and is returned as unused.

        Raises:
            ValueError: A field came by two names with two values, or :meth:`check` fails.
        """
        types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        variants, files = get_args(types.get("variant")), {}
        other = variants and "variant" in kwargs and kwargs["variant"] not in variants
        if other and (kwargs["variant"] is None or kwargs.get("return_unused_kwargs")):
            files = {"variant": kwargs.pop("variant")}
        names = types.keys() - {"dtype"}  # which may be "auto"
        given: dict[str, Any] = {}
        for name in list(kwargs):
            own = cls.attribute_map.get(name, name)
            if own not in names:
                continue
            value = kwargs.pop(name)
            if given.setdefault(own, value) != value:
                raise ValueError(f"{own} must be given once, got {given[own]!r} and {value!r}")
        kept = {k: v for k, v in config_dict.items() if cls.attribute_map.get(k, k) not in given}
        built: Any = super().from_dict({**kept, **given}, **kwargs)
        return (built[0], built[1] | files) if kwargs.get("return_unused_kwargs") else built

    def take(self, other: str, name: str, value: Any) -> None:
        """Set a field that came by another name.

        Raises:
            ValueError: It came by its own, too, with another value.
        """
        (field,) = (field for field in dataclasses.fields(self) if field.name == name)
        given = getattr(self, name)
        if given not in (field.default, value):
            raise ValueError(
                f"{other} is another name of {name}; give one of them, got {value!r} and {given!r}"
            )
        setattr(self, name, value)

    def complete(self) -> None:
        """Fill in fields that follow from others; a family with such fields overrides it."""

    def check_largest(self) -> None:
        """Check that no integer field is too large for a tensor's size.

        Raises:
            ValueError: Names the field and the largest number.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            largest = _MOST_LAYERS if field.name == "num_hidden_layers" else _LARGEST
            if type(value) is int and abs(value) > largest:
                raise ValueError(f"{field.name} must be at most {largest:,}, got {value:,}")

    def save_pretrained(
        self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write ``config.json``, and beside it the file by which transformers finds ssmzoo.

        Where the checkpoint's own code is saved, ``auto_map`` names that instead. Attributes that
        are not fields are left out with a warning, because a file that has them could not be
        loaded.
        """
        unknown = self._unknown(vars(self))
        if unknown:
            _LOGGER.warning(
                "%s has no field %s: not written to config.json",
                type(self).__name__,
                ", ".join(unknown),
            )
        written = copy.copy(self)
        for name in unknown:
            delattr(written, name)
        if self._auto_class is None:
            written.auto_map = dict(AUTO_MAP)
        super(SSMConfig, written).save_pretrained(save_directory, push_to_hub, **kwargs)

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the file, and beside it the code that only its ``auto_map`` names."""
        if self.auto_map == AUTO_MAP:
            write_loader(os.path.dirname(json_file_path))
        super().to_json_file(json_file_path, use_diff=use_diff)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, ``auto_map`` only where it names code."""
        fields = super().to_dict()
        if not fields.get("auto_map"):
            fields.pop("auto_map", None)
        return fields

    def _names(self) -> set[str]:
        """Return the names of all fields, and their other names."""
        return {field.name for field in dataclasses.fields(self)} | set(self.attribute_map)

    def _unknown(self, names: Iterable[str]) -> list[str]:
        """Return those that are neither fields nor transformers' own."""
        known = self._names() | _TRANSFORMERS_KEYS | set(GenerationConfig().to_dict())
        return [name for name in names if name not in known and not name.startswith("_")]

    def check(self) -> None:
        """Check the fields; a family adds its own rules.

        Raises:
            ValueError: A field out of its range.
        """
        self.check_counts("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
        self.check_counts("input_channels", "image_size", "patch_size", "num_channels")
        if self.image_size is not None and self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size, got {self.patch_size} and {self.image_size}"
            )
        if self.image_size is not None and self.input_channels is not None:
            raise ValueError(
                "give one of image_size and input_channels, the model's inputs, got both: "
                f"{self.image_size} and {self.input_channels}"
            )
        self.check_probabilities("dropout", "embedding_dropout", "drop_path_rate")
        if self.drop_path_rate and not self.residual:
            raise ValueError(
                "drop_path_rate must be 0 where residual is False, as nothing would be left of a "
                f"sequence, got {self.drop_path_rate}"
            )
        self.check_finite("rms_norm_eps", "initializer_range")

    def check_counts(self, *names: str) -> None:
        """Fail unless fields are at least 1, or None where that is allowed.

        Raises:
            ValueError: Names the first field that is not.
        """
        types = {field.name: field.type for field in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                rule = "None or at least 1" if type(None) in get_args(types[name]) else "at least 1"
                raise ValueError(f"{name} must be {rule}, got {value}")

    def check_probabilities(self, *names: str) -> None:
        """Fail unless fields are at least 0 and below 1.

        Raises:
            ValueError: Names the first field that is not.
        """
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )

    def check_finite(self, *names: str) -> None:
        """Fail unless fields are at least 0 and finite.

        Raises:
            ValueError: Names the first field that is not.
        """
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def rank_of(self, dt_rank: int | str) -> int:
        """Return the rank of a family's time steps, ``ceil(hidden_size / 16)`` for "auto".

        Raises:
            ValueError: It is neither "auto" nor at least 1.
        """
        if dt_rank == "auto":
            return math.ceil(self.hidden_size / 16)
        if isinstance(dt_rank, str) or dt_rank < 1:
            raise ValueError(f"dt_rank must be 'auto' or at least 1, got {dt_rank!r}")
        return dt_rank

    def check_time_steps(self, low: float, high: float) -> None:
        """Fail unless the initial time steps ``dt_min`` and ``dt_max`` of a family are right.

        Raises:
            ValueError: They are not positive, finite, and in this order.
        """
        if not 0 < low <= high < math.inf:
            raise ValueError(f"dt_min and dt_max must be positive and rise, got {low} and {high}")

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input; a family that looks ahead says no."""
        return self.directions == "forward"

    @property
    def decodable(self) -> bool:
        """Whether outputs are the same however long the input is, so that a state can go on."""
        return True

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """Names of further arguments that a forward pass needs: steps ``[B, L]``, positive numbers.

        Each step leads from the token before to its own, so a mixer that reads backwards gets the
        steps after its tokens. Mixers find them in ``state.shared``, laid out as ``hidden_states``.
        """
        return ()

    @property
    def state_grows(self) -> bool:
        """Whether the state of some layer grows with the tokens seen, as full attention's does."""
        return False

    @property
    def layer_types(self) -> list[str]:
        """Tell transformers that the layers are recurrent."""
        return ["linear_attention"] * self.num_hidden_layers


_LARGEST = 2**31 - 1
_MOST_LAYERS = 10_000
_MOST_LABELS = 1_000_000


def _check_dtype(given: Any) -> None:
    """Fail unless this is None, a dtype of weights, or these by part of the model."""
    import torch

    if isinstance(given, dict):
        for kind in given.values():
            _check_dtype(kind)
        return
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"dtype must be a floating-point dtype of torch, e.g. 'float32', got {given!r}"
        )
