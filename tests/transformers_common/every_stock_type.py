"""transformers' common tests on its own recurrent models, stock or on our kernels.

`test_stock_suite.py` runs this file twice and compares; SSMZOO_KERNELS=1 is the second time.
A model goes over to our kernels when it is first called, however a test made it.
"""

import os
import unittest

import pytest
import torch
from tests.stock_models import TYPES, VOCABULARY, settings
from tests.transformers_common import absent
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ssmzoo import accelerate, accelerated

absent.provide()
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402

KERNELS = os.environ.get("SSMZOO_KERNELS") == "1"
HEADS = (modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING)


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """Accelerate every recurrent model that is called, and count them."""
    seen = []

    def call(self, *args, **kwargs):
        if "stock: not accelerated" in accelerated(self).values():
            accelerate(self)
            seen.append(type(self))
        return nn.Module.__call__(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if KERNELS:
            patch.setattr(PreTrainedModel, "__call__", call, raising=False)
        yield
    assert bool(seen) == KERNELS


class Tiny:
    """What transformers' tests ask for: a tiny configuration and a batch for it."""

    def __init__(self, model_type):
        self.model_type = model_type
        self.batch_size, self.seq_length, self.is_training = 3, 7, True
        config = self.get_config()
        self.hidden_size, self.vocab_size = config.hidden_size, VOCABULARY
        self.num_hidden_layers = config.num_hidden_layers

    def get_config(self):
        return AutoConfig.for_model(self.model_type, **settings(self.model_type))

    def prepare_config_and_inputs_for_common(self):
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        for row in range(self.batch_size):  # padded on the left, the first row not at all
            mask[row, :row] = 0
        ids = torch.randint(3, VOCABULARY, mask.shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class StockTests(ModelTesterMixin):
    """All common tests of models."""

    model_type: str
    has_attentions = False

    def setUp(self):
        self.model_tester = Tiny(self.model_type)


def class_of(model_type):
    config = type(AutoConfig.for_model(model_type))
    kinds = tuple(heads[config] for heads in HEADS if config in heads)
    fields = {"__module__": __name__, "model_type": model_type, "all_model_classes": kinds}
    return type(f"Test_{model_type}", (StockTests, unittest.TestCase), fields)


globals().update({f"Test_{name}": class_of(name) for name in TYPES})
