"""The operator's service, its own tokens, and the command that calls it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from octavo.engine.observability.schedule import Cell, Mark, Schedule, ScheduledStep
from octavo.server.cli import admin as admin_command
from octavo.server.cli.main import main
from octavo.server.proto.octavo.v1 import admin_pb2 as pb

ADMIN, USER = "admin-token-1", "user-token-01"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name, token in (("token_file", USER), ("admin_token_file", ADMIN)):
        paths[name] = str(tmp_path / name)
        Path(paths[name]).write_text(token + "\n")
    return paths


async def call(stand: Any, name: str, token: str | None) -> Any:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    method = stand.channel.unary_unary(
        f"/octavo.v1.AdminService/{name}",
        response_deserializer=getattr(pb, f"{name}Response").FromString,
    )
    return await method(b"", metadata=metadata)


async def code_of(stand: Any, name: str, token: str | None) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stand, name, token)
    return caught.value.code()


def test_only_an_admin_token_opens_it(on_stand, files):
    async def scenario(stand):
        for name in ("Drain", "FlushCache", "StartProfile", "StopProfile", "Trace"):
            for token in (None, USER, "wrong-token-1"):
                assert await code_of(stand, name, token) is grpc.StatusCode.UNAUTHENTICATED
        assert not stand.server.told_to_drain.is_set()

    on_stand(scenario, **files)


def test_an_admin_token_opens_nothing_else(on_stand, files):
    async def scenario(stand):
        method = stand.channel.unary_unary("/octavo.v1.OctavoService/GetLoad")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", metadata=(("authorization", f"Bearer {ADMIN}"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    on_stand(scenario, **files)


def test_without_an_admin_token_file_there_is_no_such_service(on_stand):
    async def scenario(stand):
        assert await code_of(stand, "Drain", None) is grpc.StatusCode.UNIMPLEMENTED

    on_stand(scenario)


def test_admin_tokens_are_asked_for_where_users_need_none(on_stand, files):
    async def scenario(stand):
        assert await code_of(stand, "Drain", None) is grpc.StatusCode.UNAUTHENTICATED
        await stand.client.load()

    on_stand(scenario, admin_token_file=files["admin_token_file"])


def test_drain_counts_those_in_flight_and_asks_for_the_end(on_stand, files):
    async def scenario(stand):
        answer = await call(stand, "Drain", ADMIN)
        assert answer.num_inflight == 0
        assert stand.server.told_to_drain.is_set()

    on_stand(scenario, **files)


def test_flush_cache_tells_what_it_flushed(on_stand, files):
    async def scenario(stand):
        async def flush() -> tuple[int, int]:
            return 7, 3

        stand.engine.flush_prefix_cache = flush
        answer = await call(stand, "FlushCache", ADMIN)
        assert (answer.num_pages, answer.num_host_pages) == (7, 3)

    on_stand(scenario, **files)


def test_a_profile_is_recorded_once_at_a_time(on_stand, files, tmp_path, monkeypatch):
    import jax

    traced: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", traced.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("end"))

    async def scenario(stand):
        refused = grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(stand, "StopProfile", ADMIN) is refused
        assert (await call(stand, "StartProfile", ADMIN)).directory == str(tmp_path)
        assert await code_of(stand, "StartProfile", ADMIN) is refused
        await call(stand, "StopProfile", ADMIN)
        assert traced == [str(tmp_path), "end"]

    on_stand(scenario, **files, profile_dir=str(tmp_path))


def test_without_a_directory_nothing_is_recorded(on_stand, files):
    async def scenario(stand):
        code = await code_of(stand, "StartProfile", ADMIN)
        assert code is grpc.StatusCode.FAILED_PRECONDITION

    on_stand(scenario, **files)


SCHEDULE = Schedule(
    [ScheduledStep(3, 5.0, 5.2, 0.1, 1, (Cell("a", 2, "prefill", 12, 0.3, "admitted: now"),))],
    [Mark(5.0, "arrived", "a")],
)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan"), float("inf")])
def test_a_trace_of_no_length_is_refused(on_stand, files, seconds, capsys):
    async def scenario(stand):
        given = ("--token-file", files["admin_token_file"], "--target", stand.address)
        words = ["admin", "trace", *given, f"--seconds={seconds}"]
        assert await asyncio.to_thread(main, words) == 2

    on_stand(scenario, **files)
    assert "seconds" in (said := capsys.readouterr().err)
    assert "at most 60" in said


def test_the_command_writes_a_trace(on_stand, files, tmp_path, capsys):
    async def scenario(stand):
        async def schedules() -> list[Schedule]:
            return [SCHEDULE]

        stand.engine.schedules = schedules
        stand.engine.engine = SimpleNamespace(clock=SimpleNamespace(now_s=lambda: 4.0))
        given = ("--token-file", files["admin_token_file"], "--target", stand.address)
        words = ["admin", "trace", *given, "--seconds=0.1", f"--output={tmp_path / 'trace'}"]
        assert await asyncio.to_thread(main, words) == 0

    on_stand(scenario, **files)
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    (chunk,) = [event for event in events if event["name"] == "prefill"]
    assert chunk["args"] == {
        "request": "a", "tokens": 12, "why": "admitted: now", "slack_ms": 300.0
    }  # fmt: skip


def test_the_command_calls_it(on_stand, files, capsys, monkeypatch):
    monkeypatch.setenv(admin_command.TOKEN_VARIABLE, "wrong-token-1")

    async def scenario(stand):
        def command(*args: str) -> int:
            return main(["admin", *args, "--target", stand.address])

        assert await asyncio.to_thread(command, "drain") == 1
        given = ("--token-file", files["admin_token_file"])
        assert await asyncio.to_thread(command, "drain", *given) == 0
        assert stand.server.told_to_drain.is_set()

    on_stand(scenario, **files)
    assert "UNAUTHENTICATED" in (captured := capsys.readouterr()).err or "token" in captured.err


def test_the_command_needs_a_token(monkeypatch, capsys):
    monkeypatch.delenv(admin_command.TOKEN_VARIABLE, raising=False)
    assert main(["admin", "drain"]) == 2
    assert "token_file" in capsys.readouterr().err
