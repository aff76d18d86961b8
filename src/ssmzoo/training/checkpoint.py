"""Checkpoints of a run: what they hold, and how they are written, found, checked and restored.

- A folder is written beside its place under a hidden name, flushed to the disk, and then renamed:
  a checkpoint is complete or not there at all.
- A checkpoint lists size and sha256 of its files; a resume refuses one that differs.
- No pickle: tensors are safetensors, the rest is JSON.
- One process writes whole tensors. Of several each writes its own parts, into ``shards/``.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssmzoo.checkpoints.weights import OPTIMIZER, SHARDS, is_sharded
from ssmzoo.environment.messages import without_bars
from ssmzoo.files import (
    CannotWriteError,
    Listed,
    file_digest,
    flush,
    remove_folder,
    write_folder,
    writing,
)
from ssmzoo.recipe import Recipe
from ssmzoo.training.distributed import gathered
from ssmzoo.training.metrics import Meter
from ssmzoo.training.segments import share_of_carried

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from ssmzoo.data.rows import RowSource
    from ssmzoo.training.step import Learner

CONTENTS = "contents.json"
_NAME = re.compile(r"step-\d+")
# what file systems answer that know no such locks: NFS without lockd, Lustre, FUSE
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

logger = logging.getLogger("ssmzoo")


class InUseError(RuntimeError):
    """Another process writes into the folder."""


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds of it beside model, optimizer and data.

    Attributes:
        step: Steps taken.
        tokens: Tokens trained on, over all processes, at the last line of the metrics.
        best: Step and metrics of the best validation, None before the first.
        stopped: Whether the last validation was as good as ``train.stop_at`` asks.
        validation_due: Whether a validation is due after the last step and not done.
        validated: The step of the last validation.
        rate: The learning rate of the last step; None if an earlier version saved it.
        meter: Losses and time since the last line.
    """

    step: int = 0
    tokens: int = 0
    best: dict[str, float | int] | None = None
    stopped: bool = False
    validation_due: bool = False
    validated: int = 0
    rate: float | None = None
    meter: Meter = field(default_factory=Meter)

    def best_step(self, recipe: Recipe) -> int | None:
        """Return the step whose checkpoint is kept for its validation."""
        return int(self.best["step"]) if self.best is not None and recipe.checkpoint.best else None

    def lacks_last_validation(self, total: int) -> bool:
        """Return whether ``total`` steps are done and the model of the last was not validated."""
        return self.step == total != self.validated

    def state(self, recipe: Recipe) -> dict[str, Any]:
        """Return it as JSON."""
        stop = recipe.train.stop_at
        return {
            "step": self.step,
            "tokens": self.tokens,
            **self.meter.state(),
            "best": self.best,
            "stopped": stop.model_dump() if stop is not None and self.stopped else None,
            "unjudged": self.validation_due,
            "validated": self.validated,
            "rate": self.rate,
        }

    def restore(self, state: dict[str, Any], recipe: Recipe, root: Path) -> None:
        """Continue from what :meth:`state` returned; ``root`` holds the run's checkpoints."""
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        self.meter.restore(state)
        best, stop = self.best_step(recipe), recipe.train.stop_at
        # it is gone where newer checkpoints were removed by hand
        if best is not None and not checkpoint_of(root, best).exists():
            self.best = None
        self.stopped = stop is not None and state["stopped"] == stop.model_dump()
        self.validation_due = state.get("unjudged", False)
        # an earlier version saved neither
        self.validated, self.rate = state.get("validated", self.step), state.get("rate")


