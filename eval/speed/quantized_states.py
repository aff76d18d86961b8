"""What states in 12 and in 8 bits cost, token by token, through 65,536 tokens.

Usage: python eval/speed/quantized_states.py --text MODEL ... --recall MODEL

``float32`` is the usual cache; ``12 bits`` is ``QuantizedStateCache``; ``8 bits`` is the same with
the lower 4 bits dropped after every token. First decoding Longhorn-125m with random weights by 64
rows: milliseconds a step and the state's bytes a row. Of models of bytes, bits per byte of this
repository's own code, in 4 rows, of all tokens and of the last 8,192. Of a model that solves
``induction_heads`` of that length, the share of 32 rows whose target it names.
Writes eval/speed/quantized_states.csv.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import write_table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ssmzoo.auto  # noqa: F401
from ssmzoo import load_family
from ssmzoo.modeling import QuantizedStateCache, StateCache
from ssmzoo.modeling.quantized_cache import GROUP
from ssmzoo.tasks import induction_heads
from ssmzoo_kernels.machine import circumstances

ROOT = Path(__file__).resolve().parents[2]
TOKENS, LAST = 65536, 8192


class EightBits(QuantizedStateCache):
    """Its states without the lower bits, which lie behind the higher ones."""

    def take(self, states: list[Any], hidden_states: Tensor) -> Tensor:
        """Drop them from what a call left."""
        hidden_states = super().take(states, hidden_states)
        for layer in self.layers:
            for name, (shape, _) in layer.kinds.items():
                padded = math.ceil(math.prod(shape) / GROUP) * GROUP
                layer.states[name][:, padded : padded * 3 // 2] = 0
        return hidden_states


KINDS = {"float32": StateCache, "12 bits": QuantizedStateCache, "8 bits": EightBits}


def logits(model: Any, ids: Tensor, cache: StateCache) -> Iterator[Tensor]:
    """Return the logits ``[B, V]`` behind each token of ``[B, L]``."""
    for token in ids.split(1, dim=1):
        yield model(token, cache=cache, use_cache=True).logits[:, 0]


def bits_per_byte(model: Any, ids: Tensor, cache: StateCache) -> tuple[float, float]:
    """Return those of all bytes, and of the last ones."""
    lost = []
    for scores, target in zip(logits(model, ids[:, :-1], cache), ids[:, 1:].T, strict=True):
        lost.append(torch.nn.functional.cross_entropy(scores, target).item() / math.log(2))
    return sum(lost) / len(lost), sum(lost[-LAST:]) / LAST


def recalled(model: Any, ids: Tensor, targets: Tensor, cache: StateCache) -> float:
    """Return the share of rows whose target is named behind the last token."""
    last = torch.empty(0)
    for scores in logits(model, ids, cache):
        last = scores
    return (last.argmax(1) == targets).float().mean().item()


def text() -> str:
    """Return this repository's own code."""
    files = sorted((ROOT / "src" / "ssmzoo").rglob("*.py"))
    return "".join(path.read_text("utf-8") for path in files)


def decoding(kind: Callable[[Any], StateCache]) -> dict[str, Any]:
    """Return how long a step of 64 rows takes, and how large a row's state is."""
    longhorn = load_family("longhorn")
    torch.manual_seed(0)
    model = longhorn.causal_lm_class(longhorn.config("longhorn-125m")).eval()
    token, cache, times = torch.ones(64, 1, dtype=torch.long), kind(model.config), []
    for _ in range(12):
        begun = time.perf_counter()
        model(token, cache=cache, use_cache=True)
        times.append(time.perf_counter() - begun)
    return {"step_ms": round(1e3 * min(times), 1), "state_bytes": cache.nbytes // 64}


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What states in few bits cost.")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--recall", required=True)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(model: str, kind: str, **found: Any) -> None:
        row = {"model": model, "states": kind, "bits": "", "bits_last": "", "recall": ""}
        row |= {"step_ms": "", "state_bytes": "", **found}
        print(*row.values(), flush=True)
        rows.append({**row, **circumstances(torch.device("cpu"))})

    for name, kind in KINDS.items():
        add("longhorn-125m", name, **decoding(kind))
    for path in given.text:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(path)(text(), return_tensors="pt").input_ids
        ids = ids[0, : 4 * TOKENS].view(4, TOKENS)
        for name, kind in KINDS.items():
            every, last = bits_per_byte(model, ids, kind(model.config))
            add(Path(path).name, name, bits=f"{every:.4f}", bits_last=f"{last:.4f}")
    task = {"vocab_size": 9, "num_symbols": 7, "seed": 5}
    inputs, labels = map(torch.from_numpy, induction_heads(32, seq_len=TOKENS, **task))
    model = AutoModelForCausalLM.from_pretrained(given.recall, dtype=torch.float32).eval()
    for name, kind in KINDS.items():
        found = recalled(model, inputs[:, :TOKENS], labels[:, -1], kind(model.config))
        add(f"{model.config.model_type}, induction_heads", name, recall=f"{found:.3f}")
    write_table(rows, Path(__file__).with_suffix(".csv"))


if __name__ == "__main__":
    main()
