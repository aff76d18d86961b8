"""Kernels, effective memory, poles, time steps, decay and state of every layer.

A mixer with ``dynamics()`` states its kernels. For any other the impulse response is measured, as
the derivative of its output with respect to its inputs. Both are taken at the inputs that the mixer
gets while the model reads some reference sequences.

Dimensions: B sequences, L length, D hidden, C channels, K lags, P rows of poles, N state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ssmzoo.modeling import (
    Dynamics,
    LayerState,
    SSMMixer,
    SSMModel,
    StateCache,
    Trajectories,
)
from ssmzoo.modeling.compat import CACHE, cache_name
from ssmzoo.modeling.stock import mixers_of, states_of

ENERGY = 0.95
MOST_FEATURES = 64  # rows of a measured response: each costs a backward pass of the mixer
MOST_PATHS, MOST_STEPS = 8, 32  # of the trajectories: more would hide each other
_PROMPT = 16  # positions that are read to see a state
_CHUNK = 2**22  # numbers of input that one backward pass sees
_KEPT = ("hidden_states", "residual", "shared")  # of a mixer's call

Source = Literal["exact", "input", "measured"]


@dataclass(frozen=True)
class LayerInspection:
    """One layer's mixer.

    Attributes:
        layer: Its number.
        source: Where the kernels come from: "exact" from the parameters alone, "input" exact for
            the reference input, "measured" as derivatives.
        kernel: Kernels ``[C, K]`` over the lags 0, 1, ...; measured ones are sizes, of up to 64
            output features, evenly spread.
        future_kernel: The same over the lags -1, -2, ... for models that look ahead.
        memory: :func:`effective_memory` of every channel; None where the kernel is zero.
        poles: ``[P, N]`` complex128, None if unknown.
        radius: The largest pole's distance from zero, ``[P]``, None if unknown.
        outside: Poles not inside the unit circle, ``[P]``, None if unknown.
        time_steps: ``[C]`` or ``[C, parts]``, None if there are none.
        decay: Mean decay a token, ``[C, N]``, None unless it depends on the input.
    """

    layer: int
    source: Source
    kernel: Tensor
    future_kernel: Tensor | None
    memory: list[int | None]
    poles: Tensor | None
    radius: Tensor | None
    outside: Tensor | None
    time_steps: Tensor | None
    decay: Tensor | None


@dataclass(frozen=True)
class Inspection:
    """The findings of a model.

    Attributes:
        length: Positions of each reference sequence.
        sequences: How many there were.
        state_bytes: Size of the state of one sequence, all layers together; None if there is none,
            or if it grows.
        state_note: Why it is None.
        layers: The inspected layers.
        others: By number, the kind of layers without a recurrent mixer, or with one and attention.
        trajectories: Of the first sequences' first tokens; None if the model has none to show.
    """

    length: int
    sequences: int
    state_bytes: int | None
    state_note: str | None
    layers: list[LayerInspection]
    others: dict[int, str] = field(default_factory=dict)
    trajectories: Trajectories | None = None


def effective_memory(
    kernel: Tensor, future_kernel: Tensor | None = None, energy: float = ENERGY
) -> list[int | None]:
    """Return, per channel, the smallest lag m such that lags up to m hold a share of the energy.

    ``sum_{|l| <= m} K[l]^2 >= energy * sum_l K[l]^2``; 0 means the current position alone. None for
    a channel whose kernel is zero.

    Args:
        kernel: Lags 0, 1, ..., ``[C, K]``.
        future_kernel: Lags -1, -2, ..., ``[C, K']``.
        energy: The share, above 0 and at most 1.
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1, got {energy}")
    power = kernel.double().abs()
    if future_kernel is not None:
        ahead = nn.functional.pad(future_kernel.double().abs(), (1, 0))  # [C, 1 + K']
        lags = max(power.shape[1], ahead.shape[1])
        power, ahead = (nn.functional.pad(x, (0, lags - x.shape[1])) for x in (power, ahead))
        power = torch.hypot(power, ahead)
    # scaled, so that squares neither overflow nor vanish
    power = (power / power.amax(dim=1, keepdim=True)).square()
    total = power.cumsum(dim=1)  # [C, K], nan where a kernel is zero
    reached = (total < energy * total[:, -1:]).sum(dim=1)
    return [
        None if bool(zero) else int(lag)
        for lag, zero in zip(reached, total[:, -1].isnan(), strict=True)
    ]


def measure_layers(
    model: PreTrainedModel,
    inputs: Tensor,
    *,
    layers: Sequence[int] | None = None,
    measured: bool = False,
) -> Inspection:
    """Inspect a backbone at some reference sequences.

    Args:
        model: A backbone of the zoo, or an accelerated one of transformers; it is put into
            evaluation mode.
        inputs: Token ids ``[B, L]``, or values ``[B, L, C]`` for a model that takes these.
        layers: Which layers; None is all that have a recurrent mixer.
        measured: Measure the kernels even where a mixer knows them.

    Raises:
        ValueError: A layer that is not there or has no recurrent mixer, inputs that the model
            refuses, or a layer whose kernels are not finite.
    """
    mixers = _mixers(model)
    others = _others(model)
    chosen = list(mixers) if layers is None else sorted(set(layers))
    for layer in chosen:
        if layer in mixers:
            continue
        if layer in others:
            raise ValueError(f"layers must be recurrent ones, got {layer}: {others[layer]}")
        raise ValueError(f"layers must be in [0, {max([*mixers, *others])}], got {layer}")
    model.eval()
    with torch.no_grad():
        calls = _MixerCalls(model, inputs, {layer: mixers[layer] for layer in chosen})
        _, cache, state_bytes, note = cache_after(model, inputs[:1, :_PROMPT])
        if isinstance(cache, StateCache) and cache.config.state_grows:
            state_bytes, note = None, _growth(model, cache, inputs[:1, :1])
        found = []
        for layer in chosen:
            found.append(_inspect_layer(mixers[layer], layer, calls, measured))
        trajectories = None
        if isinstance(model, SSMModel) and model.config.input_channels is None:
            trajectories = model.trajectories(inputs[:MOST_PATHS, :MOST_STEPS])
    sequences, length = inputs.shape[:2]
    return Inspection(length, sequences, state_bytes, note, found, others, trajectories)


def _mixers(model: PreTrainedModel) -> dict[int, Any]:
    """Return the recurrent mixers by layer."""
    if isinstance(model, SSMModel):
        return {index: layer.mixer for index, layer in enumerate(model.layers)}
    return mixers_of(model)


def _others(model: PreTrainedModel) -> dict[int, str]:
    """Return the kinds of transformers' layers that are not, or not only, recurrent."""
    if isinstance(model, SSMModel):
        return {}
    kinds = model.config.get_text_config(decoder=True).layer_types
    return {index: kind for index, kind in enumerate(kinds) if kind != "linear_attention"}


def _nothing_around(row: int, copies: int) -> dict[str, Any]:
    return {}


def measured_response(
    mixer: Callable[..., Tensor],
    hidden_states: Tensor,
    features: Sequence[int],
    position: int,
    around: Callable[[int, int], dict[str, Any]] = _nothing_around,
) -> Tensor:
    """Return the size of the derivative of some outputs at one position, ``[F, L]``.

    ``R[i, t] = sqrt(mean_b sum_j (d y[b, position, i] / d x[b, t, j])^2)``, by automatic
    differentiation: exact, and for a linear filter the size of its taps, whatever the input.

    Args:
        mixer: Maps ``[B, L, D]`` and named arguments to ``[B, L, D]``.
        hidden_states: x, ``[B, L, D]``.
        features: The outputs i.
        position: Where these outputs are.
        around: Returns the named arguments for so many copies of a sequence.
    """
    sequences, length, width = hidden_states.shape
    count = max(1, min(_CHUNK // (length * width), len(features)))
    sizes = []
    for some in torch.as_tensor(features, device=hidden_states.device).split(count):
        energy = 0.0
        for row, x in enumerate(hidden_states):
            # one copy of the sequence per output, so that one backward pass serves all
            copies = x.expand(count, -1, -1).detach().clone().requires_grad_()
            more = around(row, count)
            with torch.enable_grad():
                y = mixer(copies, **more)
                picked = y[torch.arange(len(some), device=some.device), position, some]
                (slope,) = torch.autograd.grad(picked.sum(), copies)
            energy = energy + _plain(slope[: len(some)]).square().sum(dim=2)
        sizes.append((cast(Tensor, energy) / sequences).sqrt())
    return torch.cat(sizes)


class _MixerCalls:
    """The inputs of some layers' mixers while the model reads all sequences, or copies of one.

    Copies are read again where layers share values, since these may have any form.
    """

    def __init__(self, model: PreTrainedModel, inputs: Tensor, mixers: dict[int, Any]) -> None:
        self._model, self._inputs, self._mixers = model, inputs, mixers
        self._seen = self._read(inputs)
        self._copies: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}

    def hidden_states(self, layer: int) -> Tensor:
        """Return a mixer's input ``[B, L, D]``."""
        return self._seen[layer]["hidden_states"]

    def around(self, layer: int, row: int, copies: int) -> dict[str, Any]:
        """Return the state and the residual stream of so many copies of a sequence."""
        call = self._seen[layer]
        residual, shared = call.get("residual"), call["shared"]
        if shared:
            if (row, copies) not in self._copies:
                rows = self._inputs[row : row + 1]
                again = self._read(rows.repeat_interleave(copies, dim=0))
                found = {layer: call["shared"] for layer, call in again.items()}
                self._copies[row, copies] = found
            shared = dict(self._copies[row, copies][layer])
        more = {} if residual is None else {"residual": residual[row].expand(copies, -1, -1)}
        return {"state": LayerState(shared=shared), **more}

    @torch.no_grad()
    def _read(self, inputs: Tensor) -> dict[int, dict[str, Any]]:
        seen: dict[int, dict[str, Any]] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                call = {**dict(zip(("hidden_states", "state"), arguments, strict=False)), **named}
                call["shared"] = dict(getattr(call.pop("state", None), "shared", {}))
                kept = {name: call[name] for name in call if name in _KEPT}
                seen.setdefault(layer, kept)  # a block may call it again on the reversed sequence

            return hook

        hooks = [
            mixer.register_forward_pre_hook(keep(i), with_kwargs=True)
            for i, mixer in self._mixers.items()
        ]
        try:
            self._model(**as_arguments(self._model, inputs), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def as_arguments(model: PreTrainedModel, inputs: Tensor) -> dict[str, Any]:
    """Return reference inputs as the keyword a backbone takes them by."""
    channels = getattr(model.config, "input_channels", None)
    return {"input_ids" if channels is None else "input_values": inputs}


def cache_after(
    model: PreTrainedModel, inputs: Tensor
) -> tuple[str, Cache | None, int | None, str | None]:
    """Return a cache's keyword, the cache after some inputs, its bytes (or None) and the reason."""
    own = isinstance(model, SSMModel)
    try:
        output = model(**as_arguments(model, inputs), use_cache=True)
    except ValueError as error:
        if not own:
            raise
        return CACHE, None, None, str(error)
    name = cache_name(output.keys())
    assert name is not None  # of a recurrent model
    cache = output[name]
    if own:
        return name, cache, cache.nbytes, None
    held = [states_of(layer) for layer in cache.layers]
    growing = sum("keys" in tensors for tensors in held)
    if growing:
        return name, cache, None, _grows(growing, len(held))
    return name, cache, sum(s.nbytes for tensors in held for s in tensors.values()), None


def _growth(model: PreTrainedModel, cache: StateCache, token: Tensor) -> str:
    """Tell in how many layers one more token makes the state larger."""

    def sizes() -> list[int]:
        return [sum(state.nbytes for state in held.values()) for held in cache.get_memory()]

    before = sizes()
    model(**as_arguments(model, token), **{CACHE: cache})
    growing = sum(now > then for now, then in zip(sizes(), before, strict=True))
    return _grows(growing, len(before))


def _grows(growing: int, layers: int) -> str:
    return f"grows by every token in {growing} of {layers} layers"


def _inspect_layer(mixer: Any, layer: int, calls: _MixerCalls, measured: bool) -> LayerInspection:
    tell = getattr(mixer, "dynamics", lambda _: None)  # a stock mixer that stayed so has none
    with _naming(layer, mixer):
        known = tell(calls.hidden_states(layer)) or Dynamics()
    source: Source = "input" if known.depends_on_input else "exact"
    kernel, future = known.kernel, known.future_kernel
    if measured or kernel is None:
        source = "measured"
        with _naming(layer, mixer):
            kernel, future = _measured_kernel(mixer, layer, calls)
    kernel = _plain(kernel)
    future = None if future is None else _plain(future)
    _check_finite(layer, kernel, future)
    poles = None if known.poles is None else known.poles.detach().cpu().to(torch.complex128)
    radius, outside = known.radius, known.outside
    if poles is not None:
        radius = poles.abs().amax(dim=1) if radius is None else radius
        outside = (poles.abs() >= 1).sum(dim=1) if outside is None else outside
    return LayerInspection(
        layer=layer,
        source=source,
        kernel=kernel,
        future_kernel=future,
        memory=effective_memory(kernel, future),
        poles=poles,
        radius=None if radius is None else _plain(radius),
        outside=None if outside is None else outside.detach().cpu().to(torch.int64),
        time_steps=None if known.time_steps is None else _plain(known.time_steps),
        decay=None if known.decay is None else _plain(known.decay),
    )


@contextlib.contextmanager
def _naming(layer: int, mixer: nn.Module) -> Iterator[None]:
    """Add the layer to the errors of its mixer."""
    try:
        yield
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        what = str(error) if kind is ValueError else f"{type(error).__name__}: {error}"
        where = f"layer {layer} ({type(mixer).__name__}) cannot be inspected"
        raise kind(f"{where}: {what}") from error


def _measured_kernel(
    mixer: nn.Module, layer: int, calls: _MixerCalls
) -> tuple[Tensor, Tensor | None]:
    hidden_states = calls.hidden_states(layer)
    length, width = hidden_states.shape[1:]
    features = torch.linspace(0, width - 1, min(width, MOST_FEATURES)).round().long().tolist()
    if isinstance(mixer, SSMMixer):
        causal, around = mixer.config.causal, functools.partial(calls.around, layer)
    else:  # transformers' take no state of ours
        causal, around = True, _nothing_around
    position = length - 1 if causal else length // 2
    response = measured_response(mixer, hidden_states, features, position, around)
    past = response[:, : position + 1].flip(1)
    return past, None if causal else response[:, position + 1 :]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _check_finite(layer: int, *kernels: Tensor | None) -> None:
    for kernel in kernels:
        if kernel is not None and not bool(kernel.isfinite().all()):
            row = int((~kernel.isfinite()).any(dim=1).nonzero()[0])
            raise ValueError(
                f"the kernels of layer {layer} must be finite, channel {row} is not: its weights "
                "are not finite, or its modes grow beyond all numbers at this length"
            )
