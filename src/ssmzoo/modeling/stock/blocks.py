"""The calls of a block of an accelerated model, and of its norms and MLP."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ssmzoo.modeling import decoding
from ssmzoo.modeling.compat import CACHE, CACHES, given_cache
from ssmzoo.modeling.joined import JoinedLayers, runs_of
from ssmzoo.modeling.module_parts import is_watched
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.calls import BlockReading, call, mixers_with
from ssmzoo.modeling.stock.mixers import MixerCalls, cached_states, steps_states
from ssmzoo.modeling.stock.norms import normalised

# of a forward that adds branches to its input and does no more: what it reads, and its variables
_READS = frozenset({"weight", "dtype", "to", "torch", "float32", "residual_in_fp32", "block_type"})
_READS |= {"residual_multiplier", "has_experts", "block_sparse_moe"}  # without experts
_READS |= {"isinstance", "tuple", *steps.BRANCHES}
_READS |= {name for names in steps.BRANCHES.values() for name in names}
_VARIABLES = frozenset({"self", "hidden_states", "residual", "attention_mask", "position_ids"})
_VARIABLES |= {*CACHES, "position_embeddings", "use_cache"}
_VARIABLES |= {"kwargs", "output_attentions", "moe_hidden_states", "_"}


def adds_branches(stock: Any) -> bool:
    """Return whether a block's class adds ``part(norm(x))`` to its input and does no more.

    A program is proved by its output, in which a branch may be small beside what it is added to; so
    this asks for transformers' own code, by the names in it.
    """
    forward = inspect.unwrap(stock.forward)
    code = forward.__code__
    known = _READS.issuperset(code.co_names) and _VARIABLES.issuperset(code.co_varnames)
    return known and _of_transformers(forward)


def _of_transformers(forward: Any) -> bool:
    return forward.__globals__.get("__name__", "").startswith("transformers.models.")


class MLPCalls:
    """The calls of an MLP, whose tokens may decode by a program."""

    stock_class: Any
    writers: tuple[decoding.TokenWriter, ...]
    by_column = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stock forward, for a few rows as a program where that gives the same."""
        if kwargs or len(args) != 1:  # Zamba2's MLP has adapters of its own
            return self.stock_class.forward(self, *args, **kwargs)
        own = functools.partial(self.layered, args[0])
        checked, by_column = call.checked_code, self.by_column
        return decoding.token(
            self, self.writers, args[0], (), own, checked=checked, by_column=by_column
        )

    def layered(self, x: Tensor) -> Tensor:
        """Return the output for ``[..., width]`` without a program."""
        return self.stock_class.forward(self, x)


class NormCalls(MLPCalls):
    """The calls of a norm by the root mean square, on our op for whole sequences."""

    by_column = True

    def layered(self, x: Tensor) -> Tensor:
        """Return the output for ``[..., width]`` without a program."""
        return normalised(self, x, functools.partial(super().layered, x))


class BlockCalls:
    """The calls of a block, which checkpointing may run again, alone.

    Attributes:
        adds_branches: Whether it is one of those that :func:`adds_branches` finds.
    """

    stock_class: Any
    adds_branches: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add packing and states of the call to the arguments that checkpointing keeps."""
        now = call.packing, call.passing
        if now != (None, None):
            kwargs["known_of_call"] = now
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self: Any, *args: Any, known_of_call: Any = None, **kwargs: Any) -> Any:
        """Run the stock forward; of a token ``[B, 1, D]`` a program that gives the same."""
        if known_of_call is not None:
            with mixers_with(*known_of_call):
                return self.stock_class.forward(self, *args, **kwargs)
        if (
            not torch.compiler.is_compiling()
            and self.adds_branches
            and len(args) == 1
            and args[0].shape[1] == 1
            and (cache := kwargs.get(given_cache(kwargs) or CACHE)) is not None
            and steps_states(kwargs.get("attention_mask"))
        ):
            own = functools.partial(self.stock_class.forward, self, args[0], **kwargs)
            return _token(self, args[0], cache, own)
        return self.stock_class.forward(self, *args, **kwargs)


def _token(block: Any, x: Tensor, cache: Any, own: Callable[[], Tensor]) -> Tensor:
    """Return a block's output for a token ``[B, 1, D]``."""
    reading = call.reading or BlockReading({})
    before = reading.block if reading.output is x else None
    if before is not None and reading.ahead:
        reading.ahead -= 1
        return x
    run = reading.runs.get(block)
    if run is not None:
        states = [cached_states(mixer, cache) for mixer in run.mixers]
        found = None
        if all(states):
            found = run.run(x, [*itertools.chain.from_iterable(states)], call.checked_code)
        if found is not None:
            reading.block, reading.ahead = run.layers[-1], len(run.layers) - 1
            reading.output = found[0]
            return found[0]
        run.refused = True  # joined anew before the next token
    mixer, norm = _served_parts(block)
    states = () if mixer is None else cached_states(mixer, cache)
    if not states:
        return own()
    dtype, checked = norm.weight.dtype, call.checked_code
    y = decoding.token(block, (steps.block,), x, states, own, checked=checked, matrices=dtype)
    if before is not None:
        decoding.decoding_of(before).leads = True
    reading.block, reading.output = block, y
    return y


