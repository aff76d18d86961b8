"""Initial states as an adapter: trained, saved, composed, and refused where they do not fit."""

import copy
import json
import threading

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.stock_models import VOCABULARY, tiny
from tests.training.runs import assert_same_tensors, killed, saved, write_texts
from transformers import AutoModelForCausalLM, DynamicCache

import ssmzoo
from ssmzoo import load_family
from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.modeling import (
    StateCache,
    add_state_adapter,
    load_state,
    load_state_adapter,
    prefill,
    remove_state_adapter,
)
from ssmzoo.modeling.compat import cache_name
from ssmzoo.training.folder import RunFolder
from ssmzoo.training.run import train
from ssmzoo.training.shards import Background
from ssmzoo.training.trainer import Run

# PEFT calls what transformers renamed
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FILE, CONFIG = "state_adapter.safetensors", "state_adapter.json"


def longhorn(seed=0, **changes):
    family = load_family("longhorn")
    torch.manual_seed(seed)
    fields = {**family.tiny, "eos_token_id": None, **changes}
    return family.causal_lm_class(family.config(**fields)).eval()


def drawn(model, **options):
    """Add an adapter with random states; return it."""
    adapter = add_state_adapter(model, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return adapter


def ids(rows=2, length=9, most=60):
    return torch.randint(3, most, (rows, length), generator=torch.Generator().manual_seed(2))


def close(got, expected):
    got, expected = got.detach(), expected.detach()
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["longhorn", "rtf"])
def test_gradients_are_those_of_differences(name):
    family = load_family(name)
    torch.manual_seed(0)
    model = family.causal_lm_class(family.config(**family.tiny)).double().eval()
    adapter = drawn(model).double()
    x, parameters = ids(most=model.config.vocab_size), [*adapter.parameters()]
    weights = torch.randn(2, 9, model.config.vocab_size, dtype=torch.float64)
    along = [torch.randn_like(p) for p in parameters]

    def loss(step):
        with torch.no_grad():
            for p, a in zip(parameters, along, strict=True):
                p.add_(step * a)
            value = (model(x, use_cache=False).logits * weights).sum()
            for p, a in zip(parameters, along, strict=True):
                p.sub_(step * a)
        return value

    grads = torch.autograd.grad((model(x, use_cache=False).logits * weights).sum(), parameters)
    found = sum((g * a).sum() for g, a in zip(grads, along, strict=True))
    step = 1e-4  # an error of its fourth power, and of rounding 1e-12
    judge = (8 * (loss(step) - loss(-step)) - loss(2 * step) + loss(-2 * step)) / (12 * step)
    torch.testing.assert_close(found, judge, rtol=1e-8, atol=1e-9)


def test_the_weights_are_frozen_and_only_the_states_train():
    model = longhorn()
    adapter = add_state_adapter(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [id(p) for p in trained] == [id(p) for p in adapter.parameters()]
    (group,) = [g for g in model.param_groups(lr=1.0, weight_decay=0.1) if g["params"]]
    assert (group["name"], group["weight_decay"]) == ("state", 0.0)


def test_gradient_checkpointing_changes_no_gradient_and_reentrant_is_refused():
    model, x = longhorn(), ids()
    adapter = drawn(model)
    model.train()
    model(x, labels=x).loss.backward()
    expected = [p.grad.clone() for p in adapter.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(x, labels=x).loss.backward()
    for parameter, judge in zip(adapter.parameters(), expected, strict=True):
        close(parameter.grad, judge)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(x, labels=x)


def test_states_stay_float32_in_a_bfloat16_model():
    model = longhorn()
    adapter = drawn(model)
    model.to(torch.bfloat16)
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}
    assert model(ids()).logits.isfinite().all()


# --- files ----------------------------------------------------------------------------------------


def test_it_comes_back_from_a_file_and_goes(tmp_path):
    model, x = longhorn(), ids()
    base = model(x).logits
    adapter = drawn(model)
    expected = model(x).logits
    assert not torch.allclose(expected, base)
    adapter.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG, FILE]
    again = longhorn()
    with pytest.raises(FileNotFoundError, match=f"holds no {CONFIG}"):
        load_state_adapter(tmp_path.parent, again)
    assert load_state_adapter(tmp_path, again).digest() == adapter.digest()
    assert torch.equal(again(x).logits, expected)
    load_state_adapter(tmp_path, longhorn(pad_token_id=1))  # special tokens change no state
    with pytest.raises(ValueError, match="has a state adapter already"):
        add_state_adapter(again)
    remove_state_adapter(again)
    assert torch.equal(again(x).logits, base)
    with pytest.raises(ValueError, match="no state adapter to remove"):
        remove_state_adapter(again)


