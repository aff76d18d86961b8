"""COFFEE's scan: every state component opens its own input gate."""

import importlib
import logging
import math
from types import ModuleType
from typing import Any, Literal, get_args

from torch import Tensor

from ssmzoo_kernels.declaration import Choice, Op, watched
from ssmzoo_kernels.dispatch import Backend, is_traced, record
from ssmzoo_kernels.feedback_scan import reference, vmap
from ssmzoo_kernels.feedback_scan.inputs import Gradients, Inputs, Stop
from ssmzoo_kernels.feedback_scan.newton import (
    Newton,
    NotConverged,
    check_options,
    default_tolerance,
    newton_solve,
)
from ssmzoo_kernels.feedback_scan.reference import Gate
from ssmzoo_kernels.scan import saved_states
from ssmzoo_kernels.validation import Packing

OP = "feedback_scan"
SOLVER = "feedback_scan solver"  # the solver's name for ``last_backend``

Solver = Literal["march", "newton", "auto"]

_log = logging.getLogger("ssmzoo")


class _Kernels:
    """A backend's march and Newton's method, which may give up.

    Both save the same states, so that one backward serves both and no iteration is ever
    differentiated.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.CHUNK = module.CHUNK

    def load(self, *kernel: Any) -> Any:
        return self.module.load(*kernel)

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, offsets, save, solver, tolerance, max_iterations, damping = arguments
        inputs = Inputs(*tensors)
        if solver == "newton":
            tolerance = default_tolerance(inputs.u) if tolerance is None else tolerance
            stop = Stop(tolerance, max_iterations, damping)
            try:
                found = self.module.newton(inputs, offsets, save, stop)
            except NotConverged as reason:
                _log.warning("%s: %s; this call marches instead", OP, reason)
            else:
                record(SOLVER, "newton")
                return found
        record(SOLVER, "march")
        return self.module.forward(inputs, offsets, save)

    def backward(
        self, grad_out: Tensor | None, grad_final: Tensor | None, *arguments: Any
    ) -> Gradients:
        *tensors, offsets, saved = arguments[:-4]
        return self.module.backward(grad_out, grad_final, Inputs(*tensors), offsets, saved)


def _reference(*tensors: Any, gate: Gate, solver: str, **_: Any) -> Any:
    if solver == "newton":
        raise ValueError(
            f'{OP}: the reference only marches, got solver="newton"; '
            'use solver="auto", or gate="sigmoid" with another backend'
        )
    record(SOLVER, "march")
    return reference.feedback_scan(*tensors, gate=gate)


SCAN = Op(
    OP,
    inputs={
        "u": "B L D",
        "lam": "D N",
        "w": "D N",
        "C": "D N",
        "w_gamma": "D N?",
        "D": "D?",
        "drive": "B L D?",
        "initial_state": "S D N?",
    },
    outputs={"out": "B L D", "final_state": "S D N as exact"},
    options={
        "gate": Choice("sigmoid", reference=("linear",)),
        "solver": "str",
        "tolerance": "float?",
        "max_iterations": "int?",
        "damping": "float",
    },
    packing="flat",
    least={"lam": "state column"},
    saved=saved_states,
    reference=_reference,
    kernels=lambda name: _Kernels(importlib.import_module(f"ssmzoo_kernels.feedback_scan.{name}")),
)
vmap.register(SCAN)


def feedback_scan(
    u: Tensor,  # [B, L, D]
    lam: Tensor,  # [D, N]
    w: Tensor,  # [D, N]
    C: Tensor,  # [D, N]
    w_gamma: Tensor | None = None,  # [D, N]
    D: Tensor | None = None,  # [D]
    drive: Tensor | None = None,  # [B, L, D]
    initial_state: Tensor | None = None,  # [B, D, N], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    gate: Gate = "sigmoid",
    solver: Solver = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    damping: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run COFFEE's recurrence, in which every state gates its own update by a sigmoid of itself.

    Per channel ``i`` and state ``j``, from the state before the token::

        s[t,i,j] = sigmoid(w[i,j] x[t-1,i,j])
        x[t,i,j] = x[t-1,i,j] + s[t,i,j] (lam[i,j] x[t-1,i,j] + u[t,i])
        y[t,i]   = sum_j C[i,j] x[t,i,j] + D[i] u[t,i]

    With ``drive`` the gate is ``s = sigmoid(w[i,j] drive[t,i])``, without feedback. With
    ``w_gamma`` the sum over j is multiplied by ``sigmoid(sum_j w_gamma[i,j]
    x[t,i,j])``. Everything inside is float32 (float64 for float64 inputs); only the output takes
    u's dtype. Any finite ``lam`` is allowed; in [-2, 0] the states stay bounded. ``torch.vmap``
    maps over all but ``cu_seqlens``.

    Args:
        u: Inputs, each shared by a channel's states.
        lam: Rates towards (negative) or away from 0.
        w: Weights of the gates.
        C: Readout.
        w_gamma: Output filter.
        D: Skip connection from input to output.
        drive: The gates' input, in place of the state.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, D, N]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        gate: ``"linear"`` drops the sigmoid; only the reference knows it, and ``backend="auto"``
            goes there.
        solver: ``"march"`` goes token by token; ``"newton"`` solves for many tokens at once, and
            marches instead, with a line in the log, if it does not converge. ``"auto"`` marches.
            The gradients are the same.
        tolerance: Newton's relative residual, ``|x[t] - f(x[t-1])| / max(1, |x[t]|)``. None is
            1e-6 where states are float32 and 1e-14 where they are float64.
        max_iterations: Newton's cap; None for twice the tokens of a span, which suffice.
        damping: Newton's Jacobians are scaled by ``1 - damping``, which keeps the solution.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` in u's dtype, and the final state ``[B, D, N]`` (``[S, D, N]``) in
        float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit; on a CPU also values that are not
            finite.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The named backend cannot run on this machine.
    """
    if solver not in get_args(Solver):
        raise ValueError(
            f"{OP}: solver must be one of {', '.join(get_args(Solver))}, got {solver!r}"
        )
    check_options(OP, tolerance, max_iterations, damping)
    out, final_state = SCAN(
        *(u, lam, w, C, w_gamma, D, drive, initial_state),
        cu_seqlens=cu_seqlens,
        backend=backend,
        gate=gate,
        solver="march" if solver == "auto" else solver,
        tolerance=tolerance,
        max_iterations=max_iterations,
        damping=damping,
    )
    if type(u) is Tensor and u.is_cpu and not (is_traced() or watched()):
        inputs = {"lam": lam, "w": w, "C": C, "w_gamma": w_gamma, "D": D}
        inputs |= {"u": u, "drive": drive, "initial_state": initial_state}
        _check_values(inputs, final_state)
    return out, final_state


def _check_values(inputs: dict[str, Tensor | None], final_state: Tensor) -> None:
    """Fail if an input holds a value that is not finite, and name where.

    What enters the recurrence, however early, shows in the final state, which is small; readout and
    weights are small themselves. A gate saturates, so that it lets no infinity through to the
    state: its drive alone is long and looked at. A state that overflowed from finite inputs is no
    error.
    """
    at_once = [final_state, *map(inputs.get, ("w", "C", "w_gamma", "D", "drive"))]
    for x in at_once:
        if x is not None and not math.isfinite(x.detach().sum().item()):
            break
    else:
        return
    axes = {3: ("batch row", "token", "feature"), 2: ("feature", "state"), 1: ("feature",)}
    for name, x in inputs.items():
        if x is None or bool(x.isfinite().all()):
            continue
        place = (~x.isfinite()).nonzero()[0].tolist()
        names = ("sequence", "feature", "state") if name == "initial_state" else axes[x.dim()]
        where = ", ".join(f"{axis} {i}" for axis, i in zip(names, place, strict=True))
        raise ValueError(f"{OP}: {name} must be finite, got {x[tuple(place)].item()} at {where}")


__all__ = ["Newton", "feedback_scan", "newton_solve"]
