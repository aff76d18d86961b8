"""What differs between the supported versions of transformers; runs on both ends."""

import torch

from ssmzoo.training.compat import enable_gradient_checkpointing
from ssmzoo_longhorn import FAMILY


def test_checkpointing_is_on_after_enabling_and_changes_no_gradient():
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).train()
    ids = torch.randint(96, (2, 9))
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    enable_gradient_checkpointing(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model(ids, labels=ids).loss.backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
