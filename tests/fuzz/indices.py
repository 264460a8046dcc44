"""Indices outside their table: every op that indexes x how the index is made x a bad value x how the program is called.

A seed is one program: an op, its ``oob``, a way to make the index, and one of the dearer calls.  It runs under
sanitizers with every bad value (option ``target=cuda-sim``: in the simulator with its checks).  The oracle is target
numpy: where that raises IndexOutOfRange, so must the compiled program, with the same op, position, value and bound;
else the values agree.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import sanitize
from .campaign import Campaign, Options, Outcome

BOUND = 5
BAD = (-1, BOUND, BOUND + 1, 2**31, 2**31 - 1, -(2**63), 2**63 - 1, 10**9)
OOB = ("error", "skip", "clamp", "wrap")
ROWS = (12,)
ALONG = (12, 4)


@dataclass(frozen=True)
class Indexing:
    """A program with an index in it.

    :param shape: of the index.
    :param others: types of the other inputs.
    :param make: ``(index, others, oob) -> value``.
    :param oob: what its attribute may be.
    :param ascending: the index is offsets: 0 first, never decreasing.
    :param sparse: an input whose gradient may be sparse.
    """

    name: str
    shape: tuple[int, ...]
    others: Mapping[str, str]
    make: Callable[..., Any]
    oob: tuple[str, ...] = OOB
    ascending: bool = False
    sparse: str = ""


@functools.cache
def indexings() -> tuple[Indexing, ...]:
    from gradc import ops

    table, rows, along = {"x": "f32[5,4]"}, {"x": "f32[12,4]"}, {"x": "f32[12,4]"}
    found = [
        Indexing("gather", ROWS, table, lambda t, x, oob: ops.gather(x, t, axis=0, oob=oob), sparse="x"),
        Indexing("gather_1", ROWS, {"x": "f32[3,5,2]"}, lambda t, x, oob: ops.gather(x, t, axis=1, oob=oob)),
        Indexing("gather_last", ROWS, {"x": "f32[3,5]"}, lambda t, x, oob: ops.gather(x, t, axis=1, oob=oob)),
        Indexing(
            "index_select", ROWS, table, lambda t, x, oob: ops.index_select(x, index=t, dim=0, oob=oob), sparse="x"
        ),
        Indexing(
            "index_add",
            ROWS,
            {"x": "f32[5,4]", "s": "f32[12,4]"},
            lambda t, x, s, oob: ops.index_add(x, index=t, source=s, dim=0, oob=oob),
        ),
        Indexing("take_along_axis", ALONG, table, lambda t, x, oob: ops.take_along_axis(x, t, axis=0, oob=oob)),
        Indexing(
            "take_along_axis_1", ALONG, {"x": "f32[12,5]"}, lambda t, x, oob: ops.take_along_axis(x, t, axis=1, oob=oob)
        ),
        Indexing("scatter_add", ROWS, rows, lambda t, x, oob: ops.scatter_add(t, x, axis=0, size=BOUND, oob=oob)),
        Indexing(
            "scatter_add_1",
            ROWS,
            {"x": "f32[3,12,2]"},
            lambda t, x, oob: ops.scatter_add(t, x, axis=1, size=BOUND, oob=oob),
        ),
        Indexing(
            "scatter_add_padded",
            ROWS,
            rows,
            lambda t, x, oob: ops.scatter_add(t, x, axis=0, size=BOUND, oob=oob, padding_idx=2),
        ),
        *(
            Indexing(name, ALONG, along, lambda t, x, oob, op=name: getattr(ops, op)(t, x, axis=0, size=BOUND, oob=oob))
            for name in ("scatter_add_along_axis", "scatter_amax", "scatter_amin", "scatter_prod")
        ),
        *(
            Indexing(
                f"scatter_reduce_{how}",
                ALONG,
                {"x": "f32[5,4]", "s": "f32[12,4]"},
                lambda t, x, s, oob, how=how: ops.scatter_reduce(x, index=t, src=s, dim=0, reduce=how, oob=oob),
            )
            for how in ("sum", "mean", "amax", "amin", "prod")
        ),
        Indexing("embedding", ROWS, table, lambda t, x, oob: ops.embedding(t, x, oob=oob), sparse="x"),
        Indexing(
            "embedding_padded", ROWS, table, lambda t, x, oob: ops.embedding(t, x, oob=oob, padding_idx=1), sparse="x"
        ),
        Indexing(
            "embedding_by_freq",
            ROWS,
            table,
            lambda t, x, oob: ops.embedding(t, x, oob=oob, scale_grad_by_freq=True),
            sparse="x",
        ),
        Indexing(
            "embedding_bf16", ROWS, {"x": "bf16[5,33]"}, lambda t, x, oob: ops.embedding(t, x, oob=oob), sparse="x"
        ),
        Indexing("embedding_scalar", ROWS, {"x": "f32[5]"}, lambda t, x, oob: ops.gather(x, t, axis=0, oob=oob)),
        Indexing(
            "embedding_dequantized",
            ROWS,
            {"q": "i8[5,64]", "x": "f32[5,1]"},
            lambda t, q, x, oob: ops.embedding(t, ops.dequantize(q, x, block=(1, 64)), oob=oob),
        ),
        Indexing("embedding_renorm", ROWS, table, lambda t, x, oob: ops.embedding_renorm(x, t, max_norm=1.0, oob=oob)),
        *(
            Indexing(
                f"embedding_bag_{mode}",
                (6, 2),
                table,
                lambda t, x, oob, mode=mode: ops.embedding_bag(t, x, mode=mode, oob=oob),
                sparse="x",
            )
            for mode in ("sum", "mean", "max", "sqrtn")
        ),
        Indexing(
            "embedding_bag_weighted",
            (6, 2),
            {"x": "f32[5,4]", "w": "f32[6,2]"},
            lambda t, x, w, oob: ops.embedding_bag(t, x, per_sample_weights=w, mode="sum", oob=oob),
        ),
        Indexing(
            "embedding_bag_offsets",
            ROWS,
            {"x": "f32[5,4]", "o": "i64[3]"},
            lambda t, x, o, oob: ops.embedding_bag(t, x, o, mode="mean", padding_idx=1, oob=oob),
        ),
        Indexing(
            "segment_ids",
            (4,),
            {},
            lambda t, oob: ops.segment_ids(t, size=BOUND - 1, oob=oob),
            ("error", "skip"),
            ascending=True,
        ),
        Indexing("coalesce_rows", ROWS, {}, lambda t, oob: ops.coalesce_rows(t, size=BOUND, oob=oob)),
        Indexing(
            "coalesce_count", (3, 4), {}, lambda t, oob: ops.coalesce_count(t, size=BOUND, oob=oob, padding_idx=1)
        ),
        Indexing("coalesce_values", ROWS, rows, lambda t, x, oob: ops.coalesce_values(t, x, size=BOUND, oob=oob)),
        Indexing(
            "coalesce_values_2d",
            (3, 4),
            {"x": "f32[3,4,2]"},
            lambda t, x, oob: ops.coalesce_values(t, x, size=BOUND, oob=oob),
        ),
        *(
            Indexing(
                f"cross_entropy_{how}",
                ROWS,
                {"x": "f32[12,5]", "w": "f32[5]"},
                lambda t, x, w, oob, attrs=attrs: ops.cross_entropy(x, t, w, **attrs),
                ("error",),
            )
            for how, attrs in (
                ("weighted", {}),
                ("ignoring", {"ignore_index": 2}),
                ("smoothed", {"label_smoothing": 0.1, "reduction": "none"}),
            )
        ),
        Indexing("cross_entropy", ROWS, {"x": "f32[12,5]"}, lambda t, x, oob: ops.cross_entropy(x, t), ("error",)),
        Indexing(
            "cross_entropy_2d",
            (2, 6),
            {"x": "f32[2,5,6]"},
            lambda t, x, oob: ops.cross_entropy(x, t, ignore_index=1, reduction="sum"),
            ("error",),
        ),
        Indexing("gather_2d", (2, 6), {"x": "f32[2,3,5,5]"}, lambda t, x, oob: ops.gather_2d(x, t, t), ("skip",)),
        Indexing("gather_3d", (2, 6), {"x": "f32[2,3,5,5,5]"}, lambda t, x, oob: ops.gather_3d(x, t, t, t), ("skip",)),
        Indexing(
            "scatter_2d", (2, 6), {"x": "f32[2,3,6]"}, lambda t, x, oob: ops.scatter_2d(x, t, t, size=(5, 5)), ("skip",)
        ),
        Indexing(
            "scatter_3d",
            (2, 6),
            {"x": "f32[2,3,6]"},
            lambda t, x, oob: ops.scatter_3d(x, t, t, t, size=(5, 5, 5)),
            ("skip",),
        ),
        Indexing(
            "gather_of_gather",
            ROWS,
            {"x": "f32[5,4]", "p": "i64[5]"},
            lambda t, x, p, oob: ops.gather(x, ops.gather(p, t, axis=0, oob=oob), axis=0, oob=oob),
            sparse="x",
        ),
    ]
    return tuple(found)


def forms() -> dict[
    str, tuple[Callable[[tuple[int, ...]], str], Callable[[Any, tuple[int, ...]], Any], Callable[[int], int]]
]:
    """How an index is made: (type of the input, index of it, the input's value that gives an index)."""
    from gradc import ops

    text = lambda shape, dtype="i64": f"{dtype}[{','.join(map(str, shape))}]"
    same: Callable[[int], int] = lambda v: v
    return {
        "plain": (text, lambda t, s: t, same),
        "symbolic": (lambda s: text(("N", *s[1:])), lambda t, s: t, same),
        "i32": (lambda s: text(s, "i32"), lambda t, s: t, same),
        "reshape": (lambda s: text((2, int(np.prod(s)) // 2)), lambda t, s: ops.reshape(t, s), same),
        "transpose": (
            lambda s: text((2, int(np.prod(s)) // 2)),
            lambda t, s: ops.reshape(ops.transpose(t, (1, 0)), s),
            same,
        ),
        "where": (text, lambda t, s: ops.where(t != 3, t, 0 * t), same),
        "cast": (lambda s: text(s, "i32"), lambda t, s: ops.cast(t, "i64"), same),
        "plus_one": (text, lambda t, s: t + 1, lambda v: (v - 1 + 2**63) % 2**64 - 2**63),
        "summed": (lambda s: text((*s, 2)), lambda t, s: ops.sum(t, axis=-1), same),
        "gathered": (
            lambda s: text((int(np.prod(s)),)),
            lambda t, s: ops.gather(t, ops.reshape(ops.iota(shape=(int(np.prod(s)),)), s), axis=0),
            same,
        ),
        "minimum": (
            text,
            lambda t, s: ops.minimum(t, ops.reshape(ops.iota(shape=(int(np.prod(s)),)), s) + (1 << 40)),
            same,
        ),
        "sliced": (lambda s: text((s[0] + 3, *s[1:])), lambda t, s: t[3:], same),
        "shared": (text, lambda t, s: t, same),
        "sparse": (text, lambda t, s: t, same),
        "reshape+sparse": (lambda s: text((2, int(np.prod(s)) // 2)), lambda t, s: ops.reshape(t, s), same),
    }


ONCE_WRONG = {
    ("scatter_add", "reshape", "strict"),
    ("scatter_add", "where", "kernels"),
    ("embedding", "where", "value_and_grad"),
    ("embedding_padded", "reshape+sparse", "strict"),
    ("gather", "shared", "second"),
    ("cross_entropy_weighted", "plain", "value_and_grad"),
    ("cross_entropy_ignoring", "cast", "kernels"),
    ("coalesce_values_2d", "plain", "strict"),
    ("gather", "cast", "strict"),
}
EXTRA = ("value_and_grad", "kernels", "second", "strict")


@functools.cache
def combinations() -> tuple[tuple[Indexing, str, str, str], ...]:
    """All of them, in an order that is varied from the start."""
    found = [
        (indexing, oob, form, extra)
        for indexing, form, extra in itertools.product(indexings(), forms(), EXTRA)
        for oob in indexing.oob
        if ("sparse" not in form or (indexing.sparse and extra != "second"))
        and not (indexing.ascending and form in ("where", "summed"))
    ]
    random.Random(7).shuffle(found)
    # First what once went wrong, then errors: what is documented for the others keeps inside by itself.
    return tuple(
        sorted(found, key=lambda c: ((c[0].name, c[2], c[3]) not in ONCE_WRONG or c[1] != "error", c[1] != "error"))
    )


# -- one program -------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    graph: Any
    wrt: tuple[str, ...]
    options: dict[str, Any]
    second: bool = False


def program(indexing: Indexing, oob: str, form: str, extra: str) -> Program:
    import gradc
    from gradc import ops
    from gradc.autodiff import differentiate

    type_of, index_of, _ = forms()[form]
    types = {"t": type_of(indexing.shape), **indexing.others}
    if form == "shared":
        types["u"] = "f32[5,3]"
    if form == "symbolic":  # every axis that goes with the index's first
        types |= {
            n: (
                re.sub(rf"\b{indexing.shape[0]}\b", "N", t)
                if str(indexing.shape[0]) in re.findall(r"\d+", t.partition("[")[2])
                else t
            )
            for n, t in types.items()
        }

    def fn(t: Any, **others: Any) -> Any:
        second = others.pop("u", None)
        index = index_of(t, indexing.shape)
        y = indexing.make(index, **others, oob=oob)
        if extra == "value_and_grad" and y.dtype.is_float:
            return ops.sum(y * y)
        return (
            y
            if second is None
            else {
                "y": y,
                "z": ops.gather(second, ops.reshape(index, (-1,)), axis=0, oob="error" if oob == "error" else "skip"),
            }
        )

    graph = gradc.trace(fn, **types)
    wrt = tuple(n for n in graph.input_names if graph.input(n).dtype.is_float)
    if not any(v.dtype.is_float for _, v in graph.outputs):
        wrt = ()
    options: dict[str, Any] = {"unused": "zeros"}
    if "sparse" in form:
        options["sparse"] = (indexing.sparse,)
    if extra == "strict":
        options |= {"numerics": "strict", "fuse": False}
    if extra == "second" and wrt:
        joint = differentiate(graph, list(wrt), unused="zeros")
        total = None
        for _, node in joint.outputs:
            if node.dtype.is_float:
                term = ops.sum(ops.cast(node, "f32") * ops.cast(node, "f32"))
                total = term if total is None else total + term
        return Program(
            joint.with_outputs([("y", total)]),
            tuple(n for n in joint.input_names if joint.input(n).dtype.is_float),
            options,
        )
    return Program(graph, wrt, options)


def arrays(made: Program, indexing: Indexing, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs with every index inside."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in made.graph.input_names:
        type_ = made.graph.input(name)
        shape = type_.type.concrete({"N": indexing.shape[0]})
        if type_.dtype.is_float:
            found[name] = rng.uniform(0.5, 2.0, shape).astype(type_.dtype.np)
        elif name == "o":
            found[name] = np.array([0, 3, 7])
        else:
            found[name] = rng.integers(0, BOUND - 1, shape).astype(type_.dtype.np)
    if indexing.ascending:
        t = found["t"]
        t[...] = np.sort(t.reshape(-1)).reshape(t.shape) * 0
    if "t" in found and found["t"].shape[-1] == 2 and len(found["t"].shape) > len(indexing.shape):
        found["t"][..., 1] = 0  # a sum of two
    return found


def attempt(seed: int, options: Options) -> Outcome:
    target = options["target"]
    if target == "cpu":
        sanitize.install()
    indexing, oob, form, extra = combinations()[seed % len(combinations())]
    case = f"{indexing.name} oob={oob} index={form} {extra} target={target}"
    made = program(indexing, oob, form, extra)
    sanitize.announce(f"{case}\nwrt={made.wrt} options={made.options}\n{made.graph}", f"{indexing.name} {oob} {form}")
    check = Check(made, indexing, form, target, case)
    with sanitize.uncached():
        verdict = check.all(extra, seed)
    kind = f"{indexing.name} {oob} {form}"
    text = f"{case}\nwrt={made.wrt} options={made.options}\n{made.graph}\n" + "\n".join(check.found)
    return Outcome(verdict, text, kind, {"calls": check.calls, "calls that raised": check.raised})


class Check:
    """A program called in every way with every bad value."""

    def __init__(self, made: Program, indexing: Indexing, form: str, target: str, case: str):
        self.made, self.indexing, self.form, self.case = made, indexing, form, case
        self.target = target
        self.found: list[str] = []
        self.handles: list[Any] = []
        self.calls = self.raised = 0
        self.verdict = "typed"

    def fail(self, verdict: str, text: str) -> None:
        self.found.append(f"{verdict}: {text}")
        order = ("typed", "wrong", "untyped")
        self.verdict = max(self.verdict, verdict, key=order.index)

    def all(self, extra: str, seed: int) -> str:
        import gradc

        module, oracle = (
            gradc.compile(self.made.graph, wrt=self.made.wrt, target=t, **self.made.options)
            for t in (self.target, "numpy")
        )
        good = arrays(self.made, self.indexing, seed)
        for bad, place in self.bad_arrays(good, seed):
            self.both(f"forward t[{place}]", lambda m, bad=bad: m.forward.run(bad), module, oracle)
            if self.made.wrt:
                self.both(
                    f"backward t[{place}]", lambda m, bad=bad: self.changed(m, good, bad), module, oracle, refused=True
                )
            if extra == "value_and_grad" and self.made.wrt:
                self.both(f"value_and_grad t[{place}]", lambda m, bad=bad: _flat(m.value_and_grad(bad)), module, oracle)
            if extra == "kernels":
                self.kernels(module, place, bad)
        self.both("good indices afterwards", lambda m: m.forward.run(good), module, oracle)
        return self.verdict

    def bad_arrays(
        self, good: Mapping[str, np.ndarray[Any, Any]], seed: int
    ) -> Iterator[tuple[dict[str, np.ndarray[Any, Any]], str]]:
        rng = np.random.default_rng([seed, 1])
        _, _, value_for = forms()[self.form]
        t = good["t"]
        for bad in BAD:
            value = value_for(bad)
            if not np.iinfo(t.dtype).min <= value <= np.iinfo(t.dtype).max:
                continue
            at = int(rng.integers(t.size))
            if self.form == "summed":
                at -= at % 2
            if self.indexing.ascending:
                at = t.size - 1
            changed = t.copy()
            changed.reshape(-1)[at] = value
            yield {**good, "t": changed}, f"{at}]={value}"[:-1] + f"{value}"[-1:]

    def changed(self, module: Any, good: Mapping[str, Any], bad: Mapping[str, Any]) -> dict[str, Any]:
        """Backward of a call whose tokens are changed after forward."""
        given = {name: array.copy() for name, array in good.items()}
        _, residuals = module.forward(given)
        given["t"][...] = bad["t"]
        rng = np.random.default_rng(3)
        cotangents = {
            name: rng.standard_normal(type_.concrete(residuals.dims)).astype(type_.dtype.np)
            for name, type_ in residuals.cotangent_types.items()
        }
        return _flat(module.backward(residuals, **cotangents))

    def kernels(self, module: Any, place: str, bad: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Each kernel alone, on buffers that hold bad values wherever integers may stand."""
        from gradc.errors import GradcError

        if not self.handles:
            self.handles = [
                (executable.program.dims, executable.kernels) for executable in module.executables.values()
            ]  # each is compiled once
        for symbols, handles in self.handles:
            dims = {d: self.indexing.shape[0] for d in symbols}
            for name, handle in handles.items():
                try:
                    buffers = handle.sample(**dims)
                except GradcError:
                    continue
                if "t" in buffers and buffers["t"].shape == bad["t"].shape:
                    buffers["t"] = bad["t"]
                else:
                    value = int(bad["t"].reshape(-1)[np.argmax(np.abs(bad["t"].reshape(-1).astype(np.float64)))])
                    for array in buffers.values():
                        if array.dtype.kind in "iu" and array.size:
                            array.reshape(-1)[-1] = np.array(value).astype(array.dtype)
                print(f"-- kernel {name} {place}", file=sys.stderr, flush=True)
                self.calls += 1
                try:
                    handle.run(dims=dims, **buffers)
                except GradcError:
                    self.raised += 1
                except Exception as error:
                    self.fail("untyped", f"kernel {name} t[{place}: {type(error).__name__}: {error}")

    def both(
        self, what: str, call: Callable[[Any], dict[str, Any]], module: Any, oracle: Any, refused: bool = False
    ) -> None:
        print(f"-- {what}", file=sys.stderr, flush=True)
        self.calls += 1
        got, want = _result(lambda: call(module)), _result(lambda: call(oracle))
        from gradc.errors import GradcError, IndexOutOfRange, NotAscending

        if isinstance(got, Exception):
            self.raised += 1
            if not isinstance(got, GradcError):
                return self.fail("untyped", f"{what}: {type(got).__name__}: {got}")
            if isinstance(want, IndexOutOfRange | NotAscending) and type(got) is type(want):
                if (got.position, got.value) != (want.position, want.value) or str(got) != str(want):
                    self.fail("wrong", f"{what}: {got}; numpy says {want}")
                return None
            if refused and not isinstance(got, IndexOutOfRange | NotAscending):
                return None  # a changed input may be refused as such
            return self.fail("wrong", f"{what}: {type(got).__name__}: {got}; numpy {_said(want)}")
        if isinstance(want, Exception):
            return self.fail("wrong", f"{what}: no error; numpy {_said(want)}")
        for name, array in want.items():
            if not _equal(got[name], array):
                return self.fail("wrong", f"{what}: {name} differs from numpy's:\n{got[name]}\n{array}")
        return None


def _result(call: Callable[[], dict[str, Any]]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _said(result: Any) -> str:
    return f"{type(result).__name__}: {result}" if isinstance(result, Exception) else "has a value"


def _flat(found: Any) -> dict[str, Any]:
    """Gradients by name, rows of a sparse one as an array."""
    out: dict[str, Any] = {}
    for part in found if isinstance(found, tuple) else (found,):
        items = part.items() if hasattr(part, "items") else [("value", part)]
        out |= {name: v.dense() if hasattr(v, "dense") else v for name, v in items}
    return out


def _equal(got: Any, want: Any) -> bool:
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "iub":
        return bool(np.array_equal(a, b))
    tolerance = 1e-4 if a.dtype.itemsize >= 4 else 0.05
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=tolerance, equal_nan=True))


def environment(options: Options) -> Mapping[str, str]:
    return sanitize.environment() if options["target"] == "cpu" else {**sanitize.surroundings(), "GRADC_SIM_CHECK": "1"}


CAMPAIGN = Campaign(
    "indices", attempt, limit=180.0, ci=3, options={"target": "cpu"}, environment=environment, missing=sanitize.missing
)
