"""``gradc.from_torch``: a torch module, or an exported program, as a gradc Graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from .. import ops
from ..errors import GradcError, InvalidProblem, Unsupported
from ..ir.dims import Dim
from ..ir.graph import Graph, name_of
from ..ir.node import Node
from ..ir.types import I64
from ..runtime.torch_private import private
from .coverage import listing
from .importer import graph_of
from .normal_form import inner_tensors, normal_form, tree_leaves, tree_map_only
from .sizes import called, size_of, type_of
from .table import is_kept


def from_torch(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    name: str = "",
) -> Graph:
    """A torch module, or an exported program, as a graph.

    Its inputs are the parameters and buffers by their paths (``layers.0.weight``; of tied ones the first), then the
    tensors among the arguments by their names (``x``, and ``x_key`` and ``x_0`` of what a dict or a tuple holds); an
    argument with the path of a parameter gets a number behind.  Its outputs are the results (``y``; of several ``y0``,
    ``y1``, or the keys of a dict), then the new values of buffers that the module changes, by their paths; a Python
    number among the results is a constant, of i64, bool or torch's default dtype, and a size that varies is an i64.  A
    module is exported in the mode, training or evaluation, that it is in.  Dims are called as the ``torch.export.Dim``
    of their axis.

    :param args: example arguments, as ``torch.export.export`` takes them; a tensor alone stands for ``(tensor,)``.
    :param dynamic_shapes: of ``torch.export.export``; ``torch.export.Dim.AUTO`` lets torch find out which sizes vary.
    :param name: of the graph; the class of the module if not given.
    :raises Unsupported: ops that gradc does not take, all of them, each with its module's path; random ops are among
        them, so export a model with dropout in evaluation mode.
    :raises InvalidProblem: what cannot be exported, with torch's reason.
    """
    args, kwargs = _each_its_own(model, args, kwargs)
    program = _exported(model, args, kwargs, dynamic_shapes)
    names = _dim_names(program, model, args, kwargs or {}, dynamic_shapes) if dynamic_shapes else {}
    title = name or (type(model).__name__ if isinstance(model, torch.nn.Module) else "graph")
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    examples = [n.meta["val"] for n in placeholders]
    try:
        form = normal_form(program.graph_module, _recorded(program, examples), is_kept)
    except GradcError:
        raise
    except Exception as error:  # whatever tracing meets
        reason = (str(error).strip().splitlines() or [""])[0]
        raise Unsupported(f"{title} has no normal form: {type(error).__name__}: {reason}") from error
    graph = form.module.graph
    lifted = [n for n in graph.nodes if n.op == "placeholder"][len(form.lifted) :]
    sources = _sources(program, examples)
    inputs, merged, defaults = _inputs(lifted, sources)
    results = list(graph.output_node().args[0])
    with called(names):
        outputs = _outputs(program, lifted, sources, form.mutated, results)
    constants = [n for n in graph.nodes if n.op == "get_attr" or (n.op == "placeholder" and n not in lifted)]
    for node in constants:
        inputs[node] = name_of(f"constant.{node.name}", lambda n: n in inputs.values())
        defaults[inputs[node]] = _array(_constant(form.module, program.graph_module, node))
    inputs = dict(sorted(inputs.items(), key=lambda item: item[1] in defaults))  # constants behind what is given
    calls = [n for n in graph.nodes if n.op == "call_function"]
    computed = [(key, node) for key, node in outputs.items() if isinstance(node, torch.fx.Node)]
    with called(names):
        made, refused = graph_of(calls, inputs, computed, _title(title), merged, program.range_constraints)
    if refused:
        raise Unsupported(listing(title, refused))
    found = dict(made.outputs)
    results = [(key, node if isinstance(node, Node) else found[key]) for key, node in outputs.items()]
    defaults |= made.defaults
    return Graph(made.name, made.inputs, tuple(results), made.assumptions, notes=made.notes, defaults=defaults)


def _each_its_own(model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with a copy of a tensor that is given twice, or is a parameter: torch.export takes one object for
    one value, and a program made of ``f(x, x)`` reads one of its two inputs alone.
    """
    if not isinstance(model, torch.nn.Module):
        return args, kwargs
    seen = {id(x) for x in (*model.parameters(), *model.buffers())}

    def own(x: torch.Tensor) -> torch.Tensor:
        if id(x) in seen:
            return x.detach().clone().requires_grad_(x.requires_grad)
        seen.add(id(x))
        return x

    made: tuple[Any, Any] = tree_map_only(torch.Tensor, own, (args, kwargs))
    return made


