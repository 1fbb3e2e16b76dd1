"""LlamaIndex: chats, tools and an index, by its packages for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from benchmarks.clients.place import QUESTION, TEXTS, Place, is_weather
from benchmarks.clients.weather import Weather


def _llm(place: Place, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=place.model, api_base=place.v1, api_key="unused", is_chat_model=True, max_retries=0,
        is_function_calling_model=True, temperature=0, max_tokens=400, context_window=2048,
        timeout=60, **more,
    )  # fmt: skip


def _tool() -> FunctionTool:
    def get_weather(city: str, days: int) -> str:
        return f"In {city} the sun will shine for {days} days."

    return FunctionTool.from_defaults(
        get_weather, name="get_weather", description="The weather in a city", fn_schema=Weather
    )


def check_chats_and_completions(place: Place) -> None:
    llm = _llm(place)
    whole = llm.chat([ChatMessage(role="user", content="Say something.")], max_tokens=16)
    *_, last = llm.stream_chat([ChatMessage(role="user", content="Say something.")], max_tokens=16)
    assert last.message.content == whole.message.content
    assert whole.message.content
    bare = OpenAILike(
        model=place.model, api_base=place.v1, api_key="unused", is_chat_model=False, max_tokens=16
    )
    assert bare.complete("The capital of France is").text


def check_tools(place: Place) -> None:
    answer = _llm(place).chat_with_tools(
        [_tool()], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False
    )
    [call] = _llm(place).get_tool_calls_from_response(answer)
    is_weather(call.tool_kwargs)


def check_structured_output(place: Place) -> None:
    found = _llm(place).as_structured_llm(Weather).complete(QUESTION)
    assert isinstance(found.raw, Weather)
    native = _llm(place, should_use_structured_outputs=True).as_structured_llm(Weather)
    assert isinstance(native.complete(QUESTION).raw, Weather)


def check_an_agent(place: Place) -> None:
    """Whatever the small model does, the loop has to end with an answer."""

    async def run() -> Any:
        agent = FunctionAgent(tools=[_tool()], llm=_llm(place), initial_tool_choice="get_weather")
        return await agent.run(QUESTION, max_iterations=8)

    answer = asyncio.run(run())
    assert answer.tool_calls
    is_weather(answer.tool_calls[0].tool_kwargs)


def check_an_index(place: Place) -> None:
    embed = OpenAILikeEmbedding(model_name=place.model, api_base=place.v1, api_key="unused")
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=embed
    )
    [best] = index.as_retriever(similarity_top_k=1).retrieve(TEXTS[1])
    assert best.node.get_content() == TEXTS[1]
