"""``torch.compile(model, backend="gradc")``: Dynamo's graph as regions of gradc and a rest that torch runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import GradcError, InvalidProblem, Unsupported
from ..ir.graph import Graph, name_of
from ..module.options import NAMES as COMPILE_OPTIONS
from ..passes.graph.layouts import apply_layout
from ..runtime.torch_private import private
from .borders import in_memory_order
from .coverage import Compiled, listing, record
from .cuda_graphs import Captures, WithGraphs
from .custom_gradients import custom_gradient, run_by_torch
from .draws import draw_first
from .function import Function
from .importer import graph_of, refusal, tensors_of
from .normal_form import (
    NormalForm,
    enables_gradients,
    inner_tensors,
    is_batching,
    mode_left,
    normal_form,
    stop_gradient,
    stops_gradient,
    transformed,
    transforming,
    tree_leaves,
)
from .one_region import OneRegion
from .regions import (
    Plan,
    computes,
    is_sized,
    is_view,
    losses_apart,
    ordered_calls,
    plan,
    sparse_tables,
    viewed,
    without,
)
from .sizes import size_of
from .table import is_kept
from .timing import Time

_without_autocast = private("_DisableAutocast")

SMALLEST = 3
_OWN_OPTIONS = ("cuda_graphs", "fallback", "random", "smallest_region", "take", "target", "timed")
_MODES = (None, "default", "reduce-overhead")


@dataclass(frozen=True)
class _Options:
    fallback: str
    smallest: int
    take: str
    random: str
    target: str | None
    timed: bool
    cuda_graphs: bool
    compile: Mapping[str, Any]


def backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None
) -> Callable[..., Any]:
    """Dynamo's backend ``"gradc"``; what it took and what not, :func:`gradc.torch.report` says.

    :param options: of torch.compile: ``fallback`` (``"torch"``, or ``"error"``: what gradc does not take is an error
        that lists it), ``smallest_region`` (ops that a region has at least, 3; a graph that gradc takes whole is one
        region of any size), ``take`` (``"faster"``, or ``"all"``: gradc runs what :mod:`.preference` leaves to torch on
        CUDA, too), ``random`` (``"torch"``: the numbers of eager mode; ``"gradc"``: masks of dropouts are computed
        where they are read, from a key that torch draws once a call), ``target``, ``timed`` (True:
        :func:`gradc.torch.report` tells the time of each region and op), ``cuda_graphs`` (True, as the mode
        ``"reduce-overhead"``: calls on a GPU are captured and replayed), and the options of :func:`gradc.compile`.
    :raises Unsupported: with ``fallback="error"``, what gradc does not take, all of it.
    :raises InvalidProblem: an option or a mode that there is not.
    """
    chosen = _checked(mode, options)
    name = _graph_name(gm)
    try:
        _refuse_transforms(gm)
        _refuse_wrapped_gradients(example_inputs)
        # Dynamo compiles for the caller's mode; a graph that enables gradients itself is always run with them enabled
        own_mode = enables_gradients(gm) and not torch.is_grad_enabled()
        recorded = own_mode or torch.is_grad_enabled()
        with torch.set_grad_enabled(recorded):
            form = normal_form(gm, example_inputs, is_kept, recording=not own_mode, recorded=recorded)
        _refuse_wrong_gradients(form)
    except Exception as error:  # whatever tracing meets: control flow, custom gradients, ops without a functional form
        reason = _first_line(error)
        if chosen.fallback == "error":
            raise Unsupported(f"{name} has no normal form: {reason}") from error
        record(Compiled(name, _count_calls(gm.graph), (), (), reason))
        return gm.forward
    program = _Program(gm, example_inputs, form, name, chosen, recorded)
    run = program.with_graphs() if chosen.cuda_graphs else program
    run = torch.enable_grad()(run) if own_mode else run
    mode = mode_left(gm)
    # Dynamo has the graph set the mode of its caller again, or the one that the function leaves behind
    return run if mode in (None, torch.is_grad_enabled()) else _leaving(run, mode)


def _leaving(program: Callable[..., Any], mode: bool) -> Callable[..., Any]:
    """The program, after which gradients are enabled or not."""

    def run(*arguments: Any) -> Any:
        results = program(*arguments)
        torch.set_grad_enabled(mode)
        return results

    return run


def _refuse_transforms(gm: torch.fx.GraphModule) -> None:
    """:raises Unsupported: torch.func's transforms that differentiate, whose levels Dynamo writes into the graph:
    functionalising calls them without the gradients that they take.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            where = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
            if is_batching(node.target):  # its levels are gone once the graph is traced
                continue
            if node.op == "call_function" and any(
                word in where for word in ("functorch", "forward_ad", "autograd.grad")
            ):
                raise Unsupported(f"torch.func's {getattr(node.target, '__name__', node.target)} inside the graph")