def _exported(model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes:
            raise InvalidProblem("an exported program has its arguments and sizes already: give it alone")
        return model
    if not isinstance(model, torch.nn.Module):
        raise InvalidProblem(
            f"from_torch takes a torch.nn.Module or a torch.export.ExportedProgram, not a {type(model).__name__}"
        )
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise InvalidProblem(f"args is a tuple of example arguments, not a {type(args).__name__}")
    try:
        return torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch's errors have no common class
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InvalidProblem(
            f"torch.export refuses {type(model).__name__}: {type(error).__name__}: {reason}"
        ) from error


def _dim_names(
    program: ExportedProgram, model: Any, args: Any, kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> dict[str, str]:
    """What the user called the sizes: torch's symbol -> the name of the ``torch.export.Dim`` of an axis that it is."""
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    bound = inspect.signature(model.forward).bind(*positional, **kwargs).arguments
    if isinstance(dynamic_shapes, Mapping):
        pairs = [(bound.get(name), shapes) for name, shapes in dynamic_shapes.items()]
    else:
        pairs = list(zip((*positional, *kwargs.values()), dynamic_shapes, strict=False))
    given = {id(leaf): at for at, leaf in enumerate(tree_leaves((positional, dict(kwargs))))}
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values: list[Any] = [by_name[n].meta["val"] if n in by_name else None for n in program.graph_signature.user_inputs]
    names: dict[str, str] = {}
    for tensor, axis, dim in (found for pair in pairs for found in _named_axes(*pair)):
        expression = getattr(getattr(values[given[id(tensor)]].shape[axis], "node", None), "expr", None)
        title = getattr(getattr(dim, "root", dim), "__name__", "")  # of 2*Dim("n"), whose symbol is n: n
        if expression is not None and len(expression.free_symbols) == 1 and title.isidentifier():
            names.setdefault(str(next(iter(expression.free_symbols))), title)
    taken = {str(each) for each in program.range_constraints} - names.keys()
    return {each: title for each, title in names.items() if title not in taken}


def _named_axes(value: Any, shapes: Any) -> list[tuple[torch.Tensor, int, Any]]:
    """The axes of the tensors in an argument, and what ``dynamic_shapes`` says of each."""
    if shapes is None:
        return []
    if isinstance(value, torch.Tensor):
        axes = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes)
        return [(value, axis, dim) for axis, dim in axes if dim is not None]
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in _named_axes(inner, shapes.get(key))]
    if isinstance(value, tuple | list):
        return [found for inner, each in zip(value, shapes, strict=False) for found in _named_axes(inner, each)]
    return []


def _recorded(program: ExportedProgram, examples: Sequence[Any]) -> list[Any]:
    """The examples, requiring grad where the parameters do: what ``no_grad`` means depends on it."""
    parameters = program.graph_signature.inputs_to_parameters
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, examples, strict=True):
        for _, x in inner_tensors(value):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_(node.name in parameters or node.name in program.graph_signature.user_inputs)
    return list(examples)


@dataclass(frozen=True)
class _Source:
    """Where an input of a normal form comes from.

    :param name: of a parameter, buffer, constant or argument, and behind a dot the attribute of a wrapper subclass.
    :param kind: of ``torch.export``'s input specs.
    :param tensor: None of an argument.
    """

    name: str
    kind: str
    tensor: torch.Tensor | None


def _sources(program: ExportedProgram, examples: Sequence[Any]) -> list[_Source]:
    """Of each inner tensor of each placeholder."""
    found, spelled = [], _spelled(program)
    for example, spec in zip(examples, program.graph_signature.input_specs, strict=True):
        whole = program.state_dict.get(spec.target) if spec.target is not None else None
        if whole is None and spec.target is not None:
            whole = program.constants.get(spec.target)
        paths = [path for path, _ in inner_tensors(example)]
        tensors = [x for _, x in inner_tensors(whole)] if isinstance(whole, torch.Tensor) else [None] * len(paths)
        for path, tensor in zip(paths, tensors, strict=True):
            own = spec.target or spelled.get(spec.arg.name, spec.arg.name)
            found.append(_Source(".".join(filter(None, (own, path))), spec.kind.name, tensor))
    return found


def _spelled(program: ExportedProgram) -> dict[str, str]:
    """The names of arguments, which ``torch.export`` writes in small letters, as the module writes them."""
    signature = program.module_call_graph[0].signature
    first = getattr(signature, "forward_arg_names", None)
    if signature is None or not first:
        return {}
    spec, names = signature.in_spec, program.graph_signature.user_inputs
    paths = [path for path, _ in private("tree_flatten_with_path")(_filled(spec, spec.num_leaves))[0]]
    steps = ([_word(step) for step in path] for path in paths)
    words = [[first[int(at)] if where == "0" else at, *inner] for where, at, *inner in steps]
    return {name: "_".join(each) for name, each in zip(map(str, names), words, strict=True)}


