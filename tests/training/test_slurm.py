"""SLURM runs the script of the page on two machines, stops it in time, and begins it again.

The machines are those of ``test_two_machines.py``; on the first one is the controller, too. Needs
Debian's packages slurm-wlm and munge.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from tests.training.runs import quick_runs  # noqa: F401
from tests.training.test_many_processes import ENVIRONMENT, assert_alike
from tests.training.test_two_machines import (
    NAMED,
    PAGE,
    kill,
    network,
    wait_for,
)

from ssmzoo.training.checkpoint import damage_of

pytestmark = pytest.mark.slow

DAEMONS = ("munged", "slurmctld", "slurmd")
# no control groups: the machines share a kernel; a machine that is silent for 10 seconds is lost
CONFIGURATION = """\
ClusterName=two
SlurmctldHost=one(10.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
NodeName=one NodeAddr=10.0.0.1 CPUs=2
NodeName=two NodeAddr=10.0.0.2 CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """Two machines under SLURM, whose files are in a folder."""

    def __init__(self, folder, hosts):
        self.folder, self.hosts = folder, hosts
        for name in ("controller", "one", "two"):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        self.daemons = []
        self.environment = {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, host, *words):
        """Start a daemon on a host."""
        place = ["ip", "netns", "exec", network(host), "unshare", "--uts", "--mount"]
        named = ["sh", "-ec", NAMED, "sh", host, str(self.hosts)]
        with (self.folder / f"{host}-{words[0]}.txt").open("a") as said:
            self.daemons.append(
                subprocess.Popen(
                    [*place, *named, *words], env=self.environment, stdout=said, stderr=said
                )
            )

    def ask(self, *words):
        """Return what a command of SLURM's says."""
        place = ["ip", "netns", "exec", network("one"), "unshare", "--uts", "--mount"]
        named = ["sh", "-ec", NAMED, "sh", "one", str(self.hosts)]
        found = subprocess.run(
            [*place, *named, *words], env=self.environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    def join(self, host):
        """Let a host take jobs."""
        self.start(host, "slurmd", "-D", "-N", host)
        self.wait(lambda: self.ask("sinfo", "-h", "-N", "-n", host, "-o", "%T") == "idle")

    def submit(self, script, *words, held=None, time_limit=30):
        """Submit a script and return the job's number."""
        hold = "" if held is None else f",HELD={held}"
        told = ["--parsable", f"--time={time_limit}", f"--export=ALL{hold}"]
        place = [f"--chdir={PAGE.parents[1]}", f"--output={self.folder}/job.txt"]
        return self.ask("sbatch", *told, *place, str(script), *map(str, words))

    def state(self, job):
        """Return a job's state in SLURM's words."""
        return re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))[1]

    def wait(self, until):
        """Wait for a condition, and say what the job said where it does not come."""
        end = time.monotonic() + 300
        while not until():
            said = self.folder / "job.txt"
            assert time.monotonic() < end, said.read_text() if said.exists() else "no job began"
            time.sleep(0.5)


@contextmanager
def running(folder, hosts):
    """Yield a cluster whose daemons run."""
    cluster = Cluster(folder, hosts)
    files = (f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed"))
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    cluster.daemons.append(
        subprocess.Popen([*munge, f"--key-file={folder}/key", *files], stderr=subprocess.DEVNULL)
    )
    try:
        wait_for(folder / "munge.socket")
        cluster.start("one", "slurmctld", "-D")
        wait_for(folder / "controller.pid")
        for host in ("one", "two"):
            cluster.join(host)
        yield cluster
    finally:
        for host in ("one", "two"):
            kill(host)
        for daemon in cluster.daemons:
            daemon.terminate()
            daemon.wait()


@pytest.fixture
def cluster(joined, shared, tmp_path):
    if any(shutil.which(name) is None for name in DAEMONS):
        pytest.skip("SLURM is not installed")
    with running(tmp_path / "slurm", shared / "hosts") as found:
        yield found


@pytest.fixture
def script(tmp_path):
    """The page's script for two machines of one process each, in float64."""
    (text,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    changes = {
        "#SBATCH --nodes=8": "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8\n": "",
        "--cpus-per-task=64": "--cpus-per-task=1",
        "--signal=TERM@600": "--signal=TERM@60",
        "--nproc_per_node=8": "--nproc_per_node=1",
        "srun torchrun": f"srun {sys.executable} -m torch.distributed.run",
        "-m ssmzoo": "-m tests.training.two_machines",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "train.sbatch"
    path.write_text(text)
    return path


def test_the_pages_script_trains_as_one_process_does(cluster, script, shared, tmp_path):
    job = cluster.submit(script, shared / "recipe.yaml", tmp_path / "run")
    cluster.wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(job) == "COMPLETED", (cluster.folder / "job.txt").read_text()
    assert_alike(shared / "one", tmp_path / "run")


def test_a_run_is_saved_before_its_time_limit_and_resumes_when_requeued(
    cluster,
    script,
    shared,
    tmp_path,
):
    """The limit is two minutes, SLURM's signal comes in the second one."""
    held, run = tmp_path / "held", tmp_path / "run"
    held.mkdir()
    job = cluster.submit(script, shared / "recipe.yaml", run, held=held, time_limit=2)
    wait_for(held / "0", held / "1")
    begin = time.monotonic()
    while "SIGTERM" not in (cluster.folder / "job.txt").read_text():
        assert time.monotonic() < begin + 120, (cluster.folder / "job.txt").read_text()
        time.sleep(0.5)
    (held / "gone").touch()
    cluster.wait(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING"))
    assert cluster.state(job) == "FAILED"  # its status is not 0, for it is not finished
    assert damage_of(run / "checkpoints/step-00000007") is None
    cluster.ask("scontrol", "requeue", job)
    cluster.wait(lambda: cluster.state(job) == "COMPLETED")
    assert_alike(shared / "one", run)


def test_a_lost_machines_job_waits_until_it_is_back_and_goes_on(cluster, script, shared, tmp_path):
    held, run = tmp_path / "held", tmp_path / "run"
    held.mkdir()
    job = cluster.submit(script, shared / "recipe.yaml", run, held=held)
    wait_for(run / "checkpoints/step-00000004", held / "0", held / "1")
    kill("two")
    (held / "gone").touch()
    cluster.wait(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING"))
    assert cluster.state(job) == "PENDING"  # by --requeue
    cluster.join("two")
    cluster.wait(lambda: cluster.state(job) == "COMPLETED")
    assert_alike(shared / "one", run)
