"""Rules of a Lark grammar that no text matches, such as `a: a` and `A: /[^\\s\\S]/`.

The library that walks grammars refuses a grammar that begins with such a rule. Behind something
that may be empty it computes a mask for ever, which holds its thread and with it everybody's masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.structured.references import endless_reference

MAX_READ = 2_000_000
"""Tokens of rules that are read, over and over, in a second or so. A grammar of 64 kB has some
20,000; one of the calls of many tools, a megabyte, some 300,000."""
MAX_TRIED_CHARS = 2_000_000
"""Of terminals that are tried, each with all that it may be made of."""
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
_TERMINAL = re.compile(r"_?[A-Z]\w*")


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


@dataclass(slots=True)
class _Rule:
    name: str
    tokens: list[_Token]


def endless_part(grammar: str, is_empty: Callable[[str], bool]) -> str | None:
    """What of a grammar no text matches, as a phrase; None if there is nothing.

    What is not understood counts as matched by some text: the library has the last word on it.

    Args:
        grammar: in Lark's syntax with the library's own additions.
        is_empty: whether no text matches a grammar whose only rule is one terminal.
    """
    try:
        return _endless_part(grammar, is_empty)
    except RecursionError:
        return "its brackets are nested too deep"


def _endless_part(grammar: str, is_empty: Callable[[str], bool]) -> str | None:
    for kind, text in _inline_grammars(grammar):
        try:
            if kind == "lark" and (part := _endless_part(text, is_empty)) is not None:
                return part
            if kind == "json" and (reference := endless_reference(json.loads(text))) is not None:
                return f"the reference {reference} leads straight back to itself"
        except ValueError:
            continue
    lines = list(_lines(grammar))
    rules = list(_rules(lines))
    terminals = _terminals(grammar, lines, rules)
    if sum(map(len, terminals.values())) > MAX_TRIED_CHARS:
        return "its terminals are too many to be tried"
    for name, text in terminals.items():
        if is_empty(text):
            return f"no text matches {name}"
    return _unmatched_rule(rules)


def _unmatched_rule(rules: list[_Rule]) -> str | None:
    """A rule that no text matches, if every terminal is matched by one."""
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


def _terminals(grammar: str, lines: list[list[_Token]], rules: list[_Rule]) -> dict[str, str]:
    """What may be empty by itself: each terminal, and each expression that stands in a rule, with
    the grammar that is nothing else."""
    defined = {
        line[0].text: grammar[line[0].start : line[-1].end]
        for line in lines
        if _TERMINAL.fullmatch(line[0].text) is not None
    }
    everything = "".join(f"\n{text}" for text in defined.values())
    found = {name: f"start: {name}{everything}" for name in defined}
    for rule in rules:
        for token in rule.tokens:
            if token.kind == "literal" and token.text.startswith("/"):
                found.setdefault(token.text, f"start: {token.text}")
    return found


def _inline_grammars(grammar: str) -> Iterator[tuple[str, str]]:
    """Grammars that stand within one, as in `%json {"type": "string"}`: (kind, text), "lark"
    without its braces."""
    head, depth, first = "", 0, 0
    last = _Token("", "", 0, 0)
    for token in _tokens(grammar):
        if token.kind == "newline":
            continue
        if depth:
            depth += token.text.count("{") - token.text.count("}") if token.kind != "literal" else 0
            if depth <= 0:
                inner = grammar[first : token.end]
                yield head, inner[1:-1] if head == "lark" else inner
                depth = 0
        elif token.text.startswith("{") and last.kind == "name" and head:
            first, depth = token.start, token.text.count("{") - token.text.count("}")
            if not depth:
                yield head, token.text
        else:
            head = token.text if last.text == "%" and token.kind == "name" else ""
        last = token


def _rules(lines: list[list[_Token]]) -> Iterator[_Rule]:
    """The rules, each with the tokens behind its colon."""
    for line in lines:
        colon = next((place for place, token in enumerate(line) if token.text == ":"), None)
        name = _RULE.fullmatch(line[0].text) if line[0].kind == "name" else None
        if name is not None and colon is not None:
            yield _Rule(name.group(1), line[colon + 1 :])


def _lines(grammar: str) -> Iterator[list[_Token]]:
    """Tokens by definition. A line that begins with `|` goes on with the one before it, and line
    breaks within brackets end none."""
    line: list[_Token] = []
    depth, is_over = 0, False
    for token in _tokens(grammar):
        if token.kind == "newline":
            is_over |= depth <= 0
            continue
        if is_over and line and token.text != "|":
            yield line
            line, depth = [], 0
        is_over = False
        depth += (token.text in "([{") - (token.text in ")]}") if len(token.text) == 1 else 0
        line.append(token)
    if line:
        yield line


def _tokens(grammar: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(grammar):
        kind = str(match.lastgroup)
        if kind != "space":
            yield _Token(kind, match.group(), match.start(), match.end())


class _Reader:
    """Says whether an expression is matched by a text, if the rules that are known to be are."""

    def __init__(self, tokens: list[_Token], known: set[str], matched: set[str]) -> None:
        self._tokens = tokens
        self._known = known
        self._matched = matched
        self._at = 0

    def alternatives(self) -> bool:
        """Up to a closing bracket or the end: whether any alternative is matched."""
        found, is_matched = False, True
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at][:2]
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
            kind, text = self._tokens[self._at][:2]
            if text in ("?", "*"):
                is_matched = True
            elif kind == "repeat" or (kind == "literal" and text.startswith("~")):
                least = re.search(r"\d*", text.lstrip("{~ \t"))
                is_matched |= least is None or int(least.group() or 0) == 0
            elif text != "+":
                break
            self._at += 1
        return is_matched
