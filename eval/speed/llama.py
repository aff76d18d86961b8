"""Decoding and prefill of one Mamba by llama.cpp, by transformers and by us, in one run.

Usage: python eval/speed/llama.py [--llama python] [--layers 24] [--rounds 3] [--threads 1 2]

`--llama` names a Python that has llama-cpp-python, whose `pip install` builds llama.cpp for this
CPU with cmake; this one needs gguf and torchao. (On a CPU with AMX, 0.3.36 crashed
on Q8_0 unless built without: CMAKE_ARGS="-DGGML_NATIVE=OFF" and the CPU's other features.)
A Mamba of 130M parameters with random weights is written as GGUF and loaded by llama.cpp in F32,
BF16, F16, Q8_0 and Q4_K_M. The same weights are a model of the zoo ("ours", by
`convert_bmojo.from_mamba`), transformers' model on our kernels ("accelerated"), and as it comes
("transformers"), in float32, bfloat16, float16, int8 (torchao, a scale a row) and int4 (torchao, a
scale for 32 inputs; layers of other sizes are int8). Longhorn-125m is timed beside them. Batch 1: a
prompt of 512, then tokens behind it, a call of each model at a time. All take turns, the best of
each counts. "read" is the share of the measured read bandwidth that a token's weights take; logits
of the prompt's last token are compared with llama.cpp's in F32. Writes
kernels/benchmarks/results/llama.csv.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import write_table
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging

import ssmzoo
from ssmzoo import load_family
from ssmzoo.modeling.compat import cache_name
from ssmzoo_kernels.machine import circumstances, read_bandwidth

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "results"
PROMPT, TOKENS, VOCABULARY = 512, 32, 50280
GROUP = 32  # inputs with a scale of their own in four bits
FILES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_K_M": 15}  # llama.cpp's numbers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def mamba(layers: int) -> MambaForCausalLM:
    """Return the model that all run."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=768, num_hidden_layers=layers, state_size=16, **ids
    )
    return MambaForCausalLM(config).eval()


def write_gguf(model: MambaForCausalLM, path: Path) -> None:
    """Write a Mamba as llama.cpp reads it, in float32; each token is a word, its number."""
    import gguf  # pyright: ignore[reportMissingImports]

    config: Any = model.config
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(int(config.time_step_rank))
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\u2581{token}" for token in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_add_bos_token(False)
    writer.add_file_type(FILES["F32"])
    tensors = {"token_embd.weight": model.backbone.embeddings.weight}
    tensors["output_norm.weight"] = model.backbone.norm_f.weight
    for number, block in enumerate(model.backbone.layers):
        mixer: Any = block.mixer
        tensors |= {
            f"blk.{number}.{name}": tensor
            for name, tensor in {
                "attn_norm.weight": block.norm.weight,
                "ssm_in.weight": mixer.in_proj.weight,
                "ssm_conv1d.weight": mixer.conv1d.weight.squeeze(1),
                "ssm_conv1d.bias": mixer.conv1d.bias,
                "ssm_x.weight": mixer.x_proj.weight,
                "ssm_dt.weight": mixer.dt_proj.weight,
                "ssm_dt.bias": mixer.dt_proj.bias,
                "ssm_a": -mixer.A_log.exp(),
                "ssm_d": mixer.D,
                "ssm_out.weight": mixer.out_proj.weight,
            }.items()
        }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A file in llama.cpp, in a process of its own: it has another OpenMP than torch."""

    def __init__(self, python: str, source: Path, kind: str, threads: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        command = [python, worker, source, str(FILES[kind]), str(threads), str(2 * PROMPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("llama.cpp ended; what it said stands above")
        return json.loads(answer)

    def seconds(self, tokens: list[int], at_once: bool) -> float:
        """Read tokens behind what was read, at once or one by one."""
        return self._ask(read=tokens, at_once=at_once)

    def forget(self) -> None:
        """Begin anew."""
        self._ask(forget=True)

    def logits(self) -> Tensor:
        """Return the logits of the last token."""
        return torch.tensor(self._ask(logits=VOCABULARY))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class Torch:
    """A model in torch, in the same way."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: dict[str, Any] = {}
        self._last: Any = None

    @torch.inference_mode()
    def seconds(self, tokens: list[int], at_once: bool) -> float:
        """Read tokens behind what was read, at once or one by one."""
        ids = torch.tensor([tokens])
        start = time.perf_counter()
        for piece in [ids] if at_once else ids.split(1, dim=1):
            found = self._model(piece, use_cache=True, logits_to_keep=1, **self._cache)
            name = cache_name(found.keys())
            self._cache, self._last = {name: found[name]}, found.logits
        return time.perf_counter() - start

    def forget(self) -> None:
        """Begin anew."""
        self._cache = {}

    def logits(self) -> Tensor:
        """Return the logits of the last token."""
        return self._last[0, -1].float()

    def close(self) -> None:
        """Leave the memory to the collector."""


