"""A graph as one node of autograd: gradc's forward, gradc's backward, residuals kept by torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import knobs
from ..api import compile
from ..autodiff import differentiate, joint_names
from ..errors import NotDifferentiable, Unsupported
from ..ir.graph import Graph, input_node, rebuild
from ..ir.node import Node
from ..module.module import Module
from ..module.residuals import Residuals
from ..module.sparse import SparseRows
from ..passes.graph.sparse_rows import sparse_rows
from ..process.forks import cached_property
from ..runtime.host.tensors import storages_stay_resizable, to_tensor
from ..runtime.recent import Recent
from .batches import one_by_one
from .normal_form import batched, transformed, transforming
from .prepared import PreparedFunction, described, with_axes
from .sizes import TORCH_DTYPES

_CALLS = 128
"""Calls of a function that are kept prepared."""


class Function:
    """A graph that is called with torch tensors and recorded by autograd.

    Modules are compiled when they are first needed, one for each set of inputs that want a gradient.

    :param graph: its inputs are given in order; its outputs come as a tuple, in order.
    :param options: of :func:`gradc.compile`.
    :param sparse: inputs whose gradients are sparse COO tensors, coalesced: one dimension is sparse, its indices
        ascend.
    :param in_place: outputs that may be written into the memory of an input, which the caller then reads no more, where
        nothing is recorded: each with that input.
    :param device: where it runs and its results lie, which operands without an axis need not; None: where a call's
        operands lie.
    :param orders: of outputs that the graph gives with their axes in memory order, and a call with those of the
        program: the axis of the program for each axis in memory.
    :param guarded: inputs whose dtype, device, shape and strides somebody has checked before each call: no more of them
        differs from call to call than the ``dims`` given with it, in whose order they are.
    """

    def __init__(
        self,
        graph: Graph,
        target: str | None = None,
        options: Mapping[str, Any] | None = None,
        sparse: Collection[str] = (),
        device: torch.device | None = None,
        in_place: Mapping[str, str] | None = None,
        orders: Mapping[str, tuple[int, ...]] | None = None,
        guarded: Collection[str] = (),
    ):
        self.graph, self.target, self.options, self.sparse = graph, target, dict(options or {}), frozenset(sparse)
        self.device, self.in_place, self.orders = device, dict(in_place or {}), dict(orders or {})
        self.names = tuple(name for name in graph.input_names if name not in graph.defaults)
        self._variants: dict[tuple[str, int | None, tuple[str, ...]], Differentiated] = {}
        self._calls: Recent[tuple[Any, ...], tuple[Differentiated, PreparedFunction | None]] = Recent(_CALLS)
        self._unguarded = [i for i, name in enumerate(self.names) if name not in guarded]

    def __call__(self, dims: Mapping[str, int], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, recorded where an input requires grad.

        :param dims: sizes that no input tells; others may stand there, too.
        :raises Unsupported: inside a transform of torch.func, or forward-mode autograd.
        """
        entered = transforming()
        if entered:
            refuse_transforms(inputs)
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # torch looks at both
        if recording and any(x.requires_grad for x in inputs):
            return (_Recorded.apply if entered else _apply)(self, dims, *inputs)  # type: ignore[no-any-return]
        value, prepared = self.call((), dims, inputs)
        made = prepared.forward(inputs) if prepared is not None else None
        if made is not None:
            return tuple(made[0])
        refuse_transforms(inputs)
        with torch.no_grad(), storages_stay_resizable(), _on(value.device):
            out = None if inputs or value.device is None else self._new_outputs(dims, value.device)
            values = value.module(dict(zip(self.names, inputs, strict=True)), dims=dims, out=out)
        return self.outputs(values, value.graph.output_names)

    def call(
        self, recorded: tuple[bool, ...], dims: Mapping[str, int], inputs: Sequence[torch.Tensor]
    ) -> tuple[Differentiated, PreparedFunction | None]:
        """(the graph and its gradients, a call of it of which the addresses of its inputs are left to say; None where
        there is more to it).

        :param recorded: of each input, whether it wants a gradient; () where none does.
        """
        key: tuple[Any, ...] | None = None
        if not transforming():
            with contextlib.suppress(RuntimeError):  # an input without strides
                sizes, unguarded = dims.items(), [described(inputs[i]) for i in self._unguarded]
                key = (self.target or knobs.TARGET.get(), recorded, *sizes, *unguarded)
        found: tuple[Differentiated, PreparedFunction | None] | None = self._calls.get(key) if key is not None else None
        if found is None:
            differentiated = self.wrt(tuple(itertools.compress(self.names, recorded)), inputs)
            found = differentiated, None
            if key is not None and all(x.layout is torch.strided for x in inputs):  # else the module says what is wrong
                with torch.no_grad():
                    found = self._calls[key] = differentiated, PreparedFunction.of(differentiated, dims, inputs)
        return found

    def wrt(self, names: tuple[str, ...], inputs: Sequence[torch.Tensor] = ()) -> Differentiated:
        """The graph with the gradients of these inputs.

        :param inputs: whose device decides where the function has none.
        """
        device = self.device or next((x.device for x in inputs if x.is_cuda), None)
        on_gpu = device is not None and device.type == "cuda"
        target = self.target or knobs.TARGET.get() or ("cuda" if on_gpu else "cpu")
        key = target, device.index if on_gpu and device is not None else None, names
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = Differentiated(self, names, target, device if target == "cuda" else None)
        return found

    def forget(self) -> None:
        """Drop what was compiled or differentiated."""
        self._variants.clear()
        self._calls.clear()

    def _new_outputs(self, dims: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """Memory for the results of a call that no operand tells to be torch's."""
        return {
            name: torch.empty(node.type.concrete(dims), dtype=TORCH_DTYPES[node.dtype], device=device)
            for name, node in self.graph.outputs
        }

    def outputs(self, values: Any, names: Sequence[str] = ()) -> tuple[torch.Tensor, ...]:
        """What a module's forward gave, as tensors in order, with the program's axes.

        :param names: what the module calls them, where that is not what the graph does.
        """
        names = names or self.graph.output_names
        each = _tensors([values[name] for name in names] if len(names) > 1 else [values])
        return tuple(
            with_axes(x, self.orders[name]) if name in self.orders else x
            for name, x in zip(self.graph.output_names, each, strict=True)
        )

    def in_memory_order(self, output: str, value: torch.Tensor) -> torch.Tensor:
        """An output, or its cotangent, with the axes that the graph gives it."""
        return value.permute(self.orders[output]) if output in self.orders else value


class Differentiated:
    """A graph and the gradients of some inputs.

    :param device: the GPU that it is compiled for; None: there is none.
    :ivar wrt: those of the inputs that an output is computed from; the gradient of another is None.
    :ivar differentiable: for each output that is computed from one of these, from which.
    """

    def __init__(self, function: Function, wanted: tuple[str, ...], target: str, device: torch.device | None = None):
        self.function, self.target, self.device = function, target, device
        graph = function.graph
        self.in_place = {} if wanted else function.in_place
        self.graph = _renamed_outputs(graph, self.in_place) if self.in_place else graph
        found = reaching(graph, wanted)
        reached = set().union(*found.values())
        self.wrt = tuple(name for name in wanted if name in reached)
        self.differentiable = found
        self._joint = differentiate(graph, self.wrt, unused="zeros") if self.wrt else None
        _, gradients = joint_names(graph, self.wrt)
        self.sparse = [name for name in self.wrt if name in function.sparse]
        if self._joint is not None and self.sparse:
            sparse_rows(self._joint, names=[gradients[n] for n in self.sparse])  # raises Unsupported before a call
        read = read_by(self._joint, gradients.values()) if self._joint is not None else set()
        self.read = tuple(n for n in function.names if n in read)  # inputs that the gradients depend on

    @cached_property
    def module(self) -> Module:
        options = {"unused": "zeros", **({"sparse": self.sparse} if self.sparse else {}), **self.function.options}
        if self.in_place:
            options["donate"] = [*self.in_place.values(), *options.get("donate", ())]
        return compile(self.graph, self.wrt, self.target, **options)

    def reached(self, outputs: Iterable[str]) -> set[str]:
        """The inputs in ``wrt`` that one of these outputs is computed from."""
        return set().union(*(self.differentiable[name] for name in outputs))

    @cached_property
    def gradient(self) -> Function:
        """The gradients of ``wrt`` as a function of :attr:`read` and of the cotangents of ``differentiable``.

        :raises NotDifferentiable: gradc has no second derivative of an op.
        """
        assert self._joint is not None
        cotangents, gradients = joint_names(self.function.graph, self.wrt)
        names = [*self.read, *(cotangents[n] for n in self.differentiable)]
        outputs = [(f"of.{i}", self._joint.output(gradients[n])) for i, n in enumerate(self.wrt)]
        inputs = {name: self._joint.input(name) for name in names}
        kept = [n for n in self._joint.inputs if Graph.input_name(n) in self._joint.defaults]
        graph = Graph(
            f"{self.function.graph.name}_gradient"[-180:].lstrip("_."),
            (*inputs.values(), *kept),
            tuple(outputs),
            self._joint.assumptions,
            notes=self._joint.notes,
            defaults=self._joint.defaults,
        )
        return Function(_renamed(graph), self.target, self.function.options, device=self.function.device)


def refuse_transforms(tensors: Sequence[torch.Tensor]) -> None:
    """:raises Unsupported: one of them is inside a transform of torch.func, or forward-mode autograd."""
    if transformed(tensors):
        raise Unsupported(
            "torch.func's vmap, grad and jvp and forward-mode autograd do not reach into gradc: take gradients by"
            " torch.autograd.grad, and a batch as an axis"
        )


def _renamed(graph: Graph) -> Graph:
    """The graph with names of its own for cotangents: ``d.`` belongs to those of the next derivative."""
    new = {node: input_node(f"in{i}", node.type) for i, node in enumerate(graph.inputs)}
    names = {Graph.input_name(node): f"in{i}" for i, node in enumerate(graph.inputs)}
    made = rebuild([node for _, node in graph.outputs], dict(new))
    return Graph(
        graph.name,
        tuple(new.values()),
        tuple((name, made[node]) for name, node in graph.outputs),
        graph.assumptions,
        notes={made[n]: note for n, note in graph.notes.items() if n in made},
        defaults={names[n]: a for n, a in graph.defaults.items() if n in names},
    )


def _renamed_outputs(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with other names for some outputs: one of an input's name goes to the memory of that input, or of
    none.
    """
    outputs = tuple((names.get(name, name), node) for name, node in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs, graph.assumptions, notes=graph.notes, defaults=graph.defaults)


def reaching(graph: Graph, names: Sequence[str]) -> dict[str, set[str]]:
    """For each output that autograd would say requires grad, the inputs among these that make it so: it is computed
    from them through floats alone, also where the derivative is zero everywhere.
    """
    bits = {graph.input(name): 1 << i for i, name in enumerate(names)}
    for node in graph.nodes:
        if node.dtype.is_float and node.op.name != "stop_gradient":
            for operand in node.operands:
                bits[node] = bits.get(node, 0) | bits.get(operand, 0)
    found = {output: bits.get(node, 0) if node.dtype.is_float else 0 for output, node in graph.outputs}
    return {output: {n for i, n in enumerate(names) if mask >> i & 1} for output, mask in found.items() if mask}


def read_by(graph: Graph, outputs: Iterable[str]) -> set[str]:
    """The inputs that these outputs depend on."""
    seen: set[Node] = set()
    pending = [graph.output(name) for name in outputs]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.operands
    return {Graph.input_name(n) for n in graph.inputs if n in seen}


@dataclass(frozen=True)
class _Kept:
    """Where the tensors that autograd keeps of a call of a module belong; it has none of them itself.

    :param empty: the call's residuals without arrays.
    :param outputs: the output that a residual is.
    :param count: of the tensors, how many are inputs that gradients depend on.
    :param names: of the residuals that the others are.
    """

    function: Function
    empty: Residuals
    outputs: Mapping[str, str]
    count: int
    names: tuple[str, ...]

    @staticmethod
    def of(
        differentiated: Differentiated,
        given: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        residuals: Residuals,
    ) -> tuple[_Kept, list[torch.Tensor]]:
        """(that, the tensors).

        :param given: the inputs by name; ``outputs``: by name, too.
        """
        borrowed = {} if residuals.orders else {r.name for r in residuals.module.residuals if r.why == "input"}
        own = {n: given[n] if n in borrowed and n in given else a for n, a in residuals.arrays.items()}
        # saved as the very tensor that is returned, a change of it before backward is an error of autograd's
        are = {r.name: r.output for r in residuals.module.residuals if r.output}
        own |= {name: outputs[output] for name, output in are.items()}
        inputs = [given[n] for n in differentiated.read]
        kept = _Kept(differentiated.function, residuals.carrying({}), are, len(inputs), tuple(own))
        return kept, [*inputs, *_tensors(own.values())]

    def read(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of what was kept, the inputs that gradients depend on."""
        return saved[: self.count]

    def residuals(self, saved: Sequence[torch.Tensor]) -> Residuals:
        """What was kept, for a call of the module."""
        own = zip(self.names, saved[self.count :], strict=True)
        in_order = self.function.in_memory_order
        return self.empty.carrying({n: in_order(self.outputs.get(n, ""), x) for n, x in own})


class _Recorded(torch.autograd.Function):
    """A call of a :class:`Function` that autograd records."""

    @staticmethod
    def forward(ctx: Any, function: Function, dims: Mapping[str, int], *inputs: torch.Tensor) -> Any:  # type: ignore[override]
        differentiated, prepared = function.call(ctx.needs_input_grad[2:], dims, inputs)
        ctx.differentiated = differentiated
        ctx.set_materialize_grads(False)
        made = prepared.forward(inputs) if prepared is not None else None
        if made is not None:
            outputs, kept, ctx.where = made
            ctx.kept, ctx.dims, ctx.devices = prepared, dims, {}
            ctx.save_for_backward(*kept)
        else:
            refuse_transforms(inputs)
            outputs = _by_module(ctx, differentiated, dims, inputs)
        if len(differentiated.differentiable) < len(outputs):
            names = function.graph.output_names
            ctx.mark_non_differentiable(
                *(y for n, y in zip(names, outputs, strict=True) if n not in differentiated.differentiable)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        differentiated: Differentiated = ctx.differentiated
        function = differentiated.function
        names = function.graph.output_names
        dense = [c if c is None else _dense(c) for c in cotangents]
        saved = ctx.saved_tensors
        if ctx.where is not None and not torch.is_grad_enabled() and not transforming():
            upstream = (
                dense
                if not function.orders
                else [c if c is None else function.in_memory_order(n, c) for n, c in zip(names, dense, strict=True)]
            )
            made = ctx.kept.backward(saved, ctx.where, upstream)
            if made is not None:
                return None, None, *made
        given = {n: c for n, c in zip(names, dense, strict=True) if n in differentiated.differentiable}
        reached = differentiated.reached(n for n, c in given.items() if c is not None)
        if not reached:
            return (None,) * (2 + len(function.names))
        # where no cotangent comes from, there is no gradient: None, which an optimizer skips, not zeros
        wanted = [n for n in function.names if n in reached]
        upstream_of = [n for n, c in given.items() if c is not None]
        read = ctx.kept.read(saved)

        def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
            refuse_transforms(tensors)
            read, upstream = tensors[: len(differentiated.read)], tensors[len(differentiated.read) :]
            of_outputs = {
                **given,
                **{n: function.in_memory_order(n, c) for n, c in zip(upstream_of, upstream, strict=True)},
            }
            made: Mapping[str, Any]
            if torch.is_grad_enabled():
                made = _gradients_again(differentiated, ctx.dims, read, of_outputs)
            else:
                residuals = ctx.kept.residuals(saved)
                with storages_stay_resizable(), _on(differentiated.device):
                    made = differentiated.module.backward(
                        residuals, **_all_cotangents(differentiated, of_outputs)
                    ).as_dict()
            found = _tensors(_sparse(g) if isinstance(g, SparseRows) else g for g in (made[n] for n in wanted))
            return [g if n not in ctx.devices else g.to(ctx.devices[n]) for n, g in zip(wanted, found, strict=True)]

        operands = [*read, *(given[n] for n in upstream_of)]
        if batched(operands):
            found = one_by_one(lambda *each: [_dense(g) for g in gradients(*each)], operands, len(wanted))
        else:
            found = gradients(*operands)
        made = dict(zip(wanted, found, strict=True))
        return None, None, *(made.get(n) for n in function.names)


_apply: Any = super(torch.autograd.Function, _Recorded).apply
"""What ``_Recorded.apply`` calls, without its look at each operand for values that have left torch.func."""


@storages_stay_resizable()
def _by_module(
    ctx: Any, differentiated: Differentiated, dims: Mapping[str, int], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The outputs, of a call of the module; in the context of autograd's what backward needs."""
    function = differentiated.function
    ctx.dims, ctx.where = dims, None
    given = dict(zip(function.names, inputs, strict=True))
    ctx.devices = {n: x.device for n, x in given.items() if differentiated.device not in (None, x.device)}
    with _on(differentiated.device):
        if not differentiated.wrt:
            return function.outputs(differentiated.module(given, dims=dims))
        values, residuals = differentiated.module.forward(given, dims=dims)
    outputs = function.outputs(values)
    named = dict(zip(function.graph.output_names, outputs, strict=True))
    ctx.kept, tensors = _Kept.of(differentiated, given, named, residuals)
    ctx.save_for_backward(*tensors)
    return outputs


def _on(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which a GPU is the current one."""
    if device is None or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() if x.layout is torch.sparse_coo else x


def _sparse(rows: SparseRows) -> torch.Tensor:
    """A gradient of some rows as autograd takes it."""
    at, values = _tensors((rows.rows, rows.values))
    return torch.sparse_coo_tensor(at[None], values, rows.shape, is_coalesced=True, check_invariants=False)


def _tensors(arrays: Iterable[Any]) -> list[Any]:
    """Arrays as tensors; tensors and None as they are."""
    return [x if x is None or isinstance(x, torch.Tensor) else _tensor(x) for x in arrays]


def _tensor(array: Any) -> torch.Tensor:
    """NumPy's arrays of any dtype, and what lies on a GPU, where it lies."""
    if isinstance(array, np.ndarray | np.generic):
        return to_tensor(np.asarray(array))  # type: ignore[no-any-return]
    return torch.as_tensor(array)


def _all_cotangents(differentiated: Differentiated, given: Mapping[str, Any]) -> dict[str, Any]:
    """Cotangents by output; None, which means zero, for each that is not given."""
    outputs = differentiated.function.graph.outputs
    return {name: given.get(name) for name, node in outputs if node.dtype.is_float}


def _gradients_again(
    differentiated: Differentiated, dims: Mapping[str, int], read: Sequence[torch.Tensor], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The gradients by a call that autograd records, for ``create_graph=True``.

    :raises NotDifferentiable: gradc has no second derivative here.
    """
    try:
        gradient = differentiated.gradient
        types = {name: node.type for name, node in differentiated.function.graph.outputs}
        like = next((c for c in given.values() if c is not None), None)
        cotangents = []
        for name, cotangent in given.items():
            if cotangent is None:
                sizes = types[name].concrete(dims)
                cotangent = torch.zeros(sizes, dtype=TORCH_DTYPES[types[name].dtype], device=like.device)  # type: ignore[union-attr]
            cotangents.append(cotangent)
        results = gradient(dims, *read, *cotangents)
    except NotDifferentiable as error:
        raise NotDifferentiable(f"create_graph=True: {error}") from None
    return dict(zip(differentiated.wrt, results, strict=True))
