"""The text format of programs and kernels: ``parse_program(str(p)) == p`` for every program.

::

    program @name {
      assume(N >= 1)
      input tokens: i64[N]
      temp t3: f32[N,D]
      temp t4: f32[N*D] of t3
      const c0: f32[2] = [0x1p+0, 0x1.8p+1]
      output g: f32[V,D]
      kernel @scatter_ab12cd rows(n: N) cols(d: D) order(g) strategy(g: segmented) {
        %t = load tokens[n] : i64
        check %t {bound=V, op="embedding", source="tokens"}
        phase
        %0 = load t3[n, d] : f32
        accum g[%t, d] <- %0
      }
      call @matmul_0 axes(m: M, n: N, k: K) c[m, n] <- matmul a[m, k], b[k, n]
      select {
        when N >= 3072: kernel @... {
        }
        else: kernel @... {
        }
      }
      loop over(b: B) rows(r: N) by(64) count(c) {
        block t5: f32[c,V]
        call @matmul_1 axes(m: c, n: V, k: K) t5[m, n] <- matmul x[(b), m + (r), k], w[n, k]
        call @matmul_2 axes(m: V, n: K, k: c) dw[(b), m, n] += matmul t5[k, m], x[(b), k + (r), n]
      }
      loop rows(r2: N) by(64) count(c2) tile(mma, warps 4, stages 2) {
        sweep cols(v: V) by(64) count(w) {
          carry top: f32[c2] max
          carry total: f32[c2] sum by exp(top)
          block t6: f32[c2,w]
          kernel @... {
          }
        }
        kernel @... {
        }
      }
      return d.table=g
    }

Grammar (``LINE`` is an end of line; comments, values, names, types, sizes and attributes as in :mod:`gradc.ir.text`)::

    file      ::= ["gradc-ir 1" LINE] program
    program   ::= "program" "@" name "{" LINE assume* buffer* (step | batch)* return "}"
    buffer    ::= ("input" | "output" | "temp" | "forwarded") name ":" type ["of" name] ["slot" INT] LINE
                | "const" name ":" type ["of" name] "=" "[" [attribute ("," attribute)*] "]" LINE
    step      ::= kernel | call | select | loop
    batch     ::= "batch" "{" LINE step step+ "}" LINE          # none of which waits for another
    kernel    ::= "kernel" "@" name "rows" axes "cols" axes ["order" "(" name ")"]
                  ["strategy" "(" [name ":" name ("," name ":" name)*] ")"]
                  "{" LINE (stmt | "phase" LINE)* "}" LINE
    axes      ::= "(" [NAME ":" size ("," NAME ":" size)*] ")"
    stmt      ::= [value "="] name [access | index ("," index)*] [["<-"] value ("," value)*]
                  ["where" value] [attributes] [":" dtype] LINE
    access    ::= [name] "[" [index ("," index)*] "]"
    index     ::= term ("+" term)*                              # bare only after the ops "index" and "in_bounds"
    term      ::= (AXIS | value) ["*" factor] | factor
    factor    ::= INT | NAME | "(" size ")"
    call      ::= "call" "@" name "axes" axes ["parts" "(" NAME ":" axes ("," NAME ":" axes)* ")"]
                  access ("<-" | "+=") name scaled ("," scaled)* ["+" access]
                  ["then" ("gelu" ["keeping" access] | "gelu_grad" "at" access)]
                  ["then" "sum" access "of" ("result" | "first" | "second")] [attributes] LINE
    scaled    ::= access ["*" access ["per" axes]]
    select    ::= "select" [NAME "," NAME "of" name] "{" LINE (("when" predicate | "else") ":" kernel)* "}" LINE
    loop      ::= "loop" ["over" axes ["sequential" "(" NAME ("," NAME)* ")"]]
                  "rows" axes "by" "(" size ")" "count" "(" NAME ")"
                  ["cols" axes "to" "(" size ")"]
                  ["tile" "(" NAME "," "warps" INT "," "stages" INT ["," "split" INT] ["," "parts" INT] ")"] "{" LINE
                  block* sweep* (kernel | call)* "}" LINE
    sweep     ::= "sweep" "cols" axes "by" "(" size ")" "count" "(" NAME ")"
                  ["from" "(" size ")"] ["to" "(" size ")"] "{" LINE carry* block* (kernel | call)* "}" LINE
    block     ::= "block" name ":" type ["slot" INT] LINE
    carry     ::= "carry" name ":" type NAME ["by" "exp" "(" name ")"] LINE
    return    ::= "return" [name "=" name ("," name "=" name)*] LINE

``<-`` precedes the values of a statement that also has a buffer.  ``phase`` lines are derived, and ignored by the
parser.  A name in an index is an axis if the kernel has that axis, else a size; a loop's NAMEs are sizes in its steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .dims import Predicate, Size
from .epilogue import ARGUMENT_WORD, SUMMED, Epilogue
from .kernel import KINDS, Buffer, Call, Carry, Kernel, Loop, Program, Select, Step, Sweep, Tile
from .lexer import VALUE, WORD, Reader
from .node import Note
from .sample import Sample
from .statement import BARE, Axis, Index, Operand, Stmt
from .types import DTYPES

_DTYPE = re.compile(r"\w+", re.ASCII)
_CASE = re.compile(r"when\b([^:]*):|else[ \t]*:")
_NUMBER = re.compile(r"\d+", re.ASCII)


def parse_program(text: str) -> Program:
    """Parses a program, without verifying it (``verify_program``).

    :raises IRFormatError: with line, column and the line itself.
    """
    reader = Reader(text)
    reader.demand("'program @name {'")
    if reader.maybe("gradc-ir"):
        reader.expect("1")
        reader.finish()
        reader.demand("'program @name {'")
    reader.expect("program")
    reader.expect("@")
    name = reader.name("the program's name")
    reader.expect("{")
    reader.finish()
    reader.demand("'return'")
    assumptions = reader.assumptions()
    buffers: dict[str, Buffer] = {}
    notes: dict[str, Note] = {}
    while kind := next((k for k in KINDS if reader.maybe(k)), ""):
        buffer = _buffer(reader, kind, buffers)
        if reader.comment:
            notes[buffer.name] = reader.note()
        reader.demand("'return'")
    steps: list[Step] = []
    batches: list[tuple[int, int]] = []
    while not reader.maybe("return"):
        if reader.maybe("batch"):
            begin = len(steps)
            reader.expect("{")
            reader.finish()
            reader.demand("the closing '}'")
            while not reader.maybe("}"):
                steps.append(_step(reader))
                reader.demand("the closing '}'")
            reader.finish()
            batches.append((begin, len(steps)))
        else:
            steps.append(_step(reader))
        reader.demand("'return'")
    outputs = _pairs(reader, "=", "")
    reader.demand("the closing '}'")
    _close(reader)
    if reader.advance():
        raise reader.fail(f"unexpected {reader.found()} after the end of the program")
    return Program(name, tuple(buffers.values()), tuple(steps), assumptions, outputs, notes, tuple(batches))


def parse_kernel(text: str) -> Kernel:
    """Parses a kernel."""
    reader = Reader(text)
    reader.demand("'kernel @name'")
    kernel = _kernel(reader)
    if reader.advance():
        raise reader.fail(f"unexpected {reader.found()} after the end of the kernel")
    return kernel


def _close(reader: Reader) -> None:
    reader.expect("}")
    reader.finish()


def _pairs(reader: Reader, between: str, stop: str) -> tuple[tuple[str, str], ...]:
    """``a=b, c=d`` up to ``stop`` (the end of the line if empty)."""
    pairs: dict[str, str] = {}
    while not (reader.maybe(stop) if stop else reader.at_end()):
        if pairs:
            reader.expect(",")
        reader.at_end()
        start = reader.at
        name = reader.name("a name")
        if name in pairs:
            raise reader.fail(f"{name} is named twice", start, reader.at)
        reader.expect(between)
        pairs[name] = reader.name("a name")
    return tuple(pairs.items())


def _buffer(reader: Reader, kind: str, known: dict[str, Buffer]) -> Buffer:
    reader.at_end()
    start = reader.at
    name = reader.name("a buffer's name")
    if name in known:
        raise reader.fail(f"the buffer {name} is defined twice", start, reader.at)
    reader.expect(":")
    type_ = reader.type()
    alias = reader.name("the buffer it is an alias of") if reader.maybe("of") else ""
    if alias and alias not in known:
        raise reader.fail(
            f"{name} is an alias of {alias}, which is not defined above it", reader.at - len(alias), reader.at
        )
    slot = -1
    if reader.maybe("slot"):
        reader.at_end()
        start, number = reader.at, reader.value()
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise reader.fail("a slot is a number", start, reader.at)
        slot = number
    value: Any = ()
    if kind == "const":
        reader.expect("=")
        reader.at_end()
        start, value = reader.at, reader.value()
        if not isinstance(value, tuple) or not all(isinstance(v, bool | int | float) for v in value):
            raise reader.fail("a constant's elements are a list of numbers", start, reader.at)
    reader.finish()
    buffer = known[name] = Buffer(name, type_, kind, alias, value, slot)
    return buffer


def _step(reader: Reader) -> Step:
    start = reader.at
    if reader.maybe("select"):
        sample = None
        if not reader.maybe("{"):
            skew = reader.name("'{' or the name of a number of a sample")
            reader.expect(",")
            locality = reader.name("the name of another number")
            reader.expect("of")
            sample = Sample(skew, locality, reader.name("the name of a buffer"))
            reader.expect("{")
        reader.finish()
        reader.demand("the closing '}'")
        cases: list[tuple[Predicate | None, Kernel]] = []
        while not reader.maybe("}"):
            at = reader.at
            case = reader.take(_CASE, "'when SIZE >= SIZE:' or 'else:'")
            predicate = None if case.startswith("else") else reader.predicate(case[4:-1], at + 4)
            cases.append((predicate, _kernel(reader)))
            reader.demand("the closing '}'")
        reader.finish()
        if not cases:
            raise reader.fail("a select without cases", start, reader.at)
        return Select(tuple(cases), sample)
    if reader.maybe("loop"):
        return _loop(reader)
    return _item(reader, "a kernel, a call, a select, a loop or 'return'")


def _item(reader: Reader, expected: str) -> Kernel | Call:
    start = reader.at
    if reader.maybe("call"):
        return _call(reader)
    if reader.maybe("kernel"):
        reader.at = start
        return _kernel(reader)
    raise reader.fail(f"expected {expected}, found {reader.found()}")


def _loop(reader: Reader) -> Loop:
    over = _read_axes(reader) if reader.maybe("over") else ()
    sequential = _names(reader) if over and reader.maybe("sequential") else ()
    reader.expect("rows")
    rows, by, count = _cut(reader, "rows")
    cols: tuple[Axis, ...] = ()
    to: Size = 0
    if reader.maybe("cols"):
        cols = (_one_axis(reader, "columns"),)
        reader.expect("to")
        to = _in_parentheses(reader)
    tile = _tile(reader) if reader.maybe("tile") else None
    reader.expect("{")
    reader.finish()
    blocks: dict[str, Buffer] = {}
    sweeps: list[Sweep] = []
    steps: list[Kernel | Call] = []
    reader.demand("the closing '}'")
    while not reader.maybe("}"):
        if not steps and not sweeps and reader.maybe("block"):
            _buffer(reader, "block", blocks)
        elif not steps and reader.maybe("sweep"):
            sweeps.append(_sweep(reader))
        else:
            steps.append(_item(reader, "a kernel, a call or '}'"))
        reader.demand("the closing '}'")
    reader.finish()
    if not steps and not sweeps:
        raise reader.fail("a loop without steps")
    return Loop(over, rows, by, count, tuple(blocks.values()), tuple(steps), cols, to, sequential, tuple(sweeps), tile)


def _sweep(reader: Reader) -> Sweep:
    reader.expect("cols")
    cols, by, count = _cut(reader, "columns")
    since = _in_parentheses(reader) if reader.maybe("from") else 0
    to = _in_parentheses(reader) if reader.maybe("to") else None
    reader.expect("{")
    reader.finish()
    carries: list[Carry] = []
    blocks: dict[str, Buffer] = {}
    steps: list[Kernel | Call] = []
    reader.demand("the closing '}'")
    while not reader.maybe("}"):
        if not steps and not blocks and reader.maybe("carry"):
            carries.append(_carry(reader))
        elif not steps and reader.maybe("block"):
            _buffer(reader, "block", blocks)
        else:
            steps.append(_item(reader, "a kernel, a call or '}'"))
        reader.demand("the closing '}'")
    reader.finish()
    if not steps:
        raise reader.fail("a sweep without steps")
    return Sweep(cols, by, count, tuple(carries), tuple(blocks.values()), tuple(steps), since, to)


def _carry(reader: Reader) -> Carry:
    name = reader.name("a carry's name")
    reader.expect(":")
    type_ = reader.type()
    combine = reader.name("what it combines by")
    by = ""
    if reader.maybe("by"):
        reader.expect("exp")
        reader.expect("(")
        by = reader.name("the carried maximum")
        reader.expect(")")
    reader.finish()
    return Carry(name, type_, combine, by)


def _tile(reader: Reader) -> Tile:
    reader.expect("(")
    mapping, numbers = reader.name("the mapping of a tile"), dict[str, int]()
    for word in ("warps", "stages"):
        reader.expect(",")
        reader.expect(word)
        numbers[word] = _number_of_tile(reader, word)
    more: tuple[str, ...] = ("split", "parts")
    while more and reader.maybe(","):
        word = more[0]
        if not reader.maybe(word):
            word = more[-1]
            reader.expect(word)
        numbers[word], more = _number_of_tile(reader, word), more[more.index(word) + 1 :]
    reader.expect(")")
    return Tile(mapping, **numbers)


def _number_of_tile(reader: Reader, word: str) -> int:
    reader.at_end()
    start, number = reader.at, reader.value()
    if not isinstance(number, int) or isinstance(number, bool):
        raise reader.fail(f"the {word} of a tile are a number", start, reader.at)
    return number


def _cut(reader: Reader, kind: str) -> tuple[Axis, Size, str]:
    """An axis that is cut into blocks: the axis, the size of a block, the name of the number of its elements."""
    axis = _one_axis(reader, kind)
    reader.expect("by")
    by = _in_parentheses(reader)
    reader.expect("count")
    reader.expect("(")
    count = reader.name(f"the name of the number of a block's {kind}")
    reader.expect(")")
    return axis, by, count


def _one_axis(reader: Reader, kind: str) -> Axis:
    start = reader.at
    axes = _read_axes(reader)
    if len(axes) != 1:
        raise reader.fail(f"a loop cuts one axis of {kind}, not {len(axes)}", start, reader.at)
    return axes[0]


def _in_parentheses(reader: Reader) -> Size:
    reader.expect("(")
    size = reader.size()
    reader.expect(")")
    return size


def _names(reader: Reader) -> tuple[str, ...]:
    """NAMEs in parentheses, one at least."""
    reader.expect("(")
    names = [reader.name("the name of an axis")]
    while reader.maybe(","):
        names.append(reader.name("the name of an axis"))
    reader.expect(")")
    return tuple(names)


def _read_axes(reader: Reader) -> tuple[Axis, ...]:
    axes: dict[str, Size] = {}
    reader.expect("(")
    while not reader.maybe(")"):
        if axes:
            reader.expect(",")
        reader.at_end()
        start = reader.at
        name = reader.name("the name of an axis")
        if name in axes:
            raise reader.fail(f"the axis {name} is named twice", start, reader.at)
        reader.expect(":")
        axes[name] = reader.size()
    return tuple(axes.items())


def _call(reader: Reader) -> Call:
    reader.expect("@")
    name = reader.name("the call's name")
    reader.expect("axes")
    axes = _read_axes(reader)
    parts = _parts(reader) if reader.maybe("parts") else ()
    known = dict((*axes, *(part for _, own in parts for part in own)))
    out = _access(reader, known)
    add = reader.maybe("+=")
    if not add:
        reader.expect("<-")
    op = reader.name("the name of a library op")
    args: list[Operand] = []
    while not args or reader.maybe(","):
        operand, scale = _access(reader, known), _access(reader, known) if reader.maybe("*") else None
        args.append(
            replace(operand, scale=replace(scale, per=_read_axes(reader)) if scale and reader.maybe("per") else scale)
        )
    epilogue = _epilogue(reader, known)
    attrs = tuple((key, value) for key, (value, _, _) in reader.attributes().items())
    reader.finish()
    return Call(name, op, axes, out, tuple(args), reader.note(), add, parts, epilogue, attrs)


def _epilogue(reader: Reader, known: Mapping[str, Size]) -> Epilogue[Operand]:
    """``+ v[n] then gelu keeping h[m, n] then sum s[n] of result``, without those that are not there."""
    epilogue: Epilogue[Operand] = Epilogue(_access(reader, known) if reader.maybe("+") else None)
    then = reader.maybe("then")
    function = next((name for name in ARGUMENT_WORD if then and reader.maybe(name)), None)
    if function is not None:
        argument = _access(reader, known) if reader.maybe(ARGUMENT_WORD[function]) else None
        epilogue = replace(epilogue, function=function, argument=argument)
        then = reader.maybe("then")
    if then:
        reader.expect("sum")
        sums = _access(reader, known)
        reader.expect("of")
        summed = next((each for each in SUMMED if reader.maybe(each)), None)
        if summed is None:
            raise reader.fail(f"expected {', '.join(SUMMED)}, found {reader.found()}")
        epilogue = replace(epilogue, sums=sums, summed=summed)
    return epilogue


def _parts(reader: Reader) -> tuple[tuple[str, tuple[Axis, ...]], ...]:
    reader.expect("(")
    parts: dict[str, tuple[Axis, ...]] = {}
    while not reader.maybe(")"):
        if parts:
            reader.expect(",")
        axis = reader.name("an axis")
        reader.expect(":")
        if axis in parts:
            raise reader.fail(f"the parts of the axis {axis} stand twice")
        parts[axis] = _read_axes(reader)
    return tuple(parts.items())


def _kernel(reader: Reader) -> Kernel:
    reader.expect("kernel")
    reader.expect("@")
    name = reader.name("the kernel's name")
    reader.expect("rows")
    rows = _read_axes(reader)
    reader.expect("cols")
    cols = _read_axes(reader)
    order = ""
    if reader.maybe("order"):
        reader.expect("(")
        order = reader.name("a buffer's name")
        reader.expect(")")
    strategy: tuple[tuple[str, str], ...] = ()
    if reader.maybe("strategy"):
        reader.expect("(")
        strategy = _pairs(reader, ":", ")")
    reader.expect("{")
    reader.finish()
    note = reader.note()
    axes = dict((*rows, *cols))
    body: list[Stmt] = []
    defined: set[str] = set()
    reader.demand("the closing '}'")
    while not reader.maybe("}"):
        start = reader.at
        if reader.maybe("phase") and reader.at_end():
            reader.demand("the closing '}'")
            continue
        reader.at = start
        s = _stmt(reader, axes)
        if s.name and s.name in defined:
            raise reader.fail(
                f"{s.name} is defined twice", reader.line.index("%"), reader.line.index("%") + len(s.name)
            )
        defined.add(s.name)
        body.append(s)
        reader.demand("the closing '}'")
    reader.finish()
    return Kernel(name, rows, cols, tuple(body), order, strategy, note)


def _stmt(reader: Reader, axes: Mapping[str, Size]) -> Stmt:
    name = ""
    reader.at_end()
    if reader.line[reader.at] == "%":
        name = reader.take(VALUE, "a value")
        reader.expect("=")
    op = reader.name("the name of a statement")
    buffer = ""
    index: tuple[Index, ...] = ()
    args: list[str] = []
    if op in BARE:
        index = _indices(reader, axes, "")
    elif (
        not reader.at_end()
        and (reader.line[reader.at] == "[" or WORD.match(reader.line, reader.at, reader.end))
        and not _where(reader)
    ):
        operand = _access(reader, axes)
        buffer, index = operand.buffer, operand.index
        if reader.maybe("<-"):
            args.append(reader.take(VALUE, "a value"))
    elif not reader.at_end() and reader.line[reader.at] == "%":
        args.append(reader.take(VALUE, "a value"))
    while args and reader.maybe(","):
        args.append(reader.take(VALUE, "a value"))
    where = reader.take(VALUE, "a value") if reader.maybe("where") else ""
    attrs = tuple((key, value) for key, (value, _, _) in reader.attributes().items())
    dtype = None
    if reader.maybe(":"):
        word = reader.take(_DTYPE, "a dtype")
        dtype = DTYPES.get(word)
        if dtype is None:
            raise reader.fail(
                f"{word[:40]!r} is not a dtype; there are {' '.join(DTYPES)}", reader.at - len(word), reader.at
            )
    reader.finish()
    return Stmt(name, op, tuple(args), dtype, buffer, index, where, attrs)


def _where(reader: Reader) -> bool:
    """Whether the next word is the keyword ``where`` and not a buffer's name."""
    start = reader.at
    keyword = reader.maybe("where") and not reader.at_end() and reader.line[reader.at] != "["
    reader.at = start
    return keyword


