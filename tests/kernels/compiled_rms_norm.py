"""Compile the Triton kernels of rms_norm and add_rms_norm for GPUs that need not be there.

Reports what they use: prints one JSON object a kernel, case and target. The launches are the ops'
own: a recorder stands in for the launcher.
"""

import torch
from compiled_triton import recording, write_records

from ssmzoo_kernels.add_rms_norm import triton as sum_triton
from ssmzoo_kernels.rms_norm import triton as norm_triton

# name: (rows, channels, dtype)
CASES = {
    "model": (2048, 4096, torch.bfloat16),
    "small": (2048, 256, torch.float32),
    "float64": (64, 2048, torch.float64),
    "sum": (2048, 4096, torch.bfloat16),
}


def launches(case):
    rows, width, dtype = CASES[case]
    exact = torch.promote_types(torch.float32, dtype)
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(width, dtype=dtype)
    with recording() as seen:
        if case.startswith("sum"):
            residual, roots = torch.empty(rows, width), torch.empty(rows, dtype=exact)
            sum_triton.forward(residual, x, weight, True, 1e-5, 0.0)
            sum_triton.backward(residual, x, residual, weight, roots, 1e-5, 0.0)
        else:
            norm_triton.forward(x, weight, True, 1e-5, 0.0)
            norm_triton.backward(x, x, weight, torch.empty(rows, dtype=exact), 1e-5, 0.0)
    return seen


if __name__ == "__main__":
    write_records(CASES, launches)
