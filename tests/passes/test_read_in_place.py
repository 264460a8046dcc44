"""Products that read windows, and what else was only moved, where it lies: against torch in f64, as text, as bits, and
what is in memory.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import GradcError, TypeRuleError
from gradc.interp import run_program
from gradc.ir.kernel import Call
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.runtime.host import pool
from tests.agreement import agree_with_torch, merged

torch = pytest.importorskip("torch")

TEXT = """program @windows {
  input w: f32[2,6]
  input x: f32[3,7]
  output y: f32[2,5]
  call @matmul_0 axes(m: 2, n: 5, k: 6) parts(k: (k0: 2, k1: 3)) y[m, n] <- matmul w[m, k], x[k0, n + k1]
  return y=y
}"""

SIZES = {"N": 3, "H": 13}
CASES = {
    "square": ((2, 20, 12, 12), (17, 20, 3, 3), {"padding": 1}),
    "narrow": ((3, 8, 7, 7), (33, 8, 3, 3), {"padding": 1}),
    "wide": ((2, 3, 6, 70), (8, 3, 3, 5), {"padding": (1, 2)}),
    "stride": ((2, 3, 18, 18), (8, 3, 7, 7), {"padding": 3, "stride": 2}),
    "point": ((2, 8, 9, 9), (8, 8, 1, 1), {"stride": 2}),
    "dilation": ((2, 8, 12, 12), (8, 4, 3, 2), {"dilation": 2, "groups": 2}),
    "line": ((3, 8, 60), (5, 8, 5), {"padding": 2, "stride": 3}),
    "space": ((2, 3, 6, 7, 9), (4, 3, 3, 2, 3), {"padding": 1}),
    "one channel": ((1, 5, 9, 9), (1, 5, 3, 3), {"padding": 1}),
    "far padding": ((2, 3, 4, 4), (4, 3, 3, 3), {"padding": 4}),
    "symbols": (("N", 5, "H", 11), (7, 5, 3, 3), {"padding": 1}),
    "many steps": ((2, 40, 9, 9), (8, 40, 3, 3), {"padding": 1}),
    "many by two": ((2, 40, 17, 35), (20, 40, 3, 3), {"padding": 1, "stride": 2}),
    "phases": ((2, 9, 13, 14), (10, 9, 3, 3), {"padding": 1, "stride": 2}),
    "phases of symbols": (("N", 9, "H", 14), (5, 9, 4, 3), {"padding": (1, 0), "stride": (3, 2)}),
    "phases of groups": ((2, 16, 9, 11), (6, 8, 5, 2), {"padding": (5, 1), "stride": (2, 1), "groups": 2}),
    "phases of none": ((2, 8, 12, 12), (3, 8, 3, 3), {"dilation": 2, "stride": (2, 4), "padding": 1}),
    "phases of a line": ((2, 8, 41), (3, 8, 5), {"dilation": 3, "stride": 4, "padding": 2}),
    "phases with gaps": ((2, 9, 13, 14), (10, 9, 1, 2), {"stride": (3, 2)}),
    "phases of space": ((1, 8, 6, 7, 5), (3, 8, 3, 3, 2), {"stride": 2, "padding": 1}),
    "points of one": ((1, 8, 33, 33), (8, 8, 1, 1), {"stride": 2}),
}


def _case(name, dtype="f32", transposed=False):
    """Its graph, its arrays, and what torch makes of them."""
    x, w, attrs = CASES[name]
    op = getattr(ops, f"conv{'_transpose' if transposed else ''}{len(x) - 2}d")
    if transposed:
        w = (x[1], w[0] if "phases" not in name else 8, *w[2:])
    types = {name: f"{dtype}[{','.join(map(str, sizes))}]" for name, sizes in (("x", x), ("w", w))}
    graph = gradc.trace(lambda x, w: op(x, w, **attrs), **types)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal([SIZES.get(n, n) for n in sizes]).astype({"f32": "f4", "f64": "f8"}[dtype])
        for name, sizes in (("x", x), ("w", w))
    }
    theirs = getattr(torch.nn.functional, f"conv{'_transpose' if transposed else ''}{len(x) - 2}d")
    return graph, arrays, lambda x, w: theirs(x, w, **attrs)


def _module(name, dtype="f32", **options):
    graph, arrays, theirs = _case(name, dtype)
    return gradc.compile(graph, wrt=["x", "w"], target="cpu", **options), arrays, theirs


def _joined(cases, **options):
    """All cases as one module, and their arrays under the names that its inputs have."""
    names = {name: name.replace(" ", "_") for name in cases}
    graph = merged("convolutions", ((names[name], graph) for name, (graph, _, _) in cases.items()))
    arrays = {f"{names[name]}.{n}": array for name, (_, given, _) in cases.items() for n, array in given.items()}
    return gradc.compile(graph, wrt=[*arrays], target="cpu", **options), arrays


def _cases_of(call):
    return {arg.buffer.partition(".")[0] for arg in call.args if "." in arg.buffer}


def _parted(program):
    return [step for step in program.steps if isinstance(step, Call) and step.parts]


def _results(module, arrays):
    y, residuals = module.forward(**arrays)
    results = y if isinstance(y, dict) else {"y": y}
    draw = {key: np.random.default_rng(1).standard_normal(array.shape) for key, array in results.items()}
    dy = {key: draw[key].astype(array.dtype) for key, array in results.items()}
    return {**results, **module.backward(residuals, **dy)}, dy


@pytest.mark.parametrize("dtype", ("f32", "f64"))
def test_convolutions_are_torchs(dtype):
    cases = {name: _case(name, dtype) for name in CASES}
    got, dy = _results(*_joined(cases))
    atol = {"f32": 1e-6, "f64": 1e-14}[dtype]
    for name, (_, arrays, theirs) in cases.items():
        tensors = {n: torch.from_numpy(a).double().requires_grad_() for n, a in arrays.items()}
        y, prefix = theirs(**tensors), name.replace(" ", "_")
        slopes = torch.autograd.grad(y, [*tensors.values()], torch.from_numpy(dy[f"{prefix}.y"]))
        for key, value in zip("yxw", (y, *slopes), strict=True):
            exact = value.detach().numpy()
            np.testing.assert_allclose(
                got[f"{prefix}.{key}"], exact, atol=atol * abs(exact).max(), rtol=0, err_msg=f"{key} of {name}"
            )


def test_transposed_ones_too():
    names = ("square", "stride", "narrow", *(name for name in CASES if name.startswith("phases")))
    cases = {name: _case(name, transposed=True) for name in names}
    module, given = _joined(cases)
    got, _ = _results(module, given)
    for name, (_, arrays, theirs) in cases.items():
        exact = theirs(*(torch.from_numpy(arrays[n]).double() for n in "xw")).numpy()
        found = got[f"{name.replace(' ', '_')}.y"]
        np.testing.assert_allclose(found, exact, atol=1e-6 * abs(exact).max(), rtol=0, err_msg=name)
    parted = {name for call in _parted(module.backward.program) for name in _cases_of(call)}
    assert parted >= {name.replace(" ", "_") for name in names}


def test_gaps_between_windows_are_filled_before_what_they_are_added_to():
    """The gradient of a block with a strided shortcut: elsewhere than at its places a shortcut's is zero, and no kernel
    asks of each element whether it is one.
    """

    def block(x, w, v):
        x = ops.relu(x)
        return ops.conv2d(x, w, stride=2, padding=1) + ops.conv2d(x, v, stride=2)

    shapes = {"x": (2, 8, 28, 28), "w": (16, 8, 3, 3), "v": (16, 8, 1, 1)}
    graph = gradc.trace(block, **{n: f"f32[{','.join(map(str, shape))}]" for n, shape in shapes.items()})
    module = gradc.compile(graph, wrt=list(shapes), target="cpu")
    assert not [s for k in module.backward.program.kernels for s in k.body if s.op == "right_shift"]


def test_the_phases_of_a_strided_image_are_products_of_what_they_meet():
    """None of them adds up more than the taps that it meets, and all read one copy of the response between zeros."""
    module, _, _ = _module("phases")
    calls = _parted(module.backward.program)
    images = [call for call in calls if len(call.result_axes) == 3]
    assert sorted(dict(call.axes)["k"] for call in images) == [20, 20, 40]
    assert len({call.args[1].buffer for call in images}) == 1
    assert not any(b.type.count >= 2 * 9 * 9 * 7 * 7 for b in module.backward.program.of_kind("temp"))


def test_the_bits_are_those_of_columns_in_memory():
    """Whatever is packed from, and for any number of threads, a product adds in one order."""
    cases = {name: _case(name) for name in CASES}
    module, arrays = _joined(cases)
    plain, _ = _joined(cases, fuse=False)
    assert not any(map(_parted, (plain.forward.program, plain.backward.program)))
    before, seen = pool.num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            seen.append(_results(module, arrays)[0])
    finally:
        pool.set_num_threads(before)
    first, *others = seen
    for other in others:
        for key, array in first.items():
            np.testing.assert_array_equal(array, other[key], err_msg=key)
    unfused, _ = _results(plain, arrays)
    assert len(unfused) == 3 * len(CASES)
    for key, array in unfused.items():
        if not key.endswith(".x"):  # not the gradient of an image, which is added up from windows elsewhere
            np.testing.assert_array_equal(first[key], array, err_msg=key)


@pytest.mark.parametrize("name", ("square", "stride", "dilation"))
def test_programs_parse_back_and_run_in_numpy(name):
    module, arrays, _ = _module(name)
    got, _ = _results(module, arrays)
    program = module.forward.program
    again = parse_program(str(program))
    assert again == program and _parted(again)
    verify_program(again)
    np.testing.assert_allclose(run_program(again, arrays)["y"], got["y"], atol=1e-4)


@pytest.mark.parametrize(("name", "padded"), [("square", 2 * 20 * 14 * 14), ("stride", 2 * 3 * 23 * 23), ("point", 0)])
def test_there_is_no_array_of_windows(name, padded):
    """A copy of the image between zeros where windows stand out over it, else nothing."""
    module, _, _ = _module(name)
    temps = [b for b in module.forward.program.of_kind("temp") if not b.alias]
    assert sum(int(b.type.count) for b in temps) == padded
    assert len(_parted(module.forward.program)) == 1


def test_what_else_reads_the_windows_keeps_them():
    def both(x, w):
        columns = ops.unfold(x, 3, padding=1)
        return w @ columns, columns * 2.0

    graph = gradc.trace(both, x="f32[2,4,9,9]", w="f32[2,5,36]")
    module = gradc.compile(graph, wrt=[], target="cpu")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 4, 9, 9), np.float32), rng.standard_normal((2, 5, 36), np.float32)
    results = module(x=x, w=w)
    y, columns = results["y0"], results["y1"]
    exact = torch.nn.functional.unfold(torch.from_numpy(x), 3, padding=1).numpy()
    np.testing.assert_array_equal(columns, exact * 2)
    np.testing.assert_allclose(y, w.astype(np.float64) @ exact, atol=1e-5)


def _of_a_diagonal(batch: int) -> gradc.Module:
    def convolution(x, w):
        return ops.conv1d(ops.broadcast_to(ops.diagonal(x, 0, 1, 2), (batch, 3, x.shape[1])), w, padding=1)

    graph = gradc.trace(convolution, x="f32[3,N,N]", w="f32[9,3,3]")
    return gradc.compile(graph, wrt=[], target="cpu")


def test_a_test_of_a_place_guards_each_axis_that_is_at_it():
    """The windows of a diagonal, whose padding stands out over both axes of the matrix."""
    module = _of_a_diagonal(512)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 15, 15), np.float32), rng.standard_normal((9, 3, 3), np.float32)
    line = torch.from_numpy(x).double().diagonal(0, 1, 2).expand(512, 3, 15)
    exact = torch.nn.functional.conv1d(line, torch.from_numpy(w).double(), padding=1).numpy()
    assert _parted(module.forward.program)
    np.testing.assert_allclose(module(x=x, w=w), exact, atol=1e-5)


def test_windows_of_a_symbolic_size_are_written_where_the_copy_between_zeros_is_larger():
    """Of a diagonal, the whole matrix would be copied."""
    assert not _parted(_of_a_diagonal(2).forward.program)


def test_a_pointwise_value_that_many_windows_read_is_stored_once():
    """In its windows it would be computed nine times; in those of a pooling, two times."""

    def arrays(fn):
        graph = gradc.trace(fn, x="f32[2,8,16,16]", s="f32[8,1,1]", b="f32[8,1,1]", w="f32[8,1,3,3]")
        return [b.type.shape for b in gradc.compile(graph, wrt=[], target="cpu").forward.program.of_kind("temp")]

    assert (2, 8, 16, 16) in arrays(lambda x, s, b, w: ops.conv2d(ops.relu6(x * s + b), w, padding=1, groups=8))
    assert (2, 8, 16, 16) not in arrays(lambda x, s, b, w: ops.max_pool2d(ops.relu6(x * s + b), 3, 2, 1) + ops.sum(w))


def _of_a_reflection(f, x, w):
    widths = ((0, 0), (0, 0), (2, 2), (2, 2)) if f is ops else (2, 2, 2, 2)
    return f.conv2d(f.pad(x, widths, mode="reflect"), w)


def _of_a_pooling(f, x, w):
    return f.max_pool2d(f.conv2d(x, w), 2)


def _of_a_join(f, x, w):
    join = ops.concat if f is ops else lambda *parts, axis: torch.cat(parts, axis)
    return f.conv2d(join(x[:, 1:], x[:, :1], axis=1), w)


@pytest.mark.parametrize(
    ("fn", "channels", "wrt", "stored"),
    [
        (_of_a_reflection, 3, ["x", "w"], (2, 3, 20, 20)),
        (_of_a_pooling, 1, ["x", "w"], (2, 4, 12, 12, 1, 1)),
        (_of_a_pooling, 1, ["w"], (1, 1, 2, 4, 12, 12)),  # met by windows
        (_of_a_join, 3, ["w"], (2, 3, 16, 16)),
    ],
)
def test_what_windows_would_select_again_is_stored_once(fn, channels, wrt, stored):
    """An element of a reflection is one of nine, that of a pooling's gradient is found by division, that of a join is
    in one of two arrays: in the windows of a convolution, or beside them in the gradient of its filter, each would be
    25 times.
    """
    types = {"x": f"f32[2,{channels},16,16]", "w": f"f32[4,{channels},5,5]"}
    module = gradc.compile(gradc.trace(lambda **x: fn(ops, **x), **types), wrt=wrt, target="cpu")
    buffers = [b for e in module.executables.values() for b in e.program.buffers if b.kind in ("temp", "output")]
    shapes = [b.type.shape for b in buffers]
    assert stored in shapes
    assert max(map(math.prod, shapes)) < 2 * 25 * 4 * 12 * 12, "there is an array of windows"
    draw = np.random.default_rng(0)
    given = {
        "x": draw.standard_normal((2, channels, 16, 16), "f4"),
        "w": draw.standard_normal((4, channels, 5, 5), "f4"),
    }
    agree_with_torch(module, lambda **x: fn(torch.nn.functional, **x), given)


def test_windows_read_channels_last_from_a_copy_with_channels_first():
    """Elements of a window of one channel lie as far apart as there are channels: no vector loads them; forward and
    backward each store them once in the other order, and add up rows of responses.
    """

    def fn(f, permuted, x, w):
        return f.conv2d(permuted(f.tanh(x), (0, 3, 1, 2)), w, padding=3, groups=5)

    types = {"x": "f32[2,16,16,5]", "w": "f32[5,1,7,7]"}
    graph = gradc.trace(lambda **x: fn(ops, ops.transpose, **x), **types)
    module = gradc.compile(graph, wrt=[*types], target="cpu")
    for executable in module.executables.values():
        stored = [b.type.shape for b in executable.program.of_kind("temp")]
        assert (2, 5, 16, 16) in stored
        sums = [k for k in executable.program.kernels if "conv" in k.name and k.cols]
        assert sums and all(k.cols[-1][1] == 16 for k in sums if k.rows)
    draw = np.random.default_rng(0)
    given = {"x": draw.standard_normal((2, 16, 16, 5), "f4"), "w": draw.standard_normal((5, 1, 7, 7), "f4")}

    def of_torch(**x):
        return fn(torch.nn.functional, torch.permute, **x)

    agree_with_torch(module, of_torch, given)


def _a_part_of_a_join(f, permuted, x, w):
    join = ops.concat if f is ops else lambda *parts, axis: torch.cat(parts, axis)
    return join(x[:, :1], x, axis=1)[:, 0] @ w


def _padded_there_and_back(f, permuted, x):
    pad = ops.pad(permuted(x, (0, 3, 1, 2)), ((0, 0), (0, 0), (9, 9), (9, 9))) if f is ops else None
    return permuted(torch.nn.functional.pad(permuted(x, (0, 3, 1, 2)), (9,) * 4) if pad is None else pad, (0, 2, 3, 1))


def _in_windows_apart(f, permuted, x, w):
    return permuted(f.conv2d(permuted(x, (0, 3, 1, 2)), w, stride=3, groups=8), (0, 2, 3, 1))


def _out_of_windows_apart(f, permuted, x, w):
    return permuted(f.conv_transpose2d(permuted(x, (0, 3, 1, 2)), w, stride=4, groups=8), (0, 2, 3, 1))


@pytest.mark.parametrize(
    ("fn", "part", "types"),
    [
        (_a_part_of_a_join, "forward", {"x": (6, 50, 8), "w": (8, 3)}),
        (_padded_there_and_back, "forward", {"x": (2, 6, 6, 8)}),
        (_in_windows_apart, "backward", {"x": (2, 12, 12, 8), "w": (8, 1, 3, 3)}),
        (_out_of_windows_apart, "forward", {"x": (2, 5, 5, 8), "w": (8, 1, 4, 4)}),
    ],
)
def test_what_is_read_once_or_in_its_own_order_is_not_stored(fn, part, types):
    """A product that reads one of 51 rows has that one stored; channels last that are read along channels stay."""
    draw = np.random.default_rng(0)
    given = {name: draw.standard_normal(shape, "f4") for name, shape in types.items()}
    graph = gradc.trace(lambda **x: fn(ops, ops.transpose, **x), **given)
    module = gradc.compile(graph, wrt=[*types], target="cpu")
    made = [b for b in module.executables[part].program.buffers if b.kind == "temp" or b.name.startswith("r.")]
    assert all(math.prod(b.type.shape) <= 6 * 8 for b in made), made
    agree_with_torch(module, lambda **x: fn(torch.nn.functional, torch.permute, **x), given)


def test_what_places_of_a_filter_give_stays_where_the_product_left_it():
    """The gradient of an image adds it up for each element: no kernel goes along places of a filter."""

    def fn(f, permuted, x, w):
        return permuted(f.conv2d(x, w, stride=5, padding=2, dilation=2), (0, 2, 3, 1))

    draw = np.random.default_rng(0)
    given = {"x": draw.standard_normal((1, 2, 24, 13), "f4"), "w": draw.standard_normal((2, 2, 5, 5), "f4")}
    graph = gradc.trace(lambda **x: fn(ops, ops.transpose, **x), **given)
    module = gradc.compile(graph, wrt=["x", "w"], target="cpu")
    program = module.backward.program
    assert (1, 2, 4, 2, 5, 5) not in [b.type.shape for b in program.buffers]
    agree_with_torch(module, lambda **x: fn(torch.nn.functional, torch.permute, **x), given)


def test_windows_meet_a_constant():
    """A filter that is part of the program lies in memory as an input does."""
    numbers = tuple(float(i) for i in range(18))
    filters = ops.constant(value=numbers, dtype="f32", shape=(2, 1, 3, 3))
    module = gradc.compile(
        gradc.trace(lambda x: ops.conv2d(x, filters, groups=2), x="f32[2,2,8,8]"), wrt=["x"], target="cpu"
    )
    exact = torch.tensor(numbers, dtype=torch.float64).reshape(2, 1, 3, 3)
    given = {"x": np.random.default_rng(0).standard_normal((2, 2, 8, 8), "f4")}
    agree_with_torch(module, lambda x: torch.nn.functional.conv2d(x, exact, groups=2), given)


def test_the_text_parses_back_and_means_a_convolution():
    program = parse_program(TEXT)
    assert str(program) == TEXT and parse_program(str(program)) == program
    verify_program(program)
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 6), np.float32), rng.standard_normal((3, 7), np.float32)
    want = np.stack([[np.sum(w[m].reshape(2, 3) * x[:2, n : n + 3]) for n in range(5)] for m in range(2)])
    np.testing.assert_allclose(run_program(program, {"w": w, "x": x})["y"], want, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("k0: 2, k1: 3", "k0: 2, k1: 2", "2 parts do not make up the axis k of 6"),
        ("parts(k: (k0: 2, k1: 3))", "parts(k: (k0: 6))", "no axis k1|1 parts do not make up"),
        ("parts(k: (", "parts(j: (", "j is no axis of a product that has parts"),
        ("k1: 3", "n: 3", "the axis n is named twice"),
        ("input x: f32[3,7]", "input x: bf16[3,7]", "is converted or scaled, and goes along parts"),
    ],
)
def test_what_the_verifier_refuses(before, after, match):
    assert before in TEXT
    with pytest.raises(GradcError, match=match):
        verify_program(parse_program(TEXT.replace(before, after)))


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("input x: f32[3,7]", "input x: f32[3,6]", "axis 1 of x has 6"),
        ("w[m, k]", "w[k1, k]", "axis 0 of w has 2"),
        ("n + k1", "n + k1 + (-1)", "axis 1 of x has 7"),
    ],
)
def test_what_would_read_outside(before, after, match):
    program = parse_program(TEXT.replace(before, after))
    arrays = {name: np.ones(program.types[name].concrete({}), np.float32) for name in "wx"}
    with pytest.raises(TypeRuleError, match=match):
        gradc.Executable(program, "cpu").run(**arrays)


def test_checked_accesses(monkeypatch):
    monkeypatch.setenv("GRADC_BOUNDS", "1")
    module, arrays, theirs = _module("narrow")
    got, _ = _results(module, arrays)
    exact = theirs(*(torch.from_numpy(arrays[n]).double() for n in "xw")).numpy()
    np.testing.assert_allclose(got["y"], exact, atol=1e-6 * abs(exact).max(), rtol=0)


def test_transposed_narrow_rows_are_read_in_place():
    """Of the gradient of a 1x1 convolution with few channels: only a slice of rows is copied for a wide product."""
    graph = gradc.trace(lambda x, w: ops.conv2d(x, w) ** 2, x="f32[4,64,20,20]", w="f32[8,64,1,1]")
    program = gradc.compile(graph, wrt=["x", "w"], target="cpu").backward.program
    temps = [b.type.shape for b in program.of_kind("temp")]
    assert _parted(program) and (8, 4, 20, 20) not in temps and (64, 4, 20, 20) not in temps
