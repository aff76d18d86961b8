"""Prompts read once: saved, loaded by another process, refused by other models."""

import json

import pytest
import torch
from accelerate import disk_offload
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ssmzoo.modeling import StateCache, load_state, prefill
from ssmzoo.modeling.compat import CACHE
from ssmzoo_dss import FAMILY as DSS
from ssmzoo_longhorn import FAMILY

FAMILY.register()


def build(**fields):
    torch.manual_seed(0)
    return FAMILY.causal_lm_class(FAMILY.config(**{**FAMILY.tiny, **fields})).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(96, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(model, ids, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    model.prefill(ids).save_pretrained(folder)
    return folder


def logits(model, inputs):
    """Return the logits ``[B, V]`` of the next token."""
    past = inputs[CACHE]
    with torch.no_grad():
        return model(inputs["input_ids"][:, past.seen_tokens :], cache=past).logits[:, -1]


@pytest.mark.long
@pytest.mark.xdist_group("forks")
def test_a_saved_prompt_continues_bitwise_equal_in_another_process(
    model, ids, folder, forks, tmp_path
):
    model.save_pretrained(tmp_path / "model")
    code = f"""
import ssmzoo.auto, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from ssmzoo.modeling import load_state
torch.set_num_threads({torch.get_num_threads()})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
state = load_state({str(folder)!r}, model)
inputs = state.inputs(torch.tensor([[5, 6], [7, 8]]))
past = inputs[{CACHE!r}]
with torch.no_grad():
    out = model(inputs["input_ids"][:, past.seen_tokens:], cache=past)
save_file({{"logits": out.logits[:, -1].contiguous()}}, {str(tmp_path / "logits.safetensors")!r})
"""
    done = forks.run(code)
    assert done.status == 0, done.log
    got = load_file(tmp_path / "logits.safetensors")["logits"]
    more = torch.tensor([[5, 6], [7, 8]])
    assert torch.equal(got, logits(model, model.prefill(ids).inputs(more)))
    with torch.no_grad():
        whole = model(torch.cat([ids, more], dim=1)).logits[:, -1]
    torch.testing.assert_close(got, whole)


def test_the_file_names_its_model(model, folder):
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        notes = file.metadata()
    assert (notes["seen_tokens"], notes["dtype"]) == ("6", "float32")
    assert len(notes["weights"]) == 64
    assert json.loads(notes["owner"])["model_type"] == "ssmzoo_longhorn"


def test_a_prompt_of_one_token_can_be_saved(model, ids, tmp_path):
    one = ids[:, :1]
    model.prefill(one).save_pretrained(tmp_path)
    state = load_state(tmp_path, model)
    assert state.num_tokens == 1
    with torch.no_grad():
        assert torch.equal(logits(model, state.inputs()), model(one).logits[:, -1])


def test_extending_a_prompt_leaves_the_original_unchanged(model, ids):
    first, both = model.prefill(ids), torch.cat([ids, ids], dim=1)
    with torch.no_grad():
        whole = model(both).logits[:, -1]
    for given in (first.inputs(ids), {"input_ids": both, CACHE: first.cache}):
        longer = model.prefill(**given)
        assert (first.cache.seen_tokens, longer.cache.seen_tokens) == (6, 13)
        torch.testing.assert_close(logits(model, longer.inputs()), whole)


def test_other_files_of_the_folder_stay(model, ids, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    model.prefill(ids).save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "state.safetensors"]


# --- refusals -----------------------------------------------------------------------------------


def test_other_weights_another_dtype_and_another_shape_are_refused(model, folder):
    other = build()
    with torch.no_grad():
        other.model.layers[0].mixer.out_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"by other weights: their digest must be [0-9a-f]{12}"):
        load_state(folder, other)
    with pytest.raises(ValueError, match=r"float32, got .*float64; load it with"):
        load_state(folder, build().double())
    with pytest.raises(ValueError, match="belongs to another model"):
        load_state(folder, build(d_state=3))
    with pytest.raises(ValueError, match="belongs to another model"):
        load_state(folder, DSS.causal_lm_class(DSS.config(**DSS.tiny)))


def test_special_tokens_and_dropout_change_no_state(model, folder):
    other = build(dropout=0.1, drop_path_rate=0.1, eos_token_id=5)
    other.config.pad_token_id = other.config.bos_token_id = 1
    assert load_state(folder, other).cache.seen_tokens == 6


def test_another_head_may_continue_the_prompt(folder):
    other = build()
    other.lm_head = torch.nn.Linear(other.config.hidden_size, 3, bias=False)
    assert load_state(folder, other).num_tokens == 7


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_prompt_belongs_to_the_adapter_that_was_active(ids, tmp_path):
    lora = LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    model = get_peft_model(build(), lora, adapter_name="one").eval()
    model.add_adapter("two", lora)
    state = prefill(model, ids)
    state.save_pretrained(tmp_path)
    load_state(tmp_path, model)
    with model.disable_adapter(), pytest.raises(ValueError, match="made by other weights"):
        load_state(tmp_path, model)
    model.set_adapter("two")
    with pytest.raises(ValueError, match="made by other weights"):
        load_state(tmp_path, model)
    with pytest.raises(RuntimeError, match="weights changed since it read this prompt"):
        state.save_pretrained(tmp_path)


def test_the_prompt_of_an_offloaded_model_is_not_saved(ids, tmp_path):
    model = disk_offload(build(), tmp_path / "weights", execution_device="cpu")
    with pytest.raises(ValueError, match=r"must be in memory, and .* is offloaded; load the model"):
        model.prefill(ids).save_pretrained(tmp_path / "prompt")
    assert not (tmp_path / "prompt").exists()


def test_a_prompt_is_not_saved_after_its_weights_changed(ids, tmp_path):
    model = build()
    state = model.prefill(ids)
    with torch.no_grad():
        model.model.layers[0].mixer.out_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed since it read this prompt.*prefill again"):
        state.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_loading_a_prompt_tells_missing_bare_and_damaged_files_apart(model, ids, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no state.safetensors; save one with"):
        load_state(tmp_path, model)
    path = tmp_path / "state.safetensors"
    with torch.no_grad():
        model(ids, use_cache=True).cache.save(path)
    with pytest.raises(ValueError, match=r"a cache without its prompt; read it with StateCache"):
        load_state(tmp_path, model)
    whole = (folder / "state.safetensors").read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_state(tmp_path, model)


DAMAGES = {
    "ids of one dimension": ({"other.input_ids": 7, "other.attention_mask": 7}, {}, "input_ids"),
    "ids of another row": ({"other.input_ids": (1, 7), "other.attention_mask": (1, 7)}, {}, "rows"),
    "ids of fewer tokens": ({"other.input_ids": (2, 3), "other.attention_mask": (2, 3)}, {}, "6"),
    "a state of fewer rows": ({"1.conv": (1, 8, 3)}, {}, "a row a sequence"),
    "a state without rows": ({"1.conv": ()}, {}, "a row a sequence"),
    "fewer tokens than none": ({}, {"seen_tokens": "-1"}, "-1 tokens"),
    "no number of tokens": ({}, {"seen_tokens": "many"}, "bad metadata"),
    "a state that is not listed": ({}, {"states": "[]"}, "it holds"),
    "no owner": ({}, {"owner": ""}, "bad metadata"),
    "deep notes": ({}, {"owner": "[" * 99999}, "bad metadata"),
    "a long owner": ({}, {"owner": json.dumps("x" * 9999)}, "characters left out"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_prompt_is_one_short_error(model, folder, tmp_path, case):
    shapes, changes, message = DAMAGES[case]
    path = folder / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    tensors = load_file(path)
    assert shapes.keys() <= tensors.keys()
    tensors |= {name: torch.ones(shape).to(tensors[name]) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / path.name, metadata=notes | changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_state(tmp_path, model)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("name", ["9.ssm", "-1.ssm", "0", "x.ssm"])
def test_a_state_of_a_missing_layer_is_refused(model, folder, tmp_path, name):
    path = folder / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    tensors = load_file(path) | {name: torch.zeros(1)}
    states = sorted(n for n in tensors if not n.startswith("other."))
    save_file(tensors, tmp_path / path.name, metadata=notes | {"states": json.dumps(states)})
    with pytest.raises(ValueError, match="damaged StateCache"):
        load_state(tmp_path, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, r"\[B, L\] and hold a token, got \[3\]"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.int64)}, r"hold a token, got \[2, 0\]"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"attention_mask": torch.ones(2, 6)}, r"shape of input_ids \[2, 7\], got \[2, 6\]"),
    ],
)
def test_invalid_prompts_are_refused(model, ids, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.prefill(**{"input_ids": ids, **arguments})


def test_a_state_that_is_no_prefix_of_the_prompt_is_refused(model, ids):
    state = model.prefill(ids)
    with pytest.raises(ValueError, match=r"cache has seen 6 tokens.* got"):
        model.prefill(ids[:, :6], cache=state.cache)
    with pytest.raises(ValueError, match="holds 2 sequences, the input has 1"):
        model.prefill(ids[:1], cache=state.cache)
    with pytest.raises(ValueError, match=r"shape \[2, M\], as many rows as the prompt, got \[1, 3"):
        state.inputs(ids[:1, :3])
    with pytest.raises(ValueError, match="made for"):
        model.prefill(ids, cache=StateCache(build(d_state=3).config))
