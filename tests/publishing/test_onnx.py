"""ONNX, in processes of its own: its packages lie beside the rest."""

import importlib.util
import os

import pytest
from tests.forks import Forks
from tests.zoo import OURS

# one worker imports its packages
pytestmark = pytest.mark.xdist_group("onnx")

CHECKED = """
import sys

from tests.plugins.sabotage import NARROW

from ssmzoo.testing import check

for name in sys.argv[1:]:
    report = NARROW[name].report(["onnx"]) if name in NARROW else check(name, only=["onnx"])
    expected = "failed" if name == "onnx" else "passed"
    assert report.results[0].status == expected, report.table()
"""

TOKENS = """
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from ssmzoo.cli.main import main
from ssmzoo.family import load_family
from ssmzoo.publishing.export_code import export_code
from ssmzoo.testing.subject import Subject

count, subject = int(sys.argv[1]), Subject(load_family(sys.argv[2]))
longer = {"kernel_norm_length": 2048} if sys.argv[2] == "dss" else {}  # its modes grow
model = subject.fresh(**longer, **({} if sys.argv[2] == "bmojo" else {"num_hidden_layers": 1}))
prompt = subject.ids(2, 9)
expected = model.generate(prompt, max_new_tokens=count, do_sample=False)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(f"{folder}/model")
    export_code(model, f"{folder}/model")  # as a published one has it
    out = f"{folder}/graph"
    assert main(["export", f"{folder}/model", "--to", "onnx", "--output", out]) == 0
    assert main(["export", f"{folder}/model", "--to", "onnx", "--output", f"{folder}/model"]) == 2
    session = onnxruntime.InferenceSession(f"{out}/model.onnx")
    told = json.loads(Path(out, "ssmzoo_onnx.json").read_text())
    written = [path.read_bytes() for path in Path(out).iterdir()]
    for place in (sys.prefix, os.getcwd()):  # as in where torch's exporter met each operator
        assert not any(place.encode() in content for content in written)
states = {
    f"past.{state['name']}": np.zeros((2, *state["shape"]), state["dtype"])
    for state in told["states"]
}
ids = [prompt.numpy()]
for _ in range(count):
    logits, *new = session.run(None, {"input_ids": ids[-1], **states})
    states = dict(zip(states, new))
    ids.append(logits[:, -1:].argmax(axis=-1))
assert torch.equal(torch.as_tensor(np.concatenate(ids, axis=1)), expected)
"""

PAGE = """
import re
import sys
from pathlib import Path

import torch

from ssmzoo.family import load_family
from ssmzoo.testing.subject import Subject

subject = Subject(load_family("longhorn"))
model, ids = subject.fresh(num_hidden_layers=1), subject.ids(2, 64)
text = Path("docs/export.md").read_text(encoding="utf-8")
(block,) = (x for x in re.findall(r"```python\\n(.*?)```", text, re.DOTALL) if "onnxruntime" in x)
block = block.replace("my-graph", str(Path(sys.argv[1], "graph")))
exec(block)
expected = model.generate(ids, max_new_tokens=8, do_sample=False)
assert (torch.as_tensor(tokens) == expected[:, -1:]).all()
with torch.no_grad():
    whole = model(expected[:, :-1]).logits[:, -1:]
assert (torch.as_tensor(logits) - whole).abs().max() <= 1e-5 * whole.abs().max()
"""


@pytest.fixture(scope="module")
def run():
    folder = os.environ.get("SSMZOO_TEST_ONNX")
    if folder is None and importlib.util.find_spec("onnx") is None:
        pytest.skip("onnx is not installed; `make test` puts it beside the rest")
    paths = [path for path in (folder, os.environ.get("PYTHONPATH")) if path]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with Forks({**os.environ, **environment}, "onnxruntime", "onnxscript") as forks:

        def run_script(code, *arguments):
            done = forks.run(code, *map(str, arguments))
            assert done.status == 0, done.log
            return done

        yield run_script


@pytest.mark.long
def test_an_operator_that_onnx_lacks_is_found(run):
    run(CHECKED, "onnx")


@pytest.mark.long
def test_the_command_writes_a_graph_that_generates_the_models_tokens(run):
    done = run(TOKENS, 50, "coffee")
    assert "graph" not in done.log
    assert "holds files that no export wrote; choose another folder" in done.log


@pytest.mark.long
def test_the_page_on_export_says_what_runs(run, tmp_path):
    run(PAGE, tmp_path)


@pytest.mark.slow
def test_every_family_is_exact_in_onnx(run):
    run(CHECKED, *OURS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_a_thousand_tokens_are_the_models(run, name):
    run(TOKENS, 1000, name)
