"""Which ops the backend leaves to torch although gradc could take them: those that torch's libraries run faster."""

from __future__ import annotations

import torch

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
"""What torch runs faster on CUDA, and by what: its gradient is then torch's, too."""


def faster_in_torch(node: torch.fx.Node) -> str:
    """Why a call is left to torch where both can run it; "" where gradc takes it.

    On a CPU nothing is: gradc's own kernels are at hand there.
    """
    way = FASTER_ON_CUDA.get(str(node.target))
    if way is None or all(v.device.type != "cuda" for v in tensors_of(node)):
        return ""
    return f"{way} is faster on CUDA (take='all' has gradc run it)"
