"""Haystack: its chat generator with a tool, and its embedders."""

from __future__ import annotations

from typing import Any

from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret

from benchmarks.clients.place import QUESTION, TEXTS, WEATHER, Place, cosine, is_weather

KEY = Secret.from_token("unused")


def check_a_tool(place: Place) -> None:
    weather = Tool(
        name="get_weather", description="The weather in a city", parameters=WEATHER,
        function=lambda city, days: "Sunny.",
    )  # fmt: skip
    pieces: list[Any] = []
    for callback in (None, pieces.append):
        generator = OpenAIChatGenerator(
            api_key=KEY, api_base_url=place.v1, model=place.model, tools=[weather],
            streaming_callback=callback, max_retries=0, tools_strict=True,
            generation_kwargs={
                "tool_choice": "required", "max_completion_tokens": 120, "temperature": 0,
                "parallel_tool_calls": False,
            },
        )  # fmt: skip
        [reply] = generator.run([ChatMessage.from_user(QUESTION)])["replies"]
        [call] = reply.tool_calls
        is_weather(call.arguments)
    assert pieces


def check_embedders(place: Place) -> None:
    where: Any = {"api_key": KEY, "api_base_url": place.v1, "model": place.model, "max_retries": 0}
    documents = OpenAIDocumentEmbedder(**where, progress_bar=False).run(
        [Document(content=text) for text in TEXTS]
    )["documents"]
    query = OpenAITextEmbedder(**where).run(TEXTS[1])["embedding"]
    near = [cosine(query, document.embedding) for document in documents]
    assert near.index(max(near)) == 1
