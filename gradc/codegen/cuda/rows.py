"""A kernel as templates/cuda/rows.cu.j2 needs to know it: its tasks, as :mod:`gradc.codegen.cuda.tasks` decides them,
as lists of lines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InternalError
from ...ir.dims import Size, maximum, product
from ...ir.kernel import Kernel, Phase
from ...ir.statement import REDUCTIONS, Index, Stmt, neutral
from ...ir.types import F32, DType, Type
from ...passes.reductions.combine import Combine
from ..expr import carrier, loaded, stored, to_memory, variable
from ..index import flatten, index, literal, size
from ..jinja import render
from .columns import OFFSETS, Access, access, linear
from .index_bound import reaches
from .tasks import STAGED, UNORDERED, WARPS, TaskWriter


@dataclass(frozen=True)
class Stage:
    """One function of a kernel.

    :param name: the function.
    :param kind: ``clear``, ``scan``, ``key``, ``rows``, ``part``, ``last``, ``fold``, ``tree``, ``finish`` or
        ``settle``.
    :param tasks: how many tasks, of ``width`` threads each; None for the rows, whose number depends on the chunk.
    """

    name: str
    kind: str
    tasks: Size | None
    width: int


@dataclass(frozen=True)
class CudaKernel:
    """A kernel's functions and what a launch must know of its sizes, over the kernel's own dims.

    :param chunked: what a chunk is cut from: rows, or the kept rows of a regular order.
    :param by_chunk: whether a task goes through several of them.
    :param tile: columns of a task that does not go through whole rows; 0: it does.
    :param lanes: whether each thread of a task has a row of its own.
    :param private: elements of the partial results of one chunk.  :param keys: keys of the sort; None without one.
    :param scratch: (elements per chunk, bytes of one) of the partial results, in order.
    :param fixed: elements of each sum in integers.
    :param loose: elements of each f32 sum of a 16-bit result that is added up in memory.
    :param parts: rows of each reduction, if rows may be cut up: a partial result per strip.
    :param strips: whether a row's columns are cut into tasks, too.
    :param shared: bytes of the partial results that a block of the rows keeps in shared memory; 0: they lie in memory.
    :param reaches: sizes that bound what its text computes for offsets, but for what a launch adds.
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
    tile: int
    lanes: bool
    private: Size
    keys: Size | None
    scratch: tuple[tuple[Size, int], ...]
    fixed: tuple[Size, ...]
    loose: tuple[Size, ...]
    parts: tuple[Size, ...]
    strips: bool
    checks: bool
    shared: int
    reaches: tuple[Size, ...]
    sites: tuple[tuple[str, str], ...]


