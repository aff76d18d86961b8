"""Priming: hybrids that start from a Transformer, and learn to give what its attention gave."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tests.training.runs import write_texts
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import ssmzoo.auto  # noqa: F401
from ssmzoo.checkpoints.convert import load_hybrid
from ssmzoo.checkpoints.weights import PRIMING
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.distillation import layer_scores
from ssmzoo.distillation.prime import prime
from ssmzoo.family import load_family
from ssmzoo.modeling import LayerState
from ssmzoo.publishing.card import render_card
from ssmzoo.recipe import AlignSection
from ssmzoo.training.align import Align
from ssmzoo.training.consolidate import consolidate
from ssmzoo.training.metrics import read_metrics
from ssmzoo.training.run import train

CARD = """---
license: other
license_name: mine
license_link: LICENSE
base_model: a/b
---
"""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 259}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
# by mixer its fields, and the names of parameters that are copied
MIXERS = {
    "linear_attention": ({}, ("in_proj", "out_proj")),
    "linear_attention:mamba2-130m": ({}, ("in_proj", "out_proj")),
    "longhorn": ({"d_state": 4}, ("in_proj", "out_proj")),
    "coffee": ({"d_state": 4}, ("in_proj", "out_proj")),
    "bmojo": (
        {"mixer_types": "bmojo_f", "sliding_window": 4, "num_fading_tokens": 2, "d_state": 4},
        ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
    ),
    "h3": ({"d_state": 4}, ("q_proj", "k_proj", "v_proj", "out_proj")),
    "rtf": ({"d_state": 4}, ("in_proj", "out_proj")),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "teacher"
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def primed(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "primed"
    return prime(str(teacher), "linear_attention", "half", folder)[0]


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def recipe(primed, teacher, texts, **sections):
    fields = {
        "model": {"init_from": str(primed)},
        "align": {"teacher": str(teacher)},
        "data": {"text": str(texts), "validation": 0.2},
        "train": {
            "steps": 6,
            "batch_size": 4,
            "seq_len": 32,
            "lr": 0.01,
            "warmup": 0,
            "schedule": "constant",
        },
        "eval": {"every": 3, "batches": 1},
        "checkpoint": {"every": 3, "keep": 2},
        "log": {"every": 1, "curves": False},
    }
    fields = {**fields, **sections}
    path = texts.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in fields.items() if v is not None}))
    return path


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_primed_model_is_its_teacher_but_for_its_new_mixers(mixer, teacher, tmp_path):
    fields, copied = MIXERS[mixer]
    folder, layers, scores = prime(str(teacher), mixer, "1,3", tmp_path / "new", fields=fields)
    assert (layers, scores) == ([1, 3], None)
    ours, theirs = load(folder), load(teacher)
    assert ours.config.mixers[0] == ours.config.mixers[2] == "attention"
    assert ours.config.mixers[1] == ours.config.mixers[3] != "attention"
    for layer in (0, 2):  # the first layers' outputs are those of the teacher
        got = ours.model.layers[layer].mixer.q_proj.weight
        assert got.equal(theirs.model.layers[layer].self_attn.q_proj.weight)
    assert ours.model.layers[1].mlp.up_proj.weight.equal(theirs.model.layers[1].mlp.up_proj.weight)
    place = tmp_path / "drawn"
    drawn = load(prime(str(teacher), mixer, "1,3", place, fields=fields, start="drawn")[0])
    for name in copied:
        one, other = (m.model.layers[1].mixer.get_submodule(name).weight for m in (ours, drawn))
        assert not one.equal(other), name
    assert torch.isfinite(ours(torch.arange(12)[None]).logits).all()
    told = json.loads((folder / PRIMING).read_text())
    assert (told["base"], told["base_model"]) == ("teacher", ["a/b"])
    assert (told["license"], told["license_name"]) == ("other", "mine")


OTHERS_SSM = {"mixer_types": "bmojo_f", "sliding_window": 4, "ssm": {"family": "linear_attention"}}


@pytest.mark.parametrize(
    ("mixer", "fields"),
    [("longhorn", {}), ("coffee", {}), ("linear_attention", {}), ("bmojo", OTHERS_SSM)],
)
def test_a_gate_is_the_mean_of_values_and_outputs_or_drawn(mixer, fields, teacher, tmp_path):
    mixers = {}
    for start in ("copied", "projections", "drawn"):
        folder = prime(str(teacher), mixer, "1", tmp_path / start, fields=fields, start=start)[0]
        mixers[start] = load(folder).model.layers[1].mixer
    gate = load_family(mixer).from_attention.gate
    attention = load(teacher).model.layers[1].self_attn
    v = attention.v_proj.weight.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    assert gate(mixers["copied"]).equal((v + attention.o_proj.weight.T) / 2)
    assert gate(mixers["projections"]).equal(gate(mixers["drawn"]))
    with torch.no_grad():
        gate(mixers["projections"]).copy_(gate(mixers["copied"]))
    projections = mixers["projections"].parameters()
    for one, other in zip(mixers["copied"].parameters(), projections, strict=True):
        assert one.equal(other)


def test_a_mixer_without_a_gate_draws_none(teacher, tmp_path):
    with pytest.raises(ValueError, match="rtf has none that start from attention; take 'copied'"):
        prime(str(teacher), "rtf", "half", tmp_path / "new", start="projections")
    assert not (tmp_path / "new").exists()


def test_grouped_heads_are_repeated(primed, teacher):
    attention = load(teacher).model.layers[1].self_attn
    mixer = load(primed).model.layers[1].mixer
    q, k, v = mixer.in_proj.weight[:96].chunk(3)
    assert q.equal(attention.q_proj.weight)
    for ours, theirs in ((k, attention.k_proj.weight), (v, attention.v_proj.weight)):
        assert ours.view(2, 2, 8, 32).equal(theirs.view(2, 1, 8, 32).expand(2, 2, 8, 32))
    assert mixer.out_proj.weight.equal(attention.o_proj.weight)


def test_grouped_biases_are_repeated(tmp_path):
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    model.save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    folder = prime(str(tmp_path / "teacher"), "linear_attention", "half", tmp_path / "new")[0]
    attention, mixer = model.model.layers[1].self_attn, load(folder).model.layers[1].mixer
    q, k, v = mixer.conv1d.bias.chunk(3)
    assert q.equal(attention.q_proj.bias)
    for ours, theirs in ((k, attention.k_proj.bias), (v, attention.v_proj.bias)):
        assert ours.view(2, 2, 8).equal(theirs.view(2, 1, 8).expand(2, 2, 8))


@pytest.mark.parametrize(
    ("model", "config"), [(Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)]
)
def test_bmojo_takes_biases_and_norms_of_attention(model, config, tmp_path):
    teacher = model(config(**SIZES, **HEADS, head_dim=8))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.1 * torch.randn_like(weight)
    teacher.save_pretrained(tmp_path / "teacher")
    fields = {"mixer_types": "swa", "sliding_window": 64}
    made = prime(str(tmp_path / "teacher"), "bmojo", "all", tmp_path / "new", fields=fields)[0]
    ids = torch.arange(24).view(2, 12)
    wanted, got = teacher.double().eval()(ids).logits, load(made, torch.float64)(ids).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # its angles are float32


def test_bmojos_state_space_model_of_another_family_starts_as_that_family_does(teacher, tmp_path):
    made = prime(str(teacher), "bmojo", "half", tmp_path / "new", fields=OTHERS_SSM)[0]
    alone = prime(str(teacher), "linear_attention", "half", tmp_path / "alone")[0]
    ours, own = (load(folder).model.layers[1].mixer for folder in (made, alone))
    for name in ("in_proj", "out_proj", "conv1d"):
        one, other = (m.get_submodule(name).weight for m in (ours.ssm, own))
        rows = sum(own.widths) if name == "in_proj" else None  # decays and strengths are drawn
        assert one[:rows].equal(other[:rows]), name
    assert ours.ssm.config.head_k_dim == 8


def by_hand(student, teacher, rows):
    """The mean squared errors of the new mixers, each fed what the teacher's attention gets."""
    total, x = 0.0, teacher.model.embed_tokens(rows)
    for ours, theirs in zip(student.model.layers, teacher.model.layers, strict=True):
        y = theirs.norm(x)
        wanted = theirs.mixer(y, LayerState(), None)
        if type(ours.mixer) is not type(theirs.mixer):
            total = total + (ours.mixer(y, LayerState(), None) - wanted).square().mean()
        x = x + wanted
        x = x + theirs.mlp(theirs.mlp_norm(x))
    return total


