"""Compile eidetic_attention's Triton kernels for GPUs that need not be there.

Prints one JSON object a case, kernel and target: what they use. The launches are the ops' own: a
recorder stands in for the launcher.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.jit import JITFunction

from ssmzoo_kernels.eidetic_attention import triton as attention_triton
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors

# name: (dtype, width of a head, heads, heads of keys, window, memory's rows, late span, past);
# "decode": one token a sequence
CASES = {
    "model64": (torch.bfloat16, 64, 12, 12, 512, 64, 0, False),
    "model128": (torch.bfloat16, 128, 16, 4, 512, 64, 0, False),
    "carried": (torch.bfloat16, 64, 12, 12, 512, 64, 32, True),
    "carried128": (torch.float16, 128, 16, 16, 512, 64, 512, True),
    "decode": (torch.bfloat16, 128, 16, 4, 512, 64, 0, True),
    "float32": (torch.float32, 64, 12, 12, 512, 64, 32, True),
    "float32_128": (torch.float32, 128, 16, 16, 512, 64, 0, False),
    "float64": (torch.float64, 64, 4, 4, 512, 64, 0, True),
    "float64_128": (torch.float64, 128, 4, 4, 512, 64, 0, False),
    "wide": (torch.bfloat16, 256, 4, 4, 512, 64, 32, True),
    "plain": (torch.bfloat16, 96, 16, 16, None, 0, 0, True),
    "narrow": (torch.bfloat16, 16, 4, 2, 128, 32, 16, True),
    "decode_late": (torch.bfloat16, 64, 12, 12, 512, 64, 32, True),
    "decode_float32": (torch.float32, 64, 12, 12, 512, 64, 0, True),
    "decode_wide": (torch.bfloat16, 256, 4, 4, 512, 64, 32, True),
    "decode_float64": (torch.float64, 128, 4, 4, 512, 64, 0, True),
}


def launches(case):
    dtype, width, heads, groups, window, rows, span, past = CASES[case]
    decodes = case.startswith("decode")
    sequences, tokens = 2, 2 if decodes else 4096

    def empty(*shape):
        return torch.empty(*shape, groups, width, dtype=dtype)

    def pair(present, *shape):
        return [empty(*shape) if present else None for _ in range(2)]

    tensors = Tensors(
        torch.empty(tokens, heads, width, dtype=dtype),
        *pair(True, tokens),
        *pair(rows, 10, rows),
        *pair(past, sequences, 600),
        *pair(span, tokens),
        *pair(span and past, sequences, 600),
    )
    count = torch.zeros(10, dtype=torch.int64) if rows else None
    positions = torch.zeros(10, rows, dtype=torch.int64) if case == "carried" else None
    offsets, seen = (torch.zeros(x, dtype=torch.int64) for x in (sequences + 1, sequences))
    call = Call(count, positions, offsets, seen, window, span, width**-0.5)
    recorded = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: recorded.append(
        (self, args, named)
    )
    try:
        out, lse = attention_triton.forward(tensors, call)
        if not decodes:
            attention_triton.backward(out, out, lse, tensors, call)
    finally:
        JITFunction.run = original
    return recorded


def compiler():
    """The machinery of compiled_triton.py, which lies beside and is no package."""
    path = Path(__file__).with_name("compiled_triton.py")
    spec = importlib.util.spec_from_file_location("compiled_triton", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    shared = compiler()
    shared.POINTERS.setdefault(torch.float16, "*fp16")
    for case in sys.argv[1:] or CASES:
        for target in (80, 90):
            for kernel, args, named in launches(case):
                compiled, options = shared.compile_launch(kernel, args, named, target)
                name = kernel.__name__.removeprefix("eidetic_attention_")
                record = {"case": case, "kernel": name, "target": f"sm_{target}"}
                record |= {"warps": options["num_warps"], **shared.usage(compiled)}
                record |= {"shared": compiled.metadata.shared}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
