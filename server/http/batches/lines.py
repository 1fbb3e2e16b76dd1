"""One line of a batch: what it asks for, and its result as a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from octavo.engine.errors import InvalidRequestError, OctavoError
from octavo.server.batch.results import result_id
from octavo.server.batch.tasks import check_openai_line
from octavo.server.http.batches.inner_calls import Answer, post
from octavo.server.http.bodies import read_json
from octavo.server.http.errors import body_of, encode

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_CUSTOM_ID_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a batch that can be asked.

    Attributes:
        number: from 1.
        custom_id: the client's name for it.
        body: of its request, JSON.
    """

    number: int
    custom_id: str
    body: bytes


class BadLineError(Exception):
    """A line that can never be asked.

    Attributes:
        result: the line that says so.
    """

    def __init__(self, number: int, custom_id: str | None, error: OctavoError) -> None:
        super().__init__(str(error))
        self.result = failed_line(number, custom_id, error.http_status, body_of(error))


async def custom_id_of(raw: bytes) -> str | None:
    """The name that a line has, if it has one."""
    try:
        value = await read_json(raw)
    except (ValueError, RecursionError):
        return None
    name = value.get("custom_id") if isinstance(value, dict) else None
    return name if isinstance(name, str) and len(name) <= MAX_CUSTOM_ID_CHARS else None


async def read_line(number: int, raw: bytes, endpoint: str) -> Line:
    """Checks a line, but for what the endpoint itself checks.

    Args:
        endpoint: that the batch's lines are for.

    Raises:
        BadLineError: it can never be asked.
    """
    name: str | None = None
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise InvalidRequestError("line", raw[:40], f"at most {MAX_LINE_BYTES} bytes")
        try:
            value = await read_json(raw)
        except InvalidRequestError:
            raise
        except (ValueError, RecursionError):
            raise InvalidRequestError("line", raw[:80], "JSON in UTF-8") from None
        if not isinstance(value, dict):
            raise InvalidRequestError("line", value, "an object")
        given = value.get("custom_id")
        if not isinstance(given, str) or not 1 <= len(given) <= MAX_CUSTOM_ID_CHARS:
            allowed = f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            raise InvalidRequestError("custom_id", given, allowed)
        name = given
        body = check_openai_line(value)
        if value["url"] != endpoint:
            raise InvalidRequestError("url", value["url"], f"{endpoint}, the batch's endpoint")
        if body.get("stream"):
            raise InvalidRequestError("stream", True, "false or not given: results are whole")
        try:
            content = encode({**body, "priority": "low"})
        except (ValueError, RecursionError):
            raise InvalidRequestError("body", "this", "JSON that is not too deep") from None
    except InvalidRequestError as error:
        raise BadLineError(number, name, error) from None
    return Line(number=number, custom_id=name, body=content)


async def ask(app: ASGIApp, endpoint: str, line: Line) -> Answer:
    """The answer to a line."""
    return await post(app, endpoint, line.body)


def answered_line(line: Line, answer: Answer) -> tuple[bool, bytes]:
    """The result of a line that was answered: whether well, and the line."""
    if answer.status != 200:
        return False, failed_line(line.number, line.custom_id, answer.status, _read(answer.body))
    head = {"id": result_id(line.number), "custom_id": line.custom_id}
    response = {"status_code": 200, "request_id": answer.headers.get("x-request-id", "")}
    # The body is JSON on one line already.
    before = encode({**head, "response": response})[:-2]
    return True, before + b',"body":' + answer.body + b'},"error":null}'


def failed_line(number: int, custom_id: str | None, status: int, body: Any) -> bytes:
    """The result of a line that was refused, or failed: its error names the line."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = {**body, "error": {**body["error"], "line": number}}
    response = {"status_code": status, "request_id": result_id(number), "body": body}
    return _record(number, custom_id, response, None)


def unasked_line(number: int, custom_id: str | None) -> bytes:
    """The result of a line that the batch had no time for."""
    error = {
        "code": "batch_expired",
        "message": "the completion window was over before this line was answered",
        "line": number,
    }
    return _record(number, custom_id, None, error)


def _record(number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    return encode(
        {
            "id": result_id(number),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {"error": {"message": body.decode("utf-8", "replace")[:1000], "code": "internal"}}