class Contents(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        part: Writes this process's shards into the folder, together with those of a group, and
            returns its files; None if the run has one process, whose ``rest`` is all.
        rest: Writes what the first process writes alone.
    """

    part: Callable[[Path, Any], Listed] | None
    rest: Callable[[Path], None]


def gather(
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    position: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    image_processor: Mapping[str, Any] | None,
) -> Contents:
    """Gather what a checkpoint holds; all processes must call this.

    That is weights, tokenizer or image processor, optimizer, carried states, and in ``state.json``
    the run's progress and each process's random state and ``position`` in the data. Of several
    processes each copies the tensors that it writes into the CPU's memory, no others.
    """
    from accelerate.utils import gather_object

    processes = gather_object([{"position": position, "random": random_state()}])
    state = {
        **progress.state(recipe),
        "schedule": learner.schedule.state(),
        "processes": processes,
    }

    def describe(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if image_processor is not None:
            (folder / "preprocessor_config.json").write_text(
                json.dumps(dict(image_processor), indent=2), encoding="utf-8"
            )
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    gather_tensors = _gather_whole if learner.processes.count == 1 else _gather_shards
    part, write_model = gather_tensors(learner)

    def rest(folder: Path) -> None:
        write_model(folder)
        describe(folder)

    return Contents(part, rest)


def _gather_whole(learner: Learner) -> Contents:
    """Gather the tensors of the only process."""
    from safetensors.torch import save_file

    from ssmzoo.training.shards import weights_of

    model = learner.bare
    weights = {name: gathered(tensor) for name, tensor in weights_of(model).items()}
    if learner.adapter is not None:  # which has files of its own
        own = {id(parameter) for parameter in learner.adapter.parameters()}
        mine = {n for n, p in model.named_parameters() if id(p) in own}
        weights = {name: tensor for name, tensor in weights.items() if name not in mine}
    moments = {
        name: gathered(value).detach().cpu().contiguous()
        for name, value in optimizer_tensors(model, learner.optimizer).items()
    }
    carried = learner.objective.carried()

    def write(folder: Path) -> None:
        with without_bars():
            model.save_pretrained(folder, state_dict=weights)
        if learner.adapter is not None:
            learner.adapter.save_pretrained(folder)
        save_file(moments, folder / OPTIMIZER)
        if carried:
            save_file(carried, folder / _carried_by(0))

    return Contents(None, write)


def _gather_shards(learner: Learner) -> Contents:
    """Gather this process's share of the tensors."""
    from safetensors.torch import save_file

    from ssmzoo.training.shards import Copies, share_of, weights_of

    model, processes = learner.bare, learner.processes
    tensors = {**weights_of(model), **optimizer_tensors(model, learner.optimizer)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    copies = Copies(share_of(tensors, processes.rank, processes.count, buffers))
    carried = {name: tensor.clone() for name, tensor in learner.objective.carried().items()}
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [learner.architecture], model.dtype
    generation = copy.deepcopy(model.generation_config) if model.can_generate() else None

    def part(folder: Path, group: Any) -> Listed:
        files = copies.write(folder / SHARDS, group)
        if carried:
            files.append(folder / _carried_by(processes.rank))
            save_file(carried, files[-1])
            flush(files[-1])
        return _listed(folder, files)

    def rest(folder: Path) -> None:
        config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)

    return Contents(part, rest)


def _carried_by(rank: int) -> str:
    return f"carried-{rank:05d}.safetensors"


def restore_run(
    checkpoint: Path,
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    source: RowSource[Any],
) -> None:
    """Continue from a checkpoint, whose weights the learner has already if they are whole.

    Of what is sharded, each process reads its own parts alone, from whole files, too.

    Raises:
        RuntimeError: Another number of processes, of a run that carries states.
        ValueError: A position in a stream that is of another version, or of other pieces.
    """
    from safetensors.torch import load_file

    from ssmzoo.training.shards import read_into, weights_of

    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    progress.restore(state, recipe, checkpoint.parent)
    world, rank = learner.processes.count, learner.processes.rank
    before, segments = state["processes"], recipe.train.segments
    carries = segments is not None and segments.carry
    if len(before) != world and carries:
        raise RuntimeError(
            f"a run that carries states must resume on as many processes as before, {len(before)}, "
            f"got {world}"
        )
    source.seek(*(process["position"] for process in before))
    tensors = checkpoint
    if is_sharded(checkpoint):
        tensors = checkpoint / SHARDS
        read_into(tensors, weights_of(learner.bare))
    load_optimizer(learner.bare, learner.optimizer, tensors)
    learner.schedule.restore(progress.step, state["schedule"])
    if rank < len(before):
        set_random_state(before[rank]["random"])
    if carries:
        kept = [load_file(checkpoint / _carried_by(i)) for i in range(world)]
        share = share_of_carried(kept, rank, recipe.train.accumulate)
        learner.objective.carry_on(share, learner.processes.accelerator.device)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, making it first, against a second run into it.

    A file system without locks is warned of, and the folder is not held.

    Raises:
        InUseError: Another process holds it.
        RuntimeError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise RuntimeError(f"output_dir must be a writable folder: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise InUseError(
                f"another run (process {lock.read().strip() or 'unknown'}) is writing into "
                f"{folder}; wait for it, or choose another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RuntimeError(f"output_dir {folder} cannot be locked: {error}") from None
            logger.warning(
                "the file system of %s has no locks (%s): see to it that no second run writes "
                "into it",
                folder,
                error.strerror,
            )
        with writing(folder / ".lock"):
            lock.truncate(0)
            os.write(
                lock.fileno(), str(os.getpid()).encode()
            )  # past the buffer, which would keep it
        yield


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], Listed | None],
    *,
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write the checkpoint of a step and remove all but the newest ``keep`` and that of ``spare``.

    One that cannot be removed is warned of.

    Args:
        root: The run's checkpoints.
        step: The step.
        write: Fills the folder. Of files that it returns, size and digest are taken from there.
        keep: How many stay.
        spare: One more that stays.

    Raises:
        RuntimeError: It cannot be written; earlier checkpoints are as they were.
    """

    def write_listed(folder: Path) -> None:
        known = write(folder) or {}
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        rest = [path for path in files if str(path.relative_to(folder)) not in known]
        listed = dict(sorted({**known, **_listed(folder, rest)}.items()))
        (folder / CONTENTS).write_text(json.dumps(listed, indent=1), encoding="utf-8")

    target = checkpoint_of(root, step)
    for remains in root.glob(".step-*.replaced"):  # of a run that was killed while it removed them
        shutil.rmtree(remains, ignore_errors=True)
    try:
        write_folder(target, write_listed)
    except CannotWriteError as error:
        raise RuntimeError(f"the checkpoint {error}, then resume the run") from error
    for old in checkpoints(root)[:-keep]:
        if step_of(old) != spare:
            try:
                remove_folder(old)
            except OSError as error:  # a reader on another machine holds a file, say
                logger.warning(
                    "the old checkpoint %s cannot be removed: %s; the next save tries again",
                    old,
                    error.strerror or error,
                )
    return target


def _listed(folder: Path, files: Iterable[Path]) -> Listed:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, file_digest(path)) for path in files
    }


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest checkpoint, None if there is none.

    Raises:
        RuntimeError: It is damaged; the message names the file and the newest one that is whole.
    """
    newest_first = checkpoints(root)[::-1]
    if not newest_first:
        return None
    damage = damage_of(newest_first[0])
    if damage is None:
        return newest_first[0]
    good = next((path for path in newest_first[1:] if damage_of(path) is None), None)
    way_out = (
        f"the newest whole checkpoint is {good}; remove what is newer to resume from it"
        if good is not None
        else "there is no whole checkpoint; start the run again"
    )
    raise RuntimeError(f"the checkpoint {newest_first[0]} is damaged: {damage}; {way_out}")


def checkpoint_of(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, if it is kept."""
    return root / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is."""
    try:
        listed = json.loads((checkpoint / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{CONTENTS} cannot be read"
    for name, (size, digest) in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes and must have {size}"
        if file_digest(path) != digest:
            return f"{name} has changed since it was written"
    return None


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by parameter name and its own, with a slash between."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give the optimizer the state that :func:`optimizer_tensors` returned, from safetensors."""
    import torch

    from ssmzoo.training.shards import read_into, stored_tensors

    stored = stored_tensors(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for i, parameter in enumerate(parameters):
        prefix = f"{names[id(parameter)]}/"
        state[i] = {}
        for name in [name for name in stored if name.startswith(prefix)]:
            size, dtype = stored[name].size, stored[name].properties.dtype
            like = parameter.ndim > 0 and size == parameter.shape  # a moment; else a count
            state[i][name.removeprefix(prefix)] = (
                torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if like
                else torch.empty(size, dtype=dtype)
            )
    named = zip(parameters, state.values(), strict=True)
    read_into(folder, {f"{names[id(p)]}/{key}": x for p, own in named for key, x in own.items()})
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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
