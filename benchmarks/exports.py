"""``python -m benchmarks.exports``: three models as C, built by four toolchains, beside what Python gives.

A model is compiled by each compiler in turn, exported, built by that compiler with the Makefile of the export, and run:
its outputs and gradients are compared with those of the module in Python, and with those that gcc's module gives.  A
compiler for another architecture builds the export of gcc's module, and qemu runs it.  ``--write`` puts the table into
docs/export.md, and all that compilers and programs said into results/exports.log.  Needs gcc, make, clang, the wheel
``ziglang``, aarch64-linux-gnu-gcc and qemu-aarch64; what is not there is a dash.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gradc
from gradc import knobs, ops
from gradc.demo.model import VARIANTS

from .__main__ import processor

PAGE = Path(__file__).resolve().parents[1] / "docs" / "export.md"
LOG = Path(__file__).parent / "results" / "exports.log"
BEGIN, END = "<!-- benchmarks.exports writes this table -->\n", "<!-- its end -->\n"
MOST = "1e-4"
"""Of an array's largest element, by which results of different compilers may differ and are not called wrong."""
COMPARED = re.compile(r"^(\S+) +\d+ bytes, (?:the same bits|(\d+) elements differ, at most (\S+) of the largest)")


@dataclass(frozen=True)
class Toolchain:
    """:param command: of the compiler, empty where it is not installed.
    :param runs: what runs its programs, empty on this machine's own architecture.
    :param make: arguments of ``make``.
    """

    name: str
    command: tuple[str, ...]
    version: tuple[str, ...]
    runs: tuple[str, ...] = ()
    make: tuple[str, ...] = ()
    crosses: bool = False


def _found(name: str, *more: str) -> tuple[str, ...]:
    return (name, *more) if shutil.which(name) else ()


def toolchains() -> list[Toolchain]:
    zig = (sys.executable, "-m", "ziglang") if importlib.util.find_spec("ziglang") else ()
    qemu = _found("qemu-aarch64")
    cross = _found("aarch64-linux-gnu-gcc", "-static") if qemu else ()
    return [
        Toolchain("gcc", _found("gcc"), ("gcc", "--version")),
        Toolchain("clang", _found("clang"), ("clang", "--version")),
        Toolchain("zig", (*zig, "cc") if zig else (), (*zig, "version")),
        Toolchain("gcc for aarch64", cross, (*cross[:1], "--version"), qemu, ("ARCH=",), crosses=True),
    ]


Built = tuple[gradc.Graph, list[str], dict[str, int]]


def language_model() -> Built:
    """The demo's: int8 codes with learned scales, layer_norm, cross-entropy."""
    variant = VARIANTS[-1]
    graph = variant.graph(300)
    return graph, variant.learns(graph), {"B": 37}


