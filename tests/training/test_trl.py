"""Every family under TRL: packed rows, LoRA, a policy that generates; one under all trainers."""

import json
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

import ssmzoo.auto  # noqa: F401
from ssmzoo.checkpoints.loader import AUTO_MAP
from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.family import families, load_family

pytestmark = [
    pytest.mark.xdist_group("trl"),  # importing TRL costs seconds
    # TRL 1.16 asks for checkpointing under the name that transformers calls old since 5.23
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* deprecated:FutureWarning"),
    # transformers' trainer pins memory, whether there is a GPU or not
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

NAMES = sorted(families())
TEXTS = {"text": ["one two three", "four", "five six seven eight", "ten"]}
PAIRS = {"prompt": ["a b", "c"], "chosen": [" yes", " it is"], "rejected": [" no", " n"]}
REPLIES = {"chosen": ["a yes", "c it is"], "rejected": ["a no", "c n"]}


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    return load_family(request.param)


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """A tiny model and its tokenizer, saved."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")
    }
    config = family.config(**{**family.tiny, "vocab_size": len(tokenizer), **special})
    path = tmp_path_factory.mktemp(family.name)
    family.causal_lm_class(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def adapters(family):
    return LoraConfig(target_modules=list(family.lora_targets), r=2, task_type="CAUSAL_LM")


def settings(kind, output_dir, **more):
    return kind(
        output_dir=str(output_dir),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )


def one_in_two(completions, **_):
    return [float(index % 2) for index, _ in enumerate(completions)]


def supervised(family, folder, out, **more):
    from trl import SFTConfig, SFTTrainer

    options = {"model": str(folder), "max_length": 32, **more}
    model, peft = options.pop("model"), options.pop("peft_config", None)
    return SFTTrainer(
        model=model,
        processing_class=None if isinstance(model, str) else byte_tokenizer(),
        args=settings(SFTConfig, out, **options),
        train_dataset=Dataset.from_dict(TEXTS),
        peft_config=peft,
    )


def by_path(family, folder, out):
    return supervised(family, folder, out)


def by_object(family, folder, out):
    return supervised(family, folder, out, model=loaded(folder))


def packed(family, folder, out):
    return supervised(family, folder, out, packing=True, packing_strategy="bfd", max_length=64)


def with_lora(family, folder, out):
    return supervised(family, folder, out, peft_config=adapters(family))


def preferences(family, folder, out, peft_config=None):
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=str(folder),
        args=settings(DPOConfig, out, max_length=32),
        train_dataset=Dataset.from_dict(PAIRS),
        peft_config=peft_config,
    )


def preferences_with_lora(family, folder, out):
    return preferences(family, folder, out, adapters(family))


def policy(family, folder, out):
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=str(folder),
        reward_funcs=one_in_two,
        args=settings(GRPOConfig, out, max_completion_length=6, num_generations=2),
        train_dataset=Dataset.from_dict({"prompt": PAIRS["prompt"]}),
    )


def reward(family, folder, out):
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=str(folder),
        args=settings(RewardConfig, out, max_length=32),
        train_dataset=Dataset.from_dict(REPLIES),
    )


OF_EVERY_FAMILY = (packed, with_lora, policy)
OF_ONE = (by_path, by_object, preferences, preferences_with_lora, reward)


CASES = [(name, make) for name in NAMES for make in OF_EVERY_FAMILY]
CASES += [("longhorn", make) for make in OF_ONE]


@pytest.mark.parametrize(("family", "make"), CASES, indirect=["family"])
@pytest.mark.long
def test_every_family_trains_under_trl(family, folder, make, tmp_path):
    trainer = make(family, folder, tmp_path)
    named = trainer.model.named_parameters()
    before = {name: p.detach().clone() for name, p in named if p.requires_grad}
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    after = dict(trainer.model.named_parameters())
    assert trainer.state.global_step == 2
    assert any(not torch.equal(after[name].detach(), before[name]) for name in before)


def test_rows_packed_by_trl_are_separate_sequences(family, folder, tmp_path):
    trainer = packed(family, folder, tmp_path)
    inputs = next(iter(trainer.get_train_dataloader()))
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    assert len(starts) == len(TEXTS["text"])
    model = loaded(folder).double()
    with torch.no_grad():
        together = model(ids, position_ids=positions).logits
        for start, end in pairwise([*starts, ids.shape[1]]):
            alone = model(ids[:, start:end]).logits
            torch.testing.assert_close(together[:, start:end], alone, rtol=1e-9, atol=1e-9)


def test_a_configuration_writes_no_code_but_the_loader(family, folder, tmp_path):
    config = AutoConfig.from_pretrained(folder)
    assert config.auto_map == {}
    config.auto_map["AutoModel"] = "another.Model"
    assert AutoConfig.from_pretrained(folder).auto_map == {}
    config.save_pretrained(tmp_path)
    for place in (tmp_path, folder):
        assert json.loads((place / "config.json").read_text())["auto_map"] == AUTO_MAP
