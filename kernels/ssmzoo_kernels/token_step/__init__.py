"""One token of a layer in a single call, for decoding on a CPU.

A step of decoding does little arithmetic: its time goes into reading the weights once, and into the
calls around that. Here a layer's token is a list of instructions, which a program holds and C runs.
A program reads weights, so it belongs inside the layer that owns them, and only where nothing wraps
that layer.

Dimensions: B rows (sequences), D, I, O widths, K taps, N states a channel, H heads, G groups.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssmzoo_kernels import dispatch, native
from ssmzoo_kernels.few_rows_linear.cpu import HALVES, INT8
from ssmzoo_kernels.token_step import cpu

OP = "token_step"
MOST_ROWS = 8
(
    _INPUT,
    _OUTPUT,
    _LINEAR,
    _NORM,
    _CONV,
    _GATE,
    _ADD,
    _SCALE,
    _GELU,
    _COUNT,
    _SELECTIVE,
    _SSD,
    _DELTA,
    _LONGHORN,
    _FEEDBACK,
    _DIAGONAL,
    _COMPANION,
) = range(17)
_GATES = {None: 0, "silu before": 1, "silu after": 2, "sigmoid after": 3}
_GATED_BY = {"silu": 0, "sigmoid": 1, "itself": 2}


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


class Program:
    """A layer's token as a list of instructions, written by calling the methods below in order.

    ``tensor`` numbers are places in the list that :meth:`run` is given. Weights must be contiguous
    and of the program's dtype, or beside float32 of bfloat16 or float16.

    Args:
        dtype: What values and recurrent states are: float32 or float64.

    Raises:
        ValueError: A weight that the kernel cannot read.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Program: dtype must be float32 or float64, got {dtype}")
        self.dtype = dtype
        self.weights: list[Tensor] = []
        self._width = self._work = 0
        self._list: list[cpu.Instruction] = []
        self._code: ctypes.Array[cpu.Instruction] | None = None

    def input(self, tensor: int, dtype: torch.dtype, width: int) -> Value:
        """Read a given tensor, ``[B, width]``."""
        return self._add(_INPUT, width, size=(width, tensor, self._type(dtype)))

    def output(self, x: Value, tensor: int, dtype: torch.dtype) -> None:
        """Write a value to a given tensor, ``[B, width]``."""
        self._add(_OUTPUT, 0, (x,), size=(x.width, tensor, self._type(dtype)))

    def value(self, width: int) -> Value:
        """Return a value that instructions can write parts of."""
        made = Value(self._width, 0, width, width)
        self._width += width
        return made

    def linear(
        self,
        x: Value,
        weight: Tensor,  # [O, I]
        bias: Tensor | None = None,  # [O]
        into: Value | None = None,
        scale: Tensor | None = None,  # O numbers
    ) -> Value:
        """``y = W x + b``, with a scale ``scale (W x) + b``, where W may be int8.

        ``into`` is where y goes, or a new value.
        """
        outputs, inputs = weight.shape
        if (weight.dtype is torch.int8) != (scale is not None):
            raise ValueError(f"Program: int8 and a scale go together, got {weight.dtype}")
        weights = (weight, bias, scale)
        return self._add(_LINEAR, outputs, (x,), weights, (inputs, outputs), out=into)

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
            x: What to normalise.
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
        return self._add(_NORM, x.width, (x, gate or x), (weight,), size, (eps, added))

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
        return self._add(_CONV, x.width, (x,), (weight, bias), size)

    def gated(self, gate: Value, x: Value, by: str = "silu") -> Value:
        """``y = silu(gate) x``; by "sigmoid" ``sigmoid(gate) x``, by "itself" ``gate x``."""
        return self._add(_GATE, x.width, (gate, x), size=(x.width, _GATED_BY[by]))

    def add(self, x: Value, y: Value) -> Value:
        """``x + y``."""
        return self._add(_ADD, x.width, (x, y), size=(x.width,))

    def scaled(
        self, x: Value, factor: float, weight: Tensor | None = None, *, step: int = 1
    ) -> Value:
        """``y = factor w x``, of every ``step``-th column of x; w ``[width of y]``."""
        width = -(-x.width // step)
        return self._add(_SCALE, width, (x,), (weight,), (width, step), (factor,))

    def gelu(self, x: Value, *, by_tanh: bool = False) -> Value:
        """``x / 2 (1 + erf(x / sqrt(2)))``, or with tanh as torch's ``approximate="tanh"``."""
        return self._add(_GELU, x.width, (x,), size=(x.width, int(by_tanh)))

    def count(self, state: int, step: int) -> None:
        """Add a number to whole numbers, int64 ``[B]``."""
        self._add(_COUNT, 0, size=(state, step))

    def selective(
        self,
        u: Value,
        dt: Value,
        B: Value,
        C: Value,
        z: Value,
        A_log: Tensor,  # [D, N]
        D: Tensor | None,  # [D]
        dt_bias: Tensor | None,  # [D]
        state: int,
        *,
        channels: int | None = None,
        first: int = 0,
        into: Value | None = None,
    ) -> Value:
        """Mamba's update: ``S <- exp(-dt exp(A_log)) S + dt u B``, ``y = (S C + D u) silu(z)``.

        ``dt`` is before its bias and softplus; the state is ``[B, D, N]``, or ``[B, channels, N]``,
        of which this updates D from ``first`` on.
        """
        size = (u.width, B.width, state, channels or u.width, first)
        return self._add(_SELECTIVE, u.width, (u, dt, B, C, z), (A_log, D, dt_bias), size, out=into)

    def ssd(
        self,
        x: Value,
        dt: Value,
        B: Value,
        C: Value,
        A_log: Tensor,  # [H]
        D: Tensor | None,  # [H]
        dt_bias: Tensor | None,  # [H]
        groups: int,
        state: int,
        limit: tuple[float, float] = (0.0, math.inf),
    ) -> Value:
        """Mamba2's update: Mamba's with one decay a head, without the gate.

        ``limit`` bounds the steps; the state is ``[B, H, D / H, N]``.
        """
        heads = A_log.numel()
        size = (heads, groups, x.width // heads, B.width // groups, state)
        return self._add(_SSD, x.width, (x, dt, B, C), (A_log, D, dt_bias), size, limit)

    def delta_rule(
        self,
        q: Value,
        k: Value,
        v: Value,
        dt: Value,
        beta: Value,
        A_log: Tensor,  # [H]
        dt_bias: Tensor | None,  # [H] or [H key size]
        groups: int,
        state: int,
        *,
        beta_factor: float = 1.0,
        eps: float = 1e-6,
    ) -> Value:
        """The gated delta rule with q and k of length 1: ``gated_linear_attention`` of one token.

        Decays are ``exp(-exp(A_log) softplus(dt + bias))``, a number a head or (KDA) one a row of
        the state; ``beta`` is before its sigmoid and factor; ``eps`` is added to squared lengths;
        the state is ``[B, H, key size, value size]``.
        """
        heads = A_log.numel()
        keys = q.width // groups
        own = dt.width != heads
        size = (heads, groups, keys, v.width // heads, state, int(own))
        values = (q, k, v, dt, beta)
        return self._add(_DELTA, v.width, values, (A_log, dt_bias), size, (eps, beta_factor))

    def longhorn(
        self,
        u: Value,
        dt: Value,
        k: Value,
        q: Value,
        z: Value | None,
        dt_bias: Tensor | None,  # [D]
        D: Tensor | None,  # [D]
        state: int,
        *,
        exact: bool = False,
    ) -> Value:
        """One token of ``longhorn_scan``: ``S <- S + e k (u - k S)``, ``y = S q + D u``.

        ``e = 1 / (1 / sigmoid(dt + bias) + |k|^2)``; z gates y by ``silu(z)``; the ``exact``
        transition has ``k^T S`` for ``k S``; the state is ``[B, D, N]``.
        """
        size = (u.width, k.width, state, int(exact), int(z is not None))
        return self._add(_LONGHORN, u.width, (u, dt, k, q, z or u), (dt_bias, D), size)

    def feedback(
        self,
        u: Value,
        drive: Value | None,
        lam: Tensor,  # [D, N]
        w: Tensor | None,  # [D, N]
        B: Tensor | None,  # [D, N]
        C: Tensor,  # [D, N]
        w_gamma: Tensor | None,  # [D, N]
        D: Tensor | None,  # [D]
        state: int,
        *,
        sigmoid_to: float = 0.0,
        linear: bool = False,
    ) -> Value:
        """One token of ``feedback_scan`` with coefficients of COFFEE's layer.

        ``S <- S + s (lam S + u)`` with ``s = sigmoid(w S)``, or ``w S`` if ``linear``, or of the
        drive instead of S; ``y = C S + D u``, times ``sigmoid(w_gamma S)``. B multiplies w, C and
        w_gamma. With ``sigmoid_to`` lambda is ``-sigmoid_to sigmoid(lam)``. The state is
        ``[B, D, N]``.
        """
        size = (u.width, lam.shape[1], state, int(linear), int(drive is not None))
        weights = (lam, w, B, C, w_gamma, D)
        return self._add(_FEEDBACK, u.width, (u, drive or u), weights, size, (sigmoid_to,))

    def diagonal(
        self,
        u: Value,
        decay: Tensor,  # [D, N, 2]
        readout: Tensor,  # [C, D, N, 2]
        D: Tensor,  # [C, D]
        state: int,
    ) -> Value:
        """One token of ``diagonal_step``: ``z <- decay z + u``, ``y = Re sum_n readout z + D u``.

        Complex numbers are pairs; the state is ``[B, D, N, 2]``, y ``[B, C D]``. Decay and read-out
        must be of the program's dtype.
        """
        readouts, width, modes, _ = readout.shape
        size = (width, modes, readouts, state)
        weights = (*self._exact(decay, readout), D)
        return self._add(_DIAGONAL, readouts * width, (u,), weights, size)

    def companion(
        self,
        u: Value,
        a: Tensor,  # [n, D]
        b: Tensor,  # [n, D]
        d: Tensor,  # [D]
        ring: int,
        position: int,
    ) -> Value:
        """One token of ``companion_step``, whose states are ``[B, n + 1, D]`` and int64 ``[B]``.

        Coefficients must be of the program's dtype. The position still has to be counted down.
        """
        size = (u.width, len(a), ring, position)
        return self._add(_COMPANION, u.width, (u,), self._exact(a, b, d), size)

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
        """Run the instructions on at most ``MOST_ROWS`` rows.

        Args:
            rows: B.
            tensors: What inputs, outputs and states are; contiguous. Outputs and states change.

        Raises:
            MemoryError: There is none for the values; nothing has changed.
        """
        code = self._code
        if code is None:
            code = self._code = (cpu.Instruction * len(self._list))(*self._list)
        dispatch.record(OP, "cpu")
        given = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
        threads = torch.get_num_threads() if self._work > native.ONE_THREADS_WORK else 1
        failed = cpu.load(self.dtype)(code, len(code), rows, self._width, given, threads)
        if failed:
            raise MemoryError("token_step: no memory for a token's values")

    def _type(self, dtype: torch.dtype) -> int:
        if dtype is not self.dtype and dtype not in HALVES:
            raise ValueError(f"Program: tensors must be {self.dtype} or of 16 bits, got {dtype}")
        return 0 if dtype is self.dtype else HALVES[dtype]

    def _add(
        self,
        kind: int,
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
            matrix_of_int8 = kind == _LINEAR and i == 0 and weight.dtype is torch.int8
            if weight.dtype not in (self.dtype, *halves) and not matrix_of_int8:
                more = " or of 16 bits" if halves else ""
                raise ValueError(f"Program: weights must be {self.dtype}{more}, got {weight.dtype}")
            if not weight.is_contiguous():
                raise ValueError("Program: weights must be contiguous")
            self.weights.append(weight)
            self._work += weight.numel()
            made.data[i].at, made.data[i].type = (
                weight.data_ptr(),
                INT8 if matrix_of_int8 else self._type(weight.dtype),
            )
        made.size[: len(size)] = list(size)
        made.number[: len(numbers)] = list(numbers)
        self._list.append(made)
        return out


__all__ = ["MOST_ROWS", "Program", "Value"]
