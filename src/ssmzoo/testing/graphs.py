"""Models leave Python: as programs of torch.export and as ONNX."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssmzoo.modeling import SSMForCausalLM
from ssmzoo.publishing.export_graphs import (
    DecodeStep,
    States,
    export_onnx,
    export_program,
    export_step,
    initial_states,
)
from ssmzoo.testing.subject import BUDGETS, Measured, NotApplicable, Subject

Read = Callable[[Tensor, States], tuple[Tensor, States]]


def check_export(subject: Subject) -> Measured:
    """Prompts and steps leave Python by torch.export, with any batch, length and states."""
    model = subject.shallow()
    step, whole = export_step(model).module(), export_program(model).module()

    def read(ids: Tensor, states: States) -> tuple[Tensor, States]:
        return (step if ids.shape[1] == 1 else whole)(ids, states)

    return _compared(subject, model, read, (7, 1, 1, 3, 30, 1))


def check_onnx(subject: Subject) -> Measured:
    """Written as ONNX a model reads prompts and goes on, of any batch and length, as in torch."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise NotApplicable("onnx is not installed")
    onnxruntime: Any = importlib.import_module("onnxruntime")
    model = subject.shallow(torch.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of what it removes
    with tempfile.TemporaryDirectory() as folder:
        graph, contents = export_onnx(model, folder)
        session = onnxruntime.InferenceSession(str(graph), options)
        told = json.loads(contents.read_text(encoding="utf-8"))["states"]
    names = [state["name"] for state in told]

    def read(ids: Tensor, states: States) -> tuple[Tensor, States]:
        given = dict(zip(names, (x for layer in states for x in layer.values()), strict=True))
        inputs: dict[str, Any] = {f"past.{name}": x.numpy() for name, x in given.items()}
        logits, *new = map(torch.as_tensor, session.run(None, {"input_ids": ids.numpy(), **inputs}))
        left = iter(new)
        return logits, [{name: next(left) for name in layer} for layer in states]

    return _compared(subject, model, read, (7, 1, 1, 3))


class _Logits(nn.Module):
    def __init__(self, model: SSMForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


def check_jit_trace(subject: Subject) -> Measured:
    """torch.jit.trace, which TensorBoard's graphs are made by, records the logits of one shape."""
    measured, model = Measured(), subject.shallow()
    ids, others = subject.ids(2, 12), subject.ids(2, 12, seed=1)
    with torch.no_grad():
        expected = model(others, use_cache=False).logits
    for learns in (False, True):
        # torch warns of every size that becomes a constant, and that a trace is old-fashioned
        with warnings.catch_warnings(), torch.set_grad_enabled(learns):
            warnings.simplefilter("ignore")
            traced: Any = torch.jit.trace(_Logits(model), ids)
        what = "logits of other tokens" + " with gradients" * learns
        measured.compare(what, traced(others), expected, BUDGETS[model.dtype])
    return measured


def _compared(
    subject: Subject, model: SSMForCausalLM, read: Read, parts: tuple[int, ...]
) -> Measured:
    """Compare what a graph reads, in such parts, with the model's logits."""
    measured, budget = Measured(), BUDGETS[model.dtype]
    for rows in (1, 3):
        ids, logits, states = subject.ids(rows, sum(parts) + 7), [], initial_states(model, rows)
        *some, rest = ids.split([*parts, 7], dim=1)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            for tokens in some:
                found, states = read(tokens, states)
                logits.append(found)
            # not the states themselves: a ring may begin anywhere
            behind, _ = DecodeStep(model)(rest, states)
        what = f"{rows} rows: "
        measured.compare(what + "logits", torch.cat(logits, 1), expected[:, :-7], budget)
        measured.compare(what + "logits behind its states", behind, expected[:, -7:], budget)
    return measured
