"""One token of a diagonal state space with complex modes: how such models decode."""

import importlib

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import Op
from ssmzoo_kernels.diagonal_step import reference
from ssmzoo_kernels.dispatch import ALL, Backend, record

OP = "diagonal_step"
STEP = Op(
    OP,
    inputs={
        "u": "B H",
        "state": "B H N complex",
        "decay": "H N complex",
        "drive": "H N complex?",
        "readout": "H N complex",
        "D": "H?",
    },
    outputs={"y": "B H", "new_state": "B H N as state"},
    has_backward=False,
    reference=reference.diagonal_step,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.diagonal_step.{name}"),
)


def diagonal_step(
    u: Tensor,  # [B, H]
    state: Tensor,  # [B, H, N]
    decay: Tensor,  # [H, N]
    drive: Tensor | None,  # [H, N], ones if absent
    readout: Tensor,  # [H, N]
    D: Tensor | None = None,  # [H]
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Advance every mode by one token and read the heads.

    ``z' = decay z + drive u`` and ``y = Re sum_n readout z' + D u``: no factor 2, no conjugate
    partner. Computed in the state's precision; only y takes u's dtype.

    Args:
        u: The inputs.
        state: The modes ``z``, complex64 or complex128.
        decay: The factor of a mode, ``e^{c}``.
        drive: How the input enters a mode; without it, as it is, which saves a third of the
            reading (``readout`` can hold the factor).
        readout: The modes' weights in the output.
        D: Direct term.
        backend: "auto" goes by device, and to torch where gradients are wanted: the kernels have no
            backward. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, H]`` in u's dtype, and the new state ``[B, H, N]``.

    Raises:
        ValueError: Shapes, devices or choices that do not fit, or gradients from a kernel.
        TypeError: Not a tensor, or of the wrong kind.
        RuntimeError: The named backend cannot run on this machine.
    """
    inputs = (u, state, decay, drive, readout, D)
    STEP.check(inputs)
    taped = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    offers = ("reference", "eager") if taped else ALL
    if taped and backend in ("cpu", "triton"):
        raise ValueError(
            f'{OP}(backend="{backend}") has no gradients, and an argument wants them; '
            'call it under torch.no_grad(), or use backend="auto" or "reference"'
        )
    chosen = STEP.choose(backend, u, dtype=state.dtype, offers=offers)
    if chosen == "eager":  # one line of torch is both
        record(OP, chosen)
        return reference.diagonal_step(*inputs)
    return STEP.judge(inputs, {}) if chosen == "reference" else STEP.run(chosen, inputs)


__all__ = ["diagonal_step"]
