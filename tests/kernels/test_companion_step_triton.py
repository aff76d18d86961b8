"""companion_step's Triton kernel: interpreted, compiled for absent GPUs, and on a real one."""

import pytest
import torch

from ssmzoo_kernels import companion_step, last_backend

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("width", "order", "rows"), [(768, 64, 8), (77, 37, 38), (256, 2048, 2)])
def test_the_kernel_on_a_gpu_equals_the_reference(width, order, rows):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    u, ring, a, b, d = (
        normal(rows, width),
        normal(rows, order + 1, width),
        normal(1, order),
        normal(width, order),
        normal(width),
    )
    position = torch.arange(rows, device="cuda") % (order + 1)
    wide = (u.double(), ring.double(), position, a.double(), b.double(), d.double())
    exact = companion_step(*wide, backend="reference")
    got = companion_step(u, ring, position, a, b, d)
    assert last_backend("companion_step") == "triton"
    for x, truth in zip(got[:2], exact[:2], strict=True):
        assert (x.double() - truth).abs().max() <= 1e-6 * truth.abs().max()
