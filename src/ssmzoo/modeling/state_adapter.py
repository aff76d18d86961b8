"""The initial state as an adapter: trained states that a frozen model starts every sequence from.

A :class:`StateAdapter` holds one float32 tensor for each state of real numbers: recurrent states,
and the last inputs of convolutions. Counters start at zero; keys and values of attention are left
out, as no token was read. It is a module of its model, so its tensors are trained, moved and saved
with the model's.

What surprises: a first call of one token runs as a prompt, not as a step, because in some families
a prompt computes values for the next step from the state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ssmzoo.checkpoints.weights import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_FORMAT,
    read_adapter_config,
)
from ssmzoo.files import appears_whole, write_json, writing
from ssmzoo.modeling.cache import backbone_of
from ssmzoo.modeling.cache_files import tensors_digest
from ssmzoo.modeling.cache_identity import STATE_ADAPTER, difference, upgraded
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.layers import keeping_precision
from ssmzoo.modeling.pretrained import evaluating


class StateAdapter(nn.Module):
    """Trained initial states, one for each state of each layer, without the batch's dimension.

    They are zeros at first, with which the model's outputs are those without the adapter. No
    cast to a lower precision touches them.

    Args:
        base: Fields of the configuration that a model must share with the one that it serves.
        model_type: The model's type.
        states: By layer the states' shapes by name.
        counters: By layer shapes and dtypes of states that start at zero and are not trained.
    """

    param_group_names: Mapping[str, str]

    def __init__(
        self,
        base: Mapping[str, Any],
        config: PreTrainedConfig,
        states: Mapping[int, Mapping[str, tuple[int, ...]]],
        counters: Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    ) -> None:
        super().__init__()
        self.base, self.model_type = base, config.model_type
        self._config_class = type(config)
        self._named = {
            index: {name: _parameter_name(index, name) for name in shapes}
            for index, shapes in states.items()
        }
        self._counters = counters
        for index, shapes in states.items():
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.zeros(shape))
                parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
                self.register_parameter(self._named[index][name], parameter)
        # the optimizer's group of a model of the zoo, which decays nothing
        self.param_group_names = dict.fromkeys(self._parameters, "state")

    def forward(self, rows: int, dtype: torch.dtype) -> dict[int, dict[str, Tensor]]:
        """Return the states to start so many sequences from, by layer and name.

        Args:
            rows: How many sequences.
            dtype: Of the model's weights; the states are float32, or float64 with float64 weights.
        """
        exact = torch.promote_types(torch.float32, dtype)
        found: dict[int, dict[str, Tensor]] = {}
        for index, names in self._named.items():
            # copies: some steps write into a state's own memory
            found[index] = {
                name: parameter.to(exact).repeat(rows, *[1] * parameter.dim())
                for name, parameter in ((n, getattr(self, own)) for n, own in names.items())
            }
            device = next(iter(found[index].values())).device
            for name, (shape, kind) in self._counters.get(index, {}).items():
                found[index][name] = torch.zeros((rows, *shape), dtype=kind, device=device)
        return found

    def digest(self) -> str:
        """Return the SHA-256 of the states."""
        return tensors_digest(self._tensors())

    def save_pretrained(self, directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write ``state_adapter.safetensors`` and ``state_adapter.json`` into a folder.

        Each appears complete or not at all, and loading notices if only one of them did.

        Raises:
            RuntimeError: The folder cannot be written to.
        """
        folder, tensors = Path(directory), self._tensors()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with appears_whole(folder / ADAPTER_FILE) as path:
            save_file(tensors, path)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        described = {"format": ADAPTER_FORMAT, "model_type": self.model_type, "base": self.base}
        write_json(
            folder / ADAPTER_CONFIG, {**described, "states": shapes, "digest": self.digest()}
        )

    @torch.no_grad()
    def read(self, directory: str | os.PathLike[str]) -> None:
        """Take the states that :meth:`save_pretrained` wrote; of a folder that does not fit, none.

        Raises:
            FileNotFoundError: The folder holds no adapter.
            ValueError: It is damaged, or was made for another model.
        """
        folder = Path(directory)
        config = read_adapter_config(folder)
        path, where = folder / ADAPTER_FILE, folder / ADAPTER_CONFIG
        own = {name: list(tensor.shape) for name, tensor in self._tensors().items()}
        if config["model_type"] != self.model_type:
            raise ValueError(
                f"{where} was made for a model of type {config['model_type']!r}, got one of type "
                f"{self.model_type!r}; load the model that it was trained on"
            )
        _check_states(where, config["states"], own)
        base = upgraded(config["base"], self.base, self._config_class)
        if base != self.base:
            raise ValueError(
                f"{where} belongs to another model: {difference(base, self.base)}; load the model "
                "that it was trained on"
            )
        tensors = load_file(path)
        if tensors_digest(tensors) != config["digest"]:
            raise ValueError(
                f"{path} and {ADAPTER_CONFIG} beside it are not of one adapter: their digests "
                "differ; save the adapter again"
            )
        for name, tensor in tensors.items():
            self.get_parameter(name).copy_(tensor)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: p.detach().float().cpu().contiguous() for name, p in self.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> StateAdapter:
        return super()._apply(keeping_precision(fn), recurse=recurse)  # pyright: ignore[reportReturnType]


