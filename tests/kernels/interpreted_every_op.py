"""Every registered op's Triton kernels under torch's own checks and under inductor.

Not collected by name: ``test_every_op.py`` runs this file in a process of its own, where
``TRITON_INTERPRET=1`` holds before anything imports triton.
"""

import pytest
from tests.kernels.interpreter import repair
from tests.kernels.registered import (
    assert_compiled_gradients_are_the_references,
    assert_far_rows_are_read_rightly,
    assert_layouts_are_as_promised,
    assert_opcheck_passes,
)

# numpy warns where a GPU goes to infinity, as the formulas mean it to
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(1200),
]
SMALL = {"L": 2, "D": 2, "N": 2}

repair()


def test_registered_ops_pass_opcheck_and_return_the_strides_that_their_fakes_promise():
    assert_opcheck_passes(assert_layouts_are_as_promised(("triton",), **SMALL))


@pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch's own
def test_gradients_compiled_by_inductor_are_the_references():
    assert_compiled_gradients_are_the_references("triton", **SMALL)


def test_rows_beyond_32_bits_are_read_rightly():
    assert_far_rows_are_read_rightly("triton")
