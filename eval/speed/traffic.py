"""Count what two processes tell each other in a training step, beside the formulas of a page.

    python eval/speed/traffic.py   # half a minute; for docs/many-machines.md

A small Longhorn takes a step under DDP and under FSDP2, each layer and the rest sharded, and reads
a row in two pieces. Counted are the whole tensors of each collective, of which a process sends its
part to (R - 1) / R; what a process holds after the step; and all that is sent for a row in pieces.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ssmzoo import load_family
from ssmzoo.modeling import sequence_parallel, sequence_piece
from ssmzoo.training.optimizer import make_optimizer
from ssmzoo.training.shards import optimizer_tensors, weights_of

FIELDS = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000}
ROWS, LENGTH = 2, 64


def main():
    """Count, and print a line for each quantity."""
    torch.multiprocessing.spawn(play, nprocs=2)


def play(rank):
    """Be one of the processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    count(rank)
    dist.barrier()
    dist.destroy_process_group()


def count(rank):
    """Take the steps, and let the first process print."""
    found = load_family("longhorn")
    config = found.config(**FIELDS)
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH))

    def build():
        torch.manual_seed(0)
        return found.causal_lm_class(config)

    model = build()
    parameters = model.num_parameters()
    layers = sum(p.numel() for p in model.model.layers.parameters())
    told = 0

    def sum_of_bucket(_, bucket):
        nonlocal told
        told += bucket.buffer().nbytes
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda work: work.value()[0])

    copied = DistributedDataParallel(model)
    copied.register_comm_hook(None, sum_of_bucket)
    held, optimizer = take_step(copied, ids)
    saved = {**weights_of(model), **optimizer_tensors(model, optimizer)}
    line = partial(show, rank, parameters)
    line("a checkpoint", sum(tensor.nbytes for tensor in saved.values()), 12 * parameters)
    line("DDP: gradients summed", told, 4 * parameters)
    line("DDP: held by a process", held, 16 * parameters)

    sharded, traffic = build(), {"gather": 0, "scatter": 0}
    for part in (*sharded.model.layers, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    for kind, names in (
        ("gather", ("all_gather_single", "all_gather_into_tensor")),  # torch 2.13's, older ones
        ("scatter", ("reduce_scatter_single", "reduce_scatter_tensor")),
    ):
        name = next(name for name in names if hasattr(dist, name))
        setattr(dist, name, partial(counted, getattr(dist, name), traffic, kind))
    held, _ = take_step(sharded, ids)
    line("FSDP2: weights gathered", traffic["gather"], 4 * (parameters + layers))
    line("FSDP2: gradients scattered", traffic["scatter"], 4 * parameters)
    line("FSDP2: held by a process", held, 16 * parameters / 2)

    sent, send = 0, sequence_parallel._Line._send

    def count_sent(line, tensor, to):
        nonlocal sent
        sent += tensor.nbytes
        send(line, tensor, to)

    sequence_parallel._Line._send = count_sent
    model = build()
    model(**sequence_piece(model, ids)).logits.sum().backward()
    total = torch.tensor(sent)
    dist.all_reduce(total)
    state = 4 * config.d_inner * (config.d_state + config.d_conv - 1)
    line("pieces: states and gradients", int(total), 2 * ROWS * config.num_hidden_layers * state)


def take_step(model, ids):
    """Take a step; return the bytes of weights, gradients and moments held, and the optimizer."""
    optimizer = make_optimizer(model, lr=1e-3)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [t for p in model.parameters() for t in (p, p.grad)] + moments
    return sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors), optimizer


def counted(function, traffic, kind, *given, **named):
    """Call a collective, and count the whole of the tensors that it is for."""
    tensors = [value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)]
    traffic[kind] += max(tensor.nbytes for tensor in tensors)
    return function(*given, **named)


def show(rank, parameters, what, found, formula):
    """Print a quantity beside its formula."""
    if rank == 0:
        print(
            f"{what}: {found:,} bytes, {found / parameters:.2f} a parameter; "
            f"{100 * (found / formula - 1):+.2f} % beside the formula's {formula:,.0f}"
        )


if __name__ == "__main__":
    main()
