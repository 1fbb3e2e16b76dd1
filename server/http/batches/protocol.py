"""Bodies of OpenAI's batches."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from octavo.engine.errors import InvalidRequestError
from octavo.server.http.protocol import Body

MAX_METADATA, MAX_METADATA_CHARS = 16, 512
MAX_WINDOW_S = 30 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: str = Field(description="An uploaded file of purpose batch.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: str = Field(
        description='As "24h": seconds (s), minutes (m), hours (h) or days (d), at most 30 days.'
    )
    metadata: dict[str, str] | None = Field(None, description="Comes back in the batch.")


def seconds_of(window: str) -> int:
    """The seconds of a completion window.

    Raises:
        InvalidRequestError: it is none.
    """
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        allowed = 'a number and a unit, as "24h", "30m" or "7d"; at most 30 days'
        raise InvalidRequestError("completion_window", window, allowed)
    return seconds


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Refuses metadata beyond OpenAI's limits.

    Raises:
        InvalidRequestError: too many pairs, or one that is too long.
    """
    pairs = metadata or {}
    if len(pairs) > MAX_METADATA:
        raise InvalidRequestError("metadata", f"{len(pairs)} pairs", f"at most {MAX_METADATA}")
    for name, value in pairs.items():
        if max(len(name), len(value)) > MAX_METADATA_CHARS:
            allowed = f"names and texts of at most {MAX_METADATA_CHARS} characters"
            raise InvalidRequestError("metadata", name, allowed)
