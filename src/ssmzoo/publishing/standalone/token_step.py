"""It stands in for ``ssmzoo_kernels.token_step``, whose programs C runs: names for annotations."""

from typing import Any

Program = Value = Any
