"""Bodies of the HTTP API that are nearly right: valid ones, changed in a few places.

Noise alone is refused by the first check. A body that was valid, and has one field of another type,
an item twice, a part of another API's body or a text that nobody expects, comes further.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

MOST_TOKENS = 8
"""Of most answers: a fuzzer wants many requests, not long answers."""
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 1.5, 2, 127, 1e309, -(2**63), 2**70, "", " ", "a", "auto"),
    *("function", "text", "\x00", "\ud800", "🜁" * 9, "x" * 300, "</tool_call>", "<think>", "{"),
    *([], [1], [[]], [None], ["a", 1], {}, {"a": 1}, {"type": "text"}, {"type": "object"}),
    *({"type": []}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"enum": []}, {"const": {"a": None}}),
)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIMITED = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Routes whose answers are long unless a body says otherwise."""

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "é"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "go", "description": "Goes.", "parameters": _SCHEMA, "strict": True}
_PLAIN = {"name": "stop_it", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": '{"a": "x"}'}}
_ASK = {"role": "user", "content": "Hi"}
_PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
_TOOLS = [{"type": "function", "function": each} for each in (_FUNCTION, _PLAIN)]
_CHATS: list[dict[str, Any]] = [
    {"messages": [_ASK], "max_completion_tokens": 4, "stream": True},
    {
        "messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": _PARTS}],
        "tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 1,
        "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
    },
    {
        "messages": [
            _ASK, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
        "tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}},
        "temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 6,
    },
    {
        "messages": [
            _ASK, {"role": "assistant", "reasoning_content": "hm", "content": "so"}, _ASK
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
        "reasoning_effort": "low", "include_reasoning": True, "thinking_token_budget": 3,
        "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 8, "seed": 1,
    },
]  # fmt: skip
_BLOCKS_TOOLS = [
    {"name": "go", "description": "Goes.", "input_schema": _SCHEMA},
    {"type": "custom", "name": "stop_it", "input_schema": {"type": "object"}},
]
_MESSAGES: list[dict[str, Any]] = [
    {"messages": [_ASK], "max_tokens": 4, "system": "Be.", "stream": True, "temperature": 0.5},
    {
        "messages": [{"role": "user", "content": _PARTS}], "max_tokens": 8, "stream": True,
        "tools": _BLOCKS_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2}, "stop_sequences": ["zq"],
    },
    {
        "messages": [
            _ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "go", "input": {"a": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result", "tool_use_id": "c1", "is_error": True,
                        "content": [{"type": "text", "text": "done"}],
                    },
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        "tools": _BLOCKS_TOOLS, "tool_choice": {"type": "tool", "name": "go"}, "max_tokens": 6,
        "output_config": {"effort": "low"}, "metadata": {"user_id": "u"}, "top_k": 5,
    },
]  # fmt: skip
_RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "instructions": "Be.", "max_output_tokens": 4, "stream": True},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "o"}]},
            {"type": "function_call", "call_id": "c1", "name": "go", "arguments": '{"a": "x"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ],
        "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required", "stream": True,
        "parallel_tool_calls": False, "max_output_tokens": 8, "reasoning": {"effort": "low"},
    },
    {
        "input": [_ASK], "max_output_tokens": 8, "temperature": 0, "metadata": {"a": "b"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        "include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled",
    },
]  # fmt: skip
VALID: Mapping[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": _CHATS,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": [{"messages": [_ASK], "tools": _BLOCKS_TOOLS, "system": "Be."}],
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": [{"input": "Hi", "tools": [{"type": "function", **_FUNCTION}]}],
    "/v1/completions": [
        {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "stream": True, "stop": ["q", "z"]},
        {"prompt": [[60, 61]], "max_tokens": 4, "echo": True, "logprobs": 1, "best_of": 1},
        {"prompt": "a", "max_tokens": 6, "structured_outputs": {"json": _SCHEMA}},
    ],
    "/v1/embeddings": [
        {"input": ["one", "two"], "encoding_format": "base64", "dimensions": 8},
        {"input": [[60, 61, 62], [63]], "pooling": "mean", "normalize": False, "priority": "low"},
        {"input": "one", "truncate_prompt_tokens": 2, "truncation_side": "right", "user": "u"},
    ],
    "/pooling": [{"input": ["one", "two"], "pooling": "cls", "encoding_format": "float"}],
    "/v1/score": [
        {"text_1": "one", "text_2": ["two", "three"]},
        {"text_1": [[60]], "text_2": [[61]]},
    ],
    "/v1/rerank": [
        {"query": "one", "documents": ["two", {"text": "three"}], "top_n": 1},
        {"query": "one", "documents": ["two"], "return_documents": False},
    ],
    "/classify": [{"input": ["one", "two"], "tenant": "t"}],
    "/tokenize": [{"messages": [_ASK], "tools": _TOOLS, "add_generation_prompt": True}],
}  # fmt: skip
"""Bodies that are served, by route; `/classify` where the model has a head."""
_DONORS = [body for bodies in VALID.values() for body in bodies]
_NAMES = sorted({name for body in _DONORS for name in body})

