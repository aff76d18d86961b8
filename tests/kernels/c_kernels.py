"""Every op with a C kernel, briefly: as exact as the reference, and what NaN and infinity reach.

Not collected by name: ``test_targets.py`` runs this file, with the kernels compiled for other
targets. For this CPU each op's own tests say more.
"""

import os

import pytest
import torch
from tests.kernels.contracts import CONTRACTS

from ssmzoo_kernels import native

CHECKS = (
    "test_other_dtypes_are_as_exact_as_the_reference",
    "test_outputs_and_gradients_are_as_exact_as_the_reference",
    "test_nonfinite_values_reach_what_they_reach_in_the_reference",
)


def cases():
    for contract in CONTRACTS:
        # widths and state sizes that fill no vector and no tile
        briefly = type(
            contract.__name__,
            (contract,),
            {
                "backends": ("cpu",),
                "shapes": (contract.ragged,),
                "sizes": contract.sizes | contract.ragged,
                "dtypes": (torch.float64,),
            },
        )
        for check in sorted({*CHECKS} & {*briefly.checks()}):
            for case in briefly.cases(check):
                yield pytest.param(briefly, check, case, id=f"{contract.__name__}-{check}-{case}")


def test_the_kernels_are_compiled_for_the_target_that_was_asked_for():
    assert f"-march={os.environ.get('SSMZOO_ARCH') or 'native'}" in native._flags()


@pytest.mark.parametrize(("contract", "check", "case"), [*cases()])
def test_the_contract(contract, check, case):
    getattr(contract(), check)(case)
