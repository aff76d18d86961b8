"""The conformance kit passes Longhorn, and bites: every sabotaged variant fails what it breaks.

A variant must fail exactly the checks named beside it; that a check passes everywhere else shows
that it looks at its own promise.
"""

import json
import time
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.oracles import longhorn as oracle
from torch import nn

from ssmzoo.modeling import CausalConv1d, StateCache
from ssmzoo.testing import FamilyConformance, Report, check
from ssmzoo.testing.conformance import CHECKS, name_of
from ssmzoo_longhorn import FAMILY, LonghornConfig
from ssmzoo_longhorn.modeling_longhorn import (
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornMixer,
    LonghornModel,
)

SLOW = {"compile", "trainer"}
QUICK = [name_of(function) for function in CHECKS if name_of(function) not in SLOW]
# those that carry a cache from one call to the next
CACHED = {
    "chunks",
    "tokens",
    "greedy",
    "sampling",
    "beams",
    "continuing",
    "chunked_prefill",
    "cache_rows",
    "wrong_cache",
    "prompt_state",
    "assisted",
}
# those that lay several sequences into one row
SEVERAL = {"padding", "packing", "flattening_collator", "sequence_classification"}


@pytest.mark.xdist_group("longhorn_conformance")  # one worker adds up the seconds of all checks
class TestLonghorn(FamilyConformance):
    family = "longhorn"
    oracle = staticmethod(oracle.logits)
    seconds: ClassVar[dict[str, float]] = {}

    @pytest.fixture(autouse=True)
    def clock(self, request):
        begun = time.process_time()  # what others do on this machine is not ours
        yield
        self.seconds[request.node.name] = time.process_time() - begun

    def test_all_checks_together_take_less_than_a_minute(self):
        if len(self.seconds) < len(CHECKS):
            pytest.skip("only some of the checks ran here")
        assert sum(self.seconds.values()) < 60


# --- sabotage ----------------------------------------------------------------------------------


class Forgetful:
    """A layer's view of the cache that hides one state."""

    def __init__(self, state, hidden):
        self.state, self.hidden = state, hidden

    def get(self, name):
        return None if name == self.hidden else self.state.get(name)

    def put(self, name, value):
        self.state.put(name, value)


