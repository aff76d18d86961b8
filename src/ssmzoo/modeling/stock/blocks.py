"""The calls of a block of an accelerated model, and of its norms and MLP."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssmzoo.modeling import decoding
from ssmzoo.modeling.compat import CACHE, given_cache
from ssmzoo.modeling.joined import JoinedLayers
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.calls import call, mixers_with
from ssmzoo.modeling.stock.mixers import MixerCalls, cached_states, steps_states
from ssmzoo.modeling.stock.norms import normalised

# of a forward that adds branches to its input and does no more: what it reads, and its variables
_READS = frozenset({"weight", "dtype", "to", "torch", "float32", "residual_in_fp32", "block_type"})
_READS |= {"residual_multiplier", "has_experts", "block_sparse_moe"}  # without experts
_READS |= {"isinstance", "tuple", *steps.BRANCHES}
_READS |= {name for names in steps.BRANCHES.values() for name in names}
_VARIABLES = frozenset({"self", "hidden_states", "residual", "attention_mask", "position_ids"})
_VARIABLES |= {"cache", "cache_params", "past_key_values", "position_embeddings", "use_cache"}
_VARIABLES |= {"kwargs", "output_attentions", "moe_hidden_states", "_"}


def adds_branches(stock: Any) -> bool:
    """Return whether a block's class adds ``part(norm(x))`` to its input and does no more."""
    code = inspect.unwrap(stock.forward).__code__
    return _READS.issuperset(code.co_names) and _VARIABLES.issuperset(code.co_varnames)


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
        """Run the stock forward, for one token as a program where that gives the same."""
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
    before = None if call.ran is None or call.ran[1] is not x else call.ran[0]
    if before is not None and call.ahead:  # it was read with the block before
        call.ahead -= 1
        return x
    if (run := _joined(block)) is not None:
        states = [cached_states(mixer, cache) for mixer in run.mixers]
        found = None
        if all(states):
            found = run.run(x, [*itertools.chain.from_iterable(states)], call.checked_code)
        if found is not None:
            call.ran, call.ahead = (run.layers[-1], found[0]), len(run.layers) - 1
            return found[0]
    mixer = _served_mixer(block)
    states = () if mixer is None else cached_states(mixer, cache)
    if not states:
        return own()
    dtype, checked = next(block.parameters()).dtype, call.checked_code
    y = decoding.token(block, (steps.block,), x, states, own, checked=checked, matrices=dtype)
    if before is not None:
        decoding.decoding_of(before).following = block
    call.ran = block, y
    return y


def _served_mixer(block: Any) -> Any:
    """Return the mixer of a block whose parts all have programs, or none yet."""
    mixer = None
    for part in block._modules.values():
        if isinstance(part, MixerCalls):
            mixer = part
        elif not isinstance(part, MLPCalls):
            return None
        known = part.__dict__.get(decoding.DECODING)
        if known is not None and known.refused is not None:
            decoding.decoding_of(block).step = None  # what it was proved with is there no more
            return None
    return mixer if mixer is not None and mixer.writers else None


class _Run(JoinedLayers):
    """Blocks of which each has read what the one before it gave."""

    def __init__(self, blocks: list[Any], programs: list[decoding.TokenStep]) -> None:
        super().__init__(blocks, programs, [True] * sum(len(p.states) for p in programs))
        parts = itertools.chain.from_iterable(block._modules.values() for block in blocks)
        self.mixers = [part for part in parts if isinstance(part, MixerCalls)]


def _joined(block: Any) -> _Run | None:
    """Return a block and those behind it in its model, if their programs run in one call."""
    if block not in call.blocks:
        return None
    first, blocks, programs = decoding.decoding_of(block), [], []
    for following in call.blocks[call.blocks.index(block) :]:
        known = following.__dict__.get(decoding.DECODING)
        if known is None or known.step is None or following is not block:
            break
        blocks.append(following)
        programs.append(known.step)
        block = known.following  # in the model, or what was there before
    if first.joined is None or first.joined[:2] != (blocks, programs):
        end = 1
        while end < len(blocks) and programs[end].follows(programs[end - 1]):
            end += 1
        run = _Run(blocks[:end], programs[:end]) if end > 1 else None
        first.joined = blocks, programs, run
    return first.joined[2]