@pytest.fixture(scope="module")
def pair(primed, teacher):
    """Student and teacher as hybrids, in float64."""
    return load(primed, torch.float64), load_hybrid(str(teacher), "float32").double()


def error(pair, rows, **section):
    student, teacher = pair
    mixers = {index: teacher.model.layers[index].mixer for index in (1, 3)}
    align = Align(student, AlignSection(teacher="given", **section), mixers, packs=True)
    return align.loss_of(lambda piece, **more: student(**piece, **more), {"input_ids": rows}, 0, 1)


def test_all_layers_learn_in_one_pass_on_the_teachers_own_inputs(pair):
    rows = torch.arange(24).view(2, 12) % 50
    got, wanted = error(pair, rows), by_hand(*pair, rows)
    assert torch.allclose(got, wanted, rtol=1e-12)
    student = pair[0]
    mixer = list(student.model.layers[1].mixer.parameters())
    for one, other in zip(*(torch.autograd.grad(x, mixer) for x in (got, wanted)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("mixer", ["linear_attention", "bmojo"])  # which reads the residual, too
def test_the_whole_model_learns_hidden_states_or_logits(mixer, pair, teacher, tmp_path):
    rows = torch.arange(24).view(2, 12) % 50
    made = prime(str(teacher), mixer, "half", tmp_path / "new", fields=MIXERS[mixer][0])[0]
    pair = student, teacher = load(made, torch.float64), pair[1]
    hidden = [m(rows, output_hidden_states=True).hidden_states[-1] for m in pair]
    wanted = (hidden[0] - hidden[1]).square().mean()
    assert torch.allclose(error(pair, rows, match="hidden"), wanted, rtol=1e-12)
    got = error(pair, rows, match="logits", temperature=2.0)
    ours, theirs = (torch.log_softmax(m(rows).logits / 2, -1) for m in (student, teacher))
    wanted = 4 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert torch.allclose(got, wanted, rtol=1e-10)


@pytest.fixture(scope="module")
def aligned(primed, teacher, texts, tmp_path_factory):
    """A run of six steps, stopped after three and resumed."""
    output = tmp_path_factory.mktemp("runs") / "aligned"
    path = recipe(primed, teacher, texts)
    train(path, output_dir=output, overrides=["train.steps=3"])
    return train(path, output_dir=output, resume=True)


def test_a_run_aligns_the_new_mixers_alone_and_resumes_exactly(aligned, primed, teacher, texts):
    path = recipe(primed, teacher, texts)
    whole = train(path, output_dir=aligned.parent / "whole")
    before, after = load(primed).state_dict(), load(aligned / "model").state_dict()
    again = load(whole / "model").state_dict()
    for name, weight in after.items():
        new = ".1.mixer." in name or ".3.mixer." in name
        assert weight.equal(before[name]) != new, name
        assert weight.equal(again[name]), name
    lines = [json.loads(x) for x in (aligned / "metrics.jsonl").read_text().splitlines()]
    found = [x["validation_loss"] for x in lines if "validation_loss" in x]
    assert found[-1] < found[0]


def test_rows_of_a_generated_task_align_mixers_too(primed, teacher, texts, tmp_path):
    data = {"task": "mqar", "task_args": {"num_pairs": 2, "vocab_size": 32}, "validation": 8}
    path = recipe(primed, teacher, texts, data=data)
    lines = read_metrics(train(path, output_dir=tmp_path / "run") / "metrics.jsonl")
    found = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert found[-1] < found[0]
    assert lines[-1]["validation_targets"] == 4 * 32  # every token has an output to learn


def test_the_card_tells_base_layers_and_stages(aligned, teacher, texts, tmp_path):
    path = recipe(aligned / "model", teacher, texts, align=None)
    tuned = train(path, output_dir=tmp_path / "tuned", overrides=["train.only=['*.mixer.*']"])
    told = json.loads((tuned / "model" / PRIMING).read_text())
    tokens = {"steps": 6, "tokens": 6 * 4 * 32}
    wanted = [{"stage": "align", "match": "mixers", **tokens}, {"stage": "tune", **tokens}]
    assert told["stages"] == wanted
    before, after = load(aligned / "model").state_dict(), load(tuned / "model").state_dict()
    changed = {name for name, weight in after.items() if not weight.equal(before[name])}
    assert changed == {name for name in after if ".mixer." in name}
    card = render_card(tuned / "model").read_text()
    assert "license_name: mine" in card
    assert "base_model:\n- a/b" in card
    assert "loss of the alignment" in render_card(aligned / "model").read_text()
    assert "linear_attention in place of attention in the layers 1, 3; then align (mixers)" in card


@torch.no_grad()
def test_layers_are_ranked_by_what_a_window_costs(teacher, texts, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(p.read_text() for p in sorted(texts.iterdir()))[:2200])
    folder, layers, scores = prime(
        str(teacher), "longhorn", "best:2", tmp_path / "new", fields={"d_state": 4}, text=str(text)
    )
    assert len(scores.harm) == 4
    assert set(layers) == set(sorted(scores.harm, key=scores.harm.__getitem__)[:2])
    network = load(teacher)
    ids = byte_tokenizer()(text.read_text())["input_ids"][: 1024 * 2]
    rows = torch.tensor(ids).view(2, 1024)
    assert abs(float(network(rows, labels=rows).loss) - scores.loss) < 1e-5
    whole = load_hybrid(str(teacher), "float32")
    fields = whole.config.kinds["attention"]
    kinds = {"attention": fields, "window": {**fields, "sliding_window": 128}}
    mixers = ["attention", "window", "attention", "attention"]
    config = {**whole.config.to_dict(), "mixers": mixers, "kinds": kinds}
    windowed = type(whole)(type(whole.config).from_dict(config)).eval()
    windowed.load_state_dict(whole.state_dict())
    harm = float(windowed(rows, labels=rows).loss) - scores.loss
    assert abs(harm - scores.harm[1]) < 1e-5
    assert (folder / "layers.png").stat().st_size > 1000
    assert json.loads((folder / "layers.json").read_text())["window"] == 128


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"layers": "1,9"}, "layers must be from 0 to 3, got 9"),
        ({"layers": "some"}, "layers must be all, half, best:N or numbers such as 1,3,5"),
        ({"layers": "best:2"}, "layers 'best:2' needs a text to score layers by (--text)"),
        (
            {"layers": "best:0", "text": "x"},
            "layers must be best:N with N of at least 1, got 'best",
        ),
        ({"text": "x"}, "text must be absent, or layers best:N, got layers 'half'"),
        (
            {"mixer": "linear_attention:hgrn2-340m", "fields": {"num_key_heads": None}},
            "must have mixers that stand alone, got fields of linear_attention",
        ),
        ({"mixer": "longhor"}, "no family named 'longhor'; did you mean 'longhorn'"),
        ({"mixer": "longhorn", "fields": {"d_stat": 4}}, "has no field 'd_stat'"),
        ({"mixer": "longhorn", "fields": {"expand": 3}}, "Longhorn must be as wide inside"),
        ({"mixer": "linear_attention:mamba"}, "has no preset 'mamba'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_nothing_is_written(given, wrong, teacher, tmp_path):
    given = {"mixer": "linear_attention", "layers": "half", **given}
    with pytest.raises((ValueError, LookupError)) as error:
        prime(str(teacher), output_dir=tmp_path / "new", **given)
    assert wrong in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({"align": {"teacher": "PRIMED"}}, "align.teacher must have other mixers than the model"),
        ({"model": {"init_from": "TUNED"}}, "comes right after 'ssmzoo prime'"),
        ({"model": {"config_of": "llama"}}, "align needs model.init_from"),
        ({"align": {"teacher": "T", "temperature": 2.0}}, "align.temperature needs align.match"),
        ({"model": {"init_from": "TEACHER"}}, "must be a hybrid that 'ssmzoo prime' wrote"),
        (
            {"train": {"gradient_checkpointing": True}},
            "train.gradient_checkpointing must be off with align.match 'mixers'",
        ),
        ({"align": None, "train": {"only": ["*.mixr.*"]}}, "train.only: no parameter fits"),
    ],
)
def test_stages_out_of_order_are_refused(sections, wrong, primed, teacher, texts, tmp_path):
    other = tmp_path / "tuned"
    network = load(primed)
    with torch.no_grad():
        network.model.layers[0].mlp.up_proj.weight.add_(1)
    network.save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    text = yaml.safe_dump(sections)
    for word, folder in (("PRIMED", primed), ("TUNED", other), ("TEACHER", teacher)):
        text = text.replace(word, str(folder))
    changed = yaml.safe_load(text)
    if "train" in changed:
        changed["train"] |= {"steps": 6, "batch_size": 4, "seq_len": 32, "lr": 0.01}
    with pytest.raises((ValueError, LookupError)) as error:
        train(recipe(primed, teacher, texts, **changed), output_dir=tmp_path / "run")
    assert wrong in str(error.value)


