"""What a request's text must be: names as users of vLLM know them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.closed import closed
from octavo.engine.structured.references import endless_reference
from octavo.engine.structured.turn_grammar import MAX_CALLS_CHARS, TurnGrammar

FIELD = "structured_outputs"
MAX_SCHEMA_CHARS = 131_072
MAX_SCHEMA_DEPTH = 48
MAX_REGEX_CHARS = 16_384
MAX_GRAMMAR_CHARS = 65_536
MAX_CHOICES = 4_096
MAX_CHOICES_CHARS = 131_072
MAX_WHITESPACE_CHARS = 256

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of which a request gives exactly one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A grammar for a request's text. Checked for size and form on construction; immutable.

    Attributes:
        json: a JSON schema, as text or as the object itself; held as text.
        regex: a regular expression that the whole text matches (Rust's syntax).
        choice: texts of which the answer is one.
        grammar: a context-free grammar in Lark's or GBNF's syntax; it begins at `start` or `root`.
        json_object: true for any JSON object.
        disable_any_whitespace: no white space between the parts of JSON.
        disable_additional_properties: objects of the schema have no properties but those it names,
            where it says nothing of others.
        whitespace_pattern: regular expression of the white space between the parts of JSON; if not
            given, a space, or a line break or two and up to 20 blanks.
        asked_as: the field in which a user of another protocol gave it, for errors.
        turn: what stands beside the text in a turn that may call tools, or think first. Made by the
            engine; with it, none of the first five need be given.

    Raises:
        InvalidRequestError: not exactly one of the first five, or one beyond its limits; names it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    asked_as: str = field(default="", compare=False, repr=False)
    turn: TurnGrammar | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise self._invalid("json", False, "a JSON schema that something can match")
        if len(given) != 1 and (given or self.turn is None):
            names = ", ".join(KINDS)
            shown = given or "none"
            raise InvalidRequestError(self.asked_as or FIELD, shown, f"exactly one of {names}")
        if self.turn is not None and len(self.turn.root) > MAX_GRAMMAR_CHARS:
            allowed = f"at most {MAX_GRAMMAR_CHARS} characters of grammar"
            raise InvalidRequestError("tools", "their turn", allowed)
        if self.turn is not None and len(self.turn.calls or "") > MAX_CALLS_CHARS:
            allowed = f"at most {MAX_CALLS_CHARS} characters of grammar"
            raise InvalidRequestError("tools", "their schemas", allowed)
        put = object.__setattr__
        if self.json is not None:
            put(self, "json", self._schema_text(self.json))
        if self.choice is not None:
            put(self, "choice", self._choices(self.choice))
        self._check_text("regex", MAX_REGEX_CHARS)
        self._check_text("grammar", MAX_GRAMMAR_CHARS)
        self._check_text("whitespace_pattern", MAX_WHITESPACE_CHARS)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, True, False):
                raise self._invalid(name, getattr(self, name), "true or false")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            pattern = self.whitespace_pattern
            allowed = "not given with disable_any_whitespace"
            raise self._invalid("whitespace_pattern", pattern, allowed)

    @classmethod
    def parse(cls, value: object) -> StructuredOutputsParams:
        """From itself or a mapping of its fields.

        Raises:
            InvalidRequestError: neither, an unknown field, or values that cannot be.
        """
        if isinstance(value, cls):
            return value
        names = _OWN_FIELDS
        if not isinstance(value, Mapping):
            raise InvalidRequestError(FIELD, value, f"an object with one of {', '.join(KINDS)}")
        for name in value:
            if name not in names:
                raise InvalidRequestError(FIELD, name, f"fields {', '.join(names)}")
        return cls(**{name: v for name, v in value.items() if v is not None})

    @property
    def kind(self) -> str | None:
        """Which of the five is given; None if the turn alone is."""
        return next((name for name in KINDS if getattr(self, name) not in (None, False)), None)

    def given(self) -> dict[str, Any]:
        """The fields of a user that differ from their defaults, as plain values."""
        fields = [f for f in dataclasses.fields(self) if f.name in _OWN_FIELDS]
        values = {f.name: (getattr(self, f.name), f.default) for f in fields}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, (value, default) in values.items()
            if value != default
        }

    def field_name(self, name: str) -> str:
        """What the user calls one of the fields."""
        return self.asked_as or f"{FIELD}.{name}"

    def shown(self) -> tuple[str, object]:
        """What the user calls the grammar, and the grammar, for errors."""
        if self.kind is None:
            return "tools", "their schemas"
        return self.field_name(self.kind), getattr(self, self.kind)

    def _invalid(self, name: str, value: object, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(self.field_name(name), value, allowed)

    def _check_text(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= most):
            raise self._invalid(name, value, f"a string of 1 to {most} characters")

    def _choices(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self._invalid("choice", value, "a list of strings")
        choices = tuple(value)
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise self._invalid("choice", f"{len(choices)} strings", f"1 to {MAX_CHOICES} strings")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise self._invalid("choice", choice, "strings that are not empty")
        if sum(map(len, choices)) > MAX_CHOICES_CHARS:
            allowed = f"at most {MAX_CHOICES_CHARS} characters in all"
            raise self._invalid("choice", "its strings", allowed)
        return choices

    def _schema_text(self, schema: object) -> str:
        """The schema as JSON text, not too long and not too deep."""
        shown = "the schema"
        too_deep = self._invalid("json", shown, f"values nested at most {MAX_SCHEMA_DEPTH} deep")
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            is_long = len(text) > MAX_SCHEMA_CHARS
            schema = None if is_long else json.loads(text)  # plain values: quick to look at
        except RecursionError:
            raise too_deep from None
        except (TypeError, ValueError) as error:
            raise self._invalid("json", shown, f"a JSON schema ({error})") from None
        if is_long:
            allowed = f"at most {MAX_SCHEMA_CHARS} characters of JSON"
            raise self._invalid("json", shown, allowed)
        if not isinstance(schema, dict | bool):
            raise self._invalid("json", schema, "a JSON schema: an object")
        if _is_deep(schema):
            raise too_deep
        if (reference := endless_reference(schema)) is not None:
            allowed = "a schema without references that lead straight back to themselves"
            raise self._invalid("json", f"one with the reference {reference}", allowed)
        return json.dumps(closed(schema)) if self.disable_additional_properties else text


_OWN_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(StructuredOutputsParams)
    if f.name not in ("asked_as", "turn")
)
"""Those that a user may give."""


def parts_of(params: StructuredOutputsParams) -> list[StructuredOutputsParams]:
    """What a turn's grammar is made of, each part alone and called as the user called it."""
    if params.turn is None:
        return []
    schemas = [
        StructuredOutputsParams(json=schema, asked_as=field)
        for field, schema in params.turn.schemas
    ]
    return schemas if params.kind is None else [*schemas, dataclasses.replace(params, turn=None)]


def _is_deep(schema: object) -> bool:
    """Whether a value as JSON gives it is nested too deep."""
    level: list[Any] = [[schema]]
    for _ in range(MAX_SCHEMA_DEPTH + 2):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if type(item) is dict else item
        level = [item for item in inner if type(item) in (dict, list)]
        if not level:
            return False
    return True
