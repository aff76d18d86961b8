"""Train the model of a recipe: one loop for every model and machine, on Accelerate.

A killed run resumes from its newest checkpoint to the same weights, bit for bit on one machine.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ssmzoo.environment.messages import first_line, missing
from ssmzoo.files import few_files, is_utf8
from ssmzoo.recipe import Recipe, load_recipe
from ssmzoo.training.checkpoint import checkpoints, locked, step_of
from ssmzoo.training.distributed import (
    is_of_another_process,
    is_out_of_memory,
    make_accelerator,
    require_launched,
    separate_state,
)
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.stopping import Stopped, StopRequest
from ssmzoo.training.trackers import finish_trackers, require_trackers
from ssmzoo.training.trainer import Run

logger = logging.getLogger("ssmzoo")


def train(
    recipe: str | Path | Recipe,
    *,
    output_dir: str | Path,
    resume: bool = False,
    overrides: Sequence[str] = (),
    stock: bool = False,
) -> Path:
    """Train the model of a recipe and return the run's folder.

    The folder holds ``recipe.yaml``, ``run.json``, ``data.json``, ``metrics.jsonl``, ``loss.png``,
    ``checkpoints/``, ``trackers/`` if the recipe names some, and, at the end, ``model/``, which
    AutoModelForCausalLM and AutoTokenizer load.
    A supervised task's model has the head for the task, which the Auto class for it loads; the
    score of the test split is in ``run.json`` and ``results.json``.

    SIGTERM, SIGHUP (a closed terminal), SIGUSR1, SIGUSR2, SIGXCPU and SIGINT (Ctrl-C) stop the run
    after the step, in all its processes, unless the process ignored them at its start (``nohup``):
    it is saved, one line names the command that resumes it, and
    :class:`ssmzoo.training.stopping.Stopped` is raised, a KeyboardInterrupt. A second signal, at
    least a second later, stops at once, unless a launcher started the process. Signals are handled
    only while this function runs in the main thread, and as before afterwards.

    Away from a terminal the logger ``ssmzoo.metrics`` shows every line of ``metrics.jsonl``, at
    INFO.
    An ``Accelerator`` that was made before neither changes the run nor is changed by it.

    Args:
        recipe: A YAML file, the name of a shipped recipe, or a recipe.
        output_dir: The run's folder.
        resume: Resume from the folder's newest checkpoint, or start if the folder is empty. Of
            ``model``, ``data`` and ``train`` only these may differ from the recipe that the run
            began with: ``train.steps``, ``train.tokens``, ``train.epochs``, ``train.stop_at``,
            ``train.accumulate``, ``train.gradient_checkpointing``,
            ``train.sequence_parallel``, ``data.workers``, ``model.stock``, and the place of the
            data. The differences are listed in ``run.json`` under ``changes``.
        overrides: ``section.field=value``; they win over the recipe.
        stock: Set the recipe's ``model.stock``.

    Raises:
        LookupError: A recipe, field, family, data set or tokenizer that does not exist.
        ValueError: A wrong value in the recipe, or data that cannot be used.
        RuntimeError: The machine: a folder in use or not writable, a damaged checkpoint, too little
            memory, too many open files, a launcher that started too few processes, another
            process that ended, a loss that is not finite.
        Stopped: A signal told the run to stop, and it is saved.
    """
    overrides = [*overrides, *(["model.stock=true"] if stock else [])]
    chosen = load_recipe(recipe, overrides).with_absolute_paths()
    require_launched()
    request = StopRequest()
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise missing("training needs accelerate", "train", error) from error
    require_trackers(chosen.log.trackers or ())
    with request.handled(), few_files(), separate_state():
        return _train(chosen, Path(output_dir).expanduser().absolute(), resume, request)


def _train(recipe: Recipe, folder: Path, resume: bool, request: StopRequest) -> Path:
    import torch

    if not is_utf8(str(folder)):
        raise ValueError(f"output_dir must be a path in UTF-8, got {str(folder)!a}")
    # a process group that the caller made stays
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    accelerator = make_accelerator(recipe, folder)
    alone = accelerator.num_processes == 1
    # the process that failed says why before the others notice that it is gone
    leave = alone
    run: Run | None = None
    try:
        with locked(folder) if accelerator.is_main_process else nullcontext():
            with request.obeyed_at_once() if alone else nullcontext():
                run = Run(accelerator, recipe, RunFolder(folder), request, resume=resume)
            run.go()
        leave = True
    except Stopped as stopped:
        leave = True
        told = Stopped(stopped.signal, f"{stopped} {_where_it_stopped(folder, run, alone)}")
        if accelerator.is_main_process:
            logger.warning("%s", told)
        raise told from None
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise RuntimeError(_memory_message(error, recipe, folder, run)) from error
        if not (isinstance(error, RuntimeError) and is_of_another_process(error)):
            raise
        saved = checkpoints(folder / "checkpoints")
        way_out = f"resume from {saved[-1]}" if saved else "start again, there is no checkpoint yet"
        raise RuntimeError(
            f"another process of this run has ended, or hangs: see the launcher's report; {way_out}"
        ) from error
    finally:
        if run is not None:
            run.data.close()
        finish_trackers(accelerator)
        accelerator.free_memory()
        if leave and not joined:
            accelerator.end_training()
    return folder


def _where_it_stopped(folder: Path, run: Run | None, alone: bool) -> str:
    """Return where a run stopped and how it goes on."""
    if not (folder / "recipe.yaml").exists():
        return "before anything was trained; give the same command again, with or without --resume"
    if run is not None and run.finished:
        return f"when the run was finished; its model is {folder / 'model'}"
    saved = checkpoints(folder / "checkpoints")
    where = f"after step {step_of(saved[-1])}, which is saved" if saved else "before its first step"
    launcher = "" if alone else "under the same launcher, "
    return f"{where}; to go on: {launcher}{_resuming(folder)}"


def _resuming(folder: Path) -> str:
    """Return the command that goes on with a run."""
    words = ["ssmzoo", "train", str(folder / "recipe.yaml"), "--output", str(folder), "--resume"]
    return shlex.join(words)


def _memory_message(error: BaseException, recipe: Recipe, folder: Path, run: Run | None) -> str:
    """Return one line: the error, settings that need less memory, and the command to resume."""
    options, steps = recipe.train, 0 if run is None else run.progress.step
    seq_len = "" if options.seq_len is None else f" (train.seq_len = {options.seq_len})"
    checkpointing = ""
    if may_checkpoint := recipe.align is None or recipe.align.match != "mixers":
        now = str(options.gradient_checkpointing).lower()
        checkpointing = f"set train.gradient_checkpointing = {now} to true, "
    text = (
        f"out of memory after {steps} steps: {first_line(error)}; raise train.accumulate = "
        f"{options.accumulate}, so that fewer of the train.batch_size = {options.batch_size} rows "
        f"are computed at a time, {checkpointing}or start a new run with shorter rows{seq_len} or "
        "a smaller model"
    )
    if not (folder / "recipe.yaml").exists():
        return text
    saved = checkpoints(folder / "checkpoints")
    kept = f"the checkpoint of step {step_of(saved[-1])} is intact; " if saved else ""
    parts = 1 if run is None else run.processes.readers
    share = options.batch_size // parts
    fewer = range(options.accumulate + 1, share + 1)
    accumulate = next((n for n in fewer if share % n == 0), None)
    change = ""
    if accumulate is not None:
        change = f" --set train.accumulate={accumulate}"
    elif may_checkpoint and options.gradient_checkpointing is not True:
        change = " --set train.gradient_checkpointing=true"
    return f"{text}; {kept}to go on: {_resuming(folder)}{change}"
