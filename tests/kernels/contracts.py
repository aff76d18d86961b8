"""What the contract of each op is run on; its checks are ``ssmzoo.testing.OpContract``'s.

``test_<op>.py`` runs a class on the CPU's backends, ``interpreted_*.py`` on the Triton kernels.
"""

import itertools

import torch

import ssmzoo_kernels
from ssmzoo.testing import OpContract
from ssmzoo.testing.ops import PACKED
from ssmzoo_kernels import companion_step
from ssmzoo_kernels.declaration import declared


def lengths(*counts, **others):
    """Return shapes of many lengths and fixed other sizes."""
    return [{"L": length, **others} for length in counts]


def grid(**axes):
    """Return shapes of all combinations of some sizes."""
    return [dict(zip(axes, x, strict=True)) for x in itertools.product(*axes.values())]


def op(name):
    """Return the attributes that name a public op and its declaration."""
    return staticmethod(getattr(ssmzoo_kernels, name)), declared()[name]


class CausalConv1d(OpContract):
    op, declaration = op("causal_conv1d")
    forms = {"silu": {"activation": "silu"}, "plain": {"activation": None}}
    sizes = {"B": 2, "L": 40, "D": 33, "K": 4}
    many = {"L": 300, "D": 200}
    shapes = (
        *lengths(0, 1, 2, 3, 4, 7, 64, 127, 128, 129, 300, D=20),
        *grid(L=[21], D=[1, 16, 63, 300], K=[1, 2, 3, 4, 5, 9]),
    )
    packings = (((0, 1, 2, 3, 4, 0, 130), {"D": 18}),)
    cuts = ((1,), (2,), (3,), (20,))
    exempt = {"test_state_is_float32": "the state is the last inputs, in their dtype"}


class LinearScan(OpContract):
    op, declaration = op("linear_scan")
    sizes = {"B": 2, "L": 40, "D": 33}
    shapes = (
        *lengths(0, 1, 2, 7, 63, 64, 65, 1000, D=5),
        *grid(L=[33], D=[0, 1, 3, 64, 129, 300]),
        {"B": 1, "L": 4999, "D": 3},  # long and narrow: cut into chunks
    )
    packings = (((0, 1, 16, 17, 0, 33, 2500), {"D": 3}),)
    cuts = ((1,), (20,), (39,))
    many = {"B": 1, "L": 30000, "D": 5}


class ComplexLinearScan(LinearScan):
    complex = ("a", "b", "initial_state")
    values = {"a": lambda a: a / 1.5}  # products that neither vanish nor explode
    dtypes = (torch.float64,)


class LonghornScan(OpContract):
    op, declaration = op("longhorn_scan")
    sizes = {"B": 2, "L": 40, "D": 33, "N": 4}
    shapes = (
        *lengths(0, 1, 2, 7, 15, 16, 17, 63, 64, 65, D=20),
        *grid(L=[33], D=[1, 16, 63, 130], N=[1, 3, 16, 17, 64]),
        {"B": 1, "L": 200, "D": 20, "N": 40},  # several chunks between saved states
    )
    packings = (
        (PACKED, {}),
        ((0, 48, 97, 0, 15, 40), {"D": 20, "N": 40}),
        ((17,) * 40, {"D": 6, "N": 5}),  # sequences that take turns
    )


class SelectiveScan(OpContract):
    op, declaration = op("selective_scan")
    forms = {"euler": {"discretization": "euler"}, "zoh": {"discretization": "zoh"}}
    sizes = {"B": 2, "L": 40, "D": 33, "N": 4}
    values = {"A": lambda A: -A.exp()}
    shapes = (
        *lengths(0, 1, 2, 15, 16, 17, 63, 64, 65, D=20),
        *grid(L=[18], D=[1, 16, 130], N=[1, 3, 16, 17]),
        {"B": 1, "L": 160, "D": 20, "N": 40},
    )
    packings = (
        (PACKED, {}),
        ((0, 48, 57, 0, 15, 40), {"D": 20, "N": 40}),
        ((5,) * 40, {"D": 6, "N": 5}),
    )


class Innovation(OpContract):
    op, declaration = op("innovation")
    forms = {
        name: {"relative": name == "relative", "weights": [0.4, 0.3, 0.2, 0.1]}
        for name in ("absolute", "relative")
    }
    sizes = {"B": 2, "L": 40, "D": 33, "k": 4}
    shapes = lengths(0, 1, 3, 4, 5, 63, 64, 65, 200, D=20)
    packings = (((5, 0, 3, 1, 70, 4), {"D": 18}),)
    cuts = ((1,), (3,), (4,), (2, 3, 20, 29))
    many = {"L": 300, "D": 400}
    exempt = {"test_state_is_float32": "the history is the last inputs, in their dtype"}

    @classmethod
    def state(cls):
        return "history"

    @classmethod
    def final(cls):
        return 1


class DiagonalStep(OpContract):
    op, declaration = op("diagonal_step")
    sizes = {"B": 2, "H": 5, "N": 3}
    shapes = ({"B": 1, "H": 1, "N": 1}, {"B": 3, "H": 2, "N": 8}, {"B": 1, "H": 5, "N": 33})
    many = {"B": 4, "H": 300, "N": 64}
    dtypes = (torch.float64,)


def one_companion_step(u, ring, position, a, b, d, *, backend="auto"):
    """As kernels have it, each channel with its own coefficients."""
    return companion_step(u, ring, position, a.mT, b.mT, d, backend=backend)


class CompanionStep(OpContract):
    op, declaration = staticmethod(one_companion_step), declared()["companion_step"]
    sizes = {"B": 3, "D": 4, "n": 5}
    shapes = grid(D=[1, 7, 8, 31, 32, 33, 64, 65, 150], n=[5])
    values = {"position": lambda x: torch.arange(len(x)), "a": lambda a: a / len(a)}
    many = {"B": 2, "D": 300, "n": 200}
    dtypes = (torch.float64,)
    exempt = {
        "test_bad_tensors_are_one_clear_error": "its coefficients are the public op's, turned",
        "test_mixed_dtypes_are_as_exact_as_the_reference": "the ring is float32 or float64",
    }
