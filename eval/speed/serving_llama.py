"""Requests that are answered together: by llama.cpp and by ``generate_batch``, in one run.

A Mamba of 130M parameters with random weights in float32, prompts of 64 tokens, 32 new ones each.
llama.cpp reads all prompts together, and chooses no tokens: it gets the same one at every step.
Ours answer by ``generate_batch``, as a model of the zoo and as transformers' model on our kernels.
They take turns, and the best of three counts.

    python eval/speed/serving_llama.py PYTHON eval/speed/serving_llama.csv

PYTHON is one that has llama-cpp-python, as for llama.py; this one needs gguf.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from llama import VOCABULARY, Llama, mamba, write_gguf
from report import write_table
from serving import NEW, together

import ssmzoo

ROWS, PROMPT, ROUNDS = (1, 8, 16, 32), 64, 3


def by_llama(model: Llama, prompts: list[list[int]]) -> float:
    """Return the seconds that llama.cpp takes for prompts and new tokens."""
    model.forget()
    seconds = model.together(prompts, 0)
    for step in range(NEW - 1):  # the first new token is the prompt's
        seconds += model.together([[5]] * len(prompts), PROMPT + step)
    return seconds


def main() -> int:
    """Measure, and write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="one that has llama-cpp-python")
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    from ssmzoo_bmojo.convert_bmojo import from_mamba

    stock, prompts = mamba(24), torch.randint(VOCABULARY, (max(ROWS), PROMPT)).tolist()
    zoo = from_mamba(stock)
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "mamba.gguf")
        write_gguf(stock, weights)
        ssmzoo.accelerate(stock)
        for rows in ROWS:
            threads, length = torch.get_num_threads(), rows * (PROMPT + NEW)
            theirs = Llama(given.python, weights, "F32", threads, length, rows)
            asked = prompts[:rows]
            taken: dict[str, list[float]] = {"llama.cpp": [], "ours": [], "accelerated": []}
            for _ in range(ROUNDS):
                taken["llama.cpp"].append(by_llama(theirs, asked))
                for way, model in (("ours", zoo), ("accelerated", stock)):
                    taken[way].append(together(model, asked, rows)[0])
            theirs.close()
            for way, seconds in taken.items():
                table.append(
                    {"way": way, "requests": rows, "prompt": PROMPT, "new_tokens": NEW}
                    | {"seconds": f"{min(seconds):.2f}"}
                    | {"requests_a_second": f"{rows / min(seconds):.2f}"}
                )
                print(*table[-1].values())
    write_table(table, given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
