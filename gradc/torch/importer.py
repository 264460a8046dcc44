"""A graph of ATen ops as a gradc Graph: each node by its line of the table, each type held against torch's."""

from __future__ import annotations

import linecache
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import GradcError, Unsupported
from ..ir.dims import Assumption, assuming, same
from ..ir.graph import Graph, check_name, input_node
from ..ir.node import Node, Note, listening
from ..ir.operands import CAPTURE
from ..ir.types import F32, Type, typeof
from ..ops.rules import converted
from ..trace import implied
from .custom_gradients import REASON, custom_gradient
from .sizes import assumptions, dtype_of, size_of, type_of
from .table import Line, line_of

_PLACES = frozenset({"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking"})
_NOT_THE_USERS = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, __file__))


@dataclass(frozen=True)
class Refusal:
    """A node that gradc does not take.

    :param op: the overload's name.
    :param reason: why, in words.
    :param where: the path of the module that called it, "" if unknown.
    :param node: its name in the graph.
    :param by_choice: gradc could take it.
    """

    op: str
    reason: str
    where: str
    node: str
    by_choice: bool = False

    def __str__(self) -> str:
        return f"{self.op} ({self.node}{f' in {self.where}' if self.where else ''}): {self.reason}"


@dataclass
class Translation:
    """What the nodes of a torch graph are in gradc.

    :ivar values: a node, a tuple of nodes, a size or a number for each torch node that was translated.
    :ivar refused: why each of the others was not.
    """

    facts: tuple[Assumption, ...] = ()
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    refused: dict[torch.fx.Node, Refusal] = field(default_factory=dict)
    notes: dict[Node, Note] = field(default_factory=dict)
    defaults: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    captured: list[Node] = field(default_factory=list)
    _at: torch.fx.Node | None = None

    def input(self, node: torch.fx.Node, name: str) -> Node:
        """The torch node as an input of the graph, of the type of its value."""
        made = input_node(check_name(name), type_of(node.meta["val"]))
        self.values[node] = made
        return made

    def translate(self, node: torch.fx.Node) -> None:
        """Fill in ``values`` or ``refused`` for a call."""
        self._at = node
        try:
            with assuming(self.facts):
                self.values[node] = self._translated(node)
        except GradcError as error:
            self.refused[node] = refusal(node, str(error).splitlines()[0])
        except RecursionError:
            self.refused[node] = refusal(node, "it is nested too deep")
        except Exception as error:  # a defect of a line is no reason to end the user's compilation
            self.refused[node] = refusal(node, f"a defect of gradc's line for it: {type(error).__name__}: {error}")
        finally:
            self._at = None

    def __enter__(self) -> Translation:
        """Notes where values come from, and takes in large arrays as inputs with defaults."""
        CAPTURE.append(self._capture)
        self._listening = listening(self._heard)
        self._listening.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._listening.__exit__(*exc)
        CAPTURE.pop()

    # -- one node ------------------------------------------------------------------------------------------------------

    def _translated(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt):  # sizes are known by their expressions
            return size_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise Unsupported(f"a number that depends on sizes: {value}")
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        line = line_of(node.target)
        if line is None:
            if node.target is custom_gradient:
                raise Unsupported(REASON)
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise Unsupported("it draws random numbers: torch draws those of eager mode")
            raise Unsupported("gradc's table has no line for it")
        devices = sorted({str(device) for device in _devices(node)})
        if len(devices) > 1:
            raise Unsupported(f"its tensors lie on {' and '.join(devices)}")
        args = tuple(self._argument(a) for a in node.args)
        kwargs = {k: self._argument(a) for k, a in node.kwargs.items() if k not in _PLACES}
        wide = line.promotion == "opmath" and _made_with_numbers(node)
        result = line.function(*_promoted(line, node, args, wide), **kwargs)
        return self._checked(node, converted(result, dtype_of(node.meta["val"].dtype)) if wide else result)

    def _argument(self, argument: Any) -> Any:
        """An argument as the table's functions take it."""
        match argument:
            case torch.fx.Node():
                if isinstance(argument.meta.get("val"), int | torch.SymInt):
                    return size_of(argument.meta["val"])
                if argument not in self.values:
                    raise Unsupported("an operand is no tensor that gradc has")
                return self.values[argument]
            case list() | tuple():
                return tuple(self._argument(a) for a in argument)
            case torch.dtype():
                return dtype_of(argument)
            case torch.SymInt():
                return size_of(argument)
            case torch.device() | torch.layout() | torch.memory_format():
                return None
            case complex():
                raise Unsupported(f"the complex number {argument}")
        return argument

    def _checked(self, node: torch.fx.Node, result: Any) -> Any:
        """The result, its type held against torch's: a float that is wider than torch's is rounded to that."""
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            read = [user.args[1] for user in node.users if user.target is operator.getitem]
            missing = [i for i in read if i >= len(result)]
            if missing:
                raise Unsupported(f"its result {missing[0]}")
            return tuple(_as_torch_says(*pair) for pair in zip(result, value, strict=False))
        return _as_torch_says(result, value)

    # -- notes ---------------------------------------------------------------------------------------------------------

    def _heard(self, node: Node) -> None:
        if node not in self.notes and self._at is not None:
            where, code = _source(self._at)
            self.notes[node] = Note("", where, "/".join(scope_of(self._at)), code=code)

    def _capture(self, array: np.ndarray[Any, Any]) -> Node:
        made = input_node(f"captured{len(self.captured)}", typeof(array))
        self.captured.append(made)
        self.defaults[str(made.attrs["name"])] = array
        return made