@pytest.mark.parametrize(("helps", "warns"), [(1, False), (3, True)])
def test_windows_that_help_are_told(helps, warns, teacher, texts, monkeypatch, caplog):
    losses = iter([2.0, *[1.0] * helps, *[3.0] * (4 - helps)])
    monkeypatch.setattr(layer_scores, "_loss", lambda network, rows: next(losses))
    network = load_hybrid(str(teacher), "float32")
    found = layer_scores.score_layers(
        network, byte_tokenizer(), str(texts), 2, lambda done, layers: None
    )
    assert sum(harm < 0 for harm in found.harm.values()) == helps
    assert ("layers are not told apart" in caplog.text) is warns


def test_a_model_of_one_layer_has_no_half(tmp_path):
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}, **HEADS)).save_pretrained(
        folder
    )
    with pytest.raises(ValueError, match="layers must be all for a model of one layer"):
        prime(str(folder), "longhorn", "half", tmp_path / "new")


def test_a_card_that_cannot_be_read_is_left_out_with_a_warning(teacher, tmp_path, caplog):
    folder = tmp_path / "model"
    load_hybrid(str(teacher), "float32").save_pretrained(folder)
    for text in ("---\nlicense: [\n---\n", "---\nlicense: none-such\n---\n"):
        (folder / "README.md").write_text(text, encoding="utf-8")
        caplog.clear()
        made, *_ = prime(str(folder), "h3", "all", tmp_path / text[12:16], fields={"d_state": 4})
        assert "license" not in json.loads((made / PRIMING).read_text())
        assert "card is left out" in caplog.text


