"""Mixers without a model around them: no rubbish from memory, and boundaries as ops take them."""

import pytest
import torch

from ssmzoo.family import families, load_family
from ssmzoo.modeling import LayerState, Sequences

DIRECTIONS = ("forward", "both-shared", "both-separate")


def config_of(name, **changes):
    family = load_family(name)
    return family, family.config(**{**family.tiny, **changes})


@pytest.mark.parametrize("name", sorted(families()))
def test_what_no_model_has_drawn_is_nan(name):
    family, config = config_of(name)
    mixer = family.model_class.mixer_class(config, 0)
    made_by_empty = [p for p in mixer.parameters() if p.isnan().any()]
    assert all(p.isnan().all() for p in made_by_empty)
    assert bool(made_by_empty) == (name != "longhorn")  # it draws what it makes
    assert not torch.are_deterministic_algorithms_enabled()
    if not made_by_empty:
        return
    x = torch.ones(1, 3, config.hidden_size)
    more = {"residual": x} if mixer.reads_residual else {}
    try:
        out = mixer(x, LayerState(), **more)
    except ValueError as error:  # some look
        message = str(error)
    else:
        message = "must be finite" if out.isnan().any() else ""
    assert "must be finite" in message


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("name", sorted(families()))
def test_a_mixer_takes_boundaries_for_a_packing(name, directions):
    family, config = config_of(name, directions=directions)
    mixer = family.model_class(config).layers[0].mixer
    ends, x = torch.tensor([0, 4, 9]), torch.randn(1, 9, config.hidden_size)
    more = {"residual": x} if mixer.reads_residual else {}
    expected = mixer(x, LayerState(), Sequences.of(ends, 9), **more)
    assert torch.equal(mixer(x, LayerState(), ends, **more), expected)
    assert torch.equal(mixer(x, LayerState(), packing=ends, **more), expected)
    with pytest.raises(ValueError, match="cu_seqlens"):
        mixer(x, LayerState(), ends[:-1], **more)