def _as_torch_says(made: Node, expected: torch.Tensor) -> Node:
    wanted = type_of(expected)
    floats = made.dtype.is_float and wanted.dtype.is_float
    rounded = converted(made, wanted.dtype) if floats and made.dtype.bits > wanted.dtype.bits else made
    if rounded.dtype is not wanted.dtype or not _same_shape(made.type, wanted):
        raise Unsupported(f"gradc says that its type is {made.type}, torch {wanted}")
    return rounded


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The traced value of a node: a tensor, or those of a tuple; none of a size."""
    value = node.meta.get("val")
    several = value if isinstance(value, tuple | list) else (value,)
    return [v for v in several if isinstance(v, torch.Tensor)]


def _devices(node: torch.fx.Node) -> set[torch.device]:
    """Where a call's operands and results lie; of operands without an axis on the CPU, which torch takes beside those
    of any device, nothing is said.
    """
    operands = [v for operand in node.all_input_nodes for v in tensors_of(operand)]
    return {v.device for v in operands if v.ndim or v.device.type != "cpu"} | {v.device for v in tensors_of(node)}


def _same_shape(made: Type, wanted: Type) -> bool:
    return made.rank == wanted.rank and all(same(a, b) for a, b in zip(made.shape, wanted.shape, strict=True))


def _made_with_numbers(node: torch.fx.Node) -> bool:
    """Whether a result of 16 bits has numbers, or scalar tensors of a wider float, among its operands."""
    if node.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        return False
    values = [a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in (*node.args, *node.kwargs.values())]
    return any(
        (isinstance(v, float | int) and not isinstance(v, bool))
        or (isinstance(v, torch.Tensor) and not v.ndim and v.dtype.itemsize > 2)
        for v in values
    )


def _promoted(line: Line, node: torch.fx.Node, args: tuple[Any, ...], wide: bool) -> tuple[Any, ...]:
    """The operands cast as the line says; masks of ``where`` stay.

    :param wide: whether an op of 16-bit floats takes them as f32.
    """
    if not line.promotion:
        return args
    if wide:
        dtype = F32
    elif line.promotion in ("result", "opmath"):
        dtype = dtype_of(node.meta["val"].dtype)
    else:
        operands = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args[:2]]
        numbers = [int(a) if isinstance(a, torch.SymInt) else a for a in operands]
        dtype = dtype_of(torch.result_type(*numbers))
    first = 1 if line.key.startswith("aten.where") else 0
    number = float if dtype.is_float else lambda x: x
    args = tuple(
        [converted(x, dtype) for x in a]
        if isinstance(a, list | tuple) and a and all(isinstance(x, Node) for x in a)
        else a
        for a in args
    )
    return tuple(
        converted(a, dtype)
        if isinstance(a, Node) and i >= first
        else number(a)
        if isinstance(a, int) and not isinstance(a, bool) and line.promotion == "operands"
        else a
        for i, a in enumerate(args)
    )


def refusal(node: torch.fx.Node, reason: str, by_choice: bool = False) -> Refusal:
    op = "torch.autograd.Function" if node.target is custom_gradient else str(node.target)
    return Refusal(op, reason, ".".join(scope_of(node)), node.name, by_choice)


def scope_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The path of the module that made a value: ``("layers", "0", "attention")``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(each[0]) for each in reversed(stack.values()) if each[0]), "")
    path = re.sub(r"L\['\w+'\]\.?|\._modules|_parameters|\['|'\]|\[|\]", lambda m: "" if "L[" in m[0] else ".", path)
    return tuple(word for word in path.split(".") if word.isidentifier() or word.isdigit())


def _source(node: torch.fx.Node) -> tuple[str, str]:
    """``model.py:12``, the innermost line of the user's program, and its text."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    theirs = [(path, line) for path, line in places if not path.startswith(_NOT_THE_USERS)]
    if not theirs:
        return "", ""
    path, line = theirs[-1]
    return f"{os.path.basename(path)}:{line}", linecache.getline(path, int(line)).strip()


