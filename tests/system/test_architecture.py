"""The architecture, as a test: imports point one way, heavy packages are imported late, modules stay short."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx
import pytest
from caches import with_runtime

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gradc"

# A part is a folder, or a file of the root.  It may import itself and what stands on a line above its own; a new one is
# placed here on purpose.
LAYERS = [
    ("errors",),
    ("process", "knobs"),
    ("formats",),
    ("targets",),
    ("ir",),
    ("ops",),
    ("pickles",),
    ("trace", "interp"),
    ("autodiff",),
    ("verify",),
    ("analysis",),
    ("passes",),
    ("optim",),
    ("codegen",),
    ("runtime",),
    ("inspect",),
    ("module",),
    ("compiler",),
    ("api",),
    ("calibration", "plans"),
    ("jax", "onnx", "torch"),
    ("demo",),
    ("cli",),
    ("__main__",),
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

# gradc.onnx and gradc.torch are imported where somebody asks for them, so there these stand at the top.
ONLY_IN = {
    "cupy": ("runtime",),
    "cupy_backends": ("runtime",),
    "jax": ("jax",),
    "jinja2": ("codegen",),
    "onnx": ("onnx",),
    "torch": ("torch",),
}
# What an extra installs, and the parts of gradc that import it at once.
EXTRAS = ("cupy", "gradc.jax", "gradc.onnx", "gradc.torch", "jax", "magika", "onnx", "onnxruntime", "swift_f0")
EXTRAS += ("bitsandbytes", "torch", "torchao")
# Costs a second or is not there at all: `import gradc` does without.
NOT_FROM_THE_CACHE = (
    "bz2",
    "fractions",
    "html",
    "lzma",
    "shutil",
    "subprocess",
    "tempfile",
    "zipfile",
    "gradc.ir.pattern",
)
NOT_AT_IMPORT = ("click", "cupy", "jax", "jinja2", "networkx", "onnx", "torch")


@dataclass(frozen=True)
class Import:
    source: str  # gradc.passes.graph.fold
    target: str  # gradc.ir.node, jinja2
    where: str
    lazy: bool  # inside a function

    @property
    def part(self) -> str:
        """The part of gradc that imports."""
        return _part(self.source)


def _part(module: str) -> str:
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def _imports(source: str, module: str, is_package: bool, where: str) -> Iterator[Import]:
    """Every import of a module, those under ``if TYPE_CHECKING`` left out: they do not happen."""
    pending = [(statement, False) for statement in ast.parse(source).body]
    while pending:
        node, lazy = pending.pop()
        at = f"{where}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                yield from (Import(module, name.name, at, lazy) for name in names)
            case ast.ImportFrom(module=target, names=names, level=level):
                base = module.split(".")[: len(module.split(".")) - level + is_package] if level else []
                prefix = ".".join([*base, *([target] if target else [])])
                # `from gradc import ir` names a part; `from gradc.ir import Node` is inside one already.
                yield from (Import(module, f"gradc.{n.name}" if prefix == "gradc" else prefix, at, lazy) for n in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=orelse):
                pending += [(inner, lazy) for inner in orelse]
            case _:
                inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                pending += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.relative_to(PACKAGE).parts)


@functools.cache
def _all_imports() -> tuple[Import, ...]:
    return tuple(
        found
        for path in MODULES
        for found in _imports(path.read_text(), _name(path), path.name == "__init__.py", str(path.relative_to(ROOT)))
    )


def _forbidden(found: Import) -> str | None:
    """Why an import must not be, or None."""
    top = found.target.split(".")[0]
    if top in ONLY_IN and found.part not in ONLY_IN[top]:
        return f"only {' and '.join(ONLY_IN[top])} may import {top}"
    if top != "gradc" or found.part not in RANK:  # the public names, and what has no place yet
        return None
    target = _part(found.target)
    if target not in RANK:  # `from gradc import compile`: the public names are for users
        return f"import the part that defines {target!r}, not the public name"
    if target != found.part and RANK[target] >= RANK[found.part]:
        return f"{found.part} stands below {target} or beside it"
    return None


def test_every_part_has_a_place():
    parts = {_part(_name(path)) for path in MODULES} - {"__init__"}
    assert parts == RANK.keys(), f"LAYERS has not, or alone has: {sorted(parts ^ RANK.keys())}"


def test_few_files_stand_at_the_root():
    assert len([*PACKAGE.glob("*.py")]) <= 10


def test_imports_point_one_way():
    refused = ((found, _forbidden(found)) for found in _all_imports())
    wrong = [f"{found.where}: {found.source} imports {found.target}: {why}" for found, why in refused if why]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("part", ["codegen", "passes"])
def test_folders_of_a_part_import_one_way(part: str):
    """Where a part has folders of its own, with what is below them; those of runtime call each other."""
    folder = {_name(path): path.relative_to(PACKAGE).parts[1:-1][:1] for path in MODULES}
    found = (each for each in _all_imports() if each.part == part and each.target.startswith(f"gradc.{part}."))
    edges = {(folder[each.source], folder.get(each.target, folder[each.source])) for each in found}
    graph = networkx.DiGraph((a, b) for a, b in edges if a != b)
    assert graph and networkx.is_directed_acyclic_graph(graph), networkx.find_cycle(graph)


def _before_its_skip(source: str) -> list[str]:
    """The imports of extras that a test file makes before it asks whether anything is there."""
    wrong = []
    for statement in ast.parse(source).body:
        if "importorskip" in ast.unparse(statement):
            break
        for found in _imports(ast.unparse(statement), "tests.file", False, ""):
            if not found.lazy and any(f"{found.target}.".startswith(f"{extra}.") for extra in EXTRAS):
                wrong.append(found.target)
    return wrong


@pytest.mark.long("pyproject.toml", "tests")  # reads all tests
def test_tests_can_be_collected_without_extras():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {str(path.relative_to(ROOT)): _before_its_skip(path.read_text()) for path in files}
    wrong = {path: imports for path, imports in found.items() if imports}
    assert not wrong
    skip = 'torch = pytest.importorskip("torch")\n'
    assert _before_its_skip("import gradc.torch.function\n" + skip) == ["gradc.torch.function"]
    assert not _before_its_skip(skip + "from gradc.torch import wrap\n")


def _tools_asked_for(source: str) -> list[str]:
    """What a test file calls when it is imported, outside of ``try``, that raises where a tool is not installed."""
    found = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Try):
            continue
        parts = getattr(statement, "decorator_list", [statement])
        calls = (node.func for part in parts for node in ast.walk(part) if isinstance(node, ast.Call))
        found += [name for name in map(ast.unparse, calls) if name.endswith(("find_nvrtc", "find_nvdisasm"))]
    return found


def test_tests_can_be_collected_without_tools():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {str(path.relative_to(ROOT)): _tools_asked_for(path.read_text()) for path in files}
    assert not {path: names for path, names in found.items() if names}
    assert _tools_asked_for("@pytest.mark.skipif(nvrtc.find_nvrtc() is None)\ndef test(): ...") == ["nvrtc.find_nvrtc"]
    assert not _tools_asked_for(
        "try:\n    FOUND = find_nvrtc()\nexcept GradcError:\n    pass\ndef f():\n    find_nvrtc()"
    )


@pytest.mark.parametrize(
    ("module", "source", "refused"),
    [
        ("gradc.ir.node", "from ..passes import fold", True),
        ("gradc.ir.node", "def f():\n    from gradc import autodiff", True),
        ("gradc.ir.node", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..passes import fold", False),
        ("gradc.trace", "from . import interp", True),
        ("gradc.autodiff", "from .ops import mul\nfrom . import errors", False),
        ("gradc.analysis.cost", "from ..passes.program import plan_buffers", True),
        ("gradc.runtime.executable", "from ..analysis.cost import floor_bytes", False),
        ("gradc.targets.cpu", "from ..ir.dims import Size", True),
        ("gradc.passes.graph.fold", "import jinja2", True),
        ("gradc.passes.graph.fold", "from gradc import compile", True),
        ("gradc.codegen.jinja", "import jinja2", False),
        ("gradc.codegen.jinja", "def f():\n    import cupy.cuda", True),
        ("gradc.torch.sizes", "import torch", False),
        ("gradc.onnx.model", "import onnx", False),
        ("gradc.interp", "def f():\n    from onnx import helper", True),
        ("gradc.module", "def f():\n    import torch", True),
    ],
)
def test_the_rules_see_what_they_forbid(module: str, source: str, refused: bool):
    assert any(map(_forbidden, _imports(source, module, False, "here"))) is refused


def test_files_import_in_no_circles():
    """Every import counts, also one that is late and one for types alone."""
    names = {_name(path): path for path in MODULES}
    graph = networkx.DiGraph()
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = name.split(".")[: len(name.split(".")) - node.level + (path.name == "__init__.py")]
            prefix = ".".join([*(base if node.level else []), *([node.module] if node.module else [])])
            for target in {f"{prefix}.{n.name}" if f"{prefix}.{n.name}" in names else prefix for n in node.names}:
                if target in names and target != name:
                    graph.add_edge(name, target)
    found = [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert not found, [sorted(circle) for circle in found]


def test_functions_are_short():
    """60 lines at most, their docstring not counted."""
    long = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                first = node.body[0]
                text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                length = node.end_lineno - (first.end_lineno or 0 if text else node.lineno - 1)
                if length > 60:
                    long[f"{_name(path)}.{node.name}"] = length
    assert not long, long


def test_a_module_from_the_cache_needs_no_writer_of_cuda():
    """What reads modules of any target, in a process that has no GPU."""
    script = "import sys, gradc.api; print(*(m for m in sys.modules if m.startswith('gradc.codegen.c')))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"gradc.codegen.cuda", "gradc.codegen.cuda.support"}


def test_a_module_from_the_cache_imports_little(tmp_path):
    """What takes milliseconds to import and is needed to compile, or to read and write other files."""
    script = f"""
