"""A request's grammar, compiled for a model's vocabulary by `llguidance`.

A compiled grammar is a matcher in its first state: each sequence walks a copy of it. What compiling
and each later mask may cost is bounded by the library's own fuel, so that no grammar holds its
thread for long.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.lark_rules import endless_part
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.structured.turn_grammar import turn_source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_SIZE = 200_000
"""Symbols of a compiled grammar."""
MAX_LEXER_STATES = 50_000
"""States that one sequence's lexer may come to have, of 1 to 2 kB each."""
COMPILE_FUEL = 1_000_000
"""Work on the expressions of a grammar when it is compiled: about 20 ms."""
MASK_FUEL = 100_000
"""Work on expressions for one mask: about 7 ms."""
MASK_ITEMS = 50_000
"""Items of the parser for one mask: about 3 ms."""
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between the parts of JSON, where a request says nothing: a small model that may write as much of
it as it likes writes nothing else until its tokens are used up. Enough to indent by.
Source: llama.cpp's JSON grammars."""

Mask = NDArray[np.uint32]
"""One bit a token, uint32[ceil(vocabulary / 32)], the first token lowest: whether it may come."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready to be walked.

    Attributes:
        matcher: in its first state; only ever copied.
        first_mask: what may come first.
    """

    matcher: LLMatcher
    first_mask: Mask


def compile_grammar(
    params: StructuredOutputsParams, tokenizer: LLTokenizer, vocab_size: int
) -> CompiledGrammar:
    """Compiles a grammar, in some ten milliseconds at most.

    Args:
        params: the grammar.
        tokenizer: of the model, as the library knows it.
        vocab_size: width of the model's logits.

    Raises:
        InvalidRequestError: not a grammar of its kind, or one that is too complex.
    """
    import llguidance

    try:
        source = _source(params)
    except ValueError as error:
        raise _refused(params, str(error)) from None
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    if matcher.is_error():
        raise _refused(params, matcher.get_error())
    first_mask = np.zeros(-(-vocab_size // 32), np.uint32)
    fill_mask(matcher, first_mask)
    if matcher.is_error():
        raise _refused(params, matcher.get_error())
    if not first_mask.any():
        raise _refused(params, "nothing matches it")
    return CompiledGrammar(matcher, first_mask)


def _limits() -> LLParserLimits:
    """What no grammar may go beyond."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=COMPILE_FUEL,
        step_lexer_fuel=MASK_FUEL,
        step_max_items=MASK_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


def fill_mask(matcher: LLMatcher, mask: Mask) -> None:
    """Writes what may come next; tokens that only the model's logits know of may not."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own form."""
    content = None if params.kind is None else _content_source(params)
    if params.turn is not None:
        if not params.turn.is_trusted:
            for grammar in (params.turn.root, params.turn.calls or ""):
                if (part := endless_part(grammar, is_empty_terminal)) is not None:
                    raise ValueError(part)
        return turn_source(params.turn, content)
    assert content is not None
    return content


@functools.cache
def _bytes() -> LLTokenizer:
    """The smallest vocabulary that has every text."""
    import llguidance

    return llguidance.LLTokenizer("byte")


_LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*:(?!:=))", re.MULTILINE)
"""A line that only a grammar in Lark's syntax has; GBNF may have a rule of that name, too."""


def is_empty_terminal(lark: str) -> bool:
    """Whether no text matches a grammar of one terminal. A millisecond or two."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(lark), log_level=0, limits=_limits())
    if matcher.is_error():
        return False  # no grammar at all: whoever compiles the whole of it says so
    fill_mask(matcher, np.zeros(-(-_bytes().vocab_size // 32), np.uint32))
    return matcher.is_error()


def _content_source(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    if params.grammar is not None:
        lark = params.grammar
        try:
            if _LARK.search(lark) is None:
                lark = gbnf_to_lark(lark)
        except Exception as error:  # it raises bare kinds of its own
            raise ValueError(str(error)) from None
        if (part := endless_part(lark, is_empty_terminal)) is not None:
            raise ValueError(part)
        return LLMatcher.grammar_from_lark(lark)
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    if params.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    pattern = params.whitespace_pattern or WHITESPACE
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": pattern})


def _refused(params: StructuredOutputsParams, why: str) -> InvalidRequestError:
    name, value = params.shown()
    return InvalidRequestError(name, value, f"what can be compiled ({' '.join(why.split())[:200]})")
