"""Reductions and scans of the columns of a row, as statements of a thread and of the threads of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.statement import Stmt, neutral
from ...ir.types import DType
from ..expr import carrier, variable
from ..index import literal, number_of_place
from .columns import OFFSETS
from .exp_sums import ExpSum
from .facts import Facts
from .mapping import ThreadMapping


@dataclass(frozen=True)
class Reduction:
    """A reduction over the columns of a row.

    :param start: declares a thread's partial result.
    :param lines: combine a column's value with it.
    :param result: combines the threads of a task.
    :param part: the partial result's name.
    :param ctype: its type.
    :param join: the struct whose ``join`` combines two of them.
    :param strips: the array of the strips' partial results, where rows are split.
    :param shared: the shared memory that warps combine through; 0: a task is no more than a warp.
    :param terms: the array of a thread's VEC columns, where they are added up before they meet the partial result.
    :param before: a declaration before the columns whose loads are under way together.
    :param after: a statement behind them.
    :param absent: what stands for columns that are not there.
    :param around: what opens a walk over the columns, and closes it.
    """

    start: str
    lines: tuple[str, ...]
    result: str
    part: str
    ctype: str
    join: str
    strips: str
    shared: str
    terms: str = ""
    before: str = ""
    after: str = ""
    absent: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def declared_terms(self) -> str:
        """Declares a thread's terms; columns that are not there add nothing."""
        return f"f32 {self.terms}[VEC] = {{}};"

    @property
    def add_terms(self) -> str:
        """Adds them to the partial result."""
        return f"gradc_add_all({self.part}, {self.terms});"


@dataclass(frozen=True)
class Scan:
    """What a scan of the columns of a row carries from those before to those after them.

    :param start: declares it.
    :param carry: its name.
    :param ctype: its type.
    :param join: the struct whose ``join`` takes one further.
    :param strips: the array of what each strip's columns are combined to, where rows are split.
    :param shared: the shared memory that warps combine through; 0: a task is no more than a warp.
    """

    start: str
    carry: str
    ctype: str
    join: str
    strips: str
    shared: str


