"""export: writes a compiled model as sources that need neither Python nor gradc."""

from __future__ import annotations

from pathlib import Path

import click

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
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the sample arrays.")
def export(model: str, settings: Settings, output: Path, lang: str, seed: int) -> None:
    """Write MODEL as a folder of C: a header, kernels, the runtime, a Makefile, CMakeLists.txt, and main.c.

    The latter checks forward and backward on sample arrays of the sizes --dims.

    \b
    gradc export model.py:loss --wrt w --dims N=64 -o loss
    make -C loss && cd loss && ./loss_main
    """
    module = compiled(model, settings)
    sizes = {name: size for name, size in settings.dims.items() if name not in (module.options.dims or {})}
    with settings.waiting("writing"):
        module.export(output, lang=lang, dims=sizes, seed=seed)
    names = ", ".join(sorted(path.name for path in output.iterdir()))
    click.echo(f"wrote {output}: {names}")
    click.echo(f"make -C {output} builds it; its main program, run in the folder, checks it")