def _refuse_wrapped_gradients(arguments: Sequence[Any]) -> None:
    """:raises Unsupported: an argument of several tensors that requires grad, whose gradient is such a one again."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.requires_grad and len(inner_tensors(x)) > 1:
            raise Unsupported(f"the gradient of a {type(x).__name__}")


def _refuse_wrong_gradients(form: NormalForm) -> None:
    """:raises Unsupported: the functional form of a write through strides, of which torch's own gradient is wrong."""
    for node in form.module.graph.nodes:
        if node.target is torch.ops.aten.as_strided_scatter.default:
            raise Unsupported("a write through as_strided")


def _checked(mode: Any, options: Any) -> _Options:
    given = dict(options or {})
    if mode not in _MODES:
        raise InvalidProblem(f"mode={mode!r}: the backend gradc has the modes 'default' and 'reduce-overhead'")
    unknown = given.keys() - set(_OWN_OPTIONS) - set(COMPILE_OPTIONS)
    if unknown:
        raise InvalidProblem(
            f"the backend gradc has no option {min(map(str, unknown))!r}; it has"
            f" {', '.join(_OWN_OPTIONS)} and those of gradc.compile: {', '.join(COMPILE_OPTIONS)}"
        )
    fallback, smallest = given.pop("fallback", "torch"), given.pop("smallest_region", SMALLEST)
    if fallback not in ("torch", "error"):
        raise InvalidProblem(f"fallback={fallback!r}: 'torch' or 'error'")
    if not isinstance(smallest, int) or smallest < 1:
        raise InvalidProblem(f"smallest_region={smallest!r}: a number of ops from 1")
    take = given.pop("take", "faster")
    if take not in ("faster", "all"):
        raise InvalidProblem(f"take={take!r}: 'faster' or 'all'")
    random = given.pop("random", "torch")
    if random not in ("torch", "gradc"):
        raise InvalidProblem(f"random={random!r}: 'torch' or 'gradc'")
    timed = given.pop("timed", False)
    cuda_graphs = given.pop("cuda_graphs", mode == "reduce-overhead")
    for name, value in (("timed", timed), ("cuda_graphs", cuda_graphs)):
        if not isinstance(value, bool):
            raise InvalidProblem(f"{name}={value!r}: True or False")
    if timed and cuda_graphs:
        raise InvalidProblem("timed=True and cuda_graphs=True: a replay has no steps to measure")
    return _Options(fallback, smallest, take, random, given.pop("target", None), timed, cuda_graphs, given)


def _first_line(error: BaseException) -> str:
    """What an error of torch's tracing was caused by."""
    while not isinstance(error, GradcError) and error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, GradcError) else f"{type(error).__name__}: {text}"


def _graph_name(gm: torch.fx.GraphModule) -> str:
    name = getattr(gm, "__compiled_fn_name__", "") or type(gm).__name__
    return re.sub(r"\W", "_", name) or "graph"


def _count_calls(graph: torch.fx.Graph) -> int:
    return sum(n.op in ("call_function", "call_method", "call_module") for n in graph.nodes)


