"""Compiles what the GPU benchmark will run, in as many processes as there are cores, into the cache; needs no GPU.

python -m benchmarks.gpu_warm --arch sm_90 [--cache build/gpu-cache]
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from .gpu_cases import all_cases


def compiled(id: str, arch: str) -> str:
    """One case as the benchmark compiles it, and with each strategy forced."""
    import gradc
    from gradc.errors import GradcError
    from gradc.targets.devices import gpu_of

    from .gpu_contest import widest_combine

    case = all_cases()[id]
    graph = case.graph(False)

    def module(**options: object) -> gradc.Module:
        made = gradc.compile(graph, wrt=case.wrt, target="cuda", arch=arch, **{**case.options, **options})
        for executable in made.executables.values():
            _ = executable.binary
        return made

    try:
        plain = module()
        if case.scatter:
            module(determinism="none")
            buffer, _, predicted = widest_combine(plain, vars(case.at(False)), gpu_of(arch))
            for name in predicted:
                module(determinism="none", reductions={buffer: name})
    except GradcError as error:  # the benchmark itself will say so
        return f"{id}: {type(error).__name__}: {error}"
    return f"{id}: compiled"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--cache", type=Path, help="the cache's folder, to be carried to where the GPU is")
    options = parser.parse_args()
    if options.cache:
        os.environ["GRADC_CACHE_DIR"] = str(options.cache.resolve())
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(compiled, id, options.arch) for id in all_cases()]:
            print(future.result(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
