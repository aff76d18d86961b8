"""What a checkpoint holds besides weights, where parameters are spread over two processes."""

import os
import subprocess
import sys

SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ssmzoo import load_family
from ssmzoo.state import load_optimizer, optimizer_tensors, whole
from ssmzoo.train import make_optimizer

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
family = load_family("longhorn")
ids = torch.arange(64).reshape(2, 32) % 50

def build(shard):
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(**family.tiny))
    if shard:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, make_optimizer(model, lr=1e-2)

def step(model, optimizer):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def full(model):
    return {name: whole(parameter).detach() for name, parameter in model.named_parameters()}

alone, sharded = build(False), build(True)
for model, optimizer in (alone, sharded):
    step(model, optimizer)
want = optimizer_tensors(*alone)
# as from a file: what is returned may be the optimizer's own memory
got = {key: tensor.clone() for key, tensor in optimizer_tensors(*sharded).items()}
assert want.keys() == got.keys()
for key in want:
    torch.testing.assert_close(got[key], want[key])
model, optimizer = build(True)
step(model, optimizer)
load_optimizer(model, optimizer, got)
back = optimizer_tensors(model, optimizer)
assert all(torch.equal(back[key], got[key]) for key in got)
step(*sharded)
step(model, optimizer)
went_on, resumed = full(sharded[0]), full(model)
assert all(torch.equal(went_on[name], resumed[name]) for name in resumed)
dist.destroy_process_group()
"""


def test_an_optimizer_sharded_by_fsdp2_is_saved_whole_and_restored_to_the_same_steps(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc_per_node=2", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
