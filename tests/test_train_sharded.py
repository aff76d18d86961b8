"""A whole run under Accelerate's FSDP2: two processes on gloo, everything sharded."""

import json
import os
import subprocess
import sys

import torch
import yaml
from safetensors.torch import load_file

from ssmzoo.checkpoint import read_metrics
from ssmzoo.train import train

# Accelerate shards on accelerators only; told that it does, it takes the same road on CPUs
SCRIPT = """
import json, sys
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
import ssmzoo.train
from ssmzoo.loop import Run

make, build = ssmzoo.train.make_accelerator, Run._build

def sharding(recipe):
    accelerator = make(recipe)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
    )
    return accelerator

def check(run, checkpoint):
    build(run, checkpoint)
    assert all(isinstance(p, DTensor) for p in run.parameters)
    mine = sum(p.to_local().numel() for p in run.parameters)
    assert mine < 0.6 * sum(p.numel() for p in run.parameters)

ssmzoo.train.make_accelerator, Run._build = sharding, check
recipe, output, resume, *overrides = sys.argv[1:]
ssmzoo.train.train(recipe, output_dir=output, resume=resume == "resume", overrides=overrides)
"""


def test_a_sharded_run_trains_clips_saves_and_resumes_as_one_process_does(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(30):
        words = " ".join(["ant", "bee", "cat", "dodo"][(i * j * j) % 4] for j in range(60))
        (tmp_path / "texts" / f"{i}.txt").write_text(words)
    recipe = {
        "model": {"family": "longhorn", "config": {"hidden_size": 32, "num_hidden_layers": 2}},
        "data": {"text": str(tmp_path / "texts"), "validation": 0.2},
        "train": {
            "steps": 6,
            "batch_size": 4,
            "seq_len": 32,
            "accumulate": 2,
            "lr": 0.01,
            "schedule": "constant",
            "clip": 0.5,
            "warmup": 0,
        },
        "eval": {"every": 3, "batches": 2},
        "checkpoint": {"every": 3},
        "log": {"every": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "script.py").write_text(SCRIPT)

    def launch(name, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", tmp_path / "script.py", tmp_path / "recipe.yaml"]
        done = subprocess.run(
            [*command, tmp_path / name, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return tmp_path / name

    alone = train(tmp_path / "recipe.yaml", output_dir=tmp_path / "alone")
    launch("sharded", "begin", "train.steps=3")
    sharded = launch("sharded", "resume")
    assert json.loads((sharded / "run.json").read_text())["processes"] == 2
    one, two = (read_metrics(run / "metrics.jsonl") for run in (alone, sharded))
    norms = [line["grad_norm"] for line in one if "grad_norm" in line]
    assert min(norms) > 0.5  # every step is clipped
    # the shortened run validates and saves after its last step, as the whole one does after three
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two, strict=True):
        for key in a.keys() & {"loss", "grad_norm", "validation_loss"}:
            assert abs(a[key] - b[key]) <= 1e-4 * abs(a[key]), (a["step"], key)
    for file in ("model.safetensors", "optimizer.safetensors"):
        want, got = (
            load_file(run / "checkpoints/step-00000006" / file) for run in (alone, sharded)
        )
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            # six AdamW steps of at most lr = 0.01 each, in float32
            assert (got[name] - tensor).abs().max() < 1e-4, name
            assert got[name].dtype == torch.float32
