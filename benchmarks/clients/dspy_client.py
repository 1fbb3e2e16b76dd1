"""DSPy: predictions by its JSON and chat adapters, and by calls of tools."""

from __future__ import annotations

from typing import Literal

import dspy

from benchmarks.clients.place import CITIES, Place, packaged_only


class Classify(dspy.Signature):
    """Which city is asked for."""

    question: str = dspy.InputField()
    city: Literal["Oslo", "Rome", "Lima"] = dspy.OutputField()


def _lm(place: Place, **more: object) -> dspy.LM:
    return dspy.LM(
        f"openai/{place.model}", api_base=place.v1, api_key="unused", temperature=0, cache=False,
        max_tokens=200, num_retries=0, **more,
    )  # fmt: skip


@packaged_only
def check_json(place: Place) -> None:
    """It asks a model that LiteLLM does not know for JSON in words alone."""
    with dspy.context(lm=_lm(place), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Classify)(question="How hot is it in Rome?")
    assert found.city in CITIES


def check_plain(place: Place) -> None:
    [text, *_] = _lm(place)("Say something.")
    assert text


def check_responses(place: Place) -> None:
    [answer, *_] = _lm(place, model_type="responses")("Say something.")
    assert answer["text"] if isinstance(answer, dict) else answer
