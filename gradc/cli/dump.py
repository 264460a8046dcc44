"""dump: prints one stage, all stages, the changes of a pass, or one value in all stages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ..inspect.export import model_explorer, to_dot, to_json
from ..ir.graph import Graph, format_op
from ..ir.kernel import Program
from ..ir.lexer import format_note
from ..ir.node import Note
from ..module.module import Module
from ..passes.manager import Stage
from ..process.files import write
from .model import AS_JSON, Settings, compiled, with_model
from .results import coloured, say_json


def _onnx(graph: Graph) -> bytes:
    try:
        from ..onnx.viewer import to_onnx
    except ImportError:
        raise click.UsageError("--format onnx needs the package: pip install 'gradc[onnx]'") from None
    return to_onnx(graph)


DIFFERENCE = {"+": "green", "-": "red", "@": "cyan"}
"""The colours of a diff's lines, by their first character."""
FORMATS: Mapping[str, Callable[[Graph], bytes]] = {
    "dot": lambda graph: to_dot(graph).encode(),
    "json": lambda graph: (json.dumps(to_json(graph), indent=1) + "\n").encode(),
    "model-explorer": lambda graph: (json.dumps(model_explorer(graph), indent=1) + "\n").encode(),
    "onnx": _onnx,
}


@click.command(short_help="The IR after any pass, what a pass changed, one value through all.")
@with_model
@click.option("--after", metavar="PASS", help="The stage after this pass.")
@click.option("--all", "everything", is_flag=True, help="Every stage, in order.")
@click.option("--diff", metavar="PASS", help="What this pass changed, as a unified diff.")
@click.option("--follow", metavar="VALUE", help="The lines with a value of this name after each pass.")
@click.option(
    "--format",
    "form",
    type=click.Choice(tuple(FORMATS)),
    help="The graph, or that of --after, for Graphviz, as data, for Model Explorer, or for Netron.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there, not to the output.")
