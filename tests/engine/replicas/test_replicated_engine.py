"""Two replicas as one engine: the same answers, and none lost when a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.engine import any_engine
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import (
    EngineDeadError,
    InvalidConfigError,
    InvalidRequestError,
    ModelLoadError,
    QuarantinedError,
)
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.replicas import replica as replica_module
from octavo.engine.replicas.placement import SUSPECT_DEATHS
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from octavo.engine.replicas.shares import devices_of, split
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.server.watchdog import Watchdog
from tests.engine.replicas.conftest import ARGUMENTS, num_cores

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=300)
PROMPTS = [f"{'so ' * n}the {n}th prompt" for n in range(12)]
WAIT_S = 120.0
HANG_S = 4.0
"""Silence after which a replica hangs, in tests of that; it beats once a second."""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every page of every replica is free after each test."""
    yield
    if "pair" in request.fixturenames:
        pair: ReplicatedEngine = request.getfixturevalue("pair")
        until(pair, lambda: all(replica.ready for replica in pair.replicas))
        assert not pair.has_unfinished
        pair.check_integrity()
        until(pair, lambda: pair.load().num_free_pages == pair.load().num_total_pages)


def until(engine: ReplicatedEngine, condition: Callable[[], object]) -> None:
    """Waits for what a replica brings about."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def run(
    engine: Engine | ReplicatedEngine,
    prompts: list[Any],
    params: SamplingParams | list[SamplingParams],
    on_output: Callable[[RequestOutput], None] = lambda output: None,
    **options: Any,
) -> list[RequestOutput]:
    """The last output of each prompt."""
    listed = params if isinstance(params, list) else [params] * len(prompts)
    last: dict[str, RequestOutput] = {}
    for index, (prompt, each) in enumerate(zip(prompts, listed, strict=True)):
        now_s = engine.clock.now_s()
        engine.submit(engine.inputs.process(f"r{index}", prompt, each, now_s=now_s, **options))
    while engine.has_unfinished:
        for output in engine.step():
            last[output.request_id] = output
            on_output(output)
    return [last[f"r{index}"] for index in range(len(prompts))]


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def scores(output: RequestOutput) -> list[float]:
    """Of the prompt's tokens and the chosen ones; as near as float32 in other batches is."""
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs or (), strict=True)
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    listed = [*prompt, *chosen]
    return [logprobs[token].logprob for token, logprobs in listed if logprobs is not None]


def pid_with_work(pair: ReplicatedEngine, request_id: str) -> int:
    """The process that has a request."""
    replica = pair.where(request_id)
    assert replica is not None
    assert replica.process_id is not None
    return replica.process_id


def test_answers_are_those_of_one_engine_and_both_take_part(pair, alone) -> None:
    before = [replica.report.load.prompt_tokens for replica in pair.replicas]
    outputs = run(pair, PROMPTS, GREEDY)
    assert said(outputs) == said(run(alone, PROMPTS, GREEDY))
    assert [output.prompt for output in outputs] == PROMPTS
    until(pair, lambda: pair.load().num_running == 0)
    after = [replica.report.load.prompt_tokens for replica in pair.replicas]
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_so_are_samples_scores_stops_and_several_completions(pair, alone) -> None:
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    params = [
        sampled,
        sampled.replace(n=3, seed=5),
        sampled.replace(logprobs=2, prompt_logprobs=1),
        sampled.replace(stop=["e", "a", "o"]),
        sampled.replace(detokenize=False),
        sampled.replace(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=0),
    ]
    ours = run(pair, PROMPTS[:6], params)
    theirs = run(alone, PROMPTS[:6], params)
    assert said(ours) == said(theirs)
    for ours_each, theirs_each in ((ours[2], theirs[2]), (ours[5], theirs[5])):
        assert scores(ours_each) == pytest.approx(scores(theirs_each), abs=1e-3)
        total = ours_each.outputs[0].cumulative_logprob
        assert total == pytest.approx(sum(scores(ours_each)[-12:]))
    assert len(scores(ours[2])) == len(ours[2].prompt_token_ids) - 1 + 12


