"""Text of any length and templates' variables: each is refused, or harms nobody.

Every case sends one kind of input over HTTP once and fails on an answer of 500.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.hostile.case import Addresses, Case

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HI = [{"role": "user", "content": "hi"}]


def _posts(path: str, body: dict[str, Any]) -> Callable[[Addresses], Awaitable[None]]:
    async def send(addresses: Addresses) -> None:
        async with httpx.AsyncClient(
            base_url=addresses.http, headers=addresses.headers, timeout=60
        ) as client:
            status = (await client.post(path, json=body)).status_code
        allowed = (400, 413, 422) if addresses.token is not None else (400, 401, 413, 422)
        assert status in allowed, f"{path} was answered {status}"

    return send


_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt of 4 MB": (COMPLETIONS, {"prompt": "a" * 4_000_000, "max_tokens": 1}),
    "a bad word of 1 MB": (COMPLETIONS, {"prompt": "a", "bad_words": ["a" * 10**6]}),
    "4 MB to tokenize": (TOKENIZE, {"prompt": "a" * 4_000_000}),
    "a chat of 4 MB": (CHAT, {"messages": [{"role": "user", "content": "a" * 4_000_000}]}),
    "200,000 template variables": (
        CHAT,
        {"messages": HI, "chat_template_kwargs": {str(number): 1 for number in range(200_000)}},
    ),
    "a logit_bias key of 5,000 digits": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"1" * 5_000: 1}},
    ),
    "a prompt of 1,300,000 empty lists": (COMPLETIONS, {"prompt": [[]] * 1_300_000}),
    "a prompt of 900,000 fractions": (COMPLETIONS, {"prompt": [1.5] * 900_000}),
    "300,000 unknown fields": (COMPLETIONS, {str(number): 1 for number in range(300_000)}),
    "100,000 biases": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {f"x{number}": "y" for number in range(100_000)}},
    ),
    "128 prompts times 64": (COMPLETIONS, {"prompt": ["a"] * 128, "n": 64, "max_tokens": 1}),
}

CASES = tuple(
    Case(name=name, send=_posts(path, body), short=False) for name, (path, body) in _BODIES.items()
)
