"""How a program of token_step is written and run, and the instructions that every layer has."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssmzoo_kernels import dispatch, native
from ssmzoo_kernels.few_rows_linear.cpu import FEW_BITS, HALVES
from ssmzoo_kernels.token_step import cpu

OP = "token_step"
dispatch.c_kernels[OP] = lambda: cpu


class Code(enum.IntEnum):
    """The kinds of instructions, numbered by their places in ``kinds`` of token_step.c."""

    INPUT = 0
    OUTPUT = 1
    LINEAR = 2
    NORM = 3
    CONV = 4
    GATE = 5
    ADD = 6
    MAP = 7
    BLEND = 8
    DOTS = 9
    DELAY = 10
    COUNT = 11
    SELECTIVE = 12
    SSD = 13
    DELTA = 14
    ATTENTION = 15
    LONGHORN = 16
    FEEDBACK = 17
    DIAGONAL = 18
    PRODUCTS = 19
    POLES = 20
    ANGLES = 21
    TURN = 22
    COMPANION = 23
    ROTATE = 24
    KEEP = 25
    ATTEND = 26
    INNOVATE = 27


_GATES = {None: 0, "silu before": 1, "silu after": 2, "sigmoid after": 3}
_GATED_BY = {"silu": 0, "sigmoid": 1, "itself": 2}
_FUNCTIONS = ("itself", "gelu", "gelu_tanh", "sigmoid", "tanh", "exp", "softplus", "squared_relu")
_FUNCTIONS += ("heavy_tail",)


@dataclasses.dataclass(frozen=True)
class Value:
    """A row's numbers while a program runs, or some of their columns."""

    offset: int
    start: int
    width: int
    stride: int

    def split(self, *widths: int) -> list[Value]:
        """Return the value cut into columns of these widths."""
        parts, start = [], self.start
        for width in widths:
            parts.append(dataclasses.replace(self, start=start, width=width))
            start += width
        return parts

    def chunk(self, count: int) -> list[Value]:
        """Return the value cut into so many equal parts."""
        return self.split(*[self.width // count] * count)


class Writer:
    """A list of instructions, those of every layer, and the call that runs them in C."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Program: dtype must be float32 or float64, got {dtype}")
        self.dtype = dtype
        self.weights: list[Tensor] = []
        self.width = self.work = 0
        self.list: list[cpu.Instruction] = []
        self.code: ctypes.Array[cpu.Instruction] | None = None

    def input(self, tensor: int, dtype: torch.dtype, width: int) -> Value:
        """Read a given tensor, ``[B, width]``."""
        return self._add(Code.INPUT, width, size=(width, tensor, self._type(dtype)))

    def output(self, x: Value, tensor: int, dtype: torch.dtype) -> None:
        """Write a value to a given tensor, ``[B, width]``."""
        self._add(Code.OUTPUT, 0, (x,), size=(x.width, tensor, self._type(dtype)))

    def value(self, width: int) -> Value:
        """Return a value that instructions can write parts of."""
        made = Value(self.width, 0, width, width)
        self.width += width
        return made

    def linear(
        self,
        x: Value,
        weight: Tensor,  # [O, I]
        bias: Tensor | None = None,  # [O]
        into: Value | None = None,
        scale: Tensor | None = None,
    ) -> Value:
        """``y = W x + b``.

        Weight and scale may be those of :func:`~ssmzoo_kernels.few_rows_linear.few_bits`. ``into``
        is where y goes, or a new value.
        """
        outputs = weight.shape[0]
        if (weight.dtype in FEW_BITS) != (scale is not None):
            raise ValueError(f"Program: few bits and a scale go together, got {weight.dtype}")
        weights = (weight, bias, scale)
        return self._add(Code.LINEAR, outputs, (x,), weights, (x.width, outputs), out=into)

    def rms_norm(
        self,
        x: Value,
        weight: Tensor | None,
        eps: float,
        *,
        group: int | None = None,
        added: float = 0.0,
        gate: Value | None = None,
        gating: str | None = None,
    ) -> Value:
        """``y = (w + added) x / sqrt(mean(x^2) + eps)`` over groups of columns.

        Args:
            x: The value to normalise.
            weight: ``[width]``, or ``[group]`` for every group alike.
            eps: Added to the mean of squares.
            group: Columns that are normalised together; all of them.
            added: Added to the weight.
            gate: z, as wide as x.
            gating: ``"silu before"``: x is ``x silu(z)``; ``"silu after"``, ``"sigmoid after"``: y
                is multiplied with it.
        """
        own = x.width if weight is None else weight.numel()
        size = (x.width, group or x.width, own, _GATES[gating])
        return self._add(Code.NORM, x.width, (x, gate or x), (weight,), size, (eps, added))

    def layer_norm(
        self,
        x: Value,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        group: int | None = None,
    ) -> Value:
        """``y = w (x - mean(x)) / sqrt(var(x) + eps) + b`` over groups of columns.

        Weight and bias: ``[width]``, or ``[group]`` for every group alike.
        """
        own = next((w.numel() for w in (weight, bias) if w is not None), x.width)
        size = (x.width, group or x.width, own, 0, 1)
        return self._add(Code.NORM, x.width, (x, x), (weight, bias), size, (eps,))

    def causal_conv1d(
        self,
        x: Value,
        weight: Tensor,  # [D, K]
        bias: Tensor | None,  # [D]
        state: int,
        kept: int,
        state_dtype: torch.dtype,
        *,
        silu: bool,
        channels_last: bool = False,
    ) -> Value:
        """Convolve, and move the state of the last inputs on by one.

        The state is ``[B, D, kept]``, or with ``channels_last`` ``[B, kept, D]``.
        """
        taps = weight.numel() // x.width
        layout = (self._type(state_dtype), int(silu), int(channels_last))
        size = (x.width, taps, kept, state, *layout)
        return self._add(Code.CONV, x.width, (x,), (weight, bias), size)

    def gated(self, gate: Value, x: Value, by: str = "silu") -> Value:
        """``y = silu(gate) x``; by "sigmoid" ``sigmoid(gate) x``, by "itself" ``gate x``.

        A gate narrower than x has a number for each head.
        """
        size = (x.width, _GATED_BY[by], x.width // gate.width)
        return self._add(Code.GATE, x.width, (gate, x), size=size)

    def add(self, x: Value, y: Value) -> Value:
        """``x + y``."""
        return self._add(Code.ADD, x.width, (x, y), size=(x.width,))

    def map(
        self,
        x: Value,
        function: str = "itself",
        *,
        factor: float = 1.0,
        weight: Tensor | None = None,  # [width of y]
        bias: Tensor | None = None,  # [width of y]
        step: int = 1,
        least: float = -math.inf,
    ) -> Value:
        """``y = max(f(factor w x + b), least)``, of every ``step``-th column of x.

        Functions: "itself", "gelu", "gelu_tanh", "sigmoid", "tanh", "exp", "softplus",
        "squared_relu", and "heavy_tail", ``max(x, 0) + 1 / (1 - min(x, 0))``.
        """
        width = -(-x.width // step)
        size = (width, step, _FUNCTIONS.index(function))
        return self._add(Code.MAP, width, (x,), (weight, bias), size, (factor, least))

    def blend(self, x: Value, other: Value, weight: Tensor | Value) -> Value:
        """``y = x + w (other - x)``.

        The weight is a value as wide as x, or ``[n, width]``: then y is ``[n, width]``, too.
        """
        if isinstance(weight, Value):
            return self._add(Code.BLEND, x.width, (x, other, weight), size=(x.width, 1))
        count = weight.numel() // x.width
        values = (x, other, x)
        return self._add(Code.BLEND, weight.numel(), values, (weight,), (x.width, count))

    def dots(self, x: Value, y: Value, heads: int) -> Value:
        """Return the product ``x y`` of each head, ``[B, heads]``."""
        return self._add(Code.DOTS, heads, (x, y), size=(heads, x.width // heads))

    def delay(self, x: Value, state: int, columns: int | None = None, first: int = 0) -> Value:
        """Return x of the token before, which a state ``[B, columns]`` has from ``first`` on."""
        size = (x.width, state, columns or x.width, first)
        return self._add(Code.DELAY, x.width, (x,), size=size)

    def count(self, state: int, step: int) -> None:
        """Add a number to whole numbers, int64 ``[B]``."""
        self._add(Code.COUNT, 0, size=(state, step))

    def _exact(self, *weights: Tensor) -> tuple[Tensor, ...]:
        if any(weight.dtype is not self.dtype for weight in weights):
            raise ValueError(f"Program: these weights must be {self.dtype}")
        return weights

    def applies(self, x: Tensor) -> bool:
        """Return whether the program may run on an input ``[B, ..., width]``, as things are now.

        It must lie on the CPU, be a plain tensor, and nobody may need gradients, trace, watch or
        cast on the fly.
        """
        return (
            dispatch.decodes_on_cpu(x)
            and dispatch.takes_kernels()
            and not dispatch.kernel_missing(OP, self.dtype)
        )

    def run(self, rows: int, tensors: Sequence[Tensor]) -> None:
        """Run the instructions; see :func:`run_programs`."""
        run_programs([(self, tensors)], rows)

    def _type(self, dtype: torch.dtype) -> int:
        if dtype is not self.dtype and dtype not in HALVES:
            raise ValueError(f"Program: tensors must be {self.dtype} or of 16 bits, got {dtype}")
        return 0 if dtype is self.dtype else HALVES[dtype]

    def _add(
        self,
        kind: Code,
        width: int,
        values: Sequence[Value] = (),
        weights: Sequence[Tensor | None] = (),
        size: Sequence[int] = (),
        numbers: Sequence[float] = (),
        out: Value | None = None,
    ) -> Value:
        made = cpu.Instruction(kind=kind)
        out = out or self.value(width)
        for i, x in enumerate((*values, out)):
            place = made.out if x is out else made.inputs[i]
            place.offset, place.start, place.stride = x.offset, x.start, x.stride
        halves = HALVES if self.dtype is torch.float32 else ()
        for i, weight in enumerate(weights):
            if weight is None:
                continue
            few_bits = None
            if kind == Code.LINEAR and i == 0 and self.dtype is torch.float32:
                few_bits = FEW_BITS.get(weight.dtype)
            if weight.dtype not in (self.dtype, *halves) and few_bits is None:
                more = " or of 16 bits" if halves else ""
                raise ValueError(f"Program: weights must be {self.dtype}{more}, got {weight.dtype}")
            if not weight.is_contiguous():
                raise ValueError("Program: weights must be contiguous")
            self.weights.append(weight)
            self.work += weight.numel()
            made.data[i].at, made.data[i].type = (
                weight.data_ptr(),
                few_bits or self._type(weight.dtype),
            )
        made.size[: len(size)] = list(size)
        made.number[: len(numbers)] = list(numbers)
        self.list.append(made)
        return out


def run_programs(calls: Sequence[tuple[Writer, Sequence[Tensor]]], rows: int) -> None:
    """Run programs of one dtype, each behind the one before, in one call of C.

    Args:
        calls: Each program, and its inputs, outputs and states, contiguous. Outputs and states
            change; an output may be a later program's input.
        rows: B.

    Raises:
        MemoryError: There is none for the values; nothing has changed.
        FloatingPointError: A score of :meth:`Program.innovate` is not finite.
    """
    dispatch.record(OP, "cpu")
    dtype = calls[0][0].dtype
    parts, given, work = (cpu.Program * len(calls))(), [], 0
    for part, (program, tensors) in zip(parts, calls, strict=True):
        places = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
        given.append(places)
        code = program.code
        if code is None:
            code = program.code = (cpu.Instruction * len(program.list))(*program.list)
        part.list, part.count, part.width = ctypes.addressof(code), len(code), program.width
        part.given = ctypes.addressof(places)
        work = max(work, program.work)
    threads = torch.get_num_threads() if work > native.ONE_THREADS_WORK else 1
    failed = cpu.load(dtype)(parts, len(parts), rows, threads)
    if failed == 2:
        raise FloatingPointError("token_step: innovations must be finite")
    if failed:
        raise MemoryError("token_step: no memory for a token's values")
