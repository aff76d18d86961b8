"""companion_step's Triton kernel against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own,
where ``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
import triton
from tests.kernels.interpreter import repair

from ssmzoo_kernels import companion_step, last_backend
from ssmzoo_kernels.companion_step import triton as companion_triton

repair()


def draw(order, batch, width, denominators, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch, width),
        (batch, order + 1, width),
        (denominators, order),
        (width, order),
        (width,),
    )
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def assert_steps_alike(order, batch, width, denominators, dtype, position):
    u, ring, *coefficients = draw(order, batch, width, denominators, dtype)
    wide = [x.double() for x in (u, ring, *coefficients)]
    exact = companion_step(*wide[:2], position, *wide[2:], backend="reference")
    got = companion_step(u, ring, position, *coefficients, backend="triton")
    assert last_backend("companion_step") == "triton"
    assert torch.equal(got[2], exact[2])
    for name, x, truth in zip(("y", "ring"), got, exact, strict=False):
        assert x.dtype is dtype, name
        if not truth.numel():
            continue
        error = (x.double() - truth).abs().max() / truth.abs().max()
        assert error <= 1e-6 * (torch.finfo(dtype).eps / 2**-23), f"{name}: {error:.1e}"


@pytest.mark.parametrize("order", [1, 2, 3, 7, 16, 17, 37])
def test_every_position_of_the_ring(order):
    assert_steps_alike(order, order + 1, 4, 2, torch.float32, torch.arange(order + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("order", "width"), [(0, 3), (300, 5), (520, 2), (5, 130)])
def test_blocks_of_states_and_ragged_channels(order, width, dtype):
    position = torch.tensor([0, order])
    assert_steps_alike(order, 2, width, 1, dtype, position)


def test_positions_count_modulo_the_places():
    assert_steps_alike(5, 4, 3, 3, torch.float32, torch.tensor([-1, -6, 6, 13]))


def test_no_rows_and_no_channels():
    for batch, width in ((0, 4), (2, 0)):
        u, ring, a, b, d = draw(3, batch, width, 1, torch.float32)
        position = torch.zeros(batch, dtype=torch.int64)
        y, _, _ = companion_step(u, ring, position, a, b, d, backend="triton")
        assert y.shape == (batch, width)


def test_this_process_interprets():
    assert not isinstance(companion_triton.companion_step_kernel, triton.JITFunction)
