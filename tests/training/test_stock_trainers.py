"""Trainers of transformers and TRL train accelerated models as they train stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from tests.stock_models import VOCABULARY, tiny
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ssmzoo
from ssmzoo.modeling.stock.classes import Accelerated
from ssmzoo_kernels.dispatch import watch

pytestmark = [
    pytest.mark.xdist_group("trl"),  # importing TRL costs seconds
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.* deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
MIXED = ("mamba2", "jamba", "qwen3_5_text")  # a pure model, and hybrids of both kinds of scan


def documents() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(2)
    lengths = (5, 19, 9, 12)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in lengths]
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in drawn]


def settings(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )


class Losses(TrainerCallback):
    """The losses that a trainer logs."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])


def alone(model: Any, rows: list[dict[str, list[int]]]) -> Tensor:
    """Return the mean loss of all predicted tokens, a document at a time."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("model_type", MIXED)
def test_the_flattening_collator_keeps_documents_apart(model_type: str, tmp_path: Path) -> None:
    rows, model, losses = documents(), tiny(model_type), Losses()
    with torch.no_grad():
        expected = float(alone(model, rows))
    ssmzoo.accelerate(model)
    trainer = Trainer(
        model,
        settings(TrainingArguments, tmp_path, logging_steps=1, logging_nan_inf_filter=False),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        data_collator=DataCollatorWithFlattening(),
        callbacks=[losses],
    )
    trainer.train()
    # the trainer logs to four digits or more
    assert abs(losses.found[0] - expected) <= 1e-4 * expected
    assert losses.found[1] < losses.found[0]


def test_trl_trains_adapters_that_stock_models_load(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from ssmzoo.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = tiny("mamba", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "base")
    ssmzoo.accelerate(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with watch() as ran:
        trainer = SFTTrainer(
            model,
            settings(SFTConfig, tmp_path / "run", max_length=32, bf16=False),
            train_dataset=Dataset.from_dict({"text": ["one two three", "four", "five six", "ten"]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["in_proj", "x_proj"], r=2),
        )
        trainer.train()
    assert ("selective_scan", "cpu") in ran
    tuned: Any = trainer.model
    assert any(isinstance(module, Accelerated) for module in tuned.modules())
    for name, weight in tuned.get_base_model().state_dict().items():
        if "lora" not in name:
            assert weight.equal(before[name.replace(".base_layer", "")])
    tuned.save_pretrained(tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(stock, str(tmp_path / "adapter")).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        ours, theirs = tuned.eval()(ids).logits, loaded(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() <= 1e-5 * scale
    assert (plain - theirs).abs().max() > 1e-3 * scale
