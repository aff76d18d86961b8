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
dispatch.c_kernels[OP] = lambda: cpu
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
    _ROTATE,
    _KEEP,
    _ATTEND,
    _INNOVATE,
) = range(21)
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
        z: Value | None,
        A_log: Tensor,  # [D, N]
        D: Tensor | None,  # [D]
        dt_bias: Tensor | None,  # [D]
        state: int,
        *,
        zoh: bool = False,
        channels: int | None = None,
        first: int = 0,
        into: Value | None = None,
    ) -> Value:
        """Mamba's update: ``S <- exp(-dt exp(A_log)) S + dt u B``, ``y = (S C + D u) silu(z)``.

        ``dt`` is before its bias and softplus; with ``zoh`` ``(1 - exp(-dt exp(A_log))) /
        exp(A_log)`` stands for it before ``u B``. The state is ``[B, D, N]``, or ``[B, channels,
        N]``, of which this updates D from ``first`` on.
        """
        whole = channels or u.width
        size = (u.width, B.width, state, whole, first, int(zoh), int(z is not None))
        values = (u, dt, B, C, z or u)
        return self._add(_SELECTIVE, u.width, values, (A_log, D, dt_bias), size, out=into)

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

    def rotate(self, x: Value, head: int, theta: float, seen: int) -> Value:
        """Turn the halves of heads by rotary positions, which are the numbers in ``seen``."""
        return self._add(_ROTATE, x.width, (x,), size=(x.width, head, seen), numbers=(theta,))

    def keep(self, x: Value, ring: int, rows: int, seen: int) -> None:
        """Write x into row ``seen % rows`` of a ring ``[B, rows, width]``."""
        self._add(_KEEP, 0, (x,), size=(x.width, ring, rows, seen))

    def attend(
        self,
        q: Value,
        heads: tuple[int, int],
        ring: tuple[int, int, int],
        memories: Sequence[tuple[int, int, int]],
        seen: int,
        scale: float,
        hidden: int | None = None,
    ) -> Value:
        """One token of ``eidetic_attention``: one softmax over a ring and up to two memories.

        Args:
            q: ``[B, H d]``.
            heads: H and G.
            ring: w, and the numbers of keys and values ``[B, w, G, d]``, of which the token's own
                were kept.
            memories: m, and the same of each memory; it holds the first ``min(m, seen // w w)``.
            seen: The number of the positions, int64 ``[B]``.
            scale: Of the scores.
            hidden: The number of positions of the first memory's rows, int64 ``[B, m]``, which are
                not read while the ring holds them.
        """
        tables = (ring, *memories, (0, 0, 0), (0, 0, 0))[:3]
        rows = [table[0] for table in tables]
        room = self.value(heads[0] * sum(rows))
        size = (*heads, q.width // heads[0], *rows, seen, *(x for t in tables for x in t[1:]))
        self._work += heads[0] * sum(rows) * (q.width // heads[0])
        return self._add(_ATTEND, q.width, (q, room), size=(*size, hidden or 0), numbers=(scale,))

    def innovate(
        self,
        y: Value,
        outputs: tuple[int, int],
        seen: int,
        weights: Tensor | None = None,  # [k]
        scores: tuple[int, int] = (1, 0),
        *,
        relative: bool = False,
    ) -> None:
        """Move a state of the last outputs on by one; with weights, score y by ``innovation``.

        Args:
            y: ``[B, D]``.
            outputs: How many are kept, and their number, ``[B, rows, D]``, the newest last.
            seen: The number of the positions, int64 ``[B]``.
            weights: Of the last k outputs, in the program's dtype.
            scores: w, and the number of the scores ``[B, w]``: row ``seen % w`` is written.
            relative: Divide errors by the output's size.
        """
        span = 0 if weights is None else len(weights)
        size = (y.width, outputs[0], span, outputs[1], scores[1], seen, scores[0], int(relative))
        self._add(_INNOVATE, 0, (y,), (weights,), size)

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
            FloatingPointError: A score of :meth:`innovate` is not finite.
        """
        code = self._code
        if code is None:
            code = self._code = (cpu.Instruction * len(self._list))(*self._list)
        dispatch.record(OP, "cpu")
        given = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
        threads = torch.get_num_threads() if self._work > native.ONE_THREADS_WORK else 1
        failed = cpu.load(self.dtype)(code, len(code), rows, self._width, given, threads)
        if failed == 2:
            raise FloatingPointError("token_step: innovations must be finite")
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
