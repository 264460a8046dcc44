"""``gradc.from_onnx``: an ONNX model as a gradc Graph.

Built on the package ``onnx`` alone (its checker, schemas, function bodies): sizes that vary are gradc's dims, which no
optimizer of files knows, so that what is known of a model's values is computed here as it is read.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from .. import interp, ops
from ..errors import GradcError, InvalidProblem, Unsupported
from ..ir.dims import STATED, Assumption, Dim, Size, assuming, symbol
from ..ir.graph import Graph, input_node, name_of
from ..ir.node import Node, Note, listening
from ..ir.operands import CAPTURE
from ..ir.types import I64, Type, typeof
from ..trace import implied
from . import folding, model, sequences, table
from .folding import as_node, is_known
from .sequences import Items
from .table import MOST_STEPS, Known, Line, Site, line_of, lines, normalized_axis


@dataclass(eq=False)
class Parameter:
    """An initializer: an input of the graph with a default, once an op computes with it.

    :param name: in the model.
    """

    name: str
    value: Known

    @property
    def is_trained(self) -> bool:
        """Whether it is an input wherever it is read: neither a number nor an index."""
        kind = typeof(self.value).dtype
        return self.value.size > 1 and kind.kind != "b" and (kind.is_float or kind.bits <= 8)


Value = Node | Parameter | Known | Items | None

_WITHOUT_MEANING = frozenset({"consumed_inputs", "output_sequence"})
"""Attributes of the first opsets that change no value: which inputs may be overwritten, whether all states of a
recurrent layer are wanted.
"""


def from_onnx(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    constants: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    name: str = "",
) -> Graph:
    """An ONNX model as a graph.

    Its inputs are the model's, then the initializers that ops compute with, with their values as defaults: floats of
    more than one element, and what a quantized value is read with (codes, scale, zero point) whatever its size.  A size
    with a name is a dim of that name; names of inputs and outputs are the model's, with ``_`` for what is no letter,
    digit, ``_`` or dot (``/`` becomes a dot).  Functions are expanded, ``If`` with a known condition and ``Loop`` with
    a known number of steps are written out.

    :param source: a path (external data is looked for beside it), the file's bytes, or an ``onnx.ModelProto``.
    :param constants: values of inputs that shapes depend on, or that are to be constants.
    :param dims: sizes for named dims.
    :param name: of the graph; the model's if not given.
    :raises InvalidProblem: the file cannot be read or is no valid model, or ``constants`` and ``dims`` do not fit it.
    :raises Unsupported: what gradc does not take, all operators without a line at once, each with its node.
    """
    proto = model.read(source)
    return _Translation(proto, dict(constants or {}), dict(dims or {})).graph(_title(name or proto.graph.name))


def _title(name: str) -> str:
    plain = re.sub(r"\W", "_", name)
    return plain if plain.isidentifier() else "graph"


@dataclass
class _Scope:
    """Names of a graph or a function body.

    :param values: by the name of a value.
    :param attributes: that a function was called with.
    :param opsets: versions by domain.
    :param path: of the calls of functions around it.
    :param operator: of ONNX, whose body it is; "" in a model and its functions.
    """

    values: ChainMap[str, Value]
    attributes: Mapping[str, onnx.AttributeProto]
    opsets: Mapping[str, int]
    path: tuple[str, ...] = ()
    operator: str = ""

    def opset(self, node: onnx.NodeProto) -> int:
        """The version of a node's domain."""
        return self.opsets.get(node.domain, 1)


