"""A graph whose backward updates parameters: gradients, and the optimizer's step, as one program."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..autodiff import differentiate, joint_names
from ..errors import InvalidProblem, NotDifferentiable
from ..ir.graph import Graph, name_of
from ..optim.optimizer import Optimizer, checked
from ..optim.step_graph import rates_of, step_graph
from ..plans.step import check_distinct, memory_of
from ..runtime.torch_private import count_changes
from .function import Function, reaching, read_by, refuse_transforms


@dataclass(frozen=True)
class Kept:
    """What a step reads besides the inputs of a call.

    :param state: the tensors of ``state.step`` and ``state.SLOT.NAME``, which it writes.
    :param rates: the learning rates by name.
    """

    state: Mapping[str, torch.Tensor]
    rates: Mapping[str, Any]


class UpdatingFunction:
    """A graph that is called with torch tensors; the backward of a call writes the parameters that have an optimizer,
    and gives the gradients of the other inputs.  It computes again what it reads of the forward's values.

    :param update: the optimizers of parameters.
    :param sparse: those that are updated in the rows that indices name, and nowhere else.
    :param options: of :func:`gradc.compile`.
    """

    def __init__(
        self,
        graph: Graph,
        update: Mapping[str, Optimizer],
        sparse: Sequence[str],
        target: str | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.graph, self.update, self.sparse = graph, dict(update), tuple(sparse)
        self.target, self.options = target, dict(options or {})
        self.value = Function(graph, target, self.options)
        self.names = self.value.names
        self.rates = rates_of(self.update.values())
        self._apart: list[Any] = []  # where what a call before wrote lay, which was found to share no memory
        self.step = functools.cache(self._step)
        self.step(tuple(self.update), graph.output_names)  # raises what there is to raise before a call

    def __call__(self, kept: Kept, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs; where something is recorded, their backward updates.

        :raises InvalidProblem: a rate is no finite number from 0, or there is none; a parameter is computed from other
            tensors, or has memory in common with another one or with state.
        """
        refuse_transforms(inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            rates = _checked_rates(kept.rates, self.rates.values())
            self._check_written(kept.state, inputs)
            return _Updated.apply(self, Kept(kept.state, rates), *inputs)  # type: ignore[no-any-return]
        return self.value({}, *inputs)

    def _check_written(self, state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """:raises InvalidProblem: a parameter is no leaf, so that what computes it would not learn; memory is there
        twice.
        """
        written = {name: x.detach() for name, x in state.items()}
        for name, x in zip(self.names, inputs, strict=True):
            if name in self.update and x.requires_grad:
                if not x.is_leaf:
                    raise InvalidProblem(
                        f"{name} is computed from other tensors: what update names are a module's own parameters"
                    )
                written[name] = x.detach()
        written = {name: x for name, x in written.items() if x.layout is torch.strided}  # others are refused below
        places = [(x.data_ptr(), x.shape, x.stride()) for x in written.values()]
        if places != self._apart:
            check_distinct(memory_of(written))
            self._apart = places

    def _step(self, wanted: tuple[str, ...], outputs: tuple[str, ...]) -> Step | None:
        """The step of a backward; None where nothing is reached.

        :param wanted: the inputs that want a gradient.
        :param outputs: those that have a cotangent: a parameter from which none of them is computed stays.
        """
        found = reaching(self.graph, wanted)
        outputs = tuple(name for name in outputs if name in found)
        reached = set().union(*(found[name] for name in outputs))
        wrt = tuple(name for name in wanted if name in reached)
        return Step(self, outputs, wrt) if wrt else None


def _checked_rates(rates: Any, names: Collection[str]) -> dict[str, float]:
    """:raises InvalidProblem: they are not numbers by these names."""
    if not isinstance(rates, Mapping) or rates.keys() != set(names):
        given = ", ".join(map(str, rates)) if isinstance(rates, Mapping) else repr(rates)
        raise InvalidProblem(f"rates are {given or 'none'}: a dict of {', '.join(names)}")
    return {name: checked(name, rate) for name, rate in rates.items()}


class Step:
    """The update of some parameters, and the gradients of other inputs, from the cotangents of some outputs.

    :param outputs: those, by name.
    :param wrt: the parameters and other inputs.
    :ivar function: gives the gradients, and writes over parameters and state.
    :ivar read: the inputs that the gradients depend on, and with them those of the function.
    """

    def __init__(self, of: UpdatingFunction, outputs: Sequence[str], wrt: Sequence[str]):
        update = {name: of.update[name] for name in wrt if name in of.update}
        free = {name: name_of(f"y{i}", lambda word: word in of.graph.input_names) for i, name in enumerate(outputs)}
        graph = of.graph.with_outputs([(free[name], of.graph.output(name)) for name in outputs])
        cotangents, gradients = joint_names(graph, wrt)
        self.cotangents = {name: cotangents[free[name]] for name in outputs}
        self.gradients = {name: gradients[name] for name in wrt if name not in update}
        self.rates = {rate: of.rates[each] for each, rate in rates_of(update.values()).items()}
        step = step_graph(
            graph,
            update,
            wrt=wrt,
            sparse=[name for name in of.sparse if name in update],
            numerics=of.options.get("numerics", "real"),
            loss=False,
        )
        used = read_by(step, step.output_names)
        step = replace(
            step,
            inputs=tuple(x for x in step.inputs if Graph.input_name(x) in used),
            defaults={name: x for name, x in step.defaults.items() if name in used and name not in self.rates},
        )
        self.written = [name for name in step.output_names if name in step.input_names]
        self.function = Function(step, of.target, of.options, in_place={name: name for name in self.written})
        self.read = read_by(differentiate(graph, wrt), gradients.values())

    def __call__(
        self, kept: Kept, inputs: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The gradients by input; parameters and state are written."""
        rates = {own: torch.tensor(kept.rates[name], dtype=torch.float64) for own, name in self.rates.items()}
        upstream = {self.cotangents[name]: x for name, x in cotangents.items()}
        given = {**inputs, **kept.state, **rates, **upstream}
        given = {name: given[name].detach() for name in self.function.names}
        results = dict(zip(self.function.graph.output_names, self.function({}, *given.values()), strict=True))
        for name in self.written:
            if results[name].data_ptr() != given[name].data_ptr():  # memory that the program cannot write as it lies
                given[name].copy_(results[name])
        count_changes([given[name] for name in self.written])
        return {name: results[gradient] for name, gradient in self.gradients.items()}


class _Updated(torch.autograd.Function):
    """A call of an :class:`UpdatingFunction` that autograd records."""

    @staticmethod
    def forward(ctx: Any, function: UpdatingFunction, kept: Kept, *inputs: torch.Tensor) -> Any:  # type: ignore[override]
        given = dict(zip(function.names, inputs, strict=True))
        ctx.wanted = tuple(n for n, needed in zip(given, ctx.needs_input_grad[2:], strict=True) if needed)
        ctx.function, ctx.kept = function, kept
        ctx.set_materialize_grads(False)
        outputs = function.value({}, *inputs)
        names = function.graph.output_names
        step = function.step(ctx.wanted, names)
        # autograd counts changes of what it saves: a gradient that another backward's update has changed is an error
        saved = [n for n in given if step is not None and (n in step.read or n not in step.written)]
        ctx.saved = tuple(saved)
        ctx.held = {name: x for name, x in given.items() if name not in saved}
        ctx.save_for_backward(*(given[name] for name in saved))
        differentiable = reaching(function.graph, ctx.wanted)
        ctx.mark_non_differentiable(*(y for n, y in zip(names, outputs, strict=True) if n not in differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotDifferentiable("create_graph=True: a step has no derivative; leave out update=")
        function: UpdatingFunction = ctx.function
        given = {n: g for n, g in zip(function.graph.output_names, cotangents, strict=True) if g is not None}
        step = function.step(ctx.wanted, tuple(given))
        made: Mapping[str, torch.Tensor] = {}
        if step is not None:
            inputs = {**ctx.held, **dict(zip(ctx.saved, ctx.saved_tensors, strict=True))}
            made = step(ctx.kept, inputs, {name: given[name] for name in step.cotangents})
        return None, None, *(made.get(name) for name in function.names)
