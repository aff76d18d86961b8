"""Compile companion_step's Triton kernel for GPUs that need not be there, and report what it uses.

Prints one JSON object a case and target. The launch is the op's own: a recorder stands in for the
launcher.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.jit import JITFunction

from ssmzoo_kernels.companion_step import triton as companion_triton

# name: (rows, channels, order, dtype)
CASES = {
    "hyena_rtf": (8, 768, 64, torch.float32),
    "small": (8, 256, 4, torch.float32),
    "path_x": (1, 256, 2048, torch.float32),
    "ragged": (3, 77, 37, torch.float32),
    "float64": (1, 768, 64, torch.float64),
}


def launches(case):
    rows, width, order, dtype = CASES[case]

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
        position = torch.zeros(rows, dtype=torch.int64)
        coefficients = (empty(order, width), empty(order, width), empty(width))
        companion_triton.step_(
            empty(rows, width), empty(rows, order + 1, width), position, *coefficients
        )
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
    for case in CASES:
        for target in (80, 90):
            for kernel, args, named in launches(case):
                compiled, _ = shared.compile_launch(kernel, args, named, target)
                record = {"case": case, "kernel": kernel.__name__, "target": f"sm_{target}"}
                record |= {**shared.usage(compiled), "shared": compiled.metadata.shared}
                sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
