"""The contract of an op: what every backend of an op that is declared keeps to.

A subclass of :class:`OpContract` is a test file: pytest finds its checks, one test a backend, form
and size. What a check needs (names, shapes, what may be absent, what is a state) it reads from the
op's declaration; checks that do not apply to an op are not there. A check fails with an
``AssertionError`` that names the argument or result.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo_kernels import declaration, last_backend, use_backend
from ssmzoo_kernels.declaration import Argument, Choice, Op
from ssmzoo_kernels.dispatch import ALL
from ssmzoo_kernels.validation import Packing

Tensors: TypeAlias = dict[str, Any]  # a tensor or None, by name


class Case(NamedTuple):
    """One call of a check: a backend, a form of the op, and what the check varies."""

    backend: Any  # a Backend
    form: str
    more: Any = None

    def __str__(self) -> str:
        more, rows = self.more, ""
        if isinstance(more, tuple) and isinstance(more[0], tuple):
            rows, more = f"{len(more[0])}rows", more[1]
        if isinstance(more, dict):
            more = ",".join(x for x in (rows, *(f"{k}{v}" for k, v in more.items())) if x)
        parts = (self.backend, self.form, None if more is None else str(more))
        return "-".join(x for x in parts if x)


def op_check(
    needs: Sequence[str] = (),
    over: str | Sequence[Any] | None = None,
    once: Sequence[str] = (),
) -> Callable[[Any], Any]:
    """Mark a method as a check.

    Args:
        needs: What an op must have for it: "gradients", "length", "packing", "state".
        over: The attribute whose values it runs over, or the values.
        once: "backends", "forms": what it runs on the first of.
    """

    def mark(method: Any) -> Any:
        method.needs, method.over, method.once = needs, over, once
        return method

    return mark


DTYPES = (torch.float64, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 63, 64, 65)
NONFINITE = (float("nan"), float("inf"), -float("inf"))
PACKED = (0, 1, 16, 17, 0, 33, 66, 64)  # past 64, the tokens of a chunk


class OpContract:
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

    op: ClassVar[Callable[..., Any]]
    declaration: ClassVar[Op]
    backends: ClassVar[tuple[str, ...]] = ("eager", "cpu")
    forms: ClassVar[dict[str, dict[str, Any]]] = {"": {}}
    sizes: ClassVar[dict[str, Any]] = {"B": 2, "L": 40, "D": 18, "N": 4}
    shapes: ClassVar[Sequence[dict[str, Any]]] = tuple({"L": n} for n in LENGTHS)
    packings: ClassVar[Sequence[tuple[tuple[int, ...], dict[str, Any]]]] = ((PACKED, {}),)
    cuts: ClassVar[Sequence[tuple[int, ...]]] = ((1,), (16,), (20,), (3, 19, 39))
    values: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {}
    complex: ClassVar[tuple[str, ...]] = ()
    many: ClassVar[dict[str, Any]] = {"L": 300, "D": 200, "N": 16}
    ragged: ClassVar[dict[str, Any]] = {"B": 4, "L": 37, "D": 19, "N": 21}
    exact: ClassVar[tuple[str, ...]] = ("cpu",)
    dtypes: ClassVar[Sequence[torch.dtype]] = DTYPES
    slack: ClassVar[float] = 2.0
    unregistered: ClassVar[tuple[str, ...]] = ()
    nonfinite: ClassVar[str] = "nowhere"
    exempt: ClassVar[dict[str, str]] = {}

    # --- what pytest finds --------------------------------------------------------------------

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, reason in cls.exempt.items():
            if not callable(getattr(OpContract, name, None)):
                raise LookupError(f"exempt: {cls.__name__} has no check {name!r}")
            if not reason:
                raise ValueError(f"exempt: {name} needs a reason")
        if hasattr(cls, "declaration"):
            for name in cls.all_checks():
                if name in cls.exempt or not cls.cases(name):
                    setattr(cls, name, None)
                elif getattr(cls, name) is None:
                    setattr(cls, name, getattr(OpContract, name))

    @staticmethod
    def all_checks() -> list[str]:
        """Return the names of all checks, those that do not apply too."""
        return [name for name in vars(OpContract) if name.startswith("test_")]

    @classmethod
    def checks(cls) -> list[str]:
        """Return the names of the checks that apply to the op."""
        return [name for name in cls.all_checks() if getattr(cls, name) is not None]

    @classmethod
    def cases(cls, name: str) -> list[Case]:
        """Return the calls of a check, none if it does not apply."""
        method: Any = getattr(OpContract, name)
        if not {*method.needs} <= cls.has():
            return []
        over: Any = getattr(cls, method.over) if isinstance(method.over, str) else method.over
        over = over() if callable(over) else over
        backends = [x for x in cls.backends if x in cls.declaration.offers]
        return [
            Case(backend, form, more)
            for backend in backends[: 1 if "backends" in method.once else None]
            for form in [*cls.forms][: 1 if "forms" in method.once else None]
            for more in (over if over is not None else (None,))
        ]

    @classmethod
    def optional(cls) -> list[str]:
        """Return the tensors that may be absent, and last all of them."""
        names = [n for n, x in cls.declaration.inputs.items() if x.optional]
        return [*names, ",".join(names)] if len(names) > 1 else names

    @classmethod
    def has(cls) -> set[str]:
        """Return what the op has of that checks need."""
        op = cls.declaration
        letters = {x for spec in op.inputs.values() for x in _letters(spec)}
        found = {
            "gradients": op.gradients,
            "packing": op.packing is not None,
            "state": cls.state(),
            "batch": "B" in letters,
            "length": "L" in _letters(next(iter(op.outputs.values()))),
        }
        return {name for name, there in found.items() if there}

    @classmethod
    def state(cls) -> str:
        """Return the name of the tensor that the final state continues, "" if there is none."""
        ends = [x for x in cls.declaration.outputs.values() if _letters(x)[:1] == ("S",)]
        starts = [x for x in cls.declaration.inputs.values() if _letters(x)[:1] == ("S",)]
        return starts[0].name if starts and ends and cls.declaration.packing else ""

    @classmethod
    def final(cls) -> int:
        """Return the place of the final state among the outputs."""
        specs = [_letters(x)[:1] for x in cls.declaration.outputs.values()]
        return specs.index(("S",))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test of every case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(metafunc.function.__name__), ids=str)

    # --- calls ----------------------------------------------------------------------------------

    def draw(
        self, *, packed: Sequence[int] | None = None, dtype: torch.dtype = torch.float64, **sizes
    ) -> Tensors:
        """Return random tensors for a call, by name, with everything optional there."""
        known = {**self.sizes, **sizes}
        known |= {"S": known.get("B", 1)}
        if packed is not None:
            known |= {"B": 1, "L": sum(packed), "S": len(packed)}
        generator = torch.Generator().manual_seed(0)
        drawn: Tensors = {}
        for name, spec in self.declaration.inputs.items():
            shape = [known[letter] + more for letter, more in spec.dims]
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            if spec.kind == "complex" or name in self.complex:
                x = torch.complex(x, torch.randn(shape, generator=generator, dtype=torch.float64))
            drawn[name] = self.values[name](x) if name in self.values else x
        return {n: _cast(x, dtype) for n, x in drawn.items()}

    def run(self, tensors: Tensors, case: Case, **options: Any) -> tuple[Tensor, ...]:
        """Call the op as a case says; return what it returns, without what it left out."""
        form = self.forms[case.form]
        found = type(self).op(**tensors, **{**form, "backend": case.backend, **options})
        found = found if isinstance(found, tuple) else (found,)
        return tuple(x for x in found if x is not None)

    def results(
        self, tensors: Tensors, case: Case, only: int | None = None, call: Any = None, **options
    ) -> Tensors:
        """Return the outputs of a call and its gradients under a random loss, by name.

        Args:
            tensors: The tensors, by name.
            case: Backend and form.
            only: The one output that the loss reads.
            call: What is called in the place of :meth:`run`.
            options: More arguments of the op.
        """
        sloped = self.sloped(tensors)
        leaves = {n: x.detach().requires_grad_() if n in sloped else x for n, x in tensors.items()}
        outputs = (call or self.run)(leaves, case, **options)
        named: Tensors = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        if sloped:
            generator = torch.Generator().manual_seed(0)
            loss = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
            for i, y in enumerate(outputs):
                parts = torch.view_as_real(y) if y.is_complex() else y
                weights = torch.randn(parts.shape, generator=generator, dtype=torch.float64)
                if only in (None, i):
                    loss = loss + (parts.double() * weights.to(parts.device)).sum()
            found = torch.autograd.grad(loss, [leaves[n] for n in sloped], materialize_grads=True)
            named |= {f"gradient of {n}": g for n, g in zip(sloped, found, strict=True)}
        return named

    def sloped(self, tensors: Tensors) -> list[str]:
        """Return the names of the tensors of a call that have gradients."""
        return [n for n in self.declaration.gradients if tensors.get(n) is not None]

    def judge(
        self, tensors: Tensors, case: Case, dtype: torch.dtype | None, call: Any = None, **options
    ) -> None:
        """Hold outputs and gradients to the error that the reference has in a dtype."""
        floating = [n for n, x in tensors.items() if x is not None and not _is_integer(x)]
        pairs = [n for n in floating if tensors[n].is_complex()]
        graded = bool(self.declaration.gradients)

        def on(backend: str, run: Any) -> Callable[..., tuple[Tensor, ...]]:
            def called(*given: Tensor) -> tuple[Tensor, ...]:
                own = dict(zip(floating, given, strict=True))
                own |= {n: torch.view_as_complex(own[n]) for n in pairs}
                with torch.set_grad_enabled(graded):
                    found = run(tensors | own, case._replace(backend=backend), **options)
                found = [torch.view_as_real(y) if y.is_complex() else y for y in found]
                found = [y for y in found if y.is_floating_point()]
                # an op without gradients passes for one whose gradients are zero
                return (*(found if graded else (y + 0 * given[0].sum() for y in found)),)

            return called

        given = [tensors[n] for n in floating]
        given = [torch.view_as_real(x) if x.is_complex() else x for x in given]
        try:
            candidate, known = on(case.backend, call or self.run), on("reference", self.run)
            assert_as_accurate(candidate, known, given, dtype, self.slack)
        except AssertionError as error:
            text = str(error)
            for i, name in reversed([*enumerate(floating)]):
                text = text.replace(f"gradient of input {i}:", f"gradient of {name}:")
            raise AssertionError(text) from None
        self.ran(case.backend)

    def ran(self, backend: str) -> None:
        """Fail unless a backend was the last that ran for the op."""
        last = last_backend(self.declaration.name)
        if last != backend:
            raise AssertionError(f"{backend} was asked for, {last} ran")

    def compare(
        self, got: Tensors, expected: Tensors, tolerance: float, least: float = 0.0
    ) -> None:
        """Fail unless results are equal but for a share of their largest entry, or a number."""
        for name in expected:
            _close(name, got[name], expected[name], tolerance, least)

    def roundings(self, case: Case) -> float:
        """Return by how much a backend may differ from itself: not at all, where it is exact."""
        return 0.0 if case.backend in self.exact else 1e-6

    def pieces(self, tensors: Tensors, begin: int, end: int, row: int | None = None) -> Tensors:
        """Return some tokens of a call's tensors; of packed ones, with the state of a sequence."""
        found: Tensors = {}
        for name, x in tensors.items():
            dims = _letters(self.declaration.inputs[name])
            if x is not None and "L" in dims:
                x = x.narrow(dims.index("L"), begin, end - begin)
            if x is not None and row is not None and dims[:1] == ("S",):
                x = x[row : row + 1]
            found[name] = x
        return found

    # --- accuracy -------------------------------------------------------------------------------

    @op_check(over="shapes")
    def test_outputs_and_gradients_are_as_exact_as_the_reference(self, case: Case) -> None:
        """In float32, for sizes around chunks, blocks and vectors."""
        self.judge(self.draw(**case.more), case, torch.float32)

    @op_check(once=("backends",))
    def test_small_errors_are_noticed(self, case: Case) -> None:
        """The check above sees an output off by 1e-5 of its size, a gradient by 1e-4, and NaN."""
        case = case._replace(backend="reference")
        tensors = self.draw(B=1, L=11)
        floating = (x for x in self.run(tensors, case) if not _is_integer(x))
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
            _fails(
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
            n: x if x is None else _cast(x, torch.float32 if x.is_complex() else next(kinds))
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
        """Of all outputs to all tensors, in float64."""
        tensors = self.draw(B=1, L=11, D=2, N=3)
        names = self.sloped(tensors)

        def called(*given: Tensor) -> tuple[Tensor, ...]:
            return self.run(tensors | dict(zip(names, given, strict=True)), case)

        leaves = [tensors[n].requires_grad_() for n in names]
        torch.autograd.gradcheck(called, leaves)

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
                _fails(type(error), self.declaration.name, lambda x=tensors: self.run(x, case))
                continue
            try:
                self.compare(self.results(tensors, case), expected, 1e-9, least=1e-11)
            except AssertionError as error:
                raise AssertionError(f"{letter} = 0: {error}") from error

    # --- states and sequences ---------------------------------------------------------------------

    @op_check(needs=("state",))
    def test_state_is_float32(self, case: Case) -> None:
        """Of half-precision tensors too, and float64 of float64; the output keeps its dtype."""
        for dtype in (torch.float32, *self.dtypes):
            tensors = self.draw(dtype=dtype)
            exact = torch.promote_types(torch.float32, next(iter(tensors.values())).dtype)
            final = self.run(tensors, case)[self.final()]
            if final.dtype != exact:
                raise AssertionError(f"state: {final.dtype} for {dtype} tensors, not {exact}")

    @op_check(needs=("state",), over="cuts")
    def test_state_continues(self, case: Case) -> None:
        """Pieces with the state handed on equal the whole, gradients through the state included."""
        tensors = self.draw(L=40)
        cuts = (0, *case.more, 40)

        def pieces(leaves: Tensors, case: Case) -> tuple[Tensor, ...]:
            given, outputs = dict(leaves), []
            for begin, end in itertools.pairwise(cuts):
                found = self.run(self.pieces(given, begin, end), case)
                outputs.append(found[0])
                given[self.state()] = found[self.final()]
            return torch.cat(outputs, dim=1), given[self.state()]

        whole = self.results(tensors, case)
        self.compare(self.results(tensors, case, call=pieces), whole, 1e-12)

    @op_check(needs=("state",))
    def test_token_by_token_equals_one_pass(self, case: Case) -> None:
        """In float32, without gradients, as a model decodes."""
        tensors = self.draw(B=3, L=12, D=21, N=19, dtype=torch.float32)
        whole, outputs = self.run(tensors, case), []
        for t in range(12):
            found = self.run(self.pieces(tensors, t, t + 1), case)
            outputs.append(found[0])
            tensors[self.state()] = found[self.final()]
        _close("output 0", torch.cat(outputs, dim=1), whole[0], 1e-6)
        _close("state", tensors[self.state()], whole[self.final()], 1e-6)

    @op_check(needs=("state",))
    def test_no_tokens_return_the_initial_state(self, case: Case) -> None:
        """Unchanged in any bit."""
        tensors = self.draw(L=0)
        final = self.run(tensors, case)[self.final()]
        _close("state", final, tensors[self.state()], 0)

    @op_check(needs=("state", "gradients"), over=(0, 1, 40))
    def test_initial_state_has_the_reference_gradient(self, case: Case) -> None:
        """In float64; of no tokens, the gradient of the final state."""
        tensors = self.draw(L=case.more)
        name = f"gradient of {self.state()}"
        found = self.results(tensors, case)
        expected = self.results(tensors, case._replace(backend="reference"))
        self.compare(found, {name: expected[name]}, 1e-12)

    @op_check(needs=("packing",), over="packings")
    def test_packed_rows_are_as_exact_as_the_reference(self, case: Case) -> None:
        """With empty ones, and boundaries in, at and past a chunk."""
        lengths, sizes = case.more
        tensors = self.draw(packed=lengths, **sizes)
        self.judge(tensors, case, torch.float32, cu_seqlens=_ends(lengths))

    @op_check(needs=("packing",))
    def test_packed_rows_equal_single_rows(self, case: Case) -> None:
        """In float64, gradients included, with boundaries in int32."""
        lengths, sizes = self.packings[0]
        ends = _ends(lengths).tolist()
        tensors = self.draw(packed=lengths, **sizes)

        def singly(leaves: Tensors, case: Case) -> tuple[Tensor, ...]:
            rows = [
                self.run(self.pieces(leaves, a, b, row), case)
                for row, (a, b) in enumerate(itertools.pairwise(ends))
            ]
            specs = [_letters(x) for x in self.declaration.outputs.values()]
            places = [1 if "L" in letters else 0 for letters in specs] + [0]
            return tuple(
                torch.cat(parts, dim=place)
                for parts, place in zip(zip(*rows, strict=True), places, strict=False)
            )

        expected = self.results(tensors, case, call=singly)
        found = self.results(tensors, case, cu_seqlens=_ends(lengths).int())
        outputs = {n: x for n, x in expected.items() if n.startswith("output")}
        self.compare(found, outputs, 0 if case.backend in self.exact else 1e-12)
        self.compare(found, expected, 1e-12)  # sums over all tokens have another order

    @op_check(needs=("packing",))
    def test_packed_rows_do_not_leak(self, case: Case) -> None:
        """Neither outputs nor gradients, without a state; boundaries past 64 tokens."""
        if case.backend == self.backends[0]:
            OpContract.test_packed_rows_do_not_leak(self, case._replace(backend="reference"))
        ends = torch.tensor([0, 1, 1, 66, 130, 140])
        tensors = self.draw(packed=ends.diff().tolist(), D=3, N=2)
        tensors |= dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional)
        rows = [
            n
            for n, x in self.declaration.inputs.items()
            if "L" in _letters(x) and tensors[n] is not None
        ]
        sloped = self.sloped(tensors)
        leaves = {n: x.requires_grad_() if n in sloped else x for n, x in tensors.items()}
        out = self.run(leaves, case, cu_seqlens=ends)[0]
        for begin, end in itertools.pairwise(ends.tolist()):
            alone = self.pieces(tensors, begin, end)
            expected = self.run(alone, case, cu_seqlens=torch.tensor([0, end - begin]))[0]
            place = f"output 0 of tokens {begin} to {end}"
            _close(place, out[:, begin:end].detach(), expected.detach(), 1e-12)
            if not sloped or begin == end:
                continue
            loss = out[:, begin:end].abs().square().sum()
            names = [n for n in rows if n in sloped]
            grads = torch.autograd.grad(loss, [leaves[n] for n in names], retain_graph=True)
            for name, grad in zip(names, grads, strict=True):
                grad = grad.clone()
                grad[:, begin:end] = 0
                if grad.any():
                    raise AssertionError(
                        f"gradient of {name}: a loss on tokens {begin} to {end} reaches other rows"
                    )

    @op_check(needs=("batch",))
    def test_order_of_a_batch_does_not_matter(self, case: Case) -> None:
        """Rows in another order give the same results in that order."""
        tensors = self.draw(B=3, L=21, dtype=torch.float32)
        order = torch.tensor([2, 0, 1])
        specs = self.declaration.inputs
        turned = {
            n: x[order] if x is not None and _letters(specs[n])[:1] in (("B",), ("S",)) else x
            for n, x in tensors.items()
        }
        expected = self.run(tensors, case)
        for i, (got, known) in enumerate(zip(self.run(turned, case), expected, strict=True)):
            _close(f"output {i}", got, known[order], self.roundings(case))

    @op_check(needs=("length",))
    def test_later_tokens_do_not_change_earlier_outputs(self, case: Case) -> None:
        """In no bit, and later ones are changed."""
        tensors = self.draw(L=40)
        changed = {n: None if x is None else x.clone() for n, x in tensors.items()}
        for x in self.pieces(changed, 23, 24).values():
            if x is not None and x.dim() > 1 and x.shape[1] == 1:
                x += 1
        before, after = (self.run(x, case)[0] for x in (tensors, changed))
        _close("outputs before token 23", after[:, :23], before[:, :23], 0)
        if torch.equal(after[:, 23:], before[:, 23:]):
            raise AssertionError("output 0: tokens from 23 on do not depend on their inputs")

    # --- NaN and infinity -------------------------------------------------------------------------

    @op_check()
    def test_nonfinite_values_reach_what_they_reach_in_the_reference(self, case: Case) -> None:
        """Outputs exactly, gradients at least; with NaN, inf and -inf in a row each."""
        whole = self.draw(**self.ragged, dtype=torch.float32)
        floating = [n for n, x in whole.items() if x is not None and not _is_integer(x)]
        reached = False
        for name in floating:
            x = whole[name].clone()
            for i, value in enumerate(NONFINITE[: len(x)]):
                x[(i, *(size // 2 for size in x.shape[1:]))] = value
            tensors = whole | {name: x}
            known = self.results(tensors, case._replace(backend="reference"))
            for key, got in self.results(tensors, case).items():
                lost, expected = self.lost(key, got), self.lost(key, known[key])
                reached |= bool(lost.any())
                where = f"{key}, where {name} is not finite"
                exact = key.startswith("output") and self.nonfinite not in ("row", "unseen")
                alike = torch.equal(lost, expected) if exact else bool((lost >= expected).all())
                if not alike and self.nonfinite != "unseen":
                    raise AssertionError(f"{where}: other numbers are lost than in the reference")
                rows = min(len(x), 3)
                if len(got) == len(x) > rows and (lost[rows:] & ~expected[rows:]).any():
                    raise AssertionError(f"{where}: a row is lost that holds finite numbers")
        if not reached:
            raise AssertionError("no output is lost, whatever is not finite")

    def lost(self, key: str, x: Tensor) -> Tensor:
        """Tell which numbers of a result are not finite; which sequences, where it spreads."""
        bad = ~x.isfinite()
        return bad.any(1) if self.nonfinite == "sequence" and x.dim() == 3 else bad

    @op_check(needs=("packing",), over=NONFINITE)
    def test_nonfinite_values_stay_in_their_packed_row(self, case: Case) -> None:
        """In the second of three rows; the others stay finite."""
        ends = torch.tensor([0, 3, 7, 12])
        whole = self.draw(packed=(3, 4, 5), D=5, dtype=torch.float32)
        whole |= dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional)
        reached = False
        for name, spec in self.declaration.inputs.items():
            x = whole[name]
            if x is None or not spec.is_row:
                continue
            tensors = whole | {name: x.index_fill(1, torch.tensor([5]), case.more)}
            known = self.run(tensors, case._replace(backend="reference"), cu_seqlens=ends)
            for got, expected in zip(self.run(tensors, case, cu_seqlens=ends), known, strict=True):
                alike = torch.equal(got.isfinite(), expected.isfinite())
                if not alike and self.nonfinite == "nowhere":
                    raise AssertionError(f"{name}: other numbers are lost than in the reference")
                rows = got if len(got) == 3 else got[0].tensor_split(ends[1:-1])
                reached |= not bool(rows[1].isfinite().all())
                if not (rows[0].isfinite().all() and rows[2].isfinite().all()):
                    raise AssertionError(f"{name}: what is not finite reaches another row")
        if not reached:
            raise AssertionError("no output is lost, whatever is not finite")

    # --- memory -----------------------------------------------------------------------------------

    @op_check()
    def test_noncontiguous_inputs_give_the_same_results(self, case: Case) -> None:
        """Rows apart with NaN between, columns apart, one row for all, conjugates not yet taken."""
        tensors = self.draw(L=20, dtype=torch.float32)
        expected, tolerance = self.results(tensors, case), self.roundings(case)
        for change in (_roomy, _turned, _conjugate):
            changed = {n: None if x is None else change(x) for n, x in tensors.items()}
            self.compare(self.results(changed, case), expected, tolerance)

    @op_check()
    def test_results_and_gradients_have_the_promised_strides(self, case: Case) -> None:
        """As the fake functions promise, which compiled graphs rely on; whatever the inputs'."""
        for tensors, options, changes in self.kinds():
            for change in changes:
                watch = self.watched(tensors, case, change, **options)
                if not watch.seen and case.backend not in self.unregistered:
                    raise AssertionError("no registered op ran")

    @op_check(once=("forms",))
    def test_opcheck(self, case: Case) -> None:
        """Torch's own checks of the registered ops: schema, autograd, fakes, tracing."""
        tensors, options, _ = next(self.kinds())
        watch = self.watched(tensors, case, _contiguous, **options)
        for op, args in watch.seen.values():
            if op is self.declaration.registered._opoverload and self.declaration.gradients:
                args = tree_map_only(torch.Tensor, _sloped, args)
            torch.library.opcheck(op, args)

    def kinds(self) -> Iterator[tuple[Tensors, dict[str, Any], tuple[Callable[..., Any], ...]]]:
        """Yield calls, their options, and the layouts to try them in."""
        full = self.draw(L=5, dtype=torch.float32)
        yield full, {}, (_contiguous, _turned, _expanded)
        yield (
            full | dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional),
            {},
            (_contiguous,),
        )
        if "packing" in self.has():
            yield (
                self.draw(packed=(1, 0, 6, 4), dtype=torch.float32),
                {"cu_seqlens": _ends((1, 0, 6, 4))},
                (_turned,),
            )

    def watched(self, tensors: Tensors, case: Case, change: Any, **options: Any) -> Watch:
        """Watch a call, its tensors and its outputs' gradients laid out by a function."""
        sloped = self.sloped(tensors)
        leaves = {n: x.detach().requires_grad_() if n in sloped else x for n, x in tensors.items()}
        given = {n: x if x is None or _is_integer(x) else change(x) for n, x in leaves.items()}
        # a plain call would not be registered
        always = mock.patch.object(declaration, "needs_library", return_value=True)
        with always, Watch(self.declaration) as watch:
            found = self.run(given, case, **options)
            if sloped:
                loss: Any = sum((y * change(torch.ones_like(y))).abs().sum() for y in found)
                torch.autograd.grad(loss, [leaves[n] for n in sloped])
        return watch

    @op_check()
    def test_rows_beyond_32_bits_are_read_rightly(self, case: Case) -> None:
        """Rows that lie 2^30 numbers apart, in memory that only they take."""
        tensors = self.draw(B=1, L=4, D=2, N=2, dtype=torch.float32)
        apart = {n: x if x is None or _is_integer(x) else _far_apart(x) for n, x in tensors.items()}
        self.compare(self.results(apart, case), self.results(tensors, case), 1e-5)

    # --- the same numbers again -----------------------------------------------------------------

    @op_check()
    def test_is_deterministic(self, case: Case) -> None:
        """The same call gives the same bits, on any number of threads; packed, too."""
        calls = [(self.draw(**self.many, dtype=torch.float32), {})]
        if "packing" in self.has():
            lengths = (100, 1, 0, 199)
            packed = self.draw(**{**self.many, "packed": lengths}, dtype=torch.float32)
            calls.append((packed, {"cu_seqlens": _ends(lengths)}))
        before = torch.get_num_threads()
        for tensors, options in calls:
            results = []
            try:
                for count in (1, 2, 3, 3) if case.backend == "cpu" else (before, before):
                    torch.set_num_threads(count)
                    results.append(self.results(tensors, case, **options))
            finally:
                torch.set_num_threads(before)
            for other in results[1:]:
                self.compare(other, results[0], 0)

    @op_check(once=("backends", "forms"))
    def test_compiles_without_a_graph_break(self, case: Case) -> None:
        """Into one graph, with the same outputs and gradients; without gradients, too."""
        tensors = self.draw(L=20, D=6, N=3, dtype=torch.float32)

        def layer(leaves: Tensors, case: Case) -> tuple[Tensor, ...]:
            first = next(n for n, x in leaves.items() if x is not None and not _is_integer(x))
            found = self.run(leaves | {first: torch.sin(leaves[first])}, case)
            return (torch.sin(found[0]), *found[1:])

        torch.compiler.reset()  # or earlier calls count against the limit of recompilations
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        expected = self.results(tensors, case, call=layer)
        self.compare(self.results(tensors, case, call=compiled), expected, 1e-6)
        with torch.no_grad():
            _close("output 0", compiled(tensors, case)[0], expected["output 0"], 1e-6)

    @op_check(needs=("gradients",))
    def test_forward_mode_is_the_reference_alone(self, case: Case) -> None:
        """Other backends refuse it and name the reference, whose tangent is right."""
        tensors = self.draw(B=1, L=5)
        name = self.sloped(tensors)[0]
        x = tensors[name]
        with forward_ad.dual_level(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit")  # torch's own
            dual = tensors | {name: forward_ad.make_dual(x, torch.ones_like(x))}
            _fails(NotImplementedError, "reference", lambda: self.run(dual, case))
            with use_backend("reference"):
                found = self.run(dual, case._replace(backend="auto"))[0]
            tangent = forward_ad.unpack_dual(found).tangent
        before, after = (
            self.run(tensors | {name: x + step}, case._replace(backend="reference"))[0]
            for step in (-1e-6, 1e-6)
        )
        assert tangent is not None
        _close("tangent", tangent, (after - before) / 2e-6, 1e-6)

    @op_check(once=("forms",))
    def test_a_default_device_is_not_where_results_lie(self, case: Case) -> None:
        """A default device changes nothing."""
        tensors = self.draw(dtype=torch.float32)
        expected = self.run(tensors, case)
        with torch.device("meta"):  # what torch.set_default_device does, undone in whole
            found = self.run(tensors, case)
        for i, (got, known) in enumerate(zip(found, expected, strict=True)):
            _close(f"output {i}", got, known, self.roundings(case))

    # --- choices and mistakes -------------------------------------------------------------------

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
        letters = [d for spec in self.declaration.inputs.values() for d in _letters(spec)]

        def fails(kind: type[Exception], name: str, value: Any, *names: str) -> None:
            _fails(kind, (name, *names), lambda: self.run(tensors | {name: value}, case))

        for name, spec in self.declaration.inputs.items():
            x = tensors[name]
            fails(TypeError, name, [1.0])
            if not spec.optional:
                fails(TypeError, name, None)
            fails(ValueError, name, x[None] if x.dim() < 2 else x[0], *tensors)
            if not _is_integer(x):
                fails(TypeError, name, x.real.int(), *tensors)
            others = [n for n, other in self.declaration.inputs.items() if n != name]
            if others:
                fails(ValueError, name, x.to("meta"), *others)
            if name in self.declaration.least:
                fails(ValueError, name, x.narrow(-1, 0, 0))
            for axis, letter in enumerate(_letters(spec)):
                if letters.count(letter) > 1 and x.shape[axis] > 1:
                    fails(ValueError, name, x.narrow(axis, 1, x.shape[axis] - 1), *others)

    @op_check(needs=("packing",), once=("forms",))
    def test_bad_boundaries_are_one_clear_error(self, case: Case) -> None:
        """Before anything runs, and inside a compiled graph, which was traced with right ones."""
        tensors = self.draw(packed=(5, 7))
        bare = tensors | dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional)

        def fails(kind: type[Exception], ends: Any, given: Tensors = bare) -> None:
            _fails(kind, ("cu_seqlens",), lambda: self.run(given, case, cu_seqlens=ends))

        fails(TypeError, [0, 12])
        fails(TypeError, torch.tensor([0.0, 12.0]))
        for wrong in ([0], [[0, 12]], [1, 12], [0, 11], [0, 7, 3, 12], [0, 3, 300_000]):
            fails(ValueError, torch.tensor(wrong))
        fails(ValueError, torch.tensor([0, 12], device="meta"))
        fails(ValueError, torch.tensor([0, 9]), self.draw(B=2, L=9))
        if "state" in self.has():
            with_state = lambda: self.run(tensors, case, cu_seqlens=torch.tensor([0, 12]))  # noqa: E731
            _fails(ValueError, (self.state(),), with_state)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda ends: self.run(bare, case, cu_seqlens=ends), fullgraph=True, backend="aot_eager"
        )
        right = torch.tensor([0, 3, 7, 12])
        expected = self.run(bare, case, cu_seqlens=right)
        _close("output 0", compiled(right)[0], expected[0], 1e-12)
        for wrong in ([0, 7, 3, 12], [0, 3, 7, 10], [0, 3, 7, 300_000]):
            _fails(ValueError, ("cu_seqlens",), lambda x=wrong: compiled(torch.tensor(x)))

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
                    _fails(ValueError, name, lambda x={name: wrong}: self.run(tensors, case, **x))

    @op_check(once=("backends", "forms"))
    def test_bad_backends_are_one_clear_error(self, case: Case) -> None:
        """Those of no name, those that the op does not have, and those of another device."""
        tensors = self.draw(L=3, dtype=torch.float32)
        wrong = {"cuda", *ALL} - {*self.declaration.offers, *self.backends}
        for name in sorted(wrong | {"cuda"}):
            _fails(
                ValueError, ("backend",), lambda x=name: self.run(tensors, case._replace(backend=x))
            )


