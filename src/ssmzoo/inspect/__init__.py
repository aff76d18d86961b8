"""``ssmzoo inspect``: how far a model looks back, where its poles lie, how large its state is."""

from ssmzoo.inspect.entry import REPORT, inspect_model
from ssmzoo.inspect.measure import (
    Inspection,
    LayerInspection,
    effective_memory,
    measure,
    measured_response,
)

__all__ = [
    "REPORT",
    "Inspection",
    "LayerInspection",
    "effective_memory",
    "inspect_model",
    "measure",
    "measured_response",
]
