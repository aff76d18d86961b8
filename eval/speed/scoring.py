"""Score with shared states and as lm-eval does: seconds, tokens read, and whether scores are equal.

``HFLM`` and ``SharedPrefixLM`` score the same tasks in one process, by turns, from lm-eval's
``simple_evaluate`` to its results; only its listing of installed packages is left out. The columns
``answering`` have the seconds from the requests to their answers: without lm-eval's making of them.
The tasks are lm-eval's by their form, with pieces of this repository's pages for texts.

    python eval/speed/scoring.py eval/speed/scoring.csv
"""

# lm-eval's decorators hide the types of its functions
# pyright: reportCallIssue=false

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.evaluator
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from report import write_table
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig

import ssmzoo.auto
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation import SharedPrefixLM
from ssmzoo.evaluation.lm_eval_log import tamed

ROOT = Path(__file__).parents[2]
EXAMPLES = 200  # that random ones are drawn from
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_target": "label",
    "doc_to_choice": "answers",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
LETTERS = {
    **CHOICES,
    "doc_to_text": "{{context}}\nAnswer:",
    "doc_to_choice": ["A", "B", "C", "D"],
    "metric_list": [{"metric": "acc"}],
}
GENERATED = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{context}}\nAnswer:",
    "doc_to_target": "{{answers[label]}}",
    "generation_kwargs": {"until": ["Question:"], "do_sample": False, "max_gen_toks": 32},
    "metric_list": [{"metric": "exact_match"}],
}


@dataclass(frozen=True)
class Form:
    """A task's form: its fields, examples, and the characters of contexts and answers."""

    fields: dict[str, Any]
    shots: int
    first: bool  # the examples are the same for all
    context: int
    answer: int


FORMS = {
    "6 random examples, four answers of 60": Form(CHOICES, 6, False, 130, 60),
    "6 first examples, four answers of 60": Form(CHOICES, 6, True, 130, 60),
    # as hellaswag
    "no examples, four answers of 110": Form(CHOICES, 0, False, 250, 110),
    "10 random examples, four answers of 110": Form(CHOICES, 10, False, 250, 110),
    # as mmlu
    "5 first examples, letters": Form(LETTERS, 5, True, 380, 1),
    # as gsm8k's variants with fixed examples, and as gsm8k
    "5 first examples, 32 tokens generated": Form(GENERATED, 5, True, 250, 250),
    "5 random examples, 32 tokens generated": Form(GENERATED, 5, False, 250, 250),
}


class Pages:
    """Pieces of this repository's pages."""

    def __init__(self) -> None:
        pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
        text = "".join(page.read_text(encoding="utf-8") for page in pages)
        self._text = text.encode("ascii", "ignore").decode()
        self._draw = random.Random(0)

    def piece(self, length: int) -> str:
        """Return so many characters, the first and the last of which are no blanks."""
        begin = self._draw.randrange(len(self._text) - length)
        return ("." + self._text[begin : begin + length - 2] + ".")[:length]

    def documents(self, form: Form, count: int) -> str:
        """Return questions with four answers, a line of JSON each."""
        return "".join(
            json.dumps(
                {
                    "context": self.piece(form.context),
                    "answers": [self.piece(form.answer) for _ in range(4)],
                    "label": self._draw.randrange(4),
                }
            )
            + "\n"
            for _ in range(count)
        )


def write_task(form: Form, folder: Path, questions: int) -> TaskManager:
    """Write lm-eval's task ``task`` and its data, and return where lm-eval finds it."""
    pages, files = Pages(), {"train": folder / "train.jsonl", "test": folder / "test.jsonl"}
    files["train"].write_text(pages.documents(form, EXAMPLES), encoding="utf-8")
    files["test"].write_text(pages.documents(form, questions), encoding="utf-8")
    names = {split: str(file) for split, file in files.items()}
    task = {
        "task": "task",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": names, "cache_dir": str(folder / "cache")},
        "fewshot_split": "train",
        "test_split": "test",
        "fewshot_config": {"sampler": "first_n" if form.first else "default"},
        **form.fields,
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def models(which: str) -> tuple[str, Any, Any, int]:
    """Return a name, a model, its tokenizer, and how many questions it is asked."""
    if which == "text":
        folder = ROOT / "model_cards/small/longhorn-text"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return "longhorn-text", model, AutoTokenizer.from_pretrained(folder), 60
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=768, num_hidden_layers=24, state_size=16, vocab_size=50_280)
    model = AutoModelForCausalLM.from_config(config).eval()
    ssmzoo.accelerate(model)
    return "Mamba of 130M, accelerated, random weights", model, byte_tokenizer(), 8


