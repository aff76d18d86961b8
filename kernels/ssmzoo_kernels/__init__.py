"""Recurrences and convolutions of state-space models, on CPUs and GPUs.

Ops along a sequence take activations ``[B, L, ...]``, ``initial_state`` and ``cu_seqlens``, keep
their state in float32 (float64 for float64 inputs) and return the final state.
"""

from ssmzoo_kernels import layers as layers
from ssmzoo_kernels.add_rms_norm import add_rms_norm
from ssmzoo_kernels.causal_conv1d import causal_conv1d
from ssmzoo_kernels.companion_step import (
    companion_response,
    companion_scan,
    companion_state,
    companion_step,
)
from ssmzoo_kernels.diagonal_step import diagonal_step
from ssmzoo_kernels.dispatch import last_backend, use_backend
from ssmzoo_kernels.eidetic_attention import eidetic_attention
from ssmzoo_kernels.feedback_scan import feedback_scan
from ssmzoo_kernels.few_rows_linear import few_rows_linear
from ssmzoo_kernels.fft_conv import fft_conv
from ssmzoo_kernels.gated_linear_attention import gated_linear_attention
from ssmzoo_kernels.generalized_delta_rule import generalized_delta_rule
from ssmzoo_kernels.innovation import innovation, select_memory
from ssmzoo_kernels.linear_scan import linear_scan
from ssmzoo_kernels.longhorn_scan import longhorn_scan
from ssmzoo_kernels.precision import beside, double, powers
from ssmzoo_kernels.rational_kernel import inverse_series, rational_kernel
from ssmzoo_kernels.rms_norm import rms_norm
from ssmzoo_kernels.selective_scan import selective_scan
from ssmzoo_kernels.vandermonde import vandermonde, vandermonde_state

__all__ = [
    "add_rms_norm",
    "beside",
    "causal_conv1d",
    "companion_response",
    "companion_scan",
    "companion_state",
    "companion_step",
    "diagonal_step",
    "double",
    "eidetic_attention",
    "feedback_scan",
    "few_rows_linear",
    "fft_conv",
    "gated_linear_attention",
    "generalized_delta_rule",
    "innovation",
    "inverse_series",
    "last_backend",
    "linear_scan",
    "longhorn_scan",
    "powers",
    "rational_kernel",
    "rms_norm",
    "select_memory",
    "selective_scan",
    "use_backend",
    "vandermonde",
    "vandermonde_state",
]
