"""Rules that no text matches are found, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.structured.grammar import is_empty_terminal
from octavo.engine.structured.lark_rules import endless_part as find_endless_part

pytest.importorskip("llguidance")


def endless_part(grammar: str) -> str | None:
    return find_endless_part(grammar, is_empty_terminal)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: a\na: a",
        "start: B a\nB: /\\n*/\na: a",
        'start: "x" b\nb: c "y"\nc: b | "z" b',
        "start: B (a | b)\na: b\nb: a+",
        "start: a{2,3}\na: a",
        "start: a~2\na: a",
        "start: B x\nB: /\\n*/\nx: %lark {\n  start: y\n  y: y\n}",
        'start: B %json {"$ref": "#"}\nB: /\\n*/',
        "?start: _a\n!_a: _a",
        'start[capture]: a\n// a: "x"\na: a',
        'start: a\na: "x" a\n  | a "|"',
        "start: B C\nB: /\\n*/\nC: /[^\\s\\S]/",
        "start: B C\nB: /\\n*/\nC: /a/ & /b/",
        "start: B D\nB: /\\n*/\nC: /[^\\s\\S]/\nD: C\n  | C",
        "start: B /[^\\s\\S]/\nB: /\\n*/",
    ],
)
def test_a_rule_that_no_text_matches_is_found(grammar: str) -> None:
    assert endless_part(grammar) is not None


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "x"',
        'start: a | "x"\na: a "y" | "z"',
        "start: a? B\na: a\nB: /b/\n".replace("a: a", 'a: "(" a ")" | B'),
        "start: (a)*\na: B\nB: /[/]a/",
        "start: list\nlist: item\n  | list item\nitem: /\\d+/ -> number\n  | NAME\nNAME: /[a-z]+/",
        'start: %json {"type": "object", "properties": {"a": {"type": "string"}}}',
        'start: <|tool|> a[stop="x"]\na: /.*/',
        'start: a{0,3} b~0..2\na: "x"\nb: "y"',
        "start: undefined",
        '%ignore /[ \\t]+/\nstart: expr\nexpr: term (("+" | "-") term)*\n'
        'term: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/',
        'start: [a]\na: B\nB: "x"',
    ],
)
def test_rules_that_texts_match_are_left_alone(grammar: str) -> None:
    assert endless_part(grammar) is None


names = st.sampled_from(["start", "a", "b", "c", "d"])
items = st.one_of(names, st.just('"x"'))
alternatives = st.lists(
    st.lists(st.tuples(items, st.sampled_from(["", "", "", "?", "*", "+"])), max_size=3),
    min_size=1,
    max_size=3,
)


@given(st.fixed_dictionaries(dict.fromkeys(("start", "a", "b", "c", "d"), alternatives)))
def test_it_agrees_with_trying(rules: dict[str, list[list[tuple[str, str]]]]) -> None:
    """A rule is matched by a text just if one of few steps is."""

    def has_text(name: str, depth: int) -> bool:
        if name == '"x"':
            return True
        return depth > 0 and any(
            all(sign in ("?", "*") or has_text(item, depth - 1) for item, sign in each)
            for each in rules[name]
        )

    text = "\n".join(
        f"{name}: " + " | ".join(" ".join(item + sign for item, sign in each) for each in listed)
        for name, listed in rules.items()
    )
    expected = all(has_text(name, len(rules)) for name in rules)
    assert (endless_part(text) is None) == expected, text


def test_no_grammar_takes_long_to_read() -> None:
    chain = "\n".join(f"r{n}: r{n + 1}" for n in range(5000)) + '\nr5000: "x"'
    assert endless_part(chain) is None
    shuffled = chain.splitlines()[::2] + chain.splitlines()[1::2]
    assert endless_part("\n".join(shuffled)) in (None, "its rules are too many to be followed")
    assert endless_part("start: " + "%lark { start: " * 4000) == "its brackets are nested too deep"
    terminals = "\n".join(f"T{n}: /a{n}/" for n in range(1000))
    assert endless_part(f"start: T0\n{terminals}") == "its terminals are too many to be tried"
