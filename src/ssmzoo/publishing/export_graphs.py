"""Models as graphs without Python: programs of ``torch.export``, and ONNX.

One graph reads prompts and continues them: it takes tokens ``[B, L]`` and the states before them;
states of zeros begin a new sequence, as in every family. A program with our ops reads a prompt at
once. One without them, and ONNX, scans over the graph of one token, so a prompt's token costs as
much as a generated one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from ssmzoo.files import require_name, write_folder, write_json
from ssmzoo.modeling import SSMForCausalLM, StateCache
from ssmzoo.modeling.derived import constant_in_graphs
from ssmzoo.modeling.pretrained import evaluating
from ssmzoo.modeling.state_adapter import state_adapter_of
from ssmzoo_kernels.dispatch import use_backend

States: TypeAlias = list[dict[str, Tensor]]

MODEL, CONTENTS = "model.onnx", "ssmzoo_onnx.json"
_NEEDED = ("onnx", "onnxscript")


class Prefill(nn.Module):
    """Map a prompt ``[B, L]`` to its logits ``[B, L, V]`` and the states behind it."""

    def __init__(self, model: SSMForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, States]:
        """Read from the first token; states by layer and name, a row a sequence."""
        output = self.model(input_ids, use_cache=True)
        return output.logits, [layer.states for layer in output.cache.layers]


class DecodeStep(Prefill):
    """Map the next tokens ``[B, L]`` and the states before them to logits and new states."""

    def forward(self, input_ids: Tensor, states: States) -> tuple[Tensor, States]:
        """Go on from states; outside of graphs RTF writes to them."""
        cache = StateCache(self.model.config)
        for layer, given in zip(cache.layers, states, strict=True):
            layer.states = dict(given)
        output = self.model(input_ids, cache=cache)
        pairs = zip(states, output.cache.layers, strict=True)
        return output.logits, [{name: la.states[name] for name in given} for given, la in pairs]


class Reader(nn.Module):
    """Map tokens ``[B, L]`` and the states before them to logits and states, token by token."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, input_ids: Tensor, states: States) -> tuple[Tensor, States]:
        """Go on from states; those of zeros begin new sequences."""
        from torch._higher_order_ops.scan import scan

        leaves, form = pytree.tree_flatten(states)

        def read(carried: list[Tensor], token: Tensor) -> tuple[list[Tensor], Tensor]:
            logits, new = self.step(token, pytree.tree_unflatten(carried, form))
            # a scan's states have one layout, and share no memory with those before
            return [x.contiguous().clone() for x in pytree.tree_leaves(new)], logits.squeeze(1)

        tokens = input_ids.T.unsqueeze(-1).contiguous()  # [L, B, 1]
        last, logits = scan(read, leaves, tokens)
        return logits.transpose(0, 1), pytree.tree_unflatten(last, form)


def initial_states(model: SSMForCausalLM, batch_size: int = 1) -> States:
    """Return the states of new sequences: zeros, by layer and name.

    Raises:
        TypeError: No causal model of the zoo.
        ValueError: The size of a state depends on the tokens seen, or the model starts from a state
            adapter.
    """
    if not isinstance(model, SSMForCausalLM):
        raise TypeError(
            f"model must be a causal language model of the zoo, got {type(model).__name__}; "
            "transformers.exporters exports others"
        )
    if state_adapter_of(model.model) is not None:
        raise ValueError(
            f"states of zeros begin a sequence in a graph, and this {type(model).__name__} starts "
            "from a state adapter; call remove_state_adapter(model) first"
        )
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad(), evaluating(model):
        _, states = Prefill(model)(token)
        _, after = DecodeStep(model)(token, states)
    for number, (one, two) in enumerate(zip(states, after, strict=True)):
        for name, state in one.items():
            if name not in two or two[name].shape != state.shape:
                raise ValueError(
                    "the states must have one size however many tokens were seen, got "
                    f"{name!r} of layer {number}, which grows: attention to all tokens cannot be "
                    "exported"
                )
    return [{n: s.new_zeros(batch_size, *s.shape[1:]) for n, s in own.items()} for own in states]


def export_step(model: SSMForCausalLM, *, portable: bool = False) -> ExportedProgram:
    """Return a program of one token: ``(input_ids [B, 1], states) -> (logits [B, 1, V], states)``.

    Arguments and errors are those of :func:`export_program`.
    """
    states = initial_states(model, 2)
    token = torch.zeros(2, 1, dtype=torch.int64, device=model.device)
    shapes = {0: Dim("rows")}, _moving(states)
    with torch.no_grad(), evaluating(model), _tracing(model, portable):
        program = torch.export.export(
            DecodeStep(model), (token, states), dynamic_shapes=shapes, strict=False
        )
        program = program.run_decompositions(_portable_forms() if portable else {})
    return _fit_for_a_file(program)


