"""``python -m gradc`` is the ``gradc`` command."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


def main() -> int:
    """Runs the command.

    While it is imported, Ctrl-C ends the process at once: packages turn a KeyboardInterrupt raised in the middle
    of their own import into an ImportError.
    """
    try:
        if interruptible := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)
        from .cli import main as command

        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _end(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
