"""The gradc command: what it prints, its exit codes, and that a mistake is one message and never a traceback."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gradc
from gradc.cli import main
from gradc.cli.progress import Progress
from gradc.cli.results import coloured
from gradc.inspect.export import from_json
from gradc.targets.devices import CPU, calibration_text

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import gradc
from gradc import ops
from gradc.ir.op import Expr, Primitive, Sample

WIDTH = 8

def plain(x, w):
    h = x @ w
    soft = ops.softmax(h)
    return (soft * soft).sum()

def nested(params, x):
    return (x @ params["w"] + params["b"]).sum()

def build():
    return gradc.trace(lambda x: x * 2, x="f32[3]")

@gradc.graph
def bag(tokens: "i64[N]", q: "i8[V,8]", scale: "f32[V,1]", w: "f32[8]"):
    table = ops.dequantize(q, scale, block=(1, WIDTH))
    rows = ops.embedding(tokens, table)
    hidden = ops.gelu(rows)
    return (hidden * w).sum()

def broken(x):
    return x @ undefined_name

wrong = Primitive(
    "cli_test_wrong",
    infer=lambda x: x,
    reference=lambda x: x * x,
    lower=Expr("{0} * {0}"),
    vjp=lambda g, y, x: (g * x,),
    samples=(),
)

def wrongly(x):
    return wrong(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    from gradc.ir.node import REGISTRY

    REGISTRY.pop("cli_test_wrong", None)


@pytest.fixture
def gradc_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        got = main(list(arguments))
        out, err = capsys.readouterr()
        assert got == code, f"gradc {' '.join(arguments)} -> {got}\n{out}\n{err}"
        return out, err

    return run


PLAIN = ("model.py:plain", "--type", "x=f32[N,4]", "--type", "w=f32[4,3]")

# -- MODEL -------------------------------------------------------------------------------------------------------------


def test_a_model_is_a_function_a_graph_a_file_or_a_folder(gradc_command, folder: Path):
    assert "graph @bag<N,V>" in gradc_command("dump", "model.py:bag")[0]
    assert "graph @bag<N,V>" in gradc_command("dump", "model.py")[0], "the one graph of the file"
    assert "graph @plain<N>" in gradc_command("dump", *PLAIN)[0]
    assert (
        "%params.w: f32[4,3]"
        in gradc_command(
            "dump",
            "model.py:nested",
            "--type",
            "params.w=f32[4,3]",
            "--type",
            "params.b=f32[3]",
            "--type",
            "x=f32[N,4]",
        )[0]
    )
    assert "%x: f32[3]" in gradc_command("dump", "model.py:build")[0], (
        "a function without parameters that makes a graph"
    )
    graph = gradc.trace(lambda x: x * x, x="f32[N]", name="square")
    graph.save(folder / "square.gir")
    assert "graph @square<N>" in gradc_command("dump", "square.gir")[0]
    gradc_command("compile", "square.gir", "--wrt", "x", "--save-module", "saved")
    assert "wrt x" in gradc_command("explain", "saved")[0]
    assert "d.x" in gradc_command("run", "saved", "--grad")[0]


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = """
program @pick {
  input at: i64[N]
  input table: f32[V,4]
  output sum: f32[4]
  kernel @inside rows() cols(n: N) {
    %t = load at[n] : i64
    check %t {bound=V, op="embedding", source="at"}
  }
  kernel @look rows(n: N) cols(d: 4) strategy(sum: privatized) {
    %t = load at[n] : i64
    %0 = load table[%t, d] : f32
    accum sum[d] <- %0 : f32
  }
  return sum=sum
}
"""


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_an_edited_program_runs(gradc_command, folder: Path, target: str):
    """The text of a module's program, changed by hand: what runs is the text."""
    (folder / "pick.gir").write_text(PROGRAM)
    np.savez(folder / "in.npz", at=np.array([0, 2, 2]), table=np.arange(12, dtype=np.float32).reshape(3, 4))
    out, _ = gradc_command("run", "pick.gir", "--input", "in.npz", "--out", "y.npz", "--target", target)
    assert f"pick on {target} at N=3, V=3" in out and "sum  float32[4] = 16, 19, 22, 25" in out
    with np.load(folder / "y.npz") as results:
        assert results["sum"].tolist() == [16, 19, 22, 25]
    doubled = PROGRAM.replace("accum sum[d] <- %0", "%1 = add %0, %0 : f32\n    accum sum[d] <- %1")
    (folder / "pick.gir").write_text(doubled)
    out, _ = gradc_command("run", "pick.gir", "--input", "in.npz", "--target", target)
    assert "sum  float32[4] = 32, 38, 44, 50" in out
    out, _ = gradc_command("run", "pick.gir", "--dims", "N=100,V=2", "--seed", "1", "--target", target)
    assert "random (seed 1): at, table" in out  # indices that fit
    (folder / "unchecked.gir").write_text(PROGRAM.replace('    check %t {bound=V, op="embedding", source="at"}\n', ""))
    _, err = gradc_command("run", "unchecked.gir", "--input", "in.npz", "--target", target, code=2)
    assert "load table[%t, d]" in err


def test_a_program_comes_through_a_pipe(gradc_command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    from gradc.cli import model

    text = gradc_command("dump", "model.py:bag", "--wrt", "scale,w", "--after", "backward.plan_buffers")[0]
    for given, said in ((text, "bag_backward on cpu at "), (PROGRAM, "pick on cpu at N=5, V=4")):
        model._stdin.cache_clear()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given.encode())))
        assert said in gradc_command("run", "-")[0]
    graph = str(gradc.trace(lambda x: x * x, x="f32[N]", name="square"))
    model._stdin.cache_clear()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(graph.encode())))
    assert "square on cpu" in gradc_command("run", "-", "--dims", "N=3", "--grad")[0]
    model._stdin.cache_clear()


