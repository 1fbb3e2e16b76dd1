"""Tensors of one element in and of a few out: all that a language model needs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.engine.errors import InvalidRequestError
from octavo.server.proto.kserve.v2 import inference_pb2 as pb

_LENGTH = struct.Struct("<I")
_PACKED = {"BOOL": "?", "UINT32": "I", "FP32": "f"}
_CONTENTS = {"BOOL": "bool_contents", "BYTES": "bytes_contents"}


class Tensor(NamedTuple):
    """A named tensor of one dimension.

    Attributes:
        name, datatype: as the protocol has them.
        values: bytes of BYTES, else numbers.
    """

    name: str
    datatype: str
    values: Sequence[Any]


def read_inputs(request: pb.ModelInferRequest, known: dict[str, str]) -> dict[str, Any]:
    """The inputs, each of one element: text of BYTES, else a boolean.

    Args:
        known: datatypes by name.

    Raises:
        InvalidRequestError: an input that is not known, given twice, or malformed; names it.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        allowed = f"{len(request.inputs)}, one for each input, or none"
        raise InvalidRequestError("raw_input_contents", f"{len(raw)} buffers", allowed)
    found: dict[str, Any] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in known or name in found:
            allowed = f"each once: {', '.join(known)}"
            raise InvalidRequestError("inputs", name, allowed)
        if tensor.datatype != known[name] or any(size != 1 for size in tensor.shape):
            shown = f"{tensor.datatype} {list(tensor.shape)}"
            raise InvalidRequestError(name, shown, f"{known[name]} of one element, shape [1]")
        value = _raw(name, raw[index], known[name]) if raw else _content(tensor)
        try:
            found[name] = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise InvalidRequestError(name, value, "text in UTF-8") from None
    return found


def write_outputs(response: pb.ModelInferResponse, tensors: Sequence[Tensor]) -> None:
    """Adds tensors to a response."""
    for tensor in tensors:
        response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)]
        )  # fmt: skip
        if tensor.datatype == "BYTES":
            data = b"".join(_LENGTH.pack(len(value)) + value for value in tensor.values)
        else:
            data = struct.pack(f"<{len(tensor.values)}{_PACKED[tensor.datatype]}", *tensor.values)
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
