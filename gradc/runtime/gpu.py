"""A GPU through CuPy, by addresses alone: the one module that imports cupy, and only once a device is asked for.

>>> from gradc.runtime import gpu
>>> gpu.count() and gpu.current_device().arch           # 0 without a driver: cupy is not imported then
>>> device = gpu.Gpu(text)                              # CUDA text, compiled for the current device at its first launch
>>> memory = device.memory(4096)
>>> begin, end = device.event(), device.event()
>>> begin.record(); device.launch("name", blocks, threads, [Span(memory.address, 1024, np.dtype("f4")), 1024], written=[0]); end.record()
>>> end.wait(); end.since(begin)                        # seconds
"""

from __future__ import annotations

from ..runtime.device import Description


def count() -> int:
    """How many devices the driver has; 0 without a driver."""
    raise NotImplementedError


def current_device() -> Description:
    """The current device of this thread.

    :raises NoDevice: there is no driver, no device, or no CuPy to reach it; says which.
    """
    raise NotImplementedError


class Gpu:
    """The current device and a CUDA text on it: :class:`gradc.runtime.device.Device`.

    :param text: kernels as ``extern "C" __global__`` functions whose parameters are pointers and 64-bit integers.
    :param cubin: the text compiled, or b"": it is compiled for the device's architecture (and kept in the cache) at the first launch.
    :param arch: what the cubin was compiled for.  :param sync: wait after each launch, so that an error names the function that raised it.
    """

    def __init__(self, text: str = "", *, cubin: bytes = b"", arch: str = "", sync: bool = False):
        raise NotImplementedError
