"""What two processes do together, for ``test_many_processes.py``, which judges what they leave.

``python -m tests.training.many_processes FOLDER [SCENE ...]``, with the variables that a launcher
sets for both, splits into two processes when all is imported, which takes as
long as half of the scenes.
"""

import errno
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType
from tests.modeling.stock.test_stock import all_in_float64
from tests.training.runs import killed, signalled_at
from tests.training.test_trackers import Recording
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import ssmzoo.data.tokens
import ssmzoo.training.run
import ssmzoo.training.step
from ssmzoo import families, load_family
from ssmzoo.cli.main import main as main_command
from ssmzoo.files import CannotWriteError
from ssmzoo.modeling import layers
from ssmzoo.recipe import load_recipe
from ssmzoo.training import distributed
from ssmzoo.training.distributed import gathered
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.metrics import MetricsFile
from ssmzoo.training.objectives import CausalLM
from ssmzoo.training.run import train
from ssmzoo.training.shards import Snapshot
from ssmzoo.training.step import Learner
from ssmzoo.training.stopping import Stopped
from ssmzoo.training.trainer import Run


def loss_in_its_own_dtype(logits, labels, vocab_size, **_):
    """Return the mean cross-entropy; transformers' own is computed in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@contextmanager
def in_float64():
    """Let runs compute and save in float64, whose rounding nobody takes for anything else."""

    def double(model):
        if hasattr(model, "lm_head"):
            model.loss_function = loss_in_its_own_dtype
        return model.double()

    def double_all(*given, **named):
        return {layer: mixer.double() for layer, mixer in teachers(*given, **named).items()}

    build, teachers = ssmzoo.training.step.build_model, ssmzoo.training.step.load_teachers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssmzoo.training.step, "build_model", lambda *given: double(build(*given)))
        patch.setattr(ssmzoo.training.step, "load_teachers", double_all)
        yield


@contextmanager
def recorded(file):
    """Write, as JSON, by step: the tokens, and each micro-batch's targets and mean loss."""
    steps, take_step, loss_of = {}, Run.take_step, CausalLM.loss_of

    def watch_step(run, read):
        pieces = [piece for pieces in read.parts for piece in pieces]
        tokens = [piece["input_ids"].flatten().tolist() for piece in pieces]
        watch_step.now = {"tokens": tokens, "targets": read.targets, "losses": []}
        steps[run.progress.step + 1] = watch_step.now
        return take_step(run, read)

    def watch_loss(goal, *given):
        loss = loss_of(goal, *given)
        watch_step.now["losses"].append(loss.item())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "take_step", watch_step)
        patch.setattr(CausalLM, "loss_of", watch_loss)
        yield
    file.write_text(json.dumps(steps))


# -- scenes ----------------------------------------------------------------------------------


MATCHES = ["mixers", "logits"]  # what runs that align a hybrid's new mixers learn


def trained_alike(folder, rank):
    """The recipe of a run of one process, and runs that change their number of processes."""
    recipe = folder / "recipe.yaml"
    train(recipe, output_dir=folder / "two-single")
    with in_float64():
        with recorded(folder / f"two-{rank}.json"), pytest.MonkeyPatch.context() as patch:
            patch.setitem(LOGGER_TYPE_TO_CLASS, "recording", Recording)
            train(recipe, output_dir=folder / "two", overrides=["log.trackers=[recording]"])
        for match in MATCHES:
            train(folder / f"align-{match}.yaml", output_dir=folder / f"two-align-{match}")
        (folder / f"trackers-{rank}.txt").write_text(str(len(Recording.made)))
        killed(recipe, folder / "two-then-two", step=7)
        train(recipe, output_dir=folder / "two-then-two", resume=True)
        killed(recipe, folder / "two-then-one", step=7)
        train(recipe, output_dir=folder / "one-then-two", resume=True)


def read_in_pieces(folder, rank):
    """The same run, its rows read by both processes together, also from and to one of copies."""
    recipe, pieces = folder / "recipe.yaml", ["train.sequence_parallel=2"]
    with in_float64():
        train(recipe, output_dir=folder / "pieces", overrides=pieces)
        killed(recipe, folder / "two-then-pieces", step=7)
        train(recipe, output_dir=folder / "two-then-pieces", resume=True, overrides=pieces)
        with all_in_float64():
            train(folder / "mamba.yaml", output_dir=folder / "two-mamba")
            train(folder / "mamba.yaml", output_dir=folder / "pieces-mamba", overrides=pieces)


