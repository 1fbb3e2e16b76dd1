"""Outlines against a server: classes, choices and patterns, by vLLM's fields."""

from __future__ import annotations

from typing import Literal

import openai
import outlines
from outlines.types import Regex
from pydantic import BaseModel, Field

from benchmarks.clients.place import Place


class Capital(BaseModel):
    """What an answer is made of."""

    country: Literal["France", "Italy"]
    inhabitants: int = Field(ge=0, le=99_999_999)


def check_types(place: Place) -> None:
    client = openai.OpenAI(base_url=place.v1, api_key="unused", max_retries=0, timeout=60)
    model = outlines.from_vllm(client, place.model)
    found = model("Tell me of Paris.", Capital, max_tokens=400, temperature=0)
    Capital.model_validate_json(found)
    assert model("Is water wet?", Literal["yes", "no"], max_tokens=8) in ("yes", "no")
    year = model("When did the war end?", Regex(r"19\d\d"), max_tokens=8)
    assert year.startswith("19")
    assert len(year) == 4
    whole = outlines.from_openai(client, place.model)("Tell me of Paris.", Capital, max_tokens=400)
    Capital.model_validate_json(whole)
