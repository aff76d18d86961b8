"""Compile the Triton kernels of diagonal state spaces for GPUs that need not be there.

Run by ``test_vandermonde.py`` and ``test_diagonal_step.py``; prints one JSON object a kernel. The
launches are the ops' own, recorded instead of run.

    python tests/kernels/compiled_diagonal.py vandermonde
"""

import sys

import torch
from compiled_triton import recording, write_records

from ssmzoo_kernels.diagonal_step import triton as step_triton
from ssmzoo_kernels.vandermonde import triton as vandermonde_triton
from ssmzoo_kernels.vandermonde.tables import Lags

# name: (op, dtype, heads, modes, length or batch)
CASES = {
    "vandermonde": ("vandermonde", torch.complex64, 256, 64, 16384),
    "vandermonde_ragged": ("vandermonde", torch.complex64, 5, 100, 1000),
    "step": ("diagonal_step", torch.complex64, 768, 64, 8),
    "step_ragged": ("diagonal_step", torch.complex64, 5, 100, 3),
    "step_float64": ("diagonal_step", torch.complex128, 768, 64, 8),
}


def launches(case):
    """Return the different launches of a step, or of a forward and a backward."""
    op, dtype, heads, modes, size = CASES[case]
    with recording() as seen:
        coefficients = torch.ones(heads, modes, dtype=dtype)
        if op == "vandermonde":
            lags = Lags(size, 0, 0, torch.ones(heads, modes, dtype=torch.bool))
            exponent = -coefficients.to(torch.complex128)
            grad = vandermonde_triton.synthesize(coefficients[None], exponent, lags)
            vandermonde_triton.analyze(grad, exponent, lags, True)
            vandermonde_triton.analyze(grad, exponent, lags, False)
        else:
            u = torch.ones(size, heads, dtype=dtype.to_real())
            state = torch.ones(size, heads, modes, dtype=dtype)
            for drive in (None, coefficients):
                step_triton.forward(u, state, coefficients, drive, coefficients, u[0])
    distinct = {
        (kernel, *sorted(named.items())): (kernel, args, named) for kernel, args, named in seen
    }
    return distinct.values()


if __name__ == "__main__":
    write_records(sys.argv[1:], launches)
