"""A run's state in a checkpoint: gathered from all processes, and restored.

Weights, moments and carried states are tensors in shards; ``state.json`` has the run's progress and
each process's random state and position in the data.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.checkpoints.weights import SHARDS
from ssmzoo.recipe import Recipe
from ssmzoo.training.checkpoint import checkpoint_of
from ssmzoo.training.metrics import Meter
from ssmzoo.training.segments import share_of_carried

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ssmzoo.data.rows import RowSource
    from ssmzoo.training.step import Learner

_CARRIED = "carried/"  # begins the names of states carried to the next step


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps taken.
        tokens: Tokens trained on, over all processes, at the last line of the metrics.
        best: Step and metrics of the best validation, None before the first.
        stopped: Whether the last validation was as good as ``train.stop_at`` asks.
        validation_due: Whether a validation is due after the last step and not done.
        validated: The step of the last validation.
        meter: Losses and time since the last line.
    """

    step: int = 0
    tokens: int = 0
    best: dict[str, float | int] | None = None
    stopped: bool = False
    validation_due: bool = False
    validated: int = 0
    meter: Meter = field(default_factory=Meter)

    def best_step(self, recipe: Recipe) -> int | None:
        """Return the step whose checkpoint is kept as the best, None if none is."""
        return int(self.best["step"]) if self.best is not None and recipe.checkpoint.best else None

    def lacks_last_validation(self, total: int) -> bool:
        """Return whether the run has reached step ``total`` without a validation there."""
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
            "validation_due": self.validation_due,
            "validated": self.validated,
        }

    def restore(self, state: dict[str, Any], recipe: Recipe, root: Path) -> None:
        """Continue from a result of :meth:`state`; ``root`` holds the run's checkpoints."""
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        self.validation_due, self.validated = state["validation_due"], state["validated"]
        self.meter.restore(state)
        best, stop = self.best_step(recipe), recipe.train.stop_at
        # it is gone where newer checkpoints were removed by hand
        if best is not None and not checkpoint_of(root, best).exists():
            self.best = None
        # a resume may have another train.stop_at
        self.stopped = stop is not None and state["stopped"] == stop.model_dump()


def gather(
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    position: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    image_processor: Mapping[str, Any] | None,
) -> tuple[Callable[[Path, Any], None], Callable[[Path], None]]:
    """Gather the content of a checkpoint; all processes must call this.

    Each copies the tensors that it writes into the CPU's memory, no others.

    Returns:
        A function that writes this process's tensors into a folder, together with a group's other
        processes, and one that writes the other files, for the first process to call.
    """
    from accelerate.utils import gather_object

    from ssmzoo.training.shards import Snapshot, optimizer_tensors, share_of, weights_of

    model, processes = learner.bare, learner.processes
    state = {
        **progress.state(recipe),
        "schedule": learner.schedule.state(),
        "processes": gather_object([{"position": position, "random": random_state()}]),
    }
    tensors = {**weights_of(model), **optimizer_tensors(model, learner.optimizer)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    mine = share_of(tensors, processes.rank, processes.count, buffers)
    for name, tensor in learner.objective.carried().items():
        mine[f"{_CARRIED}{processes.rank}/{name}"] = tensor
    snapshot = Snapshot(mine)
    config, adapter = copy.deepcopy(model.config), copy.deepcopy(learner.adapter)
    config.architectures, config.dtype = [learner.architecture], model.dtype
    generation = copy.deepcopy(model.generation_config) if model.can_generate() else None

    def write_rest(folder: Path) -> None:
        config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
        if adapter is not None:
            adapter.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if image_processor is not None:
            (folder / "preprocessor_config.json").write_text(
                json.dumps(dict(image_processor), indent=2), encoding="utf-8"
            )
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    return lambda folder, group: snapshot.write(folder / SHARDS, group), write_rest


def restore_run(
    checkpoint: Path,
    learner: Learner,
    progress: Progress,
    recipe: Recipe,
    source: RowSource[Any],
) -> None:
    """Continue from a checkpoint; of sharded tensors, each process reads only its own parts.

    Raises:
        RuntimeError: Another number of processes, of a run that carries states.
        ValueError: A position in a stream that is of another version, or of other pieces.
    """
    from ssmzoo.training.shards import load_optimizer, read_all, read_into, weights_of

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
    tensors = checkpoint / SHARDS
    read_into(tensors, weights_of(learner.bare))
    load_optimizer(learner.bare, learner.optimizer, tensors)
    learner.schedule.restore(progress.step, state["schedule"])
    if rank < len(before):
        set_random_state(before[rank]["random"])
    if carries:
        by_process: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
        for name, tensor in read_all(tensors, _CARRIED).items():
            number, own = name.removeprefix(_CARRIED).split("/", 1)
            by_process[int(number)][own] = tensor
        share = share_of_carried(by_process, rank, recipe.train.accumulate)
        learner.objective.carry_on(share, learner.processes.accelerator.device)


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
