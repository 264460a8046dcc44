"""``python -m gradc`` is the ``gradc`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command; it is imported here, so that Ctrl-C during the import prints no traceback."""
    try:
        from .cli import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
