"""What :func:`gradc.codegen.cuda.render.render_cuda` made, as bytes: a module from the cache renders nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ...errors import IRFormatError
from ...formats.json_text import read_json
from ...ir.dims import Dim
from ...ir.size_text import parse_size
from .choose_mapping import MAPPINGS
from .kernel import CudaKernel, Stage
from .tiles.kernel import MAPPING as TILE


def packed(text: str, kernels: dict[str, CudaKernel]) -> bytes:
    """The text, and the kernels' numbers."""
    return json.dumps({"text": text, "kernels": {name: _record(kernel) for name, kernel in kernels.items()}}).encode()


def unpacked(data: bytes) -> tuple[str, dict[str, CudaKernel]]:
    """What :func:`packed` was given.

    :raises IRFormatError: these are no such bytes.
    """
    try:
        content = read_json(data.decode())
        text, kernels = (
            content["text"],
            {
                name: CudaKernel(**{key: _value(value) for key, value in record.items()})
                for name, record in content["kernels"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IRFormatError(f"this is no record of CUDA kernels: {type(error).__name__}: {error}") from error
    if not isinstance(text, str) or not all(
        isinstance(k.text, str) and isinstance(k.name, str) and k.mapping in (*MAPPINGS, TILE) for k in kernels.values()
    ):
        raise IRFormatError("this is no record of CUDA kernels: their text or mapping is none")
    return text, kernels


def _record(record: CudaKernel | Stage) -> dict[str, object]:
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, Dim):
        return {"size": str(value)}
    if isinstance(value, Stage):
        return {"stage": _record(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"a {type(value).__name__} in a kernel's record")


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(v) for v in value)
    if isinstance(value, dict):
        return (
            parse_size(value["size"]) if "size" in value else Stage(**{k: _value(v) for k, v in value["stage"].items()})
        )
    return value
