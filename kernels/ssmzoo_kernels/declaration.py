"""An op by declaration: its tensors, shapes and choices, from which all of its plumbing follows.

An op is declared once, beside its public function::

    SCAN = Op(
        "linear_scan",
        inputs={"a": "B L D", "b": "B L D", "initial_state": "S D?"},
        outputs={"h": "B L D", "final_state": "S D as exact"},
        kernels=lambda name: importlib.import_module(f"ssmzoo_kernels.linear_scan.{name}"),
        reference=reference.linear_scan,
        packing="flat",
    )

and ``SCAN(a, b, state, cu_seqlens=..., backend=...)`` checks the arguments, chooses a backend and
runs it: at once where nobody traces or transforms, else as the op ``ssmzoo::linear_scan`` of
``torch.library``, whose schema, fake and autograd are made here. The backward is an op of its
own, ``ssmzoo::linear_scan_backward``.

An input is its shape in letters, then what it holds if that is not floating point (``complex``,
``number`` for either, ``int64``, ``bool``), then ``?`` if it may be absent: ``"B L D"``,
``"H N complex?"``. ``K-1`` is a size less one. Equal letters are equal sizes; ``S`` counts the
sequences, packed ones or rows of a batch. An output's dtype is the first input's, or comes after
``as``: ``exact`` (float32, or float64 for float64), ``real`` or ``complex`` (the first input's
counterpart), or an input's name.

With ``packing="flat"`` kernels get ``B L`` as one dimension of ``T`` tokens, cut into sequences by
``offsets`` [S + 1]; with ``"rows"`` they get the batch as it is, and ``offsets`` or None.

The kernels of a backend are two functions whose arguments come by position, in the order declared::

    forward(*inputs, [offsets], [save], *options)             -> (*outputs, [saved])
    backward(*gradients of outputs, *what is kept, *options)  -> a gradient for each floating input
                                                                 that has one of its own

- Tensors come with the strides that the caller's had. Results may have any strides: the op makes
  them contiguous. An absent input is None.
- ``offsets`` is there for an op with ``packing``.
- ``save`` (whether a backward will follow) and ``saved`` are there if the op declares ``saved``.
- What is kept: the inputs, ``offsets`` and ``saved``, unless the op declares ``keeps``.
- The gradient of an output is None if nobody asked for it; what is returned for an absent input
  does not matter.
- Options come as declared; a ``Choice`` that leaves the kernels one value is not passed.

A backend ``cpu`` also has ``load(dtype)``, or ``load(dtype, variant)`` for an op that declares a
``variant``. It builds and loads the C file and raises ``OSError`` or ``RuntimeError`` where that
fails; then ``eager`` stands in. ``offers`` names the backends that an op brings, if it lacks some.
An op without an ``eager`` of its own gets one that runs the reference (``derived``).

Any package may declare ops. Their names are one space, ``ssmzoo::`` of ``torch.library``: begin
yours with your package's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ssmzoo_kernels.derived import FromReference
from ssmzoo_kernels.dispatch import ALL, Backend, c_kernels, choose, is_traced, record
from ssmzoo_kernels.validation import (
    NAMESPACE,
    Packing,
    batched_gradient,
    check_forward_mode,
    innermost_transform,
    segment_offsets,
    transformed,
)

_SLOPED = ("float", "complex", "number")  # kinds that have gradients
_DTYPES = {
    "complex": (torch.complex64, torch.complex128),
    "int64": (torch.int64,),
    "bool": (torch.bool,),
}
_MOST_SEEN = 1000
_PLAIN = (Tensor, torch.nn.Parameter)
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # of make_fx
_declared: dict[str, Op] = {}


class Argument(NamedTuple):
    """A tensor of an op."""

    name: str
    dims: tuple[tuple[str, int], ...]  # ("K", -1) is K - 1
    kind: str  # what it holds; of an output, its dtype
    optional: bool = False

    @property
    def rule(self) -> str:
        """Return the shape as messages name it: ``[B, K - 1, D]``."""
        words = (x if not more else f"{x} {'+-'[more < 0]} {abs(more)}" for x, more in self.dims)
        return f"[{', '.join(words)}]"

    @property
    def is_row(self) -> bool:
        """Tell whether the tensor has a row of tokens for each sequence of a batch."""
        return [x for x, _ in self.dims[:2]] == ["B", "L"]


class Choice:
    """An option of few values.

    Args:
        values: The values that kernels know.
        reference: More values, which only the reference knows.
    """

    def __init__(self, *values: str | None, reference: tuple[str, ...] = ()) -> None:
        self.values = values
        self.reference = reference


def declared() -> Mapping[str, Op]:
    """Return all ops that were declared, by name."""
    return _declared


class Op:
    """An op, declared (the grammar and the kernels' signatures: the module's docstring).

    Args:
        name: The op's name; it opens messages and names the registered op.
        inputs: The tensors in the order of the public function, by name.
        outputs: The results of kernels, by name.
        kernels: From a backend's name, its ``forward`` and ``backward``: a module or any object.
        reference: The formula; it gets the public function's tensors and options, and never packed
            rows: those come to it sequence by sequence.
        packing: How an op along sequences sees a batch and packed rows; None for other ops.
        options: Other arguments that kernels get, in order: a ``Choice`` or a type of
            ``torch.library``'s schemas (``"int"``, ``"float[]"``). A choice that leaves kernels one
            value is not told to them. A size of outputs may be an ``"int"``, by its name.
        least: By tensor, what its last size counts and must be one of at least. These tensors
            are checked before the others.
        saved: What the forward makes for the backward alone, in the exact dtype: a shape, or a
            function from the backend's kernels and the sizes by letter to a shape.
        keeps: What the backward reads of inputs, ``offsets``, outputs and ``saved``; None for all
            inputs, ``offsets`` and ``saved``. The gradient of an input that is not kept is like the
            first one that is.
        offers: The backends there are, see ``dispatch.choose``. Without ``"eager"`` it is derived.
        variant: The option that says which C kernel is needed, where there are several.
        alike: Inputs whose gradient is that of another one, which alone is computed.
        has_backward: Whether gradients flow at all.
        writes: The input that kernels write to.

    Raises:
        ValueError: Another package's op has this name, or ``eager`` cannot be derived.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        *,
        kernels: Callable[[str], Any],
        reference: Callable[..., Any],
        packing: Literal["flat", "rows"] | None = None,
        options: Mapping[str, Choice | str] | None = None,
        least: Mapping[str, str] | None = None,
        saved: str | Callable[[Any, Mapping[str, int]], Sequence[int]] | None = None,
        keeps: Sequence[str] | None = None,
        offers: tuple[str, ...] = ALL,
        variant: str | None = None,
        alike: Mapping[str, str] | None = None,
        has_backward: bool = True,
        writes: str | None = None,
    ) -> None:
        self.declarer = kernels.__module__
        other = _declared.get(name)
        if other and other.declarer.partition(".")[0] != self.declarer.partition(".")[0]:
            raise ValueError(
                f"{name}: {self.declarer} must give its op a name of its own, this one is of "
                f"{other.declarer}; begin it with your package's name"
            )
        self._derived = "eager" not in offers
        if self._derived and (saved or keeps or writes):
            raise ValueError(
                f"{name}: offers must have 'eager' where saved, keeps or writes is given, got "
                f"{offers}: none can be derived from the reference; write eager.py"
            )
        self.name, self.packing, self.saved = name, packing, saved
        self.offers = (*offers, "eager") if self._derived else offers
        self.inputs = {x: _argument(x, text) for x, text in inputs.items()}
        self.outputs = {x: _argument(x, text) for x, text in outputs.items()}
        self.options, self.least = dict(options or {}), dict(least or {})
        self.reference, self.variant, self.writes = reference, variant, writes
        arguments = [*self.inputs.values()]
        self.gradients = [x.name for x in arguments if has_backward and x.kind in _SLOPED]
        self._alike = dict(alike or {})
        self.computed = [x for x in self.gradients if x not in self._alike]
        self._make_kernels, self._kernels = kernels, {}
        self._choices = [(x, c) for x, c in self.options.items() if isinstance(c, Choice)]
        self._told = [
            x for x, c in self.options.items() if not isinstance(c, Choice) or len(c.values) > 1
        ]
        urgent = [(i > 0, x.name not in self.least, i) for i, x in enumerate(arguments)]
        self._order = [(i, arguments[i]) for _, _, i in sorted(urgent)]
        self._rows = self._output_rows = ()  # the inputs to flatten, the outputs to unflatten
        if packing == "flat":
            self._rows = [i for i, x in enumerate(arguments) if x.is_row]
            results = enumerate(self.outputs.values())
            self._output_rows = [(i, x.dims == arguments[0].dims) for i, x in results if x.is_row]
        self._seen: set[Any] = set()  # shapes, dtypes and devices that fitted
        self._register(keeps)
        _declared[name] = self
        c_kernels[name] = lambda: self.kernels("cpu")

    # --- a call ---------------------------------------------------------------------------------

    def __call__(
        self,
        *tensors: Any,
        cu_seqlens: Tensor | Packing | None = None,
        backend: Backend = "auto",
        **options: Any,
    ) -> Any:
        """Check the arguments, choose a backend and run it, on tensors as the public op has them.

        Returns:
            The outputs, a tuple if there are several.

        Raises:
            ValueError: Shapes, devices, boundaries or choices that do not fit.
            TypeError: Not a tensor, or of the wrong kind.
            RuntimeError: The named backend cannot run on this machine.
        """
        offsets = self.check(tensors, cu_seqlens)
        chosen = self.choose(backend, tensors[0], options)
        given = None if cu_seqlens is None else offsets
        if chosen == "reference":
            return self.judge(tensors, options, given)
        if self.packing != "flat":
            return self.run(chosen, tensors, options, given)
        first, flat = tensors[0], [*tensors]
        for i in self._rows:
            if flat[i] is not None:
                flat[i] = flat[i].flatten(0, 1)
        found = self.run(chosen, flat, options, offsets)
        rows = [found] if isinstance(found, Tensor) else [*found]
        for i, like in self._output_rows:
            x = rows[i]
            rows[i] = x.view_as(first) if like else x.view(*first.shape[:2], *x.shape[1:])
        return rows[0] if len(rows) == 1 else tuple(rows)

    def check(self, tensors: Sequence[Any], cu_seqlens: Any = None, **sizes: int) -> Any:
        """Fail unless the tensors fit together, and to the boundaries.

        Args:
            tensors: As the public op has them, None where absent.
            cu_seqlens: Boundaries of packed sequences, or None.
            sizes: Sizes that are known already, by letter.

        Returns:
            The offsets ``[S + 1]`` for an op along sequences, else None.
        """
        first: Any = tensors[0]
        key: Any = None
        if type(first) is Tensor and not sizes and not torch.compiler.is_compiling():
            # most calls are like one before: then this is all
            ends = cu_seqlens.offsets if isinstance(cu_seqlens, Packing) else cu_seqlens
            try:
                key = [None if ends is None else ends.shape]
                for x in tensors:
                    key += (None,) if x is None else (x.shape, x.dtype, x.device)
                key = tuple(key)
            except AttributeError:
                key = None
            if key in self._seen:
                if self.packing is None:
                    return None
                return segment_offsets(self.name, first, cu_seqlens)
        offsets = device = None
        number = "float"
        if isinstance(first, Tensor):
            device = first.device
            number = "complex" if first.is_complex() else "float"
        for place, argument in self._order:
            x = tensors[place]
            if x is None and argument.optional:
                continue
            kind, fits = argument.kind, False
            if kind == "number":
                kind = number
            if isinstance(x, Tensor) and x.device == device:
                shape = x.shape
                fits = x.is_floating_point() if kind == "float" else x.dtype in _DTYPES[kind]
                if len(shape) != len(argument.dims):
                    fits = False
                elif fits:
                    for size, (letter, more) in zip(shape, argument.dims, strict=True):
                        if letter not in sizes:
                            sizes[letter] = size - more
                        elif sizes[letter] + more != size:
                            fits = False
                    if argument.name in self.least and shape[-1] < 1:
                        fits = False
            if not fits:
                self._refuse(argument, kind, x, sizes, device, cu_seqlens is not None)
            if place == 0 and self.packing is not None:
                offsets = segment_offsets(self.name, first, cu_seqlens)
                sizes["S"] = sizes["B"] if cu_seqlens is None else offsets.shape[0] - 1
        if key is not None:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
        return offsets

    def _refuse(
        self,
        argument: Argument,
        kind: str,
        x: Any,
        sizes: Mapping[str, int],
        device: torch.device | None,
        packed: bool,
    ) -> NoReturn:
        """Say why a tensor does not fit: not a tensor, its shape, what it holds, or its device."""
        what, rule = f"{self.name}: {argument.name} must", argument.rule
        if self.packing and not packed:
            rule = rule.replace("[S,", "[B,")
        if kind in ("int64", "bool") and (not isinstance(x, Tensor) or x.dtype != _DTYPES[kind][0]):
            article = "an" if kind == "int64" else "a"
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{what} be {article} {kind} tensor {rule}, got {came}")
        if not isinstance(x, Tensor):
            raise TypeError(f"{what} be a tensor {rule}, got {type(x).__name__}")
        shape = [*x.shape]
        if len(shape) != len(argument.dims):
            raise ValueError(f"{what} have shape {rule}, got {shape}")
        if argument.name in self.least and shape[-1] < 1:
            raise ValueError(f"{what} have at least one {self.least[argument.name]}, got {shape}")
        pairs = zip(shape, argument.dims, strict=True)
        wanted = [sizes.get(letter, size - more) + more for size, (letter, more) in pairs]
        if shape != wanted:
            raise ValueError(f"{what} have shape {rule} = {wanted}, got {shape}")
        if kind == "float" and not x.is_floating_point():
            raise TypeError(f"{what} be floating point, got {x.dtype}")
        if kind == "complex" and x.dtype not in _DTYPES["complex"]:
            raise TypeError(f"{what} be complex64 or complex128, got {x.dtype}")
        raise ValueError(f"{what} be on {device}, got {x.device}")

    def choose(
        self,
        backend: Backend,
        tensor: Tensor,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        offers: tuple[str, ...] | None = None,
    ) -> str:
        """Check the choices among the options and return the backend that a call shall take.

        Args:
            backend: The caller's request.
            tensor: Where the op runs.
            options: As :meth:`run` gets them.
            dtype: The dtype of the computation, where it is not the tensor's (at least float32).
            offers: The backends that the call may take, where they are not the op's.

        Raises:
            ValueError, RuntimeError: As ``dispatch.choose``; or an option that is no choice.
            NotImplementedError: A forward-mode derivative is asked of another than the reference.
        """
        options = options or {}
        for name, choice in self._choices:
            value = options[name]
            if value in choice.values:
                continue
            if value not in choice.reference:
                known = " or ".join(map(repr, (*choice.values, *choice.reference)))
                raise ValueError(f"{self.name}: {name} must be {known}, got {value!r}")
            if backend not in ("auto", "reference"):
                raise ValueError(
                    f'{self.name}: {name}="{value}" exists only as a reference, got '
                    f'backend={backend!r}; use backend="auto"'
                )
            backend = "reference"
        kernel = (dtype or tensor.dtype,)
        if self.variant is not None:
            kernel = (*kernel, options[self.variant])
        chosen = choose(self.name, backend, tensor.device.type, offers or self.offers, kernel)
        if forward_ad._current_level >= 0:  # else there is nothing to call for
            check_forward_mode(self.name, chosen)
        return chosen

    def judge(
        self, tensors: Sequence[Any], options: Mapping[str, Any], cu_seqlens: Tensor | None = None
    ) -> Any:
        """Run the reference as a backend, as :meth:`formula` does."""
        record(self.name, "reference")
        return self.formula(tensors, options, cu_seqlens)

    def formula(
        self, tensors: Sequence[Any], options: Mapping[str, Any], cu_seqlens: Tensor | None = None
    ) -> Any:
        """Run the reference, on tensors as the public op has them; packed sequences one by one."""
        if cu_seqlens is None:
            found = _several(self.reference(*tensors, **options))
            # of no tokens the last state is the first: the caller's own memory
            return _alone([x.clone() if any(x is y for y in tensors) else x for x in found])
        parts = []
        for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own = []
            for x, argument in zip(tensors, self.inputs.values(), strict=True):
                if x is not None and argument.is_row:
                    x = x[:, begin:end]
                elif x is not None and argument.dims[0][0] == "S":
                    x = x[number : number + 1]
                own.append(x)
            parts.append(_several(self.reference(*own, **options)))
        rows = [x.is_row for x in self.outputs.values()]
        found = enumerate(zip(*parts, strict=True))
        return _alone([torch.cat(x, dim=int(i < len(rows) and rows[i])) for i, x in found])

    def run(
        self,
        backend: str,
        tensors: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        offsets: Tensor | None = None,
    ) -> Any:
        """Run a backend on checked tensors as kernels have them, flat if the op is.

        Returns:
            The outputs, a tuple if there are several.
        """
        compiling = torch.compiler.is_compiling()
        traced = not compiling and torch._C._is_tracing()
        mapped = innermost_transform() is not None
        # a record is for calls that may want gradients, whatever this one does, and vmap's tensors
        # do not tell who wants them
        sloped = self.gradients and (traced or torch.is_grad_enabled())
        save = sloped and (traced or mapped)
        # graphs and transforms see one op of torch.library; else a call saves its overhead
        library = compiling or traced or mapped or torch._C._get_dispatch_mode(_PROXY) is not None
        for x in tensors:
            if x is not None:
                save = save or (sloped and x.requires_grad)
                # kernels read memory: of wrappers there is none, and negation may be yet to come
                library = library or type(x) not in _PLAIN or x.is_meta or x.is_neg()
        library = library or (save and watched())
        arguments = tensors if self.packing is None else (*tensors, offsets)
        if self.saved is not None:
            arguments = (*arguments, save)
        if options is not None:
            for name in self._told:
                arguments = (*arguments, options[name])
        if library:
            found = self._forward(*arguments, backend)
        elif save:
            found = _Eager.apply(self, *arguments, backend)
        else:
            record(self.name, backend)
            kernels = self._kernels.get(backend) or self.kernels(backend)
            found = kernels.forward(*arguments)
        if isinstance(found, Tensor) or len(found) == len(self.outputs):
            return found
        return found[0] if len(self.outputs) == 1 else found[: len(self.outputs)]

    def kernels(self, backend: str) -> Any:
        """Return the kernels of a backend."""
        if backend not in self._kernels:
            derived = self._derived and backend == "eager"
            self._kernels[backend] = FromReference(self) if derived else self._make_kernels(backend)
        return self._kernels[backend]

    def complete(self, told: Sequence[Any]) -> dict[str, Any]:
        """Return all options, from those that kernels are told, in order."""
        only = {name: choice.values[0] for name, choice in self._choices}
        return only | dict(zip(self._told, told, strict=True))

    # --- registration ---------------------------------------------------------------------------

    def _register(self, keeps: Sequence[str] | None) -> None:
        """Register forward and backward with torch.library."""
        tensors = {x.name: "Tensor?" if x.optional else "Tensor" for x in self.inputs.values()}
        if self.writes is not None:
            tensors[self.writes] = "Tensor(a!)"
        if self.packing is not None:
            tensors["offsets"] = "Tensor" if self.packing == "flat" else "Tensor?"
        options = {x: _schema_type(self.options[x]) for x in self._told} | {"backend": "str"}
        save = {} if self.saved is None else {"save": "bool"}
        results = [*self.outputs, *([] if self.saved is None else ["saved"])]
        self._first_option = len(tensors) + len(save)
        self.registered = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}",
            self._run_forward,
            mutates_args=() if self.writes is None else (self.writes,),
            schema=_schema({**tensors, **save, **options}, len(results)),
        )
        self.registered.register_fake(self._fake_forward)
        self._forward = self.registered._opoverload
        if not self.gradients:
            return
        everything = {**tensors, **dict.fromkeys(results, "Tensor")}
        if keeps is None:
            keeps = [x for x in everything if x not in self.outputs]
        self._kept = [[*everything].index(x) for x in keeps]
        likes = [keeps.index(x) if x in keeps else 0 for x in self.computed]
        self._likes = [len(self.outputs) + i for i in likes]
        arguments = {f"grad_{x}": "Tensor?" for x in self.outputs}
        arguments |= {x: everything[x] for x in keeps} | options
        self.registered_backward = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}_backward",
            self._run_backward,
            mutates_args=(),
            schema=_schema(arguments, len(self.computed)),
        )
        self.registered_backward.register_fake(self._fake_backward)
        self._backward = self.registered_backward._opoverload
        self.registered.register_autograd(self._autograd, setup_context=self._setup_context)

    def register_vmap(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Let ``torch.vmap`` map over the op, by functions as ``torch.library`` describes them."""
        self.registered.register_vmap(forward)
        self.registered_backward.register_vmap(backward)

    def _run_forward(self, *arguments: Any) -> Any:
        *given, backend = arguments
        record(self.name, backend)
        found = _several(self.kernels(backend).forward(*given))
        if self.saved is not None and not given[self._first_option - 1]:
            found = (*found[:-1], found[-1][:0])
        return _alone([contiguous(x) for x in found])

    def _fake_forward(self, *arguments: Any) -> Any:
        first, sizes = arguments[0], {}
        tensors = dict(zip(self.inputs, arguments, strict=False))
        for x, argument in zip(tensors.values(), self.inputs.values(), strict=True):
            if x is not None:
                for size, (letter, more) in zip(x.shape, self._flat(argument), strict=True):
                    sizes[letter] = size - more
        if self.packing is not None:
            offsets = arguments[len(tensors)]
            sizes["S"] = sizes["B"] if offsets is None else offsets.shape[0] - 1
        sizes |= zip(self._told, arguments[self._first_option :], strict=False)
        dtypes = {"float": first.dtype, "exact": accumulator(first)}
        dtypes |= {"real": first.dtype.to_real(), "complex": accumulator(first).to_complex()}
        dtypes |= {name: x.dtype for name, x in tensors.items() if x is not None}
        made = []
        for output in self.outputs.values():
            shape = [sizes[letter] + more for letter, more in self._flat(output)]
            made.append(first.new_empty(shape, dtype=dtypes[output.kind]))
        if self.saved is not None:
            if callable(self.saved):
                shape = self.saved(self.kernels(arguments[-1]), sizes)
            else:
                shape = [sizes[letter] for letter in self.saved.split()]
            rows = shape[0] if arguments[self._first_option - 1] else 0
            made.append(first.new_empty(rows, *shape[1:], dtype=dtypes["exact"]))
        return _alone(made)

    def _flat(self, argument: Argument) -> tuple[tuple[str, int], ...]:
        """Return a tensor's shape as kernels have it."""
        if self.packing == "flat" and argument.is_row:
            return (("T", 0), *argument.dims[2:])
        return argument.dims

    def _run_backward(self, *arguments: Any) -> Any:
        *given, backend = arguments
        grads = _several(self.kernels(backend).backward(*given))
        likes = [given[place] for place in self._likes]
        pairs = zip(grads, likes, strict=True)
        return _alone(
            [
                likes[0].new_empty(0) if x is None else contiguous(grad.to(x.dtype))
                for grad, x in pairs
            ]
        )

    def _fake_backward(self, *arguments: Any) -> Any:
        likes = [arguments[place] for place in self._likes]
        shaped = ((likes[0], 0) if x is None else (x, x.shape) for x in likes)
        return _alone([x.new_empty(shape) for x, shape in shaped])

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = _several(output)
        tensors = len(self.inputs) + (self.packing is not None)
        everything = (*inputs[:tensors], *results)
        ctx.set_materialize_grads(False)
        if self.saved is not None:
            ctx.mark_non_differentiable(results[-1])
        ctx.save_for_backward(*(everything[i] for i in self._kept))
        ctx.options = inputs[self._first_option :]
        ctx.given = [x is not None for x in inputs]

    def _autograd(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = grads[: len(self.outputs)]
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.given)
        # with gradients enabled somebody wants those of gradients, which that op refuses
        library = torch.is_grad_enabled() or watched() or is_traced()
        for x in grads:
            if x is not None and (type(x) not in _PLAIN or x.is_meta or batched_gradient(x)):
                library = True
        run = self._backward if library else self._run_backward
        found = run(*grads, *ctx.saved_tensors, *ctx.options)
        by_name = dict(zip(self.computed, _several(found), strict=True))
        by_name |= {x: by_name[other] for x, other in self._alike.items()}
        names = (*self.inputs, *[""] * (len(ctx.given) - len(self.inputs)))
        pairs = zip(names, ctx.given, strict=True)
        return tuple(by_name.get(name) if given else None for name, given in pairs)


class _Eager(torch.autograd.Function):
    """An op's gradients where nobody traces: those of ``torch.library``, without its dispatch."""

    @staticmethod
    def forward(ctx: Any, op: Op, *arguments: Any) -> Any:
        found = op._run_forward(*arguments)
        op._setup_context(ctx, arguments, found)
        ctx.op = op
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.op._autograd(ctx, *grads)


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of states and sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(torch.float32, x.dtype)


def watched() -> bool:
    """Tell whether a transform of ``torch.func`` or a dispatch mode is active."""
    return transformed() or bool(torch._C._len_torch_dispatch_stack())


def contiguous(x: Tensor) -> Tensor:
    """Return a tensor as plain numbers in rows: neither strided, conjugated nor negated lazily.

    Compiled graphs read results by the strides that fakes promise, and do not look at what came.
    """
    return x.resolve_conj().resolve_neg().contiguous()


def _argument(name: str, text: str) -> Argument:
    """Parse ``"B K-1 D complex?"``, or an output's ``"B K-1 D as exact"``."""
    shape, _, dtype = text.removesuffix("?").partition(" as ")
    words = shape.split()
    kind = dtype or "float"
    if words and words[-1] in (*_SLOPED, *_DTYPES):
        kind = words.pop()
    dims = []
    for word in words:
        letter, sign, more = word.partition("+") if "+" in word else word.partition("-")
        dims.append((letter, int(sign + more) if sign else 0))
    return Argument(name, (*dims,), kind, text.endswith("?"))


def _schema_type(option: Choice | str) -> str:
    if isinstance(option, Choice):
        return "str?" if None in option.values else "str"
    return option.replace("int", "SymInt")  # which stays a symbol in an exported graph


def _schema(arguments: Mapping[str, str], results: int) -> str:
    given = ", ".join(f"{kind} {name}" for name, kind in arguments.items())
    found = ", ".join(["Tensor"] * results)
    return f"({given}) -> {found if results == 1 else f'({found})'}"


def _several(found: Any) -> Sequence[Any]:
    return (found,) if isinstance(found, Tensor) else found


def _alone(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else tuple(found)
