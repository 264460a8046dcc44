"""The release of torch beside gradc: too old, newer than any that was tested; private names, and where they stand."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc  # noqa: E402
from gradc.errors import Unsupported, UntestedVersion  # noqa: E402
from gradc.runtime import torch_private as private  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gradc.__file__).parent
THE_FILE = PACKAGE / "runtime" / "torch_private.py"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which torch says that it is another release."""
    return subprocess.run([sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("version", ["2.15.1", "a-build-of-mine"])
def test_a_newer_release_warns_once_and_works(version: str) -> None:
    done = run(f"""
import torch
torch.__version__ = {version!r}
import gradc
import gradc.torch
from gradc.torch import Module
net = torch.nn.Linear(3, 2)
graph = gradc.from_torch(net, (torch.ones(4, 3),))
call = torch.compile(lambda x: (x.sin() * 2).exp(), backend="gradc", options={{"fallback": "error", "target": "numpy"}})
x = torch.ones(3)
torch.testing.assert_close(call(x), (x.sin() * 2).exp())
print(graph.input_names)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('weight', 'bias', 'input')"
    told = [line for line in done.stderr.splitlines() if "UntestedVersion" in line]
    assert len(told) == 1 and f"torch {version} is newer than 2.15.0" in told[0]


VERSIONS = {
    **dict.fromkeys(("1.13.0", "2.5.1", "2.5.99+cu121"), "older"),
    **dict.fromkeys(("2.6", "2.6.0+cu124", "2.9.0.dev20250801", "2.13.0+cpu", "2.15.0", "2.15.0a0"), "tested"),
    **dict.fromkeys(("2.15.1", "2.16.0a0+git1234567", "3.0.1+cu140", "a-build-of-mine"), "newer"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_version_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            private.check_release.__wrapped__()
            found = "newer" if told else "tested"
        except Unsupported:
            found = "older"
    assert found == VERSIONS[version] and {w.category for w in told} <= {UntestedVersion}


@pytest.mark.parametrize("version", ["2.5.1"])
@pytest.mark.parametrize(
    "use",
    [
        "import gradc.torch",
        "import gradc; gradc.from_torch",
        "torch.compile(lambda x: x + 1, backend='gradc')(torch.ones(2))",
    ],
)
def test_an_older_release_is_one_clear_error(version: str, use: str) -> None:
    done = run(f"import torch; torch.__version__ = {version!r}; {use}")
    assert done.returncode == 1
    wanted = (
        f"torch {version} is older than 2.6, the oldest release that gradc.torch works with: pip install 'torch>=2.6'"
    )
    assert f"Unsupported: {wanted}" in done.stderr


def test_ops_are_kept_whole_as_by_torchs_own_context() -> None:
    """The same kernels and rules inside, again and again; outside, and after an error, what was there before."""
    from gradc.torch import decompositions as ours
    from gradc.torch.dynamo import is_kept

    def about(function: Any) -> Any:
        if isinstance(function, functools.partial):
            return about(function.func), {name: about(value) for name, value in function.keywords.items()}
        return getattr(function, "__qualname__", str(function))

    def seen() -> Any:
        kernels = {o: {key: about(f) for key, f in o.py_kernels.items()} for o in table}
        return kernels, {o: about(f) for o, f in ours._fake_rules.items() if o in table}

    table = ours.decompositions(is_kept)[0]
    assert len(table) > 400
    outside = seen()
    with ours._torchs_own(is_kept):
        inside = seen()
    assert inside != outside == seen() and len(inside[1]) == len(table) > len(outside[1])
    for k in range(2):
        if k:  # as torch.export leaves it
            ours._fake_rules.pop(torch.ops.aten.item.default)
        with ours.kept_whole(is_kept):
            assert seen() == inside
            with ours.kept_whole(is_kept):  # in itself: by torch's own context
                assert {o: set(k) for o, k in seen()[0].items()} == {o: set(k) for o, k in inside[0].items()}
        assert seen() == outside
    with pytest.raises(ZeroDivisionError), ours.kept_whole(is_kept):
        _ = 1 / 0
    assert seen() == outside


def test_a_name_that_a_newer_release_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.SINCE, "gone", ((private.OLDEST, "torch._functorch.aot_autograd"),))
    monkeypatch.setitem(private.SINCE, "of_no_module", ((private.OLDEST, "torch._no_such_module"),))
    for name, module in (("gone", "torch._functorch.aot_autograd"), ("of_no_module", "torch._no_such_module")):
        with pytest.raises(Unsupported, match=re.escape(f"has no {module}.{name}, which gradc.torch uses")):
            private.private(name)


def test_every_private_name_is_there() -> None:
    """A release of torch that moves one is seen here, by name."""
    for name in private.SINCE:
        private.private(name)
    rules = importlib.import_module(private.DYNAMO_RULES)
    assert callable(rules.add)
    x = torch.ones(2)
    before = private.version_count(x)
    x.add_(1)
    assert private.version_count(x) == before + 1 and private.forward_level() == -1
    assert private.overload_schema(torch.ops.aten.add_.Tensor).is_mutable


def test_a_name_is_taken_from_where_the_release_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last home that is not newer than the torch at hand."""
    homes = ((private.OLDEST, "math"), ((2, 9), "cmath"), ((99,), "torch._nowhere"))
    monkeypatch.setitem(private.SINCE, "cosh", homes)
    import cmath
    import math

    for version, wanted in (("2.6.0", math.cosh), ("2.8.1", math.cosh), ("2.9.0", cmath.cosh), ("2.14.1", cmath.cosh)):
        private.private.cache_clear()
        monkeypatch.setattr(torch, "__version__", version)
        assert private.private("cosh") is wanted
    private.private.cache_clear()


NAN, INF = float("nan"), float("inf")
X = (-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, INF, -INF, NAN)
AT_BOUNDS = {
    "clamp": lambda x, a, b: x.clamp(-1, 1),
    "clamp, one bound": lambda x, a, b: x.clamp(min=0) + x.clamp(max=1.0),
    "clamp_min_, clamp_max": lambda x, a, b: (x * 1).clamp_min_(-1) * torch.clamp_max(x, 2),
    "clamp, bounds the wrong way round": lambda x, a, b: x.clamp(1, -1),
    "clip": lambda x, a, b: torch.clip(x, -INF, 1),
    "clamp by tensors": torch.clamp,
    "clamp by one tensor": lambda x, a, b: torch.clamp(x, min=a) * torch.clamp(x, max=b),
    "fmax": lambda x, a, b: torch.fmax(a, x.nan_to_num(3.0)) + b,
    "fmin": lambda x, a, b: torch.fmin(x.nan_to_num(3.0), b) + a,
    "maximum, minimum": lambda x, a, b: torch.maximum(x, a) * torch.minimum(x, b),
}


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (1.0, -1.0), (1.0, 1.0), (0.0, INF), (-0.0, 0.0)], ids=str)
@pytest.mark.parametrize("name", AT_BOUNDS)
def test_values_and_gradients_at_bounds_are_those_of_the_torch_at_hand(name: str, bounds: tuple[float, float]) -> None:
    """Releases differ there: at a bound that is a number clamp's gradient is 1, or from 2.14 on 0."""
    found = []
    values = X[: -1 if bounds[0] > bounds[1] else None]  # NaN within no bounds has no gradient that means anything
    for call in (AT_BOUNDS[name], compiled(AT_BOUNDS[name], fallback="error", smallest_region=1)):
        x, a, b = (torch.tensor(v, dtype=torch.float64) for v in (values, *([b] * len(values) for b in bounds)))
        given = [t.requires_grad_() for t in (x, a, b)]
        y = call(*given)
        cotangent = torch.arange(1.0, len(values) + 1, dtype=y.dtype)
        found.append((y, *torch.autograd.grad(y, given, cotangent, allow_unused=True)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _private_uses(source: str) -> Iterator[str]:
    """What a file imports, names or reads of torch's private names."""
    hidden = re.compile(r"(?:^|\.)_(?!_)")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.split(".")[0] == "torch":
            yield from (f"{node.module}.{n.name}" for n in node.names if hidden.search(f"{node.module}.{n.name}"))
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("torch.") and hidden.search(n.name))
        elif isinstance(node, ast.Attribute) and hidden.match(node.attr):
            text = ast.unparse(node)
            if node.attr in ("_schema", "_version", "_current_level", "_base", "_cdata", "_is_view"):
                yield text
            elif text.startswith("torch.") and not text.startswith("torch.ops."):  # ops are the table's
                yield text


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {use}"
        for path in PACKAGE.rglob("*.py")
        if path != THE_FILE
        for use in _private_uses(path.read_text(encoding="utf-8"))
    }
    assert not found
    assert list(_private_uses("import torch\ntorch._C._x()\nfrom torch._dynamo import a\nx._version"))  # it sees some


def test_the_extra_takes_every_release_that_was_tested() -> None:
    """What is installed beside a user's torch does not replace it; the tests are pinned by a file of their own."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["torch"] == [f"torch>={'.'.join(map(str, private.OLDEST))}"]
    assert not [need for needs in extras.values() for need in needs if "==" in need]
    page = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.M)
    numbers = [private.release(row) for row in rows]
    assert numbers == sorted(numbers) and numbers[0][:2] == private.OLDEST and numbers[-1] == private.NEWEST
    pins = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert pins["torch"] in rows


def test_make_installs_the_release_that_it_is_given(tmp_path: Path) -> None:
    """``TORCH=`` has an environment of its own and a constraint; without it the pinned release is installed."""

    # variables of the `make test EXTRAS=...` that runs this test are not this make's
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    own = {name: value for name, value in own.items() if name not in ("EXTRAS", "TORCH", "WORKERS", "ARGS")}

    def plan(*arguments: str) -> str:
        done = subprocess.run(["make", "-n", "test", *arguments], cwd=ROOT, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert UntestedVersion.__mro__[1] is UserWarning
    given = plan("TORCH=2.14.1", "--assume-new=tests/constraints.txt")
    assert "'s/^torch==.*/torch==2.14.1/' tests/constraints.txt >.venv-torch-2.14.1/constraints.txt" in given
    assert "-c .venv-torch-2.14.1/constraints.txt -e '.[test,torch]'" in given
    assert ".venv-torch-2.14.1/bin/python -m pytest" in given and ".venv/" not in given
    plain = plan("EXTRAS=torch", "--assume-new=tests/constraints.txt")
    assert "sed -n p tests/constraints.txt >.venv/constraints.txt" in plain
    assert "-c .venv/constraints.txt -e '.[test,torch]'" in plain and ".venv-torch" not in plain
