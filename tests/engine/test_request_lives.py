"""Random lives of requests whose clients' ids collide: each stream has its own prompt's tokens.

The front and the engine are the real ones over a tiny model. Their threads are not: the machine
takes the turns of the engine's thread itself and says when a prompt has been tokenized, so that an
example that fails is found again and made smaller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from octavo.engine.errors import InvalidRequestError, OctavoError, OverloadedError
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy

LABELS: tuple[Any, ...] = ("a", "a#0", "a#1", "b", None)
"""Few, so that they collide: also with what sequences of one another might be called."""
OWNERS = ("", "x")
GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
GATED = SamplingParams(seed=5, max_tokens=40, structured_outputs={"regex": "[a-z]{12}-[0-9]{4}"})
KINDS = {
    "greedy": GREEDY,
    "two": SAMPLED.replace(n=2),
    "gated": GATED,
    "three gated": GATED.replace(n=3),
    "scored": GREEDY.replace(logprobs=1, max_tokens=20),
}
PROMPTS = [
    [random.Random(number).randrange(16, 272) for _ in range(size)]
    for number, size in enumerate((3, 40, 40, 70))
]
TOO_LARGE = GREEDY.replace(max_tokens=430)
"""More tokens than the pool has places: refused when the engine takes it, not at the door."""
MAX_TURNS = 2000


class HeldWork(ThreadPoolExecutor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self._held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, lambda: work(*args, **options)))
        return future

    def run(self) -> None:
        held, self._held = self._held, []
        for future, work in held:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class Faults:
    """Stands between the loop and what it calls, to fail once where it is told to."""

    def __init__(self, engine: Any) -> None:
        self.step: str | None = None
        self.refuses_in = 0
        """Sequences until the scheduler refuses one; 0 refuses none."""
        self.num_refused = 0
        self.swaps = True
        self._inner, self._add = engine.executor, engine.core.add
        engine.executor = engine.core.executor = self
        engine.core.add = self.add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: Any) -> Any:
        self._fail("dispatch")
        return self._inner.dispatch(plan)

    def result(self, handle: Any) -> Any:
        self._fail("result")
        return self._inner.result(handle)

    def add(self, request: Any) -> None:
        if self.refuses_in:
            self.refuses_in -= 1
            if not self.refuses_in:
                self.num_refused += 1
                raise OverloadedError("full", 1.0)
        self._add(request)

    def _fail(self, stage: str) -> None:
        if self.step == stage:
            self.step = None
            raise RuntimeError("out of memory")


@dataclass(eq=False)
class Life:
    """One submission, and all that its stream gave."""

    label: str | None
    owner: str
    prompt: list[int]
    kind: str
    output_kind: RequestOutputKind
    params: SamplingParams
    reader: asyncio.Task[None] | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    num_ends: int = 0
    error: Exception | None = None
    is_aborted: bool = False
    must_be_cancelled: bool = False
    is_left: bool = False

    def take(self, output: RequestOutput) -> None:
        assert self.num_ends == 0, "an output after the last"
        assert output.prompt_token_ids == self.prompt, "another's prompt"
        assert output.request_id == (self.label or output.engine_id)
        self.outputs.append(output)
        assert len({each.engine_id for each in self.outputs}) == 1
        new = [completion.token_ids for completion in output.outputs]
        if self.output_kind is RequestOutputKind.DELTA and self.token_ids:
            new = [before + more for before, more in zip(self.token_ids, new, strict=True)]
        self.token_ids = new
        self.num_ends += output.finished


def tokens_alone(engine: Any, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine.submit(engine.inputs.process(None, prompt, params, now_s=engine.clock.now_s()))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return [completion.token_ids for completion in outputs[-1].outputs]


@pytest.fixture(scope="module")
def built(tiny_model: Path) -> Iterator[Any]:
    """An engine whose pool four rows outgrow, and that copies victims out or computes them again
    as it is told."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    faults: Faults

    def make(parameters: Parameters) -> Policy:
        whole = POLICIES["fcfs"](parameters)
        return dataclasses.replace(whole, swap_or_recompute=lambda *_: faults.swaps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "fcfs-told", make)
        engine = Engine(
            EngineConfig(
                model=str(tiny_model), max_num_seqs=4, max_num_batched_tokens=32, num_kv_pages=20,
                block_size=16, host_kv_memory_bytes=1 << 20, warm_up="coarse",
                fail_on_compile=True, scheduling_policy="fcfs-told",
            ),
            incarnation="test",
        )  # fmt: skip
    faults = Faults(engine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def want(built: Any) -> dict[tuple[int, str], list[list[int]]]:
    """Each prompt's tokens, computed alone."""
    found = {
        (place, kind): tokens_alone(built, prompt, params)
        for place, prompt in enumerate(PROMPTS)
        for kind, params in KINDS.items()
    }
    assert len({repr(token_ids) for token_ids in found.values()}) > 0.9 * len(found)
    return found


def machine(built: Any, want: dict[tuple[int, str], list[list[int]]]) -> Any:
    """A machine over the engine."""

    class Lives(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            from octavo.engine import async_engine

            self.loop = asyncio.new_event_loop()
            self.work = HeldWork()
            self.loop.set_default_executor(self.work)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(async_engine, "open_engine", lambda config, progress: built)
                self.front = async_engine.AsyncEngine()
            self.front._text_threads = self.work
            self.front._thread = threading.current_thread()
            self.front._loop = self.loop
            self.faults: Faults = built.executor
            self.faults.num_refused = 0
            self.lives: list[Life] = []
            self.num_bugs = built.core.num_bugs

        # What clients do.

        @rule(
            label=st.sampled_from(LABELS),
            owner=st.sampled_from(OWNERS),
            place=st.integers(0, len(PROMPTS) - 1),
            kind=st.sampled_from(sorted(KINDS)),
            output_kind=st.sampled_from(RequestOutputKind),
        )
        def submit(
            self, label: str | None, owner: str, place: int, kind: str,
            output_kind: RequestOutputKind,
        ) -> None:  # fmt: skip
            self._begin(Life(label, owner, PROMPTS[place], kind, output_kind, KINDS[kind]))

        @rule(label=st.sampled_from(LABELS), owner=st.sampled_from(OWNERS))
        def submit_what_never_fits(self, label: str | None, owner: str) -> None:
            kind = RequestOutputKind.DELTA
            self._begin(Life(label, owner, PROMPTS[0], "greedy", kind, TOO_LARGE))

        @rule(place=st.integers(1, 3))
        def refuse_a_sequence(self, place: int) -> None:
            self.faults.refuses_in = place

        @rule(which=st.integers(0, 20))
        def leave(self, which: int) -> None:
            life = self._live(which)
            if life is not None and life.reader is not None:
                life.is_left = True
                life.reader.cancel()
                self._let_the_loop_run()

        @rule(which=st.integers(0, 20))
        def leave_and_come_back_at_once(self, which: int) -> None:
            life = self._live(which)
            if life is not None and life.reader is not None:
                life.is_left = True
                life.reader.cancel()
                kind = RequestOutputKind.DELTA
                self._begin(Life(life.label, life.owner, PROMPTS[1], "greedy", kind, GREEDY))

        @rule(which=st.integers(0, 20))
        def abort_one_of_those_in_flight(self, which: int) -> None:
            life = self._live(which)
            if life is not None and life.label is not None:
                self.abort(life.label, life.owner)

        @rule(label=st.sampled_from(LABELS[:-1]), owner=st.sampled_from(OWNERS))
        def abort(self, label: str, owner: str) -> None:
            theirs = [
                life
                for life in self.lives
                if (life.label, life.owner) == (label, owner) and self._is_open(life)
            ]
            found = self.loop.run_until_complete(self.front.abort(label, owner))
            assert found == bool(theirs)
            for life in theirs:
                life.is_aborted = True
                # One that has said nothing yet cannot be at its end.
                has_spoken = life.outputs or life.output_kind is RequestOutputKind.FINAL_ONLY
                life.must_be_cancelled |= not has_spoken

        # What the rest of the engine does.

        @rule(num_turns=st.integers(1, 12))
        def take_turns(self, num_turns: int) -> None:
            for _ in range(num_turns):
                self._take_a_turn()

        @rule()
        def tokenize(self) -> None:
            self.work.run()
            self._let_the_loop_run()

        @rule(stage=st.sampled_from(["dispatch", "result"]))
        def fail_a_step(self, stage: str) -> None:
            # Not those on trial again: they would be found guilty.
            if not built.core.recovery._suspects.is_trying:
                self.faults.step = stage

        @rule(swaps=st.booleans())
        def choose_how_to_preempt(self, swaps: bool) -> None:
            self.faults.swaps = swaps

        @invariant()
        def each_has_its_own_tokens(self) -> None:
            for life in getattr(self, "lives", ()):
                expected = want[PROMPTS.index(life.prompt), life.kind]
                assert len(life.token_ids) in (0, len(expected))
                for found, whole in zip(life.token_ids, expected, strict=False):
                    assert found == whole[: len(found)], life

        def teardown(self) -> None:
            try:
                self._let_all_end()
                self._check_all()
            finally:
                for life in self.lives:
                    if life.reader is not None:
                        life.reader.cancel()
                self._let_the_loop_run()
                self.loop.close()

        def _let_all_end(self) -> None:
            self.faults.step, self.faults.refuses_in = None, 0
            for _ in range(MAX_TURNS):
                self.work.run()
                self._take_a_turn()
                if not (self._num_open() or built.has_unfinished or self.front._commands):
                    break

        def _check_all(self) -> None:
            self.each_has_its_own_tokens()
            for life in self.lives:
                self._check_the_end(life)
            assert len(self.front._streams) == len(self.front._streams._by_label) == 0
            assert not built.has_unfinished
            assert built.masks.num_live == 0
            assert built.core.num_bugs == self.num_bugs
            assert not built.core.recovery._suspects.is_trying
            built.check_integrity()
            load = built.load()
            assert load.num_free_pages == load.num_total_pages
            ids = [life.outputs[0].engine_id for life in self.lives if life.outputs]
            assert len(ids) == len(set(ids))
            refused = [life for life in self.lives if isinstance(life.error, OverloadedError)]
            assert len(refused) <= self.faults.num_refused

        def _check_the_end(self, life: Life) -> None:
            if life.is_left:
                return
            assert life.num_ends == 1, life
            if life.error is not None:
                is_refused = isinstance(life.error, OverloadedError)
                never_fits = isinstance(life.error, InvalidRequestError)
                assert is_refused or (never_fits and life.params is TOO_LARGE), life.error
                assert not life.outputs
                return
            expected = want[PROMPTS.index(life.prompt), life.kind]
            reasons = {completion.finish_reason for completion in life.outputs[-1].outputs}
            if "cancelled" in reasons:
                assert life.is_aborted, life
            else:
                assert life.token_ids == expected
                assert not life.must_be_cancelled, life

        # How.

        def _begin(self, life: Life) -> None:
            async def read() -> None:
                stream = self.front.generate(
                    life.prompt, life.params.replace(output_kind=life.output_kind), life.label,
                    owner=life.owner,
                )  # fmt: skip
                try:
                    async for output in stream:
                        life.take(output)
                except OctavoError as error:
                    life.num_ends += 1
                    life.error = error
                finally:
                    await stream.aclose()

            life.reader = self.loop.create_task(read())
            self.lives.append(life)
            self._let_the_loop_run()

        def _is_open(self, life: Life) -> bool:
            return life.reader is not None and not life.reader.done()

        def _num_open(self) -> int:
            return sum(map(self._is_open, self.lives))

        def _live(self, which: int) -> Life | None:
            found = [life for life in self.lives if self._is_open(life)]
            return found[which % len(found)] if found else None

        def _take_a_turn(self) -> None:
            self.front._take_in(60.0)
            self.front._report(built.advance())
            self._let_the_loop_run()

        def _let_the_loop_run(self) -> None:
            for _ in range(12):
                self.loop.run_until_complete(asyncio.sleep(0))

    return Lives


def test_streams_have_their_own_tokens_and_end_once_whatever_ids_they_share(
    built: Any, want: dict[tuple[int, str], list[list[int]]]
) -> None:
    usual = settings.default
    assert usual is not None
    run_state_machine_as_test(
        machine(built, want), settings=settings(usual, max_examples=usual.max_examples // 2)
    )
