"""The head that forecasts the values after a series."""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.modeling_outputs import TokenClassifierOutput

from ssmzoo.modeling.configuration import SSMConfig, stateless
from ssmzoo.modeling.head import SSMHead, names_inputs
from ssmzoo.modeling.inputs import refuse_cache
from ssmzoo.modeling.layer_state import LayerState
from ssmzoo.modeling.layers import Dropout, Linear
from ssmzoo.modeling.losses import ignore, squared_error
from ssmzoo.modeling.mixer import SSMMixer
from ssmzoo.modeling.packing import Sequences
from ssmzoo_kernels import beside


@strict
class SSMForecastingConfig(SSMConfig):
    """Base of the configurations of families that forecast.

    Attributes:
        mixer_dropout: Probability to drop inputs of the last layers of mixers and of the head.
        horizon: Steps to forecast.
        open_loop_weight: Weight of the errors on the series itself in the loss.
    """

    own_model: ClassVar[frozenset[str]] = frozenset({"horizon", "open_loop_weight"})

    mixer_dropout: float | int = stateless(0.0)
    horizon: int = stateless(1)
    open_loop_weight: float | int = stateless(1.0)

    def check(self) -> None:
        """Fail unless the fields fit each other."""
        super().check()
        self.check_counts("horizon")
        self.check_probabilities("mixer_dropout")
        self.check_finite("open_loop_weight")


class SSMDecoder(SSMMixer):
    """Base of the layer that forecasts from a state, without inputs.

    Attributes:
        warm_up: Values that fill its state; errors before them are ignored.
    """

    warm_up: int

    def forward(  # a call, before which offloaded parameters are fetched
        self,
        hidden_states: Tensor,
        state: LayerState,
        packing: Sequences | None = None,
        horizon: int | None = None,
    ) -> Any:
        """Return :meth:`forecast`, without a horizon :meth:`open_loop`; both leave no state."""
        if horizon is None:
            return self.open_loop(hidden_states, packing)
        return self.forecast(hidden_states, packing, horizon)

    def forecast(self, hidden_states: Tensor, packing: Sequences | None, horizon: int) -> Tensor:
        """Map ``[B, L, D]`` to the ``[B, horizon, D]`` that follow, ``[S, horizon, D]`` if packed.

        Inputs are float32 or float64; outputs may have any precision.
        """
        raise NotImplementedError

    def open_loop(self, hidden_states: Tensor, packing: Sequences | None) -> list[Tensor]:
        """Return, for each input, the output after it and the next input that it expects."""
        raise NotImplementedError


class SSMForForecasting(SSMHead):
    """A backbone of continuous values, a decoder, and ``score(dropout(GELU(.)))`` of its outputs.

    A family's class also names its ``decoder_class``, and its configuration is an
    :class:`SSMForecastingConfig`.
    """

    decoder_class: type[SSMDecoder]

    def __init__(self, config: Any) -> None:
        if config.input_channels is None:
            raise ValueError(
                f"{type(self).__name__} forecasts values, but input_channels is None; set it in "
                "the configuration"
            )
        super().__init__(config)
        self.decoder = self.decoder_class(config, config.num_hidden_layers)
        self.dropout = Dropout(config.mixer_dropout, config.tie_dropout)
        self.score = Linear(config.hidden_size, config.input_channels)
        self.post_init()

    @partial(names_inputs, cache=False)
    def forward(
        self,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        horizon: int | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Forecast each series.

        Args:
            input_values: Series ``[B, L, C]``, or ``[B, L]`` for one channel.
            attention_mask: 1 for values, 0 for padding around them, ``[B, L]``.
            labels: The values that followed, ``[B, horizon, C]``; nan is ignored.
            horizon: Steps to forecast; default: the configuration's.
            return_dict: Return an output object (default) or a tuple.
            **inputs: Other arguments of :meth:`SSMModel.forward`, but no cache.

        Returns:
            ``logits [B, horizon, C]`` (``[S, horizon, C]``), the forecast, and ``loss``, its mean
            squared error. ``open_loop_weight`` times two more errors is added: of the next value of
            the series (after the last value, the first label), and of the decoder's next input;
            both only where the values before fill the decoder's state.

        Raises:
            ValueError: A horizon below 1, labels of another shape, or a cache.
        """
        refuse_cache(inputs)
        steps: int = self.config.horizon if horizon is None else horizon
        if steps < 1:
            raise ValueError(f"horizon must be at least 1, got {steps}")
        inputs |= {"input_values": input_values, "attention_mask": attention_mask}
        outputs, packing = self.read({**inputs, "use_cache": False})
        hidden = outputs.last_hidden_state
        hidden = hidden.to(torch.promote_types(torch.float32, hidden.dtype))
        if packing is not None:  # as one flat row
            hidden = packing.flat(hidden)
        later = self.decoder(hidden, packing=packing, horizon=steps)
        if packing is not None and packing.rows is not None:
            later = later[beside(packing.rows, later)]
        logits = self._read(later, hidden.device)
        loss = None
        if labels is not None:
            if labels.shape != logits.shape:
                raise ValueError(
                    f"labels must have shape {list(logits.shape)}, got {list(labels.shape)}"
                )
            loss = squared_error(logits, labels)
            if self.config.open_loop_weight:
                assert input_values is not None
                values = input_values if packing is None else packing.flat(input_values)
                values = values.reshape(*hidden.shape[:2], -1)
                errors = self._errors(hidden, values, labels[:, :1], packing)
                loss = loss + self.config.open_loop_weight * errors
        return self.answer(TokenClassifierOutput, outputs, return_dict, loss=loss, logits=logits)

    def _read(self, y: Tensor, device: torch.device) -> Tensor:
        return self.score(self.dropout(F.gelu(y).to(device, self.score.weight.dtype)))

    def _errors(
        self, hidden: Tensor, values: Tensor, first: Tensor, packing: Sequences | None
    ) -> Tensor:
        """Return the errors of the next value and of the next input, summed.

        After a series' last value the next value is the ``first`` of its labels, ``[S, 1, C]``.
        """
        output, expected = self.decoder(hidden, packing=packing)
        read, warm_up = self._read(output, hidden.device), self.decoder.warm_up
        seen, real = torch.arange(1, hidden.shape[1], device=hidden.device), None
        if packing is None:
            last, lengths = read[:, -1:], seen.new_tensor([hidden.shape[1]])
        else:
            seen = seen - packing.offsets[packing.numbers()[1:]]
            ends, lengths, real = packing.offsets[1:], packing.offsets.diff(), packing.real()
            if packing.rows is not None:
                ends, lengths = ends[packing.rows], lengths[packing.rows]
            last, first = read[:, (ends - 1).clamp(min=0)], first.transpose(0, 1)
        left_out = seen < warm_up
        left_out = (left_out if real is None else left_out | ~real[1:])[None, :, None]
        followed = ignore(first.to(values), (lengths < warm_up)[None, :, None])
        error = squared_error(
            torch.cat([read[:, :-1], last], dim=1),
            torch.cat([ignore(values[:, 1:], left_out), followed], dim=1),
        )
        return error + squared_error(expected[:, :-1], ignore(hidden[:, 1:], left_out))
