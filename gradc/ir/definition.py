"""What an op's record means, as text for cache keys: two records with one text compile to one module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .op import Op

NO_MEANING = ("samples", "bad", "doc", "source")
"""Fields of a record on which no module depends."""
_NAMED = frozenset((*sys.stdlib_module_names, "gradc", "numpy"))
"""Packages whose functions are known by their names: cache keys hold gradc and Python themselves."""
_MOST = 10_000
"""Objects that are looked at for one record."""
_PROCESS = secrets.token_hex(16)


_package_ops: weakref.WeakKeyDictionary[Op, str] = weakref.WeakKeyDictionary()


def definition(op: Op) -> str:
    """A text that changes with whatever the record's functions do: their code, defaults, what they close over, and the
    globals that they name, also in modules of the user's own.

    Functions of gradc, NumPy and the standard library stand there by name.  A record that refers to something else
    whose meaning is not known (an open file, an object of a C extension) has a text of its own in every process.
    """
    text = _package_ops.get(op)
    if text is None:
        found = _Definition()
        text = "".join(found.of(op))
        if not found.has_code:  # what code of the user's own names may be another thing at the next call
            _package_ops[op] = text
    return text


class _Definition:
    """The text of one record; what it refers to more than once, as to itself, is numbered."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []
        self.has_code = False

    def of(self, value: Any) -> Iterable[str]:
        """The pieces of an object's text."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.dtype):
            return [f"{type(value).__name__} {value!r};"]
        number = self.numbers.get(id(value))
        if number is not None:
            return [f"#{number};"]
        if len(self.numbers) >= _MOST:
            return [f"{_PROCESS};"]
        self.numbers[id(value)] = len(self.numbers)
        self.kept.append(value)  # else another object may get its id
        for kinds, text in self.TEXTS:
            if isinstance(value, kinds):
                return [f"{type(value).__name__}(", *text(self, value), ")"]
        if dataclasses.is_dataclass(value):
            return [f"{type(value).__qualname__}(", *self.fields(value), ")"]
        return self.named(value) if _is_named(value) else self.instance(value)

    def each(self, values: Iterable[Any]) -> list[str]:
        """The pieces of several objects, in order."""
        return [piece for value in values for piece in self.of(value)]

    def fields(self, record: Any) -> list[str]:
        """Those of a record's fields; of an op without what no module depends on."""
        left_out = NO_MEANING if isinstance(record, Op) else ()
        names = [f.name for f in dataclasses.fields(record) if f.name not in left_out]
        return self.each(x for name in names for x in (name, getattr(record, name)))

    def named(self, value: Any) -> list[str]:
        """Something of a package that cache keys or versions know."""
        module = _module_of(value)
        version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
        name = getattr(value, "__qualname__", getattr(value, "__name__", type(value).__qualname__))
        return [f"{module}.{name} {version};"]

    def function(self, value: types.FunctionType) -> list[str]:
        """A function: its code, defaults, cells and globals; one of a known package by where it stands there."""
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        own = [value.__defaults__, value.__kwdefaults__, *cells]
        if _is_named(value):
            return [*self.named(value), f"{value.__code__.co_firstlineno};", *self.each(own)]
        used = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        return self.each((*own, value.__code__, used))

    def code(self, value: types.CodeType) -> list[str]:
        """The instructions of a function, with their constants and names, and not where they stand."""
        self.has_code = True
        about = (value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_flags)
        return self.each((*about, value.co_argcount, value.co_kwonlyargcount, value.co_consts))

    def class_(self, value: type) -> list[str]:
        """A class: its bases, and what stands in it."""
        if _is_named(value):
            return self.named(value)
        inside = {n: x for n, x in vars(value).items() if n not in ("__dict__", "__weakref__", "__doc__", "__module__")}
        return self.each((value.__qualname__, value.__bases__, inside))

    def module(self, value: types.ModuleType) -> list[str]:
        """A module: its name, and the source of one of the user's own."""
        if _is_named(value):
            return self.named(value)
        try:
            return [value.__name__, inspect.getsource(value)]
        except (OSError, TypeError):
            return [value.__name__, f"{_PROCESS};"]

    def instance(self, value: Any) -> list[str]:
        """Any other object: its class and state, as pickle asks for them."""
        try:
            made = value.__reduce_ex__(4)
            if isinstance(made, tuple):
                made = (*made[:3], *(list(items or ()) for items in made[3:5]))
        except Exception:  # whatever a class raises that has no such state
            return [f"{_PROCESS} {id(value)};"]
        return self.of(made)

    def unordered(self, values: Iterable[Any]) -> list[str]:
        """The elements of a set."""
        return sorted("".join(self.of(value)) for value in values)

    TEXTS: tuple[tuple[Any, Callable[[Any, Any], Iterable[str]]], ...] = (
        (types.FunctionType, function),
        (types.CodeType, code),
        (types.ModuleType, module),
        (type, class_),
        ((tuple, list), each),
        ((set, frozenset), unordered),
        (Mapping, lambda self, value: self.each(x for item in value.items() for x in item)),
        (np.ndarray, lambda self, value: self.each((str(value.dtype), value.shape, value.tobytes()))),
        (types.MethodType, lambda self, value: self.each((value.__func__, value.__self__))),
        (functools.partial, lambda self, value: self.each((value.func, value.args, value.keywords))),
        ((property, classmethod, staticmethod), lambda self, value: self.each((_wrapped(value),))),
        (functools._lru_cache_wrapper, lambda self, value: self.of(value.__wrapped__)),
    )


def _module_of(value: Any) -> str:
    """The name of the module that an object belongs to; "" if it does not say."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _is_named(value: Any) -> bool:
    """Whether an object is known by its name: a function, class or module of a known package."""
    if isinstance(value, np.ufunc):
        return True
    module = _module_of(value) or ("builtins" if isinstance(value, types.BuiltinFunctionType) else "")
    return isinstance(getattr(value, "__name__", None), str) and module.partition(".")[0] in _NAMED


def _names(code: types.CodeType) -> list[str]:
    """The globals that code may name, that of functions inside it too."""
    inside = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names(c)]
    return sorted({*code.co_names, *inside})


def _contents(cell: types.CellType) -> Any:
    """What a function closes over; of a cell that is still empty, that."""
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _wrapped(value: Any) -> Any:
    return (value.fget, value.fset) if isinstance(value, property) else value.__func__
