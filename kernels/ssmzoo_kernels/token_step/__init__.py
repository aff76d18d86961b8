"""One token of a layer in a single call, for decoding on a CPU.

A step of decoding does little arithmetic: its time goes into reading the weights once, and into the
calls around that. Here a layer's token is a list of instructions, which a program holds and C runs.
A program reads weights, so it belongs inside the layer that owns them, and only where nothing wraps
that layer.

Dimensions: B rows (sequences), D, I, O widths, K taps, N states a channel, H heads, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ssmzoo_kernels.token_step.writer import Code, Value, Writer, run_programs


class Program(Writer):
    """A layer's token as a list of instructions, written by calling the methods below in order.

    ``tensor`` numbers are places in the list that :meth:`run` is given. Weights must be contiguous
    and of the program's dtype, or beside float32 of bfloat16 or float16.

    Args:
        dtype: That of values and recurrent states, float32 or float64.

    Raises:
        ValueError: A weight that the kernel cannot read.
    """

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
        return self._add(Code.SELECTIVE, u.width, values, (A_log, D, dt_bias), size, out=into)

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
        return self._add(Code.SSD, x.width, (x, dt, B, C), (A_log, D, dt_bias), size, limit)

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
        return self._add(Code.DELTA, v.width, values, (A_log, dt_bias), size, (eps, beta_factor))

    def linear_attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        decay: Value | Tensor | None,
        state: int,
        *,
        heads: int,
        groups: int | None = None,
        erase: tuple[Value, Value] | None = None,
        scale: float = 1.0,
    ) -> Value:
        """``S <- w S + b (a^T S) + k v^T``, ``y = scale S^T q``: one token of linear attention.

        Args:
            q: ``[B, G K]``.
            k: ``[B, G K]``.
            v: ``[B, H V]``.
            decay: w, a number a head or one a row of the state, a value or a weight of the
                program's dtype; None: 1.
            state: The number of S, ``[B, H, K, V]``.
            heads: H.
            groups: G, the heads of queries and keys; None: H.
            erase: a and b, ``[B, H K]`` each (``generalized_delta_rule``).
            scale: Of the output.
        """
        groups = groups or heads
        weights = self._exact(decay) if isinstance(decay, Tensor) else ()
        value = decay if isinstance(decay, Value) else q
        decays = weights[0].numel() if weights else value.width if decay is value else 0
        keys, values = q.width // groups, v.width // heads
        size = (heads, groups, keys, values, state, decays // heads, int(bool(erase)))
        inputs = (q, k, v, value, *(erase or (q, q)))
        return self._add(Code.ATTENTION, v.width, inputs, weights, size, (scale,))

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
        return self._add(Code.LONGHORN, u.width, (u, dt, k, q, z or u), (dt_bias, D), size)

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
        return self._add(Code.FEEDBACK, u.width, (u, drive or u), weights, size, (sigmoid_to,))

    def diagonal(
        self,
        u: Value,
        decay: Tensor,  # [D, N, 2]
        readout: Tensor,  # [C, D, N, 2]
        D: Tensor,  # [C, D]
        state: int,
        *,
        drive: Tensor | None = None,  # [D, N, 2]
        feedback: tuple[Tensor, Tensor] | None = None,  # [D, N, 2] each
    ) -> Value:
        """One token of ``diagonal_step``.

        ``z <- decay z + drive u``, ``y = Re sum_n readout z + D u``; with ``feedback``, p and f,
        ``z <- decay z + drive u - f Re sum_n p z``. Complex numbers are pairs; the state is
        ``[B, D, N, 2]``, y ``[B, C D]``. All but D must be of the program's dtype.
        """
        readouts, width, modes, _ = readout.shape
        size = (width, modes, readouts, state)
        tables = self._exact(decay, readout, *([] if drive is None else [drive]), *(feedback or ()))
        weights = (*tables[:2], D, drive, *(feedback or ()))
        return self._add(Code.DIAGONAL, readouts * width, (u,), weights, size)

    def products(
        self,
        q: Value,
        k: Value,
        v: Value,
        decay: Tensor,  # [H, N, 2]
        readout: Tensor,  # [H, N, 2]
        D: Tensor,  # [H]
        state: int,
    ) -> Value:
        """``diagonal`` of each product of a head's keys and values, times its queries: H3's.

        The state is ``[B, d, d, H, N, 2]``; y is ``[B, d H]``, the heads of a column neighbours.
        Decay and read-out must be of the program's dtype.
        """
        heads, modes, _ = decay.shape
        size = (heads, q.width // heads, modes, state)
        weights = (*self._exact(decay, readout), D)
        return self._add(Code.PRODUCTS, q.width, (q, k, v), weights, size)

    def poles(self, x: Value, pole: Tensor, state: int) -> Value:
        """``z <- pole z + x``, complex numbers as pairs ``[N, 2]``; y is z, ``[B, 2 N]``.

        The pole must be of the program's dtype.
        """
        size = (len(pole), state)
        return self._add(Code.POLES, x.width, (x,), self._exact(pole), size)

    def angles(self, x: Value, dt: Value, state: int) -> Value:
        """Let Mamba-3's angles grow by ``pi tanh(x) dt``; return cosines and sines ``[B, 2 H S]``.

        x is ``[B, S]``, dt ``[B, H]``; the state is ``[B, H S]``, less than a turn.
        """
        width = dt.width * x.width
        size = (dt.width, x.width, state)
        return self._add(Code.ANGLES, 2 * width, (x, dt), size=size)

    def turn(self, x: Value, bias: Tensor, turns: Value, groups: int) -> Value:
        """Give each head of ``[B, G N]`` its bias ``[H, N]``; turn its first pairs of neighbours.

        ``turns`` are what :meth:`angles` gives; y is ``[B, H N]``.
        """
        heads, width = bias.shape
        size = (heads, groups, width, turns.width // (2 * heads))
        return self._add(Code.TURN, heads * width, (x, turns), (bias,), size)

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
        return self._add(Code.COMPANION, u.width, (u,), self._exact(a, b, d), size)

    def rotate(self, x: Value, head: int, theta: float, seen: int) -> Value:
        """Turn the halves of heads by rotary positions, which are the numbers in ``seen``."""
        return self._add(Code.ROTATE, x.width, (x,), size=(x.width, head, seen), numbers=(theta,))

    def keep(self, x: Value, ring: int, rows: int, seen: int) -> None:
        """Write x into row ``seen % rows`` of a ring ``[B, rows, width]``."""
        self._add(Code.KEEP, 0, (x,), size=(x.width, ring, rows, seen))

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
        self.work += heads[0] * sum(rows) * (q.width // heads[0])
        return self._add(
            Code.ATTEND, q.width, (q, room), size=(*size, hidden or 0), numbers=(scale,)
        )

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
        self._add(Code.INNOVATE, 0, (y,), (weights,), size)


__all__ = ["Program", "Value", "run_programs"]
