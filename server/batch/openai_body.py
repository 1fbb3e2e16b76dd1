"""Bodies of OpenAI's requests, as the lines of a batch hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.text.assistant.turn_plan import model_formats
from octavo.server.http.answers import CompletionAnswer
from octavo.server.http.chat_turns import chat_answer, prepared, tool_use
from octavo.server.http.protocol import ChatRequest, CompletionRequest, refusal
from octavo.server.http.sampling import (
    Ask,
    chat_ask,
    chat_names,
    check_model,
    check_template,
    completion_ask,
    prompts_of,
)

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body as the engine takes it.

    Attributes:
        ask: parameters and options.
        prompts: what to answer.
        answer: makes OpenAI's object of the outputs.
    """

    ask: Ask
    prompts: list[Prompt]
    answer: CompletionAnswer

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """OpenAI's object of one output a prompt."""
        for output in outputs:
            self.answer.check(output)
        return self.answer.whole(list(enumerate(outputs)))


def read_body(url: str, body: dict[str, Any], name: str, engine: AnyEngine) -> Body:
    """Checks a body.

    Args:
        name: id of the answer.

    Raises:
        InvalidRequestError: it can never be served; names the field.
    """
    if body.get("stream"):
        raise InvalidRequestError("stream", True, "false or not given: results are whole")
    answer: CompletionAnswer
    prompts: list[Prompt]
    try:
        if url == "/v1/chat/completions":
            chat = ChatRequest.model_validate(body)
            check_model(chat.model, engine)
            check_template(chat, is_trusted=False)
            ask, use = chat_ask(chat, {}), tool_use(chat)
            plan = model_formats(engine.config, engine.tokenizer).plan(use)
            tokenizer = engine.tokenizer
            text = tokenizer.apply_chat_template(chat.messages, **chat_names(chat, use))
            prompt = tokenizer.encode(text, add_special_tokens=bool(chat.add_special_tokens))
            turn = prepared(ask, plan, request_id=name, engine=engine, prompt=prompt, text=text)
            return Body(ask=turn.ask, prompts=[prompt], answer=chat_answer(chat, turn))
        completion = CompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise refusal(first["type"], first["loc"], first["input"], first["msg"]) from None
    check_model(completion.model, engine)
    prompts = prompts_of(completion.prompt)
    ask = completion_ask(completion, {})
    answer = CompletionAnswer(name, engine.model_name, ask.params.n, engine.tokenizer, ask.tells)
    return Body(ask=ask, prompts=prompts, answer=answer)