import numpy, sys, gradc
before = set(sys.modules)  # NumPy has some of them in some versions
graph = gradc.trace(lambda x: gradc.ops.tanh(x), x="f32[N]")
gradc.compile(graph, wrt="x", target="cpu").forward(x=numpy.ones(3, "f4"))
print(*(m for m in {NOT_FROM_THE_CACHE} if m in sys.modules and m not in before))
"""
    environment = {**os.environ, "GRADC_CACHE_DIR": with_runtime(tmp_path)}
    for expected in (True, False):  # the first compiles
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
        )
        assert bool(done.stdout.split()) is expected, done.stdout


def test_importing_gradc_is_cheap():
    script = f"import sys, gradc; print(*(m for m in {NOT_AT_IMPORT} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not done.stdout.split(), f"import gradc imports {done.stdout.split()}"


def test_no_code_is_run_from_data():
    """No eval, exec or pickle in the package: an untrusted graph or cache file stays data."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}")
    unsafe = ("pickle", "marshal", "shelve", "dill")
    found += [f"{each.where}: {each.target}" for each in _all_imports() if each.target.split(".")[0] in unsafe]
    assert not found, found


def test_every_environment_variable_is_a_knob():
    from gradc import knobs

    reads = re.compile(r"""(?:environ(?:\.get)?|getenv)\s*[\[(]\s*["'](GRADC_\w+)["']""")
    named = {name for path in MODULES for name in reads.findall(path.read_text())}
    assert named <= knobs.ALL.keys(), f"declare in knobs.py: {sorted(named - knobs.ALL.keys())}"
    assert reads.findall("os.environ.get('GRADC_X')") == ["GRADC_X"]


