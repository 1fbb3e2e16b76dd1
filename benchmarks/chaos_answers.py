"""What readers of a fleet ask for, by every way there is, and what they have of it."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from benchmarks.tiny_server import Server
from octavo.client import AsyncOctavoClient, OctavoError, Priority, SamplingParams
from octavo.server.status import reason_of

NUM_ASKS = 48
"""Requests that differ."""
HANG_S = 90.0
"""After which nothing is waited for any more."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"temperature": 0.0, "structured_outputs": {"regex": "([a-d]{3,8} ){6,20}"}},
    {"temperature": 0.9, "n": 3, "ignore_eos": True},
    {"temperature": 0.0, "frequency_penalty": 0.6, "logprobs": 1, "ignore_eos": True},
    {"temperature": 0.7, "stop": ["q", "ZZ"], "min_tokens": 30, "repetition_penalty": 1.2},
)


class Ask(NamedTuple):
    """A request. The same number is the same request; `label` is its reader's own id of it."""

    prompt: list[int]
    fields: dict[str, Any]
    priority: Priority
    label: str | None = None

    @classmethod
    def of(cls, number: int, label: str | None = None) -> Ask:
        """The request of a number."""
        rng = random.Random(number)
        prompt = [rng.randrange(2, 250) for _ in range(rng.choice((6, 30, 150)))]
        fields = KINDS[number % len(KINDS)] | {"seed": number, "max_tokens": rng.randint(30, 160)}
        return cls(prompt, fields, rng.choice(tuple(Priority)), label)


@dataclass(slots=True)
class Choice:
    """What a reader has of a completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def begins(self, whole: Choice) -> bool:
        """Whether this may be the beginning of a whole completion, or is all of it."""
        if self.finish_reason is not None:
            return self == whole
        same = self.token_ids == whole.token_ids[: len(self.token_ids)]
        return same and whole.text.startswith(self.text)


Part = tuple[int, list[int], str, str | None]
"""A completion's number, its new tokens, their text, and how it ended."""


class Ended(Exception):
    """An answer ended in an error. Carries its kind and what it says."""


async def grpc_parts(front: Server, ask: Ask, is_stream: bool) -> AsyncGenerator[list[Part]]:
    """An answer by `GenerateStream` or `Generate`.

    Raises:
        Ended: it ended in an error.
    """
    params, of_request = SamplingParams(**ask.fields), dict[str, Any](priority=ask.priority)
    if ask.label is not None:
        of_request["request_id"] = ask.label
    async with AsyncOctavoClient(front.grpc, retry=None) as client:
        try:
            if not is_stream:
                whole = await client.generate(ask.prompt, params, **of_request)
                yield [(c.index, c.token_ids, c.text, c.finish_reason) for c in whole.outputs]
                return
            outputs = client.stream(ask.prompt, params, **of_request)
            async for output in outputs:
                yield [(c.index, c.token_ids, c.text, c.finish_reason) for c in output.outputs]
        except OctavoError as error:
            raise Ended(reason_of(type(error)).lower(), str(error)) from None


async def http_parts(front: Server, ask: Ask, is_stream: bool) -> AsyncGenerator[list[Part]]:
    """An answer of `/v1/completions`.

    Raises:
        Ended: it ended in an error.
    """
    body = {"model": "tiny", "prompt": ask.prompt, "stream": is_stream, "return_token_ids": True}
    body |= ask.fields | {"priority": ask.priority.name.lower()}
    is_done, headers = not is_stream, {} if ask.label is None else {"x-request-id": ask.label}
    try:
        async with (
            httpx.AsyncClient(base_url=front.http, timeout=HANG_S, verify=False) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                is_done |= data == "[DONE]"
                if not data or data == "[DONE]":
                    continue
                content = json.loads(data)
                if "error" in content:
                    raise Ended(content["error"]["code"], content["error"]["message"])
                yield [
                    (c["index"], c.get("token_ids") or [], c["text"], c["finish_reason"])
                    for c in content["choices"]
                ]
    except httpx.TransportError as error:
        raise Ended("engine_dead", repr(error)) from None
    if not is_done:
        raise Ended("cut_off", "no [DONE]")


WAYS = {
    (protocol.__name__.removesuffix("_parts"), is_stream): protocol
    for protocol in (grpc_parts, http_parts)
    for is_stream in (True, False)
}


def take(choices: list[Choice], parts: list[Part]) -> None:
    """Adds what is new of each completion."""
    for index, token_ids, text, finish_reason in parts:
        choices += [Choice() for _ in range(index + 1 - len(choices))]
        choice = choices[index]
        choice.token_ids += token_ids
        choice.text += text
        choice.finish_reason = finish_reason or choice.finish_reason


def difference(choices: list[Choice], wanted: list[Choice]) -> str:
    """Where two answers part."""
    for index, (got, whole) in enumerate(zip(choices, wanted, strict=False)):
        if got != whole:
            pairs = list(zip(got.token_ids, whole.token_ids, strict=False))
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            sizes = f"{len(got.token_ids)} of {len(whole.token_ids)} tokens"
            ends = f"ended as {got.finish_reason}, not {whole.finish_reason}"
            texts = f"text {got.text[-40:]!r}, not {whole.text[-40:]!r}"
            return f"completion {index}: {sizes}, equal for {same}, {ends}; {texts}"
    return f"{len(choices)} of {len(wanted)} completions"
