"""Runs that stop in the middle within this process, as if they were killed or by a signal."""

import os

from ssmzoo.training.trainer import Run


class KilledError(Exception):
    pass


def killed_before(patch, step):
    """Stop a run as if it were killed when it is about to take a step."""
    take_step = Run.take_step

    def stop(run, read):
        if run.progress.step == step - 1:
            raise KilledError
        return take_step(run, read)

    patch.setattr(Run, "take_step", stop)


def signalled_at(patch, owner, name, call, number):
    """Let a function send a signal to its own process, at one of its calls."""
    function, calls = getattr(owner, name), []

    def send(*given, **named):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return function(*given, **named)

    patch.setattr(owner, name, send)