Place = tuple[Any, Any]
"""A list or an object, and the index or name of one of its values."""


def random_body(route: str, rng: random.Random) -> dict[str, Any]:
    """A body for a route, changed in up to four places."""
    body: dict[str, Any] = copy.deepcopy(rng.choice(VALID[route]))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 4))):
        _change(body, rng)
    for name in _LIMITS:
        value = body.get(name)
        if isinstance(value, int | float) and value > MOST_TOKENS and rng.random() < 0.98:
            body[name] = MOST_TOKENS
    if route in _LIMITED and not set(_LIMITS) & set(body):
        body[_LIMITED[route]] = MOST_TOKENS
    return body


def write(body: dict[str, Any]) -> bytes:
    """As JSON: half a surrogate pair is written as an escape, infinity as Python writes it."""
    return json.dumps(body).encode()


def _change(body: dict[str, Any], rng: random.Random) -> None:
    places = _places(body)
    where, key = rng.choice(places)
    value = where[key]
    action = rng.randrange(10)
    if action == 0:
        del where[key]
    elif action == 1:
        where[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif action == 2 and isinstance(where, list):
        where[key:key] = [copy.deepcopy(value)] * rng.choice((1, 1, 2, 30))
    elif action == 3:
        other, its_key = rng.choice(places)
        where[key] = copy.deepcopy(other[its_key])
    elif action == 4:
        donor, its_key = rng.choice(_places(rng.choice(_DONORS)))
        where[key] = copy.deepcopy(donor[its_key])
    elif action == 5:
        donor, its_key = rng.choice(_places(rng.choice(_DONORS)))
        if isinstance(where, dict):
            where[str(its_key)] = copy.deepcopy(donor[its_key])
        else:
            where.append(copy.deepcopy(donor[its_key]))
    elif action == 6 and isinstance(where, dict):
        where[rng.choice((*_NAMES, "unknown", ""))] = where.pop(key)
    elif action == 7:
        where[key] = rng.choice(([value], {"a": value}, json.dumps(value)))
    else:
        where[key] = _near(value, rng)


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice((-value, value + 1, value * 1000, float(value), value + 0.5))
    if isinstance(value, str):
        added = str(rng.choice(ODD_VALUES))
        return rng.choice((value + added, added + value, value[:-1], value.upper(), value * 20))
    if isinstance(value, list):
        return rng.choice((value[::-1], value * 2, value[1:]))
    if isinstance(value, dict):
        return dict(sorted(value.items(), reverse=True)) | {
            rng.choice(_NAMES): rng.choice(ODD_VALUES)
        }
    return copy.deepcopy(rng.choice(ODD_VALUES))


def _places(value: Any) -> list[Place]:
    """Where a value stands, of every value within another."""
    found: list[Place] = []
    rest = [value]
    while rest:
        inner = rest.pop()
        keys: Any = inner if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], dict | list):
                rest.append(inner[key])
    return found or [({"": value}, "")]
