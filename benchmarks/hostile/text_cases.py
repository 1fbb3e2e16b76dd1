"""Texts of any length, chat templates and their variables: each is refused, or harms nobody.

Every case sends one kind of input over HTTP and fails on any answer but a refusal. Templates come
with their requests: the suite's server trusts those who have a token that far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.hostile.case import Addresses, Case

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HI = [{"role": "user", "content": "hi"}]


def _posts(
    path: str, body: dict[str, Any], count: int = 1
) -> Callable[[Addresses], Awaitable[None]]:
    """Sends a body, so many at once."""

    async def send(addresses: Addresses) -> None:
        allowed = (400, 413, 422) if addresses.token is not None else (400, 401, 413, 422)
        async with httpx.AsyncClient(
            base_url=addresses.http, headers=addresses.headers, timeout=60
        ) as client:
            answers = await asyncio.gather(*(client.post(path, json=body) for _ in range(count)))
        for answer in answers:
            assert answer.status_code in allowed, f"{path} was answered {answer.status_code}"

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

AT_ONCE = 8
"""Chats of each template: twice as many as there are workers that render them."""
_TEMPLATES = {
    "a template that loops 10¹⁰ times": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a template of 3 GB": "{{ 'a' * 3 * 10**9 }}",
    "a template that pads to 10 GB": "{{ 'a'.ljust(10**10) }}",
    "a template that indents by 2 GB": "{{ messages | tojson(indent=2 * 10**9) }}",
    "a template of a tower of powers": "{% set x = 9 ** 9 %}{{ x ** (x ** 9) }}",
}


def _chat(template: str) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 1, "chat_template": template}


CASES = tuple(
    Case(name=name, send=_posts(path, body), short=False) for name, (path, body) in _BODIES.items()
) + tuple(
    Case(name=name, send=_posts(CHAT, _chat(template), AT_ONCE), short=False)
    for name, template in _TEMPLATES.items()
)
