"""References that lead back to themselves with nothing in between are found, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.structured.references import endless_reference
from octavo.engine.text.assistant.tool_request import read_tool_use


def property_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


ENDLESS = {
    "itself": {"$ref": "#"},
    "a property": property_of({"$ref": "#/properties/a"}),
    "two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "all of itself": {"allOf": [{"type": "object"}, {"$ref": "#"}]},
    "any of itself": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    "deep within": property_of({"oneOf": [{"allOf": [{"$ref": "#/properties/a"}]}]}),
    "an item of a list": {"anyOf": [{"$ref": "#/anyOf/0"}]},
    "escaped": property_of({"$ref": "#/$defs/a~1b%20c"})
    | {"$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
    "by its anchor": property_of({"$anchor": "here", "$ref": "#here"}),
    "by its id": {"$id": "http://x/y", "$ref": "http://x/y"},
}
GOOD = {
    "a tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
    },
    "a list": property_of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "used twice": {
        "$defs": {"a": {"type": "integer"}},
        **property_of({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}),
    },
    "elsewhere": property_of({"$ref": "http://elsewhere/#"}),
    "nowhere": property_of({"$ref": "#/$defs/none/0"}),
    "a property of that name": property_of({}) | {"properties": {"$ref": {"enum": ["#"]}}},
    "a value": {"enum": [{"$ref": "#"}]},
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_reference_to_itself_is_found_and_refused(case):
    assert endless_reference(ENDLESS[case]) is not None
    with pytest.raises(InvalidRequestError, match="straight back to themselves") as told:
        StructuredOutputsParams(json=ENDLESS[case])
    assert told.value.field == "structured_outputs.json"


@pytest.mark.parametrize("case", GOOD)
def test_other_references_are_taken(case):
    assert endless_reference(GOOD[case]) is None


def test_a_tools_schema_is_named():
    function = {"name": "go", "parameters": ENDLESS["a property"]}
    with pytest.raises(InvalidRequestError) as told:
        read_tool_use([{"type": "function", "function": function}])
    assert told.value.field == "tools[0].function.parameters"


@given(st.lists(st.integers(0, 19), min_size=20, max_size=20), st.integers(0, 19))
def test_chains_are_followed_to_their_end(targets, kept):
    """Definition k refers to another; one of them is an integer, where a chain may end."""
    definitions: dict[str, Any] = {
        f"d{k}": {"$ref": f"#/$defs/d{to}"} for k, to in enumerate(targets)
    }
    definitions[f"d{kept}"] = {"type": "integer"}

    def ends(k: int) -> bool:
        seen = set()
        while k != kept and k not in seen:
            seen.add(k)
            k = targets[k]
        return k == kept

    found = endless_reference({"$defs": definitions})
    assert (found is None) == all(ends(k) for k in range(20))


def test_a_chain_of_thousands_is_followed():
    definitions = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(5_000)}
    assert endless_reference({"$defs": definitions | {"d5000": {"type": "null"}}}) is None
    assert endless_reference({"$defs": definitions | {"d5000": {"$ref": "#/$defs/d0"}}}) is not None
