"""Two repairs of Triton's interpreter, for tests only (checked on triton 3.6 and 3.7).

``tl.associative_scan`` with a combine function of ours runs element by element in Python, and
``tl.dot`` multiplies the bit patterns of bfloat16. Both repairs lean on private names.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Install both repairs in this process."""
    interpreter.ScanOps.generic_scan = _scan
    if interpreter.InterpreterBuilder.create_dot is not _dot:
        interpreter.InterpreterBuilder.create_dot = _dot


def _scan(self, operands):
    """Scan by doubling: after step s every entry covers the 2^s entries before it."""
    dtypes = [x.dtype for x in operands]
    arrays = [x.handle.data for x in operands]
    axis, length = self.axis, arrays[0].shape[self.axis]
    position = np.arange(length).reshape([-1 if i == axis else 1 for i in range(arrays[0].ndim)])

    def wrap(values):
        return [self.to_tensor(x, dtype) for x, dtype in zip(values, dtypes, strict=True)]

    reach = 1
    while reach < length:
        earlier = [np.roll(x, reach, axis=axis) for x in arrays]
        joined = self.combine_fn.fn(*wrap(earlier), *wrap(arrays))
        joined = joined if isinstance(joined, tuple) else (joined,)
        arrays = [
            np.where(position >= reach, new.handle.data, old)
            for new, old in zip(joined, arrays, strict=True)
        ]
        reach *= 2
    return wrap(arrays)


_original_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return _original_dot(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)


def _widen(handle):
    if handle.dtype != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
