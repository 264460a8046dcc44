"""SASS, the machine code of NVIDIA's GPUs, as nvdisasm prints it: instructions, control-flow graph, loops, accesses.

Text in, frozen records out: nothing here runs a tool.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

from ..process.forks import cached_property

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+?),")
_LABEL = re.compile(r"^([.\w$]+):\s*$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_CONDITION = re.compile(r"!?U?P\d")  # of a branch, as its first operand: BRA.U UP0, `(.L_x_1)
_TARGET = re.compile(r"`\(([.\w$]+)\)")

_CLASSES: Mapping[str, str] = {
    "global load": "LDG LD LDGSTS",
    "global store": "STG ST",
    "atomics": "ATOMG ATOM RED REDG REDUX ATOMS",
    "shared": "LDS STS LDSM STSM",
    "local": "LDL STL",
    "constant": "LDC ULDC LDCU",
    "f32": "FADD FMUL FFMA FSEL FSETP FMNMX FSET FCHK FADD2 FMUL2 FFMA2 FMNMX3 FSWZADD",
    "f16": "HADD2 HMUL2 HFMA2 HSETP2 HMNMX2 HSET2",
    "f64": "DADD DMUL DFMA DSETP DMNMX",
    "special": "MUFU",
    "convert": "F2F F2FP F2I F2IP I2F I2FP I2I FRND I2IP",
    "matrix": "HMMA IMMA QMMA DMMA BMMA HGMMA IGMMA WGMMA",
    "integer": (
        "IADD IADD3 IMAD IMUL IABS ISETP IMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 LEA LOP3 SHF SHL SHR SEL PRMT BREV FLO"
        " POPC SGXT BMSK LOP VABSDIFF IDP ISCADD UIADD3 UIMAD UISETP ULEA ULOP3 USHF USEL UPRMT UFLO UPOPC UBREV USGXT"
        " UBMSK UVIADD UVIMNMX UISETP UIABS"
    ),
    "predicate": "PLOP3 UPLOP3 PSETP P2R R2P UP2UR UR2UP PSET",
    "move": "MOV MOV32I UMOV CS2R CS2UR S2R S2UR R2UR UR2R B2R R2B NOP",
    "shuffle": "SHFL MATCH VOTE VOTEU",
    "barrier": (
        "BAR MEMBAR DEPBAR LDGDEPBAR FENCE ERRBAR CCTL WARPSYNC SYNCS ENDCOLLECTIVE WARPGROUP UCGABAR_ARV UCGABAR_WAIT"
    ),
    "branch": "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK BMOV YIELD KILL BPT NANOSLEEP BRXU JMXU",
}
CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes.split()}
OTHER = "other"
"""The class of an opcode that no table lists."""
LOADS = ("LDG", "LDGSTS")
"""Of global memory, into registers and into shared memory."""
_GLOBAL = (*LOADS, "STG", "RED", "REDG", "ATOMG")
_SHARED = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS")
ACCESSES = {*_GLOBAL, *_SHARED, "LD", "ST", "ATOM", "LDL", "STL"}
"""Instructions that access memory other than constants."""
_PRODUCT = re.compile(r"(16|8)8(\d+)")  # 16816: 16 x 8 results of 16 products each
_BITS = {"TF32": 32, "S8": 8, "U8": 8, "E4M3": 8, "E5M2": 8, "S4": 4, "U4": 4}
_BANK = 4
_ENDS = ("BRA", "BRX", "JMP", "JMX", "BRXU", "JMXU", "RET", "EXIT", "KILL")
_NO_BRANCH = ("CALL", "RET", "BSSY", "WARPSYNC")  # the label that they name is no successor in their own function


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    :param address: in bytes from its function's start.  :param predicate: ``P0``, ``!P0``, or "" if it always runs.
    :param opcode: without modifiers.  :param modifiers: ``.E.128``.  :param label: the one it names, or "".
    :param operands: as they are printed.
    """

    address: int
    predicate: str
    opcode: str
    modifiers: str
    label: str = ""
    operands: str = ""

    @cached_property
    def kind(self) -> str:
        """Its class, a key of the table above, or ``other``."""
        return CLASS_OF.get(self.opcode, OTHER)

    @cached_property
    def width(self) -> int:
        """Bytes per thread of an access to global memory; 0 if it is none."""
        return self._bytes if self.opcode in _GLOBAL else 0

    @cached_property
    def shared_width(self) -> int:
        """Bytes per thread that pass between shared memory and its users where no two lanes are in one bank's way; 0 if
        it accesses none.
        """
        if self.opcode not in _SHARED:
            return 0
        if self.opcode in ("LDSM", "STSM"):  # 16.M88.4: a register for each of 4 matrices
            return _BANK * int(self.modifiers[-1]) if self.modifiers[-1:] in ("2", "4") else _BANK
        return max(self._bytes, _BANK)

    @cached_property
    def products(self) -> int:
        """Products of 16-bit elements that take the matrix units as long as what a warp's instruction multiplies; 0 if
        it is none.
        """
        parts = self.modifiers.split(".")
        shape = next((match for p in parts if (match := _PRODUCT.fullmatch(p))), None)
        if self.kind != "matrix" or shape is None:
            return 0
        bits = next((_BITS[p] for p in parts if p in _BITS), 16)
        return int(shape[1]) * 8 * int(shape[2]) * bits // 16

    @cached_property
    def _bytes(self) -> int:
        """Of a thread's access."""
        parts = self.modifiers.split(".")
        sized = (int(p.lstrip("US")) for p in parts if re.fullmatch(r"[US]?(8|16|64|128|256)", p))
        bits = next(sized, 32)
        lanes = next((int(p[-1]) for p in parts if re.fullmatch(r"\w+x[248]", p)), 1)  # F32x4
        return bits // 8 * lanes


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    :param start: address of its header.  :param depth: loops around it, 0 for an outermost.
    :param body: its own instructions, without those of loops inside it and of slow paths.
    :param slow: how many instructions of its own lie on slow paths: in blocks that call a subroutine (division and
        square root of operands outside the fast range) and that a pass may skip, and in what only these reach.  Both
        arms of any other branch count as the loop's own.
    """

    start: int
    depth: int
    body: tuple[Instruction, ...]
    slow: int


@dataclass(frozen=True)
class Function:
    """A kernel's machine code.

    :param labels: their addresses.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict, compare=False)

    @cached_property
    def blocks(self) -> Mapping[int, list[Instruction]]:
        """Basic blocks by the address of their first instruction."""
        return _blocks(self.instructions, self.labels)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops, in order of address."""
        return tuple(_loops(self.instructions, self.labels))


def classes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, the most frequent first."""
    return dict(Counter(i.kind for i in instructions).most_common())


