"""Blocks of the zoo's models decode a token in one call, where and as long as that is what they do.

The conformance kit's check ``fused_steps`` compares the numbers of every family's tiny model.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from ssmzoo import load_family
from ssmzoo.modeling import LayerState, RMSNorm, UnservedError, decoding, layers
from ssmzoo.modeling.backbone import SSMBlock
from ssmzoo.modeling.decoding import DECODING
from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.testing.forms import check_fused_steps
from ssmzoo.testing.subject import NotApplicable, Subject
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.dispatch import watch
from ssmzoo_kernels.token_step import run_programs
from ssmzoo_longhorn import modeling_longhorn
from ssmzoo_longhorn.modeling_longhorn import LonghornMixer

# what PEFT calls of transformers that it will drop
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

SCALAR = {"decay": "scalar", "decay_rank": None}
MAMBA2 = {**SCALAR, "delta_rule": False, "beta": "dt", "feature_map": "silu", "skip": True}
MAMBA2 |= {"out_norm": "gated_group", "out_gate": "silu", "gate_rank": None}
SUM = {"decay": "channel", "decay_rank": None, "gate_logit_normalizer": 16, "delta_rule": False}
SUM |= {"beta": "none", "feature_map": "identity"}
HGRN2 = {**SUM, "feature_map": "complement", "gate_logit_normalizer": 1, "num_key_heads": None}
HGRN2 |= {"d_conv": None, "conv_bias": False, "out_gate": "none", "gate_rank": None}

# settings of every path that programs are written for
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("longhorn", {}),
    ("longhorn", {"transition": "exact", "out_norm": True, "use_bias": True}),
    ("longhorn", {"intermediate_size": 48, "residual_in_fp32": False}),
    ("longhorn", {"intermediate_size": 48, "mlp_type": "swiglu", "prenorm": False}),
    ("longhorn", {"norm_type": "none", "residual": False}),
    ("longhorn", {"norm_type": "layer"}),
    ("coffee", {}),
    ("coffee", {"variant": "token_gate", "lambda_param": "clamp"}),
    ("coffee", {"variant": "input_matrix", "output_filter": True}),
    ("coffee", {"variant": "no_feedback"}),
    ("coffee", {"variant": "linear_feedback", "use_skip": False}),
    ("coffee", {"block": "bare"}),
    ("coffee", {"variant": "s6", "output_filter": False}),
    ("coffee", {"variant": "s6", "output_filter": False, "block": "bare", "use_skip": False}),
    ("dss", {"kernel_variant": "exp"}),
    ("dss", {"kernel_variant": "exp", "channels": 2}),
    ("rtf", {}),
    ("rtf", {"mixer_rank": None}),
    ("rtf", {"block": "s4", "mixer_rank": None, "num_denominators": 2}),
    ("rtf", {"block": "filter", "mixer_rank": None}),
    ("spacetime", {}),
    ("spacetime", {"block": "glu", "n_kernels": None}),
    ("linear_attention", {}),
    ("linear_attention", {"decay": "none", "decay_rank": None, "beta_scale": 2}),
    ("linear_attention", {**SCALAR, "out_gate": "silu", "gate_rank": None}),
    ("linear_attention", {**SCALAR, "out_gate": "none", "gate_rank": None}),
    ("linear_attention", MAMBA2),
    ("linear_attention", {**MAMBA2, "out_norm": "gated"}),
    ("linear_attention", SUM),
    ("linear_attention", {**SUM, "decay": "fixed", "gate_logit_normalizer": None, "rotary": True}),
    ("linear_attention", {**SUM, "decay": "none", "gate_logit_normalizer": None}),
    ("linear_attention", HGRN2),
    ("rwkv7", {}),
    ("rwkv7", {"norm_type": "rms"}),
    ("mamba3", {}),
    ("mamba3", {"rate": "heavy_tail", "rate_floor": 0.5, "out_norm": True}),
    ("s4", {}),
    ("s4", {"block": "glu", "n_ssm": 1}),
    ("s4", {"block": "filter"}),
    ("s5", {}),
    ("s5", {"variant": "lru", "activation": "full_glu"}),
    ("s5", {"activation": "half_glu1"}),
    ("s5", {"activation": "gelu"}),
    ("h3", {}),
    ("bmojo", {"mixer_types": ["mamba"]}),
    ("bmojo", {"mixer_types": ["swa"], "use_rope": True}),
    ("bmojo", {"mixer_types": ["bmojo_f"], "num_key_value_heads": 1}),
    ("bmojo", {"mixer_types": ["bmojo"], "eidetic_overlap": "mask"}),
    ("bmojo", {"mixer_types": ["bmojo"], "wiring": "parallel", "use_rope": True}),
    ("bmojo", {"mixer_types": ["bmojo"], "innovation_error": "relative", "sliding_window": 3}),
]
SERVED += [(name, {"d_conv": 1}) for name in ("longhorn", "coffee", "bmojo", "linear_attention")]
LAYER_BY_LAYER: list[tuple[str, dict[str, Any]]] = [
    ("longhorn", {"norm_type": "batch"}),
    ("dss", {"kernel_variant": "exp", "max_kernel_length": 8}),
    ("linear_attention", {"rotary": True}),
    ("linear_attention", {"gate_logit_normalizer": 16}),
    ("rtf", {"filter": "modal"}),
    ("rtf", {"decode_mode": "fir", "kernel_mode": "truncated", "trunc_len": 16}),
]


def model_of(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    family = load_family(name)
    torch.manual_seed(0)
    config = family.config(**{**family.tiny, "eos_token_id": None, **fields})
    return family.causal_lm_class(config).to(dtype).eval()


def ids(rows: int = 2, length: int = 12) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(3, 20, (rows, length), generator=draw)


@torch.no_grad()
def decode(model: Any, x: Tensor, cache: Any = None, prompt: int = 4) -> Tensor:
    """Return the logits of tokens, one at a time, behind a prompt or a cache."""
    if cache is None:
        cache = model(x[:, :prompt], use_cache=True).cache
        x = x[:, prompt:]
    steps = [model(token, cache=cache).logits for token in x.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def layered(model: Any, x: Tensor) -> Tensor:
    with use_backend("eager"):
        return decode(model, x)


def distance(x: Tensor, judge: Tensor) -> float:
    return float((x - judge).abs().max() / judge.abs().max())


def steps(model: nn.Module) -> list[bool]:
    """Return of every block whether it decodes by a program now."""
    found = [m.__dict__.get(DECODING) for n, m in model.named_modules() if n[-1:].isdigit()]
    return [known is not None and known.step is not None for known in found]


@pytest.mark.parametrize(("name", "fields"), SERVED, ids=str)
@pytest.mark.long
def test_programs_give_what_layers_give(name: str, fields: dict[str, Any]) -> None:
    model, x = model_of(name, torch.float64, **fields), ids(3, 8)
    fused = decode(model, x)
    assert steps(model)
    assert all(steps(model))
    assert distance(fused, layered(model, x)) <= 1e-10


@pytest.mark.parametrize(("name", "fields"), LAYER_BY_LAYER, ids=str)
def test_what_has_no_program_goes_layer_by_layer(name: str, fields: dict[str, Any]) -> None:
    model, x = model_of(name, **fields), ids()
    with watch() as ran:
        y = decode(model, x)
    assert "token_step" not in dict(ran)
    assert distance(y, layered(model, x)) <= 1e-5


def test_growing_modes_go_layer_by_layer() -> None:
    model, x = model_of("dss", kernel_variant="softmax", kernel_norm_length=64), ids()
    with torch.no_grad():
        model.model.layers[0].mixer.Lambda[0, 0] = 0.01
    y = decode(model, x)
    assert not steps(model)[0]
    assert distance(y, layered(model, x)) <= 1e-5


def test_the_state_space_model_of_an_attending_layer_has_a_program() -> None:
    model, x = model_of("bmojo", mixer_types=["bmojo"], fading_mode="offset"), ids()
    with watch() as ran:
        y = decode(model, x)
    assert ("token_step", "cpu") in ran
    assert not any(steps(model))
    assert distance(y, layered(model, x)) <= 1e-5


@pytest.mark.parametrize("name", ["longhorn", "coffee", "dss", "rtf"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_lose_no_more_than_layer_by_layer(name: str, kind: torch.dtype) -> None:
    fields = {"kernel_variant": "exp"} if name == "dss" else {}
    model, x = model_of(name, **fields), ids(3)
    model = model.to(kind)
    exact = layered(copy.deepcopy(model).double(), x)
    fused, single = decode(model, x), layered(model, x)
    assert all(steps(model))
    assert fused.dtype == single.dtype
    lost = distance(single.double(), exact)
    assert distance(fused.double(), exact) <= max(lost, 4 * torch.finfo(kind).eps)


def _hooked(model: Any) -> None:
    for layer in model.model.layers:
        layer.mixer.in_proj.register_forward_hook(lambda _, __, y: 2 * y)


def _parametrized(model: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    for layer in model.model.layers:
        register_parametrization(layer.mixer.in_proj, "weight", Twice())


def _replaced(model: Any) -> None:
    for layer in model.model.layers:
        layer.mixer.in_proj.weight = nn.Parameter(2 * layer.mixer.in_proj.weight.detach())


def _written_over(model: Any) -> None:
    for layer in model.model.layers:
        layer.mixer.in_proj.weight.data.mul_(2)


def _norms_of_another_kind(model: Any) -> None:
    for layer in model.model.layers:
        layer.norm = nn.Identity()
        layer.norm.weight = nn.Parameter(torch.ones(1))


def _set_otherwise(model: Any) -> None:
    for layer in model.model.layers:
        layer.norm.eps = 0.5


def _a_layers_own_forward(model: Any) -> None:
    layer = model.model.layers[0]
    own = layer.forward
    del layer.__dict__["startable_states"]  # as many attributes as before
    layer.forward = lambda *given: 2 * own(*given)


def _a_copy_with_a_hook(model: Any) -> None:
    twin = copy.copy(model.model.layers[0])  # which shares its program
    twin.__dict__["_forward_hooks"] = OrderedDict()
    twin.register_forward_hook(lambda _, __, y: 2 * y)
    model.model.layers[0] = twin


def _hooks_of_another_module(model: Any) -> None:
    _hooked(other := model_of("longhorn"))
    for layer, twin in zip(model.model.layers, other.model.layers, strict=True):
        layer.mixer.in_proj._forward_hooks.update(twin.mixer.in_proj._forward_hooks)


CHANGES = [_hooked, _parametrized, _replaced, _written_over, _norms_of_another_kind]
CHANGES += [_hooks_of_another_module]


@pytest.mark.parametrize(
    "change", [*CHANGES, _set_otherwise, _a_layers_own_forward, _a_copy_with_a_hook]
)
def test_what_changes_later_takes_effect(change: Any) -> None:
    model, x = model_of("longhorn"), ids()
    before = decode(model, x)
    assert all(steps(model))
    change(model)
    after = decode(model, x)
    assert distance(after, layered(model, x)) <= 1e-5
    assert distance(after, before) > 1e-2


def _slower(mixer: Any) -> None:
    mixer.decay.activation = torch.relu


@pytest.mark.parametrize(
    ("name", "change", "fields"),
    [
        ("rwkv7", _slower, {}),
        ("rwkv7", {"rms_norm_eps": 0.5}, {}),
        ("mamba3", {"rate_floor": 3.0}, {}),
        ("mamba3", {"rate": "heavy_tail"}, {}),
        ("linear_attention", {"gate_logit_normalizer": 1}, SUM),
        ("linear_attention", {"beta_scale": 2.0}, {}),
    ],
)
def test_settings_of_a_mixer_that_change_later_take_effect(
    name: str, change: Any, fields: dict[str, Any]
) -> None:
    model, x = model_of(name, **fields), ids()
    before = decode(model, x)
    assert all(steps(model))
    for layer in model.model.layers:
        if isinstance(change, dict):
            for field, value in change.items():
                setattr(layer.mixer.config, field, value)
        else:
            change(layer.mixer)
    after = decode(model, x)
    assert distance(after, layered(model, x)) <= 1e-5
    assert distance(after, before) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("behind_autograd", [False, True])
def test_lower_bounds_of_the_model_that_change_later_take_effect(behind_autograd: bool) -> None:
    model, x = model_of("linear_attention", **HGRN2), ids()
    before = decode(model, x)
    assert all(steps(model))
    bounds = model.model.lower_bounds.weight
    (bounds.data if behind_autograd else bounds)[1] = 3
    after = decode(model, x)
    assert all(steps(model))
    assert distance(after, layered(model, x)) <= 1e-5
    assert distance(after, before) > 1e-3


def larger(own: Any) -> Any:
    """Return a function that returns numbers a quarter larger than another one's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        y = own(*args, **kwargs)
        return 1.25 * y if isinstance(y, Tensor) else (1.25 * y[0], *y[1:])

    return forward


