"""Every family runs on the meta device, where tensors have shapes and no values."""

import pytest
import torch

from ssmzoo.family import families, load_family
from ssmzoo.testing.subject import Subject


@pytest.fixture(params=sorted(families()))
def model(request):
    return Subject(load_family(request.param)).fresh().to("meta")


def tokens(length):
    return torch.zeros(2, length, dtype=torch.int64, device="meta")


def test_training_runs_on_the_meta_device(model):
    out = model.train()(tokens(9), labels=tokens(9))
    assert out.loss.is_meta
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def test_a_prompt_and_a_decoding_step_run_on_the_meta_device(model):
    prompt = model(tokens(9), use_cache=True, logits_to_keep=1)
    assert prompt.logits.shape == (2, 1, model.config.vocab_size)
    step = model(tokens(1), cache=prompt.cache, use_cache=True)
    assert step.logits.is_meta
