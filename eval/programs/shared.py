"""Stages that ``make demo`` and ``make zoo`` share; finished ones are not repeated."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from ssmzoo.environment.credentials import without_credentials
from ssmzoo.files import STDLIB, read_json, write_folder

HELD_OUT_BYTES = 120_000
PIECE = 4_000  # characters of a piece, where the user's text is one long document
SEED = 0
# of a model of text, with what the table calls them
TASKS = {"ssmzoo_bits_per_byte": "bits/byte", "ssmzoo_recall_text": "recall"}


def guarded(name: str, work: Callable[[], None]) -> int:
    """Do the work of a program and return its exit status; an error is one line."""
    try:
        work()
    except KeyboardInterrupt as error:
        sys.stderr.write(f"\n{name}: interrupted; the same command goes on from here\n")
        return getattr(error, "status", 130)  # a run that was told to stop knows by which signal
    except (ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
        sys.stderr.write(f"{name}: error: {without_credentials(' '.join(str(error).split()))}\n")
        return 2
    return 0


def whole_steps(steps: str | None) -> int | None:
    """Return the number of training steps that was asked for.

    Raises:
        ValueError: It is none.
    """
    if steps is None or (steps.isascii() and steps.isdigit() and int(steps) >= 1):
        return None if steps is None else int(steps)
    raise ValueError(f"STEPS must be a whole number from 1 on, got {steps!r}")


def place_of(text: str | None) -> str | None:
    """Return which text is meant, from wherever it is asked for; None for the default."""
    return None if text in (None, STDLIB) else str(Path(text).expanduser().absolute())


def require_same(name: str, output: Path, asked: Mapping[str, Any]) -> None:
    """Fail if a folder holds anything but an earlier call's work on the same task.

    A call that ended before it had done anything binds nobody.

    Args:
        name: The program's; its facts lie in ``NAME.json``.
        output: The folder.
        asked: Settings that must not change; None stands for a default.

    Raises:
        ValueError: It does.
    """
    facts = output / f"{name}.json"
    if not output.is_dir() or {path.name for path in output.iterdir()} <= {".lock", facts.name}:
        return
    if not facts.exists():
        raise ValueError(f"{output} exists and holds no earlier {name}; choose another --output")
    earlier = read_json(facts)
    for field, now in asked.items():
        before = earlier.get(field, now)
        if before != now:
            default = "the default"
            raise ValueError(
                f"{field.upper()} must stay as the {name} in {output} began, {before or default}, "
                f"got {now or default}; start over with: rm -r {output}"
            )


def split_once(sources: Sequence[str], output: Path) -> list[str]:
    """Split a text into ``output/text`` once; return a recipe's overrides to train on it."""
    texts = output / "text"
    if not texts.exists():
        write_folder(texts, lambda folder: split_text(sources, folder))
    files, held_out = (len(list((texts / name).iterdir())) for name in ("train", "held-out"))
    say(f"text: {files} documents to train on, {held_out} held out, in {texts}")
    return [
        f"data.text={quoted(texts / 'train')}",
        f"data.validation=[{quoted(texts / 'held-out')}]",
    ]


def quoted(path: Path) -> str:
    """Return a path as YAML, whatever characters it has."""
    return json.dumps(str(path), ensure_ascii=False)


