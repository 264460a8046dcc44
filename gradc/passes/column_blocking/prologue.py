"""A kernel that sums a few features of each row, for a loop that reads the sum, becomes the loop's first sweep.

The loop's blocks of rows compute what they need: a launch less, and what is summed comes from memory while other blocks
multiply.  A loop that comes later reads what this one stores.
"""

from __future__ import annotations

from dataclasses import replace

from ...analysis.tiles import MOST_FEATURES
from ...ir.dims import same, symbol
from ...ir.kernel import Carry, Kernel, Loop, Program, Sweep
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import F32, Type
from ..loops.legality import IllegalMove, refuse
from ..row_blocking.fission import fresh_name
from .body import BARRED
from .epilogue import ROW, without_unread
from .joining import check_between, joined

COLUMN = "j"
"""What the kernel of such a sweep calls its features; its rows are the epilogue's."""


def with_prologue(program: Program, loop: Loop) -> tuple[Program, Loop]:
    """store t[i] <- sum_cols x[i, d] y[i, d];  loop rows { sweep { load t[row + i] } }  ->
    loop rows { sweep cols(d) { carry t.sum += x[row + i, d] y[row + i, d] }  sweep { load t.sum[i] }  store t }

    :param loop: a step of the program, with sweeps.
    """
    return joined(program, loop, _joined)


def _joined(program: Program, loop: Loop, number: int) -> tuple[Program, Loop]:
    """The program in which the step of this number is a sweep of the loop.

    :raises IllegalMove: it cannot be.
    """
    kernel, root = program.steps[number], program.root
    if not isinstance(kernel, Kernel):
        raise IllegalMove("no kernel")
    if number > program.steps.index(loop):
        refuse("prologue", kernel, "the loop comes before it")
    check_between("prologue", program, kernel, loop)
    if {*map(root, kernel.reads)} & {*map(root, loop.writes)}:
        refuse("prologue", kernel, "the loop writes what it reads")
    store = _store(program, loop, kernel)
    taken = {*program.dims, *program.types, *(name for other in program.loops for name in other.symbols)}
    carry = Carry(fresh_name(f"{store.buffer}.sum", taken), Type(F32, (symbol(loop.count),)), "sum")
    types = {**program.types, carry.name: carry.type}
    place = (*(Index(symbol(name)) for name, _ in loop.over), Index(symbol(loop.rows[0]), ((ROW, 1),)))
    sweeps = tuple(_reading(sweep, store.buffer, place, carry, types) for sweep in loop.sweeps)
    same_bytes = {*program.sharing[root(store.buffer)]}
    if any(same_bytes & {*step.reads} for step in (*(s for w in sweeps for s in w.steps), *loop.steps)):
        refuse("prologue", kernel, f"the loop reads other rows of {store.buffer} than its own, or its bytes as others")
    col, count = (fresh_name(name, taken) for name in ("feature", "features"))
    feature, size = kernel.cols[0]
    axes = dict(zip((axis for axis, _ in kernel.rows), place, strict=True))
    axes[feature] = Index(symbol(col), ((COLUMN, 1),))
    total = kernel.stmts[store.args[0]]
    accum = Stmt("", "accum", (total.name,), F32, carry.name, (Index.of(ROW),))
    body = tuple(s.altered(index=tuple(i.compose(axes) for i in s.index)) for s in kernel.body if s.name)
    meaning = kernel.name.rpartition("_")[0] or kernel.name
    rows = ((ROW, symbol(loop.count)),)
    summed = Kernel("", rows, ((COLUMN, symbol(count)),), (*body, accum), note=kernel.note)
    prologue = Sweep((col, size), sweeps[0].by, count, (carry,), (), (summed.live.named_by_structure(meaning, types),))
    load = Stmt("%0", "load", (), F32, carry.name, (Index.of(ROW),))
    kept = Kernel("", rows, (), (load, store.altered(args=(load.name,), index=place)), note=kernel.note)
    steps = (kept.named_by_structure(meaning, types), *loop.steps)
    larger = replace(loop, sweeps=(prologue, *sweeps), steps=steps)
    whole = (larger if step is loop else step for step in program.steps if step is not kernel)
    return without_unread(replace(program, steps=tuple(whole)), larger)


def _store(program: Program, loop: Loop, kernel: Kernel) -> Stmt:
    """The only effect of a kernel that sums features of the loop's rows: it stores the sum.

    :raises IllegalMove: it does something else.
    """
    effects = [s for s in kernel.body if not s.name]
    sums = [s for s in kernel.body if s.op in REDUCTIONS]
    store = effects[0] if effects else None
    if (
        store is None
        or len(effects) != 1
        or store.op != "store"
        or store.where
        or program.buffer[store.buffer].kind != "temp"
    ):
        refuse("prologue", kernel, "it does more than to store a temp")
    if len(sums) != 1 or REDUCTIONS[sums[0].op] != "sum" or sums[0].dtype is not F32 or store.args != (sums[0].name,):
        refuse("prologue", kernel, "it stores no sum of f32")
    if kernel.order or kernel.strategy or any(s.op in BARRED for s in kernel.body):
        refuse("prologue", kernel, "it does more than to compute elements, and sum them")
    sizes = [size for _, size in (*loop.over, loop.rows)]
    own = [size for _, size in kernel.rows]
    if len(sizes) != len(own) or not all(map(same, sizes, own)):
        refuse("prologue", kernel, "its rows are not those of the loop")
    if [*store.index] != [Index.of(axis) for axis, _ in kernel.rows]:
        refuse("prologue", kernel, "it stores its rows in another order")
    features = [size for _, size in kernel.cols]
    if len(features) != 1 or not isinstance(features[0], int) or not 1 <= features[0] <= MOST_FEATURES:
        refuse("prologue", kernel, f"it sums no known number of features, {MOST_FEATURES} at most")
    if not any(store.buffer in step.reads for sweep in loop.sweeps for step in sweep.steps):
        refuse("prologue", kernel, "the loop's sweeps do not read it")
    return store


def _reading(sweep: Sweep, buffer: str, place: tuple[Index, ...], carry: Carry, types: dict[str, Type]) -> Sweep:
    """A sweep whose kernels read a carry for a buffer's own rows."""

    def of(kernel: Kernel) -> Kernel:
        row = kernel.rows[0][0]
        own = tuple(i.compose({ROW: Index.of(row)}) for i in place)
        body = (
            s.altered(buffer=carry.name, index=(Index.of(row),))
            if s.op == "load" and s.buffer == buffer and s.index == own and not s.where
            else s
            for s in kernel.body
        )
        return replace(kernel, body=tuple(body)).rehashed(types)

    steps = (of(s) if isinstance(s, Kernel) and buffer in s.reads else s for s in sweep.steps)
    return replace(sweep, steps=tuple(steps))
