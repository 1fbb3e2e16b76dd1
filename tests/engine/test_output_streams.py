"""Streams between the engine's thread and readers: order, merging, and when readers are woken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.engine.errors import EngineDeadError, StepFailedError
from octavo.engine.output_streams import OutputStream, OutputStreams
from octavo.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, merge_deltas

HOUR_S = 3600.0


def delta(
    request_id: str, *token_ids: int, finished: bool = False, error: Exception | None = None
) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=0,
                text="".join(map(chr, token_ids)),
                token_ids=list(token_ids),
                finish_reason="length" if finished else None,
            )
        ],
        finished=finished,
        metrics=RequestMetrics(arrival_s=0.0),
        error=error,
    )


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


def tokens(output: Any) -> list[int]:
    assert isinstance(output, RequestOutput)
    return output.outputs[0].token_ids


async def test_without_an_interval_each_output_wakes_its_reader() -> None:
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    for token_id in range(5):
        streams.deliver([delta("a", token_id)], now_s=0.0)
        assert tokens(await now(stream)) == [token_id]
    assert await now(stream) is None


async def test_the_first_output_does_not_wait_and_later_ones_leave_together() -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    streams.deliver([delta("a", 65)], now_s=0.0)
    assert tokens(await now(stream)) == [65]
    for token_id in (66, 67, 68):
        streams.deliver([delta("a", token_id)], now_s=1.0)
        assert await now(stream) is None
    streams.deliver([delta("a", 69)], now_s=HOUR_S + 1)
    together = await now(stream)
    assert tokens(together) == [66, 67, 68, 69]
    assert together.outputs[0].text == "BCDE"


async def test_the_last_output_does_not_wait() -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    streams.deliver([delta("a", 65)], now_s=0.0)
    await now(stream)
    streams.deliver([delta("a", 66)], now_s=1.0)
    streams.deliver([delta("a", 67, finished=True)], now_s=1.0)
    last = await now(stream)
    assert tokens(last) == [66, 67]
    assert last.finished


async def test_what_is_held_is_read_after_the_interval_though_no_step_follows() -> None:
    streams = OutputStreams(interval_s=0.01)
    names = [f"s{number}" for number in range(16)]
    opened = [streams.open(name, is_delta=True) for name in names]
    loop = asyncio.get_running_loop()
    for token_id in (1, 2, 3):
        streams.deliver([delta(name, token_id) for name in names], now_s=loop.time())
    for stream in opened:
        got: list[int] = []
        while len(got) < 3:
            got += tokens(await stream.take())
        assert got == [1, 2, 3]


async def test_whole_states_are_never_held_or_merged() -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=False)
    for token_ids in ((1,), (1, 2), (1, 2, 3)):
        streams.deliver([delta("a", *token_ids)], now_s=1.0)
    for token_ids in ([1], [1, 2], [1, 2, 3]):
        assert tokens(await now(stream)) == token_ids
    assert await now(stream) is None


async def test_an_error_comes_after_what_was_held_before_it() -> None:
    streams = OutputStreams(interval_s=HOUR_S)
    stream = streams.open("a", is_delta=True)
    streams.deliver([delta("a", 1)], now_s=0.0)
    await now(stream)
    streams.deliver([delta("a", 2), delta("a", 3)], now_s=1.0)
    streams.put("a", EngineDeadError("gone"))
    assert tokens(await now(stream)) == [2, 3]
    assert isinstance(await now(stream), EngineDeadError)


async def test_an_output_that_carries_an_error_stays_by_itself() -> None:
    streams = OutputStreams()
    stream = streams.open("a", is_delta=True)
    failed = delta("a", 3, finished=True, error=StepFailedError("no"))
    streams.deliver([delta("a", 1), delta("a", 2), failed], now_s=0.0)
    assert tokens(await now(stream)) == [1, 2]
    assert await now(stream) is failed


async def test_a_closed_stream_is_forgotten_even_while_it_is_held() -> None:
    streams = OutputStreams(interval_s=0.001)
    stream = streams.open("a", is_delta=True)
    for token_id in range(3):
        streams.deliver([delta("a", token_id)], now_s=asyncio.get_running_loop().time())
    streams.close("a")
    assert "a" not in streams
    assert not streams
    streams.deliver([delta("a", 9)], now_s=0.0)
    await asyncio.sleep(0.01)
    assert tokens(stream._items[-1]) != [9]


def test_merging_keeps_every_completion_and_who_ended() -> None:
    first, second = delta("a", 65), delta("a", 66)
    first.outputs.append(CompletionOutput(1, "x", [7], finish_reason="stop", stop_reason="x"))
    second.outputs.append(CompletionOutput(1, "", []))
    second.num_cached_tokens = 4
    one = merge_deltas([first, second])
    assert [completion.token_ids for completion in one.outputs] == [[65, 66], [7]]
    assert [completion.text for completion in one.outputs] == ["AB", "x"]
    assert (one.outputs[1].finish_reason, one.outputs[1].stop_reason) == ("stop", "x")
    assert one.num_cached_tokens == 4