class _Program:
    """A graph of Dynamo's, compiled: called with its inputs in order, it gives its outputs.

    :param recording: whether autograd records its calls.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        form: NormalForm,
        name: str,
        options: _Options,
        recording: bool,
    ):
        self.source, self.form, self.options, self.name = gm, form, options, name
        graph = form.module.graph
        draw_first(graph, options.random, options.take == "all")
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.lifted = [_attribute(gm, path) for path in form.lifted]
        given = [*self.lifted, *_flat(example_inputs)]
        self.names = _names(gm, example_inputs, placeholders, form.lifted)
        self.leaves = {
            node
            for node, x in zip(placeholders, given, strict=True)
            if recording and isinstance(x, torch.Tensor) and x.requires_grad
        }
        self.mutated = [i for i, n in enumerate(placeholders) if n.name in form.mutated]
        self.numbers = [i for i, n in enumerate(placeholders) if isinstance(n.meta.get("val"), torch.SymInt)]
        # by Dynamo: a shape, strides, a dtype and a device; but of what an optimizer reads it guards none of these
        self.guarded: set[torch.fx.Node] = set()
        if not form.wraps and not form.mutated:
            self.guarded.update(placeholders[len(self.lifted) :])
        calibration = options.compile.get("calibration")
        first = plan(graph, options.smallest, options.take, [*self.leaves], calibration)
        found = in_memory_order(graph, first, form.mutated)
        functions, found = self._functions(graph, found)
        refused = tuple(found.refused.values())
        if options.fallback == "error" and not all(each.by_choice for each in refused):
            raise Unsupported(listing(name, refused))
        regions = [sum(map(computes, nodes)) for nodes in found.regions.values()]
        self.run, steps = _assembled(form, found, functions)
        self.one_region = None if options.timed or form.wraps else _one_region(form, found, functions)
        self.reads_first = not any(_base(n).op == "placeholder" for n in _written(form))
        times = {step.name: step.timed() for step in steps if step.title} if options.timed else {}
        on_gpu = any(v.device.type == "cuda" for n in graph.nodes for v in tensors_of(n))
        self.captures = Captures(reason=_uncapturable(graph)) if options.cuda_graphs and on_gpu else None
        ops = sum(map(computes, graph.nodes))
        record(Compiled(name, ops, tuple(regions), refused, times=times, captures=self.captures))

    def with_graphs(self) -> Callable[..., Any]:
        """The program, whose calls on a GPU are captured and replayed where they can be."""
        if self.captures is None or self.captures.reason or self.form.wraps:
            return self
        lifted = len(self.lifted)
        return WithGraphs(self, [i - lifted for i in self.mutated if i >= lifted], self.captures)

    def _functions(self, graph: torch.fx.Graph, found: Plan) -> tuple[dict[int, list[_Region]], Plan]:
        """The regions' functions; a region with one whose gradient does not exist is left to torch."""
        while True:
            functions: dict[int, list[_Region]] = {}
            for number, nodes in found.regions.items():
                try:
                    functions[number] = [
                        self._function(graph, number, part, found)
                        for part in losses_apart(graph, nodes, self.leaves)
                        if _read_outside(part)
                    ]
                except GradcError as error:
                    found = without(found, graph, nodes, str(error).splitlines()[0])
                    break
            else:
                return functions, found

    def _function(self, graph: torch.fx.Graph, number: int, nodes: Sequence[torch.fx.Node], found: Plan) -> _Region:
        inside = set(nodes)
        inputs: dict[torch.fx.Node, str] = {}
        for node in nodes:
            for operand in node.all_input_nodes:
                if operand not in inside and operand not in inputs and isinstance(operand.meta["val"], torch.Tensor):
                    named = viewed(operand)
                    name = self.names.get(named, operand.name)
                    inputs[operand] = name_of(name, lambda n: n in inputs.values())
        outputs = _read_outside(nodes)
        taken = {*inputs.values()}
        results = {n: name_of(f"y{i}" if len(outputs) > 1 else "y", taken.__contains__) for i, n in enumerate(outputs)}
        made, refused = graph_of(nodes, inputs, [(name, n) for n, name in results.items()], f"region{number}")
        if refused:
            raise Unsupported(str(refused[0]))
        orders = {name: found.orders[n] for n, name in results.items() if n in found.orders}
        made = apply_layout(made, layout=orders)
        sparse = [inputs[table] for table in sparse_tables(nodes, inputs)]
        rows = {n: name for n, name in results.items() if name not in orders}
        in_place = (
            {} if any(n.attrs.get("oob") == "error" for n in made.nodes) else self._in_place(inputs, rows, inside)
        )
        dims = _dims(graph, made)
        guarded = (
            {name for node, name in inputs.items() if node in self.guarded} if dims.keys() == set(made.dims) else ()
        )
        function = Function(
            made, self.options.target, self.options.compile, sparse, found.devices[number], in_place, orders, guarded
        )
        wanted = tuple(name for node, name in inputs.items() if node.meta["val"].is_floating_point())
        function.wrt(wanted)  # raises NotDifferentiable here, where torch can still take the region
        function.forget()
        detached = {n for n in inputs if all(stops_gradient(u) for u in n.users if u in inside)}
        return _Region(function, tuple(inputs), tuple(outputs), dims, frozenset(detached))

    def _in_place(
        self,
        inputs: Mapping[torch.fx.Node, str],
        outputs: Mapping[torch.fx.Node, str],
        inside: Collection[torch.fx.Node],
    ) -> dict[str, str]:
        """The outputs of a region that are new values of inputs that nothing else reads, each with that input."""
        written = _written(self.form)
        return {
            name: inputs[written[n]]
            for n, name in outputs.items()
            if written.get(n) in inputs and all(user in inside for user in written[n].users)
        }

    def __call__(self, *arguments: Any) -> Any:
        given = [*self.lifted, *(_flat(arguments) if self.form.wraps else arguments)]
        if self.one_region is not None:
            done = self.one_region(given)
            if done is not None:
                return done
        if transforming() and transformed(x for x in given if isinstance(x, torch.Tensor)):
            return self.source(*arguments)
        if self.mutated and _overlap(given, frozenset(self.mutated)):  # which they did not when this was traced
            return self.source(*arguments)
        if any(given[i] < 0 for i in self.numbers):  # an integer of Python's, which is a symbol: no dim is negative
            return self.source(*arguments)
        recording = (
            bool(self.mutated)
            and torch.is_grad_enabled()
            and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        )
        pairs = list(given)
        for i in self.mutated:  # what is kept for backward stays as it was
            pairs[i] = (given[i], given[i] if self.reads_first and not recording else _copy(given[i]))
        with _without_autocast():  # its casts are calls of the normal form
            results = self.run(pairs)
        if self.one_region is not None:
            self.one_region.remember(given)
        return results


