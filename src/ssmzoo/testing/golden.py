"""Golden logits: what a saved model answered to a fixed prompt when it was saved.

They lie beside the weights as a safetensors file, are published with them, and are checked by any
later version and on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmzoo.checkpoints.weights import GOLDEN
from ssmzoo.environment.messages import without_bars, without_reports

EPS = torch.finfo(torch.float32).eps


def write_golden(folder: Path, name: str = GOLDEN, *, length: int = 32) -> Path:
    """Write the logits of a saved language model beside it.

    Args:
        folder: What ``save_pretrained`` wrote.
        name: The file's name.
        length: Tokens of the prompt, the square numbers modulo the vocabulary's size.

    Returns:
        The file: ``input_ids`` [1, length], ``logits`` [1, length, V] computed in float64 and
        rounded to float32, and ``float32_error``, the farthest that float32's logits were off.
    """
    from safetensors.torch import save_file

    from ssmzoo.files import appears_whole

    model = _load(folder)
    ids = torch.arange(length)[None] ** 2 % model.config.get_text_config().vocab_size
    rounded, exact = _logits(model, ids)
    tensors = {"input_ids": ids, "logits": exact.float(), "float32_error": _most(rounded - exact)}
    with appears_whole(folder / name) as unfinished:
        save_file(tensors, unfinished)
    return folder / name


def check_golden(folder: Path, name: str = GOLDEN) -> None:
    """Check that a saved language model answers as it did.

    Logits in float64 of the zoo's models may be off by the rounding of the largest one to float32.
    Those in float32 may be off twice as far as they were, and by twice that rounding; so may those
    in float64 of transformers' models, parts of which are float32 in any case. Golden logits
    of version 0.1.0 do not say how far float32 was off, and it is not checked.

    Raises:
        AssertionError: Logits are too far off, or weights were missing, left over or of other
            shapes.
    """
    from safetensors.torch import load_file

    from ssmzoo.modeling import SSMForCausalLM

    golden = load_file(folder / name)
    model = _load(folder)
    unit = EPS * _most(golden["logits"]).item()
    usual = golden.get("float32_error")
    loose = None if usual is None else 2 * (usual.item() + unit)
    strict = unit if isinstance(model, SSMForCausalLM) or loose is None else loose
    rounded, exact = _logits(model, golden["input_ids"])
    for precision, logits, allowed in (("float64", exact, strict), ("float32", rounded, loose)):
        error = _most(logits - golden["logits"]).item()
        if allowed is not None and not error <= allowed:  # NaN is not
            raise AssertionError(
                f"{precision} logits of {folder} are off by {error:.2e}, allowed {allowed:.2e}"
            )


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import ssmzoo.auto  # noqa: F401

    with without_reports(), without_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    model, report = loaded
    if wrong := {kind: found for kind, found in report.items() if found}:
        raise AssertionError(f"the weights of {folder} do not fit: {wrong}")
    return model.eval()


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits in float32 and in float64, both as float64; the model becomes float64."""
    with without_reports():
        rounded = model(ids, use_cache=False).logits
        exact = model.double()(ids, use_cache=False).logits
    return rounded.double(), exact


def _most(values: Tensor) -> Tensor:
    return values.double().abs().max()
