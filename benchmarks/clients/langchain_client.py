"""LangChain: `langchain-openai` and `langchain-anthropic`, alone and under an agent."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from benchmarks.clients.place import QUESTION, TEXTS, Place, is_weather, packaged_only
from benchmarks.clients.weather import Weather


@tool("get_weather", args_schema=Weather)
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"In {city} the sun will shine for {days} days."


def _chat(place: Place, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=place.v1, api_key="unused", model=place.model, temperature=0, max_retries=0,
        max_tokens=400, timeout=60, **more,
    )  # fmt: skip


def _claude(place: Place) -> ChatAnthropic:
    return ChatAnthropic(
        base_url=place.url, api_key="unused", model=place.model, temperature=0, max_retries=0,
        max_tokens=400, timeout=60,
    )  # fmt: skip


def check_bind_tools_whole_and_streamed(place: Place) -> None:
    bound = _chat(place).bind_tools(
        [get_weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    whole = bound.invoke(QUESTION)
    [call] = whole.tool_calls
    is_weather(call["args"])
    joined: AIMessageChunk | None = None
    for part in bound.stream(QUESTION):
        joined = part if joined is None else joined + part
    assert joined is not None
    assert [each["args"] for each in joined.tool_calls] == [call["args"]]
    assert whole.usage_metadata["output_tokens"] > 0


def check_structured_output_by_each_method(place: Place) -> None:
    for method in ("function_calling", "json_schema"):
        found = _chat(place).with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(found, Weather), method


@packaged_only
def check_json_mode(place: Place) -> None:
    chat = _chat(place).with_structured_output(None, method="json_mode")
    assert isinstance(chat.invoke("Say {} in JSON and nothing else."), dict)


def check_responses(place: Place) -> None:
    chat = _chat(place, use_responses_api=True)
    bound = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    [call] = bound.invoke(QUESTION).tool_calls
    is_weather(call["args"])
    assert chat.invoke("Say something.").text


def check_anthropic(place: Place) -> None:
    bound = _claude(place).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke(QUESTION)
    [call] = whole.tool_calls
    is_weather(call["args"])
    found = _claude(place).with_structured_output(Weather).invoke(QUESTION)
    assert isinstance(found, Weather)
    text = "".join(str(part.text) for part in _claude(place).stream("Say something."))
    assert text


def check_an_agent_with_one_tool(place: Place) -> None:
    """The first turn has to call, the second must not: the model is small."""

    @wrap_model_call
    def choose(request: ModelRequest, handler: Any) -> Any:
        has_result = any(isinstance(message, ToolMessage) for message in request.messages)
        if has_result:
            return handler(request.override(tools=[], tool_choice=None))
        settings = {"parallel_tool_calls": False}
        if isinstance(request.model, ChatOpenAI):
            settings["strict"] = True  # else LangChain leaves `additionalProperties` out
        return handler(request.override(tool_choice="any", model_settings=settings))

    for model in (_chat(place), _claude(place)):
        agent = create_agent(model, [get_weather], middleware=[choose])
        messages = agent.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 8})[
            "messages"
        ]
        kinds = [message.type for message in messages]
        assert kinds[:3] == ["human", "ai", "tool"], kinds
        assert "the sun will shine" in messages[2].text
        assert isinstance(messages[-1], AIMessage)
        assert messages[-1].text
        assert not messages[-1].tool_calls


def check_retrieval(place: Place) -> None:
    """By default `OpenAIEmbeddings` sends token ids of OpenAI's vocabulary: so texts."""
    embeddings = OpenAIEmbeddings(
        base_url=place.v1, api_key="unused", model=place.model, check_embedding_ctx_length=False
    )
    store = InMemoryVectorStore.from_texts(list(TEXTS), embeddings)
    [(best, score)] = store.similarity_search_with_score(TEXTS[1], k=1)
    assert best.page_content == TEXTS[1]
    assert score > 0.999
