"""Layers that mixers and blocks are made of.

Dimensions: B batch, L length, D hidden, E inner, K conv width, S sequences, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo_kernels import causal_conv1d, double
from ssmzoo_kernels.few_rows_linear import (
    MOST_ROWS,
    MUCH_WORK,
    few_rows_linear,
    many_rows_linear,
)
from ssmzoo_kernels.validation import Packing

if TYPE_CHECKING:
    from ssmzoo.modeling.layer_state import LayerState
    from ssmzoo.modeling.module_parts import ModuleParts, State
    from ssmzoo.modeling.packing import Sequences
    from ssmzoo_kernels.token_step import Program, Value


_LINEAR = nn.Linear.forward


class Linear(nn.Linear):
    """``nn.Linear`` by kernels of our own where they are faster: on CPUs, by the number of rows.

    Attributes:
        role: Its place in the model, by which a family chooses its initial weights; ``"mixer_end"``
            and ``"mlp_end"`` are the last layers of residual branches.
    """

    stock_class = nn.Linear  # the class that it stands for
    role: str = ""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, role: str = ""
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.role = role

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        # a graph would take the number of rows for a constant (`is_traced`, without the call), a
        # DTensor is torch's to split, and somebody may have replaced nn.Linear's forward
        if (
            not (torch.compiler.is_compiling() or torch._C._is_tracing())
            and type(input) is Tensor
            and nn.Linear.forward is _LINEAR
        ):
            if not torch.is_grad_enabled() and input.numel() <= MOST_ROWS * self.in_features:
                return few_rows_linear(input, self.weight, self.bias)
            if input.dtype.itemsize == 2 or input.numel() * self.out_features >= MUCH_WORK:
                return many_rows_linear(input, self.weight, self.bias)
        return nn.Linear.forward(self, input)


class CausalConv1d(nn.Module):
    """Depthwise causal convolution, then SiLU or nothing; weight ``[E, 1, K]`` as in ``nn.Conv1d``.

    Not an ``nn.Conv1d``: its state goes in and out, and an adapter that wraps convolutions would be
    silently dead on a weight that a kernel reads; on this class it is refused.

    Args:
        channels: E.
        width: K.
        bias: Whether to add one.
        activation: ``"silu"``, or None for the bare convolution.
    """

    def __init__(
        self, channels: int, width: int, bias: bool, activation: Literal["silu"] | None = "silu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.activation: Literal["silu"] | None = activation
        bound = width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, initial_state: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        """Map ``[B, L, E]`` to ``[B, L, E]`` and the last K - 1 inputs ``[B, K - 1, E]``."""
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            initial_state,
            activation=self.activation,
            cu_seqlens=packing,
        )

    def write_token(self, program: Program, parts: ModuleParts, x: Value, state: State) -> Value:
        """Write one token; the parts are this layer's."""
        weight, bias = parts.weight(self), parts.weight(self, "bias", optional=True)
        silu, kept = parts.setting(self, "activation") == "silu", state.like.shape[1]
        return program.causal_conv1d(
            x, weight, bias, state.number, kept, state.like.dtype, silu=silu, channels_last=True
        )


def token_before(x: Tensor, name: str, state: LayerState, packing: Sequences | None) -> Tensor:
    """Return the token before each of ``[B, L, E]``, zeros before the first, float32 at least.

    The state ``name`` is the last token, ``[B, 1, E]``.
    """
    exact = x.to(torch.promote_types(torch.float32, x.dtype))
    taps = exact.new_tensor([1.0, 0.0]).expand(x.shape[2], 2)  # of the last token, and of this one
    before, last = causal_conv1d(exact, taps, None, state.get(name), cu_seqlens=packing)
    state.put(name, last)
    return before


def inverse_softplus(y: Tensor) -> Tensor:
    """Return x of ``y = log(1 + exp(x))``."""
    return y + torch.log(-torch.expm1(-y))


