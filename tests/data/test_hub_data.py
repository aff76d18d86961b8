"""Training on a Hub data set over real HTTP on loopback: downloaded, streamed, pinned, resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# one fresh interpreter that knows no Hub but its own: a Hub's address is read at import
SCRIPT = """
import importlib.util, json, os, sys
from pathlib import Path

helper, work = sys.argv[1], Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("hub_server", helper)
hub_server = sys.modules["hub_server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub_server)

def lines(word, count):
    records = ({"body": f"{word} number {i} of {count}"} for i in range(count))
    return "".join(json.dumps(r) + chr(10) for r in records).encode()

def tried(way, work):
    from safetensors.torch import load_file
    from ssmzoo.data.sources import data_source
    from ssmzoo.recipe import load_recipe
    from ssmzoo.training.run import train

    def commit(word):
        files = {"train.jsonl": lines(word, 60), "test.jsonl": lines(word, 20)}
        return hub.add_dataset(f"user/{way}", files)

    begun, first = len(hub.requests), commit("ant")
    work.mkdir()
    recipe = work / "recipe.yaml"
    recipe.write_text(f'''
model: {{family: longhorn, config: {{hidden_size: 16, num_hidden_layers: 1}}}}
data: {{dataset: user/{way}, text_field: body, validation: test, streaming: {way == "streamed"}}}
train: {{steps: 6, batch_size: 2, seq_len: 32, lr: 0.01, warmup: 0, min_lr_ratio: 1}}
eval: {{every: 3, batches: 2}}
checkpoint: {{every: 3}}
''')
    whole = train(recipe, output_dir=work / "whole")
    part = train(recipe, output_dir=work / "part", overrides=["train.steps=3"])
    second = commit("bee")
    asked = len(hub.requests)
    part = train(recipe, output_dir=work / "part", resume=True)
    while_resuming = hub.requests[asked:]
    runs = {"whole": whole, "part": part}
    found = {"later": [], "chosen": [f"data.revision={first}"]}
    data = {
        n: data_source(load_recipe(recipe, overrides)).prepare(work / n)
        for n, overrides in found.items()
    }
    errors = {}
    for name, override in {
        "dataset": "data.dataset=user/wrods",
        "revision": "data.revision=abcdef",
        "split": "data.split=tarin",
        "field": "data.text_field=text",
    }.items():
        try:
            train(recipe, output_dir=work / "refused", overrides=[override])
        except (LookupError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    weights = {n: load_file(r / "model/model.safetensors") for n, r in runs.items()}
    same = lambda a, b: all((weights[a][k] == weights[b][k]).all().item() for k in weights[a])
    data |= {n: json.loads((r / "data.json").read_text()) for n, r in runs.items()}
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
    return {
        "way": way,
        "commits": [first, second],
        "revisions": {n: found["revision"] for n, found in data.items()},
        "same": same("whole", "part"),
        "validated": [line["step"] for line in metrics if "validation_loss" in line],
        "requests": hub.requests[begun:],
        "while_resuming": while_resuming,
        "errors": errors,
    }

with hub_server.HubServer() as hub:
    os.environ["HF_ENDPOINT"] = hub.url
    import ssmzoo.training.folder
    ssmzoo.training.folder.draw_curves = lambda *_, **__: None  # as slow as a run
    print(json.dumps({way: tried(way, work / way) for way in ("downloaded", "streamed")}))
"""


pytestmark = [pytest.mark.xdist_group("hub_data"), pytest.mark.long]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    work = tmp_path_factory.mktemp("hub-data")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_HOME": str(work / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    helper = Path(__file__).parents[1] / "hub_server.py"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(helper), str(work)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["downloaded", "streamed"])
def outcome(request, outcomes):
    return outcomes[request.param]


def test_a_hub_data_set_is_trained_and_validated_on(outcome):
    assert outcome["validated"] == [3, 6]
    first, _ = outcome["commits"]
    fetched = [r for r in outcome["requests"] if "/resolve/" in r]
    for file in ("train.jsonl", "test.jsonl"):
        assert f"GET /datasets/user/{outcome['way']}/resolve/{first}/{file}" in fetched


def test_a_resumed_run_keeps_its_commit_of_the_data_set(outcome):
    first, second = outcome["commits"]
    assert outcome["revisions"] == {
        "whole": first,
        "part": first,
        "later": second,
        "chosen": first,
    }
    assert outcome["same"]
    assert not any(second in request for request in outcome["while_resuming"])


def test_a_missing_data_set_revision_or_split_is_named(outcome):
    errors = outcome["errors"]
    assert errors["dataset"].startswith("LookupError: data.dataset: no data set 'user/wrods'")
    assert errors["revision"] == (
        "LookupError: data.revision: the data set "
        f"'user/{outcome['way']}' has no branch, tag or commit 'abcdef'"
    )
    assert errors["split"].startswith("LookupError: data.dataset: ")
    assert "tarin" in errors["split"]
    assert errors["field"].startswith("LookupError: ")
    assert "no field 'text', it has body" in errors["field"]
