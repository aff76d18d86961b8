"""A machine's equipment, and a model's kernels and speed on it, as observed in a run."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ssmzoo.analysis.describe import installed_families
from ssmzoo.environment.device import installed_versions, usable_device

if TYPE_CHECKING:
    import torch
    from torch import nn

# by distribution, the extra of ours that installs it
_EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "pydantic": "train",
    "lm-eval": "eval",
    "peft": "peft",
    "torchao": "quantize",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "matplotlib": "inspect",
    "jinja2": "publish",
    "scikit-learn": "digits",
}

# by system, processor, and compiler or accelerator: the row of docs/machines.md; its last cell says
# what was run
_MACHINES = {
    ("linux", "x86_64", "gcc"): ("Linux x86-64", "gcc", "all tests"),
    ("linux", "x86_64", "clang"): ("Linux x86-64", "clang", "the C kernels' tests"),
    ("linux", "x86_64", ""): ("Linux x86-64", "none", "the tests of `eager`"),
    ("linux", "aarch64", "gcc"): ("Linux ARM64", "gcc", "the C kernels' tests, emulated"),
    ("linux", "aarch64", "clang"): ("Linux ARM64", "clang", "the C kernels' tests, emulated"),
    ("linux", "x86_64", "cuda"): (
        "Linux x86-64, NVIDIA GPU",
        "gcc, Triton",
        "the tests of `make test-gpu`, on an H200",
    ),
    ("darwin", "arm64", "mps"): (
        "macOS, Apple GPU (`mps`)",
        "none",
        "played on Linux, not run on a Mac",
    ),
    ("darwin", "arm64", "clang"): ("macOS", "clang", "played on Linux, not run on a Mac"),
    ("win32", "amd64", ""): ("Windows", "none", "played on Linux: loading, generating by `eager`"),
}


def _triton_version() -> Version:
    """Return the version of the module, which several distributions have."""
    import triton

    return Version(triton.__version__)


def examine_machine(device: str | None = None) -> dict[str, Any]:
    """Return the facts of this machine, with a way out beside everything that is missing.

    The command prints every entry.

    Returns:
        ``versions``; ``machine``, its row of docs/machines.md; ``device`` in words; ``compiler``
        and ``triton``: ``"ok"``, or what is missing or slow, why, and the way out; ``extras``: the
        same for each package; ``kernel_cache``, where built C kernels stay; ``families`` with their
        status.

    Raises:
        ValueError: Torch cannot use the device here.
    """
    import torch

    from ssmzoo_kernels import dispatch, native
    from ssmzoo_kernels.machine import hardware

    place = usable_device(device)
    missing = dispatch.compiler_missing()
    kind = native.compiler() if place.type == "cpu" else place.type
    here = (sys.platform, platform.machine().lower(), kind)
    *row, run = _MACHINES.get(
        here, (*filter(None, here), "not tried; docs/machines.md has what was")
    )
    found = installed_versions(*_EXTRAS)
    if not dispatch.has_triton():
        triton = 'not installed; pip install "ssmzoo[triton]" (GPUs only)'
    elif not torch.cuda.is_available():
        triton = "installed, but torch sees no CUDA device"
    elif (older := _triton_version()) < Version("3.7"):
        triton = f"ok, but from 3.7 on scans train about three times as fast; this is {older}"
    else:
        triton = "ok"
    return {
        "versions": installed_versions("ssmzoo", "torch", "transformers", "triton"),
        "machine": f"{', '.join(row)}: {run}",
        "device": hardware(place),
        "compiler": missing or native.lacks() or "ok",
        "triton": triton,
        "kernel_cache": None if missing else str(native.cache_folder()),
        "extras": {
            package: "ok" if package in found else f'missing; pip install "ssmzoo[{extra}]"'
            for package, extra in _EXTRAS.items()
        },
        "families": {row["name"]: row["status"] for row in installed_families(load=True)},
    }


@dataclass
class _Layer:
    """A layer to watch: its place, the mixer that is shown, the module whose calls are watched."""

    index: int
    mixer: str
    module: nn.Module
    stock: str | None = None  # why it does not run on our kernels
    reading: list[tuple[str, str]] = field(default_factory=list)
    stepping: list[tuple[str, str]] = field(default_factory=list)

    def facts(self, device: str) -> dict[str, Any]:
        """Return the layer's entry in the report."""
        return {
            "layer": self.index,
            "mixer": self.mixer,
            "read": _backends(self.reading),
            "step": _backends(self.stepping),
            "hints": _hints({*self.reading, *self.stepping}, device),
            "stock": self.stock,
        }


