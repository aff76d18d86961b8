"""Tensors in shards: every process of a run writes its own, and reads of any files what it needs.

The files are those of ``torch.distributed.checkpoint``'s Hugging Face storage: safetensors, one a
process, whose header says where in each tensor its parts lie. Its planners are told of the training
tensors' shapes alone; what is written are copies in the CPU's memory, so that training may go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

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

from ssmzoo.files import Listed
from ssmzoo.training.distributed import STEP
from ssmzoo.training.stopping import Stopped

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights by name, without the other names of what is tied.

    Those of a model that FSDP2 shards are ``DTensor``.
    """
    names, once = (
        {name for name, _ in model.named_parameters(remove_duplicate=drop)}
        for drop in (False, True)
    )
    return {name: x for name, x in model.state_dict().items() if name not in names - once}


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return size and dtype of every tensor in a folder's safetensors, in shards or whole."""
    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return found


def read_into(folder: Path, tensors: Tensors) -> None:
    """Fill tensors from a folder's safetensors: of a ``DTensor`` only this process's part is read.

    Raises:
        ValueError: A tensor is not there, or has another shape.
    """
    with warnings.catch_warnings():
        # every process reads for itself, which torch takes for a mistake
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                no_dist=True,
            )
        except CheckpointException as error:
            raise ValueError(f"{folder} does not fit the model: {_cause(error)}") from error


def share_of(
    tensors: Tensors, rank: int, count: int, buffers: Container[str] = ()
) -> dict[str, torch.Tensor]:
    """Return what a process writes: its part of what is sharded, and an equal share of the rest.

    Of ``buffers`` the first process writes all: DDP gives its own to the others before each step.
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


class Copies(DefaultSavePlanner):
    """Tensors to write, as they are now.

    Args:
        tensors: What this process writes.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        self._copies = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._copies[name] = torch.empty(local.shape, dtype=local.dtype).copy_(local.detach())

    def lookup_object(self, index: Any) -> torch.Tensor:
        """Return the copy of what torch would write."""
        return self._copies[index.fqn]

    def write(self, folder: Path, group: Any) -> list[Path]:
        """Write this process's file, flushed to the disk; all of the group must call this."""
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(self._tensors, storage_writer=writer, planner=self, process_group=group)
        return sorted(folder.glob(f"shard-{distributed.get_rank(group) + 1:05d}-*"))


class Background:
    """Writes what several processes write together in a thread of each, one after the other.

    Leaving the context waits for the last one. Errors are raised in every process, by the next
    call or on leaving.

    Attributes:
        group: The processes, on the CPU: collectives of the threads and of the training may not
            meet.
    """

    def __init__(self) -> None:
        self.group: Any = distributed.new_group(backend="gloo", timeout=STEP)
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def start(
        self,
        save_folder: Callable[[Callable[[Path], Listed]], Any],
        part: Callable[[Path, Any], Listed],
        rest: Callable[[Path], None],
    ) -> None:
        """Save together, when the last save is done.

        Args:
            save_folder: Has its argument fill a folder, in the first process.
            part: Writes this process's files; it is given the folder and the group.
            rest: Writes what the first process writes alone.
        """

        def first(fill: Callable[[Path], list[Listed]]) -> None:
            def write(folder: Path) -> Listed:
                listed = {name: facts for files in fill(folder) for name, facts in files.items()}
                rest(folder)
                return listed

            save_folder(write)

        self.wait()
        self._writing = self._thread.submit(
            write_together, self.group, first, lambda folder: part(folder, self.group)
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
            # what is raised already says more, but for a stop, which says that all is saved
            with suppress(*([] if kind is None or issubclass(kind, Stopped) else [Exception])):
                self.wait()
        finally:
            self._thread.shutdown()


def write_together(
    group: Any, first: Callable[[Callable[[Path], list[T]]], None], part: Callable[[Path], T]
) -> None:
    """Let the processes of a group write into a folder that the first one makes.

    Args:
        group: The processes.
        first: Called in the first process. It calls its argument with the folder, which has every
            process write its part there and returns what they returned.
        part: Writes a process's part into the folder.

    Raises:
        Exception: What ``first`` raised, in every process; of a part, its error in any process.
    """

    def told(value: Any) -> Any:
        box = [value]
        distributed.broadcast_object_list(box, group=group)
        return box[0]

    def fill(folder: Path) -> list[T]:
        main = distributed.get_rank(group) == 0
        outcomes: list[Any] | None = [None] * distributed.get_world_size(group) if main else None
        distributed.gather_object(_outcome(part, folder), outcomes, group=group)
        for outcome in outcomes or []:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes or []

    def begin(folder: Path) -> list[T]:
        begun.append(told(folder))
        return fill(folder)

    begun: list[Path | None] = []
    error: Exception | None = None
    if distributed.get_rank(group) == 0:
        try:
            first(begin)
        except Exception as caught:
            error = caught
        if not begun:
            told(None)
    elif (folder := told(None)) is not None:
        fill(folder)
    error = told(error)
    if error is not None:
        raise error


def _outcome(part: Callable[[Path], T], folder: Path) -> T | BaseException:
    try:
        return part(folder)
    except CheckpointException as error:
        return _cause(error)
    except Exception as error:
        return error


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the first process that torch names."""
    return next(iter(error.failures.values()))[0]
