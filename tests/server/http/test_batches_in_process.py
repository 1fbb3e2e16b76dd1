"""What becomes of batches when lines wait, the server is full, time is over or the server stops."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.engine.errors import InvalidConfigError, OverloadedError, StepFailedError
from octavo.engine.request import Priority
from octavo.server.http.batches import runner, service
from octavo.server.http.batches.folder import BatchFolder
from octavo.server.serve import OctavoServer
from octavo.server.serve_config import ServeConfig

NUM_ROWS = 2
ENDED = ("completed", "failed", "cancelled", "expired")


def line(name: str, **change: Any) -> str:
    body = {"prompt": "x", "max_tokens": 3}
    whole = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(whole | change)


class Client:
    """Asks a stand for files and batches."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=30)

    async def upload(self, lines: list[str]) -> str:
        content = "\n".join(lines).encode()
        answer = await self.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, file_id: str, window: str = "24h") -> dict[str, Any]:
        body = {
            "input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": window
        }  # fmt: skip
        answer = await self.http.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return dict((await self.http.get(f"/v1/batches/{batch_id}")).json())

    async def ended(self, batch_id: str) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while (batch := await self.batch(batch_id))["status"] not in ENDED:
                await asyncio.sleep(0.02)
        return batch

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = await self.http.get(f"/v1/files/{file_id}/content")
        return [json.loads(each) for each in answer.text.splitlines()]

    async def results(self, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results and errors by the name of their line."""
        good, bad = [
            {each["custom_id"]: each for each in await self.lines_of(batch[f"{kind}_file_id"])}
            for kind in ("output", "error")
        ]
        counts = batch["request_counts"]
        assert (counts["completed"], counts["failed"]) == (len(good), len(bad))
        return good, bad


@pytest.fixture
def on_batches(on_stand, tmp_path: Path):
    """Runs a scenario against a server with a folder, as often as wanted."""

    def run(scenario, **config: Any) -> None:
        async def with_client(stand) -> None:
            client = Client(stand.http)
            try:
                await scenario(stand, client)
            finally:
                await client.http.aclose()

        on_stand(with_client, http_port=0, batch_files_dir=str(tmp_path / "folder"), **config)

    return run


def test_lines_are_answered_at_low_priority_a_few_at_a_time(on_batches):
    async def scenario(stand, client):
        stand.engine.gate.clear()
        batch = await client.create(await client.upload([line(str(k)) for k in range(20)]))
        assert (batch["status"], batch["request_counts"]["total"]) == ("validating", 0)
        window = runner.LINES_PER_ROW * NUM_ROWS
        await stand.until(lambda: len(stand.engine.live) == window)
        await asyncio.sleep(0.1)
        assert len(stand.engine.live) == window
        now = await client.batch(batch["id"])
        assert (now["status"], now["request_counts"]["total"]) == ("in_progress", 20)
        assert now["output_file_id"] is None
        stand.engine.gate.set()
        ended = await client.ended(batch["id"])
        good, bad = await client.results(ended)
        assert (ended["status"], len(good), len(bad)) == ("completed", 20, 0)
        assert {seen["priority"] for seen in stand.engine.seen} == {Priority.LOW}
        for name in ("in_progress_at", "finalizing_at", "completed_at"):
            assert ended[name] >= ended["created_at"]
        assert good["7"]["response"]["body"]["choices"][0]["text"] == "1 2 3 "

    on_batches(scenario)


def test_a_restart_answers_what_has_no_result_and_nothing_twice(on_batches):
    made: dict[str, Any] = {}

    async def first(stand, client):
        made["file"] = await client.upload(
            [line(str(k), body={"prompt": "x", "max_tokens": 1 + 2 * (k >= 6)}) for k in range(12)]
        )
        made["batch"] = await client.create(made["file"])
        stand.engine.gate.clear()  # those of one token are answered, the others wait
        await stand.until(lambda: len(stand.engine.live) == runner.LINES_PER_ROW * NUM_ROWS)

    async def second(stand, client):
        ended = await client.ended(made["batch"]["id"])
        good, bad = await client.results(ended)
        assert (ended["status"], sorted(good, key=int)) == ("completed", [*map(str, range(12))])
        assert not bad
        assert len(stand.engine.seen) == 6
        listed = (await client.http.get("/v1/files")).json()["data"]
        assert {each["id"] for each in listed} == {made["file"], ended["output_file_id"]}

    async def third(stand, client):
        ended = await client.batch(made["batch"]["id"])
        good, _ = await client.results(ended)
        assert len(good) == 12
        assert not stand.engine.seen

    for scenario in (first, second, third):
        on_batches(scenario, drain_timeout_s=0.0)


def test_a_cancelled_batch_keeps_what_is_answered_and_one_that_waits_ends_at_once(on_batches):
    async def scenario(stand, client):
        lines = [
            line(str(k), body={"prompt": "x", "max_tokens": 1 + 2 * (k >= 4)}) for k in range(50)
        ]
        file_id = await client.upload(lines)
        stand.engine.gate.clear()
        batch, waiting = await client.create(file_id), await client.create(file_id)
        await stand.until(lambda: len(stand.engine.live) == runner.LINES_PER_ROW * NUM_ROWS)
        refused = await client.http.delete(f"/v1/files/{file_id}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file_id")
        for each, num_good in ((waiting, 0), (batch, 4)):
            answer = (await client.http.post(f"/v1/batches/{each['id']}/cancel")).json()
            assert answer["status"] in ("cancelling", "cancelled")
            ended = await client.ended(each["id"])
            good, bad = await client.results(ended)
            assert (ended["status"], len(good), len(bad)) == ("cancelled", num_good, 0)
            assert ended["cancelled_at"] >= ended["cancelling_at"]
        assert not stand.engine.live
        again = await client.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert (again.status_code, again.json()["error"]["param"]) == (400, "batch_id")
        assert (await client.http.delete(f"/v1/files/{file_id}")).json()["deleted"]

    on_batches(scenario)


def test_lines_that_are_not_answered_in_time_are_told_as_expired(on_batches):
    async def scenario(stand, client):
        lines = [
            line(str(k), body={"prompt": "x", "max_tokens": 1 + 2 * (k >= 2)}) for k in range(9)
        ]
        stand.engine.gate.clear()
        batch = await client.create(await client.upload(lines), "1s")
        ended = await client.ended(batch["id"])
        good, bad = await client.results(ended)
        assert (ended["status"], len(good), len(bad)) == ("expired", 2, 7)
        assert {each["error"]["code"] for each in bad.values()} == {"batch_expired"}
        assert bad["8"]["error"]["line"] == 9
        assert not stand.engine.live

    on_batches(scenario)


def test_a_line_that_a_full_server_refuses_is_asked_again(on_batches, monkeypatch):
    monkeypatch.setattr(runner, "RETRY_S", 0.01)

    async def scenario(stand, client):
        stand.engine.failure = OverloadedError("full", 0.01)
        batch = await client.create(await client.upload([line("a"), line("b")]))
        await stand.until(lambda: len(stand.engine.seen) > 6)
        stand.engine.failure = None
        ended = await client.ended(batch["id"])
        assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}

    on_batches(scenario)


def test_a_line_that_fails_fails_alone(on_batches):
    async def scenario(stand, client):
        stand.engine.failure = StepFailedError("a step failed")
        one = line("short", body={"prompt": "x", "max_tokens": 1})
        batch = await client.create(await client.upload([line("long"), one]))
        good, bad = await client.results(await client.ended(batch["id"]))
        assert list(good) == ["short"]
        assert bad["long"]["response"]["status_code"] == 500
        assert bad["long"]["response"]["body"]["error"]["line"] == 1

    on_batches(scenario)


def test_a_drain_does_not_wait_for_a_batch(on_batches):
    async def scenario(stand, client):
        stand.engine.gate.clear()
        await client.create(await client.upload([line(str(k)) for k in range(9)]))
        await stand.until(lambda: bool(stand.engine.live))
        async with asyncio.timeout(10):
            await stand.server.drain_and_stop()
        assert not stand.engine.live

    on_batches(scenario, drain_timeout_s=50.0)


def test_one_server_at_a_time_uses_a_folder(on_batches, tmp_path):
    async def scenario(stand, client):
        with pytest.raises(InvalidConfigError, match="no other server"):
            OctavoServer(
                ServeConfig(grpc_port=0, http_port=0, batch_files_dir=str(tmp_path / "folder"))
            )

    on_batches(scenario)


def test_what_a_kill_left_half_written_is_taken_away_and_nothing_else(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    names = [f"file-{'a' * 32}.data", f"file-{'b' * 32}.tmp", "notes.txt"]
    for name in names:
        (files / name).write_text("x")
    BatchFolder(str(tmp_path), 10**6).close()
    assert [path.name for path in files.iterdir()] == ["notes.txt"]


def test_files_and_batches_that_are_off_say_how_to_turn_them_on(on_stand):
    async def scenario(stand):
        async with httpx.AsyncClient(base_url=stand.http) as http:
            for method, path in (
                ("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/a/content"),
                ("DELETE", "/v1/files/a"), ("POST", "/v1/files"),
            ):  # fmt: skip
                answer = await http.request(method, path)
                assert answer.status_code == 404
                assert "--batch-files-dir" in answer.json()["error"]["message"]

    on_stand(scenario, http_port=0)


def test_more_uploads_at_once_than_may_be_are_refused(on_batches, monkeypatch):
    monkeypatch.setattr(service, "MAX_UPLOADS", 0)

    async def scenario(stand, client):
        files = {"file": ("in.jsonl", b"x")}
        answer = await client.http.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")

    on_batches(scenario)


def test_an_upload_has_time_for_its_size_and_a_trickle_has_not(on_batches):
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 65536,
    ]

    async def scenario(stand, client):
        async def slow():
            for part in parts:  # 64 KiB give a minute more at a KiB a second
                yield part
            await asyncio.sleep(1.5)
            yield b"y\r\n--b--\r\n"

        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client.http.post("/v1/files", content=slow(), headers=headers)
        assert (answer.status_code, answer.json()["bytes"]) == (200, 65537), answer.text

        url = httpx.URL(stand.http)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"host: x\r\ncontent-type: {headers['content-type']}\r\ncontent-length: 9999\r\n\r\n"
        writer.write(b"POST /v1/files HTTP/1.1\r\n" + head.encode() + parts[0])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()

    on_batches(scenario, max_message_bytes=1024, receive_timeout_s=1.0)
