"""What a run runs on: the processes that a launcher started, the device, the versions."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ssmzoo.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

_PACKAGES = ("ssmzoo", "torch", "transformers", "accelerate", "datasets", "numpy")


def require_launched() -> None:
    """Raise if a launcher was asked for several processes and started one."""
    alone = "WORLD_SIZE" not in os.environ
    # what `accelerate launch --cpu --num_processes N` leaves behind for N > 1
    if alone and "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
        raise RuntimeError(
            "`accelerate launch --cpu` was asked for several processes and started one; "
            "use `torchrun --nproc_per_node N -m ssmzoo ...`, or ask for one process"
        )


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return Accelerate's engine for the recipe's dtype and the processes there are.

    Raises:
        RuntimeError: Not as many processes as ``WORLD_SIZE`` asks for.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    dtype = recipe.train.dtype
    bfloat16 = dtype == "bfloat16" or (
        dtype == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if bfloat16 else "no",
        cpu=not torch.accelerator.is_available(),
        # one process tokenises while the others wait
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != world:
        raise RuntimeError(
            f"WORLD_SIZE asks for {world} processes, but this run has "
            f"{accelerator.num_processes}; unset it, or start with torchrun"
        )
    return accelerator


def installed_versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware(accelerator: Accelerator) -> str:
    """Return what the run computes on, in words."""
    import torch

    if accelerator.device.type == "cuda":
        name = torch.cuda.get_device_name(accelerator.device)
        return f"{accelerator.num_processes} x {name}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
