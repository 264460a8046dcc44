"""Lines of bitsandbytes' ops: products with weights of four bits, whose block scales may be quantized themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import DTYPES, F32, DType
from ...ops.rules import converted

_FP4 = tuple(sign * level / 12 for sign in (1.0, -1.0) for level in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
"""The 16 values of bitsandbytes' FP4, by code; of OCP's f4e2m1 neither the order nor the least value."""


def _scaled(values: Node, scales: Node, size: int) -> Node:
    """Values whose rows consist of blocks, each with a scale; the last block of a row may be shorter."""
    *leading, columns = values.shape
    if not isinstance(columns, int):
        raise Unsupported("quantized weights of symbolic sizes")
    blocks = -(-columns // size)
    if blocks * size != columns:
        values = ops.pad(values, (*((0, 0) for _ in leading), (0, blocks * size - columns)))
    scaled = ops.reshape(values, (*leading, blocks, size)) * ops.reshape(scales, (*leading, blocks, 1))
    return ops.reshape(scaled, (*leading, blocks * size))[..., :columns]


def _dequantize_blockwise(codes: Node, absmax: Node, code: Node, blocksize: int, dtype: DType) -> Node:
    values = ops.gather(code, ops.reshape(codes, (-1,)), axis=0)
    return converted(ops.reshape(_scaled(values, absmax, blocksize), codes.shape), dtype)


def _dequantize_4bit(
    packed: Node, absmax: Node, blocksize: int, quant_type: str, shape: Sequence[int], dtype: DType
) -> Node:
    """Two codes a byte, the first in the high bits, and a scale for each block of the flat weight.

    Where no block is in two rows, codes and scales become those of rows: so a product reads them block by block.
    """
    if packed.dtype is not DTYPES["u8"]:
        raise Unsupported(f"codes of four bits that are stored as {packed.dtype}")
    rows = tuple(shape) if shape[-1] % blocksize == 0 else (math.prod(shape),)
    bytes_of_rows = ops.reshape(packed, (*rows[:-1], (rows[-1] + 1) // 2))
    codes = ops.unpack(bytes_of_rows, dtype="u4", low_nibble_first=False)[..., : rows[-1]]
    book = ops.nf4_codebook() if quant_type == "nf4" else ops.constant(value=_FP4, dtype=F32, shape=(16,))
    weight = _scaled(ops.gather(book, codes, axis=0), absmax, blocksize)
    return converted(ops.reshape(weight, tuple(shape)), dtype)


def _gemm_4bit(
    x: Node,
    packed: Node,
    shape: Sequence[int],
    absmax: Node,
    blocksize: int,
    quant_type: str,
    bias: Node | None = None,
    absmax_8bit: Node | None = None,
    absmax_code: Node | None = None,
    absmax_offset: Node | None = None,
) -> Node:
    """:param absmax: of the weight, or, with ``absmax_8bit``, of blocks of 256 of its scales."""
    if absmax_8bit is not None:
        assert absmax_code is not None and absmax_offset is not None  # torch has checked
        absmax = _dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, F32) + absmax_offset
    return ops.linear(x, _dequantize_4bit(packed, absmax, blocksize, quant_type, shape, x.dtype), bias)


LINES: dict[str, Any] = {
    "bitsandbytes.dequantize_blockwise.default": _dequantize_blockwise,
    "bitsandbytes.dequantize_4bit.default": _dequantize_4bit,
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
}
