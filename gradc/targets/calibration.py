"""Which calibration file a compilation reads: the one that is named, else the device's own in the user's configuration
directory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .. import knobs
from ..errors import InvalidProblem
from ..process.files import user_directory
from .devices import Gpu, calibrated_by, read_calibration

NONE = "none"


def calibration_file(device: Gpu) -> Path:
    """Where ``gradc calibrate`` writes a device's constants unless it is told: ``GRADC_CALIBRATION``, else
    ``calibration/h100.json`` of the user's own.
    """
    named = knobs.CALIBRATION.get()
    if named and named != NONE:
        return Path(named).expanduser()
    return Path(user_directory("config")) / "calibration" / f"{re.sub('[^a-z0-9]+', '-', device.name.lower())}.json"


def calibration_text_for(device: Gpu, given: Any, own: bool) -> str | None:
    """The text of the file that holds for a compilation, or None.

    :param given: ``calibration=`` of compile: a path, ``"none"``, or None.
    :param own: whether the file in the user's configuration directory counts, where none is named.
    :raises InvalidProblem: a file that was named is not there; a file is of another device, or holds what no
        calibration does.
    """
    if given is not None and not isinstance(given, str | Path):
        raise InvalidProblem(f"calibration={given!r}: a path of a file that gradc calibrate wrote, or {NONE!r}")
    named = str(given) if given is not None else knobs.CALIBRATION.get()
    if named == NONE or not (named or own):
        return None
    path = Path(named).expanduser() if named else calibration_file(device)
    if not named and not path.is_file():
        return None
    text = read_calibration(path)
    calibrated_by(device, text, path)
    return text
