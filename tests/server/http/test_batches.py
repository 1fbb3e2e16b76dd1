"""Files and batches as OpenAI's client asks for them, of a server of two tenants."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.examples import examples

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def line(name: str, text: str = "Say something.", **change: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | change


def upload(client: openai.OpenAI, lines: list[Any], name: str = "in.jsonl") -> Any:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    content = "\n".join(texts).encode()
    return client.files.create(file=(name, content), purpose="batch")


def run(client: openai.OpenAI, file_id: str, endpoint: Any = CHAT) -> Any:
    batch = client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", metadata={"k": "v"}
    )
    until_s = time.monotonic() + 120
    while batch.status not in ENDED:
        assert time.monotonic() < until_s, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def clear(client: openai.OpenAI) -> None:
    for file in client.files.list():
        client.files.delete(file.id)


def test_a_file_comes_back_as_it_was_uploaded_until_it_is_deleted(tenants):
    client = tenants["a"]
    text = '{"custom_id": "ü"}\n\n\x00\r\n no JSON'
    file = upload(client, [text], "../../etc/passwd")
    assert (file.object, file.purpose, file.bytes) == ("file", "batch", len(text.encode()))
    assert client.files.content(file.id).content == text.encode()
    assert client.files.retrieve(file.id) == file
    assert file.id in [each.id for each in client.files.list(purpose="batch", limit=1)]
    assert file.id not in [each.id for each in client.files.list(purpose="batch_output")]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_a_batch_answers_its_lines_as_requests_are_answered(tenants):
    client = tenants["a"]
    body = line("a", body=line("")["body"] | {"temperature": 0})
    file = upload(client, [body, line("b")])
    batch = run(client, file.id)
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"k": "v"}, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    found = {each["custom_id"]: each for each in results(client, batch.output_file_id)}
    assert batch.error_file_id is None
    assert found["a"]["error"] is None
    assert found["a"]["response"]["status_code"] == 200
    asked = client.chat.completions.create(**body["body"])
    told = found["a"]["response"]["body"]
    assert told["choices"][0]["message"]["content"] == asked.choices[0].message.content
    assert told["usage"]["total_tokens"] == asked.usage.total_tokens
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


BAD: dict[str, Any] = {
    "no JSON": ("{", "line"),
    "no object": ("[1]", "line"),
    "no name": (line("x") | {"custom_id": None}, "custom_id"),
    "a name twice": (line("good"), "custom_id"),
    "another endpoint": (line("y", url="/v1/completions"), "url"),
    "an endpoint that is none": (line("z", url="/v1/../etc"), "url"),
    "a method": (line("m", method="GET"), "method"),
    "a field": (line("f", more=1), "more"),
    "no body": (line("n", body=[]), "body"),
    "a stream": (line("s", body={"messages": [], "stream": True}), "stream"),
    "an empty chat": (line("e", body={"messages": []}), "messages"),
    "a field of the body": (line("u", body=line("")["body"] | {"nonsense": 1}), "nonsense"),
    "another tenant": (line("t", body=line("")["body"] | {"tenant": "b"}), "tenant"),
    "a deep body": (line("d", body={"messages": []}) | {"body": {}}, "messages"),
}


def test_bad_lines_fail_alone_and_by_their_number(tenants):
    client = tenants["a"]
    lines = [line("good"), *[bad for bad, _ in BAD.values()], line("last")]
    batch = run(client, upload(client, lines).id)
    assert batch.status == "completed"
    good = results(client, batch.output_file_id)
    assert {each["custom_id"] for each in good} == {"good", "last"}
    errors = [each["response"]["body"]["error"] for each in results(client, batch.error_file_id)]
    fields = {each["line"]: each["param"] for each in errors}
    assert fields == {number: field for number, (_, field) in enumerate(BAD.values(), 2)}
    assert batch.request_counts.failed == len(BAD)


def test_a_priority_of_a_line_is_not_its_own_to_choose(tenants):
    client = tenants["a"]
    body = line("")["body"] | {"priority": "realtime"}
    batch = run(client, upload(client, [line("a", body=body)]).id)
    assert batch.request_counts.completed == 1


def test_another_tenants_files_and_batches_are_unknown(tenants):
    file = upload(tenants["a"], [line("a")])
    batch = run(tenants["a"], file.id)
    other = tenants["b"]
    for call, name in (
        (other.files.retrieve, file.id), (other.files.content, batch.output_file_id),
        (other.files.delete, file.id), (other.batches.retrieve, batch.id),
        (other.batches.cancel, batch.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call(name)
    assert file.id not in [each.id for each in other.files.list()]
    assert batch.id not in [each.id for each in other.batches.list()]
    with pytest.raises(openai.NotFoundError) as caught:
        run(other, file.id)
    assert caught.value.param == "input_file_id"


def test_a_batch_of_nothing_fails_and_says_why(tenants):
    client = tenants["a"]
    batch = run(client, upload(client, ["\n\n"]).id)
    assert batch.status == "failed"
    assert "0 lines" in batch.errors.data[0].message
    assert batch.output_file_id is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(k): "x" for k in range(17)}}, "metadata"),
        ({"more": 1}, "more"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_its_field(keeps_live, tenants, change, field):
    file = upload(tenants["a"], [line("a")])
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
    headers = {"authorization": f"Bearer {tenants['a'].api_key}"}
    answer = httpx.post(f"{keeps_live.http}/v1/batches", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


UPLOADS: dict[str, Any] = {
    "another purpose": ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
    "no purpose": ({"files": {"file": ("a", b"x")}}, "purpose"),
    "no file": ({"data": {"purpose": "batch"}, "files": {"x": (None, "y")}}, "x"),
    "text for a file": ({"data": {"purpose": "batch", "file": "x"}}, "file"),
    "an empty file": ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"")}}, "file"),
    "another field": (
        {"data": {"purpose": "batch", "more": "x"}, "files": {"file": ("a", b"x")}}, "more"
    ),
    "a long name": (
        {"data": {"purpose": "batch"}, "files": {"file": ("a" * 300, b"x")}}, "file"
    ),
    "no form": ({"json": {}}, "purpose"),
}  # fmt: skip


@pytest.mark.parametrize("case", UPLOADS)
def test_an_upload_that_cannot_be_kept_is_refused_by_its_field(keeps_live, tenants, case):
    asked, field = UPLOADS[case]
    headers = {"authorization": f"Bearer {tenants['a'].api_key}"}
    answer = httpx.post(f"{keeps_live.http}/v1/files", headers=headers, **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_files_are_bounded_each_and_together_and_larger_than_other_bodies(tenants):
    client = tenants["b"]
    clear(client)
    big = "x" * 5_000_000  # more than the 4 MiB of other bodies
    file = upload(client, [big])
    assert file.bytes == len(big)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, ["x" * 7_000_000])
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as caught:
        upload(client, [big])
    assert "batch_files_bytes" in caught.value.message
    client.files.delete(file.id)
    upload(client, [big])
    clear(client)


@pytest.mark.parametrize(
    "name", ["..", "../lock", "..%2f..%2flock", "%2e%2e", "file-\x00", "a/b", "file-" + "0" * 32]
)
def test_no_id_leads_out_of_the_folder(keeps_live, tenants, name):
    headers = {"authorization": f"Bearer {tenants['a'].api_key}"}
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        try:
            answer = httpx.get(f"{keeps_live.http}{path}", headers=headers)
        except httpx.InvalidURL:
            continue
        assert answer.status_code in (404, 405) or "data" in answer.json()


def test_the_pages_example_runs(tenants, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [code] = examples("batch.md", "py")
    exec(code, {"client": tenants["a"], "model": "tiny"})
    assert "completed 2 of 2" in capsys.readouterr().out
