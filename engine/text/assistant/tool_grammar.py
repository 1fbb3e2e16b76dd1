"""The grammar of a request's tools, within what one request may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from octavo.engine.text.assistant.schema_parts import object_schemas
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat
from octavo.engine.text.assistant.tool_schemas import arguments_schema
from octavo.engine.text.assistant.turn import MAX_NAME_CHARS

FIELD = "tools"
MAX_TOOLS_CHARS = MAX_GRAMMAR_CHARS - 1_024
"""Of a grammar of calls, so that a thought's fits before it."""
_NUM_NAMED = 3


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    specials: Mapping[str, int] = NO_SPECIALS,
    fields: Mapping[str, str] = {},
) -> str | None:
    """The grammar of all turns that a choice allows, as `ToolFormat.grammar` has it.

    Args:
        fields: a tool's name -> what its user calls its parameters, for errors.

    The time that it takes grows with the schemas, about ten milliseconds for twenty tools: many
    tools are better left to a thread.

    Raises:
        InvalidRequestError: the choice leaves no tool; a schema is none, or one that `llguidance`
            does not take; a parameter's name is one that the format cannot write; or the schemas
            make a grammar that is too long. Names the tools.
    """
    allowed = allowed_tools(tools, choice)
    if not allowed:
        wanted = choice.name or choice.mode
        names = ", ".join(tool.name for tool in tools) or "no tools"
        raise InvalidRequestError("tool_choice", wanted, f"a function of the request's: {names}")
    for tool in allowed:
        field = fields.get(tool.name, f"{FIELD}.{tool.name}.parameters")
        _check_schema(tool, tool_format, field)
    grammar = tool_format.grammar(tools, choice, specials)
    if grammar is None or len(grammar) <= MAX_TOOLS_CHARS:
        return grammar
    sizes = {
        tool.name: len(tool_format.grammar([tool], ToolChoice("required"), specials) or "")
        for tool in allowed
    }
    longest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_NAMED]
    shown = ", ".join(f"{name} ({sizes[name]})" for name in longest)
    raise InvalidRequestError(
        FIELD,
        [tool.name for tool in allowed],
        f"functions whose schemas make a grammar of at most {MAX_TOOLS_CHARS} characters; "
        f"they make {len(grammar)}, and these the most: {shown}",
    )


def _check_schema(tool: FunctionTool, tool_format: ToolFormat, field: str) -> None:
    from llguidance import LLMatcher

    if tool.parameters is not None and not isinstance(tool.parameters, Mapping):
        raise InvalidRequestError(field, tool.parameters, "a JSON schema of an object")
    params = StructuredOutputsParams(json=arguments_schema(tool), asked_as=field)
    assert isinstance(params.json, str)
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(params.json))
    if error:
        allowed = f"a JSON schema that can be a grammar ({error.splitlines()[0]})"
        raise InvalidRequestError(field, tool.parameters, allowed)
    schema = arguments_schema(tool)
    for each in object_schemas(schema, schema):
        for key in each.get("properties") or ():
            if len(key) > MAX_NAME_CHARS or not tool_format.can_name(key):
                allowed = f"names that calls in the format {tool_format.name} can have"
                raise InvalidRequestError(f"{field}.properties", key, allowed)
