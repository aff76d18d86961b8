"""Compile the Triton kernels of diagonal state spaces for GPUs that need not be there.

Run by ``test_vandermonde.py`` and ``test_diagonal_step.py``; prints one JSON object a kernel. The
launches are the ops' own, recorded instead of run.

    python tests/kernels/compiled_diagonal.py vandermonde
"""

import importlib.util
import json
import sys
from pathlib import Path

_path = Path(__file__).with_name("compiled_triton.py")
_spec = importlib.util.spec_from_file_location(_path.stem, _path)
compiled = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compiled)

import torch  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from ssmzoo_kernels.diagonal_step import triton as step_triton  # noqa: E402
from ssmzoo_kernels.vandermonde import triton as vandermonde_triton  # noqa: E402
from ssmzoo_kernels.vandermonde.tables import Lags  # noqa: E402

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
    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
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
    finally:
        JITFunction.run = original
    distinct = {
        (kernel, *sorted(named.items())): (kernel, args, named) for kernel, args, named in seen
    }
    return distinct.values()


def main():
    compiled.POINTERS[torch.int8] = "*i8"
    for case in sys.argv[1:]:
        for target in (80, 90):
            for kernel, args, named in launches(case):
                built, options = compiled.compile_launch(kernel, args, named, target)
                record = {
                    "case": case,
                    "kernel": kernel.__name__,
                    "target": f"sm_{target}",
                    "warps": options["num_warps"],
                    **compiled.usage(built),
                    "shared": built.metadata.shared,
                }
                compiled.write(json.dumps(record))


if __name__ == "__main__":
    main()
