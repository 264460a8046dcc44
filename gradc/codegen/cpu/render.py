"""Kernels and programs as C source for the CPU.

Python writes single statements; the templates own loops, visiting order, ownership, partials, flush and finish.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import knobs
from ...errors import InternalError, Unsupported
from ...ir.dims import Dim, Size, product, substitute, symbol, symbols
from ...ir.kernel import Call, Kernel, Phase, Program, Select, alternatives
from ...ir.statement import REDUCTIONS, Axis, Index, Operand, Stmt, neutral
from ...ir.types import F32, F64, DType, Type
from ...passes.reductions.chunks import chunk_rows, interchanged_chunk_rows, task_rows
from ..expr import Scribe, carrier, converted, loaded, stored, to_memory, variable
from ..index import flatten, index, literal, size
from ..jinja import render
from .collapse_axes import collapse_axes
from .row_memory import RowMemory, cost

PER_UNIT = 8
"""Kernels per translation unit: units compile side by side."""
WIDE = 12
"""Additions' worth of one op from which a kernel gets the widest vectors there are: exp, tanh, erf, sigmoid gain a
third by 512 bits on processors for which compilers prefer 256, and what only moves and adds loses.
"""
MANY = 256
"""Rows from which sums over them are sums of sums in f32."""
TAPS = 4
"""Rows of an axis that are taken innermost: the taps of one place lie near one another."""


@dataclass(frozen=True)
class Source:
    """A program as C.

    :param units: texts compiled apart and linked.
    :param kernels: kernel name -> its own text.
    :param sites: step number -> (op, source) of its check.
    """

    units: tuple[str, ...]
    kernels: Mapping[str, str]
    sites: Mapping[int, tuple[str, str]]

    @property
    def text(self) -> str:
        return "\n".join(self.units)


def render_program(program: Program) -> Source:
    """The C of a program: kernels in units of eight, and one entry that runs them."""
    types = {b.name: b.type for b in program.buffers}
    dims = {name: f"n[{i}]" for i, name in enumerate(program.dims)}
    roots = [b.name for b in program.buffers if not b.alias]
    place = {b.name: roots.index(program.root(b.name)) for b in program.buffers}
    texts: dict[str, str] = {}
    wide: set[str] = set()
    steps: list[dict[str, Any]] = []
    sites: dict[int, tuple[str, str]] = {}
    for number, step in enumerate(program.steps):
        before = ""
        for when, item in step.cases if isinstance(step, Select) else [(None, next(alternatives(step)))]:
            condition = (
                f"{_over(when.left, dims)} {when.relation} {_over(when.right, dims)}" if when is not None else ""
            )
            guard = f"if ({condition})" if condition else ""
            entry = (
                _call_entry(item, program, dims, place)
                if isinstance(item, Call)
                else _kernel_entry(item, types, dims, place)
            )
            entry |= {
                "number": number,
                "guard_open": f"{before}{guard} {{" if before or guard else "",
                "guard_close": "}" if before or guard else "",
            }
            before = "else " if guard else ""
            steps.append(entry)
            if isinstance(item, Kernel):
                texts.setdefault(item.name, render_kernel(item, types))
                if any(cost(s) >= WIDE for s in item.body):
                    wide.add(item.name)
                for s in item.body:
                    if s.op == "check":
                        sites[number] = (s.attr("op"), s.attr("source"))
    calls = [item for step in program.steps for item in alternatives(step) if isinstance(item, Call)]
    pairs = {
        (types[operand.buffer].dtype, types[call.out.buffer].dtype): None for call in calls for operand in call.operands
    }
    readers = [
        {
            "name": _reader(own, wide),
            "from": stored(own),
            "to": wide.name,
            "value": converted(f"({loaded(own, 'from[i * from_step]')})", own, wide),
        }
        for own, wide in pairs
        if own is not wide
    ]
    main = render("cpu/program.c.j2", kernels=list(texts), steps=steps, readers=readers)
    light, costly = ([n for n in texts if (n in wide) is pays] for pays in (False, True))
    parts = [names[i : i + PER_UNIT] for names in (costly, light) for i in range(0, len(names), PER_UNIT)] or [[]]
    # one unit needs no linkage between its functions; several share hidden symbols
    shared = "static __attribute__((unused))" if len(parts) == 1 else '__attribute__((visibility("hidden")))'
    units = []
    for number, part in enumerate(parts):
        first = '#include "wide.h"\n' if part and part[0] in wide else ""
        body = [
            f'{first}#include "math.h"\n#include "program.h"\n#define GRADC_SHARED {shared}\n',
            *(texts[n] for n in part),
        ]
        units.append("\n".join([*body, main] if number == len(parts) - 1 else body))
    return Source(tuple(units), texts, sites)


def _over(value: Size, dims: Mapping[str, str]) -> str:
    """A size over the program's dims as C."""
    names = {name: symbol(f"N{i}") for i, name in enumerate(dims)}
    text = size(substitute(value, names)) if isinstance(value, Dim) else size(value)
    for i, place in reversed(list(enumerate(dims.values()))):
        text = text.replace(f"N{i}", place)
    return text