def _uncapturable(graph: torch.fx.Graph) -> str:
    """What of a program no CUDA graph repeats; "" where there is nothing."""
    for node in graph.nodes:
        if "effect" in node.meta:
            return f"{node.target} has an effect on the host"
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if seeded and any(v.device.type == "cpu" for v in tensors_of(node)):
            return f"{node.target} draws its numbers on the CPU"
    return ""


def _flat(arguments: Sequence[Any]) -> list[Any]:
    return [x for argument in arguments for _, x in inner_tensors(argument)]


def _overlap(given: Sequence[Any], written: Collection[int]) -> bool:
    """Whether an input that is written may share memory with another one."""
    spans = []
    for i, x in enumerate(given):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel():
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize, i in written))
    end = end_of_written = 0
    for start, stop, is_written in sorted(spans):
        if start < (end if is_written else end_of_written):
            return True
        end, end_of_written = max(end, stop), max(end_of_written, stop if is_written else 0)
    return False


@dataclass(frozen=True)
class _Region:
    """The function of a region, or of a part of it.

    :param dims: for each symbol of its graph that the program's inputs tell, the node that is its value.
    :param detached: the inputs that it only reads detached: autograd would free, with it, what they were computed from.
    """

    function: Function
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    dims: Mapping[str, tuple[torch.fx.Node, int | None]]
    detached: frozenset[torch.fx.Node]


