"""The initialization of a model."""

from __future__ import annotations

from typing import Any

import torch

from ssmzoo.testing.subject import Measured, Subject, require


def check_initialization(subject: Subject) -> Measured:
    """Parameters and buffers are drawn in ``_init_weights``, all of them and wholly.

    The check fills them with NaN before. A tensor that ``_init_weights`` does not draw would hold
    whatever lies in memory where a checkpoint lacks it.
    """
    with torch.device("meta"):  # as transformers makes what it loads
        model: Any = subject.family.causal_lm_class(subject.config())
    model.to_empty(device="cpu")
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    numbers = {name: x for name, x in named.items() if x.is_floating_point() or x.is_complex()}
    with torch.no_grad():
        for tensor in numbers.values():
            tensor.fill_(torch.nan)
        for module in model.modules():
            model._init_weights(module)
    left = [name for name, tensor in numbers.items() if tensor.isnan().any()]
    require(
        not left,
        f"_init_weights leaves NaN in {', '.join(left)}: draw each when you get the module that it "
        "belongs to",
    )
    return Measured()
