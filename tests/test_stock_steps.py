"""Accelerated models decode by programs, where and as long as a program is what a module does."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.stock_models import TYPES, VOCABULARY, tiny
from torch import Tensor, nn

import ssmzoo
from ssmzoo.modeling.stock import classes, norms
from ssmzoo.modeling.stock.steps import KEPT_AS
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
# mixers with heads or multipliers that no program has
BY_LAYERS = {"ZambaMambaMixer", "FalconH1Mixer"}
# MLPs with other activations or other parts
OTHER_MLPS = {"ZambaMLP", "Zamba2MLP", "GraniteMoeHybridMLP", "NemotronHMLP"}


def ids(rows: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=draw)


def prompt(model: Any, x: Tensor) -> dict[str, Any]:
    """Return a cache behind a prompt, by the name that the model takes it by."""
    with torch.no_grad():
        output = model(x, use_cache=True)
    name = "cache_params" if "cache_params" in output else "past_key_values"
    return {name: output[name]}


def decode(model: Any, x: Tensor, cache: dict[str, Any], **inputs: Any) -> Tensor:
    """Return the logits of tokens, one at a time."""
    with torch.no_grad():
        steps = [model(x[:, i : i + 1], use_cache=True, **cache, **inputs) for i in range(len(x.T))]
    return torch.cat([step.logits for step in steps], dim=1)


def distance(x: Tensor, judge: Tensor) -> float:
    return float((x - judge).abs().max() / judge.abs().max())


def programs(model: nn.Module) -> list[nn.Module]:
    """Return the modules that decode by a program now."""
    found = []
    for module in model.modules():
        known = module.__dict__.get(KEPT_AS)
        if known and known.step and not (known.refused and known.refused()):
            found.append(module)
    return found


def mixer_of(model: nn.Module) -> Any:
    return next(m for m in programs(model) if type(m).__name__.endswith("Mixer"))


@pytest.fixture
def mamba() -> Any:
    """An accelerated model that decodes by programs."""
    model = tiny("mamba")
    ssmzoo.accelerate(model)
    decode(model, ids(), prompt(model, ids(seed=2)))
    assert len(programs(model)) == 5  # two mixers, their norms, and the last norm
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_decodes_the_stock_logits(model_type: str) -> None:
    model, x = tiny(model_type), ids(3, 8)
    before, after = x[:, :3], x[:, 3:]
    with torch.no_grad():
        stock = model(x).logits[:, 3:]  # stock Bamba counts positions behind a cache from 0
    ssmzoo.accelerate(model)
    with watch() as ran:
        ours = decode(model, after, prompt(model, before))
    assert ("token_step", "cpu") in ran
    assert distance(ours, stock) <= 1e-5
    by_program = {type(module).__name__ for module in programs(model)}
    names = {type(m).__name__ for m in model.modules()}
    own = {type(model.get_submodule(name)).__name__ for name in ssmzoo.accelerated(model)}
    assert own
    assert own - by_program == own & BY_LAYERS
    assert {n for n in names if n.endswith("RMSNorm") and "Weightless" not in n} <= by_program
    mlps = {n for n in names if n.endswith("MLP")}
    assert mlps - by_program == mlps & OTHER_MLPS


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "qwen3_5_text"])
def test_bfloat16_loses_no_more_than_the_stock_code(model_type: str) -> None:
    model, x = tiny(model_type), ids(2, 8)
    exact = copy.deepcopy(model).double()
    judge = decode(exact, x[:, 4:], prompt(exact, x[:, :4]))
    model = model.bfloat16()
    stock = decode(model, x[:, 4:], prompt(model, x[:, :4]))
    ssmzoo.accelerate(model)
    ours = decode(model, x[:, 4:], prompt(model, x[:, :4]))
    assert programs(model)
    assert (ours - judge).square().mean() <= 1.5 * (stock - judge).square().mean()


def changed_in_place(mixer: Any) -> None:
    with torch.no_grad():
        mixer.A_log.add_(0.5)


def changed_through_data(mixer: Any) -> None:
    mixer.A_log.data.copy_(mixer.A_log.data + 0.5)
    mixer.out_proj.weight.data.mul_(1.5)


def given_other_data(mixer: Any) -> None:
    mixer.in_proj.weight.data = mixer.in_proj.weight.data * 1.5


def given_a_new_parameter(mixer: Any) -> None:
    mixer.conv1d.weight = nn.Parameter(mixer.conv1d.weight.detach() * 1.5)


def given_a_new_layer(mixer: Any) -> None:
    mixer.x_proj = nn.Linear(mixer.x_proj.in_features, mixer.x_proj.out_features, bias=False)


def loaded(mixer: Any) -> None:
    mixer.load_state_dict({n: w + 0.125 for n, w in mixer.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        changed_in_place,
        changed_through_data,
        given_other_data,
        given_a_new_parameter,
        given_a_new_layer,
        loaded,
    ],
)
def test_new_weights_count_from_the_next_token_on(mamba: Any, change: Any) -> None:
    x = ids(seed=3)
    before = decode(mamba, x, prompt(mamba, x))
    torch.manual_seed(0)
    change(mixer_of(mamba))
    after = decode(mamba, x, prompt(mamba, x))
    assert len(programs(mamba)) == 5
    ssmzoo.restore(mamba)
    stock = decode(mamba, x, prompt(mamba, x))
    assert distance(after, stock) <= 1e-5
    assert distance(after, before) > 1e-3


def test_another_dtype_is_served_as_it_is(mamba: Any) -> None:
    x = ids(seed=3)
    mamba.double()
    double = decode(mamba, x, prompt(mamba, x))
    assert len(programs(mamba)) == 5
    ssmzoo.restore(mamba)
    assert distance(double, decode(mamba, x, prompt(mamba, x))) <= 1e-6


def test_a_hook_on_a_layer_is_called_for_every_token(mamba: Any) -> None:
    x, mixer, seen = ids(seed=3), mixer_of(mamba), []
    hook = mixer.x_proj.register_forward_hook(lambda *_: seen.append(1))
    plain = decode(mamba, x, prompt(mamba, x))
    assert len(seen) == 1 + x.shape[1]  # the prompt's, and each token's
    assert mixer not in programs(mamba)
    hook.remove()
    again = decode(mamba, x, prompt(mamba, x))
    assert mixer in programs(mamba)
    assert distance(again, plain) <= 1e-5


def test_an_adapter_put_on_later_is_effective(mamba: Any) -> None:
    x = ids(seed=3)
    before = decode(mamba, x, prompt(mamba, x))
    torch.manual_seed(0)
    wanted = LoraConfig(target_modules=["x_proj"], r=2, init_lora_weights=False)
    tuned: Any = get_peft_model(mamba, wanted)
    ours = decode(tuned, x, prompt(tuned, x))
    assert distance(ours, before) > 1e-3
    assert not [m for m in programs(mamba) if hasattr(m, "x_proj")]
    ssmzoo.restore(tuned)
    assert distance(ours, decode(tuned, x, prompt(tuned, x))) <= 1e-5
    ssmzoo.accelerate(tuned)
    base = tuned.unload()
    assert distance(decode(base, x, prompt(base, x)), before) <= 1e-5
    assert [m for m in programs(base) if hasattr(m, "x_proj")]


def test_calls_of_other_kinds_run_the_layers(mamba: Any) -> None:
    x = ids(9, 6, seed=3)
    many = decode(mamba, x, prompt(mamba, x))  # more rows than a program takes
    few = [decode(mamba, row[None], prompt(mamba, row[None])) for row in x]
    assert distance(torch.cat(few), many) <= 1e-5
    with use_backend("reference"), watch() as ran:
        judge = decode(mamba, x[:2], prompt(mamba, x[:2]))
    assert "token_step" not in dict(ran)
    assert distance(torch.cat(few[:2]), judge) <= 1e-5
    with watch() as ran:  # gradients are wanted
        cache = prompt(mamba, x[:2])
        ran.clear()
        logits = mamba(x[:2, :1], use_cache=True, **cache).logits
    assert "token_step" not in dict(ran)
    assert logits.requires_grad


def test_a_masked_token_is_masked() -> None:
    model, x = tiny("mamba2"), ids(2, 6)
    mask = torch.ones(2, 1, dtype=torch.long)
    mask[0] = 0
    stock = decode(model, x[:, 5:], prompt(model, x[:, :5]), attention_mask=mask)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    assert programs(model)
    ours = decode(model, x[:, 5:], prompt(model, x[:, :5]), attention_mask=mask)
    assert distance(ours, stock) <= 1e-5


def test_code_that_is_not_known_stays_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = tiny("jamba"), ids(seed=3)
    kinds = {type(m).__name__: type(m) for m in model.modules()}
    norm, mlp = kinds["JambaRMSNorm"].forward, kinds["JambaMLP"].forward
    monkeypatch.setattr(kinds["JambaRMSNorm"], "forward", lambda self, x: norm(self, x) + 0.01)
    monkeypatch.setattr(kinds["JambaMLP"], "forward", lambda self, x: 0.98 * mlp(self, x))
    stock = decode(model, x, prompt(model, x))
    # classes that an earlier model made have the forward of before
    classes.subclass.cache_clear()
    try:
        ssmzoo.accelerate(model)
        with caplog.at_level(logging.INFO, "ssmzoo"):
            ours = decode(model, x, prompt(model, x))
            told = len(caplog.records)
            decode(model, x, prompt(model, x))
    finally:
        classes.subclass.cache_clear()
    assert distance(ours, stock) <= 1e-5
    assert not programs(model)  # the mixer has such norms inside
    assert told == len(caplog.records) > 0
    assert "JambaMLP decodes by its own code: programs gave other numbers" in caplog.messages


def test_other_norms_stay_stock_and_checkpointing_finds_what_ran(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(norms, "MANY", 0)
    kind = next(type(m) for m in tiny("jamba").modules() if type(m).__name__ == "JambaRMSNorm")
    known = kind.forward
    for added, logged in ((0.0, 0), (0.01, 1)):
        monkeypatch.setattr(kind, "forward", lambda self, x, more=added: known(self, x) + more)
        model, x, found = tiny("jamba").train(), ids(seed=3), []
        model.gradient_checkpointing_enable({"use_reentrant": False})
        classes.subclass.cache_clear()
        try:
            for accelerated in (False, True):
                if accelerated:
                    ssmzoo.accelerate(model)
                model.zero_grad()
                caplog.clear()
                with caplog.at_level(logging.INFO, "ssmzoo"), watch() as ran:
                    model(x, labels=x, use_cache=False).loss.backward()
                found.append([p.grad for p in model.parameters()])
        finally:
            classes.subclass.cache_clear()
        assert all(distance(b, a) <= 1e-4 for a, b in zip(*found, strict=True) if a is not None)
        told = "JambaRMSNorm stays stock: its numbers are others"
        assert (told in caplog.messages) == bool(logged)
        assert ("rms_norm", "cpu") in ran  # at least to find that out


def test_copies_prove_anew_and_nothing_stays_behind(mamba: Any) -> None:
    x = ids(seed=3)
    expected = decode(mamba, x, prompt(mamba, x))
    for other in (copy.deepcopy(mamba), pickle.loads(pickle.dumps(mamba))):
        assert not programs(other)
        assert distance(decode(other, x, prompt(other, x)), expected) <= 1e-5
        assert len(programs(other)) == 5
    ssmzoo.restore(mamba)
    assert not any(KEPT_AS in module.__dict__ for module in mamba.modules())


def test_two_caches_at_once_give_what_each_gives_alone(mamba: Any) -> None:
    texts = [ids(1, 24, seed=4), ids(3, 24, seed=5)]
    alone = [decode(mamba, x, prompt(mamba, x)) for x in texts]
    caches = [prompt(mamba, x) for x in texts]
    turns: list[list[Tensor]] = [[], []]
    for i in range(24):
        for x, cache, turn in zip(texts, caches, turns, strict=True):
            turn.append(decode(mamba, x[:, i : i + 1], cache))
    assert all(torch.cat(t, 1).equal(a) for t, a in zip(turns, alone, strict=True))
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(4):
            found[number] = decode(mamba, texts[number], prompt(mamba, texts[number]))

    workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(found[number].equal(alone[number]) for number in (0, 1))
