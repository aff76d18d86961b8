"""The timed calls: one entry an op and shape, with inputs, arithmetic and peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peers import (
    bare_ratio_transforms,
    bare_transforms,
    blocked_window,
    direct_exponentials,
    doubling_scan,
    gates_alone,
    indexing_loop,
    linear_loop,
    masked_window,
    materialised_scan,
    torch_loop,
    torch_norm,
    transformers_gated_delta,
    transformers_kda,
    transformers_loop,
    transformers_ssd,
    transformers_step,
)
from torch import Tensor

from ssmzoo_kernels import (
    add_rms_norm,
    causal_conv1d,
    companion_step,
    diagonal_step,
    eidetic_attention,
    feedback_scan,
    fft_conv,
    gated_linear_attention,
    generalized_delta_rule,
    linear_scan,
    longhorn_scan,
    rational_kernel,
    rms_norm,
    selective_scan,
    vandermonde,
)

VANDERMONDE, RATIONAL = 16384, 8192  # lengths
HEADS, KEYS, MEMORY = 4, 288, 32  # of attention: keys that a query sees, those of memory among them

Shape = tuple[int, int, int, int]
Passes = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Entry:
    """One op at one shape: how to call it and what that costs at the least.

    Attributes:
        op: Its name; ``tests/kernels/test_<op>.py``, or ``tests``, must pass before it is timed.
        shape: B, L, D, N (K for convolutions).
        make: Inputs for a shape, device and dtype; all get gradients.
        call: Run it on these inputs and return its output.
        flops: Operations of a forward and of a backward pass, per shape; None where counting would
            say nothing.
        peers: What else does the same work, or the part of it that cannot be spared: from shape
            and inputs to the passes to time.
        cpu: Backends to time on a CPU.
        gpu: The same on a GPU.
        backward: Whether it has one.
        once: Peers so slow that they run once, without a warm-up.
        tests: Where its tests are.
        dtype: Of the activations, that is of all inputs of more than two axes.
    """

    op: str
    shape: Shape
    make: Callable[..., list[Tensor]]
    call: Callable[..., Tensor]
    flops: Callable[..., tuple[float, float]] | None = None
    peers: Mapping[str, Callable[..., Passes]] = field(default_factory=dict)
    cpu: tuple[str, ...] = ("cpu", "eager")
    gpu: tuple[str, ...] = ("triton",)
    backward: bool = True
    once: frozenset[str] = frozenset()
    tests: str | None = None
    dtype: str = "float32"


def _longhorn_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    rows = [torch.randn(B, L, width, **where) for width in (D, N, N, D)]
    rows[1:3] = [x / N**0.5 for x in rows[1:3]]
    return [*rows, torch.zeros(D, **where), torch.ones(D, **where), torch.randn(B, L, D, **where)]


def _longhorn_flops(B: int, L: int, D: int, N: int) -> tuple[float, float]:
    return B * L * (7.0 * D * N + 15.0 * D), B * L * 22.0 * D * N


def _linear_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    return [1 - 0.1 * torch.rand(B, L, D, **where), torch.randn(B, L, D, **where)]


def _linear_flops(B: int, L: int, D: int, N: int) -> tuple[float, float]:
    return 2.0 * B * L * D, 3.0 * B * L * D


def _feedback_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    rates = torch.logspace(-3, -0.05, N, **where).expand(D, N)
    w, C = torch.randn(2, D, N, **where) * rates.sqrt()
    return [torch.randn(B, L, D, **where), -rates, w, C / N**0.5]


def _selective_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    u, dt, z = (torch.randn(B, L, D, **where) for _ in range(3))
    b, c = (torch.randn(B, L, N, **where) / N**0.5 for _ in range(2))
    rates = -torch.arange(1.0, N + 1, **where).expand(D, N).contiguous()
    steps = torch.logspace(-3, -1, D, **where)  # as Mamba starts
    return [u, dt, rates, b, c, torch.ones(D, **where), z, torch.log(torch.expm1(steps))]


def _conv_inputs(B: int, L: int, D: int, K: int, **where) -> list[Tensor]:
    return [torch.randn(B, L, D, **where), torch.randn(D, K, **where), torch.randn(D, **where)]


def _conv_flops(B: int, L: int, D: int, K: int) -> tuple[float, float]:
    return B * L * D * (2.0 * K + 10), B * L * D * (6.0 * K + 20)


def _long_conv_inputs(B: int, L: int, D: int, K: int, **where) -> list[Tensor]:
    return _conv_inputs(B, L, D, K, **where)[:2]


def _attention_inputs(B: int, L: int, D: int, K: int, **where) -> list[Tensor]:
    """Return queries, keys, values, and the memories of chunks, which are K - m tokens long."""
    tokens = [torch.randn(B, L, HEADS, D // HEADS, **where) for _ in range(3)]
    chunks = B * -(-L // (K - MEMORY))
    return [*tokens, *torch.randn(2, chunks, MEMORY, HEADS, D // HEADS, **where)]


def _attend(q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor, backend: str) -> Tensor:
    batch = q.shape[0]
    count = torch.full((batch, mem_k.shape[0] // batch), MEMORY, device=q.device)
    count[:, 0] = 0  # nothing is remembered before the first chunk is full
    window = KEYS - MEMORY
    return eidetic_attention(q, k, v, mem_k, mem_v, count.flatten(), window=window, backend=backend)  # type: ignore[arg-type]


def _attention_flops(B: int, L: int, D: int, K: int) -> tuple[float, float]:
    window = K - MEMORY
    early = window * (window - 1) // 2 + window * MEMORY  # keys that the first chunk lacks
    products = 2.0 * B * D * (L * K - early)
    return 2 * products, 5 * products


def _ssd_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    """Return C, B, x, A and dt of heads of 64 values that share their keys."""
    heads = D // 64
    q, k = (torch.randn(B, L, 1, N, **where) / N**0.5 for _ in range(2))
    steps = torch.exp(torch.empty(B, L, heads, **where).uniform_(-6.9, -2.3))
    return [q, k, torch.randn(B, L, heads, 64, **where), -torch.rand(heads, **where) * 16, steps]


def _ssd(q: Tensor, k: Tensor, v: Tensor, rates: Tensor, dt: Tensor, backend: str) -> Tensor:
    return gated_linear_attention(q, k, v, rates * dt, dt, scale=1.0, backend=backend)[0]  # type: ignore[arg-type]


def _delta_inputs(B: int, L: int, D: int, N: int, *, rowwise: bool = False, **where):
    heads = D // N
    q, k = (F.normalize(torch.randn(B, L, heads, N, **where), dim=-1) for _ in range(2))
    shape = (B, L, heads, N) if rowwise else (B, L, heads)
    decay = -torch.exp(torch.empty(shape, **where).uniform_(-6.9, 0))
    values = torch.randn(B, L, heads, N, **where)
    return [q, k, values, decay, torch.rand(B, L, heads, **where)]


def _delta(*inputs: Tensor, backend: str) -> Tensor:
    return gated_linear_attention(*inputs, rule="delta", backend=backend)[0]  # type: ignore[arg-type]


def _delta_step_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    return [*_delta_inputs(B, L, D, N, **where), torch.randn(B, D // N, N, N, **where)]


def _generalized_inputs(B: int, L: int, D: int, N: int, **where) -> list[Tensor]:
    q, k, values, decay, beta = _delta_inputs(B, L, D, N, rowwise=True, **where)
    return [q, decay.exp(), k, values, -k, beta[..., None] * k]


def _attention_by_chunks_flops(B: int, L: int, D: int, N: int) -> tuple[float, float]:
    """Count the products with the state: 2 forward, or 3 by the delta rule; 8 or so backward."""
    product = 2.0 * B * L * D * N
    return 2 * product, 6 * product


def _modes(H: int, N: int, **where) -> Tensor:
    """Return exponents as DSS starts with them: time steps from 1e-4 to 1e-2."""
    dt = torch.exp(torch.empty(H, 1, dtype=torch.float64, **where).uniform_(-9.2, -4.6))
    frequencies = 25.0 * torch.arange(N, dtype=torch.float64, **where)
    return torch.complex(-0.5 * dt.expand(-1, N), dt * frequencies)


def _vandermonde_inputs(B: int, L: int, H: int, N: int, **where) -> list[Tensor]:
    return [torch.randn(B, H, N, dtype=torch.complex64, **where), _modes(H, N, **where)]


def _diagonal_inputs(B: int, L: int, H: int, N: int, **where) -> list[Tensor]:
    decay = torch.exp(_modes(H, N, **where)).to(torch.complex64)
    state, readout = (torch.randn(*x, N, dtype=torch.complex64, **where) for x in ((B, H), (H,)))
    return [torch.randn(B, H, **where), state, decay, readout]


def _rational_inputs(B: int, L: int, D: int, n: int, **where) -> list[Tensor]:
    a, b = torch.randn(2, D, n, **where)
    return [a / (2 * a.abs().sum(1, keepdim=True)), b]


def _companion_inputs(B: int, L: int, D: int, n: int, **where) -> list[Tensor]:
    # as decoding keeps them: neighbouring channels side by side
    a, b = (x.T.contiguous().T for x in _rational_inputs(B, L, D, n, **where))
    return [torch.randn(B, D, **where), torch.randn(B, n + 1, D, **where), a, b, a.new_ones(D)]


def _step_companion(u: Tensor, ring: Tensor, a: Tensor, b: Tensor, d: Tensor, backend: str):
    position = torch.zeros(len(u), dtype=torch.int64, device=u.device)
    # as decoding calls it: the ring is the caller's own
    return companion_step(u, ring, position, a, b, d, inplace=True, backend=backend)[0]  # type: ignore[arg-type]


def _first_of(op: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a call of an op that gives its first result."""
    return lambda *x, backend: op(*x, backend=backend)[0]


