"""The Hub over real HTTP on loopback: publish, push, load, and go on after everything that fails.

Each step runs in a process of its own, whose parent read the Hub's address as it was imported. All
of them log what they can, and ``run`` fails where a token shows. Their pauses are recorded instead
of waited for.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.forks import Forks
from tests.hub_server import Blob, Fault, HubServer, Repo
from tests.test_faults import Harm
from transformers import AutoModelForCausalLM

from ssmzoo import load_family
from ssmzoo.checkpoints.loader import AUTO_MAP, LOADER
from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.modeling import load_state
from ssmzoo.modeling.compat import CACHE
from ssmzoo.publishing.card import render_card
from ssmzoo.publishing.export_code import MARK
from ssmzoo.publishing.hub import publish

# what was pushed once is read by many tests
pytestmark = [pytest.mark.xdist_group("hub_http"), pytest.mark.long]

CHUNK = 10 * 1024 * 1024  # bytes that huggingface_hub collects before it writes them
SCORE = {
    "task": "ssmzoo_recall_text",
    "metric": "acc",
    "value": 0.61803,
    "stderr": None,
    "n": 500,
    "seed": 1234,
    "num_fewshot": 0,
    "higher_is_better": True,
    "settings": {},
}

START = """
import json, os, sys, time
waits = []
time.sleep = waits.append
"""

# at an address where nobody listens
ELSEWHERE = """
from huggingface_hub import constants
constants.ENDPOINT = "http://127.0.0.1:1"
"""

# folder target [folder target ...]: publish each
PUBLISH = (
    START
    + """
from ssmzoo.cli.main import main

for folder, target in zip(sys.argv[1::2], sys.argv[2::2]):
    target, *options = target.split()
    print(main(["publish", folder, target, "--no-code", *options]))
print(json.dumps(waits))
"""
)

PUSH = (
    START
    + """
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM
from ssmzoo.cli.main import main
import ssmzoo.auto

folder, wide = sys.argv[1:]
for options in (
    ["tester/published", "--no-code", "--dry-run"],
    ["tester/published", "--no-code"],
    ["tester/stateful", "--no-code", "--include-state", "--dry-run"],
    ["tester/stateful", "--no-code", "--include-state"],
    ["tester/published", "--no-code", "--revision", "second/try"],
    ["tester/private", "--private"],
):
    assert main(["publish", folder, *options, "--json"]) == 0
HfApi().create_tag("tester/published", tag="v1", tag_message="as it was")
with open(os.path.join(folder, "README.md"), "a") as card:
    card.write("A second thought." + chr(10))
assert main(["publish", folder, "tester/published", "--no-code", "--json"]) == 0
network = AutoModelForCausalLM.from_pretrained(wide)
network.push_to_hub("tester/pushed", max_shard_size="1MB")
AutoModelForCausalLM.from_pretrained(folder).push_to_hub("tester/pushed", revision="other")
"""
)

LOAD = (
    START
    + """
import numpy as np
import torch
import ssmzoo.auto
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM
from ssmzoo.modeling import load_state

torch.set_num_threads(1)
input_ids = torch.arange(24).reshape(2, 12)
logits, errors = {}, {}

def read(name, **options):
    return AutoModelForCausalLM.from_pretrained(f"tester/{name}", **options).eval()

with torch.no_grad():
    logits["v1"] = read("published", revision="v1")(input_ids).logits.numpy()
    logits["main"] = read("published")(input_ids).logits.numpy()
    logits["pushed"] = read("pushed")(input_ids).logits.numpy()
    logits["other"] = read("pushed", revision="other")(input_ids).logits.numpy()
    state = load_state(snapshot_download("tester/stateful"), read("stateful"))
    inputs = state.inputs(input_ids[:1])
    inputs["input_ids"] = inputs["input_ids"][:, state.cache.seen_tokens :]
    logits["stateful"] = state.model(**inputs).logits.numpy()

right, stranger = sys.argv[2:]
for reader, token in {"nobody": False, "wrong": "hf_wrong_secret", "stranger": stranger}.items():
    try:
        read("private", token=token)
    except OSError as error:
        errors[reader] = str(error)
