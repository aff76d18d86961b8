"""Scores from shared states are those of lm-eval's own model, which reads every request alone."""

import json
import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.stock_models import tiny
from tests.training.test_many_processes import free_port
from tests.zoo import OURS
from transformers import AutoModelForCausalLM, LlamaConfig

import ssmzoo
from ssmzoo import load_family
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation.evaluate import evaluate

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.long,
]

STOCK = ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "qwen3_next")


def zoo(name):
    family = load_family(name)
    family.register()
    torch.manual_seed(0)
    longer = {"kernel_norm_length": 4096} if name == "dss" else {}
    config = family.config(**{**family.tiny, "vocab_size": 259, **longer})
    return family.causal_lm_class(config).eval()


def accelerated(name):
    attends = name not in ("mamba", "mamba2", "falcon_mamba")
    longer = {"max_position_embeddings": 4096} if attends else {}
    return ssmzoo.accelerate(tiny(name, vocab_size=259, **longer)).model


def with_lora():
    model = get_peft_model(zoo("longhorn"), LoraConfig(target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def with_state_adapter():
    model = zoo("longhorn")
    adapter = ssmzoo.modeling.add_state_adapter(model)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_()
    return model.eval()


LLAMA = LlamaConfig(
    vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)

MODELS = {
    **{name: lambda name=name: zoo(name) for name in OURS},
    **{f"accelerated {name}": lambda name=name: accelerated(name) for name in STOCK},
    "LoRA": with_lora,
    "state adapter": with_state_adapter,
}


def words(rng, length):
    return "".join(rng.choice("abcdefgh ij") for _ in range(length))


def asked(*arguments):
    return SimpleNamespace(args=arguments, task_name="t")


def questions(seed=0, examples=90, count=5):
    """Answers behind questions behind the same examples, and what does not fit that form."""
    rng = random.Random(seed)
    shared = words(rng, examples) + "."
    found = []
    for _ in range(count):
        context = shared + words(rng, rng.randint(10, 50)) + "?"
        found += [asked(context, "x" + words(rng, rng.randint(1, 20))) for _ in range(3)]
        found += [asked(context, letter) for letter in "yz"]
    others = [("", words(rng, 9)), (shared, "k"), (shared[:50], words(rng, 5))]
    return found + [asked(*pair) for pair in others]


def prompts():
    rng = random.Random(1)
    shared, options = words(rng, 80), {"until": ["a"], "max_gen_toks": 6}
    found = [asked(shared + words(rng, rng.randint(1, 30)), options) for _ in range(4)]
    others = [("b", options), (shared[:70], options), (shared[:75], {**options, "until": ["b"]})]
    return [*found, found[0], *(asked(*each) for each in others)]


def theirs(model, size=3):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model, tokenizer=byte_tokenizer(), backend="causal", batch_size=size,
        softmax_dtype="float32", add_bos_token=False,
    )  # fmt: skip


def ours(model, size=3, **options):
    from ssmzoo.evaluation import SharedPrefixLM

    return SharedPrefixLM(model, byte_tokenizer(), batch_size=size, **options)


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-5)
        assert one[1] == other[1]


@pytest.fixture(autouse=True)
def quiet():
    from ssmzoo.evaluation.lm_eval_log import tamed

    with tamed():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_texts_are_those_of_lm_evals_own_model(name):
    model = MODELS[name]()
    lm, alone = ours(model), theirs(model)
    assert lm.states is not None
    assert_same(lm.loglikelihood(questions()), alone.loglikelihood(questions(), disable_tqdm=True))
    assert lm.reading.read < lm.reading.alone / 4
    assert lm.generate_until(prompts()) == alone.generate_until(prompts(), disable_tqdm=True)
    texts = [asked(words(random.Random(2), length)) for length in (1, 40, 2100)]
    windows = alone.loglikelihood_rolling(texts, disable_tqdm=True)
    assert lm.loglikelihood_rolling(texts) == pytest.approx(windows, rel=1e-5)


@pytest.mark.parametrize("memory", [0.01, 0.1])
@pytest.mark.parametrize("size", [1, 4, "auto"])
def test_scores_depend_on_neither_memory_nor_batch(memory, size):
    model = zoo("longhorn")
    wanted = ours(model).loglikelihood(questions())
    assert_same(ours(model, size, state_memory=memory).loglikelihood(questions()), wanted)


def test_what_does_not_fit_the_window_is_cut_as_lm_eval_cuts(caplog):
    model = zoo("longhorn")
    lm, alone = ours(model, max_length=60), theirs(model)
    alone._max_length = 60
    asked_for = questions(examples=50)
    assert_same(lm.loglikelihood(asked_for), alone.loglikelihood(asked_for, disable_tqdm=True))
    assert "are longer than the model's window of 60 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"between 1 and 60 tokens.*got 61"):
        lm.loglikelihood([asked("a", "b" * 61)])
    with pytest.raises(ValueError, match="max_gen_toks must be less than the model's window of 60"):
        lm.generate_until([asked("a", {"until": [], "max_gen_toks": 60})])


