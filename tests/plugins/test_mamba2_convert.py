"""Mamba2's checkpoints by three codes' configurations; transformers' model judges the logits."""

import inspect
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from ssmzoo.checkpoints.convert import to_family, to_official
from ssmzoo_linear_attention import FAMILY
from ssmzoo_linear_attention.convert_linear_attention import from_official

# 88 rows of the embedding are 80 to which theirs adds some
STATE_SPACES: dict[str, Any] = {
    "d_model": 32,
    "n_layer": 2,
    "vocab_size": 80,
    "pad_vocab_size_multiple": 11,
}
STATE_SPACES |= {"ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2}}
STATE_SPACES |= {"attn_layer_idx": [], "attn_cfg": {}, "d_intermediate": 0, "rms_norm": True}
STATE_SPACES |= {"fused_add_norm": True, "residual_in_fp32": True, "tie_embeddings": False}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 88, "head_dim": 16}
SIZES |= {"state_size": 8, "n_groups": 2, "expand": 2, "tie_word_embeddings": False}
FLA = {**SIZES, "model_type": "mamba2", "conv_kernel": 4, "use_conv_bias": True, "use_bias": False}
FLA |= {"norm_eps": 1e-5, "rmsnorm": True, "dt_limit": [0.0, float("inf")], "hidden_act": "silu"}


def stock(**fields):
    """Return transformers' model with weights that all tell."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**{**SIZES, "num_heads": 4, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.skipif(
    "group_size" not in inspect.signature(MambaRMSNormGated).parameters,
    reason="this version of transformers norms all groups of heads at once",
)
@pytest.mark.parametrize("kind", ["state-spaces", "transformers", "fla", "tied"])
@torch.no_grad()
def test_a_folder_goes_in_with_equal_logits_and_back_without_a_changed_bit(kind, tmp_path):
    theirs = stock(tie_word_embeddings=kind == "tied")
    theirs.save_pretrained(tmp_path / "theirs")
    source = dict(theirs.state_dict())
    for name in list(source):  # as the way back has it
        source[name.replace("embeddings.", "embedding.")] = source.pop(name)
    told = {"state-spaces": STATE_SPACES, "fla": FLA}.get(kind)
    if told is not None:
        (tmp_path / "theirs" / "config.json").write_text(json.dumps(told))
    folder = to_family(tmp_path / "theirs", "linear_attention", tmp_path / "ours")
    model = FAMILY.causal_lm_class.from_pretrained(folder).eval()
    ids = torch.from_numpy(np.random.default_rng(1).integers(88, size=(2, 40)))
    expected = theirs(ids).logits
    assert (model(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    from safetensors.torch import load_file

    back = load_file(to_official(folder, tmp_path / "back.safetensors"))
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in back)
    fresh = stock(tie_word_embeddings=kind == "tied", initializer_range=0.5)
    fresh.load_state_dict(back)
    assert torch.equal(fresh(ids).logits, expected)


def state_spaces(**ssm):
    return {**STATE_SPACES, "ssm_cfg": {**STATE_SPACES["ssm_cfg"], **ssm}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**STATE_SPACES, "ssm_cfg": {}}, "or an ssm_cfg of layer Mamba2, got None"),
        ({**STATE_SPACES, "attn_layer_idx": [1]}, r"attn_layer_idx of a Mamba2 must be \[\]"),
        ({**STATE_SPACES, "d_intermediate": 64}, "d_intermediate of a Mamba2 must be 0"),
        (state_spaces(d_ssm=16), "d_ssm of a Mamba2 must be null"),
        (state_spaces(rmsnorm=False), "rmsnorm of a Mamba2 must be true"),
        (state_spaces(D_has_hdim=True), "D_has_hdim of a Mamba2 must be false"),
        ({**FLA, "dt_limit": [0.0, 0.5]}, "dt_limit of a Mamba2 must be "),
        ({**FLA, "use_bias": True}, "use_bias of a Mamba2 must be false"),
        ({**FLA, "num_heads": 5}, "num_heads of a Mamba2 must be 4 to convert, got 5"),
        ({**FLA, "n_groups": None}, "config of a Mamba2 must have 'n_groups'"),
        ({**FLA, "n_groups": 3}, "num_key_heads needs to divide num_heads"),
        ({**FLA, "head_dim": "wide"}, "head_dim must be a number, got 'wide'"),
        (FLA, "missing .*'backbone.embedding.weight'"),
    ],
)
def test_what_our_layer_cannot_express_is_refused_by_the_configuration_alone(config, words):
    with pytest.raises((LookupError, TypeError, ValueError), match=words) as error:
        from_official({}, config)
    assert "\n" not in str(error.value)


def test_a_head_that_is_not_the_embedding_is_refused_where_they_are_tied():
    with pytest.raises(ValueError, match=r"lm_head.weight is not the embedding"):
        from_official(stock().state_dict(), {**FLA, "tie_word_embeddings": True})
