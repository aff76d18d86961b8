"""``ssmzoo.accelerate``: transformers' recurrent models give the same on our ops as before."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.modeling.stock.common import distance, ids, in_pieces
from tests.stock_models import DELTA, SCAN, TYPES, tiny
from tests.zoo import replica
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import ssmzoo
from ssmzoo.modeling.decoding import decoding_of
from ssmzoo.modeling.stock import functions, models, norms
from ssmzoo.modeling.stock.classes import Accelerated
from ssmzoo.modeling.stock.functions import _in_call
from ssmzoo.modeling.stock.known import writers_of
from ssmzoo_kernels import layers
from ssmzoo_kernels.dispatch import watch

LENGTH = 37  # more than two chunks of 16, and no whole number of them
# one type of each kind of layer, where the others would repeat the same code of ours
KINDS = ("mamba", "jamba", "zamba", "mamba2", "falcon_h1", "qwen3_next", "kimi_linear")
# what PEFT and checkpointing call of transformers that it will drop
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
]
every_type = pytest.mark.parametrize("model_type", TYPES)
every_kind = pytest.mark.parametrize("model_type", KINDS)


def gradients(model: nn.Module, x: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and every gradient of a loss that needs all of them."""
    model.zero_grad()
    logits = model(input_ids=x, use_cache=False, **inputs).logits
    logits.double().log_softmax(-1).square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Let float64 models compute in float64 where stock code asks for float32."""

    def wide(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            up = {torch.float32: torch.float64}
            args = tuple(up.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
            named |= {"dtype": torch.float64} if named.get("dtype") in up else {}
            return f(*args, **named)

        return call

    with (
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(Tensor, "to", wide(Tensor.to)),
        mock.patch.object(Tensor, "type", wide(Tensor.type)),
        mock.patch.object(functional, "softmax", wide(functional.softmax)),
    ):
        yield


def assert_as_near(
    ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Assert that our float32 tensors are as near to float64's as the stock code's are.

    Where one is a sum that nearly cancels, float32's rounding alone exceeds 1e-5.
    """
    assert ours.keys() == stock.keys() == exact.keys()
    lost = max(distance(stock[name], judge) for name, judge in exact.items())
    for name, judge in exact.items():
        assert distance(ours[name], judge) <= max(1e-5, 2 * lost), name


@pytest.fixture(autouse=True)
def norms_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models' norms are on our op, too."""
    monkeypatch.setattr(norms, "MANY", 0)


@every_type
def test_logits_and_gradients_are_the_stock_ones(model_type: str) -> None:
    model, x = tiny(model_type).train(), ids()
    stock_logits, stock = gradients(model, x)
    wide = copy.deepcopy(model).double()
    with all_in_float64():
        exact_logits, exact = gradients(wide, x)
        ssmzoo.accelerate(wide)
        wide_logits, wide_gradients = gradients(wide, x)
    assert distance(wide_logits, exact_logits) <= 1e-12
    for name, gradient in exact.items():
        assert distance(wide_gradients[name], gradient) <= 1e-11, name
    ssmzoo.accelerate(model)
    with watch() as ran:
        logits, ours = gradients(model, x)
    kernel = "selective_scan" if model_type in SCAN else "gated_linear_attention"
    assert {(kernel, "cpu"), ("causal_conv1d", "cpu"), ("rms_norm", "cpu")} <= set(ran)
    for name, module in model.named_modules():
        if writers_of(type(module)) and name.endswith("norm"):
            assert decoding_of(module).offset in (0.0, 1.0), name
    assert distance(logits, stock_logits) <= 1e-5
    assert_as_near(ours, stock, exact)


