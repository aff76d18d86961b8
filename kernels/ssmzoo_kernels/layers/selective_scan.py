"""Mamba's functions with the arguments that transformers' mixers pass.

Dimensions: B batch, L length, D channels, K taps, N states a channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.causal_conv1d import causal_conv1d
from ssmzoo_kernels.layers.packing import boundaries, flat
from ssmzoo_kernels.selective_scan import selective_scan


def causal_conv1d_fn(
    hidden_states: Tensor,  # [B, D, L]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel of ``[B, D, L]``; packed sequences do not see each other.

    Besides transformers' arguments, ``initial_state [B, K - 1, D]`` is the inputs before.

    Returns:
        ``[B, D, L]``, and with ``return_final_state`` the last K - 1 inputs ``[B, K - 1, D]``.

    Raises:
        ValueError: Another activation than silu.
    """
    x = hidden_states.transpose(1, 2)
    packing = boundaries(x, kwargs)
    chosen = "silu" if _is_silu("causal_conv1d_fn", activation) else None
    start = kwargs.get("initial_state")
    y, state = causal_conv1d(
        flat(x, packing), weight, bias, start, activation=chosen, cu_seqlens=packing
    )
    y = y.view(x.shape).transpose(1, 2)
    return (y, state) if kwargs.get("return_final_state") else y


def causal_conv1d_update(
    hidden_states: Tensor,  # [B, D, 1]
    conv_state: Tensor,  # [B, D, K]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    activation: str | None = None,
) -> Tensor:
    """Convolve one token ``[B, D, 1]`` and move the state, the last K inputs, in place.

    Raises:
        ValueError: Another activation than silu.
    """
    silu = _is_silu("causal_conv1d_update", activation)
    inputs = torch.cat([conv_state[..., 1:], hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(inputs)
    y = (inputs.to(weight.dtype) * weight).sum(dim=-1, keepdim=True)
    if bias is not None:
        y = y + bias[:, None]
    return (F.silu(y) if silu else y).to(hidden_states.dtype)


def mamba_inner_fn(
    xz: Tensor,  # [B, 2 D, L]
    conv1d_weight: Tensor,  # [D, 1, K]
    conv1d_bias: Tensor | None,  # [D]
    x_proj_weight: Tensor,  # [R + 2 N, D]
    delta_proj_weight: Tensor,  # [D, R]
    out_proj_weight: Tensor,  # [hidden, D]
    out_proj_bias: Tensor | None,  # [hidden]
    A: Tensor,  # [D, N]
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,  # [D]
    delta_bias: Tensor | None = None,  # [D]
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    **kwargs: Any,
) -> Tensor:
    """Run a whole mixer behind its first projection, ``[B, L, hidden]``, without a cache or a mask.

    It reads the weights of projections: for layers that nothing wraps. With ``dt_rms_weight`` it
    normalises dt, B and C before ``dt``'s projection and without weights, as Falcon-Mamba's layers.

    Raises:
        NotImplementedError: B or C that do not come from the input, or step sizes without softplus,
            which no mixer has.
    """
    if B is not None or C is not None:
        raise NotImplementedError("mamba_inner_fn: B and C must be None: they are projections of x")
    if not delta_softplus:
        raise NotImplementedError("mamba_inner_fn: delta_softplus must be True, got False")
    rows, gate = xz.transpose(1, 2).chunk(2, dim=-1)
    packing = boundaries(rows, kwargs)
    x, _ = causal_conv1d(
        flat(rows, packing),
        conv1d_weight.squeeze(1),
        conv1d_bias,
        activation="silu",
        cu_seqlens=packing,
    )
    parts = [delta_proj_weight.shape[1], A.shape[1], A.shape[1]]
    split = F.linear(x, x_proj_weight).split(parts, dim=-1)
    if dt_rms_weight is not None:
        split = [_normed(part, b_c_dt_rms_eps) for part in split]
    dt, write, read = split
    step = F.linear(dt, delta_proj_weight)
    y, _ = selective_scan(
        x, step, A, write, read, D, flat(gate, packing), delta_bias, cu_seqlens=packing
    )
    bias = None if out_proj_bias is None else out_proj_bias.to(out_proj_weight.dtype)
    return F.linear(y.view(rows.shape), out_proj_weight, bias)


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
    """Run the selective scan along ``[B, D, L]``.

    Besides transformers' arguments, ``initial_state [B, D, N]`` is where it starts from.

    Returns:
        The outputs ``[B, D, L]``, and with ``return_last_state`` the final state ``[B, D, N]``,
        float32 whatever the inputs are.

    Raises:
        NotImplementedError: Step sizes without softplus, which no mixer has.
    """
    if not delta_softplus:
        raise NotImplementedError("mamba_selective_scan: delta_softplus must be True, got False")
    rows = hidden_states.transpose(1, 2)
    packing = boundaries(rows, kwargs)
    u, step, write, read = (flat(x.transpose(1, 2), packing) for x in (hidden_states, dt, B, C))
    # mixers make it channel by channel: kernels would copy it forward and backward
    step = step.contiguous()
    gate = None if z is None else flat(z.transpose(1, 2), packing)
    start = kwargs.get("initial_state")
    y, state = selective_scan(
        u, step, A, write, read, D, gate, delta_bias, start, cu_seqlens=packing
    )
    y = y.view(rows.shape).transpose(1, 2)
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


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return vectors whose root mean square is 1."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _is_silu(name: str, activation: str | None) -> bool:
    if activation not in ("silu", "swish", None):
        raise ValueError(f"{name}: activation must be silu, swish or None, got {activation!r}")
    return activation is not None
