"""H3: golden checks on the whole model, its hybrids with attention, and official checkpoints.

The judge is ``tests/oracles/h3.py``, float64 numpy from the paper alone.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.oracles import h3 as oracle
from tests.plugins.logits import relative

from ssmzoo.analysis.describe import describe_family
from ssmzoo.modeling import LayerState
from ssmzoo.testing import FamilyConformance, check
from ssmzoo_h3 import FAMILY
from ssmzoo_h3.convert_h3 import from_official

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 3, "d_state": 6}
HYBRID = {**TINY, "attn_layer_idx": [1], "num_attention_heads": 2}
ROTARY = {**HYBRID, "attn_layer_idx": [0, 2], "rotary_dim": 4, "head_dim": 3}
PAPER = {**HYBRID, "norm_type": "layer", "intermediate_size": 48}
MIXER = "model.layers.0.mixer."


class TestH3(FamilyConformance):
    family = "h3"
    oracle = staticmethod(oracle.logits)


# which see nothing in a hybrid that they do not see in the family's own model
SAME = ("compile", "trainer", "fullgraph", "lora", "lora_all_linear", "standalone", "quantized")
SAME += ("lora_parameters", "jit_trace")


def conforms(fields, **chosen):
    family = replace(FAMILY, tiny={**fields, "vocab_size": 96, "dt_min": 0.02, "dt_max": 0.5})
    report = check(family, oracle=oracle.logits, **chosen)
    assert report.ok, report.table()


@pytest.mark.long
def test_hybrids_keep_all_promises_that_a_growing_cache_allows():
    conforms(ROTARY, skip=["cache_precision", "export", "onnx", *SAME])


@pytest.mark.long
def test_hybrids_without_positions_keep_the_promises_of_values():
    """The bias of their keys cancels in the softmax: its gradient is zero, all else rounding."""
    names = ["oracle", "precision", "causality", "batch", "beams", "assisted", "chunked_prefill"]
    conforms(PAPER, only=[*names, "cache_rows", "cache_file", "prompt_state"])


def build(dtype=torch.float64, stirred=True, **fields):
    """A model; stirred, its parameters have left their initial values."""
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config_class(**{**TINY, **fields})).to(dtype).eval()
    if stirred:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def arrays(model):
    return {name: x.detach().double().numpy() for name, x in model.state_dict().items()}


def mixed(mixer, x, *cuts):
    """Outputs of a mixer whose input is cut, and the states that it leaves."""
    outputs, kept = [], {}
    for piece in torch.tensor_split(x, cuts, dim=1):
        state = LayerState(initial=kept, keep=True)
        outputs.append(mixer(piece, state))
        kept = state.final
    return torch.cat(outputs, dim=1), kept


# --- the layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"head_dim": 4}, {"head_dim": 12}, PAPER, ROTARY, {"d_state": 2}, {"disc": "zoh"}],
    ids=str,
)
def test_every_setting_matches_the_oracle(fields):
    model = build(**fields)
    ids = torch.arange(22).view(2, 11) % 61
    expected = oracle.logits(arrays(model), model.config.to_dict(), ids.numpy())
    with torch.no_grad():
        assert relative(model(ids, use_cache=False).logits, expected) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("disc", ["bilinear", "zoh"])
@pytest.mark.parametrize("size", [1, 4])
def test_any_cuts_leave_the_outputs_and_states_of_the_recurrence(size, disc):
    model = build(head_dim=size, disc=disc)
    mixer, x = model.model.layers[0].mixer, torch.randn(2, 30, 12, dtype=torch.float64)
    expected, kept = mixed(mixer, x)
    weights = arrays(model)
    k, v = (oracle.linear(weights, f"{MIXER}{name}_proj", x.numpy()) for name in "kv")
    assert relative(kept["shift"], k[:, -5:]) <= 1e-15
    k = oracle.shift_ssm(k, *(weights[f"{MIXER}shift_{name}"] for name in "BCD"))
    k, v = (z.reshape(2, 30, -1, size) for z in (k, v))
    decay = np.exp(mixer.modes()[0].numpy())
    z = np.zeros((2, size, size, 12 // size, 3), dtype=complex)
    for t in range(30):
        z = decay * z + np.einsum("bhi,bhj->bijh", k[:, t], v[:, t])[..., None]
    assert kept["ssm"].shape == (2, size * size, 12 // size, 3, 2)
    assert relative(kept["ssm"].flatten(), np.stack([z.real, z.imag], -1).ravel()) <= 1e-12
    for cuts in ((1,), (9, 10, 29), tuple(range(1, 30))):
        got, end = mixed(mixer, x, *cuts)
        assert relative(got, expected) <= 1e-12
        assert relative(end["ssm"], kept["ssm"]) <= 1e-12
        assert relative(end["shift"], kept["shift"]) <= 1e-12


@torch.no_grad()
def test_with_a_sum_for_its_diagonal_a_layer_is_linear_attention():
    """Section 3.1: no shift, A = 0 and C Bbar = 1; one head of all features."""
    mixer = build(stirred=False, head_dim=12, d_state=2).model.layers[0].mixer
    for name, value in (("shift_C", 0), ("shift_D", 1), ("D", 0), ("log_dt", 0)):
        getattr(mixer, name).fill_(value)
    mixer.A_log.fill_(-float("inf"))
    mixer.A_imag.zero_()
    mixer.B.copy_(torch.tensor([0.5, 0]))
    mixer.C.copy_(torch.tensor([1.0, 0]))
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    q, k, v = (f(x).numpy() for f in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    y = torch.from_numpy(oracle.linear_attention(q, k, v))
    assert relative(mixer(x, LayerState()), mixer.out_proj(y)) <= 1e-12


@torch.no_grad()
def test_filters_are_exact_under_autocast():
    mixer = build(torch.float32, d_state=64).model.layers[0].mixer
    with torch.autocast("cpu", torch.bfloat16):
        taps, (exponent, readout) = mixer.taps(), mixer.modes()
    weights = arrays(build(torch.float32, d_state=64))
    impulse = np.zeros((1, 64, 12))
    impulse[:, 0] = 1
    parts = (weights[f"{MIXER}shift_{name}"] for name in "BCD")
    assert relative(taps, oracle.shift_ssm(impulse, *parts)[0].T) <= 1e-6
    assert (exponent.dtype, readout.dtype) == (torch.complex128, torch.complex64)


@torch.no_grad()
def test_the_cache_grows_only_where_a_layer_attends():
    sizes = {}
    for name, fields in (("pure", {}), ("hybrid", HYBRID)):
        model, ids = build(torch.float32, **fields), torch.arange(24).view(2, 12)
        cache = model(ids, use_cache=True).cache
        before = cache.nbytes
        model(ids[:, :3], cache=cache)
        sizes[name] = cache.nbytes - before
    # three keys and values of 12 features for each of two rows
    assert sizes == {"pure": 0, "hybrid": 3 * 2 * 12 * 2 * 4}


def test_dynamics_are_those_of_the_diagonal_state_spaces():
    model = build(**HYBRID)
    weights, x = arrays(model), torch.zeros(1, 40, 12, dtype=torch.float64)
    dynamics = model.model.layers[0].mixer.dynamics(x)
    A = -np.exp(weights[MIXER + "A_log"]) + 1j * weights[MIXER + "A_imag"]
    B, C = (oracle.as_complex(weights[MIXER + name]) for name in "BC")
    dt = np.exp(weights[MIXER + "log_dt"])
    Abar, Bbar = oracle.discretize(A, B, dt[:, None])
    assert relative(dynamics.kernel.detach(), oracle.kernel(Abar, Bbar, C, 40)) <= 1e-12
    np.testing.assert_allclose(dynamics.poles.detach().numpy(), Abar, atol=1e-13)
    np.testing.assert_allclose(dynamics.time_steps.detach().numpy(), dt, rtol=1e-13)
    assert model.model.layers[1].mixer.dynamics(x) is None


def test_a_new_model_has_the_papers_ranges():
    fields = {"hidden_size": 256, "d_state": 64, "attn_layer_idx": [1], "intermediate_size": 512}
    weights = arrays(build(torch.float32, stirred=False, **fields))
    assert np.log(1e-3) <= weights[MIXER + "log_dt"].min() < np.log(1.2e-3)
    assert np.log(0.8e-1) < weights[MIXER + "log_dt"].max() <= np.log(1e-1) + 1e-6
    np.testing.assert_allclose(weights[MIXER + "A_log"], np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(weights[MIXER + "A_imag"][7], np.pi * np.arange(32), rtol=1e-6)
    np.testing.assert_array_equal(weights[MIXER + "B"], np.tile([1, 0], (256, 32, 1)))
    np.testing.assert_array_equal(weights[MIXER + "shift_B"], np.eye(64)[[0] * 256])
    assert np.abs(weights[MIXER + "shift_C"]).max() == pytest.approx(1 / 8, rel=1e-3)
    np.testing.assert_allclose(weights[MIXER + "C"].std(axis=(0, 1)), 0.5**0.5, atol=0.03)
    for name in ("D", "shift_D"):
        assert weights[MIXER + name].std() == pytest.approx(1, abs=0.2)
    ends = 0.02 / 6**0.5
    for name, std in (
        ("layers.0.mixer.out_proj", 0.02),
        ("layers.1.mixer.q_proj", 0.02),
        ("layers.1.mixer.out_proj", ends),
        ("layers.0.mlp.up_proj", 0.02),
        ("layers.0.mlp.down_proj", ends),
    ):
        assert weights[f"model.{name}.weight"].std() == pytest.approx(std, rel=0.03)
        assert not weights[f"model.{name}.bias"].any()


# --- presets ------------------------------------------------------------------------------------

# of the files at danfu09/H3-*: width, layers, layers that attend, bytes, copies of all weights
FILES = {
    "h3-355m": (1024, 24, 2, 4_333_323_919, 3),  # with Adam's two moments
    "h3-1.3b": (2048, 24, 2, 5_304_652_149, 1),
    "h3-2.7b": (2560, 32, 3, 10_681_570_355, 1),
}


@pytest.mark.parametrize("preset", FILES)
def test_a_preset_has_the_parameters_of_the_authors_file(preset):
    """Their float32 numbers fill the file but for names and padding: one layer more or less that
    attends would be 1.3 MB a copy or more."""
    width, layers, attends, size, copies = FILES[preset]
    count = describe_family("h3")["presets"][preset]["parameters"]
    assert count == oracle.parameters(width, layers, attends)
    assert 0 < size - 4 * copies * count < 1000 * copies * layers * 20


def test_the_other_presets_are_of_the_papers_sizes():
    presets = describe_family("h3")["presets"]
    for name, attends in (("h3-125m", 1), ("h3-hybrid-125m", 2), ("h3-pure-125m", 0)):
        assert presets[name]["parameters"] == oracle.parameters(768, 12, attends)
    assert presets["h3-2.7b-rotary"]["parameters"] == oracle.parameters(2560, 32, 2)
    assert presets["h3-125m"]["parameters"] == 126_387_456


# --- official checkpoints -----------------------------------------------------------------------


def official(model, older):
    """A model's weights as the published code names them, the table written out once more."""
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.embed_tokens", "backbone.embeddings.word_embeddings")
        name = name.replace("mlp.up_proj", "mlp.fc1").replace("mlp.down_proj", "mlp.fc2")
        name = name.replace("model.", "backbone.", 1)
        layer = name.split(".")[2] if ".layers." in name else None
        leaf = name.rsplit(".", 1)[1]
        if layer == "1" and "_proj" in name:
            if "q_proj" in name:
                qkv = [f"model.layers.1.mixer.{part}_proj.{leaf}" for part in "qkv"]
                tensor = torch.cat([model.state_dict()[part] for part in qkv])
            elif "out_proj" not in name:
                continue
            name = name.replace("q_proj", "Wqkv")
        elif "mixer" in name:
            name = name.replace("out_proj", "output_linear")
            name = name.replace("mixer.shift_D", "mixer.ssm_k_D")
            name = name.replace("mixer.shift_", "mixer.ssm_k_kernel.kernel.")
            if leaf in ("log_dt", "A_log", "A_imag", "B", "C"):
                name = name.replace(leaf, "kernel.kernel." + leaf.replace("A_log", "inv_A_real"))
            tensor = tensor[None] if leaf in ("C", "shift_C") else tensor
        elif layer is not None:
            name = name.replace(".norm.", ".norm1.").replace(".mlp_norm.", ".norm2.")
        else:
            name = name.replace("backbone.norm.", "backbone.ln_f.")
        found[name] = tensor
    found["backbone.layers.1.mixer.rotary_emb.inv_freq"] = torch.ones(3)
    if not older:
        return found
    order = ["norm", *(f"layers.{i}.norm{n}" for i in range(3) for n in (1, 2)), "ln_f"]
    moved = {f"backbone.{new}": f"backbone.{old}" for old, new in pairwise(order)}
    renamed = {}
    for name, tensor in found.items():
        head, _, leaf = name.rpartition(".")
        name = f"{moved.get(head, head)}.{leaf}"
        renamed["s4seq.encoder." + name.removeprefix("backbone.")] = tensor
    renamed["embedding.weight"] = renamed.pop("s4seq.encoder.embeddings.word_embeddings.weight")
    renamed["lm_head.weight"] = renamed.pop(
        "s4seq.encoder.lm_head.weight", renamed["embedding.weight"]
    )
    return renamed


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("told", [{}, {"disc": "zoh"}], ids=str)
def test_official_weights_become_ours(size, older, told):
    model = build(torch.float32, **PAPER, **told, head_dim=size)
    weights, config = from_official(official(model, older), {"num_attention_heads": 2, **told})
    assert config.to_diff_dict() == model.config.to_diff_dict()
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_what_is_no_official_checkpoint_is_refused():
    weights = official(build(torch.float32, **PAPER), older=False)
    with pytest.raises(LookupError, match=r"must have num_attention_heads: layers \[1\] attend"):
        from_official(weights, {})
    with pytest.raises(LookupError, match="not an official H3 model; it has transformer"):
        from_official({"transformer.wte.weight": torch.zeros(3, 2)}, {})
    fields = {"num_attention_heads": 2}
    lacking = {n: x for n, x in weights.items() if n != "backbone.layers.2.mixer.ssm_k_D"}
    with pytest.raises(LookupError, match=r"missing .*shift_D"):
        from_official(lacking, fields)
    with pytest.raises(ValueError, match=r"must have shape \[12\], got \[13\]"):
        from_official({**weights, "backbone.ln_f.bias": torch.zeros(13)}, fields)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state must be even and at least 2, got 0"),
        ({"d_state": 7}, "d_state must be even and at least 2, got 7"),
        ({"head_dim": 0}, "head_dim must divide hidden_size = 12, got 0"),
        ({"head_dim": 5}, "head_dim must divide hidden_size = 12, got 5"),
        ({"num_attention_heads": 5}, "num_attention_heads must divide hidden_size = 12, got 5"),
        ({"dt_min": 0.2}, "dt_min and dt_max must be positive and rise, got 0.2 and 0.1"),
        ({"dt_min": 0.0}, "dt_min and dt_max must be positive"),
        ({"dt_max": float("inf")}, "dt_min and dt_max must be .* got 0.001 and inf"),
        ({"attn_layer_idx": [0, 3]}, r"attn_layer_idx must name layers from 0 to 2, got \[3\]"),
        ({"attn_layer_idx": [-1]}, r"attn_layer_idx must name layers from 0 to 2, got \[-1\]"),
        ({"attn_layer_idx": ["1"]}, "attn_layer_idx"),
        ({**HYBRID, "rotary_dim": 8}, "rotary_dim must be None, or even and from 2 to 6, .* got 8"),
        ({**HYBRID, "rotary_dim": 3}, "rotary_dim must be None, or even .* got 3"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        FAMILY.config_class(**{**TINY, **fields})
