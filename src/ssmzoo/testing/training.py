"""Training: gradients, adapters, Trainer, checkpointing, compilation, low precision."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import default_data_collator
from transformers.modeling_layers import GradientCheckpointingLayer

from ssmzoo.modeling import SSMForCausalLM, checkpointing, selective_checkpointing
from ssmzoo.testing.forms import STEPPED, differences, slopes
from ssmzoo.testing.subject import (
    BUDGETS,
    EXACT,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    modules_named,
    probe,
    require,
)

SLACK = 2.0


def check_gradients(subject: Subject) -> Measured:
    """Gradients are right, finite and not zero; each parameter is in one optimizer group."""
    measured = Measured()
    ids, model = subject.ids(2, 12), subject.model()
    for dtype in BUDGETS:
        model = subject.model(dtype)
        for name, slope in gradients(model, model(ids, labels=ids).loss).items():
            require(bool(slope.isfinite().all()), f"{dtype}: the gradient of {name} is not finite")
            require(bool(slope.any()), f"{dtype}: the gradient of {name} is zero")
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    require(len(grouped) == len(set(grouped)), "param_groups names a parameter twice")
    missing = [n for n, p in model.named_parameters() if id(p) not in set(grouped)]
    require(not missing, f"param_groups leaves out {missing}")
    by_differences, _ = differences(subject)
    weights = [torch.randn_like(by_differences) for _ in range(4)]
    expected = torch.stack([(weight * by_differences).sum() for weight in weights])
    found = slopes(subject, weights)
    measured.compare("gradients against differences of the logits", found, expected, STEPPED)
    return measured


def check_lora(subject: Subject) -> Measured:
    """LoRA on the family's targets: every adapter learns, changes the output, and merges."""
    targets = subject.family.lora_targets
    if not targets:
        raise NotApplicable("the family names no lora_targets; lora_all_linear adapts every layer")
    present = modules_named(subject.model(), targets)
    absent = set(targets) - {name.rsplit(".", 1)[-1] for name in present}
    require(not absent, f"no module is called {sorted(absent)}")
    return _adapted(subject, list(targets), present.keys())


def check_lora_all_linear(subject: Subject) -> Measured:
    """LoRA on ``all-linear``: every adapter learns, changes the output, and merges."""
    model = subject.model()
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    head = {n for n, m in model.named_modules() if m is model.get_output_embeddings()}
    return _adapted(subject, "all-linear", linear - head)


def check_lora_parameters(subject: Subject) -> Measured:
    """LoRA on any parameter, alone and beside others: it learns, decodes step by step, merges."""
    measured, model = Measured(), subject.model()
    head = cast(nn.Module, model.get_output_embeddings()).weight  # may be the embedding's, tied
    ends: dict[str, dict[str, bool]] = {}
    for name, parameter in model.named_parameters():
        if parameter is not head:
            end = re.sub(r".*\.layers\.\d+\.", "", name)
            ends.setdefault(end, {})[name] = parameter.dim() in (2, 3)
    # PEFT takes names by their ends, here those of all layers unless these are of several kinds
    for end, alike in ends.items():
        *_, name = [name for name, fits in alike.items() if fits] or [""]
        if not name:
            continue
        target = end if all(alike.values()) else name
        others = [x for x in subject.family.lora_targets if not target.endswith(f"{x}.weight")]
        # one of a linear layer's weight is to the other layers what check_lora's of a layer is
        linear = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        for modules in ([], others) if others and not linear else ([],):
            _adapted_parameter(subject, measured, target, modules)
    return measured


def check_gradient_checkpointing(subject: Subject) -> Measured:
    """Gradient checkpointing runs every block twice and changes neither loss nor gradients."""
    measured = Measured()
    ids = subject.ids(2, 9)
    selective = {"use_reentrant": False, "context_fn": selective_checkpointing}
    for (dtype, budget), options in itertools.product(BUDGETS.items(), (None, selective)):
        model = copy.deepcopy(subject.model(dtype)).train()
        loss = model(ids, labels=ids).loss
        expected = gradients(model, loss)
        model.gradient_checkpointing_enable(options)
        blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        require(bool(blocks), "the model has no GradientCheckpointingLayer")
        runs: list[nn.Module] = []
        for block in blocks:
            # hooks of the block itself stay outside the checkpoint
            next(block.children()).register_forward_pre_hook(
                lambda *call, runs=runs: runs.append(call[0])
            )
        with mock.patch.object(checkpointing, "WIDTH", 1):  # products of tiny models are narrow
            again = model(ids, labels=ids).loss
            again.backward()  # recomputes once; a gradient that keeps the graph would keep it ready
        got = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        require(len(runs) == 2 * len(blocks), f"{len(blocks)} blocks ran {len(runs)} times")
        measured.compare(f"{dtype} loss", again, loss, budget)
        measured.compare_all(f"{dtype} gradient of", got, expected, budget)
    return measured


