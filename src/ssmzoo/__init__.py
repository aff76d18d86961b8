"""A zoo of state-space language models for the Hugging Face ecosystem.

Importing this module is silent and imports neither torch nor a plugin. ``import ssmzoo.auto``
registers every installed family with transformers' Auto classes.
"""

from ssmzoo.family import Converter, Family, Paper, families, load_family

__version__ = "0.1.0"

__all__ = ["Converter", "Family", "Paper", "families", "load_family"]
