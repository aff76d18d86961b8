"""The processes that a launcher started: how they share a model and act alike."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ssmzoo.environment.device import installed_versions, launched_processes
from ssmzoo.training.stopping import Stopped, StopRequest, signal_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.nn.parallel import DistributedDataParallel

    from ssmzoo.recipe import Recipe

T = TypeVar("T")

# how long a process waits for the others: in a step, and while one alone tokenises or writes
STEP, ALONE = timedelta(minutes=30), timedelta(hours=6)


class Sums:
    """Numbers summed over all processes, on the device and on the CPU; the device does not wait."""

    def __init__(self, accelerator: Accelerator, numbers: list[int]) -> None:
        import torch

        given = torch.tensor(numbers, device=accelerator.device)
        self.values = cast("torch.Tensor", accelerator.reduce(given))
        self._here = self.values.to("cpu", non_blocking=True)
        self._copied: torch.Event | None = None
        if self.values.device.type != "cpu":
            self._copied = torch.Event(self.values.device)
            self._copied.record()

    def read(self) -> list[int]:
        """Wait for these numbers, not for later work of the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here.tolist()


class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        accelerator: Accelerate's engine.
        request: Whether this process was told to stop.
        rank: This process's number.
        count: How many there are.
        pieces: How many of them read a row together, each a piece of it.
        readers: How many groups of ``pieces`` processes there are; each reads other rows.
        reader: The number of this process's group.
        row: That group, for collectives; None if each process reads rows of its own.
        main: Whether this is the first one, which alone writes.
        group: The group in which the others wait for the first one; None if there are no others.
        ready: Whether the run is set up. Before that nothing can be lost by stopping.
    """

    def __init__(self, accelerator: Accelerator, request: StopRequest) -> None:
        import torch

        self.accelerator, self.request = accelerator, request
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self.pieces, self.reader, self.readers = 1, self.rank, self.count
        self.row: Any = None
        self.main, self.ready = accelerator.is_main_process, False
        self.group: Any = None
        if self.count > 1:
            self.group = torch.distributed.new_group(timeout=ALONE)

    def share_rows(self, pieces: int) -> None:
        """Let each ``pieces`` neighbours read a row together; all must call this alike.

        Raises:
            ValueError: ``pieces`` does not divide the number of processes.
        """
        import torch

        if self.count % pieces:
            raise ValueError(
                f"train.sequence_parallel must divide the number of processes, {self.count}, got "
                f"{pieces}; start another number with torchrun"
            )
        if pieces > 1:
            self.row, _ = torch.distributed.new_subgroups(pieces, timeout=STEP)
        self.pieces = pieces
        self.reader, self.readers = self.rank // pieces, self.count // pieces

    def on_main(self, function: Callable[[], T]) -> T:
        """Run a function in the main process and return its result, or raise its error, in all.

        Until the run is ready, a signal to stop interrupts the function.
        """
        import torch

        outcome: list[Any] = [None, None]
        if self.main:
            try:
                with nullcontext() if self.ready else self.request.obeyed_at_once():
                    outcome[0] = function()
            except (Exception, Stopped) as error:
                outcome[1] = error
        if self.group is not None:
            torch.distributed.broadcast_object_list(outcome, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def main_first(self, function: Callable[[], T]) -> T:
        """Run a function in all processes, in the main one before the others: it may download."""
        made: list[T] = []
        self.on_main(lambda: made.append(function()))
        return made[0] if self.main else function()

    def require_shared_folder(self, folder: Path) -> None:
        """Check that every process sees the file that the main one wrote into the run's folder.

        Raises:
            RuntimeError: Not every process does.
        """
        import torch

        if self.count == 1:
            return
        lock = folder / ".lock"
        written = self.on_main(lock.read_text)
        blind = torch.tensor(not lock.is_file() or lock.read_text() != written, dtype=torch.int)
        number = int(self.sum(blind.to(self.accelerator.device)))
        if number:
            raise RuntimeError(
                f"output_dir must be on a file system that all processes share; {number} of "
                f"{self.count} do not see the file that the first one wrote in {folder}"
            )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, which must all call this."""
        return cast("torch.Tensor", self.accelerator.reduce(values))

    def requested_signal(self) -> int | None:
        """Return the signal by which any process was told to stop; all must call this."""
        flags = self.request.flags()
        return signal_of(flags if self.count == 1 else Sums(self.accelerator, flags).read())

    def require_same(self, recipe: Recipe) -> None:
        """Check that all processes have one recipe and the same versions; all must call this.

        Raises:
            RuntimeError: They do not; the message names the process and the difference.
        """
        import torch

        if self.count == 1:
            return
        everyone: list[dict[str, str]] = [{}] * self.count
        torch.distributed.all_gather_object(everyone, _numeric_settings(recipe), group=self.group)
        first = everyone[0]
        for rank, other in enumerate(everyone):
            for name in sorted(first.keys() | other.keys()):
                ours, theirs = (found.get(name, "nothing") for found in (first, other))
                if ours != theirs:
                    raise RuntimeError(
                        "all processes of a run must have the same recipe and versions, but "
                        f"{name} is {ours} in process 0 and {theirs} in process {rank}; give all "
                        "machines the same installation and the same recipe"
                    )

    def stop_if_told(self) -> None:
        """Stop if any process was told to; all must call this.

        Raises:
            Stopped: One was.
        """
        if signal := self.requested_signal():
            raise Stopped(signal)