def changed(folder, **fields):
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def dropped(folder, name="layer0_ssm", **more):
    tensors = load_file(folder / FILE)
    del tensors[name]
    save_file({**tensors, **more}, folder / FILE)


WRONG = {
    "another type": (lambda f: changed(f, model_type="rtf"), "of type 'rtf'"),
    "another configuration": (
        lambda f: changed(f, base={"model_type": "ssmzoo_longhorn", "d_conv": 3}),
        "belongs to another model: made for .*d_conv = 3.*, got .*d_conv = 4",
    ),
    "no configuration": (lambda f: changed(f, base="0" * 64), "base must be a mapping"),
    "another format": (lambda f: changed(f, format="x"), "must have the format"),
    "an unknown field": (lambda f: changed(f, more=1), "the fields"),
    "no shapes": (lambda f: changed(f, states=3), "states must be a mapping"),
    "a missing state": (dropped, "layer0_ssm must have the shape .*, got none"),
    "an extra state": (
        lambda f: dropped(f, another=torch.zeros(1)),
        "another must have the shape .* none, got",
    ),
    "another shape": (
        lambda f: dropped(f, layer0_ssm=torch.zeros(3)),
        "layer0_ssm must have the shape",
    ),
    "half a file": (lambda f: (f / FILE).write_bytes(b"12"), "corrupt or truncated"),
    "other states": (lambda f: changed(f, digest="0"), "not of one adapter"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "corrupt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(name, tmp_path):
    drawn(longhorn()).save_pretrained(tmp_path)
    damage, says = WRONG[name]
    damage(tmp_path)
    model, x = longhorn(), ids()
    before = model(x).logits
    with pytest.raises(ValueError, match=says) as error:
        load_state_adapter(tmp_path, model)
    assert "\n" not in str(error.value)
    assert torch.equal(model(x).logits, before)
    own = add_state_adapter(model)
    with pytest.raises(ValueError, match=says):
        own.read(tmp_path)
    assert not any(p.any() for p in own.parameters())


def test_models_without_a_state_to_start_from_are_refused_by_name():
    dss = load_family("dss")
    softmax = {**dss.tiny, "kernel_variant": "softmax", "kernel_norm_length": None}
    softmax |= {"max_kernel_length": None, "num_labels": 2}
    cases = [
        (longhorn_encoder(), "is bidirectional"),
        (dss.sequence_classification_class(dss.config(**softmax)), "keeps none"),
        (tiny("mamba"), "after ssmzoo.accelerate"),
        (ssmzoo.accelerate(tiny("zamba")).model, "one convolution and one scan"),
        (torch.nn.Linear(2, 2), "must be a language model"),
    ]
    for model, says in cases:
        with pytest.raises(ValueError, match=says):
            add_state_adapter(model)


def longhorn_encoder():
    family = load_family("longhorn")
    fields = {**family.tiny, "directions": "both-separate", "num_labels": 2}
    return family.sequence_classification_class(family.config(**fields))


def test_a_classifier_trains_its_head_beside_the_states():
    family = load_family("longhorn")
    model = family.sequence_classification_class(family.config(**family.tiny, num_labels=2))
    drawn(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if "state_adapter" not in n} == {
        n for n, _ in model.named_parameters() if not n.startswith("model.")
    }
    assert model(ids()).logits.shape == (2, 2)


# --- states of prompts ----------------------------------------------------------------------------


def test_a_prompt_goes_on_with_its_adapter_alone(tmp_path):
    model, x = longhorn(), ids()
    adapter = drawn(model)
    expected = model.generate(x, max_new_tokens=4, do_sample=False)
    state = prefill(model, x, chunk_size=3)
    assert torch.equal(model.generate(**state.inputs(), max_new_tokens=4), expected)
    state.save_pretrained(tmp_path)
    adapter.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"began from the state adapter .* has no state adapter"):
        load_state(tmp_path, longhorn())
    other = longhorn()
    load_state_adapter(tmp_path / "adapter", other)
    kept = load_state(tmp_path, other)
    assert torch.equal(other.generate(**kept.inputs(), max_new_tokens=4), expected)
    next(other.model.state_adapter.parameters()).data.add_(1)
    with pytest.raises(ValueError, match="began from the state adapter"):
        load_state(tmp_path, other)
    prefill(longhorn(), x).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="began from no state adapter"):
        load_state(tmp_path, other)


