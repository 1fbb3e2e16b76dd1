"""Pooled requests of one body: a few of its texts are in the engine together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import POOLED, Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.params import PoolingParams
from octavo.server.front import Front

TEXTS_AT_ONCE = 32
"""Of one body that are in the engine together: others' requests find their places."""


async def pool_all(
    front: Front,
    texts: Sequence[Prompt],
    params: PoolingParams,
    request_id: str | None,
    options: Mapping[str, Any],
    names: Sequence[str],
) -> list[RequestOutput]:
    """The outputs of pooled requests, a few of which are in the engine together.

    Args:
        options: keyword arguments of `Front.generate`.
        names: for each text the field that holds it, for errors.

    Raises: as `Front.generate`; the first error ends all of them.
    """
    outputs: dict[int, RequestOutput] = {}
    left = enumerate(zip(texts, names, strict=True))
    turn = asyncio.Lock()

    async def pool(text: Prompt, name: str) -> RequestOutput:
        stream = front.generate(text, POOLED, request_id, pooling=params, **options)
        try:
            async with contextlib.aclosing(stream) as news:
                return await anext(news)
        except InvalidRequestError as error:
            if error.field not in ("prompt", "prompt_token_ids"):
                raise
            raise InvalidRequestError(name, error.value, error.allowed) from None

    async def pool_what_is_left() -> None:
        for index, (text, name) in left:
            async with (
                turn
            ):  # many texts end in one step: others' tokens come between the next ones
                await asyncio.sleep(0)
            outputs[index] = await pool(text, name)

    tasks = [
        asyncio.ensure_future(pool_what_is_left()) for _ in range(min(TEXTS_AT_ONCE, len(texts)))
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outputs[index] for index in range(len(texts))]


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """How many tokens were computed."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