def split_text(sources: Sequence[str], target: Path) -> None:
    """Write the documents to train on and those held out into two folders.

    Args:
        sources: Files, folders or ``python-stdlib``.
        target: Where ``train`` and ``held-out`` go.

    Raises:
        ValueError: No text, or too little of it.
    """
    from ssmzoo.data.paths import expand
    from ssmzoo.data.readers import read_files

    files = expand(sources, "TEXT")
    documents = [content for _, content in read_files("text", files, "text", skip_binary=True)]
    if len(documents) < 20:
        documents = [piece for content in documents for piece in pieces(content)]
    random.Random(SEED).shuffle(documents)
    total = sum(map(len, documents))
    goal = min(HELD_OUT_BYTES, total // 10)
    held_out: list[str] = []
    while documents and sum(map(len, held_out)) < goal:
        held_out.append(documents.pop())
    if not held_out or not documents:
        raise ValueError(f"TEXT must hold some thousand characters at least, got {total}")
    for name, part in (("train", documents), ("held-out", held_out)):
        (target / name).mkdir(parents=True)
        for number, content in enumerate(part):
            (target / name / f"{number:05d}.txt").write_text(content, encoding="utf-8")


def pieces(content: str) -> list[str]:
    """Cut a long document at line ends, and lines that are longer, into pieces of ``PIECE`` up."""
    cut, size = [[]], 0
    whole = content.splitlines(keepends=True)
    for line in (part[i : i + PIECE] for part in whole for i in range(0, len(part), PIECE)):
        if size > PIECE:
            cut.append([])
            size = 0
        cut[-1].append(line)
        size += len(line)
    return ["".join(lines) for lines in cut if lines]


def train_once(name: str, recipe: Any, run: Path, *, stock: bool, **options: Any) -> None:
    """Train a model, or resume its training; ``options`` are ``train``'s."""
    from ssmzoo.environment.messages import without_reports
    from ssmzoo.training.run import train

    if is_trained(run):
        say(f"{name} is trained")
        return
    say(f"training {name}" + (f" (recipe {recipe})" if isinstance(recipe, str) else ""))
    with without_reports():  # transformers tells which faster kernels its models could have
        train(recipe, output_dir=run, resume=True, stock=stock, **options)


def is_trained(run: Path) -> bool:
    """Tell whether a run has come to its end."""
    return (run / "run.json").exists() and "finished" in read_json(run / "run.json")


def score_once(name: str, run: Path, output: Path, *, stock: bool) -> None:
    """Score a model of text into ``output/results``, unless all its scores are there."""
    from ssmzoo.environment.messages import without_reports
    from ssmzoo.evaluation.evaluate import evaluate

    if is_scored(output / "results" / f"{name}.json", run / "model"):
        say(f"{name} is scored")
        return
    say(f"scoring {name}")
    with without_reports():
        evaluate(
            run / "model",
            tasks=tuple(TASKS),
            text=output / "text" / "held-out",
            output_dir=output / "results",
            name=name,
            batch_size=16,
            stock=stock,
        )


def is_scored(results: Path, model: Path) -> bool:
    """Tell whether a results file has all scores of a model's weights."""
    from ssmzoo.checkpoints.weights import weights_revision
    from ssmzoo.evaluation.results import read_results

    if not results.exists():
        return False
    found = read_results(results)
    ours = found["model"]["revision"] == weights_revision(model)
    return ours and {score["task"] for score in found["results"]} >= set(TASKS)


def table(rows: Iterable[tuple[str, Path, Path]]) -> str:
    """Return scores and speeds as a text.

    Args:
        rows: Of each model its name, its run and its results file.
    """
    found = []
    for name, run, results in rows:
        measured = read_json(results)
        scores: dict[str, float] = {}
        for row in measured["results"]:  # of each task the first metric
            task = str(row["task"])
            scores.setdefault(TASKS.get(task, task), row["value"])
        speeds = [
            row["tokens_per_second"]
            for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            if "tokens_per_second" in row
        ]
        speed = f"{median_high(speeds):,.0f}" if speeds else ""
        found.append((name, measured["model"]["parameters"], speed, scores))
    heads = list(dict.fromkeys(head for *_, scores in found for head in scores))
    room = max([10, *(len(name) for name, *_ in found)])
    lines = [f"{'':{room}s} {'parameters':>11s} {'tokens/s':>9s} "]
    lines[0] += " ".join(f"{head:>9s}" for head in heads)
    for name, parameters, speed, scores in found:
        shown = [f"{scores[head]:.3f}" if head in scores else "" for head in heads]
        cells = (f"{text:>{max(9, len(head))}s}" for text, head in zip(shown, heads, strict=True))
        lines.append(f"{name:{room}s} {parameters:11,d} {speed:>9s} {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def say(line: str, end: str = "\n") -> None:
    """Print a line at once; these modules are programs, not a library."""
    sys.stdout.write(f"{line}{end}")
    sys.stdout.flush()
