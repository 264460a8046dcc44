"""Every value of every stage, and every kernel, knows the user's line that it is for, and who made it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import gradc
from gradc import ops
from gradc.ir.graph import Graph
from gradc.ir.kernel import Program
from gradc.ir.node import Node, Note
from gradc.ir.pattern import Var
from gradc.ir.text import parse
from gradc.passes.graph.simplify import BITS, simplify


def loss(x: Any, w: Any, b: Any, q: Any, s: Any, t: Any) -> Any:
    with gradc.scope("mlp"):
        hidden = ops.gelu(ops.linear(x, w, b))
    logits = ops.linear(hidden, ops.dequantize(q, s, block=(1, 32)))
    picked = ops.gather(logits, t, axis=0)
    return ops.cross_entropy(picked, t)


FIRST = loss.__code__.co_firstlineno
TYPES = {"x": "f32[N,8]", "w": "f32[32,8]", "b": "f32[32]", "q": "i8[10,32]", "s": "f32[10,1]", "t": "i64[M]"}


def line(after: int) -> str:
    return f"test_provenance.py:{FIRST + after}"


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(loss, **TYPES), wrt=["w", "b", "s"], target="numpy")


def test_every_value_and_every_step_has_a_line(module: gradc.Module) -> None:
    seen = set()
    for stage in module.stages:
        if isinstance(stage.result, Graph):
            nodes = [n for n in stage.result.nodes if n.op.name != "input"]
            assert not [n for n in nodes if n not in stage.result.notes or not stage.result.notes[n].where], stage.name
            seen |= {stage.result.notes[n].where for n in nodes}
        else:
            assert isinstance(stage.result, Program)
            without = [step for step in stage.result.steps if not step.note.where]  # type: ignore[union-attr]
            assert not without, stage.name
    assert {line(2), line(3), line(4), line(5)} <= seen
    backward = module.stages["backward.partition"].result
    assert {n.code for n in backward.notes.values() if n.where == line(2)} == {"hidden = ops.gelu(ops.linear(x, w, b))"}


def _of(graph: Graph, op: str) -> list[Node]:
    return [n for n in graph.nodes if n.op.name == op]


def test_a_gradient_has_its_primals_line_and_scope(module: gradc.Module) -> None:
    joint = module.stages["joint"].result
    (slope,) = _of(joint, "gelu_derivative")
    note = joint.notes[slope]
    assert (note.where, note.scope, note.composite, note.by) == (line(2), "mlp", "gelu_grad", "differentiate: gelu")
    softmax = joint.notes[_of(joint, "softmax")[0]]
    assert (softmax.where, softmax.scope, softmax.by) == (line(5), "", "differentiate: cross_entropy")
    # the user's own, and its twin of the opened linear, which decompose makes one with it
    assert sorted(joint.notes[n].by for n in _of(joint, "gelu")) == ["", "differentiate"]


def test_what_a_rule_makes_is_the_rules() -> None:
    graph = gradc.trace(lambda x, y: ops.reciprocal(x) * y + ops.neg(ops.neg(y)), x="f32[N]", y="f32[N]")
    result = simplify(graph)
    (quotient,) = _of(result, "div")
    assert result.notes[quotient].by == "simplify: (reciprocal(x) * y) -> quotient"
    (total,) = _of(result, "add")
    assert result.notes[total].by == "", "the same op on other operands is still the user's"
    assert result.notes[quotient].where == result.notes[total].where != ""


def test_rules_print_as_algebra() -> None:
    printed = [str(rule) for rule in BITS]
    assert printed[:3] == ["(x * 1) -> x", "(1 * x) -> x", "(x / 1) -> x"] and len(set(printed)) == len(printed)
    assert "neg(neg(x)) -> x" in printed and not [text for text in printed if "lambda" in text or "object" in text]
    assert str(Var("x") + 2.5) == "(x + 2.5)"


def test_a_name_stays_where_values_become_one() -> None:
    def named(x: Any) -> Any:
        kept = ops.exp(x)
        return kept + ops.exp(ops.stop_gradient(x))

    graph = gradc.trace(named, x="f32[N]")
    result = simplify(graph)
    (exp,) = _of(result, "exp")
    assert result.notes[exp].name == "kept"


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_value_keeps_its_number(module: gradc.Module) -> None:
    last: Graph | None = None
    new, kept = 0, 0
    for stage in module.stages:
        if not isinstance(stage.result, Graph):
            continue
        if last is not None:
            for node in set(stage.result.nodes) & set(last.nodes):
                name = stage.result.value_names[node]
                if name != last.value_names[node]:  # two values became one, and the other one was the user's
                    (other,) = (n for n, old in last.value_names.items() if old == name)
                    assert other not in set(stage.result.nodes)
                    assert last.notes[other].by == "" and last.notes[node].by != ""
                kept += 1
            names = set(last.value_names.values())
            known = set(last.nodes)
            for node, name in stage.result.value_names.items():
                if node in known or node.op.name == "input":
                    continue
                if name in names:  # the same value, of other operands or otherwise
                    (old,) = (n for n, other in last.value_names.items() if other == name)
                    assert old.type == node.type
                else:
                    assert stage.result.notes[node].by, "what has a new number was made by a pass"
                    new += 1
        assert len(set(stage.result.value_names.values())) == len(stage.result.nodes)
        last = stage.result
    assert new > 20 and kept > 100


def test_numbers_are_read_back() -> None:
    text = """graph @g(%x: f32[4]) {
  %7: f32[4] = exp %x
  %3: f32[4] = neg %7
  %sum: f32[4] = add %7, %3
  return y=%sum
}"""
    graph = parse(text)
    assert str(graph) == text.replace("%sum", "%8")
    assert str(parse(str(graph))) == str(graph)
    assert str(graph.with_outputs([("y", graph.nodes[1])])).splitlines()[1] == "  %7: f32[4] = exp %x"


def test_statements_know_their_values(module: gradc.Module) -> None:
    graphs = [stage.result for stage in module.stages if isinstance(stage.result, Graph)]
    for direction, executable in module.executables.items():
        graph = module.stages[f"{direction}.partition"].result
        known = {note.id: node for node, note in graph.notes.items() if node in set(graph.nodes)}  # residuals, too
        of = [s.of for kernel in executable.program.kernels for s in kernel.body if s.of is not None]
        # scheduling clamps indices, and makes values for that which no stage shows
        made = set(of) - set(known)
        assert len(made) < 3 and not made & {m for stage in graphs for m in stage.numbers.values()}
        found = [
            s for kernel in executable.program.kernels for s in kernel.body if s.op in ("normal_cdf", "gelu_derivative")
        ]
        again = ["gelu_derivative"] if direction == "backward" else []  # which computes gelu once more
        assert [s.op for s in found] == [*again, "normal_cdf"]
        assert all(known[s.of].op.name == s.op for s in found)


def test_two_values_never_share_a_number() -> None:
    graph = parse("graph @g(%x: f32[4]) {\n%0: f32[4] = exp %x\n%1: f32[4] = neg %0\nreturn y=%1\n}")
    (exp, neg) = graph.nodes[1:]
    twice = dataclasses.replace(graph, notes={exp: Note(id=5), neg: Note(id=5)})
    assert list(twice.value_names.values()) == ["%x", "%5", "%6"]
    assert twice.numbered().notes[neg].id == 6 and twice.numbered().numbered() is not twice
    assert (ready := twice.numbered()).numbered() is ready
