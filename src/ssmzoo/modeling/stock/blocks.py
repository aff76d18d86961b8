"""The calls of a block of an accelerated model, and of its norms and MLP."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ssmzoo.modeling import decoding
from ssmzoo.modeling.compat import given_cache
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.calls import call, mixers_with
from ssmzoo.modeling.stock.mixers import MixerCalls, states_of_one_token
from ssmzoo.modeling.stock.norms import normalised

# of a forward that adds branches to its input and does no more: what it reads, and its variables
_READS = frozenset({"weight", "dtype", "to", "torch", "float32", "residual_in_fp32", "block_type"})
_READS |= {"isinstance", "tuple", *steps.BRANCHES}
_READS |= {name for names in steps.BRANCHES.values() for name in names}
_VARIABLES = frozenset({"self", "hidden_states", "residual", "attention_mask", "position_ids"})
_VARIABLES |= {"cache", "cache_params", "past_key_values", "position_embeddings", "use_cache"}
_VARIABLES |= {"kwargs", "output_attentions", "_"}


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
        own = functools.partial(self.stock_class.forward, self, *args, **kwargs)
        if torch.compiler.is_compiling() or not (self.adds_branches and len(args) == 1):
            return own()
        x = args[0]
        states = _states(self, kwargs) if x.shape[1] == 1 else ()
        if not states:
            return own()
        dtype = next(self.parameters()).dtype
        checked = call.checked_code
        return decoding.token(self, (steps.block,), x, states, own, checked=checked, matrices=dtype)


def _states(block: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return what a block's program steps; empty: none may run."""
    mixer = None
    for part in block._modules.values():
        if isinstance(part, MixerCalls):
            mixer = part
        elif not isinstance(part, MLPCalls):
            return ()
        known = part.__dict__.get(decoding.DECODING)
        if known is not None and known.refused is not None:
            decoding.decoding_of(block).step = None  # what it was proved with is there no more
            return ()
    if mixer is None or not mixer.writers:
        return ()
    name = given_cache(given)
    if name is None:
        return ()
    return states_of_one_token(mixer, given[name], given.get("attention_mask"))
