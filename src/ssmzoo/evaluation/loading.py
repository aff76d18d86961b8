"""A saved model made ready to score or to generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ssmzoo.checkpoints.load import Dtype, load_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ssmzoo.modeling import StateAdapter


def load_to_run(
    model: str,
    folder: Path | None,
    *,
    device: torch.device,
    dtype: Dtype,
    trust_remote_code: bool,
    stock: bool,
    adapter: str | Path | None,
) -> tuple[PreTrainedModel, StateAdapter | None]:
    """Return a causal language model on a device, and the state adapter that it starts from.

    transformers' recurrent layers run on our kernels unless ``stock`` leaves them as they are.

    Args:
        model: The folder or Hub id, as it was given.
        folder: The model's folder; None for the Hub.
        device: Where it runs.
        dtype: Type of the weights; "auto" is the checkpoint's own.
        trust_remote_code: Let a checkpoint run code of its own.
        stock: Leave transformers' recurrent models without our kernels.
        adapter: A folder with a state adapter.

    Raises:
        FileNotFoundError: ``adapter`` holds no state adapter.
        LookupError: The Hub has no such model.
        ValueError: It cannot be loaded.
    """
    from ssmzoo.modeling import load_state_adapter
    from ssmzoo.modeling.stock import choose_kernels

    network = load_model(model, folder, dtype, trust_remote_code)
    cast(Any, network).to(device)
    choose_kernels(network, stock)
    return network, None if adapter is None else load_state_adapter(adapter, network)