def add_state_adapter(model: nn.Module, *, freeze: bool = True) -> StateAdapter:
    """Let a model start from trained states, zeros at first, and return them.

    From now on every sequence that the model reads begins with them. Gradients flow into them.

    Args:
        model: A model of the zoo, or one of transformers that :func:`ssmzoo.accelerate` put on our
            kernels; PEFT may be around it.
        freeze: Train nothing else: weights of the layers and of a language model's head lose their
            ``requires_grad``; a classifier's head is trained on. False where PEFT froze them.

    Raises:
        ValueError: The model has no state to start from, or an adapter already.
    """
    backbone = _backbone(model)
    if STATE_ADAPTER in backbone._modules:
        raise ValueError(
            f"{_named(model)} has a state adapter already; take it away first with "
            "remove_state_adapter(model)"
        )
    adapter = _fresh(model, backbone)
    if freeze:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for module in (backbone, *([] if head is None else [head])):
            module.requires_grad_(False)
    backbone.add_module(STATE_ADAPTER, adapter)
    return adapter


def load_state_adapter(directory: str | os.PathLike[str], model: nn.Module) -> StateAdapter:
    """Let a model start from the states that ``adapter.save_pretrained(directory)`` wrote.

    Its weights stay as trainable as they are. A model that has an adapter keeps its module.

    Raises:
        FileNotFoundError: The folder holds no state adapter.
        ValueError: It is damaged or was made for another model, which then stays as it was; or
            the errors of :func:`add_state_adapter`.
    """
    backbone = _backbone(model)
    adapter = state_adapter_of(backbone)
    if adapter is None:
        adapter = _fresh(model, backbone)
    adapter.read(directory)
    backbone.add_module(STATE_ADAPTER, adapter)
    return adapter


def remove_state_adapter(model: nn.Module) -> None:
    """Let a model start from zeros again.

    Raises:
        ValueError: It has no state adapter.
    """
    backbone = _backbone(model)
    if backbone._modules.pop(STATE_ADAPTER, None) is None:
        raise ValueError(f"{_named(model)} has no state adapter to remove")


def state_adapter_of(backbone: Any) -> StateAdapter | None:
    """Return the adapter of a model's backbone, None if it has none."""
    return backbone._modules.get(STATE_ADAPTER)


def _check_states(where: object, given: Mapping[str, Any], own: dict[str, list[int]]) -> None:
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or extra:
        lacks = [f"lacks {', '.join(missing[:3])}"] if missing else []
        holds = [f"holds {', '.join(extra[:3])} besides"] if extra else []
        raise ValueError(
            f"{where} must hold the model's {len(own)} states: it {' and '.join(lacks + holds)}; "
            "load the model that it was trained on"
        )
    for name, shape in own.items():
        if given[name] != shape:
            raise ValueError(
                f"{where}: {name} must have shape {shape}, got {given[name]}; load the model that "
                "it was trained on"
            )


def _parameter_name(index: int, name: str) -> str:
    return f"layer{index}_{name.partition('.')[0]}"


def _named(model: Any) -> str:
    return type(model).__name__


def _backbone(model: Any) -> Any:
    """Return the model around the layers, of a classifier too.

    Raises:
        ValueError: It has none that we know.
    """
    if hasattr(model, "get_base_model"):  # PEFT's, whose base_model holds it in a part of its own
        model = model.get_base_model()
    base = getattr(model, "base_model", None)
    if hasattr(model, "recurrent_backbone") or not hasattr(base, "cache_class"):
        return backbone_of(model)
    return base


def _fresh(model: Any, backbone: Any) -> StateAdapter:
    config, name = backbone.config, _named(model)
    if not getattr(config, "causal", True):
        raise ValueError(
            f"a state adapter needs a model that reads forwards with a state, and {name} is "
            f"bidirectional (directions = {config.directions!r}): it starts from no state"
        )
    try:
        found = _states_after_two_tokens(backbone)
    except ValueError as error:
        raise ValueError(
            f"a state adapter needs a model that keeps a state, and {name} keeps none: {error}"
        ) from error
    states, counters = {}, {}
    for index, tensors in enumerate(found):
        given = backbone.startable_states(index, tensors)
        trained = {n: tuple(t.shape[1:]) for n, t in given.items() if t.is_floating_point()}
        if trained:
            states[index] = trained
            counters[index] = {
                n: (tuple(t.shape[1:]), t.dtype) for n, t in given.items() if n not in trained
            }
    if not states:
        raise ValueError(
            f"a state adapter needs a layer with a recurrent state of real numbers, and {name} has "
            "none: its layers keep keys and values of tokens alone"
        )
    # in the form that it has in a file: JSON has no infinity
    signature = json.dumps(backbone.cache_class.signature(config), default=str)
    base = json.loads(signature, parse_constant=str)
    adapter = StateAdapter(base, config, states, counters)
    weight = next(backbone.parameters())
    return adapter.to(weight.device)


@torch.no_grad()
def _states_after_two_tokens(backbone: Any) -> list[dict[str, Tensor]]:
    """Return a row of each layer's states; the model and the random state do not change."""
    config = backbone.config
    weight = next(p for p in backbone.parameters() if p.is_floating_point())
    x = torch.zeros(1, 2, config.get_text_config().hidden_size).to(weight)
    others = {
        name: torch.ones(1, 2, device=x.device) for name in getattr(config, "token_inputs", ())
    }
    cache = backbone.cache_class(config)
    with evaluating(backbone), torch.random.fork_rng(devices=[]):
        backbone(inputs_embeds=x, use_cache=True, **{CACHE: cache}, **others)
    return cache.get_states()
