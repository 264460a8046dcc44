"""Calls of a program that is one region, which writes new values of inputs over them: mostly an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import knobs
from ..runtime.torch_private import tensor_guards
from .function import Function
from .normal_form import transforming
from .prepared import PreparedFunction, picked


class _Known(NamedTuple):
    """A call that was prepared.

    :param guards: whether tensors are as they were then.
    :param target: what :data:`.knobs.TARGET` was.
    """

    guards: Callable[..., bool]
    prepared: PreparedFunction
    target: str | None


class OneRegion:
    """What a call of such a program does, where it differs from an earlier one in addresses alone: neither Dynamo's
    guards nor these ask of a tensor what those have.

    :param inputs: of the region, by their positions among the program's.
    :param results: of the program: the position among the region's outputs, or what is no value of the graph.
    """

    def __init__(self, function: Function, inputs: Sequence[int], results: Sequence[int | None]):
        self._function, self._inputs, self._results = function, picked(inputs), list(results)
        self._known: _Known | None = None

    @staticmethod
    def of(
        placeholders: Sequence[torch.fx.Node],
        inputs: Sequence[torch.fx.Node],
        outputs: Sequence[torch.fx.Node],
        function: Function,
        written: Mapping[torch.fx.Node, torch.fx.Node],
        returned: Sequence[Any],
    ) -> OneRegion | None:
        """The program as that; None where a step is left to torch, or a result to be copied to where it belongs.

        :param inputs: of the region, and ``outputs``, in the order of its function's.
        :param written: the new value of each input of the program that is written, with that.
        """
        names = dict(zip(outputs, function.graph.output_names, strict=True))
        in_place = {node for node, name in names.items() if name in function.in_place}
        values = [r for r in returned if r is not None]
        if not written or written.keys() != in_place or not set(inputs) <= set(placeholders):
            return None
        if not all(isinstance(r, torch.fx.Node) and r in names for r in values):
            return None
        at, order = {node: i for i, node in enumerate(placeholders)}, list(outputs)
        return OneRegion(function, [at[n] for n in inputs], [None if r is None else order.index(r) for r in returned])

    def __call__(self, given: Sequence[Any]) -> list[Any] | None:
        """The results; None, and nothing was run, where it takes a call like the first."""
        known = self._known
        if known is None or known.target != knobs.TARGET.get() or transforming():
            return None
        inputs = self._inputs(given)
        if not known.guards(*inputs):
            return None
        made = known.prepared.run_on(inputs)
        if made is None:
            return None
        if not self._results:
            return []
        outputs = known.prepared.outputs(inputs, made)
        return [None if i is None else outputs[i] for i in self._results]

    def remember(self, given: Sequence[Any]) -> None:
        """Prepares calls on such inputs, as those of one that has been made."""
        inputs = self._inputs(given)
        if transforming() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return
        _, prepared = self._function.call((), {}, inputs)
        guards = tensor_guards(inputs) if prepared is not None and prepared.in_place else None
        self._known = _Known(guards, prepared, knobs.TARGET.get()) if prepared and guards else None
