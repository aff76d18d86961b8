"""The decay of an accelerated mixer's state, from the arguments of its scan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmzoo.modeling.dynamics import Dynamics
from ssmzoo.modeling.stock.calls import call
from ssmzoo_kernels import double
from ssmzoo_kernels.layers import FUNCTIONS


def dynamics(mixer: Any, hidden_states: Tensor) -> Dynamics:
    """Return the mean decay at an input ``[B, L, D]``; kernels are left to be measured.

    ``decay`` is ``exp(mean_t log a_t)``: of Mamba ``a = exp(dt A)``, a number for each entry of the
    state; of Mamba2 and gated DeltaNet one a head, of KDA one a head and key channel. The
    delta rule's erasing of a key, when it writes the key anew, is not in it.
    """
    call.scans = []
    try:
        mixer(hidden_states)
        scans = call.scans
    finally:
        call.scans = None
    # Zamba scans head by head
    decays = [_DECAYS[function](arguments) for function, arguments in scans]
    return Dynamics(decay=torch.cat(decays) if decays else None, depends_on_input=True)


def noted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the arguments of a scan while :func:`dynamics` measures."""
    if call.scans is not None and function in _DECAYS:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        call.scans.append((function, bound.arguments))


def _of_mamba(given: dict[str, Any]) -> Tensor:
    dt, bias = double(given["dt"]), given["delta_bias"]
    step = F.softplus(dt if bias is None else dt + double(bias)[:, None]).mean(dim=(0, 2))  # [D]
    return (step[:, None] * double(given["A"])).exp()


def _of_mamba2(given: dict[str, Any]) -> Tensor:
    dt, bias = double(given["dt"]), given["dt_bias"]
    step = dt if bias is None else dt + double(bias)
    step = (F.softplus(step) if given["dt_softplus"] else step).clamp(*given["dt_limit"])
    return (step.mean(dim=(0, 1)) * double(given["A"])).exp()[:, None]  # [H, 1]


def _of_delta_rule(given: dict[str, Any]) -> Tensor:
    decay = double(given["g"]).mean(dim=(0, 1)).exp()
    return decay if decay.dim() == 2 else decay[:, None]  # [H, K] or [H, 1]


# by the function that runs a whole sequence; KDA's is the delta rule's
_DECAYS: dict[Callable[..., Any], Callable[[dict[str, Any]], Tensor]] = {
    FUNCTIONS["mamba_selective_scan"]: _of_mamba,
    FUNCTIONS["mamba2_chunk_scan"]: _of_mamba2,
    FUNCTIONS["torch_chunk_gated_delta_rule"]: _of_delta_rule,
}
