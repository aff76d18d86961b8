"""A zoo of state-space language models for the Hugging Face ecosystem.

Importing this module is silent and imports neither torch nor a plugin. ``import ssmzoo.auto``
registers every installed family with transformers' Auto classes. ``accelerate`` puts transformers'
own recurrent models on the zoo's kernels, ``restore`` undoes it, ``accelerated`` tells. ``layer``
returns a family's sequence mixer for a network of one's own.
"""

from typing import TYPE_CHECKING, Any

from ssmzoo.family import Converter, Family, FromAttention, Paper, families, load_family

if TYPE_CHECKING:
    from ssmzoo.modeling.ssm_layer import layer
    from ssmzoo.modeling.stock import accelerate, accelerated, restore

__version__ = "0.2.0"

__all__ = [
    "Converter",
    "Family",
    "FromAttention",
    "Paper",
    "accelerate",
    "accelerated",
    "families",
    "layer",
    "load_family",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "accelerated", "restore"):
        from ssmzoo.modeling import stock

        return getattr(stock, name)
    if name == "layer":
        from ssmzoo.modeling.ssm_layer import layer

        return layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
