"""Subclasses of transformers' classes, one each, that an accelerated model's modules take on.

Weights, names and hooks of a module stay as they are: only its class changes.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.modeling import decoding
from ssmzoo.modeling.forward_code import current_code
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.stock.blocks import BlockCalls, MLPCalls, NormCalls, adds_branches
from ssmzoo.modeling.stock.generation import GeneratingCalls, generating_body
from ssmzoo.modeling.stock.known import NORMS, functions_of, writers_of
from ssmzoo.modeling.stock.mixers import MixerCalls, mixer_body
from ssmzoo.modeling.stock.model_calls import ModelCalls, model_body


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
        body = {"adds_branches": adds_branches(stock)}
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
