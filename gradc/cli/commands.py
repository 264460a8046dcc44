"""The commands compile, run, explain, check and demo."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import IndexOutOfRange
from ..inspect.explain import summary
from ..inspect.report import as_json as content_json
from ..inspect.report import content, kernel_entries
from ..inspect.trace_events import chrome_trace
from ..module.module import Module
from ..process.files import write, write_into
from ..runtime.host.arrays import Results
from ..verify.check import check as check_gradients
from ..verify.samples import cotangents, sample
from .model import (
    AS_JSON,
    INPUTS,
    SEED,
    Settings,
    compiled,
    floats,
    input_types,
    open_model,
    open_program,
    read_arrays,
    with_model,
)
from .program import compile_program, emit_program, run_program
from .results import Ran, say_json, way_of

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(short_help="Compile; write its IR, C, explanation, or the whole module.")
@with_model
@click.option(
    "--emit",
    metavar="ir,c,explain",
    help=(
        "What to write into -o: every stage (ir), every kernel's C (c) or CUDA (cu, ptx, cubin with --target cuda), the"
        " explanation."
    ),
)
@click.option("-o", "--output", type=FOLDER, help="The folder for --emit.")
@click.option("--save-module", type=click.Path(path_type=Path), help="Write a file that runs again without compiling.")
@AS_JSON
def compile(
    model: str, settings: Settings, emit: str | None, output: Path | None, save_module: Path | None, as_json: bool
) -> None:
    """Compile MODEL, or a program as text, and print one line per kernel.

    \b
    gradc compile model.gir --wrt w,b
    gradc compile model.py:loss --wrt params --emit ir,c,explain -o out
    gradc compile model.py:loss --type x=f32[N,4] --save-module loss.gradc
    gradc compile model.gir --wrt w --target cuda --arch sm_90 --emit ir,cu,ptx,cubin,explain -o out
    """
    wanted = [part.strip() for part in (emit or "").split(",") if part.strip()]
    known = (
        ("ir", "cu", "ptx", "cubin", "explain")
        if settings.target == "cuda"
        else ("ir", "cu", "explain")
        if settings.target == "cuda-sim"
        else ("ir", "c", "explain")
    )
    unknown = set(wanted) - set(known)
    if unknown:
        raise click.BadParameter(
            f"--emit {min(unknown)}: there are"
            f" {', '.join(known)}{'' if settings.target else '; cu, ptx, cubin with --target cuda'}"
        )
    if bool(wanted) != (output is not None):
        raise click.UsageError("--emit and -o belong together: --emit ir,c,explain -o FOLDER")
    began = time.perf_counter()
    if (program := open_program(model)) is not None:
        if save_module is not None:
            raise click.UsageError("--save-module is for graphs; a program has neither graph nor residuals")
        executable = compile_program(program, settings)
        seconds = time.perf_counter() - began
        written = emit_program(executable, wanted, output) if output is not None else 0
        if as_json:
            steps = [{"name": each.name, "strategy": way_of(each)} for each in executable.program.kernels]
            say_json({"name": program.name, "target": executable.target, "seconds": seconds, "kernels": steps})
            return
        click.echo(f"{executable}\ncompiled in {seconds:.2f} s")
        if output is not None:
            click.echo(f"wrote {written} files to {output}")
        return
    module = compiled(model, settings, calls=save_module is not None)  # whose file has the pool's machine code
    seconds = time.perf_counter() - began
    with settings.waiting("writing"):
        written = _emit(module, wanted, output, settings.dims) if output is not None else 0
        if save_module is not None:
            module.save(save_module)
    if as_json:
        _say_module(module, settings.dims, seconds)
        return
    click.echo(f"{summary(module, settings.dims)}\ncompiled in {seconds:.2f} s")
    if output is not None:
        click.echo(f"wrote {written} files to {output}")
    if save_module is not None:
        click.echo(f"saved to {save_module}; gradc.load_module({str(save_module)!r}) loads it")


def _say_module(module: Module, dims: Mapping[str, int], seconds: float) -> None:
    """A module's table as JSON: the kernels of gradc explain --json without their texts."""
    kernels = [asdict(entry) for entry in kernel_entries(module, dims)]
    shown = [{name: value for name, value in each.items() if name not in ("ir", "source", "of")} for each in kernels]
    facts = {"name": module.graph.name, "target": module.target, "wrt": list(module.wrt), "seconds": seconds}
    say_json({**facts, "kernels": shown})


