"""The subject of a conformance check, and the check's result.

A surprise: every parameter is moved a little from its initial value, because biases of zero and
scales of one would hide mistakes; nothing a check does to a :meth:`Subject.fresh` model stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ssmzoo.family import Family
from ssmzoo.modeling import SSMForCausalLM, SSMForSequenceClassification

# the largest error relative to the largest entry
BUDGETS = {torch.float64: 1e-10, torch.float32: 1e-5}
EXACT = BUDGETS[torch.float64]
# a mean of cross-entropies in float32: logits, exponentials, their sum and the mean are rounded
FLOAT32_LOSS = 4 * torch.finfo(torch.float32).eps
SEED = 20240714

Oracle: TypeAlias = Callable[[dict[str, np.ndarray], dict[str, Any], np.ndarray], np.ndarray]


class NotApplicable(Exception):
    """Raised by a check that has nothing to check here; the message says why."""


@dataclass(frozen=True)
class Error:
    """One comparison: its name, the error and the budget."""

    what: str
    size: float
    budget: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its budget; nan is not."""
        return self.size <= self.budget

    @property
    def share(self) -> float:
        """The error in units of its budget; infinite for any error where none is allowed."""
        if self.size == 0:
            return 0.0
        return self.size / self.budget if self.budget > 0 and self.size == self.size else np.inf