def _kernel_entry(
    kernel: Kernel, types: Mapping[str, Type], dims: Mapping[str, str], place: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "kind": "kernel",
        "name": kernel.name,
        "buffers": [f"buf[{place[b]}]" for b in kernel.buffers],
        "dims": [dims[d] for d in kernel.dims(types)],
    }


def _reader(own: DType, wide: DType) -> str:
    """The function that reads elements of a narrower type."""
    return "" if own is wide else f"read_{own}_{wide}"


def _call_entry(call: Call, program: Program, dims: Mapping[str, str], place: Mapping[str, int]) -> dict[str, Any]:
    sizes = dict(call.axes)
    out_axes = [i.variable for i in call.out.index]
    inner = [a for a in sizes if a not in out_axes]
    if len(inner) != 1 or any(a is None for a in out_axes):
        raise InternalError(f"{call.name} is no matrix product")
    batch, (m, n), (k,) = out_axes[:-2], out_axes[-2:], inner

    def c(value: Size) -> str:
        return _over(value, dims)

    def seen(operand: Operand | None, row: str, col: str) -> dict[str, Any]:
        """Where a buffer lies, and its steps along the batch, rows and columns; of none all is 0."""
        if operand is None:
            return {
                "at": "0",
                "row": "0",
                "col": "0",
                "batch": ["0" for _ in batch],
                "bytes": 0,
                "read": "0",
                "row_per": "1",
                "col_per": "1",
            }
        per = dict(operand.per)
        type_ = program.buffer[operand.buffer].type
        flat = flatten(operand.index, type_.shape)
        along = dict(flat.terms)
        return {
            "at": f"(const char *)buf[{place[operand.buffer]}] + ({c(flat.const)}) * {type_.dtype.itemsize}",
            "row": c(along.get(row, 0)),
            "col": c(along.get(col, 0)),
            "batch": [c(along.get(str(x), 0)) for x in batch],
            "bytes": type_.dtype.itemsize,
            "read": _reader(type_.dtype, dtype) or "0",
            "row_per": c(per.get(row, 1)),
            "col_per": c(per.get(col, 1)),
        }

    dtype = program.buffer[call.out.buffer].type.dtype
    if dtype not in (F32, F64):
        raise Unsupported(f"a matrix product in {dtype} on the cpu")
    left, right = call.args
    operands = [
        seen(left, str(m), k),
        seen(right, k, str(n)),
        seen(left.scale, str(m), k),
        seen(right.scale, k, str(n)),
    ]

    def reach(operand: Operand) -> dict[str, Any]:
        """The first element, how many there are, and the extents and steps of what is read; groups count as one."""
        type_ = program.buffer[operand.buffer].type
        flat = flatten(operand.index, type_.shape)
        per, along = dict(operand.per), dict(flat.terms)
        over = (
            out_axes if operand is call.out else sizes
        )  # of none of an axis that an operand lacks nothing of it is read
        axes = [(f"gradc_chunks({c(sizes[str(x)])}, {c(per.get(str(x), 1))})", c(along.get(str(x), 0))) for x in over]
        return {
            "from": c(flat.const),
            "count": c(product(type_.shape)),
            "sizes": [extent for extent, _ in axes],
            "steps": [step for _, step in axes],
        }

    return {
        "kind": "call",
        "name": call.name,
        "dims": [],
        "width": dtype.bits,
        "buffers": [],
        "operands": operands,
        "c": place[call.out.buffer],
        "batch": [{"size": c(sizes[str(x)]), "steps": [o["batch"][i] for o in operands]} for i, x in enumerate(batch)],
        "m": c(sizes[str(m)]),
        "n": c(sizes[str(n)]),
        "k": c(sizes[k]),
        "reaches": [reach(operand) for operand in (*call.operands, call.out)] if knobs.BOUNDS.get() else [],
    }


