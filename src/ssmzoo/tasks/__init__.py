"""Recall problems and local text, made from a seed: for training, and for scoring with lm-eval.

- ``mqar`` and ``induction_heads`` give token ids; recipes train on them.
- ``*_documents`` wrap the same problems as lm-eval data sets; ``eval/tasks/*.yaml`` name them.
- Labels follow Hugging Face's convention: ``labels[:, t]`` is what position ``t - 1`` must predict,
  -100 where nothing is asked.
- In every problem, id 0 is filler: never a key, a value, a trigger or noise.
"""

from ssmzoo.tasks.common import IGNORED
from ssmzoo.tasks.induction import (
    induction_documents,
    induction_heads,
    induction_text_documents,
)
from ssmzoo.tasks.recall import mqar, mqar_documents
from ssmzoo.tasks.recall_text import recall_text_documents
from ssmzoo.tasks.symbols import symbol_count, symbol_tokenizer
from ssmzoo.tasks.text import cut, read_documents, text_documents

__all__ = [
    "IGNORED",
    "cut",
    "induction_documents",
    "induction_heads",
    "induction_text_documents",
    "mqar",
    "mqar_documents",
    "read_documents",
    "recall_text_documents",
    "symbol_count",
    "symbol_tokenizer",
    "text_documents",
]
