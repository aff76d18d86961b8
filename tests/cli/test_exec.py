"""``ssmzoo exec``: other people's programs, each in one process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from ssmzoo import load_family
from ssmzoo.cli.main import FAILED, USAGE, main
from ssmzoo.data.tokenizer import byte_tokenizer

SSMZOO = (sys.executable, "-m", "ssmzoo")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exec") / "model"
    torch.manual_seed(0)
    family, tokenizer = load_family("longhorn"), byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    family.causal_lm_class(family.config(**{**family.tiny, **fields})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(folder, *arguments, expect=0, **variables):
    command = [*SSMZOO, "exec", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_script_and_its_child_processes_get_the_arguments_and_the_families(tmp_path):
    """The families are registered when transformers is imported, and nothing is imported before."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    (tmp_path / "child.py").write_text(
        "import importlib.util, os, sys\n"
        "print(__name__, sys.argv)\n"
        "assert importlib.util.find_spec('transformers') is not None\n"
        "print({'ssmzoo', 'torch', 'transformers'} & sys.modules.keys())\n"
        "os.environ['HF_HOME'] = 'mine'\n"
        "import transformers\n"
        "from huggingface_hub import constants\n"
        "print(constants.HF_HOME, 'ssmzoo_longhorn' in transformers.CONFIG_MAPPING)\n"
        "config = transformers.AutoConfig.for_model('ssmzoo_longhorn', num_hidden_layers=1)\n"
        "print(type(config) is transformers.CONFIG_MAPPING['ssmzoo_longhorn'])\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, 'child.py', *sys.argv[1:]]).returncode)\n"
    )
    arguments = ["--help", "--debug", "--json", "--", "-x"]
    out = run(tmp_path, "parent.py", *arguments, expect=7, PYTHONPATH=str(tmp_path))
    assert out.splitlines() == [
        *["mine"] * 3,
        f"__main__ {['child.py', *arguments]}",
        *("set()", "mine True", "True"),
    ]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["lm_evl"], "no program, module or Python file 'lm_evl' here; did you mean 'lm_eval'?"),
        (["nix.nax"], "installed, among others: accelerate, lm_eval, torchrun, transformers, trl"),
        (["./nix.py"], "no program, module or Python file './nix.py' here"),
        ([], "the following arguments are required: PROGRAM"),
        (["--tell", "lm_eval"], "no option '--tell'"),
    ],
)
def test_a_missing_program_prints_one_line(arguments, answer, capsys):
    assert main(["exec", *arguments]) == USAGE != FAILED
    out, err = capsys.readouterr()
    assert answer in err
    assert (out, err.count("\n")) == ("", 1)


def test_debug_may_stand_before_exec(tmp_path):
    (tmp_path / "tell.py").write_text("import sys\nprint(sys.argv)\n")
    command = [*SSMZOO, "--debug", "exec", "tell.py", "--model", "hf"]
    out = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert out == "['tell.py', '--model', 'hf']\n"


@pytest.mark.slow  # imports TRL twice
def test_trl_trains_a_model_of_the_zoo_in_the_process_that_it_launches(model, tmp_path):
    """Children are registered above, and TRL trains from a folder in ``test_trl.py``."""
    rows = [json.dumps({"text": text}) for text in ("one two", "three four", "five", "six")]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    names = ("--model_name_or_path", model, "--dataset_name", "data", "--output_dir", "out")
    options = ("--max_steps", "2", "--per_device_train_batch_size", "2", "--report_to", "none")
    run(tmp_path, "trl", "sft", *names, *options, "--use_cpu")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LonghornForCausalLM"
    ]


@pytest.mark.long
def test_transformers_serve_answers_with_a_model_of_the_zoo(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = ("transformers", "serve", model, "--host", "127.0.0.1", "--port", port)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*SSMZOO, "exec", *map(str, command), "--device", "cpu"],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        messages = [{"role": "user", "content": "hi"}]
        asked = {"model": str(model), "max_tokens": 4, "messages": messages}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.load(answer)
        assert found["usage"]["completion_tokens"] == 4, (tmp_path / "log").read_text()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=600)
    assert "Finished server process" in (tmp_path / "log").read_text()
