"""Processes of a run are killed, hang, or are told to stop by a launcher; the run is resumed."""

import re
import time

import pytest
from tests.forks import Ended, Forks
from tests.training.runs import quick_runs  # noqa: F401
from tests.training.test_many_processes import (
    ENVIRONMENT,
    assert_same,
    free_port,
    page_configurations,
    said_by_us,
    write_recipes,
)

from ssmzoo.recipe import load_recipe

# what launchers start imports all anew
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("killed_processes")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recipes(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def forks():
    modules = ("accelerate.commands.launch", "torch.distributed.run", "tests.training.killing_many")
    with Forks(ENVIRONMENT, *modules) as running:
        yield running


DIE = """
import os, signal, sys, time
from pathlib import Path
from ssmzoo.cli.main import main
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.objectives import CausalLM

loss_of, calls = CausalLM.loss_of, []

def die(goal, *given):
    loss = loss_of(goal, *given)
    calls.append(1)
    # between the two micro-batches of step 7, when the checkpoint of step 4 is written
    if len(calls) == 14 and os.environ["RANK"] == "1":
        while not Path(sys.argv[-1], "checkpoints/step-00000004").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

CausalLM.loss_of = die
RunFolder.draw = lambda *_, **__: None
sys.exit(main(sys.argv[1:]))
"""


# words with RANK: `accelerate launch` on each of two machines, whose stderr and status are left
LAUNCH_BOTH = """
import os, sys, traceback
from accelerate.commands.launch import launch_command, launch_command_parser

def launch(rank):
    os.dup2(os.open(str(rank), os.O_WRONLY | os.O_CREAT), 2)
    words = [word.replace("RANK", str(rank)) for word in sys.argv[2:]]
    try:
        launch_command(launch_command_parser().parse_args(words))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

os.chdir(sys.argv[1])
machines = []
for rank in (0, 1):
    machines.append(os.fork())
    if not machines[-1]:
        os._exit(launch(rank))
print(*(os.waitstatus_to_exitcode(os.waitpid(machine, 0)[1]) for machine in machines))
"""


@pytest.fixture(scope="module")
def death(folder, forks):
    """A run on two machines, of which the second one's process is killed in the middle of a step.

    The page's configuration, with both machines here and a process on each.
    """
    (folder / "die.py").write_text(DIE)
    (folder / "ddp.yaml").write_text(page_configurations()["MULTI_GPU"], encoding="utf-8")
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    words = ["--config_file", folder / "ddp.yaml", "--num_processes", 2, *place]
    words += ["--machine_rank", "RANK", folder / "die.py", "train", folder / "dropout.yaml"]
    begin = time.monotonic()
    done = forks.run(LAUNCH_BOTH, *map(str, [folder, *words, "--output", folder / "died"]))
    assert done.status == 0, done.log
    assert time.monotonic() - begin < 600  # torch's own patience is 1,800
    machines = [
        Ended("", (folder / str(rank)).read_text(), int(status))
        for rank, status in enumerate(done.out.split()[-2:])
    ]
    return *machines, [path.name for path in (folder / "died" / "checkpoints").iterdir()]


TELL = """
import os, signal, sys, time
from ssmzoo.cli.main import main
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.trainer import Run

take_step = Run.take_step

def tell(run, read):
    if run.progress.step == 2:
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)  # the launcher, which tells its processes
        while run.processes.request.signal is None:
            time.sleep(0.01)
    return take_step(run, read)

Run.take_step = tell
RunFolder.draw = lambda *_, **__: None
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def told(folder, forks):
    """A run whose launcher is told to stop, and what that leaves."""
    (folder / "tell.py").write_text(TELL)
    launch = "import sys\nfrom torch.distributed.run import main\nmain(sys.argv[1:])"
    words = ["--standalone", "--nproc_per_node=2", folder / "tell.py", "train"]
    words += [folder / "dropout.yaml", "--output", folder / "told-by-launcher"]
    done = forks.run(launch, *map(str, words))
    return done, [path.name for path in (folder / "told-by-launcher" / "checkpoints").iterdir()]


@pytest.fixture(scope="module")
def resumed(folder, forks, death, told):
    """The folder with both runs resumed, beside one that was left alone."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    play = "from tests.training.many_processes import main\nmain()"
    done = forks.run(play, str(folder), "left_alone", "resumed", environment=place)
    assert done.status == 0, done.out + done.log
    return folder


def assert_killed(done, rank):
    """Fail unless a launcher names the process that was killed, and no other reason."""
    assert done.status != 0
    cause = done.log.partition("Root Cause")[2]
    assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9 .*SIGKILL", cause), done.log


def test_a_killed_process_ends_the_run_on_both_machines(death):
    first, second, checkpoints = death
    assert_killed(second, 1)
    assert first.status != 0
    assert checkpoints == ["step-00000004"]


def test_the_other_machine_reports_the_failure_and_the_checkpoint(death):
    first, _, _ = death
    (said,) = said_by_us(first.log)
    assert "another process of this run has ended, or hangs: see the launcher's report" in said
    assert said.endswith("checkpoints/step-00000004")
    assert "gloo" not in first.log


def test_a_run_whose_process_was_killed_resumes_bit_for_bit(resumed):
    assert_same(resumed / "left-alone", resumed / "died")


def test_a_launcher_that_is_told_to_stop_leaves_its_run_saved(told, resumed):
    done, checkpoints = told
    assert done.status != 0
    (line,) = [line for line in done.log.splitlines() if line.startswith("stopped by")]
    assert line.startswith("stopped by SIGTERM after step 3, which is saved; to go on: under the ")
    assert line.endswith("/told-by-launcher --resume")
    assert checkpoints == ["step-00000003"]
    assert_same(resumed / "left-alone", resumed / "told-by-launcher")


# -- a checkpoint that is being written --------------------------------------------------------


def killed_while_saving(forks, folder, path, processes, *cases):
    (path / "runs").mkdir()
    words = [folder / "recipe.yaml", path / "runs", processes, *cases]
    script = "from tests.training.killing_many import main\nmain()"
    done = forks.run(script, *map(str, words))
    assert done.status == 0, done.out + done.log
    assert len(done.out.splitlines()) == len(cases)


def test_a_process_killed_while_it_saves_loses_no_whole_checkpoint(folder, forks, tmp_path):
    killed_while_saving(forks, folder, tmp_path, 2, "1:opening", "0:naming")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_any_of_several_processes_is_killed_at_any_point_of_a_save(
    processes, folder, forks, tmp_path
):
    points = ("before", "opening", "written")
    cases = [f"{rank}:{point}" for rank in range(processes) for point in points]
    recipe = load_recipe(folder / "recipe.yaml", ["train.accumulate=1"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    killed_while_saving(forks, tmp_path, tmp_path, processes, *cases, "0:naming", "0:named")


@pytest.mark.slow
def test_a_process_that_hangs_in_a_step_or_a_save_ends_the_run_in_time(folder, forks, tmp_path):
    cases = [f"{rank}:{point}:hang" for rank in (0, 1) for point in ("step", "opening")]
    killed_while_saving(forks, folder, tmp_path, 2, *cases)
