"""Compile innovation's Triton kernel for GPUs that need not be there, and report what it uses.

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

from ssmzoo_kernels.innovation import triton as innovation_triton

# name: (channels, span, relative, dtype)
CASES = {
    "model": (2048, 4, False, torch.bfloat16),
    "relative": (2048, 4, True, torch.bfloat16),
    "narrow": (37, 9, True, torch.float32),
    "float64": (1024, 4, True, torch.float64),
}


def launches(case):
    width, span, relative, dtype = CASES[case]
    y, history = torch.empty(8, width, dtype=dtype), torch.empty(2, span, width, dtype=dtype)
    offsets = torch.zeros(3, dtype=torch.int64)
    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
        innovation_triton.scores(y, [1 / span] * span, history, offsets, relative)
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
