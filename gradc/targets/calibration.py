"""Which calibration file a compilation reads: the one that is named, else the device's own in the user's configuration
directory, else the one that comes with gradc for a processor of this family and model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .. import knobs
from ..errors import InvalidProblem
from ..formats.json_text import read_json
from ..process.files import user_directory
from .devices import CPU, Cpu, Gpu, calibrated_by, read_calibration

NONE = "none"
MEASURED = Path(__file__).with_name("calibrated")
"""Folder of the files that come with gradc, of processors whose sorted rows and partial results cost other than those
listed for any CPU (:data:`~gradc.targets.devices.CPU`): ``cpu-family-25-model-17.json``.
"""


def calibration_file(device: Cpu | Gpu, model: str = "") -> Path:
    """Where ``gradc calibrate`` writes a device's constants unless it is told: ``GRADC_CALIBRATION``, else
    ``calibration/h100.json`` of the user's own, or ``calibration/cpu-MODEL.json``.

    :param model: of the processor: users' files may be on several machines.
    :raises InvalidProblem: ``GRADC_CALIBRATION`` names a GPU's for a CPU, or the other way round, which is kept.
    """
    named = knobs.CALIBRATION.get()
    if named and named != NONE:
        path = Path(named).expanduser()
        if path.is_file() and _is_of_cpu(read_calibration(path)) is not isinstance(device, Cpu):
            raise InvalidProblem(f"{path}, which GRADC_CALIBRATION names, is not of {device.name}: name another file")
        return path
    return _own_file(device, model)


def _own_file(device: Cpu | Gpu, model: str) -> Path:
    """The device's file in the user's configuration directory."""
    return Path(user_directory("config")) / "calibration" / _file_name(device, model)


def measured_file(device: Cpu | Gpu, model: str = "") -> Path:
    """The file of such a device that comes with gradc, or a name that none has.

    :param model: of the processor, of which family and model count: the rest of its name is the seller's.
    """
    numbers = re.search(r"family \d+ model \d+", model)
    return MEASURED / _file_name(device, numbers.group() if numbers else model)


def _file_name(device: Cpu | Gpu, model: str) -> str:
    return f"{'-'.join(re.findall('[a-z0-9]+', f'{device.name} {model}'.lower()))}.json"


def calibration_text_for(device: Cpu | Gpu, given: Any, own: bool, model: str = "") -> str | None:
    """The text of the file that holds for a compilation, or None: see :func:`found`."""
    held = found(device, given, own, model)
    return held[1] if held is not None else None


def found(device: Cpu | Gpu, given: Any, own: bool, model: str = "") -> tuple[Path | None, str] | None:
    """(the file that holds for a compilation, its text), or None.  A text that is given has no file.

    :param given: ``calibration=`` of compile: a path, a text as a module keeps it, ``"none"``, or None.
    :param own: whether the file in the user's configuration directory counts, where none is named, and where that is
        not there, the one that comes with gradc.
    :param model: as of :func:`calibration_file`.
    :raises InvalidProblem: a file that was named is not there; a file is of another device, or holds what no
        calibration does.  One that the environment names for a GPU says nothing of a CPU, nor the other way round:
        the user's own holds there.
    """
    if given is not None and not isinstance(given, str | Path):
        raise InvalidProblem(
            f"calibration={given!r}: a path of a file that gradc calibrate wrote, its text, or {NONE!r}"
        )
    if isinstance(given, str) and given.lstrip().startswith("{"):
        calibrated_by(device, given)
        return None, given
    named = str(given) if given is not None else knobs.CALIBRATION.get()
    if named == NONE:
        return None
    if named:
        path = Path(named).expanduser()
        text = read_calibration(path)
        if given is not None or _is_of_cpu(text) == isinstance(device, Cpu):
            calibrated_by(device, text, path)
            return path, text
    for path in (_own_file(device, model), measured_file(device, model)) if own else ():
        if path.is_file():
            text = read_calibration(path)
            calibrated_by(device, text, path)
            return path, text
    return None


def _is_of_cpu(text: str) -> bool:
    """Whether a calibration is a CPU's."""
    try:
        content = read_json(text)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("device") == CPU.name
