"""Structured outputs as OpenAI's client, vLLM's extras and the gRPC client ask for them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from octavo import SamplingParams, StructuredOutputsParams
from octavo.server.client import OctavoClient

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
REGEX = "[a-c]{3}-[0-9]{2}"
MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
SIZE = {"max_tokens": 200, "temperature": 1.0, "seed": 4}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_strict_schema_is_kept_to_whole_and_streamed(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}
    ask = {"model": "tiny", "messages": MESSAGES, "response_format": wanted, **SIZE}
    whole = client.chat.completions.create(**ask).choices[0]
    # White space may come between the parts, and a random model is fond of it.
    if whole.finish_reason == "stop":
        jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    with client.chat.completions.create(**ask, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.message.content
    assert whole.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "check"),
    [
        ({"guided_regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_grammar": 'root ::= "a" "b"+ "."'}, lambda text: re.fullmatch(r"ab+\.", text)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
        ),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_vllms_extras_are_kept_to(client, extra, check):
    answer = client.completions.create(model="tiny", prompt="x", **SIZE, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    assert check(answer.choices[0].text), answer.choices[0].text


def test_a_json_object_begins_as_one(client):
    answer = client.completions.create(
        model="tiny", prompt="x", **SIZE, extra_body={"response_format": {"type": "json_object"}}
    )
    assert answer.choices[0].text.startswith("{")


def test_the_grpc_client_sends_grammars(live):
    for asked in (
        StructuredOutputsParams(regex=REGEX),
        StructuredOutputsParams(choice=["abc-12"]),
        {"json": {"const": "abc-12"}},
    ):
        with OctavoClient(live.grpc) as grpc_client:
            params = SamplingParams(structured_outputs=asked, **SIZE)
            text = grpc_client.generate("x", params).outputs[0].text
        assert re.fullmatch(REGEX, text.strip('"'))
