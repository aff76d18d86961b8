"""Compile linear_scan's Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a case, kernel and target. The launches are the op's own: a recorder stands
in for the launcher.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.jit import JITFunction

from ssmzoo_kernels.linear_scan import triton as linear_triton

# name: (columns, dtype)
CASES = {
    "model": (1536, torch.float32),
    "bfloat16": (1536, torch.bfloat16),
    "narrow": (3, torch.float32),
    "float64": (77, torch.float64),
    "complex": (1536, torch.complex64),
}


def launches(case):
    width, dtype = CASES[case]
    rows, edges = torch.empty(8, width, dtype=dtype), torch.empty(2, width, dtype=dtype)
    offsets = torch.zeros(3, dtype=torch.int64)
    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
        h, final = linear_triton.forward(rows, rows, edges, offsets)
        linear_triton.backward(rows, final, rows, h, edges, offsets)
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
                compiled, _ = shared.compile_launch(kernel, args, named, target)
                record = {"case": case, "kernel": kernel.__name__, "target": f"sm_{target}"}
                record |= {**shared.usage(compiled), "shared": compiled.metadata.shared}
                sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
