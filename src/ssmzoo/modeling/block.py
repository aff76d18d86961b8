"""The residual block around a mixer, and its token as a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.decoding import is_token, make_room, token_of_layer
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import MLP, Dropout, DropPath
from ssmzoo.modeling.mixer import SSMMixer, read_backwards, second_mixer
from ssmzoo.modeling.module_parts import ModuleParts, State, UnservedError, is_watched
from ssmzoo.modeling.norms import (
    BatchNorm,
    LayerNorm,
    NoNorm,
    RMSNorm,
    add_and_norm,
    make_norm,
)
from ssmzoo.modeling.packing import Sequences
from ssmzoo_kernels.token_step import Program, Value

_Norm: TypeAlias = RMSNorm | LayerNorm | BatchNorm | NoNorm


class SSMBlock(GradientCheckpointingLayer):
    """A mixer, and an MLP if the configuration has one, each in a residual branch.

    ``x + mixer(norm(x))``, or ``norm(x + mixer(x))`` without ``prenorm``; the sum is in float32 if
    the configuration says so. In both ``directions`` ``mixer(y) + flip(other(flip(y)))`` takes the
    place of ``mixer(y)``; the other one is the same mixer or a second one, ``reverse``.

    A sum and the norm after it are one call where that is faster.
    """

    def __init__(self, config: SSMConfig, mixer: SSMMixer) -> None:
        super().__init__()
        self.both_ways = mixer.is_turned
        self.residual_in_fp32 = config.residual_in_fp32
        self.prenorm = config.prenorm
        self.reads_residual = mixer.reads_residual
        self.startable_states = mixer.startable_states
        self.decaying_states = mixer.decaying_states
        self.residual = config.residual
        self.counts_tokens = config.norm_type == "batch"
        self.norm = make_norm(config)
        self.mixer = mixer
        self.reverse = second_mixer(mixer)
        self.dropout = Dropout(config.dropout, config.tie_dropout)
        depth = mixer.layer_idx / max(1, config.num_hidden_layers - 1)
        self.drop_path = DropPath(depth * config.drop_path_rate)
        self.mlp = None
        if config.intermediate_size is not None:
            self.mlp_norm = make_norm(config)
            self.mlp = MLP(config)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``."""
        if hidden_states.shape[1] == 1 and self.writes(hidden_states, state, packing):
            return token_of_layer(
                self,
                _write_block,
                hidden_states,
                state,
                lambda: self._layered(hidden_states, state, None),
                self.norm.weight.dtype,
                in_place=self.mixer.written_in_place,
                handed=self.mixer.hands_on and make_room(self.mixer, hidden_states, state),
            )
        return self._layered(hidden_states, state, packing)

    def writes(self, x: Tensor, state: LayerState, packing: Sequences | None) -> bool:
        """Return whether the input ``[B, L, D]`` is a token that a program may be written for."""
        mixer = self.mixer
        return (
            getattr(mixer, "writes_tokens", False)  # not so if something wraps it, as PEFT does
            and bool(state.initial)
            and "parametrizations" not in mixer._modules
            and is_token(self, x, packing)
            # programs are for CPUs; elsewhere nobody waits for a number
            and (not x.is_cpu or mixer.next_is_written(state))
        )

    def runs_its_own_code(self) -> bool:
        """Return whether a call runs :meth:`forward` as it stands here, and nothing else."""
        kind = type(self)
        return (kind.forward, kind.__call__) == _OWN_CODE and not is_watched(self)

    def _layered(self, x: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        # what the norms must leave out of their statistics
        real = (packing.real(),) if self.counts_tokens and packing is not None else ()
        y = self.norm(x, *real) if self.prenorm else x.to(self.norm.weight.dtype)
        more = {"residual": x} if self.reads_residual else {}
        mixed = self.mixer(y, state, packing, **more)
        if not torch.compiler.is_compiling() and getattr(mixed, "shape", None) != x.shape:
            got = list(mixed.shape) if isinstance(mixed, Tensor) else f"a {type(mixed).__name__}"
            raise ValueError(
                f"{type(self.mixer).__name__} must return a tensor of the shape that it gets, "
                f"{list(x.shape)}, got {got}"
            )
        if self.both_ways:
            mixed = mixed + read_backwards(self.mixer, self.reverse, y, state, packing, more)
        if self.mlp is None:
            return self._added(x, mixed, self.norm, None, real, packing)[0]
        x, y = self._added(x, mixed, self.norm, self.mlp_norm, real, packing)
        if y is None:
            y = self.mlp_norm(x, *real) if self.prenorm else x.to(self.mlp_norm.weight.dtype)
        return self._added(x, self.mlp(y), self.mlp_norm, None, real, packing)[0]

    def _added(
        self,
        x: Tensor,
        y: Tensor,
        norm: _Norm,
        after: _Norm | None,
        real: tuple[Tensor | None, ...],
        packing: Sequences | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add a branch's output to ``x``, and with ``prenorm`` norm the sum for the next branch.

        Args:
            x: The residual stream.
            y: What the branch returned.
            norm: The branch's norm.
            after: The next branch's norm in this block, if there is one.
            real: What the norms leave out of their statistics.
            packing: As for :meth:`forward`.

        Returns:
            The residual stream, and its norm where one kernel gave both, else None.
        """
        if self.dropout.training or self.drop_path.training:
            y = self.drop_path(self.dropout(y, packing), packing)
        normed = None
        if self.residual:
            if self.residual_in_fp32:
                x = x.to(torch.promote_types(torch.float32, x.dtype))
            if not self.prenorm:
                after = norm
            if type(after) is RMSNorm:
                y, normed = add_and_norm(x, y, after)
            else:
                y = x + y
        if self.prenorm:
            return y, normed
        return (norm(y, *real) if normed is None else normed), None


_OWN_CODE = (SSMBlock.forward, SSMBlock.__call__)  # those of a patched class are others


def _write_block(
    program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
) -> Value:
    """Write a block's token."""
    block: Any = parts.root
    if any(parts.setting(drop, "training") for drop in (block.dropout, block.drop_path)):
        raise UnservedError
    prenorm, adds = parts.setting(block, "prenorm"), parts.setting(block, "residual")
    for norm, name in (("norm", "mixer"), ("mlp_norm", "mlp")):
        if getattr(block, name) is None:
            continue
        y = _write_norm(program, parts, x, norm) if prenorm else x
        branch = parts.within(name)
        if isinstance(branch.root, SSMMixer):
            more = {"residual": x} if branch.root.reads_residual else {}
            y = branch.root.write_token(program, branch, y, states, **more)
        elif type(branch.root) is MLP:
            y = branch.root.write_token(program, branch, y)
        else:
            raise UnservedError
        if adds:
            y = program.add(x, y)
        x = y if prenorm else _write_norm(program, parts, y, norm)
    return x


def _write_norm(program: Program, parts: ModuleParts, x: Value, name: str) -> Value:
    layer = parts.layer(name)
    if type(layer) is NoNorm:
        return x
    if type(layer) is LayerNorm:
        return parts.layer_norm(program, x, name)
    if type(layer) is not RMSNorm:
        raise UnservedError
    return parts.norm(program, x, name)