# -- graphs ------------------------------------------------------------------------------------------------------------


def graph_of(
    nodes: Iterable[torch.fx.Node],
    inputs: Mapping[torch.fx.Node, str],
    outputs: Sequence[tuple[str, torch.fx.Node]],
    name: str,
    merged: Mapping[torch.fx.Node, torch.fx.Node] | None = None,
    ranges: Mapping[Any, Any] | None = None,
) -> tuple[Graph, list[Refusal]]:
    """The graph that computes ``outputs`` by these nodes, in their order, from inputs of these names.

    :param merged: placeholders that hold the memory of another, each with that other.
    :param ranges: what the program promises of its symbols, where it does.
    :return: the graph, and what was refused: with anything refused there are no outputs.
    """
    translation = Translation(assumptions((node.meta["val"] for node in inputs), ranges))
    with translation:
        made = [translation.input(node, given) for node, given in inputs.items()]
        for copy, original in (merged or {}).items():
            translation.values[copy] = translation.values[original]
        for node in nodes:
            if all(o not in translation.refused for o in node.all_input_nodes):
                translation.translate(node)
            else:  # reported for its operand; its own line is asked for, too
                _translate_alone(translation, node)
        if translation.refused:
            return Graph(name, tuple(made), ()), [r for r in translation.refused.values() if r.reason]
        results = [(each, translation.values[node]) for each, node in outputs]
    facts = list(translation.facts)
    facts += implied([node for _, node in results], facts)
    graph = Graph(
        name,
        (*made, *translation.captured),
        tuple(results),
        tuple(facts),
        notes=translation.notes,
        defaults=translation.defaults,
    )
    return graph, []


def _translate_alone(translation: Translation, node: torch.fx.Node) -> None:
    """Translate a node some of whose operands were refused, on inputs of their types: to find what else is missing."""
    for operand in node.all_input_nodes:
        if operand not in translation.values:
            value = operand.meta.get("val")
            if isinstance(value, torch.Tensor):
                try:
                    translation.input(operand, f"refused_{operand.name}")
                except GradcError:
                    translation.refused[node] = refusal(node, "")
                    return
            else:
                translation.refused[node] = refusal(node, "")
                return
    translation.translate(node)
