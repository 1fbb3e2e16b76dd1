"""Messages arrive as they were written, or not at all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from octavo.engine.execution.row_inputs import RowInputs
from octavo.engine.hosts import commands
from octavo.engine.hosts.messages import (
    MAX_GREETING_BYTES,
    BrokenLinkError,
    Kind,
    Link,
    Message,
    encode,
)
from octavo.engine.scheduler.step_plan import PageCopy
from tests.engine.hosts.pair import KEYS, connected


@pytest.fixture
def links() -> Any:
    ends = connected()
    ends[0].trust(*KEYS)
    ends[1].trust(*reversed(KEYS))
    yield ends
    for end in ends:
        end.close()


MESSAGES = [
    Message(Kind.PING),
    Message(Kind.RESET, (2**62, -1)),
    Message(
        Kind.STEP,
        (3, 0),
        [
            np.arange(7, dtype=np.int32),
            np.zeros((0, 3), np.uint32),
            np.float32(2.5).reshape(()),
            np.arange(6, dtype=np.int64).reshape(2, 3),
            np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2],
        ],
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind.name)
def test_a_message_arrives_as_it_was_written(links: Any, message: Message) -> None:
    for _ in range(2):
        links[0].send(message)
        found = links[1].receive(10)
        assert (found.kind, found.numbers) == (message.kind, message.numbers)
        for theirs, ours in zip(found.arrays, message.arrays, strict=True):
            np.testing.assert_array_equal(theirs, ours)
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape


FRAME = encode(MESSAGES[2], 0, KEYS[0])


@pytest.mark.parametrize("place", range(0, len(FRAME), 5))
def test_a_damaged_frame_is_refused(links: Any, place: int) -> None:
    damaged = bytearray(FRAME)
    damaged[place] ^= 4
    links[0].send_frame(bytes(damaged))
    links[0].close()
    with pytest.raises(BrokenLinkError):
        links[1].receive(10)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([FRAME, FRAME], "message 0 came in place of 1"),
        ([encode(MESSAGES[0], 1, KEYS[0])], "message 1 came in place of 0"),
        ([encode(MESSAGES[0], 0, b"another key")], "the checksum of message 0 is wrong"),
        ([FRAME[:9]], "the connection was closed"),
        ([b"\xff" * 40], "a frame of 4294967295 bytes"),
        ([encode(Message(200), 0, KEYS[0])], "200 is not a valid Kind"),  # type: ignore[arg-type]
    ],
)
def test_what_no_leader_writes_is_refused_by_name(
    links: Any, frames: list[bytes], reason: str
) -> None:
    for frame in frames:
        links[0].send_frame(frame)
    links[0].close()
    for _ in frames[1:]:
        links[1].receive(10)
    with pytest.raises(BrokenLinkError, match=reason):
        links[1].receive(10)


def test_who_is_not_trusted_yet_may_not_send_much() -> None:
    ours, theirs = connected()
    long = Message(Kind.HELLO, (), [np.zeros(MAX_GREETING_BYTES, np.uint8)])
    threading.Thread(target=ours.send, args=(long,), daemon=True).start()
    with pytest.raises(BrokenLinkError, match="a frame of 65"):
        theirs.receive(10)
    ours.close()
    theirs.close()


def test_silence_counts_as_death(links: Any) -> None:
    with pytest.raises(BrokenLinkError, match=r"silent for 0\.01 s"):
        links[1].receive(0.01)


def test_a_row_and_a_copy_are_told_in_full() -> None:
    rows = [
        RowInputs((1, 2, 3), (), {7: 1.5, 9: -2.0}, None, ((4,), (5, 6))),
        RowInputs((), (8,), None, (), ()),
        RowInputs((1,), (), None, (3, 4), ()),
    ]
    for inputs in rows:
        slot, found = commands.read_row(commands.row(5, inputs))
        assert slot == 5
        assert list(found.prompt) == list(inputs.prompt)
        assert list(found.output) == list(inputs.output)
        assert found.logit_bias == inputs.logit_bias
        assert (found.allowed is None) == (inputs.allowed is None)
        assert list(found.allowed or ()) == list(inputs.allowed or ())
        assert [tuple(word) for word in found.bad_words] == list(inputs.bad_words)
    copy = PageCopy(transfer_id=4, request_id="", device_pages=(3, 1), host_pages=(0, 9))
    for is_in in (True, False):
        assert commands.read_copy(commands.copy(copy, is_in=is_in)) == (copy, is_in)


def test_one_frame_serves_all_followers() -> None:
    ends = [connected() for _ in range(3)]
    frame = encode(MESSAGES[2], 0, KEYS[0])
    for ours, theirs in ends:
        theirs.trust(*reversed(KEYS))
        ours.send_frame(frame)
        assert theirs.receive(10).numbers == (3, 0)
        ours.close()
        theirs.close()


def test_a_link_that_is_gone_says_so(links: Any) -> None:
    links[0].close()
    with pytest.raises(BrokenLinkError, match="nothing can be sent"):
        links[0].send(MESSAGES[0])
    assert isinstance(links[1], Link)
