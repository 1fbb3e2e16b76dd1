"""From a chat's body to what the engine takes, and the answer that tells of calls and thoughts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.input.input_processor import Prompt
from octavo.engine.text.assistant.tool_request import ToolUse, read_tool_use
from octavo.engine.text.assistant.turn_plan import TurnPlan, check_thought_budget, model_formats
from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.http.answers import ChatAnswer
from octavo.server.http.protocol import ChatRequest
from octavo.server.http.sampling import (
    Ask,
    chat_ask,
    chat_names,
    check_model,
    check_template,
    request_id_of,
)
from octavo.server.http.turn_answer import TurnAnswer

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine
    from octavo.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat as the engine takes it, whichever API asked for it.

    Attributes:
        request_id: the client's, or a new one.
        engine: that serves it.
        prompt: for the engine.
        ask: how to generate, with what the model's formats need.
        plan: how turns are read; None if all that they say is content.
    """

    request_id: str
    engine: AsyncEngine | AnyEngine
    prompt: Prompt
    ask: Ask
    plan: TurnPlan | None


def tool_use(body: ChatRequest) -> ToolUse | None:
    """What a chat says of tools; None if it has none.

    Raises:
        InvalidRequestError: see `read_tool_use`.
    """
    return read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


def thought_budget(body: ChatRequest) -> int | None:
    """Most tokens of a chat's thought; None for no limit."""
    return check_thought_budget(body.thinking_token_budget)


async def chat_text(
    front: Front, body: ChatRequest, *, trust_request_chat_template: bool = False
) -> tuple[str, TurnPlan | None]:
    """The prompt as the template writes it, and how the turn after it is read.

    Raises:
        InvalidRequestError: a conversation, tools or names that cannot be served.
    """
    check_template(body, is_trusted=trust_request_chat_template)
    plan, names = await beside_loop(_plan_and_names, body, front.ready_engine())
    return await front.render_chat(body.messages, names, body.chat_template), plan


def _plan_and_names(
    body: ChatRequest, engine: AsyncEngine
) -> tuple[TurnPlan | None, dict[str, Any]]:
    """How a chat's turns are read, and what it gives its template besides the messages."""
    use = tool_use(body)
    plan = model_formats(engine.config, engine.tokenizer).plan(use, thought_budget(body))
    return plan, chat_names(body, use)


async def prepare_chat(
    front: Front,
    body: ChatRequest,
    headers: Mapping[str, str],
    kind: str,
    *,
    trust_request_chat_template: bool = False,
) -> PreparedChat:
    """Checks a chat, renders it and tokenizes it.

    Args:
        headers: of the request.
        kind: begins the id of a request that has none.

    Raises:
        InvalidRequestError: a value that cannot be served; names the field.
        UnknownModelError: another model's name.
    """
    engine = front.ready_engine()
    check_model(body.model, engine)
    ask = await beside_loop(chat_ask, body, headers, engine.sampling_defaults)
    text, plan = await chat_text(
        front, body, trust_request_chat_template=trust_request_chat_template
    )
    prompt = await engine.tokenize(
        text,
        add_special_tokens=bool(body.add_special_tokens),
        is_cut=body.truncate_prompt_tokens is not None,
    )
    request_id = request_id_of(headers, kind)
    finish = functools.partial(
        prepared, ask, plan, request_id=request_id, engine=engine, prompt=prompt, text=text
    )
    # The grammar of many tools takes a second: other answers must not wait for it.
    has_tools = plan is not None and plan.use is not None
    return await asyncio.to_thread(finish) if has_tools else finish()


def prepared(
    ask: Ask,
    plan: TurnPlan | None,
    *,
    request_id: str,
    engine: AsyncEngine | AnyEngine,
    prompt: Prompt,
    text: str,
) -> PreparedChat:
    """A chat whose prompt is known.

    Args:
        ask: the body's, as far as it has nothing to do with the model's formats.
        plan: how turns are read, whatever the prompt.
        prompt: for the engine.
        text: the prompt as the template wrote it; it may end within a thought.

    Raises:
        InvalidRequestError: calls would have to be constrained, and cannot be.
    """
    if plan is not None:
        plan = plan.opened_by(text)
        ask = dataclasses.replace(ask, params=plan.constrained(ask.params, engine.tokenizer))
    return PreparedChat(request_id=request_id, engine=engine, prompt=prompt, ask=ask, plan=plan)


def chat_answer(body: ChatRequest, chat: PreparedChat) -> ChatAnswer:
    """What makes the answer of a chat."""
    model, tokenizer = chat.engine.model_name, chat.engine.tokenizer
    params, tells = chat.ask.params, chat.ask.tells
    if chat.plan is None:
        return ChatAnswer(chat.request_id, model, params.n, tokenizer, tells)
    return TurnAnswer(
        chat.request_id,
        model,
        params,
        tokenizer,
        tells,
        chat.plan,
        tells_reasoning=body.include_reasoning is not False,
    )
