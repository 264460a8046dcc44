"""Writing one kernel: from what it stores back to what it loads.

``read(node, index)`` is the statement that holds the element of ``node`` at that index.  A node with a buffer is a
load; a pointwise op reads its operands at the same index; an op that moves data reads them at another; a reduction
along the kernel's columns becomes a row value.  What cannot be computed inside the kernel raises :class:`CannotInline`,
and the scheduler gives that node a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.dims import Size, known_nonnegative, same
from ...ir.kernel import Kernel
from ...ir.node import Node, identity
from ...ir.op import Alias, Checked, Expr, Lookup, Movement, Reduction, Scan, Scatter
from ...ir.statement import Axis, Index, Stmt
from ...ir.types import BOOL, F64, I32, I64, DType
from ...process.forks import cached_property


class CannotInline(Exception):
    """The node cannot be computed inside this kernel; it needs a buffer."""

    def __init__(self, node: Node, why: str):
        self.node, self.why = node, why
        super().__init__(f"{node!r}: {why}")


@dataclass(frozen=True)
class IterationSpace:
    """A kernel's iteration space: an axis name per dimension of ``shape`` (none for the literal size 1), and which are
    columns.

    :param cols: dimensions that are columns, or None while they are undecided.
    """

    shape: tuple[Size, ...]
    cols: tuple[int, ...] | None = None

    def axis(self, dimension: int) -> str | None:
        return None if self.shape[dimension] == 1 else f"i{dimension}"

    def index(self, dimensions: Sequence[int] | None = None) -> tuple[Index, ...]:
        """The identity index over some dimensions (default all)."""
        chosen = range(len(self.shape)) if dimensions is None else dimensions
        return tuple(Index.of(name) if (name := self.axis(d)) else Index() for d in chosen)

    @cached_property
    def real(self) -> tuple[int, ...]:
        """The dimensions that are axes."""
        return tuple(d for d, s in enumerate(self.shape) if s != 1)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The column dimensions; undecided, the last axis."""
        if self.cols is not None:
            return tuple(d for d in self.cols if self.shape[d] != 1)
        return self.real[-1:]

    def axes(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        columns = set(self.columns)
        rows = tuple((f"i{d}", self.shape[d]) for d in self.real if d not in columns)
        return rows, tuple((f"i{d}", self.shape[d]) for d in self.real if d in columns)


class KernelBuilder:
    """The statements of one kernel, in order, each computed once per place.

    :param buffers: the nodes that are in memory, by buffer name; a callable so that the scheduler can decide late.
    :param numbers: of the graph's values, for :attr:`Stmt.of`.
    """

    def __init__(
        self,
        domain: IterationSpace,
        buffer_of: Callable[[Node], str | None],
        constants: Callable[[Node], str] | None = None,
        numbers: Mapping[Node, int] | None = None,
    ):
        self.domain = domain
        self.buffer_of = buffer_of
        self.constants = constants
        self.numbers = numbers or {}
        self.body: list[Stmt] = []
        self.memo: dict[Any, str] = {}
        self.homes: dict[Node, tuple[Index, ...]] = {}
        self.guard: str = ""
        self.loaded: dict[str, Node] = {}
        self.cost = 0

    # -- making statements ---------------------------------------------------------------------------------------------

    def _emit(
        self,
        op: str,
        args: Sequence[str] = (),
        dtype: DType | None = None,
        buffer: str = "",
        index: tuple[Index, ...] = (),
        where: str = "",
        attrs: tuple[tuple[str, Any], ...] = (),
    ) -> str:
        key = (op, (*args,), dtype, buffer, index, where, identity(attrs) if attrs else ())
        name = self.memo.get(key)
        if name is None:
            name = self.memo[key] = f"%{len(self.body)}"
            self.body.append(Stmt(name, op, key[1], dtype, buffer, index, where, attrs))
        return name

    def snapshot(self) -> Any:
        """What :meth:`restore` needs: all but the cost only grows."""
        return len(self.body), len(self.memo), len(self.homes), len(self.loaded), self.cost

    def restore(self, saved: Any) -> None:
        body, memo, homes, loaded, self.cost = saved
        del self.body[body:]
        truncate(self.memo, memo)
        truncate(self.homes, homes)
        truncate(self.loaded, loaded)

    # -- what ops ask for (Movement.at, Scatter.at) --------------------------------------------------------------------

    def read(self, node: Node, index: Sequence[Index], where: str | None = None, other: Any = 0) -> str:
        """The value of ``node`` at ``index``; where the mask is false it is ``other`` and nothing is read."""
        if where and self._is_false(where):
            return self.number(_as_python(other, node.dtype), node.dtype)
        outer = self.guard
        self.guard = self.both(outer or None, where) or ""
        try:
            value = self._value(node, tuple(index), other if where else 0)
            if where and not self._is_masked_load(value, other):
                value = self.select(self.guard, value, self.number(_as_python(other, node.dtype), node.dtype))
        finally:
            self.guard = outer
        return value

    def _is_false(self, mask: str) -> bool:
        """Whether a mask is false everywhere: a test of a constant place, as in one slice of what is concatenated."""
        s = self._stmt(mask)
        if s.op == "bitwise_and":
            return any(map(self._is_false, s.args))
        if s.op != "in_bounds" or s.index[0].terms:
            return False
        place = s.index[0].const
        return known_nonnegative(s.attr("lo") - 1 - place) or known_nonnegative(place - s.attr("hi"))

    def _is_masked_load(self, value: str, other: Any) -> bool:
        statement = self._stmt(value)
        if statement.op != "load" or statement.where != self.guard or statement.dtype is None:
            return False
        own = dict(statement.attrs).get("other", 0)
        same: bool = identity(_as_python(own, statement.dtype)) == identity(_as_python(other, statement.dtype))
        return same

    @staticmethod
    def parted(index: Index, sizes: Sequence[Size]) -> None:
        """An index of several axes as one of each: no kernel divides."""

    def constant(self, node: Node, index: Sequence[Index]) -> str:
        value = node.attrs["value"]
        if len(value) == 1:
            return self.number(value[0], node.dtype)
        if self.constants is None:
            raise CannotInline(node, "an array constant")
        return self._load(self.constants(node), node, tuple(index), 0)

    def number(self, value: Any, dtype: DType) -> str:
        return self._emit("const", (), dtype, attrs=(("value", value),))

    def size(self, size: Size) -> str:
        return self._emit("size", (), I64, attrs=(("size", size),))

    def position(self, index: Index, dtype: DType) -> str:
        value = self._emit("index", (), I64, index=(index,))
        return value if dtype is I64 else self.cast(value, dtype)

    def cast(self, value: str, dtype: DType) -> str:
        return self._emit("cast", (value,), dtype, attrs=(("dtype", dtype),))

    def in_bounds(self, index: Index, lo: Size, hi: Size) -> str | None:
        """lo <= index < hi, or None where that is certain."""
        if self._certain(index, lo, hi):
            return None
        known = self._tested(index, lo, hi)
        if known is not None:
            return known
        return self._emit("in_bounds", (), BOOL, index=(index,), attrs=(("hi", hi), ("lo", lo)))

    def _certain(self, index: Index, lo: Size, hi: Size) -> bool:
        low, high = index.const, index.const
        sizes = {f"i{d}": s for d, s in enumerate(self.domain.shape)}
        for variable, coefficient in index.terms:
            if variable not in sizes or not isinstance(coefficient, int):
                return False
            edge = (sizes[variable] - 1) * coefficient
            low, high = (low, high + edge) if coefficient > 0 else (low + edge, high)
        return known_nonnegative(low - lo) and known_nonnegative(hi - 1 - high)

    def _tested(self, index: Index, lo: Size, hi: Size | None = None) -> str | None:
        """The mask that says lo <= index < hi already: of ``where(low <= x & x <= high, x, outside)`` as an integer."""
        value = index.variable
        if value is None or not value.startswith("%"):
            return None
        where, limit = self._stmt(value), 2**63
        if where.op == "cast":
            kept, where = where.dtype, self._stmt(where.args[0])
            limit = 2**31 if kept is I32 else limit
            if kept is not I64 and not (
                kept is I32 and self._dtype(where.name).is_float
            ):  # integers wrap, and nothing is below an unsigned 0
                return None
        if where.op != "where":
            return None
        mask, x, other = where.args
        outside, bounds = (
            self._number(other),
            {s.op: s.args for a in self._stmt(mask).args if (s := self._stmt(a)).op in ("ge", "le")},
        )
        if (
            self._stmt(mask).op != "bitwise_and"
            or set(bounds) != {"ge", "le"}
            or any(b[0] != x for b in bounds.values())
            or outside is None
        ):
            return None
        if limit < 2**63 and not (isinstance(outside, int) and -limit <= outside < limit):
            return None
        least, most = self._number(bounds["ge"][1]), self._number(bounds["le"][1])
        if (
            least is None
            or most is None
            or not (known_nonnegative(least - lo) and (hi is None or known_nonnegative(hi - 1 - most)))
        ):
            return None
        return (
            mask
            if known_nonnegative(lo - 1 - outside) or (hi is not None and known_nonnegative(outside - hi))
            else None
        )

    def _number(self, value: str) -> Size | None:
        """A whole number or a size that a value is."""
        s = self._stmt(value)
        if s.op == "cast" and s.dtype is F64:  # in f32 a size may be rounded up
            s = self._stmt(s.args[0])
        if s.op == "size":
            return s.attr("size")  # type: ignore[no-any-return]
        number = s.attr("value") if s.op == "const" else None
        return (
            int(number)
            if isinstance(number, int | float) and number == number and abs(number) < 2**53 and number == int(number)
            else None
        )

    def both(self, a: str | None, b: str | None) -> str | None:
        if not a or not b or a == b:
            return a or b
        return self._emit("bitwise_and", (a, b), BOOL)

    def select(self, condition: str | None, a: str, b: str) -> str:
        if condition is None:
            return a
        return self._emit("where", (condition, a, b), self._dtype(a))

    def clamp_index(self, value: str, size: Size, oob: str) -> str:
        return self._emit("clamp_index", (value,), I64, attrs=(("oob", oob), ("size", size)))

    def search(self, node: Node, value: str, ascending: bool = False) -> str:
        """How many elements of an ascending line are <= value.

        :param ascending: whether it is known to ascend by how it is computed; else where it has been checked.
        """
        buffer = self.buffer_of(node)
        if buffer is None:
            raise CannotInline(node, "it is searched")
        self.loaded[buffer] = node
        checked = isinstance(getattr(node.op, "lower", None), Checked) and node.attrs["ascending"]
        attrs = (("ascending", True),) if checked or ascending else ()
        return self._emit("search", (value,), I64, buffer=buffer, index=(Index(),), attrs=attrs)

    @property
    def in_segments(self) -> bool:
        """Whether rows of one key follow one another by how the key is computed, not by what a call was given."""
        found = [self.loaded[s.buffer] for s in self.body if s.op == "search" and ("ascending", True) in s.attrs]
        return any(not isinstance(getattr(node.op, "lower", None), Checked) for node in found)

    def differs(self, index: Index, value: Size) -> str:
        i = (
            index.variable
            if index.variable and index.variable.startswith("%")
            else self._emit("index", (), I64, index=(index,))
        )
        wide = i if self._dtype(i) is I64 else self.cast(i, I64)
        return self._emit("ne", (wide, self.number(value, I64) if isinstance(value, int) else self.size(value)), BOOL)

    def emit(self, op: str, *args: str, dtype: DType, **attrs: Any) -> str:
        """A pointwise op on values of the kernel."""
        return self._emit(op, args, dtype, attrs=tuple(attrs.items()))

    def divided(self, index: Index, by: int) -> tuple[Index, str | int]:
        """``index // by`` and ``index % by``, rounded down: affine in what is a multiple, values of the rest."""
        if by == 1:
            return index, 0
        whole = tuple((v, c) for v, c in index.terms if isinstance(c, int) and c % by == 0)
        const = index.const // by if isinstance(index.const, int) else 0
        quotient = Index(const, tuple((v, c // by) for v, c in whole))
        rest = Index(index.const - const * by, tuple(t for t in index.terms if t not in whole))
        if not rest.terms and isinstance(rest.const, int):
            return quotient, rest.const
        value = self.position(rest, I64)
        if by & (by - 1):
            divisor = self.number(by, I64)
            further, left = (self.emit(name, value, divisor, dtype=I64) for name in ("floordiv", "mod"))
        else:
            further = self.emit("right_shift", value, self.number(by.bit_length() - 1, I64), dtype=I64)
            left = self.emit("bitwise_and", value, self.number(by - 1, I64), dtype=I64)
        return quotient + Index.of(further), left

    def is_zero(self, value: str) -> str:
        return self._emit("eq", (value, self.number(0, self._dtype(value))), BOOL)

    def _stmt(self, value: str) -> Stmt:
        return self.body[int(value[1:])]

    def _dtype(self, value: str) -> DType:
        dtype = self._stmt(value).dtype
        assert dtype is not None
        return dtype

    # -- pulling -------------------------------------------------------------------------------------------------------

    def _value(self, node: Node, index: tuple[Index, ...], other: Any) -> str:
        buffer = self.buffer_of(node)
        if buffer is not None:
            first = len(self.body)
            value = self._load(buffer, node, index, other)
            self._credit(node, first)
            return value
        home = self.homes.get(node)
        if home is not None and home != index:
            raise CannotInline(node, "it is read at another place than it is computed at")
        filling = identity(_as_python(other, node.dtype)) if self.guard else None  # of no use where nothing is masked
        key = (node, index, self.guard, filling)
        if key in self.memo:
            return self.memo[key]
        first = len(self.body)
        lower = getattr(node.op, "lower", None)
        if isinstance(lower, Expr):
            args = [self._value(o, index, 0) for o in node.operands]
            self.cost += lower.cost
            least = self._number(args[1]) if node.op.name == "ge" else None
            known = self._tested(Index.of(args[0]), least) if least is not None else None
            value = known or self._emit(node.op.name, args, node.dtype, attrs=tuple(node.attrs.items()))
        elif isinstance(lower, Movement | Lookup | Alias):
            value = lower.at(index, node, self)
            if value is None:
                raise CannotInline(node, "its index needs a division")
        elif isinstance(lower, Reduction):
            value = self._reduce(node, lower, index)
        elif isinstance(lower, Scan):
            value = self._scan(node, lower, index)
        elif isinstance(lower, Scatter):
            raise CannotInline(node, "a scatter ends its kernel")
        else:
            raise CannotInline(node, f"{node.op.name} is computed by a step of its own")
        self._credit(node, first)
        self.memo[key] = value
        return value

    def _load(self, buffer: str, node: Node, index: tuple[Index, ...], other: Any) -> str:
        index = tuple(Index() if size == 1 else i for i, size in zip(index, node.shape, strict=True))
        attrs: tuple[tuple[str, Any], ...] = ()
        if self.guard:
            filling, zero = (_as_python(v, node.dtype) for v in (other, 0))
            attrs = (("other", filling),) if identity(filling) != identity(zero) else ()  # -0.0 is another
        self.loaded[buffer] = node
        return self._emit("load", (), node.dtype, buffer=buffer, index=index, where=self.guard, attrs=attrs)

    def _reduce(self, node: Node, lower: Reduction, index: tuple[Index, ...]) -> str:
        (source,) = node.operands
        reduced = node.attrs["axis"]
        reduced = reduced if isinstance(reduced, tuple) else (reduced,)
        columns = self.domain.columns
        own = [a for a in reduced if source.shape[a] != 1]
        if len(own) != len(columns) or not all(
            same(source.shape[a], self.domain.shape[c]) for a, c in zip(own, columns, strict=True)
        ):
            raise CannotInline(node, "it is reduced across rows, and known only after the last one")
        dims = [a for a, size in enumerate(source.shape) if size != 1]
        real = self.domain.real
        if (
            len(dims) == len(real)
            and all(same(source.shape[a], self.domain.shape[d]) for a, d in zip(dims, real, strict=True))
            and {real[dims.index(a)] for a in own} != set(columns)
            and not isinstance(getattr(source.op, "lower", None), Movement)
        ):  # sizes alone would let a square be read with its rows as columns
            raise CannotInline(node, "it is reduced across rows, and known only after the last one")
        names = {f"i{c}" for c in columns}
        kept = iter(index)
        full = []
        seen: set[str] = set()
        for a, size in enumerate(source.shape):
            if a in reduced:
                full.append(Index.of(f"i{columns[own.index(a)]}") if a in own else Index())
                continue
            i = next(kept)
            if size != 1:
                variable = i.variable
                if variable is None or variable.startswith("%") or variable in names or variable in seen:
                    raise CannotInline(node, "it is read at another row than its own")
                seen.add(variable)
            full.append(i)
        guard, self.guard = self.guard, ""
        try:
            value = self._value(source, tuple(full), 0)
        finally:
            self.guard = guard
        if self._dtype(value) is not node.dtype and lower.combine not in ("argmax", "argmin"):
            value = self.cast(value, node.dtype)
        if lower.combine in ("argmax", "argmin") and any(s.op == "scan" and s.attr("reverse") for s in self.body):
            raise CannotInline(node, "the first of equals, in a kernel that scans its columns in reverse")
        refused = lower.nonempty and node.attrs.get("empty", "error") == "error"
        return self._emit(f"{lower.combine}_cols", (value,), node.dtype, attrs=(("empty", "error"),) if refused else ())

    def _scan(self, node: Node, lower: Scan, index: tuple[Index, ...]) -> str:
        """A scan of the kernel's columns, read at its own row and column."""
        axis, reverse, columns = node.attrs["axis"], node.attrs["reverse"], self.domain.columns
        own = [i.variable for i, size in zip(index, node.shape, strict=True) if size != 1]
        if None in own or len(set(own)) < len(own) or any(v.startswith("%") for v in own if v):
            raise CannotInline(node, "it is read at another row or column than its own")
        if node.shape[axis] == 1:
            columns = ()
        elif [index[axis].variable] != [f"i{c}" for c in columns]:
            raise CannotInline(node, "it is scanned along another axis than the kernel's columns")
        if any(s.op == "scan" and s.attr("reverse") is not reverse for s in self.body):
            raise CannotInline(node, "a kernel scans its columns in one direction")
        if reverse and any(s.op in ("argmax_cols", "argmin_cols") for s in self.body):
            raise CannotInline(node, "the first of equals, in a kernel that scans its columns in reverse")
        guard, self.guard = self.guard, ""  # it combines columns that a reader masks, too
        try:
            values = [self._value(o, index, 0) for o in node.operands]
        finally:
            self.guard = guard
        if lower.combine not in ("argmax", "argmin"):
            values = [v if self._dtype(v) is node.dtype else self.cast(v, node.dtype) for v in values]
        if not columns:  # of one element
            return self.number(0, node.dtype) if lower.combine in ("argmax", "argmin") else values[-1]
        return self._emit("scan", values, node.dtype, attrs=(("combine", lower.combine), ("reverse", reverse)))

    # -- roots ---------------------------------------------------------------------------------------------------------

    def store(self, buffer: str, node: Node, index: tuple[Index, ...]) -> None:
        value = self._value(node, index, 0)
        self.body.append(Stmt("", "store", (value,), node.dtype, buffer=buffer, index=_unit(index, node)))
        self._credit(node, len(self.body) - 1)

    def _credit(self, node: Node, first: int) -> None:
        """What was written since the ``first`` statement, and is no operand's, is for ``node``."""
        if node in self.numbers:
            for at in range(first, len(self.body)):
                if self.body[at].of is None:
                    self.body[at] = self.body[at].altered(of=self.numbers[node])

    def accumulate(self, buffer: str, node: Node, index: tuple[Index, ...], value: str, where: str | None) -> None:
        lower: Any = getattr(node.op, "lower", None)
        attrs = (("combine", lower.combine),) if isinstance(lower, Scatter) and lower.combine != "sum" else ()
        self.body.append(
            Stmt(
                "",
                "accum",
                (value,),
                node.dtype,
                buffer=buffer,
                index=_unit(index, node),
                where=where or "",
                attrs=attrs,
            )
        )
        self._credit(node, len(self.body) - 1)

    def axes_of(self, statement: Stmt) -> frozenset[str]:
        """The axes that a statement runs over."""
        return Kernel("kernel", *self.domain.axes(), tuple(self.body)).stmt_level(statement)

    def check(self, node: Node, bound: Size, op: str, source: str, ascending: bool = False) -> None:
        """0 <= value < bound; ``ascending``: the first is 0, and none is below the one before it."""
        index = self.domain.index()
        value = self._wide(self._value(node, index, 0))
        args: tuple[str, ...] = (value,)
        if ascending:
            first = self._emit("eq", (self.position(index[0], I64), self.number(0, I64)), BOOL)
            before = self._wide(self.read(node, [index[0] + -1], where=self.in_bounds(index[0] + -1, 0, node.shape[0])))
            self._check((self._emit("where", (first, value, self.number(0, I64)), I64),), 1, op, source)
            args = (value, before)
        self._check(args, bound, op, source)

    def _check(self, args: tuple[str, ...], bound: Size, op: str, source: str) -> None:
        self.body.append(Stmt("", "check", args, None, attrs=(("bound", bound), ("op", op), ("source", source))))

    def _wide(self, value: str) -> str:
        return value if self._dtype(value) is I64 else self.cast(value, I64)

    def kernel(self, name: str) -> Kernel:
        """The kernel with only the statements its effects need, renumbered."""
        rows, cols = self.domain.axes()
        return Kernel(name, rows, cols, tuple(self.body)).live


def truncate(items: dict[Any, Any], length: int) -> None:
    """Remove the items that were inserted last."""
    while len(items) > length:
        items.popitem()


def _unit(index: Sequence[Index], node: Node) -> tuple[Index, ...]:
    return tuple(Index() if size == 1 else i for i, size in zip(index, node.shape, strict=True))


def _as_python(value: Any, dtype: DType) -> Any:
    return bool(value) if dtype.kind == "b" else float(value) if dtype.is_float else int(value)
