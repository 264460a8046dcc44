"""Models of other makers, out of packages: values against onnxruntime, gradients against differences."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX models need onnxruntime beside them")

import gradc  # noqa: E402
from gradc import interp  # noqa: E402

rng = np.random.default_rng(0)


class Given(NamedTuple):
    """A model's file in its package, what is known when it is read, and its inputs."""

    file: str
    constants: Mapping[str, Any]
    dims: Mapping[str, int]
    inputs: Mapping[str, np.ndarray]


MODELS = {
    "swift_f0": Given(
        "model.onnx",
        {"fmin": np.float32(60), "fmax": np.float32(1000)},
        {"samples": 4096},
        {"audio": np.sin(np.arange(4096) * 0.1).astype(np.float32)[None] + rng.normal(0, 0.05, 4096).astype("f4")},
    ),
    "magika": Given(
        "models/standard_v3_3/model.onnx",
        {},
        {"unk__214": 2},
        {"bytes": rng.integers(0, 257, (2, 2048)).astype(np.int32)},
    ),
}


def found(name: str) -> tuple[Path, Given]:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the model needs {name}")
    return Path(spec.submodule_search_locations[0]) / MODELS[name].file, MODELS[name]


@pytest.mark.parametrize("name", MODELS)
def test_values_are_onnxruntimes(name: str) -> None:
    path, given = found(name)
    graph = gradc.from_onnx(path, constants=given.constants, dims=given.dims)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {**given.inputs, **{n: np.asarray(v) for n, v in given.constants.items()}})
    got = gradc.compile(graph, target="cpu")(**given.inputs)
    results = list(got.values()) if isinstance(got, dict) else [got]
    for each, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(each), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_weights(name: str) -> None:
    """Along the steepest direction through every weight, in f64."""
    path, given = found(name)
    graph = gradc.from_onnx(path, constants=given.constants, dims=given.dims)
    output, node = next((o, n) for o, n in reversed(graph.outputs) if str(n.dtype) == "f32")
    weights = [n for n, v in graph.defaults.items() if v.dtype == np.float32 and not n.startswith("constant.")]
    cut = gradc.Graph(graph.name, graph.inputs, ((output, node),), graph.assumptions, defaults=graph.defaults)
    joint = gradc.differentiate(cut, weights, unused="zeros")
    values = {**graph.defaults, **given.inputs}
    shape = interp.run(cut, values, precision="f64")[output].shape
    cotangent = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    grads = interp.run(joint, {**values, f"d.{output}": cotangent}, precision="f64")
    most = {n: max(np.abs(grads[f"d.{n}"]).max(), 1e-300) for n in weights}

    def moved(step: float) -> dict[str, np.ndarray]:
        """The weights, in f32 as the graph takes them."""
        units = {n: np.abs(values[n]).mean() * grads[f"d.{n}"] / most[n] for n in weights}
        return {n: (values[n] + step * units[n]).astype(np.float32) for n in weights}

    def at(weights: Mapping[str, np.ndarray]) -> float:
        return float((interp.run(cut, {**values, **weights}, precision="f64")[output] * cotangent).sum())

    errors = []
    for step in (1e-4, 1e-5, 3e-6):  # too large a step meets kinks, too small a one the rounding of f32
        low, high = moved(-step), moved(step)
        slope = sum(float((grads[f"d.{n}"] * (high[n].astype(np.float64) - low[n])).sum()) for n in weights)
        errors.append(abs(at(high) - at(low) - slope) / abs(slope))
    assert min(errors) <= 1e-3, errors
