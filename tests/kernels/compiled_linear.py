"""Compile linear_scan's Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a case, kernel and target. The launches are the op's own: a recorder stands
in for the launcher.
"""

import sys

import torch
from compiled_triton import recording, write_records

from ssmzoo_kernels.linear_scan import triton as linear_triton

# name: (columns, dtype, tokens): 2048 tokens are cut into spans, 8 are not
CASES = {
    "model": (1536, torch.float32, 2048),
    "whole": (1536, torch.float32, 8),
    "bfloat16": (1536, torch.bfloat16, 2048),
    "narrow": (3, torch.float32, 2048),
    "float64": (77, torch.float64, 2048),
    "complex": (1536, torch.complex64, 2048),
}


def launches(case):
    width, dtype, tokens = CASES[case]
    rows, edges = torch.empty(tokens, width, dtype=dtype), torch.empty(2, width, dtype=dtype)
    offsets = torch.zeros(3, dtype=torch.int64)
    with recording() as seen:
        h, final = linear_triton.forward(rows, rows, edges, offsets)
        linear_triton.backward(rows, final, rows, h, edges, offsets)
    return seen


if __name__ == "__main__":
    write_records(sys.argv[1:] or CASES, launches)
