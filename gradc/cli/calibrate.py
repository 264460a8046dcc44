"""calibrate: measures the cost model's constants of a GPU or of the CPU and writes the file that compile reads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import click

from ..calibration.host import calibrate as measured_host
from ..calibration.measure import calibrate as measured
from ..process import files
from ..runtime.host.toolchain import cpu_model
from ..targets.calibration import calibration_file
from ..targets.devices import CPU, Cpu, Gpu, calibrated_by, calibration_text
from .model import AS_JSON
from .progress import Progress
from .results import say_json


@click.command(short_help="Measure the constants of a GPU, or of the CPU, for choose_reduction.")
@click.option(
    "--target",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="What is measured: the GPU, or one thread of the CPU.",
)
@click.option(
    "--device",
    "number",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Which GPU, as the driver counts them.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; by default the user's own for this kind of device, which compile finds.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print every time that was taken.")
@click.option(
    "--progress/--no-progress", default=None, help="Show what is being done after a second; by default on a terminal."
)
@AS_JSON
def calibrate(target: str, number: int, out: Path | None, verbose: bool, progress: bool | None, as_json: bool) -> None:
    """Measure a GPU: copy bandwidth, atomics (adjacent elements, scattered lines, one row), L2, the sort, a launch, and
    torch's attention and convolution where there is torch.  Or the CPU: what sorted rows take longer than partial
    results, and what these take (25 seconds and 0.5 GB).

    The file replaces gradc's built-in constants for this kind of device where compile is for that target; it is found
    in its default place, or given by GRADC_CALIBRATION=FILE or compile(calibration=FILE).  Nothing else should run on
    the device.

    \b
    gradc calibrate
    gradc calibrate --device 1 -o h200.json
    gradc calibrate --target cpu
    """
    if target == "cpu" and number:
        raise click.BadParameter("--device is for --target cuda")
    if number:  # the driver reads the variable once, at its first call
        visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        if number >= len(visible) > 0:
            raise click.BadParameter(f"--device {number}: CUDA_VISIBLE_DEVICES shows {len(visible)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number] if visible else str(number)
    named = out or (calibration_file(CPU, cpu_model()) if target == "cpu" else None)
    lines: list[str] = []
    with Progress("measuring", progress) as shown:

        def said(line: str) -> None:
            lines.append(line)
            shown.say(line)

        listed, text = _measured(target, said)
    path = named or calibration_file(listed)
    files.make_folder(path.parent)
    files.write(path, text)
    device = calibrated_by(listed, text, path)
    found = [name for name, source in sorted(device.sources.items()) if source == "calibrated"]
    if as_json:
        constants = {name: {"measured": getattr(device, name), "listed": getattr(listed, name)} for name in found}
        say_json({"device": listed.name, "constants": constants, "times": lines, "file": str(path)})
        return
    for line in lines if verbose else ():
        click.echo(f"  {line}")
    for name in found:
        click.echo(
            f"  {name:<10} {getattr(device, name):>12.4g}   listed: {getattr(listed, name):.4g}"
            f" ({listed.sources.get(name, 'measured')})"
        )
    click.echo(f"wrote {path}" + ("" if out is None else f"; GRADC_CALIBRATION={path} or calibration= reads it"))


def _measured(target: str, said: Callable[[str], None]) -> tuple[Cpu | Gpu, str]:
    """What the cost model calls the device, and its calibration's text."""
    if target == "cpu":
        return measured_host(said)
    listed, text = measured(said)
    return listed, _with_torch(listed, text, said)


def _with_torch(listed: Gpu, text: str, said: Callable[[str], None]) -> str:
    """A calibration's text with the rates of torch's libraries, where torch is installed, has this device and runs them
    on it: before sm_80, nothing asks for rates of bf16.
    """
    if importlib.util.find_spec("torch") is None or int(listed.arch[3:]) < 80:
        return text
    try:
        from ..torch import library_rates as of_torch

        if not of_torch.available():
            return text
        device = calibrated_by(listed, text)
        rates = {name: float(f"{rate:.4g}") for name, rate in of_torch.library_rates(device).items()}
    except (ImportError, OSError, RuntimeError) as error:  # no cuDNN, memory that others hold: the rest was measured
        said(f"torch's attention and convolution could not be measured: {error}")
        return text
    for name, rate in rates.items():
        said(f"{name:<10} {rate:>14.4g} a second, torch {of_torch.VERSION}")
    constants = {name: getattr(device, name) for name, source in device.sources.items() if source == "calibrated"}
    return calibration_text(listed, {**constants, **rates})
