"""A commit that fails while preempted requests are computed again takes back no delivered token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(
    temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1, prompt_logprobs=1
)
LOW = [list(range(20 + 7 * i, 20 + 7 * i + 24)) for i in range(4)]
HIGH = [list(range(60 + 5 * i, 60 + 5 * i + 40)) for i in range(2)]
SETTINGS = {
    "overlapped": {"overlap": True, "num_decode_steps": 1},
    "one step at a time": {"overlap": False, "num_decode_steps": 1},
    "several steps a dispatch": {"overlap": True, "num_decode_steps": 4},
}


@pytest.fixture(scope="module", params=SETTINGS)
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Pages for about half of the requests, and chunks shorter than what is computed again."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(tiny_model), scheduling_policy="priority", max_num_seqs=8,
            max_num_batched_tokens=16, num_kv_pages=26, block_size=8, watermark=0.0,
            max_model_len=128, fail_on_compile=True, warm_up="coarse", **SETTINGS[request.param],
        )
    )  # fmt: skip
    yield engine
    engine.close()


Told = dict[str, tuple[list[int], list[Any], list[Any], str]]


def run(engine: Any) -> Told:
    """What low-priority requests are told, and high-priority ones that come when those have spoken:
    tokens, the tokens that have scores, those of the prompt that have, and the end."""
    last: dict[str, Any] = {}

    def submit(name: str, prompt: list[int], priority: int) -> None:
        now_s = engine.clock.now_s()
        engine.submit(engine.inputs.process(name, prompt, PARAMS, now_s=now_s, priority=priority))

    for index, prompt in enumerate(LOW):
        submit(f"low {index}", prompt, 3)
    waiting = list(enumerate(HIGH))
    while engine.has_unfinished:
        for output in engine.step():
            before = last.get(output.request_id)
            assert before is None or not before.finished, "an output after the last"
            last[output.request_id] = output
        if waiting and min((len(o.outputs[0].token_ids) for o in last.values()), default=0) > 9:
            index, prompt = waiting.pop()
            submit(f"high {index}", prompt, 0)
    assert len(last) == len(LOW) + len(HIGH)
    return {
        name: (
            list(output.outputs[0].token_ids),
            [list(row) for row in output.outputs[0].logprobs],
            [row and list(row) for row in output.prompt_logprobs],
            output.outputs[0].finish_reason,
        )
        for name, output in last.items()
    }


@pytest.fixture(scope="module")
def undisturbed(engine: Any) -> Told:
    told = run(engine)
    for token_ids, scored, scored_prompt, reason in told.values():
        assert (len(token_ids), len(scored), reason) == (30, 30, "length")
        assert len(scored_prompt) in map(len, (*LOW, *HIGH))
    return told


class Counter:
    """Has a method fail once it has done its work, at one of its calls.

    Attributes:
        marked: calls at which `marks` held.
    """

    def __init__(self, method: Callable[..., Any], marks: Callable[..., bool]) -> None:
        self._method, self._marks = method, marks
        self.begin(0)

    def begin(self, number: int) -> None:
        """Counts anew, to fail at this number; 0 is never."""
        self.num_calls, self.marked, self._number = 0, list[int](), number

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self._marks(*args):
            self.marked.append(self.num_calls)
        result = self._method(*args)
        if self.num_calls == self._number:
            raise AssertionError("a bug")
        return result


def computes_again(plan: Any, *args: Any) -> bool:
    """Whether the plan holds a chunk that samples nothing, of a request that has spoken."""
    return any(not row.samples and row.request.output_token_ids for row in plan.prefill_rows)


def ends(entry: Any, *args: Any) -> bool:
    """Whether the request has one token to go."""
    return len(entry.request.output_token_ids) >= PARAMS.max_tokens - 1


def sweep(engine: Any, calls: Counter, undisturbed: Told, stride: int) -> None:
    """Fails some calls, one a run."""
    num_preemptions = engine.scheduler.load().num_preemptions
    assert run(engine) == undisturbed
    assert engine.scheduler.load().num_preemptions > num_preemptions
    assert calls.marked
    numbers = [*calls.marked[:6], *range(1, calls.num_calls, stride)]
    num_faults = 0
    for number in numbers:
        num_bugs = engine.core.num_bugs
        calls.begin(number)
        assert run(engine) == undisturbed, number
        engine.check_integrity()
        # How many calls a run takes depends on how busy the machine is.
        num_faults += calls.num_calls >= number
        assert engine.core.num_bugs == num_bugs + (calls.num_calls >= number)
    assert num_faults > len(numbers) // 2


def test_a_commit_that_fails_repeats_and_loses_no_token(
    engine: Any, undisturbed: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter(engine.scheduler.commit, computes_again)
    monkeypatch.setattr(engine.scheduler, "commit", calls)
    sweep(engine, calls, undisturbed, 7)


def test_a_commit_that_fails_half_way_repeats_and_loses_no_token(
    engine: Any, undisturbed: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = engine.scheduler._committer
    calls = Counter(committer._append, ends)
    monkeypatch.setattr(committer, "_append", calls)
    sweep(engine, calls, undisturbed, 5)
