"""What 8 and 4 bits cost a model, beside llama.cpp's Q4_0 and Q8_0 of the same weights.

Usage: python eval/speed/few_bits.py MODEL [MODEL ...] [--output eval/speed/few_bits.csv]

Needs torchao and gguf. The linear layers whose inputs are a multiple of 32 are rounded by torchao
(``int4`` as ``IntxWeightOnlyConfig(torch.int4, PerGroup(32))``, with and without HQQ) or by gguf,
whose formats' rounded weights run in float32. Prints and writes bits per byte of this repository's
own modeling code, in rows of 512 tokens, and how far logits are from those of float32: the root of
the mean square over that of float32's.
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
import torch
from llama import GROUP, in_groups
from report import write_table
from torch import nn
from torchao.quantization import (  # pyright: ignore[reportMissingImports]
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.workflows import (  # pyright: ignore[reportMissingImports]
    IntxChooseQParamsAlgorithm,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import ssmzoo.auto  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
ROW = 512
INT4: dict[str, Any] = {"weight_dtype": torch.int4, "granularity": PerGroup(GROUP)}
CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(**INT4),
    "int4, HQQ": IntxWeightOnlyConfig(
        **INT4, intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY
    ),
}
FORMATS = ("Q8_0", "Q4_0")


def rounded(model: nn.Module, kind: str) -> nn.Module:
    """Return a copy of a model in one of the precisions."""
    model = copy.deepcopy(model)
    if kind in CONFIGS:
        quantize_(model, CONFIGS[kind], lambda layer, _: in_groups(layer))
    elif kind in FORMATS:
        number = gguf.GGMLQuantizationType[kind]
        for layer in filter(in_groups, model.modules()):
            weight: Any = layer.weight
            bits = gguf.quants.quantize(weight.detach().numpy(), number)
            layer.weight = nn.Parameter(torch.tensor(gguf.quants.dequantize(bits, number)))
    return model


@torch.no_grad()
def measure(model: Any, exact: Any, ids: torch.Tensor, text_bytes: int) -> tuple[float, float]:
    """Return bits per byte, and the distance from another model's logits."""
    nats = off = size = 0.0
    for rows in ids.split(8):
        logits, wanted = (m(rows, use_cache=False).logits for m in (model, exact))
        targets = rows[:, 1:].flatten()
        nats += float(
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        )
        off += float((logits - wanted).square().sum())
        size += float(wanted.square().sum())
    return nats / math.log(2) / (text_bytes * (ROW - 1) / ROW), math.sqrt(off / size)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What few bits cost a model.")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    given = parser.parse_args()
    text = "".join(p.read_text() for p in sorted((ROOT / "src/ssmzoo/modeling").glob("*.py")))
    rows = []
    for path in given.models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = torch.tensor(tokenizer(text).input_ids)
        ids = ids[: len(ids) // ROW * ROW].view(-1, ROW)
        length = len(tokenizer.decode(ids.flatten()).encode())
        for kind in ("float32", *CONFIGS, *FORMATS):
            bits, off = measure(rounded(model, kind), model, ids, length)
            name = path.parent.name if path.name == "model" else path.name
            rows.append({"model": name, "precision": kind, "bits_per_byte": f"{bits:.4f}"})
            rows[-1] |= {"off_float32": f"{off:.1e}", "bytes": length}
            print(*rows[-1].values(), flush=True)
    write_table(rows, given.output)


if __name__ == "__main__":
    main()
