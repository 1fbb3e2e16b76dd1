"""Connections that no client should make: everybody else is served on, in the API's own shape."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from octavo.server.http import connection, gate
from octavo.server.http.turns import MOST_STARTS, Turns

ASK = {"prompt": "x", "max_tokens": 3}
TOKEN = "token-0123456789"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps(ASK).encode()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return json.loads(self.body)["error"]["code"]


class Raw:
    """A client that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split()[1]), headers, body)

    async def closes(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return await self.reader.read(1) == b""
        return True


@contextlib.asynccontextmanager
async def raw(stand, *parts: bytes) -> AsyncIterator[Raw]:
    host, port = stand.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
        yield Raw(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def client_of(stand, **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stand.http, timeout=20, **options)


async def silent(stand, count: int, stack: contextlib.AsyncExitStack, *parts: bytes) -> list[Raw]:
    return [await stack.enter_async_context(raw(stand, *parts)) for _ in range(count)]


async def serves(stand) -> None:
    """A client that comes anew is answered, by the probes' paths and by the engine."""
    async with client_of(stand) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize(
    "parts", [(), (b"GET /hea",), (HEAD + b"content-length: 9\r\n\r\n{",), (GET,)],
    ids=["silent", "half a header", "half a body", "kept alive"],
)  # fmt: skip
def test_idle_connections_make_room_and_streams_go_on(on_stand, parts):
    async def scenario(stand):
        stand.engine.gate.clear()
        body = json.dumps(ASK | {"stream": True}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        async with contextlib.AsyncExitStack() as stack:
            [stream] = await silent(stand, 1, stack, request)
            await stand.until(lambda: len(stand.engine.live) == 1)
            idle = await silent(stand, 60, stack, *parts)
            stand.engine.gate.set()
            await serves(stand)
            read = await stream.reader.readuntil(b"data: [DONE]")
            assert read.startswith(b"HTTP/1.1 200")
            while not idle[0].reader.at_eof():  # the oldest went first
                with contextlib.suppress(ConnectionError):
                    await idle[0].reader.read(4096)

    on_stand(scenario, http_port=0, max_connections=20)


def test_the_newest_connection_is_not_the_one_that_makes_room(on_stand):
    async def scenario(stand):
        async with contextlib.AsyncExitStack() as stack:
            await silent(stand, 40, stack)
            for _ in range(3):
                await serves(stand)
            [patient] = await silent(stand, 1, stack, HEAD)
            await silent(stand, 8, stack)
            patient.writer.write(b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            assert (await patient.answer()).status == 200

    on_stand(scenario, http_port=0, max_connections=20)


def test_requests_above_the_limit_get_the_documented_refusal(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        limits = httpx.Limits(max_connections=None)
        async with client_of(stand, limits=limits) as client:
            calls = [
                asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(300)
            ]
            await stand.until(lambda: sum(call.done() for call in calls) >= 292)
            for path in ("/health", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 200
            refused = [call.result() for call in calls if call.done()]
            stand.engine.gate.set()
            answers = await asyncio.gather(*calls)
        assert len(refused) == 292
        for answer in refused:
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "overloaded"
        assert sum(answer.status_code == 200 for answer in answers) == 8

    on_stand(scenario, http_port=0, max_concurrent_requests=8)


def test_bodies_that_never_come_take_no_place(on_stand, monkeypatch):
    monkeypatch.setattr("octavo.server.http.app.SPARE_CALLS", 0)

    async def scenario(stand):
        async with contextlib.AsyncExitStack() as stack:
            await silent(stand, 50, stack, HEAD + b"content-length: 9\r\n\r\n{")
            await silent(stand, 50, stack, HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
            await serves(stand)

    on_stand(scenario, http_port=0, max_concurrent_requests=2)


def test_the_probes_have_lanes_of_their_own(on_stand, monkeypatch):
    monkeypatch.setattr("octavo.server.http.app.SPARE_CALLS", 0)

    async def scenario(stand):
        stand.engine.gate.clear()
        async with client_of(stand) as client:
            call = asyncio.create_task(client.post("/v1/completions", json=ASK))
            await stand.until(lambda: len(stand.engine.live) == 1)
            for path in ("/health", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 200
            refused = await client.get("/v1/models")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "overloaded"
            stand.engine.gate.set()
            assert (await call).status_code == 200
            assert (await client.get("/v1/models")).status_code == 200

    on_stand(scenario, http_port=0, max_concurrent_requests=1)


def test_the_oldest_of_too_many_bytes_in_incomplete_bodies_is_given_up(on_stand, monkeypatch):
    monkeypatch.setattr(gate, "MOST_ARRIVING", 4)

    async def scenario(stand):
        part = HEAD + b"content-length: 1000\r\n\r\n" + b" " * 900
        async with contextlib.AsyncExitStack() as stack:
            old, *_ = await silent(stand, 8, stack, part)
            answer = await old.answer()
            assert (answer.status, answer.code) == (408, "request_timeout")
            await serves(stand)

    on_stand(scenario, http_port=0, max_message_bytes=1024)


MALFORMED = {
    "two framings": HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "the same, turned": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    "obsolete folding": HEAD + b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "folding by tabs": HEAD + b"x: a\r\n\tb\r\ncontent-length: 0\r\n\r\n",
    "a bare line feed": b"GET /health HTTP/1.1\r\nhost: x\nx: y\r\n\r\n",
    "bare line feeds alone": b"GET /health HTTP/1.1\nhost: x\n\n",
    "a bare carriage return": b"GET /health HTTP/1.1\r\nhost: x\rx: y\r\n\r\n",
    "a chunk's bare line feed": HEAD + b"transfer-encoding: chunked\r\n\r\n1\n{\r\n0\r\n\r\n",
    "a coding within chunks": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "another version": b"GET /health HTTP/3.0\r\nhost: x\r\n\r\n",
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a proxy's method": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path beyond ASCII": "GET /é HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
}  # fmt: skip


def test_requests_that_servers_may_read_differently_are_refused(on_stand, caplog):
    async def is_refused(stand, name: str) -> None:
        async with raw(stand, MALFORMED[name]) as client:
            answer = await client.answer()
            assert (name, answer.status, answer.code) == (name, 400, "malformed_http")
            assert (name, answer.headers["connection"]) == (name, "close")
            assert await client.closes(), name

    async def scenario(stand):
        # At once: the server waits for a second before it closes.
        await asyncio.gather(*(is_refused(stand, name) for name in MALFORMED))
        assert not stand.engine.seen
        await serves(stand)

    with caplog.at_level(logging.WARNING):
        on_stand(scenario, http_port=0)
    assert not caplog.records


def test_two_authorizations_are_refused_and_one_is_read(on_stand, tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        good, bad = (f"authorization: Bearer {t}\r\n".encode() for t in (TOKEN, "x" * 16))
        start = GET.removesuffix(b"\r\n")
        for fields, expected in [
            (good, 200), (bad, 401), (b"", 401),
            (good + bad, 400), (bad + good, 400), (good + good, 400),
        ]:  # fmt: skip
            async with raw(stand, start + fields + b"\r\n") as client:
                assert (await client.answer()).status == expected

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))


def test_a_token_comes_as_anthropics_clients_send_it_and_never_beside_another(on_stand, tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        good, bad = (f"authorization: Bearer {t}\r\n".encode() for t in (TOKEN, "x" * 16))
        key, wrong = (f"X-Api-Key: {t}\r\n".encode() for t in (TOKEN, "x" * 16))
        start = GET.removesuffix(b"\r\n")
        for fields, expected in [
            (key, 200), (wrong, 401), (good + key, 200), (bad + wrong, 401),
            (good + wrong, 400), (bad + key, 400), (key + wrong, 400), (key + key, 400),
            (b"authorization: Basic abc\r\n" + key, 400),
        ]:  # fmt: skip
            async with raw(stand, start + fields + b"\r\n") as client:
                assert (await client.answer()).status == expected, fields

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))


def test_a_refusal_at_the_gate_has_the_shape_of_its_api(on_stand, tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        async with httpx.AsyncClient(base_url=stand.http) as client:
            ours = await client.post("/v1/chat/completions", json={})
            theirs = await client.post("/v1/messages/count_tokens", json={})
        assert (ours.status_code, theirs.status_code) == (401, 401)
        assert ours.json()["error"]["code"] == "invalid_api_key"
        message = ours.json()["error"]["message"]
        wrong = {"type": "authentication_error", "message": message}
        assert theirs.json() == {"type": "error", "error": wrong}

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))


def test_the_body_of_a_refused_request_is_not_parsed(on_stand, tmp_path, monkeypatch):
    (tmp_path / "tokens").write_text(TOKEN)
    parsed: list[int] = []
    on_body = connection.Connection.on_body

    def counting(self, body: bytes) -> None:
        parsed.append(len(body))
        on_body(self, body)

    monkeypatch.setattr(connection.Connection, "on_body", counting)

    async def scenario(stand):
        chunks = b"1\r\n \r\n" * 1_000_000
        async with raw(stand, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks) as client:
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert await client.closes()
        assert len(parsed) <= connection.HEAD_SLICE // 6

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))


def test_a_refused_request_that_came_whole_keeps_its_connection(on_stand, tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        whole = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        async with raw(stand, whole) as client:
            answer = await client.answer()
            assert (answer.status, answer.headers.get("connection")) == (401, None)
            client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer()).status == 200

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))


@pytest.mark.parametrize("size", [1, 3, 50])
def test_small_chunks_are_read_unless_they_are_mostly_framing(on_stand, size):
    def chunked(data: bytes) -> bytes:
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"

    async def scenario(stand):
        async with raw(stand, head + chunked(BODY + b" " * 5000) + GET) as client:
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 200  # what came behind it
        async with raw(stand, head + chunked(BODY + b" " * 300_000)) as client:
            answer = await client.answer()
            assert answer.status == (200 if size == 50 else 400)
            if answer.status == 400:
                assert answer.code == "malformed_http"
                assert await client.closes()
        await serves(stand)

    on_stand(scenario, http_port=0)


def test_fields_behind_a_body_are_not_read(on_stand):
    async def scenario(stand):
        body = b"%x\r\n%b\r\n0\r\nx-request-id: late\r\n\r\n" % (len(BODY), BODY)
        async with raw(stand, HEAD + b"transfer-encoding: chunked\r\n\r\n" + body) as client:
            answer = await client.answer()
        assert answer.status == 200
        assert answer.headers["x-request-id"] != "late"

    on_stand(scenario, http_port=0)


@pytest.mark.parametrize("framing", ["length", "chunks", "none"])
def test_an_offer_of_another_protocol_is_ignored(on_stand, framing):
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    body = {
        "length": HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY,
        "chunks": HEAD + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        % (len(BODY), BODY),
        "none": GET.removesuffix(b"\r\n") + offer + b"\r\n",
    }[framing]  # fmt: skip

    async def scenario(stand):
        async with raw(stand, body + GET) as client:
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 200
        assert [seen["prompt"] for seen in stand.engine.seen] == ["x"] * (framing != "none")

    on_stand(scenario, http_port=0)


def test_every_byte_may_come_alone(on_stand):
    async def scenario(stand):
        request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        async with raw(stand) as client:
            for place in range(len(request)):
                client.writer.write(request[place : place + 1])
                await asyncio.sleep(0)
            assert (await client.answer()).status == 200

    on_stand(scenario, http_port=0)


def test_some_requests_may_be_sent_ahead_and_many_may_not(on_stand):
    async def scenario(stand):
        async with raw(stand, GET * 5) as client:
            for _ in range(5):
                assert (await client.answer()).status == 200
        async with raw(stand, GET * 10_000) as client:
            answers = 0
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while (await client.answer()).status == 200:
                    answers += 1
            assert answers <= connection.MOST_PIPELINED + 1
        await serves(stand)

    on_stand(scenario, http_port=0)


@pytest.mark.parametrize(
    "fields", [b"a: b\r\n" * 200, b"a: " + b"b" * 5000 + b"\r\n", b"a: " + b"b" * 100_000]
)
def test_a_header_has_limits_of_size_and_number(on_stand, fields):
    async def scenario(stand):
        async with raw(stand, GET.removesuffix(b"\r\n") + fields + b"\r\n") as client:
            answer = await client.answer()
            assert (answer.status, answer.code) == (431, "header_too_large")

    on_stand(scenario, http_port=0, max_header_bytes=4096)


def test_a_header_that_does_not_end_is_given_up_and_a_slow_answer_is_not(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        async with raw(stand, b"GET /") as slow, raw(stand, request, b"GET /v1") as ahead:
            assert await slow.closes()
            await asyncio.sleep(0.3)
            stand.engine.gate.set()
            assert (await ahead.answer()).status == 200
            assert await ahead.closes()

    on_stand(scenario, http_port=0, receive_timeout_s=0.2)


MANY_CLIENTS = """
import socket, sys, time
clients = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(100)]
print("connected", flush=True)
sys.stdin.read()
"""


def test_descriptors_that_run_out_are_one_warning(on_stand, caplog):
    async def scenario(stand):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MANY_CLIENTS, stand.http.rpartition(":")[2],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        host, port = stand.http.removeprefix("http://").split(":")
        mine = [socket.socket() for _ in range(2)]  # made before there are none
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 12, hard))
        try:
            await crowd.stdout.readline()
            loop = asyncio.get_running_loop()
            for client in mine:
                client.setblocking(False)
                await loop.sock_connect(client, (host, int(port)))
                await loop.sock_sendall(client, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                async with asyncio.timeout(30):
                    assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for client in mine:
                client.close()
            crowd.stdin.close()
            await crowd.wait()
        await serves(stand)

    with caplog.at_level(logging.WARNING):
        on_stand(scenario, http_port=0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(24) in caplog.text


@dataclass(eq=False)
class Slices:
    """Has so many slices to parse, each of which begins a request."""

    left: int
    name: str
    log: list[str] = field(default_factory=list)

    def parse_slice(self) -> tuple[bool, bool]:
        self.left -= 1
        self.log.append(self.name)
        return self.left > 0, True


async def test_connections_take_turns_and_few_requests_begin_in_one():
    log: list[str] = []
    turns = Turns()
    for name in ("a", "b", "c"):
        turns.add(Slices(20, name, log))
    turns.add(Slices(3, "probe", log), urgent=True)
    sizes = []
    while len(log) < 63:
        before = len(log)
        await asyncio.sleep(0)
        sizes.append(len(log) - before)
    assert max(sizes) <= MOST_STARTS + 1
    assert log[0] == "probe"
    ordinary = [name for name in log if name != "probe"]
    assert all(set(ordinary[i : i + 3]) == {"a", "b", "c"} for i in range(0, 60, 3))


def test_a_connection_that_is_reset_leaves_nothing_to_the_collector(on_stand):
    async def scenario(stand):
        async def reset() -> None:
            async with raw(stand, HEAD, b"content-length: %d\r\n\r\n" % len(BODY), BODY) as client:
                await client.reader.read(1)
                ours = client.writer.get_extra_info("socket")
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0.05)

        await reset()
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await reset()
            kinds = {type(held) for held in gc.get_objects()}
        finally:
            gc.enable()
        assert connection.Connection not in kinds
        assert "_SelectorSocketTransport" not in {kind.__name__ for kind in kinds}

    on_stand(scenario, http_port=0)
