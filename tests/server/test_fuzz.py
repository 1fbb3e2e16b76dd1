"""A slice of `make fuzz`, and the served OpenAPI document against schemathesis."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

pytest.importorskip("httpx")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import fuzz, fuzz_messages

    return SimpleNamespace(run=fuzz, messages=fuzz_messages)


def test_broken_messages_harm_nobody(live, fuzz) -> None:
    fuzzer = fuzz.run.Fuzzer(live.grpc, live.http, seed=7)
    asyncio.run(fuzzer.run(num_grpc=700, num_http=200))
    found = fuzzer.found
    assert found.faults == []
    assert sum(found.statuses.values()) == 700
    assert sum(found.http_statuses.values()) == 200
    assert found.statuses["OK"] > 50, "hardly any message was served: the fuzzer is too wild"
    assert found.statuses["INVALID_ARGUMENT"] > 50
    watched = found.watched
    assert watched.streams > 0
    assert len(watched.first_ms) == watched.streams < len(watched.gaps_ms)
    assert set(watched.first_ms) <= set(watched.gaps_ms)
    assert live.popen.poll() is None


def test_messages_reach_every_field(fuzz) -> None:
    rng = random.Random(1)
    seen: set[str] = set()
    for _ in range(300):
        message = fuzz.messages.random_message(pb.GenerateRequest, rng)
        seen |= {field.name for field, _ in message.ListFields()}
    assert seen == set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)


def test_bytes_are_broken(fuzz) -> None:
    rng = random.Random(2)
    raw = pb.GenerateRequest(prompt="Hello", request_id="a").SerializeToString()
    assert len({fuzz.messages.break_bytes(raw, rng) for _ in range(100)}) > 50


def test_requests_made_from_the_served_document_get_no_server_error(live, tmp_path) -> None:
    pytest.importorskip("schemathesis")
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("run", f"{live.http}/openapi.json"),
        *("--checks", "not_a_server_error", "--max-examples", "4", "--seed", "1"),
        *("--phases", "examples,fuzzing", "--generation-database", "none", "--no-color"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert live.popen.poll() is None