def check_trainer(subject: Subject) -> Measured:
    """Trainer lowers the loss of packed documents, evaluates it, and resumes to equal weights."""
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicable("needs accelerate; pip install 'ssmzoo[train]'")
    measured = Measured()
    rows = [subject.ids(1, length, seed=length)[0] for length in (9, 5, 12, 7, 3, 10, 8, 6)]
    whole, resumed = subject.fresh(), subject.fresh()
    ids = torch.cat(rows)[None]
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            before = whole(ids, labels=ids, cu_seqlens=ends).loss
        trainer = _train(whole, rows, folder, resume=None)
        checkpoints = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        require("checkpoint-2" in checkpoints, f"Trainer saved {checkpoints}")
        _train(resumed, rows, folder, resume=str(Path(folder) / "checkpoint-2"))
    batch = subject.ids(4, 9)
    with torch.no_grad():
        after = whole.eval()(ids, labels=ids, cu_seqlens=ends).loss
        logits = whole(batch).logits
    require(bool(after < before), f"the loss went from {before:.4f} to {after:.4f}")
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    require(len(evaluated) == 2, f"of two evaluations {len(evaluated)} gave a loss")
    budget = BUDGETS[torch.float32]
    measured.compare("the last evaluation's loss", torch.tensor(evaluated[-1]), after, budget)
    measured.compare("predicted logits", _predicted(trainer, batch), logits, budget)
    for (name, got), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        measured.same(f"{name} after resuming", got, expected)
    return measured


