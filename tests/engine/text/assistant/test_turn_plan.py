"""The grammars of whole turns: thoughts, words of a format, calls; and whose fault one is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.structured.compiler import GrammarCompiler
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.text.assistant.formats import FORMATS, format_named
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS, reasoning_named
from octavo.engine.text.assistant.tool_request import read_tool_use
from octavo.engine.text.assistant.turn_plan import ModelFormats, TurnPlan
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.loading.locate import locate

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'
YES_OR_NO = StructuredOutputsParams(choice=["yes", "no"])
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_source(locate("smollm2-135m")[0])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Any:
    compiler = GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )
    yield compiler
    compiler.close()


def plan_of(
    choice: Any = "auto", *, calls: str = "hermes", reasoning: str | None = None,
    tools: Any = TOOLS, is_open: bool = False, parallel: bool = True,
) -> TurnPlan:  # fmt: skip
    thoughts = None if reasoning is None else reasoning_named(reasoning)
    use = read_tool_use(tools, choice, parallel)
    plan = ModelFormats(format_named(calls), thoughts).plan(use)
    assert plan is not None
    return plan.opened_by("<think>\n" if is_open else "")


def takes(
    plan: TurnPlan, text: str, tokenizer: Tokenizer, compiler: GrammarCompiler, **asked: Any
) -> bool:
    """Whether a turn may be this text."""
    wanted = plan.constrained(SamplingParams(**asked), tokenizer).structured_outputs
    assert isinstance(wanted, StructuredOutputsParams)
    matcher = compiler.compile(wanted).matcher.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("choice", "content", "good", "bad"),
    [
        ("required", None, [CALL, CALL + "\n" + CALL], ["yes", WRONG, "x" + CALL, ""]),
        ("auto", None, [CALL, "yes", "So:\n" + CALL, "1 < 2"], [WRONG, "So: " + WRONG]),
        (NAMED, None, [CALL], [CALL + "\n" + CALL, CALL.replace('"f"', '"g"')]),
        ("auto", YES_OR_NO, [CALL, "yes"], ["maybe", "yes" + CALL, WRONG]),
        ("required", YES_OR_NO, [CALL], ["yes", WRONG]),
    ],
    ids=["required", "auto", "named", "auto with a format", "required with a format"],
)
@pytest.mark.parametrize("thought", ["", "<think>\nIs it 1?\n</think>\n\n", "Open.</think>"])
def test_turns_are_what_was_asked_for_after_any_thought(
    tokenizer, compiler, choice, content, good, bad, thought
):
    is_open = bool(thought) and not thought.startswith("<think>")
    plan = plan_of(choice, reasoning="qwen3" if thought else None, is_open=is_open)
    asked = {"structured_outputs": content}
    for text in good:
        assert takes(plan, thought + text, tokenizer, compiler, **asked), text
    for text in bad:
        assert not takes(plan, thought + text, tokenizer, compiler, **asked), text


def test_a_format_of_words_waits_for_the_thought_without_tools_too(tokenizer, compiler):
    plan = ModelFormats(None, reasoning_named("qwen3")).plan(None)
    assert plan is not None
    asked = {"structured_outputs": YES_OR_NO}
    assert takes(plan, "<think>\nno or yes</think>\nyes", tokenizer, compiler, **asked)
    assert takes(plan, "yes", tokenizer, compiler, **asked)
    assert not takes(plan, "<think>\nno</think>\nmaybe", tokenizer, compiler, **asked)
    free = SamplingParams()
    assert plan.constrained(free, tokenizer) == free


WITHOUT_GRAMMAR = ("openai",)


@pytest.mark.parametrize(
    "calls", [each.name for each in FORMATS if each.name not in WITHOUT_GRAMMAR]
)
def test_turns_of_every_pair_of_formats_compile(tokenizer, compiler, calls):
    reasonings = [None, *(each.name for each in REASONING_FORMATS)]
    for choice, content in itertools.product(("auto", "required"), (None, YES_OR_NO)):
        for reasoning in reasonings:
            plan = plan_of(choice, calls=calls, reasoning=reasoning)
            params = plan.constrained(SamplingParams(structured_outputs=content), tokenizer)
            wanted = params.structured_outputs
            assert isinstance(wanted, StructuredOutputsParams)
            assert compiler.compile(wanted).first_mask.any()


@pytest.mark.parametrize("calls", WITHOUT_GRAMMAR)
def test_calls_that_cannot_be_bound_are_read_and_not_promised(tokenizer, calls):
    free = SamplingParams()
    assert plan_of(calls=calls).constrained(free, tokenizer) == free
    strict = [a_tool(SCHEMA, strict=True)]
    for plan, params, field in (
        (plan_of("required", calls=calls), free, "tool_choice"),
        (plan_of(calls=calls, tools=strict), free, "tools"),
        (plan_of(calls=calls), SamplingParams(structured_outputs=YES_OR_NO), "response_format"),
    ):
        with pytest.raises(InvalidRequestError, match=calls) as caught:
            plan.constrained(params, tokenizer)
        assert caught.value.field == field


def a_tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "h", "parameters": schema, **more}}


UNKNOWN = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}


def test_a_keyword_that_is_not_known_counts_for_nothing_in_a_free_choice_alone(tokenizer, compiler):
    call = CALL.replace('"f"', '"h"')
    assert takes(plan_of(tools=[*TOOLS, a_tool(UNKNOWN)]), call, tokenizer, compiler)
    for choice, strict in (("required", False), ("auto", True)):
        plan = plan_of(choice, tools=[*TOOLS, a_tool(UNKNOWN, strict=strict)])
        with pytest.raises(InvalidRequestError, match="not") as caught:
            takes(plan, call, tokenizer, compiler)
        assert caught.value.field == "tools[2].function.parameters"


def test_a_format_at_fault_is_called_as_the_user_called_it(tokenizer, compiler):
    wrong = StructuredOutputsParams(regex="(a", asked_as="guided_regex")
    with pytest.raises(InvalidRequestError) as caught:
        takes(plan_of(), CALL, tokenizer, compiler, structured_outputs=wrong)
    assert caught.value.field == "guided_regex"


def test_what_goes_with_no_grammar_leaves_a_free_choice_unbound(tokenizer):
    for name, value in (
        ("ignore_eos", True), ("min_tokens", 2), ("bad_words", ["x"]), ("allowed_token_ids", [5]),
    ):  # fmt: skip
        params = SamplingParams(**{name: value})
        assert plan_of().constrained(params, tokenizer) == params
        with pytest.raises(InvalidRequestError) as caught:
            plan_of("required").constrained(params, tokenizer)
        assert caught.value.field == name


def test_marks_that_are_special_tokens_are_not_left_out(tokenizer):
    params = SamplingParams()
    assert plan_of().constrained(params, tokenizer).skip_special_tokens
    marked = plan_of(calls="openai")  # whose marks this vocabulary does not have
    assert marked.constrained(params, tokenizer).skip_special_tokens
    special = tokenizer.id_to_token(min(tokenizer.special_ids))
    assert special is not None
    assert tokenizer.has_special_token(f"<{special}>")


def test_a_model_whose_format_is_not_known_is_offered_no_tools():
    formats = ModelFormats(None, None)
    with pytest.raises(InvalidRequestError, match="tool_call_parser") as caught:
        formats.plan(read_tool_use(TOOLS))
    assert caught.value.field == "tools"
    assert formats.plan(read_tool_use(TOOLS, "none")) is None
    assert formats.plan(None) is None


def test_no_line_breaks_come_before_words_that_follow_no_thought(tokenizer, compiler):
    plan = ModelFormats(None, reasoning_named("qwen3")).plan(None)
    asked = {"structured_outputs": YES_OR_NO}
    for text in ("yes", "<think>Well</think>\n\nyes"):
        assert takes(plan, text, tokenizer, compiler, **asked), text
    assert not takes(plan, "\n\nyes", tokenizer, compiler, **asked)
