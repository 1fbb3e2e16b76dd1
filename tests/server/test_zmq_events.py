"""Events of the prefix cache over ZeroMQ, read as vLLM's readers do."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.client import OctavoClient, SamplingParams
from octavo.engine.errors import InvalidConfigError
from octavo.server.serve_config import ServeConfig

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

TOPIC = "kv@pod@tiny"


class Event(msgspec.Struct, array_like=True, tag=True):  # type: ignore[misc, call-arg]
    """As vLLM's own reader has it: an array that begins with the class's name."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True):  # type: ignore[misc, call-arg]
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Reader:
    """A subscriber that can ask for what it missed."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self._replay = self._context.socket(zmq.DEALER)
        for each in (self.live, self._replay):
            each.setsockopt(zmq.RCVTIMEO, 30_000)
        self.live.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self.live.connect(endpoint)
        self._replay.connect(replay)

    def next(self) -> tuple[int, EventBatch]:
        topic, number, payload = self.live.recv_multipart()
        assert topic.decode() == TOPIC
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)

    def ask(self, first: int) -> Iterator[tuple[int, EventBatch]]:
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            _, number, payload = self._replay.recv_multipart()
            if number == b"\xff" * 8:
                return
            yield int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def served(server_process: Any, tiny_model: Path, tiny_args: Any, tmp_path: Path) -> Iterator[Any]:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    args = ("--kv-events", "--num-kv-pages", "40", "--kv-events-topic", TOPIC)
    args += ("--kv-events-endpoint", endpoints[0], "--kv-events-replay-endpoint", endpoints[1])
    with server_process(
        "--model", str(tiny_model), *tiny_args, *args, log=tmp_path / "log"
    ) as process:
        reader = Reader(*endpoints)
        with OctavoClient(process.grpc) as client:
            yield process, client, reader
        reader.close()


def test_a_reader_of_vllms_events_knows_the_cache(served: Any) -> None:
    process, client, reader = served
    params = SamplingParams(max_tokens=1, temperature=0)
    ids = list(range(5, 90))
    client.generate(ids, params)
    # A subscriber may have come too late for the first: it asks for all.
    found: list[Any] = []
    while len(found) < 6:
        found = [event for _, batch in reader.ask(0) for event in batch.events]
    assert isinstance(found[0], AllBlocksCleared)
    stored = found[1:]
    assert all(isinstance(event, BlockStored) for event in stored)
    assert [token for event in stored for token in event.token_ids] == ids[:80]
    assert {(e.block_size, e.medium, e.lora_id, e.lora_name) for e in stored} == {
        (16, "GPU", None, None)
    }
    names = [event.block_hashes[0] for event in stored]
    assert [event.parent_block_hash for event in stored] == [None, *names[:-1]]
    assert all(0 <= name < 2**64 for name in names)
    # What comes and goes from here on comes by itself; others' prompts take the pages.
    for number in range(8):
        client.generate([100 + number] * 200, params)
    numbers, removed = [], set()
    while not removed.issuperset(names):
        number, batch = reader.next()
        numbers.append(number)
        removed |= {
            name
            for event in batch.events
            if isinstance(event, BlockRemoved)
            for name in event.block_hashes
        }
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    # A replay begins where it is asked to.
    again = [number for number, _ in reader.ask(numbers[-1])]
    assert again[0] == numbers[-1]
    process.popen.terminate()
    assert process.ended(30) == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557"}, "kv_events_endpoint"),
        ({"kv_events": True, "kv_events_replay_endpoint": "tcp://127.0.0.1:5558"},
         "kv_events_replay_endpoint"),
    ],
)  # fmt: skip
def test_settings_that_say_nothing_alone_are_refused(settings: Any, field: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field} = .*given together with"):
        ServeConfig(**settings)


def test_an_endpoint_that_is_taken_is_said(tiny_model: Path, tiny_args: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "octavo.server.cli.main", "serve", "--model", str(tiny_model),
             "--quiet", "--grpc-port", "0", *tiny_args, "--kv-events",
             "--kv-events-endpoint", endpoint],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"kv_events_endpoint = '{endpoint}' is not allowed: tcp://HOST:PORT" in done.stderr
