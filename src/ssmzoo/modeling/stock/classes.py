"""Subclasses of transformers' classes, one each, that an accelerated model's modules take on.

A mixer's subclass runs the stock ``forward`` with our functions among its globals. A block's hands
what the call knows to its mixer also when gradient checkpointing runs it again. A model's finds
packed sequences. Weights, names and hooks of a module stay as they are: only its class changes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from ssmzoo.modeling import decoding
from ssmzoo.modeling.cache import (
    STATE_ADAPTER,
    LayerState,
    refuse_pieces,
    refuse_reentrant_checkpointing,
    require_same_start,
)
from ssmzoo.modeling.compat import CACHE, MIXER_CACHE, cache_name, renamed_cache
from ssmzoo.modeling.forward_code import ForwardCode, current_code
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.sequence_parallel import CutRows, require_shifted
from ssmzoo.modeling.stock import steps
from ssmzoo.modeling.stock.cache import (
    CONV_STATE,
    SCAN_STATE,
    StockCache,
    StockSequenceParallelCache,
    new_cache,
)
from ssmzoo.modeling.stock.calls import call, told_of
from ssmzoo.modeling.stock.dynamics import dynamics
from ssmzoo.modeling.stock.functions import FUNCTIONS, STARTED
from ssmzoo.modeling.stock.generation import overrides
from ssmzoo.modeling.stock.mixer_states import HeadStates
from ssmzoo.modeling.stock.norms import OFFSETS, normalised
from ssmzoo.modeling.stock.packed_calls import enter, inputs_of, positions
from ssmzoo.modeling.stock.starting import of_mixers, read_apart, returns_cache
from ssmzoo_kernels.dispatch import decodes_on_cpu
from ssmzoo_kernels.few_rows_linear import many_rows_linear
from ssmzoo_kernels.layers import OPS

_NORMS = tuple(steps.rms_norm(offset) for offset in OFFSETS)
_SCANS = ("selective_scan", "gated_linear_attention")
_MIXER = ("self", "hidden_states", MIXER_CACHE, "attention_mask")


class Accelerated:
    """What every subclass is besides; pickles and copies name the stock class."""

    stock_class: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a stock module: a class is not accelerated, what it made is."""
        made: Any = self
        made.__class__ = self.stock_class
        made.__init__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the module again: pickle cannot find a class made at run time."""
        kept = {name: held for name, held in self.__dict__.items() if name != decoding.KEPT_AS}
        return _remake, (self.stock_class,), kept


def _remake(stock: type[nn.Module]) -> nn.Module:
    return object.__new__(subclass(stock))


def subclass(stock: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that a module of a stock class takes on."""
    if stock is nn.Linear:
        return _subclass(stock, None)
    # somebody may replace either; our convolution has a silu inside
    code = current_code((stock, type(ACT2FN["silu"]))) if functions_of(stock) else stock.forward
    return _subclass(stock, code)


@functools.cache
def _subclass(stock: type[nn.Module], code: Any) -> type[nn.Module]:
    if stock is nn.Linear:
        base, body = Linear, {}
    else:
        base = stock
        if issubclass(stock, PreTrainedModel):
            body = _model(stock)
        elif issubclass(stock, GradientCheckpointingLayer):
            body = _block(stock)
        elif writers := writers_of(stock):
            body = _part(stock, writers)
        else:
            body = _mixer(stock, code)
    body |= {"stock_class": stock, "__module__": stock.__module__, "__doc__": stock.__doc__}
    made: Any = types.new_class(
        stock.__name__, (Accelerated, base), exec_body=lambda ns: ns.update(body)
    )
    made.__qualname__ = stock.__qualname__
    return made


def reader(model: nn.Module) -> nn.Module:
    """Return the model around the layers, without head, that an accelerated model is or holds."""
    for module in model.children():
        if isinstance(module, Accelerated) and isinstance(module, PreTrainedModel):
            return reader(module)
    return model


def writers_of(stock: type) -> tuple[decoding.Writer, ...]:
    """Return what writes one token of a norm or an MLP as a program; none for other modules."""
    name = stock.__name__
    if not stock.__module__.startswith("transformers.models."):
        return ()
    if name.endswith("RMSNorm") and "Weightless" not in name:
        return _NORMS
    return (steps.gated_mlp,) if name.endswith("MLP") else ()


