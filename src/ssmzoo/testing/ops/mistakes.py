"""Checks of an op's choices and errors."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ssmzoo.testing.ops import helpers
from ssmzoo.testing.ops.base import Calls, Case, Tensors, op_check
from ssmzoo_kernels import use_backend
from ssmzoo_kernels.declaration import Choice
from ssmzoo_kernels.dispatch import ALL
from ssmzoo_kernels.validation import Packing


class Mistakes(Calls):
    """Choices are obeyed; mistakes are one clear error."""

    @op_check(once=("forms",))
    def test_use_backend_chooses(self, case: Case) -> None:
        """Where the caller leaves the choice open; and the reference runs when named."""
        tensors = self.draw(L=3, dtype=torch.float32)
        with use_backend(case.backend):
            self.run(tensors, case._replace(backend="auto"))
        self.ran(case.backend)
        self.run(tensors, case._replace(backend="reference"))
        self.ran("reference")

    @op_check(once=("backends", "forms"))
    def test_bad_tensors_are_one_clear_error(self, case: Case) -> None:
        """Of the right type, in one line, and it names the argument."""
        tensors = self.draw(L=9, dtype=torch.float32)
        letters = [d for spec in self.declaration.inputs.values() for d in helpers.letters(spec)]

        def fails(kind: type[Exception], name: str, value: Any, *names: str) -> None:
            helpers.fails(kind, (name, *names), lambda: self.run(tensors | {name: value}, case))

        for name, spec in self.declaration.inputs.items():
            x = tensors[name]
            fails(TypeError, name, [1.0])
            if not spec.optional:
                fails(TypeError, name, None)
            fails(ValueError, name, x[None] if x.dim() < 2 else x[0], *tensors)
            if not helpers.is_integer(x):
                fails(TypeError, name, x.real.int(), *tensors)
            others = [n for n, other in self.declaration.inputs.items() if n != name]
            if others:
                fails(ValueError, name, x.to("meta"), *others)
            if name in self.declaration.least:
                fails(ValueError, name, x.narrow(-1, 0, 0))
            for axis, letter in enumerate(helpers.letters(spec)):
                if letters.count(letter) > 1 and x.shape[axis] > 1:
                    fails(ValueError, name, x.narrow(axis, 1, x.shape[axis] - 1), *others)

    @op_check(needs=("packing",), once=("forms",))
    def test_bad_boundaries_are_one_clear_error(self, case: Case) -> None:
        """Before anything runs, and inside a compiled graph, which was traced with right ones."""
        tensors = self.draw(packed=(5, 7))
        bare = tensors | dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional)

        def fails(kind: type[Exception], ends: Any, given: Tensors = bare) -> None:
            helpers.fails(kind, ("cu_seqlens",), lambda: self.run(given, case, cu_seqlens=ends))

        fails(TypeError, [0, 12])
        fails(TypeError, torch.tensor([0.0, 12.0]))
        for wrong in ([0], [[0, 12]], [1, 12], [0, 11], [0, 7, 3, 12], [0, 3, 300_000]):
            fails(ValueError, torch.tensor(wrong))
        fails(ValueError, torch.tensor([0, 12], device="meta"))
        fails(ValueError, torch.tensor([0, 9]), self.draw(B=2, L=9))
        if "state" in self.has():
            with_state = lambda: self.run(tensors, case, cu_seqlens=torch.tensor([0, 12]))  # noqa: E731
            helpers.fails(ValueError, (self.state(),), with_state)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda ends: self.run(bare, case, cu_seqlens=ends), fullgraph=True, backend="aot_eager"
        )
        right = torch.tensor([0, 3, 7, 12])
        expected = self.run(bare, case, cu_seqlens=right)
        helpers.close("output 0", compiled(right)[0], expected[0], 1e-12)
        for wrong in ([0, 7, 3, 12], [0, 3, 7, 10], [0, 3, 7, 300_000]):
            helpers.fails(ValueError, ("cu_seqlens",), lambda x=wrong: compiled(torch.tensor(x)))

    @op_check(needs=("packing",), once=("forms",))
    def test_integers_that_change_after_the_look_change_nothing(self, case: Case) -> None:
        """Another thread may write to them: what is checked must be what kernels read."""
        tensors = self.draw(packed=(5, 7))
        right = torch.tensor([0, 5, 12])
        expected = self.results(tensors, case, cu_seqlens=right)
        ends, given = right.clone(), dict(tensors)
        whole = [n for n, x in tensors.items() if x is not None and x.dtype is torch.int64]
        given |= {n: tensors[n].clone() for n in whole}
        written = [(given[n], tensors[n].flip(0)) for n in whole]
        look = Tensor.tolist

        def write() -> None:
            for x, other in ((ends, torch.tensor([0, 3, 12])), *written):
                x.numpy()[...] = other.numpy()  # which torch does not notice

        def watched(x: Tensor) -> Any:
            found = look(x)
            write()
            return found

        def call(leaves: Tensors, case: Case, **options: Any) -> tuple[Tensor, ...]:
            with mock.patch.object(Tensor, "tolist", watched):
                found = self.run(leaves, case, **options)
            write()  # before the backward reads them again
            return found

        self.compare(self.results(given, case, call=call, cu_seqlens=ends), expected, 0)

    @op_check(needs=("packing",), over=(torch.int32, torch.int64), once=("forms",))
    def test_boundaries_may_lie_apart_in_memory(self, case: Case) -> None:
        """Of either dtype; and may have been checked before, for many calls."""
        tensors = self.draw(packed=(3, 4, 5))
        apart = torch.tensor([[end, 99] for end in (0, 3, 7, 12)], dtype=case.more)[:, 0]
        expected = self.results(tensors, case, cu_seqlens=torch.tensor([0, 3, 7, 12]))
        for ends in (apart, Packing.of(apart, 12)):
            self.compare(self.results(tensors, case, cu_seqlens=ends), expected, 0)

    @op_check(once=("backends", "forms"))
    def test_bad_choices_are_one_clear_error(self, case: Case) -> None:
        """Values of no meaning, and those that only the reference knows."""
        tensors = self.draw(L=3, dtype=torch.float32)
        known = inspect.signature(type(self).op).parameters
        for name, choice in self.declaration.options.items():
            if isinstance(choice, Choice) and name in known:
                for wrong in ("nonsense", *choice.reference):
                    helpers.fails(
                        ValueError, name, lambda x={name: wrong}: self.run(tensors, case, **x)
                    )

    @op_check(once=("backends", "forms"))
    def test_bad_backends_are_one_clear_error(self, case: Case) -> None:
        """Those of no name, those that the op does not have, and those of another device."""
        tensors = self.draw(L=3, dtype=torch.float32)
        wrong = {"cuda", *ALL} - {*self.declaration.offers, *self.backends}
        for name in sorted(wrong | {"cuda"}):
            helpers.fails(
                ValueError, ("backend",), lambda x=name: self.run(tensors, case._replace(backend=x))
            )
