"""The device and the processes to run on, the versions and variables that a figure depends on."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ssmzoo.environment.portable import portable

if TYPE_CHECKING:
    import torch

# as Accelerate knows them, of launchers and of MPI
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
# prefixes of the variables that change how torch, transformers, Accelerate's sharding and the
# libraries below them compute
_NUMERIC = (
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "OMP_", "KMP_"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS", "CUDNN_", "NCCL_", "HSA_", "MIOPEN_", "XLA_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "SSMZOO_ARCH"),
    *("USE_HUB_KERNELS", "FLASH_ATTENTION_", "TRANSFORMERS_SDPA_", "TRANSFORMERS_DISABLE_"),
    *("FSDP_", "PARALLELISM_CONFIG_"),
)
_OTHER = "TORCH_NCCL_"  # of errors; torchrun sets one
_PLACES = ("_DIR", "_PATH", "_HOME")  # torch itself sets one when it compiles


def numeric_variables() -> dict[str, str]:
    """Return the variables of the environment that may change numbers; no path, no credential."""
    return {
        name: str(portable(value))
        for name, value in sorted(os.environ.items())
        if name.startswith(_NUMERIC) and not (name.startswith(_OTHER) or name.endswith(_PLACES))
    }


def launched_processes() -> int:
    """Return how many processes were launched, this one among them: ``WORLD_SIZE``, or 1.

    Raises:
        RuntimeError: It is no number, or more than 1 where nothing says which one this process is.
    """
    given = os.environ.get("WORLD_SIZE") or "1"
    if not given.isdecimal() or given == "0":
        raise RuntimeError(f"WORLD_SIZE must be a number of processes, got {given!r}; unset it")
    if given != "1" and not any(rank in os.environ for rank in _RANKS):
        raise RuntimeError(
            f"WORLD_SIZE asks for {given} processes, and no launcher has started this one (RANK is "
            "not set); unset WORLD_SIZE, or start with torchrun"
        )
    return int(given)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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
        found = torch.accelerator.current_accelerator()
        here = "cpu" if found is None else f"cpu, {found.type}"
        raise ValueError(
            f"device must be one that torch can use here ({here}), got {name!r}"
        ) from error
