"""A rational filter as a recurrence: one token, many tokens, and a state's response."""

import importlib
from types import SimpleNamespace

import torch
from torch import Tensor

from ssmzoo_kernels.companion_step import continuation, eager, reference
from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.fft_conv import fft_conv
from ssmzoo_kernels.rational_kernel import (
    check_polynomials,
    check_rows,
    inverse_series,
    rational_kernel,
)
from ssmzoo_kernels.segments import by_length
from ssmzoo_kernels.validation import (
    Packing,
    check_count,
    check_forward_mode,
    check_leading,
    check_tensor,
    segment_offsets,
)

OP = "companion_step"
STEP = Op(  # as kernels have it, each channel with its own coefficients
    OP,
    inputs={
        "u": "B D",
        "ring": "B n+1 D",
        "position": "B int64",
        "a": "n D",
        "b": "n D",
        "d": "D",
    },
    outputs={"y": "B D as ring"},
    writes="ring",
    has_backward=False,
    reference=reference.companion_step,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.companion_step.{name}"),
)

STATE_NODE = Op(  # of u with what the state owes to its first tokens
    "companion_state_node",
    inputs={"u": "B L D", "inverse": "D_a K", "initial_state": "B order D?"},
    outputs={"state": "B order D as exact"},
    options={"order": "int"},
    offers=("reference", "eager"),
    reference=continuation.state_after,
    kernels=lambda _: SimpleNamespace(
        forward=continuation.state_after, backward=continuation.state_after_backward
    ),
)
# a node of exported graphs, whose length an FFT's size would bind
RESPONSE_NODE = Op(
    "companion_response_node",
    inputs={"state": "B n D", "a": "D_a n", "b": "D n", "kernel": "D K"},
    outputs={"y": "B length D as exact"},
    options={"length": "int"},
    offers=("reference", "eager"),
    has_backward=False,
    reference=continuation.response,
    kernels=lambda _: SimpleNamespace(forward=continuation.response),
)


def newest_first(ring: Tensor, position: Tensor) -> Tensor:
    """Return the states in rings of :func:`companion_step`, ``[B, n, D]``, no free place."""
    count = ring.shape[1]
    places = (torch.arange(count - 1, device=ring.device) + position[:, None]) % count  # [B, n]
    return ring.gather(1, places[..., None].expand(-1, -1, ring.shape[2]))


