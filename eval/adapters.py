"""Compare a state adapter with LoRA of as many trained parameters on four small tasks.

    python eval/adapters.py --runs runs/adapters                    # what is missing, and the table
    python eval/adapters.py --runs runs/adapters --model mamba2     # this base alone

A base is a small model that is trained here once on the code of Python's standard library, in
bytes. A cell is a base, a task, a method, a rate and a seed, and a line of
``eval/results/adapters.csv``. Two tasks are texts of another kind, judged by bits per byte; two are
questions with two answers, judged by accuracy. The table shows each method at the rate whose mean
over the seeds is best.
"""

import argparse
import csv
import math
import pydoc_data.topics
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

import ssmzoo.auto
from ssmzoo.files import write_folder
from ssmzoo.modeling import add_state_adapter
from ssmzoo_kernels.machine import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval/results/adapters.csv"
COLUMNS = ("model", "task", "method", "rate", "seed", "parameters", "metric", "before", "value")
COLUMNS += ("seconds", "hardware", "date")
CELL = COLUMNS[:5]
MODELS = ("longhorn", "mamba2")
TASKS = {"prose": "bits", "capitals": "bits", "majority": "accuracy", "kind": "accuracy"}
# by method; the two learn at rates that are a factor of ten apart
RATES = {"state": (1e-2, 3e-2, 1e-1, 3e-1), "lora": (3e-3, 1e-2, 3e-2, 1e-1)}
SEEDS = (0, 1, 2)
LENGTH, ROWS = 96, 16  # of a row of text, of a step
STEPS = {"bits": 80, "accuracy": 240}
BASE_STEPS, BASE_RATE = 600, 3e-3
HELD_OUT = 16  # rows of ROWS
# PEFT refuses the other layers of Mamba2, whose mixer may read their weights itself
LORA = {"mamba2": ["in_proj"]}


