"""Loading in few bits, in a process of its own, because transformers imports torchao."""

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
from ssmzoo.cli.main import main

assert main(["generate", "nobody/nothing", "x"]) == 2  # one line: nothing of torchao's before it

from tests.plugins.sabotage import MISTAKES, NARROW

from ssmzoo import families
from ssmzoo.testing import check

assert len(families()) >= 5
for name in families():
    report = check(name, only=["quantized"])
    assert report.results[0].status == "passed", report.table()
for name, row in {**NARROW, **MISTAKES}.items():
    if "quantized" in (row.fails or {name}):
        report = row.report(["quantized"])
        assert report.results[0].status == "failed", f"{name}: {report.table()}"

import copy

import torch
from tests.stock_models import tiny
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

from ssmzoo import accelerate

# transformers' own keep the bits of their quantised layers, whenever they are accelerated; stock
# Mamba itself cannot run so
for name in ("mamba", "mamba2", "kimi_linear"):
    ids, found = torch.arange(3, 12)[None], []
    for when in ("never", "before", "after"):
        model = tiny(name)
        if when == "before":
            accelerate(model)
        exact = model(ids, use_cache=False).logits
        quantize_(model, Int8WeightOnlyConfig())
        if when == "never":  # the judge: plain layers of the same weights
            for layer in model.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight = torch.nn.Parameter(layer.weight.dequantize())
        if when == "after":
            accelerate(model)
        found.append(model(ids, use_cache=False).logits)
    judge, *ours = found
    lost = (judge - exact).abs().max()
    assert lost > 1e-3, name
    assert all((logits - judge).abs().max() < 1e-2 * lost for logits in ours), name

# tokens decode by programs that read the few bits, and by plain layers once something wraps these
from ssmzoo import load_family
from ssmzoo_kernels.dispatch import use_backend, watch


def decoded(model, ids):
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).cache
        tokens = ids[:, 4:].split(1, dim=1)
        return torch.cat([model(t, cache=cache).logits for t in tokens], dim=1)


family = load_family("bmojo")  # whose memories are often of no tokens
model = family.causal_lm_class(family.config(**family.tiny)).eval()
ids = torch.arange(3, 23)[None]
exact = decoded(model, ids)
quantize_(model, Int8DynamicActivationInt8WeightConfig())
assert (decoded(model, ids) - exact).abs().max() <= 0.1 * exact.abs().max()

four, rows = (
    IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity)
    for granularity in (PerGroup(32), PerAxis(0))
)
for name, config in (
    *((name, Int8WeightOnlyConfig()) for name in ("longhorn", "coffee", "rtf")),
    ("longhorn", rows),
    ("longhorn", four),
    ("rtf", four),
):
    family = load_family(name)
    wide = {"hidden_size": 64} if config is four else {}
    model = family.causal_lm_class(family.config(**{**family.tiny, **wide})).eval()
    ids = torch.arange(3, 15)[None]
    unquantized = decoded(model, ids)
    if config is four:  # others keep float32
        quantize_(model, config, lambda m, _: getattr(m, "in_features", 1) % 32 == 0)
    else:
        quantize_(model, config)
    judge = copy.deepcopy(model)
    for layer in judge.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(layer.weight.dequantize())
    with watch() as ran:
        ours = decoded(model, ids)
    assert {("token_step", "cpu"), ("few_rows_linear", "cpu")} <= set(ran), name
    exact = decoded(judge, ids)
    allowed = 1e-5 * exact.abs().max()
    allowed += (exact - unquantized).abs().max() / 100  # inputs are rounded to 16 bits
    assert (ours - exact).abs().max() <= allowed, name
    linear = next(
        m
        for n, m in model.named_modules()
        if ".layers." in n and hasattr(getattr(m, "weight", None), "scale")
    )
    linear.weight.scale.mul_(2)
    assert (decoded(model, ids) - exact).abs().max() > 1e-3 * exact.abs().max(), name
    other = copy.deepcopy(model)  # with other numbers
    quantized = [m.weight for m in other.modules() if hasattr(getattr(m, "weight", None), "scale")]
    for weight in quantized:
        weight.scale.mul_(1.5)
    model.load_state_dict(other.state_dict())
    ours, exact = decoded(model, ids), decoded(other, ids)
    assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max(), name
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(1))
    decoded(model, ids)
    assert len(seen) == 1 + 8, name

# loaded as the page says, and saved
import tempfile

from transformers import AutoModelForCausalLM, TorchAoConfig

with tempfile.TemporaryDirectory() as folder:
    family = load_family("longhorn")
    wide = family.config(**{**family.tiny, "hidden_size": 64})
    family.causal_lm_class(wide).save_pretrained(folder)
    config = TorchAoConfig(four, modules_to_not_convert=[r".*dt_proj"])
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    kinds = {type(m.weight).__name__ for m in loaded.modules() if hasattr(m, "weight")}
    assert kinds == {"IntxUnpackedToInt8Tensor", "Parameter"}, kinds
    with watch() as ran:
        logits = decoded(loaded, ids)
    assert ("token_step", "cpu") in ran
    loaded.save_pretrained(folder + "/again")
    assert decoded(AutoModelForCausalLM.from_pretrained(folder + "/again"), ids).equal(logits)

# what nobody counts the changes of, and what has a zero point, is torchao's own affair
from ssmzoo_kernels.few_rows_linear import few_bits

with torch.inference_mode():
    layer = torch.nn.Linear(64, 8)
    quantize_(layer, four)
    assert few_bits(layer.weight) is None
    whole = family.causal_lm_class(wide).eval()
    unquantized = decoded(whole, ids)
    quantize_(whole, Int8WeightOnlyConfig())
with watch() as ran:
    logits = decoded(whole, ids)
assert ("token_step", "cpu") in ran  # 8 bits are no copy: nobody has to count
with use_backend("eager"):
    own = decoded(whole, ids)
assert (own - logits).abs().max() <= (own - unquantized).abs().max() / 100
layer = torch.nn.Linear(64, 8)
quantize_(layer, four)
assert few_bits(layer.weight) is not None
layer.weight.zero_point.add_(1)
assert few_bits(layer.weight) is None

# nor does a program stay that was written before
model = family.causal_lm_class(wide).eval()
quantize_(model, four, lambda _, name: name.endswith("in_proj"))
before = decoded(model, ids)
for block in model.model.layers:
    block.mixer.in_proj.weight.zero_point.add_(1)
with use_backend("eager"):
    own = decoded(model, ids)
assert (own - before).abs().max() > 1e-3
assert (decoded(model, ids) - own).abs().max() <= 1e-5
"""


@pytest.mark.long
def test_every_family_loads_in_8_and_4_bits_and_those_that_cannot_are_found():
    folder = os.environ.get("SSMZOO_TEST_TORCHAO")
    if folder is None and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; `make test` puts it beside the rest")
    paths = [path for path in (folder, os.environ.get("PYTHONPATH")) if path]
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("ssmzoo: error: no folder 'nobody/nothing' here")
