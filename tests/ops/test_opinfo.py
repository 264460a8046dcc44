"""torch's own OpInfo samples, written with gradc's ops (opinfo_table.py): values and gradients in f64."""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from opinfo_table import ABSENT, LEFT_OUT, LOOSE, OF_SOME_RELEASES, STATIC, TABLE, VALUES_ONLY  # noqa: E402

from benchmarks.opinfo import OURS, op_db, to_numpy  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.ir.node import Node  # noqa: E402
from gradc.trace import trace  # noqa: E402

torch.set_num_threads(1)
SAMPLES, LARGEST = 6, 3000


@functools.cache
def entries() -> dict[str, Any]:
    """label -> OpInfo of what torch differentiates in f32; importing them takes seconds, in every process that collects
    tests.
    """
    return {
        info.name + (f".{info.variant_test_name}" if info.variant_test_name else ""): info
        for info in op_db()
        if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu")
    }


def samples(info: Any) -> Iterator[Any]:
    """A few, spread over the list, the same in every run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
    sizes = [sum(t.numel() for t in tensors((s.input, s.args, s.kwargs))) for s in every]
    found = [s for s, size in zip(every, sizes, strict=True) if size <= LARGEST]
    found = found or [every[k] for k in sorted(range(len(every)), key=sizes.__getitem__)[:2]]
    yield from found[:: max(1, -(-len(found) // SAMPLES))]


def tensors(tree: Any) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in tensors(v)]
    return [t for v in tree for t in tensors(v)] if isinstance(tree, list | tuple) else []


def rebuilt(tree: Any, values: Iterator[Any]) -> Any:
    """The tree with values in the places of its tensors, and gradc's names of dtypes."""
    if isinstance(tree, torch.Tensor):
        return next(values)
    if isinstance(tree, dict):
        return {k: rebuilt(v, values) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        found = [rebuilt(v, values) for v in tree]
        return found if isinstance(tree, list) else tuple(found)
    if isinstance(tree, torch.dtype):
        return str(tree).removeprefix("torch.").replace("float", "f").replace("int", "i")
    return tree


def flat(result: Any) -> list[Any]:
    return [v for r in result for v in flat(r)] if isinstance(result, list | tuple) else [result]


def check(label: str, sample: Any) -> None:
    info, call, tolerance = entries()[label], TABLE[label], LOOSE.get(label, (1e-10, ""))[0]
    arguments = (sample.input, sample.args, sample.kwargs)
    given = tensors(arguments)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    x, args, kwargs = _theirs(arguments, iter(leaves))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = [t for t in flat(info.op(x, *args, **kwargs)) if isinstance(t, torch.Tensor)]
    arrays = {f"x{k}": numpy_of(t.detach().resolve_conj()) for k, t in enumerate(given)}

    fixed = {n: a for n, a in arrays.items() if label in STATIC and a.dtype.kind in "iub"}
    arrays = {n: a for n, a in arrays.items() if n not in fixed}

    def traced(**inputs: Node) -> list[Node]:
        inputs = {f"x{k}": {**fixed, **inputs}[f"x{k}"] for k in range(len(given))}
        own_x, own_args, own_kwargs = rebuilt(arguments, iter(inputs.values()))
        return flat(call(own_x, *own_args, **own_kwargs))

    traced.__signature__ = _signature(arrays)  # type: ignore[attr-defined]
    graph = trace(traced, **arrays)
    got = list(interp.run(graph, arrays).values())
    assert len(got) == len(want), f"{len(got)} results, not {len(want)}"
    for g, w in zip(got, want, strict=True):
        close(g, numpy_of(w), tolerance, "the value")
    floats = [f"x{k}" for k, t in enumerate(leaves) if t.requires_grad]
    rng = np.random.default_rng(1)
    smooth = [(g, w) for g, w in zip(graph.outputs, want, strict=True) if w.requires_grad]
    if not floats or not smooth or label in VALUES_ONLY:
        return
    cotangents = {name: rng.standard_normal(tuple(w.shape)) for (name, _), w in smooth}
    theirs = torch.autograd.grad(
        [w for _, w in smooth],
        [t for t in leaves if t.requires_grad],
        [torch.from_numpy(np.asarray(c)).to(w.dtype) for c, (_, w) in zip(cotangents.values(), smooth, strict=True)],
        allow_unused=True,
    )
    both = differentiate(graph.with_outputs([g for g, _ in smooth]), floats, unused="zeros")
    named = {f"d.{name}": np.asarray(c, graph.output(name).dtype.np) for name, c in cotangents.items()}
    found = interp.run(both, {n: a for n, a in {**arrays, **named}.items() if n in both.input_names})
    for name, w in zip(floats, theirs, strict=True):
        close(found[f"d.{name}"], np.zeros_like(arrays[name]) if w is None else numpy_of(w), tolerance, f"d {name}")


def _theirs(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return next(values)
    if isinstance(tree, dict):
        return {k: _theirs(v, values) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        found = [_theirs(v, values) for v in tree]
        return found if isinstance(tree, list) else tuple(found)
    return tree


def _signature(arrays: dict[str, np.ndarray]) -> Any:
    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in arrays])


def numpy_of(tensor: Any) -> np.ndarray:
    return np.asarray(to_numpy(torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor))


def close(got: np.ndarray, want: np.ndarray, rtol: float, what: str) -> None:
    """Relative to the largest element; in the narrower of two dtypes' units."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    if want.dtype.kind in "biu":
        assert np.array_equal(got, want), f"{what}: {got} is not {want}"
        return
    tolerance = max(rtol, *(8 * float(np.finfo(a.dtype).eps) if a.dtype.kind == "f" else 1e-2 for a in (got, want)))
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), f"{what}: {a} is not {b}"
    scale = float(np.max(np.abs(b[finite]), initial=0.0))
    worst = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
    assert worst <= tolerance * scale or worst <= 1e-14, f"{what}: off by {worst} of {scale}\n got {a}\nwant {b}"


@pytest.mark.parametrize("label", TABLE)
def test_samples_of_torch(label: str) -> None:
    if label not in entries():
        pytest.skip("this release of torch has no such entry")
    left_out = LEFT_OUT.get(label, ("", lambda args, named: False))[1]
    for sample in samples(entries()[label]):
        if not left_out((sample.input, *sample.args), sample.kwargs):
            check(label, sample)


def test_every_entry_is_written_or_has_a_reason() -> None:
    known = {label for label, info in entries().items() if info.name in OURS}  # those of make conformance
    assert not (TABLE.keys() | known) & ABSENT.keys()
    assert {*TABLE, *ABSENT, *known} - OF_SOME_RELEASES == {*entries()} - OF_SOME_RELEASES
    assert OF_SOME_RELEASES & {*entries()} <= ABSENT.keys() | TABLE.keys()
    assert len({*TABLE, *known}) >= 450
