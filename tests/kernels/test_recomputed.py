"""Activations that Longhorn's backward computes again: the same gradients, less memory."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ssmzoo import load_family

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # of peft

IDS = torch.arange(48).view(2, 24) % 7


def longhorn(**fields):
    family = load_family("longhorn")
    torch.manual_seed(0)
    return family.causal_lm_class(family.config(**{**family.tiny, "vocab_size": 7, **fields}))


def with_lora():
    # its dropout draws other entries in each call
    targets = LoraConfig(target_modules=["dt_proj", "in_proj"], lora_dropout=0.5)
    model = get_peft_model(longhorn(), targets)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def checkpointed():
    model = longhorn()
    model.gradient_checkpointing_enable()
    return model


def gradients(model, keep, autocast=False, passes=1):
    """Return the gradients of a step, in which all is kept or not."""
    model.train().zero_grad()
    torch.manual_seed(1)
    # where others see to what is saved, all is
    all_is = saved_tensors_hooks(lambda x: x, lambda x: x)
    mask = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
    with (
        all_is if keep else contextlib.nullcontext(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        loss = model(IDS, labels=IDS, attention_mask=mask, use_cache=False).loss
    for _ in range(passes):
        loss.backward(retain_graph=True)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (longhorn, {}),
        (longhorn, {"autocast": True}),
        (longhorn, {"passes": 2}),
        (lambda: longhorn(out_norm=True), {}),
        (with_lora, {}),
        (checkpointed, {}),
    ],
)
def test_gradients_are_equal_to_the_bit(make, options):
    wanted, found = (gradients(make(), keep, **options) for keep in (True, False))
    assert len(wanted) > 3
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [True, False])
def test_u_and_dt_are_gone_after_the_forward(keep):
    model, seen = longhorn().train(), []
    mixer = model.model.layers[0].mixer
    mixer.conv1d.register_forward_hook(
        lambda _, given, out: seen.append(StorageWeakRef(out[0].untyped_storage()))
    )
    mixer.dt_proj.register_forward_hook(
        lambda _, given, out: seen.append(StorageWeakRef(out.untyped_storage()))
    )
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x) if keep else contextlib.nullcontext()
    with hooks:
        loss = model(IDS, labels=IDS, use_cache=False).loss
    assert [each.expired() for each in seen] == [not keep] * 2
    loss.backward()
    assert len(seen) == (2 if keep else 4)  # each is made again once, for all that ask for it
