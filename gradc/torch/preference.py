"""Which ops the backend leaves to torch although gradc could take them: those that torch's libraries run faster.

Attention and convolutions in 16 bits are predicted, by shapes alone, ours and torch's: to follow the machine code of
ours takes seconds, and this is asked of every call while a model is compiled.  What there is no prediction of is left
to torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..analysis.library_time import Times, attention_times, convolution_times
from ..errors import Unsupported
from ..targets.calibration import calibration_text_for
from ..targets.devices import Gpu, calibrated_by, gpu_of, listed_device
from .importer import tensors_of

FASTER_ON_CUDA: dict[str, str] = {
    "aten.scaled_dot_product_attention.default": "flash attention",
    "aten.convolution.default": "cuDNN's convolution",
    "aten.lstm.input": "cuDNN's recurrent layers",
    "aten.gru.input": "cuDNN's recurrent layers",
    "aten.rnn_tanh.input": "cuDNN's recurrent layers",
    "aten.rnn_relu.input": "cuDNN's recurrent layers",
    "aten._grouped_mm.default": "a product of each group alone",
    "aten._int_mm.default": "a product of integers on tensor cores",
}
"""What torch may run faster on CUDA, and by what: its gradient is then torch's, too."""
_UNKNOWN = 1024
"""Stands for a size that has no hint."""


def faster_in_torch(node: torch.fx.Node, gradients: bool = True, calibration: Any = None) -> str:
    """Why a call is left to torch where both can run it; "" where gradc takes it.

    On a CPU nothing is: gradc's own kernels are at hand there.

    :param gradients: whether its gradients are wanted, which count then.
    :param calibration: as of :func:`gradc.compile`: a file with this device's constants.
    """
    way = FASTER_ON_CUDA.get(str(node.target))
    devices = [v.device for v in tensors_of(node) if v.device.type == "cuda"]
    if way is None or not devices:
        return ""
    gpu = _gpu(devices[0].index or 0, calibration)
    if gpu is None or (times := _times(node, gpu, gradients)) is None:
        return f"{way} is faster on CUDA (take='all' has gradc run it)"
    if times.ours < times.torchs:
        return ""
    figures = f"{times.torchs * 1e6:.3g} us against {times.ours * 1e6:.3g}"
    ratio = times.ours / times.torchs if times.torchs else 1.0  # nothing is computed, and a launch may cost nothing
    said = f"{ratio:.1f}x faster there" if ratio >= 1.05 else "as fast there"
    source = _source(gpu, "convolution" if "convolution" in str(node.target) else "attention_forward")
    return f"{way}, {source} {said} ({figures}; take='all' has gradc run it)"


def _gpu(number: int, calibration: Any) -> Gpu | None:
    """What is known of a device, with its own constants where ``gradc calibrate`` has written them; None: nothing."""
    listed = _listed(number)
    if listed is None:
        return None
    text = calibration_text_for(listed, calibration, own=torch.cuda.is_available())
    return listed if text is None else calibrated_by(listed, text)


@functools.cache
def _listed(number: int) -> Gpu | None:
    if not torch.cuda.is_available():
        return gpu_of(None)
    major, minor = torch.cuda.get_device_capability(number)
    try:
        return listed_device(torch.cuda.get_device_name(number), f"sm_{major}{minor}")
    except Unsupported:
        return None


# -- times -------------------------------------------------------------------------------------------------------------


def _times(node: torch.fx.Node, gpu: Gpu, gradients: bool) -> Times | None:
    """None of what there is no rate of: other dtypes than those of 16 bits, groups, heads of more than 128 features."""
    values = [v for o in node.args if isinstance(o, torch.fx.Node) and isinstance(v := o.meta.get("val"), torch.Tensor)]
    if {v.dtype for v in values} - {torch.bool} not in ({torch.float16}, {torch.bfloat16}) or int(gpu.arch[3:]) < 80:
        return None
    if node.target is torch.ops.aten.convolution.default:
        transposed, groups = node.args[6], node.args[8]
        if transposed or groups != 1:
            return None
        return convolution_times(gpu, _sizes(node.args[0]), _sizes(node.args[1]), _sizes(node), gradients)
    if "scaled_dot_product" not in str(node.target):
        return None
    causal = bool(node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False))
    query, key, value = (_sizes(o) for o in node.args[:3])
    return attention_times(gpu, query, key, value, causal, gradients)


def _source(gpu: Gpu, constant: str) -> str:
    """Of torch's time: ``predicted``, or ``measured`` where a calibration has its rates."""
    return "measured" if gpu.sources.get(constant) == "calibrated" else "predicted"


def _sizes(node: Any) -> list[int]:
    """The sizes of a node's tensor, those that are not known by their hints."""
    return [size if isinstance(size, int) else _hint(size) for size in node.meta["val"].shape]


def _hint(size: torch.SymInt) -> int:
    hint = size.node.hint
    return int(hint) if hint is not None else _UNKNOWN
