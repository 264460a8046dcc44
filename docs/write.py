"""docs/ops.md, written from the records of the ops: ``python docs/write.py [FILE]`` writes it, ``--check`` says whether
it is stale.

Everything in it is read off a record: the signature and options are the type rule's, the dtypes are those the type rule
takes, a gradient is the text of the vjp (or its own words where it is longer than one expression), the targets are
those its lowering has.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradc import ops
from gradc.analysis.strategies import STRATEGIES
from gradc.errors import GradcError
from gradc.ir.annotations import describe
from gradc.ir.graph import input_node
from gradc.ir.node import Node
from gradc.ir.op import Composite, Function, Library, Op, Primitive, Sample
from gradc.ir.size_text import parse_size
from gradc.ir.types import DTYPES, DType, Type, parse_type, typeof
from gradc.ir.walk import topological
from gradc.process import files

FILE = "docs/ops.md"
HEAD = """# Ops

Written by `python docs/write.py` from the records in `gradc/ops`; do not edit (`make docs` writes it anew, a test fails
when it is stale).

Each op is `gradc.ops.NAME`. *Dtypes* are what its type rule takes, *alike* meaning one dtype for these operands.
*Options* are its attributes. In a *gradient*, `g` is the cotangent of the result `y`; `ZERO` is a derivative that
exists and is zero, `DISCRETE` an operand (an index, a predicate) through which none passes. A gradient that is longer
than one expression is given in its own words, with the name of the function that writes it. An op *by its
decomposition* is opened into other ops before it is differentiated; one whose gradient is *that of the ops that it
writes* leaves no node of its own in a graph.
"""


@functools.cache
def _assigned(module: str) -> frozenset[str]:
    """The names that a module binds itself, at its top level."""
    names: set[str] = set()
    for statement in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [statement.target]
            if isinstance(statement, ast.AnnAssign)
            else []
        )
        names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return frozenset(names)


def home(op: Op) -> str:
    """The module whose record it is."""
    for module in sorted(name for name in sys.modules if name.startswith("gradc.ops.")):
        if any(value is op and name in _assigned(module) for name, value in vars(sys.modules[module]).items()):
            return module
    return str(op.infer.__module__) if op.infer is not None else "gradc.ops"


def title(module: str) -> str:
    """A module's section: its family, and itself."""
    return module.removeprefix("gradc.ops.").replace(".", ": ")


# -- how it is called --------------------------------------------------------------------------------------------------


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else value.name if isinstance(value, DType) else str(value)


def signature(op: Op) -> str:
    """``gather(x, indices, axis=0, ...)``."""
    parts, starred = [], False
    for p in inspect.signature(op).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            parts.append(f"*{p.name}")
            starred = True
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(p.name if p.default is p.empty else f"{p.name}={_value(p.default)}")
    return f"{op.name}({', '.join(parts)})"


def options(op: Op) -> dict[str, str]:
    """Attribute -> what it may be; those of the call's comforts by their annotations."""
    found = {name: describe(p.annotation) for name, p in op.parameters.items()}
    if op.sugar is not None:
        hints = typing.get_type_hints(op.sugar)
        for name in inspect.signature(op.sugar).parameters:
            if name not in found and name not in op.operand_names and hints.get(name, Any) is not Any and name in hints:
                found[name] = describe(hints[name])
    return found


# -- what it takes -----------------------------------------------------------------------------------------------------


def _sizes(value: Any) -> Any:
    return (
        tuple(map(_sizes, value))
        if isinstance(value, tuple)
        else parse_size(value)
        if isinstance(value, str)
        else value
    )


def _attributes(op: Op, sample: Sample) -> dict[str, Any]:
    """The attributes of a sample, with dims for their names."""
    found = {}
    for name, value in sample.attrs.items():
        annotation = str(op.parameters[name].annotation) if name in op.parameters else ""
        sized = (isinstance(value, tuple) and "Literal" not in annotation) or (
            isinstance(value, str) and "Dim" in annotation
        )
        found[name] = _sizes(value) if sized else value
    return found


def _types(sample: Sample) -> list[Type]:
    return [
        parse_type(f"f32{o[1:]}" if o.startswith("F[") else o) if isinstance(o, str) else typeof(o)
        for o in sample.operands
    ]


def _call(op: Op, types: Iterable[Type], attrs: Mapping[str, Any]) -> tuple[Node, ...] | None:
    """The nodes that a call gives, or None where it is refused."""
    operands = [input_node(f"x{k}", type_) for k, type_ in enumerate(types)]
    try:
        if isinstance(op, Function):
            made = op.on(operands, attrs)
        elif op.sugar is None and op.order:
            made = op(**dict(zip(op.operand_names, operands, strict=False)), **attrs)
        else:
            made = op(*operands, **attrs)
        return made if isinstance(made, tuple) else (made,)
    except GradcError:
        return None


