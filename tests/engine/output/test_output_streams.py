"""Streams between the engine's thread and readers: order, merging, and when readers are woken."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import EngineDeadError, StepFailedError
from octavo.engine.input.input_processor import Submission
from octavo.engine.output.output_processor import OutputProcessor
from octavo.engine.output.output_streams import OutputStream, OutputStreams
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.scheduler.committer import Committed
from octavo.engine.scheduler.step_plan import TokenScore
from octavo.engine.text.tokenizer import Tokenizer

HOUR_S = 3600.0


class Writer:
    """What the engine's thread does with committed tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer, lambda request, stop: None)

    def add(self, name: str, n: int = 1, num_prompt: int = 1, **params: Any) -> None:
        params = {"output_kind": RequestOutputKind.DELTA, "n": n, **params}
        checked = SamplingParams(**params)
        sequences = tuple(
            Request(
                request_id=name if n == 1 else f"{name}#{index}",
                prompt_token_ids=[1] * num_prompt,
                sampling_params=checked,
                seed=0,
                eos_token_ids=(),
                max_tokens=100,
                arrival_s=0.0,
            )
            for index in range(n)
        )
        submission = Submission(
            request_id=name, prompt=None, params=checked, sequences=sequences, grammar=None
        )
        self.processor.add(submission)
        self.requests = getattr(self, "requests", {}) | {s.request_id: s for s in sequences}

    def write(
        self, name: str, text: str = "", *, end: bool = False, error: Exception | None = None
    ) -> list[Transcript]:
        """A commit of this text's tokens, for one sequence."""
        request = self.requests[name]
        if end or error is not None:
            request.status = RequestStatus.LENGTH if error is None else RequestStatus.FAILED
            request.error = error
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()
        news = Committed(request, token_ids, None, None, end or error is not None)
        return self.processor.take([news])


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_source(str(tiny_model))


@pytest.fixture
def writer(tokenizer: Tokenizer) -> Writer:
    return Writer(tokenizer)


async def now(stream: OutputStream) -> Any:
    """What the stream gives without any further event; None if its reader would wait."""
    task = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return None
    return await task


def text(output: Any) -> str:
    assert isinstance(output, RequestOutput)
    [completion] = output.outputs
    assert len(completion.token_ids) == len(completion.text)  # a token a character
    return completion.text


async def test_without_an_interval_each_commit_wakes_its_reader(writer: Writer) -> None:
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    for letter in "abcde":
        streams.deliver(writer.write("a", letter), now_s=0.0)
        assert text(await now(stream)) == letter
    assert await now(stream) is None


