"""opt: runs single passes on IR in a file."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..autodiff import differentiate, primal_outputs
from ..compiler import PASSES
from ..ir.graph import Graph
from ..ir.kernel import Program
from ..ir.op import Composite
from ..ir.verify import verify, verify_program
from ..passes.column_blocking.carry_sums import carry_sums
from ..passes.column_blocking.split_loops import split_loops
from ..passes.program.choose_reduction import choose_reduction
from ..passes.program.plan_buffers import plan_buffers
from ..passes.row_blocking.block_rows import block_rows
from ..passes.schedule.partition import Partition, partition
from ..passes.schedule.schedule import schedule
from ..process import files
from .model import names, read_ir


def _alone(function: Callable[..., Any]) -> bool:
    """Whether a pass takes no argument except the graph."""
    return all(p.default is not p.empty for p in list(inspect.signature(function).parameters.values())[1:])


def cut(graph: Graph) -> Partition:
    """A joint graph partitioned into forward and backward at the default residuals."""
    return partition(graph, primal_outputs(graph))


GRAPH_PASSES: dict[str, Callable[..., Any]] = {
    "differentiate": differentiate,
    **{name: p for name, p in PASSES.items() if _alone(p)},
    "forward.partition": lambda graph: cut(graph).forward,
    "backward.partition": lambda graph: cut(graph).backward,
    "schedule": schedule,
}
PROGRAM_PASSES: dict[str, Callable[..., Any]] = {
    p.__name__: p for p in (choose_reduction, block_rows, split_loops, carry_sums, plan_buffers)
}


@click.command(short_help="Run single passes over IR in a file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-p", "--passes", multiple=True, required=True, metavar="A,B", callback=names, help="The passes, in this order."
)
@click.option(
    "--wrt",
    multiple=True,
    metavar="A,B",
    callback=names,
    help="For differentiate: the inputs to differentiate by.",
)
@click.option("--numerics", type=click.Choice(["real", "strict"]), default="real", help="strict keeps every bit.")
@click.option("--fuse/--no-fuse", default=True, help="For schedule: fuse nodes into kernels, or one kernel per node.")
@click.option("--all", "everything", is_flag=True, help="Print the result of each pass, not only of the last.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file for the result.")
def opt(
    file: Path,
    passes: tuple[str, ...],
    wrt: tuple[str, ...],
    numerics: str,
    fuse: bool,
    everything: bool,
    output: Path | None,
) -> None:
    """Read a graph or a program from FILE, run passes on it, verify after each, and print the result.

    \b
    gradc opt 04-joint.gir -p decompose,upcast,simplify
    gradc opt model.gir -p differentiate,decompose,simplify --wrt w --all
    gradc opt 04-joint.gir -p decompose,simplify,fold,backward.partition,schedule,choose_reduction -o program.gir

    GRADC_DUMP=folder, or gradc compile --emit ir, writes 04-joint.gir. Passes have the names of these files; an unknown
    name lists all passes. forward.partition and backward.partition each give one of the two graphs that a joint graph
    is partitioned into; schedule turns a graph into a program.
    """
    subject = read_ir(str(file))
    texts = []
    for name in passes:
        subject = one(subject, name, wrt, numerics, fuse)
        if isinstance(subject, Graph):
            verify(subject)
        else:
            verify_program(subject)
        texts.append((name, str(subject)))
    text = "\n\n".join(f"# after {name}\n{body}" for name, body in texts) if everything else texts[-1][1]
    if output is None:
        click.echo(text)
    else:
        files.write(output, text, "\n")
        click.echo(f"wrote {output}")


def one(subject: Graph | Program, name: str, wrt: tuple[str, ...], numerics: str, fuse: bool) -> Graph | Program:
    """The graph or program after one pass."""
    here, kind = (GRAPH_PASSES, "graph") if isinstance(subject, Graph) else (PROGRAM_PASSES, "program")
    if name not in here:
        known = f"passes over a {kind}: {', '.join(here)}"
        near = [other for other in here if other.endswith(f".{name}")] or difflib.get_close_matches(name, here, 1)
        known = (f"did you mean {' or '.join(near)}? " if near else "") + known
        raise click.BadParameter(
            f"{name} is no pass over a {kind}; {known}"
            if name in GRAPH_PASSES or name in PROGRAM_PASSES
            else f"there is no pass {name!r}; {known}"
        )
    if name == "differentiate":
        if not wrt:
            raise click.UsageError("differentiate needs --wrt")
        return differentiate(subject, wrt)  # type: ignore[arg-type]
    if name == "schedule" and isinstance(subject, Graph) and any(isinstance(n.op, Composite) for n in subject.nodes):
        whole = next(n.op.name for n in subject.nodes if isinstance(n.op, Composite))
        raise click.BadParameter(
            f"schedule works on primitives, and {whole} is made of others: decompose comes before it"
        )
    known_options = {"numerics": numerics, "fuse": fuse}
    result: Graph | Program = here[name](
        subject, **{k: v for k, v in known_options.items() if k in inspect.signature(here[name]).parameters}
    )
    return result
