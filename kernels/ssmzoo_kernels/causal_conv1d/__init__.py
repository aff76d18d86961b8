"""The short depthwise causal convolution that opens a Mamba-style mixer."""

from torch import Tensor

from ssmzoo_kernels.causal_conv1d import library, reference
from ssmzoo_kernels.causal_conv1d.reference import Activation
from ssmzoo_kernels.dispatch import Backend, choose, record
from ssmzoo_kernels.validation import check_leading, check_tensor, segment_offsets

OP = "causal_conv1d"


def causal_conv1d(
    x: Tensor,  # [B, L, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, K - 1, D], zeros if absent
    *,
    activation: Activation | None = None,
    cu_seqlens: Tensor | None = None,  # [S + 1]
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
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, D]`` and the last K - 1 inputs ``[B, K - 1, D]`` (``[S, K - 1, D]``),
        both in x's dtype. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point.
        RuntimeError: The machine lacks what the named backend needs.
    """
    check_leading(OP, "x", x, "[B, L, D]")
    check_leading(OP, "weight", weight, "[D, K]")
    batch, length, width = x.shape
    taps = weight.shape[1]
    if taps < 1:
        raise ValueError(f"{OP}: weight must have at least one tap, got {list(weight.shape)}")
    check_tensor(OP, "weight", weight, (width, taps), x, "[D, K]")
    if bias is not None:
        check_tensor(OP, "bias", bias, (width,), x, "[D]")
    offsets = segment_offsets(OP, x, cu_seqlens)
    if initial_state is not None:
        shape = (offsets.numel() - 1, taps - 1, width)
        rule = "[B, K - 1, D]" if cu_seqlens is None else "[S, K - 1, D]"
        check_tensor(OP, "initial_state", initial_state, shape, x, rule)
    if activation not in (None, "silu"):
        raise ValueError(f"{OP}: activation must be 'silu' or None, got {activation!r}")

    chosen = choose(OP, backend, x)
    if chosen == "reference":
        record(OP, "reference")
        return reference.causal_conv1d(
            x, weight, bias, initial_state, activation=activation, cu_seqlens=cu_seqlens
        )
    flat = x.reshape(batch * length, width)
    y, final_state = library.causal_conv1d(
        flat, weight, bias, initial_state, offsets, activation=activation, backend=chosen
    )
    return y.view(batch, length, width), final_state


__all__ = ["causal_conv1d"]
