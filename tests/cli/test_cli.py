"""The command line, called in this process: cheap happy paths, and all error paths."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forks import COMMAND
from tests.zoo import OURS

from ssmzoo.cli.main import VERBS, main, parsers
from ssmzoo.evaluation.generate import generate

_FIRST = "list info doctor train consolidate generate eval inspect card publish export convert"
COMMANDS = [
    *_FIRST.split(),
    *["prime", "distill", "sweep", "exec", "check", "bench", "export-kernels"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny Longhorn and the byte tokenizer."""
    import torch

    from ssmzoo.data.tokenizer import byte_tokenizer
    from ssmzoo.family import load_family

    folder = tmp_path_factory.mktemp("models") / "tiny"
    family, tokenizer = load_family("longhorn"), byte_tokenizer()
    torch.manual_seed(0)
    fields = {**family.tiny, "vocab_size": len(tokenizer)}
    family.causal_lm_class(family.config(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def fails(capsys):
    """Run a command that must fail as a user's mistake; return its one line."""

    def run(*arguments):
        capsys.readouterr()  # what the test itself made may have drawn a bar
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert status == 2, err
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith("ssmzoo: error: ")
        return err.removeprefix("ssmzoo: error: ").rstrip("\n")

    return run


@pytest.fixture
def prints(capsys):
    """Run a command that must succeed; return what it prints."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


# --- the command line itself --------------------------------------------------------------------


def test_a_mistyped_command_gets_a_suggestion_and_the_list(fails):
    line = fails("trian", "recipe.yaml")
    assert "no such choice 'trian'; did you mean 'train'?" in line
    assert ", ".join(COMMANDS) in line


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("list --jsn", "no option '--jsn'; did you mean '--json'?"),
        ("train r.yaml --ouput x", "no option '--ouput'; did you mean '--output'?"),
        ("generate m p --max-new 3", "no option '--max-new'; did you mean '--max-new-tokens'?"),
        ("generate m p --temprature=1", "no option '--temprature'; did you mean '--temperature'?"),
        ("publish m ./x --dryrun", "no option '--dryrun'; did you mean '--dry-run'?"),
        ("distill m --ordr 4", "the following arguments are required: --order, --output"),
        ("distill m --order 4 --kind model", "no such choice 'model'; did you mean 'modal'?"),
        ("sweep s d", "the following arguments are required: --output"),
        ("sweep s d --output e", "unexpected argument 'd'; use --output d to write there"),
        ("convert x --output y", "the following arguments are required: --to"),
        ("eval m --tasks ,", "argument --tasks: must be names with commas between, got ','"),
        ("--versoin", "no option '--versoin'; did you mean '--version'?"),
        ("generate m two words", "unexpected argument 'words'"),
        ("generate m -alpha", "PROMPT"),
        ("train", "the following arguments are required: RECIPE"),
        ("train r.yaml --output", "argument --output: expected one argument"),
        ("generate m p --temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("generate m p --dtype flaot32", "no such choice 'flaot32'; did you mean 'float32'?"),
        ("bench --lengths 0", "argument --lengths: must be whole numbers from 1 upwards"),
    ],
)
def test_a_wrong_argument_prints_one_line_with_the_way_out(fails, arguments, answer):
    line = fails(*arguments.split())
    assert answer in line
    assert " --help')" in line


def test_no_arguments_print_the_commands_in_the_order_of_a_days_work(prints, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = prints()
    assert re.findall(r"^  ([a-z-]+)  +[a-z]", out, re.MULTILINE)[-len(COMMANDS) :] == [*COMMANDS]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_shows_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: ssmzoo {name} " in out
    assert f"\nexample:\n  ssmzoo {name}" in out
    assert max(map(len, out.splitlines())) <= 80, out


def test_every_example_is_a_command_line_that_parses():
    parser, _ = parsers()
    for verb in VERBS:
        for line in verb.example.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            assert program == "ssmzoo"
            if verb.name == "exec":  # what follows the program is the program's
                words = words[:2]
            assert parser.parse_args(words).command == verb.name


def test_an_option_means_the_same_in_every_command():
    _, commands = parsers()
    kinds = {}
    for name, command in commands.items():
        for action in command._actions:
            for flag in action.option_strings:
                kind = (type(action), action.type, action.choices, action.dest)
                if flag == "--batch-size" and name == "eval":
                    continue  # which takes "auto", too
                if flag == "--layers" and name == "prime":
                    continue  # which takes "half", too
                kinds.setdefault(flag, {})[name] = kind
    for flag, found in kinds.items():
        assert len(set(found.values())) == 1, (flag, found)
    assert set(kinds["--output"]) == {
        *("train", "eval", "inspect", "card", "convert", "prime", "distill", "sweep", "bench"),
        *("consolidate", "export", "export-kernels"),
    }
    every = {"list", "info", "doctor", "eval", "inspect", "publish", "distill", "sweep", "check"}
    assert set(kinds["--json"]) == {*every, "bench", "export", "export-kernels"}


def test_debug_shows_the_traceback_before_or_after_the_command(capsys):
    for arguments in (["--debug", "info", "nix"], ["info", "nix", "--debug"]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "ssmzoo: error: no model 'nix': no folder here, and a Hub id is owner/name" in err


def test_an_interrupt_exits_130_silently(monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssmzoo.analysis.describe.installed_families", interrupt)
    assert main(["list"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyError("lr"), AssertionError("no"), IndexError("3")])
def test_a_fault_of_ours_is_named_as_one_and_exits_1(monkeypatch, capsys, error):
    def fail(**_):
        raise error

    monkeypatch.setattr("ssmzoo.analysis.describe.installed_families", fail)
    assert main(["list"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"ssmzoo: error: unexpected {type(error).__name__}: ")
    assert "--debug shows where" in err


def test_a_multiline_error_becomes_one_line(monkeypatch, fails):
    def fail(**_):
        raise OSError("first\n  second\n\nthird")

    monkeypatch.setattr("ssmzoo.analysis.describe.installed_families", fail)
    assert fails("list") == "first second third"


def test_a_connection_that_breaks_is_an_error_and_not_a_closed_pipe(monkeypatch, capsys):
    def fail(**_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("ssmzoo.analysis.describe.installed_families", fail)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "ssmzoo: error: [Errno 32] Broken pipe\n"


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "ssmzoo", "list"], stdout=stdout, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_main_leaves_the_log_as_it_was(prints):
    import logging

    logger = logging.getLogger("ssmzoo")
    before = (list(logger.handlers), logger.level)
    prints("list")
    assert (logger.handlers, logger.level) == before


# --- list and info ------------------------------------------------------------------------------


def test_list_shows_families_presets_and_heads_in_80_columns_and_as_json(prints):
    out = prints("list")
    assert max(map(len, out.splitlines())) <= 80
    rows = json.loads(prints("list", "--json"))
    words = " ".join(out.split())
    for row in rows:
        assert f"{row['name']} installed {row['distribution']} {row['version']} paper: " in words
        assert f"{row['title']} (arXiv {row['arxiv']})" in words
        assert f"heads: {', '.join(row['heads'])} presets: {', '.join(row['presets'])}" in words
    ours = set(OURS)
    assert ours <= {row["name"] for row in rows}


def test_list_without_loading_tells_the_same_as_with_it():
    from ssmzoo.analysis.describe import installed_families

    read, loaded = installed_families(), installed_families(load=True)
    assert [{**row, "status": "ok"} for row in read] == loaded


def test_info_on_a_family_shows_paper_counts_fields_and_lora_targets(prints):
    facts = json.loads(prints("info", "longhorn", "--json"))
    assert facts["paper"]["arxiv"] == "2407.14207"
    assert facts["presets"]["longhorn-125m"]["parameters"] == 128_563_968
    assert facts["fields"]["d_state"] == {"type": "int", "default": 16}
    assert facts["fields"]["hidden_size"] == {"type": "int", "default": 768}
    assert facts["lora_targets"] == ["in_proj", "x_proj", "dt_proj", "out_proj"]
    assert facts["heads"][:2] == ["causal-lm", "sequence-classification"]
    assert facts["converts"] == "LonghornForCausalLM"
    out = re.sub(" +", " ", prints("info", "longhorn"))
    assert "longhorn-1.3b 1,331,595,264" in out
    assert "transition 'diagonal' Literal['diagonal', 'exact']" in out


def test_info_on_a_preset_shows_its_parameters_and_configuration(prints, fails):
    facts = json.loads(prints("info", "rtf:rtf-lra-listops", "--json"))
    assert facts["path"] == "rtf:rtf-lra-listops"
    assert facts["config"]["trunc_len"] == 2048
    listed = json.loads(prints("info", "rtf", "--json"))["presets"]["rtf-lra-listops"]
    assert facts["parameters"] == listed["parameters"]
    assert f"parameters:  {facts['parameters']:,}" in prints("info", "rtf:rtf-lra-listops")
    assert "no preset 'rtf-lra-listop'; did you mean" in fails("info", "rtf:rtf-lra-listop")
    assert "no family named 'rft'; did you mean 'rtf'?" in fails("info", "rft:rtf-delay")


def test_info_on_a_checkpoint_shows_parameters_dtypes_and_configuration(prints, model):
    import transformers

    import ssmzoo.auto  # noqa: F401

    facts = json.loads(prints("info", model, "--json"))
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert facts["parameters"] == sum(p.numel() for p in network.parameters())
    assert facts["config"]["d_state"] == network.config.d_state
    assert facts["dtypes"] == {"F32": len(list(network.parameters()))}
    assert facts["bytes"] == sum(path.stat().st_size for path in model.iterdir())
    out = prints("info", model)
    assert "model_type:  ssmzoo_longhorn" in out
    assert f"parameters:  {facts['parameters']:,}" in out


def test_info_counts_no_running_statistics(prints, tmp_path):
    from ssmzoo.family import load_family

    family = load_family("longhorn")
    network = family.causal_lm_class(family.config(**{**family.tiny, "norm_type": "batch"}))
    network.save_pretrained(tmp_path)
    facts = json.loads(prints("info", tmp_path, "--json"))
    assert facts["parameters"] == network.num_parameters()


def test_info_says_what_is_wrong_with_its_target(fails, tmp_path, model):
    assert "did you mean 'longhorn'?" in fails("info", "longhon")
    assert "must hold a config.json, and holds none" in fails("info", tmp_path)
    assert f"did you mean '{model}'?" in run_folder_hint(fails, tmp_path, model)
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in fails("info", broken)
    (broken / "config.json").write_text("{")
    assert "config.json is corrupt" in fails("info", broken)
    (broken / "config.json").write_text("[]")
    assert "must hold a JSON object, got list" in fails("info", broken)


def run_folder_hint(fails, tmp_path, model):
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(model)
    return fails("info", run).replace(str(run / "model"), str(model))


# --- generate -----------------------------------------------------------------------------------


def test_generate_prints_the_continuation_and_the_same_seed_the_same_text(prints, model):
    first, again, other = (
        prints("generate", model, "Once", "--max-new-tokens", 24, "--seed", seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_generate_is_greedy_at_temperature_0_and_echo_prints_the_prompt(prints, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = prints("generate", model, "ab", "--max-new-tokens", 8, "--temperature", 0, "--seed", 3)
    network, tokenizer = (
        auto.from_pretrained(model) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer("ab", return_tensors="pt").input_ids
    for _ in range(8):
        token = network(ids).logits[:, -1:].argmax(-1)
        ids = ids.new_tensor([[*ids[0].tolist(), token.item()]])
    expected = tokenizer.decode(ids[0, 2:], skip_special_tokens=True)
    assert out == expected + "\n"
    assert prints("generate", model, "ab", "--max-new-tokens", 8, "--temperature", 0, "--echo") == (
        "ab" + out
    )


def test_generate_reads_the_prompt_from_standard_input(prints, model, monkeypatch):
    plain = prints("generate", model, "Once upon\n", "--max-new-tokens", 8)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    assert prints("generate", model, "-", "--max-new-tokens", 8) == plain


def test_generate_takes_a_prompt_that_begins_with_a_dash_after_two_dashes(prints, model):
    options = ("--max-new-tokens", 4, "--echo")
    assert prints("generate", model, *options, "--", "-alpha").startswith("-alpha")
    assert prints("generate", model, *options, "- a").startswith("- a")


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_generate_continues_from_a_state_saved_by_another_process(
    prints, fails, model, forks, tmp_path
):
    greedy = ("--max-new-tokens", 8, "--temperature", 0)
    once, longer = (prints("generate", model, text, *greedy) for text in ("Once", "Once upon"))
    kept, more = tmp_path / "kept", tmp_path / "more"
    words = ["generate", model, "Once", "--save-state", kept, *greedy]
    done = forks.run(COMMAND, *map(str, words))
    assert (done.status, done.out) == (0, once), done.log
    assert [path.name for path in kept.iterdir()] == ["state.safetensors"]
    for _ in range(2):  # a continuation leaves the file as it was
        assert prints("generate", model, "", *greedy, "--state", kept) == once
        assert prints("generate", model, " upon", *greedy, "--state", kept) == longer
    prints("generate", model, " upon", *greedy, "--state", kept, "--save-state", more)
    assert prints("generate", model, "", *greedy, "--state", more) == longer
    line = fails("generate", model, "a", "--state", tmp_path)
    assert line.startswith(f"{tmp_path} holds no state.safetensors; save one with ")


def test_generate_names_a_prompt_that_the_tokenizer_cannot_read(fails, tmp_path):
    from ssmzoo.family import load_family
    from ssmzoo.tasks import symbol_tokenizer

    family = load_family("longhorn")
    family.causal_lm_class(family.config(**{**family.tiny, "vocab_size": 8})).save_pretrained(
        tmp_path
    )
    symbol_tokenizer(8).save_pretrained(tmp_path)
    line = fails("generate", tmp_path, "t1 t9")
    assert line.startswith("the model's tokenizer cannot read the prompt 't1 t9': ")
    assert "it reads symbols with blanks between, t0 .. t" in line


def test_generate_streams_the_returned_text_and_leaves_the_random_state_alone(model):
    import torch

    pieces = []
    state = torch.random.get_rng_state()
    text = generate(model, "a b", max_new_tokens=40, seed=4, write=pieces.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "".join(pieces) == text
    assert len(pieces) > 1


def test_generate_with_beams_ignores_the_seed_unless_it_samples(prints, model):
    arguments = ("generate", model, "x", "--max-new-tokens", 12, "--beams", 3, "--seed")
    assert prints(*arguments, 1) == prints(*arguments, 2)


def test_names_may_stand_behind_several_options(fails):
    parser, _ = parsers()
    for line, field in (
        ("sweep zoo --output x --only model=a,seed=0 --only seed=1", "only"),
        ("eval m --tasks model=a,seed=0 --tasks seed=1", "tasks"),
        ("check f --only model=a,seed=0 --only seed=1", "only"),
        ("check f --skip model=a,seed=0 --skip seed=1", "skip"),
    ):
        assert getattr(parser.parse_args(line.split()), field) == ["model=a", "seed=0", "seed=1"]
    assert parser.parse_args(["eval", "m"]).tasks == []
    told = fails("generate", "m", "--", "x", "--seed")
    assert "--seed stands behind --" in told


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("--max-new-tokens 0", "max_new_tokens must be at least 1, got 0"),
        ("--temperature -1", "temperature must be a number from 0 upwards, got -1.0"),
        ("--temperature nan", "temperature must be a number from 0 upwards, got nan"),
        ("--temperature inf", "temperature must be a number from 0 upwards, got inf"),
        ("--top-p 0", "top_p must be above 0 and at most 1, got 0.0"),
        ("--top-p 1.5", "top_p must be above 0 and at most 1, got 1.5"),
        ("--beams 0", "beams must be at least 1, got 0"),
        ("--seed -1", "seed must be from 0 to 2**64 - 1, got -1"),
        ("--seed 18446744073709551616", "seed must be from 0 to 2**64 - 1, got 184467440737095516"),
        ("--beams 2 --top-p 0.5", "top_p needs a temperature above 0"),
        ("--device cdua", "device must be one that torch can use here (cpu"),
        ("--device cuda:99", "device must be one that torch can use here"),
    ],
)
def test_generate_refuses_values_out_of_range(fails, model, options, answer):
    assert answer in fails("generate", model, "x", *options.split())


def test_generate_says_what_is_wrong_with_the_model(fails, model, tmp_path):
    answer = "model must be a checkpoint folder or a Hub id; no folder './nix'"
    assert answer in fails("generate", "./nix", "x")
    assert "must hold a config.json, and holds none" in fails("generate", tmp_path, "x")
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is not a whole" in fails("generate", broken, "x")
    weights.unlink()
    assert "model.safetensors" in fails("generate", broken, "x")


def test_generate_refuses_a_tokenizer_of_another_model(fails, model, tmp_path):
    from ssmzoo.family import load_family

    family = load_family("longhorn")
    small = shutil.copytree(model, tmp_path / "small")
    family.causal_lm_class(family.config(**{**family.tiny, "vocab_size": 96})).save_pretrained(
        small
    )
    assert "token id 120, the model knows ids below 96" in fails("generate", small, "x")


# --- the others: what is passed on, and what is said ----------------------------------------------


def test_train_passes_its_arguments_on_and_prints_the_runs_folder(prints, monkeypatch):
    seen = {}

    def train(recipe, **options):
        seen.update(options, recipe=recipe)
        return Path("runs/demo")

    monkeypatch.setattr("ssmzoo.training.run.train", train)
    out = prints("train", "a/demo.yaml", "--set", "train.lr=1", "--set", "train.steps=2")
    assert out == "runs/demo\n"
    assert seen == {
        "recipe": "a/demo.yaml",
        "output_dir": Path("runs/demo"),
        "resume": False,
        "overrides": ["train.lr=1", "train.steps=2"],
        "stock": False,
    }
    prints("train", "a/demo.yaml", "--output", "elsewhere", "--resume", "--stock")
    assert (seen["output_dir"], seen["resume"]) == (Path("elsewhere"), True)
    assert seen["stock"]


def test_eval_passes_its_arguments_on_and_prints_scores_and_the_files_place(
    prints, monkeypatch, tmp_path
):
    seen = {}
    path = tmp_path / "m.json"
    row = {"task": "t", "metric": "acc", "value": 0.123456, "stderr": None, "n": 9, "seed": 1}
    path.write_text(json.dumps({"results": [row]}))

    def evaluate(model, **options):
        seen.update(options, model=model)
        return path

    monkeypatch.setattr("ssmzoo.evaluation.evaluate.evaluate", evaluate)
    out = prints("eval", "m", "--tasks", "a, b", "--limit", 5, "--text", "t.txt", "--dtype", "auto")
    assert out.splitlines() == [
        "task  metric  value   stderr  n",
        "t     acc     0.1235  -       9",
        str(path),
    ]
    assert (seen["tasks"], seen["text"], seen["limit"]) == (["a", "b"], "t.txt", 5)
    assert (seen["batch_size"], seen["seed"], seen["stock"]) == (8, 1234, False)
    command = ("eval", "m", "--suite", "s", "--json", "--stock")
    assert json.loads(prints(*command)) == {"results": [row]}
    assert (seen["tasks"], seen["suite"], seen["stock"]) == ([], "s", True)


def test_card_passes_its_arguments_on_and_prints_the_cards_place(prints, monkeypatch):
    seen = {}

    def render_card(model, **options):
        seen.update(options, model=model)
        return Path("card.md")

    monkeypatch.setattr("ssmzoo.publishing.card.render_card", render_card)
    given = ("--results", "a.json", "--results", "b.json", "--run", "r", "--license", "mit")
    assert prints("card", "m.json", *given, "--language", "en") == "card.md\n"
    results, metadata = [Path("a.json"), Path("b.json")], {"license": "mit", "language": ["en"]}
    assert seen == {
        "model": "m.json",
        "results": results,
        "run_dir": Path("r"),
        "output": None,
        "metadata": metadata,
    }


def test_publish_dry_run_shows_files_and_sizes_and_writes_nothing(prints, model, tmp_path):
    model = shutil.copytree(model, tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    target = tmp_path / "out"
    out = prints("publish", model, f"folder:{target}", "--dry-run")
    assert "model.safetensors" in out
    summary, load = out.splitlines()[-2:]
    assert summary.endswith(f"would go to {target}")
    assert "trust_remote_code=True" in load
    assert not target.exists()
    report = json.loads(prints("publish", model, f"folder:{target}", "--json"))
    assert report["dry_run"] is False
    assert {file["path"]: file["size"] for file in report["files"]} == {
        path.name: path.stat().st_size for path in target.iterdir()
    }


def test_check_exits_1_when_a_family_does_not_conform(monkeypatch, capsys):
    from ssmzoo.testing import CheckResult, Report

    for status, code in (("passed", 0), ("skipped", 0), ("failed", 1)):
        result = CheckResult(
            "causality", "The future changes nothing.", status, "told", 1.0, 2.0, 3
        )
        report = Report("longhorn", (result,))
        monkeypatch.setattr("ssmzoo.testing.check", lambda _, report=report, **__: report)
        assert main(["check", "longhorn"]) == code
        assert capsys.readouterr().out == report.table() + "\n"
        assert main(["check", "longhorn", "--json"]) == code
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.as_dict()))


def test_check_compares_with_an_oracle_from_a_file(capsys):
    file = Path(__file__).parents[1] / "oracles" / "longhorn.py"
    only = ("--only", "oracle")
    assert main(["check", "longhorn", *only, "--oracle", f"{file}:logits"]) == 0
    assert "1 passed, 0 failed, 0 skipped" in capsys.readouterr().out
    assert main(["check", "longhorn", *only]) == 0
    assert "0 passed, 0 failed, 1 skipped" in capsys.readouterr().out
    assert main(["check", "longhorn", *only, "--oracle", f"{file}:silu"]) == 1
    assert "0 passed, 1 failed, 0 skipped" in capsys.readouterr().out


def test_check_runs_the_named_checks_without_the_skipped_ones(prints, fails):
    command = ("check", "longhorn", "--json", "--only", "batch, outputs,causality")
    report = json.loads(prints(*command, "--skip", "outputs"))
    assert [row["name"] for row in report["checks"]] == ["causality", "batch"]
    nothing = fails("check", "longhorn", "--only", "batch", "--skip", "batch")
    assert nothing.startswith("only and skip must leave a check to run, got only batch")
    assert "argument --skip: must be names with commas" in fails("check", "longhorn", "--skip", ",")


def test_check_draws_its_progress_on_a_terminal_only(monkeypatch, capsys):
    command = ["check", "longhorn", "--only", "batch,causality"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "longhorn:" in err
    assert "0/2" in err
    assert "causality" in err
    assert out.startswith("check ")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("oracle.py", "oracle must look like FILE.py:function, got 'oracle.py'"),
        ("oracle.py:", "oracle must look like FILE.py:function"),
        ("absent.py:logits", "'absent.py' does not exist"),
        ("oracle.py:logit", "has no function 'logit'; did you mean 'logits'?"),
        ("oracle.py:width", "must be a function, got int"),
        ("broken.py:logits", "cannot be imported: NameError: name 'nmpy' is not defined"),
        ("oracle.txt:logits", "must be in a file that ends in .py, got 'oracle.txt'"),
    ],
)
def test_a_wrong_oracle_is_named(named, message, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("oracle.py", "oracle.txt"):
        (tmp_path / name).write_text("width = 3\ndef logits(weights, config, ids): ...\n")
    (tmp_path / "broken.py").write_text("nmpy.zeros(3)\n")
    assert message in fails("check", "longhorn", "--oracle", named)


def test_distill_replaces_filters_by_smaller_ones_and_prints_the_errors(prints, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from ssmzoo.family import load_family

    family = load_family("rtf")
    fields = {"filter": "implicit", "trunc_len": 24, "hidden_size": 6, "num_hidden_layers": 2}
    torch.manual_seed(0)
    family.causal_lm_class(family.config(**fields, vocab_size=31)).save_pretrained(
        tmp_path / "long"
    )
    arguments = ("distill", tmp_path / "long", "--output", tmp_path / "short")
    arguments = (*arguments, "--order", 4, "--steps", 2)
    lines = prints(*arguments).splitlines()
    assert lines[0].split() == ["layer", "mean", "median", "largest", "channel"]
    assert len(lines) == 1 + 2 + 1
    assert lines[-1] == str(tmp_path / "short")
    AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    report = json.loads(prints(*arguments, "--json"))
    assert (report["order"], report["kind"], report["taps"]) == (4, "rational", 24)


def test_bench_measures_all_families_unless_some_are_named(capsys, monkeypatch):
    seen = []

    def bench(families, *, report, **options):
        seen.append((tuple(families), options))
        report("a line")
        return [{"what": "longhorn"}]

    monkeypatch.setattr("ssmzoo.analysis.bench.bench", bench)
    assert main(["bench", "--lengths", "64,128", "--no-peers"]) == 0
    assert capsys.readouterr() == ("a line\n", "")
    named = ["bench", "longhorn", "--json", "--output", "x.csv", "--runs", "3", "--stock"]
    assert main(named) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ([{"what": "longhorn"}], "a line\n")
    (every, first), (named, second) = seen
    assert "longhorn" in every
    assert named == ("longhorn",)
    assert first == {
        "lengths": (64, 128), "peers": False, "slow": False, "runs": 1, "memory": False,
        "stock": False, "output": None,
    }  # fmt: skip
    assert second["stock"]
    assert second["peers"]
    assert second["runs"] == 3
    assert second["output"] == Path("x.csv")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("train nix.yaml --output {tmp}/run", "nix.yaml"),
        ("train {tmp} --output {tmp}/run", "{tmp}"),
        ("eval {tmp}/nix --tasks ssmzoo_mqar", "{tmp}/nix"),
        ("generate nowhere hi", "no model 'nowhere': no folder here, and a Hub id is owner/name"),
        (
            "generate longhorn-1b hi",
            "; family 'longhorn' has no weights of its own, 'ssmzoo train'",
        ),
        ("doctor longhon", "a Hub id is owner/name; did you mean 'longhorn'?"),
        ("inspect nowhere --output {tmp}/out", "no folder here, and a Hub id is owner/name"),
        (
            "distill nowhere --output {tmp}/out --order 4",
            "no folder here, and a Hub id is owner/name",
        ),
        ("card a/b", "model must be a folder on this machine, got the Hub id 'a/b'; fetch it"),
        ("publish a/b ./x", "model must be a folder on this machine, got the Hub id 'a/b'"),
        ("eval rtf --tasks ssmzoo_mqar", "model 'rtf' must have weights, and a family has none"),
        ("export {model} --to gguf --output {tmp}/o", "--to must be onnx, got 'gguf'"),
        ("export-kernels --output {tmp}/o --kernel-version 0", "kernel_version must be at least 1"),
        ("convert {tmp}/x.bin --to longhorn --output {tmp}/o", "{tmp}/x.bin"),
        ("convert {model} --to coffee --output {tmp}/o", "family 'coffee' has no converter"),
        ("eval {model}", "suite"),
        ("card {model} --results {tmp}/nix.json", "nix.json"),
        ("card {model} --run {tmp}/nix", "{tmp}/nix"),
        ("publish {model} a/b/c/d", "a/b/c/d"),
        ("publish {model} {tmp}/out --private", "private"),
        ("check longhon", "did you mean 'longhorn'?"),
        ("bench longhon", "did you mean 'longhorn'?"),
    ],
)
@pytest.mark.long
def test_a_missing_input_prints_one_line_and_writes_nothing(
    fails, tmp_path, model, arguments, answer
):
    fill = {"tmp": tmp_path, "model": model}
    assert answer.format(**fill) in fails(*arguments.format(**fill).split())
    assert list(tmp_path.iterdir()) == []


SHORT = f"""
data: {{text: {__file__}}}
train: {{steps: 1, batch_size: 1, seq_len: 8, lr: 0.001}}
"""


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ("generate a/b hi", ""),
        ("eval a/b --tasks ssmzoo_recall_text", ""),
        ("doctor a/b", ""),
        ("inspect a/b --output x", ""),
        ("train {recipe} --output {tmp}/run --set model.init_from=a/b", "model.init_from: "),
        (
            "train {recipe} --output {tmp}/run --set model.init_from=a/b "
            "--set data.tokenizer=bytes",
            "model.init_from: ",
        ),
        (
            "train {recipe} --output {tmp}/run --set model.family=longhorn "
            "--set data.tokenizer=a/b",
            "data.tokenizer: ",
        ),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(
    fails, monkeypatch, tmp_path, arguments, argument
):
    asked = []

    def fail(model, **_):
        asked.append(model)
        raise ConnectionError("nobody is there")

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SHORT, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.model_info", fail)
    answer = "no folder 'a/b' here, and the Hub does not answer: nobody is there"
    assert fails(*arguments.format(recipe=recipe, tmp=tmp_path).split()) == argument + answer
    assert asked == ["a/b"]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("command", ["generate", "train"])
def test_a_model_of_the_hub_is_asked_for_once(
    prints, model, tmp_path, monkeypatch, command, answers
):
    import transformers

    from ssmzoo.checkpoints.load import ask_again

    asked, alone = [], []

    def ask(name, **_):
        asked.append(name)
        if not answers:
            raise ConnectionError("nobody is there")

    def here(kind):
        """Let a class of transformers find the model of the Hub in the folder."""
        load = kind.from_pretrained.__func__

        def from_pretrained(cls, name, *rest, local_files_only=False, **options):
            if name == "a/b":
                name, _ = model, alone.append(local_files_only)
            return load(cls, name, *rest, **options)

        monkeypatch.setattr(kind, "from_pretrained", classmethod(from_pretrained))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.model_info", ask)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(model))
    for kind in ("AutoTokenizer", "AutoConfig", "AutoModelForCausalLM", "PreTrainedModel"):
        here(getattr(transformers, kind))
    ask_again()
    if command == "generate":
        prints("generate", "a/b", "hi", "--max-new-tokens", "1")
    else:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("model: {init_from: a/b}" + SHORT, encoding="utf-8")
        prints("train", recipe, "--output", tmp_path / "run")
    ask_again()
    assert asked == ["a/b"]
    assert len(alone) > 1
    assert set(alone) == {not answers}


def test_warnings_of_torchao_are_not_printed_before_an_error(model, fails, monkeypatch, caplog):
    def load(*_, **__):
        logging.getLogger("torchao").warning("which torch did not ask for")
        raise OSError("no tokenizer")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    assert "no tokenizer" in fails("generate", model, "hi")
    assert caplog.messages == []
    logging.getLogger("torchao").warning("after the command")
    assert caplog.messages == ["after the command"]


@pytest.mark.parametrize("rest", [("eval", "--tasks", "ssmzoo_mqar"), ("generate", "a prompt")])
def test_a_model_saved_without_a_tokenizer_is_told_how_to_get_one(rest, model, tmp_path, fails):
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(model / name, folder)
    command, *options = rest
    assert fails(command, folder, *options) == (
        f"{str(folder)!r} must hold the model's tokenizer, and holds none; save it there with "
        f"tokenizer.save_pretrained({str(folder)!r})"
    )