def _read_outside(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The tensors of a region that something after it reads.

    There may be none: a tracer drops calls that nothing reads, but not what only a check of a dtype has read, or a
    random op for its shape.
    """
    inside = set(nodes)
    return [n for n in nodes if isinstance(n.meta["val"], torch.Tensor) and any(user not in inside for user in n.users)]


def _dims(graph: torch.fx.Graph, made: Graph) -> dict[str, tuple[torch.fx.Node, int | None]]:
    """Where the value of each dim is found: an input that is a size, or an axis of one that is a tensor."""
    found: dict[str, tuple[torch.fx.Node, int | None]] = {}
    for node in graph.nodes:
        if node.op != "placeholder" or not is_sized(node):
            continue
        value = node.meta["val"]
        for axis, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]:
            name = str(size_of(size)) if isinstance(size, torch.SymInt) else ""
            if name in made.dims and (name not in found or axis is None):
                found[name] = (node, axis)
    return found


def _attribute(module: Any, path: str) -> Any:
    for word in path.split("."):
        module = getattr(module, word)
    return module


def _names(
    gm: torch.fx.GraphModule,
    arguments: Sequence[Any],
    placeholders: Sequence[torch.fx.Node],
    lifted: Sequence[str],
) -> dict[torch.fx.Node, str]:
    """What the user calls each input: the path of a parameter, or the name of an argument."""
    own = [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]
    theirs = [
        f"{name}.{path}" if path else name
        for name, x in zip(own, arguments, strict=True)
        for path, _ in inner_tensors(x)
    ]
    names = {}
    for node, target in zip(placeholders, [*lifted, *theirs], strict=True):
        path = re.sub(r"_(modules|parameters|buffers)_", ".", re.sub(r"^[lL]_(self|\w{1,3})_(?=modules_)", "_", target))
        path = re.sub(r"^[lL]_", "", path).strip("._")
        names[node] = re.sub(r"_*\._*", ".", path) or node.name
    return names


# -- running -----------------------------------------------------------------------------------------------------------

Values = dict[Any, Any]
Regions = Mapping[int, Sequence[_Region]]


@dataclass
class _Step:
    """One thing that a program does.

    :param run: reads and writes values by the nodes that they are of.
    :param reads: the nodes whose values it needs.
    :param makes: the nodes whose values it computes.
    :param name: of what it runs, in the graph, and ``title`` in reports: a region or a call; "" of anything else.
    :param done: the nodes that nothing needs after it.
    """

    run: Callable[[Values], None]
    reads: tuple[torch.fx.Node, ...]
    makes: tuple[torch.fx.Node, ...] = ()
    name: str = ""
    title: str = ""
    done: tuple[torch.fx.Node, ...] = ()

    def timed(self) -> Time:
        """Have the step measured from now on; gives where its time is added up."""
        time, run = Time(self.title), self.run

        def measured(values: Values) -> None:
            def results() -> list[Any]:
                run(values)
                return tree_leaves([values[node] for node in self.makes])

            time.measured(results, tree_leaves([values[node] for node in self.reads]))

        self.run = measured
        return time


def _assembled(
    form: NormalForm, found: Plan, functions: Regions
) -> tuple[Callable[[list[Any]], list[Any]], list[_Step]]:
    """The program as a function of its inputs, and its steps: regions and torch's calls in order.

    An input that is written in place is given as a pair: itself, and a copy to read from.
    """
    graph = form.module.graph
    calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
    results = list(graph.output_node().args[0])
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    written = _written(form)
    steps = [_constant(n, _attribute(form.module, str(n.target))) for n in calls if n.op == "get_attr"]
    for level, node in ordered_calls(found, calls):
        if node is None:
            steps += [_calling(region, level, part) for part, region in enumerate(functions[level])]
        elif node.op != "get_attr":
            steps.append(_running(node))
    steps += [_writing(node, placeholder) for node, placeholder in written.items()]
    # views of what was written lie in the input's own memory
    steps += [_running(node) for node in _views_of(written, calls, found)]
    returned, targets = results[len(form.mutated) :], [n for n in placeholders if n.name in form.mutated]
    _release(steps, returned)

    def run(given: list[Any]) -> list[Any]:
        values: Values = dict(zip(placeholders, given, strict=True))
        for node in targets:
            values["written", node], values[node] = values[node]
        for step in steps:
            step.run(values)
            for node in step.done:
                del values[node]
        return [values[r] if isinstance(r, torch.fx.Node) else r for r in returned]

    return run, steps


def _one_region(form: NormalForm, found: Plan, functions: Regions) -> OneRegion | None:
    """A program as one region without symbols, if it is that."""
    graph = form.module.graph
    calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
    regions = [region for level, node in ordered_calls(found, calls) if node is None for region in functions[level]]
    if len(regions) != 1 or regions[0].dims or any(n in found.levels or n.op == "get_attr" for n in calls):
        return None
    (region,), written = regions, _written(form)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    returned = list(graph.output_node().args[0])[len(form.mutated) :]
    return OneRegion.of(placeholders, region.inputs, region.outputs, region.function, written, returned)


def _written(form: NormalForm) -> dict[torch.fx.Node, torch.fx.Node]:
    """The new value of each placeholder that is written in place, with that placeholder."""
    by_name = {n.name: n for n in form.module.graph.nodes if n.op == "placeholder"}
    results = form.module.graph.output_node().args[0]
    return dict(zip(results[: len(form.mutated)], (by_name[name] for name in form.mutated), strict=True))  # type: ignore[index, arg-type]


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a call is a view of; of no view, itself."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _release(steps: Sequence[_Step], returned: Sequence[Any]) -> None:
    """Let each step drop what it is the last to read, and of what it makes what nothing reads."""
    seen = {r for r in returned if isinstance(r, torch.fx.Node)}
    for step in reversed(steps):
        last = dict.fromkeys(n for n in (*step.reads, *step.makes) if n not in seen)
        step.done = tuple(last)
        seen.update(last)


def _views_of(
    written: Mapping[torch.fx.Node, torch.fx.Node], calls: Sequence[torch.fx.Node], found: Plan
) -> list[torch.fx.Node]:
    """The views that torch takes of what is written."""
    again: dict[torch.fx.Node, None] = {}
    for node in calls:
        if node in found.levels and is_view(node) and any(o in written or o in again for o in node.all_input_nodes):
            again[node] = None
    return list(again)


def _writing(node: torch.fx.Node, placeholder: torch.fx.Node) -> _Step:
    def write(values: Values) -> None:
        target, value = values["written", placeholder], values[node]
        if target.shape != value.shape:  # what the first call of an observer does to its buffers
            target.resize_(value.shape)
        there = value.data_ptr() == target.data_ptr() and value.stride() == target.stride()  # a region wrote it there
        values[node] = target if there else target.copy_(value)

    return _Step(write, (node,))


def _constant(node: torch.fx.Node, value: Any) -> _Step:
    def take(values: Values) -> None:
        values[node] = value

    return _Step(take, ())


def _calling(region: _Region, number: int, part: int) -> _Step:
    function, inputs, outputs, dims = region.function, region.inputs, region.outputs, region.dims
    detached = [i for i, node in enumerate(inputs) if node in region.detached]
    # What an op makes is not always of the dtype that torch's own tracing said.
    computed = [(i, node.meta["val"].dtype) for i, node in enumerate(inputs) if node.op == "call_function"]

    def call(values: Values) -> None:
        sizes = {
            name: int(values[node]) if axis is None else values[node].shape[axis] for name, (node, axis) in dims.items()
        }
        given = [values[n] for n in inputs]
        for i, dtype in computed:
            if given[i].dtype is not dtype:
                given[i] = given[i].to(dtype)
        for i in detached:
            given[i] = given[i].detach()
        values.update(zip(outputs, function(sizes, *given), strict=True))

    name = f"region {number}{f', part {part + 1}' if part else ''}"
    return _Step(call, (*inputs, *(node for node, _ in dims.values())), outputs, name, name)


def _copied(value: torch.Tensor, source: torch.Tensor, _: bool = False) -> torch.Tensor:
    return source.to(value.dtype).expand_as(value).clone()


def _in_place(overload: Any) -> Callable[..., Any]:
    """The functional form of an overload that writes in place, with the gradient that eager mode has."""

    def functional(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return overload(_copy(x), *args, **kwargs)

    return functional


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides, also where there are gaps between elements: on them depends what is drawn."""
    if torch.ops.aten.is_non_overlapping_and_dense(x) or 0 in x.stride():
        return x.clone()
    return x.new_empty_strided(x.size(), x.stride()).copy_(x)


def _rrelu(x: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    noise = noise.clone()
    return torch.ops.aten.rrelu_with_noise.default(x, noise, *args, **kwargs), noise


IN_EAGER: dict[Any, Any] = {
    stop_gradient: torch.ops.aten.detach.default,
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.normal_functional.default: _in_place(torch.ops.aten.normal_.default),
    torch.ops.aten.bernoulli.p: _in_place(torch.ops.aten.bernoulli_.float),
    torch.ops.aten.rrelu_with_noise_functional.default: _rrelu,
    custom_gradient: run_by_torch,
}
"""Ops of the normal form that torch does not run, or has no right derivative of, and what it runs for them."""


def _running(node: torch.fx.Node) -> _Step:
    target: Any = IN_EAGER.get(node.target, node.target)
    args, kwargs, lookup = node.args, node.kwargs, torch.fx.node.map_arg

    def call(values: Values) -> None:
        values[node] = target(*lookup(args, values.__getitem__), **lookup(kwargs, values.__getitem__))

    return _Step(call, tuple(node.all_input_nodes), (node,), node.name, refusal(node, "").op)
