"""Compile companion_step's Triton kernel for GPUs that need not be there, and report what it uses.

Prints one JSON object a case and target. The launch is the op's own: a recorder stands in for the
launcher.
"""

import torch
from compiled_triton import recording, write_records

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

    with recording() as seen:
        position = torch.zeros(rows, dtype=torch.int64)
        coefficients = (empty(order, width), empty(order, width), empty(width))
        companion_triton.forward(
            empty(rows, width), empty(rows, order + 1, width), position, *coefficients
        )
    return seen


if __name__ == "__main__":
    write_records(CASES, launches)
