"""Put a model of transformers on our kernels, look at it, and take it back."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.modeling.cache_identity import STATE_ADAPTER
from ssmzoo.modeling.decoding import DECODING
from ssmzoo.modeling.module_parts import stock_class
from ssmzoo.modeling.pretrained import SSMPreTrainedModel
from ssmzoo.modeling.stock.classes import Accelerated, subclass
from ssmzoo.modeling.stock.known import functions_of, unknown, writers_of
from ssmzoo_kernels.layers import OPS

_DEVICES = ("cpu", "cuda", "meta")
_log = logging.getLogger("ssmzoo")


class Acceleration:
    """The result of ``accelerate``: a context manager that restores the model at its end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _is_accelerated(self.model):
            restore(self.model)

    def __repr__(self) -> str:
        mixers = accelerated(self.model)
        served = sum(not ops.startswith("stock") for ops in mixers.values())
        return (
            f"<{type(self.model).__name__}: {served} of {len(mixers)} mixers on ssmzoo's kernels>"
        )


def accelerate(model: nn.Module) -> Acceleration:
    """Let the recurrent layers of a transformers model run on ssmzoo's kernels.

    docs/transformers-models.md lists the models; a layer is known by the functions that it calls.
    Outputs and gradients stay the same to rounding, weights stay where they are, and other models
    of the class are not touched. Besides, several tokens can go on from a cache, padding anywhere
    changes no token's output, and packed sequences (``cu_seqlens``, ``seq_idx`` or ``position_ids``
    that begin anew) are kept apart.

    Args:
        model: A model of transformers, or a PEFT model around one; changed in place.

    Returns:
        A context manager whose end calls :func:`restore`; without ``with``, nothing need be kept.

    Raises:
        TypeError: It is no model.
        ValueError: It has no layer that is served, is accelerated already, is wrapped or compiled,
            or lies on a device without kernels. The model is untouched.
    """
    mixers = _check(model)
    served = [module for module in mixers.values() if not unknown(type(module))]
    if not served:
        reasons = dict.fromkeys(unknown(type(module)) for module in mixers.values())
        raise ValueError(
            f"accelerate: {_name(model)} has no layer that ssmzoo knows: {'; '.join(reasons)}; "
            "take a version of transformers that ssmzoo was tested with"
        )
    for module in _to_change(model, served):
        _become(module, subclass(type(module)))
    return Acceleration(model)


def restore(model: nn.Module) -> None:
    """Undo :func:`accelerate`.

    Raises:
        TypeError: It is no model.
        ValueError: It is not accelerated.
    """
    _check_kind(model, "restore")
    if not _is_accelerated(model):
        raise ValueError(f"restore: {_name(model)} is not accelerated")
    if any(STATE_ADAPTER in module._modules for module in model.modules()):
        raise ValueError(
            f"restore: {_name(model)} starts from a state adapter, which needs ssmzoo's kernels; "
            "call remove_state_adapter(model) first"
        )
    changed: list[tuple[str, Any]] = [
        (n, m) for n, m in model.named_modules() if isinstance(m, Accelerated)
    ]
    for name, module in changed:
        if stock_class(module) is type(module):  # a class made from ours
            raise ValueError(
                f"restore: {name or 'the model'} became a {_name(module)} after accelerate(); "
                "undo that first (parametrizations, sharding)"
            )
    for _, module in changed:
        _become(module, module.stock_class)
        module.__dict__.pop(DECODING, None)


def accelerated(model: nn.Module) -> dict[str, str]:
    """Return, for every recurrent layer of a transformers model, by name, the ops that it runs on.

    Returns:
        The ops (``"causal_conv1d, selective_scan"``), or ``"stock: "`` and why; empty for a model
        without such layers.

    Raises:
        TypeError: It is no model.
    """
    _check_kind(model, "accelerated")
    found = {}
    for name, module in model.named_modules():
        stock = _stock_class(module)
        names = functions_of(stock)
        if not names:
            continue
        if isinstance(module, Accelerated):
            found[name] = ", ".join(sorted({OPS[n] for n in names if n in OPS}))
        else:
            found[name] = f"stock: {unknown(stock) or 'not accelerated'}"
    return found


def mixers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the recurrent layers of a transformers model by their number, accelerated or not."""
    found: list[Any] = [model.get_submodule(path) for path in accelerated(model)]
    return {mixer.layer_idx: mixer for mixer in found}


def choose_kernels(model: nn.Module, stock: bool) -> None:
    """Accelerate a command's model, unless stock is asked for, and log a line about it.

    Models of the zoo, models without recurrent layers and layers that are not known stay as they
    are.
    """
    mixers = accelerated(model)
    if stock or not mixers:
        return
    device = _device(model)
    served = "stock: not accelerated" in mixers.values()
    reasons = {*mixers.values()} - {"stock: not accelerated"}
    if device not in _DEVICES:
        reasons.add(f"stock: no kernels for {device}")
    elif served:
        accelerate(model)
        ran = [ops for ops in accelerated(model).values() if not ops.startswith("stock")]
        _log.info(
            "%s: %d recurrent layer%s on ssmzoo's kernels (%s); --stock leaves them alone",
            _name(model),
            len(ran),
            " runs" if len(ran) == 1 else "s run",
            "; ".join(sorted(set(ran))),
        )
    for reason in sorted(reasons):
        _log.warning("%s: recurrent layers stay %s", _name(model), reason)


def _become(module: Any, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _to_change(model: nn.Module, served: list[nn.Module]) -> list[nn.Module]:
    """Return the modules whose class changes: mixers, modules around them, linear layers, MLPs."""
    mixers = set(served)
    around = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel | GradientCheckpointingLayer)
        and not mixers.isdisjoint(module.modules())
    ]
    parts = [m for m in model.modules() if type(m) is nn.Linear or writers_of(type(m))]
    return [*served, *around, *parts]


def _check(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's recurrent layers by name; raises the errors of :func:`accelerate`."""
    _check_kind(model, "accelerate")
    name = _name(model)
    if isinstance(model, SSMPreTrainedModel):
        raise ValueError(
            f"accelerate: {name} is a model of the zoo; it runs on the kernels already"
        )
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise ValueError(f"accelerate: the model must be one of transformers, got {name}")
        raise ValueError(
            f"accelerate: the model must be one of transformers, {name} is wrapped or compiled; "
            "accelerate the model first and wrap or compile it then"
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"accelerate: {name} is compiled already; accelerate it first and compile it then"
        )
    if _is_accelerated(model):
        raise ValueError(f"accelerate: {name} is accelerated already; restore() undoes it")
    mixers = {n: m for n, m in model.named_modules() if functions_of(type(m))}
    if not mixers:
        raise ValueError(
            f"accelerate: {name} has no layer that ssmzoo's kernels serve; "
            "docs/transformers-models.md lists the models that have"
        )
    if (device := _device(model)) not in _DEVICES:
        raise ValueError(
            f"accelerate: {name} lies on {device}, the kernels serve CPUs and CUDA GPUs; "
            "move it there first"
        )
    return mixers


def _check_kind(model: nn.Module, verb: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}: the model must be one of transformers, got {_name(model)}")


def _name(model: Any) -> str:
    return type(model).__name__


def _device(model: nn.Module) -> str:
    """Return the device type of a model's weights."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _is_accelerated(model: nn.Module) -> bool:
    return any(isinstance(module, Accelerated) for module in model.modules())


def _stock_class(module: nn.Module) -> type[nn.Module]:
    return module.stock_class if isinstance(module, Accelerated) else type(module)
