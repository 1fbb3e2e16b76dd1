"""Bodies that no client should send: an honest answer, and everybody else is served on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidRequestError
from octavo.server.http.bodies import MAX_PARTS, SMALL_BYTES, read_json

JSON = {"content-type": "application/json"}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def http(live):
    with httpx.Client(base_url=live.http, timeout=60) as client:
        yield client


FORM = "application/x-www-form-urlencoded"
"""What curl says of a body that is given with -d alone."""


def error(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}",
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": [' + b"true," * 50 + b"true]}",
    ],
    ids=range(15),
)
def test_malformed_bodies_are_the_clients_fault(http, raw):
    for route in ROUTES[:2]:
        answer = http.post(route, content=raw, headers=JSON)
        assert answer.status_code == 400
        assert error(answer)["type"] == "invalid_request_error"


MANY, COMPLETIONS = 200_000, "/v1/completions"


@pytest.mark.parametrize(
    ("route", "raw", "param"),
    [
        (COMPLETIONS, b'{"prompt": [' + b"[]," * MANY + b"[]]}", "body"),
        (COMPLETIONS, b'{"metadata": {"a": [' + b"{}," * MANY + b"{}]}}", "body"),
        (COMPLETIONS, b'{"prompt": "[\\"{' + b"[" * MANY + b'", "a": ' + b"[" * MANY, "body"),
        (COMPLETIONS, b'{"prompt": "x' + b'\\"[' * MANY, "body"),
        (COMPLETIONS, b"[" * MANY, "body"),
        (COMPLETIONS, b'{"prompt": [' + b"1.5," * MANY + b"1]}", "prompt"),
        ("/detokenize", b'{"tokens": [' + b'"",' * MANY + b"1]}", "tokens"),
        (
            COMPLETIONS,
            b'{"prompt": "x", "structured_outputs": {"choice": [' + b"0," * MANY + b"0]}}",
            "structured_outputs.choice",
        ),
    ],
    ids=range(8),
)
def test_a_body_of_very_many_values_is_refused_typed(http, route, raw, param):
    answer = http.post(route, content=raw, headers=JSON)
    assert answer.status_code == 400
    assert error(answer)["param"] == param, answer.text
    assert len(answer.content) < 2_000


@pytest.mark.parametrize("field", ["logit_bias", "metadata", None])
def test_an_object_of_very_many_fields_is_refused_or_does_nothing(http, field):
    many = {f"x{number}": "y" for number in range(MANY // 2)}
    body = {"prompt": "x", "max_tokens": 1} | (many if field is None else {field: many})
    answer = http.post("/v1/completions", json=body)
    if field == "metadata":
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert error(answer)["param"] == (field or "body")
    assert len(answer.content) < 2_000


async def test_large_bodies_are_read_as_small_ones_are():
    text = "[{" * MAX_PARTS + '\\ "quoted" \u00e9 \U0001f600'
    value = {"prompt": text, "n": 1, "x": [1.5, -0.0, 1e300, 2**70, None, True, {"a": []}]}
    raw = json.dumps(value).encode()
    assert len(raw) > SMALL_BYTES
    assert await read_json(raw) == value
    assert await read_json(raw.decode().encode("utf-8")) == value
    with pytest.raises(json.JSONDecodeError):
        await read_json(raw[:-1])


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({str(number): 1 for number in range(300_000)}).encode(),
        b'{"prompt": "' + b'\\"[{:' * 200_000 + b'", "a": {' + b'"\\\\" :[],' * 200_000,
    ],
    ids=["names", "texts"],
)
async def test_the_loop_turns_while_parts_are_counted(raw):
    reading = asyncio.create_task(read_json(raw))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    with pytest.raises(InvalidRequestError, match="lists, objects and names"):
        await reading
    assert num_turns > 30


async def test_millions_of_values_are_refused_and_as_many_commas_in_a_text_are_not():
    num = 8 * MAX_PARTS + 8
    with pytest.raises(InvalidRequestError, match="eight other values"):
        await read_json(b'{"prompt": [' + b"1," * num + b"1]}")
    assert await read_json(b'{"prompt": "' + b"1," * num + b'"}') == {"prompt": "1," * num}


def test_a_wrong_value_is_shown_as_it_was_sent(http):
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": -3})
    assert answer.status_code == 400
    assert error(answer)["message"] == (
        "max_tokens = -3 is not allowed: greater than or equal to 0"
    )


def test_half_a_surrogate_pair_is_no_text(http):
    answer = http.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert answer.status_code == 400
    assert error(answer)["param"] == "prompt"


def test_a_body_over_the_limit_is_refused_declared_or_not(http):
    def pieces():
        for _ in range(6):
            yield b" " * (1 << 20)

    assert error(http.post("/tokenize", content=b" " * (5 << 20)))["code"] == "request_too_large"
    answer = http.post("/tokenize", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    assert error(answer)["code"] == "request_too_large"


def test_paths_and_methods_that_are_not_there(http):
    for path in ("/v2/completions", "/completions", "//v1/completions"):
        answer = http.post(str(http.base_url).rstrip("/") + path)
        assert (answer.status_code, error(answer)["code"]) == (404, "not_found")
        assert f"POST '{path}' is not served" in error(answer)["message"]
        assert error(answer)["message"].endswith("; did you mean /v1/completions?")
    answer = http.get("/v1/completions")
    assert (answer.status_code, error(answer)["code"]) == (405, "method_not_allowed")
    assert "GET '/v1/completions' is not served" in error(answer)["message"]


def test_the_head_of_what_can_be_got(http):
    for path in ("/health", "/v1/models", "/metrics"):
        answer, got = http.head(path), http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == got.headers["content-type"]
    answer = http.head("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"content-type": FORM}, f"content-type = '{FORM}' is not allowed: application/json"),
        ({}, "content-type = None is not allowed: application/json"),
        (JSON | {"content-encoding": "gzip"}, "content-encoding = 'gzip' is not allowed: identity"),
    ],
)
def test_a_body_that_is_said_to_be_no_json_is_refused_by_that_header(http, headers, says):
    content = b'{"prompt": "x", "max_tokens": 1}'
    content = gzip.compress(content) if "content-encoding" in headers else content
    answer = http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert error(answer)["message"].startswith(says)
    assert error(answer)["param"] == says.partition(" ")[0]


def test_text_and_tokens_go_both_ways(http):
    tokens = http.post("/tokenize", json={"prompt": "häuser"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 7
    assert tokens["max_model_len"] == 512
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "häuser"}
    for bad in ([-1], [100_000], ["x"], [True], "x"):
        answer = http.post("/detokenize", json={"tokens": bad})
        assert (answer.status_code, error(answer)["param"]) == (400, "tokens")
    answer = http.post("/tokenize", json={"prompt": "x", "messages": []})
    assert error(answer)["param"] == "prompt"


def test_load_answers_for_a_size_and_a_class(http):
    small = http.get("/v1/load").json()
    large = http.get("/v1/load", params={"num_prompt_tokens": 500, "priority": "high"}).json()
    assert large["predicted_ttft_s"] > small["predicted_ttft_s"] > 0
    assert set(small["queues"]) == {"realtime", "high", "normal", "low"}
    # Nothing was promised: the smallest pace is infinite, which JSON cannot say.
    assert small["standing"]["num_rows"] > 0
    assert small["standing"]["least_pace_s"] is None
    for query in ({"num_prompt_tokens": "0"}, {"num_prompt_tokens": "x"}, {"priority": "9"}):
        assert http.get("/v1/load", params=query).status_code == 400


def test_the_api_document_names_every_field(http):
    document = http.get("/openapi.json").json()
    assert {*ROUTES, "/v1/models", "/v1/load", "/health", "/metrics"} <= set(document["paths"])
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "top_logprobs", "priority"} <= set(fields)


def test_a_header_over_the_limit_is_refused(http):
    answer = http.get("/health", headers={"x-long": "x" * 100_000})
    assert answer.status_code == 431
    assert error(answer)["code"] == "header_too_large"
    assert http.get("/health").status_code == 200


def raw_connection(live) -> socket.socket:
    host, port = live.http.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_body_that_never_comes_leaves_others_alone(live, http):
    with contextlib.closing(raw_connection(live)) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert http.get("/v1/load").json()["num_inflight"] == 0


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["user", "tiny", "high", "text", 16, 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
GOOD = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1
    },
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [40]},
}  # fmt: skip


@pytest.fixture(scope="module")
def fields(http) -> dict[str, list[str]]:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    kinds = ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest")
    return {
        route: sorted(schemas[kind]["properties"])
        for route, kind in zip(ROUTES, kinds, strict=True)
    }


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_no_value_of_any_field_breaks_the_server(http, fields, route, data):
    names = [name for name in fields[route] if "max_" not in name]
    change = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    content = json.dumps(GOOD[route] | change).encode()
    answer = http.post(route, content=content, headers=JSON)
    if answer.status_code == 504:
        assert "timeout_s" in change
        return
    assert answer.status_code in (200, 400, 404), (content, answer.text)
    if answer.status_code != 200:
        error(answer)


@given(
    route=st.sampled_from(ROUTES),
    cut=st.integers(0, 60),
    byte=st.integers(0, 255),
    at=st.integers(0),
)
def test_no_bytes_break_the_server(http, route, cut, byte, at):
    content = bytearray(json.dumps(GOOD[route]).encode())
    content[at % len(content)] = byte
    answer = http.post(route, content=bytes(content[: len(content) - cut]), headers=JSON)
    assert answer.status_code in (200, 400, 404), (content, answer.text)


def test_after_all_this_nothing_is_held(http):
    end_s = time.monotonic() + 60
    while (load := http.get("/v1/load").json())["num_free_pages"] != load["num_total_pages"]:
        assert time.monotonic() < end_s
    assert load["num_inflight"] == load["num_running"] == 0
    assert http.get("/health").status_code == http.get("/ready").status_code == 200


UNREADABLE = {
    "no UTF-8": b'{"query": "\xff"}',
    "nested too deep": b'{"query": ' + b"[" * 30_000,
    "a number too long": b'{"query": ' + b"1" * 5_000 + b"}",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_body_that_python_cannot_read_is_no_json_in_every_apis_shape(http, case):
    for path in ("/v1/completions", "/v1/messages", "/v1/rerank"):
        answer = http.post(path, content=UNREADABLE[case], headers=JSON)
        assert answer.status_code == 400
        body = answer.json()
        assert "JSON" in body["error"]["message"], answer.text
        if path == "/v1/messages":
            assert body["type"] == "error"
        elif path == "/v1/rerank":
            assert body["message"] == body["detail"] == body["error"]["message"]
        else:
            assert body["error"]["param"] == "body"
