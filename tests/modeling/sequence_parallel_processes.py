"""What several processes do with one long row, for ``test_sequence_parallel.py``, which judges.

``python -m tests.modeling.sequence_parallel_processes FOLDER`` splits into
``WORLD_SIZE`` processes.
"""

import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.modeling.stock.test_stock import all_in_float64
from tests.stock_models import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ssmzoo
from ssmzoo import families, load_family
from ssmzoo.modeling import prefill, sequence_piece
from ssmzoo.modeling.sequence_parallel import SequenceParallelCache
from ssmzoo.modeling.state_passing import ProcessLine

LENGTH = 24
ALL = {"layer_types": ["linear_attention"] * 2}
STOCK = {
    **{"mamba": {}, "falcon_mamba": {}, "mamba2": {}},
    **{"qwen3_5_text": ALL, "qwen3_next": ALL, "kimi_linear": ALL},
}
MODES = ("plain", "padded", "packed", "checkpointed", "one", "two")
# of which another model runs the same function, by other projections
FEWER = dict.fromkeys(("falcon_mamba", "qwen3_next"), ("packed", "one"))


def zoo_model(name, **changes):
    family = load_family(name)
    torch.manual_seed(0)
    return family.causal_lm_class(family.config(**{**family.tiny, **changes})).double().train()


def stock_model(name):
    model = tiny(name, **STOCK[name]).double().train()
    ssmzoo.accelerate(model)
    return model


