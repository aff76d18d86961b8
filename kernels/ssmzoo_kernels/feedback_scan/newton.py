"""Newton's method for COFFEE's recurrence: all tokens of a span at once, iterated.

Every scalar lane ``(sequence, i, j)`` is a nonlinear recurrence of its own, so the Jacobian is
diagonal and the quasi-Newton step, which keeps only the diagonal, is the exact one. A step is a
linear recurrence (``linear_scan``). Spans of ``SPAN`` tokens follow one another with the state
carried over, so memory does not grow with the length; lanes that have converged drop out.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.feedback_scan.inputs import Inputs, Stop
from ssmzoo_kernels.linear_scan import linear_scan
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.segments import by_length
from ssmzoo_kernels.validation import check_leading, check_tensor

Guess = Literal["half", "zeros"]

SPAN = 64  # tokens that are solved for at once
LIMIT = 1e15  # iterates stay within it: far from the solution Newton overshoots


class NotConverged(Exception):
    """The cap on iterations was reached; says where."""


def not_converged(
    failed: int, lanes: int, tolerance: float, iterations: int, token: int, residual: float
) -> NotConverged:
    """Return the exception that says how many lanes failed, first in the span from a token on."""
    return NotConverged(
        f"Newton's method left {failed} of {lanes} lanes above the tolerance {tolerance:g} after "
        f"{iterations} iterations, in the span from token {token} "
        f"(largest relative residual {residual:.1e})"
    )


class Newton(NamedTuple):
    """The result of ``newton_solve``.

    Attributes:
        states: All states ``[B, L, D, N]``.
        iterations: Newton steps that each lane took in each span, ``[spans, B, D, N]``.
        residuals: Relative residual of each lane before its first step and after every one,
            ``[spans, steps + 1, B, D, N]``; a lane that has converged keeps its last.
        converged: Which lanes reached the tolerance, ``[spans, B, D, N]``.
    """

    states: Tensor
    iterations: Tensor
    residuals: Tensor
    converged: Tensor


def forward(
    inputs: Inputs, offsets: Tensor, save: bool, chunk: int, stop: Stop
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the ``forward`` of a backend with this ``CHUNK``.

    Raises:
        NotConverged: Some lane has not reached the tolerance after ``max_iterations`` steps.
    """
    exact = accumulator(inputs.u)
    values, rate, weight, readout = (x.to(exact) for x in inputs[:4])
    filtering, skip, driven = (None if x is None else x.to(exact) for x in inputs[4:7])
    (tokens, width), states, segments = values.shape, rate.shape[1], offsets.shape[0] - 1
    read = values.new_empty(tokens, width)
    final_state = values.new_empty(segments, width, states)
    between = interval(states, chunk)
    slots = chunk_slots(tokens, segments, between) if save else 0
    saved = values.new_zeros(slots, states, width)
    for members, places in _groups(offsets, states):
        state = values.new_zeros(len(members), width, states)
        if inputs.initial_state is not None:
            state = inputs.initial_state[members].to(exact)
        for start in range(0, places.shape[1], SPAN):
            span = places[:, start : start + SPAN]
            gate_inputs = None if driven is None else driven[span]
            lanes = _Lanes(values[span], rate, weight, gate_inputs, state)
            solution = lanes.solve(stop)
            failed = int((~solution.converged).sum())
            if failed:
                steps, residual = (
                    int(solution.iterations.max()),
                    float(solution.residuals[-1].max()),
                )
                told = (stop.tolerance, steps, start, residual)
                raise not_converged(failed, final_state.numel(), *told)
            history = solution.states.unflatten(1, state.shape).transpose(0, 1)  # [G, Q, D, N]
            for offset in range(-start % between, span.shape[1], between) if save else ():
                place = offsets[members] // between + members + (start + offset) // between
                before = history[:, offset - 1] if offset else state
                saved[place] = before.transpose(1, 2)
            reading = (history * readout).sum(dim=-1)
            if filtering is not None:
                reading *= (history * filtering).sum(dim=-1).sigmoid()
            read[span] = reading
            state = history[:, -1]
        final_state[members] = state
    out = read if skip is None else read + skip * values
    return out.to(inputs.u.dtype), final_state, saved


