"""Checkpoints under the official Longhorn code's names: in, out, and refused."""

import numpy as np
import pytest
import torch
from tests.oracles import longhorn as oracle

from ssmzoo_longhorn import FAMILY
from ssmzoo_longhorn.convert_longhorn import from_official, to_official

CONFIG = {
    "d_model": 32,
    "n_layer": 2,
    "vocab_size": 59,
    "pad_vocab_size_multiple": 8,
    "ssm_cfg": {"d_state": 4},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "tie_embeddings": True,
}
ROWS = 64  # 59, padded to a multiple of 8


def official(d=32, layers=2, states=4, rows=ROWS):
    """Random weights under the official names and shapes; expand 2, 4 taps, rank ceil(d / 16)."""
    rng = np.random.default_rng(0)
    inner, rank = 2 * d, -(-d // 16)
    shapes = {"backbone.embedding.weight": (rows, d), "backbone.norm_f.weight": (d,)}
    for i in range(layers):
        layer = f"backbone.layers.{i}."
        shapes |= {
            layer + "norm.weight": (d,),
            layer + "mixer.in_proj.weight": (2 * inner, d),
            layer + "mixer.conv1d.weight": (inner, 1, 4),
            layer + "mixer.conv1d.bias": (inner,),
            layer + "mixer.x_proj.weight": (rank + 2 * states, inner),
            layer + "mixer.dt_head.weight": (inner, rank),
            layer + "mixer.dt_head.bias": (inner,),
            layer + "mixer.D": (inner,),
            layer + "mixer.out_proj.weight": (d, inner),
        }
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights = {name: torch.from_numpy(0.3 * value) for name, value in draws.items()}
    return weights | {"lm_head.weight": weights["backbone.embedding.weight"]}


def ours(name):
    """The table of names, written out once more: the converter must not be its own judge."""
    name = name.replace("backbone.embedding", "model.embed_tokens")
    name = name.replace("backbone.norm_f", "model.norm").replace("backbone.layers", "model.layers")
    return name.replace("dt_head.weight", "dt_proj.weight").replace("dt_head.bias", "dt_bias")


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), name


def test_official_weights_survive_the_round_trip_bit_for_bit():
    source = official()
    weights, config = from_official(source, CONFIG)
    assert_same(weights, {ours(name): value for name, value in source.items()})
    assert (config.hidden_size, config.num_hidden_layers, config.d_state) == (32, 2, 4)
    assert config.vocab_size == ROWS
    assert_same(to_official(weights, config), source)


def test_a_model_exports_itself_to_official_names_and_back():
    model = FAMILY.causal_lm_class(FAMILY.config_class(vocab_size=64, hidden_size=32, d_state=4))
    exported = to_official(model.state_dict(), model.config)
    assert "backbone.layers.23.mixer.dt_head.bias" in exported
    back, config = from_official(exported, {**CONFIG, "n_layer": 24})
    assert_same(back, dict(model.state_dict()))
    assert config.to_diff_dict() == model.config.to_diff_dict()


def test_a_quiet_start_is_exported_as_any_other_model():
    fields = {"vocab_size": 64, "hidden_size": 32, "d_state": 4, "key_init_scale": 8.0}
    model = FAMILY.causal_lm_class(FAMILY.config_class(**fields, num_hidden_layers=2))
    back, _ = from_official(to_official(model.state_dict(), model.config), CONFIG)
    assert_same(back, dict(model.state_dict()))


def test_converted_weights_load_with_a_tied_head_and_give_the_oracles_logits():
    weights, config = from_official(official(), CONFIG)
    model = FAMILY.causal_lm_class(config).eval().double()
    model.load_state_dict(weights)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    input_ids = np.random.default_rng(1).integers(59, size=(2, 12))
    arrays = {ours(name): value.double().numpy() for name, value in official().items()}
    expected = oracle.logits(arrays, config.to_dict(), input_ids)
    got = model(torch.from_numpy(input_ids)).logits.detach().numpy()
    assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize(
    "prefix", ["transformer.", "_orig_mod.", "module.", "module._orig_mod.transformer."]
)
def test_prefixes_of_wrappers_are_stripped(prefix):
    plain, _ = from_official(official(), CONFIG)
    wrapped = {prefix + name: value for name, value in official().items()}
    assert_same(from_official(wrapped, CONFIG)[0], plain)


@pytest.mark.parametrize(
    "state", [{"ssm_cfg": {}, "d_state": 4}, {"ssm_cfg": {}}, {"ssm_cfg": {"d_state": 4}}]
)
def test_the_state_size_is_found_wherever_the_official_code_left_it(state):
    _, config = from_official(official(), {**CONFIG, **state})
    assert config.d_state == 4


def test_a_missing_head_is_the_embedding_and_an_untied_one_is_kept():
    headless = official()
    head = headless.pop("lm_head.weight")
    weights, config = from_official(headless, CONFIG)
    assert config.tie_word_embeddings
    assert torch.equal(weights["lm_head.weight"], head)

    loose = official() | {"lm_head.weight": head + 1}
    weights, config = from_official(loose, {**CONFIG, "tie_embeddings": False})
    assert not config.tie_word_embeddings
    assert torch.equal(weights["lm_head.weight"], head + 1)
    with pytest.raises(ValueError, match=r"tie_embeddings is true .*lm_head\.weight"):
        from_official(loose, CONFIG)


def test_half_precision_weights_keep_their_dtype():
    source = {name: value.bfloat16() for name, value in official().items()}
    weights, config = from_official(source, CONFIG)
    assert_same(to_official(weights, config), source)


def test_a_checkpoint_of_another_model_is_refused():
    lacking = official()
    del lacking["backbone.layers.1.mixer.D"]
    with pytest.raises(LookupError, match=r"model\.layers\.1\.mixer\.D"):
        from_official(lacking, CONFIG)
    mamba = official() | {"backbone.layers.0.mixer.A_log": torch.zeros(64, 4)}
    with pytest.raises(LookupError, match="A_log"):
        from_official(mamba, CONFIG)
    with pytest.raises(ValueError, match=r"x_proj\.weight must have shape"):
        from_official(official(), {**CONFIG, "ssm_cfg": {"d_state": 5}})


@pytest.mark.parametrize(
    "field",
    [
        {"out_norm": True},
        {"transition": "exact"},
        {"use_bias": True},
        {"intermediate_size": 48},
        {"norm_type": "layer"},
        {"prenorm": False},
        {"residual": False},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_a_model_that_the_official_code_cannot_run_is_not_exported(field):
    model = FAMILY.causal_lm_class(
        FAMILY.config_class(vocab_size=64, hidden_size=32, num_hidden_layers=1, **field)
    )
    (name,) = field
    with pytest.raises(ValueError, match=name):
        to_official(model.state_dict(), model.config)
