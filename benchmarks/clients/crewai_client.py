"""CrewAI: one agent with one task."""

from __future__ import annotations

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM

from benchmarks.clients.place import QUESTION, WEATHER, Place, is_weather

FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}


def check_a_call(place: Place) -> None:
    llm = LLM(
        model=f"openai/{place.model}", base_url=place.v1, api_key="unused", temperature=0,
        max_tokens=400,
    )  # fmt: skip
    assert llm.call("Say something.")
    seen = []
    llm.call(
        [{"role": "user", "content": QUESTION}], tools=[TOOL],
        available_functions={"get_weather": lambda **values: seen.append(values) or "Sunny."},
    )  # fmt: skip
    for values in seen:
        is_weather(values)
