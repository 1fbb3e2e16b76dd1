"""Bodies of OpenAI's Responses, and Octavo's own fields beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.engine.errors import InvalidRequestError
from octavo.server.http.protocol import Asking, Body, Choice, Placing, ReasoningEffort, Texts

_OBJECTS = {"type": "array", "items": {"type": "object"}}
Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _OBJECTS, {"type": "null"}]})]
Tools = Annotated[Any, WithJsonSchema({"anyOf": [_OBJECTS, {"type": "null"}]})]
"""Checked by hand, as all that has a `type` of its own: a union's errors help nobody."""


def _medium(value: object) -> object:
    if value not in (None, "medium"):
        allowed = '"medium" or not given: it is not served'
        raise InvalidRequestError("text.verbosity", value, allowed)
    return value


class Reasoning(Body):
    """How the model thinks."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted, not used: thoughts are told as they are."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    """What the words must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The words of an answer."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"] | None, BeforeValidator(_medium)] = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(Asking):
    """POST /v1/responses/input_tokens: what the prompt is made of."""

    input: Input = Field(None, description="Text, or items of a conversation.")
    instructions: str | None = Field(None, description="The system's words, before the input.")
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = Field(
        None, description="Goes on from a stored response, where the server stores any."
    )
    truncation: Literal["disabled"] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names for the model's chat template."
    )


class ResponsesRequest(InputTokensRequest, Placing):
    """POST /v1/responses."""

    max_output_tokens: int | None = Field(
        None, ge=1, description="As much as the context allows, if not given."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Texts | None = Field(None, description='"reasoning.encrypted_content" asks nothing.')
    metadata: dict[str, Any] | None = Field(None, description="Comes back in the answer.")
    store: bool | None = Field(
        None, description="Keep the response, where the server stores any: so it is if not given."
    )
    # Accepted and not used: no answer depends on them.
    user: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    # Octavo's own.
    top_k: int | None = None
    seed: int | None = None
