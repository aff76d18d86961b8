"""Checks of an op along sequences."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ssmzoo.testing.ops import helpers
from ssmzoo.testing.ops.base import Calls, Case, Tensors, op_check


class PackedSequences(Calls):
    """States that continue, and packed rows that know nothing of each other."""

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
        helpers.close("output 0", torch.cat(outputs, dim=1), whole[0], 1e-6)
        helpers.close("state", tensors[self.state()], whole[self.final()], 1e-6)

    @op_check(needs=("state",))
    def test_no_tokens_return_the_initial_state(self, case: Case) -> None:
        """Unchanged in any bit."""
        tensors = self.draw(L=0)
        final = self.run(tensors, case)[self.final()]
        helpers.close("state", final, tensors[self.state()], 0)

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
        self.judge(tensors, case, torch.float32, cu_seqlens=helpers.ends(lengths))

    @op_check(needs=("packing",))
    def test_packed_rows_equal_single_rows(self, case: Case) -> None:
        """In float64, gradients included, with boundaries in int32."""
        lengths, sizes = self.packings[0]
        ends = helpers.ends(lengths).tolist()
        tensors = self.draw(packed=lengths, **sizes)

        def singly(leaves: Tensors, case: Case) -> tuple[Tensor, ...]:
            rows = [
                self.run(self.pieces(leaves, a, b, row), case)
                for row, (a, b) in enumerate(itertools.pairwise(ends))
            ]
            specs = [helpers.letters(x) for x in self.declaration.outputs.values()]
            places = [1 if "L" in letters else 0 for letters in specs] + [0]
            return tuple(
                torch.cat(parts, dim=place)
                for parts, place in zip(zip(*rows, strict=True), places, strict=False)
            )

        expected = self.results(tensors, case, call=singly)
        found = self.results(tensors, case, cu_seqlens=helpers.ends(lengths).int())
        outputs = {n: x for n, x in expected.items() if n.startswith("output")}
        self.compare(found, outputs, 0 if case.backend in self.exact else 1e-12)
        self.compare(found, expected, 1e-12)  # sums over all tokens have another order

    @op_check(needs=("packing",))
    def test_packed_rows_do_not_leak(self, case: Case) -> None:
        """Neither outputs nor gradients, without a state; boundaries past 64 tokens."""
        if case.backend == self.backends[0]:
            PackedSequences.test_packed_rows_do_not_leak(self, case._replace(backend="reference"))
        ends = torch.tensor([0, 1, 1, 66, 130, 140])
        tensors = self.draw(packed=ends.diff().tolist(), D=3, N=2)
        tensors |= dict.fromkeys(n for n, x in self.declaration.inputs.items() if x.optional)
        rows = [
            n
            for n, x in self.declaration.inputs.items()
            if "L" in helpers.letters(x) and tensors[n] is not None
        ]
        sloped = self.sloped(tensors)
        leaves = {n: x.requires_grad_() if n in sloped else x for n, x in tensors.items()}
        out = self.run(leaves, case, cu_seqlens=ends)[0]
        for begin, end in itertools.pairwise(ends.tolist()):
            alone = self.pieces(tensors, begin, end)
            expected = self.run(alone, case, cu_seqlens=torch.tensor([0, end - begin]))[0]
            place = f"output 0 of tokens {begin} to {end}"
            helpers.close(place, out[:, begin:end].detach(), expected.detach(), 1e-12)
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
            n: x[order]
            if x is not None and helpers.letters(specs[n])[:1] in (("B",), ("S",))
            else x
            for n, x in tensors.items()
        }
        expected = self.run(tensors, case)
        for i, (got, known) in enumerate(zip(self.run(turned, case), expected, strict=True)):
            helpers.close(f"output {i}", got, known[order], self.roundings(case))

    @op_check(needs=("length",))
    def test_later_tokens_do_not_change_earlier_outputs(self, case: Case) -> None:
        """In no bit, and later ones are changed."""
        tensors = self.draw(L=40)
        changed = {n: None if x is None else x.clone() for n, x in tensors.items()}
        for x in self.pieces(changed, 23, 24).values():
            if x is not None and x.dim() > 1 and x.shape[1] == 1:
                x += 1
        before, after = (self.run(x, case)[0] for x in (tensors, changed))
        helpers.close("outputs before token 23", after[:, :23], before[:, :23], 0)
        if torch.equal(after[:, 23:], before[:, 23:]):
            raise AssertionError("output 0: tokens from 23 on do not depend on their inputs")
