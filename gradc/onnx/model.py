"""ONNX files: read, their external data looked for in their own folder alone, and checked."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, numpy_helper

from ..errors import InvalidProblem, Unsupported
from ..ir.types import DType
from ..ir.types import dtype as dtype_of

OLDEST, NEWEST = 1, onnx.defs.onnx_opset_version()
"""Opsets of the default domain."""
_WITH_OPSETS = 3
"""The first version of the format whose models say which opset they are of; before it is opset 1."""
_NAMES = {
    "FLOAT": "f32",
    "DOUBLE": "f64",
    "FLOAT16": "f16",
    "BFLOAT16": "bf16",
    "FLOAT8E4M3FN": "f8e4m3",
    "FLOAT8E5M2": "f8e5m2",
    "FLOAT4E2M1": "f4e2m1",
    "FLOAT8E8M0": "e8m0",
    "BOOL": "bool",
    **{f"{kind}INT{bits}".upper(): f"{kind or 'i'}{bits}" for kind in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
}
_ELEMENTS: dict[int, str] = {
    onnx.TensorProto.DataType.Value(k): v for k, v in _NAMES.items() if k in onnx.TensorProto.DataType.keys()
}


def element_type(name: str) -> int:
    """ONNX's number of a dtype of gradc; 0, undefined, where it has none."""
    return next((number for number, known in _ELEMENTS.items() if known == name), 0)


