"""Every op with a C kernel, briefly: as exact as the reference, and what NaN and infinity reach.

``test_targets.py`` runs this file again with the kernels compiled for other targets.
"""

import functools
import os

import pytest
import torch
import torch.nn.functional as F

from ssmzoo.testing.accuracy import assert_as_accurate, outputs_and_grads
from ssmzoo_kernels import (
    causal_conv1d,
    companion_step,
    diagonal_step,
    feedback_scan,
    few_rows_linear,
    fft_conv,
    innovation,
    last_backend,
    linear_scan,
    longhorn_scan,
    native,
    selective_scan,
)

# widths and state sizes that fill no vector and no tile; B is the size of no other axis
B, L, D, N = 4, 37, 19, 21


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def pairs(*tensors):
    """Complex tensors from real pairs."""
    return [torch.view_as_complex(x.contiguous()) for x in tensors]


def convolution(x, weight, bias, state, backend):
    return causal_conv1d(x, weight, bias, state, activation="silu", backend=backend)


def complex_scan(a, b, state, backend):
    return tuple(map(torch.view_as_real, linear_scan(*pairs(a, b, state), backend=backend)))


def long_convolution(u, kernel, skip, state, future, backend):
    options = {"future_kernel": future, "backend": backend}
    return fft_conv(u, kernel, skip, state, **options)[0]


def driven_feedback(*tensors, backend):
    return feedback_scan(*tensors, backend=backend)


def without_gradients(op):
    """Let an op for inference alone pass for one whose gradients are zero."""

    @functools.wraps(op)
    def called(*tensors, backend):
        with torch.no_grad():
            found = op(*tensors, backend=backend)
        found = found if isinstance(found, tuple) else (found,)
        nothing = 0 * tensors[0].nan_to_num(posinf=0.0, neginf=0.0).sum()
        return tuple(x + nothing for x in found)

    return called


@without_gradients
def predictor(y, history, backend):
    return innovation(y, [0.5, -0.25], history, relative=True, backend=backend)[0]


@without_gradients
def one_diagonal_step(u, state, decay, drive, readout, direct, backend):
    exact = u.dtype if u.dtype is torch.float64 else torch.float32
    state, decay, drive, readout = pairs(*(x.to(exact) for x in (state, decay, drive, readout)))
    y, state = diagonal_step(u, state, decay, drive, readout, direct, backend=backend)
    return y, torch.view_as_real(state)


@without_gradients
def one_companion_step(u, a, b, d, ring, backend):
    position = torch.arange(len(u))
    return companion_step(u, ring, position, a, b, d, backend=backend)[:2]


@without_gradients
def one_linear_step(x, weight, bias, backend):
    return few_rows_linear(x, weight, bias) if backend == "cpu" else F.linear(x, weight, bias)


def hold(u, dt, A, k, q, skip, z, bias, state, backend):
    inputs = (u, dt, A, k, q, skip, z, bias, state)
    return selective_scan(*inputs, discretization="zoh", backend=backend)


def drawn():
    """Return, by name, ops of tensors and those: rows of a batch, or parameters of channels."""
    torch.manual_seed(0)
    row, keys, state = (lambda: normal(B, L, D)), (lambda: normal(B, L, N)), normal(B, D, N)
    rates = -normal(D, N).exp()
    selective = [row(), row(), rates, keys(), keys(), normal(D), row(), normal(D), state]
    feedback = [row(), rates.clamp(min=-1), normal(D, N), normal(D, N), normal(D, N), normal(D)]
    complex_a = torch.polar(normal(B, L, D).sigmoid(), normal(B, L, D))
    return {
        "causal_conv1d": (
            convolution,
            [row(), normal(D, 4), normal(D), normal(B, 3, D)],
        ),
        "linear_scan": (linear_scan, [row().sigmoid(), row(), normal(B, D)]),
        "linear_scan, complex": (
            complex_scan,
            [torch.view_as_real(complex_a), normal(B, L, D, 2), normal(B, D, 2)],
        ),
        "longhorn_scan": (
            longhorn_scan,
            [row(), keys(), keys(), row(), normal(D), normal(D), row(), state],
        ),
        "selective_scan": (selective_scan, selective),
        "selective_scan, hold": (hold, selective),
        "feedback_scan": (driven_feedback, [*feedback, None, state]),
        "feedback_scan, driven": (driven_feedback, [*feedback, row(), state]),
        "fft_conv": (
            long_convolution,
            [row(), normal(D, 23), normal(D), normal(B, 22, D), normal(D, 7)],
        ),
        "innovation": (predictor, [row(), normal(B, 2, D)]),
        "diagonal_step": (
            one_diagonal_step,
            [normal(B, D), normal(B, D, N, 2), *normal(3, D, N, 2), normal(D)],
        ),
        "companion_step": (
            one_companion_step,
            [normal(B, D), *normal(2, D, N), normal(D), normal(B, N + 1, D)],
        ),
        "few_rows_linear": (one_linear_step, [normal(B, D), normal(N, D), normal(N)]),
    }


OPS = drawn()


def on(op, backend):
    return functools.partial(op, backend=backend)


def test_the_kernels_are_compiled_for_the_target_that_was_asked_for():
    assert f"-march={os.environ.get('SSMZOO_ARCH') or 'native'}" in native._flags()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_a_kernel_is_as_exact_as_the_reference(name, dtype):
    op, inputs = OPS[name]
    assert_as_accurate(on(op, "cpu"), on(op, "reference"), inputs, dtype)
    assert last_backend(name.partition(",")[0]) == "cpu"


VALUES = [float("nan"), float("inf"), -float("inf")]


def spoilt(inputs, index):
    """Put NaN, inf and -inf into rows 0 to 2 of an input, or channels 0 to 2 of a parameter."""
    x = inputs[index].clone()
    for i, value in enumerate(VALUES):
        x[(i, *(size // 2 for size in x.shape[1:]))] = value
    return [x if i == index else other for i, other in enumerate(inputs)]


def lost(x, name):
    """Tell which numbers are not finite; of the transforms' op, which sequences of a channel."""
    bad = ~x.isfinite()
    if x.shape[-1] == 2:  # the parts of complex numbers
        bad = bad.any(-1)
    if name == "fft_conv" and x.dim() == 3:
        bad = bad.any(1)
    return bad


# feedback_scan refuses what is not finite
SPREADING = [name for name in OPS if not name.startswith("feedback_scan")]


@pytest.mark.parametrize("name", SPREADING)
def test_what_is_not_finite_reaches_what_it_reaches_in_the_reference(name, backend):
    """In outputs, exactly that; in gradients, that or more, but no other row of a batch.

    A Fourier transform spreads it over a sequence of one channel, and over no other.
    """
    op, inputs = OPS[name]
    for index, given in enumerate(inputs):
        changed = [None if x is None else x.float() for x in spoilt(inputs, index)]
        known = outputs_and_grads(on(op, "reference"), changed, torch.float32)
        for key, got in outputs_and_grads(on(op, backend), changed, torch.float32).items():
            expected, found, place = lost(known[key], name), lost(got, name), f"{index}: {key}"
            if key.startswith("output"):
                assert torch.equal(found, expected), place
            else:
                assert (found >= expected).all(), place
            if len(given) == len(got) == B:
                assert torch.equal(found[3], expected[3]), place