def functions_of(stock: type) -> tuple[str, ...]:
    """Return which of our functions a mixer's ``forward`` calls; none for other modules."""
    owner = next((kind for kind in stock.__mro__ if "forward" in kind.__dict__), stock)
    if not owner.__module__.startswith("transformers.models."):
        return ()
    body = inspect.unwrap(stock.forward)
    if not isinstance(body, types.FunctionType):
        return ()
    names = tuple(name for name in FUNCTIONS if name in body.__code__.co_names)
    return names if any(OPS.get(name) in _SCANS for name in names) else ()


def unknown(stock: type) -> str:
    """Return why a mixer must stay stock, or an empty string."""
    if "forward" not in stock.__dict__:
        bases = [kind.__name__ for kind in stock.__mro__ if "forward" in kind.__dict__]
        return f"{stock.__name__} is another class, made from {bases[0]}"
    forward = inspect.unwrap(stock.__dict__["forward"])
    taken = [
        p.name for p in inspect.signature(forward).parameters.values() if p.kind != p.VAR_KEYWORD
    ]
    if tuple(taken) != _MIXER:
        return _unlike(f"{stock.__name__}.forward", taken, _MIXER)
    for name in functions_of(stock):
        theirs = forward.__globals__.get(name)
        if not callable(theirs):
            return f"{name} is no function of {stock.__module__}"
        taken, known = _parameters(theirs), _parameters(FUNCTIONS[name])
        if taken != known:
            return _unlike(name, taken, known)
    return ""


