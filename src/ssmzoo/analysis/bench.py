"""Speed of whole models on this machine, beside transformers' own of equal shape.

Every figure is of one process on one batch: the median of several calls after a warm-up, or of a
peer that takes minutes one call. Several runs take turns over all models, so that a slow minute
of the machine hits all of them alike; of these the median is shown, with the least and the most.
"""

from __future__ import annotations

import csv
import io
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ssmzoo.environment.places import require_writable
from ssmzoo.files import write_text

HIDDEN, LAYERS, STATE, BATCH, VOCABULARY = 256, 4, 16, 4, 1000
DECODED = 400
_KEY = ("what", "variant", "pass", "shape", "dtype")  # of two different rows one of them differs
_NO_COLUMN = ("slug", "python")  # of the circumstances, in the table of speeds
SHAPE = f"hidden {HIDDEN}, {LAYERS} layers, state {STATE}, batch {BATCH}"


@dataclass(frozen=True)
class Peer:
    """A model to time: how to build it, and which passes it can bear."""

    build: Callable[[], Any]
    train_lengths: tuple[int, ...] | None = None  # None: all
    slow: bool = False
    decode: bool = True
    ours: bool = False  # on our kernels


def bench(
    families: Sequence[str],
    *,
    lengths: Sequence[int] = (512, 2048),
    peers: bool = True,
    slow: bool = False,
    runs: int = 1,
    memory: bool = False,
    stock: bool = False,
    output: str | Path | None = None,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Time a training step and decoding of families and, beside them, of transformers' models.

    Args:
        families: Family names.
        lengths: Sequence lengths of the training step.
        peers: Also time transformers' Mamba and Mamba2, as they are and on our kernels.
        slow: Also time transformers' Mamba on its default CPU path, minutes a step at length 512.
        runs: How often everything is timed.
        memory: Also measure ``peak_mib``, by how much a training step raises memory above its
            inputs, each in a process of its own.
        stock: Leave out those on our kernels.
        output: CSV file to write the rows to, or a folder for ``<device>.csv``. Its rows
            of the same measurements are replaced.
        report: Called with each line of the report.

    Returns:
        A row a measurement: ``what``, ``variant``, ``pass``, ``shape``, ``dtype``, ``runs``, and of
        those the medians ``milliseconds`` and ``tokens_per_second``, and the least and the most
        tokens per second, ``slowest`` and ``fastest``.

    Raises:
        LookupError: An unknown family.
        ValueError: ``runs`` is below 1, ``output`` is neither, or a family refuses the sizes.
        RuntimeError: ``output`` lies in a folder that cannot be written to.
    """
    import torch

    from ssmzoo_kernels.machine import circumstances

    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = circumstances(device)
    target = None if output is None else _target(Path(output), facts["slug"])
    models = {name: Peer(_family(name)) for name in families}
    if peers:
        models |= {
            name: peer
            for name, peer in _peers().items()
            if (slow or not peer.slow) and not (stock and peer.ours)
        }
    rows = _timed(models, families, lengths, runs, device, report)
    for line in (line for name in families for line in _ratios(rows, name)):
        report(line)
    if target is not None:
        _write(target, rows, facts)
    if memory:
        _measure_memory(rows, models, report)
        if target is not None:
            _write(target, rows, facts)
    return rows


def _timed(
    models: dict[str, Peer],
    families: Sequence[str],
    lengths: Sequence[int],
    runs: int,
    device: Any,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Time every model's passes, the runs in turns over all models, and return the rows."""
    import torch

    timed: dict[tuple[str, str], list[float]] = {}
    tokens: dict[tuple[str, str], int] = {}
    # decoding first: the allocator is slower after training
    for times in (_decoding, _training):
        for run in range(1, runs + 1):
            for name, peer in models.items():
                torch.manual_seed(0)
                model = peer.build().to(device)
                for kind, count, seconds in times(model, peer, name in families, lengths, device):
                    timed.setdefault((name, kind), []).append(seconds)
                    tokens[name, kind] = count
                    once = _row(name, kind, count, [seconds])
                    report(_line(once) + (f", run {run} of {runs}" if runs > 1 else ""))
                del model
    rows = [
        _row(name, kind, tokens[name, kind], seconds)
        for model in models
        for (name, kind), seconds in timed.items()
        if name == model
    ]
    if runs > 1:
        for row in rows:
            report(_line(row) + f", {row['slowest']:,d} to {row['fastest']:,d}")
    return rows


def _measure_memory(
    rows: list[dict[str, Any]], models: dict[str, Peer], report: Callable[[str], None]
) -> None:
    """Add ``peak_mib`` to the rows of training, each measured in a process of its own."""
    from ssmzoo_kernels.machine import measured_apart

    for row in rows:
        kind, peer = row["pass"], models[row["variant"]]
        if not kind.startswith("train") or peer.slow:
            continue
        length = int(kind.removeprefix("train L="))
        program = f"from {__name__} import print_peak; print_peak({row['variant']!r}, {length})"
        try:
            row["peak_mib"] = measured_apart(program)
        except subprocess.CalledProcessError as error:  # the system may kill the largest process
            report(f"{row['variant']:40s} {kind:18s} not measured: {error}")
            continue
        report(f"{row['variant']:40s} {kind:18s} {row['peak_mib']:10.1f} MiB")


Timed = Iterable[tuple[str, int, float]]  # the pass, its tokens, its seconds


def _decoding(model: Any, peer: Peer, own: bool, lengths: Sequence[int], device: Any) -> Timed:
    for prompt in (100, 20_000) if own else (100,):
        if peer.decode:
            yield f"decode after {prompt}", BATCH, _decode_seconds(model, prompt, device)


def _training(model: Any, peer: Peer, own: bool, lengths: Sequence[int], device: Any) -> Timed:
    for length in lengths:
        if peer.train_lengths is None or length in peer.train_lengths:
            seconds = _train_seconds(model, length, device, once=peer.slow)
            yield f"train L={length}", BATCH * length, seconds


def time_call(call: Callable[[], Any], device: Any, repeats: int = 7) -> float:
    """Return the median seconds of a call after one to warm up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _family(name: str) -> Callable[[], Any]:
    from ssmzoo.family import load_family

    family = load_family(name)
    kind = family.config_class
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    sizes["vocab_size"] = VOCABULARY
    if "d_state" in {*kind.attribute_map, *(field.name for field in fields(kind))}:
        sizes["d_state"] = STATE
    config = family.config(**sizes)  # sizes are refused before any timing
    return lambda: family.causal_lm_class(config)


def _peers() -> dict[str, Peer]:
    import transformers

    from ssmzoo.modeling.stock import accelerate

    def mamba(**fields: Any) -> Any:
        config = transformers.MambaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            state_size=STATE,
            vocab_size=VOCABULARY,
            **fields,
        )
        return transformers.MambaForCausalLM(config)

    def mamba2() -> Any:
        config = transformers.Mamba2Config(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            state_size=STATE,
            vocab_size=VOCABULARY,
            num_heads=8,
            head_dim=64,
            n_groups=1,
            chunk_size=64,
            tie_word_embeddings=True,
        )
        return transformers.Mamba2ForCausalLM(config)

    def on_our_kernels(build: Callable[[], Any]) -> Peer:
        return Peer(lambda: accelerate(build()).model, ours=True)

    return {
        "transformers Mamba2": Peer(mamba2),
        "transformers Mamba2 (ssmzoo's kernels)": on_our_kernels(mamba2),
        "transformers Mamba (mamba.py)": Peer(lambda: mamba(use_mambapy=True), decode=False),
        "transformers Mamba": Peer(mamba, train_lengths=()),
        "transformers Mamba (ssmzoo's kernels)": on_our_kernels(mamba),
        "transformers Mamba (default)": Peer(mamba, train_lengths=(512,), slow=True, decode=False),
    }


def print_peak(name: str, length: int) -> None:
    """Print the MiB by which a training step raises the memory of a process that just began.

    Args:
        name: Of a family, or of a peer.
        length: Tokens of each sequence.

    Raises:
        LookupError: Neither a family nor a peer.
    """
    import torch

    from ssmzoo_kernels.machine import memory_growth

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peer = _peers().get(name)
    build = _family(name) if peer is None else peer.build
    _seeded(build, device, 64)()  # builds and loads the kernels
    grown = memory_growth(_seeded(build, device, length), device)
    sys.stdout.write(f"{grown / 2**20:.1f}\n")


def _seeded(build: Callable[[], Any], device: Any, length: int) -> Callable[[], None]:
    import torch

    torch.manual_seed(0)
    return _training_step(build().to(device), length)


def _training_step(model: Any, length: int) -> Callable[[], None]:
    import torch

    ids = torch.randint(0, VOCABULARY, (BATCH, length), device=model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _train_seconds(model: Any, length: int, device: Any, *, once: bool) -> float:
    step = _training_step(model, length)
    if once:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    return time_call(step, device, repeats=5)


def _decode_seconds(model: Any, prompt: int, device: Any) -> float:
    """Return the median seconds between two steps of ``generate`` after a prompt."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Clock(LogitsProcessor):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return scores

    ids = torch.randint(3, VOCABULARY, (BATCH, prompt), device=device)
    model.eval()
    for steps in (DECODED // 4, DECODED):  # the first to warm up
        clock = Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=steps,
            min_new_tokens=steps,
            pad_token_id=0,
            eos_token_id=1,
            logits_processor=LogitsProcessorList([clock]),
        )
    return statistics.median(b - a for a, b in itertools.pairwise(clock.times))


def _row(name: str, kind: str, tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "what": "model",
        "variant": name,
        "pass": kind,
        "shape": SHAPE,
        "dtype": "float32",
        "milliseconds": round(middle * 1e3, 3),
        "tokens_per_second": round(tokens / middle),
        "runs": len(seconds),
        "slowest": round(tokens / max(seconds)),
        "fastest": round(tokens / min(seconds)),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['variant']:40s} {row['pass']:18s} {row['milliseconds']:10.1f} ms "
        f"{row['tokens_per_second']:9,d} tokens/s"
    )


