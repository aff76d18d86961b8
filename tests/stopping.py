"""Runs that stop in the middle as if they were killed, within this process."""

from ssmzoo.loop import Run


class KilledError(Exception):
    pass


def killed_before(patch, step):
    """Stop a run as if it were killed when it is about to take a step."""
    optimize = Run._optimize

    def stop(run, read):
        if run.step == step - 1:
            raise KilledError
        optimize(run, read)

    patch.setattr(Run, "_optimize", stop)
