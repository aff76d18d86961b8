"""RWKV-7: the kit by its oracle, sizes, and checkpoints of fla and of the authors.

The judge is ``tests/oracles/rwkv7.py``, float64 numpy from the paper alone.
"""

import pytest
import torch
from tests.oracles import rwkv7 as oracle
from tests.plugins.logits import relative

from ssmzoo.analysis.describe import describe_family
from ssmzoo.analysis.measure import measure_layers
from ssmzoo.cli.main import main
from ssmzoo.testing import FamilyConformance
from ssmzoo.testing.subject import Subject
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch
from ssmzoo_rwkv7 import FAMILY, modeling_rwkv7
from ssmzoo_rwkv7.convert_rwkv7 import from_official, to_official


class TestRWKV7(FamilyConformance):
    family = "rwkv7"
    oracle = staticmethod(oracle.logits)


def build(**fields):
    """A model of three layers whose parameters have left their initial values."""
    torch.manual_seed(0)
    config = FAMILY.config(**{**FAMILY.tiny, "num_hidden_layers": 3, "value_rank": 5, **fields})
    model = FAMILY.causal_lm_class(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "fields",
    [{}, {"head_dim": 4}, {"hidden_size": 48, "d_channel": None}, {"tie_word_embeddings": True}],
    ids=str,
)
@torch.no_grad()
def test_every_setting_matches_the_oracle_from_any_kernel(fields):
    model, ids = build(**fields), torch.arange(36).view(2, 18)
    arrays = {name: x.numpy() for name, x in model.state_dict().items()}
    expected = oracle.logits(arrays, model.config.to_dict(), ids.numpy())
    with watch() as ran:
        assert relative(model(ids).logits, expected) <= 1e-12
    assert {backend for op, backend in ran if op == "generalized_delta_rule"} == {"cpu"}
    with use_backend("eager"):
        assert relative(model(ids).logits, expected) <= 1e-12


PAPER = {  # parameters, of the paper's table of sizes; the 168M's vocabulary is the Pile's
    "rwkv7-168m": 167_638_272,
    "rwkv7-191m": 191_034_624,
    "rwkv7-450m": 450_767_872,
    "rwkv7-1.5b": 1_527_404_544,
    "rwkv7-2.9b": 2_947_735_040,
}


def test_presets_have_the_papers_parameters():
    presets = describe_family("rwkv7")["presets"]
    assert {name: row["parameters"] for name, row in presets.items()} == PAPER


def test_a_new_model_has_the_authors_initial_values():
    torch.manual_seed(0)
    model = FAMILY.model_class(FAMILY.config(hidden_size=64, num_hidden_layers=3, head_dim=16))
    mixer, last = model.layers[1].mixer, 63
    for shift, power in ((0, 0.2), (1, 0.9), (2, 0.7), (5, 0.2)):
        assert mixer.time_shift[shift, last].item() == pytest.approx(
            1 - (last / 64) ** (power * 2 / 3), rel=1e-5
        )
    assert mixer.channel_shift[16].item() == pytest.approx(1 - 0.25 ** ((2 / 3) ** 4), rel=1e-6)
    assert mixer.decay_bias[[0, last]].tolist() == pytest.approx([-6 + 0.5 - 2.5, 0.5 + 2.5])
    assert mixer.rate_bias[[0, last]].tolist() == pytest.approx([-0.69, 0.31])
    assert mixer.value_bias[[0, last]].tolist() == pytest.approx([0.93, 0.53])
    assert mixer.removal_scale[[0, last]].tolist() == pytest.approx([0.76, 0.66])
    assert mixer.norm_weight.unique().item() == pytest.approx((2 / 3) ** 0.7)


# --- a layer inside of its model ----------------------------------------------------------------


def slopes_in_the_model(model, ids, layer):
    """Return the derivatives of a mixer's last output, feature by feature, ``[D, L]``, as sizes."""
    mixer, seen = model.layers[layer].mixer, {}

    def enter(_, given, named):
        seen["x"] = given[0].detach().requires_grad_()
        return (seen["x"], *given[1:]), named

    with (
        mixer.register_forward_pre_hook(enter, with_kwargs=True),
        mixer.register_forward_hook(lambda _, given, y: seen.update(y=y)),
    ):
        model(ids, use_cache=False)
    last = seen["y"][0, -1]
    found = [torch.autograd.grad(y, seen["x"], retain_graph=True)[0][0] for y in last]
    return torch.stack(found).norm(dim=2)


