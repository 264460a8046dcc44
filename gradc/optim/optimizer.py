"""What an optimizer is: hyper-parameters, the state that it keeps for a parameter, and one step as algebra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ..errors import InvalidProblem
from ..ir.dims import Size
from ..ir.node import Node
from ..ir.types import DType, Type, shown
from ..ops import abs, bitwise_and, copysign, exponent, floor, ldexp, maximum, rand, where
from ..ops.rules import converted

State = Mapping[str, Node]
STATE = "state"
STEP = f"{STATE}.step"
"""The number of steps: the one state that belongs to no parameter."""


def state_name(slot: str, parameter: str) -> str:
    """What a step calls a parameter's state."""
    return f"{STATE}.{slot}.{parameter}"


def parameter_of(name: str) -> str:
    """The parameter whose state a step calls so; "": that of none."""
    state, _, rest = name.partition(".")
    return rest.partition(".")[2] if state == STATE else ""


@dataclass(frozen=True)
class Slot:
    """What an optimizer keeps for a parameter, in the parameter's compute dtype: f32, or f64 of an f64.

    :param shape: its first axis is the parameter's, if the parameter can be updated row by row.
    :param initial: the value of every element before the first step.
    """

    shape: tuple[Size, ...]
    initial: float = 0.0


@dataclass(frozen=True)
class Now:
    """The scalars of a step, f64[].

    :param lr: the learning rate.
    :param step: 1 in the first step.
    :param key, stream: of the random numbers of this step, i64[], and of this parameter.
    """

    lr: Node
    step: Node
    key: Node
    stream: int


def within(default: float, low: float, high: float = math.inf, most: float = math.inf) -> Any:
    """A hyper-parameter: a number from ``low`` to below ``high``, and to ``most``."""
    return field(default=default, metadata={"low": low, "high": high, "most": most})


def checked(name: str, value: Any, low: float = 0.0, high: float = math.inf, most: float = math.inf) -> float:
    """The value as a float: a number, or an array or tensor of one without axes.

    :raises InvalidProblem: it is no number from ``low`` to below ``high``, and to ``most``.
    """
    number = _number(value)
    if not low <= number < high or number > most:
        above = f" to below {high:g}" if high < math.inf else f" to {most:g}" if most < math.inf else ""
        raise InvalidProblem(f"{name}={_text(value)}: a finite number from {low:g}{above}")
    return number


def _number(value: Any) -> float:
    """The number as a float, NaN of what is none."""
    try:
        plain = math.nan if np.ndim(value) else value.item() if hasattr(value, "item") else value
        return math.nan if isinstance(plain, bool | complex | str | bytes) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor without memory
        return math.nan


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, int) else repr(value)


@dataclass(frozen=True)
class Optimizer:
    """The hyper-parameters of an optimizer; a class of its own says what they mean.

    All but ``lr`` are constants of the compiled step.

    :param lr: the learning rate of calls that give none.
    :param maximize: ascends instead of descending.
    :param stochastic: rounds a parameter of 16 bits up or down by chance, so that it is on average what it was rounded
        from, and steps below its rounding are not lost.  The numbers depend on the number of the step and the place
        alone.
    :ivar by_rows: whether a row's step depends on that row, its gradient and its state alone.
    :raises InvalidProblem: a number is outside its range, or a flag is no bool.
    """

    lr: float = within(1e-3, 0.0)
    maximize: bool = field(default=False, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    by_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = f"{type(self).__name__}: {each.name}", getattr(self, each.name)
            if each.metadata:
                object.__setattr__(self, each.name, checked(name, value, **each.metadata))
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise InvalidProblem(f"{name}={_text(value)}: True or False")

    def slots(self, parameter: Type) -> dict[str, Slot]:
        """The state of a parameter by name."""
        return {}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        """(the parameter, its state) after a step; all are of the compute dtype."""
        raise NotImplementedError

    def apply(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        """:meth:`update` of a parameter of any float dtype, which is rounded once."""
        wide = parameter.dtype.compute
        gradient = converted(gradient, wide)
        after, kept = self.update(converted(parameter, wide), -gradient if self.maximize else gradient, state, now)
        narrow = self.stochastic and parameter.dtype is not wide
        return (
            stochastically_rounded(after, parameter.dtype, now) if narrow else converted(after, parameter.dtype)
        ), kept


def stochastically_rounded(x: Node, dtype: DType, now: Now) -> Node:
    """x, f32, in f16 or bf16: the neighbour away from 0 with the probability of x's distance from the other one."""
    digits, least = _DIGITS[dtype.name]
    size = abs(x)
    place = maximum(exponent(x), least) - digits  # of the last digit, a power of 2
    units = ldexp(size, -place)
    whole = floor(units)
    up = rand(now.key, shape=x.shape, stream=now.stream) < units - whole
    up = bitwise_and(up, size < float(ml_dtypes.finfo(dtype.np).max))  # what is finite stays so
    return converted(copysign(ldexp(where(up, whole + 1.0, whole), place), x), dtype)


_DIGITS = {"f16": (11, -13), "bf16": (8, -118)}
"""Binary digits of the significand, and the least exponent that counts: of smaller numbers fewer digits are kept.  f16
has no more; of bf16's, a power of 2 would leave f32.
"""
