"""Bodies of requests: OpenAI's fields, and Octavo's beside them.

A field that is not known is refused, so that nobody believes in an option that does nothing. A null
field counts as not given, and so does a field of another server at a value that asks for nothing
(`known_fields.py`).
Ranges are checked where they are known: by `SamplingParams` and the engine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import MAX_LOGIT_BIASES
from octavo.engine.text.assistant.turn_plan import MAX_BUDGET, NO_BUDGET
from octavo.server.http.known_fields import unserved, without_neutral, without_null

_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [*_STRINGS["anyOf"], _TOKENS, {"type": "array", "items": _TOKENS}]}),
]
"""Text or token ids, or a list of either; checked by hand: a union's errors help nobody."""
Strings = Annotated[Any, WithJsonSchema({"anyOf": [*_STRINGS["anyOf"], {"type": "null"}]})]
Integers = Annotated[list[int], FailFast()]
Texts = Annotated[list[str], FailFast()]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
Tools = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})
]
"""Checked by `read_tool_use`, as Python's `LLM.chat` checks them."""
Choice = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
    ),
]
Messages = Annotated[list[dict[str, Any]], FailFast()]
MAX_FIELDS = 1_024
"""Of one object whose fields are known."""


def _few_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            "logit_bias", f"{len(value)} token ids", f"at most {MAX_LOGIT_BIASES}"
        )
    return value


class Body(BaseModel):
    """A JSON object without unknown fields; a number is no string and a string no number.

    A field that is null is one that is not given, whatever its type. What could be wrong in very
    many places, each with an error of its own, is refused by its size first.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: object) -> object:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise InvalidRequestError("body", f"{len(body)} fields", f"at most {MAX_FIELDS}")
        return without_null(body)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[
        bool, Field(description="Every event tells the usage so far; only with include_usage.")
    ] = False


class JsonSchema(Body):
    """A schema and what it is called."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None,
        description="Objects have no properties but those they name. Every schema is kept to.",
    )


class ResponseFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """A grammar that the text keeps to: exactly one of the first five."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = Field(None, description="In Lark's or GBNF's syntax.")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Asking(Body):
    """What is asked of a model. Other servers' fields may stand there as well, at values that ask
    for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: object) -> object:
        return without_neutral(body, cls.model_fields)

    model: str | None = Field(None, description="The served model's name; any, if not given.")


class Placing(Asking):
    """When a request is served, and for whom."""

    # Octavo's own.
    priority: str | int | None = Field(
        None, description="realtime, high, normal or low, or 0 to 3, 0 served first."
    )
    timeout_s: float | None = Field(
        None, description="Seconds after which the answer is worthless."
    )
    tenant: str | None = Field(None, description="Whose share of the server the request takes.")
    cache_salt: str | None = Field(
        None, description="Prompts share cached pages only under the same salt."
    )


class Serving(Placing):
    """What any body of OpenAI's older routes may say of how it is served."""

    user: str | None = Field(None, description="Accepted, not used.")

    # Octavo's own.
    add_special_tokens: bool | None = Field(
        None,
        description="BOS and EOS where the model wants them: true for texts, if not given, and "
        "false for chats, whose template writes them.",
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Most tokens of the prompt that are kept; -1 for as many as the context has "
        "beside max_tokens.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a longer prompt is cut: left, if not given, keeps its end."
    )


