"""What a family's mixer is: parameters that stay float32, a forward with states, gauges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.dynamics import Dynamics
from ssmzoo.modeling.inputs import take_steps
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import keeping_precision
from ssmzoo.modeling.module_parts import ModuleParts, State, UnservedError
from ssmzoo.modeling.packing import Sequences, flip
from ssmzoo.modeling.pretrained import empty_is_nan
from ssmzoo_kernels.token_step import Program, Value


class _NaNUntilDrawn(type):
    """Fill what a mixer makes by ``torch.empty`` with NaN: one that no model draws must be seen."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with empty_is_nan():
            return super().__call__(*args, **kwargs)


class SSMMixer(nn.Module, metaclass=_NaNUntilDrawn):
    """Base class of a family's mixer: ``[B, L, D] -> [B, L, D]``, with a state or alone.

    Parameters that belong to the mixer itself, not to a submodule of it, are SSM parameters: they
    are float32 at least, and no cast to a lower precision (``.to(bfloat16)``, ``.half()``, loading
    in bfloat16) touches them. What a mixer makes by ``torch.empty`` is NaN until a model draws it.

    Attributes:
        param_group_names: Maps a parameter's name to its optimizer group. Parameters in these
            groups have no weight decay unless their group is given one, and may have a learning
            rate of their own.
        param_branch: The group that all other parameters of it and its submodules belong to; if it
            is given no weight decay, their matrices decay as usual.
        reads_residual: Whether :meth:`forward` and :meth:`write_token` also get the block's input
            before the norm, as ``residual``; where a call has none, its input.
        reads_both_ways: Whether :meth:`forward` itself reads in all of ``config.directions``; if
            not, the layer also runs the mixer, or a second one, on the reversed sequence.
        written_in_place: The states that a step may overwrite: no token reads the old values again.
        hands_on: What a model's first layer leaves in ``state.shared`` for others of its kind, as
            wide as the model and float32 at least; programs have it as a state.
        startable_states: How the states begin that a :class:`StateAdapter` gives a mixer to start
            from: it trains those of real numbers, and counters are zero; None: all.
        decaying_states: The states in which all that was read decays, of real numbers; these a
            :class:`QuantizedStateCache` rounds.
        writes_tokens: Whether :meth:`write_token` is of the class that :meth:`forward` is of.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {}
    param_branch: str | None = None
    reads_residual: ClassVar[bool] = False
    reads_both_ways: ClassVar[bool] = False
    written_in_place: frozenset[str] = frozenset()
    hands_on: ClassVar[tuple[str, ...]] = ()
    startable_states: frozenset[str] | None = None
    decaying_states: frozenset[str] = frozenset({"ssm"})
    writes_tokens: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward, written = (
            next(kind for kind in cls.__mro__ if name in kind.__dict__)
            for name in ("forward", "write_token")
        )
        cls.writes_tokens = forward is written

    def __init__(self, config: SSMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

    def __call__(
        self,
        hidden_states: Tensor,
        state: LayerState | None = None,
        packing: Sequences | Tensor | None = None,
        **named: Any,
    ) -> Any:
        """Call :meth:`forward`; without a state every sequence begins here, and none is left.

        Boundaries ``[S + 1]`` are a packing, too. A call without a state also takes by name what
        ``config.token_inputs`` names.
        """
        if isinstance(packing, Tensor):
            packing = Sequences.of(packing, hidden_states.shape[1], type(self).__name__)
        if state is None:
            batch, length = hidden_states.shape[:2]
            steps = take_steps(self.config.token_inputs, named, packing, batch, length)
            state = LayerState(packing=packing, shared=dict(steps))
        if self.reads_residual:
            named.setdefault("residual", hidden_states)
        return super().__call__(hidden_states, state, packing, **named)

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Mix along the sequence; read ``state.get``, leave ``state.put``.

        Args:
            hidden_states: ``[B, L, D]``.
            state: The state of this layer.
            packing: Where the sequences in the flat row ``[1, T, D]`` begin and end; None: every
                row is one. Ops take it for ``cu_seqlens``; a call may also give ``cu_seqlens``.

        Returns:
            ``[B, L, D]``.
        """
        raise NotImplementedError

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write :meth:`forward` of one token as instructions, which C runs where it decodes.

        A mixer without this decodes by its forward. So does one whose class has another forward
        than the class that wrote this.

        Args:
            program: What the instructions are written to.
            parts: Finds this mixer's layers and weights, and refuses those that something wraps.
            x: The token, ``[B, D]``.
            states: The states that :meth:`forward` would read, by name; instructions write the
                next ones over them.

        Returns:
            What :meth:`forward` returns, ``[B, D]``.
        """
        raise UnservedError

    @property
    def is_turned(self) -> bool:
        """Whether its layer also reads the reversed sequence, by :func:`read_backwards`."""
        return self.config.directions != "forward" and not self.reads_both_ways

    def next_is_written(self, state: LayerState) -> bool:
        """Tell whether the next token is one that :meth:`write_token` is written for."""
        return True

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return what is known of the filters at an input ``[B, L, D]``, or None to measure them.

        ``ssmzoo inspect`` calls this without gradients, in evaluation mode.
        """
        return None

    def project_parameters(self) -> None:
        """Project parameters into their allowed range after an optimizer step, if they have one.

        Runs in place and without gradients, so that the optimizer keeps the same tensors.
        """

    def gauges(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Return numbers to log while this layer trains, one tensor of one element per name.

        Our trainer calls this when it logs, without gradients, in evaluation mode, at what the
        mixer gets ``[B, L, D]`` of a few tokens of the batch.
        """
        return {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register an SSM parameter; one that was made in a low default dtype, in float32.

        transformers loads under a default dtype, bfloat16 say, and gives parameters and buffers the
        dtype that was registered, whether the checkpoint has them or not.
        """
        if param is not None and _in_low_default(param):
            param = nn.Parameter(param.detach().float(), param.requires_grad)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer, as :meth:`register_parameter` does."""
        if tensor is not None and _in_low_default(tensor):
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SSMMixer:
        if recurse:
            for child in self.children():
                child._apply(fn)

        return super()._apply(keeping_precision(fn), recurse=False)


def second_mixer(mixer: SSMMixer) -> nn.ModuleDict | None:
    """Return the mixer of a layer that reads backwards, if it is another than this one."""
    if not mixer.is_turned or mixer.config.directions != "both-separate":
        return None
    # so that its parameters' names end as the other mixer's
    return nn.ModuleDict({"mixer": type(mixer)(mixer.config, mixer.layer_idx)})


def read_backwards(
    mixer: SSMMixer,
    second: nn.ModuleDict | None,
    hidden_states: Tensor,
    state: LayerState,
    packing: Sequences | None,
    more: Mapping[str, Tensor],
) -> Tensor:
    """Return what a mixer, or a second one, makes of the reversed sequences, in their own order.

    In both ``directions`` a layer adds it to the mixer's output.

    Args:
        mixer: The mixer that reads forwards.
        second: As :func:`second_mixer` made it.
        hidden_states: ``[B, L, D]``.
        state: The layer's, which has what mixers on reversed sequences share.
        packing: Where sequences lie.
        more: The mixer's further inputs, ``[B, L, D]``, by name.
    """
    other: Any = mixer if second is None else second["mixer"]
    more = {name: flip(given, packing) for name, given in more.items()}
    fresh = LayerState(packing=packing, shared=state.reversed_shared)
    return flip(other(flip(hidden_states, packing), fresh, packing, **more), packing)


def _in_low_default(tensor: Tensor) -> bool:
    return tensor.dtype == torch.get_default_dtype() and tensor.dtype.itemsize < 4
