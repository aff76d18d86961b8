"""transformers' recurrent models on their own code and on our kernels, in one run.

Usage: python eval/speed/stock.py [--models mamba,jamba] [--no-default] [--rounds 5]

A training step (B4 L512 and B1 L2048) and a decoded token (B1) of models of hidden 256 with 4
layers. Stock and ours take turns of two calls, since a first one waits for pages that the other's
freed memory left to the system; the least time of each counts. "default" is what transformers
runs on a CPU as it comes, "mamba.py" its use_mambapy. Mamba's default loop takes minutes: it is
timed once, and last, since it leaves the process's memory in pieces. A step's memory is by how much
it raises a process of its own; of that loop, which takes the most, it is not measured. The
allocator is as Python has it: the loop waits for fresh pages most of its time. Floors: the products
of the linear layers at the speed of a large one here, or a decoded token's weights at the speed of
a copy. Writes kernels/benchmarks/results/stock.csv; rows there of what is not timed now stay, and
with --no-memory a row that is timed anew has no memory.
"""

import argparse
import csv
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from report import Rows, write_table
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import ssmzoo
from ssmzoo.modeling.compat import cache_name
from ssmzoo_kernels.machine import (
    circumstances,
    measured_apart,
    memory_growth,
)

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
PASSES = {"train B1 L2048": (1, 2048), "train B4 L512": (4, 512)}
TOKENS = 64  # decoded at a time

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 64,
}
_THREE_OF_FOUR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon_mamba": {"state_size": 16},
    "jamba": {
        **_ATTENTION,
        **{"num_experts": 1, "num_experts_per_tok": 1},
        **{"attn_layer_period": 4, "attn_layer_offset": 3},
    },
    "mamba2": {"state_size": 128, "num_heads": 8, "head_dim": 64, "n_groups": 1},
    "qwen3_5_text": {**_ATTENTION, **_DELTA, **_THREE_OF_FOUR},
    "kimi_linear": {
        **_ATTENTION,
        **_THREE_OF_FOUR,
        **{"linear_num_heads": 4, "linear_head_dim": 64, "num_experts": 4},
        **{"num_experts_per_token": 2, "moe_intermediate_size": 128},
        **{"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    },
}
WITH_MAMBAPY = ("mamba", "falcon_mamba", "jamba")


def variants(model_type: str) -> list[str]:
    """Return what a model type is timed as."""
    return ["default", *(["mamba.py"] if model_type in WITH_MAMBAPY else []), "ours"]


def build(model_type: str, variant: str) -> Any:
    """Return a model, every variant with the same weights."""
    settings = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    given = {**settings, **tokens, **MODELS[model_type]}
    if variant == "mamba.py":
        given["use_mambapy"] = given["use_falcon_mambapy"] = True
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given))
    if variant == "ours":
        ssmzoo.accelerate(model)
    return model


def train(model: Any, batch: int, length: int) -> Callable[[], None]:
    """Return a training step without its optimizer."""
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
    model.train()

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step


def decode(model: Any) -> Callable[[], None]:
    """Return the decoding of some tokens behind a prompt of 32."""
    ids = torch.randint(3, 1000, (1, 32), generator=torch.Generator().manual_seed(0))
    model.eval()
    with torch.no_grad():
        output = model(ids, use_cache=True)
    name = cache_name(output.keys())
    cache = output[name]

    def tokens() -> None:
        with torch.no_grad():
            for _ in range(TOKENS):
                model(ids[:, :1], use_cache=True, **{name: cache})

    return tokens


def print_growth(model_type: str, variant: str, batch: int, length: int) -> None:
    """Print by how many MiB a training step raises this process's memory."""
    logging.set_verbosity_error()
    step = train(build(model_type, variant), batch, length)
    print(memory_growth(step, torch.device("cpu")) / 2**20)