class Reductions:
    """Writes the reductions of a kernel under a mapping."""

    def __init__(self, facts: Facts, mapping: ThreadMapping):
        self.kernel, self.values, self.mapping = facts.kernel, facts.scribe.values, mapping
        self.shared = "shared" if mapping.reduces_in_shared else "0"

    def reduction(
        self, kind: str, value: str, name: str, dtype: DType | None, where: str = "", part: str = ""
    ) -> Reduction:
        """Each thread's part, then all of a task's, as ``name``."""
        assert dtype is not None
        own, v, part, terms = self.values[value], variable(value), part or f"total_{name}", ""
        before = after = ""
        guard, shared, reduce = f"if ({variable(where)}) " if where else "", self.shared, self.mapping.reduce
        if kind in ("argmax", "argmin"):
            ctype, join = f"gradc_arg_extremum<{carrier(own)}>", f"gradc_{kind.replace('arg', 'arg_')}<{carrier(own)}>"
            start = f"{ctype} {part} = {{0, -1}};"
            line = f"{join}::join({part}, {ctype}{{{v}, {number_of_place(self.kernel.cols, kind=OFFSETS)}}});"
            result = f"const i64 {name} = gradc_max({reduce}<{join}, WIDTH>({part}, {shared}).index, 0);"
        elif kind == "sum":
            ctype = "sum_f32" if dtype.is_float and carrier(dtype) == "f32" else carrier(dtype)
            join, final = f"gradc_sum<{ctype}>", carrier(dtype)
            start = f"{ctype} {part}; gradc_clear({part});"
            terms = f"terms_{name}" if ctype == "sum_f32" and self.mapping.vec > 1 else ""
            if ctype == "sum_f32" and self.mapping.adds_pairwise:
                before, line = f"f32 terms_{name}[{self.mapping.unroll}] = {{}};", f"{guard}terms_{name}[t] = {v};"
                after = (
                    f"gradc_add_next({part}, gradc_pairwise(terms_{name}));"  # four terms: the third rounding of each
                )
            else:
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
        return Reduction(start, (line,), result, part, ctype, join, f"strip_{name}", shared, terms, before, after)

    def with_exp_sum(self, s: Stmt, e: ExpSum) -> Reduction:
        """A maximum with the sum of exponentials beside it."""
        top, part, total = variable(s.name), f"total_{variable(s.name)}", variable(e.stmt.name)
        partial, values, count = f"partial_{top}", f"values_{top}", f"{self.mapping.unroll} * VEC"
        found = f"gradc_exp_sum({part}, {str(e.finite_shift).lower()})"
        return Reduction(
            start=f"gradc_exp_total {part} = gradc_exp_nothing();",
            lines=(f"{values}[t * VEC + j] = {variable(s.args[0])};",),
            result=f"{part} = gradc_exp_reduce<WIDTH>({part}, {self.shared});\n"
            f"const f32 {top} = gradc_exp_top({part});\n"
            f"const f32 {total} = cols > 0 ? {found} : 0.0f;",
            part=part,
            ctype="gradc_exp_total",
            join="gradc_exp_join",
            strips=f"strip_{top}",
            shared=self.shared,
            around=(
                f"gradc_exp_partial {partial} = gradc_exp_first();\nfor (int far = 0;; far = 1) {{",
                f"if (!gradc_exp_again({partial}, far)) break;\n}}\n{part} = gradc_exp_settled({partial});",
            ),
            before=f"f32 {values}[{count}];",
            absent=("#pragma unroll", f"for (int i = 0; i < {count}; i++) {values}[i] = -GRADC_INFINITY_F32;"),
            after=f"gradc_exp_add({partial}, {values}, far);",
        )

    def in_pairs(self, reductions: Sequence[Reduction]) -> list[Reduction]:
        """Sums of f32 of one walk are combined by the threads two at a time."""
        sums = [r for r in reductions if r.ctype == "sum_f32"]
        if not self.mapping.reduces_in_pairs or not 1 < self.mapping.width <= 512:
            return [*reductions]
        paired: dict[Reduction, Reduction] = {}
        for a, b in zip(sums[::2], sums[1::2], strict=False):
            call = f"gradc_reduce<gradc_sum<sum_f32>, WIDTH>({{}}, {a.shared})"
            both = f"gradc_reduce_both<WIDTH>({a.part}, {b.part}, {a.shared});\n"
            paired[a] = replace(a, result=both + a.result.replace(call.format(a.part), a.part))
            paired[b] = replace(b, result=b.result.replace(call.format(b.part), b.part))
        return [paired.get(r, r) for r in reductions]

    def scan(self, s: Stmt, number: int) -> tuple[Scan, str]:
        """(what it carries, the line of a scan's value), of phase ``number``."""
        assert s.dtype is not None
        value, own = variable(s.args[-1]), carrier(self.values[s.args[-1]])
        place = number * len(self.kernel.scans) + self.kernel.scans.index(s)
        carry = f"carry{place}"
        if s.combine in ("argmax", "argmin"):
            ctype, join = f"gradc_arg_extremum<{own}>", f"gradc_last_{s.combine.removeprefix('arg')}<{own}>"
            start, item, member = (
                "{0, -1}",
                f"{ctype}{{{value}, {number_of_place(self.kernel.cols, kind=OFFSETS)}}}",
                ".index",
            )
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
        result = f"gradc_scan<{join}, WIDTH>({item}, {carry}, {self.shared}){member}"
        if not member and ctype != carrier(s.dtype):
            result = f"gradc_value({result})"
        carried = Scan(f"{ctype} {carry} = {start};", carry, ctype, join, f"strip_s{place}", self.shared)
        return carried, f"const {carrier(s.dtype)} {variable(s.name)} = {result};"