def dtypes(op: Op) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Operand -> (the dtypes that the type rule takes there in one of the op's samples, whether others must have it
    too).
    """
    taken: dict[str, set[str]] = {}
    alone: dict[str, set[str]] = {}
    seen: set[tuple[Any, ...]] = set()
    for sample in op.samples:
        types, attrs = _types(sample), _attributes(op, sample)
        words = ((name, v if isinstance(v, str | int | float) else type(v)) for name, v in attrs.items())
        alike = (*((t.dtype.name, len(t.shape)) for t in types), *words)
        if alike in seen or _call(op, types, attrs) is None:
            continue
        seen.add(alike)
        for k, own in enumerate(types):
            if k >= op.required and len(types) < len(op.operand_names) > op.required + 1:
                continue  # of several that may be left out, which one it is depends on the call
            name = op.operand_names[k] if k < len(op.operand_names) else "operands"
            like = [j for j, other in enumerate(types) if other.dtype is own.dtype]
            for dtype in DTYPES.values():
                if dtype.name in alone.get(name, ()):
                    continue  # an earlier sample has shown it
                if _call(op, [t.with_dtype(dtype) if j == k else t for j, t in enumerate(types)], attrs) is not None:
                    taken.setdefault(name, set()).add(dtype.name)
                    alone.setdefault(name, set()).add(dtype.name)
                elif (
                    len(like) > 1
                    and _call(op, [t.with_dtype(dtype) if j in like else t for j, t in enumerate(types)], attrs)
                    is not None
                ):
                    taken.setdefault(name, set()).add(dtype.name)
    return {
        name: (tuple(d for d in DTYPES if d in found), not found <= alone.get(name, set()))
        for name, found in taken.items()
    }


def _dtype_text(names: tuple[str, ...]) -> str:
    if len(names) == len(DTYPES):
        return "any"
    return "any but bool" if set(names) == DTYPES.keys() - {"bool"} else " ".join(names)


# -- its gradient ------------------------------------------------------------------------------------------------------


@functools.cache
def _tree(file: str) -> tuple[str, ast.Module]:
    text = Path(file).read_text(encoding="utf-8")
    return text, ast.parse(text)


def _lambda(function: Any) -> tuple[ast.Lambda, str] | None:
    """The one lambda of the file that a function was made from, and the file's text."""
    code = function.__code__
    text, tree = _tree(code.co_filename)
    places = {
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) != (code.co_firstlineno, 0)
    }
    first = min(places, default=(code.co_firstlineno, 0))
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Lambda)
            and node.lineno == code.co_firstlineno
            and tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs)) == arguments
        ):
            if (
                (node.body.lineno, node.body.col_offset)
                <= first
                <= (node.body.end_lineno or 0, node.body.end_col_offset or 0)
            ):
                return node, text
    return None


def _words(function: Any) -> str:
    """A function's own words: its docstring, else the comments that begin it, else those in it or right above it."""
    if function.__doc__:
        return " ".join(function.__doc__.split("\n\n")[0].split())
    lines, start = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    first = ast.parse(source).body[0].body[0].lineno  # type: ignore[attr-defined]
    comments = [
        (t.start[0], t.string.lstrip("# ").strip())
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    ]
    comments = [(line, said) for line, said in comments if not said.startswith(("type:", "noqa", "fmt:"))]
    ahead = [said for line, said in comments if line < first]
    if comments:
        return " ".join(ahead) or "; ".join(said for _, said in comments)
    above: list[str] = []
    for line in reversed(_tree(function.__code__.co_filename)[0].splitlines()[: start - 1]):
        if not line.startswith("# ") or line.startswith("# --"):
            break
        above.insert(0, line.lstrip("# "))
    return " ".join(above)


def gradient(op: Op) -> str:
    """The vjp as it is written."""
    if isinstance(op, Function):
        return "that of the ops that it writes"
    if op.vjp is None:
        return "by its decomposition" if isinstance(op, Composite) else "none: asking for it is NotDifferentiable"
    vjp = getattr(op.vjp, "written", op.vjp)
    found = _lambda(vjp)
    renamed = ""
    if found is not None:
        node, text = found
        names = [a.arg for a in node.args.args if a.arg not in ("g", "y")]
        source = lambda part: " ".join((ast.get_source_segment(text, part) or "").split())
        if isinstance(node.body, ast.Tuple) and len(node.body.elts) == len(names):
            told = (
                "; ".join(f"`{name}`: `{source(part)}`" for name, part in zip(names, node.body.elts, strict=True))
                or "it has no operands"
            )
            if tuple(names) != op.operand_names[: len(names)]:
                renamed = (
                    f"with {', '.join(f'`{n}`' for n in names)} for"
                    f" {', '.join(f'`{n}`' for n in op.operand_names[: len(names)])}: "
                )
        else:
            told = f"`{source(node.body)}`"
    else:
        said = _words(vjp)
        told = f"{said} (`{vjp.__name__}`)" if said else f"as `{vjp.__name__}` writes it"
    if op.surrogate is not None:
        said = _words(op.surrogate)
        told += (
            "; this is not the derivative of the op itself but of"
            f" `{op.surrogate.__name__}`{f': {said}' if said else ''}"
        )
    return renamed + told if vjp is op.vjp or "g" in inspect.signature(vjp).parameters else f"{renamed}`g` times {told}"