def read(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> onnx.ModelProto:
    """A model with all its weights in it.

    :param model: a file, its bytes, or what ``onnx.load`` gives.
    :raises InvalidProblem: it cannot be read, is no valid model, or its external data is missing or outside the model's
        folder.
    """
    if isinstance(model, onnx.ModelProto):
        proto, folder = model, None
    elif isinstance(model, bytes):
        proto, folder = _parsed(model, "the model"), None
    elif isinstance(model, str | os.PathLike):
        path = Path(model)
        try:
            proto, folder = _parsed(path.read_bytes(), str(path)), path.resolve().parent
        except OSError as error:
            raise InvalidProblem(f"{path} cannot be read: {error.strerror or error}") from error
    else:
        raise InvalidProblem(f"from_onnx takes a path, bytes or an onnx.ModelProto, not a {type(model).__name__}")
    _refuse_other_text(proto)
    proto = _with_one_name_of_the_domain(proto)
    _load_external(proto, folder)
    _checked(proto)
    return proto


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise InvalidProblem(f"{name} is no ONNX model: {error}") from error
    if not proto.HasField("graph") or (not proto.opset_import and proto.ir_version >= _WITH_OPSETS):
        raise InvalidProblem(f"{name} is no ONNX model: it has no graph or no opset")
    return proto


def _refuse_other_text(proto: onnx.ModelProto) -> None:
    """:raises InvalidProblem: a name is no UTF-8: what protobuf gives then is no text."""
    graphs: list[Any] = [proto.graph, *proto.functions]
    names: list[Any] = [o.domain for o in proto.opset_import]
    while graphs:
        graph = graphs.pop()
        names.append(graph.name)
        for node in graph.node:
            names += (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
            for attribute in node.attribute:
                names += (attribute.name, attribute.ref_attr_name)
                graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
        if isinstance(graph, onnx.FunctionProto):
            names += (graph.domain, graph.overload, *graph.input, *graph.output, *graph.attribute)
            names += [o.domain for o in graph.opset_import]
            continue
        infos = (*graph.input, *graph.output)
        names += (*(t.name for t in graph.initializer), *(i.name for i in infos))
        names += [d.dim_param for i in infos for d in i.type.tensor_type.shape.dim]
    strange = next((name for name in names if not isinstance(name, str)), None)
    if strange is not None:
        raise InvalidProblem(f"the name {strange!r} of the model is no UTF-8")


def _with_domains(proto: onnx.ModelProto) -> Iterator[Any]:
    """All parts of a model that name a domain."""
    graphs: list[Any] = [proto.graph, *proto.functions]
    yield from proto.opset_import
    while graphs:
        graph = graphs.pop()
        for node in graph.node:
            yield node
            for attribute in node.attribute:
                graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
        if isinstance(graph, onnx.FunctionProto):
            yield graph
            yield from graph.opset_import


def _with_one_name_of_the_domain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with "" for "ai.onnx", the long name of ONNX's own domain, which its checker does not know."""
    if not any(part.domain == "ai.onnx" for part in _with_domains(proto)):
        return proto
    renamed = onnx.ModelProto()
    renamed.CopyFrom(proto)
    for part in _with_domains(renamed):
        if part.domain == "ai.onnx":
            part.domain = ""
    return renamed


def _load_external(proto: onnx.ModelProto, folder: Path | None) -> None:
    """:raises InvalidProblem: data is missing, too short, or not under the model's folder."""
    for tensor in external_data_helper._get_all_tensors(proto):
        if not external_data_helper.uses_external_data(tensor):
            continue
        places = {entry.key: entry.value for entry in tensor.external_data}
        location = places.get("location", "")
        if folder is None:
            raise InvalidProblem(f"the tensor {tensor.name!r} lies in {location!r}: give the model's path")
        try:
            file = (folder / location).resolve()
            if not location or os.path.isabs(location) or folder not in file.parents:
                raise InvalidProblem(f"the data of {tensor.name!r} is at {location!r}, outside of the model's folder")
            offset, size = int(places.get("offset", 0)), file.stat().st_size
            length = int(places["length"]) if "length" in places else max(size - offset, 0)
            if min(offset, length) < 0 or offset + length > size:
                raise InvalidProblem(f"the data of {tensor.name!r} at {location!r} ends early: {size} bytes are there")
            with file.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(length)
        except InvalidProblem:
            raise
        except (OSError, ValueError) as error:
            raise InvalidProblem(f"the data of {tensor.name!r} at {location!r} cannot be read: {error}") from error
        tensor.raw_data = data
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _checked(proto: onnx.ModelProto) -> None:
    for opset in proto.opset_import:
        if not opset.domain and not OLDEST <= opset.version <= NEWEST:
            raise InvalidProblem(f"opset {opset.version} of the model; there are {OLDEST} to {NEWEST}")
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        versions: dict[str, int] = {}
        for opset in imports:
            if versions.setdefault(opset.domain, opset.version) != opset.version:
                both = f"{versions[opset.domain]} and {opset.version}"
                raise InvalidProblem(f"opsets {both} of the domain {opset.domain!r} are imported: one has to be chosen")
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise InvalidProblem(f"no valid ONNX model: {_said(error, proto)}") from error
    except UnicodeDecodeError as error:  # what it says quotes bytes that are no text
        raise InvalidProblem("no valid ONNX model, and its text is no UTF-8") from error
    except ValueError as error:  # of 2 GiB and more, which protobuf cannot serialize for the checker
        if "2GB" not in str(error) and "2 GB" not in str(error):
            raise


def _said(error: Exception, proto: onnx.ModelProto) -> str:
    """What the checker of ONNX says, of which operator, and the model's opsets."""
    text, operator = _first_line(error), re.search(r"OpType: (\S+)", str(error))
    where = f"{operator[1]}: " if operator and operator[1] not in text else ""
    return f"{where}{text} (opset {', '.join(f'{o.domain} {o.version}'.strip() for o in proto.opset_import)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@functools.cache
def schema(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """What ONNX says of an operator in an opset of its domain; None of what it does not have there."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


def defaults(op: str, domain: str, opset: int) -> dict[str, onnx.AttributeProto]:
    """The attributes that an operator has in an opset where its node leaves them out."""
    found = schema(op, domain, opset)
    attributes = found.attributes.values() if found is not None else ()
    return {a.name: a.default_value for a in attributes if a.default_value.name}


def element(number: int | str) -> DType:
    """The dtype of an ONNX element type, which attributes before opset 6 name.

    :raises InvalidProblem: ONNX has no such name.
    :raises Unsupported: gradc has no such dtype.
    """
    if isinstance(number, str):
        if number.upper() not in onnx.TensorProto.DataType.keys():
            raise InvalidProblem(f"no element type {number!r}")
        number = onnx.TensorProto.DataType.Value(number.upper())
    if number not in _ELEMENTS or _ELEMENTS[number] in ("u64",):
        known = {v: k for k, v in onnx.TensorProto.DataType.items()}
        raise Unsupported(f"the element type {known.get(number, number)}")
    return dtype_of(_ELEMENTS[number])


def array(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """A tensor's values.

    :raises Unsupported: gradc has no such dtype.
    :raises InvalidProblem: its data does not fit its shape.
    """
    wanted = element(tensor.data_type)
    try:
        found = numpy_helper.to_array(tensor)
    except Exception as error:  # onnx's own are of many classes
        raise InvalidProblem(f"the tensor {tensor.name!r} cannot be read: {_first_line(error)}") from error
    return np.asarray(found) if found.dtype == wanted.np else np.asarray(found).astype(wanted.np)
