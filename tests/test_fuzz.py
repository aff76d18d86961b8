"""Hostile input: every case ends in a result or in one of our clear errors.

A clear error is a ValueError, TypeError, LookupError, RuntimeError or OSError raised on purpose, by
our own code or by the checker of configurations, with a sentence; what torch, json or the
interpreter raise somewhere inside is a failure. Cases follow from fixed seeds.
"""

import dataclasses
import inspect
import json
import math
import os
import traceback
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ssmzoo_kernels
from ssmzoo import load_family
from ssmzoo.analysis.describe import describe_checkpoint
from ssmzoo.checkpoints.load import load_model, load_tokenizer
from ssmzoo.cli.main import main
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.family import families
from ssmzoo.files import package_data
from ssmzoo.modeling import StateCache, load_state
from ssmzoo.publishing.card import render_card
from ssmzoo.recipe import load_recipe

CLEAR = (ValueError, TypeError, LookupError, RuntimeError, OSError, StrictDataclassError)
CHECKERS = (
    "huggingface_hub/dataclasses.py",
    "transformers/configuration_utils.py",
    "configuration_auto.py",
)


def fuzz(cases):
    """Run a test on so many cases, the same ones each time."""
    return settings(
        max_examples=cases,
        phases=(Phase.generate,),  # a failure shows its case; shrinking would trace every line
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def outcome(call):
    """Return a call's result, or None after a clear error."""
    try:
        return call()
    except CLEAR as error:
        caught = error
    raised_in = Path(traceback.extract_tb(caught.__traceback__)[-1].filename).as_posix()
    shown = f"{raised_in}: {type(caught).__name__}: {caught}"
    ours = any(part.startswith("ssmzoo") for part in raised_in.split("/"))
    assert ours or raised_in.endswith(CHECKERS), shown
    assert len(str(caught).split()) >= 4, shown
    assert not isinstance(caught, KeyError | IndexError | UnicodeError), shown
    return None


numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([10**9, -(10**9), 2**63, 0.0, -0.5, 0.5, 1e-3, math.inf, -math.inf, math.nan]),
)
junk = st.one_of(
    numbers,
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.lists(numbers, max_size=3),
    st.dictionaries(st.text(max_size=3), numbers, max_size=2),
)

# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.long
def test_a_configuration_is_built_or_refused(name):
    family = load_family(name)
    own = [field.name for field in dataclasses.fields(family.config_class)]
    own = [field for field in own if not field.startswith("_")]
    fields = st.dictionaries(
        st.one_of(st.sampled_from(own), st.text(max_size=6)), junk, min_size=1, max_size=3
    )

    @fuzz(120)
    @given(fields)
    def run(changes):
        config = outcome(lambda: family.config(**{**family.tiny, **changes}))
        size = 0 if config is None else config.hidden_size * config.num_hidden_layers
        if 0 < size < 10_000:
            with torch.device("meta"):
                outcome(lambda: family.model_class(config))

    run()


# --- recipes and sweeps ------------------------------------------------------------------------

RECIPES = sorted(package_data("eval/recipes").glob("*.yaml"))


