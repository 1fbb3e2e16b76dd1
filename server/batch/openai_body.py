"""Bodies of OpenAI's requests, as the lines of a batch hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import POOLED, Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.turn_plan import model_formats
from octavo.server.http.answers import CompletionAnswer
from octavo.server.http.chat_turns import chat_answer, prepared, thought_budget, tool_use
from octavo.server.http.embeddings import embeddings_answer, read_texts
from octavo.server.http.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    refusal,
)
from octavo.server.http.sampling import (
    Ask,
    chat_ask,
    chat_names,
    check_model,
    check_template,
    completion_ask,
    options_of,
    prompts_of,
)

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body as the engine takes it.

    Attributes:
        params: how tokens are chosen.
        options: more for `InputProcessor.process`.
        prompts: what to answer.
        whole: makes OpenAI's object of one output a prompt.
    """

    params: SamplingParams
    options: dict[str, Any]
    prompts: list[Prompt]
    whole: Callable[[list[RequestOutput]], dict[str, Any]]


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
            ask, use = chat_ask(chat, {}, engine.sampling_defaults), tool_use(chat)
            plan = model_formats(engine.config, engine.tokenizer).plan(use, thought_budget(chat))
            tokenizer = engine.tokenizer
            text = tokenizer.apply_chat_template(chat.messages, **chat_names(chat, use))
            prompt = tokenizer.encode(text, add_special_tokens=bool(chat.add_special_tokens))
            turn = prepared(ask, plan, request_id=name, engine=engine, prompt=prompt, text=text)
            return _generated(turn.ask, [prompt], chat_answer(chat, turn))
        if url == "/v1/embeddings":
            return _embedded(EmbeddingRequest.model_validate(body), engine)
        completion = CompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise refusal(first["type"], first["loc"], first["input"], first["msg"]) from None
    check_model(completion.model, engine)
    prompts = prompts_of(completion.prompt)
    ask = completion_ask(completion, {}, engine.sampling_defaults)
    answer = CompletionAnswer(name, engine.model_name, ask.params.n, engine.tokenizer, ask.tells)
    return _generated(ask, prompts, answer)


def _generated(ask: Ask, prompts: list[Prompt], answer: CompletionAnswer) -> Body:
    def whole(outputs: list[RequestOutput]) -> dict[str, Any]:
        for output in outputs:
            answer.check(output)
        return answer.whole(list(enumerate(outputs)))

    return Body(params=ask.params, options=ask.options, prompts=prompts, whole=whole)


def _embedded(body: EmbeddingRequest, engine: AnyEngine) -> Body:
    check_model(body.model, engine)
    prompts, params = read_texts(body, engine.inputs.pooler_or_refuse())
    is_base64, model = body.encoding_format == "base64", engine.model_name
    return Body(
        params=POOLED,
        options={**options_of(body, {}), "pooling": params},
        prompts=prompts,
        whole=lambda outputs: embeddings_answer(outputs, model, is_base64=is_base64),
    )