def examine_model(
    model: str | Path,
    *,
    batch_size: int = 1,
    length: int = 512,
    device: str | None = None,
    stock: bool = False,
) -> dict[str, Any]:
    """Run a backbone once over a text and once over one more token; return the kernels that ran.

    Saved weights are those of the file, in its dtype.

    Args:
        model: A folder with a saved model, a Hub id, ``family`` for its smallest configuration, or
            ``family:preset``, both with random weights.
        batch_size: Sequences at a time.
        length: Tokens of each that are read before the step.
        device: Where to run; the GPU if there is one.
        stock: Leave transformers' recurrent models as they are, without our kernels.

    Returns:
        ``parameters`` and ``parameter_bytes``, with the head of a saved model and without one of
        an untrained family, ``state_bytes`` (None: it has none, and
        ``state_reason`` says why), on a CPU ``memory``: its bandwidth for reading in GB/s, and how
        many tokens a second that allows one by one, with linear layers in each precision,
        ``seconds`` and ``tokens_per_second`` for reading and for a
        step, of the backbone without its head, and ``layers``: index, mixer, the ops of reading and
        of a step with their backends (none where all is plain torch), ``hints``, why an op does
        not run on a faster one, and ``stock``, why a layer stays as transformers made it. Of a
        model of transformers these are the recurrent layers, others run none of our ops.

    Raises:
        LookupError: No such model, family or preset.
        ValueError: An argument is out of range, or the folder holds neither a model of the zoo nor
            one of transformers with recurrent layers.
    """
    for name, value in (("batch_size", batch_size), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    import torch

    from ssmzoo.analysis.backbone import load_backbone, reference_inputs
    from ssmzoo.analysis.measure import as_arguments, cache_after
    from ssmzoo_kernels.machine import hardware

    loaded = load_backbone(str(model), seed=0, device=device, stock=stock, dtype="auto")
    network = loaded.model
    layers = _layers(network)
    place, weights = network.device, list(loaded.whole.parameters())
    inputs = reference_inputs(loaded, length, batch_size, tokens=None, seed=0)
    with torch.inference_mode():
        name, cache, state, reason = cache_after(network, inputs)

        def read() -> Any:
            return network(**as_arguments(network, inputs), use_cache=cache is not None)

        def step() -> Any:
            return network(**as_arguments(network, inputs[:, :1]), **{name: cache})

        _observe(layers, read, "reading")
        read_seconds = _least_seconds(read, place)
        step_seconds = None
        if cache is not None:
            step()  # the first token shows whether programs may stand for layers
            _observe(layers, step, "stepping")
            step_seconds = _least_seconds(step, place)
    tokens = {"read": (batch_size * length, read_seconds), "step": (batch_size, step_seconds)}
    return {
        "model": loaded.name,
        "untrained": loaded.untrained,
        "device": hardware(place),
        "batch_size": batch_size,
        "length": length,
        "parameters": sum(p.numel() for p in weights),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in weights),
        "state_bytes": state,
        "state_reason": reason,
        "memory": _memory(network) if place.type == "cpu" and cache is not None else None,
        "seconds": {"read": read_seconds, "step": step_seconds},
        "tokens_per_second": {
            name: None if seconds is None else round(count / seconds)
            for name, (count, seconds) in tokens.items()
        },
        "layers": [layer.facts(place.type) for layer in layers],
    }


def _memory(network: Any) -> dict[str, Any]:
    """Return the decoding speed that bandwidth allows: a token reads every weight once."""
    from torch import nn

    from ssmzoo_kernels.machine import multiplies_bfloat16, read_bandwidth

    linear = {m.weight: m.weight.shape for m in network.modules() if isinstance(m, nn.Linear)}
    tables = {m.weight for m in network.modules() if isinstance(m, nn.Embedding)}
    entries = sum(shape.numel() for shape in linear.values())
    rest = sum(
        p.numel() * p.element_size()
        for p in network.parameters()
        if p not in linear and p not in tables
    )
    scales = 4 * sum(shape[0] for shape in linear.values())
    sizes = {"float32": 4 * entries, "bfloat16": 2 * entries, "int8": entries + scales}
    sizes["int4"] = 5 * entries // 8  # with a float32 scale for 32 inputs
    bandwidth = read_bandwidth()
    return {
        "read_gb_s": round(bandwidth / 1e9, 1),
        "tokens_per_second": {name: round(bandwidth / (n + rest)) for name, n in sizes.items()},
        "for_reading": "bfloat16" if multiplies_bfloat16() else "float32",
        "for_decoding": "int8",
    }


def _layers(network: Any) -> list[_Layer]:
    """Return the layers of a model of the zoo, or the recurrent ones of transformers'."""
    from ssmzoo.modeling import SSMModel
    from ssmzoo.modeling.stock import accelerated

    if isinstance(network, SSMModel):
        return [
            _Layer(index, type(layer.mixer).__name__, layer)
            for index, layer in enumerate(network.layers)
        ]
    layers = []
    for number, (path, kernels) in enumerate(accelerated(network).items()):
        module, place = network.get_submodule(path), re.search(r"\.(\d+)\.", f".{path}.")
        index = number if place is None else int(place[1])
        why = kernels.removeprefix("stock: ") if kernels.startswith("stock") else None
        layers.append(_Layer(index, type(module).__name__, module, why))
    return layers


def _observe(layers: Sequence[_Layer], call: Callable[[], object], kind: str) -> None:
    """Note for each layer the ops and backends that it ran during a call."""
    from ssmzoo_kernels.dispatch import watch

    begin = 0
    with watch() as events:

        def enter(*_: Any) -> None:
            nonlocal begin
            begin = len(events)

        def leave(layer: _Layer) -> Callable[..., None]:
            return lambda *_: getattr(layer, kind).extend(events[begin:])

        hooks = [layer.module.register_forward_pre_hook(enter) for layer in layers]
        hooks += [layer.module.register_forward_hook(leave(layer)) for layer in layers]
        try:
            call()
        finally:
            for hook in hooks:
                hook.remove()


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some calls: other processes only add to it."""
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
