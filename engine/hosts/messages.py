"""What hosts of a group tell each other: numbers and arrays, framed, counted and checked.

A frame is a head (length, kind, sequence number, counts), the numbers, the arrays with their types
and shapes, and a keyed checksum over all of it. There is no pickle: whatever a frame says, reading
it makes numbers and arrays. With a token, the key comes of it, so that nobody else can write one.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_FRAME_BYTES, MAX_GREETING_BYTES = 1 << 28, 1 << 16
"""Longest frame taken, and longest one of who has not shown yet that it knows the token."""
CHECKSUM_BYTES = 8

_HEAD = struct.Struct("<IBQBB")  # length of what follows the head, kind, sequence, counts
_ARRAY = struct.Struct("<BB")  # type, dimensions
_DTYPES = tuple(np.dtype(each) for each in (np.int32, np.uint32, np.float32, np.uint8, np.int64))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(enum.IntEnum):
    """What a message is about. Commands go to followers, reports come from them."""

    # A handshake's, in this order.
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    SETUP = 5
    AGREED = 6
    READY = 7
    # Commands.
    STEP = 16
    ROW = 17
    MASKS = 18
    COPY = 19
    LAND = 20
    RESET = 21
    SLEEP = 22
    WAKE = 23
    READ_WEIGHTS = 24
    COMPILE = 25
    PING = 26
    CLOSE = 27
    # Reports.
    ALIVE = 48
    PROGRAM = 49
    COPIED = 50
    DIGEST = 51
    FAILED = 52
    LAUNCHED = 53


class BrokenLinkError(ConnectionError):
    """The other side is gone, or wrote what cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A command or a report.

    Attributes:
        kind: what it is about.
        numbers: 64-bit integers; the kind says what they mean.
        arrays: of int32, uint32, float32, uint8 or int64; those that were read are read-only.
    """

    kind: Kind
    numbers: tuple[int, ...] = ()
    arrays: Sequence[NDArray[Any]] = ()

    @classmethod
    def of_json(cls, kind: Kind, content: Any) -> Message:
        """A message that carries JSON."""
        return cls(kind, (), (np.frombuffer(json.dumps(content).encode(), np.uint8),))

    def json(self) -> Any:
        """The JSON that it carries.

        Raises:
            BrokenLinkError: it carries none.
        """
        try:
            return json.loads(self.arrays[0].tobytes())
        except (IndexError, ValueError) as error:
            raise BrokenLinkError(f"a {self.kind.name} without JSON") from error


def encode(message: Message, sequence: int, key: bytes) -> bytes:
    """The frame of a message."""
    parts = [struct.pack(f"<{len(message.numbers)}q", *message.numbers)]
    for array in message.arrays:
        parts.append(_ARRAY.pack(_CODES[array.dtype], array.ndim))
        parts.append(struct.pack(f"<{array.ndim}I", *array.shape))
        parts.append(array.tobytes())
    body = b"".join(parts)
    counts = len(message.numbers), len(message.arrays)
    head = _HEAD.pack(len(body) + CHECKSUM_BYTES, message.kind, sequence, *counts)
    return b"".join((head, body, checksum(head + body, key)))


def checksum(data: bytes, key: bytes) -> bytes:
    """The checksum of a frame, which only who has the key can make."""
    return hashlib.blake2b(data, key=key, digest_size=CHECKSUM_BYTES).digest()


def _decode(kind: int, num_numbers: int, num_arrays: int, body: bytes) -> Message:
    numbers = struct.unpack_from(f"<{num_numbers}q", body)
    at, arrays = 8 * num_numbers, []
    for _ in range(num_arrays):
        code, ndim = _ARRAY.unpack_from(body, at)
        shape = struct.unpack_from(f"<{ndim}I", body, at + _ARRAY.size)
        at += _ARRAY.size + 4 * ndim
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(body, _DTYPES[code], count, at).reshape(shape))
        at += count * _DTYPES[code].itemsize
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")
    return Message(Kind(kind), numbers, arrays)


class Link:
    """A connection to another host. Any thread may send; one at a time receives.

    Args:
        sock: connected.

    Attributes:
        num_sent: messages that were sent, and so the sequence number of the next one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._send_key = self._receive_key = b""
        self._max_bytes = MAX_GREETING_BYTES
        self.num_sent = 0
        self._num_received = 0

    def trust(self, send_key: bytes, receive_key: bytes) -> None:
        """Begins to count anew, with other keys, once the other side has shown who it is."""
        self._send_key, self._receive_key = send_key, receive_key
        self._max_bytes = MAX_FRAME_BYTES
        self.num_sent = self._num_received = 0

    def send(self, message: Message) -> None:
        """Sends a message, after all that were sent before.

        Raises:
            BrokenLinkError: the other side is gone.
        """
        with self._sending:
            self.send_frame(encode(message, self.num_sent, self._send_key))
            self.num_sent += 1

    def send_frame(self, frame: bytes) -> None:
        """Sends what `encode` made; who calls it sees to keys, numbers and turns.

        Raises:
            BrokenLinkError: the other side is gone.
        """
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise BrokenLinkError(f"nothing can be sent: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Args:
            timeout_s: seconds of silence after which the other side counts as gone; None waits.

        Raises:
            BrokenLinkError: the other side is gone, or a frame is damaged, repeated, left out, or
                not made with the key.
        """
        try:
            self._sock.settimeout(timeout_s)
            head = self._exactly(_HEAD.size)
            length, kind, sequence, num_numbers, num_arrays = _HEAD.unpack(head)
            if not CHECKSUM_BYTES <= length <= self._max_bytes:
                raise BrokenLinkError(f"a frame of {length} bytes")
            body = self._exactly(length)
        except TimeoutError as error:
            raise BrokenLinkError(f"silent for {timeout_s:.3g} s") from error
        except BrokenLinkError:
            raise
        except OSError as error:
            raise BrokenLinkError(f"nothing can be received: {error}") from error
        body, found = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
        if found != checksum(head + body, self._receive_key):
            raise BrokenLinkError(f"the checksum of message {sequence} is wrong")
        if sequence != self._num_received:
            raise BrokenLinkError(f"message {sequence} came in place of {self._num_received}")
        self._num_received += 1
        try:
            return _decode(kind, num_numbers, num_arrays, body)
        except (ValueError, IndexError, struct.error) as error:
            raise BrokenLinkError(f"message {sequence} cannot be read: {error}") from error

    def close(self) -> None:
        """Ends the connection, also under a thread that receives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._sock.recv(num_bytes - len(data))
            if not part:
                raise BrokenLinkError("the connection was closed")
            data += part
        return bytes(data)
