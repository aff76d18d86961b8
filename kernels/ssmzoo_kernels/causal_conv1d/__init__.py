"""The short depthwise causal convolution that opens a Mamba-style mixer."""

import importlib

from torch import Tensor

from ssmzoo_kernels.causal_conv1d import reference
from ssmzoo_kernels.causal_conv1d.reference import Activation
from ssmzoo_kernels.declaration import Choice, Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.validation import Packing

CONV = Op(
    "causal_conv1d",
    inputs={"x": "B L D", "weight": "D K", "bias": "D?", "initial_state": "S K-1 D?"},
    outputs={"y": "B L D", "final_state": "S K-1 D"},
    options={"activation": Choice("silu", None)},
    packing="flat",
    least={"weight": "tap"},
    reference=reference.causal_conv1d,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.causal_conv1d.{name}"),
)


def causal_conv1d(
    x: Tensor,  # [B, L, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, K - 1, D], zeros if absent
    *,
    activation: Activation | None = None,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own K taps, looking back only.

    ``y[t,i] = act(bias[i] + sum_j weight[i,j] x[t - K + 1 + j, i])``: the last tap meets the
    current token. Sums are float32 (float64 for float64 inputs); only the output takes x's dtype.

    Args:
        x: The inputs.
        weight: One filter per channel.
        bias: Added before the activation.
        initial_state: The K - 1 inputs before the first one, oldest first; with ``cu_seqlens`` one
            row per packed sequence, ``[S, K - 1, D]``.
        activation: ``"silu"`` or none.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` and the last K - 1 inputs ``[B, K - 1, D]`` (``[S, K - 1, D]``),
        both in x's dtype. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The named backend cannot run on this machine.
    """
    inputs = (x, weight, bias, initial_state)
    return CONV(*inputs, cu_seqlens=cu_seqlens, backend=backend, activation=activation)


__all__ = ["causal_conv1d"]
