"""The normal form of a torch program: a functional graph of ATen ops, those that gradc has kept whole.

One form for ``torch.export`` and for Dynamo's graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..runtime.torch_private import forward_level, mutated_parameters, overload_schema, present, private
from .custom_gradients import CustomGradient

__all__ = ["NormalForm", "inner_tensors", "is_batching", "normal_form", "stop_gradient", "transformed", "tree_leaves"]

aot_export_module = private("aot_export_module")
_ignore_backend_decomps = private("_ignore_backend_decomps")
_override_composite_implicit_decomp = private("_override_composite_implicit_decomp")
_split_decomp_table_to_cia_and_python_decomp = private("_split_decomp_table_to_cia_and_python_decomp")
preserve_node_meta = private("preserve_node_meta")
TorchDispatchMode: Any = private("TorchDispatchMode")
is_traceable_wrapper_subclass = private("is_traceable_wrapper_subclass")
is_traceable_wrapper_subclass_type = private("is_traceable_wrapper_subclass_type")
is_functorch_wrapped_tensor = private("is_functorch_wrapped_tensor")
maybe_current_level = private("maybe_current_level")
tree_leaves = private("tree_leaves")
tree_map_only = private("tree_map_only")

_LIBRARY = torch.library.Library("gradc", "DEF")  # lives as long as its ops are to exist
_LIBRARY.define("stop_gradient(Tensor x) -> Tensor")
_LIBRARY.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("stop_gradient", lambda x: torch.empty_like(x), "Meta")

stop_gradient = torch.ops.gradc.stop_gradient.default
"""What ``detach`` is in a normal form: functionalisation would leave an alias, which passes the gradient on."""


def transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these is a value inside torch.func's vmap, grad or jvp, or of forward-mode autograd."""
    if forward_level() < 0:
        return any(map(is_functorch_wrapped_tensor, tensors))
    return any(
        is_functorch_wrapped_tensor(x) or torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


_CUSTOM_GRADIENT = "autograd_function_apply"
_BATCHING = (
    "lazy_load_decompositions",
    "_vmap_increment_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
    "_vmap_decrement_nesting",
)


def is_batching(target: Any) -> bool:
    """Whether a call of Dynamo's graph is one of those that it writes for ``torch.vmap``."""
    return any(target is each for each in present(_BATCHING))


def inner_tensors(value: Any) -> list[tuple[str, Any]]:
    """The tensors that a wrapper subclass (a quantized weight, say) is made of, each with the path of its attribute; of
    any other value, itself with the path "".
    """
    if not is_traceable_wrapper_subclass(value):
        return [("", value)]
    names, _ = value.__tensor_flatten__()
    return [
        (f"{name}.{path}" if path else name, x) for name in names for path, x in inner_tensors(getattr(value, name))
    ]


def _rewrapped(example: Any, tensors: Iterator[Any]) -> Any:
    """A value like the example of the next tensors, which :func:`inner_tensors` gave of such a value."""
    if not is_traceable_wrapper_subclass(example):
        return next(tensors)
    names, context = example.__tensor_flatten__()
    inner = {name: _rewrapped(getattr(example, name), tensors) for name in names}
    return type(example).__tensor_unflatten__(inner, context, example.size(), example.stride())


@dataclass(frozen=True)
class NormalForm:
    """A functional graph of ATen ops.

    :param module: its placeholders are the parameters and buffers of the traced module (in the order of ``lifted``),
        then the :func:`inner_tensors` of the arguments; its outputs are the new values of ``mutated``, then what the
        program returns.
    :param lifted: names of parameters and buffers that the traced module itself held.
    :param mutated: which placeholders are written in place, in the order of the leading outputs.
    :param custom: the calls of ``torch.autograd.Function``, which nodes of ``gradc.custom_gradient`` name by key.
    :param wraps: whether an argument is a wrapper subclass.
    """

    module: torch.fx.GraphModule
    lifted: tuple[str, ...]
    mutated: tuple[str, ...]
    custom: tuple[CustomGradient, ...] = ()
    wraps: bool = False


def normal_form(module: torch.fx.GraphModule, arguments: Sequence[Any], kept: Callable[[Any], bool]) -> NormalForm:
    """Trace a module of torch ops into ATen ops without side effects.

    Gradient modes become explicit: what ``detach`` returns, and every value that is made under ``no_grad``, is an
    operand of ``gradc.stop_gradient``.  Autocast becomes explicit casts.

    :param arguments: (fake) tensors and sizes, one per placeholder.
    :param kept: whether an overload is not decomposed.
    :raises Unsupported: the program changes a value in place under ``no_grad`` that has a gradient, or holds a
        ``torch.autograd.Function`` that writes to its inputs.
    """
    flat = [x for argument in arguments for _, x in inner_tensors(argument)]
    composite_implicit, python = _decompositions(kept)
    custom: list[CustomGradient] = []
    with _ignore_backend_decomps(), _override_composite_implicit_decomp(composite_implicit), preserve_node_meta():
        traced, signature = aot_export_module(
            _Program(module, arguments, custom), flat, trace_joint=False, pre_dispatch=False, decompositions=python
        )
    lifted = (*signature.parameters, *signature.buffers)
    by_target = {
        **{target: name for name, target in signature.inputs_to_parameters.items()},
        **{target: name for name, target in signature.inputs_to_buffers.items()},
    }
    own = {**mutated_parameters(signature), **signature.buffers_to_mutate}
    changed = [*map(by_target.__getitem__, own.values()), *signature.user_inputs_to_mutate.values()]
    _drop_tokens(traced.graph, len(signature.input_tokens))
    wraps = any(map(is_traceable_wrapper_subclass, arguments))
    _drop_known_checks(traced.graph)
    for node in traced.graph.find_nodes(op="get_attr"):  # up to 2.6 constants come without their values
        node.meta.setdefault("val", functools.reduce(getattr, node.target.split("."), traced))
    return NormalForm(
        traced, tuple(name.removeprefix("program.") for name in lifted), tuple(changed), tuple(custom), wraps
    )


@functools.cache
def _decompositions(kept: Callable[[Any], bool]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """How ops are decomposed: those that C++ decomposes, and those that Python does.

    Made once, as it takes a second: an op that is registered later stays whole.
    """
    table = torch.export.default_decompositions()
    for overload in filter(kept, list(table)):
        del table[overload]
    return _split_decomp_table_to_cia_and_python_decomp(table.materialize())  # type: ignore[no-any-return]


def _drop_known_checks(graph: torch.fx.Graph) -> None:
    """Without checks of what the types say: metadata of tensors, and (up to 2.8) equations of sizes that torch has made
    one size.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.aten._assert_scalar.default and isinstance(node.args[0], torch.fx.Node):
            held, value = node.args[0], node.args[0].meta.get("val")
            if isinstance(value, torch.SymBool) and value.node.expr.is_Boolean and bool(value.node.expr):
                graph.erase_node(node)
                if not held.users:
                    graph.erase_node(held)


def _drop_tokens(graph: torch.fx.Graph, count: int) -> None:
    """Calls with effects (checks of values, prints) as plain calls in their order, marked by ``meta["effect"]``."""
    if not count:
        return
    results = graph.output_node().args[0]
    graph.output_node().args = (tuple(results[count:]),)
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "with_effects":
            continue
        _token, target, *args = node.args
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(args), dict(node.kwargs))
        results = node.meta["val"][1:]
        call.meta = {**node.meta, "val": results[0] if len(results) == 1 else results, "effect": True}
        for user in list(node.users):
            index = user.args[1]
            if index and len(results) == 1:
                user.replace_all_uses_with(call)
                graph.erase_node(user)
            elif index:
                user.args = (call, index - 1)
            else:
                user.replace_all_uses_with(node.args[0])
                graph.erase_node(user)
        graph.erase_node(node)
    for node in [n for n in graph.nodes if n.op == "placeholder"][:count]:
        graph.erase_node(node)


class _Program(torch.nn.Module):
    """A graph of torch ops run by a tracer on the inner tensors of its arguments, with gradient modes made explicit.

    :param examples: of its arguments.
    :param custom: filled with the calls of ``torch.autograd.Function``.
    """

    def __init__(self, program: torch.fx.GraphModule, examples: Sequence[Any], custom: list[CustomGradient]):
        super().__init__()
        self.program, self.custom = program, custom
        self.examples = tuple(examples)

    def forward(self, *tensors: Any) -> Any:
        gradients, levels = _ExplicitGradients(tensors), maybe_current_level() or 0
        try:
            with gradients:
                remaining = iter(tensors)
                arguments = [_rewrapped(example, remaining) for example in self.examples]
                return _Interpreter(self.program, gradients, self.custom).run(*arguments)
        finally:  # an error inside of torch.vmap leaves its levels entered
            while (maybe_current_level() or 0) > levels:
                private("_vmap_decrement_nesting")()


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph, its subgraphs too, and tells gradient modes to ``gradients`` in place of torch."""

    def __init__(self, program: torch.fx.GraphModule, gradients: _ExplicitGradients, custom: list[CustomGradient]):
        super().__init__(program, garbage_collect_values=False)
        self.gradients, self.custom = gradients, custom

    def _inner(self, body: torch.fx.GraphModule, operands: Sequence[Any]) -> Any:
        return _Interpreter(body, self.gradients, self.custom).run(*operands)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", "")
        if target is private("_set_grad_enabled"):
            self.gradients.recording = bool(args[0])
            return None
        if name == _CUSTOM_GRADIENT:
            if maybe_current_level():
                raise Unsupported("a torch.autograd.Function inside torch.vmap")
            made, results = CustomGradient.traced(target, args, kwargs)
            self.custom.append(made)
            return results
        if name == "wrap_with_set_grad_enabled":  # (whether, body, *operands)
            before, self.gradients.recording = self.gradients.recording, bool(args[0])
            try:
                return self._inner(args[1], args[2:])
            finally:
                self.gradients.recording = before
        if name == "wrap_with_autocast":  # (device, dtype, enabled, cache_enabled, body, *operands)
            with torch.autocast(args[0], dtype=args[1], enabled=args[2], cache_enabled=args[3]):
                return self._inner(args[4], args[5:])
        if name == "tag_activation_checkpoint":  # (body, *operands): gradc chooses itself what backward keeps
            return self._inner(args[0], args[1:])
        return super().call_function(target, args, kwargs)


class _ExplicitGradients(TorchDispatchMode):
    """Puts :data:`stop_gradient` where torch would not record.

    :ivar recording: whether autograd would record now.
    :ivar constant: tensors that no gradient reaches, by identity.
    :ivar detached: copies in place of views that torch would have given: nothing may be written to them.
    """

    def __init__(self, arguments: Sequence[Any]):
        super().__init__()
        self.recording = True
        self.constant: dict[int, torch.Tensor] = {}
        self.detached: dict[int, torch.Tensor] = {}
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and not argument.requires_grad:
                self.constant[id(argument)] = argument

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass calls ops on its inner tensors
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        constant = all(id(x) in self.constant or not x.is_floating_point() for x in tensors)
        if function is torch.ops.aten.detach.default and not constant:
            return self._stopped(args[0], view=True)
        result = function(*args, **(kwargs or {}))
        if overload_schema(function).is_mutable:
            self._check_write(function, args, kwargs or {}, constant)
            return result
        view = any(r.alias_info is not None for r in overload_schema(function).returns)
        if constant:
            self._mark(self.constant, result)
        elif not self.recording:
            return tree_map_only(torch.Tensor, lambda x: self._stopped(x, view), result)
        if view and any(id(x) in self.detached for x in tensors):
            self._mark(self.detached, result)
        return result

    def _check_write(self, function: Any, args: Any, kwargs: Any, constant: bool) -> None:
        """What a write in place means for gradients, once it has happened.

        :raises Unsupported: torch's meaning has no functional form.
        """
        written = [
            kwargs.get(a.name, args[i] if i < len(args) else None)
            for i, a in enumerate(overload_schema(function).arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        for x in written:
            if id(x) in self.detached:
                raise Unsupported(f"{function} writes through a view that detach() or no_grad cut off")
            if constant:
                continue
            if self.recording:
                self.constant.clear()  # x has a gradient now, and so may what shares its memory
            elif id(x) in self.constant:
                torch.ops.aten.copy_.default(x, self._stopped(x, view=False))
            else:
                raise Unsupported(f"{function} writes under no_grad to a value that may have a gradient")

    def _stopped(self, x: torch.Tensor, view: bool) -> torch.Tensor:
        if not x.is_floating_point():
            stopped = x
        else:
            stopped = stop_gradient(x)
            if view:
                self._mark(self.detached, stopped)
        self._mark(self.constant, stopped)
        return stopped

    @staticmethod
    def _mark(marked: dict[int, torch.Tensor], result: Any) -> None:
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                marked[id(x)] = x
