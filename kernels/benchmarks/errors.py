"""Errors of ops and of their peers, against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from ssmzoo_kernels import vandermonde

SOME = 4  # heads that are compared: the reference is a loop


def vandermonde_errors(
    shape: tuple[int, ...], weight: Tensor, exponent: Tensor
) -> dict[str, float]:
    """Return the largest errors of the kernels, relative to the largest entry."""
    length = shape[1]
    weight, exponent = weight[0, :SOME].detach(), exponent[:SOME].detach()
    exact = vandermonde(weight.to(torch.complex128), exponent, length, backend="reference")
    lags = torch.arange(length, device=weight.device)
    terms = torch.exp(exponent.to(torch.complex64)[..., None] * lags)  # as the peer does
    backend = "triton" if weight.device.type == "cuda" else "eager"
    found = {
        backend: vandermonde(weight, exponent, length, backend=backend),
        "direct exp, 32 heads at a time": torch.einsum("hn,hnl->hl", weight, terms).real,
    }
    return {
        name: float((got.double() - exact).abs().max() / exact.abs().max())
        for name, got in found.items()
    }


ERRORS: dict[str, Callable[..., dict[str, float]]] = {"vandermonde": vandermonde_errors}