def test_a_second_priming_keeps_the_first_ones_mixers_and_history(primed, tmp_path):
    """Other fields make another kind of mixer, equal ones do not."""
    fields = {"beta_scale": 2.0}
    folder, *_ = prime(str(primed), "linear_attention", "0", tmp_path / "a", fields=fields)
    before, after = load(primed), load(folder)
    assert after.config.mixers == [
        *("linear_attention-2", "linear_attention", "attention", "linear_attention")
    ]
    assert after.config.kinds["linear_attention"] == before.config.kinds["linear_attention"]
    told = json.loads((folder / PRIMING).read_text())
    assert (told["base"], told["layers"]) == ("teacher", [1, 3])
    assert [(x["stage"], x["layers"]) for x in told["stages"]] == [("prime", [0])]
    card = render_card(folder).read_text()
    assert "in the layers 1, 3; then linear_attention in place of attention in the layers 0" in card
    again, *_ = prime(str(primed), "linear_attention", "0", tmp_path / "b")
    assert load(again).config.mixers.count("linear_attention") == 3


def test_layers_with_other_positions_get_mixers_with_theirs(tmp_path):
    """SmolLM3's layers without positions, in B'MOJO whose window holds the text."""
    torch.manual_seed(0)
    config = SmolLM3Config(**SIZES, **HEADS, no_rope_layer_interval=2, pad_token_id=0)
    folder = tmp_path / "model"
    SmolLM3ForCausalLM(config).save_pretrained(folder)
    fields = {"mixer_types": "swa", "sliding_window": 64}
    made, *_ = prime(str(folder), "bmojo", "all", tmp_path / "new", fields=fields)
    ids = torch.arange(24).view(2, 12)
    assert sorted(set(load(made).config.mixers)) == ["bmojo", "bmojo-2"]
    wanted = SmolLM3ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()(ids).logits
    got = load(made, torch.float64)(ids).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # its angles are float32


