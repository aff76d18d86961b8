"""Streams on any number of processes: no row depends on it, nothing is lost or read twice."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.data.test_tokenizer import word_tokenizer
from tests.forks import COMMAND, ended

from ssmzoo.data import documents
from ssmzoo.data.rows import Rows
from ssmzoo.data.sources import data_source
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.data.tokens import read_store, write_store
from ssmzoo.data.workers import Workers, encoded
from ssmzoo.recipe import Recipe
from ssmzoo.training.stopping import SIGNALS

BATCH, SEQ_LEN = 12, 16


def recipe(batch_size=BATCH, **data):
    train = {"steps": 1, "batch_size": batch_size, "seq_len": SEQ_LEN, "lr": 1.0}
    return Recipe.model_validate(
        {"model": {"config_of": "llama"}, "data": {"streaming": True, **data}, "train": train}
    )


# a document is one character again and again: its tokens are counted wherever they are packed
LENGTHS = {chr(c): 1 + c * c % 37 for c in range(35, 125) if chr(c) != "\\"} | {"~": 1200}


def write(folder, kind):
    """Write the documents as small shards; return what reads them."""
    folder.mkdir()
    records = [{"text": character * length} for character, length in LENGTHS.items()]
    lines = [json.dumps(record) + "\n" for record in records]
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(lines[:60]), encoding="utf-8")
        (folder / "b.jsonl").write_text("\n".join(lines[60:]).rstrip(), encoding="utf-8")
        return {"jsonl": str(folder / "*.jsonl")}
    if kind == "parquet":
        table = pyarrow.Table.from_pylist(records)
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
        return {"parquet": str(folder / "*.parquet")}
    for i in range(20):
        name, opener = ("train-{}.jsonl", open) if kind == "hub" else ("{}.jsonl.gz", gzip.open)
        with opener(folder / name.format(i), "wt", encoding="utf-8") as file:
            file.writelines(lines[i::20])
    return {"dataset": str(folder)} if kind == "hub" else {"jsonl": str(folder / "*.gz")}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "SHARD_BYTES", 250)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


class Ranks:
    """The processes of a run, in one."""

    def __init__(self, recipe, cache, world, positions=()):
        source = data_source(recipe)
        manifest = source.prepare(cache)
        opened = [source.open(cache, manifest, rank=r, world=world) for r in range(world)]
        self.close = [data.close for data in opened]
        self.ranks = [data.train for data in opened]
        for rank in self.ranks if positions else ():
            rank.seek(*positions)

    def step(self, accumulate=1):
        n = BATCH // len(self.ranks) // accumulate
        parts = [rank.next_batch(n) for _ in range(accumulate) for rank in self.ranks]
        return Rows(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def positions(self):
        return [json.loads(json.dumps(rank.position())) for rank in self.ranks]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "hub"])
def test_any_number_of_ranks_reads_each_token_of_an_epoch_once_through_resumes(kind, tmp_path):
    """Each pair of 1 to 4 ranks is a resume, in both directions, and the rows are those of one."""
    walk = [1, 2, 1, 3, 1, 4, 2, 3, 4, 3, 2, 4, 1, 1]
    assert {*pairwise(walk)} >= {*permutations((1, 2, 3, 4), 2)}
    fields = recipe(**write(tmp_path / "data", kind), shuffle_buffer=30)
    alone = Ranks(fields, tmp_path, 1)
    lanes, shards = alone.ranks[0].lanes, alone.positions()[0]["shards"]
    assert lanes > 2
    taken = [[] for _ in range(lanes)]  # the rows of each lane
    counts = [None] * lanes  # its tokens in three epochs
    ranks, step = alone, 0
    while None in counts:
        if step % 3 == 0:
            world = walk[step // 3 % len(walk)]
            ranks = Ranks(fields, tmp_path, world, ranks.positions())
            ranks = Ranks(fields, tmp_path, world, ranks.positions())  # before any step
        rows = ranks.step(accumulate=2 if step % 2 and world != 4 else 1)
        expected = alone.step() if ranks is not alone else rows
        assert (rows.input_ids == expected.input_ids).all()
        assert (rows.labels == expected.labels).all()
        step += 1
        for lane, part in enumerate(np.split(rows.input_ids, lanes)):
            taken[lane].extend(part)
        for positions in ranks.positions():
            for lane, now in positions["lanes"].items():
                epoch = (now["turn"] * lanes + int(lane)) // shards
                if epoch >= 3 and counts[int(lane)] is None:
                    whole = [*taken[int(lane)][: now["first"]], now["carry"]]
                    counts[int(lane)] = Counter(int(token) for row in whole for token in row)
    assert step > 3 * len(walk)
    three = sum(counts, Counter())
    assert {chr(t): n for t, n in three.items() if t < 256} == {
        c: 3 * n for c, n in LENGTHS.items()
    }


@pytest.mark.long
def test_workers_write_the_same_store(tmp_path):
    texts = [("", f"{i} " + "ant bee " * (i % 400)) for i in range(15_000)]
    tokenizer = byte_tokenizer()
    for workers in (0, 2):
        write_store(iter(texts), tokenizer, tmp_path / str(workers), "key", "data.jsonl", workers)
    for name in ("tokens", "ends.npy", "hashes.npy", "store.json"):
        one, other = ((tmp_path / workers / name).read_bytes() for workers in "02")
        assert one == other, name
    assert len(read_store(tmp_path / "2").tokens) > 5 * 4_000_000  # of more batches than fit ahead


@pytest.mark.long
def test_workers_change_no_row_of_a_stream_and_no_position(tmp_path):
    fields = write(tmp_path / "data", "jsonl")
    alone = Ranks(recipe(**fields, shuffle_buffer=30), tmp_path, 1)
    helped = Ranks(recipe(**fields, shuffle_buffer=30, workers=1), tmp_path, 1)
    for _ in range(30):
        assert (alone.step().input_ids == helped.step().input_ids).all()
        assert alone.positions() == helped.positions()
    helped.close[0]()


@pytest.mark.long
def test_a_worker_ignores_signals_raises_errors_and_is_named_when_killed(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)  # whose modules no worker imports
    with closing(Workers(byte_tokenizer(), 1)) as workers:
        pid = workers.submit(pid_of)()
        for number in SIGNALS:  # as all of a job's processes get them
            os.kill(pid, number)
            assert workers.submit(pid_of)() == pid
        with pytest.raises(ValueError, match=r"data\.text must be text"):
            workers.submit(raise_error)()
        assert workers.submit(encoded, ["ab"])()[0].tolist() == [257, 97, 98, 258]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            RuntimeError, match=rf"data\.workers: worker process {pid} .*status -9"
        ) as caught:
            workers.submit(encoded, ["ab"])()
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_worker_finds_a_tokenizer_beside_the_script_and_does_not_outlive_it(tmp_path):
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    (tmp_path / "script.py").write_text(
        "import os, signal\n"
        "from own import Own\n"
        "from ssmzoo.data.tokenizer import byte_tokenizer\n"
        "from ssmzoo.data.workers import Workers, encoded\n\n"
        "tokenizer = byte_tokenizer()\n"
        "tokenizer.__class__ = Own\n"
        "workers = Workers(tokenizer, 1)\n"
        "print(workers.submit(encoded, ['ab'])()[0].tolist())\n"
        "print(workers._processes[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    tokens, pid = done.stdout.splitlines()
    assert tokens == "[257, 97, 98, 258]"
    assert gone(int(pid))


def pid_of(encode):
    return os.getpid()


def raise_error(encode):
    raise ValueError("data.text must be text")


def gone(pid):
    """Return whether a process has ended, after a while."""
    for _ in range(200):
        if ended(pid):
            return True
        time.sleep(0.05)
    return False


SESSION = """
import os
os.setsid()
"""


@pytest.mark.long
@pytest.mark.xdist_group("forks")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_to_all_its_processes_stops_a_run_with_workers_and_saves_it(
    number, status, forks, tmp_path
):
    """As Ctrl-C in a terminal does, and a cluster's SIGTERM to all of a job's processes."""
    fields = {
        "model": {"family": "longhorn", "config": {"hidden_size": 16, "num_hidden_layers": 1}},
        "data": {**write(tmp_path / "data", "jsonl"), "streaming": True, "workers": 2},
        "train": {"steps": 100_000, "batch_size": 4, "seq_len": 16, "lr": 0.01},
        "eval": {"every": 100_000},
        "checkpoint": {"every": 100_000},
        "log": {"every": 1},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields))
    metrics, children = tmp_path / "run" / "metrics.jsonl", []

    def interrupt(pid):
        while not ended(pid) and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        children.extend(int(child) for child in children_of(pid))
        os.killpg(pid, number)

    words = ["train", tmp_path / "recipe.yaml", "--output", tmp_path / "run"]
    done = forks.run(SESSION + COMMAND, *map(str, words), started=interrupt)
    assert done.status == status, done.log
    assert "which is saved" in done.log
    assert children
    assert all(map(gone, children))


def children_of(pid):
    return [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def test_ranks_read_their_own_parts_of_a_file(tmp_path, monkeypatch):
    open_jsonl, opened = documents.open_jsonl, []

    def watch(file, field, begin, end, position=None):
        opened.append((file.name, begin))
        return open_jsonl(file, field, begin, end, position)

    monkeypatch.setattr(documents, "open_jsonl", watch)
    fields = recipe(**write(tmp_path / "data", "jsonl"), shuffle_buffer=3)
    ranks = Ranks(fields, tmp_path, 4).ranks
    assert ranks[0].lanes == 4
    each = ranks[0].position()["shards"] // 4  # of the first epoch
    parts = []
    for rank in ranks:
        opened.clear()
        while len(opened) <= each:
            rank.next_batch(3)
        parts += opened[1 : each + 1]  # the first one shows whether there is text
    assert len(parts) == len({*parts}) >= 16


def test_fewer_records_than_ranks_are_shared(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "' + "a" * 100 + '"}\n')
    fields = recipe(jsonl=str(tmp_path / "a.jsonl"))
    four, one = Ranks(fields, tmp_path, 4), Ranks(fields, tmp_path, 1)
    for _ in range(5):
        assert (four.step().input_ids == one.step().input_ids).all()


def test_empty_shards_are_passed_over(tmp_path):
    lines = [
        '{"text": "' + "a" * 3000 + '"}\n',
        "\n" * 3000,
        '{"text": ""}\n' * 200,
        '{"text": "b"}',
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "empty.jsonl").touch()
    stream = Ranks(recipe(jsonl=str(tmp_path / "*.jsonl")), tmp_path, 2)
    assert stream.ranks[0].lanes > 2
    assert {97, 98} <= {int(t) for _ in range(60) for t in stream.step().input_ids.ravel()}


@pytest.mark.parametrize("content", ["", '{"text": ""}\n' * 300])
def test_a_stream_without_text_is_refused(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"data\.jsonl: .* must hold documents, got none"):
        Ranks(recipe(jsonl=str(tmp_path / "a.jsonl")), tmp_path, 1).step()


def test_documents_without_tokens_are_passed_over(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "words")
    texts = ["one two " * 9, " ", " "] * 20
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    fields = {"jsonl": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "words")}
    stream = Ranks(recipe(**fields, shuffle_buffer=2), tmp_path, 2)
    rows = [stream.step() for _ in range(20)]
    assert {int(token) for part in rows for token in part.input_ids.ravel()} == {3, 4}


def test_a_stream_of_documents_without_tokens_is_refused(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n' * 300, encoding="utf-8")
    fields = {"jsonl": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "words")}
    with pytest.raises(ValueError, match=r"data\.jsonl: the training stream must hold text"):
        Ranks(recipe(**fields), tmp_path, 1).step()


def test_a_file_that_shrank_is_named(tmp_path):
    fields = recipe(**write(tmp_path / "data", "jsonl"))
    ranks = Ranks(fields, tmp_path, 1)
    os.truncate(tmp_path / "data" / "a.jsonl", 40)
    with pytest.raises(ValueError, match=r"a\.jsonl must have \d+ bytes at least.* got 40; put it"):
        ranks.ranks[0].next_batch(BATCH * 30)


def test_positions_of_other_shards_are_refused(tmp_path, monkeypatch):
    fields = recipe(**write(tmp_path / "data", "jsonl"))
    (position,) = Ranks(fields, tmp_path, 1).positions()
    monkeypatch.setattr(documents, "SHARD_BYTES", 700)
    with pytest.raises(ValueError, match=r"data\.jsonl must come in the \d+ shards .* got"):
        Ranks(fields, tmp_path, 1, [position])
