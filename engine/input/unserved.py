"""Keyword arguments of vLLM's methods that ask for what is not served here.

Code written for vLLM hands them on with the value that asks for nothing. That is taken; any other
value is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from octavo.engine.errors import InvalidRequestError


class Unserved(TypedDict, total=False):
    """Names and types of the arguments, for type checkers: each takes None at least."""

    chat_template_content_format: str | None
    data_parallel_rank: int | None
    documents: Any
    guided_options_request: Any
    lora_request: Any
    mm_processor_kwargs: Any
    multi_modal_data: Any
    prompt_adapter_request: Any
    prompt_embeds: Any
    prompt_text: str | None
    reasoning_ended: bool | None
    tokenization_kwargs: Any
    trace_headers: Any


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "reasoning_ended": (False,),
}
"""Values besides None and what is empty that ask for nothing."""


def refuse_unserved(method: str, given: Mapping[str, Any]) -> None:
    """Takes arguments that ask for nothing.

    Args:
        method: that they were handed to, for the error.
        given: by name.

    Raises:
        TypeError: a name that no version of vLLM's method has.
        InvalidRequestError: an argument that asks for something.
    """
    for name, value in given.items():
        if name not in Unserved.__annotations__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        is_empty = isinstance(value, list | tuple | dict) and not value
        if value is None or is_empty or value in _NEUTRAL.get(name, ()):
            continue
        raise InvalidRequestError(name, value, "None: it is not served")
