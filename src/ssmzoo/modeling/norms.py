"""The norms a backbone can have. Each computes in float32 and returns its weight's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.module_parts import is_watched
from ssmzoo_kernels import add_rms_norm, rms_norm
from ssmzoo_kernels.validation import transformed

_MOMENTUM = 0.1
MANY = 2**14  # numbers from which our op is faster than torch's on a CPU


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``; the result has the weight's dtype."""
        weight = self.weight
        if takes_op(x):
            return rms_norm(x, weight, eps=self.eps)
        exact = torch.promote_types(torch.float32, x.dtype)
        return F.rms_norm(x.to(exact), weight.shape, weight.to(exact), self.eps).to(weight.dtype)


class GroupRMSNorm(RMSNorm):
    """RMSNorm of each ``group`` of neighbouring columns, with a weight for every column."""

    def __init__(self, size: int, eps: float, group: int) -> None:
        super().__init__(size, eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``; the result has the weight's dtype."""
        if self.group == x.shape[-1]:
            return super().forward(x)
        exact = torch.promote_types(torch.float32, x.dtype)
        groups = x.shape[-1] // self.group
        wide = x.to(exact).reshape(*x.shape[:-1], groups, self.group)  # dynamo stops at unflatten
        y = F.rms_norm(wide, (self.group,), None, self.eps).flatten(-2)
        return (y * self.weight.to(exact)).to(self.weight.dtype)


_OWN = RMSNorm.forward, RMSNorm.forward.__code__


def add_and_norm(x: Tensor, y: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | None]:
    """Return ``x + y`` and, where one kernel gives both, its norm; else None for the norm.

    Nobody may call the norm on the sum then; so a norm that something watches, wraps or replaces
    stands alone, as does one whose weight is sharded or lies on another device.
    """
    if (
        takes_op(x)
        and type(norm.weight) in (nn.Parameter, Tensor)
        and norm.weight.device == x.device
        and x.shape == y.shape
        and torch.promote_types(x.dtype, y.dtype) is x.dtype
        and not is_watched(norm)
        and (RMSNorm.forward, RMSNorm.forward.__code__) == _OWN
    ):
        return add_rms_norm(x, y, norm.weight, eps=norm.eps)
    return x + y, None


def takes_op(x: Tensor) -> bool:
    """Tell whether our op is faster than torch's, which compilers fuse."""
    # first whether a graph is traced, which would take the size for a condition
    if torch.compiler.is_compiling():
        return False
    return (x.is_cuda or x.numel() >= MANY) and not transformed()


class LayerNorm(nn.LayerNorm):
    """``weight * (x - mean) / sqrt(var + eps) + bias`` over the last axis, in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[..., size]``; the result has the weight's dtype."""
        exact = torch.promote_types(torch.float32, input.dtype)
        weight, bias = self.weight.to(exact), self.bias.to(exact)
        x = F.layer_norm(input.to(exact), self.normalized_shape, weight, bias, self.eps)
        return x.to(self.weight.dtype)


class BatchNorm(nn.BatchNorm1d):
    """Normalise every feature over all tokens of the batch, padding excepted.

    In evaluation it uses running statistics, so no token sees another. In training every token sees
    the whole batch, the future too.
    """

    def forward(self, input: Tensor, real: Tensor | None = None) -> Tensor:
        """Normalise ``[B, L, D]``.

        Args:
            input: The tokens' features.
            real: ``[B * L]``, False for padding; None if there is none. Only training reads it.

        Raises:
            ValueError: Fewer than two tokens to take statistics from.
        """
        exact = torch.promote_types(torch.float32, input.dtype)
        x = input.to(exact).flatten(0, 1)  # [T, D]
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        if self.training:
            weight = x.new_ones(x.shape[0], 1) if real is None else real.to(exact).unsqueeze(1)
            count = weight.sum()
            if not torch.compiler.is_compiling() and count < 2:
                raise ValueError(
                    "batch norm needs two tokens or more to train on, "
                    f"got {int(count)}; use norm_type='layer' or 'rms'"
                )
            batch_mean = (x * weight).sum(dim=0) / count
            batch_variance = ((x - batch_mean).square() * weight).sum(dim=0) / count
            self._remember(batch_mean.detach(), batch_variance.detach() * count / (count - 1))
            mean, variance = batch_mean, batch_variance
        scale = self.weight.to(exact) * torch.rsqrt(variance.to(exact) + self.eps)
        out = (x - mean.to(exact)) * scale + self.bias.to(exact)
        return out.to(self.weight.dtype).view(input.shape)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        # gradient checkpointing runs the forward once more, inside the backward pass
        if torch._C._current_graph_task_id() != -1:
            return
        for average, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert average is not None
            average.lerp_(new.to(average.dtype), _MOMENTUM)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)


class NoNorm(nn.Module):
    """Identity that casts to the dtype of the weights around it."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)  # has the model's dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., D]`` as it is."""
        return x.to(self.weight.dtype)


def make_norm(config: SSMConfig) -> RMSNorm | LayerNorm | BatchNorm | NoNorm:
    """Return a norm of the kind and size that the configuration names."""
    if config.norm_type == "none":
        return NoNorm()
    kinds = {"layer": LayerNorm, "batch": BatchNorm, "rms": RMSNorm}
    return kinds[config.norm_type](config.hidden_size, eps=config.rms_norm_eps)
