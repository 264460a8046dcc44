"""The optimizers, one record each: a step as its paper, or torch.optim, writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes

from ..errors import InvalidProblem
from ..ir.node import Node
from ..ir.types import Type
from ..ops import maximum, mean, minimum, rsqrt, sign, sqrt, where
from ..ops.rules import along, converted
from .optimizer import Now, Optimizer, Slot, State, checked, within


def decayed(gradient: Node, parameter: Node, rate: float) -> Node:
    """The gradient of the loss and of rate/2 * |parameter|^2."""
    return gradient + rate * parameter if rate else gradient


def shrunk(parameter: Node, rate: float, now: Now) -> Node:
    """Decoupled weight decay (Loshchilov and Hutter, 2019)."""
    return parameter * converted(1 - now.lr * rate, parameter.dtype) if rate else parameter


def running(old: Node, new: Node, keep: float) -> Node:
    """An exponential running mean."""
    return keep * old + (1 - keep) * new


def scaled(scale: Node, x: Node) -> Node:
    """A scalar, f64[], times an array."""
    return converted(scale, x.dtype) * x


@dataclass(frozen=True)
class sgd(Optimizer):
    """Stochastic gradient descent as :class:`torch.optim.SGD`.

    :param momentum: of the velocity ``momentum``, which begins as the first gradient.
    :param weight_decay: added to the gradient, times the parameter.
    :raises InvalidProblem: Nesterov's momentum without momentum, or with dampening.
    """

    momentum: float = within(0.0, 0.0)
    dampening: float = within(0.0, 0.0)
    weight_decay: float = within(0.0, 0.0)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (not self.momentum or self.dampening):
            raise InvalidProblem(
                f"sgd: nesterov wants momentum and no dampening, and they are {self.momentum:g} and {self.dampening:g}"
            )

    def slots(self, parameter: Type) -> dict[str, Slot]:
        return {"momentum": Slot(parameter.shape)} if self.momentum else {}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        g = decayed(gradient, parameter, self.weight_decay)
        if not self.momentum:
            return parameter - scaled(now.lr, g), state
        share = where(now.step > 1.0, 1.0 - self.dampening, 1.0) if self.dampening else None
        velocity = self.momentum * state["momentum"] + (g if share is None else scaled(share, g))
        way = g + self.momentum * velocity if self.nesterov else velocity
        return parameter - scaled(now.lr, way), {"momentum": velocity}


@dataclass(frozen=True)
class adam(Optimizer):
    """Adam (Kingma and Ba, 2015) as :class:`torch.optim.Adam`.

    :param beta1, beta2: of the running means of the gradient and of its square, ``mean`` and ``square``.
    :param weight_decay: added to the gradient, times the parameter.
    :param amsgrad: divides by the largest ``square`` so far, ``largest`` (Reddi et al., 2018).
    """

    beta1: float = within(0.9, 0.0, 1.0)
    beta2: float = within(0.999, 0.0, 1.0)
    eps: float = within(1e-8, 0.0)
    weight_decay: float = within(0.0, 0.0)
    amsgrad: bool = False

    def slots(self, parameter: Type) -> dict[str, Slot]:
        names = ("mean", "square", "largest") if self.amsgrad else ("mean", "square")
        return dict.fromkeys(names, Slot(parameter.shape))

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        return self._moved(parameter, decayed(gradient, parameter, self.weight_decay), state, now)

    def _moved(self, parameter: Node, g: Node, state: State, now: Now) -> tuple[Node, State]:
        m = running(state["mean"], g, self.beta1)
        s = running(state["square"], g * g, self.beta2)
        after = {"mean": m, "square": s}
        if self.amsgrad:
            s = after["largest"] = maximum(state["largest"], s)
        # m / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + eps)
        rate, root = now.lr / (1 - self.beta1**now.step), sqrt(1 - self.beta2**now.step)
        return parameter - scaled(rate, m) / (sqrt(s) / converted(root, s.dtype) + self.eps), after


@dataclass(frozen=True)
class adamw(adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) as :class:`torch.optim.AdamW`.

    :param weight_decay: the share of a parameter, times the learning rate, that a step takes from it.
    """

    weight_decay: float = within(1e-2, 0.0)

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        return self._moved(shrunk(parameter, self.weight_decay, now), gradient, state, now)