def widths(instructions: Iterable[Instruction]) -> dict[tuple[str, int], int]:
    """Accesses to global memory: (opcode, bytes per thread) -> how many."""
    return dict(sorted(Counter((i.opcode, i.width) for i in instructions if i.width).items()))


def parse(text: str) -> tuple[Function, ...]:
    """The functions in a listing of ``nvdisasm -c``, in its order."""
    functions, name = [], ""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []

    def flush() -> None:
        if name and instructions:
            functions.append(Function(name, tuple(instructions), labels))

    for line in text.splitlines():
        if match := _SECTION.match(line):
            flush()
            name, instructions, labels, waiting = match[1], [], {}, []
        elif match := _LABEL.match(line):
            waiting.append(match[1])
        elif match := _INSTRUCTION.match(line):
            address, predicate, opcode, modifiers, operands = match.groups()
            target = _TARGET.search(operands)
            if opcode in _ENDS and (condition := _CONDITION.match(operands)):
                predicate = predicate or condition[0]
            made = Instruction(
                int(address, 16),
                predicate or "",
                opcode,
                modifiers,
                target[1] if target else "",
                operands.partition("(*")[0].strip(),
            )
            labels |= dict.fromkeys(waiting, made.address)
            waiting = []
            instructions.append(made)
    flush()
    return tuple(functions)


def _blocks(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> dict[int, list[Instruction]]:
    """Basic blocks by the address of their first instruction."""
    starts = {instructions[0].address, *labels.values()}
    for before, after in pairwise(instructions):
        if before.opcode in (*_ENDS, "CALL"):  # behind which a subroutine returns
            starts.add(after.address)
    blocks: dict[int, list[Instruction]] = {}
    for i in instructions:
        if i.address in starts:
            current = blocks.setdefault(i.address, [])
        current.append(i)
    return blocks


def _graph(blocks: Mapping[int, list[Instruction]], labels: Mapping[str, int]) -> nx.DiGraph:
    """The control-flow graph; its nodes are addresses of blocks."""
    graph, order = nx.DiGraph(), list(blocks)
    graph.add_nodes_from(order)
    for at, following in zip(order, [*order[1:], None], strict=True):
        last = blocks[at][-1]
        if last.label in labels and last.opcode not in _NO_BRANCH:
            graph.add_edge(at, labels[last.label])
        # An indirect branch has unknown targets: none is drawn.
        conditional = last.opcode not in _ENDS or last.predicate not in ("", "PT") or _has_condition(last)
        if following is not None and conditional:
            graph.add_edge(at, following)
    return graph


def _has_condition(last: Instruction) -> bool:
    """Whether a branch without a guard may fall through: BRA.DIV leaves only where a warp diverges."""
    return "DIV" in last.modifiers or "CONV" in last.modifiers


def _loops(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> Iterator[Loop]:
    """Natural loops: each back edge leads to a block that dominates its origin; those of one header are one loop."""
    blocks = _blocks(instructions, labels)
    graph = _graph(blocks, labels)
    entry = instructions[0].address
    parents = nx.immediate_dominators(graph, entry)

    def dominates(a: int, b: int) -> bool:
        while b != a and b != entry and b in parents:
            b = parents[b]
        return a == b

    bodies: dict[int, set[int]] = {}
    latches: dict[int, list[int]] = {}
    for origin, header in graph.edges:
        if (origin in parents or origin == entry) and dominates(header, origin):
            reached, pending = {header}, [origin]
            while pending:
                at = pending.pop()
                if at not in reached:
                    reached.add(at)
                    pending += [before for before in graph.predecessors(at) if before in parents or before == entry]
            bodies.setdefault(header, set()).update(reached)
            latches.setdefault(header, []).append(origin)
    for header in sorted(bodies):
        inner = [b for h, b in bodies.items() if h != header and h in bodies[header]]
        own = bodies[header].difference(*inner)
        calls = [
            at
            for at in own
            if any(i.opcode == "CALL" for i in blocks[at]) and not any(dominates(at, end) for end in latches[header])
        ]
        slow = {at for at in own if any(dominates(call, at) for call in calls)}
        depth = sum(header in b for h, b in bodies.items() if h != header)
        body = tuple(i for at in sorted(own - slow) for i in blocks[at])
        yield Loop(header, depth, body, sum(len(blocks[at]) for at in slow))
