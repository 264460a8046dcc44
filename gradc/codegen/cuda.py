"""Programs as CUDA: one text of kernels, and the launches that run them.

The statements are the ones of every target (:mod:`gradc.codegen.expr`); ``templates/cuda/rows.cu.j2`` owns threads, visiting order,
partials and flush.  A *task* is ``width`` threads that go through their rows together, the unit of determinism: what it sums up and in
which order is decided by shapes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InternalError
from ..ir.dims import Size, maximum, product
from ..ir.kernel import REDUCTIONS, Index, Kernel, Pass, Program, Stmt, alternatives, neutral
from ..ir.types import F32, DType, Type
from .expr import Scribe, carrier, stored, to_memory, variable
from .index import flatten, index, literal, size
from .jinja import render
from .products import support
from .rows import RowWriter
from .text import standalone

STRIP = 2048
"""Columns per task of a map."""
THREADS = 256
NOMINAL = 1024
"""Columns of a size that is not known when the text is made."""
UNORDERED = ("atomic", "atomic_fixed")
"""Strategies whose additions come in any order."""
SIMPLE = ("load", "const", "size", "index", "inside")


@dataclass(frozen=True)
class Stage:
    """One function of a kernel.

    :param name: the function.  :param kind: ``clear``, ``scan``, ``key``, ``rows``, ``fold``, ``settle`` or ``finish``.  :param tasks: how many tasks, of ``width`` threads
        each; None for the rows, whose number depends on the chunk.
    """

    name: str
    kind: str
    tasks: Size | None
    width: int


@dataclass(frozen=True)
class CudaKernel:
    """A kernel's functions and what a launch must know of its sizes, over the kernel's own dims.

    :param chunked: what a chunk is cut from: rows, or the kept rows of a regular order.  :param by_chunk: whether a task goes through several of them.
    :param private: elements of the partial results of one chunk.  :param keys: keys of the sort; None without one.
    :param scratch: (elements per chunk, bytes of one) of the partial results, in order.  :param fixed: elements of each sum in integers.
    :param strips: whether a row's columns are cut into tasks, too.
    :param sites: the op and the index of each check.
    """

    name: str
    text: str
    buffers: tuple[str, ...]
    dims: tuple[str, ...]
    stages: tuple[Stage, ...]
    threads: int
    rows: Size
    columns: Size
    chunked: Size
    by_chunk: bool
    private: Size
    keys: Size | None
    scratch: tuple[tuple[Size, int], ...]
    fixed: tuple[Size, ...]
    strips: bool
    checks: bool
    sites: tuple[tuple[str, str], ...]


def render_cuda(program: Program) -> tuple[str, dict[str, CudaKernel]]:
    """The text of a program, one translation unit, and its kernels by name."""
    types = {b.name: b.type for b in program.buffers}
    kernels: dict[str, CudaKernel] = {}
    for step in program.steps:
        for item in alternatives(step):
            if isinstance(item, Kernel) and item.name not in kernels:
                kernels[item.name] = cuda_kernel(item, types)
    sorts = [standalone("cuda/sort.cu")] if any(k.keys is not None for k in kernels.values()) else []
    return "\n".join([prelude(), *sorts, *(k.text for k in kernels.values()), support(program)]), kernels


def prelude() -> str:
    """What stands above every kernel."""
    return f"{standalone('cuda/math.h')}\n{standalone('cuda/program.h')}\nenum {{ GRADC_STRIP = {STRIP} }};\n"


def cuda_kernel(kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """One kernel's functions, made from its canonical form: no name of the user's reaches its text."""
    plain, own = kernel.canonical(types)
    return of_kernel(_made(replace(plain, name=kernel.name), tuple(own.items())), kernel, types)


def of_kernel(made: CudaKernel, kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """What was made of a kernel, for another one of the same structure and name: its buffers, dims and indices are its own."""
    sites = tuple((s.attr("op"), s.attr("source")) for s in kernel.body if s.op == "check")
    return replace(made, buffers=kernel.buffers, dims=tuple(kernel.dims(types)), sites=sites)


@functools.lru_cache(maxsize=4096)
def _made(kernel: Kernel, types: tuple[tuple[str, Type], ...]) -> CudaKernel:
    return _Writer(kernel, dict(types)).made()


class _Writer(RowWriter):
    """What rows.cu.j2 needs to know of a kernel, as lists of lines."""

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        super().__init__(kernel, types, Scribe(types, kernel.body, wraps=False))
        self.width = self.threads_per_task()
        self.scanning = False

    # -- the mapping to threads ----------------------------------------------------------------------------------------

    def threads_per_task(self) -> int:
        """As many threads as there are columns to go through side by side: a power of two, at most a block."""
        if not self.k.cols or not any(p.roots for p in self.k.passes) or any(self.how[s.buffer] not in UNORDERED and not self.side_by_side(s) for s in self.k.accums):
            return 1
        count = self.k.col_count
        width = 1
        while width < THREADS and width < (count if isinstance(count, int) else NOMINAL):
            width *= 2
        return width

    @property
    def threads(self) -> int:
        """Per block: a task of more than a warp has one to itself, for its barrier is the block's."""
        return THREADS if self.width <= 32 else self.width

    def side_by_side(self, s: Stmt) -> bool:
        """Whether columns may add at the same time: each into an element of its own, or all into one."""
        return self.parts[s.buffer].tail or not self.in_columns(s)

    def in_columns(self, s: Stmt) -> bool:
        """Whether an accum's place depends on the column."""
        cols = {a for a, _ in self.k.cols}
        places = [v for i in s.index for v, _ in i.terms]
        return bool(cols & set(places)) or any(v.startswith("%") and self.k.levels[v] & cols for v in places)

    # -- the kernel ----------------------------------------------------------------------------------------------------

    def made(self) -> CudaKernel:
        k = self.k
        kept = [a for a in k.rows if self.order == "regular" and a[0] in self.parts[k.order].kept]
        rest = [a for a in k.rows if a not in kept]
        passes = [self.one_pass(p, i) for i, p in enumerate(k.passes)]
        once = any(not s.name for p in k.passes for s in p.row)  # what a row does once is not for each of its strips
        strips = not once and all(how == "atomic" for how in self.how.values()) and len(k.passes) == 1 and not passes[0]["reductions"] and bool(k.cols) and self.width > 1
        only = all(s.op == "accum" and self.how[s.buffer] == "segmented" for s in k.body if not s.name)
        kept_count, rest_count = product(s for _, s in kept), product(s for _, s in rest)
        accums = [self.accum(s) for s in k.accums]
        part = self.parts.get(k.order)
        keys = product(self.types[k.order].shape[: part.leading]) if part is not None and self.order == "segmented" else None
        context = {
            "name": k.name, "comment": "\n".join(f" * {line}" for line in str(k).splitlines()), "dims": list(k.dims(self.types)),
            "buffers": [{"name": b, "ctype": stored(self.types[b].dtype), "written": b in k.writes} for b in k.buffers],
            "rows": self.axes(k.rows), "cols": self.axes(k.cols), "kept": self.axes(kept), "rest": self.axes(rest),
            "row_count": size(k.row_count), "col_count": size(k.col_count), "kept_count": size(kept_count), "rest_count": size(rest_count),
            "order": self.order, "passes": passes, "accums": accums, "strips": strips, "visit_all": not only, "width": self.width, "threads": self.threads, "syncs": any(how not in UNORDERED for how in self.how.values()),
            "scan": [self.one_pass(p, i, scan=True) for i, p in enumerate(k.passes)] if "atomic_fixed" in self.how.values() else [],
            "shared": self.width > 32 and any(p["reductions"] for p in passes),
        }  # fmt: skip
        stages = [Stage(f"{k.name}_rows", "rows", None, self.width)]
        if keys is not None and part is not None:
            context["key_count"] = size(keys)
            context["key_lines"] = [self.scribe.value(s) for s in self.slice_of([v for i in part.stmt.index[: part.leading] for v, _ in i.terms if v.startswith("%")] + [part.stmt.where])]
            at = index(flatten(part.stmt.index[: part.leading], self.types[k.order].shape[: part.leading]))
            context["key"] = f"{variable(part.stmt.where)} ? {at} : {size(keys)}" if part.stmt.where else at
            stages.insert(0, Stage(f"{k.name}_key", "key", k.row_count, 1))
        for s in k.accums:
            if self.how[s.buffer] in UNORDERED:
                stages.insert(0, Stage(f"{k.name}_clear{self.number[s.buffer]}", "clear", maximum(self.types[s.buffer].count, 1), 1))
            if self.how[s.buffer] == "atomic_fixed":
                stages.append(Stage(f"{k.name}_settle{self.number[s.buffer]}", "settle", self.types[s.buffer].count, 1))
            if self.how[s.buffer] == "privatized":
                stages.append(Stage(f"{k.name}_fold{self.number[s.buffer]}", "fold", self.types[s.buffer].count, 1))
        if context["scan"]:
            stages.insert(next(i for i, stage in enumerate(stages) if stage.kind == "rows"), Stage(f"{k.name}_scan", "scan", None, self.width))
        if keys is not None:
            stages.append(Stage(f"{k.name}_finish", "finish", keys, self.width))
        scratch = [self.room(s) for s in k.accums if self.how[s.buffer] in ("privatized", "segmented") or self.apart(s)]
        private: Size = 0
        for count, _ in scratch:
            private = private + count
        return CudaKernel(
            k.name, render("cuda/rows.cu.j2", k=context), k.buffers, tuple(k.dims(self.types)), tuple(stages), self.threads, k.row_count, k.col_count,
            kept_count if self.order == "regular" else k.row_count,
            self.order != "regular" and any(how not in UNORDERED for how in self.how.values()), private, keys, tuple(scratch), tuple(self.types[b].count for b, how in self.how.items() if how == "atomic_fixed"), strips, any(s.op == "check" for s in k.body), (),
        )  # fmt: skip

    # -- accums --------------------------------------------------------------------------------------------------------

    def wide(self, s: Stmt) -> str:
        """The C type that sums of many are kept in."""
        dtype = self.types[s.buffer].dtype
        return "sum_f32" if dtype is F32 and s.combine == "sum" else stored(dtype)

    def partial(self, s: Stmt) -> str:
        return self.wide(s) if self.apart(s) or self.how[s.buffer] == "privatized" else stored(self.types[s.buffer].dtype)

    def room(self, s: Stmt) -> tuple[Size, int]:
        """(elements per chunk, bytes of one) of its partial results."""
        shape, part = self.types[s.buffer].shape, self.parts[s.buffer]
        bytes_ = 8 if self.partial(s) == "sum_f32" else self.types[s.buffer].dtype.itemsize
        if self.how[s.buffer] == "segmented":
            return 2 * product(shape[part.leading :]), bytes_
        return product(shape[axis] for axis in self.free(s)) if self.how[s.buffer] == "regular" else product(shape), bytes_

    def accum(self, s: Stmt) -> dict[str, Any]:
        part, type_ = self.parts[s.buffer], self.types[s.buffer]
        how, ctype, wide = self.how[s.buffer], stored(type_.dtype), self.wide(s)
        if type_.dtype.is_float and type_.dtype.bits < 32:
            raise InternalError(f"an accum into {type_}: widen makes it f32")
        start = literal(neutral(s.combine, type_.dtype), type_.dtype)
        per_chunk: Size = self.room(s)[0] if how not in UNORDERED else 0
        if how == "atomic_fixed" and (s.combine != "sum" or type_.dtype is not F32):
            raise InternalError(f"{s.combine} into {type_} in fixed point: sums of f32 alone")
        out: dict[str, Any] = {"number": self.number[s.buffer], "buffer": s.buffer, "ctype": ctype, "strategy": how, "wide": wide, "partial": self.partial(s), "start": start,
               "size": size(type_.count), "inner": size(product(type_.shape[part.leading :])), "partials": f"chunks * {_factor(per_chunk)}", "apart": self.apart(s)}  # fmt: skip
        out["adds"] = size(self.k.row_count * self.k.col_count)
        out["empty"] = lambda target: f"gradc_clear({target});" if wide == "sum_f32" else f"{target} = {start};"
        out["join"] = functools.partial(self.joined, s)
        out["result"] = lambda total: f"gradc_value({total})" if wide == "sum_f32" else total
        if how == "regular":
            free = self.free(s)
            extents = [type_.shape[axis] for axis in free]
            out["owned_axes"], out["owned_size"] = self.axes([(f"z{i}", n) for i, n in enumerate(extents)]), size(product(extents))
            entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
            out["owned_at"] = index(flatten(entries, type_.shape))
            out["partial_at"] = index(flatten([entries[axis] for axis in free], extents))
        return out

    def joined(self, s: Stmt, target: str, value: str) -> str:
        """``target`` combined with a value, as a statement."""
        if s.combine in ("sum", "prod"):
            return f"{'gradc_add' if s.combine == 'sum' else 'gradc_times'}({target}, {value});"
        return f"{target} = {s.combine}imum_{stored(self.types[s.buffer].dtype)}({target}, {value});"

    # -- passes --------------------------------------------------------------------------------------------------------

    def one_pass(self, p: Pass, number: int, scan: bool = False) -> dict[str, Any]:
        """:param scan: nothing is written; only the largest of what will be added is found."""
        self.scanning = scan
        body, reductions = [self.scribe.value(s) for s in self.reloaded(p, 0 if scan else number)], []
        for s in p.roots:
            if s.op in REDUCTIONS:
                entry = self.reduction(REDUCTIONS[s.op], s.args[0], variable(s.name), s.dtype)
                body += entry.pop("lines")
                reductions.append(entry)
            elif s.op == "accum" and not self.in_columns(s) and self.width > 1:
                reductions.append(self.added_up(s, body))
            else:
                body += self.effect(s)
        row = [line for s in p.row for line in ([self.scribe.value(s)] if s.name else self.effect(s, once=True))]
        return {"row": row, "body": body, "columns": bool(p.roots), "reductions": reductions}

    def added_up(self, s: Stmt, body: list[str]) -> dict[str, Any]:
        """An accum of all columns to one element: they are added up first."""
        dtype = self.types[s.buffer].dtype
        name = f"b_a{self.number[s.buffer]}"
        entry = self.reduction(s.combine, s.args[0], name, dtype, s.where)
        body += entry.pop("lines")
        return {"start": entry["start"], "result": "\n      ".join([entry["result"], *self.effect(replace(s, where=""), name, once=True)])}

    def reduction(self, kind: str, value: str, name: str, dtype: DType | None, where: str = "") -> dict[str, Any]:
        """Each thread's part, then all of a task's."""
        assert dtype is not None
        own, v = self.scribe.values[value], variable(value)
        ctype, part, guard = carrier(own), f"t_{name}", f"if ({variable(where)}) " if where else ""
        shared = "shared" if self.width > 32 else "0"
        if kind in ("argmax", "argmin"):
            join = f"gradc_arg_{'most' if kind == 'argmax' else 'least'}<{ctype}>"
            place = index(flatten([Index.of(a) for a, _ in self.k.cols], [n for _, n in self.k.cols])) if self.k.cols else "0"
            start = f"gradc_place<{ctype}> {part} = {{0, -1}};"
            return {"start": start, "lines": [f"{join}::join({part}, gradc_place<{ctype}>{{{v}, {place}}});"],
                    "result": f"const i64 {name} = gradc_max(gradc_reduce<{join}, W>({part}, {shared}).at, 0);"}  # fmt: skip
        if kind == "sum":
            carried = "sum_f32" if dtype.is_float and carrier(dtype) == "f32" else carrier(dtype)
            return {"start": f"{carried} {part}; gradc_clear({part});", "lines": [f"{guard}gradc_add({part}, {v});"],
                    "result": f"const {carrier(dtype)} {name} = ({carrier(dtype)})gradc_value(gradc_reduce<gradc_sum<{carried}>, W>({part}, {shared}));"}  # fmt: skip
        join = f"gradc_{ {'prod': 'prod', 'max': 'most', 'min': 'least'}[kind] }<{carrier(dtype)}>"
        start = literal(neutral(kind, own if own.is_float or own.is_integer else dtype) if own.kind != "b" else int(kind == "min"), own)
        return {"start": f"{carrier(dtype)} {part} = {start};", "lines": [f"{guard}{join}::join({part}, {v});"],
                "result": f"const {carrier(dtype)} {name} = gradc_reduce<{join}, W>({part}, {shared});"}  # fmt: skip

    def effect(self, s: Stmt, value: str = "", once: bool = False) -> list[str]:
        """A store, accum or check; once: by one thread of the task."""
        value = value or variable(s.args[0])
        if self.scanning and not (s.op == "accum" and self.how[s.buffer] == "atomic_fixed"):
            return []
        alone = "if (lane == 0) " if once and self.width > 1 else ""
        if s.op == "check":
            axes, level = (*self.k.rows, *self.k.cols), self.k.stmt_level(s)  # along the others the value repeats: the first is meant
            at = index(flatten([Index.of(a) if a in level else Index() for a, _ in axes], [n for _, n in axes])) if axes else "0"
            bound = size(s.attr("bound"))
            low = [variable(v) for v in s.args[1:]]
            below = [f"{alone}if ({value} < {v}) gradc_report(flag, site, aux, 3, {at}, {value}, {v});" for v in low]
            return [*below, f"{alone}if ((u64){value} >= (u64){bound}) gradc_report(flag, site, aux, 1, {at}, {value}, {bound});"]
        if s.op == "store":
            assert s.dtype is not None
            return [f"{alone}{self.scribe.element(s.buffer, s.index)} = {to_memory(s.dtype, value)};"]
        how, number, part = self.how[s.buffer], self.number[s.buffer], self.parts[s.buffer]
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        if how == "segmented":
            at = index(flatten(s.index[part.leading :], self.types[s.buffer].shape[part.leading :]))
            target = f"a{number}[{at}]"
            if s.combine == "sum":
                return [f"{alone}if (goes) {{ if (first) {target} = 0; gradc_add({target}, {value}); }}"]
            return [f"{alone}if (goes) {{ if (first) {target} = {value}; else {self.joined(s, target, value)} }}"]
        shape, apart = self.types[s.buffer].shape, self.apart(s)
        own = self.free(s) if apart else list(range(len(shape)))
        at = index(flatten([s.index[axis] for axis in own], [shape[axis] for axis in own]))
        if apart or how == "privatized":
            return [guard + self.joined(s, f"p{number}[{at}]", value)]
        plain = f"{s.buffer}[{at}]"
        if how == "atomic_fixed":
            if self.scanning:
                return [f"{guard}most{number} = gradc_magnitude({value}) > most{number} ? gradc_magnitude({value}) : most{number};"]
            return [f"{guard}gradc_fixed_add(&s{number}[{at}], {value}, scale{number});"]
        if how == "atomic":
            return [f"{guard}gradc_atomic_{'add' if s.combine == 'sum' else s.combine}(&{plain}, {value});"]
        return [f"{guard}gradc_add({plain}, {value});" if s.combine == "sum" else guard + self.joined(s, plain, value)]


def _factor(value: Size) -> str:
    text = size(value)
    return text if text.startswith("(") or " " not in text else f"({text})"
