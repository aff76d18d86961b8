"""Calls of every op for tests that hold for all of them, and the registered ops behind them.

A call is an op's name, its tensors by name (None where absent) and its other arguments.
"""

import importlib.util
import mmap
from typing import NamedTuple

import torch

import ssmzoo_kernels
from ssmzoo_kernels.declaration import declared

BACKENDS = ("eager", "cpu", "triton")  # those behind torch.library; the reference is torch alone

HOMES = {"vandermonde_state": "vandermonde", "inverse_series": "rational_kernel"}


class Call(NamedTuple):
    """One call of a public op."""

    op: str
    tensors: dict  # by name, None where absent
    options: dict
    sloped: tuple[str, ...]  # the tensors that have gradients

    @property
    def folder(self):
        """The folder that the op lives in."""
        return HOMES.get(self.op, self.op)

    def run(self, tensors=None, **more):
        """Return what the op returns, a tuple."""
        named = {**(self.tensors if tensors is None else tensors), **self.options, **more}
        if self.op == "inverse_series":  # which is torch's FFT alone
            named.pop("backend", None)
        if named.get("backend") == "reference" and "solver" in named:  # which only marches
            named["solver"] = "march"
        found = getattr(ssmzoo_kernels, self.op)(**named)
        return found if isinstance(found, tuple) else (found,)


def registered():
    """Return every op that the package registers with torch.library, and the folder it is in."""
    return {
        f"ssmzoo::{name}{part}": HOMES.get(name, name)
        for name, op in declared().items()
        for part in ("", "_backward")[: 2 if op.gradients else 1]
    }


def backends_of(folder):
    """Return the backends that an op's folder has beside the reference."""
    return [x for x in BACKENDS if importlib.util.find_spec(f"ssmzoo_kernels.{folder}.{x}")]