with torch.no_grad():
    logits["private"] = read("private", token=right)(input_ids).logits.numpy()
np.savez(sys.argv[1], **logits)
print(json.dumps(errors))
"""
)


class Done(NamedTuple):
    out: list[str]  # lines
    log: str
    status: int

    @property
    def errors(self) -> list[str]:
        start = "ssmzoo: error: "
        lines = self.log.splitlines()
        return [line.removeprefix(start) for line in lines if line.startswith(start)]


@pytest.fixture(scope="module")
def server():
    with HubServer() as running:
        yield running


class Python(NamedTuple):
    """Interpreters that know no Hub but one, and its cache by a link."""

    forks: Forks
    server: HubServer
    link: Path

    def run(
        self,
        home: Path,
        script: str,
        *arguments: object,
        token: str | None = "the user's",
        started: Callable[[int], object] = lambda pid: None,
    ) -> Done:
        """Run a script whose cache is the folder ``home``; a token of None is none."""
        token = self.server.token if token == "the user's" else token
        self.link.unlink(missing_ok=True)
        home.mkdir(exist_ok=True)
        self.link.symlink_to(home)
        out, log, status = self.forks.run(
            script,
            *map(str, arguments),
            environment={} if token is None else {"HF_TOKEN": token},
            started=started,
        )
        assert status in (0, -signal.SIGKILL), log
        for secret in {token, *self.server.accounts} - {None}:
            assert secret not in out + log
            for path in home.rglob("*"):
                assert not path.is_file() or secret.encode() not in path.read_bytes(), path
        # requests were logged, without it
        assert "Send: curl" not in log or token is None or "<TOKEN>" in log
        assert self.server.leaks == []
        return Done(out.splitlines(), log, status)


@pytest.fixture(scope="module")
def python(server, tmp_path_factory):
    link = tmp_path_factory.mktemp("cache") / "home"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(link),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DEBUG": "1",
        "OMP_NUM_THREADS": "1",
    }
    with Forks(environment, "ssmzoo.auto", "ssmzoo.cli.main") as forks:
        yield Python(forks, server, link)


@pytest.fixture
def run(python, tmp_path):
    """Run a script in a process that has an empty cache, or that of the test's last one."""
    return functools.partial(python.run, tmp_path / "home")


