"""Sentences that users meet: each names what was written, by whom it was wanted, and what to write instead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import cli, ops
from gradc.errors import InvalidProblem, TypeRuleError
from gradc.process import files

ROOT = Path(__file__).resolve().parents[2]
f32 = np.float32


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(lambda x, w: ops.gelu(x @ w), x="f32[B,8]", w="f32[8,600]"), wrt=["w"])


def traced(call: Any, **types: str) -> Any:
    return gradc.trace(call, **(types or {"x": "f32[N,4]"}))


# -- ops ---------------------------------------------------------------------------------------------------------------

CALLS = {
    "misspelled": (lambda x: ops.transpose(x, axess=(1, 0)), r"transpose\(.*'axess'; did you mean axes\?"),
    "unknown to an op without comforts": (
        lambda x: ops.softmax(x, axos=1),
        r"softmax has no attribute 'axos'; it has axis; did you mean axis\?",
    ),
    "one argument under two names": (
        lambda x: ops.sum(x, axis=1, dim=1),
        r"sum: axis and dim are one argument, axis; give it once",
    ),
    "the same of an op without comforts": (
        lambda x: ops.softmax(x, axis=1, dim=1),
        r"softmax: axis and dim are one argument, axis; give it once",
    ),
    "one argument by place and by another name": (lambda x: ops.sum(x, 1, dim=1), r"sum\(.*multiple values.*'axis'"),
    "sizes one by one": (
        lambda x: ops.reshape(x, 3, 1),
        r"reshape\(x, shape\): too many .*; shape is one argument: reshape\(x, \(3, 1\)\)",
    ),
    "a Python bool as a condition": (
        lambda x: ops.where(x is None, x, 0.0),
        r"where.*: the condition is the Python bool False, not a traced mask: compare values",
    ),
    "a Python bool as an operand": (
        lambda x: ops.mul(x, x is None),
        r"mul.*: the Python bool False meets a f32 operand; write 0",
    ),
    "a mask as an index": (
        lambda x: x[x > 0],
        r"getitem: x\[mask\] would have a shape that only the data knows; write ops.where",
    ),
    "a Python bool as an index": (lambda x: x[True], r"getitem: x\[mask\]"),
    "a list of bools as an index": (lambda x: x[[True, False]], r"getitem: x\[mask\]"),
    "a branch on data": (lambda x: x if x == 0.0 else -x, r"has no truth value: Python cannot branch on data"),
    "a traced value in a tuple": (lambda x: x if -x in (x, x + 1) else -x, r"has no truth value"),
    "missing": (lambda x: ops.reshape(x), r"reshape\(x, shape\): missing a required argument: 'shape'"),
    "too many": (lambda x: ops.exp(x, 1, 2), r"exp\(x\): takes 1 arguments, got 3"),
    "too many for comforts": (
        lambda x: ops.argmax(x, 0, False, 7),
        r"argmax\(x, axis=None, keepdims=False\): too many positional arguments",
    ),
    "twice": (lambda x: ops.sum(x, x=x), r"sum\(.*multiple values for argument 'x'"),
    "nothing": (lambda x: ops.mean(), r"mean"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_an_op(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(TypeRuleError, match=message) as caught:
        traced(call)
    assert "sugar" not in str(caught.value) and "<locals>" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(n for n in ops.REGISTRY if n not in ("input", "getitem", "constant")))
def test_no_op_lets_python_speak(name: str) -> None:
    """Wrong, missing and extra arguments of every op are its own typed errors, with its name."""
    op = ops.REGISTRY[name]
    nothing = (lambda x: op(),) if op.required or op.variadic or op.sugar is not None else ()
    for wrong in (
        *nothing,
        lambda x: op(x, nonsense=1),
        lambda x: op(*[x] * 40, nonsense=2),
        lambda x: op("text", nonsense=3),
    ):
        with pytest.raises(TypeRuleError, match=rf"\b{name}\b") as caught:
            traced(wrong)
        assert "locals" not in str(caught.value) and "() got" not in str(caught.value)


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "argmax", "reshape", "transpose", "flip", "mean", "softmax"])
def test_ops_with_comforts_take_arrays_as_the_others_do(name: str) -> None:
    array = np.arange(12, dtype=f32).reshape(3, 4)
    more = {"reshape": ((4, 3),), "softmax": (1,)}.get(name, ())
    graph = traced(lambda x: ops.sum(x) * ops.cast(getattr(ops, name)(array, *more), "f32"))
    assert "constant" in str(graph)


COMPARED = {
    ">": lambda n: n > 3,
    "<": lambda n: 3 > n,
    ">=": lambda n: n >= 2,
    "<=": lambda n: n <= n + 1,
    "max": lambda n: max(n, 4),
}


@pytest.mark.parametrize("how", COMPARED)
def test_a_symbolic_size_is_not_compared(how: str) -> None:
    with pytest.raises(TypeRuleError, match=r"is not known while tracing, where it is symbolic: assume\('N >= 4'\)"):
        traced(lambda x: x if COMPARED[how](x.shape[0]) else -x)


def test_arithmetic_of_sizes() -> None:
    with pytest.raises(TypeRuleError, match=r"N / 2: a size is an integer; // rounds down"):
        traced(lambda x: x * (x.shape[0] / 2))
    sizes: list[Any] = []
    traced(lambda x: (sizes.append((x.shape[0] % 4, 7 % x.shape[0], (4 * x.shape[0]) % 4)), x)[1])
    from gradc.ir.dims import evaluate

    assert [[evaluate(s, {"N": n}) for s in sizes[0]] for n in (1, 3, 6, 9)] == [
        [n % 4, 7 % n, 0] for n in (1, 3, 6, 9)
    ]


def test_a_python_number_as_an_argument_is_named() -> None:
    step = gradc.value_and_grad(lambda w, x, rate: ops.sum(w * x * rate))
    w = np.ones(3, f32)
    with pytest.raises(
        TypeRuleError,
        match=(
            r"the Python number rate=2 is i64\[\] here, an input like any other: give it as an array of the dtype it"
            r" meets"
        ),
    ):
        step(w, w, 2)
    value, grads = step(w, w, f32(2))
    assert value == 6 and grads["w"].tolist() == [2, 2, 2]
    with pytest.raises(TypeRuleError, match=r"the Python number rate=0\.5 is f64\[\] here"):
        gradc.trace(lambda x, rate: x * rate, x="f32[N]", rate=0.5)


# -- calls of a module -------------------------------------------------------------------------------------------------


def test_inputs_without_names(module: gradc.Module) -> None:
    x, w = np.ones((10, 8), f32), np.ones((8, 600), f32)
    for entry in (module, module.forward, module.value_and_grad):
        for given in ((x, w), ([x, w],), (x,)):
            with pytest.raises(
                InvalidProblem,
                match=(
                    r"takes its inputs by name, .*\(x=\.\.\., w=\.\.\.\), or as one dict of them; it was given"
                    r" (ndarray|list)"
                ),
            ):
                entry(*given)
    with pytest.raises(InvalidProblem, match="takes its inputs by name"):
        module.forward.run(x, w)
    with pytest.raises(InvalidProblem, match=r"takes its inputs by name, embedding_backward.*it was given list"):
        gradc.plans.embedding_backward(D=4).run([x])
    with pytest.raises(
        InvalidProblem, match=r"backward begins with the residuals that forward gave, .*not with nothing"
    ):
        module.backward()
    with pytest.raises(
        InvalidProblem, match=r"backward begins with the residuals that forward gave, .*not with a ndarray"
    ):
        module.backward(x)


def test_which_input_is_no_array(module: gradc.Module) -> None:
    with pytest.raises(InvalidProblem, match=r"the input x: a builtins\.list is not an array"):
        module(x=[[1.0]], w=np.ones((8, 600), f32))
    with pytest.raises(InvalidProblem, match=r"out\['y'\]: a builtins\.dict is not an array"):
        module(x=np.ones((1, 8), f32), w=np.ones((8, 600), f32), out={"y": {}})


def test_a_cotangent_of_other_sizes(module: gradc.Module) -> None:
    y, residuals = module.forward(x=np.ones((32, 8), f32), w=np.ones((8, 600), f32))
    with pytest.raises(
        InvalidProblem,
        match=(
            r"the cotangent of y has the shape \(10, 600\), and forward gave y: f32\[B,600\] of the shape \(32, 600\)"
            r" \(B=32 in that call\)"
        ),
    ):
        module.backward(residuals, np.ones((10, 600), f32))
    assert y.shape == (32, 600)


def test_kernels_that_are_not_there(module: gradc.Module) -> None:
    kernels = module.kernels
    name = next(iter(kernels))
    with pytest.raises(KeyError, match=f"there is no kernel 'foo'; the kernels are .*{name}"):
        kernels["foo"]
    with pytest.raises(KeyError, match=f"did you mean {name}"):
        module.forward.kernels[name[:-1]]
    call = kernels.calls[0]
    for said in (call, "matmul"):
        with pytest.raises(KeyError, match=f"'{said}' is computed by a library: it has no kernel"):
            kernels[said]


def test_the_other_way_to_combine_says_when() -> None:
    module = gradc.compile(gradc.trace(lambda i, t: ops.embedding(i, t), i="i64[N]", t="f32[V,64]"), wrt=["t"])
    from gradc.inspect.explain import summary

    both = summary(module, {"N": 100_000, "V": 1}) + summary(module, {"N": 32, "V": 100_000})
    few = "V >= 2 and N <= 2999278 and V <= 21845"
    sorts = f"{few} or V >= 2 and 16384*V >= 179*N+1 and V <= 32768 or V >= 2 and 8192*V >= 179*N+1"
    assert "nothing before" not in both and f"segmented when {sorts}" in both and f"privatized unless {sorts}" in both


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    gradc.trace(lambda x, w: ops.sum(ops.gelu(x @ w)), x="f32[N,4]", w="f32[4,3]", name="model").save(
        tmp_path / "model.gir"
    )
    return str(tmp_path / "model.gir")


def told(capsys: Any, *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return str(capsys.readouterr().err)


def test_names_that_the_command_does_not_know(model: str, tmp_path: Path, capsys: Any) -> None:
    assert "there is no pass 'nonsense'; the passes are forward, static_indices, push_gathers" in told(
        capsys, "dump", model, "--diff", "nonsense"
    )
    assert "there is no kernel 'nonsense'; the kernels are " in told(
        capsys, "extract", model, "nonsense", "-o", str(tmp_path / "k")
    )
    assert "'matmul' is computed by a library: it has no kernel" in told(
        capsys, "extract", model, "matmul", "-o", str(tmp_path / "k")
    )
    assert "did you mean forward.partition or backward.partition? passes over a graph" in told(
        capsys, "opt", model, "-p", "partition"
    )


def test_opt_goes_from_a_dumped_joint_graph_to_a_program(model: str, tmp_path: Path, capsys: Any) -> None:
    """Its help says which file and which passes: they are the dump's own names."""
    assert cli.main(["opt", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "04-joint.gir" in shown and "05-joint" not in shown
    assert cli.main(["compile", model, "--wrt", "w", "--emit", "ir", "-o", str(tmp_path / "ir")]) == 0
    names = {p.name for p in (tmp_path / "ir").iterdir()}
    joint = tmp_path / "ir" / "04-joint.gir"
    assert joint.exists()
    for part in ("forward", "backward"):
        assert any(name.endswith(f"-{part}.partition.gir") for name in names)
        done = cli.main(
            [
                "opt",
                str(joint),
                "-p",
                "decompose,upcast,simplify,fold,sink_dequant,simplify,fold,"
                f"{part}.partition,schedule,choose_reduction,plan_buffers",
                "-o",
                str(tmp_path / part),
            ]
        )
        assert done == 0 and "program @" in (tmp_path / part).read_text()


@pytest.mark.parametrize("command", ["compile", "save", "opt", "extract", "run"])
def test_no_space_left_names_the_path(
    command: str, model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = str(tmp_path / "full")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = {
        "compile": ["compile", model, "--emit", "ir", "-o", to],
        "save": ["compile", model, "--save-module", to],
        "opt": ["opt", model, "-p", "decompose", "-o", to],
        "extract": ["extract", model, next(iter(gradc.compile(gradc.load(model)).kernels)), "-o", to],
        "run": ["run", model, "--out", f"{to}.npz"],
    }[command]
    monkeypatch.setattr(files, "_created", full)
    said = told(capsys, *arguments)
    assert "No space left on device" in said and to in said


IMPORTING = "import sys, time\nprint('importing', flush=True)\n"


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    "waiting",
    ["time.sleep(60)", "try:\n    time.sleep(60)\nexcept BaseException as e:\n    raise ImportError('failed') from e"],
    ids=["waits", "turns it into ImportError"],
)
def test_ctrl_c_while_the_command_is_imported_is_no_traceback(waiting: str, tmp_path: Path) -> None:
    """The import of a package that the command needs waits here until the signal is there."""
    (tmp_path / "click.py").write_text(f"{IMPORTING}{waiting}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen(
        [sys.executable, "-m", "gradc", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "importing\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (130, "interrupted\n")
