"""The ``gradc`` command."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from ..api import VERSION
from ..errors import GradcError
from .bench import bench
from .calibrate import calibrate
from .commands import check, compile, demo, explain, report, run
from .completion import VARIABLE, completion
from .doctor import doctor
from .dump import dump
from .export import export
from .extract import extract
from .opt import opt
from .results import coloured

FINE, FAILED, USERS_MISTAKE, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(VERSION, prog_name="gradc")
def cli() -> None:
    """Compiles forward tensor graphs to modules of fused forward and backward kernels, readable at every stage.

    MODEL is a graph as text (model.gir), a file written by module.save, or file.py:NAME, where NAME is a graph, a
    function decorated with @gradc.graph, or a plain function whose types are given by --type.

    \b
    gradc dump model.py:loss --wrt w --diff sink_dequant
    gradc check model.py:loss --type x=f32[N,4] --type w=f32[4,3] --dims N=5
    gradc doctor

    Exit codes: 0 fine, 1 a check failed, 2 a mistake in what was given, 3 a bug in gradc.
    """


for command in (
    compile,
    dump,
    run,
    explain,
    report,
    check,
    bench,
    opt,
    extract,
    export,
    demo,
    doctor,
    calibrate,
    completion,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the process: nothing to read, and nobody who reads
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))
    try:
        if VARIABLE in os.environ:
            cli.main(prog_name="gradc")
        given = sys.argv[1:] if arguments is None else list(arguments)
        if not given:
            print(cli.get_help(click.Context(cli, info_name="gradc", max_content_width=120)), file=sys.stderr)
            return USERS_MISTAKE
        with cli.make_context("gradc", given) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        text = (
            error.message if isinstance(error, click.BadParameter) and error.param is None else error.format_message()
        )
        text = " ".join(text.split())  # click lists choices one to a line
        print(
            f"{_error()} {text}" + (f"\n  {where.command_path} --help shows how" if where is not None else ""),
            file=sys.stderr,
        )
        return USERS_MISTAKE
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe; Python would report it again at shutdown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except GradcError as error:
        print(describe(error), file=sys.stderr)
        return USERS_MISTAKE
    except OSError as error:
        print(f"{_error()} {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return USERS_MISTAKE
    except MemoryError as error:
        print(f"error: not enough memory: {error}", file=sys.stderr)
        return USERS_MISTAKE
    except Exception as error:
        traceback.print_exc()
        print(
            f"\nThis is a bug of gradc {VERSION}: {type(error).__name__}. Please report it with the text above;"
            " GRADC_DUMP=folder keeps every stage.",
            file=sys.stderr,
        )
        return OUR_BUG
    return result if isinstance(result, int) else FINE


def describe(error: BaseException) -> str:
    """An error as one message: its class, its text, its notes."""
    notes = getattr(error, "__notes__", ())
    return "\n".join(
        [f"{_error()} {type(error).__name__}: {error}", *("  " + line for note in notes for line in note.splitlines())]
    )


def _error() -> str:
    return coloured("error:", "red", sys.stderr)
