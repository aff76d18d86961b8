"""Stand-ins for the modules that transformers' tests import and its source distribution lacks.

They hold nothing of transformers: mixins without a test, and a configuration's common fields with
values of our own.
"""

import sys
from types import ModuleType
from typing import Any

PACKAGE = "transformers_tests"

# fields of every configuration, none at its default
COMMON_FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["SomeModel"],
    "id2label": {0: "first", 1: "second", 2: "third"},
    "label2id": {"first": 0, "second": 1, "third": 2},
    "problem_type": "regression",
    "tie_word_embeddings": False,
    "bos_token_id": 5,
    "pad_token_id": 6,
    "eos_token_id": 7,
}


def provide() -> None:
    """Let the stand-ins be found under the names that the tests import."""
    _module("exporters")
    _module("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    _module("generation")
    _module("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    _module("utils")
    _module("utils.test_configuration_utils", config_common_kwargs=COMMON_FIELDS)


def _module(name: str, **contents: Any) -> None:
    module = ModuleType(f"{PACKAGE}.{name}", __doc__)
    vars(module).update(contents)
    sys.modules[module.__name__] = module
