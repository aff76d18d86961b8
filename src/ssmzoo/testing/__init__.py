"""What a third party needs to hold its own family or kernel to the zoo's standards.

From outside: every name of this page.
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
