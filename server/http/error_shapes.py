"""Errors in the shape of the API that a path belongs to."""

from __future__ import annotations

from typing import Any

MESSAGES_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""By this the `anthropic` client's loop over tools knows that no conversation is kept here, and
sends all of it each time."""


def shaped(path: str, status: int, content: dict[str, Any]) -> dict[str, Any]:
    """The object that says what went wrong, as clients of this path read it.

    Args:
        path: that was asked for.
        status: of HTTP.
        content: OpenAI's object; see `errors.error_body`.

    Returns:
        Anthropic's object, `{"type": "error", "error": {"type", "message"}}`, for Messages;
        OpenAI's for all else.
    """
    error: dict[str, Any]
    if path != MESSAGES_PATH and not path.startswith(f"{MESSAGES_PATH}/"):
        return content
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": content["error"]["message"]}
    if content["error"].get("param") == "thread":
        error["details"] = _THREAD
    return {"type": "error", "error": error}
