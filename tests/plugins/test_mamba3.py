"""Mamba-3: the kit by its oracle, the trapezoidal rule, and checkpoints of fla and of the authors.

The judge is ``tests/oracles/mamba3.py``, float64 numpy with complex states, from the paper.
"""

import numpy as np
import pytest
import torch
from tests.oracles import mamba3 as oracle
from tests.plugins.logits import relative

from ssmzoo.analysis.describe import describe_family
from ssmzoo.modeling import LayerState
from ssmzoo.testing import FamilyConformance
from ssmzoo_mamba3 import FAMILY
from ssmzoo_mamba3.convert_mamba3 import from_official, to_official


class TestMamba3(FamilyConformance):
    family = "mamba3"
    oracle = staticmethod(oracle.logits)


def build(**fields):
    """A model whose parameters have left their initial values."""
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config(**{**FAMILY.tiny, **fields})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": "heavy_tail", "out_norm": False, "n_groups": 1},
        {"rope_fraction": 1, "intermediate_size": 20, "expand": 1},
        {"d_state": 6, "head_dim": 8, "n_groups": 4, "tie_word_embeddings": False},
        {"rate_floor": 1.0},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_setting_matches_the_oracle(fields):
    model, ids = build(**fields), torch.arange(36).view(2, 18)
    arrays = {name: x.numpy() for name, x in model.state_dict().items()}
    expected = oracle.logits(arrays, model.config.to_dict(), ids.numpy())
    assert relative(model(ids).logits, expected) <= 1e-12


def test_the_oracles_complex_state_is_the_integral_of_a_line_to_third_order():
    """With m = 1/2 the rule integrates ``h' = (-rate - i angle) h + k v`` as the trapezoid does."""
    rate, angle, errors = 0.7, 1.3, []
    for count in (64, 128):
        dt = np.full(count + 1, 1 / count)
        k = np.linspace(0, 1, count + 1)[:, None] * np.array([[1.0, 0.0]])
        ones, half = np.ones((count + 1, 1)), np.full(count + 1, 0.5)
        turns = np.full((count + 1, 1), angle)
        _, h = oracle.head(k, k, ones, dt, np.full(count + 1, rate), half, turns)
        s = rate + 1j * angle
        exact = 1 / s - (1 - np.exp(-s)) / s**2  # of the integral of exp(-s (1 - u)) u
        errors.append(abs(h[0, 0] - exact))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.02)  # half the step, a quarter of it


@torch.no_grad()
def test_angles_in_a_cache_stay_below_a_whole_turn_and_mean_the_same():
    mixer = build(d_state=4).model.layers[0].mixer
    mixer.dt_bias.add_(3)  # dt of about 3: many turns
    x, kept, found = torch.randn(2, 60, 32).double(), {}, []
    whole = mixer(x, LayerState())
    for piece in x.split(7, dim=1):
        state = LayerState(initial=kept, keep=True)
        found.append(mixer(piece, state))
        kept = state.final
    assert 0 <= kept["angle"].min() <= kept["angle"].max() < 2 * torch.pi
    assert relative(torch.cat(found, dim=1), whole) <= 1e-12


def test_a_new_model_begins_as_the_authors_do():
    mixer = FAMILY.model_class(FAMILY.config(hidden_size=256, num_hidden_layers=1)).layers[0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert 0.001 <= dt.min() <= dt.max() <= 0.1001
    for parameter in (mixer.B_bias, mixer.C_bias, mixer.D):
        assert (parameter == 1).all()


def test_presets_have_the_parameters_of_the_authors_layer():
    def layer(width, N, P):
        inner, heads = 2 * width, 2 * width // P
        projections = width * (2 * inner + 2 * N + 3 * heads + N // 4) + inner * width
        return projections + 2 * heads + 2 * heads * N + 2 * N + width

    presets = describe_family("mamba3")["presets"]
    small = 24 * layer(768, 128, 64) + 50288 * 768 + 768
    large = 48 * layer(2048, 128, 64) + 2 * 32000 * 2048 + 2048
    assert {name: row["parameters"] for name, row in presets.items()} == {
        "mamba3-130m": small,
        "mamba3-1.4b": large,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
        ({"head_dim": 24}, "head_dim must divide expand . hidden_size, got 24 and 64"),
        ({"n_groups": 3}, "n_groups must divide the heads, got 3 and 4"),
        ({"rope_fraction": 0.25}, "rope_fraction must be 0.5 or 1"),
        ({"d_state": 3}, "so large that a pair turns, got 0.5 and 3"),
        ({"rate_floor": 0}, "rate_floor must be positive, got 0"),
    ],
)
def test_fields_that_do_not_fit_are_one_error_that_names_them(fields, words):
    with pytest.raises(ValueError, match=words):
        FAMILY.config(**{**FAMILY.tiny, **fields})


# --- official checkpoints -----------------------------------------------------------------------

FLA = {"model_type": "mamba3", "is_outproj_norm": True, "n_groups": 2, "head_dim": 16}
FLA |= {"is_mimo": False, "hidden_size": 32, "expand": 2, "mimo_rank": 4}
AUTHORS = {"ssm_cfg": {"layer": "Mamba3", "headdim": 16, "ngroups": 2, "is_outproj_norm": True}}
AUTHORS |= {"d_model": 32, "d_intermediate": 20, "tie_embeddings": True, "rms_norm": True}


def of_the_authors(weights):
    """Weights of ours by the authors' names, the table written out once more."""
    found = {}
    for name, x in weights.items():
        name = name.replace("model.", "backbone.").replace("embed_tokens", "embedding")
        name = name.replace("backbone.norm.", "backbone.norm_f.").replace("mlp_norm", "norm2")
        if name.endswith("up_proj.weight"):
            x = torch.cat([x, weights[name.replace("backbone", "model").replace("up_", "gate_")]])
        if not name.endswith("gate_proj.weight"):
            x = x.unsqueeze(1) if name.endswith(("B_bias", "C_bias")) else x
            found[name.replace("up_proj", "fc1").replace("down_proj", "fc2")] = x
    return found


@pytest.mark.parametrize("authors", [False, True])
def test_official_weights_become_ours(authors):
    model = build(**({"intermediate_size": 20, "rate": "heavy_tail"} if authors else {}))
    expected = model.state_dict()
    given = of_the_authors(expected) if authors else to_official(expected, model.config)
    weights, config = from_official(given, AUTHORS if authors else FLA)
    assert config.to_diff_dict() == model.config.to_diff_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_what_is_no_mamba3_of_ours_is_refused():
    model = build()
    theirs = to_official(model.state_dict(), model.config)
    with pytest.raises(ValueError, match="is_mimo must be False, got True: our model has no other"):
        from_official(theirs, {**FLA, "is_mimo": True})
    with pytest.raises(LookupError, match=r"fields of Mamba-3 only, got \['d_conv'\]"):
        from_official(theirs, {**FLA, "d_conv": 4})
    with pytest.raises(LookupError, match=r"it has no 'model\.embed_tokens\.weight'"):
        from_official({"a": torch.zeros(2)}, FLA)
    with pytest.raises(ValueError, match="the official model has rate='softplus' only"):
        to_official(model.state_dict(), FAMILY.config(rate="heavy_tail"))
