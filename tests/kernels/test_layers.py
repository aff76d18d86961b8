"""``ssmzoo_kernels.layers``: transformers' functions and kernel slots on our ops."""

import importlib
import inspect

import pytest
import torch
from transformers.integrations import hub_kernels

from ssmzoo_kernels import layers
from ssmzoo_kernels.layers.linear_attention import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)
from ssmzoo_kernels.layers.selective_scan import mamba_inner_fn

# by slot, where transformers' own function for it stands, and a second one that shares the slot
THEIRS = {
    "causal_conv1d_fn": ("mamba", "causal_conv1d_fn"),
    "causal_conv1d_update": ("mamba", "causal_conv1d_update"),
    "selective_scan_fn": ("mamba", "mamba_selective_scan"),
    "selective_state_update": ("mamba", "mamba_selective_state_update"),
    "mamba_chunk_scan_combined": ("mamba2", "mamba2_chunk_scan"),
    "chunk_gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention"),
    "fused_recurrent_kda": ("kimi_linear", "recurrent_kimi_delta_attention"),
}
B, L, D, N, H, K, V = 2, 21, 6, 4, 2, 8, 6


def theirs(slot, other=None):
    model, name = other or THEIRS[slot]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return inspect.unwrap(getattr(module, name))


def drawn(*sizes):
    draw = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


def scan_inputs():
    u, dt, z, B_, C = drawn((B, D, L), (B, D, L), (B, D, L), (B, N, L), (B, N, L))
    A, D_, bias = drawn((D, N), (D,), (D,))
    return {
        **{"hidden_states": u, "dt": dt, "A": -A.exp(), "B": B_, "C": C, "D": D_, "z": z},
        **{"delta_bias": bias, "delta_softplus": True, "return_last_state": True},
    }


def step_inputs():
    state, u, dt, z, B_, C = drawn((B, D, N), (B, D), (B, D), (B, D), (B, N), (B, N))
    A, D_, bias = drawn((D, N), (D,), (D,))
    given = {"state": state, "hidden_states": u, "dt": dt, "A": -A.exp(), "B": B_, "C": C}
    return {**given, "D": D_, "z": z, "dt_bias": bias, "dt_softplus": True}


def mamba2_step_inputs():
    state, x, dt, B_, C = drawn((B, H, V, K), (B, H, V), (B, H, 1), (B, 1, K), (B, 1, K))
    A, D_, bias = drawn((H,), (H, 1), (H, 1))
    spread = {"dt": dt.expand(-1, -1, V), "D": D_.expand(-1, V), "dt_bias": bias.expand(-1, V)}
    given = {"state": state, "hidden_states": x, "B": B_, "C": C, "dt_softplus": True, **spread}
    return {**given, "A": -A.exp()[:, None, None].expand(-1, V, K)}