def save(folder: Path, max_shard_size: str = "50GB", **changes) -> Path:
    """Save a small Longhorn with everything that a publication needs."""
    family = load_family("longhorn")
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(**{**family.tiny, **changes})).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    model.prefill(torch.arange(7)[None]).save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    results = folder.with_suffix(".json")
    scored = {"name": "tiny", "source": str(folder), "revision": weights_revision(folder)}
    content = {
        "model": {**scored, "model_type": "ssmzoo_longhorn", "parameters": 1},
        "results": [SCORE],
        "versions": {"ssmzoo": "0.1.0"},
        "hardware": "Another CPU 9654, 2 threads",
        "date": "2026-03-04T05:06:07+00:00",
        "command": "ssmzoo eval tiny",
    }
    results.write_text(json.dumps(content))
    render_card(folder, results=[results])
    return folder


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One file of weights, and the state of a prompt."""
    return save(tmp_path_factory.mktemp("saved") / "narrow")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two shards, one of them longer than what a download writes at once."""
    folder = save(
        tmp_path_factory.mktemp("saved") / "wide", "1MB", hidden_size=64, vocab_size=45_000
    )
    shards = sorted(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    assert len(shards) == 2
    assert shards[0] < 1_000_000 < CHUNK < shards[1]
    return folder


@pytest.fixture
def small(tmp_path):
    """A folder that takes no torch to make: for what fails before anything is loaded."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "ssmzoo_longhorn"}')
    save_file({"x": np.arange(50_000, dtype=np.int32)}, folder / "model.safetensors")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# small\n")
    return folder


def shown(folder: Path, **options) -> dict[str, bytes]:
    """Return what a dry run says would go."""
    report = publish(folder, "tester/shown", code=False, dry_run=True, **options)
    return {file.path: (folder / file.path).read_bytes() for file in report.files}


def held(server: HubServer, repo: str, revision: str = "main") -> dict[str, bytes]:
    """Return what a repository holds, without what the Hub itself puts there."""
    files = server.files(repo, revision)
    del files[".gitattributes"]
    return files


def oid(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


# all goes well


@pytest.fixture(scope="module")
def pushed(server, python, narrow, wide, tmp_path_factory):
    """What the process that pushes said of each publication."""
    large = oid(max(wide.glob("model-*.safetensors"), key=lambda path: path.stat().st_size))
    server.faults += [
        Fault("POST /api/models/tester/pushed/preupload/main", 503),
        Fault(f"PUT /lfs/{large}", cut="request", after=3_000_000),
    ]
    before = shown(narrow)
    done = python.run(tmp_path_factory.mktemp("home"), PUSH, narrow, wide)
    names = ["dry", "real", "state dry", "state", "second", "private", "thought"]
    decoder, text = json.JSONDecoder(), "\n".join(done.out)
    starts = re.finditer(r"^\{", text, re.MULTILINE)
    reports = [decoder.raw_decode(text, match.start())[0] for match in starts]
    assert server.faults == []
    return {**dict(zip(names, reports, strict=True)), "before": before}


def test_the_hub_gets_exactly_what_the_dry_run_showed(server, narrow, pushed):
    for dry, real, repo, revision in (
        ("dry", "real", "tester/published", "v1"),
        ("state dry", "state", "tester/stateful", "main"),
    ):
        assert pushed[dry]["files"] == pushed[real]["files"]
        assert pushed[dry]["left_out"] == pushed[real]["left_out"]
        sent = held(server, repo, revision)
        assert {name: len(raw) for name, raw in sent.items()} == {
            file["path"]: file["size"] for file in pushed[dry]["files"]
        }
    assert held(server, "tester/published", "v1") == pushed["before"]
    assert pushed["dry"]["left_out"] == ["notes.txt", "state.safetensors"]
    assert pushed["state dry"]["left_out"] == ["notes.txt"]
    assert "state.safetensors" in held(server, "tester/stateful")
    assert (pushed["dry"]["url"], pushed["dry"]["commit"]) == (None, None)
    assert pushed["real"]["url"] == f"{server.url}/tester/published"


def test_a_publication_is_one_commit_of_changed_files(server, pushed):
    repo = server.repos["tester/published"]
    _, first, second = repo.trees
    assert (first, second) == (pushed["real"]["commit"], pushed["thought"]["commit"])
    assert repo.branches["main"] == second
    changed = {p for p, blob in repo.trees[second].items() if blob != repo.trees[first][p]}
    assert changed == {"README.md"}
    assert len([r for r in server.requests if r.endswith("tester/published/commit/main")]) == 2
    assert "POST /api/validate-yaml" in server.requests  # the Hub's own check of the card


def test_publishing_includes_the_code_by_default(server, pushed):
    sent, plain = held(server, "tester/private"), held(server, "tester/published")
    code = {name for name in sent if name.endswith(".py")}
    assert "modeling_longhorn.py" in code
    assert sent.keys() - code == plain.keys() - {LOADER}
    assert "AutoModelForCausalLM" in json.loads(sent["config.json"])["auto_map"]
    assert json.loads(plain["config.json"])["auto_map"] == AUTO_MAP
    assert {name: len(raw) for name, raw in sent.items()} == {
        file["path"]: file["size"] for file in pushed["private"]["files"]
    }


def test_a_revision_that_changes_nothing_is_a_branch_without_a_commit(server, pushed):
    repo = server.repos["tester/published"]
    assert set(repo.branches) == {"main", "second/try"}
    assert repo.branches["second/try"] == pushed["second"]["commit"] == pushed["real"]["commit"]
    assert not repo.private
    assert server.repos["tester/private"].private


def test_the_same_weights_are_sent_once_to_whatever_repository(server, narrow, pushed):
    puts = [r for r in server.requests if r == f"PUT /lfs/{oid(narrow / 'model.safetensors')}"]
    assert len(puts) == 1


@pytest.fixture(scope="module")
def loaded(server, python, pushed, tmp_path_factory):
    """What a process found that loads everything by its name."""
    work = tmp_path_factory.mktemp("load")
    done = python.run(
        work, LOAD, work / "logits.npz", server.token, server.stranger_token, token=None
    )
    return {"errors": json.loads(done.out[-1]), "logits": dict(np.load(work / "logits.npz"))}


def expected(folder: Path, input_ids: torch.Tensor) -> np.ndarray:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            return model(input_ids).logits.numpy()
    finally:
        torch.set_num_threads(threads)


def test_a_pushed_model_loads_by_its_name_bit_for_bit(loaded, narrow, wide):
    input_ids = torch.arange(24).reshape(2, 12)
    for name in ("v1", "main", "private", "other"):
        assert np.array_equal(loaded["logits"][name], expected(narrow, input_ids)), name
    assert np.array_equal(loaded["logits"]["pushed"], expected(wide, input_ids))


def test_a_saved_prompt_continues_after_loading(loaded, narrow):
    model = AutoModelForCausalLM.from_pretrained(narrow).eval()
    state = load_state(narrow, model)
    inputs = state.inputs(torch.arange(12)[None])
    whole = expected(narrow, inputs["input_ids"])
    seen = inputs[CACHE].seen_tokens
    assert seen == 6
    inputs["input_ids"] = inputs["input_ids"][:, seen:]
    with torch.no_grad():
        here = model(**inputs).logits.numpy()
    there = loaded["logits"]["stateful"]
    assert np.array_equal(there, here)
    assert np.abs(there - whole[:, seen:]).max() <= 1e-5 * np.abs(whole).max()


def test_a_private_repository_is_not_there_for_others(server, loaded):
    errors = loaded["errors"]
    assert set(errors) == {"nobody", "wrong", "stranger"}
    for error in errors.values():
        assert "tester/private" in error
        assert not any(token in error for token in (*server.accounts, "hf_wrong_secret"))


INFO = (
    START
    + """
from huggingface_hub import constants, snapshot_download
from ssmzoo.cli.main import main

print(main(["info", "tester/published", "--json"]))
print(main(["info", "tester/absent"]))
snapshot_download("tester/published")
constants.HF_HUB_OFFLINE = True
print(main(["info", "tester/published", "--json"]))
"""
)


def test_info_tells_of_a_model_on_the_hub_without_fetching_it(server, narrow, pushed, run):
    from ssmzoo.analysis.describe import describe_checkpoint

    done = run(INFO)
    decoder, text = json.JSONDecoder(), "\n".join(done.out)
    starts = [match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]
    asked, fetched = (decoder.raw_decode(text, start)[0] for start in starts)
    there = describe_checkpoint(narrow)
    for key in ("model_type", "parameters", "dtypes"):
        assert asked[key] == fetched[key] == there[key]
    assert asked["path"] == fetched["path"] == "tester/published"
    assert asked["config"]["d_state"] == there["config"]["d_state"]
    assert [line for line in done.out if line in "012"] == ["0", "2", "0"]
    [line] = done.errors
    assert line.startswith("no folder 'tester/absent' here, and no such model on the Hub")


# a repository that means harm

HOSTILE = (
    START
    + """
import ssmzoo.auto
from transformers import AutoModelForCausalLM
from ssmzoo.cli.main import main

for name in sys.argv[1:]:
    print(main(["generate", name, "ant"]))
    print(main(["doctor", name, "--length", "8"]))
    try:
        AutoModelForCausalLM.from_pretrained(name)
    except (ValueError, OSError) as error:
        sys.stderr.write("ssmzoo: error: " + " ".join(str(error).split()) + chr(10))
"""
)


def test_pickles_and_names_outside_are_refused_of_a_repository_too(server, narrow, run, tmp_path):
    harm = tmp_path / "harm"
    whole = {path.name: path.read_bytes() for path in narrow.iterdir()}
    weights = whole.pop("model.safetensors")
    pickled = pickle.dumps(Harm(harm))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../others.safetensors"}}
    files = {
        "tester/pickled": {**whole, "pytorch_model.bin": pickled},
        "tester/climbing": {
            **whole,
            "model.safetensors.index.json": json.dumps(index).encode(),
            "../others.safetensors": weights,
        },
    }
    for repo, tree in files.items():
        server.repos[repo] = Repo(private=False)
        blobs = {name: Blob(raw, lfs=name.endswith("tensors")) for name, raw in tree.items()}
        server.repos[repo].commit("main", blobs)
    done = run(HOSTILE, *files)
    assert done.out == ["2"] * 4
    lines = done.errors
    assert len(lines) == 6, done.log
    assert all("its weights must be safetensors, got pickles" in line for line in lines[:3])
    assert all("others.safetensors" in line for line in lines[3:]), lines
    assert not any("/commits/" in asked for asked in server.requests)  # nobody was asked to convert
    assert not harm.exists()
    for path in (tmp_path / "home").rglob("others.safetensors"):
        assert path.is_relative_to(tmp_path / "home" / "hub" / "models--tester--climbing")


# all goes wrong


def test_a_refused_token_is_named_as_the_cause_and_never_shown(server, small, run):
    for token, cause in (
        ("hf_wrong_secret", "the token is not valid (401); run `hf auth login` or set HF_TOKEN"),
        ("hf_wrong_secret\u00e9", "needs a valid Hugging Face token; run `hf auth login`"),
    ):
        done = run(PUBLISH, small, "tester/refused", token=token)
        (line,) = done.errors
        assert done.out == ["2", "[]"]
        assert "publishing to tester/refused" in line
        assert cause in line
    assert "tester/refused" not in server.repos


def test_the_way_out_of_each_refusal_of_the_hub_is_named(server, small, run, tmp_path):
    repo = Repo(private=False)
    former = (
        "model-00001-of-00002.safetensors", "golden.safetensors", ".eval_results/ssmzoo.yaml",
        "state.safetensors",
    )  # fmt: skip
    repo.commit("main", {name: Blob(b"old", lfs=True) for name in former})
    server.repos["tester/sharded"] = repo
    odd = tmp_path / "odd"
    odd.mkdir()
    for path in small.iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    (odd / "README.md").write_text("---\npipeline_tag: [1]\n---\n# odd\n")
    server.faults += [
        Fault("POST /api/repos/create", 429, {"Retry-After": "3600"}),
    ]
    targets = ("tester/busy", "tester/sharded", "stranger/tiny")
    arguments = [word for target in targets for word in (small, target)]
    done = run(PUBLISH, *arguments, odd, "tester/odd")
    busy, stale, forbidden, refused = done.errors
    assert done.out == ["2", "2", "2", "2", "[]"]
    assert busy.startswith(f"publishing to tester/busy at {server.url} failed: 429 Too Many")
    assert "; run the same command again" in busy
    assert f"already holds {', '.join(sorted(former))}, which" in stale
    assert "hf repos delete-files tester/sharded" in stale
    assert "may not write there (403)" in forbidden
    assert "pipeline_tag must be a string" in refused
    assert "again" not in refused
    assert len(repo.trees) == 1
    assert held(server, "tester/odd") == {}
    (nobody,) = run(PUBLISH, small, "tester/none", token=None).errors
    assert "needs a valid Hugging Face token" in nobody
    assert "hf auth login" in nobody
    elsewhere = PUBLISH.replace(START, START + ELSEWHERE)
    done = run(elsewhere, small, "tester/none")
    (nowhere,) = done.errors
    assert "at http://127.0.0.1:1 failed: [Errno 111] Connection refused; run the same" in nowhere


OF_SMALL = b'{"model_type": "ssmzoo_longhorn"}'
BROUGHT = {  # by an earlier publication of the same model, and not by the next
    "added_tokens.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.model",
    "vocab.txt", "merges.txt", "preprocessor_config.json", "generation_config.json",
    "golden.safetensors", "state.safetensors", "model-00001-of-00002.safetensors",
    "model.safetensors.index.json", ".eval_results/ssmzoo.yaml", "modeling_longhorn.py",
}  # fmt: skip
FOREIGN = (  # what somebody put there, and a loader may read
    "adapter_config.json", "additional_chat_templates/rag.jinja", "custom_generate/generate.py",
    "modeling_theirs.py", "processor_config.json", "pytorch_model.bin", "tf_model.h5",
    "tiny.gguf",
)  # fmt: skip
DOCUMENTS = {".gitattributes", "LICENSE", "NOTES.md", "loss.png", ".eval_results/theirs.yaml"}


def repository(
    server: HubServer, name: str, names: Iterable[str], config: bytes = OF_SMALL
) -> Repo:
    """Make a repository that holds an earlier publication, and files of these names."""
    code = Blob(MARK.encode(), lfs=False)
    blobs = {n: code if n in BROUGHT and n.endswith(".py") else Blob(b"old", False) for n in names}
    server.repos[name] = repo = Repo(private=False)
    repo.commit("main", {**blobs, "config.json": Blob(config, lfs=False)})
    return repo


def test_a_publication_replaces_an_earlier_one_as_a_whole_in_one_commit(server, small, run):
    """Files of the earlier one are deleted, documents stay; a lost answer is no second commit."""
    repo = repository(server, "tester/whole", BROUGHT | DOCUMENTS)
    done = run(PUBLISH, small, "tester/whole --json")
    assert done.errors == []
    assert server.files("tester/whole").keys() == shown(small).keys() | DOCUMENTS
    report = json.loads("\n".join(done.out[: done.out.index("0")]))
    assert report["deleted"] == sorted(BROUGHT)
    lost = repository(server, "tester/lost", BROUGHT)
    server.faults.append(Fault("POST /api/models/tester/lost/commit/main", cut="answer"))
    done = run(PUBLISH, small, "tester/lost", small, "tester/lost")
    (line,) = done.errors
    assert "; run the same command again" in line
    assert server.files("tester/lost").keys() == shown(small).keys()
    assert (len(repo.trees), len(lost.trees)) == (2, 2)


def test_a_publication_to_a_branch_replaces_what_that_branch_holds(server, small, run):
    """The main branch is not asked: it holds these very files, and others that would be refused."""
    repo, files = repository(server, "tester/branch", BROUGHT), shown(small)
    repo.branches["next"] = repo.branches["main"]
    main = {name: Blob(raw, name.endswith(".safetensors")) for name, raw in files.items()}
    oid = repo.commit("main", main | {name: Blob(b"theirs", lfs=False) for name in FOREIGN})
    assert run(PUBLISH, small, "tester/branch --revision next").errors == []
    assert server.files("tester/branch", "next") == files
    assert repo.branches["main"] == oid


@pytest.mark.parametrize(
    ("way", "there", "config"),
    [
        ("foreign", FOREIGN, OF_SMALL),
        ("other", BROUGHT, b'{"model_type": "llama"}'),
        ("damaged", BROUGHT, b"{"),
        ("adapter", ("state_adapter.json", "state_adapter.safetensors"), None),
    ],
)
def test_files_that_a_publication_does_not_replace_are_named_and_refused(
    server, small, run, way, there, config
):
    repo = repository(server, f"tester/{way}", there, config or b"")
    if config is None:
        del repo.trees[repo.branches["main"]]["config.json"]
    before = server.files(f"tester/{way}")
    (line,) = run(PUBLISH, small, f"tester/{way}").errors
    assert f"already holds {', '.join(sorted(there)[:8])}" in line
    assert (f" and {len(there) - 8} more, which" in line) == (len(there) > 8)
    assert server.files(f"tester/{way}") == before


def test_weights_that_change_while_they_are_sent_are_not_published(server, small, run):
    weights = small / "model.safetensors"
    content = weights.read_bytes()
    server.lfs.pop(oid(weights), None)  # of other tests
    server.faults.append(
        Fault(
            f"POST /lfs/{oid(weights)}/verify",
            cut="answer",
            then=lambda: weights.write_bytes(content[:-1] + b"!"),
        )
    )
    (line,) = run(PUBLISH, small, "tester/changed").errors
    assert f"{weights} changed while it was published; nothing was published" in line
    assert held(server, "tester/changed") == {}
    checked = "import ssmzoo.publishing.hub as hub\nhub._digests = lambda folder: {}\n"  # of others
    (line,) = run(PUBLISH.replace("\nfor ", f"\n{checked}for ", 1), small, "tester/changed").errors
    assert f"{weights} changed while it was published; nothing was published" in line


def test_a_private_publication_is_refused_by_a_public_repository(server, small, run):
    server.repos["tester/open"] = repo = Repo(private=False)
    repo.commit("main", {".gitattributes": Blob(b"", lfs=False)})
    done = run(PUBLISH, small, "tester/open --private", small, "tester/closed --private")
    (line,) = done.errors
    assert done.out[0] == "2"
    assert "tester/open is there already and public" in line
    assert "publish without --private" in line
    assert held(server, "tester/open") == {}
    assert server.repos["tester/closed"].private
    again = run(PUBLISH, small, "tester/closed --private")
    assert again.errors == []


def test_a_push_succeeds_despite_temporary_failures(server, small, run):
    weights = oid(small / "model.safetensors")
    server.lfs.pop(weights, None)  # of other tests
    server.faults += [
        Fault("GET /api/models/tester/stormy/tree/main", 500),
        Fault(
            "POST /api/models/tester/stormy/preupload/main", 429, {"RateLimit": '"api";r=0;t=31'}
        ),
        Fault(r"POST /tester/stormy\.git/info/lfs/objects/batch", cut="request"),
        Fault(f"PUT /lfs/{weights}", cut="request", after=70_000),
        Fault(f"PUT /lfs/{weights}", 500),
        Fault(f"POST /lfs/{weights}/verify", 504),
    ]
    done = run(PUBLISH, small, "tester/stormy")
    assert server.faults == []
    assert done.errors == []
    assert done.out[-4].endswith(f"published to {server.url}/tester/stormy")
    assert done.out[-3].startswith("to load it: install ssmzoo")
    assert held(server, "tester/stormy") == shown(small)
    assert len(server.repos["tester/stormy"].trees) == 2
    assert any(31 <= pause <= 33 for pause in json.loads(done.out[-1]))


def test_an_interrupted_push_is_resumed(server, wide, run):
    """Killed within an upload, then without a connection, then whole: one command, three times."""
    shards = {oid(path): path for path in wide.glob("model-*.safetensors")}
    small_shard, large = sorted(shards, key=lambda name: shards[name].stat().st_size)
    for name in (small_shard, large):
        server.lfs.pop(name, None)  # of other tests
    processes: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while small_shard not in server.lfs and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(processes[-1], signal.SIGKILL)

    server.requests.clear()
    server.faults.append(Fault(f"PUT /lfs/{large}", cut="request", after=5_000_000, then=kill))
    killed = run(PUBLISH, wide, "tester/resumed", started=processes.append)
    assert killed.status == -signal.SIGKILL
    assert small_shard in server.lfs
    assert held(server, "tester/resumed") == {}

    server.requests.clear()
    cut = Fault(f"PUT /lfs/{large}", cut="request", after=5_000_000)
    server.faults += [cut] * 6
    (line,) = run(PUBLISH, wide, "tester/resumed").errors
    assert line == (
        f"publishing to tester/resumed at {server.url} failed: Error while uploading "
        f"'{shards[large].name}' to the Hub.: Server disconnected without sending a response.; run "
        "the same command again: files that are already there are not sent again"
    )
    assert f"PUT /lfs/{small_shard}" not in server.requests
    assert held(server, "tester/resumed") == {}

    server.requests.clear()
    assert run(PUBLISH, wide, "tester/resumed").errors == []
    assert [r for r in server.requests if r.startswith("PUT")] == [f"PUT /lfs/{large}"]
    assert held(server, "tester/resumed") == shown(wide)
    assert len(server.repos["tester/resumed"].trees) == 2
    assert server.faults == []
