"""How the turns that answer one request are constrained, and how they are read."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.structured.turn_grammar import CALLS, CONTENT, TurnGrammar
from octavo.engine.text.assistant.formats import AUTO, format_for, format_named
from octavo.engine.text.assistant.message import AssistantMessage
from octavo.engine.text.assistant.reasoning import (
    ReasoningFormat,
    reasoning_for,
    reasoning_named,
)
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.tool_format import ToolFormat
from octavo.engine.text.assistant.tool_grammar import tool_grammar
from octavo.engine.text.assistant.tool_request import ToolUse
from octavo.engine.text.assistant.turn_reader import CallIds, ThoughtCounter, TurnReader
from octavo.engine.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.output.outputs import RequestOutput
    from octavo.engine.text.tokenizer import Tokenizer

NO_PARSER = "none"
NO_BUDGET, MAX_BUDGET = -1, 1_000_000
"""Of a thought's tokens: no limit, as vLLM writes it, and the largest one."""
SHORT_IDS = frozenset({"mistral"})
"""Formats whose templates want ids of nine letters and digits."""
_LENIENT: Mapping[str, Any] = {"x-guidance": {"lenient": True}}
_ANY_WORDS = "start: TEXT\nTEXT: /(?s:.*)/\n"
_WITHOUT_GRAMMAR = ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words")
"""Parameters that do not go together with a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What a request's turns are made of.

    Attributes:
        use: what the request says of tools; None if it has none.
        calls: the format that calls are read with; None if the turn may make none.
        reasoning: how thoughts are marked; None if they are not told apart.
        is_open: whether the prompt ends within a thought.
        thought_budget: most tokens of a thought; None for no limit.
    """

    use: ToolUse | None
    calls: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_open: bool = False
    thought_budget: int | None = None

    @property
    def is_named(self) -> bool:
        """Whether the request names the one function to call."""
        return self.use is not None and self.use.choice.name is not None

    def opened_by(self, prompt: str) -> TurnPlan:
        """The plan after a prompt, which may end within a thought."""
        if self.reasoning is None or not self.reasoning.is_open(prompt):
            return self
        return replace(self, is_open=True)

    def reader(self, tokenizer: Tokenizer, params: SamplingParams, turn: str) -> TurnReader:
        """A reader of one turn.

        Args:
            params: as `constrained` has made them.
            turn: names it; see `CallIds`.
        """
        parser = thoughts = None
        use = self.use
        if self.calls is not None and use is not None:
            parser = self.calls.parser(use.callable)
        if self.reasoning is not None:
            parser = self.reasoning.parser(parser, is_open=self.is_open)
            text = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            thoughts = ThoughtCounter(text)
        assert parser is not None, "nothing to read"
        is_short = self.calls is not None and self.calls.name in SHORT_IDS
        return TurnReader(
            parser,
            CallIds(turn, is_short),
            is_parallel=use is None or use.choice.is_parallel,
            thoughts=thoughts,
        )

    def constrained(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The request's parameters, with what its turns need.

        Raises:
            InvalidRequestError: calls have to be made, or to match their schemas, and this format
                has no grammar; or no text is wanted to read calls from.
        """
        if self.calls is not None and not params.detokenize:
            raise InvalidRequestError("detokenize", False, "true with tools")
        formats = [each for each in (self.calls, self.reasoning) if each is not None]
        specials = tokenizer.special_tokens
        if any(tokenizer.has_special_token(mark) for each in formats for mark in each.markers):
            params = params.replace(skip_special_tokens=False)
        calls = self._calls_grammar(params, specials)
        content = None if self._must_call else params.structured_outputs
        is_bounded = self.thought_budget is not None
        if calls is None and not is_bounded and (content is None or self.reasoning is None):
            return params
        named = [f"@{CALLS}"] if calls is not None else []
        if content is not None:
            named.append(f"@{CONTENT}")
        root = f"start: {' | '.join(named)}\n" if named else _ANY_WORDS
        if self.reasoning is not None:
            root = self.reasoning.grammar(
                root, is_open=self.is_open, specials=specials, budget=self.thought_budget
            )
        turn = TurnGrammar(root=root, calls=calls, schemas=self._schemas() if calls else ())
        if content is None:
            return params.replace(structured_outputs=StructuredOutputsParams(turn=turn))
        assert isinstance(content, StructuredOutputsParams)
        return params.replace(structured_outputs=replace(content, turn=turn))

    @property
    def _must_call(self) -> bool:
        return self.use is not None and self.use.choice.mode == "required"

    def _calls_grammar(self, params: SamplingParams, specials: Mapping[str, int]) -> str | None:
        """The grammar of calls, or of words and calls; None if the turn is not constrained."""
        use, calls = self.use, self.calls
        if calls is None or use is None:
            return None
        has_content = params.structured_outputs is not None
        if not (use.must_keep_schemas or has_content or _can_constrain(params)):
            return None
        choice = use.choice
        if has_content:  # which says what words there may be
            choice = replace(choice, mode="required")
        grammar = tool_grammar(calls, self._tools(), choice, specials, self._fields())
        if grammar is None and (use.must_keep_schemas or has_content):
            field, value, allowed = "tools", "a strict one", "tools that are not strict"
            if self._must_call:
                field, value, allowed = "tool_choice", "a call", '"auto" or "none"'
            elif has_content:
                field, value, allowed = "response_format", "given", "not given with tools"
            why = f"calls in the format of this model ({calls.name}) cannot be constrained"
            raise InvalidRequestError(field, value, f"{allowed}: {why}")
        return grammar

    def _tools(self) -> list[FunctionTool]:
        """The tools that may be called. Where nothing has to match a schema, keywords that are not
        known count for nothing."""
        assert self.use is not None
        return [
            tool
            if tool.is_strict or self._must_call
            else replace(tool, parameters={**(tool.parameters or {}), **_LENIENT})
            for tool in self.use.callable
        ]

    def _fields(self) -> dict[str, str]:
        """A tool's name -> what its request calls its parameters."""
        assert self.use is not None
        names = [tool["function"]["name"] for tool in self.use.shown]
        return {name: f"tools[{index}].function.parameters" for index, name in enumerate(names)}

    def _schemas(self) -> tuple[tuple[str, str], ...]:
        fields = self._fields()
        return tuple((fields[tool.name], json.dumps(tool.parameters)) for tool in self._tools())


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How a model writes what is no plain word.

    Attributes:
        calls: of tools; None if it is not known, or calls are not to be read.
        reasoning: thoughts; None if the model has none, or they are not to be told apart.
    """

    calls: ToolFormat | None
    reasoning: ReasoningFormat | None

    def plan(self, use: ToolUse | None, thought_budget: int | None = None) -> TurnPlan | None:
        """How a request's turns are read; None if all that they say is content.

        Args:
            use: of tools.
            thought_budget: most tokens of a thought; None for no limit.

        Raises:
            InvalidRequestError: there are tools to call, and no format to call them in; or the
                thoughts of this model have no limit.
        """
        if thought_budget is not None:
            self._check_budget(thought_budget)
        calls = None
        if use is not None and use.callable:
            calls = self.calls
            if calls is None:
                allowed = (
                    'not given, unless tool_choice is "none": how this model writes calls is not '
                    "known to the server (tool_call_parser)"
                )
                names = [tool["function"]["name"] for tool in use.shown]
                raise InvalidRequestError("tools", names, allowed)
        if calls is None and self.reasoning is None:
            return None
        return TurnPlan(
            use=use, calls=calls, reasoning=self.reasoning, thought_budget=thought_budget
        )

    def _check_budget(self, budget: int) -> None:
        why = ""
        if self.reasoning is None:
            why = "this model's thoughts are not told apart"
        elif self.reasoning.whole_turn is not None:
            why = f"thoughts in the format of this model ({self.reasoning.name}) have no limit"
        if why:
            raise InvalidRequestError("thinking_token_budget", budget, f"not given: {why}")


def check_thought_budget(budget: int | None) -> int | None:
    """Most tokens of a thought as a request gives it; None for no limit.

    Raises:
        InvalidRequestError: it is no number of tokens.
    """
    if budget is None or budget == NO_BUDGET:
        return None
    is_number = isinstance(budget, int) and not isinstance(budget, bool)
    if not is_number or not 0 <= budget <= MAX_BUDGET:
        allowed = f"an integer from 0 to {MAX_BUDGET}, or -1 for no limit"
        raise InvalidRequestError("thinking_token_budget", budget, allowed)
    return budget


def set_messages(
    output: RequestOutput, plan: TurnPlan | None, tokenizer: Tokenizer, params: SamplingParams
) -> None:
    """Sets the messages of a whole output's completions.

    Args:
        plan: how to read them; None if all of their text is content.
    """
    for completion in output.outputs:
        if plan is None:
            completion.message = AssistantMessage(content=completion.text)
            continue
        turn = f"{output.engine_id or output.request_id}/{completion.index}"
        reader = plan.reader(tokenizer, params, turn)
        reader.feed(completion.text, completion.token_ids)
        reader.finish()
        completion.message = reader.message()


def model_formats(config: EngineConfig, tokenizer: Tokenizer) -> ModelFormats:
    """How an engine's model writes calls and thoughts: as its configuration says, or as the
    template and the family do."""
    template = tokenizer.chat_template or ""
    return _formats(
        config.tool_call_parser, config.reasoning_parser, template, tokenizer.model_type
    )


@functools.lru_cache(maxsize=8)
def _formats(calls: str, reasoning: str, template: str, model_type: str) -> ModelFormats:
    tool_format, thoughts = None, None
    if calls == AUTO:
        tool_format = format_for(template, model_type)
    elif calls != NO_PARSER:
        tool_format = format_named(calls)
    if reasoning == AUTO:
        thoughts = reasoning_for(template, model_type)
    elif reasoning != NO_PARSER:
        thoughts = reasoning_named(reasoning)
    return ModelFormats(tool_format, thoughts)


def _can_constrain(params: SamplingParams) -> bool:
    """Whether a turn that need not be constrained can be."""
    if any(getattr(params, name) for name in _WITHOUT_GRAMMAR):
        return False
    return importlib.util.find_spec("llguidance") is not None