@pytest.mark.parametrize("kind", ["attention alone", "stock layers", "softmax", "virtual tokens"])
def test_a_model_without_a_state_to_copy_is_read_as_lm_eval_reads_it(kind):
    if kind == "attention alone":
        model = AutoModelForCausalLM.from_config(LLAMA).eval()
    elif kind == "stock layers":
        model = tiny("mamba2", vocab_size=259)
    elif kind == "softmax":
        family = load_family("dss")
        fields = {**family.tiny, "vocab_size": 259, "kernel_norm_length": None}
        fields["kernel_variant"] = "softmax"
        model = family.causal_lm_class(family.config(**fields)).eval()
    else:
        prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(AutoModelForCausalLM.from_config(LLAMA), prompt).eval()
    lm = ours(model)
    assert lm.states is None
    alone = theirs(model, 1 if kind == "softmax" else 3)
    assert_same(lm.loglikelihood(questions()), alone.loglikelihood(questions(), disable_tqdm=True))
    if kind in ("attention alone", "stock layers"):
        assert lm.generate_until(prompts()) == alone.generate_until(prompts(), disable_tqdm=True)


def test_a_call_that_finds_no_memory_is_repeated_with_fewer_rows(monkeypatch):
    model = zoo("longhorn")
    wanted = ours(model).loglikelihood(questions())
    lm, forward = ours(model, "auto"), model.model.forward

    def small(*args, **kwargs):
        if len(args[0] if args else kwargs["input_ids"]) > 4:
            raise torch.OutOfMemoryError("too many rows")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", small)
    assert_same(lm.loglikelihood(questions()), wanted)
    with pytest.raises(torch.OutOfMemoryError):  # a number that was asked for is kept
        ours(model, 8).loglikelihood(questions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"state_memory": 1e-6},
            r"state_memory must hold a state of this model, .* MiB, got 9",
        ),
        ({"state_memory": -1}, "state_memory must be a number of MiB above 0, got -1"),
        ({"state_memory": "nan"}, "state_memory must be a number of MiB above 0, got 'nan'"),
        ({"state_memory": "much"}, "state_memory must be a number of MiB above 0, got 'much'"),
        ({"size": 0}, "batch_size must be at least 1, or 'auto', got 0"),
        ({"size": "many"}, "batch_size must be at least 1, or 'auto', got 'many'"),
    ],
)
def test_bad_arguments_are_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        ours(zoo("longhorn"), **options)


def test_a_mistyped_argument_is_named_with_a_suggestion(saved):
    from ssmzoo.evaluation import SharedPrefixLM

    message = "takes an argument 'state_memroy'; did you mean 'state_memory'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        SharedPrefixLM(str(saved / "model"), state_memroy=3)


def test_blanks_alone_are_no_context():
    with pytest.raises(ValueError, match="a context must be empty or have more than blanks"):
        ours(zoo("longhorn")).loglikelihood([asked(" ", "abc")])


def test_penalties_of_repetition_see_the_prompt_as_lm_eval_shows_it():
    model = zoo("longhorn")
    torch.nn.init.zeros_(model.model.norm.weight)  # it says the least token that is allowed
    options = {"until": [], "max_gen_toks": 3, "no_repeat_ngram_size": 1}
    rng = random.Random(0)
    asked_for = [asked("a" * 80 + words(rng, length), options) for length in (5, 20)]
    wanted = theirs(model, 2).generate_until(asked_for, disable_tqdm=True)
    assert ours(model, 2).generate_until(asked_for) == wanted


def test_lm_evals_cache_gets_a_generated_text_under_its_request():
    lm, kept = ours(zoo("longhorn")), []
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *given: kept.append(given)))
    options = {"until": ["a"], "max_gen_toks": 3}
    (found,) = lm.generate_until([asked("b", options)])
    assert json.dumps(kept) == json.dumps([("generate_until", ("b", options), found)])


def test_processes_with_other_limits_divide_requests_equally():
    from ssmzoo.evaluation.planner import Request

    model = AutoModelForCausalLM.from_config(LLAMA).eval()
    whole, halved = ours(model, "auto"), ours(model, "auto")
    halved._choose_likelihoods(1, 20)  # as where memory has ended in one process
    rng = random.Random(0)
    requests = [Request(tuple(words(rng, rng.randint(9, 40)).encode()), 1) for _ in range(9)]
    assert whole._divide(requests, 2) == halved._divide(requests, 2)


