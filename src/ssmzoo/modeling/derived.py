"""Values that decoding computes from a layer's parameters, cached until a parameter changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn

from ssmzoo.modeling.forward_code import ForwardCode, current_code
from ssmzoo_kernels.dispatch import is_traced

if TYPE_CHECKING:
    from ssmzoo.modeling.layer_state import LayerState

T = TypeVar("T")
_constant = False  # no context variable: torch.compile traces `get`


@contextlib.contextmanager
def constant_in_graphs() -> Iterator[None]:
    """Let graphs traced inside the block hold cached values as constants; weights must not change.

    Without it a graph computes them from its parameters, and cannot look at the results.
    """
    global _constant
    before, _constant = _constant, True
    try:
        yield
    finally:
        _constant = before


class DerivedValue(Generic[T]):
    """A value computed from parameters, recomputed when one of them has changed.

    A parameter has changed if another tensor is in its place or its version counter went up.
    Sharding (FSDP) and writes through ``.data``, as of averaged weights, do not count versions, and
    code may be replaced, so a mixer calls :meth:`refresh` wherever it reads. The value has no graph
    and is left out of copies and files.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int, Tensor]] = []
        self._settings: object = None
        self._code: ForwardCode | None = None
        self._value: T | None = None

    def get(self, owner: nn.Module, settings: object, make: Callable[[], T]) -> T:
        """Return the value.

        Args:
            owner: The module whose own parameters it is computed from. Where one of them is
                parametrized or pruned (``torch.nn.utils``), or where they are plain attributes
                (``nn.DataParallel``, the first FSDP), every call computes the value.
            settings: Everything else that it depends on; compared by ``==``.
            make: Computes it; called only if a parameter or the settings changed.
        """
        # a parametrization or a pruning hook makes a new tensor in every call
        if "parametrizations" in owner._modules or owner._forward_pre_hooks:
            self.forget()
            return make()
        if is_traced():
            return self._value if _constant and self._value is not None else make()
        fits = self._value is not None and self._settings == settings
        count = 0
        for p in owner._parameters.values():  # no list: a token's time goes into calls
            if p is None:
                continue
            if p.is_inference():  # it counts no versions
                return make()
            if fits := fits and count < len(self._seen):
                seen, version, _ = self._seen[count]
                same = p._version == version and p.data_ptr() == seen.data_ptr()
                fits = same and p.dtype == seen.dtype
            count += 1
        if not count:  # as plain attributes they may be others at every call
            return make()
        if not fits or count < len(self._seen) or self._value is None:
            self.forget()
            with torch.inference_mode(False), torch.no_grad():
                # holds on to the parameters' memory, so that no other tensor gets the same address
                own = [p for p in owner._parameters.values() if p is not None]
                seen = [(p.detach(), p._version, p.detach().clone()) for p in own]
                self._value = make()
            self._seen, self._settings = seen, settings
            self._code = current_code((type(owner),))
        return self._value

    @property
    def is_constant(self) -> bool:
        """Whether a graph that is traced now holds the value as it was computed before."""
        return _constant and self._value is not None

    def refresh(self, hidden_states: Tensor, state: LayerState) -> None:
        """Drop the value if the parameters' numbers or the code have changed since it was computed.

        Skipped in graphs, and for one token behind a state, where looking costs too much.

        Args:
            hidden_states: The mixer's input, ``[B, L, D]``.
            state: Its layer's state.
        """
        if is_traced() or self._value is None:
            return
        if hidden_states.shape[1] == 1 and state.initial and not torch.is_grad_enabled():
            return
        if self._code is not None and not self._code.unchanged():
            self.forget()
            return
        for seen, _, numbers in self._seen:
            freed = not seen.untyped_storage().size()  # by sharding
            if not seen.is_meta and (freed or not seen.equal(numbers)):
                self.forget()
                return

    def forget(self) -> None:
        """Drop the value, but not while a graph is traced."""
        if not is_traced():
            self.__init__()

    def __getstate__(self) -> dict[str, object]:
        """Leave the value out of copies and files."""
        return DerivedValue().__dict__
