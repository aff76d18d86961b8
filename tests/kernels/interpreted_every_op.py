"""Every registered op's Triton kernels under torch's own checks.

Not collected by name: ``test_triton_interpreted.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

from functools import partial

import pytest
import torch
from tests.kernels.contracts import DISTINCT
from tests.kernels.interpreter import repair

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = {"L": 2, "D": 2, "N": 2, "n": 2, "H": 2}

repair()

CHECKS = (
    "test_opcheck",
    "test_results_and_gradients_have_the_promised_strides",
    "test_rows_beyond_32_bits_are_read_rightly",
    "test_noncontiguous_inputs_give_the_same_results",
    "test_each_output_alone_has_the_reference_gradients",
    "test_sizes_of_zero_are_refused_or_give_what_the_reference_gives",
    "test_no_tokens_return_the_initial_state",
)
ZERO = "test_sizes_of_zero_are_refused_or_give_what_the_reference_gives"
# Newton's method is an option of the registered op; empty sums of exponentials have no kernel
LEFT_OUT = {
    ("NewtonFeedbackScan", "test_opcheck"),
    ("Vandermonde", ZERO),
    ("VandermondeState", ZERO),
}


def interpreted(contract):
    """Return a contract of the Triton backend alone, small."""
    drawn = contract.draw

    def draw(self, **sizes):
        sizes = {n: min(x, SMALL.get(n, x)) if isinstance(x, int) else x for n, x in sizes.items()}
        return drawn(self, **{**SMALL, **sizes})

    return type(contract.__name__, (contract,), {"backends": ("triton",), "draw": draw})


CASES = [
    pytest.param(small, check, case, id=f"{small.__name__}-{check}-{case}")
    for small in map(interpreted, DISTINCT)
    for check in CHECKS
    if check in small.checks() and (small.__name__, check) not in LEFT_OUT
    for case in small.cases(check)
]


@pytest.mark.parametrize(("contract", "check", "case"), CASES)
def test_the_contract(contract, check, case, monkeypatch):
    # whether a kernel changes its inputs; the rest is the registered op's, and the CPU's too
    schema = partial(torch.library.opcheck, test_utils="test_schema")
    monkeypatch.setattr(torch.library, "opcheck", schema)
    getattr(contract(), check)(case)
