"""Read a corpus that is made on the spot, and tell how fast and in how much memory.

``python -m tests.data.data_scale FOLDER MEGABYTES {stored,streamed,both} WORKERS`` prints JSON, a
line for each form. A corpus that lies in FOLDER already is used again. Memory is the largest
resident size that each process of the tree ever had, summed.
"""

import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch  # noqa: F401  # as a process that trains has

from ssmzoo.data.sources import data_source
from ssmzoo.recipe import Recipe


def write_corpus(path, size):
    """Write a jsonl file of ``size`` bytes at least; return its documents and characters."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(5000)]
    texts = [" ".join(rng.choices(words, k=rng.randint(20, 2000))) for _ in range(500)]
    documents = characters = written = 0
    with path.open("w", encoding="ascii") as file:
        while written < size:
            for text in texts:
                written += file.write(f'{{"text": "{documents:09d} {text}"}}\n')
                documents, characters = documents + 1, characters + 10 + len(text)
    return documents, characters


class Memory(threading.Thread):
    """The largest resident sizes of this process and its children, looked at again and again."""

    def __init__(self):
        super().__init__(daemon=True)
        self.largest, self._ended = {}, threading.Event()
        self.start()

    def run(self):
        while not self._ended.wait(0.1):
            for tasks in Path("/proc/self/task").iterdir():
                with suppress(OSError, IndexError):  # it has ended
                    for pid in [os.getpid(), *(tasks / "children").read_text().split()]:
                        status = Path(f"/proc/{pid}/status").read_text()
                        peak = status.partition("VmHWM:")[2].split(maxsplit=1)
                        self.largest[int(pid)] = int(peak[0]) / 1024

    def end(self):
        """Return, in MiB, the size of this process and the sum of all."""
        self._ended.set()
        self.join()
        return self.largest[os.getpid()], sum(self.largest.values())


def read(folder, megabytes, form, workers):
    """Read an epoch of the corpus, in rows; return what was found."""
    corpus, facts = folder / f"{megabytes}.jsonl", folder / f"{megabytes}.json"
    if not facts.exists():
        facts.write_text(json.dumps(write_corpus(corpus, megabytes * 10**6)))
    documents, characters = json.loads(facts.read_text())
    recipe = Recipe.model_validate(
        {
            "model": {"config_of": "llama"},
            "data": {"jsonl": str(corpus), "streaming": form == "streamed", "workers": workers},
            "train": {"steps": 1, "batch_size": 64, "seq_len": 1024, "lr": 1.0},
        }
    )
    memory, begun = Memory(), time.perf_counter()
    source = data_source(recipe)
    data = source.open(folder / "cache", source.prepare(folder / "cache"))
    prepared = time.perf_counter()
    rows = (characters + 2 * documents) // 1024
    starts = sum(int((data.train.next_batch(64).input_ids == 257).sum()) for _ in range(rows // 64))
    data.close()
    seconds = time.perf_counter() - begun
    mine, together = memory.end()
    return {
        "form": form,
        "workers": workers,
        "megabytes": megabytes,
        "documents": documents,
        "read": starts,
        "tokens": rows // 64 * 64 * 1024,
        "seconds": round(seconds, 1),
        "prepared": round(prepared - begun, 1),
        "cpu": round(time.process_time(), 1),
        "megabytes_per_second": round(corpus.stat().st_size / 1e6 / seconds, 1),
        "lanes": getattr(data.train, "lanes", None),
        "rss_mib": round(together),
        "rss_here_mib": round(mine),
    }


if __name__ == "__main__":
    place, size, forms, count = sys.argv[1:]
    for form in ("stored", "streamed") if forms == "both" else (forms,):
        print(json.dumps(read(Path(place), int(size), form, int(count))))  # noqa: T201
