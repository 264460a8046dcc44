"""NVIDIA's own checker on a few modules, where the CUDA toolkit is installed; this file is also what it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SOME = ("embedding, sorted", "embedding, partials", "embedding, fixed point", "layer norm", "grid sample")


def sanitizer() -> str | None:
    """The tool, in the path or beside a toolkit."""
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or next(
        (str(p) for home in homes if home and (p := Path(home) / "bin" / "compute-sanitizer").exists()), None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    from machines import gpus

    if not gpus():
        pytest.skip("needs a GPU")
    program = sanitizer()
    if program is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    done = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if "not supported" in done.stdout and done.returncode not in (0, 9):
        pytest.skip(f"compute-sanitizer does not work here: {done.stdout.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_what_it_runs_is_right_without_it() -> None:
    """On a device in memory where there is no GPU."""
    from machines import gpus

    where = "cuda" if gpus() else "memory"
    done = subprocess.run([sys.executable, __file__, where], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{len(SOME)} modules", done.stdout + done.stderr


def main(place: str = "cuda") -> None:
    """A few modules, forward and backward, at small sizes."""
    sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]
    from gpu_in_memory import installed
    from machines import Machine
    from models import MODELS

    machine = Machine(place, "cupy")
    with pytest.MonkeyPatch.context() as patch, installed(patch) if place == "memory" else nullcontext():
        for name in SOME:
            model = MODELS[name]
            module = machine.compile(model.graph, model.wrt, **model.options)
            inputs = {n: machine.put(a) for n, a in model.arrays(model.small).items()}
            _, residuals = module.forward(inputs)
            module.backward(residuals, machine.put(model.cotangent(model.small)))
            module.synchronize()
    print(f"{len(SOME)} modules")


if __name__ == "__main__":
    main(*sys.argv[1:])
