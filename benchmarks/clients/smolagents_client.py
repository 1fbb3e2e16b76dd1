"""smolagents: agents that call tools, and agents that write code."""

from __future__ import annotations

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from benchmarks.clients.place import QUESTION, Place

_ASKED: list[int] = []


@tool
def get_weather(days: int) -> str:
    """The weather of the next days.

    Args:
        days: how many.
    """
    _ASKED.append(days)
    return "Sunny."


def _model(place: Place) -> OpenAIServerModel:
    return OpenAIServerModel(
        model_id=place.model, api_base=place.v1, api_key="unused", temperature=0, max_tokens=400
    )


def check_a_message(place: Place) -> None:
    message = _model(place).generate(
        [{"role": "user", "content": [{"type": "text", "text": "Say something."}]}],
        stop_sequences=["Observation:"],
    )
    assert message.content


def check_calls_are_read(place: Place) -> None:
    answer = _model(place).generate(
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        tools_to_call_from=[get_weather],
    )
    assert answer.tool_calls
    assert answer.tool_calls[0].function.name == "get_weather"


def check_an_agent_goes_its_steps(place: Place) -> None:
    agent = ToolCallingAgent(
        tools=[get_weather], model=_model(place), max_steps=1, verbosity_level=0
    )
    agent.run(QUESTION)
    [step] = [step for step in agent.memory.steps if hasattr(step, "tool_calls")]
    assert step.tool_calls
    assert step.error is None, step.error
