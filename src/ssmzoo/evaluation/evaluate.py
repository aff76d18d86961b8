"""Score any causal language model with lm-eval, and keep the scores in one file a model.

- Our own tasks (``eval/tasks``) are generated and need no network; any lm-eval task works too.
- A suite (``eval/suites``) is an lm-eval group whose entries state the metric that counts.
- The results file is written after every task, so a killed run keeps its finished tasks.

Another harness than lm-eval would be chosen in :func:`evaluate`, in place of ``Library``,
``SharedPrefixLM`` and ``score_task``: it refuses unknown names before the model is loaded, and
returns ``Score`` rows for each task. Rows are merged by task and metric, so its tasks need names of
their own; suites and ``text`` are lm-eval's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssmzoo.checkpoints.load import (
    Dtype,
    check_dtype,
    check_vocabulary,
    load_tokenizer,
    model_folder,
    model_name,
)
from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.environment.device import installed_versions, launched_processes, usable_device
from ssmzoo.environment.messages import missing
from ssmzoo.environment.places import require_writable
from ssmzoo.environment.portable import portable_command
from ssmzoo.evaluation.answers import Answers
from ssmzoo.evaluation.loading import load_to_run
from ssmzoo.evaluation.planner import batch_limits, memory_limit
from ssmzoo.evaluation.results import (
    Results,
    Score,
    adapted,
    merge,
    place_digest,
    read_results,
    recipe_of,
    require_same_model,
    source_of,
    write_results,
)
from ssmzoo.evaluation.scoring import TEXT_TASK, Library, score_task
from ssmzoo.evaluation.suites import Suite, average_score, load_suite, suites
from ssmzoo.evaluation.text import read_documents
from ssmzoo.family import foreign_versions
from ssmzoo.files import make_folder_of
from ssmzoo.tasks import symbol_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ssmzoo.modeling import StateAdapter

PACKAGES = ("ssmzoo", "torch", "transformers", "lm-eval", "datasets", "tokenizers", "numpy")


def evaluate(
    model: str | Path,
    *,
    tasks: Sequence[str] = (),
    suite: str | None = None,
    text: str | Path | None = None,
    output_dir: str | Path = "eval/results",
    name: str | None = None,
    batch_size: int | Literal["auto"] = 8,
    state_memory: float | None = None,
    limit: int | None = None,
    seed: int = 1234,
    device: str | None = None,
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    stock: bool = False,
    adapter: str | Path | None = None,
) -> Path:
    """Score a model and return its results file, ``<output_dir>/<name>.json``.

    A second call for the same model merges by (task, metric). Scores do not depend on
    ``batch_size``, nor on which other tasks are named. The processes of ``torchrun`` share the
    requests; the first one writes. What requests share is read once where the model keeps a state
    (:class:`ssmzoo.evaluation.SharedPrefixLM`). The same call goes on where one was killed.

    Args:
        model: A checkpoint folder or a Hub id.
        tasks: Names of our tasks, of lm-eval's tasks, groups and tags, or lm-eval YAML files.
        suite: A suite's name (a file in ``eval/suites``), or a suite file.
        text: A file or folder whose bits per byte are measured as well.
        output_dir: Folder of results files.
        name: Name of the model in results; by default made from ``model``.
        batch_size: Prompts a forward pass; "auto": as many as 16,384 tokens make, fewer where
            memory ends.
        state_memory: MiB of shared states that are kept at once; None: half of what is free.
        limit: Documents a task, from its beginning; all if None.
        seed: Seeds generated tasks, the order of text windows, few-shot choices and sampling.
        device: A torch device; by default a GPU where there is one.
        dtype: Type of the weights; "auto" is the checkpoint's own.
        trust_remote_code: Let a checkpoint run code of its own.
        stock: Leave transformers' recurrent models as they are, without our kernels.
        adapter: A folder with a state adapter, from which the model starts; the results name it,
            and are another model's than those without it.

    Raises:
        FileNotFoundError: ``adapter`` holds no state adapter.
        ValueError: An argument, the checkpoint, or an existing results file is unusable.
        LookupError: No such task, suite, or model; close names are suggested.
        RuntimeError: lm-eval is not installed, a task's data cannot be had, or the results cannot
            be written.
    """
    call = _Call(**{**locals(), "model": str(model)})  # so far there are the arguments alone
    names, chosen = _plan(tasks, suite, text)
    call.check()
    folder, target, metadata = model_folder(call.model), call.results_file(), call.metadata()
    earlier = read_results(target) if target.exists() else None
    _require_lm_eval()

    from ssmzoo.evaluation.lm_eval_log import tamed
    from ssmzoo.evaluation.scorer import SharedPrefixLM

    with tamed(), _processes() as writes:
        tokenizer = load_tokenizer(call.model, folder, trust_remote_code)
        if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
            raise ValueError(
                f"the tokenizer of {call.model!r} must have a bos_token or an eos_token"
            )
        symbols = symbol_count(tokenizer)
        if symbols is not None:
            metadata["vocab_size"] = symbols
        library = Library(metadata)
        # a suite's entries travel as groups of one, which carry the metric that counts
        members = [{"group": chosen.name, "task": [e]} for e in chosen.entries] if chosen else []
        specs: list[str | dict[str, Any]] = [*names, *members]
        library.check(specs)
        network, started = call.load(folder)
        check_vocabulary(network, tokenizer)
        described = _described(call, target, folder, network, started)
        if earlier is not None:
            require_same_model(earlier, described)
        answers = call.answers(target, described)
        lm = SharedPrefixLM(
            network,
            tokenizer,
            batch_size=batch_size,
            state_memory=state_memory,
            answers=answers,
        )
        scores: list[Score] = []
        for spec in specs:
            new = score_task(lm, library.load(spec), limit=limit, seed=seed, symbols=symbols)
            if not isinstance(spec, str):
                for score in new:
                    score["suite"] = spec["group"]
            scores += new
            if writes:
                _add(target, described, new)
        if writes and chosen is not None and chosen.average:
            own = [score for score in scores if score.get("suite") == chosen.name]
            _add(target, described, [average_score(chosen, own)])
        answers.remove()
    return target


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments of :func:`evaluate`; the results keep the command line that they make."""

    model: str
    tasks: Sequence[str]
    suite: str | None
    text: str | Path | None
    output_dir: str | Path
    name: str | None
    batch_size: int | str
    state_memory: float | None
    limit: int | None
    seed: int
    device: str | None
    dtype: Dtype
    trust_remote_code: bool
    stock: bool
    adapter: str | Path | None

    def check(self) -> None:
        """Fail if a number or the dtype is out of range."""
        for argument, value in (("batch_size", self.batch_size), ("limit", self.limit)):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}")
        batch_limits(self.batch_size)
        memory_limit(self.state_memory)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and {2**32 - 1}, got {self.seed}")
        check_dtype(self.dtype)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of all tasks; see lm-eval's ``--metadata``."""
        told: dict[str, Any] = {"seed": self.seed}
        if self.text is not None:
            digest = hashlib.sha256()
            for document in map(str.encode, read_documents(self.text)):
                digest.update(len(document).to_bytes(8, "little") + document)
            told |= {"text": str(self.text), "text_sha256": digest.hexdigest()[:16]}
        return told

    def results_file(self) -> Path:
        """Return the results file, after trying whether its folder can be written to."""
        name = self.name
        if name is None:
            name = model_name(self.model)
            name += "" if self.adapter is None else f"-{Path(self.adapter).resolve().name}"
        if name.startswith(".") or "/" in name or not (name.strip() and name.isprintable()):
            raise ValueError(
                "name must be a file's, without '/', a control character or a dot before it, got "
                f"{name!r}; give another one (--name)"
            )
        folder = Path(self.output_dir)
        require_writable(folder, "output_dir")  # it is made when there are scores
        return folder / f"{name}.json"

    def load(self, folder: Path | None) -> tuple[PreTrainedModel, StateAdapter | None]:
        """Return the model on its device, and the state adapter that it starts from."""
        return load_to_run(
            self.model,
            folder,
            device=usable_device(_device_of_process() if self.device is None else self.device),
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            stock=self.stock,
            adapter=self.adapter,
        )

    def answers(self, target: Path, described: Results) -> Answers:
        """Return the answers that a killed call for the same weights left beside the results."""
        model, versions = described["model"], described["versions"]
        if model["revision"] is None:  # the weights are not known
            return Answers()
        facts = [model["revision"], model.get("place"), self.dtype, self.stock, versions]
        path = target.with_name(f".{target.name}.answers")
        return Answers(path, facts, suffix=os.environ.get("RANK", "0"))

    def command(self) -> str:
        """Return the command line that does the same again, with defaults that decide."""
        words = ["ssmzoo", "eval"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "model":
                words.append(value)
            elif field.name == "tasks":
                words += ["--tasks", ",".join(value)] if value else []
            elif value is not None and value is not False:
                flag = f"--{field.name.removesuffix('_dir').replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return portable_command(words)


def _described(
    call: _Call,
    target: Path,
    folder: Path | None,
    network: PreTrainedModel,
    started: StateAdapter | None,
) -> Results:
    """Return a results file without scores: the model, the machine, the versions."""
    from ssmzoo_kernels.machine import environment, hardware

    source, revision = source_of(call.model), getattr(network.config, "_commit_hash", None)
    parts: list[str | Path] = [call.model if folder is None else folder]
    if folder is not None:
        revision = weights_revision(folder)
    if started is not None:
        parts.append(Path(str(call.adapter)))
        source, revision = adapted(source, source_of(str(call.adapter)), revision, started.digest())
    results: Results = {
        "model": {
            "name": target.stem,
            "source": source,
            "revision": revision,
            "model_type": network.config.model_type,
            "parameters": network.num_parameters(),
        },
        "results": [],
        "versions": installed_versions(*PACKAGES) | foreign_versions(network.config),
        "hardware": hardware(network.device),
        "environment": environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": call.command(),
    }
    if any(isinstance(part, Path) for part in parts):
        results["model"]["place"] = place_digest(target, *parts)
    if folder is not None and folder.resolve().name == "model":
        recipe = folder.resolve().parent / "recipe.yaml"
        if recipe.is_file():
            results["recipe"] = recipe_of(recipe)
    return results


def _add(target: Path, described: Results, new: list[Score]) -> None:
    """Write new scores into a results file, to which another call may have written meanwhile."""
    earlier = read_results(target) if target.exists() else None
    make_folder_of(target)
    write_results(target, merge(earlier, {**described, "results": new}))


@contextmanager
def _processes() -> Iterator[bool]:
    """Join the processes that a launcher started; yield whether this one writes."""
    import torch.distributed as dist

    joins = launched_processes() > 1 and not dist.is_initialized()
    if joins:
        # the longest that a process may wait for a slower one
        dist.init_process_group("gloo", timeout=timedelta(hours=6))
    failed = True
    try:
        yield not dist.is_initialized() or dist.get_rank() == 0
        failed = False
    finally:
        if joins:
            if not failed:
                dist.barrier()  # the file is written when any process returns
            dist.destroy_process_group()


def _device_of_process() -> str | None:
    """Return the GPU of this process where a launcher started several, else None."""
    import torch

    several = launched_processes() > 1 and torch.cuda.is_available()
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if several else None


def _plan(
    tasks: Sequence[str], suite: str | None, text: str | Path | None
) -> tuple[list[str], Suite | None]:
    if isinstance(tasks, str):
        raise TypeError(f"tasks must be a sequence of names, got the string {tasks!r}")
    names = list(dict.fromkeys(tasks))
    if text is not None and TEXT_TASK not in names:
        names.append(TEXT_TASK)
    found = load_suite(suite) if suite is not None else None
    for task in [*names, *(found.metrics if found else [])]:
        if text is None and task.startswith(TEXT_TASK):
            raise ValueError(f"task {task!r} needs text, a file or folder to score (--text)")
    if not names and suite is None:
        raise ValueError(
            f"nothing to score: give tasks, a suite or a text; suites: {', '.join(suites())}"
        )
    return names, found


def _require_lm_eval() -> None:
    try:
        import lm_eval.evaluator
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise missing("scoring needs lm-eval", "eval", error) from error
