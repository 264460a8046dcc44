"""Models of other makers, out of packages: values against onnxruntime, gradients against differences; and what measures
all of them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import long_tests
import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")
pytest.importorskip("onnxruntime", reason="ONNX models need onnxruntime beside them")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import gradc  # noqa: E402
from benchmarks import onnx_models as bench  # noqa: E402

NAMES = ("swift_f0/model.onnx", "magika/models/standard_v3_3/model.onnx")


def found(name: str) -> tuple[Path, bench.Given]:
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the model needs {package}")
    return Path(spec.submodule_search_locations[0]) / file, bench.MODELS[name]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_onnxruntimes(name: str) -> None:
    path, given = found(name)
    graph, peer = bench.read(path, given), bench.session(path)
    values = bench.inputs_of(graph, given)
    wanted = peer.run(None, bench.fed(peer, values, given))
    assert bench.value_error(gradc.compile(graph, target="cpu")(**values), wanted) <= bench.RIGHT


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_weights(name: str) -> None:
    """Along the steepest direction through every weight, in f64."""
    path, given = found(name)
    graph = bench.read(path, given)
    error, *_ = bench.gradient_error(graph, bench.inputs_of(graph, given))
    assert error <= bench.RIGHT_GRADIENT


# -- python -m benchmarks.onnx_models ----------------------------------------------------------------------------------


def folder_of_models(folder: Path) -> Path:
    """A model in a wheel, one beside it that gradc does not take, and a file that is none."""
    w = np.linspace(-1, 1, 12).astype(np.float32).reshape(4, 3)
    made = {
        op: helper.make_model(
            helper.make_graph(
                [helper.make_node(op, ["x", "w"][: 2 if op == "MatMul" else 1], ["y"], name="first")],
                "net",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])],
                [numpy_helper.from_array(w, "w")],
            ),
            opset_imports=[helper.make_opsetid("", 13)],
            ir_version=8,
        )
        for op in ("MatMul", "NonZero")
    }
    made["NonZero"].graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with zipfile.ZipFile(folder / "product-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("product/data/good.onnx", made["MatMul"].SerializeToString())
        archive.writestr("product/__init__.py", "")
    (folder / "refused.onnx").write_bytes(made["NonZero"].SerializeToString())
    (folder / "none.onnx").write_bytes(b"no model")
    return folder


@long_tests.values
def test_a_row_for_each_model_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, which leave what they knew where they end; known rows are not measured again."""
    folder, out = folder_of_models(tmp_path), tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["onnx_models", str(folder), "--json", str(out), "--memory", "30"])
    monkeypatch.chdir(Path(bench.__file__).parents[1])
    bench.main()
    rows = {row["name"]: row for row in json.loads(out.read_text())["models"]}
    assert rows.keys() == {"product/data/good.onnx", "refused.onnx", "none.onnx"}
    good = rows["product/data/good.onnx"]
    assert good["nodes"] == 1 and good["weights"] == 12 and bench.is_right(good) and bench.is_checked(good)
    assert min(good[k] for k in ("load_s", "compile_s", "forward_ms", "onnxruntime_ms", "training_ms")) > 0
    assert "NonZero" in rows["refused.onnx"]["failed"] and not bench.is_right(rows["refused.onnx"])
    assert "DecodeError" in rows["none.onnx"]["failed"] or "none.onnx" in rows["none.onnx"]["failed"]
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured again"))
    bench.main()
    assert "1 of 3 within" in capsys.readouterr().out


def test_the_page_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the results that are committed."""
    (results,) = bench.RESULTS.glob("onnx-models-*.json")
    page = tmp_path / "onnx.md"
    page.write_text(bench.PAGE.read_text())
    monkeypatch.setattr(bench, "PAGE", page)
    before = page.read_text()
    bench.write(results)
    assert page.read_text() == before
