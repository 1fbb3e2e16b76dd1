"""Messages that no sane client sends: made from a message's description, then broken."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MOST_TOKENS = 8
"""Of most requests: a fuzzer wants many messages, not long answers."""

_INTS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    1e-45,
    1e38,
    -1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
_TEXTS = (
    *("", " ", "a", "Hello, world", "\x00", "\x7f\x1b[31m", "\u202e\ufeff", "🜁🜂" * 9, "%s%n{}"),
    *("a" * 300, "\n\r\n", "../../etc/passwd", '{"type": "object"}', "[", "(a+)+$"),
)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def random_message(kind: type[Message], rng: random.Random, depth: int = 0) -> Message:
    """A message whose fields are set, or not, to edge values and noise."""
    message = kind()
    share = rng.choice((0.1, 0.3, 0.7))
    for field in kind.DESCRIPTOR.fields:
        if rng.random() < share and depth < 4:
            _fill(message, field, rng, depth)
    return message


def tame(message: Any, rng: random.Random) -> None:
    """Makes most generation requests short ones that could be served."""
    if message.DESCRIPTOR.name != "GenerateRequest":
        return
    if rng.random() < 0.8:
        message.ClearField(rng.choice(("prompt", "prompt_token_ids")))
        if not message.HasField("prompt_token_ids"):
            message.prompt = rng.choice(_TEXTS)
        message.ClearField("model")
    if rng.random() < 0.95:
        message.sampling_params.max_tokens = rng.randint(0, MOST_TOKENS)
        message.sampling_params.unlimited_tokens = False
        message.sampling_params.min_tokens = 0
        message.sampling_params.n = rng.choice((0, 1, 1, 1, 2, 3))


def break_bytes(raw: bytes, rng: random.Random) -> bytes:
    """The message with bits flipped, bytes dropped, doubled or added, or cut off."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(data))
        action = rng.randrange(5)
        if action == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[place:place] = rng.randbytes(rng.randint(1, 8))
        elif action == 2:
            del data[place : place + rng.randint(1, 8)]
        elif action == 3:
            data[place:place] = data[: rng.randint(0, 32)]
        else:
            del data[place:]
    return bytes(data)


def _fill(message: Message, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    count = rng.choice((0, 1, 2, 5, 40)) if field.is_repeated else 1
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(count):
            if value.message_type is None:
                getattr(message, field.name)[_scalar(key, rng)] = _scalar(value, rng)
        return
    for _ in range(count):
        if entry is not None:
            inner = random_message(entry._concrete_class, rng, depth + 1)
            target = getattr(message, field.name)
            (target.add() if field.is_repeated else target).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).append(_scalar(field, rng))
        else:
            setattr(message, field.name, _scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        value = rng.choice((rng.choice(_INTS), rng.randint(0, 300), rng.randint(low, high)))
        return min(max(value, low), high)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        value = rng.choice((rng.choice(_FLOATS), rng.uniform(-2, 2)))
        is_wide = kind == FieldDescriptor.CPPTYPE_FLOAT and abs(value) > 3e38
        return float("inf") if is_wide else value
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*field.enum_type.values_by_number, 99, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randint(0, 40))
    return rng.choice(_TEXTS)