def default_tolerance(u: Tensor) -> float:
    """Return the relative residual that the accumulator's rounding allows for inputs like these."""
    return {torch.float32: 1e-6, torch.float64: 1e-14}[accumulator(u)]


def check_options(
    op: str, tolerance: float | None, max_iterations: int | None, damping: float
) -> None:
    """Fail unless the solver can work with these."""
    for name, value in (("tolerance", tolerance), ("damping", damping)):
        if not isinstance(value, int | float) and not (value is None and name == "tolerance"):
            raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise ValueError(f"{op}: tolerance must be positive and finite, got {tolerance!r}")
    whole = isinstance(max_iterations, int) and not isinstance(max_iterations, bool)
    if max_iterations is not None and not (whole and max_iterations >= 1):
        raise ValueError(
            f"{op}: max_iterations must be a whole number of at least 1 or None, "
            f"got {max_iterations!r}"
        )
    if not 0 <= damping < 1:
        raise ValueError(f"{op}: damping must be in [0, 1), got {damping!r}")


@torch.no_grad()
def newton_solve(
    u: Tensor,  # [B, L, D]
    lam: Tensor,  # [D, N]
    w: Tensor,  # [D, N]
    drive: Tensor | None = None,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D, N]
    *,
    span: int | None = SPAN,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    damping: float = 0.0,
    guess: Guess = "half",
) -> Newton:
    """Solve for the states of ``feedback_scan`` by Newton's method, and tell how it went.

    To study convergence, not to run models: it keeps all states. Residuals are
    ``max_t |x[t] - f(x[t-1])| / max(1, |x[t]|)`` of a span and a lane.

    Args:
        u: Inputs.
        lam: Rates of the states.
        w: Weights of the gates.
        drive: The gates' input, in place of the state.
        initial_state: State to continue from.
        span: Tokens that are solved for at once; None for all.
        tolerance: Relative residual at which a lane has converged; None for
            :func:`default_tolerance`.
        max_iterations: Steps after which it is given up; None for twice the tokens of a span, which
            suffice. It then hands on the state that it has.
        damping: Jacobians are scaled by ``1 - damping`` in the step, which keeps the solution.
        guess: ``"half"`` starts from the recurrence with all gates half open, ``"zeros"`` from 0.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
    """
    op = "newton_solve"
    check_leading(op, "u", u, "[B, L, D]")
    check_leading(op, "lam", lam, "[D, N]")
    (batch, length, width), states = u.shape, lam.shape[1]
    if not length or not states:
        raise ValueError(f"{op}: there must be a token and a state, got L = {length}, N = {states}")
    for name, tensor in (("lam", lam), ("w", w)):
        check_tensor(op, name, tensor, (width, states), u, "[D, N]")
    if drive is not None:
        check_tensor(op, "drive", drive, (batch, length, width), u, "[B, L, D]")
    if initial_state is not None:
        check_tensor(op, "initial_state", initial_state, (batch, width, states), u, "[B, D, N]")
    if span is not None and not (isinstance(span, int) and span >= 1):
        raise ValueError(f"{op}: span must be a whole number of at least 1 or None, got {span!r}")
    if guess not in get_args(Guess):
        raise ValueError(f"{op}: guess must be 'half' or 'zeros', got {guess!r}")
    tolerance = default_tolerance(u) if tolerance is None else tolerance
    check_options(op, tolerance, max_iterations, damping)
    stop = Stop(tolerance, max_iterations, damping)
    exact = accumulator(u)
    state = u.new_zeros(batch, width, states, dtype=exact)
    if initial_state is not None:
        state = initial_state.to(exact)
    found = []
    for start in range(0, length, span or length):
        piece = slice(start, start + (span or length))
        gate_inputs = None if drive is None else drive[:, piece].to(exact)
        lanes = _Lanes(u[:, piece].to(exact), lam.to(exact), w.to(exact), gate_inputs, state)
        solution = lanes.solve(stop, guess, trace=True)
        found.append(solution)
        state = solution.states[-1].view(batch, width, states)
    steps = max(len(x.residuals) for x in found)
    shape = (batch, width, states)
    residuals = [
        torch.stack(x.residuals + x.residuals[-1:] * (steps - len(x.residuals))) for x in found
    ]
    return Newton(
        torch.cat([x.states for x in found]).unflatten(1, shape).transpose(0, 1),
        torch.stack([x.iterations for x in found]).unflatten(1, shape),
        torch.stack(residuals).unflatten(2, shape),
        torch.stack([x.converged for x in found]).unflatten(1, shape),
    )