def _numeric_settings(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's fields and the versions, by name: they decide a run's numbers."""
    found: dict[str, str] = {}
    for section, fields in recipe.model_dump(mode="json").items():
        for field, value in (fields if isinstance(fields, dict) else {"": fields}).items():
            found[f"{section}.{field}" if field else section] = json.dumps(value, sort_keys=True)
    versions = installed_versions("ssmzoo", "torch", "transformers", "accelerate")
    return found | {f"the version of {name}": number for name, number in versions.items()}


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor for one that FSDP may have spread over the processes."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def settle_buckets(model: DistributedDataParallel) -> None:
    """Let a model under DDP sum the gradients of its first step in the order of all later ones.

    DDP lays gradients into buckets anew after its first backward pass, in the order in which they
    came, and where a gradient lies decides in which order more than two processes sum it. So a
    run that was resumed would round its first step otherwise than one that never stopped. This
    makes that first pass, in all processes, on a loss of zero; it leaves gradients of zero.
    """
    import torch

    module: Any = model.module
    wrapped = vars(module).get("forward")  # as Accelerate leaves it
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.forward = lambda: torch.stack([0 * p.sum() for p in parameters]).sum()
    try:
        model().backward()
    finally:
        del module.forward
        if wrapped is not None:
            module.forward = wrapped


def require_launched() -> None:
    """Check that the processes which were asked for were started by a launcher.

    Raises:
        RuntimeError: They were not.
    """
    launched_processes()
    alone = "WORLD_SIZE" not in os.environ
    # as `accelerate launch --cpu --num_processes N` leaves the environment for N > 1
    if alone and "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
        raise RuntimeError(
            "`accelerate launch --cpu` was asked for several processes and started one; "
            "use `torchrun --nproc_per_node N -m ssmzoo ...`, or ask for one process"
        )


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Return Accelerate's engine for a recipe's run in a folder, on the processes there are.

    Accelerate's own variables override no field of the recipe, and choose no backend of dynamo.

    Raises:
        RuntimeError: Not as many processes as ``WORLD_SIZE`` asks for, or another way to share the
            model than the one that was asked for, DDP or FSDP2.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if _flag(f"ACCELERATE_USE_{engine}"):
            raise RuntimeError(_unsupported_sharing(engine))
    sharding = _sharding()
    _require_mesh()
    accelerator = Accelerator(
        mixed_precision="bf16" if _uses_bfloat16(recipe.train.dtype) else "no",
        cpu=_stays_on_the_cpu(),
        fsdp_plugin=sharding,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        log_with=[*recipe.log.trackers] if recipe.log.trackers else None,
        project_dir=folder / "trackers",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=STEP)],
    )
    world = launched_processes()
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
        raise RuntimeError(_unsupported_sharing(kind))
    return accelerator


def _unsupported_sharing(kind: str) -> str:
    return (
        f"the model must be copied to all processes (DDP) or sharded by FSDP2, got {kind}; "
        "change distributed_type in the configuration of accelerate launch"
    )


@contextmanager
def separate_state() -> Iterator[None]:
    """Hide the state that all objects of Accelerate share, and put it back.

    An ``Accelerator`` that a notebook made before neither changes the run inside nor is changed.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [kind._shared_state for kind in (AcceleratorState, PartialState, GradientState)]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, earlier in zip(shared, before, strict=True):
            state.clear()
            state.update(earlier)


def _stays_on_the_cpu() -> bool:
    """Tell whether no accelerator computes: there is none, or Apple's, which has no float64."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found is None or found.type == "mps"


def _uses_bfloat16(dtype: str) -> bool:
    """Tell whether a run computes in bfloat16: ``auto`` does on GPUs that do so themselves."""
    import torch

    if dtype != "auto":
        return dtype == "bfloat16"
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


# settings of `accelerate launch` that must be off, and the way out
_REFUSED = {
    "cpu_ram_efficient_loading": "every process builds the model",
    "activation_checkpointing": "use train.gradient_checkpointing in the recipe",
    "ignored_modules": "the gradients of modules that are not sharded are not summed",
}


def _sharding() -> FullyShardedDataParallelPlugin | None:
    """Return how `accelerate launch` was told to shard the model, None if it was not.

    Weights are gathered in float32, as they are kept: autocast chooses the operations in
    bfloat16, as without sharding, and rounds no parameter that a family wants in float32.

    Raises:
        RuntimeError: It was told a setting that our checkpoints do not support.
    """
    if not _flag("ACCELERATE_USE_FSDP"):
        return None
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise RuntimeError("fsdp_version must be 2 in the configuration of accelerate launch")
    for name, way_out in _REFUSED.items():
        if os.environ.get(f"FSDP_{name.upper()}", "").lower() not in ("", "0", "false", "no"):
            raise RuntimeError(
                f"fsdp_{name} must be false or absent in the configuration of accelerate launch: "
                f"{way_out}"
            )
    return FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())


def _require_mesh() -> None:
    """Check that the mesh of `accelerate launch`, if there is one, has copies and shards alone.

    Raises:
        RuntimeError: It has another dimension, or another number of processes than there are.
    """
    if not _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE".upper(), 1))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    for name in ("tp", "cp", "sp"):
        if sizes[name] != 1:
            raise RuntimeError(
                f"parallelism_config_{name}_size must be 1 in the configuration of accelerate "
                f"launch, got {sizes[name]}; to read long rows in pieces use "
                "train.sequence_parallel in the recipe"
            )
    world, copies, shards = launched_processes(), sizes["dp_replicate"], sizes["dp_shard"]
    if copies * shards != world:
        raise RuntimeError(
            "parallelism_config_dp_replicate_size x parallelism_config_dp_shard_size must be the "
            f"number of processes, {world}, got {copies} x {shards}; change the configuration of "
            "accelerate launch"
        )


def is_of_another_process(error: RuntimeError) -> bool:
    """Return whether an error says that another process of the run does not answer."""
    import torch

    # gloo's errors have no class of their own, only texts
    known = "/gloo/", "caused pair closure"  # the second after another thread timed out
    return isinstance(error, torch.distributed.DistError) or any(k in str(error) for k in known)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the machine, has no more memory."""
    import torch

    # the CPU allocator's error has no class of its own, only a text
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
