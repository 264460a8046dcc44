"""Finds and runs nvdisasm, which turns a cubin into text; it needs no GPU and no driver."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess

from gradc import knobs
from gradc.errors import CompilerError, CompilerMissing
from gradc.process.files import scratch
from gradc.runtime.host.toolchain import TIMEOUT


def find_nvdisasm() -> str:
    """The path of nvdisasm: of NVIDIA's wheels, CUDA_HOME, CUDA_PATH, or PATH, in this order.

    :raises CompilerMissing: there is none; the message says how to install it.
    """
    namespace = importlib.util.find_spec("nvidia")  # a namespace package: nothing is imported
    roots = (namespace.submodule_search_locations if namespace is not None else None) or ()
    found = [f for root in roots for f in sorted(glob.glob(os.path.join(glob.escape(root), "*", "bin", "nvdisasm")))]
    homes = filter(None, (knobs.CUDA_HOME.get(), knobs.CUDA_PATH.get()))
    for path in (*reversed(found), *(os.path.join(home, "bin", "nvdisasm") for home in homes)):
        if os.access(path, os.X_OK):
            return path
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise CompilerMissing(
            "no nvdisasm: the wheel nvidia-cuda-nvdisasm is not installed, and neither CUDA_HOME, CUDA_PATH nor PATH"
            " has it; `pip install gradc[nvdisasm]` brings one"
        )
    return on_path


def disassemble(cubin: bytes) -> str:
    """The code sections of a cubin as ``nvdisasm -c`` prints them.

    :raises CompilerMissing: there is no nvdisasm.  :raises CompilerError: it fails, or takes too long.
    """
    tool = find_nvdisasm()
    with scratch() as folder:
        path = folder / "kernels.cubin"
        path.write_bytes(cubin)
        try:
            done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{tool} does not run: {error}") from error
    if done.returncode:
        raise CompilerError(f"{tool} failed with exit code {done.returncode}", done.stderr)
    return done.stdout
