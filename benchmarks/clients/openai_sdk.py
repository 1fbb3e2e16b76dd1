"""OpenAI's Python package: chats, Responses, embeddings."""

from __future__ import annotations

from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

from benchmarks.clients.place import (
    LEAST_COSINE,
    QUESTION,
    TEXTS,
    WEATHER,
    Place,
    cosine,
    is_weather,
    raised,
)

FUNCTION: dict[str, Any] = {
    "name": "get_weather", "description": "The weather in a city", "parameters": WEATHER,
    "strict": True,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION}]
ASK: Any = [{"role": "user", "content": QUESTION}]


class Capital(BaseModel):
    """What `parse` makes of an answer."""

    country: Literal["France", "Italy"]
    inhabitants: int = Field(ge=0, le=99_999_999)


def _client(place: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=place.v1, api_key="unused", max_retries=0, timeout=60)


def check_a_chat_streamed_and_whole(place: Place) -> None:
    ask: Any = {
        "model": place.model,
        "messages": ASK,
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    with _client(place) as client:
        whole = client.chat.completions.create(**ask)
        parts = list(
            client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
        )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def check_a_tool_called_whole_and_streamed(place: Place) -> None:
    ask: Any = {
        "model": place.model, "messages": ASK, "tools": TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0, "max_completion_tokens": 400,
    }  # fmt: skip
    with _client(place) as client:
        choice = client.chat.completions.create(**ask).choices[0]
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        is_weather(call.function.arguments)
        with client.chat.completions.stream(**ask) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        [event] = done
        assert (event.name, event.arguments) == ("get_weather", call.function.arguments)
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments

        history = [
            *ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        ]  # fmt: skip
        answer = client.chat.completions.create(
            model=place.model, messages=history, tools=TOOLS, tool_choice="none", temperature=0,
            max_completion_tokens=16,
        )  # fmt: skip
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def check_parsed_output(place: Place) -> None:
    with _client(place) as client:
        answer = client.chat.completions.parse(
            model=place.model, messages=[{"role": "user", "content": "Tell me of Paris."}],
            response_format=Capital, temperature=0, max_completion_tokens=400,
        )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Capital)


def check_responses_whole_and_streamed(place: Place) -> None:
    ask: Any = {
        "model": place.model, "input": ASK, "tools": RESPONSES_TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 400,
    }  # fmt: skip
    with _client(place) as client:
        answer = client.responses.create(**ask)
        [call] = [item for item in answer.output if item.type == "function_call"]
        assert (answer.status, call.name) == ("completed", "get_weather")
        is_weather(call.arguments)
        with client.responses.stream(**ask) as stream:
            pieces = [
                event.delta
                for event in stream
                if event.type == "response.function_call_arguments.delta"
            ]
            final = stream.get_final_response()
        assert "".join(pieces) == call.arguments
        assert final.usage.output_tokens == answer.usage.output_tokens
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        last = client.responses.create(
            model=place.model, input=[*ASK, *answer.output, told], max_output_tokens=16,
            temperature=0,
        )  # fmt: skip
    assert last.output_text


def check_embeddings(place: Place) -> None:
    with _client(place) as client:
        both = client.embeddings.create(model=place.model, input=list(TEXTS))
        alone = client.embeddings.create(model=place.model, input=TEXTS[0], encoding_format="float")
        short = client.embeddings.create(model=place.model, input=TEXTS[0], dimensions=32)
    assert [item.index for item in both.data] == [0, 1, 2]
    assert both.usage.total_tokens > alone.usage.total_tokens > 0
    # Without a format OpenAI's client asks for base64, and decodes it.
    assert cosine(both.data[0].embedding, alone.data[0].embedding) > LEAST_COSINE
    assert abs(sum(x * x for x in alone.data[0].embedding) - 1) < 1e-4
    assert len(short.data[0].embedding) == 32
    assert cosine(short.data[0].embedding, alone.data[0].embedding[:32]) > LEAST_COSINE


def check_an_error_names_the_field(place: Place) -> None:
    with _client(place) as client:
        odd: Any = {"model": place.model, "messages": ASK, "tools": [{"type": "odd"}]}
        told = raised(openai.BadRequestError, lambda: client.chat.completions.create(**odd))
    assert told.param == "tools[0].type", told.param
