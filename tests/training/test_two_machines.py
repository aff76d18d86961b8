"""Two machines train together, and each tells in time that the other is gone.

A machine is a network, a host name and a file of hosts of its own; a switch joins them. They run
the line of ``docs/many-machines.md``.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tests.training.many_processes import in_float64
from tests.training.runs import quick_runs  # noqa: F401
from tests.training.test_many_processes import (
    ENVIRONMENT,
    RECIPE,
    assert_alike,
    said_by_us,
    write_texts,
)
from tests.training.two_machines import PATIENCE

from ssmzoo.recipe import Recipe
from ssmzoo.training.checkpoint import damage_of
from ssmzoo.training.run import train

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/many-machines.md"
HOSTS = "127.0.0.1 localhost\n10.0.0.1 one\n10.0.0.2 two\n"
# a name and hosts of its own, and less patience with who does not answer, for a command in a
# network of its own
NAMED = """
hostname "$1"
mount --bind "$2" /etc/hosts
echo 8 > /proc/sys/net/ipv4/tcp_retries2
shift 2
exec "$@"
"""
# TCP gives up after 0.2 * (2 ** 9 - 1) = 102 seconds, for the 15 minutes of 15 retries
NOTICED = PATIENCE + 102 + 60


def run_ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def network(host):
    return f"ssmzoo-{os.getpid()}-{host}"


@contextmanager
def joined_by_a_switch(*hosts):
    """Give each host a network, and join them by a switch in another one."""
    made = []
    try:
        for host in ("switch", *hosts):
            run_ip("netns", "add", network(host))
            made.append(network(host))
        run_ip("-n", network("switch"), "link", "add", "switch", "type", "bridge")
        run_ip("-n", network("switch"), "link", "set", "switch", "up")
        for number, host in enumerate(hosts, 1):
            port = [host, "netns", network("switch")]
            run_ip("link", "add", "net", "netns", network(host), "type", "veth", "peer", *port)
            run_ip("-n", network("switch"), "link", "set", host, "master", "switch", "up")
            run_ip("-n", network(host), "addr", "add", f"10.0.0.{number}/24", "dev", "net")
            for device in ("lo", "net"):
                run_ip("-n", network(host), "link", "set", device, "up")
        yield
    finally:
        for name in made:
            run_ip("netns", "del", name)


@pytest.fixture
def joined():
    if os.geteuid():
        pytest.skip("only root makes networks")
    with ExitStack() as stack:
        try:
            stack.enter_context(joined_by_a_switch("one", "two"))
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("no networks can be made here")
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder that both machines see, with a recipe and what one process makes of it."""
    folder = tmp_path_factory.mktemp("shared")
    data = {"text": str(write_texts(folder / "texts")), "validation": 0.2}
    recipe = Recipe.model_validate({**RECIPE, "data": data})
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    (folder / "hosts").write_text(HOSTS, encoding="utf-8")
    with in_float64():
        train(folder / "recipe.yaml", output_dir=folder / "one")
    return folder


def line_of_the_page(changes):
    """Return the words of the page's torchrun line with some of them changed."""
    (line,) = re.findall(r"^torchrun (.*?)\n```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    text = line.replace("\\\n", " ")
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return [sys.executable, "-m", "torch.distributed.run", *shlex.split(text)]


@contextmanager
def started(shared, output, processes, held=None):
    """Start a run on both machines; yield by host what ends, and end what is left."""
    words = line_of_the_page(
        {
            "--nproc_per_node=8": f"--nproc_per_node={processes}",
            "-m ssmzoo": "-m tests.training.two_machines",
            "longhorn-slimpajama-1.3b": str(shared / "recipe.yaml"),
            "/shared/runs/long": str(output),
        }
    )
    words += ["--set", "train.sequence_parallel=2"]
    hold = {} if held is None else {"HELD": str(held)}
    both = {}
    try:
        for host in ("one", "two"):
            place = ["ip", "netns", "exec", network(host), "unshare", "--uts", "--mount"]
            named = ["sh", "-ec", NAMED, "sh", host, str(shared / "hosts")]
            with output.with_name(f"{host}.txt").open("w") as said:
                both[host] = subprocess.Popen(
                    [*place, *named, *words],
                    stdout=said,
                    stderr=said,
                    cwd=PAGE.parents[1],
                    env={**ENVIRONMENT, **hold},
                )
        yield both
    finally:
        for host, machine in both.items():
            kill(host)
            machine.wait()


def signalled(host, number):
    for pid in run_ip("netns", "pids", network(host)).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)


def kill(host):
    """Kill all that a host runs; the system closes its connections."""
    signalled(host, signal.SIGKILL)


def freeze(host):
    """Let all that a host runs hang, with open connections."""
    signalled(host, signal.SIGSTOP)


def cut(host):
    """Let the switch forget a host: neither side hears more than that nobody answers."""
    run_ip("-n", network("switch"), "link", "set", host, "nomaster")


def wait_for(*paths):
    end = time.monotonic() + 300
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, paths
        time.sleep(0.1)


@pytest.mark.parametrize("processes", [1, 2])
def test_two_machines_train_as_one_process_does(processes, shared, joined, tmp_path):
    """The pieces of a row lie on both machines, or on one."""
    with started(shared, tmp_path / "run", processes) as both:
        for host, machine in both.items():
            assert machine.wait(300) == 0, (tmp_path / f"{host}.txt").read_text()
    assert_alike(shared / "one", tmp_path / "run")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("lose", "host", "left"),
    [
        (cut, "two", ["one", "two"]),
        (freeze, "two", ["one"]),
        (kill, "two", ["one"]),
        (kill, "one", ["two"]),  # which keeps torchrun's store
    ],
)
def test_a_machine_that_is_gone_ends_the_run_on_the_other(
    lose, host, left, processes, shared, joined, tmp_path
):
    """With one line, a status above 0, and a checkpoint from which one process goes on."""
    held, run = tmp_path / "held", tmp_path / "run"
    held.mkdir()
    checkpoint = run / "checkpoints/step-00000004"
    with started(shared, run, processes, held) as both:
        wait_for(checkpoint, *(held / str(rank) for rank in range(2 * processes)))
        lose(host)
        (held / "gone").touch()
        begin = time.monotonic()
        for name in left:
            both[name].wait(begin + NOTICED - time.monotonic())
            sys.stdout.write(f"{name}: {time.monotonic() - begin:.0f} seconds\n")
    for name in left:
        said = said_by_us((tmp_path / f"{name}.txt").read_text())
        assert both[name].returncode > 0
        assert said
        assert all(line.endswith(f"resume from {checkpoint}") for line in said), said
    assert damage_of(checkpoint) is None
    with in_float64():
        train(shared / "recipe.yaml", output_dir=run, resume=True)
    assert_alike(shared / "one", run)
