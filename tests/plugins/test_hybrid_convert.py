"""Dense Transformers of transformers become hybrids of attention alone, and go back."""

import functools
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import rms_norm
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

import ssmzoo.auto  # noqa: F401
from ssmzoo.cli.main import main
from ssmzoo_hybrid import FAMILY
from ssmzoo_hybrid.convert_hybrid import from_official, official_config, to_official

SIZES = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
LINEAR = {"type": "linear", "factor": 2.0}
# fields by test, the kinds that come of them, and the type that they go back to, if another
MODELS = {
    "llama": ({"rope_parameters": LLAMA3}, ["attention"] * 4, None),
    "llama-biases": (
        {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 10},
        ["attention"] * 4,
        None,
    ),
    "llama-older": (
        {"rope_scaling": LINEAR, "rope_theta": 50.0, "is_llama_config": True},
        ["attention"] * 4,
        None,
    ),
    "mistral": ({"sliding_window": 5}, ["window"] * 4, None),
    "mistral-full": ({"sliding_window": None}, ["attention"] * 4, "llama"),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
        [*["attention"] * 3, "window"],
        None,
    ),
    "qwen3": ({"head_dim": 16}, ["attention"] * 4, None),
    "smollm3": ({}, [*["attention"] * 3, "nope"], None),
    "smollm3-window": (
        {"use_sliding_window": True, "sliding_window": 5},
        [*["attention"] * 3, "window_nope"],
        None,
    ),
}
IDS = torch.arange(36).view(2, 18) * 7 % 50


def model_of(name, **fields):
    """A model of transformers; the eager attention's softmax would round to float32."""
    kind = name.split("-")[0]
    config = CONFIG_MAPPING[kind](**{**SIZES, **MODELS[name][0], **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


def run(capsys, *arguments):
    """Run the command; return its status, its output and its errors."""
    capsys.readouterr()
    return main(["convert", *map(str, arguments)]), *capsys.readouterr()


@torch.no_grad()
def gap(one, two):
    got, expected = one(IDS).logits, two(IDS).logits
    return (got - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_becomes_a_hybrid_with_equal_logits_and_goes_back(name, tmp_path, capsys):
    model = model_of(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    target, back = tmp_path / "ours", tmp_path / "back"
    status, out, err = run(capsys, tmp_path / "theirs", "--to", "hybrid", "--output", target)
    assert (status, out) == (0, f"{target}\n"), err
    ours = AutoModelForCausalLM.from_pretrained(target)
    assert ours.config.mixers == MODELS[name][1]
    assert gap(ours, model) <= 1e-5
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(IDS, **asked), model.generate(IDS, **asked))

    status, out, err = run(capsys, target, "--to", "official", "--output", back)
    assert (status, out) == (0, f"{back}\n"), err
    again = AutoModelForCausalLM.from_pretrained(back)
    assert again.config.model_type == (MODELS[name][2] or name.split("-")[0])
    expected, found = model.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert gap(again, model) == 0


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float64_are_exact(name):
    model = model_of(name).double()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:  # theirs round to float32
            norm = functools.partial(
                rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
            module.forward = norm
    weights, config = from_official(model.state_dict(), model.config.to_dict())
    ours = FAMILY.causal_lm_class(config).double().eval()
    ours.load_state_dict(weights)
    assert gap(ours, model) <= 1e-12


def test_bfloat16_stays_and_tokenizer_and_generation_come_along(tmp_path, capsys):
    model = model_of("qwen3").bfloat16()
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], max_length=19)
    model.save_pretrained(theirs)
    words = WordLevel({"a": 0, "b": 1}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(theirs)
    for source, to, target in ((theirs, "hybrid", ours), (ours, "official", back)):
        assert run(capsys, source, "--to", to, "--output", target)[0] == 0
        found = AutoModelForCausalLM.from_pretrained(target)
        assert {x.dtype for x in found.state_dict().values()} == {torch.bfloat16}
        assert found.generation_config.eos_token_id == [2, 7]
        assert found.generation_config.max_length == 19
        assert AutoTokenizer.from_pretrained(target)("b").input_ids == [1]
        assert gap(found, model) <= 16 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type of llama, mistral, .* to convert, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act of a llama must be 'silu' to convert, got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias of a llama must be False to convert, got True"),
        ({"attention_dropout": 0.1}, "attention_dropout of a llama must be 0.0 .* got 0.1"),
        ({"num_local_experts": 8}, "num_local_experts of a llama must be null .* got 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config of a llama must be null"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor of a llama must be null to convert, got 0.5",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
            "rope_parameters has no field 'mrope_section'",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4},
            "layer_types of a qwen3 must be .* got 'chunked_attention'",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false: lm_head.weight is not"),
        ({"num_hidden_layers": 3}, "unknown .*layers.3"),
        ({"intermediate_size": 39}, r"must have shape \[39, 24\], got \[40, 24\]"),
    ],
    ids=str,
)
def test_what_our_layers_have_nothing_for_is_refused(fields, message):
    model = model_of("llama")
    config = {**json.loads(model.config.to_json_string()), **fields}
    with pytest.raises((ValueError, LookupError), match=message):
        from_official(model.state_dict(), config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": ["attention", "longhorn"]}, "mixers must be of attention .* got 'longhorn'"),
        ({"norm_type": "layer"}, "the official model has norm_type='rms' only, got 'layer'"),
        ({"intermediate_size": None}, "the official model has an MLP"),
        (
            {"kinds": {"attention": {"attention_out_bias": True}}},
            "the nearest, .*, has another attention_out_bias",
        ),
        (
            {
                "mixers": ["attention", "wide"],
                "kinds": {"wide": {"family": "attention", "head_dim": 20}},
            },
            "has another head_dim",
        ),
    ],
    ids=str,
)
def test_a_hybrid_that_is_no_model_of_theirs_does_not_go_back(fields, message):
    plain = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    plain |= {"mlp_type": "swiglu", "mixers": ["attention"]}
    config = FAMILY.config(**{**plain, **fields})
    with pytest.raises(ValueError, match=message):
        official_config(config)


def test_a_hybrid_trained_here_goes_back(tmp_path):
    """Without positions and with fields that change no output."""
    section = {"num_attention_heads": 3, "attention_bias": True, "attention_out_bias": True}
    fields = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "mlp_type": "swiglu"}
    config = FAMILY.config(
        **fields, num_hidden_layers=2, mixers=["attention"], kinds={"attention": section}
    )
    torch.manual_seed(0)
    ours = FAMILY.causal_lm_class(config).eval()
    theirs = CONFIG_MAPPING["smollm3"].from_dict(official_config(config))
    model = AutoModelForCausalLM.from_config(theirs).eval()
    weights = to_official(ours.state_dict(), config)
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    assert gap(model, ours) <= 1e-5
