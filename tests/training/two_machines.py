"""What each process does for ``test_two_machines.py``: `ssmzoo`, in float64 and less patient.

Where HELD names a folder it waits before step 7 until the other machine is gone.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.training.many_processes import in_float64

from ssmzoo.cli.main import main
from ssmzoo.training import distributed
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.trainer import Run

PATIENCE = 60  # seconds; users have half an hour
take_step = Run.take_step


def held(run, read):
    """Take a step, but step 7 when the other machine is gone."""
    if run.progress.step == 6:
        Path(os.environ["HELD"], os.environ["RANK"]).touch()
        while not Path(os.environ["HELD"], "gone").exists():
            time.sleep(0.01)
    return take_step(run, read)


if __name__ == "__main__":
    if "HELD" in os.environ:
        Run.take_step = held
    RunFolder.draw = lambda *_, **__: None
    distributed.STEP = timedelta(seconds=PATIENCE)
    with in_float64():
        sys.exit(main(sys.argv[1:]))
