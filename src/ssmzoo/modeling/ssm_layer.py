"""A family's sequence mixer as a layer of a network of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ssmzoo.family import load_family
from ssmzoo.modeling.inputs import refuse_unknown, take_steps
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.mixer import SSMMixer, read_backwards, second_mixer
from ssmzoo.modeling.packing import find_packing, flip_steps

if TYPE_CHECKING:
    from ssmzoo.modeling.backbone import SSMModel
    from ssmzoo.modeling.configuration import SSMConfig


class SSMLayer(nn.Module):
    """One mixer without norm, residual and MLP: ``[B, L, D] -> [B, L, D]``.

    In both ``config.directions`` also the mixer, or a second one, on the reversed sequence. Its
    parameters are drawn as the family's model draws them, and have the names that they have in a
    block of it.

    Args:
        model_class: The family's backbone.
        config: Its configuration. What only embedding, blocks and heads look at has no effect;
            ``num_hidden_layers`` has where a family draws deep models smaller.
        layer_idx: Which of the model's layers it is, where they differ.

    Raises:
        ValueError: The model has no such layer.
    """

    def __init__(self, model_class: type[SSMModel], config: SSMConfig, layer_idx: int = 0) -> None:
        super().__init__()
        if not 0 <= layer_idx < config.num_hidden_layers:
            raise ValueError(
                f"layer_idx must be in [0, {config.num_hidden_layers - 1}], got {layer_idx}; "
                "num_hidden_layers is the number of layers"
            )
        model_class, config = model_class.kind_of_layer(config, layer_idx)
        self.config = config
        self.mixer = model_class.mixer_class(config, layer_idx)
        self.reverse = second_mixer(self.mixer)
        with torch.no_grad():
            self.apply(model_class.without_layers(config)._init_weights)

    def forward(
        self,
        hidden_states: Tensor,
        state: Mapping[str, Tensor] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        **inputs: Tensor,
    ) -> Any:
        """Mix along the sequence.

        Args:
            hidden_states: ``[B, L, D]``.
            state: What an earlier call returned, to go on from; None: sequences begin here.
            cu_seqlens: Boundaries ``[S + 1]`` of sequences packed into one row (B = 1).
            return_state: Also return the state after the last token.
            **inputs: What ``config.token_inputs`` names, ``[B, L]``; and ``residual``, the residual
                stream before the norm, ``[B, L, D]``, for a mixer that reads it, which else takes
                ``hidden_states`` for it.

        Returns:
            ``[B, L, D]``; with ``return_state`` also a dictionary of tensors, a row a sequence.

        Raises:
            ValueError: Shapes that do not fit, a state of another layer, or one where outputs
                depend on later tokens.
            TypeError: An argument that this layer does not have, or a state that is none.
        """
        width = self.config.hidden_size
        if (
            hidden_states.dim() != 3
            or hidden_states.shape[2] != width
            or not hidden_states.shape[1]
        ):
            raise ValueError(
                f"hidden_states must have shape [B, L, {width}] with L at least 1, got "
                f"{list(hidden_states.shape)}"
            )
        batch, length = hidden_states.shape[:2]
        packing = find_packing(batch, length, 0, None, None, None, cu_seqlens)
        steps: dict[Any, Any] = {
            **take_steps(self.config.token_inputs, inputs, packing, batch, length)
        }
        more: dict[str, Tensor] = {}
        if self.mixer.reads_residual:
            more["residual"] = inputs.pop("residual", hidden_states)
        refuse_unknown(inputs, SSMLayer.forward, self.config.token_inputs)
        keep = return_state or state is not None
        if keep:
            self._check_state(state, batch if packing is None else packing.count)
        turned = {name: flip_steps(x, packing) for name, x in steps.items()}
        held = LayerState(state or {}, keep, packing, shared=steps, reversed_shared=turned)
        mixed = self.mixer(hidden_states, held, packing, **more)
        if self.mixer.is_turned:
            mixed = mixed + read_backwards(
                self.mixer, self.reverse, hidden_states, held, packing, more
            )
        if state and state.keys() != held.final.keys():
            raise ValueError(
                f"state must be one that this layer returned, of {', '.join(held.final)}, got "
                f"{', '.join(state)}"
            )
        return (mixed, held.final) if return_state else mixed

    def _check_state(self, state: object, sequences: int) -> None:
        if not self.config.causal:
            raise ValueError(
                f"a layer with directions={self.config.directions!r} has no state, because its "
                "outputs depend on later tokens; pass whole sequences without return_state"
            )
        if not isinstance(state, Mapping | None):
            raise TypeError(
                f"state must be a dictionary that this layer returned, got {type(state).__name__}"
            )
        for name, tensor in (state or {}).items():
            if len(tensor) != sequences:
                raise ValueError(
                    f"state must hold the {sequences} sequences of the input, got {len(tensor)} "
                    f"in {name!r}"
                )

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Project parameters into their allowed range; call it after every optimizer step.

        Most families have nothing to project.
        """
        for module in self.modules():
            if isinstance(module, SSMMixer):
                module.project_parameters()


def layer(family: str, preset: str | None = None, *, layer_idx: int = 0, **fields: Any) -> SSMLayer:
    """Return a family's sequence mixer for a network of one's own.

    ::

        mixer = ssmzoo.layer("longhorn", hidden_size=256)
        y = x + mixer(norm(x))  # [B, L, 256]

    Args:
        family: Its name.
        preset: One of its presets, for fields that are not given.
        layer_idx: Which of the layers it is, from 0 on, in families whose layers differ.
        **fields: Fields of the family's configuration.

    Raises:
        LookupError: No such family, preset or field.
        ValueError: A field out of its range, or no such layer.
        RuntimeError: The family is broken.
    """
    found: Any = load_family(family)
    return SSMLayer(found.model_class, found.config(preset, **fields), layer_idx)