class Dropout(nn.Dropout):
    """Dropout of single entries or, ``tied``, of whole features over all tokens of a sequence.

    Libraries that look for ``nn.Dropout``, to turn it off or on, find it.
    """

    def __init__(self, p: float, tied: bool) -> None:
        super().__init__(p)
        self.tied = tied

    def forward(self, input: Tensor, packing: Packing | None = None) -> Tensor:
        """Drop from ``[B, L, D]``; packed sequences are dropped from one by one."""
        if not self.training or self.p == 0:
            return input
        if not self.tied:
            return F.dropout(input, self.p)
        width = self.drawn(input.shape[2])
        if packing is None:
            return input * F.dropout(input.new_ones(input.shape[0], width), self.p).unsqueeze(1)
        lengths = packing.offsets.diff()  # [S]
        kept = F.dropout(input.new_ones(lengths.shape[0], width), self.p)
        return input * kept.repeat_interleave(lengths, dim=0, output_size=input.shape[1])

    def drawn(self, features: int) -> int:
        """Return how many numbers are drawn for a sequence of so many features."""
        return features

    def extra_repr(self) -> str:
        """Show the settings in ``print(model)``."""
        return f"p={self.p}, tied={self.tied}"


class DropPath(Dropout):
    """Stochastic depth: drop a branch's output for whole sequences; scale up the others."""

    def __init__(self, p: float) -> None:
        super().__init__(p, tied=True)

    def drawn(self, features: int) -> int:
        """Return 1: a sequence's features stay or go together."""
        return 1


class MLP(nn.Module):
    """The feed-forward branch after a mixer.

    ``"gelu"``: ``down_proj(GELU(up_proj(x)))`` with biases and the tanh form of GELU, as in GPT-2.
    ``"swiglu"``: ``down_proj(SiLU(gate_proj(x)) * up_proj(x))`` without biases, as in Llama.
    """

    def __init__(self, config: SSMConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        gated = config.mlp_type == "swiglu"
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, bias=False) if gated else None
        self.up_proj = Linear(width, inner, bias=not gated)
        self.down_proj = Linear(inner, width, bias=not gated, role="mlp_end")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D]``."""
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))

    def write_token(self, program: Program, parts: ModuleParts, x: Value) -> Value:
        """Write one token; the parts are this layer's."""
        up = parts.linear(program, x, "up_proj")
        if self.gate_proj is None:
            inner = program.map(up, "gelu_tanh")
        else:
            inner = program.gated(parts.linear(program, x, "gate_proj"), up)
        return parts.linear(program, inner, "down_proj")


def keeping_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a tensor as ``fn`` does, but casts none below 32 bits."""

    def move(tensor: Tensor) -> Tensor:
        out = fn(tensor)
        lowered = out.is_floating_point() and out.dtype.itemsize < 4 <= tensor.dtype.itemsize
        return tensor.to(out.device) if lowered else out

    return move


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``[B, L, heads, size]`` of ``[B, L, heads size]``; dynamo stops at ``unflatten``."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def rotary_angles(size: int, device: torch.device, theta: float = 10_000.0) -> Tensor:
    """Return the angles that pairs of features turn by at every token, float64 ``[size / 2]``.

    ``theta^(-2 i / size)`` for pair i.
    """
    return theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float64) / size)


def rotary_turns(
    position: Tensor, size: int, dtype: torch.dtype, theta: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles at some positions, ``[..., 1, size / 2]``.

    They are found in float64 and rounded to ``dtype``.
    """
    wide = double(position)[..., None, None]
    angle = wide * rotary_angles(size, wide.device, theta)
    return angle.cos().to(position.device, dtype), angle.sin().to(position.device, dtype)


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn two halves of features of ``[..., heads, size]`` against each other, in turns' dtype.

    Where ``turns`` are of fewer than all features, those behind them stay as they are.
    """
    cos, sin = turns
    x, half = x.to(cos.dtype), cos.shape[-1]
    whole = 2 * half == x.shape[-1]
    first, second, *rest = x.chunk(2, -1) if whole else x.tensor_split((half, 2 * half), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *rest], dim=-1)
