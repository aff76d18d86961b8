"""The functions of Mamba2, gated DeltaNet and KDA with the arguments of transformers' mixers.

Dimensions: B batch, L length, H heads, G groups or heads of keys, K key size (N of Mamba2), V value
size (P of Mamba2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo_kernels.gated_linear_attention import gated_linear_attention
from ssmzoo_kernels.layers.packing import boundaries, flat
from ssmzoo_kernels.rms_norm import rms_norm

_EPS = 1e-6  # of the keys' and queries' length


def mamba2_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **kwargs: Any,
) -> None:
    """Decline: the mixer then calls its projections as layers, so that adapters take effect."""


def mamba2_chunk_scan(
    hidden_states: Tensor,  # [B, L, H, V]
    dt: Tensor,  # [B, L, H]
    A: Tensor,  # [H]
    B: Tensor,  # [B, L, G, K]
    C: Tensor,  # [B, L, G, K]
    chunk_size: int,
    D: Tensor | None = None,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    initial_states: Tensor | None = None,  # [B, H, V, K]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba2's scan (SSD): ``S <- exp(dt A) S + dt B x^T``, ``y = S^T C + D x``.

    Returns:
        The outputs ``[B, L, H, V]``, and with ``return_final_states`` the state ``[B, H, V, K]``,
        float32 whatever the inputs are.

    Raises:
        NotImplementedError: A gate z, which no mixer gives.
    """
    if kwargs.get("z") is not None:
        raise NotImplementedError("mamba2_chunk_scan: z must be None; gate the outputs instead")
    packing = boundaries(hidden_states, kwargs)
    step = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    y, state = gated_linear_attention(
        flat(C, packing),
        flat(B, packing),
        flat(hidden_states, packing),
        flat(step * _wide(A), packing),
        flat(step, packing),
        None if initial_states is None else initial_states.transpose(2, 3),
        scale=1.0,
        cu_seqlens=packing,
    )
    y = y.view(hidden_states.shape)
    if D is not None:
        y = y + D.to(y.dtype)[:, None] * hidden_states
    return (y, state.transpose(2, 3).contiguous()) if return_final_states else y


def mamba2_selective_state_update(
    state: Tensor,  # [B, H, V, K]
    hidden_states: Tensor,  # [B, H, V]
    dt: Tensor,  # [B, H, V], a number a head
    A: Tensor,  # [H, V, K], a number a head
    B: Tensor,  # [B, G, K]
    C: Tensor,  # [B, G, K]
    D: Tensor | None = None,  # [H, V], a number a head
    dt_bias: Tensor | None = None,  # [H, V], a number a head
    dt_softplus: bool = False,
    z: Tensor | None = None,  # [B, H, V]
    **kwargs: Any,
) -> Tensor:
    """Run one token ``[B, H, V]`` of Mamba2's scan and move the state in place.

    Besides transformers' arguments, ``dt_limit`` bounds the step sizes, as in whole sequences.
    """
    bias = None if dt_bias is None else dt_bias[:, 0]
    step = _step_size(dt[..., 0], bias, dt_softplus, kwargs.get("dt_limit"))
    heads, (batch, groups, keys) = hidden_states.shape[1], B.shape
    by_group = (batch, groups, heads // groups, state.shape[2], keys)
    x = hidden_states.to(step.dtype)
    written = (step[..., None] * x).reshape(*by_group[:-1], 1) * B[:, :, None, None]
    decay = torch.exp(step * _wide(A[:, 0, 0]))
    new = torch.addcmul(written.reshape(state.shape), state, decay[..., None, None].to(state.dtype))
    state.copy_(new)
    y = new.reshape(batch, groups, -1, keys) @ C.to(new.dtype).unsqueeze(-1)
    y = y.reshape(hidden_states.shape)
    if D is not None:
        y = torch.addcmul(y, x, D[:, :1].to(y.dtype))
    if z is not None:
        y = y * F.silu(z)
    return y.to(hidden_states.dtype)


def torch_chunk_gated_delta_rule(
    query: Tensor,  # [B, L, G, K]
    key: Tensor,  # [B, L, G, K]
    value: Tensor,  # [B, L, H, V]
    g: Tensor,  # [B, L, H] or [B, L, H, K]
    beta: Tensor,  # [B, L, H]
    chunk_size: int = 64,
    initial_state: Tensor | None = None,  # [B, H, K, V]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule with decays ``exp(g)``: a number a head, or one a row of the state (KDA).

    Returns:
        The outputs ``[B, L, H, V]`` in the query's dtype; the final state ``[B, H, K, V]`` in
        float32, or None.
    """
    packing, kind = boundaries(value, kwargs), query.dtype
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    out, state = gated_linear_attention(
        flat(query, packing),
        flat(key, packing),
        flat(value, packing),
        flat(g, packing),
        flat(beta, packing),
        initial_state,
        rule="delta",
        cu_seqlens=packing,
    )
    out = out.view(value.shape).to(kind)
    return out, state if output_final_state else None


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule, as :func:`torch_chunk_gated_delta_rule`."""
    return torch_chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **kwargs,
    )


def _step_size(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None
) -> Tensor:
    """Return step sizes in at least float32."""
    step = _wide(dt) if bias is None else _wide(dt) + _wide(bias)
    if softplus:
        step = F.softplus(step)
    if limit is not None and tuple(limit) != (0.0, math.inf):
        step = step.clamp(*limit)
    return step


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length 1, in at least float32."""
    keys, wide = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    scale = torch.full((keys,), keys**-0.5, dtype=wide, device=x.device)
    return rms_norm(x, scale, eps=_EPS / keys)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
