"""What a block may have on a multiprocessor, held against what compiled functions take."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...codegen.cuda.kernel import CudaKernel
from ...errors import Unsupported
from ...targets.devices import ARCHITECTURES
from ...targets.gpu import REGISTERS
from .nvrtc import CudaBinary


def refuse_large_blocks(made: CudaBinary, kernels: Iterable[CudaKernel]) -> None:
    """Says at compile time what a device would only say at a launch; an architecture that is not listed passes.

    :raises Unsupported: a block takes more shared memory, static and dynamic, or more registers than the architecture
        gives one.
    """
    limits = ARCHITECTURES.get(re.sub(r"[af]$", "", made.arch))
    if limits is None:
        return
    for kernel in kernels:
        for stage in kernel.stages:
            taken = made.kernels.get(stage.name)
            if taken is None:
                continue
            dynamic = kernel.dynamic_shared(stage)
            if taken.shared + dynamic > limits.block_shared:
                raise Unsupported(
                    f"{stage.name} takes {taken.shared} + {dynamic} bytes of shared memory, static and dynamic; on"
                    f" {made.arch} a block has {limits.block_shared}"
                )
            if taken.registers * kernel.threads > REGISTERS:
                raise Unsupported(
                    f"{stage.name} takes {taken.registers} registers for each of {kernel.threads} threads; on"
                    f" {made.arch} a block has {REGISTERS}"
                )
