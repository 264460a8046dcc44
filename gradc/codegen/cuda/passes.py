"""A kernel's phases as statements of a GPU's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir.kernel import Kernel, Phase
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt, neutral
from ...ir.types import F32, DType, Type
from ..declarations import used
from ..exponentials import is_exp_below_one, narrow_exponentials
from ..expr import ROUNDED, carrier, loaded, to_memory, unrounded, variable
from ..index import flatten, index, literal
from ..phases import phase_comment
from ..text import CODES
from .accums import AccumWriter
from .columns import OFFSETS, Access, access, linear
from .exp_sums import ExpSum
from .fixed_sums import place_of_sum
from .views import PassView, Reduction, VectorAccess
from .workspace import axis_declarations, declared


@dataclass
class _Walk:
    """What a walk over the columns is made of while its statements are written.

    :ivar body: statements of a column.
    :ivar scans: declarations of what its scans carry from strip to strip.
    :ivar reductions: what it reduces.
    :ivar gets: loads before them.
    :ivar puts: stores behind them.
    """

    body: list[str] = field(default_factory=list)
    scans: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    gets: dict[str, VectorAccess] = field(default_factory=dict)
    puts: dict[str, VectorAccess] = field(default_factory=dict)


def stored_casts(kernel: Kernel) -> dict[str, Stmt]:
    """Casts of columns to storage floats that nothing but stores of this dtype uses, by name."""
    users: dict[str, list[Stmt]] = {}
    for s in kernel.body:
        for name in s.uses:
            users.setdefault(name, []).append(s)
    return {
        s.name: s
        for s in kernel.body
        if s.op == "cast" and s.dtype is not None and s.dtype.name in ROUNDED and kernel.is_column(s)
        if all(u.op == "store" and u.dtype is s.dtype and u.where != s.name for u in users.get(s.name, []))
    }


class PassWriter(AccumWriter):
    """A kernel's phases.

    :ivar scanning: whether nothing is written, and only the largest |value| of what will be added is looked for.
    :ivar moved: what moves through arrays of a thread's columns, by the array's name.
    :ivar phases: the kernel's, or those where sums of exponentials stand beside their maximum: ``exp_sums``.
    :ivar loaded_first: the arrays whose loads begin before a row's first phase.
    :ivar views: what templates are given of each accum, by its buffer.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        super().__init__(kernel, types)
        self.scanning = False
        self.accesses: dict[tuple[str, Index, str], str] = {}
        self.moved: dict[str, Access] = {}
        self.loaded_first: set[str] = set()
        self.phases, self.exp_sums = self.mapping.phases(kernel)
        self.views = {s.buffer: self.accum(s) for s in kernel.accums}
        self.stored_casts = stored_casts(kernel)
        self.narrow_exponentials = narrow_exponentials(kernel.body)

    # -- a phase -------------------------------------------------------------------------------------------------------

    def one_pass(self, p: Phase, number: int, scan: bool = False) -> PassView:
        """:param scan: nothing is written; only the largest of what will be added is found."""
        self.scanning = scan
        if number == 0:
            self.loaded_first.clear()
        walk = _Walk()
        for s in self.reloaded(p, 0 if scan else number):
            if s.name in self.stored_casts:
                continue
            walk.body += [self.scanned(s, walk, number)] if s.op == "scan" else self.kept(s, walk, number)
        for s in p.roots:
            self.root(s, walk)
        values = [self.scribe.value(s) for s in p.row if s.name]
        effects = [line for s in p.row if not s.name for line in self.effect(s, once=True)]
        row = [line for s in p.row for line in ([self.scribe.value(s)] if s.name else self.effect(s, once=True))]
        return PassView(
            comment=phase_comment(self.k, p, number),
            row=tuple(row),
            values=tuple(values),
            effects=tuple(effects),
            body=tuple(self.column(walk.body)),
            columns=bool(p.roots),
            scans=tuple(walk.scans),
            reductions=tuple(self.in_pairs(walk.reductions)),
            gets=tuple(walk.gets.values()),
            puts=tuple(walk.puts.values()),
        )

    def column(self, body: Sequence[str]) -> list[str]:
        """The statements of a column behind its number and its axes."""
        if self.k.scans:
            column = declared(f"const ix c = {'end_col - 1 - col' if self.k.descending else 'col'};")
            return [*used([column, *axis_declarations(self.k.cols, "c")], "\n".join(body)), *body]
        guard = [] if self.even_cols else ["if (c >= end_col) continue;"]
        number = declared("const ix c = col + j * col_step;")
        lines = used([number, *axis_declarations(self.k.cols, "c")], "\n".join([*guard, *body]))
        first = lines[:1] if lines[:1] == [number.line] else []
        return [*first, *guard, *lines[len(first) :], *body]

    def root(self, s: Stmt, walk: _Walk) -> None:
        """What a walk over the columns is for: a reduction or an effect."""
        together = {} if self.scanning else self.exp_sums
        if any(s is e.stmt for e in together.values()):
            return
        if s.name in together:
            reduction = self.with_exp_sum(s, together[s.name])
        elif s.op in REDUCTIONS:
            reduction = self.reduction(REDUCTIONS[s.op], s.args[0], variable(s.name), s.dtype)
        elif s.op == "accum" and not self.in_columns(s) and self.width > 1 and not self.warp_scan:
            reduction = self.added_up(s)
        else:
            self.column_effect(s, walk)
            return
        walk.body += self.of_columns(reduction.lines)
        walk.reductions.append(reduction)

    def column_effect(self, s: Stmt, walk: _Walk) -> None:
        """A store, accum or check of each column, or of a thread's columns at once."""
        if not self.scanning and (target := self.vector_add(s)) is not None:
            name = f"z{self.number[s.buffer]}"
            self.moved[name] = target
            guard = f"if ({variable(s.where)}) " if s.where else ""
            walk.puts[name] = VectorAccess(name, target.ctype, target.at, guard, "gradc_atomic_add_row")
            walk.body.append(f"{name}[j] = {variable(s.args[0])};")
        elif not self.scanning and s.dtype is not None and (moved := self.vector(s)) is not None:
            name, row = moved
            if s.dtype.name == "bf16" and (cast := self.stored_casts.get(s.args[0])) is not None:
                value = unrounded(variable(cast.args[0]), self.scribe.values[cast.args[0]])
                walk.puts[name] = VectorAccess(name, "f32", row.at, function="gradc_put_bf16")
                walk.body.append(f"{name}[j] = {value};")
                return
            walk.puts[name] = VectorAccess(name, row.ctype, row.at, function="gradc_put")
            walk.body.append(f"{name}[j] = {self.in_memory(s)};")
        else:
            walk.body += self.of_columns(self.effect(s))

    def of_columns(self, lines: Iterable[str]) -> list[str]:
        """Statements that a thread behind the last column must leave out."""
        return [f"if (live) {line}" if self.k.scans else line for line in lines]

    # -- scans ---------------------------------------------------------------------------------------------------------

    def scanned(self, s: Stmt, walk: _Walk, number: int) -> str:
        """The line of a scan's value; what the strips before have combined is carried in a variable of its own."""
        assert s.dtype is not None
        value, own = variable(s.args[-1]), carrier(self.scribe.values[s.args[-1]])
        carry = f"carry{number * len(self.k.scans) + self.k.scans.index(s)}"
        shared = "shared" if self.width > 32 else "0"
        if s.combine in ("argmax", "argmin"):
            ctype, join = f"gradc_arg_extremum<{own}>", f"gradc_last_{s.combine.removeprefix('arg')}<{own}>"
            start, item, member = "{0, -1}", f"{ctype}{{{value}, {self.place(self.k.cols)}}}", ".index"
        elif s.combine == "affine":
            ctype, join = f"gradc_affine<{own}>", f"gradc_composed<{own}>"
            start, item, member = "{1, 0}", f"{ctype}{{{variable(s.args[0])}, {value}}}", ".term"
        elif s.combine == "logsumexp":
            ctype, join = f"gradc_log_total<{own}>", f"gradc_log_sum<{own}>"
            least = literal(-float("inf"), s.dtype)
            start, item, member = f"{{{least}, 0}}", f"{ctype}{{{value}, 1}}", ""
        elif s.combine == "sum" and own == "f32":
            ctype, join, start, item, member = "sum_f32", "gradc_sum<sum_f32>", "{0, 0}", f"sum_f32{{{value}, 0}}", ""
        else:
            join = {"sum": "sum", "prod": "prod", "max": "maximum", "min": "minimum"}[s.combine]
            ctype, join = carrier(s.dtype), f"gradc_{join}<{carrier(s.dtype)}>"
            start = literal(neutral(s.combine, s.dtype), s.dtype)
            item, member = f"({ctype}){value}", ""
        walk.scans.append(f"{ctype} {carry} = {start};")
        result = f"gradc_scan<{join}, WIDTH>({item}, {carry}, {shared}){member}"
        if not member and ctype != carrier(s.dtype):
            result = f"gradc_value({result})"
        return f"const {carrier(s.dtype)} {variable(s.name)} = {result};"

    # -- a thread's columns at once ------------------------------------------------------------------------------------

    def vector(self, s: Stmt) -> tuple[str, Access] | None:
        """The array that a linear access moves a thread's columns through, if they move together."""
        if self.vec == 1 and self.prefetch == 1 and (self.unroll < 2 or s.op != "load"):
            return None
        row = access(self.k, self.types, s, masked=not self.tiled)
        if row is None or not row.fits(self.vec):
            return None
        key = (row.buffer, row.base, s.op + s.where)
        name = self.accesses.setdefault(key, f"{'loaded' if s.op == 'load' else 'stored'}{len(self.accesses)}")
        self.moved[name] = row
        return name, row

    def vector_add(self, s: Stmt) -> Access | None:
        """The row of f32 that an atomic accum adds a thread's neighbouring columns to: with words of 16 bytes where the
        hardware has them.
        """
        if (
            s.op != "accum"
            or self.strategy_of[s.buffer].atomics != "values"
            or s.combine != "sum"
            or self.sums(s) is not F32
            or self.vec % 4
            or not self.in_columns(s)
        ):
            return None
        base = linear(self.k, self.types, s)
        if base is None or (s.where and self.k.levels[s.where] & {a for a, _ in self.k.cols}):
            return None
        row = Access(self.sum_array(s), "f32", 4, base)
        return row if row.fits(self.vec) else None

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

    @property
    def prefetched(self) -> bool:
        """Whether loads of several rows are under way."""
        return self.tiled and not self.scanning

    def loads_first(self, s: Stmt, row: Access) -> bool:
        """Whether a load is one of the row's, and its place known before the first phase."""
        places, rows = [v for v, _ in row.base.terms], {a for a, _ in self.k.rows}
        known = not s.where and not any(v.startswith("%") for v in places)
        return self.row_task is not None and self.row_task.loads_first and known and bool(rows & set(places))

    # -- values that stay in registers ---------------------------------------------------------------------------------

    def cached(self, s: Stmt, number: int) -> Stmt | None:
        if self.row_task is None or self.scanning or self.row_task.kept.get(s.name, number) >= number:
            return None
        return replace(s, op="cached", args=(), where="", attrs=())

    def kept(self, s: Stmt, walk: _Walk, number: int) -> list[str]:
        """A value's line; behind it what keeps it for later phases."""
        assert s.dtype is not None
        if s.op == "cached":
            return [f"const {carrier(s.dtype)} {variable(s.name)} = kept_{variable(s.name)}[t][j];"]
        first = {} if self.row_task is None or self.scanning else self.row_task.kept
        store = [f"kept_{variable(s.name)}[t][j] = {variable(s.name)};"] if first.get(s.name) == number else []
        return [self.taken(s, walk), *store]

    def taken(self, s: Stmt, walk: _Walk) -> str:
        """A value's line; a linear load reads what has been fetched.

        Where columns are scanned, threads behind the last one go along, and read nothing; those behind the last of rows
        side by side read that row, if nothing is written there.
        """
        if (self.k.scans or (self.across and not self.alone(s.buffer))) and s.op in ("load", "search"):
            assert s.dtype is not None
            value = self.scribe.expression(s)
            return f"const {carrier(s.dtype)} {variable(s.name)} = live ? {f'({value})' if s.where else value} : 0;"
        moved = self.vector(s) if s.op == "load" else None
        if s.name in self.narrow_exponentials:
            return f"const f32 {variable(s.name)} = gradc_exp_narrow({variable(s.args[0])});"
        if is_exp_below_one(self.k.stmts, s):
            return f"const f32 {variable(s.name)} = gradc_exp_f32({variable(s.args[0])});"
        if moved is None or s.dtype is None:
            return self.scribe.value(s)
        name, row = moved
        if name not in self.loaded_first:
            guard, first = f"if ({variable(s.where)}) " if s.where else "", self.loads_first(s, row)
            walk.gets[name] = VectorAccess(name, row.ctype, row.at, guard, first=first)
            self.loaded_first |= {name} if first else set()
        together = name in self.loaded_first or (self.unroll and (self.row_task is None or self.row_task.together))
        array = f"{name}[{'t' if together else 'u' if self.prefetched else 0}]"
        read = f"gradc_bf16_at({array}, j)" if s.dtype.name == "bf16" else loaded(s.dtype, f"{array}.items[j]")
        read = f"{variable(s.where)} ? {read} : {literal(dict(s.attrs).get('other', 0), s.dtype)}" if s.where else read
        return f"const {carrier(s.dtype)} {variable(s.name)} = {read};"

    # -- reductions ----------------------------------------------------------------------------------------------------

    def added_up(self, s: Stmt) -> Reduction:
        """An accum of all columns to one element: they are added up first."""
        number = self.number[s.buffer]
        name = f"b_a{number}"
        reduction = self.reduction(s.combine, s.args[0], name, self.types[s.buffer].dtype, s.where, f"t_a{number}")
        effect = self.effect(replace(s, where=""), name, once=True)
        return replace(reduction, result="\n".join([reduction.result, *effect]))

    def with_exp_sum(self, s: Stmt, e: ExpSum) -> Reduction:
        """A maximum with the sum of exponentials beside it."""
        top, part, total = variable(s.name), f"total_{variable(s.name)}", variable(e.stmt.name)
        partial, values, count = f"partial_{top}", f"values_{top}", f"{self.unroll} * VEC"
        shared = "shared" if self.width > 32 else "0"
        found = f"gradc_exp_sum({part}, {str(e.finite_shift).lower()})"
        return Reduction(
            start=f"gradc_exp_total {part} = gradc_exp_nothing();",
            lines=(f"{values}[t * VEC + j] = {variable(s.args[0])};",),
            result=f"{part} = gradc_exp_reduce<WIDTH>({part}, {shared});\n"
            f"const f32 {top} = gradc_exp_top({part});\n"
            f"const f32 {total} = cols > 0 ? {found} : 0.0f;",
            part=part,
            ctype="gradc_exp_total",
            join="gradc_exp_join",
            strips=f"strip_{top}",
            shared=shared,
            around=(
                f"gradc_exp_partial {partial} = gradc_exp_first();\nfor (int far = 0;; far = 1) {{",
                f"if (!gradc_exp_again({partial}, far)) break;\n}}\n{part} = gradc_exp_settled({partial});",
            ),
            before=f"f32 {values}[{count}];",
            absent=("#pragma unroll", f"for (int i = 0; i < {count}; i++) {values}[i] = -GRADC_INFINITY_F32;"),
            after=f"gradc_exp_add({partial}, {values}, far);",
        )

    def reduction(
        self, kind: str, value: str, name: str, dtype: DType | None, where: str = "", part: str = ""
    ) -> Reduction:
        """Each thread's part, then all of a task's, as ``name``."""
        assert dtype is not None
        own, v, part, terms = self.scribe.values[value], variable(value), part or f"total_{name}", ""
        guard, shared = f"if ({variable(where)}) " if where else "", "shared" if self.width > 32 or self.across else "0"
        reduce = "gradc_reduce_across" if self.across else "gradc_reduce"
        if kind in ("argmax", "argmin"):
            ctype, join = f"gradc_arg_extremum<{carrier(own)}>", f"gradc_{kind.replace('arg', 'arg_')}<{carrier(own)}>"
            start = f"{ctype} {part} = {{0, -1}};"
            line = f"{join}::join({part}, {ctype}{{{v}, {self.place(self.k.cols)}}});"
            result = f"const i64 {name} = gradc_max({reduce}<{join}, WIDTH>({part}, {shared}).index, 0);"
        elif kind == "sum":
            ctype = "sum_f32" if dtype.is_float and carrier(dtype) == "f32" else carrier(dtype)
            join, final = f"gradc_sum<{ctype}>", carrier(dtype)
            start = f"{ctype} {part}; gradc_clear({part});"
            terms = f"terms_{name}" if ctype == "sum_f32" and self.vec > 1 else ""
            line = f"{guard}{terms}[j] = {v};" if terms else f"{guard}gradc_add({part}, {v});"
            result = f"const {final} {name} = ({final})gradc_value({reduce}<{join}, WIDTH>({part}, {shared}));"
        else:
            ctype = carrier(dtype)
            join = f"gradc_{ {'prod': 'prod', 'max': 'maximum', 'min': 'minimum'}[kind] }<{ctype}>"
            numeric = own if own.is_float or own.is_integer else dtype
            nothing = neutral(kind, numeric) if own.kind != "b" else int(kind == "min")
            start = f"{ctype} {part} = {literal(nothing, own)};"
            line = f"{guard}{join}::join({part}, {v});"
            result = f"const {ctype} {name} = {reduce}<{join}, WIDTH>({part}, {shared});"
        return Reduction(start, (line,), result, part, ctype, join, f"strip_{name}", shared, terms=terms)

    def in_pairs(self, reductions: Sequence[Reduction]) -> list[Reduction]:
        """Sums of f32 of one walk are combined by the threads two at a time."""
        sums = [r for r in reductions if r.ctype == "sum_f32"]
        if self.across or not 1 < self.width <= 512 or self.can_split_rows():
            return [*reductions]
        paired: dict[Reduction, Reduction] = {}
        for a, b in zip(sums[::2], sums[1::2], strict=False):
            call = f"gradc_reduce<gradc_sum<sum_f32>, WIDTH>({{}}, {a.shared})"
            both = f"gradc_reduce_both<WIDTH>({a.part}, {b.part}, {a.shared});\n"
            paired[a] = replace(a, result=both + a.result.replace(call.format(a.part), a.part))
            paired[b] = replace(b, result=b.result.replace(call.format(b.part), b.part))
        return [paired.get(r, r) for r in reductions]

    @staticmethod
    def place(axes: Iterable[Axis], level: frozenset[str] | None = None) -> str:
        """The number of a place among all of the axes', where those that are not in ``level`` are at their first."""
        axes = [*axes]
        entries = [Index.of(a) if level is None or a in level else Index() for a, _ in axes]
        return index(flatten(entries, [n for _, n in axes]), OFFSETS) if axes else "0"

    # -- effects -------------------------------------------------------------------------------------------------------

    def effect(self, s: Stmt, value: str = "", once: bool = False) -> list[str]:
        """A store, accum or check; once: by one thread of the task."""
        value = value or variable(s.args[0])
        if self.scanning and not (s.op == "accum" and self.strategy_of[s.buffer].atomics == "fixed point"):
            return []
        alone = "if (lane == 0) " if once and self.width > 1 and not self.warp_scan else ""
        if self.across and not self.scanning:  # a scan goes on to rows that there are
            alone = f"if (live{' && lane == 0' if once and self.width > 1 else ''}) "
        group = next((g for g in self.together if any(a is s for a in g)), None)
        if group is not None and not self.scanning:
            return self.added_together(group) if s is group[-1] else []
        if s.op == "check":
            return self.check(s, value, alone)
        if s.op == "store":
            assert s.dtype is not None
            return [f"{alone}{self.scribe.element(s.buffer, s.index)} = {self.in_memory(s)};"]
        return [self.accumulate(s, value, alone)]

    def in_memory(self, s: Stmt) -> str:
        """A stored value as it lies in memory; one that is rounded for this alone is converted once."""
        assert s.dtype is not None
        if (cast := self.stored_casts.get(s.args[0])) is None:
            return to_memory(s.dtype, variable(s.args[0]))
        source = self.scribe.values[cast.args[0]]
        return to_memory(s.dtype, unrounded(variable(cast.args[0]), source))

    def check(self, s: Stmt, value: str, alone: str) -> list[str]:
        """Reports an index that is out of range, or below the one before it."""
        # along the axes that it does not depend on the value repeats: the first is meant
        at = self.place((*self.k.rows, *self.k.cols), self.k.stmt_level(s))
        bound = self.scribe.size(s.attr("bound"))
        low = [variable(v) for v in s.args[1:]]
        report = f"{alone}if ({{0}}) gradc_report(flag, site, aux, {{1}}, {at}, {value}, {{2}});"
        below = [report.format(f"{value} < {v}", CODES["GRADC_DECREASES"], v) for v in low]
        above = report.format(f"(u64){value} >= (u64){bound}", CODES["GRADC_INDEX_OUT_OF_RANGE"], bound)
        return [*below, above]

    def accumulate(self, s: Stmt, value: str, alone: str) -> str:
        """An accum of one value, where its sum is on its way."""
        strategy, number = self.strategy_of[s.buffer], self.number[s.buffer]
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        if self.register_accumulators and s in self.ordered:
            guard = "if (valid) " if self.in_segments(s) else guard
            target = f"a{number}[t][j]"
            if self.views[s.buffer].register == "sum_f32":
                add = f"{guard}gradc_add_next({target}, {value});"
                if not (shared := self.views[s.buffer].shared_sums):
                    return add
                plain = f"{guard}plain{number}[t][j] += {value};"
                all_shared = shared == self.iterations * self.vec
                return plain if all_shared else f"if (t * VEC + j < {shared}) {{ {plain} }} else {add}"
            return guard + self.joined(s, target, value)
        if self.in_segments(s):
            return self.into_segment(s, value, alone)
        shape, wide = self.types[s.buffer].shape, self.wide_accumulator(s)
        axes = self.free(s) if wide else list(range(len(shape)))
        at = index(flatten([s.index[axis] for axis in axes], [shape[axis] for axis in axes]), OFFSETS)
        if self.order_of_sums[s.buffer] is not None:
            at = self.place_of_sum(s)
        if wide or strategy.partials:
            return guard + self.joined(s, f"p{number}[{at}]", value)
        if strategy.atomics == "fixed point" and self.scanning:
            found, most = f"gradc_magnitude({value})", f"maximum{number}"
            return f"{guard}{most} = {found} > {most} ? {found} : {most};"
        if strategy.atomics == "fixed point":
            return f"{guard}gradc_fixed_add(fixed{number}, odd{number}, {at}, {value}, scale{number});"
        element = f"{self.sum_array(s)}[{at}]"
        if strategy.atomics == "values":
            return f"{guard}gradc_atomic_{'add' if s.combine == 'sum' else s.combine}(&{element}, {value});"
        return guard + self.joined(s, element, value)

    def place_of_sum(self, s: Stmt) -> str:
        """The number of the sum in fixed point that an accum adds to."""
        return index(place_of_sum(s.index, self.types[s.buffer].shape, self.order_of_sums[s.buffer]), OFFSETS)

    def added_together(self, group: Sequence[Stmt]) -> list[str]:
        """Accums of neighbouring sums: what the lanes of a warp add is exchanged before."""
        number = self.number[group[0].buffer]
        guards = [f"live && {variable(s.where)}" if s.where else "live" for s in group]
        places = ", ".join(f"{g} ? {self.place_of_sum(s)} : -1" for g, s in zip(guards, group, strict=True))
        values = ", ".join(variable(s.args[0]) for s in group)
        own = "&exchanged[threadIdx.x / 32 * gradc_exchanged<EXCHANGED>::SLOTS]"
        return [
            "{",
            f"const ix at[] = {{{places}}};",
            f"const f32 values[] = {{{values}}};",
            f"gradc_fixed_add_together(fixed{number}, odd{number}, at, values, scale{number}, {own});",
            "}",
        ]

    def into_segment(self, s: Stmt, value: str, alone: str) -> str:
        """An accum into the row of the segment: the first value of a segment is stored, others are combined with it."""
        number, leading = self.number[s.buffer], self.parts[s.buffer].leading
        if self.warp_scan:
            return f"if (valid) value{number} = {value};"
        at = index(flatten(s.index[leading:], self.types[s.buffer].shape[leading:]), OFFSETS)
        target = f"a{number}[{at}]"
        joined = self.joined(s, target, value)
        if s.combine == "sum":
            return f"{alone}if (valid) {{ if (first_in_segment) {target} = 0; {joined} }}"
        return f"{alone}if (valid) {{ if (first_in_segment) {target} = {value}; else {joined} }}"

    def sum_array(self, s: Stmt) -> str:
        """The array that atomics add to: the result, or its f32 staging."""
        return f"staged{self.number[s.buffer]}" if self.f32_staged(s) else s.buffer

    def joined(self, s: Stmt, target: str, value: str) -> str:
        """``target`` combined with a value, as a statement."""
        return self.views[s.buffer].join(target, value)
