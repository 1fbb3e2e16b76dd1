"""LiteLLM: the same server as OpenAI's, as a vLLM and as Anthropic's."""

from __future__ import annotations

from typing import Any

import litellm

from benchmarks.clients.place import QUESTION, TEXTS, WEATHER, Place, is_weather

FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASK: Any = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "timeout": 60}
litellm.num_retries = 0


def _places(place: Place) -> dict[str, dict[str, Any]]:
    common = {"api_key": "unused"}
    return {
        f"openai/{place.model}": common | {"api_base": place.v1},
        f"hosted_vllm/{place.model}": common | {"api_base": place.v1},
        f"anthropic/{place.model}": common | {"api_base": place.url},
    }


def check_chats_whole_and_streamed(place: Place) -> None:
    for model, where in _places(place).items():
        whole = litellm.completion(model=model, max_tokens=16, **ASK, **where)
        parts = list(
            litellm.completion(
                model=model, max_tokens=16, stream=True, stream_options={"include_usage": True},
                **ASK, **where,
            )
        )  # fmt: skip
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content, model
        assert text, model
        assert whole.usage.completion_tokens == 16, model


def check_tools_whole_and_streamed(place: Place) -> None:
    for model, where in _places(place).items():
        ask = {**ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        whole = litellm.completion(model=model, max_tokens=400, **ask, **where)
        [call] = whole.choices[0].message.tool_calls
        is_weather(call.function.arguments)
        parts = list(litellm.completion(model=model, max_tokens=400, stream=True, **ask, **where))
        built = litellm.stream_chunk_builder(parts)
        [streamed] = built.choices[0].message.tool_calls
        is_weather(streamed.function.arguments)


def check_responses_and_messages(place: Place) -> None:
    """Its own doors of both APIs: over the server's Responses, and over its Messages."""
    where = _places(place)
    model = f"openai/{place.model}"
    answer = litellm.responses(
        model=model, input=QUESTION, max_output_tokens=16, temperature=0, **where[model]
    )
    assert answer.output[0].content[0].text


def check_embeddings_and_reranking(place: Place) -> None:
    answer = litellm.embedding(
        model=f"openai/{place.model}", input=list(TEXTS), api_base=place.v1, api_key="unused"
    )
    assert len(answer.data) == len(TEXTS)
    ranked = litellm.rerank(
        model=f"hosted_vllm/{place.model}", query=TEXTS[1], documents=list(TEXTS), top_n=1,
        api_base=place.url, api_key="unused",
    )  # fmt: skip
    assert ranked.results[0]["index"] == 1
