"""The tokens of one request, as ``generate`` chooses them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState

from ssmzoo.environment.messages import suggestion


class Sampler:
    """A request's logits processors, and the random numbers that nobody else draws.

    Args:
        model: The language model.
        config: As ``generate`` completes it.
        prompt: Tokens of the request.
        options: What the request has otherwise, by the fields of ``GenerationConfig``.
        seed: Of what is drawn.

    Raises:
        LookupError: There is no such option.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        config = copy.copy(config)
        if unknown := [*config.update(**options)]:
            name = unknown[0]
            raise LookupError(
                f"a request has no argument {name!r}{suggestion(name, vars(config))}; it has the "
                "fields of GenerationConfig"
            )
        self._processors = model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], device=model.device),
            device=model.device,
        )
        self._draws = bool(config.do_sample)
        self._generator = torch.Generator(model.device).manual_seed(seed)

    def choose(self, request: RequestState, logits: Tensor) -> tuple[int, Tensor]:
        """Return the next token by logits ``[V]``, and the scores ``[V]`` of all."""
        scores = logits[None].float()
        if self._processors:
            tokens = [*request.initial_tokens, *request.generated_tokens]
            ids: Any = torch.tensor([tokens], device=scores.device)
            scores = self._processors(ids, scores)
        if not self._draws:
            return int(scores.argmax(-1)), scores[0]
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        return int(drawn), scores[0]
