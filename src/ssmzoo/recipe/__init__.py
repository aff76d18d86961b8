"""The description of a training run: a closed, typed YAML file, checked before any work is done.

From outside: the names in ``__all__``.

Relative paths in a recipe are relative to the working directory; the copy that a run keeps holds
absolute ones. Numbers such as ``3e-4`` are numbers here, although YAML 1.1 reads them as text.
"""

from ssmzoo.environment.messages import missing

try:
    import pydantic  # noqa: F401
except ImportError as error:
    raise missing("recipes need pydantic", "train", error) from error

from ssmzoo.recipe.read import fields_of, load_recipe, read_sections, set_field
from ssmzoo.recipe.recipe import Recipe
from ssmzoo.recipe.sections import (
    HIGHER_IS_BETTER,
    AdapterSection,
    AlignSection,
    CardSection,
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    ModelSection,
    Section,
)
from ssmzoo.recipe.train import GroupSection, SegmentsSection, StopSection, TrainSection

__all__ = [
    "HIGHER_IS_BETTER",
    "AdapterSection",
    "AlignSection",
    "CardSection",
    "CheckpointSection",
    "DataSection",
    "EvalSection",
    "GroupSection",
    "LogSection",
    "ModelSection",
    "Recipe",
    "Section",
    "SegmentsSection",
    "StopSection",
    "TrainSection",
    "fields_of",
    "load_recipe",
    "read_sections",
    "set_field",
]
