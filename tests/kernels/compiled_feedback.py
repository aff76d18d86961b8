"""Compile feedback_scan's Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a case, kernel and target. The launches are the op's own: a recorder stands
in for the launcher.
"""

import argparse
import contextlib

import torch
from compiled_triton import TARGETS, named_target, recording, write_records

from ssmzoo_kernels.feedback_scan import triton as feedback_triton

# name: (channels, states, segments, dtype, whether all optional inputs are there, and drive)
CASES = {
    "model": (2048, 16, 64, torch.bfloat16, True, False),
    "small": (256, 16, 1, torch.float32, True, False),
    "plain": (2048, 16, 64, torch.float32, False, False),
    "drive": (2048, 16, 64, torch.float32, True, True),
    "states1": (37, 1, 8, torch.float32, True, False),
    "states100": (96, 100, 8, torch.float32, True, False),
    "states256": (96, 256, 8, torch.float32, True, False),
    "float64": (2048, 16, 64, torch.float64, True, False),
}


def launches(case):
    width, states, segments, dtype, full, driven = CASES[case]
    exact = torch.promote_types(torch.float32, dtype)
    rows = torch.empty(8, width, dtype=dtype)
    matrix, vector = torch.empty(width, states, dtype=exact), torch.empty(width, dtype=exact)
    edges = torch.empty(segments, width, states, dtype=exact)
    offsets = torch.zeros(segments + 1, dtype=torch.int64)
    optional = (matrix, vector) if full else (None, None)
    inputs = (rows, matrix, matrix, matrix, *optional, rows if driven else None)
    inputs = (*inputs, edges if full else None, offsets)
    with recording() as seen:
        out, final, saved = feedback_triton.forward(*inputs, True)
        feedback_triton.backward(out, final, *inputs, saved)
        # nothing runs, so nothing converges
        with contextlib.suppress(feedback_triton.NotConverged):
            feedback_triton.newton(*inputs, True, 1e-6, None, 0.0)
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="case")
    parser.add_argument("--targets", nargs="+", type=named_target, default=TARGETS)
    arguments = parser.parse_args()
    write_records(arguments.cases, launches, targets=arguments.targets)