def main() -> int:
    """Measure, and write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", choices=("text", "130m"), nargs="+", default=["text", "130m"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    lm_eval.evaluator.add_env_info = lambda storage: None  # seconds of pip
    rows = []
    for which in options.model:
        name, model, tokenizer, questions = models(which)
        for form in FORMS:
            row = {"model": name, "form": form, "questions": questions}
            rows.append(row | measure(model, tokenizer, FORMS[form], questions, options))
            print(rows[-1], flush=True)
    write_table(rows, options.output)
    return 0


class Answering:
    """Counts the seconds in which a model of lm-eval answers requests."""

    def __init__(self, lm: Any) -> None:
        self.seconds = 0.0
        for name in ("loglikelihood", "generate_until"):
            setattr(lm, name, self._timed(getattr(lm, name)))

    def _timed(self, answer: Any) -> Any:
        def timed(*given: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            found = answer(*given, **options)
            self.seconds += time.perf_counter() - begin
            return found

        return timed


def measure(model: Any, tokenizer: Any, form: Form, questions: int, options: Any) -> dict[str, Any]:
    """Score a task in both ways, by turns."""
    given = {"batch_size": options.batch_size, "max_length": 8192}
    seconds: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    answering: list[list[float]] = [[], []]
    found: list[Any] = [None, None]
    with tamed(), tempfile.TemporaryDirectory() as folder:
        tasks = write_task(form, Path(folder), questions)
        lms = [
            HFLM(model, backend="causal", tokenizer=tokenizer, softmax_dtype="float32", **given),
            SharedPrefixLM(model, tokenizer, **given),
        ]
        clocks = [Answering(lm) for lm in lms]
        for _ in range(options.runs):
            for i, lm in enumerate(lms):
                clocks[i].seconds = 0.0
                begin, begin_cpu = time.perf_counter(), time.process_time()
                outcome = lm_eval.simple_evaluate(
                    lm, tasks=["task"], num_fewshot=form.shots, task_manager=tasks
                )
                seconds[i].append(time.perf_counter() - begin)
                cpu[i].append(time.process_time() - begin_cpu)
                answering[i].append(clocks[i].seconds)
                assert outcome is not None
                samples = outcome.get("samples", {})["task"]
                found[i] = [each for sample in samples for (each,) in sample["resps"]]
    (old, new), (old_cpu, new_cpu), (old_answering, new_answering) = (
        map(statistics.median, each) for each in (seconds, cpu, answering)
    )
    pairs = list(zip(*found, strict=True))
    scores = [(a[0], b[0]) for a, b in pairs if not isinstance(a, str)]
    largest = max((abs(a - b) / abs(a) for a, b in scores), default=0)
    reading = lms[1].reading
    return {
        "requests": len(pairs),
        "hf_seconds": f"{old:.2f}",
        "ssmzoo_seconds": f"{new:.2f}",
        "times_as_fast": f"{old / new:.2f}",
        "hf_answering": f"{old_answering:.2f}",
        "ssmzoo_answering": f"{new_answering:.2f}",
        "times_as_fast_answering": f"{old_answering / new_answering:.2f}",
        "hf_cpu_seconds": f"{old_cpu:.2f}",
        "ssmzoo_cpu_seconds": f"{new_cpu:.2f}",
        "times_as_fast_cpu": f"{old_cpu / new_cpu:.2f}",
        "tokens_alone": reading.alone // options.runs,
        "tokens_read": reading.read // options.runs,
        "equal_to_the_bit": sum(a == b for a, b in pairs),
        "largest_relative_difference": f"{largest:.1e}",
        "threads": torch.get_num_threads(),
        "runs": options.runs,
    }


if __name__ == "__main__":
    raise SystemExit(main())
