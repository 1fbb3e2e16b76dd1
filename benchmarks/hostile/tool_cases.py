"""Agents' requests of a size that nobody means: tools, schemas, histories.

Each is refused, or served without harm to others. The suite's server has a template that knows
tools; the answer's first tokens are enough.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.hostile.call_cases import SERVICE, calls
from benchmarks.hostile.case import Addresses, Case
from octavo.server.client_requests import chat_request

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
AT_ONCE = 4
CLIENT_TIMEOUT_S = 50
"""Below the suite's limit of a case."""
_SERVED = (200, 400, 413, 422, 429)


def sends(
    path: str, body: Callable[[], dict[str, Any]], count: int = 1
) -> Callable[[Addresses], Awaitable[None]]:
    """Sends a body, so many at once; each may be served.

    Args:
        body: makes it, once the case begins: others are as large.
    """

    async def send(to: Addresses) -> None:
        content = json.dumps(body()).encode()
        headers = {**to.headers, "content-type": "application/json"}
        allowed = _SERVED if to.token is not None else (401,)
        async with httpx.AsyncClient(
            base_url=to.http, headers=headers, timeout=CLIENT_TIMEOUT_S
        ) as client:
            try:
                answers = await asyncio.gather(
                    *(client.post(path, content=content) for _ in range(count))
                )
            except httpx.WriteError:
                assert to.token is None, f"{path}: the connection was closed"
                return  # refused by its header, before all of it was sent
            except httpx.TimeoutException as error:
                raise AssertionError(f"{path}: no answer in {CLIENT_TIMEOUT_S} s") from error
        for answer in answers:
            assert answer.status_code in allowed, (
                f"{path}: {answer.status_code} {answer.text[:300]}"
            )

    return send


def _nested(depth: int, width: int) -> dict[str, Any]:
    """A schema of objects within objects."""
    schema: dict[str, Any] = {"enum": ["a", "b"]}
    for _ in range(depth):
        names = {
            f"p{number}": schema if number == 0 else {"type": "integer"} for number in range(width)
        }
        schema = {"type": "object", "properties": names, "required": list(names)}
    return schema


def _tools(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]


def _chat(schemas: list[dict[str, Any]], choice: Any = "required", **more: Any) -> dict[str, Any]:
    return {
        "messages": HI, "tools": _tools(schemas), "tool_choice": choice, "max_tokens": 2, **more
    }  # fmt: skip


def _many(**more: Any) -> dict[str, Any]:
    """128 tools, as many characters as tools may have."""
    return _chat([_nested(4, 6)] * 128, **more)


def _listed(count: int) -> dict[str, Any]:
    values = {"enum": [f"value {number}" for number in range(count)]}
    return {"type": "object", "properties": {"a": values}, "required": ["a"]}


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    return _chat([schema], {"type": "function", "function": {"name": "tool_0"}})


def _messages_with(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [
        {"name": f"tool_{number}", "input_schema": schema} for number, schema in enumerate(schemas)
    ]
    return {"messages": HI, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 2}


def _history(rounds: int) -> list[dict[str, Any]]:
    """So many calls, each with its result."""
    made: list[dict[str, Any]] = [*HI]
    for number in range(rounds):
        function = {"name": "tool_0", "arguments": '{"a": 1}'}
        call = {"id": f"c{number}", "type": "function", "function": function}
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        made.append({"role": "tool", "tool_call_id": f"c{number}", "content": "1"})
    return made


def _items(rounds: int) -> list[dict[str, Any]]:
    """The same as Responses has it."""
    made: list[dict[str, Any]] = [*HI]
    for number in range(rounds):
        name = f"c{number}"
        call = {"type": "function_call", "call_id": name, "name": "tool_0", "arguments": "{}"}
        made += [call, {"type": "function_call_output", "call_id": name, "output": "1"}]
    return made


def _forms(count: int) -> dict[str, Any]:
    """A schema of alternatives, each with alternatives."""
    inner = {"anyOf": [{"const": f"{number}"} for number in range(count)]}
    each = [
        {"type": "object", "properties": {f"k{number}": inner}, "required": [f"k{number}"]}
        for number in range(count)
    ]
    return {"type": "object", "properties": {"a": {"anyOf": each}}, "required": ["a"]}


_BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "128 tools with deep schemas": (CHAT, _many),
    "128 tools, strict and a stream": (CHAT, lambda: _many(stream=True)),
    "128 tools in Messages": (MESSAGES, lambda: _messages_with([_nested(3, 4)] * 128)),
    "an enum of 5,000 in a tool": (CHAT, lambda: _named(_listed(5_000))),
    "an enum of 100,000 in a tool": (CHAT, lambda: _named(_listed(100_000))),
    "an enum of 100,000 as a response's format": (
        CHAT,
        lambda: {
            "messages": HI, "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"schema": _listed(100_000)}},
        },
    ),
    "a named tool 400 objects deep": (CHAT, lambda: _named(_nested(400, 2))),
    "a named tool of 60 × 60 alternatives": (CHAT, lambda: _named(_forms(60))),
    "a named tool of long patterns": (
        CHAT,
        lambda: _named(
            {
                "type": "object",
                "properties": {
                    f"p{number}": {"type": "string", "pattern": "^(a|b|c){1,200}(x+y*)+$"}
                    for number in range(200)
                },
            }
        ),
    ),
    "a history of 4,000 calls": (
        CHAT, lambda: _chat([{"type": "object"}], "auto", messages=_history(4_000))
    ),
    "a history of 4,000 calls in Responses": (
        RESPONSES, lambda: {"input": _items(4_000), "max_output_tokens": 2}
    ),
    "a history of 8,000 short messages": (CHAT, lambda: {"messages": HI * 8_000, "max_tokens": 2}),
    "60,000 properties of a response's format": (
        CHAT,
        lambda: {
            "messages": HI, "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"schema": _wide(60_000)}},
        },
    ),
    "128 tools, their tokens counted": (
        f"{MESSAGES}/count_tokens",
        lambda: {"messages": HI, "tools": _messages_with([_nested(3, 4)] * 128)["tools"]},
    ),
    "a history of 4,000 calls, its tokens counted": (
        f"{RESPONSES}/input_tokens", lambda: {"input": _items(4_000)}
    ),
    "a body of 2,000,000 values": (CHAT, lambda: {"messages": HI, "metadata": {"a": [1] * 2**21}}),
}  # fmt: skip

CASES = (
    *(
        Case(
            name=f"tools: {name}", send=sends(path, body, AT_ONCE),
            short=name in ("128 tools with deep schemas", "an enum of 5,000 in a tool"),
        )
        for name, (path, body) in _BODIES.items()
    ),
    Case(
        name="gRPC: a chat with 128 tools", short=False,
        send=calls(
            f"{SERVICE}/Chat",
            chat_request(HI, tools=_tools([_nested(4, 6)] * 128)).SerializeToString(),
            AT_ONCE,
        ),
    ),
)  # fmt: skip
