"""What a checkpoint holds besides weights: the optimizer as tensors, random states as JSON."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor for a norm that FSDP may give as a distributed one."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter name; all processes must call this."""
    return {
        f"{name}/{key}": whole(value).detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Give the optimizer the state that :func:`optimizer_tensors` returned."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for i, parameter in enumerate(parameters):
        prefix = f"{names[id(parameter)]}/"
        state[i] = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if isinstance(parameter, DTensor):
            state[i] = {
                key: distribute_tensor(value, parameter.device_mesh, parameter.placements)
                if value.shape == parameter.shape
                else value
                for key, value in state[i].items()
            }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return this process's random states as JSON."""
    import numpy as np
    import torch

    numbers = np.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numbers,
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Give this process the random states that :func:`random_state` returned."""
    import numpy as np
    import torch

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    python_version, numbers, gauss = state["python"]
    random.setstate((python_version, tuple(numbers), gauss))
    numbers = state["numpy"]
    key = np.array(numbers["state"]["key"], np.uint32)
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": key}})
    torch.set_rng_state(tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(state["cuda"]))
