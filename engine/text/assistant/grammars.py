"""Grammars of turns with calls, in Lark's syntax as llguidance extends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice
from octavo.engine.text.assistant.tool_schemas import arguments_schema

AS_TEMPLATES_WRITE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""White space of JSON as chat templates write it (`tojson`): what models saw most. Without a choice
a model cannot lose itself in white space, and more tokens are forced, which cost no step."""


def words(text: str, specials: Mapping[str, int]) -> str:
    """A text to be written as it is; special tokens in it as tokens."""
    found = [special for special in specials if special and special in text]
    if not found:
        return json.dumps(text, ensure_ascii=False) if text else ""
    pattern = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text)
    quoted = [json.dumps(part, ensure_ascii=False) for part in parts[::2]]
    tokens = [f"<[{specials[part]}]>" for part in parts[1::2]]
    mixed = [part for pair in zip(quoted, [*tokens, ""], strict=True) for part in pair]
    return " ".join(part for part in mixed if part not in ("", '""'))


def json_of(schema: Any) -> str:
    """A value that matches a JSON schema."""
    if isinstance(schema, Mapping):
        given = schema.get("x-guidance")
        options = given if isinstance(given, Mapping) else {}
        schema = {**schema, "x-guidance": {**options, **AS_TEMPLATES_WRITE}}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def arguments_of(tool: FunctionTool) -> str:
    """A call's arguments as JSON."""
    return json_of(arguments_schema(tool))


def turns(
    opening: str,
    body: str,
    rules: Iterable[str],
    choice: ToolChoice,
    specials: Mapping[str, int],
    *,
    between: str | None,
) -> str:
    """The grammar of turns.

    Args:
        opening: text with which a call, or a list of calls, begins.
        body: what follows it, as Lark's rules have it.
        rules: that the body names.
        choice: whether there may be words, and whether there must be calls.
        specials: ids of special tokens by their text.
        between: text between two calls that have an opening each; None if the body has all calls.
    """
    opened = words(opening, specials)
    first = next((token for token in specials if token and opening.startswith(token)), None)
    may_repeat = choice.is_parallel and between is not None
    if choice.mode == "required":
        more = f" ({words(between or '', specials)} {opened} body)*" if may_repeat else ""
        lines = [f"start: {opened} body{more}"]
    elif first is not None:
        # No text matches a special token, so that words end where one comes.
        again = f" (TEXT? {opened} body)* TEXT?" if choice.is_parallel else ""
        lines = [f"start: TEXT? | TEXT? {opened} body{again}", "TEXT: /(?s:.+)/"]
    else:
        start = "start: (opened body)* TEXT" if choice.is_parallel else "start: TEXT | opened body"
        lines = [start, "TEXT: /(?s:.*)/", f"opened[lazy]: TEXT {opened}"]
    return "\n".join([*lines, f"body: {body}", *rules]) + "\n"


def one_of(rules: Sequence[str]) -> str:
    """Any one of some rules."""
    return " | ".join(rules)
