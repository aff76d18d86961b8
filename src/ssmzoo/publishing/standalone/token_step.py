"""It stands in for ``ssmzoo_kernels.token_step``, whose programs C runs: names, never called."""

from typing import Any

Program = Value = run_programs = Any
