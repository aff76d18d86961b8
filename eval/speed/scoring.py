"""Score with shared states and as lm-eval does: seconds, tokens read, and whether scores are equal.

The same requests go to ``HFLM`` and to ``SharedPrefixLM`` in one process, by turns.
Texts are pages of this repository, cut to the lengths that the tasks of each form usually have.

    python eval/speed/scoring.py eval/speed/scoring.csv
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from report import write_table
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig

import ssmzoo.auto
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation import SharedPrefixLM
from ssmzoo.evaluation.lm_eval_log import tamed

ROOT = Path(__file__).parents[2]
GREEDY = {"until": ["\n\n"], "max_gen_toks": 32}


class Pages:
    """Pieces of this repository's pages."""

    def __init__(self) -> None:
        pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
        self._text = "".join(page.read_text(encoding="utf-8") for page in pages)
        self._text = self._text.encode("ascii", "ignore").decode()
        self._draw = random.Random(0)

    def piece(self, length: int) -> str:
        """Return so many characters, the first and the last of which are no blanks."""
        begin = self._draw.randrange(len(self._text) - length)
        return "." + self._text[begin : begin + length - 2] + "."


def answers(pages: Pages, questions: int, examples: int, own: bool, context: int, answer: int):
    """Return four answers to each question, behind examples of its own or the same for all."""
    shared, found = pages.piece(examples) if examples else "", []
    for _ in range(questions):
        before = pages.piece(examples) if examples and own else shared
        asked = before + pages.piece(context)
        # answers of one token are letters
        found += [(asked, pages.piece(answer) if answer > 1 else x) for x in "ABCD"]
    return found


def forms(pages: Pages, questions: int) -> Iterator[tuple[str, str, list[tuple[Any, ...]]]]:
    """Yield a name, the kind of request, and the requests' arguments."""
    score = "loglikelihood"
    yield "own examples, 1100 + 130 + 60", score, answers(pages, questions, 1100, True, 130, 60)
    yield "shared examples, 1100 + 130 + 60", score, answers(pages, questions, 1100, False, 130, 60)
    # as hellaswag: a context of 250 characters, endings of 110; an example is both
    yield "0-shot, four long answers", score, answers(pages, questions, 0, True, 250, 110)
    yield "10-shot, random examples", score, answers(pages, questions, 3600, True, 250, 110)
    # as mmlu: examples of 400 characters, the first ones of a subject for all, answers A to D
    yield "5-shot, first examples, letters", score, answers(pages, questions, 2000, False, 350, 1)
    # as gsm8k: examples of 500 characters, the same for all
    shared = pages.piece(2500)
    asked = [(shared + pages.piece(250), GREEDY) for _ in range(questions)]
    yield "5-shot generation of 32 tokens", "generate_until", asked


def models(which: str) -> tuple[str, Any, Any, int]:
    """Return a name, a model, its tokenizer, and how many questions it is asked."""
    if which == "text":
        folder = ROOT / "model_cards/small/longhorn-text"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return "longhorn-text", model, AutoTokenizer.from_pretrained(folder), 60
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "vocab_size": 50_280}
    model = AutoModelForCausalLM.from_config(MambaConfig(**sizes)).eval()
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
    rows = []
    for which in options.model:
        name, model, tokenizer, questions = models(which)
        for form, kind, arguments in forms(Pages(), questions):
            if which == "130m" and form.startswith("10-shot"):
                continue  # minutes
            row = {"model": name, "form": form, "requests": len(arguments)}
            rows.append(row | measure(model, tokenizer, kind, arguments, options))
            print(rows[-1], flush=True)
    write_table(rows, options.output)
    return 0


def measure(model: Any, tokenizer: Any, kind: str, arguments: Any, options: Any) -> dict[str, Any]:
    """Answer the requests in both ways, by turns."""
    requests = [SimpleNamespace(args=each, task_name=kind) for each in arguments]
    given = {"batch_size": options.batch_size, "max_length": 8192}
    with tamed():
        lms = [
            HFLM(model, backend="causal", tokenizer=tokenizer, softmax_dtype="float32", **given),
            SharedPrefixLM(model, tokenizer, **given),
        ]
        seconds: list[list[float]] = [[], []]
        found: list[Any] = [None, None]
        for _ in range(options.runs):
            for i, lm in enumerate(lms):
                begin = time.perf_counter()
                found[i] = getattr(lm, kind)(requests, disable_tqdm=True)
                seconds[i].append(time.perf_counter() - begin)
    old, new = (statistics.median(each) for each in seconds)
    pairs = list(zip(*found, strict=True))
    scores = [(a[0], b[0]) for a, b in pairs] if kind == "loglikelihood" else []
    largest = max((abs(a - b) / abs(a) for a, b in scores), default=0)
    reading = lms[1].reading
    return {
        "hf_seconds": f"{old:.2f}",
        "ssmzoo_seconds": f"{new:.2f}",
        "times_as_fast": f"{old / new:.2f}",
        "tokens_alone": reading.alone // options.runs,
        "tokens_read": reading.read // options.runs,
        "equal_to_the_bit": sum(a == b for a, b in pairs),
        "largest_relative_difference": f"{largest:.1e}",
        "threads": torch.get_num_threads(),
        "runs": options.runs,
    }


if __name__ == "__main__":
    raise SystemExit(main())
