"""Residual sums and the norms after them as one op: where, and that it changes no bit."""

import pytest
import torch

from ssmzoo.family import load_family
from ssmzoo.modeling import block, norms
from ssmzoo_kernels.dispatch import watch


@pytest.fixture(autouse=True)
def small_models_take_the_op(monkeypatch):
    monkeypatch.setattr(norms, "MANY", 0)


def build(dtype=torch.float32, **fields):
    torch.manual_seed(0)
    family = load_family("longhorn")
    config = family.config(**{**family.tiny, "num_hidden_layers": 3, **fields})
    return family.causal_lm_class(config).to(dtype).eval()


IDS = torch.randint(96, (2, 7), generator=torch.Generator().manual_seed(0))


def sums(run):
    """Return what a function returns, and how many sums were one op with their norm."""
    with watch() as seen:
        found = run()
    return found, [op for op, _ in seen].count("add_rms_norm")


def apart(monkeypatch, run):
    """Run with every sum and norm on their own."""
    with monkeypatch.context() as patch:
        patch.setattr(block, "add_and_norm", lambda x, y, norm: (x + y, None))
        found, count = sums(run)
    assert count == 0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 0),
        ({"intermediate_size": 24}, 3),
        ({"residual_in_fp32": False, "intermediate_size": 24}, 3),
        ({"prenorm": False, "intermediate_size": 24}, 6),
        ({"residual": False, "intermediate_size": 24}, 0),
        ({"norm_type": "layer", "intermediate_size": 24}, 0),
    ],
)
@torch.no_grad()
def test_fused_sums_change_no_bit(fields, count, dtype, monkeypatch):
    model = build(dtype, **fields)
    logits, found = sums(lambda: model(IDS).logits)
    # a stream of another dtype than what is added to it is no fused one
    assert found == count
    assert torch.equal(logits, apart(monkeypatch, lambda: model(IDS).logits))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_are_what_they_were_also_under_checkpointing(reentrant, monkeypatch):
    model = build(intermediate_size=24).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def run():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return {name: x.grad.clone() for name, x in model.named_parameters()}

    ours, count = sums(run)
    assert count == 3 * (1 if reentrant is None else 2)  # blocks stay independent: each its own MLP
    for name, theirs in apart(monkeypatch, run).items():
        # the two paths' gradients are added in the other order
        assert (ours[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


class Louder(norms.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def test_a_watched_norm_and_one_of_another_class_are_called(monkeypatch):
    model = build(intermediate_size=24)
    seen = []
    hooked = [model.model.layers[1].norm, model.model.layers[1].mlp_norm, model.model.norm]
    for norm in hooked:
        norm.register_forward_hook(lambda module, given, y: seen.append(module))
    model.model.layers[2].mlp_norm.__class__ = Louder
    logits, count = sums(lambda: model(IDS).logits)
    assert seen == hooked
    assert count == 1
    assert torch.equal(logits, apart(monkeypatch, lambda: model(IDS).logits))


@torch.no_grad()
def test_a_hook_of_all_modules_is_heard():
    model, seen = build(), []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, y: seen.append(type(module).__name__)
    )
    try:
        model(IDS)
    finally:
        hook.remove()
    assert seen.count("RMSNorm") == 4


@torch.no_grad()
@pytest.mark.parametrize("kind", [norms.RMSNorm, block.SSMBlock])
def test_a_forward_put_into_a_class_is_called(kind, monkeypatch):
    model, own, calls = build(intermediate_size=24), kind.forward, []

    def forward(self, *args):
        calls.append(self)
        y = own(self, *args)
        return y.mul_(2)

    before = model(IDS).logits
    monkeypatch.setattr(kind, "forward", forward)
    logits = model(IDS).logits
    each = 3 if kind is block.SSMBlock else 7  # two of each block, and the last
    assert len(calls) == each
    assert torch.equal(logits, apart(monkeypatch, lambda: model(IDS).logits))
    assert not torch.equal(logits, before)