def test_the_gradient_of_a_gradient_has_a_name_of_its_own(gradc_command, folder: Path):
    """A graph whose inputs and outputs are called as the cotangents and gradients of another: that of its gradients."""
    (folder / "joint.gir").write_text(gradc_command("dump", "model.py:bag", "--wrt", "w", "--after", "joint")[0])
    out, _ = gradc_command("run", "joint.gir", "--grad", "--dims", "N=4,V=3")
    names = [line.split()[0] for line in out.splitlines() if "float32[" in line]
    assert {"d.w", "d.d.w"} <= {*names} and len(set(names)) == len(names), out
    assert "4 of 4 hold" in gradc_command("check", "joint.gir", "--wrt", "w", "--dims", "N=4,V=3")[0]


def test_a_program_is_compiled_and_written(gradc_command, folder: Path):
    (folder / "pick.gir").write_text(PROGRAM)
    out, _ = gradc_command("compile", "pick.gir", "--emit", "ir,c", "-o", "out")
    assert "look" in out and "sum privatized" in out and "wrote 2 files to out" in out
    assert (folder / "out" / "pick.gir").read_text().startswith("program @pick {")
    assert "look_rows(" in (folder / "out" / "pick.c").read_text()
    for arguments, said in (
        (["run", "pick.gir", "--wrt", "table"], "is for graphs: what a program's text says is what runs"),
        (["run", "pick.gir", "--grad"], "--grad is for graphs"),
        (["run", "pick.gir", "--dims", "Q=3"], "--dims Q: pick has the dims N, V"),
        (["run", "pick.gir", "--input", "w=in.npy"], "holds no arrays"),
        (["compile", "pick.gir", "--save-module", "m"], "--save-module is for graphs"),
        (["explain", "pick.gir"], "pick.gir holds a program, and this command takes a graph"),
    ):
        assert said in gradc_command(*arguments, code=2)[1]


def test_a_reduction_is_forced(gradc_command, folder: Path):
    wrt = ("model.py:bag", "--wrt", "scale")
    assert "d.scale: segmented" in gradc_command("compile", *wrt, "--reduction", "d.scale=segmented")[0]
    assert "d.scale: privatized" in gradc_command("compile", *wrt, "--reduction", "*=privatized")[0]
    assert "d.scale  float32[" in gradc_command("run", *wrt, "--grad", "--reduction", "d.scale=segmented")[0]
    assert "privatized" in gradc_command("explain", *wrt, "--reduction", "d.scale=privatized")[0]
    _, err = gradc_command("compile", *wrt, "--reduction", "d.scale=quickly", code=2)
    assert "the reduction 'quickly' for 'd.scale': there are " in err and "segmented" in err and "privatized" in err
    _, err = gradc_command("compile", *wrt, "--reduction", "d.nothing=segmented", code=2)
    assert "reductions names 'd.nothing', into which nothing is combined; there are y, d.scale" in err
    assert "'d.scale' is not NAME=STRATEGY" in gradc_command("compile", *wrt, "--reduction", "d.scale", code=2)[1]


