"""What is held against an outside client's report."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.guidellm_client import NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, problems

ALL_TOKENS = NUM_REQUESTS * OUTPUT_TOKENS


def request(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS + 1,
        "output_tokens": OUTPUT_TOKENS,
        "first_token_time": 1.0,
        "last_token_time": 2.0,
    } | changes


def report(*others: dict[str, Any], **lists: list[Any]) -> dict[str, Any]:
    good = [*others, *(request() for _ in range(NUM_REQUESTS - len(others)))]
    requests = {"successful": good, "errored": [], "incomplete": []} | lists
    return {"benchmarks": [{"requests": requests}]}


def test_a_whole_run_is_good_and_the_server_may_have_made_more() -> None:
    assert problems(report(), ALL_TOKENS) == []
    assert problems(report(), ALL_TOKENS + 5) == []


@pytest.mark.parametrize(
    ("bad", "served", "word"),
    [
        (report(errored=[request()]), ALL_TOKENS, "errored"),
        (report(incomplete=[request()]), ALL_TOKENS, "incomplete"),
        (report(successful=[request()]), ALL_TOKENS, "1 requests successful"),
        (report(successful=[]), ALL_TOKENS, "0 requests successful"),
        (report(request(output_tokens=OUTPUT_TOKENS - 1)), ALL_TOKENS, "answers of"),
        (report(request(prompt_tokens=3)), ALL_TOKENS, "prompts of fewer"),
        (report(request(last_token_time=0.5)), ALL_TOKENS, "before the first"),
        (report(), ALL_TOKENS - 1, "by the server's count"),
    ],
)
def test_whatever_is_missing_is_named(bad: dict[str, Any], served: int, word: str) -> None:
    assert any(word in problem for problem in problems(bad, served))
