"""OpenAI's Agents SDK, over Responses and over chats."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from benchmarks.clients.place import QUESTION, Place


class Capital(BaseModel):
    """What an agent answers."""

    country: Literal["France", "Italy"]
    inhabitants: int = Field(ge=0, le=99_999_999)


KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)


def _model(kind: Any, place: Place) -> Any:
    """A model whose connections belong to the loop that runs."""
    client = AsyncOpenAI(base_url=place.v1, api_key="unused", max_retries=0, timeout=60)
    set_tracing_disabled(True)
    return kind(model=place.model, openai_client=client)


def check_a_tool_and_an_answer(place: Place) -> None:
    """The first turn has to call; the client lets the next one choose, and it may call again."""
    asked: list[int] = []

    @function_tool
    def get_weather(days: int) -> str:
        """The weather of the next days."""
        asked.append(days)
        return "Sunny."

    async def run(kind: Any) -> None:
        asked.clear()
        model = _model(kind, place)
        agent = Agent(
            name="Weather", instructions="You are brief.", model=model, tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(
                temperature=0, max_tokens=400, tool_choice="required", parallel_tool_calls=False
            ),
        )  # fmt: skip
        done = await Runner.run(agent, QUESTION)
        assert done.final_output == "Sunny."
        streamed = Runner.run_streamed(agent, QUESTION)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds
        assert streamed.final_output == "Sunny."
        assert len(asked) == 2
        assert asked[0] == asked[1]
        # What the first turn said is what the next one begins with.
        again = Agent(name="Again", model=model, model_settings=ModelSettings(max_tokens=16))
        last = await Runner.run(again, done.to_input_list())
        assert last.final_output

    for kind in KINDS:
        asyncio.run(run(kind))


def check_an_output_type(place: Place) -> None:
    async def run(kind: Any) -> None:
        agent = Agent(
            name="Capital", model=_model(kind, place), output_type=Capital,
            model_settings=ModelSettings(temperature=0, max_tokens=400),
        )  # fmt: skip
        done = await Runner.run(agent, "Tell me of Paris.")
        assert isinstance(done.final_output, Capital)
        json.loads(done.final_output.model_dump_json())

    for kind in KINDS:
        asyncio.run(run(kind))
