"""AutoGen: an assistant with one tool."""

from __future__ import annotations

import asyncio
from typing import Any

from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from benchmarks.clients.place import QUESTION, Place

INFO: Any = {
    "vision": False, "function_calling": True, "json_output": True, "family": "unknown",
    "structured_output": True,
}  # fmt: skip


def check_a_tool_and_a_stream(place: Place) -> None:
    async def get_weather(days: int) -> str:
        return "Sunny."

    async def run() -> None:
        client = OpenAIChatCompletionClient(
            model=place.model, base_url=place.v1, api_key="unused", model_info=INFO, temperature=0,
            max_tokens=400, max_retries=0,
        )  # fmt: skip
        tool = FunctionTool(get_weather, description="The weather of the next days", strict=True)
        ask = [UserMessage(content=QUESTION, source="user")]
        answer = await client.create(ask, tools=[tool], tool_choice="required")
        assert isinstance(answer.content, list)
        assert answer.content[0].name == "get_weather"
        assert answer.usage.completion_tokens > 0
        pieces = [piece async for piece in client.create_stream(ask)]
        assert pieces[-1].content == "".join(pieces[:-1])
        assert pieces[-1].content
        await client.close()

    asyncio.run(run())
