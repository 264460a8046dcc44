"""export: writes a compiled model as sources that need neither Python nor gradc."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import click

from ..runtime.host.toolchain import find_compiler
from .model import Settings, compiled, with_model


@click.command(short_help="C sources that need neither Python nor gradc.")
@with_model
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder to write; it does not exist, or is empty.",
)
@click.option("--lang", type=click.Choice(["c"]), default="c", show_default=True, help="The language.")
@click.option(
    "--library", is_flag=True, help="Also build libNAME.a there, by make with the C compiler of CC, or gcc or clang."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the sample arrays.")
def export(model: str, settings: Settings, output: Path, lang: str, library: bool, seed: int) -> None:
    """Write MODEL as a folder of C: a header, kernels, the runtime, a Makefile, CMakeLists.txt, and main.c.

    The latter checks forward and backward on sample arrays of the sizes --dims. With --target cuda the kernels are PTX,
    the sizes are fixed, and all that it needs is the driver.

    \b
    gradc export model.py:loss --wrt w --dims N=64 -o loss
    make -C loss && cd loss && ./loss_main
    gradc export model.py:loss --wrt w --dims N=64 --target cuda --arch sm_80 -o loss_gpu
    """
    module = compiled(model, settings)
    sizes = {name: size for name, size in settings.dims.items() if name not in (module.options.dims or {})}
    with settings.waiting("writing"):
        module.export(output, lang=lang, dims=sizes, seed=seed)
    if library:
        with settings.waiting("building the library"):
            built = _built(output)
        click.echo(f"built {built}")
    names = ", ".join(sorted(path.name for path in output.iterdir()))
    click.echo(f"wrote {output}: {names}")
    click.echo(f"make -C {output} builds it; its main program, run in the folder, checks it")


def _built(folder: Path) -> Path:
    """``libNAME.a``, by the export's own Makefile."""
    name = next(path.stem for path in folder.glob("*.h") if (folder / f"{path.stem}.c").is_file())
    library = folder / f"lib{name}.a"
    make = shutil.which("make")
    if make is None:
        raise click.ClickException(f"--library needs make; or: cmake -B build {folder} && cmake --build build")
    command = [make, "-s", "-C", str(folder), f"CC={shlex.join(find_compiler().argv)}", library.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"make could not build {library}: {done.stderr.strip()[:2000]}")
    return library