def test_memory_that_torch_keeps_unused_is_free(monkeypatch):
    from ssmzoo.modeling import state_memory

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert state_memory.free_bytes(torch.device("cuda")) / 2 == 250


@pytest.fixture
def saved(tmp_path):
    zoo("longhorn").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def test_results_say_what_was_read_and_leave_nothing_else(saved):
    path = evaluate(
        saved / "model", tasks=["ssmzoo_recall_text"], limit=8, output_dir=saved / "results"
    )
    (row,) = [r for r in json.loads(path.read_text())["results"] if r["metric"] == "acc"]
    assert row["reading"]["shared_states"] is True
    assert 0 < row["reading"]["read"] <= row["reading"]["alone"]
    assert [file.name for file in (saved / "results").iterdir()] == [path.name]


def test_a_call_goes_on_where_one_was_killed(saved, monkeypatch):
    from ssmzoo.evaluation.shared_states import SharedStates

    options = {"tasks": ["ssmzoo_recall_text"], "limit": 24, "batch_size": 2}
    whole = evaluate(saved / "model", output_dir=saved / "whole", **options)
    call, calls = SharedStates._call, []

    def counted(self, *args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return call(self, *args)

    monkeypatch.setattr(SharedStates, "_call", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(saved / "model", output_dir=saved / "results", **options)
    (kept,) = (saved / "results").iterdir()
    kept.write_text(kept.read_text()[:-5])  # as where the machine went down
    answered = len(kept.read_text().split("\n")) - 3
    path = evaluate(saved / "model", output_dir=saved / "results", **options)
    found, wanted = (
        next(r for r in json.loads(p.read_text())["results"] if r["metric"] == "acc")
        for p in (path, whole)
    )
    assert found["value"] == wanted["value"]
    assert answered > 0
    assert found["reading"]["alone"] < wanted["reading"]["alone"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_answers_of_other_weights_are_not_taken(saved):
    from ssmzoo.evaluation.answers import Answers

    first = Answers(saved / "kept", ["weights"], suffix="0")
    key = first.key("text", (1, 2))
    first.add(key, "an answer")
    again, other = (Answers(saved / "kept", [facts], suffix="1") for facts in ("weights", "other"))
    assert again.get(again.key("text", (1, 2))) == "an answer"
    assert other.get(other.key("text", (1, 2))) is None
    assert again.get(again.key("loglikelihood", (1, 2))) is None


@pytest.mark.xdist_group("forks")
def test_processes_agree_where_a_model_is_split_or_answers_lie_on_disks_of_their_own(
    forks, tmp_path
):
    family = load_family("longhorn")
    config = family.config(**{**family.tiny, "vocab_size": 260})  # two processes have half each
    family.causal_lm_class(config).save_pretrained(tmp_path)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = "import sys\nfrom tests.evaluation.scoring_processes import main\nmain(sys.argv[1])"
    done = forks.run(program, str(tmp_path), environment=place)
    assert done.status == 0, done.log


@pytest.mark.xdist_group("forks")
def test_a_program_of_ones_own_names_a_folder_alone(saved, forks):
    program = "import sys; import ssmzoo.evaluation as e\n"
    program += "print(e.SharedPrefixLM(sys.argv[1]).generate_until([]))"
    done = forks.run(program, str(saved / "model"))
    assert done.out == "[]\n", done.log


def test_lm_eval_itself_takes_the_model_by_name(saved, monkeypatch, capsys):
    """``test_pages.py`` runs it under ``ssmzoo exec``, as docs/evaluate.md tells."""
    from lm_eval.__main__ import cli_evaluate

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # to which the startup adds
    startup = Path(ssmzoo.__file__).parent / "cli/startup/sitecustomize.py"
    runpy.run_path(str(startup))["_register_lm"]()
    command = ["lm_eval", "--model", "ssmzoo", "--model_args", f"pretrained={saved / 'model'}"]
    command += ["--include_path", str(ssmzoo.files.package_data("eval/tasks")), "--device", "cpu"]
    command += ["--tasks", "ssmzoo_recall_text", "--limit", "6", "--batch_size", "3"]
    monkeypatch.setattr(sys, "argv", command)
    # or it would log into what is captured now from all later tests
    monkeypatch.setattr("lm_eval.utils._LOGGING_CONFIGURED", True)
    cli_evaluate()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "|acc" in line]
    path = evaluate(saved / "model", tasks=["ssmzoo_recall_text"], limit=6, output_dir=saved)
    (row,) = [r for r in json.loads(path.read_text())["results"] if r["metric"] == "acc"]
    assert float(line.split("|")[7]) == pytest.approx(row["value"], abs=1e-4)