MISTAKES = [
    (["dump", "nowhere.gir"], "there is no file or folder 'nowhere.gir'"),
    (["dump", "nowhere.py:f"], "there is no file 'nowhere.py'"),
    (["dump", "model.py:nope"], "model.py has no 'nope'; it has bag, plain, nested, build, broken, wrongly"),
    (["dump", "model.py:WIDTH"], "model.py:WIDTH is int, not a graph or a function"),
    (["dump", "model.py:plain"], "takes x, w; give their types: --type x=f32[N,4]"),
    (["dump", "model.py:plain", "--type", "x=f32[N,4]"], "--type w=... is missing"),
    (["dump", *PLAIN, "--type", "z=f32[3]"], "has no parameter 'z'; it takes x, w"),
    (["dump", "model.py:plain", "--type", "x=q32[N]", "--type", "w=f32[4,3]"], "q32"),
    (["dump", "model.py:plain", "--type", "x"], "'x' is not NAME=TYPE"),
    (["dump", "model.py:plain", "--type", "x=f32[N,4]", "--type", "w=f32[5,3]"], "inner sizes differ: 4 and 5"),
    (
        ["dump", "model.py:broken", "--type", "x=f32[4]"],
        "model.py:broken raised NameError at model.py:27: name 'undefined_name' is not defined",
    ),
    (["dump", "model.py:bag", "--wrt", "tokens"], "NotDifferentiable: "),
    (["dump", "model.py:bag", "--wrt", "nothing"], "wrt names 'nothing'; the inputs of bag are tokens, q, scale, w"),
    (["dump", "model.py:bag", "--after", "sinkdequant"], "there is no pass 'sinkdequant'; did you mean sink_dequant?"),
    (["dump", "model.py:bag", "--follow", "hiden"], "no value is called 'hiden'; did you mean hidden?"),
    (["dump", "model.py:bag", "--all", "--after", "joint"], "one at a time"),
    (["run", "model.py:bag", "--dims", "Q=4"], "--dims Q: bag has the dims N, V"),
    (["run", "model.py:bag", "--dims", f"N={10**15}"], "not enough memory: "),
    (["run", "model.py:bag", "--dims", "N=-4"], "N=-4: a size is an integer, 0 or more"),
    (["run", "model.py:bag", "--dims", "N=4,N=5"], "N is given twice"),
    (["run", "model.py:bag", "--input", "w=model.py"], "'model.py' holds no arrays: neither .npy nor .npz"),
    (["run", "model.py:bag", "--input", "w=absent.npy"], "'absent.npy' holds no arrays: No such file"),
    (["run", "model.py:bag", "--input", "b=b.npy"], "bag has no input 'b'; it has tokens, q, scale, w"),
    (["run", "model.py:bag", "--input", "w=b.npy"], "w is f32[8]"),
    (["run", "model.py:bag", "--input", "tokens=tokens.npy", "--dims", "V=4"], "IndexOutOfRange: "),
    (["compile", "model.py:bag", "--emit", "ir"], "--emit and -o belong together"),
    (["compile", "model.py:bag", "--emit", "exe", "-o", "out"], "--emit exe: there are ir, c, explain"),
    (["compile", "model.py:bag", "--numerics", "sloppy"], "'sloppy' is not one of 'real', 'strict'"),
    (
        ["compile", "model.py:bag", "--memory-budget", "much"],
        "'much': bytes (4096, 64MB) or a fraction from 0.0 to 1.0",
    ),
    (
        ["compile", *PLAIN, "--wrt", "w", "--memory-budget", "1B", "--dims", "N=4"],
        "memory_budget=1 bytes, and 48 are the fewest",
    ),
    (["compile", "model.py:bag", "-o", "model.py", "--emit", "ir"], "is a file"),
    (["extract", "model.py:bag", "nokernel", "-o", "out"], "there is no kernel 'nokernel'"),
    (["frobnicate"], "No such command 'frobnicate'"),
    (["dump", "garbage.gir"], "IRFormatError: line 2, column 16: there is no op 'frob'"),
    (["dump", "."], "holds no module of gradc"),
    (["dump", "empty.gir"], "IRFormatError: line 1, column 1: the text ends before 'graph @name(...) {'"),
    (["dump", "junk.gir"], "IRFormatError: line 1, column 1: the character U+00FB may not stand in a text"),
    (
        ["dump", "junk.onnx"],
        "is no ONNX model" if importlib.util.find_spec("onnx") else "needs the package onnx: pip install",
    ),
    (["dump", "absent.py:f"], "absent.py raised ModuleNotFoundError at absent.py:1: No module named 'nothing_there'"),
    (["dump", "syntax.py:f"], "syntax.py raised SyntaxError"),
    (["dump", "divides.py:f"], "divides.py raised ZeroDivisionError at divides.py:1"),
    (["dump", "model.py:bag", "--format", "svg"], "'svg' is not one of 'dot', 'json', 'model-explorer', 'onnx'"),
    (["dump", "model.py:bag", "--format", "dot", "--json"], "--json is of the list of stages"),
    (["dump", "model.py:bag", "--after", "fold", "--diff", "fold"], "one at a time"),
    (["dump", "model.py:bag", "-o", "bag.gir"], "-o is for --format"),
    (["dump", "model.py:bag", "--dims", "N=" + "9" * 19], "a size is an integer, 0 or more, of at most 18 digits"),
    (["compile", "model.py:bag", "-o", "out"], "--emit and -o belong together"),
    (["compile", "model.py:bag", "--emit", "ir", "-o", "/proc/nowhere"], "/proc/nowhere cannot be written"),
    (["compile", "model.py:bag", "--save-module", "/proc/nowhere/m"], "/proc/nowhere/m cannot be written"),
    (["compile", "model.py:bag", "--target", "tpu"], "'tpu' is not one of 'cpu', 'numpy', 'cuda', 'cuda-sim'"),
    (["compile", "model.py:bag", "--dims", "N"], "'N' is not N=64,V=100"),
    (["compile", "model.py:bag", "--memory-budget", "-1"], "bytes (4096, 64MB) or a fraction"),
    (["compile", "model.py:bag", "--wrt", "w", "--save", "hiden"], "save names 'hiden', which no value"),
    (["compile", "model.py:bag", "--reduction", "y"], "'y' is not NAME=STRATEGY"),
    (["compile", "model.py:bag", "--arch", "sm_90"], "arch='sm_90' is for the target 'cuda', not 'cpu'"),
    (["compile", "model.py:bag", "--target", "cuda", "--arch", "sm_12345"], "knows no device 'sm_12345'"),
    (["run", "model.py:bag", "--input", "w=junk.npy"], "'junk.npy' holds no arrays"),
    (["run", "model.py:bag", "--input", "w=objects.npy"], "objects.npy"),
    (["run", "model.py:bag", "--input", "w=wide.npy"], "w is f32[8], got an array of float64[8]; convert it first"),
    (["run", "model.py:bag", "--input", "w=arrays.npz:c"], "arrays.npz holds w; say which one"),
    (["run", "model.py:bag", "--input", "w"], "'w' holds no arrays: No such file"),
    (["run", "model.py:bag", "--seed", "-1"], "-1 is not in the range x>=0"),
    (["run", "model.py:bag", "--seed", "one"], "'one' is not a valid integer"),
    (["run", "model.py:bag", "--out", "nowhere/y.npz"], "nowhere/y.npz cannot be written: No such file or directory"),
    (["run", "model.py:bag", "--no-such"], "No such option '--no-such'"),
    (["check", "model.py:bag", "--wrt", "q2"], "wrt names 'q2'; the inputs of bag are tokens, q, scale, w"),
    (["explain", "model.py:bag", "--static"], "a static table is of the target cuda, and this module is for cpu"),
    (["explain", "model.py:bag", "--static", "--timed", "3"], "give one of them"),
    (["explain", "model.py:bag", "--trace", "nowhere/t.json"], "nowhere/t.json cannot be written"),
    (["export", "model.py:bag"], "Missing option '-o'"),
    (["export", "model.py:bag", "-o", "full"], "full cannot be written: it exists and is no empty folder"),
    (["export", "model.py:bag", "-o", "out", "--lang", "rust"], "'rust' is not 'c'"),
    (["export", "model.py:bag", "-o", "out", "--target", "numpy"], "for the target 'numpy': there are cpu and cuda"),
    (["export", "model.py:bag", "-o", "out", "--target", "cuda"], "for one set of sizes: give dims for"),
    (["extract", "model.py:bag"], "Missing argument 'KERNEL'"),
    (["report", "model.py:bag", "-o", "full"], "full cannot be written: Is a directory"),
    (["report", "model.py:bag", "--timed", "-1"], "-1 is not in the range x>=0"),
    (["opt", "nowhere.gir", "-p", "fold"], "'nowhere.gir' does not exist"),
    (["opt", "good.gir", "-p", "fould"], "fould"),
    (["opt", "good.gir"], "Missing option '-p'"),
    (["opt", "model.py", "-p", "fold"], "expected 'graph', found 'import'"),
    (["bench", "model.py:bag", "--peers", "jax"], "'jax': there are numpy, torch, torch.compile"),
    (["bench", "model.py:bag", "--rounds", "0"], "0 is not in the range x>=1"),
    (["bench", "model.py:bag", "--threads", "0"], "0 is not in the range 1<=x<=1024"),
    (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    (["completion"], "Choose from: bash, zsh, fish"),
    (["demo", "--steps", "0"], "0 is not in the range x>=1"),
    (["demo", "-o", "model.py"], "Directory 'model.py' is a file"),
    (["doctor", "all"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a[:4]) for a, _ in MISTAKES])
def test_a_mistake_is_one_message(arguments: list[str], message: str, gradc_command, folder: Path):
    np.save(folder / "b.npy", np.zeros(3, np.float32))
    np.save(folder / "tokens.npy", np.array([1, 9], np.int64))
    np.save(folder / "wide.npy", np.zeros(8))
    np.save(folder / "objects.npy", np.array([{}], dtype=object))
    np.savez(folder / "arrays.npz", w=np.zeros(8, np.float32))
    for name, text in (
        ("garbage.gir", "graph @g(%x: f32[3]) {\n  %0: f32[3] = frob %x\n  return y=%0\n}\n"),
        ("good.gir", "graph @g(%x: f32[3]) {\n  %0: f32[3] = neg %x\n  return y=%0\n}\n"),
        ("empty.gir", ""),
        ("absent.py", "import nothing_there\n"),
        ("syntax.py", "def f(:\n"),
        ("divides.py", "x = 1 / 0\n"),
    ):
        (folder / name).write_text(text)
    for name in ("junk.gir", "junk.onnx", "junk.npy"):
        (folder / name).write_bytes(bytes(range(0xFB, 0xFF)) * 50)
    (folder / "full").mkdir()
    (folder / "full" / "one").touch()
    before = {*folder.rglob("*")}
    out, err = gradc_command(*arguments, code=2)
    assert message in err and err.startswith("error: ") and err.count("error: ") == 1, err
    assert "Traceback" not in err and not out
    left = {path for path in folder.rglob("*") if "__pycache__" not in path.parts} - before
    assert not left, "something is left behind"


def test_notes_of_an_error_are_shown(gradc_command, folder: Path):
    (folder / "garbage.gir").write_text("graph @g(%x: f32[3]) {\n  %0: f32[3] = frob %x\n  return y=%0\n}\n")
    assert "^^^^" in gradc_command("dump", "garbage.gir", code=2)[1]


def test_a_bug_of_ours_is_called_one(gradc_command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradc.passes.manager.Pipeline.run", lambda *a, **k: 1 / 0)
    monkeypatch.setenv("GRADC_CACHE", "0")
    err = gradc_command("dump", "model.py:bag", code=3)[1]
    assert "Traceback" in err and "This is a bug of gradc" in err and "GRADC_DUMP" in err


# -- the commands ------------------------------------------------------------------------------------------------------


def test_help_shows_examples(gradc_command):
    top = gradc_command("--help")[0]
    for command in ("compile", "dump", "run", "explain", "check", "extract", "demo", "doctor"):
        assert f"  {command}" in top
        assert f"  gradc {command}" in gradc_command(command, "--help")[0]
    assert "Exit codes: 0 fine, 1 a check failed, 2 a mistake" in top
    assert gradc.__version__ in gradc_command("--version")[0]


def test_compile_writes_what_is_asked(gradc_command, folder: Path):
    out = gradc_command("compile", "model.py:bag", "--wrt", "scale,w", "--emit", "ir,c,explain", "-o", "out")[0]
    assert "module bag on cpu" in out and "compiled in" in out
    names = {p.relative_to(folder / "out").as_posix() for p in (folder / "out").rglob("*") if p.is_file()}
    assert {"00-forward.gir", "04-joint.gir", "forward.c", "backward.c", "explain.txt"} <= names
    assert any(n.startswith("kernels/") for n in names)
    assert gradc.load(folder / "out" / "00-forward.gir").input_names == ("tokens", "q", "scale", "w")
    gradc_command("compile", "model.py:bag", "--emit", "c", "-o", "only")
    assert not list((folder / "only").glob("*.gir"))


def test_the_table_is_of_the_sizes_asked_for(gradc_command):
    text = gradc_command("compile", "model.py:bag", "--wrt", "scale", "--dims", "N=4096,V=50000")[0]
    assert "(bytes at N=4096, V=50000)" in text
    assert "1024 standing for" in gradc_command("compile", "model.py:bag", "--wrt", "scale")[0]


def test_options_reach_the_compiler(gradc_command):
    fused = gradc_command("compile", *PLAIN, "--wrt", "w")[0]
    alone = gradc_command("compile", *PLAIN, "--wrt", "w", "--no-fuse")[0]
    assert len(alone.splitlines()) > len(fused.splitlines())
    assert "on numpy" in gradc_command("compile", *PLAIN, "--target", "numpy")[0]
    assert "r.soft" in gradc_command("explain", *PLAIN, "--wrt", "w", "--save", "all")[0]
    assert (
        "r.soft"
        in gradc_command("explain", *PLAIN, "--wrt", "w", "--save", "all", "--memory-budget", "1KB", "--dims", "N=4")[0]
    )
    assert "measured" in gradc_command("explain", *PLAIN, "--dims", "N=4", "--timed", "1")[0]
    assert (
        "f32[V,8]"
        in gradc_command("dump", "model.py:bag", "--wrt", "scale", "--numerics", "strict", "--after", "tidy.fold")[0]
    )


def test_dump(gradc_command):
    out = gradc_command("dump", "model.py:bag", "--wrt", "scale")[0]
    assert "joint " in out and "unchanged" in out
    joint = gradc_command("dump", "model.py:bag", "--wrt", "scale", "--after", "joint")[0]
    assert joint.startswith("graph @bag_joint<") and gradc.parse(joint).output_names == ("y", "d.scale")
    every = gradc_command("dump", "model.py:bag", "--wrt", "scale", "--all")[0]
    assert every.count("# ---- ") == len(out.split("\n\n")[0].splitlines())


def test_diff_shows_only_what_changed(gradc_command):
    lines = gradc_command("dump", *PLAIN, "--wrt", "w", "--diff", "decompose")[0].splitlines()
    assert lines[0] == "--- before decompose" and lines[1] == "+++ after decompose"
    assert any(line.startswith("-") and "softmax" in line for line in lines)
    assert any(line.startswith("+") and "mul" in line and "# soft" in line for line in lines), (
        "what took its place keeps its name"
    )
    kept = [line for line in lines[2:] if line.startswith(" ")]
    assert any("matmul" in line for line in kept), "a value that both have is one line"
    assert not any(line[1:].strip().startswith("%0:") for line in lines if line[0] in "+-")
    assert "changed nothing" in gradc_command("dump", *PLAIN, "--diff", "upcast")[0]
    assert "starts anew" in gradc_command("dump", *PLAIN, "--diff", "forward.schedule")[0]
    choice = gradc_command("dump", *PLAIN, "--diff", "forward.choose_reduction")[0]
    assert "+" in choice and "strategy(y: privatized)" in choice


def test_follow_a_value(gradc_command):
    out = gradc_command("dump", "model.py:bag", "--wrt", "scale", "--follow", "hidden")[0]
    assert "forward:\n  %2: f32[N,8] = gelu %1" in out
    after = out.split("decompose:\n")[1].splitlines()[0]
    assert "= mul " in after and "# hidden" in after
    followed = gradc_command("dump", *PLAIN, "--wrt", "w", "--follow", "h")[0]
    assert "backward.schedule:" in followed and "temp h: f32[N,3]" in followed.split("forward.schedule:")[1]
    output = gradc_command("dump", *PLAIN, "--wrt", "w", "--follow", "w")[0]
    assert "-> d.w" in output and "output d.w: f32[4,3]" in output
    table = gradc_command("dump", "model.py:bag", "--wrt", "scale", "--follow", "table")[0]
    assert "(rewritten here: --diff push_gathers shows how)" in table


def test_run(gradc_command, folder: Path):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 4)).astype("f4"), rng.standard_normal((4, 3)).astype("f4")
    np.save(folder / "x.npy", x)
    np.savez(folder / "both.npz", x=x, w=w)
    out = gradc_command(
        "run", *PLAIN, "--input", "x=x.npy", "--input", "w=both.npz", "--grad", "--wrt", "w", "--out", "y.npz"
    )[0]
    assert "at N=6" in out and "d.w  float32[4,3]  min " in out and "random" not in out
    soft = np.exp(x @ w) / np.exp(x @ w).sum(1, keepdims=True)
    with np.load(folder / "y.npz") as stored:
        assert set(stored.files) == {"y", "d.w"}
        np.testing.assert_allclose(stored["y"], (soft**2).sum(), rtol=1e-5)
    for inputs in (["both.npz"], ["x=both.npz:x", "w=both.npz:w"]):
        given = [word for text in inputs for word in ("--input", text)]
        assert gradc_command("run", *PLAIN, *given)[0].splitlines()[1].split() == out.splitlines()[1].split()
    one, two, three = (gradc_command("run", "model.py:bag", "--dims", "N=64,V=10", "--seed", s)[0] for s in "001")
    assert "random (seed 0): tokens, q, scale, w" in one
    assert one.splitlines()[1] == two.splitlines()[1] != three.splitlines()[1]
    assert "d.scale" in gradc_command("run", "model.py:bag", "--grad")[0], "every float input"


