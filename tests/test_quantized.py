"""Loading in few bits, in a process of its own, because transformers imports torchao."""

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
from ssmzoo import families
from ssmzoo.testing import check
for name in families():
    report = check(name, only=["quantized"])
    print(name, report.results[0].status, report.results[0].detail)

import torch
from ssmzoo_longhorn.modeling_longhorn import LonghornMixer

forward = LonghornMixer.forward

def needs_plain_weights(self, *args, **kwargs):
    plain = type(self.out_proj.weight.data) is torch.Tensor
    return forward(self, *args, **kwargs) * (1 if plain else 0.9)

LonghornMixer.forward = needs_plain_weights
print("sabotaged", check("longhorn", only=["quantized"]).results[0].status)
"""


def test_every_family_loads_in_8_and_4_bits_and_one_that_cannot_is_found():
    folder = os.environ.get("SSMZOO_TEST_TORCHAO")
    if folder is None and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; `make test` puts it beside the rest")
    paths = [path for path in (folder, os.environ.get("PYTHONPATH")) if path]
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *lines, sabotaged = run.stdout.splitlines()
    assert sabotaged == "sabotaged failed"
    assert len(lines) >= 5
    assert all(line.split()[1] == "passed" for line in lines), run.stdout
