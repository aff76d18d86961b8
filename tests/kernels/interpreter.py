"""Repairs of Triton's interpreter, for tests only (checked on triton 3.6 and 3.7).

``tl.associative_scan`` with a combine function of ours runs element by element in Python;
``tl.dot`` multiplies the bit patterns of bfloat16. And most of the time goes into what changes
nothing: every call of a function inside a kernel replaces all of ``triton.language`` again, the
types of blocks are made anew for every tensor, as are numbers that meet them, operands of one type
go through all rules of conversion, and the bounds of every sum and product of integers are
computed, which nobody looks at without ``debug``. The repairs lean on private names.
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
        interpreter._patch_attr = _replace_builtin
        interpreter._get_np_dtype = _numpy_dtype
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(
            builder.options, sanitize_overflow=builder.options.debug
        )
        tl.block_type.__init__ = _make_type
        tl.tensor.__init__ = _make_tensor
        TritonSemantic.broadcast_impl_value = _broadcast
        TritonSemantic.binary_op_type_checking_impl = _together


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


def _replace_builtin(obj, name, member, builder, scope):
    """Let a builtin find its semantic, without a look at whether it has got one."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args, **named):
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    scope.set_attr(obj, name, call)


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
_joined = {}  # two shapes and what they broadcast to, by their identities
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
    left, right = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
    if left is right:
        return lhs, rhs
    if right is None:
        return lhs, _splat(rhs, lhs.type)
    if left is None:
        return _splat(lhs, rhs.type), rhs
    if (shape := _joint(left, right)) is None:
        return _original_broadcast(self, lhs, rhs)
    return _widened(lhs, shape), _widened(rhs, shape)


def _joint(left, right):
    """Return the shape that two blocks' shapes broadcast to, None for Triton to decide."""
    key = (id(left), id(right))
    if key not in _joined:
        fits = len(left) == len(right) and all(
            a == b or 1 in (a, b) for a, b in zip(left, right, strict=True)
        )
        shape = [max(pair) for pair in zip(left, right, strict=True)] if fits else None
        _joined[key] = left, right, shape
    return _joined[key][-1]


def _widened(block, shape):
    if [*block.type.shape] == shape:
        return block
    data = np.broadcast_to(block.handle.data, shape)
    return tl.tensor(interpreter.TensorHandle(data, block.dtype), tl.block_type(block.dtype, shape))


def _splat(scalar, type):
    """Return a block of a type's shape whose elements are a scalar's."""
    dtype = scalar.dtype
    data = np.full(type.shape, scalar.handle.data, dtype=_numpy_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), type.with_element_ty(dtype))


_original_together = TritonSemantic.binary_op_type_checking_impl
_FLOATS = {"fp32", "fp64"}
_INTEGERS = {"int32", "int64"}
_constants = {}  # blocks and scalars whose elements are a number, by the name of their type


def _together(self, lhs, rhs, *rules, **named_rules):
    """Bring two operands to one type; two of one type, or one and a number, go no long way."""
    if isinstance(lhs, tl.tensor):
        name = lhs.dtype.name
        if isinstance(rhs, tl.tensor):
            if name == rhs.dtype.name and (name in _FLOATS or name in _INTEGERS):
                return self.broadcast_impl_value(lhs, rhs)
        elif _fits(rhs, name):
            return lhs, _constant(self, rhs, lhs.type)
    elif isinstance(rhs, tl.tensor) and _fits(lhs, rhs.dtype.name):
        return _constant(self, lhs, rhs.type), rhs
    return _original_together(self, lhs, rhs, *rules, **named_rules)


def _fits(number, name):
    """Tell whether a number takes the type of the tensor that it meets, and is in its range."""
    if type(number) is int:
        return -(2**31) <= number < 2**31 and (name in _INTEGERS or name in _FLOATS)
    return type(number) is float and name in _FLOATS


def _constant(self, number, type):
    key = (repr(number), type.name)  # -0.0 is not 0.0
    if key not in _constants:
        scalar = self.scalar_constant(number, type.scalar)
        _constants[key] = _splat(scalar, type) if type.is_block() else scalar
        _constants[key].handle.data.flags.writeable = False
    return _constants[key]
