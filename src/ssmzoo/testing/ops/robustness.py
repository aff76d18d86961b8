"""Checks of what must not matter to an op: NaN elsewhere, memory, threads, compilers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssmzoo.testing.ops import helpers
from ssmzoo.testing.ops.base import NONFINITE, Calls, Case, Tensors, op_check
from ssmzoo_kernels import declaration, use_backend
from ssmzoo_kernels.declaration import Op


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


class Robustness(Calls):
    """The same numbers wherever they lie, and whoever runs the call."""

    @op_check()
    def test_nonfinite_values_reach_what_they_reach_in_the_reference(self, case: Case) -> None:
        """Outputs exactly, gradients at least; with NaN, inf and -inf in a row each."""
        whole = self.draw(**self.ragged, dtype=torch.float32)
        floating = [n for n, x in whole.items() if x is not None and not helpers.is_integer(x)]
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

    @op_check()
    def test_noncontiguous_inputs_give_the_same_results(self, case: Case) -> None:
        """Rows apart with NaN between, columns apart, one row for all, conjugates not yet taken."""
        tensors = self.draw(L=20, dtype=torch.float32)
        expected, tolerance = self.results(tensors, case), self.roundings(case)
        for change in (helpers.roomy, helpers.transposed, helpers.conjugate):
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
        """Torch's own checks of the registered ops: schema, autograd, fakes, tracing.

        The backend decides whether inputs change (the schema), and nothing else that is checked.
        """
        first = self.cases("test_opcheck")[0].backend
        only: dict[str, Any] = {} if case.backend == first else {"test_utils": "test_schema"}
        tensors, options, _ = next(self.kinds())
        watch = self.watched(tensors, case, helpers.contiguous, **options)
        for op, args in watch.seen.values():
            if op is self.declaration.registered._opoverload and self.declaration.gradients:
                args = tree_map_only(torch.Tensor, helpers.sloped, args)
            torch.library.opcheck(op, args, **only)

    def kinds(self) -> Iterator[tuple[Tensors, dict[str, Any], tuple[Callable[..., Any], ...]]]:
        """Yield calls, their options, and the layouts to try them in."""
        full = self.draw(L=5, dtype=torch.float32)
        yield full, {}, (helpers.contiguous, helpers.transposed, helpers.expanded)
        yield (
            full | dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional),
            {},
            (helpers.contiguous,),
        )
        if "packing" in self.has():
            yield (
                self.draw(packed=(1, 0, 6, 4), dtype=torch.float32),
                {"cu_seqlens": helpers.ends((1, 0, 6, 4))},
                (helpers.transposed,),
            )

    def watched(self, tensors: Tensors, case: Case, change: Any, **options: Any) -> Watch:
        """Watch a call, its tensors and its outputs' gradients laid out by a function."""
        sloped = self.sloped(tensors)
        leaves = {n: x.detach().requires_grad_() if n in sloped else x for n, x in tensors.items()}
        given = {
            n: x if x is None or helpers.is_integer(x) else change(x) for n, x in leaves.items()
        }
        # a plain call would not be registered
        always = mock.patch.object(declaration, "_PLAIN", ())
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
        apart = {
            n: x if x is None or helpers.is_integer(x) else helpers.far_apart(x)
            for n, x in tensors.items()
        }
        self.compare(self.results(apart, case), self.results(tensors, case), 1e-5)

    @op_check()
    def test_is_deterministic(self, case: Case) -> None:
        """The same call gives the same bits, on any number of threads; packed, too."""
        calls = [(self.draw(**self.many, dtype=torch.float32), {})]
        if "packing" in self.has():
            lengths = (100, 1, 0, 199)
            packed = self.draw(**{**self.many, "packed": lengths}, dtype=torch.float32)
            calls.append((packed, {"cu_seqlens": helpers.ends(lengths)}))
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
            first = next(
                n for n, x in leaves.items() if x is not None and not helpers.is_integer(x)
            )
            found = self.run(leaves | {first: torch.sin(leaves[first])}, case)
            return (torch.sin(found[0]), *found[1:])

        torch.compiler.reset()  # or earlier calls count against the limit of recompilations
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        expected = self.results(tensors, case, call=layer)
        self.compare(self.results(tensors, case, call=compiled), expected, 1e-6)
        with torch.no_grad():
            helpers.close("output 0", compiled(tensors, case)[0], expected["output 0"], 1e-6)

    @op_check(needs=("gradients",))
    def test_forward_mode_is_the_reference_alone(self, case: Case) -> None:
        """Other backends refuse it and name the reference, whose tangent is right."""
        tensors = self.draw(B=1, L=5)
        name = self.sloped(tensors)[0]
        x = tensors[name]
        with forward_ad.dual_level(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit")  # torch's own
            dual = tensors | {name: forward_ad.make_dual(x, torch.ones_like(x))}
            helpers.fails(NotImplementedError, "reference", lambda: self.run(dual, case))
            with use_backend("reference"):
                found = self.run(dual, case._replace(backend="auto"))[0]
            tangent = forward_ad.unpack_dual(found).tangent
        before, after = (
            self.run(tensors | {name: x + step}, case._replace(backend="reference"))[0]
            for step in (-1e-6, 1e-6)
        )
        assert tangent is not None
        helpers.close("tangent", tangent, (after - before) / 2e-6, 1e-6)

    @op_check(once=("forms",))
    def test_a_default_device_is_not_where_results_lie(self, case: Case) -> None:
        """A default device changes nothing."""
        tensors = self.draw(dtype=torch.float32)
        expected = self.run(tensors, case)
        with torch.device("meta"):  # what torch.set_default_device does, undone in whole
            found = self.run(tensors, case)
        for i, (got, known) in enumerate(zip(found, expected, strict=True)):
            helpers.close(f"output {i}", got, known, self.roundings(case))
