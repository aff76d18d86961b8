"""Train on a mesh of several processes, and once more with a stop between: for a test that judges.

``python -m tests.training.meshes FOLDER PROCESSES`` forks the processes of each run.
"""

import gc
import json
import sys
from importlib import import_module
from pathlib import Path

from tests.training.killing_many import run_all
from tests.training.many_processes import in_float64, sharding

from ssmzoo import load_family
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.run import train
from ssmzoo.training.step import Learner


def sharded(recipe, output_dir, resume):
    """Train as `accelerate launch` says; leave the share of the weights that a process holds."""
    build = Learner.__init__

    def watch(learner, *given, **named):
        build(learner, *given, **named)
        whole = sum(p.numel() for p in learner.parameters)
        share = sum(p.to_local().numel() for p in learner.parameters) / whole
        (output_dir.parent / "shards.json").write_text(json.dumps(share))

    Learner.__init__ = watch
    with sharding(output_dir.parent), in_float64():
        train(recipe, output_dir=output_dir, resume=resume)


def main():
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    RunFolder.draw = lambda *_, **__: None
    import_module("ssmzoo.auto")
    load_family("longhorn")
    gc.freeze()
    for name, stop in (("run", None), ("resumed", 7), ("resumed", None)):
        codes = run_all(folder / "recipe.yaml", folder / name, count, stop=stop, run=sharded)
        assert codes == [0 if stop is None else 1] * count, (name, codes)


if __name__ == "__main__":
    main()
