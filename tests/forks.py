"""Scripts that each run in a process of their own, without importing torch and transformers anew."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

PARENT = """
import json, os, signal, sys, traceback
import ssmzoo.auto, ssmzoo.cli.main
from ssmzoo.family import load_family

load_family("longhorn")
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
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ended(NamedTuple):
    """What a script printed, what it said on stderr, and its exit status."""

    out: str
    log: str
    status: int


class Forks:
    """An interpreter that knows ssmzoo, torch and transformers, and forks once for each script.

    It takes what libraries read from the environment as they are imported; ``HF_DEBUG`` and the
    like are the same in all scripts.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            env=environment,
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
