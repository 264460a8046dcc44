"""Programs under ASan and UBSan on hostile data: the samples of every op, and texts that still verify after mutation,
against the interpreter.

A seed is one graph (or its joint graph, or a module of both), one set of options, and several sizes, each with three
kinds of data: ``plain`` small dyadic numbers, compared as :mod:`.bits` compares; ``special`` with NaN, inf and indices
out of range, compared by their places where no rule may change them (numerics="strict"); ``extreme``, the largest,
smallest and subnormal numbers, which must only run. Inputs come strided, reversed, misaligned and read-only.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import sanitize
from .campaign import Campaign, Options, Outcome

SIZES = (0, 1, 2, 3, 5, 17, 33, 49)
MOST = 1 << 18  # elements of one value
KINDS = ("plain", "special", "extreme")


def attempt(seed: int, options: Options) -> Outcome:
    sanitize.install()
    from gradc.errors import GradcError

    choose = random.Random(seed)
    graph = _graph(seed, choose)
    if graph is None:
        return Outcome("typed", counts={"texts refused": 1})
    graph, wrt, chosen, bindings = _drawn(graph, choose)
    head = f"seed {seed}: wrt={wrt} {chosen} sizes={bindings}\n{graph}"
    sanitize.announce(head, " ".join(sorted({n.op.name for n in graph.nodes} - {"input"})[:6]))
    check = _Check(graph, wrt, seed)
    try:
        with sanitize.uncached():
            check.run(chosen, bindings)
    except GradcError as error:
        return Outcome("typed", f"{head}\n{error}", counts={"graphs refused": 1})
    counts = {"graphs": 1, "calls": check.calls, "calls refused": check.refused, "calls compared": check.compared}
    if check.found:
        verdict = "untyped" if any(f.startswith("untyped") for f in check.found) else "wrong"
        return Outcome(verdict, "\n".join((head, *check.found[:4])), check.kind, counts)
    return Outcome("right", counts=counts)


def _graph(seed: int, choose: random.Random) -> Any:
    """A sample of the registry, or a text that still parses and verifies after mutation; None where none of some
    does.
    """
    from gradc.errors import GradcError
    from gradc.ir.text import parse
    from gradc.ir.verify import verify

    from .corpus import sources
    from .text import mutated

    graphs = [s for s in sources() if s.is_graph]
    if seed % 3 == 0:
        return parse(graphs[(seed // 3) * 7919 % len(graphs)].text)
    for _ in range(20):
        first, second = choose.choice(graphs), choose.choice(graphs)
        if choose.random() < 0.5:  # another float type throughout
            first_text = re.sub(r"\bf32\b", choose.choice(("f64", "bf16", "f16", "i32", "i8")), first.text)
        else:
            first_text = first.text
        text = mutated(choose, first_text, second.text)
        try:
            graph = parse(text)
            verify(graph)
        except GradcError:
            continue
        if text != first.text:
            return graph
    return None


def _drawn(graph: Any, choose: random.Random) -> tuple[Any, tuple[str, ...], dict[str, Any], list[dict[str, int]]]:
    """(graph, wrt, options of compile, sizes)."""
    from gradc.autodiff import differentiate
    from gradc.errors import GradcError

    floats = [n for n in graph.input_names if graph.input(n).dtype.has_tangent and graph.input(n).dtype.is_float]
    wrt: tuple[str, ...] = ()
    how = choose.choice(("graph", "joint", "module"))
    if how != "graph" and floats:
        try:
            joint = differentiate(graph, floats, unused="zeros")
            graph, wrt = (joint, ()) if how == "joint" else (graph, tuple(floats))
        except GradcError:
            pass
    chosen: dict[str, Any] = {"numerics": choose.choice(("real", "strict")), "fuse": choose.random() < 0.75}
    if wrt:
        chosen |= {"unused": "zeros", "save": choose.choice(("min-cut", "min-cut", "all", "none"))}
    bindings = []
    for _ in range(12):
        sizes = {d: choose.choice(SIZES) for d in graph.dims}
        if len(bindings) < 3 and sizes not in bindings and _small(graph, sizes):
            bindings.append(sizes)
    return graph, wrt, chosen, bindings


def _small(graph: Any, sizes: Mapping[str, int]) -> bool:
    from gradc.ir.dims import evaluate

    try:
        return all(0 <= evaluate(node.type.count, sizes) <= MOST for node in graph.nodes) and not any(
            fact.fails(sizes) for fact in graph.assumptions
        )
    except (ValueError, ArithmeticError):
        return False


# -- data --------------------------------------------------------------------------------------------------------------

SPECIAL = (np.nan, np.inf, -np.inf, -0.0)
EXTREME = (1.0, -1.0, 0.0, 3.4e38, -3.4e38, 1e-45, 1e-310, 1.7e308, 65504.0, 1e-8, 2.0**24 + 1, 0.5, -2.5)


def arrays(graph: Any, sizes: Mapping[str, int], kind: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng([seed, KINDS.index(kind), *sizes.values()])
    return {name: _laid(rng, _values(rng, graph.input(name), sizes, kind)) for name in graph.input_names}


def _values(rng: np.random.Generator, node: Any, sizes: Mapping[str, int], kind: str) -> np.ndarray[Any, Any]:
    shape, dtype = node.type.concrete(sizes), node.dtype
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_integer:
        low, high = dtype.range
        values = rng.integers(0, min(3, high), shape)
        if kind != "plain":
            wild = np.array(
                [low, high, max(low, -1), min(high, 3), min(high, 4), min(high, 2**31), max(low, -(2**31))],
                dtype=object,
            )
            values = np.where(rng.random(shape) < (0.05 if kind == "special" else 0.5), rng.choice(wild, shape), values)
        return np.asarray(values).astype(dtype.np)
    values = rng.integers(-8, 9, shape) / 4.0
    if kind == "special":
        values = np.where(rng.random(shape) < 0.1, rng.choice(SPECIAL, shape), values)
    if kind == "extreme":
        values = rng.choice(EXTREME, shape)
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(dtype.np)


def _laid(rng: np.random.Generator, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values, laid in memory in one of many ways."""
    match rng.integers(8):
        case 0:
            return np.asarray(array[..., ::-1].copy()[..., ::-1]) if array.ndim else array
        case 1:
            return np.repeat(array, 2, axis=0)[::2] if array.ndim else array
        case 2:
            memory = np.empty(array.nbytes + 1, np.uint8)
            view = memory[1:].view(array.dtype).reshape(array.shape) if array.dtype.kind != "V" else array
            if view is not array:
                view[...] = array
            return view
        case 3:
            return np.asfortranarray(array)
        case 4:
            array.flags.writeable = False
            return array
        case _:
            return array


