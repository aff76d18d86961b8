"""The conformance kit passes Longhorn, and says what it found; test_sabotage.py shows its teeth."""

import json
import re
from dataclasses import replace

import pytest
import torch
from tests.oracles import longhorn as oracle
from tests.plugins.sabotage import (
    ForgetsAParameter,
    HasABuffer,
    IsSlightlyWrong,
    KeepsItsStepsSmall,
    broken,
)

from ssmzoo.testing import FamilyConformance, Report, check
from ssmzoo.testing.conformance import CHECKS, name_of
from ssmzoo.testing.subject import Subject
from ssmzoo_longhorn import LonghornConfig
from ssmzoo_longhorn.modeling_longhorn import LonghornMixer


class TestLonghorn(FamilyConformance):
    family = "longhorn"
    oracle = staticmethod(oracle.logits)


def test_the_pytest_class_fails_with_the_promise_and_the_numbers():
    class Broken(FamilyConformance):
        family = broken(mixer=IsSlightlyWrong)
        oracle = staticmethod(oracle.logits)

    by_name = {name_of(function): function for function in CHECKS}
    with pytest.raises(AssertionError, match=r"what its paper says.* error .* exceeds 1\.00e-10"):
        Broken().test_promise(by_name["oracle"])
    Broken().test_promise(by_name["causality"])


def test_an_error_between_the_two_roundings_tells_of_float32():
    class Rounds(LonghornMixer):
        def forward(self, hidden_states, state, packing=None):
            single = hidden_states.shape[1] == 1
            x = hidden_states.float().to(hidden_states.dtype) if single else hidden_states
            return super().forward(x, state, packing)

    (result,) = check(broken(mixer=Rounds), only=["tokens"]).results
    assert result.status == "failed"
    assert result.detail.endswith("(as if something computed in float32)")


def test_buffers_and_projected_parameters_pass_the_checks():
    only = ["save_and_load", "gradients", "chunks"]
    assert check(broken(mixer=HasABuffer), only=only).ok
    family = broken(mixer=KeepsItsStepsSmall)
    assert check(family, only=only).ok
    biases = [p for n, p in Subject(family).fresh().named_parameters() if n.endswith("dt_bias")]
    assert max(float(p.detach().max()) for p in biases) <= -3


class Sums(LonghornMixer):
    """Keeps a sum of all tokens beside its state."""

    def kept(self, hidden_states):
        """Return what is added ``[B, ...]``."""
        return hidden_states.sum(dim=1)

    def forward(self, hidden_states, state, packing=None):
        if packing is None:
            added, seen = self.kept(hidden_states), state.get("sum")
            state.put("sum", added if seen is None else seen + added)
        return super().forward(hidden_states, state, packing)


class SumsInOneRow(Sums):
    def kept(self, hidden_states):
        return super().kept(hidden_states).unsqueeze(1)


class SumsInOneNumber(Sums):
    def kept(self, hidden_states):
        return super().kept(hidden_states).sum(dim=1)


class CountsTokens(Sums):
    def kept(self, hidden_states):
        return torch.full(hidden_states.shape[:1], float(hidden_states.shape[1]))


@pytest.mark.parametrize("mixer", [Sums, SumsInOneRow, SumsInOneNumber])
def test_a_sum_in_low_precision_is_found_in_every_shape(mixer):
    (result,) = check(broken(mixer=mixer), only=["cache_precision"]).results
    assert "state 'sum' of layer 0 is torch.bfloat16, and it accumulates" in result.detail


def test_a_count_in_float32_is_not_taken_for_rounded():
    report = check(broken(mixer=CountsTokens), only=["cache_precision"])
    assert report.ok, report.table()


def test_a_wrong_program_of_one_layer_is_found():
    class IsWrongInOne(LonghornMixer):
        def forward(self, hidden_states, state, packing=None):
            return super().forward(hidden_states, state, packing)

        def write_token(self, program, parts, x, states):
            y = super().write_token(program, parts, x, states)
            return program.add(y, y) if self.layer_idx == 1 else y

    (result,) = check(broken(mixer=IsWrongInOne), only=["fused_steps"]).results
    assert "gave other numbers" in result.detail


class TwoLayersConfig(LonghornConfig):
    model_type = "two_layers"

    def check(self):
        super().check()
        if self.num_hidden_layers != 2:
            raise ValueError("num_hidden_layers must be 2: a field has an entry for each")


def test_a_family_of_a_fixed_depth_refuses_another_models_cache():
    report = check(broken(config=TwoLayersConfig), only=["wrong_cache"])
    assert report.ok, report.table()


def test_a_family_may_leave_out_its_targets_of_lora():
    report = check(broken(lora_targets=()), only=["lora", "lora_all_linear"])
    assert [result.status for result in report.results] == ["skipped", "passed"]


def test_an_error_names_the_familys_own_line():
    class Divides(LonghornMixer):
        def forward(self, hidden_states, state, packing=None):
            return hidden_states * (1 // (hidden_states.dim() - 3))

    (result,) = check(broken(mixer=Divides), only=["batch"]).results
    assert result.status == "failed"
    assert re.search(r" \(test_conformance\.py, line \d+\)$", result.detail)


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
    assert f"{report.family}: 1 passed, 1 failed, 0 skipped" in table
    facts = json.loads(report.to_json())
    assert (facts["family"], facts["ok"]) == (report.family, False)
    assert [fact["status"] for fact in facts["checks"]] == ["passed", "failed"]
    assert facts["checks"][0]["error"] <= facts["checks"][0]["budget"]


def test_an_infinite_error_is_still_json():
    bad = replace(check("longhorn", only=["batch"]).results[0], error=float("nan"))
    assert json.loads(Report("x", (bad,)).to_json())["checks"][0]["error"] is None


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(LookupError, match="no check named 'paddin'; did you mean 'padding'"):
        check("longhorn", only=["paddin"])
    with pytest.raises(LookupError, match="skip: no check named 'bathc'; did you mean 'batch'"):
        check("longhorn", skip=["bathc"])
    with pytest.raises(ValueError, match="must leave a check to run, got only nothing"):
        check("longhorn", only=[])
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
