"""What a replica tells, written down; and taken up where another left it."""

from __future__ import annotations

from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import CompletionOutput, Generated, RequestMetrics, RequestOutput
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.request import Request
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams


def narrator(kind: RequestOutputKind = RequestOutputKind.DELTA, n: int = 1) -> Narrator:
    params = SamplingParams(n=n, output_kind=kind, max_tokens=99)
    requests = tuple(
        Request(
            request_id=str(index), prompt_token_ids=[5], sampling_params=params, seed=index,
            eos_token_ids=(), max_tokens=99, arrival_s=1.0,
        )
        for index in range(n)
    )  # fmt: skip
    return Narrator(
        transcript_of(Submission(request_id="it", prompt="p", params=params, sequences=requests))
    )


def news(text: str, *, index: int = 0, end: str | None = None, error: Exception | None = None):
    """Of a model whose tokens are characters."""
    completion = CompletionOutput(index, text, [*map(ord, text)], finish_reason=end)
    return RequestOutput(
        "it", None, [], None, [completion], end is not None, RequestMetrics(1.0), 3, error
    )


def told(each: Narrator) -> str:
    output = each.transcript.read()
    assert output.outputs[0].token_ids == [*map(ord, output.outputs[0].text)]
    return output.outputs[0].text


def test_deltas_are_read_as_deltas() -> None:
    it = narrator()
    it.take(news("ab"))
    assert told(it) == "ab"
    it.take(news("c"))
    it.take(news("d", end="length"))
    output = it.transcript.read()
    assert (output.outputs[0].text, output.finished, output.num_cached_tokens) == ("cd", True, 3)
    assert (output.prompt, output.prompt_token_ids) == ("p", [5])
    assert output.outputs[0].finish_reason == "length"
    assert not it.transcript.has_news


def test_whole_states_are_read_as_such() -> None:
    it = narrator(RequestOutputKind.CUMULATIVE)
    for text, state in (("ab", "ab"), ("c", "abc")):
        it.take(news(text))
        assert told(it) == state


def test_what_was_told_is_known_where_it_goes_on() -> None:
    it = narrator()
    assert it.generated() == ()
    it.take(news("ab"))
    it.take(news("c"))
    assert it.generated() == (Generated(tuple(map(ord, "abc")), 3),)
    it.take(news("de", end="stop"))
    assert told(it) == "abcde"
    assert it.transcript.finished


def test_completions_go_on_each_by_itself() -> None:
    it = narrator(n=2)
    done = CompletionOutput(0, "xy", [*map(ord, "xy")], finish_reason="stop")
    both = news("ab", index=1)
    both.outputs.insert(0, done)
    it.take(both)
    assert [each.finish_reason for each in it.generated()] == ["stop", None]
    it.take(news("cd", index=1, end="length"))
    texts = [completion.text for completion in it.transcript.read().outputs]
    assert texts == ["xy", "abcd"]


def test_an_error_comes_after_what_came_before_it() -> None:
    it = narrator()
    it.take(news("ab"))
    it.take(news("", end="failed", error=ValueError("no")))
    first, last = it.transcript.read(), it.transcript.read()
    assert (first.outputs[0].text, first.finished, first.error) == ("ab", False, None)
    assert last.finished
    assert str(last.error) == "no"
