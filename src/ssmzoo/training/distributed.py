"""The processes that a launcher started, and how they share a model."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from ssmzoo.recipe import Recipe

# how long a process waits for the others: in a step, and while one alone tokenises or writes
STEP, ALONE = timedelta(minutes=30), timedelta(hours=6)


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
        RuntimeError: Not as many processes as ``WORLD_SIZE`` asks for, or another way to share a
            model among them than was asked for or than we know.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    dtype = recipe.train.dtype
    bfloat16 = dtype == "bfloat16" or (
        dtype == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    )
    sharding = _sharding()
    accelerator = Accelerator(
        mixed_precision="bf16" if bfloat16 else "no",
        cpu=not torch.accelerator.is_available(),
        fsdp_plugin=sharding,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=STEP)],
    )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != world:
        raise RuntimeError(
            f"WORLD_SIZE asks for {world} processes, but this run has "
            f"{accelerator.num_processes}; unset it, or start with torchrun"
        )
    kind = accelerator.distributed_type.value
    if sharding is not None and not accelerator.is_fsdp2:
        raise RuntimeError(
            "ACCELERATE_USE_FSDP asks to shard the model, which Accelerate does on accelerators "
            f"only, and this run is on {accelerator.device.type}; start it with torchrun instead"
        )
    if sharding is None and not (kind == "NO" or kind.startswith("MULTI_")):
        raise RuntimeError(
            f"the model must be copied to all processes (DDP) or sharded by FSDP2, got {kind}; "
            "change distributed_type in the configuration of accelerate launch"
        )
    return accelerator


def _sharding() -> FullyShardedDataParallelPlugin | None:
    """Return how `accelerate launch` was told to shard the model, None if it was not.

    Weights are gathered in float32, as they are kept: autocast chooses what is computed in
    bfloat16, as without sharding, and rounds nothing that a family wants in float32.

    Raises:
        RuntimeError: It was told something that does not go with our checkpoints.
    """
    if not _flag("ACCELERATE_USE_FSDP"):
        return None
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise RuntimeError("fsdp_version must be 2 in the configuration of accelerate launch")
    for name, instead in (
        ("CPU_RAM_EFFICIENT_LOADING", "every process builds the model"),
        ("ACTIVATION_CHECKPOINTING", "use train.gradient_checkpointing in the recipe"),
    ):
        if _flag(f"FSDP_{name}"):
            raise RuntimeError(
                f"fsdp_{name.lower()} must be false in the configuration of accelerate launch: "
                f"{instead}"
            )
    return FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())


def is_of_another_process(error: RuntimeError) -> bool:
    """Return whether an error says that another process of the run does not answer."""
    import torch

    # of gloo's errors only the text tells them from others
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the machine, has no more memory."""
    import torch

    # of the CPU allocator's errors only the text tells them from others
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
