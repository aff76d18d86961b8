"""What a machine has, which kernels a model runs there, and how fast: observed, not foretold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.analysis.describe import installed_families
from ssmzoo.environment.hardware import installed_versions, usable_device

if TYPE_CHECKING:
    import torch

# by distribution, the extra of ours that installs it
_EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "lm-eval": "eval",
    "peft": "peft",
    "torchao": "quantize",
    "matplotlib": "inspect",
    "jinja2": "publish",
    "scikit-learn": "digits",
}


def examine_machine(device: str | None = None) -> dict[str, Any]:
    """Return what matters of this machine, with a way out beside everything that is missing.

    Returns:
        ``versions``; ``device`` in words; ``compiler``, ``triton`` and ``extras``, by package,
        ``"ok"`` or what is missing and what to do; ``kernel_cache``, where built C kernels stay;
        ``families`` with their status.

    Raises:
        ValueError: Torch cannot use the device here.
    """
    import torch

    from ssmzoo_kernels import dispatch, native
    from ssmzoo_kernels.machine import hardware

    place = usable_device(device)
    missing = dispatch.compiler_missing()
    found = installed_versions(*_EXTRAS)
    if not dispatch.has_triton():
        triton = 'not installed; pip install "ssmzoo[triton]" (GPUs only)'
    elif not torch.cuda.is_available():
        triton = "installed, but torch sees no CUDA device"
    else:
        triton = "ok"
    return {
        "versions": installed_versions("ssmzoo", "torch", "transformers", "triton"),
        "device": hardware(place),
        "compiler": missing or "ok",
        "triton": triton,
        "kernel_cache": None if missing else str(native.cache_folder()),
        "extras": {
            package: "ok" if package in found else f'missing; pip install "ssmzoo[{extra}]"'
            for package, extra in _EXTRAS.items()
        },
        "families": {row["name"]: row["status"] for row in installed_families(load=True)},
    }


def examine_model(
    model: str | Path, *, batch_size: int = 1, length: int = 512, device: str | None = None
) -> dict[str, Any]:
    """Run a backbone once over a text and once over one more token; return what ran.

    Args:
        model: A folder with a saved model, a Hub id, ``family`` for its smallest configuration, or
            ``family:preset``, both with random weights.
        batch_size: Sequences at a time.
        length: Tokens of each that are read before the step.
        device: Where to run; the GPU if there is one.

    Returns:
        ``parameters``, ``parameter_bytes``, ``state_bytes`` (None: it has none, and
        ``state_reason`` says why), ``seconds`` and ``tokens_per_second`` for reading and for a
        step, of the backbone without its head, and ``layers``: index, mixer, the ops of reading and
        of a step with their backends (none where all is plain torch), and ``hints``, why an op does
        not run on a faster one.

    Raises:
        LookupError: No such model, family or preset.
        ValueError: An argument is out of range, or the folder holds no model of the zoo.
    """
    for name, value in (("batch_size", batch_size), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    import torch

    from ssmzoo.analysis.measure import as_arguments, cache_after
    from ssmzoo.analysis.subject import load_subject, reference_inputs
    from ssmzoo_kernels.machine import hardware

    subject = load_subject(str(model), seed=0, device=device)
    network = subject.model.eval()
    place = network.device
    inputs = reference_inputs(subject, length, batch_size, tokens=None, seed=0)
    with torch.inference_mode():
        cache, reason = cache_after(network, inputs)

        def read() -> Any:
            return network(**as_arguments(network, inputs), use_cache=cache is not None)

        def step() -> Any:
            return network(**as_arguments(network, inputs[:, :1]), past_key_values=cache)

        reading, read_seconds = _observe(network, read), _least_seconds(read, place)
        stepping: list[list[tuple[str, str]]] = [[] for _ in reading]
        step_seconds = None
        if cache is not None:
            stepping, step_seconds = _observe(network, step), _least_seconds(step, place)
    tokens = {"read": (batch_size * length, read_seconds), "step": (batch_size, step_seconds)}
    return {
        "model": subject.name,
        "untrained": subject.untrained,
        "device": hardware(place),
        "batch_size": batch_size,
        "length": length,
        "parameters": sum(p.numel() for p in network.parameters()),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in network.parameters()),
        "state_bytes": None if cache is None else cache.nbytes,
        "state_reason": reason,
        "seconds": {"read": read_seconds, "step": step_seconds},
        "tokens_per_second": {
            name: None if seconds is None else round(count / seconds)
            for name, (count, seconds) in tokens.items()
        },
        "layers": [
            {
                "layer": index,
                "mixer": type(layer.mixer).__name__,
                "read": _backends(reading[index]),
                "step": _backends(stepping[index]),
                "hints": _hints({*reading[index], *stepping[index]}, place.type),
            }
            for index, layer in enumerate(network.layers)
        ],
    }


def _observe(network: Any, call: Callable[[], object]) -> list[list[tuple[str, str]]]:
    """Return the ops and backends that each layer ran during a call."""
    from ssmzoo_kernels.dispatch import watch

    ran: list[list[tuple[str, str]]] = [[] for _ in network.layers]
    begin = 0
    with watch() as events:

        def enter(*_: Any) -> None:
            nonlocal begin
            begin = len(events)

        def leave(index: int) -> Callable[..., None]:
            return lambda *_: ran[index].extend(events[begin:])

        hooks = [layer.register_forward_pre_hook(enter) for layer in network.layers]
        hooks += [
            layer.register_forward_hook(leave(index)) for index, layer in enumerate(network.layers)
        ]
        try:
            call()
        finally:
            for hook in hooks:
                hook.remove()
    return ran


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some calls: what else the machine does only adds."""
    import torch

    least, spent, calls = float("inf"), 0.0, 0
    while calls < 2 or (calls < 20 and spent < 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        least, spent, calls = min(least, seconds), spent + seconds, calls + 1
    return least


def _backends(ran: list[tuple[str, str]]) -> dict[str, str]:
    by_op: dict[str, list[str]] = {}
    for op, backend in ran:
        by_op.setdefault(op, [])
        if backend not in by_op[op]:
            by_op[op].append(backend)
    return {op: "+".join(backends) for op, backends in by_op.items()}


def _hints(ran: set[tuple[str, str]], device: str) -> dict[str, str]:
    from ssmzoo_kernels.dispatch import why_not_faster

    reasons = {op: why_not_faster(op, backend, device) for op, backend in sorted(ran)}
    return {op: reason for op, reason in reasons.items() if reason is not None}