class Writer(TaskWriter):
    """What rows.cu.j2 needs to know of a kernel, as lists of lines."""

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        super().__init__(kernel, types)
        self.scanning = False
        self.accesses: dict[tuple[str, Index, str], str] = {}
        self.moved: dict[str, Access] = {}
        self.wide_only = [a for s in kernel.accums if (a := self.flushed(s)) is not None and a.fits(self.vec)]

    # -- the kernel ----------------------------------------------------------------------------------------------------

    def made(self) -> CudaKernel:
        k = self.k
        kept = [a for a in k.rows if self.order == "regular" and a[0] in self.parts[k.order].kept]
        rest = [a for a in k.rows if a not in kept]
        passes = [self.one_pass(p, i) for i, p in enumerate(k.passes)]
        scan = (
            [self.one_pass(p, i, scan=True) for i, p in enumerate(k.passes)]
            if "atomic_fixed" in self.strategy_of.values()
            else []
        )
        only = all(s.op == "accum" and self.strategy_of[s.buffer] == "segmented" for s in k.body if not s.name)
        kept_count, rest_count = product(s for _, s in kept), product(s for _, s in rest)
        accums = [self.accum(s) for s in k.accums]
        part = self.parts.get(k.order)
        keys = (
            product(self.types[k.order].shape[: part.leading])
            if part is not None and self.order == "segmented"
            else None
        )
        vectors = [*self.moved.values(), *self.wide_only]
        conditions = list(dict.fromkeys(c for a in vectors for c in a.conditions(self.vec))) if self.vec > 1 else []
        context = {
            "name": k.name,
            "comment": "\n".join(f" * {line}" for line in str(k).splitlines()),
            "dims": list(k.dims(self.types)),
            "buffers": [
                {"name": b, "ctype": stored(self.types[b].dtype), "written": b in k.writes, "alone": self.alone(b)}
                for b in k.buffers
            ],
            "rows": self.axes(k.rows),
            "cols": self.axes(k.cols),
            "kept": self.axes(kept),
            "rest": self.axes(rest),
            "row_count": size(k.row_count),
            "col_count": size(k.col_count),
            "kept_count": size(kept_count),
            "rest_count": size(rest_count),
            "order": self.order,
            "passes": passes,
            "accums": accums,
            "strips": self.strips,
            "tiled": self.tiled,
            "lanes": self.lanes,
            "held": self.held,
            "turns": self.turns if self.held or self.tiled else 0,
            "visit_all": not only,
            "width": self.width,
            "vec": self.vec,
            "exact": self.exact,
            "wide": conditions,
            "threads": self.threads,
            "blocks": max(1, 512 // self.threads),
            "syncs": (
                bool(self.ordered)
                and not self.tiled
                and not self.held
                and not self.lanes
                and (self.order == "regular" or not all(map(self.own, self.ordered)))
            ),
            "scan": scan,
            "group": self.group() if self.tiled else {},
            "shared": self.width > 32 and any(p["reductions"] for p in passes),
            "table": self.table() if self.shared else {},
        }
        stages = [Stage(f"{k.name}_rows", "rows", None, self.threads if self.shared else self.width)]
        if keys is not None and part is not None:
            context["key_count"] = size(keys)
            context["key_lines"], context["key"] = self.key(part, size(keys))
            stages.insert(0, Stage(f"{k.name}_key", "key", k.row_count, 1))
        for s in k.accums:
            number, count = self.number[s.buffer], self.types[s.buffer].count
            if self.strategy_of[s.buffer] in UNORDERED:
                stages.insert(0, Stage(f"{k.name}_clear{number}", "clear", maximum(count, 1), 1))
            if self.strategy_of[s.buffer] == "privatized":
                stages.append(Stage(f"{k.name}_fold{number}", "fold", count, self.threads // 32))
        if scan:
            stages.insert(
                next(i for i, stage in enumerate(stages) if stage.kind == "rows"),
                Stage(f"{k.name}_scan", "scan", None, self.width),
            )
        if keys is not None:
            each = 1 if self.lanes else self.width
            stages += [Stage(f"{k.name}_tree", "tree", None, each), Stage(f"{k.name}_finish", "finish", keys, each)]
        parts: list[Size] = []
        if self.splits():
            stages += [
                Stage(f"{k.name}_part{i}", "part" if p["columns"] else "last", None, self.width)
                for i, p in enumerate(passes)
            ]
            parts = [k.row_count for p in passes for _ in p["reductions"]]
        context["parts"] = [{"row_count": size(k.row_count)} for _ in parts]
        for s in k.accums:
            if self.strategy_of[s.buffer] == "atomic_fixed" or self.loose(s):
                stages.append(Stage(f"{k.name}_settle{self.number[s.buffer]}", "settle", self.types[s.buffer].count, 1))
        scratch = [self.room(s) for s in k.accums if self.beside(s)]
        private: Size = 0
        for count, _ in scratch:
            private = private + count
        return CudaKernel(
            k.name,
            render("cuda/rows.cu.j2", k=context),
            k.buffers,
            tuple(k.dims(self.types)),
            tuple(stages),
            self.threads,
            k.row_count,
            k.col_count,
            kept_count if self.order == "regular" else k.row_count,
            self.order != "regular" and bool(self.ordered),
            self.width * self.vec if self.tiled or self.shared else 0,
            self.lanes,
            private,
            keys,
            tuple(scratch),
            tuple(self.types[b].count for b, how in self.strategy_of.items() if how == "atomic_fixed"),
            tuple(self.types[s.buffer].count for s in k.accums if self.loose(s)),
            tuple(parts),
            self.strips,
            any(s.op == "check" for s in k.body),
            self.table_bytes(),
            reaches(k, self.types),
            (),
        )

    def key(self, part: Combine, nowhere: str) -> tuple[list[str], str]:
        """Of a row the lines before its place among the rows of a result, and that; ``nowhere`` where it adds to
        none.
        """
        leading = part.stmt.index[: part.leading]
        lines = [
            self.scribe.value(s)
            for s in self.slice_of([v for i in leading for v, _ in i.terms if v.startswith("%")] + [part.stmt.where])
        ]
        at = index(flatten(leading, self.types[part.buffer].shape[: part.leading]), OFFSETS)
        return lines, f"{variable(part.stmt.where)} ? {at} : {nowhere}" if part.stmt.where else at

    def table(self) -> dict[str, Any]:
        """Of partial results in shared memory: what a row brings, and where it goes."""
        (s,), (p,) = self.k.accums, self.k.passes
        lines, key = self.key(self.parts[s.buffer], "-1")
        values = [self.scribe.value(v) for v in (*p.row, *p.body) if v.name]
        return {
            "lines": values,
            "value": variable(s.args[0]),
            "ctype": carrier(self.scribe.values[s.args[0]]),
            "key_lines": lines,
            "key": key,
            "warps": WARPS,
            "rows": STAGED,
            "bytes": self.table_bytes(),
        }

    def table_bytes(self) -> int:
        """A sum for each column of a task in each row of the result; 0 where they are not in shared memory."""
        if not self.shared:
            return 0
        (s,) = self.k.accums
        keys = product(self.types[s.buffer].shape[: self.parts[s.buffer].leading])
        assert isinstance(keys, int)
        return keys * self.width * (8 if self.wide(s) == "sum_f32" else self.sums(s).itemsize)

    def alone(self, buffer: str) -> bool:
        """Whether no other lies where it does: only an output that is stored where an input is read can take its
        memory.
        """
        stores, loads = ([s for s in self.k.body if s.op == op] for op in ("store", "load"))
        pairs = {
            (s.buffer, t.buffer)
            for s in stores
            for t in loads
            if s.index == t.index and self.types[s.buffer] == self.types[t.buffer]
        }
        return not any(buffer in pair for pair in pairs)

    def group(self) -> dict[str, Any]:
        """Of the rows that are under way together: what is kept of each."""
        values = self.kept_values()
        values += [
            s
            for s in self.k.passes[0].row
            if s.name and s not in values and s.op not in ("const", "size") and self.needed_again(s)
        ]
        keep = [{"name": variable(s.name), "ctype": carrier(s.dtype)} for s in values if s.dtype is not None]
        again = [self.scribe.value(s) for s in self.k.passes[0].row if s.op in ("const", "size")]
        return {"ahead": self.ahead, "keep": keep, "again": again}

    def needed_again(self, s: Stmt) -> bool:
        """Whether a load or store that is not moved with its row's names it in its place."""
        row = self.k.passes[0]
        return any(
            s.name in t.uses
            and t.op in ("load", "store")
            and ((self.ahead == 1 and self.vec == 1) or t.op == "store" or self.vector(t) is None)
            for t in (*row.body, *row.roots)
        )

    # -- accums --------------------------------------------------------------------------------------------------------

    def sums(self, s: Stmt) -> DType:
        """What is added up in: f32 for 16-bit results, which are rounded once."""
        dtype = self.types[s.buffer].dtype
        return F32 if dtype.is_float and dtype.bits == 16 else dtype

    def wide(self, s: Stmt) -> str:
        """The C type that sums of many are kept in."""
        dtype = self.sums(s)
        return "sum_f32" if dtype is F32 and s.combine == "sum" else stored(dtype)

    def partial(self, s: Stmt) -> str:
        if self.shared:
            return stored(self.sums(s))
        return (
            self.wide(s)
            if self.wide_accumulator(s) or self.strategy_of[s.buffer] == "privatized"
            else stored(self.sums(s))
        )

    def wide_accumulator(self, s: Stmt) -> bool:
        return super().wide_accumulator(s) or (
            self.strategy_of[s.buffer] == "regular" and self.types[s.buffer].dtype is not self.sums(s)
        )

    def loose(self, s: Stmt) -> bool:
        """Whether its sums are added up in f32 in memory and rounded after that."""
        how = self.strategy_of[s.buffer]
        return self.types[s.buffer].dtype is not self.sums(s) and (
            how == "atomic" or (how == "segmented" and not self.held and not self.lanes)
        )

    def beside(self, s: Stmt) -> bool:
        """Whether chunks have partial results of it in memory."""
        return self.strategy_of[s.buffer] in ("privatized", "segmented") or (self.wide_accumulator(s) and not self.held)

    def room(self, s: Stmt) -> tuple[Size, int]:
        """(elements per chunk, bytes of one) of its partial results."""
        shape, part = self.types[s.buffer].shape, self.parts[s.buffer]
        bytes_ = 8 if self.partial(s) == "sum_f32" else self.sums(s).itemsize
        if self.strategy_of[s.buffer] == "segmented":
            return 2 * product(shape[part.leading :]), bytes_
        return (
            product(shape[axis] for axis in self.free(s)) if self.strategy_of[s.buffer] == "regular" else product(shape)
        ), bytes_

    def flushed(self, s: Stmt) -> Access | None:
        """The row of the result that held sums are written to, a thread's columns at once."""
        how, type_ = self.strategy_of[s.buffer], self.types[s.buffer]
        if not self.held or how not in ("segmented", "regular"):
            return None
        return Access(
            s.buffer,
            stored(type_.dtype),
            type_.dtype.itemsize,
            Index(0, (("now", product(type_.shape[self.parts[s.buffer].leading :])),)),
        )

    def accum(self, s: Stmt) -> dict[str, Any]:
        part, type_ = self.parts[s.buffer], self.types[s.buffer]
        how, dtype, wide, number = self.strategy_of[s.buffer], self.sums(s), self.wide(s), self.number[s.buffer]
        if dtype.is_float and dtype.bits < 32:
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        start = literal(neutral(s.combine, dtype), dtype)
        per_chunk: Size = self.room(s)[0] if how not in UNORDERED else 0
        if how == "atomic_fixed" and (s.combine != "sum" or dtype is not F32):
            raise InternalError(f"{s.combine} into {type_} in fixed point: sums of f32 alone")
        out: dict[str, Any] = {
            "number": number,
            "buffer": s.buffer,
            "ctype": stored(type_.dtype),
            "strategy": how,
            "wide": wide,
            "partial": self.partial(s),
            "start": start,
            "sum": stored(dtype),
            "size": size(type_.count),
            "inner": size(product(type_.shape[part.leading :])),
            "outer": size(product(type_.shape[: part.leading])),
            "partials": f"chunks * {_factor(per_chunk)}",
            "wide_accumulator": self.wide_accumulator(s),
            "beside": self.beside(s),
            "loose": self.loose(s),
            "own": self.own(s),
            "kind": wide if how != "segmented" and (how != "regular" or self.wide_accumulator(s)) else stored(dtype),
        }
        out["adds"] = self.scribe.size(self.k.row_count * self.k.col_count)
        out["bytes"] = 4 if self.loose(s) else type_.dtype.itemsize
        out["target"] = f"w{number}" if self.loose(s) else s.buffer
        out["empty"] = lambda target, kind=wide: (
            f"gradc_clear({target});" if kind == "sum_f32" else f"{target} = {start};"
        )
        out["join"] = functools.partial(self.joined, s)
        out["result"] = lambda total, kind=wide: f"gradc_value({total})" if kind == "sum_f32" else total
        out["final"] = lambda total, kind=wide: to_memory(type_.dtype, out["result"](total, kind))
        if how == "regular":
            free = self.free(s)
            extents = [type_.shape[axis] for axis in free]
            out["owned_axes"], out["owned_size"] = (
                self.axes([(f"z{i}", n) for i, n in enumerate(extents)]),
                size(product(extents)),
            )
            entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
            out["owned_at"] = index(flatten(entries, type_.shape), OFFSETS)
            out["partial_at"] = index(flatten([entries[axis] for axis in free], extents), OFFSETS)
            out["kept_at"] = index(flatten(s.index[: part.leading], type_.shape[: part.leading]), OFFSETS)
        return out

    def joined(self, s: Stmt, target: str, value: str) -> str:
        """``target`` combined with a value, as a statement."""
        if s.combine in ("sum", "prod"):
            return f"{'gradc_add' if s.combine == 'sum' else 'gradc_times'}({target}, {value});"
        return f"{target} = {s.combine}imum_{stored(self.sums(s))}({target}, {value});"

    # -- passes --------------------------------------------------------------------------------------------------------

    def one_pass(self, p: Phase, number: int, scan: bool = False) -> dict[str, Any]:
        """:param scan: nothing is written; only the largest of what will be added is found."""
        self.scanning = scan
        gets: dict[str, dict[str, str]] = {}
        puts: dict[str, dict[str, Any]] = {}
        body, reductions = [self.taken(s, gets) for s in self.reloaded(p, 0 if scan else number)], []
        for s in p.roots:
            found = self.vector(s) if not scan else None
            if s.op in REDUCTIONS:
                entry = self.reduction(REDUCTIONS[s.op], s.args[0], variable(s.name), s.dtype)
                body += entry.pop("lines")
                reductions.append(entry)
            elif s.op == "accum" and not self.in_columns(s) and self.width > 1 and not self.lanes:
                reductions.append(self.added_up(s, body))
            elif not scan and (target := self.vector_add(s)) is not None:
                name = f"z{self.number[s.buffer]}"
                self.moved[name] = target
                puts[name] = {
                    "name": name,
                    "ctype": target.ctype,
                    "at": target.at,
                    "adds": True,
                    "guard": f"if ({variable(s.where)}) " if s.where else "",
                }
                body.append(f"{name}[j] = {variable(s.args[0])};")
            elif found is not None and s.dtype is not None:
                name, access_ = found
                puts[name] = {"name": name, "ctype": access_.ctype, "at": access_.at, "adds": False, "guard": ""}
                body.append(f"{name}[j] = {to_memory(s.dtype, variable(s.args[0]))};")
            else:
                body += self.effect(s)
        row = [line for s in p.row for line in ([self.scribe.value(s)] if s.name else self.effect(s, once=True))]
        values = [self.scribe.value(s) for s in p.row if s.name]
        effects = [line for s in p.row if not s.name for line in self.effect(s, once=True)]
        return {
            "row": row,
            "named": values,
            "effects": effects,
            "body": body,
            "columns": bool(p.roots),
            "reductions": reductions,
            "gets": list(gets.values()),
            "puts": list(puts.values()),
        }

    def vector(self, s: Stmt) -> tuple[str, Access] | None:
        """The array that a linear access moves a thread's columns through, if they move together."""
        found = access(self.k, self.types, s, masked=not self.tiled) if self.vec > 1 or self.ahead > 1 else None
        if found is None or not found.fits(self.vec):
            return None
        name = self.accesses.setdefault(
            (found.buffer, found.base, s.op + s.where), f"{'x' if s.op == 'load' else 'y'}{len(self.accesses)}"
        )
        self.moved[name] = found
        return name, found

    def vector_add(self, s: Stmt) -> Access | None:
        """The row of f32 that an atomic accum adds a thread's neighbouring columns to: with words of 16 bytes where the
        hardware has them.
        """
        if (
            s.op != "accum"
            or self.strategy_of[s.buffer] != "atomic"
            or s.combine != "sum"
            or self.sums(s) is not F32
            or self.vec % 4
            or not self.in_columns(s)
        ):
            return None
        base = linear(self.k, self.types, s)
        if base is None or (s.where and self.k.levels[s.where] & {a for a, _ in self.k.cols}):
            return None
        row = Access(f"w{self.number[s.buffer]}" if self.loose(s) else s.buffer, "f32", 4, base)
        return row if row.fits(self.vec) else None

    def taken(self, s: Stmt, gets: dict[str, dict[str, str]]) -> str:
        """A value's line; a linear load reads what has been fetched."""
        found = self.vector(s) if s.op == "load" else None
        if found is None or s.dtype is None:
            return self.scribe.value(s)
        name, access_ = found
        gets[name] = {
            "name": name,
            "ctype": access_.ctype,
            "at": access_.at,
            "buffer": access_.buffer,
            "guard": f"if ({variable(s.where)}) " if s.where else "",
        }
        element = f"{name}[u][j]" if self.tiled and not self.scanning else f"{name}[j]"
        read = loaded(s.dtype, element)
        read = f"{variable(s.where)} ? {read} : {literal(dict(s.attrs).get('other', 0), s.dtype)}" if s.where else read
        return f"const {carrier(s.dtype)} {variable(s.name)} = {read};"

    def added_up(self, s: Stmt, body: list[str]) -> dict[str, Any]:
        """An accum of all columns to one element: they are added up first."""
        dtype = self.types[s.buffer].dtype
        name = f"b_a{self.number[s.buffer]}"
        entry = self.reduction(s.combine, s.args[0], name, dtype, s.where)
        body += entry.pop("lines")
        return {
            "start": entry["start"],
            "result": "\n      ".join([entry["result"], *self.effect(replace(s, where=""), name, once=True)]),
        }

    def reduction(self, kind: str, value: str, name: str, dtype: DType | None, where: str = "") -> dict[str, Any]:
        """Each thread's part, then all of a task's."""
        assert dtype is not None
        own, v = self.scribe.values[value], variable(value)
        ctype, part, guard = carrier(own), f"t_{name}", f"if ({variable(where)}) " if where else ""
        shared = "shared" if self.width > 32 else "0"
        if kind in ("argmax", "argmin"):
            join = f"gradc_arg_{'most' if kind == 'argmax' else 'least'}<{ctype}>"
            place = (
                index(flatten([Index.of(a) for a, _ in self.k.cols], [n for _, n in self.k.cols]), OFFSETS)
                if self.k.cols
                else "0"
            )
            start = f"gradc_place<{ctype}> {part} = {{0, -1}};"
            return {
                "part": part,
                "ctype": f"gradc_place<{ctype}>",
                "join": join,
                "start": start,
                "lines": [f"{join}::join({part}, gradc_place<{ctype}>{{{v}, {place}}});"],
                "result": f"const i64 {name} = gradc_max(gradc_reduce<{join}, W>({part}, {shared}).at, 0);",
            }
        if kind == "sum":
            carried = "sum_f32" if dtype.is_float and carrier(dtype) == "f32" else carrier(dtype)
            return {
                "part": part,
                "ctype": carried,
                "join": f"gradc_sum<{carried}>",
                "start": f"{carried} {part}; gradc_clear({part});",
                "lines": [f"{guard}gradc_add({part}, {v});"],
                "result": (
                    f"const {carrier(dtype)} {name} = ({carrier(dtype)})gradc_value(gradc_reduce<gradc_sum<{carried}>,"
                    f" W>({part}, {shared}));"
                ),
            }
        join = f"gradc_{ {'prod': 'prod', 'max': 'most', 'min': 'least'}[kind] }<{carrier(dtype)}>"
        start = literal(
            neutral(kind, own if own.is_float or own.is_integer else dtype) if own.kind != "b" else int(kind == "min"),
            own,
        )
        return {
            "part": part,
            "ctype": carrier(dtype),
            "join": join,
            "start": f"{carrier(dtype)} {part} = {start};",
            "lines": [f"{guard}{join}::join({part}, {v});"],
            "result": f"const {carrier(dtype)} {name} = gradc_reduce<{join}, W>({part}, {shared});",
        }

    def effect(self, s: Stmt, value: str = "", once: bool = False) -> list[str]:
        """A store, accum or check; once: by one thread of the task."""
        value = value or variable(s.args[0])
        if self.scanning and not (s.op == "accum" and self.strategy_of[s.buffer] == "atomic_fixed"):
            return []
        alone = "if (lane == 0) " if once and self.width > 1 and not self.lanes else ""
        if s.op == "check":
            axes, level = (
                (*self.k.rows, *self.k.cols),
                self.k.stmt_level(s),
            )  # along the others the value repeats: the first is meant
            at = (
                index(flatten([Index.of(a) if a in level else Index() for a, _ in axes], [n for _, n in axes]), OFFSETS)
                if axes
                else "0"
            )
            bound = self.scribe.size(s.attr("bound"))
            low = [variable(v) for v in s.args[1:]]
            below = [f"{alone}if ({value} < {v}) gradc_report(flag, site, aux, 3, {at}, {value}, {v});" for v in low]
            return [
                *below,
                f"{alone}if ((u64){value} >= (u64){bound}) gradc_report(flag, site, aux, 1, {at}, {value}, {bound});",
            ]
        if s.op == "store":
            assert s.dtype is not None
            return [f"{alone}{self.scribe.element(s.buffer, s.index)} = {to_memory(s.dtype, value)};"]
        how, number, part = self.strategy_of[s.buffer], self.number[s.buffer], self.parts[s.buffer]
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        if self.held and s in self.ordered:
            guard = "if (goes) " if how == "segmented" else guard
            return [guard + self.joined(s, f"a{number}[t][j]", value)]
        if self.lanes and how == "segmented":
            return [f"if (goes) x{number} = {value};"]
        if how == "segmented":
            at = index(flatten(s.index[part.leading :], self.types[s.buffer].shape[part.leading :]), OFFSETS)
            target = f"a{number}[{at}]"
            if s.combine == "sum":
                return [f"{alone}if (goes) {{ if (first_hit) {target} = 0; gradc_add({target}, {value}); }}"]
            return [f"{alone}if (goes) {{ if (first_hit) {target} = {value}; else {self.joined(s, target, value)} }}"]
        shape, apart = self.types[s.buffer].shape, self.wide_accumulator(s)
        own = self.free(s) if apart else list(range(len(shape)))
        at = index(flatten([s.index[axis] for axis in own], [shape[axis] for axis in own]), OFFSETS)
        if apart or how == "privatized":
            return [guard + self.joined(s, f"p{number}[{at}]", value)]
        plain = f"{'w' + str(number) if self.loose(s) else s.buffer}[{at}]"
        if how == "atomic_fixed":
            if self.scanning:
                return [
                    f"{guard}most{number} = gradc_magnitude({value}) > most{number} ? gradc_magnitude({value}) :"
                    f" most{number};"
                ]
            return [f"{guard}gradc_fixed_add(&s{number}[{at}], {value}, scale{number});"]
        if how == "atomic":
            return [f"{guard}gradc_atomic_{'add' if s.combine == 'sum' else s.combine}(&{plain}, {value});"]
        return [f"{guard}gradc_add({plain}, {value});" if s.combine == "sum" else guard + self.joined(s, plain, value)]


def _factor(value: Size) -> str:
    text = size(value)
    return text if text.startswith("(") or " " not in text else f"({text})"