def seconds_of(call: Callable[[], None]) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def least_seconds(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the least time of each of some calls that take turns, the first to warm up."""
    least = dict.fromkeys(calls, float("inf"))
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = min(seconds_of(call), seconds_of(call))
            if number:
                least[name] = min(least[name], seconds)
    return least


def machine_speeds() -> tuple[float, float]:
    """Return the flops a second of a large matrix product, and the bytes a second of a copy."""
    a, b = torch.randn(2, 2048, 2048)
    x, y = torch.empty(2, 2**26)

    def product() -> None:
        torch.mm(a, b)

    def copy() -> None:
        y.copy_(x)

    least = least_seconds({"product": product, "copy": copy}, rounds=5)
    return 2 * 2048**3 / least["product"], 2 * x.numel() * 4 / least["copy"]


def step_flops(step: Callable[[], None]) -> int:
    """Return the flops of a step's matrix products."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "conv" not in str(op))


def decoded_bytes(model: Any) -> int:
    """Return the bytes of the weights that a token reads: all but the table of embeddings."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    read = [p for p in model.parameters() if p is not table or tied]
    return sum(p.numel() * p.element_size() for p in read)


def write_rows(rows: Rows, table: Path) -> None:
    """Write rows into a table, in which they replace earlier ones of the same thing."""

    def key(row: Mapping[str, object]) -> tuple[object, ...]:
        return row["model"], row["pass"], row["variant"]

    text = table.read_text(encoding="utf-8") if table.exists() else ""
    before = list(csv.DictReader(text.splitlines()))
    timed = {key(row) for row in rows}
    write_table([*(row for row in before if key(row) not in timed), *rows], table)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-default", action="store_true", help="leave out Mamba's default loop")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    flops, bandwidth = machine_speeds()
    where = circumstances(torch.device("cpu"))
    print(f"{where['device']}: {flops / 1e9:.0f} Gflop/s, {bandwidth / 1e9:.1f} GB/s", flush=True)
    rows: list[dict[str, object]] = []
    for model_type in options.models.split(","):
        minutes = model_type in WITH_MAMBAPY  # a step of the default loop
        for kind in ("decode B1", *PASSES):
            models = {}
            for variant in variants(model_type):
                loop = variant == "default" and minutes and kind in PASSES
                if loop and (options.no_default or kind == "train B1 L2048"):
                    continue  # four times as long as at L512
                if kind == "decode B1" and variant == "mamba.py":
                    continue  # it is for whole sequences
                models[variant] = build(model_type, variant)
            if kind in PASSES:
                calls = {name: train(model, *PASSES[kind]) for name, model in models.items()}
                floor = step_flops(calls["ours"]) / flops
            else:
                calls = {name: decode(model) for name, model in models.items()}
                floor = decoded_bytes(models["ours"]) / bandwidth
            once = calls.pop("default", None) if minutes and kind in PASSES else None
            least = least_seconds(calls, options.rounds)
            if once is not None:
                least["default"] = seconds_of(once)
            if kind == "decode B1":
                least = {name: seconds / TOKENS for name, seconds in least.items()}
            for variant, seconds in least.items():
                row: dict[str, object] = {"model": model_type, "pass": kind, "variant": variant}
                row["milliseconds"] = round(seconds * 1e3, 3)
                row["times_ours"] = round(seconds / least["ours"], 2)
                row["floor_ms"] = round(floor * 1e3, 3)
                slow = variant == "default" and minutes
                if kind in PASSES and not slow and not options.no_memory:
                    given = (model_type, variant, *PASSES[kind])
                    folder = str(Path(__file__).parent)
                    program = f"import sys; sys.path.insert(0, {folder!r}); import stock; "
                    row["peak_mib"] = round(
                        measured_apart(f"{program}stock.print_growth{given}"), 1
                    )
                rows.append({**row, **where})
                print(*(f"{value}" for value in row.values()), sep="  ", flush=True)
    write_rows(rows, options.output / "stock.csv")


if __name__ == "__main__":
    main()
