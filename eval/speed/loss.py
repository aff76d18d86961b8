"""A training step with and without logits: seconds and the peak of memory, by turns.

Each step runs in a process of its own, whose first step, on 64 tokens, is not counted.

    python eval/speed/loss.py eval/speed/loss.csv --checkpointing none selective
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from report import write_table

PRESET, WORDS, ROWS, LENGTH = "longhorn-125m", 50_304, 4, 2048


def step(skip: bool, checkpointing: str, autocast: bool) -> dict[str, float]:
    """Return the seconds of a step, and the MiB by which the process grew."""
    import torch

    from ssmzoo import load_family
    from ssmzoo.modeling.compat import enable_gradient_checkpointing

    family = load_family(PRESET.partition("-")[0])
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(PRESET, vocab_size=WORDS)).train()
    if checkpointing != "none":
        enable_gradient_checkpointing(model, selective=checkpointing == "selective")
    for rows, length in ((1, 64), (ROWS, LENGTH)):
        ids = torch.randint(WORDS, (rows, length))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin, begin_cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids, skip_logits=skip, use_cache=False).loss
        loss.backward()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        model.zero_grad(set_to_none=False)
    return {"seconds": seconds, "cpu_seconds": cpu, "grown_mib": grown / 2**10, "loss": loss.item()}


def main() -> int:
    """Measure, and write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--checkpointing", nargs="+", default=["none"], choices=("none", "selective", "full")
    )
    parser.add_argument("--autocast", action="store_true", help="bfloat16, weights in float32")
    parser.add_argument("--step", choices=("with", "without"), help="one step, in this process")
    options = parser.parse_args()
    if options.step is not None:
        print(
            json.dumps(step(options.step == "without", options.checkpointing[0], options.autocast))
        )
        return 0
    rows = []
    kinds = product(range(options.runs), options.checkpointing, ("with", "without"))
    for run, checkpointing, kind in kinds:
        call = [sys.executable, __file__, str(options.output), "--step", kind]
        call += ["--checkpointing", checkpointing] + ["--autocast"] * options.autocast
        found = json.loads(subprocess.run(call, check=True, stdout=subprocess.PIPE).stdout)
        rows.append({"model": PRESET, "tokens": ROWS * LENGTH, "words": WORDS, "logits": kind})
        rows[-1] |= {"checkpointing": checkpointing, "autocast": options.autocast}
        rows[-1] |= {"run": run, **found}
        print(rows[-1], flush=True)
    write_table(rows, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