def check_compile(subject: Subject) -> Measured:
    """torch.compile takes the model without a graph break and changes nothing, backward too."""
    measured = Measured()
    deep, shallow = copy.deepcopy(subject.model()), copy.deepcopy(subject.shallow())
    ids = subject.ids(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    row, ends = ids.reshape(1, -1), torch.tensor([0, 5, 6, 16])
    batches: dict[str, tuple[SSMForCausalLM, dict[str, Tensor]]] = {
        "whole": (shallow, {"input_ids": ids}),
        "padded": (shallow, {"input_ids": ids, "attention_mask": mask}),
        "packed": (deep, {"input_ids": row, "cu_seqlens": ends}),  # layers share its tables
    }
    for name, (model, batch) in batches.items():
        torch._dynamo.reset()
        learns = name != "padded"  # padding is packing, whose gradients come next
        # with a default device dynamo reads Tensor's methods in Python, and stops at some
        device = torch.device("cpu") if name == "whole" else contextlib.nullcontext()
        try:
            # inductor changes how kernels are fused, not what is traced; this shows the latter
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
            with device, torch.set_grad_enabled(learns):
                got = compiled(**batch, use_cache=False).logits
        finally:
            torch._dynamo.reset()
        expected = model(**batch, use_cache=False).logits
        if name == "padded":
            got, expected = got * mask[:, :, None], expected * mask[:, :, None]
        measured.compare(f"{name}: logits", got, expected, EXACT)
        if learns:
            weights = probe(expected)
            slopes, true = (gradients(model, (x * weights).sum()) for x in (got, expected))
            measured.compare_all(f"{name}: gradient of", slopes, true, EXACT)
    return measured


def check_bfloat16(subject: Subject) -> Measured:
    """In bfloat16 the error is at most twice that of rounding weights and module outputs.

    The yardstick is the float64 model with its weights, every module's output and every gradient
    that enters a module rounded to bfloat16 where the bfloat16 model has them in bfloat16, and with
    everything inside a module exact. Autocast rounds less, and has the same budget.
    """
    measured = Measured()
    ids, eps = subject.ids(4, 24), torch.finfo(torch.bfloat16).eps
    low, exact = subject.model(torch.bfloat16), subject.model()
    dtypes = _output_dtypes(low, ids)
    rounded = copy.deepcopy(exact)
    with torch.no_grad():
        for parameter, lowered in zip(rounded.parameters(), low.parameters(), strict=True):
            parameter.copy_(lowered.to(parameter.dtype))
    for name, module in rounded.named_modules():
        if dtypes.get(name) == torch.bfloat16:
            module.register_forward_hook(lambda _m, _a, out: _Round.apply(out))
    true, yardstick = _results(exact, ids), _results(rounded, ids)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = _results(subject.model(torch.float32), ids)
    for kind, results in (("bfloat16", _results(low, ids)), ("autocast", automatic)):
        for name, expected in true.items():
            scale = expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
            error = float((results[name] - expected).norm() / scale)
            floor = float((yardstick[name] - expected).norm() / scale)
            measured.within(f"{kind} {name}", error, SLACK * (floor + eps))
    return measured


class _Round(torch.autograd.Function):
    """Round to bfloat16, forwards the values and backwards the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.to(torch.bfloat16).to(slope.dtype)


def _output_dtypes(model: SSMForCausalLM, ids: Tensor) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _a, out, name=name: (
                found.__setitem__(name, out.dtype) if isinstance(out, Tensor) else None
            )
        )
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def _results(model: SSMForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    logits = model(ids, use_cache=False).logits
    slopes = gradients(model, (logits * probe(logits)).sum())
    slopes = {f"gradient of {name}": slope for name, slope in slopes.items()}
    return {k: v.detach().double() for k, v in {"logits": logits, **slopes}.items()}


def _with_lora(subject: Subject, **targets: Any) -> Any:
    """Return a copy of the model with random LoRA adapters, which change its output."""
    if importlib.util.find_spec("peft") is None:
        raise NotApplicable("needs peft; pip install 'ssmzoo[peft]'")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
    return get_peft_model(copy.deepcopy(subject.model()), config)


def _adapted_parameter(
    subject: Subject, measured: Measured, target: str, modules: list[str]
) -> None:
    """Check an adapter of a parameter beside those of some modules."""
    what = f"{target} beside {', '.join(modules)}" if modules else target
    ids = subject.ids(2, 12)
    model = _with_lora(subject, target_parameters=[target], target_modules=modules)
    whole = model(input_ids=ids, labels=ids, use_cache=False)
    for output in (whole, model(input_ids=ids, labels=ids, use_cache=True)):
        for name, slope in gradients(model, output.loss).items():
            require(bool(slope.isfinite().all() and slope.any()), f"{what}: {name} learns nothing")
    logits = whole.logits.detach()
    with torch.no_grad():
        cache = model(input_ids=ids[:, :8], use_cache=True).cache
        steps = [model(input_ids=one, cache=cache).logits for one in ids[:, 8:].split(1, dim=1)]
        measured.compare(f"{what}: steps", torch.cat(steps, dim=1), logits[:, 8:], EXACT)
        merged = model.merge_and_unload()(ids).logits
        measured.compare(f"{what}: logits after merging", merged, logits, EXACT)


def _adapted(subject: Subject, targets: list[str] | str, expected: Any) -> Measured:
    measured = Measured()
    ids = subject.ids(2, 12)
    model = _with_lora(subject, target_modules=targets)
    prefix = "base_model.model."
    adapters = {n.removeprefix(prefix): m for n, m in model.named_modules() if hasattr(m, "lora_B")}
    require(
        adapters.keys() == set(expected),
        f"adapters on other modules than expected: {sorted(adapters.keys() ^ set(expected))}",
    )
    output = model(input_ids=ids, labels=ids)
    for name, slope in gradients(model, output.loss).items():
        require(bool(slope.isfinite().all() and slope.any()), f"{name} learns nothing")
    logits = output.logits.detach()
    with torch.no_grad():
        for name, adapter in adapters.items():
            weight = adapter.lora_B["default"].weight
            saved = weight.clone()
            weight.zero_()
            changed = model(input_ids=ids).logits
            weight.copy_(saved)
            difference = float((changed - logits).abs().max() / logits.abs().max())
            require(difference > EXACT, f"the adapter on {name} does not change the output")
        merged = model.merge_and_unload()(ids).logits
    measured.compare("logits after merging", merged, logits, EXACT)
    return measured


def _train(model: SSMForCausalLM, rows: list[Tensor], folder: str, resume: str | None) -> Any:
    """Return the Trainer after four steps of two documents each.

    A run that is not resumed saves and evaluates after every two.
    """
    from transformers import (
        DataCollatorWithFlattening,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    documents: Any = [{"input_ids": row} for row in rows]  # a list is a data set to Trainer
    options = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=len(rows),
        eval_strategy="no" if resume else "steps",
        eval_steps=2,
        max_steps=4,
        save_steps=2,
        save_strategy="no" if resume else "steps",
        logging_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    groups = model.param_groups(lr=1e-2, weight_decay=0.1)
    trainer = Trainer(
        model,
        options,
        train_dataset=documents,
        eval_dataset=documents,
        data_collator=DataCollatorWithFlattening(),
        optimizers=(torch.optim.AdamW(groups), None),
    )
    trainer.remove_callback(PrinterCallback)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _predicted(trainer: Any, ids: Tensor) -> Tensor:
    """Return the logits ``[B, L, V]`` that Trainer collects of whole rows, one document each."""
    trainer.data_collator = default_data_collator
    with contextlib.redirect_stdout(io.StringIO()):
        predicted = trainer.predict([{"input_ids": row, "labels": row} for row in ids])
    return torch.as_tensor(predicted.predictions)
