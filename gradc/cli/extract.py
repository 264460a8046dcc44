"""extract: writes one kernel as separate files: its IR, its C source, inputs, expected outputs, and a script that
checks and times it.
"""

from __future__ import annotations

from pathlib import Path

import click

from ..formats.npz import write_arrays
from ..process.files import make_folder, write
from ..verify.samples import SMALL
from .model import Settings, compiled, with_model

SCRIPT = '''\
"""Compiles kernel.c (edit it!), runs it on inputs.npz, compares with the interpreter's results and times it."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import gradc
from gradc.ir.program_text import parse_program
from gradc.runtime.host.toolchain import compile_units

here = Path(__file__).resolve().parent
program = parse_program((here / "kernel.gir").read_text())
dims = {dims}
payload = compile_units([(here / "kernel.c").read_text()])
kernel = gradc.Executable(program, "cpu", dims=dims, payload=payload, sites={{}})


def arrays(file, types):
    with np.load(here / file, allow_pickle=False) as stored:
        return {{n: stored[n].view(t.dtype.np) if t.dtype.np.num > 255 else stored[n] for n, t in types.items()}}


inputs, expected = arrays("inputs.npz", kernel.inputs), arrays("expected.npz", kernel.outputs)
failed = False
for name, got in kernel.run(**inputs).items():
    want = expected[name].astype(np.float64)
    error = np.max(np.abs(got.astype(np.float64) - want), initial=0.0) / max(np.max(np.abs(want), initial=0.0), 1e-30)
    good = error <= {tolerance:g}
    failed |= not good
    verdict = "ok" if good else "WRONG"
    print(f"{{name}}: {{got.dtype}}{{list(got.shape)}}, worst relative error {{error:.1e}}: {{verdict}}")
seconds = []
for _ in range(30):
    call = kernel.bind_call(inputs)
    began = time.perf_counter()
    kernel.launch(call)
    seconds.append(time.perf_counter() - began)
print(f"{{np.median(seconds) * 1e6:.1f}} us, {bytes} bytes: {{{bytes} / np.median(seconds) / 1e9:.2f}} GB/s")
sys.exit(failed)
'''


@click.command(short_help="One kernel as files of its own, with inputs and a checker.")
@with_model
@click.argument("kernel")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder to write."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def extract(model: str, settings: Settings, kernel: str, output: Path, seed: int) -> None:
    """Write KERNEL of MODEL as kernel.gir, kernel.c, inputs.npz, expected.npz and check.py, which compiles, checks and
    times it.

    \b
    gradc extract model.py:loss --wrt table sum_scatter_add_280ac0 -o one --dims N=4096,V=50000
    python one/check.py
    """
    module = compiled(model, settings, calls=False)
    handle = module.kernels.get(kernel) or next(
        (h for n, h in module.kernels.items() if n.rsplit("_", 1)[0] == kernel), None
    )
    if handle is None:
        raise click.BadParameter(module.kernels.lacking(kernel))
    from ..runtime.executable import Executable

    program = handle.executable.program
    dims = {d: settings.dims.get(d, 64 * SMALL[i % len(SMALL)]) for i, d in enumerate(program.dims)}
    with settings.waiting("computing what is expected"):
        inputs = handle.sample(seed, **dims)
        expected = Executable(program, "numpy", dims=dims).run(inputs)
    widest = any(t.dtype.is_float and t.dtype.bits < 32 for t in handle.types.values())
    make_folder(output)
    write(output / "kernel.gir", f"{program}\n")
    write(output / "kernel.c", handle.executable.source)
    for name, arrays in (("inputs", inputs), ("expected", expected)):
        write_arrays(output / f"{name}.npz", arrays)
    script = SCRIPT.format(dims=dims, tolerance=1e-2 if widest else 1e-4, bytes=handle.bytes(**dims))
    write(output / "check.py", script)
    click.echo(
        f"wrote kernel.gir, kernel.c, inputs.npz, expected.npz and check.py to {output} (at"
        f" {', '.join(f'{k}={v}' for k, v in dims.items()) or 'fixed sizes'})"
    )
    click.echo(f"python {output / 'check.py'} compiles kernel.c, compares and times it")