def left_alone(folder, rank):
    """The run that others, which were stopped or killed, must equal when they are resumed."""
    train(folder / "dropout.yaml", output_dir=folder / "left-alone")


def resumed(folder, rank):
    """The runs of ``test_killed_processes.py``: a process was killed, a launcher told to stop."""
    for run in ("died", "told-by-launcher"):
        train(folder / "dropout.yaml", output_dir=folder / run, resume=True)


def told_to_stop(folder, rank):
    """A run that is told to stop four times: by the first process, by the second, and by both."""
    said = []
    for receivers, number, owner, name, call in (
        ((0,), signal.SIGINT, ssmzoo.data.tokens, "text_hash", 1),
        ((1,), signal.SIGTERM, CausalLM, "loss_of", 3),  # in step 2
        ((0,), signal.SIGUSR1, CausalLM, "measure", 2),
        ((0, 1), signal.SIGHUP, Run, "save", 2),
    ):
        before = signal.getsignal(number)
        with pytest.MonkeyPatch.context() as patch:
            if rank in receivers:
                signalled_at(patch, owner, name, call, number)
            with pytest.raises(Stopped) as caught:
                train(folder / "dropout.yaml", output_dir=folder / "told", resume=True)
        assert signal.getsignal(number) is before
        said.append([caught.value.status, str(caught.value)])
    train(folder / "dropout.yaml", output_dir=folder / "told", resume=True)
    (folder / f"told-{rank}.json").write_text(json.dumps(said))


def read_from_a_stream(folder, rank):
    with recorded(folder / f"stream-begun-{rank}.json"):
        killed(folder / "stream.yaml", folder / "stream", step=5)
    with recorded(folder / f"stream-resumed-{rank}.json"):
        train(folder / "stream.yaml", output_dir=folder / "stream", resume=True)
    with recorded(folder / f"stream-of-one-{rank}.json"):
        train(folder / "stream.yaml", output_dir=folder / "stream-of-one", resume=True)


def other_ways_to_train(folder, rank):
    """What could stumble over DDP.

    Segments in one graph, projections, labels, and a last step with too few examples.
    """
    with in_float64():
        train(folder / "segments.yaml", output_dir=folder / "two-segments")
        train(folder / "projecting.yaml", output_dir=folder / "two-projecting")
        train(folder / "labels.yaml", output_dir=folder / "two-labels")
    train(folder / "examples.yaml", output_dir=folder / "two-examples")


def shard(model, mesh):
    """Spread a model over processes by torch's own FSDP2, layer by layer."""
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


