"""companion_step's Triton kernel: interpreted, compiled for absent GPUs, and on a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssmzoo_kernels import companion_step, last_backend

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


def run(command, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_interpreted_kernel_equals_the_reference():
    file = str(HERE / "interpreted_companion.py")
    options = ("-q", "-p", "no:cacheprovider", "--tb=short")
    out = run(["-m", "pytest", file, *options], TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


def test_the_kernel_compiles_without_spills():
    records = [json.loads(x) for x in run([str(HERE / "compiled_companion.py")]).splitlines()]
    assert {(r["case"], r["target"]) for r in records} == {
        (case, target)
        for case in ("hyena_rtf", "small", "path_x", "ragged", "float64")
        for target in ("sm_80", "sm_90")
    }
    for record in records:
        assert record["stack"] == record["local"] == 0, f"registers spilled: {record}"
        assert record["registers"] <= 255, record
        assert record["shared"] <= 48 * 1024, record


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
