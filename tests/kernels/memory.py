"""What calls of ops keep and hold of memory."""

from itertools import accumulate

import torch
from torch.autograd.profiler import profile


def saved_numbers(call, inputs):
    """Return how many numbers autograd keeps of a call besides its inputs."""
    own = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    kept = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(*inputs)
    return sum(kept.values())


def peak_bytes(call):
    """Return the most memory that torch holds during a call, beyond what it held before."""
    # not torch.profiler, which sorts every event into a tree: quadratic in them
    with profile(use_cpu=True, profile_memory=True) as recorded:
        call()
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    assert events
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def growth(step, states=(16, 128), lengths=(128, 256)):
    """Return the float32 numbers that a token costs more with many states than with few.

    ``step(states, length)`` returns a forward and backward to run.
    """
    short, long = lengths
    few, many = (peak_bytes(step(n, long)) - peak_bytes(step(n, short)) for n in states)
    return (many - few) / (4 * (long - short))
