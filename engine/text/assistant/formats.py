"""The formats of calls that are known."""

from __future__ import annotations

import re
from collections.abc import Callable

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.json_calls import JsonCalls
from octavo.engine.text.assistant.tool_format import ToolFormat

AUTO = "auto"
FIELD = "tool_call_parser"


def _has(*signs: str, unless: tuple[str, ...] = ()) -> Callable[[str, str], bool]:
    """Tells templates that contain all of some texts and none of others."""
    return lambda template, _: (
        all(sign in template for sign in signs) and not any(sign in template for sign in unless)
    )


FORMATS: tuple[ToolFormat, ...] = (
    JsonCalls(
        name="hermes",
        opening="<tool_call>",
        closing="</tool_call>",
        space="\n",
        fits=_has("<tool_call>", unless=("<function=", "<arg_key>")),
    ),
    JsonCalls(
        name="llama3_json",
        opening='{"name": ',
        other_openings=("<|python_tag|>",),
        arguments_key="parameters",
        closing=";",
        separator=" ",
        needs_known_name=True,
        fits=_has('"parameters": ', "<|eot_id|>"),
    ),
    # For templates that show tools to a model, but no way of calling them that is known here: a
    # bare object, as OpenAI's API has it, is what models write that were told no more.
    JsonCalls(
        name="json",
        opening='{"name": ',
        needs_known_name=True,
        fits=lambda template, _: knows_tools(template),
    ),
)
"""In the order in which they are tried on a template."""


def format_named(name: str) -> ToolFormat:
    """The format of a name.

    Raises:
        InvalidRequestError: there is none.
    """
    for each in FORMATS:
        if each.name == name:
            return each
    raise InvalidRequestError(FIELD, name, f"{AUTO} or one of {', '.join(format_names())}")


def format_names() -> list[str]:
    """The names of all formats."""
    return sorted(each.name for each in FORMATS)


def format_for(template: str, model_type: str) -> ToolFormat | None:
    """The format that a model was trained on, by its template and family.

    Args:
        template: Jinja source of the chat template.
        model_type: of the model's config; "" if it is not known.

    Returns:
        the format; None if the template shows no tools to the model.
    """
    if not knows_tools(template):
        return None
    return next((each for each in FORMATS if each.matches(template, model_type)), None)


def knows_tools(template: str) -> bool:
    """Whether a chat template makes use of tools."""
    return _TOOLS.search(template) is not None


_TOOLS = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)