def in_precision(model: Any, kind: str) -> Any:
    """Return a model in one of our precisions."""
    if kind in DTYPES:
        return model.to(DTYPES[kind])
    from torchao.quantization import (  # pyright: ignore
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    if kind == "int4":
        config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
        quantize_(model, config, lambda layer, _: in_groups(layer))
    quantize_(
        model,
        Int8WeightOnlyConfig(),
        lambda layer, _: isinstance(layer, nn.Linear) and (kind == "int8" or not in_groups(layer)),
    )
    return model


def in_groups(layer: nn.Module) -> bool:
    """Return whether a layer's inputs can be cut into groups with a scale each."""
    return isinstance(layer, nn.Linear) and layer.in_features % GROUP == 0


def runners(python: str, layers: int, folder: Path) -> dict[tuple[str, str], Callable[[int], Any]]:
    """Return who runs in which precision, by name, as functions of the threads."""
    source = folder / "F32.gguf"
    write_gguf(mamba(layers), source)
    found: dict[tuple[str, str], Callable[[int], Any]] = {}
    for kind in FILES:
        found["llama.cpp", kind] = lambda threads, kind=kind: Llama(python, source, kind, threads)
    from ssmzoo_bmojo.convert_bmojo import from_mamba

    longhorn = load_family("longhorn")

    def accelerated() -> nn.Module:
        model = mamba(layers)
        ssmzoo.accelerate(model)
        return model

    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: from_mamba(mamba(layers)),
        "accelerated": accelerated,
        "longhorn-125m": lambda: longhorn.causal_lm_class(
            longhorn.config("longhorn-125m", num_hidden_layers=layers)
        ).eval(),
    }
    for name, make in makers.items():
        for kind in (*DTYPES, "int8", "int4"):
            found[name, kind] = lambda _, make=make, kind=kind: Torch(in_precision(make(), kind))
    found["transformers", "float32"] = lambda _: Torch(mamba(layers))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Decoding and prefill beside llama.cpp.")
    parser.add_argument("--llama", default=sys.executable)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.set_verbosity_error()
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(0))
    ids, rows = prompt.tolist(), []
    with tempfile.TemporaryDirectory() as folder:
        made = runners(given.llama, given.layers, Path(folder))
        for threads in given.threads:
            torch.set_num_threads(threads)
            bandwidth = read_bandwidth()
            running = {who: make(threads) for who, make in made.items()}
            best = {who: [0.0, 0.0] for who in running}
            for _ in range(given.rounds):
                for who, runner in running.items():
                    runner.forget()
                    prefill = PROMPT / runner.seconds(ids, at_once=True)
                    runner.seconds(ids[:2], at_once=False)
                    decode = TOKENS / runner.seconds(ids[:TOKENS], at_once=False)
                    best[who] = [max(x) for x in zip(best[who], (decode, prefill), strict=True)]
            for runner in running.values():
                runner.forget()
                runner.seconds(ids, at_once=True)
            judge = running["llama.cpp", "F32"].logits()
            for (name, kind), (decode, prefill) in best.items():
                row = {"who": name, "precision": kind, "threads": threads}
                row |= {"decode": round(decode, 1), "prefill": round(prefill)}
                row["off_llama_f32"] = ""
                if "longhorn" not in name:
                    logits = running[name, kind].logits()
                    off = float((logits - judge).abs().max() / judge.abs().max())
                    row["off_llama_f32"] = f"{off:.1e}"
                if kind in ("float32", "F32") and "longhorn" not in name:
                    size = 4 * sum(p.numel() for p in mamba(given.layers).parameters())
                    row["read"] = round(decode * size / bandwidth, 2)
                print(*row.values(), flush=True)
                rows.append(
                    {
                        **row,
                        "read_gb_s": round(bandwidth / 1e9, 1),
                        **circumstances(torch.device("cpu")),
                    }
                )
            for runner in running.values():
                runner.close()
    write_table(rows, given.output / "llama.csv")


if __name__ == "__main__":
    main()