def test_a_cache_that_began_elsewhere_is_refused():
    model, x = longhorn(), ids()
    cache = model(x, use_cache=True).cache
    adapter = drawn(model)
    with pytest.raises(ValueError, match="began from no state adapter"):
        model(x[:, :1], cache=cache)
    begun = model(x, cache=StateCache(model.config)).cache
    assert copy.deepcopy(begun).adapter is adapter
    with pytest.raises(ValueError, match="began from a state adapter"):
        begun.reset_rows([0])
    remove_state_adapter(model)
    with pytest.raises(ValueError, match="and this model has no state adapter"):
        model(x[:, :1], cache=begun)


def test_a_cache_that_is_cropped_to_nothing_begins_anew():
    model, x = longhorn(), ids()
    base = model(x).logits
    drawn(model)
    cache = StateCache(model.config)
    cache.activate_past_recording()
    model(x, cache=cache)
    cache.crop(-9)
    remove_state_adapter(model)
    got = [model(part, cache=cache).logits for part in (x[:, :8], x[:, 8:])]
    close(torch.cat(got, dim=1), base)


def test_adding_one_leaves_every_module_in_its_mode():
    model = longhorn().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    adapter = drawn(model)
    assert [m.training for m in model.modules() if m is not adapter] == before


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}],
)
def test_every_way_of_generating_starts_from_it(settings):
    model, x = longhorn(), ids(rows=1)
    drawn(model)
    options = {"max_new_tokens": 5, "do_sample": False}
    with_cache = model.generate(x, **options, **settings)
    plain = {} if "num_beams" not in settings else settings
    assert torch.equal(with_cache, model.generate(x, **options, **plain, use_cache=False))


# --- other tools ----------------------------------------------------------------------------------


def test_lora_and_the_states_train_together(tmp_path):
    peft = pytest.importorskip("peft")
    targets = list(load_family("longhorn").lora_targets)
    lora = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model, x = peft.get_peft_model(longhorn(), lora), ids()
    adapter = drawn(model, freeze=False)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in n or "state_adapter" in n for n in trained)
    model(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n in trained)
    expected = model.eval()(input_ids=x).logits
    model.save_pretrained(tmp_path / "lora")
    adapter.save_pretrained(tmp_path / "states")
    again = peft.PeftModel.from_pretrained(longhorn(), tmp_path / "lora").eval()
    load_state_adapter(tmp_path / "states", again)
    close(again(input_ids=x).logits, expected)
    close(again.merge_and_unload()(x).logits, expected)


def test_a_classifier_of_peft_takes_one():
    peft = pytest.importorskip("peft")
    family, x = load_family("longhorn"), ids()
    fields = {**family.tiny, "num_labels": 3, "pad_token_id": 0}
    model = family.sequence_classification_class(family.config_class(**fields))
    targets = list(family.lora_targets)
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=targets))
    before = tuned.eval()(input_ids=x).logits
    drawn(tuned, freeze=False)
    assert (tuned(input_ids=x).logits - before).abs().max() > 1e-3
    remove_state_adapter(tuned)
    close(tuned(input_ids=x).logits, before)


