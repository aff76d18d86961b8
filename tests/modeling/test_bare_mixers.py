"""Mixers without a model around them: no rubbish from memory."""

import pytest
import torch

from ssmzoo.family import families, load_family


@pytest.mark.parametrize("name", sorted(families()))
def test_what_no_model_has_drawn_is_nan(name):
    family = load_family(name)
    kind, config = family.model_class.kind_of_layer(family.config(**family.tiny), 0)
    mixer = kind.mixer_class(config, 0)
    made_by_empty = [p for p in mixer.parameters() if p.isnan().any()]
    assert all(p.isnan().all() for p in made_by_empty)
    assert bool(made_by_empty) == (name != "longhorn")  # it draws what it makes
    assert not torch.are_deterministic_algorithms_enabled()
    if not made_by_empty:
        return
    try:
        out = mixer(torch.ones(1, 3, mixer.config.hidden_size))
    except ValueError as error:  # some look
        message = str(error)
    else:
        message = "must be finite" if out.isnan().any() else ""
    assert "must be finite" in message
