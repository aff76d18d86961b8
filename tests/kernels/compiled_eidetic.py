"""Compile eidetic_attention's Triton kernels for GPUs that need not be there.

Prints one JSON object a case, kernel and target: what they use. The launches are the ops' own: a
recorder stands in for the launcher.
"""

import argparse
import functools
from unittest import mock

import torch
from compiled_triton import TARGETS, named_target, recording, write_records

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


def launches(case, target=90):
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
    shaped_for = "hip" if isinstance(target, str) else "sm_90" if target == 90 else "sm_80"
    shaping = mock.patch.object(attention_triton, "target_of", return_value=shaped_for)
    with shaping, recording() as recorded:
        out, lse = attention_triton.forward(tensors, call)
        if not decodes:
            attention_triton.backward(out, out, lse, tensors, call)
    return recorded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="case")
    parser.add_argument("--targets", nargs="+", type=named_target, default=TARGETS)
    arguments = parser.parse_args()
    for target in arguments.targets:
        made = functools.partial(launches, target=target)
        write_records(arguments.cases, made, "eidetic_attention_", [target])