def sharded_by_torch(folder, rank):
    """Gradients of every family's tiny model under torch's own FSDP2, of each second one's logits.

    The others keep none for their loss.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name in families():
        family = load_family(name)
        config = family.config(**{**family.tiny, "tie_word_embeddings": True})

        def build(config=config, family=family):
            torch.manual_seed(0)
            model = family.causal_lm_class(config).double().train()
            model.loss_function = loss_in_its_own_dtype
            return model

        generators = [torch.Generator().manual_seed(i) for i in range(world)]
        ids = [torch.randint(config.vocab_size, (2, 24), generator=g) for g in generators]
        alone, sharded = build(), build()
        together = torch.cat(ids)
        alone(input_ids=together, labels=together, use_cache=False).loss.backward()
        shard(sharded, mesh)
        given = {"input_ids": ids[rank], "labels": ids[rank], "use_cache": False}
        sharded(**given, skip_logits=len(found) % 2 == 0).loss.backward()
        wanted = dict(alone.named_parameters())
        error = {
            parameter_name: (
                (parameter.grad.full_tensor() - wanted[parameter_name].grad).abs().max()
                / wanted[parameter_name].grad.abs().max()
            ).item()
            for parameter_name, parameter in sharded.named_parameters()
        }
        parameters = list(sharded.parameters())
        found[name] = {
            "error": error,
            "missing": sorted(wanted.keys() - error.keys()),
            "share": sum(p.to_local().numel() for p in parameters)
            / sum(p.numel() for p in parameters),
            "tied": sharded.lm_head.weight is sharded.model.embed_tokens.weight,
        }
    (folder / f"sharded-{rank}.json").write_text(json.dumps(found))


def split_by_transformers(folder, rank):
    """Logits, gradients and tokens of every family's tiny model with an MLP, split by its plan."""
    found = {}
    for name in families():
        family = load_family(name)
        mlp = {"intermediate_size": 20, "mlp_type": ["gelu", "swiglu"][len(found) % 2]}
        torch.manual_seed(0)
        tied = len(found) % 3 == 0
        config = family.config(**{**family.tiny, **mlp, "tie_word_embeddings": tied})
        place = folder / f"split-{name}"
        if rank == 0:
            family.causal_lm_class(config).double().save_pretrained(place)
        dist.barrier()
        plan = DistributedConfig(tp_size=dist.get_world_size())
        alone, split = (
            family.causal_lm_class.from_pretrained(place, dtype=torch.float64, **more).train()
            for more in ({}, {"distributed_config": plan})
        )
        ids = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
        outputs, tokens = [], []
        for model in (alone, split):
            model.loss_function = loss_in_its_own_dtype
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layers, "MUCH_WORK", 0)  # as if the layers were large
                patch.setattr(layers, "many_rows_linear", of_whole_tensors)
                outputs.append(model(input_ids=ids, labels=ids, use_cache=False))
            outputs[-1].loss.backward()
            options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
            tokens.append(
                model.eval().generate(ids[:, :7], return_dict_in_generate=True, **options)
            )
        gradients = {key: gathered(p.grad) for key, p in split.named_parameters()}
        one, two = (torch.stack(generated.logits) for generated in tokens)
        pairs = {
            "logits": (outputs[0].logits, outputs[1].logits),
            "generated": (one, two),
            **{key: (p.grad, gradients[key]) for key, p in alone.named_parameters()},
        }
        found[name] = {
            "error": {
                key: ((a - b).abs().max() / a.abs().max()).item() for key, (a, b) in pairs.items()
            },
            "tokens": torch.equal(tokens[0].sequences, tokens[1].sequences),
            "split": sorted(
                {key.split(".")[-2] for key, p in split.named_parameters() if is_split(p)}
            ),
        }
        with pytest.raises(ValueError, match="pp_size") as caught:
            family.causal_lm_class.from_pretrained(
                place, distributed_config=DistributedConfig(pp_size=dist.get_world_size())
            )
        found[name]["refused"] = str(caught.value)
    (folder / f"split-{rank}.json").write_text(json.dumps(found))


def of_whole_tensors(x, weight, bias=None):
    """Return ``F.linear``, where a kernel would read memory that a split tensor does not have."""
    assert not isinstance(x, DTensor)
    assert not isinstance(weight, DTensor)
    return F.linear(x, weight, bias)


def is_split(parameter):
    """Return whether a process holds less than all of a parameter."""
    return isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel()


@contextmanager
def sharding(folder):
    """Let runs be sharded as by `accelerate launch` with the page's configuration.

    Accelerate shards on accelerators only: told that there are some, it takes that road on a CPU.
    """
    prepare = ssmzoo.training.run.make_accelerator

    def make_accelerator(*given):
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return prepare(*given)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in json.loads((folder / "fsdp2.json").read_text()).items():
            patch.setenv(name, value)
        patch.setattr(ssmzoo.training.run, "make_accelerator", make_accelerator)
        yield


