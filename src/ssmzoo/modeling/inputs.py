"""The arguments of a model's call, checked in one place.

One kind of input, indices inside their table, the sequences that masks and boundaries describe,
steps between tokens, and no argument that the model does not have.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ssmzoo.environment.messages import suggestion
from ssmzoo.modeling.cache import check_kind
from ssmzoo.modeling.compat import CACHE, CACHES
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.packing import Sequences, find_packing
from ssmzoo.modeling.static_cache import StaticStateCache

_VALUES = ("input_ids", "inputs_embeds", "input_values")
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q")  # of packed sequences: our name, the collator's
PACKING = ("position_ids", "seq_idx", *BOUNDARIES)  # the arguments that tell packed sequences apart
# all arguments that describe the sequences of a batch
DESCRIBING = frozenset({"attention_mask", *PACKING})
# arguments of transformers' collators and trainer for which recurrent models have no use
_IGNORED = frozenset(
    {"cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "token_type_ids"}
)


def check_indices(name: str, indices: Tensor, size: int, ignored: int | None = None) -> None:
    """Check on a CPU that indices lie inside a table.

    On a GPU the check would synchronize, so it is left out; torch itself then aborts.

    Args:
        name: The argument's name, for the message.
        indices: Integers of any shape.
        size: Rows of the table.
        ignored: An index that is allowed though it is outside the table.

    Raises:
        ValueError: One is negative, or not below ``size``.
    """
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not indices.numel():
        return
    low, high = (int(x) for x in indices.aminmax())
    if low >= 0 and high < size:
        return
    wrong = (indices < 0) | (indices >= size)
    if ignored is not None:
        wrong &= indices != ignored
    if wrong.any():
        also = "" if ignored is None else f", or {ignored}"
        raise ValueError(
            f"{name} must be in [0, {size - 1}]{also}, got {int(indices[wrong].flatten()[0])}"
        )


@contextlib.contextmanager
def named_indices(name: str, indices: Tensor, size: int, ignored: int) -> Iterator[None]:
    """Replace torch's error about indices inside the block by one that names them.

    Args as of :func:`check_indices`.

    Raises:
        ValueError: One is outside the table.
        TypeError: They are integers of another type than int64.
    """
    try:
        yield
    except RuntimeError as error:
        if indices.is_floating_point() or indices.dtype == torch.int64:
            raise
        raise TypeError(f"{name} must be int64, got {indices.dtype}") from error
    except IndexError:
        check_indices(name, indices, size, ignored)
        raise


def given_input(inputs: Mapping[str, Any]) -> Tensor:
    """Return the ids, embeddings or values that were given, ``[B, L, ...]``.

    Raises:
        ValueError: None or several were given, or they have fewer than two dimensions.
    """
    given = [name for name in _VALUES if inputs.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            "give exactly one of input_ids and inputs_embeds, or input_values alone, "
            f"got {', '.join(given) or 'none'}"
        )
    tensor: Tensor = inputs[given[0]]
    if tensor.dim() < 2:
        raise ValueError(f"{given[0]} must have shape [B, L], got {list(tensor.shape)}")
    return tensor


def take_sequences(inputs: dict[str, Any]) -> Sequences | None:
    """Take the arguments that describe sequences out of a call's; find the sequences, check them.

    Args:
        inputs: A call's arguments by name; the cache by the name that transformers has for it.

    Returns:
        Where the sequences lie in the flat row; None: every row is one whole sequence.

    Raises:
        ValueError: Something does not fit the batch; the message names it.
        TypeError: A mask or boundaries of another kind.
    """
    mask, positions = inputs.pop("attention_mask", None), inputs.pop("position_ids", None)
    numbers, cu_seqlens = inputs.pop("seq_idx", None), inputs.pop("cu_seqlens", None)
    collated = inputs.pop("cu_seq_lens_q", None)
    if cu_seqlens is None:
        cu_seqlens = collated
    if mask is None and positions is None and numbers is None and cu_seqlens is None:
        return None
    cache = inputs.get(CACHE)
    check_kind(cache)
    batch, length = given_input(inputs).shape[:2]
    if mask is None or cache is None:
        past_length = 0
    elif torch.compiler.is_compiling() and isinstance(cache, StaticStateCache):
        past_length = mask.shape[1] - length  # the count has no value in a graph
    else:
        past_length = cache.seen_tokens
    return find_packing(batch, length, past_length, mask, positions, numbers, cu_seqlens)


def one_input(config: SSMConfig, **given: Tensor | None) -> str:
    """Return which kind of input a call gives; it is one, and the model takes it.

    Raises:
        ValueError: None, several, another kind, or another shape.
        TypeError: Ids or values of another dtype.
    """
    wanted, name, several = "input_ids", "", False
    if config.image_size is not None:
        wanted = "pixel_values"
    elif config.input_channels is not None:
        wanted = "input_values"
    for each, tensor in given.items():
        if tensor is not None:
            several, name = bool(name), each
    if several or not name:
        got = " and ".join(x for x in given if given[x] is not None)
        raise ValueError(f"give exactly one of {wanted} and inputs_embeds, got {got or 'none'}")
    if name not in (wanted, "inputs_embeds"):
        fields = {"pixel_values": "image_size", "input_values": "input_channels"}
        way_out = f"set {fields[name]} in" if name in fields else f"leave {fields[wanted]} out of"
        raise ValueError(f"this model takes {wanted}, got {name}; {way_out} its configuration")
    tensor = given[name]
    assert tensor is not None
    if name == "input_ids":
        if tensor.dim() != 2:
            raise ValueError(f"input_ids must have shape [B, L], got {list(tensor.shape)}")
        if tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"input_ids must be int64 or int32, got {tensor.dtype}")
    elif name != "pixel_values":
        width = config.hidden_size if name == "inputs_embeds" else config.input_channels
        if tensor.dim() != 3 or tensor.shape[2] != width:
            shape = list(tensor.shape)
            raise ValueError(f"{name} must have shape [B, L, {width}], got {shape}")
        if name == "input_values" and not tensor.is_floating_point():
            raise TypeError(f"input_values must be floating point, got {tensor.dtype}")
    return name


def take_steps(
    names: Iterable[str],
    inputs: dict[str, Any],
    packing: Sequences | None,
    batch: int,
    length: int,
) -> dict[str, Tensor]:
    """Take the steps between tokens ``[B, L]`` out of a call's arguments; padding's become 1.

    Raises:
        ValueError: One is missing, has another shape or, looked at on a CPU, cannot be a step.
        TypeError: One is no floating-point tensor.
    """
    found: dict[str, Tensor] = {}
    real = None if packing is None else packing.mask(batch)
    for name in names:
        steps = inputs.pop(name, None)
        if steps is None:
            raise ValueError(
                f"{name} must be given, [B, L] = [{batch}, {length}]: this model needs it; "
                "transformers' Trainer passes it on with remove_unused_columns=False"
            )
        if not isinstance(steps, Tensor) or not steps.is_floating_point():
            kind = steps.dtype if isinstance(steps, Tensor) else type(steps).__name__
            raise TypeError(f"{name} must be a floating-point tensor [B, L], got {kind}")
        if steps.shape != (batch, length):
            raise ValueError(
                f"{name} must have shape [B, L] = [{batch}, {length}], got {list(steps.shape)}"
            )
        if real is not None:
            steps = torch.where(real, steps, 1)
        if steps.is_cpu and not torch.compiler.is_compiling():
            wrong = ~((steps > 0) & steps.isfinite())
            if wrong.any():
                raise ValueError(
                    f"{name} must be positive and finite, got {float(steps[wrong][0])}; each is "
                    "the time since the token before, of a sequence's first token 1 if there is "
                    "none"
                )
        found[name] = steps
    return found


def refuse_cache(inputs: dict[str, Any]) -> None:
    """Take caches out of a call's arguments, for a head that reads whole sequences.

    Raises:
        ValueError: One was given or asked for.
    """
    why = "this head reads whole sequences and returns no cache"
    if inputs.pop("use_cache", None):
        raise ValueError(f"use_cache must be None or False, got True: {why}")
    for name in CACHES:
        if (given := inputs.pop(name, None)) is not None:
            raise ValueError(f"{name} must be left out, got a {type(given).__name__}: {why}")


def refuse_unknown(
    inputs: Mapping[str, Any], forward: Callable[..., Any], others: Iterable[str] = ()
) -> None:
    """Fail for an argument that a model's ``forward`` lacks and transformers does not add.

    Raises:
        ValueError: ``output_attentions`` is asked for.
        TypeError: Any other argument.
    """
    for name, value in inputs.items():
        if name in _IGNORED or (name == "output_attentions" and not value):
            continue
        if name == "output_attentions":
            raise ValueError("output_attentions must be False: no attention weights are kept")
        hint = suggestion(name, [*inspect.signature(forward).parameters, *others])
        raise TypeError(f"this model takes no argument {name!r}{hint}")
