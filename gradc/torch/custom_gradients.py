"""``torch.autograd.Function`` in a graph: one opaque op, which torch runs with the gradient that its author wrote."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..errors import NotDifferentiable, Unsupported
from ..process.forks import cached_property
from ..runtime.torch_private import overload_schema, private, says_what_is_written, with_context
from . import autocast

__all__ = ["REASON", "CustomGradient", "custom_gradient", "derived", "run_by_torch"]

WRITES = "a torch.autograd.Function that writes to its inputs"
REASON = "a torch.autograd.Function: it has a gradient of its own, which torch runs"

DERIVED = {"bitsandbytes.gemm_4bit.default": "bitsandbytes.dequantize_4bit.default"}
"""Products without a formula of autograd's, around which a library puts a ``torch.autograd.Function`` that defines
their derivative, as gradc has it, each with the op that its backward writes the weight out with; of what the Function
does not differentiate (scales) gradc has gradients, too.
"""

_LIBRARY = torch.library.Library("gradc", "FRAGMENT")  # lives as long as its ops are to exist
_LIBRARY.define(
    "custom_gradient(int key, Tensor[] tensors, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),  # its forward may draw numbers: never merged with an equal call
)

custom_gradient = torch.ops.gradc.custom_gradient.default
"""The op that stands for such a call; its first argument is the key of a :class:`CustomGradient`."""

_Mode: Any = private("TorchDispatchMode")


class _NoWrites(_Mode):
    """:raises Unsupported: an op writes in place, wherever to: which of it the caller sees, nothing says."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if overload_schema(function).is_mutable:
            raise Unsupported(WRITES)
        return function(*args, **(kwargs or {}))


_known: WeakValueDictionary[int, CustomGradient] = WeakValueDictionary()
_keys = itertools.count()