@every_type
def test_bfloat16_loses_no_more_than_the_stock_code(model_type: str) -> None:
    # of all experts: a router's choice among them jumps with the last bit
    experts = {"qwen3_next": 4, "qwen3_5_moe_text": 4, "granitemoehybrid": 2}.get(model_type)
    changes = {} if experts is None else {"num_experts_per_tok": experts}
    changes |= {"num_experts_per_token": 4} if model_type == "kimi_linear" else {}
    model, x = tiny(model_type, **changes), ids()
    with torch.no_grad():
        exact = model(x, use_cache=False).logits.double()
        model = model.to(torch.bfloat16)
        stock = model(x, use_cache=False).logits
        ssmzoo.accelerate(model)
        ours = model(x, use_cache=False).logits
    assert ours.dtype == stock.dtype

    def typical(y: Tensor) -> float:
        return float((y - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    # a rounding of 2^-9 in each of two layers may fall otherwise
    assert typical(ours) <= 1.25 * typical(stock) + 2**-8


@every_type
def test_halves_and_steps_are_the_whole(model_type: str) -> None:
    model, x = tiny(model_type), ids()
    ssmzoo.accelerate(model)
    with torch.no_grad():
        whole = model(x, use_cache=False).logits
    for cuts in ([20], [2, 20, 21, 22, 30], [*range(33, LENGTH)]):
        assert distance(in_pieces(model, x, cuts), whole) <= 1e-5, cuts


@every_type
def test_greedy_and_beams_choose_as_the_stock_code(model_type: str) -> None:
    model, x = tiny(model_type), ids(rows=1, length=9)
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}

    def run() -> tuple[Tensor, Tensor]:
        greedy = model.generate(x, output_logits=True, eos_token_id=None, **settings)
        beams = model.generate(x, num_beams=3, output_scores=True, eos_token_id=None, **settings)
        return torch.stack(greedy.logits), beams.sequences_scores

    stock = run()
    ssmzoo.accelerate(model)
    for ours, theirs in zip(run(), stock, strict=True):
        assert distance(ours, theirs) <= 1e-5


def packed_in(how: str, lengths: list[int]) -> dict[str, Tensor]:
    """Return what tells a model where packed sequences lie."""
    if how == "cu_seqlens":
        return {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    if how == "seq_idx":
        return {"seq_idx": numbers[None].int()}
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


@every_type
def test_packed_sequences_do_not_see_each_other(model_type: str) -> None:
    model, x, lengths = tiny(model_type), ids(rows=1), [5, 1, 20, 11]
    ssmzoo.accelerate(model)
    with torch.no_grad():
        alone = [model(row, use_cache=False).logits for row in x.split(lengths, dim=1)]
        for how in ("cu_seqlens", "seq_idx", "position_ids"):
            for use_cache in ({}, {"use_cache": False}):  # the first is what evaluation would cache
                packed = model(x, **packed_in(how, lengths), **use_cache).logits
                assert distance(packed, torch.cat(alone, 1)) <= 1e-5, how
        rows = model(x.expand(2, -1), **packed_in("seq_idx", lengths) | two_rows(lengths)).logits
        assert distance(rows[:1], torch.cat(alone, 1)) <= 1e-5
        copied = replica(model)(x, **packed_in("seq_idx", lengths)).logits
        assert distance(copied, torch.cat(alone, 1)) <= 1e-5


def two_rows(lengths: list[int]) -> dict[str, Tensor]:
    """Number the sequences of two rows: the second row is one sequence."""
    first = packed_in("seq_idx", lengths)["seq_idx"]
    return {"seq_idx": torch.cat([first, torch.zeros_like(first)])}


@every_kind
def test_checkpointing_keeps_packed_sequences_apart(model_type: str) -> None:
    model, x = tiny(model_type).train(), ids(rows=1)
    ssmzoo.accelerate(model)
    inputs = packed_in("position_ids", [5, 1, 20, 11])
    _, plain = gradients(model, x, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # two forward passes before their backward passes: each runs again with what it was given
    model.zero_grad()
    losses = [
        model(input_ids=x, use_cache=False, **given).logits.double().log_softmax(-1).square().mean()
        for given in (inputs, {})
    ]
    losses[0].backward()
    for name, parameter in model.named_parameters():
        if name in plain:
            assert distance(parameter.grad, plain[name]) <= 1e-5, name


@every_kind
def test_checkpointing_runs_what_stock_code_runs_again(model_type: str) -> None:
    stock = runs_of_blocks(tiny(model_type))
    model = tiny(model_type)
    ssmzoo.accelerate(model)
    assert runs_of_blocks(model) == stock
    assert min(stock) > 1


def runs_of_blocks(model: nn.Module) -> list[int]:
    """Return how often each block's part that ran most has run in one step of training."""
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    counts: list[Counter[nn.Module]] = [Counter() for _ in blocks]
    for block, count in zip(blocks, counts, strict=True):
        for part in block.modules():
            if part is not block:
                part.register_forward_hook(lambda module, *_, count=count: count.update([module]))
    model(input_ids=ids(rows=1), use_cache=False).logits.square().mean().backward()
    return [max(count.values()) for count in counts]


@every_kind
def test_adapters_stay_effective(model_type: str) -> None:
    peft = pytest.importorskip("peft")
    # PEFT refuses what mamba_ssm's fused function would go round; stock code does of dt_proj
    refused = ("out_proj", "conv1d", "dt_proj")
    linear = [name for name, m in tiny(model_type).named_modules() if type(m) is nn.Linear]
    targets = [name for name in linear if ".layers." in name and not name.endswith(refused)]
    x = ids()

    def adapted(accelerate: str) -> nn.Module:
        model = tiny(model_type).train()
        if accelerate == "before":
            ssmzoo.accelerate(model)
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        if accelerate == "after":
            ssmzoo.accelerate(model)
        return model

    logits, stock = gradients(adapted("no"), x)
    with all_in_float64():
        exact_logits, exact = gradients(adapted("no").double(), x)
    for accelerate in ("before", "after"):
        ours_logits, ours = gradients(adapted(accelerate), x)
        assert any("lora_A" in name for name in ours)
        assert_as_near({"logits": ours_logits}, {"logits": logits}, {"logits": exact_logits})
        assert_as_near(ours, stock, exact)


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_an_adapter_of_step_sizes_is_effective_which_stock_code_reads_past(
    model_type: str,
) -> None:
    peft = pytest.importorskip("peft")
    model, x = tiny(model_type).train(), ids()
    exact = model(x, use_cache=False).logits.detach()
    config = peft.LoraConfig(r=2, target_modules=["dt_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert torch.equal(adapted(x, use_cache=False).logits, exact)  # stock
    ssmzoo.accelerate(adapted)
    _, ours = gradients(adapted, x)
    assert all(g.abs().max() > 0 for n, g in ours.items() if "lora" in n)
    assert any("lora_A" in name for name in ours)
    adapted.eval()
    steps = in_pieces(adapted, x, range(30, LENGTH))
    judge = adapted.merge_and_unload()(x, use_cache=False).logits.detach()
    assert distance(steps, judge) <= 1e-5
    assert distance(judge, exact) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "target"),
    [
        ("mamba", "mixer.A_log"),
        ("mamba", "mixer.dt_proj.weight"),
        ("mamba2", "mixer.in_proj.weight"),
    ],
)
def test_an_adapter_of_a_parameter_is_effective(model_type: str, target: str) -> None:
    peft = pytest.importorskip("peft")
    model, x = tiny(model_type).train(), ids()
    exact = model(x, use_cache=False).logits.detach()
    ssmzoo.accelerate(model)
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=[target], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    logits, ours = gradients(adapted, x)
    learnt = {name: slope for name, slope in ours.items() if "lora" in name}
    assert learnt
    assert all(slope.abs().max() > 0 for slope in learnt.values())
    assert distance(logits, exact) > 1e-3
    adapted.eval()
    steps = in_pieces(adapted, x, range(30, LENGTH))
    judge = adapted.merge_and_unload()(x, use_cache=False).logits.detach()
    assert distance(steps, judge) <= 1e-5
    assert distance(judge, logits) <= 1e-5


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_training_reads_weights_only_where_nothing_wraps_or_watches_a_layer(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tiny(model_type).train(), ids()
    mask = torch.ones_like(x)
    mask[0, :9] = 0
    masked = gradients(model, x, attention_mask=mask)
    ssmzoo.accelerate(model)
    fused, calls = layers.FUNCTIONS["mamba_inner_fn"], []
    monkeypatch.setattr(
        functions, "_in_call", lambda f: lambda *a, **k: (calls.append(f), _in_call(f)(*a, **k))[1]
    )
    gradients(model, x)
    assert calls.count(fused) == 2  # of two layers
    mixer = next(m for m in model.modules() if hasattr(m, "x_proj"))
    seen: list[Any] = []
    hook = mixer.x_proj.register_forward_hook(lambda *_: seen.append(1))
    gradients(model, x)
    hook.remove()
    assert seen == [1]
    assert calls.count(fused) == 3  # of the other layer
    for theirs, ours in zip(
        masked[1].values(), gradients(model, x, attention_mask=mask)[1].values(), strict=True
    ):
        assert distance(ours, theirs) <= 1e-4
    assert calls.count(fused) == 3


def test_an_adapter_of_one_layer_alone_is_effective_in_training() -> None:
    peft = pytest.importorskip("peft")
    model, x = tiny("mamba").train(), ids()
    # the layer before it trains in one function
    config = peft.LoraConfig(
        r=2, target_modules=r".*layers\.1\..*(x|dt)_proj", init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    ssmzoo.accelerate(adapted)
    logits, ours = gradients(adapted, x)
    assert all(gradient.abs().max() > 0 for gradient in ours.values())
    merged = adapted.merge_and_unload()
    assert distance(logits, merged(x, use_cache=False).logits) <= 1e-5


@every_kind
def test_offloaded_weights_are_fetched(model_type: str) -> None:
    from accelerate import cpu_offload

    model, x = tiny(model_type), ids()
    with torch.no_grad():
        stock = model(x, use_cache=False).logits
        ssmzoo.accelerate(model)
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert distance(model(x, use_cache=False).logits, stock) <= 1e-5


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "qwen3_5_text"])
@pytest.mark.long
def test_compiled_models_have_our_ops_in_their_graphs(model_type: str) -> None:
    linear = {"layer_types": ["linear_attention"]} if model_type in DELTA else {}
    model, x = tiny(model_type, num_hidden_layers=1, **linear), ids()
    ssmzoo.accelerate(model)
    graphs: list[str] = []

    def collect(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        eager = model(x, use_cache=False).logits
        compiled = torch.compile(model, backend=collect)
        assert distance(compiled(x, use_cache=False).logits, eager) <= 1e-5
    torch.compiler.reset()
    kernel = "selective_scan" if model_type in SCAN else "gated_linear_attention"
    text = "\n".join(graphs)
    assert f"ssmzoo.{kernel}" in text
    assert "ssmzoo.causal_conv1d" in text


@every_kind
def test_copies_pickles_and_checkpoints(model_type: str, tmp_path: Any) -> None:
    model, other, x = tiny(model_type), tiny(model_type, seed=1), ids()
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        stock = model(x, use_cache=False).logits
        ssmzoo.accelerate(model)
        assert not any(isinstance(module, Accelerated) for module in other.modules())
        ours = model(x, use_cache=False).logits
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert ssmzoo.accelerated(again) == ssmzoo.accelerated(model)
            assert torch.equal(again(x, use_cache=False).logits, ours)
            ssmzoo.restore(again)
            assert torch.equal(again(x, use_cache=False).logits, stock)
        assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert not any(isinstance(module, Accelerated) for module in loaded.modules())
        loaded = type(model).from_pretrained(tmp_path).eval()  # as trainers do
        assert not any(isinstance(module, Accelerated) for module in loaded.modules())
        assert distance(loaded(x, use_cache=False).logits, stock) <= 1e-6
        ssmzoo.restore(model)
        assert [type(module) for module in model.modules()] == classes
        assert torch.equal(model(x, use_cache=False).logits, stock)


def test_a_block_restores_at_its_end() -> None:
    model = tiny("mamba")
    with ssmzoo.accelerate(model) as inside:
        assert inside is model
        assert set(ssmzoo.accelerated(model).values()) == {"causal_conv1d, selective_scan"}
    with pytest.raises(ValueError, match="must rise"), ssmzoo.accelerate(model):
        model(ids(rows=1), cu_seqlens=torch.tensor([0, 50]))
    assert set(ssmzoo.accelerated(model).values()) == {"stock: not accelerated"}
    with ssmzoo.accelerate(model):
        ssmzoo.restore(model)
    assert repr(ssmzoo.accelerate(model)) == (
        "<MambaForCausalLM: 2 of 2 mixers on ssmzoo's kernels>"
    )


def test_step_sizes_keep_their_limits_in_single_steps() -> None:
    model, x = tiny("mamba2", time_step_limit=(0.2, 0.9)), ids()
    ssmzoo.accelerate(model)
    whole = model(x, use_cache=False).logits.detach()
    assert distance(in_pieces(model, x, range(30, LENGTH)), whole) <= 1e-5


def test_packing_that_cannot_be_kept_apart_is_refused() -> None:
    model, hybrid, x = tiny("mamba"), tiny("jamba"), ids(rows=1)
    ssmzoo.accelerate(model)
    ssmzoo.accelerate(hybrid)
    inputs = packed_in("seq_idx", [20, 17])
    with pytest.raises(ValueError, match="without a cache, got 2 sequences in 1 rows and a cache"):
        model(x, use_cache=True, **inputs)
    with pytest.raises(ValueError, match="without padding, got an attention_mask with zeros"):
        hybrid(x, attention_mask=(torch.arange(LENGTH) > 3)[None].long(), **inputs)
    with pytest.raises(ValueError, match="must rise from 0"):
        model(x, cu_seqlens=torch.tensor([0, 50]))


def test_what_cannot_be_accelerated_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    model = tiny("mamba")
    wrapped = nn.DataParallel(model)
    compiled: Any = torch.compile(model, backend="eager")
    cases: list[tuple[Any, type[Exception], str]] = [
        ("state-spaces/mamba-130m-hf", TypeError, "must be one of transformers, got str"),
        (llama, ValueError, "LlamaForCausalLM has no layer that ssmzoo's kernels serve"),
        (wrapped, ValueError, "DataParallel is wrapped or compiled; accelerate the model first"),
        (compiled, ValueError, "OptimizedModule is wrapped or compiled"),
        (nn.Linear(2, 2), ValueError, "must be one of transformers, got Linear"),
        (_zoo_model(), ValueError, "is a model of the zoo; it runs on the kernels already"),
        (_compiled_in_place(), ValueError, "is compiled already; accelerate it first"),
    ]
    for bad, kind, message in cases:
        with pytest.raises(kind, match=message):
            ssmzoo.accelerate(bad)
    with monkeypatch.context() as patch:
        patch.setattr(models, "_device", lambda model: "mps")
        with pytest.raises(ValueError, match="lies on mps, the kernels serve CPUs and CUDA GPUs"):
            ssmzoo.accelerate(model)
    assert not any(isinstance(module, Accelerated) for module in model.modules())
    with pytest.raises(ValueError, match="restore: MambaForCausalLM is not accelerated"):
        ssmzoo.restore(model)
    ssmzoo.accelerate(model)
    with pytest.raises(ValueError, match="is accelerated already"):
        ssmzoo.accelerate(model)
    assert ssmzoo.accelerated(llama) == {}


def _zoo_model() -> nn.Module:
    family = ssmzoo.load_family("longhorn")
    return family.causal_lm_class(family.config(**family.tiny))


def _compiled_in_place() -> nn.Module:
    model = tiny("mamba")
    model.compile(backend="eager")
    return model


def test_unknown_code_of_transformers_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.jamba import modeling_jamba
    from transformers.models.mamba import modeling_mamba

    def mamba_selective_scan(hidden_states: Tensor, ssm: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", mamba_selective_scan)
    model, x = tiny("mamba"), ids()
    expected = r"has a mamba_selective_scan of \(hidden_states, ssm\), ssmzoo .* knows the one of"
    with pytest.raises(ValueError, match=expected):
        ssmzoo.accelerate(model)
    assert all(reason.startswith("stock: transformers") for reason in _reasons(model))

    class JambaMambaMixer(modeling_jamba.JambaMambaMixer):
        def forward(self, hidden_states: Any, **inputs: Any) -> Any:  # another signature
            modeling_jamba.mamba_selective_scan  # noqa: B018
            return super().forward(hidden_states)

    JambaMambaMixer.__module__ = modeling_jamba.__name__
    hybrid = tiny("jamba", num_hidden_layers=4)
    strange = next(m for m in hybrid.modules() if type(m) is modeling_jamba.JambaMambaMixer)
    strange.__class__ = JambaMambaMixer
    ssmzoo.accelerate(hybrid)
    stock = [reason for reason in _reasons(hybrid) if reason.startswith("stock: transformers")]
    assert len(stock) == 1
    assert len(_reasons(hybrid)) == 2
    with torch.no_grad():
        hybrid(x)


def _reasons(model: nn.Module) -> list[str]:
    return list(ssmzoo.accelerated(model).values())


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_5_text"])
def test_other_activations_are_the_stock_ones(model_type: str) -> None:
    model, x = tiny(model_type, hidden_act="gelu"), ids()
    with torch.no_grad():
        stock = model(x, use_cache=False).logits
        ssmzoo.accelerate(model)
    assert distance(in_pieces(model, x, [LENGTH - 1]), stock) <= 1e-5