# -- running -----------------------------------------------------------------------------------------------------------


class _Check:
    def __init__(self, graph: Any, wrt: tuple[str, ...], seed: int):
        from gradc.autodiff import differentiate

        self.graph, self.wrt, self.seed = graph, wrt, seed
        self.meaning = differentiate(graph, list(wrt), unused="zeros") if wrt else graph
        self.found: list[str] = []
        self.kind = ""
        self.calls = self.refused = self.compared = 0

    def run(self, chosen: dict[str, Any], bindings: list[dict[str, int]]) -> None:
        import gradc

        native, oracle = (gradc.compile(self.graph, wrt=self.wrt, target=t, **chosen) for t in ("cpu", "numpy"))
        for sizes in bindings:
            for kind in KINDS:
                given = arrays(self.meaning, sizes, kind, self.seed)
                place = f"{kind} {sizes}"
                print(f"-- {place}", file=sys.stderr, flush=True)
                self.calls += 1
                self.one(native, oracle, given, sizes, kind, chosen, place)

    def one(
        self,
        native: Any,
        oracle: Any,
        given: Mapping[str, Any],
        sizes: Mapping[str, int],
        kind: str,
        chosen: Mapping[str, Any],
        place: str,
    ) -> None:
        from gradc.errors import GradcError, IndexOutOfRange, NotAscending

        got, want = (_result(lambda m=m: self.called(m, given, sizes)) for m in (native, oracle))
        if isinstance(got, Exception):
            self.refused += 1
            if not isinstance(got, GradcError):
                return self.fail("untyped", f"{place}: {type(got).__name__}: {got}", type(got).__name__)
            if type(got) is not type(want) or (
                isinstance(got, IndexOutOfRange | NotAscending)
                and (got.position, got.value) != (want.position, want.value)
            ):
                return self.fail("wrong", f"{place}: {type(got).__name__}: {got}; numpy: {want!r:.300}", "error")
            return None
        if isinstance(want, Exception):
            if isinstance(want, GradcError):
                return self.fail("wrong", f"{place}: a value; numpy: {type(want).__name__}: {want}", "no error")
            return None  # an untyped error of the interpreter is for the campaigns that run it
        for name, array in want.items():
            if got[name].shape != array.shape or got[name].dtype != array.dtype:
                return self.fail(
                    "wrong",
                    f"{place}: {name} is {got[name].dtype}{got[name].shape}, numpy's {array.dtype}{array.shape}",
                    "type",
                )
        if kind == "plain":
            self.compared += 1
            return self.plain(got, given, sizes, place)
        if (
            kind == "special" and chosen["numerics"] == "strict" and not self.wrt and self.seed % 3 == 0
        ):  # of several ops, some round before a bound
            self.compared += 1
            return self.special(got, want, place)
        return None

    def called(self, module: Any, given: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        if not self.wrt:
            return dict(module.forward.run(given, dims=sizes))
        values, residuals = module.forward({name: given[name] for name in self.graph.input_names}, dims=sizes)
        found = dict(values) if isinstance(values, dict) else {self.graph.output_names[0]: values}
        cotangents, gradients = module.joint_names
        return found | {
            gradients[name]: value
            for name, value in module.backward(
                residuals, **{name: given[cotangents[name]] for name in residuals.cotangent_types}, dims=sizes
            ).items()
        }

    def plain(self, got: Mapping[str, Any], given: Mapping[str, Any], sizes: Mapping[str, int], place: str) -> None:
        from .bits import Expected

        try:
            expected = Expected(self.meaning, given, sizes)
        except Exception:  # what the interpreter makes of strange graphs is for the campaigns that run it
            return
        wrong = expected.differs(got)
        if wrong:
            self.fail("wrong", f"{place}: {wrong}"[:1500], "value")

    def special(self, got: Mapping[str, Any], want: Mapping[str, Any], place: str) -> None:
        for name, array in want.items():
            a, b = got[name].astype(np.float64), array.astype(np.float64)
            if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(
                np.where(np.isinf(a), a, 0), np.where(np.isinf(b), b, 0)
            ):
                return self.fail("wrong", f"{place}: {name}: NaN and inf stand elsewhere\n{a}\n{b}"[:3000], "special")
        return None

    def fail(self, verdict: str, text: str, kind: str) -> None:
        self.found.append(f"{verdict}: {text}")
        self.kind = self.kind or f"{kind} {' '.join(sorted({n.op.name for n in self.graph.nodes} - {'input'})[:4])}"


def _result(call: Any) -> Any:
    with np.errstate(all="ignore"):
        try:
            return call()
        except Exception as error:
            return error


CAMPAIGN = Campaign("survivors", attempt, limit=180.0, ci=2, environment=sanitize.environment, missing=sanitize.missing)