async def test_the_first_token_does_not_wait_and_later_ones_leave_together(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    streams.deliver(writer.write("a", "A"), now_s=0.0)
    assert text(await now(stream)) == "A"
    for letter in "BCD":
        streams.deliver(writer.write("a", letter), now_s=1.0)
        assert await now(stream) is None
    streams.deliver(writer.write("a", "E"), now_s=HOUR_S + 1)
    assert text(await now(stream)) == "BCDE"


async def test_the_last_token_does_not_wait(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    streams.deliver(writer.write("a", "A"), now_s=0.0)
    await now(stream)
    streams.deliver(writer.write("a", "B"), now_s=1.0)
    streams.deliver(writer.write("a", "C", end=True), now_s=1.0)
    last = await now(stream)
    assert text(last) == "BC"
    assert last.finished
    assert last.outputs[0].finish_reason == "length"
    assert await now(stream) is None


async def test_what_is_held_is_read_after_the_interval_though_no_step_follows(
    writer: Writer,
) -> None:
    streams = OutputStreams(interval_s=0.01)
    names = [f"s{number}" for number in range(16)]
    opened = [streams.open(name, is_delta=True) for name in names]
    loop = asyncio.get_running_loop()
    for name in names:
        writer.add(name)
    for letter in "abc":
        streams.deliver([t for name in names for t in writer.write(name, letter)], loop.time())
    for stream in opened:
        got = ""
        while len(got) < 3:
            got += text(await stream.take())
        assert got == "abc"


async def test_what_was_read_before_it_was_told_is_not_told_again(writer: Writer) -> None:
    """The engine's thread may be a commit ahead of what the event loop has heard of."""
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    streams.deliver(writer.write("a", "a"), now_s=0.0)
    late = writer.write("a", "b")
    assert text(await now(stream)) == "ab"
    streams.deliver(late, now_s=0.0)
    assert await now(stream) is None
    late = [*writer.write("a", "c"), *writer.write("a", "d", end=True)]
    streams.deliver(late[:1], now_s=0.0)
    last = await now(stream)
    assert text(last) == "cd"
    assert last.finished
    streams.deliver(late[1:], now_s=0.0)
    assert await now(stream) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tokens_committed_in_blocks_make_the_same_text(writer: Writer, size: int) -> None:
    written = "na\u00efve \u65e5\u672c\u8a9e \U0001f642 end"
    writer.add("a")
    token_ids = writer.tokenizer.encode(written, add_special_tokens=False)
    assert len(token_ids) > len(written)
    read, told = "", []
    for start in range(0, len(token_ids), size):
        block = tuple(token_ids[start : start + size])
        news = Committed(writer.requests["a"], block, None, None, False)
        [transcript] = writer.processor.take([news])
        [part] = transcript.read().outputs
        read, told = read + part.text, told + part.token_ids
    [transcript] = writer.write("a", end=True)
    assert read + transcript.read().outputs[0].text == written
    assert told == token_ids


async def test_whole_states_are_never_held_or_merged(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=False)
    writer.add("a", output_kind=RequestOutputKind.CUMULATIVE)
    for letter in "abc":
        streams.deliver([t.read() for t in writer.write("a", letter)], now_s=1.0)
    for state in ("a", "ab", "abc"):
        assert text(await now(stream)) == state
    assert await now(stream) is None


async def test_a_final_state_is_told_once_at_the_end(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=False)
    writer.add("a", output_kind=RequestOutputKind.FINAL_ONLY)
    assert writer.write("a", "ab") == []
    streams.deliver(writer.write("a", "c", end=True), now_s=0.0)
    assert text(await now(stream)) == "abc"
    assert await now(stream) is None


async def test_an_error_comes_after_what_was_held_before_it(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    streams.deliver(writer.write("a", "a"), now_s=0.0)
    await now(stream)
    streams.deliver([*writer.write("a", "b"), *writer.write("a", "c")], now_s=1.0)
    stream.end(EngineDeadError("gone"))
    assert text(await now(stream)) == "bc"
    assert isinstance(await now(stream), EngineDeadError)


async def test_an_output_that_carries_an_error_stays_by_itself(writer: Writer) -> None:
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    told = [*writer.write("a", "ab"), *writer.write("a", error=StepFailedError("no"))]
    streams.deliver(told, now_s=0.0)
    before = await now(stream)
    assert (text(before), before.finished, before.error) == ("ab", False, None)
    failed = await now(stream)
    assert isinstance(failed.error, StepFailedError)
    assert failed.finished
    assert text(failed) == ""
    assert await now(stream) is None


async def test_a_closed_stream_is_forgotten_even_while_it_is_held(writer: Writer) -> None:
    streams = OutputStreams(interval_s=0.001)
    stream = streams.open("a", is_delta=True)
    writer.add("a")
    for letter in "abc":
        streams.deliver(writer.write("a", letter), now_s=asyncio.get_running_loop().time())
    assert text(await now(stream)) == "abc"
    streams.deliver(writer.write("a", "d"), now_s=0.0)
    streams.close(stream)
    assert not len(streams)
    assert not streams
    streams.deliver(writer.write("a", "e"), now_s=0.0)
    await asyncio.sleep(0.01)
    assert not stream.is_ready


async def test_every_completion_is_told_and_who_ended(writer: Writer) -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    writer.add("a", n=2)
    streams.deliver(writer.write("a#0", "A"), now_s=0.0)
    await now(stream)
    for name, letter in (("a#1", "x"), ("a#0", "B")):
        streams.deliver(writer.write(name, letter), now_s=1.0)
    streams.deliver(writer.write("a#1", "y", end=True), now_s=2 * HOUR_S)
    both = await now(stream)
    assert [completion.text for completion in both.outputs] == ["B", "xy"]
    assert [completion.finish_reason for completion in both.outputs] == [None, "length"]
    assert not both.finished
    streams.deliver(writer.write("a#0", end=True), now_s=2 * HOUR_S)
    last = await now(stream)
    assert last.finished
    assert [completion.finish_reason for completion in last.outputs] == ["length", "length"]
    assert [completion.text for completion in last.outputs] == ["", ""]


async def test_a_completion_that_ends_without_a_token_is_told(writer: Writer) -> None:
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    writer.add("a", n=2)
    streams.deliver(writer.write("a#1", end=True), now_s=0.0)
    output = await now(stream)
    assert [completion.finish_reason for completion in output.outputs] == [None, "length"]
    assert not output.finished


async def test_a_prompts_scores_are_whole_before_anything_is_told(writer: Writer) -> None:
    """Only the first completion gets them, and the second may be ahead of it."""
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    writer.add("a", n=2, num_prompt=4, prompt_logprobs=0)
    streams.deliver(writer.write("a#1", "x"), now_s=0.0)
    await asyncio.sleep(0.01)
    assert not stream.is_ready
    request = writer.requests["a#0"]
    token_id = writer.tokenizer.encode("A", add_special_tokens=False)[0]
    [score] = commit(request, token_id).logprobs or ()
    scores = (score,) * (request.num_prompt_tokens - 1)
    news = [Committed(request, (token_id,), None, scores, False)]
    streams.deliver(writer.processor.take(news), now_s=0.0)
    output = await now(stream)
    assert len(output.prompt_logprobs) == request.num_prompt_tokens
    assert [completion.text for completion in output.outputs] == ["A", "x"]


def test_a_reader_in_another_thread_gets_each_token_once_and_in_order(writer: Writer) -> None:
    letters = "the quick brown fox jumps over the lazy dog " * 20
    writer.add("a", logprobs=1)
    request = writer.requests["a"]
    token_ids = writer.tokenizer.encode(letters, add_special_tokens=False)
    [transcript] = writer.processor.take([commit(request, token_ids[0])])

    def write() -> None:
        for token_id in token_ids[1:]:
            writer.processor.take([commit(request, token_id)])
        writer.write("a", end=True)

    thread = threading.Thread(target=write)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        outputs: list[RequestOutput] = []
        while not (outputs and outputs[-1].finished):
            if transcript.has_news:
                outputs.append(transcript.read())
            elif not thread.is_alive() and not transcript.has_news:
                break  # the writer failed
    finally:
        sys.setswitchinterval(before)
        thread.join()
    parts = [output.outputs[0] for output in outputs]
    assert "".join([part.text for part in parts]) == letters
    assert [token_id for part in parts for token_id in part.token_ids] == token_ids
    for part in parts:
        assert part.logprobs is not None
        assert [next(iter(entry)) for entry in part.logprobs] == part.token_ids
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert not transcript.has_news


def commit(request: Request, token_id: int) -> Committed:
    score = TokenScore(logprob=-1.0, rank=1, top_token_ids=(token_id,), top_logprobs=(-1.0,))
    return Committed(request, (token_id,), (score,), None, False)
