"""Tensors in shards: each process of a run writes its shard, and reads its parts of any shards.

The files are those of ``torch.distributed.checkpoint``'s Hugging Face storage: safetensors, one a
process, whose header says where in each tensor its parts lie. Copies in the CPU's memory are
written, so that training goes on meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ssmzoo.training.distributed import STEP
from ssmzoo.training.stopping import Stopped

Tensors = Mapping[str, torch.Tensor]
_DISABLED = "torch.distributed is disabled"  # torch takes that for a mistake


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights by name, each tied weight once.

    Those of a model that FSDP2 shards are ``DTensor``.
    """
    names, once = (
        {name for name, _ in model.named_parameters(remove_duplicate=drop)}
        for drop in (False, True)
    )
    return {name: x for name, x in model.state_dict().items() if name not in names - once}


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return size and dtype of every tensor in a folder's safetensors."""
    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return found


def read_into(folder: Path, tensors: Tensors) -> None:
    """Fill tensors from a folder's safetensors: of a ``DTensor`` only this process's part is read.

    Raises:
        ValueError: A tensor is not there, or has another shape.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _DISABLED)  # every process reads for itself
        try:
            load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                no_dist=True,
            )
        except CheckpointException as error:
            raise ValueError(f"{folder} does not fit the model: {_cause(error)}") from error


def read_all(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the whole tensors of a folder's safetensors whose names begin with a prefix."""
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in stored_tensors(folder).items()
        if name.startswith(prefix)
    }
    read_into(folder, tensors)
    return tensors


def share_of(
    tensors: Tensors, rank: int, count: int, buffers: Container[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a process's shard: its own ``DTensor`` parts, a share of the others.

    The first process writes all ``buffers``: DDP gives its own to the others before each step.
    """
    mine, sizes = {}, [0] * count
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            owner = rank
        else:
            owner = 0 if name in buffers else sizes.index(min(sizes))
            sizes[owner] += tensor.nbytes
        if owner == rank:
            mine[name] = tensor
    return mine


def optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter name and its own, with a slash between."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give the optimizer the state that :func:`optimizer_tensors` returned, from safetensors."""
    stored = stored_tensors(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for i, parameter in enumerate(parameters):
        prefix, state[i] = f"{names[id(parameter)]}/", {}
        for name in [name for name in stored if name.startswith(prefix)]:
            size, dtype = stored[name].size, stored[name].properties.dtype
            is_moment = parameter.ndim > 0 and size == parameter.shape  # else a count
            tensors[name] = state[i][name.removeprefix(prefix)] = (
                torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if is_moment
                else torch.empty(size, dtype=dtype)
            )
    read_into(folder, tensors)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class Snapshot(DefaultSavePlanner):
    """A process's share of the tensors of a checkpoint, copied as they are now.

    Args:
        tensors: The tensors that this process writes.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        self._copies = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._copies[name] = torch.empty(local.shape, dtype=local.dtype).copy_(local.detach())

    def lookup_object(self, index: Any) -> torch.Tensor:
        """Return the copy of a tensor, which torch writes in its place."""
        return self._copies[index.fqn]

    def write(self, folder: Path, group: Any) -> None:
        """Write this process's file, flushed to the disk; all of the group must call this.

        ``group`` is None for a run of one process.
        """
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _DISABLED)
            save(
                self._tensors,
                storage_writer=writer,
                planner=self,
                process_group=group,
                no_dist=group is None,
            )


class Background:
    """Writes checkpoints in a thread of each process, one after the other.

    Leaving the context waits for the last one. Errors are raised in every process, by the next
    call or on leaving.

    Attributes:
        group: The processes that write together, on the CPU: collectives of the threads and of the
            training may not meet. None for one process.
    """

    def __init__(self, processes: int) -> None:
        self.group: Any = None
        if processes > 1:
            self.group = distributed.new_group(backend="gloo", timeout=STEP)
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def start(
        self,
        save_folder: Callable[[Callable[[Path], None]], Any],
        write_part: Callable[[Path, Any], None],
        write_rest: Callable[[Path], None],
    ) -> None:
        """Write a checkpoint, when the last one is written.

        Args:
            save_folder: Has its argument fill a folder; called in the first process.
            write_part: Writes this process's files; it is given the folder and the group.
            write_rest: Writes the other files; called in the first process.
        """
        self.wait()
        self._writing = self._thread.submit(
            _write_together, self.group, save_folder, write_part, write_rest
        )

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            RuntimeError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # an error that is raised already says more; a stop claims that all is saved
            with suppress(*([] if kind is None or issubclass(kind, Stopped) else [Exception])):
                self.wait()
        finally:
            self._thread.shutdown()


def _write_together(
    group: Any,
    save_folder: Callable[[Callable[[Path], None]], Any],
    write_part: Callable[[Path, Any], None],
    write_rest: Callable[[Path], None],
) -> None:
    """Let the processes of a group write into a folder that the first one makes and names.

    Raises:
        Exception: The error of ``save_folder``, or the first one of a part, in every process.
    """
    main = group is None or distributed.get_rank(group) == 0
    begun: list[Path | None] = []

    def broadcast(value: Any) -> Any:
        box = [value]
        if group is not None:
            distributed.broadcast_object_list(box, group=group)
        return box[0]

    def write_parts(folder: Path) -> None:
        outcome = _error_of(write_part, folder, group)
        outcomes = [outcome]
        if group is not None:
            everyone = [None] * distributed.get_world_size(group) if main else None
            distributed.gather_object(outcome, everyone, group=group)
            outcomes = everyone or []
        for error in outcomes:
            if error is not None:
                raise error

    def fill(folder: Path) -> None:
        begun.append(broadcast(folder))
        write_parts(folder)
        write_rest(folder)

    error: Exception | None = None
    if main:
        try:
            save_folder(fill)
        except Exception as caught:
            error = caught
        if not begun:
            broadcast(None)
    elif (folder := broadcast(None)) is not None:
        write_parts(folder)
    error = broadcast(error)
    if error is not None:
        raise error


def _error_of(
    write_part: Callable[[Path, Any], None], folder: Path, group: Any
) -> BaseException | None:
    try:
        write_part(folder, group)
    except CheckpointException as error:
        return _cause(error)
    except Exception as error:
        return error
    return None


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the first process that torch names."""
    return next(iter(error.failures.values()))[0]
