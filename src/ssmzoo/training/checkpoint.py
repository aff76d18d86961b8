"""Checkpoints of a run: what they hold, and how they are written, found, checked and restored.

- A folder is written beside its place under a hidden name, flushed to the disk, and then renamed:
  a checkpoint is complete or not there at all.
- A checkpoint lists size and sha256 of its files; a resume refuses one that differs.
- No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.environment.messages import without_bars
from ssmzoo.files import CannotWriteError, file_digest, remove_folder, write_folder, writing
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


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds of it beside model, optimizer and data.

    Attributes:
        step: Steps taken.
        tokens: Tokens trained on, over all processes, at the last line of the metrics.
        best: Step and metrics of the best validation, None before the first.
        stopped: Whether the last validation was as good as ``train.stop_at`` asks.
        validation_due: Whether a validation is due after the last step and not done.
        meter: Losses and time since the last line.
    """

    step: int = 0
    tokens: int = 0
    best: dict[str, float | int] | None = None
    stopped: bool = False
    validation_due: bool = False
    meter: Meter = field(default_factory=Meter)

    def best_step(self, recipe: Recipe) -> int | None:
        """Return the step whose checkpoint is kept for its validation."""
        return int(self.best["step"]) if self.best is not None and recipe.checkpoint.best else None

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


def gather(
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    position: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    image_processor: Mapping[str, Any] | None,
) -> Callable[[Path], None]:
    """Gather what a checkpoint holds and return what writes it; all processes must call this.

    That is weights, tokenizer or image processor, optimizer, carried states, and in ``state.json``
    the run's progress and each process's random state and ``position`` in the data.
    """
    from accelerate.utils import gather_object
    from safetensors.torch import save_file

    processes = gather_object([{"position": position, "random": random_state()}])
    accelerator, model = learner.processes.accelerator, learner.bare
    weights = cast("dict[str, torch.Tensor]", accelerator.get_state_dict(learner.model))
    names, once = (
        {name for name, _ in model.named_parameters(remove_duplicate=drop)}
        for drop in (False, True)
    )
    for tied in names - once:  # gathered from shards they are copies, and would be saved twice
        weights.pop(tied, None)
    moments = optimizer_tensors(model, learner.optimizer)
    carried = gather_object([learner.objective.carried()])
    state = {
        **progress.state(recipe),
        "schedule": learner.schedule.state(),
        "processes": processes,
    }

    def write(folder: Path) -> None:
        with without_bars():
            model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if image_processor is not None:
            (folder / "preprocessor_config.json").write_text(
                json.dumps(dict(image_processor), indent=2), encoding="utf-8"
            )
        save_file(moments, folder / "optimizer.safetensors")
        for rank, states in enumerate(carried):
            if states:
                save_file(states, folder / f"carried-{rank:05d}.safetensors")
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    return write


def restore_run(
    checkpoint: Path,
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    source: RowSource[Any],
) -> None:
    """Continue from a checkpoint, whose weights the learner has already.

    Raises:
        RuntimeError: Another number of processes, of a run that carries states.
        ValueError: A position in a stream that is of another version, or of other pieces.
    """
    from safetensors.torch import load_file

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
    tensors = load_file(checkpoint / "optimizer.safetensors")
    load_optimizer(learner.bare, learner.optimizer, tensors)
    learner.schedule.restore(progress.step, state["schedule"])
    if rank < len(before):
        set_random_state(before[rank]["random"])
    if carries:
        kept = [load_file(checkpoint / f"carried-{i:05d}.safetensors") for i in range(world)]
        share = share_of_carried(kept, rank, recipe.train.accumulate)
        learner.objective.carry_on(share, learner.processes.accelerator.device)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, making it first, against a second run into it.

    A file system without locks is warned of, and the folder is not held.

    Raises:
        RuntimeError: Another process holds it, or it cannot be written.
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
            raise RuntimeError(
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
    root: Path, step: int, write: Callable[[Path], None], *, keep: int, spare: int | None = None
) -> Path:
    """Write the checkpoint of a step and remove all but the newest ``keep`` and that of ``spare``.

    Raises:
        RuntimeError: It cannot be written; earlier checkpoints are as they were.
    """

    def write_listed(folder: Path) -> None:
        write(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listed = {
            str(path.relative_to(folder)): [path.stat().st_size, file_digest(path)]
            for path in files
        }
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
            with writing(old):
                remove_folder(old)
    return target


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
    """Return the optimizer's state by parameter name; all processes must call this."""
    return {
        f"{name}/{key}": gathered(value).detach().cpu().contiguous()
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