class _Solution(NamedTuple):
    states: Tensor  # [Q, M]
    iterations: Tensor  # [M]
    residuals: list[Tensor]  # of [M]; only the last without a trace
    converged: Tensor  # [M]


class _Lanes:
    """The lanes of a span side by side: ``M = G * D * N`` recurrences of ``Q`` tokens."""

    def __init__(
        self,
        u: Tensor,  # [G, Q, D]
        lam: Tensor,  # [D, N]
        w: Tensor,  # [D, N]
        drive: Tensor | None,  # [G, Q, D]
        state: Tensor,  # [G, D, N]
    ) -> None:
        self.start = state.reshape(-1)

        def lanes(x: Tensor) -> Tensor:
            return x.transpose(0, 1).unsqueeze(-1).expand(-1, *state.shape).flatten(1)

        self.u = lanes(u)
        self.lam, self.w = (x.expand_as(state).reshape(-1) for x in (lam, w))
        self.gates = None if drive is None else torch.sigmoid(self.w * lanes(drive))

    def keep(self, these: Tensor) -> None:
        """Drop all other lanes."""
        self.start, self.lam, self.w = (x[these] for x in (self.start, self.lam, self.w))
        self.u = self.u[:, these]
        self.gates = None if self.gates is None else self.gates[:, these]

    def guess(self, kind: Guess) -> Tensor:
        """Return the trajectory to start from."""
        if kind == "zeros":
            return torch.zeros_like(self.u)
        decay = (1 + self.lam / 2).expand_as(self.u)
        found = linear_scan(decay[None], self.u[None] / 2, self.start[None])[0][0]
        return found.nan_to_num_(0.0).clamp_(-LIMIT, LIMIT)

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Jacobian at a trajectory, and the trajectory minus its image."""
        before = torch.cat([self.start[None], x[:-1]])
        gate = torch.sigmoid(self.w * before) if self.gates is None else self.gates
        moved = self.lam * before + self.u
        jacobian = 1 + self.lam * gate
        if self.gates is None:
            jacobian += self.w * (gate * (1 - gate) * moved)
        return jacobian, x - (before + gate * moved)

    def solve(self, stop: Stop, guess: Guess = "half", trace: bool = False) -> _Solution:
        """Iterate until every lane has converged or the cap is reached."""
        x, (tolerance, max_iterations, damping) = self.guess(guess), stop
        cap = 2 * len(x) if max_iterations is None else max_iterations
        lanes = torch.arange(x.shape[1], device=x.device)  # those still at work
        states, iterations = torch.empty_like(x), torch.zeros_like(lanes)
        relative = torch.full_like(self.start, torch.inf)
        residuals = []
        for count in range(cap + 1):
            jacobian, residual = self.step(x)
            error = (residual.abs() / x.abs().clamp(min=1)).amax(dim=0)
            relative[lanes] = error
            if trace:
                residuals.append(relative.clone())
            open_ = ~(error <= tolerance)  # so that nan is open
            left = int(open_.sum())
            if left < len(lanes) or count == cap:
                states[:, lanes] = x
            if not left or count == cap:
                break
            iterations[lanes[open_]] += 1
            # to leave lanes out costs about as much as a step of those that stay
            if left <= len(lanes) // 2:
                x, jacobian, residual = x[:, open_], jacobian[:, open_], residual[:, open_]
                self.keep(open_)
                lanes, open_ = lanes[open_], None
            if damping:
                jacobian *= 1 - damping
            change = linear_scan(jacobian[None], -residual[None])[0][0]
            change = change.nan_to_num_(0.0, LIMIT, -LIMIT)
            if open_ is not None and left < len(lanes):
                change *= open_
            x = (x + change).clamp_(-LIMIT, LIMIT)
        return _Solution(states, iterations, residuals or [relative], relative <= tolerance)


def _groups(offsets: Tensor, states: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments of one length and their tokens, so few that a span's states stay small."""
    tokens = int(offsets[-1])
    for members, places in by_length(offsets):
        held = max(1, min(places.shape[1], SPAN)) * states
        count = max(4, tokens // held)
        yield from zip(members.split(count), places.split(count), strict=True)
