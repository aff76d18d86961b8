"""Scripts that each run in a process of their own, without importing torch and transformers anew.

The fixture ``forks`` is for tests that are marked ``xdist_group("forks")``, so that one worker
starts it. It has imported nothing of ours.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PARENT = """
import json, os, sys, traceback
from importlib import import_module

for name in ("torch", "transformers.modeling_layers", "transformers.generation", *sys.argv[1:]):
    import_module(name)
for line in sys.stdin:
    script, arguments, environment, out, log = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            for number, path in enumerate((os.devnull, out, log)):
                os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
            os.environ |= environment
            sys.argv = ["-c", *arguments]
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:  # of a terminal that is gone
                    pass
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# the command line of ssmzoo
COMMAND = """
import sys
from ssmzoo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Ended(NamedTuple):
    """What a script printed, what it said on stderr, and its exit status."""

    out: str
    log: str
    status: int


class Forks:
    """An interpreter that has imported torch, transformers and ``modules``, and forks.

    What libraries read from the environment as they are imported, such as ``HF_HOME``, is the same
    in all scripts.
    """

    def __init__(self, environment: Mapping[str, str], *modules: str):
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *modules],
            env=environment,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        script: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        started: Callable[[int], object] = lambda pid: None,
    ) -> Ended:
        """Run a script to its end; ``started`` gets the number of its process."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("out", "log")]
            for file in files:
                file.touch()
            job = (script, arguments, environment or {}, *map(str, files))
            self._parent.stdin.write(json.dumps(job) + "\n")
            self._parent.stdin.flush()
            started(int(self._parent.stdout.readline()))
            status = int(self._parent.stdout.readline())
            return Ended(*(file.read_text() for file in files), status)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate()


def ended(pid: int) -> bool:
    """Tell whether a process has ended, and may still be waited for."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """An interpreter with the environment of the tests and a cache of its own."""
    with Forks({**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home"))}) as running:
        yield running