def test_a_recipes_licence_takes_the_place_of_the_bases(aligned, teacher, texts, tmp_path):
    path = recipe(aligned / "model", teacher, texts, align=None, card={"license": "apache-2.0"})
    tuned = train(path, output_dir=tmp_path / "tuned", overrides=["train.steps=1"])
    card = render_card(tuned / "model").read_text()
    assert "license: apache-2.0" in card
    assert "license_name" not in card


def test_checkpoints_of_a_primed_models_run_keep_its_history(
    aligned, teacher, texts, tmp_path, monkeypatch
):
    checkpoint = aligned / "checkpoints" / "step-00000003"
    wanted = {"stage": "align", "match": "mixers", "steps": 3, "tokens": 3 * 4 * 32}
    monkeypatch.chdir(checkpoint.parent)
    consolidate(Path(checkpoint.name), tmp_path / "model")
    assert json.loads((tmp_path / "model" / PRIMING).read_text())["stages"] == [wanted]
    path = recipe(checkpoint, teacher, texts, align=None)
    tuned = train(path, output_dir=tmp_path / "tuned", overrides=["train.steps=1"])
    assert json.loads((tuned / "model" / PRIMING).read_text())["stages"][0] == wanted


def test_a_run_resumes_with_the_teacher_it_began_with(aligned, primed, teacher, texts, tmp_path):
    path = recipe(primed, tmp_path / "other", texts)
    with pytest.raises(ValueError, match=r"align\.teacher must stay as the run began"):
        train(path, output_dir=aligned, resume=True, overrides=["train.steps=9"])
