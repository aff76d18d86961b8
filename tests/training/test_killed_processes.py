"""Processes of a run are killed, hang, or are told to stop by a launcher; the run is resumed."""

import re
import subprocess
import sys
import time

import pytest
from tests.training.runs import quick_runs  # noqa: F401
from tests.training.test_many_processes import (
    ENVIRONMENT,
    LAUNCH,
    assert_same,
    free_port,
    page_configurations,
    play,
    ran,
    said_by_us,
    write_recipes,
)

from ssmzoo.recipe import load_recipe

# every launcher and its processes import all anew
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("killed_processes")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recipes(tmp_path_factory.mktemp("killed"))


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


@pytest.fixture(scope="module")
def death(folder):
    """A run on two machines, of which the second one's process is killed in the middle of a step.

    The page's configuration, with both machines here and a process on each.
    """
    (folder / "die.py").write_text(DIE)
    (folder / "ddp.yaml").write_text(page_configurations()["MULTI_GPU"], encoding="utf-8")
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [folder / "ddp.yaml", "--num_processes", 2, *place]
    run = [folder / "die.py", "train", folder / "dropout.yaml", "--output", folder / "died"]
    begin = time.monotonic()
    machines = [
        subprocess.Popen(
            [*map(str, [*command, "--machine_rank", rank, *run])],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for rank in (0, 1)
    ]
    first, second = (
        subprocess.CompletedProcess([], machine.wait(600), stderr=said)
        for machine in machines
        for _, said in [machine.communicate(timeout=600)]
    )
    assert time.monotonic() - begin < 600  # torch's own patience is 1,800
    return first, second, [path.name for path in (folder / "died" / "checkpoints").iterdir()]


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
def told(folder):
    """A run whose launcher is told to stop, and what that leaves."""
    (folder / "tell.py").write_text(TELL)
    run = ["train", folder / "dropout.yaml", "--output", folder / "told-by-launcher"]
    done = ran(*LAUNCH, folder / "tell.py", *run)
    return done, [path.name for path in (folder / "told-by-launcher" / "checkpoints").iterdir()]


@pytest.fixture(scope="module")
def resumed(folder, death, told):
    """The folder with both runs resumed, beside one that was left alone."""
    play(folder, "left_alone", "resumed")
    return folder


def assert_killed(done, rank):
    """Fail unless a launcher names the process that was killed, and no other reason."""
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9 .*SIGKILL", cause), done.stderr


def test_a_killed_process_ends_the_run_on_both_machines(death):
    first, second, checkpoints = death
    assert_killed(second, 1)
    assert first.returncode != 0
    assert checkpoints == ["step-00000004"]


def test_the_other_machine_reports_the_failure_and_the_checkpoint(death):
    first, _, _ = death
    (said,) = said_by_us(first.stderr)
    assert "another process of this run has ended, or hangs: see the launcher's report" in said
    assert said.endswith("checkpoints/step-00000004")
    assert "gloo" not in first.stderr


def test_a_run_whose_process_was_killed_resumes_bit_for_bit(resumed):
    assert_same(resumed / "left-alone", resumed / "died")


def test_a_launcher_that_is_told_to_stop_leaves_its_run_saved(told, resumed):
    done, checkpoints = told
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("stopped by")]
    assert line.startswith("stopped by SIGTERM after step 3, which is saved; to go on: under the ")
    assert line.endswith("/told-by-launcher --resume")
    assert checkpoints == ["step-00000003"]
    assert_same(resumed / "left-alone", resumed / "told-by-launcher")


# -- a checkpoint that is being written --------------------------------------------------------


def killed_while_saving(folder, path, processes, *cases):
    (path / "runs").mkdir()
    run = [
        "-m",
        "tests.training.killing_many",
        folder / "recipe.yaml",
        path / "runs",
        processes,
        *cases,
    ]
    done = ran(sys.executable, *run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(cases)


def test_a_process_killed_while_it_saves_loses_no_whole_checkpoint(folder, tmp_path):
    killed_while_saving(folder, tmp_path, 2, "1:opening", "0:naming")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_any_of_several_processes_is_killed_at_any_point_of_a_save(processes, folder, tmp_path):
    points = ("before", "opening", "written")
    cases = [f"{rank}:{point}" for rank in range(processes) for point in points]
    recipe = load_recipe(folder / "recipe.yaml", ["train.accumulate=1"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    killed_while_saving(tmp_path, tmp_path, processes, *cases, "0:naming", "0:named")


@pytest.mark.slow
def test_a_process_that_hangs_in_a_step_or_a_save_ends_the_run_in_time(folder, tmp_path):
    cases = [f"{rank}:{point}:hang" for rank in (0, 1) for point in ("step", "opening")]
    killed_while_saving(folder, tmp_path, 2, *cases)
