"""Layers of a network of one's own: drawn, copied, cast and compiled; the kit has their numbers."""

import copy

import pytest
import torch
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

import ssmzoo
from ssmzoo.family import families, load_family

NAMES = sorted(families())
STEPS = {"irregular_steps": True, "directions": "both-separate"}


def layer_of(name, **fields):
    """A layer of a family's tiny model in float64, and an input for it."""
    torch.manual_seed(0)
    layer = ssmzoo.layer(name, **{**load_family(name).tiny, **fields}).double().eval()
    return layer, torch.randn(2, 9, layer.config.hidden_size, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_drawn_as_a_model_draws_it(name):
    family = load_family(name)
    kind, config = family.model_class.kind_of_layer(family.config(**family.tiny), 1)
    model = kind(config)
    torch.manual_seed(0)
    expected = kind.mixer_class(config, 1).apply(model._init_weights).state_dict()
    torch.manual_seed(0)
    got = ssmzoo.layer(name, layer_idx=1, **family.tiny).mixer.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_layer_can_be_copied_loaded_and_cast(name):
    layer, x = layer_of(name)
    expected, state = layer(x, return_state=True)
    again = copy.deepcopy(layer)
    for parameter in again.parameters():
        parameter.zero_()
    again.load_state_dict(layer.state_dict())
    for copied in (copy.deepcopy(layer), again):
        assert torch.equal(copied(x), layer(x))
    after = again(x, {key: tensor.to("cpu") for key, tensor in state.items()})
    assert torch.equal(after, layer(x, state))
    low = layer.float().to(torch.bfloat16)
    own = [p for m in low.modules() if m is not low for p in [*m._parameters.values()]]
    assert {p.dtype for p in own if p is not None} == {torch.bfloat16, torch.float32}
    y = low(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y - expected).abs().max() <= 0.1 * expected.abs().max()


@torch.no_grad()
def test_a_layer_takes_steps_and_the_residual_stream_as_a_model_gives_them():
    bare = {"norm_type": "none", "residual": False, "num_hidden_layers": 1}
    layer, x = layer_of("s5", **bare, **STEPS)
    model = load_family("s5").model_class(layer.config).double().eval()
    layer.load_state_dict(model.layers[0].state_dict())
    steps = torch.rand(2, 9, dtype=torch.float64) + 0.1
    expected = model(inputs_embeds=x, time_steps=steps).last_hidden_state
    assert torch.equal(layer(x, time_steps=steps), expected)

    layer, x = layer_of("bmojo")
    assert torch.equal(layer(x, residual=2 * x), layer.mixer(x, residual=2 * x))
    assert not torch.equal(layer(x, residual=2 * x), layer(x))


@torch.no_grad()
def test_weights_of_a_mamba_fit():
    theirs = MambaMixer(MambaConfig(hidden_size=16), 0).double()
    ours = ssmzoo.layer("bmojo", mixer_types="mamba", hidden_size=16).double()
    weights = theirs.state_dict()
    weights["dt_bias"] = weights.pop("dt_proj.bias")
    ours.load_state_dict({f"mixer.ssm.{key}": tensor for key, tensor in weights.items()})
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    # theirs has float32 on its way
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@torch.no_grad()
def test_a_layer_is_one_graph():
    layer, x = layer_of("longhorn")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    row, ends = x.reshape(1, -1, x.shape[2]), torch.tensor([0, 9, 18])
    _, before = layer(x, return_state=True)
    for got, expected in zip(
        compiled(row, before, cu_seqlens=ends, return_state=True),
        layer(row, before, cu_seqlens=ends, return_state=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_a_layers_own_parameters_are_projected():
    layer, _ = layer_of("coffee", directions="both-separate", lambda_param="clamp")
    rates = [p for key, p in layer.named_parameters() if key.endswith("lam")]
    assert len(rates) == 2
    for parameter in rates:
        parameter.data.fill_(1)
    layer.project_parameters()
    assert not any(parameter.any() for parameter in rates)


@pytest.mark.parametrize(
    ("kind", "says", "call"),
    [
        (LookupError, "no family named 'longhron'", lambda *_: ssmzoo.layer("longhron")),
        (LookupError, "no field 'd_stat'", lambda *_: ssmzoo.layer("longhorn", d_stat=8)),
        (LookupError, "no preset 'big'", lambda *_: ssmzoo.layer("longhorn", "big")),
        (ValueError, "layer_idx must be in", lambda *_: ssmzoo.layer("longhorn", layer_idx=24)),
        (ValueError, "hidden_states must have", lambda layer, x: layer(x[0])),
        (ValueError, "L at least 1", lambda layer, x: layer(x[:, :0])),
        (TypeError, "no argument 'mask'", lambda layer, x: layer(x, mask=x)),
        (ValueError, "one packed row", lambda layer, x: layer(x, cu_seqlens=torch.tensor([0, 9]))),
        (ValueError, "cu_seqlens", lambda layer, x: layer.mixer(x, packing=torch.tensor([0, 8]))),
        (TypeError, "state must be a dict", lambda layer, x: layer(x, x)),
        (ValueError, "hold the 2 sequences", lambda layer, x: layer(x, {"ssm": x[:1]})),
        (ValueError, "must be one that", lambda layer, x: layer(x, {"ring": x})),
        (
            ValueError,
            "time_steps must be given",
            lambda _, x: layer_of("s5", **STEPS)[0](x[..., :16]),
        ),
        (ValueError, "time_steps must be given", lambda _, x: layer_of("s5", **STEPS)[0].mixer(x)),
    ],
)
def test_wrong_calls_are_one_line(kind, says, call):
    with pytest.raises(kind, match=says) as told:
        call(*layer_of("longhorn"))
    assert "\n" not in str(told.value)
