"""Pydantic AI: its default output is a call of a tool.

Its Messages are not tried: the newest one that goes with the openai that LangChain wants does not
run with a current anthropic (a TypeError of its own).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from benchmarks.clients.place import QUESTION, Place, packaged_only
from benchmarks.clients.weather import Weather

SETTINGS: Any = {"temperature": 0.0, "max_tokens": 400}


def _models(place: Place) -> dict[str, Any]:
    openai = OpenAIProvider(base_url=place.v1, api_key="unused")
    return {
        "chat": OpenAIChatModel(place.model, provider=openai),
        "Responses": OpenAIResponsesModel(place.model, provider=openai),
    }


def check_the_default_output(place: Place) -> None:
    for name, model in _models(place).items():
        agent = Agent(model, output_type=Weather, model_settings=SETTINGS)
        done = agent.run_sync(QUESTION)
        assert isinstance(done.output, Weather), name
        assert done.usage.output_tokens > 0, name


def check_native_output(place: Place) -> None:
    agent = Agent(
        _models(place)["chat"], output_type=NativeOutput(Weather), model_settings=SETTINGS
    )
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


@packaged_only
def check_prompted_output(place: Place) -> None:
    """It asks for any JSON object, of a model that reads its instructions."""

    class Anything(BaseModel):
        """Whatever object the model writes."""

    model = _models(place)["chat"]
    agent = Agent(model, output_type=PromptedOutput(Anything), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Anything)


def check_a_tool_and_then_the_output(place: Place) -> None:
    """The output's tool is shown once the other has been called: the model is small."""
    called: list[Weather] = []

    async def output_tools(_: RunContext[None], tools: list[ToolDefinition]) -> Any:
        return tools if called else []

    async def function_tool(_: RunContext[None], tool: ToolDefinition) -> Any:
        return None if called else tool

    for name, model in _models(place).items():
        called.clear()
        agent = Agent(
            model, output_type=Weather, model_settings=SETTINGS | {"parallel_tool_calls": False},
            capabilities=[PrepareOutputTools(output_tools)], retries=1,
        )  # fmt: skip

        @agent.tool_plain(prepare=function_tool)
        def get_weather(weather: Weather) -> str:
            """The weather in a city."""
            called.append(weather)
            return "Sunny."

        done = agent.run_sync(QUESTION)
        assert isinstance(done.output, Weather), name
        assert len(called) == 1, name


def check_streamed_text(place: Place) -> None:
    async def run(model: Any) -> None:
        agent = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 24})
        async with agent.run_stream("Say something.") as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
            assert text
            assert stream.usage.output_tokens > 0

    import asyncio

    for model in _models(place).values():
        asyncio.run(run(model))
