"""What a chat's body says of tools and thoughts, and the answer that tells of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from octavo.engine.text.assistant.tool_request import ToolUse, read_tool_use
from octavo.engine.text.assistant.turn_plan import TurnPlan
from octavo.server.http.answers import ChatAnswer
from octavo.server.http.protocol import ChatRequest
from octavo.server.http.sampling import Ask
from octavo.server.http.turn_answer import TurnAnswer

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine
    from octavo.engine.async_engine import AsyncEngine


def tool_use(body: ChatRequest) -> ToolUse | None:
    """What a chat says of tools; None if it has none.

    Raises:
        InvalidRequestError: see `read_tool_use`.
    """
    return read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


def chat_answer(
    body: ChatRequest,
    ask: Ask,
    request_id: str,
    engine: AsyncEngine | AnyEngine,
    plan: TurnPlan | None,
    prompt: str,
) -> tuple[Ask, ChatAnswer]:
    """The body as the engine takes it, and what makes its answer.

    Args:
        ask: the body's, as far as it has nothing to do with the model's formats.
        request_id: of the answer.
        plan: how turns are read; None if all that they say is content.
        prompt: as the template wrote it; it may end within a thought.

    Raises:
        InvalidRequestError: calls would have to be constrained, and cannot be.
    """
    model, tokenizer = engine.model_name, engine.tokenizer
    if plan is None:
        return ask, ChatAnswer(request_id, model, ask.params.n, tokenizer, ask.tells)
    plan = plan.opened_by(prompt)
    params = plan.constrained(ask.params, tokenizer)
    answer = TurnAnswer(
        request_id,
        model,
        params,
        tokenizer,
        ask.tells,
        plan,
        tells_reasoning=body.include_reasoning is not False,
    )
    return dataclasses.replace(ask, params=params), answer
