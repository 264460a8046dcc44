"""``python -m gradc`` is the ``gradc`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; what it needs is imported here, so that Ctrl-C is no traceback meanwhile."""
    try:
        from .cli import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
