"""Mamba's functions as transformers' mixers call them, on our ops.

Dimensions: B batch, L length, D channels, K taps, N states a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ssmzoo.modeling.stock.calls import call
from ssmzoo_kernels import causal_conv1d, selective_scan


def causal_conv1d_fn(
    hidden_states: Tensor,  # [B, D, L]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve each channel of ``[B, D, L]``; packed sequences do not see each other."""
    x = hidden_states.transpose(1, 2)
    ours = activation in ("silu", "swish")
    y, _ = causal_conv1d(
        flat(x), weight, bias, activation="silu" if ours else None, cu_seqlens=call.packing
    )
    y = y.view(x.shape).transpose(1, 2)
    return y if ours or activation is None else ACT2FN[activation](y)


def causal_conv1d_update(
    hidden_states: Tensor,  # [B, D, 1]
    conv_state: Tensor,  # [B, D, K]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    activation: str | None = None,
) -> Tensor:
    """Convolve one token ``[B, D, 1]`` and move the state, the last K inputs, in place."""
    inputs = torch.cat([conv_state[..., 1:], hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(inputs)
    y = (inputs.to(weight.dtype) * weight).sum(dim=-1, keepdim=True)
    if bias is not None:
        y = y + bias[:, None]
    if activation is not None:
        y = ACT2FN[activation](y)
    return y.to(hidden_states.dtype)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    **kwargs: Any,
) -> None:
    """Decline: the mixer then calls its projections as layers, so that adapters take effect."""


def mamba_selective_scan(
    hidden_states: Tensor,  # [B, D, L]
    dt: Tensor,  # [B, D, L]
    A: Tensor,  # [D, N]
    B: Tensor,  # [B, N, L]
    C: Tensor,  # [B, N, L]
    D: Tensor | None = None,  # [D]
    z: Tensor | None = None,  # [B, D, L]
    delta_bias: Tensor | None = None,  # [D]
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the selective scan along ``[B, D, L]`` from the call's state.

    Returns:
        The outputs ``[B, D, L]``, and with ``return_last_state`` the final state ``[B, D, N]``,
        float32 whatever the inputs are.

    Raises:
        NotImplementedError: Step sizes without softplus, which no mixer has.
    """
    if not delta_softplus:
        raise NotImplementedError("mamba_selective_scan: delta_softplus must be True, got False")
    u, step, write, read = (flat(x.transpose(1, 2)) for x in (hidden_states, dt, B, C))
    gate = None if z is None else flat(z.transpose(1, 2))
    start, call.states = (call.states[0], call.states[1:]) if call.states else (None, ())
    y, state = selective_scan(
        u, step, A, write, read, D, gate, delta_bias, start, cu_seqlens=call.packing
    )
    y = y.view(hidden_states.transpose(1, 2).shape).transpose(1, 2)
    return (y, state) if return_last_state else y


def mamba_selective_state_update(
    state: Tensor,  # [B, D, N]
    hidden_states: Tensor,  # [B, D]
    dt: Tensor,  # [B, D]
    A: Tensor,  # [D, N]
    B: Tensor,  # [B, N]
    C: Tensor,  # [B, N]
    D: Tensor | None = None,  # [D]
    dt_bias: Tensor | None = None,  # [D]
    dt_softplus: bool = False,
    z: Tensor | None = None,  # [B, D]
    **kwargs: Any,
) -> Tensor:
    """Run one token ``[B, D]`` of the selective scan and move the state in place.

    Raises:
        NotImplementedError: Step sizes without softplus, which no mixer has.
    """
    if not dt_softplus:
        raise NotImplementedError(
            "mamba_selective_state_update: dt_softplus must be True, got False"
        )
    u, step, write, read = (x.unsqueeze(1) for x in (hidden_states, dt, B, C))
    gate = None if z is None else z.unsqueeze(1)
    y, final = selective_scan(u, step, A, write, read, D, gate, dt_bias, state)
    state.copy_(final)
    return y.squeeze(1)


def flat(x: Tensor) -> Tensor:
    """Return ``[B, L, ...]`` as the flat row ``[1, B * L, ...]`` if sequences are packed in it."""
    return x if call.packing is None else x.reshape(1, -1, *x.shape[2:])