@dataclass
class _Translation:
    proto: onnx.ModelProto
    constants: dict[str, Any]
    sizes: dict[str, int]
    inputs: dict[str, Node] = field(default_factory=dict)
    parameters: dict[int, Node] = field(default_factory=dict)
    defaults: dict[str, Known] = field(default_factory=dict)
    notes: dict[Node, Note] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    at: tuple[str, str] = ("", "")
    key: Node | None = None
    streams: int = 0

    def graph(self, name: str) -> Graph:
        main = self.proto.graph
        self.functions = {(f.domain, f.name, f.overload): f for f in self.proto.functions}
        opsets = {o.domain: o.version for o in self.proto.opset_import} or {"": model.OLDEST}
        self._refuse_missing(main.node, opsets)
        facts: list[Assumption] = []
        stated = STATED.set(facts)
        CAPTURE.append(self._captured)
        try:
            with listening(self._heard), assuming(facts):
                scope = _Scope(ChainMap({}), {}, opsets)
                self._read_inputs(main, scope)
                self._read_initializers(main, scope)
                self._run(main.node, scope)
                results = self._results(main, scope)
        finally:
            CAPTURE.pop()
            STATED.reset(stated)
        given = [n for n in self.inputs.values() if Graph.input_name(n) not in self.defaults]
        held = [n for n in self.inputs.values() if Graph.input_name(n) in self.defaults]
        facts += implied([node for _, node in results], facts)
        return Graph(name, (*given, *held), tuple(results), tuple(facts), notes=self.notes, defaults=self.defaults)

    # -- inputs and results --------------------------------------------------------------------------------------------

    def _read_inputs(self, graph: onnx.GraphProto, scope: _Scope) -> None:
        initial = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        unknown = self.constants.keys() - {i.name for i in graph.input}
        if unknown:
            raise InvalidProblem(f"the model has no input {min(unknown)!r}")
        for info in graph.input:
            if info.name in self.constants:
                scope.values[info.name] = np.asarray(self.constants[info.name])
            elif info.name not in initial:
                scope.values[info.name] = self._input(info.name, self._type_of(info))
        unknown = self.sizes.keys() - self.bound
        if unknown:
            raise InvalidProblem(f"the model has no dim {min(unknown)!r}")

    def _type_of(self, info: onnx.ValueInfoProto) -> Type:
        """:raises Unsupported: it is no tensor, or its rank is not known."""
        if not info.type.HasField("tensor_type"):
            raise Unsupported(f"the input {info.name!r} is a {info.type.WhichOneof('value') or 'value without a type'}")
        tensor = info.type.tensor_type
        if not tensor.HasField("shape"):
            raise Unsupported(f"the input {info.name!r} has no shape; write one into the model, or give its value")
        shape: list[Size] = []
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters write -1 for one that varies
                shape.append(dim.dim_value)
                continue
            named = dim.dim_param not in ("", "?")  # which some exporters write for one without a name
            title = dim.dim_param if named else f"{info.name}_{axis}"
            if title in self.sizes:
                self.bound.add(title)
                shape.append(self.sizes[title])
            else:
                plain = re.sub(r"\W", "_", title)
                shape.append(symbol(plain if plain.isidentifier() else f"n_{plain}"))
        return Type(model.element(tensor.elem_type), tuple(shape))

    def _input(self, title: str, type: Type) -> Node:
        made = input_node(name_of(title.replace("/", "."), lambda n: n in self.inputs), type)
        self.inputs[Graph.input_name(made)] = made
        return made

    def _read_initializers(self, graph: onnx.GraphProto, scope: _Scope) -> None:
        if graph.sparse_initializer:
            raise Unsupported(f"the sparse initializer {graph.sparse_initializer[0].values.name!r}")
        for tensor in graph.initializer:
            if tensor.name not in scope.values:
                scope.values[tensor.name] = Parameter(tensor.name, model.array(tensor))

    def _results(self, graph: onnx.GraphProto, scope: _Scope) -> list[tuple[str, Node]]:
        taken: dict[str, Node] = {}
        for info in graph.output:
            if info.name not in scope.values:
                raise InvalidProblem(f"the output {info.name!r} is not computed by the model")
            value = scope.values[info.name]
            taken[name_of(info.name.replace("/", "."), taken.__contains__)] = self._node(value)
        return list(taken.items())

    # -- values --------------------------------------------------------------------------------------------------------

    def _node(self, value: Value) -> Node:
        """A value as an operand."""
        if isinstance(value, Node):
            return value
        if isinstance(value, Parameter):
            known = self.parameters.get(id(value))
            if known is None:
                known = self.parameters[id(value)] = self._input(value.name, typeof(value.value))
                self.defaults[Graph.input_name(known)] = value.value
            return known
        if isinstance(value, Items) or value is None:
            raise Unsupported(f"{'an optional' if value is None else 'a sequence'} where a tensor is needed")
        return as_node(value)

    node = _node

    def integers(self, value: Value, place: int) -> Known:
        """Known whole numbers."""
        found: Known = self._argument(value, "Known", place)
        return found

    def draw(self) -> tuple[Node, int]:
        """The key that random operators read, an input, and the number of this one."""
        if self.key is None:
            self.key = self._input("key", Type(I64, ()))
            self.defaults[Graph.input_name(self.key)] = np.array(0, np.int64)
        self.streams += 1
        return self.key, self.streams - 1

    def _captured(self, array: Known) -> Node:
        made = self._input(f"constant.{self.at[1] or self.at[0]}", typeof(array))
        self.defaults[Graph.input_name(made)] = array
        return made

    def _heard(self, node: Node) -> None:
        if node not in self.notes and self.at[0]:
            self.notes[node] = Note("", "", "/".join(w for w in re.split(r"\W+", self.at[1]) if w))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _run(self, nodes: Iterable[onnx.NodeProto], scope: _Scope) -> None:
        for node in nodes:
            try:
                results = self._call(node, scope)
            except _Placed:
                raise
            except Exception as error:
                raise _placed(node, scope.opset(node), error) from error
            for output, value in zip(node.output, results, strict=False):
                if output:
                    scope.values[output] = value
            for output in node.output[len(results) :]:
                if output:
                    raise _placed(node, scope.opset(node), Unsupported(f"its result {output!r}"))

    def _call(self, node: onnx.NodeProto, scope: _Scope) -> Sequence[Value]:
        attributes = self._attributes(node, scope)
        operands = [self._operand(each, scope) for each in node.input]
        before, self.at = self.at, (node.op_type, "/".join((*scope.path, node.name or node.op_type)))
        try:
            if own := self.functions.get((node.domain, node.op_type, node.overload)):
                return self._expanded(node, own, operands, scope)
            if node.op_type in _CONTROL and not node.domain:
                return _CONTROL[node.op_type](self, node, operands, attributes, scope)
            if node.op_type in sequences.HANDLERS and not node.domain:
                return [sequences.HANDLERS[node.op_type](self, operands, attributes)]
            if node.op_type == "Constant" and not node.domain:
                return [self._constant(node, attributes)]
            known = [self._value(operand) for operand in operands]
            if node.op_type == "CastLike" and is_known(known[0]) and known[1] is not None:
                wanted = self._node(operands[1]).dtype
                if wanted.bits >= (16 if wanted.is_float else 8) or wanted.kind == "b":  # others have attributes
                    given = np.asarray(known[0])
                    made = given.astype(wanted.np) if given.dtype != object else folding.cast(given, wanted)
                    if made is not None:
                        return [made]
            line = _line_of(node, scope)
            if all(x is None or is_known(x) for x in known):
                folded = self._folded(node, line, known, attributes, scope)
                if folded is not None:
                    return folded
            if line is None:
                return self._expanded(node, self._body(node, operands, scope), operands, scope, node.op_type)
            return self._translated(node, line, operands, attributes, scope)
        finally:
            self.at = before

    def _value(self, operand: Value) -> Value:
        """An operand, its value where it is a number or an index among the initializers."""
        return operand.value if isinstance(operand, Parameter) and not operand.is_trained else operand

    def _operand(self, name: str, scope: _Scope) -> Value:
        if not name:
            return None
        if name not in scope.values:
            raise InvalidProblem(f"the value {name!r} is used before it is computed")
        return scope.values[name]

    def _attributes(self, node: onnx.NodeProto, scope: _Scope) -> dict[str, Any]:
        found = {}
        for attribute in node.attribute:
            given = attribute
            if attribute.ref_attr_name:
                if attribute.ref_attr_name not in scope.attributes:
                    continue
                given = scope.attributes[attribute.ref_attr_name]
            found[attribute.name] = _plain(onnx.helper.get_attribute_value(given))
        for name, default in model.defaults(node.op_type, node.domain, scope.opset(node)).items():
            found.setdefault(name, _plain(onnx.helper.get_attribute_value(default)))
        return {name: value for name, value in found.items() if name not in _WITHOUT_MEANING}

    def _folded(
        self, node: onnx.NodeProto, line: Line | None, known: Sequence[Any], attributes: dict[str, Any], scope: _Scope
    ) -> Sequence[Value] | None:
        """The results of an operator on known values; None where nothing computes them now.

        The graph that the line makes computes them, so that an operator means one thing in every place and in every
        opset, and so do the operators of its body where it has one.  ONNX's reference, which is asked where the line
        takes no such dtype or size, knows few operators in the forms that they had once.
        """
        if not folding.may_fold(node, known, attributes):
            return None
        sizes = any(x is not None and np.asarray(x).dtype == object for x in known)
        if line is None and not sizes and node.op_type not in folding.FOLDED_ONLY:
            return None
        if line is None or sizes:
            return folding.folded(node, known, attributes, scope.opsets)
        try:
            return self._by_line(node, line, known, attributes, scope)
        except GradcError as error:
            if isinstance(error, InvalidProblem) or not line.is_newest:
                raise
            return folding.folded(node, known, attributes, scope.opsets)

    def _by_line(
        self, node: onnx.NodeProto, line: Line, known: Sequence[Any], attributes: dict[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        """The results of the graph that a line makes of known values."""
        operands: list[Value] = []
        inputs: list[Node] = []
        feeds: dict[str, Known] = {}

        def given(value: Known) -> Node:
            made = input_node(f"i{len(inputs)}", typeof(np.asarray(value)))
            feeds[Graph.input_name(made)] = np.asarray(value)
            inputs.append(made)
            return made

        kinds = [*line.inputs, *[line.rest] * len(known), *["Known"] * len(known)]
        for value, kind in zip(known, kinds, strict=False):
            operands.append(given(value) if value is not None and kind in ("Node", "Weight") else value)
        CAPTURE.append(given)
        try:
            with listening(lambda _: None):
                results = self._translated(node, line, operands, attributes, scope)
        finally:
            CAPTURE.pop()
        outputs = tuple((f"y{i}", y) for i, y in enumerate(results) if isinstance(y, Node))
        found = interp.run(Graph("known", tuple(inputs), outputs), feeds) if outputs else {}
        return [np.asarray(found[f"y{i}"]) if isinstance(y, Node) else y for i, y in enumerate(results)]

    def _constant(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> Value:
        (key, value), *_ = attributes.items()
        if key == "sparse_value" or key.startswith("value_string"):
            raise Unsupported(f"a constant with {key}")
        if key != "value":
            return np.asarray(value, np.float32 if "float" in key else np.int64)
        found = np.asarray(value)
        return Parameter(node.output[0], found) if found.dtype.kind not in "ib" and found.size > 1 else found

    def _translated(
        self, node: onnx.NodeProto, line: Line, operands: Sequence[Value], attributes: dict[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        if not line.rest and len(operands) > len(line.inputs):
            if any(operand is not None for operand in operands[len(line.inputs) :]):
                raise Unsupported(f"{len(operands)} inputs; gradc takes {len(line.inputs)}")
            operands = operands[: len(line.inputs)]
        kinds = [*line.inputs, *[line.rest] * len(operands)]
        given = [self._argument(x, kind, i) for i, (x, kind) in enumerate(zip(operands, kinds, strict=False))]
        standard = model.defaults(node.op_type, node.domain, scope.opset(node))
        for name in sorted(attributes.keys() - line.attributes):  # a line may leave out what changes nothing
            if name not in standard or attributes[name] != _plain(onnx.helper.get_attribute_value(standard[name])):
                raise Unsupported(f"the attribute {name}")
        attributes = {name: value for name, value in attributes.items() if name in line.attributes}
        if line.site:
            count = max((i + 1 for i, name in enumerate(node.output) if name), default=0)
            given = [Site(node.op_type, scope.opset(node), count, len(node.output), self.draw), *given]
        result = line.function(*given, **attributes)
        return result if isinstance(result, tuple | list) else [result]

    def _argument(self, operand: Value, kind: str, place: int) -> Any:
        if operand is None:
            return None
        if kind == "Weight" or (kind == "Node" and not isinstance(operand, Parameter)):
            return self._node(operand)
        if kind == "Node":
            assert isinstance(operand, Parameter)
            return self._node(operand if operand.is_trained else operand.value)
        value = operand.value if isinstance(operand, Parameter) else operand
        if not is_known(value):
            raise Unsupported(f"its input {place} is computed from data; constants= can give an input's value")
        array = np.asarray(value)
        if kind == "Known" and array.dtype == object:
            raise Unsupported(f"its input {place} is a size that varies; dims= can give sizes")
        if kind == "Known":
            return array
        return tuple(map(folding.size_of, array.reshape(-1).tolist()))

    # -- functions and control flow ------------------------------------------------------------------------------------

    def _body(self, node: onnx.NodeProto, operands: Sequence[Value], scope: _Scope) -> onnx.FunctionProto:
        """The body that the operator's schema has.

        :raises Unsupported: it has none.
        """
        schema = model.schema(node.op_type, node.domain, scope.opset(node))
        if schema is None:
            raise Unsupported(f"gradc's table has no line for it in opset {scope.opset(node)}")
        text = b""
        if schema.has_function:
            text = schema.get_function_with_opset_version(max(schema.function_opset_versions))
        elif schema.has_context_dependent_function:
            whole = onnx.NodeProto()
            whole.CopyFrom(node)
            given = {a.name for a in node.attribute}
            whole.attribute.extend(
                a.default_value for a in schema.attributes.values() if a.name not in given and a.default_value.name
            )
            types = [_proto_of(self._node(x).type) if x is not None else onnx.TypeProto() for x in operands]
            text = schema.get_context_dependent_function_with_opset_version(
                max(schema.context_dependent_function_opset_versions),
                whole.SerializeToString(),
                [t.SerializeToString() for t in types],
            )
        if not text:
            raise Unsupported("gradc's table has no line for it")
        body = onnx.FunctionProto()
        body.ParseFromString(text)
        for each in schema.attributes.values():
            if each.default_value.name and each.name not in {a.name for a in body.attribute_proto}:
                body.attribute_proto.append(each.default_value)
        return body

    def _expanded(
        self,
        node: onnx.NodeProto,
        body: onnx.FunctionProto,
        operands: Sequence[Value],
        scope: _Scope,
        operator: str = "",
    ) -> Sequence[Value]:
        """:param operator: of ONNX, whose body it is; "" for a function of the model."""
        if len(scope.path) > 100:
            raise Unsupported("functions that call each other without end")
        attributes = {a.name: a for a in body.attribute_proto}
        for attribute in node.attribute:
            given = scope.attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
            if given is not None:
                attributes[attribute.name] = given
        values: dict[str, Value] = dict.fromkeys(body.input)
        values.update(zip(body.input, operands, strict=False))
        opsets = {**scope.opsets, **{o.domain: o.version for o in body.opset_import}}
        inner = _Scope(ChainMap(values), attributes, opsets, (*scope.path, node.name or node.op_type), operator)
        self._run(body.node, inner)
        return [inner.values.get(name) for name in body.output]

    def _subgraph(self, graph: onnx.GraphProto, operands: Sequence[Value], scope: _Scope) -> list[Value]:
        inner = _Scope(scope.values.new_child(), scope.attributes, scope.opsets, scope.path, scope.operator)
        inner.values.update(zip((i.name for i in graph.input), operands, strict=False))
        self._read_initializers(graph, inner)
        self._run(graph.node, inner)
        return [inner.values[o.name] for o in graph.output]

    def _if(
        self, node: onnx.NodeProto, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        condition = self._argument(operands[0], "Known", 0)
        return self._subgraph(attributes["then_branch" if condition.all() else "else_branch"], (), scope)

    def _loop(
        self, node: onnx.NodeProto, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        most, going, *carried = operands
        steps = None if most is None else self._argument(most, "Sizes", 0)[0]
        if isinstance(steps, Dim):
            raise Unsupported(f"a loop of {steps} steps; dims= can give sizes")
        body = attributes["body"]
        collected: list[list[Value]] = [[] for _ in body.output[1 + len(carried) :]]
        step, condition = 0, going is None or bool(self._argument(going, "Known", 1).all())
        while condition and (steps is None or step < steps):
            if step >= MOST_STEPS:
                raise Unsupported(f"a loop of more than {MOST_STEPS} steps")
            again, *results = self._subgraph(body, [np.array(step, np.int64), np.array(True), *carried], scope)
            carried = results[: len(carried)]
            for one, value in zip(collected, results[len(carried) :], strict=True):
                one.append(value)
            if again is not None and is_known(self._value(again)):
                condition = bool(np.all(self._argument(again, "Known", 0)))
            elif again is not None:
                raise Unsupported("a loop that ends by a condition that is computed from data")
            step += 1
        return [*carried, *(self._stacked(values) for values in collected)]

    def _stacked(self, values: Sequence[Value]) -> Value:
        if not values:
            raise Unsupported("a loop of no steps that collects results")
        if all(is_known(self._value(v)) for v in values):
            return np.stack([np.asarray(self._value(v)) for v in values])
        return ops.stack(*map(self._node, values))

    def _scan(
        self, node: onnx.NodeProto, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        if scope.opset(node) < 9:
            return self._scan_of_batches(operands, attributes, scope)
        return self._scan_of(operands, attributes, scope)

    def _scan_of_batches(
        self, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        """Of opset 8: axis 0 of all inputs is that of batches, axis 1 that of steps; each batch is scanned alone."""
        lengths, *rest = operands
        if lengths is not None:
            raise Unsupported("a Scan of opset 8 over sequences of several lengths")
        nodes = [self._node(x) for x in rest]
        batches = nodes[0].shape[0]
        if isinstance(batches, Dim) or batches > MOST_STEPS or not batches:
            raise Unsupported(f"a Scan of opset 8 over {batches} batches")
        if any(x.shape[:1] != (batches,) for x in nodes):
            raise InvalidProblem(f"a Scan of opset 8 over {', '.join(str(x.type) for x in nodes)}: batches differ")
        options = dict(attributes)
        if "directions" in options:
            options["scan_input_directions"] = options.pop("directions")
        found = [self._scan_of([ops.getitem(x, b) for x in nodes], options, scope) for b in range(batches)]
        return [ops.stack(*map(self._node, each)) for each in zip(*found, strict=True)]

    def _scan_of(self, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope) -> Sequence[Value]:
        body, count = attributes["body"], attributes["num_scan_inputs"]
        states = list(operands[: len(operands) - count])
        scanned = [self._node(x) for x in operands[len(operands) - count :]]
        axes = [
            normalized_axis(a, x.rank)
            for a, x in zip(attributes.get("scan_input_axes", [0] * count), scanned, strict=True)
        ]
        backward = attributes.get("scan_input_directions", [0] * count)
        results = len(body.output) - len(states)
        steps = scanned[0].shape[axes[0]]
        if isinstance(steps, Dim) or steps > MOST_STEPS:
            raise Unsupported(f"a scan of {steps} steps")
        collected: list[list[Value]] = [[] for _ in range(results)]
        for step in range(steps):
            slices = [
                ops.getitem(x, (*[slice(None)] * a, steps - 1 - step if back else step))
                for x, a, back in zip(scanned, axes, backward, strict=True)
            ]
            made = self._subgraph(body, [*states, *slices], scope)
            states = made[: len(states)]
            for one, value in zip(collected, made[len(states) :], strict=True):
                one.append(value)
        stacked = []
        out_axes = attributes.get("scan_output_axes", [0] * results)
        for values, axis, back in zip(
            collected, out_axes, attributes.get("scan_output_directions", [0] * results), strict=True
        ):
            nodes = [self._node(v) for v in (reversed(values) if back else values)]
            stacked.append(ops.stack(*nodes, axis=normalized_axis(axis, nodes[0].rank + 1)))
        return [*states, *stacked]

    def _map(
        self, node: onnx.NodeProto, operands: Sequence[Value], attributes: Mapping[str, Any], scope: _Scope
    ) -> Sequence[Value]:
        items = operands[0]
        if not isinstance(items, Items):
            raise InvalidProblem("its first input is no sequence")
        body = attributes["body"]
        made = []
        for at in range(len(items)):
            given = [x[at] if isinstance(x, Items) else x for x in operands]
            made.append(self._subgraph(body, given, scope))
        return [Items(results[k] for results in made) for k in range(len(body.output))]

    # -- all that is missing -------------------------------------------------------------------------------------------

    def _refuse_missing(self, nodes: Iterable[onnx.NodeProto], opsets: Mapping[str, int]) -> None:
        """:raises Unsupported: operators without a line or a body, or newer than the table, all of them."""
        missing: dict[str, tuple[int, str]] = {}
        pending = [(node, opsets) for node in nodes]
        for function in self.proto.functions:
            own = {o.domain: o.version for o in function.opset_import}
            pending += [(node, {**opsets, **own}) for node in function.node]
        while pending:
            node, versions = pending.pop()
            graphs = [g for a in node.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs)]
            pending += [(inner, versions) for g in graphs for inner in g.node]
            title = self._missing(node, versions.get(node.domain, 1))
            if title:
                count, first = missing.get(title, (0, _shown(node)))
                missing[title] = count + 1, first
        if missing:
            found = "".join(f"\n  {key} ({n} of it; {at})" for key, (n, at) in sorted(missing.items()))
            raise Unsupported(f"gradc does not take {len(missing)} of the model's operators:{found}")

    def _missing(self, node: onnx.NodeProto, opset: int) -> str:
        """What gradc does not have: an operator, or its form in an opset; "" if it is there."""
        domain = node.domain
        key = f"{domain}.{node.op_type}" if domain else node.op_type
        if (node.domain, node.op_type, node.overload) in self.functions:
            return ""
        schema = model.schema(node.op_type, domain, opset)
        named = f"{key} of opset {opset}"
        if not domain and schema is None and lines().get(key):  # where the checker of ONNX was not asked: 2 GiB
            return named
        if not domain and schema is not None and schema.since_version > table.NEWEST_KNOWN:
            return f"{key} as opset {schema.since_version} has it"
        own = key in _CONTROL or key in sequences.HANDLERS or key in folding.FOLDED_ONLY or key == "Constant"
        if line_of(key, opset) is not None or (own and not domain):
            return ""
        if schema is not None and (schema.has_function or schema.has_context_dependent_function):
            return ""
        return named


def _line_of(node: onnx.NodeProto, scope: _Scope) -> Line | None:
    """The line of an operator in its opset; within the body of another it may have one of its own."""
    key = ".".join(filter(None, (node.domain, node.op_type)))
    return line_of(f"{scope.operator}.{key}", scope.opset(node)) or line_of(key, scope.opset(node))


class _Placed(Exception):
    """An error that names its node already."""


class _Refused(_Placed, Unsupported):
    pass


class _Invalid(_Placed, InvalidProblem):
    pass


def _placed(node: onnx.NodeProto, opset: int, error: Exception) -> _Placed:
    text = str(error) if isinstance(error, GradcError) else f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        text = "it is nested too deep"
    kind = _Invalid if isinstance(error, InvalidProblem) else _Refused
    where = f"{node.domain} {opset}".strip()
    return kind(f"{_shown(node)}: {text} (opset {where})")


_CONTROL = {
    "If": _Translation._if,
    "Loop": _Translation._loop,
    "Scan": _Translation._scan,
    "SequenceMap": _Translation._map,
}


def _shown(node: onnx.NodeProto) -> str:
    return (
        f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} of {', '.join(map(repr, node.output[:1]))}"
    )


def _plain(value: Any) -> Any:
    """An attribute's value: text for bytes, arrays for tensors, tuples for lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, onnx.TensorProto):
        return model.array(value)
    if isinstance(value, list | tuple) or type(value).__name__.startswith("Repeated"):
        return tuple(_plain(v) for v in value)
    return value


def _proto_of(type: Type) -> onnx.TypeProto:
    """A type for ONNX's functions of types."""
    number = next(k for k, v in model._ELEMENTS.items() if v == type.dtype.name)
    return onnx.helper.make_tensor_type_proto(number, [n if isinstance(n, int) else str(n) for n in type.shape])
