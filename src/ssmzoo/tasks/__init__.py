"""Tasks, generated or loaded: for training, and for scoring with lm-eval.

From outside: every name in ``__all__``.

- ``load_task`` gives any task of ``SUPERVISED_TASKS`` to a trainer, in one form
  (:class:`Supervised`).
- ``mqar`` and ``induction_heads`` give token ids; recipes train on them.
- ``*_documents`` wrap the same problems as lm-eval data sets; ``eval/tasks/*.yaml`` name them.
- Labels of token ids follow Hugging Face's convention: ``labels[:, t]`` is what position ``t - 1``
  must predict, -100 where nothing is asked. Those of copying and delay stand at their position.
- Where a problem has filler, it is id 0: never a key, a value or a trigger. IH0
  (``induction_heads_zero``) has none, nor have the tokens that ``copying`` copies.
"""

from ssmzoo.tasks.common import IGNORED
from ssmzoo.tasks.induction import (
    induction_documents,
    induction_heads,
    induction_heads_zero,
    induction_text_documents,
    induction_zero_documents,
)
from ssmzoo.tasks.listops import LISTOPS_SYMBOLS, listops_trees
from ssmzoo.tasks.load import SUPERVISED_TASKS, length_argument, load_task, task_arguments
from ssmzoo.tasks.mad import (
    MAD_PROBLEMS,
    compression,
    fuzzy_recall,
    mad_documents,
    memorization,
    noisy_recall,
    selective_copying,
)
from ssmzoo.tasks.pathfinder import Pathfinder, pathfinder_images
from ssmzoo.tasks.recall import mqar, mqar_documents, recall_text_documents
from ssmzoo.tasks.state_tracking import state_tracking
from ssmzoo.tasks.supervised import Batch, Ragged, Supervised
from ssmzoo.tasks.symbols import symbol_count, symbol_tokenizer

__all__ = [
    "IGNORED",
    "LISTOPS_SYMBOLS",
    "MAD_PROBLEMS",
    "SUPERVISED_TASKS",
    "Batch",
    "Pathfinder",
    "Ragged",
    "Supervised",
    "compression",
    "fuzzy_recall",
    "induction_documents",
    "induction_heads",
    "induction_heads_zero",
    "induction_text_documents",
    "induction_zero_documents",
    "length_argument",
    "listops_trees",
    "load_task",
    "mad_documents",
    "memorization",
    "mqar",
    "mqar_documents",
    "noisy_recall",
    "pathfinder_images",
    "recall_text_documents",
    "selective_copying",
    "state_tracking",
    "symbol_count",
    "symbol_tokenizer",
    "task_arguments",
]
