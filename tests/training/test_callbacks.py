"""Parameters with a range stay in it under Trainer; under ours: test_many_processes.py."""

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from ssmzoo.family import load_family
from ssmzoo.training.callbacks import ProjectParameters

LAM = "model.layers.0.mixer.lam"
SMALL = 0.05  # of lambda's range, so that a few steps leave it


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forget the state that a Trainer of another test left in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_projected(lam):
    assert lam.max() == 0
    assert lam.min() == torch.tensor(-SMALL)


def trained(folder, callbacks, wrap=lambda model: model):
    family = load_family("coffee")
    torch.manual_seed(0)
    config = family.config("coffee-induction", lambda_max=SMALL)
    model = family.causal_lm_class(config)
    ids = torch.randint(8, (32, 8))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=12,
        learning_rate=0.02,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(wrap(model), options, train_dataset=rows, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.get_parameter(LAM).detach()


def test_trainer_projects_by_the_callback_and_not_without_it(tmp_path):
    assert_projected(trained(tmp_path, [ProjectParameters()]))
    free = trained(tmp_path, [])
    assert free.max() > 0
    assert free.min() < -SMALL


# peft calls transformers by a name that the next release drops
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_model_inside_others_is_found():
    family = load_family("coffee")
    model = family.causal_lm_class(family.config(**{**family.tiny, "lambda_param": "clamp"}))
    lora = LoraConfig(target_modules=list(family.lora_targets))
    for outer in (nn.Sequential(model), get_peft_model(model, lora)):
        with torch.no_grad():
            model.get_parameter("model.layers.1.mixer.lam").fill_(3)
        callback = ProjectParameters()
        callback.on_train_begin(None, None, None, model=outer)
        callback.on_optimizer_step(None, None, None, model=outer)
        assert not model.get_parameter("model.layers.1.mixer.lam").any()


def test_a_model_of_others_is_refused_before_the_first_step():
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(TypeError, match=r"needs a model of the zoo, .* got LlamaForCausalLM"):
        ProjectParameters().on_train_begin(None, None, None, model=LlamaForCausalLM(config))


def test_families_with_nothing_to_project_are_left_as_they_are():
    for name in ("longhorn", "dss", "rtf"):
        family = load_family(name)
        model = family.causal_lm_class(family.config(**family.tiny))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.project_parameters()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
