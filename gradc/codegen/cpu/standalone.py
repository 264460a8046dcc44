"""Programs of the CPU as C that needs no Python: the texts of :func:`.render_program`, and the host's part around them.

What :class:`gradc.runtime.host.cpu.CpuProgram` does in Python for a call (binding sizes, placing temps, checking and
passing pointers) is plain C in ``templates/export/host.h``, over tables that are written here from the same programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...analysis.combine import combines
from ...analysis.cost import MOST_SORTED
from ...analysis.lifetimes import lifetimes
from ...analysis.product_kernels import product_kernels
from ...errors import InternalError
from ...ir.dims import LARGEST, Size, evaluate, minimum, product, symbols
from ...ir.kernel import Call, Kernel, Loop, Program, Select, Step, alternatives
from ...ir.node import REGISTRY
from ...ir.types import DType, Type
from ..identifiers import member, members
from ..jinja import render
from ..text import read_template
from .calls import CALLS
from .program import Source, guarded, over

SHARED = (
    "common/ieee.h",
    "common/math.h",
    "common/special.h",
    "cpu/argsort.h",
    "cpu/counting_sort.h",
    "cpu/gemm.h",
    "cpu/gemm_bf16.c",
    "cpu/gemm_f64.c",
    "cpu/gemm_i8.c",
    "cpu/gemm_kernels.h",
    "cpu/gemm_type.h",
    "cpu/gemm_vector.h",
    "cpu/gemm_words.h",
    "cpu/index_sample.h",
    "cpu/math.h",
    "cpu/program.h",
    "cpu/runtime.c",
    "cpu/runtime.h",
    "cpu/streaming.h",
    "cpu/wide_vectors.h",
)
"""The plain C that every module's text includes, under the paths by which it does."""
_HEADERS = """
    aio assert complex ctype dirent dlfcn errno fcntl features fenv float ftw glob grp host iconv inttypes
    iso646 langinfo libgen limits locale main malloc math memory monetary mqueue ndbm netdb poll pthread pwd
    regex sched search semaphore setjmp signal spawn stdalign stdarg stdatomic stdbool stddef stdint stdio
    stdlib stdnoreturn string strings stropts syslog tar termios tgmath threads time trace uchar ulimit unistd
    utime utmpx values wait wchar wctype wordexp
"""
"""Headers of C and POSIX, and files of ours, which a module's own must not hide."""
MOST_OF_SYMBOL = 1 << 40
"""``HOST_MOST_SYMBOL`` of ``host.h``."""


@dataclass(frozen=True)
class Array:
    """An array of the module.

    :param group: ``input``, ``output``, ``cotangent``, ``gradient``, or ``residual``, which the module keeps itself.
    :param key: its name in the module, :param field: and as a C identifier.
    :param number: in the table of all arrays.
    """

    group: str
    key: str
    field: str
    number: int
    type: Type
    note: str = ""

    @property
    def name(self) -> str:
        """For errors."""
        return quoted(self.key if self.group in ("input", "output") else f"the {self.group} {self.key}")

    @property
    def file(self) -> str:
        return f"{self.group}_{self.field}.bin"

    @property
    def itemsize(self) -> int:
        return self.type.dtype.itemsize

    @property
    def ctype(self) -> str:
        """The C type of its elements; those that C lacks are bits."""
        dtype = self.type.dtype
        if dtype.is_float and dtype.bits >= 32:
            return "float" if dtype.bits == 32 else "double"
        return f"{'' if dtype.kind == 'i' else 'u'}int{8 * dtype.itemsize}_t"

    @property
    def kind(self) -> str:
        """How ``main.c`` reads an element."""
        dtype = self.type.dtype
        plain = "f" if _is_c_float(dtype) else "i" if dtype.kind == "i" else "u"
        return {"f16": "h", "bf16": "b"}.get(dtype.name, plain)