class DropsConvState(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        return super().forward(hidden_states, Forgetful(state, "conv"), cu_seqlens)


class BoundlessConv(CausalConv1d):
    def forward(self, x, initial_state, cu_seqlens):
        y, final = super().forward(x, initial_state, cu_seqlens)
        return (y if cu_seqlens is None else super().forward(x, None, None)[0]), final


class ConvolvesAcrossBoundaries(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.conv1d.__class__ = BoundlessConv


class ReadsWeights(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        out_proj = self.out_proj
        del self.out_proj
        self.out_proj = lambda o: F.linear(o, out_proj.weight, out_proj.bias)
        try:
            return super().forward(hidden_states, state, cu_seqlens)
        finally:
            del self.out_proj
            self.out_proj = out_proj


class LeaksTheFuture(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        later = hidden_states.roll(-1, dims=1) * 1e-3
        return super().forward(hidden_states + later, state, cu_seqlens)


class ForgetsAParameter(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.x_proj.unused = nn.Parameter(torch.zeros(3))


class IsSlightlyWrong(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        return super().forward(hidden_states, state, cu_seqlens) * (1 + 1e-7)


class LooksAtTheBatch(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        scale = 1 + 1e-3 * hidden_states[:1, :1].detach()
        return super().forward(hidden_states * scale, state, cu_seqlens)


class KeepsALowState(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        put = state.put
        state.put = lambda name, value: put(name, value.to(self.in_proj.weight.dtype))
        return super().forward(hidden_states, state, cu_seqlens)


class ComputesTooCoarsely(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        out = super().forward(hidden_states, state, cu_seqlens)
        if out.dtype != torch.bfloat16:
            return out
        return out + (out.to(torch.float8_e4m3fn).to(out.dtype) - out).detach()


class CountsItsCalls(LonghornMixer):
    calls = 0

    def forward(self, hidden_states, state, cu_seqlens=None):
        self.calls += self.training
        scale = 1 + 0.01 * self.calls
        return super().forward(hidden_states, state, cu_seqlens) * scale


class BreaksTheGraph(LonghornMixer):
    def forward(self, hidden_states, state, cu_seqlens=None):
        sign = 1.0 if hidden_states.detach().sum().item() < 1e9 else -1.0
        return super().forward(hidden_states, state, cu_seqlens) * sign


class SavesHalf(LonghornForCausalLM):
    def save_pretrained(self, folder, **kwargs):
        kwargs["state_dict"] = {k: v.half().to(v.dtype) for k, v in self.state_dict().items()}
        super().save_pretrained(folder, **kwargs)


class LoadsLow(LonghornModel):
    _keep_in_fp32_modules_strict = []


class ReadsTheLastColumn(LonghornForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, labels=None, cu_seqlens=None):
        if cu_seqlens is not None:
            return super().forward(input_ids, labels=labels, cu_seqlens=cu_seqlens)
        mask = torch.ones_like(input_ids)
        return super().forward(input_ids, attention_mask=mask, labels=labels)


class OpenConfig(LonghornConfig):
    model_type = "broken_open_config"

    def __post_init__(self, **kwargs):
        super().__post_init__(**{k: v for k, v in kwargs.items() if k == "num_labels"})


def broken(mixer=None, config=None, model=None, causal_lm=None, classifier=None):
    """A family like Longhorn with one part replaced."""
    part = mixer or config or model or causal_lm or classifier
    config = config or type("BrokenConfig", (LonghornConfig,), {"model_type": part.__name__})
    own = {"config": config, "config_class": config}
    mixing = own | {"mixer_class": mixer or LonghornMixer}
    backbone = type("BrokenModel", (model or LonghornModel,), mixing)
    own |= {"model_class": backbone}
    own |= {"_keep_in_fp32_modules_strict": backbone._keep_in_fp32_modules_strict}
    bases = (causal_lm or LonghornForCausalLM, classifier or LonghornForSequenceClassification)
    heads = [type(f"Broken{base.__name__}", (base,), own) for base in bases]
    return replace(
        FAMILY,
        name="broken",
        config_class=config,
        model_class=backbone,
        causal_lm_class=heads[0],
        sequence_classification_class=heads[1],
        token_classification_class=None,
        pair_classification_class=None,
    )


SABOTAGED = {
    "drops the conv state": (
        {"mixer": DropsConvState},
        CACHED | {"padding", "packing", "cache_precision"},
    ),
    "convolves across boundaries": (
        {"mixer": ConvolvesAcrossBoundaries},
        SEVERAL | {"greedy", "sampling", "beams", "continuing", "chunked_prefill", "prompt_state"},
    ),
    "reads a linear layer's weights": ({"mixer": ReadsWeights}, {"lora", "lora_all_linear"}),
    "leaks the future": ({"mixer": LeaksTheFuture}, {"oracle", "causality"} | CACHED | SEVERAL),
    "forgets a parameter": ({"mixer": ForgetsAParameter}, {"gradients"}),
    "is slightly wrong": ({"mixer": IsSlightlyWrong}, {"oracle"}),
    "looks at other rows": ({"mixer": LooksAtTheBatch}, {"oracle", "batch"} | CACHED | SEVERAL),
    "keeps a low state": ({"mixer": KeepsALowState}, {"cache_precision"}),
    "computes too coarsely": ({"mixer": ComputesTooCoarsely}, {"bfloat16"}),
    "saves half": (
        {"causal_lm": SavesHalf},
        {"save_and_load", "load_in_bfloat16", "resized_embeddings"},
    ),
    "loads low": ({"model": LoadsLow}, {"load_in_bfloat16"}),
    "reads the last column": ({"classifier": ReadsTheLastColumn}, {"sequence_classification"}),
    "has an open config": ({"config": OpenConfig}, {"closed_config"}),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_family_that(name):
    parts, expected = SABOTAGED[name]
    report = check(broken(**parts), oracle=oracle.logits, only=QUICK)
    assert set(report.failed) == expected, report.table()


def test_a_family_that_depends_on_how_often_it_ran_fails_checkpointing_and_resuming():
    family = broken(mixer=CountsItsCalls)
    report = check(family, only=["gradients", "gradient_checkpointing", "trainer"])
    assert report.failed == ("gradient_checkpointing", "trainer"), report.table()


def test_a_family_that_asks_for_a_value_fails_compilation():
    report = check(broken(mixer=BreaksTheGraph), only=["gradients", "compile"])
    assert report.failed == ("compile",), report.table()


def test_beams_that_are_not_reordered_fail(monkeypatch):
    monkeypatch.setattr(StateCache, "reorder_cache", lambda self, beam_idx: None)
    report = check("longhorn", only=["greedy", "sampling", "beams", "cache_rows"])
    assert report.failed == ("beams", "cache_rows"), report.table()


def test_tokens_that_are_not_taken_back_fail(monkeypatch):
    monkeypatch.setattr(StateCache, "crop", lambda self, max_length: None)
    report = check("longhorn", only=["greedy", "assisted", "continuing", "chunked_prefill"])
    assert report.failed == ("assisted",), report.table()


def test_a_saved_prompt_of_other_states_fails(monkeypatch):
    read = StateCache.read.__func__

    def blurred(cls, *args):
        cache, others, notes = read(cls, *args)
        for layer in cache.layers:
            layer.states = {name: state * (1 + 1e-4) for name, state in layer.states.items()}
        return cache, others, notes

    monkeypatch.setattr(StateCache, "read", classmethod(blurred))
    report = check("longhorn", only=["continuing", "cache_file", "prompt_state"])
    assert report.failed == ("cache_file", "prompt_state"), report.table()


# --- the kit itself ----------------------------------------------------------------------------


def test_the_pytest_class_fails_with_the_promise_and_the_numbers():
    class Broken(FamilyConformance):
        family = broken(mixer=IsSlightlyWrong)
        oracle = staticmethod(oracle.logits)

    by_name = {name_of(function): function for function in CHECKS}
    with pytest.raises(AssertionError, match=r"what its paper says.* error .* exceeds 1\.00e-10"):
        Broken().test_promise(by_name["oracle"])
    Broken().test_promise(by_name["causality"])


def test_without_an_oracle_that_check_is_skipped_and_the_report_says_so():
    report = check("longhorn", only=["oracle", "causality"])
    assert [result.status for result in report.results] == ["skipped", "passed"]
    assert report.ok
    assert "no oracle was given" in report.table()
    assert "longhorn: 1 passed, 0 failed, 1 skipped" in report.table()


def test_a_report_reads_as_a_table_and_as_json():
    report = check(broken(mixer=ForgetsAParameter), only=["gradients", "batch"])
    assert not report.ok
    table = report.table()
    assert "gradient of model.layers.0.mixer.x_proj.unused is zero" in " ".join(table.split())
    assert "broken: 1 passed, 1 failed, 0 skipped" in table
    facts = json.loads(report.to_json())
    assert (facts["family"], facts["ok"]) == ("broken", False)
    assert [fact["status"] for fact in facts["checks"]] == ["passed", "failed"]
    assert facts["checks"][0]["error"] <= facts["checks"][0]["budget"]


def test_an_infinite_error_is_still_json():
    bad = replace(check("longhorn", only=["batch"]).results[0], error=float("nan"))
    assert json.loads(Report("x", (bad,)).to_json())["checks"][0]["error"] is None


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(LookupError, match="no check named 'paddin'; did you mean 'padding'"):
        check("longhorn", only=["paddin"])
    with pytest.raises(LookupError, match="no family named 'longhorm'; did you mean 'longhorn'"):
        check("longhorm")


def test_checking_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check("longhorn", only=["sampling", "batch"])
    assert torch.equal(torch.rand(4), expected)


def test_every_check_states_a_promise():
    for function in CHECKS:
        first = function.__doc__.splitlines()[0]
        assert first.endswith("."), function
    assert len({name_of(function) for function in CHECKS}) == len(CHECKS)