def test_bfloat16_files(gradc_command, folder: Path):
    import ml_dtypes

    gradc_command("run", "model.py:plain", "--type", "x=bf16[N,4]", "--type", "w=bf16[4,3]", "--grad", "--out", "a.npz")
    with np.load(folder / "a.npz") as stored:
        assert stored["d.w"].dtype == np.uint16
        np.savez(folder / "w.npz", w=stored["d.w"])
        want = stored["d.w"].view(ml_dtypes.bfloat16)
    gradc.trace(lambda w: w * 1, w="bf16[4,3]").save(folder / "id.gir")
    gradc_command("run", "id.gir", "--input", "w.npz", "--out", "b.npz")
    with np.load(folder / "b.npz") as stored:
        assert np.array_equal(stored["y"].view(ml_dtypes.bfloat16), want)


def test_explain(gradc_command):
    out = gradc_command("explain", "model.py:bag", "--wrt", "scale", "--dims", "N=100,V=7")[0]
    assert "N=100" in out and "V=7" in out and "residuals:" in out and "passes:" in out


def test_check_says_yes_and_no(gradc_command):
    out = gradc_command("check", "model.py:bag", "--dims", "N=5")[0]
    assert "at N=5" in out and "7 of 7 hold" in out and "cpu kernels, f64" in out
    assert "kernels" not in gradc_command("check", "model.py:bag", "--no-kernels", "--wrt", "w")[0]
    out = gradc_command("check", "model.py:wrongly", "--type", "x=f32[N]", "--no-kernels", code=1)[0]
    assert "FAILED" in out and "differences say" in out