@functools.lru_cache(maxsize=4096)
def _rendered(kernel: Kernel, types: tuple[tuple[str, Type], ...], guarded: bool) -> str:
    own = dict(types)
    return render("cpu/rows.c.j2", k=_Writer(*collapse_axes(kernel, own), kernel.dims(own), guarded).context())


def render_kernel(kernel: Kernel, types: Mapping[str, Type]) -> str:
    """One kernel's C, made from its canonical form: no name of the user's reaches it."""
    plain, own = kernel.canonical(types)
    return _rendered(replace(plain, name=kernel.name), tuple(own.items()), knobs.BOUNDS.get())


class _Writer(RowMemory):
    """What rows.c.j2 needs to know of a kernel, as lists of lines.

    :param dims: the symbols in the order in which a caller passes their values: that of the kernel as it stands in the
        program. Joined columns name them in another order, and may not name them all.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type], dims: Sequence[str], guarded: bool):
        self.dims = dims
        super().__init__(
            kernel, types, Scribe(types, kernel.body, columns=[a for a, _ in kernel.cols], guarded=guarded)
        )
        self.held = self.worth_holding()
        self.past: dict[Stmt, int] = {}

    def context(self) -> dict[str, Any]:
        k = self.k
        kept = self.kept
        rest = sorted((a for a in k.rows if a not in kept), key=lambda a: isinstance(a[1], int) and a[1] <= TAPS)
        self.past = {
            s: i for i, s in enumerate(s for j, p in enumerate(k.passes) for s in p.roots if self.writes_past(s, j))
        }
        passes = [self.one_pass(p, i) for i, p in enumerate(k.passes)]
        checks = any(s.op == "check" for s in k.body)
        plain = not k.accums and len(k.passes) == 1 and not passes[0]["reductions"] and len(k.cols) == 1
        only = all(s.op == "accum" and self.strategy_of[s.buffer] == "segmented" for s in k.body if not s.name)
        out = {
            "name": k.name,
            "comment": "\n".join(f" * {line}" for line in str(replace(k, name=k.name)).splitlines()),
            "dims": list(self.dims),
            "buffers": [{"name": b, "ctype": stored(self.types[b].dtype), "written": b in k.writes} for b in k.buffers],
            "rows": self.axes(k.rows),
            "cols": self.axes(k.cols),
            "kept": self.axes(kept),
            "rest": self.axes(rest),
            "row_count": size(k.row_count),
            "col_count": size(k.col_count),
            "kept_count": size(product(s for _, s in kept)),
            "rest_count": size(product(s for _, s in rest)),
            "order": self.order,
            "passes": passes,
            "accums": [self.accum(s) for s in k.accums],
            "checks": checks,
            "held": [{"name": f"h{i}", "ctype": carrier(k.stmts[v].dtype or F32)} for i, v in enumerate(self.held)],
            "past": [
                {"name": f"{i}", "ctype": stored(self.types[s.buffer].dtype), "size": size(self.types[s.buffer].count)}
                for s, i in self.past.items()
            ],
            "strips": plain,
            "turned": self.turned,
            "visit_all": not only,
            **self.chunk(product(s for _, s in kept), product(s for _, s in rest)),
        }
        if self.order == "segmented":
            part = self.parts[k.order]
            shape = self.types[k.order].shape[: part.leading]
            out["key_count"] = size(product(shape))
            out["key_lines"] = [
                self.scribe.value(s)
                for s in self.slice_of(
                    [v for i in part.stmt.index[: part.leading] for v, _ in i.terms if v.startswith("%")]
                    + [part.stmt.where]
                )
            ]
            at = index(flatten(part.stmt.index[: part.leading], shape))
            out["key"] = f"{variable(part.stmt.where)} ? {at} : {size(product(shape))}" if part.stmt.where else at
        return out

    @property
    def innermost(self) -> str:
        return self.k.cols[-1][0] if self.k.cols else "one"

    @property
    def kept(self) -> list[Axis]:
        """The rows' axes that keep a place of a regular accum."""
        return [a for a in self.k.rows if self.order == "regular" and a[0] in self.parts[self.k.order].kept]

    @property
    def turned(self) -> bool:
        """Whether all rows that keep a place go through one value of the others before the next: those gather from a
        part of memory of its own.
        """
        if self.order != "regular" or any(self.strategy_of[s.buffer] != "regular" for s in self.k.accums):
            return False
        axes = {a for a, _ in self.k.rows} - {a for a, _ in self.kept}
        gathered = [{v for i in s.index for v, _ in i.terms} for s in self.k.body if s.op == "load"]
        return any(
            axes & places and any(v.startswith("%") and self.column_value(v) for v in places) for places in gathered
        )

    def chunk(self, kept: Size, rest: Size) -> dict[str, Any]:
        """Rows per task, of those that keep a place where a result is regular: an expression of a few sizes, which get
        names, so that it is as short for sizes that are long themselves.
        """
        named: dict[str, str] = {}

        def short(name: str, value: Size) -> Size:
            if isinstance(value, int):
                return value
            named[name] = size(value)
            return symbol(name)

        if self.turned:
            rows = interchanged_chunk_rows(short("rows", kept), short("cols", self.k.col_count))
        elif self.order == "regular":
            rows = chunk_rows(short("rows", kept), short("cols", rest * self.k.col_count))
        else:
            private = [product(self.types[b].shape) for b, how in self.strategy_of.items() if how == "privatized"]
            private = [short(f"size{i}", n) for i, n in enumerate(private)]
            rows = task_rows(short("rows", self.k.row_count), short("cols", self.k.col_count), private)
        used = symbols(rows)
        return {"chunk": size(rows), "chunk_sizes": [(name, text) for name, text in named.items() if name in used]}

    def accum(self, s: Stmt) -> dict[str, Any]:
        part, type_ = self.parts[s.buffer], self.types[s.buffer]
        how = self.strategy_of[s.buffer]
        ctype, few = stored(type_.dtype), isinstance(self.k.row_count, int) and self.k.row_count < MANY
        if type_.dtype.is_float and type_.dtype not in (F32, F64):
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        out: dict[str, Any] = {
            "number": self.number[s.buffer],
            "buffer": s.buffer,
            "ctype": ctype,
            "strategy": how,
            "wide": "f64" if type_.dtype.is_float else ctype,
            "size": size(type_.count),
            "inner": size(product(type_.shape[part.leading :])),
        }
        start = neutral(s.combine, type_.dtype)
        out["start"], out["wide_start"] = (
            literal(start, type_.dtype),
            literal(start, F64 if type_.dtype.is_float else type_.dtype),
        )
        # partial sums of many rows are kept wide: a chunk of f32 additions would lose bits that the total keeps
        out["partial"] = (
            out["wide"] if self.wide_accumulator(s) or (how == "privatized" and s.combine == "sum") else ctype
        )
        out["combine"] = functools.partial(self.combined, s.combine, out["wide"])
        out["pending"] = (
            out["partial"] == "f64" and ctype == "f32" and how == "privatized" and self.side_by_side(s) and not few
        )
        out["past"] = how == "segmented" and self.large(s.buffer)
        out["partials"] = f"2 * chunks * ({out['inner']})" if how == "segmented" else f"chunks * ({out['size']})"
        if how == "regular":
            free = self.free(s)
            extents = [type_.shape[axis] for axis in free]
            out["owned"], out["owned_size"] = [size(n) for n in extents], size(product(extents))
            entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
            out["owned_at"] = index(flatten(entries, type_.shape))
            out["wide_accumulator"], out["partials"] = self.wide_accumulator(s), f"chunks * ({out['owned_size']})"
            out["partial_at"] = index(flatten([entries[axis] for axis in free], extents))
        return out

    @staticmethod
    def combined(combine: str, ctype: str, target: str, value: str) -> str:
        """``target`` combined with a value, as a statement."""
        if combine in ("sum", "prod"):
            return f"{target} {'+' if combine == 'sum' else '*'}= {value};"
        return f"{target} = {combine}imum_{ctype}({target}, {value});"

    def side_by_side(self, s: Stmt) -> bool:
        """Whether the innermost columns add to neighbouring elements, the same in every row."""
        places = [v for i in s.index for v, _ in i.terms]
        return bool(self.k.cols) and self.k.cols[-1][0] in places and set(places) <= {a for a, _ in self.k.cols}

    # -- passes --------------------------------------------------------------------------------------------------------

    def one_pass(self, p: Phase, number: int) -> dict[str, Any]:
        columns = bool(p.roots)
        body, reductions, simd = [line for s in self.reloaded(p, number) for line in self.line(s, number)], [], True
        past: list[dict[str, Any]] = []
        scatters: list[dict[str, Any]] = []
        clauses: dict[str, list[str]] = {}
        innermost = self.innermost
        for s in p.roots:
            if s.op in REDUCTIONS:
                entry = self.reduction(s, clauses, wide=not self.k.rows or self.mixed(p))
                simd &= entry.pop("simd")
                body += entry.pop("lines")
                reductions.append(entry)
            elif self.by_block(s, innermost):
                entry = self.block_sum(s, clauses)
                body += entry.pop("lines")
                reductions.append(entry)
            elif self.decided_by_column(s):
                scatters.append(self.scatter(s))
                body += scatters[-1]["lines"]
            elif s in self.past:
                place = flatten([i.renamed({innermost: "c0"}) for i in s.index], self.types[s.buffer].shape)
                past.append(
                    {
                        "name": f"{self.past[s]}",
                        "ctype": stored(self.types[s.buffer].dtype),
                        "at": f"{s.buffer} + {index(place)}",
                    }
                )
                assert s.dtype is not None
                body.append(f"w{self.past[s]}[{innermost} - c0] = {to_memory(s.dtype, variable(s.args[0]))};")
            else:
                body += self.effect(s)
                simd &= (
                    s.op != "check"
                    and innermost in {v for i in s.index for v, _ in i.terms}
                    and not self.places_by_column(s)
                )
        clause = "".join(f" reduction({op}:{','.join(names)})" for op, names in clauses.items())
        row = [line for s in p.row for line in ([self.scribe.value(s)] if s.name else self.effect(s))]
        return {
            "row": row,
            "body": body,
            "columns": columns,
            "reductions": reductions,
            "simd": simd and columns,
            "simd_clause": clause,
            "block": (
                "GRADC_FINE_BLOCK"
                if any(r.get("fine") for r in reductions)
                else "GRADC_BLOCK"
                if reductions
                else "GRADC_BURST"
                if past or scatters
                else ""
            ),
            "past": past,
            "scatters": scatters,
            "ahead": self.ahead(number),
        }

    def by_block(self, s: Stmt, innermost: str) -> bool:
        """Whether an accum adds a whole run of the innermost columns to one element."""
        places = [v for i in s.index for v, _ in i.terms]
        if s.op != "accum" or s.combine != "sum" or self.strategy_of[s.buffer] == "segmented" or innermost in places:
            return False
        return not any(
            v.startswith("%") and self.column_value(v) for v in places
        )  # one that a column decides is known inside the run alone

    def places_by_column(self, s: Stmt) -> bool:
        """Whether a value that depends on the column says where an effect goes."""
        return any(v.startswith("%") and self.column_value(v) for i in s.index for v, _ in i.terms)

    def decided_by_column(self, s: Stmt) -> bool:
        """Whether an accum goes where each column says: values and places are computed side by side, then added one
        after another.
        """
        return (
            s.op == "accum"
            and self.strategy_of[s.buffer] != "segmented"
            and bool(self.k.cols)
            and self.places_by_column(s)
        )

    def scatter(self, s: Stmt) -> dict[str, Any]:
        """Such an accum: arrays of places and values, and how one is added.

        A sum of one's own takes 0 at place 0 where a mask is off (no sum that began with 0 is changed by it): a branch
        would be guessed wrong too often.
        """
        count, n = self.types[s.buffer].count, self.number[s.buffer]
        place = "i32" if isinstance(count, int) and count < 2**31 else "i64"
        base, at = self.target_of(s, place)
        value, at = variable(s.args[0]), f"({place}){at}"
        own = s.combine == "sum" and base != s.buffer
        if s.where:
            at = f"{variable(s.where)} ? {at} : {0 if own else -1}"
            value = f"{variable(s.where)} ? {value} : 0" if own else value
        ctype = stored(self.types[s.buffer].dtype)
        add = self.combined(
            s.combine, ctype, self.scribe.guard(base, f"at{n}[i]", self.own_count(s), self.held_as(s)), f"of{n}[i]"
        )
        lines = [f"at{n}[{self.innermost} - c0] = {at};", f"of{n}[{self.innermost} - c0] = {value};"]
        return {
            "number": n,
            "value": carrier(self.scribe.values[s.args[0]]),
            "place": place,
            "masked": bool(s.where) and not own,
            "add": add,
            "lines": lines,
        }

    def block_sum(self, s: Stmt, clauses: dict[str, list[str]]) -> dict[str, Any]:
        """Such an accum: the run is added up first."""
        number, value = self.number[s.buffer], variable(s.args[0])
        partial = self.accum(s)["partial"]
        clauses.setdefault("+", []).append(f"b_a{number}")
        line = f"b_a{number} += {f'{variable(s.where)} ? {value} : 0' if s.where else value};"
        (merge,) = self.effect(replace(s, where=""), f"b_a{number}")
        return {"total": "", "block": f"{partial} b_a{number} = 0;", "lines": [line], "merge": merge}

    def column_value(self, value: str) -> bool:
        return bool(self.k.levels[value] & {a for a, _ in self.k.cols})

    def mixed(self, p: Phase) -> bool:
        """Whether a pass gathers or computes on wider values than f32: a compiler then adds the lanes, or the elements,
        one after another.
        """
        return any(v.startswith("%") for s in p.body for i in s.index for v, _ in i.terms) or any(
            s.dtype is not None and s.dtype.bits > 32 for s in p.body
        )

    def reduction(self, s: Stmt, clauses: dict[str, list[str]], wide: bool) -> dict[str, Any]:
        """Block accumulators merged into totals: sums of f32 blocks add up in f64.

        :param wide: the blocks are f64 too, which costs nothing where memory or a gather bounds the pass.
        """
        assert s.dtype is not None
        kind, value, name = REDUCTIONS[s.op], variable(s.args[0]), variable(s.name)
        own = self.scribe.values[s.args[0]]
        ctype = carrier(s.dtype)
        if kind in ("sum", "prod"):
            sign = "+" if kind == "sum" else "*"
            clauses.setdefault(sign, []).append(f"b_{name}")
            total = "f64" if s.dtype.is_float and kind == "sum" else ctype
            start = "0" if kind == "sum" else "1"
            if kind == "sum" and s.dtype is F64:  # no wider total: what its additions lose is kept beside it
                return {
                    "total_type": total,
                    "total": f"t_{name}",
                    "total_init": f"0, e_{name} = 0",
                    "block": f"f64 b_{name} = 0;",
                    "simd": True,
                    "fine": True,
                    "lines": [f"b_{name} += {value};"],
                    "merge": f"gradc_add(&t_{name}, &e_{name}, b_{name});",
                    "result": f"const f64 {name} = gradc_total(t_{name}, e_{name});",
                }
            return {
                "total_type": total,
                "total": f"t_{name}",
                "total_init": start,
                "block": f"{total if wide else ctype} b_{name} = {start};",
                "simd": True,
                "lines": [f"b_{name} {sign}= {value};"],
                "merge": f"t_{name} {sign}= b_{name};",
                "result": f"const {ctype} {name} = ({ctype})t_{name};",
            }
        if kind in ("max", "min"):
            better = ">" if kind == "max" else "<"
            worst = self.extreme(own, kind == "max")
            clauses.setdefault(kind, []).append(f"b_{name}")
            lines = [f"b_{name} = {value} {better} b_{name} ? {value} : b_{name};"]
            block, merge = (
                f"{ctype} b_{name} = {worst};",
                f"t_{name} = b_{name} {better} t_{name} ? b_{name} : t_{name};",
            )
            result = f"const {ctype} {name} = t_{name};"
            if own.is_float:  # NaN wins: counted beside the comparison that loses it
                clauses.setdefault("|", []).append(f"u_{name}")
                lines.append(f"u_{name} |= {value} != {value};")
                block += f" i32 u_{name} = 0;"
                nan = "f64_of_bits(0x7ff8000000000000ull)" if own is F64 else "f32_of_bits(0x7fc00000u)"
                merge += f" if (u_{name}) t_{name} = {nan};"
                merge = f"if (t_{name} == t_{name}) {{ {merge} }}"
            return {
                "total_type": ctype,
                "total": f"t_{name}",
                "total_init": worst,
                "block": block,
                "lines": lines,
                "merge": merge,
                "result": result,
                "simd": True,
            }
        better = ">" if kind == "argmax" else "<"
        own_c = carrier(own)
        place = (
            index(flatten([Index.of(a) for a, _ in self.k.cols], [n for _, n in self.k.cols])) if self.k.cols else "0"
        )
        lines = [
            f"if (t_{name} < 0 || {value} {better} m_{name} || ({value} != {value} && m_{name} == m_{name})) m_{name} ="
            f" {value}, t_{name} = {place};"
        ]
        return {
            "total_type": "i64",
            "total": f"t_{name}",
            "total_init": f"-1; {own_c} m_{name} = 0",
            "block": "",
            "lines": lines,
            "merge": "",
            "simd": False,
            "result": f"const i64 {name} = gradc_max(t_{name}, 0);",
        }

    @staticmethod
    def extreme(dtype: DType, lowest: bool) -> str:
        if dtype.is_float:
            wide = dtype is F64
            bits = {
                (True, True): "0xfff0000000000000ull",
                (True, False): "0x7ff0000000000000ull",
                (False, True): "0xff800000u",
                (False, False): "0x7f800000u",
            }[wide, lowest]
            return f"{'f64' if wide else 'f32'}_of_bits({bits})"
        low, high = dtype.range if dtype.is_integer else (0, 1)
        return literal(low if lowest else high, dtype)

    def effect(self, s: Stmt, value: str = "") -> list[str]:
        value = value or variable(s.args[0])
        if s.op == "check":
            axes, level = (
                (*self.k.rows, *self.k.cols),
                self.k.stmt_level(s),
            )  # along the others the value repeats: the first is meant
            at = (
                index(flatten([Index.of(a) if a in level else Index() for a, _ in axes], [n for _, n in axes]))
                if axes
                else "0"
            )
            bound = size(s.attr("bound"))
            low = [variable(v) for v in s.args[1:]]
            below = [
                f"if ({value} < {v}) gradc_report(A->ctx, GRADC_DECREASES, A->site, {at}, {value}, {v});" for v in low
            ]
            return [
                *below,
                (
                    f"if ((u64){value} >= (u64){bound}) gradc_report(A->ctx, GRADC_INDEX_OUT_OF_RANGE, A->site, {at},"
                    f" {value}, {bound});"
                ),
            ]
        if s.op == "store":
            assert s.dtype is not None
            return [f"{self.scribe.element(s.buffer, s.index)} = {to_memory(s.dtype, value)};"]
        how, number, part = self.strategy_of[s.buffer], self.number[s.buffer], self.parts[s.buffer]
        ctype = stored(self.types[s.buffer].dtype)
        if how != "segmented":
            base, place = self.target_of(s)
            target = self.scribe.guard(base, place, self.own_count(s), self.held_as(s))
            return [(f"if ({variable(s.where)}) " if s.where else "") + self.combined(s.combine, ctype, target, value)]
        row = self.types[s.buffer].shape[part.leading :]
        place = index(flatten(s.index[part.leading :], row))
        target = f"a{number}[{place}]"
        if self.scribe.guarded:  # of a row that goes somewhere
            target = self.scribe.guard(f"a{number}", place, product(row), ctype)
        if s.combine == "sum":
            return [f"if (goes) {target} = ({ctype})((first ? 0 : {target}) + {value});"]
        return [
            f"if (goes && first) {target} = {value};",
            f"else if (goes) {self.combined(s.combine, ctype, target, value)}",
        ]

    def own_count(self, s: Stmt) -> Size:
        """Elements of the array that an accum that is not segmented adds into."""
        shape = self.types[s.buffer].shape
        return product(shape[axis] for axis in self.free(s)) if self.wide_accumulator(s) else product(shape)

    def held_as(self, s: Stmt) -> str:
        """The C type of that array's elements."""
        accum = self.accum(s)
        base = self.target_of(s)[0]
        return str(accum["ctype"] if base == s.buffer or base.startswith("q") else accum["partial"])

    def target_of(self, s: Stmt, ctype: str = "i64") -> tuple[str, str]:
        """Where an accum that is not segmented adds: an array, and the place in it, of values that are ``ctype``."""
        how, number, shape, apart = (
            self.strategy_of[s.buffer],
            self.number[s.buffer],
            self.types[s.buffer].shape,
            self.wide_accumulator(s),
        )
        own = self.free(s) if apart else list(range(len(shape)))
        pending = how == "privatized" and self.accum(s)["pending"]
        base = f"q{number}" if pending else f"p{number}" if apart or how == "privatized" else s.buffer
        return base, index(flatten([s.index[axis] for axis in own], [shape[axis] for axis in own]), ctype)
