"""transformers' common tests of models and configurations, on every family that is installed.

`make test-transformers` brings the tests and runs this file; `make test` does not collect it. What
is skipped, and what must fail, stands in listed.txt.
"""

import unittest
from fnmatch import fnmatchcase
from unittest import mock

import torch
from tests.transformers_common import absent, listed
from transformers.models.auto import modeling_auto

from ssmzoo import Family, families, load_family

absent.provide()
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402

# the names by which transformers' tests tell what inputs and which loss a class has
MAPPINGS = {
    "MODEL_MAPPING_NAMES": "model_class",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal_lm_class",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence_classification_class",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "token_classification_class",
}


class Tiny:
    """What transformers' tests ask for: a tiny configuration and a batch for it."""

    def __init__(self, family: Family):
        self.family = family
        self.batch_size, self.seq_length = 3, 7
        self.is_training = True
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.vocab_size = config.vocab_size

    def get_config(self):
        return self.family.config_class(**self.family.tiny)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = (self.batch_size, self.seq_length)
        mask = torch.ones(shape, dtype=torch.long)
        for row in range(self.batch_size):  # padded on the left, the first row not at all
            mask[row, :row] = 0
        ids = torch.randint(config.vocab_size, shape)
        return config, {"input_ids": ids, "attention_mask": mask}


class FamilyTests(ModelTesterMixin):
    """All tests of models and, beside them, those of configurations."""

    family: Family
    has_attentions = False
    # asked of models that are new by the year in their file's first line, which ours do not have
    test_can_init_all_missing_weights_before_2023 = True

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for mapping, role in MAPPINGS.items():
            kind = getattr(cls.family, role)
            if kind is not None:
                names = {cls.family.model_type: kind.__name__}
                cls.enterClassContext(mock.patch.dict(getattr(modeling_auto, mapping), names))

    def setUp(self):
        self.model_tester = Tiny(self.family)
        self.config_tester = ConfigTester(
            self,
            self.family.config_class,
            common_properties=["hidden_size", "num_hidden_layers"],
            **self.family.tiny,
        )

    def test_config(self):
        self.config_tester.run_common_tests()


def class_of(name: str) -> type[unittest.TestCase]:
    family = load_family(name)
    kinds = (getattr(family, role) for role in MAPPINGS.values())
    fields = {
        "__module__": __name__,
        "family": family,
        "all_model_classes": tuple(kind for kind in kinds if kind is not None),
    }
    return type(f"Test_{name}", (FamilyTests, unittest.TestCase), fields)


CLASSES = {f"Test_{name}": class_of(name) for name in families()}
globals().update(CLASSES)


def test_every_line_of_the_list_names_a_test():
    names = [
        f"{name}::{test}"
        for name, tests in CLASSES.items()
        for test in unittest.defaultTestLoader.getTestCaseNames(tests)
    ]
    for line in listed.read(listed.LIST):
        assert any(fnmatchcase(name, line.test) for name in names), line.test