def test_extract_gives_files_that_check_themselves(gradc_command, folder: Path):
    out = gradc_command(
        "extract", "model.py:bag", "--wrt", "scale", "sum_scatter_add_mul", "-o", "one", "--dims", "N=300,V=90"
    )[0]
    assert "N=300, V=90" in out
    script = [sys.executable, str(folder / "one" / "check.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        script, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0 and "ok" in done.stdout and "GB/s" in done.stdout, done.stderr
    source = folder / "one" / "kernel.c"
    edited = source.read_text().replace(" * v", " + v", 1)
    assert edited != source.read_text()
    source.write_text(edited)
    done = subprocess.run(
        script, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 1 and "WRONG" in done.stdout, "the C in the folder is what runs"


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor(gradc_command):
    out = gradc_command("doctor")[0]
    for what in ("Python", "numpy", "C compiler", "threads", "vectors", "NVRTC", "CuPy", "GPU", "cache"):
        assert f"  {what} " in out, out
    assert "healthy" in out and out.rstrip().endswith("nothing is broken")


def test_doctor_as_data_and_with_hints(gradc_command, monkeypatch: pytest.MonkeyPatch):
    lines = json.loads(gradc_command("doctor", "--json")[0])
    assert {line["state"] for line in lines} <= {"ok", "missing", "broken"}
    assert {"what", "text", "state", "hint"} == set(lines[0])
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("GRADC_NVRTC", "/no/such.so")
    plain, hints = gradc_command("doctor")[0], gradc_command("doctor", "--fix-hints")[0]
    assert "-> " not in plain and "--fix-hints says what to do" in plain
    assert "-> install gcc or clang" in hints and "unset GRADC_NVRTC" in hints
    for text in (plain, hints):
        assert "nothing here compiles C or CUDA: modules run with target='numpy' alone" in text


def test_tables_as_data(gradc_command):
    explained = json.loads(gradc_command("explain", "model.py:bag", "--wrt", "scale", "--dims", "N=7", "--json")[0])
    assert explained["dims"]["N"] == 7 and explained["combines"][0]["pick"]
    checked = json.loads(gradc_command("check", "model.py:bag", "--wrt", "scale", "--json")[0])
    assert {finding["verdict"] for finding in checked["findings"]} == {"ok"}
    gradc_command("explain", *PLAIN, "--static", "--json", "--target", "cuda", "--arch", "sm_90", code=2)
    found = json.loads(gradc_command("compile", "model.py:bag", "--wrt", "scale", "--json", "--save-module", "b")[0])
    assert found["kernels"] == [
        {name: value for name, value in each.items() if name not in ("ir", "source", "of")}
        for each in json.loads(gradc_command("explain", "model.py:bag", "--wrt", "scale", "--json")[0])["kernels"]
    ]
    stages = json.loads(gradc_command("dump", "model.py:bag", "--wrt", "scale", "--json")[0])
    assert (stages[0]["name"], stages[0]["kind"], stages[0]["before"]) == ("forward", "graph", None)
    gradc_command("dump", "model.py:bag", "--json", "--all", code=2)


def test_results_as_data(gradc_command, folder: Path):
    arguments = ("model.py:bag", "--dims", "N=3,V=5", "--grad", "--wrt", "scale", "--out", "y.npz", "--json")
    found = json.loads(gradc_command("run", *arguments)[0])
    assert (found["dims"], found["drawn"]) == ({"N": 3, "V": 5}, ["tokens", "q", "scale", "w"])
    wanted = np.load(folder / "y.npz")
    for each in found["results"]:
        array = wanted[each["name"]]
        assert tuple(each["shape"]) == array.shape and each["dtype"] == str(array.dtype) and not each["not_finite"]
        assert [each["min"], each["mean"]] == pytest.approx([array.min(), array.mean(dtype=float)], rel=1e-7)
    program = gradc_command("dump", "model.py:bag", "--after", "forward.plan_buffers")[0]
    (folder / "p.gir").write_text(program)
    assert json.loads(gradc_command("run", "p.gir", "--dims", "N=3,V=5", "--json")[0])["results"][0]["name"] == "y"
    assert json.loads(gradc_command("compile", "p.gir", "--json")[0])["kernels"]


def test_colours_are_for_terminals_that_want_them(gradc_command, monkeypatch: pytest.MonkeyPatch):
    arguments = ("dump", "model.py:bag", "--wrt", "scale", "--diff", "simplify")
    plain = gradc_command(*arguments)[0]
    assert "\033" not in plain
    monkeypatch.setattr("gradc.cli.results._terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("x", "red") == "\033[31mx\033[0m"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert coloured("x", "red") == "x"


def _completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word, by the script that gradc prints."""
    command = folder / "gradc"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gradc "$@"\n')
    command.chmod(0o755)
    shell = """
    source <("$1" completion bash)
    complete -p gradc > /dev/null || exit 1
    shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _gradc_completion gradc
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    bash = ["bash", "--norc", "-c", shell, "bash", str(command), *words]
    done = subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(folder: Path):
    assert {"explain", "export", "extract"} == set(_completed(folder, "gradc", "ex"))
    assert {"--numerics"} == set(_completed(folder, "gradc", "compile", "m.gir", "--num"))
    assert {"real", "strict"} == set(_completed(folder, "gradc", "compile", "m.gir", "--numerics", ""))
    assert {"cuda", "cuda-sim"} == set(_completed(folder, "gradc", "run", "--target", "cu"))
    assert "compopt" in gradc_script(folder)


def gradc_script(folder: Path) -> str:
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "gradc", "completion", shell]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        scripts[shell] = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout
    assert scripts["zsh"].startswith("#compdef gradc") and "complete --no-files --command gradc" in scripts["fish"]
    return scripts["bash"]


def _bench(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """In a process of its own: it forks, and this one may have threads of torch.  With a calibration, as some
    processors have one.
    """
    (folder / "cpu.json").write_text(calibration_text(CPU, {}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CALIBRATION": str(folder / "cpu.json")}
    command = [sys.executable, "-m", "gradc", "bench", "model.py:bag", "--dims", "N=7,V=5", "--rounds", "2", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_bench_times_peers_that_compute_the_same(folder: Path):
    peers = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
    code, out, err = _bench(folder, "--wrt", "scale,w", "--peers", ",".join(peers), "--threads", "1", "--json")
    assert code == 0 and not err, err
    found = json.loads(out)
    assert found["dims"] == {"N": 7, "V": 5} and found["threads"] == 1 and found["wrt"] == ["scale", "w"]
    assert [row["peer"] for row in found["rows"]] == ["gradc", *peers]
    for row in found["rows"]:
        assert not row["why"] and row["difference"] < 1e-5
        for times in (row["forward"], row["both"]):
            assert 0 < times["low"] <= times["median"] <= times["high"] and times["rounds"] == 2


def test_bench_says_what_it_cannot_measure(folder: Path):
    hidden = folder / "torch"  # a package of this name that cannot be imported
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('there is no torch')")
    code, out, err = _bench(folder, "--peers", "torch", "--forward")
    assert code == 0, err
    heads, ours, why = out.splitlines()[1:]
    assert heads.split()[0] == "forward" and ours.startswith("gradc") and " ms " in ours
    assert why == "torch was not measured: it is not installed: pip install 'gradc[torch]'"


def test_bench_is_for_graphs_on_the_cpu(gradc_command, folder: Path):
    assert "there are numpy, torch, torch.compile" in gradc_command("bench", *PLAIN, "--peers", "jax", code=2)[1]
    assert "on the CPU" in gradc_command("bench", *PLAIN, "--target", "cuda", code=2)[1]
    (folder / "p.gir").write_text(gradc_command("dump", "model.py:bag", "--after", "forward.plan_buffers")[0])
    assert "bench is for graphs" in gradc_command("bench", "p.gir", code=2)[1]


def test_a_graph_for_other_tools(gradc_command, folder: Path):
    text = gradc_command("dump", "model.py:bag", "--wrt", "scale", "--after", "joint", "--format", "dot")[0]
    assert text.startswith("digraph ") and "dequantize" in text
    gradc_command("dump", "model.py:bag", "--format", "model-explorer", "-o", "bag.json")
    assert json.loads((folder / "bag.json").read_text())["graphs"][0]["nodes"]
    data = json.loads(gradc_command("dump", "model.py:bag", "--format", "json")[0])
    assert from_json(data).input_names == ("tokens", "q", "scale", "w")
    gradc_command("explain", "model.py:bag", "--trace", "bag.trace")
    assert json.loads((folder / "bag.trace").read_text())["traceEvents"]
    for arguments in (
        ("--after", "forward.schedule", "--format", "dot"),
        ("--all", "--format", "dot"),
        ("-o", "x"),
        ("--format", "svg"),
    ):
        assert "Traceback" not in gradc_command("dump", "model.py:bag", *arguments, code=2)[1]
    assert not (folder / "x").exists()


@pytest.mark.long("gradc/cli", "gradc/runtime/host", "templates/cpu")
def test_doctor_works_without_anything(folder: Path):
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "GRADC_CACHE_DIR")}
    environment |= {"PATH": str(folder), "HOME": str(folder), "PYTHONPATH": str(ROOT), "GRADC_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "gradc", "doctor"],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert "turned off by GRADC_CACHE" in done.stdout and "GPU" in done.stdout
    import importlib.util

    if importlib.util.find_spec("ziglang") is None:
        assert "no C compiler" in done.stdout and done.returncode == 0, done.stdout


def test_doctor_finds_what_is_broken(folder: Path):
    (folder / "cache").write_text("a file")
    (folder / "badcc").write_text("#!/bin/sh\nexit 1\n")
    (folder / "badcc").chmod(0o755)
    environment = {
        **os.environ,
        "CC": str(folder / "badcc"),
        "GRADC_CACHE_DIR": str(folder / "cache"),
        "GRADC_VERIFY": "perhaps",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "gradc", "doctor"],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("broken: ") and all(w in last for w in ("C compiler", "cache", "GRADC_VERIFY")), done.stdout


# -- a process of its own ----------------------------------------------------------------------------------------------


def test_a_reader_that_stops_is_no_error(folder: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m gradc dump model.py:bag --wrt scale --all | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0 and not done.stderr and done.stdout.count("\n") == 1


def test_progress_only_where_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradc.cli.progress.PATIENCE", 0.02)
    monkeypatch.setattr("gradc.cli.progress.PERIOD", 0.02)
    monkeypatch.setattr("gradc.cli.progress.time", SimpleNamespace(monotonic=lambda: 7.0))
    said = io.StringIO()  # pytest's capture may lose what is written while it is read
    monkeypatch.setattr("sys.stderr", said)
    for wanted in (None, False):
        with Progress("compiling", wanted) as progress:
            assert not progress._thread.is_alive()
    assert said.getvalue() == ""
    with Progress("compiling", True) as progress:
        while said.getvalue().count("\n") < 1:
            time.sleep(0.001)
        progress.say("checking")
        while said.getvalue().count("\n") < 2:
            time.sleep(0.001)
    assert said.getvalue() == "compiling ... 0 s\nchecking ... 0 s\n"
    monkeypatch.setattr("gradc.cli.progress.PATIENCE", 1e6)
    with Progress("quick", True):
        pass
    assert said.getvalue().count("\n") == 2


def test_the_command_does_not_wait_for_input(folder: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "gradc"],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    assert "Usage: gradc" in done.stdout + done.stderr


# -- opt ---------------------------------------------------------------------------------------------------------------


def test_opt_repeats_what_compile_did(gradc_command, folder: Path):
    """Pass after pass over the dumps of a compilation gives the next dump."""
    gradc_command("compile", "model.py:bag", "--wrt", "scale", "--emit", "ir", "-o", "stages")
    files = {f.stem.split("-", 1)[1]: f for f in sorted((folder / "stages").glob("*.gir"))}
    names = list(files)
    for before, name in itertools.pairwise(names):
        if name not in (
            "static_indices",
            "push_gathers",
            "push_slices",
            "decompose",
            "upcast",
            "simplify",
            "fold",
            "sink_dequant",
            "propagate_reshapes",
            "merge_rows",
        ):
            continue
        out = gradc_command("opt", f"stages/{files[before].name}", "-p", name)[0]
        assert gradc.parse(out) == gradc.parse(files[name].read_text()), name
    gradc_command(
        "opt",
        f"stages/{files['forward'].name}",
        "-p",
        "differentiate,decompose,simplify",
        "--wrt",
        "scale",
        "-o",
        "joint.gir",
    )
    out = gradc_command("opt", "joint.gir", "-p", "schedule,choose_reduction,plan_buffers", "--all")[0]
    assert "# after schedule" in out and "slot 0" in out.split("# after plan_buffers")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "polish"), "there is no pass 'polish'; passes over a graph: differentiate"),
        (("-p", "plan_buffers"), "plan_buffers is no pass over a graph"),
        (("-p", "differentiate"), "differentiate needs --wrt"),
        (("-p", "schedule"), "decompose comes before it"),
        (("-p", "decompose,schedule,decompose"), "decompose is no pass over a program"),
        ((), "Missing option"),
    ],
)
def test_opt_says_what_is_wrong(gradc_command, folder: Path, arguments: tuple[str, ...], message: str):
    gradc_command("compile", "model.py:bag", "--wrt", "scale", "--emit", "ir", "-o", "stages")
    (first,) = (folder / "stages").glob("*-forward.gir")
    assert message in gradc_command("opt", f"stages/{first.name}", *arguments, code=2)[1]


def test_the_demo_as_json(gradc_command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    from gradc.demo import report, train

    def run(steps, quick, out, *, quiet):
        told = report.Report("demo", quiet)
        told.say("About.")
        told.heading("Training")
        table = told.table("model", "loss")
        table.add("float", "0.5")
        told.code(f"{steps} {quick} {out}")
        return False, told

    monkeypatch.setattr(train, "run", run)
    out, err = gradc_command("demo", "--json", "--steps", "7", "-o", "there", code=1)
    assert not err and json.loads(out) == {
        "passed": False,
        "sections": [
            {"heading": "demo", "texts": ["About."], "tables": []},
            {
                "heading": "Training",
                "texts": ["7 False there"],
                "tables": [{"columns": ["model", "loss"], "rows": [["float", "0.5"]]}],
            },
        ],
    }


def test_closed_streams_are_empty_ones(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """``gradc ... <&- >&-``, as of a daemon: Python has None for such a stream."""
    from gradc.cli import model

    monkeypatch.setattr(sys, "stdout", None)
    assert main(["dump", "model.py:bag"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    model._stdin.cache_clear()
    assert main(["dump", "-"]) == 2
    model._stdin.cache_clear()
    assert "line 1, column 1: the text ends before 'graph" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["dump", "nowhere.gir"]) == 2
