"""Tensors in and out: of one element or of texts, of a few numbers or of rows of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.server.proto.kserve.v2 import inference_pb2 as pb

_LENGTH = struct.Struct("<I")
_PACKED = {"BOOL": "?", "UINT32": "I", "FP32": "f"}
_CONTENTS = {"BOOL": "bool_contents", "BYTES": "bytes_contents"}


class Tensor(NamedTuple):
    """A named tensor.

    Attributes:
        name, datatype: as the protocol has them.
        values: bytes of BYTES, else numbers, in one dimension; or an array of FP32.
    """

    name: str
    datatype: str
    values: Sequence[Any] | NDArray[Any]


def read_inputs(request: pb.ModelInferRequest, known: dict[str, str]) -> dict[str, Any]:
    """The inputs, each of one element: text of BYTES, else a boolean.

    Args:
        known: datatypes by name.

    Raises:
        InvalidRequestError: an input that is not known, given twice, or malformed; names it.
    """
    raw = _buffers(request)
    found: dict[str, Any] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        _check_name(name, known, found)
        if tensor.datatype != known[name] or any(size != 1 for size in tensor.shape):
            shown = f"{tensor.datatype} {list(tensor.shape)}"
            raise InvalidRequestError(name, shown, f"{known[name]} of one element, shape [1]")
        value = _raw(name, raw[index], known[name]) if raw else _content(tensor)
        found[name] = _text(name, value) if isinstance(value, bytes) else value
    return found


def read_texts(
    request: pb.ModelInferRequest, known: Mapping[str, str], most: int
) -> dict[str, list[str]]:
    """The inputs, each a list of texts.

    Args:
        known: names; all are of BYTES.
        most: texts of one input.

    Raises:
        InvalidRequestError: an input that is not known, given twice, malformed or too long; names
            it.
    """
    raw = _buffers(request)
    found: dict[str, list[str]] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        _check_name(name, known, found)
        num_texts = math.prod(tensor.shape)
        if tensor.datatype != "BYTES" or len(tensor.shape) > 2 or not 1 <= num_texts <= most:
            shown = f"{tensor.datatype} {list(tensor.shape)}"
            raise InvalidRequestError(name, shown, f"BYTES of 1 to {most} texts, shape [n]")
        values = _split(name, raw[index]) if raw else list(tensor.contents.bytes_contents)
        if len(values) != num_texts:
            allowed = f"{num_texts}, as the shape {list(tensor.shape)} says"
            raise InvalidRequestError(name, f"{len(values)} texts", allowed)
        found[name] = [_text(name, value) for value in values]
    return found


def _buffers(request: pb.ModelInferRequest) -> Sequence[bytes]:
    """Raw contents: one for each input, or none."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        allowed = f"{len(request.inputs)}, one for each input, or none"
        raise InvalidRequestError("raw_input_contents", f"{len(raw)} buffers", allowed)
    return raw


def _check_name(name: str, known: Mapping[str, str], found: Mapping[str, Any]) -> None:
    if name not in known or name in found:
        allowed = f"each once: {', '.join(known)}"
        raise InvalidRequestError("inputs", name, allowed)


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(name, value, "text in UTF-8") from None


def _split(name: str, data: bytes) -> list[bytes]:
    """The elements of a raw tensor of BYTES."""
    values, at = [], 0
    while at < len(data):
        end = at + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise InvalidRequestError(name, data, "lengths in four bytes, and as many bytes each")
        values.append(data[at + _LENGTH.size : end])
        at = end
    return values


def write_outputs(response: pb.ModelInferResponse, tensors: Sequence[Tensor]) -> None:
    """Adds tensors to a response."""
    for tensor in tensors:
        values = tensor.values
        shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        if isinstance(values, np.ndarray):
            data = values.astype("<f4").tobytes()
        elif tensor.datatype == "BYTES":
            data = b"".join(_LENGTH.pack(len(value)) + value for value in values)
        else:
            data = struct.pack(f"<{len(values)}{_PACKED[tensor.datatype]}", *values)
        response.raw_output_contents.append(data)


def _raw(name: str, data: bytes, datatype: str) -> bytes | bool:
    if datatype == "BOOL":
        if len(data) != 1:
            raise InvalidRequestError(name, data, "one byte")
        return data != b"\0"
    if len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        raise InvalidRequestError(name, data, "a length in four bytes, and as many bytes")
    return data[_LENGTH.size :]


def _content(tensor: pb.ModelInferRequest.InferInputTensor) -> bytes | bool:
    values = getattr(tensor.contents, _CONTENTS[tensor.datatype])
    if len(values) != 1:
        raise InvalidRequestError(tensor.name, f"{len(values)} values", "one value")
    value: bytes | bool = values[0]
    return value