# -- where it runs -----------------------------------------------------------------------------------------------------


def _opened(nodes: Iterable[Node]) -> Iterator[Op]:
    """The primitives and library ops that some nodes come to."""
    pending, seen = [*nodes], {*nodes}
    while pending:
        at = pending.pop()
        inside = [at.op.decompose(*at.operands, **at.attrs)] if isinstance(at.op, Composite) else []
        if not inside and at.op.name != "input":
            yield at.op
        fresh = [n for n in topological([*inside, *at.operands]) if n not in seen]
        seen.update(fresh)
        pending += fresh


def targets(op: Op) -> tuple[str, ...]:
    """The targets that have a meaning, or a lowering, for all that the op comes to."""
    made = next((n for s in op.samples if (n := _call(op, _types(s), _attributes(op, s))) is not None), None)
    inner = list(_opened(made)) if made is not None else [op]
    numpy = all(getattr(o, "reference", None) is not None for o in inner)
    # C and CUDA are written from one lowering
    lowered = all(isinstance(o, Library) or (isinstance(o, Primitive) and o.lower is not None) for o in inner)
    return (*(("numpy",) if numpy else ()), *(("cpu", "cuda") if lowered else ()))


# -- the page ----------------------------------------------------------------------------------------------------------


def entry(op: Op) -> str:
    """One op."""
    lines = [f"### {op.name}", "", f"`{signature(op)}`", ""]
    if op.doc:
        lines += [f"{op.doc}.", ""]
    by: dict[str, list[str]] = {}
    for name, (found, alike) in dtypes(op).items():
        by.setdefault(_dtype_text(found) + (" (alike)" if alike else ""), []).append(name)
    if by:
        lines.append(
            "- dtypes: " + "; ".join(f"{', '.join(f'`{n}`' for n in names)}: {text}" for text, names in by.items())
        )
    if options(op):
        lines.append("- options: " + "; ".join(f"`{name}`: {text}" for name, text in options(op).items()))
    lines += [f"- gradient: {gradient(op)}", f"- targets: {', '.join(targets(op)) or 'none'}"]
    lines.append(f"- source: {op.source + '; ' if op.source else ''}`{home(op).replace('.', '/')}.py`")
    return "\n".join(lines)


def strategies() -> str:
    """The ways to combine rows, as their records have them."""
    where = lambda s: "all" if s.host and s.gpu else "CUDA" if s.gpu else "CPU"
    same_bits = lambda s: "yes" if s.deterministic else "integers"
    rows = [f"| `{s.name}` | {s.text} | {where(s)} | {same_bits(s)} |" for s in STRATEGIES.values()]
    head = ["| strategy | what it does | targets | same bits in every run |", "|---|---|---|---|"]
    return "\n".join(["\n## Reduction strategies\n", "What `reductions=` names and `explain` shows.\n", *head, *rows])


def text() -> str:
    """The whole page: the ops by the module of their record."""
    by: dict[str, list[Op]] = {}
    for name in sorted(ops.REGISTRY):
        op = ops.REGISTRY[name]
        if (op.infer is not None or isinstance(op, Function)) and name not in (
            "input",
            "getitem",
        ):  # what the IR itself writes
            by.setdefault(home(op), []).append(op)
    parts = [HEAD]
    parts += [
        f"- [{title(module)}](#{title(module).replace(': ', '-')}): {' '.join(f'`{op.name}`' for op in by[module])}"
        for module in sorted(by)
    ]
    for module in sorted(by):
        words = (importlib.import_module(module).__doc__ or "").split("\n\n")[0]
        parts.append(f"\n## {title(module)}\n\n{' '.join(words.split())}\n")
        parts.append("\n\n".join(entry(op) for op in by[module]))
    parts.append(strategies())
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is stale."""
    path = Path(next((a for a in arguments if not a.startswith("-")), FILE))
    page = text()
    if "--check" in arguments:
        fresh = path.exists() and path.read_text(encoding="utf-8") == page
        print(f"{path} is {'up to date' if fresh else 'stale: python docs/write.py writes it anew'}")
        return int(not fresh)
    files.make_folder(path.parent)
    files.write(path, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