@dataclass
class Measured:
    """All comparisons of one check, and what may explain one that fails."""

    errors: list[Error] = field(default_factory=list)
    cause: str = ""

    def compare(self, what: str, got: Tensor, expected: Tensor, budget: float) -> None:
        """Note the largest error relative to the largest expected entry."""
        self.errors.append(Error(what, relative(what, got, expected), budget))

    def compare_all(
        self, what: str, got: dict[str, Tensor], expected: dict[str, Tensor], budget: float
    ) -> None:
        """Note, for every name, the error relative to the largest entry of that name."""
        require(got.keys() == expected.keys(), f"{what}: other names than expected")
        for name, tensor in expected.items():
            self.compare(f"{what} {name}", got[name], tensor, budget)

    def same(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Note that two tensors must agree bit for bit, dtype included."""
        require(got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}")
        error = relative(what, got, expected)
        self.errors.append(Error(what, 0.0 if torch.equal(got, expected) else error, 0.0))

    def within(self, what: str, size: float, budget: float) -> None:
        """Note an error that the check measured itself."""
        self.errors.append(Error(what, size, budget))

    @property
    def worst(self) -> Error | None:
        """The comparison nearest to its budget, or furthest beyond it."""
        return max(self.errors, key=lambda error: error.share, default=None)

    @property
    def told(self) -> str:
        """The worst comparison's name, with the cause where the errors' sizes show it."""
        worst, exact, rounded = self.worst, BUDGETS[torch.float64], BUDGETS[torch.float32]
        if worst is None or worst.ok:
            return "" if worst is None else worst.what
        if self.cause:
            return f"{worst.what} ({self.cause})"
        if exact == worst.budget < worst.size <= rounded:
            return f"{worst.what} (as if something computed in float32)"
        twin = worst.what.replace("float32", "float64")
        same = [error for error in self.errors if error.what == twin and error.budget == exact]
        small = rounded == worst.budget < worst.size <= 100 * rounded
        if small and same and all(error.ok for error in same):
            return (
                f"{worst.what} (rounding only: float64 is off by {max(e.size for e in same):.1e}; "
                "look for a difference of large numbers, or for what float32 computes otherwise)"
            )
        return worst.what


def require(condition: bool, sentence: str) -> None:
    """Fail the check with a sentence unless the condition holds."""
    if not condition:
        raise AssertionError(sentence)


def require_error(
    kind: type[Exception], words: Iterable[str], what: str, call: Callable[[], object]
) -> None:
    """Fail the check unless a call raises an error of a type that has all of some words."""
    try:
        call()
    except kind as error:
        for word in words:
            require(word in str(error), f"{what}: the error must name {word!r}, got: {error}")
    else:
        raise AssertionError(f"{what} must raise {kind.__name__}")


def relative(what: str, got: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected entry, in float64."""
    require(
        got.shape == expected.shape,
        f"{what}: shape {list(got.shape)} instead of {list(expected.shape)}",
    )
    if expected.numel() == 0:
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    error, scale = float((got - expected).abs().max()), float(expected.abs().max())
    return error / scale if scale > 0 else error


class Subject:
    """A family under test: its tiny models, and tokens to feed them.

    Args:
        family: The family.
        oracle: A second implementation, ``(weights, config, input_ids) -> logits`` in numpy.
    """

    def __init__(self, family: Family, oracle: Oracle | None = None) -> None:
        family.register()
        self.family = family
        self.oracle = oracle
        self._models: dict[torch.dtype, SSMForCausalLM] = {}

    def config(self, **changes: Any) -> PreTrainedConfig:
        """Return the tiny configuration, some fields changed."""
        return self.family.config(**{**self.family.tiny, "eos_token_id": None, **changes})

    def model(self, dtype: torch.dtype = torch.float64) -> SSMForCausalLM:
        """Return the language model, shared by all checks: it must stay as it is."""
        if dtype not in self._models:
            self._models[dtype] = self.fresh(dtype)
        return self._models[dtype]

    def shallow(self, dtype: torch.dtype = torch.float64) -> SSMForCausalLM:
        """Return a model of one layer to trace, or :meth:`model` where its layers are not alike.

        A graph of alike layers repeats that of one, and tracing takes as long as it is.
        """
        whole = self.model(dtype)
        first, *others = map(_form, whole.model.layers)
        if not others or any(form != first for form in others):
            return whole
        try:
            return self.fresh(dtype, num_hidden_layers=1)
        except ValueError:  # a field has an entry for every layer
            return whole

    def fresh(self, dtype: torch.dtype = torch.float32, **changes: Any) -> SSMForCausalLM:
        """Return a language model of one's own; equal configurations have equal weights.

        Args:
            dtype: Of the weights, by ``model.to``.
            **changes: Changed configuration fields.
        """
        return cast(SSMForCausalLM, self.build(self.family.causal_lm_class, dtype, changes))

    def classifier(self, dtype: torch.dtype, **changes: Any) -> SSMForSequenceClassification:
        """Return a sequence classifier of one's own, as :meth:`fresh` does."""
        kind = self.family.sequence_classification_class
        return cast(SSMForSequenceClassification, self.build(kind, dtype, changes))

    def build(
        self,
        kind: Callable[[Any], nn.Module],
        dtype: torch.dtype,
        changes: dict[str, Any],
    ) -> nn.Module:
        """Return one's own of any of the family's classes, or of a part, as :meth:`fresh` does."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = kind(self.config(**changes))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            cast(Any, model).project_parameters()
        return model.to(dtype).eval()

    def ids(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """Return random tokens ``[batch, length]``, the same for the same arguments."""
        generator = torch.Generator().manual_seed(SEED + seed)
        return torch.randint(self._vocab_size, (batch, length), generator=generator)

    @functools.cached_property
    def _vocab_size(self) -> int:
        return self.config().vocab_size


def _form(layer: nn.Module) -> list[Any]:
    """Return what two layers that run the same code have in common: modules, shapes and flags."""
    return [
        (
            type(module),
            [(n, x.shape, x.dtype) for n, x in module.named_parameters(recurse=False)],
            [(n, x.shape, x.dtype) for n, x in module.named_buffers(recurse=False)],
            {name: x for name, x in vars(module).items() if isinstance(x, bool | str)},
        )
        for module in layer.modules()
    ]


def probe(logits: Tensor) -> Tensor:
    """Return fixed random weights in the shape of some logits, to make a loss of them."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a loss by parameter name; zeros where none flows."""
    return gradients_of({n: p for n, p in model.named_parameters() if p.requires_grad}, loss)


def gradients_of(leaves: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a loss by leaf; zeros where none flows."""
    grads = torch.autograd.grad(
        loss, list(leaves.values()), retain_graph=True, materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def modules_named(model: nn.Module, suffixes: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules whose last name is one of the given."""
    wanted = set(suffixes)
    return {n: m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in wanted}
