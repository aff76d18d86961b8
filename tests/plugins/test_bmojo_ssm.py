"""B'MOJO with another family's mixer for its state-space model, alone and in a hybrid."""

import json
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import bmojo as oracle
from tests.plugins.logits import relative, tokens
from tests.plugins.test_bmojo import DELTA, NORMED
from tests.plugins.test_hybrid import (
    TINY,
    assert_drawn_alike,
    assert_forms_are_equal,
    drawn,
    section,
)
from tests.zoo import OURS

from ssmzoo import load_family
from ssmzoo.modeling import add_state_adapter, load_state_adapter
from ssmzoo.modeling.decoding import decoding_of
from ssmzoo.publishing.export_code import FindsFamiliesError, export_code
from ssmzoo.testing import FamilyConformance
from ssmzoo_bmojo import FAMILY

FAMILIES = sorted({*OURS} - {"bmojo", "hybrid", "rwkv7"})
OFFSET = {"wiring": "parallel", "use_rope": True, "fading_mode": "offset", "num_fading_tokens": 4}


def family(**fields):
    """B'MOJO with a smallest model of gated DeltaNet, norms and biases."""
    tiny = {**FAMILY.tiny, **NORMED, "ssm": DELTA, "num_hidden_layers": 2}
    # in other widths a gradient of A_log, two numbers, may exceed bfloat16's budget, as it does in
    # linear attention alone
    tiny |= {"mixer_types": ["bmojo", "bmojo_f"], "hidden_size": 40, **fields}
    targets = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
    return replace(FAMILY, tiny=tiny, lora_targets=targets)


@pytest.mark.variant
class TestChunk(FamilyConformance):
    family = family()
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestOffset(FamilyConformance):
    family = family(**OFFSET)
    oracle = staticmethod(oracle.logits)


def inside(name, **fields):
    """A model in float64 with a family's mixer inside, no parameter as it began."""
    sizes = {**TINY, **{n: x for n, x in FAMILY.tiny.items() if n not in TINY}}
    sizes |= {"ssm": {"family": name, **section(name)}, "mixer_types": ["bmojo", "bmojo_f"]}
    torch.manual_seed(0)
    return moved(FAMILY.causal_lm_class(FAMILY.config(**{**sizes, **fields}))).double()


def moved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_stands_inside_under_its_own_names_of_states(name, tmp_path):
    model, ids = inside(name, **(OFFSET if name == "rtf" else {})), tokens(2, 9)
    assert_forms_are_equal(model)
    model.save_pretrained(tmp_path)
    loaded = FAMILY.causal_lm_class.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.config.ssm == model.config.ssm
    with torch.no_grad():
        assert relative(loaded(ids).logits, model(ids).logits) <= 1e-10
        states = model(ids, use_cache=True).cache.layers[0].states
    own = load_family(name)
    fields = {**TINY, "num_hidden_layers": 2, **model.config.ssm}
    fields.pop("family")
    alone = moved(own.causal_lm_class(own.config(**fields))).double()
    with torch.no_grad():
        expected = alone(ids, use_cache=True).cache.layers[0].states
    assert {n for n in states if n.startswith("ssm_")} == {f"ssm_{n}" for n in expected}


@pytest.mark.parametrize("name", FAMILIES)
def test_its_parameters_are_drawn_as_their_family_draws_them(name):
    model = inside(name).float()
    mixer = model.model.layers[1].mixer.ssm
    own, kind = load_family(name), model.config.ssm_kind
    assert_drawn_alike(mixer, model, own.model_class(kind.config))