def _ratios(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Compare a family with every peer that ran the same pass."""
    own = {row["pass"]: row["tokens_per_second"] for row in rows if row["variant"] == name}
    lines = [
        f"{name} / {row['variant']}, {row['pass']}: "
        f"{own[row['pass']] / row['tokens_per_second']:.2f} times"
        for row in rows
        if row["variant"] != name and row["pass"] in own
    ]
    first, last = (own.get(f"decode after {n}") for n in (100, 20_000))
    if first and last:
        lines.append(f"{name}, decoding after 20,000 tokens / after 100: {last / first:.2f} times")
    return lines


def _target(output: Path, slug: str) -> Path:
    """Return the CSV file that ``output`` means.

    Raises:
        ValueError: It cannot be one, or holds something else than a benchmark's rows.
        RuntimeError: Its folder cannot be written to.
    """
    path = output / f"{slug}.csv" if output.is_dir() else output
    if path.suffix != ".csv" or not path.parent.is_dir():
        raise ValueError(
            "output must be a .csv file in a folder that is there, or a folder, got "
            f"{str(output)!r}"
        )
    require_writable(path.parent, "output")
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            columns = next(csv.reader(file), [])
        if not set(_KEY) <= set(columns):
            raise ValueError(f"output must hold a benchmark's rows or be new, got {str(path)!r}")
    return path


def _write(path: Path, rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write rows with the facts that all share; other rows of the file stay."""
    rows = [{**row, **{k: v for k, v in facts.items() if k not in _NO_COLUMN}} for row in rows]
    fresh = {tuple(row[name] for name in _KEY) for row in rows}
    columns: list[str] = []
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            kept = [row for row in reader if tuple(row.get(name) for name in _KEY) not in fresh]
    columns += [name for row in rows for name in row]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(columns)))
    writer.writeheader()
    writer.writerows([*kept, *rows])
    write_text(path, text.getvalue())
