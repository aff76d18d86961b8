"""Compare the zoo's families on small ListOps, Delay and Copying, a resumable run a cell.

    python eval/families.py --runs runs/families    # train what is missing, and print the table
    python eval/families.py --runs runs/families --row s4 --task listops    # these cells alone

A cell is one ``ssmzoo train`` of a ``families-*`` recipe on one thread and a line of
``eval/results/families.csv``. The recipes, and so the rates, are the same for all rows: the table
compares families as they come, not at their best.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval/results/families.csv"
COLUMNS = ("cell", "metric", "value", "parameters", "hardware", "date", "command")
ROWS = {  # by row: the family, and the settings in which it is not the recipe's
    "dss": ("dss", {"kernel_variant": "exp"}),
    "dss-softmax": ("dss", {"kernel_variant": "softmax"}),
    "dss-no-scale": ("dss", {"kernel_variant": "exp_no_scale"}),
    "rtf": ("rtf", {}),
    "s4": ("s4", {}),
    "s5": ("s5", {}),
    "lru": ("s5", {"variant": "lru"}),
    "h3": ("h3", {}),
    "spacetime": ("spacetime", {}),
}
# variants that their paper compares on one task
ALONE = {"dss-softmax": "listops", "dss-no-scale": "listops"}
# by task: a filter alone, where a family has one
OWN = {
    "delay": {"rtf": {"block": "filter"}, "s4": {"block": "filter"}},
}
ORDERS = {"listops": (None,), "delay": (64, 256, 1024), "copying": (16, 64)}
SEEDS = {"listops": (0, 1, 2), "delay": (1112,), "copying": (1112,)}


def cells():
    """Yield row, task, order and seed of every cell, the first seed of all rows first."""
    for task, orders in ORDERS.items():
        for seed in SEEDS[task]:
            for row in rows_of(task):
                for order in orders:
                    yield row, task, order, seed


def rows_of(task):
    """Return the rows that a task has."""
    return [row for row in ROWS if ALONE.get(row, task) == task]


def name_of(row, task, order, seed):
    """Return a cell's name, which its folder and its results file have."""
    return "-".join(str(x) for x in (task, row, order, f"seed{seed}") if x is not None)


def train(row, task, order, seed, runs):
    """Train one cell, or go on with it, and write its line."""
    family, settings = ROWS[row]
    settings = {**settings, **OWN.get(task, {}).get(row, {})}
    if order is not None:
        settings["d_state"] = order
    options = {"model.family": family, "train.seed": seed}
    options |= {f"model.config.{field}": value for field, value in settings.items()}
    cell = name_of(row, task, order, seed)
    command = ["train", f"families-{task}", "--output", str(runs / cell), "--resume"]
    for option, value in options.items():
        command += ["--set", f"{option}={json.dumps(value)}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "ssmzoo", *command], check=True, env=environment)
    found = json.loads((runs / cell / "results.json").read_text(encoding="utf-8"))
    (score,) = found["results"]
    with RESULTS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        shown = (found["model"]["parameters"], found["hardware"], found["date"], found["command"])
        writer.writerow((cell, score["metric"], score["value"], *shown))


def measured():
    """Return the lines of what was measured, by cell."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {line["cell"]: line for line in csv.DictReader(file)}


def table():
    """Return the table of what was measured, in Markdown."""
    tasks = [(task, order) for task, orders in ORDERS.items() for order in orders]
    names = [task if order is None else f"{task} {order}" for task, order in tasks]
    lines = [f"| row | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    found = measured()
    for row in ROWS:
        shown = [row]
        for task, order in tasks:
            cells = (name_of(row, task, order, seed) for seed in SEEDS[task])
            values = [float(found[cell]["value"]) for cell in cells if cell in found]
            several = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            missing = "not measured" if row in rows_of(task) else ""
            shown.append(f"{mean(values):.3f}{several}" if values else missing)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main():
    """Train the cells that are asked for and missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--row", choices=ROWS, action="append", help="this row alone; again: more")
    parser.add_argument("--task", choices=ORDERS, action="append", help="this task alone")
    arguments = parser.parse_args()
    for row, task, order, seed in cells():
        wanted = row in (arguments.row or ROWS) and task in (arguments.task or ORDERS)
        if wanted and name_of(row, task, order, seed) not in measured():
            train(row, task, order, seed, arguments.runs)
    sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
