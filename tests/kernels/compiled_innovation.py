"""Compile innovation's Triton kernel for GPUs that need not be there, and report what it uses.

Prints one JSON object a case and target. The launch is the op's own: a recorder stands in for the
launcher.
"""

import torch
from compiled_triton import recording, write_records

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
    with recording() as seen:
        innovation_triton.forward(y, history, offsets, [1 / span] * span, relative)
    return seen


if __name__ == "__main__":
    write_records(CASES, launches)
