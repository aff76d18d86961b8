"""Hybrids: the kit, every family beside attention, initial values, sizes, and errors.

The judge is ``tests/oracles/hybrid.py``, which composes the oracles of its layers.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import hybrid as oracle
from tests.plugins.logits import assert_left_padding_changes_nothing, relative, run, tokens
from tests.zoo import OURS

from ssmzoo import load_family
from ssmzoo.analysis.describe import describe_family
from ssmzoo.modeling import LayerState, SSMConfig
from ssmzoo.publishing.export_code import code_of
from ssmzoo.testing import FamilyConformance
from ssmzoo_hybrid import FAMILY

FOREIGN = Path(__file__).parents[1] / "foreign_families"
FAMILIES = [*sorted({*OURS} - {"hybrid"}), "gru", "leaky"]
TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
# to all tokens, with positions: the kit's is to a window, without
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
ROTARY = FAMILY.tiny["kinds"]["gated_deltanet"]


@pytest.mark.variant  # the graphs of its kinds are their families'
class TestHybrid(FamilyConformance):
    family = "hybrid"
    oracle = staticmethod(oracle.logits)


@pytest.fixture(scope="module", autouse=True)
def foreign(tmp_path_factory):
    """Somebody else's families, as pip would install them."""
    site = tmp_path_factory.mktemp("site")
    packages = ("ssmzoo_gru", "ssmzoo_leaky")
    for package in packages:
        name = package.removeprefix("ssmzoo_")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FOREIGN / name / package, site / package, ignore=ignored)
        facts = site / f"{package}-0.1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {package}\nVersion: 0.1.0\n")
        (facts / "entry_points.txt").write_text(f"[ssmzoo.families]\n{name} = {package}:FAMILY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)  # what is imported already stays: its op is registered once
        yield


def section(name):
    """The fields of a family's smallest model that are of its layers."""
    family = load_family(name)
    kind = family.config_class
    shared = {field.name for field in dataclasses.fields(SSMConfig)}
    own = {field.name for field in dataclasses.fields(kind)} - shared - kind.own_model
    found = {field: value for field, value in family.tiny.items() if field in own}
    return {**found, "mixer_types": ["swa", "bmojo"]} if name == "bmojo" else found


def beside_attention(name, dtype=torch.float64):
    """A hybrid of two layers, attention and one of a family, no parameter as it began."""
    kinds = {"attention": ATTENTION, name: section(name)}
    return drawn({**TINY, "mixers": ["attention", name], "kinds": kinds}, dtype)


def drawn(fields, dtype=torch.float64):
    model = FAMILY.causal_lm_class(FAMILY.config(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def assert_forms_are_equal(model):
    """Whole, in chunks, token by token, left-padded and packed give the same logits."""
    ids = tokens(2, 13)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        packed = torch.cat([ids[0], ids[1, :7]])[None]
        ends = torch.tensor([0, 13, 20])
        packed = model(packed, cu_seqlens=ends, use_cache=False).logits
    assert relative(packed, torch.cat([expected[0], expected[1, :7]])[None]) <= 1e-10
    got, cache = run(model, ids[:, :6])
    chunks = [got, run(model, ids[:, 6:9], cache)[0]]
    chunks += [run(model, token, cache)[0] for token in ids[:, 9:].split(1, dim=1)]
    assert relative(torch.cat(chunks, dim=1), expected) <= 1e-10
    assert_left_padding_changes_nothing(model, [13, 6])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_stands_beside_attention(name, tmp_path):
    model, ids = beside_attention(name), tokens(2, 9)
    assert_forms_are_equal(model)
    model.save_pretrained(tmp_path)
    loaded = FAMILY.causal_lm_class.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.config.kinds == model.config.kinds
    with torch.no_grad():
        assert relative(loaded(ids).logits, model(ids).logits) <= 1e-10
    options = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
    one, other = (
        torch.stack(model.generate(ids, do_sample=False, use_cache=cache, **options).logits)
        for cache in (True, False)
    )
    assert relative(one, other) <= 1e-6  # generate returns float32


@torch.no_grad()
def test_kinds_of_one_family_share_nothing():
    """Both keep the angles of a call under one name, in other sizes."""
    kinds = {"small": ROTARY, "large": {**ROTARY, "head_k_dim": 8}}
    model, ids = drawn({**TINY, "mixers": ["small", "large"], "kinds": kinds}), tokens(2, 9)
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = layer(x, LayerState())
    assert relative(model(ids).logits, model.lm_head(model.model.norm(x))) <= 1e-12


def assert_drawn_alike(mixer, *drawers):
    """Two models draw the same parameters of a mixer."""
    found = []
    for drawer in drawers:
        for module in mixer.modules():
            torch.manual_seed(0)
            drawer._init_weights(module)
        found.append({name: value.clone() for name, value in mixer.state_dict().items()})
    for parameter, value in found[1].items():
        assert torch.equal(found[0][parameter], value), parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_drawn_as_their_family_draws_them(name):
    model = beside_attention(name, torch.float32)
    mixer = model.model.layers[1].mixer
    family, kind = load_family(name), model.config.kind(name)
    assert_drawn_alike(mixer, model, family.model_class(kind.config))


SIZES = {
    "gated-deltanet-attention-125m": 121_340_808,
    "gated-deltanet-attention-350m": 350_706_064,
    "samba-421m": 421_793_280,
    "gated-deltanet-h1-0.4b": 530_764_908,
    "gated-deltanet-h1-1.3b": 1_316_608_290,
}


def test_presets_have_their_sizes():
    presets = describe_family("hybrid")["presets"]
    assert {name: preset["parameters"] for name, preset in presets.items()} == SIZES


def test_a_presets_fields_come_before_a_sections_own():
    chosen = {"family": "linear_attention", "preset": "mamba2-130m", "num_heads": 2}
    fields = {**TINY, "num_hidden_layers": 4, "mixers": ["ssd", "attention"]}
    config = FAMILY.config(**fields, kinds={"ssd": chosen})
    assert config.mixers == ["ssd", "attention"] * 2
    ssd = config.kind("ssd").config
    assert (ssd.beta, ssd.out_norm, ssd.num_heads) == ("dt", "gated_group", 2)
    assert (ssd.hidden_size, ssd.vocab_size, ssd.num_hidden_layers) == (32, 61, 4)
    assert FAMILY.config_class.from_dict(config.to_dict()).kinds == config.kinds


@pytest.mark.parametrize(
    ("kinds", "facts"),
    [
        ({"attention": {}}, {"state_grows": True, "causal": True, "use_cache": True}),
        ({"attention": {"sliding_window": 4}}, {"state_grows": False}),
        ({"s5": {"irregular_steps": True}}, {"token_inputs": ("time_steps",)}),
        ({"s4": {"bidirectional": True}}, {"causal": False}),
        ({"dss": {"kernel_variant": "softmax"}}, {"decodable": False, "use_cache": False}),
    ],
)
def test_a_hybrid_is_what_some_kind_is(kinds, facts):
    config = FAMILY.config(**TINY, mixers=["longhorn", *kinds], kinds=kinds)
    assert {name: getattr(config, name) for name in facts} == facts


def test_a_mixer_reads_token_inputs_and_a_bidirectional_one_makes_no_language_model():
    kinds = {"s5": {**section("s5"), "irregular_steps": True}}
    model, ids = drawn({**TINY, "mixers": ["longhorn", "s5"], "kinds": kinds}), tokens(2, 9)
    steps = torch.ones(2, 9, dtype=torch.float64)
    one, other = (model(ids, time_steps=s).logits for s in (steps, 2 * steps))
    assert (one - other).abs().max() > 1e-6
    config = FAMILY.config(**TINY, mixers=["s4"], kinds={"s4": {"bidirectional": True}})
    with pytest.raises(ValueError, match="its configuration is bidirectional"):
        FAMILY.causal_lm_class(config)
    assert FAMILY.sequence_classification_class(config)(ids).logits.isfinite().all()


def test_a_cache_of_other_sections_is_refused_by_the_field():
    models = [
        drawn({**TINY, "mixers": ["h3"], "kinds": {"h3": {"d_state": states}}}) for states in (4, 8)
    ]
    _, cache = run(models[0], tokens(1, 3))
    with pytest.raises(ValueError, match=r"made for kinds\.h3\.d_state = 4, got .* = 8$"):
        run(models[1], tokens(1, 1), cache)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": ["h3"] * 5}, "num_hidden_layers = 2 layers, .* divides that, got 5 names"),
        ({"mixers": []}, "got 0 names"),
        ({"mixers": "h3"}, "expected a list, got str"),
        ({"mixers": ["h3"], "kinds": {"h3_": {}}}, "mixers names, got 'h3_'; did you mean 'h3'"),
        ({"mixers": ["longhron"]}, "no kind 'longhron'; did you mean 'longhorn'"),
        ({"mixers": ["atention"]}, "no kind 'atention'; did you mean 'attention'"),
        ({"mixers": ["hybrid"]}, "'hybrid', whose HybridModel has none"),
        (
            {"kinds": {"a": {"d_state": 3}}},
            r"kinds\['a'\]: no family .*; name one in its field fam",
        ),
        (
            {"kinds": {"a": {"family": "longhron"}}},
            r"kinds\['a'\]: no family named 'longhron'; did",
        ),
        ({"kinds": {"h3": {"d_stat": 4}}}, r"kinds\['h3'\]: H3Config has no field 'd_stat'; did"),
        ({"kinds": {"h3": {"d_state": 3}}}, r"kinds\['h3'\]: d_state must be even .*, got 3"),
        ({"kinds": {"h3": {"head_dim": 5}}}, r"kinds\['h3'\]: head_dim must divide hidden_size"),
        ({"kinds": {"h3": {"d_state": "a"}}}, r"kinds\['h3'\]: [^\n]* expected int, got str"),
        ({"kinds": {"h3": {"d_model": 64}}}, r"kinds\['h3'\] must not set hidden_size, which all"),
        ({"kinds": {"h3": {"preset": "h3"}}}, r"kinds\['h3'\]: h3 has no preset 'h3'.*; presets"),
        ({"kinds": {"coffee": {"head": "linear"}}}, "must not set head, which coffee's own model"),
        ({"kinds": {"spacetime": {"horizon": 2}}}, "must not set horizon"),
        ({"mixers": ["h3"], "dropout": 2.0}, "^dropout must be at least 0 and below 1, got 2.0"),
    ],
)
def test_a_bad_configuration_is_one_clear_error(fields, message):
    fields = {"mixers": list(fields.get("kinds", ())), **fields}
    with pytest.raises((ValueError, LookupError, StrictDataclassError), match=message):
        FAMILY.config(**{**TINY, **fields})


def test_code_that_finds_families_by_name_does_not_travel():
    with pytest.raises(ValueError, match="finds families by their names"):
        code_of(FAMILY)
