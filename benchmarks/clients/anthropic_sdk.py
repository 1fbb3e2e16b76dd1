"""Anthropic's Python package: Messages, streamed and not, and its loop over tools."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_tool

from benchmarks.clients.place import QUESTION, WEATHER, Place, is_weather, raised

TOOLS: Any = [
    {"name": "get_weather", "description": "The weather in a city", "input_schema": WEATHER}
]
GREEDY = {"temperature": 0}
"""The package has no argument for it any more; LangChain and others send it."""
ASK: Any = [{"role": "user", "content": QUESTION}]


def _client(place: Place) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=place.url, api_key="unused", max_retries=0, timeout=60)


def check_a_message_streamed_and_whole(place: Place) -> None:
    ask: Any = {"model": place.model, "max_tokens": 24, "messages": ASK, "extra_body": GREEDY}
    ask["system"] = "You are brief."
    with _client(place) as client:
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = client.messages.count_tokens(
            model=place.model, messages=ASK, system=ask["system"]
        )
    assert text == whole.content[0].text == final.content[0].text
    assert text
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def check_a_tool_called_whole_and_streamed(place: Place) -> None:
    ask: Any = {
        "model": place.model, "max_tokens": 400, "messages": ASK, "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": GREEDY,
    }  # fmt: skip
    with _client(place) as client:
        answer = client.messages.create(**ask)
        [call] = answer.content
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
        is_weather(call.input)
        with client.messages.stream(**ask) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            [streamed] = stream.get_final_message().content
        is_weather("".join(pieces))
        assert streamed.input == call.input
        told = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        history = [
            *ASK,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [told, {"type": "text", "text": "And so?"}]},
        ]
        last = client.messages.create(
            model=place.model, max_tokens=16, messages=history, tools=TOOLS,
            tool_choice={"type": "none"}, extra_body=GREEDY,
        )  # fmt: skip
    assert last.content[0].text


def check_its_own_loop_over_tools(place: Place) -> None:
    """`tool_runner` calls the function itself, and asks once more."""
    asked = []

    @beta_tool
    def get_days(days: int) -> str:
        """The weather of the next days.

        Args:
            days: How many.
        """
        asked.append(days)
        return "Sunny."

    with _client(place) as client:
        runner = client.beta.messages.tool_runner(
            model=place.model, max_tokens=400, messages=ASK, tools=[get_days], max_iterations=1,
            tool_choice={"type": "tool", "name": "get_days"}, extra_body=GREEDY,
        )  # fmt: skip
        [first] = list(runner)
    assert first.stop_reason == "tool_use"
    assert len(asked) == 1
    assert type(asked[0]) is int


def check_an_error_has_its_class(place: Place) -> None:
    with _client(place) as client:
        told = raised(
            anthropic.NotFoundError,
            lambda: client.messages.create(model="another", max_tokens=1, messages=ASK),
        )
    assert "another" in str(told)
