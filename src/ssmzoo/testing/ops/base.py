"""What a contract calls: cases, tensors drawn for a declaration, results and their judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ssmzoo.testing.accuracy import assert_as_accurate
from ssmzoo.testing.ops import helpers
from ssmzoo_kernels import last_backend
from ssmzoo_kernels.declaration import Op

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


class Calls:
    """The cases of a contract's checks, and the calls that they make."""

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
            if name not in cls.all_checks():
                raise LookupError(f"exempt: {cls.__name__} has no check {name!r}")
            if not reason:
                raise ValueError(f"exempt: {name} needs a reason")
        if hasattr(cls, "declaration"):
            for name, check in cls.all_checks().items():
                if name in cls.exempt or not cls.cases(name):
                    setattr(cls, name, None)
                elif getattr(cls, name) is None:
                    setattr(cls, name, check)

    @classmethod
    def all_checks(cls) -> dict[str, Any]:
        """Return all checks by name, those that do not apply too."""
        classes = [x for x in cls.__mro__ if not hasattr(x, "declaration")]
        return {
            name: check
            for x in classes
            for name, check in vars(x).items()
            if name.startswith("test_")
        }

    @classmethod
    def checks(cls) -> list[str]:
        """Return the names of the checks that apply to the op."""
        return [name for name in cls.all_checks() if getattr(cls, name) is not None]

    @classmethod
    def cases(cls, name: str) -> list[Case]:
        """Return the calls of a check, none if it does not apply."""
        method: Any = cls.all_checks()[name]
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
        letters = {x for spec in op.inputs.values() for x in helpers.letters(spec)}
        found = {
            "gradients": op.gradients,
            "packing": op.packing is not None,
            "state": cls.state(),
            "batch": "B" in letters,
            "length": "L" in helpers.letters(next(iter(op.outputs.values()))),
        }
        return {name for name, there in found.items() if there}

    @classmethod
    def state(cls) -> str:
        """Return the name of the tensor that the final state continues, "" if there is none."""
        ends = [x for x in cls.declaration.outputs.values() if helpers.letters(x)[:1] == ("S",)]
        starts = [x for x in cls.declaration.inputs.values() if helpers.letters(x)[:1] == ("S",)]
        return starts[0].name if starts and ends and cls.declaration.packing else ""

    @classmethod
    def final(cls) -> int:
        """Return the place of the final state among the outputs."""
        specs = [helpers.letters(x)[:1] for x in cls.declaration.outputs.values()]
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
        return {n: helpers.cast(x, dtype) for n, x in drawn.items()}

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
        floating = [n for n, x in tensors.items() if x is not None and not helpers.is_integer(x)]
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
            helpers.close(name, got[name], expected[name], tolerance, least)

    def roundings(self, case: Case) -> float:
        """Return by how much a backend may differ from itself: not at all, where it is exact."""
        return 0.0 if case.backend in self.exact else 1e-6

    def pieces(self, tensors: Tensors, begin: int, end: int, row: int | None = None) -> Tensors:
        """Return some tokens of a call's tensors; of packed ones, with the state of a sequence."""
        found: Tensors = {}
        for name, x in tensors.items():
            dims = helpers.letters(self.declaration.inputs[name])
            if x is not None and "L" in dims:
                x = x.narrow(dims.index("L"), begin, end - begin)
            if x is not None and row is not None and dims[:1] == ("S",):
                x = x[row : row + 1]
            found[name] = x
        return found