def _emit(module: Module, wanted: Sequence[str], folder: Path, dims: Mapping[str, int]) -> int:
    files: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    if "ir" in wanted:
        files |= {f"{number:02d}-{stage.name}.gir": str(stage) for number, stage in enumerate(module.stages)}
    if "c" in wanted:
        files |= {f"kernels/{name}.c": kernel.source for name, kernel in module.kernels.items()}
        files |= {f"{name}.c": executable.source for name, executable in module.executables.items()}
    if "cu" in wanted:
        files |= {f"kernels/{name}.cu": kernel.source for name, kernel in module.kernels.items()}
        files |= {f"{name}.cu": executable.source for name, executable in module.executables.items()}
    if "ptx" in wanted:
        files |= {f"{name}.ptx": executable.binary.ptx for name, executable in module.executables.items()}
    if "cubin" in wanted:
        binaries = {
            f"{name}.{executable.binary.arch}.cubin": executable.binary.cubin
            for name, executable in module.executables.items()
        }
    if "explain" in wanted:
        files["explain.txt"] = module.explain(**dims)
    texts = {name: (text.rstrip("\n") + "\n").encode() for name, text in files.items()}
    write_into(folder, {**texts, **binaries})
    return len(texts) + len(binaries)


@click.command(short_help="Run on arrays from files, or on random ones.")
@with_model
@INPUTS
@SEED
@click.option("--grad", is_flag=True, help="Run backward too; without --wrt, for every float input.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write results to an .npz file.")
@AS_JSON
def run(
    model: str,
    settings: Settings,
    inputs: tuple[str, ...],
    seed: int,
    grad: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run MODEL, or a program as text, once; print the shape and statistics of every result.

    The text of a program is what gradc dump, or print(module.backward.program), shows, edited or not; - is the standard
    input. The cotangent of a scalar is 1; those of other outputs are random, from --seed. Dims that neither --dims nor
    an input determines get small sizes.

    \b
    gradc run model.gir --input x=x.npy --out y.npz
    gradc run model.py:loss --dims N=64 --seed 1 --grad --wrt w
    gradc dump model.py:loss --wrt w --after backward.plan_buffers | gradc run - --dims N=64
    """
    if (program := open_program(model)) is not None:
        if grad:
            raise click.UsageError("--grad is for graphs; a program is run as it is")
        run_program(program, settings, inputs, seed, out, as_json)
        return
    opened = open_model(model, settings.types, settings.native)
    graph = opened.graph if isinstance(opened, Module) else opened
    wrt = settings.wrt or (opened.wrt if isinstance(opened, Module) else ()) or (floats(graph) if grad else ())
    module = compiled(model, settings, wrt)
    given = read_arrays(inputs, input_types(graph), graph.name)
    drawn_arrays, dims = sample(graph, settings.dims, seed, given)
    arrays: Results = dict(drawn_arrays)
    drawn = [n for n in graph.input_names if n not in given and n not in graph.defaults]
    began = time.perf_counter()
    results: Results = {}
    with settings.waiting("running"):
        try:
            value, residuals = module.forward(
                dims={d: n for d, n in dims.items() if d in module.forward.program.dims}, **arrays
            )
        except IndexOutOfRange as error:
            if drawn:
                error.add_note(f"{', '.join(drawn)} were drawn at random; --input NAME=FILE gives indices that fit")
            raise
        results |= value if isinstance(value, dict) else {graph.output_names[0]: value}
        if grad:
            upstream: Results = {**cotangents(residuals.cotangent_types, dims, seed)}
            gradients = module.backward(
                residuals, dims={d: n for d, n in dims.items() if d in module.backward.program.dims}, **upstream
            )
            results |= {module.joint_names[1][name]: gradient for name, gradient in gradients.items()}
    Ran(graph.name, module.target, dims, seed, drawn, time.perf_counter() - began, results).say(out, as_json)


@click.command(short_help="Bytes, floors, the choice of each reduction, residuals, passes.")
@with_model
@click.option(
    "--timed",
    type=click.IntRange(0),
    default=0,
    help="Run each kernel, and each reduction strategy, this many times on random data, and show the times.",
)
@click.option(
    "--static",
    is_flag=True,
    help="Instead, what the machine code for a GPU says without one: instructions, loops, widths, resident blocks.",
)
@AS_JSON
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write passes and kernels as a trace for Perfetto (ui.perfetto.dev).",
)
def explain(model: str, settings: Settings, timed: int, static: bool, as_json: bool, trace: Path | None) -> None:
    """Explain how MODEL was compiled and why, for --dims or nominal sizes.

    \b
    gradc explain model.py:loss --wrt table --dims N=4096,V=50000 --timed 10
    gradc explain model.py:loss --dims N=4096 --target cuda --arch sm_90 --static
    """
    if static and timed:
        raise click.UsageError("--static runs nothing, and --timed does: give one of them")
    if static and (as_json or trace):
        raise click.UsageError("--static is a text of the machine code; --json and --trace have none of it")
    module = compiled(model, settings, calls=timed > 0)
    if as_json or trace:
        with settings.waiting(f"describing {module.graph.name}"):
            found = content(module, settings.dims, timed)
        if trace:
            write(trace, json.dumps(chrome_trace(found)))
        if as_json:
            click.echo(content_json(found, indent=1))
            return
    with settings.waiting(f"describing {module.graph.name}"):
        text = module.explain_static(**settings.dims) if static else module.explain(timed=timed, **settings.dims)
    click.echo(text)


@click.command(short_help="One HTML file: graphs, passes, kernels, reductions, memory.")
@with_model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file; NAME.html by default.")
@click.option("--timed", type=click.IntRange(0), default=0, help="Run each kernel this many times; show the median.")
def report(model: str, settings: Settings, output: Path | None, timed: int) -> None:
    """Write one HTML file about MODEL to explore offline, for --dims or nominal sizes.

    \b
    gradc report model.py:loss --wrt table --dims N=4096,V=50000 -o loss.html
    """
    module = compiled(model, settings, calls=timed > 0)
    path = output or Path(f"{module.graph.name}.html")
    with settings.waiting(f"describing {module.graph.name}"):
        module.report(path, timed=timed, **settings.dims)
    click.echo(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")


@click.command(short_help="Each gradient against numbers that no vjp made.")
@with_model
@INPUTS
@SEED
@click.option("--kernels/--no-kernels", default=True, help="Also compare the results of the compiled kernels.")
@AS_JSON
def check(model: str, settings: Settings, inputs: tuple[str, ...], seed: int, kernels: bool, as_json: bool) -> int:
    """Check the gradients of MODEL against finite differences in f64 and the adjoint identity, and its kernels too.

    Without --wrt every float input is checked. Ops whose gradient is intentionally not their derivative (quantize) are
    replaced by the function that it is the derivative of; the report lists them. Exit code 1 if a gradient fails.

    \b
    gradc check model.gir --wrt w --dims N=5
    gradc check model.py:loss --input tokens=tokens.npy --no-kernels
    """
    opened = open_model(model, settings.types, settings.native)
    graph = opened.graph if isinstance(opened, Module) else opened
    wrt = settings.wrt or (opened.wrt if isinstance(opened, Module) else ()) or floats(graph)
    subject = compiled(model, settings, wrt) if kernels and wrt else graph
    with settings.waiting(f"checking {graph.name}") as progress:
        report = check_gradients(
            subject,
            subject.wrt if isinstance(subject, Module) else wrt,
            settings.dims,
            seed,
            inputs=read_arrays(inputs, input_types(graph), graph.name),
            progress=progress.say,
        )
    if as_json:
        say_json(asdict(report))
    else:
        click.echo(str(report))
    return 0 if report.ok else 1


@click.command(short_help="Train a quantized language model with gradc's kernels alone.")
@click.option(
    "--steps", type=click.IntRange(1), default=500, show_default=True, help="Training steps, each on 512 contexts."
)
@click.option("--quick", is_flag=True, help="A few steps on a slice of the text, in seconds.")
@click.option("-o", "--output", type=FOLDER, help="The folder for the report and all stages; ./gradc-demo by default.")
@AS_JSON
def demo(steps: int, quick: bool, output: Path | None, as_json: bool) -> int:
    """A quantized language model, differentiated, compiled, trained on real text and measured.

    \b
    gradc demo
    gradc demo --quick -o dump
    """
    from ..demo.train import run

    passed, report = run(steps, quick, str(output) if output is not None else None, quiet=as_json)
    if as_json:
        say_json({"passed": passed, "sections": report.data()})
    return 0 if passed else 1