def texts():
    """Return code, and prose of the same library, as tensors of bytes, each in two parts."""
    library = Path(sysconfig.get_path("stdlib"))
    code = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:120])
    prose = "\n".join(pydoc_data.topics.topics.values()).encode()
    found = {"code": code, "prose": prose, "capitals": code.upper()}
    tensors = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
               for name, text in found.items()}  # fmt: skip
    return {
        name: x.split([len(x) * 9 // 10, len(x) - len(x) * 9 // 10]) for name, x in tensors.items()
    }


def windows(text, count, length, generator):
    """Return windows ``[count, length]`` of a text."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def batch(task, part, found, generator):
    """Return rows ``[ROWS, L]`` and labels, -100 where nothing is asked."""
    if TASKS.get(task, "bits") == "bits":
        rows = windows(found[task][part], ROWS, LENGTH, generator)
        return rows, rows
    length = 31
    if task == "kind":  # of which kind is this text?
        asked = torch.rand(ROWS, generator=generator) < 0.5
        both = [windows(found[name][part], ROWS, length, generator) for name in ("code", "prose")]
        rows = torch.where(asked[:, None], *both)
    else:  # which of two letters comes more often?
        letters = torch.rand(ROWS, length, generator=generator) < 0.5
        rows, asked = torch.where(letters, ord("a"), ord("b")), letters.sum(1) * 2 > length
    answer = torch.where(asked, ord("0"), ord("1"))[:, None]
    rows = torch.cat([rows, torch.full((ROWS, 1), ord("?")), answer], dim=1)
    labels = torch.full_like(rows, -100)
    labels[:, -1] = rows[:, -1]
    return rows, labels


@torch.no_grad()
def judge(model, task, found):
    """Return bits per byte, or the share of right answers, on the same held-out rows."""
    model.eval()
    generator, values = torch.Generator().manual_seed(99), []
    for _ in range(HELD_OUT):
        rows, labels = batch(task, 1, found, generator)
        output = model(input_ids=rows, labels=labels)
        if TASKS[task] == "bits":
            values.append(float(output.loss) / math.log(2))
        else:
            first, second = output.logits[:, -2, [ord("0"), ord("1")]].unbind(1)
            values.append(float(((first > second) == (rows[:, -1] == ord("0"))).float().mean()))
    return mean(values)


def train(model, task, found, rate, seed, steps):
    """Train what requires gradients, with Adam and a cosine to zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        rows, labels = batch(task, 0, found, generator)
        model(input_ids=rows, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def base(name, runs, found):
    """Return the base, trained on code if it is not there yet."""
    folder = runs / f"base-{name}"
    if not folder.is_dir():
        torch.manual_seed(0)
        if name == "mamba2":
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 4}
            sizes |= {"head_dim": 32, "n_groups": 1, "chunk_size": 32, "vocab_size": 256}
            model = Mamba2ForCausalLM(Mamba2Config(**sizes))
            ssmzoo.accelerate(model)
        else:
            family = ssmzoo.load_family(name)
            fields = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
            model = family.causal_lm_class(family.config(**fields))
        train(model, "code", found, BASE_RATE, 0, BASE_STEPS)
        write_folder(folder, model.save_pretrained)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if name == "mamba2":
        ssmzoo.accelerate(model)
    return model


def adapted(name, method, runs, found):
    """Return a base under an adapter, and how many parameters that trains."""
    model = base(name, runs, found)
    states = add_state_adapter(model)
    count = sum(p.numel() for p in states.parameters())
    if method == "state":
        return model, count
    targets = LORA.get(name) or list(ssmzoo.load_family(name).lora_targets)

    def lora(rank):
        fresh = base(name, runs, found)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        fresh = get_peft_model(fresh, config)
        return fresh, sum(p.numel() for p in fresh.parameters() if p.requires_grad)

    rank = max(1, round(count / lora(1)[1]))
    return lora(rank)


def measured():
    """Return the lines of what was measured, by cell."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {tuple(line[name] for name in CELL): line for line in csv.DictReader(file)}


def run(cell, runs, found):
    """Train one cell and write its line."""
    name, task, method, rate, seed = cell
    begun = time.process_time()
    torch.manual_seed(seed)
    model, count = adapted(name, method, runs, found)
    before = judge(model, task, found)
    train(model, task, found, rate, seed, STEPS[TASKS[task]])
    value = judge(model, task, found)
    seconds = round(time.process_time() - begun, 1)
    with RESULTS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        shown = (count, TASKS[task], f"{before:.4f}", f"{value:.4f}", seconds)
        writer.writerow((*cell, *shown, hardware(torch.device("cpu")), date))


def table():
    """Return the table of what was measured, in Markdown."""
    lines = ["| base | task | before | state | LoRA |", "|---|---|---|---|---|"]
    found = measured()
    for name in MODELS:
        for task, metric in TASKS.items():
            shown, before = [], "not measured"
            for method, rates in RATES.items():
                by_rate = {}
                for rate in rates:
                    cells = ((name, task, method, str(rate), str(seed)) for seed in SEEDS)
                    held = [found[cell] for cell in cells if cell in found]
                    if len(held) == len(SEEDS):
                        by_rate[rate] = [float(line["value"]) for line in held]
                        before = f"{float(held[0]['before']):.3f}"
                if not by_rate:
                    shown.append("not measured")
                    continue
                better = min if metric == "bits" else max
                rate = better(by_rate, key=lambda rate, by_rate=by_rate: mean(by_rate[rate]))
                values = by_rate[rate]
                spread = f"({min(values):.3f} to {max(values):.3f})"
                shown.append(f"{mean(values):.3f} {spread} at {rate}")
            lines.append(f"| {name} | {task}, {metric} | {before} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main():
    """Train the cells that are asked for and missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the bases")
    parser.add_argument("--model", choices=MODELS, action="append", help="this base alone")
    parser.add_argument(
        "--task", choices=TASKS, action="append", help="this task alone; again: more"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = texts()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for name in arguments.model or MODELS:
            for task in arguments.task or TASKS:
                for method, rates in RATES.items():
                    for rate in rates:
                        cell = (name, task, method, rate, seed)
                        if tuple(map(str, cell)) not in measured():
                            run(cell, arguments.runs, found)
    sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
