"""Continue a prompt with any causal language model that the Auto classes load."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.checkpoints.load import Dtype, check_dtype, load_tokenizer, model_folder
from ssmzoo.data.tokenizer import tokenizer_errors
from ssmzoo.environment.device import usable_device
from ssmzoo.evaluation.loading import load_to_run
from ssmzoo.files import writing

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TextStreamer,
    )

DEFAULT_TEMPERATURE = 0.8


def generate(
    model: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float | None = None,
    top_p: float = 1.0,
    beams: int = 1,
    seed: int = 0,
    device: str | None = None,
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    state: str | Path | None = None,
    save_state: str | Path | None = None,
    stock: bool = False,
    adapter: str | Path | None = None,
    write: Callable[[str], None] | None = None,
) -> str:
    """Return the model's continuation of a prompt, without the prompt.

    Args:
        model: A folder with a saved model and its tokenizer, or a Hub id.
        prompt: Any text. Empty starts from the tokenizer's beginning-of-sequence token, or goes on
            right behind ``state``.
        max_new_tokens: The most tokens to add; a model may end earlier.
        temperature: 0 takes the likeliest token each time. None is 0 with beams, else 0.8.
        top_p: Sample among the likeliest tokens that hold this much probability together.
        beams: Search this wide for the likeliest text.
        seed: Same seed, same text; the random state of the CPU and of the model's GPU stays as
            it was.
        device: Where to run; the GPU if there is one.
        dtype: Of the weights; "auto" is as saved.
        trust_remote_code: Let the checkpoint bring its own Python code.
        state: A folder that ``save_state`` wrote: go on from there; the prompt follows.
        save_state: Save the state after ``state`` and prompt in this folder.
        stock: Leave transformers' recurrent models as they are, without our kernels.
        adapter: A folder with a state adapter, from which the model starts.
        write: Called with each finished piece of text as it appears; not with beams.

    Raises:
        ValueError: An argument is out of range, the tokenizer cannot read the prompt, or the
            folder holds no readable model.
        FileNotFoundError: ``adapter`` holds no state adapter, or ``state`` no state.
        LookupError: The Hub has no such model, or cannot be reached.
    """
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE if beams == 1 else 0.0
    _check(max_new_tokens, temperature, top_p, beams, write is not None)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
    name = str(model)
    check_dtype(dtype)
    folder, place = model_folder(name), usable_device(device)
    tokenizer = load_tokenizer(name, folder, trust_remote_code)
    network, _ = load_to_run(
        name,
        folder,
        device=place,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        stock=stock,
        adapter=adapter,
    )

    import torch

    inputs = _inputs(network, tokenizer, prompt, state, save_state)
    network.generation_config = _settings(
        network, tokenizer, max_new_tokens, temperature, top_p, beams
    )
    streamer = _streamer(tokenizer, write) if write is not None else None
    cuda = [network.device] if network.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.inference_mode():
        torch.manual_seed(seed)
        ids = cast(Any, network).generate(**inputs, streamer=streamer)
    new = ids[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def _check(
    max_new_tokens: int, temperature: float, top_p: float, beams: int, streams: bool
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a number from 0 upwards, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if beams < 1:
        raise ValueError(f"beams must be at least 1, got {beams}")
    if top_p < 1 and temperature == 0:
        raise ValueError(f"top_p needs a temperature above 0, got top_p {top_p} and temperature 0")
    if streams and beams > 1:
        raise ValueError(f"write needs beams=1: beams know their text at the end, got {beams}")


def _settings(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    beams: int,
) -> GenerationConfig:
    """Return fresh settings, with which a checkpoint's own defaults do not mix."""
    from transformers import GenerationConfig

    own = network.generation_config
    ends = own.eos_token_id if own is not None else None
    if ends is None:
        ends = tokenizer.eos_token_id
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = ends[0] if isinstance(ends, list) else ends
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=beams,
        eos_token_id=ends,
        pad_token_id=padding,
        **sampling,
    )


def _inputs(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    state: str | Path | None,
    save_state: str | Path | None,
) -> dict[str, Any]:
    """Return the arguments of ``network.generate``: the prompt, or the state after it."""
    if state is None and save_state is None:
        return _encode(tokenizer, prompt, network)

    from ssmzoo.modeling import load_state, prefill

    if state is None:
        inputs = _encode(tokenizer, prompt, network)
    else:
        kept = load_state(state, network)
        if len(kept.input_ids) > 1:
            raise ValueError(f"state must hold one prompt, {state} holds {len(kept.input_ids)}")
        more = _encode(tokenizer, prompt, network, special=False)["input_ids"] if prompt else None
        inputs = kept.inputs(more)
    if save_state is not None:
        read = prefill(network, **inputs)
        with writing(Path(save_state)):
            read.save_pretrained(save_state)
        inputs = read.inputs()
    return inputs


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    network: PreTrainedModel,
    special: bool = True,
) -> dict[str, Any]:
    import torch

    with tokenizer_errors(
        f"the model's tokenizer cannot read the prompt {prompt!r:.60}", tokenizer
    ):
        ids = cast(list[int], tokenizer.encode(prompt, add_special_tokens=special))
    if not ids:
        if tokenizer.bos_token_id is None:
            raise ValueError("prompt must not be empty: this tokenizer has no token to start from")
        ids = [cast(int, tokenizer.bos_token_id)]
    rows = cast(torch.nn.Embedding, network.get_input_embeddings()).num_embeddings
    if max(ids) >= rows:
        raise ValueError(
            f"the tokenizer gives token id {max(ids)}, the model knows ids below {rows}: "
            "they do not belong together"
        )
    input_ids = torch.tensor([ids], device=network.device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def _streamer(tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> TextStreamer:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