def export_program(model: SSMForCausalLM, *, portable: bool = False) -> ExportedProgram:
    """Return a program ``(input_ids [B, L], states) -> (logits [B, L, V], states)`` without Python.

    It reads any number of tokens of any number of sequences, from states that
    :func:`initial_states` or an earlier call returned. Weights are part of it.

    Args:
        model: It is traced as in evaluation; a later change of its weights is not seen.
        portable: Compute our ops by torch's own, so that ``torch.export.load`` needs no ssmzoo.

    Raises:
        TypeError: No causal model of the zoo.
        ValueError: The size of a state depends on the tokens seen.
        RuntimeError: A mixer's code cannot be traced, because it looks at values or takes the batch
            for a constant.
    """
    states = initial_states(model, 2)
    tokens = torch.zeros(2, 13, dtype=torch.int64, device=model.device)
    shapes = {0: Dim("rows"), 1: Dim("length")}, _moving(states)
    if portable:  # by the graph of one token, of which ONNX has all operators
        reader: nn.Module = Reader(_with_buffers(export_step(model, portable=True)))
    else:
        reader = DecodeStep(model)
    with torch.no_grad(), evaluating(model), _tracing(model, portable):
        program = torch.export.export(reader, (tokens, states), dynamic_shapes=shapes, strict=False)
    return _fit_for_a_file(program)


def export_onnx(model: SSMForCausalLM, directory: str | Path) -> list[Path]:
    """Write a model as ONNX, in standard operators: ``model.onnx`` and ``ssmzoo_onnx.json``.

    The graph reads ``input_ids [B, L]`` and the states ``past.LAYER.NAME`` before them, and returns
    ``logits [B, L, V]`` and ``present.LAYER.NAME``. The JSON file lists the states with shape
    (without the batch) and dtype.

    Args:
        model: A causal language model of the zoo.
        directory: The folder to write. An earlier export in it is replaced.

    Returns:
        The files written.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        TypeError: No causal model of the zoo.
        ValueError: The size of a state depends on the tokens seen, or the folder holds other files,
            is a file, or is ``.``.
        RuntimeError: Code that cannot be traced, or an operator that ONNX lacks.
    """
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"ONNX needs {name}; install it with: pip install 'ssmzoo[onnx]'")
    directory = Path(directory)
    require_name(directory, "directory")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; choose another folder")
    if directory.is_dir():
        held = {path.name for path in directory.iterdir()}
        if held - {MODEL, f"{MODEL}.data", CONTENTS} or (held and CONTENTS not in held):
            raise ValueError(f"{directory} holds files that no export wrote; choose another folder")
    program = export_program(model, portable=True)
    states = initial_states(model)
    names = [f"{number}.{name}" for number, layer in enumerate(states) for name in layer]
    with torch.no_grad(), _quiet():
        try:
            graph = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["input_ids", *(f"past.{name}" for name in names)],
                output_names=["logits", *(f"present.{name}" for name in names)],
                verbose=False,
                custom_translation_table={torch.ops.aten.sort.stable: _sorted},
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause = " ".join(str(error).partition("## Exception summary")[2].split())
            raise RuntimeError(
                f"{type(model).__name__} has an operator that cannot be written as ONNX: "
                f"{cause[:400]}"
            ) from error
    assert graph is not None
    told = [
        {"name": name, "shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")}
        for name, x in zip(names, pytree.tree_leaves(states), strict=True)
    ]

    def write(folder: Path) -> None:
        graph.save(str(folder / MODEL))
        contents = {"format": "ssmzoo-onnx-1", "model_type": model.config.model_type}
        write_json(folder / CONTENTS, {**contents, "states": told})

    write_folder(directory, write)
    return sorted(path for path in directory.iterdir() if path.is_file())


def _fit_for_a_file(program: ExportedProgram) -> ExportedProgram:
    """Take from a program the gradients of its constants and the folders of this machine."""
    for name, value in program.constants.items():
        if isinstance(value, Tensor):  # some are parameters as they stand
            program.constants[name] = value.detach()
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _moving(states: States) -> list[dict[str, dict[int, Any]]]:
    return [{name: {0: Dim("rows")} for name in layer} for layer in states]


def _with_buffers(program: ExportedProgram) -> nn.Module:
    """Return the module of a program; it holds constants as buffers, which a scan can read."""
    module = program.module(check_guards=False)
    for part in module.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
            value = getattr(part, name)
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)
    return module