def batch(model, mode):
    """Return ids, other arguments, and what the logits are weighed with in the loss."""
    draw, count = torch.Generator().manual_seed(1), dist.get_world_size()
    length = {"one": count, "two": 2 * count}.get(mode, LENGTH)
    vocabulary = model.config.vocab_size
    packed = mode in ("packed", "checkpointed")
    ids = torch.randint(3, vocabulary, (1 if packed else 2, length), generator=draw)
    weights = torch.randn(*ids.shape, vocabulary, generator=draw, dtype=torch.float64)
    if mode == "padded":  # further than the first piece
        mask = torch.ones_like(ids)
        mask[0, : LENGTH // 2 + 2] = 0
        return ids, {"attention_mask": mask}, weights * mask[..., None]
    if packed:  # a sequence lies across each cut
        ends = torch.tensor([0, 2, 9, 17, 19, 20, LENGTH], dtype=torch.int32)
        return ids, {"cu_seqlens": ends}, weights
    return ids, {}, weights


def share(rank, length):
    count = dist.get_world_size()
    return slice(rank * length // count, (rank + 1) * length // count)


def distance(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


def grads(model):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def compared(model, rank, mode):
    """Return how far logits and the sum of all gradients are from those of one process."""
    if mode == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, more, weights = batch(model, mode)
    mine = share(rank, ids.shape[1])
    model.zero_grad()
    whole = model(input_ids=ids, use_cache=False, **more).logits
    (whole * weights).sum().backward()
    wanted = grads(model)
    model.zero_grad()
    out = model(**sequence_piece(model, ids, **more)).logits
    (out * weights[:, mine]).sum().backward()
    found = grads(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    with torch.no_grad():
        again = model(**sequence_piece(model, ids, **more)).logits
    model.gradient_checkpointing_disable()
    told = weights[:, mine] != 0  # what padding gives is nobody's
    return {
        "logits": distance(out.detach() * told, whole.detach()[:, mine] * told),
        "no_grad": distance(again * told, out.detach() * told),
        "grads": max(distance(found[n], g) for n, g in wanted.items() if g.abs().max() > 1e-12),
    }


# -- scenes ----------------------------------------------------------------------------------


def zoo(rank):
    return {
        f"{name} {mode}": compared(zoo_model(name), rank, mode)
        for name in families()
        for mode in MODES
    }


def stock(rank):
    with all_in_float64():
        return {
            f"{name} {mode}": compared(stock_model(name), rank, mode)
            for name in STOCK
            for mode in FEWER.get(name, MODES)
        }


def sent(rank):
    """How many bytes a forward and a backward pass send, by length."""
    found = {}
    for name, model in (("longhorn", zoo_model("longhorn")), ("mamba", stock_model("mamba"))):
        for length in (LENGTH, 4 * LENGTH):
            sizes, send = [], ProcessLine._send

            def count(line, tensor, to, sizes=sizes, send=send):
                sizes.append(tensor.nbytes)
                send(line, tensor, to)

            ids = torch.arange(2 * length).view(2, length) % 40
            with mock.patch.object(ProcessLine, "_send", count):
                model(**sequence_piece(model, ids)).logits.sum().backward()
            found.setdefault(name, []).append(sum(sizes))
    return found


def prompts(rank):
    found = {}
    for name, model in (("longhorn", zoo_model("longhorn")), ("mamba", stock_model("mamba"))):
        model.eval()
        ids = torch.randint(3, 40, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        states = [prefill(model, ids, mask, group=g) for g in (None, dist.group.WORLD)]
        told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        told |= {"output_logits": True, "return_dict_in_generate": True}
        alone, together = (torch.stack(model.generate(**s.inputs(), **told).logits) for s in states)
        found[name] = distance(together, alone)
    return found


def refused(rank):
    said = {}

    def refuse(name, call):
        with pytest.raises(ValueError) as caught:
            call()
        said[name] = str(caught.value)

    model, ids = zoo_model("longhorn"), torch.ones(1, LENGTH, dtype=torch.int64)
    for name, fields in (
        ("both ways", {"directions": "both-shared"}),
        ("batch norm", {"norm_type": "batch"}),
    ):
        family = load_family("longhorn")
        config = family.config(**{**family.tiny, **fields})
        refuse(name, lambda config=config: SequenceParallelCache(config))
    refuse("grows", lambda: sequence_piece(tiny_hybrid(), ids))
    refuse("stock", lambda: sequence_piece(tiny("mamba"), ids))
    refuse("short", lambda: sequence_piece(model, ids[:, : dist.get_world_size() - 1]))
    refuse("short prompt", lambda: prefill(model, ids[:, :1], group=dist.group.WORLD))
    for kind in (model, stock_model("mamba")):
        piece = sequence_piece(kind, ids)
        refuse(f"labels {type(kind).__name__}", lambda k=kind, p=piece: k(labels=ids, **p))
        kind(**piece)
        refuse(f"again {type(kind).__name__}", lambda k=kind, p=piece: k(**p))
    other = zoo_model("longhorn", num_hidden_layers=1)
    refuse("other model", lambda: other(**sequence_piece(model, ids)))
    return said


def tiny_hybrid():
    model = tiny("qwen3_5_text")
    ssmzoo.accelerate(model)
    return model


def wrapped(rank):
    """How far gradients under DDP and FSDP2 are from one process's, over the number of them."""
    found, count = {}, dist.get_world_size()
    for name in ("ddp", "fsdp2"):
        alone, model = zoo_model("longhorn"), zoo_model("longhorn")
        ids, _, weights = batch(alone, "plain")
        (alone(input_ids=ids, use_cache=False).logits * weights).sum().backward()
        outer = model
        if name == "ddp":
            outer = DistributedDataParallel(model)
        else:
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=init_device_mesh("cpu", (count,)))
        mine = share(rank, ids.shape[1])
        (outer(**sequence_piece(model, ids)).logits * weights[:, mine]).sum().backward()
        wanted = dict(alone.named_parameters())
        found[name] = max(
            distance(count * getattr(p.grad, "full_tensor", lambda g=p.grad: g)(), wanted[n].grad)
            for n, p in model.named_parameters()
        )
    return found


def groups(rank):
    """What is in flight where one group waits while another's state is not taken yet."""
    one, two = (ProcessLine(dist.new_group(timeout=timedelta(seconds=20))) for _ in range(2))
    state = torch.arange(4.0)
    if rank == 0:
        one.send_on(state)
        two.finish()  # or the state that comes next is never sent
        two.send_on(state)
    if rank == 1:
        for line in (two, one):
            assert torch.equal(line.receive(torch.zeros(4)), state)
    for line in (one, two):
        line.finish()
    return [len(line._in_flight) for line in (one, two)]


SCENES = (zoo, stock, sent, prompts, refused, wrapped, groups)


def play(rank):
    """Be one of the processes."""
    torch.set_num_threads(1)
    count = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    for scene in SCENES:
        found = json.dumps(scene(rank))
        (Path(sys.argv[1]) / f"{scene.__name__}-{rank}.json").write_text(found)
    dist.barrier()
    dist.destroy_process_group()


def main():
    for name in families():
        load_family(name)
    others = []
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if not (other := os.fork()):
            status = 1
            try:
                play(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        others.append(other)
    try:
        play(0)
    except BaseException:
        for other in others:
            os.kill(other, signal.SIGKILL)  # which would wait for this one
        raise
    sys.exit(any(os.waitpid(other, 0)[1] for other in others))


if __name__ == "__main__":
    main()
