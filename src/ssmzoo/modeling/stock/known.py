"""Which classes of transformers are served: those whose forward calls functions that we have."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from ssmzoo.modeling.compat import MIXER_CACHE
from ssmzoo.modeling.decoding import TokenWriter
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.functions import FUNCTIONS
from ssmzoo.modeling.stock.norms import OFFSETS
from ssmzoo_kernels.layers import OPS

NORMS: tuple[TokenWriter, ...] = tuple(steps.rms_norm(offset) for offset in OFFSETS)
_MIXER_ARGUMENTS = ["self", "hidden_states", MIXER_CACHE, "attention_mask"]


def writers_of(stock: type) -> tuple[TokenWriter, ...]:
    """Return the writers of a token of a norm or an MLP as a program; none for other modules."""
    name = stock.__name__
    if not stock.__module__.startswith("transformers.models."):
        return ()
    if name.endswith("RMSNorm") and "Weightless" not in name:
        return NORMS
    return (steps.gated_mlp, steps.joined_mlp) if name.endswith("MLP") else ()


def functions_of(stock: type) -> tuple[str, ...]:
    """Return which of our functions a mixer's ``forward`` calls; none for other modules."""
    owner = next((kind for kind in stock.__mro__ if "forward" in kind.__dict__), stock)
    if not owner.__module__.startswith("transformers.models."):
        return ()
    body = inspect.unwrap(stock.forward)  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(body, types.FunctionType):
        return ()
    names = tuple(name for name in FUNCTIONS if name in body.__code__.co_names)
    ops = {OPS[name] for name in names if name in OPS}
    return names if ops - {"causal_conv1d"} else ()


def unknown(stock: type) -> str:
    """Return why a mixer must stay stock, or an empty string."""
    if "forward" not in stock.__dict__:
        bases = [kind.__name__ for kind in stock.__mro__ if "forward" in kind.__dict__]
        return f"{stock.__name__} is another class, made from {bases[0]}"
    forward = inspect.unwrap(stock.__dict__["forward"])
    if (taken := _parameters(forward)) != _MIXER_ARGUMENTS:
        return _unlike(f"{stock.__name__}.forward", taken, _MIXER_ARGUMENTS)
    for name in functions_of(stock):
        theirs = forward.__globals__.get(name)
        if not callable(theirs):
            return f"{name} is no function of {stock.__module__}"
        taken, wanted = _parameters(theirs), _parameters(FUNCTIONS[name])
        if taken != wanted:
            return _unlike(name, taken, wanted)
    return ""


def _parameters(function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(inspect.unwrap(function))
    return [p.name for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]


def _unlike(name: str, taken: list[str], known: list[str]) -> str:
    import transformers

    from ssmzoo import __version__

    return (
        f"transformers {transformers.__version__} has a {name} of ({', '.join(taken)}), "
        f"ssmzoo {__version__} knows the one of ({', '.join(known)})"
    )
