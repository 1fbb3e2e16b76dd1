"""Instructor: an object of a Pydantic class from an answer, by each of its modes."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel

from benchmarks.clients.place import QUESTION, Place, packaged_only
from benchmarks.clients.weather import Weather

ASK: Any = {
    "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_retries": 1,
    "max_tokens": 400, "response_model": Weather,
}  # fmt: skip


def _client(place: Place, mode: Any) -> Any:
    client = openai.OpenAI(base_url=place.v1, api_key="unused", max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=mode)


def check_tools(place: Place) -> None:
    client = _client(place, instructor.Mode.TOOLS)
    found, answer = client.chat.completions.create_with_completion(model=place.model, **ASK)
    assert isinstance(found, Weather)
    assert answer.usage.completion_tokens > 0
    *_, last = client.chat.completions.create_partial(model=place.model, **ASK)
    Weather(city=last.city, days=last.days)


def check_json_schema(place: Place) -> None:
    client = _client(place, instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(model=place.model, **ASK), Weather)


@packaged_only
def check_json(place: Place) -> None:
    """The mode asks for any JSON object."""

    class Anything(BaseModel):
        """Whatever object the model writes."""

    client = _client(place, instructor.Mode.JSON)
    ask = ASK | {"response_model": Anything}
    assert isinstance(client.chat.completions.create(model=place.model, **ask), Anything)


def check_several_calls(place: Place) -> None:
    client = _client(place, instructor.Mode.TOOLS)
    found = list(client.chat.completions.create_iterable(model=place.model, **ASK))
    assert all(isinstance(each, Weather) for each in found)


def check_anthropic(place: Place) -> None:
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=place.url, api_key="unused", max_retries=0, timeout=60)
    )
    ask = {name: value for name, value in ASK.items() if name != "temperature"}
    assert isinstance(client.chat.completions.create(model=place.model, **ask), Weather)