def companion_step(
    u: Tensor,  # [B, D]
    ring: Tensor,  # [B, n + 1, D]
    position: Tensor,  # [B] int64
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
    *,
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode one token: ``y = d u + sum b_i x_i``, ``w = u - sum a_i x_i``, w becomes ``x_1``.

    Both sums take the state before the update. The state of n past values of ``w`` lies in a ring
    of one place more: ``x_i`` of row r is ``ring[r, (position[r] + i - 1) % (n + 1)]``. A step
    writes to the free place, so that ring and position of before still hold the state of before.
    Everything is computed in the ring's dtype; only the output takes u's. Where gradients are asked
    for, torch runs it on the tape. The kernels read coefficients ``[n, D]``: a caller who keeps
    ``a`` (of every channel) and ``b`` so, and passes them transposed, spares a copy a step.

    Args:
        u: The inputs.
        ring: The state, float32 or float64.
        position: Where each row's newest value lies, counted modulo n + 1.
        a: Denominators without their leading 1; ``D_a`` divides D and channel c has row
            ``c // (D / D_a)``.
        b: Numerators of the infinite response, from ``z^-1`` on.
        d: Direct gains.
        inplace: The ring may be written and returned: one value a channel instead of a copy. Never
            done on the tape.
        backend: "auto" goes by device. Naming a backend that cannot run is an error, and so is
            asking "cpu" or "triton" for gradients.

    Returns:
        The outputs ``[B, D]`` in u's dtype, the ring and the positions after the step.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or of a wrong dtype.
        RuntimeError: The named backend cannot run on this machine.
    """
    check_leading(OP, "u", u, "[B, D]")
    check_polynomials(OP, a, b)
    (batch, width), order = u.shape, a.shape[1]
    check_tensor(OP, "b", b, (width, order), u, "[D, n]")
    check_tensor(OP, "d", d, (width,), u, "[D]")
    check_tensor(OP, "ring", ring, (batch, order + 1, width), u, "[B, n + 1, D]")
    if ring.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{OP}: ring must be float32 or float64, got {ring.dtype}")
    _check_position(position, batch, ring)
    chosen = STEP.choose(backend, u, dtype=ring.dtype)
    if chosen == "reference" or torch.compiler.is_exporting():  # whose graphs write to no memory
        return STEP.judge((u, ring, position, a, b, d), {})
    exact = ring.dtype
    drive, d = _in(u, exact), _in(d, exact)
    a, b = _by_state(a, width, exact), _by_state(b, width, exact)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (drive, ring, a, b, d)):
        if backend in ("cpu", "triton"):
            raise ValueError(
                f"{OP}(backend={backend!r}) has no gradients; call it under torch.no_grad(), "
                'or take "auto" or "eager"'
            )
        record(OP, "eager")
        y, ring = eager.step(drive, ring, position, a, b, d)
        return y.to(u.dtype), ring, torch.zeros_like(position)
    if not (inplace and ring.is_contiguous() and _writable(ring)):
        ring = ring.clone(memory_format=torch.contiguous_format)
    y = STEP.run(chosen, (drive, ring, position, a, b, d))
    return _in(y, u.dtype), ring, position - 1


def companion_state(
    u: Tensor,  # [B, L, D]
    a: Tensor,  # [D_a, n]
    initial_state: Tensor | None = None,  # [B, n, D], zeros if absent
    *,
    inverse: Tensor | None = None,  # [D_a, >= L]
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> Tensor:
    """Return the state after all tokens: the last n values of ``w[t] = u[t] - sum a_i w[t-i]``.

    Newest first: with one place more behind, a ring with position 0. By FFT with the series
    ``1 / a``, in O(L log L); in float32, or float64 for float64 inputs. Gradients flow to all
    tensors.

    Args:
        u: The inputs.
        a: Denominators without their leading 1.
        initial_state: The values before the first token, newest first; with ``cu_seqlens`` one row
            per packed sequence, ``[S, n, D]``.
        inverse: ``inverse_series(a, length)``, if the caller has it, as long as the longest
            sequence at least.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        backend: "auto", "eager" or "reference": torch's FFTs serve every device.

    Returns:
        ``[B, n, D]`` (``[S, n, D]``) in float32 or float64.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
    """
    op = "companion_state"
    check_leading(op, "u", u, "[B, L, D]")
    order = _check_denominators(op, a, u, u.shape[2])
    offsets = segment_offsets(op, u, cu_seqlens)
    exact = torch.promote_types(torch.float32, u.dtype)
    if initial_state is not None:
        rule = "[B, n, D]" if cu_seqlens is None else "[S, n, D]"
        shape = (offsets.shape[0] - 1, order, u.shape[2])
        check_tensor(op, "initial_state", initial_state, shape, u, rule)
        initial_state = initial_state.to(exact)
    judged = _judged(op, backend, u)
    u, a = u.to(exact), a.to(exact)
    if initial_state is not None and not judged:
        u = continuation.owing(u, -continuation.by_state(initial_state, a), offsets)
    packed = None if cu_seqlens is None else offsets
    return _state_after(u, a, inverse, initial_state, packed, judged)


def companion_scan(
    u: Tensor,  # [B, L, D]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    d: Tensor,  # [D]
    initial_state: Tensor | None,  # [B, n, D], None for zeros
    *,
    kernel: Tensor,  # [D, >= L]
    inverse: Tensor | None = None,  # [D_a, >= L]
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
) -> tuple[Tensor, Tensor]:
    """Filter many tokens from a state: what as many calls of :func:`companion_step` return.

    ``y = d u + k * (u + p) + q`` with the exact kernel k, where the past owes p to the inputs and q
    to the outputs of the first n tokens (:func:`companion_response`): one convolution of as many
    inputs, with a state or without, and nothing more is kept for the backward. Gradients flow to
    all tensors.

    Args:
        u: The inputs, float32 or float64, as all others.
        a: Denominators without their leading 1.
        b: Numerators of the infinite response, from ``z^-1`` on.
        d: Direct gains.
        initial_state: As of :func:`companion_state`.
        kernel: ``rational_kernel(a, b, length)`` of mode "exact", as long as the longest sequence
            at least.
        inverse: As of :func:`companion_state`.
        cu_seqlens: As of :func:`companion_state`.

    Returns:
        The outputs ``[B, L, D]``, and what :func:`companion_state` returns.

    Raises:
        ValueError: Shapes or devices that do not fit.
        TypeError: Not a tensor, or of a wrong dtype.
    """
    op = "companion_scan"
    check_leading(op, "u", u, "[B, L, D]")
    check_polynomials(op, a, b)
    check_rows(op, "b", b)
    check_tensor(op, "b", b, (u.shape[2], a.shape[1]), u, "[D, n]")
    if u.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: u must be float32 or float64, got {u.dtype}")
    offsets = segment_offsets(op, u, cu_seqlens)
    if initial_state is not None:
        rule = "[B, n, D]" if cu_seqlens is None else "[S, n, D]"
        shape = (offsets.shape[0] - 1, a.shape[1], u.shape[2])
        check_tensor(op, "initial_state", initial_state, shape, u, rule)
    longest = u.shape[1]
    if cu_seqlens is not None:  # a GPU would have to be waited for, and a graph has no numbers
        known = u.is_cpu and not torch.compiler.is_compiling()
        longest = int(offsets.diff().max()) if known else 1
    _check_series(op, "kernel", kernel, (u.shape[2], longest), u, "[D, L]")
    others = {"a": a, "b": b, "d": d, "initial_state": initial_state, "kernel": kernel}
    for name, x in others.items():
        if x is not None and x.dtype != u.dtype:
            raise TypeError(f"{op}: {name} must have u's dtype {u.dtype}, got {x.dtype}")
    packed = None if cu_seqlens is None else offsets
    judged = _judged(op, "auto", u)
    if initial_state is None or judged:
        y, _ = fft_conv(u, kernel, d, cu_seqlens=cu_seqlens)
        if initial_state is not None:
            y = y + companion_response(initial_state, a, b, u.shape[1], cu_seqlens=cu_seqlens)
        return y, _state_after(u, a, inverse, initial_state, packed, judged)
    owed, answer = (continuation.by_state(initial_state, x) for x in (-a, b))
    u = continuation.owing(u, owed, offsets)
    y, _ = fft_conv(u, kernel, d, cu_seqlens=cu_seqlens)
    # the direct gain does not see what is owed
    y = continuation.owing(y, answer - d[:, None] * owed, offsets)
    return y, _state_after(u, a, inverse, initial_state, packed, judged)


def companion_response(
    state: Tensor,  # [B, n, D]
    a: Tensor,  # [D_a, n]
    b: Tensor,  # [D, n]
    length: int,
    *,
    kernel: Tensor | None = None,  # [D, >= length]
    cu_seqlens: Tensor | Packing | None = None,  # [B + 1]
    backend: Backend = "auto",
) -> Tensor:
    """Return a state's contribution to the next outputs: the filter's response to zero input.

    The outputs of a chunk are the convolution of its inputs plus this. The past owes token j
    ``p_j = -sum_{i>j} a_i x_{i-j}`` as an input and ``q_j = sum_{i>j} b_i x_{i-j}`` as an output,
    both for ``j < n`` only, and the response is ``k * p + q`` with the exact kernel k. In the
    state's dtype; gradients flow to all tensors.

    Args:
        state: The last n values of w, newest first.
        a: Denominators without their leading 1.
        b: Numerators of the infinite response, from ``z^-1`` on.
        length: How many outputs; with ``cu_seqlens`` the length of the packed row.
        kernel: ``rational_kernel(a, b, length)`` of mode "exact", if the caller has it, as long
            as the longest sequence at least.
        cu_seqlens: Where packed sequences begin and end, one state each; the result is one row.
        backend: "auto", "eager" or "reference": torch's FFTs serve every device.

    Returns:
        ``[B, length, D]``, or ``[1, length, D]`` with ``cu_seqlens``, in the state's dtype, float32
        at least.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
    """
    op = "companion_response"
    check_leading(op, "state", state, "[B, n, D]")
    check_polynomials(op, a, b)
    check_rows(op, "b", b)
    rows, order, width = state.shape
    check_tensor(op, "b", b, (width, order), state, "[D, n]")
    length = check_count(op, "length", length)
    exact = torch.promote_types(torch.float32, state.dtype)
    judged = _judged(op, backend, state)
    state, a, b = state.to(exact), a.to(exact), b.to(exact)

    groups = None
    longest = length
    if cu_seqlens is not None:
        offsets = segment_offsets(op, state.new_empty(1, length), cu_seqlens)
        if offsets.shape[0] - 1 != rows:
            raise ValueError(
                f"{op}: cu_seqlens must have one sequence per state, {rows + 1} boundaries, "
                f"got {offsets.shape[0]}"
            )
        groups = by_length(offsets)
        longest = max(places.shape[1] for _, places in groups)
    if not judged:
        if kernel is None:
            kernel = rational_kernel(a, b, longest)
        else:
            _check_series(op, "kernel", kernel, (width, longest), state, "[D, L]")
            kernel = kernel.to(exact)

    def answer(some: Tensor, count: int) -> Tensor:
        if kernel is None or judged:
            return reference.companion_response(some, a, b, count)
        return _response(some, a, b, kernel, count)

    if groups is None:
        return answer(state, length)
    row = state.new_zeros(length, width)
    for members, places in groups:
        row = row.index_put((places,), answer(state[members], places.shape[1]))
    return row[None]


def _state_after(
    u: Tensor,
    a: Tensor,
    inverse: Tensor | None,
    initial_state: Tensor | None,
    offsets: Tensor | None,
    judged: bool,
) -> Tensor:
    """Return the state after tokens, of which the first have what the state owes them."""
    order = a.shape[1]
    groups = [(None, u)]
    if offsets is not None:
        groups = [(members, u[0][places]) for members, places in by_length(offsets)]
    longest = max(tokens.shape[1] for _, tokens in groups)
    if inverse is None and not judged:
        inverse = inverse_series(a, longest)
    elif inverse is not None:
        _check_series("companion_state", "inverse", inverse, (a.shape[0], longest), u, "[D_a, L]")
        inverse = inverse.to(u.dtype)

    found = []
    for members, tokens in groups:
        start = initial_state
        if start is not None and members is not None:
            start = start[members]
        if judged:
            zeros = u.new_zeros(tokens.shape[0], order, u.shape[2])
            found.append(reference.companion_state(tokens, a, zeros if start is None else start))
        else:
            found.append(STATE_NODE.run("eager", (tokens, inverse, start), {"order": order}))
    if offsets is None:
        return found[0]
    order_of_rows = torch.cat([members for members, _ in groups if members is not None])
    return torch.cat(found)[order_of_rows.argsort()]


def _response(state: Tensor, a: Tensor, b: Tensor, kernel: Tensor, length: int) -> Tensor:
    if torch.compiler.is_exporting() and a.shape[1]:
        return RESPONSE_NODE.run("eager", (state, a, b, kernel), {"length": length})
    return continuation.response(state, a, b, kernel, length)


def _by_state(coefficients: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return coefficients ``[D_a, n]`` as ``[n, D]``, each channel with its own."""
    if coefficients.shape[0] < width:
        coefficients = coefficients.repeat_interleave(width // coefficients.shape[0], dim=0)
    return _in(coefficients, dtype).T


def _writable(ring: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return True
    return not ring.is_inference()


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    # torch takes its time to find that there is nothing to do
    return x if x.dtype is dtype else x.to(dtype)


def _check_position(position: Tensor, batch: int, ring: Tensor) -> None:
    if not isinstance(position, Tensor) or position.dtype is not torch.int64:
        kind = position.dtype if isinstance(position, Tensor) else type(position).__name__
        raise TypeError(f"{OP}: position must be an int64 tensor [B], got {kind}")
    if position.shape != (batch,):
        raise ValueError(
            f"{OP}: position must have shape [B] = [{batch}], got {list(position.shape)}"
        )
    if position.device != ring.device:
        raise ValueError(f"{OP}: position must be on {ring.device}, got {position.device}")


def _check_denominators(op: str, a: Tensor, u: Tensor, width: int) -> int:
    check_leading(op, "a", a, "[D_a, n]")
    check_tensor(op, "a", a, (a.shape[0], a.shape[1]), u, "[D_a, n]")
    if a.shape[0] < 1 or width % a.shape[0]:
        raise ValueError(
            f"{op}: the {a.shape[0]} rows of a must divide the {width} channels of u: "
            "each denominator serves equally many"
        )
    return a.shape[1]


def _check_series(
    op: str, name: str, series: Tensor, least: tuple[int, int], like: Tensor, rule: str
) -> None:
    """Fail unless a cached series has its rows and at least its length."""
    check_leading(op, name, series, rule)
    length = max(least[1], series.shape[1])
    check_tensor(op, name, series, (least[0], length), like, f"{rule} or longer")


def _judged(op: str, backend: Backend, like: Tensor) -> bool:
    """Tell whether the loop of the reference is asked for, and note what runs."""
    chosen = choose(op, backend, like.device.type, ("reference", "eager"), (like.dtype,))
    check_forward_mode(op, chosen)
    record(op, chosen)
    return chosen == "reference"


__all__ = ["companion_response", "companion_scan", "companion_state", "companion_step"]
