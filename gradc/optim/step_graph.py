"""step_graph: a loss, the parameters and an optimizer -> one graph of the loss, its gradients and the update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..autodiff import differentiate, joint_names
from ..errors import InvalidProblem, Unsupported
from ..ir.dims import assuming
from ..ir.graph import SPARSE_PARTS, Graph, input_node, name_of, parts_of
from ..ir.lexer import suffixed
from ..ir.node import Node, Note, made_by
from ..ir.types import F32, F64, I64, Type
from ..ops import gather, minimum, put_rows, sqrt, sum
from ..ops.indexing.sparse import coalesce_by_sorting
from ..ops.rules import converted, full
from ..passes.graph.check_indices import name_readers
from ..passes.graph.push_gathers import push_gathers
from ..passes.graph.push_slices import push_slices
from ..passes.graph.sparse_rows import sparse_rows
from ..passes.graph.static_indices import static_indices
from .optimizer import STATE, STEP, Now, Optimizer, state_name

LR, MASTER = "lr", "master"
ROWS, VALUES, _ = SPARSE_PARTS


def step_graph(
    graph: Graph,
    update: Mapping[str, Optimizer],
    *,
    wrt: Sequence[str] = (),
    sparse: Sequence[str] = (),
    clip_norm: float | None = None,
    master_weights: bool = False,
    numerics: str = "real",
    unused: str = "error",
    loss: bool = True,
) -> Graph:
    """The graph of a step.  Inputs: those of ``graph``, ``lr``: f64[] with the optimizer's as default, ``state.step``:
    i64[], and ``state.SLOT.NAME`` for each parameter.  Outputs: those of ``graph``, and under the names of the inputs
    the parameters and the state after the step.  Of several optimizers each has a rate of its own, ``lr.adam``.

    :param update: the optimizer of each parameter.
    :param wrt: inputs whose gradients are outputs, too, ``d.NAME``.
    :param sparse: parameters that are updated where an index names a row, and nowhere else.
    :param clip_norm: the largest norm of all gradients together; they are scaled as by
        :func:`torch.nn.utils.clip_grad_norm_`.
    :param master_weights: keeps 16-bit parameters in f32, too: ``state.master.NAME``.
    :param unused: as :func:`gradc.autodiff.differentiate` takes it.
    :param loss: False: the outputs of ``graph`` need not be a loss.  Their cotangents are inputs, called as
        :func:`gradc.autodiff.joint_names` says, and they are no outputs.
    :raises InvalidProblem, NotDifferentiable, Unsupported: there is no such step.
    """
    _check(graph, update, sparse, loss)
    graph = push_gathers(static_indices(name_readers(graph)), numerics=numerics)
    graph = _with_free_outputs(push_slices(graph, numerics=numerics), tuple(update))
    by = (*update, *(name for name in wrt if name not in update))
    joint = _gradients(graph, by, sparse, unused, loss)
    names, notes = joint_names(graph, by)[1], dict(joint.notes)
    rates = rates_of(update.values())
    lr = {each: input_node(rate, Type(F64)) for each, rate in rates.items()}
    count = input_node(STEP, Type(I64))
    inputs, outputs = [*joint.inputs, *lr.values(), count], list(joint.outputs[: len(graph.outputs) if loss else 0])
    gradients = {n: joint.output(f"{names[n]}.{VALUES}" if n in sparse else names[n]) for n in by}
    with assuming(joint.assumptions), made_by("step"):
        after = count + 1
        made = converted(after, F64)
        scaled = gradients if clip_norm is None else _clipped(gradients, clip_norm)
        outputs += ((names[name], scaled[name]) for name in by if name not in update)
        for name in _deepest_first(joint, {name: gradients[name] for name in update}):
            now = Now(lr[update[name]], made, after, by.index(name))
            parameter, optimizer = graph.input(name), update[name]
            slots = slots_of(optimizer, parameter.type, master_weights)
            kept = {slot: input_node(state_name(slot, name), type_) for slot, type_ in slots.items()}
            inputs += kept.values()
            rows = joint.output(f"{names[name]}.{ROWS}") if name in sparse else None
            with parts_of(Note(scope=f"{type(optimizer).__name__}/{name}"), notes):
                new, state = _updated(optimizer, parameter, scaled[name], kept, now, rows)
            outputs += [(name, new), *((state_name(slot, name), state[slot]) for slot in slots)]
        if update:
            outputs.append((STEP, after))  # the last, for others read what it overwrites
    defaults = {**graph.defaults, **{rate: np.asarray(each.lr, np.float64) for each, rate in rates.items()}}
    name = suffixed(graph.name, "_step")
    return Graph(name, tuple(inputs), tuple(outputs), graph.assumptions, notes, defaults).numbered()


def rates_of(optimizers: Collection[Optimizer]) -> dict[Optimizer, str]:
    """The name of the learning rate of each optimizer."""
    own = list(dict.fromkeys(optimizers))
    if len(own) == 1:
        return {own[0]: LR}
    rates: dict[Optimizer, str] = {}
    for each in own:
        rates[each] = name_of(f"{LR}.{type(each).__name__}", lambda word: word in rates.values())
    return rates


def _deepest_first(joint: Graph, gradients: Mapping[str, Node]) -> list[str]:
    """The names in an order of steps in which more of them can write over their parameters: the gradient of a layer
    before reads the parameters of those after it.
    """
    depth: dict[Node, int] = {}
    for node in joint.nodes:
        depth[node] = 1 + max((depth[operand] for operand in node.operands), default=0)
    return sorted(gradients, key=lambda name: -depth[gradients[name]])


def slots_of(optimizer: Optimizer, parameter: Type, master_weights: bool) -> dict[str, Type]:
    """The types of a parameter's state."""
    wide = parameter.dtype.compute
    own = {name: Type(wide, slot.shape) for name, slot in optimizer.slots(parameter).items()}
    return own | ({MASTER: parameter.with_dtype(wide)} if master_weights and parameter.dtype is not wide else {})