def _letters(spec: Argument) -> tuple[str, ...]:
    return tuple(letter for letter, _ in spec.dims)


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor in a dtype, complex ones in the one that goes with it."""
    if x is None or _is_integer(x):
        return x
    if x.is_complex():
        wide = torch.promote_types(dtype, torch.float32)
        return x.to(torch.promote_types(wide, torch.complex64))
    return x.to(dtype)


def _ends(lengths: Sequence[int]) -> Tensor:
    """Return the boundaries of packed sequences of some lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def _sloped(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(not _is_integer(x))


# --- layouts: the same values, elsewhere in memory ------------------------------------------------


def _contiguous(x: Tensor) -> Tensor:
    return x


def _roomy(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie apart, with NaN between."""
    if x.dim() < 1 or _is_integer(x):
        return x
    room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    return room[..., 1 : x.shape[-1] + 1].copy_(x)


def _turned(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is not the densest."""
    if x.dim() < 2:
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _conjugate(x: Tensor) -> Tensor:
    """Return a complex tensor whose conjugate is not yet taken."""
    return x.conj_physical().conj() if x.is_complex() else x


def _expanded(x: Tensor) -> Tensor:
    """Return a tensor whose first entry stands for all, by a stride of zero."""
    return x[:1].expand_as(x)


def _far_apart(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie 2^30 numbers apart, in memory that only they take."""
    if x.dim() < 3:
        return x
    apart = 2**30
    span = (x.shape[1] - 1) * apart + x[0, 0].numel()
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    )  # MAP_NORESERVE: untouched pages are free
    memory = mmap.mmap(-1, span * x.dtype.itemsize, flags=flags)
    inner = x[0, 0].contiguous().stride()
    flat = torch.frombuffer(memory, dtype=x.dtype)
    return flat.as_strided(x.shape, (span, apart, *inner)).copy_(x)


class _Steeper(torch.autograd.Function):
    """The same numbers, a gradient that is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-4)


class Watch(TorchDispatchMode):
    """Compares what an op's registered functions return with what their fakes promise.

    Strides included: ``torch.library.opcheck`` compares those of CUDA tensors only.
    """

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.names = {f"ssmzoo::{op.name}", f"ssmzoo::{op.name}_backward"}
        self.seen: dict[str, tuple[Any, Any]] = {}  # the first call of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; where it is one of the declared op's, hold its results to its fake's."""
        if func._schema.name not in self.names:
            return func(*args, **(kwargs or {}))
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        with FakeTensorMode() as mode:
            promised = func(*tree_map_only(torch.Tensor, mode.from_tensor, kept))
        found = func(*args)
        pairs = zip(tree_leaves(found), tree_leaves(promised), strict=True)
        for i, (real, fake) in enumerate(pairs):
            if _layout(real) != _layout(fake):
                raise AssertionError(
                    f"{func}, result {i} lies as {_layout(real)}; its fake promised {_layout(fake)}"
                )
        self.seen.setdefault(func._schema.name, (func, kept))
        return found


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Return what a compiled graph takes for granted about a tensor; strides that matter only."""
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel()]
    return (*x.shape,), x.dtype, strides, x.storage_offset(), x.is_conj(), x.is_neg()


def _close(name: str, got: Tensor, expected: Tensor, tolerance: float, least: float = 0.0) -> None:
    """Fail unless two results are equal but for a share of the largest entry."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {list(got.shape)} {got.dtype}, not {list(expected.shape)} {expected.dtype}"
        )
    if tolerance == 0:
        if not torch.equal(got, expected):
            raise AssertionError(f"{name}: other bits")
    elif expected.numel():
        wide = torch.promote_types(torch.float64, expected.dtype)
        got, expected = got.detach().to(wide), expected.detach().to(wide)
        error, allowed = (got - expected).abs().max(), tolerance * expected.abs().max() + least
        if not error <= allowed:
            raise AssertionError(f"{name}: error {error:.2e} exceeds {allowed:.2e}")


def _fails(kind: type[Exception], names: str | Sequence[str], call: Callable[[], Any]) -> None:
    """Fail unless a call raises an error of a type, in one line that has one of some words."""
    words = (names,) if isinstance(names, str) else names
    try:
        call()
    except kind as error:
        text = str(error)
        if "\n" in text or not any(word in text for word in words):
            raise AssertionError(
                f"an error in one line that names {words[0]}, got: {text}"
            ) from None
    except Exception as error:
        raise AssertionError(
            f"{words[0]}: {type(error).__name__}, not {kind.__name__}: {error}"
        ) from error
    else:
        raise AssertionError(f"{words[0]}: no {kind.__name__}")
