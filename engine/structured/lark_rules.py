"""Rules of a Lark grammar that no text matches, such as `a: a`.

The library that walks grammars refuses a grammar that begins with such a rule. Behind something
that may be empty it computes a mask for ever, which holds its thread and with it everybody's masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.engine.structured.references import endless_reference

MAX_READ = 500_000
"""Tokens of rules that are read, over and over: a grammar of 64 kB has some 20,000."""
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f]+|//[^\n]*|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<literal>"(?:\\.|[^"\\\n])*"i?|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|@[\w.]+
      |~?\s*\d+(?:\.\.\d+)?)
  | (?P<name>[!?]*_?[A-Za-z]\w*)
  | (?P<repeat>\{\s*\d*\s*,?\s*\d*\s*\})
  | (?P<other>%|->|[|()\[\]?*+:.{},=~]|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_RULE = re.compile(r"[!?]*(_?[a-z]\w*)")


@dataclass(slots=True)
class _Rule:
    name: str
    tokens: list[tuple[str, str]]


def endless_part(grammar: str) -> str | None:
    """What of a grammar no text matches, as a phrase; None if there is nothing.

    What is not understood counts as matched by some text: the library has the last word on it.

    Args:
        grammar: in Lark's syntax with the library's own additions.
    """
    try:
        return _endless_part(grammar)
    except RecursionError:
        return "its brackets are nested too deep"


def _endless_part(grammar: str) -> str | None:
    for kind, text in _inline_grammars(grammar):
        try:
            if kind == "lark" and (part := _endless_part(text)) is not None:
                return part
            if kind == "json" and (reference := endless_reference(json.loads(text))) is not None:
                return f"the reference {reference} leads straight back to itself"
        except ValueError:
            continue
    rules = list(_rules(grammar))
    known = {rule.name for rule in rules}
    matched: set[str] = set()
    left, num_read = rules, 0
    while left:
        before, rest = len(left), []
        for rule in left:
            num_read += len(rule.tokens) + 1
            if _Reader(rule.tokens, known, matched).alternatives():
                matched.add(rule.name)
            else:
                rest.append(rule)
        if num_read > MAX_READ:
            return "its rules are too many to be followed"
        # A chain of rules is mostly written in one of two directions.
        left = rest[::-1]
        if len(left) == before:
            break
    names = [rule.name for rule in rules if rule.name not in matched]
    return f"no text matches rule {names[0]}" if names else None


def _inline_grammars(grammar: str) -> Iterator[tuple[str, str]]:
    """Grammars that stand within one, as in `%json {"type": "string"}`: (kind, text within its
    braces), "lark" without them."""
    head, depth, first = "", 0, 0
    last = ("", "")
    for match in _TOKEN.finditer(grammar):
        kind, text = str(match.lastgroup), match.group()
        if kind in ("space", "newline"):
            continue
        if depth:
            depth += text.count("{") - text.count("}") if kind != "literal" else 0
            if depth <= 0:
                inner = grammar[first : match.end()]
                yield head, inner[1:-1] if head == "lark" else inner
                depth = 0
        elif text.startswith("{") and last[0] == "name" and head:
            first, depth = match.start(), text.count("{") - text.count("}")
            if not depth:
                yield head, text
        else:
            head = text if last[1] == "%" and kind == "name" else ""
        last = kind, text


def _rules(grammar: str) -> Iterator[_Rule]:
    """The rules, each with the tokens behind its colon. A line that begins with `|`, or within
    brackets, goes on with the one before it."""
    rule: _Rule | None = None
    for line in _lines(grammar):
        if line[0][1] == "|" and rule is not None:
            rule.tokens += line
            continue
        if rule is not None:
            yield rule
            rule = None
        colon = next((place for place, token in enumerate(line) if token[1] == ":"), None)
        name = _RULE.fullmatch(line[0][1]) if line[0][0] == "name" else None
        if name is not None and colon is not None:
            rule = _Rule(name.group(1), line[colon + 1 :])
    if rule is not None:
        yield rule


def _lines(grammar: str) -> Iterator[list[tuple[str, str]]]:
    """Tokens (kind, text) by line; line breaks within brackets end none."""
    line: list[tuple[str, str]] = []
    depth = 0
    for match in _TOKEN.finditer(grammar):
        kind, text = str(match.lastgroup), match.group()
        if kind == "space":
            continue
        if kind == "newline":
            if line and depth <= 0:
                yield line
                line, depth = [], 0
            continue
        depth += (text in "([{") - (text in ")]}") if len(text) == 1 else 0
        line.append((kind, text))
    if line:
        yield line


class _Reader:
    """Says whether an expression is matched by a text, if the rules that are known to be are."""

    def __init__(self, tokens: list[tuple[str, str]], known: set[str], matched: set[str]) -> None:
        self._tokens = tokens
        self._known = known
        self._matched = matched
        self._at = 0

    def alternatives(self) -> bool:
        """Up to a closing bracket or the end: whether any alternative is matched."""
        found, is_matched = False, True
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "other" and text in (")", "]", "}"):
                break
            self._at += 1
            if text == "|":
                found, is_matched = found or is_matched, True
            elif text == "->":  # an alias is no part of it
                self._at += 1
            else:
                is_matched &= self._item(kind, text)
        return found or is_matched

    def _item(self, kind: str, text: str) -> bool:
        is_matched = True
        if kind == "other" and text in ("(", "[", "{"):
            is_matched = self.alternatives() or text != "("
            self._at += 1
        elif kind == "name" and (rule := _RULE.fullmatch(text)) is not None:
            is_matched = rule.group(1) not in self._known or rule.group(1) in self._matched
        return self._repeats(is_matched)

    def _repeats(self, is_matched: bool) -> bool:
        """After an item: whether it may be left out."""
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if text in ("?", "*"):
                is_matched = True
            elif kind == "repeat" or (kind == "literal" and text.startswith("~")):
                least = re.search(r"\d*", text.lstrip("{~ \t"))
                is_matched |= least is None or int(least.group() or 0) == 0
            elif text != "+":
                break
            self._at += 1
        return is_matched
