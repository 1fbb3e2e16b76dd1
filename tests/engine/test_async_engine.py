"""`AsyncEngine`: streams, cancellation, deadlines, death."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidConfigError,
    InvalidRequestError,
    OverloadedError,
)
from octavo.engine.measuring.open_loop import run_open_loop
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import Arrival

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = LONG.replace(max_tokens=10)


@pytest.fixture(scope="module")
def built(tiny_model: Any) -> Any:
    from octavo.engine.engine import Engine

    return Engine(
        EngineConfig(
            model=str(tiny_model),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_decode_steps=2,
            warm_up="coarse",
        )
    )


@pytest_asyncio.fixture
async def engine(built: Any, monkeypatch: Any) -> AsyncIterator[Any]:
    """A front over one compiled engine, which must be empty again afterwards."""
    from octavo.engine import async_engine

    monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: built)
    engine = async_engine.AsyncEngine()
    yield engine
    await until(lambda: not built.has_unfinished)
    await engine.shutdown()
    built.check_integrity()
    load = built.load()
    assert load.num_free_pages == load.num_total_pages


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what the engine's thread brings about."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        ("path/of/a/model", {}, "config = 'path/of/a/model' is not allowed: an EngineConfig"),
        (EngineConfig(), {"max_num_seqs": 3}, "max_num_seqs = 3 is not allowed: a field of config"),
    ],
)
async def test_a_config_is_one_and_has_all_arguments(
    config: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(named)):
        AsyncEngine(config, **arguments)


async def test_a_workload_may_be_offered_again_as_soon_as_it_has_ended(engine: Any) -> None:
    arrivals = [
        Arrival(request_id=f"again-{n}", arrival_s=0.0, num_input=20, num_output=5)
        for n in range(6)
    ]
    for _ in range(3):
        run = await run_open_loop(engine, arrivals)
        assert [record.status for record in run.records] == ["length"] * 6
        assert [record.num_output for record in run.records] == [5] * 6


async def test_shared_beginnings_of_a_workload_are_found_by_a_live_engine(engine: Any) -> None:
    arrivals = [
        Arrival(request_id=f"{n}", arrival_s=0.5 * n, num_input=100, num_output=2,
                segments=(Segment(9, num_shared),))
        for n, num_shared in enumerate((96, 96, 64))
    ]  # fmt: skip
    for seed in (1, 2):  # the second run finds nothing of the first
        run = await run_open_loop(engine, arrivals, seed=seed)
        assert [record.status for record in run.records] == ["length"] * 3
        assert [record.cached_tokens for record in run.records] == [0, 96, 64]


async def test_cumulative_outputs_grow_and_deltas_add_up(engine: Any) -> None:
    whole = await collect(engine.generate("hello", SHORT))
    texts = [output.outputs[0].text for output in whole]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    deltas = await collect(
        engine.generate("hello", SHORT.replace(output_kind=RequestOutputKind.DELTA))
    )
    ids = [token_id for o in deltas for token_id in o.outputs[0].token_ids]
    assert ids == whole[-1].outputs[0].token_ids
    assert "".join(o.outputs[0].text for o in deltas) == texts[-1]
    assert [o.finished for o in whole] == [False] * (len(whole) - 1) + [True]


async def test_a_prompt_may_come_by_name(engine: Any) -> None:
    ids = [30, 31, 32]
    plain = await collect(engine.generate(ids, SHORT))
    named = await collect(engine.generate({"prompt_token_ids": ids}, SHORT))
    assert named[-1].outputs[0].token_ids == plain[-1].outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="prompt"):
        await collect(engine.generate({"ids": ids}, SHORT))


async def test_arguments_of_vllm_that_ask_for_nothing_are_taken(engine: Any) -> None:
    stream = engine.generate("abc", SamplingParams(max_tokens=2), lora_request=None)
    assert [output async for output in stream][-1].finished
    with pytest.raises(InvalidRequestError, match="lora_request"):
        await anext(engine.generate("abc", SamplingParams(max_tokens=2), lora_request="a name"))


async def test_deltas_that_wait_for_a_slow_reader_come_as_one(engine: Any, built: Any) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    whole = await collect(
        engine.generate("slow", params.replace(output_kind=RequestOutputKind.FINAL_ONLY))
    )
    stream = engine.generate("slow", params)
    parts = [await anext(stream)]
    await until(lambda: not built.has_unfinished)
    await engine.flush_prefix_cache()  # behind all that the engine's thread has told before
    parts += [part async for part in stream]
    assert len(parts) == 2
    first, rest = parts[0].outputs[0], parts[1].outputs[0]
    want = whole[-1].outputs[0]
    assert first.token_ids + rest.token_ids == want.token_ids
    assert first.text + rest.text == want.text
    assert len(first.logprobs) + len(rest.logprobs) == 24
    assert (rest.finish_reason, rest.cumulative_logprob) == ("length", want.cumulative_logprob)


async def test_an_error_behind_deltas_does_not_swallow_them(engine: Any, built: Any) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    stream = engine.generate("cut off", params, request_id="cut")
    parts = [await anext(stream)]
    await until(lambda: not built.has_unfinished)
    await engine.flush_prefix_cache()
    engine._streams.put_all(EngineDeadError("the engine was shut down"))
    parts += [part async for part in stream]
    assert sum(len(part.outputs[0].token_ids) for part in parts) == 24


async def test_many_streams_at_once(engine: Any) -> None:
    streams = [collect(engine.generate([20 + i] * (1 + i), SHORT)) for i in range(12)]
    for outputs in await asyncio.gather(*streams):
        assert len(outputs[-1].outputs[0].token_ids) == 10


async def test_who_never_stops_asking_keeps_nobody_waiting(engine: Any) -> None:
    """As where requests come as fast as they are taken in."""
    first = await anext(engine.generate([66, 67], LONG, "first"))
    assert first.outputs
    num_asked = 0
    is_over = False

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        if not is_over:
            engine._post(ask)

    engine._post(ask)
    async with asyncio.timeout(60):
        outputs = await collect(engine.generate([68, 69], SHORT))
    is_over = True
    assert outputs[-1].finished
    assert num_asked > SHORT.max_tokens


async def test_leaving_a_stream_gives_its_pages_back(engine: Any) -> None:
    stream = engine.generate("cancel me", LONG)
    await anext(stream)
    assert engine.load().num_running == 1
    await stream.aclose()
    await until(lambda: engine.load().num_running == 0)
    assert engine.load().num_free_pages == engine.load().num_total_pages


async def test_abort_ends_the_stream_as_cancelled(engine: Any) -> None:
    stream = engine.generate("abort me", LONG, "mine")
    await anext(stream)
    assert await engine.abort("mine")
    last = (await collect(stream))[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "cancelled"
    assert not await engine.abort("mine")


async def test_a_deadline_ends_a_running_request(engine: Any, built: Any, monkeypatch: Any) -> None:
    stream = engine.generate("too slow", LONG, timeout_s=30.0)
    await anext(stream)
    later = built.clock.now_s() + 31.0
    monkeypatch.setattr(built.clock, "now_s", lambda: later)
    with pytest.raises(DeadlineExceededError):
        await collect(stream)


async def test_a_past_deadline_is_refused(engine: Any) -> None:
    with pytest.raises(DeadlineExceededError):
        await collect(engine.generate("late", SHORT, timeout_s=-1.0))
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        await collect(engine.generate("never", SHORT, timeout_s=float("nan")))


async def test_requests_in_flight_may_carry_one_id(engine: Any) -> None:
    alone = [(await collect(engine.generate(p, SHORT)))[-1].outputs[0] for p in ("one", "two")]
    both = await asyncio.gather(
        *(collect(engine.generate(prompt, SHORT, "same")) for prompt in ("one", "two"))
    )
    assert [outputs[-1].outputs[0] for outputs in both] == alone
    assert {output.request_id for outputs in both for output in outputs} == {"same"}
    assert len({output.engine_id for outputs in both for output in outputs}) == 2


async def test_a_request_without_an_id_is_called_by_the_engines(engine: Any) -> None:
    outputs = await collect(engine.generate("nameless", SHORT))
    assert outputs[0].request_id == outputs[0].engine_id != ""


async def test_an_id_that_was_cancelled_may_be_given_again_at_once(engine: Any) -> None:
    """Each stream has its own prompt's tokens, whatever came under its id just before."""
    prompts = [[20 + n, 21 + n, 22 + n] for n in range(60)]
    alone = [(await collect(engine.generate(p, SHORT)))[-1].outputs[0].token_ids for p in prompts]

    async def again(number: int, prompt: list[int]) -> Any:
        name = f"x{number % 3}"  # few, so that others carry them meanwhile
        first = engine.generate([99 + number] * 5, LONG, name)
        if number % 2:
            await anext(first)
        else:
            begun = asyncio.create_task(anext(first))
            await asyncio.sleep(0)
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        await first.aclose()
        last = (await collect(engine.generate(prompt, SHORT, name)))[-1]
        assert last.prompt_token_ids == prompt
        return last.outputs[0].token_ids

    assert await asyncio.gather(*(again(n, p) for n, p in enumerate(prompts))) == alone


