"""gated_linear_attention's Triton kernels against the reference in Triton's interpreter.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels import contracts
from tests.kernels.interpreter import repair

from ssmzoo.testing.ops import Case
from ssmzoo_kernels import gated_linear_attention
from ssmzoo_kernels.gated_linear_attention import triton as attention_triton

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

repair()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SMALL = {"B": 1, "G": 1, "H": 2, "K": 3, "V": 18}
CONTRACTS = {1: contracts.GatedLinearAttention, 3: contracts.RowwiseGatedLinearAttention}
EACH = pytest.mark.parametrize("rows", CONTRACTS)
RULES = pytest.mark.parametrize("rule", ["additive", "delta"])


def judge(rows, rule, dtype=torch.float32, absent=(), packed=None, **sizes):
    """Hold outputs and gradients to the reference's error; of some tokens, or packed ones."""
    contract = CONTRACTS[rows]()
    tensors = contract.draw(packed=packed, **{**SMALL, "E": rows, **sizes})
    tensors |= dict.fromkeys(absent)
    options = {}
    if packed is not None:
        options["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0)
    contract.judge(tensors, Case("triton", rule), dtype, **options)


@EACH
@RULES
@pytest.mark.parametrize("length", [1, 17, 35])
def test_lengths_around_chunks_equal_the_loop(rows, rule, length):
    judge(rows, rule, L=length)


@EACH
@RULES
def test_packed_sequences_equal_the_loop(rows, rule):
    judge(rows, rule, packed=(0, 1, 16, 18, 0, 5))


@pytest.mark.parametrize(("rows", "keys", "length"), [(1, 70, 90), (3, 40, 50)])
def test_several_chunks_between_saved_states_equal_the_loop(rows, keys, length):
    """And states of so many rows that several programs find their gradients."""
    judge(rows, "delta", L=length, K=keys, H=1, G=1, V=4, E=1 if rows == 1 else keys)


@EACH
@RULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_equal_the_loop(rows, rule, dtype):
    judge(rows, rule, dtype, L=19)


@RULES
def test_longer_chunks_of_bfloat16_equal_the_loop(monkeypatch, rule):
    seen = []
    tile = attention_triton.tile
    monkeypatch.setattr(attention_triton, "tile", lambda *x: seen.append(tile(*x)) or seen[-1])
    monkeypatch.setitem(contracts.GatedLinearAttention.forms, rule, {"rule": rule, "chunk": 64})
    judge(1, rule, torch.bfloat16, L=70)
    assert {x.tokens for x in seen} == {32}


@RULES
def test_all_that_is_optional_may_be_absent(rule):
    judge(1, rule, absent=("log_decay", "beta", "initial_state"), L=18)


def test_several_heads_share_a_group():
    judge(1, "delta", L=18, G=2, H=4)


@EACH
@RULES
def test_one_token_of_every_sequence_equals_the_loop(rows, rule):
    tensors = CONTRACTS[rows]().draw(**{**SMALL, "B": 3, "L": 1, "E": rows}, dtype=torch.float32)
    found, expected = (
        gated_linear_attention(**tensors, rule=rule, backend=x) for x in ("triton", "reference")
    )
    for got, known in zip(found, expected, strict=True):
        torch.testing.assert_close(got, known)


@triton.jit
def everlasting(logs, C: tl.constexpr):
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row >= column, 1.0, 0.0)


def test_pairs_that_forget_nothing_are_noticed(monkeypatch):
    monkeypatch.setattr(attention_triton, "between", everlasting)
    with pytest.raises(AssertionError, match="exceeds"):
        judge(1, "additive", L=17)


def test_this_process_interprets():
    assert not isinstance(attention_triton.march_kernel, triton.JITFunction)
