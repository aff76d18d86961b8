"""A model's costs: parameters, bytes of the state, operations per token.

They are measured for any model of transformers, under any name of its cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ssmzoo.data.labelled import Examples
from ssmzoo.tasks import symbol_tokenizer
from ssmzoo.training.model import NoHeadError, build_config, build_model, model_class
from ssmzoo.training.objectives import labelled

if TYPE_CHECKING:
    import torch

    from ssmzoo.data.sources import DataSource
    from ssmzoo.recipe import ModelSection


def costs_of(section: ModelSection, source: DataSource, length: int) -> dict[str, Any]:
    """Return ``parameters``, ``state_bytes`` and ``flops_per_token`` of a recipe's model.

    The operations of a classifier, or of a regression, are those of the task's first example. The
    state's size is None where a model keeps none, or depends on the whole input.
    """
    import torch

    task = source.task
    config = build_config(section, source.tokenizer, task)
    model: Any = build_model(section, config, task).eval()
    inputs, tokens, size = None, length, None
    decoder = model  # the language model of the same configuration has the state
    if task is not None and task.objective != "causal_lm":
        example = Examples(task.batch([0]))
        inputs, tokens = labelled(model, task).batch(example), example.tokens
        del inputs["labels"]
        decoder = None
    with suppress(NoHeadError, ValueError):
        if decoder is None:
            known: Any = build_config(section, symbol_tokenizer(4))
            decoder = model_class(known)._from_config(known, dtype=torch.float32).eval()
        size = state_bytes(decoder, length)
    return {
        "parameters": model.num_parameters(),
        "state_bytes": size,
        "flops_per_token": flops_per_token(model, tokens, inputs),
    }


def state_bytes(model: torch.nn.Module, length: int) -> int | None:
    """Return the bytes of a model's state after one sequence; None if it keeps none."""
    import torch

    from ssmzoo.modeling.compat import cache_name

    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad():
        output = model(ids, use_cache=True)
        name = cache_name(output.keys())
        kept = _not_returned(model, ids) if name is None else output[name]
    sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(kept, set())]
    return sum(sizes) if sizes else None


def _not_returned(model: Any, ids: torch.Tensor) -> list[Any]:
    """Return the states that a model keeps without returning them, as RecurrentGemma does.

    They lie in its modules, and in the cache that it is given.
    """
    import torch
    from transformers import DynamicCache

    from ssmzoo.modeling.compat import cache_name

    def attributes() -> list[torch.Tensor]:
        values = (value for module in model.modules() for value in vars(module).values())
        return [value for value in values if isinstance(value, torch.Tensor)]

    cache: Any = None
    options: dict[str, Any] = {}
    if (name := cache_name(inspect.signature(model.forward).parameters)) is not None:
        options[name] = cache = DynamicCache(config=model.config)
    model(ids, use_cache=False)
    before = attributes()
    model(ids, use_cache=True, **options)
    return [cache, *(x for x in attributes() if not any(x is old for old in before))]


def flops_per_token(
    model: torch.nn.Module, length: int, inputs: Mapping[str, torch.Tensor] | None = None
) -> int:
    """Return a forward pass's operations per token, as torch's counter sees them.

    ``inputs`` are the model's arguments, one sequence of that length; None stands for tokens. It
    counts matrix products, attention (all scores that are computed, masked ones included) and
    convolutions, but neither recurrences nor elementwise work.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ssmzoo_kernels import use_backend

    given = inputs or {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
    # torch's counter knows the fused attention of GPUs only
    fused: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    counting = FlopCounterMode(display=False, custom_mapping=fused)
    with torch.no_grad(), use_backend("eager"), counting:  # C shows it no products
        model(**given, **options)
    return round(counting.get_total_flops() / length)


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Return the operations of scores and of their products with the values, given the shapes."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds, each once."""
    import torch

    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)
