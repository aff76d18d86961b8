"""What was saved and not published, in a program that does not import ssmzoo.auto."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import ssmzoo.auto
from ssmzoo import families, load_family
from ssmzoo.checkpoints.loader import AUTO_MAP, LOADER, is_loader
from ssmzoo.data.tokenizer import byte_tokenizer

pytestmark = [
    pytest.mark.xdist_group("loader"),  # one worker saves the model
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

# Each case is a child of its own, with the answer to a question as its input; it prints one line.
READER = """
import json, os, sys
from importlib.abc import MetaPathFinder

import torch
import peft
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

folder, adapter, logs, cases = sys.argv[1:]

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("ssmzoo"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

CALLS = {
    "config": lambda given: AutoConfig.from_pretrained(folder, **given),
    "model": lambda given: AutoModelForCausalLM.from_pretrained(folder, **given),
    "tokenizer": lambda given: AutoTokenizer.from_pretrained(folder, **given),
    "pipeline": lambda given: pipeline("text-generation", model=folder, **given).model,
    "peft": lambda given: peft.AutoPeftModelForCausalLM.from_pretrained(
        adapter, **given
    ).get_base_model(),
}

def tell(who, call, given):
    try:
        got = CALLS[call](given)
    except Exception as error:
        return [type(error).__name__, str(error)]
    if call == "model":
        got.save_pretrained(f"{folder}-{who}")
    remote = sorted(name for name in sys.modules if "load_with" in name)
    return [type(got).__module__.split(".")[0], remote]

assert not [name for name in sys.modules if name.startswith("ssmzoo")]
for case in json.loads(cases):
    who, call, trust, answer = case
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(reading, 0)
        os.close(writing)
        log = os.open(os.path.join(logs, who), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if who == "stranger":
            sys.meta_path.insert(0, Absent())
        elif who == "friend":
            import ssmzoo.auto
        given = {} if trust is None else {"trust_remote_code": trust}
        print(json.dumps([case, *tell(who, call, given)]), flush=True)
        os._exit(0)
    os.write(writing, answer.encode())
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
"""
CALLS = ("config", "model", "tokenizer", "pipeline", "peft")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model and its tokenizer, and one with a LoRA adapter of it."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("saved")
    family = load_family("longhorn")
    tokenizer = byte_tokenizer()
    config = family.config(**{**family.tiny, "vocab_size": len(tokenizer)})
    family.causal_lm_class(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=list(family.lora_targets))
    get_peft_model(model, lora).save_pretrained(folder / "lora")
    return folder


CASES = [
    *(("stranger", call, trust, "") for call in ("model", "tokenizer") for trust in (None, False)),
    *(("owner", call, trust, "") for call in CALLS for trust in (None, False)),
    ("owner", "model", None, "n\n"),
    *(("stranger", call, True, "") for call in ("model", "tokenizer", "peft")),
    *(("friend", call, trust, "") for call in CALLS[:3] for trust in (None, True)),
    *(("owner", call, True, "") for call in CALLS),
    ("owner", "model", None, "y\n"),
]


@pytest.fixture(scope="module")
def read(saved, tmp_path_factory):
    """Return what was got by case, and by reader the log."""
    logs = tmp_path_factory.mktemp("logs")
    places = (saved / "model", saved / "lora", logs)
    done = subprocess.run(
        [sys.executable, "-c", READER, *map(str, places), json.dumps(CASES)],
        env={**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("home"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = {path.name: path.read_text() for path in logs.iterdir()}
    lines = [line for said in log.values() for line in said.splitlines()]
    found = [json.loads(line[line.index("[[") :]) for line in lines if "[[" in line]
    told = {tuple(case): said for case, *said in found}
    assert told.keys() == set(CASES), log
    return told, log


def test_without_trust_remote_code_nothing_runs_and_no_upgrade_is_advised(read):
    told, log = read
    refused = [case for case in CASES if case[0] != "friend" and not case[2] and case[3] != "y\n"]
    for case in refused:
        kind, said = told[case]
        if case[1] == "tokenizer":  # which needs no model
            assert (kind, said) == ("transformers", [])
        else:
            assert kind == "ValueError"
            assert "trust_remote_code=True" in said
    assert "upgrade" not in log["owner"] + log["stranger"]


def test_with_trust_remote_code_the_installed_ssmzoo_loads_the_model(read, saved):
    told, _ = read
    trusted = [("owner", call, True, "") for call in CALLS]
    for case in (*trusted, ("owner", "model", None, "y\n")):
        _, call, *_ = case
        module, _ = told[case]
        assert module == ("transformers" if call == "tokenizer" else "ssmzoo_longhorn")
    again = Path(f"{saved / 'model'}-owner")
    assert is_loader(again / LOADER)
    assert [path.name for path in again.glob("*.py")] == [LOADER]
    assert json.loads((again / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_without_ssmzoo_one_line_says_how_to_get_it(read):
    told, log = read
    for call in ("model", "tokenizer", "peft"):
        kind, said = told["stranger", call, True, ""]
        assert kind == "ImportError"
        assert said.startswith("this model needs ssmzoo")
        assert "\n" not in said
    assert "pip install ssmzoo" not in log["stranger"]  # a name that anybody may take


def test_after_importing_ssmzoo_auto_nothing_is_asked_warned_of_or_run(read):
    told, log = read
    for call in ("config", "model", "tokenizer"):
        for trust in (None, True):
            module, remote = told["friend", call, trust, ""]
            assert module == ("transformers" if call == "tokenizer" else "ssmzoo_longhorn")
            assert remote == []
    lines = log["friend"].splitlines()
    assert "".join(line for line in lines if "[[" not in line and "it/s]" not in line) == ""


@pytest.mark.parametrize("name", sorted(families()))
def test_every_familys_configuration_names_the_loader(name, tmp_path):
    family = load_family(name)
    config = family.config(**family.tiny)
    config.save_pretrained(tmp_path)
    assert is_loader(tmp_path / LOADER)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert config.auto_map == {}  # the model in memory needs no code
    found = ssmzoo.auto.SavedConfig.from_pretrained(tmp_path)
    assert type(found) is family.config_class
    assert found.to_dict() == family.config_class.from_pretrained(tmp_path).to_dict()
    assert found.auto_map == {}


@pytest.mark.parametrize("model_type", ["ssmzoo_lost", "lost"])
def test_a_family_that_is_not_installed_is_named(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"'{model_type}'.*installed: .*longhorn"):
        ssmzoo.auto.SavedConfig.from_pretrained(tmp_path)
