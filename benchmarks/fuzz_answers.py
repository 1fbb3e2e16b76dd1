"""Whether an answer of the HTTP API is one: in its API's own shape, whole, and no fault's."""

from __future__ import annotations

import json
from typing import Any

RERANKS = ("/v1/rerank", "/v2/rerank", "/rerank")
_LAST_EVENTS = {
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
}
_MEMBERS = {
    "/v1/chat/completions": ("choices", "usage"),
    "/v1/completions": ("choices", "usage"),
    "/v1/messages": ("content", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/v1/responses": ("output", "status", "usage"),
    "/v1/responses/input_tokens": ("input_tokens",),
    "/v1/embeddings": ("data", "usage"),
    "/pooling": ("data", "usage"),
    "/v1/score": ("data", "usage"),
    "/v1/rerank": ("results", "usage"),
    "/classify": ("data", "usage"),
    "/tokenize": ("tokens",),
}
_OWN_TIMEOUT = 504
"""The request's own `timeout_s`."""


def fault_of(route: str, status: int, kind: str, content: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is.

    Args:
        status, kind, content: its status, content type and body.
    """
    is_good = status == 200
    if not is_good and not 400 <= status < 500 and status != _OWN_TIMEOUT:
        return f"status {status}"
    if kind.startswith("text/event-stream"):
        return _stream_fault(route, content) if is_good else f"a stream of status {status}"
    try:
        body = json.loads(content)
    except ValueError:
        return "no JSON"
    if not is_good:
        return _error_fault(route, body)
    missing = [name for name in _MEMBERS[route] if name not in body]
    return f"an answer without {', '.join(missing)}" if missing else None


def _error_fault(route: str, body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        return "an error without a message"
    if route.startswith("/v1/messages"):
        if (
            set(body) != {"type", "error"}
            or body["type"] != "error"
            or set(error) != {"type", "message"}
        ):
            return "an error that is not in Anthropic's shape"
        return None
    if set(error) != {"message", "type", "param", "code"}:
        return "an error that is not in OpenAI's shape"
    if route in RERANKS and not body.get("message") == body.get("detail") == error["message"]:
        return "an error that is not in Cohere's and Jina's shape"
    return None


def _stream_fault(route: str, content: bytes) -> str | None:
    lines = [line for line in content.decode().split("\n") if line.startswith("data: ")]
    if not lines:
        return "a stream without events"
    *_, last = lines
    if route not in _LAST_EVENTS:
        if last == "data: [DONE]":
            return None
        return _told_fault(json.loads(last[6:]).get("error"))
    event = json.loads(last[6:])
    if event["type"] in _LAST_EVENTS[route]:
        return None
    if event["type"] == "response.failed":
        return _told_fault(event["response"]["error"])
    return _told_fault(event.get("error"))


def _told_fault(error: Any) -> str | None:
    """Of a stream's last event: an error that blames the request or the time is none."""
    if not isinstance(error, dict):
        return "a stream that breaks off"
    message = str(error.get("message"))
    return None if "deadline" in message or "timeout" in message else f"a stream failed: {message}"
