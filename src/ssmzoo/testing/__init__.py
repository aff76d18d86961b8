"""Check a family or an op, ours or a third party's, against the zoo's promises.

From outside: every name in ``__all__``.
"""

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo.testing.conformance import CheckResult, FamilyConformance, Report, check
from ssmzoo.testing.ops import OpContract
from ssmzoo.testing.oracle_file import load_oracle

__all__ = [
    "CheckResult",
    "FamilyConformance",
    "OpContract",
    "Report",
    "assert_as_accurate",
    "check",
    "load_oracle",
]
