"""``python -m gradc.demo [--steps N] [--quick] [--out FOLDER]``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import GradcError
from .train import main


def run(arguments: Sequence[str] | None = None, program: str = "python -m gradc.demo") -> int:
    """:func:`gradc.demo.train.main` with command-line arguments; ``program`` is the program's name in the help."""
    parser = argparse.ArgumentParser(
        prog=program, description="Train a quantized language model with gradc's kernels, and show how they came to be."
    )
    parser.add_argument("--steps", type=int, default=500, help="steps of training (default: 500)")
    parser.add_argument("--quick", action="store_true", help="a few steps on a slice of the text")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the report and all stages (default: gradc-demo)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: 1 at least")
    try:
        return main(options.steps, options.quick, options.out)
    except (GradcError, OSError) as error:
        print(f"gradc demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run())
