"""Semantic Kernel: a chat that calls a function of a plugin by itself."""

from __future__ import annotations

import asyncio
from typing import Annotated

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from benchmarks.clients.place import QUESTION, Place


def check_a_plugin(place: Place) -> None:
    asked: list[int] = []

    class Weather:
        """A plugin."""

        @kernel_function(name="get", description="The weather of the next days")
        def get(self, days: Annotated[int, "How many"]) -> str:
            asked.append(days)
            return "Sunny."

    async def run() -> None:
        client = AsyncOpenAI(base_url=place.v1, api_key="unused", max_retries=0, timeout=60)
        service = OpenAIChatCompletion(ai_model_id=place.model, async_client=client)
        kernel = Kernel()
        kernel.add_plugin(Weather(), "weather")
        history = ChatHistory()
        history.add_user_message(QUESTION)
        settings = OpenAIChatPromptExecutionSettings(
            temperature=0, max_tokens=400,
            function_choice_behavior=FunctionChoiceBehavior.Required(
                auto_invoke=True, maximum_auto_invoke_attempts=1
            ),
        )  # fmt: skip
        answer = await service.get_chat_message_content(history, settings, kernel=kernel)
        assert answer is not None
        assert len(asked) >= 1

    asyncio.run(run())
