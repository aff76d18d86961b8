"""Score any causal language model with lm-eval, and keep the scores in one file a model.

- Our own tasks (``eval/tasks``) are generated and need no network; any lm-eval task works too.
- A suite (``eval/suites``) is an lm-eval group whose entries state the metric that counts.
- The results file is written after every task, so a run that is killed keeps what it has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import yaml

from ssmzoo import tasks as our_tasks
from ssmzoo.family import suggestion
from ssmzoo.machine import hardware, installed_versions
from ssmzoo.resources import share
from ssmzoo.results import Results, Score, merge, read_results, weights_revision, write_results

if TYPE_CHECKING:
    import torch
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ssmzoo.scorer import Scorer

LOG = logging.getLogger("ssmzoo")
TEXT_TASK = "ssmzoo_bits_per_byte"
BOOTSTRAP_DRAWS = 1000
DTYPES = ("auto", "float32", "bfloat16", "float16")
PACKAGES = ("ssmzoo", "torch", "transformers", "lm-eval", "datasets", "tokenizers", "numpy")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Suite:
    """A named set of tasks; each entry is an lm-eval group member that states its metric."""

    name: str
    entries: tuple[dict[str, Any], ...]
    average: bool

    @property
    def metrics(self) -> dict[str, str]:
        """The metric that counts, by task."""
        return {entry["task"]: entry["metric_list"][0]["metric"] for entry in self.entries}


def evaluate(
    model: str,
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
) -> Path:
    """Score a model and return its results file, ``<output_dir>/<name>.json``.

    A second call for the same model merges by (task, metric). Scores do not depend on
    ``batch_size``, nor on which other tasks are named.

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

    Raises:
        ValueError: An argument, the checkpoint, or an existing results file is unusable.
        LookupError: No such task, suite, or model; close names are suggested.
        RuntimeError: lm-eval is not installed, a task's data cannot be had, or the results cannot
            be written.
    """
    names, chosen = _plan(tasks, suite, text)
    for argument, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}{suggestion(dtype, DTYPES)}"
        )
    folder = model_folder(model)
    metadata: dict[str, Any] = {"seed": seed}
    if text is not None:
        documents = our_tasks.read_documents(text)
        metadata |= {"text": str(text), "text_sha256": _digest_of(d.encode() for d in documents)}
    target = _results_file(output_dir, name if name is not None else model_name(model))
    earlier = read_results(target) if target.exists() else None
    _require_lm_eval()

    import ssmzoo.auto  # noqa: F401
    from ssmzoo import scorer

    with scorer.tamed():
        place = _device(device)
        tokenizer = _load_tokenizer(model, folder, trust_remote_code)
        symbols = our_tasks.symbol_count(tokenizer)
        if symbols is not None:
            metadata["vocab_size"] = symbols
        library = _Library(metadata)
        # a suite's entries travel as groups of one, which carry the metric that counts
        members = [{"group": chosen.name, "task": [e]} for e in chosen.entries] if chosen else []
        specs: list[str | dict[str, Any]] = [*names, *members]
        library.check(specs)
        network = _load_model(model, folder, dtype, trust_remote_code)
        cast("torch.nn.Module", network).to(place)
        _check_vocabulary(network, tokenizer)
        lm = scorer.Scorer(network, tokenizer, batch_size=batch_size)
        results: Results = {
            "model": {
                "name": target.stem,
                "source": model,
                "revision": weights_revision(folder)
                if folder is not None
                else getattr(network.config, "_commit_hash", None),
                "model_type": network.config.model_type,
                "parameters": network.num_parameters(),
            },
            "results": [],
            "versions": installed_versions(*PACKAGES),
            "hardware": hardware(place),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": _command(
                model, tasks, suite, text, output_dir, name, batch_size, limit, seed, device, dtype,
                trust_remote_code,
            ),
        }  # fmt: skip
        results = merge(earlier, results)
        scores: list[Score] = []
        for spec in specs:
            new = _score(lm, library.load(spec), limit=limit, seed=seed, symbols=symbols)
            if not isinstance(spec, str):
                new = [cast("Score", {**score, "suite": spec["group"]}) for score in new]
            scores += new
            results = merge(results, {**results, "results": new})
            write_results(target, results)
        if chosen is not None and chosen.average:
            row = _average(chosen, [s for s in scores if s.get("suite") == chosen.name])
            results = merge(results, {**results, "results": [row]})
            write_results(target, results)
    return target


def suites() -> dict[str, Path]:
    """Return the files of the shipped suites by name."""
    return {path.stem: path for path in sorted(share("eval/suites").glob("*.yaml"))}


def load_suite(name: str) -> Suite:
    """Read a suite by name, or from a YAML file.

    Raises:
        LookupError: No such suite; the message suggests and lists.
        ValueError: The file is no suite.
    """
    known = suites()
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None or not path.is_file():
        raise LookupError(
            f"no suite named {name!r}{suggestion(name, known)}; suites: {', '.join(known)}"
        )
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = content.get("task") if isinstance(content, dict) else None
    if not isinstance(entries, list) or "group" not in content:
        raise ValueError(f"suite {str(path)!r} must be an lm-eval group: keys 'group' and 'task'")
    for entry in entries:
        if not (isinstance(entry, dict) and "task" in entry and entry.get("metric_list")):
            raise ValueError(
                f"every entry of suite {str(path)!r} must hold 'task' and 'metric_list', "
                f"got {entry!r}"
            )
    average = bool((content.get("metadata") or {}).get("average"))
    return Suite(content["group"], tuple(entries), average)


def model_name(model: str) -> str:
    """Make a model's name in results from its folder or Hub id.

    ``user/name`` becomes ``user__name``; of a run's folders, the run gives the name.
    """
    if model_folder(model) is None:
        return model.replace("/", "__")
    path = Path(model).expanduser().resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.parent.name if path.name == "model" else path.name


def model_folder(model: str) -> Path | None:
    """Return the folder that ``model`` names, or None if it must be a Hub id.

    Raises:
        ValueError: It is a file, a folder without a model, a path that does not exist, or
            nothing that could be a Hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir() and model:
        if any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            return path
        inside = path / "model"
        hint = f"; did you mean {str(inside)!r}?" if (inside / "config.json").is_file() else ""
        raise ValueError(f"model folder {model!r} must hold a config.json, and holds none{hint}")
    if path.exists() and model:
        raise ValueError(f"model must be a checkpoint folder or a Hub id, got the file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise ValueError(f"model must be a checkpoint folder or a Hub id; no folder {model!r}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise ValueError(f"model must be a checkpoint folder or a Hub id, got {model!r}")
    return None


@functools.cache
def _lm_eval_tasks() -> TaskManager:
    """Return the index of lm-eval's own tasks; reading its ten thousand files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


class _Library:
    """Our tasks, and lm-eval's where one is asked for."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        from lm_eval.tasks import TaskManager

        self._ours = TaskManager(
            include_path=share("eval/tasks"), include_defaults=False, metadata=metadata
        )

    def check(self, specs: Iterable[str | dict[str, Any]]) -> None:
        """Refuse names that neither we nor lm-eval know."""
        for name in map(_task_of, specs):
            if name in self._ours.task_index or _is_yaml(name):
                continue
            theirs = _lm_eval_tasks().task_index
            if name not in theirs:
                ours = self._ours.all_subtasks
                known = [*ours, *theirs]
                raise LookupError(
                    f"no task named {name!r}{suggestion(name, known)}; ours: {', '.join(ours)}; "
                    f"`lm_eval ls tasks` lists the others"
                )

    def load(self, spec: str | dict[str, Any]) -> dict[str, Any]:
        """Load a task with its data, as lm-eval's evaluator takes it."""
        name = _task_of(spec)
        if name in self._ours.task_index:
            loaded = self._ours.load([spec])
        else:
            try:
                loaded = (self._ours if _is_yaml(name) else _lm_eval_tasks()).load([spec])
            except Exception as error:
                raise RuntimeError(
                    f"task {name!r} cannot be loaded: {_first_line(error)}"
                ) from error
        return dict(loaded) if isinstance(spec, str) else {**loaded, "groups": {}, "group_map": {}}


def _task_of(spec: str | dict[str, Any]) -> str:
    return spec if isinstance(spec, str) else spec["task"][0]["task"]


def _plan(
    tasks: Sequence[str], suite: str | None, text: str | Path | None
) -> tuple[list[str], Suite | None]:
    if isinstance(tasks, str):
        raise TypeError(f"tasks must be a sequence of names, got the string {tasks!r}")
    names = list(dict.fromkeys(tasks))
    if text is not None and TEXT_TASK not in names:
        names.append(TEXT_TASK)
    if text is None and TEXT_TASK in names:
        raise ValueError(f"task {TEXT_TASK!r} needs text, a file or folder to score")
    if not names and suite is None:
        raise ValueError(
            f"nothing to score: give tasks, a suite or a text; suites: {', '.join(suites())}"
        )
    return names, load_suite(suite) if suite is not None else None


def _score(
    lm: Scorer, loaded: dict[str, Any], *, limit: int | None, seed: int, symbols: int | None
) -> list[Score]:
    """Run one task, group or tag, and return every number it reports."""
    from transformers import set_seed

    settings: dict[str, dict[str, Any]] = {}
    for name, task in loaded["tasks"].items():
        _check_alphabet(name, (task.config.metadata or {}).get("alphabet", "text"), symbols)
        settings[name] = _settings(name, task.config.metadata or {})
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    needed = [s.get(key, 0) for s in settings.values() for key in ("seq_len", "window")]
    # in characters a symbol and its blank may be two tokens
    lm.make_room(2 * max([n for n in needed if isinstance(n, int)], default=0))
    set_seed(seed)
    rolling = any(t.OUTPUT_TYPE == "loglikelihood_rolling" for t in loaded["tasks"].values())
    outcome = lm.run(loaded, limit=limit, bootstrap_draws=BOOTSTRAP_DRAWS, keep_samples=rolling)
    samples = outcome.get("samples", {})
    rows: list[Score] = []
    for name, numbers in outcome["results"].items():
        count = outcome["n-samples"].get(name)
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            stderr = _number(numbers.get(f"{metric}_stderr,{kind}"))
            if stderr is None:
                stderr = _ratio_stderr(metric, [s.get(metric) for s in samples.get(name, [])])
            rows.append(
                {
                    "task": name,
                    "metric": metric if kind == "none" else key,
                    "value": _number(value),
                    "stderr": stderr,
                    "n": count["effective"] if count else int(numbers.get("sample_len", 0)),
                    "seed": seed,
                    "num_fewshot": int(outcome["n-shot"].get(name, 0)),
                    "higher_is_better": outcome["higher_is_better"].get(name, {}).get(metric),
                    "settings": settings.get(name, {}),
                }
            )
    return rows


def _settings(task: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what defines a task's data, without what lm-eval and we hang on to all tasks."""
    shown = {k: v for k, v in metadata.items() if isinstance(v, str | int | float | bool)}
    for key in ("config_source", "alphabet", "seed"):
        shown.pop(key, None)
    if metadata.get("alphabet") != "symbols":
        shown.pop("vocab_size", None)
    text = shown.pop("text", None)
    digest = shown.pop("text_sha256", None)
    if task == TEXT_TASK:
        shown |= {"text": Path(str(text)).name, "text_sha256": digest}
    return shown


def _average(suite: Suite, rows: list[Score]) -> Score:
    """Average a suite's tasks, every one counting alike, as the papers' tables do."""
    metrics = suite.metrics
    counted = [row for row in rows if metrics[row["task"]] == row["metric"]]
    values = [row["value"] for row in counted if row["value"] is not None]
    errors = [row["stderr"] for row in counted if row["stderr"] is not None]
    whole = len(values) == len(suite.entries)
    stderr = math.hypot(*errors) / len(errors) if whole and len(errors) == len(values) else None
    return {
        "task": suite.name,
        "metric": "average",
        "value": float(np.mean(values)) if whole else None,
        "stderr": stderr,
        "n": sum(row["n"] for row in counted),
        "seed": counted[0]["seed"],
        "num_fewshot": max(row["num_fewshot"] for row in counted),
        "higher_is_better": True,
        "settings": {"tasks": len(counted)},
        "suite": suite.name,
    }


def _ratio_stderr(metric: str, pairs: list[Any]) -> float | None:
    """Return the standard error of bits per byte and the perplexities, which lm-eval leaves out.

    They are functions of ``sum(loglikelihood) / sum(length)`` over documents: the error of a
    ratio estimate, carried through the function's slope.
    """
    if metric not in ("bits_per_byte", "byte_perplexity", "word_perplexity") or len(pairs) < 2:
        return None
    scores, lengths = np.asarray(pairs, dtype=np.float64).T
    ratio, n = scores.sum() / lengths.sum(), len(pairs)
    residual = scores - ratio * lengths
    error = math.sqrt(n / (n - 1) * (residual @ residual)) / lengths.sum()
    return _number(error / math.log(2) if metric == "bits_per_byte" else error * math.exp(-ratio))


def _check_alphabet(task: str, alphabet: str, symbols: int | None) -> None:
    if alphabet == "symbols" and symbols is None:
        raise ValueError(
            f"task {task!r} is written in symbols 't0 t1 ...', and the model's tokenizer is not an "
            f"ssmzoo.tasks.symbol_tokenizer; suite 'zoo-recall' asks the same in plain characters"
        )
    if alphabet != "symbols" and symbols is not None:
        raise ValueError(
            f"task {task!r} is written in text, and the model's tokenizer holds only the symbols "
            f"t0 .. t{symbols - 1}; score it with 'ssmzoo_mqar' or 'ssmzoo_induction'"
        )


def _check_vocabulary(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    embedding = network.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer holds {len(tokenizer)} tokens and the model embeds only {rows}; "
            f"they do not belong together"
        )


def _load_tokenizer(model: str, folder: Path | None, trust: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with _loading("a tokenizer", model, folder):
        tokenizer = AutoTokenizer.from_pretrained(
            folder or model, trust_remote_code=trust, local_files_only=folder is not None
        )
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise ValueError(f"the tokenizer of {model!r} must have a bos_token or an eos_token")
    return tokenizer


def _load_model(model: str, folder: Path | None, dtype: Dtype, trust: bool) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    with _loading("a causal language model", model, folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder or model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust,
            local_files_only=folder is not None,
            output_loading_info=True,
        )
        network, info = loaded
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ValueError(
            f"the checkpoint {model!r} lacks {len(missing)} of the model's tensors, e.g. "
            f"{missing[0]!r}; scores of random weights would mean nothing"
        )
    return network.eval()


@contextlib.contextmanager
def _loading(what: str, model: str, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if folder is None and isinstance(error, OSError):
            raise LookupError(
                f"no folder {model!r} here, and no {what.split(' ', 1)[1]} from the Hub: {reason}"
            ) from error
        raise ValueError(f"cannot load {what} from {model!r}: {reason}") from error


def _device(device: str | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device must be a torch device, e.g. 'cpu' or 'cuda:0', got {device!r}"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return place


def _results_file(output_dir: str | Path, name: str) -> Path:
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ValueError(
            f"name must be letters, digits and any of '_.+-', and start with no dot, got {name!r}"
        )
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # ask by doing, before hours of scoring
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}."):
            pass
    except OSError as error:
        raise RuntimeError(
            f"output_dir {str(output_dir)!r} cannot be written: {error.strerror}"
        ) from error
    return folder / f"{name}.json"


def _require_lm_eval() -> None:
    try:
        import lm_eval.evaluator
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"scoring needs lm-eval ({error}); install it with: pip install 'ssmzoo[eval]'"
        ) from error


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
) -> str:
    """Write down the command line that does the same again; defaults that decide are spelt out."""
    words = ["ssmzoo", "eval", model]
    words += ["--tasks", ",".join(tasks)] if tasks else []
    for flag, value in (
        ("--suite", suite),
        ("--text", text),
        ("--output-dir", output_dir),
        ("--name", name),
        ("--batch-size", batch_size),
        ("--limit", limit),
        ("--seed", seed),
        ("--device", device),
        ("--dtype", dtype),
    ):
        words += [flag, str(value)] if value is not None else []
    return shlex.join([*words, "--trust-remote-code"] if trust_remote_code else words)


def _digest_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _number(value: object) -> float | None:
    """Return a finite float, or None for anything else that lm-eval may report."""
    if isinstance(value, int | float | np.number) and math.isfinite(value):
        return float(value)
    return None


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