def test_inspect_measures_a_mixer_as_it_is_in_its_model():
    model, ids = Subject(FAMILY).fresh().double().model, torch.arange(1, 25).view(2, 12)
    for layer in measure_layers(model, ids).layers:
        each = torch.stack([slopes_in_the_model(model, row[None], layer.layer) for row in ids])
        expected = each.square().mean(dim=0).sqrt().flip(1)
        torch.testing.assert_close(layer.kernel, expected, rtol=1e-10, atol=1e-14)


def test_inspect_names_the_layer_of_a_mixer_that_fails(tmp_path, capsys, monkeypatch):
    def fail(mixer, x, state, packing):
        if torch.is_grad_enabled():
            raise KeyError("first_values")
        return torch.zeros_like(x)

    monkeypatch.setattr(modeling_rwkv7.RWKV7Mixer, "mix_time", fail)
    Subject(FAMILY).fresh().save_pretrained(tmp_path / "model")
    given = ["--length", "8", "--layers", "1", "--output", str(tmp_path / "found")]
    assert main(["inspect", str(tmp_path / "model"), *given]) != 0
    told = capsys.readouterr().err
    assert "layer 1 (RWKV7Mixer) cannot be inspected: KeyError: 'first_values'" in told


# --- official checkpoints -----------------------------------------------------------------------

FLA = {"model_type": "rwkv7", "hidden_act": "sqrelu", "norm_first": True, "attn": None}
FLA |= {"hidden_size": 32, "head_dim": 16, "norm_eps": 1e-5, "value_dim": [32, 32, 32]}
AUTHORS = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
AUTHORS |= {"g_norm": "ln_x", "attn_norm": "ln1", "ffn_norm": "ln2", "pre_norm": "ln0"}
AUTHORS |= {"layers": "blocks", "attn": "att", "embeddings": "emb", "norm": "ln_out"}


def of_the_authors(weights):
    """Weights of fla as the authors' files have them, the names written out once more."""
    found = {}
    for name, x in weights.items():
        words = [AUTHORS.get(word, word) for word in name.removeprefix("model.").split(".")]
        if "lora" in words:
            letter, number = words[3][0], {"0": 1, "2": 2}[words[5]]
            number = 0 if words[6] == "bias" else number
            words = [*words[:3], f"{letter}{number}"]
            x = x.mT if number else x.view(1, 1, -1)
        elif words[-1] in ("x_k", "k_k", "k_a") and x.dim() == 1:
            x = x.view(1, 1, -1)
        found[".".join(words).replace("lm_head", "head")] = x
    unread = {f"blocks.0.att.v{i}": torch.zeros(2) for i in range(3)}
    return {**found, **unread}


def first_of_fla(weights):
    """Weights by fla's first names, where one tensor has what a token becomes."""
    joined = {}
    for name, x in weights.items():
        if ".attn.x_" in name:
            joined.setdefault(name[:-1] + "x", []).append(x.view(-1))
    kept = {name: x for name, x in weights.items() if ".attn.x_" not in name}
    return {**kept, **{name: torch.stack(rows) for name, rows in joined.items()}}


@pytest.mark.parametrize("theirs", [dict, of_the_authors, first_of_fla])
def test_official_weights_become_ours(theirs):
    model = build()
    given = theirs(to_official(model.state_dict(), model.config))
    weights, config = from_official(given, {} if theirs is of_the_authors else FLA)
    assert config.to_diff_dict() == model.config.to_diff_dict()
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"model_type": "rwkv6"}, "model_type must be 'rwkv7', got 'rwkv6'"),
        ({"norm_first": False}, "norm_first must be True, got False"),
        (
            {"attn": {"layers": [1]}},
            r"config must have fields of fla's RWKV-7 only, got \['attn'\]",
        ),
    ],
)
def test_other_models_of_fla_are_refused(told, words):
    model = build()
    with pytest.raises((LookupError, ValueError), match=words):
        from_official(to_official(model.state_dict(), model.config), {**FLA, **told})


def test_what_is_no_official_checkpoint_is_refused():
    model = build()
    theirs = to_official(model.state_dict(), model.config)
    with pytest.raises(LookupError, match=r"it has no 'model\.embeddings\.weight'"):
        from_official({"a": torch.zeros(2)}, FLA)
    with pytest.raises(LookupError, match=r"missing .*ffn\.x_k"):
        from_official({n: x for n, x in theirs.items() if "layers.2.ffn.x_k" not in n}, FLA)
    with pytest.raises(ValueError, match="the official model has norm_type='layer' only"):
        to_official(model.state_dict(), FAMILY.config(norm_type="rms"))
