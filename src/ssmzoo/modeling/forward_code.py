"""The Python code that modules run, so that a replaced function is noticed.

A function can be replaced where it is looked up (in a class, in a module) or in place, as IPython's
autoreload does with its ``__code__``. Both are looked at in a microsecond per class.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

_CODE = operator.attrgetter("__code__")
_DEFAULTS = operator.attrgetter("__defaults__", "__kwdefaults__")
_LIBRARIES = frozenset({"torch", "builtins"})
_KERNELS = "ssmzoo_kernels"  # whose ops are compared themselves, not the functions they call
# functions that decide how a forward runs are compared, but not followed
_MACHINERY = frozenset(
    f"{__package__}.{name}"
    for name in ("decoding", "module_parts", "stock.blocks", "stock.classes", "stock.mixers")
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_known: weakref.WeakValueDictionary[tuple[type, ...], ForwardCode] = weakref.WeakValueDictionary()


def current_code(kinds: Iterable[type[nn.Module]]) -> ForwardCode:
    """Return the code that modules of some classes run now, one object for all who ask."""
    wanted = tuple(dict.fromkeys(kinds))
    code = _known.get(wanted)
    if code is None or not code.unchanged():
        code = _known[wanted] = ForwardCode(wanted)
    return code


class ForwardCode:
    """The code that calls of modules of some classes run, and whether it is still the same.

    It begins at ``__call__`` and ``forward``, and follows every function that they name: methods
    of the class and its bases, globals of their module and of modules there, closures. Functions of
    other packages than the classes' are compared, too, but not followed.

    Args:
        kinds: The classes.

    Attributes:
        methods: The names of methods that were followed.
    """

    def __init__(self, kinds: Sequence[type[nn.Module]]) -> None:
        self._packages = {_package(base) for kind in kinds for base in kind.__mro__}
        self._packages -= {*_LIBRARIES, _KERNELS}
        self.methods: set[str] = set()
        self._seen: set[tuple[int, int]] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._places: dict[int, tuple[Any, dict[str, Any]]] = {}
        for kind in kinds:
            for name in ("__call__", "forward"):
                self._method(kind, name)
        self._found = []
        for owner, names in self._places.values():
            get: Any = operator.attrgetter if isinstance(owner, type) else operator.itemgetter
            read: Any = get(*names, next(iter(names)))  # two or more give a tuple
            self._found.append((read, owner, read(owner)))
        functions = self._functions.values()
        defaulted = [f for f in functions if f.__defaults__ or f.__kwdefaults__]
        # one call of C for each kind of thing to look at
        self._bodies = [
            (read, owners, [*map(read, owners)])
            for read, owners in ((_CODE, [*functions]), (_DEFAULTS, defaulted))
        ]

    def unchanged(self, checked: dict[ForwardCode, bool] | None = None) -> bool:
        """Return whether none of it was replaced.

        Args:
            checked: The results of this call of the model, in which each is found once: decoding
                streams weights through the caches, so that every look is a slow one.
        """
        if checked is None:
            return self._unchanged()
        found = checked.get(self)
        if found is None:
            found = checked[self] = self._unchanged()
        return found

    def _unchanged(self) -> bool:
        try:
            for read, owner, found in self._found:
                if read(owner) != found:
                    return False
        except (AttributeError, KeyError):  # it is there no more
            return False
        for read, owners, found in self._bodies:  # noqa: SIM110 (a generator is a call more)
            if [*map(read, owners)] != found:
                return False
        return True

    def _method(self, kind: type, name: str) -> None:
        """Follow the attributes that a class and its bases have under a name."""
        self.methods.add(name)
        for base in kind.__mro__:
            if base is kind or name in vars(base):
                self._place(base, name, getattr(base, name))
                self._follow(vars(base).get(name), kind)

    def _place(self, owner: Any, name: str, value: Any) -> None:
        self._places.setdefault(id(owner), (owner, {}))[1][name] = value

    def _follow(self, value: Any, kind: type | None) -> None:
        """Follow a function, also a wrapped one, and the methods of ``kind`` that it names."""
        for function in _functions(value):
            if (id(function), id(kind)) in self._seen:
                continue
            self._seen.add((id(function), id(kind)))
            if _package(function) in _LIBRARIES:
                continue
            self._functions[id(function)] = function
            if (
                _package(function) not in self._packages
                or function.__globals__.get("__name__") in _MACHINERY
            ):
                continue
            names = set(_names(function.__code__))
            self._in_module(function.__globals__, names)
            for cell in function.__closure__ or ():
                self._follow(_content(cell), kind)
            if kind is None:
                continue
            for name in names:
                owner = next((base for base in kind.__mro__ if name in vars(base)), object)
                own = _package(owner) in self._packages
                if own and any(_functions(vars(owner)[name])):
                    self._method(kind, name)

    def _in_module(self, held: dict[str, Any], names: set[str]) -> None:
        for name in names & held.keys():
            value = held[name]
            known = self._places.get(id(held), (held, {}))[1]
            if name in known or not isinstance(value, _FUNCTIONS):
                continue
            self._place(held, name, value)
            if isinstance(value, types.ModuleType):
                self._in_module(vars(value), names)
            else:
                self._follow(value, None)


def _package(holder: Any) -> str:
    """Return the package that a class or a function comes from."""
    if isinstance(holder, types.FunctionType):  # a decorator may have changed its __module__
        return str(holder.__globals__.get("__name__")).partition(".")[0]
    return holder.__module__.partition(".")[0]


def _names(code: types.CodeType) -> Iterator[str]:
    """Return the names of globals and attributes that a function and those inside it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Return the functions that an attribute or a global calls."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    elif isinstance(value, functools.partial | functools.cached_property):
        value = value.func
    for function in (value.fget,) if isinstance(value, property) else (value,):
        if isinstance(function, types.FunctionType):
            yield function
            if (inner := inspect.unwrap(function)) is not function:
                yield from _functions(inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None