def calls(*, B=2, L=11, D=6, N=3, dtype=torch.float32, bare=False, packed=False):
    """Return calls of every op: with everything optional or bare, in a batch or packed."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    def complex_(*shape):
        return torch.complex(normal(*shape), normal(*shape))

    rows = B
    ends = {}
    if packed:  # the same number of tokens: an empty sequence, and two of unequal length
        B, L, rows = 1, B * L, 4
        ends = {"cu_seqlens": torch.tensor([0, 1, 1, 2 * L // 3, L])}
    found = []

    def add(op, optional=(), constants=(), options=None, **tensors):
        if bare:
            tensors = {n: None if n in optional else x for n, x in tensors.items()}
        sloped = (n for n, x in tensors.items() if x is not None and n not in constants)
        found.append(Call(op, tensors, options or {}, (*sloped,)))

    x, keys = normal(B, L, D), normal(B, L, N)
    rates = -normal(D, N).exp()
    state = normal(rows, D, N)
    add(
        "causal_conv1d",
        ("bias", "initial_state"),
        x=x,
        weight=normal(D, 4),
        bias=normal(D),
        initial_state=normal(rows, 3, D),
        options=ends | {"activation": None if bare else "silu"},
    )
    add(
        "linear_scan",
        ("initial_state",),
        a=x.sigmoid(),
        b=normal(B, L, D),
        initial_state=normal(rows, D),
        options=ends,
    )
    add(
        "longhorn_scan",
        ("dt_bias", "D", "z", "initial_state"),
        u=x,
        q=keys,
        k=normal(B, L, N),
        dt=normal(B, L, D),
        dt_bias=normal(D),
        D=normal(D),
        z=normal(B, L, D),
        initial_state=state,
        options=ends,
    )
    for kind in ("euler", "zoh"):
        add(
            "selective_scan",
            ("D", "z", "dt_bias", "initial_state"),
            u=x,
            dt=normal(B, L, D),
            A=rates,
            B=keys,
            C=normal(B, L, N),
            D=normal(D),
            z=normal(B, L, D),
            dt_bias=normal(D),
            initial_state=state,
            options=ends | {"discretization": kind},
        )
    for solver in ("march", "newton"):
        add(
            "feedback_scan",
            ("w_gamma", "D", "drive", "initial_state"),
            u=x,
            lam=rates.clamp(min=-1),
            w=normal(D, N),
            C=normal(D, N),
            w_gamma=normal(D, N),
            D=normal(D),
            drive=normal(B, L, D),
            initial_state=state,
            options=ends | {"solver": solver},
        )
    add(
        "innovation",
        ("history",),
        ("y", "history"),
        y=x,
        history=normal(rows, 2, D),
        options=ends | {"weights": [0.5, 0.25], "relative": bare},
    )
    add(
        "fft_conv",
        ("D", "initial_state", "future_kernel"),
        u=x,
        kernel=normal(D, 5),
        D=normal(D),
        initial_state=None if packed else normal(B, 4, D),
        future_kernel=normal(D, 3),
        options=ends,
    )
    heads = {n: normal(B, L, 2, 4) for n in ("k", "v", "late_k", "late_v")}
    past = {n: normal(rows, 6, 2, 4) for n in ("past_k", "past_v", "late_past_k", "late_past_v")}
    window = {"window": 4, "late_span": 0 if bare else 3}
    chunks = sum(-(-n // 4) for n in (ends["cu_seqlens"].diff().tolist() if packed else [L] * B))
    add(
        "eidetic_attention",
        ("mem_k", "mem_v", "mem_count", "mem_positions", *past, "late_k", "late_v", "seen"),
        ("mem_count", "mem_positions", "seen"),
        q=normal(B, L, 4, 4),
        **heads,
        **past,
        mem_k=normal(chunks, 3, 2, 4),
        mem_v=normal(chunks, 3, 2, 4),
        mem_count=torch.arange(chunks) % 4,
        mem_positions=torch.arange(3).repeat(chunks, 1),
        seen=torch.zeros(rows, dtype=torch.int64),
        options=ends | window,
    )
    if not packed:
        _add_stateless(add, normal, complex_, B, L, D, N)
    return found


def _add_stateless(add, normal, complex_, B, L, D, N):
    """Add the ops that know no packed rows."""
    exponent = torch.complex(-normal(D, N).double().exp(), normal(D, N).double())
    falling = torch.arange(D * N).view(D, N) % 2 == 0
    add(
        "vandermonde",
        ("reversed",),
        ("reversed",),
        weight=complex_(B, D, N),
        exponent=exponent,
        reversed=falling,
        options={"length": L, "offset": 1},
    )
    add(
        "vandermonde_state",
        ("reversed",),
        ("reversed",),
        u=normal(B, L, D),
        exponent=exponent,
        reversed=falling,
    )
    add(
        "diagonal_step",
        ("drive", "D"),
        ("u", "state", "decay", "drive", "readout", "D"),
        u=normal(B, D),
        state=complex_(B, D, N),
        decay=complex_(D, N),
        drive=complex_(D, N),
        readout=complex_(D, N),
        D=normal(D),
    )
    a, b = 0.2 * normal(1 + (D % 2 == 0), N), normal(D, N)
    for mode in ({"mode": "exact"}, {"mode": "truncated", "trunc_len": L + N}):
        add("rational_kernel", a=a, b=b, options={"length": L, **mode})
    add("inverse_series", a=a, options={"length": L})
    add(
        "companion_step",
        (),
        ("u", "ring", "position", "a", "b", "d"),
        u=normal(B, D),
        ring=normal(B, N + 1, D),
        position=torch.arange(B),
        a=a,
        b=b,
        d=normal(D),
    )


def contiguous(x):
    """Return a tensor as it is."""
    return x


def turned(x):
    """Return a tensor with the same values whose last dimension is not the densest."""
    if x is None or x.dim() < 2:
        return None if x is None else torch.stack([x, x], dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(x):
    """Return a tensor whose first entry stands for all, by a stride of zero."""
    return None if x is None else x[:1].expand_as(x)


def far_apart(x):
    """Return a tensor whose rows lie 2^30 numbers apart, in memory that only they take."""
    if x is None or x.dim() < 3:
        return x
    apart = 2**30
    span = (x.shape[1] - 1) * apart + x[0, 0].numel()
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )  # MAP_NORESERVE: untouched pages are free
    memory = mmap.mmap(-1, span * x.dtype.itemsize, flags=flags)
    flat = torch.frombuffer(memory, dtype=x.dtype)
    inner = x[0, 0].contiguous().stride()
    far = flat.as_strided(x.shape, (span, apart, *inner))
    return far.copy_(x)