def _is_c_float(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits >= 32


@dataclass(frozen=True)
class Interface:
    """What callers see of a module.

    :param name: of the graph.  :param version: of gradc.
    :param dims: every symbol; those of :param fixed: have a value.
    :param arrays: in the order of their numbers, residuals last.
    :param borrowed: names of the arrays that backward reads again.
    :param signature: lines that say what the module computes.
    """

    name: str
    version: str
    dims: tuple[str, ...]
    fixed: Mapping[str, int]
    arrays: tuple[Array, ...]
    borrowed: tuple[str, ...]
    signature: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """Before every public name, and the name of the files."""
        word = member(self.name)
        return f"{word}_" if word in _HEADERS.split() else word

    def group(self, group: str) -> tuple[Array, ...]:
        return tuple(a for a in self.arrays if a.group == group)


@dataclass(frozen=True)
class Part:
    """A program of a module.

    :param name: ``forward`` or ``backward``.
    :param arrays: its input and output buffers -> the number of the array that each is.
    :param donations: (result, input) by number: the result may lie where the input does.
    """

    name: str
    program: Program
    source: Source
    arrays: Mapping[str, int]
    donations: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SizeText:
    """A size of a call: :param field: in the struct of sizes, :param sample: its value for the sample arrays."""

    field: str
    sample: int


@dataclass(frozen=True)
class GroupText:
    """A struct of arrays: :param name: of the group, :param about: what it is for, :param const: whether it is read."""

    name: str
    about: str
    const: bool
    arrays: Sequence[Array]


@dataclass(frozen=True)
class Flags:
    """Flags of the compiler: for all texts, :param runtime: and more for the one with the matrix product."""

    common: tuple[str, ...]
    runtime: tuple[str, ...]


def standalone(interface: Interface, parts: Sequence[Part], sample: Mapping[str, int], flags: Flags) -> dict[str, str]:
    """The files of an exported module, by path.

    :param sample: the value of each dim for which there are sample arrays.
    """
    prefix = interface.prefix
    units = {
        f"cpu/{part.name}_{i}.c": _renamed(part, f"{prefix}_{part.name}", text)
        for part in parts
        for i, text in enumerate(part.source.units)
    }
    fields = members(n for n in interface.dims if n not in interface.fixed)
    sizes = [SizeText(field, sample[n]) for n, field in fields.items()]
    groups = [
        GroupText(name, about, name in ("input", "cotangent"), interface.group(name))
        for name, about in GROUPS.items()
        if interface.group(name)
    ]
    dims = {name: f"n[{i}]" for i, name in enumerate(interface.dims)}
    programs = [
        _tables(part, interface, dims, [g for g in groups if g.name in OF_PROGRAM[part.name]]) for part in parts
    ]
    public = [a for a in interface.arrays if a.group != "residual"]
    build = {
        "name": prefix,
        "units": list(units),
        "flags": flags.common,
        "runtime_flags": flags.runtime,
        "libraries": "",
    }
    files = {
        f"{prefix}.h": spaced(
            "export/module.h.j2",
            name=prefix,
            guard=f"{prefix.upper()}_H",
            version=interface.version,
            signature=[line.replace("*/", "* /") for line in interface.signature],
            backward=len(parts) > 1,
            borrowed=", ".join(interface.borrowed),
            sizes=sizes,
            groups=groups,
            count=len(public),
        ),
        f"{prefix}.c": _module(interface, parts, programs, fields, dims),
        "main.c": spaced(
            "export/main.c.j2",
            name=prefix,
            arrays=public,
            sizes=sizes,
            programs=programs,
            device=False,
            exact=True,
        ),
        "Makefile": render("export/Makefile.j2", **build),
        "CMakeLists.txt": render("export/CMakeLists.txt.j2", **build),
        "host.h": read_template("export/host.h"),
    }
    return files | units | {path: read_template(path) for path in SHARED}


def _module(
    interface: Interface,
    parts: Sequence[Part],
    programs: Sequence[Mapping[str, object]],
    fields: Mapping[str, str],
    dims: Mapping[str, str],
) -> str:
    """The module's own C file.  :param fields: the members of its sizes, :param dims: each dim as C."""
    fixed = interface.fixed
    items = (item for part in parts for step in part.program.steps for item in alternatives(step))
    return spaced(
        "export/module.c.j2",
        name=interface.prefix,
        multiplies=any(isinstance(item, Call) and CALLS[item.op].multiplies for item in items),
        kernels=sorted({name for part in parts for name in product_kernels(part.program)}),
        programs=programs,
        arrays=[
            {
                "name": a.name,
                "itemsize": a.itemsize,
                "number": a.number,
                "type": comment(str(a.type)),
                "bytes": over(a.type.nbytes, dims),
            }
            for a in interface.arrays
        ],
        symbols=[
            {
                "name": comment(n),
                "value": str(fixed[n]) if n in fixed else f"((const int64_t *)sizes)[{[*fields].index(n)}]",
                "format": f", {quoted(n)}=%lld",
            }
            for n in interface.dims
        ],
        sizes=fields,
        residuals=interface.group("residual"),
        table=max(len(part.program.buffers) for part in parts) + 1,
        conditions=[c for part in parts for c in _conditions(part.program, dims)],
    )


def spaced(template: str, **context: object) -> str:
    """A template filled in, with an empty line before each comment and definition at its margin."""
    lines = render(template, **context).splitlines()
    spaced: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        begins = line.startswith(("/*", "typedef", "static", "struct", "int ", "PUBLIC")) and before.startswith("}")
        if begins or (line.startswith("/*") and before.endswith(";")):
            spaced.append("")
        spaced.append(line)
    return "\n".join(spaced) + "\n"


GROUPS = {
    "input": "What forward reads.",
    "output": "Where forward writes its results.",
    "cotangent": "What backward reads: the derivatives of a loss by the results.",
    "gradient": "Where backward writes: the derivatives of the loss by inputs.",
}
OF_PROGRAM = {"forward": ("input", "output"), "backward": ("cotangent", "gradient")}
_ONE_SIGNATURE = """/* Kernels have one signature, and not each needs all of it. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#ifdef __clang__ /* loops are vectorized where they can be */
#pragma GCC diagnostic ignored "-Wpass-failed"
#endif
"""


def _renamed(part: Part, symbol: str, text: str) -> str:
    """A unit behind names of its own for what other modules, or the other program, have too."""
    names = {
        "gradc_run": f"{symbol}_run",
        "gradc_scratch": f"{symbol}_scratch",
        "gradc_local_bytes": f"{symbol}_local_bytes",
    }
    for kernel in part.source.kernels:
        for name in (kernel, f"{kernel}_workspace_bytes", f"{kernel}_local_bytes"):
            names[name] = f"{symbol}_{name}"
    defined = "".join(f"#define {name} {own}\n" for name, own in names.items())
    return f"{defined}{_ONE_SIGNATURE}{text}"


def _tables(
    part: Part, interface: Interface, dims: Mapping[str, str], groups: Sequence[GroupText]
) -> dict[str, object]:
    """A program's tables, for ``module.c.j2``."""
    program = part.program
    roots = [b for b in program.buffers if not b.alias]
    spans = lifetimes(program)
    temps = sorted(spans, key=lambda name: (spans[name], name))
    places = {name: i for i, name in enumerate(temps)}
    constants = [b for b in roots if b.kind == "const"]
    buffers = []
    for b in roots:
        if b.name in part.arrays:
            kind, at = ("HOST_RESULT" if b.kind == "output" else "HOST_ARRAY"), part.arrays[b.name]
        elif b.kind == "const":
            kind, at = "HOST_CONST", constants.index(b)
        elif b.name in places:
            kind, at = "HOST_TEMP", places[b.name]
        elif b.kind in ("temp", "forwarded"):
            kind, at = "HOST_UNUSED", 0
        else:
            raise InternalError(f"{program.name}: nothing is the memory of {b.name}")
        buffers.append({"kind": kind, "index": at, "comment": comment(f"{b.name}: {b.type}")})
    order = list(interface.dims)
    return {
        "name": part.name,
        "symbol": f"{interface.prefix}_{part.name}",
        "groups": [g for g in groups if g.name in OF_PROGRAM[part.name]],
        "buffers": buffers,
        "temps": [
            {
                "first": spans[t][0],
                "last": spans[t][1],
                "bytes": over(program.buffer[t].type.nbytes, dims),
                "comment": comment(f"{t}: {program.buffer[t].type}"),
            }
            for t in temps
        ],
        "dims": [order.index(d) for d in program.dims],
        "sites": [{"step": n, "op": quoted(op), "source": quoted(s)} for n, (op, s) in part.source.sites.items()],
        "donations": [{"result": r, "input": i} for r, i in part.donations],
        "constants": [bytes_of(b.value, b.type.dtype) for b in constants],
    }


def bytes_of(values: Sequence[int | float | bool], dtype: DType) -> str:
    """The elements of a constant as bytes, little-endian as every processor that is compiled for."""
    array = np.asarray(values, np.float64 if dtype.is_float else None).astype(dtype.np)
    return ", ".join(map(str, array.tobytes())) or "0"


def quoted(text: str) -> str:
    """A user's name inside a string literal of C that is, or becomes, a format."""
    kept = "".join(c if c.isascii() and c.isprintable() and c not in '"\\?%' else "_" for c in text)
    return kept[:200]


def comment(text: str) -> str:
    return (
        "".join(c if c.isascii() and c.isprintable() else "_" for c in text).replace("*/", "* /").replace("/*", "/ *")
    )


# -- the sizes at which a program may run: what gradc.Executable checks once per set of shapes -------------------------


def _conditions(program: Program, dims: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What is wrong with sizes, as C, and the text that says so."""
    c = lambda size: over(size, dims)
    for b in program.buffers:
        if _overflows(b.type.nbytes):
            about = over(b.type.nbytes, {name: f"about_{place}" for name, place in dims.items()})
            about = about.replace("_i64(", "_f64(")
            yield {"wrong": f"!({about} < 0x1p64)", "text": quoted(f"{b.name} would have 2^63 bytes or more")}
    for fact in program.assumptions:
        relation = "<" if fact.relation == ">=" else "!="
        yield {"wrong": f"{c(fact.left)} {relation} {c(fact.right)}", "text": quoted(f"{fact} does not hold")}
    for b in program.buffers:
        for size in dict.fromkeys(s for s in b.type.shape if not isinstance(s, int)):
            if str(size) not in dims:  # symbols are checked themselves
                yield {"wrong": f"{c(size)} < 0", "text": quoted(f"{b.name} would have a negative size ({size})")}
        if not isinstance(b.type.nbytes, int):
            yield {
                "wrong": f"{c(b.type.nbytes)} > HOST_MOST",
                "text": quoted(f"{b.name} would have 2^63 bytes or more"),
            }
    owned = [b.type.nbytes for b in program.buffers if not b.alias and not isinstance(b.type.nbytes, int)]
    if owned:
        text = quoted(f"the arrays of {program.name} would have 2^62 bytes or more")
        yield {"wrong": f"{' + '.join(map(c, owned))} > HOST_MOST / 2", "text": text}
    for step in program.steps:
        for each in step.compared if isinstance(step, Select) else ():
            wrong = f"maximum_i64({c(each.left)}, {c(each.right)}) > {LARGEST}LL"
            yield {"wrong": wrong, "text": quoted(f"{each.comparison} has a side of 2^63 or more")}
        for guard, item in _guarded(step, dims):
            yield from _of_item(item, program, guard, dims)


def _overflows(size: Size) -> bool:
    """Whether a size may have more bits than host.h computes sizes with."""
    return evaluate(size, dict.fromkeys(symbols(size), MOST_OF_SYMBOL)) >= 1 << 126


def _guarded(step: Step, dims: Mapping[str, str]) -> Iterator[tuple[str, Kernel | Call]]:
    """What a step may run, each behind the condition under which it does, ``"A && "`` or ``""``."""
    if isinstance(step, Loop):
        rows = minimum(step.by, step.rows[1])
        bound = {**dict.fromkeys(step.symbols, 0), step.count: rows, **dict(step.cols)}
        runs = "".join(f"{over(size, dims)} != 0 && " for _, size in step.over if size != 0)
        yield from ((runs, item.substitute(bound)) for item in step.steps)
        return
    yield from ((f"{when} && " if when else "", item) for when, item in guarded(step, dims))


def _of_item(item: Kernel | Call, program: Program, guard: str, dims: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Extrema over no elements, and sorts that 32 bits do not count."""
    if isinstance(item, Call):
        operand = REGISTRY[item.op].sorts
        counts: list[tuple[str, Size]] = (
            [] if operand is None else [("elements", dict(item.axes)[item.views[operand][-1]])]
        )
    else:
        if any(dict(s.attrs).get("empty") == "error" for s in item.body):
            none = f"{over(item.col_count, dims)} == 0 && {over(item.row_count, dims)} != 0"
            yield {"wrong": guard + none, "text": quoted(f"an extremum over no elements in {item.name}")}
        counts = []
        if item.row_order == "by key":
            part = next(c for c in combines(item, program.types) if c.buffer == item.order)
            counts = [
                ("rows", item.row_count),
                ("rows of its result", product(program.types[item.order].shape[: part.leading])),
            ]
    for counted, count in counts:
        if not isinstance(count, int):
            wrong = f"{guard}{over(count, dims)} > {MOST_SORTED}"
            yield {"wrong": wrong, "text": quoted(f"{item.name} would sort more than {MOST_SORTED} {counted}")}
