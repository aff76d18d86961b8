"""Train a model as a recipe says: one loop for every model and machine, on Accelerate.

A killed run resumes from its newest checkpoint to the same weights, bit for bit on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ssmzoo.checkpoint import checkpoints, locked
from ssmzoo.loop import Run
from ssmzoo.machine import is_of_another_process, make_accelerator, require_launched
from ssmzoo.optimizer import make_optimizer, param_groups
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.run_folder import RunFolder

__all__ = ["make_optimizer", "param_groups", "train"]


def train(
    recipe: str | Path | Recipe,
    *,
    output_dir: str | Path,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Train the model of a recipe and return the run's folder.

    The folder holds ``recipe.yaml``, ``run.json``, ``data.json``, ``metrics.jsonl``, ``loss.png``,
    ``checkpoints/`` and, at the end, ``model/``, which AutoModelForCausalLM and AutoTokenizer load.
    A supervised task's model has the head for the task, which the Auto class for it loads; the
    score of the test split is in ``run.json`` and ``results.json``.

    Args:
        recipe: A YAML file, the name of a shipped recipe, or a recipe.
        output_dir: The run's folder.
        resume: Continue the run that is there from its newest checkpoint; begin it where there is
            none. Only ``train.steps``, ``train.tokens`` or ``train.epochs``, ``train.stop_at``,
            ``eval``, ``checkpoint`` and ``log`` may differ from the recipe that it began with.
        overrides: ``section.field=value``; they win over the recipe.

    Raises:
        LookupError: A recipe, field, family, data set or tokenizer that does not exist.
        ValueError: A wrong value in the recipe, or data that cannot be used.
        RuntimeError: The machine: a folder in use or not writable, a damaged checkpoint, a launcher
            that did not start what it should, another process that ended, a loss that is not
            finite.
    """
    chosen = load_recipe(recipe, overrides).with_absolute_paths()
    require_launched()
    try:
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise RuntimeError("training needs accelerate: pip install 'ssmzoo[train]'") from error
    ours = not AcceleratorState._shared_state
    accelerator = make_accelerator(chosen)
    folder = Path(output_dir).absolute()
    # the process that failed says why before the others notice that it is gone
    leave = accelerator.num_processes == 1
    try:
        with locked(folder) if accelerator.is_main_process else nullcontext():
            Run(accelerator, chosen, RunFolder(folder), resume=resume).go()
        leave = True
    except RuntimeError as error:
        if not is_of_another_process(error):
            raise
        saved = checkpoints(folder / "checkpoints")
        way_out = f"resume from {saved[-1]}" if saved else "start again, there is no checkpoint yet"
        raise RuntimeError(
            f"another process of this run has ended, or hangs: see the launcher's report; {way_out}"
        ) from error
    finally:
        accelerator.free_memory()
        if ours:
            if leave:
                accelerator.end_training()
            AcceleratorState._reset_state(reset_partial_state=True)
    return folder
