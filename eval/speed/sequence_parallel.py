"""Train long rows in pieces on several processes of this machine: seconds and memory by length.

    python eval/speed/sequence_parallel.py --output eval/results   # all families; about 15 minutes
    python eval/speed/sequence_parallel.py --families longhorn --longest 16 --output FOLDER

A row of 2^k random tokens goes forward and backward through a small model of each family (its tiny
configuration), on 1 process and on 4 with a thread each. Memory is a process's highest resident
memory above its start, of the process that needs most. glibc keeps blocks below 32 MiB in a heap
with holes, so shorter rows look larger than what they need. A second run has blocks from 1 MiB on
outside that heap; its memory is "MiB", and all else is of the first. Bytes are what all sent.
"""

import argparse
import csv
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.functional import cross_entropy

from ssmzoo import families, load_family
from ssmzoo.modeling import sequence_parallel, sequence_piece

COLUMNS = ("family", "processes", "length", "seconds", "MiB", "MiB with holes", "bytes sent")
# the softmax of DSS's kernel is over a length that is fixed
SETTINGS = {"dss": {"kernel_variant": "exp"}}
FIRST = 14  # the shortest row has 2^14 tokens


def main():
    """Measure, and write ``sequence_parallel.csv`` and ``.png``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=sorted(families()))
    parser.add_argument("--longest", type=int, default=20, help="the longest row: 2 to this")
    parser.add_argument("--alone", type=int, default=18, help="the longest row of one process")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    file = given.output / "sequence_parallel.csv"
    rows = []
    for family in given.families:
        for processes, longest in ((1, min(given.alone, given.longest)), (4, given.longest)):
            found = []
            for heap in ({}, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}):
                queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
                told = processes, family, range(FIRST, longest + 1, 2), queue
                os.environ.update(heap)
                torch.multiprocessing.spawn(measure, told, nprocs=processes)
                for name in heap:
                    del os.environ[name]
                found.append(queue.get())
            for (length, seconds, holes, sent), (_, _, memory, _) in zip(*found, strict=True):
                rows.append((family, processes, length, seconds, memory, holes, sent))
                print(*rows[-1], flush=True)
            with file.open("w", encoding="utf-8", newline="") as lines:
                csv.writer(lines).writerows([COLUMNS, *rows])
    draw(rows, file.with_suffix(".png"))


def measure(rank, processes, family, powers, queue):
    """Be one of the processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    torch.manual_seed(0)
    found = load_family(family)
    model = found.causal_lm_class(found.config(**{**found.tiny, **SETTINGS.get(family, {})}))
    vocabulary = model.config.vocab_size
    sent = [0]
    send = sequence_parallel._Line._send

    def counted(line, tensor, to):
        sent[0] += tensor.nbytes
        send(line, tensor, to)

    sequence_parallel._Line._send = counted
    step(model, torch.randint(vocabulary, (1, 512)), rank, processes)  # what is made once
    start, rows = highest(reset=True), []
    for power in powers:
        length = 1 << power
        ids = torch.randint(vocabulary, (1, length))
        dist.broadcast(ids, 0)
        highest(reset=True)
        sent[0] = 0
        dist.barrier()
        begin = time.perf_counter()
        step(model, ids, rank, processes)
        dist.barrier()
        seconds = time.perf_counter() - begin
        own = torch.tensor([highest() - start, 0])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        total = torch.tensor(sent)
        dist.all_reduce(total)
        rows.append((length, round(seconds, 2), int(own[0]) // 1024, int(total)))
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def step(model, ids, rank, processes):
    """Go forward and backward through this process's piece of a row."""
    targets = torch.cat([ids[0, 1:], torch.tensor([-100])])
    piece = targets.chunk(processes)[rank]
    logits = model(**sequence_piece(model, ids)).logits[0]
    (cross_entropy(logits, piece, reduction="sum") / ids.numel()).backward()
    model.zero_grad()


def highest(reset=False):
    """Return the highest resident memory so far in KiB, or what is held now, from here on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def draw(rows, file):
    """Draw memory and time against length, a line a family, dashed for one process."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    names = sorted({row[0] for row in rows})
    for number, name in enumerate(names):
        for processes, style in ((1, "--"), (4, "-")):
            mine = [row for row in rows if row[:2] == (name, processes)]
            lengths = [row[2] for row in mine]
            label = name if processes == 4 else None
            told = {"color": f"C{number}", "linestyle": style, "marker": ".", "label": label}
            axes[0].plot(lengths, [row[4] for row in mine], **told)
            axes[1].plot(lengths, [row[3] for row in mine], **told)
    for axis, what in zip(axes, ("MiB a process, above its start", "seconds a step"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens a row", ylabel=what)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, title="4 processes; dashed: 1")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
