"""Checks of an op's numbers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ssmzoo.testing.ops import helpers
from ssmzoo.testing.ops.base import Calls, Case, Tensors, op_check


class _Steeper(torch.autograd.Function):
    """The same numbers, a gradient that is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-4)


class Accuracy(Calls):
    """As exact as the reference, forward and backward."""

    @op_check(over="shapes")
    def test_outputs_and_gradients_are_as_exact_as_the_reference(self, case: Case) -> None:
        """In float32, for sizes around chunks, blocks and vectors."""
        self.judge(self.draw(**case.more), case, torch.float32)

    @op_check(once=("backends",))
    def test_small_errors_are_noticed(self, case: Case) -> None:
        """The check above sees an output off by 1e-5 of its size, a gradient by 1e-4, and NaN."""
        case = case._replace(backend="reference")
        tensors = self.draw(B=1, L=11)
        floating = (x for x in self.run(tensors, case) if not helpers.is_integer(x))
        names = {f"output {i}:": i for i, _ in enumerate(floating)}
        names |= {f"gradient of {n}:": n for n in self.sloped(tensors)}

        def wrong(leaves: Tensors, case: Case, place: Any = None) -> tuple[Tensor, ...]:
            if place in leaves:
                leaves = leaves | {place: _Steeper.apply(leaves[place])}
            found = [*self.run(leaves, case)]
            if place not in leaves:
                found[place] = found[place] * (1 + 1e-5)
            return (*found,)

        for name, place in names.items():
            helpers.fails(
                AssertionError,
                name,
                lambda x=place: self.judge(
                    tensors, case, torch.float32, functools.partial(wrong, place=x)
                ),
            )

    @op_check(over="dtypes")
    def test_other_dtypes_are_as_exact_as_the_reference(self, case: Case) -> None:
        """In float64 and in half precision, with results and gradients in the dtype."""
        self.judge(self.draw(), case, case.more)

    @op_check()
    def test_mixed_dtypes_are_as_exact_as_the_reference(self, case: Case) -> None:
        """As under autocast; each gradient has its tensor's dtype."""
        kinds = itertools.cycle((torch.bfloat16, torch.float32, torch.float16, torch.float64))
        tensors = {
            n: x if x is None else helpers.cast(x, torch.float32 if x.is_complex() else next(kinds))
            for n, x in self.draw().items()
        }
        self.judge(tensors, case, None)

    @op_check()
    def test_autocast_changes_nothing(self, case: Case) -> None:
        """Inside it, results and gradients have the same bits."""
        tensors = self.draw(dtype=torch.float32)
        expected = self.results(tensors, case)
        with torch.autocast("cpu", torch.bfloat16):
            self.compare(self.results(tensors, case), expected, 0)

    @op_check(over="optional")
    def test_optional_tensors_may_be_absent(self, case: Case) -> None:
        """Each of them, and all at once."""
        tensors = self.draw(L=20) | dict.fromkeys(case.more.split(","))
        self.judge(tensors, case, torch.float32)

    @op_check(needs=("gradients",))
    def test_gradients_match_finite_differences(self, case: Case) -> None:
        """Of all outputs to all tensors along random directions, in float64."""
        tensors = self.draw(B=1, L=11, D=2, N=3)
        names = self.sloped(tensors)

        def called(*given: Tensor) -> tuple[Tensor, ...]:
            return self.run(tensors | dict(zip(names, given, strict=True)), case)

        leaves = [tensors[n].requires_grad_() for n in names]
        torch.autograd.gradcheck(called, leaves, fast_mode=True)

    @op_check(needs=("gradients",))
    def test_each_output_alone_has_the_reference_gradients(self, case: Case) -> None:
        """A loss on one output, in float64."""
        tensors = self.draw(L=18)
        for only in range(len(self.run(tensors, case))):
            expected = self.results(tensors, case._replace(backend="reference"), only=only)
            self.compare(self.results(tensors, case, only=only), expected, 1e-12)

    @op_check(needs=("gradients",), over=[(n, *x) for n in (0, 1, 2) for x in ((2, 3), (1, 1))])
    def test_few_or_no_tokens_have_gradients(self, case: Case) -> None:
        """To every tensor, with all that is optional and without."""
        length, width, states = case.more
        full = self.draw(L=length, D=width, N=states)
        absent = (n for n, x in self.declaration.inputs.items() if x.optional)
        for tensors in (full, full | dict.fromkeys(absent)):
            expected = self.results(tensors, case._replace(backend="reference"))
            self.compare(self.results(tensors, case), expected, 1e-9, least=1e-11)

    @op_check()
    def test_sizes_of_zero_are_refused_or_give_what_the_reference_gives(self, case: Case) -> None:
        """Each size of its own, gradients included: tensors without numbers have no address."""
        specs = self.declaration.inputs.values()
        sizes = {letter: more for spec in specs for letter, more in sorted(spec.dims, reverse=True)}
        for letter in sorted(x for x, more in sizes.items() if x != "S" and more >= 0):
            size: dict[str, Any] = {letter: 0}
            tensors = self.draw(**size)
            try:
                expected = self.results(tensors, case._replace(backend="reference"))
            except (ValueError, TypeError) as error:
                helpers.fails(
                    type(error), self.declaration.name, lambda x=tensors: self.run(x, case)
                )
                continue
            try:
                self.compare(self.results(tensors, case), expected, 1e-9, least=1e-11)
            except AssertionError as error:
                raise AssertionError(f"{letter} = 0: {error}") from error
