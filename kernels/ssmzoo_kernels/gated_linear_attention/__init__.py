"""Gated linear attention: a matrix state that decays, is written to and is read by every token."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ssmzoo_kernels.declaration import Choice, Op
from ssmzoo_kernels.dispatch import Backend
from ssmzoo_kernels.gated_linear_attention import reference
from ssmzoo_kernels.gated_linear_attention.reference import Rule
from ssmzoo_kernels.scan import chunk_slots, interval
from ssmzoo_kernels.validation import Packing

OP = "gated_linear_attention"
CHUNKS = (16, 32, 64)


def _saved_states(kernels: Any, sizes: Mapping[str, Any]) -> Sequence[int]:
    """Return the shape of the states that a forward saves, one an interval of whole chunks."""
    slots = chunk_slots(sizes["T"], sizes["S"], interval(sizes["K"], sizes["chunk"]))
    return slots, sizes["H"], sizes["K"], sizes["V"]


ATTENTION = Op(
    OP,
    inputs={
        "q": "B L G K",
        "k": "B L G K",
        "v": "B L H V",
        "log_decay": "B L H E?",  # E is 1 or K
        "beta": "B L H?",
        "initial_state": "S H K V?",
    },
    outputs={"out": "B L H V as v", "final_state": "S H K V as exact"},
    options={"rule": Choice("additive", "delta"), "scale": "float", "chunk": "int"},
    packing="flat",
    least={"q": "column"},
    saved=_saved_states,
    reference=reference.gated_linear_attention,
    kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.{OP}.{name}"),
)


def gated_linear_attention(
    q: Tensor,  # [B, L, G, K]
    k: Tensor,  # [B, L, G, K]
    v: Tensor,  # [B, L, H, V]
    log_decay: Tensor | None = None,  # [B, L, H] or [B, L, H, K], zeros if absent
    beta: Tensor | None = None,  # [B, L, H], ones if absent
    initial_state: Tensor | None = None,  # [B, H, K, V], zeros if absent
    *,
    cu_seqlens: Tensor | Packing | None = None,  # [S + 1]
    rule: Rule = "additive",
    scale: float | None = None,
    chunk: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Decay a matrix of states, write a value to it under a key, and read it with a query.

    Per head, with the state ``S`` ``[K, V]``, every token does::

        S <- diag(exp(log_decay[t])) S
        S <- S + k[t] (beta[t] v[t])^T                  rule="additive"
        S <- S + k[t] (beta[t] (v[t] - S^T k[t]))^T     rule="delta"
        o[t] = scale S^T q[t]

    Head ``h`` has the keys and queries of group ``h // (H / G)``. Models spell themselves so:

    ===================== ============ ======================== ============== =====================
    model                 ``rule``     ``log_decay``            ``beta``       other
    ===================== ============ ======================== ============== =====================
    Mamba2 (SSD)          additive     ``dt A``, ``[B, L, H]``  ``dt``         q is C, k is B, v is
                                                                               x, scale 1
    RetNet                additive     ``log gamma`` of a head  None
    GLA                   additive     ``[B, L, H, K]``         None
    DeltaNet              delta        None                     its beta       keys of length 1
    gated DeltaNet        delta        ``log alpha``, a number  its beta       keys of length 1
                                       a head
    KDA (Kimi Linear)     delta        ``[B, L, H, K]``         its beta       keys of length 1
    DeltaProduct          delta        0 but for a token's      its beta       a token's writes are
                                       first write                             tokens; q at the last
    HGRN2                 additive     ``[B, L, H, K]``         None           k is one minus decay
    mLSTM                 additive     ``log sigmoid(f)``, a    ``exp(i)``     a column of ones in v
                                       number a head                           sums weights
    ===================== ============ ======================== ============== =====================

    Everything inside is float32 (float64 for float64 queries); only the output takes v's dtype.
    The delta rule with ``beta |k|^2 > 2`` makes states grow, as the equations say.

    Args:
        q: Queries; H is a multiple of G.
        k: Keys.
        v: Values.
        log_decay: Logarithms of what a token leaves of the state, a number a head or one a row of
            its state. Any finite number: -50 is as exact as -0.01. -inf forgets everything.
        beta: How strongly a token writes.
        initial_state: State to continue from; with ``cu_seqlens`` one per packed sequence,
            ``[S, H, K, V]``.
        cu_seqlens: Where packed sequences begin and end in a single row (B = 1), int32 or int64,
            or a ``Packing`` of them, which was checked already.
        rule: A token writes its value, or the difference from the state's answer to its key.
        scale: Of the outputs; ``K ** -0.5`` if absent.
        chunk: How many tokens are multiplied at once at most, 16, 32 or 64; it changes no more
            than roundings. Training saves a state a chunk, or one every K tokens if that is more.
        backend: "auto" goes by device. Naming a backend that cannot run is an error.

    Returns:
        The outputs ``[B, L, H, V]`` in v's dtype, and the final state ``[B, H, K, V]``
        (``[S, H, K, V]``) in float32 or float64. Gradients flow through both.

    Raises:
        ValueError: Shapes, devices or choices that do not fit.
        TypeError: Not a tensor, or not floating point; a scale that is no number.
        RuntimeError: The named backend cannot run on this machine.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float | None):
        raise TypeError(f"{OP}: scale must be a number or None, got {type(scale).__name__}")
    if isinstance(log_decay, Tensor) and log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    if all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, v)):
        scale = float(max(1, q.shape[3])) ** -0.5 if scale is None else float(scale)
        groups, heads = q.shape[2], v.shape[2]
        if groups < 1 or heads < 1 or heads % groups:
            raise ValueError(f"{OP}: v's heads must be a multiple of q's, got {heads} and {groups}")
        if isinstance(log_decay, Tensor) and log_decay.dim() == 4:
            rows, keys = log_decay.shape[3], q.shape[3]
            if keys and rows not in (1, keys):
                raise ValueError(
                    f"{OP}: log_decay must have shape [B, L, H] or [B, L, H, K], "
                    f"got {list(log_decay.shape)} where K = {keys}"
                )
    if not isinstance(chunk, int) or chunk not in CHUNKS:
        raise ValueError(f"{OP}: chunk must be 16, 32 or 64, got {chunk!r}")
    inputs = (q, k, v, log_decay, beta, initial_state)
    options = {"rule": rule, "scale": scale, "chunk": chunk}
    return ATTENTION(*inputs, cu_seqlens=cu_seqlens, backend=backend, **options)


__all__ = ["gated_linear_attention"]