def _norm_inputs(B: int, L: int, D: int, N: int, *, parts: int, dtype: str, **where):
    """Return two summands, and a weight of their dtype, for torch's kernel."""
    rows = (torch.randn(B, L, D, **where) for _ in range(parts))
    return [*rows, torch.ones(D, dtype=getattr(torch, dtype), **where)]


ENTRIES = [
    *(
        Entry(
            "linear_scan",
            shape,
            _linear_inputs,
            _first_of(linear_scan),
            _linear_flops,
            peers={"torch loop, autograd": linear_loop, "scan by doubling": doubling_scan},
            once=frozenset({"torch loop, autograd"}),
        )
        for shape in ((4, 2048, 512, 1), (1, 65536, 16, 1))
    ),
    Entry(
        "longhorn_scan",
        (4, 2048, 512, 16),
        _longhorn_inputs,
        _first_of(longhorn_scan),
        _longhorn_flops,
    ),
    *(
        Entry(
            "feedback_scan",
            shape,
            _feedback_inputs,
            _first_of(feedback_scan),
            peers={
                "exp and division alone": gates_alone,
                "torch loop, autograd": torch_loop,
                "torch loop by u[:, t], autograd": indexing_loop,
            },
            once=frozenset({"torch loop, autograd", "torch loop by u[:, t], autograd", "eager"}),
        )
        for shape in ((8, 2048, 512, 16), (512, 16, 16, 8))
    ),
    *(
        Entry(
            name,
            (4, 2048, 512, 16),
            _selective_inputs,
            lambda *x, backend, rule=rule: selective_scan(*x, discretization=rule, backend=backend)[
                0
            ],
            peers=peers,
            once=frozenset({"transformers' loop"}),
            tests="tests/kernels/test_selective_scan.py",
        )
        for name, rule, peers in (
            (
                "selective_scan",
                "euler",
                {
                    "parallel scan, as mamba.py": materialised_scan,
                    "transformers' loop": transformers_loop,
                },
            ),
            ("selective_scan (zoh)", "zoh", {}),
        )
    ),
    Entry(
        "causal_conv1d",
        (4, 2048, 512, 4),
        _conv_inputs,
        lambda *x, backend: causal_conv1d(*x, activation="silu", backend=backend)[0],
        _conv_flops,
    ),
    *(
        Entry(
            "fft_conv",
            shape,
            _long_conv_inputs,
            lambda *x, backend: fft_conv(*x, backend=backend)[0],
            peers={"bare FFTs": bare_transforms},
            gpu=("eager",),
        )
        for shape in ((8, 1024, 768, 1024), (4, 2048, 256, 2048), (2, 16384, 64, 16384))
    ),
    Entry(
        "eidetic_attention",
        (1, 2304, 256, KEYS),
        _attention_inputs,
        _attend,
        _attention_flops,
        peers={"SDPA, window in blocks": blocked_window, "SDPA, window as mask": masked_window},
    ),
    *(
        Entry(
            f"gated_linear_attention ({name})",
            (4, 512, 512, keys),
            make,
            call,
            _attention_by_chunks_flops,
            peers={"transformers, by chunks": peer},
            tests="tests/kernels/test_gated_linear_attention.py",
        )
        for name, keys, make, call, peer in (
            ("SSD", 64, _ssd_inputs, _ssd, transformers_ssd),
            ("SSD", 128, _ssd_inputs, _ssd, transformers_ssd),
            ("gated delta", 64, _delta_inputs, _delta, transformers_gated_delta),
            ("KDA", 64, partial(_delta_inputs, rowwise=True), _delta, transformers_kda),
        )
    ),
    Entry(
        "generalized_delta_rule",
        (4, 512, 512, 64),
        _generalized_inputs,
        lambda *x, backend: generalized_delta_rule(*x, backend=backend)[0],
        _attention_by_chunks_flops,
        cpu=("cpu",),
        gpu=(),
    ),
    Entry(
        "gated_linear_attention (step)",
        (1, 1, 4096, 128),
        _delta_step_inputs,
        _delta,
        peers={"transformers, one step": transformers_step},
        gpu=("triton", "eager"),
        backward=False,
        tests="tests/kernels/test_gated_linear_attention.py",
    ),
    Entry(
        "vandermonde",
        (1, VANDERMONDE, 256, 64),
        _vandermonde_inputs,
        lambda *x, backend: vandermonde(*x, VANDERMONDE, backend=backend),
        peers={"direct exp, 32 heads at a time": direct_exponentials},
        cpu=("eager",),
        once=frozenset({"direct exp, 32 heads at a time"}),
    ),
    *(
        Entry(
            op,
            shape,
            partial(_norm_inputs, parts=parts, dtype=dtype),
            call,
            peers={"torch": torch_norm},
            cpu=cpu,
            dtype=dtype,
        )
        for op, parts, call in (
            ("rms_norm", 1, lambda *x, backend: rms_norm(*x, eps=1e-5, backend=backend)),
            ("add_rms_norm", 2, lambda *x, backend: add_rms_norm(*x, eps=1e-5, backend=backend)[1]),
        )
        for shape, dtype, cpu in (
            ((1, 4096, 768, 1), "float32", ("cpu", "eager")),
            ((8, 2048, 4096, 1), "bfloat16", ()),  # of a large model, for GPUs alone
        )
    ),
    Entry(
        "diagonal_step",
        (1, 1, 768, 64),
        _diagonal_inputs,
        lambda u, z, a, c, backend: diagonal_step(u, z, a, None, c, backend=backend)[0],
        gpu=("triton", "eager"),
        backward=False,
    ),
    Entry(
        "companion_step",
        (1, 1, 768, 64),
        _companion_inputs,
        _step_companion,
        gpu=("triton", "eager"),
        backward=False,
    ),
    *(
        Entry(
            f"rational_kernel ({mode})",
            (1, RATIONAL, 64, order),
            _rational_inputs,
            lambda a, b, backend, options=options: rational_kernel(
                a, b, RATIONAL, backend=backend, **options
            ),
            peers={"bare FFTs": bare_ratio_transforms},
            cpu=("eager",),
            gpu=("eager",),
            tests="tests/kernels/test_rational_kernel.py",
        )
        for mode, options in (
            ("truncated", {"mode": "truncated", "trunc_len": RATIONAL}),
            ("exact", {"mode": "exact"}),
        )
        for order in (64, 1024)
    ),
    # of the size of large models, for GPUs alone
    *(
        Entry(op, shape, make, call, cpu=(), dtype="bfloat16", peers=peers)
        for op, shape, make, call, peers in (
            *(
                (op, shape, make, call, {})
                for op, make, call in (
                    ("longhorn_scan", _longhorn_inputs, _first_of(longhorn_scan)),
                    ("selective_scan", _selective_inputs, _first_of(selective_scan)),
                    ("feedback_scan", _feedback_inputs, _first_of(feedback_scan)),
                )
                for shape in ((8, 2048, 4096, 16), (32, 2048, 8192, 16), (1, 65536, 8192, 16))
            ),
            *(
                (f"gated_linear_attention ({name})", (8, 2048, 4096, 128), make, call, peers)
                for name, make, call, peers in (
                    ("SSD", _ssd_inputs, _ssd, {}),  # transformers' needs 128 GiB
                    (
                        "gated delta",
                        _delta_inputs,
                        _delta,
                        {"transformers, by chunks": transformers_gated_delta},
                    ),
                    (
                        "KDA",
                        partial(_delta_inputs, rowwise=True),
                        _delta,
                        {"transformers, by chunks": transformers_kda},
                    ),
                )
            ),
        )
    ),
    Entry(
        "eidetic_attention",
        (4, 8064, 512, KEYS),
        _attention_inputs,
        _attend,
        _attention_flops,
        peers={"SDPA, window in blocks": blocked_window, "SDPA, window as mask": masked_window},
        cpu=(),
        dtype="bfloat16",
    ),
]
