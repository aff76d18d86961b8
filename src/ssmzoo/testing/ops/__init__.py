"""The contract of an op: what every backend of an op that is declared keeps to.

A subclass of :class:`OpContract` is a test file: pytest finds its checks, one test a backend, form
and size. What a check needs (names, shapes, what may be absent, what is a state) it reads from the
op's declaration; checks that do not apply to an op are not there. A check fails with an
``AssertionError`` that names the argument or result.
"""

from ssmzoo.testing.ops.accuracy import Accuracy
from ssmzoo.testing.ops.base import PACKED, Case
from ssmzoo.testing.ops.mistakes import Mistakes
from ssmzoo.testing.ops.packed import PackedSequences
from ssmzoo.testing.ops.robustness import Robustness


class OpContract(Accuracy, PackedSequences, Robustness, Mistakes):
    """What every backend of an op keeps to; a subclass that names an op is a whole test.

    ::

        class TestLeakySum(OpContract):
            op = staticmethod(leaky_sum)
            declaration = LEAKY_SUM

    Attributes:
        op: The public function.
        declaration: Its declaration.
        backends: The backends to hold to it; those that the op does not have are passed over.
        forms: Options of the op by the name of the form that they choose; all checks run on each.
        sizes: A size for every letter of the declared shapes.
        shapes: Sizes that replace some of these, for the check of accuracy.
        packings: Lengths of packed sequences, and the sizes that they replace.
        cuts: Where a sequence of 40 tokens is cut to be continued.
        values: By tensor, what its random normal numbers become: ``{"A": lambda x: -x.exp()}``.
        complex: Tensors to draw complex where the declaration leaves that open.
        many: Sizes large enough for several threads.
        ragged: Sizes that fill no vector and no tile; B is the size of no other axis.
        exact: Backends whose results do not depend on how memory is aligned, in no bit.
        dtypes: What tensors may be beside float32.
        slack: Budgets that an error may take, as in :func:`assert_as_accurate`.
        unregistered: Backends that are torch's own ops, behind no registered one.
        nonfinite: Where NaN and infinity may spread beyond what they reach in the reference:
            "nowhere", over their "sequence", or over their "row" of a batch; "unseen" as "row",
            where the reference loses more, because it multiplies by 0 what no output sees.
        exempt: Checks that do not hold for the op, and why.
    """


__all__ = ["PACKED", "Case", "OpContract"]
