"""``python -m gradc.demo``"""

from __future__ import annotations

import argparse
import sys

from ..errors import GradcError
from .train import main

parser = argparse.ArgumentParser(prog="python -m gradc.demo", description="Train a quantized language model with gradc's kernels, and show how they came to be.")
parser.add_argument("--steps", type=int, default=500, help="steps of training (default: 500)")
parser.add_argument("--quick", action="store_true", help="a few steps on a slice of the text")
parser.add_argument("--out", help="folder for the report and all stages (default: gradc-demo)")

if __name__ == "__main__":
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: 1 at least")
    try:
        sys.exit(main(options.steps, options.quick, options.out))
    except (GradcError, OSError) as error:
        sys.exit(f"gradc demo: {error}")
