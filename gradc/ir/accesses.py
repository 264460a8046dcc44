"""Which accesses of a program through data are known to stay inside their buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .dims import Assumption, Size, assuming, same
from .kernel import Index, Kernel, Program, Step, Stmt, alternatives
from .ranges import KernelRanges, Range, constant, inside, of_type, sources
from .types import I64, Type


class Elements:
    """What is known of the integers in a program's buffers, step by step."""

    def __init__(self, program: Program):
        self.program = program
        self.types = {b.name: b.type for b in program.buffers}
        self.roots = {b.name: (program.root(b.name), b.type.dtype.name) for b in program.buffers}  # bytes seen as another type are other numbers
        self.ranges = {self.roots[b.name]: constant(b.value) for b in program.buffers if b.kind == "const" and not b.alias}
        self.written: set[str] = set()

    def known(self, buffer: str) -> Range:
        return self.ranges.get(self.roots[buffer], Range())

    def kernel(self, kernel: Kernel) -> KernelRanges:
        return KernelRanges(kernel, self.types, self.known)

    def after(self, step: Step) -> None:
        """Learn from a step: elements that were checked, and what was stored."""
        learned: dict[tuple[str, str], Range] = {}
        for kernel in alternatives(step):
            for where, found in (_learned(kernel, self.kernel(kernel), self) if isinstance(kernel, Kernel) else ()):
                learned[where] = learned[where] | found if where in learned else found
        for root in {self.program.root(b) for b in step.writes}:
            fresh = root not in self.written
            self.written.add(root)
            for key in [k for k in {*self.ranges, *learned} if k[0] == root]:
                now = learned.get(key, Range())
                self.ranges[key] = now if fresh else self.ranges.get(key, Range()) | now
        for kernel in alternatives(step):
            if isinstance(kernel, Kernel) and kernel is step:  # not one of several
                for buffer, bound in checked_buffers(kernel, self.types):
                    self.ranges[self.roots[buffer]] = self.known(buffer) & inside(bound)


def _learned(kernel: Kernel, ranges: KernelRanges, elements: Elements) -> Iterator[tuple[tuple[str, str], Range]]:
    for s in kernel.body:
        if s.op == "store" and elements.types[s.buffer].dtype.is_integer:
            yield elements.roots[s.buffer], ranges.value(s.args[0], frozenset())


def checked_buffers(kernel: Kernel, types: Mapping[str, Type]) -> Iterator[tuple[str, Size]]:
    """The buffers every element of which a kernel checks, and the bound."""
    axes = dict((*kernel.rows, *kernel.cols))
    for s in kernel.body:
        if s.op != "check":
            continue
        source = kernel.stmts[s.args[0]]
        while source.op == "cast" and of_type(kernel.stmts[source.args[0]].dtype).within(of_type(source.dtype)):
            source = kernel.stmts[source.args[0]]
        if source.op != "load" or source.where:
            continue
        shape = types[source.buffer].shape
        names = [i.variable for i, size in zip(source.index, shape, strict=True) if size != 1]
        whole = len(set(names)) == len(names) and all(n in axes for n in names)
        if whole and all(same(axes[str(n)], size) for n, size in zip(names, (size for size in shape if size != 1), strict=True)):
            yield source.buffer, s.attr("bound")


def by_data(index: Index) -> bool:
    """Whether values have a say in a place."""
    return any(v.startswith("%") for v, _ in index.terms)


def unsafe_accesses(kernel: Kernel, elements: Elements) -> Iterator[tuple[Stmt, int, Size]]:
    """The accesses that are not known to stay in their buffer: (statement, axis, the axis' size)."""
    inner = [Assumption(size, ">=", 1) for _, size in kernel.rows if not isinstance(size, int)]  # no row, no access
    with assuming(inner):
        for s, axis, found, size in elements.kernel(kernel).accesses():
            if not found.within(inside(size)):
                yield s, axis, size


def assumed(kernel: Kernel, program: Program) -> list[tuple[str, Size]]:
    """What a kernel takes for granted of its buffers, (buffer, size): all elements are in [0, size).  To be checked where it runs alone."""
    elements, found = Elements(program), dict[tuple[str, Size], None]()
    with assuming(program.assumptions):
        for s, axis, size in unsafe_accesses(kernel, elements):
            for buffer in sources(kernel, s.index[axis]):
                found[buffer, size] = None
    return list(found)


def check_of(buffer: str, type: Type, bound: Size, op: str, source: str) -> Kernel:
    """The kernel that checks every element of a buffer."""
    axes = [(f"i{a}", size) for a, size in enumerate(type.shape) if size != 1]
    index = tuple(Index() if size == 1 else Index.of(f"i{a}") for a, size in enumerate(type.shape))
    body = [Stmt("%0", "load", (), type.dtype, buffer=buffer, index=index)]
    if type.dtype is not I64:
        body.append(Stmt("%1", "cast", ("%0",), I64, attrs=(("dtype", I64),)))
    body.append(Stmt("", "check", (body[-1].name,), attrs=(("bound", bound), ("op", op), ("source", source))))
    kernel = Kernel("check", tuple(axes[:-1]), tuple(axes[-1:]), tuple(body))
    return kernel.named_by_structure("check", {buffer: type})
