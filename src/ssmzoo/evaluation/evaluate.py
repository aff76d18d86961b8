"""Score any causal language model with lm-eval, and keep the scores in one file a model.

- Our own tasks (``eval/tasks``) are generated and need no network; any lm-eval task works too.
- A suite (``eval/suites``) is an lm-eval group whose entries state the metric that counts.
- The results file is written after every task, so a run that is killed keeps what it has.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.checkpoints.load import (
    Dtype,
    check_dtype,
    check_vocabulary,
    load_model,
    load_tokenizer,
    model_folder,
    model_name,
)
from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.environment.hardware import installed_versions, launched_processes, usable_device
from ssmzoo.environment.messages import missing
from ssmzoo.environment.portable import portable_command
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
from ssmzoo.files import existing_part, make_folder_of
from ssmzoo.tasks import symbol_count

if TYPE_CHECKING:
    import torch

__all__ = ["Suite", "evaluate", "load_suite", "model_folder", "model_name", "suites"]

PACKAGES = ("ssmzoo", "torch", "transformers", "lm-eval", "datasets", "tokenizers", "numpy")


def evaluate(
    model: str | Path,
    *,
    tasks: Sequence[str] = (),
    suite: str | None = None,
    text: str | Path | None = None,
    output_dir: str | Path = "eval/results",
    name: str | None = None,
    batch_size: int = 8,
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
    requests; the first one writes.

    Args:
        model: A checkpoint folder or a Hub id.
        tasks: Names of our tasks, of lm-eval's tasks, groups and tags, or lm-eval YAML files.
        suite: A suite's name (a file in ``eval/suites``), or a suite file.
        text: A file or folder whose bits per byte are measured as well.
        output_dir: Folder of results files.
        name: Name of the model in results; by default made from ``model``.
        batch_size: Prompts a forward pass.
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
    model = str(model)
    names, chosen = _plan(tasks, suite, text)
    for argument, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and {2**32 - 1}, got {seed}")
    check_dtype(dtype)
    folder = model_folder(model)
    metadata: dict[str, Any] = {"seed": seed}
    if text is not None:
        documents = read_documents(text)
        metadata |= {"text": str(text), "text_sha256": _digest_of(d.encode() for d in documents)}
    own = model_name(model)
    if adapter is not None:
        own = f"{own}-{Path(adapter).resolve().name}"
    target = _results_file(output_dir, own if name is None else name)
    earlier = read_results(target) if target.exists() else None
    _require_lm_eval()

    from ssmzoo.evaluation import scorer
    from ssmzoo.modeling import load_state_adapter
    from ssmzoo.modeling.stock import choose_kernels
    from ssmzoo_kernels.machine import environment, hardware

    with scorer.tamed(), _processes() as main:
        place = usable_device(_device_of_process() if device is None else device)
        tokenizer = load_tokenizer(model, folder, trust_remote_code)
        if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
            raise ValueError(f"the tokenizer of {model!r} must have a bos_token or an eos_token")
        symbols = symbol_count(tokenizer)
        if symbols is not None:
            metadata["vocab_size"] = symbols
        library = Library(metadata)
        # a suite's entries travel as groups of one, which carry the metric that counts
        members = [{"group": chosen.name, "task": [e]} for e in chosen.entries] if chosen else []
        specs: list[str | dict[str, Any]] = [*names, *members]
        library.check(specs)
        network = load_model(model, folder, dtype, trust_remote_code)
        cast("torch.nn.Module", network).to(place)
        check_vocabulary(network, tokenizer)
        choose_kernels(network, stock)
        started = None if adapter is None else load_state_adapter(adapter, network).digest()
        if not getattr(network.config, "decodable", True):
            batch_size = 1  # its rows' padding would count
        lm = scorer.Scorer(network, tokenizer, batch_size=batch_size)
        results: Results = {
            "model": {
                "name": target.stem,
                "source": source_of(model),
                "revision": weights_revision(folder)
                if folder is not None
                else getattr(network.config, "_commit_hash", None),
                "model_type": network.config.model_type,
                "parameters": network.num_parameters(),
            },
            "results": [],
            "versions": installed_versions(*PACKAGES) | foreign_versions(network.config),
            "hardware": hardware(place),
            "environment": environment(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": _command(
                model, tasks, suite, text, output_dir, name, batch_size, limit, seed, device, dtype,
                trust_remote_code, stock, adapter,
            ),
        }  # fmt: skip
        described = results["model"]
        parts = [model if folder is None else folder, *([] if adapter is None else [Path(adapter)])]
        if any(isinstance(part, Path) for part in parts):
            described["place"] = place_digest(target, *parts)
        if started is not None:
            described["source"], described["revision"] = adapted(
                described["source"], source_of(str(adapter)), described["revision"], started
            )
        if folder is not None and folder.resolve().name == "model":
            recipe = folder.resolve().parent / "recipe.yaml"
            if recipe.is_file():
                results["recipe"] = recipe_of(recipe)
        if earlier is not None:
            require_same_model(earlier, results)

        def add(new: list[Score]) -> None:
            nonlocal results
            # another call may have written since
            now = read_results(target) if main and target.exists() else results
            results = merge(now, {**results, "results": new})
            if main:
                make_folder_of(target)
                write_results(target, results)

        scores: list[Score] = []
        for spec in specs:
            new = score_task(lm, library.load(spec), limit=limit, seed=seed, symbols=symbols)
            if not isinstance(spec, str):
                new = [cast("Score", {**score, "suite": spec["group"]}) for score in new]
            scores += new
            add(new)
        if chosen is not None and chosen.average:
            add([average_score(chosen, [s for s in scores if s.get("suite") == chosen.name])])
    return target


@contextmanager
def _processes() -> Iterator[bool]:
    """Join the processes that a launcher started; yield whether this one writes."""
    import torch.distributed as dist

    joins = launched_processes() > 1 and not dist.is_initialized()
    if joins:
        # the longest that one may score alone what another scores faster
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


def _results_file(output_dir: str | Path, name: str) -> Path:
    if name.startswith(".") or "/" in name or not (name.strip() and name.isprintable()):
        raise ValueError(
            "name must be a file's, without '/', a control character or a dot before it, got "
            f"{name!r}; give another one (--name)"
        )
    folder = Path(output_dir)
    try:
        # ask by doing, before hours of scoring; the folder is made when there are scores
        with tempfile.NamedTemporaryFile(dir=existing_part(folder), prefix=f".{name}."):
            pass
    except OSError as error:
        raise RuntimeError(
            f"output_dir {str(output_dir)!r} cannot be written: {error.strerror}; choose another"
        ) from error
    return folder / f"{name}.json"


def _require_lm_eval() -> None:
    try:
        import lm_eval.evaluator
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise missing("scoring needs lm-eval", "eval", error) from error


def _command(
    model: str,
    tasks: Sequence[str],
    suite: str | None,
    text: str | Path | None,
    output_dir: str | Path,
    name: str | None,
    batch_size: int,
    limit: int | None,
    seed: int,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    stock: bool,
    adapter: str | Path | None,
) -> str:
    """Write down the command line that does the same again; defaults that decide are spelt out."""
    words = ["ssmzoo", "eval", model]
    words += ["--tasks", ",".join(tasks)] if tasks else []
    for flag, value in (
        ("--suite", suite),
        ("--text", text),
        ("--output", output_dir),
        ("--name", name),
        ("--batch-size", batch_size),
        ("--limit", limit),
        ("--seed", seed),
        ("--device", device),
        ("--dtype", dtype),
        ("--adapter", adapter),
    ):
        words += [flag, str(value)] if value is not None else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return portable_command([*words, "--stock"] if stock else words)


def _digest_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
