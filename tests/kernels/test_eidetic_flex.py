"""eidetic_attention on torch's flex_attention: its mask against the loop, and what it refuses."""

import itertools
import shutil

import pytest
import torch
from tests.kernels.test_eidetic_attention import (
    LAYOUTS,
    assert_as_exact_as_torch,
    assert_equals_the_loop,
    assert_same,
    draw,
)

from ssmzoo_kernels import eidetic_attention, last_backend
from ssmzoo_kernels.eidetic_attention import flex

# torch warns as it traces: of scores written out, of gradients that it looks for, of its own past
pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:The .grad attribute of a Tensor",
    "ignore::DeprecationWarning",
)


@pytest.fixture
def uncompiled(monkeypatch):
    """Let torch write flex_attention's scores out, in float64 and with gradients."""
    from torch.nn.attention import flex_attention as theirs

    monkeypatch.setattr(theirs, "_validate_device", lambda *_: None)
    functions = theirs.create_block_mask, theirs.flex_attention
    monkeypatch.setattr(flex, "_compiled", lambda device: functions)
    monkeypatch.setattr(flex, "_check", lambda tensors: None)


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.long
def test_flex_equals_the_loop_with_all_gradients(uncompiled, layout, mask, late):
    assert_equals_the_loop(draw(layout, mask=mask, late=late), "flex")


@pytest.mark.parametrize("layout", ["batch that goes on", "packed that goes on"])
@pytest.mark.parametrize(("window", "memory"), [(1, 3), (5, 0), (16, 3), (None, 0)])
def test_flex_takes_windows_and_memories_of_any_size(uncompiled, layout, window, memory):
    call = draw(layout, memory=memory, window=window or 12)
    call["window"] = window
    assert_equals_the_loop(call, "flex")


@pytest.mark.parametrize("width", [64, 96, 128])
def test_flex_with_wide_heads_is_as_exact_as_torch(uncompiled, width):
    assert_as_exact_as_torch("flex", width, torch.float32)


@torch.no_grad()
def test_flex_reads_no_row_that_holds_nothing(uncompiled):
    call = draw("packed that goes on", dtype=torch.float32)
    call["mem_count"] = call["mem_count"].clamp(max=1)
    expected = eidetic_attention(**call, backend="reference")
    # a memory of no chunk, which holds something
    call["mem_count"] = torch.cat([call["mem_count"], torch.ones(1, dtype=torch.int64)])
    for name in ("mem_k", "mem_v"):
        call[name] = torch.cat([call[name], torch.full_like(call[name][:1], torch.nan)])
    for name, (s, seen) in itertools.product(("past_k", "past_v"), enumerate(call["seen"])):
        call[name].detach()[s, : max(0, 4 - seen)] = torch.nan
    for name in ("mem_k", "mem_v"):
        call[name].detach()[:, 1:] = torch.nan
    got = eidetic_attention(**call, backend="flex")
    assert (got - expected).abs().max() <= 64 * 2**-24 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles flex_attention with g++")
@torch.no_grad()
def test_flex_compiles_and_errs_as_its_rounding_does():
    call = draw("packed that goes on", mask=True, late=True, dtype=torch.float32)
    exact = draw("packed that goes on", mask=True, late=True)
    got = eidetic_attention(**call, backend="flex")
    assert last_backend("eidetic_attention") == "flex"
    # scores of 8 products and sums over at most a dozen keys
    expected = eidetic_attention(**exact, backend="reference")
    assert_same({"out": got}, {"out": expected}, 64 * 2**-24)


def test_flex_on_a_cpu_says_what_it_does_not_take(monkeypatch):
    q = torch.zeros(1, 3, 2, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16 tensors, got torch.float64"):
        eidetic_attention(q, q, q, window=2, backend="flex")

    def fail(*_, **__):
        raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no g++\nat all"), None)

    monkeypatch.setattr(flex, "_compiled", lambda device: (fail, fail))
    q = q.float()
    with pytest.raises(RuntimeError, match=r'use backend="eager" \(.*no g\+\+ at all'):
        eidetic_attention(q, q, q, window=2, backend="flex")