def _word(step: Any) -> str:
    """A step of a path in a tree."""
    return str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", ""))))


def _inputs(
    lifted: Sequence[torch.fx.Node], sources: Sequence[_Source]
) -> tuple[dict[torch.fx.Node, str], dict[torch.fx.Node, torch.fx.Node], dict[str, np.ndarray[Any, Any]]]:
    """Names of the inputs, which of them are another's memory, and the values of constants."""
    inputs: dict[torch.fx.Node, str] = {}
    merged: dict[torch.fx.Node, torch.fx.Node] = {}
    defaults: dict[str, np.ndarray[Any, Any]] = {}
    owners: dict[Any, torch.fx.Node] = {}
    for node, source in zip(lifted, sources, strict=True):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        tensor = source.tensor
        if tensor is not None:
            memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else node
            if memory in owners and source.kind in ("PARAMETER", "BUFFER"):
                merged[node] = owners[memory]
                continue
            owners[memory] = node
        inputs[node] = name_of(source.name, lambda n: n in inputs.values())
        if source.kind == "CONSTANT_TENSOR" and tensor is not None:
            defaults[inputs[node]] = _array(tensor)
    return inputs, merged, defaults


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    from ..runtime.host.tensors import from_tensor

    return np.array(from_tensor(torch, tensor.detach().cpu()))


def _constant(module: torch.fx.GraphModule, source: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """The tensor that a graph refers to by its path."""
    for root in (module, source):
        value: Any = root
        for word in str(node.target).split("."):
            value = getattr(value, word, None)
        if isinstance(value, torch.Tensor):
            return value
    raise Unsupported(f"the constant {node.target} has no value")


def _outputs(
    program: ExportedProgram,
    lifted: Sequence[torch.fx.Node],
    sources: Sequence[_Source],
    mutated: Sequence[str],
    results: Sequence[Any],
) -> dict[str, torch.fx.Node | Node]:
    """Results by name, Python numbers as constants; then the new values of what is changed in place."""
    names = {node.name: source.name for node, source in zip(lifted, sources, strict=True)}
    written = [(names[name], node) for name, node in zip(mutated, results, strict=False)]
    returned: list[tuple[str, Any]] = []
    specs, spelled = program.graph_signature.output_specs, _spelled(program)
    keys = _keys(program, sum(spec.kind.name not in ("BUFFER_MUTATION", "USER_INPUT_MUTATION") for spec in specs))
    for spec, node in zip(specs, results[len(mutated) :], strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "USER_INPUT_MUTATION"):
            written.append((spelled.get(str(spec.target), str(spec.target)), node))
            continue
        key = keys.pop(0)
        if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            returned.append((key, node))
        elif isinstance(node, bool | int | float):
            returned.append((key, ops.constant(value=(node,), dtype=type_of(torch.tensor(node)).dtype, shape=())))
        elif isinstance(node, torch.fx.Node):
            returned.append((key, _of_sizes(key, node.meta.get("val"))))
    taken: dict[str, torch.fx.Node | Node] = {}
    for key, node in (*returned, *written):
        taken[name_of(key, taken.__contains__)] = node
    if not taken:
        raise InvalidProblem("the module returns no tensor")
    return taken


def _of_sizes(key: str, value: Any) -> Node:
    """A result that is computed from sizes, i64.

    :raises Unsupported: it is no integer.
    """
    if not isinstance(value, torch.SymInt):
        raise Unsupported(f"the result {key} is a number that depends on sizes: {value}")
    size = size_of(value)
    return ops.dim(size) if isinstance(size, Dim) else ops.constant(value=(size,), dtype=I64, shape=())


def _keys(program: ExportedProgram, count: int) -> list[str]:
    """Names of the results: the keys of a dict or of a named output, ``y0``, ``y1``... of a tuple, ``y`` of one."""
    spec = program.call_spec.out_spec
    if spec is None or count == 1:
        return ["y"] * count
    paths = [path for path, _ in private("tree_flatten_with_path")(_filled(spec, count))[0]]
    words = [".".join(map(_word, path)) for path in paths]
    return [f"y{word.replace('.', '_')}" if word[:1].isdigit() else word or "y" for word in words]


def _filled(spec: Any, count: int) -> Any:
    return private("tree_unflatten")(list(range(count)), spec)


def _title(name: str) -> str:
    return name if name.isidentifier() else "graph"
