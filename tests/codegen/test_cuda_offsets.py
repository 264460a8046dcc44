"""Offsets of 32 and of 64 bits: what bounds them, which are taken at which sizes, and that both give the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.autodiff import differentiate
from gradc.codegen.cuda import launch
from gradc.codegen.cuda.columns import OFFSETS
from gradc.codegen.cuda.index_bound import HEAD_ROOM, LIMIT, magnitude, placed
from gradc.codegen.cuda.launch import Launch, LaunchPlan, sizes_of
from gradc.codegen.index import flatten, index
from gradc.errors import IndexOutOfRange
from gradc.ir.dims import ceildiv, evaluate, maximum, symbol
from gradc.ir.statement import Index
from gradc.runtime.cache import unpack

N, D, V = symbol("N"), symbol("D"), symbol("V")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


# -- the bounds --------------------------------------------------------------------------------------------------------


class Counted(int):
    """An integer that remembers the largest of all that were computed on the way."""

    most = 0

    def __new__(cls, value: int) -> Counted:
        Counted.most = max(Counted.most, abs(int(value)))
        return super().__new__(cls, value)

    def __add__(self, other: int) -> Counted:
        return Counted(int(self) + int(other))

    def __sub__(self, other: int) -> Counted:
        return Counted(int(self) - int(other))

    def __mul__(self, other: int) -> Counted:
        return Counted(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: int) -> Counted:
        return Counted(int(other) - int(self))

    def __neg__(self) -> Counted:
        return Counted(-int(self))


def computed(text: str, **names: int) -> int:
    """The largest of what a generated expression computes."""
    Counted.most = 0
    plain = re.sub(rf"\(({OFFSETS}|i64)\)", "", text).replace("LL", "")
    functions = {
        "floordiv_i64": lambda a, b: Counted(int(a) // int(b)),
        "maximum_i64": lambda a, b: Counted(max(int(a), int(b))),
    }
    eval(plain, {"__builtins__": {}}, {**functions, **{name: Counted(value) for name, value in names.items()}})
    return Counted.most


PLACES: dict[str, tuple[list[Index], list[Any], dict[str, Any]]] = {
    "a row": ([Index.of("n"), Index.of("d")], [N, D], {"n": N, "d": D}),
    "gathered": ([Index.of("%3"), Index.of("d")], [V, D], {"n": N, "d": D}),
    "a window": ([Index.of("n") + Index.of("k") + (-1), Index.of("d") * 2], [N, 2 * D], {"n": N, "k": 3, "d": D}),
    "backwards": ([Index((N - 1), (("n", -1),)), Index.of("d")], [N, D], {"n": N, "d": D}),
    "a corner": ([Index.of("%3") + 1, Index.of("%4") + (-1), Index.of("d")], [N, 7, D], {"n": N, "d": D}),
    "padded": ([Index.of("n") + (-5), Index.of("d")], [N + 3, maximum(D - 2, 0)], {"n": N, "d": D}),
    "halves": ([Index.of("n"), Index.of("d")], [N, ceildiv(D, 2)], {"n": N, "d": ceildiv(D, 2)}),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 1, 3 << 40])
def test_a_bound_holds_whatever_a_place_is_computed_from(case: str, count: int) -> None:
    """At the ends of all axes, nothing in the text is larger than the bound; nothing is allocated."""
    place, shape, extents = PLACES[case]
    for d in (1, 40, 65537):
        dims = {"N": max(count // d, 3), "D": d, "V": max(count // d, 3)}
        bound = max(
            evaluate(placed(place, shape, {a: magnitude(n) for a, n in extents.items()}), dims), *dims.values()
        )  # which are bounds of their own
        sizes = [evaluate(n, dims) for n in shape]
        ends = {a: evaluate(n, dims) - 1 for a, n in extents.items()}
        text = index(flatten(place, shape), OFFSETS)
        for at in ({a: 0 for a in ends}, ends):  # a value from memory lies where its axis lets it
            values = {
                f"v{v[1:]}": sizes[i] - 1 - evaluate(entry.const, dims)
                for i, entry in enumerate(place)
                for v, _ in entry.terms
                if v.startswith("%")
            }
            assert computed(text, **dims, **at, **values) <= bound
        assert bound >= evaluate(shape[0], dims) - 1


def test_two_values_in_one_entry_are_not_bounded() -> None:
    assert placed([Index.of("%1") * 3 + Index.of("%2")], [N], {"n": N}) == LIMIT


@pytest.mark.parametrize(
    ("what", "dims"),
    [
        ("f32[N]", lambda count: {"N": count}),
        ("f32[N,40]", lambda count: {"N": count // 40}),
        ("f32[N,D]", lambda count: {"N": count // 65536, "D": 65536}),
        ("f32[3,N,8]", lambda count: {"N": count // 24}),
    ],
)
def test_the_width_changes_where_the_proof_ends(what: str, dims: Any) -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x) * 2.0, x=what), target="cuda-sim")

    def plan(count: int) -> LaunchPlan:
        found: LaunchPlan = module.forward.native.bind(dims(count))
        return found

    most = LIMIT - HEAD_ROOM - 1
    assert not plan(1000).wide and not plan(most - 2 * 65536).wide
    for count in (LIMIT - 1, LIMIT, LIMIT + 1, 1 << 40):
        found = plan(count + 65535 if "D" in what else count)
        assert found.wide == sorted({a.function for actions in found.actions for a in actions if isinstance(a, Launch)})
    if what == "f32[N]":
        assert not plan(most).wide and plan(most + 1).wide and plan(most).index_bound == LIMIT - 1
    assert "64 bits in" in module.explain(**dims(1 << 32)) and "32 bits: none" in module.explain(**dims(1000))


def test_every_stage_of_a_kernel_is_bounded() -> None:
    """Partials, keys and grids count as buffers do."""
    graph = differentiate(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]"), ["w"])
    for how in ("segmented", "privatized", "atomic", "atomic_fixed"):
        module = gradc.compile(graph, target="cuda-sim", reductions={"d.w": how})
        for dims in ({"N": 5, "V": 7, "D": 1 << 29}, {"N": 1 << 26, "V": 7, "D": 32}, {"N": 7, "V": 1 << 26, "D": 32}):
            plan = module.forward.native.bind(dims)
            kernels = [plan.kernel(k) for k in plan.program.kernels if k.accums]
            assert all(
                sizes_of(k, {own: dims[name] for own, name in zip(launch.own_dims(k), k.dims, strict=True)}).index_bound
                >= LIMIT
                for k in kernels
            )
            assert any(name.endswith("_rows") for name in plan.wide)


def test_sizes_known_beforehand_are_compiled_beforehand() -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = gradc.trace(lambda x: x * 2.0, x="f32[70000,40000]")
    module = gradc.compile(graph, target="cuda", arch="sm_90")
    parts = unpack(module.forward.portable())
    assert parts["wide"][:4] == b"\x7fELF" and parts["wide"] != parts["cubin"]
    assert "wide" not in unpack(
        gradc.compile(gradc.trace(lambda x: x * 2.0, x="f32[N,40000]"), target="cuda", arch="sm_90").forward.portable()
    )


# -- the same bits -----------------------------------------------------------------------------------------------------

SIZES = {"N": 37, "V": 9, "D": 24}
MODULES: dict[str, tuple[Any, dict[str, str], list[str], dict[str, str]]] = {
    "layer norm": (
        lambda x, g: ops.layer_norm(x, (x.shape[-1],), g, g),
        {"x": "bf16[N,D]", "g": "bf16[D]"},
        ["x", "g"],
        {},
    ),
    "segmented": (lambda t, w: ops.embedding(t, w), {"t": "i64[N]", "w": "f32[V,D]"}, ["w"], {"*": "segmented"}),
    "privatized": (lambda t, w: ops.embedding(t, w), {"t": "i64[N]", "w": "f32[V,D]"}, ["w"], {"*": "privatized"}),
    "fixed": (lambda t, w: ops.embedding(t, w), {"t": "i64[N]", "w": "f32[V,D]"}, ["w"], {"*": "atomic_fixed"}),
    "the largest of a row": (lambda x: ops.max(x, axis=1), {"x": "f32[N,D]"}, ["x"], {}),
    "grid sample": (lambda x, g: ops.grid_sample(x, g), {"x": "f32[2,3,8,8]", "g": "f32[2,5,6,2]"}, ["x", "g"], {}),
    "broadcast": (lambda x, b: x * b[:, None, :], {"x": "f32[N,V,3]", "b": "f32[N,3]"}, ["b"], {}),
    "long rows": (lambda x: ops.softmax(x), {"x": "f32[2,20000]"}, [], {}),
}


def random_inputs(graph: gradc.Graph, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for name in graph.input_names:
        type_ = graph.input(name).type
        shape = type_.concrete(SIZES)
        made[name] = (
            rng.integers(0, SIZES["V"], shape) if type_.dtype.is_integer else rng.uniform(-1, 1, shape)
        ).astype(type_.dtype.np)
    return made


@pytest.mark.parametrize("case", MODULES)
def test_both_widths_give_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One module runs with either, as its sizes ask; the checking mode looks for overflow in both."""
    fn, types, wrt, reductions = MODULES[case]
    graph = gradc.trace(fn, **types)
    graph = differentiate(graph, wrt) if wrt else graph
    module = gradc.compile(graph, target="cuda-sim", **({"reductions": reductions} if reductions else {}))
    given = random_inputs(graph)
    narrow = {k: np.asarray(a) for k, a in module.forward.run(**given).items()}
    assert set(module.forward.native.device.libraries) == {False}
    module.forward.native._plans.clear()
    module.forward._sizes.clear()
    monkeypatch.setattr(launch, "LIMIT", 0)
    wide = {k: np.asarray(a) for k, a in module.forward.run(**given).items()}
    assert set(module.forward.native.device.libraries) == {False, True}
    assert all(wide[k].tobytes() == a.tobytes() for k, a in narrow.items())
    exact = interp.run(graph, given, precision="f64")
    for k, a in wide.items():
        np.testing.assert_allclose(
            a.astype(np.float64),
            np.asarray(exact[k], np.float64),
            rtol=0,
            atol=(0.1 if "bf16" in str(types) else 1e-4) * max(1, np.abs(exact[k]).max()),
        )


def test_an_index_beyond_32_bits_is_found_not_cut_off() -> None:
    """2^32 + 1 is no row 1."""
    module = gradc.compile(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]"), target="cuda-sim")
    w = np.arange(24, dtype=np.float32).reshape(3, 8)
    with pytest.raises(IndexOutOfRange, match=str(2**32 + 1)):
        module.forward.run(t=np.array([0, 2**32 + 1, 2]), w=w)
    clamped = gradc.compile(
        gradc.trace(lambda t, w: ops.gather(w, t, axis=0, oob="clamp"), t="i64[N]", w="f32[V,D]"), target="cuda-sim"
    )
    np.testing.assert_array_equal(
        np.asarray(next(iter(clamped.forward.run(t=np.array([2**32 + 1, -(2**40)]), w=w).values()))), w[[2, 0]]
    )
