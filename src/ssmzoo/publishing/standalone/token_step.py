"""It stands in for ``ssmzoo_kernels.token_step``, whose programs C runs: names, never called."""

from typing import Any

MOST_ROWS = 0  # for which there is a program
Program = Value = Any