@AS_JSON
def dump(
    model: str,
    settings: Settings,
    after: str | None,
    everything: bool,
    diff: str | None,
    follow: str | None,
    form: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Print the IR of MODEL; without options, the list of its stages and the input graph.

    \b
    gradc dump model.py:loss --wrt table --after joint
    gradc dump model.py:loss --wrt table --diff sink_dequant
    gradc dump model.py:loss --wrt table --follow hidden
    gradc dump model.py:loss --wrt table --after joint --format dot | dot -Tsvg > joint.svg
    gradc dump model.py:loss --wrt table --after joint --format onnx -o joint.onnx
    """
    if sum((after is not None, everything, diff is not None, follow is not None)) > 1:
        raise click.UsageError("--after, --all, --diff and --follow: one at a time")
    if output is not None and form is None:
        raise click.UsageError("-o is for --format; the shell's > writes a text to a file")
    if form is not None and (everything or diff is not None or follow is not None):
        raise click.UsageError("--format is of one graph: the model's, or that of --after")
    if as_json and not (after is None and not everything and diff is None and follow is None and form is None):
        raise click.UsageError("--json is of the list of stages; --format json is of a graph")
    module = compiled(model, settings, calls=False)
    with settings.waiting(f"running the passes of {module.graph.name}"):
        stages = list(module.stages)
    if form is not None:
        _write(stages[_find(stages, after) if after is not None else 0], form, output)
    elif after is not None:
        click.echo(str(stages[_find(stages, after)]))
    elif everything:
        for stage in stages:
            click.echo(f"# ---- {stage.name} ----\n{stage}\n")
    elif diff is not None:
        for line in difference(stages, _find(stages, diff)).splitlines():
            click.echo(coloured(line, DIFFERENCE[line[:1]]) if line[:1] in DIFFERENCE else line)
    elif follow is not None:
        click.echo(following(module, stages, follow))
    elif as_json:
        say_json([asdict(each) for each in listed(stages)])
    else:
        click.echo(listing(stages))
        click.echo(f"\n{stages[0]}")


def _write(stage: Stage, form: str, output: Path | None) -> None:
    """A graph in a format of other tools."""
    if not isinstance(stage.result, Graph):
        raise click.BadParameter(f"--format is for graphs, and after {stage.name} there is a program of kernels")
    data = FORMATS[form](stage.result)
    if output is None:
        click.echo(data, nl=False)
    else:
        write(output, data)
        click.echo(f"wrote {output}")


def _find(stages: list[Stage], name: str) -> int:
    for number, stage in enumerate(stages):
        if stage.name == name:
            return number
    close = difflib.get_close_matches(name, [s.name for s in stages], 1)
    raise click.BadParameter(
        f"there is no pass {name!r}; {f'did you mean {close[0]}? ' if close else ''}the passes are"
        f" {', '.join(s.name for s in stages)}"
    )


def _before(stages: list[Stage], number: int) -> Stage | None:
    """The stage that a pass started from; None if there is none of the same kind and program."""
    if number == 0:
        return None
    stage, last = stages[number], stages[number - 1]
    same_kind = isinstance(stage.result, Graph) == isinstance(last.result, Graph)
    same_program = isinstance(stage.result, Graph) or stage.name.split(".")[0] == last.name.split(".")[0]
    return last if same_kind and same_program else None


@dataclass(frozen=True)
class Listed:
    """A stage in the list.

    :ivar before: the size of what its pass was given, None where it starts anew.
    """

    name: str
    kind: str
    size: int
    seconds: float
    before: int | None
    changed: bool


def listed(stages: list[Stage]) -> Iterator[Listed]:
    """The stages by name, with sizes, times and changes."""
    for number, stage in enumerate(stages):
        last = _before(stages, number)
        kind = "graph" if isinstance(stage.result, Graph) else "program"
        changed = last is None or last.result != stage.result
        yield Listed(stage.name, kind, stage.size, stage.seconds, None if last is None else last.size, changed)


def listing(stages: list[Stage]) -> str:
    """The list as text."""
    lines = []
    for each in listed(stages):
        change = "" if each.before is None else f"{each.before} -> {each.size}" if each.changed else "unchanged"
        unit = "nodes" if each.kind == "graph" else "steps"
        lines.append(f"{each.name:<28} {each.size:>5} {unit}  {each.seconds * 1e3:8.1f} ms  {change}".rstrip())
    return "\n".join(lines)


# -- what a pass changed -----------------------------------------------------------------------------------------------


def difference(stages: list[Stage], number: int) -> str:
    """A unified diff; a value has the same number in both graphs, so that only actual changes are shown."""
    stage, last = stages[number], _before(stages, number)
    if last is None:
        return f"# {stage.name} starts anew, so all of it is new\n{stage}"
    if last.result == stage.result:
        return f"# {stage.name} changed nothing"
    old, new = str(last).splitlines(), str(stage).splitlines()
    return "\n".join(difflib.unified_diff(old, new, f"before {stage.name}", f"after {stage.name}", lineterm="", n=2))


# -- one value through the stages --------------------------------------------------------------------------------------


def following(module: Module, stages: list[Stage], value: str) -> str:
    """For each stage, the lines with the value: named so by the user, or an input, an output or a cotangent of this
    name.
    """
    lines: list[str] = []
    seen, last = False, False
    for stage in stages:
        in_graph = isinstance(stage.result, Graph)
        held = list(
            dict.fromkeys(
                _graph_lines(stage.result, value)
                if isinstance(stage.result, Graph)
                else _program_lines(stage.result, value)
            )
        )
        if held:
            note = ""
        elif not seen:
            note = "(not yet)"
        elif not in_graph:
            note = "(inside a kernel, or in the other program)"
        else:
            note = f"(rewritten here: --diff {stage.name} shows how)" if last else "(gone)"
        lines += [f"{stage.name}:", *(f"  {line}" for line in held or [note])]
        seen, last = seen or bool(held), bool(held)
    if not seen:
        known = dict.fromkeys(
            [
                *module.graph.input_names,
                *module.graph.output_names,
                *(_full(n) for n in module.graph.notes.values() if n.name),
            ]
        )
        close = difflib.get_close_matches(value, known, 1)
        raise click.BadParameter(
            f"no value is called {value!r}{f'; did you mean {close[0]}?' if close else ''} The names:"
            f" {', '.join(known)}"
        )
    return "\n".join(lines)


def _full(note: Note) -> str:
    return f"{note.scope}/{note.name}" if note.scope else note.name


def _is(note: Note | None, value: str) -> bool:
    return note is not None and bool(note.name) and value in (note.name, _full(note))


def _graph_lines(graph: Graph, value: str) -> Iterator[str]:
    names = graph.value_names
    for node in graph.nodes:
        if node.op.name == "input":
            if graph.input_name(node) in (value, f"d.{value}", f"r.{value}"):
                yield f"input {names[node]}: {node.type}"
        elif _is(graph.notes.get(node), value) or any(
            name in (value, f"d.{value}", f"r.{value}") and n is node for name, n in graph.outputs
        ):
            outputs = ", ".join(name for name, n in graph.outputs if n is node)
            yield f"{format_op(node, names)}{format_note(graph.notes.get(node))}{f'  -> {outputs}' if outputs else ''}"


def _program_lines(program: Program, value: str) -> Iterator[str]:
    """The lines of its buffer, of statements that read or write it, and of kernels named after it."""
    last = value.rsplit("/", 1)[-1]
    buffers = {
        b.name
        for b in program.buffers
        if b.name in (last, f"r.{last}", f"d.{last}") or _is(program.notes.get(b.name), value)
    }
    for b in program.buffers:
        if b.name in buffers:
            yield f"{b.kind} {b.name}: {b.type}"
    kernel = ""
    for line in str(program).splitlines():
        words = line.split()
        if "kernel" in words or "call" in words:
            kernel = words[words.index("kernel" if "kernel" in words else "call") + 1]
            if "  # " in line and _is_comment(line.rsplit("  # ", 1)[1], value):
                yield line.strip()
        touched = any(f" {b}[" in line for b in buffers)
        if touched:
            yield f"{kernel}: {line.strip()}" if "call" not in words else line.strip()


def _is_comment(comment: str, value: str) -> bool:
    name = comment.split()[0] if comment.split() else ""
    return name == value or name.rsplit("/", 1)[-1] == value
