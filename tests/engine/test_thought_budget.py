"""A budget of thoughts on a real engine: the thought is closed, and the answer follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import reasoning_named
from octavo.engine.text.assistant.turn_plan import ModelFormats, set_messages


def test_an_answer_follows_a_thought_that_has_spent_its_budget(
    make_llm: Callable[..., Any],
) -> None:
    pytest.importorskip("llguidance")
    llm = make_llm()
    for budget in (0, 1, 6):
        plan = ModelFormats(None, reasoning_named("qwen3")).plan(None, budget)
        assert plan is not None
        plan = plan.opened_by("<think>\n")
        params = [
            plan.constrained(SamplingParams(max_tokens=30, seed=seed), llm.tokenizer)
            for seed in range(4)
        ]
        outputs = llm.generate(["<think>\n"] * 4, params, use_tqdm=False)
        for output, each in zip(outputs, params, strict=True):
            set_messages(output, plan, llm.tokenizer, each)
            message = output.outputs[0].message
            assert message is not None
            # A token of this model is a byte.
            assert len(message.reasoning or "") <= budget
            assert "</think>" in output.outputs[0].text
            if output.outputs[0].finish_reason == "length":
                assert message.content


def test_thoughts_without_a_limit_are_refused_by_name() -> None:
    for formats in (
        ModelFormats(None, None),
        ModelFormats(format_named("openai"), reasoning_named("openai_gptoss")),
    ):
        assert formats.plan(None) is None or formats.reasoning is not None
        with pytest.raises(InvalidRequestError) as caught:
            formats.plan(None, 100)
        assert (caught.value.field, caught.value.value) == ("thinking_token_budget", 100)


def test_a_chat_of_python_has_a_budget_too(make_llm: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    llm = make_llm(reasoning_parser="qwen3")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    params = SamplingParams(max_tokens=30, seed=2)
    for budget in (0, 5, -1, None):
        [output] = llm.chat(
            [{"role": "user", "content": "why?"}], params, chat_template=template,
            thinking_token_budget=budget, use_tqdm=False,
        )  # fmt: skip
        text = output.outputs[0].text
        assert ("</think>" in text) == (budget is not None and budget >= 0)
    for wrong in (-2, 1.5, True):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
            llm.chat([{"role": "user", "content": "x"}], params, thinking_token_budget=wrong)
