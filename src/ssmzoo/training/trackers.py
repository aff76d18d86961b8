"""Experiment trackers, through Accelerate: they get the recipe, and the lines of the run's log.

Only the first process calls these functions but :func:`require_trackers`. A tracker never changes
a run: what it draws of random numbers is given back, and one that fails is left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ssmzoo.environment.messages import first_line, suggestion
from ssmzoo.environment.portable import portable
from ssmzoo.files import write_text
from ssmzoo.training.run_state import random_state, set_random_state

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ssmzoo.recipe import Recipe

logger = logging.getLogger("ssmzoo")
SAMPLED_TOKENS = 200


def require_trackers(names: Iterable[str]) -> None:
    """Check that Accelerate knows trackers, and that their packages are installed.

    Raises:
        LookupError: It does not know one.
        RuntimeError: A package is missing.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    installed = {str(kind) for kind in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise LookupError(
                f"log.trackers: no tracker {name!r}{suggestion(name, LOGGER_TYPE_TO_CLASS)}; there "
                f"are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name in LoggerType.list() and name not in installed:
            raise RuntimeError(
                f"log.trackers: {name!r} needs the package {name}, which is not installed: "
                f"pip install {name}, or leave it out of log.trackers"
            )


def start_trackers(accelerator: Accelerator, recipe: Recipe, run: Path, *, step: int) -> None:
    """Start the trackers that the recipe names, for a run that begins or resumes after ``step``.

    A resumed run goes on in TensorBoard, wandb and Trackio; in the others it is a new one. What
    TensorBoard, wandb and aim write lies in ``trackers/`` of the run's folder.

    Raises:
        RuntimeError: One does not start.
    """
    if not recipe.log.trackers:
        return
    folder = run / "trackers"
    folder.mkdir(exist_ok=True)
    kept = folder / "id"
    if not kept.exists():
        write_text(kept, uuid4().hex)
    ident = kept.read_text(encoding="utf-8")
    arguments: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": step + 1},  # hide later steps, of before the resume
        "trackio": {"name": f"{run.name}-{ident[:8]}", "resume": "allow"},
        "wandb": {"name": run.name, "id": ident, "resume": "allow", "dir": str(folder)},
    }
    try:
        with _same_random_state():
            accelerator.init_trackers(recipe.log.project or "ssmzoo", _config(recipe), arguments)
    except Exception as error:
        for tracker in accelerator.trackers:
            with suppress(Exception):  # some never started
                tracker.finish()
        accelerator.trackers.clear()
        raise RuntimeError(
            f"log.trackers must start, {', '.join(recipe.log.trackers)} did not: "
            f"{first_line(error)}; mend that, or go on without: --set log.trackers=[]"
        ) from error


def _config(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain values by dotted names, without credentials and local folders."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                add(f"{name}.{key}" if name else key, part)
        else:
            found[name] = json.dumps(value) if isinstance(value, list) else value

    add("", portable(recipe.model_dump(exclude_none=True, mode="json")))
    return found


def track(accelerator: Accelerator, line: Mapping[str, Any]) -> None:
    """Send a line of ``metrics.jsonl``, its gauges as ``gauges/NAME/NUMBER``."""
    values = {k: v for k, v in line.items() if k not in ("step", "gauges") and v is not None}
    for name, layers in line.get("gauges", {}).items():
        values |= {f"gauges/{name}/{layer}": value for layer, value in enumerate(layers)}
    _each(accelerator, lambda tracker: tracker.log(values, step=line["step"]))


def track_picture(accelerator: Accelerator, picture: Path, *, step: int) -> None:
    """Send a picture, as ``curves``, to the trackers that take pictures."""
    if not (accelerator.trackers and picture.exists()):
        return
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(picture).convert("RGB"))

    def send(tracker: Any) -> None:
        single = tracker.name in ("aim", "clearml")  # the others take several
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        if hasattr(tracker, "log_images"):
            values = pixels if single else pixels[None]
            tracker.log_images({"curves": values}, step=step, **layout)

    _each(accelerator, send)


def track_sample(accelerator: Accelerator, model: Any, tokenizer: Any, *, step: int) -> None:
    """Send a text of a language model, drawn from its first token on, as ``sample``.

    None of a model whose weights lie on several processes, or that cannot generate.
    """
    import torch

    if not accelerator.trackers or accelerator.is_fsdp2 or not model.can_generate():
        return
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        return
    ids = torch.tensor([[first]], device=model.device)
    try:
        with _same_random_state(), accelerator.autocast():
            written = model.eval().generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=SAMPLED_TOKENS,
                do_sample=True,
                pad_token_id=first,
            )
    except Exception as error:  # the run is finished, with all that it has to leave
        logger.warning("no sample of text for the trackers: %s", first_line(error))
        return
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    _each(accelerator, lambda tracker: tracker.log({"sample": text}, step=step))


def finish_trackers(accelerator: Accelerator) -> None:
    """Let the trackers write out what they hold, and forget them."""
    _each(accelerator, lambda tracker: tracker.finish())
    accelerator.trackers.clear()


def _each(accelerator: Accelerator, call: Callable[[Any], None]) -> None:
    """Call each tracker; one that fails is left out from then on, with a warning."""
    for tracker in list(accelerator.trackers):
        try:
            with _same_random_state():
                call(tracker)
        except Exception as error:
            accelerator.trackers.remove(tracker)
            logger.warning(
                "the tracker %s fails (%s) and is left out from here on; metrics.jsonl has it all",
                tracker.name,
                first_line(error),
            )


@contextmanager
def _same_random_state() -> Iterator[None]:
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