def check_learned(name: str, parameter: Type, optimizer: Optimizer) -> None:
    """InvalidProblem for a parameter of a dtype that has no gradient."""
    if not parameter.dtype.has_tangent:
        raise InvalidProblem(f"{name} is {parameter}: {type(optimizer).__name__} updates f16, bf16, f32 and f64")


def _check(graph: Graph, update: Mapping[str, Optimizer], sparse: Sequence[str], loss: bool) -> None:
    """InvalidProblem or Unsupported where there is no such step, but for what differentiation says itself."""
    scalars = [n for n, node in graph.outputs if node.dtype.is_float]
    if loss and (len(scalars) != 1 or graph.output(scalars[0]).type.count != 1):
        raise InvalidProblem(
            f"a step needs one scalar float output, the loss; {graph.name} has"
            f" {', '.join(f'{n}: {v.type}' for n, v in graph.outputs)}"
        )
    if not update and loss:
        raise InvalidProblem(f"a step of {graph.name} by no parameter: wrt names what is learned")
    for taken in graph.input_names:
        if taken.split(".")[0] in (LR, STATE):
            raise InvalidProblem(f"{graph.name} has an input {taken!r}, which is a step's own; give it another name")
    for each, optimizer in update.items():
        if each in graph.input_names:
            check_learned(each, graph.input(each).type, optimizer)
    for each in sparse:
        if each not in update:
            raise InvalidProblem(f"sparse names {each!r}, which is not learned: {', '.join(update)}")
        if not update[each].by_rows:
            name = type(update[each]).__name__
            raise Unsupported(f"{name} of rows of {each!r}: a row's step depends on all others; leave out sparse")


def _with_free_outputs(graph: Graph, wrt: Sequence[str]) -> Graph:
    """The graph with other names, of one word, for outputs that are called like what a step gives."""
    own = (STATE, *wrt)
    taken = lambda name: name in wrt or any(name.startswith(f"{each}.") for each in own)
    outputs = {name: node for name, node in graph.outputs if not taken(name)}
    free = lambda name: name_of(name.replace(".", "_"), lambda word: word in outputs or taken(word))
    names = {}
    for name, node in graph.outputs:
        names[name] = free(name) if taken(name) else name
        outputs[names[name]] = node
    return graph.with_outputs((names[name], node) for name, node in graph.outputs)


def _gradients(graph: Graph, wrt: Sequence[str], sparse: Sequence[str], unused: str, loss: bool) -> Graph:
    """The joint graph of values and gradients, with 1 for the cotangent of the loss, if it is one."""
    cotangents, gradients = joint_names(graph, wrt)
    joint = differentiate(graph, wrt, unused=unused)
    if sparse:
        names = [gradients[name] for name in sparse]
        joint = sparse_rows(joint, names=names, coalesce=coalesce_by_sorting)
    if not loss:
        return joint
    own = {joint.input(name) for name in cotangents.values()}
    joint = joint.rewrite(lambda node, operands: full(1, node) if node in own else None)
    return replace(joint, inputs=graph.inputs)


def _clipped(gradients: Mapping[str, Node], most: float) -> dict[str, Node]:
    """The gradients, scaled to a norm of ``most`` together if it is larger, in their compute dtypes."""
    wide = {name: converted(g, g.dtype.compute) for name, g in gradients.items()}
    squares = [sum(g * g) for g in wide.values()]
    dtype = F64 if any(s.dtype is F64 for s in squares) else F32
    total = converted(squares[0], dtype)
    for square in squares[1:]:
        total = total + converted(square, dtype)
    share = minimum(most / (sqrt(total) + 1e-6), 1.0)
    return {name: g * converted(share, g.dtype) for name, g in wide.items()}


def _updated(
    optimizer: Optimizer, parameter: Node, gradient: Node, state: Mapping[str, Node], now: Now, rows: Node | None
) -> tuple[Node, Mapping[str, Node]]:
    """A parameter and its state after a step, of its master weights if it has them.

    :param rows: of which the gradient is; the others stay.  None: all.
    """
    if rows is not None:  # those of no index are outside, and neither read nor written
        of = lambda x: gather(x, rows, axis=0, oob="skip")
        own = {slot: of(x) for slot, x in state.items()}
        new, after = _updated(optimizer, of(parameter), gradient, own, now, None)
        put = put_rows.plain  # coalesced: each row is there once
        return put(parameter, rows, new), {slot: put(x, rows, after[slot]) for slot, x in state.items()}
    if MASTER not in state:
        return optimizer.apply(parameter, gradient, state, now)
    new, kept = optimizer.apply(state[MASTER], gradient, state, now)
    return converted(new, parameter.dtype), {**kept, MASTER: new}