@pytest.mark.parametrize("fields", [{}, OFFSET])
def test_a_hybrid_may_have_it(fields, tmp_path):
    own = {**FAMILY.tiny, **NORMED, "ssm": DELTA, **fields}
    own = {name: x for name, x in own.items() if name not in TINY}
    kinds = {"bmojo": {**own, "mixer_types": "bmojo"}, "attention": {"qk_norm": True}}
    model, ids = drawn({**TINY, "mixers": ["bmojo", "attention"], "kinds": kinds}), tokens(2, 9)
    assert_forms_are_equal(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.config.kinds == model.config.kinds
    with torch.no_grad():
        assert relative(loaded(ids).logits, model(ids).logits) <= 1e-10
    fresh = type(model)(model.config).model.layers[0].mixer
    assert fresh.ssm.A_log.exp().min() >= 1  # as gated DeltaNet's, not as Mamba's
    assert not fresh.attention.q_proj.bias.any()


@torch.no_grad()
def test_a_token_of_chunk_mode_is_one_program():
    model, ids = inside("linear_attention", **NORMED).float(), tokens(2, 9)
    cache = model(ids[:, :6], use_cache=True).cache
    model(ids[:, 6:7], cache=cache)
    assert all(decoding_of(layer).step is not None for layer in model.model.layers)


def test_its_parameters_are_the_group_of_the_state_space_model():
    model = inside("linear_attention", **NORMED)
    groups = model.param_groups(lr=1e-3, weight_decay=0.1, groups={"ssm": {"lr": 5e-3}})
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[parameter] == (5e-3 if ".ssm." in name else 1e-3), name


@pytest.mark.parametrize(
    ("name", "states"),
    [("linear_attention", {"ssm_conv", "ssm_ssm"}), ("rtf", {"ssm_ring", "ssm_conv"})],
)
def test_a_state_adapter_starts_its_states_alone(name, states):
    adapter = add_state_adapter(inside(name))
    shapes = adapter._named[0]
    assert shapes.keys() == states


def test_a_state_adapter_of_an_earlier_version_has_the_defaults_of_new_fields(tmp_path):
    config = FAMILY.config(**FAMILY.tiny)
    add_state_adapter(FAMILY.causal_lm_class(config)).save_pretrained(tmp_path)
    path = tmp_path / "state_adapter.json"
    told = json.loads(path.read_text())
    for name in ("ssm", *NORMED):
        assert told["base"].pop(name) in ({}, False)
    path.write_text(json.dumps(told))
    load_state_adapter(tmp_path, FAMILY.causal_lm_class(config))
    with pytest.raises(ValueError, match="ssm"):
        load_state_adapter(tmp_path, inside("linear_attention"))


def test_its_code_does_not_travel(tmp_path):
    with pytest.raises(FindsFamiliesError, match="finds families by their names"):
        export_code(inside("longhorn"), tmp_path)


@pytest.mark.parametrize(
    ("ssm", "message"),
    [
        ({"num_heads": 2}, "^ssm must name a family in its field family, got "),
        ({"family": "longhron"}, "^ssm: no family named 'longhron'; did you mean 'longhorn'"),
        ({"family": "longhorn", "d_stat": 4}, "^ssm: LonghornConfig has no field 'd_stat'; did"),
        ({"family": "longhorn", "preset": "x"}, "^ssm: longhorn has no preset 'x'; presets"),
        ({"family": "longhorn", "hidden_size": 4}, "^ssm must not set hidden_size, which"),
        ({"family": "h3", "d_state": 3}, "^ssm: d_state must be even .*, got 3"),
        ({"family": "hybrid"}, "'hybrid', whose HybridModel has none"),
        ({"family": "attention", "sliding_window": 4}, "^ssm must be of another family, got a"),
        ({"family": "bmojo", "mixer_types": "mamba"}, "^ssm must be of another family, got a"),
        ({"family": "s4", "bidirectional": True}, "^ssm must be causal, got a mixer of s4"),
        ({"family": "dss", "kernel_variant": "softmax"}, "not depend on the sequence's length"),
        ({"family": "h3", "attn_layer_idx": [0]}, "^ssm must have a state of fixed size"),
        ({"family": "s5", "irregular_steps": True}, "^ssm must read its input alone"),
        ({"family": "rwkv7", "head_dim": 16}, "^ssm must read its input alone"),
        ("longhorn", "'ssm' expected a dict"),
    ],
)
def test_a_mixer_that_cannot_stand_inside_is_refused_in_one_line(ssm, message):
    with pytest.raises((ValueError, LookupError, StrictDataclassError), match=message):
        FAMILY.config(**{**FAMILY.tiny, "ssm": ssm})
