"""Many requests: by ``generate`` one after another, and by ``generate_batch``, so many at once.

Longhorn of 125M parameters with random weights, greedy. Then the time to the first token of two
requests that begin with the same 2,000 tokens, and tokens a second of decoding alone by rows.

    python eval/speed/serving.py eval/speed/serving.csv
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from report import write_table
from transformers import ContinuousBatchingConfig, GenerationConfig

from ssmzoo import load_family

REQUESTS, NEW, SHARED = 64, 32, 2000
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def alone(model: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return the seconds that ``generate`` takes for all prompts, and the answers."""
    begin, answers = time.perf_counter(), []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), generation_config=GREEDY)
        answers.append(ids[0, len(prompt) :].tolist())
    return time.perf_counter() - begin, answers


def together(model: Any, prompts: list[list[int]], rows: int) -> tuple[float, list[list[int]]]:
    """Return the same of ``generate_batch`` with at most so many rows."""
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    begin = time.perf_counter()
    answers = model.generate_batch(
        prompts, generation_config=GREEDY, continuous_batching_config=config
    )
    told = [answer.generated_tokens for answer in answers.values()]
    return time.perf_counter() - begin, told


def first_tokens(model: Any, prompts: list[list[int]]) -> list[float]:
    """Return the seconds to the first token of requests, one behind the other."""
    seconds = []
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        for prompt in prompts:
            begin = time.perf_counter()
            name = manager.add_request(prompt, max_new_tokens=1)
            while manager.get_result(name, timeout=1) is None:
                pass
            seconds.append(time.perf_counter() - begin)
    return seconds


@torch.no_grad()
def decoding(model: Any, rows: int) -> float:
    """Return the seconds of the fastest of 16 steps of so many rows."""
    output = model(torch.full((rows, 16), 5), use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(16):
        newest = output.logits[:, -1:].argmax(-1)
        begin = time.perf_counter()
        output = model(newest, cache=output.cache, use_cache=True)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> int:
    """Measure, and write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    family = load_family("longhorn")
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config("longhorn-125m")).eval()
    draw = torch.randint
    lengths = draw(32, 128, (REQUESTS,)).tolist()
    prompts = [draw(model.config.vocab_size, (n,)).tolist() for n in lengths]
    alone(model, prompts[:2])
    seconds, expected = alone(model, prompts)
    kinds: list[tuple[str, int, float, int]] = [("generate, one by one", 1, seconds, REQUESTS)]
    for rows in (1, 8, 16, 32, 64):
        seconds, answers = together(model, prompts, rows)
        same = sum(a == b for a, b in zip(answers, expected, strict=True))
        kinds.append(("generate_batch", rows, seconds, same))
    table: list[dict[str, Any]] = [
        {
            "way": way,
            "rows": rows,
            "requests": REQUESTS,
            "new_tokens": NEW,
            "seconds": f"{seconds:.2f}",
            "new_tokens_a_second": f"{REQUESTS * NEW / seconds:.1f}",
            "times_as_fast": f"{kinds[0][2] / seconds:.2f}",
            "answers_equal": same,
        }
        for way, rows, seconds, same in kinds
    ]
    shared = draw(model.config.vocab_size, (SHARED,)).tolist()
    asked = [[*shared, *draw(model.config.vocab_size, (20,)).tolist()] for _ in range(2)]
    for place, seconds in zip(("first", "second"), first_tokens(model, asked), strict=True):
        table.append(
            {"way": f"first token, {place} behind the same {SHARED}", "rows": 1, "requests": 1}
            | {"new_tokens": 1, "seconds": f"{seconds:.3f}", "new_tokens_a_second": ""}
            | {"times_as_fast": "", "answers_equal": ""}
        )
    for rows in (1, 2, 4, 8, 9, 16, 32, 64):
        seconds = min(decoding(model, rows) for _ in range(2))
        table.append(
            {"way": "a step of decoding", "rows": rows, "requests": rows, "new_tokens": 1}
            | {"seconds": f"{seconds:.4f}", "new_tokens_a_second": f"{rows / seconds:.1f}"}
            | {"times_as_fast": "", "answers_equal": ""}
        )
    write_table(table, output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