def mamba2_inputs():
    x, dt, B_, C, state = drawn((B, L, H, V), (B, L, H), (B, L, 1, K), (B, L, 1, K), (B, H, V, K))
    A, D_, bias = drawn((H,), (H,), (H,))
    given = {"hidden_states": x, "dt": dt, "A": -A.exp(), "B": B_, "C": C, "D": D_}
    limits = {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
    return {**given, **limits, "dt_bias": bias, "chunk_size": 16, "initial_states": state}


def delta_inputs(per_row):
    rates = (B, L, H, K) if per_row else (B, L, H)
    groups = H if per_row else 1
    q, k, v, g, beta, state = drawn(
        (B, L, groups, K), (B, L, groups, K), (B, L, H, V), rates, (B, L, H), (B, H, K, V)
    )
    return {
        **{"query": q, "key": k, "value": v, "g": -g.exp(), "beta": beta.sigmoid()},
        **{"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True},
    }


def conv_inputs():
    x, weight, bias = drawn((B, D, L), (D, 4), (D,))
    return {"hidden_states": x, "weight": weight, "bias": bias, "activation": "silu"}


def conv_step_inputs():
    x, state, weight, bias = drawn((B, D, 1), (B, D, 4), (D, 4), (D,))
    given = {"hidden_states": x, "conv_state": state, "weight": weight, "bias": bias}
    return {**given, "activation": "silu"}


CASES = {
    "causal_conv1d_fn": conv_inputs,
    "causal_conv1d_update": conv_step_inputs,
    "selective_scan_fn": scan_inputs,
    "selective_state_update": step_inputs,
    "mamba_chunk_scan_combined": mamba2_inputs,
    "chunk_gated_delta_rule": lambda: delta_inputs(per_row=False),
    "fused_recurrent_gated_delta_rule": lambda: delta_inputs(per_row=False),
    "chunk_kda": lambda: delta_inputs(per_row=True),
    "fused_recurrent_kda": lambda: delta_inputs(per_row=True),
}


def results(function, inputs):
    """Return what a call returns and what it writes into a state, all as float32 inputs give."""
    inputs = {
        name: x.float().clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    found = function(**inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    return found + [inputs[name] for name in ("state", "conv_state") if name in inputs]


def check(layer, function, inputs):
    for ours, expected in zip(results(layer, inputs), results(function, inputs), strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_every_slot_of_these_functions_is_served():
    assert layers.SLOTS.keys() == THEIRS.keys() == CASES.keys()
    source = inspect.getsource(hub_kernels)
    assert all(f'"{slot}": {{' in source for slot in layers.SLOTS)


@pytest.mark.parametrize("slot", CASES)
def test_a_layer_is_what_a_slot_takes_and_gives_what_transformers_gives(slot):
    layer = getattr(layers, slot)
    assert {*vars(layer)} <= {"forward", "__module__", "__doc__"}  # a slot takes no state
    taken = [*inspect.signature(layer.forward).parameters.values()][1:]
    expected = [*inspect.signature(theirs(slot)).parameters.values()]
    assert [(p.name, p.kind) for p in taken] == [(p.name, p.kind) for p in expected]
    check(layer(), theirs(slot), CASES[slot]())


def test_the_slot_of_single_steps_serves_mamba2_too():
    function = theirs("", ("mamba2", "mamba2_selective_state_update"))
    check(layers.selective_state_update(), function, mamba2_step_inputs())


@pytest.mark.parametrize("slot", ["causal_conv1d_fn", "selective_scan_fn", "chunk_kda"])
def test_packed_sequences_are_kept_apart(slot):
    layer, inputs = getattr(layers, slot)(), CASES[slot]()
    inputs.pop("initial_state", None)
    along = 1 if slot == "chunk_kda" else 2

    def part(begin, end):
        return {
            name: x.narrow(along, begin, end - begin) if _is_sequence(x, along) else x
            for name, x in inputs.items()
        }

    def first(**more):
        found = layer(**more)
        return found[0] if isinstance(found, tuple) else found

    alone = torch.cat([first(**part(0, 8)), first(**part(8, L))], along)
    numbers = (torch.arange(L) >= 8).int().expand(B, L)
    assert (first(**inputs, seq_idx=numbers) - alone).abs().max() <= 1e-9
    cu_seqlens = torch.tensor([0, 8, L, L + 8, 2 * L])
    assert (first(**inputs, cu_seqlens=cu_seqlens) - alone).abs().max() <= 1e-9


def _is_sequence(x, along):
    return isinstance(x, torch.Tensor) and x.dim() > along and x.shape[along] == L


def test_what_the_functions_do_not_serve_is_refused():
    with pytest.raises(ValueError, match="activation must be silu, swish or None, got 'gelu'"):
        layers.causal_conv1d_fn()(**{**conv_inputs(), "activation": "gelu"})
    with pytest.raises(NotImplementedError, match="delta_softplus must be True"):
        layers.selective_scan_fn()(**{**scan_inputs(), "delta_softplus": False})
    with pytest.raises(NotImplementedError, match="dt_softplus must be True"):
        layers.selective_state_update()(**{**step_inputs(), "dt_softplus": False})
    x, weight = torch.ones(1, 4, 3), torch.ones(2, 3)
    mixer = x, weight[:, None], None, torch.ones(4, 2), torch.ones(2, 2), torch.ones(2, 2), None
    for name, wrong in (("delta_softplus", False), ("B", x), ("C", x)):
        with pytest.raises(NotImplementedError, match=f"mamba_inner_fn: .*{name}"):
            mamba_inner_fn(*mixer, -torch.ones(2, 1), **{name: wrong})
    rows, step = torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2)
    with pytest.raises(NotImplementedError, match="mamba2_chunk_scan: z must be None"):
        mamba2_chunk_scan(rows, step, -torch.ones(2), rows, rows, 2, z=rows)


def test_a_step_of_mamba2_takes_tensors_whose_rows_lie_apart():
    state, x, dt = torch.randn(2, 4, 3, 5), torch.randn(2, 3, 4).mT, torch.rand(2, 4, 3)
    A, keys = -torch.rand(4, 3, 5), torch.randn(2, 5, 2).mT
    results = []
    for given in ((x, dt, A, keys, keys), (x.contiguous(), dt, A, *[keys.contiguous()] * 2)):
        own = state.clone()
        results.append((mamba2_selective_state_update(own, *given), own))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