def twice_the_eps(self: RMSNorm, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, self.weight.shape, self.weight, 0.5)


class Louder(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


# where somebody puts other code, and the code
REPLACED: list[tuple[Any, str, Any]] = [
    (LonghornMixer, "scan_inputs", larger(LonghornMixer.scan_inputs)),  # a method, not its own
    (LonghornMixer, "__call__", larger(nn.Module.__call__)),
    (SSMBlock, "_layered", larger(SSMBlock._layered)),
    (RMSNorm.forward, "__code__", twice_the_eps.__code__),  # as autoreload does
    (modeling_longhorn, "longhorn_scan", larger(modeling_longhorn.longhorn_scan)),
    (layers, "few_rows_linear", larger(layers.few_rows_linear)),
    (nn.functional, "silu", larger(nn.functional.silu)),
    (nn.functional, "rms_norm", larger(nn.functional.rms_norm)),
    (nn.Linear, "forward", larger(nn.Linear.forward)),
]


@pytest.mark.parametrize(("owner", "name", "code"), REPLACED)
def test_code_that_a_forward_calls_is_the_code_that_runs(
    owner: Any, name: str, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of("longhorn", intermediate_size=48, mlp_type="swiglu"), ids()
    before = decode(model, x)
    assert all(steps(model))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, code)
        after = decode(model, x)
        assert distance(after, layered(model, x)) <= 1e-5
        assert distance(after, before) > 1e-3
        assert not any(steps(model))
    assert decode(model, x).equal(before)
    assert all(steps(model))


def test_an_objects_own_methods_and_class_are_the_ones_that_run() -> None:
    model, x = model_of("longhorn"), ids()
    before = decode(model, x)
    mixer, norm = model.model.layers[0].mixer, model.model.layers[1].norm
    for owner, name, own in (
        (mixer, "scan_inputs", larger(mixer.scan_inputs)),
        (norm, "__class__", Louder),
    ):
        setattr(owner, name, own)
        after = decode(model, x)
        assert steps(model) == [owner is norm, owner is mixer]
        assert distance(after, layered(model, x)) <= 1e-5
        assert distance(after, before) > 1e-3
        if owner is mixer:
            del owner.scan_inputs
        else:
            owner.__class__ = RMSNorm
        assert decode(model, x).equal(before)
        assert steps(model) == [True, True]


@pytest.mark.parametrize("name", ["dss", "rtf"])
def test_derived_tables_follow_their_parameters(name: str) -> None:
    fields = {"kernel_variant": "exp"} if name == "dss" else {}
    model, x = model_of(name, **fields), ids()
    before = decode(model, x)
    with torch.no_grad():
        for layer in model.model.layers:
            mixer = layer.mixer
            (mixer.log_dt if name == "dss" else mixer.b).add_(0.5)
    after = decode(model, x)
    assert all(steps(model))
    assert distance(after, layered(model, x)) <= 1e-5
    assert distance(after, before) > 1e-4


# by family, a method that makes the values which its mixer keeps
MADE_BY = {
    **{"dss": "eigenvalues", "s4": "_tables", "s5": "poles"},
    **{"h3": "modes", "rtf": "gain", "spacetime": "filters"},
}


@pytest.mark.parametrize(("name", "method"), MADE_BY.items())
def test_derived_tables_follow_the_code_that_makes_them(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(name), ids()
    kind = type(model.model.layers[0].mixer)
    before = decode(model, x)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, larger(getattr(kind, method)))
        after = decode(model, x)
        assert distance(after, decode(copy.deepcopy(model), x)) <= 1e-5  # which keeps no tables
        assert distance(after, before) > 1e-4
    assert distance(decode(model, x), before) <= 1e-5


@pytest.mark.parametrize("name", ["longhorn", "coffee", "rtf"])
def test_adapters_put_on_later_take_effect(name: str) -> None:
    model, x = model_of(name), ids()
    before = decode(model, x)
    config = LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    after = decode(adapted, x)
    assert not any(steps(model))
    assert distance(after, layered(adapted, x)) <= 1e-5
    assert distance(after, before) > 1e-2
    merged = adapted.merge_and_unload()
    again = decode(merged, x)
    assert all(steps(merged))
    assert distance(again, after) <= 1e-5


def test_copies_and_pickles_write_programs_of_their_own() -> None:
    model, x = model_of("longhorn"), ids()
    y = decode(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(steps(other))
        with torch.no_grad():
            model.model.layers[0].mixer.D.zero_()  # the other has its own
        assert distance(decode(other, x), y) <= 1e-6
        assert all(steps(other))


def test_a_call_that_fails_leaves_the_states() -> None:
    model, x = model_of("longhorn"), ids()
    decode(model, x)
    with torch.no_grad():
        cache = model(x[:, :4], use_cache=True).cache
    before = copy.deepcopy(cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("stop here")

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        decode(model, x[:, 4:5], cache)
    hook.remove()
    for ours, theirs in zip(cache.layers, before.layers, strict=True):
        assert ours.states.keys() == theirs.states.keys()
        assert all(ours.states[name].equal(theirs.states[name]) for name in ours.states)
    assert decode(model, x[:, 4:], cache).equal(decode(model, x[:, 4:], before))


def test_a_learned_state_gets_no_other_numbers() -> None:
    """A ring that somebody trains is not written over."""
    model, x = model_of("rtf"), ids()
    decode(model, x)
    with torch.no_grad():
        cache = model(x[:, :4], use_cache=True).cache
    ring = cache.layers[0].states["ring"].requires_grad_()
    before = ring.detach().clone()
    decode(model, x[:, 4:5], cache)
    assert ring.equal(before)


def test_training_and_gradients_go_layer_by_layer() -> None:
    model, x = model_of("longhorn"), ids()
    cache = model(x[:, :4], use_cache=True).cache
    with watch() as ran:
        model(x[:, 4:5], cache=cache).logits.sum().backward()
    assert "token_step" not in dict(ran)
    model.train()
    with watch() as ran:
        decode(model, x)
    assert "token_step" not in dict(ran)


def test_a_mixer_with_another_forward_goes_by_that() -> None:
    from ssmzoo_longhorn.modeling_longhorn import LonghornMixer

    class Halved(LonghornMixer):
        def forward(self, hidden_states: Tensor, state: Any, packing: Any = None) -> Tensor:
            return super().forward(hidden_states, state, packing) / 2

    class Written(Halved):
        def write_token(self, program: Any, parts: Any, x: Any, states: Any) -> Any:
            raise UnservedError

    assert LonghornMixer.writes_tokens
    assert not Halved.writes_tokens
    assert not Written.writes_tokens


def test_the_kit_tells_a_wrong_program_from_one_that_is_not_there(monkeypatch: Any) -> None:
    family = load_family("longhorn")
    right = LonghornMixer.write_token

    def larger(self: Any, program: Any, *given: Any) -> Any:
        y = right(self, program, *given)
        return program.linear(y, 1.5 * torch.eye(y.width, dtype=program.dtype))

    def mistyped(self: Any, program: Any, parts: Any, x: Any, states: Any) -> Any:
        return parts.linear(program, x, "in_prj")

    with monkeypatch.context() as patch:
        patch.setattr(ForwardCode, "unchanged", lambda *_: True)
        with pytest.raises(AssertionError, match="later is not called at every token"):
            check_fused_steps(Subject(family))
    monkeypatch.setattr(LonghornMixer, "write_token", larger)
    with pytest.raises(AssertionError, match="write_token: its program gave other numbers"):
        check_fused_steps(Subject(family))
    monkeypatch.setattr(LonghornMixer, "write_token", mistyped)
    with pytest.raises(
        NotApplicable, match=r"layer by layer: .* LonghornMixer has no layer 'in_prj'"
    ):
        check_fused_steps(Subject(family))


@torch.no_grad()
def test_states_of_fewer_rows_than_the_token_are_read_by_no_program() -> None:
    """A program would read behind them."""
    model, x = model_of("longhorn"), torch.randn(2, 1, 32)
    block, initial = model.model.layers[0], model(ids(2, 4), use_cache=True).cache.layers[0].states
    block(x, LayerState(initial, keep=True))
    assert steps(model)[0]
    one = {name: state[:1].contiguous() for name, state in initial.items()}
    with watch() as ran, contextlib.suppress(ValueError, RuntimeError):  # the layers' own words
        block(x, LayerState(one, keep=True))
    assert ("token_step", "cpu") not in ran


# -- layers that follow one another ----------------------------------------------------------------


def joined_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of programs of each call of C."""
    counts: list[int] = []

    def counted(calls: Any, rows: int) -> None:
        counts.append(len(calls))
        run_programs(calls, rows)

    monkeypatch.setattr(decoding, "run_programs", counted)
    return counts


def test_a_token_of_all_layers_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of("longhorn", num_hidden_layers=3), ids()
    expected = layered(model, x)
    decode(model, x)
    counts = joined_calls(monkeypatch)
    assert distance(decode(model, x), expected) <= 1e-5
    assert counts == [3] * (x.shape[1] - 4)


def test_a_layer_that_does_more_is_called_between_those_that_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = model_of("longhorn", num_hidden_layers=4), ids()
    decode(model, x)
    seen: list[Tensor] = []

    def double(_layer: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
        seen.append(y)
        return 2 * y

    model.model.layers[1].register_forward_hook(double)
    expected = layered(model, x)
    seen.clear()
    counts = joined_calls(monkeypatch)
    assert distance(decode(model, x), expected) <= 1e-5
    assert counts == [1, 1, 2] * (x.shape[1] - 4)
    assert len(seen) == 1 + x.shape[1] - 4


def test_hidden_states_of_all_layers_are_those_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of("longhorn"), ids()
    with torch.no_grad():
        cache = model(x[:, :4], use_cache=True).cache
        for token in x[:, 4:].split(1, dim=1):
            one, two = copy.deepcopy(cache), cache
            shown = model(token, cache=one, output_hidden_states=True).hidden_states
            plain = model(token, cache=two)
        assert distance(model.lm_head(shown[-1]), plain.logits) <= 1e-6


def test_an_innovation_that_is_not_finite_leaves_states_and_the_layers_own_message() -> None:
    model, x = model_of("bmojo", num_hidden_layers=2, mixer_types=["bmojo"]), ids()
    decode(model, x)
    with torch.no_grad():
        cache = model(x[:, :4], use_cache=True).cache
        before = copy.deepcopy(cache)
        poisoned = torch.full((2, 1, model.config.hidden_size), float("inf"))
        with pytest.raises(ValueError, match="finite"):
            model(inputs_embeds=poisoned, cache=cache)
        y, again = (model(x[:, 4:5], cache=c).logits for c in (cache, before))
    assert torch.equal(y, again)


class Steered(SSMBlock):
    """A block that does more than its own class."""

    def forward(self, hidden_states: Tensor, *more: Any) -> Tensor:
        return 1.5 * super().forward(hidden_states, *more)


@pytest.mark.parametrize("where", ["a subclass", "the class", "its call"])
def test_a_block_with_more_code_around_its_own_is_called(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of("longhorn"), ids()
    if where == "a subclass":
        model.model.layers[1].__class__ = Steered
    else:
        name = "forward" if where == "the class" else "__call__"
        own = getattr(SSMBlock, name)
        monkeypatch.setattr(SSMBlock, name, lambda self, *given: 1.5 * own(self, *given))
    assert distance(decode(model, x), layered(model, x)) <= 1e-5


def test_a_program_that_leaves_another_state_is_refused(monkeypatch):
    call = decoding.TokenStep.__call__

    def spoiled(self, x, states):
        y = call(self, x, states)
        for state in states:
            state.mul_(1.5)
        return y

    model = model_of("longhorn")
    judge = layered(model, ids())
    monkeypatch.setattr(decoding.TokenStep, "__call__", spoiled)
    ours = decode(model, ids())
    assert not any(steps(model))
    assert distance(ours, judge) <= 1e-5


@pytest.mark.parametrize("name", ["transposed", "cut"])
def test_a_weight_that_became_another_view_of_its_memory_counts(name):
    model = model_of("rwkv7")
    decode(model, ids())
    assert all(steps(model))
    mixer = model.model.layers[0].mixer
    if name == "transposed":
        mixer.r_proj.weight.data = mixer.r_proj.weight.data.t()
    else:
        nn.init.normal_(mixer.bonus)
        decode(model, ids())
        mixer.bonus.data = mixer.bonus.data[:1]  # the same for all features
    assert distance(decode(model, ids()), layered(model, ids())) <= 1e-5
