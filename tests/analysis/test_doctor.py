"""What the doctor says of this machine and of models on it."""

import json
import sys
from importlib.metadata import requires, version
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file
from tests.forks import COMMAND

from ssmzoo import load_family
from ssmzoo.analysis import doctor
from ssmzoo.analysis.describe import describe_checkpoint
from ssmzoo.analysis.doctor import examine_machine, examine_model
from ssmzoo.analysis.inspect import inspect_model
from ssmzoo.cli.main import main
from ssmzoo_kernels import dispatch, longhorn_scan, use_backend


@pytest.fixture
def prints(capsys):
    def run(*arguments):
        status = main(["doctor", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


def test_the_machine_is_described_with_a_way_out_for_what_is_missing():
    found = examine_machine("cpu")
    assert found["versions"]["torch"] == version("torch")
    assert found["compiler"] == "ok"
    assert found["extras"]["accelerate"] == "ok"
    assert found["families"]["longhorn"] == "ok"


def test_every_requirement_of_training_is_looked_for(monkeypatch):
    monkeypatch.setattr(doctor, "installed_versions", lambda *names: {})
    extras = examine_machine("cpu")["extras"]
    needed = [line for line in requires("ssmzoo") or [] if "extra == 'train'" in line]
    assert needed
    for requirement in needed:
        assert Requirement(requirement).name in extras
    assert extras["pydantic"] == 'missing; pip install "ssmzoo[train]"'


@pytest.mark.parametrize(("version", "said"), [("3.6.0", "from 3.7 on"), ("3.7.1+git1", None)])
def test_a_triton_whose_scans_are_slow_is_told(monkeypatch, version, said):
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    told = examine_machine("cpu")["triton"]
    assert (said in told) if said else told == "ok"


def test_a_layer_is_shown_with_the_backends_that_ran():
    facts = examine_model("longhorn", batch_size=2, length=40, device="cpu")
    assert len(facts["layers"]) == 2
    layer = facts["layers"][1]
    assert layer["mixer"] == "LonghornMixer"
    assert layer["read"] == {"causal_conv1d": "cpu", "longhorn_scan": "cpu"}
    assert layer["step"] == {"token_step": "cpu"}
    assert layer["hints"] == {}
    with use_backend("eager"):
        facts = examine_model("longhorn", length=16, device="cpu")
    assert facts["layers"][0]["read"]["longhorn_scan"] == "eager"


def test_bytes_and_speed_are_those_of_the_batch():
    one, two = (examine_model("longhorn", batch_size=b, length=16, device="cpu") for b in (1, 2))
    assert two["state_bytes"] == 2 * one["state_bytes"]
    assert two["parameters"] == one["parameters"]
    assert one["parameter_bytes"] == 4 * one["parameters"]
    for facts, tokens in ((one, 1), (two, 2)):
        assert facts["tokens_per_second"]["step"] == round(tokens / facts["seconds"]["step"])
        assert facts["tokens_per_second"]["read"] == round(16 * tokens / facts["seconds"]["read"])


def test_the_bandwidth_bound_follows_from_the_bytes_of_each_precision():
    facts = examine_model("longhorn", length=16, device="cpu")
    rates = facts["memory"]["tokens_per_second"]
    assert list(rates) == ["float32", "bfloat16", "int8", "int4"]
    assert rates["float32"] < rates["bfloat16"] < rates["int8"] < rates["int4"]
    # all but the embedding's table, of which a token reads a row
    family = load_family("longhorn")
    network = family.model_class(family.config(**family.tiny))
    table = network.embed_tokens.weight
    read = sum(p.numel() * p.element_size() for p in network.parameters() if p is not table)
    shown = facts["memory"]["read_gb_s"]  # rounded to a tenth
    assert rates["float32"] == pytest.approx(1e9 * shown / read, rel=0.01 + 0.05 / shown)


@pytest.mark.parametrize("head", ["causal_lm_class", "sequence_classification_class"])
def test_a_saved_model_is_counted_with_its_head(head, tmp_path, caplog):
    family = load_family("longhorn")
    config = family.config(**family.tiny, tie_word_embeddings=False)
    getattr(family, head)(config).save_pretrained(tmp_path / "model")
    count = describe_checkpoint(tmp_path / "model")["parameters"]
    facts = examine_model(tmp_path / "model", length=16, device="cpu")
    assert (facts["parameters"], facts["parameter_bytes"]) == (count, 4 * count)
    report = inspect_model(tmp_path / "model", tmp_path / "seen", length=16, device="cpu")
    assert report["parameters"] == count
    assert not caplog.records


def test_tensors_that_belong_to_no_head_are_told(tmp_path, caplog):
    family = load_family("longhorn")
    family.causal_lm_class(family.config(**family.tiny)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file({**load_file(weights), "lm_haed.weight": torch.ones(3)}, weights, {"format": "pt"})
    examine_model(tmp_path, length=16, device="cpu")
    assert "1 tensors that a LonghornForCausalLM has no place for" in caplog.text


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("longhorn", torch.bfloat16), ("linear_attention", torch.float16)],
)
def test_a_saved_model_is_measured_in_its_own_dtype(family, dtype, tmp_path):
    found = load_family(family)
    whole = found.causal_lm_class(found.config(**found.tiny)).to(dtype)
    whole.save_pretrained(tmp_path)
    facts = examine_model(tmp_path, length=16, device="cpu")
    assert facts["parameter_bytes"] == sum(p.nbytes for p in whole.parameters())
    with torch.no_grad():
        cache = whole.eval()(torch.zeros(1, 16, dtype=torch.int64), use_cache=True).cache
    assert facts["state_bytes"] == cache.nbytes


def test_layers_of_several_kinds_are_told_apart():
    kinds = [set(layer["read"]) for layer in examine_model("bmojo", length=16)["layers"]]
    assert "innovation" in kinds[0]
    assert "innovation" not in kinds[1]


def test_inspect_says_why_a_model_has_no_state(tmp_path):
    family = load_family("dss")
    fields = {"input_channels": 1, "bidirectional": True, "num_labels": 2}
    config = family.config(**{**family.tiny, **fields})
    family.sequence_classification_class(config).save_pretrained(tmp_path)
    facts = examine_model(tmp_path, length=16)
    assert not facts["untrained"]
    assert (facts["state_bytes"], facts["seconds"]["step"]) == (None, None)
    assert facts["state_reason"]
    assert facts["layers"][0]["step"] == {}
    assert facts["layers"][0]["read"]


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_without_a_compiler_each_op_names_it_and_the_way_out(forks):
    words = ("doctor", "longhorn", "--length", "8", "--json")
    done = forks.run(COMMAND, *words, environment={"CC": "no-such-compiler"})
    assert done.status == 0, done.log
    found = json.loads(done.out)
    way_out = "no compiler found: CC=no-such-compiler is not on the PATH; install gcc or clang"
    assert found["machine"]["compiler"] == way_out
    assert found["machine"]["kernel_cache"] is None
    layer = found["model"]["layers"][0]
    assert layer["read"] == {"causal_conv1d": "eager", "longhorn_scan": "eager"}
    assert layer["hints"]["longhorn_scan"] == way_out


@pytest.mark.parametrize(
    ("backend", "device", "reason"),
    [
        ("cpu", "cpu", None),
        ("triton", "cuda", None),
        ("reference", "cpu", "only the reference knows what was asked of it"),
        ("eager", "cpu", "cpu does not take this call's dtype or size"),
        ("eager", "cuda", 'triton is not installed; pip install "ssmzoo[triton]"'),
        ("eager", "mps", "no kernels for mps"),
    ],
)
def test_why_an_op_runs_no_faster(monkeypatch, backend, device, reason):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.why_not_faster("longhorn_scan", backend, device) == reason


def test_watching_collects_runs_inside_the_block_only():
    x = torch.ones(1, 2, 3)
    with dispatch.watch() as events:
        longhorn_scan(x, x, x, x, backend="reference")
    longhorn_scan(x, x, x, x, backend="eager")
    assert events == [("longhorn_scan", "reference")]


def test_the_command_prints_machine_and_layers(prints):
    assert "compiler:     ok" in prints()
    out = prints("longhorn", "--length", 30, "--batch-size", 3)
    assert "longhorn (random weights, without the head): " in out
    assert "state after 30 tokens, batch 3: " in out
    assert "0-1     LonghornMixer  longhorn_scan  cpu" in out
    assert "0-1     LonghornMixer  token_step              cpu" in out
    assert "GB/s), one by one: float32 " in out
    assert " (torchao) one by one" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["longhron"], "did you mean 'longhorn'?"),
        (["longhorn", "--length", "0"], "length must be at least 1, got 0"),
        (["longhorn", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["longhorn", "--device", "gpu"], "that torch can use here (cpu"),
        (["longhorn:longhorn-1b"], "longhorn-1.3b"),
    ],
)
def test_a_wrong_argument_of_doctor_is_one_line(capsys, arguments, message):
    assert main(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