def places(value, path=()):
    """Yield the path of everything inside nested dictionaries and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))


@fuzz(300)
@given(st.sampled_from(RECIPES), st.data())
@pytest.mark.long
def test_a_recipe_is_read_or_refused(tmp_path_factory, path, data):
    fields = yaml.safe_load(path.read_text())
    *parents, last = data.draw(st.sampled_from(sorted(places(fields), key=str)))
    inside = fields
    for key in parents:
        inside = inside[key]
    if data.draw(st.booleans()) or not isinstance(inside, dict):
        inside[last] = data.draw(junk)
    else:
        inside[data.draw(st.text(max_size=6))] = inside.pop(last)
    target = tmp_path_factory.getbasetemp() / "recipe.yaml"
    target.write_text(yaml.safe_dump(fields))
    outcome(lambda: load_recipe(target))


@fuzz(100)
@given(st.sampled_from(RECIPES), st.integers(0, 2000), st.binary(max_size=4))
def test_a_recipe_with_damaged_bytes_is_read_or_refused(tmp_path_factory, path, place, damage):
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place : place + len(damage)] = damage
    target = tmp_path_factory.getbasetemp() / "recipe.yaml"
    target.write_bytes(content)
    outcome(lambda: load_recipe(target))


# --- ops ---------------------------------------------------------------------------------------

B, L, D, N = 2, 5, 4, 3
OPS = {
    "linear_scan": {"a": (B, L, D), "b": (B, L, D), "initial_state": (B, D)},
    "longhorn_scan": {
        "u": (B, L, D), "q": (B, L, N), "k": (B, L, N), "dt": (B, L, D), "dt_bias": (D,),
        "D": (D,), "z": (B, L, D), "initial_state": (B, D, N),
    },
    "selective_scan": {
        "u": (B, L, D), "dt": (B, L, D), "A": (D, N), "B": (B, L, N), "C": (B, L, N), "D": (D,),
        "z": (B, L, D), "dt_bias": (D,), "initial_state": (B, D, N),
    },
    "feedback_scan": {
        "u": (B, L, D), "lam": (D, N), "w": (D, N), "C": (D, N), "w_gamma": (D, N), "D": (D,),
        "drive": (B, L, D), "initial_state": (B, D, N),
    },
    "causal_conv1d": {
        "x": (B, L, D), "weight": (D, N), "bias": (D,), "initial_state": (B, N - 1, D),
    },
    "gated_linear_attention": {
        "q": (B, L, 2, N), "k": (B, L, 2, N), "v": (B, L, D, N), "log_decay": (B, L, D),
        "beta": (B, L, D), "initial_state": (B, D, N, N),
    },
    "fft_conv": {"u": (B, L, D), "kernel": (D, L), "D": (D,)},
    "rational_kernel": {"a": (D, N), "b": (D, N)},
    "innovation": {"y": (B, L, D), "weights": (N,), "history": (B, N, D)},
}  # fmt: skip
BACKENDS = ("auto", "reference", "eager", "cpu", "triton", "cuda")


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_computes_or_refuses(name):
    extra = {"length": L} if name == "rational_kernel" else {}
    op, generator = getattr(ssmzoo_kernels, name), torch.Generator().manual_seed(0)

    def tensor(shape, draw):
        made = -torch.rand(shape, generator=generator)
        change = draw(st.sampled_from(["no", "no", "shape", "rank", "dtype", "kind", "values"]))
        if change == "shape" and shape:
            place = draw(st.integers(0, len(shape) - 1))
            shape = [*shape]
            shape[place] = draw(st.integers(0, 7))
            return -torch.rand(shape, generator=generator)
        if change == "rank":
            return made[0] if draw(st.booleans()) and made.dim() else made[None]
        if change == "dtype":
            kinds = [torch.int64, torch.bool, torch.float64, torch.float16, torch.complex64]
            return made.to(draw(st.sampled_from(kinds)))
        if change == "kind":
            return draw(st.one_of(st.none(), st.integers(0, 3), st.text(max_size=3)))
        if change == "values":
            made.view(-1)[: made.numel() // 2] = draw(st.sampled_from([math.inf, math.nan, 1e30]))
        return made

    @fuzz(70)
    @given(st.data())
    def run(data):
        given = {arg: tensor(shape, data.draw) for arg, shape in OPS[name].items()}
        if data.draw(st.booleans()):
            given["backend"] = data.draw(st.sampled_from(BACKENDS))
        if data.draw(st.booleans()):
            bounds = data.draw(st.lists(st.integers(-1, 7), max_size=4))
            given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int64)
        if "cu_seqlens" not in inspect.signature(op).parameters:
            given.pop("cu_seqlens", None)
        outcome(lambda: op(**given, **extra))

    run()


# --- command lines -----------------------------------------------------------------------------

WORDS = (
    "nosuch", "", "-", "--", "a/b/c", "../x", "/", ".", "~nobody", "--json", "--load", "--seed",
    "-1", "1e9", "--set", "a.b=c", "train.lr=x", "=", "--device", "cpu", "--dtype", "bfloat16",
    "--output", "--out",
    "--limit", "\N{PILE OF POO}", "x" * 300, "--help=3", "-h3", "--no-peers", "--beams", "0",
    "--tasks", "zoo_mqar", "--suite", "--order", "--kind", "--length", "--state", "--dry-run",
    "--include-state",
)  # fmt: skip
COMMANDS = (
    "list", "info", "train", "generate", "eval", "card", "publish", "check", "inspect", "distill",
    "sweep", "doctor", "convert", "export", "export-kernels",
    "nosuch",
)  # fmt: skip


@fuzz(350)
@given(st.sampled_from(COMMANDS), st.lists(st.sampled_from(WORDS), max_size=5))
@pytest.mark.long
def test_a_command_line_is_answered_with_0_or_2_and_one_line(capsys, command, words):
    before = {path.name for path in Path.cwd().iterdir()}
    status = main([command, *words])
    err = capsys.readouterr().err
    assert status in (0, 2), (status, err)
    assert "Traceback" not in err
    if status == 2:
        lines = [line for line in err.splitlines() if line.startswith("ssmzoo: error: ")]
        assert len(lines) == 1, err
    assert {path.name for path in Path.cwd().iterdir()} == before, "a file outside its folder"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in an empty folder, so that what is written there by mistake is seen."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


# --- files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family = load_family("longhorn")
    torch.manual_seed(0)
    fields = {**family.tiny, "vocab_size": 260, "num_hidden_layers": 1}
    network = family.causal_lm_class(family.config(**fields)).eval()
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    network.prefill(torch.arange(6)[None]).save_pretrained(folder / "state")
    return folder


@pytest.fixture(scope="module")
def network(model):
    return load_model(str(model), model, "auto", False)


def damaged(content, data):
    """Return bytes with some changed, cut off, repeated or put in."""
    content = bytearray(content)
    header = min(len(content), 600)  # where the structure is
    place = data.draw(st.integers(0, header))
    kind = data.draw(st.sampled_from(["change", "cut", "insert", "length", "text"]))
    if kind == "cut":
        return bytes(content[: data.draw(st.integers(0, len(content)))])
    if kind == "insert":
        content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    elif kind == "length":
        content[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    elif kind == "text":
        old = data.draw(
            st.sampled_from([b'"F32"', b"data_offsets", b"shape", b"model", b"0", b"["])
        )
        return bytes(content).replace(
            old, data.draw(st.sampled_from([b'"F64"', b"", b"-1", b"{"])), 1
        )
    else:
        content[place : place + 1] = data.draw(st.binary(min_size=1, max_size=2))
    return bytes(content)


@fuzz(150)
@given(st.data())
@pytest.mark.long
def test_damaged_weights_load_or_are_named(model, tmp_path_factory, data):
    folder = copied(model, tmp_path_factory)
    weights = folder / "model.safetensors"
    weights.write_bytes(damaged(weights.read_bytes(), data))
    outcome(lambda: load_model(str(folder), folder, "auto", False))
    outcome(lambda: describe_checkpoint(folder))


@fuzz(120)
@given(st.data())
def test_a_damaged_configuration_loads_or_is_named(model, tmp_path_factory, data):
    folder = copied(model, tmp_path_factory)
    path = folder / "config.json"
    if data.draw(st.booleans()):
        fields = json.loads(path.read_text())
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(
            junk.filter(lambda value: not _huge(value))
        )
        path.write_text(json.dumps(fields))
    else:
        path.write_bytes(damaged(path.read_bytes(), data))
    outcome(lambda: load_model(str(folder), folder, "auto", False))


def _huge(value):
    return isinstance(value, int | float) and abs(value) > 1e6


@fuzz(200)
@given(st.data())
def test_a_damaged_state_loads_or_is_named(model, network, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "state"
    folder.mkdir(exist_ok=True)
    content = (model / "state" / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(damaged(content, data))
    outcome(lambda: load_state(folder, network))
    outcome(lambda: StateCache.load(folder / "state.safetensors", network.config))


@fuzz(80)
@given(st.data())
def test_damaged_results_make_no_card(model, tmp_path_factory, data):
    path = sorted(package_data("eval/recipes").parents[0].glob("results/*.json"))[0]
    target = tmp_path_factory.getbasetemp() / "results.json"
    target.write_bytes(damaged(path.read_bytes(), data))
    card = tmp_path_factory.getbasetemp() / "card.md"
    made = outcome(lambda: render_card(model, results=[target], output=card))
    assert (made is not None) == card.exists()
    card.unlink(missing_ok=True)


def copied(model, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "copy"
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_files_of_the_model_are_whole(model):
    """The cases above begin from files that load."""
    assert load_file(model / "model.safetensors")
    network = load_model(str(model), model, "auto", False)
    assert load_tokenizer(str(model), model, False).encode("a")
    assert load_state(model / "state", network).num_tokens == 6
    assert os.listdir() == []