async def test_abort_ends_all_that_its_owner_has_under_an_id_and_nothing_else(engine: Any) -> None:
    async def begin(owner: str, name: str = "x") -> Any:
        stream = engine.generate("mine", LONG, name, owner=owner)
        await anext(stream)
        return stream

    mine, too, other, named = [
        await begin(*who) for who in (("a",), ("a",), ("b",), ("a", "another"))
    ]
    assert not await engine.abort("x")
    assert not await engine.abort("x", "c")
    assert await engine.abort("x", "a")
    ends = [(await collect(s))[-1].outputs[0].finish_reason for s in (mine, too, other, named)]
    assert ends == ["cancelled", "cancelled", "length", "length"]
    assert not await engine.abort("x", "a")


async def test_abort_finds_a_request_by_the_engines_id_where_it_has_no_other(engine: Any) -> None:
    stream = engine.generate("nameless", LONG, owner="a")
    shown = (await anext(stream)).request_id
    assert not await engine.abort(shown, "b")
    assert await engine.abort(shown, "a")
    assert (await collect(stream))[-1].outputs[0].finish_reason == "cancelled"


async def test_abort_ends_a_request_whose_prompt_is_still_being_tokenized(
    engine: Any, built: Any, monkeypatch: Any
) -> None:
    may_go, has_begun = threading.Event(), threading.Event()
    process = built.inputs.process

    def slowly(*args: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_go.wait(30)
        return process(*args, **options)

    monkeypatch.setattr(built.inputs, "process", slowly)
    monkeypatch.setattr("octavo.engine.input.input_processor.SHORT_TEXT_CHARS", 1)
    reading = asyncio.create_task(collect(engine.generate("early", LONG, "early")))
    assert await asyncio.to_thread(has_begun.wait, 30)
    assert await engine.abort("early")
    may_go.set()
    assert [c.finish_reason for c in (await reading)[-1].outputs] == ["cancelled"]


async def test_a_refused_request_leaves_a_gated_one_under_its_id_alone(
    engine: Any, built: Any, monkeypatch: Any
) -> None:
    """A live one whose next mask is being made would wait for ever without it."""
    gated = SamplingParams(max_tokens=40, seed=1, structured_outputs={"regex": "[a-z]{30}-[0-9]"})
    alone = (await collect(engine.generate("x", gated)))[-1].outputs[0]
    stream = engine.generate("x", gated, "a#0")
    await anext(stream)
    add, num_added = built.core.add, 0

    def refuse_the_second(request: Any) -> None:
        nonlocal num_added
        num_added += 1
        if num_added == 2:
            raise OverloadedError("full", 1.0)
        add(request)

    with monkeypatch.context() as patch:
        patch.setattr(built.core, "add", refuse_the_second)
        with pytest.raises(OverloadedError):
            await collect(engine.generate("y", gated.replace(n=3), "a"))
    assert built.masks.num_live == 1
    assert built.scheduler.num_running + built.scheduler.num_waiting == 1
    assert (await collect(stream))[-1].outputs[0] == alone


async def test_bad_input_harms_nobody_in_flight(engine: Any) -> None:
    stream = engine.generate("steady", LONG)
    await anext(stream)
    for request_id in ("", "x" * 300):
        with pytest.raises(InvalidRequestError, match="request_id"):
            await collect(engine.generate("a", SHORT, request_id))
    with pytest.raises(InvalidRequestError, match="priority"):
        await collect(engine.generate("a", SHORT, priority="urgent"))
    assert (await collect(stream))[-1].outputs[0].finish_reason == "length"


async def test_a_broken_engine_says_so_to_everyone(
    engine: Any, built: Any, monkeypatch: Any
) -> None:
    stream = engine.generate("doomed", LONG)
    await anext(stream)
    with monkeypatch.context() as patch:
        patch.setattr(built, "advance", lambda: 1 / 0)
        with pytest.raises(EngineDeadError):
            await collect(stream)
        assert not engine.is_healthy
        with pytest.raises(EngineDeadError):
            await collect(engine.generate("after", SHORT))
    for request_id in list(built.outputs._parents):
        built.abort(request_id)
    while built.has_unfinished:
        built.step()


async def test_shutdown_refuses_what_comes_after(engine: Any) -> None:
    await engine.start()
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await collect(engine.generate("late", SHORT))


async def test_a_grammar_that_is_slow_to_compile_or_to_follow_holds_up_nobody_else(
    engine: Any, monkeypatch: Any
) -> None:
    from octavo.engine.structured import compiler, masks

    compile_grammar, fill_mask = compiler.compile_grammar, masks.fill_mask
    may_compile, fills, may_fill = threading.Event(), threading.Event(), threading.Event()

    def compile_slowly(*args: Any) -> Any:
        assert may_compile.wait(30)
        return compile_grammar(*args)

    def fill_slowly(*args: Any) -> None:
        fills.set()
        assert may_fill.wait(30)
        fill_mask(*args)

    monkeypatch.setattr(compiler, "compile_grammar", compile_slowly)
    monkeypatch.setattr(masks, "fill_mask", fill_slowly)
    gated = SamplingParams(max_tokens=20, seed=1, structured_outputs={"regex": "[a-z]{4}-[0-9]"})
    slow = asyncio.create_task(collect(engine.generate("x", gated)))
    expected = (await collect(engine.generate("hello", SHORT)))[-1].outputs[0].token_ids
    assert not fills.is_set()
    may_compile.set()
    assert await asyncio.to_thread(fills.wait, 30)
    found = (await collect(engine.generate("hello", SHORT)))[-1].outputs[0].token_ids
    assert found == expected
    assert not slow.done()
    may_fill.set()
    assert re.fullmatch("[a-z]{4}-[0-9]", (await slow)[-1].outputs[0].text)
