"""Where a client finds the server, and the questions that all clients ask.

The modules beside this one run in the clients' own environment, which has no Octavo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CITIES = ("Oslo", "Rome", "Lima")
QUESTION = "What will the weather be in Rome for the next two days?"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEXTS = (
    "Paris is the capital of France.",
    "Rome is the capital of Italy, and was the capital of an empire.",
    "Bread is baked of flour, water and salt.",
)
LEAST_COSINE = 0.9999
"""Of two vectors of one text that were computed in batches of other sizes, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A server.

    Attributes:
        url: of the server, without `/v1`.
        model: the served model's name.
        packaged: whether that model writes texts that come to an end; a random one writes bytes.
    """

    url: str
    model: str
    packaged: bool

    @property
    def v1(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"


def is_weather(arguments: object) -> None:
    """Asserts that a call's arguments match `WEATHER`.

    Args:
        arguments: JSON, or the object that a client made of it.
    """
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(values, dict), f"arguments are {arguments!r}"
    assert set(values) == {"city", "days"}, f"arguments are {values}"
    assert values["city"] in CITIES, f"city is {values['city']!r}"
    days = values["days"]
    assert type(days) is int and 1 <= days <= 7, f"days are {days!r}"  # noqa: PT018


def cosine(one: list[float], other: list[float]) -> float:
    """Of the angle between two vectors."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5


def raised(kind: type[Exception], ask: Callable[[], object]) -> Any:
    """The error of a kind that asking raises.

    Raises:
        AssertionError: it raises none.
    """
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


Check = Callable[[Place], None]


def packaged_only(check: Check) -> Check:
    """Marks a check that a random model cannot pass: it ends no string by itself."""
    check.packaged_only = True  # type: ignore[attr-defined]
    return check
