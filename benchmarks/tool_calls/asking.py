"""The same call asked of a server in several ways, and what an answer or a stream says of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PATHS = {
    "chats": "/v1/chat/completions",
    "Messages": "/v1/messages",
    "Responses": "/v1/responses",
}
CHOICES = ("named", "required", "one of several", "allowed", "parallel")
MOST_TOKENS = 200
THOUGHT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Turn:
    """What an answer says.

    Attributes:
        calls: names and arguments.
        content: words beside them.
        is_cut: whether the length ended it.
    """

    calls: tuple[tuple[str, str], ...]
    content: str
    is_cut: bool


@dataclass(slots=True)
class Ask:
    """One call to be made.

    Attributes:
        api: of `PATHS`.
        choice: of `CHOICES`; each API has its own form of it.
        tools: functions as chats have them; the first is to be called.
        seed: of the model's draws.
        thinks: whether a thought is bounded, which chats alone can ask for.
        bias: of tokens, for a model that writes at random and ends no text.
    """

    api: str
    choice: str
    tools: list[dict[str, Any]]
    seed: int
    thinks: bool
    bias: dict[str, float] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The request."""
        name = self.tools[0]["name"]
        is_named = self.choice == "named"
        is_parallel = self.choice == "parallel"
        messages = [{"role": "user", "content": f"Please call {name} for case {self.seed}."}]
        shared: dict[str, Any] = {"temperature": 0.7, "seed": self.seed}
        if self.bias and self.api == "chats":
            shared |= {"logit_bias": self.bias}
        if self.thinks and self.api == "chats":
            shared |= {"thinking_token_budget": THOUGHT_TOKENS}
        if self.api == "Messages":
            choice = {"type": "tool", "name": name} if is_named else {"type": "any"}
            return shared | {
                "messages": messages, "max_tokens": MOST_TOKENS,
                "tools": [_for_messages(each) for each in self.tools],
                "tool_choice": choice | {"disable_parallel_tool_use": not is_parallel},
            }  # fmt: skip
        if self.api == "Responses":
            named: Any = {"type": "function", "name": name}
            choices: dict[str, Any] = {
                "named": named,
                "allowed": {"type": "allowed_tools", "mode": "required", "tools": [named]},
            }
            tools = [{"type": "function", "strict": False, **each} for each in self.tools]
            return shared | {
                "input": messages, "max_output_tokens": MOST_TOKENS, "tools": tools,
                "tool_choice": choices.get(self.choice, "required"),
                "parallel_tool_calls": is_parallel,
            }  # fmt: skip
        named = {"type": "function", "function": {"name": name}}
        allowed = {"mode": "required", "tools": [named]}
        choices = {
            "named": named,
            "allowed": {"type": "allowed_tools", "allowed_tools": allowed},
        }
        return shared | {
            "messages": messages, "max_completion_tokens": MOST_TOKENS,
            "tools": [{"type": "function", "function": each} for each in self.tools],
            "tool_choice": choices.get(self.choice, "required"),
            "parallel_tool_calls": is_parallel,
        }  # fmt: skip


def _for_messages(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "input_schema": tool.get("parameters", {"type": "object"})}


async def whole(client: httpx.AsyncClient, ask: Ask) -> Turn:
    """The answer in one piece.

    Raises:
        RuntimeError: the request was refused.
    """
    answer = await client.post(PATHS[ask.api], json=ask.body())
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
    read = answer.json()
    if ask.api == "chats":
        [choice] = read["choices"]
        calls = [each["function"] for each in choice["message"].get("tool_calls") or []]
        return Turn(
            tuple((call["name"], call["arguments"]) for call in calls),
            choice["message"]["content"] or "",
            choice["finish_reason"] == "length",
        )
    if ask.api == "Messages":
        blocks = read["content"]
        return Turn(
            tuple((b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            read["stop_reason"] == "max_tokens",
        )
    items = read["output"]
    return Turn(
        tuple((i["name"], i["arguments"]) for i in items if i["type"] == "function_call"),
        "".join(i["content"][0]["text"] for i in items if i["type"] == "message"),
        read["status"] == "incomplete",
    )


async def streamed(client: httpx.AsyncClient, ask: Ask) -> Turn:
    """The answer in pieces, joined.

    Raises:
        RuntimeError: the request was refused, or the stream broke off.
        AssertionError: the events are not in their order.
    """
    names: list[str] = []
    pieces: list[list[str]] = []
    content = ""
    is_cut: bool | None = None
    async for event in _events(client, ask):
        kind = event.get("type")
        if ask.api == "chats":
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or []:
                    if call["index"] == len(names):
                        assert call["id"], event
                        assert call["function"]["arguments"] == "", event
                        names.append(call["function"]["name"])
                        pieces.append([])
                    else:
                        assert call["index"] == len(names) - 1, event
                        pieces[-1].append(call["function"]["arguments"])
                if choice["finish_reason"]:
                    is_cut = choice["finish_reason"] == "length"
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            assert event["content_block"]["input"] == {}, event
            names.append(event["content_block"]["name"])
            pieces.append([])
        elif kind == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            pieces[-1].append(event["delta"]["partial_json"])
        elif kind == "content_block_delta" and event["delta"]["type"] == "text_delta":
            content += event["delta"]["text"]
        elif kind == "message_delta":
            is_cut = event["delta"]["stop_reason"] == "max_tokens"
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            assert event["item"]["arguments"] == "", event
            names.append(event["item"]["name"])
            pieces.append([])
        elif kind == "response.function_call_arguments.delta":
            pieces[-1].append(event["delta"])
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == "".join(pieces[-1]), event
        elif kind == "response.output_text.delta":
            content += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            is_cut = kind == "response.incomplete"
    if is_cut is None:
        raise RuntimeError("the stream broke off")
    joined = ("".join(parts) for parts in pieces)
    return Turn(tuple(zip(names, joined, strict=True)), content, is_cut)


async def _events(client: httpx.AsyncClient, ask: Ask) -> AsyncIterator[dict[str, Any]]:
    body = ask.body() | {"stream": True}
    async with client.stream("POST", PATHS[ask.api], json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        rest = b""
        async for piece in answer.aiter_bytes():  # httpx's lines end at U+2028 and others, too
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
