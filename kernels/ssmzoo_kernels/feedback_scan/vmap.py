"""``torch.vmap`` over COFFEE's scan: what is mapped over becomes more channels.

Channels know nothing of each other.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ssmzoo_kernels.declaration import Op

# where the channels of u, lam, w, C, w_gamma, D, drive and the initial state are
_CHANNELS = (1, 0, 0, 0, 0, 0, 1, 1)
_SAVED_CHANNELS = 2


def _wider(x: Tensor | None, mapped: int | None, channels: int, size: int) -> Tensor | None:
    """Return a tensor with a dimension that vmap maps over, if it has one, among its channels."""
    if x is None:
        return None
    if mapped is None:
        shape = (*x.shape[:channels], size, *x.shape[channels:])
        x = x.unsqueeze(channels).expand(shape)
    else:
        x = x.movedim(mapped, channels)
    return x.flatten(channels, channels + 1)


def _refuse_mapped(offsets: int | None) -> None:
    if offsets is not None:
        raise ValueError(
            "feedback_scan: cu_seqlens must be the same for everything that vmap maps over, got a "
            "cu_seqlens for each; pack all of it into one row instead"
        )


def _forward(scan: Op, info: Any, in_dims: Any, *arguments: Any) -> Any:
    size, (offsets, *options) = info.batch_size, arguments[8:]
    _refuse_mapped(in_dims[8])
    tensors = (
        _wider(x, mapped, channels, size)
        for x, mapped, channels in zip(arguments[:8], in_dims[:8], _CHANNELS, strict=True)
    )
    found = scan.registered(*tensors, offsets, *options)
    where = (_CHANNELS[0], _CHANNELS[7], _SAVED_CHANNELS)
    parts = (
        x.unflatten(channels, (size, x.shape[channels] // size))
        for x, channels in zip(found, where, strict=True)
    )
    return (*parts,), where


def _backward(scan: Op, info: Any, in_dims: Any, *arguments: Any) -> Any:
    size, tensors, (offsets, saved, *options) = info.batch_size, arguments[:10], arguments[10:]
    _refuse_mapped(in_dims[10])
    where = (_CHANNELS[0], _CHANNELS[7], *_CHANNELS)
    wide = (
        _wider(x, mapped, channels, size)
        for x, mapped, channels in zip(tensors, in_dims[:10], where, strict=True)
    )
    saved = _wider(saved, in_dims[11], _SAVED_CHANNELS, size)
    grads = scan.registered_backward(*wide, offsets, saved, *options)
    present = [x is not None for x in tensors[2:]]
    parts = (
        g.unflatten(channels, (size, g.shape[channels] // size)) if there else g
        for g, channels, there in zip(grads, _CHANNELS, present, strict=True)
    )
    dims = (c if there else None for c, there in zip(_CHANNELS, present, strict=True))
    return (*parts,), (*dims,)


def register(scan: Op) -> None:
    """Let vmap map over the scan, forward and backward."""
    scan.register_vmap(partial(_forward, scan), partial(_backward, scan))