def sharded_by_accelerate(folder, rank):
    """Runs under the environment that `accelerate launch` makes of the page's configuration."""
    build, seen = Learner.__init__, set()

    def check(learner, *given, **named):
        build(learner, *given, **named)
        assert all(isinstance(p, DTensor) for p in learner.parameters)
        mine = sum(p.to_local().numel() for p in learner.parameters)
        assert mine < 0.6 * sum(p.numel() for p in learner.parameters)

    def watch(learner, *given, **named):
        check(learner, *given, **named)
        mixer = learner.bare.model.layers[0].mixer
        mixer.register_forward_pre_hook(lambda *_: seen.add(f"dt_bias {mixer.dt_bias.dtype}"))
        mixer.out_proj.register_forward_hook(lambda *given: seen.add(f"output {given[2].dtype}"))

    train(folder / "bfloat16.yaml", output_dir=folder / "bfloat16-copied")
    with pytest.MonkeyPatch.context() as patch, sharding(folder):
        patch.setattr(Learner, "__init__", check)
        with in_float64():
            killed(folder / "recipe.yaml", folder / "sharded", step=7)
            train(folder / "recipe.yaml", output_dir=folder / "sharded", resume=True)
            train(folder / "projecting.yaml", output_dir=folder / "sharded-projecting")
            for match in MATCHES:
                train(folder / f"align-{match}.yaml", output_dir=folder / f"sharded-align-{match}")
        patch.setattr(Learner, "__init__", watch)
        train(folder / "bfloat16.yaml", output_dir=folder / "bfloat16-sharded")
    (folder / f"dtypes-{rank}.json").write_text(json.dumps(sorted(seen)))


def scored(folder, rank):
    """The scores of a model, by the command, of which the first process alone says something."""
    with redirect_stdout(io.StringIO()) as said:
        words = ["--output", folder / "scores-of-two", *SCORING]
        assert main_command(["eval", *map(str, [folder / "one-single/model", *words])]) == 0
    (folder / f"scored-{rank}.txt").write_text(said.getvalue())
    words = ["--output", folder / "scores-of-two", "--tasks", folder / "drawn.yaml"]
    with redirect_stderr(io.StringIO()) as said:
        assert main_command(["eval", *map(str, [folder / "one-single/model", *words])]) == 2
    (folder / f"drawn-{rank}.txt").write_text(said.getvalue())


SCORING = ["--tasks", "ssmzoo_recall_text,ssmzoo_induction_text", "--limit", "9"]
SCORING += ["--batch-size", "2", "--text", __file__]


def lost(folder, rank):
    """A run whose first process cannot write its metrics, and ends; the last scene of all."""
    write, begin = MetricsFile.write, time.monotonic()
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=3))

    def full(metrics, **line):
        if line["step"] == 3:
            raise CannotWriteError(str(folder / "lost/metrics.jsonl"), "it is full", errno.ENOSPC)
        write(metrics, **line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFile, "write", full)
        with pytest.raises((RuntimeError, OSError)) as caught:
            train(folder / "dropout.yaml", output_dir=folder / "lost")
    said = {"said": str(caught.value), "seconds": time.monotonic() - begin}
    (folder / f"lost-{rank}.json").write_text(json.dumps(said))


def other_splits(folder, rank):
    """Runs that resume with another split than they began with, and the bytes that each reads."""
    read, commit = [], DefaultLoadPlanner.commit_tensor
    recipe, resumed = folder / "recipe.yaml", folder / "copied-then-sharded"

    def count(planner, item, tensor):
        read.append(tensor.nbytes)
        return commit(planner, item, tensor)

    with in_float64():
        killed(recipe, resumed, step=7)
        with sharding(folder):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DefaultLoadPlanner, "commit_tensor", count)
                patch.setattr(Run, "go", lambda _: None)
                train(
                    folder / "recipe.yaml", output_dir=folder / "copied-then-sharded", resume=True
                )
            train(recipe, output_dir=resumed, resume=True)
            killed(folder / "recipe.yaml", folder / "sharded-then-one", step=7)
    (folder / f"read-{rank}.json").write_text(json.dumps(sum(read)))


def written_behind(folder, rank):
    """A step goes on while a checkpoint is written, and a full disk of one process stops all."""
    events, released = [], threading.Event()
    take_step, write = Run.take_step, Snapshot.write

    def step(run, read):
        done = take_step(run, read)
        events.append(f"step {run.progress.step}")
        if run.progress.step == 6:
            released.set()
        return done

    def slowly(*given):
        assert released.wait(60)
        events.append("written")
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "take_step", step)
        patch.setattr(Snapshot, "write", slowly)
        train(folder / "recipe.yaml", output_dir=folder / "behind")

    create, calls = FileSystem.create_stream, []

    def full(*given):
        calls.append(given)
        if rank == 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full)
        with pytest.raises(RuntimeError) as caught:
            train(folder / "recipe.yaml", output_dir=folder / "full")
    (folder / f"behind-{rank}.json").write_text(json.dumps([events, str(caught.value)]))


