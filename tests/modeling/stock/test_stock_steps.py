"""Accelerated models decode by programs, where and as long as a program is what a module does."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.modeling.stock import common
from tests.modeling.stock.common import cached, distance
from tests.stock_models import TYPES, VOCABULARY, tiny
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.flop_counter import FlopCounterMode
from transformers import MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput, MambaOutput

import ssmzoo
from ssmzoo.modeling import decoding
from ssmzoo.modeling.compat import CACHE, MIXER_CACHE, cache_name
from ssmzoo.modeling.decoding import DECODING
from ssmzoo.modeling.stock import mixers, norms
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]
# MLPs with other activations or other parts
OF_EXPERTS = {"Qwen3NextDecoderLayer", "Qwen3_5MoeDecoderLayer", "GraniteMoeHybridDecoderLayer"}
OTHER_MLPS = {"ZambaMLP", "Zamba2MLP", "NemotronHMLP"}


def ids(rows: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return common.ids(rows, length, seed)


def prompt(model: Any, x: Tensor) -> dict[str, Any]:
    """Return a cache behind a prompt, by the name that the model takes it by."""
    with torch.no_grad():
        return cached(model, x, {})[1]


def decode(model: Any, x: Tensor, cache: dict[str, Any], **inputs: Any) -> Tensor:
    """Return the logits of tokens, one at a time."""
    with torch.no_grad():
        steps = [model(x[:, i : i + 1], use_cache=True, **cache, **inputs) for i in range(len(x.T))]
    return torch.cat([step.logits for step in steps], dim=1)


def programs(model: nn.Module) -> list[nn.Module]:
    """Return the modules that decode by a program now."""
    found = []
    for module in model.modules():
        known = module.__dict__.get(DECODING)
        if known and known.step:
            found.append(module)
    return found


def mixer_of(model: nn.Module) -> Any:
    return next(m for m in programs(model) if type(m).__name__.endswith("Mixer"))


def mixer_of_all(model: nn.Module) -> Any:
    return next(m for m in model.modules() if type(m).__name__.endswith("Mixer"))


@pytest.fixture
def mamba() -> Any:
    """An accelerated model that decodes by programs."""
    model = tiny("mamba")
    ssmzoo.accelerate(model)
    decode(model, ids(), prompt(model, ids(seed=2)))
    assert len(programs(model)) == 7  # two blocks, their mixers and norms, and the last norm
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
    assert own <= by_program
    assert {n for n in names if n.endswith("RMSNorm") and "Weightless" not in n} <= by_program
    blocks = {type(m).__name__ for m in model.modules() if getattr(m, "adds_branches", False)}
    assert blocks - by_program == blocks & OF_EXPERTS
    mlps = {n for n in names if n.endswith("MLP")}
    assert mlps - by_program == mlps & OTHER_MLPS


@pytest.mark.parametrize("after", [None, False, True])
def test_falcon_h1_with_its_multipliers_and_norms(after: bool | None) -> None:
    fields: dict[str, Any] = {
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.5, 2.0, 0.75, 1.5, 3.0],
    }
    fields |= {"mlp_multipliers": [0.8, 1.5], "mamba_rms_norm": after is not None}
    model, x = tiny("falcon_h1", **fields, mamba_norm_before_gate=bool(after)), ids(3, 8)
    for name, weight in model.named_parameters():
        if name.endswith("mamba.norm.weight"):
            nn.init.normal_(weight)
    stock = decode(model, x[:, 3:], prompt(model, x[:, :3]))
    ssmzoo.accelerate(model)
    ours = decode(model, x[:, 3:], prompt(model, x[:, :3]))
    assert distance(ours, stock) <= 1e-5
    by_program = {type(module).__name__ for module in programs(model)}
    assert {"FalconH1Mixer", "FalconH1MLP"} <= by_program


def test_granite_without_experts_decodes_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["mamba", "mamba", "mamba", "attention"]
    fields = {"num_hidden_layers": 4, "layer_types": kinds, "num_local_experts": 0}
    model, x = tiny("granitemoehybrid", **fields, residual_multiplier=0.22), ids(3, 8)
    stock = decode(model, x[:, 3:], prompt(model, x[:, :3]))
    ssmzoo.accelerate(model)
    cache = prompt(model, x[:, :3])
    ours = decode(model, x[:, 3:7], cache)
    ran = calls_of_c(monkeypatch)
    ours = torch.cat([ours, decode(model, x[:, 7:], cache)], dim=1)
    assert ran[0] == 3
    assert distance(ours, stock) <= 1e-5


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


class Shifted(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """Shift."""
        return weight + 3


def changed_through_data(mixer: Any) -> None:
    mixer.A_log.data.copy_(mixer.A_log.data + 0.5)
    mixer.out_proj.weight.data.mul_(1.5)


def given_other_data(mixer: Any) -> None:
    mixer.in_proj.weight.data = mixer.in_proj.weight.data * 1.5


def given_a_new_layer(mixer: Any) -> None:
    mixer.x_proj = nn.Linear(mixer.x_proj.in_features, mixer.x_proj.out_features, bias=False)


def given_other_settings(mixer: Any) -> None:
    mixer.activation, mixer.act = "relu", nn.ReLU()


def given_a_parametrized_bias(mixer: Any) -> None:
    register_parametrization(mixer.dt_proj, "bias", Shifted())


def given_another_forward(mixer: Any) -> None:
    stock = mixer.out_proj.forward
    mixer.out_proj.forward = lambda x: 2 * stock(x)


@pytest.mark.parametrize(
    "change",
    [
        changed_through_data,
        given_other_data,
        given_a_new_layer,
        given_other_settings,
        given_a_parametrized_bias,
        given_another_forward,
    ],
)
def test_new_weights_count_from_the_next_token_on(mamba: Any, change: Any) -> None:
    x = ids(seed=3)
    before = decode(mamba, x, prompt(mamba, x))
    torch.manual_seed(0)
    change(mixer_of(mamba))
    after = decode(mamba, x, prompt(mamba, x))
    plain = change not in (given_other_settings, given_a_parametrized_bias, given_another_forward)
    assert len(programs(mamba)) == (7 if plain else 5)  # without a mixer and its block
    if change is given_a_parametrized_bias:
        with pytest.raises(
            ValueError, match="dt_proj became a ParametrizedLinear after accelerate"
        ):
            ssmzoo.restore(mamba)
        remove_parametrizations(mixer_of_all(mamba).dt_proj, "bias")
    ssmzoo.restore(mamba)
    stock = decode(mamba, x, prompt(mamba, x))
    assert distance(after, stock) <= 1e-5
    assert distance(after, before) > 1e-3


def test_another_dtype_is_served_as_it_is(mamba: Any) -> None:
    x = ids(seed=3)
    mamba.double()
    double = decode(mamba, x, prompt(mamba, x))
    assert len(programs(mamba)) == 7
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


@pytest.mark.parametrize("watched", [False, True])
def test_a_prompts_step_sizes_are_multiplied_as_other_prompts(
    mamba: Any, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    product, read = mixers.many_rows_linear, []

    def note(x: Tensor, weight: Tensor) -> Tensor:
        read.append(weight)
        return product(x, weight)

    monkeypatch.setattr(mixers, "many_rows_linear", note)
    layers = [m.dt_proj for m in programs(mamba) if type(m).__name__.endswith("Mixer")]
    if watched:  # as offloaded weights are
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: None)
    prompt(mamba, ids())
    expected = [] if watched else [layer.weight for layer in layers]
    assert [*map(id, read)] == [*map(id, expected)]
    assert len(layers) == 2


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


def test_a_masked_token_leaves_no_trace() -> None:
    model, x = tiny("mamba2"), ids(2, 6)
    mask = torch.ones(2, 1, dtype=torch.long)
    mask[0] = 0
    stock = decode(model, x[:, 5:], prompt(model, x[:, :5]), attention_mask=mask)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    assert programs(model)
    cache = prompt(model, x[:, :5])
    ours = decode(model, x[:, 5:], cache, attention_mask=mask)
    assert distance(ours[1], stock[1]) <= 1e-5
    later = decode(model, x[:, :2], cache)  # what is masked moves no state
    read = torch.cat([x[:, :5], x[:, :2]], dim=1)[:1]
    assert distance(later[:1], model(read).logits[:, 5:].detach()) <= 1e-5


def test_code_that_is_not_known_stays_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = tiny("jamba"), ids(seed=3)
    kinds = {type(m).__name__: type(m) for m in model.modules()}
    norm, mlp = kinds["JambaRMSNorm"].forward, kinds["JambaMLP"].forward
    monkeypatch.setattr(kinds["JambaRMSNorm"], "forward", lambda self, x: norm(self, x) + 0.01)
    monkeypatch.setattr(kinds["JambaMLP"], "forward", lambda self, x: 0.98 * mlp(self, x))
    stock = decode(model, x, prompt(model, x))
    ssmzoo.accelerate(model)
    with caplog.at_level(logging.INFO, "ssmzoo"):
        ours = decode(model, x, prompt(model, x))
        told = len(caplog.records)
        decode(model, x, prompt(model, x))
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
        for accelerated in (False, True):
            if accelerated:
                ssmzoo.accelerate(model)
            model.zero_grad()
            caplog.clear()
            with caplog.at_level(logging.INFO, "ssmzoo"), watch() as ran:
                model(x, labels=x, use_cache=False).loss.backward()
            found.append([p.grad for p in model.parameters()])
        assert all(distance(b, a) <= 1e-4 for a, b in zip(*found, strict=True) if a is not None)
        told = "JambaRMSNorm stays stock: its numbers are others"
        assert (told in caplog.messages) == bool(logged)
        assert ("rms_norm", "cpu") in ran  # at least to find that out


def test_a_norm_of_zeros_keeps_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "MANY", 0)
    model = tiny("jamba")
    ssmzoo.accelerate(model)
    norm: Any = model.model.final_layernorm
    x = torch.zeros(2, 3, 32, requires_grad=True)  # from which no offset can be told
    norm(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert norm.weight.grad is not None


def test_norms_in_float16_are_on_our_op_where_stock_code_rounds_the_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is subnormal is rounded before the weight: no entry is to be judged by itself."""
    monkeypatch.setattr(norms, "MANY", 0)
    model: Any = tiny("mamba").half().eval()
    norm = model.backbone.layers[0].norm
    with torch.no_grad():
        norm.weight.fill_(32)
        ssmzoo.accelerate(model)
        x = torch.randn(4, 24, 32).half()
        x[..., 0] *= 2.0**-14
        norm(x)
    assert norm.__dict__[DECODING].offset == 0.0


