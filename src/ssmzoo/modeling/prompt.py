"""The state of a prompt that was read once, to continue from often, later, or in another process.

What surprises: the last token is not read yet. Asking for what follows is reading that token, so
``generate`` goes on from a saved prompt as it does from a prompt of its own.
"""

from __future__ import annotations

import copy
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling.cache import StateCache, check_kind

if TYPE_CHECKING:
    from ssmzoo.modeling.pretrained import SSMPreTrainedModel

FILE_NAME = "state.safetensors"


@dataclass(frozen=True)
class PromptState:
    """A prompt and the state after it, as :meth:`SSMForCausalLM.prefill` returns them.

    It never changes: :meth:`inputs` hands out copies, so one prompt can be continued many times.

    Attributes:
        cache: The state after all tokens but the last.
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]`` of 0 (padding on the left) and 1.
        model: The model that read it.
    """

    cache: StateCache
    input_ids: Tensor
    attention_mask: Tensor
    model: SSMPreTrainedModel
    versions: tuple[int, ...]  # of the model's tensors, to see whether it was trained since

    @classmethod
    def read(
        cls,
        model: SSMPreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: StateCache | None,
        chunk_size: int | None,
    ) -> PromptState:
        """See :meth:`SSMForCausalLM.prefill`."""
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must have shape [B, L] and hold a token, got {list(input_ids.shape)}"
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, "
                f"got {list(attention_mask.shape)}"
            )
        cache = StateCache(model.config)
        check_kind(past_key_values)
        if past_key_values is not None:
            past_key_values.check(model.config, len(input_ids))
            cache = copy.deepcopy(past_key_values)
        start, end = cache.seen_tokens, input_ids.shape[1] - 1
        if start > end:
            raise ValueError(
                f"past_key_values has seen {start} tokens, so input_ids must be those and at least "
                f"one more, got {end + 1}"
            )
        step = chunk_size or max(end, 1)
        with torch.no_grad():
            for begin in range(start, end, step):
                stop = min(begin + step, end)
                model.model(
                    input_ids[:, begin:stop],
                    attention_mask=attention_mask[:, :stop],
                    past_key_values=cache,
                )
        return cls(cache, input_ids, attention_mask, model, _versions(model))

    @property
    def num_tokens(self) -> int:
        """Return how many tokens a row has, padding included."""
        return self.input_ids.shape[1]

    def inputs(self, input_ids: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments with which ``model.generate(**...)`` continues the prompt.

        Args:
            input_ids: ``[B, M]``, tokens to append to the prompt; None: none.

        Returns:
            ``input_ids`` and ``attention_mask`` of all tokens, and a copy of the state.

        Raises:
            ValueError: ``input_ids`` has another shape.
        """
        ids, mask = self.input_ids, self.attention_mask
        if input_ids is not None:
            if input_ids.dim() != 2 or len(input_ids) != len(ids):
                raise ValueError(
                    f"input_ids must have shape [{len(ids)}, M], as many rows as the prompt, "
                    f"got {list(input_ids.shape)}"
                )
            ids = torch.cat([ids, input_ids.to(ids)], dim=1)
            mask = torch.cat([mask, mask.new_ones(input_ids.shape)], dim=1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "past_key_values": copy.deepcopy(self.cache),
        }

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``state.safetensors`` into a folder: states, tokens and the digest of the weights.

        Complete or not at all; other files of the folder stay as they are.

        Raises:
            RuntimeError: The weights changed since they read the prompt.
            OSError: The folder cannot be written to.
        """
        if _versions(self.model) != self.versions:
            raise RuntimeError(
                "the model's weights changed since it read this prompt, so its state is out of "
                "date; call prefill again"
            )
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.cache.write(
            folder / FILE_NAME,
            {"input_ids": self.input_ids, "attention_mask": self.attention_mask},
            {
                "weights": weights_digest(self.model.model),
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "tokens": str(self.num_tokens),
            },
        )


def load_state(directory: str | os.PathLike[str], model: SSMPreTrainedModel) -> PromptState:
    """Return the prompt that :meth:`PromptState.save_pretrained` wrote.

    Args:
        directory: The folder.
        model: The model that read it, loaded from the same checkpoint in the same dtype; it may be
            on another device.

    Raises:
        FileNotFoundError: The folder holds no saved prompt.
        ValueError: The file is damaged, or another model read the prompt.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {FILE_NAME}; save one with "
            "model.prefill(input_ids).save_pretrained(directory)"
        )
    cache, others, notes = StateCache.read(path, model.config, model.device)
    ids, mask = others.get("input_ids"), others.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape or "weights" not in notes:
        raise ValueError(
            f"{path} holds a cache without its prompt; read it with StateCache.load, or save one "
            "with model.prefill(input_ids).save_pretrained(directory)"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    if notes.get("dtype") != dtype:
        raise ValueError(
            f"{path} was made by a model in {notes.get('dtype')}, got one in {dtype}; load it with "
            f"dtype={notes.get('dtype')!r}"
        )
    digest = weights_digest(model.model)
    if notes["weights"] != digest:
        raise ValueError(
            f"{path} was made by other weights: their digest must be {notes['weights'][:12]}, got "
            f"{digest[:12]}; load the checkpoint that read the prompt"
        )
    return PromptState(cache, ids, mask, model, _versions(model))


@torch.no_grad()
def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all tensors that a checkpoint of this module holds."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy())
    return digest.hexdigest()


def _versions(model: nn.Module) -> tuple[int, ...]:
    """Return how often each tensor was written to; those made under inference_mode do not count."""
    return tuple(0 if t.is_inference() else t._version for t in model.state_dict().values())
