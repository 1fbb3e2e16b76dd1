"""Any line of a batch is asked or refused, and its result is one line of JSON that names it."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from octavo.server.batch.results import line_of
from octavo.server.http.batches.inner_calls import Answer
from octavo.server.http.batches.lines import (
    BadLineError,
    Line,
    answered_line,
    custom_id_of,
    read_line,
    unasked_line,
)

CHAT = "/v1/chat/completions"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
LINES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text(max_size=4) | VALUES, "method": st.sampled_from(["POST", "GET", 1]),
        "url": st.sampled_from([CHAT, "/v1/completions", "/etc", 3]), "body": VALUES
        | st.dictionaries(st.sampled_from(["stream", "priority", "messages"]), VALUES),
        "more": VALUES,
    },
)  # fmt: skip
RAW = (
    st.binary(max_size=40)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | LINES.map(lambda value: json.dumps(value).encode())
    | st.integers(1, 20_000).map(lambda depth: b"[" * depth)
    | st.integers(1, 20_000).map(
        lambda depth: (
            b'{"custom_id":"a","url":"%s","body":{"x":%s%s}}'
            % (CHAT.encode(), b"[" * depth, b"]" * depth)
        )
    )
)


def check(result: bytes, number: int) -> dict:
    assert b"\n" not in result
    record = json.loads(result)
    assert line_of(record) == number
    return record


@given(raw=RAW, number=st.integers(1, 10**6))
def test_a_line_is_read_or_its_result_says_why_not(raw, number):
    async def read() -> Line | BadLineError:
        try:
            return await read_line(number, raw, CHAT)
        except BadLineError as error:
            return error

    found = asyncio.run(read())
    if isinstance(found, BadLineError):
        record = check(found.result, number)
        assert record["response"]["status_code"] == 400
        assert record["response"]["body"]["error"]["line"] == number
        assert record["error"] is None
    else:
        body = json.loads(found.body)
        assert body["priority"] == "low"
        assert not body.get("stream")
    name = asyncio.run(custom_id_of(raw))
    record = check(unasked_line(number, name), number)
    assert (record["custom_id"], record["error"]["line"]) == (name, number)


@given(
    status=st.sampled_from([200, 400, 404, 422, 500]), body=VALUES,
    custom_id=st.text(min_size=1, max_size=9),
)  # fmt: skip
def test_an_answer_stands_in_its_line_as_it_was_given(status, body, custom_id):
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    line = Line(number=7, custom_id=custom_id, body=b"{}")
    is_good, result = answered_line(line, Answer(status, {"x-request-id": "r"}, text))
    assert is_good == (status == 200)
    record = check(result, 7)
    if is_good:
        want = {"status_code": 200, "request_id": "r"}
        found = record["response"]
        assert {name: found[name] for name in want} == want
        assert json.dumps(found["body"]) == json.dumps(json.loads(text))
    else:
        assert (record["response"]["status_code"], record["error"]) == (status, None)