def _parameters(function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(inspect.unwrap(function))
    return [p.name for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]


def _unlike(name: str, taken: Any, known: Any) -> str:
    import transformers

    from ssmzoo import __version__

    return (
        f"transformers {transformers.__version__} has a {name} of ({', '.join(taken)}), "
        f"ssmzoo {__version__} knows the one of ({', '.join(known)})"
    )


def _mixer(stock: type[nn.Module], code: ForwardCode) -> dict[str, Any]:
    names = functions_of(stock)
    stock_forward = stock.__dict__["forward"]
    # without its __name__, which would lead torch.compile to the module's own globals
    theirs = inspect.unwrap(stock_forward).__globals__
    ours = {name: value for name, value in theirs.items() if name != "__name__"}
    ours |= {name: FUNCTIONS[name] for name in names}
    run = _with_globals(stock_forward, inspect.unwrap(stock_forward), ours)
    # the one function that stock code gives no state to start from
    continues = "mamba_selective_scan" in names
    fuses = "mamba_inner_fn" in names
    by_head = continues and "n_mamba_heads" in inspect.unwrap(stock_forward).__code__.co_names
    linear = (nn.Linear, subclass(nn.Linear))
    writers = next((steps.MIXERS[name] for name in names if name in steps.MIXERS), ())

    @functools.wraps(stock_forward)
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        length, cache = hidden_states.shape[1], cache_params if cache is None else cache
        if not torch.compiler.is_compiling() and not code.unchanged(call.looked):
            _require_plain(self, cache, length, continues)
            given = (hidden_states, cache, attention_mask)
            return stock.forward(self, *given, **kwargs)
        if length == 1 and writers and not torch.compiler.is_compiling():
            states = _states_of_one_token(self, hidden_states, cache, attention_mask)
            if states:
                return decoding.token(
                    self,
                    writers,
                    hidden_states,
                    states,
                    lambda: layered(self, hidden_states, cache, attention_mask, **kwargs),
                    looked=call.looked,
                )
        return layered(self, hidden_states, cache, attention_mask, **kwargs)

    def layered(
        self: Any,
        hidden_states: Tensor,
        cache: Any,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        length = hidden_states.shape[1]
        if attention_mask is not None and attention_mask.shape[-1] > length:
            attention_mask = attention_mask[:, -length:]  # the mask of what the cache has seen too
        call.dt_limit = getattr(self, "time_step_limit", None)
        projection = _for_dt_proj(self, hidden_states, linear) if continues else None
        if projection is not None:
            self, call.fused = _WithProjection(self, projection), False
        elif fuses:
            call.fused = (
                cache is None
                and call.passing is None  # whose states the fused function does not take
                and attention_mask is None  # which the fused function does not take
                and self.activation in ("silu", "swish")
                and type(self.conv1d) is nn.Conv1d
                and not decoding.is_watched(self.conv1d)
                and all(
                    _is_plain(layer, linear) and not decoding.is_watched(layer)
                    for layer in (self.x_proj, self.dt_proj, self.out_proj)
                )
            )
        packing = call.packing
        if packing is None or packing.order is None:
            return carried(self, hidden_states, cache, attention_mask, **kwargs)
        if attention_mask is not None:
            attention_mask = packing.flat(attention_mask).view_as(attention_mask)
        x = packing.flat(hidden_states).view_as(hidden_states)
        y = carried(self, x, cache, attention_mask, **kwargs)
        return packing.batch(y.flatten(0, 1)[None], len(y))

    def carried(
        self: Any,
        hidden_states: Tensor,
        cache: Any,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        """Run the mixer from the states before its tokens, which lie as ``call.packing`` says."""
        if call.passing is not None:
            initial, final = call.passing.open_layer(self.layer_idx, hidden_states.device)
            state = LayerState(initial, keep=True, packing=call.packing, final=final)
            call.layer = heads = HeadStates(state) if by_head else state
            try:
                y = run(self, hidden_states, None, attention_mask, **kwargs)
                if isinstance(heads, HeadStates):
                    heads.close()
                return y
            finally:
                call.layer = None
        if not continues or cache is None or hidden_states.shape[1] == 1:
            return run(self, hidden_states, cache, attention_mask, **kwargs)
        layer = cache.layers[self.layer_idx]
        if layer.has_previous_state[0]:
            state = layer.recurrent_states[0]  # Zamba scans head by head
            call.states = state.unbind(1) if state.dim() == 4 else (state,)
        try:
            return run(self, hidden_states, cache, attention_mask, **kwargs)
        finally:
            call.states = ()

    return {"forward": forward, "dynamics": dynamics}


def _require_plain(mixer: Any, cache: Any, length: int, continues: bool) -> None:
    """Fail for what a stock mixer cannot read, in a class that somebody changed."""
    needs = ""
    if call.packing is not None:
        needs = "packed or padded sequences need"
    elif call.passing is not None:
        needs = "states that come from elsewhere need"
    elif continues and cache is not None and length > 1:
        layer = cache.layers[mixer.layer_idx]
        needs = "several tokens behind a cache need" if layer.has_previous_state[0] else ""
    if needs:
        raise RuntimeError(
            f"{type(mixer).__name__}: its forward, or what that calls, was replaced after "
            f"accelerate(), and {needs} ssmzoo's kernels; undo that, or restore the model and "
            "accelerate it again"
        )


def _states_of_one_token(
    mixer: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the states that a token moves, of the convolution and the scan; none: as it comes."""
    if cache is None or call.packing is not None or torch.is_grad_enabled():
        return ()
    if call.passing is not None:
        return ()
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        return ()
    layer = cache.layers[mixer.layer_idx]
    if len(layer.conv_states) != 1 or getattr(layer, "record_past", False):
        return ()
    conv, scan = layer.conv_states[0], layer.recurrent_states[0]
    if not isinstance(conv, Tensor) or not isinstance(scan, Tensor):
        return ()
    rows = len(hidden_states)
    return (conv, scan) if len(conv) == len(scan) == rows and layer.has_previous_state[0] else ()


def _part(stock: type[nn.Module], writers: tuple[decoding.Writer, ...]) -> dict[str, Any]:
    whole = normalised if writers is _NORMS else lambda _, __, forward: forward()

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 1:  # Zamba2's MLP has adapters of its own
            return stock.forward(self, *args, **kwargs)
        (x,) = args
        layered = functools.partial(whole, self, x, lambda: stock.forward(self, x))
        norm, looked = writers is _NORMS, call.looked
        return decoding.token(self, writers, x, (), layered, looked=looked, by_column=norm)

    return {"forward": forward}


def _is_plain(layer: Any, linear: tuple[type, ...]) -> bool:
    """Return whether a layer's weight is all that it multiplies with; True of no layer."""
    return layer is None or (type(layer) in linear and type(layer.weight) is nn.Parameter)


def _for_dt_proj(mixer: Any, x: Tensor, linear: tuple[type, ...]) -> _ManyRows | _Projection | None:
    """Return what a mixer's code gets for the layer whose weight it reads; None: the layer."""
    layer: Any = getattr(mixer, "dt_proj", None)
    prompt = x.shape[1] > 1 and decodes_on_cpu(x)
    if prompt and type(layer) in linear and not decoding.is_watched(layer):
        return _ManyRows(layer)
    return None if _is_plain(layer, linear) else _Projection(layer, mixer.time_step_rank, x)


class _Projection:
    """A linear layer under an adapter, or quantised, as code sees it that reads its weight.

    The weight is what the layer does to unit vectors.
    """

    def __init__(self, layer: Any, width: int, like: Tensor) -> None:
        self.layer, self.bias = layer, layer.bias
        rows = layer(torch.eye(width, dtype=like.dtype, device=like.device))
        self.weight = (rows if self.bias is None else rows - self.bias).T

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _ManyRows:
    """A plain linear layer, as code sees it that multiplies by its weight: a prompt's product."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.bias = layer, layer.bias

    @property
    def weight(self) -> _ManyRows:
        return self

    def __matmul__(self, x: Tensor) -> Tensor:
        """Map ``[B, in, L]`` to ``[B, out, L]``."""
        return many_rows_linear(x.transpose(1, 2), self.layer.weight).transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _WithProjection:
    """A mixer for one call of its forward, which reads the weight of ``dt_proj`` by itself."""

    def __init__(self, mixer: Any, projection: _Projection | _ManyRows) -> None:
        self._mixer = mixer
        self.dt_proj = projection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)


def _with_globals(
    function: types.FunctionType, body: types.FunctionType, names: dict[str, Any]
) -> types.FunctionType:
    """Return a decorated function whose innermost body looks names up elsewhere."""
    if function is body:
        copied = types.FunctionType(
            body.__code__, names, body.__name__, body.__defaults__, body.__closure__
        )
    else:
        inner = function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        ours = _with_globals(inner, body, names)
        cells = tuple(
            types.CellType(ours) if cell.cell_contents is inner else cell
            for cell in function.__closure__ or ()
        )
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _block(stock: type[nn.Module]) -> dict[str, Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = call.packing, call.passing
        if now != (None, None):  # for when checkpointing calls the forward again, alone
            kwargs["told_by_call"] = now
        return stock.__call__(self, *args, **kwargs)  # before 5.23 it checkpoints

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, told_by_call: Any = None, **kwargs: Any) -> Any:
        if told_by_call is None:
            return stock.forward(self, *args, **kwargs)
        with told_of(*told_by_call):
            return stock.forward(self, *args, **kwargs)

    return {"__call__": __call__, "forward": forward}


def _model(stock: type[nn.Module]) -> dict[str, Any]:
    names = tuple(inspect.signature(stock.forward).parameters)[1:]
    # some count positions from 0 in every call, whatever their cache has seen
    used = inspect.unwrap(cast(Any, stock.forward)).__code__.co_names
    forgets = "position_ids" in names and "arange" in used and "get_seq_length" not in used
    name_of_cache = cache_name(names) or CACHE

    def stock_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)  # which somebody may replace

    def read(self: Any, **kwargs: Any) -> Any:
        output = stock_forward(self, **kwargs)
        if call.passing is None:
            return output
        hidden_states = call.passing.close(output[0])
        if isinstance(output, tuple):
            return hidden_states, *output[1:]
        output.last_hidden_state = hidden_states
        return output

    def placed(self: Any, cache: Any, given: dict[str, Any], packing: Any) -> dict[str, Any]:
        """Return a call's arguments, with positions and a cache where these would not count."""
        if packing is not None or call.packing is not None or call.passing is not None:
            return given
        inputs = inputs_of(given)
        if "position_ids" in names and given.get("position_ids") is None and inputs is not None:
            seen = 0 if cache is None else cache.get_seq_length()
            places = positions(given, seen)
            if places is None and forgets and cache is not None:
                places = torch.arange(seen, seen + inputs.shape[1], device=inputs.device)[None]
            given["position_ids"] = places
        if cache is None and not torch.compiler.is_compiling() and returns_cache(self, given):
            counts = new_cache(self.config)
            if isinstance(counts, StockCache):
                given[name_of_cache] = counts
        return given

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or call.looked is not None:
            return run(self, *args, **kwargs)
        call.looked = {}
        try:
            return run(self, *args, **kwargs)
        finally:
            call.looked = None

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        # as generate and our own code call it, whatever the model does
        asked = renamed_cache(kwargs, name_of_cache)
        cache, positional = kwargs.get(name_of_cache), given.get(name_of_cache)
        if asked is not None and positional is not None:
            raise ValueError(f"{asked} must be left out beside {name_of_cache}, got both")
        cache = positional if cache is None else cache

        def under_both_names(output: Any) -> Any:
            # whose class may know both
            if asked and isinstance(output, ModelOutput) and not hasattr(type(output), asked):
                output[asked] = output.get(name_of_cache)
            return output

        if isinstance(cache, StockSequenceParallelCache):
            given |= {**kwargs, name_of_cache: None, "use_cache": False}
            tokens = _check_piece(self, cache, given)
            with told_of(None, cache.passing):
                output = forward(self, **given)
            cache.take(tokens)
            if isinstance(output, ModelOutput):
                output[name_of_cache] = cache
            return under_both_names(output)
        packing, kwargs = enter(self, cache, given, kwargs)
        if packing is not None:
            given, args = kwargs, ()
        if reader(self) is not self:
            if packing is None:
                return under_both_names(stock_forward(self, *args, **kwargs))
            with told_of(packing, call.passing):
                return stock_forward(self, **kwargs)
        if self._modules.get(STATE_ADAPTER) is None and not isinstance(cache, StockCache):
            require_same_start(getattr(cache, "adapter", None), None)
        kwargs = placed(self, cache, {**given, **kwargs}, packing)
        output = read_apart(self, read, kwargs, name_of_cache, packing)
        if output is not None:
            return under_both_names(output)
        if packing is not None:
            with told_of(packing, call.passing):
                return read(self, **kwargs)
        cache = kwargs.get(name_of_cache)
        passed = functools.partial(read, self, **kwargs)
        output = cache.run(self, passed, kwargs) if isinstance(cache, StockCache) else passed()
        return under_both_names(output)

    body = {"forward": forward, "cache_class": StockCache, "prompt_reader": property(reader)}
    body["sequence_cache"] = _sequence_cache
    body["startable_states"] = _startable_states
    body["counts_positions"] = "position_ids" in names
    return body | (overrides(stock) if issubclass(stock, GenerationMixin) else {})


def _sequence_cache(
    self: Any, group: dist.ProcessGroup | None, rows: CutRows | None
) -> StockSequenceParallelCache:
    """See :func:`ssmzoo.modeling.sequence_cache`."""
    name, mixers = type(self).__name__, 0
    for path, module in self.named_modules():
        if isinstance(module, Accelerated):
            mixers += bool(functions_of(module.stock_class))
        elif functions_of(type(module)):
            raise ValueError(
                "sequence parallelism passes states of layers on ssmzoo's kernels, and "
                f"{path} of {name} stays stock: {unknown(type(module))}"
            )
    layers = DynamicCache(config=self.config.get_text_config(decoder=True)).layers
    kinds = [type(layer).__name__ for layer in layers if type(layer).__name__ != "DummyLayer"]
    if kinds != ["LinearAttentionLayer"] * mixers:
        strange = sorted({*kinds} - {"LinearAttentionLayer"}) or ["LinearAttentionLayer"]
        raise ValueError(
            f"sequence parallelism passes states of a fixed size, and {name} has layers besides "
            f"the {mixers} on ssmzoo's kernels that attend to tokens (their caches are "
            f"{', '.join(strange)}); take a model without such layers"
        )
    return StockSequenceParallelCache(self.config, group, rows)


def _startable_states(self: Any, index: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a layer's states that a state adapter holds, as its mixer takes them.

    Raises:
        ValueError: The layer's states do not go through one convolution and one scan of ours.
    """
    states = {name: state for name, state in states.items() if name not in ("keys", "values")}
    if not states:
        return {}
    name = type(self).__name__
    mixers = [m for m in self.modules() if getattr(m, "layer_idx", None) == index]
    served = [m for m in mixers if isinstance(m, Accelerated) and functions_of(m.stock_class)]
    called = {known for mixer in served for known in functions_of(mixer.stock_class)}
    heads = "mamba_selective_scan" in called and states.get(SCAN_STATE, torch.empty(0)).dim() == 4
    if states.keys() != {CONV_STATE, SCAN_STATE} or not called & STARTED or heads:
        raise ValueError(
            "a state adapter starts layers that have one convolution and one scan on ssmzoo's "
            f"kernels, and layer {index} of {name} has others; take LoRA for this model"
        )
    return of_mixers(states)


def _check_piece(model: Any, cache: StockSequenceParallelCache, given: dict[str, Any]) -> int:
    """Return how many tokens a row a call reads as its piece, or raise what it cannot."""
    config: Any = reader(model).config
    if STATE_ADAPTER in reader(model)._modules:
        refuse_pieces()
    routes = given.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if routes is None else routes:
        raise ValueError(
            "output_router_logits must be False where a row lies on several processes: the loss "
            "that balances experts is of all tokens"
        )
    require_shifted(given.get("labels"), given.get("shift_labels"))
    if model.training and torch.is_grad_enabled():
        refuse_reentrant_checkpointing(model.modules())
    ids = given.get("input_ids")
    batch, tokens = (given["inputs_embeds"] if ids is None else ids).shape[:2]
    cache.check(config, batch)
    return tokens
