"""The normal form of a torch program: a functional graph of ATen ops, those that gradc has kept whole.

One form for ``torch.export`` and for Dynamo's graphs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..runtime.torch_private import (
    composite_kernel,
    forward_level,
    is_tracing,
    mutated_parameters,
    overload_schema,
    present,
    private,
    with_context,
)
from . import autocast, foreach
from .custom_gradients import CustomGradient, derived
from .decompositions import decompositions, kept_whole
from .flex_attention import flex_attention, says_nothing
from .sizes import typical
from .table import draws

__all__ = [
    "NormalForm",
    "batched",
    "enables_gradients",
    "inner_tensors",
    "is_batching",
    "normal_form",
    "stop_gradient",
    "stops_gradient",
    "transformed",
    "tree_leaves",
]

aot_export_module = private("aot_export_module")
_ignore_backend_decomps = private("_ignore_backend_decomps")
preserve_node_meta = private("preserve_node_meta")
TorchDispatchMode: Any = private("TorchDispatchMode")
is_traceable_wrapper_subclass = private("is_traceable_wrapper_subclass")
is_traceable_wrapper_subclass_type = private("is_traceable_wrapper_subclass_type")
is_functorch_wrapped_tensor = private("is_functorch_wrapped_tensor")
is_legacy_batchedtensor = private("is_legacy_batchedtensor")
maybe_current_level = private("maybe_current_level")
tree_leaves = private("tree_leaves")
tree_map_only = private("tree_map_only")

_LIBRARY = torch.library.Library("gradc", "DEF")  # lives as long as its ops are to exist
_LIBRARY.define("stop_gradient(Tensor x) -> Tensor")
_LIBRARY.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("stop_gradient", lambda x: torch.empty_like(x), "Meta")

stop_gradient = torch.ops.gradc.stop_gradient.default
"""What a value that is made under ``no_grad`` is an operand of: a copy, which nothing else shares memory with."""

_detach, _alias = torch.ops.aten.detach.default, torch.ops.aten.alias.default

_unsafe_view = torch.ops.aten._unsafe_view.default  # a view to functionalisation, if not to its own schema

_view_as_dtype = torch.ops.aten.view.dtype
"""What stands for ``detach`` while a program is made functional: a view as the dtype that a tensor has already, which
passes no gradient on, either.  Of ``detach`` itself an ``alias`` would be left, which does; this is taken anew, as any
view is, where what it views was written to.
"""


def stops_gradient(node: torch.fx.Node) -> bool:
    """Whether a call of a normal form passes its operand on, but no gradient to it."""
    return node.target is stop_gradient or node.target is _detach


def transforming() -> bool:
    """Whether a transform of torch.func, forward-mode autograd or torch.jit.trace is entered."""
    return maybe_current_level() is not None or forward_level() >= 0 or is_tracing()


def transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these is a value inside torch.func's vmap, grad or jvp, or of forward-mode autograd."""
    if forward_level() < 0:
        return any(map(is_functorch_wrapped_tensor, tensors))
    return any(
        is_functorch_wrapped_tensor(x) or torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def batched(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of these holds the batch of a vmap: torch.func's, or that of ``is_grads_batched=True``."""
    return any(is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x) for x in tensors)


_WITH_MODE = "wrap_with_set_grad_enabled"
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


def enables_gradients(module: torch.fx.GraphModule) -> bool:
    """Whether a program of torch ops, or a part of it, enables gradients itself, whatever its caller does."""
    return any(
        (node.target is private("_set_grad_enabled") or getattr(node.target, "__name__", "") == _WITH_MODE)
        and bool(node.args[0])
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def mode_left(module: torch.fx.GraphModule) -> bool | None:
    """The gradient mode that a program of torch ops leaves behind; None if it sets none."""
    calls = module.graph.find_nodes(op="call_function", target=private("_set_grad_enabled"))
    return bool(calls[-1].args[0]) if calls else None


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


def normal_form(
    module: torch.fx.GraphModule,
    arguments: Sequence[Any],
    kept: Callable[[Any], bool],
    recording: bool = True,
    recorded: bool = True,
) -> NormalForm:
    """Trace a module of torch ops into ATen ops without side effects.

    Gradient modes become explicit: a value that is made under ``no_grad`` is an operand of ``gradc.stop_gradient``, and
    a view that is taken there one of ``aten.detach``, which is a view again.  Autocast becomes explicit casts.  What
    shares memory in eager mode is a view of one value here, or the value itself.

    :param arguments: (fake) tensors and sizes, one per placeholder.
    :param kept: whether an overload is not decomposed.
    :param recording: whether autograd records where the program begins.
    :param recorded: whether autograd records anywhere; where it does not, gradient modes have nothing to say.
    :raises Unsupported: the program changes a value in place under ``no_grad`` that has a gradient, writes through a
        view whose functional form is not what eager mode does, or holds a ``torch.autograd.Function`` that writes to
        its inputs.
    """
    flat = [x for argument in arguments for _, x in inner_tensors(argument)]
    python = decompositions(kept).python
    custom: list[CustomGradient] = []
    libraries = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    program = _Program(module, arguments, custom, recording, recorded, libraries)
    with _ignore_backend_decomps(), kept_whole(kept), preserve_node_meta():
        traced, signature = aot_export_module(
            program,
            flat,
            trace_joint=False,
            pre_dispatch=False,
            decompositions=python,
        )
    lifted = (*signature.parameters, *signature.buffers)
    by_target = {
        **{target: name for name, target in signature.inputs_to_parameters.items()},
        **{target: name for name, target in signature.inputs_to_buffers.items()},
    }
    own = {**mutated_parameters(signature), **signature.buffers_to_mutate}
    changed = [*map(by_target.__getitem__, own.values()), *signature.user_inputs_to_mutate.values()]
    _drop_tokens(traced.graph, len(signature.input_tokens))
    _drop_results(traced.graph, program.drawn)
    wraps = any(map(is_traceable_wrapper_subclass, arguments))
    _drop_known_checks(traced.graph)
    for node in traced.graph.find_nodes(op="get_attr"):  # up to 2.6 constants come without their values
        node.meta.setdefault("val", functools.reduce(getattr, node.target.split("."), traced))
    for node in traced.graph.find_nodes(op="call_function", target=_view_as_dtype):
        if node.args[1] is node.args[0].meta["val"].dtype:
            node.target, node.args = _detach, node.args[:1]
    return NormalForm(
        traced, tuple(name.removeprefix("program.") for name in lifted), tuple(changed), tuple(custom), wraps
    )


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


def _drop_results(graph: torch.fx.Graph, count: int) -> None:
    """Without the last results, which were copies of what was drawn: the draws stay, whoever reads them."""
    if count:
        results = graph.output_node().args[0]
        graph.output_node().args = (tuple(results[:-count]),)  # type: ignore[index]
        for copy in results[-count:]:  # type: ignore[index]
            graph.erase_node(copy)


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
    :param recording: whether autograd records where it begins.
    :param recorded: whether it records anywhere.
    :param libraries: whether cuDNN and oneDNN are enabled where it is called.
    :ivar drawn: how many random numbers, or masks of them, it gives after its results: a tracer drops calls that
        nothing reads, and eager mode draws.
    """

    def __init__(
        self,
        program: torch.fx.GraphModule,
        examples: Sequence[Any],
        custom: list[CustomGradient],
        recording: bool,
        recorded: bool,
        libraries: tuple[bool, bool],
    ):
        super().__init__()
        self.program, self.custom, self.libraries = program, custom, libraries
        self.recording, self.recorded = recording, recorded
        self.examples = tuple(examples)
        self.drawn = 0

    def forward(self, *tensors: Any) -> Any:
        gradients = _ExplicitGradients(tensors, self.recording, self.recorded, self.libraries)
        levels = maybe_current_level() or 0
        try:
            with gradients:
                remaining = iter(tensors)
                arguments = [_rewrapped(example, remaining) for example in self.examples]
                results = _Interpreter(self.program, gradients, self.custom).run(*arguments)
                self.drawn = len(gradients.drawn)
                return (*results, *gradients.drawn) if gradients.drawn else results
        finally:  # an error inside of torch.vmap leaves its levels entered
            while (maybe_current_level() or 0) > levels:
                private("_vmap_decrement_nesting")()


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph, its subgraphs too, and tells gradient modes to ``gradients`` in place of torch."""

    def __init__(self, program: torch.fx.GraphModule, gradients: _ExplicitGradients, custom: list[CustomGradient]):
        super().__init__(program, garbage_collect_values=False)
        self.gradients, self.custom = gradients, custom

    def run_node(self, n: torch.fx.Node) -> Any:
        gradients = self.gradients
        gradients.fresh.clear()
        gradients.written.clear()
        gradients.autocast = autocast.enabled()
        result = super().run_node(n)
        outs = tree_leaves(n.kwargs.get("out"))
        if not all(id(self.env[x]) in gradients.written for x in outs if isinstance(x, torch.fx.Node)):
            raise Unsupported(f"{n.target} changes what is given as out by other ways than an op")
        return result

    def _inner(self, body: torch.fx.GraphModule, operands: Sequence[Any]) -> Any:
        return _Interpreter(body, self.gradients, self.custom).run(*operands)

    def _flex_attention(
        self, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, _: Any, *operands: Any
    ) -> Any:
        """Autocast casts what is multiplied, and nothing inside."""
        dtype = autocast.enabled().get(query.device.type, query.dtype)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        *blocks, mask_mod = block_mask
        score, mask = (_Elements(body, self.gradients, self.custom).run for body in (score_mod, mask_mod))
        with torch.autocast(query.device.type, enabled=False):
            mask = None if says_nothing(mask_mod) else mask
            return flex_attention(query, key, value, score, mask, blocks, scale, *operands)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "detach_":  # of which dispatch modes are not told
            return self.gradients.detach_in_place(args[0])
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", "")
        if name in ("detach_", "detach_.default"):
            return self.gradients.detach_in_place(args[0])
        if name in ("dropout", "dropout.default") and not _drops(*args, **kwargs):
            return args[0]  # torch would trace a copy where eager mode has none
        if target is private("_set_grad_enabled"):
            self.gradients.recording = bool(args[0])
            return None
        if name == _CUSTOM_GRADIENT:
            if maybe_current_level():
                raise Unsupported("a torch.autograd.Function inside torch.vmap")
            body = derived(args[0], args[1], args[2:])
            if body is not None:
                return self._inner(body, with_context(body, args[2:]))
            made, results = CustomGradient.traced(target, args, kwargs)
            self.custom.append(made)
            return results
        if name == _WITH_MODE:  # (whether, body, *operands)
            before, self.gradients.recording = self.gradients.recording, bool(args[0])
            try:
                return self._inner(args[1], args[2:])
            finally:
                self.gradients.recording = before
        if name == "wrap_with_autocast":  # (device, dtype, enabled, cache_enabled, body, *operands)
            with torch.autocast(args[0], dtype=args[1], enabled=args[2], cache_enabled=args[3]):
                return self._inner(args[4], args[5:])
        if name == "flex_attention":
            return self._flex_attention(*args, **kwargs)
        if name == "tag_activation_checkpoint":  # (body, *operands): gradc chooses itself what backward keeps
            return self._inner(args[0], args[1:])
        return super().call_function(target, args, kwargs)


class _Elements(_Interpreter):
    """Runs a function of one element inside torch.vmap: tensors are indexed by values that are no numbers."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem and isinstance(args[0], torch.Tensor):
            index = args[1] if isinstance(args[1], tuple | list) else (args[1],)
            if all(isinstance(each, torch.Tensor) for each in index):
                return torch.ops.aten.index.Tensor(args[0], list(index))
        elif target is torch.where or getattr(operator, getattr(target, "__name__", ""), None) is target:
            args = tuple(_as_tensor(each, args) for each in args)
        return super().call_function(target, args, kwargs)


def _as_tensor(x: Any, beside: Sequence[Any]) -> Any:
    """A size that is not known, beside tensors, as one: torch.vmap would take it for the one that is there now."""
    devices = [each.device for each in beside if isinstance(each, torch.Tensor)]
    if not devices or not isinstance(x, torch.SymInt):
        return x
    return torch.scalar_tensor(x, dtype=torch.int64, device=devices[0])


class _ExplicitGradients(TorchDispatchMode):
    """Puts :data:`stop_gradient` where torch would not record, and refuses writes that have no functional form.

    :ivar recording: whether autograd would record now.
    :ivar recorded: whether it records anything of the program.
    :ivar libraries: whether cuDNN and oneDNN are enabled where the program is called.
    :ivar autocast: what is enabled now, which a dispatch mode finds switched off.
    :ivar constant: tensors that no gradient reaches, by identity.
    :ivar detached: views that pass no gradient on to what they view, which may have one.
    :ivar detached_constants: those of what has none.
    :ivar unwritable: tensors of which torch's functional form of a write is not what eager mode does.
    :ivar aliases: views, and what they are views of.
    :ivar viewed: by the identity of a view, the operands of the call that gave it.
    :ivar written: what the call that runs now has written to, itself or through views.
    :ivar drawn: copies of what random ops have drawn.
    :ivar fresh: what ops without operands have made in the call that runs now: torch's own functions detach it.
    """

    def __init__(self, arguments: Sequence[Any], recording: bool, recorded: bool, libraries: tuple[bool, bool]):
        super().__init__()
        self.recording, self.recorded, self.libraries = recording, recorded, libraries
        self.autocast: autocast.Dtypes = {}
        self.constant: dict[int, torch.Tensor] = {}
        self.detached: dict[int, torch.Tensor] = {}
        self.detached_constants: dict[int, torch.Tensor] = {}
        self.unwritable: dict[int, torch.Tensor] = {}
        self.aliases: dict[int, torch.Tensor] = {}
        self.viewed: dict[int, Sequence[torch.Tensor]] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.fresh: dict[int, torch.Tensor] = {}
        self.drawn: list[torch.Tensor] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                self._mark(self.aliases, argument)  # the caller has it, too
                if not argument.requires_grad:
                    self._mark(self.constant, argument)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass calls ops on its inner tensors
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        constant = function in _UNRECORDED or all(id(x) in self.constant or not _has_gradients(x) for x in tensors)
        if function is _detach and id(args[0]) in self.fresh:
            function = _alias
        if function is _detach or function is _view_as_dtype:
            return self._detached(*args)
        casts = autocast.casts_within(self.autocast, function, args, kwargs or {})
        with self:
            if casts is None:
                with autocast.enabling(self.autocast):
                    return composite_kernel(function, *args, **(kwargs or {}))
            if casts:
                args, kwargs = autocast.cast(casts, args, kwargs or {})
                return function(*args, **kwargs)
            decomposed = _decomposed(function, args, kwargs or {})
        if decomposed is not NotImplemented:
            return decomposed
        if overload_schema(function).is_mutable:
            calls = self._in_order(function, args, kwargs or {})
            for call in calls:
                with self:
                    function(**call)
            if calls:
                return None
            self._check_write(function, args, kwargs or {}, constant)
        overwritten = self._overwritten(function, args, kwargs or {})
        with self._enabled(function):
            result = self._restrided(function, args, kwargs or {})
            if result is None:
                result = function(*args, **(kwargs or {}))
        for x, before in overwritten:
            never = torch.ops.aten.zeros.default((), dtype=torch.bool, device=x.device)
            torch.ops.aten.copy_.default(x, torch.ops.aten.where.self(never, before, x))
        if draws(function):
            self.drawn.append(tree_leaves(result)[-1].clone())
        if overload_schema(function).is_mutable:
            self._written(function, args, kwargs or {}, constant)
            return result
        view = function is _unsafe_view or any(r.alias_info is not None for r in overload_schema(function).returns)
        if view:
            self._mark_view(function, tensors, result)
        if not tensors:
            self._mark(self.fresh, result)
        if function in _UNTRACKED_VIEWS:
            self._mark(self.unwritable, (tensors, result))
        if constant:
            self._mark(self.constant, result)
        elif not self.recording:
            return tree_map_only(torch.Tensor, self._detached if view else self._stopped, result)
        return result

    @contextlib.contextmanager
    def _enabled(self, function: Any) -> Iterator[None]:
        """The caller's libraries for a convolution, which gives images in the memory order that its library has; what
        else they have kernels for is traced without them, as ATen's own ops.
        """
        if function is not torch.ops.aten.convolution.default:
            yield
            return
        before = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
        torch.backends.cudnn.set_flags(self.libraries[0])
        torch.backends.mkldnn.set_flags(self.libraries[1])
        try:
            yield
        finally:
            torch.backends.cudnn.set_flags(before[0])
            torch.backends.mkldnn.set_flags(before[1])

    def detach_in_place(self, x: torch.Tensor) -> torch.Tensor:
        """What ``x.detach_()`` means: x has no gradient from here on; what was computed from it keeps its own.

        :raises Unsupported: another tensor shares its memory, and keeps the gradient.
        """
        if _has_gradients(x) and id(x) not in self.constant:
            if id(x) in self.aliases:
                raise Unsupported("detach_() of a value that another tensor shares memory with")
            stopped = self._stopped(x)
            self._mark(self.constant, x)
            torch.ops.aten.copy_.default(x, stopped)
        return x

    def _check_write(self, function: Any, args: Any, kwargs: Any, constant: bool) -> None:
        """:raises Unsupported: a write in place has no functional form, or one that torch has wrong."""
        arguments = overload_schema(function).arguments
        places = {a.is_out for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        if len(places) > 1:
            raise Unsupported(f"{function} writes to its operands and to what is given as out: torch mixes them up")
        for x in _written(function, args, kwargs):
            if id(x) in self.unwritable:
                raise Unsupported(f"{function} writes through a view that torch does not write back from")
            if id(x) in self.detached or (id(x) in self.detached_constants and not constant):
                raise Unsupported(f"{function} writes through a view that detach() or no_grad cut off")
            if function in _GRADIENT_KEPT and _has_gradients(x) and id(x) not in self.constant:
                raise Unsupported(f"{function} leaves the gradient of what it overwrites as it was")
            if not (constant or self.recording or id(x) in self.constant):
                raise Unsupported(f"{function} writes under no_grad to a value that may have a gradient")

    def _overwritten(self, function: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a write puts over, whole, what no gradient reaches, with copies of what was there: in eager mode that
        has a gradient still, which is 0, and so has what is computed from it; of the functional form nothing would
        require one.
        """
        if not (self.recording and self.recorded) or function not in _OVERWRITING:
            return []
        written = _written(function, args, kwargs)
        if function in _WRITING_GRADIENTS:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and _has_gradients(x)]
            if not {id(x) for x in given} <= self.constant.keys() | {id(x) for x in written}:
                return []
        return [
            (x, x.clone()) for x in written if _has_gradients(x) and id(x) not in self.constant and self._is_whole(x)
        ]

    def _restrided(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The result of a write in place whose functional form may have other strides than the tensor that is written:
        a copy of it is written and copied back, which keeps them.  None where the form is right as it is.
        """
        written = _written(function, args, kwargs)
        if len(written) != 1 or not (isinstance(args[0], torch.Tensor) and written[0] is args[0]):
            return None
        if function in _KEEPING_STRIDES or not _TAGS_KEEPING_STRIDES.isdisjoint(function.tags):
            return None
        x: torch.Tensor = args[0]
        if all(_in_order_of_axes(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)):
            return None
        made = x.clone()  # of the same strides
        function(made, *args[1:], **kwargs)
        return torch.ops.aten.copy_.default(x, made)  # type: ignore[no-any-return]

    def _is_whole(self, x: torch.Tensor) -> bool:
        """Whether a tensor has as many elements as what it is a view of: of a part the rest has the gradient."""
        base = x
        while viewed := self.viewed.get(id(base)):
            base = viewed[0]
        sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (x.numel(), base.numel())]
        return bool(sizes[0] == sizes[1])

    def _in_order(self, function: Any, args: Any, kwargs: Any) -> list[dict[str, Any]]:
        """The calls that one over lists is, one after another, where one writes to memory that another has; else empty,
        as torch's functional form reads all of it before anything is written.
        """
        calls = foreach.one_by_one(function, args, kwargs)
        having: dict[int, set[int]] = {}
        for i, call in enumerate(calls):
            for x in tree_leaves(call):
                if isinstance(x, torch.Tensor):
                    for each in self._viewed_by(x):
                        having.setdefault(each, set()).add(i)
        written = (each for x in _written(function, args, kwargs) for each in self._viewed_by(x))
        return calls if any(len(having.get(each, ())) > 1 for each in written) else []

    def _viewed_by(self, x: torch.Tensor) -> set[int]:
        """The identities of a tensor, and of what it is a view of."""
        found, pending = set[int](), [x]
        while pending:
            found.add(id(pending[-1]))
            pending += self.viewed.get(id(pending.pop()), ())
        return found

    def _written(self, function: Any, args: Any, kwargs: Any, constant: bool) -> None:
        """What a write in place that has happened means for gradients."""
        for x in _written(function, args, kwargs):
            pending = [x]
            while pending:
                self._mark(self.written, pending[-1])
                pending += self.viewed.get(id(pending.pop()), ())
            if function is torch.ops.aten.as_strided_.default:
                self._mark(self.unwritable, x)
            if constant:
                continue
            if self.recording:
                memory = self._viewed_by(x)  # x has a gradient now, and so may what shares its memory
                self.constant = {
                    i: y
                    for i, y in self.constant.items()
                    if i not in memory and (i not in self.viewed or memory.isdisjoint(self._viewed_by(y)))
                }
            else:
                torch.ops.aten.copy_.default(x, self._stopped(x))

    def _detached(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A view of the same memory that passes no gradient on."""
        view: torch.Tensor = _view_as_dtype(x, dtype or x.dtype)
        self._mark_view(_view_as_dtype, [x], view)
        self._mark(self.detached if _has_gradients(x) and id(x) not in self.constant else self.detached_constants, view)
        self._mark(self.constant, view)
        return view

    def _stopped(self, x: torch.Tensor) -> torch.Tensor:
        stopped = stop_gradient(x) if _has_gradients(x) else x
        self._mark(self.constant, stopped)
        return stopped

    def _mark_view(self, function: Any, viewed: Sequence[torch.Tensor], result: Any) -> None:
        """Pass on what is known of a tensor to its views."""
        self._mark(self.aliases, (viewed, result))
        self.viewed.update((id(y), viewed) for y in tree_leaves(result))
        for marked in (self.detached, self.detached_constants):
            if any(id(x) in marked for x in viewed):
                self._mark(marked, result)
        if function in _NOT_WRITTEN_BACK or any(id(x) in self.unwritable for x in viewed):
            self._mark(self.unwritable, result)
        elif function is torch.ops.aten.expand.default:
            repeats = any(isinstance(step, int) and step == 0 for step in result.stride())
            self._mark(self.unwritable, result if repeats else ())

    @staticmethod
    def _mark(marked: dict[int, torch.Tensor], result: Any) -> None:
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                marked[id(x)] = x


_NOT_WRITTEN_BACK = (torch.ops.aten.unfold.default, torch.ops.aten.as_strided.default)
"""Views whose elements need not be those of the tensor, each once: torch's functional form of a write through one adds
up what lies in several places, and zeroes what lies in none.
"""


_GRADIENT_KEPT = tuple(
    getattr(torch.ops.aten, f"logical_{name}_").default for name in ("not", "and", "or", "xor")
)  # autograd takes no note of them


_UNRECORDED = frozenset(
    [
        torch.ops.aten.lift_fresh.default,  # what a number in the program becomes: torch.tensor(2.0), y[:] = 1
        *(getattr(torch.ops.aten, f"{name}_like").default for name in ("zeros", "ones", "full", "empty")),
        *(getattr(torch.ops.aten, f"{name}_like").default for name in ("rand", "randn", "randint")),
        torch.ops.aten.randint_like.low_dtype,
        *(getattr(torch.ops.aten, f"new_{name}").default for name in ("zeros", "ones", "full", "empty")),
        torch.ops.aten.new_empty_strided.default,
    ]
)
"""What makes values to which no gradient comes, whatever they are like."""

_WRITING_GRADIENTS = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor)
"""Writes that pass a gradient on to what they put there."""

_OVERWRITING = frozenset(
    [
        *_WRITING_GRADIENTS,
        *(torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default),
        *(
            getattr(getattr(torch.ops.aten, f"{name}_"), kind)
            for name in ("eq", "ne", "lt", "le", "gt", "ge")
            for kind in ("Scalar", "Tensor")
        ),
    ]
)
"""Writes of which no gradient need come back to what they write to."""


_UNTRACKED_VIEWS = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
"""What shares memory without being a view: for autograd a write to one is none to the other."""


_KEEPING_STRIDES = frozenset([torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar])
_TAGS_KEEPING_STRIDES = {torch.Tag.pointwise, torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
"""Writes whose functional form has the strides of what they write, and those that change them in eager mode, too."""


def _in_order_of_axes(x: torch.Tensor) -> bool:
    """Whether no axis of a tensor has a larger stride than one before it."""
    steps = [typical(step) for step in x.stride()] if x.layout is torch.strided else []
    return steps == sorted(steps, reverse=True)


def _drops(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **named: Any) -> bool:
    """Whether these arguments of a dropout let it change anything."""
    return bool(named.get("train", training) and p)


def _has_gradients(x: torch.Tensor) -> bool:
    """Whether a tensor is of a dtype that autograd records."""
    return x.is_floating_point() or x.is_complex()


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The operands that an overload writes in place."""
    return tree_leaves(
        [
            kwargs.get(a.name, args[i] if i < len(args) else None)
            for i, a in enumerate(overload_schema(function).arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
    )


def _decomposed(function: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives by the ops that it is made of; NotImplemented where it is kept whole.

    Of what is kept a schema that names no alias means that there is none.
    """
    if function is torch.ops.aten.size.default:  # of which TorchScript alone has a kernel
        return args[0].shape
    made: Any = function.decompose(*args, **kwargs)
    if made is NotImplemented and function is torch.ops.aten.einsum.default and len(args[1]) == 1:
        made = composite_kernel(function, *args, **kwargs)  # may be a view
    return made