@dataclass(frozen=True)
class CustomGradient:
    """One call of a ``torch.autograd.Function`` as Dynamo traced it.

    :param apply: torch's higher-order op, which runs it and records its gradient.
    :param forward: gives (outputs, what backward reads).
    :param is_tensor: of each operand, whether it is a tensor; the others are sizes.
    :param autocast: the devices for which autocast was enabled around it, each with its dtype.
    """

    apply: Any
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    is_tensor: tuple[bool, ...]
    options: Mapping[str, Any]
    autocast: Mapping[str, torch.dtype]

    @classmethod
    def traced(cls, apply: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[CustomGradient, Any]:
        """The call, and its results from the op :data:`custom_gradient`, as a tracer sees them.

        :raises Unsupported: the forward writes in place, or a result is no tensor.
        """
        forward, backward, *operands = args
        if options.get("dirty_idx"):
            raise Unsupported(WRITES)
        is_tensor = tuple(isinstance(x, torch.Tensor) for x in operands)
        made = cls(apply, forward, backward, is_tensor, dict(options), autocast.enabled())
        results = forward.graph.output_node().args[0][0]
        several = isinstance(results, tuple | list)
        if not all(isinstance(r, torch.fx.Node) for r in (results if several else [results])):
            raise Unsupported("a torch.autograd.Function with a result that is no tensor")
        key = next(_keys)
        _known[key] = made
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        found = custom_gradient(key, tensors, [x for x in operands if not isinstance(x, torch.Tensor)])
        return made, tuple(found) if several else found[0]

    @cached_property
    def run(self) -> Callable[..., Any]:
        """Runs the call by a ``torch.autograd.Function`` that is made once.

        Torch's op makes one for each call, and interprets both graphs node by node.  That of old releases, whose
        backward has gradients for tensors alone, is taken as it is.
        """
        if not says_what_is_written(self.options):
            return functools.partial(self.apply, _as_call(self.forward), _as_call(self.backward), **self.options)
        forward, backward, constant = self.forward, self.backward, self.options["non_differentiable_idx"]
        saved = sorted(self.options.get("saved_for_backward_idx", ()))  # the others its author kept himself

        class Traced(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *operands: Any) -> Any:
                results, read = forward(*with_context(forward, operands))
                ctx.save_for_backward(*(read[i] for i in saved))
                ctx.kept = [None if i in saved else x for i, x in enumerate(read)]
                several = results if isinstance(results, tuple | list) else (results,)
                ctx.mark_non_differentiable(*(r for i, r in enumerate(several) if i in constant))
                return results

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                read = [*ctx.kept]
                for i, x in zip(saved, ctx.saved_tensors, strict=True):
                    read[i] = x
                return backward(*cotangents, *read)

        return Traced.apply  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def autocasting(self) -> Iterator[None]:
        """Autocast as it was around the call."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield

    def operands(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[Any]:
        """Tensors and sizes in the order of the call."""
        given = {True: iter(tensors), False: iter(sizes)}
        return [next(given[kind]) for kind in self.is_tensor]


def _as_call(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of the same operands and results that calls the module."""
    graph = torch.fx.Graph()
    operands = [graph.node_copy(n) for n in module.graph.nodes if n.op == "placeholder"]
    graph.output(graph.call_module("body", tuple(operands)))
    return torch.fx.GraphModule({"body": module}, graph)


def derived(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, operands: Sequence[Any]
) -> torch.fx.GraphModule | None:
    """The forward of a ``torch.autograd.Function`` whose result is a call of one of :data:`DERIVED` and whose backward
    is that of the product, to be differentiated as any other op is; None of one that is anything else.
    """
    results, saved = forward.graph.output_node().args[0]
    needed = {results} if isinstance(results, torch.fx.Node) else {*results}
    for node in reversed(forward.graph.nodes):  # the others set gradient modes and compare sizes
        if node in needed:
            needed.update(node.all_input_nodes)
    calls = [n for n in forward.graph.nodes if n in needed and n.op.startswith("call_")]
    computing = [n for n in calls if not (n.op == "call_method" and n.target == "view")]
    if len(computing) != 1 or str(computing[0].target) not in DERIVED:
        return None
    cotangent = [n for n in backward.graph.nodes if n.op == "placeholder"][-1 - len(saved)]
    sources = [n for n in forward.graph.nodes if n.op == "placeholder"][-len(operands) :]
    gradients = backward.graph.output_node().args[0]
    if not _is_the_products(computing[0], cotangent, sources, operands, gradients):
        return None
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in forward.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(torch.fx.node.map_arg(results, copies.__getitem__))
    return torch.fx.GraphModule(forward, graph)


def _is_the_products(
    call: torch.fx.Node,
    cotangent: torch.fx.Node,
    sources: Sequence[torch.fx.Node],
    operands: Sequence[Any],
    gradients: Sequence[Any],
) -> bool:
    """Whether a Function's gradients are those of the product that it calls, which another author may have changed:
    of x the cotangent times the weight written out, of the bias the cotangent's sums, of nothing else any.
    """
    x, bias = (_origin(n) for n in (call.args[0], call.kwargs.get("bias", (*call.args, *[None] * 7)[6])))
    for source, operand, gradient in zip(sources, operands, gradients, strict=True):
        made: Any = _origin(gradient)
        if made is None:
            fits = not (getattr(operand, "requires_grad", False) and source in (x, bias))
        elif source is x:
            first, second = map(_origin, (*made.args, None, None)[:2])
            written_out = isinstance(second, torch.fx.Node) and str(second.target) == DERIVED[str(call.target)]
            fits = made.target in _PRODUCTS and first is cotangent and written_out
            fits = fits and second.args[2:4] == call.args[4:6]  # the blocks' size, and the kind of codes
        else:
            fits = source is bias and made.target == "sum" and _origin(made.args[0]) is cotangent
        if not fits:
            return False
    return True


_PRODUCTS = (torch.matmul, operator.matmul, "matmul")


def _origin(value: Any) -> Any:
    """What a value is before it was viewed or converted."""
    while isinstance(value, torch.fx.Node) and value.op == "call_method" and value.target in ("view", "to"):
        value = value.args[0]
    return value


def run_by_torch(key: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """What torch runs for :data:`custom_gradient`: recorded by autograd with the gradient of its own."""
    call = _known[key]
    with call.autocasting():
        found = call.run(*call.operands(tensors, sizes))
    results = list(found) if isinstance(found, tuple | list) else [found]
    for result in results:
        if result.requires_grad:
            result.register_hook(_once)
    return results


def _once(_: torch.Tensor) -> None:
    """torch's op records its backward as if it were linear (2.13): second derivatives would be silently wrong."""
    if torch.is_grad_enabled():
        raise NotDifferentiable(
            "create_graph=True through a torch.autograd.Function in a compiled graph: torch gives wrong second"
            " derivatives there; keep the function out of the graph (torch.compiler.disable)"
        )


@torch.library.register_fake("gradc::custom_gradient", lib=_LIBRARY)
def _types(key: int, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
    call = _known[key]
    no_writes = contextlib.nullcontext() if says_what_is_written(call.options) else _NoWrites()
    with torch.no_grad(), call.autocasting(), no_writes:
        found, _ = torch.fx.Interpreter(call.forward).run(*with_context(call.forward, call.operands(tensors, sizes)))
    # an op gives memory of its own, also where the function returns a view of its input (a reversal of gradients)
    return [torch.empty_like(x) for x in (found if isinstance(found, tuple | list) else [found])]
