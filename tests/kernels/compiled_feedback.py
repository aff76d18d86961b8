"""Compile feedback_scan's Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a case, kernel and target. The launches are the op's own: a recorder stands
in for the launcher.
"""

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.jit import JITFunction

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
    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
        out, final, saved = feedback_triton.forward(*inputs, True)
        feedback_triton.backward(out, final, *inputs, saved)
        # nothing runs, so nothing converges
        with contextlib.suppress(feedback_triton.NotConverged):
            feedback_triton.newton(*inputs, True, 1e-6, None, 0.0)
    finally:
        JITFunction.run = original
    return seen


def compiler():
    """The machinery of compiled_triton.py, which lies beside and is no package."""
    path = Path(__file__).with_name("compiled_triton.py")
    spec = importlib.util.spec_from_file_location("compiled_triton", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    shared = compiler()
    for case in sys.argv[1:] or CASES:
        for target in (80, 90):
            for kernel, args, named in launches(case):
                compiled, options = shared.compile_launch(kernel, args, named, target)
                record = {"case": case, "kernel": kernel.__name__, "target": f"sm_{target}"}
                record |= {"warps": options["num_warps"], **shared.usage(compiled)}
                record |= {"shared": compiled.metadata.shared}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