def attention() -> Built:
    def block(x: gradc.Node, qkv: gradc.Node, project: gradc.Node, gamma: gradc.Node, beta: gradc.Node) -> gradc.Node:
        batch, length, _ = x.shape
        normal = ops.layer_norm(x, (64,), gamma, beta)
        parts = ops.reshape(ops.matmul(normal, qkv), (batch, length, 3, 4, 16))
        q, k, v = (ops.transpose(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
        heads = ops.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + ops.matmul(ops.reshape(ops.transpose(heads, (0, 2, 1, 3)), (batch, length, 64)), project)

    types = {"x": "f32[B,S,64]", "qkv": "f32[64,192]", "project": "f32[64,64]", "gamma": "f32[64]", "beta": "f32[64]"}
    return gradc.trace(block, name="attention", **types), list(types), {"B": 3, "S": 70}


def convolution() -> Built:
    def net(x: gradc.Node, w1: gradc.Node, b1: gradc.Node, w2: gradc.Node, head: gradc.Node) -> gradc.Node:
        hidden = ops.max_pool2d(ops.relu(ops.conv2d(x, w1, b1, padding=1)), 2)
        return ops.matmul(ops.mean(ops.gelu(ops.conv2d(hidden, w2, padding=1)), axis=(2, 3)), head)

    types = {
        "x": "f32[B,3,32,32]",
        "w1": "f32[16,3,3,3]",
        "b1": "f32[16]",
        "w2": "f32[32,16,3,3]",
        "head": "f32[32,10]",
    }
    return gradc.trace(net, name="convolution", **types), list(types), {"B": 5}


MODELS: Mapping[str, Callable[[], Built]] = {
    "the demo's language model": language_model,
    "causal attention": attention,
    "a convolutional net": convolution,
}


@dataclass(frozen=True)
class Outcome:
    """:param arrays: results and gradients that were compared.
    :param differ: of them, how many have other bits.
    :param error: the largest difference, relative to the largest element of its array.
    """

    arrays: int
    differ: int
    error: float

    def __str__(self) -> str:
        return (
            f"{self.arrays} arrays: the same bits"
            if not self.differ
            else (f"{self.differ} of {self.arrays} differ, {self.error:.0e}")
        )


def outcome(text: str) -> Outcome:
    """What ``NAME_main`` printed of each array."""
    found = [COMPARED.match(line) for line in text.splitlines()]
    assert found and all(found), text
    errors = [float(m[3]) for m in found if m and m[3]]
    return Outcome(len(found), len(errors), max(errors, default=0.0))


class Builder:
    """Builds and runs exports, and keeps what is said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.silent = True

    def said(self, command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
        said = f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip()
        self.log.append(said.replace(sys.executable, "python"))
        return done  # type: ignore[no-any-return]

    def built(self, module: gradc.Module, dims: dict[str, int], tool: Toolchain, name: str) -> tuple[Path, float]:
        folder = module.export(self.folder / name, dims=dims)
        began = time.perf_counter()
        done = self.said(("make", f"CC={shlex.join(tool.command)}", *tool.make), cwd=folder)
        if done.returncode:
            sys.exit(f"{name} does not build:\n{done.stderr}")
        self.silent &= not done.stderr
        return folder, time.perf_counter() - began

    def ran(self, folder: Path, tool: Toolchain, sample: Path, most: str) -> Outcome:
        """Beside the arrays in ``sample``, which are of the same inputs; ``most`` is what may differ."""
        program = next(folder.glob("*_main"))
        done = self.said((*tool.runs, f"./{program.name}", os.path.relpath(sample, folder), most), cwd=folder)
        if done.stderr or done.returncode not in (0, 1):
            sys.exit(f"{program.name} failed: {done.stderr or done.returncode}")
        return outcome(done.stdout)


def rows(builder: Builder, tools: list[Toolchain], names: list[str]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Model, toolchain, seconds to build, kB of the program, beside Python by that compiler, beside gcc's Python."""
    gcc = tools[0]
    for name in names:
        graph, wrt, dims = MODELS[name]()
        short = name.split()[-1]
        with knobs.CC.set(shlex.join(gcc.command)):
            native = gradc.compile(graph, wrt, target="cpu")
            wanted = native.export(builder.folder / f"{short}-wanted", dims=dims) / "sample"
        for number, tool in enumerate(tools):
            if not tool.command:
                yield name, tool.name, "-", "-", "-", "-"
                continue
            builder.log.append(f"== {name}, {tool.name}")
            module = native
            if not tool.crosses:
                with knobs.CC.set(shlex.join(tool.command)):
                    module = gradc.compile(graph, wrt, target="cpu")
                    folder, seconds = builder.built(module, dims, tool, f"{short}-{number}")
            else:
                folder, seconds = builder.built(module, dims, tool, f"{short}-{number}")
            size = next(folder.glob("*_main")).stat().st_size / 1e3
            own = "-" if tool.crosses else str(builder.ran(folder, tool, folder / "sample", "0"))
            other = str(builder.ran(folder, tool, wanted, MOST))
            yield name, tool.name, f"{seconds:.1f}", f"{size:.0f}", own, other


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(MODELS)}")
    parser.add_argument("--write", action="store_true", help="the table into docs/export.md, the log into results")
    given = parser.parse_args()
    if unknown := set(given.names) - MODELS.keys():
        parser.error(f"no model {min(unknown)!r}; there are {', '.join(MODELS)}")
    tools = toolchains()
    if not tools[0].command:
        parser.error("gcc is not installed")
    lines = ["| model | built by | seconds | kB | beside Python's, by that compiler | beside Python's, by gcc |"]
    lines.append("|---|---|---|---|---|---|")
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(Path(folder))
        versions = [f"{t.name}: {builder.said(t.version).stdout.splitlines()[0]}" for t in tools if t.command]
        if tools[3].runs:
            versions.append(builder.said((tools[3].runs[0], "--version")).stdout.splitlines()[0])
        for row in rows(builder, tools, given.names or list(MODELS)):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
        warned = "No compiler said a word" if builder.silent else "**Compilers warned**"
    about = f"{warned}. {'; '.join(versions)}; {processor()}; {datetime.date.today()}."
    print(about)
    if given.write:
        head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        _, _, tail = rest.partition(END)
        table = "\n".join(lines)
        PAGE.write_text(f"{head}{BEGIN}\n{table}\n\n{about}\n\n{END}{tail}", "utf-8")
        LOG.write_text(f"{about}\n\n" + "\n\n".join(builder.log) + "\n", "utf-8")


if __name__ == "__main__":
    main()