@contextlib.contextmanager
def _tracing(model: nn.Module, portable: bool) -> Iterator[None]:
    backend = use_backend("reference") if portable else contextlib.nullcontext()
    try:
        with _quiet(), constant_in_graphs(), backend:
            yield
    except Exception as error:
        cause = " ".join(str(error).split())
        raise RuntimeError(
            f"{type(model).__name__} cannot be traced by torch.export, with any batch and with "
            f"states as inputs: {cause[:400]}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings of coming changes and of missing packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


# --- forms without operators that ONNX lacks: complex numbers by their parts ----------------------


def _portable_forms() -> dict[Any, Callable[..., Any]]:
    """Return the replacement of each of torch's operators."""
    aten = torch.ops.aten
    forms: dict[Any, Callable[..., Any]] = {
        aten.exp.default: _exp,
        aten.expm1.default: _expm1,
        aten.mul.Tensor: _times,
        aten.div.Tensor: _over,
        aten.add.Tensor: lambda x, y, alpha=1: _each(lambda a, b: a + alpha * b, x, y),
        aten.sub.Tensor: lambda x, y, alpha=1: _each(lambda a, b: a - alpha * b, x, y),
        aten.neg.default: lambda x: _each(torch.neg, x),
        aten._conj.default: lambda x: _joined(_parts(x)[0], -_parts(x)[1]),
        aten.clone.default: lambda x, **_: _each(torch.clone, x),
        aten.expand.default: lambda x, size, **_: _each(lambda a: a.expand(size), x),
        aten.view.default: lambda x, size: _each(lambda a: a.reshape(size), x),
        aten.unsqueeze.default: lambda x, dim: _each(lambda a: a.unsqueeze(dim), x),
        aten.select.int: lambda x, dim, index: _each(lambda a: a.select(dim, index), x),
        aten.sum.dim_IntList: lambda x, dim, keep=False: _each(lambda a: a.sum(dim, keep), x),
        aten.stack.default: lambda x, dim=0: _each(lambda *a: torch.stack(a, dim), *x),
        aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
    }
    wheres = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
    forms |= dict.fromkeys(wheres, _chosen)
    forms = {op: _of_complex(form) for op, form in forms.items()}
    return forms | {
        aten._to_copy.default: _converted,
        aten.complex.default: _joined,
        aten.polar.default: lambda size, angle: _joined(size * angle.cos(), size * angle.sin()),
        aten.searchsorted.Tensor: _searched,
    }


def _of_complex(form: Callable[..., Any]) -> Callable[..., Any]:
    """Let a form serve complex numbers only."""

    def chosen(*given: Any, **named: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_complex() for x in pytree.tree_leaves(given)):
            return form(*given, **named)
        return NotImplemented

    return chosen


def _parts(x: Any) -> tuple[Any, Any]:
    """Return real and imaginary part; 0 for that of a real number."""
    if isinstance(x, Tensor) and x.is_complex():
        real, imaginary = torch.view_as_real(x).unbind(-1)
        return real, imaginary
    return (x.real, x.imag) if isinstance(x, complex) else (x, 0)


def _joined(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], dim=-1))


def _each(form: Callable[..., Tensor], *given: Any) -> Tensor:
    """Apply a map that is linear over the reals to both parts."""
    real, imaginary = zip(*(_parts(x) for x in given), strict=True)
    real, imaginary = form(*real), form(*imaginary)
    return _joined(*torch.broadcast_tensors(real, imaginary))


def _chosen(condition: Tensor, x: Any, y: Any) -> Tensor:
    return _each(lambda a, b: torch.where(condition, a, b), x, y)


def _times(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = _parts(x), _parts(y)
    return _joined(*torch.broadcast_tensors(a * c - b * d, a * d + b * c))


def _over(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = _parts(x), _parts(y)
    size = c * c + d * d
    return _joined(*torch.broadcast_tensors((a * c + b * d) / size, (b * c - a * d) / size))


def _exp(x: Tensor) -> Tensor:
    real, angle = _parts(x)
    return _joined(real.exp() * angle.cos(), real.exp() * angle.sin())


def _expm1(x: Tensor) -> Tensor:
    real, angle = _parts(x)
    near = real.expm1() * angle.cos() - 2 * (angle / 2).sin().square()
    return _joined(near, real.exp() * angle.sin())


def _converted(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or not (dtype.is_complex or x.is_complex()):
        return NotImplemented
    if not dtype.is_complex:
        return _parts(x)[0].to(dtype)
    real, imaginary = (a.to(dtype.to_real()) if isinstance(a, Tensor) else a for a in _parts(x))
    return _joined(real, torch.zeros_like(real) if isinstance(imaginary, int) else imaginary)


def _searched(
    rising: Tensor, values: Tensor, *, right: bool = False, side: str | None = None, **_: Any
) -> Any:
    if rising.dim() != 1:
        return NotImplemented
    right = right or side == "right"
    before = rising <= values.unsqueeze(-1) if right else rising < values.unsqueeze(-1)
    return before.sum(-1)


def _sorted(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """Sort in ONNX, whose TopK is stable: of equal numbers the first comes first."""
    op = importlib.import_module("onnxscript").opset18
    count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)
