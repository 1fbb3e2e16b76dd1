"""Reads JSON bodies, and holds the event loop for a time that is bounded.

Python's own parser takes half a second for 4 MB of small values. Pydantic's takes a fifth of that,
and less where a body has not very many lists and objects.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError
from octavo.server.beside_loop import MESSAGE_BYTES

SMALL_BYTES = 65_536
"""A body that Python's parser reads in a few milliseconds, whatever it holds."""
MAX_PARTS = 131_072
"""Lists, objects and names of fields in a body, and an eighth of its other values."""

# Possessive: no body makes them look at a byte twice.
_TEXT = rb'"(?:[^"\\]++|\\.)*+"?'
_STRING = re.compile(_TEXT, re.DOTALL)
_SLICE = re.compile(rb'(?:[^"]++|' + _TEXT + rb"){1,8192}+", re.DOTALL)
"""Texts, whole, and what is between them: a millisecond's work."""


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that reads its own body."""
        handle = super().get_route_handler()

        async def run(request: Request) -> Response:
            reading = _JsonRequest(request.scope, request.receive)
            try:
                return await handle(reading)
            except HTTPException:  # as FastAPI answers whatever reading a body raises
                if reading.refusal is not None:
                    raise reading.refusal from None
                raise

        return run


class _JsonRequest(Request):
    refusal: InvalidRequestError | None = None

    async def json(self) -> Any:
        body = await self.body()
        MESSAGE_BYTES.set(len(body))
        try:
            return await read_json(body)
        except InvalidRequestError as error:
            self.refusal = error
            raise


async def read_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        json.JSONDecodeError: it is not JSON; in a large body half a surrogate pair is not, either.
        InvalidRequestError: it has too many lists, objects and names.
    """
    if len(body) <= SMALL_BYTES:
        return _read_small(body)
    if _num_parts(body) > MAX_PARTS:
        found = 0
        for part in _SLICE.finditer(body):
            found += _num_parts(_STRING.sub(b"", part[0]))  # those in texts are none
            await asyncio.sleep(0)
        if found > MAX_PARTS:
            allowed = (
                f"at most {MAX_PARTS}: lists, objects and names, and eight other values are one"
            )
            raise InvalidRequestError("body", f"{found} parts", allowed)
    try:
        return from_json(body, cache_strings="none")
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


def _num_parts(text: bytes) -> int:
    return sum(map(text.count, b"[{:")) + text.count(b",") // 8


def _read_small(body: bytes) -> Any:
    """The value of a body, as Python reads it: with halves of surrogate pairs, too.

    Raises:
        json.JSONDecodeError: not JSON, not UTF-8, or deeper or of longer numbers than Python
            reads.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