def _served_parts(block: Any) -> tuple[Any, Any]:
    """Return the mixer and a norm of a block whose parts all have programs, or none yet."""
    mixer: Any = None
    norm: Any = None
    for part in block._modules.values():
        if isinstance(part, MixerCalls):
            mixer = part
        elif isinstance(part, NormCalls):
            norm = part
        elif not isinstance(part, MLPCalls):
            return None, None
        known = part.__dict__.get(decoding.DECODING)
        if known is not None and known.refused is not None:
            decoding.decoding_of(block).step = None  # what it was proved with is there no more
            return None, None
    served = mixer is not None and mixer.writers and norm is not None and norm.weight is not None
    return (mixer, norm) if served else (None, None)


class BlockRun(JoinedLayers):
    """Blocks of which each reads what the one before it gives.

    Attributes:
        mixers: Theirs.
        refused: Whether they had to be called one by one.
    """

    def __init__(self, blocks: list[Any], programs: list[decoding.TokenStep]) -> None:
        super().__init__(blocks, programs)
        parts = itertools.chain.from_iterable(block._modules.values() for block in blocks)
        self.mixers = [part for part in parts if isinstance(part, MixerCalls)]
        self.refused = False


def read_together(backbone: Any, given: dict[str, Any]) -> Any:
    """Run the stock forward of the model around blocks, which read one token together if they may.

    Args:
        backbone: The model.
        given: The arguments of its call.
    """
    before = call.reading
    call.reading = BlockReading(_runs(backbone) if _may_join(backbone, given) else {})
    try:
        return backbone.stock_class.forward(backbone, **given)
    finally:
        call.reading = before


def _may_join(backbone: Any, given: dict[str, Any]) -> bool:
    """Return whether nobody asks what each block gives, and the stock code calls them in turn."""
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        asked = given.get(name)
        if getattr(backbone.config, name, False) if asked is None else asked:
            return False
    return _of_transformers(inspect.unwrap(backbone.stock_class.forward))


def _runs(backbone: Any) -> dict[Any, BlockRun]:
    """Return the runs of a model's blocks, each by its first one."""
    lists = (part for part in backbone._modules.values() if isinstance(part, nn.ModuleList))
    wanted = getattr(backbone.config, "num_hidden_layers", None)
    blocks = [*next(lists, nn.ModuleList())._modules.values()][:wanted]
    held = [block.__dict__.get(decoding.DECODING) for block in blocks]
    programs = [(None, False) if one is None else (one.step, one.leads) for one in held]
    known = decoding.decoding_of(backbone)
    *kept, runs = known.joined or (None, None, {})
    if kept == [blocks, programs] and not any(run.refused for run in runs.values()):
        return runs
    wanted = [
        None if is_watched(block) else step
        for block, (step, _) in zip(blocks, programs, strict=True)
    ]
    found = {}
    for first, end in runs_of(wanted, [leads for _, leads in programs]):
        if end > first + 1:
            served = cast(list[decoding.TokenStep], wanted[first:end])
            found[blocks[first]] = BlockRun(blocks[first:end], served)
    known.joined = blocks, programs, found
    return found
