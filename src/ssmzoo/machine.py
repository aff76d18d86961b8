"""What a figure depends on: the processes a launcher started, the device, the versions."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from ssmzoo.recipe import Recipe

# what runs write into a checkout and what nobody runs: neither changes a figure
_NO_CODE = ("eval/results", "kernels/benchmarks/results", "model_cards", "*.md")
# vector instructions, widest first: as /proc/cpuinfo lists them
_VECTORS = ("avx512f", "avx2", "avx", "sse2", "sve", "asimd")
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


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(device: torch.device) -> str:
    """Return what a device is, in words: the GPU's name, or the processor's and its threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return f"{name}, {torch.get_num_threads()} threads"


class Environment(TypedDict):
    """What the last bits of a figure depend on, beside device and versions.

    Attributes:
        commit: Of the git checkout that ssmzoo runs from; None if it runs from none.
        dirty: Whether the checkout's code differed from that commit; None as above.
        cpu_vectors: The CPU's widest vector instructions, such as ``"avx512f"``; None if unknown.
        torch_vectors: Those that torch uses, such as ``"AVX512"``.
        kernel_vectors: Those that the C kernels are built for; None where none can be built.
        threads: Torch's.
        omp_num_threads: The variable ``OMP_NUM_THREADS``; None if it is not set.
    """

    commit: str | None
    dirty: bool | None
    cpu_vectors: str | None
    torch_vectors: str
    kernel_vectors: str | None
    threads: int
    omp_num_threads: str | None


def environment() -> Environment:
    """Return what the last bits of a figure that is measured now depend on."""
    import torch

    from ssmzoo_kernels import native

    commit, dirty = checkout(Path(__file__))
    return {
        "commit": commit,
        "dirty": dirty,
        "cpu_vectors": _cpu_vectors(),
        "torch_vectors": torch.backends.cpu.get_cpu_capability(),
        "kernel_vectors": None if native.missing() else native.vectors(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


@functools.cache
def checkout(file: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the git checkout that tracks a file, and whether its code differs.

    Both are None where no checkout tracks it, git is missing, or git does not trust the folder.
    """

    def git(*words: str) -> str:
        # without a lock, which would disturb a commit that is made at the same time
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", file.name)
        commit = git("rev-parse", "--short=12", "HEAD")
        outside = [f":(top,exclude){pattern}" for pattern in _NO_CODE]
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *outside)
        return commit, bool(changed)
    return None, None


def _cpu_vectors() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = (line.lower().split() for line in text.splitlines())
        flags = next((line for line in lines if line[:1] in (["flags"], ["features"])), [])
        return next((name for name in _VECTORS if name in flags), None)
    return None


def usable_device(name: str | None) -> torch.device:
    """Return the device of a name; without one the GPU if there is one.

    Raises:
        ValueError: Torch cannot use it here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one that torch can use here, such as 'cpu' or 'cuda', got {name!r}"
        ) from error
