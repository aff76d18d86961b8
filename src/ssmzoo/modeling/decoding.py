"""Decoding on a CPU: a token of a module in one call of C.

A program replaces a module's forward only if the module consists of plain layers without hooks, in
number formats that the kernel reads. The first token runs both ways, and the program is used after
its outputs agreed; so a module with code that we do not know keeps its forward. After a layer, a
weight or a setting has changed, the next token runs both ways again. Code that was replaced, of a
class, an object or a function, runs itself until it is set back: agreement on one token cannot
prove that it computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.module_parts import FORMATS, ModuleParts, State, UnservedError
from ssmzoo.modeling.packing import Sequences
from ssmzoo_kernels.dispatch import decodes_on_cpu, takes_kernels
from ssmzoo_kernels.few_rows_linear import MOST_ROWS
from ssmzoo_kernels.token_step import Program, Value, run_programs

_log = logging.getLogger("ssmzoo")
# how far a program's output may be from the module's own, by its greatest number
_ROUNDING = {
    torch.float64: 1e-5,  # stock code is float32 in places
    torch.float32: 1e-4,
    torch.bfloat16: 2.0**-5,
    torch.float16: 2.0**-8,
}

GAVE_OTHER_NUMBERS = "its program gave other numbers than its forward"


class TokenStep:
    """A module's program, what wrote it, and the kind of call and the parts that it is for."""

    def __init__(
        self, parts: ModuleParts, write: TokenWriter, x: Tensor, states: Sequence[Tensor], y: Tensor
    ) -> None:
        self.parts = parts
        self.write = write
        self.format, self.width = x.dtype, x.shape[-1]
        self.states = [(s.dtype, s.shape[1:]) for s in states]
        self.program = Program(torch.float64 if x.dtype is torch.float64 else torch.float32)
        if parts.watched or not self.program.applies(x):  # or the kernel cannot be built
            raise UnservedError
        numbered = [State(i + 2, state) for i, state in enumerate(states)]
        try:
            value = self.program.input(0, x.dtype, self.width)
            value = write(self.program, self.parts, value, numbered)
            self.program.output(value, 1, y.dtype)
        except ValueError as error:  # a dtype that the kernel does not read
            raise UnservedError from error
        self.outputs, self.dtype = value.width, y.dtype

    def fits(self, x: Tensor, states: Sequence[Tensor]) -> bool:
        """Return whether a call is of the kind that the program was written for."""
        return (
            x.dtype is self.format
            and x.shape[-1] == self.width
            and [(s.dtype, s.shape[1:]) for s in states] == self.states
            and self.parts.unchanged()
        )

    def follows(self, before: TokenStep) -> bool:
        """Return whether it reads what another one writes, and leaves the like."""
        return (
            self.program.dtype is before.program.dtype
            and (self.format, self.width) == (before.dtype, before.outputs)
            and (self.dtype, self.outputs) == (before.dtype, before.outputs)
        )

    def __call__(self, x: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return the output for ``[..., width]``, and change the states."""
        y = x.new_empty((*x.shape[:-1], self.outputs), dtype=self.dtype)
        run_steps([(self, [x if x.is_contiguous() else x.contiguous(), y, *states])])
        return y


def run_steps(calls: Sequence[tuple[TokenStep, Sequence[Tensor]]]) -> None:
    """Run steps, each behind the one before."""
    step, tensors = calls[0]
    rows = tensors[0].numel() // step.width
    run_programs([(step.program, tensors) for step, tensors in calls], rows)
    for _, (_, _, *states) in calls:
        for state in states:
            if not state.is_inference():
                torch.autograd.graph.increment_version(state)  # as writing by torch does


TokenWriter = Callable[[Program, ModuleParts, Value, Sequence[State]], Value]
LayerWriter = Callable[[Program, ModuleParts, Value, dict[str, State]], Value]
DECODING = "_ssmzoo_decoding"  # the attribute of a module that has its Decoding


class Decoding:
    """How a module decodes: by a program, one still to be written, or by its own code."""

    step: TokenStep | None = None
    names: Sequence[str] = ()  # of its states, where it is a layer of ours
    # asked for each input: whether it still goes to the module's own code
    refused: Callable[[Tensor, dict[ForwardCode, bool] | None], bool] | None = None
    why: str | None = None  # why its own code runs; None: a program serves it, or none was tried
    offset: float | None = None  # of a norm's weight, NaN if it is another norm: see ``norms``
    code: ForwardCode | None = None  # which gave it
    # of a backbone: its layers and their programs, and those that were joined then
    joined: tuple[list[Any], list[Any], dict[Any, Any]] | None = None
    leads: bool = False  # of a stock block: whether the one behind it reads what it gives

    def __reduce__(self) -> Any:
        """Leave the program, which has addresses of weights, out of copies and files."""
        return Decoding, ()


def decoding_of(module: nn.Module) -> Decoding:
    """Return a module's :class:`Decoding`, made at its first token."""
    known = module.__dict__.get(DECODING)
    if known is None:
        known = module.__dict__[DECODING] = Decoding()
    return known


def token(
    module: Any,
    writers: Sequence[TokenWriter],
    x: Tensor,
    states: Sequence[Tensor],
    own: Callable[[], Tensor],
    *,
    checked: dict[ForwardCode, bool] | None = None,
    by_column: bool = False,
    matrices: torch.dtype | None = None,
) -> Tensor:
    """Return a module's output for few rows, in one call where it may be.

    Args:
        module: The module.
        writers: Write its program, each another one; the first that agrees with its code is used.
        x: ``[..., width]``, a token of each row.
        states: The states that the call changes, ``[B, ...]`` each.
        own: Its forward.
        checked: See :meth:`ForwardCode.unchanged`.
        by_column: Whether to use, of those that agree, the nearest by the mean over columns.
        matrices: The dtype of linear layers' weights; None: that of ``x``.
    """
    known = decoding_of(module)
    if not _may_decode(known, x, states, checked):
        return own()
    step = known.step  # which another thread may replace meanwhile
    if step is None or not step.fits(x, states):
        dtype = x.dtype if matrices is None else matrices
        y, after = _prove(
            module, writers, x, states, own, lambda: states, dtype, by_column=by_column
        )
        for state, new in zip(states, after, strict=True):
            if state is not new:
                state.copy_(new)
        return y
    return step(x, states)


def token_of_layer(
    module: Any,
    writer: LayerWriter,
    x: Tensor,
    state: LayerState,
    own: Callable[[], Tensor],
    matrices: torch.dtype,
    *,
    names: Sequence[str] | None = None,
    in_place: frozenset[str] = frozenset(),
    handed: Sequence[str] = (),
) -> Tensor:
    """Return a module's output where its states are a layer's, in one call where it may be.

    Args:
        module: The module.
        writer: Writes its program.
        x: As for :func:`token`.
        state: The state of its layer.
        own: Its forward.
        matrices: The dtype of linear layers' weights.
        names: Its states; None: all of the layer's.
        in_place: The states that may be written over; new ones take the place of the others.
        handed: What :func:`make_room` returns, states of the program, too.
    """
    names = [*(sorted(state.initial) if names is None else names), *handed]
    held = {**state.shared, **state.initial} if handed else state.initial
    states = [held[name] for name in names]
    known = decoding_of(module)
    if not _may_decode(known, x, states, state.checked_code):
        return own()
    step = known.step
    if step is None or not step.fits(x, states):

        def write(
            program: Program, parts: ModuleParts, x: Value, numbered: Sequence[State]
        ) -> Value:
            return writer(program, parts, x, dict(zip(names, numbered, strict=True)))

        def after() -> list[Tensor]:
            left = {**state.shared, **state.final} if handed else state.final
            return [left[name] for name in names]

        y, states = _prove(module, (write,), x, states, own, after, matrices)
        known.names = names
        state.final.update(zip(names, states, strict=True))
        for name in handed:
            state.shared[name] = state.final.pop(name)
        return y
    if handed:
        in_place = in_place.union(handed)
    changed = next_states(states, map(in_place.__contains__, names))
    try:
        y = step(x, changed)
    except FloatingPointError:  # its own code has the better message
        return own()
    state.final.update(zip(names, changed, strict=True))
    for name in handed:
        state.shared[name] = state.final.pop(name)
    return y


def make_room(mixer: Any, x: Tensor, state: LayerState) -> list[str]:
    """Make room in ``state.shared`` for what a model's first layer hands on.

    Returns:
        The names of :attr:`SSMMixer.hands_on` that this layer's program reads or writes.
    """
    if mixer.layer_idx == 0:
        exact = torch.promote_types(torch.float32, x.dtype)
        state.shared.update({name: torch.zeros_like(x, dtype=exact) for name in mixer.hands_on})
    return [name for name in mixer.hands_on if name in state.shared]


def next_states(states: Sequence[Tensor], in_place: Iterable[bool]) -> list[Tensor]:
    """Return the states that a program changes: copies, but of those that may be written over."""
    changed = []
    for state, own in zip(states, in_place, strict=True):
        changed.append(state if own and _writable(state) else state.clone())
    return changed


def is_token(module: nn.Module, x: Tensor, packing: Sequences | None) -> bool:
    """Return whether a layer reads one token ``[B, 1, D]`` of whole rows, outside training."""
    return (
        x.shape[1] == 1
        and packing is None
        and not module.training
        and not torch.compiler.is_compiling()
    )


def _writable(state: Tensor) -> bool:
    if state.requires_grad:
        return False
    return torch.is_inference_mode_enabled() or not state.is_inference()


def _may_decode(
    known: Decoding, x: Tensor, states: Sequence[Tensor], checked: dict[ForwardCode, bool] | None
) -> bool:
    """Return whether a program may run a module's token now."""
    if known.refused is not None and known.refused(x, checked):
        return False
    if not programs_run(x):
        if x.device.type != "cpu":
            known.step = None  # which would keep weights that were moved in memory
        return False
    rows = x.numel() // x.shape[-1]
    for state in states:
        if not (state.is_cpu and state.is_contiguous() and len(state) == rows):
            return False
    if (step := known.step) is None or step.parts.same_code(checked):
        return True
    known.step, known.why = None, "its code was replaced"
    known.refused = lambda _, checked: not step.parts.same_code(checked)
    return False


def programs_run(x: Tensor) -> bool:
    """Return whether programs may read an input as things are now."""
    return bool(
        decodes_on_cpu(x)
        and x.numel()
        and (x.numel() <= MOST_ROWS * x.shape[-1] or x.shape[-2] == 1)  # no prompt
        and x.dtype in FORMATS
        and takes_kernels()
        and not module_hooks._global_forward_hooks
        and not module_hooks._global_forward_pre_hooks
    )


def _prove(
    module: nn.Module,
    writers: Sequence[TokenWriter],
    x: Tensor,
    states: Sequence[Tensor],
    own: Callable[[], Tensor],
    after: Callable[[], Sequence[Tensor]],
    matrices: torch.dtype,
    *,
    by_column: bool = False,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run a module's own code, and find a program that gives the same.

    Returns:
        Output and states: the program's, so that a token has the same bits whenever it comes.
    """
    known = decoding_of(module)
    known.step = None
    before = [state.clone() for state in states]
    y = own()
    if not y.any() or not y.isfinite().all():
        return y, after()  # zeros and infinities prove nothing
    asked, differs, fitting = [], False, []
    for writer in writers:
        asked.append(ModuleParts(module, matrices))
        try:
            step = TokenStep(asked[-1], writer, x, states, y)
        except UnservedError as error:
            known.why = f"no program is written for it: {error}".removesuffix(": ")
            continue
        changed = [state.clone() for state in before]
        ours = step(x, changed)
        pairs = zip((ours, *changed), (y, *after()), strict=True)
        if all(agree(a, b, matrices) for a, b in pairs):
            fitting.append((step, ours, changed))
            if not by_column:
                break
        else:
            differs = True
    if fitting:
        known.step, ours, changed = min(fitting, key=lambda found: mean_distance(found[1], y))
        known.refused = known.why = None
        return ours, changed
    if differs:
        known.why = GAVE_OTHER_NUMBERS
        _log.info("%s decodes by its own code: programs gave other numbers", type(module).__name__)
    kind = x.dtype

    def refused(x: Tensor, checked: dict[ForwardCode, bool] | None) -> bool:
        if x.dtype is not kind:
            return False
        for parts in asked:  # noqa: SIM110 (a generator is a call more)
            if not (parts.same_code(checked) and parts.unchanged()):
                return False
        return True

    known.refused = refused
    return y, after()


def agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results of a module are equal to the rounding of a dtype."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    rounding = _ROUNDING[dtype]
    return not b.numel() or bool(((a - b).abs() <= rounding * b.abs().max()).all())


def mean_distance(a: Tensor, b: Tensor) -> float:
    """Return how far ``a`` is from ``b``, relative to it in each column, as the columns' mean."""
    kind = torch.promote_types(b.dtype, torch.float32)
    difference, size = (x.reshape(-1, x.shape[-1]).abs().sum(0, dtype=kind) for x in (a - b, b))
    return (difference / size.clamp(min=torch.finfo(kind).tiny)).mean().item()
