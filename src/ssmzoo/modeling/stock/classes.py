"""Subclasses of transformers' classes, one each, that an accelerated model's modules take on.

Weights, names and hooks of a module stay as they are: only its class changes.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.modeling import decoding
from ssmzoo.modeling.forward_code import current_code
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.stock.calls import call, mixers_with
from ssmzoo.modeling.stock.generation import GeneratingCalls, generating_body
from ssmzoo.modeling.stock.known import NORMS, functions_of, writers_of
from ssmzoo.modeling.stock.mixers import MixerCalls, mixer_body
from ssmzoo.modeling.stock.model_calls import ModelCalls, model_body
from ssmzoo.modeling.stock.norms import normalised


class Accelerated:
    """Base of all subclasses; pickles and copies name the stock class."""

    stock_class: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a stock module: only a module becomes accelerated, its class never does."""
        made: Any = self
        made.__class__ = self.stock_class
        made.__init__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the module again: pickle cannot find a class made at run time."""
        kept = {name: held for name, held in self.__dict__.items() if name != decoding.DECODING}
        return _remade, (self.stock_class,), kept


def _remade(stock: type[nn.Module]) -> nn.Module:
    return object.__new__(subclass(stock))


def subclass(stock: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that a module of a stock class takes on."""
    code = None
    if functions_of(stock):  # somebody may replace either; our convolution has a silu inside
        code = current_code((stock, type(ACT2FN["silu"])))
    elif stock is not nn.Linear:
        code = stock.forward
    return _subclass(stock, code)


@functools.cache
def _subclass(stock: type[nn.Module], code: Any) -> type[nn.Module]:
    bases: tuple[type, ...]
    body: dict[str, Any] = {}
    if stock is nn.Linear:
        bases = (Linear,)
    elif issubclass(stock, PreTrainedModel):
        generates = issubclass(stock, GenerationMixin)
        bases = (GeneratingCalls if generates else ModelCalls, stock)
        body = model_body(stock) | (generating_body(stock) if generates else {})
    elif issubclass(stock, GradientCheckpointingLayer):
        bases = (BlockCalls, stock)
    elif writers := writers_of(stock):
        bases = (NormCalls if writers is NORMS else MLPCalls, stock)
        body = {"writers": writers}
    else:
        bases = (MixerCalls, stock)
        body = mixer_body(stock, code)
    body |= {"stock_class": stock, "__module__": stock.__module__, "__doc__": stock.__doc__}
    made: Any = types.new_class(
        stock.__name__, (Accelerated, *bases), exec_body=lambda ns: ns.update(body)
    )
    made.__qualname__ = stock.__qualname__
    return made


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
    """The calls of a block, which checkpointing may run again, alone."""

    stock_class: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add packing and states of the call to the arguments that checkpointing keeps."""
        now = call.packing, call.passing
        if now != (None, None):
            kwargs["known_of_call"] = now
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, *args: Any, known_of_call: Any = None, **kwargs: Any) -> Any:
        """Run the stock forward."""
        if known_of_call is None:
            return self.stock_class.forward(self, *args, **kwargs)
        with mixers_with(*known_of_call):
            return self.stock_class.forward(self, *args, **kwargs)
