"""Repairs of Triton's interpreter, for tests only (checked on triton 3.6 and 3.7).

``tl.associative_scan`` with a combine function of ours runs element by element in Python;
``tl.dot`` multiplies the bit patterns of bfloat16. And most of the time goes into what changes
nothing: every call of a function inside a kernel replaces all of ``triton.language`` again, the
types of blocks are made anew for every tensor, and the bounds of every sum and product of integers
are computed, which nobody looks at without ``debug``. The repairs lean on private names.
"""

import dataclasses
import functools

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def repair() -> None:
    """Install the repairs in this process, which interprets only from then on."""
    interpreter.ScanOps.generic_scan = _scan
    if interpreter.InterpreterBuilder.create_dot is not _dot:
        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter._patch_lang = _replace_once
        interpreter._get_np_dtype = _numpy_dtype
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(
            builder.options, sanitize_overflow=builder.options.debug
        )
        tl.block_type.__init__ = _make_type
        tl.tensor.__init__ = _make_tensor
        TritonSemantic.broadcast_impl_value = _broadcast


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


_original_patch = interpreter._patch_lang
_replaced = set()


def _replace_once(fn):
    """Replace what a module sees of ``triton.language`` at its first call, and leave it so."""
    if id(fn.__globals__) not in _replaced:
        _replaced.add(id(fn.__globals__))
        _original_patch(fn)
    return interpreter._LangPatchScope()  # with nothing to restore


_original_dtype = functools.cache(interpreter._get_np_dtype)


def _numpy_dtype(kind):
    if isinstance(kind, tl.block_type):
        kind = kind.element_ty
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else _original_dtype(kind)


_original_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return _original_dot(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)


def _widen(handle):
    if handle.dtype != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


_original_type = tl.block_type.__init__
_original_tensor = tl.tensor.__init__
_original_broadcast = TritonSemantic.broadcast_impl_value
_types = {}  # what the type of a block holds, by the name of its elements' type and its shape
_shapes = {}  # by shape: that of a type, and the number of elements and the shape of a tensor


def _make_type(self, element_ty, shape):
    """Make the type of a block; blocks of one shape share it."""
    sizes = (*(x.value if isinstance(x, tl.constexpr) else x for x in shape),)
    key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
    if key not in _types:
        _original_type(self, element_ty, shape)
        if sizes not in _shapes:
            of_tensors = tl.tuple([tl.constexpr(x) for x in sizes])
            _shapes[sizes] = self.shape, (tl.constexpr(self.numel), of_tensors)
        self.shape, self.of_tensors = _shapes[sizes]
        _types[key] = vars(self).copy()
    vars(self).update(_types[key], element_ty=element_ty)


def _make_tensor(self, handle, type):
    """Make a tensor; those of one shape share it."""
    facts = getattr(type, "of_tensors", None)
    if facts is None:
        return _original_tensor(self, handle, type)
    self.handle, self.type, self.dtype = handle, type, type.element_ty
    self.numel, self.shape = facts


def _broadcast(self, lhs, rhs):
    """Broadcast two tensors; those of one shape stay as they are."""
    shape = getattr(lhs.type, "shape", None)
    if shape is not None and shape is getattr(rhs.type, "shape", None):
        return lhs, rhs
    return _original_broadcast(self, lhs, rhs)