class Generation(Serving):
    """What completions and chats have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: Strings = Field(None, description="Up to 16 strings that end the text.")
    seed: int | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = Field(
        None, description="Token id -> -100 to 100."
    )
    response_format: ResponseFormat | None = None

    # Accepted and not used: no answer depends on them.
    metadata: dict[str, Any] | None = Field(None, description="Accepted, not used.")
    store: bool | None = Field(None, description="Accepted, not used: nothing is stored.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted, not used: every prompt is looked up in the prefix cache."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    session_id: str | None = Field(None, description="Accepted, not used.")

    # Octavo's own.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Integers | None = None
    allowed_token_ids: Integers | None = None
    bad_words: Strings = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="Likeliest tokens told beside each of the prompt's."
    )
    return_token_ids: bool | None = Field(
        None, description="Ids of the prompt's and of the generated tokens."
    )


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(
        None, ge=0, description="16, if not given; 0 only with echo or prompt_logprobs."
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(None, description="The prompt, and its logprobs, come first.")
    suffix: str | None = Field(None, description="Refused: no infilling.")
    best_of: int | None = Field(None, description="Only n, or not given.")


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None,
        ge=0,
        description="As much as the context allows, if not given; 0 only with prompt_logprobs.",
    )
    max_tokens: int | None = Field(None, ge=0, description="Old name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names for the model's chat template."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="Handed to the model's chat template, which may heed it.")
    )
    add_generation_prompt: bool | None = Field(
        None, description="True, if not given, unless continue_final_message is."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer goes on with the last message."
    )
    chat_template: str | None = Field(
        None,
        description="In place of the model's own; refused unless the server trusts requests' "
        "templates.",
    )
    tools: Tools = Field(None, description="Functions that the model may call; at most 128.")
    tool_choice: Choice = Field(
        None,
        description='"none", "auto", "required", the function to call, or OpenAI\'s allowed_tools.',
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may make several calls: true, if not given."
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the answer holds the model's thoughts: true, if not given."
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=NO_BUDGET,
        le=MAX_BUDGET,
        description="Most tokens of a thought, which is then closed; -1 for no limit.",
    )


class EmbeddingRequest(Serving):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float, if not given; base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        None, description="Numbers of each vector that are kept, before it is normalized."
    )
    pooling: str | None = Field(
        None, description="last, mean or cls; the model's own, if not given."
    )
    normalize: bool | None = Field(
        None, description="Vectors of length 1; as the model says, if not given."
    )
    prompt_name: str | None = Field(
        None, description="Which of the model's prompts stands before each text."
    )


class PoolingRequest(EmbeddingRequest):
    """POST /pooling."""


class ClassifyRequest(Serving):
    """POST /classify."""

    input: Prompts


class ScoreRequest(Serving):
    """POST /v1/score."""

    text_1: Prompts
    text_2: Prompts
    instruction: str | None = Field(None, description="What a reranker is asked.")


class RerankRequest(Serving):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[Any], FailFast()] = Field(
        description='Texts, or objects {"text"}; up to 1,024.'
    )
    top_n: int | None = Field(None, ge=1, description="So many of the best; all, if not given.")
    return_documents: bool | None = Field(
        None, description="Each result has its document; true, if not given."
    )
    instruction: str | None = Field(None, description="What a reranker is asked.")


class TokenizeRequest(Body):
    """POST /tokenize: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="True for a prompt, if not given, and false for messages."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = Field(None, description="With messages: as a chat's.")


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Integers
    skip_special_tokens: bool = False


def refusal(
    kind: str, place: Sequence[int | str], value: object, message: str
) -> InvalidRequestError:
    """Why a body is not one, from what pydantic says of its first fault.

    Args:
        kind, message: pydantic's.
        place: names from the body to the field.
        value: what stands there.
    """
    path = [str(part) for part in place if not str(part).startswith("function-")] or ["body"]
    if kind == "missing":
        return InvalidRequestError(".".join(path), None, "given: it is required")
    if kind == "extra_forbidden":
        return unserved(".".join(path), value, _field_names())
    if kind == "model_attributes_type":
        message = "a JSON object"
    # Which branch of a union failed says nothing to whoever wrote the field.
    inner = itertools.takewhile(_inner_names().__contains__, path[1:])
    field = ".".join((path[0], *inner))
    return InvalidRequestError(field, value, message.removeprefix("Input should be "))


@functools.cache
def _inner_names() -> frozenset[str]:
    """Names of fields of anything that a body is made of."""
    kinds, found = [Body], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found |= {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(found)


@functools.cache
def _field_names() -> frozenset[str]:
    """Names that a client may have meant who wrote another one."""
    bodies = (
        *(CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest),
        *(EmbeddingRequest, ClassifyRequest, ScoreRequest, RerankRequest),
    )
    parts = (StreamOptions, ResponseFormat, StructuredOutputs, JsonSchema)
    return frozenset(
        field.alias or name
        for body in (*bodies, *parts)
        for name, field in body.model_fields.items()
    )
