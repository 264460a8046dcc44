"""The record of a compilation's options: what is read off it, and what a module keeps of it."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradc
from gradc import ops
from gradc.cli import cli
from gradc.cli.model import FLAGS
from gradc.errors import InvalidProblem
from gradc.ir.envelope import load
from gradc.module.options import FIELDS, NAMES, TEXTS, Given, Options, checked, for_target
from gradc.module.saved import MODULE_FORMAT

GRAPH = gradc.trace(lambda x, w: ops.softmax(x @ w), x="f32[N,4]", w="f32[4,3]")


def test_the_signature_is_the_record() -> None:
    parameters = inspect.signature(gradc.compile).parameters
    assert tuple(parameters) == ("graph", "wrt", "target", "layout", "update", *NAMES)
    assert {name: parameters[name].default for name in NAMES} == Options().given()
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in NAMES)


def test_the_docstring_says_what_each_means() -> None:
    text = " ".join((gradc.compile.__doc__ or "").split())
    for each in FIELDS:
        assert f":param {each.name}: {' '.join(each.metadata['meaning'].split())}" in text


def test_the_command_has_a_flag_for_each_that_says_so() -> None:
    text = " ".join(CliRunner().invoke(cli, ["compile", "--help"]).output.split())
    assert set(FLAGS) == {"arch", "convolutions", "fuse", "memory_budget", "numerics", "reductions", "save"}
    for each in FIELDS:
        if each.name in FLAGS:
            flag = {"reductions": "reduction"}.get(each.name, each.name.replace("_", "-"))
            assert f"--{flag} " in text and each.metadata["flag"] in text


def test_defaults_pass_their_own_checks() -> None:
    assert checked({}, GRAPH, "cpu", ()) == Options()
    for each in FIELDS:
        assert each.metadata["check"](Given(each.name, each.default, GRAPH, "cuda", ())) == each.default


def test_a_target_decides_what_was_not_said() -> None:
    assert for_target(Options(), "cpu") == Options(errors="sync")
    assert for_target(Options(calibration="none"), "cuda-sim") == Options(errors="sync")
    on_a_gpu = for_target(Options(arch="sm_80", calibration="none"), "cuda")
    assert (on_a_gpu.arch, on_a_gpu.errors, on_a_gpu.calibration) == ("sm_80", "async", None)
    with pytest.raises(InvalidProblem, match="device='H200' is for a GPU, not for the target 'cpu'"):
        for_target(Options(device="H200"), "cpu")


def test_a_module_keeps_them_and_its_file_says_them_in_words(tmp_path: Path) -> None:
    module = gradc.compile(GRAPH, ["w"], "numpy", donate="x", numerics="strict", hints={"N": 8}, sparse=[])
    assert module.options == Options(numerics="strict", donate=("x",), hints={"N": 8}, errors="sync")
    module.save(tmp_path / "m.gradc")
    stored = json.loads(load(tmp_path / "m.gradc", "module", MODULE_FORMAT).parts["module"])["options"]
    assert stored == {**Options().as_json(), "numerics": "strict", "donate": ["x"], "hints": {"N": 8}, "errors": "sync"}
    assert gradc.load_module(tmp_path / "m.gradc").options == module.options
    assert set(TEXTS) == {
        "arch",
        "calibration",
        "convolutions",
        "determinism",
        "device",
        "errors",
        "numerics",
        "residuals",
        "unused",
    }


def test_they_cannot_be_changed() -> None:
    module = gradc.compile(GRAPH, target="numpy")
    with pytest.raises(AttributeError):
        module.options.fuse = False  # type: ignore[misc]
    assert replace(module.options, fuse=False) != module.options