def test_deltas_add_up_to_the_whole(pair) -> None:
    pieces: list[str] = []
    delta = GREEDY.replace(output_kind=RequestOutputKind.DELTA)
    run(pair, PROMPTS[:1], delta, lambda output: pieces.append(output.outputs[0].text))
    assert len(pieces) > 2
    assert "".join(pieces) == run(pair, PROMPTS[:1], GREEDY)[0].outputs[0].text


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="structured outputs are not installed"
)
def test_structured_outputs_are_kept_to(pair) -> None:
    wanted = StructuredOutputsParams(choice=("yes", "no"))
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=wanted)
    pair.prepare_grammars()
    outputs = run(pair, PROMPTS[:4], params)
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def test_what_can_never_be_served_is_refused_and_harms_nobody(pair) -> None:
    def submit(name: str, prompt: str = "a prompt", **changes: Any) -> None:
        params = LONG.replace(**changes)
        pair.submit(pair.inputs.process(name, prompt, params, now_s=pair.clock.now_s()))

    submit("r0")
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        submit("r1", max_tokens=5000)
    outputs = []
    while pair.has_unfinished:
        outputs += pair.step()
    assert len(outputs[-1].outputs[0].token_ids) == 300


def test_a_request_may_be_ended_early(pair) -> None:
    made = [
        pair.inputs.process(name, name, LONG, now_s=pair.clock.now_s()) for name in ("r0", "r1")
    ]
    for submission in made:
        pair.submit(submission)
    assert pair.abort(made[0].request_id)
    assert not pair.abort("nobody")
    last = {}
    while pair.has_unfinished:
        last |= {output.request_id: output for output in pair.step()}
    assert last["r0"].outputs[0].finish_reason == "cancelled"
    assert last["r1"].outputs[0].finish_reason == "length"


def test_a_request_that_was_ended_is_not_begun_again(pair) -> None:
    def end(output: RequestOutput) -> None:
        request_id = output.engine_id
        if not output.finished and pair.where(request_id) is not None:
            os.kill(pid_with_work(pair, request_id), signal.SIGKILL)
            assert pair.abort(request_id)

    output = run(pair, PROMPTS[:1], LONG, end)[0]
    assert output.outputs[0].finish_reason == "cancelled"
    assert 0 < len(output.outputs[0].token_ids) < 300


def test_each_replica_shows_its_schedule(pair) -> None:
    assert [schedule.steps for schedule in pair.schedules()] == [[], []]
    outputs = run(pair, PROMPTS[:6], GREEDY)
    schedules = pair.schedules()
    assert all(schedule.steps for schedule in schedules)
    shown = {c.request_id for each in schedules for step in each.steps for c in step.cells}
    assert len(shown) == len(outputs)


