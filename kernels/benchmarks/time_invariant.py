"""Time the ops of time-invariant models against what one would write in torch.

Usage: python kernels/benchmarks/time_invariant.py [vandermonde | fft_conv | diagonal_step ...]

Each figure is the best of some calls in CPU time on one thread, so that other programs disturb it
little. Memory is what torch allocates at the peak, counted by its profiler's events.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ssmzoo_kernels import diagonal_step, fft_conv, vandermonde
from ssmzoo_kernels.fft_conv.eager import good_size

HEADS, MODES, LENGTH = 256, 64, 16384


def best(call: Callable[[], object], count: int) -> float:
    """Return the least CPU seconds of some calls."""
    call()
    found = []
    for _ in range(count):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that torch holds during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = highest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def direct(weight: Tensor, exponent: Tensor, length: int) -> Tensor:
    """Sum one complex64 exponential per head, mode and position."""
    lags = torch.arange(length)
    terms = torch.exp(exponent.to(weight.dtype)[..., None] * lags)
    return torch.einsum("hn,hnl->hl", weight, terms).real


def time_vandermonde() -> None:
    """Time kernel and gradients; the direct way runs in blocks of heads, to fit."""
    torch.manual_seed(0)
    dt = torch.exp(torch.empty(HEADS, 1, dtype=torch.float64).uniform_(-9.2, -4.6))
    exponent = torch.complex(-0.5 * dt.expand(-1, MODES), dt * 25.0 * torch.arange(MODES))
    weight = torch.randn(HEADS, MODES, dtype=torch.complex64)
    grad = torch.randn(HEADS, LENGTH)

    def both(op: Callable[..., Tensor], heads: slice) -> list[Tensor]:
        leaves = [x[heads].clone().requires_grad_() for x in (weight, exponent)]
        kernel = op(*leaves, LENGTH)
        return [kernel.detach(), *torch.autograd.grad(kernel, leaves, grad[heads])]

    every, block = slice(None), slice(0, 32)
    share = HEADS // 32
    ours, theirs = best(lambda: both(vandermonde, every), 5), best(lambda: both(direct, block), 1)
    memory = peak_bytes(lambda: both(vandermonde, every))
    direct_memory = peak_bytes(lambda: both(direct, block))
    print(f"vandermonde H={HEADS} N={MODES} L={LENGTH}, forward and backward:")
    print(
        f"  ours {ours:.3f} s, {memory / 2**20:.0f} MiB; direct {share} x {theirs:.3f} s, ", end=""
    )
    print(
        f"{share} x {direct_memory / 2**20:.0f} MiB: {share * theirs / ours:.1f} times faster ",
        end="",
    )
    print(f"in {memory / direct_memory / share:.2%} of the memory")
    few = slice(0, 4)
    exact = vandermonde(
        weight[few].to(torch.complex128), exponent[few], LENGTH, backend="reference"
    )
    for name, op in (("ours", vandermonde), ("direct", direct)):
        error = (op(weight[few], exponent[few], LENGTH) - exact).abs().max() / exact.abs().max()
        print(f"  {name}: error {error:.1e} of the largest entry")


def time_fft_conv() -> None:
    """Time the convolution and the transforms that it cannot do without."""
    for B, L, D, K in ((8, 1024, 768, 1024), (4, 2048, 256, 2048), (2, 16384, 64, 16384)):
        u, grad = torch.randn(2, B, L, D)
        leaves = [u.requires_grad_(), torch.randn(D, K).requires_grad_()]
        size = good_size(L + K - 1)
        padded, kernel = torch.randn(B, D, size), torch.randn(D, size)
        spectrum = torch.fft.rfft(padded)
        own = spectrum[0].clone()

        def bare(
            padded: Tensor = padded, kernel: Tensor = kernel, spectrum: Tensor = spectrum, n=size
        ) -> None:
            torch.fft.rfft(padded)
            torch.fft.rfft(kernel)
            torch.fft.irfft(spectrum, n=n)

        def bare_both(bare=bare, padded: Tensor = padded, own: Tensor = own, n=size) -> None:
            bare()
            bare()
            torch.fft.rfft(padded)
            torch.fft.irfft(own, n=n)

        def forward(u: Tensor = u, kernel: Tensor = leaves[1]) -> None:
            with torch.no_grad():
                fft_conv(u, kernel)

        def both(leaves: list[Tensor] = leaves, grad: Tensor = grad) -> None:
            torch.autograd.grad(fft_conv(*leaves)[0], leaves, grad)

        print(f"fft_conv B={B} L={L} D={D} K={K}:")
        for label, call, floor in (("forward", forward, bare), ("both", both, bare_both)):
            ours, theirs = best(call, 5), best(floor, 5)
            print(
                f"  {label}: {ours * 1e3:.1f} ms, bare transforms {theirs * 1e3:.1f} ms: ", end=""
            )
            print(f"{ours / theirs:.2f} times")


def time_diagonal_step() -> None:
    """Time a step on the kernel and in torch."""
    B, H, N = 1, 768, 64
    u, state = torch.randn(B, H), torch.randn(B, H, N, dtype=torch.complex64)
    decay, readout = torch.randn(2, H, N, dtype=torch.complex64)
    for backend in ("auto", "eager"):
        seconds = best(
            lambda b=backend: diagonal_step(u, state, decay, None, readout, backend=b), 200
        )
        print(f"diagonal_step B={B} H={H} N={N} {backend}: {seconds * 1e6:.0f} us")


PARTS = {
    "vandermonde": time_vandermonde,
    "fft_conv": time_fft_conv,
    "diagonal_step": time_diagonal_step,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    wanted = parser.parse_args().parts or list(PARTS)
    torch.set_num_threads(1)
    for part in wanted:
        PARTS[part]()
