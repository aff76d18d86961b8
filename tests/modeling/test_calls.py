"""The way of a token: how many Python calls one forward pass goes through.

Counted are calls of Python functions (``sys.setprofile``, event "call": functions, properties and
comprehensions) whose file lies in this repository, after a few passes that fill the caches; torch's
and transformers' are not. The models are the families' tiny ones, with the layers that a test
names. The numbers depend on the code alone, not on the machine.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

import ssmzoo_kernels
from ssmzoo import load_family
from ssmzoo.modeling import Sequences, layers
from ssmzoo_kernels import validation

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / folder) + os.sep for folder in ("src", "plugins", "kernels"))


def count(run):
    """Return how many calls of Python functions of ours a run makes."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls.append(frame.f_code)

    for _ in range(3):
        run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return len(calls)


def language_model(name, layers):
    family = load_family(name)
    fields = {**family.tiny, "num_hidden_layers": layers}
    if "mixer_types" in fields:
        fields |= {"mixer_types": fields["mixer_types"][:1], "sliding_window": 64}
    torch.manual_seed(0)
    return family.causal_lm_class(family.config(**fields)).eval()


# by family: calls of a forward pass of one layer without a cache, calls of a decoding
# step of four layers (in one call of C, but those of DSS where modes grow, and of B'MOJO with the
# last token of a chunk, which is not counted). Each may fall; a rise must pay: DSS asks for every
# token whether what has no program has changed, linear attention's norm whether it is one of
# groups, mixers whether they got boundaries, kept values whether torch.jit traces them, and each
# tensor that is widened whether its device has float64
MOST = {
    "longhorn": (53, 66),
    "coffee": (64, 66),
    "h3": (204, 77),
    "s4": (172, 77),
    "s5": (50, 77),
    "dss": (105, 261),
    "rtf": (115, 86),
    "spacetime": (98, 82),
    "bmojo": (230, 114),
    "linear_attention": (79, 66),
    "mamba3": (104, 66),
    "rwkv7": (111, 74),
}


@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_a_layer_and_a_decoding_step_take_few_calls(name, monkeypatch):
    # as of a prompt of more rows than decode at once
    monkeypatch.setattr(layers, "MOST_ROWS", 8)
    ids = torch.arange(32).view(2, 16)
    model = language_model(name, layers=1)
    forward = count(lambda: model(ids, use_cache=False))
    model = language_model(name, layers=4)
    cache = model(ids, use_cache=True).cache
    step = count(lambda: model(ids[:, :1], cache=cache))
    calls, steps = MOST[name]
    assert forward <= calls
    assert step <= steps


@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_packing_is_checked_once_for_all_layers(name, monkeypatch):
    checks, found = [], []
    check, of = validation.check_boundaries, Sequences.of.__func__
    monkeypatch.setattr(
        validation, "check_boundaries", lambda *given: (checks.append(given), check(*given))[1]
    )
    monkeypatch.setattr(
        Sequences, "of", classmethod(lambda *given: (found.append(given), of(*given))[1])
    )
    model = language_model(name, layers=4)
    ids = torch.arange(12)[None]
    model(ids, labels=ids, cu_seqlens=torch.tensor([0, 5, 12]))
    assert len(checks) == len(found) == 1


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_a_checkpoint_imports_its_own_family_only(forks, tmp_path):
    language_model("longhorn", layers=1).save_pretrained(tmp_path)
    code = f"""
import sys, ssmzoo.auto, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification as Classifier
for kind in (AutoConfig, AutoModel, AutoModelForCausalLM, Classifier):
    kind.from_pretrained({str(tmp_path)!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
print(sorted({{name.split(".")[0] for name in sys.modules if name.startswith("ssmzoo_")}}))
"""
    done = forks.run(code)
    assert done.status == 0, done.log
    assert done.out.splitlines()[-1] == f"{[ssmzoo_kernels.__name__, 'ssmzoo_longhorn']}"
