"""What decoding works out of a layer's parameters, kept for as long as these do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Kept(Generic[T]):
    """One value, kept for as long as nothing it was made of has changed.

    A parameter has changed if another tensor stands in its place or its version counts on. Sharding
    (FSDP) and what writes through ``.data`` count no version: a mixer that trains therefore calls
    :meth:`forget`. The value has no graph, and no copy or file of a module takes it along.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int]] = []
        self._settings: object = None
        self._value: T | None = None

    def get(self, parameters: Iterable[nn.Parameter], settings: object, make: Callable[[], T]) -> T:
        """Return the value, made anew if parameters or settings are not what they were."""
        parameters = list(parameters)
        if torch.compiler.is_compiling() or any(p.is_inference() for p in parameters):
            return make()  # the latter count no versions
        if self._value is None or self._settings != settings or not self._fits(parameters):
            self.forget()
            # parameters' own memory is held on to, so that its address cannot come again
            seen = [(p.detach(), p._version) for p in parameters]
            with torch.inference_mode(False), torch.no_grad():
                self._value = make()
            self._seen, self._settings = seen, settings
        return self._value

    def forget(self) -> None:
        """Drop the value."""
        self.__init__()

    def _fits(self, parameters: list[nn.Parameter]) -> bool:
        return len(parameters) == len(self._seen) and all(
            p._version == version and p.data_ptr() == seen.data_ptr() and p.dtype == seen.dtype
            for p, (seen, version) in zip(parameters, self._seen, strict=True)
        )

    def __getstate__(self) -> dict[str, object]:
        """Leave the value out of copies and files."""
        return Kept().__dict__