def _access(reader: Reader, axes: Mapping[str, Size]) -> Operand:
    reader.at_end()
    buffer = "" if reader.line.startswith("[", reader.at) else reader.name("a buffer's name")
    reader.expect("[")
    return Operand(buffer, _indices(reader, axes, "]"))


def _indices(reader: Reader, axes: Mapping[str, Size], stop: str) -> tuple[Index, ...]:
    indices: list[Index] = []
    if stop and reader.maybe(stop):
        return ()
    while True:
        indices.append(_index(reader, axes))
        if not reader.maybe(","):
            break
    if stop:
        reader.expect(stop)
    return tuple(indices)


def _index(reader: Reader, axes: Mapping[str, Size]) -> Index:
    const: Any = 0
    terms: dict[str, Size] = {}
    while True:
        reader.at_end()
        start = reader.at
        if reader.line.startswith("%", start):
            variable = reader.take(VALUE, "a value")
        else:
            word = WORD.match(reader.line, start, reader.end)
            variable = word[0] if word and word[0] in axes else ""
            reader.at += len(variable)
        if not variable:
            const = const + _factor(reader)
        elif variable in terms:
            raise reader.fail(f"{variable} stands twice in an index", start, reader.at)
        else:
            terms[variable] = _factor(reader) if reader.maybe("*") else 1
        if not reader.maybe("+"):
            return Index(const, tuple(terms.items()))


def _factor(reader: Reader) -> Size:
    reader.at_end()
    if reader.maybe("("):
        size = reader.size()
        reader.expect(")")
        return size
    start, line = reader.at, reader.line
    word = _NUMBER.match(line, start, reader.end) or WORD.match(line, start, reader.end)
    if not word:
        raise reader.fail(f"expected an axis, a value, a number or '(', found {reader.found()}")
    return reader.size_of(word[0])