def refused(folder, rank):
    """What each process says where it cannot go on."""
    said = {}

    def refuse(name, recipe, run, *, stock=False, **environment):
        with pytest.MonkeyPatch.context() as patch:
            if name == "other version" and rank:
                versions = {
                    **distributed.installed_versions("ssmzoo", "transformers", "accelerate")
                }
                versions["torch"] = "0.1"
                patch.setattr(distributed, "installed_versions", lambda *_: versions)
            if name == "full disk" and not rank:
                patch.setattr(ssmzoo.data.tokens, "text_hash", no_space)
            for variable, value in environment.items():
                patch.setenv(variable, value)
            with pytest.raises((RuntimeError, ValueError)) as caught:
                train(recipe, output_dir=folder / run, resume=True, stock=stock)
        said[name] = str(caught.value)
        AcceleratorState._reset_state(reset_partial_state=True)

    refuse("another disk", folder / "recipe.yaml", f"disk-of-{rank}")
    fsdp2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    refuse("no accelerator", folder / "recipe.yaml", "refused", **fsdp2)
    here = load_recipe(folder / "recipe.yaml", ["train.lr=0.5"] if rank else [])
    cut = load_recipe(folder / "recipe.yaml", ["train.sequence_parallel=2"] if rank else [])
    norm = ["train.sequence_parallel=2", "model.config.norm_type=batch"]
    for name, recipe in (
        ("other recipe", here),
        ("other pieces", cut),
        ("no pieces", load_recipe(folder / "recipe.yaml", norm)),
        ("other version", folder / "recipe.yaml"),
        ("full disk", folder / "recipe.yaml"),
    ):
        refuse(name, recipe, "refused")
    pieces = ["train.sequence_parallel=2"]
    refuse("stock", load_recipe(folder / "mamba.yaml", pieces), "refused", stock=True)
    pieces = ["train.sequence_parallel=4"]
    refuse("many pieces", load_recipe(folder / "recipe.yaml", pieces), "refused")
    (folder / f"refused-{rank}.json").write_text(json.dumps(said))


def no_space(*_):
    """Fail as a full disk does, where the tokens are kept."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tokens")


def patient(folder, rank):
    """How many seconds a process waits for the others, and whether DDP knows its buckets."""
    seconds = {}

    def look(run):
        groups = {"step": dist.group.WORLD, "alone": run.processes.group}
        groups["saving"] = run._background.group
        seconds["settled"] = run.learner.model.reducer._rebuild_buckets()
        for name, group in groups.items():
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            seconds[name] = timeout.total_seconds()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "go", look)
        train(folder / "recipe.yaml", output_dir=folder / "looked-at")
    (folder / f"patience-{rank}.json").write_text(json.dumps(seconds))


SCENES = (
    trained_alike,
    read_in_pieces,
    left_alone,
    told_to_stop,
    read_from_a_stream,
    other_ways_to_train,
    sharded_by_torch,
    split_by_transformers,
    sharded_by_accelerate,
    scored,
    other_splits,
    written_behind,
    refused,
    patient,
    lost,
)


def play(rank):
    """Be one of the two processes."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    patch = pytest.MonkeyPatch()
    # one group for all runs, and no pictures
    patch.setattr(PartialState, "destroy_process_group", lambda *_: None)
    patch.setattr(RunFolder, "draw", lambda *_, **__: None)
    scenes = [globals()[name] for name in sys.argv[2:]] or SCENES
    for scene in scenes:
        scene(Path(sys.argv[1]), rank)
    dist.destroy_process_group()


def main():
    import_module("ssmzoo.auto")  # which runs import when they begin
    for name in families() if len(sys.argv) == 2 else ():
        load_family(name)
    gc.freeze()  # what a run's end need not look through
    if not (other := os.fork()):
        status = 1
        try:
            play(1)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        play(0)
    except BaseException:
        os.kill(other, signal.SIGKILL)  # which would wait for this one
        raise
    sys.exit(os.waitpid(other, 0)[1])


if __name__ == "__main__":
    main()
