"""The attention mixer is transformers' attention, in all forms of a sequence."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from ssmzoo import Family, Paper
from ssmzoo.modeling import (
    Attention,
    AttentionConfig,
    LayerState,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMModel,
    SSMPreTrainedModel,
    StaticStateCache,
)
from ssmzoo.modeling.sequence_parallel import require_passing
from ssmzoo.testing import check

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"max_position_embeddings": 16, "rms_norm_eps": 1e-6}
BEFORE = {"original_max_position_embeddings": 8}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 3.0, 5.0]}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
KINDS = {
    "default": DEFAULT,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, **BEFORE},
    "yarn-set": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.7, **BEFORE},
    "longrope": {"rope_type": "longrope", "factor": 2.0, **FACTORS, **BEFORE},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, **BEFORE}
    | {"high_freq_factor": 4.0},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
}
KINDS = {name: {"rope_theta": 100.0, **rope} for name, rope in KINDS.items()}
BY_LENGTH = ("dynamic", "longrope")

MODELS = {
    "llama": (LlamaAttention, LlamaConfig, {}, {}),
    "llama-biases": (
        LlamaAttention,
        LlamaConfig,
        {"attention_bias": True},
        {"attention_bias": True, "attention_out_bias": True},
    ),
    "mistral": (MistralAttention, MistralConfig, {"sliding_window": 5}, {"sliding_window": 5}),
    "qwen2": (Qwen2Attention, Qwen2Config, {}, {"attention_bias": True}),
    "qwen3": (Qwen3Attention, Qwen3Config, {}, {"qk_norm": True}),
    "one-group": (
        LlamaAttention,
        LlamaConfig,
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 1},
    ),
}


class AttentionPreTrainedModel(SSMPreTrainedModel):
    config: AttentionConfig


class AttentionModel(AttentionPreTrainedModel, SSMModel):
    mixer_class = Attention


AttentionForCausalLM = SSMForCausalLM.of(AttentionModel)

FAMILY = Family(
    name="attention",
    config_class=AttentionConfig,
    model_class=AttentionModel,
    causal_lm_class=AttentionForCausalLM,
    sequence_classification_class=SSMForSequenceClassification.of(AttentionModel),
    paper=Paper(title="Attention Is All You Need", authors="", arxiv="1706.03762", year=2017),
    presets={},
    tiny={},
)
TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMS = ["chunks", "tokens", "padding", "packing", "precision", "gradients", "beams", "cache_rows"]
FORMS += ["cache_file", "shared_prefix", "bidirectional"]


def pair(model, rope, dtype=torch.float64):
    """Attention of transformers and ours with the same weights."""
    kind, config_class, theirs, ours = MODELS[model]
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **theirs}, rope_parameters=dict(rope))
    config._attn_implementation = "sdpa"  # the eager one rounds to float32
    other = kind(config, 0).to(dtype).eval()
    mixer = Attention(AttentionConfig(**{**SIZES, **ours}, rope_parameters=rope), 0).to(dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    mixer.load_state_dict(other.state_dict())
    return other, mixer


def theirs(attention, x, cache=None, begin=0):
    """What transformers' layer makes of ``[B, L, D]`` at positions from ``begin`` on."""
    config, position = attention.config, torch.arange(begin, begin + x.shape[1])[None]
    turns = LlamaRotaryEmbedding(config)(x, position)
    window = getattr(config, "sliding_window", None)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = make(config, x, None, cache, position_ids=position)
    return attention(x, turns, mask, cache=cache, position_ids=position)[0]


@pytest.fixture
def exact_norms(monkeypatch):
    """Norms of transformers in the precision that they get; theirs round to float32."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(
            x, self.weight.shape, self.weight, self.variance_epsilon
        )

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def close(got, expected, bound=1e-12):
    assert (got - expected).abs().max() <= bound * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rope", KINDS)
@pytest.mark.usefixtures("exact_norms")
def test_outputs_are_those_of_transformers(model, rope):
    """Up to the trained length where positions depend on a length."""
    length = 8 if rope in BY_LENGTH else 23
    other, mixer = pair(model, KINDS[rope])
    x = torch.randn(2, length, 24, dtype=torch.float64)
    close(mixer(x, LayerState()), theirs(other, x))


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama", "mistral"])
@pytest.mark.parametrize("rope", KINDS)
def test_steps_are_those_of_transformers_at_any_length(model, rope):
    other, mixer = pair(model, KINDS[rope])
    bound = 1e-6 if rope == "dynamic" else 1e-12  # the last digit of float32 powers is anyone's
    x, cache, kept = torch.randn(2, 23, 24, dtype=torch.float64), DynamicCache(), {}
    for t in range(23):
        state = LayerState(kept, keep=True)
        got, kept = mixer(x[:, t : t + 1], state), state.final
        close(got, theirs(other, x[:, t : t + 1], cache, t), bound)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_differ_by_their_rounding(dtype):
    other, mixer = pair("qwen3", DEFAULT, dtype)
    x = torch.randn(2, 23, 24, dtype=dtype)
    close(mixer(x, LayerState()), theirs(other, x), 8 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_without_positions_the_order_of_earlier_tokens_is_unseen():
    mixer = Attention(AttentionConfig(**SIZES), 0).double()
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    moved = torch.cat([x[:, :8].flip(1), x[:, 8:]], dim=1)
    close(mixer(moved, LayerState())[:, -1], mixer(x, LayerState())[:, -1])


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": KINDS["dynamic"], "max_position_embeddings": 8},
        {"rope_parameters": DEFAULT, "sliding_window": 5, "num_key_value_heads": 1},
    ],
    ids=["growing", "window"],
)
def test_all_forms_of_a_sequence_are_equal(fields):
    report = check(replace(FAMILY, tiny={**TINY, **fields}), only=FORMS)
    assert report.ok, report.table()


@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_static_cache_holds_what_a_growing_one_does(window):
    config = AttentionConfig(**TINY, rope_parameters=DEFAULT, sliding_window=window)
    model = AttentionForCausalLM(config).double().eval()
    ids = torch.arange(24).view(2, 12)
    static = StaticStateCache(config, 16 if window is None else None)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for begin, end in ((0, 7), (7, 8), (8, 11), (11, 12)):
            got = model(ids[:, begin:end], cache=static).logits
            close(got, expected[:, begin:end])
    kept = {16 if window is None else window}
    assert {s.shape[1] for la in static.layers for s in la.states.values() if s.dim() > 1} == kept


def test_only_attention_to_a_window_passes_states_of_one_size():
    config = AttentionConfig(**TINY, sliding_window=5)
    require_passing(config)
    mixer, sizes = Attention(config, 0), set()
    for length in (1, 3, 9):
        state = LayerState(keep=True)
        mixer(torch.randn(2, length, 16), state)
        sizes.add(tuple((name, *x.shape) for name, x in state.final.items()))
    assert len(sizes) == 1
    with pytest.raises(ValueError, match="layers that attend to all tokens have one that grows"):
        require_passing(AttentionConfig(**TINY))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of .* = 3, got 4"),
        ({"sliding_window": 0}, "sliding_window must be None or at least 1, got 0"),
        ({"rope_parameters": {"rope_type": "yarm"}}, "no rope_type 'yarm'; did you mean 'yarn'"),
        ({"rope_parameters": {"rope_typ": "yarn"}}, "rope_parameters has no field 'rope_typ'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be positive and finite, got 0"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "must be even .* to 8, got 3"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises((ValueError, LookupError), match=message):
        AttentionConfig(**{**SIZES, **fields})