def test_no_machine_leaks_into_the_tree():
    """No home directory, workplace path or registry setting in any file that is shipped."""
    # Written in pieces, so that this file does not match itself.
    pieces = (
        ("/ho", "me/[a-z]"),
        ("/ro", "ot/"),
        ("/Us", "ers/"),
        (r"C:\\Us", "ers"),
        ("/wo", "rk/"),
        ("index-u", "rl"),
    )
    leaks = re.compile("|".join(map("".join, pieces)))
    folders = [PACKAGE, *(ROOT / name for name in ("templates", "tests", "examples", "benchmarks", "docs", ".ci"))]
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*")]
    files += [path for path in ROOT.glob("*.*") if path.name != ".git"]  # of a linked worktree it is a file with a path
    found = []
    for path in [*files, ROOT / "Makefile"]:
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in lines if leaks.search(line)]
    assert not found, "\n" + "\n".join(found)


def test_the_page_names_what_is_there():
    """Every path of docs/architecture.md exists; a bare file name is in a folder that its paragraph names."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = []
    for paragraph in re.split(r"\n(?=- |\n)", page):
        paths = re.findall(r"(?<![\w/.])(?:gradc|templates|tests|docs|examples)(?:/[\w.]+)+", paragraph)
        missing += [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
        folders = [ROOT / path if (ROOT / path).is_dir() else (ROOT / path).parent for path in paths]
        for name in re.findall(r"`(\w+\.(?:py|h|md))`", paragraph):
            if not any((folder / name).exists() for folder in (*folders, PACKAGE / "module", PACKAGE / "inspect")):
                missing.append(name)
    assert not missing, missing
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert {room for room in rooms if f"gradc/{room}" not in page} == set(), "each room has a paragraph"
