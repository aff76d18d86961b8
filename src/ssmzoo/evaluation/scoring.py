"""Run lm-eval's tasks, ours among them, and turn its report into scores."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ssmzoo.environment.messages import first_line, suggestion
from ssmzoo.evaluation.results import Benchmark, Score
from ssmzoo.files import package_data

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from ssmzoo.evaluation.scorer import SharedPrefixLM

LOG = logging.getLogger("ssmzoo")

TEXT_TASK = "ssmzoo_bits_per_byte"
BOOTSTRAP_DRAWS = 1000


@functools.cache
def _lm_eval_tasks() -> TaskManager:
    """Return the index of lm-eval's own tasks; reading its ten thousand files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


class Library:
    """Our tasks, and lm-eval's where one is asked for."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        from lm_eval.tasks import TaskManager

        self._ours = TaskManager(
            include_path=package_data("eval/tasks"), include_defaults=False, metadata=metadata
        )

    def check(self, specs: Iterable[str | dict[str, Any]]) -> None:
        """Refuse names that neither we nor lm-eval know, and several tasks in a suite's entry."""
        for spec in specs:
            name = _task_of(spec)
            if _is_yaml(name):
                continue
            found = self._ours.task_index.get(name) or _lm_eval_tasks().task_index.get(name)
            if found is not None and not isinstance(spec, str) and "TASK" not in found.kind.name:
                raise ValueError(
                    f"suite {spec['group']!r}: {name!r} is a {found.kind.name.lower()} of several "
                    "tasks, of which an entry scores one; name them one by one"
                )
            if found is None:
                theirs = _lm_eval_tasks().task_index
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
            try:
                loaded = self._ours.load([spec])
            except ValueError as error:  # settings of its own that the model's symbols do not fit
                raise ValueError(f"task {name!r} cannot be asked: {error}") from error
        else:
            try:
                loaded = (self._ours if _is_yaml(name) else _lm_eval_tasks()).load([spec])
            except Exception as error:
                raise RuntimeError(
                    f"task {name!r} cannot be loaded: {first_line(error)}"
                ) from error
        return dict(loaded) if isinstance(spec, str) else {**loaded, "groups": {}, "group_map": {}}


def _task_of(spec: str | dict[str, Any]) -> str:
    return spec if isinstance(spec, str) else spec["task"][0]["task"]


def score_task(
    lm: SharedPrefixLM, loaded: dict[str, Any], *, limit: int | None, seed: int, symbols: int | None
) -> list[Score]:
    """Run one task, group or tag, and return every number it reports."""
    from transformers import set_seed

    tasks = loaded["tasks"]
    settings = _prepare(lm, tasks, seed, symbols)
    set_seed(seed)
    lm.reading.reset()
    rolling = any(task.OUTPUT_TYPE == "loglikelihood_rolling" for task in tasks.values())
    outcome = lm.run(loaded, limit=limit, bootstrap_draws=BOOTSTRAP_DRAWS, keep_samples=rolling)
    reading = lm.counts()
    rows: list[Score] = []
    for name, numbers in outcome["results"].items():
        count = outcome["n-samples"].get(name)
        benchmark = _benchmark(tasks[name].config) if limit is None and name in tasks else None
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            row: Score = {
                "task": name,
                "metric": metric if kind == "none" else key,
                "value": _number(value),
                "stderr": _stderr(outcome, name, metric, kind),
                "n": count["effective"] if count else int(numbers.get("sample_len", 0)),
                "seed": seed,
                "num_fewshot": int(outcome["n-shot"].get(name, 0)),
                "higher_is_better": outcome["higher_is_better"].get(name, {}).get(metric),
                "settings": settings.get(name, {}),
                "reading": reading,
            }
            if benchmark is not None:
                row["benchmark"] = benchmark
                benchmark = None  # a leaderboard shows one number of a task
            rows.append(row)
    return rows


def _prepare(
    lm: SharedPrefixLM, tasks: dict[str, Any], seed: int, symbols: int | None
) -> dict[str, dict[str, Any]]:
    """Set up tasks and the model's window for them; return each task's settings."""
    settings: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        metadata = task.config.metadata or {}
        _check_alphabet(name, metadata.get("alphabet", "text"), symbols)
        settings[name] = _settings(name, metadata)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    needed = [s.get(key, 0) for s in settings.values() for key in ("seq_len", "window")]
    # in characters a symbol and its blank may be two tokens
    lm.make_room(2 * max([n for n in needed if isinstance(n, int)], default=0))
    lm.whole = any(s.get("whole") for s in settings.values()) and lm.reads_any_length()
    for name, shown in settings.items():
        if shown.get("whole") and not lm.whole:
            del shown["whole"]
            shown["window_tokens"] = lm.window
            LOG.warning(
                "%s: the model cannot read a text of any length whole; texts are cut into windows "
                "of %d tokens",
                *(name, lm.window),
            )
    return settings


def _stderr(outcome: dict[str, Any], task: str, metric: str, kind: str) -> float | None:
    """Return lm-eval's standard error, or ours of the metrics that it has none for."""
    theirs = _number(outcome["results"][task].get(f"{metric}_stderr,{kind}"))
    if theirs is not None:
        return theirs
    samples = outcome.get("samples", {}).get(task, [])
    return _ratio_stderr(metric, [sample.get(metric) for sample in samples])


def _benchmark(config: Any) -> Benchmark | None:
    """Return the benchmark on the Hub that a task of lm-eval asks, None if it asks none.

    A data set is a benchmark if it has a file ``eval.yaml``, which names its tasks.
    """
    from huggingface_hub import hf_hub_download

    data = str(config.dataset_path)
    if config.custom_dataset is not None or "/" not in data or Path(data).exists():
        return None
    try:
        path = hf_hub_download(data, "eval.yaml", repo_type="dataset")
        tasks = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tasks"]
        asked = (config.dataset_name or "default", config.test_split or config.validation_split)
        for task in tasks:
            if (task.get("config", "default"), task.get("split", "test")) == asked:
                return {"dataset": data, "task_id": str(task["id"])}
    except Exception as error:  # of the Hub's, the network's, a stranger's file: no benchmark then
        LOG.info("%s is no benchmark of the Hub: %s", data, first_line(error))
    return None


def _settings(task: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that define a task's data, without those that all tasks have."""
    kinds = (str, int, float, bool, list, dict)
    shown = {name: value for name, value in metadata.items() if isinstance(value, kinds)}
    for key in ("config_source", "alphabet", "seed"):
        shown.pop(key, None)
    if metadata.get("alphabet") != "symbols":
        shown.pop("vocab_size", None)
    text = shown.pop("text", None)
    digest = shown.pop("text_sha256", None)
    if task.startswith(TEXT_TASK):
        shown |= {"text": Path(str(text)).name, "text_sha256": digest}
    return shown


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
            f"t0 .. t{symbols - 1}; score it with a task of symbols, such as 'ssmzoo_induction', "
            "or with the one that it was trained on"
        )


def _number(value: object) -> float | None:
    """Return a finite float, or None for anything else that lm-eval may report."""
    if isinstance(value, int | float | np.number) and math.isfinite(value):
        return float(value)
    return None


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()