@pytest.mark.parametrize("length", [1, 24], ids=["a token", "a sequence"])
@pytest.mark.parametrize("others", [0.0, 90.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_great_weight_of_a_norm_does_not_hide_the_others(
    dtype: torch.dtype, others: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen's norms multiply by 1 + weight: a channel of 200 must not stand for all of them."""
    monkeypatch.setattr(norms, "MANY", 0)
    model: Any = tiny("qwen3_next").to(dtype).eval()
    norm = model.base_model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.fill_(others)[3] = 200
        x = torch.randn(2, length, 32, dtype=dtype)
        expected = norm(x)
        ssmzoo.accelerate(model)
        found = norm(x)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_copies_prove_anew_and_nothing_stays_behind(mamba: Any) -> None:
    x = ids(seed=3)
    expected = decode(mamba, x, prompt(mamba, x))
    for other in (copy.deepcopy(mamba), pickle.loads(pickle.dumps(mamba))):
        assert not programs(other)
        assert distance(decode(other, x, prompt(other, x)), expected) <= 1e-5
        assert len(programs(other)) == 7
    ssmzoo.restore(mamba)
    assert not any(DECODING in module.__dict__ for module in mamba.modules())


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


def test_threads_of_other_dtypes_do_not_take_each_others_program() -> None:
    model = tiny("jamba")
    ssmzoo.accelerate(model)
    norm = next(m for m in model.modules() if type(m).__name__ == "JambaRMSNorm")
    norm.weight.requires_grad_(False)
    xs = [torch.randn(1, 1, norm.weight.shape[0]).to(t) for t in (torch.float32, torch.bfloat16)]
    expected = [norm(x) for x in xs]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(400):
                y = norm(xs[number])
                if y.dtype is not expected[number].dtype or distance(y, expected[number]) > 2**-6:
                    wrong.append(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_what_watches_sees_the_layers(mamba: Any) -> None:
    x = ids(1, 1, seed=3)
    norm = mamba.backbone.norm_f.requires_grad_(False)
    hidden = torch.randn(1, 1, norm.weight.shape[0])
    with torch.no_grad():
        traced = torch.jit.trace(lambda h: norm(h) + norm(2 * h), hidden)
        graph = make_fx(lambda h: norm(h) + 1)(hidden)
        other = 3 * torch.randn_like(hidden)
        assert distance(traced(other), 2 * norm(other)) <= 1e-5
        assert distance(graph(other), norm(other) + 1) <= 1e-5
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert norm(fake.from_tensor(hidden)).shape == hidden.shape
        rows = torch.vmap(norm)(hidden.expand(4, 1, -1))
        assert distance(rows, norm(hidden).expand(4, 1, -1)) <= 1e-5
    counts = []
    for accelerated in (True, False):
        if not accelerated:
            ssmzoo.restore(mamba)
        cache = prompt(mamba, x)
        with FlopCounterMode(display=False) as counter:
            decode(mamba, x, cache)
        counts.append(counter.get_total_flops())
    assert 0.8 * counts[1] < counts[0] <= counts[1]  # torch does not count what our scan does


def test_hooks_of_all_modules_and_of_gradients_are_called(mamba: Any) -> None:
    x, seen = ids(1, 3, seed=3), []
    hook = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    counts = []
    try:
        for accelerated in (True, False):
            if not accelerated:
                ssmzoo.restore(mamba)
            cache = prompt(mamba, x)
            seen.clear()
            decode(mamba, x, cache)
            # our convolution has its activation inside
            counts.append(sorted(name for name in seen if name != "SiLUActivation"))
    finally:
        hook.remove()
    assert counts[0] == counts[1]
    ssmzoo.accelerate(mamba.train())
    mixer, called = mixer_of_all(mamba), []
    for layer in (mixer.x_proj, mixer.out_proj):
        layer.register_full_backward_hook(lambda *_: called.append(1))
    mamba(x, labels=x, use_cache=False).loss.backward()
    assert len(called) == 2


def test_other_dtypes_and_devices_are_the_stock_code_s(mamba: Any) -> None:
    x = ids(seed=3)
    mixer = mixer_of(mamba)
    mixer.A_log.data = mixer.A_log.data.double()
    ours = decode(mamba, x, prompt(mamba, x))
    mixer.A_log.data = mixer.A_log.data.float()
    assert distance(decode(mamba, x, prompt(mamba, x)), ours) <= 1e-5
    assert len(programs(mamba)) == 7
    jamba = tiny("jamba").bfloat16()
    ssmzoo.accelerate(jamba)
    decode(jamba, x, prompt(jamba, x))
    mlp = next(m for m in programs(jamba) if type(m).__name__ == "JambaMLP")
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        mlp(torch.randn(1, 1, mlp.gate_proj.in_features))
    before = len(programs(jamba))
    with torch.no_grad():
        assert jamba.model.final_layernorm(torch.ones(1, 1, 32)).dtype is torch.float32
    decode(jamba, x, prompt(jamba, x))
    assert len(programs(jamba)) == before + 1  # the MLP's call had failed
    mamba, x = mamba.to("meta"), x.to("meta")
    assert decode(mamba, x, prompt(mamba, x)).shape == (*x.shape, VOCABULARY)
    assert not programs(mamba)  # which would keep the weights in memory


def test_weights_that_became_views_of_the_same_memory_count() -> None:
    model, x = tiny("jamba"), ids(seed=3)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    mlp = next(m for m in programs(model) if type(m).__name__ == "JambaMLP")
    half = mlp.gate_proj.out_features // 2
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.weight.data = layer.weight.data[:half]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :half]
    ours = decode(model, x, prompt(model, x))
    ssmzoo.restore(model)
    assert distance(ours, decode(model, x, prompt(model, x))) <= 1e-5


def test_parts_and_the_whole_are_restored_in_any_order(mamba: Any) -> None:
    ssmzoo.restore(mamba.backbone)
    with pytest.raises(ValueError, match="is accelerated already"):
        ssmzoo.accelerate(mamba)
    ssmzoo.restore(mamba)
    ssmzoo.accelerate(mamba)
    ssmzoo.restore(mamba)
    register_parametrization(mixer_of_all(mamba), "A_log", Shifted())
    told = ssmzoo.accelerated(mamba)
    assert list(told.values()) == [
        "stock: ParametrizedMambaMixer is another class, made from MambaMixer",
        "stock: not accelerated",
    ]


def test_a_projection_without_parameters_is_effective(mamba: Any) -> None:
    x, layer = ids(seed=3), mixer_of(mamba).dt_proj
    expected = decode(mamba, x, prompt(mamba, x))
    for name in ("weight", "bias"):
        kept = getattr(layer, name).detach()
        delattr(layer, name)
        setattr(layer, name, kept)  # as sharded weights are
    assert distance(decode(mamba, x, prompt(mamba, x)), expected) <= 1e-5


def larger(own: Any) -> Any:
    """Return a function that returns numbers a quarter larger than another one's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        y = own(*args, **kwargs)
        if isinstance(y, Tensor):
            return 1.25 * y
        if isinstance(y, tuple) and y[0].is_floating_point():
            return (1.25 * y[0], *y[1:])
        return y  # a model's output, or what a router chose

    return forward


@pytest.mark.parametrize("model_type", TYPES)
def test_a_forward_put_into_a_class_runs_from_the_next_token_on(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tiny(model_type), ids(2, 5)
    stock, x, more = copy.deepcopy(model), whole[:, :3], whole[:, 3:]
    ssmzoo.accelerate(model)
    before, served = decode(model, more, prompt(model, x)), programs(model)
    kinds = {type(layer) for layer in stock.modules()} - {type(stock), type(stock.base_model)}
    effective = set()
    for kind in kinds - {nn.ModuleList, nn.Embedding}:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", larger(kind.forward))
            ours = decode(model, more, prompt(model, x))
            with torch.no_grad():  # whole: stock Bamba counts positions behind a cache from 0
                theirs = stock(whole).logits[:, 3:]
        assert distance(ours, theirs) <= 1e-5, kind
        if distance(ours, before) > 1e-5:
            effective.add(kind)
    mixers = {type(stock.get_submodule(name)) for name in ssmzoo.accelerated(model)}
    assert effective >= {nn.Linear, *mixers}
    assert effective >= {k for k in kinds if k.__name__.endswith(("MLP", "RMSNorm"))}
    decode(model, more, prompt(model, x))  # writes the programs again
    assert decode(model, more, prompt(model, x)).equal(before)
    assert programs(model) == served


def test_code_that_a_forward_calls_is_the_code_that_runs(
    mamba: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, x = copy.deepcopy(mamba), ids(seed=3)
    ssmzoo.restore(stock)
    before = decode(mamba, x, prompt(mamba, x))
    kinds = {type(m).__name__: type(m) for m in stock.modules()}
    module = sys.modules[kinds["MambaMixer"].__module__]
    norm = kinds["MambaRMSNorm"]
    replaced = [
        (module, name, larger(getattr(module, name)))
        for name in ("apply_mask_to_padding_states", "mamba_selective_state_update")
    ]
    replaced += [
        (norm.forward, "__code__", (lambda self, hidden_states: hidden_states).__code__),
        (norm, "__call__", larger(norm.__call__)),
        (nn.functional, "silu", larger(nn.functional.silu)),
    ]
    for place in replaced:
        with monkeypatch.context() as patch:
            patch.setattr(*place)
            ours, theirs = (decode(m, x, prompt(m, x)) for m in (mamba, stock))
        assert distance(ours, theirs) <= 1e-5, place
        assert distance(ours, before) > 1e-3
    inner = type(mixer_of_all(mamba))  # the class that accelerate() made
    with monkeypatch.context() as patch:
        patch.setattr(inner, "forward", larger(inner.forward))
        ours = decode(mamba, x, prompt(mamba, x))
        patch.setattr(kinds["MambaMixer"], "forward", larger(kinds["MambaMixer"].forward))
        assert distance(ours, decode(stock, x, prompt(stock, x))) <= 1e-5
    decode(mamba, x, prompt(mamba, x))
    assert decode(mamba, x, prompt(mamba, x)).equal(before)


def test_a_replaced_mixer_reads_no_packed_sequences_and_none_behind_a_cache(
    mamba: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, kind = ids(2, 6, seed=3), mixer_of_all(mamba).stock_class
    packed = {"cu_seqlens": torch.tensor([0, 4, 6]), "use_cache": False}
    with torch.no_grad():
        whole = mamba(x[:1], **packed).logits
    cache = prompt(mamba, x)
    states = copy.deepcopy(cache)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", larger(kind.forward))
        with torch.no_grad(), pytest.raises(RuntimeError, match="packed or padded sequences"):
            mamba(x[:1], **packed)
        with torch.no_grad(), pytest.raises(RuntimeError, match="several tokens behind a cache"):
            mamba(x, **cache)
    with torch.no_grad():
        assert mamba(x[:1], **packed).logits.equal(whole)
        assert mamba(x, **cache).logits.equal(mamba(x, **states).logits)


def test_a_model_accelerated_after_a_change_has_it_on_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, model = ids(seed=3), tiny("mamba")
    module = sys.modules[type(mixer_of_all(model)).__module__]
    ssmzoo.accelerate(tiny("mamba"))
    masked = larger(module.apply_mask_to_padding_states)
    monkeypatch.setattr(module, "apply_mask_to_padding_states", masked)
    stock = decode(model, x, prompt(model, x))
    ssmzoo.accelerate(model)
    with watch() as ran:
        assert distance(decode(model, x, prompt(model, x)), stock) <= 1e-5
    assert ("selective_scan", "cpu") in ran


def test_arguments_come_by_place_or_by_name_and_norms_that_are_replaced_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = tiny("bamba"), ids(1, 4)
    inner, mask, places = model.model, torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]
    found = []
    for accelerated in (False, True):
        if accelerated:
            ssmzoo.accelerate(model)
        with torch.no_grad():
            norm = inner.final_layernorm(hidden_states=torch.ones(1, 1, 32))
            cache = inner(x[:, :3], use_cache=True)[CACHE]
            last = inner(x[:, 3:], mask, places[:, 3:], **{CACHE: cache}).last_hidden_state
        found.append(torch.cat([norm, last], dim=1))
    assert distance(*found) <= 1e-5
    monkeypatch.setattr(norms, "MANY", 0)  # norms of whole sequences are on our op, too
    with torch.no_grad():
        kind, stock = inner.final_layernorm.stock_class, inner(x).last_hidden_state
        monkeypatch.setattr(kind, "forward", larger(kind.forward))
        replaced = inner(x).last_hidden_state
        ssmzoo.restore(model)
        assert distance(replaced, inner(x).last_hidden_state) <= 1e-5
    assert distance(replaced, stock) > 1e-2
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        ssmzoo.accelerate(model).model(x, input_ids=x)


def calls_of_c(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every call of programs adds how many it runs."""
    ran, run = [], decoding.run_programs
    monkeypatch.setattr(
        decoding, "run_programs", lambda calls, rows: (ran.append(len(calls)), run(calls, rows))
    )
    return ran


def a_layer_taken_away(model: Any) -> None:
    del model.backbone.layers[1]
    model.config.num_hidden_layers = 3
    for place, layer in enumerate(model.backbone.layers):
        layer.mixer.layer_idx = place


def two_layers_exchanged(model: Any) -> None:
    layers = model.backbone.layers
    layers[1].norm, layers[2].norm = layers[2].norm, layers[1].norm
    layers[1], layers[2] = layers[2], layers[1]
    for place, layer in enumerate(layers):
        layer.mixer.layer_idx = place


def a_hook_on_a_block(model: Any) -> None:
    model.backbone.layers[2].register_forward_hook(lambda _, given, out: out + given[0])


def a_forward_of_a_block(model: Any) -> None:
    block = model.backbone.layers[2]
    block.forward = lambda x, **kwargs: 2 * type(block).forward(block, x, **kwargs)


def a_hook_inside_a_block(model: Any) -> None:
    model.backbone.layers[1].mixer.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        a_layer_taken_away,
        two_layers_exchanged,
        a_hook_on_a_block,
        a_forward_of_a_block,
        a_hook_inside_a_block,
    ],
)
@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_a_token_of_blocks_is_one_call_until_one_changes(
    model_type: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tiny(model_type, num_hidden_layers=4), ids(seed=3)
    for layer in model.backbone.layers:  # so that none can take another's place
        nn.init.normal_(layer.norm.weight)
    ssmzoo.accelerate(model)
    before = decode(model, x, prompt(model, x))
    cache, ran = prompt(model, x), calls_of_c(monkeypatch)
    decode(model, x[:, :1], cache)
    assert ran == [4, 1]  # the blocks, and the last norm
    with torch.no_grad():
        shown = model(x[:, 1:2], use_cache=True, output_hidden_states=True, **cache).hidden_states
    assert len({x.data_ptr() for x in shown}) == len(shown)
    change(model)
    after = decode(model, x, prompt(model, x))
    ssmzoo.restore(model)
    assert distance(after, decode(model, x, prompt(model, x))) <= 1e-5
    assert (distance(after, before) > 1e-3) == (change is not a_hook_inside_a_block)


def half_of_the_layers(
    self: Any, input_ids: Tensor, cache: Any = None, use_cache: Any = None, **kwargs: Any
) -> MambaOutput:
    """A forward of somebody else's."""
    x = self.embeddings(input_ids)
    for layer in self.layers[:2]:
        x = layer(x, **{MIXER_CACHE: cache or kwargs.get(MIXER_CACHE)})
    return MambaOutput(last_hidden_state=self.norm_f(x), **{MIXER_CACHE: cache})


@pytest.mark.parametrize("how", ["object", "class"])
def test_another_forward_of_the_backbone_calls_its_blocks_itself(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tiny("mamba", num_hidden_layers=4), ids(seed=3)
    kind = type(model.backbone)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    cache = prompt(model, x)
    before = copy.deepcopy(cache)
    if how == "object":
        model.backbone.forward = types.MethodType(half_of_the_layers, model.backbone)
    else:
        monkeypatch.setattr(kind, "forward", half_of_the_layers)
    ours = decode(model, x, cache)
    ssmzoo.restore(model)
    assert distance(ours, decode(model, x, before)) <= 1e-5


def test_a_model_around_the_backbone_may_look_at_every_block() -> None:
    class Probe(MambaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            found = self.backbone(input_ids, output_hidden_states=True, **kwargs)
            return MambaCausalLMOutput(logits=torch.stack(found.hidden_states).sum(0))

    def read(model: Any, shown: bool) -> Tensor:
        with torch.no_grad():
            output = model.backbone(x[:, :4], use_cache=True)
        name = cache_name(output.keys())
        assert name is not None
        if shown:
            return decode(model, x[:, 4:], {name: output[name]})
        with torch.no_grad():
            for i in range(4):
                output = model.backbone(x[:, i : i + 1], use_cache=True, **{name: output[name]})
        return x

    torch.manual_seed(0)
    model, x = Probe(tiny("mamba", num_hidden_layers=4).config).eval(), ids(seed=3)
    stock = read(model, shown=True)
    ssmzoo.accelerate(model)
    read(model, shown=False)  # its blocks are joined
    assert distance(read(model, shown=True), stock) <= 1e-5


@pytest.mark.parametrize("model_type", ["mamba2", "jamba", "qwen3_5_text"])
def test_states_move_behind_a_prompt_with_gradients(model_type: str) -> None:
    model, x = tiny(model_type), ids(2, 10)
    with torch.no_grad():
        stock = model(x).logits[:, 4:]
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    output = model(x[:, :4], use_cache=True)
    name = cache_name(output.keys())
    assert name is not None
    ours = decode(model, x[:, 4:], {name: output[name]})
    assert distance(ours, stock) <= 1e-5


def test_weights_that_are_no_parameters_leave_blocks_to_their_own_code(mamba: Any) -> None:
    x = ids(seed=3)
    expected = decode(mamba, x, prompt(mamba, x))
    for layer in mamba.modules():  # as in replicas
        for name in [*layer._parameters]:
            weight = layer._parameters.pop(name)
            layer.__dict__[name] = None if weight is None else weight.detach()
    assert distance(decode(mamba, x, prompt(mamba, x)), expected) <= 1e-5


def test_layers_that_were_taken_away_are_let_go() -> None:
    model, x = tiny("mamba", num_hidden_layers=4), ids(seed=3)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    gone = weakref.ref(model.backbone.layers[3])
    model.backbone.layers = model.backbone.layers[:2]
    model.config.num_hidden_layers = 2
    decode(model, x, prompt(model, x))
    gc.collect()
    assert gone() is None


def test_a_hook_on_the_last_block_leaves_the_others_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = tiny("mamba", num_hidden_layers=4), ids(seed=3)
    ssmzoo.accelerate(model)
    decode(model, x, prompt(model, x))
    model.backbone.layers[3].register_forward_hook(lambda *_: None)
    cache, ran = prompt(model, x), calls_of_c(monkeypatch)
    decode(model, x[:, :2], cache)
    assert ran[5:] == [3, 1, 1]  # three blocks, the last, the last norm
