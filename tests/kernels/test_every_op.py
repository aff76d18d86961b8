"""What holds for all ops at once."""

import pytest
import torch
from tests.kernels.contracts import CONTRACTS
from tests.kernels.every_op import assert_compiled_gradients_are_the_references

import ssmzoo_kernels
from ssmzoo_kernels import innovation
from ssmzoo_kernels.declaration import declared


def test_every_declared_op_has_a_contract():
    known = {contract.declaration.name for contract in CONTRACTS}
    assert known == {name for name in declared() if hasattr(ssmzoo_kernels, name)}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own
def test_tensors_of_torch_func_transforms_are_not_cached():
    y = torch.randn(2, 23, 5)  # a batch and length of no other test
    with pytest.raises(NotImplementedError, match="innovation"):
        torch.func.jvp(lambda y: innovation(y, [0.5])[0], (y,), (y,))
    assert innovation(y, [0.5])[0].shape == (2, 23)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own
@pytest.mark.xdist_group("inductor")
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_gradients_compiled_by_inductor_are_the_references(backend):
    assert_compiled_gradients_are_the_references(backend)
