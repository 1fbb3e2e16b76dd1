"""Bodies of Anthropic's Messages, and Octavo's own fields beside them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from octavo.server.http.protocol import Asking, Messages, Placing, Texts

_BLOCKS = {"type": "array", "items": {"type": "object"}}
System = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _BLOCKS, {"type": "null"}]})]
Tools = Annotated[Any, WithJsonSchema({"anyOf": [_BLOCKS, {"type": "null"}]})]
"""Checked by hand, as all that has a `type` of its own: a union's errors help nobody."""
Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]


class CountTokensRequest(Asking):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    messages: Messages
    system: System = None
    tools: Tools = None
    tool_choice: Object = None
    thinking: Object = None
    output_config: Object = None
    cache_control: Object = Field(
        None, description="Accepted, not used: every prompt is looked up in the prefix cache."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names for the model's chat template."
    )


class MessagesRequest(CountTokensRequest, Placing):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = Field(None, description="Up to 16 strings that end the text.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    metadata: dict[str, Any] | None = Field(None, description="Accepted, not used.")
    # Octavo's own.
    seed: int | None = None
