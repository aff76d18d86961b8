"""Layers that follow one another, a token of which one call of C reads.

Between two calls of C the memory, for which decoding waits, has nothing to do. What every layer
asks before its token is asked for all of them at once: weights stream through the caches, so that
every look is a slow one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from ssmzoo.modeling.decoding import (
    DECODING,
    TokenStep,
    decoding_of,
    make_room,
    next_states,
    programs_run,
    run_steps,
)
from ssmzoo.modeling.forward_code import ForwardCode
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.module_parts import ModuleParts

_KIND = operator.attrgetter("dtype", "shape", "is_cpu")
_TRAINING = operator.attrgetter("training")


class JoinedLayers:
    """Layers and their programs, each of which reads what the one before it writes.

    Args:
        layers: The layers.
        steps: Their programs.
        in_place: Of each state, layer by layer, whether it may be written over; None: all are.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        steps: Sequence[TokenStep],
        in_place: Sequence[bool] | None = None,
    ) -> None:
        self.layers = layers
        self.steps = steps
        self._in_place = in_place
        self._parts = ModuleParts.joined([step.parts for step in steps])
        self._attributes = [layer.__dict__ for layer in layers]
        self._kinds = [kind for step in steps for kind in step.states]

    def run(
        self, x: Tensor, before: list[Tensor], checked: dict[ForwardCode, bool] | None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the last layer's output, and the states behind it.

        Args:
            x: What the first layer reads, ``[B, 1, D]``.
            before: The states of the layers, in their order.
            checked: See :meth:`ForwardCode.unchanged`.

        Returns:
            None: the layers must be called one by one, since one of them is not what its program
            was written for, or calling it does more.
        """
        if not self._apply(x, before, checked):
            return None
        changed = before if self._in_place is None else next_states(before, self._in_place)
        left, calls = iter(changed), []
        y = x.new_empty((*x.shape[:-1], self.steps[-1].outputs), dtype=self.steps[-1].dtype)
        given = x if x.is_contiguous() else x.contiguous()
        for step in self.steps:
            calls.append((step, [given, y, *itertools.islice(left, len(step.states))]))
            given = y  # read before it is written
        try:
            run_steps(calls)
        except FloatingPointError:  # a layer's own code has the better message
            return None
        return y, changed

    def _apply(
        self, x: Tensor, before: list[Tensor], checked: dict[ForwardCode, bool] | None
    ) -> bool:
        """Return whether the programs may run now."""
        first, rows = self.steps[0], x.shape[0]
        return (
            x.dtype is first.format
            and x.shape[-1] == first.width
            and [*map(_KIND, before)] == [(kind, (rows, *rest), True) for kind, rest in self._kinds]
            and all(map(Tensor.is_contiguous, before))
            and programs_run(x)
            and not any(map(_TRAINING, self.layers))
            and not any(map(dict.__contains__, self._attributes, itertools.repeat("forward")))
            and self._parts.same_code(checked)
            and self._parts.unchanged()
        )


class JoinedBlocks(JoinedLayers):
    """Blocks of a model of ours.

    Args:
        layers: Each an :class:`~ssmzoo.modeling.block.SSMBlock`.
        steps: Their programs.
        names: The names of each layer's states.
    """

    def __init__(
        self, layers: Sequence[Any], steps: Sequence[TokenStep], names: Sequence[Sequence[str]]
    ) -> None:
        in_place = [
            name in (*layer.mixer.written_in_place, *layer.mixer.hands_on)
            for layer, held in zip(layers, names, strict=True)
            for name in held
        ]
        super().__init__(layers, steps, in_place)
        self._classes = {type(layer): layer for layer in layers}
        self._mixers = [layer.mixer for layer in layers]
        self._names = names
        self._hands_on = any(mixer.hands_on for mixer in self._mixers)

    def __call__(self, x: Tensor, states: Sequence[LayerState]) -> Tensor | None:
        """Return what :meth:`run` does, and leave the states in ``states``, those of the layers."""
        held = [state.initial for state in states]
        if self._hands_on:
            make_room(self._mixers[0], x, states[0])
            held = [{**state.shared, **state.initial} for state in states]
        try:
            before = [
                given[name]
                for given, names in zip(held, self._names, strict=True)
                for name in names
            ]
        except KeyError:  # a cache of another kind of call
            return None
        if not all(layer.runs_its_own_code() for layer in self._classes.values()):
            return None
        if not all(m.next_is_written(s) for m, s in zip(self._mixers, states, strict=True)):
            return None
        found = self.run(x, before, states[0].checked_code)
        if found is None:
            return None
        left = iter(found[1])
        for state, names, mixer in zip(states, self._names, self._mixers, strict=True):
            state.final.update(zip(names, left, strict=False))
            for name in mixer.hands_on:  # written in place
                state.final.pop(name, None)
        return found[0]


def joined_blocks(model: Any, states: Sequence[LayerState]) -> dict[int, JoinedBlocks]:
    """Return a model's blocks whose programs run in one call, by the place of the first.

    Args:
        model: A backbone; its ``layers`` have been called or not.
        states: Their states, before a token.
    """
    known = decoding_of(model)
    layers = [*itertools.islice(model.layers._modules.values(), len(states))]
    steps = [None if (d := layer.__dict__.get(DECODING)) is None else d.step for layer in layers]
    if known.joined is not None and known.joined[:2] == (layers, steps):
        return known.joined[2]
    wanted = [
        step if step is not None and _may_join(layer, state) else None
        for step, layer, state in zip(steps, layers, states, strict=True)
    ]
    joined = {}
    for first, end in runs_of(wanted, [True] * len(wanted)):
        names = [decoding_of(layer).names for layer in layers[first:end]]
        joined[first] = JoinedBlocks(
            layers[first:end], cast(list[TokenStep], steps[first:end]), names
        )
    known.joined = layers, steps, joined
    return joined


def _may_join(block: Any, state: LayerState) -> bool:
    return (
        bool(state.initial)
        and block.runs_its_own_code()
        and not block.training
        and getattr(block.mixer, "writes_tokens", False)  # not so if something wraps the mixer
    )


def runs_of(steps: Sequence[TokenStep | None], leads: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where programs follow one another: the first place, and the one behind the last.

    Args:
        steps: Those of layers in turn; None: the layer is called by itself.
        leads: Whether the next layer reads what each one gives.
    """
    runs: list[tuple[int, int]] = []
    for place, step in enumerate(steps):
        if step is None:
            continue
        first, end = runs[-1] if runs else (0, -1)
        before = steps[place - 1]
        if end == place and leads[place - 1] and before is not None and step.follows(before):
            runs[-1] = first, place + 1
        else:
            runs.append((place, place + 1))
    return runs
