"""Compile gated_linear_attention's Triton kernels for GPUs that need not be there.

Prints one JSON object a case, kernel and target: what they use. The launches are the op's own: a
recorder stands in for the launcher.
"""

import sys

import torch
from compiled_triton import recording, write_records

from ssmzoo_kernels.gated_linear_attention import triton as attention_triton

# name: (dtype, groups, heads, width of keys, width of values, rows of a decay, rule)
CASES = {
    "ssd": (torch.bfloat16, 1, 24, 128, 64, 1, "additive"),
    "gla": (torch.bfloat16, 4, 4, 128, 128, 128, "additive"),
    "gated_delta": (torch.bfloat16, 16, 32, 128, 128, 1, "delta"),
    "kda": (torch.bfloat16, 32, 32, 128, 128, 128, "delta"),
    "narrow": (torch.bfloat16, 8, 8, 64, 64, 1, "delta"),
    "narrow_rows": (torch.bfloat16, 8, 8, 64, 64, 64, "delta"),
    "odd": (torch.bfloat16, 2, 4, 37, 50, 1, "delta"),
    "wide": (torch.bfloat16, 4, 4, 256, 512, 1, "additive"),
    "float32": (torch.float32, 8, 8, 64, 64, 1, "delta"),
    "float32_rows": (torch.float32, 8, 8, 64, 64, 64, "delta"),
    "float64": (torch.float64, 4, 4, 64, 64, 1, "delta"),
}


def launches(case):
    dtype, groups, heads, keys, width, rows, rule = CASES[case]
    tokens, sequences = 4096, 2
    q = torch.empty(tokens, groups, keys, dtype=dtype)
    v = torch.empty(tokens, heads, width, dtype=dtype)
    decay, beta = torch.empty(tokens, heads, rows), torch.empty(tokens, heads, dtype=dtype)
    exact = torch.promote_types(dtype, torch.float32)
    state = torch.empty(sequences, heads, keys, width, dtype=exact)
    offsets = torch.zeros(sequences + 1, dtype=torch.int64)
    with recording() as seen:
        inputs, options = (q, q, v, decay, beta, state), (rule, 1.0, 64)
        out, final, saved = attention_triton.forward(*inputs, offsets, True, *options)
        attention_triton.backward(out, final, *inputs, offsets, saved, *options)
        inputs = [x[:sequences] for x in inputs]
        attention_triton.forward(*inputs, offsets, False, *options)
    return seen


if __name__ == "__main__":
    write_records(sys.argv[1:] or CASES, launches)
