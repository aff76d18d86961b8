"""What the contract of each op is run on; its checks are ``ssmzoo.testing.OpContract``'s.

``test_<op>.py`` runs a class on the CPU's backends, ``interpreted_*.py`` on the Triton kernels.
"""

import itertools

import ssmzoo_kernels
from ssmzoo.testing import OpContract
from ssmzoo.testing.ops import PACKED
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