def test_prompts_that_begin_alike_meet_where_that_is_cached(pair) -> None:
    pair.flush_prefix_cache()
    prefix = "a beginning that they share " * 8
    first = run(pair, [prefix + "one"], GREEDY)
    outputs = run(pair, [prefix + "two", prefix + "three"], GREEDY)
    assert first[0].num_cached_tokens == 0
    assert min(output.num_cached_tokens for output in outputs) > 150
    num_pages, num_host_pages = pair.flush_prefix_cache()
    assert num_pages > 10
    assert num_host_pages == 0
    assert run(pair, [prefix + "two"], GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_replica_that_dies_costs_time_and_no_token(pair, alone, kind) -> None:
    expected = [output.outputs[0].token_ids for output in run(alone, PROMPTS[:6], LONG)]
    lives = [replica.life for replica in pair.replicas]
    told: dict[str, list[int]] = {}
    killed: list[int] = []

    def take(output: RequestOutput) -> None:
        token_ids = output.outputs[0].token_ids
        before = told.get(output.request_id, []) if kind is RequestOutputKind.DELTA else []
        told[output.request_id] = before + token_ids
        if not killed and len(told[output.request_id]) > 5:
            killed.append(pid_with_work(pair, output.engine_id))
            os.kill(killed[0], signal.SIGKILL)

    outputs = run(pair, PROMPTS[:6], LONG.replace(output_kind=kind), take)
    assert [told[f"r{index}"] for index in range(6)] == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    until(pair, lambda: sum(r.life for r in pair.replicas) == sum(lives) + 1)


def test_the_request_that_replicas_die_of_is_found_and_its_neighbours_go_on(
    model: Path, alone
) -> None:
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    prompts = ["fatal", *PROMPTS[:5]]
    expected = said(run(alone, prompts, LONG))
    config = EngineConfig(model=str(model), data_parallel_size=2, **ARGUMENTS)
    engine = ReplicatedEngine(config)
    try:
        killed: set[int] = set()

        def kill(output: RequestOutput) -> None:
            if output.request_id == "r0" and engine.where(output.engine_id) is not None:
                process_id = pid_with_work(engine, output.engine_id)
                if process_id not in killed:
                    killed.add(process_id)
                    os.kill(process_id, signal.SIGKILL)

        outputs = run(engine, prompts, LONG, kill)
        assert isinstance(outputs[0].error, QuarantinedError)
        assert outputs[0].outputs[0].finish_reason == "failed"
        assert said(outputs[1:]) == expected[1:]
        assert len(killed) == SUSPECT_DEATHS + 1
        with pytest.raises(QuarantinedError, match="refused"):
            run(engine, ["fatal"], GREEDY)
        assert len(run(engine, ["harmless"], GREEDY)[0].outputs[0].token_ids) == 20
    finally:
        engine.close()


def test_without_any_replica_requests_wait_for_the_first_that_is_back(pair, alone) -> None:
    expected = said(run(alone, PROMPTS[:3], GREEDY))
    for replica in pair.replicas:
        os.kill(replica.process_id, signal.SIGKILL)
    until(pair, lambda: not any(replica.ready for replica in pair.replicas))
    assert said(run(pair, PROMPTS[:3], GREEDY)) == expected


def test_replicas_that_die_too_often_are_given_up(
    model: Path, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    monkeypatch.setattr(replica_module, "MAX_DEATHS", 1)
    engine = ReplicatedEngine(EngineConfig(model=str(model), data_parallel_size=2, **ARGUMENTS))
    try:
        first, second = engine.replicas
        os.kill(first.process_id, signal.SIGKILL)
        until(engine, lambda: first.ready is None)
        assert said(run(engine, PROMPTS[:4], GREEDY)) == said(run(alone, PROMPTS[:4], GREEDY))
        assert engine.load().num_total_pages == second.report.load.num_total_pages
        assert engine.is_usable
        with pytest.raises(EngineDeadError, match="no replica is left: replica 1 died 1 times"):
            run(engine, PROMPTS[:1], LONG, lambda _: os.kill(second.process_id, signal.SIGKILL))
        assert not engine.is_usable
    finally:
        engine.close()


@contextlib.asynccontextmanager
async def in_an_event_loop(
    pair: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncEngine]:
    """A front over the replicas, which stay for the other tests."""
    from octavo.engine import async_engine

    monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: pair)
    engine = AsyncEngine()
    yield engine
    engine._stopping = True  # its thread ends, and the replicas do not
    with engine._wake:
        engine._wake.notify()
    engine.engine.wake()
    assert engine._thread is not None
    await asyncio.to_thread(engine._thread.join)


async def test_an_id_that_was_cancelled_may_be_given_again_at_once(
    pair, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while one replica dies and starts again: ids are the parent's."""
    prompts = [f"the {n}th prompt, which differs" for n in range(60)]
    expected = [output.outputs[0].token_ids for output in run(alone, prompts, GREEDY)]
    killed: list[int] = []
    seen: list[str] = []

    async def again(engine: AsyncEngine, number: int) -> list[int]:
        name = f"x{number % 5}"
        first = engine.generate("an old one", LONG, name)
        begun = await anext(first)
        if number == 30:
            killed.append(pid_with_work(pair, begun.engine_id))
            os.kill(killed[0], signal.SIGKILL)
        await first.aclose()
        async for output in engine.generate(prompts[number], GREEDY, name):
            assert (output.request_id, output.prompt) == (name, prompts[number])
        seen.extend((begun.engine_id, output.engine_id))
        return output.outputs[0].token_ids

    async with in_an_event_loop(pair, monkeypatch) as engine, asyncio.timeout(WAIT_S):
        assert await asyncio.gather(*(again(engine, n) for n in range(60))) == expected
    assert killed
    assert len(set(seen)) == 120


async def test_abort_ends_all_that_its_owner_has_under_an_id_on_every_replica(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(engine: AsyncEngine, owner: str, begun: asyncio.Barrier) -> str | None:
        params = LONG.replace(output_kind=RequestOutputKind.DELTA)
        stream = engine.generate("a prompt", params, "x", owner=owner)
        last = await anext(stream)
        await begun.wait()
        async for output in stream:
            last = output
        return last.outputs[0].finish_reason

    async with in_an_event_loop(pair, monkeypatch) as engine, asyncio.timeout(WAIT_S):
        begun = asyncio.Barrier(9)
        ends = [asyncio.create_task(end(engine, owner, begun)) for owner in "aaaabbbb"]
        await begun.wait()
        assert not await engine.abort("x", "c")
        assert await engine.abort("x", "a")
        assert await asyncio.gather(*ends) == ["cancelled"] * 4 + ["length"] * 4


@pytest.mark.parametrize(
    ("how_many", "kind"),
    [("one", RequestOutputKind.DELTA), ("all", RequestOutputKind.CUMULATIVE)],
)
def test_a_replica_that_hangs_is_killed_and_its_streams_go_on(
    pair, alone, monkeypatch: pytest.MonkeyPatch, caplog, how_many: str, kind
) -> None:
    monkeypatch.setattr(pair.hang_watch, "_timeout_s", HANG_S)
    expected = [output.outputs[0].token_ids for output in run(alone, PROMPTS[:6], LONG)]
    lives = [replica.life for replica in pair.replicas]
    told: dict[str, list[int]] = {}
    stopped: list[int] = []

    def take(output: RequestOutput) -> None:
        token_ids = output.outputs[0].token_ids
        before = told.get(output.request_id, []) if kind is RequestOutputKind.DELTA else []
        told[output.request_id] = before + token_ids
        if not stopped and len(told[output.request_id]) > 5:
            hung = [pair.where(output.engine_id)] if how_many == "one" else pair.replicas
            stopped.extend(replica.process_id for replica in hung)
            for process_id in stopped:
                os.kill(process_id, signal.SIGSTOP)

    outputs = run(pair, PROMPTS[:6], LONG.replace(output_kind=kind), take)
    assert [told[f"r{index}"] for index in range(6)] == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    until(pair, lambda: all(replica.ready for replica in pair.replicas))
    assert sum(replica.life for replica in pair.replicas) == sum(lives) + len(stopped)
    assert "it hung: nothing was heard of it for" in caplog.text
    assert not any(is_there(process_id) for process_id in stopped)


def test_a_replica_that_hangs_while_it_starts_is_started_again(
    pair, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.hang_watch, "_timeout_s", HANG_S)
    # Stopped before it is seen to speak, it has the time that a start has.
    monkeypatch.setattr("octavo.engine.replicas.hang_watch.START_S", 5 * HANG_S)
    first = pair.replicas[0]
    life, num_heard = first.life, first.num_heard
    os.kill(first.process_id, signal.SIGKILL)
    until(pair, lambda: first.life > life and first.num_heard > num_heard)
    assert first.ready is None
    os.kill(first.process_id, signal.SIGSTOP)
    assert said(run(pair, PROMPTS[:4], GREEDY)) == said(run(alone, PROMPTS[:4], GREEDY))
    until(pair, lambda: first.life == life + 2 and first.ready)


def test_a_hung_replica_holds_up_neither_new_requests_nor_who_sends_them(
    pair, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not read fills its socket: nobody may wait for that."""
    prompts = [[20 + n] * 40 for n in range(100)]
    wordy = GREEDY.replace(stop=[chr(9000 + n) * 256 for n in range(16)])  # 12 kB of each request
    expected = said(run(alone, prompts[:4], wordy))
    first, second = pair.replicas
    os.kill(first.process_id, signal.SIGSTOP)
    until(pair, lambda: first.is_quiet)
    assert said(run(pair, prompts[:4], wordy)) == expected  # at once: nobody was killed for it
    assert first.ready is not None
    monkeypatch.setattr(second, "is_quiet", True)  # as if both were: then either is as good
    made = [
        pair.inputs.process(f"q{index}", prompt, wordy, now_s=pair.clock.now_s())
        for index, prompt in enumerate(prompts)
    ]
    for submission in made:
        pair.submit(submission)
    assert {pair.where(submission.request_id).index for submission in made} == {0, 1}
    monkeypatch.setattr(pair.hang_watch, "_timeout_s", HANG_S)
    last = {}
    while pair.has_unfinished:
        last |= {output.request_id: output for output in pair.step()}
    assert {len(output.outputs[0].token_ids) for output in last.values()} == {20}
    assert said([last[f"q{index}"] for index in range(4)]) == expected


def test_an_engine_that_hangs_in_a_step_is_killed_though_its_process_lives(
    pair, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its process says of its turns is heard."""
    first = pair.replicas[0]
    life = first.life
    pair.hang_watch.look(0.0)
    monkeypatch.setattr(first, "stuck_s", pair.hang_watch._timeout_s - 1)
    pair.hang_watch.look(0.0)
    assert first.process.poll() is None
    monkeypatch.setattr(first, "stuck_s", pair.hang_watch._timeout_s)
    pair.hang_watch.look(0.0)
    assert said(run(pair, PROMPTS[:4], GREEDY)) == said(run(alone, PROMPTS[:4], GREEDY))
    until(pair, lambda: first.life == life + 1 and first.ready)


async def test_streams_of_an_event_loop_and_a_replica_that_is_slow(
    pair, alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pause that is shorter than a hang harms nobody, and the server is no less alive for it."""
    expected = [output.outputs[0].text for output in run(alone, PROMPTS[:4], LONG)]
    stopped: list[int] = []
    async with in_an_event_loop(pair, monkeypatch) as engine:
        with (tmp_path / "stacks").open("w") as stacks:
            watchdog = Watchdog(engine, 5.0, file=stacks)

            async def read(prompt: str, name: str) -> str:
                text = ""
                params = LONG.replace(output_kind=RequestOutputKind.DELTA)
                async for output in engine.generate(prompt, params, name):
                    text += output.outputs[0].text
                    if text and name == "r0" and not stopped:
                        stopped.append(pid_with_work(pair, output.engine_id))
                        os.kill(stopped[0], signal.SIGSTOP)
                return text

            reads = [asyncio.create_task(read(PROMPTS[n], f"r{n}")) for n in range(4)]
            async with asyncio.timeout(WAIT_S):
                while not (stopped and pair.has_unfinished):
                    await asyncio.sleep(0.05)
                num_turns = engine.num_turns
                while engine.num_turns < num_turns + 3:
                    assert not watchdog.look()
                    await asyncio.sleep(0.05)
                os.kill(stopped[0], signal.SIGCONT)
                assert await asyncio.gather(*reads) == expected
        assert await engine.flush_prefix_cache() != (0, 0)


def test_processes_go_with_their_parent(model: Path) -> None:
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    program = (
        "import sys, time\n"
        "from octavo import LLM\n"
        f"llm = LLM({str(model)!r}, progress=False, data_parallel_size=2, **{ARGUMENTS!r})\n"
        "print(*(replica.process_id for replica in llm.engine.replicas), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
    end_s = time.monotonic() + WAIT_S
    while any(is_there(child) for child in children):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def is_there(process_id: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked about does not."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_an_llm_of_several_replicas(model: Path, alone) -> None:
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    llm = LLM(str(model), progress=False, data_parallel_size=2, **ARGUMENTS)
    try:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert said(outputs) == said(run(alone, PROMPTS, GREEDY))
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            llm.generate(["fine", [10**6]], GREEDY, use_tqdm=False)
        assert llm.engine.num_rows == 2 * ARGUMENTS["max_num_seqs"]
    finally:
        llm.close()


def test_what_cannot_be_built_is_said_as_by_one_engine(tmp_path: Path, model: Path) -> None:
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    with pytest.raises(ModelLoadError, match="nowhere"):
        ReplicatedEngine(EngineConfig(model=str(tmp_path / "nowhere"), data_parallel_size=2))
    with pytest.raises(InvalidConfigError, match="max_model_len = 4096"):
        ReplicatedEngine(EngineConfig(model=str(model), data_parallel_size=2, max_model_len=4096))


def test_more_replicas_than_cores_are_refused(model: Path) -> None:
    size = num_cores() + 1
    with pytest.raises(
        InvalidConfigError, match=f"data_parallel_size = {size} is not allowed: 1 to"
    ):
        ReplicatedEngine(EngineConfig(model=str(model), data_parallel_size=size, **ARGUMENTS))


def test_what_watches_steps_wants_them_in_its_own_process(pair, alone) -> None:
    assert any_engine.engine_of_this_process(alone, "record", "a file") is alone
    with pytest.raises(InvalidConfigError, match="record = 'a file' is not allowed"):
        any_engine.engine_of_this_process(pair, "record", "a file")


@pytest.mark.parametrize(
    ("cores", "size", "parts"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([3, 5, 8, 9], 2, [[3, 5], [8, 9]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]]),
        ([0], 2, [(), ()]),
    ],
)
def test_cores_are_dealt_out_by_neighbourhood(cores, size, parts) -> None:
    assert split(cores, size) == parts


@pytest.mark.parametrize(
    ("environ", "index", "num_devices", "visible"),
    [
        ({}, 0, 1, "0"),
        ({}, 1, 2, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "4,6,7"}, 1, 1, "6"),
        ({"CUDA_VISIBLE_DEVICES": "4,6,7"}, 1, 2, "7"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, 1, ""),
    ],
)
def test_gpus_are_dealt_out_of_those_that_may_be_seen(environ, index, num_devices, visible) -> None:
    assert devices_of(index, num_devices, environ) == {"CUDA_VISIBLE_DEVICES": visible}
