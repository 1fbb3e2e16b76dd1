"""The grammar of a body: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.server.http.protocol import Generation, ResponseFormat

_GUIDED = ("json", "regex", "choice", "grammar")


def grammar_of(body: Generation) -> StructuredOutputsParams | None:
    """What the text must keep to; None for any text.

    Raises:
        InvalidRequestError: more than one grammar, or one that is malformed; names the field as the
            client wrote it.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and body.response_format.type != "text":
        asked.append(("response_format", _of_format(body.response_format)))
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        asked.append(("", given))
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked.append((f"guided_{kind}", {kind: value}))
    if len(asked) > 1:
        names = [name or "structured_outputs" for name, _ in asked]
        raise InvalidRequestError(names[1], "a grammar", f"not given together with {names[0]}")
    pattern = body.guided_whitespace_pattern
    if not asked:
        if pattern is not None:
            allowed = "given together with guided_json"
            raise InvalidRequestError("guided_whitespace_pattern", pattern, allowed)
        return None
    name, values = asked[0]
    if pattern is not None:
        values = {**values, "whitespace_pattern": pattern}
    return StructuredOutputsParams(**values, asked_as=name)


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            allowed = "given only with type = 'json_schema'"
            raise InvalidRequestError("response_format.json_schema", "a schema", allowed)
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequestError("response_format.json_schema", None, "an object with a schema")
    return {
        "json": wanted.json_schema.schema_,
        "disable_additional_properties": bool(wanted.json_schema.strict),
    }