@dataclass(frozen=True)
class adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011) as :class:`torch.optim.Adagrad`.

    :param lr_decay: divides the learning rate by 1 + lr_decay * (step - 1).
    :param weight_decay: added to the gradient, times the parameter.
    :param initial: of the sum of squares, ``sum``.
    """

    lr: float = within(1e-2, 0.0)
    lr_decay: float = within(0.0, 0.0)
    weight_decay: float = within(0.0, 0.0)
    initial: float = within(0.0, 0.0)
    eps: float = within(1e-10, 0.0)

    def slots(self, parameter: Type) -> dict[str, Slot]:
        return {"sum": Slot(parameter.shape, self.initial)}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        g = decayed(gradient, parameter, self.weight_decay)
        total = state["sum"] + g * g
        rate = now.lr / (1 + (now.step - 1) * self.lr_decay) if self.lr_decay else now.lr
        return parameter - scaled(rate, g) / (sqrt(total) + self.eps), {"sum": total}


@dataclass(frozen=True)
class rowwise_adagrad(Optimizer):
    """Adagrad with one number of state a row: ``sum``, of the mean of the squares of its gradient.  FBGEMM's
    EXACT_ROWWISE_ADAGRAD.

    A row is what the first axis counts.

    :param weight_decay: added to the gradient, times the parameter.
    """

    lr: float = within(1e-2, 0.0)
    eps: float = within(1e-8, 0.0)
    weight_decay: float = within(0.0, 0.0)

    def slots(self, parameter: Type) -> dict[str, Slot]:
        return {"sum": Slot(parameter.shape[:1])}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        g = decayed(gradient, parameter, self.weight_decay)
        axes = tuple(range(1, g.rank))
        total = state["sum"] + (mean(g * g, axis=axes) if axes else g * g)
        rate = converted(now.lr, total.dtype) / (sqrt(total) + self.eps)
        return parameter - along(rate, g.shape, axes) * g, {"sum": total}


@dataclass(frozen=True)
class lion(Optimizer):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an interpolated momentum, ``mean``.

    :param weight_decay: decoupled, as in :class:`adamw`.
    """

    lr: float = within(1e-4, 0.0)
    beta1: float = within(0.9, 0.0, 1.0)
    beta2: float = within(0.99, 0.0, 1.0)
    weight_decay: float = within(0.0, 0.0)

    def slots(self, parameter: Type) -> dict[str, Slot]:
        return {"mean": Slot(parameter.shape)}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        way = sign(running(state["mean"], gradient, self.beta1))
        mean = running(state["mean"], gradient, self.beta2)
        return shrunk(parameter, self.weight_decay, now) - scaled(now.lr, way), {"mean": mean}


@dataclass(frozen=True)
class adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018) as :class:`torch.optim.Adafactor`: of two axes and more it keeps means of
    squares along the last and the one before it, ``row`` and ``column``, of fewer ``square``.

    :param beta2_decay: step**beta2_decay is the share of the newest square in its running mean.
    :param eps1: its square is the least square that is divided by; None: the machine epsilon of the compute dtype.
    :param eps2: the least root mean square of a parameter, which scales its learning rate.
    :param clip: the largest root mean square of an update before it is scaled.
    :param weight_decay: decoupled, as in :class:`adamw`.
    """

    lr: float = within(1e-2, 0.0)
    beta2_decay: float = within(-0.8, -math.inf, most=0.0)
    eps1: float | None = None
    eps2: float = within(1e-3, 0.0)
    clip: float = within(1.0, 1.0)
    weight_decay: float = within(0.0, 0.0)
    by_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps1 is not None:
            object.__setattr__(self, "eps1", checked("adafactor: eps1", self.eps1))

    def slots(self, parameter: Type) -> dict[str, Slot]:
        if parameter.rank < 2:
            return {"square": Slot(parameter.shape)}
        *lead, rows, columns = parameter.shape
        return {"row": Slot((*lead, rows, 1)), "column": Slot((*lead, 1, columns))}

    def update(self, parameter: Node, gradient: Node, state: State, now: Now) -> tuple[Node, State]:
        newest = converted(now.step**self.beta2_decay, parameter.dtype)
        eps1 = float(ml_dtypes.finfo(parameter.dtype.np).eps) if self.eps1 is None else self.eps1
        squares = gradient * gradient
        if parameter.rank < 2:
            after = {"square": squares}
        else:
            after = {name: mean(squares, axis=axis, keepdims=True) for name, axis in (("row", -1), ("column", -2))}
        after = {name: state[name] + newest * (new - state[name]) for name, new in after.items()}
        if parameter.rank < 2:
            square = after["square"]
        else:  # the product of rank one that has these means
            square = after["row"] * after["column"] / maximum(mean(after["row"], axis=-2, keepdims=True), eps1)
        way = gradient * rsqrt(maximum(square, eps1 * eps1))
        rate = converted(minimum(now.lr, 1 / sqrt(now.step)), parameter.dtype)
        rate = rate * maximum(_root_mean_square(parameter), self.eps2)
        rate = rate / maximum(_root_mean_square(way) / self.clip, 1.0)
        return shrunk(parameter, self.weight_decay, now) - rate * way, after


def _root_mean_square(x: Node) -> Node:
    return sqrt(mean(x * x))
