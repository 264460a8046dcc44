"""How long calls of libraries take on a GPU, by their flops and bytes alone: products and convolutions that a program
asks for, and what torch's own libraries do in their place.

All that chooses between a library and kernels of ours asks here, so that one constant is one figure everywhere.  Rates
are those that an H200 was measured with; other devices have them by their tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..ir.dims import evaluate
from ..ir.kernel import Call, Program
from ..targets.devices import Gpu, tensor_share
from ..targets.gpu import (
    ATTENTION_TILES,
    LIBRARY_CALL,
    LIBRARY_FLOPS,
    TORCH_WIDE_ATTENTION,
    UNALIGNED_FLOPS,
    WINDOW_ELEMENTS,
)


@dataclass(frozen=True)
class CallTime:
    """The predicted time of the calls of a product or a convolution.

    :param bounds: seconds by what bounds it: the calls themselves, flops, bytes.
    """

    seconds: float
    bounds: Mapping[str, float]

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.bounds, key=self.bounds.__getitem__)


def product_time(
    gpu: Gpu, dtype: str, flops: float, read: float, written: float, aligned: bool = True, calls: int = 1
) -> CallTime:
    """Of products of matrices: the longer of their flops and their operands' bytes; a result is written behind them, by
    an epilogue that nothing hides.

    :param dtype: of the operands.  :param read, written: bytes.
    :param aligned: whether the library has its fast kernels for the operands' rows.
    """
    rate = (LIBRARY_FLOPS if aligned else UNALIGNED_FLOPS)[dtype] * _share(gpu, dtype)
    bounds = {
        "launches": calls * LIBRARY_CALL,
        "flops": flops / rate,
        "bytes": (read + written) / gpu.bandwidth,
    }
    return CallTime(bounds["launches"] + max(bounds["flops"], read / gpu.bandwidth) + written / gpu.bandwidth, bounds)


def convolution_time(gpu: Gpu, dtype: str, flops: float, moved: float) -> CallTime:
    """Of a convolution by cuDNN: the longer of its flops and bytes, at the rate that torch's has."""
    rate = gpu.convolution * LIBRARY_FLOPS[dtype] / LIBRARY_FLOPS["bf16"]
    bounds = {"launches": LIBRARY_CALL, "flops": flops / rate, "bytes": moved / gpu.bandwidth}
    return CallTime(bounds["launches"] + max(bounds["flops"], bounds["bytes"]), bounds)


def _share(gpu: Gpu, dtype: str) -> float:
    """How fast a device multiplies, by an H200: of 16 bits by its tensor cores."""
    return tensor_share(gpu) if dtype in ("f16", "bf16") else 1.0


def call_seconds(call: Call, program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of a product that a program calls, with its epilogue.

    :param dims: the size of every symbol.
    """

    def nbytes(names: Sequence[str]) -> float:
        return float(sum(evaluate(program.types[name].nbytes, dims) for name in names))

    epilogue = call.epilogue
    flops = 2.0 * prod(evaluate(size, dims) for _, size in call.axes)
    read = nbytes([operand.buffer for operand in call.args])
    written = nbytes([o.buffer for o in (call.out, *epilogue.reads, *epilogue.writes)])
    dtype = program.types[call.args[0].buffer].dtype.name
    return product_time(gpu, dtype, flops, read, written).seconds


# -- in torch's place --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of what gradc and torch would run, with its gradients where these are wanted."""

    ours: float
    torchs: float


def attention_times(
    gpu: Gpu, query: Sequence[int], key: Sequence[int], value: Sequence[int], causal: bool, gradients: bool
) -> Times | None:
    """Of attention in 16 bits, from the sizes of its operands: two products of scores forward, five backward, half of
    each where it is causal; what is read and written once.  None: ours has no kernel for such heads.
    """
    rows, columns, features = query[-2], key[-2], max(query[-1], value[-1])
    heads = prod(query[:-2])
    known = next((width for width in ATTENTION_TILES if features <= width), None)
    if known is None or rows == 1:  # a row of queries is no tile
        return None
    flops = 2.0 * heads * rows * columns * (query[-1] + value[-1]) * (0.5 if causal else 1)
    nbytes = 2.0 * (prod(query) + prod(key) + prod(value) + heads * rows * value[-1])
    share, wide = tensor_share(gpu), TORCH_WIDE_ATTENTION if known > 64 else (1.0, 1.0)
    rates = [rate * more for rate, more in zip((gpu.attention_forward, gpu.attention_backward), wide, strict=True)]
    own = [rate * share for rate in ATTENTION_TILES[known]]

    def seconds(forward: float, backward: float) -> float:
        first = gpu.launch + max(flops / forward, nbytes / gpu.bandwidth)
        after = 3 * gpu.launch + max(2.5 * flops / backward, 2 * nbytes / gpu.bandwidth)
        return first + after * gradients

    return Times(seconds(*own), seconds(*rates))


def convolution_times(
    gpu: Gpu, image: Sequence[int], weight: Sequence[int], result: Sequence[int], gradients: bool
) -> Times:
    """Of a convolution in bf16, from its sizes: a product forward and two backward, of images as they lie in torch's,
    of windows that a kernel writes in ours.
    """
    taps = prod(weight[2:])
    flops = 2.0 * prod(result) * weight[1] * taps
    nbytes = 2.0 * (prod(image) + prod(weight) + prod(result))
    places = result[0] * prod(result[2:])
    theirs = (1 + 2 * gradients) * (gpu.launch + max(flops / gpu.convolution, nbytes / gpu.bandwidth))

    def own(channels: int, positions: int) -> float:
        """A product of windows of so many channels around so many positions."""
        elements = positions * channels * taps if taps > 1 else 0
        windows = elements / (WINDOW_ELEMENTS * tensor_share(gpu)) + gpu.launch if elements else 0.0
        return windows + product_time(gpu, "bf16", flops, max(2.0 * elements, nbytes), 0).seconds

    forward, of_image = own(weight[1], places), own(weight[0], image[0] * prod(image[2:]))
    return Times(forward + (of_image + own(weight[1], places)) * gradients, theirs)
