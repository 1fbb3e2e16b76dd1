"""The grammar of an assistant's whole turn: a thought, and then calls of tools or an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass

MAX_CALLS_CHARS = 1_048_576
"""Of a grammar of calls: every tool's schema is in it, for some formats more than once."""
CALLS, CONTENT = "calls", "content"
"""What a turn's `root` calls the grammars beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGrammar:
    """What stands before and beside the text that a request constrains. Made by an engine itself.

    Attributes:
        root: Lark grammar of the turn, in which `@calls` and `@content` are these: grammars of
            their own, whose rules may have any names.
        calls: Lark grammar of calls, or of words and calls; None for a turn without any.
        schemas: (field, JSON schema) of each tool, for an error that names the one at fault.
        is_trusted: whether this process made it; else its rules are followed before it is compiled,
            as those of a user's grammar are.
    """

    root: str
    calls: str | None = None
    schemas: tuple[tuple[str, str], ...] = ()
    is_trusted: bool = True


def turn_source(turn: TurnGrammar, content: str | None) -> str:
    """The turn's grammar in the library's own form.

    Args:
        content: that of the text, in the library's own form; None if the request has none.
    """
    grammars: list[dict[str, object]] = [{"lark_grammar": turn.root}]
    if turn.calls is not None:
        grammars.append({"name": CALLS, "lark_grammar": turn.calls})
    if content is not None:
        grammars.append({**_only_grammar(content), "name": CONTENT})
    return json.dumps({"grammars": grammars})


def _only_grammar(source: str) -> dict[str, object]:
    """The one grammar that a source of the library's holds; Lark may stand there as it is."""
    try:
        read = json.loads(source)
    except ValueError:
        return {"lark_grammar": source}
    [grammar] = read["grammars"]
    return {key: value for key, value in grammar.items() if value is not None}