def test_trainer_trains_and_resumes_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    def trainer(resume=None):
        model = longhorn()
        adapter = add_state_adapter(model)
        options = TrainingArguments(
            str(tmp_path / "runs"),
            max_steps=4,
            save_steps=2,
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in ids(rows=8)]
        Trainer(model, options, train_dataset=rows).train(resume_from_checkpoint=resume)
        return adapter, model

    adapter, model = trainer()
    resumed, _ = trainer(str(tmp_path / "runs/checkpoint-2"))
    assert adapter.digest() == resumed.digest()
    assert all(p.any() for p in adapter.parameters())
    judge = longhorn().state_dict()
    for name, tensor in model.state_dict().items():
        assert "state_adapter" in name or torch.equal(tensor, judge[name])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_texts(folder / "texts")
    longhorn(vocab_size=259, pad_token_id=0).save_pretrained(folder / "base")
    fields = {
        "model": {"init_from": str(folder / "base")},
        "data": {"text": str(folder / "texts"), "validation": 0.2, "tokenizer": "bytes"},
        "train": {"steps": 4, "batch_size": 2, "seq_len": 16, "lr": 0.1},
        "adapter": {"kind": "state"},
        "eval": {"every": 2, "batches": 1},
        "checkpoint": {"every": 2},
        "log": {"every": 2, "curves": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def test_our_trainer_trains_resumes_and_generates_from_it(recipe, tmp_path, capsys):
    from ssmzoo.cli.main import main

    whole = train(recipe, output_dir=tmp_path / "whole")
    broken = killed(recipe, tmp_path / "broken", step=4)
    resumed = train(recipe, output_dir=broken, resume=True)
    states = load_file(whole / "adapter" / FILE)
    assert all(tensor.any() for tensor in states.values())
    for name, tensor in load_file(resumed / "adapter" / FILE).items():
        assert torch.equal(tensor, states[name])
    base = load_file(recipe.parent / "base/model.safetensors")
    held = load_file(whole / "model/model.safetensors")
    assert held.keys() == base.keys()
    assert all(torch.equal(held[name], base[name]) for name in base)
    command = ["generate", str(whole / "model"), "ant bee", "--temperature", "0"]
    command += ["--max-new-tokens", "8"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--adapter", str(whole / "adapter")]) == 0
    assert capsys.readouterr().out != plain
    assert main([*command, "--adapter", str(tmp_path)]) != 0
    assert f"holds no {CONFIG}" in capsys.readouterr().err
    assert main([*command, "--adapter", str(whole)]) != 0
    assert f"did you mean {str(whole / 'adapter')!r}" in capsys.readouterr().err
    folder, digest = (
        RunFolder(whole),
        json.loads((whole / "adapter" / CONFIG).read_text())["digest"],
    )
    folder.write_results([], "ssmzoo_longhorn", 1)
    scored = json.loads((whole / "results.json").read_text())["model"]
    assert scored["source"] == "whole/model with whole/adapter"
    assert scored["revision"] == f"{weights_revision(whole / 'model')}+{digest[:12]}"
    assert main(["card", str(whole / "model")]) == 0
    assert "a state adapter" in (whole / "model/README.md").read_text()


def test_an_adapter_beside_weights_is_published_with_them(tmp_path, capsys):
    from ssmzoo.cli.main import main

    model = longhorn()
    model.save_pretrained(tmp_path / "both")
    adapter = drawn(model)
    adapter.save_pretrained(tmp_path / "both")
    assert main(["card", str(tmp_path / "both")]) == 0
    assert main(["publish", str(tmp_path / "both"), str(tmp_path / "there")]) == 0
    again = load_state_adapter(tmp_path / "there", longhorn())
    assert again.digest() == adapter.digest()
    (tmp_path / "both" / FILE).unlink()
    assert main(["publish", str(tmp_path / "both"), str(tmp_path / "other")]) != 0
    assert f"holds no {FILE}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("adapter.kind=lora", "adapter.kind"),
        ("adapter.rank=2", "no field 'rank'"),
        ("train.sequence_parallel=2", "adapter must be absent"),
        ("train.segments.count=2", "adapter must be absent with .* train.segments"),
    ],
)
def test_a_recipe_with_a_wrong_adapter_is_refused(recipe, change, says, tmp_path):
    with pytest.raises((ValueError, LookupError), match=says):
        train(recipe, output_dir=tmp_path / "run", overrides=[change])


def test_it_is_published_with_a_card(tmp_path, capsys):
    from ssmzoo.cli.main import main

    adapter = drawn(longhorn())
    adapter.save_pretrained(tmp_path / "mine")
    here, there = str(tmp_path / "mine"), str(tmp_path / "theirs")
    assert main(["publish", here, there]) != 0
    assert "has no card" in capsys.readouterr().err
    assert main(["card", here]) == 0
    card = (tmp_path / "mine/README.md").read_text()
    count = sum(p.numel() for p in adapter.parameters())
    assert f"{count:,} parameters" in card
    assert f"`{adapter.digest()[:12]}`" in card
    assert main(["publish", here, there]) == 0
    assert "load_state_adapter" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["README.md", CONFIG, FILE]
    assert load_state_adapter(there, longhorn()).digest() == adapter.digest()
    adapter.layer0_ssm.data.add_(1)
    adapter.save_pretrained(here)
    assert main(["publish", here, there]) == 0
    assert load_state_adapter(there, longhorn()).digest() == adapter.digest()
    drawn(longhorn(d_state=8)).save_pretrained(tmp_path / "wider")
    assert main(["card", str(tmp_path / "wider")]) == 0
    assert main(["publish", str(tmp_path / "wider"), there]) != 0
    assert "other names, types or shapes" in capsys.readouterr().err
    assert main(["publish", here, str(tmp_path / "new"), "--include-state"]) != 0
    assert "include_state must be absent" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a missing state", "half a file", "no JSON"])
def test_a_damaged_one_has_no_card_and_is_not_published(name, tmp_path, capsys):
    from ssmzoo.cli.main import main

    here = tmp_path / "mine"
    drawn(longhorn()).save_pretrained(here)
    assert main(["card", str(here)]) == 0
    (here / "README.md").rename(tmp_path / "card")
    WRONG[name][0](here)
    assert main(["card", str(here)]) != 0
    assert not (here / "README.md").exists()
    (tmp_path / "card").rename(here / "README.md")
    capsys.readouterr()
    assert main(["publish", str(here), str(tmp_path / "theirs")]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "unexpected" not in line
    assert not (tmp_path / "theirs").exists()


def test_a_graph_whose_states_begin_as_zeros_is_refused():
    from ssmzoo.publishing.export_graphs import export_program

    model = longhorn()
    drawn(model)
    with pytest.raises(ValueError, match="starts from a state adapter"):
        export_program(model)


@pytest.mark.slow
def test_eval_scores_a_model_that_starts_from_it(recipe, tmp_path):
    pytest.importorskip("lm_eval")
    from ssmzoo.evaluation.evaluate import evaluate

    run = train(recipe, output_dir=tmp_path / "run")
    options = {"tasks": ["ssmzoo_recall_text"], "limit": 4, "output_dir": tmp_path}
    scored = evaluate(run / "model", adapter=run / "adapter", **options)
    found = json.loads(scored.read_text())
    assert scored.name == "run-adapter.json"
    assert "+" in found["model"]["revision"]
    assert "--adapter" in found["command"]


def test_a_checkpoint_that_is_written_late_is_of_its_own_step(recipe, tmp_path, monkeypatch):
    start, take_step, moved = Background.start, Run.take_step, threading.Event()

    def step(run, read):
        done = take_step(run, read)
        if run.progress.step == 3:
            moved.set()
        return done

    def at_once(self, *given):
        start(self, *given)
        self.wait()

    def late(self, folder, *parts):
        def behind(part):
            return lambda *given: moved.wait(60) and part(*given)

        start(self, folder, *map(behind, parts))

    monkeypatch.setattr(Run, "take_step", step)
    runs = []
    for begin in (at_once, late):
        moved.clear()
        monkeypatch.setattr(Background, "start", begin)
        runs.append(train(recipe, output_dir=tmp_path / begin.__name__))
    assert_same_tensors(*(saved(run, 2) for run in runs))
    assert_same_tensors(*(load_file(run / "checkpoints/step-00000002" / FILE) for run in runs))


# --- a model of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_a_stock_model_starts_from_it_in_every_form(model_type, tmp_path):
    model = ssmzoo.accelerate(tiny(model_type)).model
    adapter, x = drawn(model), ids(rows=3, length=13, most=VOCABULARY)
    whole = torch.cat([model(row[None], use_cache=False).logits for row in x])
    close(model(x).logits, whole)
    lengths = [13, 9, 1]
    padded, mask = torch.ones(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for row, length in enumerate(lengths):
        padded[row, 17 - length :], mask[row, 17 - length :] = x[row, :length], 1
    for sizes in ([17], [6, 6, 5], [1] * 17):
        state, got, seen = {}, [], 0
        for piece in padded.split(sizes, dim=1):
            seen += piece.shape[1]
            output = model(piece, attention_mask=mask[:, :seen], use_cache=True, **state)
            name = cache_name(output.keys())
            state = {name: output[name]}
            got.append(output.logits)
        for row, length in enumerate(lengths):
            close(torch.cat(got, dim=1)[row, 17 - length :], whole[row, :length])
    row = torch.cat([x[i, :length] for i, length in enumerate(lengths)])[None]
    ends = torch.tensor([0, 13, 22, 23])
    packed = model(row, cu_seqlens=ends, use_cache=False).logits[0].split(lengths)
    for part, judge in zip(packed, whole, strict=True):
        close(part, judge[: len(part)])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(x, **options)
    state = prefill(model, x, chunk_size=5)
    assert torch.equal(model.generate(**state.inputs(), **options), expected)
    state.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="began from the state adapter"):
        load_state(tmp_path, ssmzoo.accelerate(tiny(model_type)).model)
    plain = ssmzoo.accelerate(tiny(model_type)).model
    for made, other in ((model, plain), (plain, model)):
        for cache in (model.cache_class(model.config), DynamicCache(config=model.config)):
            made(x, cache=cache)
            assert made(x[:, :1], cache=copy.deepcopy(cache)).logits.isfinite().all()
            with pytest.raises(ValueError, match=r"began from .* and this model has"):
                other(x[:, :1], cache=cache)
    backbone, cache = model.base_model, model.cache_class(model.config)
    assert backbone(x, cache=cache).cache is cache
    with pytest.raises(ValueError, match="needs ssmzoo's kernels"):
        ssmzoo.restore(model)
    remove_state_adapter(model)
    assert adapter.digest()
    ssmzoo.restore(model)


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_a_stock_models_adapter_comes_back_from_its_folder(model_type, tmp_path):
    # Mamba2's configuration has an infinite number, which is none in JSON
    adapter = drawn(ssmzoo.accelerate(tiny(model_type)).model)
    adapter.save_pretrained(tmp_path)
    again = ssmzoo.accelerate(tiny(model_type)).model
    assert load_state_adapter(tmp_path, again).digest() == adapter.digest()


def test_the_revision_of_an_adapter_of_peft_counts_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    model = longhorn()
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["in_proj"])
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "lora")
    before = weights_revision(tmp_path / "lora")
    assert weights_revision(tmp_path / "lora") == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.save_pretrained(tmp_path / "base")
    assert weights_revision(tmp_path / "lora") != before
